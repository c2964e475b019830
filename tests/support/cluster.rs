//! A Redis Cluster of three masters with a replica each, on free ports. A failover takes two to three seconds.

use std::collections::HashMap;
use std::thread;
use std::time::{Duration, Instant};

use redis::Value;

use super::PATIENCE;
use super::redis_server::{MINIMAL_ACL, RedisServer};
use super::scratch::Scratch;
use super::tls_files::TlsFiles;

/// The documented rights that the smallest user needs on a cluster in addition to [`MINIMAL_ACL`].
pub(crate) const CLUSTER_RIGHTS: [&str; 2] = ["+cluster|slots", "+asking"];

pub(crate) const SLOTS: u16 = 16_384;

/// A Redis Cluster; dropping it ends its servers.
#[derive(Debug)]
pub(crate) struct Cluster {
    /// Masters first, then the replica of each, in the same order.
    nodes: Vec<RedisServer>,
    _files: Scratch,
    _tls: Option<TlsFiles>,
}

impl Cluster {
    /// A master that is silent for two seconds is replaced; a busy machine stalls for less.
    pub(crate) fn start() -> Self {
        Self::with(2_000, 1, None)
    }

    /// Like [`start`](Self::start), but a master is replaced only by an explicit `CLUSTER FAILOVER`.
    pub(crate) fn calm() -> Self {
        Self::with(60_000, 1, None)
    }

    /// Like [`start`](Self::start), with TLS: nodes speak TLS to each other, and redirect TLS clients to TLS ports. The harness
    /// itself uses the plain ports.
    pub(crate) fn with_tls(files: TlsFiles) -> Self {
        Self::with(2_000, 1, Some(files))
    }

    /// Starts three masters without replicas: a silent master is never replaced.
    pub(crate) fn patient() -> Self {
        Self::with(60_000, 0, None)
    }

    pub(crate) fn patient_with_tls(files: TlsFiles) -> Self {
        Self::with(60_000, 0, Some(files))
    }

    fn with(timeout_ms: u32, replicas: usize, tls: Option<TlsFiles>) -> Self {
        let files = Scratch::new();
        let nodes: Vec<_> = (0..3 + 3 * replicas).map(|_| node(&files, timeout_ms, tls.as_ref())).collect();
        let cluster = Self { nodes, _files: files, _tls: tls };
        for (index, node) in cluster.nodes.iter().enumerate() {
            if index < 3 {
                let (first, last) = share(index);
                let slots: Vec<String> = (first..=last).map(|slot| slot.to_string()).collect();
                let command = ["CLUSTER", "ADDSLOTS"].into_iter().chain(slots.iter().map(String::as_str));
                node.run::<()>(&command.collect::<Vec<_>>());
            }
            node.run::<()>(&["CLUSTER", "SET-CONFIG-EPOCH", &(index + 1).to_string()]);
            for other in &cluster.nodes[..index] {
                node.run::<()>(&["CLUSTER", "MEET", "127.0.0.1", &other.peer_port().to_string()]);
            }
        }
        let known = format!("cluster_known_nodes:{}\r", cluster.nodes.len());
        wait("they have met", || cluster.info().all(|info| info.contains(&known)));
        for replica in 3..cluster.nodes.len() {
            let master = cluster.id(replica - 3);
            wait("it knows its master", || {
                cluster.nodes[replica].run::<String>(&["CLUSTER", "NODES"]).contains(&master)
            });
            cluster.nodes[replica].run::<()>(&["CLUSTER", "REPLICATE", &master]);
        }
        cluster.await_agreement();
        for replica in &cluster.nodes[3..] {
            wait("it follows", || {
                replica.run::<String>(&["INFO", "replication"]).contains("master_link_status:up")
            });
        }
        cluster
    }

    /// Waits until each running node reports a healthy cluster, and all report the same slots.
    pub(crate) fn await_agreement(&self) {
        wait("they are well", || self.info().all(|info| info.contains("cluster_state:ok")));
        wait("they agree", || {
            let mut views = self.live().map(|node| {
                let slots: Vec<Value> = node.run(&["CLUSTER", "SLOTS"]);
                let mut slots: Vec<_> = slots.iter().map(|range| format!("{range:?}")).collect();
                slots.sort();
                slots
            });
            let first = views.next();
            views.all(|view| Some(view) == first)
        });
    }

    fn info(&self) -> impl Iterator<Item = String> + '_ {
        self.live().map(|node| node.run::<String>(&["CLUSTER", "INFO"]))
    }

    fn live(&self) -> impl Iterator<Item = &RedisServer> {
        self.nodes.iter().filter(|node| node.is_running())
    }

    /// Starts a node that belongs to no cluster, as after a reset: it knows of no slots.
    pub(crate) fn blank(&self) -> RedisServer {
        node(&self._files, 60_000, None)
    }

    pub(crate) fn node(&self, index: usize) -> &RedisServer {
        &self.nodes[index]
    }

    pub(crate) fn nodes(&self) -> &[RedisServer] {
        &self.nodes
    }

    /// The URL of the three masters, for `unconnected`, which logs in as the smallest user.
    pub(crate) fn url(&self) -> String {
        let ports: Vec<_> = self.nodes[..3].iter().map(|node| node.port().to_string()).collect();
        format!("cluster://{}", ports.join(","))
    }

    pub(crate) fn id(&self, node: usize) -> String {
        self.nodes[node].run(&["CLUSTER", "MYID"])
    }

    pub(crate) fn slot_of(&self, key: &str) -> u16 {
        // Asks the last node: tests kill and pause masters from the first on.
        let node = self.live().last().expect("a node runs");
        node.run(&["CLUSTER", "KEYSLOT", &format!("sg1:e:{{default:{key}}}")])
    }

    /// Which of the three masters has the slot of the guard's entry for `key`, as long as no slot was moved.
    pub(crate) fn master_of(&self, key: &str) -> usize {
        master_of(self.slot_of(key))
    }

    /// A key that begins with `name`, in a slot of this master.
    pub(crate) fn key_on(&self, master: usize, name: &str) -> String {
        let keys = (0..).map(|n| format!("{name}-{n}"));
        keys.into_iter().find(|key| self.master_of(key) == master).expect("one in three")
    }

    /// Begins to migrate a slot: `from` redirects requests for absent keys to `to` by ASK.
    pub(crate) fn begin_move(&self, slot: u16, from: usize, to: usize) {
        let slot = slot.to_string();
        self.nodes[to].run::<()>(&["CLUSTER", "SETSLOT", &slot, "IMPORTING", &self.id(from)]);
        self.nodes[from].run::<()>(&["CLUSTER", "SETSLOT", &slot, "MIGRATING", &self.id(to)]);
    }

    /// Moves the keys of the slot.
    pub(crate) fn move_keys(&self, slot: u16, from: usize, to: usize) {
        let port = self.nodes[to].peer_port().to_string();
        loop {
            let keys: Vec<String> =
                self.nodes[from].run(&["CLUSTER", "GETKEYSINSLOT", &slot.to_string(), "100"]);
            if keys.is_empty() {
                return;
            }
            let mut command = vec!["MIGRATE", "127.0.0.1", &port, "", "0", "5000", "KEYS"];
            command.extend(keys.iter().map(String::as_str));
            // A key may have expired meanwhile.
            self.nodes[from].run::<String>(&command);
        }
    }

    /// Ends the migration: the slot belongs to `to`.
    pub(crate) fn end_move(&self, slot: u16, from: usize, to: usize) {
        let (slot, id) = (slot.to_string(), self.id(to));
        self.nodes[to].run::<()>(&["CLUSTER", "SETSLOT", &slot, "NODE", &id]);
        self.nodes[from].run::<()>(&["CLUSTER", "SETSLOT", &slot, "NODE", &id]);
    }

    /// Migrates a slot as `redis-cli --cluster reshard` does, and waits until all nodes agree. Without that wait: a master that
    /// receives a slot takes a config epoch above those that it knows. If the former master of the slot has just received a
    /// slot itself, and this master does not know that yet, the two epochs conflict, and the slot may stay without an owner.
    pub(crate) fn move_slot(&self, slot: u16, from: usize, to: usize) {
        self.begin_move(slot, from, to);
        self.move_keys(slot, from, to);
        self.end_move(slot, from, to);
        self.await_agreement();
    }

    /// Waits until the replica of a master has taken over.
    pub(crate) fn await_promotion(&self, of: usize) {
        let replica = &self.nodes[of + 3];
        wait("the replica takes over", || {
            let role: Vec<Value> = replica.run(&["ROLE"]);
            role.first() == Some(&Value::BulkString(b"master".to_vec()))
        });
    }

    /// The number of connections with subscriptions, by node.
    pub(crate) fn inboxes(&self) -> HashMap<usize, usize> {
        let nodes = self.nodes.iter().enumerate().filter(|(_, node)| node.is_running());
        let counts = nodes.map(|(index, node)| (index, node.pubsub_clients()));
        counts.filter(|(_, count)| *count > 0).collect()
    }

    /// All keys of all masters, sorted.
    pub(crate) fn keys(&self) -> Vec<String> {
        let mut keys: Vec<String> = self.nodes[..3].iter().flat_map(RedisServer::keys).collect();
        keys.sort();
        keys
    }
}

/// Which of the three masters has this slot, as long as it was not moved.
pub(crate) fn master_of(slot: u16) -> usize {
    usize::from(slot / (SLOTS / 3)).min(2)
}

/// The first and the last slot of this master, which is one of the three.
fn share(master: usize) -> (u16, u16) {
    let third = SLOTS / 3;
    let first = third * master as u16;
    (first, if master == 2 { SLOTS - 1 } else { first + third - 1 })
}

fn node(files: &Scratch, timeout_ms: u32, tls: Option<&TlsFiles>) -> RedisServer {
    RedisServer::with_args_of(|| {
        let mut args: Vec<String> = ["--cluster-enabled", "yes", "--repl-diskless-sync-delay", "0"]
            .into_iter()
            .chain(["--repl-ping-replica-period", "1", "--user", "spread"])
            .chain(MINIMAL_ACL.split_whitespace())
            .chain(CLUSTER_RIGHTS)
            .map(str::to_owned)
            .collect();
        let config = files.text(&format!("{:016x}.conf", fastrand::u64(..)));
        args.extend(["--cluster-config-file".to_owned(), config]);
        args.extend(["--cluster-node-timeout".to_owned(), timeout_ms.to_string()]);
        if let Some(tls) = tls {
            args.extend(tls.arguments());
            args.extend(["--tls-cluster", "yes"].map(str::to_owned));
        }
        args
    })
}

#[track_caller]
fn wait(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !condition() {
        assert!(Instant::now() < deadline, "not in time: {what}");
        thread::sleep(Duration::from_millis(20));
    }
}
