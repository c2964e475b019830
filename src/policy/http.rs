//! The HTTP settings of a policy and of its builder.

use std::sync::Arc;

use http::HeaderName;
use http::uri::Scheme;

use crate::http::HttpPolicy;

/// The most bytes that a response takes besides its body: its metadata, with a length of two bytes, and its header section,
/// which `StoredResponse` bounds.
pub(super) const LONGEST_HEAD: usize = 192 * 1024;

/// The HTTP settings of a policy.
pub(crate) type HttpSettings = Arc<HttpPolicy>;

/// Whether responses have the tag of their path.
pub(super) fn has_path_tags(http: &HttpSettings) -> bool {
    http.path_tags
}

/// The first setting that differs but must not change while a guard runs, and why.
pub(super) fn fixed_setting(new: &HttpSettings, old: &HttpSettings) -> Option<(&'static str, &'static str)> {
    new.fixed_setting(old)
}

/// The rules for requests that a builder sets itself. They stay separate from the policy's `http` until `build`. Otherwise
/// replacing `http` would drop them, and the order of the calls would decide whether one user's answers are shared.
#[derive(Clone, Debug, Default)]
pub(super) struct RequestSettings {
    pub(super) scheme: Option<Scheme>,
    pub(super) credentials: Option<Vec<HeaderName>>,
    pub(super) added: Vec<HeaderName>,
}

impl RequestSettings {
    /// The rules of a policy that stay if its `http` is replaced.
    pub(super) fn of(http: &HttpSettings) -> Self {
        let rules = &http.requests;
        Self {
            scheme: (rules.scheme != Scheme::HTTP).then(|| rules.scheme.clone()),
            credentials: None,
            added: rules.added.clone(),
        }
    }

    /// The policy's HTTP settings with these rules applied, or why they are refused.
    pub(super) fn apply(self, http: HttpSettings) -> Result<HttpSettings, String> {
        let http = Arc::unwrap_or_clone(http);
        let http = self.scheme.into_iter().fold(http, HttpPolicy::scheme);
        let http = self.credentials.into_iter().fold(http, HttpPolicy::credential_headers);
        let http = self.added.into_iter().fold(http, HttpPolicy::credential_header);
        http.refusal().map_or(Ok(Arc::new(http)), Err)
    }
}
