//! `docs/settings.md`, "From a file" and "While it runs"; `docs/operations.md`, "Change the policy"; and `docs/policy.toml`.

use std::error::Error;
use std::path::Path;

use serde::Deserialize;
use stampede_guard::{Policy, StampedeGuard};
use tokio::signal::unix::{SignalKind, signal};

const SAMPLE: &str = include_str!("../../docs/policy.toml");
const PAGE: &str = include_str!("../../docs/settings.md");

#[derive(Deserialize)]
struct Config {
    redis: String,
    namespace: String,
    policy: Policy,
}

fn guard_of(file: &str) -> Result<StampedeGuard, Box<dyn Error>> {
    let config: Config = toml::from_str(file)?;
    let redis = redis::Client::open(config.redis)?;
    Ok(StampedeGuard::builder(redis).namespace(config.namespace).policy(config.policy).build()?)
}

const FILE: &str = r#"
redis = "redis://127.0.0.1/"
namespace = "reports"

[policy]
fresh_for = "5m"
load_timeout = "9s"
wait_timeout = "9s500ms"
wait_timeout_then = "fail"
max_concurrent_loads = 40

[policy.http]
scheme = "https"
"#;

#[test]
fn a_guard_has_the_policy_of_a_file() -> Result<(), Box<dyn Error>> {
    let guard = guard_of(FILE)?;

    println!("{}", toml::to_string(&*guard.policy())?);

    let printed: Policy = toml::from_str(&toml::to_string(&*guard.policy())?)?;
    assert_eq!(printed, *guard.policy());
    assert_ne!(printed, Policy::default());
    Ok(())
}

/// What a file cannot hold is added in code.
fn with_tenants(read: Policy) -> Result<Policy, stampede_guard::Error> {
    let http = read.http().clone().key(|parts| {
        let tenant = parts.headers.get("x-tenant")?;
        tenant.to_str().ok().map(str::to_owned)
    });
    read.to_builder().http(http).build()
}

#[test]
fn a_function_is_added_to_the_policy_of_a_file() -> Result<(), Box<dyn Error>> {
    let guard = StampedeGuard::in_memory().with_policy(with_tenants(toml::from_str(SAMPLE)?)?);
    let error = guard.set_policy(toml::from_str(SAMPLE)?).expect_err("tenants would share");
    assert!(error.to_string().starts_with("key can not change while the guard runs"), "{error}");
    guard.set_policy(with_tenants(toml::from_str(&SAMPLE.replace("1m", "2m"))?)?)?;
    Ok(())
}

#[test]
fn a_mistake_is_reported_with_its_line_and_its_name() {
    for (line, text) in [
        ("fresh_for = 300", "fresh_for: 300 is not a duration, such as \"30s\" or \"5m\""),
        ("fresh_fro = \"5m\"", "fresh_fro: there is no such setting; there are name, fresh_for, "),
        (
            "wait_timeout_then = \"give up\"",
            "wait_timeout_then: \"give up\" is no choice: choose \"load\" or \"fail\"",
        ),
    ] {
        let file = format!("redis = \"\"\nnamespace = \"\"\n[policy]\n{line}\n");
        let error = toml::from_str::<Config>(&file).err().map(|error| error.to_string()).unwrap_or_default();
        assert!(error.contains(text) && error.contains("line 4"), "{error}");
    }
    let file = FILE.replace("fresh_for = \"5m\"", "lease = \"150ms\"");
    let error = toml::from_str::<Config>(&file).err().map(|error| error.to_string()).unwrap_or_default();
    assert!(error.contains("lease (150ms) and command_timeout (50ms) contradict each other"), "{error}");
}

fn reload(guard: &StampedeGuard, path: &Path) -> Result<(), Box<dyn Error>> {
    let config: Config = toml::from_str(&std::fs::read_to_string(path)?)?;
    guard.set_policy(config.policy)?;
    Ok(())
}

async fn reload_on_hangup(guard: StampedeGuard, path: &Path) -> std::io::Result<()> {
    let mut hangups = signal(SignalKind::hangup())?;
    while hangups.recv().await.is_some() {
        if let Err(error) = reload(&guard, path) {
            eprintln!("the policy stays as it was: {error}");
        }
    }
    Ok(())
}

#[test]
fn a_running_guard_takes_the_policy_of_a_changed_file() -> Result<(), Box<dyn Error>> {
    // `reload_on_hangup` is only compiled: a signal would reach all tests of the process.
    let _ = reload_on_hangup;
    let path = std::env::temp_dir().join(format!("stampede-guard-policy-{}.toml", std::process::id()));
    let guard = guard_of(FILE)?;
    let layer = guard.clone();

    std::fs::write(&path, FILE.replace("5m", "10s"))?;
    reload(&guard, &path)?;
    let changed = layer.policy();
    std::fs::write(&path, FILE.replace("scheme", "shceme"))?;
    let error = reload(&guard, &path).map_err(|error| error.to_string());
    std::fs::remove_file(&path)?;

    assert!(toml::to_string(&*changed)?.contains("fresh_for = \"10s\""));
    assert!(error.is_err_and(|text| text.contains("shceme: there is no such setting")));
    assert_eq!(layer.policy(), changed, "a mistake in the file changes nothing");
    Ok(())
}

/// All settings of a policy and of its HTTP settings, as a refusal lists them.
fn names(text: &str) -> Vec<String> {
    let refusal = toml::from_str::<Policy>(text).expect_err("no setting").to_string();
    let (_, names) = refusal.split_once("there are ").expect("a list");
    let names = names.lines().next().unwrap_or_default().split(", ").map(str::to_owned);
    // Functions and types.
    names
        .filter(|name| !["audit_by", "share_errors", "key", "personal_extension"].contains(&name.as_str()))
        .collect()
}

#[test]
fn the_sample_has_each_setting_with_its_default() -> Result<(), Box<dyn Error>> {
    let sample: toml::Table = toml::from_str(SAMPLE)?;
    assert_eq!(sample, toml::Table::try_from(Policy::default())?);
    assert_eq!(toml::from_str::<Policy>(SAMPLE)?, Policy::default());

    let (own, http) = SAMPLE.split_once("\n[http]\n").ok_or("no [http]")?;
    for (names, part, head) in
        [(names("nonsense = 1"), own, ""), (names("[http]\nnonsense = 1"), http, "[http]\n")]
    {
        assert!(names.len() > 16, "{names:?}");
        for name in names.iter().filter(|name| *name != "http") {
            let line = |start: String| part.lines().find(|line| line.starts_with(&start));
            if line(format!("{name} = ")).is_none() {
                let line = line(format!("# {name} = ")).ok_or_else(|| format!("{name} is missing"))?;
                let policy: Policy = toml::from_str(&format!("{head}{}", line.trim_start_matches("# ")))?;
                assert_ne!(policy, Policy::default(), "{line}");
            }
        }
    }
    Ok(())
}

#[test]
fn the_page_names_each_setting_and_the_sample() {
    assert!(PAGE.contains("](policy.toml)"));
    for name in names("nonsense = 1").iter().chain(&names("[http]\nnonsense = 1")) {
        assert!(PAGE.contains(&format!("`{name}`")), "{name} is missing");
    }
}
