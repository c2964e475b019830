//! Step 6 over HTTP: calls the inner service, and sends its answer to the client of the request.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use http::header::{ETAG, HeaderMap, IF_RANGE, RANGE};
use http::{Method, Response, StatusCode};
use http_body::SizeHint;
use tokio::time::Instant;

use super::answer::{
    CacheStatus, Fwd, NOT_VALIDATED, StandIn, age_and_status, answer, failed_answer, write_stand_in,
    write_status,
};
use super::body::GuardedBody;
use super::candidate::{StoredResponseToReplace, head_of};
use super::commit::{ClientAnswer, LoadRequest, Progress, Purpose, ResponseCommit};
use super::hold_back::{Pause, held_back, held_response, hold_back};
use super::inner_body::UpstreamBody;
use super::side_commit::SideCommit;
use super::stored::{ResponseMeta, StoredResponse};
use super::tags::CacheTagger;
use super::upstream::{UpstreamError, UpstreamRequest, UpstreamResponse};
use crate::error::Failure;
use crate::guard::load::Times;
use crate::guard_state::GuardState;
use crate::http_rules::Rule;
use crate::http_rules::cache_terms::CacheTerms;
use crate::http_rules::conditional::{add_conditions, freshened, is_about, remove_conditions};
use crate::http_rules::fields::retry_after;
use crate::http_rules::freshness::{LoadFailure, corrected_initial_age, instead_of};
use crate::loader::{LeaseState, LoadInput, LoadOutput, LoadResult, LoadScope, Loader, OwnAnswer};
use crate::observe::{Count, Outcome, failure_text};
use crate::policy::Policy;
use crate::read_through::call::Call;
use crate::read_through::look_up::read_entry;
use crate::store::StoreError;
use crate::store::load_limit::LoadEnd;

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
        let previous = previous.and_then(|previous| StoredResponseToReplace::of(previous, state.store.now()));
        let mut commit = ResponseCommit {
            mode,
            policy,
            load_request,
            state,
            side_commit: SideCommit::default(),
            previous,
            method: Method::GET,
            target: None,
            fwd: Fwd::MISS,
            is_held_back: false,
            delay: Duration::ZERO,
            now: SystemTime::now(),
            client: Some(client),
            delivery,
            tagger: CacheTagger::default(),
        };
        commit.fwd = commit.forward_reason();
        let stored_at = commit.load_request.state().stored_at.clone();
        if let Some(key) = stored_at {
            commit.side_commit = SideCommit::begin(&commit.state, &commit.policy, &key, (None, true)).await;
        }
        // A little before the flight's own bound, so that a slow body is handed over to its client instead of being cut
        // off with the load.
        let until = Instant::now() + commit.policy.load_timeout - commit.policy.load_timeout / 20;
        commit.load(request, until).await
    });
    (loader.that_may_tag(), answer)
}

/// How a load with this response has ended, for an adaptive limit of loads.
fn end_of(status: StatusCode) -> LoadEnd {
    match status {
        StatusCode::TOO_MANY_REQUESTS => LoadEnd::Refused,
        status if status.is_server_error() => LoadEnd::Failed,
        _ => LoadEnd::Done,
    }
}

/// The result of a load for which the inner service returned an error instead of a response.
fn no_answer(error: &UpstreamError) -> LoadResult {
    LoadResult::failed(Failure::with_text(failure_text(error)))
}

/// Counts a 5xx of the origin as a failed load. The client receives it like any other response.
fn count_error<B>(policy: &Policy, response: &Response<B>) {
    if response.status().is_server_error() {
        policy.count(Count::load_errors);
    }
}

impl ResponseCommit {
    /// Loads for all requests that wait for the response. `until` bounds the time in which the body is read for them.
    async fn load(mut self, request: UpstreamRequest, until: Instant) -> LoadOutput {
        let may_hold_back = !self.policy.http.retry_after.is_zero();
        // Boxed, here and below: the future of a load has no room for what few policies have.
        let held_back = match may_hold_back {
            true => Box::pin(held_back(&self.state, &self.policy, &self.load_request.resource)).await,
            false => None,
        };
        self.is_held_back = held_back.is_some();
        let (response, is_contradicted) = match held_back {
            Some(left) => (Ok(held_response(left)), false),
            None => self.forward(request).await,
        };
        let response = match response {
            Ok(response) => response,
            Err(error) => return self.fail(error).await,
        };
        let status = response.status();
        // An adaptive limit counts a load that is held back as refused: it must not let more loads run.
        let end = if self.is_held_back { LoadEnd::Refused } else { end_of(status) };
        let (status, response) = match Pause::of(status, &self.policy.http).filter(|_| !self.is_held_back) {
            Some(pause) => Box::pin(self.pause(pause, response)).await,
            None => (status, response),
        };
        if self.stands_in(LoadFailure::Status(status.as_u16())) {
            if !self.is_held_back {
                self.load_request.state().progress = Progress::Refused(status);
            }
            self.side_commit.leave().await;
            let failure = Failure::with_text(format!("the inner service answered {status}"));
            let rest = retry_after(response.headers(), self.now).unwrap_or_default();
            let failed = LoadResult::Failed { failure, before: self.errors_until() };
            return LoadOutput { end, rest, ..failed.into() };
        }
        if !self.is_held_back {
            count_error(&self.policy, &response);
        }
        let stands_in = self.stands_in(LoadFailure::Status(StatusCode::BAD_GATEWAY.as_u16()));
        // If the generation is unknown, do not store the response: under the earlier generation it would hide the other variants,
        // or make invalidated variants findable again.
        if self.mode == LeaseState::Leased && self.renew_generation().await.is_err() {
            self.mode = LeaseState::Unleased;
        }
        let stored = self.stored_whole().filter(|_| status == StatusCode::NOT_MODIFIED);
        let output = match stored.map(|stored| stored.response.clone()) {
            None => self.response(response, until).await,
            Some(_) if is_contradicted => self.contradicted(stands_in).await,
            Some(stored) => self.validated(response, stored).await,
        };
        LoadOutput { end, ..output }
    }

    /// Holds back further loads, if this response asks for a pause. A 429 that does is replaced by the answer to a load that is held back.
    async fn pause(
        &mut self,
        pause: Pause,
        response: Response<UpstreamBody>,
    ) -> (StatusCode, Response<UpstreamBody>) {
        let (status, of) = (response.status(), (pause, &self.load_request.resource));
        match hold_back(&self.state, &self.policy, of, response.headers(), self.now).await {
            Some(left) if status == StatusCode::TOO_MANY_REQUESTS => {
                self.is_held_back = true;
                let response = held_response(left);
                (response.status(), response)
            }
            _ => (status, response),
        }
    }

    /// Sends the request with the guard's conditions. If the answer is a 304 about another response than the stored one, sends the request
    /// again without conditions, if it can be copied and its response is stored under the key of its flight. Also returns whether the
    /// first answer was such a 304.
    async fn forward(&mut self, mut request: UpstreamRequest) -> (UpstreamResponse, bool) {
        // Of a guard outside this one, if there is one: its response has the same tags.
        self.tagger = request.head.extensions_mut().get_or_insert_default::<CacheTagger>().clone();
        let again = self.stored_whole().and_then(|_| request.copy());
        self.put_conditions(request.head.headers_mut());
        let mut sent_at = Instant::now();
        let response_future = request.send();
        self.load_request.state().progress = Progress::Forwarded;
        let stored_at = self.load_request.state().stored_at.clone();
        let mut response = match &stored_at {
            // Marks the resource's key as being loaded: a nested request for it would wait for this load's lease.
            Some(key) => {
                let outer = LoadScope::current();
                LoadScope::scope(self.state.store.store_id(), key, None, outer, response_future).await
            }
            None => response_future.await,
        };
        let is_contradicted = response.as_ref().is_ok_and(|response| {
            let (status, headers) = (response.status(), response.headers());
            status == StatusCode::NOT_MODIFIED
                && self
                    .stored_whole()
                    .is_some_and(|stored| !is_about(headers, &stored.response.headers, SystemTime::now()))
        });
        if let Some(mut again) = again.filter(|_| is_contradicted && stored_at.is_none()) {
            remove_conditions(again.head.headers_mut());
            sent_at = Instant::now();
            response = again.send().await;
        }
        (self.now, self.delay) = (SystemTime::now(), sent_at.elapsed());
        (response, is_contradicted)
    }

    /// Replaces the client's conditions by the guard's, so that the answer suits all requests: it is the whole, or confirms
    /// the stored response. The load of a part retains the request's range.
    fn put_conditions(&self, request: &mut HeaderMap) {
        let is_part = self.load_request.is_part();
        let range = [RANGE, IF_RANGE].map(|name| (request.get(&name).cloned().filter(|_| is_part), name));
        match self.stored_whole() {
            Some(stored) => add_conditions(request, &stored.response.headers),
            None => remove_conditions(request),
        }
        for (value, name) in range {
            if let Some(value) = value {
                request.insert(name, value);
            }
        }
    }

    /// Ends a load without an answer. The client gets the error itself, after the waiters were notified: its immediate retry must
    /// not join this load.
    async fn fail(mut self, error: UpstreamError) -> LoadOutput {
        self.side_commit.leave().await;
        // If the flight ends with the stale response, the client of this load gets that response instead of the error.
        // A client that refuses stale responses gets the error here.
        let now = self.state.store.now();
        let stale_ends_flight =
            self.previous.as_ref().is_some_and(|stored| stored.entry.times().stands_in(now));
        let insists = stale_ends_flight && !self.stands_in(LoadFailure::Disconnected);
        let failed = self.after_commit(no_answer(&error), move |commit| commit.send(Err(error)));
        if insists { failed.settle().into() } else { failed }
    }

    /// The stored response, if it is the variant for this request: the entry may be another variant.
    fn stored_variant(&self) -> Option<&StoredResponseToReplace> {
        let (headers, normal) = (&self.load_request.headers, self.policy.http.normal());
        self.previous.as_ref().filter(|previous| previous.meta.is_for(headers, normal))
    }

    /// The stored response, if it may be validated: it is the whole response of the variant for this request.
    fn stored_whole(&self) -> Option<&StoredResponseToReplace> {
        self.stored_variant().filter(|stored| stored.meta.part.is_none() && !self.load_request.is_part())
    }

    /// Whether the stored response is served instead of this failure (RFC 5861, 4).
    fn stands_in(&self, failed: LoadFailure) -> bool {
        self.stored_variant().is_some_and(|stored| {
            let now = self.state.store.now();
            let (age, terms) = stored.meta.at(&stored.entry, now);
            stored.entry.times().stands_in(now)
                && instead_of(failed, &self.load_request.demands, &terms, age, &self.policy.http)
        })
    }

    /// Reads the generation of the resource's variants again, if this load may store one of them under the resource's key: it was
    /// read before this load had the lease, so the resource may have been invalidated since, and then gets a new generation. A
    /// later invalidation takes the lease away.
    async fn renew_generation(&mut self) -> Result<(), StoreError> {
        let Self { state, policy, load_request, previous, .. } = self;
        let variant = previous.as_mut().and_then(|previous| previous.meta.variant.as_mut());
        let Some(variant) = variant.filter(|_| load_request.variant.get().is_none()) else { return Ok(()) };
        let stored = read_entry(Call { state, policy, key: &load_request.resource }).await?;
        let value = stored.as_ref().and_then(|stored| stored.value());
        let stored = value.filter(|value| !value.expiry.is_expired()).and_then(ResponseMeta::of);
        let generation = stored.and_then(|(meta, _)| Some(meta.variant?.generation));
        if generation != Some(variant.generation) {
            variant.generation = fastrand::u64(..);
        }
        Ok(())
    }

    /// Why the request is forwarded (RFC 9211, 2.2).
    fn forward_reason(&self) -> Fwd {
        let purpose = self.load_request.state().purpose;
        match &self.previous {
            Some(_) if self.stored_variant().is_none() => Fwd::VARY_MISS,
            Some(previous) if previous.meta.part.is_some() => Fwd::PARTIAL,
            Some(previous) if previous.entry.is_fresh(self.state.store.now()) => Fwd::REQUEST,
            Some(_) => Fwd::STALE,
            // Only a leased load, or one after a look-up, knows that no response is stored for the URI.
            None if self.mode == LeaseState::Unleased && purpose == Purpose::AnswerUnread => Fwd::MISS,
            None if self.load_request.variant.get().is_some() => Fwd::VARY_MISS,
            None => Fwd::URI_MISS,
        }
    }

    /// Handles a 304 that confirms the stored response (RFC 9111, 4.3.4): updates its head by that of the 304, stores it again, and
    /// answers with it.
    async fn validated(
        mut self,
        mut confirmation: Response<UpstreamBody>,
        stored: StoredResponse,
    ) -> LoadOutput {
        let StoredResponse { status, version, headers, body, trailers } = stored;
        let mut head = head_of(status, version, freshened(&headers, confirmation.headers()));
        // The extensions of the 304, such as `DoNotStore`, hold for the response that it confirms.
        head.extensions.extend(std::mem::take(confirmation.extensions_mut()));
        let previous_terms =
            self.previous.as_ref().and_then(|previous| previous.meta.handler_terms.as_deref());
        if let (Some(terms), None) = (previous_terms, head.extensions.get::<CacheTerms>()) {
            head.extensions.insert(*terms);
        }
        let has_tags = self.tagger.has_tags(&head);
        let candidate = self.candidate(&head, SizeHint::with_exact(body.len() as u64));
        let is_too_old = candidate.as_ref().is_ok_and(|candidate| candidate.is_too_old);
        let trailers = trailers.map(|trailers| *trailers);
        let (ttl, result) = match candidate {
            Ok(mut candidate) => {
                self.invalidate_if_names_changed(&mut candidate).await;
                self.learn_search(&head, &candidate).await;
                let ttl = candidate.ttl();
                let unstored = self.unstored(status);
                if !has_tags {
                    self.add_previous_tags(&mut candidate);
                }
                if let Some(tag) = candidate.add_digest_tag(&body, &self.policy) {
                    head.headers.insert(ETAG, tag);
                }
                let result = candidate.finish(body.clone(), trailers.clone(), None, unstored, &self.policy);
                (ttl, self.side_commit.store(result, false).await)
            }
            // With its new head the validated response is for one client only.
            Err(rule) => {
                let result = self.unshared(rule, status);
                self.side_commit.leave().await;
                (None, result)
            }
        };
        let status = CacheStatus::Forwarded {
            fwd: self.fwd,
            status: Some(StatusCode::NOT_MODIFIED),
            stored: ttl,
            detail: is_too_old.then_some(Rule::TooOld.token()),
        };
        let mut own = StoredResponse::new(&head, self.now, body, trailers);
        let age = corrected_initial_age(&head.headers, self.delay, self.now);
        let answered = answer(&self.load_request.demands, &self.load_request.headers, &mut own, None, age);
        self.after_commit(result, move |commit| {
            if answered.is_some() {
                write_status(&mut own.headers, status);
                let times = Times::just_loaded(Duration::from_secs(ttl.unwrap_or(0)));
                commit.send(Ok(own.respond(&commit.policy.http, Outcome::Led, times)));
            }
        })
    }

    /// Handles a 304 that does not refer to the stored response (RFC 9111, 4.3.4): answers with the stale response if
    /// `stands_in`, else with a 502. Invalidates the stored response, and one of the waiters loads the whole. (The
    /// request is not sent again: it already was, its body went with the first call, or it has a side commit.)
    async fn contradicted(mut self, stands_in: bool) -> LoadOutput {
        self.side_commit.leave().await;
        let Self { load_request, state, policy, .. } = &self;
        let is_invalidated =
            state.invalidate_unawaited(load_request.key(), policy.command_timeout).await.is_ok();
        let stale = self.previous.as_ref().filter(|_| stands_in).and_then(|previous| {
            let now = state.store.now();
            let (age, _) = previous.meta.at(&previous.entry, now);
            let mut response = previous.response.clone();
            answer(&load_request.demands, &load_request.headers, &mut response, None, age)?;
            let headers = &mut response.headers;
            age_and_status(headers, age.as_secs(), CacheStatus::stale(&previous.entry, now));
            write_stand_in(headers, StandIn::Forwarded(Some(StatusCode::NOT_MODIFIED)));
            Some(response.respond(&policy.http, Outcome::Stale, Times::of(&previous.entry, now)))
        });
        let text = "the origin answered about something else\n";
        let own = stale
            .unwrap_or_else(|| failed_answer(&policy.http, StatusCode::BAD_GATEWAY, NOT_VALIDATED, text));
        let result = if is_invalidated { LoadResult::OnlyForCaller } else { LoadResult::of_resource() };
        // Answer the client after the waiters were notified: it may repeat its request at once.
        self.after_commit(result, move |commit| commit.send(Ok(own)))
    }
}
