use super::*;
use crate::key::{CacheKey, Key};
use crate::store::redis::RedisStore;

/// One that has heard nothing yet: nobody asked for it, it is on its way, or there is nowhere to go.
#[tokio::test]
async fn an_inbox_that_was_never_up_stands_as_the_commands_do() {
    let listener = std::net::TcpListener::bind(("127.0.0.1", 0)).expect("a free port");
    let url = format!("redis://{}/", listener.local_addr().expect("bound"));
    let client = redis::Client::open(url).expect("an address");
    let store = RedisStore::new(client, Duration::from_secs(1));
    assert_eq!(store.inbox.link(), LinkState::Idle);
    store.inbox.open();
    assert_eq!(store.inbox.link(), LinkState::Connecting);
    drop(listener);
    let key = Key::new("ns", &CacheKey::from("k"));
    store.get(&key, Duration::from_secs(10)).await.expect_err("nobody listens");
    assert_eq!(store.inbox.link(), LinkState::Down);
    store.inbox.close();
    assert_eq!(store.inbox.link(), LinkState::Closed);
}

/// It is on its way again, and says that it was there: commands may well be answered meanwhile.
#[tokio::test]
async fn an_inbox_that_was_up_is_down_until_it_is_back() {
    let client = redis::Client::open("redis://127.0.0.1:1/").expect("an address");
    let store = RedisStore::new(client, Duration::from_secs(1));
    store.inbox.vitals.heard();
    tokio::time::sleep(Duration::from_millis(1)).await;
    assert_eq!(store.inbox.link(), LinkState::Down);
}
