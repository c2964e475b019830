//! [`Scope`], the name of a lock, and the store keys made from it.

use std::fmt;

use super::LockError;
use crate::key::{CacheKey, Key};
use crate::store::names::LockName;

/// The name of a lock: a global scope and, inside it, a local one.
///
/// Parts are joined as those of a [`CacheKey`] are: unambiguously, any bytes, long names by their digest. Any value
/// that converts into a `CacheKey` converts into the scope of exactly that name.
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
    /// Whether there is no local part, so that the scope stands for everything in it.
    global: bool,
}

impl Scope {
    /// A global scope. Without a [`local`](Self::local) part, the local one is `global`.
    pub fn new(global: impl fmt::Display) -> Self {
        Self { named: CacheKey::from((global,)), global: true }
    }

    /// A local scope inside this one.
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

    /// The key of a mutex of this name: in `namespace`, or a bare key that begins with `prefix`.
    pub(super) fn mutex(&self, namespace: &str, prefix: Option<&str>) -> Result<LockName, LockError> {
        let name = self.checked()?;
        let Some(prefix) = prefix else {
            return Ok(LockName::mutex(Key::new(namespace, &name).name()));
        };
        if prefix.is_empty() || prefix.len() > LONGEST_PREFIX || prefix.contains(['{', '}']) {
            return Err(LockError::InvalidKey);
        }
        // The bound on a name's length includes its namespace and the colon after it; here the namespace is empty.
        let bounded = Key::new("", &name);
        let name = bounded.name().strip_prefix(':').unwrap_or_default();
        Ok(LockName::prefixed(&format!("{prefix}{name}")))
    }

    /// The key of a semaphore of this name.
    pub(super) fn semaphore(&self, namespace: &str) -> Result<LockName, LockError> {
        Ok(LockName::semaphore(Key::new(namespace, &self.checked()?).name()))
    }
}

const LONGEST_PREFIX: usize = 64;

/// The name of `part` inside the scope `head`.
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
