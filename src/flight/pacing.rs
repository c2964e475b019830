//! Wakes the callers of a hot key all at once or in two halves, whichever measured faster.
//!
//! If all callers are woken at once and ask again at once, they all wait for one read, and their thread idles until the server
//! replies. In two halves, one half works while the next read for the other half is on its way. But that is one read more per
//! round, and a caller that asks again first waits for the other half's read. Which way is faster depends on the distance of
//! the server, on the number of callers and on their work. So both are measured, repeatedly.

use std::time::Duration;

use tokio::time::Instant;

use super::shared_read::WakeList;
use crate::sync::behind_all_others;

/// Fewer callers than this are always woken together: half of them is not worth a read.
const FEW: usize = 16;
/// How many rounds make one measurement.
const ROUNDS: u32 = 32;
/// How many measurements of the faster way are made before the other way is tried again.
const MEASURES: u32 = 32;

/// The measurements of one reader, and the way it wakes its callers now.
#[derive(Debug, Default)]
pub(crate) struct Pace {
    in_halves: bool,
    /// The latest time per caller, woken together and in halves. A measurement counts as at most an eighth more than the one before.
    took: [Option<Duration>; 2],
    measures: u32,
    /// The measurement in progress.
    rounds: u32,
    callers: u32,
    began: Option<Instant>,
}

impl Pace {
    /// Wakes the callers that may ask again before the next read is sent, and lets them run. The rest stay in `answered`, to be
    /// woken when that read is on its way. `awaiting` callers have queued meanwhile. `waited`: other tasks have run since the last call.
    pub(crate) async fn tell(&mut self, answered: &mut WakeList, awaiting: usize, waited: bool) {
        let first = self.first(answered.len(), awaiting, Instant::now());
        answered.tell(first);
        if answered.len() == 0 {
            tokio::task::yield_now().await;
        } else if first > 0 || !waited {
            behind_all_others().await;
        }
    }

    /// How many of the answered callers are woken first.
    fn first(&mut self, answered: usize, awaiting: usize, now: Instant) -> usize {
        let all = answered + awaiting;
        if all < FEW {
            self.begin(None);
            return answered;
        }
        self.measure(answered, now);
        if self.in_halves { (all / 2).saturating_sub(awaiting) } else { answered }
    }

    fn begin(&mut self, now: Option<Instant>) {
        (self.rounds, self.callers, self.began) = (0, 0, now);
    }

    /// Counts a round that has ended.
    fn measure(&mut self, answered: usize, now: Instant) {
        let Some(began) = self.began else { return self.begin(Some(now)) };
        self.rounds += 1;
        self.callers = self.callers.saturating_add(u32::try_from(answered).unwrap_or(u32::MAX));
        if self.rounds < ROUNDS {
            return;
        }
        let took = now.saturating_duration_since(began) / self.callers.max(1);
        // A stall of the machine says nothing about either way. So the first measurement of a way is repeated, and a later one
        // may exceed the one before by an eighth only.
        let way = &mut self.took[usize::from(self.in_halves)];
        let Some(before) = way.replace(took) else { return self.begin(Some(now)) };
        let took = took.min(before + before / 8);
        *way = Some(took);
        self.measures += 1;
        if self.took[usize::from(!self.in_halves)].is_none_or(|other| other < took)
            || self.measures == MEASURES
        {
            self.in_halves = !self.in_halves;
            self.measures = 0;
        }
        self.begin(Some(now));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FAST: Duration = Duration::from_micros(100);
    const SLOW: Duration = Duration::from_micros(150);

    /// Simulates 64 callers that ask again at once, for `rounds` rounds of duration `takes`; returns which rounds were in halves.
    fn halves_of(rounds: u32, takes: impl Fn(u32, bool) -> Duration) -> Vec<bool> {
        let (mut pace, mut now, mut awaiting) = (Pace::default(), Instant::now(), 0);
        let round = |round| {
            let in_halves = pace.in_halves;
            now += takes(round, in_halves) / if in_halves { 2 } else { 1 };
            let answered = 64 - awaiting;
            let first = pace.first(answered, awaiting, now);
            // Callers that are woken later ask again when they are woken.
            awaiting = answered - first;
            in_halves
        };
        (0..rounds).map(round).collect()
    }

    fn share(halves: &[bool]) -> f64 {
        halves.iter().filter(|in_halves| **in_halves).count() as f64 / halves.len() as f64
    }

    #[test]
    fn the_faster_way_is_used_and_the_slower_way_is_retried() {
        let halves = share(&halves_of(100 * ROUNDS, |_, in_halves| if in_halves { FAST } else { SLOW }));
        assert!(halves > 0.9 && halves < 0.99, "{halves}");
        let halves = share(&halves_of(100 * ROUNDS, |_, in_halves| if in_halves { SLOW } else { FAST }));
        assert!(halves < 0.1 && halves > 0.01, "{halves}");
    }

    #[test]
    fn one_stall_of_the_machine_does_not_change_the_way() {
        let halves_of = |stall, [together, in_halves]: [Duration; 2]| {
            halves_of(30 * ROUNDS, |round, halves| match (round == stall, halves) {
                (true, _) => FAST * ROUNDS * 4,
                (_, true) => in_halves,
                (_, false) => together,
            })
        };
        let stall = 20 * ROUNDS;
        let halves = halves_of(stall, [SLOW, FAST]);
        assert!(share(&halves[stall as usize..]) == 1.0, "{halves:?}");
        // Also if nothing was measured before.
        let halves = halves_of(5, [FAST, SLOW]);
        assert!(share(&halves[6 * ROUNDS as usize..]) == 0.0, "{halves:?}");
    }

    #[test]
    fn a_way_that_becomes_faster_is_adopted() {
        let changes = 20 * ROUNDS;
        let is_fast = |round, in_halves| in_halves == (round < changes);
        let halves = halves_of(
            60 * ROUNDS,
            |round, in_halves| if is_fast(round, in_halves) { FAST } else { SLOW * 2 },
        );
        assert!(share(&halves[..changes as usize]) > 0.85);
        assert!(share(&halves[changes as usize + 15 * ROUNDS as usize..]) < 0.1, "{halves:?}");
    }

    #[test]
    fn half_of_all_callers_are_in_the_next_read() {
        for (answered, awaiting, first) in
            [(64, 0, 32), (40, 24, 8), (32, 32, 0), (1, 63, 0), (63, 1, 31), (16, 0, 8)]
        {
            let mut pace = Pace { in_halves: true, ..Pace::default() };
            assert_eq!(pace.first(answered, awaiting, Instant::now()), first, "{answered} and {awaiting}");
        }
    }

    #[test]
    fn a_few_callers_are_all_woken_together() {
        let mut pace = Pace { in_halves: true, ..Pace::default() };
        assert_eq!(pace.first(8, 7, Instant::now()), 8);
    }
}
