//! One process of a fleet of a Rust library: reads orders, calls the library, and reports each call.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use futures_util::future::join_all;
use futures_util::{StreamExt as _, stream};
use tokio::io::{AsyncBufReadExt as _, BufReader, stdin};

use crate::subjects::{self, Subject};
use crate::wire::{Call, Command, Hits, Order, Ready, Reply, Setup, value_id};

/// The head start of a caller that goes away.
const HEAD_START: Duration = Duration::from_millis(20);

pub(crate) fn run() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    runtime.expect("a runtime").block_on(serve());
}

async fn serve() {
    let mut lines = BufReader::new(stdin()).lines();
    let first = lines.next_line().await.expect("stdin").expect("the set-up");
    let setup: Setup = serde_json::from_str(&first).expect("a set-up");
    let subject = subjects::rust(&setup).await;
    let lacks = subject.lacks().iter().map(|&(what, why)| (what.to_owned(), why.to_owned())).collect();
    say(&Ready { version: subjects::version(&setup.subject), lacks });
    while let Ok(Some(line)) = lines.next_line().await {
        let order: Order = serde_json::from_str(&line).expect("an order");
        let subject = Arc::clone(&subject);
        tokio::spawn(async move { say(&Reply { id: order.id, ..obey(subject, order.command).await }) });
    }
}

fn say(line: &impl serde::Serialize) {
    // One write, so that lines of several tasks do not mix.
    println!("{}", serde_json::to_string(line).expect("JSON"));
}

async fn obey(subject: Arc<dyn Subject>, command: Command) -> Reply {
    match command {
        Command::Burst { keys, callers, at_ms, timeout_ms, cancel_first_after_ms } => {
            let due = moment(at_ms);
            let timeout = Duration::from_millis(timeout_ms);
            let leader = cancel_first_after_ms.map(|after| {
                let (subject, key) = (Arc::clone(&subject), keys[0].clone());
                tokio::spawn(async move {
                    tokio::time::sleep_until((due - HEAD_START).into()).await;
                    // Dropping the future at the end is what a server does when its client has left.
                    let _ = tokio::time::timeout(Duration::from_millis(after), subject.get(&key)).await;
                })
            });
            let calls = (0..callers).map(|n| {
                tokio::spawn(call(Arc::clone(&subject), keys[n % keys.len()].clone(), due, timeout))
            });
            let calls = join_all(calls).await.into_iter().map(|call| call.expect("no panic")).collect();
            if let Some(leader) = leader {
                let _ = leader.await;
            }
            Reply { calls, ..Reply::default() }
        }
        Command::Rate { key, per_second, seconds, at_ms, timeout_ms } => {
            let start = moment(at_ms);
            let calls = (0..(per_second as f64 * seconds) as u64).map(|n| {
                let due = start + Duration::from_secs_f64(n as f64 / per_second as f64);
                tokio::spawn(call(Arc::clone(&subject), key.clone(), due, Duration::from_millis(timeout_ms)))
            });
            let calls: Vec<_> = calls.collect();
            let calls = join_all(calls).await.into_iter().map(|call| call.expect("no panic")).collect();
            Reply { calls, ..Reply::default() }
        }
        Command::Invalidate { key } => {
            Reply { error: subject.invalidate(&key).await.err(), ..Reply::default() }
        }
        Command::Fill { prefix, keys } => {
            let loads = stream::iter(0..keys).map(|n| {
                let (subject, key) = (Arc::clone(&subject), format!("{prefix}{n}"));
                async move { subject.get(&key).await.err() }
            });
            let errors = loads.buffer_unordered(64).filter_map(|error| async move { error });
            Reply { error: errors.collect::<Vec<_>>().await.into_iter().next(), ..Reply::default() }
        }
        Command::Hits { prefix, keys, callers, ms } => {
            let hits = hits(subject, &prefix, keys, callers, Duration::from_millis(ms)).await;
            Reply { hits: Some(hits), ..Reply::default() }
        }
    }
}

/// An instant from milliseconds of the wall clock, which all processes of this machine share.
fn moment(at_ms: f64) -> Instant {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("the clock is past 1970").as_secs_f64();
    Instant::now() + Duration::from_secs_f64((at_ms / 1e3 - now).max(0.0))
}

async fn call(subject: Arc<dyn Subject>, key: String, due: Instant, timeout: Duration) -> Call {
    tokio::time::sleep_until(due.into()).await;
    let begun = Instant::now();
    let answer = tokio::time::timeout(timeout, subject.get(&key)).await;
    let outcome = match answer {
        Ok(Ok(value)) => format!("={}", value_id(&value)),
        Ok(Err(error)) => {
            format!("!{}", error.lines().next().unwrap_or_default().chars().take(160).collect::<String>())
        }
        Err(_) => "!no answer".to_owned(),
    };
    let late = begun.saturating_duration_since(due).as_micros() as i64;
    (late, begun.elapsed().as_micros() as u64, outcome)
}

/// Calls for the requested time; each caller has its share of the keys, in turn.
async fn hits(
    subject: Arc<dyn Subject>,
    prefix: &str,
    keys: usize,
    callers: usize,
    length: Duration,
) -> Hits {
    let (over, wrong) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let begun = Instant::now();
    let running: Vec<_> = (0..callers)
        .map(|caller| {
            let share = (keys / callers).max(1);
            let own: Vec<_> =
                (0..share).map(|n| format!("{prefix}{}", (caller * share + n) % keys)).collect();
            let (subject, over, wrong) = (Arc::clone(&subject), Arc::clone(&over), Arc::clone(&wrong));
            tokio::spawn(async move {
                let (mut count, mut samples) = (0_u64, Vec::new());
                while !over.load(Ordering::Relaxed) {
                    let key = &own[count as usize % own.len()];
                    // Reading the clock twice costs as much as a hit from memory: each sixteenth call is timed.
                    let start = count.is_multiple_of(16).then(Instant::now);
                    if !subject.get(key).await.is_ok_and(|value| value.len() > 100) {
                        wrong.fetch_add(1, Ordering::Relaxed);
                    }
                    samples.extend(start.map(|start| start.elapsed().as_nanos() as f64 / 1e3));
                    count += 1;
                    // A hit from memory never waits; without this one caller would run alone until its budget ends.
                    if count.is_multiple_of(64) {
                        tokio::task::yield_now().await;
                    }
                }
                (count, samples)
            })
        })
        .collect();
    tokio::time::sleep(length).await;
    over.store(true, Ordering::Relaxed);
    let (mut count, mut samples) = (0, Vec::new());
    for caller in running {
        let (calls, times) = caller.await.expect("no panic");
        count += calls;
        samples.extend(times);
    }
    let seconds = begun.elapsed().as_secs_f64();
    samples.sort_by(f64::total_cmp);
    let at = |share: f64| samples.get((samples.len() as f64 * share) as usize).copied().unwrap_or_default();
    Hits {
        per_second: count as f64 / seconds,
        p50_us: at(0.5),
        p99_us: at(0.99),
        wrong: wrong.load(Ordering::Relaxed),
    }
}
