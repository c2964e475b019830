//! [`Origin`]: a scripted stand-in for the expensive resource behind a guard.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::future::pending;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::sleep;

use crate::guard::typed::LoadContext;
use crate::sync::{lock, until};

/// An origin that counts its loads and answers by a script. Its values are versions: numbers that grow with each
/// [`change`](Self::change).
///
/// All clones are the same origin. Without a script it answers at once with the present version, which is initially
/// 0.
///
/// # Examples
///
/// ```
/// # #[tokio::main(flavor = "current_thread", start_paused = true)] async fn main() {
/// use stampede_guard::StampedeGuard;
/// use stampede_guard::testing::{Answer, Origin};
///
/// let (guard, origin) = (StampedeGuard::in_memory(), Origin::new());
/// origin.answer("k", [Answer::Fail, Answer::Value]);
///
/// let load = || { let origin = origin.clone(); move || async move { origin.load("k").await } };
/// assert!(guard.get_or_load("k", load()).await.is_err());
/// assert_eq!(guard.get_or_load("k", load()).await.ok(), Some(0));
/// assert_eq!(guard.get_or_load("k", load()).await.ok(), Some(0));
/// assert_eq!((origin.loads("k"), origin.most_at_once("k")), (2, 1));
/// # }
/// ```
#[derive(Clone, Default)]
pub struct Origin {
    shared: Arc<OriginShared>,
}

#[derive(Default)]
struct OriginShared {
    state: Mutex<OriginState>,
    changed: Notify,
}

#[derive(Default)]
struct OriginState {
    by_key: HashMap<String, Resource>,
    /// How many loads of all keys run now.
    running: u64,
    most_at_once: u64,
    takes: Duration,
    is_held: bool,
}

#[derive(Default)]
struct Resource {
    version: u64,
    loads: u64,
    running: u64,
    most_at_once: u64,
    /// The answers to the next loads.
    script: VecDeque<Answer>,
    /// The answer to loads after the end of the script.
    otherwise: Option<Answer>,
}

/// How an [`Origin`] answers one load.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Answer {
    /// The version that the resource had when the load began.
    #[default]
    Value,
    /// Like `Value`, but the load takes this much longer than otherwise.
    After(Duration),
    /// Like `Value`, but not to be stored; see [`Origin::load_with`].
    DoNotStore,
    /// An error.
    Fail,
    /// A panic.
    Panic,
    /// The load never ends.
    Hang,
}

/// The error of a load with the answer [`Fail`](Answer::Fail).
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct OriginError {
    /// The key of the load.
    pub key: String,
}

impl fmt::Display for OriginError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the origin was told to fail for {}", self.key)
    }
}

impl std::error::Error for OriginError {}

impl Origin {
    /// An origin without a script, which has counted no loads yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Scripts the next loads of `key`: they give these answers, in this order, before any other.
    pub fn answer(&self, key: impl fmt::Display, script: impl IntoIterator<Item = Answer>) {
        self.resource(key, |resource| resource.script.extend(script));
    }

    /// Sets the answer of all loads of `key` for which [`answer`](Self::answer) has scripted nothing.
    pub fn always(&self, key: impl fmt::Display, answer: Answer) {
        self.resource(key, |resource| resource.otherwise = Some(answer));
    }

    /// How long each load takes from now on.
    ///
    /// # Examples
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)] async fn main() {
    /// use std::time::Duration;
    /// use stampede_guard::testing::Origin;
    ///
    /// let origin = Origin::new();
    /// origin.takes(Duration::from_secs(3600));
    /// let began = tokio::time::Instant::now();
    /// assert_eq!(origin.load("k").await, Ok(0));
    /// assert_eq!(began.elapsed(), Duration::from_secs(3600));
    /// # }
    /// ```
    pub fn takes(&self, time: Duration) {
        lock(&self.shared.state).takes = time;
    }

    /// Holds back all loads, running ones included, until [`release`](Self::release): for a test that acts while
    /// they run.
    ///
    /// # Examples
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)] async fn main() {
    /// use stampede_guard::testing::Origin;
    ///
    /// let origin = Origin::new();
    /// origin.hold();
    /// let load = tokio::spawn({ let origin = origin.clone(); async move { origin.load("k").await } });
    /// origin.wait_for_loads("k", 1).await;
    /// assert_eq!(origin.running("k"), 1);
    /// origin.release();
    /// assert_eq!(load.await.ok(), Some(Ok(0)));
    /// # }
    /// ```
    pub fn hold(&self) {
        lock(&self.shared.state).is_held = true;
    }

    /// Lets the loads go that [`hold`](Self::hold) holds back.
    pub fn release(&self) {
        lock(&self.shared.state).is_held = false;
        self.shared.changed.notify_waiters();
    }

    /// Changes the resource: increments its version and returns the new version. Does not invalidate the key, as a service would.
    pub fn change(&self, key: impl fmt::Display) -> u64 {
        self.resource(key, |resource| {
            resource.version += 1;
            resource.version
        })
    }

    /// The present version of the resource.
    pub fn version(&self, key: impl fmt::Display) -> u64 {
        self.resource(key, |resource| resource.version)
    }

    /// How many loads of `key` have begun since the origin was made.
    pub fn loads(&self, key: impl fmt::Display) -> u64 {
        self.resource(key, |resource| resource.loads)
    }

    /// How many loads of all keys together have begun since the origin was made.
    pub fn total_loads(&self) -> u64 {
        lock(&self.shared.state).by_key.values().map(|resource| resource.loads).sum()
    }

    /// How many loads of `key` run now. A dropped load does not run.
    pub fn running(&self, key: impl fmt::Display) -> u64 {
        self.resource(key, |resource| resource.running)
    }

    /// The largest number of loads of `key` that have run at once since the origin was made.
    pub fn most_at_once(&self, key: impl fmt::Display) -> u64 {
        self.resource(key, |resource| resource.most_at_once)
    }

    /// The largest number of loads of all keys that ran at once, which
    /// [`max_concurrent_loads`](crate::PolicyBuilder::max_concurrent_loads) bounds.
    ///
    /// # Examples
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// use std::time::Duration;
    /// use stampede_guard::{Policy, StampedeGuard};
    /// use stampede_guard::testing::{ChaosStore, Origin};
    ///
    /// let (chaos, origin) = (ChaosStore::new(1), Origin::new());
    /// origin.takes(Duration::from_millis(10));
    /// let policy = Policy::builder().max_concurrent_loads(2).build()?;
    /// let callers = ["a", "b", "c", "d", "e", "f"].map(|key| {
    ///     let (guard, origin) = (StampedeGuard::new(chaos.clone()).with_policy(policy.clone()), origin.clone());
    ///     tokio::spawn(async move { guard.get_or_load(key, move || async move { origin.load(key).await }).await.is_ok() })
    /// });
    /// for caller in callers {
    ///     assert!(caller.await?);
    /// }
    /// assert_eq!((origin.total_loads(), origin.total_most_at_once()), (6, 2));
    /// # Ok(()) }
    /// ```
    pub fn total_most_at_once(&self) -> u64 {
        lock(&self.shared.state).most_at_once
    }

    /// Waits until this many loads of `key` have begun.
    ///
    /// # Cancel safety
    ///
    /// Safe.
    pub async fn wait_for_loads(&self, key: impl fmt::Display, loads: u64) {
        let key = key.to_string();
        self.until(|state| state.by_key.get(&key).is_some_and(|resource| resource.loads >= loads)).await;
    }

    /// A load, to be called by a guard's loader.
    ///
    /// # Errors
    ///
    /// [`OriginError`] if the script says [`Answer::Fail`].
    ///
    /// # Panics
    ///
    /// If the script says [`Answer::Panic`].
    ///
    /// # Cancel safety
    ///
    /// If dropped, it still counts as a load.
    pub async fn load(&self, key: impl fmt::Display) -> Result<u64, OriginError> {
        self.answered(key.to_string()).await.map(|(version, _)| version)
    }

    /// Like [`load`](Self::load), for a loader that [`StampedeGuard::load`](crate::StampedeGuard::load) calls: with
    /// [`Answer::DoNotStore`] the value goes to the waiters of the load and is not stored.
    ///
    /// # Errors
    ///
    /// See [`load`](Self::load).
    ///
    /// # Panics
    ///
    /// See [`load`](Self::load).
    ///
    /// # Cancel safety
    ///
    /// See [`load`](Self::load).
    ///
    /// # Examples
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)] async fn main() {
    /// use stampede_guard::{LoadContext, StampedeGuard};
    /// use stampede_guard::testing::{Answer, Origin};
    ///
    /// let (guard, origin) = (StampedeGuard::in_memory(), Origin::new());
    /// origin.answer("k", [Answer::DoNotStore]);
    /// for _ in 0..3 {
    ///     let origin = origin.clone();
    ///     let load = |mut cx: LoadContext<u64>| async move { origin.load_with(&mut cx, "k").await };
    ///     assert_eq!(guard.load("k").get(load).await.ok().map(|loaded| loaded.value), Some(0));
    /// }
    /// assert_eq!(origin.loads("k"), 2); // the first was not stored, the second was
    /// # }
    /// ```
    pub async fn load_with<T>(
        &self,
        context: &mut LoadContext<T>,
        key: impl fmt::Display,
    ) -> Result<u64, OriginError> {
        let (version, answer) = self.answered(key.to_string()).await?;
        if answer == Answer::DoNotStore {
            context.do_not_store();
        }
        Ok(version)
    }

    async fn answered(&self, key: String) -> Result<(u64, Answer), OriginError> {
        let (running, version, answer, takes) = {
            let mut state = lock(&self.shared.state);
            let takes = state.takes;
            state.running += 1;
            state.most_at_once = state.most_at_once.max(state.running);
            let resource = state.by_key.entry(key.clone()).or_default();
            resource.loads += 1;
            resource.running += 1;
            resource.most_at_once = resource.most_at_once.max(resource.running);
            let answer = resource.script.pop_front().or(resource.otherwise).unwrap_or_default();
            (RunningLoad { origin: self, key }, resource.version, answer, takes)
        };
        self.shared.changed.notify_waiters();
        let takes = if let Answer::After(more) = answer { takes + more } else { takes };
        if !takes.is_zero() {
            sleep(takes).await;
        }
        self.until(|state| !state.is_held).await;
        match answer {
            Answer::Value | Answer::After(_) | Answer::DoNotStore => Ok((version, answer)),
            Answer::Fail => Err(OriginError { key: running.key.clone() }),
            Answer::Panic => panic!("the origin was told to panic for {}", running.key),
            Answer::Hang => pending().await,
        }
    }

    fn resource<T>(&self, key: impl fmt::Display, look: impl FnOnce(&mut Resource) -> T) -> T {
        look(lock(&self.shared.state).by_key.entry(key.to_string()).or_default())
    }

    async fn until(&self, is_so: impl Fn(&OriginState) -> bool) {
        until(&self.shared.changed, move || is_so(&lock(&self.shared.state))).await;
    }
}

/// A running load.
struct RunningLoad<'a> {
    origin: &'a Origin,
    key: String,
}

impl Drop for RunningLoad<'_> {
    fn drop(&mut self) {
        let mut state = lock(&self.origin.shared.state);
        state.running -= 1;
        if let Some(resource) = state.by_key.get_mut(&self.key) {
            resource.running -= 1;
        }
        drop(state);
        self.origin.shared.changed.notify_waiters();
    }
}

debug_as!(self: Origin { keys: lock(&self.shared.state).by_key.len(), loads: self.total_loads() });
