//! One load of a flight: waits for a permit, runs the loader in a separate task, and renews the lease meanwhile. Step 6.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};
use tracing::Instrument as _;

use super::bulkhead;
use super::lease::{Event, Lease};
use crate::error::Failure;
use crate::flight::order::Question;
use crate::guard_state::{Follower, Leader, Node, Seen};
use crate::key::flight::FlightKey;
use crate::loader::nesting::{Loading, Turn};
use crate::loader::{AbortOnDrop, Given, Loaded, Loader, Mode, describe};
use crate::lock::Permit;
use crate::observe::{self, Count};
use crate::policy::Policy;
use crate::policy::budget::Budget;
use crate::value::outcome::Ending;
use crate::value::tags::Tagged;

/// The task that runs steps 4 to 7 of one flight.
pub(crate) struct Lead {
    pub(crate) node: Arc<Node>,
    pub(crate) policy: Arc<Policy>,
    pub(crate) flight: FlightKey,
    pub(crate) leader: Leader,
    /// The entry that the first caller read and will not serve as it is.
    pub(crate) seen: Option<Box<Seen>>,
    /// The rest of the first caller's budget.
    pub(crate) budget: Budget,
    /// The chain of loads inside which the first caller waits for this one.
    pub(crate) within: Option<Arc<Loading>>,
    /// The seat of a caller that does not wait. Held here, because dropping a seat drops its loader.
    pub(crate) _unattended: Option<Follower>,
}

/// How one load ended.
pub(super) enum Run {
    /// The loader returned, after this duration.
    Loaded(Box<Loaded>, Duration),
    TimedOut,
    /// The loader panicked, or its runtime dropped it.
    Vanished(Failure),
}

/// When a load began, and the tags' ids at that moment.
pub(crate) struct LoadStart {
    pub(super) asked: Question,
    /// The policy's tags with their ids. `None` if the store did not answer; then nothing may be stored, because no process
    /// could tell whether it was invalidated.
    pub(super) tagged: Option<Vec<Tagged>>,
}

impl LoadStart {
    /// For a load that does not begin.
    pub(crate) fn none() -> Self {
        Self { asked: Question::now(), tagged: Some(Vec::new()) }
    }
}

impl Lead {
    /// Runs one loader in a separate task, so that neither its panic nor its blocking affects the lease, and renews the lease
    /// meanwhile. `lease` is `None` afterwards if it was lost or handed over.
    pub(super) async fn load(&self, loader: Loader, turn: Option<Turn>, lease: &mut Option<Lease>) -> Run {
        let Loader { run, span, within, .. } = loader;
        let end = Instant::now() + self.policy.load_timeout;
        self.node.count(Count::loads);
        let mode = if lease.is_some() { Mode::Leased } else { Mode::Unleased };
        let previous = self.seen.as_ref().and_then(|seen| seen.value.clone());
        let (losing, lost) = watch::channel(false);
        let announcer = Some(self.leader.announcer());
        let given = Given { mode, previous, deadline: end, lost, announcer };
        let place = self.node.store.place();
        let load =
            Loading::scope_with(place, &self.flight.key, turn, within, async move { run(given).await });
        let mut load =
            AbortOnDrop(tokio::spawn(load.instrument(observe::load_span(&span, &self.flight.key))));
        let (loaded, took) = observe::timed(self.keeping(lease, end, &losing, &mut load.0)).await;
        match loaded {
            Some(Ok(loaded)) => Run::Loaded(Box::new(loaded), took),
            Some(Err(error)) => Run::Vanished(describe(error)),
            None => Run::TimedOut,
        }
    }

    /// Waits for a permit, if the policy bounds concurrent loads.
    pub(super) async fn admit(&self, lease: &mut Option<Lease>) -> Result<Option<(Permit, Turn)>, Failure> {
        let Self { node, policy, flight, .. } = self;
        let Some(limit) = policy.max_concurrent_loads else { return Ok(None) };
        let turn = node.permit_turn(limit);
        if self.holds(&turn) {
            return Ok(None);
        }
        // `admit` has its own timeout; the margin is for its last command.
        let end = Instant::now() + policy.permit_timeout + policy.command_timeout * 4;
        let (nobody, admit) = (watch::Sender::new(false), bulkhead::admit(node, policy, limit, &flight.key));
        let permit = self.keeping(lease, end, &nobody, admit).await.transpose()?.flatten();
        Ok(permit.map(|permit| (permit, turn)))
    }

    /// Renews the lease while `work` runs; returns `None` if `work` is not done at `end`. `lease` is `None` afterwards if it was
    /// lost or handed over; only a loss is sent on `losing`.
    async fn keeping<T>(
        &self,
        lease: &mut Option<Lease>,
        end: Instant,
        losing: &watch::Sender<bool>,
        work: impl Future<Output = T>,
    ) -> Option<T> {
        tokio::pin!(work);
        let mut in_doubt = false;
        loop {
            let kept = async {
                match &*lease {
                    Some(lease) => lease.keep(end, in_doubt).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                biased;
                done = &mut work => return Some(done),
                () = sleep_until(end) => return None,
                event = kept => {
                    // Callers that joined before still get the value. Later callers must not: it may be older than an
                    // invalidation.
                    self.leader.detach();
                    in_doubt = event == Event::Invalidated;
                    if event == Event::Lost {
                        self.node.count(Count::leases_lost);
                        if let Some(lost) = lease.take() {
                            let_go_since(&self.leader, lost.confirmed());
                        }
                        losing.send_replace(true);
                    }
                }
                () = self.node.leaving(), if lease.is_some() => {
                    // The process is about to end: another process should load the key.
                    self.leader.detach();
                    if let Some(lease) = lease.take() {
                        // Spawned, because `work` goes on: it has its own time limit, and callers wait for it. The shutdown waits
                        // until the lease is gone.
                        tokio::spawn(lease.hand_over(0));
                    }
                }
            }
        }
    }

    /// Whether the first caller waits for this load inside another load that already holds this permit.
    pub(super) fn holds(&self, turn: &Turn) -> bool {
        let holds = |loading: &Arc<Loading>| loading.holds(turn);
        self.within.as_ref().is_some_and(holds) && self.leader.is_awaited_by_first()
    }
}

/// Makes the callers that came after `current` join again. The flight's outcome was current at that moment and may have changed
/// since, and such a caller may know of the change. It joins again only once: the next load begins after its arrival.
pub(crate) fn let_go_since(leader: &Leader, current: Question) {
    leader.leave_if(&Ending::Invalidated, |loader| loader.came.is_after(current));
}
