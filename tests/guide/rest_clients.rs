//! `docs/rest-clients.md`.

use std::error::Error;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use axum::extract::{Path, State};
use axum::http::{HeaderMap, Request, Response, StatusCode, header};
use axum::{Router, routing::get};
use bytes::Bytes;
use http_body_util::{BodyExt as _, Empty, Full};
use reqwest_middleware::ClientBuilder;
use serde::{Deserialize, Serialize};
use stampede_guard::http::HttpPolicy;
use stampede_guard::http::reqwest::ReqwestService;
use stampede_guard::{CacheKey, LoadError, Policy, StampedeGuard};
use tokio::net::TcpListener;
use tower::{Service, ServiceBuilder, ServiceExt as _, service_fn};

/// An API that counts its requests. `/price/{name}` is public, `/basket` is the user's, `/broken` fails.
#[derive(Clone, Default)]
struct Api {
    requests: Arc<AtomicUsize>,
}

impl Api {
    fn requests(&self) -> usize {
        self.requests.load(Ordering::SeqCst)
    }

    async fn start(&self) -> Result<String, std::io::Error> {
        let price = |State(api): State<Self>, Path(name): Path<String>| async move {
            api.requests.fetch_add(1, Ordering::SeqCst);
            ([(header::CACHE_CONTROL, "max-age=10")], format!("{name}: 42 coins"))
        };
        let basket = |State(api): State<Self>, headers: HeaderMap| async move {
            api.requests.fetch_add(1, Ordering::SeqCst);
            let user = headers.get(header::AUTHORIZATION).and_then(|user| user.to_str().ok()).unwrap_or("-");
            ([(header::CACHE_CONTROL, "private, max-age=10")], format!("the basket of {user}"))
        };
        let app = Router::new()
            .route("/price/{name}", get(price))
            .route("/basket", get(basket))
            .with_state(self.clone());
        let listener = TcpListener::bind(("127.0.0.1", 0)).await?;
        let url = format!("http://{}", listener.local_addr()?);
        tokio::spawn(async move { axum::serve(listener, app).await });
        Ok(url)
    }
}

#[tokio::test]
async fn reqwest_behind_the_guard() -> Result<(), Box<dyn Error + Send + Sync>> {
    let server = Api::default();
    let api = server.start().await?;
    let (guard, reqwest) = (StampedeGuard::in_memory(), reqwest::Client::new());

    let client = ServiceBuilder::new().layer(guard.clone()).service(ReqwestService::new(reqwest.clone())?);

    let request = reqwest.get(format!("{api}/price/ant")).build()?;
    let response = client.clone().oneshot(request.try_into()?).await?;
    let text = response.into_body().collect().await?.to_bytes();
    assert_eq!(text, "ant: 42 coins");

    let request = reqwest.get(format!("{api}/price/ant")).build()?;
    let response = client.clone().oneshot(request.try_into()?).await?;
    let status = response.headers()[header::CACHE_STATUS].to_str()?;
    assert!(status.contains("; hit"), "{status}");
    assert_eq!(response.into_body().collect().await?.to_bytes(), "ant: 42 coins");
    assert_eq!(server.requests(), 1);

    let client = ClientBuilder::new(reqwest.clone()).with(guard.reqwest(reqwest)?).build();

    let text = client.get(format!("{api}/price/ant")).send().await?.text().await?;
    assert_eq!((&*text, server.requests()), ("ant: 42 coins", 1));
    Ok(())
}

#[tokio::test]
async fn one_account_before_the_guard() -> Result<(), Box<dyn Error + Send + Sync>> {
    let server = Api::default();
    let api = server.start().await?;
    let policy = Policy::builder().http(HttpPolicy::private()).build()?;
    let (guard, reqwest) = (StampedeGuard::in_memory().with_policy(policy), reqwest::Client::new());

    let account = HeaderMap::from_iter([(header::AUTHORIZATION, "Ada".parse()?)]);
    let middleware = guard.reqwest(reqwest.clone())?.default_headers(account);
    let client = ClientBuilder::new(reqwest).with(middleware).build();

    for _ in 0..2 {
        let basket = client.get(format!("{api}/basket")).send().await?.text().await?;
        assert_eq!((&*basket, server.requests()), ("the basket of Ada", 1));
    }
    Ok(())
}

#[tokio::test]
async fn a_private_policy_separates_users() -> Result<(), Box<dyn Error + Send + Sync>> {
    let server = Api::default();
    let api = server.start().await?;
    let (shared, reqwest) = (StampedeGuard::in_memory(), reqwest::Client::new());
    // The default policy stores neither.
    let careful = ClientBuilder::new(reqwest.clone()).with(shared.reqwest(reqwest.clone())?).build();
    for _ in 0..2 {
        careful.get(format!("{api}/basket")).header(header::AUTHORIZATION, "Ada").send().await?;
    }
    assert_eq!(server.requests(), 2);
    let server = Api::default();
    let api = server.start().await?;

    let policy = Policy::builder().http(HttpPolicy::private()).build()?;
    let own = shared.with_policy(policy);
    let client = ClientBuilder::new(reqwest.clone()).with(own.reqwest(reqwest)?).build();

    for user in ["Ada", "Ada", "Bob"] {
        let request = client.get(format!("{api}/basket")).header(header::AUTHORIZATION, user);
        assert_eq!(request.send().await?.text().await?, format!("the basket of {user}"));
    }
    assert_eq!(server.requests(), 2); // one for Ada, one for Bob
    Ok(())
}

#[derive(Clone, Debug, Hash)]
struct Route {
    from: String,
    to: String,
}

#[derive(Debug, Serialize, Deserialize)]
struct Distance {
    km: u32,
}

/// A client that is not HTTP, or that has request types of its own.
#[derive(Clone, Default)]
struct Maps {
    requests: Arc<AtomicUsize>,
}

impl Maps {
    async fn distance(&self, route: Route) -> Result<Distance, std::io::Error> {
        self.requests.fetch_add(1, Ordering::SeqCst);
        match route.to.as_str() {
            "Atlantis" => Err(std::io::Error::other("no such city")),
            to => Ok(Distance { km: u32::try_from(to.len()).unwrap_or(0) * 100 }),
        }
    }
}

#[tokio::test]
async fn any_client_by_a_key() -> Result<(), Box<dyn Error + Send + Sync>> {
    let guard = StampedeGuard::in_memory();
    let maps = Maps::default();
    let requests = Arc::clone(&maps.requests);

    let client = service_fn(move |route: Route| {
        let maps = maps.clone();
        async move { maps.distance(route).await }
    });
    let key = |route: &Route| CacheKey::from(("distance", &route.from, &route.to));
    let client = ServiceBuilder::new().layer(guard.memoize(key)).service(client);

    let route = Route { from: "Bern".into(), to: "Oslo".into() };
    let distance = client.clone().oneshot(route.clone()).await?;
    assert_eq!(distance.km, 400);
    let distance = client.clone().oneshot(route).await?;
    assert_eq!((distance.km, requests.load(Ordering::SeqCst)), (400, 1));

    let nowhere = Route { from: "Bern".into(), to: "Atlantis".into() };
    let text = match client.clone().oneshot(nowhere).await {
        Ok(distance) => format!("{} km", distance.km),
        Err(LoadError::Loader(error)) => format!("the map service says: {error}"), // this process sent the request
        Err(LoadError::Remote(text)) => format!("the map service says: {text}"),   // another process sent it
        Err(error) => format!("no answer: {error}"), // a panic, or the guard's own error
    };
    assert_eq!(text, "the map service says: no such city");
    Ok(())
}

/// An API that can not be reached, and takes a while to be so.
fn unreachable()
-> impl Service<Request<Empty<Bytes>>, Response = Response<Full<Bytes>>, Error = std::io::Error, Future: Send>
+ Clone
+ Send {
    service_fn(|_: Request<Empty<Bytes>>| async {
        tokio::time::sleep(std::time::Duration::from_millis(100)).await;
        Err::<Response<Full<Bytes>>, _>(std::io::Error::other("connection refused"))
    })
}

fn price() -> Result<Request<Empty<Bytes>>, axum::http::Error> {
    Request::get("http://api.example/price/ant").body(Empty::new())
}

#[tokio::test]
async fn the_leader_gets_the_error_and_waiters_a_502() -> Result<(), Box<dyn Error + Send + Sync>> {
    let client = ServiceBuilder::new().layer(StampedeGuard::in_memory()).service(unreachable());

    let (one, two) = tokio::join!(client.clone().oneshot(price()?), client.clone().oneshot(price()?));
    assert!(one.is_err_and(|error| error.to_string() == "connection refused")); // sent the request
    let two = two?; // waited for it
    assert_eq!(two.status(), StatusCode::BAD_GATEWAY);
    assert!(two.headers().contains_key(header::RETRY_AFTER));

    println!("{:?}", two.headers());
    Ok(())
}
