//! Connections that break during the scripts of a guard.

use stampede_guard::{LoadContext, LoadError};

use super::*;
use crate::support::gate::{Counter, Gate};
use crate::support::probe::eventually;

async fn load(guard: &StampedeGuard, key: &str, value: u8) -> Result<u8, LoadError<String>> {
    guard.get_or_load(key, move || async move { Ok::<_, String>(value) }).await
}

impl Stage<'_> {
    /// Checks that a new caller on the other node receives one of `values` before any lease ends, and that every node reads the same value
    /// afterwards.
    async fn serves(&self, values: &[u8]) {
        let (sound, breaks) = (&self.sound, &self.breaks);
        self.server.disarm();
        let served = timeout(SOON, load(sound, &self.name, 2)).await;
        let served = served.unwrap_or_else(|_| panic!("{:?}: a lease was left", self.at)).expect("a value");
        assert!(values.contains(&served), "{:?}: {served}", self.at);
        // The fault may have closed this node's connection, which is then opened again.
        eventually(format!("{:?}: every node reads {served}", self.at), SOON, async || {
            breaks.get::<u8>(&*self.name).await.is_ok_and(|found| found == Some(served))
        })
        .await;
        let leases = |key: &String| key.starts_with("sg1:l:") && key.contains(&*self.name);
        eventually("no lease is left", SOON, async || {
            !self.server.with_data(|data| data.keys()).iter().any(leases)
        })
        .await;
    }
}

#[tokio::test]
async fn a_load_on_a_connection_that_breaks_anywhere_is_answered_and_leaves_no_lease() {
    broken_at_every_byte(&["-- ACQUIRE", "-- COMMIT"], async |server, number, at| {
        let stage = Stage::new(server, number, at, policy()).await;
        stage.arm();
        assert_eq!(load(&stage.breaks, &stage.name, 1).await.expect("a value"), 1, "{at:?}");
        stage.serves(&[1, 2]).await;
    })
    .await;
}

/// The server does not know the scripts, so the client also sends their texts.
#[tokio::test]
async fn a_load_that_sends_its_scripts_on_a_breaking_connection_is_answered_and_leaves_no_lease() {
    broken_at_every_byte(&["-- ACQUIRE", "-- COMMIT"], async |server, number, at| {
        let stage = Stage::new(server, number, at, policy()).await;
        server.forget_scripts();
        stage.arm();
        assert_eq!(load(&stage.breaks, &stage.name, 1).await.expect("a value"), 1, "{at:?}");
        stage.serves(&[1, 2]).await;
    })
    .await;
}

#[tokio::test]
async fn a_failed_load_on_a_connection_that_breaks_anywhere_is_reported_and_leaves_no_lease() {
    broken_at_every_byte(&["-- ACQUIRE", "-- FAIL"], async |server, number, at| {
        let stage = Stage::new(server, number, at, policy()).await;
        stage.arm();
        let failed = stage.breaks.get_or_load(&*stage.name, || async { Err::<u8, _>("no".to_owned()) }).await;
        assert!(matches!(failed, Err(LoadError::Loader(_))), "{at:?}: {failed:?}");
        stage.serves(&[2]).await;
    })
    .await;
}

/// Another node waits for the lease, and must get it whether or not the message about its grant arrives.
#[tokio::test]
async fn a_hand_over_on_a_connection_that_breaks_anywhere_reaches_the_waiter() {
    broken_at_every_byte(&["-- HAND OVER"], async |server, number, at| {
        let stage = Stage::new(server, number, at, policy()).await;
        let (gate, loads) = (Gate::closed(), Counter::default());
        let panics = tokio::spawn({
            let (guard, name, gate, loads) =
                (stage.breaks.clone(), stage.name.clone(), gate.clone(), loads.clone());
            let load = move || async move {
                let _running = loads.start();
                gate.pass().await;
                let text = if loads.started() > 0 { Err("scripted") } else { Ok(1_u8) };
                Ok::<u8, String>(text.expect("scripted"))
            };
            async move { guard.get_or_load(name, load).await }
        });
        loads.reach(1).await;
        let waits = tokio::spawn({
            let (guard, name) = (stage.sound.clone(), stage.name.clone());
            async move { load(&guard, &name, 2).await }
        });
        let queue = format!("sg1:q:{{default:{}}}", stage.name);
        eventually("it waits", SOON, async || server.with_data(|data| data.keys()).contains(&queue)).await;
        stage.arm();
        gate.open();
        assert!(matches!(panics.await.expect("joined"), Err(LoadError::Panicked(_))), "{at:?}");
        let served = timeout(SOON, waits).await.unwrap_or_else(|_| panic!("{at:?}: the waiter hangs"));
        assert_eq!(served.expect("joined").expect("a value"), 2, "{at:?}");
        stage.serves(&[2]).await;
    })
    .await;
}

/// The connection breaks during the renewal, or later: during COMMIT or, if the commit's reply is lost, during RELEASE.
#[tokio::test]
async fn a_renewal_on_a_connection_that_breaks_anywhere_costs_no_load() {
    let short = || policy().command_timeout(ms(100)).coordination_budget(ms(400)).lease(ms(600));
    broken_at_every_byte(&["-- RENEW"], async |server, number, at| {
        // The node with the sound connection has long bounds, because its value must be stored.
        let stage = Stage::of(server, number, at, [short(), policy()]).await;
        let (loads, gate) = (Counter::default(), Gate::closed());
        let load = {
            let (loads, gate) = (loads.clone(), gate.clone());
            move || async move {
                let _running = loads.start();
                gate.pass().await;
                Ok::<u8, String>(1)
            }
        };
        let loading = stage.breaks.get_or_load(&*stage.name, load);
        let renewed = async {
            loads.reach(1).await;
            stage.arm();
            tokio::time::sleep(ms(250)).await;
            if at.is_none() {
                // After a stall of the machine the renewal may still be on its way. (A ping has fewer bytes than a renewal.)
                eventually("it is renewed", SOON, async || {
                    let (sent, answered) = server.moved();
                    sent > 60 && answered > 0
                })
                .await;
            }
            gate.open();
        };
        let (loaded, ()) = tokio::join!(loading, renewed);
        assert_eq!(loaded.expect("a value"), 1, "{at:?}");
        assert_eq!(loads.started(), 1);
        stage.serves(&[1, 2]).await;
    })
    .await;
}

/// The commit's reply is lost, or the commit is never sent: the guard releases the lease, which it may still have.
#[tokio::test]
async fn a_lease_that_may_be_held_is_released() {
    let server = Server::start().await;
    // The scenario runs twice, because only its first run sends the scripts' texts.
    for number in [0, 1] {
        let stage = Stage::new(&server, number, None, policy()).await;
        stage.arm();
        load(&stage.breaks, &stage.name, 1).await.expect("a value");
        server.disarm();
    }
    let (sent, _) = server.moved();
    for (number, at) in [sent - 200, sent - 1].into_iter().enumerate() {
        let stage = Stage::new(&server, number + 2, Some(Break::Request(at)), policy()).await;
        stage.arm();
        load(&stage.breaks, &stage.name, 1).await.expect("a value");
        stage.serves(&[1, 2]).await;
    }
    let run = server.scripts_run();
    assert!(run.iter().any(|head| head.starts_with("-- RELEASE")), "{run:#?}");
}

#[tokio::test]
async fn an_invalidation_on_a_connection_that_breaks_anywhere_holds() {
    broken_at_every_byte(&["-- INVALIDATE"], async |server, number, at| {
        let stage = Stage::new(server, number, at, policy()).await;
        assert_eq!(load(&stage.sound, &stage.name, 9).await.expect("a value"), 9);
        stage.arm();
        stage.breaks.invalidate(&*stage.name).await.expect("the request is repeated");
        assert_eq!(stage.sound.get::<u8>(&*stage.name).await.expect("store"), None, "{at:?}");
        stage.serves(&[2]).await;
    })
    .await;
}

/// More processes wait than one script call notifies, so an invalidation notifies them in two calls.
#[tokio::test]
async fn an_invalidation_that_notifies_many_waiters_and_breaks_anywhere_holds() {
    broken_at_every_byte(&["-- INVALIDATE", "-- WAKE REST"], async |server, number, at| {
        let stage = Stage::new(server, number, at, policy()).await;
        let queue = format!("sg1:q:{{default:{}}}", stage.name);
        let entries = (0..501).map(|number| format!("{number:032x}:{number:032x}"));
        let words = |words: &[&str]| words.iter().map(|word| word.as_bytes().to_vec()).collect::<Vec<_>>();
        server.with_data(|data| {
            let lay = words(&["RPUSH", &queue]).into_iter().chain(entries.map(String::into_bytes));
            data.run(&lay.collect::<Vec<_>>());
            data.run(&words(&["PEXPIRE", &queue, "60000"]));
        });
        stage.arm();
        stage.breaks.invalidate(&*stage.name).await.expect("the request is repeated");
        assert_eq!(stage.sound.get::<u8>(&*stage.name).await.expect("store"), None, "{at:?}");
        stage.serves(&[2]).await;
    })
    .await;
}

#[tokio::test]
async fn an_insertion_on_a_connection_that_breaks_anywhere_holds() {
    broken_at_every_byte(&["-- INVALIDATE"], async |server, number, at| {
        let stage = Stage::new(server, number, at, policy()).await;
        stage.arm();
        stage.breaks.insert(&*stage.name, &7_u8).await.expect("the request is repeated");
        stage.serves(&[7]).await;
    })
    .await;
}

#[tokio::test]
async fn a_load_with_tags_on_a_connection_that_breaks_anywhere_is_answered_and_leaves_no_lease() {
    broken_at_every_byte(&["-- TAG"], async |server, number, at| {
        let tag = format!("t{number:05}");
        let stage = Stage::new(server, number, at, policy().tags([&*tag])).await;
        stage.arm();
        assert_eq!(load(&stage.breaks, &stage.name, 1).await.expect("a value"), 1, "{at:?}");
        // The value may not have been stored: without the ids of its tags, the guard cannot know whether it was invalidated.
        stage.serves(&[1, 2]).await;
        stage.sound.invalidate_tag(&*tag).await.expect("confirmed");
        eventually("no node reads it any more", SOON, async || {
            stage.breaks.get::<u8>(&*stage.name).await.is_ok_and(|found| found.is_none())
        })
        .await;
    })
    .await;
}

#[tokio::test]
async fn a_load_that_adds_tags_on_a_connection_that_breaks_anywhere_is_answered_and_leaves_no_lease() {
    broken_at_every_byte(&["-- ENTER LOAD"], async |server, number, at| {
        let tag = format!("t{number:05}");
        let stage = Stage::new(server, number, at, policy()).await;
        stage.arm();
        let adds = tag.clone();
        let load = move |mut cx: LoadContext<u8>| async move {
            cx.tag([adds]).await.map_err(|error| error.to_string())?;
            Ok::<_, String>(1)
        };
        assert_eq!(stage.breaks.load(&*stage.name).get(load).await.expect("a value").value, 1, "{at:?}");
        // The value may not have been stored: without its entry in the journal, nothing shows whether its tag was invalidated.
        stage.serves(&[1, 2]).await;
        stage.sound.invalidate_tag(&*tag).await.expect("confirmed");
        let found = stage.breaks.get::<u8>(&*stage.name).await;
        assert!(found.as_ref().is_ok_and(|found| *found != Some(1)), "{at:?}: {found:?}");
    })
    .await;
}

#[tokio::test]
async fn an_examination_on_a_connection_that_breaks_anywhere_leaves_nothing() {
    broken_at_every_byte(&["-- DOCTOR"], async |server, number, at| {
        let stage = Stage::new(server, number, at, policy()).await;
        stage.arm();
        timeout(SOON, stage.breaks.doctor()).await.expect("a report");
        server.disarm();
        stage.serves(&[2]).await;
    })
    .await;
}

#[cfg(feature = "http")]
#[tokio::test]
async fn variants_on_a_connection_that_breaks_anywhere_are_answered() {
    use tower::ServiceExt as _;

    broken_at_every_byte(&["-- ENLIST"], async |server, number, at| {
        let stage = Stage::new(server, number, at, policy()).await;
        let answer = async |guard: &StampedeGuard, language: &str| {
            let page = |headers: http::HeaderMap| async move {
                let language = headers["accept-language"].to_str().unwrap_or_default().to_owned();
                ([("cache-control", "max-age=60"), ("vary", "accept-language")], language)
            };
            let app = axum::Router::new().route("/{page}", axum::routing::get(page)).layer(guard.clone());
            let request = http::Request::get(format!("http://host/{}", stage.name));
            let request =
                request.header("accept-language", language).body(axum::body::Body::empty()).unwrap();
            let response =
                timeout(SOON, app.oneshot(request)).await.expect("no wait for the lost reply").unwrap();
            assert_eq!(response.status(), 200);
            axum::body::to_bytes(response.into_body(), 100).await.unwrap()
        };
        assert_eq!(answer(&stage.sound, "de").await, "de");
        stage.arm();
        for language in ["en", "de", "fr"] {
            assert_eq!(answer(&stage.breaks, language).await, language, "{at:?}");
        }
        server.disarm();
        for language in ["fr", "en", "de"] {
            assert_eq!(answer(&stage.sound, language).await, language, "{at:?}");
        }
    })
    .await;
}
