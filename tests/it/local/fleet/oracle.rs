//! Compares what callers received with what was acknowledged before they began.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::time::Duration;

use super::changes::Change;
use super::process::Report;
use super::truth::Subject;

/// A time in which the server has lost acknowledged writes.
#[derive(Clone, Copy, Debug)]
pub(super) enum Loss {
    /// The registry and the log have lost writes, but no removed entry came back: a change that was acknowledged in this time counts from
    /// the end of the time on.
    OfRegistry { from: u64, until: u64 },
    /// Removed entries came back: a change that was acknowledged in this time does not count.
    #[cfg_attr(not(feature = "sentinel"), allow(dead_code, reason = "of a failover"))]
    OfEntries { from: u64, until: u64 },
}

impl Loss {
    /// From when on a change counts that was acknowledged at this moment; `None` if it never counts.
    fn counts_from(self, acknowledged: u64) -> Option<u64> {
        match self {
            Self::OfRegistry { from, until } if (from..until).contains(&acknowledged) => Some(until),
            Self::OfEntries { from, until } if (from..until).contains(&acknowledged) => None,
            _ => Some(acknowledged),
        }
    }
}

/// The result of one scene of the test.
#[derive(Debug)]
pub(super) struct Verdict {
    scene: &'static str,
    reads: u64,
    joined: u64,
    fail_open: u64,
    hits: Vec<u64>,
    kinds: BTreeMap<String, (usize, Duration)>,
    refused: Vec<String>,
    /// The time of the slowest change, `refresh` left out, because it also waits for loads.
    slowest: Duration,
    older: Vec<String>,
    failures: Vec<String>,
    skew_ms: i64,
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { scene, reads, joined, fail_open, hits, kinds, refused, slowest, .. } = self;
        let made: usize = kinds.values().map(|(made, _)| made).sum();
        writeln!(
            f,
            "{scene}: {reads} reads, {joined} joined a running load, {fail_open} loads without the store"
        )?;
        writeln!(f, "  hits from memory: {hits:?}")?;
        writeln!(
            f,
            "  {made} acknowledged changes, the slowest {slowest:.1?}, {} not acknowledged",
            refused.len()
        )?;
        for (kind, (made, slowest)) in kinds {
            writeln!(f, "    {kind}: {made}, the slowest {slowest:.1?}")?;
        }
        Ok(())
    }
}

fn lasted(change: &Change) -> Duration {
    Duration::from_nanos(change.acknowledged.saturating_sub(change.began))
}

/// Judges the changes and the reports of all processes.
pub(super) fn evaluate(
    scene: &'static str,
    changes: &[Change],
    reports: &[Report],
    losses: &[Loss],
) -> Verdict {
    let mut kinds = BTreeMap::<String, (usize, Duration)>::new();
    let mut claims = HashMap::<Subject, Vec<(u64, u64, &Change)>>::new();
    for change in changes.iter().filter(|change| change.error.is_none()) {
        let (made, slowest) = kinds.entry(change.kind.clone()).or_default();
        (*made, *slowest) = (*made + 1, (*slowest).max(lasted(change)));
        let from = losses.iter().try_fold(change.acknowledged, |from, loss| {
            loss.counts_from(change.acknowledged).map(|later| later.max(from))
        });
        let Some(from) = from else { continue };
        for &(subject, version) in &change.claims {
            claims.entry(subject).or_default().push((from, version, change));
        }
    }
    let mut older = Vec::new();
    for (process, report) in reports.iter().enumerate() {
        for received in &report.received {
            let of_subject = claims.get(&received.subject).map(Vec::as_slice).unwrap_or_default();
            let newer = of_subject
                .iter()
                .filter(|(from, version, _)| *from < received.began && *version > received.version);
            // Of the changes that this caller missed, the earliest shows for how long the older value was served.
            if let Some((from, version, change)) = newer.min_by_key(|(from, ..)| *from) {
                let late = Duration::from_nanos(received.began - from);
                older.push(format!(
                    "{process} received less than version {version}, {late:?} after that counted: {received:?}, {change:?}"
                ));
            }
        }
    }
    let acknowledged = changes.iter().filter(|change| change.error.is_none() && change.kind != "refresh");
    Verdict {
        scene,
        reads: reports.iter().map(|report| report.reads).sum(),
        joined: reports.iter().map(|report| report.joined).sum(),
        fail_open: reports.iter().map(|report| report.fail_open).sum(),
        hits: reports.iter().filter_map(|report| report.local_hits).collect(),
        kinds,
        refused: changes.iter().filter_map(|change| change.error.clone()).collect(),
        slowest: acknowledged.map(lasted).max().unwrap_or_default(),
        older,
        failures: reports.iter().flat_map(|report| report.failures.iter().cloned()).collect(),
        skew_ms: reports.iter().map(|report| report.skew_ns.abs() / 1_000_000).max().unwrap_or(0),
    }
}

impl Verdict {
    /// Checks that promise 16 holds, and that it was tested in each process that keeps copies.
    #[track_caller]
    pub(super) fn keeps_the_promise(&self, changes: usize) -> &Self {
        println!("{self}");
        assert!(self.skew_ms < 5, "the clock was set during the test, by {} ms", self.skew_ms);
        assert!(
            self.older.is_empty(),
            "{}: {} times, as {:#?}",
            self.scene,
            self.older.len(),
            some(&self.older)
        );
        assert!(self.failures.is_empty(), "{}: {:#?}", self.scene, some(&self.failures));
        assert!(self.hits.iter().all(|hits| *hits > 100), "{:?}", self.hits);
        let made: usize = self.kinds.values().map(|(made, _)| made).sum();
        assert!(made >= changes, "{made} of {changes} changes, {:#?}", some(&self.refused));
        self
    }

    #[track_caller]
    pub(super) fn takes_at_most(&self, most: Duration) -> &Self {
        assert!(self.slowest <= most, "{}: {:?}, more than {most:?}", self.scene, self.slowest);
        self
    }

    #[track_caller]
    pub(super) fn acknowledges_all(&self) -> &Self {
        assert!(self.refused.is_empty(), "{:#?}", some(&self.refused));
        self
    }
}

fn some(texts: &[String]) -> Vec<&String> {
    texts.iter().take(5).collect()
}
