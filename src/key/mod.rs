//! Keys: unambiguous joining of parts, any bytes, one cluster slot per resource.
//!
//! A caller's [`CacheKey`] becomes a [`Key`] in the guard's namespace. A [`KeyProbe`] finds a caller's key in a map without building a
//! [`Key`]. A [`FlightKey`] identifies a flight: a key and a mode.

mod cache_key;
#[cfg(test)]
#[path = "../../tests/unit/key/tests.rs"]
mod tests;

use std::fmt::Write as _;
use std::hash::{BuildHasher, DefaultHasher, Hash, Hasher, RandomState};
use std::sync::{Arc, LazyLock};

use arrayvec::ArrayString;
use sha2::{Digest, Sha256};

pub use self::cache_key::CacheKey;
use self::cache_key::stands_for_itself;

/// The longest name that is used unchanged. A longer name is cut to a readable head, and the digest of its whole text follows.
const LONGEST_NAME: usize = 200;
const HEAD_OF_LONG_NAME: usize = 96;

/// A key inside its namespace: what the flight map, the store and the envelope use.
///
/// The hash is computed once, with the process's random state, because one request needs it for
/// several maps.
#[derive(Clone)]
pub(crate) struct Key {
    /// `namespace:key`, the part between the braces of the Redis key. Bounded in length.
    name: Arc<str>,
    /// The whole text, if `name` holds a digest of it. A `String`, because its pointer has one word: results contain keys.
    full: Option<Arc<String>>,
    hash: u64,
    /// Whether the whole text contains a `~`. Only such a key can have a report, for which each hit looks.
    has_tilde: bool,
}

static HASH_STATE: LazyLock<RandomState> = LazyLock::new(RandomState::new);

impl Key {
    /// Joins `namespace`, which is already escaped by [`escape_namespace`], and `key`.
    pub(crate) fn new(namespace: &str, key: &CacheKey) -> Self {
        let has_tilde = key.as_str().contains('~');
        let joined = Self::joined(namespace, [key.as_str()].into_iter(), has_tilde);
        joined.unwrap_or_else(|| Self::digested(&format!("{namespace}:{}", key.as_str())))
    }

    /// The key of these escaped parts; `None` if its name would be too long. Every request calls this, so it joins the parts on the stack
    /// and allocates only once.
    fn joined<'a>(namespace: &str, parts: impl Iterator<Item = &'a str>, has_tilde: bool) -> Option<Self> {
        let mut name = ArrayString::<LONGEST_NAME>::new();
        name.try_push_str(namespace).ok()?;
        for part in parts {
            name.try_push(':').ok()?;
            name.try_push_str(part).ok()?;
        }
        Some(Self { hash: Self::hash_of(&name), name: (*name).into(), full: None, has_tilde })
    }

    /// The key with this [`name`](Self::name), which must not end in a digest.
    pub(crate) fn of_name(name: &str) -> Self {
        let has_tilde = name.contains('~');
        Self { hash: Self::hash_of(name), name: name.into(), full: None, has_tilde }
    }

    /// The hash of a text. That of a key's [`name`](Self::name) equals the hash of the key itself, unless the name ends in a digest.
    pub(crate) fn hash_of(name: &str) -> u64 {
        let mut hasher = HASH_STATE.build_hasher();
        hasher.write(name.as_bytes());
        hasher.finish()
    }

    /// The hash of this key's name.
    pub(crate) fn hash_of_name(&self) -> u64 {
        if self.full.is_none() { self.hash } else { Self::hash_of(&self.name) }
    }

    fn digested(full: &str) -> Self {
        // Escaped text is ASCII, so any index is a character boundary. `~` never occurs in it,
        // so a digested name cannot equal an unchanged one.
        let mut name = full.get(..HEAD_OF_LONG_NAME).unwrap_or(full).to_owned();
        name.push('~');
        push_hex(&mut name, &Sha256::digest(full.as_bytes()));
        let has_tilde = full.contains('~');
        Self {
            hash: Self::hash_of(full),
            name: name.into(),
            full: Some(Arc::new(full.to_owned())),
            has_tilde,
        }
    }

    /// The part between the braces of the Redis key.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Everything that identifies the resource; stored in the envelope and compared on read.
    pub(crate) fn full(&self) -> &str {
        self.full.as_ref().map_or(&self.name, |full| full)
    }

    /// The text of this key's [`CacheKey`]: everything after the `namespace`, which must be the key's own.
    pub(crate) fn within(&self, namespace: &str) -> &str {
        self.full().get(namespace.len() + 1..).unwrap_or_default()
    }

    /// As [`within`](Self::within), but bounded: of a long key its first bytes and its digest.
    pub(crate) fn name_within(&self, namespace: &str) -> &str {
        self.name.get(namespace.len() + 1..).unwrap_or_default()
    }

    /// The key as the caller names it.
    pub(crate) fn cache_key(&self, namespace: &str) -> CacheKey {
        CacheKey::of_text(self.within(namespace))
    }

    /// A short fingerprint for errors and events, which never carry the key's text.
    pub(crate) fn digest(&self) -> String {
        let mut text = String::with_capacity(16);
        push_hex(&mut text, &Sha256::digest(self.full().as_bytes())[..8]);
        text
    }
}

/// Begins the suffix of the [tag of a group](Key::of_group), which follows.
const GROUP: &str = "~g:";
/// The suffix of a [tag of a path](Key::of_path).
const PATH: &str = "~p";
/// Begins the suffix that a report of proxies, or the content of a QUERY, adds to a resource's key: a digest follows. Without a digest it
/// is the suffix of the tag that all such entries of one resource have.
const REPORT: &str = "~f";

/// Keys of HTTP resources, and keys derived from them.
impl Key {
    /// As [`new`](Self::new) of [`CacheKey::from_texts`], mostly without building that intermediate key.
    pub(crate) fn from_texts(namespace: &str, head: &str, parts: &[&str]) -> Self {
        // A part that stands for itself contains no `~`.
        let joined = || Self::joined(namespace, [head].iter().chain(parts).copied(), false);
        let plain = parts.iter().all(|part| stands_for_itself(part));
        let joined = plain.then(joined).flatten();
        joined.unwrap_or_else(|| Self::new(namespace, &CacheKey::from_texts(head, parts)))
    }

    /// A key that belongs to this key's resource; `suffix` begins with `~` and is ASCII.
    pub(crate) fn derived(&self, suffix: &str) -> Self {
        Self::of_full(&format!("{}{suffix}", self.full()))
    }

    /// The key with this [`full`](Self::full) text.
    pub(crate) fn of_full(full: &str) -> Self {
        if full.len() > LONGEST_NAME { Self::digested(full) } else { Self::of_name(full) }
    }

    /// The tag of the entries that this HTTP resource has under reports of proxies and contents of QUERY; `None` if this is not the key of
    /// an HTTP resource.
    pub(crate) fn of_reports(&self, namespace: &str) -> Option<Self> {
        self.within(namespace).starts_with("http:").then(|| self.of_report(""))
    }

    /// The text of an HTTP resource's key up to its authority, and what follows the `:` behind that; `None` if this is no such key.
    fn at_origin(&self, namespace: &str) -> Option<(&str, &str)> {
        let mut rest = self.within(namespace).strip_prefix("http:")?;
        // Between the part `http` and the authority come the kind of policy, unless it is the default one, and the scheme.
        loop {
            let (part, after) = rest.split_once(':')?;
            rest = after;
            if matches!(part, "http" | "https") {
                break;
            }
        }
        let (_authority, path) = rest.split_once(':')?;
        let origin = self.full().get(..self.full().len() - path.len() - 1)?;
        Some((origin, path))
    }

    /// The tag of the responses of a group (RFC 9875) of this HTTP resource's origin; `None` if this is not the key of an HTTP resource.
    pub(crate) fn of_group(&self, namespace: &str, group: &str) -> Option<Self> {
        self.of_authority(namespace, &format!("{GROUP}{}", CacheKey::from(group).as_str()))
    }

    /// The key of the authority of this HTTP resource, with this suffix; `None` if this is not the key of an HTTP resource.
    pub(crate) fn of_authority(&self, namespace: &str, suffix: &str) -> Option<Self> {
        let (origin, _) = self.at_origin(namespace)?;
        Some(Self::of_full(&format!("{origin}{suffix}")))
    }

    /// The tag of all responses of a path: of each query, each variant, each report and each addition to the key. `None` if this
    /// is not the key of an HTTP resource. No tag of a user contains a `~`.
    pub(crate) fn of_path(&self, namespace: &str) -> Option<Self> {
        let (origin, path) = self.at_origin(namespace)?;
        let end = path.find([':', '?', '~']).unwrap_or(path.len());
        Some(Self::of_full(&format!("{origin}:{}{PATH}", &path[..end])))
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

    /// The key of the response to a QUERY of this resource, by the digests in hex of its content and of what else tells it apart, such as a
    /// report. No report's digest contains a `q`.
    pub(crate) fn of_query(&self, content: &str, others: &str) -> Self {
        self.of_report(&format!("q{content}{others}"))
    }

    /// Whether this key was made by [`of_report`](Self::of_report), or was derived from such a key.
    pub(crate) fn has_report(&self) -> bool {
        self.resource_of_report().is_some()
    }

    /// The tag of all reports of the resource, if this key [has a report](Self::has_report).
    pub(crate) fn report_tag(&self) -> Option<Self> {
        self.resource_of_report().map(|resource| Self::of_full(&format!("{resource}{REPORT}")))
    }

    fn resource_of_report(&self) -> Option<&str> {
        if !self.has_tilde {
            return None;
        }
        // No part of a key contains a `~`, and the suffix of a report precedes all other suffixes.
        let (resource, suffix) = self.full().split_at(self.full().find('~')?);
        suffix.starts_with(REPORT).then_some(resource)
    }

    /// Whether the text of this key begins with that of `above`: with a [tag of reports](Self::of_reports), whether this key is one of
    /// that resource under a report.
    pub(crate) fn is_below(&self, above: &Self) -> bool {
        self.full().starts_with(above.full())
    }
}

impl PartialEq for Key {
    fn eq(&self, other: &Self) -> bool {
        self.hash == other.hash && self.full() == other.full()
    }
}

impl Eq for Key {}

impl Hash for Key {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u64(self.hash);
    }
}

debug_as!(self: Key => "Key(#{})", self.digest());

/// A namespace as it is written in key names.
pub(crate) fn escape_namespace(namespace: &str) -> String {
    CacheKey::from(namespace).to_string()
}

/// Why a namespace can not be used; `None` if it can be used.
pub(crate) fn unusable_namespace(namespace: &str) -> Option<String> {
    let length = escape_namespace(namespace).len();
    let is_refused = !(1..=64).contains(&length);
    is_refused.then(|| format!("has {length} characters: choose 1 to 64 (an escape counts as three)"))
}

fn push_hex(text: &mut String, bytes: &[u8]) {
    for byte in bytes {
        let _ = write!(text, "{byte:02x}");
    }
}

/// Hasher for maps with [`Key`]s, whose hash is computed already.
#[derive(Clone, Copy, Default)]
pub(crate) struct Hashed(u64);

impl Hasher for Hashed {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        // A map's key may have fields besides the `Key`, such as an enum's discriminant: these are hashed here.
        for &byte in bytes {
            self.0 = self.0.rotate_left(8) ^ u64::from(byte);
        }
    }

    fn write_u64(&mut self, hash: u64) {
        self.0 ^= hash;
    }
}

impl BuildHasher for Hashed {
    type Hasher = Self;

    fn build_hasher(&self) -> Self {
        Self(0)
    }
}

/// Makes the probes of one namespace.
#[derive(Clone, Debug)]
pub(crate) struct Prober {
    namespace: Box<str>,
    /// The state of the hasher after the namespace and the separator, to which each probe adds a caller's key.
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
        // Equals the hash of the joined text. If the standard library ever hashes parts in another way than the whole, the probe matches no
        // key and the caller continues with a `Key`.
        let mut hasher = self.hasher.clone();
        hasher.write(key.as_str().as_bytes());
        KeyProbe { namespace: &self.namespace, key, hash: hasher.finish() }
    }
}

/// A caller's key in its namespace, with its hash: enough to find the [`Key`] in a map.
#[derive(Clone, Copy, Debug)]
pub(crate) struct KeyProbe<'a> {
    namespace: &'a str,
    key: &'a CacheKey,
    hash: u64,
}

impl KeyProbe<'_> {
    /// Whether this is a probe for `key`.
    pub(crate) fn is_of(&self, key: &Key) -> bool {
        let full = key.full().as_bytes();
        self.hash == key.hash
            && full.strip_prefix(self.namespace.as_bytes()).and_then(|rest| rest.strip_prefix(b":"))
                == Some(self.key.as_str().as_bytes())
    }

    /// The [`Key`] that this probe finds.
    pub(crate) fn key(&self) -> Key {
        Key::new(self.namespace, self.key)
    }
}

impl Hash for KeyProbe<'_> {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u64(self.hash);
    }
}

/// Identifies a flight: a key has at most one joinable flight per mode.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct FlightKey {
    pub(crate) key: Key,
    pub(crate) mode: LoadMode,
}

/// How a flight obtains the right to load.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum LoadMode {
    /// Under the fleet's lease. This is the normal mode.
    Leased,
    /// Outside the lease, for callers whose `wait_timeout` has passed.
    Unleased,
    /// Under the lease only if it is free, and without waiters: for a caller that nothing may delay, such as one that tries
    /// whether a resource that was uncacheable still is.
    Probe,
    /// Under the lease only if it is free, and without waiters: all callers are served the stored value.
    BackgroundRefresh,
    /// Under the fleet's lease, for callers that reject the stored value while others are served it.
    ForcedReload,
}

impl LoadMode {
    pub(crate) const ALL: [Self; 5] =
        [Self::Leased, Self::Unleased, Self::Probe, Self::BackgroundRefresh, Self::ForcedReload];
}

#[cfg(test)]
mod probe_tests {
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
