//! Replaces the module `cluster` if the feature `cluster` is off: its types have no values.

use std::time::Duration;

use redis::{Cmd, Value};
use tokio::sync::watch;
use tokio::time::Instant;

use super::connection::OnBreak;
use super::connection::connector::Connector;
use crate::health::{Breaker, ClockReading, LinkState};
use crate::store::{NamedServer, StoreError};

#[derive(Debug)]
pub(super) enum Cluster {}

pub(super) enum MasterNode {}

impl Cluster {
    pub(super) async fn send_noting(
        &self,
        _key: &str,
        _cmd: &Cmd,
        _within: Duration,
        _on_break: OnBreak,
    ) -> Result<(Value, u64), StoreError> {
        match *self {}
    }

    pub(super) async fn until_up(&self) -> Result<(), StoreError> {
        match *self {}
    }

    pub(super) async fn reach(&self, _key: &str) -> Result<(), StoreError> {
        match *self {}
    }

    pub(super) fn down(&self) -> Option<StoreError> {
        match *self {}
    }

    pub(super) fn is_down(&self, _key: &str) -> bool {
        match *self {}
    }

    pub(super) fn longest_argument(&self) -> usize {
        match *self {}
    }

    pub(super) fn suspect(&self) {
        match *self {}
    }

    pub(super) fn changes(&self) -> watch::Receiver<u64> {
        match *self {}
    }

    pub(super) fn clock_at(&self, _moment: Instant) -> Option<u64> {
        match *self {}
    }

    pub(super) fn server_of(&self, _name: &str) -> NamedServer {
        match *self {}
    }

    pub(super) fn clock(&self) -> Option<ClockReading> {
        match *self {}
    }

    pub(super) fn connector(&self, _key: &str) -> Option<Connector> {
        match *self {}
    }

    pub(super) fn user(&self) -> Option<String> {
        match *self {}
    }

    pub(super) fn link(&self) -> (LinkState, Breaker, Option<String>) {
        match *self {}
    }

    pub(super) fn count(&self) -> usize {
        match *self {}
    }

    pub(super) fn samples(&self, _name: &str) -> Vec<(MasterNode, String)> {
        match *self {}
    }

    pub(super) fn close(&self) {
        match *self {}
    }
}

impl MasterNode {
    pub(super) fn name(&self) -> String {
        match *self {}
    }
}

#[cfg(any(test, fuzzing))]
pub(super) fn read_slots(_reply: Value) {}

#[cfg(any(test, fuzzing))]
pub(super) fn read_redirect(_code: &str, _details: Option<&str>) {}
