//! Three ways in which a process asks for thousands of keys at once. A key's value is the key.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use futures_util::future::{BoxFuture, join_all};
use stampede_guard::StampedeGuard;

type Loading = BoxFuture<'static, Result<Vec<(u64, u64)>, String>>;

/// A loader of many keys that counts the keys that it loads.
fn counting_loader(loads: &Arc<AtomicUsize>) -> impl Fn(Vec<u64>) -> Loading + Send + Sync + 'static {
    let loads = Arc::clone(loads);
    move |keys: Vec<u64>| {
        loads.fetch_add(keys.len(), Ordering::Relaxed);
        Box::pin(async move { Ok(keys.into_iter().map(|key| (key, key)).collect()) })
    }
}

pub(crate) async fn by_one_call(guard: &StampedeGuard, keys: u64, loads: &Arc<AtomicUsize>) {
    let answers = guard.get_or_load_many(0..keys, counting_loader(loads)).await;
    assert!(answers.iter().zip(0..).all(|(answer, key)| matches!(answer, Ok(Some(found)) if *found == key)));
}

pub(crate) async fn by_a_call_each(guard: &StampedeGuard, keys: u64, loads: &Arc<AtomicUsize>) {
    let answers = (0..keys).map(|key| {
        let loads = Arc::clone(loads);
        guard.get_or_load(key, move || async move {
            loads.fetch_add(1, Ordering::Relaxed);
            Ok::<_, String>(key)
        })
    });
    let answers = join_all(answers).await;
    assert!(answers.into_iter().zip(0..).all(|(answer, key)| matches!(answer, Ok(found) if found == key)));
}

pub(crate) async fn by_a_warm_up(guard: &StampedeGuard, keys: u64, loads: &Arc<AtomicUsize>) {
    let warmed = guard.warm(0..keys, keys as usize, counting_loader(loads)).await;
    assert_eq!((warmed.stored + warmed.found, warmed.failed), (keys, 0), "{warmed:?}");
}

/// Checks, after all calls have ended, that each key was loaded once, and that `guard` finds each value.
pub(crate) async fn loaded_and_stored_once(
    guard: &StampedeGuard,
    keys: u64,
    loads: &AtomicUsize,
    seen: impl std::fmt::Debug,
) {
    assert_eq!(loads.load(Ordering::Relaxed) as u64, keys, "{seen:#?}");
    let stored = guard.get_many::<u64, _>(0..keys).await;
    let stored = stored.into_iter().filter(|found| matches!(found, Ok(Some(_)))).count();
    assert_eq!(stored as u64, keys, "{seen:#?}");
}
