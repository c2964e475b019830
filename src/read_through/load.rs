//! One load of a flight: its turn, the loader in a task of its own, the lease kept meanwhile. Step 6.

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

/// A flight's task, before it runs.
pub(crate) struct Lead {
    pub(crate) node: Arc<Node>,
    pub(crate) policy: Arc<Policy>,
    pub(crate) flight: FlightKey,
    pub(crate) leader: Leader,
    /// What the first caller read and will not serve as it is.
    pub(crate) seen: Option<Box<Seen>>,
    /// What is left of the first caller's budget.
    pub(crate) budget: Budget,
    /// The loads inside which the first caller waits for this one.
    pub(crate) within: Option<Arc<Loading>>,
    /// The seat of a caller that does not wait: held, because a loader leaves with its seat.
    pub(crate) _unattended: Option<Follower>,
}

/// How one load ended.
pub(super) enum Run {
    /// After so long.
    Loaded(Box<Loaded>, Duration),
    TimedOut,
    /// It panicked, or its runtime dropped it.
    Vanished(Failure),
}

/// When a load began, and under which tags.
pub(crate) struct LoadStart {
    pub(super) asked: Question,
    /// The policy's tags with their ids at that moment; `None` if these can not be read, and then nothing may be stored, because
    /// no process could tell whether it was invalidated.
    pub(super) tagged: Option<Vec<Tagged>>,
}

impl LoadStart {
    /// Of a load that does not begin.
    pub(crate) fn none() -> Self {
        Self { asked: Question::now(), tagged: Some(Vec::new()) }
    }
}

impl Lead {
    /// Runs one loader in a task of its own, so that neither its panic nor its blocking touches
    /// the lease, and keeps the lease meanwhile. `lease` is `None` afterwards if it was lost or given away.
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

    /// Waits for the load's turn, where the policy bounds how many run at once.
    pub(super) async fn admit(&self, lease: &mut Option<Lease>) -> Result<Option<(Permit, Turn)>, Failure> {
        let Self { node, policy, flight, .. } = self;
        let Some(limit) = policy.max_concurrent_loads else { return Ok(None) };
        let turn = node.permit_turn(limit);
        if self.holds(&turn) {
            return Ok(None);
        }
        // Bounded by itself; the margin is for its last command.
        let end = Instant::now() + policy.permit_timeout + policy.command_timeout * 4;
        let (nobody, admit) = (watch::Sender::new(false), bulkhead::admit(node, policy, limit, &flight.key));
        let permit = self.keeping(lease, end, &nobody, admit).await.transpose()?.flatten();
        Ok(permit.map(|permit| (permit, turn)))
    }

    /// Keeps the lease while `work` goes on; `None` if that takes until `end`. The lease is `None` afterwards
    /// if it was lost or given away, and `losing` is told of the first.
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
                    // Who came before gets the value all the same. Later callers must not: it may be older than an
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
                    // The process is about to end: somebody else had better load this.
                    self.leader.detach();
                    if let Some(lease) = lease.take() {
                        // Beside what goes on here: that has a time limit of its own, and callers who wait for it. The shutdown
                        // waits until the lease is gone.
                        tokio::spawn(lease.hand_over(0));
                    }
                }
            }
        }
    }

    /// Whether the first caller has such a turn already, as it loads something else for which it waits for this.
    pub(super) fn holds(&self, turn: &Turn) -> bool {
        let holds = |loading: &Arc<Loading>| loading.holds(turn);
        self.within.as_ref().is_some_and(holds) && self.leader.is_awaited_by_first()
    }
}

/// What the flight comes to was current when the store was asked this, and may have been changed since. A caller that came later may have seen
/// the change, and asks again. It does so once: the next load begins later than all callers that ask again have come.
pub(crate) fn let_go_since(leader: &Leader, current: Question) {
    leader.leave_if(&Ending::Invalidated, |loader| loader.came.is_after(current));
}
