//! Bounded waits for conditions, and wrappers that poll or drop a future at set points.

use std::fmt::{Debug, Display};
use std::future::Future;
use std::panic::Location;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::time::Instant;

/// Pause between two checks of a condition: short compared to every bound, long compared to a check.
const LOOK_AGAIN: Duration = Duration::from_millis(5);

/// Waits until `condition` holds; fails, at the caller's line, if that takes longer than `bound`.
#[track_caller]
pub(crate) fn eventually<F, Fut>(
    what: impl Display,
    bound: Duration,
    mut condition: F,
) -> impl Future<Output = ()>
where
    F: FnMut() -> Fut,
    Fut: Future<Output = bool>,
{
    let caller = Location::caller();
    async move {
        let deadline = Instant::now() + bound;
        while !condition().await {
            assert!(Instant::now() < deadline, "{caller}: not within {bound:?}: {what}");
            tokio::time::sleep(LOOK_AGAIN).await;
        }
    }
}

/// Waits until `look` returns `expected`; fails with the last returned value.
#[track_caller]
pub(crate) fn eventually_eq<T, F, Fut>(
    what: impl Display,
    bound: Duration,
    expected: T,
    mut look: F,
) -> impl Future<Output = ()>
where
    T: PartialEq + Debug,
    F: FnMut() -> Fut,
    Fut: Future<Output = T>,
{
    let caller = Location::caller();
    async move {
        let deadline = Instant::now() + bound;
        loop {
            let seen = look().await;
            if seen == expected {
                return;
            }
            assert!(
                Instant::now() < deadline,
                "{caller}: not within {bound:?}: {what}: expected {expected:?}, last seen {seen:?}"
            );
            tokio::time::sleep(LOOK_AGAIN).await;
        }
    }
}

/// Waits until no lease, no queue, no outcome and no key without a TTL is left on the server.
///
/// Outcomes, and the lease of a caller that gave up, expire by themselves; `bound` has to cover that.
#[cfg(feature = "redis")]
#[track_caller]
pub(crate) fn assert_nothing_left(
    server: &super::redis_server::RedisServer,
    bound: Duration,
) -> impl Future<Output = ()> + '_ {
    eventually_eq("nothing is left on the server", bound, Vec::<String>::new(), move || {
        let mut left = server.keys();
        left.retain(|key| ["sg1:l:", "sg1:q:", "sg1:o:"].iter().any(|prefix| key.starts_with(prefix)));
        left.extend(server.keys_without_ttl());
        std::future::ready(left)
    })
}

/// Polls a future at most `n` times, and then drops it and returns `None`; returns `Some` if it completed before.
///
/// Counting `n` up from 0 until the result is `Some` drops the future at each of its await points:
///
/// ```ignore
/// for n in 0.. {
///     let done = DropAt::new(n, guard.get_or_load("key", load)).await.is_some();
///     // ... nothing is lost, and the next call works ...
///     if done { break }
/// }
/// ```
///
/// The drop happens inside the last poll, so it comes before anything that could wake the future again.
#[derive(Debug)]
pub(crate) struct DropAt<F> {
    left: usize,
    inner: Option<Pin<Box<F>>>,
}

impl<F: Future> DropAt<F> {
    pub(crate) fn new(n: usize, inner: F) -> Self {
        Self { left: n, inner: Some(Box::pin(inner)) }
    }
}

impl<F: Future> Future for DropAt<F> {
    type Output = Option<F::Output>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        if self.left > 0
            && let Some(inner) = &mut self.inner
            && let Poll::Ready(output) = inner.as_mut().poll(cx)
        {
            return Poll::Ready(Some(output));
        }
        self.left = self.left.saturating_sub(1);
        if self.left > 0 {
            return Poll::Pending;
        }
        self.inner = None;
        Poll::Ready(None)
    }
}

/// Runs a future to its end and counts its polls.
pub(crate) async fn count_polls<F: Future>(future: F) -> (F::Output, usize) {
    let mut polls = 0;
    let mut future = std::pin::pin!(future);
    let output = std::future::poll_fn(|cx| {
        polls += 1;
        future.as_mut().poll(cx)
    })
    .await;
    (output, polls)
}
