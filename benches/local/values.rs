//! The keys and values of the rows about hits.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use stampede_guard::{Policy, PolicyBuilder, StampedeGuard};

/// A value of some hundred bytes with a few allocations, like a record of a program.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct User {
    pub(crate) id: u64,
    name: String,
    mail: String,
    roles: Vec<String>,
}

impl User {
    pub(crate) fn new(id: u64) -> Self {
        let roles = ["reader", "writer", "owner"].map(str::to_owned).to_vec();
        Self { id, name: format!("Ada {id}"), mail: format!("ada.{id}@shop.example"), roles }
    }
}

/// The keys of one row. They are made once: a control looks them up as they are, the guard makes its own keys of them at each call.
pub(crate) fn keys(number: u32) -> Arc<[String]> {
    (0..number).map(|n| format!("user-{n:06}")).collect()
}

/// The key that a reader requests in this call. The readers walk through the keys from different positions.
pub(crate) fn key(keys: &[String], reader: u32, call: u32) -> &str {
    &keys[(reader as usize * 31 + call as usize) % keys.len()]
}

/// A policy under which each value stays in memory as long as it is fresh. No value expires while it is measured.
pub(crate) fn lasting() -> PolicyBuilder {
    Policy::builder().fresh_for(Duration::from_secs(3_600)).local_for(Duration::MAX)
}

/// Requests all keys until each of them is served from memory.
pub(crate) async fn until_copied(guard: &StampedeGuard, keys: &[String]) {
    for _ in 0..100 {
        let before = guard.stats().local_hits;
        for key in keys {
            let load = || async { Ok::<_, Infallible>(User::new(7)) };
            guard.load(key.as_str()).get_shared(move |_| load()).await.expect("infallible");
        }
        if guard.stats().local_hits - before == keys.len() as u64 {
            return;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    panic!("the values do not stay in memory: {:?}", guard.health());
}
