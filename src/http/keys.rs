//! The keys of a guard's HTTP entries, and invalidation by path.

use http::{Method, Request, Uri};

use crate::error::{Error, ErrorKind, InvalidationTarget};
use crate::guard::StampedeGuard;
use crate::guard::invalidation::Invalidation;
use crate::guard_state::kept::ChangeTarget;
use crate::http_rules::changed_resources::ChangedResources;
use crate::http_rules::normal_form::normal_form;
use crate::http_rules::request_rules::RequestRules;
use crate::key::CacheKey;

impl StampedeGuard {
    /// The key under which this guard, as an HTTP layer with its policy, stores the response to a GET with this
    /// request's URI and headers, for [`invalidate`](Self::invalidate). `None` for a request that would bypass the
    /// cache, for example with credentials: pass a request as clients send it. `Host` is part of the key, unless
    /// the policy names [one authority](crate::http::HttpPolicy::authority) for all keys: then
    /// [`invalidate_path`](Self::invalidate_path) needs no request.
    ///
    /// # Examples
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let guard = stampede_guard::StampedeGuard::in_memory();
    /// let request = http::Request::get("/report/7").header("host", "shop.example").body(())?;
    /// if let Some(key) = guard.http_key(&request) {
    ///     guard.invalidate(key).await?;
    /// }
    /// # Ok(()) }
    /// ```
    #[cfg_attr(docsrs, doc(cfg(feature = "http")))]
    pub fn http_key<B>(&self, request: &Request<B>) -> Option<CacheKey> {
        self.current().parts().1.http.cache_key(request)
    }

    /// Removes the stored responses for one URI, this path with this query, under the policy's
    /// [`authority`](crate::http::HttpPolicy::authority) and [`scheme`](crate::PolicyBuilder::scheme), as an unsafe
    /// method does: in every process, all variants, and also the results of running loads. If the policy has a
    /// [`key`](crate::http::HttpPolicy::key) function, removes what an unsafe request without headers would remove.
    ///
    /// The path may be plain text or percent-encoded: `/café`, `/caf%C3%A9` and `/caf%c3%a9` are the same path, and the responses to
    /// all of these spellings are removed (RFC 3986, 6.2.2). A `%` that two hexadecimal digits follow is a code. `%2F` and `/`, `/a/`
    /// and `/a`, and parameters in another order are other paths, and so is the same path with another query, unless the policy has
    /// [`path_tags`](crate::http::HttpPolicy::path_tags): then the responses to each query of the path are removed.
    ///
    /// # Errors
    ///
    /// [`InvalidPolicy`](ErrorKind::InvalidPolicy) if the policy names no authority; [`InvalidKey`](ErrorKind::InvalidKey) for a text
    /// that is no path, or has a fragment or control characters; else as [`invalidate`](Self::invalidate).
    ///
    /// # Cancel safety
    ///
    /// As [`invalidate`](Self::invalidate).
    ///
    /// # Consistency
    ///
    /// As [`invalidate`](Self::invalidate).
    ///
    /// # Examples
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// use stampede_guard::{Policy, StampedeGuard, http::HttpPolicy};
    ///
    /// let policy = Policy::builder().http(HttpPolicy::default().authority("shop.example")).build()?;
    /// let guard = StampedeGuard::in_memory().with_policy(policy);
    /// guard.invalidate_path("/product/7").await?;
    /// # Ok(()) }
    /// ```
    #[cfg_attr(docsrs, doc(cfg(feature = "http")))]
    pub async fn invalidate_path(&self, path: &str) -> Result<(), Error> {
        self.invalidation().path(path).send().await
    }
}

impl Invalidation {
    /// Adds a path with its query, as in [`invalidate_path`](StampedeGuard::invalidate_path).
    #[cfg_attr(docsrs, doc(cfg(feature = "http")))]
    pub fn path(self, path: impl Into<String>) -> Self {
        let path = path.into();
        let keys = path_keys(&path, &self.guard().parts().1.http.requests);
        let stored = keys.and_then(|keys| {
            let all: Result<Vec<_>, Error> = keys.into_iter().map(|key| stored(self.guard(), key)).collect();
            all.map(|all| all.concat())
        });
        self.target(InvalidationTarget::Path(path), stored)
    }
}

/// The invalidation of these keys of resources.
pub(super) fn of_keys(guard: &StampedeGuard, keys: Vec<CacheKey>) -> Invalidation {
    keys.into_iter().fold(guard.invalidation(), |invalidation, key| {
        let stored = stored(guard, key.clone());
        invalidation.target(InvalidationTarget::Key(key), stored)
    })
}

/// What is invalidated in the store with this resource. With the tag of its path also its own entry: a process without
/// [`path_tags`](crate::http::HttpPolicy::path_tags) stores it without the tag.
fn stored(guard: &StampedeGuard, key: CacheKey) -> Result<Vec<ChangeTarget>, Error> {
    let (state, policy) = guard.parts();
    let key = guard.key(key)?;
    let path = policy.path_tag(&state.namespace, &key);
    Ok([ChangeTarget::value(key)].into_iter().chain(path.map(ChangeTarget::tag)).collect())
}

/// The keys that [`StampedeGuard::invalidate_path`] removes.
fn path_keys(path: &str, rules: &RequestRules) -> Result<Vec<CacheKey>, Error> {
    if rules.authority.is_none() {
        let text = "a path needs one authority for all keys, and the policy names none: set \
                    HttpPolicy::authority(\"shop.example\"), or invalidate the http_key of a request with the clients' Host";
        return Err(Error::new(ErrorKind::InvalidPolicy, text));
    }
    let refused = || {
        let text = format!(
            "{path:?} is no path of a URI: give it as in \"/product/7\", with its query if it has one, without a fragment, an authority or \
             control characters"
        );
        Error::new(ErrorKind::InvalidKey, text)
    };
    // `http` drops a URI's fragment, so refuse one here.
    let is_path = path.starts_with('/') && !path.contains(|c: char| c == '#' || c.is_control());
    let uri = Uri::try_from(&*normal_form(path)).ok().filter(|_| is_path);
    let mut change = Request::new(());
    *change.method_mut() = Method::DELETE;
    *change.uri_mut() = uri.ok_or_else(refused)?;
    Ok(ChangedResources::of(&change, rules).ok_or_else(refused)?.target_keys())
}
