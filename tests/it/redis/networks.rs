//! N2, N5, N6: a network that is slow, trickles, or resets connections. Every call is answered within its bound, and everything works again
//! once the network does.

use store_down::{Line, still_coalesces, stores_again};

use super::*;
use crate::support::probe::assert_nothing_left;
use crate::support::proxy::Mode;

async fn is_tolerated(mode: Mode) {
    let line = Line::new(Policy::default()).await;
    let guard = &line.guard;
    connects(guard).await;
    requests(guard, "before", 3).await;
    line.proxy.set(mode);
    let added = requests(guard, "ill", 40).await;
    keep_to_the_budget(&added, mode);
    still_coalesces(guard).await;
    assert_eq!(guard.stats().failed, 0);
    line.proxy.set(Mode::Pass);
    stores_again(guard).await;
    settled(std::slice::from_ref(guard)).await;
    assert_nothing_left(&line.server, SOON).await;
}

#[tokio::test]
async fn a_network_that_is_a_little_slow_costs_its_round_trips() {
    is_tolerated(Mode::Delay(ms(5))).await;
}

#[tokio::test]
async fn a_network_as_slow_as_a_command_may_be_costs_the_budget() {
    is_tolerated(Mode::Delay(ms(50))).await;
}

#[tokio::test]
async fn a_network_slower_than_a_command_may_be_costs_the_budget() {
    is_tolerated(Mode::Delay(ms(200))).await;
}

#[tokio::test]
async fn a_network_slower_than_all_commands_may_be_costs_the_budget() {
    is_tolerated(Mode::Delay(ms(1_000))).await;
}

/// A reply never arrives completely within its time.
#[tokio::test]
async fn a_network_that_trickles_costs_the_budget() {
    is_tolerated(Mode::Trickle(1)).await;
}

#[tokio::test]
async fn a_network_that_resets_everything_costs_next_to_nothing() {
    is_tolerated(Mode::Reset).await;
}

/// Regression: two hundred replicas read a stored value of 200 kB at the same moment, each read took longer than `command_timeout`, and 164
/// replicas loaded for themselves.
#[tokio::test]
async fn a_waiter_reads_the_stored_value_however_slow_the_network_is() {
    let policy = Policy::builder().lease(Duration::from_secs(10)).build().expect("valid");
    let line = Line::new(policy.clone()).await;
    let leader = local(&line.server, policy).await;
    let (gate, loads) = (Gate::closed(), Counter::default());
    connects(&line.guard).await;
    let led = held_call(&leader, 1, &gate, &loads);
    loads.reach(1).await;
    let waits = held_call(&line.guard, 2, &gate, &loads);
    queued(&line.server, "k", 1).await;
    // Replies come in order, so once this read is answered, the waiter has received the reply to its acquire.
    eventually("it is answered", SOON, async || line.guard.get::<u32>("other").await.is_ok()).await;
    line.proxy.set(Mode::Delay(ms(400)));
    gate.open();
    assert_eq!((led.await.expect("joined"), waits.await.expect("joined")), (1, 1));
    assert_eq!(loads.started(), 1);
}

/// N2: a command that was sent before a reset may have run. Two nodes load the same keys, while the connections of one node are reset again
/// and again. A lost reply may cost a load, but never a value.
#[tokio::test]
async fn resets_in_the_middle_of_everything_lose_nothing() {
    let line = Line::new(lease_of(Duration::from_secs(1))).await;
    let other = local(&line.server, lease_of(Duration::from_secs(1))).await;
    let guards = [line.guard.clone(), other];
    let loads = Counter::default();
    let resets = async {
        loop {
            tokio::time::sleep(ms(fastrand::u64(5..60))).await;
            line.proxy.set(Mode::Reset);
            line.proxy.set(Mode::Pass);
        }
    };
    let rounds = async {
        for round in 0..60_u32 {
            let callers = (0..10).map(|caller| {
                let loads = loads.clone();
                guards[caller % 2].get_or_load(("k", round), move || async move {
                    let _running = loads.start();
                    tokio::time::sleep(ms(20)).await;
                    Ok::<_, String>(round)
                })
            });
            for value in tokio::time::timeout(SOON, join_all(callers)).await.expect("no call hangs") {
                assert_eq!(value.expect("a value"), round);
            }
        }
    };
    tokio::select! {
        () = resets => {}
        () = rounds => {}
    }
    // There may be one load per round, and one more for each load that had no lease, or lost it.
    let stats: Vec<_> = guards.iter().map(StampedeGuard::stats).collect();
    let explained = |stats: &Stats| stats.fail_open_loads + stats.leases_lost + stats.commits_refused;
    let allowed = 60 + stats.iter().map(explained).sum::<u64>();
    assert!(loads.started() as u64 <= allowed && loads.started() <= 120, "{}: {stats:?}", loads.started());
    settled(&guards).await;
    assert_nothing_left(&line.server, SOON).await;
    stores_again(&line.guard).await;
}
