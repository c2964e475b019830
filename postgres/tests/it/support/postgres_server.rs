//! A private Postgres per test, on its own port, that can be killed, stopped, restarted and paused, with standbys to promote.
//!
//! Methods that start, stop and signal a server block for as long as the server takes, as those of `RedisServer` do. Methods with SQL are
//! async. `initdb` takes more than a second, so it runs once per test process, and each server gets a copy of its result.

use std::fmt;
use std::io::{BufRead as _, BufReader};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use tokio_postgres::NoTls;

use super::PATIENCE;
use super::os::Guarded;
use super::redis_server::free_port;

/// Names the folder of another Postgres's programs, so that the tests can be run on another version.
const PROGRAMS: &str = "POSTGRES_BIN";

/// Where Debian installs the versions of Postgres, each in a folder of its own.
const DEBIAN: &str = "/usr/lib/postgresql";

const NOT_INSTALLED: &str =
    "Postgres is not installed: run 'make postgres' (or apt-get install -y postgresql)";

/// How long the children of a killed postmaster may take to end by themselves.
const GRACE: Duration = Duration::from_secs(3);

/// The superuser and the database of each server.
const USER: &str = "postgres";

/// The settings of each server; those of the test come later and win.
const SETTINGS: &[(&str, &str)] = &[
    ("listen_addresses", "127.0.0.1"),
    ("unix_socket_directories", ""),
    ("wal_level", "logical"),
    // A killed server keeps what it has written to the kernel. Only a crash of the whole machine could lose it.
    ("fsync", "off"),
    ("full_page_writes", "off"),
    ("shared_buffers", "16MB"),
    ("max_connections", "150"),
    ("wal_keep_size", "0"),
    // In the server's folder instead of /dev/shm, where a killed server would leave them.
    ("dynamic_shared_memory_type", "mmap"),
];

/// A running, stopped or killed Postgres; dropping it ends its processes and removes its folder.
pub(crate) struct PostgresServer {
    port: u16,
    folder: Folder,
    settings: Vec<(String, String)>,
    process: Mutex<Option<Process>>,
}

struct Process {
    postmaster: Guarded,
    log: Log,
    paused: Option<Paused>,
    folder: PathBuf,
}

struct PortTaken;

impl PostgresServer {
    /// Starts an empty server on a free port and returns when it accepts connections.
    pub(crate) fn start() -> Self {
        Self::with_settings::<&str>([])
    }

    /// Like [`start`](Self::start), with further settings such as `[("max_slot_wal_keep_size", "1MB")]`. A segment of the log has 1 MB.
    pub(crate) fn with_settings<S: Into<String>>(settings: impl IntoIterator<Item = (S, S)>) -> Self {
        let folder = Folder::new();
        copy(&home().template(), &folder.0);
        let settings = settings.into_iter().map(|(name, value)| (name.into(), value.into())).collect();
        Self::launch(folder, settings)
    }

    fn launch(folder: Folder, settings: Vec<(String, String)>) -> Self {
        loop {
            let port = free_port();
            if let Ok(process) = Process::launch(port, &folder.0, &settings) {
                return Self { port, folder, settings, process: Mutex::new(Some(process)) };
            }
        }
    }

    /// Starts a standby that streams from this server, with the same settings. It serves reads until it is [promoted](Self::promote).
    pub(crate) fn standby(&self) -> Self {
        let folder = Folder::new();
        let mut backup = home().program("pg_basebackup");
        backup.args(["--host=127.0.0.1", "--username", USER, "--port", &self.port.to_string()]);
        backup.args(["--write-recovery-conf", "--wal-method=stream", "--checkpoint=fast", "--no-sync"]);
        run(backup.arg("--pgdata").arg(&folder.0));
        let standby = Self::launch(folder, self.settings.clone());
        standby.wait_for_log("started streaming WAL from primary");
        standby
    }

    /// Makes a standby a primary; returns when it accepts writes.
    pub(crate) async fn promote(&self) {
        let promoted = self.connect().await.query_one("select pg_promote(true, 60)", &[]).await;
        assert!(promoted.expect("pg_promote").get::<_, bool>(0), "not within a minute\n{}", self.log());
    }

    /// Waits until this standby has replayed what `primary` has written so far.
    pub(crate) async fn catch_up_with(&self, primary: &Self) {
        let written = primary.connect().await.query_one("select pg_current_wal_lsn()::text", &[]).await;
        let written: String = written.expect("a position").get(0);
        let (standby, deadline) = (self.connect().await, Instant::now() + PATIENCE);
        let replayed = format!("select pg_last_wal_replay_lsn() >= '{written}'");
        while !standby.query_one(&replayed, &[]).await.expect("a position").get::<_, bool>(0) {
            assert!(Instant::now() < deadline, "the standby did not reach {written}\n{}", self.log());
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    /// As tokio-postgres, sqlx and psql read it: the superuser, without a password.
    pub(crate) fn url(&self) -> String {
        format!("postgres://{USER}@127.0.0.1:{}/{USER}", self.port)
    }

    pub(crate) fn config(&self) -> tokio_postgres::Config {
        self.url().parse().expect("a valid URL")
    }

    /// A connection as the superuser. A task drives it, and ends when the client is dropped.
    pub(crate) async fn connect(&self) -> tokio_postgres::Client {
        let (client, connection) =
            self.config().connect(NoTls).await.expect("connecting to the test's Postgres");
        // Its error is also the error of the client's next call.
        tokio::spawn(async move { drop(connection.await) });
        client
    }

    /// The pid of the postmaster.
    pub(crate) fn pid(&self) -> u32 {
        self.running(|process| process.postmaster.pid())
    }

    /// Whether the server was started and neither killed nor stopped. True for a paused server.
    pub(crate) fn is_running(&self) -> bool {
        self.process().is_some()
    }

    /// Ends the postmaster by SIGKILL, also a paused one, and waits for its children, which end by themselves. Then the port refuses
    /// connections and no connection is left. Committed transactions stay.
    pub(crate) fn kill(&self) {
        let process = self.process().take().expect("the server runs");
        process.end();
    }

    /// Ends the server as an operator does (`fast`): open transactions are rolled back. A walsender ends after its reader has confirmed
    /// the rest of the log, so a reader that answers and does not confirm prevents the end for ever, and this fails.
    pub(crate) fn stop(&self) {
        let process = self.process().take().expect("the server runs");
        process.stop("INT");
    }

    /// Starts the server again after [`kill`](Self::kill) or [`stop`](Self::stop): the same folder, port and settings.
    pub(crate) fn start_again(&self) {
        let mut slot = self.process();
        assert!(slot.is_none(), "the server runs already");
        let deadline = Instant::now() + PATIENCE;
        while slot.is_none() {
            assert!(Instant::now() < deadline, "port {} was taken by another program", self.port);
            *slot = Process::launch(self.port, &self.folder.0, &self.settings).ok();
        }
    }

    /// SIGSTOP of all processes of the server: connections stay, nothing answers, the kernel still accepts.
    pub(crate) fn pause(&self) {
        self.running(|process| {
            assert!(process.paused.is_none(), "the server is paused already");
            // The postmaster first: it starts no more children then.
            process.postmaster.pause();
            process.paused = Some(Paused::children_of(process.postmaster.pid()));
        });
    }

    /// SIGCONT: also executes what clients sent meanwhile.
    pub(crate) fn resume(&self) {
        self.running(|process| {
            process.paused = None;
            process.postmaster.resume();
        });
    }

    /// What the server has logged since its last start.
    pub(crate) fn log(&self) -> String {
        self.running(|process| process.log.text())
    }

    /// Waits until the server has logged this text since its last start.
    pub(crate) fn wait_for_log(&self, text: &str) {
        let deadline = Instant::now() + PATIENCE;
        while !self.log().contains(text) {
            assert!(Instant::now() < deadline, "not logged: {text}\n{}", self.log());
            thread::sleep(Duration::from_millis(2));
        }
    }

    /// The data folder.
    pub(crate) fn folder(&self) -> &Path {
        &self.folder.0
    }

    fn process(&self) -> MutexGuard<'_, Option<Process>> {
        // A test that failed while holding the lock must not hide its message behind a second panic in `drop`.
        self.process.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn running<R>(&self, act: impl FnOnce(&mut Process) -> R) -> R {
        act(self.process().as_mut().expect("the server runs"))
    }
}

impl fmt::Debug for PostgresServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { port, folder, settings, process } = self;
        let pid = process.lock().ok().and_then(|slot| slot.as_ref().map(|process| process.postmaster.pid()));
        let mut server = f.debug_struct("PostgresServer");
        server
            .field("port", port)
            .field("folder", &folder.0)
            .field("settings", settings)
            .field("pid", &pid)
            .finish()
    }
}

impl Drop for PostgresServer {
    fn drop(&mut self) {
        // At once: open connections and readers are cut off. Unlike SIGKILL this removes the shared memory.
        if let Some(mut process) = self.process().take() {
            if process.paused.take().is_some() {
                process.postmaster.resume();
            }
            if process.postmaster.try_wait().is_none() {
                process.stop("QUIT");
            }
        }
    }
}

impl Process {
    fn launch(port: u16, folder: &Path, settings: &[(String, String)]) -> Result<Self, PortTaken> {
        let mut command = home().program("postgres");
        command.arg("-D").arg(folder).args(["-p", &port.to_string()]);
        let own = settings.iter().map(|(name, value)| (name.as_str(), value.as_str()));
        for (name, value) in SETTINGS.iter().copied().chain(own) {
            command.args(["-c", &format!("{name}={value}")]);
        }
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut postmaster = Guarded::spawn(&mut command).expect("starting postgres");
        let stderr = postmaster.child().stderr.take().expect("stderr is piped");
        let mut process =
            Self { postmaster, log: Log::read(stderr), paused: None, folder: folder.to_owned() };
        let deadline = Instant::now() + PATIENCE;
        // "ready to accept read-only connections" of a standby.
        while !process.log.text().contains("database system is ready to accept") {
            if let Some(status) = process.postmaster.try_wait() {
                let log = process.end();
                if log.contains("Address already in use") {
                    return Err(PortTaken);
                }
                panic!("postgres {settings:?} ended at once: {status}\n{log}");
            }
            if Instant::now() > deadline {
                panic!("postgres {settings:?} did not become ready\n{}", process.end());
            }
            thread::sleep(Duration::from_millis(2));
        }
        Ok(process)
    }

    /// Ends the server by a signal for its own shutdown.
    fn stop(mut self, signal: &str) {
        send_signal(signal, &[self.postmaster.pid()]);
        let deadline = Instant::now() + PATIENCE;
        while self.postmaster.try_wait().is_none() {
            assert!(Instant::now() < deadline, "postgres did not stop by SIG{signal}\n{}", self.end());
            thread::sleep(Duration::from_millis(2));
        }
        self.end();
    }

    /// Kills the postmaster if it runs, waits for its children, and returns the log.
    fn end(self) -> String {
        let Self { mut postmaster, log, paused, folder } = self;
        postmaster.kill();
        // Only a running child notices that the postmaster has ended.
        drop(paused);
        log.end(&folder)
    }
}

/// The standard error of the postmaster and its children.
///
/// Each child has the writing end of the pipe, so the pipe ends when the last of them has ended.
struct Log {
    text: Arc<Mutex<String>>,
    reader: JoinHandle<()>,
}

impl Log {
    fn read(stderr: impl std::io::Read + Send + 'static) -> Self {
        let text = Arc::new(Mutex::new(String::new()));
        let reader = thread::spawn({
            let text = Arc::clone(&text);
            move || {
                for line in BufReader::new(stderr).split(b'\n').map_while(Result::ok) {
                    let mut text = text.lock().unwrap_or_else(PoisonError::into_inner);
                    text.push_str(&String::from_utf8_lossy(&line));
                    text.push('\n');
                }
            }
        });
        Self { text, reader }
    }

    fn text(&self) -> String {
        self.text.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Waits until the server's last process has ended. Nearly all do at once; a walsender does not while its reader answers each of its
    /// keepalives and confirms nothing.
    fn end(self, folder: &Path) -> String {
        let begun = Instant::now();
        while !self.reader.is_finished() {
            assert!(begun.elapsed() < PATIENCE, "a child of postgres did not end\n{}", self.text());
            if begun.elapsed() > GRACE {
                send_signal("KILL", &processes_in(folder));
            }
            thread::sleep(Duration::from_millis(1));
        }
        self.text()
    }
}

/// The processes that work in this folder, as all processes of a server do in its data folder, from `/proc`.
fn processes_in(folder: &Path) -> Vec<u32> {
    let process = |process: std::io::Result<std::fs::DirEntry>| {
        let process = process.ok()?;
        let works_here = std::fs::read_link(process.path().join("cwd")).ok()? == folder;
        process.file_name().to_str()?.parse().ok().filter(|_| works_here)
    };
    std::fs::read_dir("/proc").expect("a system with /proc").filter_map(process).collect()
}

/// The stopped children of a postmaster; dropping it continues them.
///
/// A shell continues them, also when the test process ends: a stopped child would not notice the end of its postmaster.
struct Paused(Child);

impl Paused {
    fn children_of(postmaster: u32) -> Self {
        let children: Vec<u32> = children(postmaster).into_iter().map(|(pid, _)| pid).collect();
        let pids = children.iter().map(u32::to_string);
        let continues = Command::new("sh")
            .args(["-c", "trap '' INT TERM HUP; read -r end; kill -s CONT \"$@\" 2>/dev/null", "sh"])
            .args(pids)
            .stdin(Stdio::piped())
            .spawn()
            .expect("running sh");
        send_signal("STOP", &children);
        let deadline = Instant::now() + PATIENCE;
        // A child that ended meanwhile is a zombie, because its stopped parent does not reap it.
        while !self::children(postmaster).iter().all(|(_, state)| matches!(state, 'T' | 'Z')) {
            assert!(Instant::now() < deadline, "the children of process {postmaster} did not stop");
            thread::sleep(Duration::from_millis(1));
        }
        Self(continues)
    }
}

impl Drop for Paused {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        let _ = self.0.wait();
    }
}

/// The children of a process and the letters of their states, from `/proc`.
fn children(parent: u32) -> Vec<(u32, char)> {
    let child = |process: std::io::Result<std::fs::DirEntry>| {
        let pid = process.ok()?.file_name().to_str()?.parse().ok()?;
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        // Behind the name, which is in parentheses and may contain anything: the state and the parent.
        let mut fields = stat.rsplit_once(") ")?.1.split(' ');
        let state = fields.next()?.chars().next()?;
        (fields.next()? == parent.to_string()).then_some((pid, state))
    };
    std::fs::read_dir("/proc").expect("a system with /proc").filter_map(child).collect()
}

fn send_signal(name: &str, pids: &[u32]) {
    let mut kill = Command::new("sh");
    kill.args(["-c", "kill -s \"$@\" 2>/dev/null", "sh", name]).args(pids.iter().map(u32::to_string));
    // An error means that one of them has ended.
    let _ = kill.status().expect("running sh");
}

/// The data folder of one server; dropping it removes the folder, and the shared memory that a killed server has left.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Self {
        Self(home().folder.join(format!("{:08x}", fastrand::u32(..))))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = Command::new("sh").args(["-c", REMOVE, "sh"]).arg(&self.0).status();
    }
}

/// Removes the data folders in `$@` of servers that were killed: first ends the processes that work there, see [`Log::end`]. The seventh
/// line of a server's pid file ends with the number of its shared memory, which only the server itself would remove. A process that is
/// ending may still write a file.
const REMOVE: &str = "for folder; do
    for process in /proc/[0-9]*; do
        [ \"$(readlink $process/cwd)\" != \"$folder\" ] || kill -9 ${process#/proc/}
    done 2>/dev/null
    memory=$(sed -n '7s/.* //p' \"$folder/postmaster.pid\" 2>/dev/null) && ipcrm -m \"$memory\" 2>/dev/null
    until rm -rf \"$folder\" 2>/dev/null; do sleep 0.1; done
done";

/// What all servers of this process share: the programs, the user, and a folder with the template and the servers' data.
struct Home {
    /// `None`: programs are looked for in the path.
    programs: Option<PathBuf>,
    /// The user and the group of the servers, if the tests run as root: Postgres refuses to.
    user: Option<(u32, u32)>,
    folder: PathBuf,
    template: OnceLock<()>,
    /// A shell that removes the folder when this process ends, however it ends: statics are not dropped.
    _removes: Child,
}

fn home() -> &'static Home {
    static HOME: OnceLock<Home> = OnceLock::new();
    HOME.get_or_init(|| {
        let programs = programs();
        let user = (id(&["-u"]) == Some(0)).then(|| {
            id(&["-u", USER])
                .zip(id(&["-g", USER]))
                .unwrap_or_else(|| panic!("no user {USER}: {NOT_INSTALLED}"))
        });
        let folder = std::env::temp_dir().join(format!("sg-postgres-{:016x}", fastrand::u64(..)));
        let shell = format!("trap '' INT TERM HUP; read -r end; cd /; set -- \"$1\"/* \"$1\"; {REMOVE}");
        let removes =
            Command::new("sh").args(["-c", &shell, "sh"]).arg(&folder).stdin(Stdio::piped()).spawn();
        let removes = removes.expect("running sh");
        std::fs::create_dir(&folder).expect("creating a folder in the system's folder for temporary files");
        if let Some((user, group)) = user {
            std::os::unix::fs::chown(&folder, Some(user), Some(group)).expect("chown as root");
        }
        Home { programs, user, folder, template: OnceLock::new(), _removes: removes }
    })
}

impl Home {
    /// The data folder of a new server that no process uses.
    fn template(&self) -> PathBuf {
        let template = self.folder.join("template");
        self.template.get_or_init(|| {
            let mut initdb = self.program("initdb");
            initdb.args(["--username", USER, "--auth=trust", "--encoding=UTF8", "--locale=C"]);
            // Small segments: less to copy, and a slot is lost after a few of them.
            run(initdb.args(["--no-sync", "--wal-segsize=1", "--pgdata"]).arg(&template));
        });
        template
    }

    /// A program of Postgres, run as a user whom Postgres accepts.
    fn program(&self, name: &str) -> Command {
        self.command(match &self.programs {
            Some(folder) => folder.join(name),
            None => name.into(),
        })
    }

    fn command(&self, program: PathBuf) -> Command {
        let mut command = Command::new(program);
        // The tests' own folder may be closed to that user.
        command.current_dir(&self.folder);
        if let Some((user, group)) = self.user {
            command.uid(user).gid(group);
        }
        command
    }
}

fn copy(from: &Path, to: &Path) {
    run(home().command("cp".into()).arg("-a").arg(from).arg(to));
}

/// The folder of the newest Postgres, or of the one that the environment names.
fn programs() -> Option<PathBuf> {
    if let Some(folder) = std::env::var_os(PROGRAMS) {
        return Some(folder.into());
    }
    let versions = std::fs::read_dir(DEBIAN).into_iter().flatten().filter_map(|version| {
        let folder = version.ok()?.path();
        let number: u32 = folder.file_name()?.to_str()?.parse().ok()?;
        let programs = folder.join("bin");
        programs.join("postgres").exists().then_some((number, programs))
    });
    let newest = versions.max().map(|(_, programs)| programs);
    let in_path = || Command::new("postgres").arg("--version").output().is_ok();
    assert!(newest.is_some() || in_path(), "{NOT_INSTALLED}");
    newest
}

/// The number of this user, of another, or of its group.
fn id(args: &[&str]) -> Option<u32> {
    let id = Command::new("id").args(args).output().expect("running id");
    String::from_utf8_lossy(&id.stdout).trim().parse().ok()
}

fn run(command: &mut Command) {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {}\n{errors}", output.status);
}
