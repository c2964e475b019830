//! Shared reads of step 2: a caller's place in its key's queue, the task that reads for the queue, and the take-over from a task
//! whose runtime stands still. `flight/shared_read.rs` has the queues.

use std::future::poll_fn;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::runtime::{Handle, Id};
use tokio::time::timeout;

use crate::flight::pacing::Pace;
use crate::flight::shared_read::{BatchReader, QueuedRead, ReadRole, SoloRead, WakeList};
use crate::guard_state::{GuardState, ReadResult, SharedRead, Stored};
use crate::key::flight::{FlightKey, LoadMode};
use crate::key::{Hashed, Key};
use crate::observe::Count;
use crate::store::{StoreError, StoreErrorKind};

/// The runtime that the caller is polled in.
fn runtime() -> Option<Id> {
    Handle::try_current().ok().map(|handle| handle.id())
}

pub(crate) type FirstRead<'a> = SoloRead<'a, Key, ReadResult, Hashed>;

/// How one caller shares its read.
#[derive(Clone, Copy)]
pub(crate) struct SharedLookUp<'a, 't> {
    pub(crate) state: &'a Arc<GuardState>,
    pub(crate) key: &'a Key,
    /// The tags that the entry must have.
    pub(crate) tags: &'t [Key],
    /// Whether to read also if there is a flight to join.
    pub(crate) past_flights: bool,
}

impl<'a> SharedLookUp<'a, '_> {
    /// Lets the caller read by itself, or returns its place in the queue that one task reads for, and whether that task may be in
    /// another runtime.
    ///
    /// Not async, because its locals would enlarge the future of every hit.
    pub(crate) fn queue_up(self, within: Duration) -> Result<FirstRead<'a>, (QueuedRead<ReadResult>, bool)> {
        match self.state.look_ups.enter(self.key, within) {
            ReadRole::First(first) => Ok(first),
            ReadRole::Queued(queued, reader, duty) => {
                let is_elsewhere = duty.is_none() && reader != runtime();
                if let Some(duty) = duty {
                    self.read_for_others(duty, within);
                }
                Err((queued, is_elsewhere))
            }
        }
    }

    fn read_for_others(self, duty: BatchReader<Key, ReadResult, Hashed>, within: Duration) {
        let Self { state, tags, past_flights, .. } = self;
        duty.runs_in(runtime());
        tokio::spawn(read_for_queue(Arc::clone(state), duty, tags.to_vec(), within, past_flights));
    }

    /// Waits for the reader for at most `most`. If the reader is in another runtime and takes three quarters of that, its runtime
    /// may stand still. Then this caller spawns a task in its own runtime that reads for all waiters, and queues again.
    pub(crate) async fn wait_for_reader(
        self,
        mut queued: QueuedRead<ReadResult>,
        is_elsewhere: bool,
        most: Duration,
    ) -> Option<ReadResult> {
        let Self { state, key, tags, .. } = self;
        let late = |_| Some(ReadResult::Read(Err(StoreError::new(StoreErrorKind::TimedOut))));
        if !is_elsewhere {
            return timeout(most, queued).await.unwrap_or_else(late);
        }
        if let Ok(read) = timeout(most * 3 / 4, &mut queued).await {
            return read;
        }
        let left = most / 4;
        if let Some(duty) = state.look_ups.take_over(key, &queued) {
            self.read_for_others(duty, left);
        }
        drop(queued);
        let again = async {
            match self.queue_up(left) {
                Ok(_first) => {
                    let read = read(state, key, tags, left).await;
                    Some(ReadResult::Read(
                        read.map(|stored| stored.map(|stored| SharedRead::new(stored, tags))),
                    ))
                }
                Err((queued, _)) => queued.await,
            }
        };
        timeout(left, again).await.unwrap_or_else(late)
    }
}

/// Reads the entry, and in the same trip the ids of the tags that it must have.
///
/// The futures that concern tags are boxed, because they would enlarge the future of every hit.
pub(crate) async fn read(
    state: &GuardState,
    key: &Key,
    tags: &[Key],
    within: Duration,
) -> Result<Option<Stored>, StoreError> {
    let found = match tags {
        [] => {
            state.store.look_up(key, within).await.map(|raw| raw.map(|raw| Stored::decode(state, raw, key)))
        }
        tags => Box::pin(read_tagged(state, key, tags, within)).await,
    };
    let found = match found {
        Ok(Some(Stored::Entry(entry))) if tags.is_empty() && !entry.tags.is_empty() => {
            Box::pin(state.unless_invalidated(key, entry, &[], &[], within)).await.map(Some)
        }
        found => found,
    };
    if found.is_err() {
        state.count(Count::store_errors);
    }
    found
}

async fn read_tagged(
    state: &GuardState,
    key: &Key,
    tags: &[Key],
    within: Duration,
) -> Result<Option<Stored>, StoreError> {
    let (raw, ids) = state.store.tags().look_up_tagged(key, tags, within).await?;
    Ok(match raw.map(|raw| Stored::decode(state, raw, key)) {
        Some(Stored::Entry(entry)) => Some(state.unless_invalidated(key, entry, tags, &ids, within).await?),
        other => other,
    })
}

/// Reads for the callers that queue for a key until the queue is empty, each time for as long as the most patient caller waits.
/// Runs in a separate task: a caller that is alive and not polled must not hold up the others.
async fn read_for_queue(
    state: Arc<GuardState>,
    mut duty: BatchReader<Key, ReadResult, Hashed>,
    tags: Vec<Key>,
    within: Duration,
    past_flights: bool,
) {
    let key = duty.key().clone();
    let flight = FlightKey { key: key.clone(), mode: LoadMode::Leased };
    // The lone read in front of the queue may find nothing and begin a flight, which the queued callers then join
    // without a read.
    if timeout(within, duty.first_ended()).await.is_err() {
        duty.give_up_first();
    }
    let (mut answered, mut pace) = (WakeList::default(), Pace::default());
    // Dropping `answered`, here or with this task, wakes the callers that are left in it.
    while let Some(batch) = duty.next() {
        let mut waited = false;
        let looked_up = if !past_flights && state.flights.has_connected(&flight) {
            ReadResult::LeftOut
        } else {
            let mut reading = pin!(read(&state, &key, &tags, batch.patience));
            let read = poll_fn(|cx| {
                let read = reading.as_mut().poll(cx);
                // The next read is on its way: wake the rest.
                answered.tell(usize::MAX);
                waited |= read.is_pending();
                read
            });
            ReadResult::Read(read.await.map(|stored| stored.map(|stored| SharedRead::new(stored, &tags))))
        };
        answered = batch.answer(looked_up);
        pace.tell(&mut answered, duty.awaiting(), waited).await;
    }
}
