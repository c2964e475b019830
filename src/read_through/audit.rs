//! An audit of a hit: the value is loaded anew beside its caller, and compared with what the guard serves. Knows no Redis and no HTTP.
//!
//! The audit looks up by itself what a caller is served, before its load. A value that differs from the loaded one is looked up again
//! after the policy's grace: only a value that is served even then counts. An invalidation that is on its way is no difference.

use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
use tokio::time::{sleep, timeout};

use super::bulkhead::admit;
use super::call::Call;
use super::look_up::read_entry;
use crate::guard_state::GuardState;
use crate::key::Key;
use crate::loader::nesting::LoadScope;
use crate::loader::{LeaseState, LoadInput, LoadResult, Loader};
use crate::observe::{self, Count, log, warn_if};
use crate::policy::Policy;
use crate::policy::audit::Encoded;
use crate::tracker::Tracked;
use crate::value::entry::Entry;

/// An audit that has its turn.
pub(crate) struct Audit {
    state: Arc<GuardState>,
    policy: Arc<Policy>,
    key: Key,
    _turn: Tracked,
}

impl Audit {
    /// The audit of a hit, unless one of its key began less than a second ago.
    pub(crate) fn begin(Call { state, policy, key }: Call<'_>) -> Option<Self> {
        let turn = state.audits.begin(key)?;
        Some(Self { state: Arc::clone(state), policy: Arc::clone(policy), key: key.clone(), _turn: turn })
    }

    /// Audits a loader's value in the background.
    pub(crate) fn of_loader(self, loader: Loader) {
        let Loader { run, within, .. } = loader;
        let given = LoadInput {
            // The result is encoded as for other callers, and stored for none.
            mode: LeaseState::Unleased,
            ..LoadInput::alone(self.policy.load_timeout)
        };
        let load = LoadScope::scope(self.state.store.place(), &self.key, within, async move {
            match run(given).await.settle() {
                LoadResult::Value { encoding, payload, .. } => Some((encoding, payload)),
                LoadResult::Uncacheable { .. } | LoadResult::Failed { .. } | LoadResult::OnlyForCaller => {
                    None
                }
            }
        });
        self.spawn(load, |policy, served, (encoding, payload)| {
            let served = Encoded { encoding: served.encoding, payload: &served.payload };
            let loaded = Encoded { encoding: *encoding, payload };
            policy.audit.is_same([served, loaded])
        });
    }

    /// Audits in the background. `load` returns `None` if it failed; `is_same` does if it cannot tell.
    pub(crate) fn spawn<L: Send + Sync + 'static>(
        self,
        load: impl Future<Output = Option<L>> + Send + 'static,
        is_same: impl Fn(&Policy, &Entry, &L) -> Option<bool> + Send + Sync + 'static,
    ) {
        in_background(Arc::clone(&self.state), self.run(load, is_same));
    }

    /// Concludes an audit whose two values are known, in the background.
    pub(crate) fn conclude_later(self, served: Entry, same: Option<bool>) {
        in_background(Arc::clone(&self.state), async move { self.conclude(&served, same).await });
    }

    async fn run<L: Send + Sync>(
        self,
        load: impl Future<Output = Option<L>> + Send,
        is_same: impl Fn(&Policy, &Entry, &L) -> Option<bool> + Send + Sync,
    ) {
        let Self { state, policy, key, .. } = &self;
        // Without a value there is nothing to compare with: it has just expired.
        let Some(served) = self.served().await else { return };
        let permit = match policy.max_concurrent_loads {
            Some(limit) => admit(state, policy, limit, key).await,
            None => Ok(None),
        };
        // The origin is overloaded, or its permits cannot be asked for: callers come first.
        let Ok(permit) = permit else { return };
        policy.count(Count::loads);
        let load = timeout(policy.load_timeout, AssertUnwindSafe(load).catch_unwind());
        let (loaded, _) = observe::timed(&policy.counters, load).await;
        drop(permit);
        let same = match loaded {
            Ok(Ok(Some(loaded))) => is_same(policy, &served, &loaded),
            _ => None,
        };
        self.conclude(&served, same).await;
    }

    /// Counts an audit. `same` is `None` if the two values could not be compared.
    async fn conclude(&self, served: &Entry, mut same: Option<bool>) {
        let Self { state, policy, key, .. } = self;
        if same == Some(false) {
            sleep(policy.audit.grace).await;
            let is_unchanged =
                |now: &Entry| now.stored_at == served.stored_at && now.payload == served.payload;
            same = Some(!self.served().await.as_ref().is_some_and(is_unchanged));
        }
        policy.count(match same {
            Some(true) => Count::audits_matched,
            Some(false) => Count::audits_differed,
            None => Count::audits_failed,
        });
        if same == Some(false) {
            let age = Duration::from_millis(state.store.now().saturating_sub(served.stored_at));
            policy.counters.audit_differed(age);
            let is_news = state.audits.log.is_due();
            warn_if!(
                log::GUARD,
                is_news,
                ?key,
                ?age,
                "an audit found another value at the origin than the guard serves"
            );
        }
    }

    /// The value that a caller is served now.
    async fn served(&self) -> Option<Entry> {
        let Self { state, policy, key, .. } = self;
        let copy = state.local.copy(key, policy.local_for).map(|(copy, _)| Arc::clone(&copy.entry));
        let stored = match copy {
            Some(copy) => Some(copy),
            None => read_entry(Call { state, policy, key }).await.ok().flatten(),
        };
        let now = state.store.now();
        stored?.value().filter(|value| value.is_fresh(now)).cloned()
    }
}

/// Runs an audit until the guard is shut down: an audit is not worth a shutdown that takes longer.
fn in_background(state: Arc<GuardState>, audit: impl Future<Output = ()> + Send + 'static) {
    tokio::spawn(async move {
        tokio::select! {
            biased;
            () = state.waiters.sent_away() => {}
            () = audit => {}
        }
    });
}
