//! `expire_tag`: the values of a tag become stale, each is loaded anew once in the fleet and in the background, and no caller waits.
//!
//! On the in-memory store with a paused clock; `redis::tags` and `http::response_tags` have cases on a server.

use std::time::Duration;

use futures_util::future::join_all;
use stampede_guard::{LoadContext, Policy, PolicyBuilder, StampedeGuard};
use tokio::time::{Instant, advance, sleep};

use crate::support::gate::{Counter, Gate};
use crate::tags::{get, load, replicas};

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

fn secs(secs: u64) -> Duration {
    Duration::from_secs(secs)
}

/// Fresh for 100 seconds, then stale for 20.
fn pages() -> PolicyBuilder {
    let policy = Policy::builder().fresh_for(secs(100)).ttl_jitter(0.0).tags(["pages"]);
    policy.stale_while_revalidate(secs(20))
}

/// Waits until all loads have ended.
async fn settled(guards: &[StampedeGuard]) {
    while guards.iter().any(|guard| guard.stats().tasks > 0) {
        sleep(ms(1)).await;
    }
}

#[tokio::test(start_paused = true)]
async fn the_values_of_an_expired_tag_are_served_for_their_stale_window_which_begins_at_the_expiry() {
    for local_for in [0, 60] {
        let guards = replicas(pages().local_for(secs(local_for)));
        let other = guards[0].with_policy(Policy::builder().tags(["users"]).build().expect("valid"));
        for key in ["a", "b"] {
            load(&guards[0], key, 1).await;
            assert_eq!(get(&guards[1], key).await, Some(1));
        }
        load(&other, "u", 1).await;
        advance(secs(30)).await;
        // Where there are copies in memory, the expiry waits until no process has one.
        let expired = Instant::now();
        guards[2].expire_tag("pages").await.expect("confirmed");
        for guard in &guards {
            assert_eq!(get(guard, "a").await, Some(1), "stale");
            assert_eq!(guard.remaining_freshness("a").await.expect("answered"), Some(Duration::ZERO));
        }
        assert!(other.remaining_freshness("u").await.expect("answered") > Some(Duration::ZERO));
        advance(ms(19_999) - expired.elapsed()).await;
        assert_eq!(get(&guards[3], "a").await, Some(1), "{local_for}");
        advance(ms(1)).await;
        assert_eq!(get(&guards[3], "a").await, None);
        assert_eq!(load(&guards[0], "a", 2).await, 2);
        assert_eq!(guards[1].remaining_freshness("a").await.expect("answered"), Some(secs(100)));
        // An expiry after the end of freshness extends nothing.
        advance(secs(110)).await;
        assert_eq!(get(&guards[0], "a").await, Some(2));
        guards[1].expire_tag("pages").await.expect("confirmed");
        advance(secs(10)).await;
        assert_eq!(get(&guards[0], "a").await, None);
    }
}

#[tokio::test(start_paused = true)]
async fn each_value_is_loaded_anew_once_in_the_fleet_and_no_caller_waits() {
    let guards = replicas(pages());
    let keys: Vec<_> = (0..50).map(|n| format!("page {n}")).collect();
    for key in &keys {
        load(&guards[0], key, 1).await;
    }
    guards[1].expire_tag("pages").await.expect("confirmed");
    let loads = Counter::default();
    let ask = async |guard: &StampedeGuard, key: &str| {
        let loads = loads.clone();
        let load = move || async move {
            let _running = loads.start();
            sleep(ms(50)).await;
            Ok::<_, String>(2)
        };
        let began = Instant::now();
        let value = guard.get_or_load(key, load).await.expect("a value");
        assert_eq!(began.elapsed(), Duration::ZERO);
        value
    };
    let all = || join_all(keys.iter().flat_map(|key| guards.iter().map(|guard| ask(guard, key))));
    assert_eq!(all().await, [1; 200]);
    settled(&guards).await;
    assert_eq!(all().await, [2; 200]);
    assert_eq!(loads.started(), 50);
    // Again: an expiry counts for what was loaded since the one before.
    guards[3].expire_tag("pages").await.expect("confirmed");
    assert_eq!(all().await, [2; 200]);
    settled(&guards).await;
    assert_eq!(loads.started(), 100);
}

/// The load has read its origin before the change, and learns its tag before or after the expiry.
#[tokio::test(start_paused = true)]
async fn a_load_that_runs_during_an_expiry_does_not_end_up_fresh() {
    for tags_late in [false, true] {
        let policy = if tags_late { Policy::builder().stale_while_revalidate(secs(20)) } else { pages() };
        let (guards, loads, gate) = (replicas(policy), Counter::default(), Gate::closed());
        let ask = |replica: usize| {
            let (guard, loads, gate) = (guards[replica].clone(), loads.clone(), gate.clone());
            let load = move |mut cx: LoadContext<usize>| async move {
                let _running = loads.start();
                let read = loads.started();
                gate.pass().await;
                if tags_late {
                    cx.tag(["pages"]).await.map_err(|error| error.to_string())?;
                }
                Ok::<_, String>(read)
            };
            tokio::spawn(async move { guard.load("k").get(load).await.expect("loaded").value })
        };
        let before = ask(0);
        loads.reach(1).await;
        guards[1].expire_tag("pages").await.expect("confirmed");
        gate.open();
        assert_eq!(before.await.expect("joined"), 1, "it came before the change");
        assert_eq!(get(&guards[2], "k").await, None);
        ask(2).await.expect("joined");
        settled(&guards).await;
        assert_eq!(get(&guards[3], "k").await, Some(2), "late: {tags_late}");
        assert!(guards[3].remaining_freshness("k").await.expect("answered") > Some(Duration::ZERO));
    }
}

#[tokio::test(start_paused = true)]
async fn an_expired_tag_can_be_invalidated_and_new_values_are_not_expired() {
    let guards = replicas(pages());
    load(&guards[0], "old", 1).await;
    guards[1].expire_tag("pages").await.expect("confirmed");
    guards[2].insert("new", &1_u32).await.expect("stored");
    assert_eq!(guards[3].remaining_freshness("new").await.expect("answered"), Some(secs(100)));
    guards[0].invalidate_tag("pages").await.expect("confirmed");
    assert_eq!((get(&guards[1], "old").await, get(&guards[1], "new").await), (None, None));
    // A tag without values, and one with a bad name.
    guards[0].expire_tag("none has this one").await.expect("confirmed");
    assert!(guards[0].expire_tag("").await.is_err());
}

#[tokio::test(start_paused = true)]
async fn without_a_stale_window_the_next_caller_loads_and_the_older_value_stands_in_for_a_failure() {
    let policy = pages().stale_while_revalidate(Duration::ZERO).stale_if_error(secs(20));
    let guards = replicas(policy);
    load(&guards[0], "k", 1).await;
    guards[1].expire_tag("pages").await.expect("confirmed");
    assert_eq!(get(&guards[0], "k").await, None);
    let failing = || async { Err::<u32, _>("no route".to_owned()) };
    assert_eq!(guards[2].get_or_load("k", failing).await.expect("stands in"), 1);
    advance(secs(21)).await;
    assert!(guards[2].get_or_load("k", failing).await.is_err());
    assert_eq!(load(&guards[3], "k", 2).await, 2);
}

/// 10,000 pages of one tag, of which some are asked for more often than others, 1,000 times a second in all.
#[tokio::test(start_paused = true)]
async fn ten_thousand_expired_values_are_loaded_within_the_limit_and_the_most_asked_first() {
    const PAGES: u64 = 10_000;
    const AT_ONCE: u32 = 8;
    let guards = replicas(pages().stale_while_revalidate(secs(600)).max_concurrent_loads(AT_ONCE));
    for page in 0..PAGES {
        guards[0].insert(page, &0_u32).await.expect("stored");
    }
    guards[0].expire_tag("pages").await.expect("confirmed");
    let (loads, began) = (Counter::default(), Instant::now());
    let mut random = fastrand::Rng::with_seed(7);
    let (mut calls, mut most_flights) = (Vec::new(), 0);
    for request in 0..30_000_u32 {
        // Half of the requests are for one page in a hundred.
        let page = if random.bool() { random.u64(..PAGES / 100) } else { random.u64(..PAGES) };
        let (guard, loads) = (guards[request as usize % 4].clone(), loads.clone());
        calls.push(tokio::spawn(async move {
            let load = move || async move {
                let _running = loads.start();
                sleep(ms(50)).await;
                Ok::<_, String>(1)
            };
            let began = Instant::now();
            guard.get_or_load(page, load).await.expect("a value");
            began.elapsed()
        }));
        sleep(ms(1)).await;
        most_flights = most_flights.max(guards.iter().map(|guard| guard.stats().flights).sum::<u64>());
    }
    // In each process 32 that wait for a permit, and those of which another process holds the lease.
    assert!(most_flights < 4 * 100, "{most_flights} loads wait");
    for waited in join_all(calls).await {
        assert_eq!(waited.expect("no panic"), Duration::ZERO);
    }
    assert!(loads.most_at_once() <= AT_ONCE as usize, "{} loads at once", loads.most_at_once());
    // The limit allows 160 loads a second, and is used.
    let possible = began.elapsed().as_secs_f64() * f64::from(AT_ONCE) * 20.0;
    assert!(loads.started() as f64 > possible * 0.8, "{} loads of {possible}", loads.started());
    for page in 0..PAGES / 100 {
        assert_eq!(guards[0].get::<u32>(page).await.expect("answered"), Some(1), "page {page}");
    }
}
