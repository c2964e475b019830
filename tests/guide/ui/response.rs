//! What `memoize` stores must be encoded.

use std::convert::Infallible;

use stampede_guard::{CacheKey, StampedeGuard};
use tower::{ServiceBuilder, ServiceExt as _, service_fn};

struct Price {
    cents: u64,
}

async fn ask(guard: StampedeGuard) {
    let prices = service_fn(|id: u64| async move { Ok::<_, Infallible>(Price { cents: 499 + id }) });
    let prices = ServiceBuilder::new()
        .layer(guard.memoize(|id: &u64| CacheKey::from(("price", id))))
        .service(prices);
    let _ = prices.oneshot(7).await;
}
