//! [`GuardedBody`], the body of every response that leaves the guard.
//!
//! A body is stored (whole, in memory), streaming (the load task passes it on while it also stores it), incoming
//! (another request loads it) or passed (the inner service's own). All have one type, so that a `Router` or a client
//! sees the same service with and without a hit.
//!
//! [`SharedBody`] is an incoming response for waiters of this process: they read the received pieces from its
//! [`ChunkBuffer`] while the load continues.

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "in a test the panic is the report")]
#[path = "../../tests/unit/http/body_tests.rs"]
mod tests;

use std::fmt;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Waker, ready};

use bytes::Bytes;
use http::HeaderMap;
use http::response::Parts;
use http_body::{Body, Frame, SizeHint};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::time::Instant;

use super::inner_body::{BoxError, UpstreamBody};
use super::stored::{ResponseMeta, are_sound_trailers};
use crate::sync::lock;

/// The body of a response from the guard's HTTP service.
///
/// Holds a stored body, a stream that is being stored while it is sent, or the inner service's body as it is. Its
/// frames are `Bytes`; stored ones are shared, not copied. It is `Unpin`, `Send` and `Sync`, whatever the inner body is. Its
/// error is boxed, as axum and hyper use it: the inner body's own error, unchanged, or one that says that the load
/// was cut off.
///
/// # Examples
///
/// ```
/// use http_body::Body;
/// use stampede_guard::http::GuardedBody;
///
/// let empty = GuardedBody::default();
/// assert!(empty.is_end_stream());
/// ```
#[derive(Default)]
pub struct GuardedBody {
    state: BodyState,
}

enum BodyState {
    /// The whole body, or its unread rest.
    Stored { body: Bytes, trailers: Option<Box<HeaderMap>> },
    /// Pieces from the load task of this request, and the size of the rest.
    Streaming { pieces: UnboundedReceiver<StreamPiece>, left: SizeHint },
    /// A body that another request loads, from piece number `next` on; `index` is this reader's place among the wakers, `left` the number
    /// of bytes that follow.
    Incoming { chunks: Arc<ChunkBuffer>, next: usize, index: Option<usize>, left: u64 },
    /// The inner service's body, behind a lock, so that this type is `Sync` even if the inner body is not.
    Passed(Mutex<UpstreamBody>),
}

/// A message of the load task to the client of its own request.
enum StreamPiece {
    Data(Bytes),
    /// The rest: the end of a complete body, or the inner body, which the client then polls itself.
    Rest(BodyState),
    Failed(BoxError),
}

/// The load task's side of a streaming body. If it is dropped before the body's end was sent, the client gets an error.
pub(crate) struct StreamSender {
    pieces: UnboundedSender<StreamPiece>,
    /// The copy of the body that waiters of this process read, if they may.
    chunks: Option<Arc<ChunkBuffer>>,
}

/// Ends the body of other readers with an error if the load task ended before the body did.
impl Drop for StreamSender {
    fn drop(&mut self) {
        if let Some(chunks) = &self.chunks {
            chunks.broken(&CutOff.to_string());
        }
    }
}

impl StreamSender {
    /// Whether other requests read the body: its buffer has more owners than this sender and the announced `SharedBody`.
    pub(crate) fn is_read_along(&self) -> bool {
        self.chunks.as_ref().is_some_and(|chunks| Arc::strong_count(chunks) > 2)
    }

    /// Whether the body has no readers, and no later reader can come.
    pub(crate) fn is_left(&self) -> bool {
        self.pieces.is_closed() && self.chunks.as_ref().is_none_or(|chunks| Arc::strong_count(chunks) == 1)
    }

    /// Sends a piece. Like the other methods, ignores that a client has left: that does not stop a load.
    pub(crate) fn data(&self, data: Bytes) {
        if !data.is_empty() {
            if let Some(chunks) = &self.chunks {
                chunks.data(data.clone());
            }
            let _ = self.pieces.send(StreamPiece::Data(data));
        }
    }

    /// Ends the body, with the bytes that were withheld.
    pub(crate) fn last(self, body: Bytes, trailers: Option<Box<HeaderMap>>) {
        if let Some(chunks) = &self.chunks {
            chunks.last(body.clone(), trailers.clone());
        }
        let _ = self.pieces.send(StreamPiece::Rest(BodyState::Stored { body, trailers }));
    }

    /// Hands the rest of the inner body over to the client. Drops it if the client has left.
    pub(super) fn rest(self, body: UpstreamBody) {
        let _ = self.pieces.send(StreamPiece::Rest(BodyState::Passed(Mutex::new(body))));
    }

    /// Ends the body with an error.
    pub(crate) fn fail(self, error: BoxError) {
        if let Some(chunks) = &self.chunks {
            chunks.broken(&error.to_string());
        }
        let _ = self.pieces.send(StreamPiece::Failed(error));
    }
}

impl GuardedBody {
    /// A whole body.
    pub(crate) fn stored(body: Bytes, trailers: Option<Box<HeaderMap>>) -> Self {
        Self { state: BodyState::Stored { body, trailers } }
    }

    /// The inner service's body, untouched.
    pub(super) fn passed(body: UpstreamBody) -> Self {
        Self { state: BodyState::Passed(Mutex::new(body)) }
    }

    /// A body that a load task sends; `size` is the inner body's hint. Other requests read the same body from `chunks`.
    ///
    /// The channel may be unbounded: the load task's buffer has the same content and is bounded, and beyond that bound
    /// the client polls the inner body itself.
    pub(crate) fn streaming(size: SizeHint, chunks: Option<Arc<ChunkBuffer>>) -> (StreamSender, Self) {
        let (sender, pieces) = unbounded_channel();
        (StreamSender { pieces: sender, chunks }, Self { state: BodyState::Streaming { pieces, left: size } })
    }

    /// A body of this length that another request loads.
    pub(crate) fn incoming(chunks: Arc<ChunkBuffer>, length: u64) -> Self {
        Self { state: BodyState::Incoming { chunks, next: 0, index: None, left: length } }
    }
}

impl Default for BodyState {
    fn default() -> Self {
        Self::Stored { body: Bytes::new(), trailers: None }
    }
}

impl From<Bytes> for GuardedBody {
    fn from(body: Bytes) -> Self {
        Self::stored(body, None)
    }
}

impl fmt::Debug for GuardedBody {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Never print the content, which may be confidential.
        match &self.state {
            BodyState::Stored { body, trailers } => f
                .debug_struct("Stored")
                .field("bytes", &body.len())
                .field("trailers", &trailers.as_ref().map_or(0, |trailers| trailers.len()))
                .finish(),
            BodyState::Streaming { left, .. } => f.debug_struct("Streaming").field("left", left).finish(),
            BodyState::Incoming { left, .. } => f.debug_struct("Arriving").field("left", left).finish(),
            BodyState::Passed(_) => f.debug_struct("Passed").finish_non_exhaustive(),
        }
    }
}

impl Body for GuardedBody {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        loop {
            let next_state = match &mut self.state {
                BodyState::Stored { body, .. } if !body.is_empty() => {
                    return Poll::Ready(Some(Ok(Frame::data(std::mem::take(body)))));
                }
                BodyState::Stored { trailers, .. } => {
                    return Poll::Ready(trailers.take().map(|trailers| Ok(Frame::trailers(*trailers))));
                }
                BodyState::Passed(body) => {
                    let body = body.get_mut().unwrap_or_else(PoisonError::into_inner);
                    return body.as_mut().poll_bytes(cx);
                }
                BodyState::Incoming { chunks, next, index, left } => {
                    match ready!(chunks.poll_piece(*next, index, cx)) {
                        Ok(data) => {
                            *next += 1;
                            *left = left.saturating_sub(data.len() as u64);
                            return Poll::Ready(Some(Ok(Frame::data(data))));
                        }
                        Err(Ok(trailers)) => Ok(BodyState::Stored { body: Bytes::new(), trailers }),
                        Err(Err(text)) => Err((*text).into()),
                    }
                }
                BodyState::Streaming { pieces, left } => match ready!(pieces.poll_recv(cx)) {
                    Some(StreamPiece::Data(data)) => {
                        *left = less(left, data.len() as u64);
                        return Poll::Ready(Some(Ok(Frame::data(data))));
                    }
                    Some(StreamPiece::Rest(rest)) => Ok(rest),
                    Some(StreamPiece::Failed(error)) => Err(error),
                    // The load task has ended: cancelled, panicked, or its runtime shut down. The client has received
                    // a part, and only an error prevents it from treating the part as the whole (RFC 9112, 8: an
                    // incomplete message is not to be cached or used as complete).
                    None => Err(Box::new(CutOff) as BoxError),
                },
            };
            match next_state {
                Ok(state) => self.state = state,
                Err(error) => {
                    self.state = BodyState::default();
                    return Poll::Ready(Some(Err(error)));
                }
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.state {
            BodyState::Stored { body, trailers } => body.is_empty() && trailers.is_none(),
            // Even the end of an empty body is a separate event: it waits for the commit.
            BodyState::Streaming { .. } | BodyState::Incoming { .. } => false,
            BodyState::Passed(body) => lock(body).has_ended(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.state {
            // An exact size makes an HTTP/1 server frame by length, and that drops trailers
            // (RFC 9112, 6.5: they need chunks).
            BodyState::Stored { body, trailers: Some(_) } => {
                let mut size = SizeHint::new();
                size.set_lower(body.len() as u64);
                size
            }
            BodyState::Stored { body, trailers: None } => SizeHint::with_exact(body.len() as u64),
            BodyState::Streaming { left, .. } => less(left, 0),
            BodyState::Incoming { left, .. } => SizeHint::with_exact(*left),
            BodyState::Passed(body) => lock(body).size(),
        }
    }
}

fn less(size: &SizeHint, sent: u64) -> SizeHint {
    let mut left = SizeHint::new();
    left.set_lower(size.lower().saturating_sub(sent));
    if let Some(upper) = size.upper() {
        left.set_upper(upper.saturating_sub(sent));
    }
    left
}

/// The error of a body whose load ended before the body did.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CutOff;

impl fmt::Display for CutOff {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the load was cut off before the end of the body")
    }
}

impl std::error::Error for CutOff {}

/// A response that is still being received: its head, and the received part of its body.
#[derive(Debug)]
pub(crate) struct SharedBody {
    /// The head as it is stored.
    pub(crate) head: Parts,
    pub(crate) meta: ResponseMeta,
    /// For how many seconds the response will be fresh from its head on, if it will be stored.
    pub(crate) ttl: Option<u64>,
    /// When the head was received.
    pub(crate) came: Instant,
    /// The length of the complete body.
    pub(crate) length: u64,
    pub(crate) body: Arc<ChunkBuffer>,
}

/// A body for many readers, each at its own pace. Received pieces stay in memory until the last reader is dropped;
/// they are not longer than the copy that will be stored.
#[derive(Debug, Default)]
pub(crate) struct ChunkBuffer {
    state: Mutex<BufferState>,
}

#[derive(Debug, Default)]
struct BufferState {
    chunks: Vec<Bytes>,
    end: Option<BufferEnd>,
    /// One slot for each reader that has waited.
    wakers: Vec<Option<Waker>>,
}

/// The trailers of a whole body, or the text of the error: the error itself goes to the load's own client.
type BufferEnd = Result<Option<Box<HeaderMap>>, Arc<str>>;

impl ChunkBuffer {
    fn data(&self, data: Bytes) {
        self.notify(|state| state.chunks.push(data));
    }

    /// Omits trailers that must not be stored, such as a client's cookie: other readers must not see them.
    fn last(&self, data: Bytes, trailers: Option<Box<HeaderMap>>) {
        let trailers = trailers.filter(|trailers| are_sound_trailers(trailers));
        self.notify(|state| {
            if !data.is_empty() {
                state.chunks.push(data);
            }
            state.end.get_or_insert(Ok(trailers));
        });
    }

    /// Ends the body with an error, unless it has ended.
    fn broken(&self, text: &str) {
        self.notify(|state| {
            state.end.get_or_insert_with(|| Err(text.into()));
        });
    }

    fn notify(&self, change: impl FnOnce(&mut BufferState)) {
        let readers: Vec<_> = {
            let mut state = lock(&self.state);
            change(&mut state);
            state.wakers.iter_mut().filter_map(Option::take).collect()
        };
        readers.into_iter().for_each(Waker::wake);
    }

    /// The piece with this number, or the end. A reader that must wait gets an index into the wakers, and passes it to the next call.
    fn poll_piece(
        &self,
        number: usize,
        index: &mut Option<usize>,
        cx: &mut Context<'_>,
    ) -> Poll<Result<Bytes, BufferEnd>> {
        let mut state = lock(&self.state);
        if let Some(chunk) = state.chunks.get(number) {
            return Poll::Ready(Ok(chunk.clone()));
        }
        match state.end.clone() {
            Some(end) => Poll::Ready(Err(end)),
            None => {
                let index = *index.get_or_insert(state.wakers.len());
                let waker = Some(cx.waker().clone());
                match state.wakers.get_mut(index) {
                    Some(own) => *own = waker,
                    None => state.wakers.push(waker),
                }
                Poll::Pending
            }
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "in a test the panic is the report")]
mod shared_body_tests {
    use http_body_util::BodyExt as _;

    use super::*;
    use crate::http::GuardedBody;

    fn reader(chunks: &Arc<ChunkBuffer>, length: u64) -> GuardedBody {
        GuardedBody::incoming(Arc::clone(chunks), length)
    }

    #[tokio::test]
    async fn every_reader_gets_the_whole_body_whenever_it_starts() {
        use http_body::Body as _;
        let chunks = Arc::new(ChunkBuffer::default());
        let early = tokio::spawn(reader(&chunks, 6).collect());
        tokio::task::yield_now().await;
        chunks.data(Bytes::from_static(b"abc"));
        let mut late = reader(&chunks, 6);
        assert_eq!(late.size_hint().exact(), Some(6));
        assert_eq!(late.frame().await.unwrap().unwrap().into_data().unwrap(), "abc");
        assert_eq!(late.size_hint().exact(), Some(3));
        chunks.last(Bytes::from_static(b"def"), None);
        chunks.broken("too late to matter");
        assert_eq!(late.collect().await.unwrap().to_bytes(), "def");
        assert_eq!(early.await.unwrap().unwrap().to_bytes(), "abcdef");
        assert_eq!(reader(&chunks, 6).collect().await.unwrap().to_bytes(), "abcdef");
    }

    #[tokio::test]
    async fn a_body_that_breaks_is_an_error_to_every_reader() {
        let chunks = Arc::new(ChunkBuffer::default());
        chunks.data(Bytes::from_static(b"abc"));
        chunks.broken("disconnected");
        for _ in 0..2 {
            let mut body = reader(&chunks, 6);
            assert!(body.frame().await.unwrap().is_ok());
            assert_eq!(body.frame().await.unwrap().unwrap_err().to_string(), "disconnected");
            assert!(body.frame().await.is_none(), "once");
        }
    }

    #[tokio::test]
    async fn trailers_with_a_cookie_reach_no_other_reader() {
        let chunks = Arc::new(ChunkBuffer::default());
        let trailers = HeaderMap::from_iter([(http::header::SET_COOKIE, "id=1".parse().unwrap())]);
        chunks.last(Bytes::new(), Some(Box::new(trailers)));
        assert_eq!(reader(&chunks, 0).collect().await.unwrap().trailers(), None);
    }

    #[tokio::test]
    async fn trailers_reach_every_reader() {
        let chunks = Arc::new(ChunkBuffer::default());
        let trailers = HeaderMap::from_iter([(http::header::ETAG, "\"a\"".parse().unwrap())]);
        chunks.last(Bytes::new(), Some(Box::new(trailers.clone())));
        for _ in 0..2 {
            assert_eq!(reader(&chunks, 0).collect().await.unwrap().trailers(), Some(&trailers));
        }
    }
}
