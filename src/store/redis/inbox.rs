//! Receives the messages that the scripts of other nodes publish on one node's own channel.
//!
//! The subscription lasts as long as the node. Every message is only a hint: without the subscription (the server refuses
//! SUBSCRIBE, or is down), all waits end by their timers.
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
//! Tokens, hops (2 digits: how many loads have vanished one after another), fences and numbers (16 digits), ids and nodes (32
//! digits) have fixed lengths; the last part takes the rest.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use tokio::sync::watch;
use uuid::Uuid;

use super::subscriber::{InboxStatus, Recipient, Subscriber};
use crate::health::LinkState;
use crate::store::LockName;
use crate::store::Token;
use crate::store::protocol::VolumeListener;
use crate::store::protocol::{LogRecord, ReceivedAnnouncement, read_id};
use crate::store::redis::commands::Commands;
use crate::store::redis::commands::lock_queue::find_lost_messages;
use crate::store::redis::commands::lock_steps::give_back;
use crate::store::redis::scripts::changed_name;
use crate::store::wake_leases::{Hint, LeaseWaiters};
use crate::store::wake_locks::{LockHint, LockWaiters};

pub(crate) struct Inbox {
    /// The connection.
    subscriber: Arc<Subscriber>,
    commands: Commands,
    /// Minted at the first use: a process that was forked before that becomes a separate node.
    node: OnceLock<Uuid>,
    watches: Arc<LeaseWaiters>,
    grants: Arc<LockWaiters>,
    /// The receiver of messages about this node's volume; empty for a node without one.
    volume: OnceLock<Weak<dyn VolumeListener>>,
    /// Whether this node was added to the subscriber; every ACQUIRE checks this.
    has_joined: AtomicBool,
    status: watch::Sender<InboxStatus>,
}

impl Inbox {
    pub(crate) fn new(
        subscriber: &Arc<Subscriber>,
        commands: Commands,
        watches: Arc<LeaseWaiters>,
        grants: Arc<LockWaiters>,
    ) -> Arc<Self> {
        Arc::new(Self {
            subscriber: Arc::clone(subscriber),
            commands,
            node: OnceLock::new(),
            watches,
            grants,
            volume: OnceLock::new(),
            has_joined: AtomicBool::new(false),
            status: watch::Sender::new(InboxStatus::Shut),
        })
    }

    /// The id of the node that this inbox belongs to.
    pub(crate) fn node(&self) -> Uuid {
        *self.node.get_or_init(Uuid::new_v4)
    }

    /// Opens the connection in the background, if it is not open, and subscribes to this node's channel.
    pub(crate) fn open(self: &Arc<Self>) {
        if !self.has_joined.load(Ordering::Acquire) && self.subscriber.take(self.node(), self) {
            self.has_joined.store(true, Ordering::Release);
        }
        self.subscriber.open();
    }

    /// Whether messages of other nodes arrive at present.
    pub(crate) fn hears(&self) -> bool {
        self.status() == InboxStatus::Confirmed
    }

    fn status(&self) -> InboxStatus {
        *self.status.borrow()
    }

    /// Waits until the subscription is confirmed or refused. For ever once the inbox is closed.
    pub(crate) async fn settled(&self) {
        let mut status = self.status.subscribe();
        let _ = status.wait_for(|status| !matches!(status, InboxStatus::Shut | InboxStatus::Closed)).await;
    }

    pub(crate) fn close(&self) {
        self.subscriber.release(self.node(), self);
        self.notify_missed();
    }

    /// Sends messages about this node's volume to `listener`. A later listener is ignored.
    pub(crate) fn listen(&self, listener: Weak<dyn VolumeListener>) {
        let _ = self.volume.set(listener);
    }

    fn listener(&self) -> Option<Arc<dyn VolumeListener>> {
        self.volume.get()?.upgrade()
    }

    /// The state of the subscription.
    pub(crate) fn link(&self) -> LinkState {
        match self.status() {
            InboxStatus::Closed => LinkState::Closed,
            InboxStatus::Confirmed => LinkState::Up,
            InboxStatus::Refused => LinkState::Refused,
            InboxStatus::Shut => self.subscriber.opening(),
        }
    }

    /// Whether this node minted the token. Other clients may publish to this channel, too.
    fn is_own(&self, token: &Token) -> bool {
        token.node() == self.node().simple().to_string()
    }
}

impl Recipient for Inbox {
    fn set(&self, status: InboxStatus) -> bool {
        let set = |before: &mut InboxStatus| {
            *before != InboxStatus::Closed && std::mem::replace(before, status) != status
        };
        self.status.send_if_modified(set)
    }

    fn has_ended(&self) -> bool {
        self.status() == InboxStatus::Closed
    }

    /// Passes a message on to its receiver. A payload that is not a valid message is ignored.
    fn deliver(&self, payload: &[u8]) {
        match parse(payload) {
            Some(Message::Hint(name, hint)) => {
                let has_waiter = self.watches.notify(name, &hint);
                match hint {
                    // The waiter has left: pass on the lease that it was granted, or the lease stays unused until it expires.
                    Hint::Granted { token, hops } if !has_waiter && self.is_own(&token) => {
                        let (commands, name) = (self.commands.clone(), name.to_owned());
                        let within = self.subscriber.connector.answer;
                        tokio::spawn(async move {
                            let _ = commands.hand_over(&name, &token, None, (hops, false), within).await;
                        });
                    }
                    _ => {}
                }
            }
            Some(Message::Granted { token, fence, lock }) => {
                let has_waiter = self.grants.notify(&token, LockHint::Granted { fence }).is_some();
                // Invariant 5 of locks: no waiter received this grant, so this node gives it back.
                if !has_waiter && self.is_own(&token) {
                    tokio::spawn(give_back(
                        self.commands.clone(),
                        lock,
                        token,
                        self.subscriber.connector.answer,
                    ));
                }
            }
            Some(Message::LockNotified(token, notify)) => drop(self.grants.notify(&token, notify)),
            Some(Message::Sooner(key)) => drop(self.grants.notify_missed(key, None)),
            Some(Message::Announced(announcement)) => {
                if let Some(listener) = self.listener() {
                    listener.announced(&announcement);
                }
            }
            Some(Message::Acknowledged { id, by }) => {
                if let Some(listener) = self.listener() {
                    listener.acknowledged(id, by);
                }
            }
            None => {}
        }
    }

    fn notify_missed(&self) {
        self.watches.notify_all_missed();
        self.grants.notify_firsts_missed();
        if let Some(listener) = self.listener() {
            listener.missed();
        }
    }

    fn find_lost_messages(&self, status: InboxStatus) {
        let request = (self.commands.clone(), self.node(), self.subscriber.connector.answer);
        tokio::spawn(find_lost_messages(request, Arc::clone(&self.grants), status != InboxStatus::Shut));
    }
}

/// A longer message is ignored: this crate sends none. Its longest messages name a lock, whose key has at most 264 bytes: a prefix
/// of 64, and a name that is cut to 200, with its digest at the end.
const LONGEST: usize = 1024;

#[derive(Debug)]
pub(crate) enum Message<'a> {
    /// A hint to the waiters of the key with this name: `Granted` reaches only the waiter with its token, other hints reach all.
    Hint(&'a str, Hint),
    /// The waiter with this token holds the lock now.
    Granted { token: Token, fence: u64, lock: LockName },
    /// A message to the waiter or the holder with this token.
    LockNotified(Token, LockHint),
    /// The waiters for the lock with this key must wait for less time than they know.
    Sooner(&'a str),
    /// An announcement, to a member of the volume.
    Announced(ReceivedAnnouncement),
    /// An acknowledgement, to the announcer.
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

/// The number in the first `digits` bytes, and the rest of the text.
fn number(text: &[u8], digits: usize) -> Option<(u64, &[u8])> {
    let (number, rest) = text.split_at_checked(digits)?;
    Some((std::str::from_utf8(number).ok()?.parse().ok()?, rest))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::protocol::ChangedName;

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

    /// A name of 200 bytes, the longest of a key, is not cut off.
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
