//! The task that draws the chart: asks all masters who has which slot, and believes most of them.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use tokio::time::{Instant, sleep, timeout};

use super::slot_map::{Chart, Layout};
use super::{Cluster, Looks, Supervisor};
use crate::observe::log;
use crate::store::redis::connection::backoff::Backoff;
use crate::store::redis::errors::classify::{reason, store_error};
use crate::store::redis::topology::cluster::slots::{Address, Range, majority, parse};
use crate::store::{StoreError, StoreErrorKind};

/// How often it is looked whether anything has changed that nobody has met.
const PERIOD: Duration = Duration::from_secs(30);
/// Between two looks in any case: while slots move, each command that is behind asks for one.
const GAP: Duration = Duration::from_millis(100);

/// How long a connection is kept to a node that has no slots.
const KEPT: Duration = Duration::from_secs(10);

/// What is said of a node that was reset, or that nobody has met yet.
const BLANK: &str = "this node knows of no slots";

/// The task's hold on the cluster. Weak: a store that is dropped takes its surveyor along.
pub(super) struct Surveyor {
    pub(super) cluster: Weak<Cluster>,
    pub(super) number: u64,
}

impl Drop for Surveyor {
    /// The task ended, with its runtime or by a panic: the next command starts over.
    fn drop(&mut self) {
        let Some(cluster) = self.cluster.upgrade() else { return };
        {
            let mut state = cluster.state();
            if state.surveyors != self.number {
                return;
            }
            state.surveyor = None;
            if let Chart::Unknown(_) = state.chart {
                state.chart = Chart::Blank;
            }
        }
        cluster.running.store(false, Ordering::Release);
        cluster.changed();
    }
}

/// How long trouble alone is not worth another look: it has just been looked into, by every process. Who has taken over is
/// found a second late at the most: who hangs does not say.
fn rests() -> Backoff {
    Backoff::between(Duration::from_millis(250), Duration::from_secs(1))
}

/// Whom to ask.
type Nodes = Vec<(Address, Arc<Supervisor>)>;

/// How it stands after a look.
enum Outlook {
    Well,
    Unwell,
    /// Drawn by one node's word, for those who wait; the others are to be asked.
    Hasty,
    Nothing,
}

/// Keeps the chart for as long as there is a cluster. No strong reference lives across an await, or the connections of
/// a dropped store would outlive it.
pub(super) async fn survey(surveyor: Surveyor, looks: Arc<Looks>, answer: Duration) {
    let (mut backoff, mut rest) = (Backoff::new(), rests());
    // Whether those of the chart have failed to answer.
    let mut lost = false;
    loop {
        let Some((nodes, first)) = surveyor.whom(lost) else { return };
        // The first connection needs more time than an answer does.
        let limit = answer.saturating_mul(4).max(Duration::from_millis(500));
        let (views, failure) = ask(nodes, first, limit).await;
        lost = views.is_empty();
        let Some((outlook, changed)) = surveyor.settle(views, failure, first) else { return };
        match outlook {
            Outlook::Hasty => continue,
            Outlook::Nothing => {
                backoff.pause().await;
                continue;
            }
            Outlook::Unwell | Outlook::Well => backoff = Backoff::new(),
        }
        if changed {
            rest = rests();
        }
        let told = timeout(rest.next(), looks.news.notified()).await.is_ok();
        if !told && matches!(outlook, Outlook::Well) {
            let quiet = Instant::now();
            tokio::select! {
                () = looks.news.notified() => {}
                () = looks.trouble.notified() => {}
                () = sleep(PERIOD) => {}
            }
            // Trouble after that is new.
            rest.lived(quiet.elapsed());
        }
        sleep(GAP).await;
    }
}

/// What the nodes say, and why others did not. `first`: until one has answered.
async fn ask(nodes: Nodes, first: bool, limit: Duration) -> (Vec<Vec<Range>>, Option<StoreError>) {
    let mut cmd = redis::cmd("CLUSTER");
    cmd.arg("SLOTS");
    let mut answers: FuturesUnordered<_> = nodes
        .into_iter()
        .map(|(address, server)| {
            let cmd = &cmd;
            async move { (server.send(cmd, limit).await, address) }
        })
        .collect();
    let (mut views, mut failure) = (Vec::new(), None);
    while let Some((answer, address)) = answers.next().await {
        match answer.map(|answer| parse(answer, &address)) {
            Ok(Some(view)) => views.push(view),
            Ok(None) => {
                let blank = || redis::make_extension_error("CLUSTERDOWN".to_owned(), Some(BLANK.to_owned()));
                failure.get_or_insert_with(|| store_error(StoreErrorKind::Unavailable, blank()));
            }
            Err(error) => failure = Some(error),
        }
        if first && !views.is_empty() {
            break;
        }
    }
    (views, failure)
}

impl Surveyor {
    /// Whom to ask, and whether anybody waits for the first answer. `None` when there is nothing left to keep.
    fn whom(&self, lost: bool) -> Option<(Nodes, bool)> {
        let cluster = self.cluster.upgrade()?;
        let drawn = {
            let state = cluster.state();
            if state.surveyors != self.number || matches!(state.chart, Chart::Closed) {
                return None;
            }
            state.chart.layout().ok().flatten()
        };
        let mut nodes: Vec<_> =
            drawn.iter().flat_map(|layout| &layout.masters).map(|m| m.address.clone()).collect();
        if lost || nodes.is_empty() {
            nodes.extend(cluster.atlas.everyone());
            nodes.sort();
            nodes.dedup();
        }
        // One that the client can not connect to is one that does not answer.
        let nodes = nodes.into_iter().filter_map(|node| Some((node.clone(), cluster.server(&node).ok()?)));
        Some((nodes.collect(), drawn.is_none()))
    }

    /// Draws the chart by what was said. How it stands then, and whether it is another one than before.
    fn settle(
        &self,
        views: Vec<Vec<Range>>,
        failure: Option<StoreError>,
        first: bool,
    ) -> Option<(Outlook, bool)> {
        let cluster = self.cluster.upgrade()?;
        let known = cluster.state().chart.layout().ok().flatten();
        let Some(ranges) = majority(views, known.as_ref().map(|layout| &*layout.ranges)) else {
            return self.failed(&cluster, failure);
        };
        let drawn = match &known {
            Some(layout) if layout.ranges == ranges => Arc::clone(layout),
            _ => match Layout::of(ranges, |address| cluster.server(address)) {
                Ok(layout) => Arc::new(layout),
                Err(error) => {
                    return self.failed(&cluster, Some(store_error(StoreErrorKind::Unavailable, error)));
                }
            },
        };
        let gone: Vec<_> = {
            let mut state = cluster.state();
            if state.surveyors != self.number || matches!(state.chart, Chart::Closed) {
                return None;
            }
            cluster.atlas.learn(&drawn.ranges);
            state.chart = Chart::Drawn(Arc::clone(&drawn));
            // Commands that are on their way to one of these have it in hand.
            let mut gone = Vec::new();
            state.servers.retain(|address, kept| {
                // One that is being filled has no slot yet, and is sent to all the time.
                let stays = kept.used.elapsed() < KEPT
                    || drawn.masters.iter().any(|master| master.address == *address);
                gone.extend((!stays).then(|| Arc::clone(&kept.server)));
                stays
            });
            gone
        };
        // Outside the lock: the last of them closes its connection.
        drop(gone);
        cluster.changed();
        let changed = known.is_none_or(|known| !Arc::ptr_eq(&known, &drawn));
        let outlook = match drawn.is_well() {
            _ if first => Outlook::Hasty,
            true => Outlook::Well,
            false => Outlook::Unwell,
        };
        Some((outlook, changed))
    }

    /// Nobody has told anything. Who waits for the first chart waits no longer.
    fn failed(&self, cluster: &Cluster, failure: Option<StoreError>) -> Option<(Outlook, bool)> {
        let why = failure.unwrap_or_else(|| StoreError::new(StoreErrorKind::Unavailable));
        // What they were asked was not a command of a caller's.
        let why = StoreError { kind: StoreErrorKind::Unavailable, ..why };
        {
            let mut state = cluster.state();
            if state.surveyors != self.number || matches!(state.chart, Chart::Closed) {
                return None;
            }
            if matches!(state.chart, Chart::Blank | Chart::Unknown(_)) {
                if state.told.is_news(&why) {
                    tracing::warn!(target: log::REDIS, reason = %reason(&why), "no node of the cluster tells who has which slot");
                }
                state.chart = Chart::Unknown(why);
            }
        }
        cluster.changed();
        Some((Outlook::Nothing, false))
    }
}

#[cfg(test)]
mod tests {
    use redis::cluster::ClusterClient;

    use super::*;
    use crate::store::redis::connection::backoff::tests::{are_anywhere_below, begins_anew_after_a_second};

    /// A task may be in the middle of something when it is given up: another one is there, or the cluster is closed.
    #[tokio::test]
    async fn a_surveyor_that_was_given_up_changes_nothing() {
        let client = ClusterClient::new(["redis://127.0.0.1:1/", "redis://127.0.0.1:2/"]).expect("nodes");
        let cluster = Cluster::new(client, Duration::from_secs(1));
        let surveyor = |number| Surveyor { cluster: Arc::downgrade(&cluster), number };
        let range = |last, port| {
            let master = Address { host: "127.0.0.1".into(), port };
            Range { first: 0, last, master, replicas: Vec::new() }
        };
        let present = cluster.state().surveyors;
        let (of_old, of_now) = (surveyor(present + 1), surveyor(present));
        let touches = |surveyor: &Surveyor| {
            let asks = surveyor.whom(false).is_some();
            let fails = surveyor.settle(Vec::new(), None, true).is_some();
            let draws = surveyor.settle(vec![vec![range(99, 1)]], None, true).is_some();
            [asks, fails, draws]
        };
        assert_eq!(touches(&of_old), [false; 3]);
        assert!(matches!(cluster.state().chart, Chart::Blank));
        assert_eq!(touches(&of_now), [true; 3]);
        assert!(matches!(cluster.state().chart, Chart::Drawn(_)));
        assert_eq!(of_now.whom(true).expect("it is there").0.len(), 2, "each has one voice");
        cluster.close();
        assert_eq!(touches(&of_now), [false; 3]);
        assert!(matches!(cluster.state().chart, Chart::Closed));
        // The end of one is not the end of another.
        cluster.running.store(true, Ordering::Release);
        drop(of_old);
        assert!(cluster.running.load(Ordering::Acquire));
        drop(of_now);
        assert!(!cluster.running.load(Ordering::Acquire));
    }

    #[test]
    fn rests_are_anywhere_below_a_bound_that_doubles_up_to_a_second() {
        are_anywhere_below(rests, &[250, 500, 1000, 1000, 1000]);
    }

    #[test]
    fn trouble_after_a_quiet_second_is_new() {
        begins_anew_after_a_second(rests(), 250, 1000);
    }
}
