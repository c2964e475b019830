//! [`LoadLimit`]: the control law that adapts a fleet-wide limit of concurrent loads.
//!
//! The limit climbs to the highest throughput of completed loads. The more loads an origin runs at once, the more it does per second, up
//! to its knee; beyond that it does less. So the limit rises while a higher limit makes more loads succeed per second, and otherwise
//! falls. Latency would be the wrong signal where the loads of one policy take 10 ms and 600 ms. The number of loads of one window says
//! little, because it varies by chance more than a step changes it. So the direction follows the covariance of limit and throughput, in
//! which each window counts half as much as the next one. Invariants:
//!
//! 1. At no time do more loads hold permits than the limit was when the last of them got its permit. A lower limit takes no permit away.
//! 2. The limit moves by one step per window, whichever process closes the window: only a permit that is given back changes it.
//! 3. A window in which fewer than half of the loads ended while another load waited for a permit does not change the limit, unless
//!    most processes failed.
//! 4. One process cannot lower the limit for all: failures count by the majority of processes, and a slow process does not count as
//!    failing.
//!
//! The law runs where the permits are: here for stores in memory, in `redis/scripts/load_limit.lua` on a server. The contract's tests
//! compare both.

use std::time::Duration;

use tokio::time::Instant;

/// A window lasts at least this long, unless the limit falls idle.
const WINDOW: Duration = Duration::from_millis(500);
/// A window lasts until this many loads have ended: the noise of their count is then as large as one step.
pub(super) const WINDOW_LOADS: u32 = 40;
/// After this time a window ends with its next load, however few have ended.
const LONGEST_WINDOW: Duration = Duration::from_secs(4);
/// The processes of a window are distinguished by their number modulo this. Two with the same remainder count as one.
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
    /// The origin has answered 429 (too many requests): the load is neither done, nor a sign of overload.
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

/// What FREE reports about a load to the load limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct EndedLoad {
    pub(crate) end: LoadEnd,
    pub(crate) bounds: LimitBounds,
}

/// A load limit at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct LimitState {
    pub(crate) limit: u32,
    /// How many processes have ended loads in the last window that did not end because the limit fell idle; 1 before the first.
    pub(crate) processes: u32,
    /// How many loads per 1,000 seconds succeeded in the last window. 0 if that window does not show what the limit allows: most
    /// processes failed, or fewer than half of its loads ended while another waited, or the limit has fallen idle since.
    pub(crate) throughput: u64,
    pub(crate) rises: bool,
}

/// The control law's state for one limit.
#[derive(Debug)]
pub(super) struct LoadLimit {
    limit: u32,
    rises: bool,
    /// Whether the limit still grows by half per window: until the throughput grows by less than a quarter.
    is_fast: bool,
    /// The throughput of the previous window; 0 if the present one cannot be compared with it.
    last: f64,
    trend: Trend,
    processes: u32,
    window: Window,
}

/// Means over the last windows. Each window has half the weight of the one after it.
#[derive(Clone, Copy, Debug, Default)]
struct Trend {
    limit: f64,
    throughput: f64,
    covariance: f64,
    variance: f64,
}

impl Trend {
    fn of(limit: f64, throughput: f64) -> Self {
        Self { limit, throughput, ..Self::default() }
    }

    /// Adds a window. Returns whether a higher limit brings more throughput: at least 0.5 % more for a limit that is 10 % higher. (So
    /// where the throughput does not depend on the limit, as at a rate limiter, the limit falls.)
    fn rises_with(&mut self, limit: f64, throughput: f64) -> bool {
        let (of_limit, of_throughput) = (limit - self.limit, throughput - self.throughput);
        self.limit += of_limit / 2.0;
        self.throughput += of_throughput / 2.0;
        self.covariance = (self.covariance + of_limit * of_throughput) / 2.0;
        self.variance = (self.variance + of_limit * of_limit) / 2.0;
        self.covariance * self.limit > 0.05 * self.variance * self.throughput
    }
}

#[derive(Debug)]
struct Window {
    begun: Instant,
    done: u32,
    ended: u32,
    /// How many of the loads in `ended` ended while another load waited for a permit.
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
        let (trend, window) = (Trend::default(), Window::new(now));
        Self { limit, rises: true, is_fast: true, last: 0.0, trend, processes: 1, window }
    }

    /// Counts a load of the process with this number that gave its permit back. `waits` is whether another load waits for a permit;
    /// `idle` is whether no other load waits or runs.
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
        // A new window must begin: the time without loads would count as a low throughput.
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
            // More than half of the processes fail, so the origin is the cause, not one process.
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

    /// Decides whether the limit rises or falls next, by the throughput of the window that ends.
    fn turn(&mut self, throughput: f64) {
        let limit = f64::from(self.limit);
        if self.last > 0.0 && !self.is_fast {
            self.rises = self.trend.rises_with(limit, throughput);
            return;
        }
        if self.last > 0.0 && throughput / self.last < 1.25 {
            (self.is_fast, self.rises) = (false, throughput / self.last >= 1.04);
        }
        self.trend = Trend::of(limit, throughput);
    }

    fn close(&mut self, now: Instant, LimitBounds { least, most }: LimitBounds) {
        self.limit = self.limit.min(most).max(least);
        // At the lowest limit the only way is up.
        self.rises |= self.limit == least;
        self.window = Window::new(now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOUNDS: LimitBounds = LimitBounds { least: 2, most: 25 };

    struct Origin {
        law: LoadLimit,
        now: Instant,
    }

    impl Origin {
        fn new() -> Self {
            let now = Instant::now();
            Self { law: LoadLimit::new(10, now), now }
        }

        /// A window of half a second in which this many loads ended. Returns the limit after it, and whether it rises.
        fn window(&mut self, loads: u32, waits: bool, end: impl Fn(u32) -> LoadEnd) -> (u32, bool) {
            let ended = |number| EndedLoad { end: end(number), bounds: BOUNDS };
            for number in 1..loads {
                self.law.end_load(self.now, (number % 4) as u8, ended(number), (waits, false));
            }
            self.now += WINDOW;
            let state = self.law.end_load(self.now, 0, ended(0), (waits, false));
            (state.limit, state.rises)
        }

        fn throughput_of(&mut self, loads: u32) -> (u32, bool) {
            self.window(loads, true, |_| LoadEnd::Done)
        }
    }

    #[test]
    fn the_limit_rises_while_that_makes_more_loads_succeed() {
        let mut origin = Origin::new();
        // The first window has no earlier one to be compared with. Then the throughput rises with the limit.
        assert_eq!(origin.throughput_of(40), (15, true));
        assert_eq!(origin.throughput_of(60), (22, true));
        // The throughput rises by less than a quarter, then not at all: the limit has risen beyond the knee.
        assert_eq!(origin.throughput_of(64), (25, true));
        assert_eq!(origin.throughput_of(64), (21, false));
        // The limit falls until the throughput falls with it.
        assert_eq!(origin.throughput_of(64), (18, false));
        assert_eq!(origin.throughput_of(60), (20, true));
    }

    #[test]
    fn a_window_without_waiting_loads_changes_nothing() {
        let mut origin = Origin::new();
        assert_eq!(origin.window(100, false, |_| LoadEnd::Done), (10, true));
        assert_eq!(origin.window(400, false, |_| LoadEnd::Done), (10, true));
        // The next window is not compared with it: half of its throughput does not make the limit fall.
        assert_eq!(origin.throughput_of(200), (15, true));
    }

    #[test]
    fn a_window_changes_the_limit_once() {
        let mut origin = Origin::new();
        assert_eq!(origin.throughput_of(40), (15, true));
        for process in 0..40 {
            let ended = EndedLoad { end: LoadEnd::Done, bounds: BOUNDS };
            assert_eq!(origin.law.end_load(origin.now, process, ended, (true, false)).limit, 15);
        }
    }

    #[test]
    fn the_limit_falls_when_most_processes_fail_and_not_when_one_does() {
        let mut origin = Origin::new();
        let failed_in = |failed: u32| {
            move |number: u32| if number % 4 < failed { LoadEnd::Failed } else { LoadEnd::Done }
        };
        assert_eq!(origin.window(80, true, failed_in(1)), (15, true));
        assert_eq!(origin.window(80, true, failed_in(3)), (9, true));
        assert_eq!(origin.window(80, true, |_| LoadEnd::Refused), (13, true));
    }

    #[test]
    fn the_time_without_loads_is_not_slowness() {
        let mut origin = Origin::new();
        assert_eq!(origin.throughput_of(40), (15, true));
        let ended = EndedLoad { end: LoadEnd::Done, bounds: BOUNDS };
        origin.law.end_load(origin.now, 0, ended, (false, true));
        origin.now += Duration::from_secs(3);
        // 60 loads in 3.5 s are fewer per second than 40 in 0.5 s, but the pause must not make the limit fall.
        assert_eq!(origin.throughput_of(60), (22, true));
    }

    /// What an origin with its knee at this many loads does in a minute, of what it could; and the median of the limit.
    fn of_the_best(knee: f64, best: f64) -> (f64, u32) {
        let throughput = |n: f64| n / (1.0 + 0.02 * (n - 1.0) + 0.98 / (knee * knee) * n * (n - 1.0));
        let rate = |limit: u32| best * throughput(f64::from(limit)) / throughput(knee);
        let (mut done, mut limits) = (0_u32, Vec::new());
        for _ in 0..20 {
            let began = Instant::now();
            let (mut law, mut now, mut limit) = (LoadLimit::new(20, began), began, 20);
            while now - began < Duration::from_secs(60) {
                now += Duration::from_secs_f64(-(1.0 - fastrand::f64()).ln() / rate(limit));
                let ended = EndedLoad { end: LoadEnd::Done, bounds: LimitBounds { least: 2, most: 5_000 } };
                limit = law.end_load(now, 0, ended, (true, false)).limit;
                limits.push(limit);
                done += 1;
            }
        }
        limits.sort_unstable();
        (f64::from(done) / (20.0 * 60.0 * best), limits[limits.len() / 2])
    }

    /// Regression: by the comparison of two windows the limit stood at 9 in the median, and did 0.71.
    #[test]
    fn the_limit_stays_near_the_knee() {
        fastrand::seed(7);
        for (knee, best) in [(25.0, 205.0), (25.0, 51.0), (200.0, 1_640.0)] {
            let (share, limit) = of_the_best(knee, best);
            println!("knee {knee}, {best} loads a second at best: {share:.3} of them, limit {limit}");
            assert!(share > 0.88 && (knee / 2.0..knee * 2.0).contains(&f64::from(limit)), "{share} {limit}");
        }
    }
}
