//! QUERY (RFC 10008): reads the content of such a request, without which it has no key, and then answers it as a GET.
//!
//! # Invariants
//!
//! 1. A stored response answers a QUERY only if it is that of a QUERY with the same URI, content, and fields that describe the content.
//! 2. The inner service gets the bytes, trailers and error of the body in their order, however the reading ends, and as often as it is
//!    called.
//! 3. The reading ends: at the limit for the content, after [`CONTENT_TIMEOUT`], or with the body. The guard holds at most the limit and one
//!    frame.
//! 4. What invalidates the GET of a resource invalidates all of its QUERYs: their keys have the tag of `Key::of_reports`.
//! 5. A request with another method, and any request without the setting, is not read.

use std::future::poll_fn;
use std::sync::LazyLock;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::header::EXPECT;
use http_body::Frame;
use tokio::task::consume_budget;
use tokio::time::timeout;

use super::commit::ClientAnswer;
use super::exchange::{Exchange, Forward};
use super::inner_body::{BoxError, RequestBody, ResumedBody, UpstreamBody};
use super::upstream::{BoxFuture, RequestHead, Upstream, UpstreamError, UpstreamRequest, UpstreamResponse};
use crate::guard::{Current, StampedeGuard};
use crate::http_rules::Rule;
use crate::http_rules::query_method::{announced_length, consider_query, content_fingerprint, is_query};
use crate::key::Key;
use crate::observe::{LogEveryMinute, log};

/// For how long the guard waits for the content of a QUERY. The inner service, which has its own limits, gets what comes later.
const CONTENT_TIMEOUT: Duration = Duration::from_secs(1);

/// The limit on warnings about types of bodies: one for all guards of the process, because each request has the same type.
static WARNED: LazyLock<LogEveryMinute> = LazyLock::new(LogEveryMinute::default);

impl UpstreamRequest {
    /// Whether this is a QUERY that the guard looks up. In shadow mode the guard must not delay the request by reading its content.
    pub(super) fn is_query(&self, guard: &StampedeGuard) -> bool {
        let policy = guard.parts().1;
        policy.http.query_method && is_query(self.head.method()) && !policy.shadow
    }

    /// Answers a QUERY.
    pub(super) async fn query(mut self, guard: StampedeGuard) -> ClientAnswer {
        let (state, policy) = guard.parts();
        let join = |head: &str, parts: &[&str]| Key::from_texts(&state.namespace, head, parts);
        let content = match consider_query(&self.head, &policy.http.requests, join) {
            Ok(considered) if state.is_bypassed() => Err(Forward::SwitchedOff(considered.key)),
            Ok(_) => self.read_content(policy.http.query_content_limit).await.map_err(Forward::Forbidden),
            Err(rule) => Err(Forward::Forbidden(rule)),
        };
        match content {
            Ok(content) => {
                let fingerprint = content_fingerprint(self.head.headers(), &content);
                let Self { upstream, mut head } = self;
                let guard = Current::Owned(guard);
                let exchange = Exchange::begin(&mut head, false, Some(&fingerprint), guard, false);
                exchange.answer(head, move || Box::new(WithContent { upstream, content })).await
            }
            Err(why) => self.forward(guard, why).await,
        }
    }

    /// Reads the content, and gives the request a body with the same. Otherwise the rule that forbids to look the request up.
    async fn read_content(&mut self, limit: usize) -> Result<Bytes, Rule> {
        let announced = announced_length(self.head.headers())?;
        if announced.is_some_and(|length| length > limit as u64) {
            return Err(Rule::ContentTooLong);
        }
        let Some(body) = self.upstream.take_body() else {
            warn_of_type();
            return Err(Rule::BodyType);
        };
        let mut reading = ContentReader { body, content: BytesMut::new(), last: None };
        let end = timeout(CONTENT_TIMEOUT, reading.read(limit)).await.unwrap_or(Err(Rule::ContentSlow));
        let ContentReader { body, content, last } = reading;
        let content = content.freeze();
        if let Err(rule) = end {
            self.upstream.put_body(RequestBody::Resumed(ResumedBody::new(content, last, body)));
            return Err(rule);
        }
        self.upstream.put_body(RequestBody::Whole(content.clone()));
        if announced.is_some_and(|length| length != content.len() as u64) {
            return Err(Rule::ContentLength);
        }
        // It is fulfilled, and not in the key.
        self.head.headers_mut().remove(EXPECT);
        Ok(content)
    }
}

/// An inner service, and the content of the request's body, so that copies of the request have it.
struct WithContent {
    upstream: Box<dyn Upstream>,
    content: Bytes,
}

impl Upstream for WithContent {
    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), UpstreamError>> {
        self.upstream.poll_ready(cx)
    }

    fn call(self: Box<Self>, head: RequestHead) -> BoxFuture<UpstreamResponse> {
        self.upstream.call(head)
    }

    fn copy(&self, content: Option<Bytes>) -> Option<Box<dyn Upstream>> {
        let content = content.unwrap_or_else(|| self.content.clone());
        let upstream = self.upstream.copy(Some(content.clone()))?;
        Some(Box::new(Self { upstream, content }))
    }

    fn take_body(&mut self) -> Option<UpstreamBody> {
        self.upstream.take_body()
    }

    fn put_body(&mut self, body: RequestBody) {
        self.upstream.put_body(body);
    }
}

/// A body, and what was read of it.
struct ContentReader {
    body: UpstreamBody,
    content: BytesMut,
    /// The frame, or the error, that is no part of the content.
    last: Option<Result<Frame<Bytes>, BoxError>>,
}

impl ContentReader {
    /// Reads the body to its end; otherwise the rule by which it was not. If the future is dropped, nothing that was read is lost.
    async fn read(&mut self, limit: usize) -> Result<(), Rule> {
        if self.body.size().lower() > limit as u64 {
            return Err(Rule::ContentTooLong);
        }
        loop {
            // A body that always has a frame ready must not keep the task from the time limit.
            consume_budget().await;
            let Some(frame) = poll_fn(|cx| self.body.as_mut().poll_bytes(cx)).await else { return Ok(()) };
            let rule = match frame.as_ref().map(Frame::data_ref) {
                Ok(Some(data)) if data.len() <= limit - self.content.len() => {
                    self.content.extend_from_slice(data);
                    continue;
                }
                Ok(Some(_)) => Rule::ContentTooLong,
                Ok(None) => Rule::ContentTrailers,
                Err(_) => Rule::ContentBroken,
            };
            self.last = Some(frame);
            return Err(rule);
        }
    }
}

/// Warns that the guard cannot make request bodies of the type of this service, so it looks up none of its QUERYs.
fn warn_of_type() {
    if WARNED.is_due() {
        tracing::warn!(
            target: log::HTTP,
            "a QUERY passes the cache by, because its body is neither axum's (feature `axum`) nor reqwest's (feature `reqwest`): turn the \
             feature on, or convert the body outside of the guard"
        );
    }
}
