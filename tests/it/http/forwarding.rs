//! The key of a request that a proxy's handler forwards through a guarded client.

use axum::Router;
use axum::body::Body;
use axum::routing::get;
use http::{Request, Version, header};
use http_body_util::{BodyExt as _, Full};
use stampede_guard::StampedeGuard;
use stampede_guard::http::cache_key;
use tower::{Layer as _, ServiceExt as _};

use super::kit::{Inner, Req, respond, whole};

/// Forwards `/report` to the host that a header names. The request keeps everything but, if `keeps_host` is false, its
/// `Host`.
fn proxy(guard: &StampedeGuard, keeps_host: bool) -> Router {
    let inner = Inner::with(|_, request: &Req| Ok(respond(200, &[], whole(request.uri().to_string()))));
    let client = guard.layer(inner);
    let forward = move |request: Request<Body>| async move {
        let mut request = request.map(|_| Full::default());
        let upstream = request.headers()["x-upstream"].to_str().unwrap();
        *request.uri_mut() = format!("http://{upstream}/report").parse().unwrap();
        if !keeps_host {
            request.headers_mut().remove(header::HOST);
        }
        client.oneshot(request).await.unwrap().map(Body::new)
    };
    Router::new().route("/report", get(forward))
}

/// A request as a server receives it.
fn incoming(version: Version, upstream: &str) -> Request<Body> {
    let request = match version {
        Version::HTTP_2 => Request::builder().uri("http://shop.example/report"),
        _ => Request::builder().uri("/report").header("host", "shop.example"),
    };
    request.version(version).header("x-upstream", upstream).body(Body::empty()).unwrap()
}

/// B2
#[tokio::test]
async fn a_forwarded_request_is_keyed_by_its_target() {
    for version in [Version::HTTP_11, Version::HTTP_2] {
        for keeps_host in [false, true] {
            let guard = StampedeGuard::in_memory();
            let app = proxy(&guard, keeps_host);
            for _ in 0..2 {
                for upstream in ["a.internal", "b.internal"] {
                    let response = app.clone().oneshot(incoming(version, upstream)).await.unwrap();
                    let text = response.into_body().collect().await.unwrap().to_bytes();
                    let expected = format!("http://{upstream}/report");
                    assert_eq!(text, expected, "{version:?}, with its Host: {keeps_host}");
                }
            }
            // An HTTP/2 request has no `Host` that could differ from its target.
            let differs = keeps_host && version == Version::HTTP_11;
            let expected = if differs { (0, 0, 4) } else { (2, 2, 0) };
            let stats = guard.stats();
            assert_eq!((stats.loads, stats.hits, stats.bypassed), expected, "{version:?}, {keeps_host}");
            let key = cache_key(&"http://a.internal/report".parse().unwrap()).unwrap();
            assert_eq!(guard.contains(key).await.unwrap(), !differs);
        }
    }
}
