//! Invalidates caches of [`stampede_guard`] from the log of a Postgres database, so that no committed change is missed.
//!
//! A program that dies between `COMMIT` and `invalidate` leaves its cache stale. Here the transaction itself says what it changes: it
//! writes a [`LogMessage`] into the database's log, which Postgres keeps if and only if the transaction is committed. One process of the
//! fleet reads the log by a replication slot ([`PostgresLog`]), sends the invalidations, and confirms what it has read only once no
//! process serves what was there before.

mod doctor;
mod error;
mod gate;
mod log;
mod message;
pub mod metrics;
mod names;
mod position;
mod postgres_log;
mod progress;
mod rows;
mod session;
mod source;

pub use doctor::{LogFinding, LogReport};
pub use error::LogError;
pub use message::LogMessage;
pub use position::{InvalidPosition, LogPosition};
pub use postgres_log::{PostgresLog, PostgresLogBuilder};
pub use progress::LogStats;
pub use rows::RowChange;
