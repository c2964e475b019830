//! One request through the layer.
//!
//! - A hit: `consider` (`http_rules/request.rs`) computes the key, [`look`] reads the entry, and `answer.rs` makes the response from it.
//! - A miss: [`MissHandler`] joins the flight or leads it. `load.rs` runs a leader's request, `commit.rs` decides at the head which
//!   requests may receive the response, and `tee.rs` and `body.rs` read its body.
//! - A stale response: as a hit, and [`MissHandler`] begins the load in the background.
//! - Unsafe methods and HEAD: `unsafe_methods.rs`.
//! - An audit: the client receives its hit, and a task compares it with a new response of the inner service.
//! - Shadow mode: the inner service answers the client, and the guard runs beside it with a copy of the request.
//!
//! [`warn_of_body`] warns the operator if a layer outside the guard hides where request bodies end.

use std::fmt;
use std::future::poll_fn;
use std::ops::ControlFlow;
use std::panic::resume_unwind;
use std::pin::{Pin, pin};
use std::sync::{Arc, LazyLock};
use std::task::{Context, Poll};

use bytes::{Bytes, BytesMut};
use http::header::{CONTENT_LENGTH, COOKIE, HeaderValue, TRANSFER_ENCODING};
use http::{Method, Request, Response, StatusCode};
use http_body::Body;
use tower_service::Service;

use super::answer::{
    CacheStatus, LookUpKey, Replay, ResponseReader, StandIn, StoredAnswer, VariantSlot, own_answer,
    set_cache_status, set_forwarded_status, write_key, write_stand_in,
};
use super::body::{BoxError, GuardedBody, to_bytes};
use super::candidate::StoredResponseToReplace;
use super::commit::{ClientAnswer, LoadRequest, Progress, Purpose, RetryableRequest, call};
use super::load::loader;
use super::tee::has_no_content;
use crate::error::{Error, ErrorKind, Failure};
use crate::guard::load::Times;
use crate::guard::{Current, StampedeGuard};
use crate::http_rules::conditional::remove_conditions;
use crate::http_rules::key::{matched_route, sent_target};
use crate::http_rules::request::{ConsideredRequest, RequestDemands, consider, is_zero};
use crate::http_rules::request_settings::forwarding;
use crate::http_rules::vary::Fingerprint;
use crate::http_rules::{Rule, request_settings};
use crate::key::Key;
use crate::loader::{LoadScope, Loader, OwnAnswer};
use crate::observe;
use crate::observe::{LogEveryMinute, Outcome, log};
use crate::policy::{Encoded, OnStoreDown, Policy};
use crate::read_through::call::{Call, CallState, LookUpState};
use crate::read_through::look_up::{Lookup, hit_at_once_by_key, look, peek};
use crate::read_through::miss::MissOutcome;
use crate::read_through::outside::{Audit, run_alone};
use crate::value::entry::Encoding;

/// Boxed, because an `async` block has no name; the type around it is opaque so that this can change.
pub(super) type BoxFuture<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// The response to a request: ready, or still to be computed.
pub(super) enum AnswerFuture<B, E> {
    /// `None` once it was returned.
    Hit(Option<Response<GuardedBody<B>>>),
    Further(BoxFuture<ClientAnswer<B, E>>),
}

/// No field is pinned structurally.
impl<B, E> Unpin for AnswerFuture<B, E> {}

impl<B, E> Future for AnswerFuture<B, E> {
    type Output = ClientAnswer<B, E>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        match &mut *self {
            // A second poll after the end stays pending.
            Self::Hit(response) => {
                response.take().map_or(Poll::Pending, |response| Poll::Ready(Ok(response)))
            }
            Self::Further(answer) => answer.as_mut().poll(cx),
        }
    }
}

/// One request and what is needed to answer it.
pub(super) struct Exchange<S, Q> {
    pub(super) inner: S,
    pub(super) request: Request<Q>,
}

impl<S, Q, B> Exchange<S, Q>
where
    S: Service<Request<Q>, Response = Response<B>> + Clone + Send + 'static,
    S::Future: Send + 'static,
    S::Error: fmt::Display + Send + 'static,
    Q: Body + Send + 'static,
    B: Body + Send + 'static,
    B::Data: Send,
    B::Error: Into<BoxError>,
{
    /// Step 1. A hit from memory is answered at once, and clones neither the guard nor the inner service: threads that change one
    /// reference count wait for each other.
    ///
    /// With `shadow`, the answer is the inner service's, and the guard runs beside it.
    pub(super) fn begin(
        inner: &S,
        mut request: Request<Q>,
        guard: Current<'_>,
        shadow: bool,
    ) -> AnswerFuture<B, S::Error> {
        let (state, policy) = guard.parts();
        let join = |head: &str, parts: &[&str]| Key::from_texts(&state.namespace, head, parts);
        let mut considered = consider(&request, &policy.http.requests, join);
        if considered.as_ref().is_ok_and(|considered| considered.demands.other_cookies) {
            // A shared response must not depend on the other cookies of its leader, so the inner service does not see them.
            request.headers_mut().remove(COOKIE);
        }
        if let Ok(ConsideredRequest { key, demands, .. }) = &mut considered {
            separate_key(&guard, key, demands, &request);
        }
        let mut audits = false;
        if let Ok(ConsideredRequest { key, is_get: true, demands }) = &considered
            && !demands.directives.only_if_cached
        {
            // Only a hit that is the stored response itself can be compared, and not a part or a confirmation.
            audits = !demands.conditional && !demands.ranged && guard.parts().1.audit.is_due();
            if !audits && let Some(response) = hit_at_once(&guard, key, demands, &request) {
                return AnswerFuture::Hit(Some(response));
            }
        }
        let guard = guard.into_owned();
        let guard = match matched_route(&request) {
            Some(route) => guard.on_route(route),
            None => guard,
        };
        let (state, policy) = guard.parts();
        let logged_key = considered.as_ref().ok().filter(|_| policy.http.expose_key);
        let logged_key = logged_key.map(|considered| considered.key.within(&state.namespace).to_owned());
        let exchange = Self { inner: inner.clone(), request };
        let answer = exchange.answer(guard, considered, audits, shadow);
        AnswerFuture::Further(match logged_key {
            None => answer,
            Some(key) => Box::pin(async move {
                let mut response = answer.await?;
                write_key(response.headers_mut(), &key);
                Ok(response)
            }),
        })
    }

    /// Steps 2 to 8. Each branch has its own box, so that a hit moves and allocates only what a hit needs.
    fn answer(
        self,
        guard: StampedeGuard,
        considered: Result<ConsideredRequest<Key>, Rule>,
        audits: bool,
        shadow: bool,
    ) -> BoxFuture<ClientAnswer<B, S::Error>> {
        let (state, _) = guard.parts();
        match considered {
            Ok(_) if state.is_bypassed() => {
                Box::pin(self.pass(guard, Some(CacheStatus::bypass("switched-off"))))
            }
            Ok(_) if shadow => Box::pin(self.shadowed(guard)),
            Ok(ConsideredRequest { key, is_get: true, demands }) if !demands.directives.only_if_cached => {
                Box::pin(self.cached(guard, key, demands, audits))
            }
            Ok(ConsideredRequest { key, demands, .. }) => Box::pin(self.look_up_only(guard, key, demands)),
            // Another protocol: no log line and no `Cache-Status`.
            Err(Rule::Upgrade) => Box::pin(self.pass(guard, None)),
            Err(Rule::Method) => Box::pin(self.unsafely(guard)),
            Err(rule) => {
                observe::log_decision("not looked up", &rule);
                match rule {
                    Rule::Body => warn_of_body(&self.request),
                    Rule::Extension => request_settings::warn_of_extension(
                        &self.request,
                        &guard.parts().1.http.requests.personal,
                    ),
                    _ => {}
                }
                Box::pin(self.pass(guard, Some(CacheStatus::bypass(rule.token()))))
            }
        }
    }

    /// Passes the request to the inner service.
    pub(super) async fn pass(
        self,
        guard: StampedeGuard,
        status: Option<CacheStatus>,
    ) -> ClientAnswer<B, S::Error> {
        guard.count_pass();
        let mut response = call(self.inner, self.request).await?.map(GuardedBody::passed);
        if let Some(status) = status {
            set_forwarded_status(&mut response, &guard.parts().1.http, Outcome::Bypassed, status);
        }
        Ok(response)
    }

    /// Steps 2 to 8 for a GET; `audits` says whether to audit a hit.
    #[allow(clippy::manual_async_fn, reason = "the future of an `async fn` has room for its arguments twice")]
    fn cached(
        self,
        guard: StampedeGuard,
        key: Key,
        demands: RequestDemands,
        audits: bool,
    ) -> impl Future<Output = ClientAnswer<B, S::Error>> + Send {
        async move {
            let (state, policy) = guard.parts();
            let call = Call { state, policy, key: &key };
            let (headers, http) = (self.request.headers(), &policy.http);
            let wants = ResponseReader {
                demands: &demands,
                headers,
                http,
                at: LookUpKey::Resource(&key),
                status: CacheStatus::hit,
            };
            // Box all branches except the hit's: they would make the future of every hit larger.
            let further: Pin<Box<dyn Future<Output = _> + Send + '_>> = match look(call, &wants).await {
                Lookup::LocalHit(StoredAnswer::Response(replay)) => {
                    guard.count_answer(&key, Outcome::LocalHit);
                    if audits {
                        self.audit(&guard, &key);
                    }
                    return Ok(replay.respond(http, Outcome::LocalHit));
                }
                Lookup::Hit { value: StoredAnswer::Response(replay), stale: false, refresh: None } => {
                    guard.count_answer(&key, Outcome::Hit);
                    if audits {
                        self.audit(&guard, &key);
                    }
                    return Ok(replay.respond(http, Outcome::Hit));
                }
                // The layer was added twice, or the handler requests its own URL: the outer layer does the work.
                Lookup::Failed(Failure::Guard(error)) if error.kind() == ErrorKind::Reentrant => {
                    Box::pin(self.pass(guard.clone(), Some(CacheStatus::bypass("nested"))))
                }
                lookup => Box::pin(self.onward(&guard, &key, demands, lookup)),
            };
            further.await
        }
    }

    /// Steps 2 to 8 for a request that is not a plain hit.
    async fn onward(
        self,
        guard: &StampedeGuard,
        key: &Key,
        demands: RequestDemands,
        lookup: Lookup<'_, StoredAnswer>,
    ) -> ClientAnswer<B, S::Error> {
        let (state, policy) = guard.parts();
        let load_request = LoadRequest::new(demands, self.request.headers().clone(), key.clone());
        let (loader, own) = loader(self.inner, self.request, state, policy, &load_request);
        let mut handler = MissHandler { guard, load_request: &load_request, own };
        let (slot, loader) = match handler.answer(LookUpKey::Resource(key), key, lookup, loader).await {
            ControlFlow::Break(answered) => return answered,
            ControlFlow::Continue(elsewhere) => elsewhere,
        };
        let key = slot.key.clone();
        // Cannot fail: no other code sets it.
        let _ = load_request.variant.set(*slot);
        let lookup =
            look(Call { state, policy, key: &key }, &handler.wants(LookUpKey::Variant, CacheStatus::hit))
                .await;
        match handler.answer(LookUpKey::Variant, &key, lookup, loader).await {
            ControlFlow::Break(answered) => answered,
            // A variant's key leads to no other key.
            ControlFlow::Continue((_, loader)) => {
                handler.alone(&key, loader, CacheStatus::miss("vary")).await
            }
        }
    }

    /// Step 2 for a request that leads no flight (HEAD, `only-if-cached`): the stored response, or the inner service.
    async fn look_up_only(
        self,
        guard: StampedeGuard,
        key: Key,
        mut demands: RequestDemands,
    ) -> ClientAnswer<B, S::Error> {
        let (state, policy) = guard.parts();
        let is_head = self.request.method() == Method::HEAD;
        // RFC 9110, 14.2: a range is for a GET.
        demands.ranged &= !is_head;
        let (headers, http) = (self.request.headers(), &policy.http);
        let wants = |at| ResponseReader { demands: &demands, headers, http, at, status: CacheStatus::hit };
        let mut found = if state.is_closed() {
            Ok(None)
        } else {
            peek(Call { state, policy, key: &key }, &wants(LookUpKey::Resource(&key))).await
        };
        if let Ok(Some(StoredAnswer::Elsewhere(slot))) = &found {
            let call = Call { state, policy, key: &slot.key.clone() };
            found = peek(call, &wants(LookUpKey::Variant)).await;
        }
        match found {
            Ok(Some(StoredAnswer::Response(mut replay))) => {
                guard.count_answer(&key, Outcome::Hit);
                if is_head {
                    without_body(&mut replay);
                }
                Ok(replay.respond(http, Outcome::Hit))
            }
            Err(error) if policy.on_store_down == OnStoreDown::FailClosed => {
                let error = Error::store("looking up the entry", &key, error);
                Ok(failed(&guard, &key, Failure::Guard(error)))
            }
            _ if demands.directives.only_if_cached => {
                guard.count_answer(&key, Outcome::Failed);
                let text = "nothing that is stored may be used\n";
                let mut response = own_answer(StatusCode::GATEWAY_TIMEOUT, "only-if-cached", text);
                set_cache_status(&mut response, http, Outcome::Failed, Times::default());
                Ok(response)
            }
            Ok(_) | Err(_) => self.head(guard.clone(), key, &demands).await,
        }
    }

    /// Audits the hit that answered this request: loads with the request and compares the responses.
    fn audit(self, guard: &StampedeGuard, key: &Key) {
        let (state, policy) = guard.parts();
        let Some(audit) = Audit::begin(Call { state, policy, key }) else { return };
        let Self { inner, mut request } = self;
        remove_conditions(request.headers_mut());
        let (headers, normal, max_body) = (request.headers().clone(), policy.http.normal(), policy.max_body);
        let load = async move {
            let (head, body) = call(inner, request).await.ok()?.into_parts();
            let is_answer = !head.status.is_server_error();
            Some((head.status, whole(body, max_body).await?)).filter(|_| is_answer)
        };
        let load = LoadScope::scope(state.store.store_id(), key, None, LoadScope::current(), load);
        let now = state.store.now();
        audit.spawn(load, move |policy, served, loaded| {
            let served = StoredResponseToReplace::of(served.clone(), now)?;
            // Meanwhile another variant may have been stored under this key.
            let is_own = served.meta.is_for(&headers, normal) && served.meta.part.is_none();
            is_own.then(|| is_same(policy, &served, loaded)).flatten()
        });
    }

    /// Answers from the inner service. If the request can be copied, a task runs the copy through the guard.
    async fn shadowed(self, guard: StampedeGuard) -> ClientAnswer<B, S::Error> {
        if let Some(RetryableRequest { inner, request }) = RetryableRequest::of(&self.inner, &self.request) {
            tokio::spawn(async move {
                // Dropping the response does not stop a load: its result is stored.
                drop(Self::begin(&inner, request, Current::Owned(guard), false).await);
            });
        }
        Ok(call(self.inner, self.request).await?.map(GuardedBody::passed))
    }
}

/// A hit from memory. Runs before any future is built.
fn hit_at_once<Q, B>(
    guard: &StampedeGuard,
    key: &Key,
    demands: &RequestDemands,
    request: &Request<Q>,
) -> Option<Response<GuardedBody<B>>> {
    let (state, policy) = guard.parts();
    if state.is_bypassed() {
        return None;
    }
    let (headers, http) = (request.headers(), &policy.http);
    let (at, status) = (LookUpKey::Resource(key), CacheStatus::hit as fn(u64) -> CacheStatus);
    let wants = ResponseReader { demands, headers, http, at, status };
    match hit_at_once_by_key(Call { state, policy, key }, &wants)? {
        StoredAnswer::Response(replay) => {
            guard.count_answer_on(matched_route(request), key, Outcome::LocalHit);
            let mut response = replay.respond(http, Outcome::LocalHit);
            if http.expose_key {
                write_key(response.headers_mut(), key.within(&state.namespace));
            }
            Some(response)
        }
        // Another variant has its own key, and its look-up needs a future.
        StoredAnswer::Incoming(_) | StoredAnswer::Elsewhere(_) | StoredAnswer::NotForThis => None,
    }
}

/// Gives a request that must not share the entry of its resource a separate key. Such a key has the resource as a tag, so that an
/// invalidation of the resource reaches its entry. Such a request has another proxy report than the policy's, or its target is not in
/// normal form: a router may answer `/p` and `/%70` differently, so with a shared entry one client could replace the response of all
/// others.
pub(super) fn separate_key<Q>(
    guard: &StampedeGuard,
    key: &mut Key,
    demands: &RequestDemands,
    request: &Request<Q>,
) {
    let report = if demands.forwarded { forwarding(request.headers()) } else { None };
    if report == guard.parts().1.http.requests.report && !demands.other_form {
        return;
    }
    let mut distinction = report.unwrap_or_default();
    if demands.other_form {
        for target in sent_target(request) {
            // No line of a report begins like this.
            distinction.extend_from_slice(format!("\n{target}").as_bytes());
        }
    }
    *key = key.of_report(&Fingerprint::of(&distinction).half());
}

/// The answer to a HEAD: the headers that a GET would have had (RFC 9110, 9.3.2). A response without content has no length (8.6).
/// Each other one has exactly one, but an older version of this crate may have stored two.
fn without_body(replay: &mut Replay) {
    if !has_no_content(replay.response.status()) {
        let length = HeaderValue::from(replay.response.body().len());
        replay.response.headers_mut().insert(CONTENT_LENGTH, length);
    }
    replay.trailers = None;
    replay.response.body_mut().clear();
}

/// A request that is not a plain hit, until a flight or its own load answers it.
struct MissHandler<'a, B, E> {
    guard: &'a StampedeGuard,
    load_request: &'a Arc<LoadRequest>,
    /// The answer of this request's own loader, if that runs.
    own: OwnAnswer<ClientAnswer<B, E>>,
}

impl<'a, B, E> MissHandler<'a, B, E> {
    fn wants<'w>(&self, at: LookUpKey<'w>, status: fn(u64) -> CacheStatus) -> ResponseReader<'w>
    where
        'a: 'w,
    {
        let LoadRequest { demands, headers, .. } = &**self.load_request;
        let (_, policy) = self.guard.parts();
        ResponseReader { demands, headers, http: &policy.http, at, status }
    }

    /// Steps 3 to 8 at one key. Goes on with its loader at another key if the stored response is another variant than this request's.
    async fn answer(
        &mut self,
        at: LookUpKey<'_>,
        key: &Key,
        lookup: Lookup<'_, StoredAnswer>,
        loader: Loader,
    ) -> ControlFlow<ClientAnswer<B, E>, (Box<VariantSlot>, Loader)> {
        let (found, outcome, loader) = match lookup {
            Lookup::Hit { value, stale, refresh } => {
                let is_response = matches!(value, StoredAnswer::Response(_));
                let outcome =
                    if stale && (is_response || refresh.is_none()) { Outcome::Stale } else { Outcome::Hit };
                match refresh {
                    // The request that triggered the refresh lends its loader; its own answer is the stored response.
                    Some(caller) if is_response => {
                        self.load_request.set_purpose(Purpose::Refresh);
                        caller.refresh(loader, !stale);
                        (value, outcome, None)
                    }
                    // If the entry belongs to another variant, requests for that variant refresh it.
                    _ => (value, outcome, Some(loader)),
                }
            }
            Lookup::LocalHit(value) => (value, Outcome::LocalHit, Some(loader)),
            Lookup::Failed(failure) => return ControlFlow::Break(Ok(failed(self.guard, key, failure))),
            Lookup::Miss(caller) => {
                let credentials_key = self.load_request.demands.has_credentials().then(|| key.derived("~a"));
                let Some(caller) = self.caller(at, key, credentials_key.as_ref(), caller).await else {
                    let status = CacheStatus::miss("credentials");
                    return ControlFlow::Break(self.alone(key, loader, status).await);
                };
                match self.load(at, caller, loader).await {
                    MissOutcome::Coalesced(found, loader) => (found, Outcome::Coalesced, Some(loader)),
                    MissOutcome::Stale(found, loader) => (found, Outcome::Stale, loader),
                    MissOutcome::Led(answer, _) => {
                        self.guard.count_answer(key, Outcome::Led);
                        return ControlFlow::Break(answer);
                    }
                    MissOutcome::Failed(failure) => {
                        return ControlFlow::Break(Ok(failed(self.guard, key, failure)));
                    }
                    MissOutcome::Alone(loader) => {
                        let status = CacheStatus::miss("uncoordinated");
                        return ControlFlow::Break(self.alone(key, loader, status).await);
                    }
                }
            }
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
                self.alone(key, loader, CacheStatus::bypass("credentials")).await
            }
            // The loader was used by the flight, and its result does not suit this request.
            (StoredAnswer::Elsewhere(_) | StoredAnswer::NotForThis, None) => match self.own.take() {
                Some(answer) => {
                    self.guard.count_answer(key, Outcome::Led);
                    answer
                }
                None => Ok(failed(self.guard, key, Failure::vanished())),
            },
        })
    }

    /// The caller for which the request waits or loads after a miss; `None` if the request must load alone.
    async fn caller<'c>(
        &self,
        at: LookUpKey<'_>,
        key: &Key,
        credentials_key: Option<&'c Key>,
        caller: CallState<'c>,
    ) -> Option<CallState<'c>> {
        if self.load_request.demands.ranged {
            // Each request wants another part, so none waits for another's load.
            return Some(caller.unattended());
        }
        let Some(credentials_key) = credentials_key else { return Some(caller) };
        // Coalesce with other requests that have credentials, under a separate key: their response may not be
        // shareable. Leave the flight of the resource: callers behind this one must not wait for it.
        let call = Call { key: credentials_key, ..caller.call };
        drop(caller);
        self.load_request.store_at(key);
        match look(call, &self.wants(at, CacheStatus::collapsed)).await {
            Lookup::Miss(caller) => Some(caller),
            _ => None,
        }
    }

    /// Steps 3 to 8 if nothing usable is stored.
    async fn load(
        &mut self,
        at: LookUpKey<'_>,
        caller: CallState<'_>,
        loader: Loader,
    ) -> MissOutcome<StoredAnswer, ClientAnswer<B, E>> {
        if caller.look_up != LookUpState::Answered {
            self.load_request.set_purpose(Purpose::AnswerUnread);
        }
        let wants = self.wants(at, CacheStatus::collapsed);
        let mut loaded = caller.load(&wants, loader, &mut self.own).await;
        if let MissOutcome::Stale(StoredAnswer::Response(replay), loader) = &mut loaded {
            // If its loader was not used, the request waited for another request's load.
            let stand_in = match (loader, self.load_request.progress()) {
                (Some(_), _) => Some(StandIn::Collapsed),
                (None, Progress::Forwarded) => Some(StandIn::Forwarded(None)),
                (None, Progress::Refused(status)) => Some(StandIn::Forwarded(Some(status))),
                (None, Progress::Waiting) => None,
            };
            if let Some(stand_in) = stand_in {
                write_stand_in(replay.response.headers_mut(), stand_in);
            }
        }
        loaded
    }

    /// Forwards this request for its own client only.
    async fn alone(&mut self, key: &Key, loader: Loader, status: CacheStatus) -> ClientAnswer<B, E> {
        let (state, policy) = self.guard.parts();
        let answer = match run_alone(Call { state, policy, key }, loader, &mut self.own).await {
            Ok(Ok(answer)) => answer,
            Ok(Err(failure)) => return Ok(failed(self.guard, key, failure)),
            // Unwinds this request's task, as without the guard.
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
    set_cache_status(&mut response, &guard.parts().1.http, Outcome::Failed, Times::default());
    response
}

/// Whether an audit finds the response that is served: its status and its body.
fn is_same(
    policy: &Policy,
    served: &StoredResponseToReplace,
    (status, body): &(StatusCode, Bytes),
) -> Option<bool> {
    if served.response.status != *status {
        return Some(false);
    }
    let bodies = [&served.response.body, body];
    let json = bodies.map(|payload| Encoded { encoding: Encoding::JSON, payload });
    policy.audit.is_same(json)
}

/// The whole body, if it is not longer than `max_body`.
async fn whole<B>(body: B, max_body: usize) -> Option<Bytes>
where
    B: Body,
    B::Error: Into<BoxError>,
{
    let (mut body, mut whole) = (pin!(body), BytesMut::new());
    while let Some(frame) = poll_fn(|cx| body.as_mut().poll_frame(cx)).await {
        if let Ok(data) = to_bytes(frame.ok()?).into_data() {
            if whole.len() + data.len() > max_body {
                return None;
            }
            whole.extend_from_slice(&data);
        }
    }
    Some(whole.freeze())
}

/// One limit for all guards of the process, which are usually behind the same layers. Not one of the node's limits:
/// this warning would be due with every request, and would suppress all others.
static WARNED: LazyLock<LogEveryMinute> = LazyLock::new(LogEveryMinute::default);

/// Warns about a GET or HEAD that bypasses the cache because of its body. If no header announces a body, most likely
/// there is none: a layer has wrapped it in a stream, and does so for all requests.
fn warn_of_body<B>(request: &Request<B>) {
    let headers = request.headers();
    let announces =
        headers.contains_key(TRANSFER_ENCODING) || headers.get(CONTENT_LENGTH).is_some_and(|n| !is_zero(n));
    if !announces && WARNED.is_due() {
        tracing::warn!(
            target: log::HTTP,
            version = ?request.version(),
            "a request that announces no body has one that may go on: it passes the cache by; if a layer outside of the \
             guard wraps requests' bodies (a timeout, decompression), all requests do: put the guard outside of it"
        );
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use bytes::Bytes;
    use http_body_util::Full;
    use tower::service_fn;

    use super::*;

    /// Each hit allocates this future. It contains one read of Redis (1.6 KB) and the answer; all other branches are boxed
    /// separately.
    #[tokio::test]
    async fn the_future_of_a_hit_is_small() {
        let guard = StampedeGuard::in_memory();
        let key = guard.key("k").expect("a key");
        let inner = service_fn(|_: Request<Full<Bytes>>| async {
            Ok::<_, Infallible>(Response::new(Full::new(Bytes::new())))
        });
        let request = Request::new(Full::default());
        let own = size_of_val(&request) + size_of_val(&inner);
        let hit = Exchange { inner, request }.cached(guard, key, RequestDemands::default(), false);
        let size = size_of_val(&hit);
        assert!(size - own <= 2_816, "{} bytes beside the request", size - own);
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "in a test the panic is the report")]
mod body_warning_tests {
    use std::convert::Infallible;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use bytes::Bytes;
    use http::Response;
    use http_body::Frame;
    use http_body_util::combinators::UnsyncBoxBody;
    use http_body_util::{BodyExt as _, Empty, StreamBody};
    use tower::{Layer as _, ServiceExt as _, service_fn};
    use tracing::{Event, Level, Subscriber};
    use tracing_subscriber::layer::{Context, SubscriberExt as _};

    use crate::guard::StampedeGuard;

    /// Counts warnings of this module.
    #[derive(Clone, Default)]
    struct Warnings(Arc<AtomicUsize>);

    impl<S: Subscriber> tracing_subscriber::Layer<S> for Warnings {
        fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
            let meta = event.metadata();
            if *meta.level() == Level::WARN && meta.target() == "stampede_guard::http" {
                self.0.fetch_add(1, Ordering::Relaxed);
            }
        }
    }

    type Body = UnsyncBoxBody<Bytes, Infallible>;

    /// A single test, because the process has only one rate limit.
    #[tokio::test(start_paused = true)]
    async fn a_wrapped_body_bypasses_and_warns_at_a_limited_rate() {
        let warnings = Warnings::default();
        // With a single subscriber, tracing would cache the interest that another test's thread registered.
        let _second = tracing::Dispatch::new(tracing_subscriber::registry());
        let _listening =
            tracing::subscriber::set_default(tracing_subscriber::registry().with(warnings.clone()));
        let shop = StampedeGuard::in_memory().layer(service_fn(|_: http::Request<Body>| async {
            Ok::<_, Infallible>(Response::new(Empty::<Bytes>::new()))
        }));
        let wrapped = || {
            let no_frames = futures_util::stream::empty::<Result<Frame<Bytes>, Infallible>>();
            StreamBody::new(no_frames).boxed_unsync()
        };
        let ask = async |method: &str, field: (&str, &str), body: Body| {
            let request = http::Request::builder().method(method).uri("http://h/").header(field.0, field.1);
            let response = shop.clone().oneshot(request.body(body).unwrap()).await.unwrap();
            let status = response.headers()["cache-status"].to_str().unwrap().to_owned();
            (warnings.0.load(Ordering::Relaxed), status.ends_with("fwd=bypass; detail=body"))
        };
        assert_eq!(ask("GET", ("accept", "*/*"), Empty::new().boxed_unsync()).await, (0, false));
        for announced in [("content-length", "5"), ("transfer-encoding", "chunked")] {
            assert_eq!(ask("GET", announced, wrapped()).await, (0, true), "{announced:?}");
        }
        for method in ["GET", "HEAD", "GET"] {
            assert_eq!(ask(method, ("content-length", "0"), wrapped()).await, (1, true), "{method}");
        }
        tokio::time::advance(std::time::Duration::from_secs(3_600)).await;
        assert_eq!(ask("HEAD", ("accept", "*/*"), wrapped()).await, (2, true));
    }
}
