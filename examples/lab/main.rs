//! The lab: a fleet of replica processes under load, which one can look at and break, on a page in the browser.
//!
//! ```text
//! cargo run --example lab
//! cargo run --example lab -- --port 8000        another port than 7777
//! cargo run --example lab -- --headless         for scripts: prints the address, and no more
//! cargo run --example lab -- --log              prints the replicas' warnings, too
//! cargo run --example lab --features metrics    each replica has /metrics, and the lab /targets, for Prometheus
//! ```
//!
//! There is nothing to set up. The replicas share the Redis of `REDIS_URL` if it is set, else a `redis-server` that the lab starts,
//! else memory, in which case they are tasks of one process that can neither be killed nor cut off. Ctrl-C ends all processes, and so
//! does any other end of the lab.
//!
//! This binary plays all roles: the lab itself (page, API, load generator, origin), a replica, and the reaper of the processes.

mod api;
mod board;
mod commands;
mod controls;
mod fleet;
mod history;
mod lab;
mod load;
mod origin;
mod presets;
mod processes;
#[cfg(feature = "metrics")]
mod prometheus;
#[cfg(not(feature = "metrics"))]
#[path = "no_prometheus.rs"]
mod prometheus;
mod proxy;
mod replica;
mod store;
mod story;

use std::error::Error;
use std::io::Write as _;
use std::process::ExitCode;

use tokio::net::TcpListener;
use tokio::runtime::Builder;

use fleet::member;
use lab::Lab;
use processes::{reaper, signals};

/// The variable that says which role a process plays.
const ROLE: &str = "STAMPEDE_LAB_ROLE";
/// The page's usual port.
const PORT: u16 = 7777;
const USAGE: &str = "usage: lab [--port PORT] [--headless] [--log]";

fn main() -> ExitCode {
    let role = std::env::var(ROLE).unwrap_or_default();
    let played = match role.as_str() {
        reaper::NAME => {
            reaper::run();
            Ok(())
        }
        member::NAME => run_replica(),
        _ => Options::of(std::env::args().skip(1)).and_then(|options| run_lab(&options)),
    };
    match played {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

struct Options {
    port: Option<u16>,
    headless: bool,
    logs: bool,
}

impl Options {
    fn of(mut arguments: impl Iterator<Item = String>) -> Result<Self, Box<dyn Error>> {
        let mut options = Self { port: None, headless: false, logs: false };
        while let Some(argument) = arguments.next() {
            match argument.as_str() {
                "--headless" => options.headless = true,
                "--log" => options.logs = true,
                "--port" => {
                    let port = arguments.next().unwrap_or_default();
                    options.port = Some(port.parse().map_err(|_| format!("`{port}` is no port\n{USAGE}"))?);
                }
                _ => return Err(format!("`{argument}` is unknown\n{USAGE}").into()),
            }
        }
        Ok(options)
    }
}

/// One replica: a thread is enough for its share of the load.
fn run_replica() -> Result<(), Box<dyn Error>> {
    tracing_subscriber::fmt().with_writer(std::io::stderr).init();
    signals::allow_many_files();
    let config = std::env::var(member::CONFIG)?;
    Builder::new_current_thread().enable_all().build()?.block_on(replica::process::run(&config))
}

fn run_lab(options: &Options) -> Result<(), Box<dyn Error>> {
    signals::allow_many_files();
    Builder::new_multi_thread().enable_all().build()?.block_on(serve(options))
}

/// Serves the page until Ctrl-C or SIGTERM, and ends all processes.
async fn serve(options: &Options) -> Result<(), Box<dyn Error>> {
    let listener = match options.port {
        Some(port) => TcpListener::bind(("127.0.0.1", port)).await.map_err(|error| {
            format!("port {port} can not be used ({error}): choose another one with --port")
        })?,
        None => match TcpListener::bind(("127.0.0.1", PORT)).await {
            Ok(listener) => listener,
            Err(_) => TcpListener::bind(("127.0.0.1", 0)).await?,
        },
    };
    let address = listener.local_addr()?;
    let ended = shutdown_signal()?;
    tokio::pin!(ended);
    let lab = tokio::select! {
        lab = Lab::start(options.logs) => lab?,
        // The reaper kills the processes that have begun.
        () = &mut ended => return Ok(()),
    };
    let serving = axum::serve(listener, api::router(lab.clone()));
    let mut stdout = std::io::stdout();
    // A closed pipe is no reason to end.
    let _ = writeln!(stdout, "the lab: http://{address}/");
    if !options.headless {
        let _ =
            writeln!(stdout, "\nOpen this address in a browser. Ctrl-C ends the lab and all its processes.");
    }
    let _ = stdout.flush();
    let served = tokio::select! {
        served = serving => served,
        () = ended => Ok(()),
    };
    lab.end().await;
    Ok(served?)
}

/// Waits for Ctrl-C or, on Unix, SIGTERM or the end of the terminal.
fn shutdown_signal() -> std::io::Result<impl Future<Output = ()>> {
    #[cfg(unix)]
    {
        use tokio::signal::unix::{SignalKind, signal};
        let (mut interrupt, mut terminate, mut hang_up) = (
            signal(SignalKind::interrupt())?,
            signal(SignalKind::terminate())?,
            signal(SignalKind::hangup())?,
        );
        Ok(async move {
            tokio::select! {
                _ = interrupt.recv() => {}
                _ = terminate.recv() => {}
                _ = hang_up.recv() => {}
            }
        })
    }
    #[cfg(not(unix))]
    Ok(async {
        // Without a handler the lab runs on.
        if tokio::signal::ctrl_c().await.is_err() {
            std::future::pending().await
        }
    })
}
