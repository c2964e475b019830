//! The chain of loads a task runs inside. It detects re-entrance: a load that asks for its own key would wait for itself.

use std::future::Future;
use std::sync::Arc;

use uuid::Uuid;

use crate::key::Key;

/// The loads inside which a task runs, innermost first.
#[derive(Debug)]
pub(crate) struct LoadScope {
    /// One load, or those that one call is the load of.
    loads: Vec<RunningLoad>,
    outer: Option<Arc<Self>>,
}

#[derive(Clone, Debug)]
struct RunningLoad {
    /// The store that holds the key's lease: another guard on the same store would wait for the lease too.
    place: u64,
    key: Key,
    turn: Option<LoadPermitId>,
}

/// Which limited permit a load holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum LoadPermitId {
    /// One of the `limit` permits of this namespace in this store, shared by all guards.
    Permit { place: u64, namespace: Box<str>, limit: u32 },
    /// One of a guard's places for loads without the store.
    Place(Uuid),
}

tokio::task_local! {
    static LOADING: Arc<LoadScope>;
}

impl LoadScope {
    /// The loads inside which the current task runs.
    pub(crate) fn current() -> Option<Arc<Self>> {
        LOADING.try_with(Arc::clone).ok()
    }

    /// Whether the current task runs inside a load.
    pub(crate) fn is_inside() -> bool {
        LOADING.try_with(|_| ()).is_ok()
    }

    /// Runs `load` as a load of `key` that holds no turn.
    pub(crate) fn scope<F: Future>(
        place: u64,
        key: &Key,
        outer: Option<Arc<Self>>,
        load: F,
    ) -> impl Future<Output = F::Output> + use<F> {
        Self::scope_with(place, key, None, outer, load)
    }

    /// Runs `load` as a load of `key` that may hold a turn.
    pub(crate) fn scope_with<F: Future>(
        place: u64,
        key: &Key,
        turn: Option<LoadPermitId>,
        outer: Option<Arc<Self>>,
        load: F,
    ) -> impl Future<Output = F::Output> + use<F> {
        let loads = vec![RunningLoad { place, key: key.clone(), turn }];
        LOADING.scope(Arc::new(Self { loads, outer }), load)
    }

    /// The chain of a call that is the load of several keys: the innermost load of each chain, and the loads around the first. Loads
    /// of one call run inside the same loads. (A flat list: a chain as long as the keys would be dropped by as many nested calls.)
    pub(crate) fn joined(chains: impl IntoIterator<Item = Arc<Self>>) -> Option<Arc<Self>> {
        let mut chains = chains.into_iter();
        let first = chains.next()?;
        let mut loads = first.loads.clone();
        loads.extend(chains.flat_map(|chain| chain.loads.clone()));
        Some(Arc::new(Self { loads, outer: first.outer.clone() }))
    }

    /// Runs `load` inside these loads.
    pub(crate) fn run<F: Future>(self: Arc<Self>, load: F) -> impl Future<Output = F::Output> + use<F> {
        LOADING.scope(self, load)
    }

    /// Whether one of these loads is the load of `key`: a caller inside it that waits for it would wait for itself.
    pub(crate) fn includes(&self, place: u64, key: &Key) -> bool {
        self.any(|loading| loading.place == place && loading.key == *key)
    }

    /// Whether one of these loads holds such a turn. Each of them waits for the loads inside it, so an inner load that waited
    /// for another turn might wait for theirs, a deadlock.
    pub(crate) fn holds(&self, turn: &LoadPermitId) -> bool {
        self.any(|loading| loading.turn.as_ref() == Some(turn))
    }

    fn any(&self, is: impl Fn(&RunningLoad) -> bool) -> bool {
        std::iter::successors(Some(self), |scope| scope.outer.as_deref())
            .flat_map(|scope| &scope.loads)
            .any(is)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::key::CacheKey;

    /// A worker thread has two megabytes of stack.
    #[test]
    fn a_call_for_very_many_keys_is_dropped_on_a_small_stack() {
        let scope = |n: u32| {
            let load = RunningLoad { place: 1, key: Key::new("ns", &CacheKey::from(n)), turn: None };
            Arc::new(LoadScope { loads: vec![load], outer: None })
        };
        let small = std::thread::Builder::new().stack_size(128 * 1024);
        let ended = small.spawn(move || {
            let joined = LoadScope::joined((0..100_000).map(scope)).expect("loads");
            joined.includes(1, &Key::new("ns", &CacheKey::from(99_999_u32)))
        });
        assert!(ended.expect("a thread").join().expect("no overflow"));
    }
}
