//! A request that no plain hit answers: steps 3 to 8, at the key of its resource and at that of its variant; and the audit of a hit.

use std::future::poll_fn;
use std::ops::ControlFlow;
use std::panic::resume_unwind;
use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use http::{Response, StatusCode};

use super::answer::{
    CacheStatus, ResponseReader, StandIn, StoredAnswer, VariantSlot, failed_answer, set_forwarded_status,
    write_stand_in,
};
use super::body::GuardedBody;
use super::candidate::StoredResponseToReplace;
use super::commit::{ClientAnswer, LoadRequest, Progress, Purpose};
use super::inner_body::UpstreamBody;
use super::load::loader;
use super::upstream::UpstreamRequest;
use crate::error::{ErrorKind, Failure};
use crate::guard::StampedeGuard;
use crate::http_rules::conditional::remove_conditions;
use crate::http_rules::request::RequestDemands;
use crate::key::Key;
use crate::loader::{LoadScope, Loader, OwnAnswer};
use crate::observe::Outcome;
use crate::policy::Encoded;
use crate::read_through::call::{Call, CallState, LookUpState};
use crate::read_through::look_up::{Lookup, look};
use crate::read_through::miss::MissOutcome;
use crate::read_through::outside::{Audit, run_alone};
use crate::value::entry::Encoding;

impl UpstreamRequest {
    /// Steps 3 to 8, or the answer of a stored response that is not a plain hit.
    pub(super) async fn load(
        self,
        guard: &StampedeGuard,
        key: &Key,
        demands: RequestDemands,
        lookup: Lookup<'_, StoredAnswer>,
    ) -> ClientAnswer {
        let (state, policy) = guard.parts();
        let load_request = LoadRequest::new(demands, self.head.headers().clone(), key.clone());
        let (loader, own) = loader(self, state, policy, &load_request);
        let mut handler = MissHandler { guard, load_request: &load_request, own };
        let (slot, loader) = match handler.answer(lookup, loader).await {
            ControlFlow::Break(answered) => return answered,
            ControlFlow::Continue(elsewhere) => elsewhere,
        };
        // This cannot fail, because no other code sets the variant of this request.
        let _ = load_request.variant.set(*slot);
        let call = Call { state, policy, key: load_request.key() };
        let lookup = look(call, &handler.wants(false)).await;
        match handler.answer(lookup, loader).await {
            ControlFlow::Break(answered) => answered,
            // A variant's key leads to no other key.
            ControlFlow::Continue((_, loader)) => handler.alone(loader, CacheStatus::miss("vary")).await,
        }
    }

    /// Audits the hit that answered this request: loads with the request and compares the responses.
    pub(super) fn audit(mut self, guard: &StampedeGuard, key: &Key) {
        let (state, policy) = guard.parts();
        let Some(audit) = Audit::begin(Call { state, policy, key }) else { return };
        remove_conditions(self.head.headers_mut());
        let (headers, normal, max_body) =
            (self.head.headers().clone(), policy.http.normal(), policy.max_body);
        let load = async move {
            let (head, body) = self.send().await.ok()?.into_parts();
            let is_answer = !head.status.is_server_error();
            Some((head.status, whole(body, max_body).await?)).filter(|_| is_answer)
        };
        let load = LoadScope::scope(state.store.store_id(), key, None, LoadScope::current(), load);
        let now = state.store.now();
        audit.spawn(load, move |policy, served, loaded| {
            let served = StoredResponseToReplace::of(served.clone(), now)?;
            // Meanwhile another variant may have been stored under this key.
            let is_own = served.meta.is_for(&headers, normal) && served.meta.part.is_none();
            let (status, body) = loaded;
            if !is_own || served.response.status != *status {
                return is_own.then_some(false);
            }
            let bodies = [&served.response.body, body];
            policy.audit.is_same(bodies.map(|payload| Encoded { encoding: Encoding::JSON, payload }))
        });
    }
}

/// A request that is not a plain hit, until a flight or its own load answers it.
struct MissHandler<'a> {
    guard: &'a StampedeGuard,
    load_request: &'a Arc<LoadRequest>,
    /// The answer of this request's own loader, if that runs.
    own: OwnAnswer<ClientAnswer>,
}

impl<'a> MissHandler<'a> {
    fn wants(&self, has_waited: bool) -> ResponseReader<'a> {
        let LoadRequest { demands, headers, resource, variant, .. } = &**self.load_request;
        let resource = Some(resource).filter(|_| variant.get().is_none());
        ResponseReader { has_waited, ..ResponseReader::new(self.guard, demands, headers, resource) }
    }

    /// Steps 3 to 8 at one key. Returns the loader and another key to continue with if the stored response is another variant than this
    /// request's.
    async fn answer(
        &mut self,
        lookup: Lookup<'_, StoredAnswer>,
        loader: Loader,
    ) -> ControlFlow<ClientAnswer, (Box<VariantSlot>, Loader)> {
        let key = self.load_request.key();
        let (found, outcome, loader) = match lookup {
            Lookup::Hit { value, stale, refresh } => self.hit(value, stale, refresh, loader),
            Lookup::LocalHit(value) => (value, Outcome::LocalHit, Some(loader)),
            Lookup::Failed(failure) => return ControlFlow::Break(Ok(failed(self.guard, key, failure))),
            Lookup::Miss(caller) => self.miss(caller, loader).await?,
        };
        ControlFlow::Break(match (found, loader) {
            (StoredAnswer::Response(replay), _) => {
                self.guard.count_answer(key, outcome);
                Ok(replay.respond(&self.guard.parts().1.http, outcome))
            }
            (StoredAnswer::Incoming(shared_body), _) => {
                self.guard.count_answer(key, outcome);
                Ok(shared_body.respond(&self.guard.parts().1.http, outcome))
            }
            (StoredAnswer::Elsewhere(slot), Some(loader)) => return ControlFlow::Continue((slot, loader)),
            (StoredAnswer::NotForThis, Some(loader)) => {
                self.alone(loader, CacheStatus::bypass("credentials")).await
            }
            // A flight has used the loader, and the flight's result does not suit this request.
            (StoredAnswer::Elsewhere(_) | StoredAnswer::NotForThis, None) => match self.own.take() {
                Some(answer) => {
                    self.guard.count_answer(key, Outcome::Led);
                    answer
                }
                None => Ok(failed(self.guard, key, Failure::vanished())),
            },
        })
    }

    /// The value of a hit, and this request's loader unless a refresh uses it.
    fn hit(
        &self,
        value: StoredAnswer,
        stale: bool,
        refresh: Option<Box<CallState<'_>>>,
        loader: Loader,
    ) -> (StoredAnswer, Outcome, Option<Loader>) {
        let is_response = matches!(value, StoredAnswer::Response(_));
        let outcome = if stale && (is_response || refresh.is_none()) { Outcome::Stale } else { Outcome::Hit };
        match refresh {
            // The request that triggered the refresh lends its loader; its own answer is the stored response.
            Some(caller) if is_response => {
                self.load_request.state().purpose = Purpose::Refresh;
                caller.refresh(loader, !stale);
                (value, outcome, None)
            }
            // If the entry belongs to another variant, requests for that variant refresh it.
            _ => (value, outcome, Some(loader)),
        }
    }

    /// What a flight has for this request, and the loader if the flight has not used it. Breaks with this request's answer, if its own load
    /// or a failure gives it one.
    async fn miss(
        &mut self,
        caller: Box<CallState<'_>>,
        loader: Loader,
    ) -> ControlFlow<ClientAnswer, (StoredAnswer, Outcome, Option<Loader>)> {
        let (demands, key) = (&self.load_request.demands, self.load_request.key());
        let credentials_key = key.derived("~a");
        let caller = if demands.ranged {
            // Each request wants another part, so none waits for another's load.
            caller.unattended()
        } else if demands.has_credentials() {
            // Coalesce with other requests that have credentials, under a separate key: their response may not be
            // shareable. Leave the flight of the resource: callers behind this one must not wait for it.
            let call = Call { key: &credentials_key, ..caller.call };
            drop(caller);
            self.load_request.state().stored_at = Some(key.clone());
            let Lookup::Miss(caller) = look(call, &self.wants(true)).await else {
                return ControlFlow::Break(self.alone(loader, CacheStatus::miss("credentials")).await);
            };
            caller
        } else {
            caller
        };
        ControlFlow::Break(match self.load(caller, loader).await {
            MissOutcome::Coalesced(found, loader) => {
                return ControlFlow::Continue((found, Outcome::Coalesced, Some(loader)));
            }
            MissOutcome::Stale(found, loader) => {
                return ControlFlow::Continue((found, Outcome::Stale, loader));
            }
            MissOutcome::Led(answer, _) => {
                self.guard.count_answer(key, Outcome::Led);
                answer
            }
            MissOutcome::Failed(failure) => Ok(failed(self.guard, key, failure)),
            MissOutcome::Alone(loader) => self.alone(loader, CacheStatus::miss("uncoordinated")).await,
        })
    }

    /// Steps 3 to 8 of a request for which nothing usable is stored. Marks a stale answer with the load that failed.
    async fn load(
        &mut self,
        caller: Box<CallState<'_>>,
        loader: Loader,
    ) -> MissOutcome<StoredAnswer, ClientAnswer> {
        if caller.look_up != LookUpState::Answered {
            self.load_request.state().purpose = Purpose::AnswerUnread;
        }
        let wants = self.wants(true);
        let mut loaded = caller.load(&wants, loader, &mut self.own).await;
        if let MissOutcome::Stale(StoredAnswer::Response(replay), loader) = &mut loaded {
            // If this request's loader was not used, the request waited for another request's load.
            let progress = self.load_request.state().progress;
            let stand_in = match (loader, progress) {
                (Some(_), _) => Some(StandIn::Collapsed),
                (None, Progress::Forwarded) => Some(StandIn::Forwarded(None)),
                (None, Progress::Refused(status)) => Some(StandIn::Forwarded(Some(status))),
                (None, Progress::Waiting) => None,
            };
            if let Some(stand_in) = stand_in {
                write_stand_in(&mut Arc::make_mut(&mut replay.response).headers, stand_in);
            }
        }
        loaded
    }

    /// Forwards this request for its own client only.
    async fn alone(&mut self, loader: Loader, status: CacheStatus) -> ClientAnswer {
        let ((state, policy), key) = (self.guard.parts(), self.load_request.key());
        let answer = match run_alone(Call { state, policy, key }, loader, &mut self.own).await {
            Ok(Ok(answer)) => answer,
            Ok(Err(failure)) => return Ok(failed(self.guard, key, failure)),
            // A panic of the handler unwinds this request's task, as it would without the guard.
            Err(panic) => resume_unwind(panic),
        };
        self.guard.count_answer(key, Outcome::Bypassed);
        answer.map(|mut response| {
            set_forwarded_status(&mut response, &policy.http, Outcome::Bypassed, status);
            response
        })
    }
}

/// The guard's own answer if there is no value. The text names the failure, never the key.
pub(super) fn failed(guard: &StampedeGuard, key: &Key, failure: Failure) -> Response<GuardedBody> {
    guard.count_answer(key, Outcome::Failed);
    const FAILED: &str = "the load of this resource failed\n";
    const TOO_LONG: &str = "the load of this resource took longer than the guard's load_timeout, or the wait for it longer than \
                            wait_timeout; a request that bypasses the guard, such as one with a cookie, has no such bound\n";
    const OVERLOADED: &str = "too many other resources are being loaded\n";
    const DOWN: &str = "the cache in front of this resource is unavailable\n";
    let (status, detail, text) = match failure {
        Failure::Loader { .. } => (StatusCode::BAD_GATEWAY, "load-failed", FAILED),
        Failure::Panicked(_) => (StatusCode::BAD_GATEWAY, "load-panicked", FAILED),
        Failure::Guard(error) if error.kind() == ErrorKind::Vanished => {
            (StatusCode::BAD_GATEWAY, "load-failed", FAILED)
        }
        Failure::Guard(error) if error.is_timeout() => (StatusCode::GATEWAY_TIMEOUT, "timeout", TOO_LONG),
        Failure::Guard(error) if error.kind() == ErrorKind::Overloaded => {
            (StatusCode::SERVICE_UNAVAILABLE, "overloaded", OVERLOADED)
        }
        Failure::Guard(_) => (StatusCode::SERVICE_UNAVAILABLE, "store-down", DOWN),
    };
    failed_answer(&guard.parts().1.http, status, detail, text)
}

/// The whole body; `None` if it is longer than `max_body`, or fails.
async fn whole(mut body: UpstreamBody, max_body: usize) -> Option<Bytes> {
    let mut whole = BytesMut::new();
    while let Some(frame) = poll_fn(|cx| body.as_mut().poll_bytes(cx)).await {
        if let Ok(data) = frame.ok()?.into_data() {
            if whole.len() + data.len() > max_body {
                return None;
            }
            whole.extend_from_slice(&data);
        }
    }
    Some(whole.freeze())
}
