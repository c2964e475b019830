//! Slots: the slot of a key, and the node of a slot as CLUSTER SLOTS and redirections report it.

use std::fmt;
use std::sync::Arc;

use redis::Value;

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
    /// `host:port`, as a server or redis-rs writes it; an empty host means that of `reporter`.
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
    /// The slot is migrating to that node, and this key is there already.
    Ask(Address),
    /// The keys of this command are partly here and partly on the other node.
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

    /// As redis-rs writes the addresses of a client.
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
