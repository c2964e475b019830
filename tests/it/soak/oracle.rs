//! Reads the logs of all processes and judges each promise: how many times it was tested, how many times broken, and the worst case.

use std::collections::{HashMap, HashSet};
use std::fmt;

use super::connections::Opened;
use super::truth::Load;
use super::worker::Counts;
use super::*;

/// The life of one process, from its start to its end.
#[derive(Clone, Debug)]
pub(super) struct Incarnation {
    pub(super) log: String,
    pub(super) slot: usize,
    pub(super) killed: bool,
}

/// A fault, and the time of it. `whom` is the process that it affected, or `None` if it affected all.
#[derive(Clone, Copy, Debug)]
pub(super) struct Event {
    pub(super) what: &'static str,
    pub(super) whom: Option<usize>,
    pub(super) from: u64,
    pub(super) until: u64,
    pub(super) loses_data: bool,
}

pub(super) struct Evidence<'a> {
    pub(super) incarnations: &'a [Incarnation],
    pub(super) events: &'a [Event],
    pub(super) loads: &'a [Load],
    pub(super) counts: &'a [Counts],
    pub(super) healed: &'a [(bool, usize)],
    pub(super) left: &'a [String],
    pub(super) writes: (usize, usize),
    pub(super) opened: &'a Opened,
}

/// The verdict on one promise.
#[derive(Debug, Default)]
pub(super) struct Row {
    pub(super) promise: String,
    pub(super) checked: usize,
    pub(super) broken: Vec<String>,
    pub(super) worst: String,
}

#[derive(Debug)]
pub(super) struct Verdict {
    events: Vec<(&'static str, usize)>,
    rows: Vec<Row>,
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "| what was done | times |\n|---|---|")?;
        for (what, times) in &self.events {
            writeln!(f, "| {what} | {times} |")?;
        }
        writeln!(f, "\n| promise | checked | broken | worst |\n|---|---|---|---|")?;
        for row in &self.rows {
            writeln!(f, "| {} | {} | {} | {} |", row.promise, row.checked, row.broken.len(), row.worst)?;
        }
        Ok(())
    }
}

impl Verdict {
    pub(super) fn must_be_clean(&self) {
        for row in &self.rows {
            let some: Vec<_> = row.broken.iter().take(5).collect();
            assert!(some.is_empty(), "{}: {} times, as {some:#?}", row.promise, row.broken.len());
            assert!(row.checked > 0, "{}: it was not put to the test", row.promise);
        }
    }
}

#[derive(Clone, Copy, Debug)]
struct Call {
    process: usize,
    key: usize,
    at: u64,
    answered: u64,
    version: Option<u64>,
}

#[derive(Clone, Copy, Debug)]
struct Changed {
    process: usize,
    key: usize,
    sent_at: u64,
    confirmed_at: u64,
    version: u64,
    confirmed: bool,
}

#[derive(Default)]
struct Logs {
    begun: HashMap<(usize, usize, u64), usize>,
    calls: Vec<Call>,
    changed: Vec<Changed>,
    failures: HashMap<(usize, u64), String>,
}

pub(super) const fn ns(duration: Duration) -> u64 {
    duration.as_nanos() as u64
}

fn read(incarnations: &[Incarnation]) -> Logs {
    let mut logs = Logs::default();
    for (process, incarnation) in incarnations.iter().enumerate() {
        let text = std::fs::read_to_string(&incarnation.log).unwrap_or_default();
        for line in text.lines() {
            let words: Vec<_> = line.split(' ').collect();
            let number = |at: usize| words.get(at).and_then(|word| word.parse::<u64>().ok()).unwrap_or(0);
            let key = number(1) as usize;
            match words[0] {
                "B" => *logs.begun.entry((process, key, number(2))).or_default() += 1,
                kind @ ("R" | "F") => {
                    let (at, answered) = (number(2), number(3));
                    let version = (kind == "R").then(|| number(4));
                    if version.is_none() {
                        logs.failures.insert((process, at), words[4..].join(" "));
                    }
                    logs.calls.push(Call { process, key, at, answered, version });
                }
                "I" => logs.changed.push(Changed {
                    process,
                    key,
                    sent_at: number(2),
                    confirmed_at: number(3),
                    version: number(4),
                    confirmed: number(5) == 1,
                }),
                _ => {}
            }
        }
    }
    logs
}

impl Evidence<'_> {
    fn about(&self, process: usize) -> impl Iterator<Item = &Event> {
        self.events.iter().filter(move |event| event.whom.is_none_or(|whom| whom == process))
    }

    /// For how long the process was stopped between `from` and `until`.
    fn stopped(&self, process: usize, from: u64, until: u64) -> u64 {
        let stops = self.about(process).filter(|event| event.what == "SIGSTOP of a process");
        stops.map(|stop| stop.until.min(until).saturating_sub(stop.from.max(from))).sum()
    }
}

pub(super) fn evaluate(evidence: &Evidence<'_>) -> Verdict {
    let logs = read(evidence.incarnations);
    let mut events: Vec<(&'static str, usize)> = Vec::new();
    for event in evidence.events {
        match events.iter_mut().find(|(what, _)| *what == event.what) {
            Some((_, times)) => *times += 1,
            None => events.push((event.what, 1)),
        }
    }
    let rows = vec![
        answered(evidence, &logs),
        in_time(evidence, &logs),
        without_failure(evidence, &logs),
        own_invalidations(&logs),
        invalidations(evidence, &logs),
        acknowledged(evidence, &logs),
        loads(evidence, &logs),
        scripts_only(evidence),
        connections::no_storm(evidence.opened, evidence.events, evidence.incarnations),
        healed(evidence),
        nothing_left(evidence),
    ];
    Verdict { events, rows }
}

fn answered(evidence: &Evidence<'_>, logs: &Logs) -> Row {
    let answers: HashSet<_> = logs.calls.iter().map(|call| (call.process, call.key, call.at)).collect();
    let mut row = Row { promise: "every request is answered".into(), ..Row::default() };
    for &(process, key, at) in logs.begun.keys() {
        if evidence.incarnations[process].killed {
            continue;
        }
        row.checked += 1;
        if !answers.contains(&(process, key, at)) {
            row.broken.push(format!("process {process}, key {key}"));
        }
    }
    row
}

/// B1: an answer takes at most the longest wait for another caller's load, then a load of its own, and slack for a busy machine.
fn in_time(evidence: &Evidence<'_>, logs: &Logs) -> Row {
    const BOUND: Duration = Duration::from_millis(5_000 + 500 + 200 + 5_000);
    let mut row = Row { promise: format!("within {BOUND:?}"), ..Row::default() };
    let mut times = Vec::new();
    for call in &logs.calls {
        let took = call.answered - call.at;
        let took = took - evidence.stopped(call.process, call.at, call.answered).min(took);
        times.push(took);
        if took > ns(BOUND) {
            row.broken.push(format!("{call:?}: {:?}", Duration::from_nanos(took)));
        }
    }
    times.sort_unstable();
    row.checked = times.len();
    let at = |part: f64| {
        let index = ((times.len() as f64 * part) as usize).min(times.len().saturating_sub(1));
        Duration::from_millis(times.get(index).copied().unwrap_or(0) / 1_000_000)
    };
    row.worst = format!("p50 {:?}, p99 {:?}, p99.9 {:?}, max {:?}", at(0.5), at(0.99), at(0.999), at(1.0));
    row
}

/// The origin never fails, so a load may fail only if its process was stopped for longer than `load_timeout`.
fn without_failure(evidence: &Evidence<'_>, logs: &Logs) -> Row {
    let mut row = Row { promise: "without a failure".into(), checked: logs.calls.len(), ..Row::default() };
    let mut excused = 0;
    for call in logs.calls.iter().filter(|call| call.version.is_none()) {
        let long_stop = evidence.events.iter().any(|event| {
            event.what == "SIGSTOP of a process"
                && event.until - event.from > ns(Duration::from_millis(500))
                && event.from < call.answered
                && call.at < event.until + ns(LOAD_TIMEOUT + LEASE)
        });
        if long_stop {
            excused += 1;
        } else {
            row.broken.push(format!("{call:?}: {:?}", logs.failures.get(&(call.process, call.at))));
        }
    }
    row.worst = format!("{excused} after a stop");
    row
}

/// After an invalidation is confirmed, callers of the process that made it receive nothing older.
fn own_invalidations(logs: &Logs) -> Row {
    let mut row = Row { promise: "nothing older than one's own invalidation".into(), ..Row::default() };
    let mut changes: HashMap<(usize, usize), Vec<&Changed>> = HashMap::new();
    for change in logs.changed.iter().filter(|change| change.confirmed) {
        changes.entry((change.process, change.key)).or_default().push(change);
    }
    for call in &logs.calls {
        let (Some(version), Some(changes)) = (call.version, changes.get(&(call.process, call.key))) else {
            continue;
        };
        let before = changes.iter().filter(|change| change.confirmed_at <= call.at);
        let Some(newest) = before.map(|change| change.version).max() else { continue };
        row.checked += 1;
        if version < newest {
            row.broken.push(format!("{call:?}, confirmed {newest}"));
        }
    }
    row
}

/// Callers of other processes receive nothing older after a grace period: that of the message or, if it was lost, of the next renewal, and
/// that of the older load's end. The period begins anew with each fault that affected the process.
fn invalidations(evidence: &Evidence<'_>, logs: &Logs) -> Row {
    const GRACE: Duration = Duration::from_millis(700 + 500 + 1_800);
    let mut row = Row { promise: format!("nothing older than anybody's, {GRACE:?} later"), ..Row::default() };
    let mut changes: HashMap<usize, Vec<&Changed>> = HashMap::new();
    for change in logs.changed.iter().filter(|change| change.confirmed) {
        changes.entry(change.key).or_default().push(change);
    }
    let mut within = 0;
    for call in &logs.calls {
        let (Some(version), Some(changes)) = (call.version, changes.get(&call.key)) else { continue };
        let is_known = |change: &&&Changed| {
            let illness = evidence.about(call.process);
            let illness = illness.filter(|event| event.until >= change.confirmed_at && event.from <= call.at);
            let well = illness.map(|event| event.until).max().unwrap_or(0).max(change.confirmed_at);
            well + ns(GRACE) <= call.at
        };
        if let Some(newest) = changes.iter().filter(is_known).map(|change| change.version).max() {
            row.checked += 1;
            if version < newest {
                row.broken.push(format!("{call:?}, confirmed {newest}"));
            }
        }
        let at_once = changes.iter().filter(|change| change.confirmed_at <= call.at);
        within += usize::from(at_once.map(|change| change.version).max() > Some(version));
    }
    row.worst = format!("{within} before that");
    row
}

/// P16: once an invalidation is confirmed, no caller in any process receives an older value, from memory or otherwise. A load
/// without the store is not notified of changes, and callers that join it in its process receive its value.
fn acknowledged(evidence: &Evidence<'_>, logs: &Logs) -> Row {
    /// How long after its end at the origin a load may still be joined by callers.
    const DETACHED: Duration = Duration::from_millis(300);
    let mut row = Row { promise: "nothing older than a confirmed change".into(), ..Row::default() };
    let mut changes: HashMap<usize, Vec<&Changed>> = HashMap::new();
    for change in logs.changed.iter().filter(|change| change.confirmed) {
        changes.entry(change.key).or_default().push(change);
    }
    let mut joined = 0;
    for call in &logs.calls {
        let (Some(version), Some(changes)) = (call.version, changes.get(&call.key)) else { continue };
        let before = changes.iter().filter(|change| change.confirmed_at <= call.at);
        let Some(newest) = before.max_by_key(|change| change.version) else { continue };
        row.checked += 1;
        if version >= newest.version {
            continue;
        }
        let own = |load: &&Load| (load.key, load.process) == (call.key, call.process);
        let runs = |load: &Load| {
            let stopped = evidence.stopped(call.process, load.started, call.at);
            load.started <= call.at && call.at <= load.ended + stopped + ns(DETACHED)
        };
        if evidence.loads.iter().filter(own).any(runs) {
            joined += 1;
        } else {
            row.broken.push(format!("{call:?}, {newest:?}"));
        }
    }
    let hits: Vec<_> = evidence.counts.iter().map(|counts| counts.local_hits).collect();
    for (slot, hits) in hits.iter().enumerate().filter(|(slot, _)| keeps(*slot)) {
        if *hits == 0 {
            row.broken.push(format!("no hits from memory in slot {slot}"));
        }
    }
    row.worst = format!("{joined} joined a running load; hits from memory {hits:?}");
    row
}

/// B2: each load has a reason. Since the key's previous load, the value expired, was invalidated, or was lost with other data; or a process
/// has recorded this load, or the previous one, as unstored (fail-open, lost lease or refused commit). Loads of processes that were killed
/// are left out, because their counts are unknown.
fn loads(evidence: &Evidence<'_>, logs: &Logs) -> Row {
    let killed = |process: usize| evidence.incarnations[process].killed;
    let mut changes: HashMap<usize, Vec<&Changed>> = HashMap::new();
    for change in &logs.changed {
        changes.entry(change.key).or_default().push(change);
    }
    let mut of_keys: HashMap<usize, Vec<&Load>> = HashMap::new();
    for load in evidence.loads {
        of_keys.entry(load.key).or_default().push(load);
    }
    let (mut checked, mut unexplained) = (0, 0);
    for (key, loads) in &mut of_keys {
        loads.sort_unstable_by_key(|load| load.started);
        for pair in loads.windows(2) {
            let (before, load) = (pair[0], pair[1]);
            if killed(before.process) || killed(load.process) {
                continue;
            }
            checked += 1;
            let expired = load.started >= before.ended + ns(FRESH) * 9 / 10 - ns(Duration::from_millis(50));
            let between = |from: u64, until: u64| until >= before.started && from <= load.started;
            let of_key = changes.get(key).map(Vec::as_slice).unwrap_or_default();
            let changed = of_key.iter().any(|change| between(change.sent_at, change.confirmed_at));
            let lost =
                evidence.events.iter().any(|event| event.loses_data && between(event.from, event.until));
            unexplained += usize::from(!(expired || changed || lost));
        }
    }
    let more: u64 =
        evidence.counts.iter().map(|counts| counts.fail_open + counts.lost + counts.refused).sum();
    let mut row = Row { promise: "loads are explained".into(), checked, ..Row::default() };
    row.worst = format!("{unexplained} by no expiry, change or loss; {more} were recorded as such");
    // Neither an unstored load nor the load after it needs another reason.
    if unexplained > 2 * more as usize {
        row.broken.push(row.worst.clone());
    }
    // A process may load a key several times at once: in the flight that callers join, and in flights that were detached from it.
    let mut ends: HashMap<(usize, usize), Vec<(u64, i32)>> = HashMap::new();
    for load in evidence.loads {
        let of = ends.entry((load.process, load.key)).or_default();
        of.extend([(load.started, 1), (load.ended, -1)]);
    }
    let most = ends.values_mut().map(|ends| {
        ends.sort_unstable();
        let mut now = 0;
        ends.iter()
            .map(|(_, change)| {
                now += change;
                now
            })
            .max()
            .unwrap_or(0)
    });
    let most = most.max().unwrap_or(0);
    if most > 4 {
        row.broken.push(format!("{most} of one key at once in one process"));
    }
    row.worst += &format!("; at most {most} of one key at once in one process");
    row
}

fn scripts_only(evidence: &Evidence<'_>) -> Row {
    let (inside, outside) = evidence.writes;
    let mut row =
        Row { promise: "entries are written by scripts only".into(), checked: inside, ..Row::default() };
    if outside > 0 {
        row.broken.push(format!("{outside} SET outside"));
    }
    row
}

fn healed(evidence: &Evidence<'_>) -> Row {
    let mut row =
        Row { promise: "healed, everything works".into(), checked: evidence.healed.len(), ..Row::default() };
    for (process, (connected, right)) in evidence.healed.iter().enumerate() {
        if !connected || *right < 50 {
            row.broken.push(format!("process {process}: connected {connected}, {right} of 50 stored"));
        }
    }
    row
}

fn nothing_left(evidence: &Evidence<'_>) -> Row {
    let mut row = Row { promise: "nothing is left".into(), checked: evidence.counts.len(), ..Row::default() };
    row.broken.extend(evidence.left.iter().cloned());
    for counts in evidence.counts {
        if (counts.flights, counts.tasks) != (0, 0) {
            row.broken.push(format!("{counts:?}"));
        }
    }
    let loads: u64 = evidence.counts.iter().map(|counts| counts.loads).sum();
    let sum = |of: fn(&Counts) -> u64| evidence.counts.iter().map(of).sum::<u64>();
    let (open, lost, refused) =
        (sum(|counts| counts.fail_open), sum(|counts| counts.lost), sum(|counts| counts.refused));
    row.worst =
        format!("{loads} loads: {open} without Redis, {lost} lost their lease, {refused} were refused");
    row
}
