//! The contract of locks in [`Store`](crate::store::Store), on the same kinds of stores as the other cases.

mod bumps;
#[cfg(feature = "redis")]
mod clock;
#[cfg(feature = "redis")]
mod equal_answers;
#[cfg(feature = "redis")]
mod foreign;
#[cfg(feature = "redis")]
mod keyspace;
#[cfg(feature = "redis")]
mod leaving;
mod load_limits;
#[cfg(feature = "redis")]
mod long_queues;
mod mutexes;
#[cfg(feature = "redis")]
mod on_redis;
mod queues;
mod semaphores;

use super::*;
use crate::store::wake_locks::{LockHints, LockWaiter};
use crate::store::{
    Create, LockName, MutexHolder, MutexTaken, PermitFreed, PermitTaken, SemaphoreChange, SemaphoreState,
    Take, TakePermit, Taken,
};

/// How long a test waits for a change that happens by itself, such as an expiry or a message.
const SOON: Duration = Duration::from_secs(5);

/// The cases that run on a cluster.
#[cfg(feature = "cluster")]
pub(super) fn cases() -> Vec<on_cluster::Case> {
    [mutexes::cases(), queues::cases(), bumps::cases(), semaphores::cases(), load_limits::cases()].concat()
}

/// The cases that affect a whole server.
#[cfg(feature = "cluster")]
pub(super) fn server_cases() -> Vec<on_cluster::Case> {
    [on_redis::cases(), long_queues::cases(), clock::cases(), leaving::cases()].concat()
}

fn mutex(name: &str) -> LockName {
    LockName::mutex(&format!("{}:{name}", namespace()))
}

fn semaphore(name: &str) -> LockName {
    LockName::semaphore(&format!("{}:{name}", namespace()))
}

/// One acquisition: a token of one node, registered for messages, and short methods for the commands about it.
struct Asker {
    node: Store,
    name: LockName,
    token: Token,
    wait: LockWaiter,
}

impl Asker {
    fn on(node: &Store, name: &LockName) -> Self {
        let token = Token::mint(node.node());
        let wait = node.await_grant(name, &token);
        Self { node: node.clone(), name: name.clone(), token, wait }
    }

    /// An asker on a separate node.
    async fn separate(world: &World, name: &LockName) -> Self {
        Self::on(&world.node().await, name)
    }

    /// An asker on a separate node that holds the mutex, and the fence of its grant.
    async fn holding(world: &World, name: &LockName) -> (Self, u64) {
        let asker = Self::separate(world, name).await;
        let fence = asker.must_take().await;
        (asker, fence)
    }

    /// An asker on a separate node that waits in the mutex's queue.
    async fn waiting(world: &World, name: &LockName) -> Self {
        let asker = Self::separate(world, name).await;
        asker.must_wait().await;
        asker
    }

    fn ask(&self) -> Take<'_> {
        Take { token: &self.token, ttl: Some(LEASE), queue: true, instead: None }
    }

    async fn take(&self, ask: Take<'_>) -> Taken {
        self.node.take_mutex(&self.name, ask, WITHIN).await.expect("take").taken
    }

    /// Sends a take instead of `old`, which gives up the mutex. Returns the answer, and whether `old` held the mutex.
    async fn take_instead_of(&self, old: &Self) -> (Taken, bool) {
        let ask = Take { instead: Some(&old.token), ..self.ask() };
        let MutexTaken { taken, was_held } =
            self.node.take_mutex(&self.name, ask, WITHIN).await.expect("take");
        (taken, was_held)
    }

    async fn take_for(&self, ttl: Option<Duration>) -> Taken {
        self.take(Take { ttl, ..self.ask() }).await
    }

    #[track_caller]
    fn must_take(&self) -> impl Future<Output = u64> + '_ {
        let caller = std::panic::Location::caller();
        async move {
            match self.take(self.ask()).await {
                Taken::Granted { fence } => fence,
                busy => panic!("{caller}: {busy:?}"),
            }
        }
    }

    #[track_caller]
    fn must_wait(&self) -> impl Future<Output = ()> + '_ {
        let caller = std::panic::Location::caller();
        async move {
            let taken = self.take(self.ask()).await;
            assert!(matches!(taken, Taken::Busy { .. }), "{caller}: {taken:?}");
        }
    }

    async fn free(&self) -> bool {
        self.node.free_mutex(&self.name, &self.token, Some(LEASE), WITHIN).await.expect("free")
    }

    async fn extend(&self, ttl: Option<Duration>) -> bool {
        self.node.extend_mutex(&self.name, &self.token, ttl, WITHIN).await.expect("extend")
    }

    async fn look(&self) -> Option<MutexHolder> {
        self.node.look_at_mutex(&self.name, WITHIN).await.expect("look")
    }

    async fn force(&self) -> bool {
        self.node.break_mutex(&self.name, WITHIN).await.expect("break")
    }

    /// Whether the store names this asker as the holder.
    async fn owns(&self) -> bool {
        self.look().await.is_some_and(|holder| holder.token == self.token.as_str().as_bytes())
    }

    /// The asker's next message. It must come without an expiry: [`LEASE`] is far longer than this waits.
    #[track_caller]
    fn notified(&self) -> impl Future<Output = LockHints> + '_ {
        let caller = std::panic::Location::caller();
        async move {
            let hints = timeout(WITHIN, self.wait.notified()).await;
            hints.unwrap_or_else(|_| panic!("{caller}: it was never notified"))
        }
    }

    /// Waits for the grant; returns its fence.
    #[track_caller]
    fn granted(&self) -> impl Future<Output = u64> + '_ {
        let caller = std::panic::Location::caller();
        async move {
            loop {
                let hints = self.notified().await;
                if let Some(fence) = hints.granted {
                    return fence;
                }
                assert!(hints.role_changed || hints.missed, "{caller}: {hints:?}");
            }
        }
    }

    /// Confirms the latest grant by a take, if the grant is only a claim.
    async fn claim(&self, world: &World, ttl: Option<Duration>) {
        if world.gives_claims() {
            let taken = self.take_for(ttl).await;
            assert!(matches!(taken, Taken::Granted { .. }), "{taken:?}");
        }
    }

    /// Whether the asker has received no grant so far, nor any message that it does not need.
    async fn is_passed_over(&self, world: &World) -> bool {
        self.hints_so_far().await.is_none_or(|hints| world.gives_claims() && hints.granted.is_none())
    }

    async fn has_no_hints(&self) -> bool {
        self.hints_so_far().await.is_none()
    }

    /// The messages that this asker has received so far. A node receives messages in order, so once a message to another asker of the same
    /// node has arrived, all earlier ones have.
    async fn hints_so_far(&self) -> Option<LockHints> {
        let probe = mutex(&probe_beside(&self.name.tag, |text| mutex(text).tag.to_string()));
        let (own, other) = (Self::on(&self.node, &probe), Self::on(&self.node, &probe));
        own.must_take().await;
        other.must_wait().await;
        own.free().await;
        other.granted().await;
        other.free().await;
        timeout(Duration::ZERO, self.wait.notified()).await.ok()
    }

    fn ask_permit(&self, capacity: u32) -> TakePermit<'_> {
        let semaphore = Create { capacity, idle_ttl: LEASE };
        TakePermit { token: &self.token, lease: LEASE, semaphore, queue: true }
    }

    async fn permit(&self, ask: TakePermit<'_>) -> PermitTaken {
        self.node.take_permit(&self.name, ask, WITHIN).await.expect("take")
    }

    #[track_caller]
    fn must_take_permit(&self, capacity: u32) -> impl Future<Output = PermitTaken> + '_ {
        let caller = std::panic::Location::caller();
        async move {
            let taken = self.permit(self.ask_permit(capacity)).await;
            assert!(taken.granted, "{caller}: {taken:?}");
            taken
        }
    }

    #[track_caller]
    fn must_wait_for_permit(&self, capacity: u32) -> impl Future<Output = PermitTaken> + '_ {
        let caller = std::panic::Location::caller();
        async move {
            let taken = self.permit(self.ask_permit(capacity)).await;
            assert!(!taken.granted, "{caller}: {taken:?}");
            taken
        }
    }

    async fn free_permit(&self) -> PermitFreed {
        self.node.free_permit(&self.name, &self.token, LEASE, WITHIN).await.expect("free")
    }

    async fn refresh(&self, lease: Duration) -> bool {
        self.node.refresh_permit(&self.name, &self.token, lease, WITHIN).await.expect("refresh")
    }

    async fn state(&self) -> Option<SemaphoreState> {
        self.node.look_at_semaphore(&self.name, WITHIN).await.expect("look")
    }

    async fn change(&self, change: SemaphoreChange) -> Option<SemaphoreState> {
        self.node.change_semaphore(&self.name, change, WITHIN).await.expect("change")
    }
}

/// A mutex whose holder has died, and the waiters in its queue, in this order. The holder's time has passed, and no command has been sent
/// since. All nodes are connected before the time starts, because it is short. If it was too short on a busy machine, the function tries
/// again with another mutex and twice the time.
async fn left_by_the_dead<const WAITERS: usize>(world: &World) -> (Asker, [Asker; WAITERS]) {
    let mut nodes = Vec::new();
    for _ in 0..=WAITERS {
        nodes.push(world.node().await);
    }
    for doubled in 0..6 {
        let name = mutex(&format!("k {doubled}"));
        let dead = Asker::on(&nodes[WAITERS], &name);
        let waiters: [Asker; WAITERS] = std::array::from_fn(|number| Asker::on(&nodes[number], &name));
        assert!(matches!(dead.take_for(Some(ms(150 << doubled))).await, Taken::Granted { .. }));
        for waiter in &waiters {
            waiter.take(waiter.ask()).await;
        }
        if dead.owns().await {
            until(async || dead.look().await.is_none()).await;
            return (dead, waiters);
        }
    }
    panic!("this machine needs seconds for {WAITERS} commands");
}

/// Askers of one semaphore, in the order of their takes. The leases of the first `stale` of them have ended, and no step has recovered
/// their permits. If the leases were too short on a busy machine, the function tries again with another semaphore and twice the time.
async fn after_the_stale<const ASKERS: usize>(
    nodes: [&Store; ASKERS],
    name: &str,
    stale: usize,
    capacity: u32,
) -> [Asker; ASKERS] {
    for doubled in 0..6 {
        let (name, lease) = (semaphore(&format!("{name} {doubled}")), ms(300 << doubled));
        let askers = nodes.map(|node| Asker::on(node, &name));
        let mut answers = Vec::new();
        for (number, asker) in askers.iter().enumerate() {
            let lease = if number < stale { lease } else { LEASE };
            answers.push(asker.permit(TakePermit { lease, ..asker.ask_permit(capacity) }).await);
        }
        let hold = async || {
            let holders = askers[0].state().await.expect("there").holders;
            askers[..stale]
                .iter()
                .filter(|asker| holders.iter().any(|(token, _)| *token == asker.token))
                .count()
        };
        if hold().await == stale {
            for (number, taken) in answers.into_iter().enumerate() {
                assert_eq!(taken.granted, number < capacity as usize, "{number}: {taken:?}");
                assert!(taken.granted || taken.next_expiry.is_some_and(|left| left <= lease), "{taken:?}");
            }
            until(async || hold().await == 0).await;
            return askers;
        }
    }
    panic!("this machine needs seconds for {ASKERS} commands");
}

/// Waits until `done` returns true, for at most [`SOON`].
#[track_caller]
fn until(done: impl AsyncFn() -> bool) -> impl Future<Output = ()> {
    until_within(SOON, done)
}

#[track_caller]
fn until_within(within: Duration, done: impl AsyncFn() -> bool) -> impl Future<Output = ()> {
    let caller = std::panic::Location::caller();
    async move {
        let started = Instant::now();
        while !done().await {
            assert!(started.elapsed() < within, "{caller}: it did not come to it");
            tokio::time::sleep(ms(2)).await;
        }
    }
}
