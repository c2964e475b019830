//! Promise 9: what a memory store holds is bounded, and goes without anybody asking for it again.

use std::convert::Infallible;
use std::time::Duration;

use bytes::Bytes;

use super::MemoryStore;
use crate::StampedeGuard;
use crate::key::{CacheKey, Key};
use crate::store::{Acquire, Fail, Store as _, Token};

const MINUTE: Duration = Duration::from_secs(60);

/// What is left of loads of so many keys, once their time is over and others have been used.
async fn left_behind(guard: &StampedeGuard, store: &MemoryStore) -> usize {
    tokio::time::advance(60 * MINUTE).await;
    for number in 0..100u32 {
        let value = guard.get_or_load(("later", number), || async { Ok::<_, Infallible>(1u8) }).await;
        assert_eq!(value.expect("loaded"), 1);
    }
    let records = store.records();
    assert_eq!(records.bytes, records.by_name.iter().map(|(name, record)| record.bytes(name)).sum::<usize>());
    records.by_name.len()
}

#[tokio::test(start_paused = true)]
async fn loads_that_failed_are_forgotten() {
    let store = MemoryStore::new();
    let guard = StampedeGuard::new(store.clone());
    for number in 0..10_000u32 {
        let failed = guard.get_or_load::<u8, _, _, _>(("key", number), || async { Err("no") }).await;
        assert!(failed.is_err());
    }
    let left = left_behind(&guard, &store).await;
    assert!(left <= 200, "{left}");
}

#[tokio::test(start_paused = true)]
async fn loads_that_stored_nothing_are_forgotten() {
    let store = MemoryStore::new();
    let guard = StampedeGuard::new(store.clone());
    for number in 0..10_000u32 {
        let load = guard.get_or_load_with(("key", number), move |mut cx| async move {
            if number % 2 == 0 {
                cx.do_not_store()
            } else {
                cx.fresh_for(Duration::ZERO)
            }
            Ok::<_, Infallible>((number % 7) as u8)
        });
        load.await.expect("loaded");
    }
    let left = left_behind(&guard, &store).await;
    assert!(left <= 200, "{left}");
}

/// Those who waited and died, with the holder they waited for: the map is looked through when it has doubled.
#[tokio::test(start_paused = true)]
async fn leases_and_queues_of_the_dead_are_forgotten() {
    const AT_ONCE: u32 = 10_000;
    let store = MemoryStore::new();
    let node = store.clone().into_node();
    for number in 0..5 * AT_ONCE {
        let key = Key::new("ns", &CacheKey::from(("key", number)));
        for _ in 0..2 {
            let token = Token::mint(node.node());
            let ask = Acquire { token: &token, lease: MINUTE, seen: None, behind: None, queue: true };
            node.acquire(&key, ask, MINUTE).await.expect("asks");
        }
        if number % AT_ONCE == 0 {
            tokio::time::advance(60 * MINUTE).await;
        }
        let left = store.records().by_name.len();
        assert!(left <= 2 * AT_ONCE as usize, "{left}");
    }
}

async fn fail(store: &MemoryStore, number: u32, outcome: usize) -> Token {
    let node = store.clone().into_node();
    let (key, token) = (Key::new("ns", &CacheKey::from(("key", number))), Token::mint(node.node()));
    let ask = Acquire { token: &token, lease: MINUTE, seen: None, behind: None, queue: true };
    node.acquire(&key, ask, MINUTE).await.expect("asks");
    let fail = Fail {
        token: &token,
        outcome: Bytes::from(vec![0; outcome]),
        keep: MINUTE,
        replay: Duration::ZERO,
        seen: None,
        marker: None,
    };
    node.fail(&key, fail, MINUTE).await.expect("asks");
    token
}

/// What is left for waiters has its part of the room, at the cost of entries and not of other waiters.
#[tokio::test(start_paused = true)]
async fn outcomes_count_for_the_capacity() {
    let store = MemoryStore::with_capacity(10_000);
    let guard = StampedeGuard::new(store.clone());
    guard.insert("entry", &1u8).await.expect("stored");
    for number in 0..100 {
        fail(&store, number, 1_000).await;
        assert!(store.records().bytes <= 10_000);
    }
    let left =
        |records: &super::Records| records.by_name.values().filter(|left| left.ending.is_some()).count();
    assert_eq!(left(&store.records()), 9);
    assert!(store.is_empty(), "the entry gave way");
    tokio::time::advance(MINUTE).await;
    guard.insert("entry", &1u8).await.expect("stored");
    assert_eq!((store.len(), left(&store.records())), (1, 0));
}
