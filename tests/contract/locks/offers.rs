//! An offered mutex: the first take may have it, until the head of the queue has waited for the bound.

use super::*;
use crate::store::lock_store::Offer;

contract! {
    an_offered_mutex_goes_to_the_take_that_comes_first,
    a_head_that_has_waited_for_the_bound_is_handed_the_mutex,
    a_waiter_that_does_not_barge_is_handed_the_mutex_at_once,
    a_head_that_is_dead_does_not_keep_the_next_one_asleep,
    when_the_head_leaves_the_next_waiter_is_told,
    an_offer_of_another_token_changes_nothing,
    a_barging_take_is_idempotent,
}

/// A bound that no case outlives.
const LONG: Duration = LEASE;
/// A bound that has passed when the next command runs.
const OVER: Duration = Duration::from_micros(1);

impl Asker {
    async fn barge(&self) -> Taken {
        self.take(Take { barges: true, ..self.ask() }).await
    }

    #[track_caller]
    fn must_barge(&self) -> impl Future<Output = u64> + '_ {
        let caller = std::panic::Location::caller();
        async move {
            match self.barge().await {
                Taken::Granted { fence } => fence,
                busy => panic!("{caller}: {busy:?}"),
            }
        }
    }

    #[track_caller]
    fn must_queue(&self) -> impl Future<Output = ()> + '_ {
        let caller = std::panic::Location::caller();
        async move {
            let taken = self.barge().await;
            assert!(matches!(taken, Taken::Busy { .. }), "{caller}: {taken:?}");
        }
    }

    async fn offer(&self, bound: Duration) -> bool {
        let offer = Offer { ttl: Some(LEASE), bound };
        self.node.locks().offer_mutex(&self.name, &self.token, offer, WITHIN).await.expect("offer")
    }

    /// Waits until the asker is told to look; it must not be handed the mutex.
    #[track_caller]
    fn told_to_look(&self) -> impl Future<Output = ()> + '_ {
        let caller = std::panic::Location::caller();
        async move {
            loop {
                let told = self.told().await;
                assert_eq!(told.granted, None, "{caller}");
                if told.missed {
                    return;
                }
            }
        }
    }
}

/// A holder and a waiter; both barge.
async fn two(world: &World) -> (Asker, u64, Asker) {
    let holder = Asker::apart(world, &mutex("k")).await;
    let fence = holder.must_barge().await;
    holder.wait.hold();
    let waiter = Asker::apart(world, &mutex("k")).await;
    waiter.must_queue().await;
    (holder, fence, waiter)
}

async fn an_offered_mutex_goes_to_the_take_that_comes_first(world: &World) {
    let (holder, first, waiter) = two(world).await;
    assert!(holder.offer(LONG).await);
    waiter.told_to_look().await;
    assert!(waiter.look().await.is_none(), "it is free");
    let newcomer = Asker::apart(world, &mutex("k")).await;
    let second = newcomer.must_barge().await;
    newcomer.wait.hold();
    waiter.must_queue().await;
    let last = Asker::apart(world, &mutex("k")).await;
    last.must_queue().await;
    assert!(newcomer.offer(LONG).await);
    waiter.told_to_look().await;
    let third = waiter.must_barge().await;
    waiter.wait.hold();
    assert!(first < second && second < third, "{first} < {second} < {third}");
    assert!(waiter.offer(LONG).await);
    last.told_to_look().await;
    last.must_barge().await;
    assert!(last.offer(LONG).await && last.look().await.is_none());
    assert!(Asker::apart(world, &mutex("k")).await.must_take().await > third, "no place is left");
}

async fn a_head_that_has_waited_for_the_bound_is_handed_the_mutex(world: &World) {
    let (holder, first, waiter) = two(world).await;
    let next = Asker::apart(world, &mutex("k")).await;
    next.must_queue().await;
    assert!(holder.offer(OVER).await);
    let second = waiter.granted().await;
    waiter.claim(world, Some(LEASE)).await;
    assert!(second > first && waiter.owns().await);
    Asker::apart(world, &mutex("k")).await.must_queue().await;
    assert!(waiter.offer(OVER).await);
    assert!(next.granted().await > second);
}

/// A waiter that joined by an ordinary take has no recorded moment of arrival.
async fn a_waiter_that_does_not_barge_is_handed_the_mutex_at_once(world: &World) {
    let holder = Asker::apart(world, &mutex("k")).await;
    holder.must_barge().await;
    let waiter = Asker::waiting(world, &mutex("k")).await;
    assert!(holder.offer(LONG).await);
    waiter.granted().await;
    assert!(waiter.owns().await);
}

async fn a_head_that_is_dead_does_not_keep_the_next_one_asleep(world: &World) {
    let holder = Asker::apart(world, &mutex("k")).await;
    holder.must_barge().await;
    holder.wait.hold();
    let dead = Asker::apart(world, &mutex("k")).await;
    dead.must_queue().await;
    let waiter = Asker::apart(world, &mutex("k")).await;
    waiter.must_queue().await;
    drop(dead);
    // The server notices the closed connection only when it reads from it.
    until(async || {
        assert!(holder.offer(LONG).await);
        let is_told = timeout(ms(100), waiter.told_to_look()).await.is_ok();
        if !is_told {
            holder.must_barge().await;
        }
        is_told
    })
    .await;
    waiter.must_barge().await;
}

async fn when_the_head_leaves_the_next_waiter_is_told(world: &World) {
    let (holder, _, head) = two(world).await;
    let next = Asker::apart(world, &mutex("k")).await;
    next.must_queue().await;
    assert!(holder.offer(LONG).await);
    head.told_to_look().await;
    head.wait.hold();
    while timeout(Duration::ZERO, next.wait.told()).await.is_ok() {}
    assert!(!head.offer(LONG).await, "it leaves, and held nothing");
    next.told_to_look().await;
    next.must_barge().await;
}

async fn an_offer_of_another_token_changes_nothing(world: &World) {
    let (holder, _, waiter) = two(world).await;
    let other = Asker::apart(world, &mutex("k")).await;
    assert!(!other.offer(OVER).await);
    assert!(holder.owns().await);
    assert!(holder.offer(OVER).await);
    waiter.granted().await;
    assert!(!holder.offer(OVER).await && waiter.owns().await, "sent again");
}

async fn a_barging_take_is_idempotent(world: &World) {
    let (holder, fence, waiter) = two(world).await;
    assert_eq!(holder.must_barge().await, fence);
    waiter.must_queue().await;
    assert!(holder.offer(OVER).await);
    let fence = waiter.granted().await;
    assert_eq!(waiter.must_barge().await, fence);
    assert!(waiter.offer(LONG).await && waiter.look().await.is_none(), "it was queued once");
}
