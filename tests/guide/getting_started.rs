//! The code of `docs/getting-started.md`.

#[expect(dead_code, reason = "`main` is the program of the page; the tests ask its parts")]
mod a_slow_handler {
    use std::time::Duration;

    use axum::extract::Path;
    use axum::{Router, routing::get};

    async fn report(Path(id): Path<u64>) -> String {
        println!("load of report {id}");
        tokio::time::sleep(Duration::from_secs(1)).await; // the expensive query
        format!("report {id}: all is well\n")
    }

    fn app() -> Router {
        Router::new().route("/report/{id}", get(report))
    }

    #[tokio::main]
    async fn main() -> Result<(), Box<dyn std::error::Error>> {
        tracing_subscriber::fmt().init(); // prints the guard's warnings
        let listener = tokio::net::TcpListener::bind("127.0.0.1:8080").await?;
        axum::serve(listener, app()).await?;
        Ok(())
    }

    pub(super) mod guarded {
        use super::report;

        use axum::{Router, routing::get};
        use stampede_guard::StampedeGuard;

        fn app() -> Router {
            Router::new().route("/report/{id}", get(report)).layer(StampedeGuard::in_memory()) // the one line
        }

        pub(crate) fn service() -> Router {
            app()
        }
    }

    #[tokio::test(start_paused = true)]
    async fn the_plain_handler_runs_each_time() {
        for _ in 0..2 {
            let began = tokio::time::Instant::now();
            let seen = crate::requests::get(&app(), "/report/7").await;
            assert_eq!(seen.text(), "report 7: all is well\n");
            assert_eq!(began.elapsed(), Duration::from_secs(1));
        }
    }
}

mod a_loader {
    use axum::extract::{Path, State};
    use axum::http::StatusCode;
    use axum::{Json, Router, routing::get};
    use serde::{Deserialize, Serialize};
    use stampede_guard::StampedeGuard;

    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    pub(crate) struct Product {
        id: u64,
        name: String,
    }

    /// A pool of connections in a real service.
    #[derive(Clone)]
    pub(crate) struct Database;

    impl Database {
        async fn product(&self, id: u64) -> Result<Product, std::io::Error> {
            Ok(Product { id, name: format!("product {id}") })
        }
    }

    #[derive(Clone)]
    pub(crate) struct Shop {
        pub(crate) guard: StampedeGuard,
        pub(crate) db: Database,
    }

    async fn product(State(shop): State<Shop>, Path(id): Path<u64>) -> Result<Json<Product>, StatusCode> {
        let db = shop.db.clone(); // the load owns what it uses: it may outlive this request
        let product = shop.guard.get_or_load(("product", id), move || async move { db.product(id).await });
        match product.await {
            Ok(product) => Ok(Json(product)),
            Err(error) => {
                eprintln!("product {id}: {error}");
                Err(StatusCode::BAD_GATEWAY)
            }
        }
    }

    pub(crate) fn app(shop: Shop) -> Router {
        Router::new().route("/product/{id}", get(product)).with_state(shop)
    }
}

mod a_fleet {
    use stampede_guard::StampedeGuard;

    #[expect(dead_code, reason = "needs a server")]
    async fn fleet() -> Result<StampedeGuard, Box<dyn std::error::Error>> {
        let redis = redis::Client::open("redis://127.0.0.1/")?;
        let guard = StampedeGuard::builder(redis).namespace("shop").build()?;
        if let Err(error) = guard.connect().await {
            eprintln!("{error}; requests are answered all the same");
        }
        Ok(guard)
    }

    pub(super) async fn watch(guard: &StampedeGuard) {
        let stats = guard.stats();
        println!("{} loads; {} requests were spared one", stats.loads, stats.loads_saved());
        println!("{}", guard.health());
        println!("{}", guard.doctor().await);
    }
}

use crate::requests::get;
use stampede_guard::StampedeGuard;

#[tokio::test(start_paused = true)]
async fn behind_the_guard_one_load_serves_all_clients_at_once_and_later() {
    let app = a_slow_handler::guarded::service();
    let (one, two) = tokio::join!(get(&app, "/report/7"), get(&app, "/report/7"));
    for seen in [&one, &two] {
        assert_eq!((seen.status, seen.text()), (200, "report 7: all is well\n"));
    }
    let remarks = [one.remark(), two.remark()];
    assert!(remarks.iter().any(|remark| remark.starts_with("fwd=uri-miss; stored; ttl=")), "{remarks:?}");
    assert!(remarks.iter().any(|remark| remark.starts_with("fwd=miss; collapsed; ttl=")), "{remarks:?}");
    let later = get(&app, "/report/7").await;
    assert!(later.is_hit(), "{}", later.remark());
}

#[tokio::test]
async fn any_tower_service() -> Result<(), Box<dyn std::error::Error>> {
    use stampede_guard::CacheKey;
    use tower::{ServiceBuilder, ServiceExt as _};

    let guard = StampedeGuard::in_memory();
    let square = tower::service_fn(|n: u64| async move { Ok::<u64, std::io::Error>(n * n) });
    let memoized = ServiceBuilder::new()
        .layer(guard.memoize(|n: &u64| CacheKey::from(("square", n)))) // the key of a request
        .service(square);
    assert_eq!(memoized.clone().oneshot(12).await?, 144);
    assert_eq!(memoized.oneshot(12).await?, 144);
    assert_eq!(guard.stats().loads, 1);
    Ok(())
}

#[tokio::test]
async fn a_loader_runs_once() {
    let guard = StampedeGuard::in_memory();
    let app = a_loader::app(a_loader::Shop { guard: guard.clone(), db: a_loader::Database });
    for _ in 0..3 {
        assert_eq!(get(&app, "/product/7").await.text(), r#"{"id":7,"name":"product 7"}"#);
    }
    assert_eq!(guard.stats().loads, 1);
    assert_eq!(guard.stats().loads_saved(), 2);
    a_fleet::watch(&guard).await;
}
