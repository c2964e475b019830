//! Addresses of a cluster's nodes, for callers that need any node: the surveyor at its start, and the inbox.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use redis::cluster::ClusterClient;
use redis::{Client, ConnectionInfo, RedisResult};

use super::info;
use super::slots::{Address, Range};
use crate::sync::lock;

pub(crate) struct ClusterNodes {
    client: ClusterClient,
    /// The addresses the client was made with.
    seeds: Vec<Address>,
    /// Masters and replicas of the latest map.
    known: Mutex<KnownNode>,
    /// The index of the next node to try.
    turn: AtomicUsize,
}

#[derive(Default)]
struct KnownNode {
    masters: Vec<Address>,
    all: Vec<Address>,
}

impl ClusterNodes {
    pub(crate) fn new(client: ClusterClient) -> Self {
        let seeds = info::seeds(&client);
        let seeds = seeds.iter().filter_map(|info| Address::parse(&info.addr().to_string(), None)).collect();
        // Starts at a random place: the inboxes of a fleet should spread over all nodes.
        Self { client, seeds, known: Mutex::default(), turn: AtomicUsize::new(fastrand::usize(..1 << 16)) }
    }

    /// All nodes that may know the slots: the client's own addresses, and masters and replicas of the latest map. The
    /// replicas may be all that is left, and have taken over.
    pub(crate) fn everyone(&self) -> Vec<Address> {
        self.seeds.iter().chain(&lock(&self.known).all).cloned().collect()
    }

    /// How to connect to this node.
    pub(crate) fn client_of(&self, address: &Address) -> RedisResult<Client> {
        Client::open(info::node(&self.client, address)?)
    }

    /// The client's settings, taken from its first node.
    pub(crate) fn example(&self) -> Option<ConnectionInfo> {
        info::node(&self.client, self.seeds.first()?).ok()
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
        *lock(&self.known) = KnownNode { masters, all };
    }

    /// A node to subscribe at, another one at each call: a message published at any node reaches all of them.
    pub(crate) fn next(&self) -> RedisResult<(Client, String)> {
        let turn = self.turn.fetch_add(1, Ordering::Relaxed);
        let address = {
            let known = lock(&self.known);
            let from = if known.masters.is_empty() { &self.seeds } else { &known.masters };
            from.get(turn % from.len().max(1)).cloned()
        };
        let address = address.ok_or_else(info::nowhere)?;
        Ok((self.client_of(&address)?, address.to_string()))
    }

    /// Whether this node is no part of the cluster any more. Messages would not reach it.
    pub(crate) fn has_lost(&self, address: &str) -> bool {
        let known = lock(&self.known);
        !known.all.is_empty() && !known.all.iter().any(|node| node.to_string() == address)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(port: u16) -> Address {
        Address { host: "h".into(), port }
    }

    fn atlas(ports: &[u16]) -> ClusterNodes {
        let urls = ports.iter().map(|port| format!("redis://u:pw@h:{port}/"));
        ClusterNodes::new(ClusterClient::new(urls).expect("nodes"))
    }

    /// The nodes that inboxes would go to, one after the other.
    fn turns(atlas: &ClusterNodes, count: usize) -> Vec<String> {
        let mut turns: Vec<_> = (0..count).map(|_| atlas.next().expect("there are some").1).collect();
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
        let atlas = atlas(&[1, 2]);
        assert_eq!(turns(&atlas, 2), ["h:1", "h:2"]);
        atlas.learn(&ranges());
        assert_eq!(turns(&atlas, 4), ["h:3", "h:3", "h:4", "h:4"]);
    }

    #[test]
    fn inboxes_of_a_fleet_do_not_all_go_to_the_same_node() {
        let atlases: Vec<_> = (0..64).map(|_| atlas(&[1, 2])).collect();
        let mut first: Vec<_> = atlases.iter().map(|atlas| turns(atlas, 1).remove(0)).collect();
        first.sort();
        first.dedup();
        assert_eq!(first, ["h:1", "h:2"]);
    }

    #[test]
    fn an_inbox_stays_at_a_node_while_it_is_part_of_the_cluster() {
        let atlas = atlas(&[1]);
        assert!(!atlas.has_lost("h:1") && !atlas.has_lost("h:9"), "nothing is known");
        atlas.learn(&ranges());
        for (node, is_lost) in [("h:1", true), ("h:3", false), ("h:4", false), ("h:5", false)] {
            assert_eq!(atlas.has_lost(node), is_lost, "{node}");
        }
    }

    #[test]
    fn everyone_lists_the_clients_nodes_and_all_known_nodes_with_replicas() {
        let atlas = atlas(&[1]);
        assert_eq!(atlas.everyone(), [at(1)]);
        atlas.learn(&ranges());
        assert_eq!(atlas.everyone(), [at(1), at(3), at(4), at(5)]);
    }

    #[test]
    fn the_same_nodes_in_another_order_are_the_same_cluster() {
        assert_eq!(atlas(&[2, 1]).described(), "h:1,h:2");
        assert_eq!(atlas(&[1, 2]).described(), "h:1,h:2");
        let example = atlas(&[2, 1]).example().expect("the first");
        assert_eq!(
            (example.addr().to_string().as_str(), example.redis_settings().username()),
            ("h:2", Some("u"))
        );
    }
}
