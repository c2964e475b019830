//! The load generator: requests at a steady rate, whether earlier ones were answered or not, as from many independent clients.
//!
//! It is the clients and their load balancer in one: it asks the replicas in turn, and when a connection breaks, or the load
//! balancer gives a replica up, it asks another replica once more.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use axum::body::Bytes;
use axum::http::{HeaderMap, Request, header};
use http_body_util::{BodyExt as _, Empty};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use tokio::sync::watch;
use tokio::time::{MissedTickBehavior, interval, timeout};

use crate::board::{Board, Outcome};
use crate::controls::Controls;
use crate::fleet::Target;
use crate::replica::AUTHORITY;

/// How long a client waits for its answer.
pub(crate) const PATIENCE: Duration = Duration::from_secs(3);
/// More requests at once fail: a load balancer has a bound, too.
const MOST_AT_ONCE: u64 = 2_000;
/// How many replicas are tried for one request.
const ATTEMPTS: usize = 3;
const TICK: Duration = Duration::from_millis(5);

pub(crate) struct Generator {
    board: Arc<Board>,
    controls: watch::Receiver<Controls>,
    targets: watch::Receiver<Vec<Target>>,
    /// A part of every path: a new version has none of its keys cached.
    version: Arc<AtomicU64>,
    /// Presets begin and end without requests.
    runs: watch::Receiver<bool>,
    turn: AtomicUsize,
    client: Client<HttpConnector, Empty<Bytes>>,
}

impl Generator {
    pub(crate) fn start(
        board: Arc<Board>,
        controls: watch::Receiver<Controls>,
        targets: watch::Receiver<Vec<Target>>,
        version: Arc<AtomicU64>,
        runs: watch::Receiver<bool>,
    ) {
        let mut connector = HttpConnector::new();
        connector.set_nodelay(true);
        let client = Client::builder(TokioExecutor::new()).build(connector);
        let turn = AtomicUsize::new(0);
        let generator = Arc::new(Self { board, controls, targets, version, runs, turn, client });
        tokio::spawn(generator.run());
    }

    async fn run(self: Arc<Self>) {
        let mut tick = interval(TICK);
        tick.set_missed_tick_behavior(MissedTickBehavior::Skip);
        let (mut last, mut due) = (Instant::now(), 0.0);
        let mut popularity = Popularity::of(1);
        loop {
            tick.tick().await;
            // A machine that stood still does not send all that it has missed.
            let passed = last.elapsed().min(Duration::from_millis(500));
            last = Instant::now();
            if !*self.runs.borrow() {
                due = 0.0;
                continue;
            }
            let (rate, keys) = {
                let controls = self.controls.borrow();
                (controls.requests_per_second, controls.keys)
            };
            if popularity.keys() != keys {
                popularity = Popularity::of(keys);
            }
            due += rate as f64 * passed.as_secs_f64();
            while due >= 1.0 {
                due -= 1.0;
                // Recorded here and not in the task, so that a preset that ends the load sees every request.
                self.board.begin();
                if self.board.in_flight() > MOST_AT_ONCE {
                    self.board.end(Outcome::Failed, PATIENCE);
                } else {
                    tokio::spawn(self.clone().request(popularity.pick()));
                }
            }
        }
    }

    /// One request, from its beginning to its outcome.
    async fn request(self: Arc<Self>, key: u64) {
        let began = Instant::now();
        let outcome = timeout(PATIENCE, self.ask_replicas(key)).await.unwrap_or(Outcome::Failed);
        // An error at once is no quick answer: it counts as long as a client would have waited.
        let time = if outcome == Outcome::Failed { PATIENCE } else { began.elapsed() };
        self.board.end(outcome, time);
    }

    async fn ask_replicas(&self, key: u64) -> Outcome {
        for _ in 0..ATTEMPTS {
            let Some(mut target) = self.next_target() else { return Outcome::Failed };
            let _waiting = self.board.wait(key, target.id);
            let answer = tokio::select! {
                answer = self.ask(target.port, key) => answer,
                _ = target.removed.wait_for(|removed| *removed) => None,
            };
            if let Some(outcome) = answer {
                return outcome;
            }
        }
        Outcome::Failed
    }

    fn next_target(&self) -> Option<Target> {
        let targets = self.targets.borrow();
        let turn = self.turn.fetch_add(1, Ordering::Relaxed);
        targets.get(turn % targets.len().max(1)).cloned()
    }

    /// Asks one replica. `None` if its connection broke.
    async fn ask(&self, port: u16, key: u64) -> Option<Outcome> {
        let version = self.version.load(Ordering::Relaxed);
        let uri = format!("http://127.0.0.1:{port}/v{version}/report/{key}");
        let request = Request::get(uri).header(header::HOST, AUTHORITY).body(Empty::new()).ok()?;
        let response = self.client.request(request).await.ok()?;
        let (head, body) = response.into_parts();
        let body = body.collect().await.ok()?.to_bytes();
        let expected = format!("report {key} of v{version}: ");
        if !head.status.is_success() || !body.starts_with(expected.as_bytes()) {
            return Some(Outcome::Failed);
        }
        Some(outcome(&head.headers))
    }
}

/// How a successful response was made, by its `Cache-Status` (RFC 9211).
fn outcome(headers: &HeaderMap) -> Outcome {
    let status =
        headers.get(header::CACHE_STATUS).and_then(|status| status.to_str().ok()).unwrap_or_default();
    let has = |part: &str| status.split(';').any(|own| own.trim() == part);
    if status.contains("ttl=-") {
        Outcome::Stale
    } else if has("hit") {
        Outcome::Hit
    } else if has("collapsed") {
        Outcome::Waited
    } else if has("detail=uncoordinated") || has("detail=no-store") {
        Outcome::Alone
    } else {
        Outcome::Loaded
    }
}

/// Which key a request is for: the second is requested half as often as the first, the third a third as often.
struct Popularity {
    /// The sum of the weights up to each key.
    sums: Vec<f64>,
}

impl Popularity {
    fn of(keys: u64) -> Self {
        let weights = (1..=keys).map(|key| 1.0 / key as f64);
        let sums = weights.scan(0.0, |sum, weight| {
            *sum += weight;
            Some(*sum)
        });
        Self { sums: sums.collect() }
    }

    fn keys(&self) -> u64 {
        self.sums.len() as u64
    }

    fn pick(&self) -> u64 {
        let at = fastrand::f64() * self.sums.last().copied().unwrap_or_default();
        (self.sums.partition_point(|sum| *sum <= at) as u64 + 1).min(self.keys())
    }
}
