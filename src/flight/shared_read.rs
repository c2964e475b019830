//! Concurrent look-ups of one key share one read, which begins after the last of them arrived.
//!
//! Joining a read that is already on its way would be cheaper and wrong: a caller that arrives after
//! an invalidation was acknowledged could receive an entry that was read before it. So a caller that arrives while a
//! read is on its way queues, and one further read answers the whole queue. However many callers a hot key has, it
//! costs a handful of reads.
//!
//! A caller that finds no read on its way reads in its own task ([`SoloRead`]), and takes the map's lock twice. The first caller to
//! queue behind it receives the [`BatchReader`] that reads for the queue, and spawns it as a task: no caller depends on another
//! caller being polled. That task depends on its runtime, which may stand still. So a caller of another runtime waits for it for a
//! limited time, and then takes over from it.
//!
//! Invariants:
//!
//! 1. A read that answers a caller begins after that caller arrived: a queue is closed before it is read for.
//! 2. While a queue has a caller, a [`BatchReader`] for it exists. Dropping that reader answers the queue with nothing.
//! 3. A reader has a number. A reader that was taken over has no effect any more: if it goes on late, it answers the queue that it has
//!    closed, and no later one.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::future::Future;
use std::hash::{BuildHasher, Hash};
use std::pin::Pin;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use tokio::runtime::Id;

use super::waiter::Oneshot;
use crate::sync::{Arc, AtomicUsize, Mutex, Ordering, lock};

/// The reads of one guard that are on their way, by key.
pub(crate) struct SharedReads<K, R, S> {
    shards: Box<[Shard<K, R, S>]>,
    hasher: S,
    /// Numbers the readers.
    numbers: AtomicUsize,
}

type Shard<K, R, S> = Mutex<HashMap<K, KeyReads<R>, S>>;

/// The reads of one key.
struct KeyReads<R> {
    /// Whether a [`SoloRead`] is on its way.
    first: bool,
    /// The callers that came since the read on its way was sent.
    queue: Option<Arc<Mutex<ReadQueue<R>>>>,
    /// How long the most patient caller of the queue waits for a read.
    patience: Duration,
    /// The number of the [`BatchReader`] that reads for the queue, if there is one.
    reader: Option<usize>,
    /// The runtime of the task that reads for the queue, once it is known. That task may stand still if its runtime does, so callers of
    /// another runtime wait for it for a limited time.
    runtime: Option<Id>,
    /// Notifies the reader that the [`SoloRead`] has ended.
    ended: Option<Arc<Oneshot<()>>>,
}

/// What a caller must do to get its read.
pub(crate) enum ReadRole<'a, K: Hash + Eq, R, S: BuildHasher> {
    /// No read of the key is on its way: read now.
    Solo(SoloRead<'a, K, R, S>),
    /// Wait for the queue's answer. A caller that receives the queue's reader must first spawn it as a task. Otherwise the id names the
    /// runtime in which the reader's task runs, if it is known.
    Queued(QueuedRead<R>, Option<Id>, Option<BatchReader<K, R, S>>),
}

impl<K: Hash + Eq + Clone, R, S: BuildHasher + Default> SharedReads<K, R, S> {
    pub(crate) fn new() -> Self {
        const SHARDS: usize = 16;
        let shards = (0..SHARDS).map(|_| Mutex::new(HashMap::with_hasher(S::default()))).collect();
        Self { shards, hasher: S::default(), numbers: AtomicUsize::new(0) }
    }

    /// Begins a look-up. A read that takes longer than `patience` is useless to this caller.
    pub(crate) fn enter<'a>(self: &'a Arc<Self>, key: &'a K, patience: Duration) -> ReadRole<'a, K, R, S> {
        let mut map = lock(self.shard(key));
        let reads = match map.entry(key.clone()) {
            Entry::Occupied(reads) => reads.into_mut(),
            Entry::Vacant(vacant) => {
                let (queue, patience, reader, runtime, ended) = (None, Duration::ZERO, None, None, None);
                vacant.insert(KeyReads { first: true, queue, patience, reader, runtime, ended });
                drop(map);
                return ReadRole::Solo(SoloRead { look_ups: self, key });
            }
        };
        let queue = Arc::clone(reads.queue.get_or_insert_with(|| Arc::new(Mutex::new(ReadQueue::new()))));
        reads.patience = reads.patience.max(patience);
        let is_new_reader = reads.reader.is_none();
        let number = *reads.reader.get_or_insert_with(|| self.next_number());
        let reader = is_new_reader.then(|| {
            (reads.runtime, reads.ended) = (None, reads.first.then(|| Arc::new(Oneshot::new())));
            let (look_ups, key) = (Arc::clone(self), key.clone());
            BatchReader { look_ups, key, number, ended: reads.ended.clone(), over: false }
        });
        // The caller enters the queue under the map's lock, so that no caller enters a closed queue.
        ReadRole::Queued(QueuedRead::enter(queue, number), reads.runtime, reader)
    }

    /// Takes over from a reader for which a caller has waited in vain, unless another caller has done so. Also gives up the solo read in
    /// front of the queue.
    pub(crate) fn take_over(
        self: &Arc<Self>,
        key: &K,
        queued: &QueuedRead<R>,
    ) -> Option<BatchReader<K, R, S>> {
        let mut map = lock(self.shard(key));
        let reads = map.get_mut(key).filter(|reads| reads.reader == Some(lock(&queued.queue).reader))?;
        let number = self.next_number();
        (reads.reader, reads.first, reads.runtime) = (Some(number), false, None);
        if let Some(queue) = &reads.queue {
            lock(queue).reader = number;
        }
        let ended = reads.ended.take();
        drop(map);
        if let Some(ended) = ended {
            // If the old reader continues, it need not wait for the solo read either.
            let _ = ended.offer(());
        }
        Some(BatchReader { look_ups: Arc::clone(self), key: key.clone(), number, ended: None, over: false })
    }

    fn next_number(&self) -> usize {
        self.numbers.fetch_add(1, Ordering::Relaxed)
    }

    /// How many keys have a read on its way.
    #[cfg(test)]
    #[allow(dead_code, reason = "used by the models, which compile this file too")]
    pub(crate) fn len(&self) -> usize {
        self.shards.iter().map(|shard| lock(shard).len()).sum()
    }
}

impl<K: Hash + Eq, R, S: BuildHasher> SharedReads<K, R, S> {
    fn shard(&self, key: &K) -> &Shard<K, R, S> {
        // The high bits of the hash, because the map inside the shard uses the low bits.
        &self.shards[(self.hasher.hash_one(key) >> 48) as usize % self.shards.len()]
    }
}

/// One caller's own read, which callers queue behind until it is dropped.
pub(crate) struct SoloRead<'a, K: Hash + Eq, R, S: BuildHasher> {
    look_ups: &'a SharedReads<K, R, S>,
    key: &'a K,
}

impl<K: Hash + Eq, R, S: BuildHasher> Drop for SoloRead<'_, K, R, S> {
    fn drop(&mut self) {
        let mut map = lock(self.look_ups.shard(self.key));
        // A take-over may have abandoned this read. If another solo read has begun since, this marks the new one as ended too early, which
        // costs one more read. Mostly no caller has queued, and one look into the map is enough.
        let Some((key, mut reads)) = map.remove_entry(self.key) else { return };
        if reads.reader.is_none() {
            return;
        }
        let ended = if std::mem::take(&mut reads.first) { reads.ended.take() } else { None };
        map.insert(key, reads);
        drop(map);
        if let Some(ended) = ended {
            // The reader may have stopped waiting for this.
            let _ = ended.offer(());
        }
    }
}

/// Reads for a key's queue until it is empty.
pub(crate) struct BatchReader<K: Hash + Eq, R, S: BuildHasher> {
    look_ups: Arc<SharedReads<K, R, S>>,
    key: K,
    number: usize,
    ended: Option<Arc<Oneshot<()>>>,
    over: bool,
}

impl<K: Hash + Eq, R, S: BuildHasher> BatchReader<K, R, S> {
    pub(crate) fn key(&self) -> &K {
        &self.key
    }

    /// Records the runtime of the reader's task. Callers that queue before this call assume that the task is in another runtime.
    pub(crate) fn runs_in(&self, runtime: Option<Id>) {
        if let Some(reads) = lock(self.look_ups.shard(&self.key)).get_mut(&self.key)
            && reads.reader == Some(self.number)
        {
            reads.runtime = runtime;
        }
    }

    /// Gives up the solo read in front of the queue: its caller is perhaps no longer polled.
    pub(crate) fn give_up_first(&self) {
        if let Some(reads) = lock(self.look_ups.shard(&self.key)).get_mut(&self.key)
            && reads.reader == Some(self.number)
        {
            reads.first = false;
        }
    }

    /// Waits for the end of the solo read in front of the queue. Needs a timeout, because that read may never end.
    pub(crate) fn first_ended(&self) -> impl Future<Output = ()> + Send + use<K, R, S> {
        let ended = self.ended.clone();
        std::future::poll_fn(move |cx| ended.as_ref().map_or(Poll::Ready(()), |ended| ended.poll_take(cx)))
    }

    /// Closes the queue, for which the caller must then read. `None`, and this reader is over, if no caller is in the queue or another
    /// reader has taken over.
    pub(crate) fn next(&mut self) -> Option<Batch<R>> {
        let mut map = lock(self.look_ups.shard(&self.key));
        let Some(reads) = map.get_mut(&self.key).filter(|reads| reads.reader == Some(self.number)) else {
            self.over = true;
            return None;
        };
        let (queue, patience) = (reads.queue.take(), std::mem::take(&mut reads.patience));
        if let Some(queue) = queue.filter(|queue| lock(queue).awaiting > 0) {
            return Some(Batch { queue, patience });
        }
        self.over = true;
        (reads.reader, reads.ended) = (None, None);
        if !reads.first {
            map.remove(&self.key);
        }
        None
    }
}

/// Invariant 2. Also runs when a runtime drops the task that reads.
impl<K: Hash + Eq, R, S: BuildHasher> Drop for BatchReader<K, R, S> {
    fn drop(&mut self) {
        while !self.over {
            // The batch is dropped at once, so it answers its callers with nothing.
            if self.next().is_none() {
                return;
            }
        }
    }
}

/// A closed queue. If it is dropped without an answer, its callers are answered with nothing.
pub(crate) struct Batch<R> {
    queue: Arc<Mutex<ReadQueue<R>>>,
    /// How long the read may take.
    pub(crate) patience: Duration,
}

impl<R> Batch<R> {
    /// Answers all callers of the queue, and wakes them.
    pub(crate) fn answer(self, answer: R) {
        self.end(Some(answer));
    }

    /// Ends the queue with this answer; a later answer has no effect.
    fn end(&self, answer: Option<R>) {
        let mut queue = lock(&self.queue);
        if queue.answer.is_some() {
            return;
        }
        queue.answer = Some(answer);
        let wakers = std::mem::take(&mut queue.wakers);
        drop(queue);
        // Woken outside all locks, because a waker runs foreign code.
        wakers.into_iter().flatten().for_each(Waker::wake);
    }
}

impl<R> Drop for Batch<R> {
    fn drop(&mut self) {
        self.end(None);
    }
}

/// The callers that receive one read's answer. They share one allocation and one lock, because there are many more callers than
/// reads.
struct ReadQueue<R> {
    answer: Option<Option<R>>,
    /// The wakers of the callers, by the `index` of their [`QueuedRead`], until there is an answer.
    wakers: Vec<Option<Waker>>,
    /// How many callers are still in the queue.
    awaiting: usize,
    /// The number of the [`BatchReader`] that reads for this queue.
    reader: usize,
}

impl<R> ReadQueue<R> {
    fn new() -> Self {
        Self { answer: None, wakers: Vec::new(), awaiting: 0, reader: 0 }
    }
}

/// A queued caller: a future of the answer, or of `None` if the reader was dropped.
///
/// # Cancel safety
///
/// Dropping it leaves the queue.
pub(crate) struct QueuedRead<R> {
    queue: Arc<Mutex<ReadQueue<R>>>,
    index: usize,
}

impl<R> QueuedRead<R> {
    fn enter(queue: Arc<Mutex<ReadQueue<R>>>, reader: usize) -> Self {
        let index = {
            let mut queue = lock(&queue);
            queue.reader = reader;
            queue.awaiting += 1;
            queue.wakers.push(None);
            queue.wakers.len() - 1
        };
        Self { queue, index }
    }
}

impl<R: Clone> Future for QueuedRead<R> {
    type Output = Option<R>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut queue = lock(&self.queue);
        if let Some(answer) = &queue.answer {
            return Poll::Ready(answer.clone());
        }
        let stale = match &mut queue.wakers[self.index] {
            Some(waker) if waker.will_wake(cx.waker()) => None,
            waker => waker.replace(cx.waker().clone()),
        };
        drop(queue);
        drop(stale);
        Poll::Pending
    }
}

impl<R> Drop for QueuedRead<R> {
    fn drop(&mut self) {
        let mut queue = lock(&self.queue);
        queue.awaiting -= 1;
        let waker = queue.wakers.get_mut(self.index).and_then(Option::take);
        drop(queue);
        drop(waker);
    }
}
