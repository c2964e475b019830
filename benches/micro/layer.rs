//! Hits of the layer on the in-memory store, for responses with four headers.

use axum::http::{Request, Response, header};
use bytes::Bytes;
use http_body::Body;
use http_body_util::{BodyExt as _, Empty, Full};
use stampede_guard::StampedeGuard;
use tower::{Layer as _, Service, service_fn};

use crate::table::Table;
use crate::turns::{SIZES, awaited, compare, runtime};

pub(crate) fn rows(table: &mut Table) {
    let runtime = runtime();
    for size in SIZES {
        let body = Bytes::from(vec![b'v'; size]);
        let inner = service_fn(move |_: Request<Empty<Bytes>>| {
            let response = Response::builder()
                .header(header::CONTENT_TYPE, "application/json")
                .header(header::CACHE_CONTROL, "public, max-age=3600")
                .header(header::ETAG, "\"33a64df551425fcc55e4d42a148795d9f25f89d4\"")
                .header(header::CONTENT_LANGUAGE, "en")
                .body(Full::new(body.clone()));
            async { response }
        });
        let guarded = StampedeGuard::in_memory().layer(inner.clone());
        let guarded = awaited(&runtime, async || answer(guarded.clone()).await);
        let control = awaited(&runtime, async || answer(inner.clone()).await);
        table.add(compare(format!("hit of the layer, {size} bytes / the service"), guarded, control));
    }
}

/// Sends one request, and reads the whole body of its response.
async fn answer<S, B>(mut service: S) -> Bytes
where
    S: Service<Request<Empty<Bytes>>, Response = Response<B>>,
    S::Error: std::fmt::Debug,
    B: Body<Data = Bytes>,
    B::Error: std::fmt::Debug,
{
    let request = Request::get("/report/000042").header(header::HOST, "shop.example");
    let request = request.body(Empty::new()).expect("a valid request");
    let response = service.call(request).await.expect("the response is valid");
    response.into_body().collect().await.expect("a whole body").to_bytes()
}
