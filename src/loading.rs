//! Which loads a task is a part of: one that asks for its own key would wait for itself.

use std::future::Future;
use std::sync::Arc;

use crate::key::Key;
use crate::node::Node;

/// The loads inside which a task runs, innermost first.
#[derive(Debug)]
pub(crate) struct Loading {
    /// Where the key's lease is: another guard on the same store would wait for it too.
    place: u64,
    key: Key,
    outer: Option<Arc<Self>>,
}

tokio::task_local! {
    static LOADING: Arc<Loading>;
}

impl Loading {
    /// The loads inside which the current task runs.
    pub(crate) fn current() -> Option<Arc<Self>> {
        LOADING.try_with(Arc::clone).ok()
    }

    /// Runs `load` as a load of `key`.
    pub(crate) fn scope<F: Future>(
        node: &Arc<Node>,
        key: &Key,
        outer: Option<Arc<Self>>,
        load: F,
    ) -> impl Future<Output = F::Output> + use<F> {
        let loading = Self { place: node.store.place(), key: key.clone(), outer };
        LOADING.scope(Arc::new(loading), load)
    }

    /// Whether one of these loads is the load of `key`: waiting for it would be waiting for oneself.
    pub(crate) fn includes(self: &Arc<Self>, node: &Arc<Node>, key: &Key) -> bool {
        let mut innermost = Some(self);
        while let Some(loading) = innermost {
            if loading.place == node.store.place() && loading.key == *key {
                return true;
            }
            innermost = loading.outer.as_ref();
        }
        false
    }
}
