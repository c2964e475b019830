//! What is stored of a response: the payload, and for how long.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use http::header::{CONTENT_RANGE, DATE, HeaderMap, RETRY_AFTER};
use http::response::Parts;
use http::{Response, StatusCode, Version};
use tokio::time::Instant;

use super::encoding::StoredResponse;
use super::metadata::{Chosen, Kept};
use super::shared_body::Arrival;
use crate::http_rules::fields::remove_content_digests;
use crate::http_rules::freshness::is_failure;
use crate::http_rules::ranges::{Part, join};
use crate::http_rules::response::Storing;
use crate::http_rules::reuse::{Stale, Terms};
use crate::http_rules::validation::{freshened, has_validator, is_about, is_same_representation};
use crate::http_rules::vary::{Fingerprint, Names};
use crate::loader::{LoadResult, Mark};
use crate::policy::Policy;
use crate::value::entry::{Encoding, Entry};
use crate::value::freshness::Lifetimes;

/// Beyond this a failure's body is not worth its way: it is told without.
const LONGEST_FAILURE: usize = 64 * 1024;

/// The stored response that a load is to replace.
pub(crate) struct Previous {
    pub(crate) entry: Entry,
    pub(crate) kept: Kept,
    pub(crate) response: StoredResponse,
    /// Whether others are served it meanwhile, or if a load fails.
    is_served: bool,
}

impl Previous {
    pub(crate) fn of(entry: Entry, now: u64) -> Option<Self> {
        let (kept, at) = Kept::of(&entry)?;
        let response = StoredResponse::decode(&entry.payload, at)?;
        let is_served = entry.serves(now).is_at_once() || entry.times.stands_in(now);
        Some(Self { entry, kept, response, is_served })
    }

    /// Where its content stands in the whole.
    fn part(&self) -> Option<Part> {
        let length = self.response.body.len() as u64;
        let is_whole = self.response.status == StatusCode::OK && length > 0;
        let whole = is_whole.then(|| Part { first: 0, last: length - 1, complete: Some(length) });
        self.kept.part.or(whole)
    }
}

/// A response that will be shared once its body is here.
pub(crate) struct Draft {
    /// Without what is not stored.
    head: Parts,
    /// On which terms it is stored; nothing for one that is only shared with those who wait.
    storing: Option<Storing>,
    says_shared: bool,
    chosen: Option<Box<Chosen>>,
    /// Whether it was older than the lifetime that it names when its head came.
    pub(crate) is_too_old: bool,
    /// How old it was then (RFC 9111, 4.2.3).
    pub(crate) age: Duration,
    /// When its head came.
    came: Instant,
    now: SystemTime,
}

impl Draft {
    /// Of a response that is stored on these terms. Where it says nothing about being served stale, what the
    /// policy's `windows` say counts, unless it forbids that (RFC 9111, 4.2.4).
    pub(crate) fn stored(
        head: &Parts,
        mut storing: Storing,
        chosen: Option<Box<Chosen>>,
        windows: &Lifetimes,
        now: SystemTime,
    ) -> Self {
        let Stale { while_revalidate, if_error, on_request, .. } = &mut storing.terms.stale;
        let (says_while_revalidate, says_if_error) = storing.says_stale;
        for (own, is_said, policys) in [
            (while_revalidate, says_while_revalidate, windows.stale_while_revalidate),
            (if_error, says_if_error, windows.stale_if_error),
        ] {
            if !is_said && *on_request {
                *own = policys;
            }
        }
        let Storing { initial_age: age, terms: Terms { says_shared, .. }, .. } = storing;
        let (is_too_old, head) = (storing.is_too_old(), clone_head(head, &storing));
        Self { head, storing: Some(storing), says_shared, chosen, is_too_old, age, came: Instant::now(), now }
    }

    /// Of a response for those who wait, which came at this age.
    pub(crate) fn shared_only(
        head: &Parts,
        says_shared: bool,
        chosen: Option<Box<Chosen>>,
        age: Duration,
        now: SystemTime,
    ) -> Self {
        let head = head_of(head.status, head.version, head.headers.clone());
        let is_too_old = false;
        Self { head, storing: None, says_shared, chosen, is_too_old, age, came: Instant::now(), now }
    }

    /// For how long it is fresh, where it is stored.
    pub(crate) fn ttl(&self) -> Option<u64> {
        let storing = self.storing.as_ref()?;
        Some(if storing.terms.revalidate_always { 0 } else { storing.fresh_for().as_secs() })
    }

    /// Which variant it is, if it is stored as one.
    pub(crate) fn chosen(&self) -> Option<&Chosen> {
        self.storing.as_ref().and(self.chosen.as_deref())
    }

    /// Whether others find it later.
    pub(crate) fn is_stored(&self) -> bool {
        self.storing.is_some()
    }

    /// The request headers that it depends on, if any.
    pub(crate) fn names(&self) -> Option<&Names> {
        self.chosen.as_ref().map(|chosen| &chosen.names)
    }

    /// For how long it is stored at the most.
    pub(crate) fn life(&self) -> Duration {
        self.storing.as_ref().map_or(Duration::ZERO, |storing| storing.keep_for.max(storing.fresh_for() * 2))
    }

    /// The same while it is on its way, of a body that is this long. Not of a part: who waits may want another.
    pub(crate) fn arrival(&self, length: u64) -> Option<Arrival> {
        if self.storing.as_ref().is_some_and(|storing| storing.part.is_some()) {
            return None;
        }
        let Self { head, chosen, came, now, .. } = self;
        let stored = StoredResponse::new(head, *now, Bytes::new(), None);
        let head = head_of(stored.status, stored.version, stored.headers);
        let kept = self.kept(chosen.clone());
        let (ttl, came, body) = (self.ttl(), *came, Arc::default());
        Some(Arrival { head, kept, ttl, came, length, body })
    }

    fn kept(&self, chosen: Option<Box<Chosen>>) -> Kept {
        let age = self.age.saturating_add(self.came.elapsed());
        match &self.storing {
            Some(storing) => Kept::new(storing, age, chosen),
            None => Kept::shared_only(self.says_shared, age, chosen),
        }
    }

    /// Shares it with those who wait only.
    pub(crate) fn not_stored(&mut self) {
        self.storing = None;
    }

    /// All of it is here. `Err` where its parts do not make one whole.
    pub(crate) fn finish(
        mut self,
        body: Bytes,
        mut trailers: Option<HeaderMap>,
        previous: Option<&Previous>,
        policy: &Policy,
    ) -> LoadResult {
        let (part, body) = match self.storing.as_ref().and_then(|storing| storing.part) {
            None => (None, body),
            Some(part) => match part.with_content(body.len() as u64, policy.http.letter) {
                Some(part) => match self.joined(part, &body, previous, policy.max_body) {
                    Some(joined) => {
                        // They are of one message, and what is joined is the content of none.
                        trailers = None;
                        joined
                    }
                    // A part takes the whole from nobody: anyone may ask for one byte of it.
                    None if previous.is_some_and(|stored| self.leaves(stored)) => {
                        return LoadResult::Aside;
                    }
                    None => self.placed(part, body),
                },
                // Its content is not what its head says.
                None => return LoadResult::Aside,
            },
        };
        if part.is_some()
            && let Some(storing) = &mut self.storing
        {
            // It stands in for no failure: who wants the whole, or more than it has, is told what happened.
            storing.terms.stale.if_error = Duration::ZERO;
            storing.terms.stale.on_disconnect = Duration::ZERO;
        }
        let chosen = self.chosen.take();
        let kept = Kept { part, ..self.kept(chosen) };
        let stored = StoredResponse::new(&self.head, self.now, body, trailers);
        let Some(payload) = stored.encode(&kept) else {
            return LoadResult::Uncacheable { mark: Mark::IfUnserved };
        };
        // A failure is not stored, so what travels to other processes is all that they get. Without
        // it each of their waiters would ask the origin that has just failed.
        let too_long = payload.len() > LONGEST_FAILURE && is_failure(stored.status);
        let brief = if too_long { status_of(&stored).encode(&kept) } else { None };
        let lifetimes =
            self.storing.as_ref().map_or_else(Lifetimes::default, |storing| lifetimes(storing, &kept));
        let (encoding, validator, tags) = (Encoding::HTTP, Bytes::new(), Vec::new());
        LoadResult::Value { encoding, payload, lifetimes, validator, tags, brief }
    }

    /// With what is stored already, if both are of one representation (RFC 9111, 3.4). A date of change
    /// is one for all variants, so it tells nothing about parts of two of them. Where they are longer together than what
    /// is stored may be, the new one is kept alone.
    fn joined(
        &mut self,
        part: Part,
        body: &Bytes,
        previous: Option<&Previous>,
        most: usize,
    ) -> Option<(Option<Part>, Bytes)> {
        let previous = previous.filter(|previous| {
            variant(&previous.kept.chosen) == variant(&self.chosen)
                && is_same_representation(&previous.response.headers, &self.head.headers, self.now)
        })?;
        let (all, content) = join((previous.part()?, &previous.response.body), (part, body))?;
        if content.len() > most {
            return None;
        }
        // Of a part an origin may tell no more than what has changed.
        self.head.headers = freshened(&previous.response.headers, &self.head.headers);
        remove_content_digests(&mut self.head.headers);
        for name in self.storing.iter().flat_map(|storing| &storing.left_out) {
            self.head.headers.remove(name);
        }
        Some(self.placed(all, content.into()))
    }

    /// Whether a stored whole is of use beside this part of it: others are served it, or it can be asked about. Not once it
    /// is known to be of something else; the parts of that may be had then.
    fn leaves(&self, stored: &Previous) -> bool {
        let headers = &stored.response.headers;
        let can_be_asked_about =
            || has_validator(headers, self.now) && is_about(&self.head.headers, headers, self.now);
        stored.kept.part.is_none() && (stored.is_served || can_be_asked_about())
    }

    /// With a head that says which part it is, or that it is the whole.
    fn placed(&mut self, part: Part, body: Bytes) -> (Option<Part>, Bytes) {
        part.write(&mut self.head.headers);
        if !part.is_whole() {
            return (Some(part), body);
        }
        self.head.status = StatusCode::OK;
        self.head.headers.remove(CONTENT_RANGE);
        (None, body)
    }
}

/// What tells a variant from the others, whatever else is known of them.
fn variant(chosen: &Option<Box<Chosen>>) -> Option<(&Names, Fingerprint)> {
    chosen.as_ref().map(|chosen| (&chosen.names, chosen.variant.fingerprint))
}

/// How long a response may be served, and kept. What it is too old for on arrival is taken off its windows.
fn lifetimes(storing: &Storing, kept: &Kept) -> Lifetimes {
    let terms = &storing.terms;
    let kept_on = storing.keep_for.saturating_sub(storing.fresh_for());
    if terms.revalidate_always {
        return Lifetimes { keep_for: storing.keep_for, ..Lifetimes::default() };
    }
    let fresh_for = terms.lifetime.saturating_sub(kept.age);
    let too_old = kept.age.saturating_sub(terms.lifetime);
    let error = terms.stale.if_error.max(terms.stale.on_disconnect);
    Lifetimes {
        fresh_for,
        stale_while_revalidate: terms.stale.while_revalidate.saturating_sub(too_old),
        stale_if_error: error.saturating_sub(too_old),
        // Where one variant is, others are found: they may have come just before it ends.
        keep_for: if kept.chosen.is_some() { kept_on.max(fresh_for) } else { kept_on },
    }
}

fn clone_head(head: &Parts, storing: &Storing) -> Parts {
    let mut headers = head.headers.clone();
    for name in &storing.left_out {
        headers.remove(name);
    }
    head_of(head.status, head.version, headers)
}

/// The parts that are stored; extensions are the client's.
pub(crate) fn head_of(status: StatusCode, version: Version, headers: HeaderMap) -> Parts {
    let mut parts = Response::new(()).into_parts().0;
    parts.status = status;
    parts.version = version;
    parts.headers = headers;
    parts
}

/// What is left of a failure that is too long to travel.
fn status_of(stored: &StoredResponse) -> StoredResponse {
    let mut headers = HeaderMap::new();
    for name in [DATE, RETRY_AFTER] {
        if let Some(value) = stored.headers.get(&name) {
            headers.insert(name, value.clone());
        }
    }
    StoredResponse { headers, body: Bytes::new(), trailers: None, ..*stored }
}
