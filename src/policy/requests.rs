//! What a builder itself says about requests.

use http::HeaderName;
use http::uri::Scheme;

use crate::http::HttpPolicy;

/// Kept apart from the policy's `http` until the end: as a replacement of that would forget it, the order of the calls would
/// decide whether one user's answers are shared.
#[derive(Clone, Debug, Default)]
pub(super) struct Requests {
    pub(super) scheme: Option<Scheme>,
    pub(super) credentials: Option<Vec<HeaderName>>,
    pub(super) added: Vec<HeaderName>,
}

impl Requests {
    /// What stays of a policy, whatever replaces the rest of it.
    pub(super) fn of(http: &HttpPolicy) -> Self {
        let rules = &http.requests;
        Self {
            scheme: (rules.scheme != Scheme::HTTP).then(|| rules.scheme.clone()),
            credentials: None,
            added: rules.added.clone(),
        }
    }

    pub(super) fn apply(self, http: HttpPolicy) -> HttpPolicy {
        let http = self.scheme.into_iter().fold(http, HttpPolicy::scheme);
        let http = self.credentials.into_iter().fold(http, HttpPolicy::credential_headers);
        self.added.into_iter().fold(http, HttpPolicy::credential_header)
    }
}
