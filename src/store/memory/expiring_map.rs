//! Small things by name, each with a life and all with a bound: what nobody asks for goes first.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use tokio::time::Instant;

use super::sweep::Sweep;

/// What the maps take around a thing beside its bytes and its two names, as in `records`.
pub(super) const AROUND: usize = 320;

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

/// A moment so far from now, or what stands for never.
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
    async fn the_bytes_of_what_is_there_are_known_whatever_happens_to_it() {
        let mut shelf = Shelf::default();
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
    async fn what_has_expired_is_looked_for_before_anything_is_dropped() {
        let mut shelf = Shelf::default();
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
    async fn nothing_goes_for_what_fits() {
        let mut shelf = Shelf::default();
        shelf.put("a", 1, 10, in_a_second());
        assert!(shelf.make_room(10, 20));
        assert_eq!(shelf.len(), 1);
        assert!(shelf.make_room(11, 20));
        assert_eq!(shelf.len(), 0);
        assert!(!shelf.make_room(21, 20));
    }

    #[tokio::test(start_paused = true)]
    async fn at_the_moment_of_its_end_it_is_over() {
        let mut shelf = Shelf::default();
        shelf.put("a", 1, 10, in_a_second());
        shelf.put("b", 2, 10, in_a_second());
        assert!(shelf.get("a").is_some());
        assert!(shelf.get_until("b", in_a_second() + SECOND).is_some());
        shelf.put("c", 3, 10, in_a_second() + SECOND);
        tokio::time::advance(SECOND).await;
        assert_eq!(shelf.get("a"), None);
        assert_eq!(shelf.get("b"), Some(&mut 2), "it lives on for who asked for that");
        // That it was asked for in its life does not keep it beyond that.
        assert!(shelf.drop_one());
        assert_eq!(shelf.get("c"), Some(&mut 3));
        assert_eq!(shelf.len(), 2);
    }
}
