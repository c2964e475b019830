//! The task of one flight: contend for the lease, load, end. Steps 4 to 7.
//!
//! It belongs to no caller. Whoever leaves, the leader's caller included, leaves a seat; the
//! task goes on, because the work is paid for and the next request wants the value.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::task::{JoinError, JoinHandle};
use tokio::time::{Instant, sleep_until, timeout};
use tracing::Instrument as _;

use crate::ending::Ending;
use crate::entry::{Encoding, Entry, Kind};
use crate::error::{Error, Failure};
use crate::key::Key;
use crate::lease::{Contended, Contender, Event, Lease, contend};
use crate::node::{Budget, FlightKey, Lane, Leader, LoadResult, Loaded, Loader, Loading, Mode, Node};
use crate::observe::{self, Count};
use crate::policy::{OnStoreDown, Policy};

/// How often a vanished load is taken over in one wave before the wave is told.
const MOST_HOPS: u8 = 3;
/// How long nobody queues for a resource that was found uncacheable.
const MARKER_FOR: Duration = Duration::from_secs(10);

/// A flight's task, before it runs.
pub(crate) struct Lead {
    pub(crate) node: Arc<Node>,
    pub(crate) policy: Arc<Policy>,
    pub(crate) flight: FlightKey,
    pub(crate) leader: Leader,
    /// Stored bytes that the first caller read and will not use.
    pub(crate) seen: Option<Bytes>,
    /// What is left of the first caller's budget.
    pub(crate) budget: Budget,
}

/// How one load ended.
enum Run {
    Loaded(Loaded),
    TimedOut,
    /// It panicked, or its runtime dropped it.
    Vanished(Arc<str>),
}

impl Lead {
    /// Sets the flight going. Its end frees everyone seated on it, also if its runtime drops it.
    pub(crate) fn start(self) {
        let running = self.node.tasks.enter();
        tokio::spawn(async move {
            self.run().await;
            drop(running);
        });
    }

    async fn run(mut self) {
        let lease = match self.flight.lane {
            Lane::Beside => None,
            Lane::Lease | Lane::Heal => match self.contend().await {
                Contended::Leased(lease) => Some(lease),
                Contended::Ended(ending) => return self.leader.finish(ending),
                Contended::WaitedOut => return self.leader.finish(Ending::WaitedOut),
                Contended::Busy | Contended::Leaving => return self.leader.finish(Ending::Gone),
                Contended::StoreDown(error) => match self.policy.on_store_down {
                    OnStoreDown::FailOpen => {
                        self.node.count(Count::fail_open_loads);
                        None
                    }
                    OnStoreDown::FailClosed => {
                        let error = Error::store("acquiring the lease", &self.flight.key, error);
                        return self.leader.finish(Ending::Failed(Failure::Guard(error)));
                    }
                },
            },
        };
        self.load_and_end(lease).await;
    }

    async fn contend(&mut self) -> Contended {
        contend(Contender {
            node: &self.node,
            key: &self.flight.key,
            policy: &self.policy,
            queue: self.flight.lane == Lane::Lease,
            seen: &mut self.seen,
            budget: &mut self.budget,
            deadline: Instant::now() + self.policy.wait_timeout,
        })
        .await
    }

    /// Step 6, as often as a loader vanishes and another caller's can go on under the same lease.
    async fn load_and_end(self, mut lease: Option<Lease>) {
        let mut hops = lease.as_ref().map_or(0, Lease::hops);
        loop {
            let Some((loader, seat)) = self.leader.next_loader() else {
                // Everyone here has left, or has seen a loader vanish: others may go on.
                self.leader.detach();
                if let Some(lease) = lease {
                    lease.hand_over(hops).await;
                }
                return self.leader.finish(Ending::Gone);
            };
            match self.load(loader, &mut lease).await {
                Run::Loaded(loaded) => return self.end(loaded, lease).await,
                Run::TimedOut => {
                    let error = Error::load_timeout(&self.flight.key, self.policy.load_timeout);
                    let failure = Failure::Guard(error);
                    return self.end(LoadResult::Failed(failure).into(), lease).await;
                }
                Run::Vanished(text) => {
                    hops += 1;
                    let failure = Failure::Panicked(text);
                    if hops > MOST_HOPS {
                        return self.end(LoadResult::Failed(failure).into(), lease).await;
                    }
                    self.node.count(Count::takeovers);
                    seat.tell(Ending::Failed(failure));
                }
            }
        }
    }

    /// Runs one loader in a task of its own, so that neither its panic nor its blocking touches
    /// the lease, and keeps the lease meanwhile. `lease` is `None` afterwards if it was lost or given away.
    async fn load(&self, loader: Loader, lease: &mut Option<Lease>) -> Run {
        let Loader { run, span, within } = loader;
        let started = Instant::now();
        let end = started + self.policy.load_timeout;
        self.node.count(Count::loads);
        let mode = if lease.is_some() { Mode::Leased } else { Mode::Unleased };
        let load = Loading::scope(&self.node, &self.flight.key, within, async move { run(mode).await });
        let mut load =
            AbortOnDrop(tokio::spawn(load.instrument(observe::load_span(&span, &self.flight.key))));
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
                loaded = &mut load.0 => {
                    observe::loaded(started.elapsed());
                    return match loaded {
                        Ok(loaded) => Run::Loaded(loaded),
                        Err(error) => Run::Vanished(describe(error)),
                    };
                }
                () = sleep_until(end) => return Run::TimedOut,
                event = kept => {
                    // Those seated here get the value all the same. Later callers must not: it may
                    // be older than an invalidation.
                    self.leader.detach();
                    in_doubt = event == Event::Invalidated;
                    if event == Event::Lost {
                        self.node.count(Count::leases_lost);
                        *lease = None;
                    }
                }
                () = self.node.leaving(), if lease.is_some() => {
                    // The process is about to end: somebody else had better load this.
                    self.leader.detach();
                    if let Some(lease) = lease.take() {
                        lease.hand_over(0).await;
                    }
                }
            }
        }
    }

    /// Step 7: tells the fleet, then those seated here.
    async fn end(self, loaded: Loaded, lease: Option<Lease>) {
        let Loaded { result, settled } = loaded;
        let Share { ending, elsewhere, keep, marker, replay } = self.share(result);
        let Self { node, flight, leader, seen, budget, .. } = self;

        let tell_fleet = async {
            match (lease, &ending, keep) {
                (Some(lease), Ending::Value(entry), Some(keep)) => {
                    lease.commit(entry.encode(&flight.key), keep).await;
                }
                (Some(lease), ending, _) => {
                    lease.fail(elsewhere.as_ref().unwrap_or(ending), replay, marker, seen.as_ref()).await;
                }
                (None, ..) => {}
            }
        };
        tokio::pin!(tell_fleet);
        // The store first, so that the next request hits; but only within what the caller gives the
        // store. The rest of the way is then gone without the callers.
        let told = timeout(budget.left(), &mut tell_fleet).await.is_ok();
        // Who has the end of a response may ask again at once, and must find what it made, not
        // this flight.
        leader.detach();
        if let Some(settled) = settled {
            settled();
        }
        leader.finish(ending.clone());
        if !told {
            node.count(Count::budget_exceeded);
            tell_fleet.await;
        }
    }

    /// What a load's result means for those who share it.
    fn share(&self, result: LoadResult) -> Share {
        let now = self.node.store.now();
        let share =
            |ending| Share { ending, elsewhere: None, keep: None, marker: None, replay: Duration::ZERO };
        match result {
            LoadResult::Value { encoding, payload, fresh_for, brief } => {
                let keep = self.policy.stored_for(fresh_for);
                let fresh_until = now.saturating_add(keep.as_millis() as u64);
                let value = |payload| {
                    Ending::Value(Entry { kind: Kind::Value, encoding, stored_at: now, fresh_until, payload })
                };
                let keep = (fresh_until > now).then_some(keep);
                Share { keep, elsewhere: brief.map(value), ..share(value(payload)) }
            }
            LoadResult::Uncacheable { mark } => Share {
                marker: mark.then(|| marker_entry(&self.flight.key, now)),
                ..share(Ending::Uncacheable)
            },
            LoadResult::Failed(failure) => {
                Share { replay: self.policy.error_for, ..share(Ending::Failed(failure)) }
            }
        }
    }
}

/// What is shared of a load, and with whom.
struct Share {
    ending: Ending,
    /// What other processes are told, if it is something else.
    elsewhere: Option<Ending>,
    /// How long the value is stored; `None` shares it with the waiting wave only.
    keep: Option<Duration>,
    /// A marker for those who come later, and its lifetime.
    marker: Option<(Bytes, Duration)>,
    /// How long a failure is told to those who come later.
    replay: Duration,
}

fn marker_entry(key: &Key, now: u64) -> (Bytes, Duration) {
    let marker = Entry {
        kind: Kind::Marker,
        encoding: Encoding::RAW,
        stored_at: now,
        fresh_until: now.saturating_add(MARKER_FOR.as_millis() as u64),
        payload: Bytes::new(),
    };
    (marker.encode(key), MARKER_FOR)
}

/// What a load's task left behind when it ended without a result.
fn describe(error: JoinError) -> Arc<str> {
    match error.try_into_panic() {
        Ok(panic) => crate::error::panic_text(&*panic),
        Err(_) => "the load's runtime dropped it".into(),
    }
}

/// A spawned load that ends with the flight that waits for it.
struct AbortOnDrop(JoinHandle<Loaded>);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}
