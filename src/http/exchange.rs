//! One request through the layer: steps 1 and 2, and the paths that follow a look-up.

use crate::http_rules::forwarding::forwarding;
use crate::http_rules::vary::Fingerprint;
use crate::policy::Policy;
use http::header::HeaderMap;
use std::fmt;
use std::pin::Pin;

use http::header::{CONTENT_LENGTH, COOKIE, HeaderValue};
use http::{Method, Request, Response, StatusCode};
use http_body::Body;
use tower_service::Service;

use super::body::{BoxError, GuardedBody};
use super::body_warning;
use super::cache_status::{CacheStatus, write_key, write_status};
use super::load::loader;
use super::miss::{Journey, Step, failed};
use super::respond::own_answer;
use super::respond::{At, Found, Replay, Wants};
use super::tee::has_no_content;
use super::wanted::{Head, Wanted, call};
use crate::error::{Error, ErrorKind, Failure};
use crate::guard::StampedeGuard;
use crate::http_rules::personal;
use crate::http_rules::reason::Rule;
use crate::http_rules::request::{Asked, Considered, consider};
use crate::key::Key;
use crate::observe::{self, Outcome};
use crate::policy::OnStoreDown;
use crate::read_through::look_up::Ask;
use crate::read_through::{Looked, look, peek};
use crate::store::StoreError;

/// Boxed, because an `async` block has no name; the public future type is opaque so that this can change.
pub(super) type Boxed<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// One request and the inner service that may answer it.
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
    /// Step 1. Each path is boxed separately, so that a hit moves and allocates only what a hit needs.
    pub(super) fn run(mut self, guard: StampedeGuard) -> Boxed<Head<B, S::Error>> {
        let (node, policy) = guard.parts();
        let join = |head: &str, parts: &[&str]| Key::from_texts(&node.namespace, head, parts);
        let mut considered = consider(&self.request, &policy.http.requests, join);
        if considered.as_ref().is_ok_and(|considered| considered.asked.other_cookies) {
            // The inner service must not see the cookies that are not in the key, so that its answer cannot depend
            // on them.
            self.request.headers_mut().remove(COOKIE);
        }
        let guard = match &mut considered {
            Ok(Considered { key, asked, .. }) => of_report(guard, key, asked, self.request.headers()),
            Err(_) => guard,
        };
        let (node, policy) = guard.parts();
        if policy.http.tell_key
            && let Ok(Considered { key, .. }) = &considered
        {
            let key = key.within(&node.namespace).to_owned();
            return Box::pin(async move {
                let mut response = self.answer(guard, considered).await?;
                write_key(response.headers_mut(), &key);
                Ok(response)
            });
        }
        self.answer(guard, considered)
    }

    fn answer(
        self,
        guard: StampedeGuard,
        considered: Result<Considered<Key>, Rule>,
    ) -> Boxed<Head<B, S::Error>> {
        match considered {
            Ok(Considered { key, is_get: true, asked }) if !asked.directives.only_if_cached => {
                Box::pin(self.cached(guard, key, asked))
            }
            Ok(Considered { key, asked, .. }) => Box::pin(self.look_up_only(guard, key, asked)),
            // Another protocol: the guard adds no remark to its response.
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

    /// Passes the request straight to the inner service.
    pub(super) async fn pass(self, guard: StampedeGuard, status: Option<CacheStatus>) -> Head<B, S::Error> {
        let (node, _) = guard.parts();
        node.counters.request(Outcome::Bypassed);
        let mut response = call(self.inner, self.request).await?.map(GuardedBody::passed);
        if let Some(status) = status {
            write_status(response.headers_mut(), status);
        }
        Ok(response)
    }

    /// Steps 2 to 8 for a GET.
    #[allow(clippy::manual_async_fn, reason = "the future of an `async fn` has room for its arguments twice")]
    fn cached(
        self,
        guard: StampedeGuard,
        key: Key,
        asked: Asked,
    ) -> impl Future<Output = Head<B, S::Error>> + Send {
        async move {
            let (node, policy) = guard.parts();
            let ask = Ask { node, policy, key: &key };
            let (headers, http) = (self.request.headers(), &policy.http);
            let wants =
                Wants { asked: &asked, headers, http, at: At::Resource(&key), status: CacheStatus::hit };
            // Boxed, as all paths except the hit's: their state would make the future of every hit larger.
            let further: Pin<Box<dyn Future<Output = _> + Send + '_>> = match look(ask, &wants).await {
                Looked::Hit(Found::Response(replay)) => {
                    node.answered(&key, Outcome::Hit);
                    return Ok(replay.respond());
                }
                // The layer was applied twice, or the handler requests its own URL: the outer layer does the work.
                Looked::Failed(Failure::Guard(error)) if error.kind() == ErrorKind::Reentrant => {
                    Box::pin(self.pass(guard.clone(), Some(CacheStatus::bypass("nested"))))
                }
                looked => Box::pin(self.onward(&guard, &key, asked, looked)),
            };
            further.await
        }
    }

    /// Answers a GET that is no plain hit.
    async fn onward(
        self,
        guard: &StampedeGuard,
        key: &Key,
        asked: Asked,
        looked: Looked<'_, Found>,
    ) -> Head<B, S::Error> {
        let (node, policy) = guard.parts();
        let wanted = Wanted::new(asked, self.request.headers().clone(), key.clone());
        let (loader, head) = loader(self.inner, self.request, node, policy, &wanted);
        let mut journey = Journey { guard, wanted: &wanted, head };
        let (place, loader) = match journey.answer(At::Resource(key), key, looked, loader).await {
            Step::Answered(answered) => return answered,
            Step::Elsewhere(place, loader) => (place, loader),
        };
        let key = place.key.clone();
        // The only place where this is set.
        let _ = wanted.variant.set(*place);
        let looked =
            look(Ask { node, policy, key: &key }, &journey.wants(At::Variant, CacheStatus::hit)).await;
        match journey.answer(At::Variant, &key, looked, loader).await {
            Step::Answered(answered) => answered,
            // A variant's key leads to no other key.
            Step::Elsewhere(_, loader) => journey.alone(&key, loader, CacheStatus::miss("vary")).await,
        }
    }

    /// Step 2 for a request that does not load into the store: answered from the store, or by the inner service.
    async fn look_up_only(self, guard: StampedeGuard, key: Key, mut asked: Asked) -> Head<B, S::Error> {
        let (node, policy) = guard.parts();
        let is_head = self.request.method() == Method::HEAD;
        // RFC 9110, 14.2: only GET has ranges.
        asked.ranged &= !is_head;
        let (headers, http) = (self.request.headers(), &policy.http);
        let wants = |at| Wants { asked: &asked, headers, http, at, status: CacheStatus::hit };
        let mut found =
            if node.is_closed() { Ok(None) } else { find(&guard, &key, &wants(At::Resource(&key))).await };
        if let Ok(Some(Found::Elsewhere(place))) = &found {
            let place = place.key.clone();
            found = find(&guard, &place, &wants(At::Variant)).await;
        }
        match found {
            Ok(Some(Found::Response(mut replay))) => {
                node.answered(&key, Outcome::Hit);
                if is_head {
                    without_body(&mut replay);
                }
                Ok(replay.respond())
            }
            Err(error) if policy.on_store_down == OnStoreDown::FailClosed => {
                let error = Error::store("looking up the entry", &key, error);
                Ok(failed(&guard, &key, Failure::Guard(error)))
            }
            _ if asked.directives.only_if_cached => {
                node.answered(&key, Outcome::Failed);
                let text = "nothing that is stored may be used\n";
                Ok(own_answer(StatusCode::GATEWAY_TIMEOUT, "only-if-cached", text))
            }
            Ok(_) | Err(_) => self.head(guard.clone(), key, &asked).await,
        }
    }
}

/// The guard and key for a request with its proxy report. A report other than the policy's has a separate key, with
/// the resource as a tag.
pub(super) fn of_report(
    guard: StampedeGuard,
    key: &mut Key,
    asked: &Asked,
    headers: &HeaderMap,
) -> StampedeGuard {
    let (node, policy) = guard.parts();
    let report = if asked.forwarded { forwarding(headers) } else { None };
    if report == policy.http.requests.report {
        return guard;
    }
    let resource = key.of_reports(&node.namespace);
    let policy = Policy { resource, ..Policy::clone(policy) };
    *key = key.of_report(&Fingerprint::of(&report.unwrap_or_default()).half());
    guard.with_policy(policy)
}

/// The stored response, if one may be served.
async fn find(guard: &StampedeGuard, key: &Key, wants: &Wants<'_>) -> Result<Option<Found>, StoreError> {
    let (node, policy) = guard.parts();
    peek(Ask { node, policy, key }, wants).await
}

/// RFC 9110, 9.3.2: the headers that a GET would have had. A response without content has no length either (8.6),
/// and all others have exactly one: responses that an older version of this crate stored may have two.
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

    /// glibc keeps freed blocks of up to 1,032 bytes per thread; beyond that, each hit of a hot key would pay for
    /// the heap's global bookkeeping. Half of it is left for the request, which has any size.
    #[tokio::test]
    async fn the_future_of_a_hit_is_small() {
        let guard = StampedeGuard::in_memory();
        let key = guard.key("k").expect("a key");
        let inner = service_fn(|_: Request<Full<Bytes>>| async {
            Ok::<_, Infallible>(Response::new(Full::new(Bytes::new())))
        });
        let request = Request::new(Full::default());
        let own = size_of_val(&request) + size_of_val(&inner);
        let hit = Exchange { inner, request }.cached(guard, key, Asked::default());
        let size = size_of_val(&hit);
        assert!(size - own <= 480, "{} bytes beside the request", size - own);
    }
}
