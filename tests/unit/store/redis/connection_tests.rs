//! A connection that breaks or stops answering while it is not used.

use futures_util::FutureExt as _;
use redis::{Client, Cmd, Value};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;

use super::send::SendMode;
use super::*;
use crate::health::LinkState;
use crate::store::contract::support::redis_server::RedisServer;
use crate::store::redis::errors::reason;
use tokio::time::timeout;

impl Supervisor {
    pub(crate) async fn send_once(
        self: &Arc<Self>,
        cmd: &Cmd,
        within: Duration,
    ) -> Result<Value, StoreError> {
        self.send("", cmd, within, SendMode::Once).await.map(|(reply, _)| reply)
    }
}

/// What a server does after it has answered the first check on a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Then {
    Answers,
    Closes,
    Hangs,
}

/// How long a connection is idle before it is checked.
const SOON: Duration = Duration::from_millis(20);

/// A server that behaves like `then` on its first connection, and answers on all later ones. The receiver has the number of checks that the
/// server has received on all connections.
async fn server(then: Then) -> (String, watch::Receiver<usize>) {
    let listener = TcpListener::bind(("127.0.0.1", 0)).await.expect("a free port");
    let url = format!("redis://{}/", listener.local_addr().expect("bound"));
    let (looks, look_count) = watch::channel(0);
    tokio::spawn(async move {
        let mut first = true;
        while let Ok((mut socket, _)) = listener.accept().await {
            let then = if std::mem::take(&mut first) { then } else { Then::Answers };
            let looks = looks.clone();
            tokio::spawn(async move {
                let mut buffer = [0; 1024];
                let mut answered = false;
                while let Ok(n @ 1..) = socket.read(&mut buffer).await {
                    if !buffer[..n].windows(4).any(|window| window == b"TIME") {
                        let _ = socket.write_all(b"+OK\r\n").await;
                        continue;
                    }
                    looks.send_modify(|looks| *looks += 1);
                    if answered && then == Then::Hangs {
                        continue;
                    }
                    let _ = socket.write_all(b"+PONG\r\n*2\r\n$1\r\n1\r\n$1\r\n0\r\n").await;
                    if buffer[..n].windows(4).any(|window| window == b"ROLE") {
                        let _ = socket.write_all(b"-NOPERM it is a secret\r\n").await;
                    }
                    answered = true;
                    if then == Then::Closes {
                        return;
                    }
                }
            });
        }
    });
    (url, look_count)
}

fn live(supervisor: &Supervisor) -> LiveConnection {
    supervisor.current("").expect("up").expect("connected")
}

async fn supervisor(url: &str, idle: Duration) -> Arc<Supervisor> {
    let client = Client::open(url).expect("an address");
    let mut connector = Connector::new(&client, Duration::from_millis(50));
    connector.idle = idle;
    let supervisor = Supervisor::new(connector);
    supervisor.until_up().await.expect("connects");
    supervisor
}

/// The connection is replaced although no command is sent.
async fn is_replaced(then: Then) {
    let (url, _look_count) = server(then).await;
    let supervisor = supervisor(&url, SOON).await;
    let mut generations = supervisor.generations();
    let replaced = timeout(Duration::from_secs(10), generations.wait_for(|generation| *generation >= 2));
    assert!(replaced.await.is_ok(), "{then:?}");
    supervisor.until_up().await.expect("connected");
}

#[tokio::test]
async fn a_connection_that_is_cut_while_idle_is_replaced_before_it_is_needed() {
    is_replaced(Then::Closes).await;
}

#[tokio::test]
async fn a_connection_that_dies_in_silence_while_idle_is_replaced_before_it_is_needed() {
    is_replaced(Then::Hangs).await;
}

#[tokio::test]
async fn a_used_connection_is_not_checked() {
    let (url, mut look_count) = server(Then::Answers).await;
    let supervisor = supervisor(&url, SOON).await;
    // The connection counts as idle by now, because the first of these checks is made while it connects.
    look_count.wait_for(|looks| *looks >= 3).await.expect("the server lives");
    let used = async {
        let before = *look_count.borrow();
        for _ in 0..40 {
            live(&supervisor).traffic.breaker.record_answer(None);
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        *look_count.borrow() - before
    };
    let looks = used.await;
    assert!(looks <= 6, "{looks} looks, of ten that an idle one has");
    assert!(supervisor.down().is_none());
}

/// Otherwise, with little traffic, each lost command would be taken for a single slow one.
#[tokio::test]
async fn a_lost_command_causes_a_check_of_the_connection() {
    let (url, _look_count) = server(Then::Hangs).await;
    let supervisor = supervisor(&url, Duration::from_secs(3600)).await;
    let mut generations = supervisor.generations();
    let generation = *generations.borrow_and_update();
    supervisor.handle_timeout(generation, &live(&supervisor).traffic.breaker, Duration::from_millis(50));
    let replaced = timeout(Duration::from_secs(10), generations.wait_for(|generation| *generation >= 2));
    assert!(replaced.await.is_ok(), "it waits for the next lone command");
}

/// Regression: the first connection hung for half a second, and each of five requests, one after another, waited for it during its whole
/// budget.
#[tokio::test]
async fn a_caller_that_comes_after_two_deadlines_does_not_wait_for_a_first_connection() {
    // The kernel accepts the connection, and no server answers.
    let listener = TcpListener::bind(("127.0.0.1", 0)).await.expect("a free port");
    let url = format!("redis://user:pw@{}/", listener.local_addr().expect("bound"));
    let answer = Duration::from_millis(50);
    let supervisor = Supervisor::new(Connector::new(&Client::open(url).expect("an address"), answer));
    let get = redis::cmd("GET").arg("k").to_owned();
    for _ in 0..2 {
        let why = supervisor.send_once(&get, answer).await.expect_err("it says nothing");
        assert_eq!(why.kind, StoreErrorKind::Unavailable, "it was not sent");
    }
    let third = supervisor.send_once(&get, Duration::from_secs(60)).now_or_never().expect("it does not wait");
    assert_eq!(third.expect_err("it says nothing").kind, StoreErrorKind::Unavailable);
    assert_eq!(supervisor.link().0, LinkState::Down);
    // A caller that only wants to connect waits for the end of the attempt to connect.
    #[cfg(feature = "cluster")]
    {
        supervisor.settled().await.expect_err("it says nothing");
        assert!(matches!(supervisor.slot().state, ConnectionState::Down(_)));
    }
}

/// A server that became a replica goes on answering reads, and a process that has only hits sends nothing else.
#[tokio::test]
async fn a_guard_that_only_reads_leaves_a_server_that_became_a_replica() {
    let server = RedisServer::start();
    server.run::<()>(&["ACL", "SETUSER", "minimal", "+role"]);
    let client = Client::open(server.minimal_user()).expect("an address");
    let mut connector = Connector::new(&client, Duration::from_secs(1));
    (connector.idle, connector.clock) = (SOON, 2 * SOON);
    let supervisor = Supervisor::new(connector);
    supervisor.until_up().await.expect("connects");
    server.run::<()>(&["REPLICAOF", "127.0.0.1", "1"]);
    let get = redis::cmd("GET").arg("sg1:e:{ns:k}").to_owned();
    let left = async {
        loop {
            if let Err(error) = supervisor.send_once(&get, Duration::from_secs(1)).await {
                return error;
            }
        }
    };
    let why = timeout(Duration::from_secs(10), left).await.expect("it is read from for ever");
    assert!(reason(&why).contains("replica"), "{why:?}");
    // The server does not count as the primary again until it is one.
    let mut looks = supervisor.generations();
    for _ in 0..3 {
        looks.changed().await.expect("the supervisor lives");
        assert!(supervisor.down().is_some());
    }
    server.run::<()>(&["REPLICAOF", "NO", "ONE"]);
    supervisor.until_up().await.expect("it is the primary again");
}

/// If the server refuses ROLE for want of rights, the connection stays open, and the guard does not send ROLE again.
#[tokio::test]
async fn role_is_not_sent_again_to_a_server_that_refuses_it() {
    let server = RedisServer::start();
    let client = Client::open(server.minimal_user()).expect("an address");
    let mut connector = Connector::new(&client, Duration::from_secs(1));
    connector.idle = SOON;
    let supervisor = Supervisor::new(connector);
    supervisor.until_up().await.expect("connects");
    let looks = || -> usize {
        let stats: String = server.run(&["INFO", "commandstats"]);
        let calls = |line: &str| line.strip_prefix("cmdstat_time:calls=")?.split(',').next()?.parse().ok();
        stats.lines().find_map(calls).unwrap_or(0)
    };
    let before = looks();
    let five_checks = async {
        while looks() < before + 5 {
            tokio::time::sleep(SOON).await;
        }
    };
    timeout(Duration::from_secs(10), five_checks).await.expect("it is checked");
    // The guard does not send ROLE on a later connection either.
    let mut looks = supervisor.generations();
    server.kill_clients();
    looks.changed().await.expect("the supervisor lives");
    supervisor.until_up().await.expect("connects again");
    let stats: String = server.run(&["INFO", "commandstats"]);
    let refused = stats.lines().find(|line| line.starts_with("cmdstat_role")).expect("it was sent");
    assert!(refused.contains("rejected_calls=1,"), "{refused}");
    assert!(supervisor.down().is_none());
}

/// A server that closes each of its first `breaks` connections at its first GET, and answers nil on later ones. Returns its URL, and a
/// receiver that has the number of GETs so far.
async fn breaking_server(breaks: usize) -> (String, watch::Receiver<usize>) {
    let listener = TcpListener::bind(("127.0.0.1", 0)).await.expect("a free port");
    let url = format!("redis://{}/", listener.local_addr().expect("bound"));
    let (gets, seen) = watch::channel(0);
    tokio::spawn(async move {
        while let Ok((mut socket, _)) = listener.accept().await {
            let gets = gets.clone();
            tokio::spawn(async move {
                let mut buffer = [0; 1024];
                while let Ok(n @ 1..) = socket.read(&mut buffer).await {
                    let has = |word: &[u8]| buffer[..n].windows(word.len()).any(|window| window == word);
                    let reply: &[u8] = match () {
                        () if has(b"ROLE") => {
                            b"+PONG\r\n*2\r\n$1\r\n1\r\n$1\r\n0\r\n-NOPERM it is a secret\r\n"
                        }
                        () if has(b"TIME") => b"+PONG\r\n*2\r\n$1\r\n1\r\n$1\r\n0\r\n",
                        () if !has(b"GET") => b"+OK\r\n",
                        () => {
                            gets.send_modify(|gets| *gets += 1);
                            if *gets.borrow() <= breaks {
                                return;
                            }
                            b"$-1\r\n"
                        }
                    };
                    let _ = socket.write_all(reply).await;
                }
            });
        }
    });
    (url, seen)
}

async fn patient_supervisor(url: &str) -> Arc<Supervisor> {
    let client = Client::open(url).expect("an address");
    let mut connector = Connector::new(&client, Duration::from_secs(5));
    connector.idle = Duration::from_secs(3600);
    let supervisor = Supervisor::new(connector);
    supervisor.until_up().await.expect("connects");
    supervisor
}

/// Regression: only the next command noticed the cut. Its caller lost the hit, and its load ran without the fleet.
#[tokio::test]
async fn a_connection_that_is_cut_while_idle_is_replaced_without_a_command_or_a_check() {
    let (url, _look_count) = server(Then::Closes).await;
    let supervisor = supervisor(&url, Duration::from_secs(3600)).await;
    let mut generations = supervisor.generations();
    let replaced = timeout(Duration::from_secs(10), generations.wait_for(|generation| *generation >= 2));
    assert!(replaced.await.is_ok(), "it waits for the next command");
}

#[tokio::test]
async fn a_read_that_meets_a_broken_connection_is_repeated_once() {
    let get = redis::cmd("GET").arg("sg1:e:{ns:k}").to_owned();
    for (breaks, sent, record_answer) in [(1, 2, true), (3, 2, false)] {
        let (url, seen) = breaking_server(breaks).await;
        let supervisor = patient_supervisor(&url).await;
        let read = supervisor.send("", &get, Duration::from_secs(10), SendMode::Repeat).await;
        assert_eq!((*seen.borrow(), read.is_ok()), (sent, record_answer), "{breaks} breaks: {read:?}");
    }
}

/// The broken command may have run, so only its caller can decide whether to repeat it. The next command waits for the new connection.
#[tokio::test]
async fn a_command_that_may_not_run_twice_is_not_repeated() {
    let get = redis::cmd("GET").arg("sg1:e:{ns:k}").to_owned();
    let (url, seen) = breaking_server(1).await;
    let supervisor = patient_supervisor(&url).await;
    let broken =
        supervisor.send_once(&get, Duration::from_secs(10)).await.expect_err("the server has closed it");
    assert_eq!((broken.kind, *seen.borrow()), (StoreErrorKind::Broken, 1));
    supervisor.send_once(&get, Duration::from_secs(10)).await.expect("it waits for the new connection");
}

/// The breaker opens at the second break, so that callers do not wait for a server that accepts connections and breaks each of them.
#[tokio::test]
async fn callers_do_not_wait_after_a_second_break() {
    let get = redis::cmd("GET").arg("sg1:e:{ns:k}").to_owned();
    let (url, _seen) = breaking_server(usize::MAX).await;
    let supervisor = patient_supervisor(&url).await;
    supervisor
        .send("", &get, Duration::from_secs(10), SendMode::Repeat)
        .await
        .expect_err("it is broken twice");
    let refused =
        supervisor.send_once(&get, Duration::from_secs(10)).now_or_never().expect("it does not wait");
    assert_eq!(refused.expect_err("there is no connection").kind, StoreErrorKind::Unavailable);
}
