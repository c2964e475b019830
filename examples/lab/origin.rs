//! The origin: a slow service with room for some loads at once, and a queue for the others, which may slow it down.
//!
//! A load goes on when its client has left, as a query goes on in most databases. So a queue that is longer than the clients'
//! patience keeps the origin busy with work for nobody, and that is how a stampede outlives its cause.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use axum::extract::{Path, Query, State as Shared};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use axum::{Json, Router, routing::get};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::sync::{oneshot, watch};

use crate::board::Board;
use crate::controls::Controls;
use crate::story::{Load, Story};

/// The header in which a replica says its number.
pub(crate) const REPLICA: &str = "x-replica";
/// Beyond this queue the origin refuses loads, as a server does whose backlog is full.
const LONGEST_QUEUE: usize = 2_000;
/// How many loads [`Origin::counts`] can look back on.
const REMEMBERED: usize = 50_000;

pub(crate) struct Origin {
    controls: watch::Receiver<Controls>,
    board: Arc<Board>,
    story: Arc<Story>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    loads: u64,
    served: u64,
    failed: u64,
    refused: u64,
    by_replica: BTreeMap<usize, u64>,
    running: usize,
    queue: VecDeque<oneshot::Sender<()>>,
    longest_queue: usize,
    /// The same since [`Origin::open_window`].
    window_queue: usize,
    present: BTreeMap<u64, Load>,
    lanes: BTreeMap<u64, Lane>,
    /// When each load began, and whose it was.
    began: VecDeque<(u64, usize)>,
    /// The value of each key that was changed without notice.
    values: BTreeMap<u64, u64>,
}

/// The loads of one key.
#[derive(Clone, Copy, Default)]
pub(crate) struct Lane {
    now: usize,
    /// The most at once since the last sample.
    pub(crate) most: usize,
    /// The replica that began the last one.
    pub(crate) replica: usize,
}

/// What the page shows of the origin.
pub(crate) struct Pressure {
    pub(crate) loads: u64,
    pub(crate) running: usize,
    pub(crate) queue: usize,
}

impl Origin {
    pub(crate) fn new(
        controls: watch::Receiver<Controls>,
        board: Arc<Board>,
        story: Arc<Story>,
    ) -> Arc<Self> {
        let origin = Arc::new(Self { controls, board, story, state: Mutex::default() });
        tokio::spawn(origin.clone().follow_capacity());
        origin
    }

    pub(crate) fn router(self: &Arc<Self>) -> Router {
        Router::new()
            .route("/load/{version}/report/{key}", get(load))
            .route("/counts", get(counts))
            .with_state(self.clone())
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn pressure(&self) -> Pressure {
        let state = self.state();
        Pressure { loads: state.loads, running: state.running, queue: state.queue.len() }
    }

    /// The longest queue since the last call.
    pub(crate) fn take_longest_queue(&self) -> usize {
        let state = &mut *self.state();
        std::mem::replace(&mut state.longest_queue, state.queue.len())
    }

    /// Begins to watch the queue for a preset's result.
    pub(crate) fn open_window(&self) {
        let state = &mut *self.state();
        state.window_queue = state.queue.len();
    }

    pub(crate) fn window_queue(&self) -> usize {
        self.state().window_queue
    }

    /// The loads by key since the last call.
    pub(crate) fn take_lanes(&self) -> BTreeMap<u64, Lane> {
        let state = &mut *self.state();
        let taken = state.lanes.clone();
        state.lanes.retain(|_, lane| {
            lane.most = lane.now;
            lane.now > 0
        });
        taken
    }

    /// The loads that are running or queued now, the oldest first.
    pub(crate) fn present(&self) -> Vec<Load> {
        let mut loads: Vec<_> = self.state().present.values().cloned().collect();
        loads.sort_by_key(|load| load.began_ms);
        loads
    }

    pub(crate) fn to_json(&self) -> Value {
        let state = self.state();
        json!({
            "loads": state.loads, "served": state.served, "failed": state.failed, "refused": state.refused,
            "running": state.running, "queue": state.queue.len(), "by_replica": state.by_replica,
        })
    }

    /// Changes the value of a key, and notifies no replica.
    pub(crate) fn change(&self, key: u64) -> u64 {
        let state = &mut *self.state();
        let value = state.values.entry(key).or_insert(1);
        *value += 1;
        *value
    }

    /// Drops the queue, as a restart of the origin does. The loads that run now end as usual.
    pub(crate) fn drop_queue(&self) {
        self.state().queue.clear();
    }

    /// Lets queued loads run when the capacity grows.
    async fn follow_capacity(self: Arc<Self>) {
        let mut controls = self.controls.clone();
        while controls.changed().await.is_ok() {
            self.admit(&mut self.state());
        }
    }

    /// Begins queued loads while there is room.
    fn admit(&self, state: &mut State) {
        let capacity = self.controls.borrow().capacity as usize;
        while state.running < capacity {
            let Some(turn) = state.queue.pop_front() else { return };
            if turn.send(()).is_ok() {
                state.running += 1;
            }
        }
    }

    /// Takes a load in: the number by which it ends, and its turn if it must queue. `None` if the queue is full.
    fn enter(&self, key: u64, replica: usize) -> Option<(u64, Option<oneshot::Receiver<()>>)> {
        let load = Load { key, replica, began_ms: self.board.now_ms() };
        let state = &mut *self.state();
        state.loads += 1;
        *state.by_replica.entry(replica).or_default() += 1;
        if state.began.len() == REMEMBERED {
            state.began.pop_front();
        }
        state.began.push_back((load.began_ms, replica));
        if state.queue.len() >= LONGEST_QUEUE {
            state.refused += 1;
            return None;
        }
        let number = state.loads;
        state.present.insert(number, load);
        let lane = state.lanes.entry(key).or_default();
        (lane.now, lane.replica) = (lane.now + 1, replica);
        lane.most = lane.most.max(lane.now);
        if state.running < self.controls.borrow().capacity as usize {
            state.running += 1;
            return Some((number, None));
        }
        let (turn, called) = oneshot::channel();
        state.queue.push_back(turn);
        state.longest_queue = state.longest_queue.max(state.queue.len());
        state.window_queue = state.window_queue.max(state.queue.len());
        Some((number, Some(called)))
    }

    /// Runs one load to its end.
    async fn run(&self, number: u64, turn: Option<oneshot::Receiver<()>>) -> Result<(), StatusCode> {
        if let Some(turn) = turn
            && turn.await.is_err()
        {
            let state = &mut *self.state();
            state.leave(number);
            state.failed += 1;
            return Err(StatusCode::SERVICE_UNAVAILABLE);
        }
        let latency = self.controls.borrow().latency(self.pressure().queue);
        tokio::time::sleep(latency).await;
        let fails = fastrand::u64(0..100) < self.controls.borrow().failure_percent;
        let state = &mut *self.state();
        state.leave(number);
        state.running -= 1;
        self.admit(state);
        if fails {
            state.failed += 1;
            return Err(StatusCode::INTERNAL_SERVER_ERROR);
        }
        state.served += 1;
        Ok(())
    }

    /// The response of a load.
    fn value(&self, version: &str, key: u64) -> Response {
        let (length, private) = {
            let controls = self.controls.borrow();
            (controls.body_bytes as usize, controls.private)
        };
        let value = self.state().values.get(&key).copied().unwrap_or(1);
        let mut body = format!("report {key} of {version}: value {value}\n");
        while body.len() < length {
            body.push_str(&"all is well, ".repeat(64));
        }
        body.truncate(length.max(32));
        let mut headers = HeaderMap::new();
        headers.insert(header::CONTENT_TYPE, header::HeaderValue::from_static("text/plain"));
        if private {
            headers.insert(header::CACHE_CONTROL, header::HeaderValue::from_static("private"));
        }
        (headers, body).into_response()
    }
}

impl State {
    /// Forgets a load that has ended.
    fn leave(&mut self, number: u64) {
        if let Some(load) = self.present.remove(&number)
            && let Some(lane) = self.lanes.get_mut(&load.key)
        {
            lane.now -= 1;
        }
    }
}

/// `GET /load/v3/report/7`, from a replica.
async fn load(
    Shared(origin): Shared<Arc<Origin>>,
    Path((version, key)): Path<(String, u64)>,
    headers: HeaderMap,
) -> Response {
    let replica = headers.get(REPLICA).and_then(|id| id.to_str().ok()?.parse().ok()).unwrap_or(0);
    let Some((number, turn)) = origin.enter(key, replica) else {
        return (StatusCode::SERVICE_UNAVAILABLE, "the origin's queue is full\n").into_response();
    };
    origin.story.load_began(key, replica);
    // In a separate task, so that the load goes on when its client has left.
    let running = origin.clone();
    let run = tokio::spawn(async move {
        let result = running.run(number, turn).await;
        running.story.load_ended(key, replica, result.is_ok());
        result
    });
    match run.await.unwrap_or(Err(StatusCode::INTERNAL_SERVER_ERROR)) {
        Ok(()) => origin.value(&version, key),
        Err(status) => (status, "the origin has failed\n").into_response(),
    }
}

/// A period on the lab's clock.
#[derive(Deserialize)]
struct Period {
    from_ms: Option<u64>,
    to_ms: Option<u64>,
}

/// `GET /counts`: the origin's own account of its loads, all of them or those that began within a period.
async fn counts(Shared(origin): Shared<Arc<Origin>>, Query(period): Query<Period>) -> Json<Value> {
    let (Some(from), Some(to)) = (period.from_ms, period.to_ms) else { return Json(origin.to_json()) };
    let state = origin.state();
    let within = state.began.iter().filter(|(began, _)| (from..to).contains(began));
    let mut by_replica = BTreeMap::<usize, u64>::new();
    for (_, replica) in within {
        *by_replica.entry(*replica).or_default() += 1;
    }
    Json(json!({ "loads": by_replica.values().sum::<u64>(), "by_replica": by_replica }))
}
