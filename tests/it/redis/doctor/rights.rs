//! The doctor's report names the rights that a user lacks, and the smallest grant that adds them.

use super::*;

/// Takes one right of the minimal user away at a time: the report names that right.
#[tokio::test]
async fn a_right_that_is_missing_is_named() {
    let server = RedisServer::start();
    let without = |right: &str| server.run::<()>(&["ACL", "SETUSER", "minimal", &format!("-{right}")]);
    let again = |right: &str| server.run::<()>(&["ACL", "SETUSER", "minimal", &format!("+{right}")]);
    for (right, severity) in [
        ("set", Severity::Problem),
        ("lpos", Severity::Problem),
        ("del", Severity::Problem),
        ("mget", Severity::Problem),
        ("eval", Severity::Problem),
        ("evalsha", Severity::Problem),
        ("publish", Severity::Warning),
        ("zadd", Severity::Warning),
        ("zremrangebyscore", Severity::Warning),
        ("incr", Severity::Warning),
        ("hgetall", Severity::Warning),
        ("hmget", Severity::Warning),
        ("hset", Severity::Warning),
        ("hdel", Severity::Warning),
    ] {
        without(right);
        let report = as_minimal_user(&server).await;
        let rights = of(&report, "rights");
        assert_eq!(rights.severity, severity, "{right}: {report}");
        assert!(rights.found.contains(&right.to_uppercase()), "{right}: {report}");
        assert!(rights.advice.contains(&format!("+{right}")), "{right}: {report}");
        assert_nothing_left(&server, SOON).await;
        again(right);
    }
    assert_eq!(of(&as_minimal_user(&server).await, "rights").severity, Severity::Ok);
}

#[tokio::test]
async fn acl_dryrun_stands_in_where_no_script_may_run() {
    let server = RedisServer::start();
    server.run::<()>(&["ACL", "SETUSER", "minimal", "-eval", "-evalsha", "-lpos", "-zadd", "-hset"]);
    let report = as_minimal_user(&server).await;
    assert!(report.to_string().contains("could not be tried"), "{report}");

    server.run::<()>(&["ACL", "SETUSER", "minimal", "+acl|dryrun"]);
    let report = as_minimal_user(&server).await;
    assert_eq!(of(&report, "rights").found, "`minimal` may not EVAL, EVALSHA, LPOS", "{report}");
    assert!(report.to_string().contains("`minimal` may not ZADD"), "{report}");
    assert!(report.to_string().contains("`minimal` may not HSET"), "{report}");
    assert_nothing_left(&server, SOON).await;
}

/// Does exactly what the report advises, like an operator in a hurry.
fn follow(server: &RedisServer, report: &Report) {
    let advised = report.findings.iter().filter_map(|finding| {
        let rules = finding.advice.strip_prefix("ACL SETUSER minimal ")?;
        Some(rules.split(" (").next().unwrap_or(rules).split(';').next().unwrap_or(rules))
    });
    for rules in advised {
        let set = ["ACL", "SETUSER", "minimal"].into_iter().chain(rules.split_whitespace());
        server.run::<()>(&set.collect::<Vec<_>>());
    }
}

async fn as_shop(server: &RedisServer) -> Report {
    let client = redis::Client::open(server.minimal_user()).expect("an address");
    let guard = StampedeGuard::builder(client).namespace("shop").policy(patient()).build().expect("valid");
    opens(&guard).await;
    doctor(&guard).await
}

/// SECURITY.md recommends a user per service, so that no service can read another service's entries or take its locks.
#[tokio::test]
async fn advice_for_a_user_of_one_namespace_grants_its_keys_alone() {
    let server = RedisServer::start();
    server.run::<()>(&["ACL", "SETUSER", "minimal", "resetkeys", "~sg1:?:{shop:*"]);
    let report = as_shop(&server).await;
    let rights = of(&report, "rights");
    assert_eq!(rights.severity, Severity::Warning, "the keys of locks have longer heads: {report}");
    assert!(rights.found.contains("GET on sg1:mq:*"), "{report}");
    assert!(rights.advice.contains("~sg1:??:{shop:*"), "{report}");

    for had in ["~sg1:?:{shop:*", "~sg1:??:{shop:*", "~sg1:e:{shop:*", "~nothing"] {
        server.run::<()>(&["ACL", "SETUSER", "minimal", "resetkeys", had]);
        follow(&server, &as_shop(&server).await);
        let report = as_shop(&server).await;
        assert_eq!(of(&report, "rights").severity, Severity::Ok, "{had}: {report}");
        let client = redis::Client::open(server.minimal_user()).expect("an address");
        let mut connection = client.get_connection().expect("connected");
        for (key, may) in [("e:{shop:k}", true), ("e:{bank:k}", false), ("mq:{bank:k}", false)] {
            let got = redis::cmd("GET").arg(format!("sg1:{key}")).query::<Option<String>>(&mut connection);
            assert_eq!(got.is_ok(), may, "{had}: {key}: {got:?}");
        }
    }
}

/// `invalidate_replicas` needs more than the minimal rights. Without those, each invalidation returns an error.
#[tokio::test]
async fn required_replicas_that_are_missing_are_a_problem() {
    let (server, replica) = (RedisServer::start(), RedisServer::start());
    let asks = |replicas| {
        let policy = Policy::builder().coordination_budget(ms(2_000)).command_timeout(ms(1_000));
        policy.lease(SOON).invalidate_replicas(replicas, ms(1_000)).build().expect("valid")
    };
    let guard = local(&server, asks(1)).await;
    let report = doctor(&guard).await;
    let replicas = of(&report, "replicas");
    assert_eq!(replicas.severity, Severity::Problem, "{report}");
    assert!(replicas.found.contains("may not WAIT") && replicas.advice.contains("+wait"), "{report}");
    let error = guard.invalidate("k").await.expect_err("as it says");
    let causes = std::iter::successors(std::error::Error::source(&error), |error| error.source());
    let text = causes.map(ToString::to_string).collect::<Vec<_>>().join(": ");
    assert!(text.contains("doctor()"), "{text}");

    follow(&server, &report);
    let report = doctor(&guard).await;
    let replicas = of(&report, "replicas");
    assert_eq!(replicas.severity, Severity::Problem, "{report}");
    assert!(replicas.found.contains("0 of 1"), "{report}");

    replica.run::<()>(&["REPLICAOF", "127.0.0.1", &server.port().to_string()]);
    eventually("the replica follows", SOON, async || guard.invalidate("k").await.is_ok()).await;
    // A busy replica may need longer to acknowledge than the doctor waits, so the doctor is run again.
    eventually("it is in time", SOON, async || doctor(&guard).await.is_healthy()).await;
    let more = guard.with_policy(asks(2));
    let found = async || of(&doctor(&more).await, "replicas").found.clone();
    eventually("one of the two is", SOON, async || found().await.contains("1 of 2")).await;
    assert!(!doctor(&more).await.is_healthy());
}
