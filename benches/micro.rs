//! What the guard's own work costs without a network: keys, and hits on the in-memory store.
//!
//! `cargo bench --bench micro`. One call at a time on a current-thread runtime, so these are the costs of a lone
//! caller; `fleet -- hit` measures them against a real server and a control.
#![allow(missing_docs, reason = "the macros of criterion define undocumented functions")]

use std::convert::Infallible;
use std::hint::black_box;

use axum::http::{Request, Response, header};
use bytes::Bytes;
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use http_body_util::{BodyExt as _, Empty, Full};
use serde::{Deserialize, Serialize};
use stampede_guard::{CacheKey, StampedeGuard};
use tokio::runtime::{Builder, Runtime};
use tower::{Layer as _, Service as _, service_fn};

criterion_group!(benches, keys, loader_hit, layer_hit);
criterion_main!(benches);

/// The hits' values live for a minute by default; a benchmark of one size takes less.
const SIZES: [usize; 3] = [64, 1024, 64 * 1024];

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct User {
    id: u64,
    name: String,
    mail: String,
}

fn runtime() -> Runtime {
    Builder::new_current_thread().enable_all().build().expect("a runtime")
}

fn keys(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("key");
    group.bench_function("text", |bencher| bencher.iter(|| CacheKey::from(black_box("user-000042"))));
    group.bench_function("tuple", |bencher| bencher.iter(|| CacheKey::from(black_box(("user", 42_u64)))));
    group.bench_function("escaped", |bencher| {
        bencher.iter(|| CacheKey::from(black_box("a key: with {braces} and spaces")));
    });
    group.finish();
}

fn loader_hit(criterion: &mut Criterion) {
    let (runtime, guard) = (runtime(), StampedeGuard::in_memory());
    let mut group = criterion.benchmark_group("get_or_load, hit in memory");
    for size in SIZES {
        let value = Bytes::from(vec![b'v'; size]);
        group.throughput(Throughput::Bytes(size as u64));
        group.bench_function(BenchmarkId::new("bytes", size), |bencher| {
            bencher.to_async(&runtime).iter(|| async {
                let value = value.clone();
                let load = || async { Ok::<_, Infallible>(value) };
                guard.get_or_load(("bytes", size), load).await.expect("infallible")
            });
        });
    }
    group.throughput(Throughput::Elements(1));
    let user = User { id: 42, name: "Ada Lovelace".into(), mail: "ada@shop.example".into() };
    group.bench_function("struct", |bencher| {
        bencher.to_async(&runtime).iter(|| async {
            let user = user.clone();
            let load = || async { Ok::<_, Infallible>(user) };
            guard.get_or_load(("user", 42), load).await.expect("infallible")
        });
    });
    group.finish();
}

fn layer_hit(criterion: &mut Criterion) {
    let runtime = runtime();
    let mut group = criterion.benchmark_group("layer, hit in memory");
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
        let service = StampedeGuard::in_memory().layer(inner);
        group.throughput(Throughput::Bytes(size as u64));
        group.bench_function(BenchmarkId::new("4 headers", size), |bencher| {
            bencher.to_async(&runtime).iter(|| {
                let mut service = service.clone();
                async move {
                    let request = Request::get("/report/000042").header(header::HOST, "shop.example");
                    let request = request.body(Empty::new()).expect("a valid request");
                    let response = service.call(request).await.expect("the response is valid");
                    response.into_body().collect().await.expect("a whole body").to_bytes()
                }
            });
        });
    }
    group.finish();
}
