//! The functions and traits for the code that the attribute `memoize` writes: that code makes one call of the guard, under a policy with
//! the function's settings.
//!
//! The traits are implemented for every suitable type, like the traits of [`memoize`](super::memoize).

use std::borrow::Borrow;
use std::fmt;
use std::future::Future;
use std::sync::{Arc, RwLock, Weak};

use super::StampedeGuard;
use super::memoize::{CacheableResponse, SharedError};
use crate::error::{Error, LoadError};
use crate::key::CacheKey;
use crate::policy::{Policy, PolicyBuilder};
use crate::sync::{read, write};

/// The return type of a memoized function: a [`Result`], because a load can fail. There is nothing to implement.
#[diagnostic::on_unimplemented(
    message = "a memoized function returns a `Result`, and `{Self}` is none",
    label = "no `Result`",
    note = "a load can fail, by a time limit at least: return `Result<{Self}, LoadError<E>>`, where the body's own error is `E`",
    note = "docs/attribute.md: what the function returns"
)]
pub trait FunctionResult: Sized {
    /// The type of the stored value.
    type Value;
    /// The error of the function if there is no value.
    type Error;
    /// The function's return value for this result.
    fn of(result: Result<Self::Value, Self::Error>) -> Self;
}

impl<T, E> FunctionResult for Result<T, E> {
    type Value = T;
    type Error = E;

    fn of(result: Self) -> Self {
        result
    }
}

/// The error of a memoized function: [`LoadError<E>`](LoadError), where the body's error is `E`, or a type `E` that converts from
/// `LoadError<E>` ([`FromLoadError`]). There is nothing to implement.
pub trait FunctionError: Sized {
    /// The error of the body.
    type Failure;
    /// Converts the guard's error to the function's.
    fn of(error: LoadError<Self::Failure>) -> Self;
}

/// An error type that converts from a [`LoadError`] of itself, by [`From`], as `anyhow::Error` and `Box<dyn Error + Send + Sync>` do.
/// There is nothing else to implement.
#[diagnostic::on_unimplemented(
    message = "a memoized function can not return the error of a load as a `{Self}`",
    label = "not made of a `LoadError`",
    note = "return `Result<_, LoadError<{Self}>>`: the body still returns a `{Self}`; or implement `From<LoadError<{Self}>>` for `{Self}`",
    note = "docs/attribute.md: what the function returns"
)]
pub trait FromLoadError: From<LoadError<Self>> {}

#[diagnostic::do_not_recommend]
impl<E: From<LoadError<E>>> FromLoadError for E {}

impl<E: FromLoadError> FunctionError for E {
    type Failure = E;

    fn of(error: LoadError<E>) -> E {
        error.into()
    }
}

impl<E> FunctionError for LoadError<E> {
    type Failure = E;

    fn of(error: Self) -> Self {
        error
    }
}

/// An argument that the loader owns: any type that is [`Send`] and `'static`. There is nothing to implement.
#[diagnostic::on_unimplemented(
    message = "an argument of a memoized function goes to the task of the load, and `{Self}` is not `Send`",
    label = "an argument of one thread",
    note = "a load is shared by its callers, so a task of its own runs it: take an `Arc` instead of an `Rc`",
    note = "docs/attribute.md: what the loader owns"
)]
pub trait LoaderArgument: Send + 'static {}

#[diagnostic::do_not_recommend]
impl<T: Send + 'static> LoaderArgument for T {}

/// The referent of a reference that is an argument of a memoized function: any type with an owned copy ([`ToOwned`], which every [`Clone`]
/// is) that is [`Send`], [`Sync`] and `'static`. There is nothing to implement.
#[diagnostic::on_unimplemented(
    message = "the loader of a memoized function needs a copy of this argument, and `{Self}` is not `Clone + Send + Sync`",
    label = "can not be copied for the loader",
    note = "the load may run when this call has ended, so it borrows nothing: take the argument in an `Arc`, or derive `Clone`",
    note = "docs/attribute.md: what the loader owns"
)]
pub trait LoaderReferent: ToOwned<Owned: Send + 'static> + Sync + 'static {}

#[diagnostic::do_not_recommend]
impl<T: ToOwned<Owned: Send + 'static> + Sync + 'static + ?Sized> LoaderReferent for T {}

/// The `self` of a memoized method that takes `&self`: any type that is [`Clone`], [`Send`], [`Sync`] and `'static`. There is nothing to
/// implement.
#[diagnostic::on_unimplemented(
    message = "the loader of a memoized method needs a clone of `self`, and `{Self}` is not `Clone + Send + Sync`",
    label = "can not be cloned for the loader",
    note = "the load may run when this call has ended, so it borrows nothing: derive `Clone`, with what is shared in an `Arc`; or take \
            `self: Arc<Self>` or `self: &Arc<Self>`",
    note = "docs/attribute.md: what the loader owns"
)]
pub trait LoaderReceiver: Clone + Send + Sync + 'static {}

#[diagnostic::do_not_recommend]
impl<T: Clone + Send + Sync + 'static> LoaderReceiver for T {}

/// An argument that is a part of the key: any type that is [`Display`](fmt::Display). There is nothing to implement.
#[diagnostic::on_unimplemented(
    message = "an argument of a memoized function is part of its key, and `{Self}` is not `Display`",
    label = "no part of a key",
    note = "leave the argument out by `skip(..)`, or write the key: `key = (\"name\", ..)`",
    note = "docs/attribute.md: the key"
)]
pub trait KeyPart: fmt::Display {}

#[diagnostic::do_not_recommend]
impl<T: fmt::Display + ?Sized> KeyPart for T {}

/// The return type of the body of a function that returns `R`.
pub type BodyOf<R> =
    Result<<R as FunctionResult>::Value, <<R as FunctionResult>::Error as FunctionError>::Failure>;

/// An argument as a part of the key. The return type is not `T`: an unsuitable argument is then one error, without another one for the
/// tuple.
pub fn part<T: KeyPart>(argument: &T) -> &dyn fmt::Display {
    argument
}

/// Checks at compile time that the loader can own this argument.
pub fn argument<T: LoaderArgument>(_argument: &T) {}

/// The loader's copy of an argument.
pub fn owned<T: LoaderReferent + ?Sized>(argument: &T) -> T::Owned {
    argument.to_owned()
}

/// The function that makes the loader's clone of `self`.
pub fn receiver<T: LoaderReceiver>() -> fn(&T) -> T {
    T::clone
}

/// One call of a memoized function.
pub async fn load<R, G, F, Fut>(guard: Result<G, Error>, key: CacheKey, load: F) -> R
where
    R: FunctionResult<Value: CacheableResponse, Error: FunctionError<Failure: SharedError>>,
    G: Borrow<StampedeGuard>,
    F: FnOnce() -> Fut + Send + 'static,
    Fut: Future<Output = BodyOf<R>> + Send + 'static,
{
    let answer = match guard {
        Ok(guard) => guard.borrow().get_or_load(key, load).await,
        Err(error) => Err(error.into()),
    };
    R::of(answer.map_err(FunctionError::of))
}

/// The settings of one function, in a static: they change the policy of each guard that the function is called with.
#[derive(Debug)]
pub struct FunctionSettings {
    change: fn(PolicyBuilder) -> PolicyBuilder,
    made: RwLock<Vec<Made>>,
}

/// A policy that was made for a function. The static owns the policy and not the guard, so it keeps no connection open.
#[derive(Debug)]
struct Made {
    /// The guard's policy, from which `policy` was made. It is compared by address: even a weak reference prevents that another policy
    /// gets this address.
    of: Weak<Policy>,
    policy: Arc<Policy>,
}

impl FunctionSettings {
    /// The settings of a function, which `change` makes in a policy.
    pub const fn new(change: fn(PolicyBuilder) -> PolicyBuilder) -> Self {
        Self { change, made: RwLock::new(Vec::new()) }
    }

    /// The guard, with its present policy changed by these settings. The changed policy is made once for each policy of a guard.
    pub fn on(&self, guard: &StampedeGuard) -> Result<StampedeGuard, Error> {
        let current = guard.current();
        let made = self.find(&current.policy).map_or_else(|| self.make(&current), Ok)?;
        Ok(StampedeGuard {
            route: current.route.clone(),
            ..StampedeGuard::with(Arc::clone(&**current.state), made)
        })
    }

    fn find(&self, policy: &Arc<Policy>) -> Option<Arc<Policy>> {
        let made = read(&self.made);
        let found = made.iter().find(|made| std::ptr::eq(made.of.as_ptr(), Arc::as_ptr(policy)));
        found.map(|made| Arc::clone(&made.policy))
    }

    #[cold]
    fn make(&self, guard: &StampedeGuard) -> Result<Arc<Policy>, Error> {
        let mut policy = (self.change)(guard.policy.to_builder()).build()?;
        guard.state.takes(&mut policy);
        let (of, policy) = (Arc::downgrade(&guard.policy), Arc::new(policy));
        let mut made = write(&self.made);
        // Removes the policies that were made for replaced policies and for dropped guards.
        made.retain(|made| made.of.strong_count() > 0);
        made.push(Made { of, policy: Arc::clone(&policy) });
        Ok(policy)
    }
}
