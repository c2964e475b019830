//! A map of small values, each with a lifetime, bounded in bytes: the least recently used go first.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use tokio::time::Instant;

use super::sweep::Sweep;

/// The maps' overhead per value, beside its bytes and its two copies of the name, as in `records`.
pub(super) const AROUND: usize = 320;

pub(super) struct ExpiringMap<V> {
    by_name: HashMap<Box<str>, ExpiringValue<V>>,
    /// In which order values are dropped when there is no room.
    by_turn: BTreeMap<u64, Box<str>>,
    turns: u64,
    /// Including the names.
    bytes: usize,
    looked_through: Sweep,
}

struct ExpiringValue<V> {
    value: V,
    bytes: usize,
    until: Instant,
    turn: u64,
    /// Whether it was used since it got this turn. If so, it gets a new turn instead of being dropped; moving it at
    /// each use would make every reader pay for a change of the map.
    asked_for: bool,
}

impl<V> Default for ExpiringMap<V> {
    fn default() -> Self {
        let looked_through = Sweep::default();
        Self { by_name: HashMap::new(), by_turn: BTreeMap::new(), turns: 0, bytes: 0, looked_through }
    }
}

impl<V> ExpiringMap<V> {
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

    /// As [`get`](Self::get), and the value then lives at least until this moment.
    pub(super) fn get_until(&mut self, name: &str, until: Instant) -> Option<&mut V> {
        let thing = self.live(name, Instant::now())?;
        (thing.asked_for, thing.until) = (true, thing.until.max(until));
        Some(&mut thing.value)
    }

    fn live(&mut self, name: &str, now: Instant) -> Option<&mut ExpiringValue<V>> {
        self.by_name.get_mut(name).filter(|thing| thing.until > now)
    }

    /// Makes room for `bytes` more within `most`; false if there is not enough.
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
        self.by_name.insert(name.into(), ExpiringValue { value, bytes, until, turn, asked_for: false });
    }

    /// Counts bytes that were added to a value.
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

    /// Drops the least recently used value; false if there is none.
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

/// The moment after `duration`, or one that stands for never.
pub(super) fn later(now: Instant, duration: Duration) -> Instant {
    const NEVER: Duration = Duration::from_secs(1 << 40);
    now + duration.min(NEVER)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn in_a_second() -> Instant {
        Instant::now() + SECOND
    }

    #[tokio::test(start_paused = true)]
    async fn the_sum_of_bytes_follows_every_change() {
        let mut shelf = ExpiringMap::default();
        shelf.put("a", 1, 10, in_a_second());
        shelf.put("b", 2, 20, in_a_second() + SECOND);
        shelf.grown("a", 5);
        shelf.grown("nothing", 5);
        assert_eq!(shelf.bytes(), 35);
        shelf.put("a", 3, 7, in_a_second());
        assert_eq!(shelf.bytes(), 27);
        assert!(shelf.drop_one());
        assert_eq!(shelf.get("b"), None, "it has been there for longer");
        assert_eq!(shelf.bytes(), 7);
        shelf.grown("a", 5);
        shelf.remove("a");
        assert_eq!(shelf.bytes(), 0);
        assert!(!shelf.drop_one());
    }

    #[tokio::test(start_paused = true)]
    async fn expired_values_are_removed_before_a_live_one_is_dropped() {
        let mut shelf = ExpiringMap::default();
        shelf.put("stays", 0, 10, in_a_second() + SECOND);
        for number in 0..100 {
            shelf.put(&number.to_string(), number, 10, in_a_second());
        }
        tokio::time::advance(SECOND).await;
        assert!(shelf.make_room(10, 1_010));
        assert_eq!((shelf.len(), shelf.bytes()), (1, 10));
        assert_eq!(shelf.get("stays"), Some(&mut 0));
    }

    #[tokio::test(start_paused = true)]
    async fn nothing_is_dropped_for_a_value_that_fits() {
        let mut shelf = ExpiringMap::default();
        shelf.put("a", 1, 10, in_a_second());
        assert!(shelf.make_room(10, 20));
        assert_eq!(shelf.len(), 1);
        assert!(shelf.make_room(11, 20));
        assert_eq!(shelf.len(), 0);
        assert!(!shelf.make_room(21, 20));
    }

    #[tokio::test(start_paused = true)]
    async fn a_value_is_gone_at_the_moment_it_expires() {
        let mut shelf = ExpiringMap::default();
        shelf.put("a", 1, 10, in_a_second());
        shelf.put("b", 2, 10, in_a_second());
        assert!(shelf.get("a").is_some());
        assert!(shelf.get_until("b", in_a_second() + SECOND).is_some());
        shelf.put("c", 3, 10, in_a_second() + SECOND);
        tokio::time::advance(SECOND).await;
        assert_eq!(shelf.get("a"), None);
        assert_eq!(shelf.get("b"), Some(&mut 2), "its life was prolonged");
        // A use during its lifetime does not keep a value beyond it.
        assert!(shelf.drop_one());
        assert_eq!(shelf.get("c"), Some(&mut 3));
        assert_eq!(shelf.len(), 2);
    }
}
