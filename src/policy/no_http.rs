//! What a policy has for the HTTP layer where the feature `http` is off: nothing.

#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct OverHttp;

#[derive(Clone, Debug, Default)]
pub(super) struct Requests;

impl Requests {
    pub(super) fn of(_http: &OverHttp) -> Self {
        Self
    }

    pub(super) fn apply(self, http: OverHttp) -> Result<OverHttp, String> {
        Ok(http)
    }
}
