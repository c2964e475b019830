//! The ids of tags, and how long they live.

use super::*;
use crate::store::protocol::NEVER;

contract! {
    an_id_is_created_once_and_replaced_after_it_was_removed,
    an_id_lives_for_the_longest_requested_lifetime,
    an_expiry_changes_the_id_and_says_when_the_values_before_it_ended,
    a_load_sees_which_tags_were_invalidated_since_it_entered_the_journal,
    the_journal_loses_its_oldest_events_first,
}

async fn ids(node: &Store, tags: &[Key], life: Duration) -> Vec<u64> {
    node.tag_ids(tags, life, WITHIN).await.expect("ids")
}

async fn present(node: &Store, tags: &[Key]) -> Vec<Option<u64>> {
    let present = node.present_tags(tags, WITHIN).await.expect("tags");
    present.into_iter().map(|tag| tag.map(|tag| tag.id())).collect()
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

async fn an_expiry_changes_the_id_and_says_when_the_values_before_it_ended(world: &World) {
    let nodes = [world.node().await, world.node().await];
    let tag = [key("tag")];
    let expire = async |at| nodes[1].expire_tag(&tag[0], at, &unannounced(), WITHIN).await.expect("expires");
    let state = async || nodes[0].present_tags(&tag, WITHIN).await.expect("tags")[0];
    expire(5).await;
    assert_eq!(state().await, None, "there is no value with the tag");
    let first = ids(&nodes[0], &tag, LEASE * 10).await[0];
    let mut loaded = vec![first];
    for at in [1_000, 2_000] {
        expire(at).await;
        let state = state().await.expect("the tag stays");
        for older in &loaded {
            assert_eq!(state.expired_since(*older), Some(at));
        }
        let id = ids(&nodes[1], &tag, LEASE).await[0];
        assert_eq!((state.id(), state.expired_since(id)), (id, Some(NEVER)));
        assert_eq!(state.expired_since(id.wrapping_add(1)), None, "an id that there never was");
        loaded.push(id);
    }
    nodes[0].forget_tag(&tag[0], &unannounced(), WITHIN).await.expect("forgets");
    ids(&nodes[1], &tag, LEASE).await;
    let state = state().await.expect("made anew");
    assert!(loaded.iter().all(|older| state.expired_since(*older).is_none()));
}

async fn a_load_sees_which_tags_were_invalidated_since_it_entered_the_journal(world: &World) {
    let nodes = [world.node().await, world.node().await];
    let journal = unannounced().volume;
    let [a, b] = ["a", "b"].map(key);
    let [first, second] = [1, 2].map(Uuid::from_u128);
    let is_current = async |load: Uuid, tags: &[&Key]| {
        let tags: Vec<_> = tags.iter().map(|tag| (*tag).clone()).collect();
        nodes[1].no_tag_since(&journal, load, &tags, WITHIN).await.expect("answers")
    };
    assert!(!is_current(first, &[&a]).await, "it has not entered");
    nodes[0].forget_tag(&a, &unannounced(), WITHIN).await.expect("forgets");
    nodes[0].enter_load(&journal, first, LEASE, WITHIN).await.expect("enters");
    assert!(is_current(first, &[&a, &b]).await, "the tag was invalidated before");
    nodes[0].forget_tag(&a, &unannounced(), WITHIN).await.expect("forgets");
    assert!(!is_current(first, &[&b, &a]).await);
    assert!(is_current(first, &[&b]).await);
    nodes[0].enter_load(&journal, second, LEASE, WITHIN).await.expect("enters");
    assert!(is_current(second, &[&a, &b]).await);
    nodes[1].forget_tag(&b, &unannounced(), WITHIN).await.expect("forgets");
    assert!(!is_current(first, &[&b]).await && !is_current(second, &[&b]).await);
    assert!(is_current(second, &[&a]).await && is_current(second, &[]).await);
}

async fn the_journal_loses_its_oldest_events_first(world: &World) {
    const MOST_EVENTS: u128 = 16_384;
    let (node, journal) = (world.node().await, unannounced().volume);
    let enter = async |load: u128| {
        node.enter_load(&journal, Uuid::from_u128(load), LEASE * 100, WITHIN).await.expect("enters");
    };
    let is_found =
        async |load| node.no_tag_since(&journal, Uuid::from_u128(load), &[], WITHIN).await.expect("answers");
    for begin in (0..MOST_EVENTS).step_by(256) {
        join_all((begin..begin + 256).map(enter)).await;
    }
    // The first 256 were sent at once, so any of them may be the oldest.
    assert!(is_found(0).await && is_found(MOST_EVENTS - 1).await);
    for load in 0..256 {
        enter(MOST_EVENTS + load).await;
    }
    assert!(!is_found(0).await && !is_found(255).await);
    assert!(is_found(256).await && is_found(MOST_EVENTS + 255).await);
    // A tag whose invalidation has left was invalidated before each load that is still found.
    node.forget_tag(&key("tag"), &unannounced(), WITHIN).await.expect("forgets");
    let is_current = async |load| {
        node.no_tag_since(&journal, Uuid::from_u128(load), &[key("tag")], WITHIN).await.expect("answers")
    };
    assert!(!is_current(MOST_EVENTS + 255).await);
    for load in (0..MOST_EVENTS).step_by(256) {
        join_all((0..256).map(|nth| enter(2 * MOST_EVENTS + load + nth))).await;
    }
    assert!(!is_found(MOST_EVENTS + 255).await);
    assert!(is_current(3 * MOST_EVENTS - 1).await);
}
