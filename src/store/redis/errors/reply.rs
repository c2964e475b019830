//! Errors that this crate creates itself for a server's answer, or for none.

use std::future::Future;
use std::time::Duration;

use redis::{RedisError, RedisResult};
use tokio::time::timeout;

/// `work`, or an I/O error of kind `TimedOut`.
pub(crate) async fn bounded<T>(
    limit: Duration,
    work: impl Future<Output = RedisResult<T>>,
) -> RedisResult<T> {
    match timeout(limit, work).await {
        Ok(done) => done,
        Err(_) => Err(RedisError::from(std::io::Error::from(std::io::ErrorKind::TimedOut))),
    }
}

/// The error for an answer that Redis never gives.
pub(crate) fn unexpected() -> RedisError {
    RedisError::from((redis::ErrorKind::UnexpectedReturnType, "unexpected answer"))
}

/// The error for an answer to ROLE by a server that is not a primary.
pub(crate) fn replica() -> RedisError {
    RedisError::from((redis::ErrorKind::Client, REPLICA))
}

pub(crate) fn is_replica(error: &RedisError) -> bool {
    error.to_string().starts_with(REPLICA)
}

/// Whether the server does not take a command of this length, and closes the connection.
pub(crate) fn is_protocol(error: &RedisError) -> bool {
    error.detail().is_some_and(|detail| detail.starts_with("Protocol error"))
}

/// The error's text for a server that is not, or no longer, a primary.
const REPLICA: &str = "this server is a replica";
