//! Checks of the registry of lease waiters. `main.rs` and `exhaustive.rs` include them and run them under different schedulers.

use super::sync::{Arc, AtomicUsize, Ordering};
use super::watch::{Hint, LeaseWaiters};
use super::{block_on, thread};

/// Stands in for the store's token: the registry needs nothing else of the store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Token(u8);

/// Invariant 3 of the store: a waiter that registers before it finds the lease held is notified when the lease ends, whenever that is.
pub(crate) fn every_waiter_is_notified(waiters: u8) {
    let watches = Arc::new(LeaseWaiters::default());
    let held = Arc::new(AtomicUsize::new(1));
    let waiters: Vec<_> = (0..waiters)
        .map(|token| {
            let (watches, held) = (Arc::clone(&watches), Arc::clone(&held));
            thread::spawn(move || {
                let watch = watches.register("k", &Token(token));
                while held.load(Ordering::SeqCst) == 1 {
                    // A hint may be about another event, so this looks again.
                    block_on(watch.hints());
                }
                watch.close();
            })
        })
        .collect();
    let others = {
        let watches = Arc::clone(&watches);
        thread::spawn(move || {
            watches.notify("k", &Hint::Invalidated);
        })
    };
    held.store(0, Ordering::SeqCst);
    watches.notify("k", &Hint::Finished(None));
    others.join().expect("no panic");
    for waiter in waiters {
        waiter.join().expect("no panic");
    }
}

/// The waiter receives a grant exactly if `notify` returns true. Other waiters come and go meanwhile.
pub(crate) fn a_grant_is_received_or_handed_on(others: u8) {
    let watches = Arc::new(LeaseWaiters::default());
    let received = Arc::new(AtomicUsize::new(0));
    let watch = watches.register("k", &Token(0));
    let leaves = {
        let received = Arc::clone(&received);
        thread::spawn(move || {
            // A waiter that leaves receives the grant that arrived before, and hands it on.
            if watch.close().granted.is_some() {
                received.fetch_add(1, Ordering::SeqCst);
            }
        })
    };
    let others: Vec<_> = (1..=others)
        .map(|token| {
            let watches = Arc::clone(&watches);
            thread::spawn(move || watches.register("k", &Token(token)).close())
        })
        .collect();
    let is_delivered = watches.notify("k", &Hint::Granted { token: Token(0), hops: 0 });
    leaves.join().expect("no panic");
    for other in others {
        assert_eq!(other.join().expect("no panic").granted, None, "the grant is for another token");
    }
    assert!(received.load(Ordering::SeqCst) == usize::from(is_delivered), "delivered {is_delivered}");
}
