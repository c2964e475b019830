//! Values: the stored entry, how long it may be served, its tags and encoding, and the outcome of a flight.
//!
//! - [`EntryReader`]: how one caller evaluates a stored entry and turns it into its value. It knows no Redis and no HTTP.
//! - [`StoredEntry`]: the entry found under a key, or bytes that are no usable entry, shared by all callers of one read.
//! - [`FlightOutcome`]: the outcome of a flight, for its waiters in this process and, as bytes, for those in other processes.

pub(crate) mod codec;
pub(crate) mod entry;

use std::any::Any;
use std::ops::Deref;
use std::sync::{Arc, OnceLock};

use bytes::{Buf, BufMut, Bytes, BytesMut};

use self::entry::{Entry, EntryKind, Freshness};
use crate::error::{EncodedError, Error, ErrorKind, Failure};
use crate::key::Key;

/// The value that the first caller of a shared read has made of the entry, reused by the others.
pub(crate) type SharedValue = OnceLock<Arc<dyn Any + Send + Sync>>;

/// How one caller turns a stored entry into its value, and whether it accepts it.
///
/// `shared` is present if other callers share the read that found the entry.
pub(crate) trait EntryReader {
    type Value;

    /// Whether the entry may be served to this caller without a load, and how.
    fn serves(&self, entry: &Entry, now: u64, _shared: Option<&SharedValue>) -> Freshness {
        entry.serves(now)
    }

    /// Whether the entry may be served to this caller if a load fails.
    fn stands_in(&self, entry: &Entry, now: u64) -> bool {
        entry.times().stands_in(now)
    }

    /// Whether this caller loads for itself if it does not accept the older value that stands in for a failed load.
    fn goes_on_alone(&self) -> bool {
        true
    }

    /// Whether other callers find their own entries through this one, as through a list of variants.
    fn leads_others(&self, _entry: &Entry) -> bool {
        false
    }

    /// Makes the value of an entry, for a call at `now` on the store's clock. `None` if the entry holds no such value.
    fn open(&self, entry: &Entry, now: u64, shared: Option<&SharedValue>) -> Option<Self::Value>;

    /// [`serves`](Self::serves), and the value if `opens` says so: for readers that decode something for both.
    fn read(
        &self,
        entry: &Entry,
        now: u64,
        shared: Option<&SharedValue>,
        opens: impl FnOnce(Freshness) -> bool,
    ) -> (Freshness, Option<Self::Value>) {
        let freshness = self.serves(entry, now, shared);
        (freshness, opens(freshness).then(|| self.open(entry, now, shared)).flatten())
    }

    /// Makes this caller's value of a value that is still being received; `None` if the caller cannot use it.
    fn open_incoming(&self, _incoming: &Arc<dyn Any + Send + Sync>) -> Option<Self::Value> {
        None
    }
}

/// A function that makes the value of an entry is a reader for a caller that accepts every entry that is within its times.
impl<F, V> EntryReader for F
where
    F: Fn(&Entry, u64, Option<&SharedValue>) -> Option<V>,
{
    type Value = V;

    fn open(&self, entry: &Entry, now: u64, shared: Option<&SharedValue>) -> Option<V> {
        self(entry, now, shared)
    }
}

/// The reader of a caller that requires a new load: it accepts no older value.
pub(crate) struct ForcedReader<R>(pub(crate) R);

impl<R: EntryReader> EntryReader for ForcedReader<R> {
    type Value = R::Value;

    fn serves(&self, _entry: &Entry, _now: u64, _shared: Option<&SharedValue>) -> Freshness {
        Freshness::Expired
    }

    fn stands_in(&self, _entry: &Entry, _now: u64) -> bool {
        false
    }

    /// No: otherwise, after a failed load, each of the concurrent callers would load for itself.
    fn goes_on_alone(&self) -> bool {
        false
    }

    fn open(&self, entry: &Entry, now: u64, shared: Option<&SharedValue>) -> Option<R::Value> {
        self.0.open(entry, now, shared)
    }
}

/// What one read found under a key.
#[derive(Debug)]
pub(crate) struct StoredEntry {
    /// The entry; or the bytes, if they are no entry of this key or if one of the entry's tags was invalidated.
    pub(crate) content: Result<Entry, Bytes>,
    /// The policy's tags that were checked in this read.
    pub(crate) checked: Box<[Key]>,
    /// The value that the first caller makes of the entry, for the other callers of a shared read; `None` if the read is not shared.
    pub(crate) shared: Option<SharedValue>,
}

impl StoredEntry {
    /// An entry that one caller has read.
    #[inline]
    pub(crate) fn new(content: Result<Entry, Bytes>) -> Self {
        Self { content, checked: Box::default(), shared: None }
    }

    /// This entry for all callers that share the read, which checked these tags.
    pub(crate) fn shared(self, checked: &[Key]) -> Self {
        Self { checked: checked.into(), shared: Some(SharedValue::new()), ..self }
    }

    /// The entry, if it holds a value: that value may be served if a load fails, and the load may revalidate it.
    pub(crate) fn value(&self) -> Option<&Entry> {
        self.content.as_ref().ok().filter(|entry| entry.kind == EntryKind::Value)
    }

    /// The bytes of this entry as they are stored under `key`.
    pub(crate) fn raw(&self, key: &Key) -> Bytes {
        match &self.content {
            Ok(entry) => entry.encode(key),
            Err(raw) => raw.clone(),
        }
    }
}

/// The entry that a caller has read: alone, without an allocation, or with the other callers of its read.
#[derive(Debug)]
pub(crate) enum Found {
    Own(StoredEntry),
    Shared(Arc<StoredEntry>),
}

impl Deref for Found {
    type Target = StoredEntry;

    fn deref(&self) -> &StoredEntry {
        match self {
            Self::Own(entry) => entry,
            Self::Shared(entry) => entry,
        }
    }
}

impl From<Found> for Arc<StoredEntry> {
    fn from(found: Found) -> Self {
        match found {
            Found::Own(entry) => Self::new(entry),
            Found::Shared(entry) => entry,
        }
    }
}

/// What every waiter of a flight receives.
#[derive(Clone, Debug)]
pub(crate) enum FlightOutcome {
    /// A value, stored or only shared with the current waiters.
    Value(Entry),
    /// A value that is still incoming, for waiters of this process: they can begin to read it. Its type is known to the loader and its
    /// callers only.
    Incoming(Arc<dyn Any + Send + Sync>),
    /// The load failed, and this older value may stand in for it.
    Stale(Entry),
    /// No value: the load failed.
    Failed(Failure),
    /// The flight has no value for this caller, which joins again: the call began after a change that the load has not seen,
    /// the value is only for the caller that loaded it, or the process ends.
    Invalidated,
    /// The value is for one caller only, so each loads for itself, without queueing.
    Uncacheable,
    /// Another process held the lease for longer than this flight waits.
    WaitedOut,
    /// No caller is left to load under the lease: each loads for itself.
    NoLoader,
    /// The runtime of the flight's task was dropped: waiters in other runtimes begin a new flight.
    Abandoned,
}

/// The first byte of an outcome that is an error of the guard, by the error's kind. A kind that is not listed is sent as `Timeout`.
const ERROR_TAGS: [(u8, ErrorKind); 5] = [
    (b't', ErrorKind::Timeout),
    (b'o', ErrorKind::Overloaded),
    (b's', ErrorKind::Store),
    (b'a', ErrorKind::Absent),
    (b'd', ErrorKind::Vanished),
];

impl FlightOutcome {
    /// The value, if the outcome is a current one: not stale, and not incoming.
    pub(crate) fn into_value(self) -> Option<Entry> {
        if let Self::Value(entry) = self { Some(entry) } else { None }
    }

    /// The failure that the leading caller receives if its loader has returned no value.
    pub(crate) fn into_failure(self) -> Failure {
        match self {
            Self::Failed(failure) => failure,
            Self::Stale(_) => Failure::with_text("the load failed; for others an older value stands in"),
            Self::Value(_)
            | Self::Incoming(_)
            | Self::Invalidated
            | Self::Uncacheable
            | Self::WaitedOut
            | Self::NoLoader
            | Self::Abandoned => Failure::vanished(),
        }
    }

    /// Whether this outcome has a value, which a change may have outdated.
    pub(crate) fn has_value(&self) -> bool {
        matches!(self, Self::Value(_) | Self::Stale(_))
    }

    /// Whether a leading caller with this outcome has waited for no load: it got no permit, capacity or store, or its flight did
    /// not wait for the load of another process.
    pub(crate) fn is_refusal(&self) -> bool {
        match self {
            Self::Failed(Failure::Guard(error)) => {
                matches!(error.kind(), ErrorKind::Overloaded | ErrorKind::Store)
            }
            _ => matches!(self, Self::NoLoader),
        }
    }

    /// The bytes that FAIL publishes to waiters in other processes. A value in it is not compressed: `max_body` bounds values
    /// before compression, so it bounds these bytes too.
    pub(crate) fn encode(&self, key: &Key) -> Bytes {
        let tagged = |tag: u8, content: &[u8]| {
            let mut out = BytesMut::with_capacity(1 + content.len());
            out.put_u8(tag);
            out.put_slice(content);
            out.freeze()
        };
        match self {
            Self::Value(entry) | Self::Stale(entry) => tagged(b'v', &entry.encode(key)),
            Self::Incoming(_)
            | Self::Invalidated
            | Self::Uncacheable
            | Self::WaitedOut
            | Self::NoLoader
            | Self::Abandoned => tagged(b'u', b""),
            Self::Failed(Failure::Loader { text, shared: Some(error), .. }) => encode_error(text, error),
            Self::Failed(Failure::Loader { text, shared: None, .. }) => tagged(b'f', text.as_bytes()),
            Self::Failed(Failure::Panicked(text)) => tagged(b'p', text.as_bytes()),
            Self::Failed(Failure::Guard(error)) => {
                let tag = ERROR_TAGS.iter().find(|(_, kind)| *kind == error.kind());
                tagged(tag.map_or(b't', |(tag, _)| *tag), error.to_string().as_bytes())
            }
        }
    }

    /// Decodes an outcome that another process has published; unreadable bytes mean [`Uncacheable`](Self::Uncacheable).
    pub(crate) fn decode(raw: &Bytes, key: &Key) -> Self {
        let text = || Arc::<str>::from(String::from_utf8_lossy(raw.get(1..).unwrap_or_default()));
        match raw.first() {
            Some(b'v') => match Entry::decode(raw.slice(1..), key, 0) {
                Ok(entry) => Self::Value(entry),
                Err(_) => Self::Uncacheable,
            },
            Some(b'f') => Self::Failed(Failure::with_text(text())),
            Some(b'e') => decode_error(raw.slice(1..)).map_or(Self::Uncacheable, Self::Failed),
            Some(b'p') => Self::Failed(Failure::Panicked(text())),
            Some(b'd') => Self::Failed(Failure::vanished()),
            first => match ERROR_TAGS.iter().find(|(tag, _)| Some(tag) == first) {
                Some((_, kind)) => Self::Failed(Failure::Guard(Error::new(*kind, text().as_ref()))),
                None => Self::Uncacheable,
            },
        }
    }
}

/// The bytes of a loader's error: its text and the name of its type, each after its length in two bytes (no text is too long for
/// two), then the encoded error. A process that does not know this form loads for itself.
fn encode_error(text: &str, error: &EncodedError) -> Bytes {
    let mut out = BytesMut::with_capacity(5 + text.len() + error.type_name.len() + error.payload.len());
    out.put_u8(b'e');
    for part in [text, &error.type_name] {
        out.put_u16_le(u16::try_from(part.len()).unwrap_or(u16::MAX));
        out.put_slice(part.as_bytes());
    }
    out.put_slice(&error.payload);
    out.freeze()
}

fn decode_error(mut raw: Bytes) -> Option<Failure> {
    let mut part = || {
        let length = usize::from(raw.try_get_u16_le().ok()?);
        let part = (length <= raw.len()).then(|| raw.split_to(length))?;
        String::from_utf8(part.into()).ok()
    };
    let (text, type_name) = (part()?, part()?.into());
    let shared = Some(EncodedError { type_name, payload: raw });
    Some(Failure::Loader { text: text.into(), source: None, shared })
}

#[cfg(test)]
mod tests {
    use super::entry::Expiry;
    use super::entry::{Encoding, EntryKind};
    use super::entry::{NEVER, TagList};
    use super::*;
    use crate::key::CacheKey;

    #[test]
    fn an_encoded_outcome_decodes_to_itself() {
        let key = Key::new("ns", &CacheKey::from("k"));
        let entry = Entry {
            kind: EntryKind::Value,
            encoding: Encoding::RAW,
            stored_at: 1,
            expiry: Expiry { fresh_until: 1, ..Expiry::default() },
            tag_expired_at: NEVER,
            validator: Box::default(),
            tags: TagList::default(),
            payload: Bytes::from_static(b"x"),
            packed: Default::default(),
        };
        let there = |ending: FlightOutcome| FlightOutcome::decode(&ending.encode(&key), &key);
        assert!(
            matches!(there(FlightOutcome::Value(entry.clone())), FlightOutcome::Value(back) if back == entry)
        );
        let shared = EncodedError { type_name: "app::Error".into(), payload: Bytes::from_static(b"\x81") };
        for shared in [None, Some(shared)] {
            let (text, source) = ("no route".into(), Some(Arc::new(1u8) as _));
            let failed = Failure::Loader { text, source, shared: shared.clone() };
            match there(FlightOutcome::Failed(failed)) {
                FlightOutcome::Failed(Failure::Loader { text, source: None, shared: back }) => {
                    assert_eq!((&*text, back), ("no route", shared));
                }
                other => panic!("{other:?}"),
            }
        }
        let kind = |ending| match ending {
            FlightOutcome::Failed(Failure::Guard(error)) => Some(error.kind()),
            _ => None,
        };
        let kinds = [ErrorKind::Timeout, ErrorKind::Overloaded, ErrorKind::Store, ErrorKind::Absent];
        for failure in kinds.map(|kind| Error::new(kind, "x")) {
            let decoded = there(FlightOutcome::Failed(Failure::Guard(failure.clone())));
            assert_eq!(kind(decoded), Some(failure.kind()));
        }
        assert_eq!(kind(there(FlightOutcome::Failed(Failure::vanished()))), Some(ErrorKind::Vanished));
        assert!(matches!(there(FlightOutcome::Uncacheable), FlightOutcome::Uncacheable));
    }

    proptest::proptest! {
        #[test]
        fn decoding_arbitrary_bytes_does_not_panic(raw in proptest::collection::vec(0u8.., 0..100)) {
            let _ = FlightOutcome::decode(&raw.into(), &Key::new("ns", &CacheKey::from("k")));
        }
    }
}
