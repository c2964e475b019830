//! [`CacheKey`]: the key as the caller names it.
//!
//! Its text is printable ASCII. Inside a part every byte with a special meaning (the separator `:`, the braces of a Redis hash tag, `%`,
//! `~`) or that is not printable ASCII is written as `%XX`. So different parts never make the same text, and an operator can read
//! plain parts in `redis-cli`: `("user", 42)` is `user:42`.

use std::cmp::Ordering;
use std::fmt;
use std::fmt::Write as _;

use arrayvec::ArrayString;

/// Names the resource a value belongs to.
///
/// Built from text, bytes or a tuple of displayable parts. Parts are joined unambiguously, so
/// `("a.b", "c")`, `("a", "b.c")` and `"a:b.c"` are three keys. Any bytes are accepted, spaces, `:`,
/// `{}` and NUL included. A text and its bytes are the same key, and so are `("user", 42)` and
/// `("user", "42")`: a part is the text that its `Display` writes.
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
        let mut key = Self::of_text(head);
        for part in parts {
            key.text.push_str(":");
            escape_text_into(&mut key.text, part);
        }
        key
    }

    /// A name that is reserved for the crate: no key that is built from parts begins with `~`.
    pub(crate) fn reserved(name: &str) -> Self {
        Self::of_text(&format!("~{name}"))
    }

    /// The key with this text, which is escaped already.
    pub(super) fn of_text(escaped: &str) -> Self {
        let mut text = KeyText::new();
        text.push_str(escaped);
        Self { text }
    }

    /// The key with this text, which [`Display`](fmt::Display) has written; `None` if it has written no such text.
    ///
    /// # Examples
    ///
    /// ```
    /// use stampede_guard::CacheKey;
    ///
    /// assert_eq!(CacheKey::parse("user:42"), Some(CacheKey::from(("user", 42))));
    /// assert_eq!(CacheKey::parse("two words"), None);
    /// ```
    pub fn parse(text: &str) -> Option<Self> {
        let key = Self::from_parts(text.split(':').map(unescaped));
        (!key.is_empty() && key.as_str() == text).then_some(key)
    }

    /// The key that an operator has typed: the text of a key as pages and logs show it, else parts that are separated by `:`. Also returns
    /// which of the two it is.
    pub(crate) fn of_typed(text: &str) -> (Self, bool) {
        // A key of the program has no `~`; the crate's own keys have one before a suffix, or before the digest of a long key.
        let (of_program, suffix) = text.split_at(text.find('~').unwrap_or(text.len()));
        let is_digest = suffix.len() == 65 && suffix.bytes().skip(1).all(|byte| byte.is_ascii_hexdigit());
        let has_known_suffix = suffix.is_empty() || is_digest || of_program.starts_with("http:");
        let is_plain = |byte: u8| matches!(byte, b':' | b'~' | b'%') || PLAIN[usize::from(byte)];
        let begins_with_digits = |text: &str| {
            text.as_bytes().get(..2).is_some_and(|digits| digits.iter().all(u8::is_ascii_hexdigit))
        };
        let is_escaped =
            has_known_suffix && text.bytes().all(is_plain) && text.split('%').skip(1).all(begins_with_digits);
        (if is_escaped { Self::of_text(text) } else { Self::from_parts(text.split(':')) }, is_escaped)
    }

    /// The escaped text.
    pub(super) fn as_str(&self) -> &str {
        self.text.as_str()
    }

    /// Whether the key is empty; the guard refuses such a key.
    pub fn is_empty(&self) -> bool {
        self.as_str().is_empty()
    }

    /// The texts from which [`from_parts`](Self::from_parts) builds this key. In a part that is not UTF-8, the invalid bytes are
    /// replaced.
    #[cfg(feature = "serde")]
    pub(crate) fn parts(&self) -> Vec<String> {
        let text = |part: &str| String::from_utf8_lossy(&unescaped(part)).into_owned();
        self.as_str().split(':').map(text).collect()
    }
}

impl fmt::Display for CacheKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

debug_as!(self: CacheKey => "CacheKey({})", self);

/// The bytes of a part that [`escape_into`] has written.
fn unescaped(part: &str) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(part.len());
    let mut rest = part.as_bytes();
    while let Some((&byte, after)) = rest.split_first() {
        let hex = |at: usize| after.get(at).and_then(|&digit| char::from(digit).to_digit(16));
        if byte == b'%'
            && let (Some(high), Some(low)) = (hex(0), hex(1))
        {
            // Two hexadecimal digits are at most 255.
            bytes.push((high << 4 | low) as u8);
            rest = after.get(2..).unwrap_or_default();
        } else {
            bytes.push(byte);
            rest = after;
        }
    }
    bytes
}

/// Appends `part` to `text`, with each byte that is not [`PLAIN`] written as `%XX`.
fn escape_into(text: &mut KeyText, part: &[u8]) {
    let hex = |digit: u8| b"0123456789ABCDEF"[usize::from(digit & 15)];
    // What stands for itself is ASCII.
    let mut push = |run: &[u8]| text.push_str(std::str::from_utf8(run).unwrap_or_default());
    let mut rest = part;
    while let Some(stop) = rest.iter().position(|&byte| !PLAIN[usize::from(byte)]) {
        push(&rest[..stop]);
        push(&[b'%', hex(rest[stop] >> 4), hex(rest[stop])]);
        rest = &rest[stop + 1..];
    }
    push(rest);
}

/// As [`escape_into`], and faster for a text without a byte to escape, as most texts are.
fn escape_text_into(text: &mut KeyText, part: &str) {
    if stands_for_itself(part) {
        text.push_str(part);
    } else {
        escape_into(text, part.as_bytes());
    }
}

/// Whether no byte of `part` needs escaping.
pub(super) fn stands_for_itself(part: &str) -> bool {
    let bytes = part.as_bytes();
    // Without an early return, so that the comparison of a chunk is vectorized.
    let plain = |chunk: &[u8; 16]| u128::from_ne_bytes(chunk.map(|byte| u8::from(!is_plain(byte)))) == 0;
    match bytes.last_chunk() {
        // The last chunk overlaps the one before it, so that no byte is left over.
        Some(last) => bytes.as_chunks().0.iter().all(plain) && plain(last),
        None => bytes.iter().all(|&byte| PLAIN[usize::from(byte)]),
    }
}

/// Printable ASCII except space, `:`, `%`, `{`, `}` and `~`. Printable ASCII ends with `{`, `|`, `}` and `~`, of which only `|` is plain.
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
        /// The key of one part: the text that the number, or the UUID, displays as.
        impl From<$source> for CacheKey {
            fn from(source: $source) -> Self {
                Self::from((source,))
            }
        }
    )*};
}
from_number!(i32, i64, i128, isize, u16, u32, u64, u128, usize, uuid::Uuid);

/// A copy of the key. (A key as the only part of a tuple is escaped once more: `a%20b` becomes `a%2520b`, which is another key.)
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
                    // The write fails only if the part's own `Display` fails (`to_string` would panic then). The
                    // text that was written before the failure becomes the part.
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

/// The longest text that is stored inline: with its length and the enum's tag it fills 64 bytes.
const SHORT: usize = 56;

/// Escaped text, so ASCII. A short text is stored inline: most are short, and each call builds one, which would otherwise allocate.
/// Each text has only one form, so comparing the variants compares the texts: a text that fits is `Short`.
#[derive(Clone, PartialEq, Eq, Hash)]
enum KeyText {
    Short(ArrayString<SHORT>),
    Long(String),
}

impl KeyText {
    const fn new() -> Self {
        Self::Short(ArrayString::new_const())
    }

    fn as_str(&self) -> &str {
        match self {
            Self::Short(text) => text,
            Self::Long(text) => text,
        }
    }

    /// Appends `part`, which must be ASCII.
    #[inline]
    fn push_str(&mut self, part: &str) {
        if let Self::Short(text) = self {
            if text.try_push_str(part).is_ok() {
                return;
            }
            *self = Self::Long(text.as_str().to_owned());
        }
        if let Self::Long(text) = self {
            text.push_str(part);
        }
    }
}

impl PartialOrd for KeyText {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for KeyText {
    fn cmp(&self, other: &Self) -> Ordering {
        self.as_str().cmp(other.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_of_all_lengths_are_stored_unchanged() {
        let mut text = KeyText::new();
        let mut expected = String::new();
        for n in 0..40 {
            let part = "x".repeat(n % 7);
            text.push_str(&part);
            expected.push_str(&part);
            assert_eq!(text.as_str(), expected);
        }
        assert!(matches!(text, KeyText::Long(_)));
        let mut at_once = KeyText::new();
        at_once.push_str(&expected);
        assert!(text == at_once && text.cmp(&at_once) == Ordering::Equal);
    }
}
