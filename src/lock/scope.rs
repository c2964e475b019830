//! What a lock is called, and which keys that makes.

use std::fmt;

use super::LockError;
use crate::key::{CacheKey, Key};
use crate::store::names::LockName;

/// The name of a lock: a global scope and, inside it, a local one.
///
/// Parts are joined as those of a [`CacheKey`] are: unambiguously, any bytes, long names by their digest. What
/// makes a `CacheKey` makes a scope of exactly that name.
///
/// # Examples
///
/// ```
/// use stampede_guard::lock::Scope;
///
/// let one_server = Scope::new("server_access").local(7);
/// assert_eq!(one_server, Scope::from(("server_access", 7)));
/// assert_eq!(Scope::new("server_access"), Scope::from(("server_access", "global")));
/// assert_ne!(Scope::new("a.b").local("c"), Scope::new("a").local("b.c"));
/// assert_eq!(Scope::from("nightly").to_string(), "nightly");
/// ```
#[derive(Clone)]
pub struct Scope {
    named: CacheKey,
    /// Whether nothing local was named, so that it is about everything there.
    global: bool,
}

impl Scope {
    /// A global scope. Without a [`local`](Self::local) part, the local one is `global`.
    pub fn new(global: impl fmt::Display) -> Self {
        Self { named: CacheKey::from((global,)), global: true }
    }

    /// One thing inside this scope.
    #[must_use]
    pub fn local(&self, local: impl fmt::Display) -> Self {
        Self { named: join(&self.named, &local.to_string()), global: false }
    }

    /// The whole name.
    fn key(&self) -> CacheKey {
        if self.global { join(&self.named, "global") } else { self.named.clone() }
    }

    fn checked(&self) -> Result<CacheKey, LockError> {
        if self.named.is_empty() { Err(LockError::InvalidKey) } else { Ok(self.key()) }
    }

    /// Where a mutex of this name is: in `namespace`, or under a bare key that begins with `prefix`.
    pub(super) fn mutex(&self, namespace: &str, prefix: Option<&str>) -> Result<LockName, LockError> {
        let name = self.checked()?;
        let Some(prefix) = prefix else {
            return Ok(LockName::mutex(Key::new(namespace, &name).name()));
        };
        if prefix.is_empty() || prefix.len() > LONGEST_PREFIX || prefix.contains(['{', '}']) {
            return Err(LockError::InvalidKey);
        }
        // A name is bounded in length together with its namespace and the colon after it; here an empty one.
        let bounded = Key::new("", &name);
        let name = bounded.name().strip_prefix(':').unwrap_or_default();
        Ok(LockName::prefixed(&format!("{prefix}{name}")))
    }

    /// Where a semaphore of this name is.
    pub(super) fn semaphore(&self, namespace: &str) -> Result<LockName, LockError> {
        Ok(LockName::semaphore(Key::new(namespace, &self.checked()?).name()))
    }
}

const LONGEST_PREFIX: usize = 64;

/// The name of `part` inside what `head` names.
fn join(head: &CacheKey, part: &str) -> CacheKey {
    CacheKey::from_texts(&head.to_string(), &[part])
}

impl<K: Into<CacheKey>> From<K> for Scope {
    /// The scope of exactly this name.
    fn from(named: K) -> Self {
        Self { named: named.into(), global: false }
    }
}

impl PartialEq for Scope {
    fn eq(&self, other: &Self) -> bool {
        self.key() == other.key()
    }
}

impl Eq for Scope {}

impl fmt::Display for Scope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.key().fmt(f)
    }
}

impl fmt::Debug for Scope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Scope({})", self.key())
    }
}
