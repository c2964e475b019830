//! Empty stand-ins for a policy's HTTP settings while the feature `http` is off.

/// No payload has a head.
pub(super) const LONGEST_HEAD: usize = 0;

#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct HttpSettings;

pub(super) fn has_path_tags(_http: &HttpSettings) -> bool {
    false
}

pub(super) fn fixed_setting(
    _new: &HttpSettings,
    _old: &HttpSettings,
) -> Option<(&'static str, &'static str)> {
    None
}

#[derive(Clone, Debug, Default)]
pub(super) struct RequestSettings;

impl RequestSettings {
    pub(super) fn of(_http: &HttpSettings) -> Self {
        Self
    }

    pub(super) fn apply(self, http: HttpSettings) -> Result<HttpSettings, String> {
        Ok(http)
    }
}
