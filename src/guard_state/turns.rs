//! Bounds the commands that callers and flights send to a server at once.
//!
//! A server answers commands one after the other. If thousands of callers of different keys came together without turns, each would
//! wait for the commands of all others within its own budget, time out, and load without the lease. So a single caller's look-up waits
//! for a turn, and so does a flight; the time limit of a command begins with its turn. A turn lasts for commands of at most
//! `command_timeout` each, and never while another load is awaited: turns do not wait for each other in a circle. If the server hangs, its connection is closed
//! after the time limits of two commands; then commands fail at once, and so do the callers that wait for a turn.

use std::pin::pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;

use crate::key::Key;
use crate::store::Store;
use crate::sync::lock;

/// How many look-ups run at once without turns, to all servers. Callers of one key share a look-up.
const FREE_LOOK_UPS: usize = 128;

/// How many further look-ups run at once to one server, each with a turn.
const LOOK_UPS: Width = Width { least: 128, per_millisecond: 128.0, most: 16_384 };

/// How many flights of single callers send commands at once. A hit of another caller waits behind that many commands of each process; so
/// many already occupy a near server.
const SINGLE: Width = Width { least: 2, per_millisecond: 4.0, most: 512 };

/// How many flights of calls for many keys send commands at once.
const BATCHED: Width = Width { least: 1, per_millisecond: 4.0, most: 512 };

/// How many servers of a cluster have their own turns. If there are more servers, some share turns, and a slow one delays the others.
const SERVERS: usize = 16;

/// After this wait for a turn the round trip is measured again: it may have become longer.
const LONG_WAIT: Duration = Duration::from_secs(1);

/// How many turns there are at once: `per_millisecond` of the round trip, within the bounds, because it takes more commands to keep a
/// distant server busy. If `per_millisecond` were larger, fewer processes would suffice to fill the server's queue, whose delay looks
/// like a longer round trip.
#[derive(Clone, Copy, Debug)]
struct Width {
    least: usize,
    per_millisecond: f64,
    most: usize,
}

/// The turns of one guard, for each server.
#[derive(Debug, Default)]
pub(crate) struct Turns {
    /// The number of running look-ups without turns.
    free_look_ups: AtomicUsize,
    servers: [ServerTurns; SERVERS],
}

#[derive(Debug)]
struct ServerTurns {
    look_ups: Queue,
    single: Queue,
    batched: Queue,
}

/// Turns in the order in which they are requested.
#[derive(Debug)]
struct Queue {
    permits: Arc<Semaphore>,
    size: Mutex<usize>,
    width: Width,
}

/// A caller or flight may send commands until this is dropped.
pub(crate) type Turn = OwnedSemaphorePermit;

/// A look-up that need not wait may send its commands until this is dropped.
#[derive(Debug)]
pub(crate) struct FreeTurn<'a>(&'a AtomicUsize);

impl Drop for FreeTurn<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Default for ServerTurns {
    fn default() -> Self {
        let [look_ups, single, batched] = [LOOK_UPS, SINGLE, BATCHED].map(Queue::new);
        Self { look_ups, single, batched }
    }
}

impl Queue {
    fn new(width: Width) -> Self {
        Self { permits: Arc::new(Semaphore::new(width.least)), size: Mutex::new(width.least), width }
    }

    fn resize(&self, round_trip: Duration) {
        let Width { least, per_millisecond, most } = self.width;
        let size = (round_trip.as_secs_f64() * 1e3 * per_millisecond) as usize;
        let size = size.clamp(least, most);
        let mut present = lock(&self.size);
        if size > *present {
            self.permits.add_permits(size - *present);
            *present = size;
        } else {
            // Turns that are taken at present cannot be removed yet.
            *present -= self.permits.forget_permits(*present - size);
        }
    }
}

impl Turns {
    /// Lets a look-up begin without a turn if few enough run. All hits in the store pass here: one counter costs less than a turn.
    pub(crate) fn look_up_at_once(&self) -> Option<FreeTurn<'_>> {
        let turn = FreeTurn(&self.free_look_ups);
        (self.free_look_ups.fetch_add(1, Ordering::Relaxed) < FREE_LOOK_UPS).then_some(turn)
    }

    /// Waits for the turn of a look-up of this key; otherwise as [`flight`](Self::flight).
    pub(crate) async fn look_up(&self, store: &Store, key: &Key) -> Option<Turn> {
        self.take(store, key, |server| &server.look_ups).await
    }

    /// Waits for the turn of a flight of this key. `None` where commands fail at once.
    ///
    /// # Cancel safety
    ///
    /// Safe; the caller loses its position in the queue.
    pub(crate) async fn flight(&self, store: &Store, key: &Key, is_batched: bool) -> Option<Turn> {
        self.take(store, key, |server| if is_batched { &server.batched } else { &server.single }).await
    }

    async fn take(&self, store: &Store, key: &Key, queue: impl Fn(&ServerTurns) -> &Queue) -> Option<Turn> {
        if store.is_down(key.name()) {
            return None;
        }
        let mut server = store.server_of(key.name());
        let queue = queue(self.servers.get(server.number % SERVERS)?);
        let mut turn = pin!(Arc::clone(&queue.permits).acquire_owned());
        loop {
            queue.resize(server.round_trip);
            match timeout(LONG_WAIT, &mut turn).await {
                // It fails only if the semaphore is closed, which is never done.
                Ok(turn) => return turn.ok(),
                Err(_) => store.suspect(),
            }
            server = store.server_of(key.name());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_flights_send_at_once_to_a_distant_server() {
        let queue = Queue::new(BATCHED);
        let Width { least, most, .. } = BATCHED;
        for (micros, size) in [(0, least), (200, least), (20_000, 80), (400_000, most), (1_000, 4)] {
            queue.resize(Duration::from_micros(micros));
            assert_eq!(queue.permits.available_permits(), size, "{micros}");
        }
    }

    #[test]
    fn a_queue_becomes_smaller_as_turns_end() {
        let queue = Queue::new(BATCHED);
        queue.resize(Duration::from_secs(1));
        let take = |_| Arc::clone(&queue.permits).try_acquire_owned().expect("free");
        let turns: Vec<_> = (0..BATCHED.most).map(take).collect();
        queue.resize(Duration::ZERO);
        drop(turns);
        queue.resize(Duration::ZERO);
        assert_eq!(queue.permits.available_permits(), BATCHED.least);
    }
}
