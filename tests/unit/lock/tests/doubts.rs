//! Holders that may have missed the message that their lock was taken away.

use std::sync::Arc;

use super::faults::held;
use super::faulty::{Fate, Faulty, Script};
use super::*;
use crate::lock::LockTarget as _;
use crate::store::StoreErrorKind;
use crate::store::wake_locks::LockHints;

/// A holder in doubt asks the store. A store that hangs does not delay the end of the lease.
#[tokio::test(start_paused = true)]
async fn a_holder_in_doubt_asks_and_learns_of_its_end_in_time() {
    let missed = LockHints { missed: true, ..LockHints::default() };
    let target = Faulty::new(&Locks::in_memory(), ms(60_000), &[]);
    let hold = held(&target).await;
    hold.hold_state.note(&missed);
    let lost = waiting({
        let hold_state = Arc::clone(&hold.hold_state);
        async move { hold_state.lost().await }
    })
    .await;
    assert_eq!(target.commands(), ["take", "look"], "it still holds it");
    lost.abort();

    let script: Script<'_> = &[("look", &[Fate::Lost(StoreErrorKind::TimedOut); 3])];
    let target = Faulty::new(&Locks::in_memory(), ms(900), script);
    let hold = held(&target).await;
    hold.hold_state.note(&missed);
    assert_eq!(timed(Arc::clone(&hold.hold_state).lost()).await.0, ms(889));
}

/// A listener that has begun to ask may be dropped: the others ask themselves.
#[tokio::test(start_paused = true)]
async fn a_doubt_outlives_the_listener_that_took_it() {
    let target = Faulty::new(&Locks::in_memory(), ms(60_000), &[("look", &[Fate::Late(ms(100)); 2])]);
    let hold = held(&target).await;
    let listens = || {
        let hold_state = Arc::clone(&hold.hold_state);
        waiting(async move { hold_state.lost().await })
    };
    let other = listens().await;
    let locks = &target.registry().store;
    // Frees the lock without a message to its holder.
    let freed = locks.free_mutex(target.name(), &hold.hold_state.token, target.ttl(), ms(1000)).await;
    assert!(freed.expect("asks"));
    hold.hold_state.note(&LockHints { missed: true, ..LockHints::default() });
    let one = listens().await;
    assert!(target.commands().contains(&"look"));
    one.abort();
    let (took, lost) = timed(other).await;
    lost.expect("no panic");
    assert!(took <= ms(200), "{took:?}");
}
