//! The promises over HTTP with four real processes on one real Redis, and fifty clients at each process.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::Poll;
use std::time::{Duration, Instant};

use axum::Router;
use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};
use bytes::Bytes;
use futures_util::future::{BoxFuture, join_all};
use http::StatusCode;
use http_body_util::{BodyExt as _, Full};
use serde::{Deserialize, Serialize};
use stampede_guard::StampedeGuard;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

use super::kit::{policy, secs};
use super::sockets::client;
use super::stampede;
use crate::support::origin::{self, Answer, Origin};
use crate::support::probe::{assert_nothing_left, eventually_eq};
use crate::support::processes::{Child, Fleet, Report, Role};
use crate::support::redis_server::RedisServer;

pub(crate) const ROLES: &[Role] = &[("http.serve", serve)];

pub(super) const PROCESSES: usize = 4;
pub(super) const CLIENTS: usize = 50;
const MAX_BODY: usize = 64 * 1024;
/// As in `fleet`, nothing must time out, although the machine is very busy.
const LEASE: Duration = Duration::from_secs(8);

#[derive(Serialize, Deserialize)]
struct Config {
    redis: String,
    origin: String,
}

/// One process: an axum server whose handler loads from the test's origin.
fn serve(mut child: Child) -> BoxFuture<'static, ()> {
    Box::pin(async move {
        let config: Config = child.config();
        let client = redis::Client::open(config.redis.as_str()).expect("an address");
        let patient = policy().coordination_budget(LEASE).command_timeout(LEASE / 4).lease(LEASE);
        let patient = patient.max_body(MAX_BODY).build().expect("valid");
        let guard = StampedeGuard::builder(client).policy(patient).build().expect("valid");
        crate::redis::connects(&guard).await;
        let arrived = Arc::<AtomicUsize>::default();
        let app =
            Router::new().fallback(handle).with_state(config.origin).layer(guard.clone()).layer(
                axum::middleware::from_fn_with_state((arrived, guard.clone(), child.report()), arrive),
            );
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.expect("a free port");
        let addr = listener.local_addr().expect("bound");
        tokio::spawn(async move { axum::serve(listener, app).await });
        child.report().event_with("addr", &addr.to_string());
        child.wait_go().await;
        let deadline = tokio::time::Instant::now() + secs(60);
        // A flight may stay for up to a lease while another process refreshes.
        let is_busy = || guard.stats().tasks > 0 || guard.stats().flights > 0;
        while is_busy() && tokio::time::Instant::now() < deadline {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        child.result(&(guard.stats().flights, guard.stats().tasks));
    })
}

/// Reports to the parent once all clients of this process wait for the one load.
async fn arrive(
    State((arrived, guard, report)): State<(Arc<AtomicUsize>, StampedeGuard, Report)>,
    request: Request,
    next: Next,
) -> Response {
    let is_of_the_wave = request.headers().contains_key("x-client");
    let mut response = Box::pin(next.run(request));
    // Polls until the look-up is in flight. Otherwise this request could begin its look-up after the load has ended, and begin another
    // load.
    let answer = futures_util::poll!(&mut response);
    if is_of_the_wave && arrived.fetch_add(1, Ordering::SeqCst) + 1 == CLIENTS {
        tokio::spawn(async move {
            // The request's read may wait behind a read in flight. A command that is sent after both is answered after both.
            for _ in 0..3 {
                guard.get::<Bytes>("all are here").await.expect("answered");
            }
            report.event("arrived");
        });
    }
    match answer {
        Poll::Ready(response) => response,
        Poll::Pending => response.await,
    }
}

/// Answers in the form that the path names, with the text that the client sent.
async fn handle(State(origin): State<String>, request: Request) -> Response {
    let (head, _) = request.into_parts();
    let outcome = head.uri.path().trim_start_matches('/').to_owned();
    if let Some(answer) = stampede::answer(&origin, &outcome, &head.headers).await {
        return answer;
    }
    let client = head.headers["x-client"].to_str().expect("a number").to_owned();
    origin::load(&origin, &outcome).await.expect("the origin answers");
    match outcome.as_str() {
        "ok" => client.into_response(),
        "missing" => (StatusCode::NOT_FOUND, client).into_response(),
        "failure" => (StatusCode::INTERNAL_SERVER_ERROR, client).into_response(),
        "cookie" => ([("set-cookie", format!("client={client}"))], client).into_response(),
        "private" => ([("cache-control", "private")], client).into_response(),
        "long" => (" ".repeat(MAX_BODY + 1) + &client).into_response(),
        _ => panic!("no such outcome: {outcome}"),
    }
}

/// What one client received: its number, the status, its cookie, and the text without padding. The text is `None` if the body broke, and
/// the status is 0 if not even the head arrived.
pub(super) type Saw = (usize, u16, Option<String>, Option<String>);

/// A fleet with its store and its origin.
pub(super) struct Servers {
    pub(super) origin: Origin,
    redis: RedisServer,
    fleet: Fleet,
    pub(super) addrs: Vec<String>,
}

impl Servers {
    pub(super) async fn start() -> Self {
        let (redis, origin) = (RedisServer::start(), Origin::start().await);
        let config = Config { redis: redis.minimal_user(), origin: origin.addr() };
        let fleet = Fleet::spawn(PROCESSES, "http.serve", &config);
        let mut addrs = Vec::new();
        for member in fleet.members() {
            addrs.push(member.wait_event("addr").await.as_str().expect("text").to_owned());
        }
        Self { origin, redis, fleet, addrs }
    }

    /// Sends all clients' requests, each with its header from `with`.
    pub(super) async fn send(
        &self,
        outcome: &str,
        with: impl Fn(usize) -> (&'static str, &'static str),
    ) -> Vec<JoinHandle<Saw>> {
        let clients = (0..PROCESSES * CLIENTS).map(|n| {
            // The key contains the `Host`, so all processes are reached by one name.
            let request = http::Request::get(format!("http://{}/{outcome}", self.addrs[n % PROCESSES]))
                .header("host", "shop.example")
                .header("x-client", n);
            let (name, value) = with(n);
            let request = request.header(name, value).body(Full::<Bytes>::default()).unwrap();
            tokio::spawn(async move {
                // If the body breaks at once, the server may close the connection before the head arrives.
                let Ok(response) = client().request(request).await else { return (n, 0, None, None) };
                let (head, body) = response.into_parts();
                let cookie = head.headers.get("set-cookie").map(|cookie| cookie.to_str().unwrap().to_owned());
                let body = body.collect().await.ok().map(|body| body.to_bytes());
                let text = body.map(|body| String::from_utf8(body.into()).unwrap().trim_start().to_owned());
                (n, head.status.as_u16(), cookie, text)
            })
        });
        let clients = clients.collect();
        for member in self.fleet.members() {
            member.wait_event("arrived").await;
        }
        clients
    }

    /// Waits until each process but the leader's has queued for the one lease.
    pub(super) async fn all_wait(&self) {
        let queued = async || {
            let queues = self.redis.keys().into_iter().filter(|key| key.starts_with("sg1:q:"));
            queues.map(|key| self.redis.run::<usize>(&["LLEN", &key])).sum::<usize>()
        };
        eventually_eq("all processes wait", secs(30), PROCESSES - 1, queued).await;
    }

    /// Waits until no key and no task is left, and returns all answers.
    pub(super) async fn end(&self, clients: Vec<JoinHandle<Saw>>, outcome: &str) -> Vec<Saw> {
        let released = Instant::now();
        let saw = join_all(clients).await.into_iter().map(|saw| saw.unwrap()).collect();
        println!("{outcome}: the last of {} clients after {:?}", PROCESSES * CLIENTS, released.elapsed());
        self.fleet.go();
        for left in self.fleet.results::<(u64, u64)>().await {
            assert_eq!(left, (0, 0), "flights and tasks");
        }
        assert_nothing_left(&self.redis, secs(60)).await;
        saw
    }
}

/// Sends one wave of all clients. Returns their answers, and the number of loads at the origin.
async fn wave(outcome: &str) -> (Vec<Saw>, usize) {
    let servers = Servers::start().await;
    servers.origin.script(outcome, [Answer::value("v").held().after(Duration::from_millis(100))]);
    let clients = servers.send(outcome, |_| ("x-like", "all")).await;
    servers.all_wait().await;
    servers.origin.wait_for_loads(outcome, 1).await;
    assert_eq!(servers.origin.loads(outcome), 1);
    servers.origin.release(outcome);
    let saw = servers.end(clients, outcome).await;
    (saw, servers.origin.loads(outcome))
}

async fn is_one_load(outcome: &str, status: u16) {
    let (saw, loads) = wave(outcome).await;
    assert_eq!(loads, 1, "{outcome}");
    let texts: BTreeSet<_> = saw.iter().map(|(_, status, cookie, text)| (*status, cookie, text)).collect();
    assert_eq!(texts.len(), 1, "{texts:?}");
    assert!(saw.iter().all(|(_, have, cookie, _)| *have == status && cookie.is_none()));
}

async fn is_each_ones_own(outcome: &str) {
    let (saw, loads) = wave(outcome).await;
    assert_eq!(loads, PROCESSES * CLIENTS, "{outcome}");
    for (n, status, cookie, text) in saw {
        assert_eq!((status, text), (200, Some(n.to_string())), "client {n} saw another's");
        let own = (outcome == "cookie").then(|| format!("client={n}"));
        assert_eq!(cookie, own, "client {n}");
    }
}

#[tokio::test]
async fn a_200_is_one_load_for_two_hundred_clients_of_four_processes() {
    is_one_load("ok", 200).await;
}

#[tokio::test]
async fn a_404_is_one_load_for_two_hundred_clients_of_four_processes() {
    is_one_load("missing", 404).await;
}

#[tokio::test]
async fn a_500_is_one_load_for_two_hundred_clients_of_four_processes() {
    is_one_load("failure", 500).await;
}

#[tokio::test]
async fn a_response_with_a_cookie_is_each_clients_own_in_four_processes() {
    is_each_ones_own("cookie").await;
}

#[tokio::test]
async fn a_private_response_is_each_clients_own_in_four_processes() {
    is_each_ones_own("private").await;
}

#[tokio::test]
async fn a_response_over_max_body_is_each_clients_own_in_four_processes() {
    is_each_ones_own("long").await;
}

/// A process is killed in the middle of a load: the others wait for its lease, and one of them loads.
#[tokio::test]
async fn a_process_killed_during_a_load_costs_one_lease_and_one_load() {
    let (server, origin) = (RedisServer::start(), Origin::start().await);
    origin.script("ok", [Answer::value("v").held()]);
    let fleet =
        Fleet::spawn(2, "http.serve", &Config { redis: server.minimal_user(), origin: origin.addr() });
    let mut addrs = Vec::new();
    for member in fleet.members() {
        addrs.push(member.wait_event("addr").await.as_str().expect("text").to_owned());
    }
    let ask = |addr: &str, n: usize| {
        let request = http::Request::get(format!("http://{addr}/ok")).header("host", "shop.example");
        let request = request.header("x-client", n).body(Full::<Bytes>::default()).unwrap();
        tokio::spawn(async move {
            let response = client().request(request).await.ok()?;
            let status = response.status().as_u16();
            Some((status, response.into_body().collect().await.ok()?.to_bytes()))
        })
    };
    let lost = ask(&addrs[0], 0);
    origin.wait_for_loads("ok", 1).await;
    let others: Vec<_> = (1..=CLIENTS).map(|n| ask(&addrs[1], n)).collect();
    fleet.member(1).wait_event("arrived").await;
    fleet.member(0).kill();
    let killed = Instant::now();
    assert!(lost.await.unwrap().is_none());
    origin.wait_for_loads("ok", 2).await;
    assert!(killed.elapsed() < LEASE + secs(6), "one lease: {:?}", killed.elapsed());
    origin.release("ok");
    let saw: BTreeSet<_> =
        join_all(others).await.into_iter().map(|one| one.unwrap().expect("an answer")).collect();
    assert_eq!((saw.len(), saw.first().unwrap().0), (1, 200));
    assert_eq!(origin.loads("ok"), 2);
    fleet.go();
    assert_eq!(fleet.results::<(u64, u64)>().await, [(0, 0)]);
    assert_nothing_left(&server, secs(60)).await;
}
