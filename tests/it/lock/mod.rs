//! The lock toolkit, tested row by row against the earlier systems; see `ROWS.md`.

pub(crate) mod book;
pub(crate) mod mutex;
mod nodes;
mod rows;
pub(crate) mod semaphore;
