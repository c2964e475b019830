//! Step 8 over HTTP: makes the answer to a request from a stored response (RFC 9111, 4).
//!
//! - [`ResponseReader`] selects the stored variant and decides whether it may answer the request; [`answer`] makes it the response.
//! - [`CacheStatus`] writes `Cache-Status` with the guard's details, and [`age_and_status`] writes `Age` with it.
//! - [`own_answer`] is the guard's response if it has none to serve.
//! - [`set_answer_info`] adds [`AnswerInfo`](crate::AnswerInfo) as an extension if the policy requests it.

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "in a test the panic is the report")]
#[path = "../../tests/unit/http/cache_status_tests.rs"]
mod tests;

use std::any::Any;
use std::cell::RefCell;
use std::fmt;
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, RwLock};
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use http::header::{AGE, CACHE_CONTROL, CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue, RETRY_AFTER};
use http::{Response, StatusCode};

use super::body::{GuardedBody, SharedBody};
use super::stored::{ResponseMeta, StoredResponse, VariantId};
use crate::guard::StampedeGuard;
use crate::guard::load::Times;
use crate::http_rules::conditional::{
    ByteRange, Part, RangeAnswer, if_range_holds, is_not_modified, not_modified, range_answer, unsatisfiable,
};
use crate::http_rules::freshness::{LoadFailure, Reuse, ReuseTerms, instead_of, is_for, reuse};
use crate::http_rules::request::RequestDemands;
use crate::http_rules::settings::HttpPolicy;
use crate::http_rules::vary::Names;
use crate::key::Key;
use crate::local::LocalTier;
use crate::local::room::Room;
use crate::observe::Outcome;
use crate::sync::{read, write};
use crate::value::entry::{Entry, Freshness};
use crate::value::{EntryReader, SharedValue};

/// Reads stored entries for one request.
pub(crate) struct ResponseReader<'a> {
    pub(crate) demands: &'a RequestDemands,
    /// The request's headers.
    pub(crate) headers: &'a HeaderMap,
    pub(crate) http: &'a HttpPolicy,
    /// The resource's key, if this is the key that is looked up: it holds one of the variants, which leads to the others.
    pub(crate) resource: Option<&'a Key>,
    /// Whether the request has waited for another request's load, as its `Cache-Status` then says.
    pub(crate) has_waited: bool,
    /// Where the replays of threads have room, if the policy keeps copies. (Each read of the store makes another decoding, so without copies
    /// a thread serves none often.)
    pub(crate) copies: Option<&'a LocalTier>,
}

/// The key of a variant, and the generation and header names of its resource's variants.
#[derive(Clone, Debug)]
pub(crate) struct VariantSlot {
    pub(crate) key: Key,
    pub(crate) generation: u64,
    pub(crate) names: Names,
}

/// The stored response for a request, or where to find it.
#[derive(Clone)]
pub(crate) enum StoredAnswer {
    Response(Replay),
    /// A response that another request is loading.
    Incoming(Arc<SharedBody>),
    /// The variant for this request may be stored under this key.
    Elsewhere(Box<VariantSlot>),
    /// The stored response must not answer a request like this (RFC 9111, 3.5).
    NotForThis,
}

/// A stored response, ready to be sent.
#[derive(Clone)]
pub(crate) struct Replay {
    /// The response as it is sent. Behind a pointer, because requests of one second get the same, and each hit moves it several times.
    pub(crate) response: Arc<StoredResponse>,
    /// The times of the stored entry.
    pub(crate) times: Times,
}

impl Replay {
    pub(crate) fn respond(self, http: &HttpPolicy, outcome: Outcome) -> Response<GuardedBody> {
        Arc::unwrap_or_clone(self.response).respond(http, outcome, self.times)
    }
}

impl StoredResponse {
    pub(super) fn respond(self, http: &HttpPolicy, outcome: Outcome, times: Times) -> Response<GuardedBody> {
        // The sender uses its own HTTP version. hyper's server would send 1.0 if the origin did, and panics at 3.
        let Self { status, version: _, headers, body, trailers } = self;
        let mut response = Response::new(GuardedBody::stored(body, trailers));
        *response.status_mut() = status;
        *response.headers_mut() = headers;
        set_answer_info(&mut response, http, outcome, times);
        response
    }

    fn without_content(&mut self, status: StatusCode, headers: HeaderMap) {
        (self.status, self.headers, self.body, self.trailers) = (status, headers, Bytes::new(), None);
    }
}

/// Decoded state that the callers of a shared read, or of a local copy, use together.
struct SharedDecoding {
    /// Unique in this process; 0 if no other caller shares it.
    number: u64,
    /// The metadata, and the offset at which the response begins in the payload; `None` if the entry is no response.
    meta: Option<(ResponseMeta, usize)>,
    /// The latest replay for requests without conditions, range or credentials, rebuilt when its age changes. A read-write lock,
    /// because many threads read a hot response at once.
    plain: RwLock<Option<(ReplayMoment, Option<Arc<StoredResponse>>)>>,
}

/// The moment for which the head of a replay was written: the age and the remaining lifetime, both in seconds; the latter is `None` if
/// the response is stale.
#[derive(Clone, Copy, PartialEq, Eq)]
struct ReplayMoment {
    age: u64,
    ttl: Option<u64>,
}

impl SharedDecoding {
    fn with<T>(entry: &Entry, shared: Option<&SharedValue>, read: impl FnOnce(&Self) -> T) -> T {
        static NUMBERS: AtomicU64 = AtomicU64::new(1);
        let new = |number| Self { number, meta: ResponseMeta::of(entry), plain: RwLock::default() };
        let numbered = || Arc::new(new(NUMBERS.fetch_add(1, Ordering::Relaxed))) as _;
        match shared.and_then(|shared| shared.get_or_init(numbered).downcast_ref()) {
            Some(shared) => read(shared),
            None => read(&new(0)),
        }
    }

    /// The replay for this moment that all threads share, which is made if there is none.
    fn plain_at(
        &self,
        moment: ReplayMoment,
        replay: impl FnOnce() -> Option<Arc<StoredResponse>>,
    ) -> Option<Arc<StoredResponse>> {
        let latest = read(&self.plain);
        let known = latest.as_ref().filter(|latest| latest.0 == moment).map(|(_, replay)| replay.clone());
        drop(latest);
        known.unwrap_or_else(|| {
            let replay = replay();
            *write(&self.plain) = Some((moment, replay.clone()));
            replay
        })
    }
}

/// How many responses a thread has replays of its own of, at most.
const REPLAYS_OF_THREAD: usize = 64;
/// The longest stored response of which a thread has a replay of its own.
const LONGEST_OF_THREAD: usize = 16 * 1024;
/// What a replay takes besides the bytes of its response, by estimate: the map of some 24 header fields.
const AROUND_REPLAY: usize = 3 * 1024;
/// A thread that has served a response so often has a replay of its own of it, while it serves it half as often in each second.
const OFTEN: u8 = 16;

thread_local! {
    static REPLAYS: RefCell<ThreadReplays> = const { RefCell::new(ThreadReplays::new()) };
}

/// The replays of the responses that this thread serves often. Their fields and bodies are copies: threads that count the references to one
/// buffer wait for each other.
///
/// A replay is found by the number of its decoding, and only after the look-up has found that decoding's entry. So it is as current as the
/// entry is.
struct ThreadReplays {
    /// Each decoding has one slot, by its number, which it shares with others.
    slots: Vec<Option<ReplaySlot>>,
    /// The second, by the store's clock, in which slots were last cleared.
    second: u64,
}

struct ReplaySlot {
    number: u64,
    /// How often the decoding was served, less how often others of the slot were; halved each second.
    uses: u8,
    /// Whether it was served since slots were last cleared.
    is_used: bool,
    replay: Option<ThreadReplay>,
}

/// A thread's replay of one decoding.
struct ThreadReplay {
    moment: ReplayMoment,
    response: Arc<StoredResponse>,
    _room: Room,
}

/// `None` while the thread ends.
fn of_thread<T>(of: impl FnOnce(&mut ThreadReplays) -> T) -> Option<T> {
    REPLAYS.try_with(|replays| Some(of(&mut *replays.try_borrow_mut().ok()?))).ok().flatten()
}

/// What a thread has of one decoding.
enum InThread {
    /// A replay for this moment.
    Replay(Arc<StoredResponse>),
    /// None, but the thread serves the response often.
    Frequent,
    Rare,
}

impl ThreadReplays {
    const fn new() -> Self {
        Self { slots: Vec::new(), second: 0 }
    }

    fn find(&mut self, number: u64, moment: ReplayMoment, second: u64) -> InThread {
        self.slots.resize_with(REPLAYS_OF_THREAD, || None);
        // The clocks of two servers may differ.
        if second > self.second {
            self.second = second;
            for slot in &mut self.slots {
                slot.take_if(|slot| !slot.is_used);
                if let Some(slot) = slot {
                    (slot.uses, slot.is_used) = (slot.uses / 2, false);
                    slot.replay.take_if(|_| slot.uses < OFTEN / 2);
                }
            }
        }
        let slot = &mut self.slots[number as usize % REPLAYS_OF_THREAD];
        match slot {
            Some(slot) if slot.number == number => {
                (slot.uses, slot.is_used) = (slot.uses.saturating_add(1), true);
                match &slot.replay {
                    Some(replay) if replay.moment == moment => InThread::Replay(Arc::clone(&replay.response)),
                    _ if slot.uses >= OFTEN => {
                        // One of another moment gives its room to the next.
                        slot.replay = None;
                        InThread::Frequent
                    }
                    _ => InThread::Rare,
                }
            }
            Some(slot) if slot.uses > 0 => {
                slot.uses -= 1;
                InThread::Rare
            }
            _ => {
                *slot = Some(ReplaySlot { number, uses: 1, is_used: true, replay: None });
                InThread::Rare
            }
        }
    }

    fn store(&mut self, number: u64, replay: ThreadReplay) {
        let slot = self.slots.get_mut(number as usize % REPLAYS_OF_THREAD).and_then(Option::as_mut);
        if let Some(slot) = slot.filter(|slot| slot.number == number) {
            slot.replay = Some(replay);
        }
    }
}

impl EntryReader for ResponseReader<'_> {
    type Value = StoredAnswer;

    fn serves(&self, entry: &Entry, now: u64, shared: Option<&SharedValue>) -> Freshness {
        SharedDecoding::with(entry, shared, |decoding| match &decoding.meta {
            Some((meta, _)) => self.serves_meta(meta, entry, now, &meta.at(entry, now)),
            None => entry.serves(now),
        })
    }

    fn stands_in(&self, entry: &Entry, now: u64) -> bool {
        let Some((meta, _)) = ResponseMeta::of(entry) else { return false };
        let (age, terms) = meta.at(entry, now);
        let is_same_variant = self.is_this_variant(&meta);
        is_same_variant
            && entry.times().stands_in(now)
            && instead_of(LoadFailure::Disconnected, self.demands, &terms, age, self.http)
    }

    fn leads_others(&self, entry: &Entry) -> bool {
        self.resource.is_some() && ResponseMeta::of(entry).is_some_and(|(meta, _)| meta.variant.is_some())
    }

    fn open(&self, entry: &Entry, now: u64, shared: Option<&SharedValue>) -> Option<StoredAnswer> {
        SharedDecoding::with(entry, shared, |decoding| {
            let (meta, at) = decoding.meta.as_ref()?;
            self.open_decoding(decoding, (meta, *at), entry, now, meta.at(entry, now).0)
        })
    }

    /// Decodes the metadata once, for both answers.
    fn read(
        &self,
        entry: &Entry,
        now: u64,
        shared: Option<&SharedValue>,
        opens: impl FnOnce(Freshness) -> bool,
    ) -> (Freshness, Option<StoredAnswer>) {
        SharedDecoding::with(entry, shared, |decoding| {
            let Some((meta, at)) = &decoding.meta else { return (entry.serves(now), None) };
            let (age, terms) = meta.at(entry, now);
            let freshness = self.serves_meta(meta, entry, now, &(age, terms));
            let open = || self.open_decoding(decoding, (meta, *at), entry, now, age);
            (freshness, opens(freshness).then(open).flatten())
        })
    }

    fn open_incoming(&self, incoming: &Arc<dyn Any + Send + Sync>) -> Option<StoredAnswer> {
        let shared_body = Arc::clone(incoming).downcast::<SharedBody>().ok()?;
        // A request with a condition gets the whole response: whether the body will be complete is not known yet.
        match self.fits(&shared_body.meta) {
            ControlFlow::Continue(()) => Some(StoredAnswer::Incoming(shared_body)),
            ControlFlow::Break(instead) => instead,
        }
    }
}

impl<'a> ResponseReader<'a> {
    /// The reader for a request to this guard that has not waited.
    pub(super) fn new(
        guard: &'a StampedeGuard,
        demands: &'a RequestDemands,
        headers: &'a HeaderMap,
        resource: Option<&'a Key>,
    ) -> Self {
        let (state, policy) = guard.parts();
        let copies = policy.has_copies().then_some(&*state.local);
        Self { demands, headers, http: &policy.http, resource, has_waited: false, copies }
    }

    /// The stored response for this request, which has one made for itself unless it is one of many that receive the same.
    fn open_decoding(
        &self,
        decoding: &SharedDecoding,
        (meta, at): (&ResponseMeta, usize),
        entry: &Entry,
        now: u64,
        age: Duration,
    ) -> Option<StoredAnswer> {
        let decode = |payload: &Bytes| {
            let mut response = StoredResponse::decode(payload, at)?;
            self.replay(entry, meta, &mut response, now, age)?;
            Some(Arc::new(response))
        };
        let is_shared = decoding.number > 0 && meta.variant.is_none() && self.is_plain() && !self.has_waited;
        let response = if is_shared {
            self.shared_replay(decoding, entry, now, age, decode)?
        } else {
            if let ControlFlow::Break(instead) = self.fits(meta) {
                return instead;
            }
            decode(&entry.payload)?
        };
        Some(StoredAnswer::Response(Replay { response, times: Times::of(entry, now) }))
    }

    /// The replay that hits share which want the plain whole response, for as long as its `age` is the same in seconds. If they are many,
    /// those of one thread share the thread's own.
    fn shared_replay(
        &self,
        decoding: &SharedDecoding,
        entry: &Entry,
        now: u64,
        age: Duration,
        decode: impl Fn(&Bytes) -> Option<Arc<StoredResponse>>,
    ) -> Option<Arc<StoredResponse>> {
        let left = entry.fresh_until().checked_sub(now).filter(|left| *left > 0);
        let moment = ReplayMoment { age: age.as_secs(), ttl: left.map(|left| left / 1000) };
        let (number, length) = (decoding.number, entry.payload.len());
        let find = |replays: &mut ThreadReplays| replays.find(number, moment, now / 1000);
        let room = match self.copies.and_then(|copies| Some((copies, of_thread(find)?))) {
            Some((_, InThread::Replay(response))) => return Some(response),
            Some((copies, InThread::Frequent)) if length <= LONGEST_OF_THREAD => {
                copies.room((length + AROUND_REPLAY) as u64)
            }
            _ => None,
        };
        let Some(room) = room else { return decoding.plain_at(moment, || decode(&entry.payload)) };
        let response = decode(&Bytes::copy_from_slice(&entry.payload))?;
        let replay = ThreadReplay { moment, response: Arc::clone(&response), _room: room };
        of_thread(|replays| replays.store(number, replay));
        Some(response)
    }

    fn serves_meta(
        &self,
        meta: &ResponseMeta,
        entry: &Entry,
        now: u64,
        (age, terms): &(Duration, ReuseTerms),
    ) -> Freshness {
        // The entry under the resource's key holds one variant, and the request needs another, which has its own key. If the entry
        // is marked stale, all variants of the resource count as stale.
        if entry.expiry.is_expired() && self.is_elsewhere(meta) {
            return Freshness::Expired;
        }
        if meta.part.is_some_and(|part| !self.wants_of(part)) {
            return Freshness::Expired;
        }
        match reuse(self.demands, terms, *age, self.http) {
            // `open` decides whether the response may answer this request.
            Reuse::Fresh | Reuse::NotForThis => Freshness::Fresh,
            Reuse::Stale => Freshness::BackingOff,
            Reuse::StaleWhileRevalidate => match entry.serves(now) {
                Freshness::BackingOff => Freshness::BackingOff,
                Freshness::Fresh | Freshness::Stale => Freshness::Stale,
                // The entry's own stale windows have ended earlier: `expire` has marked it stale.
                Freshness::StaleIfError | Freshness::Expired => Freshness::Expired,
            },
            // The request needs another variant, which may be fresh under its own key, unless `expire` has marked the resource stale.
            Reuse::Revalidate | Reuse::OnlyIfCached
                if !entry.expiry.is_expired() && self.is_elsewhere(meta) =>
            {
                Freshness::Fresh
            }
            Reuse::Revalidate
                if entry.serves(now) == Freshness::BackingOff
                    && instead_of(LoadFailure::Disconnected, self.demands, terms, *age, self.http) =>
            {
                Freshness::BackingOff
            }
            Reuse::Revalidate | Reuse::OnlyIfCached => Freshness::Expired,
        }
    }

    /// Whether the whole response answers the request, whichever client it comes from.
    fn is_plain(&self) -> bool {
        let RequestDemands { conditional, ranged, authorized, has_cookie, .. } = *self.demands;
        !(conditional || ranged || authorized || has_cookie)
    }

    fn is_this_variant(&self, meta: &ResponseMeta) -> bool {
        meta.is_for(self.headers, self.http.normal())
    }

    fn is_elsewhere(&self, meta: &ResponseMeta) -> bool {
        self.resource.is_some() && !self.is_this_variant(meta)
    }

    /// Whether the response suits this request. If not, breaks with what the request gets instead: the key of its variant, or
    /// [`NotForThis`](StoredAnswer::NotForThis). Breaks with `None` if a variant's key holds another variant than the request's. Call it
    /// once: it digests the request's values.
    fn fits(&self, meta: &ResponseMeta) -> ControlFlow<Option<StoredAnswer>> {
        let is_variant = self.is_this_variant(meta);
        if let (Some(resource), Some(variant), false) = (self.resource, &meta.variant, is_variant) {
            let VariantId { generation, names, .. } = &**variant;
            let fingerprint = names.fingerprint(self.headers, self.http.normal());
            // Half of the digest is enough for the key: the stored variant is compared by the whole digest.
            let key = resource.derived(&format!("~v{generation:016x}{}", fingerprint.half()));
            let slot = VariantSlot { key, generation: *generation, names: names.clone() };
            return ControlFlow::Break(Some(StoredAnswer::Elsewhere(Box::new(slot))));
        }
        if !is_for(self.demands, &meta.terms, self.http) {
            return ControlFlow::Break(Some(StoredAnswer::NotForThis));
        }
        if is_variant { ControlFlow::Continue(()) } else { ControlFlow::Break(None) }
    }

    /// Whether the stored part may contain the requested range.
    fn wants_of(&self, part: Part) -> bool {
        self.demands.ranged && ByteRange::of(self.headers).is_some_and(|range| range.of_part(part).is_some())
    }

    /// Makes a stored response the one that is sent; `None` if the request needs more than is stored.
    fn replay(
        &self,
        entry: &Entry,
        meta: &ResponseMeta,
        response: &mut StoredResponse,
        now: u64,
        age: Duration,
    ) -> Option<()> {
        // A waiter took its `now` before the entry was stored.
        let now = now.max(entry.stored_at);
        let fresh_until = entry.fresh_until();
        // An entry that was never fresh was made for the waiters of its load, so it is not reported to them as stale.
        let was_fresh = fresh_until > entry.stored_at || entry.expiry.is_expired() || entry.stored_at < now;
        let status = if fresh_until <= now && was_fresh {
            CacheStatus::stale(entry, now)
        } else {
            let ttl = fresh_until.saturating_sub(now) / 1000;
            if self.has_waited { CacheStatus::collapsed(ttl) } else { CacheStatus::hit(ttl) }
        };
        answer(self.demands, self.headers, response, meta.part, age)?;
        age_and_status(&mut response.headers, age.as_secs(), status);
        Some(())
    }
}

/// Makes a stored response the answer to a request: the whole, a part of it (RFC 9110, 14), or a 304 (RFC 9111, 4.3.2). `None` if the
/// request needs more than is stored.
pub(crate) fn answer(
    demands: &RequestDemands,
    request: &HeaderMap,
    stored: &mut StoredResponse,
    part: Option<Part>,
    age: Duration,
) -> Option<()> {
    if !demands.conditional && !demands.ranged {
        // A part does not answer a request for the whole.
        return (part.is_none() && stored.status != StatusCode::PARTIAL_CONTENT).then_some(());
    }
    let now = SystemTime::now();
    let received = now.checked_sub(age).unwrap_or(now);
    if demands.conditional && is_not_modified(request, stored.status, &stored.headers, received, now) {
        stored.without_content(StatusCode::NOT_MODIFIED, not_modified(&stored.headers));
        return Some(());
    }
    let (selected_part, first) = match part {
        Some(part) => {
            let range = ByteRange::of(request).filter(|_| if_range_holds(request, &stored.headers, now))?;
            (range.of_part(part)?, part.first)
        }
        None if demands.ranged && stored.status == StatusCode::OK => {
            let length = stored.body.len() as u64;
            match range_answer(request, &stored.headers, length, now) {
                RangeAnswer::Part(part) => (part, 0),
                RangeAnswer::Whole => return Some(()),
                RangeAnswer::Unsatisfiable => {
                    let headers = unsatisfiable(&stored.headers, length);
                    stored.without_content(StatusCode::RANGE_NOT_SATISFIABLE, headers);
                    return Some(());
                }
            }
        }
        None => return Some(()),
    };
    let within = selected_part.within(first).filter(|within| within.end <= stored.body.len())?;
    selected_part.write(&mut stored.headers);
    (stored.status, stored.body, stored.trailers) =
        (StatusCode::PARTIAL_CONTENT, stored.body.slice(within), None);
    Some(())
}

impl SharedBody {
    /// The response for a waiter that reads the body while it is loaded.
    pub(crate) fn respond(&self, http: &HttpPolicy, outcome: Outcome) -> Response<GuardedBody> {
        let mut response = Response::new(GuardedBody::incoming(Arc::clone(&self.body), self.length));
        *response.status_mut() = self.head.status;
        *response.headers_mut() = self.head.headers.clone();
        let age = self.meta.age + self.came.elapsed().min(Duration::from_secs(u32::MAX.into()));
        let status = CacheStatus::Collapsed { ttl: self.ttl };
        age_and_status(response.headers_mut(), age.as_secs(), status);
        let fresh_for = Duration::from_secs(self.ttl.unwrap_or(0)).saturating_sub(self.came.elapsed());
        set_answer_info(&mut response, http, outcome, Times::just_loaded(fresh_for));
        response
    }
}

/// The guard's own answer if it has no response:
///
/// - 502: the load that this request waited for failed, and its error belongs to the client that led it; or the inner
///   service sent a 304 about another response (`not-validated`);
/// - 503: overload (`overloaded`), or the store is down and the guard may not load without it
///   (`OnStoreDown::FailClosed`);
/// - 504: the load took longer than `load_timeout`, or the wait for it longer than `wait_timeout`; or nothing stored may be
///   used for a request with `only-if-cached`.
///
/// A later attempt may succeed in each case, so all carry `Retry-After` (RFC 9110, 10.2.3).
fn own_answer(status: StatusCode, detail: &'static str, text: &'static str) -> Response<GuardedBody> {
    let mut response = Response::new(GuardedBody::from(Bytes::from_static(text.as_bytes())));
    *response.status_mut() = status;
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("text/plain; charset=utf-8"));
    headers.insert(RETRY_AFTER, HeaderValue::from_static("1"));
    // Made for this request only: no cache on the way may store it (RFC 9111, 5.2.2.5).
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    write_status(headers, CacheStatus::miss(detail));
    response
}

/// An [`own_answer`] with the outcome `Failed` as an extension, if the policy requests that extension.
pub(super) fn failed_answer(
    http: &HttpPolicy,
    status: StatusCode,
    detail: &'static str,
    text: &'static str,
) -> Response<GuardedBody> {
    let mut response = own_answer(status, detail, text);
    set_answer_info(&mut response, http, Outcome::Failed, Times::default());
    response
}

/// The answer to a request whose load failed, for other reasons than the guard's limits.
pub(super) fn load_failed() -> Response<GuardedBody> {
    own_answer(StatusCode::BAD_GATEWAY, "load-failed", "the load of this resource failed\n")
}

const CACHE_STATUS: HeaderName = http::header::CACHE_STATUS;

/// What the guard did for a response (RFC 9211, 2). Never contains the key, which may hold data that must not be
/// logged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CacheStatus {
    /// The response came from the store, and is fresh for `ttl` more seconds.
    Hit { ttl: u64 },
    /// The response came from the store, and has been stale for `beyond` seconds.
    Stale { beyond: u64 },
    /// The response was loaded for another request. `ttl` is the number of seconds for which it is fresh, if it is stored too.
    Collapsed { ttl: Option<u64> },
    /// The request was forwarded to the inner service. `status` is the inner service's status, if the client's response has
    /// another; `stored` is the number of seconds for which the stored response is fresh, if it is stored; `detail` is the token of
    /// the rule that decided, if any.
    Forwarded { fwd: Fwd, status: Option<StatusCode>, stored: Option<u64>, detail: Option<&'static str> },
}

/// Why the request was forwarded (RFC 9211, 2.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Fwd(&'static str);

impl Fwd {
    /// The request bypassed the cache.
    const BYPASS: Self = Self("bypass");
    /// The request bypassed the cache because of its method.
    pub(crate) const METHOD: Self = Self("method");
    /// No response is stored for that URI.
    pub(crate) const URI_MISS: Self = Self("uri-miss");
    /// The stored variants do not match the request.
    pub(crate) const VARY_MISS: Self = Self("vary-miss");
    /// No usable response is stored, for another reason.
    pub(crate) const MISS: Self = Self("miss");
    /// The stored response is stale, or has to be validated.
    pub(crate) const STALE: Self = Self("stale");
    /// The request refuses the stored response.
    pub(crate) const REQUEST: Self = Self("request");
    /// The stored response is only a part of the requested content.
    pub(crate) const PARTIAL: Self = Self("partial");
}

impl CacheStatus {
    /// The status of a request that bypassed the cache for the reason `detail`.
    pub(crate) fn bypass(detail: &'static str) -> Self {
        Self::unstored(Fwd::BYPASS, Some(detail))
    }

    /// The status of a hit that is fresh for `ttl` more seconds.
    pub(crate) fn hit(ttl: u64) -> Self {
        Self::Hit { ttl }
    }

    /// The status for a waiter of a load. A response that is shared with waiters only has no remaining lifetime to report.
    pub(crate) fn collapsed(ttl: u64) -> Self {
        Self::Collapsed { ttl: (ttl > 0).then_some(ttl) }
    }

    /// The status of a stale response that is served from the store at `now`.
    pub(crate) fn stale(entry: &Entry, now: u64) -> Self {
        let fresh_until = entry.fresh_until().max(entry.stored_at);
        Self::Stale { beyond: now.saturating_sub(fresh_until) / 1000 }
    }

    /// The status of a response that was loaded for this request alone, for the reason `detail`.
    pub(crate) fn miss(detail: &'static str) -> Self {
        Self::unstored(Fwd::MISS, Some(detail))
    }

    /// The status of an answer of the inner service that is not stored.
    pub(crate) fn unstored(fwd: Fwd, detail: Option<&'static str>) -> Self {
        Self::Forwarded { fwd, status: None, stored: None, detail }
    }

    fn to_value(self) -> HeaderValue {
        match self {
            Self::Hit { ttl } => buffered(&BUFFERED_HITS, ttl, || self.text()),
            _ => text_value(self.text()),
        }
    }

    fn text(self) -> String {
        match self {
            Self::Hit { ttl } => format!("{HIT}; ttl={ttl}"),
            // RFC 9211, 2.5: the `ttl` of a stale response is negative.
            Self::Stale { beyond } => format!("{HIT}; ttl={}", -i128::from(beyond)),
            Self::Collapsed { ttl } => {
                with_parameter("stampede-guard; fwd=miss; collapsed".to_owned(), "ttl", ttl)
            }
            Self::Forwarded { fwd, status, stored, detail } => {
                let line = format!("stampede-guard; fwd={}", fwd.0);
                let line = with_parameter(line, "fwd-status", status.map(|status| status.as_u16()));
                with_parameter(with_parameter(line, "stored; ttl", stored), "detail", detail)
            }
        }
    }
}

/// Adds a parameter to a line, if it has a value.
fn with_parameter(line: String, name: &str, value: Option<impl fmt::Display>) -> String {
    match value {
        Some(value) => format!("{line}; {name}={value}"),
        None => line,
    }
}

/// A text of the guard as a header value. These texts have no control characters, so they are valid.
fn text_value(text: String) -> HeaderValue {
    HeaderValue::try_from(text).unwrap_or_else(|_| HeaderValue::from_static("stampede-guard"))
}

/// The `Cache-Status` of hits that are fresh for up to an hour more, by the remaining seconds.
static BUFFERED_HITS: [OnceLock<HeaderValue>; 3601] = [const { OnceLock::new() }; 3601];
/// The `Age` of responses that are less than 1,000 seconds old, by the age.
static BUFFERED_AGES: [OnceLock<HeaderValue>; 1000] = [const { OnceLock::new() }; 1000];

/// The header value for this number. The value for a small number is built once per process, so later hits neither allocate nor count
/// references. The leaked memory is bounded: some 30 bytes for each of these values.
fn buffered(
    values: &'static [OnceLock<HeaderValue>],
    number: u64,
    text: impl FnOnce() -> String,
) -> HeaderValue {
    match usize::try_from(number).ok().and_then(|number| values.get(number)) {
        Some(value) => value.get_or_init(|| HeaderValue::from_static(text().leak())).clone(),
        None => text_value(text()),
    }
}

/// Appends the guard's line after those of other caches: the list grows from the origin to the client (RFC 9211,
/// 2).
pub(crate) fn write_status(headers: &mut HeaderMap, status: CacheStatus) {
    // If the header map is full, the line is omitted: it is not worth failing the response.
    let _ = headers.try_append(CACHE_STATUS, status.to_value());
}

const HIT: &str = "stampede-guard; hit";

/// The detail in `Cache-Status` if the inner service has sent a 304 that does not refer to the stored response.
pub(crate) const NOT_VALIDATED: &str = "not-validated";

/// Which load failed, so that a stale response answers the request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StandIn {
    /// The request was forwarded. The inner service answered with this status, if at all.
    Forwarded(Option<StatusCode>),
    /// Another request was forwarded, and this one waited for it.
    Collapsed,
}

/// Replaces `hit` in the guard's line by the failed load: a forwarded request is no hit (RFC 9211, 2.1).
pub(crate) fn write_stand_in(headers: &mut HeaderMap, stand_in: StandIn) {
    let Some(own) = own_line(headers) else { return };
    let Some(ttl) = own.to_str().ok().and_then(|line| line.strip_prefix(HIT)) else { return };
    let (result, detail) = match stand_in {
        StandIn::Forwarded(Some(status)) => {
            let is_confirmation = status == StatusCode::NOT_MODIFIED;
            (format!("; fwd-status={}", status.as_u16()), is_confirmation.then_some(NOT_VALIDATED))
        }
        // RFC 9211, 2.3: without `fwd-status`, the origin's status was that of the response.
        StandIn::Forwarded(None) => (String::new(), Some("no-answer")),
        StandIn::Collapsed => ("; collapsed".to_owned(), None),
    };
    *own = text_value(with_parameter(format!("stampede-guard; fwd=stale{result}{ttl}"), "detail", detail));
}

/// The guard's own line, which is the last.
fn own_line(headers: &mut HeaderMap) -> Option<&mut HeaderValue> {
    let lines = headers.get_all(CACHE_STATUS).iter().count();
    let http::header::Entry::Occupied(all) = headers.entry(CACHE_STATUS) else { return None };
    all.into_iter().nth(lines.saturating_sub(1))
}

/// Adds the key to the guard's line (RFC 9211, 2.7). The text of a key is printable ASCII.
pub(crate) fn write_key(headers: &mut HeaderMap, key: &str) {
    let Some(own) = own_line(headers) else { return };
    let escaped = key.replace('\\', r"\\").replace('"', "\\\"");
    let line = [own.as_bytes(), b"; key=\"", escaped.as_bytes(), b"\""].concat();
    // A key that is too long or invalid for a header is omitted.
    if let Ok(line) = HeaderValue::from_maybe_shared(Bytes::from(line)) {
        *own = line;
    }
}

/// Writes `Age`, which replaces any older one (RFC 9111, 5.1), and `Cache-Status` for a response from the store.
pub(crate) fn age_and_status(headers: &mut HeaderMap, age: u64, status: CacheStatus) {
    let _ = headers.try_insert(AGE, buffered(&BUFFERED_AGES, age, || age.to_string()));
    write_status(headers, status);
}

/// Adds the times and the outcome as an extension, only if the policy requests it: the first extension of a response allocates a
/// map, which makes a hit from memory a tenth slower.
pub(super) fn set_answer_info<B>(
    response: &mut Response<B>,
    http: &HttpPolicy,
    outcome: Outcome,
    times: Times,
) {
    if http.answer_info {
        response.extensions_mut().insert(times.with(outcome));
    }
}

/// Writes `Cache-Status` and the extension for a forwarded response.
pub(super) fn set_forwarded_status(
    response: &mut Response<GuardedBody>,
    http: &HttpPolicy,
    outcome: Outcome,
    status: CacheStatus,
) {
    write_status(response.headers_mut(), status);
    let stored = if let CacheStatus::Forwarded { stored, .. } = status { stored.unwrap_or(0) } else { 0 };
    set_answer_info(response, http, outcome, Times::just_loaded(Duration::from_secs(stored)));
}
