use super::*;
use crate::error::ErrorKind;

const fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

fn refusal(builder: PolicyBuilder) -> String {
    let error = builder.build().expect_err("contradiction");
    assert_eq!(error.kind(), ErrorKind::InvalidPolicy);
    error.to_string()
}

#[test]
fn the_defaults_are_a_valid_policy() {
    assert_eq!(Policy::builder().build().expect("valid"), Policy::default());
}

#[test]
fn a_lease_of_one_second_is_accepted() {
    Policy::builder().lease(ms(1000)).build().expect("valid");
}

#[test]
fn wait_timeout_follows_load_timeout_and_lease() {
    let policy = Policy::builder().load_timeout(ms(5000)).lease(ms(1000)).build().expect("valid");
    assert_eq!(policy.wait_timeout, ms(6000));
    // The sum is in range whenever its parts are.
    let day = ms(86_400_000);
    let longest = Policy::builder()
        .load_timeout(day)
        .lease(day)
        .max_concurrent_loads(1)
        .permit_timeout(day, OnOverload::Shed);
    assert_eq!(longest.build().expect("valid").wait_timeout, day * 3);
}

#[test]
fn to_builder_rebuilds_the_same_policy() {
    let builders = [
        Policy::builder(),
        Policy::builder().load_timeout(ms(5000)).max_concurrent_loads(4).coordination_budget(ms(300)),
        Policy::builder().wait_timeout(ms(7), OnWaitTimeout::Fail).command_timeout(ms(20)).tags(["a"]),
    ];
    for builder in builders {
        let policy = builder.build().expect("valid");
        assert_eq!(policy.to_builder().build().expect("valid"), policy);
    }
    let longer = Policy::default().to_builder().load_timeout(ms(60_000)).coordination_budget(ms(300));
    let longer = longer.build().expect("valid");
    assert_eq!((longer.wait_timeout, longer.command_timeout), (ms(62_000), ms(150)));
    let own = Policy::builder().wait_timeout(ms(7), OnWaitTimeout::Fail).build().expect("valid");
    assert_eq!(own.to_builder().load_timeout(ms(1)).build().expect("valid").wait_timeout, ms(7));
}

#[test]
fn contradictions_name_both_settings() {
    let text = refusal(Policy::builder().lease(ms(150)));
    assert!(text.contains("lease (150ms)") && text.contains("command_timeout (50ms)"), "{text}");
    let text = refusal(Policy::builder().command_timeout(ms(500)));
    assert!(
        text.contains("command_timeout (500ms)") && text.contains("coordination_budget (100ms)"),
        "{text}"
    );
    let text = refusal(Policy::builder().error_for(ms(60_000)));
    assert!(text.contains("error_for (60s)") && text.contains("load_timeout (30s)"), "{text}");
}

#[test]
fn zero_and_nonsense_are_refused() {
    assert!(refusal(Policy::builder().fresh_for(Duration::ZERO)).contains("fresh_for"));
    assert!(refusal(Policy::builder().lease(Duration::ZERO)).contains("lease"));
    assert!(refusal(Policy::builder().load_timeout(Duration::ZERO)).contains("load_timeout"));
    assert!(refusal(Policy::builder().ttl_jitter(f64::NAN)).contains("ttl_jitter"));
    assert!(refusal(Policy::builder().ttl_jitter(-0.1)).contains("ttl_jitter"));
    assert!(refusal(Policy::builder().max_body(0)).contains("max_body"));
    assert!(refusal(Policy::builder().fresh_for(Duration::MAX)).contains("fresh_for"));
}
