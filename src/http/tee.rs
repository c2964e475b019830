//! [`tee`]: reads one body for two consumers, the waiting client and the buffer that will be stored.
//!
//! The load task runs it, and continues when the client leaves. The client receives everything without delay except the
//! end: a client that has a whole response may repeat its request at once, and that request must find the entry of this
//! load. So the end is withheld until the caller has committed and releases it. With a known length the end is the byte
//! that completes it. Otherwise it is the end of the body: only that event shows a client that the body is complete.

use std::future::{Future as _, poll_fn};
use std::pin::{Pin, pin};
use std::task::Poll;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::{HeaderMap, StatusCode};
use http_body::Frame;
use tokio::time::{Instant, Sleep, sleep_until, timeout};
use tracing::Instrument as _;

use super::body::StreamSender;
use super::inner_body::{BoxError, InnerBody, UpstreamBody};

/// The most chunks that are buffered. Each costs some 100 bytes beside its content, so a body of single bytes would
/// take a hundred times `max_body`.
const MOST_CHUNKS: usize = 64 * 1024;

/// Beyond [`MOST_CHUNKS`], chunks are joined to pieces of at least this size before they are passed on.
const LEAST_PIECE: usize = 4 * 1024;

/// How [`tee`] ended.
pub(super) enum Teed {
    /// The body is complete. The client waits for its end.
    Whole { body: Bytes, trailers: Option<HeaderMap>, finish: Finish },
    /// It exceeded the bound after `length` bytes. The client has those, and polls the rest itself: from here on it sets
    /// the pace of the inner service. If the client has left, the rest was dropped. (A body with other readers is within
    /// the bound, and continues for all of them.)
    TooBig { length: u64 },
    /// The body was not complete in time. As with `TooBig`, the client polls the rest itself.
    TooSlow,
    /// It failed, or is not as long as its head says. The client waits for the error itself; this is the error's
    /// text.
    Broken { text: String, finish: Finish },
}

/// Sends the client the end of its response. Dropping it does the same, so that the client is answered even if the
/// commit failed or panicked.
pub(crate) struct Finish {
    /// `None` only while it is dropped: `drop` takes the end to send it.
    end: Option<WithheldEnd>,
}

/// The client's stream, the withheld bytes, and the end that follows them: trailers, if any, or an error.
type WithheldEnd = (StreamSender, Bytes, Result<Option<Box<HeaderMap>>, BoxError>);

impl Finish {
    pub(crate) fn release(self) {
        drop(self);
    }
}

impl Drop for Finish {
    fn drop(&mut self) {
        match self.end.take() {
            Some((client, withheld, Ok(trailers))) => client.last(withheld, trailers),
            Some((client, withheld, Err(error))) => {
                client.data(withheld);
                client.fail(error);
            }
            None => {}
        }
    }
}

/// Reads `body` to its end, of at most `max_body` bytes, and passes it on to `client`.
///
/// `expected` is the length in the head. A body that has not ended by `until` is handed over to the client: a slow
/// body is not cut off, but other requests do not wait for it. If it has other readers, a task continues to read it, as
/// long as each frame comes within `patience`.
///
/// # Cancel safety
///
/// If it is dropped before its end, its sender is dropped too, so the client gets an error; the read bytes are
/// lost.
pub(super) async fn tee(
    mut body: UpstreamBody,
    max_body: usize,
    expected: Option<u64>,
    until: Instant,
    patience: Duration,
    client: StreamSender,
) -> Teed {
    // If the head has no length, a server frames a body of exact size by that size.
    let ends_at = expected.or_else(|| body.size().upper());
    let mut buffer = BufferedBody {
        chunks: Vec::new(),
        withheld: Bytes::new(),
        length: 0,
        trailers: None,
        expected,
        ends_at,
        max_body: max_body as u64,
        client,
    };
    match buffer.read(body.as_mut(), pin!(sleep_until(until))).await {
        ReadEnd::Whole => {
            let body = whole(buffer.chunks, buffer.length);
            let end = Ok(buffer.trailers.clone().map(Box::new));
            let finish = Finish { end: Some((buffer.client, buffer.withheld, end)) };
            Teed::Whole { body, trailers: buffer.trailers, finish }
        }
        ReadEnd::TooBig => {
            let length = buffer.length;
            hand_over_rest(buffer, body, patience);
            Teed::TooBig { length }
        }
        ReadEnd::TooSlow => {
            hand_over_rest(buffer, body, patience);
            Teed::TooSlow
        }
        // The client receives the bytes and then the error, as without the guard. The bytes go at once and the error on
        // release: a server that receives an error closes the connection, and loses the bytes that it has not written yet.
        ReadEnd::Broken(error) => {
            buffer.flush();
            let text = error.to_string();
            Teed::Broken { text, finish: Finish { end: Some((buffer.client, buffer.withheld, Err(error))) } }
        }
    }
}

/// Why [`tee`] reads no further.
enum ReadEnd {
    Whole,
    TooBig,
    TooSlow,
    Broken(BoxError),
}

/// Why a body cannot be stored as its head describes it: incomplete, or longer than announced (RFC 9112, 8).
const OTHER_LENGTH: &str = "the body is not as long as its content-length says";
const AFTER_TRAILERS: &str = "the body goes on after its trailers";

/// Whether a client that has the head has the whole response, so that the head has to wait for the commit.
pub(super) fn ends_with_head(status: StatusCode, expected: Option<u64>, body: &dyn InnerBody) -> bool {
    has_no_content(status) || expected == Some(0) || body.has_ended() || body.size().exact() == Some(0)
}

/// RFC 9112, 6.3: these have no content, whatever their headers say.
pub(crate) fn has_no_content(status: StatusCode) -> bool {
    matches!(status, StatusCode::NO_CONTENT | StatusCode::NOT_MODIFIED)
}

struct BufferedBody {
    chunks: Vec<Bytes>,
    /// The last bytes, which are not sent yet: the whole last chunk, so that a complete body is sent in its original
    /// chunks, or after a [`flush`](Self::flush) the byte that makes the response complete.
    withheld: Bytes,
    length: u64,
    trailers: Option<HeaderMap>,
    /// The length in the head.
    expected: Option<u64>,
    /// At this offset the client may know that it has the whole response. Without a known length it learns that from the
    /// end of the body: the last chunk, the end of the stream, or the close of the connection (RFC 9112, 6.3).
    ends_at: Option<u64>,
    max_body: u64,
    client: StreamSender,
}

impl BufferedBody {
    /// Buffers the body and passes it on until it ends, fails, or exceeds the bound or the deadline.
    async fn read(&mut self, mut body: Pin<&mut dyn InnerBody>, mut deadline: Pin<&mut Sleep>) -> ReadEnd {
        loop {
            // Flush withheld data only if it must wait: so the client receives a slow body without delay, and a fast one in
            // its original chunks.
            let next = poll_fn(|cx| match body.as_mut().poll_bytes(cx) {
                Poll::Ready(frame) => Poll::Ready(Some(frame)),
                Poll::Pending => {
                    self.flush();
                    deadline.as_mut().poll(cx).map(|()| None)
                }
            });
            let frame = match next.await {
                Some(Some(Ok(frame))) => frame,
                Some(Some(Err(error))) => return ReadEnd::Broken(error),
                Some(None) if self.is_too_short() => return ReadEnd::Broken(OTHER_LENGTH.into()),
                Some(None) => return ReadEnd::Whole,
                None => return ReadEnd::TooSlow,
            };
            if let Some(end) = self.add(frame) {
                return end;
            }
        }
    }

    /// Adds a frame and passes it on. Returns why the reading ends, if it ends with this frame.
    fn add(&mut self, frame: Frame<Bytes>) -> Option<ReadEnd> {
        // Data after trailers could only be stored in another order (RFC 9110, 6.5).
        if self.trailers.is_some() {
            return Some(ReadEnd::Broken(AFTER_TRAILERS.into()));
        }
        match frame.into_data().map_err(Frame::into_trailers) {
            Ok(mut data) => {
                let is_too_long = self.cut(&mut data);
                self.push(data);
                if is_too_long {
                    return Some(ReadEnd::Broken(OTHER_LENGTH.into()));
                }
                let is_too_much = self.length > self.max_body || self.chunks.len() > MOST_CHUNKS;
                is_too_much.then_some(ReadEnd::TooBig)
            }
            Err(fields) => {
                // Frames of an unknown kind are not stored.
                self.trailers = fields.ok();
                None
            }
        }
    }

    fn push(&mut self, data: Bytes) {
        if data.is_empty() {
            return;
        }
        self.length += data.len() as u64;
        // There is more data, so the withheld chunk was not the end.
        self.client.data(std::mem::replace(&mut self.withheld, data.clone()));
        self.chunks.push(data);
    }

    /// Sends everything except the byte that makes the response complete.
    fn flush(&mut self) {
        let is_complete = self.ends_at.is_some_and(|end| self.length >= end);
        let still_withheld = if is_complete { self.withheld.len().min(1) } else { 0 };
        self.client.data(self.withheld.split_to(self.withheld.len() - still_withheld));
    }

    /// Cuts off data beyond the length in the head, which is no part of the response (RFC 9112, 6.3). Returns
    /// whether there was any.
    fn cut(&self, data: &mut Bytes) -> bool {
        let room = self.expected.map_or(u64::MAX, |expected| expected.saturating_sub(self.length));
        let is_too_long = data.len() as u64 > room;
        data.truncate(usize::try_from(room).unwrap_or(usize::MAX));
        is_too_long
    }

    fn is_too_short(&self) -> bool {
        self.expected.is_some_and(|expected| self.length < expected)
    }
}

/// Hands the rest over to the client. If the body has other readers, or its trailers were received before its end, a
/// task continues to read it instead.
fn hand_over_rest(buffer: BufferedBody, rest: UpstreamBody, patience: Duration) {
    if buffer.client.is_read_along() || buffer.trailers.is_some() {
        // The body belongs to the inner service, and its events to the request's span.
        tokio::spawn(go_on(buffer, rest, patience).in_current_span());
    } else {
        buffer.client.data(buffer.withheld);
        buffer.client.rest(rest);
    }
}

/// Continues to read a body that has other readers, however slow it is, while there are readers. If no frame is received
/// for `patience`, the rest goes to its own client alone, which may wait longer.
///
/// The body's length was announced and is within `max_body`; [`ChunkMerger`] bounds the memory beside its content.
async fn go_on(mut buffer: BufferedBody, mut body: UpstreamBody, patience: Duration) {
    buffer.client.data(std::mem::take(&mut buffer.withheld));
    // The readers have these chunks already.
    let mut pieces =
        ChunkMerger { passed: std::mem::take(&mut buffer.chunks).len(), gathered: BytesMut::new() };
    let error: BoxError = loop {
        if buffer.client.is_left() {
            return;
        }
        let next = timeout(patience, poll_fn(|cx| body.as_mut().poll_bytes(cx))).await;
        let Ok(frame) = next else {
            buffer.client.data(pieces.rest());
            return buffer.client.rest(body);
        };
        let mut data = match frame {
            Some(Ok(frame)) => match frame.into_data().map_err(Frame::into_trailers) {
                Ok(data) => data,
                Err(fields) => {
                    buffer.trailers = fields.ok();
                    continue;
                }
            },
            Some(Err(error)) => break error,
            None if buffer.is_too_short() => break OTHER_LENGTH.into(),
            None => return buffer.client.last(pieces.rest(), buffer.trailers.map(Box::new)),
        };
        let is_too_long = buffer.cut(&mut data);
        buffer.length += data.len() as u64;
        if let Some(piece) = pieces.next(data) {
            buffer.client.data(piece);
        }
        if is_too_long {
            break OTHER_LENGTH.into();
        }
    };
    buffer.client.data(pieces.rest());
    buffer.client.fail(error);
}

/// Passes the first chunks on unchanged, and joins small ones after [`MOST_CHUNKS`].
struct ChunkMerger {
    passed: usize,
    gathered: BytesMut,
}

impl ChunkMerger {
    fn next(&mut self, data: Bytes) -> Option<Bytes> {
        if self.passed < MOST_CHUNKS {
            self.passed += usize::from(!data.is_empty());
            return Some(data);
        }
        self.gathered.extend_from_slice(&data);
        (self.gathered.len() >= LEAST_PIECE).then(|| self.rest())
    }

    fn rest(&mut self) -> Bytes {
        std::mem::take(&mut self.gathered).freeze()
    }
}

/// The body from its chunks: a single chunk is not copied, several are copied together once.
fn whole(mut chunks: Vec<Bytes>, length: u64) -> Bytes {
    if chunks.len() == 1 {
        return chunks.pop().unwrap_or_default();
    }
    // The length is at most `max_body`, so it fits a `usize`.
    let mut body = BytesMut::with_capacity(length as usize);
    for chunk in &chunks {
        body.extend_from_slice(chunk);
    }
    body.freeze()
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "in a test the panic is the report")]
#[path = "../../tests/unit/http/tee_tests.rs"]
mod tests;
