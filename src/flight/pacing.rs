//! In which order the callers of a hot key are told what was read, so that they are at work while the next read is on its way.
//!
//! Told all at once, those who ask again at once all wait for one read, and their thread waits with them for the server. In two
//! halves it does not: one half is read for while the other half works. But that is one read more per round, and whoever asks
//! again waits for the other half's read first. Which of the two is faster depends on how far away the server is, on
//! how many they are and on what they do; so it is measured, now and then anew.

use std::time::Duration;

use tokio::time::Instant;

use super::shared_read::Answered;
use crate::sync::behind_all_others;

/// Fewer than so many are always told together: half of them is not worth a read.
const FEW: usize = 16;
/// So many rounds are measured at a time.
const ROUNDS: u32 = 32;
/// So many measures are made of the way that was faster, before the other one is tried again.
const MEASURES: u32 = 32;

/// How one reader tells its callers.
#[derive(Debug, Default)]
pub(crate) struct Pace {
    in_halves: bool,
    /// For a caller, told together and in halves: what was measured, if not far more than what was before.
    took: [Option<Duration>; 2],
    measures: u32,
    /// What is measured now.
    rounds: u32,
    callers: u32,
    began: Option<Instant>,
}

impl Pace {
    /// Tells those who may ask again before the next read is sent, and gives them a turn for it. Whoever is left is to be told
    /// when it is on its way. `awaiting` have come meanwhile; `waited` is whether others have had a turn since the last call.
    pub(crate) async fn tell(&mut self, answered: &mut Answered, awaiting: usize, waited: bool) {
        let first = self.first(answered.len(), awaiting, Instant::now());
        answered.tell(first);
        if answered.len() == 0 {
            tokio::task::yield_now().await;
        } else if first > 0 || !waited {
            behind_all_others().await;
        }
    }

    /// How many of the answered are told first.
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

    /// Another round has ended.
    fn measure(&mut self, answered: usize, now: Instant) {
        let Some(began) = self.began else { return self.begin(Some(now)) };
        self.rounds += 1;
        self.callers = self.callers.saturating_add(u32::try_from(answered).unwrap_or(u32::MAX));
        if self.rounds < ROUNDS {
            return;
        }
        let took = now.saturating_duration_since(began) / self.callers.max(1);
        // A machine that stood still for a moment says nothing about either way: what is measured for the first time is
        // measured once more, and later it counts for little.
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

    /// Sixty-four callers who ask again at once, for so many rounds, which take so long each; which of them were in halves.
    fn halves_of(rounds: u32, takes: impl Fn(u32, bool) -> Duration) -> Vec<bool> {
        let (mut pace, mut now, mut awaiting) = (Pace::default(), Instant::now(), 0);
        let round = |round| {
            let in_halves = pace.in_halves;
            now += takes(round, in_halves) / if in_halves { 2 } else { 1 };
            let answered = 64 - awaiting;
            let first = pace.first(answered, awaiting, now);
            // Those who are told later come when they are told.
            awaiting = answered - first;
            in_halves
        };
        (0..rounds).map(round).collect()
    }

    fn share(halves: &[bool]) -> f64 {
        halves.iter().filter(|in_halves| **in_halves).count() as f64 / halves.len() as f64
    }

    #[test]
    fn the_faster_way_is_kept_to_and_the_other_tried_now_and_then() {
        let halves = share(&halves_of(100 * ROUNDS, |_, in_halves| if in_halves { FAST } else { SLOW }));
        assert!(halves > 0.9 && halves < 0.99, "{halves}");
        let halves = share(&halves_of(100 * ROUNDS, |_, in_halves| if in_halves { SLOW } else { FAST }));
        assert!(halves < 0.1 && halves > 0.01, "{halves}");
    }

    #[test]
    fn a_machine_that_stands_still_for_a_moment_changes_nothing() {
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
        // Also where nothing was measured before.
        let halves = halves_of(5, [FAST, SLOW]);
        assert!(share(&halves[6 * ROUNDS as usize..]) == 0.0, "{halves:?}");
    }

    #[test]
    fn what_becomes_faster_is_found() {
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
    fn half_of_all_are_in_the_next_read() {
        for (answered, awaiting, first) in
            [(64, 0, 32), (40, 24, 8), (32, 32, 0), (1, 63, 0), (63, 1, 31), (16, 0, 8)]
        {
            let mut pace = Pace { in_halves: true, ..Pace::default() };
            assert_eq!(pace.first(answered, awaiting, Instant::now()), first, "{answered} and {awaiting}");
        }
    }

    #[test]
    fn a_few_are_told_at_once() {
        let mut pace = Pace { in_halves: true, ..Pace::default() };
        assert_eq!(pace.first(8, 7, Instant::now()), 8);
    }
}
