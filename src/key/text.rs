//! The text of a key. A short text is stored inline: most are short, and each call builds one, which would otherwise
//! allocate.

use std::cmp::Ordering;
use std::fmt;
use std::hash::{Hash, Hasher};

/// The longest text that is stored inline. With its length and the enum's tag it fills 64 bytes.
const SHORT: usize = 62;

/// Escaped text, so ASCII.
#[derive(Clone)]
pub(super) enum KeyText {
    Short { length: u8, bytes: [u8; SHORT] },
    Long(String),
}

impl KeyText {
    pub(super) const fn new() -> Self {
        Self::Short { length: 0, bytes: [0; SHORT] }
    }

    pub(super) fn as_bytes(&self) -> &[u8] {
        match self {
            Self::Short { length, bytes } => bytes.get(..usize::from(*length)).unwrap_or_default(),
            Self::Long(text) => text.as_bytes(),
        }
    }

    pub(super) fn as_str(&self) -> &str {
        match self {
            // Valid UTF-8, because only ASCII is pushed.
            Self::Short { .. } => std::str::from_utf8(self.as_bytes()).unwrap_or_default(),
            Self::Long(text) => text,
        }
    }

    pub(super) fn push_str(&mut self, part: &str) {
        self.push(part.as_bytes());
    }

    /// Adds ASCII.
    #[inline]
    pub(super) fn push(&mut self, part: &[u8]) {
        if let Self::Short { length, bytes } = self {
            let (begin, end) = (usize::from(*length), usize::from(*length) + part.len());
            if let Some(target) = bytes.get_mut(begin..end) {
                target.copy_from_slice(part);
                // At most `SHORT`.
                *length = end as u8;
                return;
            }
            *self = Self::Long(self.as_str().to_owned());
        }
        if let Self::Long(text) = self {
            text.push_str(std::str::from_utf8(part).unwrap_or_default());
        }
    }
}

impl fmt::Write for KeyText {
    fn write_str(&mut self, part: &str) -> fmt::Result {
        self.push_str(part);
        Ok(())
    }
}

impl PartialEq for KeyText {
    fn eq(&self, other: &Self) -> bool {
        self.as_bytes() == other.as_bytes()
    }
}

impl Eq for KeyText {}

impl PartialOrd for KeyText {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for KeyText {
    fn cmp(&self, other: &Self) -> Ordering {
        self.as_bytes().cmp(other.as_bytes())
    }
}

impl Hash for KeyText {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.as_bytes().hash(state);
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
