//! The table of a bench: the promised and the measured numbers, and the verdict.

use std::fmt;
use std::time::Duration;

/// A limit on a measured number.
#[allow(dead_code, reason = "each bench has limits of some kinds")]
#[derive(Clone, Copy, Debug)]
pub(crate) enum Limit {
    Exactly(f64),
    AtMost(f64),
    AtLeast(f64),
    Between(f64, f64),
    /// There is no limit: the row has no `must`, or no aim beyond its `must`.
    None,
}

/// The unit of a row's number, which decides how it is printed and whether a missed `must` fails the run.
#[allow(dead_code, reason = "each bench has rows of some units")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unit {
    /// The number is exact on any machine, so a missed `must` fails every run.
    Count,
    /// Milliseconds. They depend on the machine, so a missed `must` fails the run only with `STRICT=1`.
    Millis,
    /// Nanoseconds. A missed `must` fails the run only with `STRICT=1`.
    Nanos,
    /// A throughput or a time, divided by that of a control in the same run. A missed `must` fails the run only with `STRICT=1`.
    Ratio,
}

/// One line of the table.
#[derive(Debug)]
pub(crate) struct Row {
    pub(crate) what: String,
    pub(crate) unit: Unit,
    pub(crate) must: Limit,
    pub(crate) aim: Limit,
    pub(crate) measured: f64,
    /// The spread, the control's number, and whatever else a reader needs to interpret the measured number.
    pub(crate) detail: String,
}

/// The rows so far. Each row is also printed when it is added, because a whole run takes minutes.
#[derive(Debug, Default)]
pub(crate) struct Table {
    rows: Vec<Row>,
}

impl Limit {
    fn allows(self, measured: f64) -> bool {
        match self {
            Self::Exactly(limit) => measured == limit,
            Self::AtMost(limit) => measured <= limit,
            Self::AtLeast(limit) => measured >= limit,
            Self::Between(least, most) => (least..=most).contains(&measured),
            Self::None => true,
        }
    }

    fn show(self, unit: Unit) -> String {
        match self {
            Self::Exactly(limit) => unit.show(limit),
            Self::AtMost(limit) => format!("<= {}", unit.show(limit)),
            Self::AtLeast(limit) => format!(">= {}", unit.show(limit)),
            Self::Between(least, most) => format!("{} to {}", unit.show(least), unit.show(most)),
            Self::None => String::new(),
        }
    }
}

impl Unit {
    fn show(self, number: f64) -> String {
        match self {
            Self::Count => format!("{number}"),
            Self::Millis if number >= 100.0 => format!("{number:.0} ms"),
            Self::Millis => format!("{number:.2} ms"),
            Self::Nanos => format!("{number:.0} ns"),
            Self::Ratio => format!("{number:.2}"),
        }
    }
}

impl Row {
    fn passes(&self) -> bool {
        self.must.allows(self.measured)
    }

    fn verdict(&self) -> &'static str {
        match (self.passes(), self.aim) {
            _ if matches!(self.must, Limit::None) => "-",
            (false, _) => "MISSED",
            (true, Limit::None) => "PASS",
            (true, aim) if aim.allows(self.measured) => "PASS, aim reached",
            (true, _) => "PASS",
        }
    }
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { what, unit, must, aim, measured, detail } = self;
        let (must, aim, measured) = (must.show(*unit), aim.show(*unit), unit.show(*measured));
        let gap = if detail.is_empty() { "" } else { "; " };
        write!(f, "| {what} | {must} | {aim} | {measured}{gap}{detail} | {} |", self.verdict())
    }
}

impl Table {
    pub(crate) fn add(&mut self, row: Row) {
        println!("{row}");
        self.rows.push(row);
    }

    /// Prints the whole table. Returns whether a missed `must` fails the run.
    pub(crate) fn finish(&self, strict: bool) -> bool {
        println!("\n| what | must | aim | measured | verdict |\n|---|---|---|---|---|");
        for row in &self.rows {
            println!("{row}");
        }
        self.rows.iter().any(|row| !row.passes() && (strict || row.unit == Unit::Count))
    }
}

/// The median, the smallest and the largest of some measurements.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Spread {
    pub(crate) median: f64,
    pub(crate) min: f64,
    pub(crate) max: f64,
}

impl Spread {
    pub(crate) fn of(measured: &[f64]) -> Self {
        assert!(!measured.is_empty(), "nothing was measured");
        let mut sorted = measured.to_vec();
        sorted.sort_by(f64::total_cmp);
        let middle = sorted.len() / 2;
        let median =
            if sorted.len() % 2 == 1 { sorted[middle] } else { (sorted[middle - 1] + sorted[middle]) / 2.0 };
        Self { median, min: sorted[0], max: sorted[sorted.len() - 1] }
    }
}

impl fmt::Display for Spread {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.2} to {:.2}", self.min, self.max)
    }
}

pub(crate) fn millis(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}
