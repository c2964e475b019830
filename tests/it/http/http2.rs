//! The promises over HTTP/2: many requests on one connection, with the host in the URI.

use axum::Router;
use axum::extract::Request;
use bytes::Bytes;
use futures_util::future::join_all;
use http::Version;
use http_body_util::{BodyExt as _, Full};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use stampede_guard::StampedeGuard;

use super::kit::{guard, secs};
use super::sockets::serve;
use crate::support::gate::{Counter, Gate};
use crate::support::probe::eventually;

const STREAMS: usize = 50;

fn client() -> Client<HttpConnector, Full<Bytes>> {
    Client::builder(TokioExecutor::new()).http2_only(true).build_http()
}

/// A service that answers in the request's language once the gate is open.
fn app(gate: &Gate, loads: &Counter, guard: &StampedeGuard) -> Router {
    let (gate, loads) = (gate.clone(), loads.clone());
    let handler = move |request: Request| async move {
        let _running = loads.start();
        gate.pass().await;
        let language = request.headers().get("accept-language").map(|value| value.to_str().unwrap());
        let language = language.unwrap_or("none").to_owned();
        ([("vary", "accept-language"), ("etag", "\"a\"")], language)
    };
    Router::new().fallback(handler).layer(guard.clone())
}

#[tokio::test]
async fn fifty_streams_of_one_connection_are_one_load_for_each_variant() {
    let (gate, loads, guard) = (Gate::closed(), Counter::default(), guard());
    let addr = serve(app(&gate, &loads, &guard)).await;
    let client = client();
    let languages = ["de", "en"];
    let streams: Vec<_> = (0..STREAMS)
        .map(|n| {
            let language = languages[n % 2];
            let request = http::Request::get(format!("http://{addr}/")).header("accept-language", language);
            let response = client.request(request.body(Full::default()).unwrap());
            tokio::spawn(async move {
                let (head, body) = response.await.unwrap().into_parts();
                (language, head.version, body.collect().await.unwrap().to_bytes())
            })
        })
        .collect();
    loads.reach(1).await;
    gate.open();
    for seen in join_all(streams).await {
        let (language, version, text) = seen.unwrap();
        assert_eq!((version, text), (Version::HTTP_2, Bytes::from(language)));
    }
    assert_eq!(loads.started(), 2);
    // An HTTP/1.1 request, which has its host in a header, finds the same response.
    let request = http::Request::get(format!("http://{addr}/")).header("accept-language", "de");
    let hit = super::sockets::client().request(request.body(Full::default()).unwrap()).await.unwrap();
    assert!(hit.headers()["cache-status"].to_str().unwrap().contains("; hit; ttl="), "{:?}", hit.headers());
    assert_eq!(loads.started(), 2);
}

#[tokio::test]
async fn a_reset_stream_stops_no_load_and_no_other_stream() {
    let (gate, loads, guard) = (Gate::closed(), Counter::default(), guard());
    let addr = serve(app(&gate, &loads, &guard)).await;
    let client = client();
    let ask = || tokio::spawn(client.get(format!("http://{addr}/").parse().unwrap()));
    let leader = ask();
    loads.reach(1).await;
    let follower = ask();
    leader.abort();
    assert!(leader.await.unwrap_err().is_cancelled());
    gate.open();
    let response = tokio::time::timeout(secs(10), follower).await.expect("in time").unwrap().unwrap();
    assert_eq!(response.into_body().collect().await.unwrap().to_bytes(), "none");
    eventually("nothing is left", secs(10), async || guard.stats().tasks == 0).await;
    assert_eq!(loads.started(), 1);
}
