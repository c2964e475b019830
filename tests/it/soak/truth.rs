//! The origin of the soak test. It has a version per key, which only grows, and records each load.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;

use super::LOAD;
use crate::support::os::wall_ns;

/// One load, as the origin saw it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Load {
    pub(super) key: usize,
    pub(super) process: usize,
    pub(super) started: u64,
    pub(super) ended: u64,
}

#[derive(Debug, Default)]
struct State {
    versions: Vec<u64>,
    loads: Vec<Load>,
}

#[derive(Debug)]
pub(super) struct Truth {
    pub(super) addr: String,
    state: Arc<Mutex<State>>,
    server: JoinHandle<()>,
}

impl Truth {
    pub(super) async fn start(keys: usize) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.expect("a free port");
        let addr = listener.local_addr().expect("bound").to_string();
        let state = Arc::new(Mutex::new(State { versions: vec![1; keys], loads: Vec::new() }));
        let server = tokio::spawn({
            let state = Arc::clone(&state);
            async move {
                while let Ok((stream, _)) = listener.accept().await {
                    tokio::spawn(serve(stream, Arc::clone(&state)));
                }
            }
        });
        Self { addr, state, server }
    }

    pub(super) fn loads(&self) -> Vec<Load> {
        lock(&self.state).loads.clone()
    }
}

impl Drop for Truth {
    fn drop(&mut self) {
        self.server.abort();
    }
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Serves two requests. `load <key> <process>` takes some time, and returns the version at its beginning. `change <key>` makes a new
/// version and returns it.
async fn serve(stream: TcpStream, state: Arc<Mutex<State>>) {
    let (read, mut write) = stream.into_split();
    let mut line = String::new();
    if BufReader::new(read).read_line(&mut line).await.is_err() {
        return;
    }
    let words: Vec<_> = line.split_whitespace().collect();
    let number = |at: usize| words.get(at).and_then(|word| word.parse::<usize>().ok()).unwrap_or(0);
    let version = match words.first() {
        Some(&"load") => {
            let (key, process, started) = (number(1), number(2), wall_ns());
            let version = lock(&state).versions[key];
            // One load in twenty may take as long as the slowest.
            let slowest = LOAD.as_millis() as u64;
            let takes =
                if fastrand::u8(..20) == 0 { fastrand::u64(50..slowest) } else { fastrand::u64(2..30) };
            tokio::time::sleep(Duration::from_millis(takes)).await;
            lock(&state).loads.push(Load { key, process, started, ended: wall_ns() });
            version
        }
        Some(&"change") => {
            let mut state = lock(&state);
            state.versions[number(1)] += 1;
            state.versions[number(1)]
        }
        _ => return,
    };
    let _ = write.write_all(format!("{version}\n").as_bytes()).await;
}

/// Sends one request to the origin.
pub(super) async fn ask(addr: &str, question: String) -> Result<u64, String> {
    let ask = async {
        let mut stream = TcpStream::connect(addr).await?;
        stream.write_all(question.as_bytes()).await?;
        let mut line = String::new();
        BufReader::new(stream).read_line(&mut line).await?;
        line.trim().parse().map_err(std::io::Error::other)
    };
    ask.await.map_err(|error| error.to_string())
}
