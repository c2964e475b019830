//! What requests cost while a server runs but cannot execute commands, and how long it takes until it is used again. (`ailments` and
//! `refusals` test each fault once, with generous bounds, together with its other promises.)

use store_down::{BUDGET, RECOVERY, stores_again_as};

use super::*;
use crate::redis::ailments::{
    CAN_NOT_SAVE, NEED_NOT_SAVE, has_failed_to_save, is_loading, run, run_endless_script, with_a_slow_dump,
    without_a_folder,
};
use crate::support::rounds::{Rounds, Timing};

/// In each round `fall` makes the server fail, and `heal` waits until it works again. The first failure lasts until the pauses between
/// attempts to connect have grown.
async fn is_used_a_second_after(
    server: &RedisServer,
    mut fall: impl AsyncFnMut(),
    mut heal: impl AsyncFnMut(),
) {
    let guard = local(server, Policy::default()).await;
    fall().await;
    requests(&guard, "before", 3).await;
    tokio::time::sleep(GROWN).await;
    heal().await;
    stores_again_as(&guard, "before").await;
    let mut rounds = Rounds::of(std::thread::current().name().unwrap_or_default());
    while let Some(round) = rounds.next() {
        fall().await;
        let added = requests(&guard, &format!("ill-{round}"), 40).await;
        heal().await;
        let usable = stores_again_as(&guard, &format!("well-{round}")).await;
        rounds.note([
            Timing::once("the first", added[0], BUDGET),
            Timing::once("the second", added[1], BUDGET),
            // A server that replies with refusals costs a request its round trips.
            Timing::median("later ones", &added[2..], NOTHING / 2),
            Timing::once("usable", usable, RECOVERY),
        ]);
    }
}

/// Like `is_used_a_second_after`, with commands for the beginning and for the end of the failure.
async fn is_used_a_second_after_commands(fall: &[&[&str]], heal: &[&str]) {
    let server = RedisServer::start();
    // These connections are opened before the failure, because there may be no room for others later.
    let (mut admin, mut other) = (server.conn(), server.conn());
    let fall = async || fall.iter().for_each(|command| run(&mut admin, command));
    is_used_a_second_after(&server, fall, async || run(&mut other, heal)).await;
}

#[tokio::test]
async fn a_server_without_memory_is_used_a_second_after_it_has_some() {
    is_used_a_second_after_commands(
        &[&["CONFIG", "SET", "maxmemory", "1"]],
        &["CONFIG", "SET", "maxmemory", "0"],
    )
    .await;
}

#[tokio::test]
async fn a_replica_is_used_a_second_after_it_is_a_primary() {
    is_used_a_second_after_commands(&[&["REPLICAOF", "127.0.0.1", "1"]], &["REPLICAOF", "NO", "ONE"]).await;
}

#[tokio::test]
async fn a_replica_that_has_lost_its_primary_is_used_a_second_after_it_is_one() {
    let no_stale: &[_] = &["CONFIG", "SET", "replica-serve-stale-data", "no"];
    is_used_a_second_after_commands(
        &[no_stale, &["REPLICAOF", "127.0.0.1", "1"]],
        &["REPLICAOF", "NO", "ONE"],
    )
    .await;
}

#[tokio::test]
async fn a_server_that_has_lost_its_replicas_is_used_a_second_after_it_has_them() {
    is_used_a_second_after_commands(
        &[&["CONFIG", "SET", "min-replicas-to-write", "1"]],
        &["CONFIG", "SET", "min-replicas-to-write", "0"],
    )
    .await;
}

#[tokio::test]
async fn a_server_without_room_for_connections_is_used_a_second_after_it_has_some() {
    let cut: [&[_]; 2] =
        [&["CLIENT", "KILL", "TYPE", "pubsub"], &["CLIENT", "KILL", "TYPE", "normal", "USER", "minimal"]];
    is_used_a_second_after_commands(
        &[&["CONFIG", "SET", "maxclients", "1"], cut[0], cut[1]],
        &["CONFIG", "SET", "maxclients", "10000"],
    )
    .await;
}

#[tokio::test]
async fn rights_are_used_a_second_after_they_are_restored() {
    is_used_a_second_after_commands(
        &[&["ACL", "SETUSER", "minimal", "-evalsha", "-eval"]],
        &["ACL", "SETUSER", "minimal", "+evalsha", "+eval"],
    )
    .await;
}

#[tokio::test]
async fn a_changed_password_is_used_a_second_after_it_is_right_again() {
    let cut: &[_] = &["CLIENT", "KILL", "USER", "minimal"];
    is_used_a_second_after_commands(
        &[&["ACL", "SETUSER", "minimal", "resetpass", ">another"], cut],
        &["ACL", "SETUSER", "minimal", "resetpass", ">pw"],
    )
    .await;
}

#[tokio::test]
async fn a_server_that_could_not_save_is_used_a_second_after_it_can() {
    let (_files, server) = without_a_folder();
    has_failed_to_save(&mut server.conn()).await;
    server.run::<()>(&NEED_NOT_SAVE);
    let (fall, heal) = (async || server.run(&CAN_NOT_SAVE), async || server.run(&NEED_NOT_SAVE));
    is_used_a_second_after(&server, fall, heal).await;
}

#[tokio::test]
async fn a_server_that_was_busy_is_used_a_second_after_its_script_has_ended() {
    // This is the old name of `busy-reply-threshold`, which Redis 6.2 knows, too.
    let server = RedisServer::with_args(["--lua-time-limit", "100"]);
    let (mut admin, mut other) = (server.conn(), server.conn());
    let fall = async || drop(run_endless_script(&server, &mut admin).await);
    // SCRIPT KILL works because the script has written nothing.
    is_used_a_second_after(&server, fall, async || run(&mut other, &["SCRIPT", "KILL"])).await;
}

#[tokio::test]
async fn a_server_that_loads_its_dump_is_used_a_second_after_it_has() {
    let (_files, server) = with_a_slow_dump(3_000);
    server.run::<()>(&["SAVE"]);
    let heal = async || eventually("it has loaded", PATIENCE, async || !is_loading(&server)).await;
    is_used_a_second_after(&server, async || server.restart(), heal).await;
}
