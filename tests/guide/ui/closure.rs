//! The key's closure does not name the type of its argument, and calls a method of it.

use std::convert::Infallible;

use stampede_guard::{CacheKey, StampedeGuard};
use tower::{ServiceBuilder, ServiceExt as _, service_fn};

async fn ask(guard: StampedeGuard, request: http::Request<String>) {
    let pages = service_fn(|request: http::Request<String>| async { Ok::<_, Infallible>(request.into_body()) });
    let pages = ServiceBuilder::new()
        .layer(guard.memoize(|request| CacheKey::from(request.uri().path())))
        .service(pages);
    let _ = pages.oneshot(request).await;
}
