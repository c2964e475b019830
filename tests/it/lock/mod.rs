//! The lock toolkit, row by row of the systems it learned from; see `ROWS.md`.

pub(crate) mod book;
pub(crate) mod mutex;
mod nodes;
mod rows;
pub(crate) mod semaphore;
