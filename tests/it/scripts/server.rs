//! A test server for the real client. It speaks RESP2 on a socket, learns scripts from EVAL, and breaks connections at a given byte.

use std::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use super::data::{Answer, Data};
use super::lua;

/// Where the next connection for commands is broken. Bytes count from [`Server::arm`] on.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Break {
    /// After this many bytes of requests.
    Request(usize),
    /// After this many bytes of replies.
    Reply(usize),
}

/// The byte counters of one port, and the break that is set for it.
#[derive(Debug, Default)]
struct Port {
    break_at: Mutex<Option<Break>>,
    received: AtomicUsize,
    sent: AtomicUsize,
    counts: AtomicBool,
}

#[derive(Debug, Default)]
struct Shared {
    // `RefCell` inside of the lock, because a running script borrows the data once per command.
    data: Mutex<RefCell<Data>>,
    scripts: Mutex<HashMap<String, Vec<u8>>>,
    run: Mutex<HashSet<String>>,
    listeners: Mutex<Vec<Listener>>,
}

/// A channel, and the sender of that channel's messages to one connection.
type Listener = (Vec<u8>, mpsc::UnboundedSender<Vec<u8>>);

/// A server with two ports. Connections to the first one can be broken, connections to the second one are never.
#[derive(Debug)]
pub(super) struct Server {
    shared: Arc<Shared>,
    ports: [(u16, Arc<Port>); 2],
    tasks: Vec<JoinHandle<()>>,
}

impl Server {
    pub(super) async fn start() -> Self {
        let shared = Arc::<Shared>::default();
        let (mut ports, mut tasks) = (Vec::new(), Vec::new());
        for _ in 0..2 {
            let listener = TcpListener::bind(("127.0.0.1", 0)).await.expect("a free port");
            let port = Arc::<Port>::default();
            ports.push((listener.local_addr().expect("bound").port(), Arc::clone(&port)));
            let shared = Arc::clone(&shared);
            tasks.push(tokio::spawn(async move {
                while let Ok((stream, _)) = listener.accept().await {
                    let _ = stream.set_nodelay(true);
                    tokio::spawn(serve(stream, Arc::clone(&shared), Arc::clone(&port)));
                }
            }));
        }
        let ports = ports.try_into().expect("two");
        Self { shared, ports, tasks }
    }

    pub(super) fn breaking(&self) -> redis::Client {
        redis::Client::open(("127.0.0.1", self.ports[0].0)).expect("an address")
    }

    pub(super) fn sound(&self) -> redis::Client {
        redis::Client::open(("127.0.0.1", self.ports[1].0)).expect("an address")
    }

    /// Begins to count bytes. If `at` is set, the next connection that reaches it is broken.
    pub(super) fn arm(&self, at: Option<Break>) {
        let port = &self.ports[0].1;
        port.received.store(0, Ordering::SeqCst);
        port.sent.store(0, Ordering::SeqCst);
        *lock(&port.break_at) = at;
        port.counts.store(true, Ordering::SeqCst);
    }

    /// Stops counting bytes, and breaks no further connection.
    pub(super) fn disarm(&self) {
        let port = &self.ports[0].1;
        port.counts.store(false, Ordering::SeqCst);
        *lock(&port.break_at) = None;
    }

    /// How many bytes of requests and of replies were counted while the server was armed.
    pub(super) fn moved(&self) -> (usize, usize) {
        let port = &self.ports[0].1;
        (port.received.load(Ordering::SeqCst), port.sent.load(Ordering::SeqCst))
    }

    pub(super) fn with_data<R>(&self, act: impl FnOnce(&mut Data) -> R) -> R {
        act(&mut lock(&self.shared.data).borrow_mut())
    }

    pub(super) fn forget_scripts(&self) {
        lock(&self.shared.scripts).clear();
    }

    /// The first line, such as `-- COMMIT: ..`, of each script that ran. Lines of preludes are left out.
    pub(super) fn scripts_run(&self) -> Vec<String> {
        let scripts = lock(&self.shared.scripts);
        let run = lock(&self.shared.run);
        let head = |text: &Vec<u8>| {
            let text = String::from_utf8_lossy(text).into_owned();
            let heads = text.lines().filter(|line| {
                let name = line.strip_prefix("-- ").and_then(|line| line.split([':', ' ']).next());
                let is_name =
                    |name: &str| name.len() > 2 && name.bytes().all(|byte| byte.is_ascii_uppercase());
                name.is_some_and(|name| is_name(name) && !["KEYS", "ARGV"].contains(&name))
            });
            heads.map(str::to_owned).next().unwrap_or_default()
        };
        let mut heads: Vec<_> = run.iter().filter_map(|sha| scripts.get(sha)).map(head).collect();
        heads.sort();
        heads
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.tasks.iter().for_each(JoinHandle::abort);
    }
}

fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

async fn serve(mut stream: TcpStream, shared: Arc<Shared>, port: Arc<Port>) {
    let (sender, mut messages) = mpsc::unbounded_channel::<Vec<u8>>();
    let (mut bytes, mut subscribed) = (Vec::new(), Vec::new());
    let mut buffer = [0; 4096];
    loop {
        let read = tokio::select! {
            read = stream.read(&mut buffer) => read,
            Some(message) = messages.recv() => {
                if stream.write_all(&message).await.is_err() { break }
                continue;
            }
        };
        let Ok(n @ 1..) = read else { break };
        // A connection with a subscription is an inbox, whose bytes are not counted.
        let inbox = !subscribed.is_empty() || contains(&buffer[..n], b"SUBSCRIBE");
        let (mut taken, mut broken) = (n, false);
        if !inbox && port.counts.load(Ordering::SeqCst) {
            let before = port.received.fetch_add(n, Ordering::SeqCst);
            let mut break_at = lock(&port.break_at);
            if let Some(Break::Request(at)) = *break_at
                && before + n >= at
            {
                (taken, broken) = (at.saturating_sub(before), true);
                *break_at = None;
            }
        }
        bytes.extend_from_slice(&buffer[..taken]);
        let mut reply = Vec::new();
        while let Some((words, length)) = parse(&bytes) {
            bytes.drain(..length);
            answer(&words, &shared, &sender, &mut subscribed, &mut reply);
        }
        if !inbox && port.counts.load(Ordering::SeqCst) {
            let before = port.sent.fetch_add(reply.len(), Ordering::SeqCst);
            let mut break_at = lock(&port.break_at);
            if let Some(Break::Reply(at)) = *break_at
                && before + reply.len() > at
            {
                reply.truncate(at - before.min(at));
                broken = true;
                *break_at = None;
            }
        }
        if stream.write_all(&reply).await.is_err() || broken {
            break;
        }
    }
    let mut listeners = lock(&shared.listeners);
    listeners.retain(|(_, other)| !other.same_channel(&sender));
    let data = lock(&shared.data);
    for channel in subscribed {
        data.borrow_mut().listeners.entry(channel).and_modify(|count| *count -= 1);
    }
}

fn contains(bytes: &[u8], word: &[u8]) -> bool {
    bytes.windows(word.len()).any(|window| window.eq_ignore_ascii_case(word))
}

/// Parses one complete command; returns its words and its length in bytes.
fn parse(bytes: &[u8]) -> Option<(Vec<Vec<u8>>, usize)> {
    fn line(bytes: &[u8], at: &mut usize) -> Option<usize> {
        let end = bytes.get(*at..)?.windows(2).position(|pair| pair == b"\r\n")? + *at;
        let number = std::str::from_utf8(&bytes[*at + 1..end]).ok()?.parse().ok()?;
        *at = end + 2;
        Some(number)
    }
    let mut at = 0;
    let n = line(bytes, &mut at)?;
    let mut words = Vec::with_capacity(n);
    for _ in 0..n {
        let length = line(bytes, &mut at)?;
        words.push(bytes.get(at..at + length)?.to_vec());
        at += length + 2;
        if bytes.len() < at {
            return None;
        }
    }
    Some((words, at))
}

fn answer(
    words: &[Vec<u8>],
    shared: &Shared,
    sender: &mpsc::UnboundedSender<Vec<u8>>,
    subscribed: &mut Vec<Vec<u8>>,
    reply: &mut Vec<u8>,
) {
    let name = String::from_utf8_lossy(&words[0]).to_ascii_uppercase();
    let answer = match &*name {
        "CLIENT" | "SELECT" | "AUTH" => Answer::Status("OK"),
        "SUBSCRIBE" => {
            let data = lock(&shared.data);
            for channel in &words[1..] {
                *data.borrow_mut().listeners.entry(channel.clone()).or_default() += 1;
                lock(&shared.listeners).push((channel.clone(), sender.clone()));
                subscribed.push(channel.clone());
                let parts =
                    [Answer::Bulk(b"subscribe".to_vec()), Answer::Bulk(channel.clone()), Answer::Int(1)];
                write(&Answer::List(parts.to_vec()), reply);
            }
            return;
        }
        // RESP2 replies to PING with a message while the connection has subscriptions.
        "PING" if !subscribed.is_empty() => {
            let parts = [b"pong".to_vec(), words.get(1).cloned().unwrap_or_default()];
            Answer::List(parts.map(Answer::Bulk).to_vec())
        }
        "EVAL" => {
            lock(&shared.scripts).insert(lua::sha1(&words[1]), words[1].clone());
            script(shared, &words[1].clone(), words)
        }
        "EVALSHA" => {
            let sha = String::from_utf8_lossy(&words[1]).into_owned();
            let text = lock(&shared.scripts).get(&sha).cloned();
            match text {
                Some(text) => script(shared, &text, words),
                None => Answer::Error("NOSCRIPT No matching script. Please use EVAL.".to_owned()),
            }
        }
        _ => lock(&shared.data).borrow_mut().run(words),
    };
    write(&answer, reply);
}

fn script(shared: &Shared, text: &[u8], words: &[Vec<u8>]) -> Answer {
    lock(&shared.run).insert(lua::sha1(text));
    let keys: usize = String::from_utf8_lossy(&words[2]).parse().expect("a number of keys");
    let (keys, argv) = words[3..].split_at(keys);
    let data = lock(&shared.data);
    let answer = lua::run(&data, text, keys, argv);
    for (channel, message) in data.borrow_mut().published.drain(..) {
        let parts = [b"message".to_vec(), channel.clone(), message].map(Answer::Bulk);
        let mut bytes = Vec::new();
        write(&Answer::List(parts.to_vec()), &mut bytes);
        for (_, listener) in lock(&shared.listeners).iter().filter(|(other, _)| *other == channel) {
            let _ = listener.send(bytes.clone());
        }
    }
    answer
}

fn write(answer: &Answer, out: &mut Vec<u8>) {
    match answer {
        Answer::Nil => out.extend_from_slice(b"$-1\r\n"),
        Answer::Int(number) => out.extend_from_slice(format!(":{number}\r\n").as_bytes()),
        Answer::Status(text) => out.extend_from_slice(format!("+{text}\r\n").as_bytes()),
        Answer::Error(text) => out.extend_from_slice(format!("-{text}\r\n").as_bytes()),
        Answer::Bulk(bytes) => {
            out.extend_from_slice(format!("${}\r\n", bytes.len()).as_bytes());
            out.extend_from_slice(bytes);
            out.extend_from_slice(b"\r\n");
        }
        Answer::List(parts) => {
            out.extend_from_slice(format!("*{}\r\n", parts.len()).as_bytes());
            parts.iter().for_each(|part| write(part, out));
        }
    }
}
