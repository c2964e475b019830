//! One replica: an HTTP server with the guard around a slow handler, in a process or, with a store in memory, in a task.

mod origin_client;
pub(crate) mod plain_cache;
pub(crate) mod process;

use std::io;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use axum::extract::{Path, Request, State};
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use axum::routing::{get, post};
use axum::serve::ListenerExt as _;
use axum::{Json, Router};
use serde::{Deserialize, Serialize};
use stampede_guard::http::HttpPolicy;
use stampede_guard::{Backend, OnOverload, OnWaitTimeout, Policy, StampedeGuard};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tower::ServiceExt as _;

use crate::controls::{Mode, ReplicaSettings};
use origin_client::OriginClient;
use plain_cache::PlainCache;

/// The name under which clients ask all replicas, as behind one load balancer.
pub(crate) const AUTHORITY: &str = "lab.example";
/// The name of all policies, for the metrics.
const POLICY: &str = "reports";
/// With `Mode::Stale`: for how long after its freshness a value is served while it is loaded anew, and when loads fail.
const STALE: Duration = Duration::from_secs(30);
/// How long a request may wait for Redis. The default is 100 ms, too short for many processes without optimisation on few cores: a
/// replica that gets no processor for that long takes Redis for dead.
const BUDGET: Duration = Duration::from_millis(500);

/// With `Mode::Adaptive`: how long a load may wait for its permit. Clients wait for three seconds.
const PERMIT: Duration = Duration::from_secs(2);

/// The configuration of a replica.
#[derive(Debug, Deserialize, Serialize)]
pub(crate) struct ReplicaConfig {
    pub(crate) id: usize,
    /// Host and port.
    pub(crate) origin: String,
    /// The URL of Redis, through the replica's proxy.
    pub(crate) redis: String,
    pub(crate) namespace: String,
    pub(crate) settings: ReplicaSettings,
}

/// What a replica reports while it runs.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub(crate) struct Report {
    /// Requests that were answered from its memory, ever.
    pub(crate) local_hits: u64,
    /// Whether the guard sends commands to the store.
    pub(crate) breaker: String,
}

pub(crate) struct Replica {
    guard: StampedeGuard,
    plain: PlainCache,
    origin: OriginClient,
    /// The service of the present mode.
    app: RwLock<Router>,
}

impl Replica {
    pub(crate) fn new(
        id: usize,
        origin: &str,
        namespace: &str,
        backend: Backend,
        plain: PlainCache,
    ) -> Result<Arc<Self>, stampede_guard::Error> {
        // The time that one command may take is that of this policy, also with the policies of the modes.
        let policy = Policy::builder().name(POLICY).coordination_budget(BUDGET).build()?;
        let guard = StampedeGuard::builder(backend).namespace(namespace).policy(policy).build()?;
        let origin = OriginClient::new(id, origin);
        Ok(Arc::new(Self { guard, plain, origin, app: RwLock::default() }))
    }

    /// Connects to the store, so that the first request need not.
    pub(crate) async fn connect(&self) {
        // A store that is away is no reason not to start; the guard connects when it is back.
        let _ = self.guard.connect().await;
    }

    /// Serves until the future is dropped, by the settings and their changes.
    pub(crate) async fn serve(
        self: &Arc<Self>,
        listener: TcpListener,
        mut settings: watch::Receiver<ReplicaSettings>,
    ) -> io::Result<()> {
        self.apply(&settings.borrow_and_update().clone());
        let following = async {
            while settings.changed().await.is_ok() {
                self.apply(&settings.borrow_and_update().clone());
            }
            std::future::pending().await
        };
        let routes = Router::new()
            .route("/lab/invalidate/{version}/report/{key}", post(invalidate))
            .route("/metrics", get(metrics))
            .fallback(answer)
            .with_state(self.clone());
        // Without it small responses would wait for the acknowledgement of earlier ones.
        let listener = listener.tap_io(|stream| drop(stream.set_nodelay(true)));
        tokio::select! {
            served = axum::serve(listener, routes) => served,
            () = following => Ok(()),
        }
    }

    pub(crate) fn report(&self) -> Report {
        Report { local_hits: self.guard.stats().local_hits, breaker: self.guard.health().breaker.to_string() }
    }

    /// Hands over what it loads, and ends.
    pub(crate) async fn leave(&self) {
        self.guard.shutdown(Duration::from_millis(500)).await;
    }

    /// Builds the service of a mode.
    fn apply(self: &Arc<Self>, settings: &ReplicaSettings) {
        let path = "/{version}/report/{key}";
        let app = match settings.mode {
            Mode::Off => {
                Router::new().route(path, get(plain_report)).with_state((self.clone(), settings.fresh_ms))
            }
            _ => match policy(settings) {
                Ok(policy) => Router::new()
                    .route(path, get(report))
                    .layer(self.guard.with_policy(policy))
                    .with_state(self.clone()),
                // The settings have been checked. If the policy refuses them all the same, requests say why.
                Err(error) => {
                    let text = error.to_string();
                    Router::new().fallback(move || async move { (StatusCode::INTERNAL_SERVER_ERROR, text) })
                }
            },
        };
        *self.app.write().unwrap_or_else(PoisonError::into_inner) = app;
    }
}

/// The policy of a mode.
fn policy(settings: &ReplicaSettings) -> Result<Policy, stampede_guard::Error> {
    let http = HttpPolicy::default().authority(AUTHORITY);
    let fresh_for = Duration::from_millis(settings.fresh_ms);
    let mut policy =
        Policy::builder().name(POLICY).coordination_budget(BUDGET).http(http).fresh_for(fresh_for);
    policy = policy.audit(settings.audit_percent as f64 / 100.0);
    if settings.wait_timeout_ms > 0 {
        let timeout = Duration::from_millis(settings.wait_timeout_ms);
        policy = policy.wait_timeout(timeout, OnWaitTimeout::Load);
    }
    match settings.mode {
        Mode::Off | Mode::On => policy,
        Mode::Stale => policy.stale_while_revalidate(STALE).stale_if_error(STALE),
        Mode::Local => policy.local_for(fresh_for),
        Mode::Adaptive => policy.adaptive_loads(true).permit_timeout(PERMIT, OnOverload::Shed),
    }
    .build()
}

/// Every request of a client.
async fn answer(State(replica): State<Arc<Replica>>, request: Request) -> Response {
    let app = replica.app.read().unwrap_or_else(PoisonError::into_inner).clone();
    match app.oneshot(request).await {
        Ok(response) => response,
        Err(never) => match never {},
    }
}

/// The slow handler.
async fn report(State(replica): State<Arc<Replica>>, Path((version, key)): Path<(String, u64)>) -> Response {
    replica.origin.load(&version, key).await
}

/// The slow handler with a plain cache, as it is written without the guard.
async fn plain_report(
    State((replica, fresh_ms)): State<(Arc<Replica>, u64)>,
    Path((version, key)): Path<(String, u64)>,
) -> Response {
    let name = plain_cache::name(&version, key);
    let stored = replica.plain.get(&name).await;
    if let Ok(Some(body)) = stored {
        return ([(header::CACHE_STATUS, "plain-cache; hit")], body).into_response();
    }
    let response = replica.origin.load(&version, key).await;
    let (mut head, body) = response.into_parts();
    let Ok(body) = axum::body::to_bytes(body, usize::MAX).await else {
        return StatusCode::BAD_GATEWAY.into_response();
    };
    let status = match stored {
        Err(_) => "plain-cache; fwd=miss; detail=no-store",
        Ok(_) if head.status != StatusCode::OK => "plain-cache; fwd=uri-miss",
        Ok(_) if head.headers.contains_key(header::CACHE_CONTROL) => {
            "plain-cache; fwd=uri-miss; detail=private"
        }
        Ok(_) => match replica.plain.set(&name, body.clone(), fresh_ms).await {
            Ok(()) => "plain-cache; fwd=uri-miss; stored",
            Err(_) => "plain-cache; fwd=uri-miss; detail=no-store",
        },
    };
    head.headers.insert(header::CACHE_STATUS, HeaderValue::from_static(status));
    (head, body).into_response()
}

/// Invalidates a report in the whole fleet, for the load of the present mode.
async fn invalidate(
    State(replica): State<Arc<Replica>>,
    Path((version, key)): Path<(String, u64)>,
) -> Result<Json<()>, (StatusCode, String)> {
    let refused = |error: &dyn std::error::Error| (StatusCode::BAD_GATEWAY, error.to_string());
    let policy = Policy::builder().name(POLICY).http(HttpPolicy::default().authority(AUTHORITY)).build();
    let guard = replica.guard.with_policy(policy.map_err(|error| refused(&error))?);
    // Both caches are notified, whether or not the other one can be.
    let invalidated = guard.invalidate_path(&format!("/{version}/report/{key}")).await;
    replica.plain.remove(&plain_cache::name(&version, key)).await.map_err(|error| refused(&*error))?;
    invalidated.map_err(|error| refused(&error))?;
    Ok(Json(()))
}

/// The counters of this replica's process, in Prometheus' text format.
async fn metrics() -> Response {
    match crate::prometheus::render() {
        Some(text) => {
            ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text).into_response()
        }
        None => (StatusCode::NOT_FOUND, "start the lab with `--features metrics`\n").into_response(),
    }
}
