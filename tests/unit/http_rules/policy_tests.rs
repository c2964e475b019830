use http::header::{ACCEPT, ACCEPT_ENCODING, AUTHORIZATION, COOKIE};

use super::*;
use crate::policy::Policy;

#[test]
fn each_starting_point_treats_credentials_in_its_own_way() {
    let facts = |policy: &HttpPolicy| {
        let listed = [AUTHORIZATION, COOKIE].map(|name| policy.requests.credentials.contains(&name));
        (listed, policy.requests.authorization, policy.requests.cookie, policy.set_cookie)
    };
    let (never, said, freely) = (CredentialRule::Never, CredentialRule::IfSaid, CredentialRule::Freely);
    assert_eq!(facts(&HttpPolicy::default()), ([true, true], never, never, never), "A1, A2, A3");
    assert_eq!(facts(&HttpPolicy::strict()), ([false, false], said, freely, freely), "RFC 9111, 3.5 and 7.3");
    assert_eq!(facts(&HttpPolicy::private()), ([true, true], never, never, freely));
    let opened = HttpPolicy::default().share_authorized(true).share_cookies(true);
    assert_eq!(facts(&opened), ([true, true], said, said, said), "only what says so");
    let closed = HttpPolicy::strict().share_authorized(false).share_cookies(false);
    assert_eq!(facts(&closed), ([true, true], never, never, never), "they bypass again");
    assert_eq!(HttpPolicy::strict().share_cookies(true), HttpPolicy::strict());
    let api_key = HeaderName::from_static("x-api-key");
    assert!(HttpPolicy::strict().requests.credentials.contains(&api_key));
}

#[test]
fn a_credential_that_was_added_stays_and_is_listed_once() {
    let token = HeaderName::from_static("x-tenant-token");
    let policy = HttpPolicy::private;
    for policy in [
        policy().credential_header(token.clone()).credential_headers([COOKIE]),
        policy().credential_headers([COOKIE]).credential_header(token.clone()),
    ] {
        assert_eq!(policy.requests.credentials.names, [COOKIE, token.clone()], "A1: before it, or after");
    }
    let twice = policy().credential_header(COOKIE).requests.credentials;
    assert_eq!(twice, policy().requests.credentials, "A1: a name more would make other keys");
}

#[test]
fn settings_are_added_to_those_of_a_policy() {
    let name = HeaderName::from_static("x-user");
    let http = HttpPolicy::default().credential_header(name.clone()).scheme(Scheme::HTTPS);
    let policy = Policy::builder().http(http).build().unwrap();
    assert_eq!(policy.to_builder().build().unwrap(), policy);
    let http = policy.http().clone().credential_headers([]);
    let changed = policy.to_builder().http(http).build().unwrap().http.requests.clone();
    assert_eq!((changed.credentials.names, changed.scheme), (vec![name], Scheme::HTTPS));
}

#[test]
fn vary_on_names_are_sorted_and_unique() {
    let policy = HttpPolicy::default().vary_on(ACCEPT_ENCODING).vary_on(ACCEPT).vary_on(ACCEPT);
    assert_eq!(policy.vary_on, [ACCEPT, ACCEPT_ENCODING]);
}

#[test]
fn contradictory_settings_are_refused() {
    for policy in [HttpPolicy::default(), HttpPolicy::strict(), HttpPolicy::private()] {
        assert_eq!(policy.refusal(), None);
    }
    let refusal = |policy: HttpPolicy| policy.refusal().unwrap();
    assert!(refusal(HttpPolicy::default().max_variants(0)).contains("max_variants"));
    assert!(refusal(HttpPolicy::default().validate_within(Duration::MAX)).contains("validate_within"));
    let many = (0..9).map(|n| HeaderName::try_from(format!("x-{n}")).unwrap());
    assert!(refusal(many.fold(HttpPolicy::default(), HttpPolicy::vary_on)).contains("vary_on"), "A5");
}

#[test]
fn a_policy_equals_itself_with_its_hook_only() {
    let policy = HttpPolicy::default().key(|_| None);
    assert_eq!(policy, policy.clone());
    assert_ne!(policy, HttpPolicy::default());
    assert_ne!(policy, HttpPolicy::default().key(|_| None));
    assert!(format!("{policy:?}").contains("KeyHook"), "a closure has no other description");
}
