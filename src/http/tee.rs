//! One body for two: the client that waits for it, and the buffer that will be stored.
//!
//! Run by the load task, which goes on when the client leaves. The client is sent everything as
//! it comes, but for the end: a client that has a whole response may ask again at once, and that
//! request must find what this one made. So the end is withheld until the caller has committed and lets
//! go: the byte that completes a known length, and otherwise the end of the body, which is all that
//! tells a client that no more comes.

use std::fmt;
use std::future::{Future as _, poll_fn};
use std::pin::{Pin, pin};
use std::task::Poll;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::{HeaderMap, StatusCode};
use http_body::{Body, Frame};
use tokio::time::{Instant, Sleep, sleep_until, timeout};
use tracing::Instrument as _;

use super::body::{BoxError, StreamSender, to_bytes};

/// The most chunks that are kept. Each costs some 100 bytes beside its content, so a body of
/// single bytes would take a hundred times `max_body`.
const MOST_CHUNKS: usize = 64 * 1024;

/// How much is put together before it is passed on, where there have been more than [`MOST_CHUNKS`].
const LEAST_PIECE: usize = 4 * 1024;

/// How a body ended.
pub(crate) enum Teed<B> {
    /// All of it is here. The client waits for its end.
    Whole { body: Bytes, trailers: Option<HeaderMap>, finish: Finish<B> },
    /// It grew over the bound, and this much of it has come. The client has that, and polls the rest itself:
    /// from here on it decides how fast the inner service may go. If it is gone, the rest was dropped. (What others read
    /// along, which is within the bound, goes on to all of them.)
    TooBig { length: u64 },
    /// The same of one that took too long.
    TooSlow,
    /// It failed, or is not as long as its head says. The client waits for the error itself; this is
    /// its text.
    Broken { text: String, finish: Finish<B> },
}

/// Lets the client have the end of its response. Dropped, it does the same, so that no way out of
/// the load leaves a client waiting: a commit that failed or panicked costs the store an entry,
/// not the client its answer.
pub(crate) struct Finish<B> {
    /// Taken by the drop.
    end: Option<(StreamSender<B>, Bytes, End)>,
}

/// What comes after the withheld bytes.
enum End {
    Whole(Option<Box<HeaderMap>>),
    Failed(BoxError),
}

impl<B> Finish<B> {
    pub(crate) fn release(self) {
        drop(self);
    }
}

impl<B> Drop for Finish<B> {
    fn drop(&mut self) {
        match self.end.take() {
            Some((client, withheld, End::Whole(trailers))) => client.last(withheld, trailers),
            Some((client, withheld, End::Failed(error))) => {
                client.data(withheld);
                client.fail(error);
            }
            None => {}
        }
    }
}

/// Reads `body` to its end, of at most `max_body` bytes, and passes it on to `client`.
///
/// `expected` is the length that the head promises. A body that has not ended by `until` is handed
/// over to the client: slow is no reason to cut it off, only no reason to let others wait for it.
///
/// # Cancel safety
///
/// Dropped before its end, it leaves the client an error, as its sender goes with it; what was
/// read is lost.
pub(crate) async fn tee<B>(
    body: B,
    max_body: usize,
    expected: Option<u64>,
    until: Instant,
    patience: Duration,
    client: StreamSender<B>,
) -> Teed<B>
where
    B: Body + Send + 'static,
    B::Data: Send,
    B::Error: Into<BoxError>,
{
    let mut deadline = pin!(sleep_until(until));
    // Boxed here, because it may have to be handed over half read.
    let mut body = Box::pin(body);
    // A server frames a body of exact size by that size, where the head says nothing.
    let ends_at = expected.or_else(|| body.size_hint().upper());
    let mut kept = Kept { chunks: Vec::new(), withheld: Bytes::new(), length: 0, expected, ends_at };
    let mut trailers = None;
    loop {
        let frame = match next(body.as_mut(), deadline.as_mut(), &mut kept, &client).await {
            Next::Frame(frame) => to_bytes(frame),
            Next::Failed(error) => return broken(client, kept, error.into()),
            Next::End => break,
            Next::TooLate => {
                handed_over(client, kept, body, trailers, patience);
                return Teed::TooSlow;
            }
        };
        // Whatever comes after trailers could be stored only in another order (RFC 9110, 6.5).
        if trailers.is_some() {
            return broken(client, kept, Box::new(Malformed::AfterTrailers));
        }
        match frame.into_data().map_err(Frame::into_trailers) {
            Ok(mut data) => {
                let is_too_long = kept.cut(&mut data);
                kept.push(data, &client);
                if is_too_long {
                    return broken(client, kept, Box::new(Malformed::Length));
                }
                let is_too_much = kept.length > max_body as u64 || kept.chunks.len() > MOST_CHUNKS;
                if is_too_much {
                    let length = kept.length;
                    handed_over(client, kept, body, trailers, patience);
                    return Teed::TooBig { length };
                }
            }
            Err(Ok(fields)) => trailers = Some(fields),
            // A kind of frame that is not known today says nothing that is kept.
            Err(Err(_)) => {}
        }
    }
    if kept.is_too_short() {
        return broken(client, kept, Box::new(Malformed::Length));
    }
    let body = whole(kept.chunks, kept.length);
    let end = End::Whole(trailers.clone().map(Box::new));
    let finish = Finish { end: Some((client, kept.withheld, end)) };
    Teed::Whole { body, trailers, finish }
}

/// Whether a client has the whole response once it has the head, so that the head is what has to
/// wait for the commit.
pub(crate) fn ends_with_head<B: Body>(status: StatusCode, expected: Option<u64>, body: &B) -> bool {
    has_no_content(status)
        || expected == Some(0)
        || body.is_end_stream()
        || body.size_hint().exact() == Some(0)
}

/// RFC 9112, 6.3: neither of these has content, whatever its headers say.
pub(crate) fn has_no_content(status: StatusCode) -> bool {
    matches!(status, StatusCode::NO_CONTENT | StatusCode::NOT_MODIFIED)
}

struct Kept {
    chunks: Vec<Bytes>,
    /// The end of what came, not sent yet: the whole last chunk, so that a body that is all there goes out in its own
    /// chunks, or after a [`flush`](Self::flush) the byte that makes the response complete.
    withheld: Bytes,
    length: u64,
    /// The length that the head promises.
    expected: Option<u64>,
    /// With this byte the client may know that it has the whole response. Without a known length only the end of the body
    /// tells: the last chunk, the end of the stream, or that the connection closes (RFC 9112, 6.3).
    ends_at: Option<u64>,
}

impl Kept {
    fn push(&mut self, data: Bytes, client: &StreamSender<impl Body>) {
        if data.is_empty() {
            return;
        }
        self.length += data.len() as u64;
        // What was withheld is not the end after all.
        client.data(std::mem::replace(&mut self.withheld, data.clone()));
        self.chunks.push(data);
    }

    /// Sends what need not wait: all but the byte that makes the response complete.
    fn flush<B>(&mut self, client: &StreamSender<B>) {
        let is_complete = self.ends_at.is_some_and(|end| self.length >= end);
        let keep = if is_complete { self.withheld.len().min(1) } else { 0 };
        client.data(self.withheld.split_to(self.withheld.len() - keep));
    }

    /// Cuts off what is beyond the promised length, which is no part of the response (RFC 9112, 6.3). Whether there was any.
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

enum Next<D, E> {
    Frame(Frame<D>),
    Failed(E),
    End,
    TooLate,
}

/// The next frame. Only if it is not there at once, what was withheld is flushed: so a slow body reaches the client as
/// it comes, and a fast one in its own chunks.
async fn next<B: Body>(
    mut body: Pin<&mut B>,
    mut deadline: Pin<&mut Sleep>,
    kept: &mut Kept,
    client: &StreamSender<B>,
) -> Next<B::Data, B::Error> {
    poll_fn(|cx| match body.as_mut().poll_frame(cx) {
        Poll::Ready(Some(Ok(frame))) => Poll::Ready(Next::Frame(frame)),
        Poll::Ready(Some(Err(error))) => Poll::Ready(Next::Failed(error)),
        Poll::Ready(None) => Poll::Ready(Next::End),
        Poll::Pending => {
            kept.flush(client);
            deadline.as_mut().poll(cx).map(|()| Next::TooLate)
        }
    })
    .await
}

/// The rest is its client's own, unless others have begun to read it along, or its trailers came before its end.
fn handed_over<B>(
    client: StreamSender<B>,
    kept: Kept,
    rest: Pin<Box<B>>,
    trailers: Option<HeaderMap>,
    patience: Duration,
) where
    B: Body + Send + 'static,
    B::Data: Send,
    B::Error: Into<BoxError>,
{
    if client.is_read_along() || trailers.is_some() {
        // The body is the inner service's, and what it says belongs to the request.
        tokio::spawn(go_on(client, kept, rest, trailers, patience).in_current_span());
    } else {
        client.data(kept.withheld);
        client.rest(rest);
    }
}

/// What others have begun to read is kept to its end, however slow that is: for as long as anybody reads. After `patience`
/// without a word of it the rest is its own client's alone, which may have more.
///
/// Its length was promised and is within `max_body`; that what is kept of it beside its content is bounded too, [`Pieces`] see to.
async fn go_on<B>(
    client: StreamSender<B>,
    mut kept: Kept,
    mut body: Pin<Box<B>>,
    trailers: Option<HeaderMap>,
    patience: Duration,
) where
    B: Body,
    B::Error: Into<BoxError>,
{
    client.data(std::mem::take(&mut kept.withheld));
    // Whoever reads has them already.
    let mut pieces = Pieces { passed: std::mem::take(&mut kept.chunks).len(), gathered: BytesMut::new() };
    let mut trailers = trailers.map(Box::new);
    let error: BoxError = loop {
        if client.is_left() {
            return;
        }
        let next = timeout(patience, poll_fn(|cx| body.as_mut().poll_frame(cx))).await;
        let Ok(frame) = next else {
            client.data(pieces.rest());
            return client.rest(body);
        };
        let mut data = match frame.map(|frame| frame.map(to_bytes)) {
            Some(Ok(frame)) => match frame.into_data().map_err(Frame::into_trailers) {
                Ok(data) => data,
                Err(fields) => {
                    trailers = fields.ok().map(Box::new);
                    continue;
                }
            },
            Some(Err(error)) => break error.into(),
            None if kept.is_too_short() => break Box::new(Malformed::Length),
            None => return client.last(pieces.rest(), trailers),
        };
        let is_too_long = kept.cut(&mut data);
        kept.length += data.len() as u64;
        if let Some(piece) = pieces.next(data) {
            client.data(piece);
        }
        if is_too_long {
            break Box::new(Malformed::Length);
        }
    };
    client.data(pieces.rest());
    client.fail(error);
}

/// As they come, so many of them; small ones put together after that.
struct Pieces {
    passed: usize,
    gathered: BytesMut,
}

impl Pieces {
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

/// What came goes on as it came, and then the error: the client sees what it would have seen
/// without the guard.
///
/// The bytes go at once and the error on release: a server that meets an error closes the connection, and what it was
/// given just before is lost.
fn broken<B>(client: StreamSender<B>, mut kept: Kept, error: BoxError) -> Teed<B> {
    kept.flush(&client);
    let text = error.to_string();
    let finish = Finish { end: Some((client, kept.withheld, End::Failed(error))) };
    Teed::Broken { text, finish }
}

/// One chunk is the body; several are copied together, once.
fn whole(mut chunks: Vec<Bytes>, length: u64) -> Bytes {
    if chunks.len() == 1 {
        return chunks.pop().unwrap_or_default();
    }
    // At most `max_body`, so it is a `usize`.
    let mut body = BytesMut::with_capacity(length as usize);
    for chunk in &chunks {
        body.extend_from_slice(chunk);
    }
    body.freeze()
}

/// A body that can not be stored as what it claims to be.
#[derive(Clone, Copy, Debug)]
enum Malformed {
    /// RFC 9112, 8: incomplete, or more than was announced.
    Length,
    AfterTrailers,
}

impl fmt::Display for Malformed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Length => "the body is not as long as its content-length says",
            Self::AfterTrailers => "the body goes on after its trailers",
        })
    }
}

impl std::error::Error for Malformed {}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "in a test the panic is the report")]
#[path = "../../tests/unit/http/tee_tests.rs"]
mod tests;
