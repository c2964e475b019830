//! When a map is looked through for what has expired: each time it has doubled, so that a step pays for
//! this no more than its share.

pub(super) struct Sweep {
    at: usize,
}

impl Default for Sweep {
    fn default() -> Self {
        Self { at: Self::LEAST }
    }
}

impl Sweep {
    const LEAST: usize = 64;

    pub(super) fn is_due(&self, len: usize) -> bool {
        len >= self.at
    }

    pub(super) fn done(&mut self, left: usize) {
        self.at = (left * 2).max(Self::LEAST);
    }
}
