//! Drops of the HTTP service's call, and of the body of its response.

use ::http::{Request, Response, StatusCode};
use bytes::Bytes;
use http_body_util::{BodyExt as _, Full, StreamBody};
use stampede_guard::http::Guarded;
use stampede_guard::{MemoryStore, Policy, StampedeGuard};
use tokio::task::JoinHandle;
use tokio::time::{Instant, advance, sleep};
use tower::ServiceExt as _;
use tower::util::BoxCloneSyncService;

use super::*;
use crate::support::gate::Counter;

const LOAD: Duration = Duration::from_millis(300);
const LEASE: Duration = Duration::from_secs(50);

type Req = Request<Full<Bytes>>;
type Body = http_body_util::combinators::UnsyncBoxBody<Bytes, std::io::Error>;
type Inner = BoxCloneSyncService<Req, Response<Body>, std::io::Error>;

/// A situation for the dropped call: the origin's response, the stored response, and the request.
#[derive(Clone, Copy, Debug)]
struct Situation {
    name: &'static str,
    status: u16,
    headers: &'static [(&'static str, &'static str)],
    method: &'static str,
    asks: &'static [(&'static str, &'static str)],
    /// The age of the stored response, if there is one.
    stored: Option<u64>,
    beside: Beside,
    /// How the origin sends its body.
    body: Pieces,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Beside {
    Nobody,
    Here,
    Elsewhere,
    Many,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Pieces {
    Whole,
    Streamed,
    Broken,
}

const PLAIN: Situation = Situation {
    name: "a cold resource",
    status: 200,
    headers: &[("cache-control", "max-age=10")],
    method: "GET",
    asks: &[],
    stored: None,
    beside: Beside::Nobody,
    body: Pieces::Whole,
};

const STALE: &[(&str, &str)] = &[("cache-control", "max-age=10, stale-while-revalidate=100")];
const ON_ERROR: &[(&str, &str)] = &[("cache-control", "max-age=10, stale-if-error=100")];
const VALIDATED: &[(&str, &str)] = &[("cache-control", "no-cache"), ("etag", "\"1\"")];
const PRIVATE: &[(&str, &str)] = &[("cache-control", "private")];
const VARYING: &[(&str, &str)] = &[("cache-control", "max-age=10"), ("vary", "accept-language")];

const SITUATIONS: [Situation; 26] = [
    PLAIN,
    Situation { name: "a fresh one", stored: Some(1), ..PLAIN },
    Situation { name: "an expired one", stored: Some(20), ..PLAIN },
    Situation { name: "a stale one", headers: STALE, stored: Some(20), ..PLAIN },
    Situation { name: "a stale one for errors", headers: ON_ERROR, stored: Some(20), ..PLAIN },
    Situation { name: "one to be validated", headers: VALIDATED, stored: Some(1), ..PLAIN },
    Situation { name: "a load here", beside: Beside::Here, ..PLAIN },
    Situation { name: "a load elsewhere", beside: Beside::Elsewhere, ..PLAIN },
    Situation { name: "many clients", beside: Beside::Many, ..PLAIN },
    Situation { name: "a streamed body", body: Pieces::Streamed, ..PLAIN },
    Situation { name: "a streamed body here", body: Pieces::Streamed, beside: Beside::Here, ..PLAIN },
    Situation {
        name: "a streamed body and many clients",
        body: Pieces::Streamed,
        beside: Beside::Many,
        ..PLAIN
    },
    Situation { name: "a body that breaks", body: Pieces::Broken, ..PLAIN },
    Situation {
        name: "a body that breaks, and many clients",
        body: Pieces::Broken,
        beside: Beside::Many,
        ..PLAIN
    },
    Situation { name: "a private one", headers: PRIVATE, ..PLAIN },
    Situation { name: "a private one and many clients", headers: PRIVATE, beside: Beside::Many, ..PLAIN },
    Situation { name: "a variant", headers: VARYING, asks: &[("accept-language", "de")], ..PLAIN },
    Situation { name: "a variant, stored", headers: VARYING, stored: Some(1), ..PLAIN },
    Situation { name: "a failure", status: 500, headers: &[], ..PLAIN },
    Situation {
        name: "a failure and many clients",
        status: 500,
        headers: &[],
        beside: Beside::Many,
        ..PLAIN
    },
    Situation { name: "a HEAD", method: "HEAD", ..PLAIN },
    Situation { name: "a POST", method: "POST", stored: Some(1), ..PLAIN },
    Situation { name: "a POST during a load", method: "POST", beside: Beside::Elsewhere, ..PLAIN },
    Situation { name: "a forced reload", asks: &[("cache-control", "no-cache")], stored: Some(1), ..PLAIN },
    Situation { name: "a range", asks: &[("range", "bytes=0-1")], stored: Some(1), ..PLAIN },
    Situation {
        name: "credentials",
        asks: &[("authorization", "Basic eA==")],
        beside: Beside::Here,
        ..PLAIN
    },
];

fn inner(situation: Situation, loads: &Counter) -> Inner {
    let loads = loads.clone();
    BoxCloneSyncService::new(tower::service_fn(move |_: Req| {
        let loads = loads.clone();
        async move {
            let running = loads.start();
            sleep(LOAD / 2).await;
            let mut response = Response::builder().status(situation.status);
            for (name, value) in situation.headers {
                response = response.header(*name, *value);
            }
            let pieces = futures_util::stream::unfold((running, 0), move |(running, n)| async move {
                let slow = situation.body != Pieces::Whole;
                if slow {
                    sleep(LOAD / 6).await;
                }
                let piece = match (n, situation.body) {
                    (3, _) | (1, Pieces::Whole) => return None,
                    (2, Pieces::Broken) => Err(std::io::Error::other("scripted")),
                    _ => Ok(http_body::Frame::data(Bytes::from_static(b"part"))),
                };
                Some((piece, (running, n + 1)))
            });
            Ok(response.body(StreamBody::new(pieces).boxed_unsync()).expect("a response"))
        }
    }))
}

struct World {
    nodes: [(StampedeGuard, Guarded<Inner>); 2],
    loads: Counter,
    beside: Vec<JoinHandle<()>>,
}

fn request(method: &str, headers: &[(&str, &str)]) -> Req {
    let mut request = Request::builder().method(method).uri("http://host/resource");
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    request.body(Full::default()).expect("a request")
}

/// Sends a request and reads the whole response.
async fn ask(service: Guarded<Inner>, request: Req) -> Option<StatusCode> {
    let response = service.oneshot(request).await.ok()?;
    let status = response.status();
    response.into_body().collect().await.ok().map(|_| status)
}

impl World {
    async fn new(situation: Situation) -> Self {
        let (store, loads) = (MemoryStore::new(), Counter::default());
        let policy = Policy::builder().ttl_jitter(0.0).lease(LEASE).load_timeout(Duration::from_secs(20));
        let policy = policy.build().expect("valid");
        let node = || {
            let guard = StampedeGuard::builder(store.clone()).policy(policy.clone()).build().expect("valid");
            let service = tower::Layer::layer(&guard, inner(situation, &loads));
            (guard, service)
        };
        let mut world = Self { nodes: [node(), node()], loads: loads.clone(), beside: Vec::new() };
        if let Some(age) = situation.stored {
            let mut first = ask(world.nodes[1].1.clone(), request("GET", situation.asks)).await;
            if first.is_none() {
                first = Some(StatusCode::OK);
            }
            assert!(first.is_some());
            advance(Duration::from_secs(age)).await;
        }
        let beside: &[usize] = match situation.beside {
            Beside::Nobody => &[],
            Beside::Here => &[0],
            Beside::Elsewhere => &[1],
            Beside::Many => &[1, 0, 0, 1, 1],
        };
        for &node in beside {
            let call = ask(world.nodes[node].1.clone(), request("GET", situation.asks));
            world.beside.push(tokio::spawn(async move {
                let _ = call.await;
            }));
            sleep(ms(1)).await;
        }
        world
    }

    async fn ends_as_before(self, what: &str, situation: Situation) {
        for begun in self.beside {
            begun.await.expect("joined");
        }
        // A background load may still be running.
        sleep(LOAD * 3).await;
        self.loads.idle().await;
        sleep(ms(20)).await;
        for (guard, _) in &self.nodes {
            let stats = guard.stats();
            assert_eq!((stats.flights, stats.tasks), (0, 0), "{what}: {stats:?}");
        }
        for (_, service) in &self.nodes {
            let started = Instant::now();
            let newcomer = ask(service.clone(), request("GET", &[("cache-control", "no-cache")])).await;
            match situation.body {
                Pieces::Broken => {}
                _ => assert_eq!(newcomer.map(|status| status.as_u16()), Some(situation.status), "{what}"),
            }
            assert!(started.elapsed() <= LOAD * 2, "{what}: {:?}", started.elapsed());
            sleep(LOAD).await;
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_request_that_is_dropped_anywhere_leaves_nothing() {
    let mut drops = 0;
    for situation in SITUATIONS {
        let name = situation.name;
        drops += at_every_poll(name, async |drop| {
            let world = World::new(situation).await;
            let call = ask(world.nodes[0].1.clone(), request(situation.method, situation.asks));
            let done = dropped(drop, call).await.is_some();
            world.ends_as_before(&format!("{name}, {drop:?}"), situation).await;
            done
        })
        .await;
    }
    println!("{drops} drops in {} situations", SITUATIONS.len());
    assert!(drops > SITUATIONS.len() * 2, "{drops} drops are no matrix");
}

/// The client reads the head of the response, and drops the body unread, at once or later.
#[tokio::test(start_paused = true)]
async fn an_unread_body_leaves_nothing() {
    for situation in SITUATIONS {
        for unread in [ms(0), LOAD / 4, LOAD * 4] {
            let world = World::new(situation).await;
            let call = world.nodes[0].1.clone().oneshot(request(situation.method, situation.asks));
            let response = call.await.expect("a response");
            sleep(unread).await;
            drop(response);
            world.ends_as_before(&format!("{}, unread for {unread:?}", situation.name), situation).await;
        }
    }
}
