//! Loads that fail, and leaders that die: there is one load per wave, and no caller waits for longer than a lease.

use std::time::Duration;

use crate::calls::{Guards, LOADING, ms_between};
use crate::support::origin::Answer;
use crate::support::os::wall_ns;
use crate::support::redis_server::RedisServer;
use crate::table::{Limit, Row, Spread, Table, Unit};

/// Four processes with ten callers each, and a loader that fails after 200 ms. If each waiter tried in turn, as is usual, there would be 40
/// loads, and the last caller would receive its failure after 8.1 s.
pub(crate) fn failing(table: &mut Table) {
    const WAVES: usize = 5;
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let (loads, waits) = runtime.block_on(async {
        let server = RedisServer::start();
        let guards = Guards::start(&server, 4, 10, Duration::from_secs(4)).await;
        let (mut loads, mut waits) = (Vec::new(), Vec::new());
        // The first wave only makes the server learn the scripts.
        for wave in 0..=WAVES {
            let key = format!("failing-{wave}");
            guards.origin.script(&key, [Answer::failure("no route").after(Duration::from_millis(200))]);
            let round = guards.round(&key).await;
            assert!(round.answers().all(|(_, ok)| !ok), "every caller has the failure");
            loads.push(round.loads as f64);
            if wave > 0 {
                waits.push(round.last_waiter());
            }
        }
        (Spread::of(&loads), Spread::of(&waits))
    });
    table.add(Row {
        what: "failing loader, 4x10: loads (usual: 40)".into(),
        unit: Unit::Count,
        must: Limit::Exactly(1.0),
        aim: Limit::Exactly(1.0),
        measured: loads.max,
        detail: format!("most of {} waves", WAVES + 1),
    });
    table.add(Row {
        what: "failing loader, 4x10: last caller told after the failure (usual: 8.1 s)".into(),
        unit: Unit::Millis,
        must: Limit::AtMost(15.0),
        aim: Limit::AtMost(5.0),
        measured: waits.median,
        detail: format!("{waits}"),
    });
}

/// Three processes with ten callers each, and a lease of 1 s. The leader is killed at different moments between two renewals, and another
/// process loads. The time of that load does not count.
pub(crate) fn killed(table: &mut Table) {
    const KILL_AFTER_MS: [u64; 5] = [50, 150, 250, 350, 450];
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let waits = runtime.block_on(async {
        let mut waits = Vec::new();
        for after in KILL_AFTER_MS {
            let server = RedisServer::start();
            let guards = Guards::start(&server, 3, 10, Duration::from_secs(1)).await;
            guards.origin.script(
                "hot",
                [Answer::value("of the dead").held(), Answer::value("v").after(Duration::from_millis(100))],
            );
            guards.call("hot");
            guards.origin.wait_for_loads("hot", 1).await;
            tokio::time::sleep(Duration::from_millis(after)).await;
            let mut leaders = guards.fleet.members().iter().filter(|member| member.events(LOADING) > 0);
            let leader = leaders.next().expect("a process loads");
            let killed_at = wall_ns();
            leader.kill();
            let round = guards.seen("hot").await;
            assert!(round.answers().all(|(_, ok)| ok), "every caller that is left has the value");
            assert_eq!(round.loads, 2, "one of the dead, one of the living");
            let (started, ended) = round.load();
            waits.push(ms_between(killed_at, round.last_answer()) - ms_between(started, ended));
        }
        Spread::of(&waits)
    });
    table.add(Row {
        what: "leader SIGKILLed, lease 1 s: last one answered after the kill, load excluded".into(),
        unit: Unit::Millis,
        must: Limit::AtMost(1100.0),
        aim: Limit::AtMost(1050.0),
        measured: waits.max,
        detail: format!(
            "worst of {}, killed {KILL_AFTER_MS:?} ms into the load; {waits}",
            KILL_AFTER_MS.len()
        ),
    });
}
