//! QUERY (RFC 10008), a safe method for requests with content: which of them may use the cache, what of them is in the key, and the settings
//! of [`HttpPolicy`] for it.
//!
//! The key is that of the resource, with a digest of the content and of the fields that describe it (RFC 10008, 2.7). Nothing is
//! normalized: contents and types of equal meaning in other bytes have separate keys, because a handler may tell them apart.

use http::header::{CONTENT_LENGTH, CONTENT_TYPE, HeaderMap, HeaderName, TRANSFER_ENCODING};
use http::{Method, Request};
use sha2::{Digest as _, Sha256};

use super::Rule;
use super::fields::content_length;
use super::request::{ConsideredRequest, Content, examine, key_without_extension};
use super::request_settings::RequestRules;
use super::settings::HttpPolicy;
use super::vary::Fingerprint;

/// Whether the method is QUERY. Names of methods are case-sensitive (RFC 9110, 9.1).
pub(crate) fn is_query(method: &Method) -> bool {
    method.as_str() == "QUERY"
}

/// As [`consider`](super::request::consider), for the head of a QUERY. The key is that of the resource, to which the
/// [fingerprint of the content](content_fingerprint) belongs.
#[inline(never)] // Each hit of a GET passes the call.
pub(crate) fn consider_query<B, K>(
    request: &Request<B>,
    rules: &RequestRules,
    join: impl FnOnce(&str, &[&str]) -> K,
) -> Result<ConsideredRequest<K>, Rule> {
    let (keyed, mut demands) = examine(request.headers(), rules, Content::Read)?;
    // RFC 10008, 2: the content has no meaning without its type, and the server fails such a request.
    if request.headers().get(CONTENT_TYPE).is_none_or(|value| value.as_bytes().trim_ascii().is_empty()) {
        return Err(Rule::ContentType);
    }
    let key;
    (key, demands.other_form) = key_without_extension(request, &keyed, rules, join)?;
    Ok(ConsideredRequest { key, may_load: true, demands })
}

/// The length that the head of a request announces for its content, if it does. A head that announces two lengths, or a length of chunks,
/// may mean another content to the inner service than to the guard (RFC 9112, 6.3).
pub(crate) fn announced_length(headers: &HeaderMap) -> Result<Option<u64>, Rule> {
    let length = content_length(headers).map_err(|_| Rule::ContentLength)?;
    match length.is_some() && headers.contains_key(TRANSFER_ENCODING) {
        true => Err(Rule::ContentLength),
        false => Ok(length),
    }
}

/// What tells the QUERYs of one resource apart: the content, and the fields that describe it, byte for byte.
pub(crate) fn content_fingerprint(headers: &HeaderMap, content: &[u8]) -> Fingerprint {
    let mut names: Vec<_> = headers.keys().filter(|name| is_about_content(name)).collect();
    names.sort_unstable_by_key(|name| name.as_str());
    let mut digest = Sha256::new();
    digest.update(b"query-1");
    // Lengths first, so that different lists of fields have different bytes.
    let mut part = |bytes: &[u8]| {
        digest.update((bytes.len() as u64).to_le_bytes());
        digest.update(bytes);
    };
    for name in names {
        for value in headers.get_all(name) {
            part(name.as_str().as_bytes());
            part(value.as_bytes());
        }
    }
    // No field has an empty name: only the content follows.
    part(b"");
    digest.update(content);
    Fingerprint(digest.finalize().into())
}

/// Whether a field describes the content (RFC 9110, 8): `Content-Type`, `Content-Encoding`, `Content-Language`, and every other one that is
/// called so, because a handler may read it. `Content-Length` follows from the content.
fn is_about_content(name: &HeaderName) -> bool {
    name.as_str().starts_with("content-") && *name != CONTENT_LENGTH
}

impl HttpPolicy {
    /// Whether responses to QUERY (RFC 10008) are looked up, stored and shared, as those to GET are. QUERY is a safe method for requests
    /// with content: a search by a form, GraphQL, JSONPath. Defaults to no: a QUERY passes, as other methods do.
    ///
    /// The key is that of the URI, with `Content-Type`, `Content-Encoding`, `Content-Language`, each other field that begins with
    /// `Content-`, and a digest of the content, byte for byte. A GET and a QUERY never get each other's responses. What invalidates the
    /// stored GET of a URI invalidates the responses to all QUERYs of that URI, whatever their content: an unsafe method, `Location`,
    /// [`invalidate_path`](crate::StampedeGuard::invalidate_path), [`invalidate`](crate::StampedeGuard::invalidate) of its key. All other
    /// rules and settings are as for a GET.
    ///
    /// The guard reads the content before the inner service does, up to [`query_content_limit`](Self::query_content_limit) bytes and for
    /// at most a second, and gives it to the inner service unchanged. `Cache-Status` names what it does not look up, and what then passes
    /// with all of its bytes and trailers: no `Content-Type` (`detail=content-type`), longer content (`content-too-long`), slow or broken
    /// content (`content-slow`, `content-broken`), content of another length than `Content-Length` (`content-length`), trailers
    /// (`content-trailers`). With `Expect: 100-continue` the client sends its content when the guard reads it, before a handler can refuse
    /// it. A guard that is switched off or in shadow mode reads no content.
    ///
    /// **The guard can make request bodies of two types only**: `axum::body::Body` with the feature `axum`, and `reqwest::Body` with the
    /// feature `reqwest`. A QUERY with another type of body passes (`detail=body-type`), with a warning now and then; a
    /// `map_request` outside of the guard can turn it into one of axum.
    ///
    /// The content is in no log, metric or header, and not in the store: only its SHA-256 is there, in the key. From that digest, which
    /// [`expose_key`](Self::expose_key) shows to clients, a short or guessable content can be found by trying.
    ///
    /// A hit reads one key more than that of a GET, in the same command (`MGET`; on a cluster by a second `GET` at the same time), and
    /// waiters do not read the response while it arrives.
    ///
    /// # Examples
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # #[cfg(feature = "axum")] {
    /// use axum::{Router, body::Body, http::Request, routing::any};
    /// use stampede_guard::{Policy, StampedeGuard, http::HttpPolicy};
    /// use tower::ServiceExt as _;
    ///
    /// let policy = Policy::builder().http(HttpPolicy::default().query_method(true)).build()?;
    /// let guard = StampedeGuard::in_memory().with_policy(policy);
    /// let app: Router = Router::new().route("/contacts", any(|query: String| async { query })).layer(guard);
    ///
    /// let query = |content: &'static str| {
    ///     let request = Request::builder().method("QUERY").uri("/contacts").header("host", "shop.example");
    ///     request.header("content-type", "application/sql").body(Body::from(content))
    /// };
    /// app.clone().oneshot(query("SELECT name")?).await?;
    /// let hit = app.clone().oneshot(query("SELECT name")?).await?;
    /// assert!(hit.headers()["cache-status"].to_str()?.starts_with("stampede-guard; hit"));
    /// let other = app.oneshot(query("SELECT email")?).await?;
    /// assert!(other.headers()["cache-status"].to_str()?.contains("fwd=uri-miss"));
    /// # } Ok(()) }
    /// ```
    #[must_use]
    pub fn query_method(mut self, is_cached: bool) -> Self {
        self.query_method = is_cached;
        self
    }

    /// The longest content of a QUERY that is looked up, in bytes: each such request holds its content in memory until it is answered. A
    /// QUERY with longer content passes. Defaults to 64 KiB; at most 16 MiB.
    ///
    /// # Examples
    ///
    /// ```
    /// use stampede_guard::http::HttpPolicy;
    ///
    /// let policy = HttpPolicy::default().query_method(true).query_content_limit(4 * 1024);
    /// ```
    #[must_use]
    pub fn query_content_limit(mut self, bytes: usize) -> Self {
        self.query_content_limit = bytes;
        self
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "in a test the panic is the report")]
#[path = "../../tests/unit/http_rules/query_method_tests.rs"]
mod tests;
