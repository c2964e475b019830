use super::*;

fn tag(name: &str) -> Key {
    Key::new("ns", &CacheKey::from(name))
}

#[test]
fn encoded_tags_decode_to_themselves() {
    let tags = [TagId { tag: tag("a"), id: 7 }, TagId { tag: tag("b:c"), id: u64::MAX }];
    let list = TagList::from_bytes(TagList::new(&tags).as_bytes());
    assert_eq!(list.iter().collect::<Vec<_>>(), [("ns:a", 7), ("ns:b%3Ac", u64::MAX)]);
    assert_eq!((list.id_of(&tag("a")), list.id_of(&tag("c"))), (Some(7), None));
    assert!(TagList::new(&[]).is_empty());
}

#[test]
fn no_user_tag_equals_the_tag_of_everything() {
    assert_ne!(tag_of_everything("ns"), tag("all"));
    assert_ne!(tag_of_everything("ns"), tag("~all"));
}

proptest::proptest! {
    #[test]
    fn decoding_arbitrary_bytes_does_not_panic(raw in proptest::collection::vec(0u8.., 0..100)) {
        let _ = TagList::from_bytes(&raw).iter().count();
    }
}
