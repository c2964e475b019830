//! `BoxService` is not `Clone`.

use std::convert::Infallible;

use stampede_guard::StampedeGuard;
use tower::util::BoxService;
use tower::{ServiceBuilder, ServiceExt as _, service_fn};

async fn ask(guard: StampedeGuard, request: http::Request<String>) {
    let pages = service_fn(|_: http::Request<String>| async {
        Ok::<_, Infallible>(http::Response::new("a page".to_owned()))
    });
    let pages = ServiceBuilder::new().layer(guard).service(BoxService::new(pages));
    let _ = pages.oneshot(request).await;
}
