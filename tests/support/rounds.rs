//! Checks promised times over several rounds. A machine that runs several tests at once stalls now and then, so one late round
//! proves nothing; a real defect is late in most rounds. Five of at most nine rounds have to be in time.

use std::fmt::{self, Debug, Display};
use std::time::Duration;

/// Allowance for a machine that runs other tests at the same time. A [`Timing`] adds at most the promised time again.
pub(crate) const SLACK: Duration = Duration::from_millis(400);

const GOOD: usize = 5;
const MOST: usize = 9;

/// The measured time of one round, and its limit.
#[derive(Clone, Copy)]
pub(crate) struct Timing {
    what: &'static str,
    took: Duration,
    most: Duration,
}

impl Timing {
    /// The timing of something that happens once in a round.
    pub(crate) fn once(what: &'static str, took: Duration, promised: Duration) -> Self {
        Self { what, took, most: promised + SLACK.min(promised) }
    }

    /// The timing of something that happens many times in a round: the median, which a stall of the machine hardly changes. Allows twice
    /// the promise, because the build is not optimised.
    pub(crate) fn median(what: &'static str, times: &[Duration], promised: Duration) -> Self {
        let mut times = times.to_vec();
        times.sort();
        Self { what, took: times[times.len() / 2], most: promised * 2 }
    }

    fn is_in_time(&self) -> bool {
        self.took <= self.most
    }
}

impl Debug for Timing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { what, took, most } = self;
        let late = if self.is_in_time() { "" } else { ", LATE" };
        write!(f, "{what} {took:.1?} (of {most:?}{late})")
    }
}

/// The rounds so far.
pub(crate) struct Rounds {
    what: String,
    good: usize,
    taken: Vec<Vec<Timing>>,
}

impl Rounds {
    pub(crate) fn of(what: impl Display) -> Self {
        Self { what: what.to_string(), good: 0, taken: Vec::new() }
    }

    /// The number of the next round; `None` once enough rounds were good.
    pub(crate) fn next(&self) -> Option<usize> {
        if self.good == GOOD {
            println!("{self}");
            return None;
        }
        Some(self.taken.len())
    }

    /// Records a round. Fails when too few rounds are left to reach the required number of good ones.
    #[track_caller]
    pub(crate) fn note(&mut self, timings: impl IntoIterator<Item = Timing>) {
        let timings = Vec::from_iter(timings);
        self.good += usize::from(!timings.is_empty() && timings.iter().all(Timing::is_in_time));
        self.taken.push(timings);
        assert!(self.taken.len() - self.good <= MOST - GOOD, "late in too many rounds: {self}");
    }

    /// Records a round in which nothing could be measured, because the machine stalled during its preparation.
    #[track_caller]
    pub(crate) fn spoil(&mut self) {
        self.note([]);
    }
}

impl Display for Rounds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:", self.what)?;
        self.taken.iter().try_for_each(|timings| write!(f, "\n  {timings:?}"))
    }
}
