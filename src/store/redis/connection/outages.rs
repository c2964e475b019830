//! The outages of one node's connections: how often, for how long, and how many loads went without the store meanwhile.

use std::sync::atomic::{AtomicU64, Ordering};

use tokio::time::Instant;

use crate::observe::log;

/// The outages of all connections for commands of one node.
#[derive(Debug, Default)]
pub(crate) struct Outages {
    begun: AtomicU64,
    loads: AtomicU64,
}

impl Outages {
    /// How often a connection was lost, or could not be opened.
    pub(crate) fn begun(&self) -> u64 {
        self.begun.load(Ordering::Relaxed)
    }

    /// Counts a load that goes without the store.
    pub(crate) fn load(&self) {
        self.loads.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts that a connection is gone; begins an outage unless one goes on. A connection that breaks at once does not end an
    /// outage.
    pub(super) fn begin(&self, outage: &mut Option<Outage>) {
        self.begun.fetch_add(1, Ordering::Relaxed);
        let began = || Outage { since: Instant::now(), loads_before: self.loads.load(Ordering::Relaxed) };
        outage.get_or_insert_with(began);
    }
}

/// An outage of one connection.
#[derive(Debug)]
pub(super) struct Outage {
    since: Instant,
    loads_before: u64,
}

impl Outage {
    /// Logs that the connection that was opened at `back` has ended the outage.
    pub(super) fn tell_end(&self, outages: &Outages, back: Instant, node: Option<String>) {
        let loads = outages.loads.load(Ordering::Relaxed).saturating_sub(self.loads_before);
        let took = back.saturating_duration_since(self.since).as_secs_f64();
        tracing::info!(target: log::REDIS, node, "redis is back after {took:.1} s; {loads} loads went without it");
    }
}
