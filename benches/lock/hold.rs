//! Ten clients each hold the lock for 5 ms at a time: how evenly they get it, and how long they wait.

use std::time::Duration;

use crate::acquirer::Kind;
use crate::clients::{Cell, Clients};
use crate::support::redis_server::RedisServer;
use crate::table::{Limit, Row, Spread, Table, Unit};

const ROUNDS: usize = 5;
const CLIENTS: usize = 10;
const TIME: Duration = Duration::from_millis(1500);
const HOLD: Duration = Duration::from_millis(5);

pub(crate) fn rows(table: &mut Table) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let [ours, lua] = runtime.block_on(async {
        let server = RedisServer::start();
        let mut clients = Clients::tasks(&server).await;
        let mut cells = [const { Vec::new() }; 2];
        for round in 0..ROUNDS {
            let mut turns = [(0, Kind::Ours), (1, Kind::Lua)];
            turns.rotate_left(round % 2);
            for (index, kind) in turns {
                cells[index].push(clients.contend(kind, CLIENTS, TIME, HOLD).await);
            }
        }
        cells
    });
    let uneven = |cell: &Cell| (cell.shares.1 - cell.shares.0) as f64;
    let [ours_uneven, lua_uneven] = [&ours, &lua].map(|cells| spread(cells, uneven));
    table.add(Row {
        what: "hold 5 ms, 10 clients: most less fewest acquires of a client".into(),
        unit: Unit::Count,
        must: Limit::AtMost(1.0),
        aim: Limit::None,
        measured: ours_uneven.max,
        detail: format!(
            "worst of {ROUNDS} rounds, shares {}; Lua control {}, shares {}",
            shares(&ours),
            lua_uneven.max,
            shares(&lua)
        ),
    });
    let [ours, lua] = [&ours, &lua].map(|cells| spread(cells, |cell| cell.longest_wait));
    table.add(Row {
        what: "hold 5 ms, 10 clients: longest wait".into(),
        unit: Unit::Millis,
        must: Limit::AtMost(100.0),
        aim: Limit::None,
        measured: ours.max,
        detail: format!("of the rounds {ours}; Lua control {lua}"),
    });
}

fn spread(cells: &[Cell], number: impl Fn(&Cell) -> f64) -> Spread {
    Spread::of(&cells.iter().map(number).collect::<Vec<_>>())
}

fn shares(cells: &[Cell]) -> String {
    let (fewest, most) = (cells.iter().map(|cell| cell.shares.0), cells.iter().map(|cell| cell.shares.1));
    format!("{} to {}", fewest.min().unwrap_or(0), most.max().unwrap_or(0))
}
