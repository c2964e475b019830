//! The far side: a memory store, what happens to it, and the step that each command is there.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bytes::Bytes;
use tokio::time::Instant;

use super::condition::Condition;
use super::fault::{Fault, Odds};
use super::wire::Wire;
use crate::key::Key;
use crate::store::memory::{MemoryNode, MemoryStore, Picture, Relay, Way};
use crate::store::watch::Hint;
use crate::store::{
    Acquire, Acquired, Fail, HandOver, HandedOver, Insert, Kept, Reply, Store as _, StoreError,
    StoreErrorKind, Token,
};
use crate::sync::lock;

/// How long what a failover can lose is remembered.
const LONGEST_LAG: Duration = Duration::from_millis(500);
const LONGEST_READ_ONLY: Duration = Duration::from_millis(500);
const LONGEST_STEP_MS: i64 = 3_600_000;

/// What all lines of one chaos store share.
#[derive(Debug)]
pub(super) struct Server {
    pub(super) store: MemoryStore,
    pub(super) odds: Mutex<Odds>,
    /// Half a round trip: at least, and how much more.
    latency: Mutex<(Duration, Duration)>,
    state: Mutex<State>,
    lines: Mutex<Vec<Weak<Wire>>>,
    witness: OnceLock<Arc<dyn Witness>>,
}

#[derive(Debug, Default)]
struct State {
    /// What each key was before a write, the oldest write first.
    journal: VecDeque<(Instant, Box<str>, Picture)>,
    read_only_until: Option<Instant>,
    ahead_ms: i64,
    commands: u64,
}

/// One command of the fleet protocol, as it travels.
#[derive(Clone, Debug)]
pub(crate) enum Command {
    LookUp,
    Acquire {
        token: Token,
        lease: Duration,
        seen: Option<Bytes>,
        behind: Option<Token>,
        queue: bool,
    },
    Renew {
        token: Token,
        lease: Duration,
    },
    Commit {
        token: Token,
        entry: Bytes,
        keep: Duration,
    },
    Fail {
        token: Token,
        outcome: Bytes,
        keep: Duration,
        replay: Duration,
        marker: Option<(Bytes, Duration)>,
        seen: Option<Bytes>,
    },
    HandOver {
        token: Token,
        how: HandOver,
    },
    Release {
        token: Token,
    },
    Invalidate {
        insert: Option<Insert>,
    },
}

/// What came of it.
#[derive(Clone, Debug)]
pub(crate) enum Answer {
    Found(Option<Bytes>),
    Acquired(Acquired),
    Kept(Kept),
    HandedOver(HandedOver),
    Done,
}

/// Who sees all that happens on the far side.
pub(crate) trait Witness: std::fmt::Debug + Send + Sync {
    /// Runs the command, and looks at what that did. `run` is the store as it should be.
    fn run(
        &self,
        store: &MemoryStore,
        key: &Key,
        command: Command,
        run: &dyn Fn(Command) -> Answer,
    ) -> Answer;

    /// All writes after `to` are undone.
    fn failed_over(&self, to: Instant);
}

impl Command {
    fn writes(&self) -> bool {
        !matches!(self, Self::LookUp)
    }

    /// Whether it asks for memory: a server that has none refuses it, and nothing else.
    fn allocates(&self) -> bool {
        match self {
            Self::Acquire { .. } | Self::Commit { .. } | Self::Fail { .. } => true,
            Self::Invalidate { insert } => insert.is_some(),
            Self::LookUp | Self::Renew { .. } | Self::HandOver { .. } | Self::Release { .. } => false,
        }
    }

    fn run(self, node: &MemoryNode, key: &Key) -> Result<Answer, StoreError> {
        const WITHIN: Duration = Duration::ZERO;
        Ok(match self {
            Self::LookUp => Answer::Found(now(node.look_up(key, WITHIN))?),
            Self::Acquire { token, lease, seen, behind, queue } => {
                let (seen, behind) = (seen.as_ref(), behind.as_ref());
                let ask = Acquire { token: &token, lease, seen, behind, queue };
                Answer::Acquired(now(node.acquire(key, ask, WITHIN))?)
            }
            Self::Renew { token, lease } => Answer::Kept(now(node.renew(key, &token, lease, WITHIN))?),
            Self::Commit { token, entry, keep } => {
                Answer::Kept(now(node.commit(key, &token, entry, keep, WITHIN))?)
            }
            Self::Fail { token, outcome, keep, replay, marker, seen } => {
                let fail = Fail { token: &token, outcome, keep, replay, marker, seen: seen.as_ref() };
                Answer::Kept(now(node.fail(key, fail, WITHIN))?)
            }
            Self::HandOver { token, how } => {
                Answer::HandedOver(now(node.hand_over(key, &token, how, WITHIN))?)
            }
            Self::Release { token } => Answer::Kept(now(node.release(key, &token, WITHIN))?),
            Self::Invalidate { insert } => {
                now(node.invalidate(key, insert, WITHIN))?;
                Answer::Done
            }
        })
    }
}

/// A memory store's answer, which is there at once.
pub(super) fn now<T>(mut reply: Reply<'_, T>) -> Result<T, StoreError> {
    match reply.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(answer) => answer,
        Poll::Pending => Err(StoreError::new(StoreErrorKind::TimedOut)),
    }
}

impl Server {
    pub(super) fn new(store: MemoryStore, seed: u64) -> Arc<Self> {
        let server = Arc::new(Self {
            store,
            odds: Mutex::new(Odds::new(seed)),
            latency: Mutex::default(),
            state: Mutex::default(),
            lines: Mutex::default(),
            witness: OnceLock::new(),
        });
        let weak: Weak<Self> = Arc::downgrade(&server);
        server.store.relay_to(weak);
        server
    }

    pub(super) fn join(&self, line: &Arc<Wire>) {
        let mut lines = lock(&self.lines);
        lines.retain(|line| line.strong_count() > 0);
        lines.push(Arc::downgrade(line));
    }

    pub(super) fn lines(&self) -> Vec<Arc<Wire>> {
        lock(&self.lines).iter().filter_map(Weak::upgrade).collect()
    }

    /// The replica in this condition was cut off, and is not any more.
    pub(super) fn reconnected(&self, condition: &Arc<Condition>) {
        for line in self.lines() {
            if line.is_of(condition) {
                line.reconnected();
            }
        }
    }

    #[cfg(test)]
    pub(super) fn set_witness(&self, witness: Arc<dyn Witness>) {
        let _ = self.witness.set(witness);
    }

    pub(super) fn set_latency(&self, least: Duration, most: Duration) {
        *lock(&self.latency) = (least / 2, most.saturating_sub(least) / 2);
    }

    /// How long half a round trip takes this time.
    pub(super) fn trip(&self, odds: &mut Odds) -> Duration {
        let (least, more) = *lock(&self.latency);
        least + odds.up_to(more)
    }

    pub(super) fn commands(&self) -> u64 {
        lock(&self.state).commands
    }

    /// Ends what lasts: the clock is put right, writes are accepted.
    pub(super) fn calm(&self) {
        lock(&self.odds).calm();
        let ahead_ms = {
            let mut state = lock(&self.state);
            state.read_only_until = None;
            std::mem::take(&mut state.ahead_ms)
        };
        if ahead_ms != 0 {
            self.store.step_clock(-ahead_ms);
            self.store.flush();
        }
        for line in self.lines() {
            line.hear_again();
        }
    }

    /// A command arrives.
    pub(super) fn arrive(
        &self,
        node: &MemoryNode,
        key: &Key,
        command: Command,
    ) -> Result<Answer, StoreError> {
        self.strike(key.name());
        self.refuse(command.writes(), command.allocates())?;
        if command.writes() {
            self.note(key.name());
        }
        let run = |command: Command| command.run(node, key);
        match self.witness.get() {
            None => run(command),
            // What a memory store answers is never an error.
            Some(witness) => {
                Ok(witness.run(&self.store, key, command, &|command| run(command).unwrap_or(Answer::Done)))
            }
        }
    }

    /// What happens to the store before a command runs.
    fn strike(&self, name: &str) {
        let struck = |fault| lock(&self.odds).strikes(fault);
        let missed = |fault| lock(&self.odds).missed(fault);
        if struck(Fault::EvictLease) && !self.store.evict_lease(name) {
            missed(Fault::EvictLease);
        }
        if struck(Fault::EvictEntry) && !self.store.evict_entry(name) {
            missed(Fault::EvictEntry);
        }
        if struck(Fault::Flush) {
            self.store.flush();
        }
        if struck(Fault::FailOver) {
            self.fail_over();
        }
        if struck(Fault::ClockStep) {
            let by_ms = lock(&self.odds).random().i64(-LONGEST_STEP_MS..=LONGEST_STEP_MS);
            lock(&self.state).ahead_ms += by_ms;
            self.store.step_clock(by_ms);
        }
        if struck(Fault::Corrupt) {
            let at = lock(&self.odds).random().usize(..1 << 20);
            if !self.store.spoil(name, at) {
                missed(Fault::Corrupt);
            }
        }
        if struck(Fault::WakeForged) {
            let hint = match lock(&self.odds).random().u8(..3) {
                0 => Hint::Invalidated,
                1 => Hint::Finished(None),
                _ => Hint::Finished(self.store.lease(name).map(|(holder, _)| holder)),
            };
            for line in self.lines() {
                line.hear(name, &hint);
            }
        }
    }

    pub(super) fn refuse(&self, writes: bool, allocates: bool) -> Result<(), StoreError> {
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

    /// Remembers what a key is before it is written.
    fn note(&self, name: &str) {
        let (now, picture) = (Instant::now(), self.store.picture(name));
        let mut state = lock(&self.state);
        state.journal.push_back((now, name.into(), picture));
        while state.journal.front().is_some_and(|(at, ..)| *at + LONGEST_LAG < now) {
            state.journal.pop_front();
        }
    }

    fn fail_over(&self) {
        let lag = lock(&self.odds).up_to(LONGEST_LAG);
        let now = Instant::now();
        let to = now.checked_sub(lag).unwrap_or(now);
        if let Some(witness) = self.witness.get() {
            witness.failed_over(to);
        }
        loop {
            let Some((at, name, picture)) = lock(&self.state).journal.pop_back() else { return };
            if at < to {
                lock(&self.state).journal.push_back((at, name, picture));
                return;
            }
            self.store.restore(&name, &picture);
        }
    }
}

impl Relay for Server {
    fn tell(&self, name: &str, hint: &Hint) -> bool {
        let mut told = false;
        for line in self.lines() {
            told |= line.tell(name, hint);
        }
        told
    }

    fn way(&self, token: &Token) -> Way {
        let line = self.lines().into_iter().find(|line| line.is_own(token));
        line.map_or(Way::Open, |line| line.way())
    }
}
