//! Drops of the guard's own futures.

use std::sync::Arc;

use futures_util::future::{BoxFuture, join_all};
use stampede_guard::testing::ChaosStore;
use stampede_guard::{LoadContext, OnOverload, OnWaitTimeout, Policy, PolicyBuilder, StampedeGuard};
use tokio::task::JoinHandle;
use tokio::time::{Instant, advance, sleep};

use super::*;
use crate::support::gate::Counter;

const LOAD: Duration = Duration::from_millis(300);
/// The lease is so long that a test fails if the lease is never released.
const LEASE: Duration = Duration::from_secs(50);

listed! {
    /// What the dropped call meets: the state of its key, and events at the same time.
    enum Meets, ALL:
        Nothing Fresh Stale StaleIfError Expired AgedEnough LoadHere LoadElsewhere LoadAndWaiters
        LoadThatFails LoadThatPanics LoadThatPanicsHere LoaderThatLeaves ShutdownElsewhere
        Invalidation TagInvalidation OwnFailure OwnPanic OwnTimeout Tags Cap CapThatSheds
        ShortWait ShortWaitThatFails SoftTimeout FullHouse
}

#[derive(Clone, Copy)]
enum Load {
    Value,
    Failure,
    Panic,
}

/// Two nodes on one store, and the tasks that run beside the dropped call.
struct World {
    guards: [StampedeGuard; 2],
    loads: Counter,
    own: Load,
    beside: Vec<JoinHandle<()>>,
}

fn policy(meets: Meets) -> PolicyBuilder {
    let secs = Duration::from_secs;
    let policy = Policy::builder().ttl_jitter(0.0).lease(LEASE).fresh_for(secs(10)).load_timeout(secs(20));
    match meets {
        Meets::Stale => policy.stale_while_revalidate(secs(1_000)),
        Meets::StaleIfError => policy.stale_if_error(secs(1_000)).back_off(ms(1)),
        Meets::AgedEnough => policy.refresh_ahead(0.1),
        Meets::OwnTimeout => policy.load_timeout(LOAD / 2),
        Meets::Tags | Meets::TagInvalidation => policy.tags(["tag"]),
        Meets::Cap => policy.max_concurrent_loads(1),
        Meets::CapThatSheds => policy.max_concurrent_loads(1).permit_timeout(ms(0), OnOverload::Shed),
        Meets::ShortWait => policy.wait_timeout(LOAD / 2, OnWaitTimeout::Load),
        Meets::ShortWaitThatFails => policy.wait_timeout(LOAD / 2, OnWaitTimeout::Fail),
        Meets::SoftTimeout => policy.stale_if_error(secs(1_000)).soft_timeout(LOAD / 3),
        Meets::FullHouse => policy.max_waiters(1, OnOverload::Shed),
        _ => policy,
    }
}

/// The latency of a command. Without latency a command would not be an await point, at which a future could be dropped.
const TRIP: Duration = Duration::from_millis(1);

impl World {
    async fn new(meets: Meets) -> Self {
        let (store, policy) = (ChaosStore::new(1), policy(meets).build().expect("valid"));
        store.latency(TRIP, TRIP);
        let guard = || StampedeGuard::builder(store.clone()).policy(policy.clone()).build().expect("valid");
        let (guards, loads) = ([guard(), guard()], Counter::default());
        let own = match meets {
            Meets::OwnFailure | Meets::StaleIfError => Load::Failure,
            Meets::OwnPanic => Load::Panic,
            _ => Load::Value,
        };
        let mut world = Self { guards, loads, own, beside: Vec::new() };
        world.prepare(meets).await;
        // By then the tasks have reached their loads.
        sleep(TRIP * 5).await;
        world
    }

    async fn prepare(&mut self, meets: Meets) {
        let secs = Duration::from_secs;
        match meets {
            Meets::Fresh | Meets::Tags => self.stored(secs(0)).await,
            Meets::AgedEnough => self.stored(secs(5)).await,
            Meets::Stale | Meets::StaleIfError | Meets::Expired | Meets::SoftTimeout => {
                self.stored(secs(11)).await
            }
            Meets::LoadHere | Meets::FullHouse => self.begin(0, "key", Load::Value),
            Meets::LoadElsewhere | Meets::ShortWait | Meets::ShortWaitThatFails => {
                self.begin(1, "key", Load::Value)
            }
            Meets::LoadAndWaiters => {
                self.begin(1, "key", Load::Value);
                sleep(TRIP * 5).await;
                (0..6).for_each(|caller| self.begin(caller % 2, "key", Load::Value));
            }
            Meets::LoadThatFails => self.begin(1, "key", Load::Failure),
            Meets::LoadThatPanics => self.begin(1, "key", Load::Panic),
            Meets::LoadThatPanicsHere => self.begin(0, "key", Load::Panic),
            Meets::LoaderThatLeaves => {
                self.begin(0, "key", Load::Value);
                let leader = self.beside.pop().expect("it was begun");
                self.later(async move { leader.abort() });
            }
            Meets::ShutdownElsewhere => {
                self.begin(1, "key", Load::Value);
                let guard = self.guards[1].clone();
                self.later(async move {
                    guard.shutdown(ms(10)).await;
                });
            }
            Meets::Invalidation | Meets::TagInvalidation => {
                self.begin(1, "key", Load::Value);
                let guard = self.guards[1].clone();
                self.later(async move {
                    match meets {
                        Meets::Invalidation => guard.invalidate("key").await.expect("invalidated"),
                        _ => guard.invalidate_tag("tag").await.expect("invalidated"),
                    }
                });
            }
            Meets::Cap | Meets::CapThatSheds => self.begin(1, "other", Load::Value),
            Meets::Nothing | Meets::OwnFailure | Meets::OwnPanic | Meets::OwnTimeout => {}
        }
    }

    /// Stores a value that is this old.
    async fn stored(&self, age: Duration) {
        self.guards[1].insert("key", &9_u8).await.expect("stored");
        advance(age).await;
    }

    fn begin(&mut self, guard: usize, key: &'static str, load: Load) {
        let (guard, load) = (self.guards[guard].clone(), self.load(load));
        self.beside.push(tokio::spawn(async move { drop(guard.get_or_load(key, load).await) }));
    }

    /// Runs `what` in the middle of a load that begins at this moment.
    fn later(&mut self, what: impl Future<Output = ()> + Send + 'static) {
        self.beside.push(tokio::spawn(async move {
            sleep(LOAD / 2).await;
            what.await;
        }));
    }

    fn load(&self, load: Load) -> impl FnOnce() -> BoxFuture<'static, Result<u8, String>> + Send + use<> {
        let loads = self.loads.clone();
        move || {
            Box::pin(async move {
                let _running = loads.start();
                sleep(LOAD).await;
                match load {
                    Load::Value => Ok(1),
                    Load::Failure => Err("scripted".to_owned()),
                    Load::Panic => panic!("scripted"),
                }
            })
        }
    }

    /// Waits until all tasks have ended, and checks that nothing is left.
    async fn ends_as_before(self, what: &str, shut_down: bool) {
        for begun in self.beside {
            // The scenario may have aborted the task.
            let _ = begun.await;
        }
        // A background load may have begun at this moment.
        sleep(LOAD * 4).await;
        self.loads.idle().await;
        for guard in &self.guards {
            assert_eq!(guard.stats().tasks, 0, "{what}: {:?}", guard.stats());
        }
        // A new caller forces a load, under a cap that sheds. It shows whether the lease or the permit is still held by a dropped call, or
        // queued for by one.
        let newcomer = self.guards[usize::from(shut_down)]
            .with_policy(policy(Meets::CapThatSheds).load_timeout(LOAD * 2).build().expect("valid"));
        let started = Instant::now();
        for key in ["key", "other"] {
            let loads = self.loads.clone();
            let load = move || async move {
                let _running = loads.start();
                sleep(LOAD).await;
                Ok::<_, String>(2_u8)
            };
            assert_eq!(
                newcomer
                    .load(key)
                    .refresh(move |_| load())
                    .await
                    .unwrap_or_else(|error| panic!("{what}: {error}"))
                    .value,
                2
            );
        }
        // The time includes that of announcing the refreshed value to the processes that keep copies.
        assert!(started.elapsed() <= LOAD * 2 + TRIP * 30, "{what}: {:?}", started.elapsed());
        // If another process refreshes, this node keeps a flight without a task until the lease of that process ends.
        sleep(LEASE).await;
        for guard in &self.guards {
            assert_eq!(guard.stats().flights, 0, "{what}: {:?}", guard.stats());
        }
    }
}

/// The dropped call.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Call {
    GetOrLoad,
    GetOrLoadWith,
    Refresh,
    RefreshWith,
    Get,
    Contains,
    RemainingFreshness,
    Insert,
    InsertWithTags,
    Invalidate,
    Expire,
    InvalidateTag,
    InvalidateAll,
    Connect,
    Doctor,
    Shutdown,
    Memoize,
}

async fn call(world: &World, call: Call) {
    let (guard, load) = (&world.guards[0], world.load(world.own));
    let with = {
        let load = world.load(world.own);
        move |mut cx: LoadContext<u8>| async move {
            cx.tag(["another"]).await.map_err(|error| error.to_string())?;
            cx.negative();
            load().await
        }
    };
    // What the call returns depends on the situation, and is not tested here.
    match call {
        Call::GetOrLoad => drop(guard.get_or_load("key", load).await),
        Call::GetOrLoadWith => drop(guard.load("key").get(with).await),
        Call::Refresh => drop(guard.load("key").refresh(move |_| load()).await),
        Call::RefreshWith => drop(guard.load("key").refresh(with).await),
        Call::Get => drop(guard.get::<u8>("key").await),
        Call::Contains => drop(guard.contains("key").await),
        Call::RemainingFreshness => drop(guard.remaining_freshness("key").await),
        Call::Insert => drop(guard.insert("key", &3_u8).await),
        Call::InsertWithTags => drop(guard.insert_with_tags("key", &3_u8, ["tag", "more"]).await),
        Call::Invalidate => drop(guard.invalidate("key").await),
        Call::Expire => drop(guard.expire("key").await),
        Call::InvalidateTag => drop(guard.invalidate_tag("tag").await),
        Call::InvalidateAll => {
            let reached = Policy::builder().invalidate_all(true).build().expect("valid");
            drop(guard.with_policy(reached).invalidate_all().await);
        }
        Call::Connect => drop(guard.connect().await),
        Call::Doctor => drop(guard.doctor().await),
        Call::Shutdown => {
            guard.shutdown(LOAD / 2).await;
        }
        Call::Memoize => {
            use tower::ServiceExt as _;
            let load = Arc::new(std::sync::Mutex::new(Some(load)));
            let inner = tower::service_fn(move |_: ()| {
                let load = load.lock().expect("no panic under it").take().expect("called once");
                load()
            });
            let layer = guard.memoize(|_: &()| stampede_guard::CacheKey::from("key"));
            drop(tower::Layer::layer(&layer, inner).oneshot(()).await);
        }
    }
}

async fn in_every_situation(calls: &[Call], least: usize) {
    let mut drops = 0;
    for &what in calls {
        for &meets in ALL {
            let name = format!("{what:?} that meets {meets:?}");
            drops += at_every_poll(&name, async |drop| {
                let world = World::new(meets).await;
                let done = dropped(drop, call(&world, what)).await.is_some();
                world.ends_as_before(&format!("{name}, {drop:?}"), what == Call::Shutdown).await;
                done
            })
            .await;
        }
    }
    println!("{drops} drops of {} calls in {} situations", calls.len(), ALL.len());
    assert!(drops >= least, "{drops} drops are no matrix");
}

#[tokio::test(start_paused = true)]
async fn a_caller_that_is_dropped_anywhere_leaves_nothing() {
    in_every_situation(&[Call::GetOrLoad, Call::GetOrLoadWith, Call::Memoize], 200).await;
}

#[tokio::test(start_paused = true)]
async fn a_refresh_that_is_dropped_anywhere_leaves_nothing() {
    in_every_situation(&[Call::Refresh, Call::RefreshWith], 150).await;
}

#[tokio::test(start_paused = true)]
async fn a_look_that_is_dropped_anywhere_leaves_nothing() {
    in_every_situation(&[Call::Get, Call::Contains, Call::RemainingFreshness], 100).await;
}

#[tokio::test(start_paused = true)]
async fn a_change_that_is_dropped_anywhere_leaves_nothing() {
    let inserts = [Call::Insert, Call::InsertWithTags];
    let ends = [Call::Invalidate, Call::Expire, Call::InvalidateTag, Call::InvalidateAll];
    in_every_situation(&[&inserts[..], &ends].concat(), 300).await;
}

#[tokio::test(start_paused = true)]
async fn a_connect_doctor_or_shutdown_that_is_dropped_anywhere_leaves_nothing() {
    in_every_situation(&[Call::Connect, Call::Doctor, Call::Shutdown], 20).await;
}

/// There are several calls at once, and each is dropped at another poll.
#[tokio::test(start_paused = true)]
async fn concurrent_calls_that_are_dropped_anywhere_leave_nothing() {
    for &meets in ALL {
        for seed in 0..60 {
            let mut random = fastrand::Rng::with_seed(seed);
            let world = World::new(meets).await;
            let calls = (0..8).map(|_| {
                let what = [Call::GetOrLoad, Call::Refresh, Call::Get, Call::Invalidate][random.usize(..4)];
                let at = random.usize(1..6);
                let at = if random.bool() { Drop::AtPoll(at) } else { Drop::AtWake(at) };
                dropped(at, call(&world, what))
            });
            join_all(calls).await;
            world.ends_as_before(&format!("concurrent calls that meet {meets:?}, seed {seed}"), false).await;
        }
    }
}
