//! Clients that may leave at every point, and resources of every kind, in random order: no client receives another's response or waits for
//! ever, and nothing is left over.

use std::collections::HashMap;
use std::time::Duration;

use bytes::Bytes;
use http_body::Frame;
use http_body_util::{BodyExt as _, StreamBody};
use tokio::time::timeout;
use tower::ServiceExt as _;

use super::kit::{
    Boxed, Down, Inner, Shop, all, ask, get, policy, read, replicas, respond, secs, send_many, settle, shop,
    shop_with, whole,
};
use crate::support::probe::DropAt;

/// Drops the leader's request at each of its await points, and then its response, unread or partly read.
#[tokio::test(start_paused = true)]
async fn a_leader_dropped_at_any_point_costs_its_waiters_nothing() {
    let mut finished = false;
    for polls in 0..50 {
        let inner = Inner::with(|n, _| Ok(respond(200, &[], slow(vec![n.to_string(), n.to_string()]))));
        let shop = shop(&inner);
        let response = DropAt::new(polls, shop.clone().oneshot(get("/")));
        let leader = tokio::spawn(async move { response.await.map(|response| response.map(drop).is_ok()) });
        let followers = send_many(&shop, 3, "/");
        finished = leader.await.unwrap().is_some();
        let seen = timeout(secs(60), all(followers)).await.expect("none hangs");
        assert!(seen.iter().all(|seen| seen.status == 200 && seen.text() == "11"), "dropped at poll {polls}");
        assert_eq!(inner.calls(), 1, "dropped at poll {polls}");
        assert_eq!(ask(&shop, get("/")).await.text(), "11", "dropped at poll {polls}");
        if finished {
            break;
        }
    }
    assert!(finished, "every await was met");
}

/// A body of these parts. Each comes a millisecond after the one before.
fn slow(parts: Vec<String>) -> Boxed {
    let parts = futures_util::stream::unfold(parts.into_iter(), |mut parts| async {
        tokio::time::sleep(Duration::from_millis(1)).await;
        parts.next().map(|part| (Ok::<_, Down>(Frame::data(Bytes::from(part))), parts))
    });
    StreamBody::new(parts).boxed_unsync()
}

/// The paths of `resources`, each with its own kind of answer. Each answer contains the number of calls so far.
const KINDS: [&str; 8] =
    ["/shared", "/cookie", "/sometimes", "/failing", "/broken", "/long", "/error", "/panicking"];

fn resources() -> Inner {
    Inner::with(|n, request| {
        let path = request.uri().path();
        let text = format!("{path} {n} ");
        let body = || slow(vec![text.clone(), "...".to_owned(), "end".to_owned()]);
        Ok(match path {
            "/shared" => respond(200, &[("cache-control", "max-age=1")], body()),
            "/cookie" => respond(200, &[("set-cookie", &format!("n={n}"))], body()),
            // This answer is private for some calls, so a marker is replaced by a value, and a value by a marker.
            "/sometimes" if n % 3 == 0 => {
                respond(200, &[("cache-control", "private"), ("x-own", "1")], body())
            }
            "/sometimes" => respond(200, &[("cache-control", "max-age=1")], body()),
            "/failing" => respond(503, &[], body()),
            "/broken" if n % 2 == 0 => respond(200, &[("content-length", "1000")], body()),
            "/broken" => respond(200, &[("cache-control", "max-age=1")], body()),
            "/long" => respond(200, &[], slow(vec![text.clone(), "x".repeat(3000), "end".to_owned()])),
            "/error" => return Err(Down(text)),
            "/panicking" if n % 2 == 0 => panic!("scripted panic"),
            _ => respond(200, &[("cache-control", "max-age=1")], whole(text + "...end")),
        })
    })
}

/// A client that may leave at any poll, and reads all or nothing. Returns the number in the answer if the answer is
/// unshareable.
async fn client(
    shop: Shop,
    kind: &'static str,
    private: &'static [&'static str],
    patience: usize,
    reads: bool,
) -> Option<usize> {
    let response = DropAt::new(patience, shop.oneshot(get(kind))).await?;
    let Ok(response) = response else {
        assert_eq!(kind, "/error");
        return None;
    };
    if !reads {
        return None;
    }
    let own = private.contains(&kind) || response.headers().contains_key("x-own");
    let status = response.status().as_u16();
    let broken =
        response.headers().get("content-length").is_some_and(|length| length == "1000") && kind == "/broken";
    if broken {
        assert!(response.into_body().collect().await.is_err(), "a broken body ends in an error");
        return None;
    }
    let seen = read(response).await;
    if seen.remark().contains("load-failed") || seen.remark().contains("load-panicked") {
        assert_eq!(status, 502);
        return None;
    }
    let mut words = seen.text().split(' ');
    assert_eq!(words.next(), Some(kind), "an answer of another resource");
    let number = words.next().unwrap().parse().unwrap();
    assert!(seen.text().ends_with("end"), "{kind}: only a part: {:?}", seen.text());
    (own && status == 200).then_some(number)
}

async fn storm(seed: u64) {
    let mut random = fastrand::Rng::with_seed(seed);
    let inner = resources();
    // These paths have unshareable answers. The long one is unshareable only because it is over `max_body`.
    let (shops, private): (_, &[_]) = if random.bool() {
        (replicas(2, &inner), &["/cookie"])
    } else {
        (vec![shop_with(&inner, policy().max_body(2000))], &["/cookie", "/long"])
    };
    let mut clients = Vec::new();
    for _ in 0..300 {
        let shop = shops[random.usize(..shops.len())].clone();
        let kind = KINDS[random.usize(..KINDS.len())];
        let patience = if random.u8(..4) == 0 { random.usize(..12) } else { usize::MAX };
        clients.push(tokio::spawn(client(shop, kind, private, patience, random.u8(..5) > 0)));
        if random.u8(..8) == 0 {
            tokio::time::sleep(Duration::from_millis(random.u64(..700))).await;
        }
    }
    let mut owners = HashMap::new();
    for client in clients {
        let number =
            timeout(secs(300), client).await.unwrap_or_else(|_| panic!("seed {seed}: a client hangs"));
        match number {
            Ok(number) => *owners.entry(number).or_insert(0) += usize::from(number.is_some()),
            // A handler may panic for a request without a flight. Then the task of that request panics.
            Err(error) => {
                let panic = error.into_panic();
                assert_eq!(panic.downcast_ref::<&str>(), Some(&"scripted panic"), "seed {seed}");
            }
        }
    }
    settle().await;
    assert_eq!(inner.loads.running(), 0, "seed {seed}");
    owners.retain(|_, owners| *owners > 1);
    assert!(owners.is_empty(), "seed {seed}: private answers with several owners: {owners:?}");
}

#[tokio::test(start_paused = true)]
async fn in_a_storm_of_leaving_clients_none_sees_anothers_answer_and_none_hangs() {
    let seed = std::env::var("SG_SEED").ok().map(|seed| seed.parse().unwrap());
    let seeds = seed.map_or_else(|| vec![1, 2, 3, 4, 5, 6, 7, fastrand::u64(..)], |seed| vec![seed]);
    for seed in seeds {
        println!("SG_SEED={seed}");
        storm(seed).await;
    }
}
