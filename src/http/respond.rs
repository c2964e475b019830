//! Step 8 over HTTP: a stored response as the answer to a request (RFC 9111, 4).

use std::any::Any;
use std::sync::{Arc, RwLock};
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use http::header::{CACHE_CONTROL, CONTENT_TYPE, HeaderMap, HeaderValue, RETRY_AFTER};
use http::{Response, StatusCode};

use super::answer_info::tell;
use super::body::GuardedBody;
use super::cache_status::{CacheStatus, age_and_status, write_status};
use super::encoding::StoredResponse;
use super::metadata::{ResponseMeta, VariantId};
use super::shared_body::SharedBody;
use crate::guard::outcome::Times;
use crate::http_rules::policy::HttpPolicy;
use crate::http_rules::ranges::{self, ByteRange, Part, if_range_holds};
use crate::http_rules::request::RequestDemands;
use crate::http_rules::reuse::{LoadFailure, Reuse, instead_of, is_for, reuse};
use crate::http_rules::validation::{is_not_modified, not_modified};
use crate::http_rules::vary::{Fingerprint, Names};
use crate::key::Key;
use crate::observe::Outcome;
use crate::sync::{read, write};
use crate::value::entry::Entry;
use crate::value::freshness::Freshness;
use crate::value::reader::{EntryReader, SharedValue};

/// A request, as the reader of the stored response.
pub(crate) struct ResponseReader<'a> {
    pub(crate) asked: &'a RequestDemands,
    /// The request's headers.
    pub(crate) headers: &'a HeaderMap,
    pub(crate) http: &'a HttpPolicy,
    pub(crate) at: LookUpKey<'a>,
    /// The `Cache-Status` of an entry that is fresh for this many more seconds.
    pub(crate) status: fn(u64) -> CacheStatus,
}

/// The key at which the response is looked up.
#[derive(Clone, Copy)]
pub(crate) enum LookUpKey<'a> {
    /// The resource's key: it holds one of the variants, which leads to the others.
    Resource(&'a Key),
    Variant,
}

/// The key of a variant.
#[derive(Clone, Debug)]
pub(crate) struct VariantPlace {
    pub(crate) key: Key,
    pub(crate) generation: u64,
    pub(crate) names: Names,
}

impl VariantPlace {
    fn new(resource: &Key, chosen: &VariantId, fingerprint: Fingerprint) -> Self {
        let VariantId { generation, names, .. } = chosen;
        // Half of the digest is enough for the key: the stored variant is compared by the whole digest.
        let suffix = format!("~v{generation:016x}{}", fingerprint.half());
        Self { key: resource.derived(&suffix), generation: *generation, names: names.clone() }
    }
}

/// The stored response for a request, or where to find it.
#[derive(Clone)]
pub(crate) enum StoredAnswer {
    Response(Replay),
    /// A response that arrives for another request.
    Arriving(Arc<SharedBody>),
    /// The variant for this request, if it is stored, is under this key.
    Elsewhere(Box<VariantPlace>),
    /// The stored response must not answer a request like this (RFC 9111, 3.5).
    NotForThis,
}

/// Whether the stored response suits a request.
enum VariantFit {
    Here,
    Instead(StoredAnswer),
    /// Another variant, and this is not the resource's key.
    Other,
}

/// A stored response, ready to be sent.
#[derive(Clone)]
pub(crate) struct Replay {
    pub(crate) response: Response<Bytes>,
    pub(crate) trailers: Option<Box<HeaderMap>>,
    /// Of the stored entry.
    pub(crate) times: Times,
}

impl Replay {
    pub(crate) fn respond<B>(self, http: &HttpPolicy, outcome: Outcome) -> Response<GuardedBody<B>> {
        let Self { mut response, trailers, times } = self;
        tell(&mut response, http, outcome, times);
        response.map(|body| GuardedBody::stored(body, trailers.map(|trailers| *trailers)))
    }
}

/// Decoded state that the callers of a shared read, or of a local copy, have in common.
struct SharedDecoding {
    /// The metadata, and the offset of the response.
    kept: Option<(ResponseMeta, usize)>,
    /// The latest replay for requests without conditions, range or credentials. It is made again when its age has changed. Many threads
    /// read that of a hot response at once.
    plain: RwLock<Option<PlainReplay>>,
}

/// A replay, and what of its head changes with time.
struct PlainReplay {
    moment: ReplayMoment,
    replay: Option<Replay>,
}

/// The age and the remaining lifetime, both in seconds; the latter is `None` if the response is stale.
#[derive(Clone, Copy, PartialEq, Eq)]
struct ReplayMoment {
    age: u64,
    ttl: Option<u64>,
}

impl SharedDecoding {
    fn of<'a>(entry: &Entry, shared: Option<&'a SharedValue>) -> Option<&'a Self> {
        let first = || Arc::new(Self { kept: ResponseMeta::of(entry), plain: RwLock::default() }) as _;
        shared?.get_or_init(first).downcast_ref()
    }
}

impl EntryReader for ResponseReader<'_> {
    type Value = StoredAnswer;

    fn serves(&self, entry: &Entry, now: u64, shared: Option<&SharedValue>) -> Freshness {
        if let Some(SharedDecoding { kept: Some((kept, _)), .. }) = SharedDecoding::of(entry, shared) {
            return self.serves_kept(kept, entry, now);
        }
        match ResponseMeta::of(entry) {
            Some((kept, _)) => self.serves_kept(&kept, entry, now),
            None => entry.serves(now),
        }
    }

    fn stands_in(&self, entry: &Entry, now: u64) -> bool {
        let Some((kept, _)) = ResponseMeta::of(entry) else { return false };
        let (age, terms) = kept.at(entry, now);
        let is_its_own = self.is_this_variant(&kept);
        is_its_own
            && entry.expiry.stands_in(now)
            && instead_of(LoadFailure::Disconnected, self.asked, &terms, age, self.http)
    }

    fn leads_others(&self, entry: &Entry) -> bool {
        matches!(self.at, LookUpKey::Resource(_))
            && ResponseMeta::of(entry).is_some_and(|(kept, _)| kept.chosen.is_some())
    }

    /// Decodes the metadata once for all callers that share the entry. Requests that want the plain whole response
    /// share the replay too, for as long as its age is the same in seconds.
    fn open(&self, entry: &Entry, now: u64, shared: Option<&SharedValue>) -> Option<StoredAnswer> {
        let Some(SharedDecoding { kept: Some((kept, at)), plain }) = SharedDecoding::of(entry, shared) else {
            let (kept, at) = ResponseMeta::of(entry)?;
            return self.open_kept(&kept, at, entry, now);
        };
        if kept.chosen.is_some() || !self.is_plain() {
            return self.open_kept(kept, *at, entry, now);
        }
        let moment = ReplayMoment {
            age: kept.at(entry, now.max(entry.stored_at)).0.as_secs(),
            ttl: entry.expiry.fresh_until.checked_sub(now).filter(|left| *left > 0).map(|left| left / 1000),
        };
        let latest = read(plain);
        let known =
            latest.as_ref().filter(|latest| latest.moment == moment).map(|latest| latest.replay.clone());
        drop(latest);
        let replay = known.unwrap_or_else(|| {
            let replay = StoredResponse::decode(&entry.payload, *at)
                .and_then(|stored| self.replay(entry, kept, stored, now));
            let latest = PlainReplay { moment, replay: replay.clone() };
            *write(plain) = Some(latest);
            replay
        })?;
        Some(StoredAnswer::Response(Replay { times: Times::of(entry, now), ..replay }))
    }

    fn open_arriving(&self, arriving: &Arc<dyn Any + Send + Sync>) -> Option<StoredAnswer> {
        let arrival = Arc::clone(arriving).downcast::<SharedBody>().ok()?;
        // A request with a condition gets the whole response: whether the body will be complete is not known yet.
        match self.fits(&arrival.kept) {
            VariantFit::Here => Some(StoredAnswer::Arriving(arrival)),
            VariantFit::Instead(found) => Some(found),
            VariantFit::Other => None,
        }
    }
}

impl ResponseReader<'_> {
    fn open_kept(&self, kept: &ResponseMeta, at: usize, entry: &Entry, now: u64) -> Option<StoredAnswer> {
        match self.fits(kept) {
            VariantFit::Here => {
                let response = StoredResponse::decode(&entry.payload, at)?;
                self.replay(entry, kept, response, now).map(StoredAnswer::Response)
            }
            VariantFit::Instead(found) => Some(found),
            VariantFit::Other => None,
        }
    }

    fn serves_kept(&self, kept: &ResponseMeta, entry: &Entry, now: u64) -> Freshness {
        let (age, terms) = kept.at(entry, now);
        // The entry under the resource's key holds one variant; the request wants another, which has its own key. If the first is
        // marked stale, all variants are.
        if entry.expiry.is_expired() && self.is_elsewhere(kept) {
            return Freshness::Expired;
        }
        if kept.part.is_some_and(|part| !self.wants_of(part)) {
            return Freshness::Expired;
        }
        match reuse(self.asked, &terms, age, self.http) {
            // `open` decides whether the response may answer this request.
            Reuse::Fresh | Reuse::NotForThis => Freshness::Fresh,
            Reuse::Stale => Freshness::BackingOff,
            Reuse::StaleWhileRevalidate => match entry.expiry.serves(now) {
                Freshness::BackingOff => Freshness::BackingOff,
                Freshness::Fresh | Freshness::Stale => Freshness::Stale,
                // An invalidation has ended its stale windows.
                Freshness::StaleIfError | Freshness::Expired => Freshness::Expired,
            },
            // If the resource was expired, so are its other variants.
            Reuse::Revalidate | Reuse::OnlyIfCached
                if !entry.expiry.is_expired() && self.is_elsewhere(kept) =>
            {
                Freshness::Fresh
            }
            Reuse::Revalidate
                if entry.expiry.serves(now) == Freshness::BackingOff
                    && instead_of(LoadFailure::Disconnected, self.asked, &terms, age, self.http) =>
            {
                Freshness::BackingOff
            }
            Reuse::Revalidate | Reuse::OnlyIfCached => Freshness::Expired,
        }
    }

    /// Whether the whole response answers the request, whichever client it comes from.
    fn is_plain(&self) -> bool {
        let RequestDemands { conditional, ranged, authorized, has_cookie, .. } = *self.asked;
        !(conditional || ranged || authorized || has_cookie)
    }

    fn is_this_variant(&self, kept: &ResponseMeta) -> bool {
        kept.is_for(self.headers, self.http.normal())
    }

    fn is_elsewhere(&self, kept: &ResponseMeta) -> bool {
        matches!(self.at, LookUpKey::Resource(_)) && !self.is_this_variant(kept)
    }

    /// Whether the response suits this request. Call it once: it digests the request's values.
    fn fits(&self, kept: &ResponseMeta) -> VariantFit {
        let is_variant = self.is_this_variant(kept);
        if let (LookUpKey::Resource(resource), Some(chosen), false) = (self.at, &kept.chosen, is_variant) {
            let fingerprint = chosen.names.fingerprint(self.headers, self.http.normal());
            return VariantFit::Instead(StoredAnswer::Elsewhere(Box::new(VariantPlace::new(
                resource,
                chosen,
                fingerprint,
            ))));
        }
        if !is_for(self.asked, &kept.terms, self.http) {
            return VariantFit::Instead(StoredAnswer::NotForThis);
        }
        if is_variant { VariantFit::Here } else { VariantFit::Other }
    }

    /// Whether the stored part may contain the requested range.
    fn wants_of(&self, part: Part) -> bool {
        self.asked.ranged && ByteRange::of(self.headers).is_some_and(|range| range.of_part(part).is_some())
    }

    fn replay(&self, entry: &Entry, kept: &ResponseMeta, stored: StoredResponse, now: u64) -> Option<Replay> {
        // A waiter came before the entry was stored; the age must not be negative for it.
        let now = now.max(entry.stored_at);
        let (age, _) = kept.at(entry, now);
        let fresh_until = entry.expiry.fresh_until;
        // An entry that was never fresh was made for the waiters of its load.
        let was_fresh = fresh_until > entry.stored_at || entry.expiry.is_expired() || entry.stored_at < now;
        let status = if fresh_until <= now && was_fresh {
            CacheStatus::stale(entry, now)
        } else {
            (self.status)(fresh_until.saturating_sub(now) / 1000)
        };
        let mut replay = answer(self.asked, self.headers, stored, kept.part, age)?;
        replay.times = Times::of(entry, now);
        age_and_status(replay.response.headers_mut(), age.as_secs(), status);
        Some(replay)
    }
}

/// Answers a request with the whole stored response, a part of it (RFC 9110, 14), or a 304 (RFC 9111, 4.3.2).
/// `None` if the request needs more than is stored.
pub(crate) fn answer(
    asked: &RequestDemands,
    request: &HeaderMap,
    stored: StoredResponse,
    part: Option<Part>,
    age: Duration,
) -> Option<Replay> {
    // The sender uses its own HTTP version. hyper's server would send 1.0 if the origin did, and panics at 3.
    let StoredResponse { status, version: _, headers, body, trailers } = stored;
    let build = |status, headers, body, trailers| {
        let mut response = Response::new(body);
        *response.status_mut() = status;
        *response.headers_mut() = headers;
        Some(Replay { response, trailers, times: Times::default() })
    };
    if !asked.conditional && !asked.ranged {
        // A part does not answer a request for the whole.
        return if part.is_none() && status != StatusCode::PARTIAL_CONTENT {
            build(status, headers, body, trailers)
        } else {
            None
        };
    }
    let now = SystemTime::now();
    let received = now.checked_sub(age).unwrap_or(now);
    if asked.conditional && is_not_modified(request, status, &headers, received, now) {
        return build(StatusCode::NOT_MODIFIED, not_modified(&headers), Bytes::new(), None);
    }
    let (wanted, first) = match part {
        Some(stored) => {
            let range = ByteRange::of(request).filter(|_| if_range_holds(request, &headers, now))?;
            (range.of_part(stored)?, stored.first)
        }
        None if asked.ranged && status == StatusCode::OK => {
            match ranges::answer(request, &headers, body.len() as u64, now) {
                ranges::RangeAnswer::Part(part) => (part, 0),
                ranges::RangeAnswer::Whole => return build(status, headers, body, trailers),
                ranges::RangeAnswer::Unsatisfiable => {
                    let headers = ranges::unsatisfiable(&headers, body.len() as u64);
                    return build(StatusCode::RANGE_NOT_SATISFIABLE, headers, Bytes::new(), None);
                }
            }
        }
        None => return build(status, headers, body, trailers),
    };
    let within = wanted.within(first).filter(|within| within.end <= body.len())?;
    let mut headers = headers;
    wanted.write(&mut headers);
    build(StatusCode::PARTIAL_CONTENT, headers, body.slice(within), None)
}

impl SharedBody {
    /// The response for a waiter that reads along.
    pub(crate) fn respond<B>(&self, http: &HttpPolicy, outcome: Outcome) -> Response<GuardedBody<B>> {
        let mut response = Response::new(GuardedBody::arriving(Arc::clone(&self.body), self.length));
        *response.status_mut() = self.head.status;
        *response.headers_mut() = self.head.headers.clone();
        let age = self.kept.age + self.came.elapsed().min(Duration::from_secs(u32::MAX.into()));
        let status = CacheStatus::Collapsed { ttl: self.ttl };
        age_and_status(response.headers_mut(), age.as_secs(), status);
        let fresh_for = Duration::from_secs(self.ttl.unwrap_or(0)).saturating_sub(self.came.elapsed());
        tell(&mut response, http, outcome, Times::just_loaded(fresh_for));
        response
    }
}

/// The guard's own answer if it has no response:
///
/// - 502: the load that this request waited for failed, and its error cannot be given to two clients;
/// - 503: overload (`overloaded`), or the store is down and the guard may not load without it
///   (`OnStoreDown::FailClosed`);
/// - 504: the load took longer than `load_timeout`, or the wait for it longer than `wait_timeout`.
///
/// None of them concerns this request alone, so all carry `Retry-After` (RFC 9110, 10.2.3).
pub(crate) fn own_answer<B>(
    status: StatusCode,
    detail: &'static str,
    text: &'static str,
) -> Response<GuardedBody<B>> {
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
