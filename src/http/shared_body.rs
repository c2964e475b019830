//! A response that arrives, for waiters of this process: they read the received pieces while the rest comes.

use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};

use bytes::Bytes;
use http::HeaderMap;
use http::response::Parts;
use tokio::time::Instant;

use super::encoding::are_sound_trailers;
use super::metadata::ResponseMeta;
use crate::sync::lock;

/// A head, and the part of the body that has arrived.
#[derive(Debug)]
pub(crate) struct SharedBody {
    /// The head as it is stored.
    pub(crate) head: Parts,
    pub(crate) kept: ResponseMeta,
    /// For how many seconds it will be fresh, if it will be stored.
    pub(crate) ttl: Option<u64>,
    /// When its head came.
    pub(crate) came: Instant,
    /// The length of the complete body.
    pub(crate) length: u64,
    pub(crate) body: Arc<ChunkBuffer>,
}

/// A body for many readers, each at its own pace. Received pieces stay in memory until the last reader has gone;
/// they are no more than the copy that is stored anyway.
#[derive(Debug, Default)]
pub(crate) struct ChunkBuffer {
    state: Mutex<BufferState>,
}

#[derive(Debug, Default)]
struct BufferState {
    chunks: Vec<Bytes>,
    end: Option<BufferEnd>,
    /// One slot for each reader that has had to wait.
    wakers: Vec<Option<Waker>>,
}

#[derive(Clone, Debug)]
enum BufferEnd {
    Whole(Option<Box<HeaderMap>>),
    /// The error itself goes to the load's own client; other readers get its text.
    Broken(Arc<str>),
}

/// What a reader receives next.
pub(crate) enum SharedPiece {
    Data(Bytes),
    Whole(Option<Box<HeaderMap>>),
    Broken(Arc<str>),
}

impl ChunkBuffer {
    pub(crate) fn data(&self, data: Bytes) {
        self.tell(|state| state.chunks.push(data));
    }

    /// Omits trailers that must not be stored, such as a client's cookie: other readers must not see them.
    pub(crate) fn last(&self, data: Bytes, trailers: Option<Box<HeaderMap>>) {
        let trailers = trailers.filter(|trailers| are_sound_trailers(trailers));
        self.tell(|state| {
            if !data.is_empty() {
                state.chunks.push(data);
            }
            state.end.get_or_insert(BufferEnd::Whole(trailers));
        });
    }

    /// Ends the body with an error, unless it has ended.
    pub(crate) fn broken(&self, text: &str) {
        self.tell(|state| {
            state.end.get_or_insert_with(|| BufferEnd::Broken(text.into()));
        });
    }

    fn tell(&self, change: impl FnOnce(&mut BufferState)) {
        let readers: Vec<_> = {
            let mut state = lock(&self.state);
            change(&mut state);
            state.wakers.iter_mut().filter_map(Option::take).collect()
        };
        readers.into_iter().for_each(Waker::wake);
    }

    /// The piece with this number. A reader that has to wait gets an index into the wakers, and passes it to the next call.
    pub(crate) fn poll_piece(
        &self,
        number: usize,
        index: &mut Option<usize>,
        cx: &mut Context<'_>,
    ) -> Poll<SharedPiece> {
        let mut state = lock(&self.state);
        if let Some(chunk) = state.chunks.get(number) {
            return Poll::Ready(SharedPiece::Data(chunk.clone()));
        }
        match state.end.clone() {
            Some(BufferEnd::Whole(trailers)) => Poll::Ready(SharedPiece::Whole(trailers)),
            Some(BufferEnd::Broken(text)) => Poll::Ready(SharedPiece::Broken(text)),
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
mod tests {
    use http_body_util::{BodyExt as _, Full};

    use super::*;
    use crate::http::GuardedBody;

    type Tested = GuardedBody<Full<Bytes>>;

    fn reader(passage: &Arc<ChunkBuffer>, length: u64) -> Tested {
        Tested::arriving(Arc::clone(passage), length)
    }

    #[tokio::test]
    async fn every_reader_gets_the_whole_body_whenever_it_comes() {
        use http_body::Body as _;
        let passage = Arc::new(ChunkBuffer::default());
        let early = tokio::spawn(reader(&passage, 6).collect());
        tokio::task::yield_now().await;
        passage.data(Bytes::from_static(b"abc"));
        let mut late = reader(&passage, 6);
        assert_eq!(late.size_hint().exact(), Some(6));
        assert_eq!(late.frame().await.unwrap().unwrap().into_data().unwrap(), "abc");
        assert_eq!(late.size_hint().exact(), Some(3));
        passage.last(Bytes::from_static(b"def"), None);
        passage.broken("too late to matter");
        assert_eq!(late.collect().await.unwrap().to_bytes(), "def");
        assert_eq!(early.await.unwrap().unwrap().to_bytes(), "abcdef");
        assert_eq!(reader(&passage, 6).collect().await.unwrap().to_bytes(), "abcdef");
    }

    #[tokio::test]
    async fn a_body_that_breaks_is_an_error_to_every_reader() {
        let passage = Arc::new(ChunkBuffer::default());
        passage.data(Bytes::from_static(b"abc"));
        passage.broken("gone");
        for _ in 0..2 {
            let mut body = reader(&passage, 6);
            assert!(body.frame().await.unwrap().is_ok());
            assert_eq!(body.frame().await.unwrap().unwrap_err().to_string(), "gone");
            assert!(body.frame().await.is_none(), "once");
        }
    }

    #[tokio::test]
    async fn trailers_with_a_cookie_reach_no_other_reader() {
        let passage = Arc::new(ChunkBuffer::default());
        let trailers = HeaderMap::from_iter([(http::header::SET_COOKIE, "id=1".parse().unwrap())]);
        passage.last(Bytes::new(), Some(Box::new(trailers)));
        assert_eq!(reader(&passage, 0).collect().await.unwrap().trailers(), None);
    }

    #[tokio::test]
    async fn trailers_reach_every_reader() {
        let passage = Arc::new(ChunkBuffer::default());
        let trailers = HeaderMap::from_iter([(http::header::ETAG, "\"a\"".parse().unwrap())]);
        passage.last(Bytes::new(), Some(Box::new(trailers.clone())));
        for _ in 0..2 {
            assert_eq!(reader(&passage, 0).collect().await.unwrap().trailers(), Some(&trailers));
        }
    }
}
