//! One request through the layer.
//!
//! - A hit: `consider` (`http_rules/request.rs`) gives the key, [`look`] reads the entry, `respond.rs` makes the response of it.
//! - A miss: `miss.rs` joins the flight or leads it; a leader's request is loaded by `load.rs`, and `commit.rs` decides at the head who may
//!   have the response, and reads its body (`tee.rs`, `shared_body.rs`).
//! - A stale response: as a hit, and `miss.rs` begins the load in the background.
//! - Unsafe methods and HEAD: `unsafe_methods.rs`.

use std::fmt;
use std::pin::Pin;
use std::task::{Context, Poll};

use http::header::{CONTENT_LENGTH, COOKIE, HeaderValue};
use http::{Method, Request, Response, StatusCode};
use http_body::Body;
use tower_service::Service;

use super::answer_info::{tell, tell_forwarded};
use super::body::{BoxError, GuardedBody};
use super::body_warning;
use super::cache_status::{CacheStatus, write_key};
use super::load::loader;
use super::load_request::{ClientAnswer, LoadRequest, call};
use super::miss::{MissHandler, MissStep, failed};
use super::respond::{LookUpKey, Replay, ResponseReader, StoredAnswer, own_answer};
use super::tee::has_no_content;
use crate::error::{Error, ErrorKind, Failure};
use crate::guard::StampedeGuard;
use crate::guard::current::Current;
use crate::guard::outcome::Times;
use crate::http_rules::axum_nesting::matched_route;
use crate::http_rules::forwarding::forwarding;
use crate::http_rules::personal;
use crate::http_rules::reason::Rule;
use crate::http_rules::request::{ConsideredRequest, RequestDemands, consider};
use crate::http_rules::target::sent_target;
use crate::http_rules::vary::Fingerprint;
use crate::key::Key;
use crate::observe::{self, Outcome};
use crate::policy::{OnStoreDown, Policy};
use crate::read_through::call::Call;
use crate::read_through::local::hit_at_once_by_key;
use crate::read_through::look_up::{Lookup, look, peek};
use crate::store::StoreError;

/// Boxed, because an `async` block has no name; the type around it is opaque so that this can change.
pub(super) type BoxFuture<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// The response to a request, which may be there.
pub(super) enum AnswerFuture<B, E> {
    /// `None` once it was given.
    Hit(Option<Response<GuardedBody<B>>>),
    Further(BoxFuture<ClientAnswer<B, E>>),
}

/// Nothing in it is pinned.
impl<B, E> Unpin for AnswerFuture<B, E> {}

impl<B, E> Future for AnswerFuture<B, E> {
    type Output = ClientAnswer<B, E>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        match &mut *self {
            // Polled after its end, it never ends again.
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
    /// Step 1. A hit from memory is answered at once, and clones neither the guard nor the inner service: threads that count clones of one
    /// thing wait for each other.
    pub(super) fn begin(inner: &S, mut request: Request<Q>, guard: Current<'_>) -> AnswerFuture<B, S::Error> {
        let (state, policy) = guard.parts();
        let join = |head: &str, parts: &[&str]| Key::from_texts(&state.namespace, head, parts);
        let mut considered = consider(&request, &policy.http.requests, join);
        if considered.as_ref().is_ok_and(|considered| considered.asked.other_cookies) {
            // What the answer does not see it can not depend on, whichever request it was loaded for.
            request.headers_mut().remove(COOKIE);
        }
        let at_own_key = match &mut considered {
            Ok(ConsideredRequest { key, asked, .. }) => at_own_key(&guard, key, asked, &request),
            Err(_) => None,
        };
        let guard = at_own_key.map_or(guard, Current::Newer);
        let mut audits = false;
        if let Ok(ConsideredRequest { key, is_get: true, asked }) = &considered
            && !asked.directives.only_if_cached
        {
            // Only a hit that is the stored response itself can be compared, and not a part or a confirmation.
            audits = !asked.conditional && !asked.ranged && guard.parts().1.audit.draws();
            if !audits && let Some(response) = hit_at_once(&guard, key, asked, &request) {
                return AnswerFuture::Hit(Some(response));
            }
        }
        let guard = guard.into_owned();
        let guard = match matched_route(&request) {
            Some(route) => guard.on_route(route),
            None => guard,
        };
        let (state, policy) = guard.parts();
        let told = considered.as_ref().ok().filter(|_| policy.http.tell_key);
        let told = told.map(|considered| considered.key.within(&state.namespace).to_owned());
        let exchange = Self { inner: inner.clone(), request };
        let answer = exchange.answer(guard, considered, audits);
        AnswerFuture::Further(match told {
            None => answer,
            Some(key) => Box::pin(async move {
                let mut response = answer.await?;
                write_key(response.headers_mut(), &key);
                Ok(response)
            }),
        })
    }

    /// Steps 2 to 8. Each way is boxed by itself, so that a hit moves and allocates only what a hit needs.
    fn answer(
        self,
        guard: StampedeGuard,
        considered: Result<ConsideredRequest<Key>, Rule>,
        audits: bool,
    ) -> BoxFuture<ClientAnswer<B, S::Error>> {
        let (state, policy) = guard.parts();
        match considered {
            Ok(_) if state.is_bypassed() => {
                Box::pin(self.pass(guard, Some(CacheStatus::bypass("switched-off"))))
            }
            Ok(_) if policy.shadow => Box::pin(self.shadowed(guard)),
            Ok(ConsideredRequest { key, is_get: true, asked }) if !asked.directives.only_if_cached => {
                Box::pin(self.cached(guard, key, asked, audits))
            }
            Ok(ConsideredRequest { key, asked, .. }) => Box::pin(self.look_up_only(guard, key, asked)),
            // Another protocol: nothing about it is ours to remark on.
            Err(Rule::Upgrade) => Box::pin(self.pass(guard, None)),
            Err(Rule::Method) => Box::pin(self.unsafely(guard)),
            Err(rule) => {
                observe::judged("not looked up", &rule);
                match rule {
                    Rule::Body => body_warning::tell(&self.request),
                    Rule::Extension => personal::tell(&self.request, &guard.parts().1.http.requests.personal),
                    _ => {}
                }
                Box::pin(self.pass(guard, Some(CacheStatus::bypass(rule.token()))))
            }
        }
    }

    /// Straight to the inner service.
    pub(super) async fn pass(
        self,
        guard: StampedeGuard,
        status: Option<CacheStatus>,
    ) -> ClientAnswer<B, S::Error> {
        guard.count_pass();
        let mut response = call(self.inner, self.request).await?.map(GuardedBody::passed);
        if let Some(status) = status {
            tell_forwarded(&mut response, &guard.parts().1.http, Outcome::Bypassed, status);
        }
        Ok(response)
    }

    /// Steps 2 to 8 for a GET; `audits` if a hit is to be audited.
    #[allow(clippy::manual_async_fn, reason = "the future of an `async fn` has room for its arguments twice")]
    fn cached(
        self,
        guard: StampedeGuard,
        key: Key,
        asked: RequestDemands,
        audits: bool,
    ) -> impl Future<Output = ClientAnswer<B, S::Error>> + Send {
        async move {
            let (state, policy) = guard.parts();
            let call = Call { state, policy, key: &key };
            let (headers, http) = (self.request.headers(), &policy.http);
            let wants = ResponseReader {
                asked: &asked,
                headers,
                http,
                at: LookUpKey::Resource(&key),
                status: CacheStatus::hit,
            };
            // Boxed, as all ways but the hit's: what they need would make the future of every hit larger.
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
                // The layer was put on twice, or the handler asks its own URL: the outer one does the work.
                Lookup::Failed(Failure::Guard(error)) if error.kind() == ErrorKind::Reentrant => {
                    Box::pin(self.pass(guard.clone(), Some(CacheStatus::bypass("nested"))))
                }
                lookup => Box::pin(self.onward(&guard, &key, asked, lookup)),
            };
            further.await
        }
    }

    /// The same, when it is no plain hit.
    async fn onward(
        self,
        guard: &StampedeGuard,
        key: &Key,
        asked: RequestDemands,
        lookup: Lookup<'_, StoredAnswer>,
    ) -> ClientAnswer<B, S::Error> {
        let (state, policy) = guard.parts();
        let wanted = LoadRequest::new(asked, self.request.headers().clone(), key.clone());
        let (loader, head) = loader(self.inner, self.request, state, policy, &wanted);
        let mut handler = MissHandler { guard, wanted: &wanted, head };
        let (place, loader) = match handler.answer(LookUpKey::Resource(key), key, lookup, loader).await {
            MissStep::Answered(answered) => return answered,
            MissStep::Elsewhere(place, loader) => (place, loader),
        };
        let key = place.key.clone();
        // Set here and nowhere else.
        let _ = wanted.variant.set(*place);
        let lookup =
            look(Call { state, policy, key: &key }, &handler.wants(LookUpKey::Variant, CacheStatus::hit))
                .await;
        match handler.answer(LookUpKey::Variant, &key, lookup, loader).await {
            MissStep::Answered(answered) => answered,
            // A variant is nowhere else than where it is.
            MissStep::Elsewhere(_, loader) => handler.alone(&key, loader, CacheStatus::miss("vary")).await,
        }
    }

    /// Step 2 for a request that is answered with what is stored, or by the inner service.
    async fn look_up_only(
        self,
        guard: StampedeGuard,
        key: Key,
        mut asked: RequestDemands,
    ) -> ClientAnswer<B, S::Error> {
        let (state, policy) = guard.parts();
        let is_head = self.request.method() == Method::HEAD;
        // RFC 9110, 14.2: a range is for a GET.
        asked.ranged &= !is_head;
        let (headers, http) = (self.request.headers(), &policy.http);
        let wants = |at| ResponseReader { asked: &asked, headers, http, at, status: CacheStatus::hit };
        let mut found = if state.is_closed() {
            Ok(None)
        } else {
            find(&guard, &key, &wants(LookUpKey::Resource(&key))).await
        };
        if let Ok(Some(StoredAnswer::Elsewhere(place))) = &found {
            let place = place.key.clone();
            found = find(&guard, &place, &wants(LookUpKey::Variant)).await;
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
            _ if asked.directives.only_if_cached => {
                guard.count_answer(&key, Outcome::Failed);
                let text = "nothing that is stored may be used\n";
                let mut response = own_answer(StatusCode::GATEWAY_TIMEOUT, "only-if-cached", text);
                tell(&mut response, http, Outcome::Failed, Times::default());
                Ok(response)
            }
            Ok(_) | Err(_) => self.head(guard.clone(), key, &asked).await,
        }
    }
}

/// A hit from memory, before the future of any other way is made.
fn hit_at_once<Q, B>(
    guard: &StampedeGuard,
    key: &Key,
    asked: &RequestDemands,
    request: &Request<Q>,
) -> Option<Response<GuardedBody<B>>> {
    let (state, policy) = guard.parts();
    if state.is_bypassed() {
        return None;
    }
    let (headers, http) = (request.headers(), &policy.http);
    let (at, status) = (LookUpKey::Resource(key), CacheStatus::hit as fn(u64) -> CacheStatus);
    let wants = ResponseReader { asked, headers, http, at, status };
    match hit_at_once_by_key(Call { state, policy, key }, &wants)? {
        StoredAnswer::Response(replay) => {
            guard.count_answer_on(matched_route(request), key, Outcome::LocalHit);
            let mut response = replay.respond(http, Outcome::LocalHit);
            if http.tell_key {
                write_key(response.headers_mut(), key.within(&state.namespace));
            }
            Some(response)
        }
        // Another variant is looked up in its own place.
        StoredAnswer::Arriving(_) | StoredAnswer::Elsewhere(_) | StoredAnswer::NotForThis => None,
    }
}

/// The guard for a request that must not share the entry of its resource, with a key of its own and the resource as a tag, so that a
/// change of the resource reaches it. Such a request has another proxy's report than the policy's, or writes its target in another form
/// than the normal one: a router may answer `/p` and `/%70` differently, so a shared entry would let a stranger replace the response of
/// all others.
pub(super) fn at_own_key<Q>(
    guard: &StampedeGuard,
    key: &mut Key,
    asked: &RequestDemands,
    request: &Request<Q>,
) -> Option<StampedeGuard> {
    let (state, policy) = guard.parts();
    let report = if asked.forwarded { forwarding(request.headers()) } else { None };
    if report == policy.http.requests.report && !asked.other_form {
        return None;
    }
    let mut distinction = report.unwrap_or_default();
    if asked.other_form {
        for target in sent_target(request) {
            // No line of a report begins like this.
            distinction.extend_from_slice(format!("\n{target}").as_bytes());
        }
    }
    let resource = key.of_reports(&state.namespace);
    let policy = Policy { resource, ..Policy::clone(policy) };
    *key = key.of_report(&Fingerprint::of(&distinction).half());
    Some(guard.with_policy_here(policy))
}

/// What is stored and may be served, if anything.
async fn find(
    guard: &StampedeGuard,
    key: &Key,
    wants: &ResponseReader<'_>,
) -> Result<Option<StoredAnswer>, StoreError> {
    let (state, policy) = guard.parts();
    peek(Call { state, policy, key }, wants).await
}

/// RFC 9110, 9.3.2: the headers that a GET would have had. One without content has no length either (8.6), and all others
/// one: what an older version of this crate has stored may have two.
fn without_body(replay: &mut Replay) {
    if !has_no_content(replay.response.status()) {
        let length = HeaderValue::from(replay.response.body().len());
        replay.response.headers_mut().insert(CONTENT_LENGTH, length);
    }
    replay.trailers = None;
    replay.response.body_mut().clear();
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use bytes::Bytes;
    use http_body_util::Full;
    use tower::service_fn;

    use super::*;

    /// Each hit allocates this future. It has room for one read of Redis (1.6 KB) and what the answer needs; all other ways are
    /// boxed by themselves.
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
