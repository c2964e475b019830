//! A load of one caller outside the protocol.

use std::any::Any;
use std::panic::AssertUnwindSafe;

use futures_util::FutureExt as _;
use tokio::time::timeout;

use super::call::Call;
use crate::error::{Error, Failure};
use crate::loader::nesting::LoadScope;
use crate::loader::{LoadInput, Loader};
use crate::observe::{self, Count};

/// Runs a caller's own load, which answers only this caller, for at most `load_timeout`. Returns a panic of the loader as an
/// error: the caller decides whether it unwinds.
pub(crate) async fn run_alone(
    Call { state, policy, key }: Call<'_>,
    loader: Loader,
) -> Result<Result<(), Failure>, Box<dyn Any + Send>> {
    policy.count(Count::loads);
    let Loader { run, within, .. } = loader;
    let given = LoadInput::alone(policy.load_timeout);
    let load = LoadScope::scope(state.store.place(), key, within, async move { run(given).await });
    let (ran, _) =
        observe::timed(&policy.counters, timeout(policy.load_timeout, AssertUnwindSafe(load).catch_unwind()))
            .await;
    match ran {
        Ok(Ok(loaded)) => {
            if loaded.settle().is_failure() {
                policy.count(Count::load_errors);
            }
            Ok(Ok(()))
        }
        Ok(Err(panic)) => {
            policy.count(Count::loads_vanished);
            Err(panic)
        }
        Err(_) => {
            policy.count(Count::load_timeouts);
            Ok(Err(Failure::Guard(Error::load_timeout(key, policy.load_timeout))))
        }
    }
}
