use super::*;

fn length(packed: &Bytes) -> usize {
    u32::from_le_bytes(*packed.first_chunk().expect("a length")) as usize
}

#[test]
fn a_short_payload_and_one_that_does_not_shrink_are_left_alone() {
    let text = vec![b'x'; 4096];
    assert!(Packed::of(&text, 4097).stored().is_none());
    assert!(Packed::of(&text, 4096).stored().is_some_and(|packed| packed.len() < 64));
    let noise: Vec<u8> = (0..4096).map(|_| fastrand::u8(..)).collect();
    assert!(Packed::of(&noise, 0).stored().is_none());
    assert!(Packed::of(&[], 0).stored().is_none());
    // The zeros compress to almost nothing: a seventh of the payload is enough for it to be stored compressed, a tenth is not.
    for (zeros, is_packed) in [(4096 / 7, true), (4096 / 10, false)] {
        let part = [&noise[..4096 - zeros], &vec![0; zeros]].concat();
        assert_eq!(Packed::of(&part, 0).stored().is_some(), is_packed, "{zeros}");
    }
}

#[test]
fn a_cut_block_and_a_wrong_length_are_refused() {
    let text = b"all work and no play ".repeat(100);
    let packed = Packed::of(&text, 0).stored().expect("shrinks").clone();
    let whole = Packed::unpack(packed.clone(), length(&packed)).expect("sound");
    assert_eq!((whole.0.stored(), &whole.1[..]), (Some(&packed), &text[..]));
    for end in 0..packed.len() {
        assert_eq!(Packed::unpack(packed.slice(..end), text.len()), None, "cut to {end}");
    }
    for wrong in [0, 1, text.len() - 1, text.len() + 1] {
        assert_eq!(Packed::unpack(packed.clone(), wrong), None, "{wrong} bytes");
    }
}

proptest::proptest! {
    #[test]
    fn a_compressed_payload_comes_back(unit in proptest::collection::vec(0u8.., 1..40), times in 1usize..200) {
        let payload = unit.repeat(times);
        if let Some(packed) = Packed::of(&payload, 0).stored() {
            let (again, back) = Packed::unpack(packed.clone(), length(packed)).expect("sound");
            assert_eq!((again.stored(), &back[..]), (Some(packed), &payload[..]));
        }
    }

    #[test]
    fn any_bytes_are_read_or_refused(packed in proptest::collection::vec(0u8.., 0..200), length in 0usize..2000) {
        if let Some((_, payload)) = Packed::unpack(packed.into(), length) {
            assert_eq!(payload.len(), length);
        }
    }
}
