//! Counts the commands in a stream of requests to Redis.

/// Finds the beginnings of commands in the bytes of one connection. A client sends each command as an array of texts with their
/// lengths (RESP), so that no byte of a value is taken for one.
#[derive(Debug, Default)]
pub(crate) struct CommandCounter {
    /// The line that is being read.
    line: Vec<u8>,
    /// How many bytes of a text, with its end of line, are still to come.
    text: usize,
}

impl CommandCounter {
    /// How many commands begin in these bytes.
    pub(crate) fn count(&mut self, mut bytes: &[u8]) -> u64 {
        let mut begun = 0;
        loop {
            let skipped = self.text.min(bytes.len());
            self.text -= skipped;
            bytes = &bytes[skipped..];
            let Some(end) = bytes.iter().position(|byte| *byte == b'\n') else {
                // A line of this protocol is short; a longer one is no line of it.
                if self.line.len() < 64 {
                    self.line.extend_from_slice(bytes);
                }
                return begun;
            };
            self.line.extend_from_slice(&bytes[..end]);
            bytes = &bytes[end + 1..];
            match self.line.first() {
                Some(b'*') => begun += 1,
                Some(b'$') => self.text = number(&self.line[1..]).map_or(0, |length| length + 2),
                _ => {}
            }
            self.line.clear();
        }
    }
}

fn number(line: &[u8]) -> Option<usize> {
    std::str::from_utf8(line).ok()?.trim_end().parse().ok()
}
