//! The hasher of maps whose keys know their hash.

use std::hash::{BuildHasher, Hasher};

/// Hasher of maps keyed by [`Key`](super::Key), whose hash is computed already.
#[derive(Clone, Copy, Default)]
pub(crate) struct Hashed(u64);

impl Hasher for Hashed {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        // Parts beside the key (an enum's discriminant) arrive here.
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
