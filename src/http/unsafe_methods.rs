//! Requests that affect stored responses besides their own: unsafe methods invalidate them (RFC 9111, 4.4), and a
//! HEAD may update them (4.3.5).

use std::fmt;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use futures_util::FutureExt as _;
use http::response::Parts;
use http::{HeaderMap, Method, Response, StatusCode, Uri};
use http_body::SizeHint;
use tokio::runtime::Handle;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout};
use tracing::Instrument as _;

use super::answer::{CacheStatus, Fwd, load_failed, set_answer_info, set_forwarded_status};
use super::body::GuardedBody;
use super::candidate::{StoreCandidate, StoredResponseToReplace, head_of};
use super::commit::{ClientAnswer, LoadRequest, ResponseCommit};
use super::exchange::separate_key;
use super::of_keys;
use super::side_commit::SideCommit;
use super::stored::StoredResponse;
use super::tags::{CacheTagger, invalidate_groups, own_tags};
use super::upstream::{BoxFuture, UpstreamRequest, UpstreamResponse};
use crate::guard::StampedeGuard;
use crate::guard::invalidation::Invalidation;
use crate::guard::load::Times;
use crate::guard_state::GuardState;
use crate::http_rules::cache_terms::CacheTerms;
use crate::http_rules::conditional::{HeadUpdate, freshened, head_update};
use crate::http_rules::request::{ChangedResources, ConsideredRequest, RequestDemands, consider_post};
use crate::http_rules::response::{DoNotStore, RequestResponse, Verdict, classify};
use crate::http_rules::settings::ResponseRules;
use crate::http_rules::vary::Vary;
use crate::key::Key;
use crate::loader::{Delivery, LeaseState, LoadResult};
use crate::observe::{Outcome, log, warn_if};
use crate::read_through::call::Call;
use crate::read_through::look_up::read_entry;
use crate::value::StoredEntry;
use crate::value::entry::Unstored;

impl UpstreamRequest {
    /// Forwards an unsafe request, and invalidates the responses that it may have changed.
    pub(super) async fn unsafely(self, guard: StampedeGuard) -> ClientAnswer {
        let (_, policy) = guard.parts();
        let changed = ChangedResources::of(&self.head, &policy.http.requests);
        if policy.http.strict_rfc
            && let Some(changed) = &changed
            && let Ok(post) = consider_post(&self.head, &policy.http.requests)
        {
            return Box::pin(self.post(&guard, post, changed)).await;
        }
        guard.count_pass();
        let response = send_unsafe(&guard, self, changed.as_ref()).await?;
        let mut response = response.map(GuardedBody::passed);
        if let Some(changed) = changed {
            send_invalidation(&guard, of_answer(&guard, &changed, response.status(), response.headers()))
                .await;
        }
        let status = CacheStatus::unstored(Fwd::METHOD, None);
        set_forwarded_status(&mut response, &policy.http, Outcome::Bypassed, status);
        Ok(response)
    }

    /// Forwards a POST, and stores its answer if that represents what a GET would return (RFC 9110, 9.3.3).
    async fn post(
        self,
        guard: &StampedeGuard,
        (ConsideredRequest { key, demands, .. }, target): (ConsideredRequest, Uri),
        changed: &ChangedResources,
    ) -> ClientAnswer {
        let Ok(mut key) = guard.key(key) else {
            return self.send().await.map(|r| r.map(GuardedBody::passed));
        };
        separate_key(guard, &mut key, &demands, &self.head, None);
        let (state, policy) = guard.parts();
        let load_request = LoadRequest::new(demands, self.head.headers().clone(), key.clone());
        guard.count_pass();
        let sent_at = Instant::now();
        let response = send_unsafe(guard, self, Some(changed)).await?;
        let (client, answer) = oneshot::channel();
        let mut commit = ResponseCommit {
            mode: LeaseState::Leased,
            policy: Arc::clone(policy),
            load_request,
            state: Arc::clone(state),
            side_commit: SideCommit::Refused,
            previous: None,
            method: Method::POST,
            target: Some(target),
            fwd: Fwd::METHOD,
            is_held_back: false,
            delay: sent_at.elapsed(),
            now: SystemTime::now(),
            client: Some(client),
            delivery: Delivery::default(),
            tagger: CacheTagger::default(),
        };
        let (head, body) = response.into_parts();
        send_invalidation(guard, of_answer(guard, changed, head.status, &head.headers)).await;
        let candidate = commit.candidate(&head, body.size());
        let is_stored = matches!(candidate, Ok(candidate) if candidate.is_stored());
        let until = sent_at + policy.load_timeout;
        let running = state.tasks.enter();
        let commit_task = async move {
            // Take the lease only after the response: during the POST, a GET of the resource would wait for that lease.
            if is_stored && !commit.state.is_closed() {
                commit.side_commit =
                    SideCommit::begin(&commit.state, &commit.policy, &key, (None, false)).await;
            }
            commit.response(Response::from_parts(head, body), until).await.settle();
            drop(running);
        };
        // The task reads the body, and events of the body belong to the request's span.
        tokio::spawn(commit_task.in_current_span());
        let mut answer = answer.await.unwrap_or_else(|_| Ok(load_failed()))?;
        set_answer_info(&mut answer, &policy.http, Outcome::Bypassed, Times::default());
        Ok(answer)
    }

    /// Forwards a HEAD that the store does not answer, and updates the stored response by its answer.
    pub(super) async fn head(
        self,
        guard: &StampedeGuard,
        key: &Key,
        demands: RequestDemands,
    ) -> ClientAnswer {
        let stored = stored_for_head(guard, key).await;
        guard.count_pass();
        let sent_at = Instant::now();
        let (head, body) = self.send().await?.into_parts();
        if let Some(stored) = stored {
            update_by_head(guard, key.clone(), &demands, stored, &head, sent_at).await;
        }
        let mut response = Response::from_parts(head, GuardedBody::passed(body));
        let status = CacheStatus::miss("head");
        set_forwarded_status(&mut response, &guard.parts().1.http, Outcome::Bypassed, status);
        Ok(response)
    }
}

/// The stored entry that a HEAD may update, and its response.
async fn stored_for_head(
    guard: &StampedeGuard,
    key: &Key,
) -> Option<(Arc<StoredEntry>, StoredResponseToReplace)> {
    let (state, policy) = guard.parts();
    if state.is_closed() {
        return None;
    }
    let entry = read_entry(Call { state, policy, key }).await.ok().flatten()?;
    let response = StoredResponseToReplace::of(entry.value()?.clone(), state.store.now())?;
    // A HEAD describes neither one of several variants nor a part well enough to update it.
    let is_only_one = response.meta.variant.is_none() && response.meta.part.is_none();
    is_only_one.then_some((entry, response))
}

/// Freshens or invalidates the stored response, or leaves it alone, as the answer to a HEAD says (RFC 9111, 4.3.5).
async fn update_by_head(
    guard: &StampedeGuard,
    key: Key,
    demands: &RequestDemands,
    (seen, stored): (Arc<StoredEntry>, StoredResponseToReplace),
    head: &Parts,
    sent_at: Instant,
) {
    let (state, policy) = guard.parts();
    let (now, rules) = (SystemTime::now(), ResponseRules::of(policy));
    let (status, headers) = (head.status, &head.headers);
    let terms: Option<CacheTerms> = head.extensions.get().copied();
    let handler_terms = terms.or_else(|| stored.meta.handler_terms.as_deref().copied()).unwrap_or_default();
    let StoredResponse { status: stored_status, version, headers: stored_headers, body, trailers } =
        stored.response;
    // Apply the HEAD's credentials, as for a GET; its other fields concern its own answer only.
    let demands = &RequestDemands {
        authorized: demands.authorized,
        has_cookie: demands.has_cookie,
        ..RequestDemands::default()
    };
    let exchange = RequestResponse {
        method: &Method::GET,
        target: None,
        demands,
        request_headers: &HeaderMap::new(),
        status,
        headers,
        // The stored body is whole.
        body: SizeHint::with_exact(body.len() as u64),
        do_not_store: head.extensions.get::<DoNotStore>().is_some(),
        terms: terms.unwrap_or_default(),
        delay: sent_at.elapsed(),
        now,
    };
    let invalidate = || send_invalidation(guard, guard.invalidation().key(key.cache_key(&state.namespace)));
    if (demands.has_credentials() || status == StatusCode::OK)
        && matches!(classify(&exchange, &rules), Verdict::Private(_))
    {
        // To a request with credentials, a private response is no evidence about the shared one. To any other, a GET would be
        // answered with the same head (RFC 9110, 9.3.2), which must not be stored.
        if !demands.has_credentials() {
            invalidate().await;
        }
        return;
    }
    match head_update((status, headers), (stored_status, &stored_headers), body.len() as u64, now) {
        HeadUpdate::Ignore => {}
        // The stored response is outdated: the representation has changed.
        HeadUpdate::Invalidate => invalidate().await,
        HeadUpdate::Freshen => {
            let head = head_of(stored_status, version, freshened(&stored_headers, headers));
            let confirmed = RequestResponse {
                status: head.status,
                headers: &head.headers,
                terms: handler_terms,
                ..exchange
            };
            if let Verdict::Store(storing) = classify(&confirmed, &rules)
                && storing.vary == Vary::Nothing
            {
                let candidate = StoreCandidate::stored(&head, storing, None, &policy.lifetimes(), now);
                let trailers = trailers.map(|trailers| *trailers);
                let fresh = candidate.finish(body.clone(), trailers, None, Unstored::OfResource, policy);
                freshen(guard, key, seen, fresh).await;
            }
        }
    }
}

/// Sends an unsafe request and returns its response. If there is none, invalidates the request's target: the origin may have made the
/// change.
async fn send_unsafe(
    guard: &StampedeGuard,
    mut request: UpstreamRequest,
    changed: Option<&ChangedResources>,
) -> UpstreamResponse {
    request.ready().await?;
    let Some(changed) = changed else { return request.call().await };
    let mut unsafe_request = UnsafeRequest { guard, changed, pending_call: None };
    let response = unsafe_request.pending_call.insert(request.call()).await;
    unsafe_request.pending_call = None;
    if response.is_err() {
        send_invalidation(guard, of_keys(guard, changed.target_keys())).await;
    }
    response
}

/// How long an inner service may still answer after the client has disconnected. A service that refuses a client does so
/// soon. Without this wait, any client could force reloads by disconnecting.
const LATE_ANSWER_TIMEOUT: Duration = Duration::from_secs(1);

/// The most late answers that are awaited at once. Beyond this number, the target of an abandoned request is invalidated immediately.
const MOST_LATE_ANSWERS: usize = 1_000;

/// An unsafe request that was sent. If it is dropped without a response (its client disconnected, or the inner service
/// panicked), the inner service's late answer decides what is invalidated; without such an answer it is the target. A
/// change that the origin makes after that goes unnoticed.
struct UnsafeRequest<'a> {
    guard: &'a StampedeGuard,
    changed: &'a ChangedResources,
    /// The call to the inner service, until its response is there.
    pending_call: Option<BoxFuture<UpstreamResponse>>,
}

impl Drop for UnsafeRequest<'_> {
    fn drop(&mut self) {
        let (pending_call, panics) = (self.pending_call.take(), std::thread::panicking());
        // Outside a runtime no task can be spawned for the invalidation.
        if (pending_call.is_none() && !panics) || Handle::try_current().is_err() {
            return;
        }
        let (guard, changed) = (self.guard.clone(), self.changed.clone());
        let state = guard.parts().0;
        // A service that has panicked sends no late answer.
        let pending_call = pending_call.filter(|_| !panics);
        let Some((pending_call, permit)) =
            pending_call.zip(state.http.abandoned_unsafe_requests.try_enter(MOST_LATE_ANSWERS))
        else {
            drop(begin_to_send(&guard, of_keys(&guard, changed.target_keys())));
            return;
        };
        let running = state.tasks.enter();
        let late_answer_task = async move {
            let late_answer =
                timeout(LATE_ANSWER_TIMEOUT, AssertUnwindSafe(pending_call).catch_unwind()).await;
            let invalidation = match late_answer {
                Ok(Ok(Ok(response))) => of_answer(&guard, &changed, response.status(), response.headers()),
                Ok(Ok(Err(_)) | Err(_)) | Err(_) => of_keys(&guard, changed.target_keys()),
            };
            drop(begin_to_send(&guard, invalidation));
            drop((permit, running));
        };
        tokio::spawn(late_answer_task.in_current_span());
    }
}

/// The invalidation of what an unsafe request has changed, by the head of its response.
fn of_answer(
    guard: &StampedeGuard,
    changed: &ChangedResources,
    status: StatusCode,
    headers: &HeaderMap,
) -> Invalidation {
    let keys = changed.keys(status, headers);
    // After an error there is no key, and no change is known.
    let resources = if keys.is_empty() { Vec::new() } else { changed.target_keys() };
    invalidate_groups(of_keys(guard, keys), &resources, headers)
}

/// Sends an invalidation. Continues in the background if the store takes longer than the request may wait.
async fn send_invalidation(guard: &StampedeGuard, invalidation: Invalidation) {
    if let Some(sending) = begin_to_send(guard, invalidation) {
        let _ = timeout(guard.parts().1.coordination_budget, sending).await;
    }
}

/// Begins the invalidation: later callers are served nothing older from memory, and join no load from before the change. Returns the
/// task that sends it, if an attempt can be made now. A task, so that neither the budget nor a client that leaves ends it.
fn begin_to_send(guard: &StampedeGuard, invalidation: Invalidation) -> Option<JoinHandle<()>> {
    let mut begun = invalidation.changes();
    let state = guard.parts().0;
    if begun.retain_unreachable() > 0 {
        still_stored(state, "the store is down; it is invalidated as soon as the store answers");
    }
    if !begun.has_changes() {
        return None;
    }
    let (running, state) = (state.tasks.enter(), Arc::clone(state));
    let sending = async move {
        for made in begun.make_each().await {
            match made {
                Ok(()) => state.http.invalidation_log.is_over(),
                Err(failed) => still_stored(&state, failed.error),
            }
        }
        drop(running);
    };
    Some(tokio::spawn(sending.in_current_span()))
}

/// Warns that responses that an unsafe request has changed are still stored: once per outage, because all invalidations fail alike.
fn still_stored(state: &GuardState, error: impl fmt::Display) {
    warn_if!(log::HTTP, state.http.invalidation_log.goes_on(), %error, "what an unsafe request has changed is still stored");
}

/// Replaces the stored response if it is still `seen`. Holds the resource's lease no longer than that takes, so that
/// no GET waits for a HEAD. Runs in a task, so that a cancelled HEAD leaves no lease behind.
async fn freshen(guard: &StampedeGuard, key: Key, seen: Arc<StoredEntry>, fresh: LoadResult) {
    let (state, policy) = guard.parts();
    let (running, guard) = (state.tasks.enter(), guard.clone());
    let freshening = tokio::spawn(async move {
        let (state, policy) = guard.parts();
        let raw = seen.raw(&key);
        let mut side_commit = SideCommit::begin(state, policy, &key, (Some(seen), false)).await;
        // Read under the lease: a later invalidation makes the commit fail.
        let stored = match &side_commit {
            SideCommit::Granted(_) => read_entry(Call { state, policy, key: &key }).await.ok().flatten(),
            SideCommit::No | SideCommit::Refused => None,
        };
        if let Some(stored) = stored.filter(|stored| stored.raw(&key) == raw) {
            if let Some(entry) = stored.value() {
                side_commit.keep_tags(own_tags(entry, state, policy, &key));
            }
            side_commit.store(fresh, false).await;
        } else {
            side_commit.leave().await;
        }
        drop(running);
    });
    let _ = timeout(policy.coordination_budget, freshening).await;
}
