//! A process that runs the guard or a control. For each line that it receives from the bench, it runs one stretch of calls.

use std::convert::Infallible;
use std::future::Future;
use std::hint::black_box;
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant, SystemTime};

use bytes::Bytes;
use futures_util::future::BoxFuture;
use http::header::{self, HeaderMap, HeaderName, HeaderValue};
use http::{Request, Response};
use http_body_util::{BodyExt as _, Full};
use redis::aio::MultiplexedConnection;
use serde::{Deserialize, Serialize};
use stampede_guard::{Policy, StampedeGuard};
use tower::{Layer as _, Service, service_fn};

use crate::joined::{Joined, get};
use crate::support::processes::{Child, Role};

pub(crate) const ROLE: Role = ("side", side);

const CALLERS: usize = 64;
/// How many calls each caller makes in one stretch, with values of 1 KiB. They take about half a second.
const CALLS: usize = 1_500;

/// What the calls of a row do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Kind {
    Loader,
    Layer,
    Large,
    Hot,
}

impl Kind {
    fn body(self) -> Bytes {
        Bytes::from(vec![b'v'; if self == Self::Large { 100 * 1024 } else { 1024 }])
    }

    fn calls(self) -> usize {
        if self == Self::Large { CALLS / 10 } else { CALLS }
    }

    /// How many keys each caller has for itself. If two callers requested one key at once, they would share a read, and the guard would
    /// look better than it is. Only the hot key is shared on purpose.
    fn keys_per_caller(self) -> usize {
        match self {
            Self::Loader | Self::Layer => 16,
            Self::Large => 2,
            Self::Hot => 0,
        }
    }

    fn keys(self) -> Arc<[String]> {
        (0..CALLERS * self.keys_per_caller().max(1)).map(|n| format!("/{self:?}/{n:06}")).collect()
    }

    fn key(self, keys: &[String], caller: usize, call: usize) -> &str {
        match self.keys_per_caller() {
            0 => &keys[0],
            each => &keys[caller * each + call % each],
        }
    }
}

/// The guard or a control.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    Guard,
    /// Each call is a plain GET.
    Control,
    /// All waiters share one plain GET, and nothing else is done: the cheapest shared read.
    Joined,
}

impl Side {
    /// The sides of a row, in the order of its processes.
    pub(crate) fn of(kind: Kind) -> &'static [Self] {
        if kind == Kind::Hot {
            &[Self::Guard, Self::Control, Self::Joined]
        } else {
            &[Self::Guard, Self::Control]
        }
    }
}

#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Config {
    pub(crate) redis: String,
    pub(crate) kind: Kind,
}

/// The result of one stretch.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Rate {
    /// The calls per second of all callers together.
    pub(crate) calls: f64,
    /// CPU time of the clients' thread per call in nanoseconds, which a busy neighbour does not change; zero if unknown.
    pub(crate) cpu: f64,
    /// Page faults per call: an allocator that has returned pages to the kernel fetches them again.
    pub(crate) faults: f64,
}

/// A process of the bench. All callers share one thread, so the rate is what the CPU allows to one thread.
fn side(child: Child) -> BoxFuture<'static, ()> {
    Box::pin(async move {
        let work = tokio::task::spawn_blocking(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            runtime.expect("a runtime").block_on(play(child));
        });
        work.await.expect("no panic");
    })
}

async fn play(mut child: Child) {
    let Config { redis, kind } = child.config();
    let client = redis::Client::open(redis.as_str()).expect("an address");
    match (Side::of(kind)[child.index()], kind) {
        (Side::Guard, Kind::Loader) => loader(&mut child, guard(client).await, kind).await,
        (Side::Guard, _) => layer(&mut child, guard(client).await, kind).await,
        (Side::Control, Kind::Loader) => plain(&mut child, filled(&client, kind).await, kind).await,
        (Side::Control, _) => {
            let connection = filled(&client, kind).await;
            let service = service_fn(move |request: Request<Full<Bytes>>| {
                let mut connection = connection.clone();
                async move { Ok(response(get(&mut connection, request.uri().path()).await)) }
            });
            requests(&mut child, service, kind, 8).await;
        }
        (Side::Joined, _) => {
            let joined = Joined::new(filled(&client, kind).await);
            let service = service_fn(move |request: Request<Full<Bytes>>| {
                let joined = joined.clone();
                async move { Ok(response(joined.get(request.uri().path()).await)) }
            });
            requests(&mut child, service, kind, 8).await;
        }
    }
}

/// Calls `get_or_load` for stored values.
async fn loader(child: &mut Child, guard: StampedeGuard, kind: Kind) {
    let (keys, body) = (kind.keys(), kind.body());
    for key in &*keys {
        let value = body.clone();
        let load = || async { Ok::<_, String>(value) };
        guard.get_or_load(key.as_str(), load).await.expect("the first load");
    }
    let loads = guard.stats().loads;
    stretches(child, kind, |caller| {
        let (guard, keys, length) = (guard.clone(), Arc::clone(&keys), body.len());
        async move {
            for call in 0..kind.calls() {
                let load = || async { Err::<Bytes, _>("this is a hit".to_owned()) };
                let value = guard.get_or_load(kind.key(&keys, caller, call), load).await.expect("a hit");
                assert_eq!(black_box(value).len(), length);
            }
            assert_eq!(guard.stats().loads, loads, "every measured call was a hit");
        }
    })
    .await;
}

/// Reads the same values by GET.
async fn plain(child: &mut Child, connection: MultiplexedConnection, kind: Kind) {
    let (keys, length) = (kind.keys(), kind.body().len());
    stretches(child, kind, |caller| {
        let (mut connection, keys) = (connection.clone(), Arc::clone(&keys));
        async move {
            for call in 0..kind.calls() {
                let value = get(&mut connection, kind.key(&keys, caller, call)).await;
                assert_eq!(black_box(value).len(), length);
            }
        }
    })
    .await;
}

/// Sends requests through the layer for stored responses.
async fn layer(child: &mut Child, guard: StampedeGuard, kind: Kind) {
    let body = kind.body();
    let mut service = guard.layer(service_fn(move |_: Request<Full<Bytes>>| {
        let response = response(body.clone());
        async { Ok::<_, Infallible>(response) }
    }));
    for key in &*kind.keys() {
        let response = service.call(request(key)).await.expect("infallible");
        response.into_body().collect().await.expect("the first load");
    }
    // The body ends a moment before its entry is stored.
    while guard.stats().tasks > 0 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    // A hit has the eight stored headers, `Cache-Status`, and `Age`, which only a hit has.
    requests(child, service, kind, 10).await;
}

async fn requests<S, B>(child: &mut Child, service: S, kind: Kind, headers: usize)
where
    S: Service<Request<Full<Bytes>>, Response = Response<B>, Error = Infallible> + Clone + Send + 'static,
    S::Future: Send,
    B: http_body::Body<Data = Bytes, Error: std::fmt::Debug> + Unpin + Send + 'static,
{
    let (keys, length) = (kind.keys(), kind.body().len());
    stretches(child, kind, |caller| {
        let (mut service, keys) = (service.clone(), Arc::clone(&keys));
        async move {
            for call in 0..kind.calls() {
                let answer = service.call(request(kind.key(&keys, caller, call))).await;
                let mut response = answer.expect("infallible");
                let frame = response.body_mut().frame().await.expect("one frame").expect("whole");
                assert_eq!(frame.data_ref().map(Bytes::len), Some(length));
                assert_eq!(black_box(response).headers().len(), headers);
            }
        }
    })
    .await;
}

/// For each line that arrives, runs one stretch of calls of all callers.
async fn stretches<F>(child: &mut Child, kind: Kind, caller: impl Fn(usize) -> F)
where
    F: Future<Output = ()> + Send + 'static,
{
    child.ready();
    loop {
        child.recv_line().await;
        let (started, cpu, faults) = (Instant::now(), thread_cpu(), thread_faults());
        let callers: Vec<_> = (0..CALLERS).map(|number| tokio::spawn(caller(number))).collect();
        for caller in callers {
            caller.await.expect("a caller");
        }
        let calls = (CALLERS * kind.calls()) as f64;
        child.result(&Rate {
            calls: calls / started.elapsed().as_secs_f64(),
            cpu: (thread_cpu() - cpu) / calls,
            faults: (thread_faults() - faults) / calls,
        });
    }
}

/// The CPU time that this thread has used, in nanoseconds.
fn thread_cpu() -> f64 {
    let stat = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    stat.split(' ').next().and_then(|ns| ns.parse().ok()).unwrap_or(0.0)
}

/// The minor page faults of this thread (proc(5): the tenth field, which is the eighth after the name).
fn thread_faults() -> f64 {
    let stat = std::fs::read_to_string("/proc/thread-self/stat").unwrap_or_default();
    let after_name = stat.rsplit(") ").next().unwrap_or_default();
    after_name.split(' ').nth(7).and_then(|faults| faults.parse().ok()).unwrap_or(0.0)
}

fn request(url: &str) -> Request<Full<Bytes>> {
    let mut request = Request::new(Full::default());
    *request.uri_mut() = url.parse().expect("a path");
    request.headers_mut().insert(header::HOST, HeaderValue::from_static("shop.example"));
    request
}

/// The cheapest response with eight headers: nothing is parsed, and no value is copied.
fn response(body: Bytes) -> Response<Full<Bytes>> {
    // This is the current time, because a response that claims to be old is not stored.
    static DATE: LazyLock<HeaderValue> = LazyLock::new(|| {
        HeaderValue::try_from(httpdate::fmt_http_date(SystemTime::now())).expect("a date is printable")
    });
    const HEADERS: [(HeaderName, &str); 6] = [
        (header::CONTENT_TYPE, "application/json"),
        (header::CACHE_CONTROL, "public, max-age=3600"),
        (header::ETAG, "\"33a64df551425fcc55e4d42a148795d9f25f89d4\""),
        (header::LAST_MODIFIED, "Tue, 15 Nov 1994 12:45:26 GMT"),
        (header::CONTENT_LANGUAGE, "en"),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
    ];
    let mut headers = HeaderMap::with_capacity(HEADERS.len() + 2);
    headers.insert(header::DATE, DATE.clone());
    headers.insert(header::CONTENT_LENGTH, HeaderValue::from(body.len()));
    for (name, value) in HEADERS {
        headers.insert(name, HeaderValue::from_static(value));
    }
    let mut response = Response::new(Full::new(body));
    *response.headers_mut() = headers;
    response
}

/// Stores the values of the row's keys, and returns the connection that it used.
async fn filled(client: &redis::Client, kind: Kind) -> MultiplexedConnection {
    let mut connection = raw(client).await;
    for key in &*kind.keys() {
        let body = kind.body();
        redis::cmd("SET").arg(key).arg(&body[..]).exec_async(&mut connection).await.expect("SET");
    }
    connection
}

/// A connection of a control: the default of redis-rs, with TCP_NODELAY.
pub(crate) async fn raw(client: &redis::Client) -> MultiplexedConnection {
    let info = client.get_connection_info().clone();
    let tcp = info.tcp_settings().clone().set_nodelay(true);
    let client = redis::Client::open(info.set_tcp_settings(tcp)).expect("a valid address");
    client.get_multiplexed_async_connection().await.expect("connects")
}

async fn guard(client: redis::Client) -> StampedeGuard {
    // No value may expire during the measurement, and a machine that stalls for a moment must not turn a hit into
    // a load. All other settings are the defaults.
    let policy = Policy::builder()
        .fresh_for(Duration::from_secs(3600))
        .coordination_budget(Duration::from_secs(4))
        .command_timeout(Duration::from_secs(1))
        .lease(Duration::from_secs(4));
    let policy = policy.build().expect("valid");
    let guard = StampedeGuard::builder(client).policy(policy).build().expect("valid");
    guard.connect().await.expect("connects");
    guard
}
