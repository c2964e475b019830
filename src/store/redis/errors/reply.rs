//! Errors that this crate makes itself of what a server has answered, or has not.

use std::future::Future;
use std::time::Duration;

use redis::{RedisError, RedisResult};
use tokio::time::timeout;

/// `work`, or the I/O error of a time-out.
pub(crate) async fn bounded<T>(
    limit: Duration,
    work: impl Future<Output = RedisResult<T>>,
) -> RedisResult<T> {
    match timeout(limit, work).await {
        Ok(done) => done,
        Err(_) => Err(RedisError::from(std::io::Error::from(std::io::ErrorKind::TimedOut))),
    }
}

/// For an answer that no Redis gives.
pub(crate) fn unexpected() -> RedisError {
    RedisError::from((redis::ErrorKind::UnexpectedReturnType, "unexpected answer"))
}

/// For the answer to ROLE of a server that is no primary.
pub(crate) fn replica() -> RedisError {
    RedisError::from((redis::ErrorKind::Client, REPLICA))
}

pub(crate) fn is_replica(error: &RedisError) -> bool {
    error.to_string().starts_with(REPLICA)
}

/// What is said of a server that is no primary, or has ceased to be one.
const REPLICA: &str = "this server is a replica";
