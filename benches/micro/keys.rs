//! What it costs to make a key. Each call makes one.

use std::hint::black_box;

use stampede_guard::CacheKey;

use crate::table::Table;
use crate::turns::{calls, compare};

pub(crate) fn rows(table: &mut Table) {
    for (name, text) in [("a text", "user-000042"), ("a text to escape", "a key: with {braces} and spaces")] {
        let guard = calls(move || CacheKey::from(black_box(text)));
        let control = calls(move || black_box(text).to_owned());
        table.add(compare(format!("key of {name} / a copy of it"), guard, control));
    }
    let guard = calls(|| CacheKey::from(black_box(("user", 42_u64))));
    let control = calls(|| {
        let (kind, id) = black_box(("user", 42_u64));
        format!("{kind}:{id}")
    });
    table.add(compare("key of a pair / `format!`".into(), guard, control));
}
