//! Without the feature `metrics`.

pub(crate) fn install() {}

pub(crate) fn render() -> Option<String> {
    None
}
