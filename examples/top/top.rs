//! A running fleet in the terminal: its processes, their loads, rates and hot keys, every two seconds.
//!
//! ```text
//! cargo run --example top -- redis://127.0.0.1/ shop
//! ```
//!
//! The arguments are the server and the namespace of the fleet, as its processes have them; without arguments `REDIS_URL` and
//! `NAMESPACE`. The fleet's processes need the feature `inspector` and an inspector each. Keys: q or Ctrl-C quits, p pauses, tab goes to
//! the next box, arrows scroll. With `RUN_ONCE=1` it prints the fleet as text and ends, for scripts: with 1 if the fleet could not be
//! asked.

mod model;
mod rates;
#[cfg(test)]
mod tests;
mod text;
mod view;

use std::convert::Infallible;
use std::error::Error;
use std::fmt::Display;
use std::future::poll_fn;
use std::io::{self, IsTerminal as _, Write as _};
use std::pin::pin;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use http::{Request, Response};
use http_body_util::BodyExt as _;
use ratatui::Terminal;
use ratatui::backend::Backend;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEventKind, KeyModifiers};
use serde_json::Value;
use stampede_guard::StampedeGuard;
use stampede_guard::inspector::InspectorService;
use tokio::sync::mpsc;
use tower::ServiceExt as _;

use crate::model::Model;

/// How often the fleet is asked.
const PERIOD: Duration = Duration::from_secs(2);
/// The width of the text that is printed with `RUN_ONCE`.
const COLUMNS_OF_TEXT: usize = 140;

#[tokio::main]
async fn main() -> ExitCode {
    match run().await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

async fn run() -> Result<(), String> {
    let (url, namespace) = arguments()?;
    let is_once = std::env::var_os("RUN_ONCE").is_some();
    if !is_once && !io::stdout().is_terminal() {
        return Err("stdout is no terminal: run this in one, or set RUN_ONCE=1 to print the fleet as text."
            .to_owned());
    }
    // Without the URL, which may have a password.
    let client = redis::Client::open(url).map_err(|error| {
        let remedy = "write it as redis://USER:PASSWORD@HOST:PORT/, or as rediss://.. with the feature `tls` of this command";
        format!("The URL of the server can not be used ({error}): {remedy}.")
    })?;
    if is_once {
        tracing_subscriber::fmt().with_writer(io::stderr).init();
    }
    let mut builder = StampedeGuard::builder(client);
    if let Some(namespace) = namespace {
        builder = builder.namespace(namespace);
    }
    let guard = builder.build().map_err(|error| with_causes(&error))?;
    guard.connect().await.map_err(|error| {
        format!("The fleet can not be asked ({}): mend that, and start this again.", with_causes(&error))
    })?;
    let service =
        guard.inspector().unprotected().name("top").into_service().map_err(|error| with_causes(&error))?;
    if is_once { print(&service).await } else { show_in_terminal(&service).await }
}

/// The URL and the namespace.
fn arguments() -> Result<(String, Option<String>), String> {
    let mut arguments = std::env::args().skip(1);
    let set = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
    match (
        arguments.next().or_else(|| set("REDIS_URL")),
        arguments.next().or_else(|| set("NAMESPACE")),
        arguments.next(),
    ) {
        (Some(url), namespace, None) if !url.starts_with('-') => Ok((url, namespace)),
        _ => Err("Usage: top redis://USER:PASSWORD@HOST:PORT/ [NAMESPACE], or set REDIS_URL and NAMESPACE."
            .to_owned()),
    }
}

/// An error with all its causes.
fn with_causes(error: &dyn Error) -> String {
    let mut text = error.to_string();
    for cause in std::iter::successors(error.source(), |&cause| cause.source()).map(ToString::to_string) {
        // Some errors repeat the text of their cause.
        if !text.ends_with(&cause) {
            text = format!("{text}: {cause}");
        }
    }
    text
}

/// Asks the fleet. An error is a sentence for the operator.
async fn ask(service: &InspectorService) -> Result<Value, String> {
    let request = Request::get("/api/fleet")
        .header("x-stampede-guard", "top")
        .body(String::new())
        .map_err(|error| error.to_string())?;
    let response: Result<Response<_>, Infallible> = service.clone().oneshot(request).await;
    let Ok(response) = response;
    let status = response.status();
    let body = response.into_body().collect().await.map_err(|error| error.to_string())?.to_bytes();
    let answer: Value = serde_json::from_slice(&body)
        .map_err(|error| format!("the inspector's answer is no JSON: {error}"))?;
    if status.is_success() {
        Ok(answer)
    } else {
        Err(format!("the inspector answered with {status}: {}", answer["error"]))
    }
}

/// Prints the fleet of two answers, because rates are differences.
async fn print(service: &InspectorService) -> Result<(), String> {
    let mut model = Model::default();
    model.take(ask(service).await?, Instant::now());
    tokio::time::sleep(PERIOD).await;
    model.take(ask(service).await?, Instant::now());
    let text = view::text(&model, COLUMNS_OF_TEXT);
    // A closed pipe is no panic, as it would be with `print!`.
    io::stdout()
        .write_all(text.as_bytes())
        .map_err(|error| format!("stdout can not be written to: {error}"))?;
    match model.error {
        None => Ok(()),
        Some(error) => Err(format!("The fleet can not be asked: {}", text::cut(&error, 400))),
    }
}

/// Restores the terminal when it is dropped: after a key, a signal and an error. `try_init` has a panic restore it, too.
struct Restored;

impl Drop for Restored {
    fn drop(&mut self) {
        ratatui::restore();
    }
}

async fn show_in_terminal(service: &InspectorService) -> Result<(), String> {
    let no_terminal = |error: io::Error| {
        format!(
            "The terminal can not be used ({error}): run this in another one, or set RUN_ONCE=1 to print the fleet as text."
        )
    };
    let _restored = Restored;
    let mut terminal = ratatui::try_init().map_err(no_terminal)?;
    let events = terminal_events();
    tokio::select! {
        shown = show(&mut terminal, || ask(service), events) => shown,
        () = terminated() => Ok(()),
    }
}

/// The terminal's events, read by a thread of their own, because reading blocks.
fn terminal_events() -> mpsc::Receiver<io::Result<Event>> {
    let (sender, events) = mpsc::channel(64);
    std::thread::spawn(move || {
        loop {
            let event = event::read();
            let is_last = event.is_err();
            if sender.blocking_send(event).is_err() || is_last {
                return;
            }
        }
    });
    events
}

/// Returns at SIGTERM, and at a SIGINT of another process: Ctrl-C is a key while the terminal is in use.
async fn terminated() {
    #[cfg(unix)]
    {
        use tokio::signal::unix::{SignalKind, signal};
        let signals = [SignalKind::interrupt(), SignalKind::terminate(), SignalKind::hangup()].map(signal);
        let mut signals: Vec<_> = signals.into_iter().filter_map(Result::ok).collect();
        poll_fn(|cx| {
            let has_come = signals.iter_mut().any(|signal| signal.poll_recv(cx).is_ready());
            if has_come { std::task::Poll::Ready(()) } else { std::task::Poll::Pending }
        })
        .await;
    }
    #[cfg(not(unix))]
    if tokio::signal::ctrl_c().await.is_err() {
        std::future::pending::<()>().await;
    }
}

/// Asks and draws until a key ends it. Keys work while an answer is awaited.
async fn show<B, F>(
    terminal: &mut Terminal<B>,
    ask: impl Fn() -> F,
    mut events: mpsc::Receiver<io::Result<Event>>,
) -> Result<(), String>
where
    B: Backend,
    B::Error: Display,
    F: Future<Output = Result<Value, String>>,
{
    let mut model = Model::default();
    let mut ticks = tokio::time::interval(PERIOD);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut answer = pin!(ask());
    let mut is_asking = true;
    loop {
        terminal
            .draw(|frame| view::draw(frame, &model))
            .map_err(|error| format!("The terminal can not be written to: {error}"))?;
        tokio::select! {
            answered = &mut answer, if is_asking => {
                is_asking = false;
                match answered {
                    Ok(answer) => model.take(answer, Instant::now()),
                    Err(error) => model.miss(error, Instant::now()),
                }
            }
            _ = ticks.tick(), if !is_asking && !model.is_paused => {
                answer.set(ask());
                is_asking = true;
            }
            event = events.recv() => match event {
                Some(Ok(Event::Key(key))) if key.kind != KeyEventKind::Release => {
                    let is_control = key.modifiers.contains(KeyModifiers::CONTROL);
                    match key.code {
                        KeyCode::Char('q') => return Ok(()),
                        KeyCode::Char('c') if is_control => return Ok(()),
                        KeyCode::Char('p') => model.is_paused = !model.is_paused,
                        code => {
                            let size = terminal.size().map_err(|error| format!("The terminal has no size: {error}"))?;
                            view::press(&mut model, code, size.into());
                        }
                    }
                }
                // Such as a resize, which the next drawing measures.
                Some(Ok(_)) => {}
                Some(Err(error)) => return Err(format!("The terminal's keys can not be read: {error}")),
                None => return Err("The terminal's keys can not be read any more.".to_owned()),
            },
        }
    }
}
