//! What an outage costs requests, and how long it takes until the server is used again. (`store_down` and `networks` test each outage once,
//! with generous bounds, together with its other promises.)

use store_down::{Outage, stores_again_as};

use super::*;
use crate::support::rounds::{Rounds, Timing};

/// How long an outage lasts after the requests.
const AWAY: Duration = Duration::from_millis(300);

async fn one(line: &Line, outage: Outage, round: usize) -> [Timing; 5] {
    line.begin(outage);
    let added = requests(&line.guard, &format!("away-{round}"), 40).await;
    tokio::time::sleep(AWAY).await;
    line.end(outage);
    let usable = stores_again_as(&line.guard, &format!("again-{round}")).await;
    of_an_outage(&added, usable)
}

/// One guard is used in all rounds. The pauses between its attempts to connect have grown before the first round, and do not start anew,
/// because its connections are only brief between the rounds.
async fn keeps_to_the_figures(outage: Outage) {
    let line = Line::with(outage, Policy::default()).await;
    connects(&line.guard).await;
    line.begin(outage);
    requests(&line.guard, "before", 3).await;
    tokio::time::sleep(GROWN).await;
    line.end(outage);
    stores_again_as(&line.guard, "before").await;
    let mut rounds = Rounds::of(format!("{outage:?}"));
    while let Some(round) = rounds.next() {
        rounds.note(one(&line, outage, round).await);
    }
}

/// Each round has a new guard, which has not been connected before.
async fn keeps_to_the_figures_from_the_start(outage: Outage) {
    let mut rounds = Rounds::of(format!("{outage:?}, from the start"));
    while let Some(round) = rounds.next() {
        let line = Line::with(outage, Policy::default()).await;
        rounds.note(one(&line, outage, round).await);
    }
}

#[tokio::test]
async fn a_dead_server_costs_one_budget_and_is_used_a_second_after_it_is_back() {
    keeps_to_the_figures(Outage::Dead).await;
}

#[tokio::test]
async fn a_server_that_was_never_there_costs_one_budget_and_is_used_a_second_after_it_is() {
    keeps_to_the_figures_from_the_start(Outage::Dead).await;
}

#[tokio::test]
async fn a_stopped_server_costs_one_budget_and_is_used_a_second_after_it_is_back() {
    keeps_to_the_figures(Outage::Stopped).await;
}

/// The server's user has a password, so the first connection attempt waits for the answer to AUTH, which takes longer than a budget.
#[tokio::test]
async fn a_server_that_is_stopped_from_the_start_costs_one_budget_and_is_used_a_second_after_it_is_back() {
    keeps_to_the_figures_from_the_start(Outage::Stopped).await;
}

#[tokio::test]
async fn a_black_hole_costs_one_budget_and_the_server_is_used_a_second_after_it() {
    keeps_to_the_figures(Outage::Network(Mode::BlackHole)).await;
}

#[tokio::test]
async fn a_black_hole_from_the_start_costs_one_budget_and_the_server_is_used_a_second_after_it() {
    keeps_to_the_figures_from_the_start(Outage::Network(Mode::BlackHole)).await;
}

#[tokio::test]
async fn lost_answers_cost_one_budget_and_the_server_is_used_a_second_after_them() {
    keeps_to_the_figures(Outage::Network(Mode::NoReplies)).await;
}

#[tokio::test]
async fn resets_cost_one_budget_and_the_server_is_used_a_second_after_them() {
    keeps_to_the_figures(Outage::Network(Mode::Reset)).await;
}

#[tokio::test]
async fn a_network_slower_than_commands_costs_one_budget_and_is_used_a_second_after_it_is_well() {
    keeps_to_the_figures(Outage::Network(Mode::Delay(ms(200)))).await;
}

#[tokio::test]
async fn a_network_a_second_slow_costs_one_budget_and_is_used_a_second_after_it_is_well() {
    keeps_to_the_figures(Outage::Network(Mode::Delay(ms(1_000)))).await;
}

#[tokio::test]
async fn a_network_that_trickles_costs_one_budget_and_is_used_a_second_after_it_is_well() {
    keeps_to_the_figures(Outage::Network(Mode::Trickle(1))).await;
}

/// These connections stay dead, and the guard must replace them within a second.
#[tokio::test]
async fn dead_connections_cost_one_budget_and_are_replaced_within_a_second() {
    let line = Line::new(Policy::default()).await;
    connects(&line.guard).await;
    let mut rounds = Rounds::of("connections that died");
    while let Some(round) = rounds.next() {
        let died = Instant::now();
        line.proxy.set(Mode::BlackHoleOld);
        let added = requests(&line.guard, &format!("dead-{round}"), 10).await;
        stores_again_as(&line.guard, &format!("again-{round}")).await;
        rounds.note([
            Timing::once("the first", added[0], BUDGET),
            Timing::once("the second", added[1], BUDGET),
            Timing::once("all of them", added.iter().sum(), BUDGET * 2),
            Timing::once("usable", died.elapsed(), RECOVERY),
        ]);
    }
}

/// The network fails, works and fails again, in each of four ways. No request ever pays more than the budget.
#[tokio::test]
async fn a_network_that_flaps_costs_one_budget_and_is_used_a_second_after_it_is_well() {
    const FLAP: Duration = Duration::from_millis(300);
    let line = Line::new(Policy::default()).await;
    connects(&line.guard).await;
    let mut rounds = Rounds::of("a network that flaps");
    while let Some(round) = rounds.next() {
        let mode = [Mode::Reset, Mode::BlackHole, Mode::NoReplies, Mode::BlackHoleOld][round % 4];
        let flapping = async {
            for mode in [mode, Mode::Pass, mode] {
                line.proxy.set(mode);
                tokio::time::sleep(FLAP).await;
            }
        };
        let mut added = Vec::new();
        let asking = async {
            loop {
                added.extend(requests(&line.guard, &format!("flap-{round}-{}", added.len()), 1).await);
                tokio::time::sleep(ms(2)).await;
            }
        };
        tokio::select! {
            () = flapping => {}
            () = asking => {}
        }
        line.proxy.set(Mode::Pass);
        let usable = stores_again_as(&line.guard, &format!("again-{round}")).await;
        let slowest = added.iter().copied().max().expect("some requests");
        rounds.note([
            Timing::once("the slowest", slowest, BUDGET),
            Timing::median("all", &added, KNOWN),
            Timing::once("usable", usable, RECOVERY),
        ]);
    }
}
