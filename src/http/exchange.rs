//! The way of one request through the layer.
//!
//! - A hit: `consider` (`http_rules/request.rs`) computes the key, [`look`] reads the entry, and `answer.rs` makes the response from it.
//! - A miss: `miss.rs` joins the flight or leads it. `load.rs` runs a leader's request, `commit.rs` decides at the head which
//!   requests may receive the response, and `tee.rs` and `body.rs` read its body.
//! - A stale response: as a hit, and `miss.rs` begins the load in the background.
//! - Unsafe methods and HEAD: `unsafe_methods.rs`. QUERY: `query_method.rs` reads its content, and then it is as a GET.
//! - An audit: the client receives its hit, and a task compares it with a new response of the inner service.
//! - Shadow mode: the inner service answers the client, and the guard runs beside it with a copy of the request.
//!
//! [`warn_of_body`] warns the operator if a layer outside the guard hides where request bodies end.

use std::future::ready;
use std::ops::ControlFlow;
use std::pin::{Pin, pin};
use std::sync::{Arc, LazyLock};
use std::task::{Context, Poll};

use http::header::{CONTENT_LENGTH, COOKIE, HeaderValue, TRANSFER_ENCODING};
use http::{Method, Response, StatusCode};
use pin_project_lite::pin_project;

use super::answer::{
    CacheStatus, Replay, ResponseReader, StoredAnswer, VariantSlot, failed_answer, set_forwarded_status,
    write_key,
};
use super::body::GuardedBody;
use super::commit::ClientAnswer;
use super::miss::failed;
use super::search::{SearchState, learn_from_store, pause};
use super::tee::has_no_content;
use super::upstream::{BoxFuture, RequestHead, Upstream, UpstreamRequest};
use crate::error::{Error, ErrorKind, Failure};
use crate::guard::{Current, StampedeGuard};
use crate::http_rules::cache_terms::CacheTerms;
use crate::http_rules::key::{matched_route, sent_target};
use crate::http_rules::query_method::consider_query;
use crate::http_rules::request::{ConsideredRequest, RequestDemands, consider, is_zero};
use crate::http_rules::request_settings::forwarding;
use crate::http_rules::vary::Fingerprint;
use crate::http_rules::{Rule, request_settings};
use crate::key::Key;
use crate::observe::{self, LogEveryMinute, Outcome, log};
use crate::policy::OnStoreDown;
use crate::read_through::call::{Call, LookUpState};
use crate::read_through::look_up::{Lookup, hit_at_once_by_key, look, peek};
use crate::store::StoreError;
use crate::task::box_future;

/// How one request continues after step 1.
pub(super) enum Exchange {
    /// It is answered from memory.
    Hit(Response<GuardedBody>),
    LookUp(LookUp),
    Forward(StampedeGuard, Forward),
}

/// Why a request goes to the inner service without a look-up.
pub(super) enum Forward {
    SwitchedOff(Key),
    /// Shadow mode: the inner service answers, and the guard runs beside it.
    Shadow(Key),
    Forbidden(Rule),
}

impl Exchange {
    /// Step 1. A hit from memory is answered at once, and clones neither the guard nor the inner service: threads that change one
    /// reference count wait for each other.
    ///
    /// With `shadow`, the answer is the inner service's, and the guard runs beside it. `content` is the fingerprint of a QUERY's content;
    /// without it the request is not looked up as a QUERY.
    pub(super) fn begin(
        head: &mut RequestHead,
        has_body: bool,
        content: Option<&Fingerprint>,
        guard: Current<'_>,
        shadow: bool,
    ) -> Self {
        // The rule of a path by `No-Vary-Search` is that of its GET.
        let follows_search = guard.parts().1.http.no_vary_search && !shadow && content.is_none();
        Self::begin_with(head, has_body, content, guard, shadow, follows_search)
    }

    /// As [`begin`](Self::begin). With `follows_search` the request may get the canonical query of its path's rule.
    #[inline]
    fn begin_with(
        head: &mut RequestHead,
        has_body: bool,
        content: Option<&Fingerprint>,
        guard: Current<'_>,
        shadow: bool,
        follows_search: bool,
    ) -> Self {
        let (state, policy) = guard.parts();
        let join = |head: &str, parts: &[&str]| Key::from_texts(&state.namespace, head, parts);
        let mut considered = match content {
            None => consider(head, has_body, &policy.http.requests, join),
            Some(_) => consider_query(head, &policy.http.requests, join),
        };
        let search = match follows_search {
            true => follow_search(head, has_body, &guard, &mut considered),
            false => SearchState::AsSent,
        };
        let mut audits = false;
        if let Ok(ConsideredRequest { key, may_load, demands }) = &mut considered {
            if demands.other_cookies {
                // A shared response must not depend on the other cookies of its leader, so the inner service does not see them.
                head.headers_mut().remove(COOKIE);
            }
            separate_key(&guard, key, demands, head, content);
            if *may_load && !demands.directives.only_if_cached {
                // An audit can only compare a hit that is the whole stored response, not a part of it or a 304.
                audits = !demands.conditional && !demands.ranged && policy.audit.is_due();
                if !audits && let Some(response) = hit_at_once(&guard, key, demands, head, &search) {
                    return Self::Hit(response);
                }
            }
        }
        let guard = guard.into_owned();
        let guard = match matched_route(head) {
            Some(route) => guard.on_route(route),
            None => guard,
        };
        match considered {
            Ok(ConsideredRequest { key, .. }) if guard.parts().0.is_bypassed() => {
                search.restore(head);
                Self::Forward(guard, Forward::SwitchedOff(key))
            }
            Ok(ConsideredRequest { key, .. }) if shadow => Self::Forward(guard, Forward::Shadow(key)),
            Ok(ConsideredRequest { key, may_load, mut demands }) => {
                // RFC 9110, 14.2: a HEAD has no range.
                demands.ranged &= may_load;
                let may_load = may_load && !demands.directives.only_if_cached;
                Self::LookUp(LookUp { guard, key, demands, may_load, audits, search })
            }
            Err(rule) => {
                search.restore(head);
                Self::Forward(guard, Forward::Forbidden(rule))
            }
        }
    }

    /// Steps 2 to 8. A hit allocates only the future, which contains what `upstream` boxes for all others.
    #[inline(never)] // So that `call` is small: it has answered the hits from memory.
    pub(super) fn answer(
        self,
        head: RequestHead,
        upstream: impl FnOnce() -> Box<dyn Upstream> + Send + 'static,
    ) -> BoxFuture<ClientAnswer> {
        match self {
            Self::Hit(response) => Box::pin(ready(Ok(response))),
            Self::LookUp(look_up) => {
                // Not by `box_future`: the function that it takes would have to be moved, too.
                let boxed = Box::write(Box::new_uninit(), async move {
                    // The outcome of the look-up is moved before the next `await`, so the future has no room for it.
                    let answer = {
                        let found = pin!(look_up.run(&head)).await;
                        match found {
                            ControlFlow::Break(answer) => return answer,
                            ControlFlow::Continue(found) => {
                                look_up.go_on(found, UpstreamRequest { upstream: upstream(), head })
                            }
                        }
                    };
                    answer.await
                });
                Box::into_pin(boxed)
            }
            Self::Forward(guard, why) => UpstreamRequest { upstream: upstream(), head }.forward(guard, why),
        }
    }
}

/// Gives a request the canonical query of its path's rule, if the process knows one. `considered` is then of the request with that query.
#[inline(never)] // Not for hits of policies without such rules.
fn follow_search(
    head: &mut RequestHead,
    has_body: bool,
    guard: &StampedeGuard,
    considered: &mut Result<ConsideredRequest<Key>, Rule>,
) -> SearchState {
    let (state, policy) = guard.parts();
    let Ok(ConsideredRequest { key, .. }) = &*considered else { return SearchState::AsSent };
    if state.is_bypassed() {
        return SearchState::AsSent;
    }
    let search = SearchState::follow(head, state, key);
    if search.is_rewritten() {
        let join = |head: &str, parts: &[&str]| Key::from_texts(&state.namespace, head, parts);
        *considered = consider(head, has_body, &policy.http.requests, join);
    }
    search
}

pin_project! {
    /// A future and its `poll` function. Because this crate names the function, it is compiled once, here; an `await` of the future itself
    /// in the generic caller would compile it for each inner service.
    struct PrecompiledFuture<F: Future> {
        #[pin]
        future: F,
        poll: fn(Pin<&mut F>, &mut Context<'_>) -> Poll<F::Output>,
    }
}

impl<F: Future> Future for PrecompiledFuture<F> {
    type Output = F::Output;

    #[inline]
    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<F::Output> {
        let this = self.project();
        (this.poll)(this.future, cx)
    }
}

/// The answer to a request with credentials, which no cache on the way may share by the handler's terms.
fn restrict(answer: Response<GuardedBody>) -> Response<GuardedBody> {
    let (mut head, body) = answer.into_parts();
    CacheTerms::restrict(&mut head);
    Response::from_parts(head, body)
}

/// Adds the key to the answer's `Cache-Status`, if the policy exposes it.
fn add_key(guard: &StampedeGuard, key: &Key, response: &mut Response<GuardedBody>) {
    let (state, policy) = guard.parts();
    if policy.http.expose_key {
        write_key(response.headers_mut(), key.within(&state.namespace));
    }
}

/// The answer with its key, as [`add_key`] adds it.
fn with_key(guard: &StampedeGuard, key: &Key, answer: ClientAnswer) -> ClientAnswer {
    let mut response = answer?;
    add_key(guard, key, &mut response);
    Ok(response)
}

/// Step 2 for a request that may use the cache.
pub(super) struct LookUp {
    guard: StampedeGuard,
    key: Key,
    demands: RequestDemands,
    /// Whether the request joins or leads a flight if nothing is stored; false for a HEAD and a request with `only-if-cached`.
    may_load: bool,
    /// Whether the hit is audited, if the look-up finds one.
    audits: bool,
    search: SearchState,
}

/// A request that its look-up has not answered.
enum Unanswered<'a> {
    /// This hit goes to the client, and is then audited.
    Audit(Response<GuardedBody>),
    /// The layer was added twice, or the handler requests its own URL: the outer layer does the work.
    Nested,
    /// Nothing that is stored for the canonical query of the path's rule answers the query that was sent. A response with this status
    /// says so, if there is one.
    OtherSearch(Option<StatusCode>),
    Get(Lookup<'a, StoredAnswer>),
    Head,
}

type AfterLookUp<'a> = ControlFlow<ClientAnswer, Unanswered<'a>>;

impl LookUp {
    /// Not inlined: its caller is compiled for each inner service.
    #[inline(never)]
    fn run<'a>(
        &'a self,
        head: &RequestHead,
    ) -> PrecompiledFuture<impl Future<Output = AfterLookUp<'a>> + Send> {
        let future = async move {
            let (state, policy) = self.guard.parts();
            let call = Call { state, policy, key: &self.key };
            let mut wants = ResponseReader::new(&self.guard, &self.demands, head.headers(), Some(&self.key));
            if self.may_load {
                return self.after_look(pin!(look(call, &wants)).await);
            }
            let mut slot: Option<Box<VariantSlot>> = None;
            loop {
                let key = slot.as_ref().map_or(&self.key, |slot| &slot.key);
                let found = match state.is_closed() {
                    true => Ok(None),
                    false => peek(Call { key, ..call }, &wants).await,
                };
                match found {
                    Ok(Some(StoredAnswer::Elsewhere(elsewhere))) if slot.is_none() => slot = Some(elsewhere),
                    found => return self.after_peek(found, head),
                }
                wants.resource = None;
            }
        };
        PrecompiledFuture { future, poll: Future::poll }
    }

    /// What follows from the look-up of a request that may load.
    fn after_look<'a>(&'a self, lookup: Lookup<'a, StoredAnswer>) -> AfterLookUp<'a> {
        let (replay, outcome) = match lookup {
            Lookup::LocalHit(StoredAnswer::Response(replay)) => (replay, Outcome::LocalHit),
            Lookup::Hit { value: StoredAnswer::Response(replay), stale: false, refresh: None } => {
                (replay, Outcome::Hit)
            }
            Lookup::Failed(Failure::Guard(error)) if error.kind() == ErrorKind::Reentrant => {
                return ControlFlow::Continue(Unanswered::Nested);
            }
            lookup => return ControlFlow::Continue(Unanswered::Get(lookup)),
        };
        if !self.search.is_answered_by(&replay.response.headers) {
            let status = replay.response.status;
            return ControlFlow::Continue(Unanswered::OtherSearch(Some(status)));
        }
        self.guard.count_answer(&self.key, outcome);
        let mut response = replay.respond(&self.guard.parts().1.http, outcome);
        add_key(&self.guard, &self.key, &mut response);
        match self.audits {
            false => ControlFlow::Break(Ok(response)),
            true => ControlFlow::Continue(Unanswered::Audit(response)),
        }
    }

    /// What follows from the look-up of a request that leads no flight.
    fn after_peek(
        &self,
        found: Result<Option<StoredAnswer>, StoreError>,
        head: &RequestHead,
    ) -> AfterLookUp<'_> {
        let Self { guard, key, demands, .. } = self;
        let (_, policy) = guard.parts();
        let mut response = match found {
            Ok(Some(StoredAnswer::Response(replay)))
                if !self.search.is_answered_by(&replay.response.headers) =>
            {
                let status = replay.response.status;
                return ControlFlow::Continue(Unanswered::OtherSearch(Some(status)));
            }
            Ok(Some(StoredAnswer::Response(mut replay))) => {
                guard.count_answer(key, Outcome::Hit);
                if head.method() == Method::HEAD {
                    without_body(&mut replay);
                }
                replay.respond(&policy.http, Outcome::Hit)
            }
            Err(error) if policy.on_store_down == OnStoreDown::FailClosed => {
                let error = Error::store("looking up the entry", key, error);
                failed(guard, key, Failure::Guard(error))
            }
            // A response to the query that was sent may be stored; or the HEAD goes on to the inner service, with that query.
            _ if self.search.is_rewritten() => return ControlFlow::Continue(Unanswered::OtherSearch(None)),
            _ if demands.directives.only_if_cached => {
                guard.count_answer(key, Outcome::Failed);
                let text = "nothing that is stored may be used\n";
                failed_answer(&policy.http, StatusCode::GATEWAY_TIMEOUT, "only-if-cached", text)
            }
            Ok(_) | Err(_) => return ControlFlow::Continue(Unanswered::Head),
        };
        add_key(guard, key, &mut response);
        ControlFlow::Break(Ok(response))
    }

    /// Steps 2 to 8 for a request that is not a plain hit. Boxed, so that the future of a hit has no room for them.
    fn go_on<'a>(
        &'a self,
        found: Unanswered<'a>,
        mut request: UpstreamRequest,
    ) -> Pin<Box<dyn Future<Output = ClientAnswer> + Send + 'a>> {
        let Self { guard, key, demands, .. } = self;
        // A shared response must not depend on what its key leaves out of the query, so the inner service does not see that.
        // A nested request passes unchanged, as all that bypass.
        if !matches!(found, Unanswered::Nested) {
            guard.parts().1.http.requests.rewrite_query(&mut request.head);
        }
        box_future(|| async move {
            let answer = match found {
                Unanswered::Audit(response) => {
                    request.audit(guard, key);
                    return Ok(response);
                }
                Unanswered::Nested => {
                    self.search.restore(&mut request.head);
                    request.pass(guard, Some(CacheStatus::bypass("nested"))).await
                }
                Unanswered::OtherSearch(other) => return Box::pin(self.begin_as_sent(request, other)).await,
                // Boxed, so that the future of a load has no room for what few policies have.
                Unanswered::Get(lookup) => match &self.search {
                    SearchState::AsSent => request.load(guard, key, *demands, lookup).await,
                    SearchState::Unknown => return Box::pin(self.load_by_rule(request, lookup)).await,
                    SearchState::Rewritten(_) => return Box::pin(self.load_canonical(request, lookup)).await,
                },
                Unanswered::Head => request.head(guard, key, *demands).await,
            };
            with_key(guard, key, answer)
        })
    }

    /// Answers the request as it was sent. If a successful response with the canonical query was not one to the query that was sent, the
    /// rule of the path ends for a while. (One to a query that is wrong, which may be anything, says nothing about others.)
    async fn begin_as_sent(&self, request: UpstreamRequest, other: Option<StatusCode>) -> ClientAnswer {
        if other.is_some_and(|status| status.is_success()) {
            pause(self.guard.parts().0, &self.key);
        }
        let UpstreamRequest { upstream, mut head } = request;
        self.search.restore(&mut head);
        let guard = Current::Borrowed(&self.guard);
        Exchange::begin_with(&mut head, false, None, guard, false, false).answer(head, move || upstream).await
    }

    /// Loads, or answers by another query, if the store has a rule of this path that makes it another one.
    async fn load_by_rule(
        &self,
        mut request: UpstreamRequest,
        lookup: Lookup<'_, StoredAnswer>,
    ) -> ClientAnswer {
        let Self { guard, key, demands, .. } = self;
        let (state, policy) = guard.parts();
        // A store that has not answered the look-up is not asked again.
        if matches!(&lookup, Lookup::Miss(caller) if caller.look_up == LookUpState::Answered) {
            learn_from_store(state, policy, key).await;
            let search = SearchState::follow(&mut request.head, state, key);
            if search.is_rewritten() {
                drop(lookup);
                search.restore(&mut request.head);
                let UpstreamRequest { upstream, mut head } = request;
                let exchange = Exchange::begin(&mut head, false, None, Current::Borrowed(guard), false);
                return exchange.answer(head, move || upstream).await;
            }
        }
        with_key(guard, key, request.load(guard, key, *demands, lookup).await)
    }

    /// Loads with the canonical query of the path's rule, or answers as the stored response says. If the response does not answer the query
    /// that was sent, begins again with that. A failure of the server ends the request: it says nothing about the rule.
    async fn load_canonical(
        &self,
        request: UpstreamRequest,
        lookup: Lookup<'_, StoredAnswer>,
    ) -> ClientAnswer {
        let Self { guard, key, demands, .. } = self;
        if let Lookup::Hit { value: StoredAnswer::Response(replay), .. } = &lookup
            && self.search.is_answered_by(&replay.response.headers)
        {
            return with_key(guard, key, request.load(guard, key, *demands, lookup).await);
        }
        // A request that cannot be repeated must be sent with the right query at once.
        let Some(again) = request.copy() else {
            drop(lookup);
            return self.begin_as_sent(request, None).await;
        };
        let answer = request.load(guard, key, *demands, lookup).await?;
        if answer.status().is_server_error() || self.search.is_answered_by(answer.headers()) {
            return with_key(guard, key, Ok(answer));
        }
        // The load goes on without its client: its result is stored.
        let status = answer.status();
        drop(answer);
        self.begin_as_sent(again, Some(status)).await
    }
}

impl UpstreamRequest {
    /// Sends the request to the inner service without a look-up.
    pub(super) fn forward(self, guard: StampedeGuard, why: Forward) -> BoxFuture<ClientAnswer> {
        let is_for_one_user =
            matches!(why, Forward::Forbidden(Rule::Credentials | Rule::Extension | Rule::KeyHook));
        let status = match why {
            Forward::SwitchedOff(key) => {
                return Box::pin(async move {
                    let answer = self.pass(&guard, Some(CacheStatus::bypass("switched-off"))).await;
                    with_key(&guard, &key, answer)
                });
            }
            Forward::Shadow(key) => {
                return Box::pin(async move {
                    let answer = self.shadowed(guard.clone()).await;
                    with_key(&guard, &key, answer)
                });
            }
            Forward::Forbidden(Rule::Method) if self.is_query(&guard) => return Box::pin(self.query(guard)),
            Forward::Forbidden(Rule::Method) => return Box::pin(self.unsafely(guard)),
            // An upgrade to another protocol gets no log line and no `Cache-Status`.
            Forward::Forbidden(Rule::Upgrade) => None,
            Forward::Forbidden(rule) => {
                observe::log_decision("not looked up", &rule);
                let personal = &guard.parts().1.http.requests.personal;
                match rule {
                    Rule::Body => warn_of_body(&self.head),
                    Rule::Extension => request_settings::warn_of_extension(&self.head, personal),
                    _ => {}
                }
                Some(CacheStatus::bypass(rule.token()))
            }
        };
        Box::pin(async move {
            let answer = self.pass(&guard, status).await?;
            Ok(if is_for_one_user { restrict(answer) } else { answer })
        })
    }

    /// Passes the request to the inner service.
    async fn pass(self, guard: &StampedeGuard, status: Option<CacheStatus>) -> ClientAnswer {
        guard.count_pass();
        let mut response = self.send().await?.map(GuardedBody::passed);
        if let Some(status) = status {
            set_forwarded_status(&mut response, &guard.parts().1.http, Outcome::Bypassed, status);
        }
        Ok(response)
    }

    /// Answers from the inner service. If the request can be copied, a task runs the copy through the guard.
    async fn shadowed(self, guard: StampedeGuard) -> ClientAnswer {
        if let Some(Self { upstream, mut head }) = self.copy() {
            tokio::spawn(async move {
                let exchange = Exchange::begin(&mut head, false, None, Current::Owned(guard), false);
                // Dropping the response does not stop a load: its result is stored.
                drop(exchange.answer(head, move || upstream).await);
            });
        }
        Ok(self.send().await?.map(GuardedBody::passed))
    }
}

/// The answer from this process's memory, if a copy may answer the request. Called before any future is built.
fn hit_at_once(
    guard: &StampedeGuard,
    key: &Key,
    demands: &RequestDemands,
    head: &RequestHead,
    search: &SearchState,
) -> Option<Response<GuardedBody>> {
    let (state, policy) = guard.parts();
    if state.is_bypassed() {
        return None;
    }
    let wants = ResponseReader::new(guard, demands, head.headers(), Some(key));
    match hit_at_once_by_key(Call { state, policy, key }, &wants)? {
        StoredAnswer::Response(replay) if !search.is_answered_by(&replay.response.headers) => None,
        StoredAnswer::Response(replay) => {
            guard.count_answer_on(matched_route(head), key, Outcome::LocalHit);
            let mut response = replay.respond(&policy.http, Outcome::LocalHit);
            add_key(guard, key, &mut response);
            Some(response)
        }
        // The request's variant has another key, and looking that up needs a future.
        StoredAnswer::Incoming(_) | StoredAnswer::Elsewhere(_) | StoredAnswer::NotForThis => None,
    }
}

/// Gives a request that must not share the entry of its resource a separate key. Such a key has the resource as a tag, so that an
/// invalidation of the resource reaches its entry. Such a request is a QUERY with this `content`, has another proxy report than the
/// policy's, or its target is not in normal form: a router may answer `/p` and `/%70` differently, so with a shared entry one client could
/// replace the response of all others.
pub(crate) fn separate_key(
    guard: &StampedeGuard,
    key: &mut Key,
    demands: &RequestDemands,
    head: &RequestHead,
    content: Option<&Fingerprint>,
) {
    let report = if demands.forwarded { forwarding(head.headers()) } else { None };
    let is_plain = report == guard.parts().1.http.requests.report && !demands.other_form;
    let distinction = match (content, is_plain) {
        (None, true) => return,
        (Some(_), true) => String::new(),
        (_, false) => distinction(guard, report, demands, head).half(),
    };
    *key = match content {
        None => key.of_report(&distinction),
        Some(content) => key.of_query(&content.to_string(), &distinction),
    };
}

/// What tells a request apart from those with its method and resource.
fn distinction(
    guard: &StampedeGuard,
    report: Option<Vec<u8>>,
    demands: &RequestDemands,
    head: &RequestHead,
) -> Fingerprint {
    let mut distinction = report.unwrap_or_default();
    if demands.other_form {
        for target in sent_target(head, &guard.parts().1.http.requests) {
            // No line of a report begins with `/` or is empty, so a target is never mistaken for a part of a report.
            distinction.extend_from_slice(format!("\n{target}").as_bytes());
        }
    }
    Fingerprint::of(&distinction)
}

/// Makes a replay the answer to a HEAD: the headers that a GET would have had (RFC 9110, 9.3.2). A response that has no content by its
/// status gets no length (8.6). Any other gets exactly one, because an older version of this crate may have stored two.
fn without_body(replay: &mut Replay) {
    let response = Arc::make_mut(&mut replay.response);
    if !has_no_content(response.status) {
        response.headers.insert(CONTENT_LENGTH, HeaderValue::from(response.body.len()));
    }
    response.trailers = None;
    response.body.clear();
}

/// The limit on [`warn_of_body`]: one for all guards of the process, which are usually behind the same layers. It shares no limit with
/// other warnings: this one would be due with every request, and would suppress the others.
static WARNED: LazyLock<LogEveryMinute> = LazyLock::new(LogEveryMinute::default);

/// Warns about a GET or HEAD that bypasses the cache because of its body. If no header announces a body, most likely
/// there is none: a layer has wrapped it in a stream, and does so for all requests.
fn warn_of_body(head: &RequestHead) {
    let headers = head.headers();
    let announces =
        headers.contains_key(TRANSFER_ENCODING) || headers.get(CONTENT_LENGTH).is_some_and(|n| !is_zero(n));
    if !announces && WARNED.is_due() {
        tracing::warn!(
            target: log::HTTP,
            version = ?head.version(),
            "a request that announces no body has one that may go on: it passes the cache by; if a layer outside of the \
             guard wraps requests' bodies (a timeout, decompression), all requests do: put the guard outside of it"
        );
    }
}

#[cfg(test)]
mod tests {
    use http::Request;

    use super::*;

    /// Each hit that is not from memory allocates this future, so it must stay small: it contains one read of Redis (1.6 KB) and the
    /// answer, and all other branches are boxed separately.
    #[tokio::test]
    async fn the_future_of_a_hit_is_small() {
        let mut head = Request::get("http://h/").body(()).expect("a request");
        let own = size_of_val(&head);
        let exchange = Exchange::begin(&mut head, false, None, StampedeGuard::in_memory().current(), false);
        let hit = exchange.answer(head, || unreachable!("the future is not polled"));
        let size = size_of_val(&*hit);
        assert!(size - own <= 2_848, "{} bytes beside the request", size - own);
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

    /// A subscriber that counts the warnings of the HTTP layer.
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

    /// A single test, because all tests of the process would share the rate limit of the warning.
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
