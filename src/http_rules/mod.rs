//! The rules of HTTP caching as functions of requests and responses: RFC 9110, 9111, 9211, 9213 and 5861.
//!
//! They use no guard, no store and no clock: the caller passes the time. [`Rule`] names the rules in logs, `Cache-Status`
//! and `explain`.

pub(crate) mod cache_control;
pub(crate) mod cache_terms;
pub(crate) mod conditional;
pub(crate) mod fields;
#[cfg(feature = "serde")]
mod file;
pub(crate) mod freshness;
pub(crate) mod groups;
pub(crate) mod key;
pub(crate) mod query;
pub(crate) mod query_method;
mod query_settings;
pub(crate) mod reference;
pub(crate) mod request;
pub(crate) mod request_settings;
pub(crate) mod response;
pub(crate) mod search;
pub(crate) mod settings;
mod tag_settings;
pub(crate) mod vary;

use std::fmt;

macro_rules! rules {
    ($($(#[doc = $doc:literal])* $name:ident: $token:literal, $section:literal;)*) => {
        /// The rule that decided about a request or a response.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub(crate) enum Rule {
            $($(#[doc = $doc])* $name,)*
        }

        impl Rule {
            /// A token, short enough for `Cache-Status` (RFC 9211, 2.8).
            pub(crate) fn token(self) -> &'static str {
                match self { $(Self::$name => $token,)* }
            }

            /// The specification of the rule.
            pub(crate) fn section(self) -> &'static str {
                match self { $(Self::$name => $section,)* }
            }

            #[cfg(test)]
            const ALL: &[Self] = &[$(Self::$name),*];
        }
    };
}

rules! {
    // Rules of requests: why a request bypasses the cache.
    /// The method is not one that a cache answers.
    Method: "method", "RFC 9111, 4";
    /// `Host` is not a single authority that can be a key.
    Host: "host", "RFC 9112, 3.2";
    Scheme: "scheme", "RFC 9110, 4.2";
    /// The request's target has no path.
    Target: "target", "RFC 9112, 3.2.3";
    /// The request has a body.
    Body: "body", "RFC 9110, 9.3.1";
    /// The request has a range in a unit other than bytes.
    Range: "range", "RFC 9110, 14.2";
    Upgrade: "upgrade", "RFC 9110, 7.8";
    Expect: "expect", "RFC 9110, 10.1.1";
    /// The request has a precondition that only the origin may evaluate.
    Conditional: "conditional", "RFC 9111, 4.3.2";
    Credentials: "credentials", "HttpPolicy::credential_headers";
    /// The request has an extension that the policy declares as one client's.
    Extension: "extension", "HttpPolicy::personal_extension";
    /// `Connection` lists a header: it may select a key or a variant, and a proxy would not forward it.
    Connection: "connection", "RFC 9110, 7.6.1";
    UnkeyedHeader: "unkeyed-header", "the guard's list of headers that change what is asked";
    RequestNoStore: "no-store", "RFC 9111, 5.2.1.5";
    /// The policy's hook excluded the request.
    KeyHook: "key", "HttpPolicy::key";
    /// The query of a POST has more than the key, and a POST passes unchanged.
    Query: "query", "HttpPolicy::ignore_query";
    /// A QUERY without the type of its content.
    ContentType: "content-type", "RFC 10008, 2";
    /// The content of a QUERY is longer than the policy has the guard read.
    ContentTooLong: "content-too-long", "HttpPolicy::query_content_limit";
    /// The content of a QUERY did not come within the guard's time limit.
    ContentSlow: "content-slow", "the guard's time limit for the content of a QUERY";
    /// The content of a QUERY ended with an error.
    ContentBroken: "content-broken", "RFC 9112, 8";
    /// A QUERY has trailers, which are not in its key.
    ContentTrailers: "content-trailers", "RFC 9110, 6.5";
    /// The guard cannot make a request body of the application's type.
    BodyType: "body-type", "HttpPolicy::query_method";

    // Rules of responses: why a response is not shared.
    DoNotStore: "do-not-store", "the response's DoNotStore extension";
    /// The handler's terms: why the response is not shared, or for how long it is stored.
    CacheTerms: "cache-terms", "the response's CacheTerms extension";
    NoStore: "no-store", "RFC 9111, 5.2.2.5";
    Private: "private", "RFC 9111, 5.2.2.7";
    /// The response must be validated before each use, and has no validator.
    NoCache: "no-cache", "RFC 9111, 5.2.2.4";
    Targeted: "cdn-cache-control", "RFC 9213, 2.2";
    MustUnderstand: "must-understand", "RFC 9111, 5.2.2.3";
    Authorization: "authorization", "RFC 9111, 3.5";
    Cookie: "cookie", "HttpPolicy::share_cookies";
    SetCookie: "set-cookie", "HttpPolicy::share_cookies";
    Vary: "vary", "RFC 9111, 4.1";
    /// The request names unknown codings, and its response may be encoded for one of them.
    Coding: "accept-encoding", "RFC 9110, 12.5.3";
    Pragma: "pragma", "RFC 9111, 5.4";
    /// The body has no end, or may have none.
    EventStream: "event-stream", "the guard's rule for bodies without an end";
    SwitchedProtocol: "upgrade", "RFC 9110, 7.8";
    /// Also: the content of a QUERY has another length than its head announces.
    ContentLength: "content-length", "RFC 9110, 8.6";
    TooBig: "too-big", "PolicyBuilder::max_body";
    /// The status is that of no final response to the request; or the response states no lifetime, and its status gets none by default.
    Status: "status", "RFC 9111, 3";
    /// No cache may store this status, because it concerns one request or one client.
    Unstorable: "status", "RFC 6585, 3 to 6; RFC 8470, 5.2";
    /// The response was stale when received, must be validated before reuse, and has no validator.
    MustRevalidate: "must-revalidate", "RFC 9111, 5.2.2.2";
    /// The response to a POST does not represent what a GET of its target would return.
    Post: "method", "RFC 9110, 9.3.3";

    // Rules of responses: for how long a response is stored.
    SharedMaxAge: "s-maxage", "RFC 9111, 5.2.2.10";
    MaxAge: "max-age", "RFC 9111, 5.2.2.1";
    Expires: "expires", "RFC 9111, 5.3";
    Heuristic: "heuristic", "RFC 9111, 4.2.2";
    Default: "default", "PolicyBuilder::fresh_for";
    /// The response is stored only to be validated, because it states no lifetime.
    Unnamed: "no-lifetime", "RFC 9111, 4.2";
    /// The response is a failure: it goes to waiters and is not stored.
    ServerError: "server-error", "the guard's rule for failures";
    /// The response states no lifetime above zero, and has no validator.
    Stale: "stale", "RFC 9111, 4.2";
    /// The response was older than its stated lifetime when it was received.
    TooOld: "too-old", "RFC 9111, 4.2";
}

/// Writes the token and the specification: `no-store (RFC 9111, 5.2.2.5)`.
impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.token(), self.section())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_rule_has_a_token_and_a_section() {
        for rule in Rule::ALL {
            let token = rule.token();
            // RFC 8941, 3.3.4, restricted to the characters in use here.
            assert!(token.starts_with(|first: char| first.is_ascii_lowercase()), "{rule}");
            assert!(token.bytes().all(|byte| byte == b'-' || byte.is_ascii_lowercase()), "{rule}");
            assert!(rule.to_string().ends_with(')') && !rule.section().is_empty(), "{rule}");
        }
    }
}
