//! Drops of the futures of mutexes and semaphores.

#[cfg(feature = "testing")]
use std::sync::atomic::{AtomicU64, Ordering};

use stampede_guard::lock::{Locks, Mutex, Semaphore, Wait, Waiting};
#[cfg(feature = "testing")]
use stampede_guard::testing::{ChaosStore, Fault};
use stampede_guard::{Backend, MemoryStore};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep};

use super::*;

const HELD: Duration = Duration::from_millis(100);
const TTL: Duration = Duration::from_secs(2);
const PERMITS: u32 = 2;

listed! {
    /// The state of the locks that the dropped call meets.
    enum Meets, ALL:
        Nothing HolderHere HolderElsewhere Queue DeadHolder Break ImpatientWaiters WaitersThatLeave
        HolderThatBumps HolderThatExtends MutexHeld PermitsHeld LongQueue
}

/// Further situations. In each, one of these faults strikes half of the commands while the holder has the locks.
#[cfg(feature = "testing")]
const FAULTS: &[Fault] = &[
    Fault::ErrorBefore,
    Fault::ErrorAfter,
    Fault::Ghost,
    Fault::BlackHole,
    Fault::Slow,
    Fault::OutOfMemory,
    Fault::ReadOnly,
];

struct World {
    nodes: [Locks; 2],
    beside: Vec<JoinHandle<()>>,
    /// By how much a command that received no reply may be late.
    late: Duration,
}

/// A way of waiting that polls at short intervals, and does not queue.
const POLL: Waiting = Waiting::Poll { interval: Duration::from_millis(25), jitter: 0.0 };

fn mutex(locks: &Locks) -> Mutex {
    mutex_by(locks, Waiting::Notify)
}

fn mutex_by(locks: &Locks, waiting: Waiting) -> Mutex {
    let mutex = locks.mutex("m").ttl(TTL).acquire_timeout(Duration::from_secs(30));
    mutex.wait(waiting).build().expect("valid")
}

fn semaphore(locks: &Locks) -> Semaphore {
    semaphore_by(locks, Waiting::Notify)
}

fn semaphore_by(locks: &Locks, waiting: Waiting) -> Semaphore {
    let semaphore = locks.semaphore("s", PERMITS).lease(TTL).auto_renew(false);
    semaphore.waiting(waiting).build().expect("valid")
}

/// Holds the mutex and all permits for a while. With `dies`, they are never released.
fn hold(locks: &Locks, dies: bool) -> Vec<JoinHandle<()>> {
    vec![hold_mutex(locks, dies), hold_permits(locks, dies)]
}

fn hold_mutex(locks: &Locks, dies: bool) -> JoinHandle<()> {
    let mutex = mutex(locks);
    tokio::spawn(async move {
        let guard = mutex.lock().await.expect("free");
        sleep(HELD).await;
        if dies { std::mem::forget(guard) } else { drop(guard) }
    })
}

fn hold_permits(locks: &Locks, dies: bool) -> JoinHandle<()> {
    let semaphore = semaphore(locks);
    tokio::spawn(async move {
        let mut permits = Vec::new();
        for _ in 0..PERMITS {
            permits.extend(semaphore.acquire(Wait::Forever).await.ok().flatten());
        }
        sleep(HELD).await;
        if dies { std::mem::forget(permits) } else { drop(permits) }
    })
}

/// Waits for the mutex and for a permit, each for at most `patience`, and releases it at once.
fn wait(locks: &Locks, patience: Duration) -> Vec<JoinHandle<()>> {
    let (mutex, semaphore) = (mutex(locks), semaphore(locks));
    vec![
        tokio::spawn(async move { drop(timeout(patience, mutex.lock()).await) }),
        tokio::spawn(async move { drop(semaphore.acquire(Wait::For(patience)).await) }),
    ]
}

impl World {
    async fn new(meets: Meets) -> Self {
        Self::on(MemoryStore::new(), meets).await
    }

    /// A holder with a queue behind it. From then on the store has this fault.
    #[cfg(feature = "testing")]
    async fn struck(chaos: &ChaosStore, fault: Fault) -> Self {
        let mut world = Self::on(chaos.clone(), Meets::Queue).await;
        chaos.inject(fault, 0.5);
        let chaos = chaos.clone();
        world.beside.push(tokio::spawn(async move {
            sleep(HELD).await;
            chaos.calm();
        }));
        world.late = Duration::from_secs(4);
        world
    }

    async fn on(store: impl Into<Backend> + Clone, meets: Meets) -> Self {
        let nodes = [Locks::new(store.clone()), Locks::new(store)];
        let mut beside = Vec::new();
        let (here, elsewhere) = (&nodes[0], &nodes[1]);
        match meets {
            Meets::Nothing => {}
            Meets::HolderHere => beside.extend(hold(here, false)),
            Meets::HolderElsewhere => beside.extend(hold(elsewhere, false)),
            Meets::DeadHolder => beside.extend(hold(elsewhere, true)),
            Meets::MutexHeld => beside.push(hold_mutex(elsewhere, false)),
            Meets::PermitsHeld => beside.push(hold_permits(elsewhere, false)),
            Meets::Queue | Meets::LongQueue | Meets::ImpatientWaiters => {
                beside.extend(hold(elsewhere, false));
                sleep(ms(1)).await;
                let patience = if meets == Meets::ImpatientWaiters { HELD } else { Duration::from_secs(30) };
                (0..if meets == Meets::LongQueue { 12 } else { 4 })
                    .for_each(|waiter| beside.extend(wait(&nodes[waiter % 2], patience)));
            }
            Meets::WaitersThatLeave => {
                beside.extend(hold(elsewhere, false));
                sleep(ms(1)).await;
                // These waiters time out at the moment at which the locks are handed over.
                let waits: Vec<_> = (0..4).flat_map(|waiter| wait(&nodes[waiter % 2], HELD * 2)).collect();
                beside.push(tokio::spawn(async move {
                    sleep(HELD - ms(1)).await;
                    waits.iter().for_each(JoinHandle::abort);
                }));
            }
            Meets::HolderThatBumps | Meets::HolderThatExtends => {
                let mutex = mutex(elsewhere);
                beside.push(tokio::spawn(async move {
                    let mut guard = mutex.lock().await.expect("free");
                    sleep(HELD / 2).await;
                    if meets == Meets::HolderThatBumps {
                        guard.bump().await.expect("asks");
                    } else {
                        guard.extend(TTL / 2).await.expect("asks");
                    }
                    sleep(HELD / 2).await;
                }));
                sleep(ms(1)).await;
                beside.extend(wait(here, HELD * 2));
            }
            Meets::Break => {
                beside.extend(hold(elsewhere, false));
                let (mutex, semaphore) = (mutex(elsewhere), semaphore(elsewhere));
                beside.push(tokio::spawn(async move {
                    sleep(HELD / 2).await;
                    mutex.force_unlock().await.expect("asks");
                    semaphore.delete().await.expect("asks");
                }));
            }
        }
        sleep(ms(1)).await;
        Self { nodes, beside, late: Duration::ZERO }
    }

    /// Checks that no lock is held and no waiter is queued: a new caller gets the mutex and every permit at once.
    async fn ends_as_before(self, what: &str, capacity: u32, closed: bool) {
        for begun in self.beside {
            begun.await.expect("joined");
        }
        // Within its TTL, a lock whose holder has died expires.
        sleep(self.late + TTL + ms(50)).await;
        // If the dropped call was `close`, its node serves no calls any more.
        for locks in &self.nodes[usize::from(closed)..] {
            let started = Instant::now();
            let mut guard = mutex(locks).lock().await.unwrap_or_else(|error| panic!("{what}: {error}"));
            assert!(guard.unlock().await.expect("asks"), "{what}");
            let semaphore = semaphore(locks);
            assert_eq!(semaphore.waiting().await.expect("asks"), 0, "{what}");
            let mut permits = Vec::new();
            for _ in 0..capacity {
                permits.push(semaphore.acquire(Wait::Now).await.expect("asks"));
            }
            assert!(permits.iter().all(Option::is_some), "{what}: a permit is missing");
            assert!(
                semaphore.acquire(Wait::Now).await.expect("asks").is_none(),
                "{what}: there is one too many"
            );
            for permit in permits.iter_mut().flatten() {
                assert!(permit.release().await.expect("asks").was_held, "{what}");
            }
            assert!(started.elapsed() <= ms(20), "{what}: {:?}", started.elapsed());
        }
    }
}

listed! {
    /// The dropped call.
    enum Call, CALLS:
        TryLock Lock LockByPolling LockByKeyspace Synchronize Unlock Bump Extend IsOwned Ensure Lost Expired IsLocked Remaining ForceUnlock
        CheckKeyspace AcquireNow AcquireFor AcquireForever AcquireByPolling WithPermit Release
        RefreshPermit IsHeld Signal PermitLost PermitExpired Holders Holds Waiting Exists Available ReleaseStale EnsureCreated Delete Connect Close
}

/// A call that needs the mutex or a permit acquires it first, and may be dropped during that, too.
async fn call(world: &World, call: Call) {
    let locks = &world.nodes[0];
    let (mutex, semaphore) = (mutex(locks), semaphore(locks));
    let a_while = async |end: Pin<Box<dyn Future<Output = ()> + Send>>| drop(timeout(HELD / 4, end).await);
    // The permit is `None` if the semaphore was deleted.
    let permit = async || semaphore.acquire(Wait::Forever).await.ok().flatten();
    // What the call returns depends on the situation, and is not tested here.
    match call {
        Call::TryLock => drop(mutex.try_lock().await),
        Call::Lock => drop(mutex.lock().await),
        Call::LockByPolling => drop(mutex_by(locks, POLL).lock().await),
        Call::LockByKeyspace => drop(mutex_by(locks, Waiting::Keyspace).lock().await),
        Call::Synchronize => drop(mutex.synchronize(|_| sleep(ms(20))).await),
        Call::Unlock
        | Call::Bump
        | Call::Extend
        | Call::IsOwned
        | Call::Ensure
        | Call::Lost
        | Call::Expired => {
            let Ok(mut guard) = mutex.lock().await else { return };
            match call {
                Call::Unlock => drop(guard.unlock().await),
                Call::Bump => drop(guard.bump().await),
                Call::Extend => drop(guard.extend(TTL).await),
                Call::IsOwned => drop(guard.is_owned().await),
                Call::Ensure => drop(guard.ensure().await),
                Call::Lost => a_while(Box::pin(guard.lost())).await,
                _ => a_while(Box::pin(guard.expired())).await,
            }
        }
        Call::IsLocked => drop(mutex.is_locked().await),
        Call::Remaining => drop(mutex.remaining().await),
        Call::ForceUnlock => drop(mutex.force_unlock().await),
        Call::CheckKeyspace => drop(mutex.check_keyspace().await),
        Call::AcquireNow => drop(semaphore.acquire(Wait::Now).await),
        Call::AcquireFor => drop(semaphore.acquire(Wait::For(HELD / 2)).await),
        Call::AcquireForever => drop(semaphore.acquire(Wait::Forever).await),
        Call::AcquireByPolling => drop(semaphore_by(locks, POLL).acquire(Wait::Forever).await),
        Call::WithPermit => drop(semaphore.with_permit(Wait::Forever, |_| sleep(ms(20))).await),
        Call::Release
        | Call::RefreshPermit
        | Call::IsHeld
        | Call::Signal
        | Call::PermitLost
        | Call::PermitExpired => {
            let Some(mut permit) = permit().await else { return };
            match call {
                Call::Release => drop(permit.release().await),
                Call::RefreshPermit => drop(permit.refresh().await),
                Call::IsHeld => drop(permit.is_held().await),
                Call::PermitLost => a_while(Box::pin(permit.lost())).await,
                Call::PermitExpired => a_while(Box::pin(permit.expired())).await,
                _ => drop(semaphore.signal(permit.token()).await),
            }
        }
        Call::Holders => drop(semaphore.holders().await),
        Call::Holds => drop(semaphore.holds("nobody").await),
        Call::Waiting => drop(semaphore.waiting().await),
        Call::Exists => drop(semaphore.exists().await),
        Call::Available => drop((semaphore.available_permits().await, semaphore.capacity().await)),
        Call::ReleaseStale => drop(semaphore.release_stale().await),
        Call::EnsureCreated => drop(semaphore.ensure_created().await),
        Call::Delete => drop(semaphore.delete().await),
        Call::Connect => drop(locks.connect().await),
        Call::Close => locks.close().await,
    }
}

#[tokio::test(start_paused = true)]
async fn a_lock_call_that_is_dropped_anywhere_keeps_no_lock_and_no_position_in_a_queue() {
    let mut drops = 0;
    for &what in CALLS {
        for &meets in ALL {
            let name = format!("{what:?} that meets {meets:?}");
            drops += at_every_poll(&name, async |drop| {
                let world = World::new(meets).await;
                let done = dropped(drop, call(&world, what)).await.is_some();
                world.ends_as_before(&format!("{name}, {drop:?}"), PERMITS, what == Call::Close).await;
                done
            })
            .await;
        }
    }
    println!("{drops} drops of {} calls in {} situations", CALLS.len(), ALL.len());
    assert!(drops > CALLS.len(), "{drops} drops are no matrix");
}

/// With those of [`ALL`], these are twenty situations.
#[cfg(feature = "testing")]
#[tokio::test(start_paused = true)]
async fn a_lock_call_that_is_dropped_anywhere_under_store_faults_keeps_no_lock_and_no_position_in_a_queue() {
    for &fault in FAULTS {
        let strikes = AtomicU64::new(0);
        for &what in CALLS {
            let name = format!("{what:?} under {fault:?}");
            at_every_poll(&name, async |drop| {
                let chaos = ChaosStore::new(1);
                let world = World::struck(&chaos, fault).await;
                let done = dropped(drop, call(&world, what)).await.is_some();
                world.ends_as_before(&format!("{name}, {drop:?}"), PERMITS, what == Call::Close).await;
                strikes.fetch_add(chaos.struck(fault), Ordering::Relaxed);
                done
            })
            .await;
        }
        assert!(strikes.into_inner() > CALLS.len() as u64, "{fault} strikes seldom");
    }
}

/// Either the whole change of the capacity happens, or none of it.
#[tokio::test(start_paused = true)]
async fn a_change_of_capacity_that_is_dropped_anywhere_is_made_or_not() {
    for &meets in ALL {
        let name = format!("add_permits that meets {meets:?}");
        at_every_poll(&name, async |drop| {
            let world = World::new(meets).await;
            let semaphore = semaphore(&world.nodes[0]);
            let done = dropped(drop, semaphore.add_permits(1)).await.is_some();
            sleep(HELD * 2).await;
            // If the semaphore was deleted meanwhile, it is created again with its first capacity.
            let capacity = semaphore.capacity().await.expect("asks");
            assert!([PERMITS, PERMITS + 1].contains(&capacity), "{name}: {capacity}");
            world.ends_as_before(&format!("{name}, {drop:?}"), capacity, false).await;
            done
        })
        .await;
    }
}
