//! The parts of a key before they were joined.

use super::CacheKey;

impl CacheKey {
    /// The texts from which [`from_parts`](Self::from_parts) builds this key. In a part that is not UTF-8, the invalid bytes are
    /// replaced.
    pub(crate) fn parts(&self) -> Vec<String> {
        self.text.as_str().split(':').map(unescaped).collect()
    }
}

fn unescaped(part: &str) -> String {
    let mut bytes = Vec::with_capacity(part.len());
    let mut rest = part.as_bytes();
    while let Some((&byte, after)) = rest.split_first() {
        let hex = |at: usize| after.get(at).and_then(|&digit| char::from(digit).to_digit(16));
        if byte == b'%'
            && let (Some(high), Some(low)) = (hex(0), hex(1))
        {
            // Two digits: at most 255.
            bytes.push((high << 4 | low) as u8);
            rest = after.get(2..).unwrap_or_default();
        } else {
            bytes.push(byte);
            rest = after;
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}
