//! Small things by name, each with a life and all with a bound: what nobody asks for goes first.

use std::collections::{BTreeMap, HashMap};

use tokio::time::Instant;

use super::sweep::Sweep;

pub(super) struct Shelf<V> {
    by_name: HashMap<Box<str>, Thing<V>>,
    /// Whose turn it is to go where there is no room.
    by_turn: BTreeMap<u64, Box<str>>,
    turns: u64,
    /// With their names.
    bytes: usize,
    looked_through: Sweep,
}

struct Thing<V> {
    value: V,
    bytes: usize,
    until: Instant,
    turn: u64,
    /// Since it has this turn. When that comes it has another instead: to move it each time would cost each reader a
    /// change of the map.
    asked_for: bool,
}

impl<V> Default for Shelf<V> {
    fn default() -> Self {
        let looked_through = Sweep::default();
        Self { by_name: HashMap::new(), by_turn: BTreeMap::new(), turns: 0, bytes: 0, looked_through }
    }
}

impl<V> Shelf<V> {
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.by_name.len()
    }

    pub(super) fn get(&mut self, name: &str) -> Option<&mut V> {
        let thing = self.live(name, Instant::now())?;
        thing.asked_for = true;
        Some(&mut thing.value)
    }

    /// The same, which then lives until this moment at the least.
    pub(super) fn get_until(&mut self, name: &str, until: Instant) -> Option<&mut V> {
        let thing = self.live(name, Instant::now())?;
        (thing.asked_for, thing.until) = (true, thing.until.max(until));
        Some(&mut thing.value)
    }

    fn live(&mut self, name: &str, now: Instant) -> Option<&mut Thing<V>> {
        self.by_name.get_mut(name).filter(|thing| thing.until > now)
    }

    /// Makes room for so many bytes more, of so many in all; false where there is none.
    pub(super) fn make_room(&mut self, bytes: usize, most: usize) -> bool {
        if self.looked_through.is_due(self.by_name.len()) {
            self.forget_expired();
        }
        while self.bytes + bytes > most && self.drop_one() {}
        self.bytes + bytes <= most
    }

    fn forget_expired(&mut self) {
        let now = Instant::now();
        let Self { by_name, by_turn, bytes, looked_through, .. } = self;
        by_name.retain(|_, thing| {
            let stays = thing.until > now;
            if !stays {
                by_turn.remove(&thing.turn);
                *bytes -= thing.bytes;
            }
            stays
        });
        looked_through.done(by_name.len());
    }

    pub(super) fn put(&mut self, name: &str, value: V, bytes: usize, until: Instant) {
        self.remove(name);
        self.turns += 1;
        let turn = self.turns;
        self.bytes += bytes;
        self.by_turn.insert(turn, name.into());
        self.by_name.insert(name.into(), Thing { value, bytes, until, turn, asked_for: false });
    }

    /// So many bytes were added to what is there.
    pub(super) fn grown(&mut self, name: &str, bytes: usize) {
        if let Some(thing) = self.by_name.get_mut(name) {
            thing.bytes += bytes;
            self.bytes += bytes;
        }
    }

    pub(super) fn remove(&mut self, name: &str) {
        if let Some(thing) = self.by_name.remove(name) {
            self.by_turn.remove(&thing.turn);
            self.bytes -= thing.bytes;
        }
    }

    /// Drops what has not been asked for the longest; false where there is nothing.
    pub(super) fn drop_one(&mut self) -> bool {
        let now = Instant::now();
        while let Some((_, name)) = self.by_turn.pop_first() {
            match self.by_name.get_mut(&name) {
                Some(thing) if thing.asked_for && thing.until > now => {
                    self.turns += 1;
                    (thing.asked_for, thing.turn) = (false, self.turns);
                    self.by_turn.insert(thing.turn, name);
                }
                _ => {
                    self.remove(&name);
                    return true;
                }
            }
        }
        false
    }
}
