//! Traces and metrics of a service behind the guard, exported by OTLP.
//!
//! - [`Telemetry::start`] installs both: the layer of `tracing-opentelemetry`, and a recorder of the `metrics` facade ([`bridge`]).
//! - [`links::LoadLinks`] is passed to the guard (`span_links`): each load is a trace, to which the spans of all requests that waited for
//!   it have a link, in whichever process they were.
//!
//! The endpoint and all other settings are those of OpenTelemetry: `OTEL_EXPORTER_OTLP_ENDPOINT`, `OTEL_EXPORTER_OTLP_PROTOCOL`,
//! `OTEL_SERVICE_NAME`, `OTEL_BSP_SCHEDULE_DELAY`, `OTEL_METRIC_EXPORT_INTERVAL`.

pub mod bridge;
pub mod links;
mod telemetry;

pub use telemetry::Telemetry;
