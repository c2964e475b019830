//! Until when a value may be served, and how: fresh, stale, or only if a load fails. Pure arithmetic.
//!
//! A policy or a response gives a value its [`Lifetimes`]; with the moment of the load they become
//! the [`Expiry`] that are stored with the value. A later load may end without a value to store: [`Unstored`] says what that means
//! for the older value.

use std::time::Duration;

/// How long a value may be served from the end of its load on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Lifetimes {
    /// Without restriction. Zero: only callers that waited for the load are served.
    pub(crate) fresh_for: Duration,
    /// After `fresh_for`, while the value is loaded anew in the background (RFC 5861, 3).
    pub(crate) stale_while_revalidate: Duration,
    /// After `fresh_for`, if a load fails or takes too long (RFC 5861, 4).
    pub(crate) stale_if_error: Duration,
    /// After `fresh_for`, only for the next load to revalidate; the value is not served.
    pub(crate) keep_for: Duration,
}

/// A century. A server or a timer adds a lifetime to the present, and the sum must be representable there.
const FOR_EVER: Duration = Duration::from_secs(100 * 365 * 86_400);

/// Until when a value may be served, in milliseconds on the store's clock: the first moment at which it
/// may not.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Expiry {
    /// Without restriction.
    pub(crate) fresh_until: u64,
    /// While the value is loaded anew in the background.
    pub(crate) stale_until: u64,
    /// If a load fails or takes too long.
    pub(crate) error_until: u64,
    /// No load before this moment, because one has ended without a value to store. Zero if none has. Never later than the moment
    /// until which the value may be served after that load: it paces loads and extends no window.
    pub(crate) retry_at: u64,
    /// How long the load took, in milliseconds.
    pub(crate) load_ms: u32,
}

/// What a load that ended without a value to store means for the older value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unstored {
    /// The answer is about the resource, for all its callers: the older value ends.
    OfResource,
    /// The answer says nothing about the resource: it is about one request or one client, or a failure for which no older value stands
    /// in. The older value stays, within `stale_while_revalidate`.
    SaysNothing,
    /// The origin has failed. The older value may stand in, within `stale_if_error`; after an answer until this moment at most, which
    /// is earlier where that window is longer while no answer comes.
    Failure { before: u64 },
}

impl Unstored {
    /// No answer came.
    pub(crate) const NO_ANSWER: Self = Self::Failure { before: u64::MAX };
}

/// How a value may be served at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Freshness {
    /// Without restriction.
    Fresh,
    /// Stale; a load in the background should replace it.
    Stale,
    /// Stale; a load has ended recently without a value to store, so no other should begin yet.
    BackingOff,
    /// Only if a load fails or takes too long.
    StaleIfError,
    /// Not at all.
    Expired,
}

impl Freshness {
    /// Whether callers are served at once, without waiting for a load.
    pub(crate) fn is_at_once(self) -> bool {
        matches!(self, Self::Fresh | Self::Stale | Self::BackingOff)
    }
}

impl Lifetimes {
    /// Fresh for a while, then never served.
    pub(crate) fn fresh(fresh_for: Duration) -> Self {
        Self { fresh_for, ..Self::default() }
    }

    /// The times of a value whose load ended at `now`, and how long the store keeps it; zero means not at all.
    pub(crate) fn from(&self, now: u64, load_time: Duration) -> (Expiry, Duration) {
        let Self { fresh_for, stale_while_revalidate, stale_if_error, keep_for } = *self;
        let [fresh_for, stale_while_revalidate, stale_if_error, keep_for] =
            [fresh_for, stale_while_revalidate, stale_if_error, keep_for].map(|time| time.min(FOR_EVER));
        let fresh_until = now.saturating_add(ms(fresh_for));
        let times = Expiry {
            fresh_until,
            stale_until: fresh_until.saturating_add(ms(stale_while_revalidate)),
            error_until: fresh_until.saturating_add(ms(stale_if_error)),
            retry_at: 0,
            load_ms: u32::try_from(load_time.as_millis()).unwrap_or(u32::MAX),
        };
        let after = stale_while_revalidate.max(stale_if_error).max(keep_for);
        (times, fresh_for.saturating_add(after))
    }
}

/// Whether a value that its waiters receive is stored for later callers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Storage {
    #[default]
    Stored,
    /// The lease had ended: by a change, perhaps, which may not be acknowledged yet.
    NotStored,
    /// The load had no lease.
    Unleased,
    /// The commit has no answer yet.
    Unconfirmed,
    /// The loader or the policy forbids to store it.
    Forbidden,
}

impl Storage {
    /// Each in place of a back-off: a moment that is long over, so that it means none.
    const MARKS: [(u64, Self); 4] =
        [(1, Self::NotStored), (2, Self::Unleased), (3, Self::Unconfirmed), (4, Self::Forbidden)];
}

impl Expiry {
    pub(crate) fn serves(&self, now: u64) -> Freshness {
        let Self { fresh_until, stale_until, error_until, retry_at, .. } = *self;
        if now < fresh_until {
            Freshness::Fresh
        } else if now < retry_at {
            Freshness::BackingOff
        } else if now < stale_until {
            Freshness::Stale
        } else if now < error_until {
            Freshness::StaleIfError
        } else {
            Freshness::Expired
        }
    }

    /// Whether the value may stand in for one that cannot be had.
    pub(crate) fn stands_in(&self, now: u64) -> bool {
        self.error_until > self.fresh_until && now < self.error_until
    }

    /// The times of the same value marked stale: it may then only stand in.
    pub(crate) fn expired(self) -> Self {
        Self { fresh_until: 0, stale_until: 0, retry_at: 0, ..self }
    }

    /// The times of the same value, loaded at `now`, if it is not stored: its waiters have it, and it is fresh for no longer. To them it
    /// is not expired.
    pub(crate) fn not_stored(self, now: u64) -> Self {
        let stale_until = self.fresh_until.max(self.stale_until);
        Self { fresh_until: now, stale_until, ..self }
    }

    /// The same times with a mark for the waiters, which does not affect them.
    pub(crate) fn marked(self, storage: Storage) -> Self {
        let mark = Storage::MARKS.iter().find(|(_, of)| *of == storage);
        Self { retry_at: mark.map_or(self.retry_at, |(mark, _)| *mark), ..self }
    }

    /// How the value was [`marked`](Self::marked).
    pub(crate) fn storage(&self) -> Storage {
        let mark = Storage::MARKS.iter().find(|(mark, _)| *mark == self.retry_at);
        mark.map_or(Storage::Stored, |(_, storage)| *storage)
    }

    /// Whether [`expired`](Self::expired) has marked the value stale. A value whose freshness has merely ended is not marked.
    pub(crate) fn is_expired(&self) -> bool {
        self.fresh_until == 0 && self.error_until > 0
    }

    /// The first moment at which the value may not be served, once a load has ended without a value to store.
    pub(crate) fn served_until(&self, unstored: Unstored) -> u64 {
        match unstored {
            Unstored::OfResource => 0,
            Unstored::SaysNothing => self.stale_until,
            Unstored::Failure { before } => self.stale_until.max(self.error_until.min(before)),
        }
    }

    /// The times of the same value after a load that ended at `now` without a value to store: no load begins during `back_off`.
    pub(crate) fn rested(mut self, unstored: Unstored, now: u64, back_off: Duration) -> Self {
        self.retry_at = now.saturating_add(ms(back_off)).min(self.served_until(unstored));
        if let Unstored::Failure { before } = unstored {
            self.error_until = self.error_until.min(before);
        }
        self
    }

    /// Whether this caller should load the value anew although it is fresh: XFetch (Vattani, Chierichetti and
    /// Lowenstein, "Optimal Probabilistic Cache Stampede Prevention", VLDB 2015). The probability rises towards the end
    /// of freshness and with the load's duration; `random` is uniform in `0..1`.
    pub(crate) fn is_due_early(&self, now: u64, beta: f64, random: f64) -> bool {
        // -ln(0) is infinite: due.
        let ahead = f64::from(self.load_ms) * beta * -random.ln();
        now < self.fresh_until && (self.fresh_until - now) as f64 <= ahead
    }
}

/// The duration in whole milliseconds.
pub(crate) fn ms(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn lifetimes() -> Lifetimes {
        Lifetimes {
            fresh_for: SECOND * 10,
            stale_while_revalidate: SECOND * 5,
            stale_if_error: SECOND * 20,
            keep_for: SECOND * 30,
        }
    }

    #[test]
    fn a_value_passes_through_its_windows_in_order() {
        let (times, keep) = lifetimes().from(1_000, SECOND);
        assert_eq!(keep, SECOND * 40);
        let expected = [
            (1_000, Freshness::Fresh),
            (10_999, Freshness::Fresh),
            (11_000, Freshness::Stale),
            (15_999, Freshness::Stale),
            (16_000, Freshness::StaleIfError),
            (30_999, Freshness::StaleIfError),
            (31_000, Freshness::Expired),
        ];
        for (now, serves) in expected {
            assert_eq!(times.serves(now), serves, "at {now}");
        }
    }

    #[test]
    fn without_windows_a_value_is_not_served_after_its_freshness() {
        let (times, keep) = Lifetimes::fresh(SECOND).from(0, SECOND);
        assert_eq!((times.serves(999), times.serves(1_000)), (Freshness::Fresh, Freshness::Expired));
        assert_eq!(keep, SECOND);
    }

    #[test]
    fn a_value_backs_off_after_a_failure_but_not_past_its_windows() {
        let (times, _) = lifetimes().from(1_000, SECOND);
        let rested = times.rested(Unstored::NO_ANSWER, 17_000, SECOND * 2);
        assert_eq!(rested.serves(18_999), Freshness::BackingOff);
        assert_eq!(rested.serves(19_000), Freshness::StaleIfError);
        let late = times.rested(Unstored::NO_ANSWER, 30_000, SECOND * 60);
        assert_eq!(late.serves(30_999), Freshness::BackingOff);
        assert_eq!(late.serves(31_000), Freshness::Expired);
        let none = Lifetimes::fresh(SECOND).from(0, SECOND).0.rested(Unstored::NO_ANSWER, 2_000, SECOND);
        assert_eq!(none.serves(2_000), Freshness::Expired, "a value without windows is not revived");
    }

    #[test]
    fn a_back_off_extends_no_window_whatever_the_load_has_ended_with() {
        // Fresh until 11 s, stale until 16 s, standing in until 31 s while no answer comes, and until 20 s after an answer.
        let (times, _) = lifetimes().from(1_000, SECOND);
        let cases = [
            (Unstored::OfResource, 0),
            (Unstored::SaysNothing, 16_000),
            (Unstored::Failure { before: 20_000 }, 20_000),
            (Unstored::Failure { before: 12_000 }, 16_000),
            (Unstored::NO_ANSWER, 31_000),
        ];
        for (unstored, until) in cases {
            assert_eq!(times.served_until(unstored), until, "{unstored:?}");
            let rested = times.rested(unstored, 12_000, SECOND * 3600);
            assert_eq!(rested.retry_at, until, "{unstored:?}");
            for now in [12_000, 15_999, 16_000, 19_999, 20_000, 30_999, 31_000] {
                assert_eq!(rested.serves(now) == Freshness::BackingOff, now < until, "{unstored:?} at {now}");
            }
        }
        let answered = times.rested(Unstored::Failure { before: 20_000 }, 12_000, SECOND);
        assert!(answered.stands_in(19_999) && !answered.stands_in(20_000), "an answer has come");
        let refused = times.rested(Unstored::SaysNothing, 12_000, SECOND);
        assert!(refused.stands_in(30_999), "an answer about one request ends no window");
    }

    #[test]
    fn early_refresh_becomes_likelier_towards_the_end_of_freshness() {
        let (times, _) = Lifetimes::fresh(SECOND * 10).from(0, SECOND);
        let due = |now, beta, random| times.is_due_early(now, beta, random);
        // -ln(1/e) is 1: one load time ahead.
        let one = (-1.0_f64).exp();
        assert!(!due(8_990, 1.0, one));
        assert!(due(9_001, 1.0, one));
        assert!(due(8_001, 2.0, one));
        assert!(due(0, 1.0, 0.0));
        assert!(!due(9_999, 1.0, 1.0), "a random number of 1 is never ahead");
        assert!(!due(10_000, 1.0, 0.0), "what is stale is not early any more");
        assert!(!due(9_999, 0.0, 0.5), "beta 0 turns it off");
    }

    #[test]
    fn no_lifetime_overflows() {
        let all = Lifetimes {
            fresh_for: Duration::MAX,
            stale_while_revalidate: Duration::MAX,
            stale_if_error: Duration::MAX,
            keep_for: Duration::MAX,
        };
        let (times, keep) = all.from(u64::MAX - 1, Duration::MAX);
        assert_eq!((times.fresh_until, keep), (u64::MAX, FOR_EVER * 2));
        assert_eq!(times.load_ms, u32::MAX);
    }
}
