//! The metrics of the log, through the `metrics` facade with the feature `metrics`. The label `slot` is the name of the slot.
//!
//! | metric | kind | what |
//! |---|---|---|
//! | `stampede_guard_log_commits_total` | counter | transactions that are final: no process serves what was there before. The label `within` is how long after its commit a transaction was: `10ms`, `100ms`, `2s` or `longer` |
//! | `stampede_guard_log_final_seconds` | histogram | the same time, by the clock of the server and its distance from that of the reader |
//! | `stampede_guard_log_reader` | gauge | 1 in the process that reads the log, 0 in the others. The sum of a fleet is 1 |
//! | `stampede_guard_log_lag_bytes` | gauge | how much of the log the server keeps for the slot; by the reader, 0 in the others |
//! | `stampede_guard_log_left_bytes` | gauge | how much more it keeps before the slot is lost; by the reader, if `max_slot_wal_keep_size` is set |

#![cfg_attr(not(feature = "metrics"), allow(unused_variables, reason = "there is no recorder"))]

use std::time::Duration;

/// The upper bounds of the buckets of each histogram, for an exporter. Without them it makes quantiles, which cannot be aggregated.
pub const BUCKETS: &[(&str, &[f64])] = &[(
    "stampede_guard_log_final_seconds",
    &[0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 15.0, 60.0],
)];

/// How soon a transaction is final.
pub(crate) const WITHIN: [(&str, Duration); 4] = [
    ("10ms", Duration::from_millis(10)),
    ("100ms", Duration::from_millis(100)),
    ("2s", Duration::from_secs(2)),
    ("longer", Duration::MAX),
];

/// The metrics of one slot.
#[derive(Clone, Debug)]
pub(crate) struct Metrics {
    #[cfg(feature = "metrics")]
    slot: metrics::SharedString,
}

impl Metrics {
    pub(crate) fn new(slot: &str) -> Self {
        #[cfg(feature = "metrics")]
        {
            use metrics::Unit;
            metrics::describe_counter!(
                "stampede_guard_log_commits_total",
                "Transactions of the log that are final in all processes."
            );
            metrics::describe_histogram!(
                "stampede_guard_log_final_seconds",
                Unit::Seconds,
                "Time from a commit until it is final in all processes."
            );
            metrics::describe_gauge!("stampede_guard_log_reader", "1 in the process that reads the log.");
            metrics::describe_gauge!(
                "stampede_guard_log_lag_bytes",
                Unit::Bytes,
                "Log that the server keeps for the slot."
            );
            metrics::describe_gauge!(
                "stampede_guard_log_left_bytes",
                Unit::Bytes,
                "Log that the server keeps in addition before the slot is lost."
            );
        }
        let this = Self {
            #[cfg(feature = "metrics")]
            slot: slot.to_owned().into(),
        };
        this.set_reader(false);
        // From zero on, so that the first rates miss nothing.
        WITHIN.iter().for_each(|(within, _)| this.count(within, 0));
        this
    }

    fn count(&self, within: &'static str, commits: u64) {
        #[cfg(feature = "metrics")]
        metrics::counter!("stampede_guard_log_commits_total", "slot" => self.slot.clone(), "within" => within).increment(commits);
    }

    /// A transaction is final.
    pub(crate) fn is_final(&self, within: &'static str, after: Duration) {
        self.count(within, 1);
        #[cfg(feature = "metrics")]
        metrics::histogram!("stampede_guard_log_final_seconds", "slot" => self.slot.clone())
            .record(after.as_secs_f64());
    }

    /// This process reads the log, until the value is dropped.
    pub(crate) fn read(&self) -> ReaderGauge {
        self.set_reader(true);
        ReaderGauge(self.clone())
    }

    fn set_reader(&self, reads: bool) {
        #[cfg(feature = "metrics")]
        metrics::gauge!("stampede_guard_log_reader", "slot" => self.slot.clone())
            .set(f64::from(u8::from(reads)));
        if !reads {
            // The next reader reports it. What this process saw last would stand beside that for ever.
            self.keeps(0, None);
        }
    }

    /// What the server keeps for the slot, and how much more it would.
    pub(crate) fn keeps(&self, lag: u64, left: Option<u64>) {
        #[cfg(feature = "metrics")]
        {
            metrics::gauge!("stampede_guard_log_lag_bytes", "slot" => self.slot.clone()).set(lag as f64);
            if let Some(left) = left {
                metrics::gauge!("stampede_guard_log_left_bytes", "slot" => self.slot.clone())
                    .set(left as f64);
            }
        }
    }
}

/// Sets the gauges of the reader to zero when it ends.
pub(crate) struct ReaderGauge(Metrics);

impl Drop for ReaderGauge {
    fn drop(&mut self) {
        self.0.set_reader(false);
    }
}
