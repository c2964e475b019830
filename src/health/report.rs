//! The findings of an examination of the deployment, with their costs and remedies.

use std::fmt;

/// How much a finding matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Severity {
    /// In order.
    Ok,
    /// Worth knowing, or not visible with the rights of this user.
    Note,
    /// The guard works, but this costs something: a second load, a slower wait, all stored values.
    Warning,
    /// A promise does not hold here.
    Problem,
}

/// The result of one check.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Finding {
    /// The name of the check: `rights`, `latency`, `eviction` and so on.
    pub check: &'static str,
    /// How much it matters.
    pub severity: Severity,
    /// What was found. Never a key, a value or a password.
    pub found: String,
    /// What it costs; empty if it costs nothing.
    pub cost: String,
    /// What to do; empty if there is nothing to do.
    pub advice: String,
}

/// The findings of [`StampedeGuard::doctor`](crate::StampedeGuard::doctor).
///
/// Its `Display` is for people: the worst finding first, each with its cost and advice.
///
/// # Examples
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() {
/// use stampede_guard::StampedeGuard;
/// use stampede_guard::health::Severity;
///
/// let report = StampedeGuard::in_memory().doctor().await;
/// for finding in &report.findings {
///     if finding.severity >= Severity::Warning {
///         eprintln!("{}: {}", finding.check, finding.found);
///     }
/// }
/// assert!(report.is_healthy());
/// # }
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Report {
    /// All findings, in the order of the checks.
    pub findings: Vec<Finding>,
}

impl Finding {
    fn new(check: &'static str, severity: Severity, found: impl Into<String>) -> Self {
        Self { check, severity, found: found.into(), cost: String::new(), advice: String::new() }
    }

    pub(crate) fn ok(check: &'static str, found: impl Into<String>) -> Self {
        Self::new(check, Severity::Ok, found)
    }

    pub(crate) fn note(check: &'static str, found: impl Into<String>) -> Self {
        Self::new(check, Severity::Note, found)
    }

    #[cfg_attr(not(feature = "redis"), allow(dead_code, reason = "only a server is warned of"))]
    pub(crate) fn warning(check: &'static str, found: impl Into<String>) -> Self {
        Self::new(check, Severity::Warning, found)
    }

    pub(crate) fn problem(check: &'static str, found: impl Into<String>) -> Self {
        Self::new(check, Severity::Problem, found)
    }

    pub(crate) fn cost(self, cost: impl Into<String>) -> Self {
        Self { cost: cost.into(), ..self }
    }

    pub(crate) fn advice(self, advice: impl Into<String>) -> Self {
        Self { advice: advice.into(), ..self }
    }
}

impl Report {
    pub(crate) fn new(findings: Vec<Finding>) -> Self {
        Self { findings }
    }

    /// Whether every promise holds here: no finding is a [`Problem`](Severity::Problem). Warnings and checks that were not
    /// permitted do not count; use [`worst`](Self::worst) to be stricter.
    pub fn is_healthy(&self) -> bool {
        self.worst() < Severity::Problem
    }

    /// The severity of the worst finding.
    pub fn worst(&self) -> Severity {
        self.findings.iter().map(|finding| finding.severity).max().unwrap_or(Severity::Ok)
    }
}

impl fmt::Display for Severity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Ok => "ok",
            Self::Note => "note",
            Self::Warning => "WARNING",
            Self::Problem => "PROBLEM",
        })
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { check, severity, found, cost, advice } = self;
        write!(f, "{severity:8} {check}: {found}")?;
        if !cost.is_empty() {
            write!(f, "\n         costs: {cost}")?;
        }
        if !advice.is_empty() {
            write!(f, "\n         to do: {advice}")?;
        }
        Ok(())
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut findings: Vec<_> = self.findings.iter().collect();
        findings.sort_by_key(|finding| std::cmp::Reverse(finding.severity));
        let count = |severity| findings.iter().filter(|finding| finding.severity == severity).count();
        let (problems, warnings) = (count(Severity::Problem), count(Severity::Warning));
        let verdict =
            if self.is_healthy() { "every promise holds here" } else { "not every promise holds here" };
        writeln!(f, "stampede-guard: {verdict}; problems: {problems}, warnings: {warnings}")?;
        for finding in findings {
            writeln!(f, "{finding}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_lists_the_worst_finding_first_with_its_cost_and_advice() {
        let report = Report::new(vec![
            Finding::ok("version", "7.0.15"),
            Finding::problem("rights", "not permitted: EVAL")
                .cost("each process loads for itself")
                .advice("+eval"),
        ]);
        assert_eq!(
            report.to_string(),
            "stampede-guard: not every promise holds here; problems: 1, warnings: 0\n\
             PROBLEM  rights: not permitted: EVAL\n         costs: each process loads for itself\n         to do: +eval\n\
             ok       version: 7.0.15\n"
        );
        assert!(!report.is_healthy());
    }

    #[test]
    fn warnings_and_checks_not_permitted_leave_a_report_healthy() {
        let report =
            Report::new(vec![Finding::warning("memory", "no bound"), Finding::note("info", "not permitted")]);
        assert!(report.is_healthy());
        assert_eq!(report.worst(), Severity::Warning);
        assert_eq!(Report::default().worst(), Severity::Ok);
    }
}
