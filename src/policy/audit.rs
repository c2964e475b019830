//! How hits are audited, and when an audited value counts as the same.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use serde::de::DeserializeOwned;

use crate::value::codec::Codec;
use crate::value::entry::Encoding;

/// The settings of audits.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct AuditSettings {
    /// Of so many hits one is audited, as a fraction.
    pub(crate) fraction: f64,
    pub(crate) grace: Duration,
    /// `None`: the same bytes.
    pub(super) same: Option<SameValue>,
}

impl Default for AuditSettings {
    fn default() -> Self {
        // An audit is a load: it must be an explicit choice. Most programs write first and invalidate next, within milliseconds; a
        // pipeline of changes may take longer.
        Self { fraction: 0.0, grace: Duration::from_secs(1), same: None }
    }
}

/// An encoded value.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Encoded<'a> {
    pub(crate) encoding: Encoding,
    pub(crate) payload: &'a Bytes,
}

/// Decodes and compares two values; `None` if one of them is not of the caller's type.
type Compare = dyn Fn([Encoded<'_>; 2]) -> Option<bool> + Send + Sync;

/// A caller's comparison.
#[derive(Clone)]
pub(super) struct SameValue(Arc<Compare>);

impl fmt::Debug for SameValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SameValue(..)")
    }
}

impl PartialEq for SameValue {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl AuditSettings {
    /// Whether this hit is audited.
    #[inline]
    pub(crate) fn draws(&self) -> bool {
        self.fraction > 0.0 && fastrand::f64() < self.fraction
    }

    /// Values are the same if they are to `is_same`.
    pub(super) fn compare_by<T: DeserializeOwned + 'static>(
        &mut self,
        is_same: impl Fn(&T, &T) -> bool + Send + Sync + 'static,
    ) {
        self.same = Some(SameValue(Arc::new(move |values| {
            let [served, loaded] = values.map(|value| Codec::decode::<T>(value.encoding, value.payload));
            Some(is_same(&served?, &loaded?))
        })));
    }

    /// Whether two values are the same; `None` if that cannot be told.
    pub(crate) fn is_same(&self, values: [Encoded<'_>; 2]) -> Option<bool> {
        match &self.same {
            Some(same) => (same.0)(values),
            // Of two codecs.
            None if values[0].encoding != values[1].encoding => None,
            None => Some(values[0].payload == values[1].payload),
        }
    }
}
