//! The attribute `#[memoize]` in programs whose own names could collide with the generated code: statics, texts and other attributes.

use std::convert::Infallible;
use std::sync::LazyLock;

use stampede_guard::{LoadError, StampedeGuard, memoize};
use tracing::instrument;

use crate::traces::Spans;

type Never<T> = Result<T, LoadError<Infallible>>;

/// A program's type of settings.
struct Setup {
    guard: LazyLock<StampedeGuard>,
    name: &'static str,
    tags: [&'static str; 1],
    discount: u64,
}

static SETTINGS: Setup =
    Setup { guard: LazyLock::new(StampedeGuard::in_memory), name: "setup", tags: ["prices"], discount: 1 };

#[memoize(guard = SETTINGS.guard, key = (SETTINGS.name, id), fresh_for = "30s", policy = |policy| policy.tags(SETTINGS.tags))]
async fn setup(id: u64) -> Never<u64> {
    Ok(id - SETTINGS.discount)
}

#[tokio::test]
async fn a_static_of_the_program_has_the_name_of_one_of_the_attribute() {
    assert_eq!(setup(7).await.expect("loaded"), 6);
    assert_eq!(setup_key(7).to_string(), "setup:7");
    assert_eq!(SETTINGS.guard.get(setup_key(7)).await.expect("found"), Some(6_u64));
}

/// No variable may shadow a static.
#[allow(non_upper_case_globals, reason = "names of the attribute's variables")]
mod lower_case {
    use super::*;

    static guard: LazyLock<StampedeGuard> = LazyLock::new(StampedeGuard::in_memory);
    static key: &str = "lower";
    static builder: [&str; 1] = ["prices"];
    static change: u64 = 1;
    static result: u64 = 2;

    #[memoize(guard = guard, key = (key, id), policy = |policy| policy.tags(builder))]
    pub(super) async fn lower(id: u64) -> Never<u64> {
        Ok(id + change + result)
    }
}

#[tokio::test]
async fn statics_of_the_program_have_the_names_of_variables_of_the_attribute() {
    assert_eq!(lower_case::lower(7).await.expect("loaded"), 10);
    assert_eq!(lower_case::lower_key(7).to_string(), "lower:7");
}

struct Session(&'static str);

#[memoize(guard = GUARD, key = ("user", "session", id, format!("{page:0width$}")))]
async fn orders(
    user: String,
    session: &'static Session,
    id: u64,
    page: u8,
    width: usize,
    user_page: u8,
) -> Never<String> {
    Ok(format!("{user}{} {id} {page} {width} {user_page}", session.0))
}

static GUARD: LazyLock<StampedeGuard> = LazyLock::new(StampedeGuard::in_memory);

#[tokio::test]
async fn the_key_function_has_an_argument_if_a_format_string_captures_it_and_not_for_a_word_in_a_text() {
    static SESSION: Session = Session("'s");
    let orders = orders("Ada".to_owned(), &SESSION, 7, 1, 3, 2).await;
    assert_eq!(orders.expect("loaded"), "Ada's 7 1 3 2");
    let key = orders_key(7, 1, 3);
    assert_eq!(key.to_string(), "user:session:7:001");
    assert!(GUARD.get::<String>(key).await.expect("found").is_some());
}

#[memoize(guard = guard, name = "around", skip(guard))]
#[instrument(skip_all)]
async fn around(guard: &StampedeGuard, id: u64) -> Never<u64> {
    Ok(id)
}

#[instrument(skip_all)]
#[memoize(guard = guard, name = "inside", skip(guard))]
async fn inside(guard: &StampedeGuard, id: u64) -> anyhow::Result<u64> {
    Ok(id)
}

#[tokio::test]
async fn an_attribute_is_around_the_call_below_and_a_part_of_the_body_above() {
    let (guard, spans) = (StampedeGuard::in_memory(), Spans::default());
    let _listening = spans.listen();
    for _ in 0..2 {
        assert_eq!(around(&guard, 7).await.expect("loaded"), 7);
        assert_eq!(inside(&guard, 7).await.expect("loaded"), 7);
    }
    let parents = |name| spans.named(name).into_iter().map(|span| span.within).collect::<Vec<_>>();
    assert_eq!(parents("around"), ["", ""]);
    assert_eq!(parents("inside"), ["stampede_guard.load"]);
}
