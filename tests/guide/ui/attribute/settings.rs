//! Settings of `#[memoize]` that are missing, wrong or too many.

use std::convert::Infallible;

use stampede_guard::{LoadError, StampedeGuard, memoize};

type Never<T> = Result<T, LoadError<Infallible>>;

#[memoize(name = "no_guard")]
async fn no_guard(guard: &StampedeGuard) -> Never<u8> {
    Ok(1)
}

#[memoize(guard = guard, skip(guard))]
async fn no_name(guard: &StampedeGuard) -> Never<u8> {
    Ok(1)
}

#[memoize(guard = guard, name = "", skip(guard))]
async fn empty_name(guard: &StampedeGuard) -> Never<u8> {
    Ok(1)
}

#[memoize(guard = guard, name = 7, skip(guard))]
async fn no_text(guard: &StampedeGuard) -> Never<u8> {
    Ok(1)
}

#[memoize(guard = guard, name = "both", key = "both")]
async fn both(guard: &StampedeGuard) -> Never<u8> {
    Ok(1)
}

#[memoize(guard = guard, key = "key", skip(guard))]
async fn skips_of_a_key(guard: &StampedeGuard) -> Never<u8> {
    Ok(1)
}

#[memoize(guard = guard, name = "unknown", tags = ["catalog"])]
async fn unknown(guard: &StampedeGuard) -> Never<u8> {
    Ok(1)
}

#[memoize(guard = guard, name = "twice", fresh_for = "1s", fresh_for = "2s")]
async fn twice(guard: &StampedeGuard) -> Never<u8> {
    Ok(1)
}

#[memoize(guard = guard, name = "unit", fresh_for = "30 parsecs")]
async fn bad_unit(guard: &StampedeGuard) -> Never<u8> {
    Ok(1)
}

#[memoize(guard = guard, name = "long", fresh_for = "18446744073709551615s 1000ms")]
async fn too_long(guard: &StampedeGuard) -> Never<u8> {
    Ok(1)
}

#[memoize(guard = guard, name = "number", fresh_for = 30)]
async fn a_number(guard: &StampedeGuard) -> Never<u8> {
    Ok(1)
}

#[memoize(guard = guard, name = "skip", skip(gard))]
async fn no_such_argument(guard: &StampedeGuard) -> Never<u8> {
    Ok(1)
}

#[memoize(guard = guard, name = "skip", skip(guard, guard))]
async fn skipped_twice(guard: &StampedeGuard) -> Never<u8> {
    Ok(1)
}

#[memoize(guard = guard, name = "skip", skip = "guard")]
async fn no_list(guard: &StampedeGuard) -> Never<u8> {
    Ok(1)
}

#[memoize(guard, name = "value")]
async fn no_value(guard: &StampedeGuard) -> Never<u8> {
    Ok(1)
}
