//! [`LogReport`]: what a log needs of its servers, and whether it is there.

use std::fmt;

use crate::error::{ErrorKind, LogError};
use crate::gate::Gate;
use crate::source::Source;

/// What was found; made by [`PostgresLog::doctor`](crate::PostgresLog::doctor). Its text has a line for each finding.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct LogReport {
    /// All findings, server by server.
    pub findings: Vec<LogFinding>,
}

/// One finding.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct LogFinding {
    /// The server's host and port.
    pub server: String,
    /// Whether something has to be changed.
    pub is_problem: bool,
    /// What was found, and what to do about it.
    pub text: String,
}

impl LogReport {
    /// Whether nothing has to be changed.
    pub fn is_healthy(&self) -> bool {
        self.findings.iter().all(|finding| !finding.is_problem)
    }
}

impl fmt::Display for LogReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for LogFinding { server, is_problem, text } in &self.findings {
            writeln!(f, "{} {server}: {text}", if *is_problem { "PROBLEM" } else { "ok     " })?;
        }
        Ok(())
    }
}

/// Adds what is found of one server.
pub(crate) async fn examine(source: &Source, report: &mut LogReport) {
    let server = format!("{}:{}", source.server.host, source.server.port);
    let mut add = |is_problem, text: String| {
        report.findings.push(LogFinding { server: server.clone(), is_problem, text });
    };
    if let Err(error) = look(source, &mut add).await {
        add(true, error.to_string());
    }
}

async fn look(source: &Source, add: &mut impl FnMut(bool, String)) -> Result<(), LogError> {
    let mut gate = Gate::open(source).await?;
    let version = gate.text("show server_version").await?;
    if gate.text("select pg_is_in_recovery()").await? == "t" {
        add(
            false,
            format!(
                "Postgres {version}, a standby: its primary is read. Before version 17 a promotion loses the slot, and everything is invalidated"
            ),
        );
        return Ok(());
    }
    add(false, format!("Postgres {version}, a primary"));
    let level = gate.text("show wal_level").await?;
    add(
        level != "logical",
        format!(
            "wal_level is {level}{}",
            if level == "logical" { "" } else { ": set it to logical, and restart" }
        ),
    );
    let most = gate.text("show max_slot_wal_keep_size").await?;
    if most == "-1" {
        add(true, "max_slot_wal_keep_size is -1: a slot that no process reads fills the server's disk. Set a bound, such as 10GB".to_owned());
    } else {
        add(false, format!("max_slot_wal_keep_size is {most}"));
    }
    let may =
        gate.text("select rolreplication or rolsuper from pg_roles where rolname = current_user").await?;
    if may != "t" {
        add(true, "the user lacks REPLICATION: run ALTER ROLE .. REPLICATION".to_owned());
    }
    for (setting, view) in
        [("max_replication_slots", "pg_replication_slots"), ("max_wal_senders", "pg_stat_replication")]
    {
        let free =
            gate.text(&format!("select current_setting('{setting}')::int - count(*) from {view}")).await?;
        let free: i64 = free.parse().unwrap_or_default();
        // A new slot has another name at first; a reader has two connections, and this is a third.
        add(
            free < 2,
            format!("{free} of {setting} are free{}", if free < 2 { ": a reader needs two" } else { "" }),
        );
    }
    look_at_publication(source, &mut gate, add).await?;
    look_at_slot(source, &mut gate, add).await
}

async fn look_at_publication(
    source: &Source,
    gate: &mut Gate,
    add: &mut impl FnMut(bool, String),
) -> Result<(), LogError> {
    let name = &source.publication;
    if gate.has_publication(name).await? {
        add(false, format!("the publication {name} is there"));
    } else if source.rows.is_some() {
        add(true, LogError::new(ErrorKind::NoPublication(name.clone())).to_string());
    } else if gate.text("select has_database_privilege(current_database(), 'CREATE')").await? == "t" {
        add(false, format!("the publication {name} is not there: the first reader makes it"));
    } else {
        add(
            true,
            format!(
                "the publication {name} is not there, and the user may not make it: run CREATE PUBLICATION {name}"
            ),
        );
    }
    Ok(())
}

async fn look_at_slot(
    source: &Source,
    gate: &mut Gate,
    add: &mut impl FnMut(bool, String),
) -> Result<(), LogError> {
    let name = &source.slot;
    let sql = format!(
        "select wal_status, active, pg_size_pretty(pg_wal_lsn_diff(pg_current_wal_lsn(), restart_lsn)), pg_size_pretty(safe_wal_size) \
         from pg_replication_slots where slot_name = '{name}'"
    );
    let Some(row) = gate.rows(&sql).await?.into_iter().next() else {
        add(
            false,
            format!(
                "the slot {name} is not there: the first reader makes it, and everything is invalidated once"
            ),
        );
        return Ok(());
    };
    let column = |at: usize| row.get(at).map_or("", String::as_str);
    match (column(0), column(1)) {
        ("lost", _) => add(
            true,
            format!(
                "the slot {name} is lost: the next reader makes it anew, and everything is invalidated once"
            ),
        ),
        (status, "t") => add(
            status == "unreserved",
            format!(
                "the slot {name} is read; it keeps {}, and is lost after {} more",
                column(2),
                or_never(column(3))
            ),
        ),
        (_, _) => add(
            true,
            format!(
                "no process reads the slot {name}; it keeps {}, and is lost after {} more",
                column(2),
                or_never(column(3))
            ),
        ),
    }
    Ok(())
}

fn or_never(size: &str) -> &str {
    if size.is_empty() { "any number of bytes" } else { size }
}
