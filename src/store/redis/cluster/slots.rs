//! Slots: the slot of a key, the node of a slot as CLUSTER SLOTS and redirections report it, and the slot map: which master
//! serves which slot, and the state of its connection.

use std::collections::HashSet;
use std::fmt;
use std::sync::Arc;

use redis::Value;

use crate::health::{Breaker, LinkState};
use crate::store::redis::connection::Supervisor;
use crate::store::redis::errors::reason;
use crate::store::{StoreError, StoreErrorKind, StoreResult};

/// The number of slots.
pub(crate) const SLOTS: usize = 16_384;

/// The address of a node.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Address {
    pub(crate) host: Arc<str>,
    pub(crate) port: u16,
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.host, self.port)
    }
}

impl Address {
    /// Parses `host:port`, as a server or redis-rs writes it; an empty host means that of `reporter`.
    pub(crate) fn parse(text: &str, reporter: Option<&Self>) -> Option<Self> {
        let (host, port) = text.rsplit_once(':')?;
        Self::of(host.trim_start_matches('[').trim_end_matches(']'), port.parse().ok()?, reporter)
    }

    /// The address of a node as another node reports it: `?` for an unknown host, an empty host for the reporting
    /// node itself.
    fn of(host: &str, port: u16, reporter: Option<&Self>) -> Option<Self> {
        let host = match host {
            "?" => return None,
            "" => Arc::clone(&reporter?.host),
            host => host.into(),
        };
        Some(Self { host, port })
    }
}

/// A range of slots and the nodes that serve it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Range {
    pub(crate) first: u16,
    pub(crate) last: u16,
    pub(crate) master: Address,
    pub(crate) replicas: Vec<Address>,
}

/// Reads the answer of the node at `reporter` to CLUSTER SLOTS, in order of the slots. `None` for an invalid or an empty
/// answer: a node that was reset, or has not joined yet, knows no slots.
pub(crate) fn parse(answer: Value, reporter: &Address) -> Option<Vec<Range>> {
    let Value::Array(ranges) = answer else { return None };
    let mut ranges =
        ranges.into_iter().map(|range| parse_range(range, reporter)).collect::<Option<Vec<_>>>()?;
    ranges.sort();
    Some(ranges).filter(|ranges| !ranges.is_empty())
}

fn parse_range(range: Value, reporter: &Address) -> Option<Range> {
    let Value::Array(parts) = range else { return None };
    let mut parts = parts.into_iter();
    let mut slot = || match parts.next()? {
        Value::Int(slot) => u16::try_from(slot).ok().filter(|slot| usize::from(*slot) < SLOTS),
        _ => None,
    };
    let (first, last) = (slot()?, slot()?);
    let mut nodes = parts.map(|node| parse_node(node, reporter));
    let master = nodes.next()??;
    let mut replicas: Vec<_> = nodes.flatten().collect();
    replicas.sort();
    Some(Range { first, last, master, replicas })
}

fn parse_node(node: Value, reporter: &Address) -> Option<Address> {
    let Value::Array(parts) = node else { return None };
    let port = match parts.get(1)? {
        Value::Int(port) => u16::try_from(*port).ok()?,
        _ => return None,
    };
    let host = match parts.first()? {
        Value::BulkString(host) => std::str::from_utf8(host).ok()?,
        Value::Nil => "",
        _ => return None,
    };
    Address::of(host, port, Some(reporter))
}

/// The most frequent view; among equally frequent views one that differs from `known`, because a node that reports a
/// change is ahead of the others.
pub(crate) fn majority(views: Vec<Vec<Range>>, known: Option<&[Range]>) -> Option<Vec<Range>> {
    let count = |view: &Vec<Range>| views.iter().filter(|other| *other == view).count();
    views.iter().max_by_key(|view| (count(view), known != Some(view.as_slice()))).cloned()
}

/// The slot of a key, by its hash tag if it has one.
pub(crate) fn slot_of(key: &str) -> u16 {
    let bytes = key.as_bytes();
    let tag = bytes.iter().position(|byte| *byte == b'{').and_then(|open| {
        let rest = &bytes[open + 1..];
        rest.iter().position(|byte| *byte == b'}').filter(|close| *close > 0).map(|close| &rest[..close])
    });
    crc16(tag.unwrap_or(bytes)) % (SLOTS as u16)
}

/// CRC16 as Redis computes it (XMODEM).
fn crc16(bytes: &[u8]) -> u16 {
    bytes.iter().fold(0, |crc, byte| (crc << 8) ^ TABLE[usize::from((crc >> 8) as u8 ^ byte)])
}

const TABLE: [u16; 256] = {
    let mut table = [0; 256];
    let mut byte = 0;
    while byte < 256 {
        let mut crc = (byte as u16) << 8;
        let mut bit = 0;
        while bit < 8 {
            crc = if crc & 0x8000 == 0 { crc << 1 } else { (crc << 1) ^ 0x1021 };
            bit += 1;
        }
        table[byte] = crc;
        byte += 1;
    }
    table
};

/// A node's redirection of a command.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Redirect {
    /// The slot belongs to that node now.
    Moved(u16, Address),
    /// The slot is migrating to that node, and the command's key is not on the reporting node any more.
    Ask(Address),
    /// The slot is migrating, and the keys of this command are partly on the reporting node and partly on the other.
    TryAgain,
}

/// Reads an error of the node at `reporter` as a redirection.
pub(crate) fn redirect(code: &str, details: Option<&str>, reporter: &Address) -> Option<Redirect> {
    if code == "TRYAGAIN" {
        return Some(Redirect::TryAgain);
    }
    let (slot, node) = details?.split_once(' ')?;
    let node = Address::parse(node.split(' ').next()?, Some(reporter))?;
    match code {
        "MOVED" => {
            let slot = slot.parse().ok().filter(|slot| usize::from(*slot) < SLOTS)?;
            Some(Redirect::Moved(slot, node))
        }
        "ASK" => Some(Redirect::Ask(node)),
        _ => None,
    }
}

/// Reads a reply as the answer to CLUSTER SLOTS. For the fuzzer.
#[cfg(any(test, fuzzing))]
pub(crate) fn read_slots(reply: Value) {
    let Some(ranges) = parse(reply, &anyone()) else { return };
    assert!(ranges.is_sorted() && ranges.iter().all(|range| usize::from(range.last) < SLOTS));
    assert_eq!(majority(vec![ranges.clone()], None), Some(ranges));
}

/// Reads an error as a redirection. For the fuzzer.
#[cfg(any(test, fuzzing))]
pub(crate) fn read_redirect(code: &str, details: Option<&str>) {
    if let Some(Redirect::Moved(_, to) | Redirect::Ask(to)) = redirect(code, details, &anyone()) {
        assert_eq!(Address::parse(&to.to_string(), None), Some(to));
    }
}

#[cfg(any(test, fuzzing))]
fn anyone() -> Address {
    Address { host: "10.0.0.1".into(), port: 6379 }
}

/// Marks a slot without a master.
const NO_MASTER: u16 = u16::MAX;

/// How many names are generated to find one in each master's slots. A master with one of 16,384 slots is missed with a
/// probability of e^-12.
const MOST_TRIES: u32 = 200_000;

pub(super) enum SlotMap {
    /// There was no map yet: callers wait for the refresh task.
    Blank,
    /// Stays until there is a newer map, even if no node answers: the masters' supervisors report if a master cannot be reached.
    Known(Arc<SlotLayout>),
    /// There was no map yet, and no node has answered: callers fail for this reason.
    Unknown(StoreError),
    Closed,
}

pub(super) struct SlotLayout {
    /// The ranges as the nodes reported them; empty after a redirection has corrected the map.
    pub(super) ranges: Vec<Range>,
    /// For each slot the index of its master in `masters`, or `NO_MASTER`.
    slots: Box<[u16]>,
    /// In order of their first slots; a master that a redirection has named comes last.
    pub(super) masters: Vec<MasterNode>,
}

#[derive(Clone)]
pub(crate) struct MasterNode {
    pub(super) address: Address,
    pub(crate) server: Arc<Supervisor>,
    pub(crate) replicas: usize,
}

/// The masters of a map, and how many slots none of them serves.
pub(crate) struct Coverage {
    pub(crate) masters: Vec<MasterNode>,
    pub(crate) unserved: usize,
}

impl MasterNode {
    pub(crate) fn name(&self) -> String {
        self.address.to_string()
    }
}

impl SlotLayout {
    /// Builds the layout; `server` creates a supervisor or returns the existing one.
    pub(super) fn of<E>(
        ranges: Vec<Range>,
        mut server: impl FnMut(&Address) -> Result<Arc<Supervisor>, E>,
    ) -> Result<Self, E> {
        let mut slots = vec![NO_MASTER; SLOTS].into_boxed_slice();
        let mut masters: Vec<MasterNode> = Vec::new();
        for Range { first, last, master: address, replicas } in &ranges {
            let at = match masters.iter().position(|master| master.address == *address) {
                Some(at) => at,
                None => {
                    let (server, replicas) = (server(address)?, replicas.len());
                    masters.push(MasterNode { address: address.clone(), server, replicas });
                    masters.len() - 1
                }
            };
            let at = u16::try_from(at).unwrap_or(NO_MASTER);
            if let Some(range) = slots.get_mut(usize::from(*first)..=usize::from(*last)) {
                range.fill(at);
            }
        }
        Ok(Self { ranges, slots, masters })
    }

    /// A copy in which `address` serves `slot`.
    pub(super) fn with(&self, slot: u16, address: &Address, server: &Arc<Supervisor>) -> Self {
        let (mut slots, mut masters) = (self.slots.clone(), self.masters.clone());
        let at = masters.iter().position(|master| master.address == *address).unwrap_or_else(|| {
            masters.push(MasterNode { address: address.clone(), server: Arc::clone(server), replicas: 0 });
            masters.len() - 1
        });
        if let Some(entry) = slots.get_mut(usize::from(slot)) {
            *entry = u16::try_from(at).unwrap_or(NO_MASTER);
        }
        Self { ranges: Vec::new(), slots, masters }
    }

    pub(super) fn master(&self, slot: u16) -> Option<&MasterNode> {
        self.masters.get(self.master_index(slot)?)
    }

    /// The index of the slot's master in `masters`.
    pub(super) fn master_index(&self, slot: u16) -> Option<usize> {
        self.slots.get(usize::from(slot)).map(|at| usize::from(*at))
    }

    /// For each master with slots, a name similar to this one in a slot of that master. The first is the name itself.
    pub(super) fn samples(&self, name: &str) -> Vec<(MasterNode, String)> {
        let mut missing: HashSet<u16> = self.slots.iter().copied().filter(|at| *at != NO_MASTER).collect();
        let mut samples = Vec::with_capacity(missing.len());
        let like = (1..MOST_TRIES).map(|n| format!("{name}-{n}"));
        for name in std::iter::once(name.to_owned()).chain(like) {
            if missing.is_empty() {
                break;
            }
            let at = self.slots[usize::from(slot_of(&name))];
            if let (true, Some(master)) = (missing.remove(&at), self.masters.get(usize::from(at))) {
                samples.push((master.clone(), name));
            }
        }
        samples
    }

    /// Whether all slots are served and no master is down, so that a refresh can improve nothing.
    pub(super) fn is_well(&self) -> bool {
        self.slots.iter().all(|at| *at != NO_MASTER)
            && self.masters.iter().all(|master| master.server.down().is_none())
    }

    pub(super) fn coverage(&self) -> Coverage {
        let unserved = self.slots.iter().filter(|at| **at == NO_MASTER).count();
        Coverage { masters: self.masters.clone(), unserved }
    }
}

impl SlotMap {
    /// The layout; `None` if there is none yet and the caller may wait for it.
    pub(super) fn layout(&self) -> StoreResult<Option<Arc<SlotLayout>>> {
        match self {
            Self::Known(layout) => Ok(Some(Arc::clone(layout))),
            Self::Blank => Ok(None),
            Self::Unknown(why) => Err(why.clone()),
            Self::Closed => Err(StoreError::new(StoreErrorKind::Closed)),
        }
    }

    /// The state of all connections together, and the first failure if some are down.
    pub(super) fn link(&self) -> (LinkState, Breaker, Option<String>) {
        let layout = match self {
            Self::Blank => return (LinkState::Idle, Breaker::Closed, None),
            Self::Unknown(why) => return (LinkState::Down, Breaker::Open, Some(reason(why))),
            Self::Closed => return (LinkState::Closed, Breaker::Open, None),
            Self::Known(layout) => layout,
        };
        let mut why = None;
        let mut down = 0;
        let mut best = LinkState::Idle;
        for master in &layout.masters {
            let (link, failure) = master.server.link();
            match link {
                LinkState::Up => best = LinkState::Up,
                LinkState::Connecting if best == LinkState::Idle => best = LinkState::Connecting,
                LinkState::Down => {
                    down += 1;
                    let said = failure.map_or_else(String::new, |failure| reason(&failure));
                    why.get_or_insert_with(|| format!("{}: {said}", master.address));
                }
                _ => {}
            }
        }
        match down {
            0 => (best, Breaker::Closed, None),
            _ if down == layout.masters.len() => (LinkState::Down, Breaker::Open, why),
            _ => (best, Breaker::Partly, why),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(host: &str, port: u16) -> Address {
        Address { host: host.into(), port }
    }

    #[test]
    fn slots_are_those_of_the_server() {
        // The values of CLUSTER KEYSLOT.
        for (key, slot) in
            [("foo", 12_182), ("bar", 5_061), ("123456789", 12_739), ("sg1:e:{foo}", 12_182), ("", 0)]
        {
            assert_eq!(slot_of(key), slot, "{key}");
        }
        assert_eq!(slot_of("a{foo}b{bar}"), 12_182);
        assert_eq!(slot_of("{}bar"), crc16(b"{}bar") % 16_384, "an empty tag is none");
    }

    #[test]
    fn a_missing_host_is_that_of_the_answering_node() {
        let node = |host: Value, port| Value::Array(vec![host, Value::Int(port)]);
        let text = |text: &str| Value::BulkString(text.as_bytes().to_vec());
        let range = |first, last, nodes: Vec<Value>| {
            Value::Array([vec![Value::Int(first), Value::Int(last)], nodes].concat())
        };
        let answer = Value::Array(vec![
            range(100, 16_383, vec![node(Value::Nil, 3), node(text("h"), 4), node(text("?"), 5)]),
            range(0, 99, vec![node(text("10.0.0.1"), 1)]),
        ]);
        let ranges = parse(answer, &at("own", 9)).expect("readable");
        assert_eq!(ranges[0], Range { first: 0, last: 99, master: at("10.0.0.1", 1), replicas: vec![] });
        assert_eq!((&ranges[1].master, &ranges[1].replicas[..]), (&at("own", 3), &[at("h", 4)][..]));
        let unserved = Value::Array(vec![range(0, 1, vec![node(text("?"), 5)])]);
        assert_eq!(parse(unserved, &at("own", 9)), None);
        let beyond = Value::Array(vec![range(0, 16_384, vec![node(text("h"), 1)])]);
        assert_eq!(parse(beyond, &at("own", 9)), None);
        // Two nodes that list replicas in different orders agree.
        let replicas = [4, 3, 2].map(|port| node(text("h"), port)).to_vec();
        let ranges = parse(Value::Array(vec![range(0, 1, replicas)]), &at("own", 9)).expect("readable");
        assert_eq!(ranges[0].replicas, [at("h", 2), at("h", 3)]);
    }

    /// redis-rs writes the addresses of a client in these forms.
    #[test]
    fn addresses_are_read_with_brackets_and_without() {
        for (text, host) in [("[::1]:7", "::1"), ("::1:7", "::1"), ("h:7", "h")] {
            assert_eq!(Address::parse(text, None), Some(at(host, 7)), "{text}");
        }
    }

    #[test]
    fn redirections_name_a_node() {
        let reporter = at("own", 1);
        let read = |code, details| redirect(code, details, &reporter);
        assert_eq!(read("MOVED", Some("5 h:2")), Some(Redirect::Moved(5, at("h", 2))));
        assert_eq!(read("MOVED", Some("5 :2")), Some(Redirect::Moved(5, at("own", 2))));
        assert_eq!(read("MOVED", Some("16383 h:2 and more")), Some(Redirect::Moved(16_383, at("h", 2))));
        assert_eq!(read("ASK", Some("5 ::1:2")), Some(Redirect::Ask(at("::1", 2))));
        assert_eq!(read("TRYAGAIN", Some("Multiple keys request")), Some(Redirect::TryAgain));
        for (code, details) in
            [("MOVED", "5 ?:2"), ("MOVED", "x h:2"), ("MOVED", "16384 h:2"), ("ASK", "5"), ("OOM", "5 h:2")]
        {
            assert_eq!(read(code, Some(details)), None, "{code} {details}");
        }
        assert_eq!(read("MOVED", None), None);
    }

    #[test]
    fn the_majority_wins_and_a_tie_goes_to_a_changed_view() {
        let view = |port| vec![Range { first: 0, last: 9, master: at("h", port), replicas: vec![] }];
        let of = |ports: &[u16], known| {
            let views = ports.iter().map(|port| view(*port)).collect();
            let known = view(known);
            majority(views, Some(&known)).map(|view| view[0].master.port)
        };
        assert_eq!(of(&[1, 1, 2], 2), Some(1));
        assert_eq!(of(&[1, 2, 1], 1), Some(1));
        assert_eq!(of(&[1, 1, 2], 1), Some(1));
        assert_eq!(of(&[1, 2], 1), Some(2));
        assert_eq!(of(&[2, 1], 1), Some(2));
        assert_eq!(of(&[], 1), None);
        assert_eq!(majority(vec![view(3)], None).map(|view| view[0].master.port), Some(3));
    }

    #[test]
    fn a_node_without_slots_has_no_vote() {
        let node = Value::Array(vec![Value::BulkString(b"h".to_vec()), Value::Int(1)]);
        let full = Value::Array(vec![Value::Array(vec![Value::Int(0), Value::Int(9), node])]);
        let blank = || Value::Array(vec![]);
        let views = [full, blank(), blank()].into_iter().filter_map(|answer| parse(answer, &at("own", 9)));
        assert_eq!(majority(views.collect(), None).map(|view| view[0].master.port), Some(1));
    }
}

#[cfg(test)]
mod slot_map_tests {
    use std::time::Duration;

    use redis::Client;

    use super::*;
    use crate::store::redis::connection::connector::Connector;
    use crate::store::redis::endpoint::SingleEndpoint;

    fn address(name: &str) -> Address {
        Address::parse(name, None).expect("an address")
    }

    fn server(address: &Address) -> Result<Arc<Supervisor>, redis::RedisError> {
        let client = Client::open(format!("redis://{address}"))?;
        Ok(Supervisor::new(Connector::to(
            Arc::new(SingleEndpoint::new(&client, true)),
            Duration::from_millis(50),
        )))
    }

    #[tokio::test]
    async fn a_master_with_several_ranges_appears_once() {
        let range = |first, last, name: &str, replicas: &[&str]| {
            let replicas = replicas.iter().map(|name| address(name)).collect();
            Range { first, last, master: address(name), replicas }
        };
        let ranges =
            vec![range(0, 9, "a:1", &["c:1", "d:1"]), range(10, 19, "b:1", &[]), range(20, 29, "a:1", &[])];
        let layout = SlotLayout::of(ranges, server).expect("two masters");
        let Coverage { masters, unserved } = layout.coverage();
        let masters: Vec<_> = masters.iter().map(|master| (master.name(), master.replicas)).collect();
        assert_eq!(masters, [("a:1".to_owned(), 2), ("b:1".to_owned(), 0)]);
        assert_eq!(unserved, SLOTS - 30);
        assert!(!layout.is_well(), "none of them is down, and the other slots are unserved");
    }

    /// One master has a single slot, and one has lost its only slot.
    #[tokio::test]
    async fn samples_has_a_name_for_each_master_with_slots() {
        let range =
            |first, last, name: &str| Range { first, last, master: address(name), replicas: Vec::new() };
        let ranges = vec![range(0, 9_000, "a:1"), range(9_002, 16_383, "b:1"), range(9_001, 9_001, "c:1")];
        let layout = SlotLayout::of(ranges, server).expect("three masters");
        let (emptied, new) = (address("c:1"), address("d:1"));
        let layout = layout.with(9_001, &new, &server(&new).expect("an address"));
        let samples = layout.samples("ns:~x");
        assert_eq!(samples[0].1, "ns:~x", "the first is as it is");
        let mut masters: Vec<_> = samples.iter().map(|(master, _)| master.name()).collect();
        masters.sort();
        assert_eq!(masters, ["a:1", "b:1", "d:1"], "{emptied} has no slots");
        for (master, name) in samples {
            let owner = layout.master(slot_of(&name)).expect("it is served");
            assert_eq!(owner.name(), master.name(), "{name}");
        }
    }
}
