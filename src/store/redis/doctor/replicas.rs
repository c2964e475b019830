//! Checks whether invalidations can wait for as many replicas as the policy requires.

use redis::aio::MultiplexedConnection;
use redis::{RedisResult, Value};

use super::asking::{one, words};
use crate::health::Finding;

/// How long the replicas have to answer. (If there are enough, it takes one round trip.)
const WITHIN_MS: u64 = 500;
/// The cost if they cannot.
const REFUSED: &str =
    "each invalidation, of keys, of tags and by storing, is done and returns an error all the same";

/// Asks how many replicas follow, with WAIT as an invalidation does; `None` if invalidations do not
/// wait.
pub(super) async fn examine(
    commands: &mut MultiplexedConnection,
    wanted: u32,
    user: &str,
) -> RedisResult<Option<Finding>> {
    if wanted == 0 {
        return Ok(None);
    }
    let answer = one(commands, redis::cmd("WAIT").arg(wanted).arg(WITHIN_MS)).await?;
    Ok(Some(match answer {
        Value::Int(following) if following >= i64::from(wanted) => {
            Finding::ok("replicas", format!("{following} follow, invalidate_replicas asks for {wanted}"))
        }
        Value::Int(following) => {
            let found = format!("{following} of {wanted} that invalidate_replicas asks for follow");
            Finding::problem("replicas", found)
                .cost(REFUSED)
                .advice("more replicas that are up, or a smaller invalidate_replicas")
        }
        Value::ServerError(error) if error.code() == "NOPERM" => {
            let found = format!("`{user}` may not WAIT, which invalidate_replicas needs");
            Finding::problem("replicas", found).cost(REFUSED).advice(format!("ACL SETUSER {user} +wait"))
        }
        Value::ServerError(error) => {
            let found = format!("WAIT is refused: {}", words(error.into()));
            Finding::problem("replicas", found)
                .cost(REFUSED)
                .advice("the address of the primary, or no invalidate_replicas")
        }
        _ => Finding::note("replicas", "WAIT was not answered with a number"),
    }))
}
