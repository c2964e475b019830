//! The Lua scripts of the steps that consist of several commands. Each takes one round trip and is atomic.
//!
//! A script is called by its SHA-1. A server that does not know it (restarted, flushed, another primary) gets the text
//! in a second attempt of the same call. Data travels in KEYS and ARGV only, never in the text.

use std::io::Write as _;
use std::sync::OnceLock;
use std::time::Duration;

use bytes::Bytes;
use redis::{Cmd, RedisWrite as _};
use sha1_smol::Sha1;
use uuid::Uuid;

use crate::store::protocol::ChangedName;
use crate::store::{AttemptNumber, LockName, VOIDED_FOR};

/// A script and the keys it is called with.
pub(super) struct Script {
    text: ScriptText,
    /// The text for clusters, if the script grants a lock or a lease to a waiter: there the reply to PUBLISH does not
    /// count all subscribers that have received the message.
    spread: Option<ScriptText>,
    /// The kinds of its keys, in the order of KEYS: `e`ntry, `l`ease, `q`ueue, `o`utcome, `t`ag, list of `v`ariants,
    /// registry of `n`odes, log of `a`nnouncements, `j`ournal of tags. A script that makes a change has one more key, of kind `c`, which
    /// [`Script::call_change`] adds. For a script about a lock, the keys after the lock's own key: `q`ueue, `f`ence, e`x`tended time,
    /// `m`eta data, state of the `l`oad limit.
    keys: &'static [u8],
    /// The kinds of the keys that a call in a cluster has in addition, at the end: the `r`oll of the waiters' nodes (`lock_roll.lua`).
    spread_keys: &'static [u8],
}

struct ScriptText {
    lua: &'static str,
    sha1: OnceLock<String>,
}

impl ScriptText {
    const fn new(lua: &'static str) -> Self {
        Self { lua, sha1: OnceLock::new() }
    }

    fn sha1(&self) -> &str {
        self.sha1.get_or_init(|| sha1_hex(self.lua.as_bytes()))
    }
}

/// The text of these files of `scripts/`, one after the other.
macro_rules! lua {
    ($($file:ident)+) => {
        ScriptText::new(concat!($(include_str!(concat!("scripts/", stringify!($file), ".lua"))),+))
    };
}

/// Scripts: the kinds of their keys, then their files.
macro_rules! scripts {
    ($($name:ident $keys:literal $($file:ident)+;)*) => {
        $(pub(super) static $name: Script = Script { text: lua!($($file)+), spread: None, keys: $keys, spread_keys: b"" };)*
    };
}

/// Scripts that give a lock or a lease to a waiter. Their first prelude, `here` or `spread`, says whether they run on one server or in a
/// cluster. A file in brackets, and the key beside it, are for clusters only; the last file of the text follows it.
macro_rules! giving {
    ($($name:ident $keys:literal $($file:ident)+ $([$spread:ident $key:literal] $last:ident)?;)*) => {
        $(pub(super) static $name: Script = Script {
            text: lua!(here $($file)+ $($last)?),
            spread: Some(lua!(spread $($file)+ $($spread $last)?)),
            keys: $keys,
            spread_keys: &[$($key)?],
        };)*
    };
}

scripts! {
    ACQUIRE b"elqo" acquire;
    COMMIT b"elqo" wake ours commit;
    FAIL b"elqo" wake ours fail;
    RENEW b"l" renew;
    RELEASE b"lq" wake release;
    WAKE_REST b"q" wake wake_rest;
    INVALIDATE b"elqo" attempt wake ours unannounced invalidate;
    INVALIDATE_AND_ANNOUNCE b"elqo" attempt wake ours volume announcing invalidate;
    TAG b"t" tag;
    FORGET_TAG b"t" attempt unannounced forget_tag;
    FORGET_TAG_AND_ANNOUNCE b"t" attempt journal volume announcing forget_tag;
    ENTER_LOAD b"j" journal enter_load;
    NOTE_TAG b"j" journal note_tag;
    ANNOUNCE b"na" volume announcing announce;
    RENEW_MEMBER b"na" volume renew_member;
    REMOVE_MEMBER b"n" remove_member;
    ENLIST b"v" enlist;
    DOCTOR b"e" doctor;
    // PROBE has the text of DOCTOR, and names the keys of a load: a call fails if the user has no right to one of its keys.
    PROBE b"elqo" doctor;
    MUTEX_LOOK b"" mutex_look;
    WAITING b"q" lock_waiting;
    LEAVE b"q" lock_leave;
    MUTEX_REPAIR b"x" lock_length mutex_repair;
    SEMAPHORE_LOOK b"qm" semaphore_look;
}

giving! {
    HAND_OVER b"lq" lease_hand_over;
    MUTEX_TAKE b"qf" mutex_fence mutex_take_first mutex_again lock_length lock_tell_sooner lock_passing mutex mutex_queue [lock_roll b'r'] mutex_take;
    MUTEX_FREE b"qf" mutex_free_first lock_tell_sooner lock_passing mutex_fence mutex mutex_free;
    MUTEX_BREAK b"qf" lock_tell_sooner lock_passing mutex_fence mutex mutex_break;
    MUTEX_EXTEND b"qx" lock_length lock_tell_sooner mutex_extend;
    SEMAPHORE_TAKE b"qm" lock_length lock_tell_sooner lock_passing semaphore [lock_roll b'r'] semaphore_take;
    SEMAPHORE_FREE b"qm" lock_length lock_tell_sooner lock_passing semaphore no_load_limit semaphore_free;
    LOAD_END b"qml" lock_length lock_tell_sooner lock_passing semaphore load_limit semaphore_free;
    SEMAPHORE_REFRESH b"qm" lock_length lock_tell_sooner lock_passing semaphore semaphore_refresh;
    SEMAPHORE_CHANGE b"qm" lock_length lock_tell_sooner lock_passing semaphore semaphore_change;
}

/// Whether a call names its script by SHA-1, and whether it uses the text for clusters.
#[derive(Clone, Copy)]
pub(super) struct CallForm {
    pub(super) sha1: bool,
    pub(super) spread: bool,
}

impl Script {
    /// The call for the resource `name`, without ARGV. `size` is the approximate size of the ARGV to come.
    pub(super) fn call(&self, by: CallForm, name: &str, size: usize) -> Cmd {
        let mut cmd = self.head(by, self.keys.len(), self.keys.len() * (name.len() + 8) + size);
        for &kind in self.keys {
            push_key(&mut cmd, kind, name);
        }
        cmd
    }

    /// The call for a change of `name` by this node. The key after those of the resource holds the number of the node's
    /// latest attempt that voids earlier ones. With the name of a `volume`, keys of these kinds of it are the last ones.
    pub(super) fn call_change(
        &self,
        by: CallForm,
        (name, node): (&str, Uuid),
        volume: Option<(&str, &[u8])>,
        size: usize,
    ) -> Cmd {
        let volume_keys = volume.map_or(0, |(volume, kinds)| kinds.len() * (volume.len() + 8));
        let keys = self.keys.len() + 1 + volume.map_or(0, |(_, kinds)| kinds.len());
        let length = (self.keys.len() + 1) * (name.len() + 8) + 33;
        let mut cmd = self.head(by, keys, length + volume_keys + size);
        for &kind in self.keys {
            push_key(&mut cmd, kind, name);
        }
        {
            let mut arg = cmd.writer_for_next_arg();
            // Writes into a Vec, which does not fail.
            let _ = write!(arg, "sg1:c:{{{name}}}:{}", node.simple());
        }
        if let Some((volume, kinds)) = volume {
            kinds.iter().for_each(|&kind| push_key(&mut cmd, kind, volume));
        }
        cmd
    }

    /// The call for the lock `name`, without ARGV. `size` is the approximate size of the ARGV to come.
    pub(super) fn call_on(&self, by: CallForm, name: &LockName, size: usize) -> Cmd {
        let lock = match () {
            () if name.is_semaphore() => 's',
            () if name.key == name.tag => 'p',
            () => 'm',
        };
        let spread_keys = if by.spread { self.spread_keys } else { b"" };
        let keys = self.keys.len() + 1 + spread_keys.len();
        let mut cmd = self.head(by, keys, keys * (name.key.len() + 9) + size);
        cmd.arg(&*name.key);
        for &kind in self.keys.iter().chain(spread_keys) {
            let mut arg = cmd.writer_for_next_arg();
            // Writes into a Vec, which does not fail.
            let _ = write!(arg, "sg1:{lock}{}:{{{}}}", char::from(kind), name.tag);
        }
        cmd
    }

    fn head(&self, by: CallForm, keys: usize, size: usize) -> Cmd {
        let text = self.spread.as_ref().filter(|_| by.spread).unwrap_or(&self.text);
        let (call, script) = if by.sha1 { ("EVALSHA", text.sha1()) } else { ("EVAL", text.lua) };
        let mut cmd = Cmd::with_capacity(keys + 15, script.len() + size + 32);
        cmd.arg(call).arg(script).arg(keys);
        cmd
    }
}

/// `GET` of the entry. Every hit pays for this, so it builds only the command.
pub(super) fn get_entry(name: &str) -> Cmd {
    get(b'e', name)
}

/// `GET` of a key of this kind.
pub(super) fn get(kind: u8, name: &str) -> Cmd {
    let mut cmd = Cmd::with_capacity(2, name.len() + 11);
    cmd.arg("GET");
    push_key(&mut cmd, kind, name);
    cmd
}

/// Adds `sg1:<kind>:{<name>}`; the braces put all keys of one resource into one slot.
pub(super) fn push_key(cmd: &mut Cmd, kind: u8, name: &str) {
    let mut arg = cmd.writer_for_next_arg();
    // Writes into a Vec, which does not fail.
    let _ = arg.write_all(&[b's', b'g', b'1', b':', kind, b':', b'{']);
    let _ = arg.write_all(name.as_bytes());
    let _ = arg.write_all(b"}");
}

/// Adds the head of the entry that the caller has seen. The head identifies the entry, because it contains the checksum
/// and the time of storing. (To compute a digest of the whole entry blocked the server for longer than to copy the entry.)
pub(super) fn push_seen(cmd: &mut Cmd, seen: Option<&Bytes>) {
    const HEAD: usize = 68;
    let mut arg = cmd.writer_for_next_arg();
    if let Some(entry) = seen {
        // Writes into a Vec, which does not fail.
        let _ = arg.write_all(b"=");
        let _ = arg.write_all(&entry[..entry.len().min(HEAD)]);
    }
}

/// Adds a number, such as the latest moment at which a command may run, in milliseconds of the server's clock; `""` for none.
pub(super) fn push_number(cmd: &mut Cmd, number: Option<u64>) {
    match number {
        Some(number) => cmd.arg(number),
        None => cmd.arg(""),
    };
}

/// Adds the arguments that `attempt.lua` reads, the first three of each script for a change. `last` is the latest moment at which it
/// may run.
pub(super) fn push_attempt(cmd: &mut Cmd, attempt: AttemptNumber, last: Option<u64>) {
    cmd.arg(attempt.number);
    push_number(cmd, attempt.voids_earlier.then(|| millis(VOIDED_FOR)));
    push_number(cmd, last);
}

/// Adds an id, as 32 digits.
pub(super) fn push_id(cmd: &mut Cmd, id: Uuid) {
    cmd.arg(&*id.simple().encode_lower(&mut Uuid::encode_buffer()));
}

/// Parses the last part of an entry of the log, and of a message about a change: the kind and the name.
pub(super) fn changed_name(text: &[u8]) -> Option<ChangedName> {
    let (kind, name) = text.split_first()?;
    let name = std::str::from_utf8(name).ok().filter(|name| !name.is_empty())?;
    match kind {
        b'e' => Some(ChangedName::Value(name.into())),
        b't' => Some(ChangedName::Tag(name.into())),
        _ => None,
    }
}

/// The SHA-1 digest in hexadecimal, by which Redis identifies a script.
pub(super) fn sha1_hex(bytes: &[u8]) -> String {
    Sha1::from(bytes).digest().to_string()
}

/// The duration in milliseconds, within the range that the server accepts: at least 1 ms (it refuses 0), at most some
/// 35 000 years (it refuses an expiry time that overflows).
pub(super) fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX).clamp(1, 1 << 50)
}

/// Adds an outcome as `acquire.lua` reads it, and its lifetime. Later callers may read it only during the first `replay` of
/// that lifetime; the script also compares the key's remaining time with the whole lifetime, which the outcome contains.
pub(super) fn push_outcome(cmd: &mut Cmd, token: &str, payload: &[u8], keep: Duration, replay: Duration) {
    const NEVER: u64 = 9_999_999_999;
    let keep = keep.max(replay);
    let replayed_until = if replay.is_zero() { NEVER } else { millis(keep - replay).min(NEVER) };
    {
        let mut arg = cmd.writer_for_next_arg();
        // Writes into a Vec, which does not fail.
        let _ = write!(arg, "{token}{replayed_until:010}{:010}", millis(keep).min(NEVER));
        let _ = arg.write_all(payload);
    }
    cmd.arg(millis(keep));
}

#[cfg(test)]
mod tests {
    use super::*;

    const BY_SHA1: CallForm = CallForm { sha1: true, spread: false };

    fn words(cmd: &Cmd) -> Vec<String> {
        cmd.args_iter()
            .map(|arg| match arg {
                redis::Arg::Simple(bytes) => String::from_utf8_lossy(bytes).into_owned(),
                _ => panic!("no cursors here"),
            })
            .collect()
    }

    #[test]
    fn keys_of_one_resource_share_a_slot() {
        assert_eq!(words(&get_entry("ns:user:42")), ["GET", "sg1:e:{ns:user:42}"]);
        let call = words(&RELEASE.call(BY_SHA1, "ns:k", 0));
        assert_eq!(call[0], "EVALSHA");
        assert_eq!(call[2..], ["2", "sg1:l:{ns:k}", "sg1:q:{ns:k}"]);
        let call = words(&LEAVE.call_on(BY_SHA1, &LockName::prefixed("lock:k"), 0));
        assert_eq!(call[2..], ["2", "lock:k", "sg1:pq:{lock:k}"]);
    }

    #[test]
    fn a_script_is_named_by_the_digest_of_its_whole_text() {
        assert_eq!(sha1_hex(b"return 1"), "e0e1f9fabfc9d4800c877a703b823ac0578ff8db");
        assert_eq!(words(&COMMIT.call(BY_SHA1, "k", 0))[1], sha1_hex(COMMIT.text.lua.as_bytes()));
        assert!(COMMIT.text.lua.starts_with("-- Prelude"));
    }

    #[test]
    fn an_outcome_that_is_never_replayed_requires_more_time_than_it_has() {
        let secs = Duration::from_secs;
        let value = |keep, replay| {
            let mut cmd = Cmd::new();
            push_outcome(&mut cmd, "t", b"p", keep, replay);
            words(&cmd)
        };
        assert_eq!(value(secs(4), secs(0)), ["t99999999990000004000p", "4000"]);
        assert_eq!(value(secs(4), secs(1)), ["t00000030000000004000p", "4000"]);
        assert_eq!(value(secs(4), secs(9)), ["t00000000010000009000p", "9000"]);
    }

    #[test]
    fn durations_stay_within_the_range_that_the_server_accepts() {
        assert_eq!(millis(Duration::ZERO), 1);
        assert_eq!(millis(Duration::from_secs(2)), 2000);
        assert_eq!(millis(Duration::MAX), 1 << 50);
    }
}
