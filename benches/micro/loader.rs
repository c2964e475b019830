//! Hits of `get_or_load` on the in-memory store. A row takes a second, so no value expires: by default they live for a minute.

use std::collections::HashMap;
use std::convert::Infallible;
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use stampede_guard::StampedeGuard;

use crate::table::Table;
use crate::turns::{SIZES, awaited, calls, compare, concurrent, runtime, threads};

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct User {
    id: u64,
    name: String,
    mail: String,
}

/// A cache that a program without the guard might have.
#[derive(Debug, Default)]
struct Map(Mutex<HashMap<String, Bytes>>);

impl Map {
    fn with(key: String, value: Bytes) -> Self {
        Self(Mutex::new(HashMap::from([(key, value)])))
    }

    fn get(&self, key: &str) -> Option<Bytes> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).get(key).cloned()
    }
}

pub(crate) fn rows(table: &mut Table) {
    let (runtime, guard) = (runtime(), StampedeGuard::in_memory());
    for size in SIZES {
        let value = Bytes::from(vec![b'v'; size]);
        let map = Map::with(format!("bytes:{size}"), value.clone());
        let guarded = awaited(&runtime, async || {
            let value = value.clone();
            let load = || async { Ok::<_, Infallible>(value) };
            guard.get_or_load(("bytes", size), load).await.expect("infallible")
        });
        let control = calls(|| map.get(&format!("bytes:{size}")).expect("it is there"));
        table.add(compare(format!("hit of `get_or_load`, {size} bytes / a map"), guarded, control));
    }
    let (threads, hot, value) = (threads(), guard.clone(), Bytes::from(vec![b'v'; 1024]));
    let map = Arc::new(Map::with("hot:1024".into(), value.clone()));
    let guarded = concurrent(&threads, move || {
        let (hot, value) = (hot.clone(), value.clone());
        async move {
            hot.get_or_load(("hot", 1024), || async { Ok::<_, Infallible>(value) }).await.expect("infallible")
        }
    });
    let control = concurrent(&threads, move || {
        let map = Arc::clone(&map);
        async move { map.get(&format!("hot:{}", 1024)).expect("it is there") }
    });
    table.add(compare(
        "the same, 1024 bytes, 64 tasks of two threads and one key / a map".into(),
        guarded,
        control,
    ));
    let user = User { id: 42, name: "Ada Lovelace".into(), mail: "ada@shop.example".into() };
    let encoded = rmp_serde::to_vec_named(&user).expect("plain values");
    let map = Map::with("user:42".into(), encoded.into());
    let guarded = awaited(&runtime, async || {
        let user = user.clone();
        let load = || async { Ok::<_, Infallible>(user) };
        guard.get_or_load(("user", 42), load).await.expect("infallible")
    });
    let control = calls(|| {
        let encoded = map.get(&format!("user:{}", 42)).expect("it is there");
        rmp_serde::from_slice::<User>(&encoded).expect("what was encoded")
    });
    table.add(compare("hit of `get_or_load`, a struct / a map, and decoded".into(), guarded, control));
}
