//! The messages on a node's channel.
//!
//! | message | meaning |
//! |---|---|
//! | `w` token name | the lease of this holder has ended |
//! | `g` token hops name | this waiter holds the lease now |
//! | `x` name | the key was invalidated |
//! | `m` token fence key | this waiter holds the mutex with this key now |
//! | `p` token tag | this waiter holds a permit of the semaphore with this tag now |
//! | `b` token | this holder's mutex was taken away |
//! | `c` token | the semaphore that this waiter waits for was deleted |
//! | `r` key | the time to wait for the lock with this key has become shorter |
//! | `a` number id before announcer kind name | this change of the volume was announced |
//! | `k` id node | this node has acknowledged this announcement |
//!
//! Tokens, hops (2 digits), fences, numbers (16 digits), ids and nodes (32 digits) have fixed lengths; the last part takes the
//! rest.

use uuid::Uuid;

use crate::store::redis::commands::entry_steps::{changed_name, read_id};
use crate::store::volume::{LogRecord, ReceivedAnnouncement};
use crate::store::wake_leases::Hint;
use crate::store::wake_locks::LockHint;
use crate::store::{LockName, Token};

/// No message of ours is longer. The longest names a lock, whose key has at most 264 bytes: a prefix of 64, and a
/// name that is cut to 200, with its digest at the end.
const LONGEST: usize = 1024;

/// The channel of a node. Checks of the server use a new UUID, whose channel no node has.
pub(crate) fn channel(node: Uuid) -> String {
    format!("sg1:i:{}", node.simple())
}

/// The node that this channel belongs to.
pub(crate) fn node_of(channel: &str) -> Option<Uuid> {
    read_id(channel.strip_prefix("sg1:i:")?.as_bytes())
}

#[derive(Debug)]
pub(crate) enum Message<'a> {
    /// For the waiters of the key with this name: `Granted` reaches only the waiter with its token, other hints reach all.
    Hint(&'a str, Hint),
    /// For the waiter with this token: it holds the lock now.
    Granted { token: Token, fence: u64, lock: LockName },
    /// For the waiter or holder with this token.
    LockNotified(Token, LockHint),
    /// For the waiters of the lock with this key.
    Sooner(&'a str),
    /// For a member of the volume.
    Announced(ReceivedAnnouncement),
    /// For the announcer.
    Acknowledged { id: Uuid, by: Uuid },
}

/// Parses a message; `None` for anything else.
pub(crate) fn parse(payload: &[u8]) -> Option<Message<'_>> {
    if payload.len() > LONGEST {
        return None;
    }
    let (kind, rest) = payload.split_first()?;
    if *kind == b'x' {
        return Some(Message::Hint(name(rest)?, Hint::Invalidated));
    }
    match kind {
        b'r' => return Some(Message::Sooner(name(rest)?)),
        b'a' => return announced(rest).map(Message::Announced),
        b'k' => {
            let (id, by) = rest.split_at_checked(32)?;
            return Some(Message::Acknowledged { id: read_id(id)?, by: read_id(by)? });
        }
        _ => {}
    }
    let (token, rest) = rest.split_at_checked(Token::LEN)?;
    let token = Token::parse(token)?;
    Some(match kind {
        b'w' => Message::Hint(name(rest)?, Hint::Finished(Some(token))),
        b'g' => {
            let (hops, rest) = number(rest, 2)?;
            Message::Hint(name(rest)?, Hint::Granted { token, hops: u8::try_from(hops).ok()? })
        }
        b'm' => {
            let (fence, rest) = number(rest, 16)?;
            Message::Granted { token, fence, lock: LockName::of_mutex_key(name(rest)?) }
        }
        b'p' => Message::Granted { token, fence: 0, lock: LockName::semaphore(name(rest)?) },
        b'b' if rest.is_empty() => Message::LockNotified(token, LockHint::Broken),
        b'c' if rest.is_empty() => Message::LockNotified(token, LockHint::Closed),
        _ => return None,
    })
}

/// The message by which node `by` acknowledges an announcement.
pub(crate) fn acknowledgement(id: Uuid, by: Uuid) -> String {
    format!("k{}{}", id.simple(), by.simple())
}

fn announced(text: &[u8]) -> Option<ReceivedAnnouncement> {
    let (number, rest) = number(text, 16)?;
    let (id, rest) = rest.split_at_checked(32)?;
    let (before, rest) = rest.split_at_checked(32)?;
    let (announcer, name) = rest.split_at_checked(32)?;
    let (id, announcer) = (read_id(id)?, read_id(announcer)?);
    let record = LogRecord { id, announcer, name: changed_name(name)? };
    Some(ReceivedAnnouncement { number, before: read_id(before)?, record })
}

fn name(text: &[u8]) -> Option<&str> {
    std::str::from_utf8(text).ok().filter(|name| !name.is_empty())
}

/// A number of that many digits, and the rest of the text.
fn number(text: &[u8], digits: usize) -> Option<(u64, &[u8])> {
    let (number, rest) = text.split_at_checked(digits)?;
    Some((std::str::from_utf8(number).ok()?.parse().ok()?, rest))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::volume::ChangedName;

    const ID: &str = "0123456789abcdef0123456789abcdef";

    #[test]
    fn an_invalid_message_is_ignored() {
        let token = Token::mint(Uuid::new_v4());
        let token = token.as_str();
        for payload in [
            "",
            "w",
            "wns:k",
            "q",
            "x",
            "m",
            "r",
            &format!("w{token}"),
            &format!("g{token}ns:k"),
            &format!("m{token}sg1:m:{{ns:k}}"),
            &format!("m{token}0000000000000042"),
            &format!("p{token}"),
            &format!("b{token}k"),
            &format!("c{token}k"),
            &format!("q{token}k"),
            "a",
            "k",
            &format!("a0000000000000001{ID}{ID}{ID}"),
            &format!("a0000000000000001{ID}{ID}{ID}e"),
            &format!("a0000000000000001{ID}{ID}{ID}xns:k"),
            &format!("a000000000000000x{ID}{ID}{ID}ens:k"),
            &format!("k{ID}"),
            &format!("k{ID}{ID}0"),
            &"x".repeat(1_025),
        ] {
            assert!(parse(payload.as_bytes()).is_none(), "{payload}");
        }
        assert!(parse(b"x\xff").is_none());
        assert!(parse("x".repeat(1_024).as_bytes()).is_some(), "one as long as they get");
    }

    #[test]
    fn messages_name_the_key_and_the_event() {
        let token = Token::mint(Uuid::new_v4());
        let finished = format!("w{}ns:k", token.as_str());
        assert!(
            matches!(parse(finished.as_bytes()), Some(Message::Hint("ns:k", Hint::Finished(Some(t)))) if t == token)
        );
        let granted = format!("g{}02ns:k", token.as_str());
        assert!(
            matches!(parse(granted.as_bytes()), Some(Message::Hint("ns:k", Hint::Granted { token: t, hops: 2 })) if t == token)
        );
        assert!(matches!(parse(b"xns:k"), Some(Message::Hint("ns:k", Hint::Invalidated))));
    }

    /// The longest name of a key has 200 bytes.
    #[test]
    fn messages_about_volumes_name_the_announcement() {
        let (id, before, announcer) = (Uuid::new_v4(), Uuid::new_v4(), Uuid::new_v4());
        for (kind, name) in [("e", "n".repeat(200)), ("t", "ns:tag".to_owned())] {
            let [id_text, before_text, announcer_text] =
                [id, before, announcer].map(|id| id.simple().to_string());
            let text = format!("a0000000000000042{id_text}{before_text}{announcer_text}{kind}{name}");
            let name = match kind {
                "e" => ChangedName::Value(name.into()),
                _ => ChangedName::Tag(name.into()),
            };
            let record = LogRecord { id, announcer, name };
            let expected = ReceivedAnnouncement { number: 42, before, record };
            let parsed = parse(text.as_bytes());
            assert!(
                matches!(&parsed, Some(Message::Announced(announcement)) if *announcement == expected),
                "{parsed:?}"
            );
        }
        let text = acknowledgement(id, announcer);
        let parsed = parse(text.as_bytes());
        assert!(matches!(parsed, Some(Message::Acknowledged { id: of, by }) if (of, by) == (id, announcer)));
    }

    #[test]
    fn messages_about_locks_name_the_token_and_the_lock() {
        let token = Token::mint(Uuid::new_v4());
        let text = token.as_str();
        for lock in [LockName::mutex("ns:k"), LockName::prefixed("lock:k")] {
            let granted = format!("m{text}0001763000000042{}", lock.key);
            let Some(Message::Granted { token: holder, fence, lock: named }) = parse(granted.as_bytes())
            else {
                panic!("a grant");
            };
            assert_eq!((holder, fence), (token.clone(), 1_763_000_000_042));
            assert!(named == lock, "{}", named.key);
        }
        let permit = format!("p{text}ns:k");
        let parsed = parse(permit.as_bytes());
        assert!(
            matches!(&parsed, Some(Message::Granted { fence: 0, lock, .. }) if *lock == LockName::semaphore("ns:k"))
        );
        for (kind, expected) in [("b", LockHint::Broken), ("c", LockHint::Closed)] {
            let message = format!("{kind}{text}");
            assert!(
                matches!(parse(message.as_bytes()), Some(Message::LockNotified(t, notify)) if t == token && notify == expected)
            );
        }
    }
}
