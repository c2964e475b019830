//! The keys that are requested most often: a sketch of bounded size, made from a sample of the requests.
//!
//! The sketch is Space-Saving (Metwally, Agrawal and El Abbadi, "Efficient computation of frequent and top-k elements in data streams",
//! 2005). It has [`COUNTERS`] counters. A key without one takes over the smallest, with its count, which is then the new key's error. After
//! `n` requests each count exceeds the true number by its error at most, no error exceeds `n / COUNTERS`, and each key with more than
//! `n / COUNTERS` requests has a counter.
//!
//! One request in [`SAMPLE`] is counted, at random distances, so that a regular order of requests does not favour a key.

use std::cell::Cell;
use std::collections::HashMap;
use std::sync::{Mutex, TryLockError};
use std::time::Duration;

use tokio::time::Instant;

use crate::sync::lock;

const COUNTERS: usize = 128;
/// One request in so many is counted, on average.
pub(crate) const SAMPLE: u32 = 256;
/// How long a sketch counts. The last whole window and the present one are reported: the last 30 to 60 seconds.
const WINDOW: Duration = Duration::from_secs(30);

/// The hot keys of a process in the last minute.
#[derive(Debug)]
pub(crate) struct HotKeys(Mutex<Windows>);

#[derive(Debug)]
struct Windows {
    began: Instant,
    present: Sketch,
    last: Sketch,
}

#[derive(Debug, Default)]
struct Sketch(HashMap<Box<str>, CountedKey>);

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct CountedKey {
    pub(crate) count: u64,
    pub(crate) error: u64,
}

thread_local! {
    /// How many requests this thread still skips; `u32::MAX` before its first.
    static SKIPS: Cell<u32> = const { Cell::new(u32::MAX) };
}

impl HotKeys {
    pub(crate) fn new() -> Self {
        Self(Mutex::new(Windows {
            began: Instant::now(),
            present: Sketch::default(),
            last: Sketch::default(),
        }))
    }

    /// Whether this thread's present request is counted.
    #[inline]
    pub(crate) fn samples() -> bool {
        let sampled = SKIPS.try_with(|skips| match skips.get() {
            // The first request of a thread is as likely to be counted as any other.
            skipped @ (0 | u32::MAX) => {
                skips.set(fastrand::u32(..2 * SAMPLE - 1));
                skipped == 0
            }
            left => {
                skips.set(left - 1);
                false
            }
        });
        sampled.unwrap_or(false)
    }

    /// Counts a request for the key with this text, unless another thread is counting.
    #[cold]
    pub(crate) fn count(&self, text: &str) {
        let mut windows = match self.0.try_lock() {
            Ok(windows) => windows,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return,
        };
        windows.turn();
        windows.present.count(text);
    }

    /// The `most` hottest keys of the last minute, the hottest first. Counts are estimates of all requests, not of the sample.
    pub(crate) fn hottest(&self, most: usize) -> Vec<(Box<str>, CountedKey)> {
        let mut windows = lock(&self.0);
        windows.turn();
        let mut sum = windows.last.0.clone();
        for (key, counted) in &windows.present.0 {
            let of_both = sum.entry(key.clone()).or_default();
            of_both.count += counted.count;
            of_both.error += counted.error;
        }
        drop(windows);
        let mut all: Vec<_> = sum.into_iter().collect();
        all.sort_by(|(one, a), (other, b)| b.count.cmp(&a.count).then_with(|| one.cmp(other)));
        all.truncate(most);
        for (_, counted) in &mut all {
            counted.count *= u64::from(SAMPLE);
            counted.error *= u64::from(SAMPLE);
        }
        all
    }
}

impl Windows {
    fn turn(&mut self) {
        let age = self.began.elapsed();
        if age >= WINDOW {
            let ended = std::mem::take(&mut self.present);
            // A window that was not ended in time says nothing about the last minute.
            self.last = if age < 2 * WINDOW { ended } else { Sketch::default() };
            self.began = Instant::now();
        }
    }
}

impl Sketch {
    fn count(&mut self, text: &str) {
        if let Some(counted) = self.0.get_mut(text) {
            counted.count += 1;
            return;
        }
        let mut error = 0;
        if self.0.len() >= COUNTERS {
            let smallest = self.0.iter().min_by_key(|(_, counted)| counted.count);
            if let Some((key, counted)) = smallest.map(|(key, counted)| (key.clone(), *counted)) {
                self.0.remove(&key);
                error = counted.count;
            }
        }
        self.0.insert(text.into(), CountedKey { count: error + 1, error });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The bounds of the first lines, for keys whose frequency falls as 1/rank, in several random orders.
    #[test]
    fn counts_and_errors_keep_their_bounds() {
        for seed in 0..20 {
            let (mut random, mut sketch) = (fastrand::Rng::with_seed(seed), Sketch::default());
            let mut requests: Vec<u32> =
                (1..=2_000).flat_map(|key| vec![key; 4_000 / key as usize]).collect();
            random.shuffle(&mut requests);
            let mut exact = HashMap::<String, u64>::new();
            for key in &requests {
                *exact.entry(key.to_string()).or_default() += 1;
                sketch.count(&key.to_string());
            }
            let most_error = requests.len() as u64 / COUNTERS as u64;
            assert!(sketch.0.len() <= COUNTERS);
            for (key, counted) in &sketch.0 {
                let number = exact[&**key];
                assert!(
                    counted.count >= number && counted.count - counted.error <= number,
                    "{key} {counted:?} {number}"
                );
                assert!(counted.error <= most_error, "{key} {counted:?} {most_error}");
            }
            for (key, number) in exact {
                assert!(
                    number <= most_error || sketch.0.contains_key(&*key),
                    "{key} {number} of {most_error}"
                );
            }
        }
    }

    #[test]
    fn one_request_in_so_many_is_counted() {
        // A thread of its own, with a first count of its own.
        let counted = std::thread::spawn(|| (0..256_000).filter(|_| HotKeys::samples()).count());
        let counted = counted.join().expect("no panic");
        assert!((800..1_250).contains(&counted), "{counted}");
    }

    #[tokio::test(start_paused = true)]
    async fn the_last_minute_is_reported_and_what_is_older_is_forgotten() {
        let hot = HotKeys::new();
        let keys =
            |hot: &HotKeys| hot.hottest(9).into_iter().map(|(key, _)| key.to_string()).collect::<Vec<_>>();
        ["a", "b", "b"].iter().for_each(|key| hot.count(key));
        assert_eq!(keys(&hot), ["b", "a"]);
        assert_eq!(hot.hottest(1)[0].1, CountedKey { count: 512, error: 0 });
        tokio::time::advance(WINDOW).await;
        hot.count("c");
        hot.count("a");
        assert_eq!(keys(&hot), ["a", "b", "c"]);
        tokio::time::advance(WINDOW).await;
        assert_eq!(keys(&hot), ["a", "c"]);
        tokio::time::advance(3 * WINDOW).await;
        assert!(keys(&hot).is_empty());
    }
}
