//! Encoding of a loader's value to bytes, and back.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

use bytes::Bytes;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::entry::Encoding;
use crate::error::{Error, ErrorKind};
use crate::observe::{LogEveryMinute, log, panic_text, warn_if};

/// How values of loaders are encoded in the store.
///
/// An entry records its codec, and each process reads the entries of both, so a fleet can change it process by process. A
/// value of type [`Bytes`] is always stored as it is, whatever the codec, and read without a copy. (To serde a `Vec<u8>` is a
/// sequence of numbers, up to twice as long in MessagePack and four times in JSON, and slow: prefer `Bytes`, or `serde_bytes`
/// on a field.)
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Codec {
    /// MessagePack with field names: compact, and fields may be reordered or added during a
    /// rolling deploy. (Arrays without names decode reordered fields into the wrong ones.)
    #[default]
    MessagePack,
    /// JSON, for entries that other programs or people read.
    Json,
}

impl Codec {
    /// Whether `value` can be encoded and read back, and whether the value read back has the same encoding. A value that cannot be
    /// read back is not shared: each caller loads it. A value that comes back changed is shared, and later callers get another value
    /// than the first caller. Use this in tests of your own types, because the log does not state the reason: it may contain the value.
    ///
    /// The encodings are compared as bytes in any order, because maps and sets come back in another order. Fields that are not
    /// encoded (`#[serde(skip)]`) are compared by [`check_eq`](Self::check_eq) only.
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
        self.round_trip(value).map(|_| ())
    }

    /// As [`check`](Self::check), and also whether the value read back equals `value`. This detects skipped fields, and numbers
    /// that are not equal to themselves (`NaN`).
    ///
    /// # Errors
    ///
    /// As [`check`](Self::check).
    ///
    /// # Examples
    ///
    /// ```
    /// use serde::{Deserialize, Serialize};
    /// use stampede_guard::Codec;
    ///
    /// #[derive(PartialEq, Serialize, Deserialize)]
    /// struct Session {
    ///     user: u64,
    ///     #[serde(skip)]
    ///     is_admin: bool,
    /// }
    ///
    /// let admin = Session { user: 7, is_admin: true };
    /// assert!(Codec::default().check(&admin).is_ok());
    /// assert!(Codec::default().check_eq(&admin).is_err()); // a hit returns `is_admin: false`
    /// ```
    pub fn check_eq<T: Serialize + DeserializeOwned + PartialEq + 'static>(
        self,
        value: &T,
    ) -> Result<(), Error> {
        if self.round_trip(value)? == *value {
            Ok(())
        } else {
            Err(changed("the value that comes back is another one"))
        }
    }

    /// The value that later callers get, if it has the same encoding.
    fn round_trip<T: Serialize + DeserializeOwned + 'static>(self, value: &T) -> Result<T, Error> {
        let (encoding, payload) = self.encode(value)?;
        let back = Self::read::<T>(encoding, &payload).map_err(unreadable)?;
        let (_, second) = self.encode(&back)?;
        let sorted = |payload: Bytes| {
            let mut bytes = payload.to_vec();
            bytes.sort_unstable();
            bytes
        };
        if payload != second && sorted(payload) != sorted(second) {
            return Err(changed("the value that comes back has another encoding"));
        }
        Ok(back)
    }

    /// Encodes `value`, and returns the encoding used. A `Serialize` that panics is an error: the panic must not reach the caller that
    /// loaded the value, which can still use it.
    pub(crate) fn encode<T: Serialize + 'static>(self, value: &T) -> Result<(Encoding, Bytes), Error> {
        if let Some(bytes) = (value as &dyn Any).downcast_ref::<Bytes>() {
            return Ok((Encoding::RAW, bytes.clone()));
        }
        let encoded = or_panic(|| match self {
            Self::MessagePack => Ok((Encoding::MESSAGE_PACK, rmp_serde::to_vec_named(value)?.into())),
            Self::Json => Ok((Encoding::JSON, serde_json::to_vec(value)?.into())),
        });
        encoded.map_err(|source| {
            Error::with_source(ErrorKind::Encode, "the value could not be encoded", source.into())
        })
    }

    /// Whether a payload is the encoding that `None` and `()` have in common.
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
        Self::read::<T>(encoding, payload).err().map(unreadable)
    }

    /// Decodes a payload. A panic of the type's `Deserialize` or `From` is an error, as if it had rejected the payload: the next load
    /// replaces the entry.
    fn read<T: DeserializeOwned + 'static>(encoding: Encoding, payload: &Bytes) -> Result<T, Cause> {
        let mut value: Option<T> = None;
        if let Some(bytes) = (&mut value as &mut dyn Any).downcast_mut::<Option<Bytes>>() {
            *bytes = (encoding == Encoding::RAW).then(|| payload.clone());
            return value.ok_or_else(|| ANOTHER.into());
        }
        or_panic(|| match encoding {
            Encoding::MESSAGE_PACK => Ok(rmp_serde::from_slice(payload)?),
            Encoding::JSON => Ok(serde_json::from_slice(payload)?),
            _ => Err(ANOTHER.into()),
        })
    }
}

const ANOTHER: &str = "bytes as they are, or an encoding of no value";

/// Why a value cannot be encoded or decoded.
type Cause = Box<dyn std::error::Error + Send + Sync>;

/// Runs the user's `Serialize` or `Deserialize`; a panic is an error. The panic is logged, at most once a minute, without the
/// value's type or content.
fn or_panic<T>(run: impl FnOnce() -> Result<T, Cause>) -> Result<T, Cause> {
    static LOG: LogEveryMinute = LogEveryMinute::new();
    catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|panic| {
        warn_if!(
            log::GUARD,
            LOG.is_due(),
            "the Serialize or Deserialize of a value has panicked: it is not stored, or loaded anew"
        );
        Err(panic_text(&*panic).as_ref().into())
    })
}

fn unreadable(source: Cause) -> Error {
    let text = "the loaded value can not be read back from what it was encoded to";
    Error::with_source(ErrorKind::Encode, text, source.into())
}

fn changed(text: &'static str) -> Error {
    Error::new(ErrorKind::Encode, text)
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
    fn a_panic_of_the_types_own_code_is_an_error() {
        #[derive(Debug, Clone, Serialize, serde::Deserialize)]
        #[serde(from = "u8")]
        struct Odd(u8);
        impl From<u8> for Odd {
            fn from(number: u8) -> Self {
                assert!(number % 2 == 1, "{number} is even");
                Self(number)
            }
        }
        #[derive(serde::Deserialize)]
        struct Broken;
        impl Serialize for Broken {
            fn serialize<S: serde::Serializer>(&self, _: S) -> Result<S::Ok, S::Error> {
                panic!("broken")
            }
        }
        for codec in [Codec::MessagePack, Codec::Json] {
            let (encoding, payload) = codec.encode(&2_u8).expect("encodes");
            assert!(Codec::decode::<Odd>(encoding, &payload).is_none());
            let (encoding, payload) = codec.encode(&3_u8).expect("encodes");
            assert_eq!(Codec::decode::<Odd>(encoding, &payload).map(|odd| odd.0), Some(3));
            assert_eq!(codec.encode(&Broken).expect_err("panics").kind(), ErrorKind::Encode);
        }
    }

    #[test]
    fn the_check_compares_what_comes_back() {
        use std::collections::{HashMap, HashSet};

        #[derive(PartialEq, Serialize, serde::Deserialize)]
        struct Halved(#[serde(deserialize_with = "half")] u32);
        fn half<'de, D: serde::Deserializer<'de>>(source: D) -> Result<u32, D::Error> {
            <u32 as serde::Deserialize>::deserialize(source).map(|number| number / 2)
        }
        #[derive(PartialEq, Serialize, serde::Deserialize)]
        struct Skips {
            stored: u8,
            #[serde(skip)]
            skipped: u8,
        }
        for codec in [Codec::MessagePack, Codec::Json] {
            assert!(codec.check(&Halved(7)).is_err());
            assert!(codec.check_eq(&Skips { stored: 1, skipped: 1 }).is_err());
            assert!(codec.check_eq(&Skips { stored: 1, skipped: 0 }).is_ok());
            assert!(codec.check_eq(&f64::NAN).is_err());
            let map: HashMap<String, HashSet<u32>> =
                (0..50).map(|n| (n.to_string(), (0..n).collect())).collect();
            assert!(codec.check_eq(&map).is_ok(), "in another order");
        }
    }

    #[test]
    fn a_value_that_can_not_be_encoded_is_an_error() {
        let unencodable = std::collections::HashMap::from([(vec![1u8], 1u8)]);
        let error = Codec::Json.encode(&unencodable).expect_err("JSON keys are strings");
        assert_eq!(error.kind(), ErrorKind::Encode);
    }
}
