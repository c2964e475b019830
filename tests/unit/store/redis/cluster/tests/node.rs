//! [`Node`], a scripted node of a cluster.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;

use crate::store::redis::cluster::slots::Address;
use crate::store::redis::cluster::slots::slot_of;
use crate::sync::lock;

pub(super) const NIL: &str = "$-1\r\n";

/// A node that is healthy unless its script says otherwise.
#[derive(Clone)]
pub(super) struct Node {
    pub(super) address: Address,
    pub(super) said: Arc<Mutex<Said>>,
    /// How many requests for the slots and for the time the node has received.
    slot_requests: Arc<AtomicUsize>,
    time_requests: Arc<AtomicUsize>,
    commands: Arc<Mutex<Vec<String>>>,
}

#[derive(Default)]
pub(super) struct Said {
    /// Ranges of slots: the last slot of each range, and its master. A range begins after the end of the previous one.
    pub(super) slots: Vec<(u16, Option<Address>)>,
    /// Whether the node refuses to report slots (NOPERM).
    pub(super) refuses: bool,
    /// The answers to the next GETs, in order; the last one is repeated.
    answers: Vec<String>,
    seconds: u64,
}

impl Node {
    fn at(port: u16, seconds: u64) -> Self {
        Self {
            address: Address { host: "127.0.0.1".into(), port },
            said: Arc::new(Mutex::new(Said { seconds, ..Said::default() })),
            slot_requests: Arc::default(),
            time_requests: Arc::default(),
            commands: Arc::default(),
        }
    }

    /// Starts a node whose clock shows this time.
    pub(super) async fn start(seconds: u64) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.expect("a free port");
        let node = Self::at(listener.local_addr().expect("bound").port(), seconds);
        let serves = node.clone();
        tokio::spawn(async move {
            while let Ok((mut socket, _)) = listener.accept().await {
                let node = serves.clone();
                tokio::spawn(async move {
                    let mut buffer = [0; 4096];
                    while let Ok(n @ 1..) = socket.read(&mut buffer).await {
                        let text = String::from_utf8_lossy(&buffer[..n]).into_owned();
                        let words =
                            text.split("\r\n").filter(|word| !word.is_empty() && !word.starts_with('$'));
                        let answers: String = words.filter_map(|word| node.answers(word)).collect();
                        let _ = socket.write_all(answers.as_bytes()).await;
                    }
                });
            }
        });
        node
    }

    /// Returns the answer to a command that contains this word, or `None` if no command is recognised by it. Commands are recognised by one
    /// word (`SLOTS` for `CLUSTER SLOTS`).
    fn answers(&self, word: &str) -> Option<String> {
        let mut said = lock(&self.said);
        Some(match word {
            "PING" => "+PONG\r\n".to_owned(),
            "TIME" => {
                self.time_requests.fetch_add(1, Ordering::Relaxed);
                let seconds = said.seconds.to_string();
                format!("*2\r\n${}\r\n{seconds}\r\n$1\r\n0\r\n", seconds.len())
            }
            "SLOTS" => {
                self.slot_requests.fetch_add(1, Ordering::Relaxed);
                if said.refuses {
                    return Some("-NOPERM no permissions\r\n".to_owned());
                }
                let (mut first, mut ranges) = (0, Vec::new());
                for (last, at) in &said.slots {
                    if let Some(Address { host, port }) = at {
                        let node = format!("*2\r\n${}\r\n{host}\r\n:{port}\r\n", host.len());
                        ranges.push(format!("*3\r\n:{first}\r\n:{last}\r\n{node}"));
                    }
                    first = last + 1;
                }
                format!("*{}\r\n{}", ranges.len(), ranges.concat())
            }
            "ASKING" => {
                lock(&self.commands).push(word.to_owned());
                "+OK\r\n".to_owned()
            }
            "GET" => {
                lock(&self.commands).push(word.to_owned());
                let answers = &mut said.answers;
                match answers.len() {
                    0 => NIL.to_owned(),
                    1 => answers[0].clone(),
                    _ => answers.remove(0),
                }
            }
            _ => return None,
        })
    }

    pub(super) fn says(&self, slots: &[(u16, Option<&Self>)]) {
        let slots = slots.iter().map(|(last, node)| (*last, node.map(|node| node.address.clone())));
        lock(&self.said).slots = slots.collect();
    }

    pub(super) fn will_answer<const N: usize>(&self, answers: [String; N]) {
        lock(&self.said).answers = answers.into();
    }

    pub(super) fn slot_queries(&self) -> usize {
        self.slot_requests.load(Ordering::Relaxed)
    }

    pub(super) fn time_queries(&self) -> usize {
        self.time_requests.load(Ordering::Relaxed)
    }

    pub(super) fn commands(&self) -> Vec<String> {
        lock(&self.commands).clone()
    }
}

/// A node on which no server listens.
pub(super) fn dead() -> Node {
    let listener = std::net::TcpListener::bind(("127.0.0.1", 0)).expect("a free port");
    Node::at(listener.local_addr().expect("bound").port(), 0)
}

/// An address that accepts connections until the listener is dropped, and never answers.
pub(super) fn hanging() -> (std::net::TcpListener, Address) {
    let listener = std::net::TcpListener::bind(("127.0.0.1", 0)).expect("a free port");
    let port = listener.local_addr().expect("bound").port();
    (listener, Address { host: "127.0.0.1".into(), port })
}

/// The reply that redirects a command about this key to that node; `how` is MOVED or ASK.
pub(super) fn sent_on(how: &str, key: &str, node: &Node) -> String {
    format!("-{how} {} {}\r\n", slot_of(key), node.address)
}
