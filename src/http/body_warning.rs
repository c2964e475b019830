//! Warns the operator that a layer outside the guard hides where request bodies end.

use std::sync::LazyLock;

use http::Request;
use http::header::{CONTENT_LENGTH, TRANSFER_ENCODING};

use crate::http_rules::request::is_zero;
use crate::observe::{LogEveryMinute, log};

/// One limit for all guards of the process, which are usually behind the same layers. Not one of the node's limits:
/// this warning would be due with every request, and would suppress all others.
static WARNED: LazyLock<LogEveryMinute> = LazyLock::new(LogEveryMinute::default);

/// Called for a GET or HEAD that is not looked up because of its body. If no header announces a body, most likely
/// there is none: a layer has wrapped it in a stream, and does so for all requests.
pub(super) fn tell<B>(request: &Request<B>) {
    let headers = request.headers();
    let announces =
        headers.contains_key(TRANSFER_ENCODING) || headers.get(CONTENT_LENGTH).is_some_and(|n| !is_zero(n));
    if !announces && WARNED.is_due() {
        tracing::warn!(
            target: log::HTTP,
            version = ?request.version(),
            "a request that announces no body has one that may go on: it passes the cache by; if a layer outside of the \
             guard wraps requests' bodies (a timeout, decompression), all requests do: put the guard outside of it"
        );
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "in a test the panic is the report")]
mod tests {
    use std::convert::Infallible;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use bytes::Bytes;
    use http::Response;
    use http_body::Frame;
    use http_body_util::combinators::UnsyncBoxBody;
    use http_body_util::{BodyExt as _, Empty, StreamBody};
    use tower::{Layer as _, ServiceExt as _, service_fn};
    use tracing::{Event, Level, Subscriber};
    use tracing_subscriber::layer::{Context, SubscriberExt as _};

    use crate::guard::StampedeGuard;

    /// Counts warnings of this module.
    #[derive(Clone, Default)]
    struct Warnings(Arc<AtomicUsize>);

    impl<S: Subscriber> tracing_subscriber::Layer<S> for Warnings {
        fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
            let meta = event.metadata();
            if *meta.level() == Level::WARN && meta.target() == "stampede_guard::http" {
                self.0.fetch_add(1, Ordering::Relaxed);
            }
        }
    }

    type Body = UnsyncBoxBody<Bytes, Infallible>;

    /// A single test, because the process has only one rate limit.
    #[tokio::test(start_paused = true)]
    async fn a_wrapped_body_bypasses_and_warns_at_a_limited_rate() {
        let warnings = Warnings::default();
        // With a single subscriber, tracing would cache the interest that another test's thread registered.
        let _second = tracing::Dispatch::new(tracing_subscriber::registry());
        let _listening =
            tracing::subscriber::set_default(tracing_subscriber::registry().with(warnings.clone()));
        let shop = StampedeGuard::in_memory().layer(service_fn(|_: http::Request<Body>| async {
            Ok::<_, Infallible>(Response::new(Empty::<Bytes>::new()))
        }));
        let wrapped = || {
            let nothing = futures_util::stream::empty::<Result<Frame<Bytes>, Infallible>>();
            StreamBody::new(nothing).boxed_unsync()
        };
        let ask = async |method: &str, field: (&str, &str), body: Body| {
            let request = http::Request::builder().method(method).uri("http://h/").header(field.0, field.1);
            let response = shop.clone().oneshot(request.body(body).unwrap()).await.unwrap();
            let status = response.headers()["cache-status"].to_str().unwrap().to_owned();
            (warnings.0.load(Ordering::Relaxed), status.ends_with("fwd=bypass; detail=body"))
        };
        assert_eq!(ask("GET", ("accept", "*/*"), Empty::new().boxed_unsync()).await, (0, false));
        for announced in [("content-length", "5"), ("transfer-encoding", "chunked")] {
            assert_eq!(ask("GET", announced, wrapped()).await, (0, true), "{announced:?}");
        }
        for method in ["GET", "HEAD", "GET"] {
            assert_eq!(ask(method, ("content-length", "0"), wrapped()).await, (1, true), "{method}");
        }
        tokio::time::advance(std::time::Duration::from_secs(3_600)).await;
        assert_eq!(ask("HEAD", ("accept", "*/*"), wrapped()).await, (2, true));
    }
}
