//! What metrics and traces cost a hit.
//!
//! ```text
//! cargo bench -p stampede-guard-otlp --bench observe    two minutes; needs redis-server
//! ```
//!
//! Each side is a process of its own, because a subscriber and a recorder can not be taken back. The sides take turns, fifteen rounds of
//! 400 ms each; a row compares the best round of a side with the best one of its control, because what else runs on the machine only makes a
//! round slower. In brackets are the rounds, pair by pair. All run the same calls of one task. Times are those of the processor, of all threads
//! of the process (of `twice`, by the clock): a hit on Redis takes longer, so its ratio is smaller than the one that is reported.
//!
//! - `nothing`: neither a recorder nor a subscriber is installed. The control.
//! - `twice`: the same, and every other 64 hits do once more what the guard does for their observation: a count that is spread over threads, and
//!   an event that no subscriber wants. What these cost more is what observation costs where nothing is installed.
//! - `metrics`: with the recorder of `metrics-exporter-prometheus`.
//! - `otlp`: with the recorder, the layer, the sampler and the exporters of this package. One request in a hundred is sampled, the others are
//!   not; the receiver is a thread of the bench that reads and answers.
//! - `request`: the same, and each hit is inside a span that the service makes for its request. The guard makes none for a hit: this is what such
//!   a span costs the service, with or without a guard.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use std::{env, thread};

use stampede_guard::{Policy, StampedeGuard};
use stampede_guard_otlp::Telemetry;
use stampede_guard_otlp::links::LoadLinks;
use tracing::{Instrument as _, info_span};
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;

const ROUNDS: usize = 15;
const ROUND: Duration = Duration::from_millis(400);
/// Side, tier, what it may cost more than the control, in percent.
const ROWS: [(&str, &str, f64); 8] = [
    ("twice", "local", f64::INFINITY),
    ("twice", "redis", 1.0),
    ("metrics", "local", 15.0),
    ("metrics", "redis", 3.0),
    ("otlp", "local", f64::INFINITY),
    ("otlp", "redis", 5.0),
    ("request", "local", f64::INFINITY),
    ("request", "redis", f64::INFINITY),
];

fn main() {
    if let Ok(side) = env::var("SG_SIDE") {
        let times = nanoseconds(&side, &env::var("SG_TIER").expect("both are set"));
        return times.iter().for_each(|time| println!("{time}"));
    }
    let (_server, url) = redis();
    let endpoint = receiver();
    // The time of a hit of the side; of `twice` also that of its control.
    let run = |side: &str, tier: &str| -> Vec<f64> {
        let mut command = Command::new(env::current_exe().expect("this program"));
        command.envs([("SG_SIDE", side), ("SG_TIER", tier), ("REDIS_URL", &url)]);
        command.env("OTEL_EXPORTER_OTLP_ENDPOINT", &endpoint);
        let output = command.stderr(Stdio::inherit()).output().expect("a process");
        let text = String::from_utf8_lossy(&output.stdout);
        text.split_whitespace().map(|number| number.parse().expect("a number")).collect()
    };
    println!(
        "{:8} {:6} {:>12} {:>12} {:>8} {:>20} {:>8}",
        "side", "hit", "control", "side", "more", "(rounds)", "at most"
    );
    for (side, tier, most) in ROWS {
        let rounds: Vec<(f64, f64)> = (0..ROUNDS)
            .map(|round| match (side, round % 2) {
                ("twice", _) => {
                    let both = run(side, tier);
                    (both[0], both[1])
                }
                // Whatever comes first in a round may be at an advantage.
                (_, 0) => (run("nothing", tier)[0], run(side, tier)[0]),
                _ => {
                    let measured = run(side, tier)[0];
                    (run("nothing", tier)[0], measured)
                }
            })
            .collect();
        let more = |control: f64, side: f64| (side / control - 1.0) * 100.0;
        let best = |times: &mut dyn Iterator<Item = f64>| times.fold(f64::INFINITY, f64::min);
        let control = best(&mut rounds.iter().map(|(control, _)| *control));
        let measured = best(&mut rounds.iter().map(|(_, side)| *side));
        let mut pairs: Vec<f64> = rounds.iter().map(|(control, side)| more(*control, *side)).collect();
        pairs.sort_by(f64::total_cmp);
        // The quarters in the middle.
        let spread = format!("({:.1} .. {:.1} %)", pairs[ROUNDS / 4], pairs[ROUNDS - 1 - ROUNDS / 4]);
        let bound = if most.is_finite() { format!("{most} %") } else { String::new() };
        let more = format!("{:.1} %", more(control, measured));
        println!("{side:8} {tier:6} {control:>9.1} ns {measured:>9.1} ns {more:>8} {spread:>20} {bound:>8}");
    }
}

/// The time of a hit of this side; of `twice` also that of its control, first.
fn nanoseconds(side: &str, tier: &str) -> Vec<f64> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let telemetry = match side {
        "metrics" => {
            let recorder = metrics_exporter_prometheus::PrometheusBuilder::new().build_recorder();
            metrics::set_global_recorder(recorder).expect("the first one");
            None
        }
        "otlp" | "request" => {
            let telemetry = Telemetry::start(0.01).expect("settings that are understood");
            tracing_subscriber::registry().with(telemetry.layer()).init();
            Some(telemetry)
        }
        _ => None,
    };
    let time = runtime.block_on(measured(side, tier));
    // The last batch is not part of any hit.
    thread::spawn(|| telemetry.map(Telemetry::shutdown).map(drop)).join().expect("no panic");
    time
}

async fn measured(side: &str, tier: &str) -> Vec<f64> {
    let hour = Duration::from_secs(3600);
    let policy =
        Policy::builder().fresh_for(hour).ttl_jitter(0.0).coordination_budget(Duration::from_millis(800));
    let policy = if tier == "local" { policy.local_for(hour) } else { policy };
    let client = redis::Client::open(env::var("REDIS_URL").expect("set by the bench")).expect("an address");
    let builder =
        StampedeGuard::builder(client).namespace(tier).policy(policy.build().expect("valid settings"));
    let guard = builder.span_links(LoadLinks).build().expect("valid settings");
    guard.connect().await.expect("the server answers");
    let hit = async || {
        let loaded = guard.get_or_load("key", || async { Ok::<_, std::io::Error>(7_u64) });
        loaded.await.expect("a hit")
    };
    // Copies are made, the task that publishes is begun, and the first connection is old.
    let warm = Instant::now();
    while warm.elapsed() < ROUND / 3 {
        hit().await;
        tokio::task::yield_now().await;
    }
    let mut sides = [(Duration::ZERO, 0_u32); 2];
    let (began, busy_before) = (Instant::now(), busy());
    while began.elapsed() < ROUND {
        for (at, (took, hits)) in sides.iter_mut().enumerate().take(if side == "twice" { 2 } else { 1 }) {
            let batch = Instant::now();
            // Few enough that the tasks of the guard have their turn.
            for _ in 0..64 {
                if side == "request" {
                    hit().instrument(info_span!("request", path = "/reports/1")).await;
                } else {
                    hit().await;
                }
                if at == 1 {
                    observe_once_more();
                }
            }
            (*took, *hits) = (*took + batch.elapsed(), *hits + 64);
            tokio::task::yield_now().await;
        }
    }
    if let (Some(before), Some(now), "nothing" | "metrics" | "otlp" | "request") = (busy_before, busy(), side)
    {
        sides[0].0 = now - before;
    }
    let used = sides.iter().filter(|(_, hits)| *hits > 0);
    used.map(|(took, hits)| took.as_nanos() as f64 / f64::from(*hits)).collect()
}

/// For how long the threads of this process have had a processor, where the system reports that.
fn busy() -> Option<Duration> {
    let threads = std::fs::read_dir("/proc/self/task").ok()?;
    let times = threads.filter_map(|thread| {
        let text = std::fs::read_to_string(thread.ok()?.path().join("schedstat")).ok()?;
        text.split(' ').next()?.parse::<u64>().ok()
    });
    Some(Duration::from_nanos(times.sum()))
}

#[repr(align(128))]
struct Slot(AtomicU64);

static SLOTS: [Slot; 16] = [const { Slot(AtomicU64::new(0)) }; 16];

thread_local! {
    static SLOT: usize = const { 3 };
}

/// What a hit does to be observed.
#[inline(never)]
fn observe_once_more() {
    let slot = SLOT.try_with(|slot| *slot).unwrap_or_default();
    SLOTS[slot].0.fetch_add(1, Ordering::Relaxed);
    tracing::trace!(target: "stampede_guard", outcome = "hit", "stampede_guard.answered");
}

struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn redis() -> (Running, String) {
    let port = TcpListener::bind("127.0.0.1:0").and_then(|free| free.local_addr()).expect("a port").port();
    let mut command = Command::new("redis-server");
    command.args(["--port", &port.to_string(), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]);
    let started = command.stdout(Stdio::null()).spawn();
    let server = Running(started.expect("redis-server is not installed: apt-get install -y redis-server"));
    while TcpStream::connect(("127.0.0.1", port)).is_err() {
        thread::sleep(Duration::from_millis(20));
    }
    (server, format!("redis://127.0.0.1:{port}/"))
}

/// Reads whatever is exported, and thanks for it.
fn receiver() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let endpoint = format!("http://{}", listener.local_addr().expect("bound"));
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            thread::spawn(move || drop(serve(stream)));
        }
    });
    endpoint
}

fn serve(stream: TcpStream) -> std::io::Result<()> {
    let (mut answers, mut requests) = (stream.try_clone()?, BufReader::new(stream));
    let mut length = 0;
    let mut line = String::new();
    while requests.read_line(&mut line)? > 0 {
        if let Some(value) = line.to_ascii_lowercase().strip_prefix("content-length:") {
            length = value.trim().parse().unwrap_or(0);
        }
        if line.trim().is_empty() {
            requests.read_exact(&mut vec![0; length])?;
            answers.write_all(
                b"HTTP/1.1 200 OK\r\ncontent-type: application/x-protobuf\r\ncontent-length: 0\r\n\r\n",
            )?;
        }
        line.clear();
    }
    Ok(())
}
