//! The documented user has no right that the library does not use. (The other tests of this folder run as that user, so no right is missing
//! either.)

use std::collections::BTreeSet;

use crate::support::redis_server::MINIMAL_ACL;
use crate::support::root;

/// The commands that the library sends outside of scripts. (`invalidate_replicas`, other topologies and `Waiting::Keyspace` need
/// more, such as `set`.)
const PLAIN: [&str; 12] = [
    "get",
    "mget",
    "zmscore",
    "del",
    "evalsha",
    "eval",
    "subscribe",
    "unsubscribe",
    "ping",
    "hello",
    "auth",
    "time",
];

/// The paths and the texts of all scripts.
fn scripts() -> Vec<(String, String)> {
    let files = std::fs::read_dir(root().join("src/store/redis/scripts")).expect("the folder of the scripts");
    let scripts: Vec<_> = files
        .map(|file| {
            let path = file.expect("an entry").path();
            (path.display().to_string(), std::fs::read_to_string(&path).expect("a script"))
        })
        .collect();
    assert!(scripts.len() >= 8, "{scripts:?}");
    scripts
}

/// The commands that the script names in its line `-- calls:`.
fn documented(name: &str, script: &str) -> BTreeSet<String> {
    let line = script.lines().find_map(|line| line.strip_prefix("-- calls:"));
    let line = line.unwrap_or_else(|| panic!("{name} has no line `-- calls:`"));
    line.split_whitespace().map(str::to_owned).collect()
}

/// The commands that the script's code calls.
fn called(script: &str) -> BTreeSet<String> {
    let calls = script.split("redis.").skip(1).filter_map(|call| {
        let quoted = call.strip_prefix("call('").or_else(|| call.strip_prefix("pcall('"))?;
        Some(quoted.split('\'').next()?.to_lowercase())
    });
    calls.collect()
}

#[test]
fn the_minimal_user_has_exactly_the_rights_that_are_used() {
    let mut used: BTreeSet<String> = PLAIN.map(str::to_owned).into();
    for (name, script) in scripts() {
        used.extend(documented(&name, &script));
    }
    let granted: BTreeSet<String> =
        MINIMAL_ACL.split_whitespace().filter_map(|rule| rule.strip_prefix('+')).map(str::to_owned).collect();
    assert_eq!(granted, used);
    let others: Vec<_> = MINIMAL_ACL.split_whitespace().filter(|rule| !rule.starts_with('+')).collect();
    assert_eq!(others, ["on", ">pw", "~sg1:*", "resetchannels", "&sg1:*", "-@all"]);
}

#[test]
fn each_script_says_which_commands_it_calls() {
    let scripts = scripts();
    let prelude = |file: &str| {
        let (name, prelude) = scripts.iter().find(|(name, _)| name.ends_with(file)).expect("the prelude");
        documented(name, prelude)
    };
    // For each prelude, the text by which a script calls a function of it.
    let preludes = [
        ("wake(", "/wake.lua"),
        ("tell_first(", "/wake.lua"),
        ("may_be_ours(KEYS", "/ours.lua"),
        ("pass_on(", "/mutex.lua"),
        ("= open()", "/semaphore.lua"),
        ("tell_sooner(", "/lock_tell_sooner.lua"),
        ("next_place(", "/lock_passing.lua"),
        ("next_fence(", "/mutex_fence.lua"),
        ("give_again(", "/mutex_again.lua"),
        ("wait_in_queue(", "/mutex_queue.lua"),
        ("= opened(", "/volume.lua"),
        ("return announce(ARGV", "/announcing.lua"),
        ("return announced(", "/announcing.lua"),
        ("\nnote(KEYS", "/journal.lua"),
        ("note_invalidated(KEYS", "/journal.lua"),
    ];
    for (name, script) in &scripts {
        let mut calls = called(script);
        for (call, file) in preludes {
            if script.contains(call) {
                calls.extend(prelude(file));
            }
        }
        assert_eq!(documented(name, script), calls, "{name}");
    }
}

/// The documents name the additional rights of Sentinel and of a cluster, with which the tests of these topologies run.
#[cfg(all(feature = "cluster", feature = "sentinel"))]
#[test]
fn the_documents_name_what_sentinel_and_cluster_need() {
    let cluster = crate::support::cluster::CLUSTER_RIGHTS.join(" ");
    for text in [include_str!("../../../docs/redis.md"), include_str!("../../../SECURITY.md")] {
        assert!(
            text.contains(&format!("`{cluster}`"))
                && text.contains(&format!("`{}`", crate::support::sentinels::ROLE))
        );
    }
}

/// The documents create the same user that the tests use.
#[test]
fn the_documents_name_the_minimal_user() {
    let rights = |text: &str| -> BTreeSet<String> {
        text.split_whitespace().filter(|word| word.starts_with('+')).map(str::to_owned).collect()
    };
    for text in [include_str!("../../../docs/redis.md"), include_str!("../../../SECURITY.md")] {
        let from = text.find("ACL SETUSER").expect("it is there");
        let until = from + text[from..].find("```").expect("in a block");
        assert_eq!(rights(&text[from..until]), rights(MINIMAL_ACL));
    }
}
