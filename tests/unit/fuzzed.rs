//! Readers for the fuzzer: each decodes foreign bytes and checks the property that must hold for any bytes.
//!
//! The fuzzer (`fuzz/fuzz_targets/readers.rs`) reaches private decoders only through this module; the tests run the same
//! readers over `tests/corpus`. Compiled only for tests and the fuzzer.

use bytes::Bytes;

use crate::key::{CacheKey, Key};
use crate::value::FlightOutcome;
use crate::value::codec::Codec;
use crate::value::entry::{Encoding, Entry, sealed};

/// Reads any bytes, and panics if the property that it checks does not hold.
pub type Reader = fn(&[u8]);

/// Readers, each with the name by which an input of the fuzzer selects it.
pub type Readers = [(&'static str, Reader)];

/// The readers of all modules.
pub const READERS: &[&Readers] = &[
    &[("entry", entry), ("ending", ending), ("key", key), ("value", value)],
    #[cfg(feature = "redis")]
    crate::store::redis::fuzzed::READERS,
    #[cfg(feature = "http")]
    crate::http::fuzzed::READERS,
];

/// Passes the rest of `text` to the reader that its first line names.
pub fn run(text: &[u8]) {
    let end = text.iter().position(|&byte| byte == b'\n').unwrap_or(text.len());
    let (name, rest) = (&text[..end], text.get(end + 1..).unwrap_or_default());
    if let Some((_, read)) = READERS.iter().copied().flatten().find(|(reader, _)| reader.as_bytes() == name) {
        read(rest);
    }
}

fn the_key() -> Key {
    Key::new("ns", &CacheKey::from("k"))
}

/// The longest payload that a compressed entry may have.
const LONGEST: usize = 64 * 1024;

/// Adds a valid checksum, which random bytes would not have. The guard identifies stored bytes to the store by encoding
/// their entry again, so encoding must return the same bytes.
fn entry(bytes: &[u8]) {
    let raw = sealed(bytes.to_vec());
    if let Ok(entry) = Entry::decode(raw.clone(), &the_key(), LONGEST) {
        assert_eq!(entry.encode(&the_key()), raw, "there is one way to write an entry");
        if entry.packed.stored().is_some() {
            assert!(entry.payload.len() <= LONGEST, "no bomb goes off");
        }
        let _ = entry.tags.iter().count();
        for now in [0, entry.stored_at, entry.expiry.fresh_until, u64::MAX] {
            let _ = (entry.is_fresh(now), entry.serves(now));
        }
    }
}

fn ending(bytes: &[u8]) {
    let raw = Bytes::copy_from_slice(bytes);
    let again = FlightOutcome::decode(&raw, &the_key()).encode(&the_key());
    let _ = FlightOutcome::decode(&again, &the_key());
}

fn key(bytes: &[u8]) {
    let (one, other) = bytes.split_at(bytes.len() / 2);
    let joined = Key::new("ns", &CacheKey::from(bytes));
    let name = joined.name();
    assert!(name.len() <= 200 && name.bytes().all(|byte| byte.is_ascii_graphic()), "{name}");
    // A brace in the name would move the key to another slot of a cluster.
    assert!(!name.contains(['{', '}']), "{name}");
    let in_two_parts = CacheKey::from((String::from_utf8_lossy(one), String::from_utf8_lossy(other)));
    assert_ne!(Key::new("ns", &in_two_parts).full(), joined.full(), "two parts are not one");
}

fn value(bytes: &[u8]) {
    for encoding in [Encoding::MESSAGE_PACK, Encoding::JSON] {
        let payload = Bytes::copy_from_slice(bytes);
        let _ = Codec::is_nothing(encoding, &payload);
        let _ = Codec::decode::<(u64, String, Option<Vec<f32>>)>(encoding, &payload);
        let _ = Codec::decode::<serde_json::Value>(encoding, &payload);
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "in a test the panic is the report")]
mod tests {
    use std::fs;
    use std::path::Path;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn everything_in_the_corpus_holds() {
        let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus/readers");
        let mut met = Vec::new();
        for file in fs::read_dir(corpus).unwrap().map(|file| file.unwrap().path()) {
            let text = fs::read(&file).unwrap();
            let held = std::panic::catch_unwind(|| run(&text));
            assert!(held.is_ok(), "{}", file.display());
            met.push(text);
        }
        for (name, _) in READERS.iter().copied().flatten() {
            let line = [name.as_bytes(), b"\n"].concat();
            assert!(met.iter().any(|text| text.starts_with(&line)), "the corpus has nothing for {name}");
        }
    }

    proptest! {
        #[test]
        fn any_bytes_hold(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            for (_, read) in READERS.iter().copied().flatten() {
                read(&bytes);
            }
        }
    }
}
