//! [`ResponseMeta`], the metadata stored with a response: age, lifetimes, part and variant.

use std::slice;
use std::time::Duration;

use bytes::{BufMut as _, Bytes, BytesMut};
use http::header::HeaderMap;

use crate::http_rules::normalize::Normalization;
use crate::http_rules::ranges::Part;
use crate::http_rules::response::StoreDecision;
use crate::http_rules::reuse::{ReuseTerms, StaleWindows};
use crate::http_rules::vary::{Fingerprint, Names, Variant};
use crate::value::entry::{Encoding, Entry, EntryKind};
use crate::value::freshness::ms;

/// ```text
/// 0  layout   1
/// 1  flags    1
/// 2  length   2   of all metadata
/// 4  age      8   ms, when it was stored
/// 12 lifetime 8   ms
/// 20 stale    8 8 8   ms: while revalidated, on error, on disconnect
/// 44 part     8 8 8   first, last, length of the whole or MAX; only with PART
///    variant  8 32 2  generation, fingerprint, length of the names; names. Only with VARIES
///    language 32 1    fingerprint of the rest, length; language. Only with LANGUAGE
/// ```
/// All integers are little-endian. Another layout has another number in the first byte.
pub(crate) const FIXED: usize = 44;
const LAYOUT: u8 = 2;
const REVALIDATE_ALWAYS: u8 = 1;
const IMMUTABLE: u8 = 2;
const SAYS_SHARED: u8 = 4;
const ON_REQUEST: u8 = 8;
const PART: u8 = 16;
const VARIES: u8 = 32;
const LANGUAGE: u8 = 64;

/// Metadata stored with a response.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ResponseMeta {
    pub(crate) terms: ReuseTerms,
    /// Its age when it was stored (RFC 9111, 4.2.3).
    pub(crate) age: Duration,
    /// Which part of the whole its content is; `None` for the whole.
    pub(crate) part: Option<Part>,
    /// Boxed, because most resources have no variants.
    pub(crate) chosen: Option<Box<VariantId>>,
}

/// Which of a resource's variants the response is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct VariantId {
    /// The generation of the resource's variants. It is part of the other variants' keys, so they are unreachable
    /// once it is gone.
    pub(crate) generation: u64,
    pub(crate) names: Names,
    pub(crate) variant: Variant,
}

impl ResponseMeta {
    /// For a response that is stored at this age.
    pub(crate) fn new(storing: &StoreDecision, age: Duration, chosen: Option<Box<VariantId>>) -> Self {
        Self { terms: storing.terms, age, part: None, chosen }
    }

    /// For a response that is shared with waiters at this age, and not stored.
    pub(crate) fn shared_only(says_shared: bool, age: Duration, chosen: Option<Box<VariantId>>) -> Self {
        let terms = ReuseTerms {
            lifetime: Duration::ZERO,
            stale: StaleWindows::default(),
            revalidate_always: true,
            immutable: false,
            says_shared,
        };
        Self { terms, age, part: None, chosen }
    }

    /// Whether it is the variant for a request with these headers.
    pub(crate) fn is_for(&self, request: &HeaderMap, normal: Normalization) -> bool {
        self.chosen.as_ref().is_none_or(|chosen| {
            let one = slice::from_ref(&chosen.variant);
            Variant::select(&chosen.names, request, one, normal).is_some()
        })
    }

    /// Its age now (`current_age` of RFC 9111, 4.2.3), and its terms with the lifetime of its entry, which may be
    /// jittered or ended.
    pub(crate) fn at(&self, entry: &Entry, now: u64) -> (Duration, ReuseTerms) {
        let age = self.age.saturating_add(Duration::from_millis(now.saturating_sub(entry.stored_at)));
        let given = Duration::from_millis(entry.expiry.fresh_until.saturating_sub(entry.stored_at));
        // An expired entry is stale from now on, but its stale windows begin where they would have begun.
        let given = if entry.expiry.is_expired() { age } else { self.age.saturating_add(given) };
        let lifetime = self.terms.lifetime.min(given);
        (age, ReuseTerms { lifetime, ..self.terms })
    }

    /// Writes the metadata, before the bytes of the response.
    pub(crate) fn encode(&self, out: &mut BytesMut) -> Option<()> {
        let start = out.len();
        let ReuseTerms { lifetime, stale, revalidate_always, immutable, says_shared } = self.terms;
        let language = self.chosen.as_ref().and_then(|chosen| chosen.variant.language.as_ref());
        let flags = [
            (REVALIDATE_ALWAYS, revalidate_always),
            (IMMUTABLE, immutable),
            (SAYS_SHARED, says_shared),
            (ON_REQUEST, stale.on_request),
            (PART, self.part.is_some()),
            (VARIES, self.chosen.is_some()),
            (LANGUAGE, language.is_some()),
        ];
        out.put_u8(LAYOUT);
        out.put_u8(flags.iter().filter(|(_, is_set)| *is_set).map(|(flag, _)| flag).sum());
        // Filled in when the rest is written.
        out.put_u16_le(0);
        let windows = [stale.while_revalidate, stale.if_error, stale.on_disconnect];
        for time in [self.age, lifetime].into_iter().chain(windows) {
            out.put_u64_le(ms(time));
        }
        if let Some(Part { first, last, complete }) = self.part {
            out.put_u64_le(first);
            out.put_u64_le(last);
            out.put_u64_le(complete.unwrap_or(u64::MAX));
        }
        if let Some(chosen) = &self.chosen {
            out.put_u64_le(chosen.generation);
            out.put_slice(&chosen.variant.fingerprint.0);
            let names = chosen.names.to_text();
            out.put_u16_le(u16::try_from(names.len()).ok()?);
            out.put_slice(names.as_bytes());
        }
        if let Some((others, language)) = language {
            out.put_slice(&others.0);
            out.put_u8(u8::try_from(language.len()).ok()?);
            out.put_slice(language.as_bytes());
        }
        let length = u16::try_from(out.len() - start).ok()?;
        out[start + 2..start + 4].copy_from_slice(&length.to_le_bytes());
        Some(())
    }

    /// The metadata of an entry that is a response, and the offset of the response.
    pub(crate) fn of(entry: &Entry) -> Option<(Self, usize)> {
        if entry.encoding != Encoding::HTTP || entry.kind != EntryKind::Value {
            return None;
        }
        Self::decode(&entry.payload)
    }

    /// Reads the output of `encode`, and the offset of the response. Any other bytes are `None`.
    fn decode(raw: &Bytes) -> Option<(Self, usize)> {
        let fixed = raw.first_chunk::<FIXED>()?;
        let length = usize::from(u16::from_le_bytes([fixed[2], fixed[3]]));
        let flags = fixed[1];
        if fixed[0] != LAYOUT {
            return None;
        }
        let mut fields = MetaFields(raw.get(4..length)?);
        let [age, lifetime] = [fields.millis()?, fields.millis()?];
        let [while_revalidate, if_error, on_disconnect] =
            [fields.millis()?, fields.millis()?, fields.millis()?];
        let stale =
            StaleWindows { while_revalidate, if_error, on_disconnect, on_request: flags & ON_REQUEST != 0 };
        let part = if flags & PART == 0 { None } else { Some(fields.part()?) };
        let chosen = if flags & VARIES == 0 { None } else { Some(fields.chosen(flags & LANGUAGE != 0)?) };
        let terms = ReuseTerms {
            lifetime,
            stale,
            revalidate_always: flags & REVALIDATE_ALWAYS != 0,
            immutable: flags & IMMUTABLE != 0,
            says_shared: flags & SAYS_SHARED != 0,
        };
        fields.0.is_empty().then_some((Self { terms, age, part, chosen }, length))
    }
}

struct MetaFields<'a>(&'a [u8]);

impl<'a> MetaFields<'a> {
    fn bytes(&mut self, length: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(length)?;
        self.0 = rest;
        Some(taken)
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        self.bytes(N)?.try_into().ok()
    }

    fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }

    fn millis(&mut self) -> Option<Duration> {
        self.u64().map(Duration::from_millis)
    }

    fn text(&mut self, length: usize) -> Option<&'a str> {
        std::str::from_utf8(self.bytes(length)?).ok()
    }

    fn part(&mut self) -> Option<Part> {
        let (first, last, complete) = (self.u64()?, self.u64()?, self.u64()?);
        let complete = Some(complete).filter(|&complete| complete != u64::MAX);
        let sound = first <= last && complete.is_none_or(|complete| last < complete);
        sound.then_some(Part { first, last, complete })
    }

    fn chosen(&mut self, has_language: bool) -> Option<Box<VariantId>> {
        let generation = self.u64()?;
        let fingerprint = Fingerprint(self.array()?);
        let length = usize::from(self.array().map(u16::from_le_bytes)?);
        let names = Names::from_text(self.text(length)?)?;
        let language = match has_language {
            true => {
                let others = Fingerprint(self.array()?);
                let [length] = self.array()?;
                Some((others, self.text(length.into())?.to_owned()))
            }
            false => None,
        };
        Some(Box::new(VariantId { generation, names, variant: Variant { fingerprint, language } }))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "in a test the panic is the report")]
#[path = "../../tests/unit/http/metadata_tests.rs"]
mod tests;
