//! The lab: all its parts, and what one can do to them.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use axum::body::Bytes;
use axum::http::Request;
use http_body_util::{BodyExt as _, Empty};
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use serde_json::{Map, Value, json};
use stampede_guard::MemoryStore;
use tokio::net::TcpListener;
use tokio::sync::{Mutex, watch};

use crate::board::Board;
use crate::controls::{Controls, Mode};
use crate::fleet::{Backing, Fleet, Parts};
use crate::history::History;
use crate::load::Generator;
use crate::origin::Origin;
use crate::processes::reaper::Reaper;
use crate::processes::redis_server::RedisServer;
use crate::proxy::Gate;
use crate::replica::AUTHORITY;
use crate::replica::plain_cache::PlainMemory;
use crate::store::{Address, Kind, Store};
use crate::story::{Story, grouped, number, report, seconds};

/// An invalidation waits for processes that do not answer, and then for a server that does not.
const INVALIDATION: Duration = Duration::from_secs(15);

pub(crate) struct Lab {
    /// Distinguishes one run of the lab from another.
    pub(crate) run: String,
    pub(crate) board: Arc<Board>,
    pub(crate) story: Arc<Story>,
    pub(crate) controls: watch::Sender<Controls>,
    pub(crate) origin: Arc<Origin>,
    pub(crate) origin_address: String,
    pub(crate) fleet: Arc<Fleet>,
    pub(crate) store: Arc<Store>,
    history: Arc<History>,
    /// A part of every path.
    pub(crate) version: Arc<AtomicU64>,
    /// Whether the load generator sends requests.
    pub(crate) runs: watch::Sender<bool>,
    /// Held while the fleet or Redis is changed, so that changes come one after the other.
    changing: Mutex<()>,
    reaper: Arc<Reaper>,
}

impl Lab {
    /// Starts Redis if need be, the origin, the replicas and the load.
    pub(crate) async fn start(logs: bool) -> Result<Arc<Self>, String> {
        let run = format!("{:06x}", fastrand::u32(..1 << 24));
        let io = |what: &'static str| move |error: std::io::Error| format!("{what}: {error}");
        let reaper = Arc::new(Reaper::start().map_err(io("the lab can not start a second process"))?);
        let controls = watch::channel(Controls::default()).0;
        let board = Arc::new(Board::new());
        let story = Story::new(board.clone(), controls.subscribe());
        let (kind, text, backing) = backing(&reaper).await?;
        let store = Arc::new(Store::new(kind, text, board.clone(), story.clone()));

        let origin = Origin::new(controls.subscribe(), board.clone(), story.clone());
        let listener =
            TcpListener::bind(("127.0.0.1", 0)).await.map_err(io("no free port for the origin"))?;
        let origin_address = listener.local_addr().map_err(io("the origin's port"))?.to_string();
        let serving = axum::serve(listener, origin.router());
        tokio::spawn(async move { serving.await });

        let settings = controls.borrow().for_replica();
        let fleet = Fleet::new(Parts {
            board: board.clone(),
            story: story.clone(),
            origin: origin.clone(),
            origin_address: origin_address.clone(),
            // A namespace of this run, so that it neither finds nor leaves anything in a shared Redis: all keys expire.
            namespace: format!("lab-{run}"),
            reaper: reaper.clone(),
            backing,
            logs,
            settings,
        });
        let history = History::start(
            board.clone(),
            story.clone(),
            controls.subscribe(),
            origin.clone(),
            fleet.clone(),
            store.clone(),
        );
        let (version, runs) = (Arc::new(AtomicU64::new(1)), watch::channel(true).0);
        let lab = Arc::new(Self {
            run,
            board,
            story,
            controls,
            origin,
            origin_address,
            fleet,
            store,
            history,
            version,
            runs,
            changing: Mutex::new(()),
            reaper,
        });
        let replicas = lab.controls.borrow().replicas as usize;
        lab.fleet.scale(replicas).await?;
        lab.fleet.all_up().await?;
        Generator::start(
            lab.board.clone(),
            lab.controls.subscribe(),
            lab.fleet.targets(),
            lab.version.clone(),
            lab.runs.subscribe(),
        );
        lab.story.say(lab.welcome());
        Ok(lab)
    }

    fn welcome(&self) -> String {
        let Controls { requests_per_second, replicas, keys, .. } = *self.controls.borrow();
        format!(
            "{requests_per_second} requests a second for {keys} reports, through {replicas} replicas. Run a preset, or turn the guard off."
        )
    }

    /// Changes settings, and reports it.
    pub(crate) async fn control(&self, changes: &Map<String, Value>) -> Result<String, String> {
        let before = self.controls.borrow().clone();
        self.set(changes).await?;
        let text = describe(&before, &self.controls.borrow());
        if text.is_empty() { Ok("Nothing has changed.".to_owned()) } else { Ok(self.story.say(text)) }
    }

    /// Changes settings.
    pub(crate) async fn set(&self, changes: &Map<String, Value>) -> Result<(), String> {
        let _changing = self.changing.lock().await;
        let before = self.controls.borrow().clone();
        let after = before.changed(changes)?;
        self.controls.send_replace(after.clone());
        self.fleet.settings.send_replace(after.for_replica());
        if after.replicas != before.replicas {
            self.fleet.scale(after.replicas as usize).await?;
        }
        Ok(())
    }

    /// Begins a new version, of which no key is cached.
    pub(crate) fn new_version(&self) -> u64 {
        self.version.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Does something to a replica: `"what"` to `"replica"`, a number or `"leader"`.
    pub(crate) async fn fault(&self, fields: &Map<String, Value>) -> Result<String, String> {
        let _changing = self.changing.lock().await;
        let what = fields.get("what").and_then(Value::as_str).unwrap_or_default();
        if !self.fleet.in_processes() {
            return Err("the replicas are tasks of one process, because there is no Redis: install redis-server, and start the lab \
                        again"
                .to_owned());
        }
        let id = match fields.get("replica") {
            Some(Value::String(leader)) if leader == "leader" => self.fleet.leader().await?,
            Some(Value::Number(id)) => id.as_u64().unwrap_or(0) as usize,
            other => {
                let other = other.cloned().unwrap_or_default();
                return Err(format!("replica is {other}: choose its number, or \"leader\""));
            }
        };
        match what {
            "kill" => self.fleet.kill(id).await,
            "pause" => self.fleet.pause(id),
            "resume" => self.fleet.resume(id),
            "cut" => self.fleet.set_gate(id, Gate::Silent),
            "slow" => match fields.get("ms").and_then(Value::as_u64) {
                Some(ms @ 1..=10_000) => self.fleet.set_gate(id, Gate::Slow(Duration::from_millis(ms))),
                _ => Err("slow needs \"ms\", from 1 to 10000".to_owned()),
            },
            "heal" => self.fleet.set_gate(id, Gate::Open),
            "start" => match self.fleet.start_again(id).await {
                Ok(()) => Ok(self.story.say(format!("Replica {id} starts again."))),
                Err(error) => Err(error),
            },
            _ => Err(format!("`{what}` is unknown: choose kill, pause, resume, cut, slow, heal or start")),
        }
    }

    pub(crate) async fn redis(&self, what: &str) -> Result<String, String> {
        let _changing = self.changing.lock().await;
        self.store.act(what, &self.fleet).await
    }

    /// Invalidates a report through a replica, or all of them by a new version. Returns the sentence and the time it took.
    pub(crate) async fn invalidate(&self, name: &str) -> Result<(String, u64), String> {
        if name == "*" {
            let version = self.new_version();
            let reports = number(self.controls.borrow().keys, "report", "reports");
            let text = format!("Version {version} is out: nothing of its {reports} is cached.");
            return Ok((self.story.say(text), 0));
        }
        let key = self.key(name)?;
        let port = self.fleet.any_up().ok_or("no replica is up: start or resume one")?;
        let version = self.version.load(Ordering::Relaxed);
        let uri = format!("http://127.0.0.1:{port}/lab/invalidate/v{version}/report/{key}");
        let request = Request::post(uri).body(Empty::<Bytes>::new()).map_err(|error| error.to_string())?;
        let client = Client::builder(TokioExecutor::new()).build_http();
        let began = Instant::now();
        let answer = tokio::time::timeout(INVALIDATION, client.request(request)).await;
        let failed = |why: &str| {
            self.story.say(format!("The invalidation of {} is not confirmed: {why}.", report(key)))
        };
        let response = match answer {
            Ok(Ok(response)) => response,
            Ok(Err(error)) => return Err(failed(&error.to_string())),
            Err(_) => return Err(failed("no answer in time")),
        };
        let ms = began.elapsed().as_millis().try_into().unwrap_or(u64::MAX);
        if !response.status().is_success() {
            let body = response.into_body().collect().await.map(|body| body.to_bytes()).unwrap_or_default();
            return Err(failed(&String::from_utf8_lossy(&body)));
        }
        Ok((
            self.story.say(format!(
                "{} was invalidated in the whole fleet, in {}.",
                report(key),
                seconds(ms)
            )),
            ms,
        ))
    }

    /// Changes a value at the origin, and notifies no replica.
    pub(crate) fn change(&self, name: &str) -> Result<String, String> {
        let key = self.key(name)?;
        let value = self.origin.change(key);
        let key = report(key);
        Ok(self.story.say(format!("The origin has value {value} of {key} now, and no replica was told.")))
    }

    /// The number of a key that is called `report:7`.
    fn key(&self, name: &str) -> Result<u64, String> {
        let keys = self.controls.borrow().keys;
        let key = name.strip_prefix("report:").and_then(|key| key.parse().ok());
        key.filter(|key| (1..=keys).contains(key)).ok_or_else(|| {
            format!("there is no key `{name}`: choose report:1 to report:{keys}, or * for all")
        })
    }

    /// Asks for each key once, so that a preset begins with a warm cache.
    pub(crate) async fn warm(&self) {
        let Controls { keys, capacity, .. } = *self.controls.borrow();
        let version = self.version.load(Ordering::Relaxed);
        let client: Client<_, Empty<Bytes>> = Client::builder(TokioExecutor::new()).build_http();
        let ask = |key: u64| {
            let client = client.clone();
            let port = self.fleet.any_up();
            async move {
                let uri = format!("http://127.0.0.1:{}/v{version}/report/{key}", port?);
                let request = Request::get(uri).header("host", AUTHORITY).body(Empty::new()).ok()?;
                let response =
                    tokio::time::timeout(crate::load::PATIENCE, client.request(request)).await.ok()?.ok()?;
                response.into_body().collect().await.ok()
            }
        };
        let asking = futures_util::stream::iter((1..=keys).map(ask));
        let warming = futures_util::StreamExt::buffer_unordered(asking, capacity as usize);
        futures_util::StreamExt::count(warming).await;
    }

    pub(crate) fn to_json(&self, since: u64) -> Value {
        json!({
            "run": self.run, "now_ms": self.board.now_ms(), "version": self.version.load(Ordering::Relaxed),
            "store": self.store.to_json(), "controls": *self.controls.borrow(), "limits": Controls::limits(),
            "replicas": self.fleet.to_json(), "totals": self.board.to_json(), "origin": self.origin_json(),
            "events": self.story.to_json(), "samples": self.history.since(since),
        })
    }

    fn origin_json(&self) -> Value {
        let mut origin = self.origin.to_json();
        origin["url"] = format!("http://{}", self.origin_address).into();
        origin
    }

    /// Ends all processes.
    pub(crate) async fn end(&self) {
        self.runs.send_replace(false);
        self.fleet.end().await;
        self.store.end().await;
        self.reaper.end();
    }
}

/// What the replicas share: `REDIS_URL`, else a server of the lab's own, else memory.
async fn backing(reaper: &Arc<Reaper>) -> Result<(Kind, String, Backing), String> {
    let url = std::env::var("REDIS_URL").ok().filter(|url| !url.is_empty());
    if let Some(url) = url {
        let address = Address::of(&url)?;
        let server = (address.host.clone(), address.port);
        let at = format!("{}:{}", server.0, server.1);
        ping(&url).await.map_err(|error| {
            format!(
                "the server of REDIS_URL at {at} can not be used ({error}): mend that, or unset REDIS_URL"
            )
        })?;
        let text = format!("the Redis of REDIS_URL at {at}");
        let url_of_port = Box::new(move |port| address.through(port));
        return Ok((Kind::Url, text, Backing::Redis { server, url_of_port }));
    }
    let started = RedisServer::start_new(reaper.clone()).await;
    if let Some(server) = started.map_err(|error| format!("redis-server can not be started: {error}"))? {
        let text = format!("redis-server {} of the lab, on port {}", server.version(), server.port());
        let address = ("127.0.0.1".to_owned(), server.port());
        let kind = Kind::Server(Box::new(Mutex::new(server)));
        let url_of_port = Box::new(|port| format!("redis://127.0.0.1:{port}/"));
        return Ok((kind, text, Backing::Redis { server: address, url_of_port }));
    }
    let text = "memory of one process, because redis-server is not installed".to_owned();
    let backing = Backing::Memory { store: MemoryStore::new(), plain: PlainMemory::default() };
    Ok((Kind::Memory, text, backing))
}

/// Connects to a server, and asks it for a sign of life.
async fn ping(url: &str) -> Result<(), redis::RedisError> {
    let config = redis::AsyncConnectionConfig::new()
        .set_connection_timeout(Some(Duration::from_secs(2)))
        .set_response_timeout(Some(Duration::from_secs(2)));
    let client = redis::Client::open(url)?;
    let mut connection = client.get_multiplexed_async_connection_with_config(&config).await?;
    redis::cmd("PING").query_async(&mut connection).await
}

/// The sentence about a change of the settings.
fn describe(before: &Controls, after: &Controls) -> String {
    let mut sentences = Vec::new();
    if after.mode != before.mode {
        sentences.push(match after.mode {
            Mode::Off => {
                "The guard is off: replicas read the cache, and on a miss each request loads.".to_owned()
            }
            Mode::On => "The guard is on: one request of the fleet loads, the others wait for it.".to_owned(),
            Mode::Stale => "The guard serves a stale value while one request of the fleet loads.".to_owned(),
            Mode::Local => "The guard serves hits from each replica's memory.".to_owned(),
            Mode::Adaptive => "The guard runs only as many loads at once as the origin can take.".to_owned(),
        });
    }
    let mut changed = |is: u64, was: u64, text: &str| {
        if is != was {
            sentences.push(text.replace("{}", &grouped(is)));
        }
    };
    changed(
        after.requests_per_second,
        before.requests_per_second,
        "The clients send {} requests a second now.",
    );
    changed(after.replicas, before.replicas, "The size of the fleet is {} now.");
    changed(after.keys, before.keys, "The number of hot reports is {} now.");
    changed(after.latency_ms, before.latency_ms, "A load takes {} ms at the origin now.");
    changed(after.capacity, before.capacity, "The origin's capacity is {} loads at once now.");
    changed(after.failure_percent, before.failure_percent, "Of all loads {} % fail from now on.");
    changed(after.fresh_ms, before.fresh_ms, "A value is fresh for {} ms now.");
    changed(after.body_bytes, before.body_bytes, "A value has {} bytes now.");
    changed(after.audit_percent, before.audit_percent, "Of all hits {} % are compared with the origin now.");
    changed(
        after.wait_timeout_ms,
        before.wait_timeout_ms,
        "A request waits for another's load for {} ms now.",
    );
    if after.private != before.private {
        let private = if after.private { "private: no two requests may share one" } else { "for all again" };
        sentences.push(format!("The origin's answers are {private}."));
    }
    sentences.join(" ")
}
