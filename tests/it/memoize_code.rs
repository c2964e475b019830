//! The attribute `#[memoize]` beside code of any names: statics, texts and other attributes.

use std::convert::Infallible;
use std::sync::LazyLock;

use stampede_guard::{LoadError, StampedeGuard, memoize};

type Never<T> = Result<T, LoadError<Infallible>>;

/// What a program calls its settings.
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
