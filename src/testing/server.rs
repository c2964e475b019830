//! [`ChaosServer`]: the shared store behind all wires, the faults that happen in it, and the execution of each command.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::Duration;

use futures_util::FutureExt as _;
use tokio::time::{Instant, sleep, sleep_until};
#[cfg(test)]
use uuid::Uuid;

use super::fault::{Condition, Fault, Odds};
use crate::key::Key;
use crate::store::backend::{Backend, StoreSource};
use crate::store::command::{Command, CommandAnswer, EntryCommand, LockCommand};
use crate::store::memory::faults::KeySnapshot;
use crate::store::memory::records::Volume;
use crate::store::memory::{MemoryStore, Notifier};
use crate::store::wake_leases::{Hint, LeaseWaiters};
use crate::store::wake_locks::{LockHint, Notification, Wake};
use crate::store::{
    Acquire, Fail, LockName, Store, StoreError, StoreErrorKind, StoreResult, Take, TakePermit, Token,
};
use crate::sync::lock;

/// For how long the states of keys before their writes are retained: a failover can undo the writes of at most this time.
const LONGEST_LAG: Duration = Duration::from_millis(500);
const LONGEST_READ_ONLY: Duration = Duration::from_millis(500);
/// The longest delay of a message that is sent twice.
pub(super) const LONGEST_ECHO: Duration = Duration::from_secs(1);
const LONGEST_STEP_MS: i64 = 3_600_000;

/// The state that all lines of one chaos store share.
pub(super) struct ChaosServer {
    far: Backing,
    pub(super) odds: Mutex<Odds>,
    /// The time of half a round trip: the least, and the most that is added by chance.
    pub(super) latency: Mutex<(Duration, Duration)>,
    pub(super) queue: Mutex<CommandQueue>,
    pub(super) state: Mutex<ServerState>,
    lines: Mutex<Vec<Weak<dyn LineEnd>>>,
    pub(super) witness: OnceLock<Arc<dyn Witness>>,
}

/// The store in which commands are executed.
enum Backing {
    /// A memory store, on which all faults can strike.
    Memory(MemoryStore),
    /// Any other store, reached by a separate connection: only faults of the connection strike.
    Other(Box<dyn Fn() -> Backend + Send + Sync>),
}

/// The commands of a server that executes one after the other.
#[derive(Default)]
pub(super) struct CommandQueue {
    pub(super) each: Duration,
    busy_until: Option<Instant>,
}

#[derive(Default)]
pub(super) struct ServerState {
    /// The state of each written key and volume before the write, the oldest write first.
    journal: VecDeque<(Instant, Box<str>, Snapshot)>,
    /// How many times all connections have broken since the start.
    session: u64,
    read_only_until: Option<Instant>,
    ahead_ms: i64,
    pub(super) commands: u64,
}

/// The state of a key or of a volume.
enum Snapshot {
    Key(KeySnapshot),
    Volume(Volume),
}

/// The client's end of a line, as the server sees it.
pub(super) trait LineEnd: Send + Sync {
    /// The condition of the line's replica. All lines of a replica have the same `Arc`, so replicas are compared by pointer.
    fn condition(&self) -> &Arc<Condition>;

    /// Whether the token was minted at this end.
    fn is_own(&self, token: &Token) -> bool;

    /// The waiters at this end.
    fn watches(&self) -> &LeaseWaiters;

    /// Sends the waiters of this key a message over the line. For a grant, returns whether the grant's receiver is on
    /// this line.
    fn notify(self: Arc<Self>, name: &str, hint: &Hint) -> bool;

    /// Whether the next message to a waiter for a lock arrives; if not, whether its sender believes that it was received.
    fn lock_message(&self) -> Result<(), bool>;

    /// Called when the subscription is restored: each waiter must ask, because it may have missed a message.
    fn hear_again(&self);

    /// Called when the connection is restored after a cut.
    fn reconnected(&self);

    /// Called when the connection of the messages about the volume was opened anew.
    fn missed_announcements(&self);
}

/// A test's observer of all events in the server.
pub(crate) trait Witness: Send + Sync {
    /// Runs the command, and observes its effect. `run` is the correct store.
    fn run(
        &self,
        store: &MemoryStore,
        key: &Key,
        command: EntryCommand,
        run: &dyn Fn(EntryCommand) -> CommandAnswer,
    ) -> CommandAnswer;

    /// Called when a node's command has replaced the id of the tag that all keys have.
    #[cfg(test)]
    fn tag_changed(&self, node: Uuid);

    /// Called when the store has lost everything.
    fn flushed(&self);

    /// Called when all writes after `to` are undone.
    fn failed_over(&self, to: Instant);

    /// Called when a node's command about this key has ended, or was dropped, after the time `took`.
    #[cfg(test)]
    fn answered(&self, node: Uuid, key: &Key, took: Duration, is_ok: bool);

    /// Called when the waiters of this key receive a message about an event that did not happen.
    fn forged(&self, name: &str);

    /// Called when the store's clock has jumped.
    fn stepped(&self);
}

impl ChaosServer {
    /// A server of the store that `store` returns; each call must return the same store.
    pub(super) fn new(store: impl Fn() -> Backend + Send + Sync + 'static, seed: u64) -> Arc<Self> {
        let server = Arc::new(Self {
            far: match store().kind {
                StoreSource::Memory(store) => Backing::Memory(store),
                _ => Backing::Other(Box::new(store)),
            },
            odds: Mutex::new(Odds::new(seed)),
            latency: Mutex::default(),
            queue: Mutex::default(),
            state: Mutex::default(),
            lines: Mutex::default(),
            witness: OnceLock::new(),
        });
        if let Some(store) = server.memory() {
            let weak: Weak<Self> = Arc::downgrade(&server);
            store.notify_through(weak);
        }
        server
    }

    /// The memory store, if all faults can strike.
    pub(super) fn memory(&self) -> Option<&MemoryStore> {
        match &self.far {
            Backing::Memory(store) => Some(store),
            Backing::Other(_) => None,
        }
    }

    /// The store over a separate connection.
    pub(super) fn node(&self, command_timeout: Duration) -> Store {
        match &self.far {
            Backing::Memory(store) => Store::Memory(Arc::new(store.clone().into_node())),
            Backing::Other(store) => store().node(command_timeout),
        }
    }

    pub(super) fn join(&self, line: Weak<dyn LineEnd>) {
        let mut lines = lock(&self.lines);
        lines.retain(|line| line.strong_count() > 0);
        lines.push(line);
    }

    pub(super) fn lines(&self) -> Vec<Arc<dyn LineEnd>> {
        lock(&self.lines).iter().filter_map(Weak::upgrade).collect()
    }

    /// Called when the replica with this condition was cut off and is connected again.
    pub(super) fn reconnected(&self, condition: &Arc<Condition>) {
        for line in self.lines() {
            if Arc::ptr_eq(line.condition(), condition) {
                line.reconnected();
            }
        }
    }

    /// Whether a command that has arrived is executed at once.
    pub(super) fn is_instant(&self) -> bool {
        lock(&self.queue).each.is_zero()
    }

    /// Waits until all earlier commands have run, and then for the time that this command takes.
    async fn take_position(&self) {
        let until = {
            let mut queue = lock(&self.queue);
            if queue.each.is_zero() {
                return;
            }
            let now = Instant::now();
            let begins = queue.busy_until.map_or(now, |until| until.max(now));
            let ends = begins + queue.each;
            queue.busy_until = Some(ends);
            ends
        };
        sleep_until(until).await;
    }

    /// How long half a round trip takes this time.
    pub(super) fn trip(&self, odds: &mut Odds) -> Duration {
        let (least, more) = *lock(&self.latency);
        least + odds.up_to(more)
    }

    /// Ends lasting faults: corrects the clock, accepts writes, restores subscriptions.
    pub(super) fn calm(&self) {
        lock(&self.odds).calm();
        let ahead_ms = {
            let mut state = lock(&self.state);
            state.read_only_until = None;
            std::mem::take(&mut state.ahead_ms)
        };
        if let Some(store) = self.memory().filter(|_| ahead_ms != 0) {
            store.step_clock(-ahead_ms);
            self.flush(store);
        }
        for line in self.lines() {
            line.hear_again();
        }
    }

    /// Executes a command that has arrived, after the faults of the store have struck.
    pub(super) async fn arrive(
        &self,
        node: &Store,
        mut command: Command,
        within: Duration,
    ) -> StoreResult<CommandAnswer> {
        let (writes, allocates) = command.writes();
        if let Command::Entry(key, command) = command {
            return self.arrive_at_key(node, &key, command, (writes, allocates), within).await;
        }
        self.refuse(writes, allocates)?;
        let session = lock(&self.state).session;
        match &mut command {
            Command::Lock(name, _) => self.forge_for_lock(&name.key),
            Command::Announce(announcement, _) => self.strike_volume(&announcement.volume),
            Command::RenewMembership(volume, renewal) => {
                self.strike_volume(volume);
                // A mark of an earlier session is gone: it ended with its connection.
                renewal.mark = renewal.mark.filter(|mark| mark.session == session);
            }
            _ => {}
        }
        #[cfg(test)]
        let changes_tag = matches!(command, Command::ForgetTag(..));
        let mut answer = run(node, command, within).await?;
        if let CommandAnswer::Renewed(renewed) = &mut answer {
            renewed.newest.session = session;
        }
        #[cfg(test)]
        if let Some(witness) = self.witness.get().filter(|_| changes_tag) {
            witness.tag_changed(node.node());
        }
        Ok(answer)
    }

    async fn arrive_at_key(
        &self,
        node: &Store,
        key: &Key,
        command: EntryCommand,
        (writes, allocates): (bool, bool),
        within: Duration,
    ) -> StoreResult<CommandAnswer> {
        self.take_position().await;
        if let Some(store) = self.memory() {
            self.strike(store, key.name());
        }
        self.forge(key.name());
        self.refuse(writes, allocates)?;
        let run = |command| run_on_key(node, key, command, within);
        let Some(store) = self.memory() else { return run(command).await };
        if writes {
            self.note(key.name(), Snapshot::Key(store.snapshot(key.name())));
        }
        if let EntryCommand::Invalidate { announcement, .. } = &command {
            self.strike_volume(&announcement.volume);
        }
        let Some(witness) = self.witness.get() else { return run(command).await };
        // A memory store's answer is ready at the first poll.
        let run = |command| match run(command).now_or_never() {
            Some(Ok(answer)) => answer,
            Some(Err(error)) => CommandAnswer::Refused(error.kind),
            None => CommandAnswer::Refused(StoreErrorKind::TimedOut),
        };
        match witness.run(store, key, command, &run) {
            CommandAnswer::Refused(kind) => Err(StoreError::new(kind)),
            answer => Ok(answer),
        }
    }

    fn flush(&self, store: &MemoryStore) {
        store.flush();
        if let Some(witness) = self.witness.get() {
            witness.flushed();
        }
    }

    /// The faults that strike the store before a command runs.
    fn strike(&self, store: &MemoryStore, name: &str) {
        let struck = |fault| lock(&self.odds).strikes(fault);
        let missed = |fault| lock(&self.odds).missed(fault);
        if struck(Fault::EvictLease) && !store.evict_lease(name) {
            missed(Fault::EvictLease);
        }
        if struck(Fault::EvictEntry) && !store.evict_entry(name) {
            missed(Fault::EvictEntry);
        }
        if struck(Fault::Flush) {
            self.flush(store);
        }
        if struck(Fault::FailOver) {
            self.fail_over(store);
        }
        if struck(Fault::ClockStep) {
            let by_ms = lock(&self.odds).random().i64(-LONGEST_STEP_MS..=LONGEST_STEP_MS);
            lock(&self.state).ahead_ms += by_ms;
            store.step_clock(by_ms);
            if let Some(witness) = self.witness.get() {
                witness.stepped();
            }
        }
        if struck(Fault::Corrupt) {
            let at = lock(&self.odds).random().usize(..1 << 20);
            if !store.spoil(name, at) {
                missed(Fault::Corrupt);
            }
        }
    }

    /// Sends the waiters of a key a message about an event that did not happen.
    fn forge(&self, name: &str) {
        if !lock(&self.odds).strikes(Fault::WakeForged) {
            return;
        }
        let holder = || Some(self.memory()?.lease(name)?.0);
        let hint = match lock(&self.odds).random().u8(..3) {
            0 => Hint::Invalidated,
            1 => Hint::Finished(None),
            _ => Hint::Finished(holder()),
        };
        if let Some(witness) = self.witness.get() {
            witness.forged(name);
        }
        for line in self.lines() {
            line.watches().notify(name, &hint);
        }
    }

    /// Notifies the waiters for a lock to ask again. Never sends a false grant, because guards trust it.
    fn forge_for_lock(&self, key: &str) {
        if let Some(store) = self.memory()
            && lock(&self.odds).strikes(Fault::WakeForged)
        {
            store.notify_lock_missed(key);
        }
    }

    fn refuse(&self, writes: bool, allocates: bool) -> StoreResult<()> {
        let now = Instant::now();
        let mut state = lock(&self.state);
        state.commands += 1;
        if !writes {
            return Ok(());
        }
        let mut odds = lock(&self.odds);
        if odds.strikes(Fault::ReadOnly) {
            state.read_only_until = Some(now + odds.up_to(LONGEST_READ_ONLY));
        }
        if state.read_only_until.is_some_and(|until| now < until) {
            return Err(StoreError::new(StoreErrorKind::Unavailable));
        }
        if allocates && odds.strikes(Fault::OutOfMemory) {
            return Err(StoreError::new(StoreErrorKind::Transient));
        }
        Ok(())
    }

    /// Saves the state of a key or a volume before a write, for a failover that undoes the write.
    fn note(&self, name: &str, snapshot: Snapshot) {
        let (now, mut state) = (Instant::now(), lock(&self.state));
        state.journal.push_back((now, name.into(), snapshot));
        while state.journal.front().is_some_and(|(at, ..)| *at + LONGEST_LAG < now) {
            state.journal.pop_front();
        }
    }

    /// The faults that strike a volume before a step that writes to it, whose state is saved for a failover.
    fn strike_volume(&self, volume: &Key) {
        let Some(store) = self.memory() else { return };
        for (fault, registry) in [(Fault::EvictRegistry, true), (Fault::EvictLog, false)] {
            if lock(&self.odds).strikes(fault) && !store.evict_volume(volume.name(), registry) {
                lock(&self.odds).missed(fault);
            }
        }
        self.note(volume.name(), Snapshot::Volume(store.volume(volume.name())));
    }

    fn fail_over(&self, store: &MemoryStore) {
        lock(&self.state).session += 1;
        for line in self.lines() {
            line.missed_announcements();
        }
        let lag = lock(&self.odds).up_to(LONGEST_LAG);
        let now = Instant::now();
        let to = now.checked_sub(lag).unwrap_or(now);
        if let Some(witness) = self.witness.get() {
            witness.failed_over(to);
        }
        let undone: Vec<_> = {
            let journal = &mut lock(&self.state).journal;
            let first = journal.partition_point(|(at, ..)| *at < to);
            journal.drain(first..).rev().collect()
        };
        for (_, name, snapshot) in undone {
            match snapshot {
                Snapshot::Key(snapshot) => store.restore(&name, &snapshot),
                Snapshot::Volume(snapshot) => store.restore_volume(&name, snapshot),
            }
        }
    }
}

impl Notifier for ChaosServer {
    fn notify(&self, name: &str, hint: &Hint) -> bool {
        let mut is_received = false;
        for line in self.lines() {
            is_received |= line.notify(name, hint);
        }
        is_received
    }

    fn notify_lock(&self, token: &Token, hint: LockHint, notify: &dyn Fn() -> Option<Wake>) -> Notification {
        if let Some(line) = self.lines().into_iter().find(|line| line.is_own(token))
            && let Err(seems_received) = line.lock_message()
        {
            return (seems_received, None);
        }
        let wake = notify();
        let mut odds = lock(&self.odds);
        if let Some(store) = self.memory().filter(|_| wake.is_some())
            && odds.strikes(Fault::WakeTwice)
        {
            let (again, store, token) = (odds.up_to(LONGEST_ECHO), store.clone(), token.clone());
            tokio::spawn(async move {
                sleep(again).await;
                store.notify_lock(&token, hint);
            });
        }
        (wake.is_some(), wake)
    }
}

/// Runs a command about a key.
async fn run_on_key(
    store: &Store,
    key: &Key,
    command: EntryCommand,
    within: Duration,
) -> StoreResult<CommandAnswer> {
    Ok(match command {
        EntryCommand::LookUp => store.look_up(key, within).await?.into(),
        EntryCommand::Acquire { token, lease, seen, behind, queue } => {
            let (seen, behind) = (seen.as_ref(), behind.as_ref());
            let ask = Acquire { token: &token, lease, seen, behind, queue };
            store.acquire(key, ask, within).await?.into()
        }
        EntryCommand::Renew { token, lease } => store.renew(key, &token, lease, within).await?.into(),
        EntryCommand::Commit { token, entry, keep } => {
            store.commit(key, &token, entry, keep, within).await?.into()
        }
        EntryCommand::Fail { token, outcome, keep, replay, older, seen } => {
            let fail = Fail { token: &token, outcome, keep, replay, older, seen: seen.as_ref() };
            store.fail(key, fail, within).await?.into()
        }
        EntryCommand::HandOver { token, how } => store.hand_over(key, &token, how, within).await?.into(),
        EntryCommand::Release { token } => store.release(key, &token, within).await?.into(),
        EntryCommand::Invalidate { insert, announcement } => {
            store.invalidate(key, insert, &announcement, within).await?.into()
        }
    })
}

/// Runs a command about a lock.
async fn run_on_lock(
    store: &Store,
    name: &LockName,
    command: LockCommand,
    within: Duration,
) -> StoreResult<CommandAnswer> {
    Ok(match command {
        LockCommand::TakeMutex { token, ttl, queue, instead } => {
            let ask = Take { token: &token, ttl, queue, instead: instead.as_ref() };
            store.take_mutex(name, ask, within).await?.into()
        }
        LockCommand::FreeMutex(token, ttl) => store.free_mutex(name, &token, ttl, within).await?.into(),
        LockCommand::ExtendMutex(token, ttl) => store.extend_mutex(name, &token, ttl, within).await?.into(),
        LockCommand::LookAtMutex => store.look_at_mutex(name, within).await?.into(),
        LockCommand::BreakMutex => store.break_mutex(name, within).await?.into(),
        LockCommand::TakePermit { token, lease, semaphore, queue } => {
            let ask = TakePermit { token: &token, lease, semaphore, queue };
            store.take_permit(name, ask, within).await?.into()
        }
        LockCommand::EndLoad(token, load) => store.end_load(name, &token, load, within).await?.into(),
        LockCommand::FreePermit(token, lease) => store.free_permit(name, &token, lease, within).await?.into(),
        LockCommand::RefreshPermit(token, lease) => {
            store.refresh_permit(name, &token, lease, within).await?.into()
        }
        LockCommand::LookAtSemaphore => store.look_at_semaphore(name, within).await?.into(),
        LockCommand::ChangeSemaphore(change) => store.change_semaphore(name, change, within).await?.into(),
        LockCommand::AnnounceKeyChanges => store.announce_key_changes(name, within).await?.into(),
    })
}

/// Runs a command.
async fn run(store: &Store, command: Command, within: Duration) -> StoreResult<CommandAnswer> {
    Ok(match command {
        Command::Entry(key, command) => run_on_key(store, &key, command, within).await?,
        Command::Lock(name, command) => run_on_lock(store, &name, command, within).await?,
        Command::LookUpTagged(keys, tags) => store.look_up_tagged(&keys, &tags, within).await?.into(),
        Command::PresentTags(tags) => store.present_tags(&tags, within).await?.into(),
        Command::TagIds(tags, life) => store.tag_ids(&tags, life, within).await?.into(),
        Command::ForgetTag(tag, None, announcement) => {
            store.forget_tag(&tag, &announcement, within).await?.into()
        }
        Command::ForgetTag(tag, Some(at), announcement) => {
            store.expire_tag(&tag, at, &announcement, within).await?.into()
        }
        Command::EnterLoad(journal, load, life) => {
            store.enter_load(&journal, load, life, within).await?.into()
        }
        Command::NoTagSince(journal, load, tags) => {
            store.no_tag_since(&journal, load, &tags, within).await?.into()
        }
        Command::Enlist(list, member, most, life) => store.enlist(&list, member, most, life).await?.into(),
        Command::Replicated(key, replicas) => store.replicated(&key, replicas, within).await?.into(),
        Command::RenewMembership(volume, renewal) => {
            store.renew_membership(&volume, renewal, within).await?.into()
        }
        Command::Announce(announcement, name) => store.announce(&announcement, &name, within).await?.into(),
        Command::RemoveMember(volume, member) => store.remove_member(&volume, member, within).await?.into(),
        Command::Acknowledge(announcer, id) => {
            store.acknowledge(announcer, id);
            CommandAnswer::Done(())
        }
    })
}
