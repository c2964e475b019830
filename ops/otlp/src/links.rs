//! Links between the spans of loads and of the requests that waited for them.
//!
//! A load serves requests of many traces, so it is a trace of its own (OpenTelemetry's advice for an operation that many others
//! began), and each of these requests has a link to it. The ids of that trace are made of the load's [`FlightId`], which the leader and
//! all waiters know, in every process: nothing travels by the wire for it.

use std::cell::Cell;

use opentelemetry::trace::{SpanContext, SpanId, TraceContextExt as _, TraceFlags, TraceId, TraceState};
use opentelemetry::{Context, KeyValue};
use opentelemetry_sdk::trace::{IdGenerator, RandomIdGenerator, Sampler, SamplingResult, ShouldSample};
use stampede_guard::{FlightId, SpanLinks};
use tracing::Span;
use tracing_opentelemetry::OpenTelemetrySpanExt as _;

/// The name of the guard's span of a load.
const LOAD: &str = "stampede_guard.load";

/// The ids of a load's span.
fn ids(flight: FlightId) -> (TraceId, SpanId) {
    let bytes = u128::from_be_bytes(flight.to_bytes());
    // Of 128 random bits each half is as random as a span's id has to be.
    (TraceId::from(bytes), SpanId::from(bytes as u64))
}

/// The context of a load's span, which may be in another process.
fn load_context(flight: FlightId) -> SpanContext {
    let (trace, span) = ids(flight);
    SpanContext::new(trace, span, TraceFlags::SAMPLED, true, TraceState::default())
}

thread_local! {
    /// The load whose span this thread is about to start.
    static NEXT: Cell<Option<FlightId>> = const { Cell::new(None) };
}

/// Makes the ids of loads of their [`FlightId`], and all others at random.
#[derive(Debug, Default)]
pub struct FlightIds(RandomIdGenerator);

impl IdGenerator for FlightIds {
    fn new_trace_id(&self) -> TraceId {
        NEXT.get().map_or_else(|| self.0.new_trace_id(), |flight| ids(flight).0)
    }

    fn new_span_id(&self) -> SpanId {
        NEXT.get().map_or_else(|| self.0.new_span_id(), |flight| ids(flight).1)
    }
}

/// What the guard calls: `StampedeGuard::builder(..).span_links(LoadLinks)`.
#[derive(Clone, Copy, Debug)]
pub struct LoadLinks;

impl SpanLinks for LoadLinks {
    fn load(&self, span: &Span, request: &Span, flight: FlightId) {
        // A trace of its own: the span was not entered yet, so it has no ids.
        let _ = span.set_parent(Context::new());
        span.add_link(request.context().span().span_context().clone());
        NEXT.set(Some(flight));
        // Starts the span.
        let _ = span.context();
        NEXT.set(None);
        request.add_link(load_context(flight));
    }

    fn wait(&self, span: &Span, flight: FlightId) {
        span.add_link(load_context(flight));
    }
}

/// Samples each load and a part of the requests. Loads are few, that is what the guard is for, and a link of a sampled request must not
/// lead to a load that was not.
#[derive(Clone, Debug)]
pub struct LoadsAndSome(Sampler);

impl LoadsAndSome {
    /// `part` is the part of the requests, from 0 to 1. A request that comes with a trace is sampled if its caller is.
    pub fn requests(part: f64) -> Self {
        Self(Sampler::ParentBased(Box::new(Sampler::TraceIdRatioBased(part))))
    }
}

impl ShouldSample for LoadsAndSome {
    fn should_sample(
        &self,
        parent: Option<&Context>,
        trace: TraceId,
        name: &str,
        kind: &opentelemetry::trace::SpanKind,
        attributes: &[KeyValue],
        links: &[opentelemetry::trace::Link],
    ) -> SamplingResult {
        let sampler = if name == LOAD { &Sampler::AlwaysOn } else { &self.0 };
        sampler.should_sample(parent, trace, name, kind, attributes, links)
    }
}
