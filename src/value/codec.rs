//! Encoding of a loader's value to bytes, and back.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

use bytes::Bytes;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::entry::Encoding;
use crate::error::{Error, ErrorKind};
use crate::failure_text::panic_text;

/// How values of loaders are encoded in the store.
///
/// An entry records its codec, and each process reads the entries of both, so a fleet can change it process by process. A value of type [`Bytes`] is always stored as it is, whatever the codec, and read
/// without a copy. (A `Vec<u8>` is a sequence of numbers to serde, up to twice as long in MessagePack and four times in JSON, and
/// slow: prefer `Bytes`, or `serde_bytes` on a field.)
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Codec {
    /// MessagePack with field names: compact, and fields may be reordered or added during a
    /// rolling deploy. (Arrays without names decode reordered fields into the wrong places.)
    #[default]
    MessagePack,
    /// JSON, for entries that other programs or people read.
    Json,
}

impl Codec {
    /// Whether `value` can be encoded and read back. A value that cannot is not shared: each caller loads it. Use this in
    /// tests of your own types, because the log does not give the reason: that may contain the value.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Encode`](crate::ErrorKind::Encode), with the reason as its source.
    ///
    /// # Examples
    ///
    /// ```
    /// use serde::{Deserialize, Serialize, Serializer};
    /// use stampede_guard::Codec;
    ///
    /// // Written as a text and read as a number.
    /// #[derive(Serialize, Deserialize)]
    /// struct Card {
    ///     #[serde(serialize_with = "as_text")]
    ///     number: u64,
    /// }
    /// fn as_text<S: Serializer>(number: &u64, serializer: S) -> Result<S::Ok, S::Error> {
    ///     serializer.collect_str(number)
    /// }
    ///
    /// assert!(Codec::default().check(&Card { number: 7 }).is_err());
    /// assert!(Codec::default().check(&7_u64).is_ok());
    /// ```
    pub fn check<T: Serialize + DeserializeOwned + 'static>(self, value: &T) -> Result<(), Error> {
        let (encoding, payload) = self.encode(value)?;
        Self::unreadable::<T>(encoding, &payload).map_or(Ok(()), Err)
    }

    /// Encodes `value`, and returns the encoding used.
    pub(crate) fn encode<T: Serialize + 'static>(self, value: &T) -> Result<(Encoding, Bytes), Error> {
        if let Some(bytes) = (value as &dyn Any).downcast_ref::<Bytes>() {
            return Ok((Encoding::RAW, bytes.clone()));
        }
        match self {
            Self::MessagePack => rmp_serde::to_vec_named(value)
                .map(|encoded| (Encoding::MESSAGE_PACK, encoded.into()))
                .map_err(|error| refused(error.into())),
            Self::Json => serde_json::to_vec(value)
                .map(|encoded| (Encoding::JSON, encoded.into()))
                .map_err(|error| refused(error.into())),
        }
    }

    /// Whether a payload is the encoding of `None` and `()`.
    pub(crate) fn is_nothing(encoding: Encoding, payload: &[u8]) -> bool {
        match encoding {
            Encoding::MESSAGE_PACK => payload == [0xc0],
            Encoding::JSON => payload == b"null",
            _ => false,
        }
    }

    /// Decodes a `T` by the codec that the payload was encoded with; `None` if it is not a `T`. `Bytes` share the payload.
    pub(crate) fn decode<T: DeserializeOwned + 'static>(encoding: Encoding, payload: &Bytes) -> Option<T> {
        Self::read(encoding, payload).ok()
    }

    /// Why readers could not decode a value that was just encoded as a `T`; `None` if they can.
    pub(crate) fn unreadable<T: DeserializeOwned + 'static>(
        encoding: Encoding,
        payload: &Bytes,
    ) -> Option<Error> {
        // The type's `Deserialize` may panic; that must not take the value from the caller that loaded it.
        let read = AssertUnwindSafe(|| Self::read::<T>(encoding, payload).err());
        let failed = catch_unwind(read).unwrap_or_else(|panic| Some(panic_text(&*panic).as_ref().into()));
        let what = "the loaded value can not be read back from what it was encoded to";
        failed.map(|source| Error::with_source(ErrorKind::Encode, what, source.into()))
    }

    fn read<T: DeserializeOwned + 'static>(
        encoding: Encoding,
        payload: &Bytes,
    ) -> Result<T, Box<dyn std::error::Error + Send + Sync>> {
        let mut value: Option<T> = None;
        if let Some(bytes) = (&mut value as &mut dyn Any).downcast_mut::<Option<Bytes>>() {
            *bytes = (encoding == Encoding::RAW).then(|| payload.clone());
            return value.ok_or_else(|| ANOTHER.into());
        }
        match encoding {
            Encoding::MESSAGE_PACK => Ok(rmp_serde::from_slice(payload)?),
            Encoding::JSON => Ok(serde_json::from_slice(payload)?),
            _ => Err(ANOTHER.into()),
        }
    }
}

const ANOTHER: &str = "bytes as they are, or an encoding of no value";

fn refused(source: Box<dyn std::error::Error + Send + Sync>) -> Error {
    Error::with_source(ErrorKind::Encode, "the value could not be encoded", source.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, PartialEq, Serialize, serde::Deserialize)]
    struct Old {
        name: String,
        age: u32,
    }

    /// The same type after a deploy that reordered its fields and added one.
    #[derive(Debug, PartialEq, serde::Deserialize)]
    struct New {
        age: u32,
        #[serde(default)]
        nick: Option<String>,
        name: String,
    }

    #[test]
    fn reordered_and_added_fields_decode_by_name() {
        for codec in [Codec::MessagePack, Codec::Json] {
            let (encoding, payload) = codec.encode(&Old { name: "Ada".into(), age: 36 }).expect("encodes");
            let new: New = Codec::decode(encoding, &payload).expect("decodes");
            assert_eq!(new, New { age: 36, nick: None, name: "Ada".into() });
        }
    }

    #[test]
    fn bytes_are_stored_as_they_are_and_read_without_a_copy() {
        let value = Bytes::from_static(b"\x00raw");
        let (encoding, payload) = Codec::Json.encode(&value).expect("encodes");
        assert_eq!((encoding, payload.as_ptr()), (Encoding::RAW, value.as_ptr()));
        let back: Bytes = Codec::decode(encoding, &payload).expect("decodes");
        assert_eq!(back.as_ptr(), value.as_ptr());
    }

    #[test]
    fn none_unit_and_false_are_values() {
        for codec in [Codec::MessagePack, Codec::Json] {
            let (encoding, payload) = codec.encode(&None::<u8>).expect("encodes");
            assert!(Codec::is_nothing(encoding, &payload));
            assert_eq!(Codec::decode::<Option<u8>>(encoding, &payload), Some(None));
            let (encoding, payload) = codec.encode(&()).expect("encodes");
            assert_eq!(Codec::decode::<()>(encoding, &payload), Some(()));
            let (encoding, payload) = codec.encode(&false).expect("encodes");
            assert!(!Codec::is_nothing(encoding, &payload));
            assert_eq!(Codec::decode::<bool>(encoding, &payload), Some(false));
        }
    }

    #[test]
    fn another_type_is_a_miss() {
        let (encoding, payload) = Codec::Json.encode(&7u8).expect("encodes");
        assert_eq!(Codec::decode::<u8>(encoding, &payload), Some(7));
        assert_eq!(Codec::decode::<String>(encoding, &payload), None);
        assert_eq!(Codec::decode::<Bytes>(encoding, &payload), None);
        assert_eq!(Codec::decode::<u8>(Encoding::RAW, &payload), None);
    }

    #[test]
    fn a_value_that_can_not_be_encoded_is_an_error() {
        let unencodable = std::collections::HashMap::from([(vec![1u8], 1u8)]);
        let error = Codec::Json.encode(&unencodable).expect_err("JSON keys are strings");
        assert_eq!(error.kind(), ErrorKind::Encode);
    }
}
