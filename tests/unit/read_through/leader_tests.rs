//! A flight's task is dropped at each of its polls, as when its runtime shuts down. Its waiters are notified at once, and its lease, if it
//! has one, expires. Callers that leave are tested in `drops` of the integration tests.

use tokio::task::JoinHandle;
use tokio::time::{advance, timeout};

use super::*;
use crate::error::ErrorKind;
use crate::guard::typed::loader;
use crate::guard_state::Joined;
use crate::key::FlightKey;
use crate::loader::OwnAnswer;
use crate::policy::Policy;
use crate::simulation::dropped::{Drop, dropped};
use crate::testing::{ChaosStore, Fault};
use crate::value::StoredEntry;
use crate::value::entry::Entry;
use crate::{CacheKey, LoadContext, LoadError, StampedeGuard};
use std::sync::Arc;

const LEASE: Duration = Duration::from_secs(2);
const LOAD: Duration = Duration::from_millis(300);
/// The latency of the store in each direction, so that the flight can be dropped while it awaits each command.
const LATENCY: Duration = Duration::from_millis(1);

/// What happens to the flight while it runs, or how its own load ends.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Meets {
    Nothing,
    LoadElsewhere,
    LoadElsewhereThatFails,
    LoadElsewhereThatPanics,
    DeadLeader,
    Stale,
    OwnFailure,
    OwnPanic,
    OwnUncacheable,
    OwnTimeout,
    LongLoad,
    Invalidation,
    LostLease,
    Cap,
    Tags,
    StoreAway,
    Shutdown,
}

impl Meets {
    const ALL: [Self; 17] = [
        Self::Nothing,
        Self::LoadElsewhere,
        Self::LoadElsewhereThatFails,
        Self::LoadElsewhereThatPanics,
        Self::DeadLeader,
        Self::Stale,
        Self::OwnFailure,
        Self::OwnPanic,
        Self::OwnUncacheable,
        Self::OwnTimeout,
        Self::LongLoad,
        Self::Invalidation,
        Self::LostLease,
        Self::Cap,
        Self::Tags,
        Self::StoreAway,
        Self::Shutdown,
    ];

    fn policy(self) -> Policy {
        let policy = Policy::builder().ttl_jitter(0.0).lease(LEASE).load_timeout(LEASE * 5);
        let policy = match self {
            Self::Stale => policy.stale_while_revalidate(Duration::from_secs(1_000)),
            Self::OwnTimeout => policy.load_timeout(LOAD / 2),
            Self::Cap => policy.max_concurrent_loads(1),
            Self::Tags => policy.tags(["tag"]),
            _ => policy,
        };
        policy.build().expect("valid")
    }

    /// How the load of a caller of this flight ends.
    fn own(self) -> Script {
        match self {
            Self::OwnFailure => Script::Failure,
            Self::OwnPanic => Script::Panic,
            Self::OwnUncacheable => Script::Uncacheable,
            Self::LongLoad => Script::Long,
            _ => Script::Value,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Script {
    Value,
    Failure,
    Panic,
    Uncacheable,
    Long,
}

async fn ask(guard: &StampedeGuard, key: &str, script: Script) -> Result<u8, LoadError<String>> {
    let load = async move |mut cx: LoadContext<u8>| {
        tokio::time::sleep(if script == Script::Long { LEASE * 2 } else { LOAD }).await;
        match script {
            Script::Failure => return Err("scripted".to_owned()),
            // This panics without the panic hook, which would print the panic.
            Script::Panic => std::panic::resume_unwind(Box::new("scripted")),
            Script::Uncacheable => cx.do_not_store(),
            Script::Value | Script::Long => {}
        }
        Ok(1)
    };
    guard.load(key).get(load).await.map(|loaded| loaded.value)
}

type Answer = Result<u8, LoadError<String>>;

fn begin(guard: &StampedeGuard, key: &'static str, script: Script) -> JoinHandle<Answer> {
    let guard = guard.clone();
    tokio::spawn(async move { ask(&guard, key, script).await })
}

/// Three nodes: two that need the key, and a third one for newcomers. `events` run at the same time as the flight.
struct World {
    chaos: ChaosStore,
    guards: [StampedeGuard; 3],
    events: Vec<JoinHandle<()>>,
}

impl World {
    async fn new(meets: Meets) -> Self {
        let chaos = ChaosStore::new(1);
        chaos.latency(Duration::ZERO, LATENCY);
        let guard = |replica| StampedeGuard::builder(replica).policy(meets.policy()).build().expect("valid");
        let guards = [(); 3].map(|()| guard(chaos.replica()));
        let mut world = Self { chaos, guards, events: Vec::new() };
        world.prepare(meets).await;
        // Waits until the prepared events have begun.
        sleep(LATENCY * 10).await;
        world
    }

    async fn prepare(&mut self, meets: Meets) {
        let other = &self.guards[1];
        match meets {
            Meets::LoadElsewhere => drop(begin(other, "k", Script::Value)),
            Meets::LoadElsewhereThatFails => drop(begin(other, "k", Script::Failure)),
            Meets::LoadElsewhereThatPanics => drop(begin(other, "k", Script::Panic)),
            Meets::Cap => drop(begin(other, "other", Script::Value)),
            Meets::DeadLeader => {
                let replica = self.chaos.replica();
                let guard = StampedeGuard::builder(replica.clone()).policy(meets.policy()).build();
                drop(begin(&guard.expect("valid"), "k", Script::Value));
                self.later(async move { replica.kill() });
            }
            Meets::Stale => {
                other.insert("k", &9_u8).await.expect("stored");
                advance(Duration::from_secs(61)).await;
            }
            Meets::Invalidation => {
                let guard = other.clone();
                self.later(async move { guard.invalidate("k").await.expect("invalidated") });
            }
            Meets::LostLease => {
                let chaos = self.chaos.clone();
                self.later(async move { chaos.once(Fault::EvictLease) });
            }
            Meets::StoreAway => self.chaos.inject(Fault::ErrorBefore, 1.0),
            Meets::Shutdown => {
                let guard = self.guards[0].clone();
                self.later(async move {
                    guard.shutdown(LOAD).await;
                });
            }
            Meets::Nothing
            | Meets::OwnFailure
            | Meets::OwnPanic
            | Meets::OwnUncacheable
            | Meets::OwnTimeout
            | Meets::LongLoad
            | Meets::Tags => {}
        }
    }

    /// The flight of the first node, before its task runs. The caller that began it has left or, if there is a stale value to serve, does
    /// not wait for it.
    fn flight(&self, meets: Meets) -> FlightTask {
        let (state, policy) = self.guards[0].parts();
        let key = self.guards[0].key(CacheKey::from("k")).expect("a key");
        let mode = if meets == Meets::Stale { LoadMode::BackgroundRefresh } else { LoadMode::Leased };
        let load = |_: LoadContext<u8>| async {
            sleep(LOAD).await;
            Ok::<_, String>(1_u8)
        };
        let loader = loader(load, Call { state, policy, key: &key }, OwnAnswer::at_the_end().0);
        let stored = self.chaos.store().entry(key.name()).filter(|_| meets == Meets::Stale);
        let rejected = stored.map(|raw| {
            Arc::new(StoredEntry::new(Ok(Entry::decode(raw, &key, usize::MAX).expect("an entry"))))
        });
        let flight = FlightKey { key, mode };
        let Joined::Leader(leader, slot) =
            state.flights.join(&flight, loader, FlightOutcome::Abandoned, usize::MAX)
        else {
            panic!("there is a flight already");
        };
        let unattended = if meets == Meets::Stale {
            Some(slot)
        } else {
            // The caller leaves no loader behind.
            drop(slot.take_loader());
            None
        };
        let (state, policy) = (Arc::clone(state), Arc::clone(policy));
        let budget = policy.budget();
        FlightTask {
            state,
            policy,
            flight,
            leader,
            rejected,
            budget,
            within: None,
            span: tracing::Span::none(),
            waits_for: None,
            batch: None,
            rest: Duration::ZERO,
            _unattended: unattended,
        }
    }

    /// Runs an event in the middle of a load that begins at this moment.
    fn later(&mut self, event: impl Future<Output = ()> + Send + 'static) {
        self.events.push(tokio::spawn(async move {
            sleep(LOAD / 2).await;
            event.await;
        }));
    }
}

/// Whether a caller of such a flight may receive this answer. That does not depend on whether the flight is dropped.
fn is_expected(meets: Meets, answer: &Answer) -> bool {
    match (meets, answer) {
        (
            Meets::OwnFailure | Meets::LoadElsewhereThatFails,
            Err(LoadError::Loader(_) | LoadError::Remote(_)),
        ) => true,
        (Meets::OwnPanic | Meets::LoadElsewhereThatPanics, Err(LoadError::Panicked(_))) => true,
        (Meets::OwnTimeout, Err(LoadError::Guard(error))) => error.kind() == ErrorKind::Timeout,
        (Meets::Stale, Ok(9)) => true,
        (Meets::OwnFailure | Meets::OwnPanic | Meets::OwnTimeout, _) => false,
        (_, answer) => matches!(answer, Ok(1)),
    }
}

/// Drops the flight at this point, checks what its callers receive, and returns whether the flight had ended before.
async fn ends_before(meets: Meets, drop: Drop) -> bool {
    let what = format!("{meets:?}, dropped {drop:?}");
    let mut world = World::new(meets).await;
    let flight = world.flight(meets);
    let mut callers: Vec<_> = (0..3).map(|_| begin(&world.guards[0], "k", meets.own())).collect();
    // The flight is spawned after these callers, so that they have joined it before it is polled.
    let flight = tokio::spawn(dropped(drop, flight.task()));
    callers.push(begin(&world.guards[1], "k", meets.own()));

    // Callers may wait until an abandoned lease ends, and for each other's loads, one after another, if these panic. A dead leader has
    // left a lease before that.
    let more = match meets {
        Meets::LongLoad => LEASE * 4,
        Meets::DeadLeader => LEASE + LOAD * 4,
        _ => LOAD * 4,
    };
    let bound = LEASE + LOAD + more + LATENCY * 100;
    let mut vanished = 0;
    for caller in callers {
        let answer = timeout(bound, caller).await.unwrap_or_else(|_| panic!("{what}: a caller hangs"));
        let answer = answer.expect("joined");
        // One caller may receive this error: the flight had taken its loader, which was dropped with the flight.
        let is_vanished =
            matches!(&answer, Err(LoadError::Guard(error)) if error.kind() == ErrorKind::Vanished);
        vanished += usize::from(is_vanished);
        assert!(is_vanished || is_expected(meets, &answer), "{what}: {answer:?}");
    }

    world.chaos.calm();
    let newcomer = &world.guards[2];
    let fresh =
        timeout(LEASE + LOAD * 2, newcomer.load("k").refresh(|_| async { Ok::<_, String>(2_u8) })).await;
    // The newcomer receives the value of its own load, or of a refresh that was in flight.
    let fresh = fresh.unwrap_or_else(|_| panic!("{what}: a newcomer hangs")).expect("a value");
    assert!([1, 2].contains(&fresh.value), "{what}: {fresh:?}");
    for task in world.events.drain(..) {
        task.await.expect("joined");
    }
    sleep(LEASE * 2).await;
    for guard in &world.guards {
        let stats = guard.stats();
        assert_eq!((stats.flights, stats.tasks), (0, 0), "{what}: {stats:?}");
    }
    let key = newcomer.key(CacheKey::from("k")).expect("a key");
    assert!(world.chaos.store().lease(key.name()).is_none(), "{what}: a lease is left");
    let is_dropped = flight.await.expect("joined").is_none();
    assert!(
        vanished <= usize::from(is_dropped),
        "{what}: {vanished} callers learned that their loader was dropped"
    );
    !is_dropped
}

#[tokio::test(start_paused = true)]
async fn a_flight_dropped_at_any_poll_leaves_no_caller_waiting() {
    let mut drops = 0;
    for meets in Meets::ALL {
        for (drop, first) in [(Drop::AtPoll as fn(usize) -> Drop, 1), (Drop::AtWake, 0)] {
            let mut at = first;
            while !ends_before(meets, drop(at)).await {
                at += 1;
                assert!(at < 200, "{meets:?}: it is polled again and again");
            }
            // The flight can at least be dropped while it awaits its command for the lease.
            assert!(at > first, "{meets:?}");
            drops += at - first;
        }
    }
    assert!(drops >= 100, "{drops} drops are no matrix");
}

/// A look-up was on its way when the shutdown began. It found a stale value, so a refresh begins afterwards. (Found by the simulation.)
#[tokio::test(start_paused = true)]
async fn a_refresh_that_begins_after_the_shutdown_takes_no_lease() {
    let world = World::new(Meets::Stale).await;
    let (state, _) = world.guards[0].parts();
    let key = world.guards[0].key(CacheKey::from("k")).expect("a key");
    state.close();
    world.flight(Meets::Stale).start();
    sleep(LATENCY * 10).await;
    assert!(world.chaos.store().lease(key.name()).is_none(), "the lease is left to its time to live");
    assert!(!state.flights.any());
}
