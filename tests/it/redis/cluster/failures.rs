//! Masters that die or hang, nodes that die while an inbox is there, and waiters that are dead when it is their turn.

use super::*;

/// A master is killed while eight processes load. Each key of that master may cost one load per process.
#[tokio::test]
async fn a_master_that_dies_is_replaced() {
    let (cluster, origin) = (Cluster::start(), Origin::start().await);
    let config = Config { redis: cluster.url(), origin: origin.addr(), lease_ms: 30_000, windows: None };
    let fleet = Fleet::spawn(8, "node", &config);
    fleet.wait_ready().await;
    let keys: Vec<_> = (0..3).map(|master| cluster.key_on(master, "k")).collect();
    for key in &keys {
        let slow = origin::Answer::value(key.as_str()).after(ms(1_000));
        origin.script(key, [(); 9].map(|()| slow.clone()));
    }
    // The first process leads.
    for (index, member) in fleet.members().iter().enumerate() {
        for key in &keys {
            member.send(&format!("load {key} 5"));
            if index == 0 {
                origin.wait_for_loads(key, 1).await;
            }
        }
    }
    for (master, key) in keys.iter().enumerate() {
        let queue = format!("sg1:q:{{default:{key}}}");
        eventually("they wait", SOON, async || {
            origin.loads(key) > 1 || cluster.node(master).run::<usize>(&["LLEN", &queue]) == 7
        })
        .await;
    }
    cluster.node(0).kill();
    for key in &keys {
        for member in fleet.members() {
            let replies: Vec<Reply> = serde_json::from_value(member.wait_event(key).await).expect("replies");
            assert!(
                replies.len() == 5 && replies.iter().all(|r| r.result.as_ref() == Ok(key)),
                "{replies:?}"
            );
        }
    }
    let loads: Vec<_> = keys.iter().map(|key| origin.loads(key)).collect();
    assert!(loads[0] <= 8, "one per process: {loads:?}");
    // A cluster with a dead master executes no commands until a replica takes over, so keys of the other masters may cost as much.
    assert!(loads.iter().all(|loads| *loads <= 8), "{loads:?}");

    cluster.await_promotion(0);
    cluster.await_agreement();
    let guard = unconnected(&cluster.url(), lease_of(LEASE));
    let started = Instant::now();
    while guard.insert(&*keys[0], &0).await.is_err() {
        assert!(started.elapsed() < FAILOVER, "{}", guard.health());
    }
    // Each process must work with the new master as it did with the old one.
    let key = cluster.key_on(0, "after");
    for member in fleet.members() {
        loop {
            member.send(&format!("invalidate {key}"));
            if member.wait_event("invalidate").await == true {
                break;
            }
            assert!(started.elapsed() < FAILOVER, "{:?}", started.elapsed());
        }
    }
    origin.script(&key, [origin::Answer::value("after").after(ms(500))]);
    all_load(&fleet, &key, 3, "after").await;
    assert_eq!(origin.loads(&key), 1);
}

/// A master that hangs and is not replaced costs calls of its own keys as much as a single server that hangs: the budget at first, and then
/// nothing. It costs calls of other keys nothing.
#[tokio::test]
async fn a_master_that_hangs_costs_the_others_nothing() {
    let cluster = Cluster::patient();
    let guard = unconnected(&cluster.url(), Policy::default());
    connects(&guard).await;
    let in_peace = guard.with_policy(lease_of(LEASE));
    let others: Vec<_> = (0..20).map(|n| cluster.key_on(1 + n % 2, &format!("other{n}"))).collect();
    let hung: Vec<_> = (0..20).map(|n| cluster.key_on(0, &format!("hung{n}"))).collect();
    for key in &others {
        answer(&in_peace, key, 7).await;
    }
    cluster.node(0).pause();
    let timed = async |guard: &StampedeGuard, keys: &[String]| {
        let mut added = Vec::new();
        for key in keys {
            let started = Instant::now();
            assert_eq!(answer(guard, key, 7).await, 7);
            added.push(started.elapsed());
        }
        added
    };
    let first = timed(&guard, &hung[..2]).await;
    keep_to_the_budget(&first, "first");
    let (later, beside) = tokio::join!(timed(&guard, &hung[2..]), timed(&in_peace, &others));
    keep_to_the_budget(&later, "later");
    assert!(median(later.clone()) <= NOTHING, "{later:?}");
    assert!(median(beside.clone()) <= NOTHING, "{beside:?}");
    let port = cluster.node(0).port().to_string();
    eventually("it is known which one hangs", SOON, async || {
        let health = guard.health();
        let why = health.reason.as_ref().is_some_and(|why| why.contains(&port));
        (health.breaker, health.commands, why) == (Breaker::Partly, LinkState::Up, true)
    })
    .await;
    let stats = guard.stats();
    let hits = timed(&in_peace, &others).await;
    assert!(median(hits.clone()) <= NOTHING, "{hits:?}");
    assert_eq!(guard.stats().loads, stats.loads, "all calls were hits");
    // Cold keys of the other masters are loaded under a lease, and stored.
    let cold = cluster.key_on(1, "cold");
    answer(&in_peace, &cold, 1).await;
    assert_eq!(in_peace.get::<u32>(&*cold).await.expect("a store"), Some(1));

    cluster.node(0).resume();
    let resumed = Instant::now();
    while guard.insert(&*hung[0], &8).await.is_err() {
        assert!(resumed.elapsed() < Duration::from_secs(1) + SLACK + STANDSTILL, "{}", guard.health());
    }
    eventually_eq("all is well", SOON, Breaker::Closed, async || guard.health().breaker).await;
}

/// The node at which the inbox is subscribed is killed. The inbox is opened again at another node.
#[tokio::test]
async fn the_inbox_goes_to_another_node() {
    let cluster = Cluster::start();
    let guards = [connected(&cluster, LEASE).await, connected(&cluster, LEASE).await];
    let at = cluster.inboxes();
    assert_eq!(at.values().sum::<usize>(), 2, "{at:?}");
    let victim = *at.keys().next().expect("one of them");
    cluster.node(victim).kill();
    cluster.await_promotion(victim);
    cluster.await_agreement();
    for guard in &guards {
        eventually("it hears again", FAILOVER, async || guard.health().inbox == LinkState::Up).await;
    }
    eventually_eq("both elsewhere", SOON, 2, async || cluster.inboxes().values().sum::<usize>()).await;
    let key = cluster.key_on((victim + 1) % 3, "again");
    share(&cluster, &guards, &key).await;
}

/// A leader's load vanishes, and the first waiter in the queue is dead. No process can know that, so the waiter is granted only a short
/// claim, and not a whole lease.
#[tokio::test]
async fn a_dead_waiter_costs_a_claim_and_not_a_lease() {
    let (cluster, origin) = (Cluster::patient(), Origin::start().await);
    let lease = Duration::from_secs(12);
    let config = Config {
        redis: cluster.url(),
        origin: origin.addr(),
        lease_ms: lease.as_millis() as u64,
        windows: None,
    };
    let fleet = Fleet::spawn(4, "node", &config);
    fleet.wait_ready().await;
    let key = cluster.key_on(0, "k");
    origin.script(&key, [origin::Answer::value("lost").held(), origin::Answer::value("found")]);
    let queue = format!("sg1:q:{{default:{key}}}");
    for (index, member) in fleet.members()[..3].iter().enumerate() {
        let how = if index == 0 { "panic" } else { "load" };
        member.send(&format!("{how} {key} 1"));
        match index {
            0 => origin.wait_for_loads(&key, 1).await,
            n => {
                eventually_eq("it waits", SOON, n, async || cluster.node(0).run::<usize>(&["LLEN", &queue]))
                    .await;
            }
        }
    }
    fleet.member(1).kill();
    let started = Instant::now();
    origin.release(&key);
    let replies: Vec<Reply> =
        serde_json::from_value(fleet.member(2).wait_event(&key).await).expect("replies");
    assert_eq!(replies[0].result.as_deref(), Ok("found"));
    let claim = lease / 4;
    assert!(
        started.elapsed() >= claim / 2 && started.elapsed() < claim + ms(1_500) + STANDSTILL,
        "{:?}",
        started.elapsed()
    );
    assert_eq!(origin.loads(&key), 2);

    // A living waiter gets the lease at once, and for its whole length: a caller that comes after the time of a claim still has to wait.
    let key = cluster.key_on(1, "live");
    let (lost, slow) =
        (origin::Answer::value("lost").held(), origin::Answer::value("found").after(claim * 2));
    origin.script(&key, [lost, slow]);
    fleet.member(0).send(&format!("panic {key} 1"));
    origin.wait_for_loads(&key, 1).await;
    fleet.member(2).send(&format!("load {key} 1"));
    let queue = format!("sg1:q:{{default:{key}}}");
    eventually_eq("it waits", SOON, 1, async || cluster.node(1).run::<usize>(&["LLEN", &queue])).await;
    let started = Instant::now();
    origin.release(&key);
    origin.wait_for_loads(&key, 2).await;
    assert!(started.elapsed() < claim, "at once: {:?}", started.elapsed());
    tokio::time::sleep(claim + ms(300)).await;
    fleet.member(3).send(&format!("load {key} 1"));
    for member in [2, 3] {
        let replies: Vec<Reply> =
            serde_json::from_value(fleet.member(member).wait_event(&key).await).expect("replies");
        assert_eq!(replies[0].result.as_deref(), Ok("found"), "member {member}");
    }
    assert_eq!(origin.loads(&key), 2);
}

/// A dead waiter for a mutex costs only a claim, too, although the mutex may have a TTL of a minute.
#[tokio::test]
async fn a_dead_waiter_costs_a_lock_a_claim() {
    let cluster = Cluster::patient();
    let mut guards = Vec::new();
    for _ in 0..3 {
        guards.push(connected(&cluster, LEASE).await);
    }
    let ttl = Duration::from_secs(8);
    let mutexes: Vec<_> = guards
        .iter()
        .map(|guard| Mutex::builder(&guard.locks(), "m").ttl(ttl).build().expect("valid"))
        .collect();
    let mut held = mutexes[0].lock().await.expect("free");
    let waiting = |count: usize| {
        let cluster = &cluster;
        eventually_eq("they wait", SOON, count, async move || {
            let queues = cluster.nodes().iter().map(|node| {
                let queues: Vec<String> = node.run(&["KEYS", "sg1:mq:*"]);
                queues.iter().map(|queue| node.run::<usize>(&["LLEN", queue])).sum::<usize>()
            });
            queues.sum()
        })
    };
    let dead = tokio::spawn({
        let mutex = mutexes[1].clone();
        async move { mutex.lock().await.map(|guard| guard.fence()) }
    });
    waiting(1).await;
    let alive = tokio::spawn({
        let mutex = mutexes[2].clone();
        async move { mutex.lock().await.map(|guard| guard.fence()) }
    });
    waiting(2).await;
    // The second waiter is as good as dead: it gives nothing back, and receives no messages.
    let runtime = guards[1].clone();
    runtime.shutdown(Duration::ZERO).await;
    dead.abort();
    let started = Instant::now();
    assert!(held.unlock().await.expect("released"));
    alive.await.unwrap().expect("the next");
    assert!(started.elapsed() < ttl / 4 + ms(1_500) + STANDSTILL, "{:?}", started.elapsed());
}

/// Regression: in most of its runs the doctor took a dead master for a dead connection of its own, and examined nothing else.
async fn the_doctor_looks_on(hangs: bool, advice: &str) {
    let cluster = Cluster::patient();
    let guard = connected(&cluster, LEASE).await;
    let its_own = cluster.key_on(0, "k");
    let port = cluster.node(0).port().to_string();
    if hangs {
        cluster.node(0).pause()
    } else {
        cluster.node(0).kill()
    }
    let hurried = guard.with_policy(Policy::default());
    eventually("it is noticed", SOON, async || {
        answer(&hurried, &its_own, 1).await;
        guard.health().breaker == Breaker::Partly
    })
    .await;
    // The doctor runs several times, because it tries a random key, and subscribes at a random node.
    for _ in 0..4 {
        let report = examined(&guard).await;
        let of = |check: &'static str| report.findings.iter().filter(move |finding| finding.check == check);
        let dead = of("master").find(|finding| finding.severity == Severity::Problem);
        let dead = dead.unwrap_or_else(|| panic!("nothing about the dead one:\n{report}"));
        assert!(dead.found.contains(&port) && dead.advice.contains(advice), "{report}");
        assert!(!dead.cost.contains("as before"), "by default all keys are affected soon: {report}");
        for check in ["connection", "rights", "notifications", "latency"] {
            let sound = |finding: &Finding| finding.severity == Severity::Ok;
            assert!(of(check).count() > 0 && of(check).all(sound), "{check}:\n{report}");
        }
        let stands = of("guard").next().expect("it is down in part");
        assert!(stands.cost.contains("of its keys"), "not all of them: {report}");
    }
}

#[tokio::test]
async fn the_doctor_names_a_master_that_can_not_be_reached_and_looks_at_the_others() {
    the_doctor_looks_on(false, "no server listens there").await;
}

#[tokio::test]
async fn the_doctor_names_a_master_that_hangs_and_looks_at_the_others() {
    the_doctor_looks_on(true, "no answer in time").await;
}

/// Regression: `connect()` succeeded although no master executed commands.
#[tokio::test]
async fn a_cluster_that_takes_no_commands_is_an_error_of_connecting_and_a_finding() {
    let cluster = Cluster::patient();
    let guard = connected(&cluster, LEASE).await;
    for node in cluster.nodes() {
        node.run::<()>(&["CLUSTER", "DELSLOTS", "0", "1", "2"]);
    }
    let warnings = crate::support::warnings::Warnings::default();
    let _listens = warnings.listen();
    connect_advises(&guard, "takes no commands").await;
    let warned = warnings.about("refuses a command");
    assert!(!warned.is_empty(), "{:?}", warnings.about(""));
    assert!(warned.iter().all(|warned| warned.contains("redis-cli --cluster check")), "{warned:?}");
    let report = examined(&guard).await;
    let down = report.findings.iter().find(|finding| finding.found.contains("CLUSTERDOWN"));
    let down = down.unwrap_or_else(|| panic!("it is not said:\n{report}"));
    assert!(
        down.severity == Severity::Problem && down.advice.contains("redis-cli --cluster check"),
        "{report}"
    );
    // With the setting `no`, the masters execute commands for the slots that are served.
    for node in cluster.nodes() {
        node.run::<()>(&["CONFIG", "SET", "cluster-require-full-coverage", "no"]);
    }
    connects(&guard).await;
}
