//! [`ResponseCommit`]: decides at the head which requests a response answers, and reads its body for them.
//!
//! [`LoadRequest`] is the request for which the response is loaded.

use std::future::{Future as _, poll_fn};
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use http::header::{ETAG, HeaderMap, HeaderValue};
use http::response::Parts;
use http::{Method, Response, StatusCode, Uri};
use http_body::SizeHint;
use tokio::time::Instant;

use super::answer::{CacheStatus, Fwd, VariantSlot, set_forwarded_status};
use super::body::GuardedBody;
use super::candidate::{StoreCandidate, StoredResponseToReplace, head_of};
use super::hold_back::HELD_BACK;
use super::inner_body::UpstreamBody;
use super::search::learn;
use super::side_commit::SideCommit;
use super::stored::{VariantId, is_replayable, is_storable};
use super::tags::{CacheTagger, own_tags};
use super::tee::{Teed, ends_with_head, has_no_content, tee};
use super::upstream::UpstreamError;
use crate::error::{Error, Failure};
use crate::guard_state::GuardState;
use crate::http_rules::Rule;
use crate::http_rules::cache_terms::CacheTerms;
use crate::http_rules::conditional::{is_not_modified, not_modified};
use crate::http_rules::fields::{content_length, least_length};
use crate::http_rules::freshness::{Subject, corrected_initial_age, is_failure, is_reload, is_unstorable};
use crate::http_rules::request::RequestDemands;
use crate::http_rules::response::{DoNotStore, RequestResponse, Verdict, classify};
use crate::http_rules::settings::ResponseRules;
use crate::http_rules::vary::{Variant, Vary};
use crate::key::Key;
use crate::loader::{Delivery, LeaseState, LoadOutput, LoadResult, OwnSender};
use crate::observe::{self, Outcome, log, warn_if};
use crate::policy::Policy;
use crate::sync::lock;
use crate::value::entry::{TagId, Unstored};

/// One answer of the inner service, and its recipients.
pub(super) struct ResponseCommit {
    pub(crate) mode: LeaseState,
    pub(crate) policy: Arc<Policy>,
    pub(crate) load_request: Arc<LoadRequest>,
    pub(crate) state: Arc<GuardState>,
    pub(crate) side_commit: SideCommit,
    /// The stored response that this one may replace.
    pub(crate) previous: Option<StoredResponseToReplace>,
    pub(crate) method: Method,
    /// The target URI, if a response to another method than GET may represent the target resource.
    pub(crate) target: Option<Uri>,
    /// Why the request was forwarded.
    pub(crate) fwd: Fwd,
    /// Whether the response is the guard's, because loads of the resource are held back.
    pub(crate) is_held_back: bool,
    /// The time from the request to the head.
    pub(crate) delay: Duration,
    /// When the head was received, by the wall clock.
    pub(crate) now: SystemTime,
    /// Sends the answer to the client of this request; `None` once that was done.
    pub(crate) client: Option<OwnSender<ClientAnswer>>,
    pub(crate) delivery: Delivery,
    pub(crate) tagger: CacheTagger,
}

impl ResponseCommit {
    /// The shareable form of a response with this head and body size; otherwise the rule that forbids it.
    pub(crate) fn candidate(&self, head: &Parts, body: SizeHint) -> Result<StoreCandidate, Rule> {
        let exchange = RequestResponse {
            method: &self.method,
            target: self.target.as_ref(),
            demands: &self.load_request.demands,
            request_headers: &self.load_request.headers,
            status: head.status,
            headers: &head.headers,
            body,
            do_not_store: head.extensions.get::<DoNotStore>().is_some(),
            terms: head.extensions.get().copied().unwrap_or_default(),
            delay: self.delay,
            now: self.now,
        };
        let mut candidate = match classify(&exchange, &ResponseRules::of(&self.policy)) {
            Verdict::Private(rule) => {
                observe::log_decision("not shared", &rule);
                return Err(rule);
            }
            Verdict::ShareOnly { rule, vary, says_shared } => {
                observe::log_decision("not stored", &rule);
                let variant = self.variant(&vary, head);
                let age = corrected_initial_age(&head.headers, self.delay, self.now);
                let mut candidate = StoreCandidate::shared_only(head, says_shared, variant, age, self.now);
                candidate.is_too_old = rule == Rule::TooOld;
                candidate
            }
            Verdict::Store(storing) => {
                observe::log_decision("stored", &storing.rule);
                let variant = self.variant(&storing.vary, head);
                StoreCandidate::stored(head, storing, variant, &self.policy.lifetimes(), self.now)
            }
        };
        if self.mode == LeaseState::Unleased || !is_storable(&head.headers) {
            candidate.not_stored();
        }
        let (parts, resource) = ((&*self.state, &*self.policy), &self.load_request.resource);
        match self.tagger.tags_of(head, resource, parts) {
            Ok(tags) => candidate.tags = tags,
            Err(error) => {
                untaggable(&self.state, &self.load_request, &error);
                candidate.not_stored();
            }
        }
        if candidate.is_too_old {
            too_old(&self.state, &self.load_request, candidate.age);
        }
        Ok(candidate)
    }

    /// The result for the waiters of a response with this status that `rule` forbids to share.
    pub(crate) fn unshared(&self, rule: Rule, status: StatusCode) -> LoadResult {
        // The rule may apply only because of this request's credentials, range or content coding.
        let is_about_request = self.load_request.demands.has_credentials()
            || (self.load_request.is_part() && rule == Rule::Status)
            || rule == Rule::Coding;
        if is_about_request && self.load_request.state().stored_at.is_none() {
            // A refresh has no waiters. `says_nothing` makes the stored entry back off: after `OnlyForCaller` the next request would
            // begin another refresh.
            return if self.is_refresh() { LoadResult::says_nothing() } else { LoadResult::OnlyForCaller };
        }
        let mark = match Subject::of(status) {
            Subject::Resource => true,
            // With a marker, one client that a limiter or a firewall refuses would make all others load alone. And a stored response
            // can still be validated after a failure, or lead to its variants.
            Subject::Access | Subject::Other => {
                status.is_server_error() && !is_unstorable(status) && self.previous.is_none()
            }
        };
        LoadResult::Uncacheable { unstored: self.unstored(status), mark }
    }

    /// The effect on the stored response of a response with this status that is not stored.
    pub(crate) fn unstored(&self, status: StatusCode) -> Unstored {
        let is_reload = is_reload(&self.load_request.demands, &self.policy.http) && !self.is_refresh();
        match Subject::of(status) {
            Subject::Resource => Unstored::OfResource,
            // One client that forces a load and is refused, for example by its address, must not remove the others' response.
            Subject::Access if is_reload => Unstored::SaysNothing,
            // The stored response is for all clients without credentials.
            Subject::Access => Unstored::OfResource,
            Subject::Other => Unstored::SaysNothing,
        }
    }

    /// Whether the client already has the stored response, and the load refreshes that response.
    fn is_refresh(&self) -> bool {
        self.load_request.state().purpose == Purpose::Refresh
    }

    /// The response's variant, among those of its resource.
    fn variant(&self, vary: &Vary, head: &Parts) -> Option<Box<VariantId>> {
        let slot = self.load_request.variant.get();
        let names = match (vary, slot) {
            // A response that names fewer headers than the known variants is distinguished by all of the known
            // names: that is always precise enough, and the known variants stay findable. (Encoded responses often
            // have a `Vary` where unencoded ones have none.)
            (_, Some(slot)) if vary.is_within(&slot.names) => &slot.names,
            (Vary::Names(names), _) => names,
            (Vary::Nothing | Vary::Any, _) => return None,
        };
        let variant =
            Variant::of(names, &self.load_request.headers, &head.headers, self.policy.http.normal());
        let known = slot.map(|slot| (&slot.names, slot.generation));
        let previous = self.previous.as_ref().and_then(|previous| previous.meta.variant.as_ref());
        let known = known.or_else(|| previous.map(|variant| (&variant.names, variant.generation)));
        let generation = known.filter(|(known, _)| *known == names).map(|(_, generation)| generation);
        let generation = generation.unwrap_or_else(|| fastrand::u64(..));
        Some(Box::new(VariantId { generation, names: names.clone(), variant }))
    }

    /// If a response that would be stored names other `Vary` headers than the known variants of its resource, invalidates the
    /// resource and does not store the response. Later requests then do not find the variants under the old names.
    pub(crate) async fn invalidate_if_names_changed(&mut self, candidate: &mut StoreCandidate) {
        let varies_otherwise =
            self.load_request.variant.get().is_some_and(|slot| candidate.names() != Some(&slot.names));
        // Ignore a response that is not stored: an error page seldom has the `Vary` of its resource.
        if candidate.is_stored() && varies_otherwise {
            candidate.not_stored();
            let Self { state, policy, load_request, .. } = self;
            // If the invalidation fails, this variant is loaded again and again until the resource's entry ends.
            let _ = state.invalidate_unawaited(&load_request.resource, policy.command_timeout).await;
        }
    }
}

impl ResponseCommit {
    /// Ends the load with this result; `release` answers the client after the commit.
    pub(crate) fn after_commit(
        mut self,
        result: LoadResult,
        release: impl FnOnce(&mut Self) + Send + 'static,
    ) -> LoadOutput {
        // Free the stored response's body, which the commit does not need.
        self.previous = None;
        std::mem::take(&mut self.delivery).after_commit(result, move || release(&mut self))
    }

    /// Until when the stored response may be served instead of a failure status; without one, `u64::MAX`.
    pub(crate) fn errors_until(&self) -> u64 {
        self.previous.as_ref().map_or(u64::MAX, StoredResponseToReplace::errors_until)
    }

    /// Answers the client, unless it was answered before. A client that has left does not stop the load.
    pub(crate) fn send(&mut self, answer: ClientAnswer) {
        if let Some(client) = self.client.take() {
            let _ = client.send(answer);
        }
    }
}

/// Warns the operator of a body that is too long to share: the guard does not protect this resource at all.
fn too_big(state: &GuardState, load_request: &LoadRequest, policy: &Policy, length: u64) {
    let (key, max_body) = (&load_request.resource, policy.max_body);
    warn_if!(
        log::HTTP,
        state.unshareable(policy),
        ?key,
        length,
        max_body,
        "a response's body is longer than max_body, or in too many pieces: it is not shared"
    );
}

/// Warns the operator of a response that is not stored, because it could not be invalidated by all of its tags.
fn untaggable(state: &GuardState, load_request: &LoadRequest, error: &Error) {
    let key = &load_request.resource;
    warn_if!(log::HTTP, state.logs.unshareable.is_due(), ?key, %error, "a response's tags are refused: it is not stored");
}

/// Warns the operator of a response that was older than its lifetime when it was received: by that lifetime, this resource is never fresh.
fn too_old(state: &GuardState, load_request: &LoadRequest, age: Duration) {
    let key = &load_request.resource;
    warn_if!(
        log::HTTP,
        state.http.too_old_log.goes_on(),
        ?key,
        ?age,
        "a response was older than its lifetime when it came, so each wave of requests asks for it anew: the lifetime counts from \
         its Date or Age; let it name a longer one, or have the inner service send Date when the response is ready"
    );
}

impl ResponseCommit {
    /// Shares a response: its own client receives it at once, and waiters when it is complete, or while it is received if they may
    /// read along.
    pub(crate) async fn response(mut self, response: Response<UpstreamBody>, until: Instant) -> LoadOutput {
        let (head, body) = response.into_parts();
        // A response with an invalid length is not shared: `candidate` refuses it.
        let expected = content_length(&head.headers).ok().flatten();
        let mut candidate = match self.candidate(&head, body.size()) {
            Ok(candidate) => candidate,
            Err(rule) => return self.refuse(rule, head, body, expected).await,
        };
        let ends_with_head = ends_with_head(head.status, expected, &*body);
        // Do not store a response that cannot be replayed, that other variants of the resource would hide, or for which there is no
        // room.
        if !is_replayable(head.status, ends_with_head) {
            candidate.not_stored();
        }
        self.invalidate_if_names_changed(&mut candidate).await;
        if !self.has_room(&candidate).await {
            candidate.not_stored();
        }
        self.learn_search(&head, &candidate).await;
        let (own, status, cache_status) = (self.own(&head), head.status, self.status(&candidate));
        if own.is_none() && ends_with_head && (body.has_ended() || has_no_content(status)) {
            let tag = candidate.add_digest_tag(&[], &self.policy);
            let whole = Response::from_parts(head, GuardedBody::passed(body));
            let whole = self.with_digest_tag(whole, tag);
            let result = self.store(candidate, Bytes::new(), None, status).await;
            return self.after_commit(result, move |commit| commit.answer(Some(whole), cache_status));
        }
        // Announce a response to waiters before its end only if its flight sees every invalidation meanwhile. An
        // invalidation by tag, or under another key, would not reach callers that join this flight.
        let has_tags = self.policy.has_tags(&self.load_request.resource) || !candidate.tags.is_empty();
        let may_announce = !has_tags && matches!(self.side_commit, SideCommit::No);
        let mut shared_body =
            expected.filter(|_| may_announce).and_then(|length| candidate.shared_body(length)).map(Arc::new);
        let chunks = shared_body.as_ref().map(|shared_body| Arc::clone(&shared_body.body));
        let (sender, client_body) = GuardedBody::streaming(body.size(), chunks);
        // If the head completes the client's response, the head waits for the commit.
        let ends_with_head = own.is_some() || ends_with_head;
        let mut unsent = Some(match own {
            Some(own) => Response::from_parts(own, GuardedBody::default()),
            None => Response::from_parts(head, client_body),
        });
        let (max_body, patience) = (self.policy.max_body, self.policy.load_timeout);
        let mut teeing = pin!(tee(body, max_body, expected, until, patience, sender));
        let teed = poll_fn(|cx| {
            let teed = teeing.as_mut().poll(cx);
            // A body that is not complete yet streams. A complete one is sent with its head, after the commit: a
            // head alone and a body some time later are two small writes, which Nagle's algorithm and a delayed
            // acknowledgement separate by 40 ms.
            if teed.is_pending() && !ends_with_head {
                self.answer(unsent.take(), cache_status);
                if let Some(shared_body) = shared_body.take() {
                    self.delivery.read_along(shared_body);
                }
            }
            teed
        })
        .await;
        self.end(teed, unsent, candidate, status, cache_status).await
    }

    /// Handles the end of a response's body. `unsent` is the client's response, if its head waits for the commit.
    async fn end(
        mut self,
        teed: Teed,
        unsent: Option<Response<GuardedBody>>,
        mut candidate: StoreCandidate,
        status: StatusCode,
        cache_status: CacheStatus,
    ) -> LoadOutput {
        match teed {
            Teed::Whole { body, trailers, finish } => {
                let tag = candidate.add_digest_tag(&body, &self.policy);
                let unsent = unsent.map(|unsent| self.with_digest_tag(unsent, tag));
                let result = self.store(candidate, body, trailers, status).await;
                self.after_commit(result, move |commit| {
                    // Release the end first: as soon as the client's task has the head, it writes all available data.
                    finish.release();
                    commit.answer(unsent, cache_status);
                })
            }
            Teed::TooBig { length } => {
                too_big(&self.state, &self.load_request, &self.policy, length);
                self.answer(unsent, CacheStatus::unstored(self.fwd, Some(Rule::TooBig.token())));
                self.side_commit.leave().await;
                self.unshared(Rule::TooBig, status).into()
            }
            Teed::TooSlow => {
                self.answer(unsent, CacheStatus::unstored(self.fwd, Some("not-stored")));
                self.side_commit.leave().await;
                // A body that has not ended by now counts as a load that takes too long.
                let unstored = Unstored::Failure { before: self.errors_until() };
                LoadResult::Uncacheable { unstored, mark: true }.into()
            }
            Teed::Broken { text, finish } => {
                self.side_commit.leave().await;
                // Release after the commit: the client may ask again as soon as it has the error.
                self.after_commit(LoadResult::failed(Failure::with_text(text)), move |commit| {
                    commit.answer(unsent, cache_status);
                    finish.release();
                })
            }
        }
    }

    /// Sends a response that `rule` forbids to share to its own client only.
    async fn refuse(
        mut self,
        rule: Rule,
        mut head: Parts,
        body: UpstreamBody,
        expected: Option<u64>,
    ) -> LoadOutput {
        if rule == Rule::TooBig {
            let length = least_length(expected, &body.size());
            too_big(&self.state, &self.load_request, &self.policy, length);
        }
        let result = self.unshared(rule, head.status);
        if matches!(result, LoadResult::Uncacheable { .. }) {
            // The waiters load for themselves before the client gets its response: the client's next request, which may come before
            // the resource is marked, must not join this flight.
            self.delivery.refuse_waiters();
        }
        self.side_commit.leave().await;
        if matches!(rule, Rule::Authorization | Rule::Cookie | Rule::SetCookie) {
            CacheTerms::restrict(&mut head);
        }
        let own = match self.own(&head) {
            Some(own) => Response::from_parts(own, GuardedBody::default()),
            None => Response::from_parts(head, GuardedBody::passed(body)),
        };
        self.answer(Some(own), CacheStatus::unstored(self.fwd, Some(rule.token())));
        result.into()
    }

    /// The response of the load's own client with the guard's tag: a 304, if the client has that representation.
    fn with_digest_tag(
        &self,
        response: Response<GuardedBody>,
        tag: Option<HeaderValue>,
    ) -> Response<GuardedBody> {
        let (mut head, body) = response.into_parts();
        if let Some(tag) = tag.filter(|_| head.status == StatusCode::OK) {
            let _ = head.headers.try_insert(ETAG, tag);
            if let Some(own) = self.own(&head) {
                return Response::from_parts(own, GuardedBody::default());
            }
        }
        Response::from_parts(head, body)
    }

    /// Gives the response the tags that the stored one has besides its policy's. With more than `max_tags` it is not stored.
    pub(crate) fn add_previous_tags(&self, candidate: &mut StoreCandidate) {
        let Self { state, policy, load_request, previous, .. } = self;
        let Some(previous) = previous else { return };
        for TagId { tag, .. } in own_tags(&previous.entry, state, policy, &load_request.resource) {
            if candidate.tags.iter().all(|known| known.name() != tag.name()) {
                candidate.tags.push(tag);
            }
        }
        if candidate.tags.len() > policy.max_tags {
            candidate.not_stored();
        }
    }

    /// The result of a complete response, which a side commit stores under its own key.
    async fn store(
        &mut self,
        mut candidate: StoreCandidate,
        body: Bytes,
        trailers: Option<HeaderMap>,
        status: StatusCode,
    ) -> LoadResult {
        if candidate.is_part() {
            // It may be joined with the stored part, which then keeps its tags.
            self.add_previous_tags(&mut candidate);
        }
        let previous = self.previous.as_ref();
        let result = candidate.finish(body, trailers, previous, self.unstored(status), &self.policy);
        self.side_commit.store(result, is_failure(status)).await
    }

    /// Sends the response to its own client, unless that was done before.
    fn answer(&mut self, response: Option<Response<GuardedBody>>, status: CacheStatus) {
        if let Some(mut response) = response {
            set_forwarded_status(&mut response, &self.policy.http, Outcome::Led, status);
            self.send(Ok(response));
        }
    }

    /// Whether the limit of variants allows this one to be stored (A5). (Mutable: a shared reference would have to be `Sync` across
    /// the `await`, which the withheld end is not.)
    async fn has_room(&mut self, candidate: &StoreCandidate) -> bool {
        let (Some(variant), true) = (candidate.variant(), self.load_request.variant.get().is_some()) else {
            return true;
        };
        let list = self.load_request.resource.derived(&format!("~v{:016x}", variant.generation));
        // The variant under the resource's own key is not in the list.
        let most = self.policy.http.max_variants.saturating_sub(1);
        let room =
            self.state.store.enlist(&list, variant.variant.fingerprint.short(), most, candidate.life()).await;
        // If the store does not answer now, storing would fail too.
        room.unwrap_or(false)
    }

    /// Learns which queries a successful response answers, if it is stored. (Mutable as in [`has_room`](Self::has_room).)
    pub(crate) async fn learn_search(&mut self, head: &Parts, candidate: &StoreCandidate) {
        let Self { state, policy, load_request, .. } = self;
        // The rule of a path is that of its plain GETs: a client chooses the content of a QUERY, and the form of a target.
        let is_plain = !load_request.resource.has_report();
        if policy.http.no_vary_search && is_plain && head.status.is_success() && candidate.is_stored() {
            let life = candidate.life();
            Box::pin(learn(state, policy, &load_request.resource, &head.headers, life)).await;
        }
    }

    fn status(&self, candidate: &StoreCandidate) -> CacheStatus {
        let detail = match (self.mode, candidate.ttl()) {
            _ if self.is_held_back => Some(HELD_BACK),
            (LeaseState::Unleased, _) => Some("uncoordinated"),
            (LeaseState::Leased | LeaseState::Alone, _) if candidate.is_too_old => Some(Rule::TooOld.token()),
            (LeaseState::Leased | LeaseState::Alone, None) => Some("not-stored"),
            (LeaseState::Leased | LeaseState::Alone, Some(_)) => None,
        };
        CacheStatus::Forwarded { fwd: self.fwd, status: None, stored: candidate.ttl(), detail }
    }

    /// The 304 for a client that already has the response (RFC 9111, 4.3.2). Only for a GET: the origin evaluates the
    /// conditions of other methods, such as `If-None-Match: *` of a POST that creates a resource.
    fn own(&self, head: &Parts) -> Option<Parts> {
        let LoadRequest { demands, headers, .. } = &*self.load_request;
        let may_have_it = self.method == Method::GET && demands.conditional;
        if !may_have_it || !is_not_modified(headers, head.status, &head.headers, self.now, self.now) {
            return None;
        }
        let headers: HeaderMap = not_modified(&head.headers);
        Some(head_of(StatusCode::NOT_MODIFIED, head.version, headers))
    }
}

impl ResponseRules {
    pub(crate) fn of(policy: &Policy) -> Self {
        let (fresh_for, negative_for) = (policy.fresh_for, policy.negative_for());
        Self { http: Arc::clone(&policy.http), fresh_for, negative_for, max_body: policy.max_body }
    }
}

/// The answer to the client that led a load, sent as soon as its head is known.
pub(super) type ClientAnswer = Result<Response<GuardedBody>, UpstreamError>;

/// The request for which a response is loaded.
pub(crate) struct LoadRequest {
    pub(crate) demands: RequestDemands,
    /// The request's headers with the client's own conditions. (Cookies that affect no response are removed from a GET before.)
    pub(crate) headers: HeaderMap,
    pub(crate) resource: Key,
    /// The key of the request's variant, once a look-up has shown that it is not the resource's key.
    pub(crate) variant: OnceLock<VariantSlot>,
    state: Mutex<LoadState>,
}

/// What changes about a [`LoadRequest`] while it is handled.
#[derive(Default)]
pub(super) struct LoadState {
    pub(super) purpose: Purpose,
    pub(super) progress: Progress,
    /// The key of the resource or variant under which the response is stored, if its flight has another key.
    pub(super) stored_at: Option<Key>,
}

/// Why the load runs, as far as its client is concerned.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// The client waits for the answer.
    #[default]
    Answer,
    /// The client waits for the answer, and the look-up for its request failed or was skipped.
    AnswerUnread,
    /// The client has its answer; the load refreshes the stored response for all clients.
    Refresh,
}

/// How far the request has come: whether it was forwarded, and whether its answer is used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Progress {
    /// The request was not forwarded.
    #[default]
    Waiting,
    Forwarded,
    /// The inner service answered with this status, and a stale response is served instead.
    Refused(StatusCode),
}

impl LoadRequest {
    pub(crate) fn new(demands: RequestDemands, headers: HeaderMap, resource: Key) -> Arc<Self> {
        Arc::new(Self { demands, headers, resource, variant: OnceLock::new(), state: Mutex::default() })
    }

    pub(super) fn state(&self) -> MutexGuard<'_, LoadState> {
        lock(&self.state)
    }

    /// The key of the request's variant, if it has a key of its own, else that of the resource.
    pub(crate) fn key(&self) -> &Key {
        self.variant.get().map_or(&self.resource, |slot| &slot.key)
    }

    /// Whether the load is for a part of the content: the request has a range, and the load is not a refresh for all clients.
    pub(crate) fn is_part(&self) -> bool {
        self.demands.ranged && self.state().purpose != Purpose::Refresh
    }
}
