//! The ids of tags, and how long they live.

use super::*;

contract! {
    an_id_is_created_once_and_replaced_after_it_was_removed,
    an_id_lives_for_the_longest_requested_lifetime,
}

async fn ids(node: &Store, tags: &[Key], life: Duration) -> Vec<u64> {
    node.tag_ids(tags, life, WITHIN).await.expect("ids")
}

async fn present(node: &Store, tags: &[Key]) -> Vec<Option<u64>> {
    node.present_ids(tags, WITHIN).await.expect("ids")
}

async fn an_id_is_created_once_and_replaced_after_it_was_removed(world: &World) {
    let nodes = [world.node().await, world.node().await];
    let tags: Vec<_> = ["a", "b", "c"].map(key).to_vec();
    assert_eq!(present(&nodes[0], &tags).await, [None; 3]);
    let answers = join_all((0..20).map(|asker: usize| ids(&nodes[asker % 2], &tags, LEASE))).await;
    assert!(answers.iter().all(|answer| *answer == answers[0]), "{answers:?}");
    nodes[1].forget_tag(&tags[1], &unannounced(), WITHIN).await.expect("forgets");
    let [a, b, c] = [0, 1, 2].map(|tag| answers[0][tag]);
    assert_eq!(present(&nodes[0], &tags).await, [Some(a), None, Some(c)]);
    let again = ids(&nodes[0], &tags, LEASE).await;
    assert_eq!((again[0], again[2]), (a, c));
    assert_ne!(again[1], b);
}

async fn an_id_lives_for_the_longest_requested_lifetime(world: &World) {
    let node = world.node().await;
    let [long, short] = [key("long"), key("short")].map(|tag| [tag]);
    let first = ids(&node, &long, ms(1_000)).await;
    assert_eq!(ids(&node, &long, LEASE).await, first);
    assert_eq!(ids(&node, &long, ms(1)).await, first, "which takes nothing away");
    ids(&node, &short, ms(1_000)).await;
    let started = Instant::now();
    while present(&node, &short).await != [None] {
        assert!(started.elapsed() < WITHIN);
        tokio::time::sleep(ms(5)).await;
    }
    assert_eq!(present(&node, &long).await, [Some(first[0])]);
}
