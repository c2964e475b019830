//! The envelope a value is stored in: when it was stored, until when it is fresh, its key, and a checksum.
//!
//! Pure functions of bytes. The payload is sliced out of the store's reply, never copied, unless it is compressed.
//! Bytes that fail a check (another version, cut short, a flipped bit, another key) are a miss:
//! the caller loads again and the next commit repairs the entry.

use bytes::{Buf as _, BufMut as _, Bytes, BytesMut};
use crc_fast::crc32_iscsi;

use super::freshness::{Expiry, Freshness};
use super::lz4::Packed;
use super::tags::TagList;
use crate::key::Key;

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
/// not know a compression, an older one or one without the feature `lz4`, has a miss.
const HEADER: usize = 68;
const CRC_AT: usize = 4;
const CHECKED_FROM: usize = 8;
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
    #[cfg(feature = "http")]
    pub(crate) const HTTP: Self = Self(3);
}

/// A decoded value and its metadata. It is moved several times on each hit, so fields that few entries use (a validator,
/// tags) take little space.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) kind: EntryKind,
    pub(crate) encoding: Encoding,
    /// Milliseconds on the store's clock.
    pub(crate) stored_at: u64,
    /// Until when, and how, the value may be served.
    pub(crate) expiry: Expiry,
    /// The loader compares this with the origin to see whether the value has changed; empty if there is none.
    pub(crate) validator: Box<[u8]>,
    /// The tags under which the value is invalidated, besides its key.
    pub(crate) tags: TagList,
    pub(crate) payload: Bytes,
    /// The payload as it is stored, if that is compressed.
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
    /// Compressed by a method that this process does not know (1 is that of the feature `lz4`), from a payload that is longer than
    /// `longest`, or not from a payload of this length.
    Compressed { method: u8, length: u32, longest: usize },
}

impl Entry {
    pub(crate) fn is_fresh(&self, now: u64) -> bool {
        now < self.expiry.fresh_until
    }

    /// How the entry may be served at `now`; a marker never may.
    pub(crate) fn serves(&self, now: u64) -> Freshness {
        match self.kind {
            EntryKind::Value => self.expiry.serves(now),
            EntryKind::Marker => Freshness::Expired,
        }
    }

    /// The bytes to store under `key`. Those of a decoded entry are the bytes that it was decoded from.
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

    /// Decodes the bytes stored under `key`. The payload is the rest of `raw`, or up to `longest` bytes that are decompressed from
    /// it; `raw` is returned if it is no entry.
    pub(crate) fn decode(mut raw: Bytes, key: &Key, longest: usize) -> Result<Self, (Unreadable, Bytes)> {
        match Self::decode_header(&raw, key) {
            Ok((header, [validator_at, tags_at, payload_at], compression)) => {
                let validator = raw[validator_at..tags_at].into();
                let tags = TagList::from_bytes(&raw[tags_at..payload_at]);
                if compression != UNCOMPRESSED {
                    let (packed, payload) = unpacked(&raw, payload_at, compression, longest)?;
                    return Ok(Self { validator, tags, payload, packed, ..header });
                }
                raw.advance(payload_at);
                Ok(Self { validator, tags, payload: raw, ..header })
            }
            Err(reason) => Err((reason, raw)),
        }
    }

    /// Decodes everything but the validator, the tags and the payload, and returns where these begin, and how the payload is
    /// compressed.
    fn decode_header(raw: &[u8], key: &Key) -> Result<(Self, [usize; 3], u8), Unreadable> {
        let Some((header, rest)) = raw.split_first_chunk::<HEADER>() else {
            return Err(Unreadable::Foreign);
        };
        if header[..2] != MAGIC {
            return Err(Unreadable::Foreign);
        }
        if header[2] != VERSION {
            return Err(Unreadable::Version(header[2]));
        }
        let u32_at =
            |at: usize| u32::from_le_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]);
        let (key_len, payload_len) = (u32_at(12) as usize, u32_at(16) as usize);
        let u16_at = |at: usize| usize::from(u16::from_le_bytes([header[at], header[at + 1]]));
        let (validator_len, tags_len) = (u16_at(10), u16_at(64));
        let length =
            key_len.checked_add(payload_len).and_then(|all| all.checked_add(validator_len + tags_len));
        if header[3] != 0 || header[67] != 0 || length != Some(rest.len()) {
            return Err(Unreadable::Corrupt);
        }
        if crc32_iscsi(&raw[CHECKED_FROM..]) != u32_at(CRC_AT) {
            return Err(Unreadable::Corrupt);
        }
        if &rest[..key_len] != key.full().as_bytes() {
            return Err(Unreadable::OtherKey);
        }
        let kind = match header[9] {
            0 => EntryKind::Value,
            1 => EntryKind::Marker,
            _ => return Err(Unreadable::Corrupt),
        };
        let entry = Self {
            kind,
            encoding: Encoding(header[8]),
            stored_at: u64_from(&header[20..]),
            expiry: Expiry {
                fresh_until: u64_from(&header[28..]),
                stale_until: u64_from(&header[36..]),
                error_until: u64_from(&header[44..]),
                retry_at: u64_from(&header[52..]),
                load_ms: u32_at(60),
            },
            validator: Box::default(),
            tags: TagList::default(),
            payload: Bytes::new(),
            packed: Packed::default(),
        };
        let validator_at = HEADER + key_len;
        let tags_at = validator_at + validator_len;
        Ok((entry, [validator_at, tags_at, tags_at + tags_len], header[66]))
    }
}

/// Decompresses the payload at `at`. Its length is checked before memory is taken for it.
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

/// Sets the checksum of an entry's bytes.
#[cfg(any(test, fuzzing))]
pub(crate) fn sealed(mut raw: Vec<u8>) -> Bytes {
    if raw.len() >= HEADER {
        let crc = crc32_iscsi(&raw[CHECKED_FROM..]);
        raw[CRC_AT..CHECKED_FROM].copy_from_slice(&crc.to_le_bytes());
    }
    raw.into()
}

fn u64_from(bytes: &[u8]) -> u64 {
    bytes.first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes))
}

#[cfg(test)]
#[path = "../../tests/unit/value/entry_tests.rs"]
mod tests;
