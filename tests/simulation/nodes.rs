//! One simulated process: its guard, its callers, and the times at which it was stopped.

use std::collections::HashMap;
use std::sync::Mutex;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use tokio::task::AbortHandle;
use tokio::time::Instant;

use crate::StampedeGuard;
use crate::sync::lock;
use crate::testing::Replica;

/// One process, until it dies.
#[derive(Debug)]
pub(super) struct Node {
    pub(super) id: usize,
    pub(super) guard: StampedeGuard,
    pub(super) replica: Replica,
    /// The node is being shut down.
    pub(super) leaves: AtomicBool,
    /// The tasks that run its callers.
    pub(super) calls: Mutex<Vec<AbortHandle>>,
    /// The records of its callers' calls, by key; a load may serve them.
    records: Mutex<HashMap<u8, Vec<CallRecord>>>,
    /// The spans in which it was stopped. The last one has no end while the node is still stopped.
    stops: Mutex<Vec<(Instant, Option<Instant>)>>,
}

#[derive(Clone, Copy, Debug)]
struct CallRecord {
    seq: u64,
    at: Instant,
    over: Option<Over>,
}

/// How a call has ended.
#[derive(Clone, Copy, Debug)]
enum Over {
    Answered(Instant),
    /// The caller has dropped the call before an answer.
    Left(Instant),
}

/// The calls of one key that a load may serve if it begins now.
#[derive(Clone, Copy, Debug)]
pub(super) struct Window {
    /// When the earliest of them began.
    pub(super) from: Instant,
    /// The longest wait among those of them that have not ended, or have only just ended.
    pub(super) waited: Duration,
}

/// A running call. Without an answer, its drop records that the caller has left.
#[derive(Debug)]
pub(super) struct Asking<'a> {
    node: &'a Node,
    key: u8,
    pub(super) seq: u64,
    is_answered: bool,
}

impl Asking<'_> {
    /// Records that the call has its answer.
    pub(super) fn answered(mut self) {
        self.is_answered = true;
    }
}

impl Drop for Asking<'_> {
    fn drop(&mut self) {
        let mut records = lock(&self.node.records);
        let record = records.entry(self.key).or_default().iter_mut().find(|record| record.seq == self.seq);
        if let Some(record) = record {
            let now = Instant::now();
            record.over = Some(if self.is_answered { Over::Answered(now) } else { Over::Left(now) });
        }
    }
}

impl Node {
    pub(super) fn new(id: usize, guard: StampedeGuard, replica: Replica) -> Self {
        let (leaves, calls, records, stops) =
            (AtomicBool::new(false), Mutex::default(), Mutex::default(), Mutex::default());
        Self { id, guard, replica, leaves, calls, records, stops }
    }

    /// Records a call that begins.
    pub(super) fn asks(&self, key: u8, seq: u64) -> Asking<'_> {
        let record = CallRecord { seq, at: Instant::now(), over: None };
        lock(&self.records).entry(key).or_default().push(record);
        Asking { node: self, key, seq, is_answered: false }
    }

    /// The calls that a load of this key may serve if it begins now: calls that wait; calls that were answered at most `soon` ago, because
    /// their background load begins within that time; and calls that their callers have left, for as long as a flight `lasts`. A caller may
    /// also have left when its flight had waited long enough and was about to load.
    pub(super) fn window(&self, key: u8, soon: Duration, lasts: Duration) -> Option<Window> {
        let records = lock(&self.records);
        let of_key = records.get(&key)?;
        let is_there = |record: &&CallRecord| match record.over {
            None => true,
            Some(Over::Answered(at)) => at.elapsed() <= soon,
            Some(Over::Left(_)) => record.at.elapsed() <= lasts,
        };
        // If no call is left that the load may serve, it is a delayed background load of the last call.
        let from = of_key.iter().find(is_there).or_else(|| of_key.last())?.at;
        let waits = of_key.iter().filter(|record| match record.over {
            None => true,
            Some(Over::Answered(at) | Over::Left(at)) => at.elapsed() <= soon,
        });
        Some(Window { from, waited: waits.map(|record| record.at.elapsed()).max().unwrap_or_default() })
    }

    pub(super) fn stop(&self) {
        self.replica.stop();
        let mut stops = lock(&self.stops);
        if stops.last().is_none_or(|(_, ended)| ended.is_some()) {
            stops.push((Instant::now(), None));
        }
    }

    pub(super) fn cut(&self) {
        self.replica.cut();
        self.goes_on();
    }

    pub(super) fn resume(&self) {
        self.replica.resume();
        self.goes_on();
    }

    pub(super) fn kill(&self) {
        self.replica.kill();
        self.goes_on();
    }

    fn goes_on(&self) {
        if let Some((_, ended @ None)) = lock(&self.stops).last_mut() {
            *ended = Some(Instant::now());
        }
    }

    /// The spans, from `since` on, in which the node was stopped.
    pub(super) fn stops_since(&self, since: Instant) -> Vec<(Instant, Instant)> {
        let now = Instant::now();
        let stops = lock(&self.stops);
        let since = stops.iter().map(|(from, to)| ((*from).max(since), to.unwrap_or(now)));
        since.filter(|(from, to)| from <= to).collect()
    }
}
