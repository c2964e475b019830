//! [`ChaosStore`], a store with injected faults that follow a seed, and its [`Replica`]s.

use std::sync::Arc;
use std::time::Duration;

use super::fault::{Condition, Fault, ReplicaState};
use super::server::ChaosServer;
#[cfg(test)]
use super::server::LineEnd;
use super::wire::Wire;
use crate::store::Store;
#[cfg(test)]
use crate::store::Token;
use crate::store::backend::{Backend, StoreSource};
use crate::store::memory::MemoryStore;
use crate::sync::lock;

/// A store with injected faults: as many as you choose, when you choose, and the same ones each time for one seed.
///
/// Guards made from its clones coordinate like replicas on one Redis. A new store has no faults and answers at
/// once.
///
/// [`new`](ChaosStore::new) makes one in memory. It uses Tokio's time, so with a paused clock hours pass in
/// milliseconds. The same seed gives the same faults to the same commands in the same order, which a current-thread
/// runtime with a paused clock provides. It has no connections, and so no circuit breaker: guards keep asking a
/// store that does not answer, each time for as long as `command_timeout`, where a guard on Redis soon stops
/// asking.
///
/// [`over`](ChaosStore::over) puts one in front of any store from which a guard can be made, such as a Redis
/// server: the faults of the connection ([`Fault::ON_ANY_STORE`]) strike there, too.
///
/// # Examples
///
/// ```
/// # #[tokio::main(flavor = "current_thread", start_paused = true)] async fn main() {
/// use stampede_guard::StampedeGuard;
/// use stampede_guard::testing::{ChaosStore, Fault, Origin};
///
/// let (chaos, origin) = (ChaosStore::new(42), Origin::new());
/// let guards = [StampedeGuard::new(chaos.clone()), StampedeGuard::new(chaos.clone())];
///
/// chaos.inject(Fault::ErrorAfter, 0.5);
/// chaos.inject(Fault::WakeLost, 0.2);
/// for guard in &guards {
///     let origin = origin.clone();
///     // Whatever happens to the store, callers are answered.
///     assert_eq!(guard.get_or_load("k", move || async move { origin.load("k").await }).await.ok(), Some(0));
/// }
///
/// chaos.calm();
/// let version = origin.change("k");
/// guards[0].invalidate("k").await.expect("the store is well again");
/// let loaded = guards[1].get_or_load("k", move || async move { origin.load("k").await }).await;
/// assert_eq!(loaded.ok(), Some(version));
/// # }
/// ```
#[derive(Clone)]
pub struct ChaosStore<S = MemoryStore> {
    store: S,
    server: Arc<ChaosServer>,
}

impl ChaosStore {
    /// A store of up to 64 MiB, without faults and latency.
    ///
    /// The seed determines the faults, and also the random numbers that guards draw on the calling thread
    /// (`fastrand::seed`), for their jitter and patience: make the store at the start of a run, in the thread of a
    /// current-thread runtime.
    pub fn new(seed: u64) -> Self {
        Self::over(MemoryStore::new(), seed)
    }
}

impl<S> ChaosStore<S> {
    /// Injects faults in front of `store`: a [`MemoryStore`], a `redis::Client`, a `redis::cluster::ClusterClient`.
    ///
    /// Each guard that is made from it opens its own connections to that store, as it would without the chaos
    /// store. The seed works as in [`new`](ChaosStore::new); but the answer times of a real server vary, so two
    /// runs with one seed differ.
    ///
    /// If the store is not one in memory, only the faults of the connection strike: [`Fault::ON_ANY_STORE`]. The
    /// other faults happen on the server itself. They never strike here: inject them into the server. Its messages
    /// to lock waiters always arrive.
    ///
    /// # Examples
    ///
    /// ```no_run
    /// # #[cfg(feature = "redis")]
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// use stampede_guard::StampedeGuard;
    /// use stampede_guard::testing::{ChaosStore, Fault};
    ///
    /// let chaos = ChaosStore::over(redis::Client::open("redis://127.0.0.1/")?, 42);
    /// for &fault in Fault::ON_ANY_STORE {
    ///     chaos.inject(fault, 0.05);
    /// }
    /// let guard = StampedeGuard::new(chaos.clone());
    /// # let _ = guard;
    /// # Ok(()) }
    /// # #[cfg(not(feature = "redis"))] fn main() {}
    /// ```
    pub fn over(store: S, seed: u64) -> Self
    where
        S: Into<Backend> + Clone + Send + Sync + 'static,
    {
        fastrand::seed(seed);
        let another = store.clone();
        Self { store, server: ChaosServer::new(move || another.clone().into(), seed) }
    }

    /// From now on `fault` strikes with this probability, from 0 to 1, at each command or each message.
    ///
    /// # Examples
    ///
    /// ```
    /// use stampede_guard::testing::{ChaosStore, Fault};
    ///
    /// let chaos = ChaosStore::new(1);
    /// for &fault in Fault::ALL {
    ///     chaos.inject(fault, 0.05);
    /// }
    /// ```
    pub fn inject(&self, fault: Fault, probability: f64) {
        lock(&self.server.odds).set(fault, probability);
    }

    /// `fault` strikes the next command, or message, that it can strike. After two calls it strikes the next two.
    ///
    /// # Examples
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)] async fn main() {
    /// use stampede_guard::StampedeGuard;
    /// use stampede_guard::testing::{ChaosStore, Fault};
    ///
    /// let chaos = ChaosStore::new(1);
    /// let guard = StampedeGuard::new(chaos.clone());
    /// guard.insert("k", &1_u32).await.expect("stored");
    /// chaos.once(Fault::Flush);
    /// assert_eq!(guard.get::<u32>("k").await.expect("answered"), None);
    /// assert_eq!(chaos.struck(Fault::Flush), 1);
    /// # }
    /// ```
    pub fn once(&self, fault: Fault) {
        lock(&self.server.odds).once(fault);
    }

    /// Ends all faults: none strikes any more, writes are accepted, subscriptions are back and the clock is right.
    /// If the clock had jumped, the stored data is flushed, because its times follow the wrong clock. Commands in
    /// flight stay there: a ghost still arrives late. Replicas stay as they are.
    ///
    /// # Examples
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)] async fn main() {
    /// use stampede_guard::StampedeGuard;
    /// use stampede_guard::testing::{ChaosStore, Fault};
    ///
    /// let chaos = ChaosStore::new(1);
    /// let guard = StampedeGuard::new(chaos.clone());
    /// chaos.inject(Fault::ErrorBefore, 1.0);
    /// assert!(guard.get::<u32>("k").await.is_err());
    /// chaos.calm();
    /// assert!(guard.get::<u32>("k").await.is_ok());
    /// # }
    /// ```
    pub fn calm(&self) {
        self.server.calm();
    }

    /// How long a round trip takes, from `least` to `most`. Initially zero.
    ///
    /// # Examples
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)] async fn main() {
    /// use std::time::Duration;
    /// use stampede_guard::StampedeGuard;
    /// use stampede_guard::testing::ChaosStore;
    ///
    /// let chaos = ChaosStore::new(1);
    /// chaos.latency(Duration::from_millis(2), Duration::from_millis(5));
    /// let (guard, began) = (StampedeGuard::new(chaos), tokio::time::Instant::now());
    /// assert_eq!(guard.get::<u32>("k").await.expect("answered"), None);
    /// assert!(began.elapsed() >= Duration::from_millis(2));
    /// # }
    /// ```
    pub fn latency(&self, least: Duration, most: Duration) {
        *lock(&self.server.latency) = (least / 2, most.saturating_sub(least) / 2);
    }

    /// How long the server takes for each command. It executes one command after the other. Initially zero.
    ///
    /// # Examples
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)] async fn main() {
    /// use std::time::Duration;
    /// use stampede_guard::StampedeGuard;
    /// use stampede_guard::testing::ChaosStore;
    ///
    /// let chaos = ChaosStore::new(1);
    /// chaos.command_time(Duration::from_millis(5));
    /// let (guard, began) = (StampedeGuard::new(chaos), tokio::time::Instant::now());
    /// let (one, two) = tokio::join!(guard.get::<u32>("one"), guard.get::<u32>("two"));
    /// assert_eq!((one.expect("answered"), two.expect("answered")), (None, None));
    /// assert!(began.elapsed() >= Duration::from_millis(10));
    /// # }
    /// ```
    pub fn command_time(&self, each: Duration) {
        lock(&self.server.queue).each = each;
    }

    /// How many times `fault` has struck since this store was made.
    pub fn struck(&self, fault: Fault) -> u64 {
        lock(&self.server.odds).struck(fault)
    }

    /// How many commands have arrived since this store was made.
    pub fn commands(&self) -> u64 {
        lock(&self.server.state).commands
    }

    /// The store behind the faults, with the same data: for a guard that should see no faults, and to examine the stored data.
    pub fn store(&self) -> S
    where
        S: Clone,
    {
        self.store.clone()
    }

    /// A connection to this store for one replica, which can be cut off, stopped and killed separately.
    pub fn replica(&self) -> Replica {
        Replica { server: Arc::clone(&self.server), condition: Arc::default() }
    }

    /// Whether a live replica has a waiter with this token, and if so, whether the replica is not stopped.
    #[cfg(test)]
    pub(crate) fn waits(&self, token: &Token) -> Option<bool> {
        let line = self.server.lines().into_iter().find(|line| line.watches().has(token))?;
        (!line.condition().is(ReplicaState::Dead)).then(|| !line.condition().is(ReplicaState::Stopped))
    }

    /// The lease of this name, if a flight of the replica holds it and is registered for its messages.
    #[cfg(test)]
    pub(crate) fn holds(&self, replica: &Replica, name: &str) -> Option<Token> {
        let (holder, _) = self.server.memory()?.lease(name)?;
        let is_held = |line: &Arc<dyn LineEnd>| {
            Arc::ptr_eq(line.condition(), &replica.condition) && line.watches().has(&holder)
        };
        self.server.lines().iter().any(is_held).then_some(holder)
    }

    #[cfg(test)]
    pub(crate) fn has_waiters(&self, replica: &Replica) -> bool {
        self.server
            .lines()
            .iter()
            .any(|line| Arc::ptr_eq(line.condition(), &replica.condition) && !line.watches().is_empty())
    }

    #[cfg(test)]
    pub(crate) fn set_witness(&self, witness: Arc<dyn super::server::Witness>) {
        let _ = self.server.witness.set(witness);
    }
}

debug_as!(self: ChaosStore<S> {});

/// One replica's connection to a [`ChaosStore`]: make a guard from it to cut off, stop or kill that guard.
///
/// All clones are the same replica.
///
/// # Examples
///
/// ```
/// # #[tokio::main(flavor = "current_thread", start_paused = true)] async fn main() {
/// use stampede_guard::StampedeGuard;
/// use stampede_guard::testing::{Answer, ChaosStore, Origin};
///
/// let (chaos, origin) = (ChaosStore::new(7), Origin::new());
/// let (one, other) = (chaos.replica(), chaos.replica());
/// let (dying, living) = (StampedeGuard::new(one.clone()), StampedeGuard::new(other));
///
/// // A replica begins to load, and dies.
/// origin.answer("k", [Answer::Hang]);
/// let load = { let origin = origin.clone(); move || async move { origin.load("k").await } };
/// tokio::spawn(async move { dying.get_or_load("k", load).await });
/// origin.wait_for_loads("k", 1).await;
/// one.kill();
///
/// // That costs the others one lease.
/// let load = { let origin = origin.clone(); move || async move { origin.load("k").await } };
/// assert_eq!(living.get_or_load("k", load).await.ok(), Some(0));
/// assert_eq!(origin.loads("k"), 2);
/// # }
/// ```
#[derive(Clone)]
pub struct Replica {
    server: Arc<ChaosServer>,
    condition: Arc<Condition>,
}

impl Replica {
    /// Cuts the replica off: its commands neither arrive nor get an answer, and it receives no messages. Its guards report
    /// that: [`connect`](crate::StampedeGuard::connect) fails, [`health`](crate::StampedeGuard::health) has both
    /// connections down, and [`doctor`](crate::StampedeGuard::doctor) finds a problem. (The circuit breaker stays
    /// as it is, because a [`ChaosStore`] has none.)
    pub fn cut(&self) {
        self.condition.set(ReplicaState::Cut);
    }

    /// Stops the replica, as `SIGSTOP` does: its commands and the messages to it wait until [`resume`](Self::resume). (Its
    /// timers and loaders continue: have your loaders wait if that matters.)
    pub fn stop(&self) {
        self.condition.set(ReplicaState::Stopped);
    }

    /// Ends [`cut`](Self::cut) or [`stop`](Self::stop).
    pub fn resume(&self) {
        let was_cut = self.condition.is(ReplicaState::Cut);
        self.condition.set(ReplicaState::Running);
        if was_cut {
            self.server.reconnected(&self.condition);
        }
    }

    /// Moves the replica away from the store: each of its round trips takes this much longer than those of other replicas.
    pub fn move_away(&self, by: Duration) {
        self.condition.move_away(by);
    }

    /// Kills the replica: the commands that it has sent arrive, and nothing else ever does. Calls on its guards that need
    /// the store do not return.
    pub fn kill(&self) {
        self.condition.set(ReplicaState::Dead);
    }

    /// Sets whether messages to the replica get lost from now on. It never learns that it has missed some.
    #[cfg(test)]
    pub(crate) fn miss_messages(&self, misses: bool) {
        self.condition.miss_messages(misses);
    }

    #[cfg(test)]
    pub(crate) fn is_dead(&self) -> bool {
        self.condition.is(ReplicaState::Dead)
    }

    /// Waits until the replica is not stopped; for ever if it is dead.
    #[cfg(test)]
    pub(crate) async fn runs(&self) {
        self.condition.runs().await;
    }
}

impl<S> From<ChaosStore<S>> for Backend {
    fn from(chaos: ChaosStore<S>) -> Self {
        chaos.replica().into()
    }
}

impl From<Replica> for Backend {
    fn from(replica: Replica) -> Self {
        let Replica { server, condition } = replica;
        let node = move |timeout| Store::Command(Wire::new(&server, Arc::clone(&condition), timeout));
        Self { kind: StoreSource::Command(Arc::new(node)) }
    }
}

debug_as!(self: Replica { condition: self.condition });
