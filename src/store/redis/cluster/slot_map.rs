//! The slot map: which master serves which slot, and the state of its connection.

use std::collections::HashSet;
use std::sync::Arc;

use crate::health::{Breaker, LinkState};
use crate::store::redis::connection::Supervisor;
use crate::store::redis::errors::reason;
use crate::store::redis::topology::cluster::slots::{Address, Range, SLOTS, slot_of};
use crate::store::{StoreError, StoreErrorKind};

/// Marks a slot without a master.
const NO_MASTER: u16 = u16::MAX;

/// How many names are generated to find one in each master's slots. A master with one of 16,384 slots is missed with a
/// probability of e^-12.
const MOST_TRIES: u32 = 200_000;

pub(super) enum SlotMap {
    /// There was no map yet: callers wait.
    Blank,
    /// Retained until there is a newer map: the masters' supervisors report by themselves if a master cannot be reached.
    Known(Arc<SlotLayout>),
    /// No node has ever answered.
    Unknown(StoreError),
    Closed,
}

pub(super) struct SlotLayout {
    /// The ranges as the nodes reported them; empty after a redirection has corrected the map.
    pub(super) ranges: Vec<Range>,
    /// For each slot the index of its master in `masters`.
    slots: Box<[u16]>,
    /// In order of their first slots.
    pub(super) masters: Vec<MasterNode>,
}

#[derive(Clone)]
pub(crate) struct MasterNode {
    pub(super) address: Address,
    pub(crate) server: Arc<Supervisor>,
    pub(crate) replicas: usize,
}

/// The masters, and how many slots they leave unserved.
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
    /// The layout; `None` if the caller may wait for the first one.
    pub(super) fn layout(&self) -> Result<Option<Arc<SlotLayout>>, StoreError> {
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
    use std::time::Duration;

    use redis::Client;

    use super::*;
    use crate::store::redis::connection::connector::Connector;
    use crate::store::redis::topology::cluster::nodes::ClusterEndpoint;

    fn address(name: &str) -> Address {
        Address::parse(name, None).expect("an address")
    }

    fn server(address: &Address) -> Result<Arc<Supervisor>, redis::RedisError> {
        let client = Client::open(format!("redis://{address}"))?;
        Ok(Supervisor::new(Connector::to(Arc::new(ClusterEndpoint::new(&client)), Duration::from_millis(50))))
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
