//! The nodes of a cluster: one specific node for commands, and any of them for messages and for the first query of the slot
//! map.
//!
//! Also finds out how a `ClusterClient` would connect to a node: address, credentials, TLS, database, socket settings. The
//! client does not show these settings. But it connects through a type that its caller selects, and passes all of them to that type.
//! [`ConnectionRecorder`] is such a type: it records the arguments and opens nothing. No I/O, no waiting.

use std::cell::RefCell;
use std::future::ready;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use redis::cluster::{ClusterClient, Connect};
use redis::{
    Client, Cmd, ConnectionInfo, ConnectionLike, IntoConnectionInfo, RedisError, RedisResult, Value,
};

use super::slots::{Address, Range, SLOTS};
use crate::store::redis::endpoint::{Endpoint, Located, ServerAddress, is_by_tls};
use crate::store::redis::errors::{on_connecting, on_refusal};
use crate::sync::lock;

pub(crate) struct ClusterNodes {
    client: ClusterClient,
    /// The addresses that the client was built with.
    seeds: Vec<Address>,
    /// Masters and replicas of the latest slot map.
    known: Mutex<KnownNodes>,
    /// The index of the next node to try.
    turn: AtomicUsize,
}

#[derive(Default)]
struct KnownNodes {
    masters: Vec<Address>,
    all: Vec<Address>,
}

impl ClusterNodes {
    pub(crate) fn new(client: ClusterClient) -> Self {
        let seeds = seeds(&client);
        let seeds = seeds.iter().filter_map(|info| Address::parse(&info.addr().to_string(), None)).collect();
        // Starts at a random node, so that the connections for messages of a fleet spread over all nodes.
        Self { client, seeds, known: Mutex::default(), turn: AtomicUsize::new(fastrand::usize(..1 << 16)) }
    }

    /// All nodes that may know the slots: the client's own addresses, and masters and replicas of the latest slot map.
    /// Replicas are included, because they may have taken over and be the only nodes that are up.
    pub(crate) fn all_known_nodes(&self) -> Vec<Address> {
        self.seeds.iter().chain(&lock(&self.known).all).cloned().collect()
    }

    /// How to connect to this node.
    pub(crate) fn client_of(&self, address: &Address) -> RedisResult<Client> {
        Client::open(node(&self.client, address)?)
    }

    /// The client's settings, taken from its first node.
    fn example(&self) -> Option<ConnectionInfo> {
        node(&self.client, self.seeds.first()?).ok()
    }

    /// The client's addresses as one text.
    pub(crate) fn described(&self) -> String {
        let mut seeds: Vec<_> = self.seeds.iter().map(ToString::to_string).collect();
        seeds.sort();
        seeds.join(",")
    }

    pub(crate) fn learn(&self, ranges: &[Range]) {
        let mut masters: Vec<_> = ranges.iter().map(|range| range.master.clone()).collect();
        let mut all: Vec<_> = ranges.iter().flat_map(|range| range.replicas.clone()).collect();
        all.extend(masters.iter().cloned());
        for list in [&mut masters, &mut all] {
            list.sort();
            list.dedup();
        }
        *lock(&self.known) = KnownNodes { masters, all };
    }

    /// A node to subscribe at: each call returns the next node. Any node will do: a message published at one node reaches all nodes.
    fn next(&self) -> RedisResult<(Client, String)> {
        let turn = self.turn.fetch_add(1, Ordering::Relaxed);
        let address = {
            let known = lock(&self.known);
            let from = if known.masters.is_empty() { &self.seeds } else { &known.masters };
            from.get(turn % from.len().max(1)).cloned()
        };
        let address = address.ok_or_else(nowhere)?;
        Ok((self.client_of(&address)?, address.to_string()))
    }
}

/// What [`ConnectionRecorder`] records, per thread.
#[derive(Default)]
struct RecordedConnection {
    /// The only node of the pretended cluster; without one, connecting fails.
    node: Option<Address>,
    seen: Vec<ConnectionInfo>,
}

thread_local! {
    static NOTES: RefCell<RecordedConnection> = RefCell::default();
}

/// The nodes that the client was built with.
fn seeds(client: &ClusterClient) -> Vec<ConnectionInfo> {
    ask(client, None)
}

/// How to connect to the node at `address`, with the client's own address map applied.
fn node(client: &ClusterClient, address: &Address) -> RedisResult<ConnectionInfo> {
    // The last connection is to the node that the slots led to, or to the seed with the same address.
    ask(client, Some(address.clone())).pop().ok_or_else(nowhere)
}

fn ask(client: &ClusterClient, node: Option<Address>) -> Vec<ConnectionInfo> {
    NOTES.set(RecordedConnection { node, seen: Vec::new() });
    // The connection itself is not used: `NOTES` has recorded its settings.
    let _ = client.get_generic_connection::<ConnectionRecorder>();
    NOTES.take().seen
}

fn nowhere() -> RedisError {
    RedisError::from((redis::ErrorKind::Client, "the client connects to nothing"))
}

/// Records how the client would connect.
struct ConnectionRecorder;

impl Connect for ConnectionRecorder {
    fn connect<T: IntoConnectionInfo>(info: T, _: Option<Duration>) -> RedisResult<Self> {
        let info = info.into_connection_info()?;
        NOTES.with_borrow_mut(|notes| {
            notes.seen.push(info);
            if notes.node.is_some() { Ok(Self) } else { Err(nowhere()) }
        })
    }

    fn send_packed_command(&mut self, _: &[u8]) -> RedisResult<()> {
        Ok(())
    }

    fn set_write_timeout(&self, _: Option<Duration>) -> RedisResult<()> {
        Ok(())
    }

    fn set_read_timeout(&self, _: Option<Duration>) -> RedisResult<()> {
        Ok(())
    }

    fn recv_response(&mut self) -> RedisResult<Value> {
        Ok(Value::Okay)
    }
}

impl ConnectionLike for ConnectionRecorder {
    fn req_packed_command(&mut self, _: &[u8]) -> RedisResult<Value> {
        Ok(Value::Okay)
    }

    fn req_packed_commands(&mut self, _: &[u8], _: usize, count: usize) -> RedisResult<Vec<Value>> {
        Ok(vec![Value::Okay; count])
    }

    /// Answers CLUSTER SLOTS with the one node, everything else with OK.
    fn req_command(&mut self, cmd: &Cmd) -> RedisResult<Value> {
        let asks_for_slots = cmd.args_iter().any(|arg| matches!(arg, redis::Arg::Simple(b"SLOTS")));
        let node = NOTES.with_borrow(|notes| notes.node.clone()).filter(|_| asks_for_slots);
        Ok(node.map_or(Value::Okay, |Address { host, port }| {
            let node = vec![Value::BulkString(host.as_bytes().to_vec()), Value::Int(port.into())];
            let last = i64::try_from(SLOTS).unwrap_or(i64::MAX) - 1;
            let range = vec![Value::Int(0), Value::Int(last), Value::Array(node)];
            Value::Array(vec![Value::Array(range)])
        }))
    }

    fn get_db(&self) -> i64 {
        0
    }

    fn check_connection(&mut self) -> bool {
        true
    }

    fn is_open(&self) -> bool {
        true
    }
}

/// Leads to any node of the cluster: each connection goes to the next node.
impl Endpoint for ClusterNodes {
    fn locate(&self) -> BoxFuture<'_, RedisResult<Located>> {
        let next = self.next();
        let located = next
            .map(|(client, at)| Located { server: Arc::new(ServerAddress::new(&client)), node: Some(at) });
        ready(located).boxed()
    }

    fn known(&self) -> Option<Arc<ServerAddress>> {
        None
    }

    fn is_node(&self) -> bool {
        true
    }

    fn has_lost(&self, address: &str) -> bool {
        let known = lock(&self.known);
        !known.all.is_empty() && !known.all.iter().any(|node| node.to_string() == address)
    }

    fn username(&self) -> Option<String> {
        Some(self.example()?.redis_settings().username()?.to_owned())
    }

    fn may_want_tls(&self) -> bool {
        self.example().is_some_and(|info| is_by_tls(&info))
    }

    fn advice(&self, error: &RedisError) -> Option<&'static str> {
        self.example().map_or_else(|| on_refusal(error), |info| on_connecting(info.addr(), error))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(port: u16) -> Address {
        Address { host: "h".into(), port }
    }

    fn cluster_nodes(ports: &[u16]) -> ClusterNodes {
        let urls = ports.iter().map(|port| format!("redis://u:pw@h:{port}/"));
        ClusterNodes::new(ClusterClient::new(urls).expect("nodes"))
    }

    /// The nodes that successive inboxes would connect to, sorted.
    fn turns(cluster_nodes: &ClusterNodes, count: usize) -> Vec<String> {
        let mut turns: Vec<_> = (0..count).map(|_| cluster_nodes.next().expect("there are some").1).collect();
        turns.sort();
        turns
    }

    /// Each master has several ranges, and one has no replica.
    fn ranges() -> Vec<Range> {
        let range = |first, master, replicas: &[u16]| {
            let replicas = replicas.iter().map(|port| at(*port)).collect();
            Range { first, last: first, master: at(master), replicas }
        };
        vec![range(0, 3, &[5]), range(1, 4, &[]), range(2, 3, &[5]), range(3, 4, &[])]
    }

    #[test]
    fn inboxes_use_all_masters_and_before_the_first_map_the_clients_own_nodes() {
        let cluster_nodes = cluster_nodes(&[1, 2]);
        assert_eq!(turns(&cluster_nodes, 2), ["h:1", "h:2"]);
        cluster_nodes.learn(&ranges());
        assert_eq!(turns(&cluster_nodes, 4), ["h:3", "h:3", "h:4", "h:4"]);
    }

    #[test]
    fn inboxes_of_a_fleet_do_not_all_go_to_the_same_node() {
        let processes: Vec<_> = (0..64).map(|_| cluster_nodes(&[1, 2])).collect();
        let mut first: Vec<_> =
            processes.iter().map(|cluster_nodes| turns(cluster_nodes, 1).remove(0)).collect();
        first.sort();
        first.dedup();
        assert_eq!(first, ["h:1", "h:2"]);
    }

    #[test]
    fn an_inbox_stays_at_a_node_while_it_is_part_of_the_cluster() {
        let cluster_nodes = cluster_nodes(&[1]);
        assert!(!cluster_nodes.has_lost("h:1") && !cluster_nodes.has_lost("h:9"), "nothing is known");
        cluster_nodes.learn(&ranges());
        for (node, is_lost) in [("h:1", true), ("h:3", false), ("h:4", false), ("h:5", false)] {
            assert_eq!(cluster_nodes.has_lost(node), is_lost, "{node}");
        }
    }

    #[test]
    fn everyone_lists_the_clients_nodes_and_all_known_nodes_with_replicas() {
        let cluster_nodes = cluster_nodes(&[1]);
        assert_eq!(cluster_nodes.all_known_nodes(), [at(1)]);
        cluster_nodes.learn(&ranges());
        assert_eq!(cluster_nodes.all_known_nodes(), [at(1), at(3), at(4), at(5)]);
    }

    #[test]
    fn the_same_nodes_in_another_order_are_the_same_cluster() {
        assert_eq!(cluster_nodes(&[2, 1]).described(), "h:1,h:2");
        assert_eq!(cluster_nodes(&[1, 2]).described(), "h:1,h:2");
        let example = cluster_nodes(&[2, 1]).example().expect("the first");
        assert_eq!(
            (example.addr().to_string().as_str(), example.redis_settings().username()),
            ("h:2", Some("u"))
        );
    }
}

#[cfg(test)]
mod info_tests {
    use std::collections::HashMap;

    use redis::ProtocolVersion;
    use redis::cluster::NodeAddress;

    use super::*;

    fn at(host: &str, port: u16) -> Address {
        Address { host: host.into(), port }
    }

    /// Fails if a new version of redis-rs passes a node's address or credentials to its connections in another way.
    #[test]
    fn the_client_reveals_how_it_would_connect() {
        let nodes = ["redis://u:pw@10.0.0.1:7001/", "redis://u:pw@10.0.0.2:7002/"];
        let moved = HashMap::from([(NodeAddress::new("10.0.0.9", 7009), NodeAddress::new("gate", 9))]);
        let client = ClusterClient::builder(nodes).node_address_map(moved).build().expect("valid");
        let seeds: Vec<_> = seeds(&client).iter().map(|info| info.addr().to_string()).collect();
        assert_eq!(seeds, ["10.0.0.1:7001", "10.0.0.2:7002"]);
        for (address, leads_to) in [
            (at("10.0.0.3", 7003), "10.0.0.3:7003"),
            (at("10.0.0.1", 7001), "10.0.0.1:7001"),
            (at("10.0.0.9", 7009), "gate:9"),
        ] {
            let info = node(&client, &address).expect("it would connect");
            assert_eq!(info.addr().to_string(), leads_to);
            let settings = info.redis_settings();
            assert_eq!((settings.username(), settings.password()), (Some("u"), Some("pw")));
        }
    }

    #[test]
    fn settings_for_all_nodes_are_used() {
        let client = ClusterClient::builder(["redis://h:1/"])
            .username("u")
            .password("pw")
            .use_protocol(ProtocolVersion::RESP3)
            .build()
            .expect("valid");
        let info = node(&client, &at("other", 2)).expect("it would connect");
        assert_eq!(info.redis_settings().username(), Some("u"));
        assert_eq!(info.redis_settings().protocol(), ProtocolVersion::RESP3);
    }
}
