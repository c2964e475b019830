//! [`StoreCandidate`], a response that will be shared or stored when its body is complete: its payload and lifetimes.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use http::header::{CONTENT_RANGE, DATE, ETAG, HeaderMap, HeaderValue, RETRY_AFTER};
use http::response::Parts;
use http::{Response, StatusCode, Version};
use tokio::time::Instant;

use super::body::SharedBody;
use super::stored::{ResponseMeta, StoredResponse, VariantId};
use crate::http_rules::conditional::{
    Part, digest_tag, freshened, has_validator, is_about, is_same_representation, join,
};
use crate::http_rules::fields::{is_encoded, remove_content_digests};
use crate::http_rules::freshness::{StaleWindows, is_failure};
use crate::http_rules::response::StoreDecision;
use crate::http_rules::vary::{Fingerprint, Names};
use crate::key::Key;
use crate::loader::LoadResult;
use crate::policy::Policy;
use crate::value::entry::{Encoding, Entry, Lifetimes, Packed, Unstored, ms};

/// The longest failure, in bytes, that is sent to other processes with its body.
const LONGEST_FAILURE: usize = 64 * 1024;

/// The stored response that a load is to replace.
pub(crate) struct StoredResponseToReplace {
    pub(crate) entry: Entry,
    pub(crate) meta: ResponseMeta,
    pub(crate) response: StoredResponse,
    /// Whether other requests are served the stored response during the load, or if the load fails.
    is_served: bool,
}

impl StoredResponseToReplace {
    pub(crate) fn of(entry: Entry, now: u64) -> Option<Self> {
        let (meta, at) = ResponseMeta::of(&entry)?;
        let mut response = StoredResponse::decode(&entry.payload, at)?;
        if meta.has_digest_tag {
            // The guard's own tag is no validator of the inner service, which would compare it with the tags that it sends.
            response.headers.remove(ETAG);
        }
        let is_served = entry.serves(now).is_at_once() || entry.times().stands_in(now);
        Some(Self { entry, meta, response, is_served })
    }

    /// Until when it may be served instead of a failure status, by `stale_if_error` alone: `stale_on_disconnect` applies only if there is
    /// no answer.
    pub(crate) fn errors_until(&self) -> u64 {
        // Compute it, as `lifetimes` does, from fixed fields: each failure rewrites the entry's own times.
        let ResponseMeta { age, terms, .. } = &self.meta;
        let fresh_for = terms.lifetime.saturating_sub(*age);
        let too_old = age.saturating_sub(terms.lifetime);
        let window = fresh_for.saturating_add(terms.stale.if_error.saturating_sub(too_old));
        self.entry.stored_at.saturating_add(ms(window))
    }

    /// The position of its content in the whole; `None` for an empty whole, and for a status other than 200 or 206.
    fn part(&self) -> Option<Part> {
        let length = self.response.body.len() as u64;
        let is_whole = self.response.status == StatusCode::OK && length > 0;
        let whole = is_whole.then(|| Part { first: 0, last: length - 1, complete: Some(length) });
        self.meta.part.or(whole)
    }
}

/// A response that will be shared when its body is complete.
pub(crate) struct StoreCandidate {
    /// The head, without the headers that are not stored.
    head: Parts,
    /// The terms on which it is stored; `None` for a response that is only shared with waiters.
    storing: Option<StoreDecision>,
    says_shared: bool,
    variant: Option<Box<VariantId>>,
    /// The tags that it has besides the policy's.
    pub(crate) tags: Vec<Key>,
    has_digest_tag: bool,
    /// Whether it was already older than its stated lifetime when its head was received.
    pub(crate) is_too_old: bool,
    /// The response's age when its head was received (RFC 9111, 4.2.3).
    pub(crate) age: Duration,
    /// When its head was received, for measuring how much older it has become.
    came: Instant,
    now: SystemTime,
}

impl StoreCandidate {
    /// A response that is stored on these terms. If it states no stale windows, the policy's `windows` apply,
    /// unless it forbids stale use (RFC 9111, 4.2.4).
    pub(crate) fn stored(
        head: &Parts,
        mut storing: StoreDecision,
        variant: Option<Box<VariantId>>,
        windows: &Lifetimes,
        now: SystemTime,
    ) -> Self {
        let StaleWindows { while_revalidate, if_error, on_request, .. } = &mut storing.terms.stale;
        let (says_while_revalidate, says_if_error) = storing.says_stale;
        for (window, is_stated, default) in [
            (while_revalidate, says_while_revalidate, windows.stale_while_revalidate),
            (if_error, says_if_error, windows.stale_if_error),
        ] {
            if !is_stated && *on_request {
                *window = default;
            }
        }
        let says_shared = storing.terms.says_shared;
        let mut candidate = Self::shared_only(head, says_shared, variant, storing.initial_age, now);
        for name in &storing.left_out {
            candidate.head.headers.remove(name);
        }
        Self { is_too_old: storing.is_too_old(), storing: Some(storing), ..candidate }
    }

    /// A response for waiters only, with this age when its head was received.
    pub(crate) fn shared_only(
        head: &Parts,
        says_shared: bool,
        variant: Option<Box<VariantId>>,
        age: Duration,
        now: SystemTime,
    ) -> Self {
        let head = head_of(head.status, head.version, head.headers.clone());
        let (is_too_old, has_digest_tag, tags) = (false, false, Vec::new());
        let came = Instant::now();
        Self { head, storing: None, says_shared, variant, tags, has_digest_tag, is_too_old, age, came, now }
    }

    /// For how many seconds it is fresh; `None` if it is not stored.
    pub(crate) fn ttl(&self) -> Option<u64> {
        let storing = self.storing.as_ref()?;
        Some(if storing.terms.revalidate_always { 0 } else { storing.fresh_for().as_secs() })
    }

    /// Its variant, if it is stored as one.
    pub(crate) fn variant(&self) -> Option<&VariantId> {
        self.storing.as_ref().and(self.variant.as_deref())
    }

    /// Whether the response will be stored, so that later requests find it.
    pub(crate) fn is_stored(&self) -> bool {
        self.storing.is_some()
    }

    /// Whether it will be stored as a part.
    pub(crate) fn is_part(&self) -> bool {
        self.storing.as_ref().is_some_and(|storing| storing.part.is_some())
    }

    /// The request headers that it depends on, if any.
    pub(crate) fn names(&self) -> Option<&Names> {
        self.variant.as_ref().map(|variant| &variant.names)
    }

    /// The longest time for which it may be stored.
    pub(crate) fn life(&self) -> Duration {
        self.storing.as_ref().map_or(Duration::ZERO, |storing| storing.keep_for.max(storing.fresh_for() * 2))
    }

    /// The response for waiters during the load, with a body of this length. `None` for a part: waiters may need another part.
    pub(crate) fn shared_body(&self, length: u64) -> Option<SharedBody> {
        if self.is_part() {
            return None;
        }
        let Self { head, variant, came, now, .. } = self;
        let headers = StoredResponse::storable_headers(head, *now, Some(length));
        let head = head_of(head.status, head.version, headers);
        let meta = self.meta(variant.clone());
        let (ttl, came, body) = (self.ttl(), *came, Arc::default());
        Some(SharedBody { head, meta, ttl, came, length, body })
    }

    fn meta(&self, variant: Option<Box<VariantId>>) -> ResponseMeta {
        let age = self.age.saturating_add(self.came.elapsed());
        let meta = ResponseMeta::shared_only(self.says_shared, age, variant);
        match &self.storing {
            Some(storing) => {
                let handler_terms = storing.handler_terms.clone();
                ResponseMeta {
                    terms: storing.terms,
                    handler_terms,
                    has_digest_tag: self.has_digest_tag,
                    ..meta
                }
            }
            None => meta,
        }
    }

    /// Makes it a response that is shared with waiters only, and not stored.
    pub(crate) fn not_stored(&mut self) {
        self.storing = None;
    }

    /// Adds the guard's tag to a whole 200 without one, if the policy says so. Returns it for the client of the load, which may still
    /// wait for its head.
    pub(crate) fn add_digest_tag(&mut self, body: &[u8], policy: &Policy) -> Option<HeaderValue> {
        let is_whole = self.storing.as_ref().is_some_and(|storing| storing.part.is_none());
        let is_due = policy.http.etag && is_whole && self.head.status == StatusCode::OK;
        if !is_due || self.head.headers.contains_key(ETAG) {
            return None;
        }
        let tag = digest_tag(&self.head.headers, body)?;
        self.has_digest_tag = self.head.headers.try_insert(ETAG, tag.clone()).is_ok();
        self.has_digest_tag.then_some(tag)
    }

    /// Makes the load's result from the complete body. If it is a part that neither joins the stored one nor may
    /// replace it, the result is for its own client only. `unstored` is the effect of a response that is not stored.
    pub(crate) fn finish(
        mut self,
        body: Bytes,
        mut trailers: Option<HeaderMap>,
        previous: Option<&StoredResponseToReplace>,
        unstored: Unstored,
        policy: &Policy,
    ) -> LoadResult {
        let (part, body) = match self.storing.as_ref().and_then(|storing| storing.part) {
            None => (None, body),
            Some(part) => match part.with_content(body.len() as u64, policy.http.strict_rfc) {
                Some(part) => match self.join_stored(part, &body, previous, policy.max_body) {
                    Some(joined) => {
                        // The trailers belong to one message, and the joined content is the content of no single
                        // message.
                        trailers = None;
                        joined
                    }
                    // A part does not replace a stored whole: any client may request one byte of it.
                    None if previous.is_some_and(|stored| self.must_not_replace(stored)) => {
                        return LoadResult::OnlyForCaller;
                    }
                    None => self.with_part_in_head(part, body),
                },
                // The content does not match the head.
                None => return LoadResult::OnlyForCaller,
            },
        };
        if part.is_some()
            && let Some(storing) = &mut self.storing
        {
            // A part is not served instead of a failure: a client that requests the whole, or another part, must receive
            // the failure.
            storing.terms.stale.if_error = Duration::ZERO;
            storing.terms.stale.on_disconnect = Duration::ZERO;
        }
        self.add_digest_tag(&body, policy);
        let variant = self.variant.take();
        let meta = ResponseMeta { part, ..self.meta(variant) };
        let stored = StoredResponse::new(&self.head, self.now, body, trailers);
        let Some(payload) = stored.encode(&meta) else {
            return LoadResult::Uncacheable { unstored, mark: true };
        };
        // A failure is not stored, so other processes receive only this copy. Without it, each of their waiters
        // would call the origin that has just failed.
        let too_long = payload.len() > LONGEST_FAILURE && is_failure(stored.status);
        let status_only = if too_long { status_of(&stored).encode(&meta) } else { None };
        let lifetimes =
            self.storing.as_ref().map_or_else(Lifetimes::default, |storing| lifetimes(storing, &meta));
        let (encoding, validator, tags) = (Encoding::HTTP, Bytes::new(), self.tags);
        // A body with a content coding is compressed already, so LZ4 would not make it shorter.
        let is_packed = self.storing.is_some() && !is_encoded(&self.head.headers);
        let packed = Packed::of(&payload, if is_packed { policy.compress_from } else { usize::MAX });
        LoadResult::Value { encoding, payload, packed, lifetimes, validator, tags, status_only, unstored }
    }

    /// Joins the part with the stored content if both are of one representation (RFC 9111, 3.4). `Last-Modified` is
    /// common to all variants, so it does not prove that parts of two variants belong together. If both together
    /// are longer than `max_body`, only the new part is stored.
    fn join_stored(
        &mut self,
        part: Part,
        body: &Bytes,
        previous: Option<&StoredResponseToReplace>,
        most: usize,
    ) -> Option<(Option<Part>, Bytes)> {
        let previous = previous.filter(|previous| {
            variant(&previous.meta.variant) == variant(&self.variant)
                && is_same_representation(&previous.response.headers, &self.head.headers, self.now)
        })?;
        let (all, content) = join((previous.part()?, &previous.response.body), (part, body))?;
        if content.len() > most {
            return None;
        }
        // An origin may send only the changed headers with a 206.
        self.head.headers = freshened(&previous.response.headers, &self.head.headers);
        remove_content_digests(&mut self.head.headers);
        for name in self.storing.iter().flat_map(|storing| &storing.left_out) {
            self.head.headers.remove(name);
        }
        Some(self.with_part_in_head(all, content.into()))
    }

    /// Whether this part must not replace the stored response, because the stored response is a whole that is served to other requests or
    /// can be validated. It cannot be validated if the part proves that the representation has changed.
    fn must_not_replace(&self, stored: &StoredResponseToReplace) -> bool {
        let headers = &stored.response.headers;
        let can_be_validated =
            || has_validator(headers, self.now) && is_about(&self.head.headers, headers, self.now);
        stored.meta.part.is_none() && (stored.is_served || can_be_validated())
    }

    /// Makes the head that of a 206 with this part, or, if the part is the whole, that of a 200.
    fn with_part_in_head(&mut self, part: Part, body: Bytes) -> (Option<Part>, Bytes) {
        part.write(&mut self.head.headers);
        if !part.is_whole() {
            return (Some(part), body);
        }
        self.head.status = StatusCode::OK;
        self.head.headers.remove(CONTENT_RANGE);
        (None, body)
    }
}

/// The names and fingerprint that identify a variant.
fn variant(variant: &Option<Box<VariantId>>) -> Option<(&Names, Fingerprint)> {
    variant.as_ref().map(|variant| (&variant.names, variant.variant.fingerprint))
}

/// How long a response may be served and stored from now on. Its stale windows are shortened by the time for which it is already
/// stale.
fn lifetimes(storing: &StoreDecision, meta: &ResponseMeta) -> Lifetimes {
    let terms = &storing.terms;
    let stays_for = storing.keep_for.saturating_sub(storing.fresh_for());
    if terms.revalidate_always {
        return Lifetimes { keep_for: storing.keep_for, ..Lifetimes::default() };
    }
    let fresh_for = terms.lifetime.saturating_sub(meta.age);
    let too_old = meta.age.saturating_sub(terms.lifetime);
    let error = terms.stale.if_error.max(terms.stale.on_disconnect);
    Lifetimes {
        fresh_for,
        stale_while_revalidate: terms.stale.while_revalidate.saturating_sub(too_old),
        stale_if_error: error.saturating_sub(too_old),
        // A variant's entry leads to the other variants, which may be stored just before it ends.
        keep_for: if meta.variant.is_some() { stays_for.max(fresh_for) } else { stays_for },
    }
}

/// A head with these fields and without extensions, which are for the client only.
pub(crate) fn head_of(status: StatusCode, version: Version, headers: HeaderMap) -> Parts {
    let mut parts = Response::new(()).into_parts().0;
    parts.status = status;
    parts.version = version;
    parts.headers = headers;
    parts
}

/// The status of a failure whose body is too long to send to other processes, with `Date` and `Retry-After`.
fn status_of(stored: &StoredResponse) -> StoredResponse {
    let mut headers = HeaderMap::new();
    for name in [DATE, RETRY_AFTER] {
        if let Some(value) = stored.headers.get(&name) {
            headers.insert(name, value.clone());
        }
    }
    StoredResponse { headers, body: Bytes::new(), trailers: None, ..*stored }
}
