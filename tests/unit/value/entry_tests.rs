//! The envelope of stored values: round trips, damage, and the bounds of its decoder.

use super::TagId;
use super::*;
use crate::key::CacheKey;

fn key(text: &str) -> Key {
    Key::new("ns", &CacheKey::from(text))
}

fn entry() -> Entry {
    Entry {
        kind: EntryKind::Value,
        encoding: Encoding::RAW,
        stored_at: 1_000,
        tag_expired_at: u64::MAX,
        expiry: Expiry {
            fresh_until: 61_000,
            stale_until: 62_000,
            error_until: 63_000,
            retry_at: 64_000,
            load_ms: 7,
        },
        validator: b"v1"[..].into(),
        tags: TagList::new(&[TagId { tag: key("tag"), id: 7 }]),
        payload: Bytes::from_static(b"the value"),
        packed: Packed::default(),
    }
}

const LONGEST: usize = 1024;

fn decode(raw: Bytes, as_key: &str) -> Result<Entry, (Unreadable, Bytes)> {
    Entry::decode(raw, &key(as_key), LONGEST)
}

fn refusal(raw: Bytes, as_key: &str) -> Unreadable {
    decode(raw, as_key).expect_err("refused").0
}

#[test]
fn round_trip_shares_the_memory_of_the_reply() {
    let raw = entry().encode(&key("k"));
    let memory = raw.as_ptr_range();
    let back = decode(raw, "k").expect("sound");
    assert_eq!(back, entry());
    assert!(memory.contains(&back.payload.as_ptr()));
}

/// Entries of other versions of the crate stay readable only if the checksum never changes: the vectors of RFC 3720, B.4.
#[test]
fn the_checksum_is_crc32c() {
    assert_eq!(crc32_iscsi(&[0; 32]), 0x8a91_36aa);
    assert_eq!(crc32_iscsi(&[0xff; 32]), 0x62a8_ab43);
    let long: Vec<u8> = (0..32).collect();
    assert_eq!(crc32_iscsi(&long), 0x46dd_794e);
}

#[test]
fn fresh_until_is_exclusive() {
    assert!(entry().is_fresh(60_999));
    assert!(!entry().is_fresh(61_000));
}

/// D1 of the failure model: no flipped bit and no cut is ever taken for a value.
#[test]
fn every_flipped_bit_and_every_cut_is_a_miss() {
    let raw = entry().encode(&key("k"));
    for bit in 0..raw.len() * 8 {
        let mut bad = raw.to_vec();
        bad[bit / 8] ^= 1 << (bit % 8);
        assert!(decode(bad.into(), "k").is_err(), "bit {bit}");
    }
    for len in 0..raw.len() {
        assert!(decode(raw.slice(..len), "k").is_err(), "cut to {len}");
    }
    let mut long = raw.to_vec();
    long.push(0);
    assert_eq!(refusal(long.into(), "k"), Unreadable::Corrupt);
}

/// Lengths of more than a byte, and lengths of zero, are encoded and decoded.
#[test]
fn an_encoded_entry_decodes_to_itself() {
    let tags: Vec<_> = (0..40).map(|id| TagId { tag: key(&format!("tag{id}")), id }).collect();
    let (long, name) = (vec![b'v'; 300], "k".repeat(300));
    let nothing =
        Entry { validator: Box::default(), tags: TagList::default(), payload: Bytes::new(), ..entry() };
    let cases = [
        Entry { validator: long.clone().into(), tags: TagList::new(&tags), payload: long.into(), ..entry() },
        Entry { kind: EntryKind::Marker, encoding: Encoding::JSON, ..nothing.clone() },
        nothing,
    ];
    for entry in cases {
        for name in ["k", &name] {
            assert_eq!(decode(entry.encode(&key(name)), name).as_ref(), Ok(&entry));
        }
    }
}

/// A correct checksum does not prove that this crate wrote the bytes, so the decoder checks each length and kind, too.
#[test]
fn impossible_lengths_and_kinds_are_refused_despite_a_right_checksum() {
    let sound = entry().encode(&key("k")).to_vec();
    let with = |at: usize, byte: u8| {
        let mut raw = sound.clone();
        raw[at] = byte;
        sealed(raw)
    };
    assert_eq!(decode(with(0, MAGIC[0]), "k"), Ok(entry()), "nothing is changed");
    // These are the reserved bytes, the kind, and the first and the last byte of each length.
    for at in [3, 9, 10, 11, 12, 15, 16, 19, 64, 65, 67] {
        assert_eq!(refusal(with(at, 0xff), "k"), Unreadable::Corrupt, "byte {at}");
    }
    for length in [sound.len() - 1, HEADER] {
        assert_eq!(refusal(sealed(sound[..length].to_vec()), "k"), Unreadable::Corrupt);
    }
    assert_eq!(refusal(sealed([&sound[..], b"!"].concat()), "k"), Unreadable::Corrupt);
}

#[test]
fn another_version_and_another_key_are_distinguished_from_damage() {
    let mut newer = entry().encode(&key("k")).to_vec();
    newer[2] = 9;
    assert_eq!(refusal(newer.into(), "k"), Unreadable::Version(9));
    assert_eq!(refusal(entry().encode(&key("k")), "l"), Unreadable::OtherKey);
    assert_eq!(refusal(Bytes::from_static(b"hello"), "k"), Unreadable::Foreign);
}

/// A process without the feature `lz4`, or of an older version, cannot read the payload, and loads the value again.
#[test]
fn an_unknown_compression_is_refused() {
    let mut raw = entry().encode(&key("k")).to_vec();
    for method in [if cfg!(feature = "lz4") { 2 } else { 1 }, 0xff] {
        raw[66] = method;
        let length = u32::from_le_bytes(*b"the ");
        let refused = Unreadable::Compressed { method, length, longest: LONGEST };
        assert_eq!(refusal(sealed(raw.clone()), "k"), refused);
    }
}

#[cfg(feature = "lz4")]
#[test]
fn a_compressed_entry_is_decoded_within_bounds_and_encoded_to_the_same_bytes() {
    let payload = Bytes::from(b"the value ".repeat(LONGEST / 10));
    let packed = Packed::of(&payload, 0);
    assert!(packed.stored().is_some());
    let whole = Entry { payload, packed, ..entry() };
    let raw = whole.encode(&key("k"));
    assert!(raw.len() < 200, "{}", raw.len());
    let back = decode(raw.clone(), "k").expect("sound");
    assert_eq!(back, whole);
    assert_eq!(back.encode(&key("k")), raw);
    // Another version of the compressor makes another block of the same payload: this one has only literals.
    let literals = [&[0xf0][..], &[255; 3], &[(1020 - 15 - 3 * 255_usize) as u8], &whole.payload].concat();
    let other = [&1020_u32.to_le_bytes()[..], &literals].concat();
    let (packed, payload) = Packed::unpack(other.into(), 1020).expect("a block");
    let other = Entry { payload, packed, ..entry() }.encode(&key("k"));
    let back = decode(other.clone(), "k").expect("sound");
    assert_eq!((&back.payload, back.encode(&key("k"))), (&whole.payload, other.clone()));
    assert_ne!(other, raw);
    // The entry with the same value and other times, as `expire` stores it.
    let expired = Entry { expiry: whole.expiry.expired(), ..whole.clone() };
    assert_eq!(decode(expired.encode(&key("k")), "k"), Ok(expired));
    for bit in 0..raw.len() * 8 {
        let mut bad = raw.to_vec();
        bad[bit / 8] ^= 1 << (bit % 8);
        assert!(decode(bad.into(), "k").is_err(), "bit {bit}");
    }
}

/// A decompression bomb states its own length. So the length is checked before anything is decompressed, and the block must then decompress
/// to exactly that length.
#[cfg(feature = "lz4")]
#[test]
fn a_bomb_and_a_wrong_length_are_refused() {
    let payload = Bytes::from(vec![0; LONGEST + 1]);
    let packed = Packed::of(&payload, 0);
    let raw = Entry { payload, packed, ..entry() }.encode(&key("k"));
    let at = HEADER + key("k").full().len() + 2 + entry().tags.as_bytes().len();
    let stating = |length: u32| {
        let mut raw = raw.to_vec();
        raw[at..at + 4].copy_from_slice(&length.to_le_bytes());
        sealed(raw)
    };
    for length in [LONGEST as u32 + 1, u32::MAX, LONGEST as u32, LONGEST as u32 - 1, 0] {
        let refused = Unreadable::Compressed { method: LZ4, length, longest: LONGEST };
        assert_eq!(refusal(stating(length), "k"), refused);
    }
    assert!(Entry::decode(raw.clone(), &key("k"), LONGEST + 1).is_ok());
    // The payload is too short to hold a length.
    let mut cut = raw[..at + 3].to_vec();
    cut[16..20].copy_from_slice(&3_u32.to_le_bytes());
    assert!(matches!(refusal(sealed(cut), "k"), Unreadable::Compressed { .. }));
}

proptest::proptest! {
    #[test]
    fn decoding_arbitrary_bytes_does_not_panic(raw in proptest::collection::vec(0u8.., 0..200)) {
        let _ = decode(raw.into(), "k");
    }
}
