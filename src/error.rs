//! The crate's errors: an opaque [`Error`] with a [kind](ErrorKind), and [`LoadError`] for loaders.

use std::any::Any;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;

use crate::key::{CacheKey, Key};
use crate::observe::with_causes;
use crate::store::{StoreError, StoreErrorKind};

/// Why a call of the guard itself failed.
///
/// Cheap to clone: all waiters of a load share its failure. The text names the phase
/// and, if there is one, the key's digest; never the key, a value or a credential. The cause is
/// in [`source`](std::error::Error::source), or, for [`connect`](crate::StampedeGuard::connect), in the text.
#[derive(Clone)]
pub struct Error {
    repr: Arc<Repr>,
}

#[derive(Clone)]
struct Repr {
    kind: ErrorKind,
    text: String,
    source: Option<Arc<dyn std::error::Error + Send + Sync>>,
    unconfirmed: Vec<InvalidationTarget>,
}

/// A target of an [invalidation](crate::StampedeGuard::invalidation).
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum InvalidationTarget {
    /// A key.
    Key(CacheKey),
    /// A tag.
    Tag(CacheKey),
    /// A path with its query, as the caller wrote it.
    #[cfg(feature = "http")]
    Path(String),
}

/// The classes of [`Error`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The key or a tag is empty, or there are too many tags.
    InvalidKey,
    /// Settings contradict each other or are out of range.
    InvalidPolicy,
    /// The address is malformed, or names a kind of server that is not supported.
    InvalidAddress,
    /// The store could not be reached, or refused a command.
    Store,
    /// A time limit passed: the limit of the load, or of the wait for another caller's load.
    Timeout,
    /// Too many other loads ran for too long, or too many ran at once without the store, or too many callers waited for the key.
    Overloaded,
    /// A value could not be encoded.
    Encode,
    /// A loader of many keys returned no value for this key, and the policy says [`OnAbsent::Fail`](crate::OnAbsent::Fail).
    Absent,
    /// A load requested the key that it is loading.
    Reentrant,
    /// The load's task was dropped before it ended, for instance because its runtime was shut down.
    Vanished,
    /// The guard was shut down.
    Closed,
}

impl Error {
    pub(crate) fn new(kind: ErrorKind, text: impl Into<String>) -> Self {
        Self { repr: Arc::new(Repr { kind, text: text.into(), source: None, unconfirmed: Vec::new() }) }
    }

    pub(crate) fn with_source(
        kind: ErrorKind,
        text: impl Into<String>,
        source: Arc<dyn std::error::Error + Send + Sync>,
    ) -> Self {
        let (text, unconfirmed) = (text.into(), Vec::new());
        Self { repr: Arc::new(Repr { kind, text, source: Some(source), unconfirmed }) }
    }

    /// The same error, with these targets as the ones whose invalidation the store has not confirmed.
    pub(crate) fn with_unconfirmed(self, unconfirmed: Vec<InvalidationTarget>) -> Self {
        Self { repr: Arc::new(Repr { unconfirmed, ..Arc::unwrap_or_clone(self.repr) }) }
    }

    /// The same error under another text.
    pub(crate) fn with_text(self, text: String) -> Self {
        Self { repr: Arc::new(Repr { text, ..Arc::unwrap_or_clone(self.repr) }) }
    }

    pub(crate) fn empty_key() -> Self {
        Self::new(ErrorKind::InvalidKey, "the cache key is empty: give it at least one character")
    }

    /// An error whose text names the key by its digest, between `before` and `after`.
    pub(crate) fn of_key(
        kind: ErrorKind,
        before: impl fmt::Display,
        key: &Key,
        after: impl fmt::Display,
    ) -> Self {
        Self::new(kind, format!("{before} key #{} {after}", key.digest()))
    }

    pub(crate) fn reentrant(key: &Key) -> Self {
        let after = "asked for the same key, which would wait for itself: call the loader directly there, or use another key";
        Self::of_key(ErrorKind::Reentrant, "the load of", key, after)
    }

    pub(crate) fn store(phase: &str, key: &Key, source: StoreError) -> Self {
        let kind = Self::kind_of(&source);
        Self::with_source(kind, format!("{phase} of key #{} failed", key.digest()), Arc::new(source))
    }

    /// The error of a store that can not be used. The text has all causes, which say what to change and name rights and commands, because
    /// a service that starts seldom prints more than the text. There is no source, which a chain printer would print a second time.
    pub(crate) fn unusable(what: &str, source: StoreError) -> Self {
        let kind = Self::kind_of(&source);
        let mut text = format!("{what}: {}", with_causes(&source));
        if source.source.is_none() {
            text.push_str(match kind {
                ErrorKind::Closed => ": make a new guard",
                _ => ": see that the server can be reached; StampedeGuard::doctor examines it",
            });
        }
        Self::new(kind, text)
    }

    pub(crate) fn kind_of(source: &StoreError) -> ErrorKind {
        match source.kind {
            StoreErrorKind::Closed => ErrorKind::Closed,
            _ => ErrorKind::Store,
        }
    }

    pub(crate) fn load_timeout(key: &Key, load_timeout: Duration) -> Self {
        let after = format!("took longer than load_timeout ({load_timeout:?})");
        Self::of_key(ErrorKind::Timeout, "the load of", key, after)
    }

    pub(crate) fn too_many_fail_open_loads(key: &Key, most: usize) -> Self {
        let before = format!(
            "the store can not be asked, and {most} loads (max_fail_open_loads) run without it while"
        );
        Self::of_key(ErrorKind::Overloaded, before, key, "would")
    }

    /// The class of this error.
    pub fn kind(&self) -> ErrorKind {
        self.repr.kind
    }

    /// Whether the store could not be reached, or refused a command.
    pub fn is_store(&self) -> bool {
        self.kind() == ErrorKind::Store
    }

    /// The targets of an [invalidation](crate::StampedeGuard::invalidation), of its short forms and of an
    /// [`expire`](crate::StampedeGuard::expire) that are not confirmed; empty for every other error. The guard has retained them, and
    /// sends them as soon as the store answers, unless it was [shut down](crate::StampedeGuard::shutdown).
    ///
    /// They do not include an `insert`, which is not retained; a change that the store has confirmed and its
    /// [replicas](crate::PolicyBuilder::invalidate_replicas) have not; or invalid names.
    pub fn unconfirmed(&self) -> &[InvalidationTarget] {
        &self.repr.unconfirmed
    }

    /// Whether a time limit passed.
    pub fn is_timeout(&self) -> bool {
        self.kind() == ErrorKind::Timeout
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.repr.text)
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Repr { kind, text, source, .. } = &*self.repr;
        f.debug_struct("Error").field("kind", kind).field("text", text).field("source", source).finish()
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.repr.source.as_deref().map(|source| source as _)
    }
}

/// Why [`get_or_load`](crate::StampedeGuard::get_or_load) has no value.
///
/// A failed load is reported to all callers that waited for it, in every process, so the loader's
/// own error is shared: behind an [`Arc`] in the process that ran it, as text in the others, unless
/// [`share_errors`](crate::PolicyBuilder::share_errors) names its type.
///
/// This is a [`std::error::Error`] for every `E`, also for types that are not errors themselves, such
/// as `String` and `anyhow::Error`. So the loader's error is in the text and not among the sources: `{:#}` prints the loader's
/// error by `{:#}` too (all causes, for `anyhow::Error`), and [`loader`](Self::loader) returns the error itself.
#[derive(Debug)]
#[non_exhaustive]
pub enum LoadError<E> {
    /// A loader returned this error: this caller's loader, or that of another caller in this process with the same type of error; or of a
    /// caller in another process, if the policy [shares](crate::PolicyBuilder::share_errors) errors of this type.
    Loader(Arc<E>),
    /// The load of another caller failed, and only the text of its loader's error is known here (`{:#}` of it, cut to
    /// 1 KiB): the load ran in another process, or earlier ([`error_for`](crate::PolicyBuilder::error_for)), or in this process
    /// for a caller with another type of error.
    Remote(String),
    /// The loader panicked with this message.
    Panicked(String),
    /// The guard could not get a value: a time limit, the store, the key, a load whose task was dropped.
    Guard(Error),
}

impl<E> LoadError<E> {
    /// The loader's own error, if the load ran in this process and its error is an `E`, or if such errors are
    /// [shared](crate::PolicyBuilder::share_errors).
    pub fn loader(&self) -> Option<&E> {
        match self {
            Self::Loader(error) => Some(error),
            Self::Remote(_) | Self::Panicked(_) | Self::Guard(_) => None,
        }
    }

    /// Whether another caller's load failed and only the text of its error is known: see [`Remote`](Self::Remote).
    pub fn is_remote(&self) -> bool {
        matches!(self, Self::Remote(_))
    }

    /// The guard's own error, if the guard itself failed.
    pub fn guard(&self) -> Option<&Error> {
        match self {
            Self::Guard(error) => Some(error),
            Self::Loader(_) | Self::Remote(_) | Self::Panicked(_) => None,
        }
    }
}

impl<E> Clone for LoadError<E> {
    fn clone(&self) -> Self {
        match self {
            Self::Loader(error) => Self::Loader(Arc::clone(error)),
            Self::Remote(text) => Self::Remote(text.clone()),
            Self::Panicked(text) => Self::Panicked(text.clone()),
            Self::Guard(error) => Self::Guard(error.clone()),
        }
    }
}

impl<E> From<Error> for LoadError<E> {
    fn from(error: Error) -> Self {
        Self::Guard(error)
    }
}

impl<E: fmt::Display> fmt::Display for LoadError<E> {
    /// The loader's error is part of this text, because an `E` that is no [`std::error::Error`]
    /// cannot be a source.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Loader(error) if f.alternate() => write!(f, "the load failed: {error:#}"),
            Self::Loader(error) => write!(f, "the load failed: {error}"),
            Self::Remote(text) => write!(f, "another caller's load failed: {text}"),
            Self::Panicked(text) => write!(f, "the load panicked: {text}"),
            Self::Guard(error) => write!(f, "{error}"),
        }
    }
}

impl<E: fmt::Display + fmt::Debug> std::error::Error for LoadError<E> {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            // The source of the guard's error instead of that error: `Display` prints the error, so a chain printer would print it twice.
            Self::Guard(error) => std::error::Error::source(error),
            Self::Loader(_) | Self::Remote(_) | Self::Panicked(_) => None,
        }
    }
}

/// A loader's error as bytes, for callers in other processes with errors of the same type.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct EncodedError {
    pub(crate) type_name: Box<str>,
    pub(crate) payload: Bytes,
}

impl EncodedError {
    /// The longest payload, in bytes. It is limited because a published failure reaches each waiting process.
    pub(crate) const LONGEST: usize = 1024;
}

/// Why a load ended without a value: the failure that all waiters of the flight receive.
#[derive(Clone, Debug)]
pub(crate) enum Failure {
    /// The loader returned an error: its text, the error itself for callers in this process with the same error type, and the
    /// error as bytes for those in other processes.
    Loader { text: Arc<str>, source: Option<Arc<dyn Any + Send + Sync>>, shared: Option<EncodedError> },
    /// The loader panicked.
    Panicked(Arc<str>),
    /// The guard itself failed.
    Guard(Error),
}

impl Failure {
    /// The failure of a load whose task was dropped.
    pub(crate) fn vanished() -> Self {
        Self::Guard(Error::new(
            ErrorKind::Vanished,
            "the load ended without an outcome: its task was dropped",
        ))
    }

    /// The failure of a loader of which only the error's text is known.
    pub(crate) fn with_text(text: impl Into<Arc<str>>) -> Self {
        Self::Loader { text: text.into(), source: None, shared: None }
    }

    /// Converts the failure for a caller whose loader has errors of type `E`; `read` decodes an error of another process.
    pub(crate) fn into_load_error<E: Send + Sync + 'static>(
        self,
        read: impl FnOnce(&EncodedError) -> Option<Arc<E>>,
    ) -> LoadError<E> {
        match self {
            Self::Loader { text, source, shared } => {
                let own = source.and_then(|source| source.downcast().ok());
                match own.or_else(|| read(&shared?)) {
                    Some(error) => LoadError::Loader(error),
                    None => LoadError::Remote(text.as_ref().to_owned()),
                }
            }
            Self::Panicked(text) => LoadError::Panicked(text.as_ref().to_owned()),
            Self::Guard(error) => LoadError::Guard(error),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "in a test the panic is the report")]
mod tests {
    use std::error::Error as _;

    use super::*;
    use crate::store::{StoreError, StoreErrorKind};

    /// A store's advice, with the server's message as its cause.
    #[derive(Debug)]
    struct Advice(std::io::Error);

    impl fmt::Display for Advice {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("see the port")
        }
    }

    impl std::error::Error for Advice {
        fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
            Some(&self.0)
        }
    }

    #[test]
    fn the_error_of_an_unusable_store_names_the_remedy_and_a_chain_repeats_nothing() {
        let cause: Arc<dyn std::error::Error + Send + Sync> =
            Arc::new(Advice(std::io::Error::other("refused by the server")));
        let source = StoreError { kind: StoreErrorKind::Unavailable, source: Some(cause) };
        let error = Error::unusable("connecting to the store failed", source);
        let text =
            "connecting to the store failed: the store is unavailable: see the port: refused by the server";
        assert_eq!(error.to_string(), text);
        assert!(error.source().is_none());
        assert!(error.is_store());
    }

    #[test]
    fn a_store_error_without_a_cause_names_what_to_check() {
        let error = Error::unusable("connecting failed", StoreError::new(StoreErrorKind::TimedOut));
        let text = error.to_string();
        assert!(text.ends_with("can be reached; StampedeGuard::doctor examines it"), "{text}");
        assert!(error.source().is_none());
        let closed = Error::unusable("connecting failed", StoreError::new(StoreErrorKind::Closed));
        assert_eq!(
            (closed.kind(), closed.to_string().ends_with("make a new guard")),
            (ErrorKind::Closed, true)
        );
    }
}
