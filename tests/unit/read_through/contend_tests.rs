//! How a flight's attempt to get the lease ends: one case for each exit of the loop, on a memory store.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::time::{Instant, sleep};

use super::*;
use super::{SHORTEST_WAIT, UNSURE_WAIT, sleep_for};
use crate::guard::StampedeGuard;
use crate::key::{CacheKey, Key};
use crate::observe::FlightId;
use crate::policy::Budget;
use crate::policy::Policy;
use crate::read_through::lease::Lease;
use crate::store::memory::MemoryStore;
use crate::store::wake_leases::Hints;
use crate::store::{Token, TokenCheck};
use crate::value::FlightOutcome;
use crate::value::StoredEntry;
use crate::value::entry::Expiry;
use crate::value::entry::{Encoding, Entry, EntryKind};

/// One process and its flight of the key, with the entry that the flight has rejected.
struct Side {
    guard: StampedeGuard,
    key: Key,
    rejected: Option<Arc<StoredEntry>>,
    queue: bool,
    /// How long ago the flight began.
    began: Duration,
    span: tracing::Span,
    waits_for: Option<FlightId>,
}

impl Side {
    fn on(store: &MemoryStore) -> Self {
        Self::at(StampedeGuard::new(store.clone()))
    }

    fn at(guard: StampedeGuard) -> Self {
        let key = guard.key(CacheKey::from("k")).expect("a key");
        let span = tracing::Span::none();
        Self { guard, key, rejected: None, queue: true, began: Duration::ZERO, span, waits_for: None }
    }

    fn now(&self) -> u64 {
        self.guard.parts().0.store.now()
    }

    fn request<'a>(&'a mut self, budget: &'a mut Budget) -> AcquireRequest<'a> {
        let (state, policy) = self.guard.parts();
        AcquireRequest {
            state,
            key: &self.key,
            policy,
            queue: self.queue,
            rejected: &mut self.rejected,
            budget,
            tags: &[],
            since: state.store.clock_at(Instant::now() - self.began),
            deadline: Instant::now() + policy.lease * 4,
            goes_on: &|| None,
            span: &self.span,
            waits_for: &mut self.waits_for,
            batch: None,
        }
    }

    async fn contend(&mut self) -> AcquireOutcome {
        let mut budget = self.guard.parts().1.budget();
        contend(self.request(&mut budget)).await
    }

    async fn leads(&mut self) -> Lease {
        match self.contend().await {
            AcquireOutcome::Leased(lease) => lease,
            other => panic!("{}", name(&other)),
        }
    }

    /// Takes the lease, and stores a value under it.
    async fn stores(&mut self, entry: &Entry) {
        let bytes = entry.encode(&self.key);
        assert_eq!(self.leads().await.commit(bytes, Duration::from_secs(60)).await, Some(TokenCheck::Held));
    }
}

fn name(contended: &AcquireOutcome) -> String {
    match contended {
        AcquireOutcome::Leased(_) => "leased".to_owned(),
        AcquireOutcome::Ended { outcome, .. } => format!("ended: {outcome:?}"),
        AcquireOutcome::Busy(left) => format!("busy for {left:?}"),
        AcquireOutcome::WaitedOut => "waited out".to_owned(),
        AcquireOutcome::StoreDown(error) => format!("down: {error:?}"),
        AcquireOutcome::Leaving => "leaving".to_owned(),
    }
}

/// A value that was stored at `stored_at` and is fresh until `fresh_until`, in milliseconds.
fn value(stored_at: u64, fresh_until: u64) -> Entry {
    Entry {
        kind: EntryKind::Value,
        encoding: Encoding::RAW,
        stored_at,
        tag_expired_at: u64::MAX,
        expiry: Expiry { fresh_until, ..Expiry::default() },
        validator: Box::default(),
        tags: crate::value::entry::TagList::default(),
        payload: Bytes::from_static(b"v"),
        packed: Default::default(),
    }
}

fn is_value(contended: &AcquireOutcome) -> bool {
    matches!(contended, AcquireOutcome::Ended { outcome: FlightOutcome::Value(entry), .. } if entry.payload == "v")
}

#[tokio::test(start_paused = true)]
async fn a_fresh_value_ends_the_attempt_however_old() {
    let store = MemoryStore::new();
    let (mut one, mut other) = (Side::on(&store), Side::on(&store));
    let now = one.now();
    one.stores(&value(now - 5_000, now + 5_000)).await;
    let found = other.contend().await;
    assert!(is_value(&found), "{}", name(&found));
}

/// The store compares the bytes that the flight has seen with the stored bytes. Another version of the compressor makes different bytes of
/// the same value, so the flight sends the bytes that it has read and does not compress again.
#[cfg(feature = "lz4")]
#[tokio::test(start_paused = true)]
async fn a_compressed_entry_that_was_seen_is_not_found_again() {
    use crate::value::entry::Packed;

    let store = MemoryStore::new();
    let (mut one, mut other) = (Side::on(&store), Side::on(&store));
    sleep(Duration::from_secs(2)).await;
    let now = one.now();
    let text = Bytes::from(vec![b'v'; 1020]);
    // This block has only literals. No compressor makes such a block of a repetitive text.
    let literals = [&[0xf0, 255, 255, 255, 1020_u16.wrapping_sub(15 + 3 * 255) as u8][..], &text].concat();
    let block = [&1020_u32.to_le_bytes()[..], &literals].concat();
    let (packed, payload) = Packed::unpack(block.into(), 1020).expect("a block");
    assert_ne!(packed, Packed::of(&text, 0));
    let compressed = Entry { payload, packed, ..value(now - 1_000, now - 500) };
    one.stores(&compressed).await;
    let raw = compressed.encode(&one.key);
    let seen = Entry::decode(raw, &one.key, 1020).expect("sound");
    assert_eq!(seen.payload, text);
    let seen = Arc::new(StoredEntry::new(Ok(seen)));
    other.rejected = Some(Arc::clone(&seen));
    let lease = other.leads().await;
    assert!(other.rejected.as_ref().is_some_and(|rejected| Arc::ptr_eq(rejected, &seen)), "not found again");
    lease.hand_over(0).await;
    // When a value stands in for a failed load, it is stored again with new times, and other flights must be able to read it.
    let again = Entry { expiry: Expiry { fresh_until: now + 5_000, ..compressed.expiry }, ..compressed };
    one.rejected = Some(seen);
    one.stores(&again).await;
    let mut third = Side::on(&store);
    let found = third.contend().await;
    assert!(
        matches!(&found, AcquireOutcome::Ended { outcome: FlightOutcome::Value(entry), .. } if entry.payload == text),
        "{}",
        name(&found)
    );
}

/// A value that was stored after the flight began may be used by it, even if the value has no lifetime.
#[tokio::test(start_paused = true)]
async fn a_value_without_a_lifetime_is_for_flights_that_had_begun() {
    let store = MemoryStore::new();
    let (mut one, mut other) = (Side::on(&store), Side::on(&store));
    // The clock of a memory store starts when the store is made.
    sleep(Duration::from_secs(2)).await;
    let now = one.now();
    one.stores(&value(now - 1_000, now - 1_000)).await;
    other.began = Duration::from_millis(1_000);
    let found = other.contend().await;
    assert!(is_value(&found), "{}", name(&found));
    // The value was stored before this flight began, so this flight leads. It remembers the value as rejected, and does not find it again.
    other.began = Duration::from_millis(999);
    let lease = other.leads().await;
    assert_eq!(
        other.rejected.as_ref().and_then(|rejected| rejected.value()),
        Some(&value(now - 1_000, now - 1_000))
    );
    lease.hand_over(0).await;
}

/// Such a value is newer than the flight, although the process that stored it may have read the store's clock a little earlier.
#[tokio::test(start_paused = true)]
async fn a_value_that_the_flight_waited_for_is_taken_whenever_it_was_stored() {
    let store = MemoryStore::new();
    let (mut one, mut other) = (Side::on(&store), Side::on(&store));
    let old = value(one.now() - 10, one.now() - 10);
    let lease = one.leads().await;
    let bytes = old.encode(&one.key);
    let (found, stored) = tokio::join!(biased; other.contend(), lease.commit(bytes, Duration::from_secs(60)));
    assert!(stored == Some(TokenCheck::Held) && is_value(&found), "{}", name(&found));
}

#[tokio::test(start_paused = true)]
async fn a_flight_that_does_not_queue_learns_the_remaining_lease() {
    let store = MemoryStore::new();
    let (mut one, mut other) = (Side::on(&store), Side::on(&store));
    let lease = one.leads().await;
    other.queue = false;
    let found = other.contend().await;
    assert!(matches!(found, AcquireOutcome::Busy(left) if left == lease.ttl), "{}", name(&found));
    lease.hand_over(0).await;
    // No waiter was in the queue, so the hand-over has freed the lease.
    other.leads().await.hand_over(0).await;
}

#[tokio::test(start_paused = true)]
async fn an_unreadable_entry_is_remembered_and_loaded_over() {
    let store = MemoryStore::new();
    let (mut one, mut other) = (Side::on(&store), Side::on(&store));
    one.stores(&value(one.now(), one.now() + 5_000)).await;
    store.spoil(one.key.name(), 4);
    other.leads().await.hand_over(0).await;
    assert!(
        other.rejected.as_ref().is_some_and(|rejected| rejected.value().is_none()),
        "seen, and not a value"
    );
}

/// A read of the entry does not read the ids of its tags, so they are checked when the entry is found.
#[tokio::test(start_paused = true)]
async fn a_value_with_an_invalidated_tag_is_loaded_over() {
    let store = MemoryStore::new();
    let (one, mut other) = (Side::on(&store), Side::on(&store));
    let tagged = one.guard.with_policy(Policy::builder().tags(["t"]).build().expect("valid"));
    let load = || async { Ok::<_, String>(Bytes::from_static(b"v")) };
    tagged.get_or_load("k", load).await.expect("loaded");
    let found = other.contend().await;
    assert!(is_value(&found), "{}", name(&found));
    tagged.invalidate_tag("t").await.expect("invalidated");
    other.leads().await.hand_over(0).await;
}

#[path = "contend_chaos_tests.rs"]
mod on_chaos;

/// How a lease is renewed while its load runs. Each lease takes 3 s, so a third of it is 1 s.
mod keep {
    use super::*;
    use crate::read_through::lease::LeaseEvent;
    use crate::store::wake_leases::{Hint, LeaseWaiters};
    use crate::testing::{ChaosStore, Fault};
    use tokio::time::timeout;

    struct RenewedLease {
        guard: StampedeGuard,
        chaos: ChaosStore,
        lease: Lease,
        /// The registry through which the test sends the lease holder any message.
        hints: Arc<LeaseWaiters>,
        began: Instant,
        before: u64,
    }

    impl RenewedLease {
        async fn new() -> Self {
            let chaos = ChaosStore::new(1);
            let policy = Policy::builder().lease(Duration::from_secs(3)).build().expect("valid");
            let guard = StampedeGuard::builder(chaos.replica()).policy(policy).build().expect("valid");
            let mut side = Side::at(guard.clone());
            let (mut lease, hints) = (side.leads().await, Arc::<LeaseWaiters>::default());
            lease.watch = hints.register(lease.key.name(), &lease.token);
            let before = chaos.commands();
            Self { guard, chaos, lease, hints, began: Instant::now(), before }
        }

        /// Renews the lease for `ms`, for a load that may take until `end`. Returns the event that ended the renewals, if any, and when it
        /// did.
        async fn during(&self, ms: u64, end: u64, now: bool) -> Option<(LeaseEvent, u64)> {
            let end = self.began + Duration::from_millis(end);
            let event = timeout(Duration::from_millis(ms), self.lease.keep(end, now)).await.ok()?;
            Some((event, self.began.elapsed().as_millis() as u64))
        }

        fn renewals(&self) -> u64 {
            self.chaos.commands() - self.before
        }

        fn remaining(&self) -> u128 {
            let held = self.chaos.store().lease(self.lease.key.name());
            held.filter(|(holder, _)| *holder == self.lease.token).expect("it is ours").1.as_millis()
        }

        fn notify(&self, hint: &Hint) {
            assert!(self.hints.notify(self.lease.key.name(), hint), "it listens");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_lease_is_renewed_at_each_third_of_its_time() {
        let renewed = RenewedLease::new().await;
        assert_eq!(renewed.during(2_500, 60_000, false).await, None);
        assert_eq!((renewed.renewals(), renewed.remaining()), (2, 2_500));
    }

    #[tokio::test(start_paused = true)]
    async fn a_lease_in_doubt_is_renewed_at_once() {
        let renewed = RenewedLease::new().await;
        assert_eq!(renewed.during(500, 60_000, true).await, None);
        assert_eq!((renewed.renewals(), renewed.remaining()), (1, 2_500));
        // The next renewal follows after a third of the lease.
        assert_eq!(renewed.during(999, 60_000, false).await, None);
        assert_eq!(renewed.renewals(), 1);
    }

    /// If a holder is paused during a renewal, it delays the waiters for no longer than its load could have taken.
    #[tokio::test(start_paused = true)]
    async fn a_lease_is_not_renewed_beyond_the_load_and_the_time_to_publish() {
        let renewed = RenewedLease::new().await;
        assert_eq!(renewed.during(1_200, 1_500, false).await, None);
        assert_eq!(renewed.remaining(), 1_500 - 200);
        assert_eq!(renewed.during(1_300, 1_500, false).await, None);
        assert_eq!((renewed.renewals(), renewed.remaining()), (2, 1_000 - 300));
    }

    #[tokio::test(start_paused = true)]
    async fn an_invalidation_ends_the_lease_and_a_missed_message_causes_a_renewal() {
        let renewed = RenewedLease::new().await;
        renewed.hints.notify_all_missed();
        assert_eq!(renewed.during(500, 60_000, false).await, None);
        assert_eq!((renewed.renewals(), renewed.remaining()), (1, 2_500));
        renewed.notify(&Hint::Invalidated);
        assert_eq!(renewed.during(500, 60_000, false).await, Some((LeaseEvent::Invalidated, 500)));
        assert_eq!(renewed.renewals(), 1, "only the next call asks the store");
    }

    #[tokio::test(start_paused = true)]
    async fn unrelated_messages_delay_no_renewal() {
        let renewed = RenewedLease::new().await;
        let (during, ()) = tokio::join!(renewed.during(1_050, 60_000, false), async {
            for _ in 0..10 {
                sleep(Duration::from_millis(99)).await;
                renewed.notify(&Hint::Finished(None));
            }
        });
        assert_eq!((during, renewed.renewals()), (None, 1));
    }

    #[tokio::test(start_paused = true)]
    async fn the_next_renewal_notices_a_lost_lease() {
        let renewed = RenewedLease::new().await;
        assert!(renewed.chaos.store().evict_lease(renewed.lease.key.name()));
        assert_eq!(renewed.during(5_000, 60_000, false).await, Some((LeaseEvent::Lost, 1_000)));
    }

    #[tokio::test(start_paused = true)]
    async fn a_failed_renewal_adds_a_store_error_and_the_next_one_decides() {
        let renewed = RenewedLease::new().await;
        renewed.chaos.once(Fault::ErrorBefore);
        assert_eq!(renewed.during(2_500, 60_000, false).await, None);
        assert_eq!((renewed.chaos.struck(Fault::ErrorBefore), renewed.remaining()), (1, 2_500));
        assert_eq!(renewed.guard.stats().store_errors, 1);
    }
}

#[test]
fn a_waiter_retries_shortly_after_the_lease_would_expire() {
    let (lease, ms) = (Duration::from_secs(2), Duration::from_millis);
    let cases = [
        (ms(700), true, ms(700)),
        // The remaining time is that of a holder whose policy has a longer lease. It may end sooner, so the waiter sleeps for its own
        // lease.
        (lease * 9, true, lease),
        // The lease is about to expire. The waiter must not take again and again until then.
        (Duration::ZERO, true, SHORTEST_WAIT),
        (ms(100), false, ms(100)),
        (ms(700), false, UNSURE_WAIT),
    ];
    for (remaining, hints_arrive, least) in cases {
        let waits = sleep_for(remaining, lease, hints_arrive);
        assert!((least + ms(1)..least + ms(10)).contains(&waits), "{remaining:?}: {waits:?}");
    }
    // The waiter sleeps for its own lease at most, which may be shorter than the shortest wait.
    assert!(sleep_for(ms(50), ms(2), true) <= ms(2) + ms(10));
}

#[tokio::test]
async fn hints_decide_which_leader_a_waiter_follows_and_which_entry_it_may_use() {
    let (first, second) = (Token::mint(uuid::Uuid::from_u128(1)), Token::mint(uuid::Uuid::from_u128(2)));
    let store = MemoryStore::new();
    let check = |hints| {
        let mut side = Side::on(&store);
        side.rejected = Some(Arc::new(StoredEntry::new(Err(Bytes::from_static(b"old")))));
        let mut budget = side.guard.parts().1.budget();
        let mut acquisition = Acquisition::of(side.request(&mut budget));
        (acquisition.behind, acquisition.takeovers) = (Some(first.clone()), 1);
        acquisition.apply_hints(hints);
        (acquisition.behind, acquisition.takeovers, acquisition.request.rejected.is_some())
    };
    assert_eq!(check(Hints::default()), (Some(first.clone()), 1, true));
    assert_eq!(check(Hints { granted: Some(2), ..Hints::default() }), (Some(first.clone()), 2, true));
    let ended = Hints { finished: Some(second.clone()), ..Hints::default() };
    assert_eq!(check(ended), (Some(second), 1, true), "its outcome is the one to ask for");
    assert_eq!(check(Hints { invalidated: true, ..Hints::default() }), (Some(first.clone()), 1, false));
}
