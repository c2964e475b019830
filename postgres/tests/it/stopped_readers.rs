//! A reader that is stopped (SIGSTOP, a frozen machine) holds up neither the server nor its successor.

use std::time::Duration;

use futures_util::FutureExt as _;
use stampede_guard::StampedeGuard;
use stampede_guard_postgres::PostgresLog;

use crate::support::PATIENCE;
use crate::support::postgres_server::PostgresServer;
use crate::support::probe::eventually;
use crate::support::processes::{Child, Fleet, Role};
use crate::support::redis_server::RedisServer;

pub(crate) const ROLES: &[Role] = &[("stopped-reader", |child| read(child).boxed())];

async fn read(child: Child) {
    let (redis, postgres): (String, String) = child.config();
    let client = stampede_guard::redis::Client::open(redis).unwrap();
    let policy = stampede_guard::Policy::builder().invalidate_all(true).build().unwrap();
    let guard = StampedeGuard::builder(client).policy(policy).build().unwrap();
    let reading = PostgresLog::builder(&guard, vec![postgres]).build().unwrap().spawn();
    child.ready();
    reading.await.unwrap();
}

/// The walsender of a stopped reader with a full connection waits in the middle of a message. The checkpoint that finds the slot beyond
/// `max_slot_wal_keep_size` ends that walsender by SIGTERM and waits for its end; the walsender then tries to send the reason, and
/// `wal_sender_timeout` does not apply to that. Only `tcp_user_timeout` ends it. Without, no checkpoint of the server ends.
#[tokio::test(flavor = "multi_thread")]
async fn a_stopped_reader_does_not_hold_up_the_checkpoints_of_the_server() {
    let redis = RedisServer::start();
    let postgres = PostgresServer::with_settings([("max_slot_wal_keep_size", "1MB")]);
    let reader = Fleet::spawn(1, "stopped-reader", &(redis.url(), postgres.url()));
    reader.wait_ready().await;
    let client = postgres.connect().await;
    eventually("the slot is read", PATIENCE, async || {
        let streaming = "select count(*) = 1 from pg_stat_replication where state = 'streaming'";
        client.query_one(streaming, &[]).await.unwrap().get(0)
    })
    .await;
    reader.member(0).pause();
    for _ in 0..12 {
        let filler = "select pg_logical_emit_message(true, 'filler', repeat('-', 900000))";
        client.batch_execute(filler).await.unwrap();
    }
    eventually("the walsender waits for the connection", PATIENCE, async || {
        let waits = "select count(*) = 1 from pg_stat_activity where backend_type = 'walsender' and wait_event = 'WalSenderWriteData'";
        client.query_one(waits, &[]).await.unwrap().get(0)
    })
    .await;
    let checkpoint = tokio::time::timeout(Duration::from_secs(30), client.batch_execute("checkpoint")).await;
    checkpoint.expect("a checkpoint ends").unwrap();
}
