//! Readers of a map.

use std::hint::black_box;
use std::sync::Arc;

use tokio::runtime::Runtime;

use crate::caches::Map;
use crate::turns::{Side, concurrent, lets_others_run};
use crate::values::{User, key, keys};

/// A map that has this many keys with their values, and room for as many again.
pub(crate) fn mapped<M: Map<User>>(number: u32) -> M {
    // Each of the map's shards has enough room, although keys are not evenly divided between them.
    let map = M::with_capacity(2 * number as usize + 1_000);
    for key in &*keys(number) {
        map.insert(key.clone(), Arc::new(User::new(7)));
    }
    map
}

/// Readers of values that the map has.
pub(crate) fn concurrent_of<'a, M: Map<User>>(
    runtime: &'a Runtime,
    readers: u32,
    map: &M,
    number: u32,
) -> Side<'a> {
    let (map, texts) = (map.clone(), keys(number));
    concurrent(runtime, readers, move |reader, calls| {
        let (map, texts) = (map.clone(), Arc::clone(&texts));
        async move {
            for call in 0..calls {
                black_box(map.get(key(&texts, reader, call)).expect("it is there"));
                lets_others_run(call).await;
            }
        }
    })
}
