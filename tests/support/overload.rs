//! An origin that slows down under load: the running loads share its capacity; its throughput is greatest with 25 of them at once, and
//! falls beyond (Gunther's universal scalability law).

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{Notify, oneshot};
use tokio::time::{Instant, sleep_until};

/// The number of loads at once at which the origin's throughput is greatest.
pub(crate) const KNEE: u32 = 25;

/// The origin. All clones share its capacity.
#[derive(Clone)]
pub(crate) struct Origin(Arc<(Mutex<Shared>, Notify)>);

struct Shared {
    /// The work that each running load has received since the origin was made, in units of a mean load.
    served: f64,
    at: Option<Instant>,
    running: BTreeMap<(u64, u64), oneshot::Sender<()>>,
    begun: u64,
    most_at_once: usize,
    /// The origin's throughput at the knee, in loads per second.
    best: f64,
}

impl Shared {
    /// The throughput with the present number of loads, in loads per second.
    fn throughput(&self) -> f64 {
        let shape = |n: f64| {
            let crosstalk = 0.98 / f64::from(KNEE * KNEE);
            n / (1.0 + 0.02 * (n - 1.0) + crosstalk * n * (n - 1.0))
        };
        self.best * shape(self.running.len() as f64) / shape(f64::from(KNEE))
    }

    fn advance(&mut self) {
        let now = Instant::now();
        let span = now - self.at.replace(now).unwrap_or(now);
        if !self.running.is_empty() {
            self.served += span.as_secs_f64() * self.throughput() / self.running.len() as f64;
        }
    }

    /// When the next load is done, unless a load begins or the throughput changes before.
    fn next_end(&self) -> Option<Instant> {
        let ((end, _), _) = self.running.first_key_value()?;
        let left = (*end as f64 / 1e9 - self.served).max(0.0);
        Some(Instant::now() + Duration::from_secs_f64(left * self.running.len() as f64 / self.throughput()))
    }
}

impl Origin {
    /// An origin that does `best` loads per second at its knee.
    pub(crate) fn new(best: f64) -> Self {
        let running = BTreeMap::new();
        let shared = Shared { served: 0.0, at: None, running, begun: 0, most_at_once: 0, best };
        let origin = Self(Arc::new((Mutex::new(shared), Notify::new())));
        let shared = origin.clone();
        tokio::spawn(async move {
            loop {
                let next = shared.state().next_end();
                tokio::select! {
                    () = sleep_until(next.unwrap_or_else(|| Instant::now() + Duration::from_secs(3_600))) => {}
                    () = shared.0.1.notified() => {}
                }
                let mut state = shared.state();
                state.advance();
                while let Some(first) = state.running.first_entry()
                    && first.key().0 as f64 / 1e9 <= state.served + 1e-9
                {
                    let _ = state.running.pop_first().map(|(_, done)| done.send(()));
                }
            }
        });
        origin
    }

    fn state(&self) -> MutexGuard<'_, Shared> {
        self.0.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the throughput at the knee, for example at the beginning and at the end of a brown-out.
    pub(crate) fn set_best(&self, best: f64) {
        let mut state = self.state();
        state.advance();
        state.best = best;
        drop(state);
        self.0.1.notify_one();
    }

    /// The most loads that ran at once since the last call.
    pub(crate) fn take_most_at_once(&self) -> usize {
        let state = &mut *self.state();
        std::mem::replace(&mut state.most_at_once, state.running.len())
    }

    /// Runs a load of random length, with a mean of `times` mean loads. It goes on if this future is dropped.
    pub(crate) async fn load(&self, times: f64) {
        let done = {
            let mut state = self.state();
            state.advance();
            state.begun += 1;
            // Exponential, as most origins' times are.
            let work = -(1.0 - fastrand::f64()).ln() * times;
            let (sender, done) = oneshot::channel();
            let key = (((state.served + work) * 1e9) as u64, state.begun);
            state.running.insert(key, sender);
            state.most_at_once = state.most_at_once.max(state.running.len());
            done
        };
        self.0.1.notify_one();
        let _ = done.await;
    }
}
