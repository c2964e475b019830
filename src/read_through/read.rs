//! The read of step 2. Callers that look up a key at the same moment share one read: a caller reads alone, or queues for the next read,
//! which one task makes for the whole queue. If the runtime of that task does not run, a waiting caller takes over.
//! `flight/shared_read.rs` has the queues.
//!
//! A read also checks whether the entry, or one of its tags, was invalidated since the entry was loaded.

use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::join_all;
use futures_util::{StreamExt as _, stream};
use tokio::runtime::{Handle, Id};
use tokio::task::coop::consume_budget;
use tokio::task::yield_now;
use tokio::time::{Instant, timeout};

use super::call::{Call, CallState};
use crate::flight::shared_read::{BatchReader, QueuedRead, ReadRole};
use crate::guard_state::retained::Servable;
use crate::guard_state::turns::Turn;
use crate::guard_state::{GuardState, ReadResult, SharedReadResult, SoloRead};
use crate::key::{FlightKey, Hashed, Key, LoadMode};
use crate::local::Ticket;
use crate::observe::GuardCount;
use crate::policy::Policy;
use crate::store::protocol::TagState;
use crate::store::{StoreError, StoreErrorKind, StoreResult};
use crate::value::entry::{Entry, EntryKind, NEVER};
use crate::value::{Found, StoredEntry};

/// The longest reply to one command that reads many entries, in bytes.
const LONGEST_REPLY: usize = 64 * 1024 * 1024;
/// How many entries one command reads at most.
const MOST_KEYS: usize = 256;

/// The runtime that the caller is polled in.
fn runtime() -> Option<Id> {
    Handle::try_current().ok().map(|handle| handle.id())
}

impl<'a> CallState<'a> {
    /// Reads for a caller that needs the stored entry even during a load, and that holds no solo read.
    pub(super) async fn read_anyway(&mut self) -> ReadResult {
        let read = self.read(true).await;
        self.solo_read = None;
        match (read, self.budget.next()) {
            // The task that reads for the queue skipped the read, because its callers join a flight.
            (ReadResult::Skipped, Some(within)) => {
                let tags = self.call.tag_keys();
                Box::pin(EntryRead::of(self.call, &tags, within).read()).await
            }
            (read, _) => read,
        }
    }

    /// Waits for the turn of this caller's look-up. The wait costs no budget.
    async fn look_up_turn(&mut self) -> Option<Turn> {
        let sent_at = Instant::now();
        let Call { state, key, .. } = self.call;
        let turn = state.turns.look_up(&state.store, key).await;
        self.started += sent_at.elapsed();
        turn
    }

    /// Reads the entry. Callers that look up a key at the same moment share a read. With `past_flights`, a shared read is made even if there
    /// is a flight to join.
    pub(super) async fn read(&mut self, past_flights: bool) -> ReadResult {
        let Call { state, policy, .. } = self.call;
        let Some(within) = self.budget.next() else {
            return ReadResult::Failed(StoreError::new(StoreErrorKind::TimedOut));
        };
        let tags = self.call.tag_keys();
        let entry_read = EntryRead::of(self.call, &tags, within);
        if state.store.answers_at_once() {
            // The read does not suspend, so a task that only reads would never let other tasks run without this.
            consume_budget().await;
            return entry_read.read().await;
        }
        let (queued, is_elsewhere) = match entry_read.enter(past_flights) {
            Ok(solo_read) => {
                let at_once = state.turns.look_up_at_once();
                let _turn = match at_once {
                    Some(_) => None,
                    None => Box::pin(self.look_up_turn()).await,
                };
                self.solo_read = Some(solo_read);
                return entry_read.read().await;
            }
            Err(queued) => queued,
        };
        // A timer costs time, so it is only used where it is needed: if callers with another policy wait longer than this one, if the
        // budget does not cover the solo read and the queue's own read, or if the reader is in another runtime, which may stand still.
        let twice = policy.command_timeout.saturating_mul(2);
        let read = if policy.command_timeout < state.longest_command()
            || twice > policy.coordination_budget
            || is_elsewhere
        {
            let most = self.budget.left();
            Box::pin(entry_read.wait_for_reader(queued, is_elsewhere, past_flights, most)).await
        } else {
            queued.await
        };
        let read = read.unwrap_or_else(|| ReadResult::Failed(StoreError::new(StoreErrorKind::Unavailable)));
        match &read {
            // The shared read did not check all tags of this caller's policy.
            ReadResult::Found(found) if !tags.iter().all(|tag| found.checked.contains(tag)) => {
                Box::pin(entry_read.read()).await
            }
            _ => read.map(Found::Shared),
        }
    }
}

/// One read of an entry, within a time limit.
#[derive(Clone, Copy)]
pub(super) struct EntryRead<'a, 't> {
    pub(super) state: &'a Arc<GuardState>,
    pub(super) key: &'a Key,
    /// The tags that the entry must have.
    pub(super) tags: &'t [Key],
    /// Whether to keep a local copy of the entry.
    pub(super) keeps: bool,
    pub(super) within: Duration,
}

/// What the store has under a key; the `Err` has bytes that are no usable entry.
type Content = Result<Entry, Bytes>;

impl<'a, 't> EntryRead<'a, 't> {
    fn of(Call { state, policy, key }: Call<'a>, tags: &'t [Key], within: Duration) -> Self {
        Self { state, key, tags, keeps: policy.has_copies(), within }
    }

    /// Lets the caller read by itself if no read of the key is on its way. Otherwise queues it, and returns its queued read and whether the
    /// task that reads for the queue may be in another runtime.
    ///
    /// Not async, because its locals would enlarge the future of every hit.
    fn enter(self, past_flights: bool) -> Result<SoloRead<'a>, (QueuedRead<SharedReadResult>, bool)> {
        match self.state.reads.enter(self.key, self.within) {
            ReadRole::Solo(solo_read) => Ok(solo_read),
            ReadRole::Queued(queued, reader_runtime, batch_reader) => {
                let is_elsewhere = batch_reader.is_none() && reader_runtime != runtime();
                if let Some(batch_reader) = batch_reader {
                    self.read_for_others(batch_reader, past_flights);
                }
                Err((queued, is_elsewhere))
            }
        }
    }

    fn read_for_others(self, batch_reader: BatchReader<Key, SharedReadResult, Hashed>, past_flights: bool) {
        let Self { state, tags, keeps, within, .. } = self;
        batch_reader.runs_in(runtime());
        let options = (past_flights, keeps);
        tokio::spawn(read_for_queue(Arc::clone(state), batch_reader, tags.to_vec(), within, options));
    }

    /// Waits for the reader for at most `most`. If the reader is in another runtime and has not answered after three quarters of that, its
    /// runtime may stand still. Then this caller spawns a task in its own runtime that reads for all waiters, and queues again.
    async fn wait_for_reader(
        self,
        mut queued: QueuedRead<SharedReadResult>,
        is_elsewhere: bool,
        past_flights: bool,
        most: Duration,
    ) -> Option<SharedReadResult> {
        let late = |_| Some(ReadResult::Failed(StoreError::new(StoreErrorKind::TimedOut)));
        if !is_elsewhere {
            return timeout(most, queued).await.unwrap_or_else(late);
        }
        if let Ok(read) = timeout(most * 3 / 4, &mut queued).await {
            return read;
        }
        let left = Self { within: most / 4, ..self };
        if let Some(batch_reader) = self.state.reads.take_over(self.key, &queued) {
            left.read_for_others(batch_reader, past_flights);
        }
        drop(queued);
        let again = async {
            match left.enter(past_flights) {
                Ok(_solo_read) => Some(left.read_shared().await),
                Err((queued, _)) => queued.await,
            }
        };
        timeout(left.within, again).await.unwrap_or_else(late)
    }

    /// Reads the entry, and in the same round trip the ids of the tags that it must have. Keeps a local copy of a fresh value if the
    /// policy has copies.
    ///
    /// The futures that concern tags are boxed, because they would enlarge the future of every hit.
    async fn read(self) -> ReadResult {
        let Self { state, key, tags, within, .. } = self;
        let mut ticket = self.ticket();
        let known = state.known_tags.of(key);
        if known.is_some() || !tags.is_empty() {
            let read = Box::pin(self.read_with(known.as_deref().unwrap_or_default(), &mut ticket)).await;
            return self.found(read, ticket);
        }
        let servable = state.retained.servable(key, tags);
        let content = match state.store.look_up(key, within).await {
            Ok(Some(raw)) => self.decode(raw),
            Ok(None) => return ReadResult::Nothing,
            Err(error) => return self.found(Err(error), ticket),
        };
        // What `check` says of most entries, without its future.
        if content
            .as_ref()
            .is_ok_and(|entry| self.has_tags(entry) || !state.retained.may_serve(servable, entry))
        {
            let read = Box::pin(self.check(content, (tags, &[]), servable, &mut ticket)).await;
            return self.found(read.map(Some), ticket);
        }
        match ticket {
            // As `found` does, with fewer moves of the entry: most hits.
            None => ReadResult::Found(Found::Own(StoredEntry::new(content))),
            ticket => self.found(Ok(Some(content)), ticket),
        }
    }

    /// Like [`read`](Self::read), for callers that share the read.
    async fn read_shared(self) -> SharedReadResult {
        self.read().await.map(|found| match found {
            Found::Own(entry) => Arc::new(entry.shared(self.tags)),
            Found::Shared(entry) => entry,
        })
    }

    /// The result of a read for one caller. If there is a ticket, keeps a local copy under it.
    fn found(self, read: StoreResult<Option<Content>>, ticket: Option<Ticket>) -> ReadResult {
        match ticket {
            None => read_result(self.state, read).map(Found::Own),
            ticket => self.shared(read, ticket).map(Found::Shared),
        }
    }

    /// The ticket for a local copy, if one is to be kept. Call this before the read is sent: a change that is announced from here on voids
    /// the ticket.
    fn ticket(self) -> Option<Ticket> {
        self.keeps.then(|| self.state.local.ticket(self.key, self.tags))
    }

    /// The result of a read for callers that share it. If there is a ticket, keeps a local copy under it.
    fn shared(self, read: StoreResult<Option<Content>>, ticket: Option<Ticket>) -> SharedReadResult {
        let Self { state, key, tags, .. } = self;
        let read = read_result(state, read).map(|entry| Arc::new(entry.shared(tags)));
        if let (Some(ticket), ReadResult::Found(found)) = (ticket, &read)
            && found.value().is_some_and(|value| value.is_fresh(state.store.now()))
        {
            state.local.fill(key, found, ticket);
        }
        read
    }

    /// As [`read`](Self::read). Also reads the ids of the tags that the entry probably has, in the same round trip.
    async fn read_with(self, known: &[Key], ticket: &mut Option<Ticket>) -> StoreResult<Option<Content>> {
        let Self { state, key, tags, within, .. } = self;
        let all = if known.is_empty() { Cow::Borrowed(tags) } else { Cow::Owned([tags, known].concat()) };
        let servable = state.retained.servable(key, &all);
        if let Some(ticket) = ticket {
            state.local.add_tags(ticket, known);
        }
        let (mut entry, ids) = state.store.look_up_tagged(std::slice::from_ref(key), &all, within).await?;
        let Some(raw) = entry.pop().flatten() else { return Ok(None) };
        self.check(self.decode(raw), (&all, &ids), servable, ticket).await.map(Some)
    }

    /// Like [`read_shared`](Self::read_shared), for many keys of one server by one command.
    async fn read_chunk(self, keys: &'a [Key]) -> StoreResult<Vec<ReadResult>> {
        let Self { state, tags, within, .. } = self;
        let reads = keys.iter().map(|key| Self { key, ..self });
        // For each key the ticket is taken first, then `servable` is computed; both before the read is sent.
        let terms: Vec<_> =
            reads.map(|read| (read, read.ticket(), state.retained.servable(read.key, tags))).collect();
        let (entries, ids) = state.store.look_up_tagged(keys, tags, within).await?;
        let found = terms.into_iter().zip(entries).map(async |((read, mut ticket, servable), raw)| {
            let checked = match raw {
                Some(raw) => {
                    let content = read.decode(raw);
                    read.check(content, (tags, &ids), servable, &mut ticket).await.map(Some)
                }
                None => Ok(None),
            };
            read.shared(checked, ticket).map(Found::Shared)
        });
        Ok(join_all(found).await)
    }

    /// Decodes an entry that an acquire or a plain GET has found, and reads its tags' ids, which were not read with it. `servable` was
    /// computed before that command was sent.
    pub(super) async fn current(self, raw: Bytes, servable: Servable) -> StoreResult<Content> {
        match self.decode(raw) {
            Ok(entry) => self.unless_invalidated(entry, servable).await,
            unusable => Ok(unusable),
        }
    }

    /// The entry, unless it or one of its tags was invalidated.
    pub(super) async fn unless_invalidated(self, entry: Entry, servable: Servable) -> StoreResult<Content> {
        let Self { state, key, tags, within, .. } = self;
        if !state.retained.may_serve(servable, &entry) {
            return Ok(Err(entry.encode(key)));
        }
        if !self.has_tags(&entry) {
            return Ok(Ok(entry));
        }
        // A caller that comes after the following read of the ids may know of a later invalidation, so it must not join this flight.
        state.detach(key);
        let ids = match tags {
            [] => Vec::new(),
            tags => state.store.present_tags(tags, within).await?,
        };
        self.check_tags(entry, (tags, &ids), &mut None).await
    }

    /// Decodes the bytes stored under the key; counts and logs unreadable ones.
    fn decode(self, raw: Bytes) -> Content {
        let Self { state, key, .. } = self;
        Entry::decode(raw, key, state.longest_payload()).map_err(|(reason, raw)| {
            state.unreadable(key, &reason);
            raw
        })
    }

    fn has_tags(self, entry: &Entry) -> bool {
        entry.kind == EntryKind::Value && !(self.tags.is_empty() && entry.tags.is_empty())
    }

    /// Returns the content of a read; an entry that was invalidated as its bytes. `servable` was computed before the read was sent; `ids`
    /// are as in [`check_tags`](Self::check_tags). Adds the entry's other tags to the ticket.
    async fn check(
        self,
        content: Content,
        ids: (&[Key], &[Option<TagState>]),
        servable: Servable,
        ticket: &mut Option<Ticket>,
    ) -> StoreResult<Content> {
        match content {
            Ok(entry) if !self.state.retained.may_serve(servable, &entry) => Ok(Err(entry.encode(self.key))),
            Ok(entry) if self.has_tags(&entry) => Box::pin(self.check_tags(entry, ids, ticket)).await,
            content => Ok(content),
        }
    }

    /// Returns `entry`, unless one of its tags was invalidated since it was loaded; notes whether one was expired. `ids` are tags and their
    /// ids, which were read together with the entry; the ids of its other tags are read now. An entry that lacks one of the tags was
    /// stored under a policy without that tag. An invalidation of the tag would not show, so the entry counts as invalidated.
    async fn check_tags(
        self,
        mut entry: Entry,
        (read, ids): (&[Key], &[Option<TagState>]),
        ticket: &mut Option<Ticket>,
    ) -> StoreResult<Content> {
        let Self { state, key, tags, within, .. } = self;
        // By name: a key that was made of an entry's text has no other text than its name.
        let found: HashMap<_, _> = read.iter().map(Key::name).zip(ids).collect();
        let must_have = |name: &str| tags.iter().any(|tag| tag.name() == name);
        let expired_since = |(name, id): (&str, u64)| match found.get(name) {
            Some(found) => found.as_ref()?.expired_since(id),
            None => Some(NEVER),
        };
        let of_policy = tags.iter().all(|tag| entry.tags.id_of(tag).is_some());
        let expired_at = entry.tags.iter().map(expired_since).min().flatten();
        let Some(expired_at) = expired_at.filter(|_| of_policy) else { return Ok(Err(entry.encode(key))) };
        entry.tag_expired_at = expired_at;
        let own = entry.tags.iter().filter(|(name, _)| !must_have(name));
        let own: Vec<_> = own.map(|(name, _)| Key::of_name(name)).collect();
        if !own.is_empty() && state.retained.has_tag(&own) {
            return Ok(Err(entry.encode(key)));
        }
        let unread: Vec<_> = own.iter().filter(|tag| !found.contains_key(tag.name())).cloned().collect();
        if !unread.is_empty() {
            state.known_tags.note(key, &own);
            if let Some(ticket) = ticket {
                state.local.add_tags(ticket, &unread);
            }
            let present = state.store.present_tags(&unread, within).await?;
            let expired_since =
                |(tag, present): (&Key, Option<TagState>)| present?.expired_since(entry.tags.id_of(tag)?);
            match unread.iter().zip(present).map(expired_since).min().flatten() {
                Some(at) => entry.tag_expired_at = entry.tag_expired_at.min(at),
                None => return Ok(Err(entry.encode(key))),
            }
        }
        if entry.tag_expired_at != NEVER {
            // The expiry came before this read, whatever the clock of the process that noted its time said.
            entry.tag_expired_at = entry.tag_expired_at.min(state.store.now());
        }
        Ok(Ok(entry))
    }
}

fn read_result(state: &GuardState, read: StoreResult<Option<Content>>) -> ReadResult<StoredEntry> {
    match read {
        Ok(None) => ReadResult::Nothing,
        Ok(Some(content)) => ReadResult::Found(StoredEntry::new(content)),
        Err(error) => {
            state.count(GuardCount::store_errors);
            ReadResult::Failed(error)
        }
    }
}

/// Reads many entries for one caller, in the order of their keys: by as few commands as the bounds on keys and on the reply allow, or by
/// one command for each key where keys are on several servers. At most [`MOST_KEYS`] commands run at once, so that none waits for long
/// behind the others.
pub(super) async fn read_many(
    state: &Arc<GuardState>,
    policy: &Arc<Policy>,
    keys: &[Key],
    within: Duration,
) -> Vec<ReadResult> {
    let Some(first) = keys.first() else { return Vec::new() };
    let has_path = || keys.iter().any(|key| policy.path_tag(&state.namespace, key).is_some());
    let call = |key| Call { state, policy, key };
    if state.store.is_spread() || state.store.answers_at_once() || has_path() {
        // The reads may never suspend, so a task that only reads might never let other tasks run without this.
        consume_budget().await;
        let tags: Vec<_> = keys.iter().map(|key| call(key).tag_keys()).collect();
        let reads = keys.iter().zip(&tags).map(|(key, tags)| EntryRead::of(call(key), tags, within).read());
        return stream::iter(reads.collect::<Vec<_>>()).buffered(MOST_KEYS).collect().await;
    }
    let tags = call(first).tag_keys();
    let most = (LONGEST_REPLY / policy.max_body.max(1)).clamp(1, MOST_KEYS);
    let (read, mut reads) = (EntryRead::of(call(first), &tags, within), Vec::with_capacity(keys.len()));
    // The chunks are read one after the other: each has a command's time limit for its bytes, and a store that does not answer costs that
    // time only once.
    for chunk in keys.chunks(most) {
        match read.read_chunk(chunk).await {
            Ok(read) => reads.extend(read),
            Err(error) => {
                state.count(GuardCount::store_errors);
                reads.resize_with(keys.len(), || ReadResult::Failed(error.clone()));
                break;
            }
        }
    }
    reads
}

/// Reads for the callers that queue for a key until the queue is empty. Each read lasts at most as long as the most patient caller waits.
/// Runs in a separate task: a caller that is alive and not polled must not delay the others.
async fn read_for_queue(
    state: Arc<GuardState>,
    mut batch_reader: BatchReader<Key, SharedReadResult, Hashed>,
    tags: Vec<Key>,
    within: Duration,
    (past_flights, keeps): (bool, bool),
) {
    let key = batch_reader.key().clone();
    let flight = FlightKey { key: key.clone(), mode: LoadMode::Leased };
    // The caller of the solo read in front of the queue may find nothing and begin a flight, which the queued callers then
    // join without a read.
    if timeout(within, batch_reader.first_ended()).await.is_err() {
        batch_reader.give_up_first();
    }
    while let Some(batch) = batch_reader.next() {
        let read = if !past_flights && state.flights.has_connected(&flight) {
            ReadResult::Skipped
        } else {
            let within = batch.patience;
            EntryRead { state: &state, key: &key, tags: &tags, keeps, within }.read_shared().await
        };
        batch.answer(read);
        // Callers that look up the key again at once come into the next batch.
        yield_now().await;
    }
}
