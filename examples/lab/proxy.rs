//! A TCP proxy between one replica and Redis: it cuts the replica off without rights of an administrator, and counts commands.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, watch};
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::Instant;

use crate::commands::CommandCounter;

/// How a proxy treats all its connections.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Gate {
    Open,
    /// Answers come this much later.
    Slow(Duration),
    /// Nothing moves and nothing closes, as behind a cable that was pulled out.
    Silent,
    /// All connections close, and new ones at once.
    Refusing,
}

/// The proxy of one replica; dropping it closes all connections.
#[derive(Debug)]
pub(crate) struct Proxy {
    port: u16,
    gate: watch::Sender<Gate>,
    commands: Arc<AtomicU64>,
    task: JoinHandle<()>,
}

impl Proxy {
    /// Listens on a free port, and leads to `server`.
    pub(crate) async fn start(server: (String, u16), gate: Gate) -> io::Result<Self> {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await?;
        let port = listener.local_addr()?.port();
        let (gate, watched) = watch::channel(gate);
        let commands = Arc::<AtomicU64>::default();
        let task = tokio::spawn(accept(listener, server, watched, commands.clone()));
        Ok(Self { port, gate, commands, task })
    }

    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    pub(crate) fn set(&self, gate: Gate) {
        self.gate.send_replace(gate);
    }

    /// How many commands the replica has sent.
    pub(crate) fn commands(&self) -> u64 {
        self.commands.load(Ordering::Relaxed)
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn accept(
    listener: TcpListener,
    server: (String, u16),
    gate: watch::Receiver<Gate>,
    commands: Arc<AtomicU64>,
) {
    // A set, so that dropping the proxy drops every connection, too.
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            incoming = listener.accept() => match incoming {
                Ok((client, _)) => {
                    connections.spawn(relay(client, server.clone(), gate.clone(), commands.clone()));
                }
                // Too many open files, for example: other connections may end meanwhile.
                Err(_) => tokio::time::sleep(Duration::from_millis(50)).await,
            },
            Some(_) = connections.join_next() => {}
        }
    }
}

/// Moves the bytes of one connection until an end closes it or the gate refuses.
async fn relay(
    client: TcpStream,
    (host, port): (String, u16),
    gate: watch::Receiver<Gate>,
    commands: Arc<AtomicU64>,
) {
    let mut refusing = gate.clone();
    let moving = async {
        let (from_client, to_client) = split(client);
        let (sent, from_reader) = mpsc::channel(64);
        let counter = Some((CommandCounter::default(), commands));
        let to_server = async {
            wait_open(&gate).await;
            let Ok(server) = TcpStream::connect((host.as_str(), port)).await else { return };
            let (from_server, to_server) = split(server);
            let (answered, answers) = mpsc::channel(64);
            tokio::select! {
                () = write(from_reader, to_server, &gate) => {}
                () = async { tokio::join!(read(from_server, answered, &gate, None), write(answers, to_client, &gate)); } => {}
            }
        };
        // The client is read from while nothing moves, too, so that its end is noticed.
        tokio::select! {
            () = read(from_client, sent, &gate, counter) => {}
            () = to_server => {}
        }
    };
    tokio::select! {
        () = moving => {}
        _ = refusing.wait_for(|gate| *gate == Gate::Refusing) => {}
    }
}

fn split(stream: TcpStream) -> (OwnedReadHalf, OwnedWriteHalf) {
    // Without it small messages would wait for the acknowledgement of earlier ones.
    let _ = stream.set_nodelay(true);
    stream.into_split()
}

/// Bytes, and the time at which they may be sent on.
type Chunk = (Instant, Vec<u8>);

/// Reads until the end, or until `chunks` are no longer received.
async fn read(
    mut from: OwnedReadHalf,
    chunks: mpsc::Sender<Chunk>,
    gate: &watch::Receiver<Gate>,
    mut counter: Option<(CommandCounter, Arc<AtomicU64>)>,
) {
    let mut buffer = vec![0; 16 * 1024];
    while let Ok(length @ 1..) = from.read(&mut buffer).await {
        let bytes = &buffer[..length];
        let delay = match (*gate.borrow(), &mut counter) {
            (Gate::Slow(delay), None) => delay,
            _ => Duration::ZERO,
        };
        if let Some((counter, commands)) = &mut counter {
            commands.fetch_add(counter.count(bytes), Ordering::Relaxed);
        }
        if chunks.send((Instant::now() + delay, bytes.to_vec())).await.is_err() {
            return;
        }
    }
}

async fn write(mut chunks: mpsc::Receiver<Chunk>, mut to: OwnedWriteHalf, gate: &watch::Receiver<Gate>) {
    while let Some((due, bytes)) = chunks.recv().await {
        tokio::time::sleep_until(due).await;
        wait_open(gate).await;
        if to.write_all(&bytes).await.is_err() {
            return;
        }
    }
}

async fn wait_open(gate: &watch::Receiver<Gate>) {
    let is_open = |gate: &Gate| matches!(gate, Gate::Open | Gate::Slow(_));
    // Fails when the proxy is dropped, and this connection with it.
    let _ = gate.clone().wait_for(is_open).await;
}
