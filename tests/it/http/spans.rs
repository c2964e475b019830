//! A load runs inside the span of the request whose loader it is, although it runs in a task of its own.

use std::sync::{Arc, LazyLock, Mutex};

use tracing::field::{Field, Visit};
use tracing::{Dispatch, Instrument as _, Subscriber};
use tracing_subscriber::layer::{Context, SubscriberExt as _};
use tracing_subscriber::registry::LookupSpan;

use super::kit::{Inner, all, ask, get, respond, settle, shop, whole};

/// The spans around each event named `asked`, from the inside out, requests with their number.
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
        if event.metadata().target() == "asked" {
            let scope = context.event_scope(event).into_iter().flatten();
            let names = scope.map(|span| span.extensions().get::<Label>().unwrap().0.clone());
            self.0.lock().unwrap().push(names.collect());
        }
    }
}

/// With a single subscriber about, tracing asks the thread that meets a span first whether anybody listens, and
/// believes it for good: another test's thread says no. With two it asks the subscribers.
static SECOND: LazyLock<Dispatch> = LazyLock::new(|| Dispatch::new(tracing_subscriber::registry()));

impl Scopes {
    fn listen(&self) -> tracing::subscriber::DefaultGuard {
        LazyLock::force(&SECOND);
        tracing::subscriber::set_default(tracing_subscriber::registry().with(self.clone()))
    }

    fn taken(&self) -> Vec<String> {
        self.0.lock().unwrap().drain(..).map(|scope| scope.join(" < ")).collect()
    }
}

/// An inner service that says where it runs.
fn telling(answer: impl Fn(usize) -> http::Response<super::kit::Boxed> + Send + Sync + 'static) -> Inner {
    Inner::with(move |n, _| {
        tracing::info!(target: "asked", "");
        Ok(answer(n))
    })
}

fn ask_in_spans(
    shop: &super::kit::Shop,
    callers: std::ops::Range<u64>,
) -> Vec<tokio::task::JoinHandle<super::kit::Seen>> {
    callers
        .map(|caller| {
            let shop = shop.clone();
            let span = tracing::info_span!(parent: None, "request", caller);
            tokio::spawn(async move { ask(&shop, get("/")).await }.instrument(span))
        })
        .collect()
}

#[tokio::test(start_paused = true)]
async fn the_load_runs_inside_the_leaders_span() {
    let scopes = Scopes::default();
    let _listening = scopes.listen();
    let inner = telling(|n| respond(200, &[], whole(n.to_string()))).held();
    let shop = shop(&inner);
    let crowd = ask_in_spans(&shop, 1..6);
    settle().await;
    inner.gate.open();
    all(crowd).await;
    assert_eq!(scopes.taken(), ["stampede_guard.load < request1"]);
}

#[tokio::test(start_paused = true)]
async fn a_load_that_is_taken_over_runs_inside_the_span_of_whose_loader_it_is() {
    let scopes = Scopes::default();
    let _listening = scopes.listen();
    let inner = telling(|n| {
        assert!(n > 1, "scripted panic");
        respond(200, &[], whole(n.to_string()))
    })
    .held();
    let shop = shop(&inner);
    let crowd = ask_in_spans(&shop, 1..4);
    settle().await;
    inner.gate.open();
    all(crowd).await;
    let scopes = scopes.taken();
    assert_eq!(scopes[0], "stampede_guard.load < request1");
    assert!(
        ["2", "3"].iter().any(|n| scopes[1] == format!("stampede_guard.load < request{n}")),
        "{scopes:?}"
    );
    assert_eq!(scopes.len(), 2);
}

#[tokio::test(start_paused = true)]
async fn what_bypasses_and_what_loads_for_itself_runs_in_its_own_span() {
    let scopes = Scopes::default();
    let _listening = scopes.listen();
    let inner = telling(|n| respond(200, &[("cache-control", "private")], whole(n.to_string()))).held();
    let shop = shop(&inner);
    let crowd = ask_in_spans(&shop, 1..4);
    settle().await;
    inner.gate.open();
    all(crowd).await;
    let mut seen = scopes.taken();
    seen.sort();
    assert_eq!(seen, ["request2", "request3", "stampede_guard.load < request1"]);
    let span = tracing::info_span!("request", caller = 9);
    ask(&shop, super::kit::request("POST", "/", &[])).instrument(span).await;
    assert_eq!(scopes.taken(), ["request9"]);
}
