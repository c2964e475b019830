//! The error of a memoized service is not `Sync`.

use std::cell::Cell;
use std::fmt;

use stampede_guard::{CacheKey, StampedeGuard};
use tower::{ServiceBuilder, ServiceExt as _, service_fn};

#[derive(Debug)]
struct Failed(Cell<u32>);

impl fmt::Display for Failed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "failed {} times", self.0.get())
    }
}

async fn ask(guard: StampedeGuard) {
    let square = service_fn(|n: u64| async move { Err::<u64, _>(Failed(Cell::new(n as u32))) });
    let square =
        ServiceBuilder::new().layer(guard.memoize(|n: &u64| CacheKey::from(("square", n)))).service(square);
    let _ = square.oneshot(12).await;
}
