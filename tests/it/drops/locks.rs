//! The futures of mutexes and semaphores.

use stampede_guard::MemoryStore;
use stampede_guard::lock::{Locks, Mutex, Semaphore, Wait};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep};

use super::*;

const HELD: Duration = Duration::from_millis(100);
const TTL: Duration = Duration::from_secs(2);
const PERMITS: u32 = 2;

listed! {
    /// What the caller meets.
    enum Meets, ALL: Nothing HolderHere HolderElsewhere Queue DeadHolder Break ImpatientWaiters
}

struct World {
    nodes: [Locks; 2],
    beside: Vec<JoinHandle<()>>,
}

fn mutex(locks: &Locks) -> Mutex {
    locks.mutex("m").ttl(TTL).acquire_timeout(Duration::from_secs(30)).build().expect("valid")
}

fn semaphore(locks: &Locks) -> Semaphore {
    locks.semaphore("s", PERMITS).lease(TTL).auto_renew(false).build().expect("valid")
}

/// Holds the mutex and all permits for a while.
fn hold(locks: &Locks, dies: bool) -> Vec<JoinHandle<()>> {
    let (mutex, semaphore) = (mutex(locks), semaphore(locks));
    let held = tokio::spawn(async move {
        let guard = mutex.lock().await.expect("free");
        sleep(HELD).await;
        if dies { std::mem::forget(guard) } else { drop(guard) }
    });
    let permits = tokio::spawn(async move {
        let mut permits = Vec::new();
        for _ in 0..PERMITS {
            permits.extend(semaphore.acquire(Wait::Forever).await.ok().flatten());
        }
        sleep(HELD).await;
        if dies { std::mem::forget(permits) } else { drop(permits) }
    });
    vec![held, permits]
}

/// Waits for the mutex and for a permit, for so long at most, and lets go at once.
fn wait(locks: &Locks, patience: Duration) -> Vec<JoinHandle<()>> {
    let (mutex, semaphore) = (mutex(locks), semaphore(locks));
    vec![
        tokio::spawn(async move { drop(timeout(patience, mutex.lock()).await) }),
        tokio::spawn(async move { drop(semaphore.acquire(Wait::For(patience)).await) }),
    ]
}

impl World {
    async fn new(meets: Meets) -> Self {
        let store = MemoryStore::new();
        let nodes = [Locks::new(store.clone()), Locks::new(store)];
        let mut beside = Vec::new();
        let (here, elsewhere) = (&nodes[0], &nodes[1]);
        match meets {
            Meets::Nothing => {}
            Meets::HolderHere => beside.extend(hold(here, false)),
            Meets::HolderElsewhere => beside.extend(hold(elsewhere, false)),
            Meets::DeadHolder => beside.extend(hold(elsewhere, true)),
            Meets::Queue | Meets::ImpatientWaiters => {
                beside.extend(hold(elsewhere, false));
                sleep(ms(1)).await;
                let patience = if meets == Meets::Queue { Duration::from_secs(30) } else { HELD };
                (0..4).for_each(|waiter| beside.extend(wait(&nodes[waiter % 2], patience)));
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
        Self { nodes, beside }
    }

    /// Nobody has anything, and nobody waits: a newcomer has the mutex and every permit at once.
    async fn ends_as_before(self, what: &str, capacity: u32) {
        for begun in self.beside {
            begun.await.expect("joined");
        }
        // What nobody is left to give back has ended by itself, and no later.
        sleep(TTL + ms(50)).await;
        for locks in &self.nodes {
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
    /// What is dropped.
    enum Call, CALLS:
        TryLock Lock Synchronize Unlock Bump Extend IsOwned IsLocked Remaining ForceUnlock
        AcquireNow AcquireFor AcquireForever WithPermit Release RefreshPermit IsHeld Signal
        Holders Available ReleaseStale EnsureCreated Delete Connect
}

/// Each that needs the mutex or a permit acquires it first, and may be dropped there, too.
async fn call(world: &World, call: Call) {
    let locks = &world.nodes[0];
    let (mutex, semaphore) = (mutex(locks), semaphore(locks));
    let held = async || mutex.lock().await.expect("it waits for long enough");
    // Where the semaphore is deleted there is none.
    let permit = async || semaphore.acquire(Wait::Forever).await.ok().flatten();
    // What each comes to depends on what it meets, and is not what is tested.
    match call {
        Call::TryLock => drop(mutex.try_lock().await),
        Call::Lock => drop(mutex.lock().await),
        Call::Synchronize => drop(mutex.synchronize(|_| sleep(ms(20))).await),
        Call::Unlock => drop(held().await.unlock().await),
        Call::Bump => drop(held().await.bump().await),
        Call::Extend => drop(held().await.extend(TTL).await),
        Call::IsOwned => drop(held().await.is_owned().await),
        Call::IsLocked => drop(mutex.is_locked().await),
        Call::Remaining => drop(mutex.remaining().await),
        Call::ForceUnlock => drop(mutex.force_unlock().await),
        Call::AcquireNow => drop(semaphore.acquire(Wait::Now).await),
        Call::AcquireFor => drop(semaphore.acquire(Wait::For(HELD / 2)).await),
        Call::AcquireForever => drop(semaphore.acquire(Wait::Forever).await),
        Call::WithPermit => drop(semaphore.with_permit(Wait::Forever, |_| sleep(ms(20))).await),
        Call::Release | Call::RefreshPermit | Call::IsHeld | Call::Signal => {
            let Some(mut permit) = permit().await else { return };
            match call {
                Call::Release => drop(permit.release().await),
                Call::RefreshPermit => drop(permit.refresh().await),
                Call::IsHeld => drop(permit.is_held().await),
                _ => drop(semaphore.signal(permit.token()).await),
            }
        }
        Call::Holders => drop(semaphore.holders().await),
        Call::Available => drop((semaphore.available_permits().await, semaphore.capacity().await)),
        Call::ReleaseStale => drop(semaphore.release_stale().await),
        Call::EnsureCreated => drop(semaphore.ensure_created().await),
        Call::Delete => drop(semaphore.delete().await),
        Call::Connect => drop(locks.connect().await),
    }
}

#[tokio::test(start_paused = true)]
async fn what_is_dropped_anywhere_keeps_no_lock_and_no_place_in_a_queue() {
    let mut drops = 0;
    for &what in CALLS {
        for &meets in ALL {
            let name = format!("{what:?} that meets {meets:?}");
            drops += at_every_poll(&name, async |drop| {
                let world = World::new(meets).await;
                let done = dropped(drop, call(&world, what)).await.is_some();
                world.ends_as_before(&format!("{name}, {drop:?}"), PERMITS).await;
                done
            })
            .await;
        }
    }
    println!("{drops} drops of {} calls in {} situations", CALLS.len(), ALL.len());
    assert!(drops > CALLS.len(), "{drops} drops are no matrix");
}

/// A change of the capacity is made, or not.
#[tokio::test(start_paused = true)]
async fn a_change_of_capacity_that_is_dropped_anywhere_is_made_or_not() {
    for &meets in ALL {
        let name = format!("add_permits that meets {meets:?}");
        at_every_poll(&name, async |drop| {
            let world = World::new(meets).await;
            let semaphore = semaphore(&world.nodes[0]);
            let done = dropped(drop, semaphore.add_permits(1)).await.is_some();
            sleep(HELD * 2).await;
            // Deleted meanwhile, it is made anew as it was.
            let capacity = semaphore.capacity().await.expect("asks");
            assert!([PERMITS, PERMITS + 1].contains(&capacity), "{name}: {capacity}");
            world.ends_as_before(&format!("{name}, {drop:?}"), capacity).await;
            done
        })
        .await;
    }
}
