//! Loads whose clients do not all receive the same answer, with the processes and clients of `fleet`: variants, validation, and stale,
//! broken and slow responses.

use std::collections::BTreeSet;
use std::time::Duration;

use axum::body::Body;
use axum::response::{IntoResponse as _, Response};
use bytes::Bytes;
use futures_util::stream;
use http::{HeaderMap, StatusCode};
use http_body_util::{BodyExt as _, Full};

use super::fleet::{CLIENTS, PROCESSES, Saw, Servers};
use super::kit::secs;
use super::sockets::client;
use crate::support::origin::{self, Answer};
use crate::support::probe::{eventually, eventually_eq};

const LANGUAGES: [&str; 3] = ["de", "en", "fr"];
const TAG: &str = "\"a\"";
const PIECES: usize = 10;

/// The answer of a process of the fleet, if the outcome is one of this file.
pub(super) async fn answer(origin: &str, outcome: &str, headers: &HeaderMap) -> Option<Response> {
    let header = |name| headers.get(name).map_or("", |value| value.to_str().expect("text"));
    let load = |key: &str| {
        let key = key.to_owned();
        async move { origin::load(origin, &key).await.expect("the origin answers") }
    };
    Some(match outcome {
        "varied" => {
            let language = header("accept-language");
            load(&format!("varied.{language}")).await;
            ([("vary", "accept-language")], language.to_owned()).into_response()
        }
        "validated" => {
            let text = load("validated").await;
            match header("if-none-match") {
                "" => ([("etag", TAG), ("cache-control", "max-age=1")], text).into_response(),
                _ => (StatusCode::NOT_MODIFIED, [("etag", TAG), ("cache-control", "max-age=60")])
                    .into_response(),
            }
        }
        "stale" => {
            let text = load("stale").await;
            ([("cache-control", "max-age=1, stale-while-revalidate=600")], text).into_response()
        }
        "reset" => {
            load("reset").await;
            let broken = std::io::Error::from(std::io::ErrorKind::ConnectionReset);
            Body::from_stream(stream::iter([Ok(Bytes::from_static(b"half")), Err(broken)])).into_response()
        }
        "trickle" => {
            load("trickle").await;
            let pieces = stream::unfold(0, |n| async move {
                tokio::time::sleep(Duration::from_millis(20)).await;
                (n < PIECES).then(|| (Ok::<_, std::io::Error>(Bytes::from(format!("{n}."))), n + 1))
            });
            Body::from_stream(pieces).into_response()
        }
        _ => return None,
    })
}

fn held(text: &str) -> Answer {
    Answer::value(text).held()
}

fn no_header(_: usize) -> (&'static str, &'static str) {
    ("x-like", "all")
}

/// The pairs of status and text that were received, each once.
fn seen(saw: &[Saw]) -> BTreeSet<(u16, Option<&str>)> {
    assert_eq!(saw.len(), PROCESSES * CLIENTS);
    saw.iter().map(|(_, status, _, text)| (*status, text.as_deref())).collect()
}

impl Servers {
    /// Sends a request to one process, in addition to those of the wave.
    async fn ask(&self, outcome: &str, control: &str) -> (u16, String, String) {
        let request = http::Request::get(format!("http://{}/{outcome}", self.addrs[0]))
            .header("host", "shop.example")
            .header("cache-control", control);
        let response = client().request(request.body(Full::<Bytes>::default()).unwrap()).await.unwrap();
        let (head, body) = response.into_parts();
        let remark = head.headers["cache-status"].to_str().unwrap().to_owned();
        let text = String::from_utf8(body.collect().await.unwrap().to_bytes().into()).unwrap();
        (head.status.as_u16(), remark, text)
    }
}

#[tokio::test]
async fn three_languages_are_three_loads_for_two_hundred_clients_of_four_processes() {
    let servers = Servers::start().await;
    for language in LANGUAGES {
        servers.origin.script(&format!("varied.{language}"), [held("v")]);
    }
    let language = |n: usize| LANGUAGES[n / PROCESSES % 3];
    let clients = servers.send("varied", |n| ("accept-language", language(n))).await;
    servers.all_wait().await;
    eventually_eq("one finds out that there are variants", secs(30), 1, async || {
        servers.origin.total_loads()
    })
    .await;
    for language in LANGUAGES {
        servers.origin.release(&format!("varied.{language}"));
    }
    for (n, status, _, text) in servers.end(clients, "three languages").await {
        assert_eq!((status, text.as_deref()), (200, Some(language(n))), "client {n}");
    }
    assert_eq!(servers.origin.total_loads(), 3);
}

#[tokio::test]
async fn a_stale_response_is_validated_once_for_two_hundred_clients_of_four_processes() {
    let servers = Servers::start().await;
    servers.origin.script("validated", [Answer::value("text"), held("not sent")]);
    servers.ask("validated", "").await;
    eventually("it is stale", secs(30), async || servers.ask("validated", "only-if-cached").await.0 == 504)
        .await;
    let clients = servers.send("validated", no_header).await;
    servers.all_wait().await;
    // By then all clients wait for the validation, which reaches the origin a moment later.
    eventually_eq("one validates", secs(30), 1, async || servers.origin.running("validated")).await;
    servers.origin.release("validated");
    let saw = servers.end(clients, "a validation").await;
    assert_eq!(seen(&saw), BTreeSet::from([(200, Some("text"))]));
    assert_eq!(servers.origin.loads("validated"), 2, "the first, and one validation");
}

#[tokio::test]
async fn a_stale_response_is_refreshed_once_behind_two_hundred_clients_of_four_processes() {
    let servers = Servers::start().await;
    servers.origin.script("stale", [Answer::value("old"), held("new")]);
    servers.ask("stale", "").await;
    let is_stale = async || servers.ask("stale", "only-if-cached").await.1.contains("ttl=-");
    eventually("it is stale", secs(30), is_stale).await;
    let clients = servers.send("stale", no_header).await;
    // The origin does not answer, so no client may wait for it.
    let saw =
        futures_util::future::join_all(clients).await.into_iter().map(Result::unwrap).collect::<Vec<_>>();
    assert_eq!(seen(&saw), BTreeSet::from([(200, Some("old"))]));
    servers.origin.wait_for_loads("stale", 2).await;
    servers.origin.release("stale");
    let is_new = async || servers.ask("stale", "only-if-cached").await.2 == "new";
    eventually("it is fresh", secs(30), is_new).await;
    servers.end(Vec::new(), "a refresh").await;
    assert_eq!(servers.origin.loads("stale"), 2, "the first, and one refresh");
}

#[tokio::test]
async fn a_broken_body_is_one_load_and_no_clients_truncated_200_in_four_processes() {
    let servers = Servers::start().await;
    servers.origin.script("reset", [held("v")]);
    let clients = servers.send("reset", no_header).await;
    servers.all_wait().await;
    servers.origin.release("reset");
    let saw = servers.end(clients, "a body that breaks").await;
    let whole = saw.iter().filter(|(_, status, _, text)| *status == 200 && text.is_some()).count();
    assert_eq!(whole, 0, "none takes half of it for all");
    let failed = saw.iter().filter(|(_, status, ..)| *status == 502).count();
    assert_eq!(failed, PROCESSES * CLIENTS - 1, "all but the leader's client");
    assert_eq!(servers.origin.loads("reset"), 1);
}

#[tokio::test]
async fn a_body_that_trickles_is_one_load_and_whole_for_two_hundred_clients_of_four_processes() {
    let servers = Servers::start().await;
    servers.origin.script("trickle", [held("v")]);
    let clients = servers.send("trickle", no_header).await;
    servers.all_wait().await;
    servers.origin.release("trickle");
    let saw = servers.end(clients, "a body that trickles").await;
    let whole: String = (0..PIECES).map(|n| format!("{n}.")).collect();
    assert_eq!(seen(&saw), BTreeSet::from([(200, Some(whole.as_str()))]));
    assert_eq!(servers.origin.loads("trickle"), 1);
}
