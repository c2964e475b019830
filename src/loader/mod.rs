//! A caller's work: what it is given, and what it comes to for those who share it. Knows no Redis, no HTTP.

pub(crate) mod nesting;

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::watch;
use tokio::task::{JoinError, JoinHandle};
use tokio::time::Instant;

use crate::error::Failure;
use crate::failure_text::panic_text;
use crate::flight;
use crate::flight::order::Arrival;
use crate::value::entry::{Encoding, Entry};
use crate::value::freshness::Lifetimes;
use crate::value::outcome::Ending;
use crate::value::tags::Tagged;
use nesting::{Loading, Turn};

type Run = Box<dyn FnOnce(Given) -> Pin<Box<dyn Future<Output = Loaded> + Send>> + Send>;

/// Tells those who wait for a load that its value is on its way.
pub(crate) type Announcer = flight::Announcer<Loader, Ending>;

/// A caller's work, boxed at the door so that everything behind it is compiled once.
pub(crate) struct Loader {
    pub(crate) run: Run,
    /// The caller's span: the load belongs to the request that began it.
    pub(crate) span: tracing::Span,
    /// The loads inside which the caller runs.
    pub(crate) within: Option<Arc<Loading>>,
    /// When the caller came, however often it asks again.
    pub(crate) came: Arrival,
    /// Since when the caller waits on a flight.
    pub(crate) since: Option<Instant>,
}

/// For whom a loader runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    /// For everyone on the flight, which holds the lease: what may be stored will be.
    Leased,
    /// For everyone on the flight, which goes without the lease: nothing will be stored.
    Unleased,
    /// For its own caller only.
    Alone,
}

/// What a loader is given.
#[derive(Debug)]
pub(crate) struct Given {
    pub(crate) mode: Mode,
    /// The value that is to be loaded anew, where the store still has it.
    pub(crate) previous: Option<Entry>,
    /// When the load is ended.
    pub(crate) deadline: Instant,
    /// Becomes true when the lease is lost.
    pub(crate) lost: watch::Receiver<bool>,
    /// Tells those who wait for the load that its value is on its way.
    #[cfg_attr(not(feature = "http"), expect(dead_code, reason = "of HTTP responses"))]
    pub(crate) announcer: Option<Announcer>,
}

impl Given {
    /// For a load of one caller's own.
    pub(crate) fn alone(load_timeout: Duration) -> Self {
        // There is no lease to lose.
        let lost = watch::channel(false).1;
        let deadline = Instant::now() + load_timeout;
        Self { mode: Mode::Alone, previous: None, deadline, lost, announcer: None }
    }
}

/// What a loader came to.
pub(crate) struct Loaded {
    pub(crate) result: LoadResult,
    /// What waits until the others were told, or until the caller's budget for that is used up: the end of
    /// the client's response, or its error.
    pub(crate) settled: Option<Box<dyn FnOnce() + Send>>,
}

impl Loaded {
    /// For a load that nobody shares, or whose own caller waits for nobody.
    pub(crate) fn settle(self) -> LoadResult {
        if let Some(settled) = self.settled {
            settled();
        }
        self.result
    }
}

/// Whether it is left in the store, for a while, that nobody need queue for a resource.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mark {
    No,
    /// If nothing is there that others are served.
    IfUnserved,
    /// Over whatever the load was to replace, which is not to be used again.
    Over,
}

/// What a loader's result means to those who share it.
pub(crate) enum LoadResult {
    /// A value. With no lifetime at all it is shared with the waiting wave only; other processes are then
    /// given `brief` instead, if there is one.
    Value {
        encoding: Encoding,
        payload: Bytes,
        lifetimes: Lifetimes,
        /// As the entry's.
        validator: Bytes,
        /// What it is invalidated under besides the policy's tags.
        tags: Vec<Tagged>,
        brief: Option<Bytes>,
    },
    /// One caller's own: nobody else may have it.
    Uncacheable { mark: Mark },
    /// Nothing.
    Failed(Failure),
    /// Its own caller's answer, which is none to what the others ask: one of them loads next.
    #[cfg_attr(not(feature = "http"), expect(dead_code, reason = "of HTTP requests"))]
    Aside,
}

impl From<LoadResult> for Loaded {
    fn from(result: LoadResult) -> Self {
        Self { result, settled: None }
    }
}

impl Loader {
    /// Whether its caller runs inside a load that holds this turn.
    pub(crate) fn is_within(&self, turn: &Turn) -> bool {
        self.within.as_ref().is_some_and(|outer| outer.holds(turn))
    }

    /// Boxes a caller's work; it keeps the caller's span, and what the caller is a part of.
    pub(crate) fn new<F, Fut>(run: F) -> Self
    where
        F: FnOnce(Given) -> Fut + Send + 'static,
        Fut: Future<Output = Loaded> + Send + 'static,
    {
        Self {
            run: Box::new(move |given| Box::pin(run(given))),
            span: tracing::Span::current(),
            within: Loading::current(),
            came: Arrival::now(),
            since: None,
        }
    }
}

/// What a load's task left behind when it ended without a result.
pub(crate) fn describe(error: JoinError) -> Failure {
    match error.try_into_panic() {
        Ok(panic) => Failure::Panicked(panic_text(&*panic)),
        Err(_) => Failure::vanished(),
    }
}

/// A spawned load that ends with the flight that waits for it.
pub(crate) struct AbortOnDrop(pub(crate) JoinHandle<Loaded>);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}
