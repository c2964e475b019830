//! Step 6 over HTTP: asks the inner service, and decides at the head who may have the answer.

use std::fmt;
use std::future::{Future as _, poll_fn};
use std::pin::pin;
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use http::header::{DATE, HeaderMap, RETRY_AFTER};
use http::response::Parts;
use http::{Request, Response, StatusCode};
use http_body::Body;
use tokio::sync::oneshot;
use tokio::time::Instant;
use tower_service::Service;

use super::body::{BoxError, GuardedBody};
use super::fields::content_length;
use super::policy::ResponseRules;
use super::reuse::Stale;
use super::simple::{Verdict, judge};
use super::status::{CacheStatus, write_status};
use super::tee::{Teed, ends_with_head, has_no_content, tee};
use super::wire::StoredResponse;
use crate::ending::LONGEST_SHARED;
use crate::entry::Encoding;
use crate::error::{Failure, failure_text};
use crate::node::{LoadResult, Loaded, Loader, Mode};
use crate::policy::Policy;
use crate::times::Lifetimes;

/// What the client that led a load is given, as soon as its head is there.
pub(crate) type Head<B, E> = Result<Response<GuardedBody<B>>, E>;

/// Boxes a request to `inner` as a load. The client's answer comes through the receiver, ahead of the
/// load's end.
pub(crate) fn loader<S, Q, B>(
    inner: S,
    request: Request<Q>,
    policy: &Policy,
) -> (Loader, oneshot::Receiver<Head<B, S::Error>>)
where
    S: Service<Request<Q>, Response = Response<B>> + Send + 'static,
    S::Future: Send + 'static,
    S::Error: fmt::Display + Send + 'static,
    Q: Send + 'static,
    B: Body + Send + 'static,
    B::Data: Send,
    B::Error: Into<BoxError>,
{
    let (client, answer) = oneshot::channel();
    let rules =
        ResponseRules { http: policy.http.clone(), fresh_for: policy.fresh_for, max_body: policy.max_body };
    let (load_timeout, windows) = (policy.load_timeout, policy.lifetimes());
    let loader = Loader::new(move |given| async move {
        let mode = given.mode;
        // Whether an older response may stand in for a failure.
        let stood_in = |status: StatusCode| {
            let now = given.node.store.now();
            let may = given.previous.as_ref().is_some_and(|previous| previous.times.stands_in(now));
            // RFC 5861, 4: these and no others are errors of the origin.
            may && matches!(status.as_u16(), 500 | 502 | 503 | 504)
        };
        // A little before the flight's own bound, so that a slow body is handed over to its client
        // instead of being cut off with the load.
        let until = Instant::now() + load_timeout - load_timeout / 20;
        match call(inner, request).await {
            Ok(response) if mode == Mode::Alone => {
                pass(client, response, "uncoordinated");
                LoadResult::Uncacheable { mark: false }.into()
            }
            Ok(response) if stood_in(response.status()) => {
                let text = format!("the inner service answered {}", response.status());
                LoadResult::Failed(Failure::Loader { text: text.into(), source: None }).into()
            }
            Ok(response) => share(response, mode, rules, windows, until, client).await,
            Err(error) => {
                let text = failure_text(&error);
                let result = LoadResult::Failed(Failure::Loader { text, source: None });
                // After the others: a client that tries again at once must not meet this very load.
                Loaded { result, settled: Some(Box::new(move || drop(client.send(Err(error))))) }
            }
        }
    });
    (loader, answer)
}

/// Makes the service ready where it is called, which `poll_ready` of the guard does not.
pub(crate) async fn call<S: Service<R>, R>(mut service: S, request: R) -> Result<S::Response, S::Error> {
    poll_fn(|cx| service.poll_ready(cx)).await?;
    service.call(request).await
}

type Client<B, E> = oneshot::Sender<Head<B, E>>;

/// Gives the response to its own client only.
fn pass<B, E>(client: Client<B, E>, response: Response<B>, detail: &'static str) {
    let mut response = response.map(GuardedBody::passed);
    write_status(response.headers_mut(), CacheStatus::Miss { detail });
    let _ = client.send(Ok(response));
}

async fn share<B, E>(
    response: Response<B>,
    mode: Mode,
    rules: ResponseRules,
    windows: Lifetimes,
    until: Instant,
    client: Client<B, E>,
) -> Loaded
where
    B: Body + Send + 'static,
    B::Data: Send,
    B::Error: Into<BoxError>,
    E: Send + 'static,
{
    let now = SystemTime::now();
    let (head, body) = response.into_parts();
    let (lifetimes, status) = match judge(&head, &rules, now) {
        Verdict::Private(rule) => {
            pass(client, Response::from_parts(head, body), rule);
            return LoadResult::Uncacheable { mark: true }.into();
        }
        Verdict::Store { fresh_for, stale } => {
            let status = match mode {
                Mode::Unleased => CacheStatus::Miss { detail: "uncoordinated" },
                Mode::Leased | Mode::Alone => CacheStatus::Stored { ttl: fresh_for.as_secs() },
            };
            (lifetimes(fresh_for, &stale, &windows), status)
        }
        Verdict::ShareOnly => (Lifetimes::default(), CacheStatus::Miss { detail: "not-stored" }),
    };
    // Judged sound above.
    let expected = content_length(&head.headers).ok().flatten();
    let stored_head = clone_head(&head);
    let (sender, client_body) = GuardedBody::streaming(body.size_hint());
    let mut client_head = head;
    write_status(&mut client_head.headers, status);

    // With the head the client has everything, so the head is what waits for the commit.
    let ends_with_head = ends_with_head(client_head.status, expected, &body);
    if ends_with_head && (body.is_end_stream() || has_no_content(client_head.status)) {
        let stored = StoredResponse::new(&stored_head, now, Bytes::new(), None);
        let whole = Response::from_parts(client_head, GuardedBody::passed(body));
        return settled(stored, lifetimes, move || drop(client.send(Ok(whole))));
    }
    let mut waiting = Some((client, Response::from_parts(client_head, client_body)));
    let mut answer = move || {
        if let Some((client, response)) = waiting.take() {
            // A client that has left does not stop the load.
            let _ = client.send(Ok(response));
        }
    };
    let mut teeing = pin!(tee(body, rules.max_body, expected, until, sender));
    let teed = poll_fn(|cx| {
        let teed = teeing.as_mut().poll(cx);
        // A body that has to be waited for streams. One that is all there goes out with its head,
        // after the commit: a head alone and a body some time later are two small writes, which
        // Nagle's algorithm and a delayed acknowledgement hold apart by 40 ms.
        if teed.is_pending() && !ends_with_head {
            answer();
        }
        teed
    })
    .await;
    match teed {
        Teed::Whole { body, trailers, finish } => {
            let stored = StoredResponse::new(&stored_head, now, body, trailers);
            settled(stored, lifetimes, move || {
                // The end first: with the head in its hands the client's task writes what is there.
                finish.release();
                answer();
            })
        }
        Teed::TooBig => {
            answer();
            LoadResult::Uncacheable { mark: true }.into()
        }
        Teed::Broken { text, finish } => {
            // Its client may ask again as soon as it has the error: after the fleet was told.
            let result = LoadResult::Failed(Failure::Loader { text: text.into(), source: None });
            let release = move || {
                answer();
                finish.release();
            };
            Loaded { result, settled: Some(Box::new(release)) }
        }
    }
}

/// How long a response may be served: what it says about being stale counts, and where it says nothing what
/// the policy does, unless it forbids that (RFC 9111, 4.2.4).
fn lifetimes(fresh_for: Duration, stale: &Stale, policy: &Lifetimes) -> Lifetimes {
    let window = |own: Duration, policys: Duration| {
        let asks_policy = own.is_zero() && stale.on_request;
        if asks_policy { policys } else { own }
    };
    Lifetimes {
        fresh_for,
        stale_while_revalidate: window(stale.while_revalidate, policy.stale_while_revalidate),
        stale_if_error: window(stale.if_error, policy.stale_if_error),
        keep_for: Duration::ZERO,
    }
}

/// The parts that are stored; extensions are the client's.
fn clone_head(head: &Parts) -> Parts {
    let mut parts = Response::new(()).into_parts().0;
    parts.status = head.status;
    parts.version = head.version;
    parts.headers = head.headers.clone();
    parts
}

/// A whole response for everyone; `release` lets the client have its end.
fn settled(stored: StoredResponse, lifetimes: Lifetimes, release: impl FnOnce() + Send + 'static) -> Loaded {
    let result = match stored.encode() {
        Some(payload) => {
            // A failure is not stored, so what travels to other processes is all that they get. Without
            // it each of their waiters would ask the origin that has just failed.
            let too_long = payload.len() > LONGEST_SHARED && stored.status.is_server_error();
            let brief = if too_long { status_of(&stored).encode() } else { None };
            LoadResult::Value {
                encoding: Encoding::HTTP,
                payload,
                lifetimes,
                validator: Bytes::new(),
                tags: Vec::new(),
                brief,
            }
        }
        None => LoadResult::Uncacheable { mark: true },
    };
    Loaded { result, settled: Some(Box::new(release)) }
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
