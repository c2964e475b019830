//! A hit of the local tier through the HTTP layer, compared with a service that has its response ready.

use std::convert::Infallible;
use std::hint::black_box;
use std::sync::Arc;

use bytes::Bytes;
use http::{HeaderMap, Request, Response, Uri};
use http_body::Body;
use http_body_util::{BodyExt as _, Full};
use stampede_guard::{MemoryStore, StampedeGuard};
use tokio::runtime::Runtime;
use tower::{Layer as _, Service, service_fn};

use crate::responses::{HEADERS_OF_A_HIT, body, headers, owned, request, response};
use crate::table::{Limit, Row, Table, Unit};
use crate::turns::{Side, concurrent, in_turn, lets_others_run, lone, one_thread, two_threads};
use crate::values::lasting;

const CALLERS: u32 = 64;
const URIS: usize = 1_000;

/// The indices of the sides.
const GUARD: usize = 0;
const CONTROL: usize = 1;
const OWNED: usize = 2;

pub(crate) fn rows(table: &mut Table) {
    let (threads, thread) = (two_threads(), one_thread());
    let control = |headers: HeaderMap| {
        let body = body();
        service_fn(move |_: Request<Full<Bytes>>| {
            let answer = response(headers.clone(), body.clone());
            async { Ok::<_, Infallible>(answer) }
        })
    };
    let (fixed, owned) = (control(headers()), control(owned(&headers())));
    // Each guard connects in the runtime of its callers, which renews its lease.
    let guarded = |runtime: &Runtime| {
        let guard = guard();
        let guarded = guard.layer(service_fn(|_: Request<Full<Bytes>>| async {
            Ok::<_, Infallible>(response(headers(), body()))
        }));
        runtime.block_on(fill(&guard, guarded.clone()));
        guarded
    };

    let many = in_turn(vec![
        callers(&threads, guarded(&threads), HEADERS_OF_A_HIT),
        callers(&threads, fixed.clone(), HEADERS_OF_A_HIT - 2),
        callers(&threads, owned.clone(), HEADERS_OF_A_HIT - 2),
    ]);
    let alone = in_turn(vec![
        caller(&thread, guarded(&thread), HEADERS_OF_A_HIT),
        caller(&thread, fixed, HEADERS_OF_A_HIT - 2),
        caller(&thread, owned, HEADERS_OF_A_HIT - 2),
    ]);
    let what = "local hit: through the layer, 8 headers, 1 KiB / a service that clones a ready response";
    for (callers, times) in [("64 callers, 2 threads", &many), ("a caller alone", &alone)] {
        let (ratio, from_owned) = (times.throughput(GUARD, CONTROL), times.throughput(GUARD, OWNED));
        let (must, aim) = match callers {
            "a caller alone" => (Limit::None, Limit::None),
            _ => (Limit::AtLeast(0.5), Limit::AtLeast(0.8)),
        };
        table.add(Row {
            what: format!("{what}, {callers}"),
            unit: Unit::Ratio,
            must,
            aim,
            measured: ratio.median,
            detail: format!(
                "{ratio}; {:.0} ns, control {:.0} ns; one with header values that are not static {:.2}, {:.0} ns",
                times.of(GUARD).median,
                times.of(CONTROL).median,
                from_owned.median,
                times.of(OWNED).median
            ),
        });
    }
}

pub(crate) fn guard() -> StampedeGuard {
    let policy = lasting().build().expect("valid");
    StampedeGuard::builder(MemoryStore::new()).policy(policy).build().expect("valid")
}

pub(crate) fn uris() -> Arc<[Uri]> {
    (0..URIS).map(|n| format!("/report/{n:06}").parse().expect("a path")).collect()
}

/// Fills the memory with each response, and checks that it is there.
pub(crate) async fn fill<S, B>(guard: &StampedeGuard, mut service: S)
where
    S: Service<Request<Full<Bytes>>, Response = Response<B>, Error = Infallible>,
    B: Body<Data = Bytes, Error: std::fmt::Debug> + Unpin,
{
    let mut local = 0;
    for _ in 0..3 {
        local = guard.stats().local_hits;
        for uri in &*uris() {
            let answer = service.call(request(uri)).await.expect("infallible");
            answer.into_body().collect().await.expect("a whole body");
        }
        // The body ends a moment before its entry is stored.
        while guard.stats().tasks > 0 {
            tokio::task::yield_now().await;
        }
        local = guard.stats().local_hits - local;
    }
    assert_eq!(local, URIS as u64, "each response is in memory");
}

fn callers<S, B>(runtime: &Runtime, service: S, headers: usize) -> Side<'_>
where
    S: Service<Request<Full<Bytes>>, Response = Response<B>, Error = Infallible> + Clone + Send + 'static,
    S::Future: Send,
    B: Body<Data = Bytes, Error: std::fmt::Debug> + Unpin + Send + 'static,
{
    let uris = uris();
    concurrent(runtime, CALLERS, move |caller, calls| {
        let (mut service, uris) = (service.clone(), Arc::clone(&uris));
        async move {
            for call in 0..calls {
                answer(&mut service, uri(&uris, caller, call), headers).await;
                lets_others_run(call).await;
            }
        }
    })
}

fn caller<'a, S, B>(runtime: &'a Runtime, mut service: S, headers: usize) -> Side<'a>
where
    S: Service<Request<Full<Bytes>>, Response = Response<B>, Error = Infallible> + 'a,
    B: Body<Data = Bytes, Error: std::fmt::Debug> + Unpin + 'a,
{
    let uris = uris();
    lone(runtime, async move |call| answer(&mut service, uri(&uris, 0, call), headers).await)
}

fn uri(uris: &[Uri], caller: u32, call: u32) -> &Uri {
    &uris[(caller as usize * 31 + call as usize) % uris.len()]
}

/// Sends one request, and reads the whole of its response.
async fn answer<S, B>(service: &mut S, uri: &Uri, headers: usize)
where
    S: Service<Request<Full<Bytes>>, Response = Response<B>, Error = Infallible>,
    B: Body<Data = Bytes, Error: std::fmt::Debug> + Unpin,
{
    let mut response = service.call(request(uri)).await.expect("infallible");
    let frame = response.body_mut().frame().await.expect("one frame").expect("whole");
    assert_eq!(frame.data_ref().map(Bytes::len), Some(body().len()));
    assert_eq!(black_box(response).headers().len(), headers);
}
