//! A server that times its scripts, queues of artificial waiters, and the table's rows about steps.

use std::cell::RefCell;
use std::time::{Duration, Instant};

use redis::{Cmd, Connection, FromRedisValue, Value};
use stampede_guard::{Policy, StampedeGuard};
use tokio::runtime::Runtime;

use crate::support::redis_server::RedisServer;
use crate::table::{Limit, Row, Spread, Table, Unit, millis};

pub(crate) const SIZES: [usize; 3] = [100, 1_000, 10_000];
const ROUNDS: usize = 5;
const PINGS: usize = 301;
/// The time to live of an artificial queue, and the length of the lease. Both are longer than a round.
const LIFE: Duration = Duration::from_secs(60);
/// The deadline of events that must happen, however slowly.
const SOON: Duration = Duration::from_secs(20);

pub(crate) struct Stage {
    pub(crate) server: RedisServer,
    pub(crate) runtime: Runtime,
    connection: RefCell<Connection>,
}

/// How long each script of one step took, in milliseconds.
pub(crate) struct Step(pub(crate) Vec<f64>);

impl Stage {
    pub(crate) fn start() -> Self {
        let server =
            RedisServer::with_args(["--slowlog-log-slower-than", "0", "--slowlog-max-len", "100000"]);
        let connection = server.conn();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        Self { server, runtime, connection: RefCell::new(connection) }
    }

    /// The median round trip of a PING, in milliseconds.
    pub(crate) fn ping(&self) -> f64 {
        let ping = || {
            let sent = Instant::now();
            self.run::<()>(&redis::cmd("PING"));
            millis(sent.elapsed())
        };
        Spread::of(&(0..PINGS).map(|_| ping()).collect::<Vec<_>>()).median
    }

    /// A connected guard with a `command_timeout` that no command reaches.
    pub(crate) fn guard(&self) -> StampedeGuard {
        let policy = Policy::builder().command_timeout(SOON / 2).coordination_budget(SOON * 2).lease(LIFE);
        let guard = StampedeGuard::builder(self.server.client()).policy(policy.build().expect("valid"));
        let guard = guard.build().expect("valid");
        self.runtime.block_on(guard.connect()).expect("connects");
        guard
    }

    pub(crate) fn run<T: FromRedisValue>(&self, command: &Cmd) -> T {
        command.query(&mut *self.connection.borrow_mut()).expect("an answer")
    }

    /// The name of the only key that begins with `head`.
    pub(crate) fn key(&self, head: &str) -> String {
        let mut keys: Vec<String> = self.run(redis::cmd("KEYS").arg(format!("{head}*")));
        assert_eq!(keys.len(), 1, "{keys:?}");
        keys.remove(0)
    }

    /// Creates a queue of this many `entries`, which belong to `nodes` nodes in turn, and clears the times of scripts. In each entry,
    /// `rest` follows the token.
    pub(crate) fn lay(&self, queue: &str, entries: usize, nodes: usize, rest: &str) {
        let entries: Vec<_> = (0..entries)
            .map(|number| format!("{:032x}:{:032x}{rest}", number % nodes + 0xdead_0000, number))
            .collect();
        for piece in entries.chunks(1_000) {
            self.run::<()>(redis::cmd("RPUSH").arg(queue).arg(piece));
        }
        self.run::<()>(redis::cmd("PEXPIRE").arg(queue).arg(LIFE.as_millis() as u64));
        self.forget();
    }

    pub(crate) fn forget(&self) {
        self.run::<()>(redis::cmd("SLOWLOG").arg("RESET"));
    }

    /// Waits until this key is removed. A queue is removed when all its entries were passed over.
    pub(crate) fn until_removed(&self, key: &str) {
        let since = Instant::now();
        while self.run::<bool>(redis::cmd("EXISTS").arg(key)) {
            assert!(since.elapsed() < SOON, "{key} is still there");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// The scripts that have run since [`forget`](Self::forget).
    pub(crate) fn scripts(&self) -> Step {
        let log: Vec<Value> = self.run(redis::cmd("SLOWLOG").arg("GET").arg(-1));
        let entry = |entry: Value| -> Option<f64> {
            let Value::Array(parts) = entry else { panic!("{entry:?}") };
            let micros: u64 = redis::from_redis_value(parts[2].clone()).expect("a time");
            let words: Vec<Vec<u8>> = redis::from_redis_value(parts[3].clone()).expect("words");
            words[0].starts_with(b"EVAL").then_some(micros as f64 / 1e3)
        };
        Step(log.into_iter().filter_map(entry).collect())
    }

    /// Runs a step in several rounds, with the number of the round as its argument, and adds its cost to the table. The first round, in
    /// which the server learns the scripts, does not count.
    pub(crate) fn measure(
        &self,
        table: &mut Table,
        what: String,
        must: f64,
        mut step: impl FnMut(usize) -> Step,
    ) {
        step(0);
        let ping = self.ping();
        let steps: Vec<_> = (1..=ROUNDS).map(step).collect();
        let of = |number: fn(&Step) -> f64| Spread::of(&steps.iter().map(number).collect::<Vec<_>>());
        let longest = of(|step| step.0.iter().copied().fold(0.0, f64::max));
        let (sum, calls) = (of(|step| step.0.iter().sum()).median, of(|step| step.0.len() as f64).median);
        table.add(Row {
            what,
            unit: Unit::Millis,
            must: Limit::AtMost(must),
            aim: Limit::None,
            measured: longest.median,
            detail: format!(
                "{longest} (in all {sum:.2} ms in {calls:.0}; {:.0} PINGs of {:.3} ms)",
                longest.median / ping,
                ping
            ),
        });
    }
}
