//! What the supervisor reports about its connection and the server's clock.

use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::time::Instant;

use super::{ConnectionState, Supervisor, UNKNOWN, silent};
use crate::health::{ClockReading, LinkState};
use crate::store::StoreError;
use crate::store::redis::topology::server::host_ms;

impl Supervisor {
    /// The state of the connection and, while commands fail without being sent, the reason.
    pub(crate) fn link(&self) -> (LinkState, Option<StoreError>) {
        match &self.slot().state {
            ConnectionState::Idle => (LinkState::Idle, None),
            ConnectionState::Connecting(since) if self.silence.is_too_long(since.elapsed()) => {
                (LinkState::Down, Some(silent()))
            }
            ConnectionState::Connecting(_) => (LinkState::Connecting, None),
            ConnectionState::Up(_) => (LinkState::Up, None),
            ConnectionState::Down(why) => (LinkState::Down, why.clone()),
            ConnectionState::Closed => (LinkState::Closed, None),
        }
    }

    /// How long the latest reading of the server's clock took; zero before the first.
    pub(crate) fn round_trip(&self) -> Duration {
        Duration::from_micros(self.round_trip.load(Ordering::Relaxed))
    }

    /// The latest reading of the server's clock; `None` before the first.
    pub(crate) fn clock(&self) -> Option<ClockReading> {
        if self.offset.load(Ordering::Relaxed) == UNKNOWN {
            return None;
        }
        let now = Instant::now();
        let (server, host) = (self.clock_at(now), host_ms());
        let age = self.since_born(now).saturating_sub(self.read_at.load(Ordering::Relaxed));
        Some(ClockReading {
            ahead_ms: i64::try_from(server).unwrap_or(i64::MAX).saturating_sub_unsigned(host),
            age: Duration::from_millis(age),
            largest_jump: Duration::from_millis(self.largest_jump.load(Ordering::Relaxed)),
        })
    }
}
