//! A hit of the local tier, compared with a hit of the maps themselves. The guards have a store in memory, which a local hit does not use;
//! `raw` measures a local hit beside a real server.

use std::hint::black_box;
use std::sync::Arc;

use stampede_guard::{MemoryStore, StampedeGuard};

use crate::caches::{Foyer, Map as _, Moka, Quick};
use crate::readers::{concurrent_of, mapped};
use crate::table::{Limit, Row, Table, Unit};
use crate::turns::{Times, concurrent, in_turn, lets_others_run, lone, one_thread, two_threads};
use crate::values::{User, key, keys, lasting, until_copied};

const READERS: u32 = 64;
const KEYS: u32 = 1_000;

/// The indices of the sides.
const GUARD: usize = 0;
const QUICK: usize = 1;
const MOKA: usize = 2;
const FOYER: usize = 3;

/// Adds the row of 64 readers, which read 1,000 keys on two threads.
pub(crate) fn concurrent_hits(table: &mut Table) {
    let times = readers_of(KEYS);
    let ratio = times.throughput(GUARD, QUICK);
    table.add(Row {
        what: "local hit: `load(..).get_shared`, 64 readers, 2 threads / quick_cache's `get` of an `Arc`"
            .into(),
        unit: Unit::Ratio,
        must: Limit::AtLeast(0.4),
        aim: Limit::AtLeast(0.6),
        measured: ratio.median,
        detail: format!("{ratio}; {}", nanos(&times)),
    });
}

/// Adds the rows of one hot key.
pub(crate) fn hot(table: &mut Table) {
    let times = readers_of(1);
    for (control, name) in [(MOKA, "moka"), (FOYER, "foyer"), (QUICK, "quick_cache")] {
        let ratio = times.throughput(GUARD, control);
        table.add(Row {
            what: format!("in_memory(), one hot key: `load(..).get_shared`, 64 callers, 2 threads / {name}"),
            unit: Unit::Ratio,
            must: Limit::None,
            aim: Limit::None,
            measured: ratio.median,
            detail: format!("{ratio}; {}", nanos(&times)),
        });
    }
}

/// Adds the rows of one caller on one thread.
pub(crate) fn alone(table: &mut Table) {
    let runtime = one_thread();
    let (guard, texts) = (runtime.block_on(filled(KEYS)), keys(KEYS));
    let quick = mapped::<Quick<User>>(KEYS);
    let sides = vec![
        lone(&runtime, async |call| hit(&guard, key(&texts, 0, call)).await),
        lone(&runtime, async |call| quick.get(key(&texts, 0, call)).expect("it is there")),
    ];
    let times = in_turn(sides);
    let (guard, control, ratio) = (times.of(GUARD), times.of(QUICK), times.throughput(GUARD, QUICK));
    table.add(Row {
        what: "local hit: `load(..).get_shared`, time per hit on one thread".into(),
        unit: Unit::Nanos,
        must: Limit::AtMost(300.0),
        aim: Limit::AtMost(150.0),
        measured: guard.median,
        detail: format!("{guard}; quick_cache {:.0} ns, ratio {:.2}", control.median, ratio.median),
    });
}

/// Measures readers of the guard and of each map, with this many keys.
fn readers_of(number: u32) -> Times {
    let runtime = two_threads();
    let guard = runtime.block_on(filled(number));
    let texts = keys(number);
    let guarded = concurrent(&runtime, READERS, move |reader, calls| {
        let (guard, texts) = (guard.clone(), Arc::clone(&texts));
        async move {
            for call in 0..calls {
                black_box(hit(&guard, key(&texts, reader, call)).await);
                lets_others_run(call).await;
            }
        }
    });
    let (quick, moka) = (mapped::<Quick<User>>(number), mapped::<Moka<User>>(number));
    let foyer = mapped::<Foyer<User>>(number);
    in_turn(vec![
        guarded,
        concurrent_of(&runtime, READERS, &quick, number),
        concurrent_of(&runtime, READERS, &moka, number),
        concurrent_of(&runtime, READERS, &foyer, number),
    ])
}

fn nanos(times: &Times) -> String {
    let of = |side| times.of(side).median;
    format!(
        "{:.0} ns; quick_cache {:.0}, moka {:.0}, foyer {:.0} ns",
        of(GUARD),
        of(QUICK),
        of(MOKA),
        of(FOYER)
    )
}

/// A guard that has the values of this many keys in memory.
pub(crate) async fn filled(number: u32) -> StampedeGuard {
    let policy = lasting().build().expect("valid");
    let guard = StampedeGuard::builder(MemoryStore::new()).policy(policy).build().expect("valid");
    until_copied(&guard, &keys(number)).await;
    guard
}

pub(crate) async fn hit(guard: &StampedeGuard, key: &str) -> Arc<User> {
    let load = || async { Err::<User, _>("this is a hit") };
    guard.load(key).get_shared(move |_| load()).await.expect("a hit").value
}
