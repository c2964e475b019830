//! How a lock is waited for: one loop, for mutexes and permits, in the queue or by asking again.
//!
//! Dropped at any await, it leaves no place in the queue, and no lock held beyond a release in the background:
//! whatever a token of ours may have at the store belongs to a [`Place`].

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::time::Instant;

use super::acquisition::{Granted, Lease, State};
use super::claim::Place;
use super::hold::Hold;
use super::home::Home;
use super::target::Target;
use super::terms::{Terms, reached};
use crate::lock::{LockError, Waiting};
use crate::observe::log;
use crate::store::StoreErrorKind;
use crate::store::lock_store::{Announced, MutexTaken, Taken};
use crate::store::wake::lock_waiters::{Told, Watch};

/// While grants may not arrive, the first of a process does not wait longer than this between two looks.
const UNSURE_WAIT: Duration = Duration::from_millis(500);
/// How often something is looked at whose holder has no end: a foreign one says nothing when it leaves.
const ENDLESS_WAIT: Duration = Duration::from_secs(1);
/// Over how long those spread their questions who may all have missed something.
const SPREAD: Duration = Duration::from_millis(50);
/// What the first command is given even if the caller's time is shorter: it may have to connect.
const FIRST_COMMAND: Duration = Duration::from_millis(250);
/// What a later one is given at the least.
const LATER_COMMAND: Duration = Duration::from_millis(50);

/// Acquires it, on these terms. Somebody else's lock is [`LockError::TooManyAttempts`] or
/// [`LockError::AcquireTimeout`], and nothing else is.
pub(crate) async fn acquire<T: Target>(target: &Arc<T>, terms: &Terms) -> Result<Hold<T>, LockError> {
    contend(Arc::clone(target), terms, None).await
}

/// Gives back what `old` has and acquires it anew, behind those who wait, both in the first command. After an error
/// `old` tells whether that was done.
pub(crate) async fn acquire_instead<T: Target>(
    old: &mut Hold<T>,
    terms: &Terms,
) -> Result<Hold<T>, LockError> {
    contend(Arc::clone(&old.grip.target), terms, Some(old)).await
}

async fn contend<T: Target>(
    target: Arc<T>,
    terms: &Terms,
    instead: Option<&mut Hold<T>>,
) -> Result<Hold<T>, LockError> {
    let started = Instant::now();
    // Until its place is left, and what that leaves to the background is there.
    let _waiting = target.home().wait();
    let mut contest = Contest {
        place: Place::new(target, terms.waiting),
        instead,
        waiting: terms.waiting,
        deadline: terms.timeout.and_then(|timeout| started.checked_add(timeout)),
        started,
        asked: started,
        places: 0,
        attempts: 1,
        retried: 0,
        terms,
    };
    let mut taken = contest.take().await?;
    loop {
        match taken {
            Taken::Granted { fence } => {
                let asked = contest.asked;
                if T::IS_EXCLUSIVE {
                    contest.place.heard.learn(asked, end(asked, contest.place.duty.target.ttl()));
                }
                return contest.granted(fence, asked);
            }
            Taken::Busy { remaining } => {
                let ends = end(contest.asked, remaining);
                contest.place.heard.is_busy(contest.asked, ends);
                match contest.wait(ends).await? {
                    Woken::Granted(fence) if contest.is_sure() => return contest.granted(fence, started),
                    // It may be this token's. The store knows, and starts its time anew.
                    Woken::Granted(_) => {}
                    woken => {
                        contest.attempts += 1;
                        contest.retried += u32::from(woken == Woken::Again);
                    }
                }
            }
        }
        taken = contest.take().await?;
    }
}

/// One token's way to a lock.
struct Contest<'a, T: Target> {
    place: Place<T>,
    /// What is given back for it, until an answer says that it was.
    instead: Option<&'a mut Hold<T>>,
    /// As the terms have it, until the server refuses that.
    waiting: Waiting,
    deadline: Option<Instant>,
    started: Instant,
    /// When the last TAKE was sent.
    asked: Instant,
    /// How many TAKEs may have left a place in the queue.
    places: u32,
    attempts: u32,
    /// How many of them count as retries.
    retried: u32,
    terms: &'a Terms,
}

/// What a wait came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Woken {
    /// The lock may be this token's, with this fence.
    Granted(u64),
    /// It is to be asked for again.
    Again,
    /// The same, and that is no retry: what happened before was not listened to.
    Anew,
}

impl<T: Target> Contest<'_, T> {
    /// Sends TAKE. One that was not answered may have been granted, so the same token is sent once more, and again for
    /// those who have a place in the queue already. Whoever waits anyway also waits for a connection.
    async fn take(&mut self) -> Result<Taken, LockError> {
        let queue = self.may_wait() && !matches!(self.waiting, Waiting::Poll { .. });
        // A connection that does not answer is given up after two commands: the third is on another.
        let mut again = if self.place.duty.queued { 2 } else { 1 };
        loop {
            let within = self.within();
            self.asked = Instant::now();
            self.place.heard.asks();
            self.places += u32::from(queue);
            let old = self.instead.as_deref().map(|hold| &hold.grip.token);
            let error = match self.place.take(old, queue, within).await {
                Ok(MutexTaken { taken, was_held }) => {
                    if let Some(hold) = self.instead.take() {
                        hold.given_back(was_held);
                    }
                    return Ok(taken);
                }
                Err(error) => error,
            };
            let cut_short = within < self.command_timeout() && error.kind == StoreErrorKind::TimedOut;
            if cut_short && self.attempts > 1 {
                // It was busy when it was last seen, and that is what the caller's time ended on.
                return Err(self.timed_out());
            }
            let passing =
                error.kind.is_ambiguous() || (error.kind == StoreErrorKind::Unavailable && self.may_wait());
            let last = again == 0 || !passing || self.is_over();
            again -= u8::from(!last);
            let name = &self.place.duty.target.name().key;
            self.place.heard.asks();
            if last || self.home().store.reach(name, self.within()).await.is_err() {
                return Err(self.place.duty.target.error("acquiring", error));
            }
        }
    }

    /// Waits behind whoever has it until `ends` at the least, as far as this one was told; `None` for ever.
    async fn wait(&mut self, ends: Option<Instant>) -> Result<Woken, LockError> {
        if self.terms.retries.is_some_and(|retries| self.retried >= retries) {
            return Err(LockError::TooManyAttempts { attempts: self.attempts });
        }
        if self.is_over() {
            return Err(self.timed_out());
        }
        if self.waiting == Waiting::Keyspace && self.announce().await {
            // What happened before the announcement was not announced.
            return Ok(Woken::Anew);
        }
        let polls = matches!(self.waiting, Waiting::Poll { .. });
        let ((mut look, mut stand), mut soon, mut again) = (self.next_look(ends), None, Woken::Again);
        // Polling asks once more when the time is over: a pause without an attempt after it would be for nothing.
        let deadline = if polls { None } else { self.deadline };
        let home = Arc::clone(self.home());
        let closed = home.closed();
        tokio::pin!(closed);
        loop {
            let told = tokio::select! {
                biased;
                () = &mut closed => return Err(LockError::Closed),
                told = self.place.heard.told() => told,
                () = reached(earlier(look, soon)) => return Ok(again),
                () = reached(deadline) => return Err(self.timed_out()),
                () = reached(stand) => {
                    if self.place.heard.stands_in() {
                        return Ok(Woken::Anew);
                    }
                    (look, stand) = self.next_look(ends);
                    continue;
                }
            };
            match told {
                // Granted, and taken away by force before that was read.
                Told { broken: true, .. } => return Ok(Woken::Again),
                Told { closed: true, granted, .. } => {
                    self.place.duty.queued = granted.is_some();
                    return Err(LockError::Closed);
                }
                Told { granted: Some(fence), .. } => return Ok(Woken::Granted(fence)),
                _ if polls => {}
                Told { missed: true, unheard, .. } => {
                    again = if unheard { Woken::Anew } else { again };
                    if self.place.heard.is_first() {
                        return Ok(again);
                    }
                    let spread = Instant::now() + SPREAD.mul_f64(fastrand::f64());
                    soon = earlier(soon, Some(spread));
                }
                Told { .. } => (look, stand) = self.next_look(ends),
            }
        }
    }

    /// When to ask again if nothing is heard; `None` where another waiter of this process does. Then when to see whether
    /// that one was silent.
    fn next_look(&self, own: Option<Instant>) -> (Option<Instant>, Option<Instant>) {
        let now = Instant::now();
        if let Waiting::Poll { interval, jitter } = self.waiting {
            let pause = now + interval.mul_f64(1.0 + jitter * fastrand::f64());
            return (earlier(Some(pause), self.deadline), None);
        }
        // The waiters of a dead holder should not all ask in one millisecond.
        let jitter = Duration::from_micros(fastrand::u64(500..5_000));
        // By its own time as well, though others may know of a later one: a queue that was lost has nobody's place any more,
        // and only who asks has one again.
        let mut own = own.unwrap_or(now + ENDLESS_WAIT);
        let arrive = self.home().store.locks().grants_arrive();
        if !arrive {
            own = own.min(now + UNSURE_WAIT);
        }
        let (look, stand) = match self.place.heard.watch(own, self.place.duty.target.ttl()) {
            Watch::Look(at) => (Some(at + jitter), None),
            Watch::Stand(at) => (None, at.map(|at| at + jitter)),
        };
        (look, stand)
    }

    /// Has the server announce what happens to the key. False if it does not; then it is asked for again and again.
    async fn announce(&mut self) -> bool {
        let name = self.place.duty.target.name();
        self.place.heard.asks();
        let announced = self.home().store.locks().announce(name, self.within()).await;
        let yes = matches!(announced, Ok(Announced::Yes));
        self.waiting = match announced {
            Ok(Announced::Yes) => Waiting::Notify,
            Ok(Announced::No { why }) => {
                if !self.home().warned.swap(true, Ordering::Relaxed) {
                    tracing::warn!(target: log::LOCK, why, "the server announces no key events: locks are polled for");
                }
                let (interval, jitter) = self.terms.fallback;
                // From now on it is one of those who poll: another watches the clock for the queue.
                self.place.heard.hold();
                Waiting::Poll { interval, jitter }
            }
            Err(error) => {
                tracing::debug!(target: log::LOCK, %error, "key events were not asked for: waiting for this crate's own");
                Waiting::Notify
            }
        };
        yes
    }

    /// Whether a grant that was only heard of is to be believed. It may be older than the last TAKE, late because this
    /// process stood still, and over; so its time is counted from before the first, and has to be long enough then. And
    /// where the store can not know whether it was heard, it has next to no time until it is asked for.
    fn is_sure(&self) -> bool {
        if self.home().store.locks().grants_are_claims() {
            return false;
        }
        let Some(ttl) = self.place.duty.target.ttl() else { return self.places == 1 };
        self.left(self.started) >= (ttl / 4 * 3).max(self.terms.min_remaining)
    }

    /// What is to be held, since some moment before it was granted.
    fn granted(self, fence: u64, since: Instant) -> Result<Hold<T>, LockError> {
        if self.home().is_closed() {
            return Err(LockError::Closed);
        }
        if let Some(ttl) = self.place.duty.target.ttl() {
            let left = self.left(since);
            if left.is_zero() || left < self.terms.min_remaining {
                return Err(LockError::GrantedTooLate { elapsed: since.elapsed(), ttl });
            }
        }
        let granted = Granted { fence, attempts: self.attempts, waited: self.started.elapsed() };
        Ok(self.place.hold(granted, since))
    }

    /// What would be left of its time if that began then.
    fn left(&self, since: Instant) -> Duration {
        let lease = Lease { since, ttl: self.place.duty.target.ttl(), state: State::Held };
        lease.until().map_or(Duration::MAX, |until| until.saturating_duration_since(Instant::now()))
    }

    /// Whether there is anything but the first attempt.
    fn may_wait(&self) -> bool {
        self.terms.retries != Some(0) && self.terms.timeout != Some(Duration::ZERO)
    }

    /// Whether the caller's time is up.
    fn is_over(&self) -> bool {
        self.deadline.is_some_and(|deadline| deadline <= Instant::now())
    }

    /// The deadline of the next command.
    fn within(&self) -> Duration {
        let Some(deadline) = self.deadline else { return self.command_timeout() };
        let least = if self.attempts == 1 { FIRST_COMMAND } else { LATER_COMMAND };
        let left = deadline.saturating_duration_since(Instant::now());
        self.command_timeout().min(left.max(least))
    }

    fn home(&self) -> &Arc<Home> {
        self.place.duty.target.home()
    }

    fn command_timeout(&self) -> Duration {
        self.home().command_timeout
    }

    fn timed_out(&self) -> LockError {
        LockError::AcquireTimeout { attempts: self.attempts, waited: self.started.elapsed() }
    }
}

/// When a time that began then is over; `None` for never.
fn end(since: Instant, ttl: Option<Duration>) -> Option<Instant> {
    since.checked_add(ttl?)
}

/// The earlier of two moments, of which either may never come.
fn earlier(one: Option<Instant>, other: Option<Instant>) -> Option<Instant> {
    one.into_iter().chain(other).min()
}
