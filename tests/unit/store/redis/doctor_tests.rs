use std::collections::BTreeSet;

use super::rights::{COPIES_ONLY, LOCKS_ONLY};
use super::*;
use crate::health::{Severity, Topology};
use redis::Value;

/// The commands that the scripts with these names call, according to their lines `-- calls:`.
fn called(is_selected: impl Fn(&str) -> bool) -> BTreeSet<String> {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/src/store/redis/scripts");
    let mut calls = BTreeSet::new();
    for file in std::fs::read_dir(folder).expect("the scripts") {
        let path = file.expect("an entry").path();
        let name = path.file_stem().and_then(|name| name.to_str()).expect("a name").to_owned();
        let script = std::fs::read_to_string(&path).expect("a script");
        if is_selected(&name) {
            let line =
                script.lines().find_map(|line| line.strip_prefix("-- calls:")).expect("says what it calls");
            calls.extend(line.split_whitespace().map(str::to_uppercase));
        }
    }
    calls
}

fn is_of_locks(script: &str) -> bool {
    ["lock_", "mutex", "semaphore"].iter().any(|kind| script.starts_with(kind))
}

#[test]
fn the_doctor_tries_every_command_that_a_script_calls() {
    assert_eq!(called(|script| script == "doctor"), called(|script| script != "doctor"));
}

#[test]
fn locks_only_lists_the_commands_that_only_scripts_of_locks_and_journals_call() {
    let is_of_journals = |script: &str| ["journal", "enter_load", "note_tag", "forget_tag"].contains(&script);
    let mut guard = called(|script| script != "doctor" && !is_of_locks(script) && !is_of_journals(script));
    // Scripts of the guard call these commands, too, but the guard works without them. Without TIME, an insertion or an acquire has no
    // latest moment at which it may run. Without LREM, a waiter that leaves keeps its position in the queue.
    for optional in ["TIME", "LREM"] {
        assert!(guard.remove(optional), "{optional}");
    }
    let locks = called(is_of_locks);
    let only: Vec<_> = locks.difference(&guard).cloned().collect();
    assert_eq!(only, LOCKS_ONLY);
}

#[test]
fn copies_only_lists_the_commands_that_only_scripts_of_volumes_and_load_limits_call() {
    let volumes =
        ["volume", "announcing", "announce", "renew_member", "remove_member", "forget_tag", "load_limit"];
    let is_of_volumes = |script: &str| volumes.contains(&script);
    // The script of INVALIDATE is left out, because it announces like the scripts of volumes.
    let others = called(|script| !is_of_volumes(script) && !["doctor", "invalidate"].contains(&script));
    let only: Vec<_> = called(is_of_volumes).difference(&others).cloned().collect();
    assert_eq!(only, COPIES_ONLY);
}

/// With a round trip of 60 ms, and 100 ms both for a command and as the budget, no value is ever stored. The report must say so: it once
/// found no problem.
#[test]
fn round_trips_that_do_not_fit_into_the_budget_are_a_problem() {
    let ms = Duration::from_millis;
    let severities = |median: u64, worst: u64, command: u64, budget: u64| {
        let bounds = TimeBounds { command: ms(command), budget: ms(budget), lease: ms(2_000) };
        bounds.latency(ms(median), ms(worst)).into_iter().map(|finding| finding.severity).collect::<Vec<_>>()
    };
    use Severity::{Ok, Problem, Warning};
    for (median, worst, command, budget, expected) in [
        (60, 70, 100, 100, [Ok, Problem]),
        (50, 60, 100, 100, [Ok, Problem]),
        (49, 60, 100, 100, [Ok, Warning]),
        (34, 40, 100, 100, [Ok, Warning]),
        (33, 40, 100, 100, [Ok, Ok]),
        // No command is answered in time, and a longer budget does not change that.
        (60, 70, 50, 1_000, [Problem, Problem]),
        (40, 60, 50, 1_000, [Warning, Ok]),
        (300, 700, 1_000, 2_000, [Ok, Warning]),
    ] {
        let case = format!("median {median}, worst {worst}, command {command}, budget {budget}");
        assert_eq!(severities(median, worst, command, budget), expected, "{case}");
    }
}

fn hello(version: &str, mode: &str, role: &str) -> Vec<Finding> {
    let pairs = [("server", "redis"), ("version", version), ("mode", mode), ("role", role)];
    let text = |text: &str| Value::BulkString(text.as_bytes().to_vec());
    let greeting = pairs.into_iter().flat_map(|(name, value)| [text(name), text(value)]).collect();
    super::server::of_greeting(Value::Array(greeting), Topology::Single, None)
}

#[test]
fn a_server_that_is_too_old_or_takes_no_writes_is_a_problem() {
    let worst = |findings: Vec<Finding>| findings.iter().map(|finding| finding.severity).max();
    assert_eq!(worst(hello("6.2.0", "standalone", "master")), Some(Severity::Ok));
    assert_eq!(worst(hello("8.0.1", "standalone", "master")), Some(Severity::Ok));
    for (version, mode, role) in [
        ("6.0.16", "standalone", "master"),
        ("7.0.15", "standalone", "replica"),
        ("7.0.15", "cluster", "master"),
        ("7.0.15", "sentinel", "master"),
    ] {
        assert_eq!(worst(hello(version, mode, role)), Some(Severity::Problem), "{version} {mode} {role}");
    }
    assert_eq!(worst(super::server::of_greeting(Value::Nil, Topology::Single, None)), Some(Severity::Note));
}

/// These are texts instead of a server's, because no test's server can be made to report such values of INFO in time.
#[test]
fn failing_persistence_and_replicas_are_reported() {
    let info = "maxmemory:0\r\nconnected_slaves:2\r\naof_enabled:1\r\nrdb_last_bgsave_status:err\r\n";
    let findings = super::server::examine(&Value::BulkString(info.into()), Value::Nil);
    let of = |check| findings.iter().find(|finding| finding.check == check).expect("it is checked");
    assert_eq!(of("memory").severity, Severity::Warning);
    assert_eq!(of("persistence").severity, Severity::Warning);
    assert!(of("persistence").cost.contains("MISCONF"));
    assert!(of("replicas").found.starts_with("2,"));
}

#[test]
fn a_clock_that_jumps_or_differs_from_the_guards_reading_is_a_warning() {
    let host = host_ms();
    let at = |ahead: u64| {
        let round_trip = Duration::from_millis(1);
        (TimedReading { server_ms: host + ahead, at: Instant::now(), round_trip }, round_trip)
    };
    let warned = |readings: &[_], believed| {
        clock(readings, believed).into_iter().filter(|finding| finding.severity == Severity::Warning).count()
    };
    let believed =
        |ahead_ms| Some(ClockReading { ahead_ms, age: Duration::ZERO, largest_jump: Duration::ZERO });
    assert_eq!(warned(&[at(0), at(0)], believed(0)), 0);
    assert_eq!(warned(&[at(0), at(5_000)], believed(0)), 1);
    assert_eq!(warned(&[at(90_000)], believed(0)), 1);
    assert_eq!(warned(&[at(90_000)], None), 0, "this guard has read no clock");
}
