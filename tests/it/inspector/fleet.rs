//! What the inspector says of the fleet, on a store in memory; `on_redis` has the same and more on a server. The clock stands while a
//! process works, so none is silent on a busy machine.

use stampede_guard::Policy;

use super::*;
use crate::support::gate::{Counter, Gate};

#[tokio::test(start_paused = true)]
async fn each_process_answers_with_its_counts_and_its_loads() {
    let store = MemoryStore::new();
    let guards = [(); 3].map(|()| guard(&store));
    let [one, two, three] = &guards;
    let services =
        [("a", one), ("b", two), ("c", three)].map(|(name, guard)| serve(guard.inspector().name(name)));
    let fleet = fleet_of(&services[0]).await;
    assert_eq!(
        (fleet["namespace"].as_str(), names(&fleet, "answered")),
        (Some("shop"), vec!["a".into(), "b".into(), "c".into()])
    );
    assert_eq!(fleet["unreadable"], 0);

    let (gate, running) = (Gate::closed(), Counter::default());
    let (waits, counts) = (gate.clone(), running.clone());
    let load = two.get_or_load(("report", 7), move || async move {
        let _running = counts.start();
        waits.pass().await;
        Ok::<_, String>(1)
    });
    let further = async {
        running.reach(1).await;
        let joins = two.get_or_load(("report", 7), || async { Ok::<_, String>(2) });
        let looks = async {
            let named = two.with_policy(Policy::builder().name("named").build().expect("valid"));
            named.get_or_load("hit", || async { Ok::<_, String>(1) }).await.expect("loaded");
            let mut load = Value::Null;
            while load["waiters"] != 2 {
                tokio::time::sleep(Duration::from_millis(5)).await;
                // Another asker has another answer in its memory.
                let fleet = fleet_of(&serve(one.inspector())).await;
                let all = fleet["processes"].as_array().expect("a list").clone();
                let b = all.into_iter().find(|process| process["name"] == "b").expect("it answers");
                load = b["loads"][0].clone();
                assert!(
                    b["policies"].as_array().expect("a list").iter().any(|policy| policy["name"] == "named")
                );
                assert_eq!(b["health"]["topology"], "memory");
                assert_eq!(b["version"], env!("CARGO_PKG_VERSION").replace("0.0.0", "0.1.0"));
            }
            gate.open();
            load
        };
        tokio::join!(joins, looks)
    };
    let (loaded, (joined, load)) = tokio::join!(load, further);
    assert_eq!((loaded.expect("loaded"), joined.expect("joined")), (1, 1));
    assert_eq!(
        (load["key"].as_str(), load["mode"].as_str()),
        (Some("report:7"), Some("under the lease")),
        "{load}"
    );
    assert_eq!((load["phase"].as_str(), load["attempts"].as_u64()), (Some("loading"), Some(1)), "{load}");
    assert!(
        load["lease_remaining_ms"].as_f64().is_some_and(|ms| (1_000.0..=2_000.0).contains(&ms)),
        "{load}"
    );
    assert_eq!(load["digest"], two.digest(("report", 7)));
    drop(services);
}

#[cfg(feature = "axum")]
#[tokio::test(start_paused = true)]
async fn the_requests_of_a_policy_include_those_of_its_routes() {
    let guard = guard(&MemoryStore::new());
    let users = axum::routing::get(|| async { "a user" });
    let app = axum::Router::new().route("/users/{id}", users).layer(guard.clone());
    for path in ["/users/1", "/users/1", "/users/2", "/nowhere"] {
        let request = Request::get(path).header("host", "shop.example").body(axum::body::Body::empty());
        app.clone().oneshot(request.expect("a request")).await.expect("infallible");
    }
    let fleet = fleet_of(&serve(guard.inspector())).await;
    let counts = |it: &Value| ["led", "hits", "failed"].map(|outcome| it["requests"][outcome].as_u64());
    let policy = &fleet["processes"][0]["policies"][0];
    assert_eq!(policy["routes"][0]["route"], "/users/{id}", "{policy}");
    assert_eq!(counts(&policy["routes"][0]), [Some(2), Some(1), Some(0)], "{policy}");
    assert_eq!(counts(policy), [Some(3), Some(1), Some(0)], "{policy}");
    assert_eq!((policy["loads"].as_u64(), guard.stats().led), (Some(3), 3), "{policy}");
}

#[tokio::test(start_paused = true)]
async fn a_process_that_has_gone_is_silent_and_delays_the_answer_by_half_a_second_at_most() {
    let store = MemoryStore::new();
    let (stays, goes) = (guard(&store), guard(&store));
    let (service, leaving) = (serve(stays.inspector().name("a")), serve(goes.inspector().name("b")));
    assert_eq!(names(&fleet_of(&service).await, "answered"), ["a", "b"]);
    drop((leaving, goes));
    tokio::time::advance(Duration::from_secs(1)).await;
    let fleet = fleet_of(&service).await;
    assert_eq!(
        (names(&fleet, "answered"), names(&fleet, "silent")),
        (vec!["a".to_owned()], vec!["b".to_owned()])
    );
    assert!(fleet["took_ms"].as_f64().is_some_and(|ms| (500.0..510.0).contains(&ms)), "{fleet}");
}

#[tokio::test(start_paused = true)]
async fn another_namespace_is_another_fleet() {
    let store = MemoryStore::new();
    let (here, there) = (guard(&store), StampedeGuard::new(store));
    let (service, _other) = (serve(here.inspector().name("a")), serve(there.inspector().name("b")));
    assert_eq!(names(&fleet_of(&service).await, "answered"), ["a"]);
}

#[tokio::test(start_paused = true)]
async fn pages_share_an_answer() {
    let store = MemoryStore::new();
    let service = serve(guard(&store).inspector());
    let (one, two) = tokio::join!(fleet_of(&service), fleet_of(&service));
    assert_eq!(one, two);
}

#[tokio::test(start_paused = true)]
async fn two_hundred_processes_answer() {
    let store = MemoryStore::new();
    let guards: Vec<_> = (0..200).map(|_| guard(&store)).collect();
    let _services: Vec<_> =
        guards.iter().enumerate().map(|(n, guard)| serve(guard.inspector().name(format!("p{n}")))).collect();
    let fleet = fleet_of(&serve(guards[0].inspector())).await;
    assert_eq!(names(&fleet, "answered").len(), 200);
}

/// Of 5,000 loads the oldest are reported, and the answer stays short.
#[tokio::test(start_paused = true)]
async fn a_process_with_many_loads_reports_the_oldest() {
    let guard = guard(&MemoryStore::new());
    let service = serve(guard.inspector());
    let gate = Gate::closed();
    let (mut loads, running) = (Vec::new(), Counter::default());
    for key in 0..5_000_u32 {
        let (guard, gate, counter) = (guard.clone(), gate.clone(), running.clone());
        loads.push(tokio::spawn(async move {
            let key = (key, "long ".repeat(100));
            guard
                .get_or_load(key, || async move {
                    let _running = counter.start();
                    gate.pass().await;
                    Ok::<_, String>(1)
                })
                .await
        }));
        if key == 0 {
            running.reach(1).await;
            tokio::time::advance(Duration::from_secs(1)).await;
        }
    }
    running.reach(5_000).await;
    let fleet = fleet_of(&service).await;
    let process = &fleet["processes"][0];
    assert_eq!(
        (process["loads"].as_array().map(Vec::len), process["loads_left_out"].as_u64()),
        (Some(50), Some(4_950))
    );
    assert!(process["loads"][0]["key"].as_str().is_some_and(|key| key.starts_with("0:")), "{process}");
    assert!(fleet.to_string().len() < 64 * 1024);
    gate.open();
    for load in loads {
        load.await.expect("no panic").expect("loaded");
    }
}
