//! What tags ask of a store: an id per tag, read in one step with the entry that depends on it. And what
//! resources with variants do: a list of them that is no longer than it may be.

use std::fmt;
use std::time::Duration;

use bytes::Bytes;

use super::Reply;
use crate::key::Key;

/// The ids of a store's tags, and its lists. `within` and cancellation are as in [`Store`](super::Store).
pub(crate) trait TagStore: fmt::Debug + Send + Sync {
    /// LOOK UP with the present ids of tags, all as they are at one moment; `None` for a tag without one.
    fn look_up_tagged<'a>(&'a self, key: &'a Key, tags: &'a [Key], within: Duration) -> Reply<'a, Found>;

    /// The present ids of tags; `None` for a tag without one.
    fn present_ids<'a>(&'a self, tags: &'a [Key], within: Duration) -> Reply<'a, Vec<Option<u64>>>;

    /// The ids of tags, made where there are none. Each lives for `life` from now at the least.
    fn tag_ids<'a>(&'a self, tags: &'a [Key], life: Duration, within: Duration) -> Reply<'a, Vec<u64>>;

    /// Removes the id of a tag.
    fn forget_tag<'a>(&'a self, tag: &'a Key, within: Duration) -> Reply<'a, ()>;

    /// Puts a member onto a list that has room for `most`; whether it is on it. The list lives for `life` from its
    /// first member on.
    #[cfg_attr(not(feature = "http"), allow(dead_code, reason = "of HTTP variants"))]
    fn enlist<'a>(&'a self, list: &'a Key, member: Member, most: usize, life: Duration) -> Reply<'a, bool>;

    /// Waits until so many replicas have what this node has written of `key`; how many have it by `within`.
    fn replicated<'a>(&'a self, key: &'a Key, replicas: u32, within: Duration) -> Reply<'a, u32>;
}

/// What tells the members of a list apart.
pub(crate) type Member = [u8; 8];

/// What a look-up with tags finds.
pub(crate) type Found = (Option<Bytes>, Vec<Option<u64>>);
