//! Drops of the same futures on a real server, where every command is an await point: a command that was sent may still run after the drop,
//! and no caller receives its reply.

use futures_util::future::BoxFuture;
use stampede_guard::lock::{Locks, Mutex, Semaphore, Wait, Waiting};
use stampede_guard::{LoadContext, Policy, StampedeGuard};
use tokio::time::{Instant, sleep};

use super::*;
use crate::support::gate::Counter;
use crate::support::probe::{assert_nothing_left, eventually};
use crate::support::redis_server::RedisServer;

const SOON: Duration = Duration::from_secs(10);
/// The lease is so long that a test fails if the lease is never released.
const LEASE: Duration = Duration::from_secs(60);
const TTL: Duration = Duration::from_secs(60);

async fn guards(server: &RedisServer) -> [StampedeGuard; 2] {
    let bounds = Policy::builder().coordination_budget(ms(2_000)).command_timeout(ms(1_000)).lease(LEASE);
    let policy = bounds.invalidate_all(true).build().expect("valid");
    let guard = || {
        let client = redis::Client::open(server.minimal_user()).expect("an address");
        StampedeGuard::builder(client).policy(policy.clone()).build().expect("valid")
    };
    let guards = [guard(), guard()];
    for guard in &guards {
        crate::redis::connects(guard).await;
    }
    guards
}

fn load(loads: &Counter) -> impl FnOnce() -> BoxFuture<'static, Result<u8, String>> + Send + use<> {
    let loads = loads.clone();
    move || {
        Box::pin(async move {
            let _running = loads.start();
            sleep(ms(5)).await;
            Ok(1)
        })
    }
}

/// The state of the key that the dropped call meets.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Meets {
    Nothing,
    Value,
    LoadElsewhere,
}

const CALLS: [&str; 15] = [
    "get_or_load",
    "load, get",
    "refresh",
    "get",
    "contains",
    "remaining_freshness",
    "insert",
    "insert_with_tags",
    "invalidate",
    "expire",
    "invalidate_tag",
    "invalidate_all",
    "connect",
    "doctor",
    "memoize",
];

async fn call(guard: &StampedeGuard, key: &str, loads: &Counter, what: &str) {
    let load = load(loads);
    match what {
        "get_or_load" => drop(guard.get_or_load(key, load).await),
        "load, get" => {
            let with = move |mut cx: LoadContext<u8>| async move {
                cx.tag(["tag"]).await.map_err(|error| error.to_string())?;
                load().await
            };
            drop(guard.load(key).get(with).await);
        }
        "refresh" => drop(guard.load(key).refresh(move |_| load()).await),
        "get" => drop(guard.get::<u8>(key).await),
        "contains" => drop(guard.contains(key).await),
        "remaining_freshness" => drop(guard.remaining_freshness(key).await),
        "insert" => drop(guard.insert(key, &3_u8).await),
        "insert_with_tags" => drop(guard.insert_with_tags(key, &3_u8, ["tag"]).await),
        "invalidate" => drop(guard.invalidate(key).await),
        "expire" => drop(guard.expire(key).await),
        "invalidate_tag" => drop(guard.invalidate_tag("tag").await),
        "invalidate_all" => drop(guard.invalidate_all().await),
        "connect" => drop(guard.connect().await),
        "doctor" => drop(guard.doctor().await),
        _ => {
            use tower::ServiceExt as _;
            let inner = tower::service_fn(|_: ()| async { Ok::<u8, String>(1) });
            let name = key.to_owned();
            let layer = guard.memoize(move |_: &()| stampede_guard::CacheKey::from(&*name));
            drop(tower::Layer::layer(&layer, inner).oneshot(()).await);
        }
    }
}

#[tokio::test]
async fn a_call_that_is_dropped_anywhere_leaves_nothing() {
    let server = RedisServer::start();
    let guards = guards(&server).await;
    let mut drops = 0;
    for what in CALLS {
        for meets in [Meets::Nothing, Meets::Value, Meets::LoadElsewhere] {
            drops += at_every_poll(what, async |drop| {
                let (key, loads) = (format!("k{:x}", fastrand::u64(..)), Counter::default());
                let name = format!("{what} that meets {meets:?}, {drop:?}");
                let mut beside = None;
                match meets {
                    Meets::Nothing => {}
                    Meets::Value => guards[1].insert(&*key, &9_u8).await.expect("stored"),
                    Meets::LoadElsewhere => {
                        let (guard, key, load) = (guards[1].clone(), key.clone(), load(&loads));
                        beside =
                            Some(tokio::spawn(async move { drop_it(guard.get_or_load(key, load).await) }));
                        loads.reach(1).await;
                    }
                }
                let done = dropped(drop, call(&guards[0], &key, &loads, what)).await.is_some();
                if let Some(beside) = beside {
                    beside.await.expect("joined");
                }
                // A new caller on the other node forces a load. It would have to wait for a lease that was not released.
                let fresh = guards[1].load(&*key).refresh(|_| async { Ok::<_, String>(2_u8) });
                let fresh = timeout(SOON, fresh).await.unwrap_or_else(|_| panic!("{name}: a lease was left"));
                assert_eq!(fresh.expect("a value").value, 2, "{name}");
                loads.idle().await;
                done
            })
            .await;
        }
    }
    println!("{drops} drops of {} calls in 3 situations", CALLS.len());
    assert!(drops > CALLS.len() * 3, "{drops} drops are no matrix");
    for guard in &guards {
        eventually("flights end", SOON, async || (guard.stats().flights, guard.stats().tasks) == (0, 0))
            .await;
    }
    // A queue that nothing removes would outlast its waiters. (Tag ids last for a day and have a TTL.)
    assert_nothing_left(&server, SOON).await;
}

fn drop_it<T>(_: T) {}

const LOCK_CALLS: [&str; 23] = [
    "try_lock",
    "lock",
    "lock by polling",
    "lock by keyspace",
    "check_keyspace",
    "synchronize",
    "unlock",
    "bump",
    "extend",
    "is_owned",
    "is_locked",
    "remaining",
    "force_unlock",
    "acquire",
    "acquire_now",
    "with_permit",
    "release",
    "refresh",
    "holders",
    "available",
    "release_stale",
    "ensure_created",
    "add_and_delete",
];

async fn lock_call(mutex: &Mutex, semaphore: &Semaphore, what: &str) {
    let held = async || mutex.lock().await.expect("free, or soon");
    let permit = async || semaphore.acquire(Wait::Forever).await.expect("asks").expect("it waits for ever");
    match what {
        "try_lock" => drop(mutex.try_lock().await),
        "lock" | "lock by polling" | "lock by keyspace" => drop(held().await),
        "check_keyspace" => drop(mutex.check_keyspace().await),
        "synchronize" => drop(mutex.synchronize(|_| sleep(ms(2))).await),
        "unlock" => drop(held().await.unlock().await),
        "bump" => drop(held().await.bump().await),
        "extend" => drop(held().await.extend(TTL).await),
        "is_owned" => drop(held().await.is_owned().await),
        "is_locked" => drop(mutex.is_locked().await),
        "remaining" => drop(mutex.remaining().await),
        "force_unlock" => drop(mutex.force_unlock().await),
        "acquire" => drop(permit().await),
        "acquire_now" => drop(semaphore.acquire(Wait::Now).await),
        "with_permit" => drop(semaphore.with_permit(Wait::Forever, |_| sleep(ms(2))).await),
        "release" => drop(permit().await.release().await),
        "refresh" => drop(permit().await.refresh().await),
        "holders" => drop(semaphore.holders().await),
        "available" => drop((semaphore.available_permits().await, semaphore.capacity().await)),
        "release_stale" => drop(semaphore.release_stale().await),
        "ensure_created" => drop(semaphore.ensure_created().await),
        _ => {
            let permits = semaphore.add_permits(1).await;
            drop((permits, semaphore.delete().await));
        }
    }
}

#[tokio::test]
async fn a_lock_that_is_dropped_anywhere_is_free_at_once() {
    let server = RedisServer::start();
    let nodes = guards(&server).await.map(|guard| guard.locks());
    let mut drops = 0;
    for what in LOCK_CALLS {
        for contended in [false, true] {
            drops += at_every_poll(what, async |drop| {
                let name = format!("l{:x}", fastrand::u64(..));
                let waiting = match what {
                    "lock by polling" => Waiting::Poll { interval: ms(2), jitter: 0.0 },
                    "lock by keyspace" => Waiting::Keyspace,
                    _ => Waiting::Notify,
                };
                let mutex = |locks: &Locks| {
                    let mutex = locks.mutex(&*name).ttl(TTL).acquire_timeout(SOON);
                    mutex.wait(waiting).build().expect("valid")
                };
                let semaphore = |locks: &Locks| locks.semaphore(&*name, 1).lease(TTL).build().expect("valid");
                let [here, there] = nodes.each_ref().map(|locks| (mutex(locks), semaphore(locks)));
                let holder = async {
                    if contended {
                        let guard = there.0.lock().await.expect("free");
                        let permit = there.1.acquire(Wait::Forever).await.expect("asks");
                        sleep(ms(5)).await;
                        drop_it((guard, permit));
                    }
                };
                let call = async {
                    if contended {
                        // The call begins when the other node holds both locks.
                        let held = async {
                            while !there.0.is_locked().await.is_ok_and(|locked| locked) {
                                tokio::task::yield_now().await;
                            }
                        };
                        tokio::time::timeout(SOON, held).await.expect("the other one has it");
                    }
                    dropped(drop, lock_call(&here.0, &here.1, what)).await.is_some()
                };
                let (done, ()) = tokio::join!(call, holder);
                let what = format!("{what}, contended {contended}, {drop:?}");
                let started = Instant::now();
                let free = async {
                    drop_it(there.0.lock().await.expect("free"));
                    // A dropped `add_permits` may have added a permit.
                    let capacity = there.1.capacity().await.expect("asks").max(1);
                    let mut permits = Vec::new();
                    for _ in 0..capacity {
                        permits.push(there.1.acquire(Wait::Forever).await.expect("asks"));
                    }
                };
                timeout(SOON, free).await.unwrap_or_else(|_| panic!("{what}: it is not free"));
                assert!(started.elapsed() < SOON, "{what}");
                done
            })
            .await;
        }
    }
    println!("{drops} drops of {} calls in 2 situations", LOCK_CALLS.len());
    assert!(drops > LOCK_CALLS.len() * 2, "{drops} drops are no matrix");
}

/// A shutdown that is dropped has released the leases, or still releases them, so another process does not wait for their end.
#[tokio::test]
async fn a_shutdown_that_is_dropped_anywhere_leaves_no_lease() {
    let server = RedisServer::start();
    let drops = at_every_poll("shutdown", async |drop| {
        let (key, loads) = (format!("k{:x}", fastrand::u64(..)), Counter::default());
        let [leaves, stays] = guards(&server).await;
        let leading = tokio::spawn({
            let (guard, key, load) = (leaves.clone(), key.clone(), load(&loads));
            async move { guard.get_or_load(key, load).await.map_err(|error| error.to_string()) }
        });
        loads.reach(1).await;
        let done = dropped(drop, leaves.shutdown(SOON)).await.is_some();
        let fresh = stays.load(&*key).refresh(|_| async { Ok::<_, String>(2_u8) });
        let fresh = timeout(SOON, fresh).await.unwrap_or_else(|_| panic!("{drop:?}: a lease was left"));
        // The newcomer receives the value of its own load, or that of the other node's load.
        assert!([1, 2].contains(&fresh.expect("a value").value), "{drop:?}");
        assert_eq!(leading.await.expect("joined"), Ok(1), "{drop:?}");
        eventually("it ends", SOON, async || (leaves.stats().flights, leaves.stats().tasks) == (0, 0)).await;
        done
    })
    .await;
    assert!(drops > 0, "{drops}");
    assert_nothing_left(&server, SOON).await;
}

/// A release that runs in the background completes. A waiter receives an error, or continues to wait and gets the lock.
#[tokio::test]
async fn a_close_of_the_locks_that_is_dropped_anywhere_keeps_no_lock() {
    let server = RedisServer::start();
    let locks = || {
        let client = redis::Client::open(server.minimal_user()).expect("an address");
        Locks::builder(client).command_timeout(ms(1_000)).build().expect("valid")
    };
    let drops = at_every_poll("close", async |drop| {
        let name = format!("l{:x}", fastrand::u64(..));
        let mutex =
            |locks: &Locks| locks.mutex(&*name).ttl(TTL).acquire_timeout(SOON).build().expect("valid");
        let [here, there] = [locks(), locks()];
        let waiter = tokio::spawn({
            let (held, waits) = (mutex(&here).lock().await.expect("free"), mutex(&here));
            async move {
                let waiting = waits.lock();
                tokio::pin!(waiting);
                let early = futures_util::future::poll_immediate(waiting.as_mut()).await;
                assert!(early.is_none(), "it is held");
                drop_it(held);
                drop_it(waiting.await);
            }
        });
        tokio::task::yield_now().await;
        let done = dropped(drop, here.close()).await.is_some();
        waiter.await.expect("joined");
        let free = timeout(SOON, mutex(&there).lock()).await;
        drop_it(free.unwrap_or_else(|_| panic!("{drop:?}: it is not free")).expect("it is free"));
        done
    })
    .await;
    assert!(drops > 0, "{drops}");
}
