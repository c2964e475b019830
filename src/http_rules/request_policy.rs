//! Settings of [`HttpPolicy`] for requests, besides the lists of headers: authority, cookies, and extensions.

use super::cookies::CookieNames;
use super::personal::PersonalExtension;
use super::request_rules::RequestRules;
use super::target::{default_port, plain_authority};
use crate::http::HttpPolicy;

impl HttpPolicy {
    /// One authority for all keys, such as `shop.example` or `shop.example:8080`, instead of the `Host` of each
    /// request: for a service that answers the same under any name. Defaults to none: the host and port of a
    /// request are part of its key, so three replicas that are requested by their own ports load three times, and
    /// an admin route invalidates a page only with the visitors' `Host`.
    ///
    /// With it, [`StampedeGuard::invalidate_path`](crate::StampedeGuard::invalidate_path) invalidates a page by its
    /// path, and an unsafe method invalidates its path whatever its `Host` is. Guards that share a store must agree
    /// about it.
    ///
    /// **A handler that writes `Host` into its response, for example in an absolute link, or chooses a tenant by
    /// it, must not have this**: one client's `Host` would reach all clients. **Nor may a guard around an HTTP client**: the
    /// responses of all hosts that it calls would have one key.
    /// [`PolicyBuilder::build`](crate::PolicyBuilder::build) refuses a text that is not an authority, or has the
    /// scheme's default port.
    ///
    /// # Examples
    ///
    /// ```
    /// use http::Request;
    /// use stampede_guard::http::HttpPolicy;
    ///
    /// let policy = HttpPolicy::default().authority("shop.example");
    /// let by_port = Request::get("/product/7").header("host", "10.0.0.1:8080").body(())?;
    /// let by_name = Request::get("/product/7").header("host", "shop.example").body(())?;
    /// assert_eq!(policy.cache_key(&by_port), policy.cache_key(&by_name));
    /// # Ok::<(), http::Error>(())
    /// ```
    #[must_use]
    pub fn authority(mut self, authority: impl Into<String>) -> Self {
        self.requests.authority = Some(authority.into().to_ascii_lowercase());
        self
    }

    /// The cookies that matter, by name: a GET or HEAD with other cookies only, such as those of analytics, is
    /// looked up like one without cookies. **Defaults to all cookies**: any of them makes a request bypass the
    /// cache, so a browser with a cookie is answered by the inner service each time.
    ///
    /// The inner service does not see the other cookies of such a request: the guard removes the `Cookie` field,
    /// whether the response is stored or not, so no response depends on them, and `Vary: Cookie` sees none. A
    /// request with a listed cookie keeps all of its cookies, and is treated as the policy treats cookies
    /// ([`share_cookies`](Self::share_cookies)): by default it bypasses. So list each cookie that a handler, or a
    /// layer inside the guard, reads. Requests with other methods are not changed. The [`key`](Self::key) hook sees
    /// all cookies, and may put one into the key.
    ///
    /// [`PolicyBuilder::build`](crate::PolicyBuilder::build) refuses names that no cookie can have (RFC 6265,
    /// 4.1.1).
    ///
    /// # Examples
    ///
    /// ```
    /// use http::Request;
    /// use stampede_guard::http::HttpPolicy;
    ///
    /// let policy = HttpPolicy::default().cookies(["session"]);
    /// let key = |cookies: &str| {
    ///     let request = Request::get("http://shop.example/").header("cookie", cookies).body(())?;
    ///     Ok::<_, http::Error>(policy.cache_key(&request))
    /// };
    /// assert!(key("_ga=GA1.2.3; theme=dark")?.is_some(), "looked up");
    /// assert!(key("_ga=GA1.2.3; session=7f3a")?.is_none(), "bypasses");
    /// # Ok::<(), http::Error>(())
    /// ```
    #[must_use]
    pub fn cookies<N: Into<String>>(mut self, names: impl IntoIterator<Item = N>) -> Self {
        self.requests.cookies = Some(CookieNames::new(names));
        self
    }

    /// A type of request extension that marks a request as one client's, such as `tower_sessions::Session` or
    /// `tower_cookies::Cookies`: a GET or HEAD with it bypasses the cache (`detail=extension` in `Cache-Status`),
    /// and a warning tells which layer belongs inside the guard. Can be called several times. Defaults to none,
    /// because the guard cannot list the extensions of a request without their types.
    ///
    /// Only a layer outside of the guard can have set such an extension before the guard sees the request; a layer
    /// inside may set any. This detects neither a layer that removes credentials from a request nor one that
    /// changes the response: see [where the layer belongs](crate::http#where-the-layer-belongs).
    ///
    /// # Examples
    ///
    /// ```
    /// use stampede_guard::http::HttpPolicy;
    ///
    /// # // Stand-ins for the types of these crates.
    /// # mod tower_sessions { #[derive(Clone)] pub struct Session; }
    /// # mod tower_cookies { #[derive(Clone)] pub struct Cookies; }
    /// let policy = HttpPolicy::default()
    ///     .personal_extension::<tower_sessions::Session>()
    ///     .personal_extension::<tower_cookies::Cookies>();
    /// ```
    #[must_use]
    pub fn personal_extension<T: Clone + Send + Sync + 'static>(mut self) -> Self {
        let extension = PersonalExtension::of::<T>();
        if !self.requests.personal.contains(&extension) {
            self.requests.personal.push(extension);
        }
        self
    }
}

impl HttpPolicy {
    /// The first setting that differs and may not while a guard runs, and why.
    pub(crate) fn fixed_setting(&self, old: &Self) -> Option<(&'static str, &'static str)> {
        let (new, old) = (&self.requests, &old.requests);
        let keys = "keys would change, and no invalidation would reach what is stored under the old ones";
        let function = "what keeps clients apart would change; a file has no functions and types";
        let private = new.keyed_by_credentials;
        [
            ("kind (default, strict or private)", new.heads != old.heads, keys),
            ("scheme", new.scheme != old.scheme, keys),
            ("authority", new.authority != old.authority, keys),
            ("behind_proxy", new.report != old.report, keys),
            ("credential_headers", private && new.credentials != old.credentials, keys),
            ("cookies", private && new.cookies != old.cookies, keys),
            ("key", new.key.is_some() != old.key.is_some(), function),
            ("personal_extension", new.personal != old.personal, function),
        ]
        .into_iter()
        .find_map(|(setting, differs, why)| differs.then_some((setting, why)))
    }
}

impl RequestRules {
    /// Why these rules are refused, for [`PolicyBuilder::build`](crate::PolicyBuilder::build).
    pub(crate) fn refusal(&self) -> Option<String> {
        let authority = self.authority.as_deref();
        let port = default_port(&self.scheme);
        if let Some(text) = authority.filter(|text| plain_authority(text, port) != Some(text)) {
            return Some(format!(
                "authority is {text:?}: choose a host, with its port where that is not {port}, as \"shop.example\" or \
                 \"shop.example:8080\""
            ));
        }
        let name = self.cookies.as_ref()?.unsound()?;
        Some(format!("cookies names {name:?}: choose names of cookies, as \"session\""))
    }
}
