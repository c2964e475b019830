//! Checks whether this user has the guard's rights, by using them, and whether notifications arrive: subscribes to a
//! channel, and waits for a message on it.
//!
//! The commands of scripts run inside a script: they must work there, no key is left behind, and the check needs no right
//! that the guard does not need. `ACL DRYRUN` needs another right, and Redis 6.2 does not have it; so it is used only if
//! no script may run.

use std::collections::HashMap;
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::{Cmd, Pipeline, RedisError, RedisResult, Value};
use tokio::time::{Instant, timeout};

use crate::health::Finding;
use crate::store::redis::RedisStore;
use crate::store::redis::connection::connector::{Connector, Inbound, MessageSink, MessageStream};
use crate::store::redis::errors::{bounded, classify, reason, store_error, unquoted};
use crate::store::redis::scripts;
use crate::store::redis::scripts::CallForm;
use crate::store::{Examine, StoreErrorKind};

/// The inputs of one examination, and its findings so far.
pub(super) struct Examination<'a> {
    pub(super) store: &'a RedisStore,
    pub(super) ask: Examine,
    pub(super) findings: Vec<Finding>,
}

/// The server to examine further.
pub(super) struct ExaminedServer {
    pub(super) connector: Connector,
    /// Opens the connection for the subscription.
    pub(super) inbox: Connector,
    /// A name whose keys are on this server.
    pub(super) name: String,
    /// The masters of a cluster that can be reached.
    pub(super) reached: Vec<String>,
}

impl Examination<'_> {
    /// The user name of the guard's connections.
    pub(super) fn user(&self) -> String {
        self.store.connections.connector.user().unwrap_or_else(|| "default".to_owned())
    }
}

/// How long one answer may take.
pub(super) const ANSWER: Duration = Duration::from_secs(1);

/// The cost of missing notifications.
const WITHOUT_NOTIFICATIONS: &str =
    "no process is told that a load has ended: waits in other processes end by their timers, later";

/// The cost of an unreachable server.
pub(super) const ALONE: &str =
    "each process loads for itself, once per key (with OnStoreDown::FailClosed it answers with an error)";

/// Sends one command; a refusal counts as an answer.
pub(super) async fn one(
    commands: &mut MultiplexedConnection,
    cmd: impl std::borrow::Borrow<Cmd>,
) -> RedisResult<Value> {
    let mut alone = redis::pipe();
    alone.add_command(cmd.borrow().clone());
    Ok(all(commands, &alone).await?.into_iter().next().unwrap_or(Value::Nil))
}

/// Sends several commands; a refusal counts as the answer to its command.
pub(super) async fn all(
    commands: &mut MultiplexedConnection,
    pipeline: &Pipeline,
) -> RedisResult<Vec<Value>> {
    let count = pipeline.len();
    bounded(ANSWER, commands.send_packed_commands(pipeline, 0, count)).await
}

/// Parses names and values, from a map or from a list in which they alternate.
pub(super) fn pairs(answer: Value) -> Option<HashMap<String, Value>> {
    redis::from_redis_value(answer).ok()
}

pub(super) fn text(value: &Value) -> Option<String> {
    redis::from_redis_value_ref(value).ok()
}

/// The error's text, without the command that it may quote.
pub(super) fn words(error: RedisError) -> String {
    reason(&store_error(StoreErrorKind::Unavailable, error))
}

/// The kinds of keys that the examination reads, as they appear in key names. Other kinds are in the same patterns of rights.
const GUARDS_KEYS: [&str; 9] = ["e", "l", "q", "o", "t", "v", "n", "a", "c"];
const LOCKS_KEYS: [&str; 6] = ["m", "mq", "mf", "sh", "sq", "sm"];

/// The commands that only the scripts of locks and of journals of tags need. (The scripts of loads call TIME only if the guard has been
/// able to.)
pub(super) const LOCKS_ONLY: [&str; 10] =
    ["EXISTS", "INCR", "LLEN", "LREM", "TIME", "ZADD", "ZCARD", "ZRANGE", "ZREM", "ZREMRANGEBYSCORE"];

/// The commands that only the scripts of volumes and of adaptive load limits call.
pub(super) const COPIES_ONLY: [&str; 4] = ["HDEL", "HGETALL", "HMGET", "HSET"];

/// The commands for `ACL DRYRUN`, with their arguments after the key: those above and those of the guard's scripts, except
/// commands without a key and those that [`plain`] sends.
const DRY: &str = "SET x, PTTL, PEXPIRE 1, LPOS x, RPUSH x, STRLEN, GETRANGE 0 0, LRANGE 0 0, LPOP, EXISTS, INCR, LLEN, LREM 0 x, ZADD 1 x, \
                   ZCARD, ZRANGE 0 0, ZREM x, ZREMRANGEBYSCORE 0 1, HGETALL, HMGET x, HSET x x, HDEL x";

pub(super) struct RightsTrial {
    pub(super) findings: Vec<Finding>,
    /// When the script published the message; `None` if publishing was refused.
    pub(super) published_at: Option<Instant>,
    /// How many clients received the message.
    pub(super) receivers: i64,
}

/// What the server has refused to this user, by what the guard cannot do without it.
#[derive(Default)]
struct RefusedRights {
    guard: Vec<String>,
    locks: Vec<String>,
    copies: Vec<String>,
    tags: Vec<String>,
    publish: bool,
    /// The server refuses all writes, whatever this user's rights.
    writes: Option<String>,
    /// Neither a script nor `ACL DRYRUN` may run.
    unseen: bool,
}

impl RefusedRights {
    fn add(&mut self, what: &str, answer: &str) {
        // The code of a refusal, its text inside a script, and `unknown` or `Unknown` for a renamed command.
        let denied = ["NOPERM", "The user executing", "permission", "nknown"];
        if !denied.iter().any(|sign| answer.contains(sign)) {
            // The finding has only the error's code, because the text may quote a key.
            let code = answer.split([' ', ':']).find(|word| !word.is_empty()).unwrap_or("ERR");
            self.writes
                .get_or_insert_with(|| format!("{what} is answered with {}", code.trim_start_matches('-')));
        } else if what == "PUBLISH" {
            self.publish = true;
        } else {
            let of = match what {
                _ if LOCKS_ONLY.contains(&what) => &mut self.locks,
                _ if COPIES_ONLY.contains(&what) => &mut self.copies,
                "ZMSCORE" => &mut self.tags,
                _ => &mut self.guard,
            };
            // Some commands are sent both in a script and outside of one.
            if !of.iter().any(|known| known == what) {
                of.push(what.to_owned());
            }
        }
    }

    /// Adds the refusals that the script reports; returns the number of receivers.
    fn add_all(&mut self, answer: &Value) -> Option<i64> {
        let (receivers, failed): (i64, Vec<String>) = redis::from_redis_value_ref(answer).ok()?;
        for failure in failed {
            let (what, why) = failure.split_once(' ').unwrap_or((&failure, ""));
            self.add(what, why);
        }
        Some(receivers)
    }

    /// Advises rights on the namespace of the key `name` only: this user must not reach other services' keys.
    fn findings(self, user: &str, name: &str) -> Vec<Finding> {
        let Self { guard, locks, copies, tags, publish, writes, unseen } = self;
        let may_not = |what: &[String]| format!("`{user}` may not {}", what.join(", "));
        let mut findings = Vec::new();
        if !guard.is_empty() {
            let again = match guard.iter().any(|what| what == "SET") {
                true => "; then look again: without SET not everything could be tried",
                false => "",
            };
            let found = Finding::problem("rights", may_not(&guard));
            findings.push(found.cost(ALONE).advice(advised_rules(&guard, user, name) + again));
        }
        if unseen {
            let found = "neither EVAL nor ACL DRYRUN is permitted: what scripts call could not be tried";
            findings.push(Finding::note("rights", found).advice("+eval first, and look again"));
        }
        let of_tags = "values to which their load adds tags are not stored";
        let of_locks = "loads are guarded; mutexes and semaphores fail, loads are not limited, and values to which their load adds tags are \
                        not stored";
        let of_copies = "no value is served from memory (local_for), and where another process of this namespace does that, \
                         invalidations by this one fail; the limit of adaptive_loads stays where it is";
        for (what, cost) in [(locks, of_locks), (copies, of_copies), (tags, of_tags)] {
            if !what.is_empty() {
                let found = Finding::warning("rights", may_not(&what));
                findings.push(found.cost(cost).advice(advised_rules(&what, user, name)));
            }
        }
        if publish {
            let found = Finding::warning("rights", format!("`{user}` may not PUBLISH from a script"));
            let advice = format!("ACL SETUSER {user} +publish &sg1:*");
            findings.push(found.cost(WITHOUT_NOTIFICATIONS).advice(advice));
        }
        if let Some(writes) = writes {
            let found = Finding::problem("writes", format!("the server refuses writes: {writes}"));
            findings.push(found.cost(format!("nothing is stored; {ALONE}")).advice(ON_REFUSED_WRITES));
        }
        if findings.is_empty() {
            findings
                .push(Finding::ok("rights", format!("`{user}` may do everything that loads and locks need")));
        }
        findings
    }
}

/// The advice for a server that refuses writes.
const ON_REFUSED_WRITES: &str = "OOM: memory or another maxmemory-policy; READONLY: this is a replica; MISCONF: its disk; \
     NOREPLICAS: its replicas; CLUSTERDOWN: the master that is missing, or slots that no node serves (redis-cli --cluster check, and fix)";

/// The advice to give this user the rights to these commands, and to keys `on` which it may not use.
fn advised_rules(what: &[String], user: &str, name: &str) -> String {
    let mut rules: Vec<String> = Vec::new();
    for what in what {
        let (command, keys) = what.split_once(" on ").unwrap_or((what, ""));
        let keys = if keys.is_empty() { Vec::new() } else { patterns(keys, name) };
        for rule in [vec![format!("+{}", command.to_lowercase())], keys].concat() {
            if !rules.contains(&rule) {
                rules.push(rule);
            }
        }
    }
    let rules = rules.join(" ");
    format!("ACL SETUSER {user} {rules} (and no rename-command); docs/redis.md has the whole list")
}

/// Key patterns for `sg1:KIND:*`, or for all kinds, in the namespace of the key `name` only. One pattern covers the kinds
/// of one character, which the guard uses, and another those of two characters, which locks use.
fn patterns(keys: &str, name: &str) -> Vec<String> {
    let mut namespace = String::new();
    for character in name.split(':').next().unwrap_or_default().chars() {
        if matches!(character, '*' | '?' | '[' | ']' | '\\' | '^') {
            namespace.push('\\');
        }
        namespace.push(character);
    }
    let kind = keys.split(':').nth(1).unwrap_or_default();
    let heads = match kind {
        "*" => vec!["?".to_owned(), "??".to_owned()],
        kind => vec!["?".repeat(kind.len())],
    };
    heads.iter().map(|head| format!("~sg1:{head}:{{{namespace}:*")).collect()
}

/// Tries all rights on the key `name`; a script publishes to `channel`.
pub(super) async fn examine(
    commands: &mut MultiplexedConnection,
    name: &str,
    channel: &str,
    user: &str,
) -> RedisResult<RightsTrial> {
    let mut refused = RefusedRights::default();
    plain(commands, name, &mut refused).await?;
    let sent = Instant::now();
    let call = |sha1| {
        let mut call = scripts::DOCTOR.call(CallForm { sha1, spread: false }, name, 64);
        call.arg(channel);
        call
    };
    let mut answer = one(commands, call(true)).await?;
    if let Value::ServerError(error) = &answer {
        if error.code() != "NOSCRIPT" {
            refused.add("EVALSHA", &refusal_text(&answer));
        }
        answer = one(commands, call(false)).await?;
    }
    let (mut published_at, mut receivers) = (None, 0);
    match refused.add_all(&answer) {
        Some(count) => {
            receivers = count;
            published_at = (!refused.publish).then_some(sent);
        }
        None => {
            refused.add("EVAL", &refusal_text(&answer));
            dry_run(commands, name, user, &mut refused).await?;
        }
    }
    Ok(RightsTrial { findings: refused.findings(user, name), published_at, receivers })
}

/// Reads from the script's answer which commands of loads it could not call. Leaves out the commands that only locks or
/// local copies need, PUBLISH, and a refusal of all writes.
pub(crate) fn lacked_by_loads(answer: Value) -> Option<Vec<String>> {
    let mut refused = RefusedRights::default();
    refused.add_all(&answer)?;
    Some(refused.guard)
}

/// Tries the commands that are sent outside of scripts, and reads a key of each of these kinds.
async fn plain(
    commands: &mut MultiplexedConnection,
    name: &str,
    refused: &mut RefusedRights,
) -> RedisResult<()> {
    let key = |kind: &str| format!("sg1:{kind}:{{{name}}}");
    let (mut pipeline, mut kinds) = (redis::pipe(), Vec::new());
    for kind in GUARDS_KEYS.iter().chain(&LOCKS_KEYS) {
        pipeline.cmd("GET").arg(key(kind));
        kinds.push(*kind);
    }
    pipeline.cmd("MGET").arg(key("e")).arg(key("t")).cmd("DEL").arg(key("t"));
    pipeline.cmd("ZMSCORE").arg(key("j")).arg("");
    // EVAL, which the guard needs for a script that the server does not have. The script of [`examine`] is not sent by EVAL if the
    // server has that script already.
    pipeline.cmd("EVAL").arg("return 1").arg(0);
    let mut answers = all(commands, &pipeline).await?.into_iter();
    let denied = |answer: &Value| matches!(answer, Value::ServerError(error) if error.code() == "NOPERM");
    let closed: Vec<_> = kinds.into_iter().zip(&mut answers).filter(|(_, answer)| denied(answer)).collect();
    if closed.len() == GUARDS_KEYS.len() + LOCKS_KEYS.len() {
        // The refusal is not about one kind of key: either the command or all keys of this crate are forbidden.
        refused.guard.push("GET on sg1:*".to_owned());
    } else {
        for (kind, _) in closed {
            let of = if LOCKS_KEYS.contains(&kind) { &mut refused.locks } else { &mut refused.guard };
            of.push(format!("GET on sg1:{kind}:*"));
        }
    }
    for (what, answer) in ["MGET", "DEL", "ZMSCORE", "EVAL"].into_iter().zip(answers) {
        if let Value::ServerError(_) = &answer {
            refused.add(what, &refusal_text(&answer));
        }
    }
    Ok(())
}

/// Asks the server whether a script could call each command.
async fn dry_run(
    commands: &mut MultiplexedConnection,
    name: &str,
    user: &str,
    refused: &mut RefusedRights,
) -> RedisResult<()> {
    let (mut pipeline, mut tried) = (redis::pipe(), Vec::new());
    for command in DRY.split(", ") {
        let mut words = command.split(' ');
        let what = words.next().unwrap_or_default();
        let args: Vec<_> = words.collect();
        pipeline.cmd("ACL").arg("DRYRUN").arg(user).arg(what).arg(format!("sg1:e:{{{name}}}")).arg(args);
        tried.push(what);
    }
    for (what, answer) in tried.into_iter().zip(all(commands, &pipeline).await?) {
        match answer {
            Value::Okay => {}
            Value::BulkString(why) => refused.add(what, &String::from_utf8_lossy(&why)),
            _ => refused.unseen = true,
        }
    }
    Ok(())
}

fn refusal_text(answer: &Value) -> String {
    match answer {
        Value::ServerError(error) => format!("{} {}", error.code(), error.details().unwrap_or_default()),
        _ => "ERR unexpected answer".to_owned(),
    }
}

/// At how many nodes to try a subscription: each node that hangs takes time.
const MOST_SUBSCRIBE_TRIES: usize = 3;

impl Examination<'_> {
    /// Subscribes as the guard does, to a channel that no other client uses.
    pub(super) async fn subscribe(
        &mut self,
        connector: &Connector,
        channel: &str,
    ) -> Option<(MessageSink, MessageStream)> {
        let mut subscribed = subscribe_at(connector, channel).await;
        for _ in 1..self.store.commands.count().min(MOST_SUBSCRIBE_TRIES) {
            match &subscribed {
                Err(error) if classify(error).0 != StoreErrorKind::Refused => {
                    // The guard does the same: it subscribes at any other node.
                    subscribed = subscribe_at(connector, channel).await;
                }
                _ => break,
            }
        }
        match subscribed {
            Ok(inbox) => Some(inbox),
            Err(error) => {
                let advice = match classify(&error).0 {
                    StoreErrorKind::Refused => {
                        format!("ACL SETUSER {} +subscribe +unsubscribe +ping &sg1:*", self.user())
                    }
                    _ => {
                        connector.advice(&error).unwrap_or("a second connection must be possible").to_owned()
                    }
                };
                let found =
                    Finding::warning("notifications", format!("can not subscribe: {}", unquoted(error)));
                self.findings.push(found.cost(WITHOUT_NOTIFICATIONS).advice(advice));
                None
            }
        }
    }

    /// Checks whether a message that a script has published arrives.
    pub(super) async fn listen(
        &mut self,
        messages: &mut MessageStream,
        published_at: Option<Instant>,
        receivers: i64,
    ) {
        let Some(published_at) = published_at else { return };
        let received = timeout(ANSWER, messages.next()).await;
        // Only this check uses the channel. A cluster's scripts do not use the number of receivers.
        if receivers > 1 && !self.store.commands.is_spread() {
            let found =
                format!("a message for one went to {receivers}: another program subscribes to all channels");
            self.findings.push(
                Finding::warning("notifications", found)
                    .cost("what is handed over to a process that has died looks heard: the next in line waits for its time to be over")
                    .advice("no PSUBSCRIBE whose pattern matches sg1:i:*; CLIENT LIST TYPE pubsub tells which client has a psub above 0"),
            );
        }
        self.findings.push(match received {
            Ok(Some(_)) => Finding::ok("notifications", format!("published and heard in {:.1?}", published_at.elapsed())),
            _ => Finding::warning("notifications", format!("published to {receivers}, not heard within {ANSWER:?}"))
                .cost(WITHOUT_NOTIFICATIONS)
                .advice("+publish and &sg1:* for this user; a proxy between here and the server must pass messages on"),
        });
    }
}

async fn subscribe_at(connector: &Connector, channel: &str) -> RedisResult<(MessageSink, MessageStream)> {
    let Inbound { mut sink, messages, .. } = bounded(ANSWER * 2, connector.inbox()).await?;
    bounded(ANSWER, sink.subscribe(channel)).await?;
    Ok((sink, messages))
}
