//! What a hit costs over the plain GET that it can not do without.
//!
//! One thread, 64 callers at once, 1 KiB: the client's CPU is the limit, so a ratio of throughputs is a ratio of
//! CPU times. Guard and control take turns on the same runtime and server, each on a connection of its own with
//! TCP_NODELAY; who goes first alternates too. A row is the median of nine such pairs.

use std::convert::Infallible;
use std::future::Future;
use std::hint::black_box;
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant, SystemTime};

use bytes::Bytes;
use http::header::{self, HeaderMap, HeaderName, HeaderValue};
use http::{Request, Response};
use http_body_util::{BodyExt as _, Full};
use redis::aio::MultiplexedConnection;
use stampede_guard::{Policy, StampedeGuard};
use tower::{Layer as _, Service as _, service_fn};

use crate::support::redis_server::RedisServer;
use crate::table::{Limit, Row, Spread, Table, Unit};

const CALLERS: usize = 64;
const PAIRS: usize = 9;
/// Calls of one caller in one half of a pair, for 1 KiB: about half a second.
const CALLS: usize = 1_500;
/// No two callers ask for one key at once: that would be joined, and too good.
const KEYS_PER_CALLER: usize = 16;
const BODY: usize = 1024;

/// A row about hits through the layer.
struct Layered {
    name: &'static str,
    what: &'static str,
    /// 0: one key for all.
    keys_per_caller: usize,
    body: usize,
    calls: usize,
    must: f64,
    aim: f64,
}

const LAYER: Layered = Layered {
    name: "hit",
    what: "hit: `guard.layer(service_fn)`, 8 headers / a `service_fn` that does the raw GET",
    keys_per_caller: KEYS_PER_CALLER,
    body: BODY,
    calls: CALLS,
    must: 0.80,
    aim: 0.92,
};

const LARGE: Layered = Layered {
    name: "large",
    what: "hit: the same with 100 KiB",
    keys_per_caller: 2,
    body: 100 * 1024,
    calls: CALLS / 10,
    must: 0.90,
    aim: 0.95,
};

const HOT: Layered = Layered {
    name: "hot",
    what: "hit: one hot key through the layer / the same control on that key",
    keys_per_caller: 0,
    body: BODY,
    calls: CALLS,
    must: 2.0,
    aim: 3.0,
};

pub(crate) fn loads(table: &mut Table) {
    on_one_thread(async |server| loader(table, server).await);
}

pub(crate) fn layer(table: &mut Table) {
    on_one_thread(async |server| layered(table, server, &LAYER).await);
}

pub(crate) fn large(table: &mut Table) {
    on_one_thread(async |server| layered(table, server, &LARGE).await);
}

pub(crate) fn hot(table: &mut Table) {
    on_one_thread(async |server| layered(table, server, &HOT).await);
}

fn on_one_thread(rows: impl AsyncFnOnce(&RedisServer)) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime.block_on(async { rows(&RedisServer::start()).await });
}

async fn loader(table: &mut Table, server: &RedisServer) {
    let keys: Arc<[String]> = (0..CALLERS * KEYS_PER_CALLER).map(|n| format!("user-{n:06}")).collect();
    let value = Bytes::from(vec![b'v'; BODY]);
    let mut connection = raw(server).await;
    let guard = guard(server).await;
    for key in &*keys {
        set(&mut connection, key, &value).await;
        let value = value.clone();
        let load = || async { Ok::<_, String>(value) };
        guard.get_or_load(key.as_str(), load).await.expect("the first load");
    }

    let ours = |caller: usize| {
        let (guard, keys) = (guard.clone(), Arc::clone(&keys));
        async move {
            for call in 0..CALLS {
                let key = &*keys[key_of(caller, call, KEYS_PER_CALLER)];
                let load = || async { Err::<Bytes, _>("this is a hit".to_owned()) };
                let value = guard.get_or_load(key, load).await.expect("a hit");
                assert_eq!(black_box(value).len(), BODY);
            }
        }
    };
    let control = |caller: usize| {
        let (mut connection, keys) = (connection.clone(), Arc::clone(&keys));
        async move {
            for call in 0..CALLS {
                let key = &keys[key_of(caller, call, KEYS_PER_CALLER)];
                let value: Bytes =
                    redis::cmd("GET").arg(key).query_async(&mut connection).await.expect("GET");
                assert_eq!(black_box(value).len(), BODY);
            }
        }
    };
    let (ratio, detail) = pairs(CALLS, ours, control).await;
    assert_eq!(guard.stats().loads, keys.len() as u64, "every measured call was a hit");
    table.add(Row {
        what: "hit: `get_or_load` of `Bytes` / raw GET, 1 KiB, 64 callers, distinct keys".into(),
        unit: Unit::Ratio,
        must: Limit::AtLeast(0.85),
        aim: Limit::AtLeast(0.93),
        measured: ratio,
        detail,
    });
}

async fn layered(table: &mut Table, server: &RedisServer, row: &Layered) {
    let Layered { name, what, keys_per_caller, body: length, calls, must, aim } = *row;
    let urls: Arc<[String]> =
        (0..CALLERS * keys_per_caller.max(1)).map(|n| format!("/{name}/{n:06}")).collect();
    let value = Bytes::from(vec![b'v'; length]);
    let mut connection = raw(server).await;
    let guard = guard(server).await;
    let body = value.clone();
    let inner = service_fn(move |_: Request<Full<Bytes>>| {
        let response = response(body.clone());
        async { Ok::<_, Infallible>(response) }
    });
    let mut service = guard.layer(inner);
    for url in &*urls {
        set(&mut connection, url, &value).await;
        let response = service.call(request(url)).await.expect("infallible");
        response.into_body().collect().await.expect("the first load");
    }
    // An entry is stored when its body has been read to the end, which is a moment before.
    while guard.stats().tasks > 0 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let loads = guard.stats().loads;

    let ours = |caller: usize| {
        let (mut service, urls) = (service.clone(), Arc::clone(&urls));
        async move {
            for call in 0..calls {
                let url = &urls[key_of(caller, call, keys_per_caller)];
                let mut response = service.call(request(url)).await.expect("infallible");
                let frame = response.body_mut().frame().await.expect("one frame").expect("whole");
                assert_eq!(frame.data_ref().map(Bytes::len), Some(length));
                assert_eq!(
                    response.headers().len(),
                    10,
                    "eight, and Age and Cache-Status: {:?}",
                    response.headers()
                );
            }
        }
    };
    let control = |caller: usize| {
        let (connection, urls) = (connection.clone(), Arc::clone(&urls));
        let mut service = service_fn(move |request: Request<Full<Bytes>>| {
            let mut connection = connection.clone();
            async move {
                let key = request.uri().path();
                let body = redis::cmd("GET").arg(key).query_async(&mut connection).await.expect("GET");
                Ok::<_, Infallible>(response(body))
            }
        });
        async move {
            for call in 0..calls {
                let url = &urls[key_of(caller, call, keys_per_caller)];
                let mut response = service.call(request(url)).await.expect("infallible");
                let frame = response.body_mut().frame().await.expect("one frame").expect("whole");
                assert_eq!(frame.data_ref().map(Bytes::len), Some(length));
                assert_eq!(black_box(response).headers().len(), 8);
            }
        }
    };
    let (ratio, detail) = pairs(calls, ours, control).await;
    assert_eq!(guard.stats().loads, loads, "every measured call was a hit");
    table.add(Row {
        what: what.into(),
        unit: Unit::Ratio,
        must: Limit::AtLeast(must),
        aim: Limit::AtLeast(aim),
        measured: ratio,
        detail,
    });
}

/// Median ratio of throughputs, and what to print beside it.
async fn pairs<O, C>(calls: usize, ours: impl Fn(usize) -> O, control: impl Fn(usize) -> C) -> (f64, String)
where
    O: Future<Output = ()> + Send + 'static,
    C: Future<Output = ()> + Send + 'static,
{
    let (mut ratios, mut rates, mut costs) = (Vec::new(), Vec::new(), Vec::new());
    // One pair to warm up: caches, allocator, the server's own tables.
    for pair in 0..=PAIRS {
        let (ours, control) = if pair % 2 == 0 {
            let control = rate(calls, &control).await;
            (rate(calls, &ours).await, control)
        } else {
            (rate(calls, &ours).await, rate(calls, &control).await)
        };
        if pair > 0 {
            ratios.push(ours.calls / control.calls);
            rates.push(ours.calls / 1e3);
            costs.push(ours.cpu - control.cpu);
        }
    }
    let (ratios, rates, costs) = (Spread::of(&ratios), Spread::of(&rates), Spread::of(&costs));
    (ratios.median, format!("{ratios}; {:.0} k/s; CPU per call {:+.0} ns", rates.median, costs.median))
}

struct Rate {
    /// Per second, of all callers together.
    calls: f64,
    /// Nanoseconds of this thread per call, which a busy neighbour does not change; zero where it is not known.
    cpu: f64,
}

async fn rate<F>(calls: usize, caller: impl Fn(usize) -> F) -> Rate
where
    F: Future<Output = ()> + Send + 'static,
{
    let (started, cpu) = (Instant::now(), thread_cpu());
    let callers: Vec<_> = (0..CALLERS).map(|number| tokio::spawn(caller(number))).collect();
    for caller in callers {
        caller.await.expect("a caller");
    }
    let calls = (CALLERS * calls) as f64;
    Rate { calls: calls / started.elapsed().as_secs_f64(), cpu: (thread_cpu() - cpu) / calls }
}

/// Nanoseconds that this thread has run.
fn thread_cpu() -> f64 {
    let stat = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    stat.split(' ').next().and_then(|ns| ns.parse().ok()).unwrap_or(0.0)
}

fn key_of(caller: usize, call: usize, keys_per_caller: usize) -> usize {
    if keys_per_caller == 0 { 0 } else { caller * keys_per_caller + call % keys_per_caller }
}

fn request(url: &str) -> Request<Full<Bytes>> {
    let mut request = Request::new(Full::default());
    *request.uri_mut() = url.parse().expect("a path");
    request.headers_mut().insert(header::HOST, HeaderValue::from_static("shop.example"));
    request
}

/// As cheap as a response with eight headers gets: nothing is parsed, no value is copied.
fn response(body: Bytes) -> Response<Full<Bytes>> {
    // The origin's clock: a response that claims to be old is not stored.
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

/// The control's connection: as redis-rs opens it, but for TCP_NODELAY.
pub(crate) async fn raw(server: &RedisServer) -> MultiplexedConnection {
    let info = server.client().get_connection_info().clone();
    let tcp = info.tcp_settings().clone().set_nodelay(true);
    let client = redis::Client::open(info.set_tcp_settings(tcp)).expect("a valid address");
    client.get_multiplexed_async_connection().await.expect("connects")
}

async fn guard(server: &RedisServer) -> StampedeGuard {
    // Nothing may expire while it is measured, and a machine that stalls for a moment must not turn a hit into
    // a load. All else is the default.
    let policy = Policy::builder()
        .fresh_for(Duration::from_secs(3600))
        .coordination_budget(Duration::from_secs(4))
        .command_timeout(Duration::from_secs(1))
        .lease(Duration::from_secs(4));
    let policy = policy.build().expect("valid");
    let guard = StampedeGuard::builder(server.client()).policy(policy).build().expect("valid");
    guard.connect().await.expect("connects");
    guard
}

async fn set(connection: &mut MultiplexedConnection, key: &str, value: &Bytes) {
    redis::cmd("SET").arg(key).arg(&value[..]).exec_async(connection).await.expect("SET");
}
