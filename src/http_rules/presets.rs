//! The three starting points of an [`HttpPolicy`].

use std::time::Duration;

use http::header;

use super::policy::{DAY, HttpPolicy};
use super::request_rules::{CacheScope, CredentialSharing, Heads, RequestRules};

impl Default for HttpPolicy {
    /// The defaults that the methods document.
    fn default() -> Self {
        Self {
            requests: RequestRules::default(),
            scope: CacheScope::Shared,
            letter: false,
            set_cookie: CredentialSharing::Never,
            default_lifetime: true,
            // A heuristic lifetime is a guess, while `fresh_for` is the operator's decision.
            heuristic_freshness: false,
            ignore_request_no_cache: false,
            // The key may contain data that a log, or the next client, must not see.
            tell_key: false,
            // Each path has a tag id in the store, for a day at least, and each hit reads it.
            path_tags: false,
            answer_info: false,
            vary_on: Vec::new(),
            // Languages times encodings of a large site. With more values, the header is no choice among
            // representations, but an identity.
            max_variants: 64,
            // Bridges a restart of the origin, without hiding an outage.
            stale_on_disconnect: Duration::from_secs(60),
            // A validation is cheaper than a load, but storing a response that is not requested again wastes
            // memory.
            validate_within: Duration::from_secs(600),
        }
    }
}

impl HttpPolicy {
    /// To the letter of RFC 9111, 9213 and 5861, for reverse proxies in front of origins with correct headers.
    ///
    /// - A response that states no lifetime gets none: [`fresh_for`](crate::PolicyBuilder::fresh_for) is not used;
    ///   heuristic freshness is (RFC 9111, 4.2.2).
    /// - Any final status with an explicit lifetime is stored, including failures.
    /// - `Cookie` and `Set-Cookie` have no effect (RFC 9111, 7.3): **an origin that answers requests with cookies
    ///   without `private` leaks those responses through this cache.** `Authorization` is as in RFC 9111, 3.5. The
    ///   other [`credential_headers`](Self::credential_headers) still bypass.
    /// - `CDN-Cache-Control` replaces `Cache-Control` (RFC 9213, 2.2); `no-cache="field"` and `private="field"`
    ///   apply to the fields that they list; `must-understand` overrides `no-store`.
    pub fn strict() -> Self {
        let mut requests = RequestRules {
            heads: Heads::STRICT,
            cookie: CredentialSharing::Freely,
            ..RequestRules::default()
        };
        requests.authorization = CredentialSharing::IfSaid;
        requests.credentials = requests
            .credentials
            .names
            .into_iter()
            .filter(|name| *name != header::AUTHORIZATION && *name != header::COOKIE)
            .collect();
        Self {
            requests,
            letter: true,
            set_cookie: CredentialSharing::Freely,
            default_lifetime: false,
            heuristic_freshness: true,
            stale_on_disconnect: DAY,
            validate_within: DAY,
            ..Self::default()
        }
    }

    /// The cache of one user, for clients (RFC 9111, 2: "a private cache is dedicated to a single user").
    ///
    /// Responses to credentials and responses marked `private` are stored; `s-maxage`, `proxy-revalidate` and
    /// `CDN-Cache-Control` are not for this cache. A digest of the request's
    /// [`credential_headers`](Self::credential_headers) is part of the key, so a client that acts for several users
    /// keeps them apart as long as these headers identify them.
    ///
    /// **The credentials must be on the request before it reaches the guard.** Credentials that are added inside,
    /// by reqwest's default headers or cookie store, by `AddAuthorizationLayer` or by a connector that signs, are
    /// not part of any key, and users are mixed up. Likewise, if a client inside follows redirects, the guard sees
    /// the last response only.
    ///
    /// An unsafe method invalidates the responses for its sender and for requests without credentials, but **not
    /// the responses stored for other users**: invalidate those by
    /// [`StampedeGuard::http_key`](crate::StampedeGuard::http_key) of one of their requests, or by a tag.
    pub fn private() -> Self {
        let requests =
            RequestRules { heads: Heads::PRIVATE, keyed_by_credentials: true, ..RequestRules::default() };
        Self {
            requests,
            scope: CacheScope::Private,
            set_cookie: CredentialSharing::Freely,
            ..Self::default()
        }
    }
}
