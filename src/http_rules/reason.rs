//! The rules that decide, by name: what a log, `Cache-Status` and `explain` call them.

use std::fmt;

macro_rules! rules {
    ($($(#[doc = $doc:literal])* $name:ident: $token:literal, $section:literal;)*) => {
        /// What decided about a request or a response.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub(crate) enum Rule {
            $($(#[doc = $doc])* $name,)*
        }

        impl Rule {
            /// A token, short enough for `Cache-Status` (RFC 9211, 2.8).
            pub(crate) fn token(self) -> &'static str {
                match self { $(Self::$name => $token,)* }
            }

            /// Where it is written down.
            pub(crate) fn section(self) -> &'static str {
                match self { $(Self::$name => $section,)* }
            }

            #[cfg(test)]
            const ALL: &[Self] = &[$(Self::$name),*];
        }
    };
}

rules! {
    // Of the request: what is not looked up.
    /// Not a method that a cache answers.
    Method: "method", "RFC 9111, 4";
    /// Not one authority that can be a key.
    Host: "host", "RFC 9112, 3.2";
    Scheme: "scheme", "RFC 9110, 4.2";
    /// It names no path.
    Target: "target", "RFC 9112, 3.2.3";
    /// A body comes with it.
    Body: "body", "RFC 9110, 9.3.1";
    /// A range in a unit other than bytes.
    Range: "range", "RFC 9110, 14.2";
    Upgrade: "upgrade", "RFC 9110, 7.8";
    Expect: "expect", "RFC 9110, 10.1.1";
    /// A precondition that is the origin's to evaluate.
    Conditional: "conditional", "RFC 9111, 4.3.2";
    Credentials: "credentials", "HttpPolicy::credential_headers";
    /// An extension that the policy names.
    Extension: "extension", "HttpPolicy::personal_extension";
    /// A header that is in the key, perhaps, and not for the inner service.
    Connection: "connection", "RFC 9110, 7.6.1";
    UnkeyedHeader: "unkeyed-header", "the guard's list of headers that change what is asked";
    RequestNoStore: "no-store", "RFC 9111, 5.2.1.5";
    /// The hook of the policy said so.
    KeyHook: "key", "HttpPolicy::key";

    // Of the response: what is kept from others.
    DoNotStore: "do-not-store", "the response's DoNotStore extension";
    NoStore: "no-store", "RFC 9111, 5.2.2.5";
    Private: "private", "RFC 9111, 5.2.2.7";
    /// Not without validation each time; and where nothing can be validated, not at all.
    NoCache: "no-cache", "RFC 9111, 5.2.2.4";
    Targeted: "cdn-cache-control", "RFC 9213, 2.2";
    MustUnderstand: "must-understand", "RFC 9111, 5.2.2.3";
    Authorization: "authorization", "RFC 9111, 3.5";
    Cookie: "cookie", "HttpPolicy::share_cookies";
    SetCookie: "set-cookie", "HttpPolicy::share_cookies";
    Vary: "vary", "RFC 9111, 4.1";
    /// The request names codings that are not known, and its response may be encoded for one of them.
    Coding: "accept-encoding", "RFC 9110, 12.5.3";
    Pragma: "pragma", "RFC 9111, 5.4";
    /// Its body has no end.
    EventStream: "event-stream", "the guard's rule for bodies without an end";
    SwitchedProtocol: "upgrade", "RFC 9110, 7.8";
    ContentLength: "content-length", "RFC 9110, 8.6";
    TooBig: "too-big", "PolicyBuilder::max_body";
    /// One that is no final answer to the request, or that says nothing about how long it holds.
    Status: "status", "RFC 9111, 3";
    /// A status that no cache may store: it is about one request, or about one client.
    Unstorable: "status", "RFC 6585, 3 to 6; RFC 8470, 5.2";
    /// Stale when it comes, to be validated before it is used again, and without a validator.
    MustRevalidate: "must-revalidate", "RFC 9111, 5.2.2.2";
    /// The answer to a POST that is not what a GET would bring.
    Post: "method", "RFC 9110, 9.3.3";

    // Of the response: for how long it is stored.
    SharedMaxAge: "s-maxage", "RFC 9111, 5.2.2.10";
    MaxAge: "max-age", "RFC 9111, 5.2.2.1";
    Expires: "expires", "RFC 9111, 5.3";
    Heuristic: "heuristic", "RFC 9111, 4.2.2";
    Default: "default", "PolicyBuilder::fresh_for";
    /// Stored in order to be validated: it says nothing about a lifetime.
    Unnamed: "no-lifetime", "RFC 9111, 4.2";
    /// A failure is told to those who wait, and not kept.
    ServerError: "server-error", "the guard's rule for failures";
    /// It names no lifetime above zero, and nothing to validate it with.
    Stale: "stale", "RFC 9111, 4.2";
    /// It was older than the lifetime that it names when it came.
    TooOld: "too-old", "RFC 9111, 4.2";
}

/// `no-store (RFC 9111, 5.2.2.5)`
impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.token(), self.section())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_rule_has_a_token_and_a_place() {
        for rule in Rule::ALL {
            let token = rule.token();
            // RFC 8941, 3.3.4, as far as these go.
            assert!(token.starts_with(|first: char| first.is_ascii_lowercase()), "{rule}");
            assert!(token.bytes().all(|byte| byte == b'-' || byte.is_ascii_lowercase()), "{rule}");
            assert!(rule.to_string().ends_with(')') && !rule.section().is_empty(), "{rule}");
        }
    }
}
