//! The contract of tags with a store: an id per tag, read in one step with the entry that depends on it. Also the
//! lists of HTTP variants, which are bounded.

use std::fmt;
use std::time::Duration;

use bytes::Bytes;

use super::Reply;
use super::volume::{Announced, Announcement};
use crate::key::Key;

/// The ids of a store's tags, and its lists. `within` and cancellation are as in [`Store`](super::Store).
pub(crate) trait TagStore: fmt::Debug + Send + Sync {
    /// LOOK UP of several entries with the present ids of tags, all at one moment; `None` for a tag without an id.
    fn look_up_tagged<'a>(
        &'a self,
        keys: &'a [Key],
        tags: &'a [Key],
        within: Duration,
    ) -> Reply<'a, TaggedLookUp>;

    /// The present ids of tags; `None` for a tag without an id.
    fn present_ids<'a>(&'a self, tags: &'a [Key], within: Duration) -> Reply<'a, Vec<Option<u64>>>;

    /// The ids of tags, created where missing. Each lives at least for `life` from now.
    fn tag_ids<'a>(&'a self, tags: &'a [Key], life: Duration, within: Duration) -> Reply<'a, Vec<u64>>;

    /// Removes the id of a tag. On one server the same step announces the change. A [voided](super::attempt) attempt changes
    /// nothing, as in [`Store::invalidate`](super::Store::invalidate).
    fn forget_tag<'a>(
        &'a self,
        tag: &'a Key,
        announcement: &'a Announcement,
        within: Duration,
    ) -> Reply<'a, Announced>;

    /// Adds a member to a list with room for `most`; answers whether it is on the list. The list lives for `life`
    /// from its first member on.
    fn enlist<'a>(
        &'a self,
        list: &'a Key,
        member: ListMember,
        most: usize,
        life: Duration,
    ) -> Reply<'a, bool>;

    /// Waits until `replicas` replicas have this node's writes to `key`; answers how many have them by `within`.
    fn replicated<'a>(&'a self, key: &'a Key, replicas: u32, within: Duration) -> Reply<'a, u32>;
}

/// Identifies a member of a list.
pub(crate) type ListMember = [u8; 8];

/// The result of a look-up with tags: the entries in the order of their keys, the ids in the order of their tags.
pub(crate) type TaggedLookUp = (Vec<Option<Bytes>>, Vec<Option<u64>>);
