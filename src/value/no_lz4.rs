//! The compressed form of a payload where the feature `lz4` is off: none is made, and none is read.

use bytes::Bytes;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Packed(());

impl Packed {
    pub(crate) fn of(_payload: &[u8], _from: usize) -> Self {
        Self(())
    }

    pub(crate) fn unpack(_packed: Bytes, _length: usize) -> Option<(Self, Bytes)> {
        None
    }

    pub(crate) fn stored(&self) -> Option<&Bytes> {
        None
    }
}
