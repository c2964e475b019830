//! Keys of HTTP resources, and keys derived from them.

use super::{CacheKey, Key, LONGEST_NAME, stands_for_itself};

/// The end of the tag of a path.
const PATH: &str = "~p";
/// Begins the suffix of a key under a report of proxies; the end of the tag that all reports of a resource have.
const REPORT: &str = "~f";

impl Key {
    /// As [`new`](Self::new) of [`CacheKey::from_texts`], mostly without building that intermediate key.
    pub(crate) fn from_texts(namespace: &str, head: &str, parts: &[&str]) -> Self {
        let joined = || Self::joined([namespace, head].into_iter().chain(parts.iter().copied()));
        let plain = parts.iter().all(|part| stands_for_itself(part));
        let joined = plain.then(joined).flatten();
        joined.unwrap_or_else(|| Self::new(namespace, &CacheKey::from_texts(head, parts)))
    }

    /// A key that belongs to this key's resource; `suffix` begins with `~` and is ASCII.
    pub(crate) fn derived(&self, suffix: &str) -> Self {
        Self::of_full(&format!("{}{suffix}", self.full()))
    }

    fn of_full(full: &str) -> Self {
        if full.len() > LONGEST_NAME { Self::digested(full) } else { Self::of_name(full) }
    }

    /// The tag of the entries of an HTTP resource under reports of proxies; `None` if this is not the key of an HTTP resource.
    pub(crate) fn of_reports(&self, namespace: &str) -> Option<Self> {
        self.within(namespace).starts_with("http:").then(|| self.of_report(""))
    }

    /// The tag of all responses of a path: of each query, each variant, each report and each addition to the key. `None` if this
    /// is not the key of an HTTP resource. No tag of a user contains a `~`.
    pub(crate) fn of_path(&self, namespace: &str) -> Option<Self> {
        let mut parts = self.within(namespace).split(':');
        if parts.next() != Some("http") {
            return None;
        }
        // Between the kind of entry and the authority: the kind of policy, if it is not the default one, and the scheme.
        let _scheme = parts.find(|part| matches!(*part, "http" | "https"))?;
        let (_authority, path) = (parts.next()?, parts.next()?);
        let end = path.find(['?', '~']).unwrap_or(path.len());
        let begin = self.full().len() - parts.fold(path.len(), |length, part| length + 1 + part.len());
        self.full().get(..begin + end).map(|path| Self::of_full(&format!("{path}{PATH}")))
    }

    /// Whether this is the [tag of a path](Self::of_path).
    pub(crate) fn is_path(&self) -> bool {
        self.full().ends_with(PATH)
    }

    /// Whether the response with this key has this [tag of a path](Self::of_path).
    pub(crate) fn has_path(&self, path: &Self) -> bool {
        let after = path.full().strip_suffix(PATH).and_then(|path| self.full().strip_prefix(path));
        after.is_some_and(|after| after.is_empty() || after.starts_with(['?', '~', ':']))
    }

    /// The key of a resource under one report of proxies.
    pub(crate) fn of_report(&self, digest: &str) -> Self {
        self.derived(&format!("{REPORT}{digest}"))
    }

    /// If this key was made by [`of_report`](Self::of_report), or was derived from such a key, the tag of the reports of its resource.
    pub(crate) fn report_tag(&self) -> Option<Self> {
        // No part of a key contains a `~`, and the report's suffix is the first.
        let (resource, suffix) = self.full().split_at(self.full().find('~')?);
        suffix.starts_with(REPORT).then(|| Self::of_full(&format!("{resource}{REPORT}")))
    }

    /// Whether this key was derived from `above`, or equals it.
    pub(crate) fn is_below(&self, above: &Self) -> bool {
        self.full().starts_with(above.full())
    }
}
