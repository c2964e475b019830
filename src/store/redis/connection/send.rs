//! Sends commands and judges their replies. A command waits for the first connection, and starts the reconnect task if there is
//! none.
//!
//! [`BulkLimit`] is the longest argument that the server accepts (its setting `proto-max-bulk-len`). The server answers a longer argument
//! with an error, and closes the connection that all other commands share. So an argument that broke a connection is not sent
//! again.
//!
//! [`RefusalLog`] decides which refusals are logged: each once while it lasts, and at most once a second if it comes and goes. After a
//! minute it is logged again, because its cause may be another.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use redis::{Arg, Cmd, RedisError, RedisResult, Value};
use tokio::time::error::Elapsed;
use tokio::time::{Instant, timeout};

use super::breaker::silent;
use super::{LiveConnection, Loss, Supervisor};
use crate::observe::{log, warn_if};
use crate::store::redis::errors::{ConnectionFate, TOO_LONG, classify, code, is_protocol, store_error};
use crate::store::redis::scripts::sha1_hex;
use crate::store::{StoreError, StoreErrorKind};
use crate::sync::lock;

/// How a command is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SendMode {
    /// Once. If the connection breaks under the command, the caller receives the error: the command may have run.
    Once,
    /// A read: if the connection breaks under it, it is sent once more, on the next connection.
    Repeat,
    /// Once, after ASKING, which lets a node of a cluster answer for a slot that is migrating to it.
    #[cfg(feature = "cluster")]
    Asking,
}

impl Supervisor {
    /// Sends a command and waits for its reply, at most `within` in all. Also returns the session of the connection on which
    /// the reply came: all replies of one session are from one server, in the order of their commands.
    ///
    /// Some of the server's errors are returned as replies, because they belong to the protocol: NOSCRIPT,
    /// WRONGTYPE, and a cluster node's redirections.
    pub(crate) async fn send(
        self: &Arc<Self>,
        cmd: &Cmd,
        within: Duration,
        mut mode: SendMode,
    ) -> Result<(Value, u64), StoreError> {
        let (began, mut left) = (Instant::now(), within);
        loop {
            self.bulk_limit.check(cmd)?;
            let up = match self.current()? {
                Some(up) => up,
                // Boxed, so that every command's future is smaller.
                None => Box::pin(self.first(&mut left)).await?,
            };
            let LiveConnection { generation, session, mut connection, .. } = up;
            let sent = self.breaker.begin(left);
            let reply = match mode {
                #[cfg(feature = "cluster")]
                SendMode::Asking => timeout(left, Box::pin(ask(&mut connection, cmd))).await,
                _ => timeout(left, connection.send_packed_command(cmd)).await,
            };
            match self.handle_reply(cmd, generation, left, sent, reply) {
                // Once: the command itself may break connections, for example a read whose reply exceeds an output limit.
                Err(error) if error.kind == StoreErrorKind::Broken && mode == SendMode::Repeat => {
                    (mode, left) = (SendMode::Once, within.saturating_sub(began.elapsed()));
                }
                reply => return Ok((reply?, session)),
            }
        }
    }

    /// Waits for the first connection, at most `left`, which is less by that time then.
    async fn first(self: &Arc<Self>, left: &mut Duration) -> Result<LiveConnection, StoreError> {
        let started = Instant::now();
        let opened = timeout(*left, self.opened()).await;
        *left = left.saturating_sub(started.elapsed());
        // Not `TimedOut`: the command was not sent.
        opened.map_err(|_| StoreError::new(StoreErrorKind::Unavailable))?
    }

    /// Waits until commands can be sent, even if attempts to connect fail.
    pub(crate) async fn until_up(self: &Arc<Self>) -> Result<(), StoreError> {
        let mut changes = self.changes.subscribe();
        loop {
            match self.opened().await {
                Ok(_) => return Ok(()),
                Err(error) if error.kind == StoreErrorKind::Closed => return Err(error),
                Err(_) => {
                    let _ = changes.changed().await;
                }
            }
        }
    }

    /// Waits for the first connection. Starts the reconnect task if there is none.
    pub(super) async fn opened(self: &Arc<Self>) -> Result<LiveConnection, StoreError> {
        let mut changes = self.changes.subscribe();
        let mut started = false;
        loop {
            changes.mark_unchanged();
            if let Some(up) = self.current()? {
                return Ok(up);
            }
            if self.start() {
                if started {
                    // This caller's runtime is being shut down, so it has dropped the reconnect task.
                    return Err(StoreError::new(StoreErrorKind::Unavailable));
                }
                started = true;
            }
            let _ = changes.changed().await;
        }
    }

    /// Waits until the present attempt to connect has ended, however long that takes.
    #[cfg(feature = "cluster")]
    pub(crate) async fn settled(self: &Arc<Self>) -> Result<(), StoreError> {
        let mut changes = self.changes.subscribe();
        while matches!(self.slot().state, super::ConnectionState::Connecting(_)) {
            let _ = changes.changed().await;
        }
        self.opened().await.map(drop)
    }

    /// Handles a reply, or a time-out after `waited`.
    fn handle_reply(
        &self,
        cmd: &Cmd,
        generation: u64,
        waited: Duration,
        sent: Option<Instant>,
        reply: Result<RedisResult<Value>, Elapsed>,
    ) -> Result<Value, StoreError> {
        match reply {
            Ok(reply) => {
                let judged = self.judge(Some(cmd), generation, sent, reply);
                if judged.is_ok() {
                    self.refusals.carried_out(cmd);
                }
                judged
            }
            Err(_) => {
                self.handle_timeout(generation, waited);
                Err(StoreError::new(StoreErrorKind::TimedOut))
            }
        }
    }

    /// Returns a reply that belongs to the protocol. Any other error is counted, logged, and may cost the connection.
    pub(super) fn judge(
        &self,
        cmd: Option<&Cmd>,
        generation: u64,
        sent: Option<Instant>,
        reply: RedisResult<Value>,
    ) -> Result<Value, StoreError> {
        let mut answered = false;
        let error = match reply {
            Ok(Value::ServerError(error)) => {
                self.breaker.record_answer(sent);
                answered = true;
                let redirects = || {
                    self.connector.endpoint.is_node() && matches!(error.code(), "MOVED" | "ASK" | "TRYAGAIN")
                };
                if matches!(error.code(), "NOSCRIPT" | "WRONGTYPE") || redirects() {
                    return Ok(Value::ServerError(error));
                }
                RedisError::from(error)
            }
            Ok(value) => {
                self.breaker.record_answer(sent);
                return Ok(value);
            }
            Err(error) => error,
        };
        let (mut kind, fate) = classify(&error);
        let is_too_long = is_protocol(&error);
        if kind == StoreErrorKind::Unavailable && !answered {
            // The command was sent and its answer is lost, so it may have run.
            kind = StoreErrorKind::Broken;
        }
        if let Some(cmd) = cmd.filter(|_| is_too_long || kind == StoreErrorKind::Broken) {
            self.bulk_limit.broken_by(cmd, is_too_long);
        }
        if code(&error) == Some("NOREPLICAS") {
            self.connector.endpoint.doubt();
        }
        let is_news =
            fate == ConnectionFate::Keep && self.refusals.is_news(code(&error).unwrap_or_default(), cmd);
        let failure = store_error(kind, error);
        match fate {
            // The server will refuse the same command of every request.
            ConnectionFate::Keep => {
                let reason = self.connector.text_of(&failure);
                warn_if!(log::REDIS, is_news, %reason, "redis refuses a command");
            }
            ConnectionFate::Drop => self.lose(generation, &failure, Loss::of(answered && !is_too_long)),
        }
        Err(failure)
    }

    /// Drops the connection if it has been silent for two deadlines; otherwise requests a check: with little traffic, each
    /// lost command would count as a single slow one.
    pub(super) fn handle_timeout(&self, generation: u64, waited: Duration) {
        if *self.changes.borrow() != generation {
            return;
        }
        if !self.breaker.record_timeout(waited) {
            let reason = self.connector.text_of(&StoreError::new(StoreErrorKind::TimedOut));
            warn_if!(log::REDIS, self.late.is_due(), %reason, ?waited, "redis does not answer a command in time");
            self.suspect();
        } else {
            self.lose(generation, &silent(), Loss::Doubtful);
        }
    }
}

/// Sends a command after ASKING. Both are sent in one write, because no other command may come between them.
#[cfg(feature = "cluster")]
async fn ask(connection: &mut redis::aio::MultiplexedConnection, cmd: &Cmd) -> RedisResult<Value> {
    let mut pipeline = redis::pipe();
    pipeline.cmd("ASKING").add_command(cmd.clone());
    let replies = connection.send_packed_commands(&pipeline, 0, 2).await?;
    // Without the right to ASKING, the second answer is the same as without ASKING.
    replies.into_iter().nth(1).ok_or_else(crate::store::redis::errors::unexpected)
}

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
