//! The lease of a key: how a flight acquires it, and what the flight does with it while it loads.
//!
//! Steps 4 and 5 are a loop, which runs until the lease is granted or no longer needed. Step 4 is the ACQUIRE: it is granted, or it finds
//! an entry that another process has stored meanwhile, or the lease is held. Step 5 waits behind the lease holder until its load has ended
//! or its lease has expired. A [`Lease`] is renewed during the load, and one command ends it.

#[cfg(all(test, feature = "testing"))]
#[path = "../../tests/unit/read_through/contend_tests.rs"]
mod tests;

use std::pin::pin;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tracing::Span;

use super::batch::Attempt;
use super::read::EntryRead;
use crate::flight::SentAt;
use crate::guard_state::GuardState;
use crate::guard_state::retained::Servable;
use crate::guard_state::turns::Turn;
use crate::key::{FlightKey, Key, LoadMode};
use crate::observe::{Count, FlightId, GuardCount, PolicyCounters, log, warn_if};
use crate::policy::{Budget, Policy};
use crate::store::wake_leases::Hints;
use crate::store::{
    Acquire, Acquired, Fail, HandOver, HandedOver, LATEST, LeaseWatch, OlderEntry, StoreError,
    StoreErrorKind, StoreResult, Token, TokenCheck,
};
use crate::sync::lock;
use crate::task::Tracked;
use crate::value::entry::{EntryKind, Freshness};
use crate::value::{FlightOutcome, StoredEntry};

/// How many unusable entries a flight may find before it treats the store as down.
const UNUSABLE_LIMIT: u8 = 3;

/// The outcome of contending for a key's lease.
pub(crate) enum AcquireOutcome {
    /// This flight holds the lease, and loads.
    Leased(Lease),
    /// Another flight's load has ended. The acquire that found its outcome was sent at `sent_at`.
    Ended { outcome: FlightOutcome, sent_at: SentAt },
    /// Another flight holds the lease for this much longer, and this flight does not wait for it.
    Busy(Duration),
    /// Other flights held the lease for longer than this flight waits.
    WaitedOut,
    /// The store does not answer, or returns no usable answer.
    StoreDown(StoreError),
    /// The guard is shutting down.
    Leaving,
}

/// The inputs of one flight's attempt to get the lease.
pub(crate) struct AcquireRequest<'a> {
    pub(crate) state: &'a Arc<GuardState>,
    pub(crate) key: &'a Key,
    pub(crate) policy: &'a Policy,
    pub(crate) queue: bool,
    /// The entry that was read last and is not served as it is.
    pub(crate) rejected: &'a mut Option<Arc<StoredEntry>>,
    pub(crate) budget: &'a mut Budget,
    /// The tags that an entry must have.
    pub(crate) tags: &'a [Key],
    /// The span of the first caller.
    pub(crate) span: &'a Span,
    /// Set to the load that the flight waits for, if spans are enabled.
    pub(crate) waits_for: &'a mut Option<FlightId>,
    /// This flight's attempt in the call for several keys, if its first caller made one.
    pub(crate) batch: Option<&'a mut Attempt>,
    /// The time on the store's clock when the flight began.
    pub(crate) since: u64,
    pub(crate) deadline: Instant,
    /// Called at the deadline. Returns another deadline if callers that joined after the first one still wait.
    pub(crate) goes_on: &'a (dyn Fn() -> Option<Instant> + Sync),
}

/// An [`AcquireRequest`] with the state of its attempt.
struct Acquisition<'a> {
    request: AcquireRequest<'a>,
    token: Token,
    watch: LeaseWatch,
    /// When this flight's last acquire was sent.
    sent_at: SentAt,
    /// Which entries in the last acquire's answer may be served.
    servable: Servable,
    /// The lease holder that this flight waits behind.
    behind: Option<Token>,
    /// When that holder's lease ends unless it is renewed.
    held_until: Instant,
    /// Whether the lease was handed to this flight.
    handed_over: bool,
    /// The span of the wait behind that holder.
    wait_span: Span,
    /// How many loads have vanished under this lease, in all processes that it was handed to.
    takeovers: u8,
    /// When a hint reported the end of the awaited load, if that was before the deadline.
    released: Option<Instant>,
    /// How many unusable entries this attempt has found.
    unusable: u8,
    /// Whether the store may have granted this token the lease, or may still grant it: an acquire got no answer, or a hint reported a
    /// grant that no acquire has confirmed.
    maybe_granted: bool,
    /// Counts a lease that may be granted at any time from the first acquire on.
    possible_lease: Tracked,
}

impl<'a> Acquisition<'a> {
    fn of(request: AcquireRequest<'a>) -> Self {
        let state = request.state;
        let token = Token::mint_for(state.store.node(), request.policy.lease);
        Self {
            // Registered before the first acquire: invariant 3 of the store.
            watch: state.store.watch(request.key, &token),
            possible_lease: state.possible_leases.enter(),
            servable: state.retained.servable(request.key, request.tags),
            request,
            token,
            sent_at: SentAt::now(),
            behind: None,
            held_until: Instant::now(),
            handed_over: false,
            wait_span: Span::none(),
            takeovers: 0,
            released: None,
            unusable: 0,
            maybe_granted: false,
        }
    }

    /// How long the next acquire may take; `None` if the budget is spent.
    fn within(&mut self) -> Option<Duration> {
        let within = self.request.budget.next()?;
        let Some(released) = self.released else { return Some(within) };
        // All waiters of the fleet read the new entry at the same moment, so this acquire may be slow. It gets up to a lease's time,
        // because the server was reachable just now.
        Some(within.max(self.request.policy.lease.saturating_sub(released.elapsed())))
    }

    async fn acquire(&mut self, within: Duration) -> StoreResult<Acquired> {
        self.sent_at = SentAt::now();
        let AcquireRequest { state, key, policy, queue, rejected, budget, tags, .. } = &mut self.request;
        self.servable = state.retained.servable(key, tags);
        let seen = rejected.as_ref().map(|rejected| rejected.raw(key));
        let command = Acquire {
            token: &self.token,
            lease: policy.lease,
            seen: seen.as_ref(),
            behind: self.behind.as_ref(),
            queue: *queue,
        };
        let acquired = state.store.acquire(key, command, within).await;
        // A round trip that ends in `Held` ran while a live leader loaded, so it added no latency.
        if !matches!(acquired, Ok(Acquired::Held { .. })) {
            budget.spend(self.sent_at.at);
        }
        acquired
    }

    /// Handles an entry that the acquire has found and that this flight has not seen before. `Ok` if this flight must acquire again.
    async fn found(&mut self, raw: Bytes, within: Duration) -> Result<(), AcquireOutcome> {
        let AcquireRequest { state, .. } = self.request;
        let content = self.entry_read(within).current(raw, self.servable).await;
        let content = content.map_err(AcquireOutcome::StoreDown)?;
        if let Ok(entry) = &content {
            if entry.kind == EntryKind::Marker {
                return Err(self.ended_with(FlightOutcome::Uncacheable));
            }
            match entry.serves(state.store.now()) {
                Freshness::Fresh => return Err(self.ended_with(FlightOutcome::Value(entry.clone()))),
                // The load that this flight waited for, or would have repeated, has failed; its leader stored the older value again.
                Freshness::BackingOff => return Err(self.ended_with(FlightOutcome::Stale(entry.clone()))),
                // Stored while this flight waited, so it counts whatever its lifetime is, unless that was ended early.
                _ if !entry.is_ended_early() && entry.stored_at >= self.waits_since() => {
                    return Err(self.ended_with(FlightOutcome::Value(entry.clone())));
                }
                _ => {}
            }
        }
        if self.unusable == UNUSABLE_LIMIT {
            return Err(AcquireOutcome::StoreDown(StoreError::new(StoreErrorKind::Transient)));
        }
        self.unusable += 1;
        *self.request.rejected = Some(Arc::new(StoredEntry::new(content)));
        Ok(())
    }

    fn entry_read(&self, within: Duration) -> EntryRead<'a, 'a> {
        let AcquireRequest { state, key, tags, .. } = self.request;
        EntryRead { state, key, tags, keeps: false, within }
    }

    /// Since when this flight has waited for a value, on the store's clock. A value that was stored earlier is not the awaited one; it may
    /// come from a late insertion or a failover. A commit carries the time at which it was first sent, so the value of an awaited load
    /// may be older than this flight by the coordination budget.
    fn waits_since(&self) -> u64 {
        let AcquireRequest { policy, since, .. } = self.request;
        let commit = if self.behind.is_some() { policy.coordination_budget } else { Duration::ZERO };
        since.saturating_sub(commit.as_millis().try_into().unwrap_or(u64::MAX))
    }

    fn ended_with(&self, outcome: FlightOutcome) -> AcquireOutcome {
        AcquireOutcome::Ended { outcome, sent_at: self.sent_at }
    }

    /// Handles the outcome of the awaited load, or of an earlier load, which newcomers receive as well. `Ok` if this flight must
    /// acquire again.
    async fn ended(&mut self, outcome: &Bytes, within: Duration) -> Result<(), AcquireOutcome> {
        let entry = match FlightOutcome::decode(outcome, self.request.key) {
            FlightOutcome::Value(entry) => entry,
            outcome => return Err(self.ended_with(outcome)),
        };
        let checked = self.entry_read(within).unless_invalidated(entry, self.servable).await;
        if let Ok(entry) = checked.map_err(AcquireOutcome::StoreDown)?
            && !entry.is_ended_early()
        {
            return Err(self.ended_with(FlightOutcome::Value(entry)));
        }
        // The value was invalidated, or one of its tags was expired. It is not stored, so a second request for it is useless: contend without naming a holder.
        self.behind = None;
        Ok(())
    }

    /// If this lease was granted because the previous one expired, counts and logs that. The previous holder died, hung or was cut off;
    /// there is no other trace of it.
    fn note_expired(&self) {
        let AcquireRequest { state, key, policy, .. } = self.request;
        if self.behind.is_none() || self.handed_over || Instant::now() < self.held_until {
            return;
        }
        policy.count(Count::leases_expired);
        warn_if!(
            log::GUARD,
            state.logs.expired.is_due(),
            ?key,
            "the lease of another process has expired: it died, hung, or lost the store during its load. This process loads"
        );
    }

    /// Converts the granted attempt to a held lease.
    fn lead(self) -> Lease {
        let AcquireRequest { state, key, policy, .. } = self.request;
        Lease {
            _held: state.leases.enter(),
            state: Arc::clone(state),
            key: key.clone(),
            token: self.token,
            watch: self.watch,
            ttl: policy.lease,
            takeovers: self.takeovers,
            counters: Arc::clone(&policy.counters),
            waited_until: self.behind.is_some().then(Instant::now),
            confirmed: Mutex::new(self.sent_at),
            ends: Arc::new(Mutex::new(self.sent_at.at + policy.lease)),
        }
    }

    /// Ends the attempt without a lease. Releases a lease that may have been granted too late for this flight to use it; otherwise
    /// the key would stay leased until the lease expires. `gives_up`: the flight may still be in the store's queue, and the release
    /// removes it from there too. Otherwise each flight that timed out behind one slow load would stay in the queue.
    fn leave(self, gives_up: bool) {
        let AcquireRequest { state, key, policy, .. } = self.request;
        let hints = self.watch.close();
        detach_unleased(state, key, &hints);
        if self.maybe_granted || hints.granted.is_some() || gives_up {
            release_later(Arc::clone(state), key.clone(), self.token, policy.lease, self.possible_lease);
        }
    }
}

/// Steps 4 and 5: acquires the lease, or waits behind its holder and tries again.
pub(crate) async fn contend(request: AcquireRequest<'_>) -> AcquireOutcome {
    let mut acquisition = Acquisition::of(request);
    match acquisition.run().await {
        Ok(()) => AcquireOutcome::Leased(acquisition.lead()),
        Err(contended) => {
            acquisition.leave(matches!(contended, AcquireOutcome::Leaving | AcquireOutcome::WaitedOut));
            contended
        }
    }
}

impl Acquisition<'_> {
    /// Runs until the lease is granted (`Ok`) or the attempt has another outcome.
    async fn run(&mut self) -> Result<(), AcquireOutcome> {
        loop {
            let mut turn = self.turn().await?;
            let Some(within) = self.within() else {
                self.request.policy.count(Count::budget_exceeded);
                return Err(AcquireOutcome::StoreDown(StoreError::new(StoreErrorKind::TimedOut)));
            };
            let usual = self.request.policy.command_timeout;
            let acquired = {
                let mut acquire = pin!(self.acquire(within));
                match timeout(usual, &mut acquire).await {
                    Ok(acquired) => acquired,
                    // An acquire after a hint may take as long as a lease: other flights must not wait for the end of this turn.
                    Err(_) => {
                        turn = None;
                        acquire.await
                    }
                }
            };
            match acquired {
                Ok(Acquired::Granted) => {
                    self.note_expired();
                    return Ok(());
                }
                Ok(Acquired::Found(raw)) => self.found(raw, within).await?,
                Ok(Acquired::Ended(outcome)) => self.ended(&outcome, within).await?,
                Ok(Acquired::Held { remaining, .. }) if !self.request.queue => {
                    return Err(AcquireOutcome::Busy(remaining));
                }
                Ok(Acquired::Held { remaining, holder }) => {
                    drop(turn);
                    // The other keys of the batch do not wait for this one.
                    if let Some(attempt) = &self.request.batch {
                        attempt.rest();
                    }
                    self.wait(remaining, holder).await?;
                    // The ACQUIRE that reads the outcome of an ended load may take as long as a lease: the other keys do not wait for it.
                    if self.released.is_none()
                        && let Some(attempt) = &mut self.request.batch
                    {
                        attempt.again();
                    }
                }
                Err(error) => {
                    drop(turn);
                    self.retry_after_disconnect(error).await?;
                }
            }
        }
    }
}

/// The longest sleep between two acquires while hints may be lost.
const UNSURE_WAIT: Duration = Duration::from_millis(500);
/// The shortest sleep on a lease that is about to expire, so that waiting is no busy loop.
const SHORTEST_WAIT: Duration = Duration::from_millis(5);

impl Acquisition<'_> {
    /// Waits for this flight's turn to send an ACQUIRE.
    async fn turn(&mut self) -> Result<Option<Turn>, AcquireOutcome> {
        let AcquireRequest { state, key, .. } = self.request;
        let mut turn = pin!(state.turns.flight(&state.store, key, self.request.batch.is_some()));
        // If the awaited load ended before the deadline, its outcome is read even after the deadline.
        let is_bounded = self.released.is_none();
        loop {
            tokio::select! {
                biased;
                () = state.leaving() => return Err(AcquireOutcome::Leaving),
                turn = &mut turn => return Ok(turn),
                () = sleep_until(self.request.deadline), if is_bounded => if !self.goes_on() {
                    return Err(AcquireOutcome::WaitedOut);
                },
            }
        }
    }

    /// Called at the deadline of the wait. Returns whether the wait goes on, because callers that joined later still wait.
    fn goes_on(&mut self) -> bool {
        let later = (self.request.goes_on)();
        self.request.deadline = later.unwrap_or(self.request.deadline);
        later.is_some()
    }

    /// Sleeps until a hint arrives, such as the end of this holder's load, or until its lease should have expired.
    async fn wait(&mut self, remaining: Duration, holder: Token) -> Result<(), AcquireOutcome> {
        let AcquireRequest { state, policy, .. } = self.request;
        self.waits_behind(&holder);
        (self.behind, self.released) = (Some(holder), None);
        self.held_until = self.sent_at.at + remaining;
        let wakes = Instant::now() + sleep_for(remaining, policy.lease, state.store.hints_arrive());
        loop {
            tokio::select! {
                biased;
                hints = self.watch.hints() => {
                    self.maybe_granted |= hints.granted.is_some();
                    let now = Instant::now();
                    let in_time = hints.finished.is_some() && now < self.request.deadline;
                    self.released = in_time.then_some(now);
                    self.apply_hints(hints);
                    return Ok(());
                }
                () = sleep_until(wakes) => return Ok(()),
                () = sleep_until(self.request.deadline) => if !self.goes_on() {
                    return Err(AcquireOutcome::WaitedOut);
                },
                () = state.leaving() => return Err(AcquireOutcome::Leaving),
            }
        }
    }

    /// Begins the span of the first caller's wait for another process's load. The other callers of this process make their
    /// spans themselves.
    fn waits_behind(&mut self, holder: &Token) {
        let AcquireRequest { state, key, span, .. } = self.request;
        if self.behind.as_ref() == Some(holder) || !state.spans.are_enabled() {
            return;
        }
        let flight = holder.flight();
        *self.request.waits_for = Some(flight);
        self.wait_span = state.spans.wait(span, key);
        state.spans.waited(&self.wait_span, flight);
    }

    /// Handles a failed acquire. A flight that has waited for a live leader waits for a reconnect within the rest of its budget,
    /// instead of repeating the load that is running.
    async fn retry_after_disconnect(&mut self, error: StoreError) -> Result<(), AcquireOutcome> {
        let AcquireRequest { state, key, policy, budget, .. } = &mut self.request;
        state.count(GuardCount::store_errors);
        // The acquire's time limit was the rest of the budget, which was shorter than `command_timeout`.
        if error.kind == StoreErrorKind::TimedOut && budget.left().is_zero() {
            policy.count(Count::budget_exceeded);
        }
        let waits_for_reconnect = self.behind.is_some() && error.kind != StoreErrorKind::Refused;
        let mut is_back = false;
        if waits_for_reconnect && !budget.left().is_zero() {
            let since = Instant::now();
            // A server that answered with an error is still connected: without a pause this would be a busy loop.
            sleep(SHORTEST_WAIT.min(budget.left())).await;
            is_back = state.store.reach(key.name(), budget.left()).await.is_ok();
            budget.spend(since);
        }
        if !is_back {
            self.maybe_granted |= error.kind.is_ambiguous();
            return Err(AcquireOutcome::StoreDown(error));
        }
        if error.kind.is_ambiguous() {
            self.retry_with_new_token();
        }
        Ok(())
    }

    /// Continues with a new token. The acquire that got no answer may still be executed at any time. If this flight reused its token, the
    /// late acquire could bring back a lease that an invalidation has ended, and the older load would be stored.
    fn retry_with_new_token(&mut self) {
        let AcquireRequest { state, key, policy, .. } = self.request;
        let token = Token::mint_for(state.store.node(), policy.lease);
        let before = std::mem::replace(&mut self.watch, state.store.watch(key, &token)).close();
        self.apply_hints(before);
        let old = std::mem::replace(&mut self.token, token);
        release_later(Arc::clone(state), key.clone(), old, policy.lease, state.possible_leases.enter());
    }

    fn apply_hints(&mut self, hints: Hints) {
        detach_unleased(self.request.state, self.request.key, &hints);
        self.handed_over |= hints.granted.is_some();
        self.takeovers = hints.granted.unwrap_or(self.takeovers);
        // A hint may name a later holder than the one that this flight waits behind; then the next acquire asks for its outcome.
        self.behind = hints.finished.or_else(|| self.behind.take());
        if hints.invalidated {
            // An invalidated entry must not stand in for a failed load.
            *self.request.rejected = None;
        }
    }
}

/// How long to sleep on a lease that has `remaining` left, in case no hint comes.
fn sleep_for(remaining: Duration, lease: Duration, hints_arrive: bool) -> Duration {
    let longest = if hints_arrive { lease } else { lease.min(UNSURE_WAIT) };
    let remaining = remaining.clamp(SHORTEST_WAIT.min(longest), longest);
    // Jitter: the waiters of a dead leader should not all send an acquire in the same millisecond, but the first should send it
    // just after the lease has expired.
    remaining + Duration::from_micros(fastrand::u64(1_000..10_000))
}

/// A held lease. The owner ends it with one of the consuming methods; a dropped lease expires by itself.
pub(crate) struct Lease {
    state: Arc<GuardState>,
    key: Key,
    token: Token,
    watch: LeaseWatch,
    ttl: Duration,
    /// How many loads have vanished under this lease, in all processes that it was handed to.
    pub(super) takeovers: u8,
    /// The counters of the policy, for a refused commit.
    counters: Arc<PolicyCounters>,
    /// When the lease was granted, if this flight waited for another holder before.
    pub(super) waited_until: Option<Instant>,
    /// When the last successful acquire or renewal was sent. An invalidation that ended the lease came after that moment, so a
    /// caller that arrived after it may know of the invalidation.
    confirmed: Mutex<SentAt>,
    /// When the lease ends unless it is renewed.
    ends: Arc<Mutex<Instant>>,
    _held: Tracked,
}

/// Why [`Lease::keep`] has returned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LeaseEvent {
    /// The key was invalidated. The message may be late and concern an earlier lease; the next renewal shows whether this lease is held.
    Invalidated,
    /// The token no longer holds the lease.
    Lost,
    /// The process is about to end: another process should load the key.
    Leaving,
}

impl Lease {
    /// The id of the load in traces.
    pub(crate) fn flight(&self) -> FlightId {
        self.token.flight()
    }

    /// When the lease ends unless it is renewed, as of now and later.
    pub(crate) fn ends(&self) -> Arc<Mutex<Instant>> {
        Arc::clone(&self.ends)
    }

    /// The last moment at which the lease was certainly held.
    pub(crate) fn confirmed(&self) -> SentAt {
        *lock(&self.confirmed)
    }

    /// Renews the lease at each third of its TTL, until one of the [`LeaseEvent`]s occurs. A renewal extends the lease at most to
    /// the load's `end` plus the time for a commit. With `now`, begins with a renewal.
    pub(crate) async fn keep(&self, end: Instant, now: bool) -> LeaseEvent {
        tokio::select! {
            biased;
            event = self.renew(end, now) => event,
            () = self.state.leaving() => LeaseEvent::Leaving,
        }
    }

    async fn renew(&self, end: Instant, mut now: bool) -> LeaseEvent {
        let period = self.ttl / 3;
        let mut due = Instant::now() + period;
        loop {
            if !now {
                // The timer is polled first, and hints do not restart it: a stream of irrelevant hints must not delay the renewal.
                let hints = tokio::select! {
                    biased;
                    () = sleep_until(due) => None,
                    hints = self.watch.hints() => Some(hints),
                };
                match hints {
                    Some(hints) if hints.invalidated => {
                        detach_unleased(&self.state, &self.key, &hints);
                        return LeaseEvent::Invalidated;
                    }
                    // A missed hint may have been an invalidation: renew at once to find out.
                    Some(hints) if hints.missed => {}
                    Some(_) => continue,
                    None => {}
                }
            }
            now = false;
            due = Instant::now() + period;
            let ttl = self.ttl.min(end.saturating_duration_since(Instant::now()) + period);
            let sent_at = SentAt::now();
            match self.state.store.renew(&self.key, &self.token, ttl, period).await {
                Ok(TokenCheck::Held | TokenCheck::ForeignData) => {
                    *lock(&self.confirmed) = sent_at;
                    *lock(&self.ends) = sent_at.at + ttl;
                }
                Ok(TokenCheck::Lost) => return LeaseEvent::Lost,
                // The lease may still be held: the next renewal shows whether it is, and in the end the commit.
                Err(_) => self.state.count(GuardCount::store_errors),
            }
        }
    }

    /// Step 7: stores the entry and wakes all waiting processes. `None` if the store did not answer.
    pub(crate) async fn commit(self, entry: Bytes, keep: Duration) -> Option<TokenCheck> {
        // The time limit is the lease's TTL, because a large value on a slow connection may take longer than a look-up. The
        // flight has another bound on its wait for the commit.
        let done = self.state.store.commit(&self.key, &self.token, entry, keep, self.ttl).await;
        if matches!(done, Ok(TokenCheck::Lost | TokenCheck::ForeignData)) {
            self.counters.add(Count::commits_refused);
            // If the lease did not run out, the key was invalidated or the lease evicted, which is normal: no warning.
            let ran_out = lock(&self.confirmed).at.elapsed() > self.ttl;
            warn_if!(
                log::GUARD,
                ran_out && self.state.logs.unrenewed.is_due(),
                key = ?self.key,
                ?done,
                ran_out,
                "what was loaded is not stored: commit refused. If its lease ran out, its thread was blocked (use spawn_blocking), or \
                 the process stood still"
            );
        }
        self.ended(done)
    }

    /// Step 7 without a value to store: publishes the outcome to the waiting processes and wakes them. `None` if the
    /// store did not answer.
    pub(crate) async fn fail(
        self,
        outcome: &FlightOutcome,
        replay: Duration,
        older: OlderEntry,
        seen: Option<&Bytes>,
    ) -> Option<TokenCheck> {
        let fail = Fail {
            token: &self.token,
            outcome: outcome.encode(&self.key),
            keep: (self.ttl * 2).max(replay),
            replay,
            older,
            seen,
        };
        let done = self.state.store.fail(&self.key, fail, self.ttl).await;
        self.ended(done)
    }

    /// Hands the lease to a waiting process, or frees it. Returns whether a waiting process certainly got it.
    pub(crate) async fn hand_over(self, hops: u8) -> bool {
        let how = HandOver { lease: self.ttl, hops, is_leaving: self.state.is_leaving() };
        let done = self.state.store.hand_over(&self.key, &self.token, how, self.ttl).await;
        matches!(self.ended(done), Some(HandedOver::ToWaiter))
    }

    /// Releases the lease later if the command that ends it got no answer: the command may not have run, and the lease must not stay.
    fn ended<T>(self, done: StoreResult<T>) -> Option<T> {
        let error = match done {
            Ok(done) => return Some(done),
            Err(error) => error,
        };
        self.state.count(GuardCount::store_errors);
        tracing::debug!(target: log::GUARD, key = %self.key.digest(), %error, "the end of a lease was not confirmed");
        release_later(self.state, self.key, self.token, self.ttl, self._held);
        None
    }
}

/// If the key was invalidated, detaches the flight that loads outside the lease. That flight does not receive the invalidation itself, and
/// later callers must not join a load that is older than an invalidation.
fn detach_unleased(state: &GuardState, key: &Key, hints: &Hints) {
    if hints.invalidated {
        state.flights.detach(&FlightKey { key: key.clone(), mode: LoadMode::Unleased });
    }
}

/// Releases a lease that this node may hold without knowing it. Retries until the store has confirmed the release, at most until the
/// lease must have expired by itself, however late it was granted. Until then `held` counts it as held or as possibly held.
fn release_later(state: Arc<GuardState>, key: Key, token: Token, lease: Duration, held: Tracked) {
    tokio::spawn(async move {
        let _held = held;
        let expired = Instant::now() + LATEST + lease;
        while state.store.release(&key, &token, lease).await.is_err() && Instant::now() < expired {
            sleep(Duration::from_millis(fastrand::u64(20..100))).await;
        }
    });
}
