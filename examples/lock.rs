//! A counter that several processes increment: first without a lock, then under a mutex.
//!
//! `REDIS_URL=redis://127.0.0.1/ cargo run --example lock` starts four processes. Without `REDIS_URL` it uses four tasks and
//! an in-memory store.

mod support;

use std::error::Error;
use std::fs::OpenOptions;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::Duration;

use stampede_guard::lock::{Locks, Mutex};
use support::{exit, unusable};

const WORKERS: usize = 4;
const ROUNDS: usize = 100;

type Outcome<T> = Result<T, Box<dyn Error + Send + Sync>>;

/// Reads, waits, writes. If another worker writes during the wait, its increment is overwritten.
async fn increment(counter: &Path) -> std::io::Result<()> {
    let count = read(counter)?;
    tokio::time::sleep(Duration::from_millis(1)).await;
    write(counter, count + 1)
}

fn read(counter: &Path) -> std::io::Result<usize> {
    std::fs::read_to_string(counter)?.trim().parse().map_err(std::io::Error::other)
}

/// Overwrites the same number of bytes of the file, so that a reader never finds a partly written file.
fn write(counter: &Path, count: usize) -> std::io::Result<()> {
    let mut file = OpenOptions::new().create(true).truncate(false).write(true).open(counter)?;
    file.write_all(format!("{count:8}").as_bytes())
}

/// The work of one worker.
async fn work(counter: PathBuf, mutex: Option<Mutex>) -> Outcome<()> {
    for _ in 0..ROUNDS {
        match &mutex {
            None => increment(&counter).await?,
            // `value` is the closure's result; the mutex is unlocked even if the closure fails.
            Some(mutex) => mutex.synchronize(async |_| increment(&counter).await).await?.value?,
        }
    }
    Ok(())
}

fn mutex(locks: &Locks) -> Outcome<Mutex> {
    Ok(locks.mutex("example:counter").ttl(Duration::from_secs(5)).build()?)
}

fn locks(url: &str) -> Outcome<Locks> {
    Ok(Locks::new(redis::Client::open(url)?))
}

/// Runs all workers to their end and returns the counter.
async fn count(url: Option<&str>, safely: bool) -> Outcome<usize> {
    let counter = std::env::temp_dir().join(format!("stampede-guard-{}.counter", std::process::id()));
    write(&counter, 0)?;
    match url {
        Some(_) => {
            let program = std::env::current_exe()?;
            let how = if safely { "safely" } else { "unsafely" };
            let start = |_| Command::new(&program).arg(how).arg(&counter).spawn();
            let workers: Vec<_> = (0..WORKERS).map(start).collect::<Result<_, _>>()?;
            for mut worker in workers {
                if !worker.wait()?.success() {
                    return Err("a worker failed".into());
                }
            }
        }
        None => {
            let locks = Locks::in_memory();
            let mut workers = tokio::task::JoinSet::new();
            for _ in 0..WORKERS {
                // One handle each: a handle holds its mutex once.
                let mutex = if safely { Some(mutex(&locks)?) } else { None };
                workers.spawn(work(counter.clone(), mutex));
            }
            while let Some(worker) = workers.join_next().await {
                worker??;
            }
        }
    }
    let count = read(&counter)?;
    std::fs::remove_file(counter)?;
    Ok(count)
}

#[tokio::main]
async fn main() -> ExitCode {
    // Prints the guard's warnings: why it can not use its server, and the remedy.
    tracing_subscriber::fmt().with_writer(std::io::stderr).init();
    exit(run().await)
}

/// Runs one worker if this process was started as one, else the whole example.
async fn run() -> Outcome<()> {
    let url = std::env::var("REDIS_URL").ok();
    let mut args = std::env::args_os().skip(1);
    if let (Some(how), Some(counter)) = (args.next(), args.next()) {
        let mutex = match &url {
            Some(url) if how == "safely" => Some(mutex(&locks(url)?)?),
            _ => None,
        };
        return work(counter.into(), mutex).await;
    }

    match &url {
        Some(url) => {
            // Fail here, before four workers fail.
            locks(url)?.connect().await.map_err(|error| unusable(&error, "tasks and a store in memory"))?;
            println!("{WORKERS} processes increment a counter {ROUNDS} times each");
        }
        None => {
            println!("{WORKERS} tasks increment a counter {ROUNDS} times each; for processes, set REDIS_URL");
        }
    }
    let expected = WORKERS * ROUNDS;
    for (safely, how) in [(false, "as they come"), (true, "under a mutex")] {
        let started = std::time::Instant::now();
        let total = count(url.as_deref(), safely).await?;
        let (lost, took) = (expected - total, started.elapsed());
        println!("  {how}: {total} of {expected}, {lost} increments lost, in {took:.1?}");
    }
    Ok(())
}
