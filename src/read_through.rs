//! The algorithm, as one caller sees it. Knows no Redis and no HTTP.
//!
//! ```text
//! 1 key       request or caller -> CacheKey, or bypass straight to the loader
//! 2 look up   GET entry: fresh -> 8 | else 3
//! 3 join      flight, this process: follower awaits its leader -> 8 | leader -> 4
//! 4 lease     all processes, one script: entry meanwhile there -> 8 | granted -> 6 | held -> 5
//! 5 wait      sleep until wake, lease timer, disconnect or deadline; then 4 again
//! 6 load      the loader in a spawned task; the lease is renewed at a third of its time
//! 7 commit    one script: if the token is mine -> SET entry, DEL lease, wake every waiting process
//!             failed -> the failure goes to the waiting wave; vanished -> the lease goes to one waiter
//! 8 response  the value
//! ```
//!
//! Steps 4 to 7 are `lead` and `lease`: they run in the flight's own task. A caller whose process has a
//! flight for the key takes a seat on it without a look-up (3 before 2): the flight began with one that
//! found nothing, and one read per request is what the flight is there to prevent.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::time::{Instant, sleep_until, timeout};

use crate::ending::Ending;
use crate::entry::{Entry, Kind};
use crate::error::{Error, ErrorKind, Failure};
use crate::key::{Hashed, Key};
use crate::lead::Lead;
use crate::look_up::{Duty, Entered, First};
use crate::node::{
    Budget, FlightKey, Follower, Joined, Lane, Loader, Loading, LookedUp, Node, Open, Opened, SharedRead,
    Stored,
};
use crate::observe::{self, Count};
use crate::policy::{OnStoreDown, OnWaitTimeout, Policy};
use crate::store::{StoreError, StoreErrorKind};

/// How often a value is met that this caller can not use (not of its type) before it loads for itself.
const ROUNDS: usize = 3;

/// What step 2 came to.
pub(crate) enum Looked<'a, V> {
    /// Step 8 from the store.
    Hit(V),
    /// No value, and no way to one.
    Failed(Failure),
    /// Nothing that can be served: bring a loader.
    Missing(Missing<'a>),
}

/// What a caller that brought its loader is answered.
pub(crate) enum Answer<V> {
    /// Step 8 from a load that somebody else led.
    Coalesced(V),
    /// This caller's own loader was used, and what it came to is wherever that loader put it. The
    /// ending says why there is nothing.
    Led(Ending),
    /// No value.
    Failed(Failure),
    /// This caller loads for itself, outside the protocol.
    Alone(Loader),
}

/// One caller's question.
#[derive(Clone, Copy)]
pub(crate) struct Ask<'a> {
    pub(crate) node: &'a Arc<Node>,
    pub(crate) policy: &'a Arc<Policy>,
    pub(crate) key: &'a Key,
}

/// Steps 2 and, where a flight is on its way already, 3: is there something to serve?
///
/// # Cancel safety
///
/// Safe.
pub(crate) async fn look<'a, O: Open>(ask: Ask<'a>, open: &O) -> Looked<'a, O::Value> {
    let Ask { node, policy, key } = ask;
    let mut missing = Missing {
        caller: Caller { ask, started: Instant::now(), budget: policy.budget(), seen: None },
        first: None,
        lane: Some(Lane::Lease),
    };
    if node.is_closed() {
        missing.lane = None;
        return Looked::Missing(missing);
    }
    if Loading::current().is_some_and(|loading| loading.includes(node, key)) {
        return Looked::Failed(Failure::Guard(Error::reentrant(key)));
    }
    if node.flights.any() && node.flights.has(&missing.caller.flight(Lane::Lease)) {
        return Looked::Missing(missing);
    }
    let (read, first) = missing.caller.look_up().await;
    missing.first = first;
    match missing.caller.judge(read, open) {
        Judged::Hit(value) => return Looked::Hit(value),
        Judged::Down(error) => return Looked::Failed(Failure::Guard(error)),
        Judged::Marked => missing.lane = Some(Lane::Heal),
        Judged::Miss => {}
    }
    Looked::Missing(missing)
}

/// Step 2 alone: what is there to serve, if anything.
///
/// # Cancel safety
///
/// Safe.
pub(crate) async fn peek<O: Open>(ask: Ask<'_>, open: &O) -> Result<Option<O::Value>, StoreError> {
    let mut caller = Caller { ask, started: Instant::now(), budget: ask.policy.budget(), seen: None };
    let (read, _first) = caller.look_up().await;
    if let Read::Own(Err(error)) | Read::Shared(Err(error)) = read {
        return Err(error);
    }
    match caller.judge(read, open) {
        Judged::Hit(value) => Ok(Some(value)),
        Judged::Miss | Judged::Marked | Judged::Down(_) => Ok(None),
    }
}

/// A caller for whom there is nothing in the store.
pub(crate) struct Missing<'a> {
    caller: Caller<'a>,
    /// Held until this caller has a seat, so that those queued behind its read find the flight.
    first: Option<FirstRead<'a>>,
    /// Where to join; `None` to load alone.
    lane: Option<Lane>,
}

impl Missing<'_> {
    /// Steps 3 to 8: joins or starts a flight and awaits its end.
    ///
    /// # Cancel safety
    ///
    /// Dropping it takes this caller away; whatever it began goes on without it.
    pub(crate) async fn load<O: Open>(self, open: &O, mut loader: Loader) -> Answer<O::Value> {
        let Self { mut caller, mut first, lane } = self;
        let Some(lane) = lane else {
            return Answer::Alone(loader);
        };
        for _ in 0..ROUNDS {
            // 3 join
            let (mut follower, leads) = match caller.join(lane, loader) {
                Ok(joined) => joined,
                Err(loader) => return Answer::Alone(loader),
            };
            drop(first.take());
            if lane == Lane::Heal
                && !leads
                && let Some(own) = follower.take_loader()
            {
                // Nobody queues for a resource that was uncacheable; one at a time finds out
                // whether it still is.
                return Answer::Alone(own);
            }
            let ending = caller.await_ending(&mut follower, leads).await.unwrap_or(Ending::WaitedOut);
            let Some(own) = follower.take_loader() else {
                return Answer::Led(ending);
            };
            loader = own;
            // 8 response
            match ending {
                Ending::Value(mut entry) => match open.open(&mut entry, caller.now()) {
                    Some(value) => return caller.coalesced(value),
                    // Not what this caller wants: a load that gives that is worth a try.
                    None => caller.seen = Some(entry.encode(caller.ask.key)),
                },
                Ending::Failed(failure) => return Answer::Failed(failure),
                Ending::WaitedOut => return caller.beside(loader, open).await,
                Ending::Uncacheable | Ending::Gone => return Answer::Alone(loader),
            }
        }
        Answer::Alone(loader)
    }
}

/// One caller on its way.
struct Caller<'a> {
    ask: Ask<'a>,
    started: Instant,
    budget: Budget,
    /// Stored bytes that this caller has read and can not use.
    seen: Option<Bytes>,
}

type FirstRead<'a> = First<'a, Key, LookedUp, Hashed>;

/// What a read found: for this caller alone, or for all who were in its queue.
enum Read {
    Own(Result<Option<Stored>, StoreError>),
    Shared(LookedUp),
}

async fn read(node: &Node, key: &Key, within: Duration) -> Result<Option<Stored>, StoreError> {
    match node.store.look_up(key, within).await {
        Ok(raw) => Ok(raw.map(|raw| Stored::decode(node, raw, key))),
        Err(error) => {
            node.count(Count::store_errors);
            Err(error)
        }
    }
}

/// Reads for those who queue for a key, until nobody does. A task of its own: a caller that is alive and not
/// polled must not hold up the others.
async fn read_for_queue(node: Arc<Node>, mut duty: Duty<Key, LookedUp, Hashed>, within: Duration) {
    let key = duty.key().clone();
    let flight = FlightKey { key: key.clone(), lane: Lane::Lease };
    // The lone read in front of the queue may have found nothing and begin a flight, whose acquire
    // reads again; then there is no need to.
    let _ = timeout(within, duty.first_ended()).await;
    while let Some(batch) = duty.next() {
        let looked_up = if node.flights.has(&flight) {
            Ok(None)
        } else {
            let shared = |stored| Arc::new(SharedRead { stored, opened: Opened::new() });
            read(&node, &key, within).await.map(|stored| stored.map(shared))
        };
        batch.answer(&looked_up);
        // Those who were answered may ask again at once: let them, and answer them together.
        tokio::task::yield_now().await;
    }
}

/// What a look-up means to this caller.
enum Judged<V> {
    Hit(V),
    Miss,
    Marked,
    Down(Error),
}

impl<'a> Caller<'a> {
    /// The store's clock when this caller came: one look at a clock per hit is enough.
    fn now(&self) -> u64 {
        self.ask.node.store.clock_at(self.started)
    }

    fn flight(&self, lane: Lane) -> FlightKey {
        FlightKey { key: self.ask.key.clone(), lane }
    }

    /// Step 2. Those who ask at the same moment share a read. A lone caller is also given what holds back
    /// those who queue behind it.
    async fn look_up(&mut self) -> (Read, Option<FirstRead<'a>>) {
        let Ask { node, key, .. } = self.ask;
        let Some(within) = self.budget.next() else {
            return (Read::Own(Err(StoreError::new(StoreErrorKind::TimedOut))), None);
        };
        match node.look_ups.enter(key) {
            Entered::First(first) => (Read::Own(read(node, key, within).await), Some(first)),
            Entered::Queued(queued, duty) => {
                if let Some(duty) = duty {
                    tokio::spawn(read_for_queue(Arc::clone(node), duty, within));
                }
                let nothing = || Err(StoreError::new(StoreErrorKind::Unavailable));
                (Read::Shared(queued.await.unwrap_or_else(nothing)), None)
            }
        }
    }

    fn judge<O: Open>(&mut self, read: Read, open: &O) -> Judged<O::Value> {
        let Ask { node, policy, key } = self.ask;
        let now = self.now();
        let marked = |entry: &Entry| entry.kind == Kind::Marker && entry.is_fresh(now);
        let entry = match read {
            Read::Own(Ok(Some(Stored::Entry(mut entry)))) => {
                if entry.kind == Kind::Value
                    && entry.is_fresh(now)
                    && let Some(value) = open.open(&mut entry, now)
                {
                    return Judged::Hit(value);
                }
                entry
            }
            Read::Own(Ok(Some(Stored::Unreadable(raw)))) => return self.missed(Some(raw)),
            Read::Shared(Ok(Some(shared))) => match &shared.stored {
                Stored::Entry(entry) => {
                    if entry.kind == Kind::Value
                        && entry.is_fresh(now)
                        && let Some(value) = open.open_shared(entry, now, &shared.opened)
                    {
                        return Judged::Hit(value);
                    }
                    entry.clone()
                }
                Stored::Unreadable(raw) => return self.missed(Some(raw.clone())),
            },
            Read::Own(Ok(None)) | Read::Shared(Ok(None)) => return self.missed(None),
            Read::Own(Err(error)) | Read::Shared(Err(error)) => {
                if policy.on_store_down == OnStoreDown::FailClosed {
                    return Judged::Down(Error::store("looking up the entry", key, error));
                }
                return self.missed(None);
            }
        };
        let seen = entry.encode(key);
        if marked(&entry) {
            self.seen = Some(seen);
            return Judged::Marked;
        }
        if entry.is_fresh(now) {
            // Sound, and not what this caller wants.
            node.count(Count::unreadable);
        }
        self.missed(Some(seen))
    }

    fn missed<V>(&mut self, seen: Option<Bytes>) -> Judged<V> {
        self.seen = seen;
        self.budget.spend(self.started);
        Judged::Miss
    }

    /// Step 3: a seat, and whether this caller leads; the loader back if there are too many flights.
    fn join(&self, lane: Lane, loader: Loader) -> Result<(Follower, bool), Loader> {
        let Ask { node, policy, .. } = self.ask;
        let flight = self.flight(lane);
        match node.flights.join(&flight, loader, Ending::Gone) {
            Joined::Leader(leader, follower) => {
                let (node, policy) = (Arc::clone(node), Arc::clone(policy));
                let (seen, budget) = (self.seen.clone(), self.budget);
                Lead { node, policy, flight, leader, seen, budget }.start();
                Ok((follower, true))
            }
            Joined::Follower(follower) => Ok((follower, false)),
            Joined::Full(loader) => Err(loader),
        }
    }

    /// Waits for the flight's end; `None` if this caller has waited long enough for somebody else's load.
    async fn await_ending(&self, follower: &mut Follower, leads: bool) -> Option<Ending> {
        if leads {
            // The flight's own bounds end this: of waiting for the lease, and of the load.
            return Some(follower.await);
        }
        tokio::select! {
            biased;
            ending = &mut *follower => return Some(ending),
            () = sleep_until(self.started + self.ask.policy.wait_timeout) => {}
        }
        // A caller whose own loader the flight has gone on with is not waiting for somebody else.
        if follower.has_loader() { None } else { Some(follower.await) }
    }

    fn coalesced<V>(&self, value: V) -> Answer<V> {
        observe::waited(self.started.elapsed());
        Answer::Coalesced(value)
    }

    /// Having waited long enough: once per process, outside the lease.
    async fn beside<O: Open>(&self, loader: Loader, open: &O) -> Answer<O::Value> {
        let Ask { policy, key, .. } = self.ask;
        if policy.on_wait_timeout == OnWaitTimeout::Fail {
            let text = format!(
                "somebody else's load of key #{} took longer than wait_timeout ({:?})",
                key.digest(),
                policy.wait_timeout
            );
            return Answer::Failed(Failure::Guard(Error::new(ErrorKind::Timeout, text)));
        }
        let mut follower = match self.join(Lane::Beside, loader) {
            Ok((follower, _)) => follower,
            Err(loader) => return Answer::Alone(loader),
        };
        // Bounded by the load's own timeout.
        let ending = (&mut follower).await;
        let Some(loader) = follower.take_loader() else {
            return Answer::Led(ending);
        };
        match ending {
            Ending::Value(mut entry) => match open.open(&mut entry, self.now()) {
                Some(value) => self.coalesced(value),
                None => Answer::Alone(loader),
            },
            Ending::Failed(failure) => Answer::Failed(failure),
            Ending::Uncacheable | Ending::WaitedOut | Ending::Gone => Answer::Alone(loader),
        }
    }
}
