//! Hits from this process's memory, and invalidations that reach the memory of another process.
//!
//! ```text
//! cargo run --example local
//! REDIS_URL=redis://127.0.0.1/ cargo run --example local
//! ```
//!
//! Without `REDIS_URL` it starts a `redis-server` for itself. Three steps: the time of a hit with and without copies; an
//! invalidation that reaches a second process, which the example starts; the same while that process is paused (SIGSTOP).

mod support;

use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::{ExitCode, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use stampede_guard::{Policy, StampedeGuard, Stats};
use support::{exit, unusable};
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader, Lines, Stdin};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};

const HITS: u32 = 1_000;

type Outcome<T> = Result<T, Box<dyn Error + Send + Sync>>;

#[tokio::main]
async fn main() -> ExitCode {
    // Prints the guard's warnings: why it can not use its server, and the remedy.
    tracing_subscriber::fmt().with_writer(std::io::stderr).init();
    let args: Vec<String> = std::env::args().skip(1).collect();
    let result = match &args[..] {
        [url, namespace, database] => replica(url, namespace, Path::new(database)).await,
        _ => run().await,
    };
    exit(result)
}

/// The guard of one process: its copies are served as long as they are fresh.
fn service(url: &str, namespace: &str) -> Outcome<StampedeGuard> {
    let policy = Policy::builder().fresh_for(Duration::from_secs(60)).local_for(Duration::MAX).build()?;
    Ok(StampedeGuard::builder(redis::Client::open(url)?).namespace(namespace).policy(policy).build()?)
}

async fn run() -> Outcome<()> {
    let private = match std::env::var("REDIS_URL") {
        Ok(_) => None,
        Err(_) => Some(PrivateServer::start().await?),
    };
    let url = match &private {
        Some(server) => server.url.clone(),
        None => std::env::var("REDIS_URL")?,
    };
    // A new namespace makes every run start cold; a real service has a fixed name.
    let namespace = format!("local-{:08x}", fastrand::u32(..));
    let guard = service(&url, &namespace)?;
    guard.connect().await.map_err(|error| unusable(&error, "a server that this example starts"))?;
    hit_times(&guard).await?;

    let database = Database::create(&namespace)?;
    database.set(499)?;
    let mut b = Replica::start(&url, &namespace, &database.0).await?;
    reach_memory(&guard, &database.0).await?;

    println!("\nTwo processes, A and B. An invalidation by A reaches the memory of B:");
    b.ask().await?;
    change(&guard, &database, 449).await?;
    b.ask().await?;

    println!("\nA process that is paused can not acknowledge. The invalidation waits for its lease, once:");
    reach_memory(&guard, &database.0).await?;
    b.send_line("warm").await?;
    b.ask().await?;
    b.signal("STOP").await?;
    println!("  B is paused (SIGSTOP).");
    change(&guard, &database, 399).await?;
    change(&guard, &database, 379).await?;
    b.signal("CONT").await?;
    println!("  B is resumed (SIGCONT).");
    b.ask().await?;
    let Stats { local_hits, local_drops, local_waits, .. } = guard.stats();
    println!("\nA: local_hits={local_hits} local_drops={local_drops} local_waits={local_waits}");
    println!("A: {}", guard.health());
    Ok(())
}

/// Compares hits from Redis with hits from memory, one after another.
async fn hit_times(guard: &StampedeGuard) -> Outcome<()> {
    let report: Vec<String> =
        (0..200).map(|line| format!("line {line}: all is well, and so is the rest of it")).collect();
    // While the list of a fleet's processes is new, changes wait for a lease: an older list may have been lost.
    let (stored, took) = timed(guard.insert("report", &report)).await;
    stored?;
    println!("The fleet is new, so its first change waits for one lease: {took}.\n");
    // Another policy on the same connections, which keeps no copies.
    let plain = guard.with_policy(guard.policy().to_builder().local_for(Duration::ZERO).build()?);
    let load = || async { Err::<Vec<String>, _>("the report is stored") };
    reach(guard, || async { guard.get_or_load("report", load).await.map(drop) }).await?;

    let build = if cfg!(debug_assertions) { "a build without optimisation" } else { "an optimised build" };
    println!("{HITS} hits of a report of 200 lines, one after another, in {build}:\n");
    println!("{:34}{:>12}{:>12}{:>13}", "", "time of one", "from Redis", "from memory");
    row("get_or_load without copies", &plain, async || plain.get_or_load("report", load).await.map(drop))
        .await?;
    row("get_or_load with local_for", guard, async || guard.get_or_load("report", load).await.map(drop))
        .await?;
    row("load().get_shared with local_for", guard, async || {
        guard.load("report").get_shared(move |_| load()).await.map(drop)
    })
    .await
}

/// Prints the mean time of a hit, and how many were answered by Redis and from memory.
async fn row<E: Error + Send + Sync + 'static>(
    name: &str,
    guard: &StampedeGuard,
    hit: impl AsyncFn() -> Result<(), E>,
) -> Outcome<()> {
    let (before, began) = (guard.stats(), Instant::now());
    for _ in 0..HITS {
        hit().await?;
    }
    let (took, after) = (began.elapsed() / HITS, guard.stats());
    let (redis, memory) = (after.hits - before.hits, after.local_hits - before.local_hits);
    println!("{name:34}{:>12}{redis:>12}{memory:>13}", format!("{:.1} µs", took.as_secs_f64() * 1e6));
    Ok(())
}

/// Changes the price in the database, invalidates it, and prints how long the acknowledgement took.
async fn change(guard: &StampedeGuard, database: &Database, price: u32) -> Outcome<()> {
    database.set(price)?;
    let (done, took) = timed(guard.invalidate("price")).await;
    done?;
    println!("  A: the price is {price} now. invalidate() returned after {took}.");
    Ok(())
}

async fn timed<T>(work: impl Future<Output = T>) -> (T, String) {
    let began = Instant::now();
    let done = work.await;
    (done, written(began.elapsed()))
}

fn written(time: Duration) -> String {
    match time.as_micros() {
        0..1_000 => format!("{:.0} µs", time.as_secs_f64() * 1e6),
        1_000..1_000_000 => format!("{:.1} ms", time.as_secs_f64() * 1e3),
        _ => format!("{:.2} s", time.as_secs_f64()),
    }
}

/// The price, from memory, from Redis or from the database.
async fn price(guard: &StampedeGuard, database: &Path) -> Outcome<Arc<u32>> {
    let database = database.to_owned();
    let load =
        || async move { std::fs::read_to_string(database)?.trim().parse().map_err(std::io::Error::other) };
    Ok(guard.load("price").get_shared(move |_| load()).await?.value)
}

/// Asks for the price until it comes from memory.
async fn reach_memory(guard: &StampedeGuard, database: &Path) -> Outcome<()> {
    reach(guard, || async { price(guard, database).await.map(drop) }).await
}

/// Repeats a request until it is answered from memory: the first one begins the lease, a later one fills the copy.
async fn reach<E: Into<Box<dyn Error + Send + Sync>>>(
    guard: &StampedeGuard,
    ask: impl AsyncFn() -> Result<(), E>,
) -> Outcome<()> {
    let began = Instant::now();
    while began.elapsed() < Duration::from_secs(10) {
        let before = guard.stats().local_hits;
        ask().await.map_err(Into::into)?;
        if guard.stats().local_hits > before {
            return Ok(());
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    Err(format!("no hit from memory: {}", guard.health()).into())
}

/// Process B: answers each line of its input with the price, where that came from, and how long it took.
async fn replica(url: &str, namespace: &str, database: &Path) -> Outcome<()> {
    let guard = &service(url, namespace)?;
    let mut lines: Lines<BufReader<Stdin>> = BufReader::new(tokio::io::stdin()).lines();
    reach_memory(guard, database).await?;
    println!("ready");
    while let Some(line) = lines.next_line().await? {
        if line == "warm" {
            reach_memory(guard, database).await?;
            continue;
        }
        let (before, began) = (guard.stats(), Instant::now());
        let price = price(guard, database).await?;
        let (took, after) = (written(began.elapsed()), guard.stats());
        let from = match () {
            () if after.local_hits > before.local_hits => "from memory",
            () if after.hits > before.hits => "from Redis",
            () => "loaded from the database",
        };
        println!("{price}, {from} in {took}");
    }
    Ok(())
}

/// Process B, as process A sees it. It is killed when this is dropped.
struct Replica {
    process: Child,
    input: ChildStdin,
    output: Lines<BufReader<ChildStdout>>,
}

impl Replica {
    async fn start(url: &str, namespace: &str, database: &Path) -> Outcome<Self> {
        let mut command = Command::new(std::env::current_exe()?);
        command.args([url, namespace]).arg(database).kill_on_drop(true);
        let mut process = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let input = process.stdin.take().ok_or("no stdin")?;
        let output = BufReader::new(process.stdout.take().ok_or("no stdout")?).lines();
        let mut replica = Self { process, input, output };
        replica.read_line().await?;
        Ok(replica)
    }

    /// Prints its answer.
    async fn ask(&mut self) -> Outcome<()> {
        self.send_line("ask").await?;
        println!("  B: {}", self.read_line().await?);
        Ok(())
    }

    async fn send_line(&mut self, line: &str) -> Outcome<()> {
        Ok(self.input.write_all(format!("{line}\n").as_bytes()).await?)
    }

    async fn read_line(&mut self) -> Outcome<String> {
        Ok(self.output.next_line().await?.ok_or("process B has ended")?)
    }

    async fn signal(&self, name: &str) -> Outcome<()> {
        let id = self.process.id().ok_or("process B has ended")?;
        let status = Command::new("kill").arg(format!("-{name}")).arg(id.to_string()).status().await?;
        if status.success() { Ok(()) } else { Err(format!("kill -{name}: {status}").into()) }
    }
}

/// The database of both processes: a file with the price. It is removed when this is dropped.
struct Database(PathBuf);

impl Database {
    fn create(name: &str) -> Outcome<Self> {
        let database = Self(std::env::temp_dir().join(format!("stampede-guard-{name}")));
        database.set(0)?;
        Ok(database)
    }

    fn set(&self, price: u32) -> std::io::Result<()> {
        std::fs::write(&self.0, price.to_string())
    }
}

impl Drop for Database {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// A `redis-server` on a free port. It is killed when this is dropped.
struct PrivateServer {
    url: String,
    _process: Child,
}

impl PrivateServer {
    async fn start() -> Outcome<Self> {
        let port = std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?.port().to_string();
        let mut command = Command::new("redis-server");
        command.args(["--bind", "127.0.0.1", "--port", &port, "--save", ""]).kill_on_drop(true);
        let process = command.stdout(Stdio::null()).spawn().map_err(|error| {
            format!("redis-server can not be started ({error}): install it, or set REDIS_URL to a server")
        })?;
        let began = Instant::now();
        while tokio::net::TcpStream::connect(format!("127.0.0.1:{port}")).await.is_err() {
            if began.elapsed() > Duration::from_secs(10) {
                return Err("redis-server does not listen".into());
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        Ok(Self { url: format!("redis://127.0.0.1:{port}/"), _process: process })
    }
}
