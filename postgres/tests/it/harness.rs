//! Tests of the support itself: a Postgres does what the tests ask of it, and leaves nothing behind.

use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use futures_util::FutureExt as _;
use tokio_postgres::Client;
use tokio_postgres::error::SqlState;

use crate::support::PATIENCE;
use crate::support::os::is_alive;
use crate::support::postgres_server::PostgresServer;
use crate::support::probe::eventually;
use crate::support::processes::{Child, Fleet, Role};

pub(crate) const ROLES: &[Role] = &[("postgres-owner", |child| own_servers(child).boxed())];

async fn setting(client: &Client, name: &str) -> String {
    client.query_one("select current_setting($1)", &[&name]).await.unwrap().get(0)
}

async fn rows(client: &Client) -> Vec<i32> {
    let rows = client.query("select id from rows order by id", &[]).await.unwrap();
    rows.iter().map(|row| row.get(0)).collect()
}

fn refuses(server: &PostgresServer) -> bool {
    TcpStream::connect(("127.0.0.1", server.port())).is_err()
}

#[tokio::test]
async fn servers_have_the_settings_of_the_harness_and_of_the_test_and_share_nothing() {
    let server = PostgresServer::with_settings([("max_slot_wal_keep_size", "7MB"), ("wal_keep_size", "3MB")]);
    let other = PostgresServer::start();
    let client = server.connect().await;
    for (name, expected) in [
        ("wal_level", "logical"),
        ("fsync", "off"),
        ("max_slot_wal_keep_size", "7MB"),
        ("wal_keep_size", "3MB"),
        ("wal_segment_size", "1MB"),
    ] {
        assert_eq!(setting(&client, name).await, expected, "{name}");
    }
    client.batch_execute("create table rows (id int primary key)").await.unwrap();
    let missing = other.connect().await.query("select id from rows", &[]).await.unwrap_err();
    assert_eq!(missing.code(), Some(&SqlState::UNDEFINED_TABLE));
}

#[tokio::test]
async fn a_killed_server_loses_connections_and_open_transactions_and_keeps_committed_rows() {
    let server = PostgresServer::start();
    let mut client = server.connect().await;
    client
        .batch_execute("create table rows (id int primary key); insert into rows values (1)")
        .await
        .unwrap();
    let open = client.transaction().await.unwrap();
    open.batch_execute("insert into rows values (2)").await.unwrap();
    let postmaster = server.pid();

    server.kill();
    assert!(!server.is_running() && !is_alive(postmaster));
    assert!(refuses(&server));
    assert!(open.commit().await.is_err(), "the connection was cut off");

    server.start_again();
    assert_eq!(rows(&server.connect().await).await, [1]);
}

#[tokio::test]
async fn a_stopped_server_keeps_committed_rows() {
    let server = PostgresServer::start();
    let client = server.connect().await;
    client
        .batch_execute("create table rows (id int primary key); insert into rows values (1)")
        .await
        .unwrap();
    server.stop();
    assert!(!server.is_running() && refuses(&server));
    server.start_again();
    assert_eq!(rows(&server.connect().await).await, [1]);
    assert!(server.log().contains("ready to accept connections"));
}

#[tokio::test]
async fn a_paused_server_answers_nothing_until_it_is_resumed() {
    let server = PostgresServer::start();
    let client = server.connect().await;
    server.pause();
    let mut answer = Box::pin(client.query_one("select 1", &[]));
    // An answer that does not come: the one thing that only a while can show.
    let early = tokio::time::timeout(Duration::from_millis(200), &mut answer).await;
    assert!(early.is_err(), "{early:?}");
    server.resume();
    assert_eq!(answer.await.unwrap().get::<_, i32>(0), 1);

    server.pause();
    server.kill();
    assert!(refuses(&server));
    server.start_again();
    server.pause();
}

#[tokio::test]
async fn a_standby_streams_serves_reads_and_is_promoted() {
    let primary = PostgresServer::start();
    let client = primary.connect().await;
    client
        .batch_execute("create table rows (id int primary key); insert into rows values (1)")
        .await
        .unwrap();
    let standby = primary.standby();
    client.batch_execute("insert into rows values (2)").await.unwrap();
    standby.catch_up_with(&primary).await;
    let reader = standby.connect().await;
    assert_eq!(rows(&reader).await, [1, 2]);
    let refused = reader.batch_execute("insert into rows values (3)").await.unwrap_err();
    assert_eq!(refused.code(), Some(&SqlState::READ_ONLY_SQL_TRANSACTION));

    primary.kill();
    standby.promote().await;
    reader.batch_execute("insert into rows values (3)").await.unwrap();
    assert_eq!(rows(&reader).await, [1, 2, 3]);
}

#[tokio::test]
async fn a_slot_loses_its_log_beyond_max_slot_wal_keep_size() {
    let server = PostgresServer::with_settings([("max_slot_wal_keep_size", "1MB")]);
    let client = server.connect().await;
    client.batch_execute("select pg_create_logical_replication_slot('slot', 'pgoutput')").await.unwrap();
    for _ in 0..5 {
        client
            .batch_execute("select pg_logical_emit_message(false, 'filler', repeat('-', 900000))")
            .await
            .unwrap();
    }
    client.batch_execute("checkpoint").await.unwrap();
    let status = client.query_one("select wal_status from pg_replication_slots", &[]).await.unwrap();
    assert_eq!(status.get::<_, &str>(0), "lost");
}

/// What a server leaves on the machine: its processes, its folder, its shared memory.
#[derive(serde::Deserialize, serde::Serialize)]
struct Traces {
    postmaster: u32,
    folder: PathBuf,
    memory: String,
}

impl Traces {
    fn of(server: &PostgresServer) -> Self {
        let pid_file = std::fs::read_to_string(server.folder().join("postmaster.pid")).unwrap();
        let memory =
            pid_file.lines().nth(6).and_then(|line| line.split_whitespace().last()).unwrap().to_owned();
        Self { postmaster: server.pid(), folder: server.folder().to_owned(), memory }
    }

    fn left(&self) -> Vec<String> {
        let folder = self.folder.to_str().unwrap();
        let processes = std::fs::read_dir("/proc").unwrap().flatten().filter_map(|process| {
            let command = std::fs::read_to_string(process.path().join("cmdline")).ok()?;
            // The children have titles such as "postgres: walwriter" and the server's folder as their own.
            let of_server = command.contains(folder)
                || std::fs::read_link(process.path().join("cwd")).ok()? == self.folder;
            of_server.then(|| format!("process {:?}: {command}", process.file_name()))
        });
        let segments = std::fs::read_to_string("/proc/sysvipc/shm").unwrap_or_default();
        let has_memory = segments.lines().any(|line| line.split_whitespace().nth(1) == Some(&self.memory));
        let memory = has_memory.then(|| format!("shared memory {}", self.memory));
        let folder = self.folder.exists().then(|| format!("folder {folder}"));
        processes.chain(memory).chain(folder).collect()
    }
}

#[tokio::test]
async fn a_server_that_is_dropped_in_any_state_leaves_nothing() {
    for end in [|_: &PostgresServer| (), PostgresServer::pause, PostgresServer::kill, PostgresServer::stop] {
        let server = PostgresServer::start();
        let client = server.connect().await;
        let traces = Traces::of(&server);
        assert!(traces.left().len() > 3, "processes, the folder, memory: {:?}", traces.left());
        end(&server);
        drop(server);
        assert_eq!(traces.left(), [""; 0]);
        drop(client);
    }
}

/// Starts two servers, one of which is paused, and waits for its end.
async fn own_servers(child: Child) {
    let servers = [PostgresServer::start(), PostgresServer::start()];
    let traces = servers.each_ref().map(Traces::of);
    servers[1].pause();
    child.result(&traces);
    std::future::pending::<()>().await;
}

/// The servers of a test process that is killed end, paused or not, and their common folder is removed with the template.
#[tokio::test]
async fn a_killed_test_process_leaves_nothing() {
    let owner = Fleet::spawn(1, "postgres-owner", &());
    let traces: Vec<Traces> = owner.member(0).result().await;
    let common = traces[0].folder.parent().unwrap();
    assert!(traces.iter().all(|traces| is_alive(traces.postmaster)));
    assert!(common.join("template").exists());
    owner.member(0).kill();
    let nothing = || traces.iter().all(|traces| traces.left().is_empty()) && !Path::exists(common);
    eventually("nothing is left", PATIENCE, || std::future::ready(nothing())).await;
}
