//! The error of the inner service has no text.

use stampede_guard::StampedeGuard;
use tower::{ServiceBuilder, ServiceExt, service_fn};

#[derive(Debug)]
struct NoStock;

async fn ask(guard: StampedeGuard, request: http::Request<String>) {
    let stock = service_fn(|_: http::Request<String>| async { Err::<http::Response<String>, _>(NoStock) });
    let stock = ServiceBuilder::new().layer(guard).service(stock);
    let _ = ServiceExt::oneshot(stock, request).await;
}
