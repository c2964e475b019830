use super::*;
use crate::store::contract::support::proxy::{Mode, Proxy};
use crate::store::contract::support::redis_server::RedisServer;
use crate::store::redis::RedisStore;
use crate::store::{LockName, Token};

#[test]
fn existing_flags_are_retained() {
    assert_eq!(merged("").as_deref(), Some("Kgxe"));
    assert_eq!(merged("AKE"), None);
    assert_eq!(merged("AE").as_deref(), Some("AEK"));
    assert_eq!(merged("lE").as_deref(), Some("lEKgxe"));
    assert_eq!(merged("xgKe$"), None);
}

/// The task for announcements ends with its last waiter, even if its connection cannot be opened.
#[tokio::test]
async fn a_task_that_can_not_connect_ends_with_the_last_waiter() {
    let server = RedisServer::start();
    let proxy = Proxy::start(server.port()).await;
    let client = redis::Client::open(proxy.url()).expect("an address");
    let store = RedisStore::new(client, Duration::from_secs(1));
    store.connect(Duration::from_secs(10)).await.expect("connects");
    proxy.set(Mode::BlackHoleSubscriptions);
    let name = LockName::mutex("k");
    let waits = store.grants.register(&name, &Token::mint(store.node()));
    let announced = store.keyspace.announce(&name.key, Duration::from_millis(300)).await;
    assert!(announced.is_err() && store.keyspace.task.is_running(), "{announced:?}");
    drop(waits);
    let started = Instant::now();
    while store.keyspace.task.is_running() {
        assert!(started.elapsed() < Duration::from_secs(10), "it runs without waiters");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert!(store.keyspace.state().keys.is_empty());
}
