//! The algorithm, as one caller sees it. Knows no Redis and no HTTP.
//!
//! ```text
//! 1 key       request or caller -> CacheKey, or bypass straight to the loader
//! 2 look up   GET entry: fresh -> 8 | stale but servable -> 8 now, 3 to 7 in the background | else 3
//! 3 join      flight, this process: follower awaits its leader -> 8 | leader -> 4
//! 4 lease     all processes, one script: entry meanwhile there -> 8 | granted -> 6 | held -> 5
//! 5 wait      sleep until wake, lease timer, disconnect or deadline; then 4 again
//! 6 load      the loader in a spawned task; the lease is renewed at a third of its time
//! 7 commit    one script: if the token is mine -> SET entry, DEL lease, wake every waiting process
//!             failed -> the failure goes to the waiting wave; vanished -> the lease goes to one waiter
//! 8 response  the value
//! ```
//!
//! Each step is the file of its name; step 4 is `acquire`, and step 8 is here. Steps 4 to 7 run in the flight's own task, `leader`;
//! `contend` is the loop of steps 4 and 5, `lease` what a granted acquire leaves in hand. A look-up that finds a stale value begins the
//! load in the background by `refresh`. A caller whose process has a
//! flight for the key takes a seat on it without a look-up (3 before 2): the flight began with one that
//! found nothing, and one read per request is what the flight is there to prevent.

pub(crate) mod acquire;
pub(crate) mod bulkhead;
pub(crate) mod commit;
pub(crate) mod contend;
mod join;
pub(crate) mod leader;
pub(crate) mod lease;
mod load;
pub(crate) mod look_up;
mod queued_read;
pub(crate) mod refresh;
pub(crate) mod tag_check;
mod wait;

use tokio::time::Instant;

use crate::error::{Error, Failure};
use crate::guard_state::Seen;
use crate::key::flight::Lane;
use crate::loader::Loader;
use crate::loader::nesting::Loading;
use crate::observe::{self, Count};
use crate::policy::{OnStoreDown, OnWaitTimeout};
use crate::store::StoreError;
use crate::value::entry::Entry;
use crate::value::outcome::Ending;
use crate::value::reader::{Boxed, Open};
use join::Crowded;
use look_up::{Ask, Caller, Judged, Unread};
use queued_read::FirstRead;
use refresh::Refresh;

/// How many flights a caller joins before it loads for itself. A value that another caller has loaded is of no use to it where
/// it has another type, and a flight ends with its runtime. By the other reasons to join again it joins five at most: after a
/// look-up that failed, after a change that it may have seen, and after `wait_timeout` a load outside the lease, once each.
const ROUNDS: usize = 6;

/// What step 2 came to.
pub(crate) enum Looked<'a, V> {
    /// Step 8 from the store.
    Hit(V),
    /// The same, and a background load is due: bring a loader for it.
    Aging { value: V, stale: bool, refresh: Box<Refresh<'a>> },
    /// Step 8 with a stale value that nobody should load anew yet.
    Stale(V),
    /// No value, and no way to one.
    Failed(Failure),
    /// Nothing that can be served: bring a loader.
    Missing(Missing<'a>),
}

/// What a caller that brought its loader is answered.
pub(crate) enum Answer<V> {
    /// Step 8 from a load that somebody else led.
    /// With this caller's own loader, which was not needed.
    Coalesced(V, #[cfg_attr(not(feature = "http"), expect(dead_code, reason = "for HTTP variants"))] Loader),
    /// Step 8 with an older value, because the load failed or takes long; the loader where it was not used.
    Stale(
        V,
        #[cfg_attr(not(feature = "http"), expect(dead_code, reason = "for HTTP variants"))] Option<Loader>,
    ),
    /// This caller's own loader was used, and what it came to is wherever that loader put it. The
    /// ending says why there is nothing.
    Led(Ending),
    /// No value.
    Failed(Failure),
    /// This caller loads for itself, outside the protocol.
    Alone(Loader),
}

/// Steps 2 and, where a flight is on its way already, 3: is there something to serve?
///
/// # Cancel safety
///
/// Safe.
pub(crate) async fn look<'a, O: Open>(ask: Ask<'a>, open: &O) -> Looked<'a, O::Value> {
    let Ask { node, key, .. } = ask;
    let mut missing = Missing::new(Caller::new(ask));
    if Loading::current().is_some_and(|loading| loading.includes(node.store.place(), key)) {
        return Looked::Failed(Failure::Guard(Error::reentrant(key)));
    }
    // Shut down, the guard asks the store nothing more.
    if node.is_closed() || node.flights.any() && node.flights.has_kept(&missing.caller.flight(Lane::Lease)) {
        return Looked::Missing(missing);
    }
    let (read, first) = missing.caller.look_up::<O::Room>().await;
    missing.first = first;
    match missing.caller.judge(read, open) {
        Judged::Hit { value, stale, refresh: true } => {
            let refresh = Box::new(Refresh { caller: missing.caller });
            return Looked::Aging { value, stale, refresh };
        }
        Judged::Hit { value, stale: true, .. } => return Looked::Stale(value),
        Judged::Hit { value, .. } => return Looked::Hit(value),
        Judged::Down(error) => return Looked::Failed(Failure::Guard(error)),
        Judged::Marked => missing.lane = Lane::Heal,
        Judged::Unread => missing.unread = Unread::Unjudged,
        Judged::Miss => missing.lane = missing.caller.lane(|entry| open.leads_others(entry)),
    }
    Looked::Missing(missing)
}

/// Step 2 for a caller that wants a load whatever there is.
///
/// # Cancel safety
///
/// Safe.
pub(crate) async fn look_past(ask: Ask<'_>) -> Result<Missing<'_>, Failure> {
    let Ask { node, policy, key } = ask;
    let mut caller = Caller::new(ask);
    if Loading::current().is_some_and(|loading| loading.includes(node.store.place(), key)) {
        return Err(Failure::Guard(Error::reentrant(key)));
    }
    if node.is_closed() {
        return Ok(Missing::new(caller));
    }
    let (read, first) = caller.look_up::<Boxed>().await;
    let unread = match read.error() {
        Some(error) if policy.on_store_down == OnStoreDown::FailClosed => {
            return Err(Failure::Guard(Error::store("looking up the entry", key, error.clone())));
        }
        Some(_) => Unread::Unwanted,
        None => Unread::No,
    };
    caller.looked = read.is_answered();
    caller.seen = read.into_seen(key).map(Box::new);
    caller.budget.spend(caller.started);
    let lane = caller.lane(|_| false);
    Ok(Missing { caller, first, lane, unread })
}

/// Step 2 alone: the entry, whatever it is worth; `None` too where it is unreadable.
///
/// # Cancel safety
///
/// Safe.
pub(crate) async fn read_entry(ask: Ask<'_>) -> Result<Option<Entry>, StoreError> {
    let caller = Caller::new(ask);
    let read = caller.look_up_anyway::<Boxed>().await;
    match read.error() {
        Some(error) => Err(error.clone()),
        None => Ok(read.into_seen(ask.key).and_then(|seen| seen.value)),
    }
}

/// Step 2 alone: what is there to serve, if anything.
///
/// # Cancel safety
///
/// Safe.
pub(crate) async fn peek<O: Open>(ask: Ask<'_>, open: &O) -> Result<Option<O::Value>, StoreError> {
    let mut caller = Caller::new(ask);
    let read = caller.look_up_anyway::<O::Room>().await;
    if let Some(error) = read.error() {
        return Err(error.clone());
    }
    match caller.judge(read, open) {
        Judged::Hit { value, .. } => Ok(Some(value)),
        Judged::Miss | Judged::Unread | Judged::Marked | Judged::Down(_) => Ok(None),
    }
}

/// A caller for whom there is nothing in the store.
pub(crate) struct Missing<'a> {
    caller: Caller<'a>,
    /// Held until this caller has a seat, so that those queued behind its read find the flight.
    first: Option<FirstRead<'a>>,
    /// Where to join.
    lane: Lane,
    unread: Unread,
}

impl<'a> Missing<'a> {
    fn new(caller: Caller<'a>) -> Self {
        Self { caller, first: None, lane: Lane::Lease, unread: Unread::No }
    }

    /// Makes this caller one that neither waits for others nor is followed.
    #[cfg(feature = "http")]
    pub(crate) fn unattended(mut self) -> Self {
        self.lane = Lane::Heal;
        self
    }

    /// Whether the store has answered its look-up.
    #[cfg(feature = "http")]
    pub(crate) fn has_looked(&self) -> bool {
        self.caller.looked
    }

    /// Step 2 once more: what is stored is no older than this. Answers the caller, or leaves it to join again.
    async fn look_again<O: Open>(&mut self, open: &O) -> Option<Result<(O::Value, bool), Failure>> {
        let asked = Instant::now();
        let looked = Box::pin(look(self.caller.ask, open)).await;
        self.caller.budget.spend(asked);
        match looked {
            Looked::Hit(value) => Some(Ok((value, false))),
            Looked::Stale(value) => Some(Ok((value, true))),
            Looked::Aging { value, stale, .. } => Some(Ok((value, stale))),
            Looked::Failed(failure) => Some(Err(failure)),
            Looked::Missing(missing) => {
                (self.first, self.lane, self.unread) = (missing.first, missing.lane, missing.unread);
                (self.caller.seen, self.caller.looked) = (missing.caller.seen, missing.caller.looked);
                None
            }
        }
    }

    /// Steps 3 to 8: joins or starts a flight and awaits its end.
    ///
    /// # Cancel safety
    ///
    /// Dropping it takes this caller away; whatever it began goes on without it.
    pub(crate) async fn load<O: Open>(mut self, open: &O, mut loader: Loader) -> Answer<O::Value> {
        for _ in 0..ROUNDS {
            let seated = Instant::now();
            // 3 join
            let (mut follower, leads) = match self.caller.join(self.lane, loader) {
                Ok(joined) => joined,
                Err(no_seat) => {
                    return match self.caller.crowded_out(open, no_seat).await {
                        Crowded::Stale(value, own) => Answer::Stale(value, Some(own)),
                        Crowded::Alone(own) => Answer::Alone(own),
                        Crowded::Shed(failure) => Answer::Failed(failure),
                    };
                }
            };
            drop(self.first.take());
            if self.lane == Lane::Heal
                && !leads
                && let Some(own) = follower.take_loader()
            {
                // Nobody queues for a resource that was uncacheable; one at a time finds out
                // whether it still is.
                return Answer::Alone(own);
            }
            let (ending, mut own) = tokio::select! {
                biased;
                ended = self.caller.await_ending(&mut follower, leads || self.lane == Lane::Beside) => ended,
                stand_in = self.caller.soft_timeout(open) => {
                    // Its loader may run yet; it waits no longer.
                    if follower.amend_loader(|loader| loader.since = None) {
                        observe::waited(seated.elapsed());
                    }
                    follower.stop_waiting();
                    self.caller.ask.node.count(Count::soft_timeouts);
                    return Answer::Stale(stand_in, None);
                }
            };
            // The seat is another's.
            drop(follower);
            if own.is_some() {
                waited(seated, leads, &ending);
            }
            if let Ending::Value(entry) | Ending::Stale(entry) = &ending
                && self.caller.would_have_passed(open, entry, self.unread)
                && let Some(own) = own.take()
            {
                (self.unread, loader) = (Unread::No, own);
                self.caller.seen = Some(Box::new(Seen::entry(entry.clone(), self.caller.ask.key)));
                self.lane = self.caller.lane(|entry| open.leads_others(entry));
                continue;
            }
            if let Ending::Stale(entry) = &ending
                && self.caller.takes(open, entry)
                && let Some(value) = open.open(&mut entry.clone(), self.caller.now())
            {
                return Answer::Stale(value, own);
            }
            let Some(own) = own else {
                return Answer::Led(ending);
            };
            loader = own;
            // 8 response
            match ending {
                Ending::Value(mut entry) => {
                    match open.open(&mut entry, self.caller.now()) {
                        Some(value) => return Answer::Coalesced(value, loader),
                        // Not what this caller wants: a load that gives that is worth a try.
                        None => self.caller.seen = Some(Box::new(Seen::entry(entry, self.caller.ask.key))),
                    }
                }
                Ending::Arriving(value) => {
                    return match open.open_arriving(&value.0) {
                        Some(value) => Answer::Coalesced(value, loader),
                        None => Answer::Alone(loader),
                    };
                }
                Ending::Failed(failure) => return failed(failure, self.caller.stand_in(open), loader),
                // What the flight came to may be older than a change that this caller has seen. What is stored is not.
                Ending::Invalidated if self.lane == Lane::Lease => match self.look_again(open).await {
                    Some(Ok((value, true))) => return Answer::Stale(value, Some(loader)),
                    Some(Ok((value, false))) => return Answer::Coalesced(value, loader),
                    Some(Err(failure)) => return Answer::Failed(failure),
                    None => {}
                },
                Ending::Invalidated | Ending::Abandoned => {}
                // Long enough. What may stand in has not been read by who took a seat without a look-up.
                Ending::WaitedOut => {
                    Box::pin(self.caller.see()).await;
                    match self.caller.ask.policy.on_wait_timeout {
                        // Once per process, outside the lease.
                        OnWaitTimeout::Load => self.lane = Lane::Beside,
                        OnWaitTimeout::Fail => {
                            return failed(self.caller.waited_out(), self.caller.stand_in(open), loader);
                        }
                    }
                }
                // It stands in for others, and this caller will not have it.
                Ending::Stale(_) if !open.goes_on_alone() => return Answer::Failed(ending.into_failure()),
                Ending::Stale(_) | Ending::Uncacheable | Ending::Gone => return Answer::Alone(loader),
            }
        }
        Answer::Alone(loader)
    }
}

/// Notes a wait for somebody else's load, however it ended. (That of a caller whose own loader was used in the end is
/// noted where that begins.)
fn waited(seated: Instant, leads: bool, ending: &Ending) {
    if !(leads && ending.is_refusal()) {
        observe::waited(seated.elapsed());
    }
}

/// A failure, or what stands in for the value.
fn failed<V>(failure: Failure, stand_in: Option<V>, loader: Loader) -> Answer<V> {
    match stand_in {
        Some(value) => Answer::Stale(value, Some(loader)),
        None => Answer::Failed(failure),
    }
}
