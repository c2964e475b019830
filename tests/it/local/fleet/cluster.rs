//! Slots that migrate between the masters of a cluster: the slot of the registry, and those of keys.

use std::collections::HashMap;
use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::stage::Stage;
use super::well::{CHANGERS, parts};
use super::{SLACK, TERM};
use crate::support::cluster::{Cluster, master_of};

/// How much longer a change may take because a slot migrates.
const MOVED: Duration = Duration::from_secs(2);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_process_gives_an_older_value_while_slots_move() {
    const LASTS: Duration = Duration::from_secs(8);
    let cluster = tokio::task::block_in_place(Cluster::patient);
    let url = cluster.url();
    let stage = Stage::start(parts(|_| url.clone()).into_iter().take(6)).await;
    stage.read().await;
    stage.change(&CHANGERS, 2, usize::MAX, 10);
    // The name of the registry has the hash tag of an empty key.
    let registry = cluster.slot_of("");
    let mut owners = HashMap::new();
    let (began, mut moved) = (Instant::now(), 0);
    while began.elapsed() < LASTS {
        sleep(Duration::from_millis(fastrand::u64(50..400))).await;
        let entries: Vec<_> = cluster.keys().into_iter().filter(|key| key.starts_with("sg1:e:")).collect();
        let slot = match fastrand::choice(&entries) {
            Some(entry) if moved % 2 == 1 => cluster.node(0).run(&["CLUSTER", "KEYSLOT", entry]),
            _ => registry,
        };
        let from = *owners.entry(slot).or_insert_with(|| master_of(slot));
        let to = (from + fastrand::usize(1..3)) % 3;
        tokio::task::block_in_place(|| cluster.move_slot(slot, from, to));
        owners.insert(slot, to);
        moved += 1;
    }
    assert!(moved >= 6, "{moved} slots were moved");
    sleep(2 * TERM).await;
    stage.are_served_from_memory().await;
    stage.halt(&CHANGERS);
    let changes = stage.changed(&CHANGERS).await;
    println!("{moved} slots were moved");
    let verdict = stage.evaluate("slots move", &changes, &[]).await;
    verdict.keeps_the_promise(100).takes_at_most(MOVED + TERM + SLACK);
}
