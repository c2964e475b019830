//! The server's clock decides whether a value is fresh, so processes with different clocks agree.
//!
//! The machine has only one clock, so a relay between node and server changes the replies to TIME.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

use super::*;

const HOUR: i64 = 3_600;

/// The lease is so long that no test waits for its end.
const LEASE: Duration = Duration::from_secs(60);

/// A relay that passes everything on, and shifts the seconds in the replies to TIME.
pub(crate) struct Relay {
    pub(crate) url: String,
    seconds: Arc<AtomicI64>,
}

impl Relay {
    pub(crate) async fn start(server: &RedisServer, seconds: i64) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.expect("a free port");
        let url = format!("redis://minimal:pw@{}/", listener.local_addr().expect("bound"));
        let (seconds, port) = (Arc::new(AtomicI64::new(seconds)), server.port());
        let moved = Arc::clone(&seconds);
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                tokio::spawn(relay(client, port, Arc::clone(&moved)));
            }
        });
        Self { url, seconds }
    }

    /// Shifts all later replies by this many seconds.
    pub(crate) fn set(&self, seconds: i64) {
        self.seconds.store(seconds, Ordering::SeqCst);
    }
}

async fn relay(client: TcpStream, port: u16, seconds: Arc<AtomicI64>) {
    let server = TcpStream::connect(("127.0.0.1", port)).await.expect("the server");
    let ((mut from_client, mut to_client), (mut from_server, mut to_server)) =
        (client.into_split(), server.into_split());
    let there = tokio::io::copy(&mut from_client, &mut to_server);
    let back = async {
        let mut buffer = vec![0; 64 * 1024];
        while let Ok(n @ 1..) = from_server.read(&mut buffer).await {
            move_time(&mut buffer[..n], seconds.load(Ordering::SeqCst));
            if to_client.write_all(&buffer[..n]).await.is_err() {
                return;
            }
        }
    };
    tokio::select! { _ = there => {}, () = back => {} }
}

/// A reply to TIME has two bulk strings, the first of which has ten digits. It is so short that one read contains all of it.
fn move_time(answer: &mut [u8], seconds: i64) {
    const HEAD: &[u8] = b"*2\r\n$10\r\n";
    for at in 0..answer.len().saturating_sub(HEAD.len() + 10) {
        if answer[at..].starts_with(HEAD) {
            let digits = &mut answer[at + HEAD.len()..][..10];
            if let Some(time) = std::str::from_utf8(digits).ok().and_then(|digits| digits.parse::<i64>().ok())
            {
                digits.copy_from_slice(format!("{:010}", time + seconds).as_bytes());
            }
        }
    }
}

/// A connected node that sees the server's clock shifted by `seconds`.
async fn node(server: &RedisServer, seconds: i64) -> StampedeGuard {
    let relay = Relay::start(server, seconds).await;
    let node = unconnected(&relay.url, lease_of(LEASE));
    connects(&node).await;
    node
}

#[tokio::test]
async fn nodes_with_clocks_other_than_the_servers_agree_on_freshness() {
    for skew in [-HOUR, HOUR] {
        let server = RedisServer::start();
        let (one, other) = (node(&server, skew).await, node(&server, skew).await);
        assert_eq!(answer(&one, "k", 1).await, 1);
        assert_eq!(answer(&other, "k", 2).await, 1, "fresh for the other one, too");
        other.insert("k", &3u32).await.expect("stored");
        assert_eq!(answer(&one, "k", 4).await, 3);
        // A clock that is one hour ahead makes the value stale.
        let later = node(&server, skew + HOUR).await;
        assert_eq!(later.get::<u32>("k").await.expect("store"), None);
    }
}

#[tokio::test]
async fn an_entry_is_stale_when_the_servers_clock_says_so() {
    let server = RedisServer::start();
    let (early, late) = (node(&server, 0).await, node(&server, HOUR).await);
    answer(&early, "k", 1).await;
    assert_eq!(answer(&late, "k", 2).await, 2, "an hour later it is stale");
    assert_eq!(answer(&early, "k", 3).await, 2);
}

#[tokio::test]
async fn the_clock_is_read_again_with_every_connection() {
    let server = RedisServer::start();
    let relay = Relay::start(&server, 0).await;
    let node = unconnected(&relay.url, lease_of(LEASE));
    answer(&node, "k", 1).await;
    assert_eq!(node.get::<u32>("k").await.expect("store"), Some(1));

    relay.set(HOUR);
    server.kill_clients();
    connects(&node).await;
    eventually("it goes by the clock that the new connection has read", SOON, async || {
        matches!(node.get::<u32>("k").await, Ok(None))
    })
    .await;
}
