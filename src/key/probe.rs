//! A key that is only looked for: compared with the keys of a map, without being made.

use std::hash::{BuildHasher as _, DefaultHasher, Hash, Hasher};

use super::{CacheKey, HASH_STATE, Key};

/// Makes the probes of one namespace.
#[derive(Clone, Debug)]
pub(crate) struct Prober {
    namespace: Box<str>,
    /// Has hashed the namespace and the separator.
    hasher: DefaultHasher,
}

impl Prober {
    pub(crate) fn new(namespace: &str) -> Self {
        let mut hasher = HASH_STATE.build_hasher();
        hasher.write(namespace.as_bytes());
        hasher.write(b":");
        Self { namespace: namespace.into(), hasher }
    }

    #[inline]
    pub(crate) fn probe<'a>(&'a self, key: &'a CacheKey) -> KeyProbe<'a> {
        // The hash of the joined text, as of a `str`. If the standard library ever hashes parts in another way than the whole, the
        // probe finds nothing and the call goes on with a key.
        let mut hasher = self.hasher.clone();
        hasher.write(key.text.as_bytes());
        hasher.write_u8(0xff);
        KeyProbe { namespace: &self.namespace, key, hash: hasher.finish() }
    }
}

/// A caller's key in its namespace.
#[derive(Clone, Copy, Debug)]
pub(crate) struct KeyProbe<'a> {
    namespace: &'a str,
    key: &'a CacheKey,
    hash: u64,
}

impl KeyProbe<'_> {
    /// Whether it is the probe of this key.
    #[cfg(any(test, feature = "local"))]
    pub(crate) fn is_of(&self, key: &Key) -> bool {
        let full = key.full().as_bytes();
        self.hash == key.hash
            && full.strip_prefix(self.namespace.as_bytes()).and_then(|rest| rest.strip_prefix(b":"))
                == Some(self.key.text.as_bytes())
    }

    /// The key itself.
    pub(crate) fn key(&self) -> Key {
        Key::new(self.namespace, self.key)
    }
}

impl Hash for KeyProbe<'_> {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u64(self.hash);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_probe_finds_the_key_that_it_would_make() {
        for text in ["k", "user:7", "with spaces and {braces}", &"long ".repeat(100)] {
            let cache_key = CacheKey::from(text);
            let (ours, other) = (Prober::new("ns"), Prober::new("n"));
            let (probe, key) = (ours.probe(&cache_key), Key::new("ns", &cache_key));
            assert!(probe.is_of(&key), "{text}");
            assert!(!other.probe(&cache_key).is_of(&key));
            assert!(probe.key() == key);
        }
    }
}
