//! A gate and an exact counter for loaders that run in the test's own process.

use std::future::Future;
use std::panic::Location;
use std::sync::Arc;

use tokio::sync::watch;

use super::PATIENCE;

/// A barrier that a test opens: work that passes through it waits until then.
///
/// Opening is a state, not an event: later work passes at once, so an opening can not be missed.
#[derive(Clone, Debug)]
pub(crate) struct Gate(Arc<watch::Sender<bool>>);

impl Gate {
    pub(crate) fn closed() -> Self {
        Self(Arc::new(watch::Sender::new(false)))
    }

    pub(crate) fn open(&self) {
        self.0.send_replace(true);
    }

    pub(crate) fn close(&self) {
        self.0.send_replace(false);
    }

    pub(crate) async fn pass(&self) {
        self.0.subscribe().wait_for(|open| *open).await.expect("`self` holds the sender");
    }
}

/// Counts starts and ends of some work, exactly.
///
/// ```ignore
/// let (loads, gate) = (Counter::default(), Gate::closed());
/// let load = { let (loads, gate) = (loads.clone(), gate.clone()); move || async move {
///     let _running = loads.start();          // ends when dropped: returned, cancelled or panicked
///     gate.pass().await;
///     Ok::<_, String>(1)
/// }};
/// // ... call it ...
/// loads.reach(1).await;
/// gate.open();
/// assert_eq!(loads.started(), 1);
/// ```
#[derive(Clone, Debug, Default)]
pub(crate) struct Counter(Arc<watch::Sender<Counts>>);

#[derive(Clone, Copy, Debug, Default)]
struct Counts {
    started: usize,
    ended: usize,
    most_at_once: usize,
}

impl Counter {
    /// Counts one start now and one end when the returned value is dropped.
    #[must_use = "dropping it counts the end"]
    pub(crate) fn start(&self) -> Running {
        self.0.send_modify(|counts| {
            counts.started += 1;
            counts.most_at_once = counts.most_at_once.max(counts.started - counts.ended);
        });
        Running(self.clone())
    }

    pub(crate) fn started(&self) -> usize {
        self.0.borrow().started
    }

    pub(crate) fn ended(&self) -> usize {
        self.0.borrow().ended
    }

    pub(crate) fn running(&self) -> usize {
        let counts = *self.0.borrow();
        counts.started - counts.ended
    }

    /// The largest number that ran at the same time.
    pub(crate) fn most_at_once(&self) -> usize {
        self.0.borrow().most_at_once
    }

    /// Waits until `n` have started.
    #[track_caller]
    pub(crate) fn reach(&self, n: usize) -> impl Future<Output = ()> + Send + '_ {
        self.until(format!("{n} starts"), move |counts| counts.started >= n)
    }

    /// Waits until everything that started has ended.
    #[track_caller]
    pub(crate) fn idle(&self) -> impl Future<Output = ()> + Send + '_ {
        self.until("the end of all that started".to_owned(), |counts| counts.started == counts.ended)
    }

    #[track_caller]
    fn until(
        &self,
        what: String,
        mut done: impl FnMut(&Counts) -> bool + Send,
    ) -> impl Future<Output = ()> + Send {
        let caller = Location::caller();
        let mut counts = self.0.subscribe();
        async move {
            let waited = tokio::time::timeout(PATIENCE, counts.wait_for(|counts| done(counts))).await.is_ok();
            assert!(waited, "{caller}: waited for {what} in vain, have {:?}", *counts.borrow());
        }
    }
}

/// One start; dropping this counts its end.
#[derive(Debug)]
pub(crate) struct Running(Counter);

impl Drop for Running {
    fn drop(&mut self) {
        self.0.0.send_modify(|counts| counts.ended += 1);
    }
}
