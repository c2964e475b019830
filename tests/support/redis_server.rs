//! A private `redis-server` per test, on its own port, that can be killed, restarted and stopped.
//!
//! All methods block for the milliseconds that a local server takes, so they can be used in plain and in async tests.
//! Methods that send commands time out and panic while the server is paused.

use std::collections::BTreeSet;
use std::fmt;
use std::io::{self, Read as _};
use std::net::TcpListener;
use std::ops::Range;
use std::process::{Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, Client, Connection, FromRedisValue, RedisError};

use super::PATIENCE;
use super::os::Guarded;
use super::scratch::Scratch;

/// The documented rights of the smallest user the library works with; the user `minimal` has exactly these.
pub(crate) const MINIMAL_ACL: &str = "on >pw ~sg1:* resetchannels &sg1:* -@all +get +getrange +mget +set +del +exists +incr +pexpire \
     +pttl +lpos +rpush +lpop +lrange +lrem +llen +strlen +zadd +zcard +zrange +zrem +zremrangebyscore +zmscore +hgetall +hmget +hset +hdel +publish \
     +evalsha +eval +subscribe +unsubscribe +ping +hello +auth +time";

/// Names another server program, so that the tests can be run on another version: `make redis-6.2`.
const PROGRAM: &str = "REDIS_SERVER";

/// Name that the connections of the harness give themselves, so that counts can leave them out.
pub(crate) const ADMIN: &str = "sg-admin";

const NOT_INSTALLED: &str = "redis-server is not installed: run 'make test' \
     (or apt-get install -y redis-server / brew install redis)";

/// A running, stopped or killed `redis-server`; dropping it ends the process.
pub(crate) struct RedisServer {
    port: u16,
    args: Vec<String>,
    /// The query of the minimal user's URL.
    query: &'static str,
    process: Mutex<Option<Process>>,
}

struct Process {
    guarded: Guarded,
    /// Returns the server's log once the server has ended. Reading it all the time keeps the pipe from filling up.
    log: JoinHandle<String>,
    /// The working directory. A primary writes a dump for each new replica, and some versions do not remove it.
    dir: Scratch,
}

struct PortTaken;

/// The ports for test servers: more than a run of all tests needs.
const PORTS: Range<u16> = 15_000..22_500;

impl RedisServer {
    /// Starts an empty server on a free port and returns when it answers.
    pub(crate) fn start() -> Self {
        Self::with_args::<&str>([])
    }

    /// Like [`start`](Self::start), with further arguments such as `["--maxmemory", "2mb"]`.
    pub(crate) fn with_args<S: Into<String>>(args: impl IntoIterator<Item = S>) -> Self {
        let args: Vec<String> = args.into_iter().map(Into::into).collect();
        Self::with_args_of(|| args.clone())
    }

    /// Like [`with_args`](Self::with_args), but asks for new arguments at each try: an argument may name a port that is taken.
    pub(crate) fn with_args_of(mut args: impl FnMut() -> Vec<String>) -> Self {
        loop {
            let (port, args) = (free_port(), args());
            if let Ok(process) = Process::launch(port, &args) {
                return Self { port, args, query: "", process: Mutex::new(Some(process)) };
            }
        }
    }

    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    /// The port for TLS, if the arguments name one.
    pub(crate) fn tls_port(&self) -> Option<u16> {
        let at = self.args.iter().position(|arg| arg == "--tls-port")?;
        self.args.get(at + 1)?.parse().ok()
    }

    /// The port at which other servers reach this one. Servers with TLS use only TLS between each other.
    pub(crate) fn peer_port(&self) -> u16 {
        self.tls_port().unwrap_or(self.port)
    }

    pub(crate) fn url(&self) -> String {
        format!("redis://127.0.0.1:{}/", self.port)
    }

    pub(crate) fn client(&self) -> Client {
        Client::open(self.url()).expect("a valid URL")
    }

    /// The URL of the user `minimal`, which has exactly [`MINIMAL_ACL`], also after a restart.
    pub(crate) fn minimal_user(&self) -> String {
        format!("redis://minimal:pw@127.0.0.1:{}/{}", self.port, self.query)
    }

    /// Makes the minimal user's connections speak RESP3, unless they choose a protocol themselves.
    pub(crate) fn in_resp3(self) -> Self {
        Self { query: "?protocol=resp3", ..self }
    }

    pub(crate) fn pid(&self) -> u32 {
        self.running(|process| process.guarded.pid())
    }

    /// Whether the server was started and not killed. True for a paused server.
    pub(crate) fn is_running(&self) -> bool {
        self.process().is_some()
    }

    /// Ends the server by SIGKILL. When this returns, its port refuses connections.
    pub(crate) fn kill(&self) {
        let process = self.process().take().expect("the server runs");
        process.end();
    }

    /// Starts the server again after [`kill`](Self::kill): the same port, without data, scripts and connections.
    pub(crate) fn start_again(&self) {
        let mut slot = self.process();
        assert!(slot.is_none(), "the server runs already");
        let deadline = Instant::now() + PATIENCE;
        while slot.is_none() {
            assert!(Instant::now() < deadline, "port {} was taken by another program", self.port);
            *slot = Process::launch(self.port, &self.args).ok();
        }
    }

    /// Kills the server (SIGKILL), and starts an empty one on the same port.
    pub(crate) fn restart(&self) {
        self.kill();
        self.start_again();
    }

    /// SIGSTOP: connections stay, nothing answers, the kernel still accepts. See [`resume`](Self::resume).
    pub(crate) fn pause(&self) {
        self.running(|process| process.guarded.pause());
    }

    /// SIGCONT: also executes what clients sent meanwhile.
    pub(crate) fn resume(&self) {
        self.running(|process| process.guarded.resume());
    }

    /// The server's working directory.
    pub(crate) fn folder(&self) -> String {
        let process = self.process.lock().expect("no panic");
        process.as_ref().expect("it runs").dir.text("")
    }

    /// A connection of the harness, as the default user. Monitor and client counts leave it out.
    pub(crate) fn conn(&self) -> Connection {
        connect(self.port).expect("connecting to the test's redis-server")
    }

    /// Runs one command on a new connection: `server.run(&["SET", "k", "v"])`.
    #[track_caller]
    pub(crate) fn run<T: FromRedisValue>(&self, command: &[&str]) -> T {
        let run = || redis::cmd(command[0]).arg(&command[1..]).query(&mut self.conn());
        // A server that sentinels promote closes all its connections a moment later.
        let cut_off = |error: RedisError| if error.is_connection_dropped() { run() } else { Err(error) };
        run().or_else(cut_off).unwrap_or_else(|error| panic!("{command:?}: {error}"))
    }

    pub(crate) fn flush_all(&self) {
        self.run::<()>(&["FLUSHALL"]);
    }

    pub(crate) fn script_flush(&self) {
        self.run::<()>(&["SCRIPT", "FLUSH", "SYNC"]);
    }

    /// Cuts all connections with subscriptions and returns how many there were.
    pub(crate) fn kill_pubsub(&self) -> usize {
        self.run(&["CLIENT", "KILL", "TYPE", "pubsub"])
    }

    /// Cuts every connection except those of the harness and returns how many there were.
    pub(crate) fn kill_clients(&self) -> usize {
        let mut conn = self.conn();
        let ids = clients(&mut conn).into_iter().filter_map(|client| field(&client, "id").map(str::to_owned));
        let killed =
            ids.map(|id| redis::cmd("CLIENT").arg("KILL").arg("ID").arg(id).query::<usize>(&mut conn));
        killed.map(|killed| killed.expect("CLIENT KILL")).sum()
    }

    /// How many connections have subscriptions.
    pub(crate) fn pubsub_clients(&self) -> usize {
        self.run::<String>(&["CLIENT", "LIST", "TYPE", "pubsub"]).lines().count()
    }

    /// The ids of the connections of users with names that begin like this. A connection that is opened anew has another id.
    pub(crate) fn ids_of(&self, users: &str) -> BTreeSet<String> {
        let clients = clients(&mut self.conn());
        let theirs =
            clients.iter().filter(|client| field(client, "user").is_some_and(|user| user.starts_with(users)));
        theirs.filter_map(|client| field(client, "id").map(str::to_owned)).collect()
    }

    /// How many connections were opened so far, this one and the harness's included.
    pub(crate) fn opened(&self) -> u64 {
        let stats: String = self.run(&["INFO", "stats"]);
        let line = stats.lines().find_map(|line| line.strip_prefix("total_connections_received:"));
        line.expect("a count").parse().expect("a number")
    }

    /// How many connections there are, without those of the harness.
    pub(crate) fn client_count(&self) -> usize {
        clients(&mut self.conn()).len()
    }

    /// All keys but those of attempts at changes, sorted.
    pub(crate) fn keys(&self) -> Vec<String> {
        let mut keys = self.all_keys();
        // An attempt at a change has a key for a minute after a command had no answer in time: on a busy machine that may be any command.
        keys.retain(|key| !key.starts_with("sg1:c:"));
        keys
    }

    fn all_keys(&self) -> Vec<String> {
        let mut keys: Vec<String> = self.run(&["KEYS", "*"]);
        keys.sort();
        keys
    }

    /// The keys that would stay for ever, sorted.
    pub(crate) fn keys_without_ttl(&self) -> Vec<String> {
        let mut conn = self.conn();
        let mut keys = self.all_keys();
        // -1 = no TTL; -2 = expired between the two commands, as it should.
        keys.retain(|key| redis::cmd("PTTL").arg(key).query::<i64>(&mut conn).expect("PTTL") == -1);
        keys
    }

    fn process(&self) -> MutexGuard<'_, Option<Process>> {
        // A test that failed while holding the lock must not hide its message behind a second panic in `drop`.
        self.process.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn running<R>(&self, act: impl FnOnce(&mut Process) -> R) -> R {
        act(self.process().as_mut().expect("the server runs"))
    }
}

impl fmt::Debug for RedisServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { port, args, query: _, process } = self;
        let pid = process.lock().ok().and_then(|slot| slot.as_ref().map(|process| process.guarded.pid()));
        f.debug_struct("RedisServer").field("port", port).field("args", args).field("pid", &pid).finish()
    }
}

impl Process {
    fn launch(port: u16, args: &[String]) -> Result<Self, PortTaken> {
        let dir = Scratch::new();
        let spawned = Guarded::spawn(
            Command::new(std::env::var_os(PROGRAM).unwrap_or_else(|| "redis-server".into()))
                .args(["--port", &port.to_string(), "--bind", "127.0.0.1"])
                .args(["--save", "", "--appendonly", "no", "--daemonize", "no"])
                // On the command line, so that the user exists from the first connection on, also after a restart.
                .args(["--user", "minimal"])
                .args(MINIMAL_ACL.split_whitespace())
                .args(["--repl-diskless-load", "swapdb"])
                .args(args)
                // Empty, because any server loads a dump that it finds.
                .current_dir(&dir)
                .stdin(Stdio::null())
                .stdout(Stdio::piped())
                .stderr(Stdio::null()),
        );
        let mut guarded = match spawned {
            Err(error) if error.kind() == io::ErrorKind::NotFound => panic!("{NOT_INSTALLED}"),
            spawned => spawned.expect("starting redis-server"),
        };
        let mut stdout = guarded.child().stdout.take().expect("stdout is piped");
        let log = thread::spawn(move || {
            let mut log = Vec::new();
            let _ = stdout.read_to_end(&mut log);
            String::from_utf8_lossy(&log).into_owned()
        });
        let mut process = Self { guarded, log, dir };
        let deadline = Instant::now() + PATIENCE;
        while !process.is_ready(port) {
            if let Some(status) = process.guarded.try_wait() {
                let log = process.end();
                if log.contains("Address already in use") {
                    return Err(PortTaken);
                }
                panic!("redis-server {args:?} ended at once: {status}\n{log}");
            }
            if Instant::now() > deadline {
                panic!("redis-server {args:?} did not become ready\n{}", process.end());
            }
            thread::sleep(Duration::from_millis(2));
        }
        Ok(process)
    }

    /// Whether the server answers and is this process: another program may have got the port first.
    fn is_ready(&self, port: u16) -> bool {
        let info =
            connect(port).and_then(|mut conn| redis::cmd("INFO").arg("server").query::<String>(&mut conn));
        let line = format!("process_id:{}", self.guarded.pid());
        info.is_ok_and(|info| info.lines().any(|l| l == line))
    }

    fn end(mut self) -> String {
        self.guarded.kill();
        self.log.join().unwrap_or_default()
    }
}

fn connect(port: u16) -> redis::RedisResult<Connection> {
    let client = Client::open(("127.0.0.1", port))?;
    let mut conn = client.get_connection_with_timeout(PATIENCE)?;
    conn.set_read_timeout(Some(PATIENCE))?;
    conn.set_write_timeout(Some(PATIENCE))?;
    redis::cmd("CLIENT").arg("SETNAME").arg(ADMIN).query::<()>(&mut conn)?;
    // MONITOR shows no CLIENT command before 7.0, but it shows ECHO, even if a loading server or a replica refuses it.
    let _ = redis::cmd("ECHO").arg(ADMIN).query::<String>(&mut conn);
    Ok(conn)
}

/// Lines of CLIENT LIST, without the harness's own connections.
fn clients(conn: &mut Connection) -> Vec<String> {
    let list: String = redis::cmd("CLIENT").arg("LIST").query(conn).expect("CLIENT LIST");
    list.lines().filter(|client| field(client, "name") != Some(ADMIN)).map(str::to_owned).collect()
}

/// A connection for the test itself, without timeouts.
pub(crate) async fn plain_connection(client: &Client) -> MultiplexedConnection {
    let config = AsyncConnectionConfig::new().set_response_timeout(None).set_connection_timeout(None);
    client.get_multiplexed_async_connection_with_config(&config).await.expect("connects")
}

/// Value of `name=value` in a line of CLIENT LIST.
pub(crate) fn field<'l>(client: &'l str, name: &str) -> Option<&'l str> {
    client
        .split(' ')
        .find_map(|pair| pair.split_once('=').filter(|(key, _)| *key == name).map(|(_, value)| value))
}

/// A free port that is returned only once: a killed server finds its port free when it starts again.
///
/// Below the range from which kernels give ports to outgoing connections (32768 and up on Linux, 49152 on macOS):
/// inside it, a connection of any other program can take the port while the server is down for a restart, and a
/// client that keeps trying a dead port can even connect to itself. Nodes of a cluster listen to each other at their port
/// plus 10,000, which is also below that range and above all ports returned here.
pub(crate) fn free_port() -> u16 {
    static RESERVED: Mutex<BTreeSet<u16>> = Mutex::new(BTreeSet::new());
    let mut reserved = RESERVED.lock().unwrap_or_else(PoisonError::into_inner);
    loop {
        let port = fastrand::u16(PORTS);
        assert!(reserved.len() < PORTS.len(), "all ports are reserved");
        if reserved.insert(port) && TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
}
