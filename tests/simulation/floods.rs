//! I11, its second half: what operators are warned of does not flood their logs.
//!
//! Whatever happens again with each load or command is warned of once a minute by each node ([`Seldom`](crate::observe)). What is
//! warned of once per outage is the locks' and HTTP's, which are not simulated. So there is one bound for each place in the code
//! that warns, whatever goes wrong.

use std::cell::RefCell;
use std::sync::OnceLock;
use std::time::Duration;

use tracing::dispatcher::{self, Dispatch};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

/// How often each node may warn of the same.
const EACH: Duration = Duration::from_secs(60);

thread_local! {
    /// How often what was warned of on this thread while it simulated.
    static WARNINGS: RefCell<Vec<(&'static Metadata<'static>, usize)>> = const { RefCell::new(Vec::new()) };
}

/// Listens to warnings and errors, and to nothing else: spans cost nothing.
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
    // One for all threads and runs: each new one has every place in the code that logs asked again.
    static COUNTER: OnceLock<Dispatch> = OnceLock::new();
    WARNINGS.take();
    dispatcher::with_default(COUNTER.get_or_init(|| Dispatch::new(Counter)), work)
}

/// What this thread's run has warned of more often than so many nodes may in that time.
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
