//! Checks figures that docs/faults.md promises for faults and that no other file checks: for a network that flaps, a herd at a failover,
//! and lost messages. The modules below check promised times over several rounds.

mod ailments;
mod leaders;
mod messages;
mod outages;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use stampede_guard::{ErrorKind, LoadError, health::LinkState};
use store_down::{BUDGET, Line, RECOVERY, load_together, still_coalesces, stores_again};

use super::*;
use crate::support::probe::assert_nothing_left;
use crate::support::proxy::{Mode, Proxy};
use crate::support::rounds::Timing;
use crate::support::warnings::Warnings;

/// What a request may cost while the server is known to be down.
const KNOWN: Duration = Duration::from_millis(1);

/// By this time the pauses between attempts to connect have their full length.
const GROWN: Duration = Duration::from_secs(1);

/// The limits of an outage's cost for successive requests, and of the time until the server is used again. The first request pays the
/// budget, the second may pay it, and all others pay nothing.
pub(super) fn of_an_outage(added: &[Duration], usable: Duration) -> [Timing; 5] {
    [
        Timing::once("the first", added[0], BUDGET),
        Timing::once("the second", added[1], BUDGET),
        Timing::once("all of them", added.iter().sum(), BUDGET * 2),
        Timing::median("later ones", &added[2..], KNOWN),
        Timing::once("usable", usable, RECOVERY),
    ]
}

/// N10. The back-off starts anew only after a connection has lasted for a while, so a flapping network causes no storm of connects.
#[tokio::test]
async fn a_network_that_flaps_costs_little_and_one_connect_at_a_time() {
    const FLAPS: usize = 16;
    let line = Line::new(Policy::default()).await;
    connects(&line.guard).await;
    requests(&line.guard, "before", 3).await;
    let before = line.proxy.connections();
    let flapping = async {
        for flap in 0..FLAPS {
            line.proxy.set([Mode::Reset, Mode::BlackHole, Mode::NoReplies, Mode::BlackHoleOld][flap / 2 % 4]);
            tokio::time::sleep(ms(300)).await;
            line.proxy.set(Mode::Pass);
            tokio::time::sleep(ms(300)).await;
        }
    };
    let mut added = Vec::new();
    let asking = async {
        loop {
            added.extend(requests(&line.guard, &format!("flap-{}", added.len()), 1).await);
            tokio::time::sleep(ms(5)).await;
        }
    };
    // Each wave of callers has its own key. Even without the server they share a load.
    let (loads, waves) = (Counter::default(), AtomicUsize::new(0));
    let crowding = async {
        loop {
            let key = format!("wave-{}", waves.fetch_add(1, Ordering::Relaxed));
            load_together(&line.guard, &key, ms(20), &loads).await;
        }
    };
    tokio::select! {
        () = flapping => {}
        () = asking => {}
        () = crowding => {}
    }
    let (loads, waves) = (loads.started(), waves.into_inner());
    // A wave that comes while the network changes may need two loads.
    assert!(waves > 50 && loads <= waves + 2 * FLAPS, "{loads} loads in {waves} waves");
    keep_to_the_budget(&added, "flapping");
    assert!(added.len() > 100 && median(added.clone()) <= NOTHING, "{} requests", added.len());
    // The guard has one connection for commands and one for messages.
    assert!(line.proxy.most_opening() <= 2, "{} connects at once", line.proxy.most_opening());
    let connects = line.proxy.connections() - before;
    assert!(connects <= 8 * FLAPS, "{connects} connects in {FLAPS} flaps");
    stores_again(&line.guard).await;
    still_coalesces(&line.guard).await;
    settled(std::slice::from_ref(&line.guard)).await;
    assert_nothing_left(&line.server, SOON).await;
}

#[derive(Serialize, Deserialize)]
struct HerdConfig {
    redis: String,
    keys: usize,
    callers: usize,
    most: Option<usize>,
}

/// What one process of the herd has counted.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Seen {
    loads: usize,
    most_of_one_key: usize,
    most_at_once: usize,
    answered: usize,
    shed: usize,
    slowest_ms: u64,
}

/// Several times as long as a caller needs before it loads without the dead server.
const ASKING: Duration = Duration::from_secs(4);

/// A process that requests all keys at once, when the test says `go`.
pub(super) fn herd(mut child: Child) -> BoxFuture<'static, ()> {
    Box::pin(async move {
        let config: HerdConfig = child.config();
        let builder = Policy::builder().max_fail_open_loads(config.most.unwrap_or(usize::MAX));
        let guard = unconnected(&config.redis, builder.build().expect("valid"));
        connects(&guard).await;
        child.ready();
        child.wait_go().await;
        let (callers, loads, gate) = (Counter::default(), Counter::default(), Gate::closed());
        let of_keys = Arc::new(Mutex::new(vec![0; config.keys]));
        let all = config.keys * config.callers;
        let calls = (0..all).map(|call| {
            let key = call % config.keys;
            let (guard, gate, callers) = (guard.clone(), gate.clone(), callers.clone());
            let (loads, of_keys) = (loads.clone(), Arc::clone(&of_keys));
            tokio::spawn(async move {
                let _caller = callers.start();
                let started = Instant::now();
                let load = move || async move {
                    let _running = loads.start();
                    of_keys.lock().unwrap()[key] += 1;
                    gate.pass().await;
                    Ok::<_, String>(key)
                };
                (guard.get_or_load(("key", key), load).await, started.elapsed())
            })
        });
        let calls: Vec<_> = calls.collect();
        // No load may end before all callers have come, because a later caller would rightly begin another load.
        callers.reach(all).await;
        loads.reach(config.keys.min(config.most.unwrap_or(usize::MAX))).await;
        // Waits until the callers that still try the dead server have joined a load.
        tokio::time::sleep(ASKING).await;
        gate.open();
        let mut seen = Seen::default();
        for call in join_all(calls).await {
            let (result, took) = call.expect("joined");
            seen.slowest_ms = seen.slowest_ms.max(took.as_millis() as u64);
            match result {
                Ok(_) => seen.answered += 1,
                Err(LoadError::Guard(error)) if error.kind() == ErrorKind::Overloaded => seen.shed += 1,
                Err(error) => panic!("{error:?}"),
            }
        }
        seen.loads = loads.started();
        seen.most_at_once = loads.most_at_once();
        seen.most_of_one_key = of_keys.lock().unwrap().iter().copied().max().unwrap_or(0);
        child.result(&seen);
    })
}

/// Kills the server, and lets eight processes request five hundred keys each.
async fn herd_without_a_server(most: Option<usize>) -> Vec<Seen> {
    let server = RedisServer::start();
    let config = HerdConfig { redis: server.minimal_user(), keys: 500, callers: 3, most };
    let fleet = Fleet::spawn(8, "herd", &config);
    fleet.wait_ready().await;
    server.kill();
    fleet.go();
    let seen: Vec<Seen> = fleet.results().await;
    for process in &seen {
        assert_eq!(process.answered + process.shed, 1_500, "{process:?}");
        assert_eq!(process.most_of_one_key, 1, "{process:?}");
        assert!(process.slowest_ms < ASKING.as_millis() as u64 + 7_000, "{process:?}");
    }
    seen
}

#[tokio::test]
async fn a_herd_at_a_failover_loads_each_key_once_per_process() {
    for process in herd_without_a_server(None).await {
        assert_eq!((process.loads, process.answered), (500, 1_500), "{process:?}");
    }
}

#[tokio::test]
async fn a_herd_at_a_failover_keeps_to_max_fail_open_loads_and_is_shed() {
    for process in herd_without_a_server(Some(40)).await {
        assert!(process.most_at_once <= 40, "{process:?}");
        assert!(process.loads >= 40 && process.answered >= process.loads, "{process:?}");
        assert!(process.shed > 0, "{process:?}");
    }
}

/// Starts a load without the store, which takes the only permit of `max_fail_open_loads`.
async fn take_the_only_permit(guard: &StampedeGuard) -> (Gate, tokio::task::JoinHandle<u32>) {
    let (gate, loads) = (Gate::closed(), Counter::default());
    let holds = held_call(guard, 1, &gate, &loads);
    loads.reach(1).await;
    (gate, holds)
}

fn one_permit() -> PolicyBuilder {
    patient(Duration::from_secs(60)).max_fail_open_loads(1)
}

/// The server reads but does not write: a stale value can be read, but no lease can be acquired.
#[tokio::test]
async fn beyond_max_fail_open_loads_a_stale_value_stands_in() {
    let server = RedisServer::start();
    let builder = one_permit().fresh_for(ms(1)).stale_if_error(Duration::from_secs(600));
    let guard = local(&server, builder.build().expect("valid")).await;
    answer(&guard, "old", 7).await;
    server.run::<()>(&["CONFIG", "SET", "maxmemory", "1"]);
    let (gate, holds) = take_the_only_permit(&guard).await;
    assert_eq!(answer(&guard, "old", 8).await, 7);
    let shed = guard.get_or_load("new", || async { Ok::<_, String>(1) }).await.expect_err("shed");
    assert_eq!(shed.guard().map(stampede_guard::Error::kind), Some(ErrorKind::Overloaded), "{shed}");
    assert!(shed.to_string().contains("max_fail_open_loads"), "{shed}");
    gate.open();
    assert_eq!(holds.await.expect("joined"), 1);
    assert_eq!(answer(&guard, "new", 2).await, 2, "and there is room again");
    assert_eq!(guard.stats().overloaded, 2);
}

#[cfg(feature = "http")]
#[tokio::test]
async fn beyond_max_fail_open_loads_a_request_is_answered_503_with_retry_after() {
    use tower::ServiceExt as _;

    let server = RedisServer::start();
    let guard = local(&server, one_permit().build().expect("valid")).await;
    server.kill();
    let (gate, holds) = take_the_only_permit(&guard).await;
    let report = axum::routing::get(|| async { "report" });
    let app = axum::Router::new().route("/report", report).layer(guard.clone());
    let request = || http::Request::get("http://host/report").body(axum::body::Body::empty()).unwrap();
    let response = app.clone().oneshot(request()).await.unwrap();
    assert_eq!(response.status(), 503);
    assert!(response.headers().contains_key("retry-after"), "{response:?}");
    gate.open();
    assert_eq!(holds.await.expect("joined"), 1);
    assert_eq!(app.oneshot(request()).await.unwrap().status(), 200);
}

/// A middlebox lets no messages through, from the start or from some moment on. The waiter is not notified of the commit, which delays its
/// answer by only half a second.
#[tokio::test]
async fn silent_notifications_cost_half_a_second_and_one_warning() {
    for from_the_start in [true, false] {
        let warnings = Warnings::default();
        let _listening = warnings.listen();
        let server = RedisServer::start();
        let proxy = Proxy::start(server.port()).await;
        if from_the_start {
            proxy.set(Mode::BlackHoleSubscriptions);
        }
        // The lease is so long that a waiter whose wait has ended cannot have waited for its end.
        let leads = local(&server, lease_of(Duration::from_secs(120))).await;
        let waits = unconnected(&proxy.url(), lease_of(Duration::from_secs(120)));
        answer(&waits, "warm", 1).await;
        proxy.set(Mode::BlackHoleSubscriptions);
        let (gate, loads) = (Gate::closed(), Counter::default());
        let leader = held_call(&leads, 1, &gate, &loads);
        loads.reach(1).await;
        let waiter = held_call(&waits, 2, &gate, &loads);
        queued(&server, "k", 1).await;
        eventually("it is noticed", SOON, async || waits.health().inbox != LinkState::Up).await;
        gate.open();
        assert_eq!(leader.await.expect("joined"), 1);
        let began = Instant::now();
        assert_eq!(waiter.await.expect("joined"), 1);
        assert!(began.elapsed() <= ms(500) + ms(2_000), "{:?}", began.elapsed());
        assert_eq!(loads.started(), 1);
        // The node retries the subscription meanwhile, without another warning.
        tokio::time::sleep(ms(1_500)).await;
        let warned = warnings.about("no notifications");
        assert_eq!(warned.len(), 1, "{warned:?}");
        proxy.set(Mode::Pass);
        eventually("it is back", SOON, async || waits.health().inbox == LinkState::Up).await;
        settled(&[leads, waits]).await;
        assert_nothing_left(&server, SOON).await;
    }
}

/// Behind such a middlebox, an invalidation, and a question about a lock during a restart, must not wait: they need only commands.
#[tokio::test]
async fn silent_notifications_hold_up_no_invalidation_and_no_lock() {
    let line = Line::new(Policy::default()).await;
    line.proxy.set(Mode::BlackHoleSubscriptions);
    let in_peace = line.guard.with_policy(lease_of(Duration::from_secs(60)));
    eventually("it is stored", SOON, async || {
        answer(&in_peace, "k", 1).await;
        in_peace.get::<u32>("k").await.ok().flatten() == Some(1)
    })
    .await;
    let mut took = Vec::new();
    for _ in 0..5 {
        let started = Instant::now();
        line.guard.invalidate("k").await.expect("confirmed");
        took.push(started.elapsed());
        assert_eq!(in_peace.get::<u32>("k").await.expect("answered"), None);
    }
    keep_to_the_budget(&took, "invalidations");

    let mutex = line.guard.locks().mutex("m").build().expect("valid");
    line.server.kill();
    eventually("it is noticed", SOON, async || line.guard.health().commands == LinkState::Down).await;
    let answered = tokio::spawn(eventually_eq("it is answered", SOON, Some(false), move || {
        let mutex = mutex.clone();
        async move { mutex.is_locked().await.ok() }
    }));
    tokio::task::yield_now().await;
    line.server.start_again();
    answered.await.expect("it is free");
}

/// D3: under the name of an entry there is a foreign value, much longer than any entry. It costs no more than a slow server. If there is
/// time to read it, it is a miss, like other invalid bytes.
#[tokio::test]
async fn an_oversized_value_under_our_name_is_a_miss() {
    let server = RedisServer::start();
    let put = |megabytes: usize| {
        let bytes = vec![b'x'; megabytes * 1024 * 1024];
        let mut set = redis::cmd("SET");
        set.arg("sg1:e:{default:huge}")
            .arg(bytes)
            .arg("PX")
            .arg(600_000)
            .exec(&mut server.conn())
            .expect("SET");
    };
    put(64);
    let guard = local(&server, Policy::default()).await;
    for round in 0..3 {
        let started = Instant::now();
        assert_eq!(answer(&guard, "huge", round).await, round);
        assert!(started.elapsed() <= ms(100) + SLACK * 6, "{:?}", started.elapsed());
    }
    let others = requests(&guard, "others", 20).await;
    keep_to_the_budget(&others, "others");

    put(4);
    let patient = Policy::builder().coordination_budget(SOON).command_timeout(SOON).lease(SOON * 4);
    let patient = local(&server, patient.build().expect("valid")).await;
    assert_eq!(answer(&patient, "huge", 8).await, 8);
    assert!(patient.stats().unreadable >= 1);
    assert_eq!(answer(&patient, "huge", 9).await, 8, "it is healed");
}
