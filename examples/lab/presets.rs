//! The presets: a scenario each, with its settings, its script and its result in numbers.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde_json::{Map, Value, json};
use tokio::time::sleep;

use crate::board::Outcome;
use crate::controls::Mode;
use crate::lab::Lab;
use crate::load::PATIENCE;
use crate::story::{grouped, number};

/// How many results are stored.
const MAX_RESULTS: usize = 24;

/// A scenario.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Name {
    ColdDeploy,
    ExpiringKey,
    DyingLeader,
    RedisDown,
    LostCache,
}

impl Name {
    const ALL: [Self; 5] =
        [Self::ColdDeploy, Self::ExpiringKey, Self::DyingLeader, Self::RedisDown, Self::LostCache];

    pub(crate) fn of(text: &str) -> Result<Self, String> {
        let known = Self::ALL.into_iter().find(|name| name.id() == text);
        known.ok_or_else(|| {
            let names = Self::ALL.map(Self::id).join(", ");
            format!("there is no preset `{text}`: choose one of {names}")
        })
    }

    fn id(self) -> &'static str {
        match self {
            Self::ColdDeploy => "cold-deploy",
            Self::ExpiringKey => "expiring-key",
            Self::DyingLeader => "dying-leader",
            Self::RedisDown => "redis-down",
            Self::LostCache => "lost-cache",
        }
    }

    fn title(self) -> &'static str {
        match self {
            Self::ColdDeploy => "A cold deploy",
            Self::ExpiringKey => "An expiring hot key",
            Self::DyingLeader => "A dying leader",
            Self::RedisDown => "Redis down",
            Self::LostCache => "A lost cache",
        }
    }

    /// The modes that are compared, if the page's mode is this one.
    fn compares(self, mode: Mode) -> [Mode; 2] {
        match (self, mode) {
            // Coalescing alone does not help: the keys differ.
            (Self::LostCache, _) => [Mode::On, Mode::Adaptive],
            (_, Mode::Off) => [Mode::Off, Mode::On],
            (_, mode) => [Mode::Off, mode],
        }
    }

    /// Whether the script kills or stops processes.
    fn needs_redis(self) -> bool {
        matches!(self, Self::DyingLeader | Self::RedisDown)
    }

    /// The settings. Each origin has room for what the fleet needs if one request loads, and not for much more.
    fn settings(self) -> Value {
        match self {
            Self::ColdDeploy => {
                json!({ "requests_per_second": 600, "keys": 30, "latency_ms": 300, "capacity": 8, "fresh_ms": 3_000 })
            }
            Self::ExpiringKey => {
                json!({ "requests_per_second": 600, "keys": 1, "latency_ms": 400, "capacity": 8, "fresh_ms": 2_000 })
            }
            Self::DyingLeader => {
                json!({ "requests_per_second": 300, "keys": 3, "latency_ms": 400, "capacity": 8, "fresh_ms": 60_000 })
            }
            Self::RedisDown => {
                json!({ "requests_per_second": 400, "keys": 4, "latency_ms": 250, "capacity": 24, "fresh_ms": 60_000 })
            }
            Self::LostCache => {
                json!({ "requests_per_second": 400, "keys": 500, "latency_ms": 200, "capacity": 10, "fresh_ms": 600_000,
                    "slowdown_percent": 3 })
            }
        }
    }

    /// How long the script takes.
    fn length(self) -> Duration {
        Duration::from_millis(match self {
            Self::ColdDeploy => 8_000,
            Self::ExpiringKey => 7_000,
            Self::DyingLeader => 9_000,
            Self::RedisDown => 8_000,
            Self::LostCache => 15_000,
        })
    }
}

/// The preset that runs, and the results of earlier ones.
pub(crate) struct Presets {
    lab: Arc<Lab>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    present: Option<Present>,
    results: Vec<Value>,
    stop: Option<tokio::task::AbortHandle>,
}

struct Present {
    name: Name,
    mode: Mode,
    phase: usize,
    phases: usize,
    /// When the script of this phase ends; `None` while it is prepared or its last requests are answered.
    ends: Option<Instant>,
}

impl Presets {
    pub(crate) fn new(lab: Arc<Lab>) -> Arc<Self> {
        Arc::new(Self { lab, state: Mutex::default() })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn is_running(&self) -> bool {
        self.state().present.is_some()
    }

    pub(crate) fn present(&self) -> Value {
        let state = self.state();
        let Some(Present { name, mode, phase, phases, ends }) = &state.present else { return Value::Null };
        let left = ends.map(|ends| ends.saturating_duration_since(Instant::now()).as_millis() as u64);
        let length = name.length().as_millis() as u64;
        json!({
            "name": name.id(), "title": name.title(), "mode": mode, "phase": phase, "phases": phases,
            "left_ms": left, "length_ms": length,
        })
    }

    pub(crate) fn results(&self) -> Vec<Value> {
        self.state().results.clone()
    }

    /// Begins a preset in the background: in the present mode, or once in each of the modes that it compares.
    pub(crate) fn start(self: &Arc<Self>, name: Name, compare: bool) -> Result<String, String> {
        if name.needs_redis() && !self.lab.fleet.in_processes() {
            return Err(format!(
                "`{}` needs processes that share Redis: install redis-server, and start the lab again",
                name.id()
            ));
        }
        let mode = self.lab.controls.borrow().mode;
        let modes = if compare { name.compares(mode).to_vec() } else { vec![mode] };
        let state = &mut *self.state();
        if state.present.is_some() {
            return Err("a preset runs: wait for its end, or stop it".to_owned());
        }
        state.present = Some(Present { name, mode: modes[0], phase: 1, phases: modes.len(), ends: None });
        let running = self.clone();
        let task = tokio::spawn(async move {
            if let Err(error) = running.run(name, &modes).await {
                running.lab.story.say(format!("{} ended early: {error}.", name.title()));
                let _ = mend(&running.lab).await;
            }
            running.lab.runs.send_replace(true);
            running.state().present = None;
        });
        state.stop = Some(task.abort_handle());
        Ok(format!("{} begins.", name.title()))
    }

    /// Ends the preset that runs, and mends what it has broken.
    pub(crate) async fn stop(&self) -> Result<String, String> {
        let stop = {
            let state = &mut *self.state();
            state.stop.take().filter(|_| state.present.is_some()).ok_or("no preset runs")?
        };
        stop.abort();
        let mended = mend(&self.lab).await;
        self.lab.runs.send_replace(true);
        self.state().present = None;
        mended?;
        Ok(self.lab.story.say("The preset was stopped. All replicas and Redis are up."))
    }

    async fn run(&self, name: Name, modes: &[Mode]) -> Result<(), String> {
        let mut results = Vec::new();
        for (at, mode) in modes.iter().enumerate() {
            let phases = modes.len();
            self.state().present = Some(Present { name, mode: *mode, phase: at + 1, phases, ends: None });
            results.push(self.run_once(name, *mode).await?);
        }
        if let [first, second] = &results[..] {
            let figures = |mode: Mode, of: &Figures| {
                let loads = number(of.loads, "load", "loads");
                format!("{}: {loads} and {}", mode.text(), number(of.failed, "error", "errors"))
            };
            let (first, second) = (figures(modes[0], first), figures(modes[1], second));
            self.lab.story.say(format!("{}, {first}; {second}.", name.title()));
        }
        Ok(())
    }

    /// Runs a scenario in one mode. It begins and ends without a request in flight, so that its numbers are whole.
    async fn run_once(&self, name: Name, mode: Mode) -> Result<Figures, String> {
        let lab = &self.lab;
        lab.runs.send_replace(false);
        mend(lab).await?;
        drain(lab).await?;
        lab.origin.drop_queue();
        quiet(lab).await?;
        let mut settings = match name.settings() {
            Value::Object(settings) => settings,
            _ => Map::new(),
        };
        let usual = json!({ "replicas": 6, "failure_percent": 0, "slowdown_percent": 0, "body_bytes": 1_024, "private": false, "wait_timeout_ms": 0,
            "audit_percent": 0, "mode": mode });
        for (setting, value) in usual.as_object().into_iter().flatten() {
            settings.entry(setting.clone()).or_insert_with(|| value.clone());
        }
        lab.set(&settings).await?;
        lab.fleet.all_up().await?;
        lab.new_version();
        // The settings are with all replicas a moment later.
        sleep(Duration::from_millis(200)).await;
        if !matches!(name, Name::ColdDeploy | Name::LostCache) {
            lab.warm().await;
            quiet(lab).await?;
        }
        lab.story.say(format!("{}, {}: {}", name.title(), mode.text(), begins(name)));

        let (before, from_ms) = (lab.origin.pressure().loads, lab.board.now_ms());
        lab.board.open_window();
        lab.origin.open_window();
        if let Some(present) = &mut self.state().present {
            present.ends = Some(Instant::now() + name.length());
        }
        lab.runs.send_replace(true);
        let end = Instant::now() + name.length();
        script(lab, name).await?;
        sleep(end.saturating_duration_since(Instant::now())).await;
        lab.runs.send_replace(false);
        if let Some(present) = &mut self.state().present {
            present.ends = None;
        }
        drain(lab).await?;

        if name == Name::LostCache {
            // No client waits any more for the loads in its queue, which would take a minute.
            lab.origin.drop_queue();
        }
        let (counts, to_ms) = (lab.board.window(), lab.board.now_ms());
        let loads = lab.origin.pressure().loads - before;
        let (requests, failed) = (counts.requests(), counts.of(Outcome::Failed));
        let p99 = counts.times.quantile(0.99);
        let text = format!(
            "{}, {}: {}, {}, {}; 99 % had their answer within {:.2} s.",
            name.title(),
            mode.text(),
            number(requests, "request", "requests"),
            number(loads, "load", "loads"),
            number(failed, "error", "errors"),
            p99.unwrap_or_default() / 1e3
        );
        lab.story.say(text);
        let results = &mut self.state().results;
        results.push(json!({
            "name": name.id(), "title": name.title(), "mode": mode, "requests": requests, "answered": requests - failed,
            "failed": failed, "alone": counts.of(Outcome::Alone), "loads": loads, "queue": lab.origin.window_queue(),
            "p50_ms": counts.times.quantile(0.5), "p99_ms": p99, "from_ms": from_ms, "to_ms": to_ms,
        }));
        if results.len() > MAX_RESULTS {
            results.remove(0);
        }
        Ok(Figures { loads, failed })
    }
}

struct Figures {
    loads: u64,
    failed: u64,
}

fn begins(name: Name) -> &'static str {
    match name {
        Name::ColdDeploy => "30 reports are asked for, and none is cached.",
        Name::ExpiringKey => "600 requests a second are for one report, which expires every two seconds.",
        Name::DyingLeader => "a replica is killed while it loads report:1, and another one is paused.",
        Name::RedisDown => "Redis is stopped for four seconds.",
        Name::LostCache => {
            "500 reports are asked for, none is cached, and each queued load slows the origin down."
        }
    }
}

/// What happens while the requests come.
async fn script(lab: &Arc<Lab>, name: Name) -> Result<(), String> {
    let fault = async |what: &str, replica: Value| {
        let fields = json!({ "what": what, "replica": replica });
        lab.fault(&fields.as_object().cloned().unwrap_or_default()).await
    };
    match name {
        Name::ColdDeploy | Name::ExpiringKey | Name::LostCache => {}
        Name::DyingLeader => {
            sleep(Duration::from_millis(800)).await;
            lab.invalidate("report:1").await?;
            sleep(Duration::from_millis(50)).await;
            let dying = lab.fleet.leader().await?;
            fault("kill", dying.into()).await?;
            sleep(Duration::from_millis(3_200)).await;
            fault("start", dying.into()).await?;
            lab.fleet.all_up().await?;
            lab.invalidate("report:1").await?;
            sleep(Duration::from_millis(50)).await;
            let paused = lab.fleet.leader().await?;
            fault("pause", paused.into()).await?;
            sleep(Duration::from_millis(3_200)).await;
            fault("resume", paused.into()).await?;
        }
        Name::RedisDown => {
            sleep(Duration::from_millis(1_500)).await;
            lab.redis("stop").await?;
            sleep(Duration::from_secs(4)).await;
            lab.redis("start").await?;
        }
    }
    Ok(())
}

/// Brings up all that is down.
async fn mend(lab: &Arc<Lab>) -> Result<(), String> {
    match lab.store.state() {
        "hung" => drop(lab.redis("resume").await?),
        "stopped" => drop(lab.redis("start").await?),
        _ => {}
    }
    if lab.fleet.in_processes() { lab.fleet.mend().await } else { Ok(()) }
}

/// Waits until every request has its outcome.
async fn drain(lab: &Lab) -> Result<(), String> {
    let drained = async {
        while lab.board.in_flight() > 0 {
            sleep(Duration::from_millis(20)).await;
        }
    };
    let bound = PATIENCE * 2;
    tokio::time::timeout(bound, drained)
        .await
        .map_err(|_| format!("{} requests had no outcome in time", grouped(lab.board.in_flight())))
}

/// Waits until the origin has no load.
async fn quiet(lab: &Lab) -> Result<(), String> {
    let quiet = async {
        while lab.origin.pressure().running > 0 || lab.origin.pressure().queue > 0 {
            sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(12), quiet)
        .await
        .map_err(|_| "the origin did not become quiet in time".to_owned())
}
