//! Without the feature `http`, no key is that of an HTTP resource.

use super::Key;

impl Key {
    pub(crate) fn of_reports(&self, _namespace: &str) -> Option<Self> {
        None
    }

    pub(crate) fn report_tag(&self) -> Option<Self> {
        None
    }

    pub(crate) fn of_path(&self, _namespace: &str) -> Option<Self> {
        None
    }

    pub(crate) fn is_below(&self, _above: &Self) -> bool {
        false
    }

    pub(crate) fn is_path(&self) -> bool {
        false
    }

    pub(crate) fn has_path(&self, _path: &Self) -> bool {
        false
    }
}
