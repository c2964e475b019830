use http_body_util::BodyExt as _;

use super::own_answer;
use super::*;
use crate::guard::StampedeGuard;
use crate::policy::Policy;
use crate::store::memory::MemoryStore;
use crate::value::entry::Expiry;
use crate::value::entry::TagList;
use crate::value::entry::{Encoding, EntryKind};
use http::header::{CACHE_CONTROL, CONTENT_TYPE, RETRY_AFTER};

/// An entry that was stored at 10,000.
fn entry(fresh_until: u64, payload: Bytes) -> Entry {
    Entry {
        kind: EntryKind::Value,
        encoding: Encoding::HTTP,
        stored_at: 10_000,
        tag_expired_at: u64::MAX,
        expiry: Expiry { fresh_until, ..Expiry::default() },
        validator: Box::default(),
        tags: TagList::default(),
        payload,
        packed: Default::default(),
    }
}

#[test]
fn each_status_is_written_as_the_rfc_spells_it() {
    let stored = |fwd, status| CacheStatus::Forwarded { fwd, status, stored: Some(60), detail: None };
    let cases = [
        (CacheStatus::Hit { ttl: 59 }, "stampede-guard; hit; ttl=59"),
        (CacheStatus::Hit { ttl: 0 }, "stampede-guard; hit; ttl=0"),
        (CacheStatus::Hit { ttl: u64::MAX }, "stampede-guard; hit; ttl=18446744073709551615"),
        (stored(Fwd::URI_MISS, None), "stampede-guard; fwd=uri-miss; stored; ttl=60"),
        (
            stored(Fwd::STALE, Some(StatusCode::NOT_MODIFIED)),
            "stampede-guard; fwd=stale; fwd-status=304; stored; ttl=60",
        ),
        (CacheStatus::collapsed(1), "stampede-guard; fwd=miss; collapsed; ttl=1"),
        (CacheStatus::collapsed(0), "stampede-guard; fwd=miss; collapsed"),
        // RFC 9211, 2.5: `ttl` is a negative number if the response was stale.
        (CacheStatus::Stale { beyond: 1 }, "stampede-guard; hit; ttl=-1"),
        (CacheStatus::Stale { beyond: 0 }, "stampede-guard; hit; ttl=0"),
        (CacheStatus::miss("vary"), "stampede-guard; fwd=miss; detail=vary"),
        (CacheStatus::bypass("range"), "stampede-guard; fwd=bypass; detail=range"),
    ];
    for (status, text) in cases {
        assert_eq!(status.to_value(), text);
    }
    let reasons = [
        (Fwd::BYPASS, "bypass"),
        (Fwd::METHOD, "method"),
        (Fwd::URI_MISS, "uri-miss"),
        (Fwd::VARY_MISS, "vary-miss"),
        (Fwd::MISS, "miss"),
        (Fwd::STALE, "stale"),
        (Fwd::REQUEST, "request"),
        (Fwd::PARTIAL, "partial"),
    ];
    for (fwd, text) in reasons {
        let line = CacheStatus::Forwarded { fwd, status: None, stored: None, detail: None };
        assert_eq!(line.to_value(), format!("stampede-guard; fwd={text}"), "RFC 9211, 2.2");
    }
}

#[test]
fn staleness_counts_from_the_end_of_freshness_or_from_storing() {
    let beyond = |fresh_until, now| CacheStatus::stale(&entry(fresh_until, Bytes::new()), now);
    for (fresh_until, now, seconds) in [
        (20_000, 3_019_999, 2999),
        (20_000, 3_020_000, 3000),
        (20_000, 15_000, 0),
        // The entry was marked stale early, so its staleness counts from when it was stored.
        (0, 12_000, 2),
    ] {
        let expected = CacheStatus::Stale { beyond: seconds };
        assert_eq!(beyond(fresh_until, now), expected, "RFC 9211, 2.5: {fresh_until} {now}");
    }
}

#[test]
fn a_stand_in_is_no_hit_and_names_the_failure() {
    let cases = [
        (
            StandIn::Forwarded(Some(StatusCode::NOT_MODIFIED)),
            "stampede-guard; fwd=stale; fwd-status=304; ttl=-3; detail=not-validated",
        ),
        (
            StandIn::Forwarded(Some(StatusCode::BAD_GATEWAY)),
            "stampede-guard; fwd=stale; fwd-status=502; ttl=-3",
        ),
        (StandIn::Forwarded(None), "stampede-guard; fwd=stale; ttl=-3; detail=no-answer"),
        (StandIn::Collapsed, "stampede-guard; fwd=stale; collapsed; ttl=-3"),
    ];
    for (stand_in, text) in cases {
        let mut headers = HeaderMap::new();
        write_stand_in(&mut headers, stand_in);
        assert!(headers.is_empty(), "there is no line to replace");
        write_status(&mut headers, CacheStatus::Hit { ttl: 7 });
        write_status(&mut headers, CacheStatus::Stale { beyond: 3 });
        write_stand_in(&mut headers, stand_in);
        let lines: Vec<_> = headers.get_all(CACHE_STATUS).iter().collect();
        assert_eq!(lines, ["stampede-guard; hit; ttl=7", text], "RFC 9211, 2.1: {stand_in:?}");
    }
}

#[test]
fn the_key_is_appended_to_the_guards_own_line() {
    let mut headers = HeaderMap::new();
    write_key(&mut headers, "no line to add it to");
    assert!(headers.is_empty());
    headers.insert(CACHE_STATUS, HeaderValue::from_static("cdn; hit"));
    write_status(&mut headers, CacheStatus::Hit { ttl: 1 });
    write_key(&mut headers, r#"a?b="\c""#);
    let lines: Vec<_> = headers.get_all(CACHE_STATUS).iter().collect();
    assert_eq!(lines, ["cdn; hit", r#"stampede-guard; hit; ttl=1; key="a?b=\"\\c\"""#]);
}

#[test]
fn an_age_is_its_decimal_number() {
    for age in (0..2000).chain([1 << 31, u64::MAX]) {
        let mut headers = HeaderMap::new();
        age_and_status(&mut headers, age, CacheStatus::hit(1));
        assert_eq!(headers[AGE], age.to_string(), "{age}");
    }
}

#[test]
fn a_number_of_any_length_is_written() {
    for digits in 0..20 {
        for number in [10_u64.pow(digits), 10_u64.pow(digits) - 1] {
            assert_eq!(CacheStatus::hit(number).to_value(), format!("stampede-guard; hit; ttl={number}"));
        }
    }
}

#[test]
fn the_guards_line_follows_those_of_earlier_caches_and_there_is_one_age() {
    let mut headers = HeaderMap::new();
    headers.insert(CACHE_STATUS, HeaderValue::from_static("cdn; hit"));
    headers.append(AGE, HeaderValue::from_static("1"));
    headers.append(AGE, HeaderValue::from_static("2"));
    age_and_status(&mut headers, 17, CacheStatus::Hit { ttl: 43 });
    let lines: Vec<_> = headers.get_all(CACHE_STATUS).iter().collect();
    assert_eq!(lines, ["cdn; hit", "stampede-guard; hit; ttl=43"]);
    assert_eq!(headers.get_all(AGE).iter().collect::<Vec<_>>(), ["17"]);
}

#[tokio::test]
async fn an_own_answer_is_short_plain_and_not_storable() {
    let answer = own_answer(StatusCode::BAD_GATEWAY, "load-failed", "try again");
    assert_eq!(answer.status(), 502);
    assert_eq!(answer.headers()[CONTENT_TYPE], "text/plain; charset=utf-8");
    assert_eq!(answer.headers()[CACHE_CONTROL], "no-store");
    assert_eq!(answer.headers()[RETRY_AFTER], "1");
    assert_eq!(answer.headers()[CACHE_STATUS], "stampede-guard; fwd=miss; detail=load-failed");
    assert_eq!(answer.into_body().collect().await.unwrap().to_bytes(), "try again");
}

/// What a thread has of these decodings, one after the other within one second, if each replay takes `bytes` of the tier's room: `r` if it is
/// rare, `f` if it is frequent and a replay is stored, `n` if there is no room for it, `o` for a replay of the thread's own.
fn found(
    (tier, bytes): (&LocalTier, u64),
    replays: &mut ThreadReplays,
    numbers: &[u64],
    second: u64,
) -> String {
    let moment = ReplayMoment { age: second, ttl: None };
    let letter = |&number| match replays.find(number, moment, second) {
        InThread::Rare => 'r',
        InThread::Replay(_) => 'o',
        InThread::Frequent => {
            let Some(room) = tier.room(bytes) else { return 'n' };
            let head = Response::new(()).into_parts().0;
            let response = StoredResponse::new(&head, SystemTime::now(), Bytes::new(), None);
            replays.store(number, ThreadReplay { moment, response: Arc::new(response), _room: room });
            'f'
        }
    };
    numbers.iter().map(letter).collect()
}

const CAPACITY: u64 = 8 * 1024 * 1024;

fn guard() -> StampedeGuard {
    let policy =
        Policy::builder().fresh_for(Duration::from_secs(60)).local_for(Duration::MAX).build().unwrap();
    StampedeGuard::builder(MemoryStore::new()).policy(policy).local_capacity(CAPACITY).build().unwrap()
}

#[tokio::test(start_paused = true)]
async fn the_replays_of_all_threads_and_the_copies_take_no_more_than_the_capacity() {
    let guard = guard();
    let tier = &*guard.parts().0.local;
    let (half, copies) = (CAPACITY / 16, || guard.health().local.unwrap().capacity);
    assert_eq!(copies(), CAPACITY, "before the first replay the copies have it all");
    let taken = || guard.health().local.unwrap().bytes;
    for key in 0..4_000_u32 {
        let load = async || Ok::<_, std::convert::Infallible>(vec![b'v'; 1024]);
        guard.get_or_load(key, load).await.unwrap();
    }
    assert!(taken() > CAPACITY - 2 * half, "{}", taken());
    let (mut one, mut other) = (ThreadReplays::new(), ThreadReplays::new());
    let often = "r".repeat(15);
    assert_eq!(found((tier, half), &mut one, &[1; 17], 1), often.clone() + "fo");
    assert_eq!(copies(), CAPACITY - 2 * half);
    assert!(taken() <= copies(), "copies have left: {}", taken());
    assert_eq!(found((tier, half), &mut other, &[1; 17], 1), often.clone() + "fo");
    assert_eq!(found((tier, half), &mut other, &[2; 17], 1), often.clone() + "nn", "there is no more room");
    // A replay for the next moment takes the room of its own older one.
    assert_eq!(found((tier, half), &mut one, &[1; 10], 2), "rrrrrrrfoo");
    // What is not served as often any more gives its room back, though it is served in each second.
    for second in 2..=4 {
        found((tier, half), &mut other, &[1], second);
    }
    assert_eq!(found((tier, half), &mut other, &[3; 17], 4), often.clone() + "fo");
    // A thread that ends does, too.
    drop(one);
    assert_eq!(found((tier, half), &mut other, &[4; 17], 4), often + "fo");
    assert_eq!(copies(), CAPACITY - 2 * half);
}

#[test]
fn a_thread_has_replays_of_what_it_serves_often_and_drops_those_that_it_does_not_serve_for_a_second() {
    let (guard, mut replays) = (guard(), ThreadReplays::new());
    let tier = (&*guard.parts().0.local, 1);
    assert_eq!(found(tier, &mut replays, &[7; 20], 1), "rrrrrrrrrrrrrrrfoooo");
    // It is written anew for each moment, while it is served often enough.
    assert_eq!(found(tier, &mut replays, &[7; 10], 2), "rrrrrfoooo");
    // Another decoding of the same slot does not displace it, unless it is served more often.
    let other = 7 + REPLAYS_OF_THREAD as u64;
    assert_eq!(found(tier, &mut replays, &[7, other, 7, 7, other, 7, 7], 2), "orooroo");
    // The first was served 23 times more often, and the other becomes frequent at its sixteenth time in the slot.
    let often = "r".repeat(23 + 15) + "foo";
    assert_eq!(found(tier, &mut replays, &[other; 41], 2), often);
    // It is not served in this second, and in the next one it is gone.
    assert_eq!(found(tier, &mut replays, &[1], 3), "r");
    assert!(replays.slots[7].is_some());
    assert_eq!(found(tier, &mut replays, &[1], 4), "r");
    assert!(replays.slots[7].is_none());
}

/// Regression: hits of the same second received `collapsed`.
#[test]
fn a_request_that_has_waited_shares_no_replay_with_hits() {
    let head = Response::new(()).into_parts().0;
    let response = StoredResponse::new(&head, SystemTime::now(), Bytes::from_static(b"body"), None);
    let mut meta = ResponseMeta::shared_only(true, Duration::ZERO, None);
    meta.terms.lifetime = Duration::from_secs(60);
    let entry = entry(70_000, response.encode(&meta).unwrap());
    let (demands, headers, http, shared) =
        (RequestDemands::default(), HeaderMap::new(), HttpPolicy::default(), SharedValue::new());
    let status = |has_waited| {
        let reader = ResponseReader {
            demands: &demands,
            headers: &headers,
            http: &http,
            resource: None,
            has_waited,
            copies: None,
        };
        match reader.open(&entry, 11_000, Some(&shared)) {
            Some(StoredAnswer::Response(replay)) => replay.response.headers[CACHE_STATUS].clone(),
            _ => panic!("a response"),
        }
    };
    let (hit, collapsed) = ("stampede-guard; hit; ttl=59", "stampede-guard; fwd=miss; collapsed; ttl=59");
    assert_eq!([true, false, true].map(status), [collapsed, hit, collapsed]);
}
