//! How mutexes and permits are taken, kept and waited for: valid by construction, each default with its reason.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use super::grip::drift;
use super::locks::Home;
use super::target::{MutexTarget, SemaphoreTarget};
use super::{Fairness, LockError, Mutex, Scope, Semaphore};
use crate::store::lock_store::Create;

/// How a busy lock is waited for.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[non_exhaustive]
pub enum Waiting {
    /// In the lock's queue: whoever unlocks hands the lock to its head and says so. Nothing is sent while waiting,
    /// but by the first waiter of each process when the holder's time to live is over.
    #[default]
    Notify,
    /// By asking again, outside the queue: those who wait in it go first. For servers whose messages do not arrive.
    Poll {
        /// The pause between two attempts, 1 ms to a day.
        interval: Duration,
        /// Lengthens each pause by a random part of up to this fraction of it, from 0 to 1.
        jitter: f64,
    },
    /// As `Notify`, and also woken when the key is deleted or expires by other hands than this crate's. Has the
    /// server announce what happens to keys (`CONFIG SET notify-keyspace-events`, added to what is set there), which
    /// needs the right to; where it is refused, this is [`Poll`](Self::Poll), with one warning.
    Keyspace,
}

/// The settings of a [`Mutex`]; made by [`MutexBuilder`].
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct MutexOptions {
    /// How long it is held if nobody unlocks or extends it; `None` for ever.
    pub ttl: Option<Duration>,
    /// How it is waited for.
    pub waiting: Waiting,
    /// Which of those that wait has it next.
    pub fairness: Fairness,
    /// How long it is waited for; `None` for ever.
    pub acquire_timeout: Option<Duration>,
    /// How often it is tried again after the first attempt; `None` as often as there is time for.
    pub retries: Option<u32>,
    /// The pause between two attempts where `waiting` is, or falls back to, polling.
    pub retry_interval: Duration,
    /// What may be added to that pause, as a fraction of it.
    pub jitter: f64,
    /// How much of its time has to be left when it is granted.
    pub min_remaining: Duration,
    /// Whether it is extended in the background until it is unlocked.
    pub auto_renew: bool,
    /// What its bare key begins with; `None` for a key of this crate's own.
    pub prefix: Option<String>,
}

/// Builds a [`Mutex`]; [`build`](Self::build) refuses settings that contradict each other.
///
/// # Examples
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use std::time::Duration;
/// use stampede_guard::lock::{Locks, LockError};
///
/// let locks = Locks::in_memory();
/// let build = || {
///     locks
///         .mutex(("market", 42))
///         .ttl(Duration::from_secs(10))
///         .acquire_timeout(Duration::from_millis(20))
///         .build()
/// };
/// let (one, other) = (build()?, build()?);
/// let _guard = one.lock().await?;
/// assert!(matches!(other.lock().await, Err(LockError::AcquireTimeout { attempts: 1, .. })));
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
#[must_use = "a builder does nothing until `build` is called"]
pub struct MutexBuilder {
    home: Arc<Home>,
    scope: Scope,
    options: MutexOptions,
    /// `None` until it is said, or implied by an interval.
    waiting: Option<Waiting>,
    paced: bool,
}

impl Default for MutexOptions {
    fn default() -> Self {
        Self {
            // Of the sources one documents 60 s and has none (held for ever after a crash), one 10 s. What is
            // forgotten has to end by itself; work that is longer extends it.
            ttl: Some(Duration::from_secs(60)),
            waiting: Waiting::Notify,
            // No caller is overtaken, whatever others do: what a queue promises.
            fairness: Fairness::Fifo,
            // As Redis in Action has it. Without a bound a deadlock of two locks never shows.
            acquire_timeout: Some(Duration::from_secs(10)),
            // The time bounds it. redis_exp_lock's default is 0: it has no other bound.
            retries: None,
            // As redis_exp_lock has it: a hundred tries a second for each waiter is what a server can bear.
            retry_interval: Duration::from_millis(10),
            // Waiters that were turned away together would come back together.
            jitter: 0.1,
            min_remaining: Duration::ZERO,
            // A holder that hangs would keep it for ever: to be chosen, not to be found out.
            auto_renew: false,
            prefix: None,
        }
    }
}

impl MutexBuilder {
    pub(super) fn new(home: Arc<Home>, scope: Scope) -> Self {
        Self { home, scope, options: MutexOptions::default(), waiting: None, paced: false }
    }

    /// How long it is held if its holder neither unlocks nor extends it: what a crashed holder costs the others, and
    /// the longest that work may take under it. In whole milliseconds, rounded up; 3 ms to ten years. Defaults to
    /// 60 s.
    ///
    /// 1 % of it and 2 ms are kept back for the drift of clocks: [`Held::remaining`](super::Held::remaining) never
    /// counts on them, and of less than 3 ms nothing is left.
    pub fn ttl(mut self, ttl: Duration) -> Self {
        self.options.ttl = Some(ttl);
        self
    }

    /// Holds it until it is unlocked, however long that takes. A holder that dies keeps it for ever: only
    /// [`force_unlock`](Mutex::force_unlock) ends that.
    pub fn non_expiring(mut self) -> Self {
        self.options.ttl = None;
        self
    }

    /// How it is waited for. Defaults to [`Waiting::Notify`].
    pub fn wait(mut self, waiting: Waiting) -> Self {
        self.waiting = Some(waiting);
        self
    }

    /// Which of those that wait has it next. Defaults to [`Fairness::Fifo`].
    pub fn fairness(mut self, fairness: Fairness) -> Self {
        self.options.fairness = fairness;
        self
    }

    /// How long [`lock`](Mutex::lock) waits. The first attempt is made in any case, also with zero; `Duration::MAX`
    /// waits for ever. Defaults to 10 s. It is no time to live: that is [`ttl`](Self::ttl).
    pub fn acquire_timeout(mut self, acquire_timeout: Duration) -> Self {
        self.options.acquire_timeout = Some(acquire_timeout).filter(|&timeout| timeout != Duration::MAX);
        self
    }

    /// How often [`lock`](Mutex::lock) tries again after its first attempt; with 0 there is exactly one.
    /// Defaults to as often as there is time for.
    ///
    /// When polling these are attempts; with [`Waiting::Notify`], which hardly ever has to ask, they are wake-ups
    /// that did not bring the lock. Asking once more because only then the process began to listen does not count.
    pub fn retries(mut self, retries: u32) -> Self {
        self.options.retries = Some(retries);
        self
    }

    /// The pause between two attempts, 1 ms to a day. Setting it chooses [`Waiting::Poll`], unless
    /// [`wait`](Self::wait) says otherwise: then it is what [`Waiting::Keyspace`] falls back to. Defaults to 10 ms.
    pub fn retry_interval(mut self, retry_interval: Duration) -> Self {
        self.options.retry_interval = retry_interval;
        self.paced = true;
        self
    }

    /// Lengthens each pause by a random part of up to this fraction of it, 0 to 1, so that those who were turned
    /// away together do not come back together. Defaults to 0.1.
    pub fn jitter(mut self, fraction: f64) -> Self {
        self.options.jitter = fraction;
        self
    }

    /// How much of its time has to be left when it is granted; otherwise it is given back, and the call fails with
    /// [`LockError::GrantedTooLate`]. For answers that were long on their way. Defaults to any time at all.
    pub fn min_remaining(mut self, min_remaining: Duration) -> Self {
        self.options.min_remaining = min_remaining;
        self
    }

    /// Whether it is extended in the background, each third of its time to live, until it is unlocked or dropped.
    /// A process that dies still loses it within one time to live; a future that hangs keeps it. Defaults to false.
    pub fn auto_renew(mut self, auto_renew: bool) -> Self {
        self.options.auto_renew = auto_renew;
        self
    }

    /// Puts it under the bare key `<prefix><name>`, for programs in other languages that `SET key token NX PX`: they
    /// exclude it, and are excluded. Without namespace; 1 to 64 bytes, no braces. Inside a part of the name, `:` is
    /// written `%3A`, so a key `lock:a:b` is the prefix `lock:` and the name `("a", "b")`. A name of
    /// more than 199 bytes ends in its digest, so no key is longer than 264.
    /// [`Mutex::key`] shows it. Where the server's users have rights by key, this one needs them on the prefix too.
    /// Defaults to a key of this crate's own.
    pub fn prefix(mut self, prefix: impl Into<String>) -> Self {
        self.options.prefix = Some(prefix.into());
        self
    }

    /// Makes the mutex. No I/O, no runtime needed.
    ///
    /// # Errors
    ///
    /// [`LockError::InvalidKey`], [`LockError::InvalidTtl`] and [`LockError::InvalidOption`].
    pub fn build(self) -> Result<Mutex, LockError> {
        let Self { home, scope, mut options, waiting, paced } = self;
        let name = scope.mutex(&home.namespace, options.prefix.as_deref())?;
        options.ttl = options.ttl.map(|ttl| held_ttl("ttl", ttl)).transpose()?;
        let polled = Waiting::Poll { interval: options.retry_interval, jitter: options.jitter };
        check_pace("retry_interval", polled)?;
        options.waiting = waiting.unwrap_or(if paced { polled } else { Waiting::Notify });
        check_pace("wait", options.waiting)?;
        options.fairness.check()?;
        match options.ttl {
            Some(ttl) if options.min_remaining > ttl.saturating_sub(drift(ttl)) => {
                let why = format!("it is {:?}, and a grant never has that of {ttl:?}", options.min_remaining);
                return Err(LockError::option("min_remaining", why));
            }
            _ => check_auto_renew(options.auto_renew, options.ttl)?,
        }
        Ok(Mutex::from_target(MutexTarget { home, name, options }))
    }
}

/// Builds a [`Semaphore`]; [`build`](Self::build) refuses settings that contradict each other.
#[derive(Clone, Debug)]
#[must_use = "a builder does nothing until `build` is called"]
pub struct SemaphoreBuilder {
    home: Arc<Home>,
    scope: Scope,
    permits: u32,
    lease: Duration,
    idle_ttl: Duration,
    auto_renew: bool,
    waiting: Waiting,
}

impl SemaphoreBuilder {
    pub(super) fn new(home: Arc<Home>, scope: Scope, permits: u32) -> Self {
        Self {
            home,
            scope,
            permits,
            // As a mutex: what is forgotten comes back by itself.
            lease: Duration::from_secs(60),
            // Longer than any pause of a service that is in use; what is forgotten for good is gone tomorrow.
            idle_ttl: Duration::from_secs(86_400),
            auto_renew: false,
            waiting: Waiting::Notify,
        }
    }

    /// How long a permit is held if it is neither released nor refreshed. In whole milliseconds, rounded up; 3 ms to
    /// ten years: 1 % and 2 ms are kept back, as of a mutex. Defaults to 60 s.
    pub fn lease(mut self, lease: Duration) -> Self {
        self.lease = lease;
        self
    }

    /// How long the semaphore outlives its last use, with what was added to it; never less than its longest lease.
    /// Defaults to a day.
    pub fn idle_ttl(mut self, idle_ttl: Duration) -> Self {
        self.idle_ttl = idle_ttl;
        self
    }

    /// Whether a permit is refreshed in the background, each third of its lease, until it is released or dropped.
    /// Defaults to false.
    pub fn auto_renew(mut self, auto_renew: bool) -> Self {
        self.auto_renew = auto_renew;
        self
    }

    /// How permits are waited for: [`Waiting::Notify`] or [`Waiting::Poll`]. Defaults to `Notify`.
    pub fn waiting(mut self, waiting: Waiting) -> Self {
        self.waiting = waiting;
        self
    }

    /// Makes the handle. No I/O, no runtime needed.
    ///
    /// # Errors
    ///
    /// [`LockError::InvalidKey`], [`LockError::InvalidTtl`], and [`LockError::InvalidOption`], also for no permits at
    /// all and for [`Waiting::Keyspace`]: nobody else knows the keys.
    pub fn build(self) -> Result<Semaphore, LockError> {
        let Self { home, scope, permits, lease, idle_ttl, auto_renew, waiting } = self;
        let name = scope.semaphore(&home.namespace)?;
        if permits == 0 {
            return Err(LockError::option("permits", "it is 0, so nobody would ever have one"));
        }
        if waiting == Waiting::Keyspace {
            return Err(LockError::option("waiting", "no other programs release permits: choose Notify"));
        }
        check_pace("waiting", waiting)?;
        let lease = held_ttl("lease", lease)?;
        check_auto_renew(auto_renew, Some(lease))?;
        let create = Create { capacity: permits, idle_ttl: whole_ttl(idle_ttl)?.max(lease) };
        let warned = AtomicBool::new(false);
        let target = SemaphoreTarget { home, name, create, lease, warned };
        Ok(Semaphore::from_target(target, auto_renew, waiting))
    }
}

/// A time to live in whole milliseconds, as stores count; never less than what was asked.
fn whole_ttl(ttl: Duration) -> Result<Duration, LockError> {
    const MOST: Duration = Duration::from_secs(3650 * 86_400);
    if !(Duration::from_millis(1)..=MOST).contains(&ttl) {
        return Err(LockError::InvalidTtl { ttl });
    }
    let millis = ttl.as_nanos().div_ceil(1_000_000);
    Ok(Duration::from_millis(u64::try_from(millis).unwrap_or(u64::MAX)))
}

/// The shortest time of which anything is left when [`drift`] is kept back.
pub(super) const SHORTEST_HELD: Duration = Duration::from_millis(3);

/// [`whole_ttl`] of what is to be held.
pub(super) fn held_ttl(option: &'static str, ttl: Duration) -> Result<Duration, LockError> {
    let ttl = whole_ttl(ttl)?;
    if ttl < SHORTEST_HELD {
        let why = format!("nothing is left of {ttl:?} when it is granted: choose at least {SHORTEST_HELD:?}");
        return Err(LockError::option(option, why));
    }
    Ok(ttl)
}

/// The shortest time to live that can be kept alive: a renewal must fit into a third of it.
const SHORTEST_RENEWED: Duration = Duration::from_millis(30);

pub(super) fn check_auto_renew(auto_renew: bool, ttl: Option<Duration>) -> Result<(), LockError> {
    match ttl {
        None if auto_renew => Err(LockError::option("auto_renew", "what does not expire is not renewed")),
        Some(ttl) if auto_renew && ttl < SHORTEST_RENEWED => {
            let why =
                format!("a time to live of {ttl:?} can not be renewed: choose at least {SHORTEST_RENEWED:?}");
            Err(LockError::option("auto_renew", why))
        }
        _ => Ok(()),
    }
}

pub(super) fn check_pace(option: &'static str, waiting: Waiting) -> Result<(), LockError> {
    let Waiting::Poll { interval, jitter } = waiting else { return Ok(()) };
    let (least, most) = (Duration::from_millis(1), Duration::from_secs(86_400));
    if !(least..=most).contains(&interval) {
        let why = format!("an interval of {interval:?}: choose from {least:?} to {most:?}");
        return Err(LockError::option(option, why));
    }
    if !(0.0..=1.0).contains(&jitter) {
        return Err(LockError::option("jitter", format!("it is {jitter}: choose from 0 to 1")));
    }
    Ok(())
}
