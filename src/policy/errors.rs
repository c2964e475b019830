//! Types of loaders' errors that reach callers in other processes as values.

use std::any::{Any, TypeId, type_name};
use std::fmt;
use std::sync::Arc;

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::failure_text::EncodedError;
use crate::value::codec::Codec;
use crate::value::entry::Encoding;

/// A type of error that travels, with its encoding.
#[derive(Clone, Copy)]
struct ErrorType {
    id: TypeId,
    name: &'static str,
    encode: fn(&dyn Any) -> Option<EncodedError>,
    decode: fn(&EncodedError) -> Option<Arc<dyn Any + Send + Sync>>,
}

impl ErrorType {
    fn of<E: Serialize + DeserializeOwned + Send + Sync + 'static>() -> Self {
        Self { id: TypeId::of::<E>(), name: type_name::<E>(), encode: encode::<E>, decode: decode::<E> }
    }
}

impl PartialEq for ErrorType {
    fn eq(&self, other: &Self) -> bool {
        self.id == other.id
    }
}

impl fmt::Debug for ErrorType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}

/// One for all policies: the processes of a rolling deploy may differ in theirs.
const CODEC: Codec = Codec::MessagePack;

fn encode<E: Serialize + DeserializeOwned + 'static>(error: &dyn Any) -> Option<EncodedError> {
    let (encoding, payload) = CODEC.encode(error.downcast_ref::<E>()?).ok()?;
    let name = type_name::<E>();
    // `Bytes` are encoded as they are: they are no error.
    let fits = encoding == Encoding::MESSAGE_PACK && payload.len().max(name.len()) <= EncodedError::LONGEST;
    let is_sound = fits && Codec::unreadable::<E>(encoding, &payload).is_none();
    is_sound.then_some(EncodedError { type_name: name.into(), payload })
}

fn decode<E: DeserializeOwned + Send + Sync + 'static>(
    error: &EncodedError,
) -> Option<Arc<dyn Any + Send + Sync>> {
    Codec::decode::<E>(Encoding::MESSAGE_PACK, &error.payload).map(|error| Arc::new(error) as _)
}

/// The types that a policy names.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct SharedErrors(Vec<ErrorType>);

impl SharedErrors {
    pub(super) fn add<E: Serialize + DeserializeOwned + Send + Sync + 'static>(&mut self) {
        let shared = ErrorType::of::<E>();
        if !self.0.contains(&shared) {
            self.0.push(shared);
        }
    }

    /// Whether each type of the others is named.
    pub(super) fn include(&self, others: &Self) -> bool {
        others.0.iter().all(|other| self.0.contains(other))
    }

    fn named<E: 'static>(&self) -> Option<&ErrorType> {
        self.0.iter().find(|named| named.id == TypeId::of::<E>())
    }

    /// A loader's error for other processes, if its type is named.
    pub(crate) fn encode<E: 'static>(&self, error: &E) -> Option<EncodedError> {
        (self.named::<E>()?.encode)(error)
    }

    /// The error of another process, if it is of the type of this caller's errors.
    pub(crate) fn decode<E: Send + Sync + 'static>(&self, error: &EncodedError) -> Option<Arc<E>> {
        // Two types may have the same encoding, and another meaning.
        let named = self.named::<E>().filter(|named| *named.name == *error.type_name)?;
        (named.decode)(error)?.downcast().ok()
    }
}
