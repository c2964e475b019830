//! The Lua scripts, tested as the client sends them (N2, P5, R3). The real client talks to a small test server, which learns the scripts
//! from EVAL, runs them in Lua 5.1, and breaks the connection at every byte of requests and replies. Whatever is lost, the guard's answer
//! must be right, and no lease or permit of the broken connection may be left.

mod data;
mod guards;
mod locks;
mod lua;
mod server;

use std::time::Duration;

use futures_util::future::join_all;
use stampede_guard::lock::Locks;
use stampede_guard::{Policy, PolicyBuilder, StampedeGuard};
use tokio::time::timeout;

use server::{Break, Server};

/// The bound of waits for which no time is promised. Far shorter than the leases.
const SOON: Duration = Duration::from_secs(10);
/// How many runs there are at once. Most of them wait for a reconnection.
const LANES: usize = 8;

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// A policy whose lease is so long that a test fails if it is never released. Without jitter all entries have the same length.
fn policy() -> PolicyBuilder {
    let bounds = Policy::builder().coordination_budget(SOON * 2).command_timeout(SOON / 2).lease(SOON * 6);
    bounds.ttl_jitter(0.0)
}

/// One run: a node whose connection breaks, a node with a sound connection, and a name that no other run uses.
struct Stage<'a> {
    server: &'a Server,
    at: Option<Break>,
    name: String,
    breaks: StampedeGuard,
    sound: StampedeGuard,
}

impl Stage<'_> {
    async fn new(server: &Server, number: usize, at: Option<Break>, policy: PolicyBuilder) -> Stage<'_> {
        Self::of(server, number, at, [policy.clone(), policy]).await
    }

    /// A stage with the first policy for the node whose connection breaks, and the second for the other node.
    async fn of(
        server: &Server,
        number: usize,
        at: Option<Break>,
        policies: [PolicyBuilder; 2],
    ) -> Stage<'_> {
        server.disarm();
        let node = |client, policy: PolicyBuilder| {
            StampedeGuard::builder(client).policy(policy.build().expect("valid")).build().expect("valid")
        };
        let [breaks, sound] = policies;
        let (breaks, sound) = (node(server.breaking(), breaks), node(server.sound(), sound));
        for guard in [&breaks, &sound] {
            crate::redis::connects(guard).await;
        }
        Stage { server, at, name: format!("k{number:05}"), breaks, sound }
    }

    /// Begins to count bytes. The connection breaks at the byte that this stage names.
    fn arm(&self) {
        self.server.arm(self.at);
    }

    fn locks(&self) -> [Locks; 2] {
        [self.breaks.locks(), self.sound.locks()]
    }
}

/// In requests longer than this, the connection is broken only at every 61st byte.
const LONG: usize = 1_000;

/// Runs `scenario` once for each byte of its requests and replies, with the connection broken there. Runs without a break come first: they
/// count the bytes, and show which scripts run. In requests longer than `LONG`, every 61st byte is enough, because a truncated command does
/// not run, wherever it is cut. (`SG_STEP=1` breaks at every byte, which takes three minutes.)
async fn broken_at_every_byte(scripts: &[&str], scenario: impl AsyncFn(&Server, usize, Option<Break>)) {
    let servers = join_all((0..LANES).map(|_| Server::start())).await;
    let first = &servers[0];
    // The scenario runs twice, because only its first run sends the scripts' texts.
    scenario(first, 0, None).await;
    scenario(first, 1, None).await;
    first.disarm();
    let (sent, answered) = first.moved();
    let run = first.scripts_run();
    for script in scripts {
        assert!(run.iter().any(|head| head.starts_with(script)), "{script} is not among {run:#?}");
    }
    for server in &servers[1..] {
        scenario(server, 0, None).await;
    }
    let from_env = std::env::var("SG_STEP").ok().map(|step| step.parse().expect("SG_STEP is a number"));
    let step: usize = from_env.unwrap_or(if sent > LONG { 61 } else { 1 });
    let requests = (0..=sent).step_by(step).chain([sent]).map(Break::Request);
    let replies = (0..answered).map(Break::Reply);
    let breaks: Vec<_> = requests.chain(replies).collect();
    let lanes = servers.iter().enumerate().map(|(lane, server)| {
        let (breaks, scenario) = (&breaks, &scenario);
        async move {
            for (number, at) in breaks.iter().enumerate().skip(lane).step_by(LANES) {
                let run = timeout(SOON * 3, scenario(server, number + 2, Some(*at))).await;
                run.unwrap_or_else(|_| panic!("{at:?} of {sent} and {answered}: a task hangs"));
            }
            let left = server.with_data(|data| (data.without_end(), data.keys()));
            assert_eq!(left.0, Vec::<String>::new(), "keys without an end");
            server.with_data(data::Data::clear);
        }
    });
    join_all(lanes).await;
    println!("{} breaks in {sent} bytes sent and {answered} received, by {scripts:?}", breaks.len());
    assert!(sent > 50 && answered > 3, "{sent} bytes sent, {answered} received: nothing was counted");
}

/// The scripts of local tiers. Each call of them has an id or a stamp that no other call has, and is never repeated. `local::fleet` closes
/// their connections in real fleets instead.
/// (NOTE TAG is called in clusters only, and once too often does no harm.)
const OF_LOCAL_TIERS: [&str; 5] =
    ["-- ANNOUNCE:", "-- RENEW of a membership:", "-- FORGET and LEAVE:", "-- FORGET TAG:", "-- NOTE TAG:"];

/// The tests of this folder name every script of the crate.
#[test]
fn no_script_is_left_out() {
    let folder = crate::support::root().join("src/store/redis/scripts");
    let tests = [include_str!("guards.rs"), include_str!("locks.rs")].concat();
    let mut scripts = 0;
    for file in std::fs::read_dir(folder).expect("the scripts") {
        let text = std::fs::read_to_string(file.expect("a file").path()).expect("a script");
        if text.starts_with("-- Prelude") {
            continue;
        }
        let head = text.lines().next().expect("a head");
        if OF_LOCAL_TIERS.iter().any(|name| head.starts_with(name)) {
            continue;
        }
        let cited = tests.split('"').any(|cited| cited.starts_with("-- ") && head.starts_with(cited));
        assert!(cited, "{head}");
        scripts += 1;
    }
    assert!(scripts >= 19, "{scripts}");
}
