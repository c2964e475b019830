//! Functions that `#[memoize]` refuses: `settings` and `signatures` by the attribute itself, `types` by the compiler about what it writes.

mod settings;
mod signatures;
mod types;
