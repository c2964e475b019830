//! What a guard needs of a service that it wraps, by names under which the compiler can say what is missing.
//!
//! The traits are those of every suitable type: `do_not_recommend` makes the compiler report the trait and its text, instead of the first
//! bound of the blanket implementation that fails.

use std::fmt;

use serde::Serialize;
use serde::de::DeserializeOwned;

/// A service that is [`Clone`], as all suitable ones are; there is nothing to implement.
///
/// A load belongs to no caller, so it takes a clone of the service along.
#[diagnostic::on_unimplemented(
    message = "a guard clones the service that it wraps, and `{Self}` is not `Clone`",
    label = "not `Clone`",
    note = "box it as a `tower::util::BoxCloneService` instead of a `BoxService`, keep what can not be cloned in an `Arc`, or put a \
            `tower::buffer::BufferLayer` inside the guard",
    note = "docs/compile-errors.md: a service that is not `Clone`"
)]
pub trait CloneService: Clone {}

#[diagnostic::do_not_recommend]
impl<S: Clone> CloneService for S {}

/// The error of an HTTP service that a guard wraps: any type that is [`Display`](fmt::Display), [`Send`] and `'static`; there is
/// nothing to implement.
#[diagnostic::on_unimplemented(
    message = "a guard tells waiters the text of the inner service's error, and `{Self}` is not `Display + Send + 'static`",
    label = "an error without a text, or of one thread",
    note = "implement `std::fmt::Display` for `{Self}`, or map the error inside the guard, with `tower::ServiceBuilder::map_err`",
    note = "docs/compile-errors.md: an error without a text"
)]
pub trait ServiceError: fmt::Display + Send + 'static {}

#[diagnostic::do_not_recommend]
impl<E: fmt::Display + Send + 'static> ServiceError for E {}

/// The error of a service that is memoized: any type that is [`Display`](fmt::Display), [`Debug`], [`Send`], [`Sync`] and `'static`;
/// there is nothing to implement.
#[diagnostic::on_unimplemented(
    message = "a guard shares the inner service's error among its waiters, and `{Self}` is not `Display + Debug + Send + Sync + 'static`",
    label = "an error that can not be shared",
    note = "implement `std::fmt::Display` and `Debug` for `{Self}`, or map the error inside the guard, with \
            `tower::ServiceBuilder::map_err`",
    note = "docs/compile-errors.md: an error without a text"
)]
pub trait SharedError: fmt::Display + fmt::Debug + Send + Sync + 'static {}

#[diagnostic::do_not_recommend]
impl<E: fmt::Display + fmt::Debug + Send + Sync + 'static> SharedError for E {}

/// The response of a service that is memoized: any type that serde encodes and reads back, and that is [`Send`] and `'static`; there
/// is nothing to implement.
#[diagnostic::on_unimplemented(
    message = "`memoize` stores what is returned, and `{Self}` is not `Serialize + DeserializeOwned + Send + 'static`",
    label = "a response that can not be stored",
    note = "derive `serde::Serialize` and `serde::Deserialize` for `{Self}`, or map the response to such a type inside `memoize`, with \
            `tower::ServiceBuilder::map_response` or `and_then`",
    note = "docs/compile-errors.md: a response that can not be stored"
)]
pub trait StoredResponse: Serialize + DeserializeOwned + Send + 'static {}

#[diagnostic::do_not_recommend]
impl<T: Serialize + DeserializeOwned + Send + 'static> StoredResponse for T {}
