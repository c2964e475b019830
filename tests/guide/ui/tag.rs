//! `LoadContext::tag` takes all tags of a value, and is called with one.

use stampede_guard::{Error, StampedeGuard};

async fn ask(guard: StampedeGuard) {
    let load = guard.load(("price", 7)).get(|mut cx| async move {
        cx.tag("catalog").await?;
        Ok::<u64, Error>(499)
    });
    let _ = load.await;
}
