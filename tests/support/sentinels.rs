//! A primary, its replica and three sentinels, on free ports and with short periods: a failover takes two to three
//! seconds.

use std::collections::HashMap;
use std::fs::File;
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

use redis::{Client, FromRedisValue, RedisResult};

use super::PATIENCE;
use super::os::Guarded;
use super::redis_server::{MINIMAL_ACL, RedisServer, free_port};
use super::scratch::Scratch;
use super::tls_files::TlsFiles;

/// The sentinels' name of the primary.
pub(crate) const NAME: &str = "mymaster";

/// The documented right that the smallest user needs with Sentinel in addition to [`MINIMAL_ACL`].
pub(crate) const ROLE: &str = "+role";

/// Longer than a primary is silent while a test runs.
const CALM_MS: u32 = 30_000;

/// Three sentinels that watch over two servers; dropping it ends them all.
#[derive(Debug)]
pub(crate) struct Sentinels {
    servers: [RedisServer; 2],
    sentinels: Vec<Sentinel>,
    _tls: Option<TlsFiles>,
}

#[derive(Debug)]
struct Sentinel {
    port: u16,
    tls_port: Option<u16>,
    files: Scratch,
    process: Mutex<Option<Guarded>>,
}

impl Sentinels {
    /// Returns when each sentinel knows the replica and the other sentinels, and the replica is in sync. The sentinels call no
    /// server dead while a test runs, and fail over only on command.
    pub(crate) fn start() -> Self {
        Self::asleep().awake()
    }

    /// Like [`start`](Self::start), but the sentinels replace a primary that is silent for two seconds.
    pub(crate) fn vigilant() -> Self {
        Self::of(None, 2_000).awake()
    }

    /// Like [`start`](Self::start), with TLS: servers and sentinels speak TLS to each other. The harness itself uses the plain ports.
    pub(crate) fn with_tls(files: TlsFiles) -> Self {
        Self::of(Some(files), CALM_MS).awake()
    }

    /// Starts the primary and its replica, but no sentinel; [`wake`](Self::wake) starts one.
    pub(crate) fn asleep() -> Self {
        Self::of(None, CALM_MS)
    }

    fn of(tls: Option<TlsFiles>, down_after_ms: u32) -> Self {
        let primary = RedisServer::with_args_of(|| arguments(tls.as_ref()));
        let follow = ["--replicaof".to_owned(), "127.0.0.1".to_owned(), primary.peer_port().to_string()];
        let replica = RedisServer::with_args_of(|| [&arguments(tls.as_ref())[..], &follow].concat());
        wait(|| {
            let info: String = replica.run(&["INFO", "replication"]);
            info.contains("master_link_status:up")
        });
        let sentinels =
            (0..3).map(|_| Sentinel::of(primary.peer_port(), tls.as_ref(), down_after_ms)).collect();
        Self { servers: [primary, replica], sentinels, _tls: tls }
    }

    fn awake(self) -> Self {
        for index in 0..3 {
            self.wake(index);
        }
        self.await_agreement();
        // Sentinels find each other by what they publish, so the period was short until now. It must not stay short: a sentinel
        // that sees a promoted replica, and is not notified of the failover within four periods, demotes it again. The sentinel that
        // leads the failover checks once per second whether the replica is promoted, and only then publishes it.
        for index in 0..3 {
            self.ask::<()>(index, &["SENTINEL", "DEBUG", "PUBLISH-PERIOD", "500"]);
        }
        self
    }

    /// Starts one of the three sentinels.
    pub(crate) fn wake(&self, index: usize) {
        self.sentinels[index].start();
    }

    pub(crate) fn kill(&self, index: usize) {
        self.sentinels[index].process.lock().expect("nothing panics in here").take().expect("it runs").kill();
    }

    pub(crate) fn pause(&self, index: usize) {
        self.sentinels[index]
            .process
            .lock()
            .expect("nothing panics in here")
            .as_mut()
            .expect("it runs")
            .pause();
    }

    /// Waits until each sentinel knows the two other sentinels and the replica, and calls the primary healthy.
    pub(crate) fn await_agreement(&self) {
        for sentinel in &self.sentinels {
            wait(|| {
                let Ok(master) = sentinel.run::<HashMap<String, String>>(&["SENTINEL", "MASTER", NAME])
                else {
                    return false;
                };
                let count = |field: &str| master.get(field).map(String::as_str);
                (count("num-other-sentinels"), count("num-slaves")) == (Some("2"), Some("1"))
                    && count("flags") == Some("master")
            });
        }
    }

    pub(crate) fn ports(&self) -> Vec<u16> {
        self.sentinels.iter().map(|sentinel| sentinel.port).collect()
    }

    /// The TLS ports of the sentinels.
    pub(crate) fn tls_ports(&self) -> Vec<u16> {
        self.sentinels.iter().filter_map(|sentinel| sentinel.tls_port).collect()
    }

    /// The URL for `unconnected`: the sentinels' primary, as the smallest user.
    pub(crate) fn url(&self) -> String {
        let ports: Vec<_> = self.ports().into_iter().map(|port| port.to_string()).collect();
        format!("sentinels://{}/{NAME}", ports.join(","))
    }

    /// The server that was the primary at the start.
    pub(crate) fn first(&self) -> &RedisServer {
        &self.servers[0]
    }

    pub(crate) fn second(&self) -> &RedisServer {
        &self.servers[1]
    }

    /// Has the sentinels promote the second server, and returns when they name it as the primary.
    pub(crate) fn fail_over(&self) {
        let second = self.second().peer_port().to_string();
        wait(|| {
            // Refused while a failover is under way, or while the replica sends nothing.
            let _ = self.sentinels[1].run::<()>(&["SENTINEL", "FAILOVER", NAME]);
            let until = Instant::now() + Duration::from_secs(2);
            let switched = || {
                let named: Vec<String> = self.ask(1, &["SENTINEL", "GET-MASTER-ADDR-BY-NAME", NAME]);
                named.last() == Some(&second)
            };
            while Instant::now() < until && !switched() {
                thread::sleep(Duration::from_millis(10));
            }
            switched()
        });
    }

    /// Runs a command on one of the sentinels.
    pub(crate) fn ask<T: FromRedisValue>(&self, index: usize, command: &[&str]) -> T {
        self.sentinels[index].run(command).unwrap_or_else(|error| panic!("{command:?}: {error}"))
    }
}

fn arguments(tls: Option<&TlsFiles>) -> Vec<String> {
    // Synchronises a replica at once, and not after the default of five seconds.
    let mut args: Vec<String> = ["--repl-diskless-sync-delay", "0", "--repl-ping-replica-period", "1"]
        .into_iter()
        .chain(["--user", "watched"])
        .map(str::to_owned)
        .collect();
    args.extend(MINIMAL_ACL.split_whitespace().map(str::to_owned));
    args.push(ROLE.to_owned());
    args.extend(tls.map(TlsFiles::arguments).unwrap_or_default());
    args
}

impl Sentinel {
    fn of(primary: u16, tls: Option<&TlsFiles>, down_after_ms: u32) -> Self {
        let (files, port) = (Scratch::new(), free_port());
        let settings = tls.map(TlsFiles::settings).unwrap_or_default();
        let tls_port = settings.first().and_then(|(_, port)| port.parse().ok());
        let lines: String = settings.iter().map(|(name, value)| format!("{name} {value}\n")).collect();
        files.write(
            "sentinel.conf",
            &format!(
                "port {port}\nbind 127.0.0.1\ndir {}\n{lines}sentinel monitor {NAME} 127.0.0.1 {primary} 2\n\
                 sentinel down-after-milliseconds {NAME} {down_after_ms}\nsentinel failover-timeout {NAME} 3000\n",
                files.text("")
            ),
        );
        Self { port, tls_port, files, process: Mutex::new(None) }
    }

    fn start(&self) {
        let log = File::create(self.files.path("log")).expect("a file for the log");
        let guarded = Guarded::spawn(
            Command::new("redis-server")
                .args([&self.files.text("sentinel.conf"), "--sentinel"])
                .stdin(Stdio::null())
                .stdout(log)
                .stderr(Stdio::null()),
        );
        *self.process.lock().expect("nothing panics in here") =
            Some(guarded.expect("starting redis-server as a sentinel"));
        // With the default periods, sentinels find each other after seconds, and replicas after ten.
        let fast = ["SENTINEL", "DEBUG", "INFO-PERIOD", "500", "PUBLISH-PERIOD", "100", "PING-PERIOD", "250"];
        let faster = ["ASK-PERIOD", "100", "MIN-LINK-RECONNECT-PERIOD", "100", "ELECTION-TIMEOUT", "1000"];
        wait(|| self.run::<()>(&[&fast[..], &faster[..]].concat()).is_ok());
    }

    fn run<T: FromRedisValue>(&self, command: &[&str]) -> RedisResult<T> {
        let mut conn =
            Client::open(("127.0.0.1", self.port))?.get_connection_with_timeout(Duration::from_secs(5))?;
        conn.set_read_timeout(Some(Duration::from_secs(5)))?;
        redis::cmd(command[0]).arg(&command[1..]).query(&mut conn)
    }
}

#[track_caller]
fn wait(mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !condition() {
        assert!(Instant::now() < deadline, "the servers and their sentinels did not come to terms");
        thread::sleep(Duration::from_millis(10));
    }
}
