//! Promise 9: a memory store's data is bounded, and is dropped after its time even if its keys are not used again.

use std::convert::Infallible;
use std::time::Duration;

use bytes::Bytes;

use super::MemoryStore;
use super::records::AROUND;
use crate::key::{CacheKey, Key};
use crate::store::{Acquire, Fail, OlderEntry, Token};
use crate::{Backend, Policy, StampedeGuard};

const MINUTE: Duration = Duration::from_secs(60);

/// Lets an hour pass, loads 100 other keys, and returns how many records the store has afterwards, including those 100.
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
async fn outcomes_of_failed_loads_are_dropped() {
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
async fn records_of_loads_that_stored_nothing_are_dropped() {
    let store = MemoryStore::new();
    let guard = StampedeGuard::new(store.clone());
    for number in 0..10_000u32 {
        let load = guard.load(("key", number)).get(move |mut cx| async move {
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

/// Holders and waiters have died. Their records are dropped by a sweep, whenever the map has doubled since the last one.
#[tokio::test(start_paused = true)]
async fn leases_and_queues_of_dead_processes_are_dropped() {
    const AT_ONCE: u32 = 10_000;
    let store = MemoryStore::new();
    let node = Backend::from(store.clone()).node(MINUTE);
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
    let node = Backend::from(store.clone()).node(MINUTE);
    let (key, token) = (Key::new("ns", &CacheKey::from(("key", number))), Token::mint(node.node()));
    let ask = Acquire { token: &token, lease: MINUTE, seen: None, behind: None, queue: true };
    node.acquire(&key, ask, MINUTE).await.expect("asks");
    let fail = Fail {
        token: &token,
        outcome: Bytes::from(vec![0; outcome]),
        keep: MINUTE,
        replay: Duration::ZERO,
        seen: None,
        older: OlderEntry::Stays,
    };
    node.fail(&key, fail, MINUTE).await.expect("asks");
    token
}

/// Outcomes count for the store's capacity, too. When it is used up, entries are dropped before outcomes.
#[tokio::test(start_paused = true)]
async fn outcomes_count_for_the_capacity() {
    let store = MemoryStore::with_capacity(15_000);
    let guard = StampedeGuard::new(store.clone());
    guard.insert("entry", &1u8).await.expect("stored");
    for number in 0..100 {
        fail(&store, number, 1_000).await;
        assert!(store.records().bytes <= 15_000);
    }
    let left =
        |records: &super::KeyRecords| records.by_name.values().filter(|left| left.ending.is_some()).count();
    assert_eq!(left(&store.records()), 10);
    assert!(store.is_empty(), "the entry gave way");
    tokio::time::advance(MINUTE).await;
    guard.insert("entry", &1u8).await.expect("stored");
    assert_eq!((store.len(), left(&store.records())), (1, 0));
}

fn tag(number: u32) -> Key {
    Key::new("ns", &CacheKey::from(("tag", number)))
}

/// Asserts the bounds of the store. Each id and each list takes at least [`AROUND`] bytes, in addition to its name and its value.
fn assert_bounded(store: &MemoryStore, capacity: usize) {
    let records = store.records();
    let most = capacity / 4 / AROUND;
    assert!(records.used() <= capacity, "{}", records.used());
    assert!(records.tags.len() <= most && records.lists.len() <= most, "at most {most} of either");
}

/// Each value has its own tag. Without a bound, their ids would stay for a day, beyond the store's capacity.
#[tokio::test(start_paused = true)]
async fn the_ids_of_tags_and_the_lists_of_variants_are_bounded() {
    const CAPACITY: usize = 16_384;
    let store = MemoryStore::with_capacity(CAPACITY);
    let guard = StampedeGuard::new(store.clone());
    let node = Backend::from(store.clone()).node(MINUTE);
    guard.insert_with_tags("old", &1u8, ["other"]).await.expect("stored");
    for number in 0..2_000u32 {
        guard.insert_with_tags(("key", number), &1u8, [("tag", number)]).await.expect("stored");
        assert_eq!(guard.get::<u8>(("key", number)).await.expect("answered"), Some(1));
        assert!(node.enlist(&tag(number), [1; 8], 2, MINUTE * 60).await.expect("listed"));
        assert!(node.enlist(&tag(number), [2; 8], 2, MINUTE * 60).await.expect("listed"));
        assert_bounded(&store, CAPACITY);
    }
    // When a tag whose id was dropped is used again, it has a new id, so older values with that tag are outdated.
    guard.insert_with_tags("new", &2u8, ["other"]).await.expect("stored");
    assert_eq!(guard.get::<u8>("old").await.expect("answered"), None);
    assert_eq!(guard.get::<u8>("new").await.expect("answered"), Some(2));
    // A value that is larger than the free room displaces other data.
    guard.insert("large", &vec![0u8; CAPACITY * 7 / 8]).await.expect("stored");
    assert!(guard.contains("large").await.expect("answered"));
    assert_bounded(&store, CAPACITY);
}

/// Otherwise, tags that only one value has would displace the tags that are read all the time.
#[tokio::test(start_paused = true)]
async fn an_id_that_is_read_outlives_those_that_are_not() {
    let store = MemoryStore::with_capacity(1 << 20);
    let guard = StampedeGuard::new(store.clone());
    let hot = guard.with_policy(Policy::builder().tags(["hot"]).build().expect("valid"));
    hot.insert("hot", &1u8).await.expect("stored");
    let node = Backend::from(store.clone()).node(MINUTE);
    for number in 0..10_000u32 {
        node.tag_ids(&[tag(number)], MINUTE * 60, MINUTE).await.expect("made");
        if number % 100 == 0 {
            assert_eq!(hot.get::<u8>("hot").await.expect("answered"), Some(1), "after {number}");
        }
    }
}

/// A scan of all ids, or of all lists, at each new one would hold the store's lock for too long.
#[tokio::test]
async fn each_of_many_tags_costs_as_much_as_the_first() {
    const MANY: u32 = 30_000;
    let node = Backend::from(MemoryStore::new()).node(MINUTE);
    let started = std::time::Instant::now();
    for number in 0..MANY {
        node.tag_ids(&[tag(number)], MINUTE, MINUTE).await.expect("made");
        node.enlist(&tag(number), [0; 8], 1, MINUTE).await.expect("listed");
        assert!(started.elapsed() < Duration::from_secs(8), "{number}");
    }
}

#[tokio::test(start_paused = true)]
async fn unused_ids_and_lists_are_dropped() {
    let store = MemoryStore::new();
    let node = Backend::from(store.clone()).node(MINUTE);
    for number in 0..50_000 {
        node.tag_ids(&[tag(number)], MINUTE, MINUTE).await.expect("made");
        node.enlist(&tag(number), [0; 8], 1, MINUTE).await.expect("listed");
        if number % 1_000 == 0 {
            tokio::time::advance(MINUTE).await;
        }
    }
    let records = store.records();
    assert!(records.tags.len() <= 2_000, "{}", records.tags.len());
    assert!(records.lists.len() <= 2_000, "{}", records.lists.len());
}
