//! Whether this user may do what the guard does, found out by doing it.
//!
//! What scripts call is tried inside a script: that is where it has to work, in one step no key is left behind, and
//! it takes no right that the guard does not need. `ACL DRYRUN` would take one, and is not on 6.2; it is asked only
//! where no script may run.

use redis::aio::MultiplexedConnection;
use redis::{RedisResult, Value};
use tokio::time::Instant;

use super::asking::{ALONE, UNTOLD, all, one};
use crate::health::Finding;
use crate::store::redis::scripts::{self, By};

/// The kinds of keys, as they stand in their names.
const GUARDS_KEYS: [&str; 6] = ["e", "l", "q", "o", "t", "v"];
const LOCKS_KEYS: [&str; 6] = ["m", "mq", "mf", "sh", "sq", "sm"];

/// What only the scripts of locks call.
pub(super) const LOCKS_ONLY: [&str; 10] =
    ["EXISTS", "INCR", "LLEN", "LREM", "TIME", "ZADD", "ZCARD", "ZRANGE", "ZREM", "ZREMRANGEBYSCORE"];

/// The same with arguments, and what the guard's scripts call, as far as it is not tried outside of them; the key follows
/// the command's name.
const DRY: [(&str, &[&str]); 18] = [
    ("SET", &["x"]),
    ("PTTL", &[]),
    ("PEXPIRE", &["1"]),
    ("LPOS", &["x"]),
    ("RPUSH", &["x"]),
    ("STRLEN", &[]),
    ("GETRANGE", &["0", "0"]),
    ("LRANGE", &["0", "0"]),
    ("LPOP", &[]),
    ("EXISTS", &[]),
    ("INCR", &[]),
    ("LLEN", &[]),
    ("LREM", &["0", "x"]),
    ("ZADD", &["1", "x"]),
    ("ZCARD", &[]),
    ("ZRANGE", &["0", "0"]),
    ("ZREM", &["x"]),
    ("ZREMRANGEBYSCORE", &["0", "1"]),
];

pub(super) struct Tried {
    pub(super) findings: Vec<Finding>,
    /// When the message was sent, if it was, and how many the server gave it to.
    pub(super) published_at: Option<Instant>,
    pub(super) heard: i64,
}

/// What was refused, sorted by what that costs.
#[derive(Default)]
struct Refused {
    guard: Vec<String>,
    locks: Vec<String>,
    publish: bool,
    /// Not a matter of rights: the server takes no writes at all.
    writes: Option<String>,
    /// No script may run, and the server may not be asked either.
    unseen: bool,
}

impl Refused {
    fn add(&mut self, what: &str, answer: &str) {
        // By its code, in scripts by its words, and of a command that was renamed away: `unknown`, `Unknown`.
        let denied = ["NOPERM", "The user executing", "permission", "nknown"];
        if !denied.iter().any(|sign| answer.contains(sign)) {
            // Its code, without what may quote a key.
            let code = answer.split([' ', ':']).find(|word| !word.is_empty()).unwrap_or("ERR");
            self.writes
                .get_or_insert_with(|| format!("{what} is answered with {}", code.trim_start_matches('-')));
        } else if what == "PUBLISH" {
            self.publish = true;
        } else {
            let of = if LOCKS_ONLY.contains(&what) { &mut self.locks } else { &mut self.guard };
            // Some are tried in a script and outside of one.
            if !of.iter().any(|known| known == what) {
                of.push(what.to_owned());
            }
        }
    }

    /// What the script has found; how many have heard it.
    fn add_all(&mut self, answer: &Value) -> Option<i64> {
        let (receivers, failed): (i64, Vec<String>) = redis::from_redis_value_ref(answer).ok()?;
        for failure in failed {
            let (what, why) = failure.split_once(' ').unwrap_or((&failure, ""));
            self.add(what, why);
        }
        Some(receivers)
    }

    /// What is advised is about the namespace of the key `name` alone: other services' keys are not for this user.
    fn findings(self, user: &str, name: &str) -> Vec<Finding> {
        let Self { guard, locks, publish, writes, unseen } = self;
        let advice = |what: &[String]| {
            let mut rules: Vec<String> = Vec::new();
            for rule in what.iter().flat_map(|what| match what.split_once(" on ") {
                Some((command, keys)) => {
                    [vec![format!("+{}", command.to_lowercase())], patterns(keys, name)].concat()
                }
                None => vec![format!("+{}", what.to_lowercase())],
            }) {
                if !rules.contains(&rule) {
                    rules.push(rule);
                }
            }
            let rules = rules.join(" ");
            format!("ACL SETUSER {user} {rules} (and no rename-command); the README has the whole list")
        };
        let mut findings = Vec::new();
        if !guard.is_empty() {
            let found = Finding::problem("rights", format!("`{user}` may not {}", guard.join(", ")));
            let again = if guard.iter().any(|what| what == "SET") {
                "; then look again: without SET not everything could be tried"
            } else {
                ""
            };
            findings.push(found.cost(ALONE).advice(advice(&guard) + again));
        }
        if unseen {
            let found = "neither EVAL nor ACL DRYRUN is permitted: what scripts call could not be tried";
            findings.push(Finding::note("rights", found).advice("+eval first, and look again"));
        }
        if !locks.is_empty() {
            let found = Finding::warning("rights", format!("`{user}` may not {}", locks.join(", ")));
            let cost = "loads are guarded; mutexes and semaphores fail, and max_concurrent_loads is not kept";
            findings.push(found.cost(cost).advice(advice(&locks)));
        }
        if publish {
            let found = Finding::warning("rights", format!("`{user}` may not PUBLISH from a script"));
            findings.push(found.cost(UNTOLD).advice(format!("ACL SETUSER {user} +publish &sg1:*")));
        }
        if let Some(writes) = writes {
            let found = Finding::problem("writes", format!("the server refuses writes: {writes}"));
            let cost = format!("nothing is stored; {ALONE}");
            findings.push(found.cost(cost).advice(
                "OOM: memory or another maxmemory-policy; READONLY: this is a replica; \
                 MISCONF: its disk; NOREPLICAS: its replicas; CLUSTERDOWN: the master that is missing, or slots that \
                 nobody serves (redis-cli --cluster check, and fix)",
            ));
        }
        if findings.is_empty() {
            findings
                .push(Finding::ok("rights", format!("`{user}` may do everything that loads and locks need")));
        }
        findings
    }
}

/// What lets a user at these keys of ours, `sg1:KIND:*` or all, in the namespace of the key `name` and in no other. One is
/// for all kinds of one letter, which the guard has, and one for those of two, which locks have.
fn patterns(keys: &str, name: &str) -> Vec<String> {
    let mut namespace = String::new();
    for letter in name.split(':').next().unwrap_or_default().chars() {
        if matches!(letter, '*' | '?' | '[' | ']' | '\\' | '^') {
            namespace.push('\\');
        }
        namespace.push(letter);
    }
    let kind = keys.split(':').nth(1).unwrap_or_default();
    let heads = match kind {
        "*" => vec!["?".to_owned(), "??".to_owned()],
        kind => vec!["?".repeat(kind.len())],
    };
    heads.iter().map(|head| format!("~sg1:{head}:{{{namespace}:*")).collect()
}

/// Tries everything on the key `name`; a script publishes to `channel`.
pub(super) async fn examine(
    commands: &mut MultiplexedConnection,
    name: &str,
    channel: &str,
    user: &str,
) -> RedisResult<Tried> {
    let mut refused = Refused::default();
    plain(commands, name, &mut refused).await?;
    let sent = Instant::now();
    let mut answer =
        one(commands, scripts::DOCTOR.call(By { sha1: true, spread: false }, name, 64).arg(channel)).await?;
    if matches!(&answer, Value::ServerError(error) if error.code() != "NOSCRIPT") {
        refused.add("EVALSHA", &said(&answer));
    }
    if matches!(&answer, Value::ServerError(_)) {
        answer =
            one(commands, scripts::DOCTOR.call(By { sha1: false, spread: false }, name, 64).arg(channel))
                .await?;
    }
    let (mut published_at, mut heard) = (None, 0);
    match refused.add_all(&answer) {
        Some(receivers) => {
            heard = receivers;
            published_at = (!refused.publish).then_some(sent);
        }
        None => {
            refused.add("EVAL", &said(&answer));
            dry_run(commands, name, user, &mut refused).await?;
        }
    }
    Ok(Tried { findings: refused.findings(user, name), published_at, heard })
}

/// What loads are made of and the script, of which this is the answer, could not call. What only locks need is not among
/// it, nor that somebody is told, nor that the server takes no writes at present.
pub(crate) fn lacked_by_loads(answer: &Value) -> Option<Vec<String>> {
    let mut refused = Refused::default();
    refused.add_all(answer)?;
    Some(refused.guard)
}

/// What is sent outside of scripts, and whether all kinds of keys may be read.
async fn plain(commands: &mut MultiplexedConnection, name: &str, refused: &mut Refused) -> RedisResult<()> {
    let key = |kind: &str| format!("sg1:{kind}:{{{name}}}");
    let (mut pipeline, mut kinds) = (redis::pipe(), Vec::new());
    for kind in GUARDS_KEYS.iter().chain(&LOCKS_KEYS) {
        pipeline.cmd("GET").arg(key(kind));
        kinds.push(*kind);
    }
    pipeline.cmd("MGET").arg(key("e")).arg(key("t")).cmd("DEL").arg(key("t"));
    // What EVALSHA falls back on; the server may know the script of the others.
    pipeline.cmd("EVAL").arg("return 1").arg(0);
    let mut answers = all(commands, &pipeline).await?.into_iter();
    let denied = |answer: &Value| matches!(answer, Value::ServerError(error) if error.code() == "NOPERM");
    let closed: Vec<_> = kinds.into_iter().zip(&mut answers).filter(|(_, answer)| denied(answer)).collect();
    if closed.len() == GUARDS_KEYS.len() + LOCKS_KEYS.len() {
        // Not this or that kind: the command, or all of our keys.
        refused.guard.push("GET on sg1:*".to_owned());
    } else {
        for (kind, _) in closed {
            let of = if LOCKS_KEYS.contains(&kind) { &mut refused.locks } else { &mut refused.guard };
            of.push(format!("GET on sg1:{kind}:*"));
        }
    }
    for (what, answer) in ["MGET", "DEL", "EVAL"].into_iter().zip(answers) {
        if let Value::ServerError(_) = &answer {
            refused.add(what, &said(&answer));
        }
    }
    Ok(())
}

/// Asks the server what scripts could call.
async fn dry_run(
    commands: &mut MultiplexedConnection,
    name: &str,
    user: &str,
    refused: &mut Refused,
) -> RedisResult<()> {
    let mut pipeline = redis::pipe();
    for (what, args) in DRY {
        pipeline.cmd("ACL").arg("DRYRUN").arg(user).arg(what).arg(format!("sg1:e:{{{name}}}")).arg(args);
    }
    for ((what, _), answer) in DRY.into_iter().zip(all(commands, &pipeline).await?) {
        match answer {
            Value::Okay => {}
            Value::BulkString(why) => refused.add(what, &String::from_utf8_lossy(&why)),
            _ => refused.unseen = true,
        }
    }
    Ok(())
}

fn said(answer: &Value) -> String {
    match answer {
        Value::ServerError(error) => format!("{} {}", error.code(), error.details().unwrap_or_default()),
        _ => "ERR unexpected answer".to_owned(),
    }
}
