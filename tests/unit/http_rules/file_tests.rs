use std::time::Duration;

use proptest::prelude::*;

use super::*;
use crate::http_rules::request_settings::RequestRules;
use crate::policy::Policy;

fn read(text: &str) -> Result<HttpPolicy, String> {
    serde_json::from_str(text).map_err(|error| error.to_string())
}

fn there_and_back(http: &HttpPolicy) -> HttpPolicy {
    let text = serde_json::to_string(http).expect("written");
    read(&text).unwrap_or_else(|error| panic!("{error}: {text}"))
}

#[test]
fn each_kind_is_written_and_read() {
    for (kind, http) in KINDS {
        assert_eq!(read(&format!("{{ \"kind\": {kind:?} }}")).expect("valid"), http());
        assert_eq!(there_and_back(&http()), http());
    }
    assert_eq!(read("{}").expect("valid"), HttpPolicy::default());
}

/// A field that is missing here must be added to `SETTINGS`, to `docs/policy.toml` and, if it can not change at run time, to
/// `HttpPolicy::fixed_setting`.
#[test]
fn each_field_of_an_http_policy_has_its_setting() {
    #[rustfmt::skip]
    let HttpPolicy {
        requests, scope: _, strict_rfc: _, set_cookie: _, default_lifetime: _, heuristic_freshness: _, ignore_request_no_cache: _,
        expose_key: _, path_tags: _, cache_groups: _, no_vary_search: _, tag_headers: _, answer_info: _, etag: _, query_method: _, query_content_limit: _, vary_on: _, max_variants: _, stale_on_disconnect: _, validate_within: _,
        retry_after: _, rate_limit_scope: _,
    } = HttpPolicy::default();
    #[rustfmt::skip]
    let RequestRules {
        heads: _, scheme: _, credentials: _, added: _, unkeyed: _, authorization: _, cookie: _, keyed_by_credentials: _, key: _,
        authority: _, cookies: _, query, pass_unkeyed_query: _, report: _, personal: _,
    } = requests;
    let QueryRules { ignored: _, only: _, is_sorted: _ } = query.as_deref().cloned().unwrap_or_default();
}

#[test]
fn the_order_in_a_file_does_not_matter() {
    let ordered = HttpPolicy::strict()
        .credential_headers([HeaderName::from_static("x-user")])
        .credential_header(HeaderName::from_static("x-tenant"))
        .share_authorized(false)
        .heuristic_freshness(false);
    let text = r#"{ "heuristic_freshness": false, "share_authorized": false, "more_credential_headers": ["x-tenant"],
                    "credential_headers": ["x-user"], "kind": "strict" }"#;
    assert_eq!(read(text).expect("valid"), ordered);
}

#[test]
fn bad_input_is_refused_with_the_name_of_its_setting() {
    for (name, values) in [
        ("kind", &["\"public\"", "1"][..]),
        ("scheme", &["\"ftp\"", "\"HTTPS\""]),
        ("authority", &["\"a b\"", "\"shop.example:80\"", "1"]),
        ("cookies", &["[\"a b\"]", "\"session\""]),
        ("ignore_query", &["[\"\"]", "[\"u*m\"]", "\"utm_*\"", "[1]"]),
        ("only_query", &["[\"page=\"]", "true"]),
        ("sort_query", &["1"]),
        ("pass_unkeyed_query", &["1"]),
        ("credential_headers", &["[\"a b\"]", "\"cookie\""]),
        ("more_credential_headers", &["[1]"]),
        ("share_authorized", &["\"yes\""]),
        ("share_cookies", &["1"]),
        (
            "behind_proxy",
            &["{}", "{ \"x-user\": \"1\" }", "{ \"x-forwarded-proto\": 1 }", "{ \"a b\": \"1\" }", "[]"],
        ),
        ("ignore_request_no_cache", &["1"]),
        ("expose_key", &["1"]),
        ("path_tags", &["1"]),
        ("cache_groups", &["1"]),
        ("no_vary_search", &["1", "\"params\""]),
        ("tag_headers", &["[\"a b\"]", "1"]),
        ("pass_tag_headers", &["1"]),
        ("answer_info", &["1"]),
        ("etag", &["1", "\"weak\""]),
        ("query_method", &["1", "\"yes\""]),
        ("query_content_limit", &["-1", "\"64 KiB\"", "16777217"]),
        ("default_lifetime", &["1"]),
        ("heuristic_freshness", &["1"]),
        ("vary_on", &["\"accept-language\"", "[\"a b\"]"]),
        ("max_variants", &["0", "-1"]),
        ("stale_on_disconnect", &["60", "\"11years\""]),
        ("validate_within", &["\"-1s\"", "\"max\""]),
        ("retry_after", &["60", "\"11years\""]),
        ("rate_limit_scope", &["\"fleet\"", "\"authority\""]),
        ("key", &["\"x-tenant\""]),
        ("personal_extension", &["\"Session\""]),
        ("shceme", &["\"https\""]),
    ] {
        for value in values {
            let text = format!("{{ {name:?}: {value} }}");
            let error = read(&text).expect_err(value);
            assert!(error.contains(name), "{name}, {value}: {error}");
            let in_policy = serde_json::from_str::<Policy>(&format!("{{ \"http\": {text} }}"));
            let error = in_policy.expect_err(value).to_string();
            assert!(error.contains(name), "{name}, {value}: {error}");
        }
    }
}

#[test]
fn a_policy_that_a_file_cannot_express_is_not_written() {
    let http = HttpPolicy::strict().share_cookies(false).share_cookies(true);
    let error = serde_json::to_string(&http).expect_err("`true` in a file would mean more").to_string();
    assert!(error.contains("no file can say"), "{error}");
    let policy = Policy::builder().http(http).build().expect("valid");
    serde_json::to_string(&policy).expect_err("not as the default");
}

#[test]
fn a_function_is_left_out_of_what_is_written() {
    let http = HttpPolicy::default().key(|_| None).personal_extension::<u8>().expose_key(true);
    assert_eq!(there_and_back(&http), HttpPolicy::default().expose_key(true));
    let policy = Policy::builder().http(http).build().expect("valid");
    let text = serde_json::to_string(&policy).expect("written");
    assert_eq!(
        *serde_json::from_str::<Policy>(&text).expect("read").http,
        HttpPolicy::default().expose_key(true)
    );
}

fn settings() -> impl Strategy<Value = HttpPolicy> {
    let names = || prop::collection::vec("x-[a-z]{1,6}", 0..4);
    let lists = (names(), prop::option::of(names()), names(), prop::option::of(names()));
    let choices = any::<(bool, bool, bool, bool, bool, bool)>();
    let rest = (0..3_usize, 1..1_000_usize, 0..100_000_000_u64, prop::option::of("[a-z]{1,9}(:8080)?"));
    (lists, choices, rest, prop::collection::vec("[ -~]{0,9}", 0..3)).prop_map(
        |(lists, choices, rest, hosts)| {
            let name = |text: &String| HeaderName::try_from(text).expect("a name");
            let (added, replaced, varied, cookies) = lists;
            let (authorized, shares, ignores, lives, guesses, https) = choices;
            let (kind, variants, ms, authority) = rest;
            let mut http = KINDS[kind].1()
                .ignore_request_no_cache(ignores)
                .path_tags(lives)
                .cache_groups(lives)
                .no_vary_search(ignores)
                .answer_info(ignores)
                .default_lifetime(lives)
                .heuristic_freshness(guesses)
                .max_variants(variants)
                .stale_on_disconnect(Duration::from_millis(ms))
                .validate_within(Duration::from_millis(ms / 2))
                .scheme(if https { Scheme::HTTPS } else { Scheme::HTTP });
            http = replaced.iter().fold(http, |http, names| http.credential_headers(names.iter().map(name)));
            http = added.iter().map(name).fold(http, HttpPolicy::credential_header);
            http = varied.iter().map(name).fold(http, HttpPolicy::vary_on);
            http = if authorized { http.share_authorized(shares) } else { http.share_cookies(shares) };
            http = http.ignore_query(&varied).sort_query(guesses).pass_unkeyed_query(ignores);
            http = cookies.iter().fold(http, HttpPolicy::only_query);
            http = cookies.into_iter().fold(http, HttpPolicy::cookies);
            http = authority.into_iter().fold(http, HttpPolicy::authority);
            let mut report = HeaderMap::new();
            for host in &hosts {
                report.append("x-forwarded-host", HeaderValue::from_str(host.trim()).expect("a value"));
            }
            if hosts.is_empty() { http } else { http.behind_proxy(report) }
        },
    )
}

proptest! {
    #[test]
    fn a_policy_that_is_written_is_read_as_it_was(http in settings()) {
        if http.refusal().is_none() {
            prop_assert_eq!(there_and_back(&http), http);
        }
    }
}
