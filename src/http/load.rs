//! Step 6 over HTTP: calls the inner service, and sends its answer to the client of the request.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use http::header::{HeaderMap, IF_RANGE, RANGE};
use http::{Method, Request, Response, StatusCode};
use http_body::{Body, SizeHint};
use tokio::sync::oneshot;
use tokio::time::Instant;
use tower_service::Service;

use super::answer::set_cache_status;
use super::answer::{CacheStatus, Fwd, NOT_VALIDATED, StandIn, age_and_status, write_stand_in, write_status};
use super::answer::{answer, own_answer};
use super::body::{BoxError, GuardedBody};
use super::candidate::{StoredResponseToReplace, head_of};
use super::commit::RetryableRequest;
use super::commit::{ClientAnswer, LoadRequest, Progress, Purpose, call};
use super::commit::{ClientSender, ResponseCommit, errors_until};
use super::side_commit::SideCommit;
use super::stored::ResponseMeta;
use super::stored::StoredResponse;
use crate::error::Failure;
use crate::guard::load::Times;
use crate::guard_state::GuardState;
use crate::http_rules::Rule;
use crate::http_rules::conditional::{add_conditions, freshened, is_about, remove_conditions};
use crate::http_rules::freshness::corrected_initial_age;
use crate::http_rules::freshness::{LoadFailure, instead_of};
use crate::loader::LoadScope;
use crate::loader::{LeaseState, LoadInput, LoadOutput, LoadResult, Loader};
use crate::observe::failure_text;
use crate::observe::{Count, Outcome};
use crate::policy::Policy;
use crate::read_through::call::Call;
use crate::read_through::look_up::read_entry;
use crate::store::StoreError;

/// Makes a request to `inner` into a [`Loader`]. The client's answer comes through the receiver, before the load
/// ends.
pub(crate) fn loader<S, Q, B>(
    inner: S,
    request: Request<Q>,
    state: &Arc<GuardState>,
    policy: &Arc<Policy>,
    load_request: &Arc<LoadRequest>,
) -> (Loader, oneshot::Receiver<ClientAnswer<B, S::Error>>)
where
    S: Service<Request<Q>, Response = Response<B>> + Clone + Send + 'static,
    S::Future: Send + 'static,
    S::Error: fmt::Display + Send + 'static,
    Q: Send + 'static,
    B: Body + Send + 'static,
    B::Data: Send,
    B::Error: Into<BoxError>,
{
    let (client, answer) = oneshot::channel();
    let (state, policy, load_request) = (Arc::clone(state), Arc::clone(policy), Arc::clone(load_request));
    let loader = Loader::new(move |input| async move {
        if input.mode == LeaseState::Alone {
            // Only this client receives the answer, so the request is sent unchanged.
            let answer = call(inner, request).await;
            return match answer {
                Ok(response) => {
                    count_error(&policy, &response);
                    let _ = client.send(Ok(response.map(GuardedBody::passed)));
                    LoadResult::OnlyForCaller.into()
                }
                Err(error) => failed(client, error),
            };
        }
        load(inner, request, state, policy, load_request, input, client).await
    });
    (loader, answer)
}

async fn load<S, Q, B>(
    inner: S,
    mut request: Request<Q>,
    state: Arc<GuardState>,
    policy: Arc<Policy>,
    load_request: Arc<LoadRequest>,
    input: LoadInput,
    client: ClientSender<B, S::Error>,
) -> LoadOutput
where
    S: Service<Request<Q>, Response = Response<B>> + Clone + Send + 'static,
    S::Future: Send + 'static,
    S::Error: fmt::Display + Send + 'static,
    Q: Send + 'static,
    B: Body + Send + 'static,
    B::Data: Send,
    B::Error: Into<BoxError>,
{
    let LoadInput { mut mode, previous, announcer, .. } = input;
    let mut previous = previous.and_then(|previous| StoredResponseToReplace::of(previous, state.store.now()));
    let is_part = load_request.is_part();
    // The stored entry may be another variant than the one for this request.
    let is_own = |previous: &StoredResponseToReplace| {
        previous.meta.is_for(&load_request.headers, policy.http.normal())
    };
    let is_own = previous.as_ref().is_some_and(is_own);
    let is_whole = |previous: &&StoredResponseToReplace| is_own && !is_part && previous.meta.part.is_none();
    let mut again = previous.as_ref().filter(is_whole).and_then(|_| RetryableRequest::of(&inner, &request));
    if let Some(again) = &mut again {
        condition(again.request.headers_mut(), false, None);
    }
    condition(request.headers_mut(), is_part, previous.as_ref().filter(is_whole));
    let fwd =
        fwd(&load_request, mode, previous.as_ref().map(|previous| (previous, is_own)), state.store.now());
    let stored_at = load_request.stored_at();
    let side_commit = match &stored_at {
        Some(key) => SideCommit::begin(&state, &policy, key, None).await,
        None => SideCommit::default(),
    };

    let load_timeout = policy.load_timeout;
    let mut sent_at = Instant::now();
    // A little before the flight's own bound, so that a slow body is handed over to its client instead of being cut
    // off with the load.
    let until = sent_at + load_timeout - load_timeout / 20;
    let response_future = call(inner, request);
    load_request.set_progress(Progress::Forwarded);
    let mut response = match &stored_at {
        // Marks the resource's key as being loaded: a nested request for it would wait for this load's lease.
        Some(key) => {
            LoadScope::scope(state.store.store_id(), key, LoadScope::current(), response_future).await
        }
        None => response_future.await,
    };
    let stored = previous.as_ref().filter(is_whole).map(|stored| &stored.response.headers);
    let contradicts = |response: &Response<B>| {
        response.status() == StatusCode::NOT_MODIFIED
            && stored.is_some_and(|stored| !is_about(response.headers(), stored, SystemTime::now()))
    };
    let is_contradicted = response.as_ref().is_ok_and(contradicts);
    if is_contradicted
        && stored_at.is_none()
        && let Some(again) = again
    {
        sent_at = Instant::now();
        response = again.send().await;
    }
    // Whether the stored response is served instead (RFC 5861, 4).
    let stands_in = |failed| {
        previous.as_ref().filter(|_| is_own).is_some_and(|StoredResponseToReplace { entry, meta, .. }| {
            let (age, terms) = meta.at(entry, state.store.now());
            instead_of(failed, &load_request.demands, &terms, age, &policy.http)
        })
    };
    let mut response = match response {
        Ok(response) => response,
        Err(error) => {
            side_commit.leave().await;
            let failed = failed(client, error);
            // If the stale response ends this flight, its client gets the stale response instead of the error. A
            // client that refuses stale responses gets the error here.
            let stale_ends_flight =
                previous.as_ref().is_some_and(|previous| previous.entry.expiry.stands_in(state.store.now()));
            let insists = stale_ends_flight && !stands_in(LoadFailure::Disconnected);
            return if insists { failed.settle().into() } else { failed };
        }
    };
    let now = SystemTime::now();
    if stands_in(LoadFailure::Status(response.status().as_u16())) {
        load_request.set_progress(Progress::Refused(response.status()));
        side_commit.leave().await;
        let text = format!("the inner service answered {}", response.status());
        return LoadResult::Failed {
            failure: Failure::with_text(text),
            before: errors_until(previous.as_ref()),
        }
        .into();
    }
    count_error(&policy, &response);
    let stands_in = stands_in(LoadFailure::Status(StatusCode::BAD_GATEWAY.as_u16()));
    let delay = sent_at.elapsed();
    if mode == LeaseState::Leased
        && load_request.variant.get().is_none()
        && let Some(variant) = previous.as_mut().and_then(|previous| previous.meta.variant.as_mut())
    {
        let ask = Call { state: &state, policy: &policy, key: &load_request.resource };
        match generation_again(ask, variant.generation).await {
            Ok(generation) => variant.generation = generation,
            // Do not store: under the earlier generation the response would hide the other variants, or make invalidated
            // ones findable again.
            Err(_) => mode = LeaseState::Unleased,
        }
    }
    let is_confirmed = response.status() == StatusCode::NOT_MODIFIED;
    let validated = previous.as_ref().filter(|_| is_confirmed).filter(is_whole);
    let method = Method::GET;
    let commit = ResponseCommit {
        mode,
        policy,
        load_request,
        state,
        side_commit,
        method,
        target: None,
        fwd,
        delay,
        now,
        client,
        announcer,
    };
    match validated {
        None => commit.response(response, previous.as_ref(), until).await,
        Some(stored) if !is_contradicted => {
            let headers = freshened(&stored.response.headers, response.headers());
            let mut head = head_of(stored.response.status, stored.response.version, headers);
            // The extensions of the 304, such as `DoNotStore`, hold for the response that it confirms.
            head.extensions.extend(std::mem::take(response.extensions_mut()));
            commit.validated(head, stored).await
        }
        Some(stored) => commit.contradicted(stored, stands_in).await,
    }
}

/// Counts a response that reports a failure of the origin. The client receives it like any other.
fn count_error<B>(policy: &Policy, response: &Response<B>) {
    if response.status().is_server_error() {
        policy.count(Count::load_errors);
    }
}

/// Replaces the client's conditions by the guard's, so that the answer suits all requests: it is the whole, or confirms
/// the stored response. The load of a part retains the request's range.
fn condition(request: &mut HeaderMap, is_part: bool, stored: Option<&StoredResponseToReplace>) {
    let range = [RANGE, IF_RANGE].map(|name| (request.get(&name).cloned().filter(|_| is_part), name));
    match stored {
        Some(previous) => add_conditions(request, &previous.response.headers),
        None => remove_conditions(request),
    }
    for (value, name) in range {
        if let Some(value) = value {
            request.insert(name, value);
        }
    }
}

/// The generation of a resource's variants, if the stored one is unchanged; otherwise a new one. The generation was
/// read before this load had the lease, so the resource may have been invalidated since; a later invalidation takes
/// the lease away.
async fn generation_again(ask: Call<'_>, read: u64) -> Result<u64, StoreError> {
    let stored = read_entry(ask).await?;
    let value = stored.as_ref().and_then(|stored| stored.value()).filter(|value| !value.expiry.is_expired());
    let variant = value.and_then(|value| ResponseMeta::of(value)?.0.variant);
    let same = variant.map(|variant| variant.generation).filter(|stored| *stored == read);
    Ok(same.unwrap_or_else(|| fastrand::u64(..)))
}

/// Why the request is forwarded (RFC 9211, 2.2).
fn fwd(
    load_request: &LoadRequest,
    mode: LeaseState,
    previous: Option<(&StoredResponseToReplace, bool)>,
    now: u64,
) -> Fwd {
    match previous {
        Some((_, false)) => Fwd::VaryMiss,
        Some((previous, true)) if previous.meta.part.is_some() => Fwd::Partial,
        Some((previous, true)) if previous.entry.is_fresh(now) => Fwd::Request,
        Some(_) => Fwd::Stale,
        // Only a leased load, or one after a look-up, knows that no response is stored for the URI.
        None if mode == LeaseState::Unleased && load_request.purpose() == Purpose::AnswerUnread => Fwd::Miss,
        None if load_request.variant.get().is_some() => Fwd::VaryMiss,
        None => Fwd::UriMiss,
    }
}

/// The result of a failed call. The client gets the error itself, after the waiters were notified: its immediate retry
/// must not join this load.
fn failed<B, E>(client: ClientSender<B, E>, error: E) -> LoadOutput
where
    B: Send + 'static,
    E: fmt::Display + Send + 'static,
{
    let text = failure_text(&error);
    let result = LoadResult::failed(Failure::with_text(text));
    LoadOutput { result, settled: Some(Box::new(move || drop(client.send(Err(error))))) }
}

impl<B, E> ResponseCommit<B, E>
where
    B: Send + 'static,
    E: Send + 'static,
{
    /// Stores and answers with the validated response (RFC 9111, 4.3.4), with this head from now on.
    async fn validated(
        mut self,
        head: http::response::Parts,
        previous: &StoredResponseToReplace,
    ) -> LoadOutput {
        let (body, trailers) = (previous.response.body.clone(), previous.response.trailers.clone());
        let whole = SizeHint::with_exact(body.len() as u64);
        let candidate = self.candidate(&head, whole, Some(previous));
        let is_too_old = candidate.as_ref().is_ok_and(|candidate| candidate.is_too_old);
        let (ttl, result) = match candidate {
            Ok(mut candidate) => {
                self.invalidate_if_names_changed(&mut candidate).await;
                let ttl = candidate.ttl();
                let trailers = trailers.as_deref().cloned();
                let unstored = self.unstored(head.status);
                let result = candidate.finish(body.clone(), trailers, None, unstored, &self.policy);
                (ttl, std::mem::take(&mut self.side_commit).store(result, false).await)
            }
            // With its new head the validated response is for one client only.
            Err(rule) => {
                let result = self.unshared(rule, head.status, Some(previous));
                std::mem::take(&mut self.side_commit).leave().await;
                (None, result)
            }
        };
        let status = CacheStatus::Forwarded {
            fwd: self.fwd,
            status: Some(StatusCode::NOT_MODIFIED),
            stored: ttl,
            detail: is_too_old.then_some(Rule::TooOld.token()),
        };
        let stored = StoredResponse::new(&head, self.now, body, trailers.map(|trailers| *trailers));
        let age = corrected_initial_age(&head.headers, self.delay, self.now);
        let Self { load_request, client, policy, .. } = self;
        let own = answer(&load_request.demands, &load_request.headers, stored, None, age);
        let release = move || {
            if let Some(mut own) = own {
                write_status(own.response.headers_mut(), status);
                own.times = Times::just_loaded(Duration::from_secs(ttl.unwrap_or(0)));
                let _ = client.send(Ok(own.respond(&policy.http, Outcome::Led)));
            }
        };
        LoadOutput { result, settled: Some(Box::new(release)) }
    }

    /// Handles a 304 that does not refer to the stored response (RFC 9111, 4.3.4): answers with the stale response if
    /// `stands_in`, else with a 502. Invalidates the stored response, and one of the waiters loads the whole. (The
    /// request cannot be sent again: either it already was, or its body went with the first call.)
    async fn contradicted(self, previous: &StoredResponseToReplace, stands_in: bool) -> LoadOutput {
        let Self { load_request, state, policy, side_commit, client, .. } = self;
        side_commit.leave().await;
        let key = load_request.variant.get().map_or(&load_request.resource, |slot| &slot.key);
        let is_invalidated = state.invalidate_unawaited(key, policy.command_timeout).await.is_ok();
        let now = state.store.now();
        let (age, _) = previous.meta.at(&previous.entry, now);
        let stored =
            || answer(&load_request.demands, &load_request.headers, previous.response.clone(), None, age);
        let own = match stands_in.then(stored).flatten() {
            Some(mut replay) => {
                let headers = replay.response.headers_mut();
                age_and_status(headers, age.as_secs(), CacheStatus::stale(&previous.entry, now));
                write_stand_in(headers, StandIn::Forwarded(Some(StatusCode::NOT_MODIFIED)));
                replay.times = Times::of(&previous.entry, now);
                replay.respond(&policy.http, Outcome::Stale)
            }
            None => {
                let text = "the origin answered about something else\n";
                let mut response = own_answer(StatusCode::BAD_GATEWAY, NOT_VALIDATED, text);
                set_cache_status(&mut response, &policy.http, Outcome::Failed, Times::default());
                response
            }
        };
        let result = if is_invalidated { LoadResult::OnlyForCaller } else { LoadResult::of_resource() };
        // Answer the client after the waiters were notified: it may repeat its request at once.
        LoadOutput { result, settled: Some(Box::new(move || drop(client.send(Ok(own))))) }
    }
}
