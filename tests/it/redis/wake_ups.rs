//! Promise 3 for whole calls: a caller in another node is woken, however a load ends, and however close to that end the caller begins to
//! wait. (`tests/contract/wake_ups.rs` runs 10,000 such races on the protocol alone.)

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::*;
use crate::support::probe::assert_nothing_left;

const ROUNDS: usize = 2_000;
const LANES: usize = 16;
/// A waiter whose wake-up was lost would sleep until this lease ends, which is longer than the test waits for it.
const LEASE: Duration = Duration::from_secs(120);

async fn shift(most: u8) {
    for _ in 0..fastrand::u8(..=most) {
        tokio::task::yield_now().await;
    }
}

/// Two nodes request one cold key at about the same moment. `end`: 0 all loads succeed; 1 the first load, and any of the first node,
/// fails; 2 the first panics; 3 a caller of the first node may leave before its load ends.
async fn race(guards: [StampedeGuard; 2], key: String, end: usize, loads: Arc<AtomicUsize>) {
    let load = |fails: bool| {
        let loads = Arc::clone(&loads);
        move || async move {
            let first = loads.fetch_add(1, Ordering::SeqCst) == 0;
            shift(12).await;
            match end {
                1 if fails || first => Err("no".to_owned()),
                2 if first => panic!("scripted"),
                _ => Ok(1u8),
            }
        }
    };
    let one = async {
        shift(4).await;
        let call = guards[0].get_or_load(&*key, load(true));
        if end == 3 {
            // The caller leaves, and its load continues.
            let _ = tokio::time::timeout(Duration::from_micros(fastrand::u64(..1_500)), call).await;
        } else {
            drop(call.await);
        }
    };
    let other = async {
        shift(16).await;
        drop(guards[1].get_or_load(&*key, load(false)).await);
    };
    let both = tokio::time::timeout(SOON, futures_util::future::join(one, other)).await;
    assert!(both.is_ok(), "{key}, end {end}: a wake-up was lost");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn callers_that_begin_to_wait_as_the_load_ends_are_notified() {
    let server = RedisServer::start();
    let guards = [local(&server, lease_of(LEASE)).await, local(&server, lease_of(LEASE)).await];
    let lanes = (0..LANES).map(|lane| {
        let mut guards = guards.clone();
        tokio::spawn(async move {
            for round in 0..ROUNDS / LANES {
                guards.swap(0, 1);
                race(guards.clone(), format!("{lane}-{round}"), round % 4, Arc::default()).await;
            }
        })
    });
    for ended in join_all(lanes).await {
        ended.expect("no wake-up is lost");
    }
    settled(&guards).await;
    let coalesced: u64 = guards.iter().map(|guard| guard.stats().coalesced).sum();
    assert!(coalesced > ROUNDS as u64 / 20, "{coalesced} waits of {ROUNDS}: these were no races");
    // Outcomes of failed loads are kept for two leases. Apart from them and from entries, no key may be left.
    let left: Vec<_> = server.keys().into_iter().filter(|key| !key.starts_with("sg1:o:")).collect();
    assert!(left.iter().all(|key| key.starts_with("sg1:e:")), "{left:?}");
    server.flush_all();
    assert_nothing_left(&server, SOON).await;
}
