//! What a policy and its builder have for the HTTP layer.

use std::sync::Arc;

use http::HeaderName;
use http::uri::Scheme;

use crate::http::HttpPolicy;

/// What a policy has for it.
pub(crate) type OverHttp = Arc<HttpPolicy>;

/// What a builder itself says about requests. Kept apart from the policy's `http` until the end: as a replacement of that would
/// forget it, the order of the calls would decide whether one user's answers are shared.
#[derive(Clone, Debug, Default)]
pub(super) struct Requests {
    pub(super) scheme: Option<Scheme>,
    pub(super) credentials: Option<Vec<HeaderName>>,
    pub(super) added: Vec<HeaderName>,
}

impl Requests {
    /// What stays of a policy, whatever replaces the rest of it.
    pub(super) fn of(http: &OverHttp) -> Self {
        let rules = &http.requests;
        Self {
            scheme: (rules.scheme != Scheme::HTTP).then(|| rules.scheme.clone()),
            credentials: None,
            added: rules.added.clone(),
        }
    }

    /// What the policy has then, or why that can not be.
    pub(super) fn apply(self, http: OverHttp) -> Result<OverHttp, String> {
        let http = Arc::unwrap_or_clone(http);
        let http = self.scheme.into_iter().fold(http, HttpPolicy::scheme);
        let http = self.credentials.into_iter().fold(http, HttpPolicy::credential_headers);
        let http = self.added.into_iter().fold(http, HttpPolicy::credential_header);
        http.refusal().map_or(Ok(Arc::new(http)), Err)
    }
}
