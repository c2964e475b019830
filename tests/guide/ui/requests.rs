//! The key is of other requests than the service's.

use stampede_guard::{CacheKey, StampedeGuard};
use tower::{ServiceBuilder, ServiceExt as _};

use crate::stand_in::reqwest;

async fn ask(guard: StampedeGuard, request: http::Request<String>) {
    let client = ServiceBuilder::new()
        .layer(guard.memoize(|request: &http::Request<String>| CacheKey::from(request.uri().path())))
        .service(reqwest::Client::new());
    let _ = client.oneshot(request).await;
}
