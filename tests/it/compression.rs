//! `compress_from`: long values take less room in the store, and nothing else changes.

use std::time::Duration;

use stampede_guard::{MemoryStore, Policy, PolicyBuilder, StampedeGuard};
use tokio::time::{advance, sleep};

use crate::support::gate::Counter;

const FROM: usize = 4096;

fn secs(secs: u64) -> Duration {
    Duration::from_secs(secs)
}

/// Values are fresh for exactly 10 s, and stored for longer, to stand in for failed loads.
fn policy() -> PolicyBuilder {
    Policy::builder().fresh_for(secs(10)).stale_if_error(secs(600)).ttl_jitter(0.0)
}

fn compressing() -> PolicyBuilder {
    policy().compress_from(FROM)
}

fn guard(store: &MemoryStore, policy: PolicyBuilder) -> StampedeGuard {
    StampedeGuard::builder(store.clone()).policy(policy.build().expect("valid")).build().expect("valid")
}

/// JSON text of at least `length` bytes, with rows that differ.
fn json(length: usize) -> String {
    let mut text = String::from("[");
    for id in 0.. {
        if text.len() >= length {
            break;
        }
        let (price, stock) = (id * 7919 % 100_000, id * 104_729 % 977);
        let row = format!(
            r#"{{"id":{id},"name":"article {id}","price":{price},"currency":"EUR","in_stock":{stock},"tags":["new","sale"]}},"#
        );
        text.push_str(&row);
    }
    text.pop();
    text.push(']');
    text
}

async fn load(guard: &StampedeGuard, loads: &Counter, result: Result<&str, &str>) -> String {
    let (result, loads) = (result.map(str::to_owned).map_err(str::to_owned), loads.clone());
    let load = move || async move {
        let _running = loads.start();
        result
    };
    guard.get_or_load("k", load).await.expect("a value")
}

/// An acquire names the entry that its caller has seen. If the store did not recognise the compressed bytes, each acquire would find the
/// old entry again, and no load would be stored.
#[tokio::test(start_paused = true)]
async fn a_compressed_value_that_has_expired_is_replaced_by_one_load() {
    let (store, loads) = (MemoryStore::new(), Counter::default());
    let guards = [guard(&store, compressing()), guard(&store, compressing()), guard(&store, policy())];
    let texts: Vec<_> = (0..4).map(|number| format!("{number}{}", json(100_000))).collect();
    assert_eq!(load(&guards[0], &loads, Ok(&texts[0])).await, texts[0]);
    for (round, text) in texts[1..].iter().enumerate() {
        advance(secs(11)).await;
        // In turn each of the three guards, also the one without the setting, replaces a compressed value by one load.
        assert_eq!(load(&guards[round], &loads, Ok(text)).await, *text);
        assert_eq!(loads.started(), round + 2);
        for guard in &guards {
            assert_eq!(load(guard, &loads, Err("not called")).await, *text);
        }
        assert_eq!(loads.started(), round + 2, "the load was stored");
    }
    for guard in &guards {
        let stats = guard.stats();
        assert_eq!((stats.unreadable, stats.store_errors, stats.stand_ins), (0, 0, 0));
    }
}

#[tokio::test(start_paused = true)]
async fn a_compressed_value_stands_in_for_a_failed_load_and_can_be_expired() {
    let (store, loads) = (MemoryStore::new(), Counter::default());
    let guards = [guard(&store, compressing()), guard(&store, policy())];
    let text = json(100_000);
    guards[0].insert("k", &text).await.expect("stored");
    for number in 1..=2 {
        guards[0].expire("k").await.expect("expired");
        for guard in &guards {
            // The first caller stores the older value again after the failure, and the second one receives that.
            assert_eq!(load(guard, &loads, Err("no route")).await, text);
        }
        assert_eq!(loads.started(), number);
        sleep(secs(6)).await;
    }
    assert_eq!(guards.iter().map(|guard| guard.stats().unreadable).sum::<u64>(), 0);
}

/// Regression: the second process could not read the first one's entry, replaced it by a marker because its own value was too long,
/// and the two loaded it in turn for ever.
#[tokio::test(start_paused = true)]
async fn a_value_beyond_the_readers_max_body_is_served() {
    let (store, loads) = (MemoryStore::new(), Counter::default());
    let guards = [guard(&store, compressing()), guard(&store, policy().max_body(10_000))];
    let long = "x".repeat(300_000);
    for _ in 0..30 {
        for guard in &guards {
            assert_eq!(load(guard, &loads, Ok(&long)).await, long);
        }
    }
    assert_eq!(loads.started(), 1);
    assert_eq!(guards[1].stats().unreadable, 0);
}

/// An entry is not decompressed if it states a length that the process's policy does not allow. The entry stays for processes that may.
#[tokio::test(start_paused = true)]
async fn an_entry_that_only_other_processes_can_read_stays_theirs() {
    let (store, [of_wide, of_narrow]) = (MemoryStore::new(), [(); 2].map(|()| Counter::default()));
    let (wide, narrow) = (guard(&store, compressing().max_body(128 << 20)), guard(&store, policy()));
    let long = "x".repeat((64 << 20) + (1 << 20));
    for _ in 0..3 {
        assert_eq!(load(&wide, &of_wide, Ok(&long)).await.len(), long.len());
        assert_eq!(load(&narrow, &of_narrow, Ok(&long)).await.len(), long.len());
    }
    assert_eq!((of_wide.started(), of_narrow.started()), (1, 3));
    let report = narrow.doctor().await;
    let found = report.findings.iter().find(|finding| finding.check == "entries").expect("it is seen");
    assert!(found.found.contains("compressed") && found.advice.contains("max_body"), "{report}");
    assert!(wide.doctor().await.findings.iter().all(|finding| finding.check != "entries"));
    // A value that this process can store replaces the entry.
    narrow.insert("k", &"short".to_owned()).await.expect("stored");
    assert_eq!(load(&wide, &of_wide, Err("not called")).await, "short");
}

#[tokio::test]
async fn a_copy_in_memory_is_the_value_itself_and_counts_with_its_full_size() {
    use bytes::Bytes;

    let store = MemoryStore::new();
    let [plain, small] = [policy(), compressing()]
        .map(|policy| guard(&store, policy.fresh_for(secs(600)).local_for(Duration::MAX)));
    let text = Bytes::from(json(100_000));
    small.insert("k", &text).await.expect("stored");
    let bytes = async |guard: &StampedeGuard| {
        let load = || async { Err::<Bytes, _>("not called".to_owned()) };
        for _ in 0..200 {
            let first = guard.get_or_load("k", load).await.expect("a hit");
            let second = guard.get_or_load("k", load).await.expect("a hit");
            if guard.stats().local_hits > 1 {
                assert_eq!(first, text);
                assert_eq!(first.as_ptr(), second.as_ptr(), "not decompressed again");
                return guard.health().local.expect("copies").bytes;
            }
            sleep(Duration::from_millis(5)).await;
        }
        panic!("never served from memory: {}", guard.health());
    };
    let compressed = bytes(&small).await;
    plain.insert("k", &text).await.expect("stored");
    let whole = bytes(&plain).await;
    // The copy of a compressed entry keeps the compressed form, too.
    let more = compressed - whole;
    assert!(more > 0 && more < 25_000, "{compressed} {whole}");
}

#[cfg(feature = "redis")]
mod on_redis {
    use super::*;
    use crate::support::redis_server::RedisServer;

    fn guard_on(server: &RedisServer, policy: PolicyBuilder) -> StampedeGuard {
        let budget = policy.coordination_budget(secs(10));
        let policy = budget.lease(secs(30)).build().expect("valid");
        StampedeGuard::builder(server.client()).policy(policy).build().expect("valid")
    }

    /// The length of all values on the server, in bytes.
    fn stored(server: &RedisServer) -> usize {
        let is_text = |key: &String| server.run::<String>(&["TYPE", key]) == "string";
        let length = |key: String| server.run::<usize>(&["STRLEN", &key]);
        server.keys().into_iter().filter(is_text).map(length).sum()
    }

    #[tokio::test]
    async fn a_value_of_100_kib_takes_a_quarter_and_is_read_with_and_without_the_setting() {
        let server = RedisServer::start();
        let loads = Counter::default();
        let guards = [guard_on(&server, compressing()), guard_on(&server, policy())];
        let text = json(100 * 1024);
        let mut lengths = Vec::new();
        for (writer, reader) in [(0, 1), (1, 0)] {
            guards[writer].connect().await.expect("connected");
            assert_eq!(load(&guards[writer], &loads, Ok(&text)).await, text);
            lengths.push(stored(&server));
            for guard in [reader, writer] {
                assert_eq!(load(&guards[guard], &loads, Err("not called")).await, text);
                assert_eq!(guards[guard].get::<String>("k").await.expect("an answer"), Some(text.clone()));
            }
            guards[reader].expire("k").await.expect("expired");
            let other = format!("{text} ");
            assert_eq!(load(&guards[reader], &loads, Ok(&other)).await, other);
            assert_eq!(load(&guards[writer], &loads, Err("not called")).await, other);
            guards[reader].invalidate("k").await.expect("invalidated");
        }
        assert_eq!(loads.started(), 4);
        println!("{} bytes of JSON: {} compressed, {} as they are", text.len(), lengths[0], lengths[1]);
        assert!(lengths[0] * 4 <= text.len(), "{lengths:?}");
        assert!(lengths[1] >= text.len(), "{lengths:?}");
        for guard in &guards {
            let stats = guard.stats();
            assert_eq!((stats.unreadable, stats.store_errors, stats.commits_refused), (0, 0, 0));
        }
        // This value is shorter than the setting.
        guards[0].insert("k", &"x".repeat(FROM - 100)).await.expect("stored");
        assert!(stored(&server) > FROM - 100);
    }

    #[cfg(feature = "http")]
    #[tokio::test]
    async fn a_body_takes_a_quarter_unless_it_is_encoded_already() {
        use bytes::Bytes;
        use http::{Request, Response};
        use http_body_util::{BodyExt as _, Full};
        use tower::{Layer as _, ServiceExt as _};

        let text = json(100 * 1024);
        for (coding, is_smaller) in [(None, true), (Some("identity"), true), (Some("br"), false)] {
            let server = RedisServer::start();
            let body = text.clone();
            let inner = tower::service_fn(move |_: Request<Full<Bytes>>| {
                let mut response = Response::new(Full::new(Bytes::from(body.clone())));
                if let Some(coding) = coding {
                    response.headers_mut().insert("content-encoding", coding.parse().unwrap());
                }
                async { Ok::<_, std::convert::Infallible>(response) }
            });
            for (number, policy) in [compressing(), policy()].into_iter().enumerate() {
                let guard = guard_on(&server, policy);
                guard.connect().await.expect("connected");
                let shop = guard.layer(inner.clone());
                for round in 0..2 {
                    let request = Request::get("/articles").header("host", "shop.example");
                    let request = request.header("accept-encoding", "br").body(Full::default()).unwrap();
                    let response = shop.clone().oneshot(request).await.expect("infallible");
                    let status = response.headers()["cache-status"].to_str().unwrap().to_owned();
                    assert_eq!(status.contains("hit"), number + round > 0, "{status}");
                    let content = response.into_body().collect().await.expect("a body").to_bytes();
                    assert_eq!(content, text);
                }
                assert_eq!((guard.stats().unreadable, guard.stats().store_errors), (0, 0));
            }
            let length = stored(&server);
            assert_eq!(length * 4 <= text.len(), is_smaller, "{coding:?}: {length}");
        }
    }
}
