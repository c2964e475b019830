//! The identity of a load in traces, and the hook by which its span and those of its waiters are linked, across processes.

use std::fmt;

use sha2::{Digest as _, Sha256};
use tracing::Span;

/// The identity of a load in traces: all processes of the fleet that wait for it know the same one.
///
/// It is the field `flight` of the span `stampede_guard.load` and of each span `stampede_guard.wait` that waited for that load, so a
/// search for it finds both. [`SpanLinks`] makes links of it. It is a digest of the load's lease and tells nothing about the key.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct FlightId([u8; 16]);

impl FlightId {
    /// The identity of the load under the lease with this token. A digest, because a process that knows a token can end its lease.
    pub(crate) fn of(token: &str) -> Self {
        let digest: [u8; 32] = Sha256::digest(format!("stampede-guard flight {token}")).into();
        let mut id = [0; 16];
        id.copy_from_slice(&digest[..16]);
        Self(id)
    }

    /// Of a load without a lease: no other process waits for it.
    pub(crate) fn random() -> Self {
        Self(*uuid::Uuid::new_v4().as_bytes())
    }

    /// Its 16 bytes, as evenly distributed as those of a trace's id.
    pub const fn to_bytes(self) -> [u8; 16] {
        self.0
    }
}

impl fmt::Display for FlightId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for FlightId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "FlightId({self})")
    }
}

/// Links the spans of loads and of the callers that waited for them, in whatever way a tracing system has links.
///
/// A `tracing` span can follow from another one of its process only, and most waiters are in other processes. So the guard tells the
/// [`FlightId`] on both sides, and an implementation that derives the ids of a load's trace and span from it needs nothing from the
/// wire: `ops/otlp` of the repository has one for OpenTelemetry.
///
/// Both methods are called on the data path of a miss, never of a hit: they should be brief, and must not block.
pub trait SpanLinks: Send + Sync + 'static {
    /// A load begins: `span` was made for it, inside `request`, the span of the request that leads it, and was not entered yet.
    fn load(&self, span: &Span, request: &Span, flight: FlightId);

    /// A caller waits, or has waited, for this load, here or in another process. `span` is the span of that wait, inside the one of its
    /// request.
    fn wait(&self, span: &Span, flight: FlightId);
}
