//! The rules in combination: a cache in one file, without a clock, tower or coalescing, which runs the public conformance suite for shared
//! caches. Its steps follow RFC 9111, section 4.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use http::header::{self, HeaderMap, HeaderName, HeaderValue};
use http::{Method, Request, StatusCode};
use http_body::Body as _;
use http_body::SizeHint;
use http_body_util::Full;

use crate::http_rules::cache_terms::CacheTerms;
use crate::http_rules::conditional::{ByteRange, Part, RangeAnswer, if_range_holds, range_answer};
use crate::http_rules::conditional::{add_conditions, freshened, is_about, is_not_modified, not_modified};
use crate::http_rules::fields::storable;
use crate::http_rules::freshness::{LoadFailure, Reuse, instead_of, reuse};

use crate::http_rules::request::{
    ChangedResources, ConsideredRequest, RequestDemands, consider, consider_post,
};
use crate::http_rules::response::{RequestResponse, StoreDecision, Verdict, classify};
use crate::http_rules::settings::{HttpPolicy, ResponseRules};
use crate::http_rules::vary::Normalization;
use crate::http_rules::vary::{Names, Variant, Vary};
use crate::key::CacheKey;

#[path = "walkthrough_scripts.rs"]
mod scripts;

type Response = (u16, HeaderMap, Vec<u8>);

struct Entry {
    status: u16,
    headers: HeaderMap,
    content: Vec<u8>,
    /// The position of the content in the whole, if the response has only a part of it.
    part: Option<Part>,
    storing: StoreDecision,
    received: SystemTime,
}

/// All variants of one resource.
#[derive(Default)]
struct Resource {
    names: Option<Names>,
    variants: Vec<Variant>,
    entries: Vec<Entry>,
}

struct Cache {
    rules: ResponseRules,
    now: SystemTime,
    resources: HashMap<CacheKey, Resource>,
}

/// The origin's answer to a request; `None` if the connection breaks.
type Origin<'a> = &'a mut dyn FnMut(&Method, &HeaderMap) -> Option<Response>;

impl Cache {
    fn new(policy: HttpPolicy) -> Self {
        let minute = Duration::from_secs(60);
        let http = Arc::new(policy);
        let rules = ResponseRules { http, fresh_for: minute, negative_for: minute, max_body: 1 << 20 };
        Self { rules, now: UNIX_EPOCH + Duration::from_secs(1_795_262_400), resources: HashMap::new() }
    }

    fn normal(&self) -> Normalization {
        if self.rules.http.strict_rfc { Normalization::Exact } else { Normalization::Careful }
    }

    fn ask(&mut self, request: &Request<Full<Bytes>>, origin: Origin<'_>) -> Response {
        let broken = || (502, HeaderMap::new(), Vec::new());
        let has_body = !request.body().is_end_stream();
        let Ok(considered) = consider(request, has_body, &self.rules.http.requests, CacheKey::from_texts)
        else {
            let invalidation = ChangedResources::of(request, &self.rules.http.requests);
            let Some(response) = origin(request.method(), request.headers()) else { return broken() };
            let status = StatusCode::from_u16(response.0).unwrap();
            for key in invalidation.iter().flat_map(|all| all.keys(status, &response.1)) {
                self.resources.remove(&key);
            }
            if let Ok((considered, uri)) = consider_post(request, &self.rules.http.requests) {
                let verdict = self.classify(request, Some(&uri), &considered.demands, &response);
                self.store(considered.key, request, verdict, &response);
            }
            return response;
        };
        let found = self.find(&considered.key, request.headers());
        let Some(at) = found else {
            if considered.demands.directives.only_if_cached {
                return (504, HeaderMap::new(), Vec::new());
            }
            let Some(response) = origin(request.method(), request.headers()) else { return broken() };
            return self.received(considered, request, response);
        };
        let entry = &self.resources[&considered.key].entries[at];
        let age = entry.storing.initial_age + self.now.duration_since(entry.received).unwrap();
        let part = Self::part(entry, request.headers(), self.now);
        let usable = entry.part.is_none() || part.is_some();
        match reuse(&considered.demands, &entry.storing.terms, age, &self.rules.http) {
            _ if !usable => {}
            Reuse::Fresh | Reuse::Stale => return self.serve(entry, request.headers(), age),
            Reuse::StaleWhileRevalidate => {
                let served = self.serve(entry, request.headers(), age);
                self.validate(considered, at, request, origin, age);
                return served;
            }
            Reuse::OnlyIfCached => return (504, HeaderMap::new(), Vec::new()),
            Reuse::Revalidate | Reuse::NotForThis => {}
        }
        self.validate(considered, at, request, origin, age).unwrap_or_else(broken)
    }

    fn find(&self, key: &CacheKey, request: &HeaderMap) -> Option<usize> {
        let resource = self.resources.get(key)?;
        match &resource.names {
            None => (!resource.entries.is_empty()).then_some(0),
            Some(names) => Variant::select(names, request, &resource.variants, self.normal()),
        }
    }

    /// The part of the stored content that the request asks for; `None` for the whole.
    fn part(entry: &Entry, request: &HeaderMap, now: SystemTime) -> Option<Part> {
        let range = ByteRange::of(request).filter(|_| if_range_holds(request, &entry.headers, now))?;
        match entry.part {
            Some(stored) => range.of_part(stored),
            None if entry.status == 200 => {
                match range_answer(request, &entry.headers, entry.content.len() as u64, now) {
                    RangeAnswer::Part(part) => Some(part),
                    _ => None,
                }
            }
            None => None,
        }
    }

    fn serve(&self, entry: &Entry, request: &HeaderMap, age: Duration) -> Response {
        let mut headers = entry.headers.clone();
        headers.insert(header::AGE, HeaderValue::from(age.as_secs()));
        let status = StatusCode::from_u16(entry.status).unwrap();
        if is_not_modified(request, status, &entry.headers, entry.received, self.now) {
            return (304, not_modified(&headers), Vec::new());
        }
        if let Some(part) = Self::part(entry, request, self.now) {
            part.write(&mut headers);
            let within = part.within(entry.part.map_or(0, |stored| stored.first)).unwrap();
            return (206, headers, entry.content[within].to_vec());
        }
        (entry.status, headers, entry.content.clone())
    }

    /// Validates the stored response with the origin.
    fn validate(
        &mut self,
        considered: ConsideredRequest,
        at: usize,
        request: &Request<Full<Bytes>>,
        origin: Origin<'_>,
        age: Duration,
    ) -> Option<Response> {
        let entry = &self.resources[&considered.key].entries[at];
        let mut conditional = request.headers().clone();
        if entry.part.is_none() {
            add_conditions(&mut conditional, &entry.headers);
        }
        let answer = origin(request.method(), &conditional);
        let failed =
            answer.as_ref().map_or(LoadFailure::Disconnected, |answer| LoadFailure::Status(answer.0));
        if instead_of(failed, &considered.demands, &entry.storing.terms, age, &self.rules.http) {
            return Some(self.serve(entry, request.headers(), age));
        }
        let answer = answer?;
        if answer.0 == 304 && is_about(&answer.1, &entry.headers, self.now) {
            let merged = freshened(&entry.headers, &answer.1);
            let updated = (entry.status, merged, entry.content.clone());
            return Some(self.received(considered, request, updated));
        }
        Some(self.received(considered, request, answer))
    }

    /// Stores a response if the rules allow it, and returns it to the client whose request it answers.
    fn received(
        &mut self,
        considered: ConsideredRequest,
        request: &Request<Full<Bytes>>,
        response: Response,
    ) -> Response {
        let verdict = self.classify(request, None, &considered.demands, &response);
        let key = considered.key;
        let is_whole = response.0 == 200;
        if !self.store(key.clone(), request, verdict, &response) || !is_whole {
            return response;
        }
        // The stored response answers the conditions and the range of the client that requested it, too.
        let at = self.find(&key, request.headers()).unwrap();
        let mut own = self.serve(&self.resources[&key].entries[at], request.headers(), Duration::ZERO);
        own.1.remove(header::AGE);
        own
    }

    fn classify(
        &self,
        request: &Request<Full<Bytes>>,
        target: Option<&http::Uri>,
        demands: &RequestDemands,
        response: &Response,
    ) -> Verdict {
        let exchange = RequestResponse {
            method: request.method(),
            target,
            demands,
            request_headers: request.headers(),
            status: StatusCode::from_u16(response.0).unwrap(),
            headers: &response.1,
            body: SizeHint::default(),
            do_not_store: false,
            terms: CacheTerms::default(),
            delay: Duration::ZERO,
            now: self.now,
        };
        classify(&exchange, &self.rules)
    }

    fn store(
        &mut self,
        key: CacheKey,
        request: &Request<Full<Bytes>>,
        verdict: Verdict,
        (status, headers, content): &Response,
    ) -> bool {
        let Verdict::Store(storing) = verdict else { return false };
        let length = content.len() as u64;
        let part = match storing.part.map(|part| part.with_content(length, self.rules.http.strict_rfc)) {
            Some(None) => return false,
            part => part.flatten(),
        };
        let fields = storable(headers).filter(|(name, _)| !storing.left_out.contains(name));
        let stored_headers = fields.fold(HeaderMap::new(), |mut stored_headers, (name, value)| {
            stored_headers.append(name.clone(), value.clone());
            stored_headers
        });
        let names = match &storing.vary {
            Vary::Names(names) => Some(names.clone()),
            _ => None,
        };
        let normal = self.normal();
        let resource = self.resources.entry(key).or_default();
        if resource.names != names {
            *resource = Resource { names: names.clone(), ..Resource::default() };
        }
        let entry = Entry {
            status: *status,
            headers: stored_headers,
            content: content.clone(),
            part,
            storing,
            received: self.now,
        };
        let Some(names) = names else {
            resource.entries = vec![entry];
            return true;
        };
        let variant = Variant::of(&names, request.headers(), headers, normal);
        match resource.variants.iter().position(|known| known.fingerprint == variant.fingerprint) {
            Some(at) => (resource.variants[at], resource.entries[at]) = (variant, entry),
            None => {
                resource.variants.push(variant);
                resource.entries.push(entry);
            }
        }
        true
    }
}

fn headers(fields: &[(&str, &str)]) -> HeaderMap {
    let mut headers = HeaderMap::new();
    for (name, value) in fields {
        headers.append(name.parse::<HeaderName>().unwrap(), HeaderValue::from_str(value).unwrap());
    }
    headers
}

fn request(method: &str, fields: &[(&str, &str)]) -> Request<Full<Bytes>> {
    let mut request = Request::builder().method(method).uri("http://h/a/b").body(Full::default()).unwrap();
    *request.headers_mut() = headers(fields);
    request
}
