//! `PolicyBuilder::share_errors`: in other processes, a loader's error keeps its type or, without that setting, becomes a text.

use std::fmt;
use std::time::Duration;

use futures_util::future::join;
use futures_util::poll;
use serde::{Deserialize, Serialize, Serializer};
use stampede_guard::{LoadError, MemoryStore, Policy, PolicyBuilder, StampedeGuard};

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum ApiError {
    Forbidden,
    Busy { retry_after: u64, why: String },
}

impl fmt::Display for ApiError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the API refused")
    }
}

pub(crate) fn busy() -> ApiError {
    ApiError::Busy { retry_after: 7, why: "it is noon".to_owned() }
}

/// A type of errors with another name and the same encoding.
mod other {
    use super::*;

    #[derive(Clone, Debug, Serialize, Deserialize)]
    pub(super) enum ApiError {
        Forbidden,
    }

    impl fmt::Display for ApiError {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("another API refused")
        }
    }
}

fn policy() -> PolicyBuilder {
    Policy::builder().error_for(Duration::from_secs(3))
}

/// Two guards on one store, as in two processes.
fn two(policies: [PolicyBuilder; 2]) -> [StampedeGuard; 2] {
    let store = MemoryStore::new();
    policies.map(|policy| StampedeGuard::new(store.clone()).with_policy(policy.build().expect("valid")))
}

async fn fails<E>(guard: &StampedeGuard, error: E) -> LoadError<E>
where
    E: fmt::Display + fmt::Debug + Send + Sync + 'static,
{
    guard.get_or_load("key", move || async move { Err::<u8, E>(error) }).await.expect_err("failed")
}

#[tokio::test(start_paused = true)]
async fn a_waiter_in_another_process_gets_the_error_itself() {
    let [here, there] = two([(); 2].map(|()| Policy::builder().share_errors::<ApiError>()));
    let (fail, failing) = tokio::sync::oneshot::channel::<()>();
    let mut leads = Box::pin(here.get_or_load("key", || async move {
        let _ = failing.await;
        Err::<u8, _>(busy())
    }));
    assert!(poll!(&mut leads).is_pending());
    tokio::task::yield_now().await;
    let mut waits = Box::pin(there.get_or_load("key", || async { Ok::<u8, ApiError>(1) }));
    assert!(poll!(&mut waits).is_pending());
    tokio::task::yield_now().await;
    fail.send(()).expect("the load runs");
    let (led, waited) = join(leads, waits).await;
    for error in [led, waited] {
        let error = error.expect_err("failed");
        assert_eq!((error.loader(), error.is_remote()), (Some(&busy()), false), "{error:?}");
        assert_eq!(error.to_string(), "the load failed: the API refused");
    }
}

#[tokio::test(start_paused = true)]
async fn a_later_caller_gets_the_error_itself_here_and_there() {
    let guards = two([(); 2].map(|()| policy().share_errors::<String>().share_errors::<ApiError>()));
    fails(&guards[0], busy()).await;
    for guard in &guards {
        let error = guard.get_or_load("key", || async { Ok::<u8, ApiError>(1) }).await.expect_err("shared");
        assert_eq!(error.loader(), Some(&busy()), "{error:?}");
        // Callers that expect another type of errors receive the text.
        let text = guard.get_or_load("key", || async { Ok::<u8, String>(1) }).await.expect_err("shared");
        assert!(matches!(&text, LoadError::Remote(text) if text == "the API refused"), "{text:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn without_the_setting_on_either_side_the_text_arrives() {
    let shares = || policy().share_errors::<ApiError>();
    for policies in [[shares(), policy()], [policy(), shares()], [policy(), policy()]] {
        let [here, there] = two(policies);
        fails(&here, ApiError::Forbidden).await;
        let failure = fails(&there, busy()).await;
        assert!(matches!(&failure, LoadError::Remote(text) if text == "the API refused"), "{failure:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn an_error_is_not_taken_for_one_of_another_type() {
    let both = || policy().share_errors::<ApiError>().share_errors::<other::ApiError>();
    let [here, there] = two([both(), both()]);
    fails(&here, other::ApiError::Forbidden).await;
    let failure = fails(&there, busy()).await;
    assert!(matches!(&failure, LoadError::Remote(text) if text == "another API refused"), "{failure:?}");
}

/// A type that is serialized as a text and deserialized as a number.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Unreadable {
    #[serde(serialize_with = "as_text")]
    number: u64,
}

fn as_text<S: Serializer>(number: &u64, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(number)
}

impl fmt::Display for Unreadable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("unreadable")
    }
}

#[tokio::test(start_paused = true)]
async fn an_error_that_is_too_long_or_not_read_back_arrives_as_text() {
    let long = ApiError::Busy { retry_after: 7, why: "x".repeat(1_024) };
    let [here, there] = two([(); 2].map(|()| policy().share_errors::<ApiError>()));
    assert_eq!(fails(&here, long.clone()).await.loader(), Some(&long), "its own caller has it");
    let failure = fails(&there, busy()).await;
    assert!(matches!(&failure, LoadError::Remote(text) if text == "the API refused"), "{failure:?}");

    let [here, there] = two([(); 2].map(|()| policy().share_errors::<Unreadable>()));
    fails(&here, Unreadable { number: 7 }).await;
    let failure = fails(&there, Unreadable { number: 8 }).await;
    assert!(matches!(&failure, LoadError::Remote(text) if text == "unreadable"), "{failure:?}");
}

/// Regression: in other processes, the error was reported as a time-out.
#[tokio::test(start_paused = true)]
async fn an_absent_value_is_reported_as_such_in_another_process() {
    use stampede_guard::{ErrorKind, OnAbsent};
    for guard in two([(); 2].map(|()| policy().on_absent(OnAbsent::Fail))) {
        let failure = guard.get_or_load_many(["key"], |_| async { Ok::<[(&str, u8); 0], String>([]) }).await;
        let kind = failure[0].as_ref().expect_err("absent").guard().map(stampede_guard::Error::kind);
        assert_eq!(kind, Some(ErrorKind::Absent));
    }
}
