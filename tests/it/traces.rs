//! The spans of a load, and of the callers that wait for it, name the same flight, also in different processes.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex};
use std::time::Duration;

use stampede_guard::{FlightId, MemoryStore, SpanLinks, StampedeGuard};
use tokio::time::sleep;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Dispatch, Instrument as _, Span, Subscriber, info_span};
use tracing_subscriber::layer::{Context, SubscriberExt as _};
use tracing_subscriber::registry::LookupSpan;

/// All spans of the guard by their ids, each with its name, the name of its parent and its field `flight`.
#[derive(Clone, Default)]
pub(crate) struct Spans(Arc<Mutex<HashMap<u64, Seen>>>);

#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Seen {
    name: String,
    pub(crate) within: String,
    flight: String,
}

impl Visit for Seen {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        if field.name() == "flight" {
            self.flight = format!("{value:?}");
        }
    }
}

impl<S: Subscriber + for<'a> LookupSpan<'a>> tracing_subscriber::Layer<S> for Spans {
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        let span = context.span(id).expect("it is new");
        let within = span.parent().map(|parent| parent.name().to_owned()).unwrap_or_default();
        let mut seen = Seen { name: span.name().to_owned(), within, flight: String::new() };
        attributes.record(&mut seen);
        self.0.lock().expect("no panic").insert(id.into_u64(), seen);
    }

    fn on_record(&self, id: &Id, values: &Record<'_>, _: Context<'_, S>) {
        if let Some(seen) = self.0.lock().expect("no panic").get_mut(&id.into_u64()) {
            values.record(seen);
        }
    }
}

/// See `http::spans`: with a single subscriber, tracing would cache the answer of the thread that comes first.
static SECOND: LazyLock<Dispatch> = LazyLock::new(|| Dispatch::new(tracing_subscriber::registry()));

impl Spans {
    pub(crate) fn listen(&self) -> tracing::subscriber::DefaultGuard {
        LazyLock::force(&SECOND);
        tracing::subscriber::set_default(tracing_subscriber::registry().with(self.clone()))
    }

    pub(crate) fn named(&self, name: &str) -> Vec<Seen> {
        let mut all: Vec<_> = self.0.lock().expect("no panic").values().cloned().collect();
        all.retain(|seen| seen.name == name);
        all.sort();
        all
    }
}

/// The flights that the guard reported for loads and for waits.
#[derive(Clone, Default)]
struct Links(Arc<Mutex<Vec<(&'static str, FlightId)>>>);

impl SpanLinks for Links {
    fn load(&self, span: &Span, request: &Span, flight: FlightId) {
        assert_eq!(request.metadata().expect("a span").name(), "request");
        assert_eq!(span.metadata().expect("a span").name(), "stampede_guard.load");
        self.0.lock().expect("no panic").push(("load", flight));
    }

    fn wait(&self, span: &Span, flight: FlightId) {
        assert_eq!(span.metadata().expect("a span").name(), "stampede_guard.wait");
        self.0.lock().expect("no panic").push(("wait", flight));
    }
}

async fn ask(guard: &StampedeGuard, took: Duration) -> u8 {
    let load = move || async move {
        sleep(took).await;
        Ok::<_, String>(1)
    };
    guard.get_or_load("key", load).await.expect("loaded")
}

const SECOND_LONG: Duration = Duration::from_secs(1);

#[tokio::test(start_paused = true)]
async fn waiters_here_and_in_another_process_name_the_load_that_served_them() {
    let spans = Spans::default();
    let _listening = spans.listen();
    let (store, links) = (MemoryStore::new(), Links::default());
    let guard =
        || StampedeGuard::builder(store.clone()).span_links(links.clone()).build().expect("valid settings");
    let (here, there) = (guard(), guard());
    // The first caller leads; the others come while the load runs, two of them to another process.
    let calls = [("led", &here, 0), ("here", &here, 10), ("there", &there, 20), ("beside", &there, 30)];
    let calls = calls.map(|(name, guard, after)| async move {
        sleep(Duration::from_millis(after)).await;
        let span = info_span!("request", name);
        ask(guard, SECOND_LONG).instrument(span).await
    });
    assert_eq!(futures_util::future::join_all(calls).await, [1; 4]);

    let loads = spans.named("stampede_guard.load");
    assert_eq!(loads.len(), 1);
    let flight = loads[0].flight.clone();
    assert_eq!((loads[0].within.as_str(), flight.len()), ("request", 32));
    let waits = spans.named("stampede_guard.wait");
    let expected = Seen { name: "stampede_guard.wait".to_owned(), within: "request".to_owned(), flight };
    assert_eq!(waits, vec![expected; 3]);
    let reported = links.0.lock().expect("no panic").clone();
    assert_eq!(reported.iter().filter(|(what, _)| *what == "load").count(), 1);
    assert_eq!(reported.iter().filter(|(what, _)| *what == "wait").count(), 3);
    assert!(reported.iter().all(|(_, flight)| *flight == reported[0].1), "{reported:?}");
    assert_eq!(reported[0].1.to_string(), loads[0].flight);

    // A hit has no span.
    ask(&there, SECOND_LONG).await;
    assert_eq!(spans.named("stampede_guard.wait").len(), 3);
}

#[tokio::test(start_paused = true)]
async fn a_failed_load_and_its_waiters_name_each_other_too() {
    let spans = Spans::default();
    let _listening = spans.listen();
    let store = MemoryStore::new();
    let (here, there) = (StampedeGuard::new(store.clone()), StampedeGuard::new(store));
    let fails = || async {
        sleep(SECOND_LONG).await;
        Err::<u8, _>("no")
    };
    let late = async {
        sleep(Duration::from_millis(10)).await;
        there.get_or_load("key", fails).await
    };
    let (first, second) = tokio::join!(here.get_or_load("key", fails), late);
    assert!(first.is_err() && second.is_err());
    let (loads, waits) = (spans.named("stampede_guard.load"), spans.named("stampede_guard.wait"));
    assert_eq!((loads.len(), waits.len()), (1, 1));
    assert_eq!(loads[0].flight, waits[0].flight);
}

/// Waiters of a response are answered before the load ends.
#[cfg(feature = "http")]
#[tokio::test(start_paused = true)]
async fn waiters_of_an_incomplete_response_name_its_load() {
    use bytes::Bytes;
    use futures_util::stream;
    use http_body::Frame;
    use http_body_util::{BodyExt as _, StreamBody};
    use tower::{Layer as _, ServiceExt as _, service_fn};

    let spans = Spans::default();
    let _listening = spans.listen();
    let service = StampedeGuard::in_memory().layer(service_fn(|_: http::Request<String>| async {
        sleep(SECOND_LONG).await;
        let frames = stream::unfold(0, |n| async move {
            sleep(SECOND_LONG).await;
            (n < 3).then(|| (Ok::<_, std::io::Error>(Frame::data(Bytes::from_static(b"part"))), n + 1))
        });
        let body = StreamBody::new(Box::pin(frames));
        let response = http::Response::builder().header("content-length", "12").body(body);
        Ok::<_, std::convert::Infallible>(response.expect("a response"))
    }));
    let calls = (0..3).map(|after| {
        let service = service.clone();
        async move {
            sleep(Duration::from_millis(after * 100)).await;
            let request = http::Request::get("/").header("host", "h").body(String::new()).expect("a request");
            let response =
                service.oneshot(request).instrument(info_span!("request")).await.expect("infallible");
            response.into_body().collect().await.expect("the whole body").to_bytes()
        }
    });
    assert!(futures_util::future::join_all(calls).await.iter().all(|body| body == "partpartpart"));
    let (loads, waits) = (spans.named("stampede_guard.load"), spans.named("stampede_guard.wait"));
    assert_eq!((loads.len(), waits.len()), (1, 2));
    assert!(waits.iter().all(|wait| wait.flight == loads[0].flight), "{waits:?}");
}
