//! Which settings of a running guard's policy may not change.

use super::Policy;
use super::http::fixed_setting;

impl Policy {
    /// Why a running guard with the `old` policy does not take this one.
    pub(crate) fn refusal_after(&self, old: &Self) -> Option<String> {
        let (setting, why) = self.fixed_setting(old)?;
        Some(format!(
            "{setting} can not change while the guard runs: {why}. Begin with `guard.policy().to_builder()`, or start anew"
        ))
    }

    /// The first setting that differs and may not, and why.
    fn fixed_setting(&self, old: &Self) -> Option<(&'static str, &'static str)> {
        if self.name != old.name {
            return Some(("name", "its counters would count under another one"));
        }
        if self.codec != old.codec {
            return Some((
                "codec",
                "callers could not read the value of a load that runs, nor other processes what is stored",
            ));
        }
        if self.audit.same.is_some() != old.audit.same.is_some() {
            return Some(("audit_by", "audits would compare by another rule; a file has none"));
        }
        if !self.errors.include(&old.errors) {
            return Some(("share_errors", "errors would arrive as text; a file names no types"));
        }
        fixed_setting(&self.http, &old.http)
    }
}
