//! [`MissHandler`]: a request that was no plain hit, on its way to an answer from a flight or from a load of its own.

use std::panic::resume_unwind;
use std::sync::Arc;

use http::{Response, StatusCode};
use tokio::sync::oneshot;

use super::answer_info::{tell, tell_forwarded};
use super::body::GuardedBody;
use super::cache_status::{CacheStatus, StandIn, write_stand_in};
use super::load_request::{ClientAnswer, LoadRequest, Progress, Purpose};
use super::respond::{LookUpKey, ResponseReader, StoredAnswer, VariantPlace, own_answer};
use crate::error::{ErrorKind, Failure};
use crate::guard::StampedeGuard;
use crate::guard::outcome::Times;
use crate::key::Key;
use crate::loader::Loader;
use crate::observe::Outcome;
use crate::read_through::alone::run_alone;
use crate::read_through::call::{Call, CallState, LookUpState};
use crate::read_through::look_up::{Lookup, look};
use crate::read_through::miss::MissOutcome;

/// A request with its loader and the receiver of that loader's answer.
pub(super) struct MissHandler<'a, B, E> {
    pub(super) guard: &'a StampedeGuard,
    pub(super) wanted: &'a Arc<LoadRequest>,
    /// The request's own answer, if its own loader runs.
    pub(super) head: oneshot::Receiver<ClientAnswer<B, E>>,
}

/// The outcome at one key.
pub(super) enum MissStep<B, E> {
    Answered(ClientAnswer<B, E>),
    /// The stored response is another variant than this request's.
    Elsewhere(Box<VariantPlace>, Loader),
}

impl<B, E> MissHandler<'_, B, E> {
    pub(super) fn wants<'w>(
        &'w self,
        at: LookUpKey<'w>,
        status: fn(u64) -> CacheStatus,
    ) -> ResponseReader<'w> {
        let LoadRequest { asked, headers, .. } = &**self.wanted;
        let (_, policy) = self.guard.parts();
        ResponseReader { asked, headers, http: &policy.http, at, status }
    }

    /// Steps 3 to 8 at one place.
    pub(super) async fn answer(
        &mut self,
        at: LookUpKey<'_>,
        key: &Key,
        lookup: Lookup<'_, StoredAnswer>,
        loader: Loader,
    ) -> MissStep<B, E> {
        let (found, outcome, loader) = match lookup {
            Lookup::Hit { value, stale, refresh } => {
                let is_response = matches!(value, StoredAnswer::Response(_));
                let outcome =
                    if stale && (is_response || refresh.is_none()) { Outcome::Stale } else { Outcome::Hit };
                match refresh {
                    // The request that triggered the refresh lends its loader; its own answer is the stored response.
                    Some(caller) if is_response => {
                        self.wanted.set_purpose(Purpose::Refresh);
                        caller.refresh(loader, !stale);
                        (value, outcome, None)
                    }
                    // If the entry belongs to another variant, requests for that variant refresh it.
                    _ => (value, outcome, Some(loader)),
                }
            }
            Lookup::LocalHit(value) => (value, Outcome::LocalHit, Some(loader)),
            Lookup::Failed(failure) => return MissStep::Answered(Ok(failed(self.guard, key, failure))),
            Lookup::Miss(caller) => match self.load(at, key, caller, loader).await {
                LoadedAnswer::Found(found, outcome, loader) => (found, outcome, loader),
                LoadedAnswer::Answered(answered) => return MissStep::Answered(answered),
            },
        };
        let http = &self.guard.parts().1.http;
        match (found, loader) {
            (StoredAnswer::Response(replay), _) => {
                self.guard.count_answer(key, outcome);
                MissStep::Answered(Ok(replay.respond(http, outcome)))
            }
            (StoredAnswer::Arriving(arrival), _) => {
                self.guard.count_answer(key, outcome);
                MissStep::Answered(Ok(arrival.respond(http, outcome)))
            }
            (StoredAnswer::Elsewhere(place), Some(loader)) => MissStep::Elsewhere(place, loader),
            (StoredAnswer::NotForThis, Some(loader)) => {
                MissStep::Answered(self.alone(key, loader, CacheStatus::bypass("credentials")).await)
            }
            // The loader was used by the flight, and its result does not suit this request.
            (StoredAnswer::Elsewhere(_) | StoredAnswer::NotForThis, None) => MissStep::Answered(
                self.own(key).unwrap_or_else(|| Ok(failed(self.guard, key, Failure::vanished()))),
            ),
        }
    }

    /// Steps 3 to 8 if nothing usable is stored.
    async fn load(
        &mut self,
        at: LookUpKey<'_>,
        key: &Key,
        caller: CallState<'_>,
        loader: Loader,
    ) -> LoadedAnswer<B, E> {
        let (state, policy) = self.guard.parts();
        let asked = &self.wanted.asked;
        let apart;
        let caller = if asked.ranged {
            // Each request wants another part, so none waits for another's load.
            caller.unattended()
        } else if asked.has_credentials() {
            // Leave the flight of the resource: callers behind this one must not wait for it.
            drop(caller);
            // Coalesce with other requests that have credentials, under a separate key: their response may not be
            // shareable.
            self.wanted.store_at(key);
            apart = key.derived("~a");
            let ask = Call { state, policy, key: &apart };
            match look(ask, &self.wants(at, CacheStatus::collapsed)).await {
                Lookup::Miss(caller) => caller,
                _ => {
                    return LoadedAnswer::Answered(
                        self.alone(key, loader, CacheStatus::miss("credentials")).await,
                    );
                }
            }
        } else {
            caller
        };
        if caller.look_up != LookUpState::Answered {
            self.wanted.set_purpose(Purpose::AnswerUnread);
        }
        let LoadRequest { asked, headers, .. } = &**self.wanted;
        let wants = ResponseReader { asked, headers, http: &policy.http, at, status: CacheStatus::collapsed };
        let answer = tokio::select! {
            biased;
            // Before the load's end: the client gets its first byte when the inner service sends it.
            Ok(head) = &mut self.head => {
                self.guard.count_answer(key, Outcome::Led);
                return LoadedAnswer::Answered(head);
            }
            answer = caller.load(&wants, loader) => answer,
        };
        match answer {
            MissOutcome::Coalesced(found, loader) => {
                LoadedAnswer::Found(found, Outcome::Coalesced, Some(loader))
            }
            MissOutcome::Stale(mut found, loader) => {
                // If its loader was not used, the request waited for another one's load.
                let stand_in = match (&loader, self.wanted.progress()) {
                    (Some(_), _) => Some(StandIn::Collapsed),
                    (None, Progress::Forwarded) => Some(StandIn::Forwarded(None)),
                    (None, Progress::Refused(status)) => Some(StandIn::Forwarded(Some(status))),
                    (None, Progress::Waiting) => None,
                };
                if let (StoredAnswer::Response(replay), Some(stand_in)) = (&mut found, stand_in) {
                    write_stand_in(replay.response.headers_mut(), stand_in);
                }
                LoadedAnswer::Found(found, Outcome::Stale, loader)
            }
            MissOutcome::Failed(failure) => LoadedAnswer::Answered(Ok(failed(self.guard, key, failure))),
            MissOutcome::Led(ending) => LoadedAnswer::Answered(
                self.own(key).unwrap_or_else(|| Ok(failed(self.guard, key, ending.into_failure()))),
            ),
            MissOutcome::Alone(loader) => {
                LoadedAnswer::Answered(self.alone(key, loader, CacheStatus::miss("uncoordinated")).await)
            }
        }
    }

    /// The answer of the request's own loader, if it ran.
    fn own(&mut self, key: &Key) -> Option<ClientAnswer<B, E>> {
        let head = self.head.try_recv().ok()?;
        self.guard.count_answer(key, Outcome::Led);
        Some(head)
    }

    /// Asks the inner service for this request alone.
    pub(super) async fn alone(
        &mut self,
        key: &Key,
        loader: Loader,
        status: CacheStatus,
    ) -> ClientAnswer<B, E> {
        let (state, policy) = self.guard.parts();
        let failure = match run_alone(Call { state, policy, key }, loader).await {
            Ok(ran) => ran.err().unwrap_or_else(Failure::vanished),
            // Unwinds this request's task, as without the guard.
            Err(panic) => resume_unwind(panic),
        };
        let Ok(head) = self.head.try_recv() else { return Ok(failed(self.guard, key, failure)) };
        self.guard.count_answer(key, Outcome::Bypassed);
        head.map(|mut response| {
            tell_forwarded(&mut response, &policy.http, Outcome::Bypassed, status);
            response
        })
    }
}

/// The outcome of a load for a request that waited for it.
enum LoadedAnswer<B, E> {
    Answered(ClientAnswer<B, E>),
    Found(StoredAnswer, Outcome, Option<Loader>),
}

/// The guard's own answer if there is no value. The text tells the failure, never the key.
pub(super) fn failed<B>(guard: &StampedeGuard, key: &Key, failure: Failure) -> Response<GuardedBody<B>> {
    guard.count_answer(key, Outcome::Failed);
    const FAILED: &str = "the load of this resource failed\n";
    const TOO_LONG: &str = "the load of this resource took longer than the guard's load_timeout, or the wait for it longer than \
                            wait_timeout; a request that bypasses the guard, such as one with a cookie, has no such bound\n";
    const OVERLOADED: &str = "too many other resources are being loaded\n";
    const DOWN: &str = "the cache in front of this resource is unavailable\n";
    let mut response = match failure {
        Failure::Loader { .. } => own_answer(StatusCode::BAD_GATEWAY, "load-failed", FAILED),
        Failure::Panicked(_) => own_answer(StatusCode::BAD_GATEWAY, "load-panicked", FAILED),
        Failure::Guard(error) if error.kind() == ErrorKind::Vanished => {
            own_answer(StatusCode::BAD_GATEWAY, "load-failed", FAILED)
        }
        Failure::Guard(error) if error.is_timeout() => {
            own_answer(StatusCode::GATEWAY_TIMEOUT, "timeout", TOO_LONG)
        }
        Failure::Guard(error) if error.kind() == ErrorKind::Overloaded => {
            own_answer(StatusCode::SERVICE_UNAVAILABLE, "overloaded", OVERLOADED)
        }
        Failure::Guard(_) => own_answer(StatusCode::SERVICE_UNAVAILABLE, "store-down", DOWN),
    };
    tell(&mut response, &guard.parts().1.http, Outcome::Failed, Times::default());
    response
}
