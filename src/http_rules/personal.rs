//! Detects request extensions that only a layer on the wrong side of the guard sets, and warns the operator.

use std::any::{TypeId, type_name};
use std::fmt;
use std::sync::LazyLock;

use http::{Extensions, Request};

use crate::observe::{LogEveryMinute, log};

/// A type of request extension that marks a request as one client's.
#[derive(Clone, Copy)]
pub(crate) struct PersonalExtension {
    id: TypeId,
    name: &'static str,
    is_in: fn(&Extensions) -> bool,
}

impl PersonalExtension {
    pub(crate) fn of<T: Clone + Send + Sync + 'static>() -> Self {
        let is_in = |extensions: &Extensions| extensions.get::<T>().is_some();
        Self { id: TypeId::of::<T>(), name: type_name::<T>(), is_in }
    }

    pub(crate) fn is_in(&self, extensions: &Extensions) -> bool {
        (self.is_in)(extensions)
    }
}

impl PartialEq for PersonalExtension {
    fn eq(&self, other: &Self) -> bool {
        self.id == other.id
    }
}

impl fmt::Debug for PersonalExtension {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}

/// One limit for all guards of the process, because each request passes the same layers.
static WARNED: LazyLock<LogEveryMinute> = LazyLock::new(LogEveryMinute::default);

/// Warns about the layer that has set an extension of this request.
pub(crate) fn tell<B>(request: &Request<B>, personal: &[PersonalExtension]) {
    let found = personal.iter().find(|personal| personal.is_in(request.extensions()));
    if let Some(found) = found
        && WARNED.is_due()
    {
        tracing::warn!(
            target: log::HTTP,
            extension = found.name,
            "a layer outside of the guard has put this extension into a request: requests bypass the cache, because what such \
             a layer adds to a response would be missing from hits, and a response made with it is one client's; put the guard \
             outside of that layer: in axum, call `.layer(guard)` after `.layer(..)` of the other"
        );
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "in a test the panic is the report")]
mod tests {
    use std::convert::Infallible;
    use std::sync::{Arc, Mutex};

    use bytes::Bytes;
    use http::Response;
    use http_body_util::Empty;
    use tower::{Layer as _, ServiceExt as _, service_fn};
    use tracing::field::{Field, Visit};
    use tracing::{Event, Level, Subscriber};
    use tracing_subscriber::layer::{Context, SubscriberExt as _};

    use super::*;
    use crate::guard::StampedeGuard;
    use crate::http::HttpPolicy;
    use crate::policy::Policy;

    /// The text of each warning of this module.
    #[derive(Clone, Default)]
    struct Warnings(Arc<Mutex<Vec<String>>>);

    impl<S: Subscriber> tracing_subscriber::Layer<S> for Warnings {
        fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
            struct Text(String);
            impl Visit for Text {
                fn record_debug(&mut self, _: &Field, value: &dyn fmt::Debug) {
                    self.0.push_str(&format!("{value:?} "));
                }
            }
            let meta = event.metadata();
            if *meta.level() == Level::WARN && meta.target() == "stampede_guard::http" {
                let mut text = Text(String::new());
                event.record(&mut text);
                self.0.lock().unwrap().push(text.0);
            }
        }
    }

    #[derive(Clone)]
    struct Visitor;

    /// A single test, because the process has only one rate limit.
    #[tokio::test(start_paused = true)]
    async fn a_layer_on_the_wrong_side_is_warned_of_once_with_the_remedy() {
        let warnings = Warnings::default();
        // With a single subscriber, tracing would cache the interest that another test's thread registered.
        let _second = tracing::Dispatch::new(tracing_subscriber::registry());
        let _listening =
            tracing::subscriber::set_default(tracing_subscriber::registry().with(warnings.clone()));
        let http = HttpPolicy::default().personal_extension::<Visitor>();
        let guard = StampedeGuard::in_memory().with_policy(Policy::builder().http(http).build().unwrap());
        let shop = guard.layer(service_fn(|_: Request<Empty<Bytes>>| async {
            Ok::<_, Infallible>(Response::new(Empty::<Bytes>::new()))
        }));
        let ask = async |extension: Option<Visitor>| {
            let mut request = Request::get("http://h/").body(Empty::new()).unwrap();
            if let Some(extension) = extension {
                request.extensions_mut().insert(extension);
            }
            let response = shop.clone().oneshot(request).await.unwrap();
            let bypassed = response.headers()["cache-status"].to_str().unwrap().ends_with("detail=extension");
            (bypassed, warnings.0.lock().unwrap().len())
        };
        assert_eq!(ask(None).await, (false, 0));
        for _ in 0..3 {
            assert_eq!(ask(Some(Visitor)).await, (true, 1));
        }
        let text = warnings.0.lock().unwrap()[0].clone();
        assert!(text.contains("Visitor") && text.contains("put the guard outside of that layer"), "{text}");
    }
}
