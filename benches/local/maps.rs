//! The choice of the map under the local tier: how long a hit takes for readers, and how many accesses of a trace are hits.
//!
//! The trace has a million accesses to 100,000 different values, by Zipf's law with s = 0.99; a value that is missing is inserted. The
//! first tenth fills the cache and does not count. All maps get the same trace, and have room for the same number of values.

use std::sync::Arc;

use crate::caches::{Foyer, Map, Moka, Quick, TinyLfu};
use crate::readers::{concurrent_of, mapped};
use crate::support::zipf::Zipf;
use crate::table::{Limit, Row, Table, Unit};
use crate::turns::{in_turn, two_threads};
use crate::values::{User, keys};

const KEYS: u32 = 1_000;
const READERS: [u32; 3] = [1, 64, 256];

const VALUES: usize = 100_000;
const ACCESSES: usize = 1_000_000;
const SKEW: f64 = 0.99;
/// For how many hundredths of all values a map has room.
const ROOM: [usize; 2] = [1, 10];

pub(crate) fn rows(table: &mut Table) {
    let runtime = two_threads();
    let (quick, moka) = (mapped::<Quick<User>>(KEYS), mapped::<Moka<User>>(KEYS));
    let foyer = mapped::<Foyer<User>>(KEYS);
    for readers in READERS {
        let times = in_turn(vec![
            concurrent_of(&runtime, readers, &quick, KEYS),
            concurrent_of(&runtime, readers, &moka, KEYS),
            concurrent_of(&runtime, readers, &foyer, KEYS),
        ]);
        let of = |side: usize| {
            format!("{:.0} ns ({:.2})", times.of(side).median, times.throughput(side, 0).median)
        };
        table.add(Row {
            what: format!("map: ns per hit, {readers} readers, 2 threads: quick_cache"),
            unit: Unit::Nanos,
            must: Limit::None,
            aim: Limit::None,
            measured: times.of(0).median,
            detail: format!("moka {}, foyer {} (throughput over quick_cache's)", of(1), of(2)),
        });
    }
    let (texts, trace) = (keys(VALUES as u32), trace());
    for hundredths in ROOM {
        let room = VALUES * hundredths / 100;
        let [quick, moka] =
            [replay::<Quick<u32>>(room, &texts, &trace), replay::<Moka<u32>>(room, &texts, &trace)];
        let [foyer, lfu] =
            [replay::<Foyer<u32>>(room, &texts, &trace), replay::<TinyLfu<u32>>(room, &texts, &trace)];
        table.add(Row {
            what: format!(
                "map: share of hits, Zipf {SKEW}, room for {hundredths}% of the values: quick_cache"
            ),
            unit: Unit::Ratio,
            must: Limit::None,
            aim: Limit::None,
            measured: quick,
            detail: format!("moka {moka:.3}, foyer {foyer:.3} (LRU, its default), {lfu:.3} (LFU)"),
        });
    }
}

/// The share of accesses that find their value, the first tenth left out.
fn replay<M: Map<u32>>(room: usize, keys: &[String], trace: &[usize]) -> f64 {
    let map = M::with_capacity(room);
    let (warm_up, measured) = trace.split_at(trace.len() / 10);
    let access = |value: &usize| {
        let key = &keys[*value];
        let is_hit = map.get(key).is_some();
        if !is_hit {
            map.insert(key.clone(), Arc::new(7));
        }
        is_hit
    };
    warm_up.iter().for_each(|value| {
        access(value);
    });
    measured.iter().filter(|value| access(value)).count() as f64 / measured.len() as f64
}

/// The numbers of the values in a trace, in the order of the accesses.
fn trace() -> Vec<usize> {
    let zipf = Zipf::new(VALUES, SKEW);
    // The trace is the same in each run. Ranks are dealt to values at random, so that values with neighbouring ranks are no neighbours in a
    // map.
    let mut random = fastrand::Rng::with_seed(7);
    let mut values: Vec<_> = (0..VALUES).collect();
    random.shuffle(&mut values);
    (0..ACCESSES).map(|_| values[zipf.draw(&mut random)]).collect()
}
