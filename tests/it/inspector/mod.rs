//! The inspector: who is admitted, what it says of a fleet and of a key, and what it does.

mod acting;
mod admission;
mod fleet;
mod keys;
#[cfg(feature = "redis")]
mod on_redis;

use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body_util::{BodyExt as _, Full};
use serde_json::Value;
use stampede_guard::http::GuardedBody;
use stampede_guard::inspector::{Inspector, InspectorService};
use stampede_guard::{Backend, MemoryStore, StampedeGuard};
use tower::ServiceExt as _;

const TOKEN: &str = "3f6c2d9ab1e74f05";

fn guard(store: &MemoryStore) -> StampedeGuard {
    guard_on(store.clone().into())
}

fn guard_on(backend: Backend) -> StampedeGuard {
    StampedeGuard::builder(backend).namespace("shop").build().expect("valid")
}

fn serve(inspector: Inspector) -> InspectorService {
    inspector.token(TOKEN).into_service().expect("valid")
}

fn get(path: &str) -> http::request::Builder {
    Request::get(path).header("authorization", format!("Bearer {TOKEN}"))
}

async fn send(service: &InspectorService, request: Request<Full<Bytes>>) -> Response<GuardedBody> {
    service.clone().oneshot(request).await.expect("infallible")
}

async fn read(response: Response<GuardedBody>) -> (StatusCode, Bytes) {
    let status = response.status();
    (status, response.into_body().collect().await.expect("a whole body").to_bytes())
}

async fn json(service: &InspectorService, request: http::request::Builder) -> (StatusCode, Value) {
    json_of(service, request, "").await
}

async fn json_of(
    service: &InspectorService,
    request: http::request::Builder,
    body: &str,
) -> (StatusCode, Value) {
    let request = request.body(Full::from(body.to_owned())).expect("a request");
    let (status, body) = read(send(service, request).await).await;
    (status, serde_json::from_slice(&body).unwrap_or_else(|_| panic!("{status}: {body:?}")))
}

/// The answer about the fleet, which must come within a second.
async fn fleet_of(service: &InspectorService) -> Value {
    let answer = tokio::time::timeout(Duration::from_secs(5), json(service, get("/api/fleet"))).await;
    let (status, fleet) = answer.expect("within the time");
    assert_eq!(status, StatusCode::OK, "{fleet}");
    fleet
}

/// The processes with this state, by their names.
fn names(fleet: &Value, state: &str) -> Vec<String> {
    let processes = fleet["processes"].as_array().expect("a list").iter();
    let of_state = processes.filter(|process| process["state"] == state);
    let mut names: Vec<_> =
        of_state.map(|process| process["name"].as_str().unwrap_or("-").to_owned()).collect();
    names.sort();
    names
}

fn encoded(text: &str) -> String {
    text.bytes().map(|byte| format!("%{byte:02X}")).collect()
}

async fn key_of(service: &InspectorService, key: &str) -> Value {
    let request = Request::post("/api/key").header("authorization", format!("Bearer {TOKEN}"));
    let (status, answer) = json_of(service, request, &format!("key={}", encoded(key))).await;
    assert_eq!(status, StatusCode::OK, "{answer}");
    answer
}
