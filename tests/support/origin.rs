//! A scripted origin server that counts loads exactly, also across processes.
//!
//! [`Origin`] is a small TCP server in the test process; a loader in any process calls [`load`]. One line asks
//! (`LOAD <key>`), one line answers (`["Ok","value"]` or `["Err","text"]`). A client that goes away ends its load
//! as [`End::Abandoned`]. For loaders in the test's own process `gate` is enough.

use std::collections::HashMap;
use std::future::Future;
use std::net::SocketAddr;
use std::panic::Location;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::{JoinHandle, JoinSet};

use super::PATIENCE;
use super::gate::Gate;
use super::os::wall_ns;

/// How the origin treats one load.
#[derive(Clone, Debug)]
pub(crate) struct Answer {
    result: Result<String, String>,
    after: Duration,
    held: bool,
}

impl Answer {
    pub(crate) fn value(value: impl Into<String>) -> Self {
        Self { result: Ok(value.into()), after: Duration::ZERO, held: false }
    }

    pub(crate) fn failure(text: impl Into<String>) -> Self {
        Self { result: Err(text.into()), after: Duration::ZERO, held: false }
    }

    /// The load takes this long, counted from the release if it is also [`held`](Self::held).
    #[must_use]
    pub(crate) fn after(self, delay: Duration) -> Self {
        Self { after: delay, ..self }
    }

    /// The load does not end before [`Origin::release`].
    #[must_use]
    pub(crate) fn held(self) -> Self {
        Self { held: true, ..self }
    }
}

/// One load as the origin saw it; times are [`wall_ns`].
#[derive(Clone, Debug)]
pub(crate) struct Load {
    pub(crate) started: u64,
    /// When and how it ended, if it has.
    pub(crate) ended: Option<(u64, End)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    Served,
    Failed,
    /// The loading process was killed, or the loader was dropped, before the answer.
    Abandoned,
}

/// The scripted origin; dropping it ends the server. Keys without a script answer `value of <key>` at once.
#[derive(Debug)]
pub(crate) struct Origin {
    addr: SocketAddr,
    state: Arc<State>,
    server: JoinHandle<()>,
}

#[derive(Debug, Default)]
struct State {
    keys: Mutex<HashMap<String, Key>>,
    changed: watch::Sender<()>,
}

#[derive(Debug)]
struct Key {
    answers: Vec<Answer>,
    gate: Gate,
    loads: Vec<Load>,
}

impl Origin {
    pub(crate) async fn start() -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.expect("a free port");
        let addr = listener.local_addr().expect("a bound socket");
        let state = Arc::new(State::default());
        let server = tokio::spawn(accept(listener, state.clone()));
        Self { addr, state, server }
    }

    /// The origin's address, the first argument of [`load`], usually as a part of a child's config.
    pub(crate) fn addr(&self) -> String {
        self.addr.to_string()
    }

    /// Scripts the loads of `key` from now on: the first answer for the next load, and so on; the last answer repeats.
    /// Held answers wait for a new [`release`](Self::release).
    pub(crate) fn script<const N: usize>(&self, key: &str, answers: [Answer; N]) {
        assert!(N > 0, "a script needs an answer");
        let mut keys = self.state.keys();
        let entry = keys.entry(key.to_owned()).or_insert_with(|| Key::new(key));
        let past = entry.loads.len();
        // The number of a load is the index of its answer, so the loads before this script need answers too.
        entry.answers = std::iter::repeat_n(answers[0].clone(), past).chain(answers).collect();
        entry.gate = Gate::closed();
    }

    /// Lets all held loads of `key` go on, including later ones.
    pub(crate) fn release(&self, key: &str) {
        let keys = self.state.keys();
        let key = keys.get(key).unwrap_or_else(|| panic!("`{key}` has neither a script nor a load"));
        key.gate.open();
    }

    /// How many loads of `key` have started, ever.
    pub(crate) fn loads(&self, key: &str) -> usize {
        self.history(key).len()
    }

    /// How many loads of any key have started, ever.
    pub(crate) fn total_loads(&self) -> usize {
        self.state.keys().values().map(|key| key.loads.len()).sum()
    }

    /// How many loads of `key` have started and not ended.
    pub(crate) fn running(&self, key: &str) -> usize {
        self.history(key).iter().filter(|load| load.ended.is_none()).count()
    }

    /// All loads of `key` so far, in order of their start.
    pub(crate) fn history(&self, key: &str) -> Vec<Load> {
        self.state.keys().get(key).map(|key| key.loads.clone()).unwrap_or_default()
    }

    /// Waits until `n` loads of `key` have started.
    #[track_caller]
    pub(crate) fn wait_for_loads(&self, key: &str, n: usize) -> impl Future<Output = ()> + '_ {
        self.wait(key.to_owned(), format!("start of {n} loads"), move |loads| loads.len() >= n)
    }

    /// Waits until `n` loads of `key` have ended, in whatever way.
    #[track_caller]
    pub(crate) fn wait_for_ends(&self, key: &str, n: usize) -> impl Future<Output = ()> + '_ {
        self.wait(key.to_owned(), format!("end of {n} loads"), move |loads| {
            loads.iter().filter(|load| load.ended.is_some()).count() >= n
        })
    }

    #[track_caller]
    fn wait(&self, key: String, what: String, done: impl Fn(&[Load]) -> bool) -> impl Future<Output = ()> {
        let caller = Location::caller();
        let mut changed = self.state.changed.subscribe();
        async move {
            let reached = changed.wait_for(|()| done(&self.history(&key)));
            let in_time = tokio::time::timeout(PATIENCE, reached).await.is_ok();
            assert!(in_time, "{caller}: `{key}`: waited for the {what} in vain: {:?}", self.history(&key));
        }
    }
}

impl Drop for Origin {
    fn drop(&mut self) {
        self.server.abort();
    }
}

impl State {
    fn keys(&self) -> MutexGuard<'_, HashMap<String, Key>> {
        self.keys.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn begin(&self, key: &str) -> (usize, Answer, Gate) {
        let mut keys = self.keys();
        let entry = keys.entry(key.to_owned()).or_insert_with(|| Key::new(key));
        let index = entry.loads.len();
        entry.loads.push(Load { started: wall_ns(), ended: None });
        let answer = entry
            .answers
            .get(index)
            .or_else(|| entry.answers.last())
            .cloned()
            .expect("scripts are not empty");
        let gate = entry.gate.clone();
        drop(keys);
        self.changed.send_replace(());
        (index, answer, gate)
    }

    fn end(&self, key: &str, index: usize, end: End) {
        if let Some(entry) = self.keys().get_mut(key) {
            entry.loads[index].ended = Some((wall_ns(), end));
        }
        self.changed.send_replace(());
    }
}

impl Key {
    fn new(key: &str) -> Self {
        Self {
            answers: vec![Answer::value(format!("value of {key}"))],
            gate: Gate::closed(),
            loads: Vec::new(),
        }
    }
}

async fn accept(listener: TcpListener, state: Arc<State>) {
    // A set, so that dropping the origin drops every connection, too.
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept() => {
                let (stream, _) = accepted.expect("accepting on a bound socket");
                connections.spawn(serve(stream, state.clone()));
            }
            Some(_) = connections.join_next() => {}
        }
    }
}

async fn serve(mut stream: TcpStream, state: Arc<State>) {
    let (read, mut write) = stream.split();
    let mut lines = BufReader::new(read).lines();
    while let Ok(Some(line)) = lines.next_line().await {
        let key = line.strip_prefix("LOAD ").expect("a request of `load`");
        let (index, answer, gate) = state.begin(key);
        let work = async {
            if answer.held {
                gate.pass().await;
            }
            tokio::time::sleep(answer.after).await;
        };
        let done = tokio::select! {
            () = work => true,
            // `load` sends nothing more, so this is the end of the connection.
            _ = lines.next_line() => false,
        };
        let end = match (&answer.result, done) {
            (_, false) => End::Abandoned,
            (Ok(_), true) => End::Served,
            (Err(_), true) => End::Failed,
        };
        // Count the end before sending the answer: a test that has the answer must find the end recorded.
        state.end(key, index, end);
        let reply = match &answer.result {
            Ok(value) => ("Ok", value),
            Err(text) => ("Err", text),
        };
        let reply = serde_json::to_string(&reply).expect("two strings") + "\n";
        if !done || write.write_all(reply.as_bytes()).await.is_err() {
            return;
        }
    }
}

/// Asks the test's origin to do the expensive work. Any process of the test can call this.
pub(crate) async fn load(origin: &str, key: &str) -> Result<String, String> {
    let reply = async {
        let mut stream = TcpStream::connect(origin).await?;
        stream.write_all(format!("LOAD {key}\n").as_bytes()).await?;
        let mut reply = String::new();
        BufReader::new(stream).read_line(&mut reply).await?;
        std::io::Result::Ok(reply)
    };
    let reply = reply.await.map_err(|error| format!("the origin of the test: {error}"))?;
    let reply = serde_json::from_str::<(String, String)>(&reply);
    match reply.map_err(|error| format!("the origin of the test has ended: {error}"))? {
        (kind, value) if kind == "Ok" => Ok(value),
        (_, text) => Err(text),
    }
}
