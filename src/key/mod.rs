//! Keys: unambiguous joining of parts, any bytes, one cluster slot per resource.
//!
//! A key is stored as printable text. Inside a part every byte with a special meaning (the separator `:`, the braces of a
//! Redis hash tag, `%`, `~`) or that is not printable ASCII is written as `%XX`. So the joining is injective, and an
//! operator can read the program's own parts in `redis-cli`: `("user", 42)` is `user:42`.
//!
//! A [`KeyProbe`] finds a caller's key in a map without building a [`Key`]. A [`FlightKey`] identifies a flight: a key and
//! a mode.

#[cfg(feature = "http")]
mod http;
#[cfg(not(feature = "http"))]
#[path = "no_http.rs"]
mod http;
#[cfg(feature = "serde")]
mod parts;
#[cfg(test)]
#[path = "../../tests/unit/key/tests.rs"]
mod tests;
mod text;

use std::fmt;
use std::fmt::Write as _;
use std::hash::{BuildHasher, DefaultHasher, Hash, Hasher, RandomState};
use std::sync::{Arc, LazyLock};

use sha2::{Digest, Sha256};

use self::text::KeyText;

/// Names the resource a value belongs to.
///
/// Built from text, bytes or a tuple of displayable parts. Parts are joined unambiguously, so
/// `("a.b", "c")`, `("a", "b.c")` and `"a:b.c"` are three keys. Any bytes are accepted, spaces, `:`,
/// `{}` and NUL included. The text and the bytes of one content are the same key, and so are
/// `("user", 42)` and `("user", "42")`: a part is what it displays as.
///
/// An empty key is refused by the call that uses it, with
/// [`ErrorKind::InvalidKey`](crate::ErrorKind::InvalidKey).
///
/// # Examples
///
/// ```
/// use stampede_guard::CacheKey;
///
/// assert_eq!(CacheKey::from(("user", 42)), CacheKey::from(("user", "42")));
/// assert_ne!(CacheKey::from(("a.b", "c")), CacheKey::from(("a", "b.c")));
/// assert_ne!(CacheKey::from(("a", "b")), CacheKey::from("a:b"));
/// assert_eq!(CacheKey::from("two words").to_string(), "two%20words");
/// ```
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct CacheKey {
    text: KeyText,
}

impl CacheKey {
    /// Joins parts of any bytes, in order; `from_parts(["a"])` is the key of `"a"`.
    ///
    /// # Examples
    ///
    /// ```
    /// use stampede_guard::CacheKey;
    ///
    /// assert_eq!(CacheKey::from_parts(["user", "42"]), CacheKey::from(("user", 42)));
    /// ```
    pub fn from_parts<P: AsRef<[u8]>>(parts: impl IntoIterator<Item = P>) -> Self {
        let mut text = KeyText::new();
        for (index, part) in parts.into_iter().enumerate() {
            if index > 0 {
                text.push_str(":");
            }
            escape_into(&mut text, part.as_ref());
        }
        Self { text }
    }

    /// Joins texts after a `head` that is escaped and joined already.
    pub(crate) fn from_texts(head: &str, parts: &[&str]) -> Self {
        let mut text = KeyText::new();
        text.push_str(head);
        for part in parts {
            text.push_str(":");
            escape_text_into(&mut text, part);
        }
        Self { text }
    }

    /// A name that is reserved for the crate: no key that is built from parts begins with `~`.
    pub(crate) fn reserved(name: &str) -> Self {
        let mut text = KeyText::new();
        text.push_str("~");
        text.push_str(name);
        Self { text }
    }

    /// Whether the key is empty; the guard refuses such a key.
    pub fn is_empty(&self) -> bool {
        self.text.as_bytes().is_empty()
    }
}

impl fmt::Display for CacheKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.text.as_str())
    }
}

impl fmt::Debug for CacheKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CacheKey({})", self.text.as_str())
    }
}

/// Writes `part` without separators, braces and unprintable bytes.
fn escape_into(text: &mut KeyText, part: &[u8]) {
    let hex = |digit: u8| b"0123456789ABCDEF"[usize::from(digit & 15)];
    let mut rest = part;
    while let Some(stop) = rest.iter().position(|&byte| !PLAIN[usize::from(byte)]) {
        text.push(&rest[..stop]);
        text.push(&[b'%', hex(rest[stop] >> 4), hex(rest[stop])]);
        rest = &rest[stop + 1..];
    }
    text.push(rest);
}

/// As [`escape_into`], for text, which mostly needs no escaping.
fn escape_text_into(text: &mut KeyText, part: &str) {
    if stands_for_itself(part) {
        text.push_str(part);
    } else {
        escape_into(text, part.as_bytes());
    }
}

/// Whether no byte needs escaping.
fn stands_for_itself(part: &str) -> bool {
    let bytes = part.as_bytes();
    // Without an early return, so that the comparison of a chunk is vectorized.
    let plain = |chunk: &[u8; 16]| u128::from_ne_bytes(chunk.map(|byte| u8::from(!is_plain(byte)))) == 0;
    match bytes.last_chunk() {
        // The last chunk overlaps the one before it, so that no byte is left over.
        Some(last) => bytes.as_chunks().0.iter().all(plain) && plain(last),
        None => bytes.iter().all(|&byte| PLAIN[usize::from(byte)]),
    }
}

/// Printable ASCII except `:`, `%`, `{`, `}` and `~`. The last three, and `|` among them, are the end of printable ASCII.
const fn is_plain(byte: u8) -> bool {
    ((byte > b' ') & (byte < b'{') | (byte == b'|')) & (byte != b':') & (byte != b'%')
}

/// Which bytes need no escaping. A table, because every byte of every key is checked.
static PLAIN: [bool; 256] = {
    let mut plain = [false; 256];
    let mut byte = 0;
    while byte < plain.len() {
        plain[byte] = is_plain(byte as u8);
        byte += 1;
    }
    plain
};

/// Escapes a part's `Display` output while it is being written.
struct Escaping<'a>(&'a mut KeyText);

impl fmt::Write for Escaping<'_> {
    fn write_str(&mut self, part: &str) -> fmt::Result {
        escape_text_into(self.0, part);
        Ok(())
    }
}

macro_rules! from_bytes {
    ($($source:ty),*) => {$(
        impl From<$source> for CacheKey {
            fn from(source: $source) -> Self {
                Self::from_parts([source])
            }
        }
    )*};
}
from_bytes!(&[u8], Vec<u8>, &Vec<u8>);

macro_rules! from_text {
    ($($source:ty),*) => {$(
        impl From<$source> for CacheKey {
            fn from(source: $source) -> Self {
                let mut text = KeyText::new();
                escape_text_into(&mut text, &source);
                Self { text }
            }
        }
    )*};
}
from_text!(&str, String, &String);

macro_rules! from_number {
    ($($source:ty),*) => {$(
        /// A part that is the number's decimal digits.
        impl From<$source> for CacheKey {
            fn from(source: $source) -> Self {
                Self::from((source,))
            }
        }
    )*};
}
from_number!(i32, i64, i128, isize, u16, u32, u64, u128, usize, uuid::Uuid);

/// A copy. (As a tuple's only part it would be escaped once more, which is another key.)
impl From<&Self> for CacheKey {
    fn from(key: &Self) -> Self {
        key.clone()
    }
}

impl<const N: usize> From<&[u8; N]> for CacheKey {
    fn from(source: &[u8; N]) -> Self {
        Self::from_parts([source])
    }
}

macro_rules! from_tuple {
    ($($part:ident)+) => {
        impl<$($part: fmt::Display),+> From<($($part,)+)> for CacheKey {
            fn from(parts: ($($part,)+)) -> Self {
                #[allow(non_snake_case, reason = "the type parameters double as variable names")]
                let ($($part,)+) = parts;
                let mut text = KeyText::new();
                let mut separator = "";
                $(
                    text.push_str(separator);
                    // This fails only if the part's own `Display` fails, on which `to_string` would panic. The
                    // text written until then is the part.
                    let _ = write!(Escaping(&mut text), "{}", $part);
                    separator = ":";
                )+
                let _ = separator;
                Self { text }
            }
        }
    };
}
from_tuple!(A);
from_tuple!(A B);
from_tuple!(A B C);
from_tuple!(A B C D);
from_tuple!(A B C D E);
from_tuple!(A B C D E F);
from_tuple!(A B C D E F G);
from_tuple!(A B C D E F G H);
from_tuple!(A B C D E F G H I);
from_tuple!(A B C D E F G H I J);
from_tuple!(A B C D E F G H I J K);
from_tuple!(A B C D E F G H I J K L);

/// The longest name used unchanged; a longer one keeps a readable head and ends in its digest.
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
    /// The whole text, if `name` holds a digest of it.
    full: Option<Arc<str>>,
    hash: u64,
}

static HASH_STATE: LazyLock<RandomState> = LazyLock::new(RandomState::new);

impl Key {
    /// Joins `namespace` and `key` (the namespace is already escaped by [`escape_namespace`]).
    pub(crate) fn new(namespace: &str, key: &CacheKey) -> Self {
        let text = key.text.as_str();
        let joined = Self::joined([namespace, text].into_iter());
        joined.unwrap_or_else(|| Self::digested(&format!("{namespace}:{text}")))
    }

    /// Joins escaped parts; `None` if the name is too long. Every request does this, so it joins on the stack and allocates
    /// only once.
    fn joined<'a>(parts: impl Iterator<Item = &'a str>) -> Option<Self> {
        // Each part is followed by a separator.
        let (mut text, mut length) = ([0; LONGEST_NAME + 1], 0);
        for part in parts {
            let end = length + part.len();
            text.get_mut(length..end)?.copy_from_slice(part.as_bytes());
            *text.get_mut(end)? = b':';
            length = end + 1;
        }
        std::str::from_utf8(text.get(..length.checked_sub(1)?)?).ok().map(Self::of_name)
    }

    /// The key with this [`name`](Self::name), which must not end in a digest.
    pub(crate) fn of_name(name: &str) -> Self {
        Self { hash: HASH_STATE.hash_one(name), name: name.into(), full: None }
    }

    /// The hash of a key's [`name`](Self::name). Equals that of the key, unless the name ends in a digest.
    pub(crate) fn hash_of(name: &str) -> u64 {
        HASH_STATE.hash_one(name)
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
        Self { hash: HASH_STATE.hash_one(full), name: name.into(), full: Some(full.into()) }
    }

    /// The part between the braces of the Redis key.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Everything that identifies the resource; stored in the envelope and compared on read.
    pub(crate) fn full(&self) -> &str {
        self.full.as_ref().unwrap_or(&self.name)
    }

    /// The text of its [`CacheKey`].
    pub(crate) fn within(&self, namespace: &str) -> &str {
        self.full().get(namespace.len() + 1..).unwrap_or_default()
    }

    /// The key as the caller names it.
    pub(crate) fn cache_key(&self, namespace: &str) -> CacheKey {
        let mut text = KeyText::new();
        text.push_str(self.within(namespace));
        CacheKey { text }
    }

    /// A short fingerprint for errors and events, which never carry the key's text.
    pub(crate) fn digest(&self) -> String {
        let mut text = String::with_capacity(16);
        push_hex(&mut text, &Sha256::digest(self.full().as_bytes())[..8]);
        text
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

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Key(#{})", self.digest())
    }
}

/// A namespace as it is written in key names.
pub(crate) fn escape_namespace(namespace: &str) -> String {
    CacheKey::from(namespace).to_string()
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
        // Other fields than the key (an enum's discriminant) are hashed here.
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
    /// The state after hashing the namespace and the separator.
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
        // Equals the hash of the joined text as a `str`. If the standard library ever hashes parts in another way than the
        // whole, the probe matches no key and the caller continues with a `Key`.
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

/// Identifies a flight: a key has at most one joinable flight per mode.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct FlightKey {
    pub(crate) key: Key,
    pub(crate) mode: LoadMode,
}

/// How a flight obtains the right to load.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum LoadMode {
    /// Under the fleet's lease. The normal one.
    Leased,
    /// Outside the lease, for callers whose `wait_timeout` has passed.
    Unleased,
    /// Under the lease only if it is free, and without waiters: to find out whether a resource
    /// that was uncacheable still is.
    Probe,
    /// Under the lease only if it is free, and without waiters: all callers are served the stored value.
    BackgroundRefresh,
    /// Under the fleet's lease, for callers that reject the stored value while others are served it.
    ForcedReload,
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
