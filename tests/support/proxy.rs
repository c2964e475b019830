//! A TCP proxy between the library and Redis that simulates each kind of bad network.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::tcp::{ReadHalf, WriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, watch};
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::Instant;

use super::os::wall_ns;

/// How the proxy treats flows, which are the connections through it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    Pass,
    /// Nothing moves and nothing closes. Held bytes arrive when the mode changes, as after retransmission. The kernel still
    /// accepts and acknowledges, so this is a hung host rather than a lost route.
    BlackHole,
    /// Like a firewall that lost its state: flows from before the change are dead, and new ones work.
    BlackHoleOld,
    /// Like [`BlackHoleOld`](Self::BlackHoleOld), but only for flows that subscribe: commands work, and messages are lost.
    BlackHoleOldSubscriptions,
    /// Flows from before the change work, new ones are dead, as at a server without room for connections.
    BlackHoleNew,
    /// All flows that subscribe are dead, old and new, as behind a middlebox that lets no messages through.
    BlackHoleSubscriptions,
    /// The flow of this number, from 0 in the order of their beginning, is dead; the others work.
    BlackHoleFlow(usize),
    /// Commands arrive and are executed, replies are held back: the client can not know whether a command ran.
    NoReplies,
    /// Old flows are reset now, new ones at once.
    Reset,
    /// Replies come this much later; commands are not delayed.
    Delay(Duration),
    /// Replies come so many bytes per 10 ms, in every flow.
    Trickle(usize),
}

#[derive(Clone, Copy, Debug)]
struct Setting {
    mode: Mode,
    /// Counts changes; a flow is old if it began before the last change.
    change: u64,
    /// The last change to [`Mode::Reset`], so that a flow that was not scheduled in between still sees it.
    reset: u64,
}

/// When each connection was accepted, by `wall_ns`.
type Accepted = Arc<Mutex<Vec<u64>>>;

/// The proxy; dropping it closes all flows.
#[derive(Debug)]
pub(crate) struct Proxy {
    addr: SocketAddr,
    /// The server's port for new flows.
    target: Arc<AtomicU16>,
    setting: watch::Sender<Setting>,
    accepted: Accepted,
    opening: Arc<Opening>,
    server: JoinHandle<()>,
}

/// Counts the flows that have not received a reply yet.
#[derive(Debug, Default)]
struct Opening {
    now: AtomicUsize,
    most: AtomicUsize,
}

/// Counts one flow as opening, until its first reply or until its client has closed it.
struct Opens(Option<Arc<Opening>>);

impl Opens {
    fn new(opening: &Arc<Opening>) -> Self {
        let now = opening.now.fetch_add(1, Ordering::SeqCst) + 1;
        opening.most.fetch_max(now, Ordering::SeqCst);
        Self(Some(Arc::clone(opening)))
    }

    fn is_open(&mut self) {
        if let Some(opening) = self.0.take() {
            opening.now.fetch_sub(1, Ordering::SeqCst);
        }
    }
}

impl Drop for Opens {
    fn drop(&mut self) {
        self.is_open();
    }
}

impl Proxy {
    /// Listens on a free port and passes everything on to `127.0.0.1:<port>`.
    pub(crate) async fn start(port: u16) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.expect("a free port");
        let addr = listener.local_addr().expect("a bound socket");
        let (setting, watched) = watch::channel(Setting { mode: Mode::Pass, change: 0, reset: 0 });
        let accepted = Accepted::default();
        let opening = Arc::<Opening>::default();
        let target = Arc::new(AtomicU16::new(port));
        let server =
            tokio::spawn(accept(listener, target.clone(), watched, accepted.clone(), opening.clone()));
        Self { addr, target, setting, accepted, opening, server }
    }

    pub(crate) fn port(&self) -> u16 {
        self.addr.port()
    }

    pub(crate) fn url(&self) -> String {
        format!("redis://{}/", self.addr)
    }

    /// Connects new flows to another server on this machine; old flows stay.
    pub(crate) fn lead_to(&self, port: u16) {
        self.target.store(port, Ordering::SeqCst);
    }

    /// Switches all flows, except for bytes that a socket already has.
    pub(crate) fn set(&self, mode: Mode) {
        self.setting.send_modify(|setting| {
            let change = setting.change + 1;
            let reset = if mode == Mode::Reset { change } else { setting.reset };
            *setting = Setting { mode, change, reset };
        });
    }

    /// How many connections were accepted, ever.
    pub(crate) fn connections(&self) -> usize {
        self.accepted_at().len()
    }

    /// When each connection was accepted, by `wall_ns`.
    pub(crate) fn accepted_at(&self) -> Vec<u64> {
        self.accepted.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The largest number of connections that waited for their first reply at the same time.
    pub(crate) fn most_opening(&self) -> usize {
        self.opening.most.load(Ordering::SeqCst)
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.server.abort();
    }
}

async fn accept(
    listener: TcpListener,
    target: Arc<AtomicU16>,
    setting: watch::Receiver<Setting>,
    accepted: Accepted,
    opening: Arc<Opening>,
) {
    // A set, so that dropping the proxy drops every flow, too.
    let mut flows = JoinSet::new();
    loop {
        tokio::select! {
            incoming = listener.accept() => {
                let (client, _) = incoming.expect("accepting on a bound socket");
                let number = {
                    let mut accepted = accepted.lock().unwrap_or_else(PoisonError::into_inner);
                    accepted.push(wall_ns());
                    accepted.len() - 1
                };
                let (opened_at, port) = (setting.borrow().change, target.load(Ordering::SeqCst));
                flows.spawn(flow(client, port, Valve::new((opened_at, number), setting.clone(), Opens::new(&opening))));
            }
            Some(_) = flows.join_next() => {}
        }
    }
}

async fn flow(mut client: TcpStream, port: u16, valve: Valve) {
    let mut reset = valve.setting.clone();
    let _ = client.set_nodelay(true);
    let relay = async {
        let (from_client, to_client) = client.split();
        let (sender, chunks) = mpsc::channel(1024);
        let serve = async {
            valve.open(Way::ToServer).await;
            // A server that is down shows as a connection that closes at once.
            let Ok(mut server) = TcpStream::connect(("127.0.0.1", port)).await else { return };
            let _ = server.set_nodelay(true);
            let (from_server, to_server) = server.split();
            let (answers, answered) = mpsc::channel(1024);
            let answer = async {
                tokio::join!(
                    read(from_server, answers, Way::ToClient, &valve),
                    write(answered, to_client, Way::ToClient, &valve)
                )
            };
            // Redis never half-closes, so the end of one direction is the end of the flow.
            tokio::select! {
                () = write(chunks, to_server, Way::ToServer, &valve) => {}
                _ = answer => {}
            }
        };
        // Reads from the client already before the server is connected: the client may close while nothing moves.
        let hear = async {
            read(from_client, sender, Way::ToServer, &valve).await;
            std::future::pending().await
        };
        tokio::select! {
            () = serve => {}
            () = hear => {}
        }
    };
    let was_reset = tokio::select! {
        () = relay => false,
        _ = reset.wait_for(|setting| setting.mode == Mode::Reset || setting.reset > valve.opened_at) => true,
    };
    if was_reset {
        // Closing then sends RST.
        let _ = client.set_zero_linger();
    }
}

/// Bytes, and the time at which they may be sent on.
type Chunk = (Instant, Vec<u8>);

/// Reading and writing are separate, so that a delay shifts every byte by the same time, however many follow.
async fn read(mut from: ReadHalf<'_>, chunks: mpsc::Sender<Chunk>, way: Way, valve: &Valve) {
    let mut buffer = vec![0; 16 * 1024];
    while let Ok(n @ 1..) = from.read(&mut buffer).await {
        valve.note(way, &buffer[..n]);
        let due = Instant::now() + valve.delay(way);
        if chunks.send((due, buffer[..n].to_vec())).await.is_err() {
            return;
        }
    }
    // The client has closed the flow, even if bytes are still held back.
    valve.is_open();
}

async fn write(mut chunks: mpsc::Receiver<Chunk>, mut to: WriteHalf<'_>, way: Way, valve: &Valve) {
    while let Some((due, chunk)) = chunks.recv().await {
        tokio::time::sleep_until(due).await;
        valve.open(way).await;
        if way == Way::ToClient {
            valve.is_open();
        }
        let mut rest = &chunk[..];
        while !rest.is_empty() {
            let piece = valve.trickle(way).unwrap_or(rest.len()).min(rest.len());
            if to.write_all(&rest[..piece]).await.is_err() {
                return;
            }
            rest = &rest[piece..];
            if !rest.is_empty() || valve.trickle(way).is_some() {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        }
    }
    // The end of a flow is held back like its bytes.
    valve.open(way).await;
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    ToServer,
    ToClient,
}

/// One flow's view of the setting.
struct Valve {
    opened_at: u64,
    number: usize,
    subscribes: AtomicBool,
    setting: watch::Receiver<Setting>,
    opens: Mutex<Opens>,
}

impl Valve {
    fn new((opened_at, number): (u64, usize), setting: watch::Receiver<Setting>, opens: Opens) -> Self {
        Self { opened_at, number, subscribes: AtomicBool::new(false), setting, opens: Mutex::new(opens) }
    }

    fn is_open(&self) {
        self.opens.lock().unwrap_or_else(PoisonError::into_inner).is_open();
    }

    /// Looks for SUBSCRIBE. The command is short and the first of its packet, so it is never split.
    fn note(&self, way: Way, bytes: &[u8]) {
        if way == Way::ToServer && bytes.windows(11).any(|window| window == b"SUBSCRIBE\r\n") {
            self.subscribes.store(true, Ordering::SeqCst);
        }
    }

    /// Waits until bytes may go this way.
    async fn open(&self, way: Way) {
        let is_open = |setting: &Setting| match setting.mode {
            Mode::Pass | Mode::Delay(_) | Mode::Trickle(_) => true,
            Mode::BlackHole | Mode::Reset => false,
            Mode::BlackHoleOld => self.opened_at >= setting.change,
            Mode::BlackHoleNew => self.opened_at < setting.change,
            Mode::BlackHoleFlow(number) => self.number != number,
            Mode::BlackHoleOldSubscriptions => {
                self.opened_at >= setting.change || !self.subscribes.load(Ordering::SeqCst)
            }
            Mode::BlackHoleSubscriptions => !self.subscribes.load(Ordering::SeqCst),
            Mode::NoReplies => way == Way::ToServer,
        };
        // The sender outlives its flows: they are dropped with the proxy.
        let _ = self.setting.clone().wait_for(is_open).await;
    }

    fn delay(&self, way: Way) -> Duration {
        match self.setting.borrow().mode {
            Mode::Delay(delay) if way == Way::ToClient => delay,
            _ => Duration::ZERO,
        }
    }
    /// How many bytes may go at once.
    fn trickle(&self, way: Way) -> Option<usize> {
        match self.setting.borrow().mode {
            Mode::Trickle(bytes) if way == Way::ToClient => Some(bytes),
            _ => None,
        }
    }
}
