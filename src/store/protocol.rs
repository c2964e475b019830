//! The data of the fleet protocol with a store: settings of connections; errors; tokens and names of locks; the order of
//! attempts at changes; the arguments and answers of the commands about entries, leases, tags, lists and locks, and about volumes.
//!
//! A *volume* is one namespace on one store. Its *registry* has a random id, a flag that says whether it is mature, the
//! number of the last announcement, and the members: each node with the stamp of its last RENEW. The *log* has the last
//! announcements. If one of the two is missing (evicted, flushed, never made), the step that needs it creates it: a registry
//! with a new id that is not mature, a log whose base entry has a random id.
//!
//! docs/decisions/401-local-tier.md has the proof that relies on these steps, numbered.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use tokio::time::Instant;
use uuid::{Builder, Uuid};

use crate::key::Key;
use crate::observe::FlightId;
use crate::sync::lock;

/// How long after its deadline an acquire or a change may run. The server's clock may be ahead of the guard's estimate,
/// which is made once a minute, and in a cluster from one master only.
pub(crate) const LATEST: Duration = Duration::from_secs(1);

/// The settings of a backend's connections. The first guard or `Locks` of the backend decides for all.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ConnectionSettings {
    /// The deadline of one command: a slower server counts as down.
    pub(crate) command_timeout: Duration,
    /// How many connections for commands there are to each server.
    pub(crate) connections: usize,
}

impl From<Duration> for ConnectionSettings {
    /// One connection, with this `command_timeout`.
    fn from(command_timeout: Duration) -> Self {
        Self { command_timeout, connections: 1 }
    }
}

/// Why a store did not answer.
#[derive(Clone, Debug)]
pub(crate) struct StoreError {
    pub(crate) kind: StoreErrorKind,
    pub(crate) source: Option<Arc<dyn std::error::Error + Send + Sync>>,
}

/// The kinds of [`StoreError`], by whether the command may have run and whether a retry can help.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StoreErrorKind {
    /// No connection: the command was not sent.
    Unavailable,
    /// The connection broke under the command, which may have run.
    Broken,
    /// No answer within the command's deadline; the command may have run or may still run.
    TimedOut,
    /// The server refuses now and may accept later (out of memory, loading, busy).
    Transient,
    /// The server refuses until its configuration or this user's rights change.
    Refused,
    /// The store was closed.
    Closed,
}

/// The answer of the store to one command.
pub(crate) type StoreResult<T> = Result<T, StoreError>;

impl StoreError {
    pub(crate) fn new(kind: StoreErrorKind) -> Self {
        Self { kind, source: None }
    }

    /// Whether a retry would get the same error.
    pub(crate) fn is_final(&self) -> bool {
        matches!(self.kind, StoreErrorKind::Refused | StoreErrorKind::Closed)
    }
}

impl StoreErrorKind {
    /// Whether the command may have run, or may still run.
    pub(crate) fn is_ambiguous(self) -> bool {
        matches!(self, Self::Broken | Self::TimedOut)
    }
}

impl fmt::Display for StoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.kind {
            StoreErrorKind::Unavailable => "the store is unavailable",
            StoreErrorKind::Broken => "the connection to the store broke",
            StoreErrorKind::TimedOut => "the store did not answer in time",
            StoreErrorKind::Transient => "the store refused the command for now",
            StoreErrorKind::Refused => "the store refused the command",
            StoreErrorKind::Closed => "the store is closed",
        })
    }
}

impl std::error::Error for StoreError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.source.as_deref().map(|source| source as _)
    }
}

/// Parses an id of 32 digits.
#[cfg(any(feature = "redis", feature = "inspector"))]
pub(crate) fn read_id(text: &[u8]) -> Option<Uuid> {
    Uuid::try_parse_ascii(text).ok().filter(|_| text.len() == 32)
}

/// The holder of a lease, or a waiter for one: `<node>:<flight>`, both random.
#[derive(Clone, PartialEq, Eq, Hash)]
pub(crate) struct Token(Arc<str>);

impl Token {
    /// 32 hex digits, a colon, 32 hex digits.
    pub(crate) const LEN: usize = 65;

    /// A new token of this node.
    pub(crate) fn mint(node: Uuid) -> Self {
        Self(format!("{}:{}", node.simple(), Uuid::new_v4().simple()).into())
    }

    /// A new token that contains the longest duration of its lease or lock. So an ACQUIRE under another policy,
    /// or a TAKE, notices if the remaining time is longer than the holder has ever requested. 90 bits of the
    /// second half are random. A token for more than 49 days contains no duration.
    pub(crate) fn mint_for(node: Uuid, lease: Duration) -> Self {
        let Ok(longest) = u32::try_from(lease.as_millis()) else { return Self::mint(node) };
        let mut flight = *Uuid::new_v4().as_bytes();
        flight[..4].copy_from_slice(&longest.to_be_bytes());
        // A UUID of version 8, whose bits the application defines (RFC 9562, 5.8).
        let flight = Builder::from_custom_bytes(flight).into_uuid();
        Self(format!("{}:{}", node.simple(), flight.simple()).into())
    }

    /// Parses a value of the store; `None` for anything that is not a token.
    pub(crate) fn parse(text: &[u8]) -> Option<Self> {
        let text = std::str::from_utf8(text).ok()?;
        let shaped = text.len() == Self::LEN
            && text
                .bytes()
                .enumerate()
                .all(|(at, byte)| if at == 32 { byte == b':' } else { byte.is_ascii_hexdigit() });
        shaped.then(|| Self(text.into()))
    }

    pub(crate) fn as_str(&self) -> &str {
        &self.0
    }

    /// The id of the load under this token's lease in traces.
    pub(crate) fn flight(&self) -> FlightId {
        FlightId::of(&self.0)
    }

    /// The first half, which identifies the node.
    pub(crate) fn node(&self) -> &str {
        &self.0[..32]
    }
}

// Never the token itself: any process that knows it can end its lease.
debug_as!(self: Token => "Token(..)");

/// The keys of a lock. The key alone identifies the lock.
#[derive(Clone, PartialEq, Eq, Hash)]
pub(crate) struct LockName {
    /// The mutex's own key, as foreign clients see it; for a semaphore, the key of its holders.
    pub(crate) key: Arc<str>,
    /// The text between the braces of this lock's other keys, so that they share the slot of `key`.
    pub(crate) tag: Arc<str>,
}

impl LockName {
    /// A mutex with a key of this crate.
    pub(crate) fn mutex(tag: &str) -> Self {
        Self { key: format!("sg1:m:{{{tag}}}").into(), tag: tag.into() }
    }

    /// A mutex under a key that foreign clients know. A key without braces hashes whole, so the key is the tag.
    pub(crate) fn prefixed(key: &str) -> Self {
        Self { key: key.into(), tag: key.into() }
    }

    /// The mutex that has this key.
    pub(crate) fn of_mutex_key(key: &str) -> Self {
        match key.strip_prefix("sg1:m:{").and_then(|tag| tag.strip_suffix('}')) {
            Some(tag) => Self::mutex(tag),
            None => Self::prefixed(key),
        }
    }

    /// A semaphore. It may have a mutex's tag: all their keys differ.
    pub(crate) fn semaphore(tag: &str) -> Self {
        Self { key: format!("sg1:sh:{{{tag}}}").into(), tag: tag.into() }
    }

    /// The lock that has this key.
    pub(crate) fn of_key(key: &str) -> Self {
        match key.strip_prefix("sg1:sh:{").and_then(|tag| tag.strip_suffix('}')) {
            Some(tag) => Self::semaphore(tag),
            None => Self::of_mutex_key(key),
        }
    }

    pub(crate) fn is_semaphore(&self) -> bool {
        self.key.starts_with("sg1:sh:{")
    }
}

// Never the name itself: it may contain data that must not appear in a log.
debug_as!(self: LockName => "LockName(..)");

/// How long the store keeps the number by which an attempt voids earlier ones, and how long after an attempt without an answer each
/// new attempt voids earlier ones. An attempt cannot be as late as that: it may run until [`LATEST`] after the deadline of one command.
pub(crate) const VOIDED_FOR: Duration = Duration::from_secs(60);

/// The number of an attempt among those of its node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct AttemptNumber {
    pub(crate) number: u64,
    /// Whether this attempt voids those with lower numbers. False if none has gone unanswered in the last [`VOIDED_FOR`]: then there is
    /// nothing to void, and the store writes no number.
    pub(crate) voids_earlier: bool,
}

/// Numbers the attempts of one node at changes, in the order in which it sends them, so that a late attempt cannot undo a newer
/// change.
///
/// A process sends a change again if an attempt has no answer. That attempt may still run later: after another attempt at the
/// same change was confirmed, and after newer changes were acknowledged. So attempts are numbered, and an attempt *voids* the
/// earlier ones of its node at the same name: it leaves its number in the store, and an attempt with a lower number changes
/// nothing.
///
/// Invariant: *if an attempt A has ended without an answer, and an attempt B at the same name was sent after that and is
/// confirmed, then A changes nothing from then on.* Proof: A has the lower number, because a number is taken before the
/// attempt is sent. A was noted as unanswered when it ended, so B was sent as one that voids earlier attempts; B ran, and left
/// its number in the same step. If A comes after that, it finds the number for [`VOIDED_FOR`]. On a server each attempt also
/// has a latest moment at which it may run, and that moment is before the number expires.
///
/// A voided attempt gets the same answer as one that came too late, so a change that is still needed is sent again under a
/// higher number. Therefore it does not matter which change the later attempt was for.
#[derive(Debug, Default)]
pub(crate) struct Attempts {
    latest: AtomicU64,
    /// Attempts that are sent before this moment must void earlier ones.
    void_until: Mutex<Option<Instant>>,
}

impl Attempts {
    /// The next attempt, to be called before it is sent.
    pub(crate) fn next(&self) -> AttemptNumber {
        // The number is taken first: any attempt that was noted as unanswered before this call has a lower number.
        let number = self.latest.fetch_add(1, Ordering::SeqCst) + 1;
        let voids_earlier = lock(&self.void_until).is_some_and(|until| Instant::now() < until);
        AttemptNumber { number, voids_earlier }
    }

    /// Begins to track an attempt that is sent now.
    pub(crate) fn sent(&self) -> SentAttempt<'_> {
        SentAttempt { of: self, is_answered: false }
    }
}

/// An attempt that is on its way. If this is dropped before [`answered`](Self::answered), the attempt may run later, so the next
/// attempts void it.
#[derive(Debug)]
pub(crate) struct SentAttempt<'a> {
    of: &'a Attempts,
    is_answered: bool,
}

impl SentAttempt<'_> {
    pub(crate) fn answered(mut self) {
        self.is_answered = true;
    }
}

impl Drop for SentAttempt<'_> {
    fn drop(&mut self) {
        if !self.is_answered {
            *lock(&self.of.void_until) = Some(Instant::now() + VOIDED_FOR);
        }
    }
}

/// The settings that a store is examined for.
#[derive(Clone, Debug)]
pub(crate) struct Examine {
    /// A key that no load uses.
    pub(crate) key: Key,
    /// How much of a request's time the commands to the store may take.
    pub(crate) coordination_budget: Duration,
    pub(crate) lease: Duration,
    /// How many replicas an invalidation waits for.
    pub(crate) replicas: u32,
}

/// The arguments of an ACQUIRE.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Acquire<'a> {
    pub(crate) token: &'a Token,
    pub(crate) lease: Duration,
    /// The stored bytes that this caller has read and will not use; `None` if it has read none.
    pub(crate) seen: Option<&'a Bytes>,
    /// The holder that this caller has waited for: that holder's outcome answers this caller, too.
    pub(crate) behind: Option<&'a Token>,
    /// Whether to queue if the lease is held.
    pub(crate) queue: bool,
}

/// The answer to an ACQUIRE.
#[derive(Clone, Debug)]
pub(crate) enum Acquired {
    /// An entry that the caller has not seen.
    Found(Bytes),
    /// The outcome of a holder that has ended without an entry, as it was passed to FAIL.
    Ended(Bytes),
    /// This token holds the lease.
    Granted,
    /// Another token, `holder`, holds the lease for `remaining` more.
    Held { remaining: Duration, holder: Token },
}

/// The arguments of a FAIL.
#[derive(Clone, Debug)]
pub(crate) struct Fail<'a> {
    pub(crate) token: &'a Token,
    /// The encoded outcome.
    pub(crate) outcome: Bytes,
    /// How long the outcome is stored for the waiters.
    pub(crate) keep: Duration,
    /// How long callers that did not wait for this load may read the outcome, too; zero for never.
    pub(crate) replay: Duration,
    pub(crate) older: OlderEntry,
    pub(crate) seen: Option<&'a Bytes>,
}

/// What a FAIL does with the stored entry, if that is the entry in `seen`. FAIL leaves any other entry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum OlderEntry {
    Stays,
    Ends,
    /// This marker, with this lifetime, replaces the entry; it is also stored where there is no entry.
    Marked(Bytes, Duration),
}

/// An entry that replaces another.
#[derive(Clone, Debug)]
pub(crate) struct Insert {
    pub(crate) entry: Bytes,
    pub(crate) keep: Duration,
    /// The only entry that this one may replace; if the key has another entry or none, nothing is stored. The entry itself may also
    /// be replaced, by a repeated step whose first answer was lost. `None` if it does not matter what the key has.
    pub(crate) over: Option<Bytes>,
}

/// The server that holds the keys of a name.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct NamedServer {
    /// Its index among the store's servers.
    pub(crate) number: usize,
    /// How long the latest reading of the server's clock took. It is read when a connection opens, and then at least once a minute.
    pub(crate) round_trip: Duration,
}

/// Whether the token still held the lease, so that the step took effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TokenCheck {
    Held,
    Lost,
    /// It held the lease, but the entry's key has foreign data: the waiters get the value, but it is not stored.
    #[cfg_attr(
        not(feature = "redis"),
        expect(dead_code, reason = "in memory there is no data of other programs")
    )]
    ForeignData,
}

/// How to hand over a lease.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HandOver {
    /// The lease of the new holder.
    pub(crate) lease: Duration,
    /// How many loads under this lease and those handed over before it have vanished, one after another.
    pub(crate) hops: u8,
    /// The token's node is shutting down: waiters of the same node leave, too, and are passed over.
    pub(crate) is_leaving: bool,
}

/// Where a HAND OVER has left the lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HandedOver {
    /// A waiter holds it.
    ToWaiter,
    /// There was no waiter; it is free.
    Freed,
    /// The token did not hold it any more.
    NotMine,
}

/// The arguments of a TAKE.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Take<'a> {
    pub(crate) token: &'a Token,
    /// `None` for a mutex that does not expire.
    pub(crate) ttl: Option<Duration>,
    /// Whether to queue if the mutex is held.
    pub(crate) queue: bool,
    /// A token that gives up the mutex, or its position in the queue, for this one: as a FREE with the same time to live, in the same
    /// step.
    pub(crate) instead: Option<&'a Token>,
}

/// The position in the queue that a LEAVE gives up.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Leave<'a> {
    pub(crate) token: &'a Token,
    /// The time to live of a mutex, or the lease of a permit, that the token was queued with.
    pub(crate) ttl: Option<Duration>,
}

/// The answer to a TAKE of a mutex.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MutexTaken {
    pub(crate) taken: Taken,
    /// Whether the token in `instead` held the mutex until this step. A repeated take answers false.
    pub(crate) was_held: bool,
}

/// Whether the mutex was taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Taken {
    /// This token holds the mutex.
    Granted { fence: u64 },
    /// Another token holds the mutex, for `remaining` more; `None` if that token has no time to live.
    Busy { remaining: Option<Duration> },
}

/// The holder of a mutex.
#[derive(Clone, Debug)]
pub(crate) struct MutexHolder {
    /// The value of the key: a token of this crate, or a foreign client's value.
    pub(crate) token: Bytes,
    pub(crate) remaining: Option<Duration>,
}

/// The arguments of a TAKE of a permit.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TakePermit<'a> {
    pub(crate) token: &'a Token,
    pub(crate) lease: Duration,
    pub(crate) semaphore: Create,
    pub(crate) queue: bool,
}

/// The settings with which the first caller creates a semaphore.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Create {
    pub(crate) capacity: u32,
    /// How long the semaphore outlives its last use. It always outlives its permits' leases.
    pub(crate) idle_ttl: Duration,
}

/// The answer to a TAKE of a permit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PermitTaken {
    pub(crate) granted: bool,
    pub(crate) available: u32,
    /// The capacity the semaphore was created with, which may differ from the requested one.
    pub(crate) created_with: u32,
    /// The time until the next lease of a permit ends, if it is not renewed.
    pub(crate) next_expiry: Option<Duration>,
}

/// The answer to a FREE of a permit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PermitFreed {
    pub(crate) was_held: bool,
    pub(crate) available: u32,
}

/// A semaphore at one moment.
#[derive(Clone, Debug)]
pub(crate) struct SemaphoreState {
    pub(crate) created_with: u32,
    /// Including the permits that [`SemaphoreChange::Add`] has added.
    pub(crate) capacity: u32,
    pub(crate) available: u32,
    pub(crate) waiting: u32,
    /// The holders with a running lease, and its remaining time, the earliest first.
    pub(crate) holders: Vec<(Token, Duration)>,
    /// Whether the step that answers this created the semaphore.
    pub(crate) created: bool,
    /// How many permits the step that answers this took back because their leases had ended.
    pub(crate) recovered: u32,
}

/// A change of a semaphore.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SemaphoreChange {
    /// Create it, if there is none.
    Ensure(Create),
    /// Create it if there is none, and add `permits` permits.
    Add { permits: u32, semaphore: Create },
    /// Take back the permits with an ended lease.
    Sweep,
    /// Remove it; all waiters receive `closed`.
    Delete,
}

/// Whether the server announces changes of keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum KeyspaceAnswer {
    Yes,
    /// The server announces no changes, for this reason: one sentence for a log.
    No {
        why: &'static str,
    },
}

/// Identifies a member of a list (see [`Store::enlist`](super::Store::enlist)).
pub(crate) type ListMember = [u8; 8];

/// The result of a look-up with tags: the entries in the order of their keys, the ids in the order of their tags.
pub(crate) type TaggedLookUp = (Vec<Option<Bytes>>, Vec<Option<TagState>>);

/// The time of an event that has not happened, in place of milliseconds on the store's clock.
pub(crate) const NEVER: u64 = u64::MAX;

/// A tag in the store. Its id is what loads note with their values: the number with which the tag was made, plus one for each expiry since.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TagState {
    pub(crate) made_as: u64,
    pub(crate) expiries: u64,
    /// When the latest expiry was, in milliseconds on the store's clock.
    pub(crate) expired_at: u64,
}

impl TagState {
    /// A tag that has not been expired.
    pub(crate) fn new(made_as: u64) -> Self {
        Self { made_as, expiries: 0, expired_at: NEVER }
    }

    pub(crate) fn id(&self) -> u64 {
        self.made_as.wrapping_add(self.expiries)
    }

    /// When the freshness of a value ended that has the tag with this id; [`NEVER`] if the tag was not expired since the value's load.
    /// `None` if the tag was invalidated since then.
    pub(crate) fn expired_since(&self, id: u64) -> Option<u64> {
        match id.wrapping_sub(self.made_as) {
            expiries if expiries == self.expiries => Some(NEVER),
            expiries if expiries < self.expiries => Some(self.expired_at),
            _ => None,
        }
    }

    /// The same tag after one more expiry.
    pub(crate) fn expired(self, expired_at: u64) -> Self {
        Self { expiries: self.expiries + 1, expired_at, ..self }
    }
}

/// The receiver of a node's messages about its volume.
pub(crate) trait VolumeListener: Send + Sync {
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

/// One entry of the log. Positions are compared by id, too, not only by number: a server that has lost writes uses numbers again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LogPosition {
    pub(crate) number: u64,
    pub(crate) id: Uuid,
}

/// The position up to which a node has applied the log of announcements, and the session of the connection on which it received that
/// position. A mark is valid only on that connection.
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
    /// A registry id that this node has known for a term: if the registry still has this id, it becomes mature.
    pub(crate) known_registry: Option<Uuid>,
    /// How long this node's right to serve copies may last. The registry stores the longest term of all members.
    pub(crate) term: Duration,
}

/// The answer to a RENEW.
#[derive(Clone, Debug)]
pub(crate) struct Renewed {
    pub(crate) registry: RegistryState,
    /// The announcements after the mark; `None` if the log does not have them all: then any value may have changed.
    pub(crate) announced: Option<Vec<LogRecord>>,
    /// The newest entry of the log, and the session of this answer.
    pub(crate) newest: Mark,
}

/// The state of a volume's registry, in the answers to RENEW and ANNOUNCE.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RegistryState {
    pub(crate) registry_id: Uuid,
    /// Some process has known this registry id for a term.
    pub(crate) is_mature: bool,
    /// The longest term that any member has had.
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
    /// A new id for each attempt at a change: an earlier attempt without an answer may still run, under its own id.
    pub(crate) id: Uuid,
    /// The number of the attempt at the change; an ANNOUNCE alone does not use it.
    pub(crate) attempt: AttemptNumber,
    /// Whether to create a registry where there is none. If not, nothing is announced there.
    pub(crate) creates: bool,
    /// As [`Renewal::known_registry`].
    pub(crate) known_registry: Option<Uuid>,
    /// The term of the registry, if this step creates it.
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
