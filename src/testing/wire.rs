//! [`Wire`]: a guard's connection to the server and back. It determines how long a command takes, whether it arrives, and
//! which answer its caller receives.
//!
//! The faults of commands strike all commands. Of the faults in the store itself, only refusals strike commands about tags,
//! lists and locks. A memory store's messages to lock waiters get lost and are sent twice like other wake-ups, and lock
//! waiters are notified to ask again without need.
//!
//! [`VolumeEnd`] is a node's end of the messages about its volume, which get lost, come late and come twice.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, sleep_until, timeout};
use uuid::Uuid;

use super::fault::{Condition, Fault, Odds, ReplicaState};
use super::server::{ChaosServer, LONGEST_ECHO, LineEnd};
use crate::health::{Finding, Health, LinkState};
use crate::key::Key;
use crate::store::command::{Command, CommandAnswer, EntryCommand};
use crate::store::protocol::{ReceivedAnnouncement, VolumeListener};
use crate::store::wake_leases::{Hint, Hints, LeaseWaiters};
use crate::store::{
    CommandLine, HandOver, LeaseWatch, Store, StoreError, StoreErrorKind, StoreFuture, StoreResult, Token,
};
use crate::sync::lock;

const CUT_OFF: &str = "the replica is cut off";

const LONGEST_GHOST: Duration = Duration::from_secs(3);
const LONGEST_MESSAGE_LOSS: Duration = Duration::from_secs(1);
/// How long the command may take that gives back the grant of a waiter that has left.
const GIVING_BACK: Duration = Duration::from_secs(1);

/// One guard's connection to a chaos store, with the guard's own waiters.
pub(super) struct Wire {
    server: Arc<ChaosServer>,
    /// The store at the other end, as this guard would use it without the wire.
    node: Store,
    closed: AtomicBool,
    watches: Arc<LeaseWaiters>,
    condition: Arc<Condition>,
    /// The guard's end of messages about its volume.
    volume: OnceLock<Arc<dyn VolumeListener>>,
    /// When the last command that was sent arrives: commands do not overtake each other, except slow ones and ghosts.
    arrived: Mutex<Option<Instant>>,
    lost_messages: Mutex<Option<LostMessages>>,
}

/// A time in which messages to this guard get lost, and whether the guard notices that.
#[derive(Clone, Copy, Debug)]
struct LostMessages {
    until: Instant,
    noticed: bool,
}

/// The fate of one command.
enum CommandFate {
    /// The command arrives after the time `there`, and its answer after the time `back`. A broken answer is replaced by an error.
    Answered {
        there: Duration,
        back: Duration,
        is_broken: bool,
    },
    /// The command arrives this long after its caller has given up.
    Ghost(Duration),
    Lost,
    Unsent,
}

impl Wire {
    pub(super) fn new(
        server: &Arc<ChaosServer>,
        condition: Arc<Condition>,
        command_timeout: Duration,
    ) -> Arc<Self> {
        let wire = Arc::new(Self {
            server: Arc::clone(server),
            node: server.node(command_timeout),
            closed: AtomicBool::new(false),
            watches: Arc::default(),
            condition,
            volume: OnceLock::new(),
            arrived: Mutex::default(),
            lost_messages: Mutex::default(),
        });
        let end: Weak<dyn LineEnd> = Arc::<Self>::downgrade(&wire);
        server.join(end);
        wire
    }

    /// Sends a command to the server, which executes it, and waits for the answer for as long as `within`.
    async fn exchange(self: Arc<Self>, command: Command, within: Duration) -> StoreResult<CommandAnswer> {
        self.condition.runs().await;
        if self.is_closed() {
            return Err(StoreError::new(StoreErrorKind::Closed));
        }
        let failed = |kind| Err(StoreError::new(kind));
        let (there, back, is_broken) = match self.fate(within) {
            CommandFate::Unsent => return failed(StoreErrorKind::Unavailable),
            CommandFate::Lost => return Err(self.no_answer(within).await),
            CommandFate::Ghost(later) => {
                let arrives = Instant::now() + within + later;
                let line = Arc::clone(&self);
                tokio::spawn(async move {
                    sleep_until(arrives).await;
                    // No caller waits for the result any more.
                    let _ = line.arrive(command, within).await;
                });
                return Err(self.no_answer(within).await);
            }
            CommandFate::Answered { there, back, is_broken } => (there, back, is_broken),
        };
        if there.is_zero() && back.is_zero() && self.server.is_instant() {
            let answer = self.arrive(command, within).await;
            return if is_broken { failed(StoreErrorKind::Broken) } else { answer };
        }
        let (sender, receiver) = oneshot::channel();
        let arrives = Instant::now() + there;
        let line = Arc::clone(&self);
        // In a separate task, so that a command arrives even if its caller stops waiting.
        tokio::spawn(async move {
            sleep_until(arrives).await;
            let answer = line.arrive(command, within).await;
            sleep(back).await;
            let _ = sender.send(answer);
        });
        let answer = timeout(within, receiver).await;
        self.condition.runs().await;
        match answer {
            Ok(Ok(_)) if is_broken => failed(StoreErrorKind::Broken),
            Ok(Ok(answer)) => answer,
            Ok(Err(_)) | Err(_) => failed(StoreErrorKind::TimedOut),
        }
    }

    /// Waits for `within`, and until the replica can act; returns the error of a command without an answer.
    async fn no_answer(&self, within: Duration) -> StoreError {
        sleep(within).await;
        self.condition.runs().await;
        StoreError::new(StoreErrorKind::TimedOut)
    }

    fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    fn fate(self: &Arc<Self>, within: Duration) -> CommandFate {
        let mut odds = lock(&self.server.odds);
        let detour = self.condition.detour();
        let (mut there, mut back) =
            (self.server.trip(&mut odds) + detour, self.server.trip(&mut odds) + detour);
        if odds.strikes(Fault::Unreachable) {
            let noticed = odds.random().bool();
            let lasts = odds.up_to(LONGEST_MESSAGE_LOSS);
            self.go_unreachable(LostMessages { until: Instant::now() + lasts, noticed });
        }
        if self.condition.is(ReplicaState::Cut) || odds.strikes(Fault::BlackHole) {
            return CommandFate::Lost;
        }
        if odds.strikes(Fault::ErrorBefore) {
            return CommandFate::Unsent;
        }
        if odds.strikes(Fault::Ghost) {
            return CommandFate::Ghost(odds.up_to(LONGEST_GHOST));
        }
        if odds.strikes(Fault::Slow) {
            let extra = odds.up_to(within * 2);
            if odds.random().bool() {
                // The slow command is sent separately, so that no other command waits behind it.
                return CommandFate::Answered { there: there + extra, back, is_broken: false };
            }
            back += extra;
        }
        let is_broken = odds.strikes(Fault::ErrorAfter);
        drop(odds);
        let mut arrived = lock(&self.arrived);
        let now = Instant::now();
        there = there.max(arrived.map_or(Duration::ZERO, |last| last.saturating_duration_since(now)));
        *arrived = Some(now + there);
        CommandFate::Answered { there, back, is_broken }
    }

    fn hear_after(self: &Arc<Self>, takes: Duration, name: &str, hint: &Hint) {
        let (line, name, hint) = (Arc::clone(self), Box::<str>::from(name), hint.clone());
        tokio::spawn(async move {
            sleep(takes).await;
            line.condition.runs().await;
            if !line.watches.notify(&name, &hint)
                && let Hint::Granted { token, hops } = hint
            {
                line.pass_on(&name, token, hops).await;
            }
        });
    }

    /// Passes on the lease that was granted to a waiter that has left, as the inbox of a node on Redis does.
    async fn pass_on(self: Arc<Self>, name: &str, token: Token, hops: u8) {
        let (command, within) = match self.server.memory() {
            Some(store) => {
                let Some((holder, lease)) = store.lease(name) else { return };
                if holder != token {
                    return;
                }
                let how = HandOver { lease, hops, is_leaving: false };
                (EntryCommand::HandOver { token, how }, lease)
            }
            // The lease's duration is unknown here, so it is released, and waiters ask again.
            None => (EntryCommand::Release { token }, GIVING_BACK),
        };
        let _ = self.exchange(Command::Entry(Key::of_name(name), command), within).await;
    }

    /// Forwards a message of the other end to the waiter at this end.
    async fn relay(self: Arc<Self>, name: &str, token: &Token, hints: Hints) {
        let Hints { finished, granted, invalidated, missed } = hints;
        if invalidated {
            Arc::clone(&self).notify(name, &Hint::Invalidated);
        }
        if let Some(hops) = granted {
            let token = token.clone();
            if !Arc::clone(&self).notify(name, &Hint::Granted { token: token.clone(), hops }) {
                Arc::clone(&self).pass_on(name, token, hops).await;
            }
        }
        if missed || finished.is_some() || !invalidated && granted.is_none() {
            Arc::clone(&self).notify(name, &Hint::Finished(finished));
        }
    }

    /// After which time the next message about the volume is delivered, and after which a second time, if at all; `None` if it gets lost.
    fn message_fate(&self) -> Option<(Duration, Option<Duration>)> {
        let mut odds = lock(&self.server.odds);
        if self.condition.is(ReplicaState::Dead) || self.loses(&mut odds) {
            return None;
        }
        let takes = self.server.trip(&mut odds) + self.condition.detour();
        let again = odds.strikes(Fault::WakeTwice).then(|| takes + odds.up_to(LONGEST_ECHO));
        Some((takes, again))
    }

    /// Whether the next message to this line gets lost.
    fn loses(&self, odds: &mut Odds) -> bool {
        let condition = &self.condition;
        condition.is(ReplicaState::Cut)
            || condition.misses_messages()
            || self.is_unreachable()
            || odds.strikes(Fault::WakeLost)
    }

    fn is_unreachable(&self) -> bool {
        lock(&self.lost_messages).is_some_and(|lost| Instant::now() < lost.until)
    }

    fn go_unreachable(self: &Arc<Self>, lost: LostMessages) {
        *lock(&self.lost_messages) = Some(lost);
        let line = Arc::clone(self);
        tokio::spawn(async move {
            sleep_until(lost.until).await;
            line.condition.runs().await;
            line.hear_again();
        });
    }

    fn arrive(&self, command: Command, within: Duration) -> impl Future<Output = StoreResult<CommandAnswer>> {
        self.server.arrive(&self.node, command, within)
    }
}

impl CommandLine for Wire {
    fn far(&self) -> &Store {
        &self.node
    }

    fn run(self: Arc<Self>, command: Command, within: Duration) -> StoreFuture<'static, CommandAnswer> {
        #[cfg(test)]
        let witnessed = command.key().map(|key| WitnessedCommand::of(&self, key));
        let answer = self.exchange(command, within);
        #[cfg(test)]
        if let Some(witnessed) = witnessed {
            return Box::pin(witnessed.watch(answer));
        }
        Box::pin(answer)
    }

    /// Uses no random number, so that connecting first does not change the rest of a run.
    fn reaches(&self, within: Duration) -> StoreFuture<'_, ()> {
        Box::pin(async move {
            self.condition.runs().await;
            match self.condition.is(ReplicaState::Cut) {
                false => Ok(()),
                true => Err(self.no_answer(within).await),
            }
        })
    }

    fn watch(self: Arc<Self>, key: &Key, token: &Token) -> LeaseWatch {
        let watch = self.watches.register(key.name(), token);
        if self.server.memory().is_some() {
            // The memory store notifies its lines itself, so no relay is needed.
            return watch;
        }
        let (key, token) = (key.clone(), token.clone());
        // Registered now, so that no wake-up after the next command is missed.
        let other_end = self.node.watch(&key, &token);
        let mut relay = JoinSet::new();
        relay.spawn(async move {
            loop {
                let hints = other_end.hints().await;
                Arc::clone(&self).relay(key.name(), &token, hints).await;
            }
        });
        watch.with(relay)
    }

    /// Whether this line's guard believes that messages arrive.
    fn hints_arrive(&self) -> bool {
        let is_unreachable =
            lock(&self.lost_messages).is_some_and(|lost| lost.noticed && Instant::now() < lost.until);
        !is_unreachable && self.node.hints_arrive()
    }

    fn listen(self: Arc<Self>, listener: Weak<dyn VolumeListener>) {
        let end = self.volume.get_or_init(|| Arc::new(VolumeEnd { wire: Arc::downgrade(&self), listener }));
        self.node.listen(Arc::downgrade(end));
    }

    fn close(&self) {
        self.closed.store(true, Ordering::Release);
        self.node.close();
    }

    fn health(&self) -> Health {
        let health = self.node.health();
        if self.is_closed() || !self.condition.is(ReplicaState::Cut) {
            return health;
        }
        let (commands, inbox, reason) = (LinkState::Down, LinkState::Down, Some(CUT_OFF.to_owned()));
        Health { commands, inbox, reason, ..health }
    }

    fn examine(&self) -> Option<Finding> {
        self.condition.is(ReplicaState::Cut).then(|| {
            Finding::problem("connection", CUT_OFF)
                .cost("each process loads for itself, once per key")
                .advice("Replica::resume, or ChaosStore::replica for another one")
        })
    }
}

/// A command on its way, reported to the witness when it ends or is dropped.
#[cfg(test)]
struct WitnessedCommand {
    wire: Arc<Wire>,
    key: Key,
    /// When the command was sent.
    sent: Option<Instant>,
    is_ok: bool,
}

#[cfg(test)]
impl WitnessedCommand {
    fn of(wire: &Arc<Wire>, key: &Key) -> Self {
        Self { wire: Arc::clone(wire), key: key.clone(), sent: None, is_ok: false }
    }

    async fn watch<T>(mut self, reply: impl Future<Output = StoreResult<T>>) -> StoreResult<T> {
        self.sent = Some(Instant::now());
        let answer = reply.await;
        self.is_ok = answer.is_ok();
        answer
    }
}

#[cfg(test)]
impl Drop for WitnessedCommand {
    fn drop(&mut self) {
        if let (Some(sent), Some(witness)) = (self.sent, self.wire.server.witness.get()) {
            witness.answered(self.wire.node.node(), &self.key, sent.elapsed(), self.is_ok);
        }
    }
}

impl LineEnd for Wire {
    fn condition(&self) -> &Arc<Condition> {
        &self.condition
    }

    fn notify(self: Arc<Self>, name: &str, hint: &Hint) -> bool {
        if self.condition.is(ReplicaState::Dead) {
            return false;
        }
        let is_for_us = match hint {
            Hint::Granted { token, .. } => self.is_own(token),
            Hint::Finished(_) | Hint::Invalidated => self.watches.any(name),
        };
        if !is_for_us {
            return false;
        }
        let Some((takes, again)) = self.message_fate() else { return true };
        if let Some(again) = again {
            self.hear_after(again, name, hint);
        }
        if takes.is_zero() && !self.condition.is(ReplicaState::Stopped) {
            return self.watches.notify(name, hint);
        }
        self.hear_after(takes, name, hint);
        true
    }

    fn lock_message(&self) -> Result<(), bool> {
        if self.condition.is(ReplicaState::Dead) {
            return Err(false);
        }
        if self.loses(&mut lock(&self.server.odds)) { Err(true) } else { Ok(()) }
    }

    fn is_own(&self, token: &Token) -> bool {
        token.node() == self.node.node().simple().to_string()
    }

    fn hear_again(&self) {
        if lock(&self.lost_messages).take().is_some() {
            self.reconnected();
        }
    }

    fn reconnected(&self) {
        self.watches.notify_all_missed();
        self.missed_announcements();
        if let Some(store) = self.server.memory() {
            store.notify_node_missed(self.node.node());
        }
    }

    fn missed_announcements(&self) {
        if let Some(volume) = self.volume.get() {
            volume.missed();
        }
    }

    fn watches(&self) -> &LeaseWaiters {
        &self.watches
    }
}

/// The node's end of the messages about its volume.
#[derive(Debug)]
struct VolumeEnd {
    wire: Weak<Wire>,
    listener: Weak<dyn VolumeListener>,
}

impl VolumeEnd {
    /// Delivers a message now, later, twice or never.
    fn deliver(&self, notify: impl Fn(&dyn VolumeListener) + Send + Sync + 'static) {
        let Some(wire) = self.wire.upgrade() else { return };
        let Some((after, again)) = wire.message_fate() else { return };
        let (listener, notify) = (self.listener.clone(), Arc::new(notify));
        for after in std::iter::once(after).chain(again) {
            let (listener, notify, wire) = (listener.clone(), Arc::clone(&notify), Arc::clone(&wire));
            tokio::spawn(async move {
                sleep(after).await;
                wire.condition.runs().await;
                if let Some(listener) = listener.upgrade() {
                    notify(&*listener);
                }
            });
        }
    }
}

impl VolumeListener for VolumeEnd {
    fn announced(&self, announcement: &ReceivedAnnouncement) {
        let announcement = announcement.clone();
        self.deliver(move |listener| listener.announced(&announcement));
    }

    fn acknowledged(&self, id: Uuid, by: Uuid) {
        self.deliver(move |listener| listener.acknowledged(id, by));
    }

    fn missed(&self) {
        if let Some(listener) = self.listener.upgrade() {
            listener.missed();
        }
    }
}
