//! What the inspector does: nothing without the setting, and nothing that another site could cause.

use stampede_guard::inspector::Operator;
use tracing::Level;

use super::*;
use crate::support::warnings::Warnings;

fn act() -> http::request::Builder {
    let request = Request::post("/api/act").header("authorization", format!("Bearer {TOKEN}"));
    request.header("content-type", "application/json").header("x-stampede-guard", "act")
}

fn acting(guard: &StampedeGuard) -> InspectorService {
    serve(guard.inspector().allow_actions(true))
}

#[tokio::test]
async fn nothing_is_done_without_the_setting() {
    let guard = guard(&MemoryStore::new());
    guard.insert("k", &1).await.expect("stored");
    let (status, answer) =
        json_of(&serve(guard.inspector()), act(), r#"{"action":"invalidate","key":"k"}"#).await;
    assert_eq!(status, StatusCode::FORBIDDEN);
    assert!(answer["error"].as_str().is_some_and(|text| text.contains("allow_actions")), "{answer}");
    assert_eq!(guard.get::<i32>("k").await.expect("read"), Some(1));
}

#[tokio::test(start_paused = true)]
async fn a_key_a_url_and_a_tag_are_invalidated_and_the_acknowledgement_is_shown() {
    let guard = guard(&MemoryStore::new());
    let service = acting(&guard);
    guard.insert(("user", 42), &1).await.expect("stored");
    guard.insert_with_tags("tagged", &1, ["article"]).await.expect("stored");
    guard.insert_with_tags("expires", &1, ["soft"]).await.expect("stored");
    for body in [
        r#"{"action":"invalidate","key":"user:42"}"#,
        r#"{"action":"invalidate_tag","tag":"article"}"#,
        r#"{"action":"expire_tag","tag":"soft"}"#,
        r#"{"action":"invalidate","url":"http://shop.example/p"}"#,
    ] {
        let (status, answer) = json_of(&service, act(), body).await;
        assert_eq!(status, StatusCode::OK, "{body}: {answer}");
        assert!(
            answer["text"].as_str().is_some_and(|text| text.starts_with("final in 1 of 1 processes after ")),
            "{answer}"
        );
        assert!(answer["key"].is_string(), "the key that was named: {answer}");
    }
    assert_eq!(guard.get::<i32>(("user", 42)).await.expect("read"), None);
    assert_eq!(guard.get::<i32>("tagged").await.expect("read"), None);
    assert_eq!(guard.remaining_freshness("expires").await.expect("read"), Some(Duration::ZERO));
}

#[tokio::test(start_paused = true)]
async fn the_bypass_is_switched_in_each_process_that_allows_it() {
    let store = MemoryStore::new();
    let guards = [(); 3].map(|()| guard(&store));
    let service = acting(&guards[0]);
    let _others = (acting(&guards[1]), serve(guards[2].inspector()));
    for on in [true, false] {
        let (status, answer) = json_of(&service, act(), &format!(r#"{{"action":"bypass","on":{on}}}"#)).await;
        assert_eq!(status, StatusCode::OK, "{answer}");
        let words = if on { "off in 2 of 3" } else { "on in 3 of 3" };
        assert!(answer["text"].as_str().is_some_and(|text| text.contains(words)), "{answer}");
        for (guard, switched) in guards.iter().zip([on, on, false]) {
            let before = guard.stats().bypassed;
            guard.get_or_load("k", || async { Ok::<_, String>(1) }).await.expect("loaded");
            assert_eq!(guard.stats().bypassed - before, u64::from(switched));
        }
    }
}

/// The log has what the application's authentication says, and of a key its digest.
#[tokio::test]
async fn an_action_is_logged_with_its_operator() {
    let events = Warnings::up_to(Level::INFO);
    let _listening = events.listen();
    let guard = guard(&MemoryStore::new());
    let service = acting(&guard);
    let operator = Operator("ada\nERROR forged".to_owned());
    let body = r#"{"action":"invalidate","key":"user:42"}"#;
    let request = act().extension(operator).body(Full::from(body)).expect("a request");
    assert_eq!(send(&service, request).await.status(), StatusCode::OK);
    let logged = events.about("the inspector acts");
    assert_eq!(logged.len(), 1, "{logged:?}");
    for words in ["invalidate", "ada", &guard.digest(("user", 42))] {
        assert!(logged[0].contains(words), "{words}: {logged:?}");
    }
    assert!(!logged[0].contains("user:42") && !logged[0].contains('\n'), "{logged:?}");
}

/// A form of another site can send neither the type nor the field; a script of another site needs an answer to its preflight.
#[tokio::test]
async fn a_request_that_a_form_could_send_is_refused() {
    let guard = guard(&MemoryStore::new());
    guard.insert("k", &1).await.expect("stored");
    let service = guard.inspector().unprotected().allow_actions(true).into_service().expect("valid");
    let body = r#"{"action":"invalidate","key":"k"}"#;
    for (kind, field, status) in [
        ("text/plain", Some("act"), StatusCode::BAD_REQUEST),
        ("application/json", Some("other"), StatusCode::BAD_REQUEST),
        ("application/json", None, StatusCode::UNAUTHORIZED),
    ] {
        let mut request = Request::post("/api/act").header("content-type", kind);
        if let Some(field) = field {
            request = request.header("x-stampede-guard", field);
        }
        assert_eq!(json_of(&service, request, body).await.0, status);
    }
    // Nor can another site's image have the doctor open connections.
    let image = Request::get("/api/doctor");
    assert_eq!(json(&service, image).await.0, StatusCode::UNAUTHORIZED);
    assert_eq!(
        json(&service, Request::get("/api/doctor").header("x-stampede-guard", "1")).await.0,
        StatusCode::OK
    );
    let preflight =
        Request::options("/api/act").header("origin", "https://evil.example").body(Full::default());
    let response = send(&service, preflight.expect("a request")).await;
    assert_eq!(response.status(), StatusCode::UNAUTHORIZED);
    assert!(!response.headers().contains_key("access-control-allow-origin"));
    assert_eq!(guard.get::<i32>("k").await.expect("read"), Some(1));
}

#[tokio::test(start_paused = true)]
async fn bad_input_gets_an_error_that_says_what_to_do() {
    let service = acting(&guard(&MemoryStore::new()));
    let long = format!(r#"{{"action":"invalidate","key":"{}"}}"#, "k".repeat(1024 * 1024));
    for (body, status, words) in [
        ("", StatusCode::BAD_REQUEST, "no JSON"),
        ("{", StatusCode::BAD_REQUEST, "no JSON"),
        ("[]", StatusCode::BAD_REQUEST, "the action is none of"),
        (r#"{"action":"flush"}"#, StatusCode::BAD_REQUEST, "the action is none of"),
        (r#"{"action":"invalidate"}"#, StatusCode::BAD_REQUEST, "either a key or a url"),
        (r#"{"action":"invalidate","key":7}"#, StatusCode::BAD_REQUEST, "either a key or a url"),
        (r#"{"action":"invalidate_tag","tag":""}"#, StatusCode::BAD_REQUEST, "name the tag"),
        (r#"{"action":"bypass","on":"yes"}"#, StatusCode::BAD_REQUEST, "true or false"),
        (&*long, StatusCode::PAYLOAD_TOO_LARGE, "longer than"),
    ] {
        let (found, answer) = json_of(&service, act(), body).await;
        assert_eq!(found, status, "{answer}");
        assert!(answer["error"].as_str().is_some_and(|text| text.contains(words)), "{body:.40}: {answer}");
        // Ten a second are taken.
        tokio::time::advance(Duration::from_millis(150)).await;
    }
}

#[tokio::test(start_paused = true)]
async fn ten_actions_a_second_are_taken() {
    let service = acting(&guard(&MemoryStore::new()));
    for second in 0..2 {
        for n in 0..15 {
            let (status, _) = json_of(&service, act(), r#"{"action":"invalidate","key":"k"}"#).await;
            let expected = if n < 10 { StatusCode::OK } else { StatusCode::TOO_MANY_REQUESTS };
            assert_eq!(status, expected, "{second} {n}");
        }
        tokio::time::advance(Duration::from_secs(1)).await;
    }
}
