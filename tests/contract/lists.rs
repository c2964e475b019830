//! Lists of bounded length.

use super::*;

contract! {
    a_list_takes_as_many_members_as_it_has_room_for,
    simultaneous_enlistments_stay_within_the_capacity,
    a_list_expires,
}

async fn enlist(node: &Store, member: u64, most: usize, life: Duration) -> bool {
    node.enlist(&key("list"), member.to_le_bytes(), most, life).await.expect("enlist")
}

async fn a_list_takes_as_many_members_as_it_has_room_for(world: &World) {
    let nodes = [world.node().await, world.node().await];
    for member in 0..3 {
        assert!(enlist(&nodes[0], member, 3, LEASE).await, "{member}");
    }
    assert!(!enlist(&nodes[1], 3, 3, LEASE).await);
    for member in 0..3 {
        assert!(enlist(&nodes[1], member, 3, LEASE).await, "{member} is on it already");
        assert!(enlist(&nodes[1], member, 1, LEASE).await, "{member}, also where there is less room now");
    }
    assert!(enlist(&nodes[1], 3, 4, LEASE).await);
    assert!(!enlist(&nodes[1], 4, 0, LEASE).await);
}

async fn simultaneous_enlistments_stay_within_the_capacity(world: &World) {
    let nodes = [world.node().await, world.node().await];
    let requests = (0..60).map(|member| enlist(&nodes[member as usize % 2], member, 8, LEASE));
    assert_eq!(join_all(requests).await.iter().filter(|listed| **listed).count(), 8, "A5");
}

async fn a_list_expires(world: &World) {
    let node = world.node().await;
    assert!(!enlist(&node, 0, 0, LEASE).await);
    assert!(enlist(&node, 0, 2, ms(50)).await);
    // A later member does not prolong the list.
    enlist(&node, 1, 2, LEASE).await;
    let started = Instant::now();
    while !enlist(&node, 2, 2, LEASE).await {
        assert!(started.elapsed() < WITHIN);
        tokio::time::sleep(ms(5)).await;
    }
}
