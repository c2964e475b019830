//! Tags: names under which many values are invalidated at once, in one command however many there are.
//!
//! Each tag has a random id in the store. A load reads the ids of its tags before it begins, and its value is stored
//! with them. A value with other ids than the present ones is invalid. Invalidating a tag removes its id; the
//! next load creates another. An id that the store has evicted costs misses, and makes no invalidated value valid again.

use bytes::{Buf as _, BufMut as _};

use crate::error::{Error, ErrorKind};
use crate::key::{CacheKey, Key};

/// A tag with its id at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TagId {
    pub(crate) tag: Key,
    pub(crate) id: u64,
}

/// How many tags a value may have besides those of its policy, of which there are fewer, and the tag of everything.
pub(crate) const MOST_TAGS: usize = 16;

/// A caller's tags as keys, after it has given `before` other tags.
pub(crate) fn keys<K: Into<CacheKey>>(
    namespace: &str,
    tags: impl IntoIterator<Item = K>,
    before: usize,
) -> Result<Vec<Key>, Error> {
    let tags: Vec<CacheKey> = tags.into_iter().map(Into::into).collect();
    let refused = |text: String| Err(Error::new(ErrorKind::InvalidKey, text));
    if tags.iter().any(CacheKey::is_empty) {
        return refused("a tag is empty: give it at least one character".to_owned());
    }
    let all = before + tags.len();
    if all > MOST_TAGS {
        return refused(format!(
            "{all} tags are too many: give a value at most {MOST_TAGS} of its own, and what many values share to their policy"
        ));
    }
    Ok(tags.iter().map(|tag| Key::new(namespace, tag)).collect())
}

/// The reserved name of the tag of everything in a namespace.
pub(crate) const EVERYTHING: &str = "all";

/// The tag of everything in a namespace.
pub(crate) fn everything(namespace: &str) -> Key {
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
            // A key's name is bounded.
            bytes.put_u16_le(tag.name().len() as u16);
            bytes.put_slice(tag.name().as_bytes());
            bytes.put_u64_le(*id);
        }
        Self { bytes: bytes.into() }
    }

    pub(crate) fn from_bytes(bytes: &[u8]) -> Self {
        Self { bytes: bytes.into() }
    }

    pub(crate) fn as_bytes(&self) -> &[u8] {
        &self.bytes
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// The names and ids, up to the first unreadable byte. A tag behind that has no id, so it never counts as current.
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

#[cfg(test)]
mod tests {
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
        assert_ne!(everything("ns"), tag("all"));
        assert_ne!(everything("ns"), tag("~all"));
    }

    proptest::proptest! {
        #[test]
        fn decoding_arbitrary_bytes_does_not_panic(raw in proptest::collection::vec(0u8.., 0..100)) {
            let _ = TagList::from_bytes(&raw).iter().count();
        }
    }
}
