//! The task of one flight: contend for the lease, load, end. Steps 4 to 6; `commit` is step 7.
//!
//! It belongs to no caller. Whoever leaves, the leader's caller included, leaves a seat; the
//! task goes on, because the work is paid for and the next request wants the value.

use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::acquire::{Contended, Contender};
use super::bulkhead;
use super::contend::contend;
use super::lease::Lease;
use super::load::{Lead, LoadStart, Run, let_go_since};
use crate::error::{Error, Failure};
use crate::guard_state::Leader;
use crate::key::flight::Lane;
use crate::loader::nesting::Turn;
use crate::loader::{LoadResult, Loaded};
use crate::lock::Permit;
use crate::observe::{self, Count};
use crate::policy::OnStoreDown;
use crate::store::{StoreError, StoreErrorKind};
use crate::value::outcome::Ending;

/// How often a vanished load is taken over in one wave before the wave is told.
const MOST_HOPS: u8 = 3;

impl Lead {
    /// Sets the flight going. Its end frees everyone seated on it, also if its runtime drops it.
    pub(crate) fn start(self) {
        tokio::spawn(self.task());
    }

    /// The flight's task, which counts from now on.
    fn task(self) -> impl Future<Output = ()> + Send {
        // What begins in a process that ends is waited for by its callers, not by the shutdown.
        let running = (!self.node.is_closed()).then(|| self.node.tasks.enter());
        async move {
            let stands_for = self.run().await;
            // It does nothing from here on, so a shutdown need not wait for it.
            drop(running);
            if let Some((leader, pause)) = stands_for {
                sleep(pause).await;
                leader.finish(Ending::Gone);
            }
        }
    }

    /// What is left to do: to stand for the process while somebody else refreshes, so that its callers need
    /// not ask the store about it, one by one.
    async fn run(mut self) -> Option<(Leader, Duration)> {
        let lease = match self.flight.lane {
            Lane::Beside => None,
            Lane::Lease | Lane::Heal | Lane::Anew if self.node.is_closed() => {
                self.load_for_a_process_that_ends().await;
                return None;
            }
            Lane::Lease | Lane::Heal | Lane::Refresh | Lane::Anew => match self.contend().await {
                Contended::Leased(lease) => Some(lease),
                Contended::Ended { ending, asked } => {
                    if ending.has_value() {
                        // A caller that came later may have seen a change which came after what was found.
                        self.leader.detach();
                        let_go_since(&self.leader, asked);
                    }
                    return self.finish(ending);
                }
                Contended::WaitedOut => return self.finish(Ending::WaitedOut),
                Contended::Busy(remaining) if self.flight.lane == Lane::Refresh => {
                    return Some((self.leader, remaining.min(self.policy.lease)));
                }
                Contended::Busy(_) => return self.finish(Ending::Gone),
                Contended::Leaving if self.flight.lane != Lane::Refresh => {
                    self.load_for_a_process_that_ends().await;
                    return None;
                }
                Contended::Leaving => return self.finish(Ending::Gone),
                // Every process would refresh for itself, what nobody waits for.
                Contended::StoreDown(_) if self.flight.lane == Lane::Refresh => {
                    return self.finish(Ending::Gone);
                }
                Contended::StoreDown(error) => match self.policy.on_store_down {
                    OnStoreDown::FailOpen => {
                        // It hears of nothing that happens to the key. A server that is there and refuses, for now or
                        // for good, would refuse the next one too.
                        let refused =
                            [StoreErrorKind::Refused, StoreErrorKind::Transient].contains(&error.kind);
                        self.leader.go_adrift(!refused);
                        self.load_without_the_store(error).await;
                        return None;
                    }
                    OnStoreDown::FailClosed => {
                        let error = Error::store("acquiring the lease", &self.flight.key, error);
                        return self.finish(Ending::Failed(Failure::Guard(error)));
                    }
                },
            },
        };
        self.load_in_turn(lease).await;
        None
    }

    /// For this process alone, if it has room for one more such load. Without a permit: nobody can be asked for one.
    async fn load_without_the_store(self, error: StoreError) {
        let (most, turn) = (self.policy.max_fail_open_loads, self.node.place_turn());
        let is_within = self.holds(&turn);
        let place = if is_within { None } else { self.node.fail_open.try_enter(most) };
        if place.is_none() && !is_within {
            self.node.count(Count::overloaded);
            let failure = LoadResult::Failed(Failure::Guard(Error::crowded_out(&self.flight.key, most)));
            return self.end(failure.into(), Duration::ZERO, LoadStart::none(), None).await;
        }
        self.node.count(Count::fail_open_loads);
        if self.policy.max_concurrent_loads.is_some() {
            bulkhead::tell_uncapped(&self.node, &self.flight.key, &error);
        }
        self.load_and_end(None, None, place.is_some().then_some(turn)).await;
    }

    /// Once for all callers that wait in this process: it takes no lease and no permit any more, which it might not give back.
    async fn load_for_a_process_that_ends(self) {
        if !self.leader.is_joinable() {
            // An invalidation has made it one of several that wait: their callers meet on the one that is left, or on a new one.
            return self.leader.finish(Ending::Invalidated);
        }
        self.leader.go_adrift(false);
        self.load_and_end(None, None, None).await;
    }

    fn finish<T>(self, ending: Ending) -> Option<T> {
        self.leader.finish(ending);
        None
    }

    async fn contend(&mut self) -> Contended {
        let (leader, wait_timeout) = (&self.leader, self.policy.wait_timeout);
        // The first caller has waited for as long as it should. The others came later and leave by their own clocks; whoever
        // is seated once the flight can not be joined any more is one of them.
        let goes_on = || {
            leader.leave_first(Ending::WaitedOut);
            let is_awaited = leader.is_awaited() || {
                leader.detach();
                leader.is_awaited()
            };
            is_awaited.then(|| Instant::now() + wait_timeout)
        };
        contend(Contender {
            node: &self.node,
            key: &self.flight.key,
            policy: &self.policy,
            queue: matches!(self.flight.lane, Lane::Lease | Lane::Anew),
            seen: &mut self.seen,
            budget: &mut self.budget,
            tags: &self.policy.tag_keys(&self.node.namespace),
            since: self.node.store.now(),
            deadline: Instant::now() + wait_timeout,
            goes_on: &goes_on,
        })
        .await
    }

    /// The lease first, then the permit; given back in reverse.
    async fn load_in_turn(self, mut lease: Option<Lease>) {
        match self.admit(&mut lease).await.map(Option::unzip) {
            Ok((permit, turn)) => self.load_and_end(lease, permit, turn).await,
            Err(failure) => {
                let shed = Loaded::from(LoadResult::Failed(failure));
                self.end(shed, Duration::ZERO, LoadStart::none(), lease).await;
            }
        }
    }

    /// Step 6, as often as a loader vanishes and another caller's can go on under the same lease.
    async fn load_and_end(self, mut lease: Option<Lease>, permit: Option<Permit>, turn: Option<Turn>) {
        let mut hops = lease.as_ref().map_or(0, Lease::hops);
        // When others' loads were out of the way, if this wave had to wait for one.
        let mut waited_until = lease.as_ref().and_then(Lease::waited_until);
        let mut vanished = false;
        loop {
            let Some((loader, seat)) = self.leader.next_loader() else {
                // Everyone here has left, or has seen a loader vanish: others may go on, also those who load something else and
                // need not wait for the store to hear of this.
                drop(permit);
                if let Some(lease) = lease
                    && lease.hand_over(hops).await
                    && vanished
                {
                    self.node.count(Count::takeovers);
                }
                return self.leader.finish(Ending::Gone);
            };
            if vanished {
                self.node.count(Count::takeovers);
            }
            if let (Some(since), Some(until)) = (loader.since, waited_until)
                && until > since
            {
                observe::waited(until - since);
            }
            let start = self.load_start().await;
            match self.load(loader, turn.clone(), &mut lease).await {
                Run::Loaded(loaded, took) => {
                    drop(permit);
                    return self.end(*loaded, took, start, lease).await;
                }
                Run::TimedOut => {
                    drop(permit);
                    let took = self.policy.load_timeout;
                    let error = Error::load_timeout(&self.flight.key, took);
                    let failure = LoadResult::Failed(Failure::Guard(error));
                    return self.end(failure.into(), took, start, lease).await;
                }
                Run::Vanished(failure) => {
                    hops += 1;
                    if hops > MOST_HOPS {
                        drop(permit);
                        let failed = Loaded::from(LoadResult::Failed(failure));
                        return self.end(failed, Duration::ZERO, start, lease).await;
                    }
                    vanished = true;
                    waited_until = Some(Instant::now());
                    let stand_in =
                        self.stand_in(self.node.store.now()).map(|(older, _)| Ending::Stale(older));
                    if stand_in.is_some() {
                        self.node.count(Count::stand_ins);
                    }
                    seat.tell(stand_in.unwrap_or(Ending::Failed(failure)));
                }
            }
        }
    }
}

#[cfg(all(test, feature = "testing"))]
#[path = "../../tests/unit/read_through/leader_tests.rs"]
mod tests;
