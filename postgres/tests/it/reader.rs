//! From commit to cache, on real servers: each committed change is invalidated in every process, whatever fails in between.

use std::time::{Duration, Instant};

use futures_util::FutureExt as _;
use serde::{Deserialize, Serialize};
use stampede_guard::{Policy, StampedeGuard};
use stampede_guard_postgres::{LogMessage, LogPosition, PostgresLog};
use tokio_postgres::Client;

use crate::support::PATIENCE;
use crate::support::postgres_server::PostgresServer;
use crate::support::probe::eventually;
use crate::support::processes::{Child, Fleet, Role};
use crate::support::redis_server::RedisServer;

pub(crate) const ROLES: &[Role] =
    &[("reader", |child| read(child).boxed()), ("writer", |child| write(child).boxed())];

/// A fault is over and all commits are final after this time.
const AFTER_A_FAULT: Duration = Duration::from_secs(2);

/// Where the servers of a test are.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Places {
    redis: String,
    postgres: Vec<String>,
}

impl Places {
    fn guard(&self) -> StampedeGuard {
        let policy = Policy::builder()
            .invalidate_all(true)
            .fresh_for(Duration::from_secs(3600))
            .local_for(Duration::from_secs(3600))
            .build()
            .unwrap();
        let client = stampede_guard::redis::Client::open(&*self.redis).unwrap();
        StampedeGuard::builder(client).namespace("bank").policy(policy).build().unwrap()
    }

    fn log(&self, guard: &StampedeGuard) -> PostgresLog {
        PostgresLog::builder(guard, self.postgres.clone()).slot("stampede_guard").build().unwrap()
    }
}

struct Servers {
    redis: RedisServer,
    postgres: PostgresServer,
}

impl Servers {
    fn start() -> Self {
        Self { redis: RedisServer::start(), postgres: PostgresServer::start() }
    }

    fn places(&self) -> Places {
        Places { redis: self.redis.url(), postgres: vec![self.postgres.url()] }
    }
}

async fn emit(client: &impl tokio_postgres::GenericClient, message: LogMessage) {
    client.execute(LogMessage::SQL, &[&message.to_bytes()]).await.unwrap();
}

async fn get(guard: &StampedeGuard, key: &str) -> Option<u32> {
    guard.get(key).await.ok().flatten()
}

async fn is_gone(guard: &StampedeGuard, key: &str) -> bool {
    matches!(guard.get::<u32>(key).await, Ok(None))
}

/// Waits until the reader has passed all that is committed now.
async fn read_all(log: &PostgresLog, client: &Client) {
    let position = position(client).await;
    eventually("the reader has read it", PATIENCE, || log.wait_for(position)).await;
}

async fn position(client: &Client) -> LogPosition {
    client.query_one(LogPosition::SQL, &[]).await.unwrap().get::<_, String>(0).parse().unwrap()
}

/// A running reader; aborted when it is dropped.
struct Reading(tokio::task::JoinHandle<()>);

impl Drop for Reading {
    fn drop(&mut self) {
        self.0.abort();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_committed_is_invalidated_in_every_process_and_nothing_else() {
    let servers = Servers::start();
    let places = servers.places();
    let guards = [places.guard(), places.guard()];
    let log = places.log(&guards[0]);
    let _reading = Reading(log.spawn());
    let mut client = servers.postgres.connect().await;
    read_all(&log, &client).await;
    for key in ["committed", "rolled back", "savepoint", "tagged", "non-transactional"] {
        guards[0].insert_with_tags(key, &1_u32, (key == "tagged").then_some("tag")).await.unwrap();
        assert_eq!(get(&guards[1], key).await, Some(1), "{key}");
    }

    let transaction = client.transaction().await.unwrap();
    emit(&transaction, LogMessage::new().key("rolled back")).await;
    transaction.rollback().await.unwrap();
    let mut transaction = client.transaction().await.unwrap();
    let savepoint = transaction.savepoint("part").await.unwrap();
    emit(&savepoint, LogMessage::new().key("savepoint")).await;
    savepoint.rollback().await.unwrap();
    emit(&transaction, LogMessage::new().key("committed").tag("tag")).await;
    for guard in &guards {
        assert_eq!(get(guard, "committed").await, Some(1), "it is not committed yet");
    }
    transaction.commit().await.unwrap();
    read_all(&log, &client).await;
    for guard in &guards {
        assert_eq!((get(guard, "committed").await, get(guard, "tagged").await), (None, None));
        assert_eq!((get(guard, "rolled back").await, get(guard, "savepoint").await), (Some(1), Some(1)));
    }
    // Other programs' messages are no concern; a message that cannot be read may have named anything.
    client.execute("select pg_logical_emit_message(true, 'another', 'key')", &[]).await.unwrap();
    client.execute("select pg_logical_emit_message(true, 'stampede-guard-2', '{')", &[]).await.unwrap();
    read_all(&log, &client).await;
    assert_eq!(get(&guards[1], "savepoint").await, Some(1));
    client.execute("select pg_logical_emit_message(true, 'stampede-guard', '{')", &[]).await.unwrap();
    read_all(&log, &client).await;
    assert_eq!(get(&guards[1], "savepoint").await, None);
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_are_mapped_to_names_by_a_function() {
    let servers = Servers::start();
    let client = servers.postgres.connect().await;
    client
        .batch_execute(
            "create table products (id int primary key, category text); \
             alter table products replica identity full; \
             create table others (id int primary key); \
             insert into products values (1, 'oak'), (2, 'oak'); insert into others values (1); \
             create publication shop for table products, others",
        )
        .await
        .unwrap();
    let places = servers.places();
    let guard = places.guard();
    let log = PostgresLog::builder(&guard, places.postgres.clone()).publication("shop").rows(|row| {
        assert_eq!(row.schema(), "public");
        match row.table() {
            "products" => {
                let message =
                    row.each("id").fold(LogMessage::new(), |message, id| message.key(("product", id)));
                row.each("category").fold(message, LogMessage::tag)
            }
            _ => LogMessage::new(),
        }
    });
    let log = log.build().unwrap();
    let _reading = Reading(log.spawn());
    read_all(&log, &client).await;
    let store = async || {
        for id in [1, 2, 3] {
            guard.insert(("product", id), &1_u32).await.unwrap();
        }
        for category in ["oak", "pine"] {
            guard.insert_with_tags(category, &1_u32, [category]).await.unwrap();
        }
    };
    let gone = async || {
        let mut gone = Vec::new();
        for id in [1, 2, 3] {
            gone.extend(guard.get::<u32>(("product", id)).await.unwrap().is_none().then(|| id.to_string()));
        }
        for category in ["oak", "pine"] {
            gone.extend(get(&guard, category).await.is_none().then(|| category.to_owned()));
        }
        gone
    };
    for (change, expected) in [
        ("update products set category = 'pine' where id = 1", &["1", "oak", "pine"][..]),
        ("insert into products values (3, 'pine')", &["3", "pine"]),
        ("delete from products where id = 2", &["2", "oak"]),
        ("update others set id = 2", &[]),
        ("update products set id = 2 where id = 1", &["1", "2", "pine"]),
        ("truncate products", &["1", "2", "3", "oak", "pine"]),
    ] {
        store().await;
        client.batch_execute(change).await.unwrap();
        read_all(&log, &client).await;
        assert_eq!(gone().await, expected, "{change}");
    }
}

/// A user writes through one replica and reads through another one.
#[tokio::test(flavor = "multi_thread")]
async fn a_read_after_a_position_is_given_nothing_older_than_its_commits() {
    let servers = Servers::start();
    let client = servers.postgres.connect().await;
    client
        .batch_execute(
            "create table accounts (id int primary key, cents int); insert into accounts values (1, 0)",
        )
        .await
        .unwrap();
    let places = servers.places();
    let guards = [places.guard(), places.guard()];
    let logs = [places.log(&guards[0]), places.log(&guards[1])];
    let _reading = Reading(logs[0].spawn());
    let load = || {
        let config = servers.postgres.config();
        move || async move {
            let (client, connection) = config.connect(tokio_postgres::NoTls).await?;
            tokio::spawn(connection);
            Ok::<i32, tokio_postgres::Error>(
                client.query_one("select cents from accounts", &[]).await?.get(0),
            )
        }
    };
    read_all(&logs[0], &client).await;
    let message = || LogMessage::new().key(("account", 1));
    for cents in 1..=50 {
        let before = guards[1].get_or_load(("account", 1), load()).await.unwrap();
        assert!(before < cents);
        client.execute("update accounts set cents = $1", &[&cents]).await.unwrap();
        // In a transaction of its own here, so that the position is what orders the two.
        emit(&client, message()).await;
        let position = position(&client).await.to_string();
        let read = logs[1].get_or_load_after(position.parse().unwrap(), ("account", 1), load()).await;
        assert_eq!(read.unwrap(), cents);
    }
    assert!(
        logs[0].stats().within_2_s >= 1
            || logs[0].stats().within_100_ms >= 1
            || logs[0].stats().within_10_ms >= 1
    );

    // No process reads: the value comes from the database, beside the cache.
    drop(_reading);
    client.execute("update accounts set cents = 99", &[]).await.unwrap();
    emit(&client, message()).await;
    let position = position(&client).await;
    let began = Instant::now();
    let read = logs[1].get_or_load_after(position, ("account", 1), load()).await.unwrap();
    assert_eq!((read, guards[1].get::<i32>(("account", 1)).await.unwrap()), (99, Some(50)));
    assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
}

/// The server writes a commit into the log, then waits for a synchronous standby, and only then lets others see it. What is loaded in
/// between is older than the commit.
#[tokio::test(flavor = "multi_thread")]
async fn a_transaction_is_invalidated_once_loads_can_see_it() {
    let servers = Servers::start();
    let client = servers.postgres.connect().await;
    client.batch_execute("create table prices (cents int); insert into prices values (1)").await.unwrap();
    let places = servers.places();
    let guard = places.guard();
    let log = places.log(&guard);
    let _reading = Reading(log.spawn());
    read_all(&log, &client).await;
    let standbys = async |names: &str| {
        let set = format!("alter system set synchronous_standby_names = '{names}'");
        client.execute(&set, &[]).await.unwrap();
        client.execute("select pg_reload_conf()", &[]).await.unwrap();
    };
    let read = async || client.query_one("select cents from prices", &[]).await.unwrap().get::<_, i32>(0);

    standbys("nobody").await;
    let mut writer = servers.postgres.connect().await;
    let writing = tokio::spawn(async move {
        let transaction = writer.transaction().await.unwrap();
        transaction.execute("update prices set cents = 2", &[]).await.unwrap();
        emit(&transaction, LogMessage::new().key("price")).await;
        transaction.commit().await.unwrap();
    });
    let sent = "select coalesce(bool_or(wait_event = 'SyncRep'), false) and \
                (select bool_and(sent_lsn >= pg_current_wal_flush_lsn()) from pg_stat_replication) from pg_stat_activity";
    let is_sent = async || client.query_one(sent, &[]).await.unwrap().get::<_, bool>(0);
    eventually("the commit is sent to the reader, and no one sees it", PATIENCE, is_sent).await;
    // What a load stores now would outlive an invalidation that was sent already.
    assert_eq!(read().await, 1);
    guard.insert("price", &1_u32).await.unwrap();
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!(get(&guard, "price").await, Some(1), "the reader waits");
    standbys("").await;
    writing.await.unwrap();
    assert_eq!(read().await, 2);
    read_all(&log, &client).await;
    assert_eq!(get(&guard, "price").await, None);
}

/// Reads the log until it is killed. Says `ready` when it was begun.
async fn read(child: Child) {
    let places: Places = child.config();
    let guard = places.guard();
    let reading = places.log(&guard).spawn();
    // With a copy in memory, so that invalidations have to wait for this process.
    guard.get_or_load("copy", || async { Ok::<_, String>(1_u32) }).await.unwrap();
    child.ready();
    let asking = async {
        loop {
            let _ = guard.get_or_load("copy", || async { Ok::<_, String>(1_u32) }).await;
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::select! { () = asking => {}, ended = reading => ended.unwrap() }
}

/// Commits messages of the keys "0", "1", .. until it is killed, and reports each after its commit; so the last one may be committed and
/// not reported.
async fn write(child: Child) {
    let places: Places = child.config();
    let config: tokio_postgres::Config = places.postgres[0].parse().unwrap();
    let (client, connection) = config.connect(tokio_postgres::NoTls).await.unwrap();
    tokio::spawn(connection);
    child.ready();
    for number in 0_u32.. {
        emit(&client, LogMessage::new().key(number.to_string())).await;
        child.report().event_with("committed", &number);
    }
}

/// Stores the value of a key, and makes its [`commit_change`].
async fn change(guards: &[StampedeGuard], postgres: &PostgresServer, key: &str) -> Duration {
    eventually("the value is stored", PATIENCE, async || guards[0].insert(key, &1_u32).await.is_ok()).await;
    commit_change(guards, postgres, key).await
}

/// Commits a message that names a key, and waits until no process serves its value. Returns how long that took.
async fn commit_change(guards: &[StampedeGuard], postgres: &PostgresServer, key: &str) -> Duration {
    let client = postgres.connect().await;
    emit(&client, LogMessage::new().key(key)).await;
    let began = Instant::now();
    for guard in guards {
        eventually(key, PATIENCE, || is_gone(guard, key)).await;
    }
    began.elapsed()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reader_that_is_killed_or_stopped_is_replaced() {
    let servers = Servers::start();
    let places = servers.places();
    let guards = [places.guard(), places.guard()];
    let first = Fleet::spawn(1, "reader", &places);
    first.wait_ready().await;
    change(&guards, &servers.postgres, "at first").await;
    let others = Fleet::spawn(2, "reader", &places);
    others.wait_ready().await;
    // Stored before the fault: an insertion afterwards would itself wait for the dead process's copies.
    guards[0].insert("killed", &1_u32).await.unwrap();
    first.member(0).kill();
    let took = commit_change(&guards, &servers.postgres, "killed").await;
    assert!(took < AFTER_A_FAULT * 5, "{took:?}");
    println!("after kill -9 of the reader: {took:?}");
    for stopped in others.members() {
        stopped.pause();
        let took = change(&guards, &servers.postgres, &format!("stopped {took:?}")).await;
        println!("after SIGSTOP: {took:?}");
        assert!(took < AFTER_A_FAULT * 5, "{took:?}");
        stopped.resume();
        let took = change(&guards, &servers.postgres, &format!("resumed {took:?}")).await;
        assert!(took < AFTER_A_FAULT * 5, "{took:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn restarts_of_postgres_and_redis_lose_no_commit() {
    let servers = Servers::start();
    let places = servers.places();
    let guards = [places.guard(), places.guard()];
    let log = places.log(&guards[0]);
    let _reading = Reading(log.spawn());
    change(&guards, &servers.postgres, "at first").await;
    // Committed while no one can read, and read after the restart.
    guards[0].insert("before", &1_u32).await.unwrap();
    for (name, restart) in
        [("kill", PostgresServer::kill as fn(&PostgresServer)), ("stop", PostgresServer::stop)]
    {
        restart(&servers.postgres);
        servers.postgres.start_again();
        let took = change(&guards, &servers.postgres, name).await;
        println!("after {name} of Postgres: {took:?}");
        assert!(took < AFTER_A_FAULT * 5, "{name}: {took:?}");
    }
    servers.redis.kill();
    let client = servers.postgres.connect().await;
    emit(&client, LogMessage::new().key("redis")).await;
    let position = position(&client).await;
    servers.redis.start_again();
    let began = Instant::now();
    eventually("the commit is final", PATIENCE, || log.wait_for(position)).await;
    println!("from the start of Redis until a commit from before it is final: {:?}", began.elapsed());
    let took = change(&guards, &servers.postgres, "after redis").await;
    println!("after kill of Redis: {took:?}");
    assert!(took < AFTER_A_FAULT * 5, "{took:?}");
}

/// The writer dies right after a COMMIT, before it reports it.
#[tokio::test(flavor = "multi_thread")]
async fn a_writer_that_is_killed_after_its_commit_leaves_nothing_stale() {
    let servers = Servers::start();
    let places = servers.places();
    let guard = places.guard();
    let log = places.log(&guard);
    let reader = Fleet::spawn(1, "reader", &places);
    reader.wait_ready().await;
    let client = servers.postgres.connect().await;
    read_all(&log, &client).await;
    for round in 0..5 {
        const KEYS: u32 = 5_000;
        for number in 0..KEYS {
            guard.insert(number.to_string(), &1_u32).await.unwrap();
        }
        let writer = Fleet::spawn(1, "writer", &places);
        writer.wait_ready().await;
        let mut last = 0_u64;
        for _ in 0..20 + 7 * round {
            last = writer.member(0).wait_event("committed").await.as_u64().unwrap();
        }
        // Writer and, in each second round, reader at once.
        writer.member(0).kill();
        if round % 2 == 1 {
            reader.member(0).pause();
            reader.member(0).resume();
        }
        read_all(&log, &client).await;
        for number in 0..=last {
            assert_eq!(get(&guard, &number.to_string()).await, None, "round {round}: {number} of {last}");
        }
        assert_eq!(get(&guard, &(KEYS - 1).to_string()).await, Some(1), "what was not changed is there");
    }
}

/// Whatever a function of rows cannot know may have been anything.
#[tokio::test(flavor = "multi_thread")]
async fn a_row_of_which_something_is_not_known_invalidates_everything() {
    let servers = Servers::start();
    let client = servers.postgres.connect().await;
    client
        .batch_execute(
            "create table products (id int primary key, category text, text text); \
             insert into products select n, 'oak', repeat(md5(n::text), 1000) from generate_series(1, 9) as n; \
             alter table products alter text set storage external; update products set text = text || 'x'; \
             create publication shop for table products",
        )
        .await
        .unwrap();
    let places = servers.places();
    let guard = places.guard();
    let builder = PostgresLog::builder(&guard, places.postgres.clone()).publication("shop");
    let log = builder.rows(|row| {
        let names = |column| row.each(column).fold(LogMessage::new(), LogMessage::key);
        match row.after("id") {
            Some("1") => names("id"),
            Some("2") => names("category"), // not in the replica identity
            Some("3") => names("colour"),
            Some("4") => names("text"), // stored apart, and not sent unless it has changed
            Some("5") => panic!("a mistake"),
            Some("6") => LogMessage::new().key(""),
            Some("7") => row.after("category").into_iter().fold(LogMessage::new(), LogMessage::tag),
            None => row.before("id").into_iter().fold(LogMessage::new(), LogMessage::key),
            Some(_) => LogMessage::new(),
        }
    });
    let log = log.build().unwrap();
    let _reading = Reading(log.spawn());
    read_all(&log, &client).await;
    for (id, expected) in
        [(1, false), (2, true), (3, true), (4, true), (5, true), (6, true), (7, false), (8, false)]
    {
        guard.insert("unrelated", &1_u32).await.unwrap();
        client.execute("update products set category = category || 'x' where id = $1", &[&id]).await.unwrap();
        read_all(&log, &client).await;
        assert_eq!(is_gone(&guard, "unrelated").await, expected, "{id}");
    }
    guard.insert("unrelated", &1_u32).await.unwrap();
    guard.insert("9", &1_u32).await.unwrap();
    client.batch_execute("delete from products where id = 9").await.unwrap();
    read_all(&log, &client).await;
    assert_eq!((get(&guard, "unrelated").await, get(&guard, "9").await), (Some(1), None));

    // Without a publication no row would ever come.
    let lacking =
        PostgresLog::builder(&guard, places.postgres.clone()).publication("shpo").rows(|_| LogMessage::new());
    let report = lacking.build().unwrap().doctor().await.to_string();
    assert!(report.contains("CREATE PUBLICATION shpo FOR TABLE"), "{report}");
}

/// Commits would wait for the reader, and the reader for the commits.
#[tokio::test(flavor = "multi_thread")]
async fn a_reader_is_no_synchronous_standby() {
    let servers = Servers::start();
    let places = servers.places();
    let guards = [places.guard()];
    let log = places.log(&guards[0]);
    let _reading = Reading(log.spawn());
    change(&guards, &servers.postgres, "at first").await;
    let client = servers.postgres.connect().await;
    client.batch_execute("set synchronous_commit = local").await.unwrap();
    client.execute("alter system set synchronous_standby_names = '*'", &[]).await.unwrap();
    client.execute("select pg_reload_conf()", &[]).await.unwrap();
    let is_standby = "select coalesce(bool_or(sync_priority > 0), false) from pg_stat_replication";
    eventually("the reader is a standby", PATIENCE, async || {
        client.query_one(is_standby, &[]).await.unwrap().get(0)
    })
    .await;
    // A commit that waits for the reader ends when the reader gives up.
    let writer = servers.postgres.connect().await;
    let writing = tokio::spawn(async move { emit(&writer, LogMessage::new().key("waits")).await });
    eventually("the reader gives up", PATIENCE, async || {
        !client.query_one(is_standby, &[]).await.unwrap().get::<_, bool>(0)
    })
    .await;
    client.execute("alter system set synchronous_standby_names = ''", &[]).await.unwrap();
    client.execute("select pg_reload_conf()", &[]).await.unwrap();
    writing.await.unwrap();
    change(&guards, &servers.postgres, "afterwards").await;
}

/// What was written while there was no publication cannot be decoded.
#[tokio::test(flavor = "multi_thread")]
async fn a_publication_that_was_dropped_is_made_again_and_everything_invalidated() {
    let servers = Servers::start();
    let places = servers.places();
    let guards = [places.guard()];
    let reading = Reading(places.log(&guards[0]).spawn());
    change(&guards, &servers.postgres, "at first").await;
    drop(reading);
    let client = servers.postgres.connect().await;
    guards[0].insert("unrelated", &1_u32).await.unwrap();
    client
        .batch_execute(
            "drop publication stampede_guard; create table others (id int); insert into others values (1)",
        )
        .await
        .unwrap();
    let log = places.log(&guards[0]);
    let _reading = Reading(log.spawn());
    change(&guards, &servers.postgres, "afterwards").await;
    // Names are invalidated beside everything, and may be gone first.
    read_all(&log, &client).await;
    assert!(is_gone(&guards[0], "unrelated").await);
}

/// Two fleets that share a slot by mistake do not take the log from each other.
#[tokio::test(flavor = "multi_thread")]
async fn a_slot_of_another_fleet_is_an_error() {
    let servers = Servers::start();
    let places = servers.places();
    let guard = places.guard();
    let log = places.log(&guard);
    let _reading = Reading(log.spawn());
    let client = servers.postgres.connect().await;
    read_all(&log, &client).await;
    let policy = Policy::builder().invalidate_all(true).build().unwrap();
    let other =
        StampedeGuard::builder(servers.redis.client()).namespace("other").policy(policy).build().unwrap();
    let intruder = places.log(&other);
    let _intruding = Reading(intruder.spawn());
    let pid = async || {
        let row = client
            .query_one("select active_pid from pg_replication_slots where slot_name = 'stampede_guard'", &[])
            .await;
        row.unwrap().get::<_, Option<i32>>(0)
    };
    let before = pid().await;
    assert!(before.is_some());
    assert!(!intruder.wait_for(position(&client).await).await, "it is never the reader");
    assert_eq!(pid().await, before);
}

/// Without the slot the commits in between are in no log that will be read.
#[tokio::test(flavor = "multi_thread")]
async fn a_failover_to_a_standby_without_the_slot_invalidates_everything() {
    let servers = Servers::start();
    let standby = servers.postgres.standby();
    let mut places = servers.places();
    places.postgres.push(standby.url());
    let guards = [places.guard(), places.guard()];
    let log = places.log(&guards[0]);
    let _reading = Reading(log.spawn());
    change(&guards, &servers.postgres, "at first").await;
    let client = servers.postgres.connect().await;
    let before = position(&client).await;
    guards[0].insert("unrelated", &1_u32).await.unwrap();
    standby.catch_up_with(&servers.postgres).await;
    servers.postgres.kill();
    standby.promote().await;
    let took = change(&guards, &standby, "after the failover").await;
    println!("after a failover: {took:?}");
    assert!(took < AFTER_A_FAULT * 5, "{took:?}");
    let after = position(&standby.connect().await).await;
    assert_ne!(before, after);
    eventually("positions of both timelines", PATIENCE, || log.wait_for(after)).await;
    assert!(log.wait_for(before).await);
    assert!(is_gone(&guards[1], "unrelated").await, "a commit that named it may have been missed");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_slot_invalidates_everything_and_is_made_anew() {
    let postgres = PostgresServer::with_settings([
        ("max_slot_wal_keep_size", "2MB"),
        ("max_wal_size", "2MB"),
        ("min_wal_size", "2MB"),
    ]);
    let servers = Servers { redis: RedisServer::start(), postgres };
    let places = servers.places();
    let guard = places.guard();
    let reading = Reading(places.log(&guard).spawn());
    change(std::slice::from_ref(&guard), &servers.postgres, "at first").await;
    drop(reading);
    let client = servers.postgres.connect().await;
    let status = async || {
        let row = client
            .query_one("select wal_status from pg_replication_slots where slot_name = 'stampede_guard'", &[])
            .await;
        row.unwrap().get::<_, Option<String>>(0)
    };
    guard.insert("missed", &1_u32).await.unwrap();
    emit(&client, LogMessage::new().key("missed")).await;
    while status().await.as_deref() != Some("lost") {
        client
            .batch_execute("select pg_switch_wal(); create table fill (a int); drop table fill; checkpoint")
            .await
            .unwrap();
    }
    assert_eq!(get(&guard, "missed").await, Some(1));
    let _reading = Reading(places.log(&guard).spawn());
    eventually("everything is invalidated", PATIENCE, || is_gone(&guard, "missed")).await;
    let took = change(std::slice::from_ref(&guard), &servers.postgres, "after it").await;
    assert!(took < PATIENCE);
    assert_eq!(status().await.as_deref(), Some("reserved"));
}
