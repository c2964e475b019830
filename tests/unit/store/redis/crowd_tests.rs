//! Long queues: each script call handles a bounded number of queue entries. Although other steps run between two calls, each waiter is
//! notified of the end of the lease that it waits for, and of no other lease.

use std::collections::BTreeSet;
use std::time::Duration;

use redis::{Cmd, Connection, FromRedisValue};

use super::scripts::{self, CallForm, Script};
use crate::store::Token;
use crate::store::contract::support::redis_server::RedisServer;

const NAME: &str = "ns:k";
const LEASE: Duration = Duration::from_secs(60);
/// More waiters than one call handles, and not a multiple of what it handles.
const WAITERS: usize = 1_234;

/// A server, and methods that each run one call of a script.
struct Steps {
    server: RedisServer,
    conn: Connection,
}

impl Steps {
    fn new() -> Self {
        let server = RedisServer::start();
        let conn = server.conn();
        Self { server, conn }
    }

    fn run<T: FromRedisValue>(&mut self, script: &Script, args: &[&str]) -> T {
        let mut cmd = script.call(CallForm { sha1: false, spread: false }, NAME, 0);
        cmd.arg(args).query(&mut self.conn).expect("an answer")
    }

    /// Sends an ACQUIRE, and returns the number in its answer that says which case it is.
    fn acquire(&mut self, token: &Token) -> i64 {
        self.acquire_behind(token, "")
    }

    fn acquire_behind(&mut self, token: &Token, behind: &str) -> i64 {
        let lease = LEASE.as_millis().to_string();
        let answer: Vec<redis::Value> =
            self.run(&scripts::ACQUIRE, &[token.as_str(), &lease, "", behind, "1", ""]);
        redis::from_redis_value(answer[0].clone()).expect("a number")
    }

    fn release(&mut self, token: &Token) -> i64 {
        self.run(&scripts::RELEASE, &[token.as_str()])
    }

    /// Calls WAKE REST once, which notifies further waiters of the end of this token's lease.
    fn goes_on(&mut self, token: &Token) -> i64 {
        self.run(&scripts::WAKE_REST, &[token.as_str(), &format!("w{}", token.as_str())])
    }

    fn waits(&mut self, number: usize) -> Token {
        let waiter = token();
        assert_eq!(self.acquire(&waiter), 4, "waiter {number}");
        waiter
    }

    fn queue(&mut self) -> Vec<String> {
        Cmd::lrange(format!("sg1:q:{{{NAME}}}"), 0, -1).query(&mut self.conn).expect("a list")
    }

    /// How many calls of this command the server has counted since its start.
    fn calls(&self, command: &str) -> usize {
        let stats: String = self.server.run(&["INFO", "commandstats"]);
        let line = stats.lines().find_map(|line| line.strip_prefix(&format!("cmdstat_{command}:calls=")));
        line.and_then(|line| line.split(',').next()?.parse().ok()).unwrap_or(0)
    }
}

/// A token of a new node, as of another process.
fn token() -> Token {
    Token::mint(uuid::Uuid::new_v4())
}

#[test]
fn a_release_notifies_a_long_queue_in_parts_and_each_process_once() {
    let mut steps = Steps::new();
    let holder = token();
    assert_eq!(steps.acquire(&holder), 3);
    for number in 0..WAITERS {
        steps.waits(number);
    }
    let (mut calls, mut notified) = (1, Vec::new());
    assert_eq!(steps.release(&holder), 11, "it has not notified all of them");
    notified.push(steps.calls("publish"));
    while steps.goes_on(&holder) == 11 {
        notified.push(steps.calls("publish") - notified.iter().sum::<usize>());
        calls += 1;
        assert!(calls < 100);
    }
    assert!(notified.iter().all(|count| *count <= 500), "{notified:?}");
    assert_eq!(steps.calls("publish"), WAITERS);
    assert_eq!(steps.queue(), Vec::<String>::new(), "the fence was removed with them");
}

#[test]
fn a_waiter_of_the_next_lease_is_not_notified_of_the_earlier_release() {
    let mut steps = Steps::new();
    let (holder, next) = (token(), token());
    assert_eq!(steps.acquire(&holder), 3);
    for number in 0..WAITERS {
        steps.waits(number);
    }
    assert_eq!(steps.release(&holder), 11);
    assert_eq!(steps.acquire(&next), 3);
    let later: BTreeSet<String> =
        (0..WAITERS).map(|number| steps.waits(number).as_str().to_owned()).collect();
    while steps.goes_on(&holder) == 11 {}
    assert_eq!(steps.queue().into_iter().collect::<BTreeSet<_>>(), later);
    assert_eq!(steps.calls("publish"), WAITERS);
    // The end of the later lease notifies its own waiters.
    assert_eq!(steps.release(&next), 11);
    while steps.goes_on(&next) == 11 {}
    assert_eq!(steps.calls("publish"), 2 * WAITERS);
    assert_eq!(steps.queue(), Vec::<String>::new());
}

/// The client that ended the lease was killed after its first call. A waiter that it has not notified retries when the lease would have
/// ended, and the end of that waiter's lease notifies all others.
#[test]
fn waiters_that_a_dead_client_has_not_notified_are_notified_by_the_next_release() {
    let mut steps = Steps::new();
    let (holder, next) = (token(), token());
    assert_eq!(steps.acquire(&holder), 3);
    let waiters: Vec<_> = (0..WAITERS).map(|number| steps.waits(number)).collect();
    assert_eq!(steps.release(&holder), 11);
    let retrying = &waiters[WAITERS - 1];
    assert_eq!(steps.acquire(retrying), 3, "the lease was free all the time");
    assert_eq!(steps.release(retrying), 11);
    while steps.goes_on(retrying) == 11 {}
    // The waiter that retried now holds a lease, and is not notified of its end.
    assert_eq!(steps.calls("publish"), WAITERS - 1);
    assert_eq!(steps.queue(), Vec::<String>::new());
    assert_eq!(steps.goes_on(&holder), 1, "its fence was removed");
    assert_eq!(steps.acquire(&next), 3);
}

#[test]
fn an_invalidation_notifies_a_long_queue_in_parts() {
    let mut steps = Steps::new();
    let (holder, fence) = (token(), Token::mint(uuid::Uuid::nil()));
    assert_eq!(steps.acquire(&holder), 3);
    for number in 0..WAITERS {
        steps.waits(number);
    }
    assert_eq!(steps.run::<i64>(&scripts::INVALIDATE, &["1", "", "", fence.as_str(), "0"]), 11);
    assert_eq!(steps.acquire(&token()), 3, "the first call has ended the lease");
    while steps.run::<i64>(&scripts::WAKE_REST, &[fence.as_str(), "x"]) == 11 {}
    assert_eq!(steps.calls("publish"), WAITERS + 1, "the holder, too");
    assert_eq!(steps.queue(), Vec::<String>::new());
}

/// The queue has 10,000 entries of ten dead processes. One call notifies each process once, and handles only a part of the entries.
#[test]
fn a_hand_over_notifies_a_dead_process_once_in_a_call() {
    let mut steps = Steps::new();
    let (holder, nodes) = (token(), [(); 10].map(|()| uuid::Uuid::new_v4()));
    assert_eq!(steps.acquire(&holder), 3);
    let waiters: Vec<_> =
        (0..10_000).map(|number| Token::mint(nodes[number % 10]).as_str().to_owned()).collect();
    Cmd::rpush(format!("sg1:q:{{{NAME}}}"), waiters).exec(&mut steps.conn).expect("laid");
    let lease = LEASE.as_millis().to_string();
    let hand_over = [holder.as_str(), &lease, "0", "0"];
    let mut calls = 1;
    while steps.run::<i64>(&scripts::HAND_OVER, &hand_over) == 3 {
        // If the client died between two calls, its token would still have the lease, which would expire.
        assert_eq!(steps.acquire(&holder), 3);
        calls += 1;
    }
    assert!((2..10).contains(&calls), "{calls}");
    let notified = steps.calls("publish");
    assert!((10..=10 * calls).contains(&notified), "{notified} in {calls}");
    assert_eq!(steps.acquire(&token()), 3, "it is free");
}

#[test]
fn a_hand_over_past_many_dead_processes_continues_where_it_stopped() {
    let mut steps = Steps::new();
    let (holder, lease) = (token(), LEASE.as_millis().to_string());
    assert_eq!(steps.acquire(&holder), 3);
    for number in 0..WAITERS {
        steps.waits(number);
    }
    let mut calls = 1;
    while steps.run::<i64>(&scripts::HAND_OVER, &[holder.as_str(), &lease, "0", "0"]) == 3 {
        assert!(steps.calls("publish") <= 500 * calls);
        calls += 1;
    }
    assert!(calls > 2, "{calls}");
    assert_eq!(steps.calls("publish"), WAITERS, "each of them once");
}
