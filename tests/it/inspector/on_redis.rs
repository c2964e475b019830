//! The inspector on a real server: what it costs, what foreign messages do, and what it says while the server is away.

use std::sync::atomic::{AtomicU64, Ordering};

use stampede_guard::Policy;
use stampede_guard::health::LinkState;

use super::*;
use crate::support::example::Example;
use crate::support::monitor::Monitor;
use crate::support::probe::eventually;
use crate::support::redis_server::{RedisServer, free_port};

const SOON: Duration = Duration::from_secs(10);

/// Its commands may take long, on a busy machine.
async fn guard_at(url: &str) -> StampedeGuard {
    let policy = Policy::builder()
        .command_timeout(Duration::from_millis(500))
        .coordination_budget(Duration::from_secs(1))
        // An example that is built first is waited for by a load.
        .load_timeout(Duration::from_secs(600));
    let backend = Backend::from(redis::Client::open(url).expect("an address"));
    let guard = StampedeGuard::builder(backend).namespace("shop").policy(policy.build().expect("valid"));
    let guard = guard.build().expect("valid");
    guard.connect().await.expect("connected");
    guard
}

/// The services of a fleet, named `a`, `b` and so on, once all of them answer.
async fn fleet(server: &RedisServer, count: u8) -> (Vec<StampedeGuard>, Vec<InspectorService>) {
    let (mut guards, mut services) = (Vec::new(), Vec::new());
    for n in 0..count {
        let guard = guard_at(&server.minimal_user()).await;
        services.push(serve(guard.inspector().name(char::from(b'a' + n)).allow_actions(true)));
        guards.push(guard);
    }
    eventually("all processes answer", SOON, async || {
        names(&fleet_of(&serve(guards[0].inspector())).await, "answered").len() == usize::from(count)
    })
    .await;
    (guards, services)
}

/// With the rights of the documented minimal user.
#[tokio::test]
async fn a_question_costs_a_message_and_one_for_each_process_and_nothing_is_sent_while_none_asks() {
    let server = RedisServer::start();
    let (guards, _services) = fleet(&server, 3).await;
    let of_inspectors = |monitor: Monitor<'_>| {
        monitor.finish().without([
            "ping",
            "time",
            "subscribe",
            "unsubscribe",
            "client",
            "info",
            "hello",
            "auth",
        ])
    };
    let monitor = Monitor::start(&server);
    tokio::time::sleep(Duration::from_secs(2)).await;
    let quiet = of_inspectors(monitor);
    assert_eq!(quiet.lines.len(), 0, "{:?}", quiet.lines);
    eventually("all answer, before the asker has lost its patience", SOON, async || {
        let monitor = Monitor::start(&server);
        let fleet = fleet_of(&serve(guards[0].inspector())).await;
        let asked = of_inspectors(monitor);
        let have_all = names(&fleet, "answered").len() == 3;
        // An inspector that was made for this look subscribes to a channel of its own.
        assert!(!have_all || asked.of("publish") == 4 && asked.lines.len() == 4, "{:?}", asked.lines);
        have_all && fleet["took_ms"].as_f64().is_some_and(|ms| ms < 400.0)
    })
    .await;
}

#[tokio::test]
async fn a_process_that_is_gone_is_silent() {
    let server = RedisServer::start();
    let (mut guards, services) = fleet(&server, 3).await;
    eventually("all answer", SOON, async || names(&fleet_of(&services[0]).await, "answered").len() == 3)
        .await;
    guards.pop().expect("a guard").shutdown(Duration::ZERO).await;
    eventually("it is silent", SOON, async || {
        let fleet = fleet_of(&services[0]).await;
        names(&fleet, "answered") == ["a", "b"] && names(&fleet, "silent") == ["c"]
    })
    .await;
}

#[tokio::test]
async fn while_the_server_is_away_the_process_shows_itself_and_says_so() {
    let server = RedisServer::start();
    let (guards, services) = fleet(&server, 2).await;
    guards[0].insert("k", &1).await.expect("stored");
    server.kill();
    eventually("the guard knows it", SOON, async || guards[0].health().commands == LinkState::Down).await;
    let fleet = fleet_of(&services[0]).await;
    assert_eq!(names(&fleet, "answered"), ["a"]);
    assert!(fleet["error"].as_str().is_some_and(|text| text.contains("could not be asked")), "{fleet}");
    assert_eq!(fleet["processes"][0]["health"]["commands"], "down");
    let key = key_of(&services[0], "k").await;
    assert_eq!(key["state"], "unknown", "{key}");
    server.start_again();
    eventually("the other answers again", SOON, async || {
        names(&fleet_of(&services[0]).await, "answered") == ["a", "b"]
    })
    .await;
}

/// A hung server: nothing waits for longer than its bounds.
#[tokio::test]
async fn while_the_server_hangs_each_answer_comes_within_bounds() {
    let server = RedisServer::start();
    let (_guards, services) = fleet(&server, 2).await;
    server.pause();
    let began = std::time::Instant::now();
    let (fleet, key) = tokio::join!(fleet_of(&services[0]), key_of(&services[0], "k"));
    assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
    server.resume();
    assert_eq!(names(&fleet, "answered"), ["a"]);
    assert_eq!(key["state"], "unknown", "{key}");
}

/// What others may write to the channels: no questions, and no answers.
#[tokio::test]
async fn foreign_messages_break_nothing_and_are_counted() {
    let server = RedisServer::start();
    let (guards, services) = fleet(&server, 2).await;
    let channels = server.run::<Vec<String>>(&["PUBSUB", "CHANNELS", "sg1:i:*"]);
    let mut conn = server.conn();
    let mut publish = |channel: &str, message: &[u8]| {
        redis::cmd("PUBLISH").arg(channel).arg(message).query::<u64>(&mut conn).expect("published")
    };
    let id = "0123456789abcdef0123456789abcdef";
    let long = vec![b'x'; 10 * 1024 * 1024];
    let deep = format!("{id}{id}{}", "[".repeat(10_000));
    for channel in &channels {
        for message in
            [b"".as_slice(), b"x", b"\xff\xfe", &long, deep.as_bytes(), format!("{id}{id}{{}}").as_bytes()]
        {
            publish(channel, message);
        }
        publish(channel, format!("{id}{id}{{\"about\":\"bypass\",\"on\":1}}").as_bytes());
        publish(channel, format!("{id}{}", &id[1..]).as_bytes());
        // A switch without the right to write to the namespace.
        let unproven = format!("{id}{id}{{\"about\":\"bypass\",\"on\":true,\"proof\":\"{id}\"}}");
        publish(channel, unproven.as_bytes());
    }
    eventually("both answer", SOON, async || names(&fleet_of(&services[0]).await, "answered") == ["a", "b"])
        .await;
    assert_eq!(guards[0].get_or_load("k", || async { Ok::<_, String>(1) }).await.expect("loaded"), 1);
    assert_eq!(guards[0].stats().bypassed, 0);

    // A stranger that answers: with what an older version might, with no JSON, with nothing that a process says, and with 10 MiB.
    let questions = channels.iter().map(|channel| channel.to_owned()).collect::<Vec<_>>();
    let mut stranger = server.conn();
    let mut subscription = server.conn();
    let answering = std::thread::spawn(move || {
        let mut subscription = subscription.as_pubsub();
        for channel in &questions {
            subscription.subscribe(channel).expect("subscribed");
        }
        loop {
            let message = subscription.get_message().expect("a message").get_payload_bytes().to_vec();
            let Ok(text) = String::from_utf8(message) else { continue };
            // A question: two ids and JSON.
            let Some((ids, json)) = text.split_at_checked(64) else { continue };
            if !json.contains("\"process\"") || json.contains("policies") {
                continue;
            }
            let (asker, question) = ids.split_at(32);
            let mut answer = |text: &[u8]| {
                let message = [question.as_bytes(), text].concat();
                redis::cmd("PUBLISH")
                    .arg(format!("sg1:i:{asker}"))
                    .arg(message)
                    .query::<u64>(&mut stranger)
                    .expect("published");
            };
            answer(b"no JSON");
            answer(br#"{"name":"nobody"}"#);
            answer(br#"[1,2]"#);
            answer(&long);
            answer(br#"{"process":"old","version":"0.0.9","loads":"none","stats":7}"#);
            return;
        }
    });
    // The stranger has subscribed, so it counts as a receiver.
    eventually("it listens", SOON, async || server.pubsub_clients() >= 2).await;
    let unreadable = AtomicU64::new(0);
    eventually("the stranger is shown", SOON, async || {
        let fleet = fleet_of(&serve(guards[0].inspector())).await;
        let processes = fleet["processes"].as_array().expect("a list");
        unreadable.fetch_add(fleet["unreadable"].as_u64().expect("a number"), Ordering::Relaxed);
        processes.iter().any(|process| process["process"] == "old" && process["version"] == "0.0.9")
    })
    .await;
    answering.join().expect("no panic");
    assert_eq!(unreadable.into_inner(), 4, "no JSON, two that name no process, and 10 MiB");
    eventually("both answer", SOON, async || names(&fleet_of(&services[0]).await, "answered").len() == 2)
        .await;
}

/// The next guard of a namespace on a connection that stays open gets the subscription of the one before.
#[tokio::test]
async fn a_guard_after_another_on_one_connection_is_asked_as_well() {
    let server = RedisServer::start();
    let backend = Backend::from(server.client());
    let stays = StampedeGuard::builder(backend.clone()).namespace("other").build().expect("valid");
    stays.connect().await.expect("connected");
    for _ in 0..3 {
        let guard = guard_on(backend.clone());
        let service = serve(guard.inspector().name("a"));
        eventually("it answers itself", SOON, async || {
            let fleet = fleet_of(&service).await;
            fleet["error"].is_null() && names(&fleet, "answered") == ["a"]
        })
        .await;
    }
}

/// Channels are those of all databases of a server.
#[tokio::test]
async fn another_database_is_another_fleet() {
    let server = RedisServer::start();
    let other = format!("{}/1", server.url().trim_end_matches('/'));
    let (here, there) = (guard_at(&server.url()).await, guard_at(&other).await);
    let services = [("a", &here), ("b", &there)].map(|(name, guard)| serve(guard.inspector().name(name)));
    for (service, name) in services.iter().zip(["a", "b"]) {
        eventually("it was asked", SOON, async || fleet_of(service).await["error"].is_null()).await;
        assert_eq!(names(&fleet_of(service).await, "answered"), [name]);
    }
}

/// An invalidation that Redis has not confirmed hides the value in this process, and the page knows it.
#[tokio::test]
async fn a_value_behind_an_unconfirmed_invalidation_is_not_called_fresh() {
    let server = RedisServer::start();
    let (guards, services) = fleet(&server, 1).await;
    guards[0].insert("k", &1).await.expect("stored");
    server.run::<()>(&["ACL", "SETUSER", "minimal", "-evalsha", "-eval"]);
    guards[0].invalidate("k").await.expect_err("refused");
    let answer = key_of(&services[0], "k").await;
    assert_eq!(answer["state"], "expired", "{answer}");
    assert!(answer["why"].as_str().is_some_and(|why| why.contains("has not confirmed yet")), "{answer}");
}

#[tokio::test]
async fn the_holder_of_a_lease_is_shown() {
    let server = RedisServer::start();
    let (guards, services) = fleet(&server, 2).await;
    keys::shows_the_lease(&guards[1], &services[0]).await;
}

#[tokio::test]
async fn an_invalidation_on_the_page_is_final_in_the_other_process() {
    let server = RedisServer::start();
    let (guards, services) = fleet(&server, 2).await;
    guards[1].insert("k", &1).await.expect("stored");
    let act = Request::post("/api/act").header("authorization", format!("Bearer {TOKEN}"));
    let act = act.header("content-type", "application/json").header("x-stampede-guard", "act");
    let (status, answer) = json_of(&services[0], act, r#"{"action":"invalidate","key":"k"}"#).await;
    assert_eq!(status, StatusCode::OK, "{answer}");
    assert_eq!(guards[1].get::<i32>("k").await.expect("read"), None);
}

#[cfg(feature = "cluster")]
#[tokio::test]
async fn in_a_cluster_each_process_answers_as_well() {
    use crate::support::cluster::Cluster;
    let cluster = Cluster::start();
    let mut services = Vec::new();
    for name in ["a", "b", "c"] {
        let guard = guard_on(crate::redis::cluster::client(&cluster.url()).into());
        guard.connect().await.expect("connected");
        services.push(serve(guard.inspector().name(name)));
    }
    eventually("all processes answer", SOON, async || {
        names(&fleet_of(&services[0]).await, "answered") == ["a", "b", "c"]
    })
    .await;
}

/// `examples/top`, with the rights of the documented minimal user.
#[tokio::test]
async fn the_example_top_prints_the_fleet_without_itself() {
    let server = RedisServer::start();
    let (guards, _services) = fleet(&server, 2).await;
    let loading = guards[0].clone();
    let load = tokio::spawn(async move {
        let endless = || async { std::future::pending::<Result<u8, String>>().await };
        let _ = loading.get_or_load(("user", 7), endless).await;
    });
    eventually("the load runs", SOON, async || guards[0].stats().flights == 1).await;
    let url = server.minimal_user();
    let start =
        move || Example::start("top", &[("REDIS_URL", &*url), ("NAMESPACE", "shop"), ("RUN_ONCE", "1")]);
    // Not in this thread: while it builds the example, the fleet would not renew its lease, and the load would not be reported any more.
    let mut top = tokio::task::spawn_blocking(start).await.expect("started");
    let status = top.ended().await;
    load.abort();
    assert!(status.success(), "{status}: {}", top.stderr());
    top.printed("stampede-guard namespace shop, 2 processes, asked in ");
    top.printed("2 processes, all answered");
    for name in ["a ", "b "] {
        assert!(top.printed(name).contains(" up, closed "), "{name}");
    }
    let user: Vec<_> = top.printed("user:7 ").split_whitespace().map(str::to_owned).collect();
    assert_eq!(user[0], "a");
    top.printed("Requests per second, the last 2s");
    assert_eq!(top.lines_with("top "), 0);
}

#[tokio::test]
async fn the_example_top_fails_with_advice_if_the_fleet_can_not_be_asked() {
    let away = format!("redis://127.0.0.1:{}/", free_port());
    let advices = [
        (&*away, "1", "no server listens there: see that host and port are right"),
        ("shop.example", "1", "write it as redis://USER:PASSWORD@HOST:PORT/"),
        ("", "1", "Usage: top redis://"),
        // Its stdout is a pipe here.
        (&*away, "", "set RUN_ONCE=1 to print the fleet as text"),
    ];
    for (url, once, advice) in advices {
        let mut env = vec![("REDIS_URL", url)];
        env.extend(Some(("RUN_ONCE", once)).filter(|(_, once)| !once.is_empty()));
        let mut top = Example::start("top", &env);
        assert_eq!(top.ended().await.code(), Some(1), "{url}: {}", top.stderr());
        let stderr = top.stderr();
        let last = stderr.lines().last().expect("a sentence");
        assert!(last.contains(advice), "{url}: {stderr}");
    }
}
