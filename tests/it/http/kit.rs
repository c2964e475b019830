//! A scripted inner service, requests to it, and responses read to their end.

use std::collections::VecDeque;
use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use http::{HeaderMap, Request, Response, StatusCode, Version};
use http_body::{Body, Frame};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt as _, Full, StreamBody};
use stampede_guard::http::Guarded;
use stampede_guard::{MemoryStore, Policy, PolicyBuilder, StampedeGuard};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tower::{Service, ServiceExt as _};

use crate::support::gate::{Counter, Gate};
#[cfg(feature = "redis")]
use crate::support::redis_server::RedisServer;

pub(super) type Req = Request<Full<Bytes>>;
pub(super) type Boxed = UnsyncBoxBody<Bytes, Down>;
pub(super) type Shop = Guarded<Inner>;

pub(super) const fn secs(secs: u64) -> Duration {
    Duration::from_secs(secs)
}

/// The error of the inner service and of its bodies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Down(pub(super) String);

impl fmt::Display for Down {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Down {}

type Answers = dyn Fn(usize, &Req) -> Result<Response<Boxed>, Down> + Send + Sync;

/// The inner service: counts its calls, lets them wait at a gate, and answers as scripted.
#[derive(Clone)]
pub(super) struct Inner {
    pub(super) loads: Counter,
    pub(super) gate: Gate,
    /// A separate gate for the first call, if there is one.
    pub(super) first: Option<Gate>,
    number: Arc<AtomicUsize>,
    answers: Arc<Answers>,
}

impl Inner {
    /// Answers the `n`th call, from 1, with the result of `answer`. The gate is open.
    pub(super) fn with(
        answer: impl Fn(usize, &Req) -> Result<Response<Boxed>, Down> + Send + Sync + 'static,
    ) -> Self {
        let gate = Gate::closed();
        gate.open();
        Self {
            loads: Counter::default(),
            gate,
            first: None,
            number: Arc::default(),
            answers: Arc::new(answer),
        }
    }

    /// Answers the `n`th call with `n` as the text; `head` may change the response.
    pub(super) fn numbered(head: impl Fn(&mut Response<Boxed>) + Send + Sync + 'static) -> Self {
        Self::with(move |n, _| {
            let mut response = Response::new(whole(n.to_string()));
            head(&mut response);
            Ok(response)
        })
    }

    /// Like [`numbered`](Self::numbered), with these headers in each answer.
    pub(super) fn with_headers(headers: &[(&'static str, &'static str)]) -> Self {
        let headers = headers.to_vec();
        Self::numbered(move |response| add(response, &headers))
    }

    /// Gives these answers, one per call.
    pub(super) fn in_turn(answers: impl IntoIterator<Item = Response<Boxed>>) -> Self {
        let answers: Mutex<VecDeque<_>> = Mutex::new(answers.into_iter().collect());
        Self::with(move |n, _| {
            let next = answers.lock().unwrap().pop_front();
            Ok(next.unwrap_or_else(|| panic!("call {n} has no answer")))
        })
    }

    /// Closes the gate: calls wait until it is opened.
    pub(super) fn held(self) -> Self {
        self.gate.close();
        self
    }

    /// Closes the gate, and a separate gate for the first call.
    pub(super) fn held_separately(self) -> Self {
        Self { first: Some(Gate::closed()), ..self.held() }
    }

    pub(super) fn open_first(&self) {
        self.first.as_ref().expect("held separately").open();
    }

    pub(super) fn calls(&self) -> usize {
        self.loads.started()
    }
}

/// A header of a request as text, empty if it is absent.
pub(super) fn sent<'r>(request: &'r Req, name: &str) -> &'r str {
    request.headers().get(name).map_or("", |value| value.to_str().unwrap())
}

impl Service<Req> for Inner {
    type Response = Response<Boxed>;
    type Error = Down;
    type Future = BoxFuture<'static, Result<Response<Boxed>, Down>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Down>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Req) -> Self::Future {
        let Self { loads, gate, first, number, answers } = self.clone();
        async move {
            let _running = loads.start();
            let n = number.fetch_add(1, Ordering::SeqCst) + 1;
            match first.filter(|_| n == 1) {
                Some(first) => first.pass().await,
                None => gate.pass().await,
            }
            answers(n, &request)
        }
        .boxed()
    }
}

/// A policy without jitter, so that lifetimes are exact.
pub(super) fn policy() -> PolicyBuilder {
    Policy::builder().ttl_jitter(0.0)
}

pub(super) fn guard() -> StampedeGuard {
    StampedeGuard::in_memory().with_policy(policy().build().unwrap())
}

/// The inner service behind a new guard.
pub(super) fn shop(inner: &Inner) -> Shop {
    tower::Layer::layer(&guard(), inner.clone())
}

pub(super) fn shop_with(inner: &Inner, policy: PolicyBuilder) -> Shop {
    let guard = StampedeGuard::in_memory().with_policy(policy.build().unwrap());
    tower::Layer::layer(&guard, inner.clone())
}

/// The same inner service behind several guards on one store, as in several processes.
pub(super) fn replicas(n: usize, inner: &Inner) -> Vec<Shop> {
    replicas_with(n, inner, policy())
}

pub(super) fn replicas_with(n: usize, inner: &Inner, policy: PolicyBuilder) -> Vec<Shop> {
    let (store, policy) = (MemoryStore::new(), policy.build().unwrap());
    let replica = || StampedeGuard::new(store.clone()).with_policy(policy.clone());
    (0..n).map(|_| tower::Layer::layer(&replica(), inner.clone())).collect()
}

/// The same inner service behind the guards of two processes on one server.
#[cfg(feature = "redis")]
pub(super) fn pair_on(server: &RedisServer, inner: &Inner, policy: PolicyBuilder) -> [Shop; 2] {
    let policy = policy.build().unwrap();
    [(); 2].map(|()| {
        let client = redis::Client::open(server.minimal_user()).unwrap();
        tower::Layer::layer(&StampedeGuard::new(client).with_policy(policy.clone()), inner.clone())
    })
}

pub(super) fn get(uri: &str) -> Req {
    request("GET", uri, &[])
}

/// A request as an HTTP/1 server receives it: origin form, with a Host.
pub(super) fn request(method: &str, uri: &str, headers: &[(&str, &str)]) -> Req {
    let mut request = Request::builder().method(method).uri(uri);
    if uri.starts_with('/') && !headers.iter().any(|(name, _)| name.eq_ignore_ascii_case("host")) {
        request = request.header("host", "shop.example");
    }
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    request.body(Full::default()).unwrap()
}

pub(super) fn whole(text: impl Into<String>) -> Boxed {
    Full::from(text.into()).map_err(|never| match never {}).boxed_unsync()
}

pub(super) fn respond(status: u16, headers: &[(&str, &str)], body: Boxed) -> Response<Boxed> {
    let mut response = Response::new(body);
    *response.status_mut() = StatusCode::from_u16(status).unwrap();
    add(&mut response, headers);
    response
}

pub(super) fn add(response: &mut Response<Boxed>, headers: &[(&str, &str)]) {
    for (name, value) in headers {
        let name: http::HeaderName = name.parse().unwrap();
        response.headers_mut().append(name, value.parse().unwrap());
    }
}

/// Sends frames to a body. Dropping the feed ends the body.
pub(super) struct Feed(mpsc::UnboundedSender<Result<Frame<Bytes>, Down>>);

impl Feed {
    pub(super) fn new() -> (Self, Boxed) {
        let (sender, mut frames) = mpsc::unbounded_channel();
        let body = StreamBody::new(futures_util::stream::poll_fn(move |cx| frames.poll_recv(cx)));
        (Self(sender), body.boxed_unsync())
    }

    pub(super) fn data(&self, text: &str) {
        let _ = self.0.send(Ok(Frame::data(Bytes::copy_from_slice(text.as_bytes()))));
    }

    /// Whether the reader has dropped the body.
    pub(super) fn is_left(&self) -> bool {
        self.0.is_closed()
    }

    pub(super) fn trailers(&self, name: &'static str, value: &'static str) {
        let trailers = HeaderMap::from_iter([(name.parse().unwrap(), value.parse().unwrap())]);
        let _ = self.0.send(Ok(Frame::trailers(trailers)));
    }

    pub(super) fn fail(&self, text: &str) {
        let _ = self.0.send(Err(Down(text.to_owned())));
    }
}

/// A response whose body was read to its end.
#[derive(Clone, Debug)]
pub(super) struct Seen {
    pub(super) status: u16,
    pub(super) version: Version,
    pub(super) headers: HeaderMap,
    pub(super) body: Bytes,
    pub(super) trailers: Option<HeaderMap>,
}

impl Seen {
    pub(super) fn text(&self) -> &str {
        std::str::from_utf8(&self.body).unwrap()
    }

    pub(super) fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(|value| value.to_str().unwrap())
    }

    /// The guard's `Cache-Status` parameters, without its name; several are joined by `|`.
    pub(super) fn remark(&self) -> String {
        let lines = self.headers.get_all("cache-status").iter();
        let lines = lines.map(|line| line.to_str().unwrap());
        lines.map(|line| line.strip_prefix("stampede-guard; ").unwrap()).collect::<Vec<_>>().join("|")
    }
}

pub(super) async fn read<B>(response: Response<B>) -> Seen
where
    B: Body<Data = Bytes>,
    B::Error: fmt::Debug,
{
    let (head, body) = response.into_parts();
    let body = body.collect().await.expect("a body that does not break");
    Seen {
        status: head.status.as_u16(),
        version: head.version,
        headers: head.headers,
        trailers: body.trailers().cloned(),
        body: body.to_bytes(),
    }
}

/// Sends one request, and reads the whole response.
pub(super) async fn ask<S, B>(service: &S, request: Req) -> Seen
where
    S: Service<Req, Response = Response<B>> + Clone,
    S::Error: fmt::Debug,
    B: Body<Data = Bytes>,
    B::Error: fmt::Debug,
{
    read(service.clone().oneshot(request).await.expect("a response")).await
}

/// Sends `n` equal requests, each from a new task.
pub(super) fn send_many<S, B>(service: &S, n: usize, uri: &str) -> Vec<JoinHandle<Seen>>
where
    S: Service<Req, Response = Response<B>, Future: Send> + Clone + Send + Sync + 'static,
    S::Error: fmt::Debug,
    B: Body<Data = Bytes> + Send,
    B::Error: fmt::Debug,
{
    (0..n).map(|_| send(service, get(uri))).collect()
}

/// Sends a request from a new task.
pub(super) fn send<S, B>(service: &S, request: Req) -> JoinHandle<Seen>
where
    S: Service<Req, Response = Response<B>, Future: Send> + Clone + Send + Sync + 'static,
    S::Error: fmt::Debug,
    B: Body<Data = Bytes> + Send,
    B::Error: fmt::Debug,
{
    let service = service.clone();
    tokio::spawn(async move { ask(&service, request).await })
}

pub(super) async fn all(clients: Vec<JoinHandle<Seen>>) -> Vec<Seen> {
    let mut seen = Vec::new();
    for one in clients {
        seen.push(one.await.expect("no panic"));
    }
    seen
}

/// Waits until nothing more can happen except by a timer. Use it only under a paused clock, which moves when every task is idle.
pub(super) async fn settle() {
    tokio::time::sleep(Duration::from_millis(1)).await;
}
