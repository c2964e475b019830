use std::time::Duration;

use super::*;
use crate::key::{CacheKey, Key};
use crate::store::redis::RedisStore;

/// Until its first message, an inbox reports the state of the commands' connection: idle, connecting, or down because no server answers.
#[tokio::test]
async fn an_inbox_that_was_never_up_reports_the_state_of_the_commands_connection() {
    let listener = std::net::TcpListener::bind(("127.0.0.1", 0)).expect("a free port");
    let url = format!("redis://{}/", listener.local_addr().expect("bound"));
    let client = redis::Client::open(url).expect("an address");
    let store = RedisStore::new(client, Duration::from_secs(1));
    assert_eq!(store.inbox.link(), LinkState::Idle);
    store.inbox.open();
    assert_eq!(store.inbox.link(), LinkState::Connecting);
    drop(listener);
    let key = Key::new("ns", &CacheKey::from("k"));
    store.look_up(&key, Duration::from_secs(10)).await.expect_err("the port is closed");
    assert_eq!(store.inbox.link(), LinkState::Down);
    store.inbox.close();
    assert_eq!(store.inbox.link(), LinkState::Closed);
}

/// Such an inbox reports that it is down, even if the commands' connection is up.
#[tokio::test]
async fn an_inbox_that_was_up_is_down_until_it_is_back() {
    let client = redis::Client::open("redis://127.0.0.1:1/").expect("an address");
    let store = RedisStore::new(client, Duration::from_secs(1));
    store.connections.subscriber.liveness.heard();
    tokio::time::sleep(Duration::from_millis(1)).await;
    assert_eq!(store.inbox.link(), LinkState::Down);
}
