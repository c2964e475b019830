//! [`RefusalLog`] decides which refusals are logged: each once while it lasts, and at most once a second if it comes and goes. After a
//! minute it is logged again, because its cause may be another.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use redis::{Arg, Cmd};
use tokio::time::Instant;

use crate::store::redis::scripts::sha1_hex;
use crate::sync::lock;

/// A refusal that lasts is logged again after this time.
const AGAIN: Duration = Duration::from_secs(60);
/// The least time between two logs of a refusal that comes and goes.
const AT_LEAST: Duration = Duration::from_secs(1);

/// Servers send few codes; a server that invents codes must not fill the memory.
const MOST: usize = 16;

#[derive(Debug, Default)]
pub(super) struct RefusalLog {
    /// Whether any refusal lasts: if not, a successful command checks only this.
    some: AtomicBool,
    refusals: Mutex<Vec<LoggedRefusal>>,
}

#[derive(Debug)]
struct LoggedRefusal {
    code: String,
    /// The refused command. The refusal lasts until this command succeeds: a server without memory answers reads all
    /// the time.
    command: Option<String>,
    lasts: bool,
    at: Instant,
}

impl RefusalLog {
    /// Records a refusal; returns whether it must be logged.
    pub(super) fn is_news(&self, code: &str, cmd: Option<&Cmd>) -> bool {
        let mut refusals = lock(&self.refusals);
        let before = refusals.iter().position(|refusal| refusal.code == code);
        if let Some(before) = before {
            let since = refusals[before].at.elapsed();
            if since < AT_LEAST || (refusals[before].lasts && since < AGAIN) {
                return false;
            }
            refusals.remove(before);
        } else if refusals.len() == MOST {
            refusals.remove(0);
        }
        let command = cmd.and_then(name);
        refusals.push(LoggedRefusal { code: code.to_owned(), command, lasts: true, at: Instant::now() });
        self.some.store(true, Ordering::Relaxed);
        true
    }

    /// Records that a command succeeded.
    pub(super) fn carried_out(&self, cmd: &Cmd) {
        if !self.some.load(Ordering::Relaxed) {
            return;
        }
        let mut refusals = lock(&self.refusals);
        let command = name(cmd);
        for refusal in refusals.iter_mut().filter(|refusal| refusal.command == command) {
            refusal.lasts = false;
        }
        self.some.store(refusals.iter().any(|refusal| refusal.lasts), Ordering::Relaxed);
    }
}

/// The name of the command, or the digest of its script.
fn name(cmd: &Cmd) -> Option<String> {
    let mut args = cmd.args_iter().map(|arg| match arg {
        Arg::Simple(bytes) => bytes,
        _ => &[],
    });
    match args.next()? {
        b"EVALSHA" => args.next().map(|sha1| String::from_utf8_lossy(sha1).into_owned()),
        b"EVAL" => args.next().map(sha1_hex),
        command => Some(String::from_utf8_lossy(command).into_owned()),
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::advance;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_refusal_is_logged_again_after_it_had_ended_or_a_minute_later() {
        let (refusals, set, get) = (RefusalLog::default(), redis::cmd("SET"), redis::cmd("GET"));
        assert!(refusals.is_news("OOM", Some(&set)));
        assert!(refusals.is_news("BUSY", Some(&get)), "another");
        for _ in 0..10 {
            advance(Duration::from_secs(5)).await;
            refusals.carried_out(&get);
            assert!(!refusals.is_news("OOM", Some(&set)), "reads are answered all the time");
        }
        refusals.carried_out(&set);
        assert!(refusals.is_news("OOM", Some(&set)));
        refusals.carried_out(&set);
        assert!(!refusals.is_news("OOM", Some(&set)), "it comes and goes");
        advance(AT_LEAST).await;
        assert!(refusals.is_news("OOM", Some(&set)));
        advance(AGAIN).await;
        assert!(refusals.is_news("OOM", Some(&set)));
    }

    #[tokio::test(start_paused = true)]
    async fn the_number_of_remembered_codes_is_bounded() {
        let refusals = RefusalLog::default();
        for number in 0..1_000 {
            assert!(refusals.is_news(&number.to_string(), None));
        }
        assert_eq!(lock(&refusals.refusals).len(), MOST);
    }
}
