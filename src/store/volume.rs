//! Volume leases: the data that nodes and the store exchange about them.
//!
//! A *volume* is one namespace on one store. Its *registry* has a random id, a flag that says whether it is mature, the
//! number of the last announcement, and the members: each node with the stamp of its last RENEW. The *log* has the last
//! announcements. Where one of the two is missing (evicted, flushed, never made), the step that needs it makes it anew: a registry
//! with a new id that is not mature, a log whose base entry has a random id.
//!
//! docs/decisions/401-local-tier.md has the proof that relies on these steps, numbered.

use std::fmt;
use std::time::Duration;

use uuid::Uuid;

use super::protocol::AttemptNumber;
use crate::key::Key;

/// The receiver of a node's messages about its volume.
pub(crate) trait VolumeListener: fmt::Debug + Send + Sync {
    /// Drops the copies of the changed name, and then acknowledges.
    fn announced(&self, announcement: &ReceivedAnnouncement);

    /// A member has acknowledged an announcement of this node.
    fn acknowledged(&self, id: Uuid, by: Uuid);

    /// Messages may have been lost.
    #[cfg_attr(
        not(any(feature = "redis", feature = "testing")),
        allow(dead_code, reason = "in memory no message gets lost")
    )]
    fn missed(&self);
}

/// The name of a changed value, or of a changed tag.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum ChangedName {
    /// The value of the key with this name.
    Value(Box<str>),
    /// All values with the tag of this name.
    Tag(Box<str>),
}

impl ChangedName {
    pub(crate) fn value(key: &Key) -> Self {
        Self::Value(key.name().into())
    }

    pub(crate) fn tag(tag: &Key) -> Self {
        Self::Tag(tag.name().into())
    }
}

/// One entry of the log. The id is compared, not only the number: a server that has lost writes uses numbers again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LogPosition {
    pub(crate) number: u64,
    pub(crate) id: Uuid,
}

/// The position up to which a node has applied the log, and the session in which it received that position: a mark is valid only
/// on the connection of that answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Mark {
    pub(crate) at: LogPosition,
    pub(crate) session: u64,
}

/// The arguments of a RENEW.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Renewal {
    /// Identifies this RENEW.
    pub(crate) stamp: u64,
    pub(crate) mark: Option<Mark>,
    /// A registry id that this node has known for a term: if the registry still has it, the registry is mature.
    pub(crate) known_registry: Option<Uuid>,
    /// How long a right may last. The registry stores the longest.
    pub(crate) term: Duration,
}

/// The answer to a RENEW.
#[derive(Clone, Debug)]
pub(crate) struct Renewed {
    pub(crate) registry: RegistryState,
    /// The announcements after the mark; `None` if they are not known: everything may have changed.
    pub(crate) announced: Option<Vec<LogRecord>>,
    /// The newest entry of the log, and the session of this answer.
    pub(crate) newest: Mark,
}

/// The state of the registry, which every answer contains.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RegistryState {
    pub(crate) registry_id: Uuid,
    /// Some process has known this registry id for a term.
    pub(crate) is_mature: bool,
    /// The longest term of a member.
    pub(crate) term: Duration,
}

/// An announcement, as the log has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LogRecord {
    pub(crate) id: Uuid,
    pub(crate) announcer: Uuid,
    pub(crate) name: ChangedName,
}

/// The arguments of an ANNOUNCE; its announcer is the node of the store.
#[derive(Clone, Debug)]
pub(crate) struct Announcement {
    /// The key of the volume: its name is the namespace and a colon.
    pub(crate) volume: Key,
    /// A new id for each attempt: an earlier attempt may yet run, and its answer is not known.
    pub(crate) id: Uuid,
    /// The number of the attempt at the change; an ANNOUNCE alone does not use it.
    pub(crate) attempt: AttemptNumber,
    /// Makes a registry where there is none. Otherwise nothing is announced there.
    pub(crate) creates: bool,
    /// As in a [`Renewal`].
    pub(crate) known_registry: Option<Uuid>,
    /// For the registry, if it is made.
    pub(crate) term: Duration,
}

/// The answer to a change with an [`Announcement`], or to an ANNOUNCE.
#[derive(Clone, Debug)]
pub(crate) enum Announced {
    /// There is no registry, so there are no members to wait for.
    NoRegistry,
    /// The change was made and not announced: the registry is on another server than the changed key (in a cluster).
    Separately,
    To(Audience),
}

/// The members that an announcement must reach.
#[derive(Clone, Debug)]
pub(crate) struct Audience {
    pub(crate) registry: RegistryState,
    /// The announcement's entry in the log, and the id of the entry before it.
    pub(crate) at: LogPosition,
    pub(crate) before: Uuid,
    /// All members except the announcer.
    pub(crate) members: Vec<Member>,
}

/// A node that may keep local copies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Member {
    pub(crate) node: Uuid,
    /// The stamp of its last RENEW.
    pub(crate) stamp: u64,
}

/// An announcement that has arrived as a message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ReceivedAnnouncement {
    pub(crate) number: u64,
    /// The id of the log's entry before it.
    pub(crate) before: Uuid,
    pub(crate) record: LogRecord,
}
