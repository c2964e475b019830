//! How a flight ends, for those seated on it here and, as bytes, for those who wait in other processes.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use bytes::{BufMut, Bytes, BytesMut};

use super::entry::Entry;
use crate::error::{Error, ErrorKind, Failure};
use crate::key::Key;

/// What everyone who waited for a load is told.
#[derive(Clone, Debug)]
pub(crate) enum Ending {
    /// A value, stored or only shared with this wave.
    Value(Entry),
    /// A value on its way, for those who wait in this process: they may begin with it.
    #[cfg_attr(not(feature = "http"), expect(dead_code, reason = "of HTTP responses"))]
    Arriving(Arriving),
    /// The load failed, and this older value may stand in for it.
    Stale(Entry),
    /// No value: the load failed.
    Failed(Failure),
    /// There is nothing here for this caller, and another flight may have it: it came after a change that the load has not seen,
    /// the value is the leader's own, or the process ends. It asks again.
    Invalidated,
    /// The value is one caller's own, so each loads for itself, without queueing.
    Uncacheable,
    /// Somebody in another process leads for longer than this flight waits.
    WaitedOut,
    /// Nobody is left to load under the lease: each loads for itself.
    Gone,
    /// The flight ended with the runtime that it ran in: those who live in others begin a new one.
    Abandoned,
}

/// What is arriving is the loader's and its callers' own business.
#[derive(Clone)]
pub(crate) struct Arriving(pub(crate) Arc<dyn Any + Send + Sync>);

impl fmt::Debug for Arriving {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Arriving")
    }
}

impl Ending {
    /// Why the caller that led has nothing of its own.
    pub(crate) fn into_failure(self) -> Failure {
        match self {
            Self::Failed(failure) => failure,
            Self::Stale(_) => {
                let text = "the load failed; for others an older value stands in".into();
                Failure::Loader { text, source: None }
            }
            Self::Value(_)
            | Self::Arriving(_)
            | Self::Invalidated
            | Self::Uncacheable
            | Self::WaitedOut
            | Self::Gone
            | Self::Abandoned => Failure::vanished(),
        }
    }

    /// Whether it gives callers a value, which a change may have made outdated.
    pub(crate) fn has_value(&self) -> bool {
        matches!(self, Self::Value(_) | Self::Stale(_))
    }

    /// Whether nobody's load was waited for: there was no permit, no room, no store, or it was not here.
    pub(crate) fn is_refusal(&self) -> bool {
        match self {
            Self::Failed(Failure::Guard(error)) => {
                matches!(error.kind(), ErrorKind::Overloaded | ErrorKind::Store)
            }
            _ => matches!(self, Self::Gone),
        }
    }

    /// The bytes that FAIL leaves for those who wait elsewhere: a value is no longer there than one that is stored.
    pub(crate) fn encode(&self, key: &Key) -> Bytes {
        let tagged = |tag: u8, text: &str| {
            let mut out = BytesMut::with_capacity(1 + text.len());
            out.put_u8(tag);
            out.put_slice(text.as_bytes());
            out.freeze()
        };
        match self {
            Self::Value(entry) | Self::Stale(entry) => {
                let entry = entry.encode(key);
                let mut out = BytesMut::with_capacity(1 + entry.len());
                out.put_u8(b'v');
                out.put_slice(&entry);
                out.freeze()
            }
            Self::Arriving(_)
            | Self::Invalidated
            | Self::Uncacheable
            | Self::WaitedOut
            | Self::Gone
            | Self::Abandoned => tagged(b'u', ""),
            Self::Failed(Failure::Loader { text, .. }) => tagged(b'f', text),
            Self::Failed(Failure::Panicked(text)) => tagged(b'p', text),
            Self::Failed(Failure::Guard(error)) => {
                let tag = match error.kind() {
                    ErrorKind::Overloaded => b'o',
                    ErrorKind::Vanished => b'd',
                    ErrorKind::Store => b's',
                    _ => b't',
                };
                tagged(tag, &error.to_string())
            }
        }
    }

    /// Reads what another process left; anything unreadable means "load for yourself".
    pub(crate) fn decode(raw: &Bytes, key: &Key) -> Self {
        let text = || Arc::<str>::from(String::from_utf8_lossy(raw.get(1..).unwrap_or_default()));
        match raw.first() {
            Some(b'v') => match Entry::decode(raw.slice(1..), key) {
                Ok(entry) => Self::Value(entry),
                Err(_) => Self::Uncacheable,
            },
            Some(b'f') => Self::Failed(Failure::Loader { text: text(), source: None }),
            Some(b'p') => Self::Failed(Failure::Panicked(text())),
            Some(b't') => Self::Failed(Failure::Guard(Error::new(ErrorKind::Timeout, text().as_ref()))),
            Some(b'o') => Self::Failed(Failure::Guard(Error::new(ErrorKind::Overloaded, text().as_ref()))),
            Some(b's') => Self::Failed(Failure::Guard(Error::new(ErrorKind::Store, text().as_ref()))),
            Some(b'd') => Self::Failed(Failure::vanished()),
            _ => Self::Uncacheable,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::key::CacheKey;
    use crate::value::entry::{Encoding, Kind};
    use crate::value::freshness::Times;
    use crate::value::tags::TagList;

    #[test]
    fn outcomes_survive_the_way_to_another_process() {
        let key = Key::new("ns", &CacheKey::from("k"));
        let entry = Entry {
            kind: Kind::Value,
            encoding: Encoding::RAW,
            stored_at: 1,
            times: Times { fresh_until: 1, ..Times::default() },
            validator: Box::default(),
            tags: TagList::default(),
            payload: Bytes::from_static(b"x"),
        };
        let there = |ending: Ending| Ending::decode(&ending.encode(&key), &key);
        assert!(matches!(there(Ending::Value(entry.clone())), Ending::Value(back) if back == entry));
        let failed = Failure::Loader { text: "no route".into(), source: Some(Arc::new(1u8)) };
        assert!(
            matches!(there(Ending::Failed(failed)), Ending::Failed(Failure::Loader { text, source: None }) if &*text == "no route")
        );
        let kind = |ending| match ending {
            Ending::Failed(Failure::Guard(error)) => Some(error.kind()),
            _ => None,
        };
        let kinds = [ErrorKind::Timeout, ErrorKind::Overloaded, ErrorKind::Store];
        for failure in kinds.map(|kind| Error::new(kind, "x")) {
            let told = there(Ending::Failed(Failure::Guard(failure.clone())));
            assert_eq!(kind(told), Some(failure.kind()));
        }
        assert_eq!(kind(there(Ending::Failed(Failure::vanished()))), Some(ErrorKind::Vanished));
        assert!(matches!(there(Ending::Uncacheable), Ending::Uncacheable));
    }

    proptest::proptest! {
        #[test]
        fn no_bytes_make_it_panic(raw in proptest::collection::vec(0u8.., 0..100)) {
            let _ = Ending::decode(&raw.into(), &Key::new("ns", &CacheKey::from("k")));
        }
    }
}
