//! How long each kind of response is served, and the age that it reports.

use std::time::{Duration, SystemTime};

use super::kit::{
    Boxed, Inner, Seen, all, ask, get, policy, replicas, respond, secs, send_many, settle, shop, shop_with,
    whole,
};
use crate::support::warnings::Warnings;

/// Checks that a response with these headers is a hit until it is `seconds` old: asks now, at `seconds - 1` and at `seconds`.
async fn lasts(status: u16, headers: Vec<(&'static str, String)>, seconds: u64) {
    let case = format!("{status} {headers:?}");
    let body = move |n: usize| if status == 204 { Boxed::default() } else { whole(n.to_string()) };
    let inner = Inner::with(move |n, _| {
        let headers: Vec<_> = headers.iter().map(|(name, value)| (*name, value.as_str())).collect();
        Ok(respond(status, &headers, body(n)))
    });
    let shop = shop_with(&inner, policy().fresh_for(secs(40)).negative_for(secs(20)));
    let first = ask(&shop, get("/")).await;
    assert_eq!(first.remark(), format!("fwd=uri-miss; stored; ttl={seconds}"), "{case}");
    assert_eq!(first.status, status);
    tokio::time::sleep(secs(seconds - 1)).await;
    let last = ask(&shop, get("/")).await;
    assert_eq!((last.status, inner.calls()), (status, 1), "{case}");
    assert_eq!(last.remark(), "hit; ttl=1", "{case}");
    tokio::time::sleep(secs(1)).await;
    ask(&shop, get("/")).await;
    assert_eq!(inner.calls(), 2, "{case}");
}

fn control(value: &str) -> Vec<(&'static str, String)> {
    vec![("cache-control", value.to_owned())]
}

fn date(offset: i64) -> String {
    let now = SystemTime::now();
    let offset_by = secs(offset.unsigned_abs());
    httpdate_fmt(if offset < 0 { now - offset_by } else { now + offset_by })
}

/// IMF-fixdate (RFC 9110, 5.6.7), by the calendar of Howard Hinnant's `civil_from_days`.
fn httpdate_fmt(time: SystemTime) -> String {
    let since = time.duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs();
    let (days, of_day) = (since / 86_400, since % 86_400);
    let z = days + 719_468;
    let (era, doe) = (z / 146_097, z % 146_097);
    let yoe = (doe - doe / 1460 + doe / 36_524 - doe / 146_096) / 365;
    let doy = doe - (365 * yoe + yoe / 4 - yoe / 100);
    let mp = (5 * doy + 2) / 153;
    let (day, month) = (doy - (153 * mp + 2) / 5 + 1, if mp < 10 { mp + 3 } else { mp - 9 });
    let year = yoe + era * 400 + u64::from(month <= 2);
    let names = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];
    let weekday = ["Thu", "Fri", "Sat", "Sun", "Mon", "Tue", "Wed"][(days % 7) as usize];
    let (hours, minutes, seconds) = (of_day / 3600, of_day / 60 % 60, of_day % 60);
    let month = names[month as usize - 1];
    format!("{weekday}, {day:02} {month} {year} {hours:02}:{minutes:02}:{seconds:02} GMT")
}

/// A8
#[tokio::test(start_paused = true)]
async fn statuses_of_a_default_lifetime_last_for_fresh_for_or_negative_for() {
    for status in [200, 203, 204, 300, 301, 308] {
        lasts(status, Vec::new(), 40).await;
    }
    for status in [404, 410] {
        lasts(status, Vec::new(), 20).await;
    }
}

/// A8
#[tokio::test(start_paused = true)]
async fn an_explicit_lifetime_applies_to_any_status_but_failures_and_parts() {
    for status in [200, 201, 204, 302, 307, 400, 401, 403, 404, 405, 410, 451] {
        lasts(status, control("max-age=10"), 10).await;
    }
}

#[tokio::test(start_paused = true)]
async fn s_maxage_stands_above_max_age_above_expires() {
    lasts(200, control("max-age=10, s-maxage=20"), 20).await;
    lasts(200, control("max-age=20, s-maxage=10"), 10).await;
    let with_dates = |value: &str, expires: i64| {
        let mut headers = control(value);
        headers.extend([("date", date(0)), ("expires", date(expires))]);
        headers
    };
    lasts(200, with_dates("max-age=10", 20), 10).await;
    lasts(200, with_dates("max-age=10", -20), 10).await;
    lasts(200, with_dates("s-maxage=10", 20), 10).await;
    lasts(200, with_dates("public", 20), 20).await;
    lasts(302, with_dates("public", 20), 20).await;
}

#[tokio::test(start_paused = true)]
async fn expires_counts_from_date_and_age_shortens() {
    // The origin's clock is an hour ahead, so only the difference between both dates counts.
    lasts(200, vec![("date", date(3600)), ("expires", date(3620))], 20).await;
    let mut aged = control("max-age=30");
    aged.push(("age", "10".to_owned()));
    lasts(200, aged, 20).await;
}

async fn shared_with_the_wave_only(case: &str, status: u16, headers: Vec<(&'static str, String)>) {
    shared_with_the_wave_and_says(case, status, headers, "not-stored").await;
}

async fn shared_with_the_wave_and_says(
    case: &str,
    status: u16,
    headers: Vec<(&'static str, String)>,
    detail: &str,
) {
    let inner = Inner::with(move |n, _| {
        let headers: Vec<_> = headers.iter().map(|(name, value)| (*name, value.as_str())).collect();
        Ok(respond(status, &headers, whole(n.to_string())))
    });
    let shops = replicas(2, &inner);
    for wave in 1..=2 {
        inner.gate.close();
        let mut clients = send_many(&shops[0], 10, "/");
        clients.extend(super::kit::send_many(&shops[1], 10, "/"));
        settle().await;
        assert_eq!(inner.loads.running(), 1, "{case}");
        inner.gate.open();
        let seen = all(clients).await;
        assert!(seen.iter().all(|seen| seen.text() == wave.to_string() && seen.status == status), "{case}");
        let mut remarks: Vec<_> = seen.iter().map(Seen::remark).collect();
        remarks.sort();
        assert_eq!(remarks[..19], vec!["fwd=miss; collapsed"; 19], "{case}");
        assert_eq!(remarks[19], format!("fwd=uri-miss; detail={detail}"), "{case}");
    }
    assert_eq!(ask(&shops[1], get("/")).await.text(), "3", "{case}: not stored");
}

/// The outcome that other processes read has a size limit. Of a long failure it contains only the status.
#[tokio::test(start_paused = true)]
async fn waiters_of_other_processes_get_a_long_failure_as_its_status() {
    let inner = Inner::with(|_, _| Ok(respond(500, &[], whole("x".repeat(100_000))))).held();
    let shops = replicas(2, &inner);
    let here = send_many(&shops[0], 10, "/");
    settle().await;
    let there = send_many(&shops[1], 10, "/");
    settle().await;
    inner.gate.open();
    assert!(all(here).await.iter().all(|seen| (seen.status, seen.body.len()) == (500, 100_000)));
    assert!(all(there).await.iter().all(|seen| seen.status == 500));
    assert_eq!(inner.calls(), 1, "no convoy of retries");
}

/// A12: a failure answers the requests that wait for it, and no later one.
#[tokio::test(start_paused = true)]
async fn failures_of_the_server_are_shared_with_the_wave_only() {
    for status in [500, 501, 502, 503, 504, 599] {
        shared_with_the_wave_only(&status.to_string(), status, Vec::new()).await;
        shared_with_the_wave_only(&status.to_string(), status, control("max-age=60")).await;
    }
}

/// A 408 to a request without a body is a timeout of the server: tower-http's `TimeoutLayer` sends one by default. Regression: it counted
/// as the client's fault, so each waiter for a slow handler called the handler at once.
#[tokio::test(start_paused = true)]
async fn a_408_is_shared_with_the_wave_as_a_504_is() {
    shared_with_the_wave_only("408", 408, Vec::new()).await;
    shared_with_the_wave_only("408", 408, control("max-age=60")).await;
}

#[tokio::test(start_paused = true)]
async fn a_lifetime_of_zero_or_in_the_past_is_shared_with_the_wave_only() {
    for value in ["max-age=0", "s-maxage=0, max-age=60", "max-age=-1", "max-age=x"] {
        shared_with_the_wave_only(value, 200, control(value)).await;
    }
    shared_with_the_wave_only("expires: 0", 200, vec![("expires", "0".to_owned())]).await;
    shared_with_the_wave_only("expired", 302, vec![("expires", date(-10))]).await;
    let mut aged = control("max-age=10");
    aged.push(("age", "10".to_owned()));
    shared_with_the_wave_and_says("as old as it may be", 200, aged, "too-old").await;
}

/// RFC 9111, 4.2.3: a waiter receives the age that the leader received, plus the time that the answer took.
#[tokio::test(start_paused = true)]
async fn a_shared_response_keeps_its_age() {
    let headers = [("age", "10"), ("cache-control", "max-age=10"), ("content-length", "1")];
    let inner = Inner::with_headers(&headers).held();
    let shops = replicas(2, &inner);
    let mut clients = send_many(&shops[0], 5, "/");
    clients.extend(send_many(&shops[1], 5, "/"));
    tokio::time::sleep(secs(3)).await;
    inner.gate.open();
    let mut ages: Vec<_> =
        all(clients).await.iter().map(|seen| seen.header("age").map(str::to_owned)).collect();
    ages.sort();
    assert_eq!(ages[0].as_deref(), Some("10"), "straight from the origin");
    assert_eq!(ages[1..], vec![Some("13".to_owned()); 9]);
    assert_eq!(inner.calls(), 1);
}

/// The waiter receives the same age if nothing is stored, because the store is down.
#[cfg(feature = "testing")]
#[tokio::test(start_paused = true)]
async fn a_response_shared_without_a_store_keeps_its_age() {
    let inner = Inner::with_headers(&[("age", "3600"), ("cache-control", "max-age=7200")]).held();
    let replica = stampede_guard::testing::ChaosStore::new(1).replica();
    let guard = stampede_guard::StampedeGuard::new(replica.clone()).with_policy(policy().build().unwrap());
    let shop: super::kit::Shop = tower::Layer::layer(&guard, inner.clone());
    replica.cut();
    let clients = send_many(&shop, 5, "/");
    tokio::time::sleep(secs(5)).await;
    assert_eq!(inner.calls(), 1, "they share a load");
    inner.gate.open();
    let age = |seen: &Seen| seen.header("age").unwrap().parse::<u64>().unwrap();
    let mut ages: Vec<_> = all(clients).await.iter().map(age).collect();
    ages.sort();
    assert_eq!(ages[0], 3600, "straight from the origin");
    assert!(ages[1..].iter().all(|age| (3602..=3605).contains(age)), "{ages:?}");
}

/// A response with neither `Date` nor `Age` was made in this process: the time of its handler is no age. Regression: a
/// handler's 2.2 s counted against `max-age=2`, and each wave loaded again.
#[tokio::test(start_paused = true)]
async fn a_handlers_time_does_not_age_its_response() {
    let inner = Inner::with_headers(&[("cache-control", "max-age=2")]).held();
    let shop = shop(&inner);
    let waiting = send_many(&shop, 5, "/");
    tokio::time::sleep(Duration::from_millis(2200)).await;
    inner.gate.open();
    let mut remarks: Vec<_> = all(waiting).await.iter().map(Seen::remark).collect();
    remarks.sort();
    assert_eq!(remarks[..4], vec!["fwd=miss; collapsed; ttl=2"; 4]);
    assert_eq!(remarks[4], "fwd=uri-miss; stored; ttl=2");
    for (after, remark, age) in [(0, "hit; ttl=2", "0"), (1900, "hit; ttl=0", "1")] {
        tokio::time::sleep(Duration::from_millis(after)).await;
        let seen = ask(&shop, get("/")).await;
        assert_eq!((seen.remark().as_str(), seen.header("age")), (remark, Some(age)), "after {after} ms");
    }
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert_eq!(ask(&shop, get("/")).await.text(), "2", "its lifetime is over");
}

/// RFC 9111, 4.2.3: for a response with a `Date` or an `Age`, the response delay counts.
#[tokio::test(start_paused = true)]
async fn the_response_delay_ages_a_response_with_a_date_or_an_age() {
    for (name, value) in [("date", date(3600)), ("age", "0".to_owned()), ("age", "soon".to_owned())] {
        let (header, case) = ([("cache-control", "max-age=5".to_owned()), (name, value)], name);
        let inner = Inner::with(move |n, _| {
            let headers: Vec<_> = header.iter().map(|(name, value)| (*name, value.as_str())).collect();
            Ok(respond(200, &headers, whole(n.to_string())))
        });
        let inner = inner.held();
        let shop = shop(&inner);
        let waiting = send_many(&shop, 1, "/");
        tokio::time::sleep(secs(3)).await;
        inner.gate.open();
        all(waiting).await;
        assert_eq!(ask(&shop, get("/")).await.header("age"), Some("3"), "{case}");
    }
}

/// Regression: the operator saw only `detail=not-stored`, which also stands for `max-age=0`.
#[tokio::test(start_paused = true)]
async fn a_response_older_than_its_lifetime_is_marked_and_warned_of_once() {
    let warnings = Warnings::default();
    let _listening = warnings.listen();
    let tagged = |age: &'static str| [("etag", "\"a\""), ("cache-control", "max-age=10"), ("age", age)];
    for (headers, remark, warned) in [
        (vec![("cache-control", "max-age=10"), ("age", "9")], "stored; ttl=1", 0),
        (vec![("cache-control", "max-age=0"), ("age", "9")], "detail=not-stored", 0),
        (vec![("expires", "0"), ("age", "9")], "detail=not-stored", 0),
        (
            vec![("cache-control", "max-age=10, no-cache"), ("etag", "\"a\""), ("age", "10")],
            "stored; ttl=0",
            0,
        ),
        (vec![("cache-control", "max-age=10"), ("age", "10")], "detail=too-old", 1),
        (tagged("10").to_vec(), "stored; ttl=0; detail=too-old", 1),
    ] {
        let case = format!("{headers:?}");
        let shop = shop(&Inner::with_headers(&headers));
        let before = warnings.about("older than its lifetime").len();
        for path in ["/secret/1", "/secret/2"] {
            assert_eq!(ask(&shop, get(path)).await.remark(), format!("fwd=uri-miss; {remark}"), "{case}");
            tokio::time::sleep(secs(100)).await;
        }
        let lines = warnings.about("older than its lifetime");
        assert_eq!(lines.len() - before, warned, "{case}: {lines:?}");
        assert!(!lines.iter().any(|line| line.contains("secret")), "{lines:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn age_grows_from_the_age_of_the_response() {
    let inner = Inner::with_headers(&[("age", "5"), ("cache-control", "max-age=60")]);
    let shop = shop(&inner);
    assert_eq!(ask(&shop, get("/")).await.header("age"), Some("5"));
    for waited in 0..3 {
        let seen = ask(&shop, get("/")).await;
        assert_eq!(seen.headers.get_all("age").iter().count(), 1);
        assert_eq!(seen.header("age"), Some((5 + waited * 15).to_string().as_str()));
        assert_eq!(seen.remark(), format!("hit; ttl={}", 55 - waited * 15));
        tokio::time::sleep(secs(15)).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_hit_keeps_the_date_of_its_load_and_the_remarks_of_other_caches() {
    let inner = Inner::numbered(|response| {
        response.headers_mut().insert("cache-status", "cdn; fwd=miss".parse().unwrap());
    });
    let shop = shop(&inner);
    ask(&shop, get("/")).await;
    let hit = ask(&shop, get("/")).await;
    tokio::time::sleep(secs(5)).await;
    let later = ask(&shop, get("/")).await;
    assert!(hit.header("date").is_some());
    assert_eq!(hit.header("date"), later.header("date"));
    let lines: Vec<_> = later.headers.get_all("cache-status").iter().collect();
    assert_eq!(lines, ["cdn; fwd=miss", "stampede-guard; hit; ttl=55"]);
}
