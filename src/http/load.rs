//! Step 6 over HTTP: calls the inner service, and sends its answer to the client of the request.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use http::header::{HeaderMap, IF_RANGE, RANGE};
use http::{Method, Response, StatusCode};
use http_body::SizeHint;
use tokio::time::Instant;

use super::answer::set_cache_status;
use super::answer::{CacheStatus, Fwd, NOT_VALIDATED, StandIn, age_and_status, write_stand_in, write_status};
use super::answer::{answer, own_answer};
use super::body::GuardedBody;
use super::candidate::{StoredResponseToReplace, head_of};
use super::commit::{ClientAnswer, LoadRequest, Progress, Purpose, ResponseCommit, errors_until};
use super::side_commit::SideCommit;
use super::stored::ResponseMeta;
use super::stored::StoredResponse;
use super::upstream::{UpstreamBody, UpstreamError, UpstreamRequest, UpstreamResponse};
use crate::error::Failure;
use crate::guard::load::Times;
use crate::guard_state::GuardState;
use crate::http_rules::Rule;
use crate::http_rules::conditional::{add_conditions, freshened, is_about, remove_conditions};
use crate::http_rules::freshness::corrected_initial_age;
use crate::http_rules::freshness::{LoadFailure, instead_of};
use crate::loader::LoadScope;
use crate::loader::{LeaseState, LoadInput, LoadOutput, LoadResult, Loader, OwnAnswer};
use crate::observe::{Count, Outcome, failure_text};
use crate::policy::Policy;
use crate::read_through::call::Call;
use crate::read_through::look_up::read_entry;
use crate::store::StoreError;
use crate::store::load_limit::LoadEnd;
use crate::value::entry::Entry;

/// Makes a request into a [`Loader`]. The client's answer comes through the receiver, before the load ends.
pub(super) fn loader(
    request: UpstreamRequest,
    state: &Arc<GuardState>,
    policy: &Arc<Policy>,
    load_request: &Arc<LoadRequest>,
) -> (Loader, OwnAnswer<ClientAnswer>) {
    let (client, answer) = OwnAnswer::early();
    let (state, policy, load_request) = (Arc::clone(state), Arc::clone(policy), Arc::clone(load_request));
    let loader = Loader::new(move |LoadInput { mode, previous, delivery, .. }| async move {
        if mode == LeaseState::Alone {
            // Only this client receives the answer, so the request is sent unchanged.
            return match request.send().await {
                Ok(response) => {
                    count_error(&policy, &response);
                    let _ = client.send(Ok(response.map(GuardedBody::passed)));
                    LoadResult::OnlyForCaller.into()
                }
                Err(error) => delivery.after_commit(no_answer(&error), move || drop(client.send(Err(error)))),
            };
        }
        let replaced = Replaced::of(previous, &load_request, &policy, &state);
        let fwd = fwd(&load_request, mode, &replaced, state.store.now());
        let stored_at = load_request.state().stored_at.clone();
        let side_commit = match stored_at {
            Some(key) => SideCommit::begin(&state, &policy, &key, None).await,
            None => SideCommit::default(),
        };
        // A little before the flight's own bound, so that a slow body is handed over to its client instead of being cut
        // off with the load.
        let until = Instant::now() + policy.load_timeout - policy.load_timeout / 20;
        let commit = ResponseCommit {
            mode,
            policy,
            load_request,
            state,
            side_commit,
            method: Method::GET,
            target: None,
            fwd,
            delay: Duration::ZERO,
            now: SystemTime::now(),
            client: Some(client),
            delivery,
        };
        load(request, commit, replaced, until).await
    });
    (loader, answer)
}

/// Loads for all requests that wait for the response. `until` bounds the time in which the body is read for them.
async fn load(
    request: UpstreamRequest,
    mut commit: ResponseCommit,
    mut replaced: Replaced,
    until: Instant,
) -> LoadOutput {
    let Sent { response, sent_at, is_contradicted } = send(request, &replaced, &mut commit).await;
    let response = match response {
        Ok(response) => response,
        Err(error) => return fail(error, commit, &replaced).await,
    };
    (commit.now, commit.delay) = (SystemTime::now(), sent_at.elapsed());
    let end = end_of(response.status());
    if replaced.stands_in(LoadFailure::Status(response.status().as_u16()), &commit) {
        commit.load_request.state().progress = Progress::Refused(response.status());
        commit.side_commit.leave().await;
        let text = format!("the inner service answered {}", response.status());
        let (failure, before) = (Failure::with_text(text), errors_until(replaced.previous.as_ref()));
        return LoadOutput { end, ..LoadResult::Failed { failure, before }.into() };
    }
    count_error(&commit.policy, &response);
    let stands_in = replaced.stands_in(LoadFailure::Status(StatusCode::BAD_GATEWAY.as_u16()), &commit);
    // Do not store: under the earlier generation the response would hide the other variants, or make invalidated
    // ones findable again.
    if commit.mode == LeaseState::Leased
        && !replaced.renew_generation(&commit.load_request, &commit.policy, &commit.state).await
    {
        commit.mode = LeaseState::Unleased;
    }
    LoadOutput { end, ..commit.of_load(response, &replaced, is_contradicted, stands_in, until).await }
}

/// What a response with this status says about the origin, for an adaptive limit of loads.
fn end_of(status: StatusCode) -> LoadEnd {
    match status {
        StatusCode::TOO_MANY_REQUESTS => LoadEnd::Refused,
        status if status.is_server_error() => LoadEnd::Failed,
        _ => LoadEnd::Done,
    }
}

/// Sends the request with the guard's conditions; and again, without any, if the answer is about another response.
async fn send(mut request: UpstreamRequest, replaced: &Replaced, commit: &mut ResponseCommit) -> Sent {
    let ResponseCommit { load_request, state, .. } = commit;
    let again = replaced.whole().and_then(|_| request.copy());
    condition(request.head.headers_mut(), load_request.is_part(), replaced.whole());
    let sent_at = Instant::now();
    let response_future = request.send();
    load_request.state().progress = Progress::Forwarded;
    let stored_at = load_request.state().stored_at.clone();
    let response = match &stored_at {
        // Marks the resource's key as being loaded: a nested request for it would wait for this load's lease.
        Some(key) => {
            let outer = LoadScope::current();
            LoadScope::scope(state.store.store_id(), key, None, outer, response_future).await
        }
        None => response_future.await,
    };
    let is_contradicted = response.as_ref().is_ok_and(|response| replaced.is_contradicted_by(response));
    match again {
        Some(mut again) if is_contradicted && stored_at.is_none() => {
            condition(again.head.headers_mut(), false, None);
            let sent_at = Instant::now();
            Sent { response: again.send().await, sent_at, is_contradicted }
        }
        _ => Sent { response, sent_at, is_contradicted },
    }
}

/// Ends a load without an answer. The client gets the error itself, after the waiters were notified: its immediate retry must not join
/// this load.
async fn fail(error: UpstreamError, mut commit: ResponseCommit, replaced: &Replaced) -> LoadOutput {
    std::mem::take(&mut commit.side_commit).leave().await;
    // If the stale response ends this flight, its client gets the stale response instead of the error. A
    // client that refuses stale responses gets the error here.
    let stale_ends_flight = replaced.entry().is_some_and(|e| e.expiry.stands_in(commit.state.store.now()));
    let insists = stale_ends_flight && !replaced.stands_in(LoadFailure::Disconnected, &commit);
    let failed = commit.after_commit(no_answer(&error), move |commit| commit.send(Err(error)));
    if insists { failed.settle().into() } else { failed }
}

/// The inner service's answer.
struct Sent {
    response: UpstreamResponse,
    sent_at: Instant,
    /// Whether the first answer said "not modified" about another response than the stored one.
    is_contradicted: bool,
}

/// The result of a call that failed.
fn no_answer(error: &UpstreamError) -> LoadResult {
    LoadResult::failed(Failure::with_text(failure_text(error)))
}

/// The stored response that a load may replace.
struct Replaced {
    previous: Option<StoredResponseToReplace>,
    /// Whether it may be validated: it is the whole response of the variant for this request.
    is_whole: bool,
    /// Whether it is the variant for this request.
    is_own: bool,
}

impl Replaced {
    fn of(previous: Option<Entry>, load_request: &LoadRequest, policy: &Policy, state: &GuardState) -> Self {
        let previous = previous.and_then(|previous| StoredResponseToReplace::of(previous, state.store.now()));
        // The stored entry may be another variant than the one for this request.
        let is_own = previous
            .as_ref()
            .is_some_and(|previous| previous.meta.is_for(&load_request.headers, policy.http.normal()));
        let is_part =
            load_request.is_part() || previous.as_ref().is_some_and(|previous| previous.meta.part.is_some());
        Self { previous, is_whole: is_own && !is_part, is_own }
    }

    fn whole(&self) -> Option<&StoredResponseToReplace> {
        self.previous.as_ref().filter(|_| self.is_whole)
    }

    fn entry(&self) -> Option<&Entry> {
        self.previous.as_ref().map(|previous| &previous.entry)
    }

    /// Whether the response says "not modified" about another response than the stored one.
    fn is_contradicted_by<B>(&self, response: &Response<B>) -> bool {
        response.status() == StatusCode::NOT_MODIFIED
            && self.whole().is_some_and(|stored| {
                !is_about(response.headers(), &stored.response.headers, SystemTime::now())
            })
    }

    /// Whether the stored response is served instead (RFC 5861, 4).
    fn stands_in(&self, failed: LoadFailure, commit: &ResponseCommit) -> bool {
        let ResponseCommit { load_request, policy, state, .. } = commit;
        self.previous.as_ref().filter(|_| self.is_own).is_some_and(|previous| {
            let (age, terms) = previous.meta.at(&previous.entry, state.store.now());
            instead_of(failed, &load_request.demands, &terms, age, &policy.http)
        })
    }

    /// Reads the generation of the resource's variants again, if this load may store one of them under the resource's key. Returns
    /// false if the store does not answer.
    async fn renew_generation(
        &mut self,
        load_request: &LoadRequest,
        policy: &Arc<Policy>,
        state: &Arc<GuardState>,
    ) -> bool {
        let variant = self.previous.as_mut().and_then(|previous| previous.meta.variant.as_mut());
        let Some(variant) = variant.filter(|_| load_request.variant.get().is_none()) else { return true };
        let call = Call { state, policy, key: &load_request.resource };
        match generation_again(call, variant.generation).await {
            Ok(generation) => variant.generation = generation,
            Err(_) => return false,
        }
        true
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
fn fwd(load_request: &LoadRequest, mode: LeaseState, replaced: &Replaced, now: u64) -> Fwd {
    let purpose = load_request.state().purpose;
    match &replaced.previous {
        Some(_) if !replaced.is_own => Fwd::VaryMiss,
        Some(previous) if previous.meta.part.is_some() => Fwd::Partial,
        Some(previous) if previous.entry.is_fresh(now) => Fwd::Request,
        Some(_) => Fwd::Stale,
        // Only a leased load, or one after a look-up, knows that no response is stored for the URI.
        None if mode == LeaseState::Unleased && purpose == Purpose::AnswerUnread => Fwd::Miss,
        None if load_request.variant.get().is_some() => Fwd::VaryMiss,
        None => Fwd::UriMiss,
    }
}

impl ResponseCommit {
    /// Ends a load with the inner service's response.
    async fn of_load(
        self,
        mut response: Response<UpstreamBody>,
        replaced: &Replaced,
        is_contradicted: bool,
        stands_in: bool,
        until: Instant,
    ) -> LoadOutput {
        let is_confirmed = response.status() == StatusCode::NOT_MODIFIED;
        match replaced.whole().filter(|_| is_confirmed) {
            None => self.response(response, replaced.previous.as_ref(), until).await,
            Some(stored) if !is_contradicted => {
                let headers = freshened(&stored.response.headers, response.headers());
                let mut head = head_of(stored.response.status, stored.response.version, headers);
                // The extensions of the 304, such as `DoNotStore`, hold for the response that it confirms.
                head.extensions.extend(std::mem::take(response.extensions_mut()));
                self.validated(head, stored).await
            }
            Some(stored) => self.contradicted(stored, stands_in).await,
        }
    }

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
        let own = answer(&self.load_request.demands, &self.load_request.headers, stored, None, age);
        self.after_commit(result, move |commit| {
            if let Some(mut own) = own {
                write_status(own.response.headers_mut(), status);
                own.times = Times::just_loaded(Duration::from_secs(ttl.unwrap_or(0)));
                commit.send(Ok(own.respond(&commit.policy.http, Outcome::Led)));
            }
        })
    }

    /// Handles a 304 that does not refer to the stored response (RFC 9111, 4.3.4): answers with the stale response if
    /// `stands_in`, else with a 502. Invalidates the stored response, and one of the waiters loads the whole. (The
    /// request cannot be sent again: either it already was, or its body went with the first call.)
    async fn contradicted(mut self, previous: &StoredResponseToReplace, stands_in: bool) -> LoadOutput {
        std::mem::take(&mut self.side_commit).leave().await;
        let Self { load_request, state, policy, .. } = &self;
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
        self.after_commit(result, move |commit| commit.send(Ok(own)))
    }
}
