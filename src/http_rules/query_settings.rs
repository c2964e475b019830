//! The settings of [`HttpPolicy`] by which parameters of the query are not in the key.

use super::settings::HttpPolicy;

impl HttpPolicy {
    /// Query parameters that are not in the key, by name; with a `*` at its end a name stands for all that begin like it.
    /// `/shoes?utm_source=mail` and `/shoes` then have one response and one load.
    /// [`TRACKING_PARAMETERS`](crate::http::TRACKING_PARAMETERS) are the usual ones. Can be called several times, and adds.
    /// Defaults to none: each query is another key.
    ///
    /// **The inner service does not see these parameters**: the guard removes them from the URI of a request that it looks
    /// up, so one client's `utm_source=<script>` is in no page that others receive. With the feature `axum` it removes them
    /// from `OriginalUri`, too: a service of axum needs that feature. So list no parameter that a handler, or a layer inside
    /// the guard, reads. Requests that bypass the cache, other methods, and all requests of a guard that is switched off or
    /// in shadow mode are not changed.
    ///
    /// Names are compared after percent-decoding, in which a `+` is a space, and are case-sensitive. What stays of a query
    /// keeps its form and order. Empty parameters go, as in `?&&a=1`, and so does the `?` of a query without parameters.
    /// Unsafe methods, `Location`, [`invalidate_path`](crate::StampedeGuard::invalidate_path) and
    /// [`http_key`](crate::StampedeGuard::http_key) follow the same rules. Guards that share a store should agree about
    /// them: otherwise an invalidation by one may not reach the entries of another.
    ///
    /// [`PolicyBuilder::build`](crate::PolicyBuilder::build) refuses an empty name, one with a `*` before its end, and one
    /// with `&`, `=`, `#`, `?`, `%` or a control character.
    ///
    /// # Examples
    ///
    /// ```
    /// use http::Request;
    /// use stampede_guard::http::{HttpPolicy, TRACKING_PARAMETERS};
    ///
    /// let policy = HttpPolicy::default().ignore_query(TRACKING_PARAMETERS).ignore_query(["ref"]);
    /// let key = |uri: &str| Ok::<_, http::Error>(policy.cache_key(&Request::get(uri).body(())?));
    /// let shared = key("http://shop.example/shoes?size=42")?;
    /// assert_eq!(key("http://shop.example/shoes?utm_source=mail&size=42&ref=7")?, shared);
    /// assert_ne!(key("http://shop.example/shoes?size=43")?, shared);
    /// # Ok::<(), http::Error>(())
    /// ```
    #[must_use]
    pub fn ignore_query<N: AsRef<str>>(mut self, names: impl IntoIterator<Item = N>) -> Self {
        self.requests.change_query(|rules| add_names(&mut rules.ignored, names));
        self
    }

    /// The only query parameters that are in the key, by name; all others are
    /// [ignored](Self::ignore_query), and the inner service does not see them. With an empty list no parameter is in the key:
    /// for static pages. Can be called several times, and adds. Defaults to all parameters.
    ///
    /// It bounds the number of keys: a client that invents parameters (`?x=1`, `?x=2`) causes no loads and no entries. List
    /// each parameter that a handler reads. A parameter that [`ignore_query`](Self::ignore_query) names too is not in the
    /// key. The names are as there, and [`PolicyBuilder::build`](crate::PolicyBuilder::build) refuses the same.
    ///
    /// # Examples
    ///
    /// ```
    /// use http::Request;
    /// use stampede_guard::http::HttpPolicy;
    ///
    /// let policy = HttpPolicy::default().only_query(["page", "filter_*"]);
    /// let key = |uri: &str| Ok::<_, http::Error>(policy.cache_key(&Request::get(uri).body(())?));
    /// let shared = key("http://shop.example/shoes?page=2&filter_size=42")?;
    /// assert_eq!(key("http://shop.example/shoes?page=2&x=1&filter_size=42")?, shared);
    /// # Ok::<(), http::Error>(())
    /// ```
    #[must_use]
    pub fn only_query<N: AsRef<str>>(mut self, names: impl IntoIterator<Item = N>) -> Self {
        self.requests.change_query(|rules| add_names(rules.only.get_or_insert_default(), names));
        self
    }

    /// Whether the query parameters of the key are sorted by name: `?b=2&a=1` and `?a=1&b=2` then have one response. The
    /// inner service sees them sorted. Parameters of one name keep their order, as in `?tag=b&tag=a`. Defaults to no.
    ///
    /// The names are compared, and requests are changed or not, as for [`ignore_query`](Self::ignore_query). **A handler for
    /// which the order of different parameters has a meaning must not have this.**
    ///
    /// # Examples
    ///
    /// ```
    /// use http::Request;
    /// use stampede_guard::http::HttpPolicy;
    ///
    /// let policy = HttpPolicy::default().sort_query(true);
    /// let key = |uri: &str| Ok::<_, http::Error>(policy.cache_key(&Request::get(uri).body(())?));
    /// assert_eq!(key("http://shop.example/?b=2&a=1")?, key("http://shop.example/?a=1&b=2")?);
    /// assert_ne!(key("http://shop.example/?a=1&a=2")?, key("http://shop.example/?a=2&a=1")?);
    /// # Ok::<(), http::Error>(())
    /// ```
    #[must_use]
    pub fn sort_query(mut self, is_sorted: bool) -> Self {
        self.requests.change_query(|rules| rules.is_sorted = is_sorted);
        self
    }

    /// Whether the field `No-Vary-Search` has effect (draft-ietf-httpbis-no-vary-search-05): a response names the query parameters that do
    /// not affect it (`params`), or the only ones that do (`except`), and says whether their order matters (`key-order`). It then answers
    /// all requests with an equivalent query. Defaults to no, because the draft is no RFC yet; [`strict`](Self::strict) has it.
    ///
    /// The rule that a response states is learned for its path, by the whole fleet. From then on a request to that path is looked up
    /// and, if nothing is stored, loaded with its *canonical* query: the parameters that affect the response, as
    /// `application/x-www-form-urlencoded` writes them. So a shared response does not depend on what the client wrote: **the inner
    /// service sees no parameter that its own rule leaves out**. A response that was loaded with more, such as the first one of a path,
    /// answers its own URI only. A response to a canonical query is used only if it states a rule by which it answers the query that
    /// was sent; otherwise the request is repeated as it was sent, and the path has no rule for a minute.
    ///
    /// A field that is malformed, longer than 1,024 bytes or of another type has no effect. A request whose body type the guard cannot
    /// copy is loaded as it was sent; it can copy a request of axum, with the feature `axum`.
    ///
    /// An invalidation of one URI, by its key, its path or an unsafe method, also invalidates each response of that path that states a
    /// rule: they have the tag of the path, as all responses have with [`path_tags`](Self::path_tags). A hit on one reads one key more,
    /// in the same command. A miss of a request with a query reads one key more if this process knows no rule of the path. Guards that
    /// share a store should agree about this setting: an invalidation does not find responses that a guard without it has stored.
    ///
    /// # Examples
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// use stampede_guard::{Policy, StampedeGuard, http::HttpPolicy};
    ///
    /// // GET /shoes?size=42&utm_source=mail  ->  No-Vary-Search: params=("utm_source" "utm_medium")
    /// let policy = Policy::builder().http(HttpPolicy::default().no_vary_search(true)).build()?;
    /// let guard = StampedeGuard::in_memory().with_policy(policy);
    /// # let _ = guard;
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn no_vary_search(mut self, used: bool) -> Self {
        self.no_vary_search = used;
        self
    }
}

/// Adds names to a list, each once.
fn add_names<N: AsRef<str>>(list: &mut Vec<String>, names: impl IntoIterator<Item = N>) {
    for name in names {
        if !list.iter().any(|known| known == name.as_ref()) {
            list.push(name.as_ref().to_owned());
        }
    }
}
