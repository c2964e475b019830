//! A client of another version of `redis`.

use stampede_guard::StampedeGuard;

use crate::stand_in::older_redis as redis;

fn guard() -> Result<StampedeGuard, redis::RedisError> {
    Ok(StampedeGuard::new(redis::Client::open("redis://127.0.0.1/")?))
}
