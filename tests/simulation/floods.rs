//! I11, second half: warnings do not flood the operators' logs.
//!
//! A node logs a warning that may repeat with each load or command at most once a minute ([`Seldom`](crate::observe)). Warnings that
//! are logged once per outage belong to locks and HTTP, which are not simulated. So one bound holds for each line of code that
//! warns, whatever goes wrong.

use std::cell::RefCell;
use std::sync::OnceLock;
use std::time::Duration;

use tracing::dispatcher::{self, Dispatch};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

/// The interval in which each node may log the same warning once.
const EACH: Duration = Duration::from_secs(60);

thread_local! {
    /// How many warnings each line of code has logged in this thread's run.
    static WARNINGS: RefCell<Vec<(&'static Metadata<'static>, usize)>> = const { RefCell::new(Vec::new()) };
}

/// Counts warnings and errors. It enables no spans, so they cost nothing.
struct Counter;

impl Subscriber for Counter {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.is_event() && *metadata.level() <= Level::WARN
    }

    fn max_level_hint(&self) -> Option<tracing::level_filters::LevelFilter> {
        Some(tracing::level_filters::LevelFilter::WARN)
    }

    fn event(&self, event: &Event<'_>) {
        let from = event.metadata();
        WARNINGS.with_borrow_mut(|warnings| {
            match warnings.iter_mut().find(|(known, _)| known.callsite() == from.callsite()) {
                Some((_, count)) => *count += 1,
                None => warnings.push((from, 1)),
            }
        });
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

/// Runs `work` and counts its warnings.
pub(super) fn counting<T>(work: impl FnOnce() -> T) -> T {
    // One dispatcher for all threads and runs: each new one makes `tracing` query every call site again.
    static COUNTER: OnceLock<Dispatch> = OnceLock::new();
    WARNINGS.take();
    dispatcher::with_default(COUNTER.get_or_init(|| Dispatch::new(Counter)), work)
}

/// The warnings of this thread's run that exceed what `nodes` nodes may log within `lasted`.
pub(super) fn excess(nodes: usize, lasted: Duration) -> Vec<String> {
    let most = nodes * (1 + (lasted.as_secs() / EACH.as_secs()) as usize);
    let floods = WARNINGS.take().into_iter().filter(|(_, count)| *count > most);
    floods
        .map(|(from, count)| {
            let (file, line) = (from.file().unwrap_or_default(), from.line().unwrap_or_default());
            format!(
                "I11: {count} times {} from {file}:{line} in {lasted:?}, more than {most} of {nodes} nodes",
                from.level()
            )
        })
        .collect()
}
