//! Requests that tell something about what is stored beside their own answer: unsafe ones make it invalid
//! (RFC 9111, 4.4), and a HEAD may bring it up to date (4.3.5).

use std::fmt;

use http::{Method, Request, Response};
use http_body::Body;
use tokio::time::timeout;
use tower_service::Service;

use super::apart::Apart;
use super::body::{BoxError, GuardedBody};
use super::draft::{Draft, Previous, head_of};
use super::exchange::Exchange;
use super::invalidation::Invalidation;
use super::load::{Head, call};
use super::policy::ResponseRules;
use super::request::Asked;
use super::response::{self, DoNotStore, Verdict, judge};
use super::status::{CacheStatus, Fwd, write_status};
use super::validation::{HeadUpdate, freshened, head_update};
use super::vary::Vary;
use crate::caller::Ask;
use crate::guard::StampedeGuard;
use crate::key::Key;
use crate::node::Seen;
use crate::observe::Outcome;
use crate::read_through::read_entry;

impl<S, Q, B> Exchange<S, Q>
where
    S: Service<Request<Q>, Response = Response<B>> + Send + 'static,
    S::Future: Send + 'static,
    S::Error: fmt::Display + Send + 'static,
    Q: Body + Send + 'static,
    B: Body + Send + 'static,
    B::Data: Send,
    B::Error: Into<BoxError>,
{
    /// A method that is not answered from the store. What it may have changed is invalid afterwards.
    pub(super) async fn unsafely(self, guard: StampedeGuard) -> Head<B, S::Error> {
        let (node, policy) = guard.parts();
        let invalidation = Invalidation::of(&self.request, &policy.http.requests);
        node.counters.request(Outcome::Bypassed);
        let mut response = call(self.inner, self.request).await?.map(GuardedBody::passed);
        if let Some(invalidation) = invalidation {
            let keys = invalidation.keys(response.status(), response.headers());
            forget(&guard, keys.into_iter().filter_map(|key| guard.key(key).ok()).collect()).await;
        }
        let status = CacheStatus::Forwarded { fwd: Fwd::Method, status: None, stored: None, detail: None };
        write_status(response.headers_mut(), status);
        Ok(response)
    }

    /// A HEAD that what is stored does not answer.
    pub(super) async fn head(self, guard: StampedeGuard, key: Key) -> Head<B, S::Error> {
        let (node, policy) = guard.parts();
        let stored = match node.is_closed() {
            true => None,
            false => read_entry(Ask { node, policy, key: &key }).await.ok().flatten(),
        };
        let seen = stored.clone().map(|entry| Seen::entry(entry, &key));
        let previous = stored.and_then(Previous::of).filter(|previous| previous.kept.chosen.is_none());
        let apart = match &previous {
            Some(_) => Apart::begin(node, policy, &key, seen).await,
            None => Apart::Refused,
        };
        node.counters.request(Outcome::Bypassed);
        let asked_at = tokio::time::Instant::now();
        let response = call(self.inner, self.request).await;
        let (Some(previous), Ok(head)) = (previous, &response) else {
            apart.leave().await;
            return passed(response);
        };
        let now = std::time::SystemTime::now();
        let (headers, length) = (&previous.response.headers, previous.response.body.len() as u64);
        match head_update(head.status(), head.headers(), headers, length, now) {
            HeadUpdate::Ignore => apart.leave().await,
            HeadUpdate::Invalidate => {
                apart.leave().await;
                // What there is, is another representation by now.
                forget(&guard, vec![key]).await;
            }
            HeadUpdate::Freshen => {
                let headers = freshened(headers, head.headers());
                let do_not_store = head.extensions().get::<DoNotStore>().is_some();
                let head = head_of(previous.response.status, previous.response.version, headers);
                let exchange = response::Exchange {
                    method: &Method::GET,
                    target: None,
                    asked: &Asked::default(),
                    status: head.status,
                    headers: &head.headers,
                    do_not_store,
                    delay: asked_at.elapsed(),
                    now,
                };
                let (http, fresh_for, max_body) = (policy.http.clone(), policy.fresh_for, policy.max_body);
                match judge(&exchange, &ResponseRules { http, fresh_for, max_body }) {
                    Verdict::Store(storing) if storing.vary == Vary::Nothing => {
                        let draft = Draft::stored(&head, storing, None, &policy.lifetimes(), now);
                        let (body, trailers) = (previous.response.body.clone(), previous.response.trailers);
                        let trailers = trailers.map(|trailers| *trailers);
                        apart.store(draft.finish(body, trailers, None, policy.http.letter)).await;
                    }
                    _ => apart.leave().await,
                }
            }
        }
        passed(response)
    }
}

/// Removes what is stored under these keys. Goes on behind the response where the store takes longer than a
/// request may wait for it.
async fn forget(guard: &StampedeGuard, keys: Vec<Key>) {
    if keys.is_empty() {
        return;
    }
    let (node, policy) = guard.parts();
    let (running, guard) = (node.tasks.enter(), guard.clone());
    let forgetting = tokio::spawn(async move {
        for key in &keys {
            if let Err(error) = guard.forget(key).await {
                tracing::warn!(%error, "what an unsafe request has changed is still stored");
            }
        }
        drop(running);
    });
    let _ = timeout(policy.coordination_budget, forgetting).await;
}

/// A HEAD's own answer.
fn passed<B, E>(response: Result<Response<B>, E>) -> Head<B, E> {
    let mut response = response?.map(GuardedBody::passed);
    write_status(response.headers_mut(), CacheStatus::miss("head"));
    Ok(response)
}
