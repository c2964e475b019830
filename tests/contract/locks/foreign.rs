//! Locks beside other programs, and beside data that other programs have written at the keys of locks.

use super::super::on_redis::world_of;
use super::*;
use crate::store::{StoreError, StoreErrorKind};

#[track_caller]
fn refused<T: std::fmt::Debug>(answer: Result<T, StoreError>) {
    let error = answer.expect_err("it can not be had");
    assert_eq!(error.kind, StoreErrorKind::Refused, "{error:?}");
}

/// S0.16, S3.13: the plain protocol of other languages, `SET key token NX PX` and a compare-and-delete.
#[tokio::test]
async fn a_foreign_lock_excludes_ours_and_is_excluded() {
    let world = World::redis();
    let server = world_of(&world);
    // A user's prefix needs additional rights, which the minimal user does not have.
    server.run::<()>(&["ACL", "SETUSER", "minimal", "~lock:*"]);
    let set = |px: &str| server.run::<Option<String>>(&["SET", "lock:k", "foreign", "NX", "PX", px]);
    let name = LockName::prefixed("lock:k");

    assert!(set("600000").is_some());
    let ours = Asker::separate(&world, &name).await;
    let Taken::Busy { remaining: Some(left) } = ours.take(ours.ask()).await else { panic!("it is foreign") };
    assert!(left > ms(500_000), "{left:?}");
    assert_eq!(ours.look().await.expect("held").token, "foreign");
    assert!(!ours.free().await && !ours.extend(Some(LEASE)).await, "nor is it touched");
    assert_eq!(server.run::<String>(&["GET", "lock:k"]), "foreign");

    // If a foreign client frees it, no waiter is notified; the next take serves the queue in its order.
    ours.must_wait().await;
    server.run::<()>(&["DEL", "lock:k"]);
    let late = Asker::separate(&world, &name).await;
    late.must_wait().await;
    ours.granted().await;
    assert!(set("1000").is_none(), "ours excludes it");
    assert_eq!(server.run::<String>(&["GET", "lock:k"]), ours.token.as_str());
    assert!(ours.free().await);
    late.granted().await;
    assert!(late.free().await);
    assert!(set("600000").is_some());

    // A foreign holder without an expiry can be removed by force.
    server.run::<()>(&["PERSIST", "lock:k"]);
    assert_eq!(ours.take(ours.ask()).await, Taken::Busy { remaining: None });
    assert!(late.force().await);
    ours.granted().await;
    assert_eq!(server.keys(), ["lock:k", "sg1:pf:{lock:k}"]);
    world.check();
}

/// Other programs' data of another type at any of a mutex's keys: each step is answered, the data is not changed, and no key is without a
/// TTL.
#[tokio::test]
async fn foreign_data_at_a_mutexs_keys_is_left_alone() {
    let world = World::redis();
    let server = world_of(&world);
    let node = world.node().await;
    for kind in ["m", "mq", "mf"] {
        for foreign in [&["HSET", "f", "v"][..], &["ZADD", "1", "v"], &["SADD", "v"], &["SET", "v"]] {
            if kind == "m" && foreign[0] == "SET" {
                continue; // A string at this key is a foreign holder.
            }
            let name = mutex(&format!("{kind}:{}", foreign[0]));
            let key = format!("sg1:{kind}:{{{}}}", name.tag);
            let write: Vec<_> = [foreign[0], &key].into_iter().chain(foreign[1..].iter().copied()).collect();
            server.run::<()>(&write);
            server.run::<()>(&["PEXPIRE", &key, "600000"]);
            let before: Vec<u8> = server.run(&["DUMP", &key]);
            let (one, two) = (Asker::on(&node, &name), Asker::on(&node, &name));
            let locks = &node;
            let taken = locks.take_mutex(&name, one.ask(), WITHIN).await.map(|answer| answer.taken);
            let second = locks.take_mutex(&name, two.ask(), WITHIN).await.map(|answer| answer.taken);
            match kind {
                "m" => {
                    refused(taken);
                    refused(second);
                    refused(locks.free_mutex(&name, &one.token, Some(LEASE), WITHIN).await);
                    refused(locks.extend_mutex(&name, &one.token, None, WITHIN).await);
                    refused(locks.look_at_mutex(&name, WITHIN).await);
                    refused(locks.break_mutex(&name, WITHIN).await);
                }
                // Only the queue cannot be used: two askers can still hold the mutex one after the other.
                "mq" => {
                    assert!(matches!(taken, Ok(Taken::Granted { .. })), "{taken:?}");
                    refused(second);
                    assert!(!two.free().await && one.free().await);
                    two.must_take().await;
                    assert!(one.force().await);
                }
                // The stored fence cannot be used, so fences come from the clock alone.
                _ => {
                    let Ok(Taken::Granted { fence }) = taken else { panic!("{taken:?}") };
                    assert!(matches!(second, Ok(Taken::Busy { .. })), "{second:?}");
                    assert!(one.free().await);
                    let next = two.granted().await;
                    assert!(next > fence && two.free().await);
                }
            }
            let after: Vec<u8> = server.run(&["DUMP", &key]);
            assert_eq!(after, before, "{key}");
        }
    }
    world.check();
}

#[tokio::test]
async fn foreign_data_at_a_semaphores_keys_is_left_alone() {
    let world = World::redis();
    let server = world_of(&world);
    let node = world.node().await;
    // The last kind is the layout of a later version (S4.30).
    let kinds = [&["HSET", "f", "v"][..], &["SADD", "v"], &["SET", "v"], &["SET", "2 5 0 60000"]];
    for kind in ["sh", "sq", "sm"] {
        for foreign in kinds {
            let name = semaphore(&format!("{kind}:{}", foreign.join(":")).replace(' ', ""));
            let key = format!("sg1:{kind}:{{{}}}", name.tag);
            let write: Vec<_> = [foreign[0], &key].into_iter().chain(foreign[1..].iter().copied()).collect();
            let asker = Asker::on(&node, &name);
            for there_first in [true, false] {
                if !there_first && kind != "sm" {
                    asker.change(SemaphoreChange::Ensure(asker.ask_permit(1).semaphore)).await;
                }
                server.run::<()>(&write);
                server.run::<()>(&["PEXPIRE", &key, "600000"]);
                let before: Vec<u8> = server.run(&["DUMP", &key]);
                let locks = &node;
                refused(locks.take_permit(&name, asker.ask_permit(1), WITHIN).await);
                refused(locks.free_permit(&name, &asker.token, LEASE, WITHIN).await);
                refused(locks.refresh_permit(&name, &asker.token, LEASE, WITHIN).await);
                let create = asker.ask_permit(1).semaphore;
                let add = SemaphoreChange::Add { permits: 1, semaphore: create };
                for change in
                    [SemaphoreChange::Ensure(create), add, SemaphoreChange::Sweep, SemaphoreChange::Delete]
                {
                    refused(locks.change_semaphore(&name, change, WITHIN).await);
                }
                if kind == "sm" || !there_first {
                    refused(locks.look_at_semaphore(&name, WITHIN).await);
                }
                let after: Vec<u8> = server.run(&["DUMP", &key]);
                assert_eq!(after, before, "{key}");
                server.run::<()>(&["DEL", &key]);
            }
        }
    }
    world.check();
}

/// A list and a sorted set of the right type, whose members were written by other programs.
#[tokio::test]
async fn foreign_members_are_passed_over() {
    let world = World::redis();
    let server = world_of(&world);
    server.run::<()>(&["RPUSH", "sg1:mq:{ns:k}", "", "x", &"y".repeat(65), &"z".repeat(80)]);
    server.run::<()>(&["PEXPIRE", "sg1:mq:{ns:k}", "600000"]);
    let (holder, _) = Asker::holding(&world, &mutex("k")).await;
    assert!(holder.free().await);
    server.run::<()>(&["SET", "sg1:m:{ns:k}", &"y".repeat(65), "PX", "600000"]);
    assert!(holder.force().await, "no node listens to that name");
    assert!(holder.look().await.is_none());

    server.run::<()>(&["RPUSH", "sg1:sq:{ns:k}", "", "x", &"y".repeat(65)]);
    server.run::<()>(&["ZADD", "sg1:sh:{ns:k}", "9007199254740991", "somebody"]);
    let asker = Asker::separate(&world, &semaphore("k")).await;
    assert_eq!(asker.must_take_permit(2).await.available, 0);
    let state = asker.state().await.expect("there");
    assert_eq!((state.available, state.holders.len(), state.waiting), (0, 1, 0));
    assert!(asker.free_permit().await.was_held);
    server.run::<()>(&["DEL", "sg1:sh:{ns:k}"]);
    assert!(asker.must_take_permit(2).await.granted);
    world.check();
}
