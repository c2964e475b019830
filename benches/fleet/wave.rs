//! One cold key with many callers in many processes: how many loads and commands there are, and how long the last caller waits.
//!
//! Each shape of the fleet has a separate server. The first wave also counts connecting, and the scripts that the server does not know yet.
//! Later waves show the steady state of a service that has called `connect()`: three of them are monitored, and five are timed, without a
//! MONITOR on the server. The load takes 300 ms.

use std::time::Duration;

use crate::calls::Guards;
use crate::support::monitor::{Commands, Monitor};
use crate::support::origin::Answer;
use crate::support::redis_server::RedisServer;
use crate::table::{Limit, Row, Spread, Table, Unit};

const LEASE: Duration = Duration::from_secs(4);
const LOAD: Duration = Duration::from_millis(300);
const MONITORED: usize = 3;
const TIMED: usize = 5;

struct Shape {
    processes: usize,
    callers: usize,
    /// How many commands there may be per cold key, how many we aim at, and the best known result of other systems.
    commands: Option<(f64, f64, &'static str)>,
    timed: bool,
}

const SHAPES: [Shape; 4] = [
    Shape { processes: 2, callers: 200, commands: Some((24.0, 14.0, "418")), timed: false },
    Shape { processes: 8, callers: 25, commands: Some((60.0, 36.0, "37")), timed: true },
    Shape { processes: 10, callers: 40, commands: None, timed: false },
    Shape { processes: 24, callers: 4, commands: Some((150.0, 110.0, "117")), timed: false },
];

pub(crate) fn rows(table: &mut Table) {
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    for shape in &SHAPES {
        runtime.block_on(measure(table, shape));
    }
}

async fn measure(table: &mut Table, shape: &Shape) {
    let server = RedisServer::start();
    let monitor = Monitor::start(&server);
    let guards = Guards::start(&server, shape.processes, shape.callers, LEASE).await;
    let (mut loads, mut waits) = (Vec::new(), Vec::new());
    let mut wave = async |key: String| {
        guards.origin.script(&key, [Answer::value("v".repeat(1024)).after(LOAD)]);
        let round = guards.round(&key).await;
        assert!(round.answers().all(|(_, ok)| ok), "every caller has the value");
        loads.push(round.loads as f64);
        round.last_waiter()
    };

    wave("first".to_owned()).await;
    let first = monitor.finish();
    let mut monitored: Vec<Commands> = Vec::new();
    for round in 0..MONITORED {
        let monitor = Monitor::start(&server);
        wave(format!("monitored-{round}")).await;
        monitored.push(monitor.finish());
    }
    for round in 0..TIMED {
        waits.push(wave(format!("timed-{round}")).await);
    }

    let name = format!("{}x{}", shape.processes, shape.callers);
    let loads = Spread::of(&loads);
    table.add(Row {
        what: format!("loads per cold key, {name} (processes x callers)"),
        unit: Unit::Count,
        must: Limit::Exactly(1.0),
        aim: Limit::Exactly(1.0),
        measured: loads.max,
        detail: format!("most of {} waves", 1 + MONITORED + TIMED),
    });
    if let Some((must, aim, known)) = shape.commands {
        table.add(commands(&name, must, aim, known, &first, &monitored));
    }
    if shape.timed {
        let waits = Spread::of(&waits);
        table.add(Row {
            what: format!("last waiter after the load ends, {name} (best known 5.7 ms)"),
            unit: Unit::Millis,
            must: Limit::AtMost(10.0),
            aim: Limit::AtMost(4.0),
            measured: waits.median,
            detail: format!("{waits}"),
        });
    }
}

fn commands(name: &str, must: f64, aim: f64, known: &str, first: &Commands, monitored: &[Commands]) -> Row {
    let all: Vec<_> = monitored.iter().map(|commands| commands.total as f64).collect();
    let steady: Vec<_> = monitored.iter().map(|commands| work(commands).total as f64).collect();
    let (all, steady) = (Spread::of(&all), Spread::of(&steady));
    let kinds = work(&monitored[0]).by_name;
    let kinds: Vec<_> = kinds.iter().map(|(name, count)| format!("{count} {name}")).collect();
    Row {
        what: format!("Redis commands of clients per cold key, {name} (best known {known})"),
        unit: Unit::Count,
        must: Limit::AtMost(must),
        aim: Limit::AtMost(aim),
        // This is the largest number, so that the verdict is true for every wave.
        measured: steady.max,
        detail: format!(
            "{:.0} to {:.0} ({}); with PING and TIME {:.0}; first wave with connecting and loading scripts {}",
            steady.min,
            steady.max,
            kinds.join(", "),
            all.max,
            first.total
        ),
    }
}

/// The number of commands, without periodic ones.
fn work(commands: &Commands) -> Commands {
    commands.clone().without(["ping", "time"])
}
