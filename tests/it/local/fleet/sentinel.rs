//! A failover by Sentinel, which may lose writes that were acknowledged.

use std::time::Duration;

use tokio::time::sleep;

use super::oracle::Loss;
use super::stage::Stage;
use super::well::{CHANGERS, parts};
use super::{SLACK, TERM};
use crate::support::os::wall_ns;
use crate::support::probe::eventually;
use crate::support::redis_server::RedisServer;
use crate::support::sentinels::Sentinels;

/// Within this time a replica has what its primary has acknowledged.
const REPLICATED: Duration = Duration::from_millis(200);
/// How much longer a change may take until there is a new primary.
const REACHED: Duration = Duration::from_secs(2);
const SOON: Duration = Duration::from_secs(60);

/// How many connections of the fleet a server has. `None` while it closes all connections because its role changes.
fn of_fleet(server: &RedisServer) -> Option<usize> {
    let mut connection = server.client().get_connection().ok()?;
    let clients: String = redis::cmd("CLIENT").arg("LIST").query(&mut connection).ok()?;
    Some(clients.lines().filter(|client| client.contains("user=watched")).count())
}

async fn fails_over(scene: &'static str, watch: Sentinels, fail_over: impl FnOnce(&Sentinels)) {
    let url = watch.url();
    let stage = Stage::start(parts(|_| url.clone()).into_iter().take(5)).await;
    stage.read().await;
    stage.change(&CHANGERS, 2, usize::MAX, 10);
    sleep(3 * TERM).await;
    let from = wall_ns() - REPLICATED.as_nanos() as u64;
    tokio::task::block_in_place(|| fail_over(&watch));
    eventually("all processes are at the new primary", SOON, async || {
        (!watch.first().is_running() || of_fleet(watch.first()) == Some(0))
            && of_fleet(watch.second()) >= Some(10)
    })
    .await;
    let until = wall_ns() + TERM.as_nanos() as u64;
    sleep(2 * TERM).await;
    stage.are_served_from_memory().await;
    sleep(4 * TERM).await;
    stage.halt(&CHANGERS);
    let changes = stage.changed(&CHANGERS).await;
    println!("{:?} in which writes may be lost", Duration::from_nanos(until - from));
    let made_later = changes.iter().filter(|change| change.error.is_none() && change.began > until).count();
    assert!(made_later > 50, "{made_later} changes after the failover");
    let verdict = stage.evaluate(scene, &changes, &[Loss::OfEntries { from, until }]).await;
    verdict.keeps_the_promise(100).takes_at_most(REACHED + TERM + SLACK);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_process_gives_an_older_value_a_term_after_a_planned_failover() {
    fails_over("a planned failover", Sentinels::start(), Sentinels::fail_over).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_process_gives_an_older_value_a_term_after_the_primary_has_died() {
    fails_over("a primary that dies", Sentinels::vigilant(), |watch| watch.first().kill()).await;
}
