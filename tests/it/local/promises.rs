//! Promises 15 to 18, on replicas that a test cuts off, stops and counts.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use stampede_guard::testing::{ChaosStore, Fault, Origin, Replica};
use stampede_guard::{ErrorKind, MemoryStore, Policy, PolicyBuilder, StampedeGuard};
use tokio::time::{Instant, sleep, timeout};

use super::{keeping, load, warm};

const TERM: Duration = Duration::from_secs(2);

fn guard(replica: &Replica, policy: PolicyBuilder) -> StampedeGuard {
    let policy = policy.build().expect("valid");
    StampedeGuard::builder(replica.clone()).policy(policy).build().expect("valid")
}

/// A store, and `N` guards on it with their replicas.
pub(super) fn fleet<const N: usize>(
    policy: impl Fn() -> PolicyBuilder,
) -> (ChaosStore<MemoryStore>, [(Replica, StampedeGuard); N]) {
    fleet_of(ChaosStore::new(1), policy)
}

fn fleet_of<const N: usize>(
    chaos: ChaosStore<MemoryStore>,
    policy: impl Fn() -> PolicyBuilder,
) -> (ChaosStore<MemoryStore>, [(Replica, StampedeGuard); N]) {
    chaos.latency(Duration::from_millis(1), Duration::from_millis(1));
    let fleet = std::array::from_fn(|_| {
        let replica = chaos.replica();
        let guard = guard(&replica, policy());
        (replica, guard)
    });
    (chaos, fleet)
}

async fn version(guard: &StampedeGuard, origin: &Origin) -> u64 {
    let origin = origin.clone();
    guard.get_or_load("k", move || async move { origin.load("k").await }).await.expect("loaded")
}

// P15.
#[tokio::test(start_paused = true)]
async fn a_local_hit_sends_no_command() {
    let (chaos, [(_, guard)]) = fleet(keeping);
    load(&guard, "k", 7).await;
    warm(&guard, "k").await;
    let (before, hits) = (chaos.commands(), guard.stats().local_hits);
    for _ in 0..1_000 {
        assert_eq!(load(&guard, "k", 8).await, 7);
    }
    assert_eq!(chaos.commands(), before);
    assert_eq!(guard.stats().local_hits, hits + 1_000);
}

// P16, when all processes are well.
#[tokio::test(start_paused = true)]
async fn an_acknowledged_invalidation_is_final_within_a_few_round_trips() {
    let (_chaos, [one, two, three]) = fleet(keeping);
    let origin = Origin::new();
    for (_, guard) in [&one, &two, &three] {
        version(guard, &origin).await;
        warm(guard, "k").await;
    }
    // A registry is young until the process that asks has known it for a term.
    sleep(TERM * 2).await;
    for (_, guard) in [&one, &two, &three] {
        warm(guard, "k").await;
    }
    let began = Instant::now();
    let newest = origin.change("k");
    one.1.invalidate("k").await.expect("acknowledged");
    assert!(began.elapsed() < Duration::from_millis(20), "{:?}", began.elapsed());
    for (_, guard) in [&two, &three, &one] {
        assert_eq!(version(guard, &origin).await, newest);
    }
    assert_eq!(one.1.stats().local_waits, 0);
}

// P16, when a process is paused; P17 for the process that is.
#[tokio::test(start_paused = true)]
async fn an_invalidation_waits_for_a_silent_process_for_one_term_and_the_next_does_not() {
    let (_chaos, [one, two]) = fleet(keeping);
    let origin = Origin::new();
    for (_, guard) in [&one, &two] {
        version(guard, &origin).await;
        warm(guard, "k").await;
    }
    sleep(TERM * 2).await;
    warm(&two.1, "k").await;
    two.0.stop();
    let newest = origin.change("k");
    let began = Instant::now();
    one.1.invalidate("k").await.expect("acknowledged");
    let took = began.elapsed();
    assert!(took > TERM / 2 && took <= TERM, "{took:?}");
    assert_eq!(one.1.stats().local_waits, 1);
    // The first invalidation has removed the silent process from the registry.
    let again = Instant::now();
    one.1.invalidate("k").await.expect("acknowledged");
    assert!(again.elapsed() < Duration::from_millis(20), "{:?}", again.elapsed());
    two.0.resume();
    assert_eq!(version(&two.1, &origin).await, newest);
}

// P17.
#[tokio::test(start_paused = true)]
async fn a_process_that_is_cut_off_stops_serving_before_the_invalidation_returns() {
    let (_chaos, [one, two]) = fleet(keeping);
    let origin = Origin::new();
    for (_, guard) in [&one, &two] {
        version(guard, &origin).await;
        warm(guard, "k").await;
    }
    sleep(TERM * 2).await;
    warm(&two.1, "k").await;
    two.0.cut();
    let before = origin.version("k");
    let newest = origin.change("k");
    let invalidated = tokio::spawn({
        let guard = one.1.clone();
        async move { guard.invalidate("k").await }
    });
    let mut older = 0;
    while !invalidated.is_finished() {
        let began_before = !invalidated.is_finished();
        let received = version(&two.1, &origin).await;
        assert!(received == newest || began_before && received == before);
        older += u32::from(received == before);
        sleep(Duration::from_millis(10)).await;
    }
    invalidated.await.expect("no panic").expect("acknowledged");
    assert!(older > 0, "its copy was served as long as its lease lasted");
    assert_eq!(version(&two.1, &origin).await, newest);
    assert!(two.1.stats().local_lapses > 0);
}

/// The lease ends during an attempt to renew it, or between two attempts that fail at once. Either way that is one lapse.
#[tokio::test(start_paused = true)]
async fn each_lapse_of_the_lease_counts_once() {
    let (_chaos, [(replica, guard)]) = fleet(keeping);
    let origin = Origin::new();
    for lapses in 1..=3 {
        version(&guard, &origin).await;
        warm(&guard, "k").await;
        replica.cut();
        for _ in 0..60 {
            version(&guard, &origin).await;
            sleep(TERM / 20).await;
        }
        assert_eq!(guard.stats().local_lapses, lapses);
        replica.resume();
        sleep(TERM * 2).await;
    }
}

// Without `local_while_down`, an outage ends the hits. With it, they continue for as long as it says, and are reported as stale.
#[tokio::test(start_paused = true)]
async fn copies_are_served_during_an_outage_for_as_long_as_the_policy_says() {
    let down = Duration::from_secs(60);
    let (_chaos, [(with, lasting), (without, loads)]) = fleet(keeping);
    let lasting = lasting.with_policy(keeping().local_while_down(down).build().expect("valid"));
    for guard in [&lasting, &loads] {
        load(guard, "k", 1).await;
        warm(guard, "k").await;
    }
    with.cut();
    without.cut();
    sleep(TERM * 2).await;
    let (stale, hits) = (lasting.stats().stale, lasting.stats().local_hits);
    assert_eq!(load(&lasting, "k", 2).await, 1);
    assert_eq!((lasting.stats().stale, lasting.stats().local_hits), (stale + 1, hits));
    assert_eq!(lasting.get::<u32>("k").await.expect("a copy"), Some(1));
    assert_eq!(load(&loads, "k", 2).await, 2);
    sleep(down).await;
    assert_eq!(load(&lasting, "k", 2).await, 2);
}

/// After its shutdown a guard is not notified of changes, and sends no look-ups. A copy would only be served as for a failed look-up.
#[tokio::test(start_paused = true)]
async fn a_guard_that_was_shut_down_serves_no_copies() {
    let policy = || keeping().local_while_down(Duration::from_secs(60));
    for cuts_off in [false, true] {
        let (_chaos, [(replica, closing), (_, other)]) = fleet(policy);
        load(&closing, "k", 1).await;
        warm(&closing, "k").await;
        closing.shutdown(Duration::from_secs(1)).await;
        other.invalidate("k").await.expect("acknowledged");
        if cuts_off {
            replica.cut();
        }
        assert_ne!(closing.get::<u32>("k").await.ok(), Some(Some(1)), "cut off: {cuts_off}");
        let many = closing.get_many::<u32, _>(["k"]).await;
        assert!(many.into_iter().all(|got| got.ok() != Some(Some(1))), "cut off: {cuts_off}");
        assert_eq!(load(&closing, "k", 2).await, 2, "cut off: {cuts_off}");
    }
}

/// The look-up was sent before the shutdown, and fails after it.
#[tokio::test(start_paused = true)]
async fn a_look_up_that_fails_after_the_shutdown_is_answered_by_no_copy() {
    let policy = || keeping().local_while_down(Duration::from_secs(60));
    let (_chaos, [(replica, closing), (_, other)]) = fleet(policy);
    load(&closing, "k", 1).await;
    warm(&closing, "k").await;
    // The process no longer has the right to serve copies, and its look-up has no answer yet.
    replica.cut();
    sleep(TERM * 2).await;
    let peeks = tokio::spawn({
        let closing = closing.clone();
        async move { closing.get::<u32>("k").await }
    });
    tokio::task::yield_now().await;
    closing.shutdown(Duration::ZERO).await;
    other.invalidate("k").await.expect("acknowledged");
    assert_ne!(peeks.await.expect("not aborted").ok(), Some(Some(1)));
}

/// Regression: during an outage such a copy was served to a caller that knew of the tag's invalidation.
#[tokio::test(start_paused = true)]
async fn an_outage_serves_no_copy_that_was_not_checked_for_the_policys_tags() {
    let policy = || keeping().local_while_down(Duration::from_secs(60));
    let (_chaos, [(replica, guard)]) = fleet(policy);
    let tagged = guard.with_policy(policy().tags(["prices"]).build().expect("valid"));
    load(&guard, "k", 1).await;
    warm(&guard, "k").await;
    tagged.invalidate_tag("prices").await.expect("confirmed");
    replica.cut();
    sleep(TERM * 2).await;
    assert_eq!(load(&tagged, "k", 2).await, 2);
    assert_eq!(load(&guard, "k", 3).await, 1, "its policy has no tag");
}

/// `local_for` bounds the age of copies. During an outage, `local_while_down` is added to the bound.
#[tokio::test(start_paused = true)]
async fn an_outage_extends_the_age_of_copies_by_no_more_than_the_policy_says() {
    let [short, down] = [5, 60].map(Duration::from_secs);
    let policy = || keeping().local_for(short).local_while_down(down);
    let (_chaos, [(replica, guard)]) = fleet(policy);
    load(&guard, "k", 1).await;
    warm(&guard, "k").await;
    // The process has its lease all the time, but no caller makes it read the value again.
    for _ in 0..100 {
        load(&guard, "another", 1).await;
        sleep(Duration::from_secs(1)).await;
    }
    replica.cut();
    assert_eq!(load(&guard, "k", 2).await, 2, "a copy of a hundred seconds");
}

// If the store has no value, a process may still have a copy of it.
#[tokio::test(start_paused = true)]
async fn a_refresh_reaches_the_copies_of_a_value_that_the_store_has_lost() {
    let (chaos, [one, two]) = fleet(keeping);
    load(&one.1, "k", 1).await;
    warm(&two.1, "k").await;
    chaos.once(Fault::EvictEntry);
    let refreshed = one.1.load("k").refresh(|_| async { Ok::<_, String>(2_u32) }).await;
    assert_eq!(refreshed.expect("acknowledged").value, 2);
    assert_eq!(chaos.struck(Fault::EvictEntry), 1);
    assert_eq!(load(&two.1, "k", 3).await, 2);
}

/// A value that a refresh has loaded without the store is not stored, so there is nothing that other copies would have to be replaced by.
#[tokio::test(start_paused = true)]
async fn a_refresh_without_the_store_does_not_wait_for_it() {
    for keeps in [false, true] {
        let policy = || if keeps { keeping() } else { Policy::builder() };
        for (shadow, bypass) in [(false, false), (true, false), (false, true)] {
            let (_chaos, [(replica, guard)]) = fleet(|| policy().shadow(shadow));
            let filled = guard.with_policy(policy().build().expect("valid"));
            load(&filled, "k", 1).await;
            guard.set_bypass(bypass);
            replica.cut();
            let began = Instant::now();
            let refreshed = guard.load("k").refresh(|_| async { Ok::<_, String>(2_u32) }).await;
            let case = format!("keeps: {keeps}, shadow: {shadow}, bypass: {bypass}");
            assert_eq!(refreshed.expect("loaded").value, 2, "{case}");
            assert!(began.elapsed() <= Duration::from_millis(110), "{case}: {:?}", began.elapsed());
        }
    }
}

#[tokio::test(start_paused = true)]
async fn connecting_gets_the_lease() {
    let (chaos, [(replica, one)]) = fleet(keeping);
    one.connect().await.expect("connected");
    load(&one, "k", 1).await;
    let before = chaos.commands();
    assert_eq!(load(&one, "k", 2).await, 1);
    assert_eq!(chaos.commands(), before, "the first value that was loaded is a copy");
    replica.cut();
    let other = guard(&replica, keeping());
    let error = other.connect().await.expect_err("cut off");
    assert_eq!(error.kind(), ErrorKind::Store);
}

#[tokio::test(start_paused = true)]
async fn a_guard_without_copies_announces_its_changes() {
    let (chaos, [(_, keeps)]) = fleet(keeping);
    let plain = StampedeGuard::new(chaos.replica());
    let origin = Origin::new();
    version(&keeps, &origin).await;
    warm(&keeps, "k").await;
    sleep(TERM * 2).await;
    warm(&keeps, "k").await;
    for change in 0..3 {
        let newest = origin.change("k");
        plain.invalidate("k").await.expect("acknowledged");
        assert_eq!(version(&keeps, &origin).await, newest, "change {change}");
        warm(&keeps, "k").await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_fleet_without_copies_sends_one_command_for_an_invalidation() {
    let chaos = ChaosStore::new(1);
    let guard = StampedeGuard::new(chaos.clone());
    guard.insert("k", &1_u32).await.expect("stored");
    let before = chaos.commands();
    guard.invalidate("k").await.expect("acknowledged");
    assert_eq!(chaos.commands(), before + 1);
}

#[tokio::test(start_paused = true)]
async fn an_idle_process_gives_its_lease_back_and_gets_it_again() {
    let (chaos, [(_, keeps), (_, other)]) = fleet(keeping);
    load(&keeps, "k", 1).await;
    warm(&keeps, "k").await;
    sleep(TERM * 20).await;
    let before = chaos.commands();
    sleep(Duration::from_secs(60)).await;
    assert_eq!(chaos.commands(), before, "an idle process sends nothing");
    // No process has a lease, so an invalidation waits for no process.
    let began = Instant::now();
    other.invalidate("k").await.expect("acknowledged");
    other.invalidate("k").await.expect("acknowledged");
    assert!(began.elapsed() < TERM + Duration::from_millis(20), "{:?}", began.elapsed());
    assert_eq!(load(&keeps, "k", 2).await, 2, "the copy of before was invalidated meanwhile");
    warm(&keeps, "k").await;
}

#[tokio::test(start_paused = true)]
async fn a_shutdown_gives_the_lease_back_at_once_whenever_it_comes() {
    // The moments are spread over the period between two renewals; at some of them a renewal is on its way.
    for late in (0..TERM.as_millis() as u64 / 3).step_by(37) {
        let (chaos, [(_, leaves), (_, stays)]) = fleet(keeping);
        for guard in [&leaves, &stays] {
            load(guard, "k", 1).await;
            warm(guard, "k").await;
        }
        sleep(TERM * 2).await;
        chaos.latency(Duration::from_millis(100), Duration::from_millis(100));
        sleep(Duration::from_millis(late)).await;
        leaves.shutdown(Duration::from_secs(1)).await;
        sleep(Duration::from_millis(200)).await;
        let began = Instant::now();
        stays.invalidate("k").await.expect("acknowledged");
        assert!(began.elapsed() < Duration::from_millis(500), "{late}: {:?}", began.elapsed());
    }
}

/// The caller may leave before the wait for the silent process has ended.
#[tokio::test(start_paused = true)]
async fn a_silent_process_is_removed_although_no_caller_waits_for_it_to_the_end() {
    let (_chaos, [(silent, keeps), (_, other)]) = fleet(keeping);
    for guard in [&keeps, &other] {
        load(guard, "k", 1).await;
        warm(guard, "k").await;
    }
    sleep(TERM * 2).await;
    silent.stop();
    for value in 2..5 {
        let dropped = timeout(TERM / 4, other.insert("k", &value)).await;
        assert!(dropped.is_err(), "it waits for the process that stands still");
    }
    sleep(TERM).await;
    let began = Instant::now();
    other.insert("k", &5).await.expect("acknowledged");
    assert!(began.elapsed() < Duration::from_millis(20), "{:?}", began.elapsed());
}

/// The wait continues without its caller, in a runtime that may not be driven any more.
#[test]
fn a_silent_process_is_removed_although_the_runtime_of_a_caller_rests() {
    const TERM: Duration = Duration::from_secs(1);
    let store = MemoryStore::new();
    let guard = || {
        let guard = StampedeGuard::builder(store.clone()).policy(keeping().build().expect("valid"));
        guard.local_term(TERM).build().expect("valid")
    };
    let (ended, other) = (guard(), guard());
    let runtimes = [(), ()]
        .map(|()| tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime"));
    runtimes[0].block_on(async {
        load(&ended, "k", 1).await;
        warm(&ended, "k").await;
    });
    // This process ends without a shutdown, so its entry in the registry stays.
    drop(ended);
    let is_dropped = async || timeout(TERM / 10, other.insert("k", &2)).await.is_err();
    assert!(runtimes[0].block_on(is_dropped()));
    runtimes[1].block_on(async {
        sleep(TERM * 2).await;
        assert!(is_dropped().await);
        sleep(TERM * 2).await;
        let began = Instant::now();
        other.insert("k", &3).await.expect("acknowledged");
        assert!(began.elapsed() < TERM / 2, "{:?}", began.elapsed());
    });
}

/// A commit may take longer than the callers wait for it. Until it has run, the store returns the older value.
#[tokio::test(start_paused = true)]
async fn a_refresh_returns_when_its_value_is_stored() {
    let mut late = 0;
    for seed in 0..20 {
        let (chaos, [(_, one), (_, two)]) = fleet_of(ChaosStore::new(seed), keeping);
        load(&one, "k", 1).await;
        warm(&two, "k").await;
        let (slow, errors, budgets) = (chaos.clone(), one.stats().store_errors, one.stats().budget_exceeded);
        let refreshed = one.load("k").refresh(move |_| async move {
            slow.once(Fault::Slow);
            Ok::<_, String>(2_u32)
        });
        assert_eq!(refreshed.await.expect("loaded").value, 2);
        // If the commit itself had no answer in time, this seed shows nothing.
        if one.stats().store_errors == errors {
            late += one.stats().budget_exceeded - budgets;
            assert_eq!(load(&two, "k", 3).await, 2, "seed {seed}");
        }
    }
    assert!(late > 0, "no commit was late");
}

/// Nothing shows whether the value was stored. The copies of the older value must be removed in either case.
#[tokio::test(start_paused = true)]
async fn a_refresh_without_an_answer_to_its_commit_reaches_the_copies() {
    for seed in 0..20 {
        let (chaos, [(_, one), (_, two)]) = fleet_of(ChaosStore::new(seed), keeping);
        load(&one, "k", 1).await;
        warm(&two, "k").await;
        let (breaks, errors) = (chaos.clone(), one.stats().store_errors);
        let refreshed = one.load("k").refresh(move |_| async move {
            breaks.once(Fault::ErrorAfter);
            Ok::<_, String>(2_u32)
        });
        assert_eq!(refreshed.await.expect("loaded").value, 2);
        assert!(one.stats().store_errors > errors, "seed {seed}: the commit was answered");
        assert_eq!(load(&two, "k", 3).await, 2, "seed {seed}");
    }
}

/// The refresh stores nothing, because an invalidation has taken its lease. As long as that invalidation waits for a copy, so does the
/// refresh.
#[tokio::test(start_paused = true)]
async fn a_refresh_that_loses_its_lease_to_a_change_waits_for_the_copies_too() {
    let (chaos, [(_, one), (_, two), (cut_off, three)]) = fleet(keeping);
    load(&one, "k", 1).await;
    warm(&two, "k").await;
    warm(&three, "k").await;
    cut_off.cut();
    let (store, changes) = (chaos.clone(), two.clone());
    let refreshed = one.load("k").refresh(move |_| async move {
        let sent = store.commands();
        let invalidated = tokio::spawn(async move { changes.invalidate("k").await });
        while store.commands() == sent {
            sleep(Duration::from_millis(1)).await;
        }
        sleep(Duration::from_millis(5)).await;
        assert!(!invalidated.is_finished(), "it waits for the copy");
        Ok::<_, String>(2_u32)
    });
    assert_eq!(refreshed.await.expect("acknowledged").value, 2);
    assert_ne!(load(&three, "k", 3).await, 1);
}

/// The registry may be lost while a process that has just learned of it waits for its own inbox.
#[tokio::test(start_paused = true)]
async fn a_list_that_is_lost_during_the_first_change_of_a_process_is_waited_for() {
    let mut unreachable = 0;
    for seed in 0..12 {
        let (chaos, [(replica, keeps)]) = fleet_of(ChaosStore::new(seed), keeping);
        let plain = guard(&chaos.replica(), stampede_guard::Policy::builder());
        load(&keeps, "k", 1).await;
        warm(&keeps, "k").await;
        replica.cut();
        chaos.once(Fault::Unreachable);
        let lost = async {
            sleep(Duration::from_millis(2)).await;
            chaos.once(Fault::EvictRegistry);
        };
        let (invalidated, ()) = tokio::join!(plain.invalidate("k"), lost);
        invalidated.expect("acknowledged");
        unreachable += chaos.struck(Fault::Unreachable).min(chaos.struck(Fault::EvictRegistry));
        assert_eq!(load(&keeps, "k", 2).await, 2, "seed {seed}");
    }
    assert!(unreachable > 0, "each inbox was open");
}

// P18.
#[tokio::test(start_paused = true)]
async fn copies_take_no_more_bytes_than_the_builder_allows() {
    const CAPACITY: u64 = 1024 * 1024;
    let guard = StampedeGuard::builder(MemoryStore::with_capacity(64 << 20))
        .policy(keeping().build().expect("valid"))
        .local_capacity(CAPACITY)
        .build()
        .expect("valid");
    for key in 0..20_000_u32 {
        load(&guard, &format!("key {key}"), key).await;
        let local = guard.health().local.expect("copies are stored");
        assert!(local.bytes <= CAPACITY, "{local:?}");
    }
    let local = guard.health().local.expect("copies are stored");
    assert!(local.copies > 500 && local.capacity <= CAPACITY, "{local:?}");
}

/// A buffer that reports when it is dropped.
struct Buffer {
    bytes: Vec<u8>,
    _alive: Arc<()>,
}

impl AsRef<[u8]> for Buffer {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

// P18.
#[tokio::test(start_paused = true)]
async fn a_copy_does_not_keep_the_buffer_that_its_value_is_a_part_of() {
    let guard = StampedeGuard::builder(MemoryStore::new()).policy(keeping().build().expect("valid"));
    let guard = guard.build().expect("valid");
    load(&guard, "another key", 1).await;
    warm(&guard, "another key").await;
    let alive = Arc::new(());
    let buffer = Bytes::from_owner(Buffer { bytes: vec![7; 4_096], _alive: Arc::clone(&alive) });
    let read = async || {
        let part = buffer.slice(100..300);
        guard.get_or_load("k", move || async move { Ok::<_, String>(part) }).await.expect("loaded")
    };
    assert_eq!(read().await, vec![7; 200]);
    let hits = guard.stats().local_hits;
    assert_eq!(read().await, vec![7; 200]);
    assert_eq!(guard.stats().local_hits, hits + 1, "the load has left a copy");
    drop(buffer);
    assert_eq!(Arc::strong_count(&alive), 1, "the buffer is freed");
}
