use http::uri::Scheme;

use super::tests::{Admission, admit, admit_get, ask, cached, request};
use super::*;
use crate::http::HttpPolicy;

#[test]
fn a_host_in_another_spelling_than_the_canonical_one_is_bypassed() {
    for host in ["a:80", "a:00080", "a:", "[::1]:80", "[::1]:"] {
        assert_eq!(admit_get("/", &[("host", host)]), Admission::Bypass("host"), "RFC 9110, 4.2.3: {host}");
        let absolute = format!("http://{host}/");
        let plain = host.rsplit_once(':').unwrap().0;
        assert_eq!(
            admit_get(&absolute, &[("host", plain)]),
            Admission::Bypass("host"),
            "{absolute} at {plain}"
        );
        let mut http2 = request("GET", &absolute, &[]);
        *http2.version_mut() = http::Version::HTTP_2;
        assert_eq!(
            admit(&http2, &RequestRules::default()),
            Admission::Bypass("host"),
            "RFC 9113, 8.3.1: {host}"
        );
    }
    let secure = RequestRules { scheme: Scheme::HTTPS, ..RequestRules::default() };
    let of = |host| admit(&request("GET", "/", &[("host", host)]), &secure);
    assert_eq!(of("a:443"), Admission::Bypass("host"));
    assert_eq!(of("a:80"), cached("https", "a:80", "/"));
}

#[test]
fn the_authority_of_the_policy_is_that_of_all_keys() {
    let policy = HttpPolicy::default().authority("Shop.example:8080");
    for (uri, host) in
        [("/a", "10.0.0.1:3000"), ("/a", "shop.example"), ("http://other/a", "b"), ("/a", "a:80")]
    {
        let admission = admit(&request("GET", uri, &[("host", host)]), &policy.requests);
        assert_eq!(admission, cached("http", "shop.example:8080", "/a"), "{uri} at {host}");
    }
    assert_eq!(
        admit(&request("GET", "/a", &[]), &policy.requests),
        cached("http", "shop.example:8080", "/a")
    );
    let twice = request("GET", "/a", &[("host", "a"), ("host", "a")]);
    assert_eq!(admit(&twice, &policy.requests), Admission::Bypass("host"), "RFC 9112, 3.2");
}

#[test]
fn cookies_that_are_not_listed_do_not_matter() {
    let lines = |cookies: &[&'static str]| cookies.iter().map(|line| ("cookie", *line)).collect::<Vec<_>>();
    let demands = |policy: &HttpPolicy, cookies: &[&'static str]| ask(&lines(cookies), policy);
    let listed = HttpPolicy::default().cookies(["session"]);
    let others = RequestDemands { other_cookies: true, ..RequestDemands::default() };
    for cookies in [&["_ga=1"][..], &["_ga=1; Session=2"], &["_ga=1", "b=2"], &[""]] {
        assert_eq!(demands(&listed, cookies), Ok(others), "{cookies:?}");
        assert_eq!(demands(&HttpPolicy::default(), cookies), Err(Rule::Credentials), "A2: {cookies:?}");
        let shared = HttpPolicy::default().share_cookies(true);
        assert_eq!(demands(&shared.clone().cookies(["session"]), cookies), Ok(others));
        assert_eq!(demands(&HttpPolicy::strict().cookies(["session"]), cookies), Ok(others));
    }
    for cookies in
        [&["session=1"][..], &["_ga=1; session=2"], &["_ga=1", "session=1"], &["session=1", "_ga=1"]]
    {
        assert_eq!(demands(&listed, cookies), Err(Rule::Credentials), "{cookies:?}");
        let shared = HttpPolicy::default().share_cookies(true).cookies(["session"]);
        let own = RequestDemands { has_cookie: true, ..RequestDemands::default() };
        assert_eq!(demands(&shared, cookies), Ok(own), "all of them go on: {cookies:?}");
        assert_eq!(
            demands(&HttpPolicy::strict().cookies(["session"]), cookies),
            Ok(RequestDemands::default())
        );
    }
    let keys = |cookie, policy: HttpPolicy| {
        let fields = [("host", "h"), ("authorization", "x"), ("cookie", cookie)];
        policy.cache_key(&request("GET", "/", &fields)).unwrap()
    };
    let private = || HttpPolicy::private().cookies(["session"]);
    assert_eq!(keys("_ga=1", private()), keys("_ga=2", private()), "ignored cookies are in no key");
    assert_ne!(keys("session=1", private()), keys("session=2", private()));
}

#[test]
fn an_extension_that_the_policy_names_makes_a_request_bypass() {
    #[derive(Clone)]
    struct Session;
    let policy = HttpPolicy::default().personal_extension::<u8>().personal_extension::<Session>();
    let mut own = request("GET", "/", &[("host", "h")]);
    assert_eq!(admit(&own, &policy.requests), cached("http", "h", "/"));
    own.extensions_mut().insert(Session);
    assert_eq!(admit(&own, &policy.requests), Admission::Bypass("extension"));
    assert_eq!(admit(&own, &RequestRules::default()), cached("http", "h", "/"));
    assert_eq!(policy, policy.clone().personal_extension::<Session>());
    assert_ne!(policy, HttpPolicy::default());
}
