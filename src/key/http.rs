//! Keys of HTTP resources, and of what belongs to one.

use super::{CacheKey, Key, LONGEST_NAME, stands_for_itself};

impl Key {
    /// As [`new`](Self::new), of a key that is made [of texts](CacheKey::from_texts), most often without making that.
    pub(crate) fn from_texts(namespace: &str, head: &str, parts: &[&str]) -> Self {
        let joined = || Self::joined([namespace, head].into_iter().chain(parts.iter().copied()));
        let plain = parts.iter().all(|part| stands_for_itself(part));
        let joined = plain.then(joined).flatten();
        joined.unwrap_or_else(|| Self::new(namespace, &CacheKey::from_texts(head, parts)))
    }

    /// The key of something that belongs to this one's resource; `suffix` begins with `~` and is ASCII.
    pub(crate) fn derived(&self, suffix: &str) -> Self {
        let full = format!("{}{suffix}", self.full());
        if full.len() > LONGEST_NAME { Self::digested(&full) } else { Self::of_name(&full) }
    }

    /// The tag of what proxies' reports have of an HTTP resource; `None` if this is the key of no such resource.
    pub(crate) fn of_reports(&self, namespace: &str) -> Option<Self> {
        self.within(namespace).starts_with("http:").then(|| self.of_report(""))
    }

    /// The key of what this report has of a resource.
    pub(crate) fn of_report(&self, digest: &str) -> Self {
        self.derived(&format!("~f{digest}"))
    }

    /// Whether this was derived from that key, or is it.
    pub(crate) fn is_below(&self, above: &Self) -> bool {
        self.full().starts_with(above.full())
    }

    /// What its [`CacheKey`] displays as.
    pub(crate) fn within(&self, namespace: &str) -> &str {
        self.full().get(namespace.len() + 1..).unwrap_or_default()
    }
}
