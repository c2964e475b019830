//! Audits over HTTP, and the trial of a guard beside a service: the inner service is asked beside a client that has its answer.

use std::fmt;
use std::future::poll_fn;
use std::pin::pin;

use bytes::{Bytes, BytesMut};
use http::{Request, Response, StatusCode};
use http_body::Body;
use tower_service::Service;

use super::body::{BoxError, GuardedBody, to_bytes};
use super::candidate::StoredResponseToReplace;
use super::exchange::Exchange;
use super::load_request::{ClientAnswer, call};
use super::retry::RetryableRequest;
use crate::guard::StampedeGuard;
use crate::guard::current::Current;
use crate::http_rules::validation::remove_conditions;
use crate::key::Key;
use crate::loader::nesting::LoadScope;
use crate::policy::Policy;
use crate::policy::audit::Encoded;
use crate::read_through::audit::Audit;
use crate::read_through::call::Call;
use crate::value::entry::Encoding;

/// What an audit compares.
struct Seen {
    status: StatusCode,
    body: Bytes,
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
    /// Audits the hit that this request, which is no longer needed, was answered with.
    pub(super) fn audit(self, guard: &StampedeGuard, key: &Key) {
        let (state, policy) = guard.parts();
        let Some(audit) = Audit::begin(Call { state, policy, key }) else { return };
        let Self { inner, mut request } = self;
        remove_conditions(request.headers_mut());
        let (asked, normal, max_body) = (request.headers().clone(), policy.http.normal(), policy.max_body);
        let load = async move {
            let (head, body) = call(inner, request).await.ok()?.into_parts();
            let is_answer = !head.status.is_server_error();
            Some(Seen { status: head.status, body: whole(body, max_body).await? }).filter(|_| is_answer)
        };
        let load = LoadScope::scope(state.store.place(), key, LoadScope::current(), load);
        let now = state.store.now();
        audit.spawn(load, move |policy, served, loaded| {
            let served = StoredResponseToReplace::of(served.clone(), now)?;
            // Meanwhile another variant may have come to this place.
            let is_own = served.kept.is_for(&asked, normal) && served.kept.part.is_none();
            is_own.then(|| is_same(policy, &served, loaded)).flatten()
        });
    }

    /// Answers by the inner service alone. The guard goes its way beside it, with a request of its own.
    pub(super) async fn shadowed(self, guard: StampedeGuard) -> ClientAnswer<B, S::Error> {
        if let Some(RetryableRequest { inner, request }) = RetryableRequest::of(&self.inner, &self.request) {
            let (_, policy) = guard.parts();
            let guard = guard.with_policy_here(Policy { shadow: false, ..Policy::clone(policy) });
            tokio::spawn(async move {
                // The response is dropped: a load that has begun goes on and is stored.
                drop(Self::begin(&inner, request, Current::Newer(guard)).await);
            });
        }
        Ok(call(self.inner, self.request).await?.map(GuardedBody::passed))
    }
}

fn is_same(policy: &Policy, served: &StoredResponseToReplace, loaded: &Seen) -> Option<bool> {
    if served.response.status != loaded.status {
        return Some(false);
    }
    let bodies = [&served.response.body, &loaded.body];
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
