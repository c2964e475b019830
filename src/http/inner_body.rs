//! The bodies of the application's types: how the guard reads them, and makes request bodies anew.
//!
//! A request body that was read can not be given to the inner service as it was, only another of its type: [`make_body`]. So the guard reads
//! the bodies of the types that it can make: those of axum and reqwest, with these features.

use std::any::Any;
use std::pin::Pin;
use std::sync::{Mutex, PoisonError};
use std::task::{Context, Poll};

use bytes::{Buf as _, Bytes};
use http_body::{Body, Frame, SizeHint};

#[cfg(feature = "reqwest")]
use super::reqwest_body;
use crate::sync::lock;

/// The error of a [`GuardedBody`](super::GuardedBody): the inner body's own, or that its load was cut off. A load that dies in the
/// middle of a body has no error of that body, and ending it without an error would present a part as the whole.
pub(super) type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// A body of the application, of which a part may be read already.
pub(super) type UpstreamBody = Pin<Box<dyn InnerBody>>;

/// A [`Body`] as the guard reads it: its frames are `Bytes`, copied only if the body's data has another type.
pub(super) trait InnerBody: Send {
    fn poll_bytes(self: Pin<&mut Self>, cx: &mut Context<'_>)
    -> Poll<Option<Result<Frame<Bytes>, BoxError>>>;
    /// As [`Body::is_end_stream`].
    fn has_ended(&self) -> bool;
    /// As [`Body::size_hint`].
    fn size(&self) -> SizeHint;
}

impl<B> InnerBody for B
where
    B: Body + Send,
    B::Error: Into<BoxError>,
{
    fn poll_bytes(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let to_bytes =
            |frame: Frame<B::Data>| frame.map_data(|mut data| data.copy_to_bytes(data.remaining()));
        self.poll_frame(cx).map(|frame| frame.map(|frame| frame.map(to_bytes).map_err(Into::into)))
    }

    fn has_ended(&self) -> bool {
        self.is_end_stream()
    }

    fn size(&self) -> SizeHint {
        self.size_hint()
    }
}

/// A request body in place of one that the guard has read.
pub(super) enum RequestBody {
    /// The content was read to its end.
    Whole(Bytes),
    Resumed(ResumedBody),
}

/// A body of which the guard has read a part: the same bytes, trailers and errors, in their order.
pub(super) struct ResumedBody {
    content: Bytes,
    /// What came after the content.
    last: Option<Result<Frame<Bytes>, BoxError>>,
    /// Behind a lock, so that this type is `Sync`, as bodies of reqwest are. Only its owner polls it.
    rest: Mutex<UpstreamBody>,
}

impl ResumedBody {
    pub(super) fn new(
        content: Bytes,
        last: Option<Result<Frame<Bytes>, BoxError>>,
        rest: UpstreamBody,
    ) -> Self {
        Self { content, last, rest: Mutex::new(rest) }
    }
}

impl Body for ResumedBody {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        if !self.content.is_empty() {
            return Poll::Ready(Some(Ok(Frame::data(std::mem::take(&mut self.content)))));
        }
        if let Some(last) = self.last.take() {
            return Poll::Ready(Some(last.map_err(unwrap_error)));
        }
        let rest = self.rest.get_mut().unwrap_or_else(PoisonError::into_inner);
        rest.as_mut().poll_bytes(cx).map_err(unwrap_error)
    }

    fn is_end_stream(&self) -> bool {
        self.content.is_empty() && self.last.is_none() && lock(&self.rest).has_ended()
    }

    fn size_hint(&self) -> SizeHint {
        let rest = lock(&self.rest).size();
        let (read, is_data) = match &self.last {
            None => (0, true),
            Some(Ok(frame)) => frame.data_ref().map_or((0, false), |data| (data.len(), true)),
            Some(Err(_)) => (0, false),
        };
        let read = (self.content.len() + read) as u64;
        let mut size = SizeHint::new();
        size.set_lower(read.saturating_add(rest.lower()));
        // A client of HTTP/1 that knows the exact length frames the body by it, and drops trailers.
        if let (Some(upper), true) = (rest.upper(), is_data) {
            size.set_upper(read.saturating_add(upper));
        }
        size
    }
}

/// An error without the type in which a body of axum wraps errors: the body that is made of this one wraps it again, and extractors of
/// axum look for its cause at a fixed depth.
#[cfg(feature = "axum")]
fn unwrap_error(error: BoxError) -> BoxError {
    error.downcast::<axum::Error>().map_or_else(|error| error, |error| error.into_inner())
}

#[cfg(not(feature = "axum"))]
fn unwrap_error(error: BoxError) -> BoxError {
    error
}

/// Makes a request body of the application's type; `None` if the guard can make none of that type.
#[cfg_attr(
    not(any(feature = "axum", feature = "reqwest")),
    allow(unused_variables, reason = "there is no such type")
)]
pub(super) fn make_body<Q: 'static>(body: RequestBody) -> Option<Q> {
    #[cfg(feature = "axum")]
    if is_of_type::<Q, axum::body::Body>() {
        return convert(match body {
            RequestBody::Whole(content) => axum::body::Body::from(content),
            RequestBody::Resumed(body) => axum::body::Body::new(body),
        });
    }
    #[cfg(feature = "reqwest")]
    if is_of_type::<Q, reqwest_body::Body>() {
        return convert(match body {
            RequestBody::Whole(content) => reqwest_body::Body::from(content),
            RequestBody::Resumed(body) => reqwest_body::Body::wrap(body),
        });
    }
    None
}

/// The body of a request, as the guard reads it; `None` unless the guard can make bodies of this type.
#[cfg_attr(
    not(any(feature = "axum", feature = "reqwest")),
    allow(unused_variables, reason = "there is no such type")
)]
pub(super) fn read_as_upstream<Q: 'static>(body: Q) -> Option<UpstreamBody> {
    #[cfg(feature = "axum")]
    if is_of_type::<Q, axum::body::Body>() {
        return convert::<_, axum::body::Body>(body).map(|body| Box::pin(body) as UpstreamBody);
    }
    #[cfg(feature = "reqwest")]
    if is_of_type::<Q, reqwest_body::Body>() {
        return convert::<_, reqwest_body::Body>(body).map(|body| Box::pin(body) as UpstreamBody);
    }
    None
}

/// An empty body for a request that had none.
#[cfg(feature = "axum")]
pub(super) fn empty<Q: 'static>() -> Option<Q> {
    convert(axum::body::Body::empty())
}

#[cfg(not(feature = "axum"))]
pub(super) fn empty<Q: 'static>() -> Option<Q> {
    None
}

#[cfg(any(feature = "axum", feature = "reqwest"))]
fn is_of_type<Q: 'static, B: 'static>() -> bool {
    std::any::TypeId::of::<Q>() == std::any::TypeId::of::<B>()
}

/// The value, if the type that was asked for is its own.
fn convert<A: 'static, B: 'static>(value: A) -> Option<B> {
    let value: Box<dyn Any> = Box::new(value);
    value.downcast().ok().map(|value| *value)
}

#[cfg(all(test, feature = "axum"))]
#[allow(clippy::unwrap_used, reason = "in a test the panic is the report")]
#[path = "../../tests/unit/http/inner_body_tests.rs"]
mod tests;
