//! The refresh task, which updates the slot map: it sends CLUSTER SLOTS to all masters and uses the answer of the majority.
//! Callers wait here for the slot map and for its masters.

use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use tokio::time::{Instant, sleep, timeout};

use super::slots::{SlotLayout, SlotMap};
use super::{Cluster, DiscoveryWake, SendMode, Supervisor};
use crate::observe::{log, warn_if};
use crate::store::redis::cluster::slots::{Address, Range, majority, parse, slot_of};
use crate::store::redis::errors::{reason, store_error};
use crate::store::{StoreError, StoreErrorKind, StoreResult};
use crate::task::{Backoff, EndedTask, OwnedTask, TaskOwner, TaskRef};

/// How often the map is refreshed without a sign that it has changed.
const PERIOD: Duration = Duration::from_secs(30);
/// The least time between two refreshes: while slots move, each redirected command requests a refresh.
const GAP: Duration = Duration::from_millis(100);

/// How long an unused connection to a node without slots is retained.
const RETAINED_FOR: Duration = Duration::from_secs(10);

/// The error for a node that was reset, or has not joined a cluster yet.
const BLANK: &str = "this node knows of no slots";

impl TaskOwner for Cluster {
    fn owned_task(&self) -> &OwnedTask {
        &self.task
    }

    fn task_ended(&self, ended: EndedTask<'_>) {
        {
            let mut state = self.state();
            if let SlotMap::Unknown(_) = state.slot_map {
                state.slot_map = SlotMap::Blank;
            }
        }
        drop(ended);
        self.changed();
    }
}

/// Pauses between refreshes that only failed commands have caused, because every process refreshes after the same failure. A node
/// that hangs sends no redirection, so the new master of its slots is found at most a second late.
fn rests() -> Backoff {
    Backoff::between(Duration::from_millis(250), Duration::from_secs(1))
}

/// The nodes to query.
type QueriedNodes = Vec<(Address, Arc<Supervisor>)>;

/// The state of the map after a refresh.
enum RefreshResult {
    Well,
    Unwell,
    /// The map is built from one node's answer, for the waiting callers; the other nodes must still be queried.
    Hasty,
    Nothing,
}

/// Refreshes the map while the cluster exists.
async fn refresh_topology(refresh_task: TaskRef<Cluster>, looks: Arc<DiscoveryWake>, answer: Duration) {
    let (mut backoff, mut rest) = (Backoff::new(), rests());
    // Whether all nodes of the map have failed to answer.
    let mut lost = false;
    loop {
        let Some((nodes, first)) = refresh_task.nodes_to_query(lost) else { return };
        // A node that is not connected yet needs more time than one answer takes.
        let limit = answer.saturating_mul(4).max(Duration::from_millis(500));
        let (views, failure) = ask(nodes, first, limit).await;
        lost = views.is_empty();
        let Some((refresh_result, changed)) = refresh_task.settle(views, failure, first) else { return };
        match refresh_result {
            RefreshResult::Hasty => continue,
            RefreshResult::Nothing => {
                backoff.pause().await;
                continue;
            }
            RefreshResult::Unwell | RefreshResult::Well => backoff = Backoff::new(),
        }
        if changed {
            rest = rests();
        }
        let has_news = timeout(rest.next(), looks.news.notified()).await.is_ok();
        if !has_news && matches!(refresh_result, RefreshResult::Well) {
            let quiet = Instant::now();
            tokio::select! {
                () = looks.news.notified() => {}
                () = looks.trouble.notified() => {}
                () = sleep(PERIOD) => {}
            }
            // A failure after a quiet period is a new one, so the pauses start over.
            rest.connected_for(quiet.elapsed());
        }
        sleep(GAP).await;
    }
}

/// Queries the nodes. Returns their answers, and a failure if there was one. With `first`, returns after the first answer.
async fn ask(nodes: QueriedNodes, first: bool, limit: Duration) -> (Vec<Vec<Range>>, Option<StoreError>) {
    let mut cmd = redis::cmd("CLUSTER");
    cmd.arg("SLOTS");
    let mut answers: FuturesUnordered<_> = nodes
        .into_iter()
        .map(|(address, server)| {
            let cmd = &cmd;
            async move { (server.send("", cmd, limit, SendMode::Once).await, address) }
        })
        .collect();
    let (mut views, mut failure) = (Vec::new(), None);
    while let Some((answer, address)) = answers.next().await {
        match answer.map(|(answer, _)| parse(answer, &address)) {
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

impl TaskRef<Cluster> {
    /// The nodes to query (the masters; all known nodes if these were `lost` or there is no map), and whether callers wait for the
    /// first map. `None` if the cluster was dropped or closed, or has another refresh task.
    fn nodes_to_query(&self, lost: bool) -> Option<(QueriedNodes, bool)> {
        let known_layout = self.with(|cluster| cluster.state().slot_map.layout().ok().flatten())?;
        let cluster = self.owner()?;
        let mut nodes: Vec<_> =
            known_layout.iter().flat_map(|layout| &layout.masters).map(|m| m.address.clone()).collect();
        if lost || nodes.is_empty() {
            nodes.extend(cluster.cluster_nodes.all_known_nodes());
            nodes.sort();
            nodes.dedup();
        }
        // A node for which the client cannot be built is left out, like a node that does not answer.
        let nodes = nodes.into_iter().filter_map(|node| Some((node.clone(), cluster.server(&node).ok()?)));
        Some((nodes.collect(), known_layout.is_none()))
    }

    /// Updates the map from the answers. Returns the state after that, and whether the map has changed.
    fn settle(
        &self,
        views: Vec<Vec<Range>>,
        failure: Option<StoreError>,
        first: bool,
    ) -> Option<(RefreshResult, bool)> {
        let cluster = self.owner()?;
        let known = cluster.state().slot_map.layout().ok().flatten();
        let Some(ranges) = majority(views, known.as_ref().map(|layout| &*layout.ranges)) else {
            return self.failed(&cluster, failure);
        };
        let known_layout = match &known {
            Some(layout) if layout.ranges == ranges => Arc::clone(layout),
            _ => match SlotLayout::of(ranges, |address| cluster.server(address)) {
                Ok(layout) => Arc::new(layout),
                Err(error) => {
                    return self.failed(&cluster, Some(store_error(StoreErrorKind::Unavailable, error)));
                }
            },
        };
        let removed: Vec<_> = self.with(|cluster| {
            let mut state = cluster.state();
            cluster.cluster_nodes.learn(&known_layout.ranges);
            state.slot_map = SlotMap::Known(Arc::clone(&known_layout));
            // Commands in flight to one of these nodes hold their own reference.
            let mut removed = Vec::new();
            state.servers.retain(|address, node| {
                // A node to which its first slots are migrating has no slot yet, but receives commands all the time.
                let stays = node.used.elapsed() < RETAINED_FOR
                    || known_layout.masters.iter().any(|master| master.address == *address);
                removed.extend((!stays).then(|| Arc::clone(&node.server)));
                stays
            });
            removed
        })?;
        // The lock is not held here, because dropping the last reference closes a connection.
        drop(removed);
        cluster.changed();
        let changed = known.is_none_or(|known| !Arc::ptr_eq(&known, &known_layout));
        let refresh_result = match known_layout.is_well() {
            _ if first => RefreshResult::Hasty,
            true => RefreshResult::Well,
            false => RefreshResult::Unwell,
        };
        Some((refresh_result, changed))
    }

    /// Handles a refresh that no node has answered: callers that wait for the first map fail; a map that there is stays.
    fn failed(&self, cluster: &Cluster, failure: Option<StoreError>) -> Option<(RefreshResult, bool)> {
        let why = failure.unwrap_or_else(|| StoreError::new(StoreErrorKind::Unavailable));
        // The failed command was the refresh task's: no caller's command was sent, so none can have run.
        let why = StoreError { kind: StoreErrorKind::Unavailable, ..why };
        let is_news = self.with(|cluster| {
            let state = &mut *cluster.state();
            if !matches!(state.slot_map, SlotMap::Blank | SlotMap::Unknown(_)) {
                return false;
            }
            state.slot_map = SlotMap::Unknown(why.clone());
            state.outage_log.is_news(&why)
        })?;
        warn_if!(log::REDIS, is_news, reason = %reason(&why), "no node of the cluster tells who has which slot");
        cluster.changed();
        Some((RefreshResult::Nothing, false))
    }
}

impl Cluster {
    /// Waits until there is a map, and at least one of its masters takes commands.
    pub(crate) async fn until_up(self: &Arc<Self>) -> StoreResult<()> {
        let mut changes = self.changes.subscribe();
        loop {
            changes.mark_unchanged();
            match self.known_layout().await {
                Ok(layout) => {
                    let opened = layout.masters.iter().map(|master| master.server.settled());
                    let opened = futures_util::future::join_all(opened).await;
                    if opened.iter().any(Result::is_ok) {
                        return Ok(());
                    }
                }
                Err(error) if error.kind == StoreErrorKind::Closed => return Err(error),
                Err(_) => {}
            }
            let _ = changes.changed().await;
        }
    }

    /// Waits until the master of `key`'s slot takes commands.
    pub(crate) async fn reach(self: &Arc<Self>, key: &str) -> StoreResult<()> {
        let (slot, mut changes) = (slot_of(key), self.changes.subscribe());
        loop {
            changes.mark_unchanged();
            match self
                .known_layout()
                .await
                .map(|layout| layout.master(slot).map(|master| Arc::clone(&master.server)))
            {
                // Another node may serve the slot before this master is back.
                Ok(Some(server)) => tokio::select! {
                    up = server.until_up() => return up,
                    _ = changes.changed() => {}
                },
                Err(error) if error.kind == StoreErrorKind::Closed => return Err(error),
                Ok(None) | Err(_) => drop(changes.changed().await),
            }
        }
    }

    /// The map; `None` if there is none yet and the caller may wait for it. Starts the refresh task if it does not run.
    pub(super) fn layout(self: &Arc<Self>) -> StoreResult<Option<Arc<SlotLayout>>> {
        if !self.task.is_running() {
            self.task.start(self, |task| {
                refresh_topology(task, Arc::clone(&self.looks), self.settings.command_timeout)
            });
        }
        self.state().slot_map.layout()
    }

    /// The map. Waits for the first map if there is none.
    pub(super) async fn known_layout(self: &Arc<Self>) -> StoreResult<Arc<SlotLayout>> {
        let mut changes = self.changes.subscribe();
        loop {
            changes.mark_unchanged();
            if let Some(layout) = self.layout()? {
                return Ok(layout);
            }
            if !self.task.is_running() {
                // This caller's runtime is being shut down and has dropped the refresh task, or the task could not be
                // started.
                return Err(StoreError::new(StoreErrorKind::Unavailable));
            }
            let _ = changes.changed().await;
        }
    }
}

#[cfg(test)]
mod tests {
    use redis::cluster::ClusterClient;

    use super::*;
    use crate::task::tests::{are_anywhere_below, begins_anew_after_a_second};

    /// A task may be in the middle of a refresh when it is replaced or the cluster is closed.
    #[tokio::test]
    async fn a_replaced_refresh_task_changes_no_state() {
        let client = ClusterClient::new(["redis://127.0.0.1:1/", "redis://127.0.0.1:2/"]).expect("nodes");
        let cluster = Cluster::new(client, Duration::from_secs(1));
        let range = |last, port| {
            let master = Address { host: "127.0.0.1".into(), port };
            Range { first: 0, last, master, replicas: Vec::new() }
        };
        let (of_old, of_now) = (TaskRef::of_task(&cluster, 1), TaskRef::of_task(&cluster, 0));
        let touches = |refresh_task: &TaskRef<Cluster>| {
            let queries = refresh_task.nodes_to_query(false).is_some();
            let fails = refresh_task.settle(Vec::new(), None, true).is_some();
            let updates = refresh_task.settle(vec![vec![range(99, 1)]], None, true).is_some();
            [queries, fails, updates]
        };
        assert_eq!(touches(&of_old), [false; 3]);
        assert!(matches!(cluster.state().slot_map, SlotMap::Blank));
        assert_eq!(touches(&of_now), [true; 3]);
        assert!(matches!(cluster.state().slot_map, SlotMap::Known(_)));
        assert_eq!(of_now.nodes_to_query(true).expect("it is there").0.len(), 2, "each has one voice");
        cluster.close();
        assert_eq!(touches(&of_now), [false; 3]);
        assert!(matches!(cluster.state().slot_map, SlotMap::Closed));
        // The end of one refresh task is not the end of another.
        cluster.task.pretend_running();
        drop(of_old);
        assert!(cluster.task.is_running());
        drop(of_now);
        assert!(!cluster.task.is_running());
    }

    #[test]
    fn rests_are_anywhere_below_a_bound_that_doubles_up_to_a_second() {
        are_anywhere_below(rests, &[250, 500, 1000, 1000, 1000]);
    }

    #[test]
    fn the_pauses_start_over_after_a_quiet_second() {
        begins_anew_after_a_second(rests(), 250, 1000);
    }
}
