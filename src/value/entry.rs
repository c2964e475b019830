//! The stored entry: the envelope of a value, the times until which the value may be served, and its tags.
//!
//! The envelope states when the value was stored, until when it is fresh, its key, and a checksum. Encoding and decoding
//! are pure functions of bytes. The payload is sliced out of the store's reply, never copied, unless it is compressed.
//! Bytes that fail a check (another version, cut short, a flipped bit, another key) are a miss: the caller loads again and
//! the next commit repairs the entry.
//!
//! A value may be served fresh, stale, or only if a load fails: pure arithmetic decides which. A policy or a response sets
//! the [`Lifetimes`] of a value; with the time of the load they become the [`Expiry`], which is stored with the value. A
//! later load may end without a value to store: [`Unstored`] says what that means for the older value.
//!
//! A tag is a name under which many values are invalidated at once, in one command however many there are. Each tag has a
//! random id in the store. A load reads the ids of its tags before it begins, and its value is stored with them. A value
//! whose ids differ from the present ones is invalid. Invalidating a tag removes its id; the next load creates another. If
//! the store evicts an id, that costs misses, but makes no invalidated value valid again.

#[cfg(test)]
#[path = "../../tests/unit/value/freshness_tests.rs"]
mod freshness_tests;
#[cfg(all(test, feature = "lz4"))]
#[path = "../../tests/unit/value/lz4_tests.rs"]
mod lz4_tests;
#[cfg(test)]
#[path = "../../tests/unit/value/tags_tests.rs"]
mod tags_tests;
#[cfg(test)]
#[path = "../../tests/unit/value/entry_tests.rs"]
mod tests;

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Buf as _, BufMut as _, Bytes, BytesMut};
use crc_fast::crc32_iscsi;

use crate::error::{Error, ErrorKind};
use crate::key::{CacheKey, Key};
pub(crate) use crate::store::protocol::NEVER;

/// `sg`, then the layout version. Raising the version makes every older entry a miss.
const MAGIC: [u8; 2] = *b"sg";
const VERSION: u8 = 2;

/// ```text
/// 0  magic    2
/// 2  version  1
/// 3  zero     1
/// 4  CRC32C of all that follows  4
/// 8  codec    1   how the payload is encoded
/// 9  kind     1   0 value, 1 marker of an uncacheable resource
/// 10 length of the validator  2
/// 12 length of the key        4
/// 16 length of the payload    4
/// 20 stored at, server ms     8
/// 28 fresh until, server ms   8
/// 36 stale until, server ms   8
/// 44 error until, server ms   8
/// 52 retry at, server ms      8
/// 60 time the load took, ms   4
/// 64 length of the tags       2
/// 66 compression 1   of the payload: 0 none, 1 its length (4 bytes) and a block of LZ4
/// 67 zero        1
/// 68 key, validator, tags, payload
/// ```
/// All integers are little-endian. The checksum comes first, so that one pass covers the rest. A process that does
/// not know a compression (an older version, or one without the feature `lz4`) has a miss.
const HEADER: usize = 68;
const CRC_AT: usize = 4;
const CHECKED_FROM: usize = 8;
const KEY_LENGTH_AT: usize = 12;
const UNCOMPRESSED: u8 = 0;
const LZ4: u8 = 1;

/// What an entry holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EntryKind {
    /// A value that may be served.
    Value,
    /// No value: the resource was found uncacheable a moment ago, so do not queue for it.
    Marker,
}

/// How a payload is encoded. A reader that expects another encoding has a miss.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Encoding(pub(crate) u8);

impl Encoding {
    pub(crate) const RAW: Self = Self(0);
    pub(crate) const MESSAGE_PACK: Self = Self(1);
    pub(crate) const JSON: Self = Self(2);
    pub(crate) const HTTP: Self = Self(3);
}

/// A decoded value and its metadata. It is moved several times on each hit, so fields that few entries use (a validator,
/// tags) take little space.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) kind: EntryKind,
    pub(crate) encoding: Encoding,
    /// When the value was stored, in milliseconds on the store's clock.
    pub(crate) stored_at: u64,
    /// Until when, and how, the value may be served.
    pub(crate) expiry: Expiry,
    /// When one of its tags was last expired since its load ([`TagState`](crate::store::protocol::TagState)), as of the read of this entry,
    /// else [`NEVER`]. It is not stored with the entry: see [`times`](Self::times).
    pub(crate) tag_expired_at: u64,
    /// The loader sends or compares this to learn whether the value has changed at the origin; empty for a value without a validator.
    pub(crate) validator: Box<[u8]>,
    /// The tags under which the value is invalidated, besides its key.
    pub(crate) tags: TagList,
    pub(crate) payload: Bytes,
    /// The payload in its stored form, if it is stored compressed.
    pub(crate) packed: Packed,
}

/// Why a stored entry is of no use to a caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unreadable {
    /// Too short, or no magic: data of another program.
    Foreign,
    /// Another layout version, older or newer.
    Version(u8),
    /// The lengths or the checksum do not match.
    Corrupt,
    /// A sound entry of another key: two long keys share one name.
    OtherKey,
    /// A sound entry of this key, with a value of another type than the caller's.
    OtherType,
    /// Compressed by a method that this process does not know (1 is that of the feature `lz4`), or from a payload that is longer
    /// than `longest`, or from one whose length is not the stated one.
    Compressed { method: u8, length: u32, longest: usize },
}

impl Entry {
    /// A value without a validator that is stored at `stored_at`. None of its tags was expired since its load.
    pub(crate) fn value(
        encoding: Encoding,
        (payload, packed): (Bytes, Packed),
        (stored_at, expiry): (u64, Expiry),
        tags: TagList,
    ) -> Self {
        let (kind, tag_expired_at, validator) = (EntryKind::Value, NEVER, Box::default());
        Self { kind, encoding, stored_at, expiry, tag_expired_at, validator, tags, payload, packed }
    }

    pub(crate) fn is_fresh(&self, now: u64) -> bool {
        self.judged_at(now) < self.fresh_until()
    }

    /// Until when the value is served without restriction, as [`times`](Self::times) says.
    #[inline]
    pub(crate) fn fresh_until(&self) -> u64 {
        if self.tag_expired_at == NEVER { self.expiry.fresh_until } else { self.times().fresh_until }
    }

    /// The moment for which a caller that came at `now` judges the entry: not before the expiry of its tags that its read has seen.
    #[inline]
    pub(crate) fn judged_at(&self, now: u64) -> u64 {
        if self.tag_expired_at == NEVER { now } else { now.max(self.tag_expired_at) }
    }

    /// Until when, and how, the value may be served, considering that its tags may have been expired since its load.
    #[inline]
    pub(crate) fn times(&self) -> Expiry {
        match self.tag_expired_at {
            NEVER => self.expiry,
            at => self.expiry.ended_at(at),
        }
    }

    /// Whether its freshness was ended before its time: by an expiry of its key or of one of its tags.
    pub(crate) fn is_ended_early(&self) -> bool {
        self.expiry.is_expired() || self.tag_expired_at != NEVER
    }

    /// How the entry may be served at `now`; a marker never may.
    pub(crate) fn serves(&self, now: u64) -> Freshness {
        match self.kind {
            EntryKind::Value => self.times().serves(self.judged_at(now)),
            EntryKind::Marker => Freshness::Expired,
        }
    }

    /// The bytes to store under `key`. A decoded entry is encoded to the same bytes from which it was decoded.
    pub(crate) fn encode(&self, key: &Key) -> Bytes {
        let (compression, payload) = match self.packed.stored() {
            Some(packed) => (LZ4, packed),
            None => (UNCOMPRESSED, &self.payload),
        };
        let full = key.full().as_bytes();
        let mut out = BytesMut::with_capacity(
            HEADER + full.len() + self.validator.len() + self.tags.as_bytes().len() + payload.len(),
        );
        out.put_slice(&MAGIC);
        out.put_u8(VERSION);
        out.put_u8(0);
        out.put_u32_le(0);
        out.put_u8(self.encoding.0);
        out.put_u8(match self.kind {
            EntryKind::Value => 0,
            EntryKind::Marker => 1,
        });
        // The setter of the validator bounds its length.
        out.put_u16_le(self.validator.len() as u16);
        // Keys and payloads of 4 GiB are refused earlier, by `max_body` and by Redis's limit of 512 MiB.
        out.put_u32_le(full.len() as u32);
        out.put_u32_le(payload.len() as u32);
        out.put_u64_le(self.stored_at);
        let Expiry { fresh_until, stale_until, error_until, retry_at, load_ms } = self.expiry;
        for time in [fresh_until, stale_until, error_until, retry_at] {
            out.put_u64_le(time);
        }
        out.put_u32_le(load_ms);
        out.put_u16_le(self.tags.as_bytes().len() as u16);
        out.put_u8(compression);
        out.put_u8(0);
        out.put_slice(full);
        out.put_slice(&self.validator);
        out.put_slice(self.tags.as_bytes());
        out.put_slice(payload);
        let crc = crc32_iscsi(&out[CHECKED_FROM..]);
        out[CRC_AT..CHECKED_FROM].copy_from_slice(&crc.to_le_bytes());
        out.freeze()
    }

    /// Decodes the bytes stored under `key`. The payload is the rest of `raw`, or up to `longest` bytes that are decompressed
    /// from it. On error, `raw` is returned.
    pub(crate) fn decode(mut raw: Bytes, key: &Key, longest: usize) -> Result<Self, (Unreadable, Bytes)> {
        let header = match Header::decode(&raw, key) {
            Ok(header) => header,
            Err(reason) => return Err((reason, raw)),
        };
        let Header { kind, encoding, stored_at, expiry, compression, .. } = header;
        let validator = raw[header.validator_at..header.tags_at].into();
        let tags = TagList::from_bytes(&raw[header.tags_at..header.payload_at]);
        let (packed, payload) = match compression {
            UNCOMPRESSED => {
                raw.advance(header.payload_at);
                (Packed::default(), raw)
            }
            _ => unpacked(&raw, header.payload_at, compression, longest)?,
        };
        let tag_expired_at = NEVER;
        Ok(Self { kind, encoding, stored_at, expiry, tag_expired_at, validator, tags, payload, packed })
    }

    /// The whole text of the key that stored bytes name; `None` if they are no entry.
    pub(crate) fn stored_key(raw: &[u8]) -> Option<&str> {
        let (header, rest) = raw.split_first_chunk::<HEADER>().filter(|(header, _)| header[..2] == MAGIC)?;
        let length = (&header[KEY_LENGTH_AT..]).try_get_u32_le().ok()? as usize;
        std::str::from_utf8(rest.get(..length)?).ok()
    }
}

/// The fields of an encoded entry that have a fixed length, and where the others begin.
struct Header {
    kind: EntryKind,
    encoding: Encoding,
    stored_at: u64,
    expiry: Expiry,
    compression: u8,
    validator_at: usize,
    tags_at: usize,
    payload_at: usize,
}

impl Header {
    fn decode(raw: &[u8], key: &Key) -> Result<Self, Unreadable> {
        let Some((header, rest)) = raw.split_first_chunk::<HEADER>() else {
            return Err(Unreadable::Foreign);
        };
        if header[..2] != MAGIC {
            return Err(Unreadable::Foreign);
        }
        if header[2] != VERSION {
            return Err(Unreadable::Version(header[2]));
        }
        // The fields are read in the order in which `encode` writes them.
        let mut fields = &header[CRC_AT..];
        let crc = fields.get_u32_le();
        let (encoding, kind) = (Encoding(fields.get_u8()), fields.get_u8());
        let validator_len = usize::from(fields.get_u16_le());
        let [key_len, payload_len] = [(), ()].map(|()| fields.get_u32_le() as usize);
        let stored_at = fields.get_u64_le();
        let [fresh_until, stale_until, error_until, retry_at] = [(); 4].map(|()| fields.get_u64_le());
        let expiry = Expiry { fresh_until, stale_until, error_until, retry_at, load_ms: fields.get_u32_le() };
        let tags_len = usize::from(fields.get_u16_le());
        let (compression, reserved) = (fields.get_u8(), fields.get_u8());
        // On a 32-bit machine the sum of the lengths overflows if damaged bytes state large ones.
        let length =
            key_len.checked_add(payload_len).and_then(|all| all.checked_add(validator_len + tags_len));
        if header[3] != 0 || reserved != 0 || length != Some(rest.len()) {
            return Err(Unreadable::Corrupt);
        }
        if crc32_iscsi(&raw[CHECKED_FROM..]) != crc {
            return Err(Unreadable::Corrupt);
        }
        if &rest[..key_len] != key.full().as_bytes() {
            return Err(Unreadable::OtherKey);
        }
        let kind = match kind {
            0 => EntryKind::Value,
            1 => EntryKind::Marker,
            _ => return Err(Unreadable::Corrupt),
        };
        let validator_at = HEADER + key_len;
        let tags_at = validator_at + validator_len;
        let payload_at = tags_at + tags_len;
        Ok(Self { kind, encoding, stored_at, expiry, compression, validator_at, tags_at, payload_at })
    }
}

/// Decompresses the payload that begins at offset `at`. The length that it states is checked before memory is allocated for it.
#[cold]
fn unpacked(
    raw: &Bytes,
    at: usize,
    method: u8,
    longest: usize,
) -> Result<(Packed, Bytes), (Unreadable, Bytes)> {
    let packed = raw.slice(at..);
    let length = packed.first_chunk().map_or(0, |length| u32::from_le_bytes(*length));
    let is_read = method == LZ4 && length as usize <= longest;
    let unpacked = is_read.then(|| Packed::unpack(packed, length as usize)).flatten();
    unpacked.ok_or_else(|| (Unreadable::Compressed { method, length, longest }, raw.clone()))
}

/// The compressed form of a payload, as it is stored: the payload's length, four bytes, little-endian; then an LZ4 block.
///
/// An entry has it beside its payload, because the store compares the bytes that a caller has read with its own, and another
/// version of the compressor makes other bytes of the same payload. It is one pointer, because each hit moves the entry several
/// times.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Packed(Option<Arc<Bytes>>);

impl Packed {
    /// Compresses a payload of `from` bytes or more. Holds nothing for a shorter payload, if compression saves less than an eighth, or
    /// without the feature `lz4`.
    #[inline]
    pub(crate) fn of(payload: &[u8], from: usize) -> Self {
        let packed = if payload.len() < from { None } else { lz4::compressed(payload) };
        Self(packed.map(|packed| Arc::new(packed.into())))
    }

    /// The payload of `length` bytes that was stored as `packed`; `None` if `packed` is not such a payload. The caller has checked
    /// the length, because so many bytes are allocated before the block is read.
    pub(crate) fn unpack(packed: Bytes, length: usize) -> Option<(Self, Bytes)> {
        let payload = lz4::decompressed(packed.get(size_of::<u32>()..)?, length)?;
        Some((Self(Some(Arc::new(packed))), payload.into()))
    }

    /// The stored form; `None` for a payload that is stored uncompressed.
    #[inline]
    pub(crate) fn stored(&self) -> Option<&Bytes> {
        self.0.as_deref()
    }
}

#[cfg(feature = "lz4")]
mod lz4 {
    /// `None` if compression saves less than an eighth.
    pub(super) fn compressed(payload: &[u8]) -> Option<Vec<u8>> {
        let mut packed = lz4_flex::block::compress_prepend_size(payload);
        if packed.len() > payload.len() - payload.len() / 8 {
            return None;
        }
        // The compressor has reserved room for the worst case.
        packed.shrink_to_fit();
        Some(packed)
    }

    pub(super) fn decompressed(block: &[u8], length: usize) -> Option<Vec<u8>> {
        let mut payload = vec![0; length];
        let written = lz4_flex::block::decompress_into(block, &mut payload).ok()?;
        (written == length).then_some(payload)
    }
}

#[cfg(not(feature = "lz4"))]
mod lz4 {
    pub(super) fn compressed(_: &[u8]) -> Option<Vec<u8>> {
        None
    }

    pub(super) fn decompressed(_: &[u8], _: usize) -> Option<Vec<u8>> {
        None
    }
}

/// These bytes of an entry with the checksum that matches them.
#[cfg(any(test, fuzzing))]
pub(crate) fn sealed(mut raw: Vec<u8>) -> Bytes {
    if raw.len() >= HEADER {
        let crc = crc32_iscsi(&raw[CHECKED_FROM..]);
        raw[CRC_AT..CHECKED_FROM].copy_from_slice(&crc.to_le_bytes());
    }
    raw.into()
}

/// How long a value may be served from the end of its load on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Lifetimes {
    /// How long the value is served without restriction. Zero: it goes only to callers that waited for its load.
    pub(crate) fresh_for: Duration,
    /// How long after `fresh_for` it is served while it is loaded anew in the background (RFC 5861, 3).
    pub(crate) stale_while_revalidate: Duration,
    /// How long after `fresh_for` it is served if a load fails or takes too long (RFC 5861, 4).
    pub(crate) stale_if_error: Duration,
    /// How long after `fresh_for` it stays stored for the next load to revalidate. This alone does not permit serving it.
    pub(crate) keep_for: Duration,
}

/// A century. A server or a timer adds a lifetime to the present, and the sum must be representable there.
const FOR_EVER: Duration = Duration::from_secs(100 * 365 * 86_400);

/// Until when a value may be served, in milliseconds on the store's clock. Each time is the first moment at which the
/// value may no longer be served in that way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Expiry {
    /// Until when the value is served without restriction.
    pub(crate) fresh_until: u64,
    /// Until when it is served while it is loaded anew in the background.
    pub(crate) stale_until: u64,
    /// Until when it is served if a load fails or takes too long.
    pub(crate) error_until: u64,
    /// No refresh begins before this moment, because a load has ended without a value to store; zero if no load has. Never later than the
    /// moment until which the value may be served after that load: it paces loads and extends no window. Values that are as small as
    /// [`Storage::MARKS`] are marks and no times.
    pub(crate) retry_at: u64,
    /// How long the value's load took, in milliseconds.
    pub(crate) load_ms: u32,
}

/// The effect on the older value of a load that ended without a value to store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unstored {
    /// The answer is about the resource, for all its callers: the older value ends.
    OfResource,
    /// The answer says nothing about the resource: it is about one request or one client, or it is a failure for which no older
    /// value stands in. The older value stays, within `stale_while_revalidate`.
    SaysNothing,
    /// The origin has failed. The older value may stand in until `stale_if_error` ends or this moment comes, whichever is earlier. The
    /// moment is earlier if the origin has answered, for example with a 503, and a longer window holds only for an origin that does not
    /// answer at all.
    Failure { before: u64 },
}

impl Unstored {
    /// The origin did not answer.
    pub(crate) const NO_ANSWER: Self = Self::Failure { before: u64::MAX };
}

/// How a value may be served at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Freshness {
    /// It is served without restriction.
    Fresh,
    /// It is served stale, and a load in the background should replace it.
    Stale,
    /// It is served stale. A load has ended recently without a value to store, so no other load should begin yet.
    BackingOff,
    /// It is served only if a load fails or takes too long.
    StaleIfError,
    /// It is not served.
    Expired,
}

impl Freshness {
    /// Whether callers are served at once, without waiting for a load.
    pub(crate) fn is_at_once(self) -> bool {
        matches!(self, Self::Fresh | Self::Stale | Self::BackingOff)
    }
}

impl Lifetimes {
    /// The lifetimes of a value that is fresh for this time, and then never served.
    pub(crate) fn fresh(fresh_for: Duration) -> Self {
        Self { fresh_for, ..Self::default() }
    }

    /// The times of a value whose load ended at `now`, and how long the store keeps the value; zero means that it is not stored.
    pub(crate) fn from(&self, now: u64, load_time: Duration) -> (Expiry, Duration) {
        let Self { fresh_for, stale_while_revalidate, stale_if_error, keep_for } = *self;
        let [fresh_for, stale_while_revalidate, stale_if_error, keep_for] =
            [fresh_for, stale_while_revalidate, stale_if_error, keep_for].map(|time| time.min(FOR_EVER));
        let fresh_until = now.saturating_add(ms(fresh_for));
        let times = Expiry {
            fresh_until,
            stale_until: fresh_until.saturating_add(ms(stale_while_revalidate)),
            error_until: fresh_until.saturating_add(ms(stale_if_error)),
            retry_at: 0,
            load_ms: u32::try_from(load_time.as_millis()).unwrap_or(u32::MAX),
        };
        let after = stale_while_revalidate.max(stale_if_error).max(keep_for);
        (times, fresh_for.saturating_add(after))
    }
}

/// Whether a value that its waiters receive is stored for later callers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Storage {
    #[default]
    Stored,
    /// Not stored: the load's lease had ended, perhaps because of a change that is not acknowledged yet.
    NotStored,
    /// Not stored: the load had no lease.
    Unleased,
    /// Unknown: the store has not answered the commit.
    Unconfirmed,
    /// Not stored: the loader or the policy forbids it.
    Forbidden,
}

impl Storage {
    /// The values of [`retry_at`](Expiry::retry_at) that tell waiters whether their value is stored. As times they are long past, so they
    /// cause no back-off.
    const MARKS: [(u64, Self); 4] =
        [(1, Self::NotStored), (2, Self::Unleased), (3, Self::Unconfirmed), (4, Self::Forbidden)];
}

impl Expiry {
    pub(crate) fn serves(&self, now: u64) -> Freshness {
        let Self { fresh_until, stale_until, error_until, retry_at, .. } = *self;
        if now < fresh_until {
            Freshness::Fresh
        } else if now < retry_at {
            Freshness::BackingOff
        } else if now < stale_until {
            Freshness::Stale
        } else if now < error_until {
            Freshness::StaleIfError
        } else {
            Freshness::Expired
        }
    }

    /// Whether the value may stand in for one that cannot be loaded.
    pub(crate) fn stands_in(&self, now: u64) -> bool {
        self.error_until > self.fresh_until && now < self.error_until
    }

    /// The times of the same value marked stale: it may then only stand in.
    pub(crate) fn expired(self) -> Self {
        Self { fresh_until: 0, stale_until: 0, retry_at: 0, ..self }
    }

    /// The times of the same value if its freshness ended at `at` already: its stale windows begin then, and are as long as before.
    fn ended_at(self, at: u64) -> Self {
        let earlier = self.fresh_until.saturating_sub(at.max(1));
        if earlier == 0 {
            return self;
        }
        let [fresh_until, stale_until, error_until] =
            [self.fresh_until, self.stale_until, self.error_until].map(|until| until.saturating_sub(earlier));
        // A back-off from before `at` holds back no load.
        Self { fresh_until, stale_until, error_until, retry_at: 0, ..self }
    }

    /// The times of the same value, loaded at `now`, if it is not stored: only its waiters receive it, and its freshness ends now.
    /// For them it is stale, not expired.
    pub(crate) fn not_stored(self, now: u64) -> Self {
        let stale_until = self.fresh_until.max(self.stale_until);
        Self { fresh_until: now, stale_until, ..self }
    }

    /// The same times with a mark that tells the waiters whether the value is stored. The mark does not affect how the value may be
    /// served.
    pub(crate) fn marked(self, storage: Storage) -> Self {
        let mark = Storage::MARKS.iter().find(|(_, of)| *of == storage);
        Self { retry_at: mark.map_or(self.retry_at, |(mark, _)| *mark), ..self }
    }

    /// How the value was [`marked`](Self::marked).
    pub(crate) fn storage(&self) -> Storage {
        let mark = Storage::MARKS.iter().find(|(mark, _)| *mark == self.retry_at);
        mark.map_or(Storage::Stored, |(_, storage)| *storage)
    }

    /// Whether [`expired`](Self::expired) has marked the value stale. A value whose freshness has merely ended is not marked.
    pub(crate) fn is_expired(&self) -> bool {
        self.fresh_until == 0 && self.error_until > 0
    }

    /// The first moment at which the value may not be served, once a load has ended without a value to store.
    pub(crate) fn served_until(&self, unstored: Unstored) -> u64 {
        match unstored {
            Unstored::OfResource => 0,
            Unstored::SaysNothing => self.stale_until,
            Unstored::Failure { before } => self.stale_until.max(self.error_until.min(before)),
        }
    }

    /// The times of the same value after a load that ended at `now` without a value to store: no refresh begins during `back_off`, which
    /// ends early if the value may no longer be served.
    pub(crate) fn rested(mut self, unstored: Unstored, now: u64, back_off: Duration) -> Self {
        self.retry_at = now.saturating_add(ms(back_off)).min(self.served_until(unstored));
        if let Unstored::Failure { before } = unstored {
            self.error_until = self.error_until.min(before);
        }
        self
    }

    /// Whether a caller should load the value anew although it is fresh: XFetch (Vattani, Chierichetti and
    /// Lowenstein, "Optimal Probabilistic Cache Stampede Prevention", VLDB 2015). The probability rises towards the end
    /// of freshness and with the load's duration; `random` is uniform in `0..1`.
    pub(crate) fn is_due_early(&self, now: u64, beta: f64, random: f64) -> bool {
        // For a `random` of 0, `-ln` is infinite, so the load is due.
        let ahead = f64::from(self.load_ms) * beta * -random.ln();
        now < self.fresh_until && (self.fresh_until - now) as f64 <= ahead
    }
}

/// The duration in whole milliseconds; `u64::MAX` if it has more.
pub(crate) fn ms(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// A tag with the id that it had when the id was read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TagId {
    pub(crate) tag: Key,
    pub(crate) id: u64,
}

/// Adds a caller's tags to those that a value `has`, each once; it may have `most`. In case of an error it has what it had.
pub(crate) fn add_tags<K: Into<CacheKey>>(
    has: &mut Vec<Key>,
    namespace: &str,
    tags: impl IntoIterator<Item = K>,
    most: usize,
) -> Result<(), Error> {
    let tags: Vec<CacheKey> = tags.into_iter().map(Into::into).collect();
    let refused = |text: String| Err(Error::new(ErrorKind::InvalidKey, text));
    if tags.iter().any(CacheKey::is_empty) {
        return refused("a tag is empty: give it at least one character".to_owned());
    }
    let before = has.len();
    let mut names: HashSet<Box<str>> = has.iter().map(|tag| tag.name().into()).collect();
    let tags = tags.iter().map(|tag| Key::new(namespace, tag));
    has.extend(tags.filter(|tag| names.insert(tag.name().into())));
    let all = has.len();
    if all > most {
        has.truncate(before);
        return refused(format!(
            "{all} tags are more than max_tags, which is {most}: the value is not stored. Raise max_tags, or give the policy the tags that \
             many values share"
        ));
    }
    Ok(())
}

/// The reserved name of the tag of everything in a namespace.
pub(crate) const EVERYTHING: &str = "all";

/// The tag of everything in a namespace.
pub(crate) fn tag_of_everything(namespace: &str) -> Key {
    Key::new(namespace, &CacheKey::reserved(EVERYTHING))
}

/// The tags of an entry in encoded form: `(length of the name 2, name, id 8)` each, little-endian.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct TagList {
    bytes: Box<[u8]>,
}

impl TagList {
    pub(crate) fn new(tags: &[TagId]) -> Self {
        let mut bytes = Vec::new();
        for TagId { tag, id } in tags {
            // A key's name is bounded, so its length fits two bytes.
            bytes.put_u16_le(tag.name().len() as u16);
            bytes.put_slice(tag.name().as_bytes());
            bytes.put_u64_le(*id);
        }
        Self { bytes: bytes.into() }
    }

    fn from_bytes(bytes: &[u8]) -> Self {
        Self { bytes: bytes.into() }
    }

    pub(crate) fn as_bytes(&self) -> &[u8] {
        &self.bytes
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// The names and ids, up to the first unreadable byte. A tag after that byte has no id, so it never counts as current.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (&str, u64)> {
        let mut rest = &self.bytes[..];
        std::iter::from_fn(move || {
            let length = usize::from(rest.try_get_u16_le().ok()?);
            let (name, after) = rest.split_at_checked(length)?;
            rest = after;
            let id = rest.try_get_u64_le().ok()?;
            Some((std::str::from_utf8(name).ok()?, id))
        })
    }

    pub(crate) fn id_of(&self, tag: &Key) -> Option<u64> {
        self.iter().find(|(name, _)| *name == tag.name()).map(|(_, id)| id)
    }
}
