//! From a caller's `T` and `E` to the bytes and texts that are shared, and back.

use std::fmt;
use std::future::Future;
use std::marker::PhantomData;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::codec::Codec;
use crate::entry::Entry;
use crate::error::{Failure, LoadError, failure_text};
use crate::node::{LoadResult, Loader, Mode, Open};
use crate::policy::Policy;
use crate::sync::lock;

/// An entry as a `T`.
pub(crate) struct Decode<T> {
    codec: Codec,
    value: PhantomData<fn() -> T>,
}

impl<T> Decode<T> {
    pub(crate) fn new(policy: &Policy) -> Self {
        Self { codec: policy.codec, value: PhantomData }
    }
}

impl<T: DeserializeOwned + 'static> Open for Decode<T> {
    type Value = T;

    fn open(&self, entry: &mut Entry, _now: u64) -> Option<T> {
        self.codec.decode(entry.encoding, &mut entry.payload)
    }
}

/// Where a caller's own loader leaves its result, typed, for that caller alone.
pub(crate) type Own<T, E> = Arc<Mutex<Option<Result<T, LoadError<E>>>>>;

/// Boxes a caller's `load`.
pub(crate) fn loader<T, E, F, Fut>(load: F, policy: &Policy, own: &Own<T, E>) -> Loader
where
    T: Serialize + Send + 'static,
    E: fmt::Display + fmt::Debug + Send + Sync + 'static,
    F: FnOnce() -> Fut + Send + 'static,
    Fut: Future<Output = Result<T, E>> + Send + 'static,
{
    let own = Arc::clone(own);
    let Policy { codec, fresh_for, max_body, .. } = *policy;
    Loader::new(move |mode| async move {
        let (result, kept) = match load().await {
            Ok(value) => (shared(mode, codec, fresh_for, max_body, &value), Ok(value)),
            Err(error) => {
                let text = failure_text(&error);
                let error = Arc::new(error);
                let failure = Failure::Loader { text, source: Some(Arc::clone(&error) as _) };
                (LoadResult::Failed(failure), Err(LoadError::Loader(error)))
            }
        };
        *lock(&own) = Some(kept);
        result.into()
    })
}

/// What others are given of a loaded value.
fn shared<T: Serialize + 'static>(
    mode: Mode,
    codec: Codec,
    fresh_for: Duration,
    max_body: usize,
    value: &T,
) -> LoadResult {
    if mode == Mode::Alone {
        return LoadResult::Uncacheable { mark: false };
    }
    match codec.encode(value) {
        Ok((_, payload)) if payload.len() > max_body => LoadResult::Uncacheable { mark: true },
        Ok((encoding, payload)) => LoadResult::Value { encoding, payload, fresh_for, brief: None },
        Err(error) => {
            tracing::warn!(error = &error as &dyn std::error::Error, "a loaded value is not cached");
            LoadResult::Uncacheable { mark: false }
        }
    }
}
