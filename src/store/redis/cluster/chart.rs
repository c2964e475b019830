//! The chart: which master has which slot, and how it stands with each.

use std::sync::Arc;

use super::slots::{Address, Range, SLOTS};
use crate::health::{Breaker, LinkState};
use crate::store::redis::connection::Supervisor;
use crate::store::redis::refusal::reason;
use crate::store::{StoreError, StoreErrorKind};

/// A slot that nobody has.
const NOBODY: u16 = u16::MAX;

pub(super) enum Chart {
    /// Never drawn: callers wait.
    Blank,
    /// Once drawn it stays, until a better one is: its masters know by themselves that they can not be reached.
    Drawn(Arc<Layout>),
    /// No node has ever told.
    Unknown(StoreError),
    Closed,
}

pub(super) struct Layout {
    /// As the nodes have told it; empty once it was corrected.
    pub(super) ranges: Vec<Range>,
    /// Of each slot the place of its master in `masters`.
    slots: Box<[u16]>,
    /// In order of their first slots.
    pub(super) masters: Vec<Master>,
}

#[derive(Clone)]
pub(in crate::store::redis) struct Master {
    pub(super) address: Address,
    pub(in crate::store::redis) server: Arc<Supervisor>,
    pub(in crate::store::redis) replicas: usize,
}

/// How far the masters cover the slots.
pub(in crate::store::redis) struct Coverage {
    pub(in crate::store::redis) masters: Vec<Master>,
    pub(in crate::store::redis) unserved: usize,
}

impl Master {
    pub(in crate::store::redis) fn name(&self) -> String {
        self.address.to_string()
    }
}

impl Layout {
    /// `server` makes a supervisor, or finds the one that there is.
    pub(super) fn of<E>(
        ranges: Vec<Range>,
        mut server: impl FnMut(&Address) -> Result<Arc<Supervisor>, E>,
    ) -> Result<Self, E> {
        let mut slots = vec![NOBODY; SLOTS].into_boxed_slice();
        let mut masters: Vec<Master> = Vec::new();
        for Range { first, last, master: address, replicas } in &ranges {
            let at = match masters.iter().position(|master| master.address == *address) {
                Some(at) => at,
                None => {
                    let (server, replicas) = (server(address)?, replicas.len());
                    masters.push(Master { address: address.clone(), server, replicas });
                    masters.len() - 1
                }
            };
            let at = u16::try_from(at).unwrap_or(NOBODY);
            if let Some(range) = slots.get_mut(usize::from(*first)..=usize::from(*last)) {
                range.fill(at);
            }
        }
        Ok(Self { ranges, slots, masters })
    }

    /// The same but for one slot, which is that node's.
    pub(super) fn with(&self, slot: u16, address: &Address, server: &Arc<Supervisor>) -> Self {
        let (mut slots, mut masters) = (self.slots.clone(), self.masters.clone());
        let at = masters.iter().position(|master| master.address == *address).unwrap_or_else(|| {
            masters.push(Master { address: address.clone(), server: Arc::clone(server), replicas: 0 });
            masters.len() - 1
        });
        if let Some(entry) = slots.get_mut(usize::from(slot)) {
            *entry = u16::try_from(at).unwrap_or(NOBODY);
        }
        Self { ranges: Vec::new(), slots, masters }
    }

    pub(super) fn master(&self, slot: u16) -> Option<&Master> {
        self.masters.get(usize::from(*self.slots.get(usize::from(slot))?))
    }

    /// Whether there is nothing to hope for from a look at who has what.
    pub(super) fn is_well(&self) -> bool {
        self.slots.iter().all(|at| *at != NOBODY)
            && self.masters.iter().all(|master| master.server.down().is_none())
    }

    pub(super) fn coverage(&self) -> Coverage {
        let unserved = self.slots.iter().filter(|at| **at == NOBODY).count();
        Coverage { masters: self.masters.clone(), unserved }
    }
}

impl Chart {
    /// The layout, or `None` where one may be waited for.
    pub(super) fn layout(&self) -> Result<Option<Arc<Layout>>, StoreError> {
        match self {
            Self::Drawn(layout) => Ok(Some(Arc::clone(layout))),
            Self::Blank => Ok(None),
            Self::Unknown(why) => Err(why.clone()),
            Self::Closed => Err(StoreError::new(StoreErrorKind::Closed)),
        }
    }

    /// How all connections stand as one, and what is wrong with the first that has something wrong.
    pub(super) fn link(&self) -> (LinkState, Breaker, Option<String>) {
        let layout = match self {
            Self::Blank => return (LinkState::Idle, Breaker::Closed, None),
            Self::Unknown(why) => return (LinkState::Down, Breaker::Open, Some(reason(why))),
            Self::Closed => return (LinkState::Closed, Breaker::Open, None),
            Self::Drawn(layout) => layout,
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
