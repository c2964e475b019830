//! [`CacheTerms`]: for how long, and for which clients, the guard stores a response, as its handler states it without header text.

use std::time::{Duration, SystemTime};

use http::header::{CACHE_CONTROL, HeaderMap, HeaderValue};
use http::response::Parts;

use super::cache_control::{CacheControl, DirectiveScope, LONGEST_SECONDS};
use super::freshness::{StaleWindows, corrected_initial_age};

/// For how long, and for which clients, the guard stores a response.
///
/// A handler puts it into the response's extensions; with the feature `axum` it is also a part of a response tuple. What it states
/// replaces the policy's lifetimes and the response's own `Cache-Control`, **for the guard only**:
///
/// - [`fresh_for`](Self::fresh_for) replaces `max-age`, `s-maxage` and `Expires`; `no-store`, `no-cache` and `must-revalidate` are then
///   for clients only. Clients see `max-age`.
/// - [`stale_while_revalidate`](Self::stale_while_revalidate) and [`stale_if_error`](Self::stale_if_error) replace the directives and the
///   settings of these names. Clients see the directives beside `max-age`.
/// - [`for_one_user`](Self::for_one_user) is `private`: only a guard with
///   [`HttpPolicy::private`](crate::http::HttpPolicy::private) stores the response, for that user. Clients see `private`.
/// - [`do_not_store`](Self::do_not_store) is [`DoNotStore`](crate::http::DoNotStore): the guard neither stores the response nor shares it
///   with waiters. Clients see `no-store`.
///
/// A setting that is not stated is that of the response's `Cache-Control`, else that of the policy. A response with a `Cache-Control`
/// reaches clients with exactly that; otherwise the guard writes one that corresponds, unless the handler
/// [hides](Self::hide_from_clients) its terms.
///
/// **The terms never make a response shareable**: `private`, `Set-Cookie`, `Vary: *`, a `CDN-Cache-Control` that forbids reuse, the
/// credentials of a request and the status count as they do without terms. A response that is not shared because of credentials or a
/// cookie reaches its client with `private` in the `Cache-Control` that the guard writes.
///
/// The lifetime begins when the guard receives the response. A 304 without terms leaves those of the stored response as they are.
///
/// # Examples
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use std::time::Duration;
/// use axum::response::IntoResponse;
/// use axum::{Router, body::Body, http::Request, routing::get};
/// use stampede_guard::{StampedeGuard, http::CacheTerms};
/// use tower::ServiceExt as _;
///
/// async fn report() -> impl IntoResponse {
///     let terms = CacheTerms::fresh_for(Duration::from_secs(300));
///     # #[cfg(not(feature = "axum"))]
///     # let terms = axum::Extension(terms);
///     (terms, "expensive")
/// }
///
/// let app: Router = Router::new().route("/report", get(report)).layer(StampedeGuard::in_memory());
/// let request = Request::get("/report").header("host", "shop.example").body(Body::empty())?;
/// let response = app.oneshot(request).await?;
/// assert_eq!(response.headers()["cache-control"], "max-age=300");
/// assert_eq!(response.headers()["cache-status"], "stampede-guard; fwd=uri-miss; stored; ttl=300");
/// # Ok(()) }
/// ```
///
/// Without axum, and around a client:
///
/// ```
/// use std::time::Duration;
/// use http::Response;
/// use stampede_guard::http::CacheTerms;
///
/// let mut response = Response::new("expensive");
/// let terms = CacheTerms::fresh_for(Duration::from_secs(300)).stale_while_revalidate(Duration::from_secs(60));
/// response.extensions_mut().insert(terms);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheTerms {
    pub(crate) fresh_for: Option<Duration>,
    pub(crate) stale_while_revalidate: Option<Duration>,
    pub(crate) stale_if_error: Option<Duration>,
    pub(crate) is_for_one_user: bool,
    pub(crate) is_hidden: bool,
    pub(crate) do_not_store: bool,
    /// Whether the guard has written the response's `Cache-Control` by these terms.
    pub(crate) is_announced: bool,
}

impl CacheTerms {
    /// The guard serves the response for this long, at most for 68 years, without a request to the handler. With zero it is stored only
    /// if it has a validator or a stale window.
    #[must_use]
    pub fn fresh_for(lifetime: Duration) -> Self {
        Self { fresh_for: Some(bounded(lifetime)), ..Self::default() }
    }

    /// The response is for its own client only: not stored, and not shared with requests that wait for it.
    ///
    /// # Examples
    ///
    /// ```
    /// use http::Response;
    /// use stampede_guard::http::{CacheTerms, HttpPolicy, explain};
    ///
    /// let mut response = Response::new("a one-time code");
    /// response.extensions_mut().insert(CacheTerms::do_not_store());
    /// let request = http::Request::get("http://shop.example/code").body(())?;
    /// let decision = explain(&request, &response, &HttpPolicy::default());
    /// assert_eq!(decision.to_string(), "not stored: cache-terms (the response's CacheTerms extension)");
    /// # Ok::<(), http::Error>(())
    /// ```
    #[must_use]
    pub fn do_not_store() -> Self {
        Self { do_not_store: true, ..Self::default() }
    }

    /// For how long after its freshness the guard serves the response while it loads a new one.
    #[must_use]
    pub fn stale_while_revalidate(mut self, window: Duration) -> Self {
        self.stale_while_revalidate = Some(bounded(window));
        self
    }

    /// For how long after its freshness the guard serves the response instead of a failure.
    #[must_use]
    pub fn stale_if_error(mut self, window: Duration) -> Self {
        self.stale_if_error = Some(bounded(window));
        self
    }

    /// The response is for the user of its request. A guard with [`HttpPolicy::private`](crate::http::HttpPolicy::private) stores it for
    /// that user, by these terms; any other guard passes it on to its client, and neither stores nor shares it.
    ///
    /// # Examples
    ///
    /// ```
    /// use http::Response;
    /// use stampede_guard::http::{CacheTerms, HttpPolicy, explain};
    ///
    /// let mut response = Response::new("your basket");
    /// response.extensions_mut().insert(CacheTerms::default().for_one_user());
    /// let request = http::Request::get("http://shop.example/basket").body(())?;
    /// assert!(!explain(&request, &response, &HttpPolicy::default()).stored);
    /// assert!(explain(&request, &response, &HttpPolicy::private()).stored);
    /// # Ok::<(), http::Error>(())
    /// ```
    #[must_use]
    pub fn for_one_user(mut self) -> Self {
        self.is_for_one_user = true;
        self
    }

    /// The guard writes no `Cache-Control` by these terms: clients see the response as the handler made it.
    #[must_use]
    pub fn hide_from_clients(mut self) -> Self {
        self.is_hidden = true;
        self
    }
}

fn bounded(time: Duration) -> Duration {
    time.min(Duration::from_secs(LONGEST_SECONDS))
}

impl CacheTerms {
    /// Writes the `Cache-Control` of a response by its terms, if it has terms for clients and no such field.
    pub(crate) fn announce(head: &mut Parts) {
        let Some(terms) = head.extensions.get_mut::<Self>() else { return };
        if head.status.is_informational() || head.headers.contains_key(CACHE_CONTROL) {
            return;
        }
        if let Some(line) = terms.cache_control(&head.headers) {
            terms.is_announced = head.headers.try_insert(CACHE_CONTROL, line).is_ok();
        }
    }

    /// Adds `private` to the `Cache-Control` that the guard has written, for a response that it does not share because of credentials: a
    /// cache on the way must not share it either.
    pub(crate) fn restrict(head: &mut Parts) {
        if !head.extensions.get::<Self>().is_some_and(|terms| terms.is_announced) {
            return;
        }
        let Some(line) = head.headers.get_mut(CACHE_CONTROL) else { return };
        if [&b"private"[..], b"no-store"].iter().any(|own| line.as_bytes().starts_with(own)) {
            return;
        }
        if let Ok(private) = HeaderValue::from_bytes(&[b"private, ", line.as_bytes()].concat()) {
            *line = private;
        }
    }

    /// The directives for clients; `None` if there are none.
    fn cache_control(&self, headers: &HeaderMap) -> Option<HeaderValue> {
        if self.is_hidden {
            return None;
        }
        if self.do_not_store {
            return Some(HeaderValue::from_static("no-store"));
        }
        let mut directives: Vec<String> = Vec::new();
        if self.is_for_one_user {
            directives.push("private".to_owned());
        }
        if let Some(fresh_for) = self.fresh_for {
            // Clients count from when the response was generated: add the age that it has already.
            let age = corrected_initial_age(headers, Duration::ZERO, SystemTime::now());
            let windows = [
                ("max-age", Some(fresh_for.saturating_add(age))),
                ("stale-while-revalidate", self.stale_while_revalidate),
                ("stale-if-error", self.stale_if_error),
            ];
            let times = windows.into_iter().filter_map(|(name, time)| Some((name, time?.as_secs())));
            directives.extend(times.map(|(name, seconds)| format!("{name}={seconds}")));
        }
        let line = Some(directives.join(", ")).filter(|line| !line.is_empty())?;
        HeaderValue::try_from(line).ok()
    }

    /// Removes from a response's `Cache-Control` what the terms replace. `private` stays, and so does the explicit permission to share
    /// the response with users: the terms only replace lifetimes.
    pub(crate) fn replace_in(&self, all: &mut CacheControl) {
        if self.fresh_for.is_none() {
            return;
        }
        all.no_store = false;
        all.s_maxage = None;
        (all.must_revalidate, all.proxy_revalidate) = (false, false);
        // A directive with a list of fields is about these fields, and the terms are about the response.
        if all.no_cache == DirectiveScope::Whole {
            all.no_cache = DirectiveScope::Absent;
        }
    }

    /// The terms, unless nothing is stated.
    pub(crate) fn as_option(self) -> Option<Self> {
        (Self { is_announced: false, ..self } != Self::default()).then_some(self)
    }

    /// The stale windows with those that are stated.
    pub(crate) fn windows(&self, others: StaleWindows) -> StaleWindows {
        StaleWindows {
            while_revalidate: self.stale_while_revalidate.unwrap_or(others.while_revalidate),
            if_error: self.stale_if_error.unwrap_or(others.if_error),
            ..others
        }
    }
}

/// Adds the terms to a response of axum: `(CacheTerms::fresh_for(..), Html(..))`.
#[cfg(feature = "axum")]
impl axum::response::IntoResponseParts for CacheTerms {
    type Error = std::convert::Infallible;

    fn into_response_parts(
        self,
        mut parts: axum::response::ResponseParts,
    ) -> Result<axum::response::ResponseParts, Self::Error> {
        parts.extensions_mut().insert(self);
        Ok(parts)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "in a test the panic is the report")]
#[path = "../../tests/unit/http_rules/cache_terms_tests.rs"]
mod tests;
