//! [`LoadLimit`]: the law by which a fleet-wide limit of concurrent loads finds its number.
//!
//! The limit climbs the throughput of completed loads. An origin does more per second the more it is asked, up to its knee, and less
//! beyond it; so the limit rises while that makes more loads succeed per second, and falls when it does not. Latency would be the wrong
//! signal where the loads of one policy take 10 ms and 600 ms. Invariants:
//!
//! 1. At no time do more loads hold permits than the limit was when the last of them got its permit. Lowering it takes no permit away.
//! 2. It moves by one step per window, whichever process closes the window: only a permit that is given back changes it.
//! 3. A window in which no load waited for a permit changes nothing.
//! 4. One process cannot lower it for all: failures count by the majority of processes, and a slow process does not count as failing.
//!
//! The law runs where the permits are: here for stores in memory, in `redis/scripts/load_limit.lua` on a server. The contract's tests
//! compare both.

use std::time::Duration;

use tokio::time::Instant;

/// A window lasts at least this long,
const WINDOW: Duration = Duration::from_millis(500);
/// and until this many loads have ended: the noise of their count is then as large as one step,
const WINDOW_LOADS: u32 = 40;
/// but no longer than this, if loads end seldom.
const LONGEST_WINDOW: Duration = Duration::from_secs(4);
/// Processes are told apart by this many slots.
const SLOTS: usize = 64;

/// The settings of a load limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LimitBounds {
    pub(crate) least: u32,
    pub(crate) most: u32,
}

/// How a load that held a permit has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LoadEnd {
    Done,
    Failed,
    /// The origin has answered that it was asked too often (429): neither done, nor a sign of overload.
    Refused,
}

impl LoadEnd {
    pub(crate) const fn text(self) -> &'static str {
        match self {
            Self::Done => "done",
            Self::Failed => "failed",
            Self::Refused => "refused",
        }
    }
}

/// What FREE of a load limit learns from a load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct EndedLoad {
    pub(crate) end: LoadEnd,
    pub(crate) bounds: LimitBounds,
}

/// A load limit at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct LimitState {
    pub(crate) limit: u32,
    /// How many processes have ended loads in the last window.
    pub(crate) processes: u32,
    /// Loads per 1,000 seconds that succeeded in the last window in which the limit was used to the full, or 0.
    pub(crate) throughput: u64,
    pub(crate) rises: bool,
}

/// The law's state for one limit.
#[derive(Debug)]
pub(super) struct LoadLimit {
    limit: u32,
    rises: bool,
    /// Whether the limit still grows by half: until the throughput does not follow.
    is_fast: bool,
    /// The throughput of the window before; 0 if it says nothing about this one.
    last: f64,
    processes: u32,
    window: Window,
}

#[derive(Debug)]
struct Window {
    begun: Instant,
    done: u32,
    ended: u32,
    /// How many of the loads ended while another waited for a permit.
    full: u32,
    /// For each process that has ended loads, how many more of its loads have failed than succeeded.
    balances: [Option<i32>; SLOTS],
}

impl Window {
    fn new(now: Instant) -> Self {
        Self { begun: now, done: 0, ended: 0, full: 0, balances: [None; SLOTS] }
    }
}

impl LoadLimit {
    pub(super) fn new(limit: u32, now: Instant) -> Self {
        Self { limit, rises: true, is_fast: true, last: 0.0, processes: 1, window: Window::new(now) }
    }

    /// Counts a load of the process with this number that gave its permit back. `waits` is whether another load waits for a permit,
    /// `idle` whether neither that is so nor another load runs.
    pub(super) fn end_load(
        &mut self,
        now: Instant,
        process: u8,
        ended: EndedLoad,
        (waits, idle): (bool, bool),
    ) -> LimitState {
        let window = &mut self.window;
        window.done += u32::from(ended.end == LoadEnd::Done);
        window.ended += 1;
        window.full += u32::from(waits);
        *window.balances[usize::from(process) % SLOTS].get_or_insert(0) += match ended.end {
            LoadEnd::Done => -1,
            LoadEnd::Failed => 1,
            LoadEnd::Refused => 0,
        };
        let span = now - window.begun;
        // The time without loads would count as slow.
        if idle {
            self.last = 0.0;
            self.close(now, ended.bounds);
        } else if span >= WINDOW && (window.ended >= WINDOW_LOADS || span >= LONGEST_WINDOW) {
            self.learn(span);
            self.close(now, ended.bounds);
        }
        LimitState {
            limit: self.limit,
            processes: self.processes,
            throughput: self.last as u64,
            rises: self.rises,
        }
    }

    fn learn(&mut self, span: Duration) {
        let Window { done, ended, full, balances, .. } = &self.window;
        let processes = balances.iter().flatten();
        let failing = processes.clone().filter(|balance| **balance > 0).count();
        let seen = processes.count();
        self.processes = u32::try_from(seen).unwrap_or(1);
        if failing * 2 > seen {
            // The origin, not one process.
            self.limit = (f64::from(self.limit) * 0.6) as u32;
            (self.rises, self.is_fast, self.last) = (true, true, 0.0);
        } else if full * 2 < *ended {
            self.last = 0.0;
        } else {
            let throughput = f64::from(*done) * 1_000_000.0 / span.as_millis() as f64;
            self.turn(throughput);
            self.last = throughput;
            // By one permit at least: a small limit would not move at all.
            let limit = f64::from(self.limit);
            self.limit = match self.rises {
                true => ((limit * if self.is_fast { 1.5 } else { 1.15 }) as u32).max(self.limit + 1),
                false => ((limit / 1.15) as u32).min(self.limit.saturating_sub(1)),
            };
        }
    }

    /// Decides whether the limit rises, by the throughput of this window and the one before.
    fn turn(&mut self, throughput: f64) {
        if self.last <= 0.0 {
            return;
        }
        let ratio = throughput / self.last;
        if self.is_fast && ratio < 1.25 {
            (self.is_fast, self.rises) = (false, ratio >= 1.04);
        } else if self.rises && ratio < 1.04 {
            self.rises = false;
        } else if !self.rises && ratio < 0.96 {
            self.rises = true;
        }
    }

    fn close(&mut self, now: Instant, LimitBounds { least, most }: LimitBounds) {
        self.limit = self.limit.min(most).max(least);
        // At the lowest limit the only way is up.
        self.rises |= self.limit == least;
        self.window = Window::new(now);
    }
}
