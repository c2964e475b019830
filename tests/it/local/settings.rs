//! Settings that contradict each other are refused by name.

use std::time::Duration;

use stampede_guard::{ErrorKind, MemoryStore, Policy, StampedeGuard};

use super::keeping;

#[test]
fn contradictions_are_refused_by_name() {
    let error = Policy::builder().local_while_down(Duration::from_secs(1)).build().expect_err("refused");
    assert_eq!(error.kind(), ErrorKind::InvalidPolicy);
    let text = error.to_string();
    assert!(text.contains("local_while_down") && text.contains("set local_for"), "{text}");

    let build = |capacity, term| {
        let policy = keeping().build().expect("valid");
        let builder = StampedeGuard::builder(MemoryStore::new()).policy(policy);
        builder.local_capacity(capacity).local_term(term).build().expect_err("refused").to_string()
    };
    let text = build(1, Duration::from_secs(2));
    assert!(text.contains("local_capacity (1 bytes) and local_for"), "{text}");
    let text = build(64 << 20, Duration::from_millis(1));
    assert!(text.contains("local_term is 1ms: choose from 200ms to 60s"), "{text}");
}

#[test]
fn a_guard_without_copies_may_have_no_capacity() {
    let builder = StampedeGuard::builder(MemoryStore::new()).local_capacity(0);
    assert!(builder.build().expect("valid").health().local.is_none());
}
