use proptest::prelude::*;

use super::*;

fn read(text: &str) -> Result<Policy, String> {
    serde_json::from_str(text).map_err(|error| error.to_string())
}

/// The policy after it was written to a file and read back.
fn there_and_back(policy: &Policy) -> Policy {
    let text = serde_json::to_string(policy).expect("written");
    read(&text).unwrap_or_else(|error| panic!("{error}: {text}"))
}

#[test]
fn a_file_without_settings_is_the_default_policy() {
    assert_eq!(read("{}").expect("valid"), Policy::default());
    assert_eq!(there_and_back(&Policy::default()), Policy::default());
}

#[test]
fn a_setting_that_a_file_leaves_out_follows_the_others() {
    let policy = read(r#"{ "load_timeout": "5s", "lease": "1s", "coordination_budget": "300ms" }"#);
    let policy = policy.expect("valid");
    assert_eq!(policy.wait_timeout, Duration::from_secs(6));
    assert_eq!(policy.command_timeout, Duration::from_millis(150));
}

/// A field that is missing here must be added to `SETTINGS`, to `docs/policy.toml` and, if it can not change at run time, to
/// `Policy::fixed_setting`.
#[test]
fn each_field_of_a_policy_has_its_setting() {
    #[rustfmt::skip]
    let Policy {
        name: _, counters: _, fresh_for: _, ttl_jitter: _, stale_while_revalidate: _, local_for: _, local_while_down: _,
        local_elsewhere: _, stale_if_error: _, back_off: _, negative_for: _, on_absent: _, soft_timeout: _, early_refresh: _,
        refresh_ahead: _, lease: _, load_timeout: _, tags: _, invalidate_all: _, replicas: _, max_concurrent_loads: _, adaptive_loads: _,
        permit_timeout: _, on_overload: _, max_waiters: _, when_full: _, wait_timeout: _, on_wait_timeout: _, coordination_budget: _,
        command_timeout: _, on_store_down: _, max_fail_open_loads: _, error_for: _, errors: _, audit: _, shadow: _, codec: _, max_body: _, max_tags: _,
        compress_from: _, #[cfg(feature = "http")] http: _,
    } = Policy::default();
}

#[test]
fn durations_have_units() {
    let of = |text: &str| read(&format!(r#"{{ "fresh_for": {text} }}"#)).map(|policy| policy.fresh_for);
    for (text, ms) in [
        ("\"250ms\"", 250),
        ("\"30s\"", 30_000),
        ("\"5m\"", 300_000),
        ("\"1h30m\"", 5_400_000),
        ("\"1h 30m\"", 5_400_000),
        ("\" 1 h30min 1000ms \"", 5_401_000),
        ("\"1.5h 0.5s\"", 5_400_500),
        ("\"2d\"", 172_800_000),
    ] {
        assert_eq!(of(text).expect(text), Duration::from_millis(ms), "{text}");
    }
    for text in [
        "30",
        "30.5",
        "\"30\"",
        "\"1h 30\"",
        "\"1h m\"",
        "\"1h-30m\"",
        "\"30 parsecs\"",
        "\"-5s\"",
        "-5",
        "\"\"",
        "true",
        "null",
        "[\"30s\"]",
        "{}",
    ] {
        let error = of(text).expect_err(text);
        assert!(error.starts_with("fresh_for: "), "{text}: {error}");
    }
}

#[test]
fn bad_input_is_refused_with_the_name_of_its_setting() {
    for (name, values) in [
        ("name", &["\"\"", "\"a b\"", "1"][..]),
        (
            "fresh_for",
            &[
                "\"0s\"",
                "\"11years\"",
                "\"max\"",
                // The sum of both parts is one second more than a `Duration` can hold.
                "\"18446744073709551615s 1000ms\"",
                "\"18446744073709551614s 1s 1000ms\"",
                "\"18446744073709551615s 1s\"",
            ],
        ),
        ("stale_while_revalidate", &["\"11years\""]),
        ("stale_if_error", &["\"11years\""]),
        ("back_off", &["\"0s\"", "\"2d\""]),
        ("negative_for", &["\"0s\""]),
        ("soft_timeout", &["\"0s\""]),
        ("early_refresh", &["-1", "101", "\"1\""]),
        ("refresh_ahead", &["-0.5", "1"]),
        ("on_absent", &["\"Negative\"", "true"]),
        ("ttl_jitter", &["-0.1", "1", "1e400"]),
        ("lease", &["\"1ms\"", "\"2d\"", "\"150ms\""]),
        ("load_timeout", &["\"0s\"", "\"2d\""]),
        ("max_concurrent_loads", &["0", "-1", "1.5", "4294967296", "\"4\""]),
        (
            "adaptive_loads",
            &["1", "\"yes\"", "{ \"min\": 0 }", "{ \"max\": 1 }", "{ \"start\": 9999 }", "{ \"limit\": 3 }"],
        ),
        ("permit_timeout", &["\"2d\""]),
        ("permit_timeout_then", &["\"Shed\"", "true"]),
        ("max_waiters", &["0", "-1", "\"none\""]),
        ("max_waiters_then", &["\"queue\""]),
        ("wait_timeout", &["\"0s\"", "\"4d\""]),
        ("wait_timeout_then", &["\"shed\""]),
        ("coordination_budget", &["\"1ms\"", "\"2d\""]),
        ("command_timeout", &["\"0s\"", "\"500ms\""]),
        ("on_store_down", &["\"FailOpen\""]),
        ("max_fail_open_loads", &["0"]),
        ("error_for", &["\"1h\"", "\"2d\""]),
        ("tags", &["\"shop\"", "[1]", "[\"\"]", "[[\"a\", 1]]"]),
        ("invalidate_all", &["1"]),
        (
            "invalidate_replicas",
            &["1", "{ \"replicas\": 1 }", "{ \"replicas\": 1, \"timeout\": \"2m\" }", "{ \"within\": 1 }"],
        ),
        ("audit", &["2", "-0.1"]),
        ("audit_grace", &["\"2d\""]),
        ("audit_by", &["\"equal\""]),
        ("share_errors", &["\"ApiError\""]),
        ("shadow", &["\"yes\""]),
        ("codec", &["\"xml\""]),
        ("max_body", &["0", "268435457", "\"1 MiB\""]),
        ("max_tags", &["257", "-1", "\"1\""]),
        ("local_elsewhere", &["0"]),
        ("fresh_fro", &["\"30s\""]),
        #[cfg(feature = "lz4")]
        ("compress_from", &["-1", "\"4 KiB\""]),
        ("local_while_down", &["\"1m\"", "\"11years\""]),
    ] {
        for value in values {
            let error = read(&format!("{{ {name:?}: {value} }}")).expect_err(value);
            assert!(error.contains(name) || *value == "1e400", "{name}, {value}: {error}");
        }
    }
    let twice = read(r#"{ "audit": 0.5, "audit": 0.1 }"#).expect_err("twice");
    assert!(twice.starts_with("audit: it is set twice"), "{twice}");
}

#[test]
fn contradictions_name_both_settings() {
    for (text, names) in [
        (r#"{ "lease": "150ms" }"#, ["lease (150ms)", "command_timeout (50ms)"]),
        (r#"{ "command_timeout": "500ms" }"#, ["command_timeout (500ms)", "coordination_budget (100ms)"]),
        (r#"{ "error_for": "1m" }"#, ["error_for (60s)", "load_timeout (30s)"]),
        (r#"{ "local_while_down": "1m" }"#, ["local_while_down (60s)", "local_for (0ns)"]),
    ] {
        let error = read(text).expect_err(text);
        assert!(names.iter().all(|name| error.contains(name)), "{error}");
    }
}

#[test]
fn a_refusal_of_an_unknown_setting_lists_the_known_ones() {
    let error = read(r#"{ "fresh_fro": "30s" }"#).expect_err("unknown");
    assert!(error.starts_with("fresh_fro: there is no such setting; there are name, fresh_for, "), "{error}");
}

#[test]
fn tags_are_texts_or_lists_of_parts() {
    let policy = read(r#"{ "tags": ["two words", ["user", "a:b", "{%}"], "a:b"] }"#).expect("valid");
    assert_eq!(policy.tags, ["two words".into(), CacheKey::from(("user", "a:b", "{%}")), "a:b".into()]);
    assert_eq!(there_and_back(&policy), policy);
}

#[test]
fn a_policy_that_no_file_can_hold_is_not_written() {
    let policy = Policy::builder().tags([CacheKey::from(&[0xff_u8][..])]).build().expect("valid");
    let error = serde_json::to_string(&policy).expect_err("no text").to_string();
    assert!(error.contains("a tag that is no text"), "{error}");
}

#[test]
fn a_function_is_left_out_of_what_is_written() {
    let policy = Policy::builder().audit(0.5).audit_by(|a: &u8, b: &u8| a == b).build().expect("valid");
    let read = there_and_back(&policy);
    assert_eq!(read.audit.fraction, 0.5);
    assert!(read.audit.same.is_none());
}

#[test]
fn a_type_is_left_out_of_what_is_written() {
    let policy = Policy::builder().share_errors::<String>().share_errors::<u8>().build().expect("valid");
    assert_eq!(there_and_back(&policy), Policy::default());
}

#[test]
fn a_number_without_a_bound_has_a_text() {
    let policy = Policy::builder().max_waiters(usize::MAX, OnOverload::Shed).max_fail_open_loads(usize::MAX);
    let policy = policy.build().expect("valid");
    assert_eq!(there_and_back(&policy), policy);
    let read = read(r#"{ "max_waiters": "max", "max_fail_open_loads": "max" }"#).expect("valid");
    assert_eq!(read, policy);
}

/// For each setting some values. Combinations of them may contradict each other.
fn settings() -> impl Strategy<Value = PolicyBuilder> {
    let time = || prop_oneof![Just(0), 1_u64..5_000, 0..400_000_000_u64].prop_map(Duration::from_millis);
    let choice = any::<(bool, bool, bool, bool, bool, bool)>();
    let most = prop_oneof![Just(usize::MAX), Just(10_000), 1..usize::MAX];
    let numbers = (0..1_000_u32, any::<Option<u32>>(), most, prop::collection::vec(".{1,8}", 0..4));
    let times = (time(), time(), time(), prop::option::of(time()), prop::option::of(time()), time());
    (times, (time(), time(), prop::option::of(time())), choice, numbers).prop_map(
        |(times, more, choice, numbers)| {
            let (fresh_for, stale, error, soft, negative, load) = times;
            let (lease, permit, wait) = more;
            let (shed, closed, json, all, shadow, fail) = choice;
            let (thousandths, cap, most, tags) = numbers;
            // There are few digits, because serde_json may read a longer fraction with an error in its last bit.
            let fraction = f64::from(thousandths) / 1_000.0;
            let overload = if shed { OnOverload::Shed } else { OnOverload::LoadAnyway };
            let mut builder = Policy::builder()
                .name("shop")
                .fresh_for(fresh_for)
                .stale_while_revalidate(stale)
                .stale_if_error(error)
                .load_timeout(load)
                .lease(lease)
                .permit_timeout(permit, overload)
                .max_waiters(most, overload)
                .max_fail_open_loads(most)
                .on_store_down(if closed { OnStoreDown::FailClosed } else { OnStoreDown::FailOpen })
                .codec(if json { Codec::Json } else { Codec::MessagePack })
                .invalidate_all(all)
                .shadow(shadow)
                .on_absent(if shed { OnAbsent::Fail } else { OnAbsent::Negative })
                .audit(fraction)
                .refresh_ahead(fraction)
                .ttl_jitter(f64::from(thousandths) / 2_000.0)
                .early_refresh(f64::from(thousandths) / 10.0)
                .tags(tags);
            builder = soft.into_iter().fold(builder, PolicyBuilder::soft_timeout);
            builder = negative.into_iter().fold(builder, PolicyBuilder::negative_for);
            builder = cap.into_iter().fold(builder, PolicyBuilder::max_concurrent_loads);
            builder = cap.into_iter().fold(builder, |builder, cap| {
                builder.adaptive_loads(AdaptiveLoads::new().name("db").start(cap).max(cap))
            });
            builder = cap.into_iter().fold(builder, |builder, cap| {
                builder.invalidate_replicas(cap, Duration::from_nanos(1_234_567))
            });
            let then = if fail { OnWaitTimeout::Fail } else { OnWaitTimeout::Load };
            wait.into_iter().fold(builder, |builder, wait| builder.wait_timeout(wait, then))
        },
    )
}

proptest! {
    #[test]
    fn a_policy_that_is_written_is_read_as_it_was(builder in settings()) {
        if let Ok(policy) = builder.build() {
            prop_assert_eq!(there_and_back(&policy), policy);
        }
    }
}
