//! The origin: a TCP server that is slow, counts its loads, and is the same for all languages.
//!
//! A loader connects, sends its key and a newline, and reads one line until the end: `OK <value>`, `PRIVATE <value>` (a value that may
//! not be stored) or `FAIL`. The value is `v<version>-<number of the load>`, padded with dots.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::runtime::Runtime;

/// Size of a value in bytes.
const BYTES: usize = 1024;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Value,
    Private,
    Failure,
}

struct State {
    latency: Duration,
    kind: Kind,
    version: u64,
    /// When each load began.
    loads: Vec<Instant>,
}

/// The origin of one measurement. Each has a separate port: the kernel keeps the ports of closed connections for a minute.
pub(crate) struct Origin {
    port: u16,
    state: Arc<Mutex<State>>,
    runtime: Option<Runtime>,
}

impl Origin {
    pub(crate) fn start(latency: Duration, kind: Kind) -> Self {
        let state = State { latency, kind, version: 1, loads: Vec::new() };
        let state = Arc::new(Mutex::new(state));
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let runtime = runtime.expect("a runtime for the origin");
        let listener = runtime.block_on(async { listen() }).expect("a free port");
        let port = listener.local_addr().expect("a bound socket").port();
        runtime.spawn(accept(listener, Arc::clone(&state)));
        Self { port, state, runtime: Some(runtime) }
    }

    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    /// From now on loads take this long.
    pub(crate) fn set_latency(&self, latency: Duration) {
        self.with(|state| state.latency = latency);
    }

    /// Changes what is loaded from now on, and returns the new version.
    pub(crate) fn change(&self) -> u64 {
        self.with(|state| {
            state.version += 1;
            state.version
        })
    }

    /// Forgets all loads so far.
    pub(crate) fn reset(&self) {
        self.with(|state| state.loads.clear());
    }

    pub(crate) fn loads(&self) -> usize {
        self.with(|state| state.loads.len())
    }

    /// When each load began, in milliseconds after `start`.
    pub(crate) fn times(&self, start: Instant) -> Vec<f64> {
        let after = |load: &Instant| load.saturating_duration_since(start).as_secs_f64() * 1e3;
        self.with(|state| state.loads.iter().map(after).collect())
    }

    fn with<T>(&self, work: impl FnOnce(&mut State) -> T) -> T {
        work(&mut self.state.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Drop for Origin {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

/// With room for all callers of an unguarded fleet: beyond the usual 128 the kernel lets them wait for a second.
fn listen() -> std::io::Result<TcpListener> {
    let socket = TcpSocket::new_v4()?;
    socket.bind(([127, 0, 0, 1], 0).into())?;
    socket.listen(4_096)
}

async fn accept(listener: TcpListener, state: Arc<Mutex<State>>) {
    loop {
        if let Ok((client, _)) = listener.accept().await {
            tokio::spawn(answer(client, Arc::clone(&state)));
        }
    }
}

async fn answer(client: TcpStream, state: Arc<Mutex<State>>) {
    let mut client = BufReader::new(client);
    let mut key = String::new();
    if client.read_line(&mut key).await.unwrap_or(0) == 0 {
        return;
    }
    let (latency, reply) = {
        let mut state = state.lock().unwrap_or_else(PoisonError::into_inner);
        let id = format!("v{}-{}", state.version, state.loads.len());
        state.loads.push(Instant::now());
        let reply = match state.kind {
            Kind::Value => format!("OK {id:.<BYTES$}\n"),
            Kind::Private => format!("PRIVATE {id:.<BYTES$}\n"),
            Kind::Failure => "FAIL\n".to_owned(),
        };
        (state.latency, reply)
    };
    tokio::time::sleep(latency).await;
    // A loader that was cancelled has closed its end.
    let _ = client.get_mut().write_all(reply.as_bytes()).await;
}
