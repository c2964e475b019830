//! What metrics and traces cost a hit.
//!
//! ```text
//! cargo bench -p stampede-guard-otlp --bench observe    two minutes; needs redis-server
//! ```
//!
//! Each side is a process of its own, because a subscriber and a recorder can not be taken back. The sides take turns, nine rounds of a
//! second each, and a row is the median ratio of a side to the control of its round. All run the same calls of one task.
//!
//! - `nothing`: neither a recorder nor a subscriber is installed. The control.
//! - `twice`: the same, and each hit does once more what the guard does for its observation: a count that is spread over threads, and an event
//!   that no subscriber wants. What it costs more is what observation costs where nothing is installed.
//! - `metrics`: with the recorder of `metrics-exporter-prometheus`.
//! - `otlp`: with the recorder, and the layer, the sampler and the exporters of this package; one request in a hundred is sampled. Each hit
//!   is inside a span of its request, as in a service. The receiver is a thread of the bench that reads and answers.

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

const ROUNDS: usize = 9;
const ROUND: Duration = Duration::from_secs(1);
/// Side, tier, what it may cost more than the control, in percent.
const ROWS: [(&str, &str, f64); 6] = [
    ("twice", "local", 100.0),
    ("twice", "redis", 1.0),
    ("metrics", "local", 15.0),
    ("metrics", "redis", 3.0),
    ("otlp", "redis", 5.0),
    ("otlp", "local", f64::INFINITY),
];

fn main() {
    if let Ok(side) = env::var("SG_SIDE") {
        return println!("{}", nanoseconds(&side, &env::var("SG_TIER").expect("both are set")));
    }
    let (_server, url) = redis();
    let endpoint = receiver();
    let run = |side: &str, tier: &str| -> f64 {
        let mut command = Command::new(env::current_exe().expect("this program"));
        command.envs([("SG_SIDE", side), ("SG_TIER", tier), ("REDIS_URL", &url)]);
        command.env("OTEL_EXPORTER_OTLP_ENDPOINT", &endpoint);
        let output = command.stderr(Stdio::inherit()).output().expect("a process");
        String::from_utf8_lossy(&output.stdout).trim().parse().expect("a number")
    };
    println!(
        "{:8} {:6} {:>12} {:>12} {:>22} {:>8}",
        "side", "hit", "control", "side", "more (all rounds)", "at most"
    );
    for (side, tier, most) in ROWS {
        let mut rounds: Vec<(f64, f64)> = (0..ROUNDS)
            // Whatever comes first in a round may be at an advantage.
            .map(|round| match round % 2 {
                0 => (run("nothing", tier), run(side, tier)),
                _ => {
                    let second = run(side, tier);
                    (run("nothing", tier), second)
                }
            })
            .collect();
        let more = |(control, side): &(f64, f64)| (side / control - 1.0) * 100.0;
        rounds.sort_by(|a, b| more(a).total_cmp(&more(b)));
        let (control, measured) = rounds[ROUNDS / 2];
        let spread = format!(
            "{:.1} % ({:.1} .. {:.1})",
            more(&rounds[ROUNDS / 2]),
            more(&rounds[0]),
            more(&rounds[ROUNDS - 1])
        );
        let bound = if most.is_finite() { format!("{most} %") } else { String::new() };
        println!("{side:8} {tier:6} {control:>9.1} ns {measured:>9.1} ns {spread:>22} {bound:>8}");
    }
}

/// The time of a hit of this side.
fn nanoseconds(side: &str, tier: &str) -> f64 {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let telemetry = match side {
        "metrics" => {
            let recorder = metrics_exporter_prometheus::PrometheusBuilder::new().build_recorder();
            metrics::set_global_recorder(recorder).expect("the first one");
            None
        }
        "otlp" => {
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

async fn measured(side: &str, tier: &str) -> f64 {
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
    let (began, mut hits) = (Instant::now(), 0_u32);
    while began.elapsed() < ROUND {
        // Few enough that the tasks of the guard have their turn.
        for _ in 0..64 {
            match side {
                "otlp" => {
                    hit().instrument(info_span!("request", path = "/reports/1")).await;
                }
                "twice" => {
                    hit().await;
                    observe_once_more();
                }
                _ => {
                    hit().await;
                }
            }
            hits += 1;
        }
        tokio::task::yield_now().await;
    }
    began.elapsed().as_nanos() as f64 / f64::from(hits)
}

#[repr(align(128))]
struct Place(AtomicU64);

static PLACES: [Place; 16] = [const { Place(AtomicU64::new(0)) }; 16];

thread_local! {
    static PLACE: usize = const { 3 };
}

/// What a hit does to be observed.
#[inline(never)]
fn observe_once_more() {
    let place = PLACE.try_with(|place| *place).unwrap_or_default();
    PLACES[place].0.fetch_add(1, Ordering::Relaxed);
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
