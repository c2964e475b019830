//! Nodes that can be killed and stopped: child processes that share one server and one origin, and execute the test's commands.

use std::collections::HashMap;

use futures_util::future::BoxFuture;

use super::*;

#[derive(Serialize, Deserialize)]
pub(super) struct Config {
    pub(super) redis: String,
    pub(super) origin: String,
    pub(super) lease_ms: u64,
    pub(super) windows: Option<Windows>,
}

/// For how long values are fresh, and for how long they may then be served stale.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) struct Windows {
    pub(super) fresh_ms: u64,
    pub(super) revalidate_ms: u64,
    pub(super) error_ms: u64,
}

impl Windows {
    pub(super) fn set(self, lease: Duration) -> Policy {
        let builder = patient(lease)
            .fresh_for(ms(self.fresh_ms))
            .ttl_jitter(0.0)
            .stale_while_revalidate(ms(self.revalidate_ms))
            .stale_if_error(ms(self.error_ms))
            .back_off(SOON);
        builder.build().expect("valid")
    }
}

/// What one call returned, and how long it took.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Reply {
    pub(super) result: Result<String, String>,
    pub(super) took_ms: u64,
}

/// The fields of [`Stats`] that the tests read.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(super) struct Counts {
    pub(super) loads: u64,
    pub(super) fail_open_loads: u64,
    pub(super) commits_refused: u64,
    pub(super) leases_lost: u64,
    pub(super) takeovers: u64,
    pub(super) flights: u64,
    pub(super) tasks: u64,
}

/// Sends `callers` callers of `key` to every member. Each of them must receive `value`.
#[cfg(any(feature = "sentinel", feature = "cluster"))]
pub(super) async fn all_load(fleet: &Fleet, key: &str, callers: usize, value: &str) {
    for member in fleet.members() {
        member.send(&format!("load {key} {callers}"));
    }
    for member in fleet.members() {
        let replies: Vec<Reply> = serde_json::from_value(member.wait_event(key).await).expect("replies");
        assert!(replies.iter().all(|reply| reply.result.as_deref() == Ok(value)), "{replies:?}");
    }
}

impl From<Stats> for Counts {
    fn from(stats: Stats) -> Self {
        let Stats { loads, fail_open_loads, commits_refused, leases_lost, takeovers, flights, tasks, .. } =
            stats;
        Self { loads, fail_open_loads, commits_refused, leases_lost, takeovers, flights, tasks }
    }
}

/// A child that executes commands, one per line:
///
/// - `load <key> <n>`: n callers at once load the key at the origin; answered by an event `<key>`
/// - `panic <key>`: one caller with a load that panics after the origin's answer
/// - `cancel`: aborts all callers
/// - `refresh <key> <n>`: like `load`, but with `refresh`
/// - `get <key>`, `invalidate <key>`, `connect`, `shutdown`, `stats`: answered by an event of that name
/// - `die`: the process aborts
pub(super) fn node(mut child: Child) -> BoxFuture<'static, ()> {
    Box::pin(async move {
        let config: Config = child.config();
        let lease = ms(config.lease_ms);
        let policy = config.windows.map_or_else(|| lease_of(lease), |windows| windows.set(lease));
        let guard = unconnected(&config.redis, policy);
        connects(&guard).await;
        let report = child.report();
        let mut callers: HashMap<String, _> = HashMap::new();
        child.ready();
        loop {
            let line = child.recv_line().await;
            let words: Vec<_> = line.split(' ').collect();
            match words[..] {
                [how @ ("load" | "panic" | "refresh"), key, ..] => {
                    let n = words.get(2).map_or(1, |n| n.parse().expect("n"));
                    let how = how.to_owned();
                    let calls = (0..n)
                        .map(|_| call(guard.clone(), config.origin.clone(), key.to_owned(), how.clone()));
                    let (calls, key) = (join_all(calls), key.to_owned());
                    let task = {
                        let key = key.clone();
                        tokio::spawn(async move { report.event_with(&key, &calls.await) })
                    };
                    callers.insert(key, task);
                }
                ["cancel"] => callers.drain().for_each(|(_, task)| task.abort()),
                ["connect"] => report.event_with("connect", &guard.connect().await.is_ok()),
                ["get", key] => report.event_with("get", &guard.get::<String>(key).await.expect("an answer")),
                ["invalidate", key] => {
                    report.event_with("invalidate", &guard.invalidate(key).await.is_ok());
                }
                ["shutdown"] => {
                    report.event_with("shutdown", &guard.shutdown(ms(50)).await.handed_over);
                }
                ["stats"] => report.event_with("stats", &Counts::from(guard.stats())),
                ["die"] => std::process::abort(),
                _ => panic!("unknown command `{line}`"),
            }
        }
    })
}

pub(super) async fn call(guard: StampedeGuard, origin: String, key: String, how: String) -> Reply {
    let started = Instant::now();
    let (refresh, panics) = (how == "refresh", how == "panic");
    let load = {
        let key = key.clone();
        move || async move {
            let loaded = origin::load(&origin, &key).await;
            assert!(!panics, "panics on command");
            loaded
        }
    };
    let result = match refresh {
        true => guard.load(key).refresh(move |_| load()).await.map(|loaded| loaded.value),
        false => guard.get_or_load(key, load).await,
    };
    let result = result.map_err(|error| error.to_string());
    Reply { result, took_ms: started.elapsed().as_millis() as u64 }
}

/// Child processes on one server and one origin.
pub(super) struct Nodes {
    pub(super) server: RedisServer,
    pub(super) origin: Origin,
    pub(super) fleet: Fleet,
}

impl Nodes {
    pub(super) async fn start(n: usize, lease: Duration) -> Self {
        Self::start_with(n, lease, None).await
    }

    pub(super) async fn start_with(n: usize, lease: Duration, windows: Option<Windows>) -> Self {
        let (server, origin) = (RedisServer::start(), Origin::start().await);
        let lease_ms = lease.as_millis() as u64;
        let config = Config { redis: server.minimal_user(), origin: origin.addr(), lease_ms, windows };
        let fleet = Fleet::spawn(n, "node", &config);
        fleet.wait_ready().await;
        Self { server, origin, fleet }
    }

    pub(super) fn node(&self, index: usize) -> &Member {
        self.fleet.member(index)
    }

    /// Makes node 0 lead a load of `key` by `command`, which the origin holds, and lets `callers` callers of every other node wait for it.
    pub(super) async fn one_leads(&self, key: &str, command: &str, callers: usize) {
        self.node(0).send(command);
        self.origin.wait_for_loads(key, 1).await;
        for (waiting, member) in self.fleet.members()[1..].iter().enumerate() {
            member.send(&format!("load {key} {callers}"));
            queued(&self.server, key, waiting + 1).await;
        }
    }

    pub(super) async fn stats(&self, index: usize) -> Counts {
        self.node(index).send("stats");
        serde_json::from_value(self.node(index).wait_event("stats").await).expect("counts")
    }

    /// The replies to one node's callers.
    #[track_caller]
    pub(super) fn replies(&self, index: usize, key: &str) -> impl Future<Output = Vec<Reply>> + '_ {
        let event = self.node(index).wait_event(key);
        async move { serde_json::from_value(event.await).expect("replies") }
    }

    /// Waits for the callers of these nodes, each of which must receive `value`.
    #[track_caller]
    pub(super) fn all_get(
        &self,
        nodes: impl IntoIterator<Item = usize>,
        key: &str,
        value: &str,
    ) -> impl Future<Output = ()> + '_ {
        let caller = std::panic::Location::caller();
        let nodes: Vec<_> = nodes.into_iter().map(|index| (index, self.replies(index, key))).collect();
        let value = value.to_owned();
        async move {
            for (index, replies) in nodes {
                let replies = replies.await;
                let right = replies.iter().all(|reply| reply.result.as_ref() == Ok(&value));
                assert!(right && !replies.is_empty(), "{caller}: node {index}: {replies:?}");
            }
        }
    }

    /// Waits for the callers of a leader that lost its lease to a newer load: the loading caller receives `old`, and each other caller
    /// `old` or, if it called again, `new`.
    pub(super) async fn overtaken(&self, index: usize, key: &str, old: &str, new: &str) {
        let replies = self.replies(index, key).await;
        let count_of = |value| replies.iter().filter(|reply| reply.result.as_deref() == Ok(value)).count();
        assert!(count_of(old) >= 1 && count_of(old) + count_of(new) == replies.len(), "{replies:?}");
    }

    /// Waits until the flights of these nodes have ended and have left nothing on the server.
    pub(super) async fn nothing_left(&self, nodes: impl IntoIterator<Item = usize>) {
        for index in nodes {
            eventually("flights end", SOON, async || {
                let stats = self.stats(index).await;
                (stats.flights, stats.tasks) == (0, 0)
            })
            .await;
        }
        crate::support::probe::assert_nothing_left(&self.server, SOON).await;
    }

    /// Checks that these nodes work as well as at the start: they share one load of a cold key.
    pub(super) async fn work(&self, nodes: impl IntoIterator<Item = usize>) {
        let nodes: Vec<_> = nodes.into_iter().collect();
        for &index in &nodes {
            eventually("connects", PATIENCE, async || {
                self.node(index).send("connect");
                self.node(index).wait_event("connect").await == true
            })
            .await;
        }
        let mut rounds = 0;
        loop {
            rounds += 1;
            let before = self.fail_open_loads(&nodes).await;
            let key = format!("after-{}", fastrand::u32(..));
            self.origin.script(&key, [origin::Answer::value("after").after(ms(200))]);
            for &index in &nodes {
                self.node(index).send(&format!("load {key} 3"));
            }
            self.all_get(nodes.iter().copied(), &key, "after").await;
            let (explained, loads) =
                (self.fail_open_loads(&nodes).await - before, self.origin.loads(&key) as u64);
            if loads == 1 {
                break;
            }
            // After a stall of the machine a node may load without the server, but not every time.
            assert!(
                loads <= 1 + explained && rounds < 3,
                "round {rounds}: {loads} loads, {explained} of them without the server"
            );
        }
        self.nothing_left(nodes).await;
    }

    async fn fail_open_loads(&self, nodes: &[usize]) -> u64 {
        let mut loads = 0;
        for &index in nodes {
            loads += self.stats(index).await.fail_open_loads;
        }
        loads
    }
}
