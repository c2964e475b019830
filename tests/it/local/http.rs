//! The HTTP layer with a local tier.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::{BodyExt as _, Full};
use stampede_guard::StampedeGuard;
use tokio::time::sleep;
use tower::{Layer as _, Service, ServiceExt as _};

#[cfg(feature = "testing")]
use super::promises::fleet;
use super::{keeping, replicas};

type Body = Full<Bytes>;

/// A service that answers its `n`th call with `n` and the request's language.
#[derive(Clone, Default)]
struct Counting(Arc<AtomicU32>);

impl Counting {
    async fn answer(self, request: Request<Body>) -> Result<Response<Body>, Infallible> {
        let calls = self.0.fetch_add(1, Ordering::Relaxed) + 1;
        let language = request.headers().get("accept-language").map(|value| value.as_bytes().to_vec());
        let mut body = calls.to_string().into_bytes();
        body.extend(language.unwrap_or_default());
        let mut response =
            Response::builder().header("cache-control", "max-age=600").header("vary", "accept-language");
        if let Some(target) = request.headers().get("see") {
            response = response.status(303).header("location", target);
        }
        Ok(response.body(Full::from(body)).expect("a response"))
    }
}

/// What a client receives: status, `Age`, `Cache-Status` and body.
async fn ask(
    guard: &StampedeGuard,
    service: &Counting,
    request: http::request::Builder,
) -> (Option<u64>, String, String) {
    let service = service.clone();
    let inner = tower::service_fn(move |request: Request<Body>| service.clone().answer(request));
    let request = request.body(Body::default()).expect("a request");
    let mut layered = guard.layer(inner);
    let response = layered.ready().await.expect("ready").call(request).await.expect("answered");
    let header =
        |name: &str| response.headers().get(name).map(|value| value.to_str().expect("text").to_owned());
    let age = header("age").map(|age| age.parse().expect("a number"));
    let status = header("cache-status").unwrap_or_default();
    let body = response.into_body().collect().await.expect("a body").to_bytes();
    (age, status, String::from_utf8(body.to_vec()).expect("text"))
}

fn get(language: &str) -> http::request::Builder {
    Request::get("http://shop/page").header("accept-language", language)
}

async fn warm(guard: &StampedeGuard, service: &Counting) {
    for _ in 0..100 {
        let before = guard.stats().local_hits;
        for language in ["de", "fr"] {
            ask(guard, service, get(language)).await;
        }
        if guard.stats().local_hits >= before + 2 {
            return;
        }
        sleep(Duration::from_millis(5)).await;
    }
    panic!("never served from memory");
}

#[tokio::test(start_paused = true)]
async fn variants_are_served_from_memory_with_their_present_age() {
    let [guard] = replicas(keeping());
    let service = Counting::default();
    warm(&guard, &service).await;
    let (_, _, de) = ask(&guard, &service, get("de")).await;
    let (age, _, fr) = ask(&guard, &service, get("fr")).await;
    assert!(de.ends_with("de") && fr.ends_with("fr"), "{de} {fr}");
    assert_eq!(age, Some(0));
    sleep(Duration::from_secs(7)).await;
    let hits = guard.stats().local_hits;
    let (age, status, again) = ask(&guard, &service, get("fr")).await;
    assert_eq!((age, again), (Some(7), fr));
    assert!(status.contains("hit; ttl=59"), "{status}");
    assert!(guard.stats().local_hits > hits);
    assert_eq!(service.0.load(Ordering::Relaxed), 2);
}

#[tokio::test(start_paused = true)]
async fn an_unsafe_method_at_one_replica_invalidates_the_copies_of_the_others() {
    let [one, two] = replicas(keeping());
    let service = Counting::default();
    for guard in [&one, &two] {
        warm(guard, &service).await;
    }
    let before = service.0.load(Ordering::Relaxed);
    ask(&one, &service, Request::post("http://shop/page")).await;
    let (_, _, body) = ask(&two, &service, get("de")).await;
    assert_eq!(body, format!("{}de", before + 2));
    assert_eq!(ask(&one, &service, get("de")).await.2, body);
}

#[tokio::test(start_paused = true)]
async fn conditions_and_ranges_are_answered_from_a_copy() {
    let [guard] = replicas(keeping());
    let service = Counting::default();
    warm(&guard, &service).await;
    let hits = guard.stats().local_hits;
    let (_, _, part) = ask(&guard, &service, get("de").header("range", "bytes=1-")).await;
    assert_eq!(part, "de");
    assert!(guard.stats().local_hits > hits);
}

/// A read that began before a load may be answered after the load's commit. Then it must not make a copy.
#[cfg(feature = "testing")]
#[tokio::test(start_paused = true)]
async fn a_read_on_its_way_does_not_bring_back_what_a_load_has_replaced() {
    // The delay is shorter than the deadline of a command.
    let [late, short] = [40, 1].map(Duration::from_millis);
    let (chaos, [(_, other), (_, guard)]) = fleet(keeping);
    chaos.latency(short, short);
    let service = Counting::default();
    warm(&guard, &service).await;
    ask(&other, &service, Request::post("http://shop/page")).await;
    ask(&other, &service, get("de")).await;
    // `guard` has dropped its copy, and the reply to its next read comes late. (That read is for many keys, so no other caller shares it.)
    chaos.latency(late, late);
    let key = guard.http_key(&get("de").body(()).expect("a request")).expect("a key");
    let mut reads = std::pin::pin!(guard.get_many::<u32, _>([key]));
    assert!(futures_util::poll!(&mut reads).is_pending());
    chaos.latency(short, short);
    let loads = async {
        // By now the store has answered the read, and the reply is on its way.
        sleep(late / 2 + short).await;
        ask(&guard, &service, get("de").header("cache-control", "no-cache")).await
    };
    let filled = guard.stats().local_fills;
    let (loaded, _) = tokio::join!(
        async {
            let loaded = loads.await;
            assert!(guard.stats().local_fills > filled, "the load left its copy before the read ended");
            loaded
        },
        reads
    );
    let (_, status, again) = ask(&guard, &service, get("de")).await;
    assert_eq!(again, loaded.2, "{status}, after {}", loaded.1);
}

/// This also holds while a change waits for a process that stands still.
#[cfg(feature = "testing")]
#[tokio::test(start_paused = true)]
async fn an_unsafe_method_invalidates_all_of_its_targets_at_once() {
    let (_chaos, [(replica, silent), (_, guard)]) = fleet(keeping);
    let service = Counting::default();
    for guard in [&silent, &guard] {
        warm(guard, &service).await;
    }
    replica.stop();
    let before = ask(&guard, &service, get("de")).await.2;
    let form = Request::post("http://shop/form").header("see", "/page");
    ask(&guard, &service, form).await;
    assert_ne!(ask(&guard, &service, get("de")).await.2, before);
}

/// Where in memory the bodies of these answers are, for a page of this length that is requested so often in this thread.
async fn bodies(guard: &StampedeGuard, length: usize, requests: usize) -> Vec<usize> {
    let inner = tower::service_fn(move |_: Request<Body>| async move {
        let response = Response::builder().header("cache-control", "max-age=600");
        Ok::<_, Infallible>(response.body(Body::from(vec![b'v'; length])).expect("a response"))
    });
    let mut layered = guard.layer(inner);
    let mut places = Vec::new();
    for _ in 0..requests {
        let request = Request::get(format!("http://shop/{length}")).body(Body::default()).expect("a request");
        let response = layered.ready().await.expect("ready").call(request).await.expect("answered");
        let frame = response.into_body().frame().await.expect("a frame").expect("whole");
        let body = frame.into_data().expect("data");
        assert_eq!(body.len(), length);
        places.push(body.as_ptr() as usize);
        while guard.stats().tasks > 0 {
            tokio::task::yield_now().await;
        }
    }
    places
}

/// Threads that count the references to one buffer wait for each other.
#[tokio::test]
async fn a_thread_that_serves_a_response_often_has_a_copy_of_its_own() {
    let [guard] = replicas(keeping());
    let warm = bodies(&guard, 100, 20).await;
    let here = bodies(&guard, 100, 100).await;
    // The first answers of a thread are parts of the entry, which all threads share.
    let shared = bodies_of_another_thread(&guard, 100, 4).await;
    assert!(shared.iter().all(|place| *place == shared[0]), "{shared:?}");
    let there = bodies_of_another_thread(&guard, 100, 100).await;
    assert_eq!(there[0], shared[0]);
    let [here, there] = [here, there].map(|places| places[99]);
    assert!(
        here != there && here != shared[0] && there != shared[0],
        "{here:x} {there:x} {shared:x?} {warm:x?}"
    );

    // It is found by the copy that the look-up finds, so it can not be older.
    let before = guard.stats().loads;
    guard
        .invalidate(
            stampede_guard::http::cache_key(&"http://shop/100".parse().expect("a URI")).expect("a key"),
        )
        .await
        .expect("confirmed");
    let after = bodies(&guard, 100, 1).await;
    assert_eq!(guard.stats().loads, before + 1);
    assert!(after[0] != here, "of the new response");
}

#[tokio::test]
async fn a_thread_has_no_copy_of_its_own_of_a_long_response() {
    let [guard] = replicas(keeping());
    let long = 20 * 1024;
    bodies(&guard, long, 20).await;
    let places = bodies(&guard, long, 100).await;
    assert!(places.iter().all(|place| *place == places[0]), "{places:?}");
}

async fn bodies_of_another_thread(guard: &StampedeGuard, length: usize, requests: usize) -> Vec<usize> {
    let (guard, runtime) = (guard.clone(), tokio::runtime::Handle::current());
    let thread = std::thread::spawn(move || runtime.block_on(bodies(&guard, length, requests)));
    thread.join().expect("no panic")
}
