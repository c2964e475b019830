//! Conversion of a caller's `T` and `E` to the bytes and texts that are shared, and back.

use std::any::type_name;
use std::fmt;
use std::future::Future;
use std::marker::PhantomData;
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::load_context::{LoadContext, Settings};
use crate::error::{Error, Failure, LoadError};
use crate::failure_text::failure_text;
use crate::guard_state::Node;
use crate::key::Key;
use crate::loader::{Given, LoadResult, Loader, Mark, Mode};
use crate::observe::{Count, log, warn_if};
use crate::policy::Policy;
use crate::sync::lock;
use crate::value::codec::Codec;
use crate::value::entry::Entry;
use crate::value::freshness::Serves;
use crate::value::reader::{InPlace, Open};

/// Decodes an entry as a `T`.
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
    type Room = InPlace;

    fn open(&self, entry: &mut Entry, _now: u64) -> Option<T> {
        self.codec.decode(entry.encoding, &mut entry.payload)
    }
}

/// Decodes an entry as a `T`, for a caller that wants a new load: it accepts no older value.
pub(crate) struct DecodeAnew<T>(pub(crate) Decode<T>);

impl<T: DeserializeOwned + 'static> Open for DecodeAnew<T> {
    type Value = T;
    type Room = InPlace;

    fn serves(&self, _entry: &Entry, _now: u64) -> Serves {
        Serves::No
    }

    fn stands_in(&self, _entry: &Entry, _now: u64) -> bool {
        false
    }

    /// Otherwise each of the concurrent callers would load for itself.
    fn goes_on_alone(&self) -> bool {
        false
    }

    fn open(&self, entry: &mut Entry, now: u64) -> Option<T> {
        self.0.open(entry, now)
    }
}

/// The slot in which a caller's own loader leaves its typed result for that caller alone.
pub(crate) type Own<T, E> = Arc<Mutex<Option<Result<T, LoadError<E>>>>>;

/// Boxes a caller's `load`.
pub(crate) fn loader<T, E, F, Fut>(
    load: F,
    node: &Arc<Node>,
    policy: &Arc<Policy>,
    key: &Key,
    own: &Own<T, E>,
) -> Loader
where
    T: Serialize + DeserializeOwned + Send + 'static,
    E: fmt::Display + fmt::Debug + Send + Sync + 'static,
    F: FnOnce() -> Fut + Send + 'static,
    Fut: Future<Output = Result<T, E>> + Send + 'static,
{
    let (own, node, policy, key) = (Arc::clone(own), Arc::clone(node), Arc::clone(policy), key.clone());
    Loader::new(move |given| async move {
        let settings = Mutex::new(Settings::new(&policy, Bytes::new()));
        let (result, kept) = concluded(&key, load().await, given.mode, &node, &policy, &settings);
        *lock(&own) = Some(kept);
        result.into()
    })
}

/// Boxes a caller's `load` that takes a context.
pub(crate) fn loader_with<T, E, F, Fut>(
    load: F,
    node: &Arc<Node>,
    policy: &Arc<Policy>,
    key: &Key,
    own: &Own<T, E>,
) -> Loader
where
    T: Serialize + DeserializeOwned + Send + 'static,
    E: fmt::Display + fmt::Debug + Send + Sync + 'static,
    F: FnOnce(LoadContext<T>) -> Fut + Send + 'static,
    Fut: Future<Output = Result<T, E>> + Send + 'static,
{
    let (own, node, policy, key) = (Arc::clone(own), Arc::clone(node), Arc::clone(policy), key.clone());
    Loader::new(move |given| async move {
        let Given { mode, previous, deadline, lost, announcer: _ } = given;
        let (previous, validator) = match previous {
            Some(mut entry) => {
                (policy.codec.decode(entry.encoding, &mut entry.payload), Bytes::from(entry.validator))
            }
            None => (None, Bytes::new()),
        };
        // A validator without its value is useless: "not modified" would then yield no value.
        let validator = if previous.is_some() { validator } else { Bytes::new() };
        let settings = Arc::new(Mutex::new(Settings::new(&policy, validator)));
        let (given, of) = (Arc::clone(&settings), Arc::clone(&policy));
        let context = LoadContext::new(previous, deadline, lost, given, Arc::clone(&node), mode, of);
        let loaded = load(context).await;
        let (result, kept) = concluded(&key, loaded, mode, &node, &policy, &settings);
        *lock(&own) = Some(kept);
        result.into()
    })
}

/// A load's result for its waiters, and for its own caller.
fn concluded<T: Serialize + DeserializeOwned + 'static, E>(
    key: &Key,
    loaded: Result<T, E>,
    mode: Mode,
    node: &Node,
    policy: &Policy,
    settings: &Mutex<Settings>,
) -> (LoadResult, Result<T, LoadError<E>>)
where
    E: fmt::Display + Send + Sync + 'static,
{
    match loaded {
        Ok(value) => (shared(key, mode, node, policy, &mut lock(settings), &value), Ok(value)),
        Err(error) => {
            let text = failure_text(&error);
            let error = Arc::new(error);
            let failure = Failure::Loader { text, source: Some(Arc::clone(&error) as _) };
            (LoadResult::Failed(failure), Err(LoadError::Loader(error)))
        }
    }
}

/// The result that the other waiters of a loaded value are given.
fn shared<T: Serialize + DeserializeOwned + 'static>(
    key: &Key,
    mode: Mode,
    node: &Node,
    policy: &Policy,
    settings: &mut Settings,
    value: &T,
) -> LoadResult {
    if mode == Mode::Alone {
        return LoadResult::Uncacheable { mark: Mark::No };
    }
    // Check that the value can be read back. Otherwise waiters and later callers would find a useless entry and load
    // again, unnoticed. (A value that is too long is not shared, so it need not be checked.)
    let encoded = policy.codec.encode(value).and_then(|(encoding, payload)| {
        let fits = payload.len() <= policy.max_body;
        let unreadable = fits.then(|| policy.codec.unreadable::<T>(encoding, &payload)).flatten();
        unreadable.map_or(Ok((encoding, payload)), Err)
    });
    match encoded {
        Ok((_, payload)) if payload.len() > policy.max_body => {
            unshareable(node, key, Unshareable::TooLong { size: payload.len(), max_body: policy.max_body });
            LoadResult::Uncacheable { mark: Mark::IfUnserved }
        }
        Ok((encoding, payload)) => {
            if !settings.decided && policy.is_negative(encoding, &payload) {
                settings.make_negative();
            }
            if settings.negative {
                node.count(Count::negatives);
            }
            let (lifetimes, validator) = (settings.lifetimes(), settings.validator.clone());
            let tags = std::mem::take(&mut settings.tags);
            LoadResult::Value { encoding, payload, lifetimes, validator, tags, brief: None }
        }
        Err(error) => {
            unshareable(node, key, Unshareable::NotCoded { error: &error, value: type_name::<T>() });
            LoadResult::Uncacheable { mark: Mark::No }
        }
    }
}

/// Why a loaded value is given to its own caller only.
enum Unshareable<'a> {
    TooLong {
        size: usize,
        max_body: usize,
    },
    /// It cannot be encoded, or not be decoded again.
    NotCoded {
        error: &'a Error,
        value: &'static str,
    },
}

/// Warns the operator that this key has no stampede protection.
fn unshareable(node: &Node, key: &Key, why: Unshareable<'_>) {
    let is_news = node.unshareable();
    match why {
        Unshareable::TooLong { size, max_body } => {
            warn_if!(
                log::GUARD,
                is_news,
                ?key,
                size,
                max_body,
                "a loaded value is longer than max_body: it is not shared"
            );
        }
        // Logged without its source, because a serializer's error may contain the value.
        Unshareable::NotCoded { error, value } => {
            warn_if!(log::GUARD, is_news, ?key, %error, value, "a loaded value is not shared: `Codec::check` has the reason");
        }
    }
}
