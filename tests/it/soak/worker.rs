//! One process of the soak test. It sends requests at a steady rate, whatever happens, changes keys now and then, and logs its answers.

use std::fs::{File, OpenOptions};
use std::io::Write as _;
use std::sync::{Arc, Mutex};

use futures_util::future::BoxFuture;
use serde::{Deserialize, Serialize};
use stampede_guard::{Backend, Policy, StampedeGuard};
use tokio::time::{Instant, MissedTickBehavior, interval};

use super::*;
use crate::support::processes::Child;
use crate::support::zipf::Zipf;

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Config {
    pub(super) redis: String,
    pub(super) origin: String,
    pub(super) log: String,
    pub(super) process: usize,
    /// Whether the process keeps copies in its memory.
    pub(super) keeps: bool,
    /// The issuer of the tokens with which the process logs in; `None` if it logs in with a password.
    pub(super) issuer: Option<String>,
}

/// What a process has counted, reported at its end.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(super) struct Counts {
    pub(super) loads: u64,
    pub(super) fail_open: u64,
    pub(super) lost: u64,
    pub(super) refused: u64,
    pub(super) flights: u64,
    pub(super) tasks: u64,
    pub(super) local_hits: u64,
    pub(super) outages: u64,
    pub(super) credential_failures: u64,
}

/// A log without partial lines: each line is one unbuffered write, so a killed process loses nothing that it wrote.
#[derive(Clone, Debug)]
struct Log(Arc<Mutex<File>>);

impl Log {
    fn line(&self, text: &str) {
        let mut file = self.0.lock().expect("nothing panics in here");
        file.write_all(format!("{text}\n").as_bytes()).expect("the log");
    }
}

pub(super) fn policy(keeps: bool, has_tokens: bool) -> Policy {
    let policy = Policy::builder().fresh_for(FRESH).ttl_jitter(0.1).lease(LEASE).load_timeout(LOAD_TIMEOUT);
    // With the default timeout, a machine that stands still for a tenth of a second would cost as many connections as a token that is not
    // renewed.
    let policy = if has_tokens {
        policy.command_timeout(Duration::from_millis(500)).coordination_budget(Duration::from_secs(1))
    } else {
        policy
    };
    // A process that starts while the registry is evicted cannot know that other processes keep copies.
    let policy = if keeps { policy.local_for(Duration::MAX) } else { policy.local_elsewhere(true) };
    policy.build().expect("valid")
}

pub(super) fn work(mut child: Child) -> BoxFuture<'static, ()> {
    Box::pin(async move {
        let config: Config = child.config();
        let file = OpenOptions::new().create(true).append(true).open(&config.log).expect("the log");
        let log = Log(Arc::new(Mutex::new(file)));
        let mut backend = Backend::try_from(&*config.redis).expect("an address");
        if let Some(issuer) = &config.issuer {
            backend = backend.credentials(crate::redis::credentials::by(issuer));
        }
        let guard = StampedeGuard::builder(backend)
            .policy(policy(config.keeps, config.issuer.is_some()))
            .local_term(TERM)
            .build()
            .expect("valid");
        let _ = guard.connect().await;
        child.ready();
        let asking = tokio::spawn(ask_steadily(guard.clone(), config.clone(), log.clone()));
        loop {
            match &*child.recv_line().await {
                "stop" => {
                    asking.abort();
                    let stopped = async {
                        while guard.stats().tasks > 0 || guard.stats().flights > 0 {
                            tokio::time::sleep(Duration::from_millis(20)).await;
                        }
                    };
                    let _ = tokio::time::timeout(Duration::from_secs(20), stopped).await;
                    let (stats, health) = (guard.stats(), guard.health());
                    child.report().event_with(
                        "stopped",
                        &Counts {
                            loads: stats.loads,
                            fail_open: stats.fail_open_loads,
                            lost: stats.leases_lost,
                            refused: stats.commits_refused,
                            flights: stats.flights,
                            tasks: stats.tasks,
                            local_hits: stats.local_hits,
                            outages: health.outages,
                            credential_failures: health.credential_failures,
                        },
                    );
                }
                "heal" => {
                    let connected = guard.connect().await.is_ok();
                    let mut right = 0;
                    for key in 0..50 {
                        // This is tried again, because a value may expire between the hit and the next command, and the machine may stall
                        // during an attempt.
                        let until = Instant::now() + Duration::from_secs(15);
                        while Instant::now() < until {
                            request(guard.clone(), config.clone(), log.clone(), key).await;
                            if guard.get::<u64>(("k", key)).await.is_ok_and(|value| value.is_some()) {
                                right += 1;
                                break;
                            }
                        }
                    }
                    child.report().event_with("healed", &(connected, right));
                }
                line => panic!("unknown command `{line}`"),
            }
        }
    })
}

async fn ask_steadily(guard: StampedeGuard, config: Config, log: Log) {
    let (zipf, mut random) = (Zipf::new(KEYS, 1.0), fastrand::Rng::new());
    let mut tick = interval(Duration::from_millis(1_000 / REQUESTS_PER_SECOND));
    // After a stop, the process does not send the requests that it has missed.
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tick.tick().await;
        let key = zipf.draw(&mut random);
        let (guard, config, log) = (guard.clone(), config.clone(), log.clone());
        if fastrand::u8(..50) == 0 {
            tokio::spawn(change(guard, config, log, key));
        } else {
            tokio::spawn(request(guard, config, log, key));
        }
    }
}

async fn request(guard: StampedeGuard, config: Config, log: Log, key: usize) {
    let began = wall_ns();
    log.line(&format!("B {key} {began}"));
    let (origin, process) = (config.origin, config.process);
    let load = move || async move { truth::ask(&origin, format!("load {key} {process}\n")).await };
    let answer = guard.get_or_load(("k", key), load).await;
    let answered = wall_ns();
    match answer {
        Ok(version) => log.line(&format!("R {key} {began} {answered} {version}")),
        Err(error) => log.line(&format!("F {key} {began} {answered} {error}")),
    }
}

async fn change(guard: StampedeGuard, config: Config, log: Log, key: usize) {
    let Ok(version) = truth::ask(&config.origin, format!("change {key}\n")).await else { return };
    let began = wall_ns();
    let confirmed = guard.invalidate(("k", key)).await.is_ok();
    log.line(&format!("I {key} {began} {} {version} {}", wall_ns(), u8::from(confirmed)));
}
