//! Names in a store other than the keys of values: tokens of holders and waiters, and names of locks.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use uuid::Uuid;

use crate::observe::FlightId;

/// The holder of a lease, or a waiter for one: `<node>:<flight>`, both random.
#[derive(Clone, PartialEq, Eq, Hash)]
pub(crate) struct Token(Arc<str>);

impl Token {
    /// 32 hex digits, a colon, 32 hex digits.
    pub(crate) const LEN: usize = 65;

    /// A new token of this node.
    pub(crate) fn mint(node: Uuid) -> Self {
        Self(format!("{}:{}", node.simple(), Uuid::new_v4().simple()).into())
    }

    /// A new token that contains the longest duration of its lease or lock. So an ACQUIRE under another policy,
    /// or a TAKE, notices if the remaining time is longer than its holder has ever requested. 90 bits of the
    /// second half are random. A token for more than 49 days contains no duration.
    pub(crate) fn mint_for(node: Uuid, lease: Duration) -> Self {
        let Ok(longest) = u32::try_from(lease.as_millis()) else { return Self::mint(node) };
        let mut flight = *Uuid::new_v4().as_bytes();
        flight[..4].copy_from_slice(&longest.to_be_bytes());
        // A UUID of version 8, whose bits the application defines (RFC 9562, 5.8).
        flight[6] = flight[6] & 0x0f | 0x80;
        Self(format!("{}:{}", node.simple(), Uuid::from_bytes(flight).simple()).into())
    }

    /// Parses a value of the store; `None` for anything that is not a token.
    pub(crate) fn parse(text: &[u8]) -> Option<Self> {
        let text = std::str::from_utf8(text).ok()?;
        let shaped = text.len() == Self::LEN
            && text
                .bytes()
                .enumerate()
                .all(|(at, byte)| if at == 32 { byte == b':' } else { byte.is_ascii_hexdigit() });
        shaped.then(|| Self(text.into()))
    }

    pub(crate) fn as_str(&self) -> &str {
        &self.0
    }

    /// The id of the load under this token's lease in traces.
    pub(crate) fn flight(&self) -> FlightId {
        FlightId::of(&self.0)
    }

    /// The node's half.
    pub(crate) fn node(&self) -> &str {
        &self.0[..32]
    }
}

impl fmt::Debug for Token {
    /// Never the token itself: any process that knows it can end its lease.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(..)")
    }
}

/// The keys of a lock. The key alone identifies the lock.
#[derive(Clone, PartialEq, Eq, Hash)]
pub(crate) struct LockName {
    /// The mutex's own key, as foreign clients see it; for a semaphore, the key of its holders.
    pub(crate) key: Arc<str>,
    /// The text between the braces of all other keys of this lock, so that they share its slot.
    pub(crate) tag: Arc<str>,
}

impl LockName {
    /// A mutex with a key of this crate.
    pub(crate) fn mutex(tag: &str) -> Self {
        Self { key: format!("sg1:m:{{{tag}}}").into(), tag: tag.into() }
    }

    /// A mutex under a key that foreign clients know. A key without braces hashes whole, so the key is the tag.
    pub(crate) fn prefixed(key: &str) -> Self {
        Self { key: key.into(), tag: key.into() }
    }

    /// The mutex that has this key.
    pub(crate) fn of_mutex_key(key: &str) -> Self {
        match key.strip_prefix("sg1:m:{").and_then(|tag| tag.strip_suffix('}')) {
            Some(tag) => Self::mutex(tag),
            None => Self::prefixed(key),
        }
    }

    /// A semaphore. It may have a mutex's tag: all their keys differ.
    pub(crate) fn semaphore(tag: &str) -> Self {
        Self { key: format!("sg1:sh:{{{tag}}}").into(), tag: tag.into() }
    }

    /// The lock that has this key.
    pub(crate) fn of_key(key: &str) -> Self {
        match key.strip_prefix("sg1:sh:{").and_then(|tag| tag.strip_suffix('}')) {
            Some(tag) => Self::semaphore(tag),
            None => Self::of_mutex_key(key),
        }
    }

    pub(crate) fn is_semaphore(&self) -> bool {
        self.key.starts_with("sg1:sh:{")
    }
}

impl fmt::Debug for LockName {
    /// Never the name itself: it may contain data that must not appear in a log.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("LockName(..)")
    }
}
