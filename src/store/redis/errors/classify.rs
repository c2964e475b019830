//! Classifies the server's errors.

use std::error::Error;

use redis::{ErrorKind, RedisError};

use super::advice::{AdvisedError, advised, on_refusal};
use super::reply::is_protocol;
use crate::store::{StoreError, StoreErrorKind};

/// What happens to the connection that returned an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ConnectionFate {
    Keep,
    /// It is broken, its user has lost the rights, or it leads to a server that is not the primary.
    Drop,
}

/// Classifies an error: transport, not the primary, rights lost, transient, permanent.
pub(crate) fn judge(error: &RedisError) -> (StoreErrorKind, ConnectionFate) {
    if is_protocol(error) {
        // The same command would break the next connection, too.
        return (StoreErrorKind::Refused, ConnectionFate::Drop);
    }
    match code(error) {
        // A demoted primary answers reads for ever: only a new connection, to the server that the name stands for
        // now, helps. The same for a changed password.
        Some("READONLY" | "MASTERDOWN" | "NOAUTH" | "WRONGPASS") => {
            (StoreErrorKind::Unavailable, ConnectionFate::Drop)
        }
        Some(
            "BUSY" | "LOADING" | "OOM" | "TRYAGAIN" | "CLUSTERDOWN" | "MISCONF" | "NOREPLICAS" | "UNKILLABLE",
        ) => (StoreErrorKind::Transient, ConnectionFate::Keep),
        Some(_) => (StoreErrorKind::Refused, ConnectionFate::Keep),
        None if error.kind() == ErrorKind::UnexpectedReturnType => {
            (StoreErrorKind::Refused, ConnectionFate::Keep)
        }
        None => (StoreErrorKind::Unavailable, ConnectionFate::Drop),
    }
}

/// An error for the guard. It keeps the server's words unless they quote the command.
pub(crate) fn store_error(kind: StoreErrorKind, error: RedisError) -> StoreError {
    let advice = on_refusal(&error);
    StoreError { kind, source: Some(advised(advice, unquoted(error))) }
}

/// The error without the server's words if they quote a command: keys and passwords must not reach a log or an
/// error.
pub(crate) fn unquoted(error: RedisError) -> RedisError {
    let text = error.to_string();
    if !text.contains("sg1:") && !text.contains("args beginning with") {
        return error;
    }
    // redis-rs takes any first word for the code.
    let code = code(&error).filter(|code| code.bytes().all(|byte| byte.is_ascii_uppercase()));
    redis::make_extension_error(code.unwrap_or("ERR").to_owned(), None)
}

/// The text of an event about an error: what to do, if that is known, and what happened.
pub(crate) fn reason(error: &StoreError) -> String {
    let Some(first) = &error.source else { return error.to_string() };
    match first.downcast_ref::<AdvisedError>().and_then(Error::source) {
        Some(cause) => format!("{first}: {cause}"),
        None => first.to_string(),
    }
}

/// The code of the server's error behind this one.
pub(crate) fn code_of(error: &StoreError) -> Option<&str> {
    let source = error.source.as_ref()?;
    let cause: &(dyn Error + 'static) = match source.downcast_ref::<AdvisedError>() {
        Some(advised) => advised.source()?,
        None => &**source,
    };
    code(cause.downcast_ref()?)
}

/// The code of a server's error; `None` for an error of the transport or of the client.
pub(crate) fn code(error: &RedisError) -> Option<&str> {
    let code = error.code()?;
    if code != "ERR" {
        return Some(code);
    }
    // Before 7.0, the error of a command inside a script is wrapped:
    // `ERR Error running script (call to f_..): @user_script:3: -OOM command not allowed ..`.
    let inner = error.detail().filter(|detail| detail.starts_with("Error running script"));
    let inner =
        inner.and_then(|detail| detail.rsplit_once(": -")).and_then(|(_, rest)| rest.split(' ').next());
    Some(inner.unwrap_or(code))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn server(line: &str) -> RedisError {
        let reply = redis::parse_redis_value(format!("-{line}\r\n").as_bytes()).expect("one error line");
        reply.extract_error().expect_err("it is an error")
    }

    #[test]
    fn each_class_of_error_has_its_consequence() {
        use StoreErrorKind::{Refused, Transient, Unavailable};
        for (line, verdict) in [
            ("READONLY You can't write against a read only replica.", (Unavailable, ConnectionFate::Drop)),
            ("MASTERDOWN Link with MASTER is down", (Unavailable, ConnectionFate::Drop)),
            ("NOAUTH Authentication required.", (Unavailable, ConnectionFate::Drop)),
            ("OOM command not allowed when used memory > 'maxmemory'.", (Transient, ConnectionFate::Keep)),
            ("LOADING Redis is loading the dataset in memory", (Transient, ConnectionFate::Keep)),
            ("BUSY Redis is busy running a script.", (Transient, ConnectionFate::Keep)),
            ("NOPERM this user has no permissions", (Refused, ConnectionFate::Keep)),
            ("CROSSSLOT Keys in request don't hash to the same slot", (Refused, ConnectionFate::Keep)),
            ("ERR unknown command 'EVALSHA'", (Refused, ConnectionFate::Keep)),
            ("ERR Protocol error: invalid bulk length", (Refused, ConnectionFate::Drop)),
            (
                "ERR Error running script (call to f_1): @user_script:3: @user_script: 3: -OOM command not",
                (Transient, ConnectionFate::Keep),
            ),
        ] {
            assert_eq!(judge(&server(line)), verdict, "{line}");
        }
        let broken = RedisError::from(std::io::Error::from(std::io::ErrorKind::BrokenPipe));
        assert_eq!(judge(&broken), (Unavailable, ConnectionFate::Drop));
        // A server that answers is up.
        assert_eq!(judge(&crate::store::redis::errors::reply::unexpected()), (Refused, ConnectionFate::Keep));
    }

    #[test]
    fn an_error_does_not_quote_keys_nor_passwords() {
        for (line, told) in [
            ("unknown command 'EVALSHA', with args beginning with: 'sg1:e:{ns:secret}'", "runs no scripts"),
            ("unknown command `EVAL`, with args beginning with: `1`, `lock:secret`, ", "runs no scripts"),
            ("unknown command 'HELLO', with args beginning with: '3' 'AUTH' 'u' 'secret'", "doctor() names"),
            ("unknown command `TIME`, with args beginning with: ", "SentinelClient"),
            ("Unknown Redis command called from script script: on @user_script:79.", "doctor() names"),
            ("Unknown Redict command called from script script: 4951, on @user_script:79.", "doctor() names"),
            ("Unknown command called from script script: on @user_script:79.", "doctor() names"),
        ] {
            let error = store_error(StoreErrorKind::Refused, server(&format!("ERR {line}")));
            let source = error.source.clone().expect("there is a cause");
            assert!(source.to_string().contains(told), "{source}");
            assert!(!format!("{source:?} {}", reason(&error)).contains("secret"), "{source:?}");
        }
        let optional =
            store_error(StoreErrorKind::Refused, server("ERR unknown command 'CONFIG', with args"));
        assert!(!reason(&optional).contains("doctor"), "{optional:?}");
    }
}
