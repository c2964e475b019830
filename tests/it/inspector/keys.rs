//! What the inspector says of one key.

use stampede_guard::Policy;
use stampede_guard::http::HttpPolicy;
use tower::Layer as _;

use super::*;
use crate::support::gate::{Counter, Gate};

const MINUTE: Duration = Duration::from_secs(60);

/// A policy whose values are fresh for a minute, then stale for one, then of use if a load fails for one.
fn policy() -> Policy {
    let policy =
        Policy::builder().fresh_for(MINUTE).stale_while_revalidate(MINUTE).stale_if_error(2 * MINUTE);
    policy.ttl_jitter(0.0).build().expect("valid")
}

async fn store_with_tag(guard: &StampedeGuard, key: &str) {
    guard.insert_with_tags(key, &"v", ["article"]).await.expect("stored");
}

#[tokio::test(start_paused = true)]
async fn a_key_is_fresh_stale_expired_or_absent_and_the_answer_says_why() {
    let guard = guard(&MemoryStore::new()).with_policy(policy());
    let service = serve(guard.inspector());
    let state = async |key: &str| {
        let answer = key_of(&service, key).await;
        (answer["state"].as_str().unwrap().to_owned(), answer["why"].as_str().unwrap().to_owned())
    };
    let absent = state("user:42").await;
    assert_eq!(absent.0, "absent");
    assert!(absent.1.contains("a request loads"), "{absent:?}");
    guard.insert(("user", 42), &"Ada").await.expect("stored");
    let (_, answer) = json(&service, get("/api/key?key=user:42")).await;
    assert_eq!(
        (answer["key"].as_str(), answer["digest"].as_str()),
        (Some("user:42"), Some(&*guard.digest(("user", 42))))
    );
    assert_eq!(
        (answer["redis_key"].as_str(), answer["state"].as_str()),
        (Some("sg1:e:{shop:user:42}"), Some("fresh"))
    );
    assert_eq!(
        (answer["fresh_for_ms"].as_u64(), answer["served_stale_for_ms"].as_u64()),
        (Some(60_000), Some(120_000))
    );
    assert_eq!(
        (answer["value"].as_str(), answer["codec"].as_str()),
        (None, Some("MessagePack")),
        "no value without the setting"
    );
    tokio::time::advance(Duration::from_secs(61)).await;
    assert_eq!(state("user:42").await.0, "stale");
    tokio::time::advance(MINUTE).await;
    let expired = state("user:42").await;
    assert_eq!(expired.0, "expired");
    assert!(expired.1.contains("if the load fails, it gets this value"), "{expired:?}");
    tokio::time::advance(MINUTE).await;
    assert_eq!(state("user:42").await.0, "absent");
    guard.set_bypass(true);
    assert!(state("user:42").await.1.contains("switched off"));
}

#[tokio::test]
async fn tags_are_named_and_an_invalidated_or_expired_one_is_the_reason() {
    let guard = guard(&MemoryStore::new()).with_policy(policy());
    let service = serve(guard.inspector());
    store_with_tag(&guard, "page").await;
    let answer = key_of(&service, "page").await;
    assert_eq!(answer["tags"], serde_json::json!([{ "name": "article", "is_current": true }]));
    guard.expire_tag("article").await.expect("expired");
    let answer = key_of(&service, "page").await;
    assert_eq!(answer["state"], "stale", "{answer}");
    assert!(answer["why"].as_str().is_some_and(|why| why.contains("a tag was expired")), "{answer}");
    guard.invalidate_tag("article").await.expect("invalidated");
    let answer = key_of(&service, "page").await;
    assert_eq!(answer["state"], "expired", "{answer}");
    assert!(
        answer["why"].as_str().is_some_and(|why| why.contains("its tag `article` was invalidated")),
        "{answer}"
    );
}

#[tokio::test]
async fn values_are_shown_only_if_the_setting_says_so() {
    let guard = guard(&MemoryStore::new());
    guard.insert("k", &"<b>secret</b>").await.expect("stored");
    let hidden = key_of(&serve(guard.inspector()), "k").await;
    assert!(!hidden.to_string().contains("secret"), "{hidden}");
    let shown = key_of(&serve(guard.inspector().show_values(true)), "k").await;
    assert!(shown["value"].as_str().is_some_and(|value| value.ends_with("<b>secret</b>")), "{shown}");
}

#[tokio::test]
async fn a_key_of_any_bytes_can_be_typed() {
    let guard = guard(&MemoryStore::new());
    let service = serve(guard.inspector());
    let long = "k".repeat(64 * 1024);
    let texts = ["<script>alert(1)</script>", "\u{202e}gnp.exe", "a b", "100%", "ü", "{tag}", &long];
    for text in texts {
        guard.insert(text, &1).await.expect("stored");
        let answer = key_of(&service, text).await;
        let expected = stampede_guard::CacheKey::from(text).to_string();
        assert_eq!(
            (answer["key"].as_str(), answer["state"].as_str()),
            (Some(&*expected), Some("fresh")),
            "{text:.20}"
        );
        // The text that pages and logs show finds it, too.
        assert_eq!(key_of(&service, &expected).await["state"], "fresh", "{text:.20}");
    }
    // Of a long key lists show the first bytes and a digest.
    let answer = key_of(&service, &long).await;
    let name = answer["redis_key"].as_str().expect("a text").strip_prefix("sg1:e:{shop:").expect("a name");
    assert_eq!(key_of(&service, name.trim_end_matches('}')).await["state"], "fresh", "{name}");
    let bytes = [0xff, 0xfe, b':'];
    guard.insert(stampede_guard::CacheKey::from_parts([&bytes[..]]), &1).await.expect("stored");
    assert_eq!(key_of(&service, "%FF%FE%3A").await["state"], "fresh");
    let parts = key_of(&service, "a b:c").await;
    assert_eq!(parts["key"], "a%20b:c");
}

#[tokio::test]
async fn a_url_has_the_key_of_its_get_or_a_reason_why_it_has_none() {
    let guard = guard(&MemoryStore::new());
    let service = serve(guard.inspector());
    let app = guard.layer(tower::service_fn(async |_: Request<Full<Bytes>>| {
        let response =
            Response::builder().header("vary", "accept-language").header("cache-control", "max-age=60");
        response.body(Full::<Bytes>::from("page"))
    }));
    let load = async |language: &str| {
        let request =
            Request::get("/p?a=1").header("host", "shop.example").header("accept-language", language);
        let response =
            app.clone().oneshot(request.body(Full::default()).expect("a request")).await.expect("a response");
        assert_eq!(read(response).await.0, StatusCode::OK);
    };
    load("de").await;
    let ask = async |url: &str, headers: &[&str]| {
        let headers: String = headers.iter().map(|line| format!("&header={}", encoded(line))).collect();
        json(&service, get(&format!("/api/key?url={}{headers}", encoded(url)))).await.1
    };
    let answer = ask("http://shop.example/p?a=1", &["Accept-Language: de"]).await;
    assert_eq!(
        (answer["state"].as_str(), answer["codec"].as_str()),
        (Some("fresh"), Some("HTTP response")),
        "{answer}"
    );
    assert_eq!(answer["http"], serde_json::json!({ "status": 200, "varies_on": "accept-language" }));
    let other = ask("http://shop.example/p?a=1", &["Accept-Language: fr"]).await;
    assert_eq!(other["state"], "absent", "{other}");
    assert!(other["how"].to_string().contains("of the variants by accept-language"), "{other}");
    // Once it is loaded, the other variant is fresh under its own key.
    load("fr").await;
    let other = ask("http://shop.example/p?a=1", &["Accept-Language: fr"]).await;
    assert_eq!(other["state"], "fresh", "{other}");
    assert_ne!(other["key"], answer["key"]);
    assert_eq!(ask("http://shop.example/p?a=1", &["Accept-Language: de"]).await["state"], "fresh");
    let demanding =
        ask("http://shop.example/p?a=1", &["Accept-Language: de", "Cache-Control: no-cache"]).await;
    assert_eq!(demanding["state"], "expired", "{demanding}");
    assert!(
        demanding["why"].as_str().is_some_and(|why| why.contains("not one that this request accepts")),
        "{demanding}"
    );
    let absent = ask("http://shop.example/p?a=2", &[]).await;
    assert_eq!(absent["state"], "absent");
    let bypass = ask("http://shop.example/p?a=1", &["Cookie: session=1"]).await;
    assert_eq!((bypass["state"].as_str(), bypass["key"].as_str()), (Some("bypass"), None));
    assert!(bypass["why"].as_str().is_some_and(|why| why.contains("credentials")), "{bypass}");
}

/// A client-side policy keys the whole URL.
#[tokio::test]
async fn the_policy_of_the_handle_decides_the_key_of_a_url() {
    let http = HttpPolicy::private();
    let guard = guard(&MemoryStore::new()).with_policy(Policy::builder().http(http).build().expect("valid"));
    let service = serve(guard.inspector());
    let (_, answer) =
        json(&service, get(&format!("/api/key?url={}", encoded("https://api.example/rates")))).await;
    let request = Request::get("https://api.example/rates").body(()).expect("a request");
    let key = guard.http_key(&request).expect("it has one").to_string();
    assert_eq!(answer["key"].as_str(), Some(&*key));
}

#[tokio::test(start_paused = true)]
async fn the_processes_with_a_copy_are_named_and_asking_makes_none() {
    let store = MemoryStore::new();
    let policy = Policy::builder().fresh_for(MINUTE).local_for(MINUTE).build().expect("valid");
    let guards = [(); 2].map(|()| guard(&store).with_policy(policy.clone()));
    let services = [("a", 0), ("b", 1)].map(|(name, n)| serve(guards[n].inspector().name(name)));
    let load = || async { Ok::<_, String>(1) };
    while guards[1].stats().local_hits == 0 {
        guards[1].get_or_load("k", load).await.expect("loaded");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    for _ in 0..2 {
        let answer = key_of(&services[0], "k").await;
        let copies: Vec<_> = answer["processes"]
            .as_array()
            .expect("a list")
            .iter()
            .map(|process| process["has_copy"].as_bool())
            .collect();
        assert_eq!(copies.iter().filter(|copy| **copy == Some(true)).count(), 1, "{answer}");
        assert_eq!(copies.len(), 2, "{answer}");
    }
}

#[tokio::test(start_paused = true)]
async fn the_holder_of_a_lease_and_its_remaining_time_are_shown() {
    let store = MemoryStore::new();
    let guards = [(); 2].map(|()| guard(&store));
    let service = serve(guards[0].inspector());
    shows_the_lease(&guards[1], &service).await;
}

/// While this guard loads, the service names its process as the holder of the lease, and a request joins the load.
pub(super) async fn shows_the_lease(loads: &StampedeGuard, service: &InspectorService) {
    let _other = serve(loads.inspector().name("loads"));
    let (gate, running) = (Gate::closed(), Counter::default());
    let (waits, counts) = (gate.clone(), running.clone());
    let load = loads.get_or_load("k", move || async move {
        let _running = counts.start();
        waits.pass().await;
        Ok::<_, String>(1)
    });
    let looks = async {
        running.reach(1).await;
        let answer = loop {
            let answer = key_of(service, "k").await;
            // On a busy machine the other process may answer too late.
            if answer["processes"]
                .as_array()
                .is_some_and(|all| all.iter().any(|process| process["load"].is_object()))
            {
                break answer;
            }
        };
        gate.open();
        answer
    };
    let (_, answer) = tokio::join!(load, looks);
    let holder = answer["lease"]["process"].as_str().expect("a process");
    let loading =
        answer["processes"].as_array().expect("a list").iter().find(|process| process["load"].is_object());
    assert_eq!(loading.map(|process| process["process"].as_str()), Some(Some(holder)), "{answer}");
    assert!(
        answer["lease"]["remaining_ms"].as_f64().is_some_and(|ms| (0.0..=2_000.0).contains(&ms)),
        "{answer}"
    );
    assert!(
        answer["why"].as_str().is_some_and(|why| why.contains("a load is running, and a request joins it")),
        "{answer}"
    );
    let after = key_of(service, "k").await;
    assert_eq!((after["lease"].is_null(), after["state"].as_str()), (true, Some("fresh")), "{after}");
}

/// After a deployment whose policy has one tag more: the values of the older one count as invalidated.
#[tokio::test]
async fn a_value_without_a_tag_of_the_policy_is_not_called_fresh() {
    let store = MemoryStore::new();
    let older = guard(&store);
    older.insert("k", &1).await.expect("stored");
    let policy = Policy::builder().tags(["site"]).build().expect("valid");
    let newer = guard(&store).with_policy(policy);
    let answer = key_of(&serve(newer.inspector()), "k").await;
    assert_eq!(answer["state"], "expired", "{answer}");
    assert!(answer["why"].as_str().is_some_and(|why| why.contains("lacks the tag `site`")), "{answer}");
    assert_eq!(newer.get::<i32>("k").await.expect("read"), None, "a request gets what the answer says");
    assert_eq!(key_of(&serve(older.inspector()), "k").await["state"], "fresh");
}

/// Of a request, too, after `set_policy`.
#[tokio::test]
async fn the_newest_policy_decides() {
    let guard = guard(&MemoryStore::new());
    let service = serve(guard.inspector());
    guard.insert("k", &1).await.expect("stored");
    assert_eq!(key_of(&service, "k").await["state"], "fresh");
    let policy = guard.policy().to_builder().tags(["site"]).build().expect("valid");
    guard.set_policy(policy).expect("tags can be replaced");
    let answer = key_of(&service, "k").await;
    assert_eq!(answer["state"], "expired", "{answer}");
    assert!(answer["why"].as_str().is_some_and(|why| why.contains("lacks the tag `site`")), "{answer}");
    assert_eq!(guard.get::<i32>("k").await.expect("read"), None, "a request gets what the answer says");
}

/// `~` stands before the crate's own suffixes, and is escaped in a key of the program.
#[tokio::test]
async fn a_typed_tilde_is_one_of_the_program() {
    let guard = guard(&MemoryStore::new());
    let service = serve(guard.inspector());
    for key in ["promo~x", "~all", "~"] {
        guard.insert(key, &1).await.expect("stored");
        assert_eq!(key_of(&service, key).await["state"], "fresh", "{key}");
    }
}
