//! The [`Store`] contract: the same cases on memory and on a real Redis.
//!
//! Each case is written once, against `Store`, and runs four times: on memory, on Redis in RESP2 and in RESP3, and on a
//! cluster. All cases share one cluster ([`on_cluster`]); each other case has a Redis of its own. The users have the
//! documented minimal rights, and at the end of a case no key may be without a TTL. For sequences that the cases do not
//! cover, [`equal_answers`] runs random steps on both stores and compares the answers.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::join_all;
use tokio::time::{Instant, timeout};
use uuid::Uuid;

use super::memory::MemoryStore;
use super::protocol::Announcement;
use super::wake_leases::Hints;
use super::{
    Acquire, Acquired, AttemptNumber, Fail, HandOver, HandedOver, Insert, LeaseWatch, OlderEntry, Store,
    Token, TokenCheck,
};
use crate::key::{CacheKey, Key};

/// Makes one test of each case, in a new world.
macro_rules! tests_in {
    ($world:ident as $name:ident: $($case:ident,)*) => {
        mod $name {
            use crate::store::contract::World;
            $(#[tokio::test] async fn $case() {
                let world = World::$world();
                super::$case(&world).await;
                world.check();
            })*
        }
    };
}

/// Lists all cases of a module for the shared cluster.
macro_rules! listed {
    ($($case:ident,)*) => {
        #[cfg(feature = "cluster")]
        pub(super) fn cases() -> Vec<crate::store::contract::on_cluster::Case> {
            vec![$((concat!(module_path!(), "::", stringify!($case)), |world| Box::pin($case(world)))),*]
        }
    };
}

/// Makes one test of each case for each kind of store.
macro_rules! contract {
    ($($case:ident,)*) => {
        tests_in! { memory as on_memory: $($case,)* }
        #[cfg(feature = "redis")]
        tests_in! { redis as on_redis: $($case,)* }
        #[cfg(feature = "redis")]
        tests_in! { redis_in_resp3 as on_redis_in_resp3: $($case,)* }
        listed! { $($case,)* }
    };
}

/// Makes one test of each case, on a new server. On the shared cluster these cases run one after the other, because each affects a whole
/// server.
#[cfg(feature = "redis")]
macro_rules! on_servers {
    ($($case:ident,)*) => {
        tests_in! { redis as on_one: $($case,)* }
        listed! { $($case,)* }
    };
}

mod attempts;
#[cfg(feature = "redis")]
mod equal_answers;
mod leases;
mod lists;
mod locks;
#[cfg(feature = "redis")]
mod long_queues;
#[cfg(feature = "cluster")]
mod on_cluster;
#[cfg(feature = "redis")]
mod on_redis;
mod tags;
mod volumes;
mod waiters;
#[cfg(feature = "redis")]
mod wake_ups;

// The server harness of the integration tests. This suite is part of the crate, because `Store` is private.
#[cfg(feature = "redis")]
#[path = "../support/mod.rs"]
pub(super) mod support;

/// Deadline of a command that must succeed.
const WITHIN: Duration = Duration::from_secs(10);
/// A lease that no case outlives.
const LEASE: Duration = Duration::from_secs(60);

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// The announcement of a change in a volume without members.
fn unannounced() -> Announcement {
    let volume = Key::of_name(&format!("{}:", namespace()));
    let attempt = AttemptNumber { number: 1, voids_earlier: false };
    Announcement {
        volume,
        id: Uuid::new_v4(),
        attempt,
        creates: false,
        known_registry: None,
        term: ms(2_000),
    }
}

fn bytes(text: &'static str) -> Bytes {
    Bytes::from_static(text.as_bytes())
}

tokio::task_local! {
    /// The prefix of the running case's keys, if cases share a store.
    static NAMESPACE: String;
}

fn namespace() -> String {
    NAMESPACE.try_with(String::clone).unwrap_or_else(|_| "ns".to_owned())
}

fn key(text: &str) -> Key {
    Key::new(&namespace(), &CacheKey::from(text))
}

/// A text for a probe whose `name` is at the same master as `other`: only messages of the same master arrive in order.
fn probe_beside(other: &str, name: impl Fn(&str) -> String) -> String {
    #[cfg(feature = "cluster")]
    let master = |name: &str| support::cluster::master_of(super::redis::slot_of(name));
    #[cfg(not(feature = "cluster"))]
    let master = |_: &str| 0;
    let texts = (0..).map(|number| format!("a probe for what was received before, {number}"));
    texts.into_iter().find(|text| master(&name(text)) == master(other)).expect("one in three")
}

/// A store that the nodes of a case share.
enum World {
    Memory(MemoryStore),
    #[cfg(feature = "redis")]
    Redis(support::redis_server::RedisServer),
    #[cfg(feature = "cluster")]
    Cluster(support::cluster::Cluster),
}

impl World {
    fn memory() -> Self {
        Self::Memory(MemoryStore::new())
    }

    #[cfg(feature = "redis")]
    fn redis() -> Self {
        Self::Redis(support::redis_server::RedisServer::start())
    }

    #[cfg(feature = "redis")]
    fn redis_in_resp3() -> Self {
        Self::Redis(support::redis_server::RedisServer::start().in_resp3())
    }

    /// A connected node that receives messages.
    async fn node(&self) -> Store {
        let node = match self {
            Self::Memory(store) => Store::Memory(Arc::new(store.clone().into_node())),
            #[cfg(feature = "redis")]
            Self::Redis(server) => {
                let client = redis::Client::open(server.minimal_user()).expect("an address");
                Store::Redis(Arc::new(super::redis::RedisStore::new(client, ms(1_000))))
            }
            #[cfg(feature = "cluster")]
            Self::Cluster(cluster) => on_cluster::node(cluster),
        };
        node.connect(WITHIN).await.expect("connects");
        assert!(node.hints_arrive());
        node
    }

    /// Closes a node, and waits until the server has noticed that it is dead.
    async fn dead(&self, node: Store) {
        match self {
            Self::Memory(_) => node.close(),
            #[cfg(feature = "redis")]
            Self::Redis(server) => {
                let left = server.pubsub_clients() - 1;
                node.close();
                let what = "the server notices that a node has left";
                support::probe::eventually_eq(what, WITHIN, left, async || server.pubsub_clients()).await;
            }
            #[cfg(feature = "cluster")]
            Self::Cluster(_) => unreachable!("no case on a cluster is about nodes that have left"),
        }
    }

    /// The server that has the keys of this name.
    #[cfg(feature = "redis")]
    fn server_of(&self, name: &str) -> &support::redis_server::RedisServer {
        let _ = name;
        match self {
            Self::Memory(_) => unreachable!("these cases are about a server"),
            Self::Redis(server) => server,
            #[cfg(feature = "cluster")]
            Self::Cluster(cluster) => cluster.node(support::cluster::master_of(super::redis::slot_of(name))),
        }
    }

    /// Whether a grant is only a claim until its waiter takes again, and the next waiter is notified when the claim has ended.
    fn gives_claims(&self) -> bool {
        #[cfg(feature = "cluster")]
        return matches!(self, Self::Cluster(_));
        #[cfg(not(feature = "cluster"))]
        false
    }

    fn check(&self) {
        let immortal: Vec<String> = match self {
            Self::Memory(_) => Vec::new(),
            #[cfg(feature = "redis")]
            Self::Redis(server) => server.keys_without_ttl(),
            #[cfg(feature = "cluster")]
            Self::Cluster(cluster) => {
                cluster.nodes().iter().flat_map(|node| node.keys_without_ttl()).collect()
            }
        };
        assert_eq!(immortal, Vec::<String>::new());
    }
}

/// One flight: its token and its watch on one node, and short methods for the commands about its key.
struct Flight {
    store: Store,
    key: Key,
    token: Token,
    watch: LeaseWatch,
}

impl Flight {
    fn on(store: &Store, key: &Key) -> Self {
        let token = Token::mint(store.node());
        let watch = store.watch(key, &token);
        Self { store: store.clone(), key: key.clone(), token, watch }
    }

    /// A flight whose token says that its leases have this length.
    #[cfg(feature = "redis")]
    fn of_lease(store: &Store, key: &Key, lease: Duration) -> Self {
        let token = Token::mint_for(store.node(), lease);
        let watch = store.watch(key, &token);
        Self { store: store.clone(), key: key.clone(), token, watch }
    }

    /// A flight on a separate node.
    async fn separate(world: &World, key: &Key) -> Self {
        Self::on(&world.node().await, key)
    }

    /// A flight on a separate node that holds the lease.
    async fn holding(world: &World, key: &Key) -> Self {
        let flight = Self::separate(world, key).await;
        flight.must_hold().await;
        flight
    }

    /// A flight on a separate node that waits in the queue.
    async fn waiting(world: &World, key: &Key) -> Self {
        let flight = Self::separate(world, key).await;
        flight.must_wait().await;
        flight
    }

    fn ask(&self) -> Acquire<'_> {
        Acquire { token: &self.token, lease: LEASE, seen: None, behind: None, queue: true }
    }

    async fn acquire(&self, ask: Acquire<'_>) -> Acquired {
        self.store.acquire(&self.key, ask, WITHIN).await.expect("acquire")
    }

    #[track_caller]
    fn must_hold(&self) -> impl Future<Output = ()> + '_ {
        let caller = std::panic::Location::caller();
        async move {
            let acquired = self.acquire(self.ask()).await;
            assert!(matches!(acquired, Acquired::Granted), "{caller}: {acquired:?}");
        }
    }

    #[track_caller]
    fn must_wait(&self) -> impl Future<Output = ()> + '_ {
        let caller = std::panic::Location::caller();
        async move {
            let acquired = self.acquire(self.ask()).await;
            assert!(matches!(acquired, Acquired::Held { .. }), "{caller}: {acquired:?}");
        }
    }

    async fn commit(&self, entry: &'static str) -> TokenCheck {
        self.store.commit(&self.key, &self.token, bytes(entry), LEASE, WITHIN).await.expect("commit")
    }

    async fn renew(&self, lease: Duration) -> TokenCheck {
        self.store.renew(&self.key, &self.token, lease, WITHIN).await.expect("renew")
    }

    async fn release(&self) -> TokenCheck {
        self.store.release(&self.key, &self.token, WITHIN).await.expect("release")
    }

    fn failure(&self) -> Fail<'_> {
        Fail {
            token: &self.token,
            outcome: bytes("no route"),
            keep: LEASE,
            replay: Duration::ZERO,
            older: OlderEntry::Stays,
            seen: None,
        }
    }

    async fn fail(&self, fail: Fail<'_>) -> TokenCheck {
        self.store.fail(&self.key, fail, WITHIN).await.expect("fail")
    }

    async fn hand_over(&self, hops: u8) -> HandedOver {
        self.end_handing_over(hops, false).await
    }

    async fn end_handing_over(&self, hops: u8, is_leaving: bool) -> HandedOver {
        let how = HandOver { lease: LEASE, hops, is_leaving };
        self.store.hand_over(&self.key, &self.token, how, WITHIN).await.expect("hand over")
    }

    async fn look_up(&self) -> Option<Bytes> {
        self.store.look_up(&self.key, WITHIN).await.expect("look up")
    }

    async fn invalidate(&self) {
        self.store.invalidate(&self.key, None, &unannounced(), WITHIN).await.expect("invalidate");
    }

    async fn insert(&self, entry: &'static str, over: Option<&'static str>) {
        let insert = Insert { entry: bytes(entry), keep: LEASE, over: over.map(bytes) };
        self.store.invalidate(&self.key, Some(insert), &unannounced(), WITHIN).await.expect("insert");
    }

    /// The flight's next hints. They must come without an expiry: [`LEASE`] is far longer than this waits.
    #[track_caller]
    fn hints(&self) -> impl Future<Output = Hints> + '_ {
        let caller = std::panic::Location::caller();
        async move {
            let hints = timeout(WITHIN, self.watch.hints()).await;
            hints.unwrap_or_else(|_| panic!("{caller}: the wake-up was lost"))
        }
    }

    /// Waits for the grant. Returns how many loads of the key have vanished so far.
    #[track_caller]
    fn granted(&self, world: &World) -> impl Future<Output = u8> + '_ {
        let (caller, may_be_notified) = (std::panic::Location::caller(), world.gives_claims());
        async move {
            loop {
                let hints = self.hints().await;
                if let Some(hops) = hints.granted {
                    return hops;
                }
                assert!(may_be_notified, "{caller}: {hints:?}");
            }
        }
    }

    /// Whether the flight has received no grant so far, nor any hint that it does not need.
    async fn is_passed_over(&self, world: &World) -> bool {
        self.hints_so_far().await.is_none_or(|hints| world.gives_claims() && hints.granted.is_none())
    }

    async fn has_no_hints(&self) -> bool {
        self.hints_so_far().await.is_none()
    }

    /// The hints that this flight has received so far. A node receives messages in order, so once a message to another flight of the same
    /// node has arrived, all earlier ones have.
    async fn hints_so_far(&self) -> Option<Hints> {
        let probe = key(&probe_beside(self.key.name(), |text| key(text).name().to_owned()));
        let (own, other) = (Self::on(&self.store, &probe), Self::on(&self.store, &probe));
        own.must_hold().await;
        other.must_wait().await;
        own.release().await;
        other.hints().await;
        timeout(Duration::ZERO, self.watch.hints()).await.ok()
    }
}
