//! Retained invalidations: which changes settle them, which entries they hide, and how they overflow.

use super::*;
use crate::key::CacheKey;
use crate::value::entry::{Encoding, EntryKind};

fn retained(text: &str, is_tag: bool, attempt: u64) -> RetainedInvalidation {
    let key = Key::new("ns", &CacheKey::from(text));
    RetainedInvalidation { target: ChangeTarget { key, is_tag }, attempt, policy: Arc::default() }
}

#[test]
fn a_change_settles_only_what_had_begun_before_it() {
    let list = RetainedInvalidations::new("ns", 10);
    let [first, second, third] = [(); 3].map(|()| list.next_attempt());
    list.keep(retained("a", false, second));
    // A change that began before the retained one may have run before it, so its confirmation does not settle that.
    assert!(!list.confirmed(&retained("a", false, 0).target.name(), first, |_| 0));
    assert!(!list.confirmed(&retained("a", true, 0).target.name(), third, |_| 0), "the tag of that name");
    list.keep(retained("a", false, first));
    assert!(
        !list.confirmed(&retained("a", false, 0).target.name(), first, |_| 0),
        "the latest attempt counts"
    );
    assert!(list.confirmed(&retained("a", false, 0).target.name(), third, |_| 0));
    assert!(!list.any() && list.count() == 0);
}

#[test]
fn a_name_that_is_retained_already_needs_no_room() {
    let list = RetainedInvalidations::new("ns", 1);
    assert!(!list.keep(retained("a", false, 1)) && !list.keep(retained("a", false, 2)));
    assert!(list.keep(retained("b", false, 3)) && !list.keep(retained("c", false, 4)));
    let everything = ChangedName::tag(&crate::value::entry::tag_of_everything("ns"));
    assert!(!list.confirmed(&everything, 3, |_| 0), "c was retained after that");
    assert!(list.confirmed(&everything, 4, |_| 7));
    assert_eq!(list.count(), 0);
    let servable = list.servable(&retained("a", false, 0).target.key, &[]);
    let serves = |stored_at| {
        let (kind, encoding, payload) = (EntryKind::Value, Encoding::RAW, bytes::Bytes::new());
        let (expiry, validator, tags) = Default::default();
        let entry = Entry {
            kind,
            encoding,
            stored_at,
            tag_expired_at: u64::MAX,
            expiry,
            validator,
            tags,
            payload,
            packed: Default::default(),
        };
        list.may_serve(servable, &entry)
    };
    assert_eq!((serves(6), serves(7)), (false, true));
}

/// The load of any of these names may have begun before the name's invalidation, so the longest `load_timeout` counts.
#[test]
fn an_overflow_is_over_when_the_longest_load_of_its_names_has_ended() {
    let list = RetainedInvalidations::new("ns", 1);
    for (attempt, seconds) in [(1, 5), (2, 60), (3, 1)] {
        let policy = Policy::builder().load_timeout(Duration::from_secs(seconds)).build().expect("valid");
        list.keep(RetainedInvalidation {
            policy: Arc::new(policy),
            ..retained(&attempt.to_string(), false, attempt)
        });
    }
    let everything = ChangedName::tag(&crate::value::entry::tag_of_everything("ns"));
    let mut longest = Duration::ZERO;
    assert!(list.confirmed(&everything, 4, |load_timeout| {
        longest = load_timeout;
        0
    }));
    assert_eq!(longest, Duration::from_secs(60));
}

#[test]
fn one_task_sends_and_ends_only_without_work() {
    let list = RetainedInvalidations::new("ns", 10);
    assert!(!list.begin_to_send());
    list.keep(retained("a", false, 1));
    assert!(list.begin_to_send() && !list.begin_to_send());
    assert_eq!(list.to_send().len(), 1);
    assert!(list.confirmed(&retained("a", false, 0).target.name(), 2, |_| 0));
    list.keep(retained("b", false, 3));
    assert!(!list.begin_to_send(), "the task has not ended");
    assert!(list.confirmed(&retained("b", false, 0).target.name(), 4, |_| 0) && list.to_send().is_empty());
    list.keep(retained("c", false, 5));
    assert!(list.begin_to_send());
}
