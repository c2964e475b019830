//! Validation of a policy: settings that contradict each other are refused by name.

use std::time::Duration;

use super::audit::AuditSettings;
use super::{Policy, PolicyBuilder};
use crate::error::{Error, ErrorKind};
use crate::key::CacheKey;
use crate::value::tags::MOST_TAGS;

impl PolicyBuilder {
    /// Checks the settings against each other.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::InvalidPolicy`], naming the settings that contradict each other and values that would not.
    pub fn build(self) -> Result<Policy, Error> {
        let Self { mut policy, wait_timeout, command_timeout, requests } = self;
        policy.command_timeout = command_timeout.unwrap_or_else(|| policy.usual_command_timeout());
        policy.wait_timeout = wait_timeout.unwrap_or_else(|| policy.longest_load());

        named(&policy.name)?;
        let day = Duration::from_secs(86_400);
        in_range("fresh_for", policy.fresh_for, MILLISECOND, day * 3650)?;
        in_range("stale_while_revalidate", policy.stale_while_revalidate, Duration::ZERO, day * 3650)?;
        in_range("stale_if_error", policy.stale_if_error, Duration::ZERO, day * 3650)?;
        in_range("local_while_down", policy.local_while_down, Duration::ZERO, day * 3650)?;
        in_range("back_off", policy.back_off, MILLISECOND, day)?;
        in_range("negative_for", policy.negative_for(), MILLISECOND, day * 3650)?;
        in_range("soft_timeout", policy.soft_timeout.unwrap_or(MILLISECOND), MILLISECOND, day)?;
        if !(0.0..=100.0).contains(&policy.early_refresh) {
            return Err(refused(format!("early_refresh is {}: choose from 0 to 100", policy.early_refresh)));
        }
        if !(0.0..1.0).contains(&policy.refresh_ahead) {
            let text = format!("refresh_ahead is {}: choose from 0 to less than 1", policy.refresh_ahead);
            return Err(refused(text));
        }
        let AuditSettings { fraction, grace, .. } = policy.audit;
        if !(0.0..=1.0).contains(&fraction) {
            let text =
                format!("audit is {fraction}: choose from 0 to 1, such as 0.001 for one of a thousand hits");
            return Err(refused(text));
        }
        in_range("audit_grace", grace, Duration::ZERO, day)?;
        in_range("lease", policy.lease, MILLISECOND * 100, day)?;
        in_range("load_timeout", policy.load_timeout, MILLISECOND, day)?;
        in_range("permit_timeout", policy.permit_timeout, Duration::ZERO, day)?;
        // The default is a sum of the limits above, so its limit is higher.
        in_range("wait_timeout", policy.wait_timeout, MILLISECOND, day * 2)?;
        let replicas_within = policy.replicas.map_or(MILLISECOND, |(_, timeout)| timeout);
        in_range("invalidate_replicas' timeout", replicas_within, MILLISECOND, Duration::from_secs(60))?;
        if policy.tags.len() >= MOST_TAGS || policy.tags.iter().any(CacheKey::is_empty) {
            let text =
                format!("tags are {}: choose at most {}, none empty", policy.tags.len(), MOST_TAGS - 1);
            return Err(refused(text));
        }
        if policy.max_waiters == 0 {
            return Err(refused("max_waiters is 0: choose at least 1".into()));
        }
        if policy.max_concurrent_loads == Some(0) {
            return Err(refused("max_concurrent_loads is 0: choose at least 1".into()));
        }
        if policy.max_fail_open_loads == 0 {
            let text = "max_fail_open_loads is 0: choose at least 1, or OnStoreDown::FailClosed";
            return Err(refused(text.into()));
        }
        in_range("coordination_budget", policy.coordination_budget, MILLISECOND * 2, day)?;
        in_range("command_timeout", policy.command_timeout, MILLISECOND, day)?;
        in_range("error_for", policy.error_for, Duration::ZERO, day)?;
        if !(0.0..=0.9).contains(&policy.ttl_jitter) {
            return Err(refused(format!("ttl_jitter is {}: choose from 0 to 0.9", policy.ttl_jitter)));
        }
        if policy.max_body == 0 || policy.max_body > 256 * 1024 * 1024 {
            return Err(refused(format!("max_body is {}: choose from 1 to 256 MiB", policy.max_body)));
        }
        policy.http = requests.apply(policy.http).map_err(refused)?;
        let contradiction = |left: &str, a: Duration, right: &str, b: Duration, advice: &str| {
            Err(refused(format!("{left} ({a:?}) and {right} ({b:?}) contradict each other: {advice}")))
        };
        if policy.command_timeout > policy.coordination_budget {
            return contradiction(
                "command_timeout",
                policy.command_timeout,
                "coordination_budget",
                policy.coordination_budget,
                "one command may not take longer than all of them",
            );
        }
        if !policy.local_while_down.is_zero() && policy.local_for.is_zero() {
            return contradiction(
                "local_while_down",
                policy.local_while_down,
                "local_for",
                policy.local_for,
                "without copies there is nothing to serve while the store is down; set local_for",
            );
        }
        if policy.lease < policy.command_timeout * 4 {
            return contradiction(
                "lease",
                policy.lease,
                "command_timeout",
                policy.command_timeout,
                "a lease must outlast a renewal that is late by one command; make it at least four times as long \
                 (where it is not set, command_timeout is half of coordination_budget)",
            );
        }
        if policy.load_timeout.saturating_add(policy.lease) < policy.error_for {
            return contradiction(
                "error_for",
                policy.error_for,
                "load_timeout",
                policy.load_timeout,
                "a failure may not be replayed for longer than one try takes (load_timeout plus lease)",
            );
        }
        Ok(policy)
    }
}

const MILLISECOND: Duration = Duration::from_millis(1);

/// A label that a dashboard can show and a query can quote.
fn named(name: &str) -> Result<(), Error> {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "_-.:/".contains(c);
    let text = if !(1..=64).contains(&name.len()) {
        format!("name has {} bytes: choose 1 to 64", name.len())
    } else if let Some(other) = name.chars().find(|c| !is_plain(*c)) {
        format!("name has the character {other:?}: choose from a-z, A-Z, 0-9, _, -, ., : and /")
    } else {
        return Ok(());
    };
    Err(refused(text))
}

fn in_range(name: &str, value: Duration, least: Duration, most: Duration) -> Result<(), Error> {
    if (least..=most).contains(&value) {
        return Ok(());
    }
    Err(refused(format!("{name} is {value:?}: choose from {least:?} to {most:?}")))
}

fn refused(text: String) -> Error {
    Error::new(ErrorKind::InvalidPolicy, text)
}
