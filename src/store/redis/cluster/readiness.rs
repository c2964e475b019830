//! Waiting for the slot map and for its masters.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use tokio::runtime::Handle;

use super::Cluster;
use super::discovery::{Discovery, survey};
use super::slot_map::{SlotLayout, SlotMap};
use crate::store::redis::topology::cluster::slots::slot_of;
use crate::store::{StoreError, StoreErrorKind};

impl Cluster {
    /// Waits until there is a map, and at least one of its masters takes commands.
    pub(crate) async fn until_up(self: &Arc<Self>) -> Result<(), StoreError> {
        let mut changes = self.changes.subscribe();
        loop {
            changes.mark_unchanged();
            match self.drawn().await {
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
    pub(crate) async fn reach(self: &Arc<Self>, key: &str) -> Result<(), StoreError> {
        let (slot, mut changes) = (slot_of(key), self.changes.subscribe());
        loop {
            changes.mark_unchanged();
            match self
                .drawn()
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

    /// The map; `None` if the caller may wait for the first.
    pub(super) fn layout(self: &Arc<Self>) -> Result<Option<Arc<SlotLayout>>, StoreError> {
        if !self.running.load(Ordering::Acquire) {
            self.start();
        }
        self.state().chart.layout()
    }

    /// The first map.
    pub(super) async fn drawn(self: &Arc<Self>) -> Result<Arc<SlotLayout>, StoreError> {
        let mut changes = self.changes.subscribe();
        loop {
            changes.mark_unchanged();
            if let Some(layout) = self.layout()? {
                return Ok(layout);
            }
            if !self.running.load(Ordering::Acquire) {
                // This caller's runtime is being shut down: it has dropped the surveyor, or none could be
                // started.
                return Err(StoreError::new(StoreErrorKind::Unavailable));
            }
            let _ = changes.changed().await;
        }
    }

    /// Starts a surveyor if there is none.
    fn start(self: &Arc<Self>) {
        let Ok(runtime) = Handle::try_current() else { return };
        let number = {
            let mut state = self.state();
            if matches!(state.chart, SlotMap::Closed) || self.running.swap(true, Ordering::AcqRel) {
                return;
            }
            state.surveyors += 1;
            state.surveyors
        };
        let surveyor = Discovery { cluster: Arc::downgrade(self), number };
        // Outside the lock: a runtime that is being shut down drops the task inside `spawn`, and dropping the
        // surveyor takes the lock.
        let task = runtime.spawn(survey(surveyor, Arc::clone(&self.looks), self.answer));
        let mut state = self.state();
        if state.surveyors == number && !matches!(state.chart, SlotMap::Closed) {
            state.surveyor = Some(task.abort_handle());
        } else {
            task.abort();
        }
    }
}
