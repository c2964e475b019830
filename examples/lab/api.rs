//! The page, and the API that it uses. Scripts can use it as well: `curl -H 'Content-Type: application/json' -d '{"what":"kill",
//! "replica":"leader"}' http://127.0.0.1:7777/fault`.

use std::sync::Arc;

use axum::body::Bytes;
use axum::extract::{Query, Request, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::middleware::{Next, from_fn};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::lab::Lab;
use crate::presets::{Name, Presets};

/// Nothing but what this server serves: no other host, no inline script, no frame around the page.
const CONTENT_SECURITY_POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; \
     connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

pub(crate) fn router(lab: Arc<Lab>) -> Router {
    let app = App { presets: Presets::new(lab.clone()), lab };
    let file = |kind: &'static str, text: &'static str| {
        get(move || async move { ([(header::CONTENT_TYPE, kind)], text) })
    };
    let script = "text/javascript; charset=utf-8";
    Router::new()
        .route("/", file("text/html; charset=utf-8", include_str!("page/index.html")))
        .route("/style.css", file("text/css; charset=utf-8", include_str!("page/style.css")))
        .route("/app.js", file(script, include_str!("page/app.js")))
        .route("/charts.js", file(script, include_str!("page/charts.js")))
        .route("/controls.js", file(script, include_str!("page/controls.js")))
        .route("/state", get(state))
        .route("/targets", get(targets))
        .route("/control", post(control))
        .route("/fault", post(fault))
        .route("/redis", post(redis))
        .route("/invalidate", post(invalidate))
        .route("/change", post(change))
        .route("/preset", post(preset))
        .route("/preset/stop", post(stop_preset))
        .layer(from_fn(protect))
        .with_state(app)
}

/// What the handlers use.
#[derive(Clone)]
struct App {
    lab: Arc<Lab>,
    presets: Arc<Presets>,
}

impl App {
    /// While a preset runs, its numbers are for its own settings and faults.
    fn not_during_a_preset(&self) -> Result<(), Refusal> {
        if self.presets.is_running() {
            return Err(Refusal::conflict("a preset runs: wait for its end, or stop it"));
        }
        Ok(())
    }
}

/// Sends the headers that keep the page to itself, and refuses other hosts' names, under which a page from elsewhere could reach
/// this server.
async fn protect(request: Request, next: Next) -> Response {
    let host = request.headers().get(header::HOST).and_then(|host| host.to_str().ok()).unwrap_or_default();
    let name = host.rsplit_once(':').map_or(host, |(name, _)| name);
    if !["127.0.0.1", "localhost"].contains(&name) {
        let text = "open the lab as http://127.0.0.1 or http://localhost, with its port\n";
        return (StatusCode::MISDIRECTED_REQUEST, text).into_response();
    }
    let mut response = next.run(request).await;
    let headers = response.headers_mut();
    for (name, value) in [
        (header::CONTENT_SECURITY_POLICY, CONTENT_SECURITY_POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
        // The page belongs to the program that serves it.
        (header::CACHE_CONTROL, "no-store"),
    ] {
        headers.insert(name, header::HeaderValue::from_static(value));
    }
    response
}

/// Why a request was not obeyed.
struct Refusal(StatusCode, String);

impl Refusal {
    fn bad(text: impl Into<String>) -> Self {
        Self(StatusCode::BAD_REQUEST, text.into())
    }

    fn conflict(text: impl Into<String>) -> Self {
        Self(StatusCode::CONFLICT, text.into())
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        (self.0, Json(json!({ "error": self.1 }))).into_response()
    }
}

type Answer = Result<Json<Value>, Refusal>;

fn done(text: String) -> Answer {
    Ok(Json(json!({ "ok": true, "text": text })))
}

/// The JSON object of a request. Only JSON is accepted: a form on another page can not send it.
fn object(headers: &HeaderMap, body: &Bytes) -> Result<Map<String, Value>, Refusal> {
    let kind = headers.get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).unwrap_or_default();
    if !kind.starts_with("application/json") {
        return Err(Refusal::bad("send JSON, with the header Content-Type: application/json"));
    }
    match serde_json::from_slice(body) {
        Ok(Value::Object(object)) => Ok(object),
        Ok(_) => Err(Refusal::bad("send a JSON object, as in {\"mode\":\"on\"}")),
        Err(error) => Err(Refusal::bad(format!("the body is no JSON: {error}"))),
    }
}

/// The text of a field.
fn text<'a>(object: &'a Map<String, Value>, name: &str) -> Result<&'a str, Refusal> {
    object
        .get(name)
        .and_then(Value::as_str)
        .ok_or_else(|| Refusal::bad(format!("the field \"{name}\" is missing")))
}

#[derive(Deserialize)]
struct Since {
    #[serde(default)]
    since: u64,
}

async fn state(State(app): State<App>, Query(Since { since }): Query<Since>) -> Json<Value> {
    let mut state = app.lab.to_json(since);
    (state["preset"], state["results"]) = (app.presets.present(), app.presets.results().into());
    Json(state)
}

/// The replicas, for `http_sd_configs` of Prometheus.
async fn targets(State(app): State<App>) -> Json<Value> {
    let group = |(id, port): (usize, u16)| {
        let labels = json!({ "job": "lab", "replica": id.to_string() });
        json!({ "targets": [format!("127.0.0.1:{port}")], "labels": labels })
    };
    Json(app.lab.fleet.ports().into_iter().map(group).collect())
}

async fn control(State(app): State<App>, headers: HeaderMap, body: Bytes) -> Answer {
    let changes = object(&headers, &body)?;
    app.not_during_a_preset()?;
    done(app.lab.control(&changes).await.map_err(Refusal::bad)?)
}

async fn fault(State(app): State<App>, headers: HeaderMap, body: Bytes) -> Answer {
    let body_fields = object(&headers, &body)?;
    app.not_during_a_preset()?;
    done(app.lab.fault(&body_fields).await.map_err(Refusal::conflict)?)
}

async fn redis(State(app): State<App>, headers: HeaderMap, body: Bytes) -> Answer {
    let body_fields = object(&headers, &body)?;
    app.not_during_a_preset()?;
    done(app.lab.redis(text(&body_fields, "what")?).await.map_err(Refusal::conflict)?)
}

async fn invalidate(State(app): State<App>, headers: HeaderMap, body: Bytes) -> Answer {
    let body_fields = object(&headers, &body)?;
    app.not_during_a_preset()?;
    let invalidated = app.lab.invalidate(text(&body_fields, "key")?).await;
    let (text, ms) = invalidated.map_err(|error| Refusal(StatusCode::BAD_GATEWAY, error))?;
    Ok(Json(json!({ "ok": true, "text": text, "ms": ms })))
}

async fn change(State(app): State<App>, headers: HeaderMap, body: Bytes) -> Answer {
    let body_fields = object(&headers, &body)?;
    done(app.lab.change(text(&body_fields, "key")?).map_err(Refusal::bad)?)
}

async fn preset(State(app): State<App>, headers: HeaderMap, body: Bytes) -> Answer {
    let body_fields = object(&headers, &body)?;
    let name = Name::of(text(&body_fields, "name")?).map_err(Refusal::bad)?;
    let compare = body_fields.get("compare").and_then(Value::as_bool).unwrap_or_default();
    done(app.presets.start(name, compare).map_err(Refusal::conflict)?)
}

async fn stop_preset(State(app): State<App>) -> Answer {
    done(app.presets.stop().await.map_err(Refusal::conflict)?)
}
