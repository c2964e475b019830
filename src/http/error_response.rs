//! [`LoadError`] and [`Error`] as responses of axum handlers.

use axum::response::{IntoResponse, Response};
use http::header::{HeaderValue, RETRY_AFTER};
use http::{HeaderName, StatusCode};

use crate::error::{Error, ErrorKind, LoadError};

/// A failed load as a response, so that a handler may end with `?`: 502 if the load failed, panicked or vanished; 503 if there are too
/// many loads or waiters, the store is down or the guard is shut down; 504 after a time limit. These three have `Retry-After: 1`. An
/// error that a retry cannot fix, such as an empty key, is 500.
///
/// The text is fixed: it never contains the loader's error, which belongs in the log.
///
/// # Examples
///
/// ```
/// use axum::{Json, Router, extract::Path, routing::get};
/// use stampede_guard::{LoadError, StampedeGuard};
///
/// let guard = StampedeGuard::in_memory();
/// let user = |Path(id): Path<u64>| async move {
///     let load = move || async move { Err::<String, _>(std::io::Error::other("no route to the database")) };
///     Ok::<_, LoadError<_>>(Json(guard.get_or_load(("user", id), load).await?)) // 502
/// };
/// let app: Router = Router::new().route("/user/{id}", get(user));
/// ```
impl<E> IntoResponse for LoadError<E> {
    fn into_response(self) -> Response {
        match self {
            Self::Loader(_) | Self::Remote(_) | Self::Panicked(_) => response(BAD_GATEWAY),
            Self::Guard(error) => error.into_response(),
        }
    }
}

/// The guard's own failure as a response; see [`LoadError`].
impl IntoResponse for Error {
    fn into_response(self) -> Response {
        response(match self.kind() {
            ErrorKind::Vanished | ErrorKind::Absent => BAD_GATEWAY,
            ErrorKind::Overloaded => {
                (StatusCode::SERVICE_UNAVAILABLE, "too many loads, or too many requests that wait for one\n")
            }
            ErrorKind::Store => {
                (StatusCode::SERVICE_UNAVAILABLE, "the cache in front of this resource is unavailable\n")
            }
            ErrorKind::Closed => (StatusCode::SERVICE_UNAVAILABLE, "this server is shutting down\n"),
            ErrorKind::Timeout => (StatusCode::GATEWAY_TIMEOUT, "the load of this resource took too long\n"),
            ErrorKind::InvalidKey
            | ErrorKind::InvalidPolicy
            | ErrorKind::InvalidAddress
            | ErrorKind::Encode
            | ErrorKind::Reentrant => {
                (StatusCode::INTERNAL_SERVER_ERROR, "the request can not be answered\n")
            }
        })
    }
}

const BAD_GATEWAY: (StatusCode, &str) = (StatusCode::BAD_GATEWAY, "the load of this resource failed\n");

/// The response has no `Cache-Control`: no cache stores such a status by default (RFC 9110, 15.1), and with `no-store` a guard around
/// the handler would not share the failure with the waiters.
fn response((status, text): (StatusCode, &'static str)) -> Response {
    const SOON: [(HeaderName, HeaderValue); 1] = [(RETRY_AFTER, HeaderValue::from_static("1"))];
    if status == StatusCode::INTERNAL_SERVER_ERROR {
        return (status, text).into_response();
    }
    (status, SOON, text).into_response()
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "in a test the panic is the report")]
mod tests {
    use std::sync::Arc;

    use http_body_util::BodyExt as _;

    use super::*;

    const SECRET: &str = "password of db7";

    async fn text(response: Response) -> (u16, bool) {
        let (head, body) = response.into_parts();
        let text = String::from_utf8(body.collect().await.unwrap().to_bytes().into()).unwrap();
        assert!(text.ends_with('\n') && !text.contains(SECRET), "{text}");
        assert!(!head.headers.contains_key("cache-control"));
        (head.status.as_u16(), head.headers.get(RETRY_AFTER).is_some_and(|after| after == "1"))
    }

    #[tokio::test]
    async fn a_failed_load_is_a_502_that_does_not_contain_its_error() {
        let errors = [
            LoadError::Loader(Arc::new(SECRET)),
            LoadError::Remote(SECRET.to_owned()),
            LoadError::Panicked(SECRET.to_owned()),
        ];
        for error in errors {
            assert_eq!(text(error.into_response()).await, (502, true));
        }
    }

    #[tokio::test]
    async fn each_failure_of_the_guard_has_its_status() {
        let kinds = [
            (ErrorKind::Vanished, 502),
            (ErrorKind::Absent, 502),
            (ErrorKind::Overloaded, 503),
            (ErrorKind::Store, 503),
            (ErrorKind::Closed, 503),
            (ErrorKind::Timeout, 504),
            (ErrorKind::InvalidKey, 500),
            (ErrorKind::InvalidPolicy, 500),
            (ErrorKind::InvalidAddress, 500),
            (ErrorKind::Encode, 500),
            (ErrorKind::Reentrant, 500),
        ];
        for (kind, status) in kinds {
            let error = Error::new(kind, SECRET);
            assert_eq!(text(error.clone().into_response()).await, (status, status != 500), "{kind:?}");
            let error = LoadError::<String>::Guard(error);
            assert_eq!(text(error.into_response()).await, (status, status != 500), "{kind:?}");
        }
    }
}
