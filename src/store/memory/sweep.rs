//! When a map is swept for expired values: each time it has doubled, so that the sweeps cost a constant
//! share of each step.

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
