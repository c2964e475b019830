//! Where nodes are, for who needs any of them and not a certain one: the surveyor at the start, and the inbox.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use redis::cluster::ClusterClient;
use redis::{Client, ConnectionInfo, RedisResult};

use super::locate;
use super::slots::{Address, Range};
use crate::sync::lock;

pub(in crate::store::redis) struct Atlas {
    client: ClusterClient,
    /// What the client was made with.
    seeds: Vec<Address>,
    /// Masters and replicas of the latest chart.
    known: Mutex<Known>,
    /// Whose turn it is to be tried.
    turn: AtomicUsize,
}

#[derive(Default)]
struct Known {
    masters: Vec<Address>,
    all: Vec<Address>,
}

impl Atlas {
    pub(super) fn new(client: ClusterClient) -> Self {
        let seeds = locate::seeds(&client);
        let seeds = seeds.iter().filter_map(|info| Address::parse(&info.addr().to_string(), None)).collect();
        // Not from the start of the list: the inboxes of a fleet belong on all nodes.
        Self { client, seeds, known: Mutex::default(), turn: AtomicUsize::new(fastrand::usize(..1 << 16)) }
    }

    /// Everyone who may know: what the client was made with, and of the latest chart the replicas too. They may be all that
    /// is left, and have taken over.
    pub(super) fn everyone(&self) -> Vec<Address> {
        self.seeds.iter().chain(&lock(&self.known).all).cloned().collect()
    }

    /// How to connect to this node.
    pub(super) fn client_of(&self, address: &Address) -> RedisResult<Client> {
        Client::open(locate::node(&self.client, address)?)
    }

    /// How the client is set up, by the example of the first node that it was given.
    pub(in crate::store::redis) fn example(&self) -> Option<ConnectionInfo> {
        locate::node(&self.client, self.seeds.first()?).ok()
    }

    /// What the client was made with, as one text.
    pub(in crate::store::redis) fn described(&self) -> String {
        let mut seeds: Vec<_> = self.seeds.iter().map(ToString::to_string).collect();
        seeds.sort();
        seeds.join(",")
    }

    pub(super) fn learn(&self, ranges: &[Range]) {
        let mut masters: Vec<_> = ranges.iter().map(|range| range.master.clone()).collect();
        let mut all: Vec<_> = ranges.iter().flat_map(|range| range.replicas.clone()).collect();
        all.extend(masters.iter().cloned());
        for list in [&mut masters, &mut all] {
            list.sort();
            list.dedup();
        }
        *lock(&self.known) = Known { masters, all };
    }

    /// A node to subscribe at: what is published anywhere is heard on all of them. The next one at each call.
    pub(in crate::store::redis) fn next(&self) -> RedisResult<(Client, String)> {
        let turn = self.turn.fetch_add(1, Ordering::Relaxed);
        let address = {
            let known = lock(&self.known);
            let from = if known.masters.is_empty() { &self.seeds } else { &known.masters };
            from.get(turn % from.len().max(1)).cloned()
        };
        let address = address.ok_or_else(locate::nowhere)?;
        Ok((self.client_of(&address)?, address.to_string()))
    }

    /// Whether this node is not, or no more, part of the cluster. Messages would not come to it.
    pub(in crate::store::redis) fn has_lost(&self, address: &str) -> bool {
        let known = lock(&self.known);
        !known.all.is_empty() && !known.all.iter().any(|node| node.to_string() == address)
    }
}
