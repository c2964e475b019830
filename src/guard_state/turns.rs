//! Bounds the commands that flights send at once.
//!
//! A server answers commands one after the other. Thousands of flights that begin together would each count the time of all the others
//! against its own budget, time out, and load without the lease. So a flight waits for a turn, and its budget begins with it. A turn
//! lasts for commands that have time limits, and never while another load is awaited: turns do not wait for each other in a circle.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;

use super::GuardState;
use crate::key::Key;
use crate::sync::lock;

/// How many flights of single callers send at once, at least: more than a server needs to be busy.
const SINGLE: usize = 64;

/// How many flights of calls for many keys send at once, at least. Hits of other callers wait behind so many commands of each process.
const BATCHED: usize = 8;

/// How many flights send at once for each millisecond of the round trip, as a distant server is busy with no fewer.
const PER_MILLISECOND: f64 = 8.0;

/// How many flights send at once, at most.
const MOST: usize = 256;

/// The turns of one guard's flights.
#[derive(Debug)]
pub(super) struct Turns {
    single: Queue,
    batched: Queue,
    /// Counts the turns with an answer.
    answers: Arc<AtomicU64>,
}

/// Flights in the order in which they came.
#[derive(Debug)]
struct Queue {
    permits: Arc<Semaphore>,
    size: Mutex<usize>,
    least: usize,
}

/// A flight may send commands until this is dropped.
#[derive(Debug)]
pub(crate) struct Turn {
    answers: Arc<AtomicU64>,
    _permit: OwnedSemaphorePermit,
}

/// No flight's command was answered for the time of one.
#[derive(Debug)]
pub(crate) struct Stalled;

impl Default for Turns {
    fn default() -> Self {
        Self { single: Queue::new(SINGLE), batched: Queue::new(BATCHED), answers: Arc::default() }
    }
}

impl Turn {
    /// A command of this turn was answered.
    pub(crate) fn answered(&self) {
        self.answers.fetch_add(1, Ordering::Relaxed);
    }
}

impl Queue {
    fn new(least: usize) -> Self {
        Self { permits: Arc::new(Semaphore::new(least)), size: Mutex::new(least), least }
    }

    fn resize(&self, round_trip: Duration) {
        let size = round_trip.as_secs_f64() * 1e3 * PER_MILLISECOND;
        let size = (size as usize).clamp(self.least, MOST);
        let mut present = lock(&self.size);
        if size > *present {
            self.permits.add_permits(size - *present);
            *present = size;
        } else {
            // Those that flights have at present stay.
            *present -= self.permits.forget_permits(*present - size);
        }
    }
}

impl GuardState {
    /// Waits for the turn of a flight of this key. `None` where commands fail at once.
    ///
    /// # Errors
    ///
    /// If no command of the others is answered `within` the time of one.
    ///
    /// # Cancel safety
    ///
    /// Safe; the place in the queue is lost.
    pub(crate) async fn turn(
        &self,
        key: &Key,
        is_batched: bool,
        within: Duration,
    ) -> Result<Option<Turn>, Stalled> {
        if self.store.is_down(key.name()) {
            return Ok(None);
        }
        let Turns { single, batched, answers } = &self.turns;
        let queue = if is_batched { batched } else { single };
        queue.resize(self.store.round_trip());
        let mut permit = std::pin::pin!(Arc::clone(&queue.permits).acquire_owned());
        loop {
            let before = answers.load(Ordering::Relaxed);
            match timeout(within, permit.as_mut()).await {
                Ok(Ok(permit)) => return Ok(Some(Turn { answers: Arc::clone(answers), _permit: permit })),
                // The semaphore is never closed.
                Ok(Err(_closed)) => return Ok(None),
                Err(_) if answers.load(Ordering::Relaxed) == before => return Err(Stalled),
                Err(_) => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_flights_send_at_once_to_a_distant_server() {
        let queue = Queue::new(BATCHED);
        for (micros, size) in [(0, BATCHED), (200, BATCHED), (20_000, 160), (400_000, MOST), (1_000, BATCHED)]
        {
            queue.resize(Duration::from_micros(micros));
            assert_eq!(queue.permits.available_permits(), size, "{micros}");
        }
    }

    #[test]
    fn a_queue_becomes_smaller_as_turns_end() {
        let queue = Queue::new(BATCHED);
        queue.resize(Duration::from_secs(1));
        let turns: Vec<_> = (0..MOST).map(|_| Arc::clone(&queue.permits).try_acquire_owned()).collect();
        queue.resize(Duration::ZERO);
        drop(turns);
        queue.resize(Duration::ZERO);
        assert_eq!(queue.permits.available_permits(), BATCHED);
    }
}
