//! The providers of traces and metrics, and what is connected to them.

use std::error::Error;

use opentelemetry::metrics::MeterProvider as _;
use opentelemetry::trace::TracerProvider as _;
use opentelemetry_otlp::{MetricExporter, SpanExporter};
use opentelemetry_sdk::metrics::SdkMeterProvider;
use opentelemetry_sdk::trace::SdkTracerProvider;
use tracing::Subscriber;
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::{EnvFilter, Layer};

use crate::bridge::MeterRecorder;
use crate::links::{FlightIds, LoadsAndSome};

/// What exports; [`shutdown`](Self::shutdown) sends the rest.
#[derive(Debug)]
pub struct Telemetry {
    traces: SdkTracerProvider,
    metrics: SdkMeterProvider,
}

impl Telemetry {
    /// Begins to export a part of the requests' traces, those of all loads, and all metrics.
    ///
    /// # Errors
    ///
    /// A setting of OpenTelemetry that is not understood, or a recorder of metrics that is installed already.
    pub fn start(part_of_requests: f64) -> Result<Self, Box<dyn Error>> {
        let traces = SdkTracerProvider::builder()
            .with_batch_exporter(SpanExporter::builder().with_http().build()?)
            .with_id_generator(FlightIds::default())
            .with_sampler(LoadsAndSome::requests(part_of_requests))
            .build();
        let metrics = SdkMeterProvider::builder()
            .with_periodic_exporter(MetricExporter::builder().with_http().build()?)
            .build();
        metrics::set_global_recorder(MeterRecorder::new(metrics.meter("stampede_guard")))
            .map_err(|_| "a recorder of metrics is installed already")?;
        Ok(Self { traces, metrics })
    }

    /// The layer that exports spans. Those of the guard have the level `DEBUG`.
    pub fn layer<S: Subscriber + for<'a> LookupSpan<'a>>(&self) -> impl Layer<S> {
        tracing_opentelemetry::layer()
            .with_tracer(self.traces.tracer("stampede_guard"))
            .with_filter(EnvFilter::new("info,stampede_guard=debug"))
    }

    /// Sends what was not sent yet.
    ///
    /// # Errors
    ///
    /// The receiver did not take it.
    pub fn shutdown(self) -> Result<(), Box<dyn Error>> {
        self.traces.shutdown()?;
        self.metrics.shutdown()?;
        Ok(())
    }
}
