//! The book's table 11.2, and the ratios that follow from it, for an empty critical section and 1, 2, 5 and 10 clients.

use std::time::Duration;

use crate::acquirer::Kind;
use crate::clients::{Cell, Clients};
use crate::support::redis_server::RedisServer;
use crate::table::{Limit, Row, Spread, Table, Unit};

const ROUNDS: usize = 7;
const NUMBERS: [usize; 4] = [1, 2, 5, 10];
/// For each number of clients, acquires divided by those of the SETNX control: the ratio of the book's Lua lock, and our aim.
const OVER_SETNX: [(f64, f64); 4] = [(1.42, 2.0), (1.87, 2.5), (2.07, 3.0), (2.37, 3.5)];

/// For each kind and each number of clients, the cells of all rounds.
type Cells = [[Vec<Cell>; NUMBERS.len()]; Kind::ALL.len()];

pub(crate) fn one_process(table: &mut Table) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime.block_on(async {
        let server = RedisServer::start();
        let cells = measure(Clients::tasks(&server).await).await;
        rows(table, "one process", &cells);
    });
}

pub(crate) fn processes(table: &mut Table) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime.block_on(async {
        let server = RedisServer::start();
        let cells = measure(Clients::processes(&server).await).await;
        rows(table, "processes", &cells);
    });
}

async fn measure(mut clients: Clients) -> Cells {
    let mut cells = Cells::default();
    for kind in Kind::ALL {
        clients.contend(kind, 10, Duration::from_millis(200), Duration::ZERO).await;
    }
    for round in 0..ROUNDS {
        for (column, number) in NUMBERS.into_iter().enumerate() {
            // With ten clients, the 99th percentiles of the waits are compared, so there must be many waits.
            let time = Duration::from_millis(if number == 10 { 800 } else { 300 });
            let mut turns = Kind::ALL;
            turns.rotate_left(round % Kind::ALL.len());
            for kind in turns {
                let cell = clients.contend(kind, number, time, Duration::ZERO).await;
                cells[kind as usize][column].push(cell);
            }
        }
    }
    cells
}

fn rows(table: &mut Table, heading: &str, cells: &Cells) {
    print_book(heading, cells);
    let mut add = |what: &str, must, aim, measured: &[f64], note: &str| {
        let spread = Spread::of(measured);
        table.add(Row {
            what: format!("{heading}: {what}"),
            unit: Unit::Ratio,
            must,
            aim,
            measured: spread.median,
            detail: format!("{spread}{note}"),
        });
    };
    let [setnx, lua, ours, bumped] = cells;
    for (ours, bumping) in [(ours, ""), (bumped, ", bumping")] {
        for (column, (number, (must, aim))) in NUMBERS.into_iter().zip(OVER_SETNX).enumerate() {
            let clients = if number == 1 { "client" } else { "clients" };
            let what = format!("{number} {clients}{bumping}, acquires over the SETNX control");
            let rates = ratios(&ours[column], &setnx[column], Cell::rate);
            let of_lua = Spread::of(&ratios(&lua[column], &setnx[column], Cell::rate));
            let note = format!("; the Lua control {:.2}", of_lua.median);
            add(&what, Limit::AtLeast(must), Limit::AtLeast(aim), &rates, &note);
        }
        let ([.., setnx], [.., lua], [one, .., ten]) = (setnx, lua, ours);
        let what = format!("10 clients{bumping}, acquires over the Lua control polling each 1 ms");
        add(&what, Limit::AtLeast(1.0), Limit::AtLeast(1.4), &ratios(ten, lua, Cell::rate), "");
        let what = format!("acquires of 10 clients{bumping} over those of 1");
        add(&what, Limit::AtLeast(0.764), Limit::AtLeast(0.9), &ratios(ten, one, Cell::rate), "");
        let tries: Vec<_> = ten.iter().map(Cell::tries_per_acquire).collect();
        let what = format!("10 clients{bumping}, tries per acquire");
        add(&what, Limit::AtMost(1.05), Limit::AtMost(1.0), &tries, "");
        let fairness: Vec<_> = ten.iter().map(Cell::fairness).collect();
        let what = format!("10 clients{bumping}, fewest over most acquires of a client");
        add(&what, Limit::AtLeast(0.95), Limit::AtLeast(0.99), &fairness, "");
        let waits = |over| ratios(ten, over, |cell| cell.p99_wait);
        let [over_lua, over_setnx] = [lua, setnx].map(|control| Spread::of(&waits(control)).median);
        let note = format!("; {over_lua:.3}, over the SETNX control's {over_setnx:.3}");
        let what = format!("10 clients{bumping}, p99 wait over the Lua control's");
        add(&what, Limit::AtMost(0.05), Limit::None, &waits(lua), &note);
    }
}

/// For each round, the ratio of both cells of that round.
fn ratios(ours: &[Cell], control: &[Cell], of: impl Fn(&Cell) -> f64) -> Vec<f64> {
    ours.iter().zip(control).map(|(ours, control)| of(ours) / of(control)).collect()
}

/// Tries and acquires are sums over all rounds, shares are those of one round, and the longest wait is that of all rounds. All other
/// columns are medians of the rounds.
fn print_book(heading: &str, cells: &Cells) {
    println!(
        "\n{heading}, {ROUNDS} rounds\n\
         | lock, clients | tries | acquires | acquires/s, spread | us per acquire | tries per acquire | \
         shares | p99, longest wait | CPU per acquire: server, clients |\n\
         |---|---|---|---|---|---|---|---|---|"
    );
    for (kind, cells) in Kind::ALL.iter().zip(cells) {
        for (number, cells) in NUMBERS.iter().zip(cells) {
            let of = |number: fn(&Cell) -> f64| Spread::of(&cells.iter().map(number).collect::<Vec<_>>());
            let (rate, p99) = (of(Cell::rate), of(|cell| cell.p99_wait));
            let tries: u64 = cells.iter().map(|cell| cell.tries).sum();
            let acquires: u64 = cells.iter().map(|cell| cell.acquires).sum();
            let (fewest, most) = cells[cells.len() / 2].shares;
            println!(
                "| {kind}, {number} | {tries} | {acquires} | {:.0}, {:.0} to {:.0} | {:.1} | {:.3} | {fewest} to {most} | \
                 {:.2}, {:.0} ms | {:.1}, {:.1} us |",
                rate.median,
                rate.min,
                rate.max,
                1e6 / rate.median,
                tries as f64 / acquires as f64,
                p99.median,
                of(|cell| cell.longest_wait).max,
                of(|cell| cell.server_cpu).median,
                of(|cell| cell.client_cpu).median,
            );
        }
    }
    println!();
}
