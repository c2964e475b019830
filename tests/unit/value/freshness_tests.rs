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
    // The value is fresh until 11 s and stale until 16 s; it stands in until 31 s if the origin does not answer, and until 20 s if it does.
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
    // With this random number -ln(x) is 1, so the refresh begins one load time ahead.
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

#[test]
fn an_early_end_moves_the_windows_and_ends_a_back_off() {
    let lifetimes = Lifetimes {
        fresh_for: SECOND * 10,
        stale_while_revalidate: SECOND * 2,
        stale_if_error: SECOND * 5,
        keep_for: Duration::ZERO,
    };
    let (times, _) = lifetimes.from(1_000, SECOND);
    let ended = times.ended_at(4_000);
    let serves = [3_999, 4_000, 5_999, 6_000, 8_999, 9_000].map(|now| ended.serves(now));
    use Freshness::{Expired, Fresh, Stale, StaleIfError};
    assert_eq!(serves, [Fresh, Stale, Stale, StaleIfError, StaleIfError, Expired]);
    // After the end of freshness it changes nothing, and twice it is as once.
    assert_eq!(times.ended_at(11_000), times);
    assert_eq!(ended.ended_at(4_000), ended);
    // An early refresh has failed before the end.
    let rested = times.rested(Unstored::SaysNothing, 3_000, SECOND * 60);
    assert_eq!(rested.ended_at(4_000).serves(4_000), Stale);
    // Milliseconds before the value was stored, and at the beginning of the clock.
    assert_eq!(times.ended_at(500).serves(1_000), Stale);
    assert_eq!(times.ended_at(0).serves(2_001), StaleIfError);
}
