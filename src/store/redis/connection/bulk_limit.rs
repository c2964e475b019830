//! [`BulkLimit`] is the longest argument that the server accepts (its setting `proto-max-bulk-len`). The server answers a longer argument
//! with an error, and closes the connection that all other commands share. So an argument that broke a connection is not sent
//! again.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use redis::{Arg, Cmd, RedisError};
use tokio::time::Instant;

use crate::store::redis::errors::{TOO_LONG, store_error};
use crate::store::{StoreError, StoreErrorKind};
use crate::sync::lock;

/// How long a limit is remembered that the server has reported, by its setting or by an error: it may be raised.
const REMEMBERED: Duration = Duration::from_secs(600);

/// How long a limit is remembered if a connection broke under an argument of that size without an answer: the server may
/// have ended for another reason.
const SUSPECTED: Duration = Duration::from_secs(10);

/// The lowest limit that a server can be set to. A shorter argument breaks no connection.
const LOWEST: usize = 1024 * 1024;

#[derive(Debug)]
pub(super) struct BulkLimit {
    /// The longest argument that is sent; `usize::MAX` while no limit is known, which each command checks.
    most: AtomicUsize,
    ends_at: Mutex<Option<Instant>>,
    /// Whether a connection broke since the server's limit was last queried.
    is_unread: AtomicBool,
}

impl Default for BulkLimit {
    fn default() -> Self {
        Self {
            most: AtomicUsize::new(usize::MAX),
            ends_at: Mutex::default(),
            is_unread: AtomicBool::new(false),
        }
    }
}

impl BulkLimit {
    /// The longest argument that is sent.
    pub(super) fn most(&self) -> usize {
        let most = self.most.load(Ordering::Relaxed);
        if most != usize::MAX && lock(&self.ends_at).is_some_and(|end| end <= Instant::now()) {
            self.most.store(usize::MAX, Ordering::Relaxed);
            return usize::MAX;
        }
        most
    }

    /// Returns an error for a command that exceeds the limit.
    pub(super) fn check(&self, cmd: &Cmd) -> Result<(), StoreError> {
        let most = self.most();
        if most == usize::MAX || longest(cmd) <= most {
            return Ok(());
        }
        let why = (redis::ErrorKind::Client, TOO_LONG, format!("the limit is {most} bytes"));
        Err(store_error(StoreErrorKind::Refused, RedisError::from(why)))
    }

    /// Records that a connection broke under this command; `is_named`: the server has reported its length as the reason.
    pub(super) fn broken_by(&self, cmd: &Cmd, is_named: bool) {
        let length = longest(cmd);
        if length <= LOWEST && !is_named {
            return;
        }
        self.set(length.saturating_sub(1).min(self.most()), if is_named { REMEMBERED } else { SUSPECTED });
        self.is_unread.store(true, Ordering::Relaxed);
    }

    /// Whether the server's limit must be queried. Resets that.
    pub(super) fn take_unread(&self) -> bool {
        self.is_unread.swap(false, Ordering::Relaxed)
    }

    /// Records the limit that the server has reported.
    pub(super) fn read(&self, most: usize) {
        self.set(most, REMEMBERED);
    }

    fn set(&self, most: usize, remembered: Duration) {
        *lock(&self.ends_at) = Some(Instant::now() + remembered);
        self.most.store(most, Ordering::Relaxed);
    }
}

/// The length of the longest argument.
fn longest(cmd: &Cmd) -> usize {
    let length = |arg: Arg<&[u8]>| if let Arg::Simple(arg) = arg { arg.len() } else { 0 };
    cmd.args_iter().map(length).max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use tokio::time::advance;

    use super::*;

    fn set(length: usize) -> Cmd {
        redis::cmd("SET").arg("k").arg(vec![0_u8; length]).to_owned()
    }

    #[tokio::test(start_paused = true)]
    async fn an_argument_that_broke_a_connection_is_not_sent_for_a_while() {
        for (is_named, remembered) in [(true, REMEMBERED), (false, SUSPECTED)] {
            let limit = BulkLimit::default();
            limit.check(&set(3 * LOWEST)).expect("nothing is known");
            limit.broken_by(&set(2 * LOWEST), is_named);
            assert!(limit.take_unread() && !limit.take_unread());
            limit.check(&set(2 * LOWEST)).expect_err("it broke a connection");
            limit.check(&set(2 * LOWEST - 1)).expect("it is shorter");
            advance(remembered).await;
            limit.check(&set(3 * LOWEST)).expect("the limit may have been raised");
        }
    }

    /// A connection also breaks for other reasons, under commands of any kind.
    #[tokio::test(start_paused = true)]
    async fn a_short_command_is_not_suspected() {
        let limit = BulkLimit::default();
        limit.broken_by(&set(LOWEST), false);
        assert!(!limit.take_unread());
        limit.check(&set(3 * LOWEST)).expect("nothing is known");
    }

    #[tokio::test(start_paused = true)]
    async fn the_limit_that_the_server_names_counts() {
        let limit = BulkLimit::default();
        limit.broken_by(&set(2 * LOWEST), false);
        limit.read(512 * LOWEST);
        limit.check(&set(2 * LOWEST)).expect("the server takes it");
    }
}
