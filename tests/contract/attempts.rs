//! Attempts at changes that reach the store after a later attempt of the same node.

use super::*;
use crate::store::protocol::Announced;
use crate::store::{StoreError, StoreErrorKind};

contract! {
    a_voided_attempt_changes_nothing,
    a_voided_attempt_at_a_tag_changes_nothing,
    an_attempt_voids_only_earlier_ones_of_its_node_and_its_name,
}

/// The changes that one process makes to one key.
struct Changes {
    store: Store,
    key: Key,
}

type Answer = Result<Announced, StoreError>;

impl Changes {
    async fn of(world: &World, text: &str) -> Self {
        Self { store: world.node().await, key: key(text) }
    }

    fn attempt(number: u64, voids_earlier: bool) -> Announcement {
        Announcement { attempt: AttemptNumber { number, voids_earlier }, ..unannounced() }
    }

    async fn invalidate(&self, number: u64, voids_earlier: bool) -> Answer {
        self.store.invalidate(&self.key, None, &Self::attempt(number, voids_earlier), WITHIN).await
    }

    async fn insert(
        &self,
        entry: &'static str,
        over: Option<&'static str>,
        number: u64,
        voids: bool,
    ) -> Answer {
        let insert = Insert { entry: bytes(entry), keep: LEASE, over: over.map(bytes) };
        self.store.invalidate(&self.key, Some(insert), &Self::attempt(number, voids), WITHIN).await
    }

    async fn forget(&self, number: u64, voids_earlier: bool) -> Answer {
        self.store.forget_tag(&self.key, &Self::attempt(number, voids_earlier), WITHIN).await
    }

    async fn entry(&self) -> Option<Bytes> {
        self.store.look_up(&self.key, WITHIN).await.expect("look up")
    }

    async fn id(&self) -> u64 {
        let ids = self.store.tag_ids(std::slice::from_ref(&self.key), LEASE, WITHIN).await;
        ids.expect("ids")[0]
    }
}

/// Asserts that the attempt was voided: it returns an error, and a caller that still needs the change sends it again.
#[track_caller]
fn is_void(answer: Answer) {
    assert_eq!(answer.expect_err("void").kind, StoreErrorKind::TimedOut);
}

async fn a_voided_attempt_changes_nothing(world: &World) {
    let (process, other) = (Changes::of(world, "k").await, Changes::of(world, "k").await);
    process.insert("1", None, 2, true).await.expect("confirmed");
    other.insert("2", None, 9, false).await.expect("confirmed");
    is_void(process.insert("1", None, 1, false).await);
    is_void(process.insert("1", Some("2"), 1, false).await);
    is_void(process.invalidate(1, false).await);
    is_void(process.invalidate(1, true).await);
    assert_eq!(process.entry().await, Some(bytes("2")));
    process.invalidate(2, false).await.expect("not earlier");
    assert_eq!(process.entry().await, None);
    let holder = Flight::holding(world, &process.key).await;
    is_void(process.invalidate(1, false).await);
    assert_eq!(holder.renew(LEASE).await, TokenCheck::Held, "nor is a lease ended");
}

async fn a_voided_attempt_at_a_tag_changes_nothing(world: &World) {
    let process = Changes::of(world, "t").await;
    let before = process.id().await;
    process.forget(2, true).await.expect("confirmed");
    let id = process.id().await;
    assert_ne!(id, before);
    is_void(process.forget(1, false).await);
    assert_eq!(process.id().await, id);
    process.forget(3, false).await.expect("confirmed");
    assert_ne!(process.id().await, id);
}

async fn an_attempt_voids_only_earlier_ones_of_its_node_and_its_name(world: &World) {
    let (process, other) = (Changes::of(world, "a").await, Changes::of(world, "a").await);
    process.insert("1", None, 5, true).await.expect("confirmed");
    other.insert("2", None, 1, false).await.expect("of another node");
    assert_eq!(process.entry().await, Some(bytes("2")));
    process.insert("3", None, 6, false).await.expect("later");
    process.insert("4", None, 5, false).await.expect("not earlier");
    assert_eq!(process.entry().await, Some(bytes("4")));
    let elsewhere = Changes { store: process.store.clone(), key: key("b") };
    elsewhere.insert("1", None, 1, false).await.expect("of another name");
    assert_eq!(elsewhere.entry().await, Some(bytes("1")));
    process.invalidate(7, true).await.expect("later");
    assert_eq!(process.entry().await, None);
}
