//! A load runs inside the span of the request that brought its loader, although it runs in another task.

use std::sync::{Arc, LazyLock, Mutex};
use std::time::Duration;

use bytes::Bytes;
use futures_util::{StreamExt as _, stream};
use http::Method;
use http_body::Frame;
use http_body_util::{BodyExt as _, StreamBody};
use stampede_guard::StampedeGuard;
use stampede_guard::http::HttpPolicy;
use tower::ServiceExt as _;
use tracing::field::{Field, Visit};
use tracing::{Dispatch, Instrument as _, Subscriber};
use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::layer::{Context, SubscriberExt as _};
use tracing_subscriber::registry::LookupSpan;

use super::kit::{
    Boxed, Inner, all, ask, get, policy, read, request, respond, secs, settle, shop, shop_with, whole,
};

/// For each event with the target `probe`, the spans around it, the innermost first. The span of a request is named with its number.
#[derive(Clone, Default)]
struct Scopes(Arc<Mutex<Vec<Vec<String>>>>);

struct Label(String);

impl Visit for Label {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        if field.name() == "caller" {
            self.0 = format!("{}{value:?}", self.0);
        }
    }
}

impl<S: Subscriber + for<'a> LookupSpan<'a>> tracing_subscriber::Layer<S> for Scopes {
    fn on_new_span(
        &self,
        span: &tracing::span::Attributes<'_>,
        id: &tracing::span::Id,
        context: Context<'_, S>,
    ) {
        let mut label = Label(span.metadata().name().to_owned());
        span.record(&mut label);
        context.span(id).unwrap().extensions_mut().insert(label);
    }

    fn on_event(&self, event: &tracing::Event<'_>, context: Context<'_, S>) {
        if event.metadata().target() == "probe" {
            let scope = context.event_scope(event).into_iter().flatten();
            let names = scope.map(|span| span.extensions().get::<Label>().unwrap().0.clone());
            self.0.lock().unwrap().push(names.collect());
        }
    }
}

/// With a single subscriber, tracing asks the thread that first meets a span whether a subscriber is interested, and
/// caches the answer for good: another test's thread answers no. With two subscribers it asks each of them.
static SECOND: LazyLock<Dispatch> = LazyLock::new(|| Dispatch::new(tracing_subscriber::registry()));

impl Scopes {
    fn listen(&self) -> tracing::subscriber::DefaultGuard {
        self.listen_to(LevelFilter::TRACE)
    }

    fn listen_to(&self, most: LevelFilter) -> tracing::subscriber::DefaultGuard {
        LazyLock::force(&SECOND);
        tracing::subscriber::set_default(tracing_subscriber::registry().with(most).with(self.clone()))
    }

    fn taken(&self) -> Vec<String> {
        self.0.lock().unwrap().drain(..).map(|scope| scope.join(" < ")).collect()
    }
}

/// An inner service that emits a `probe` event for each call, so that the test sees its spans.
fn telling(answer: impl Fn(usize) -> http::Response<Boxed> + Send + Sync + 'static) -> Inner {
    Inner::with(move |n, _| {
        tracing::info!(target: "probe", "");
        Ok(answer(n))
    })
}

/// Sends concurrent requests, each in a separate span. The first one leads.
async fn ask_in_spans(inner: &Inner, callers: std::ops::Range<u64>) -> super::kit::Shop {
    let shop = shop(inner);
    let clients = callers.map(|caller| {
        let shop = shop.clone();
        let span = tracing::info_span!(parent: None, "request", caller);
        tokio::spawn(async move { ask(&shop, get("/")).await }.instrument(span))
    });
    let clients = clients.collect();
    settle().await;
    inner.gate.open();
    all(clients).await;
    shop
}

#[tokio::test(start_paused = true)]
async fn the_load_runs_inside_the_leaders_span() {
    let scopes = Scopes::default();
    let _listening = scopes.listen();
    let inner = telling(|n| respond(200, &[], whole(n.to_string()))).held();
    ask_in_spans(&inner, 1..6).await;
    assert_eq!(scopes.taken(), ["stampede_guard.load < request1"]);
}

#[tokio::test(start_paused = true)]
async fn a_load_that_is_taken_over_runs_inside_the_span_of_its_loaders_request() {
    let scopes = Scopes::default();
    let _listening = scopes.listen();
    let inner = telling(|n| {
        assert!(n > 1, "scripted panic");
        respond(200, &[], whole(n.to_string()))
    })
    .held();
    ask_in_spans(&inner, 1..4).await;
    let scopes = scopes.taken();
    assert_eq!(scopes[0], "stampede_guard.load < request1");
    assert!(
        ["2", "3"].iter().any(|n| scopes[1] == format!("stampede_guard.load < request{n}")),
        "{scopes:?}"
    );
    assert_eq!(scopes.len(), 2);
}

#[tokio::test(start_paused = true)]
async fn a_request_outside_a_flight_runs_in_its_own_span() {
    let scopes = Scopes::default();
    let _listening = scopes.listen();
    let inner = telling(|n| respond(200, &[("cache-control", "private")], whole(n.to_string()))).held();
    let shop = ask_in_spans(&inner, 1..4).await;
    let mut seen = scopes.taken();
    seen.sort();
    assert_eq!(seen, ["request2", "request3", "stampede_guard.load < request1"]);
    let span = tracing::info_span!("request", caller = 9);
    ask(&shop, request("POST", "/", &[])).instrument(span).await;
    assert_eq!(scopes.taken(), ["request9"]);
}

/// At the level at which services log, the load's own span does not exist. Regression: the loader's events were then
/// in no span.
#[tokio::test(start_paused = true)]
async fn without_its_own_span_a_load_runs_in_the_leaders() {
    let scopes = Scopes::default();
    let _listening = scopes.listen_to(LevelFilter::INFO);
    let guard = StampedeGuard::in_memory();
    let span = tracing::info_span!("request", caller = 7);
    let load = || async {
        tracing::info!(target: "probe", "");
        Ok::<_, std::io::Error>(1)
    };
    assert_eq!(guard.get_or_load("key", load).instrument(span).await.unwrap(), 1);
    assert_eq!(scopes.taken(), ["request7"]);

    let inner = telling(|n| respond(200, &[], whole(n.to_string()))).held();
    ask_in_spans(&inner, 1..6).await;
    assert_eq!(scopes.taken(), ["request1"]);
}

/// A body that emits `probe` events: one before its only frame, and one a while after it.
fn telling_body() -> Boxed {
    let frame = |text: &'static str| async move {
        tracing::info!(target: "probe", "");
        (!text.is_empty()).then(|| Ok(Frame::data(Bytes::from_static(text.as_bytes()))))
    };
    let late = stream::once(async { tokio::time::sleep(Duration::from_secs(30)).await }).map(|()| "b");
    let frames = stream::iter(["a"]).chain(late).chain(stream::iter([""]));
    StreamBody::new(Box::pin(frames.then(frame).filter_map(std::future::ready))).boxed_unsync()
}

/// Both kinds of body are read in separate tasks: that of a POST's response, which is stored, and that of a response whose readers take
/// longer than `load_timeout`.
#[tokio::test(start_paused = true)]
async fn a_body_is_read_in_the_span_of_its_responses_request() {
    let scopes = Scopes::default();
    let _listening = scopes.listen_to(LevelFilter::INFO);
    let inner = Inner::with(|_, request| {
        let is_post = request.method() == Method::POST;
        let headers = [("content-length", "2"), ("cache-control", "max-age=60"), ("content-location", "/")];
        Ok(respond(200, if is_post { &headers } else { &headers[..1] }, telling_body()))
    });
    let shop = shop_with(&inner, policy().http(HttpPolicy::strict()).load_timeout(secs(20)));
    let span = |caller| tracing::info_span!("request", caller);
    let own = {
        let response = shop.clone().oneshot(get("/")).instrument(span(1)).await.unwrap();
        tokio::spawn(read(response))
    };
    let other = tokio::spawn(ask_owned(shop.clone(), get("/")));
    own.await.unwrap();
    other.await.unwrap();
    assert_eq!(scopes.taken(), ["request1"; 3]);
    let response = shop.clone().oneshot(request("POST", "/", &[])).instrument(span(2)).await.unwrap();
    read(response).await;
    assert_eq!(scopes.taken()[..1], ["request2"]);
}

async fn ask_owned(shop: super::kit::Shop, request: super::kit::Req) -> super::kit::Seen {
    ask(&shop, request).await
}
