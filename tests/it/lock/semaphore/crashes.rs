//! If a process, a connection or an answer is lost at any moment, that costs the other clients at most one lease, and no permit is lost or
//! doubled.

use futures_util::future::join_all;

use super::*;
use crate::support::proxy::{Mode, Proxy};

/// Long enough for a busy machine to renew it in time, and short enough to wait for its end.
const LEASE: Duration = Duration::from_secs(3);
/// A lease in milliseconds. A test fails if a client waits for its end.
const LONG: u64 = 120_000;
/// The lease of holders that are killed in large numbers.
const SHORT: Duration = Duration::from_millis(300);

/// Checks that exactly this many permits can be acquired.
async fn there_are_exactly(permits: u32, semaphore: &Semaphore) {
    let mut held = Vec::new();
    for _ in 0..permits {
        held.push(free(semaphore).await);
    }
    assert!(none_is_free(semaphore).await, "one more than {permits}");
    for mut permit in held {
        assert!(permit.release().await.expect("asks").was_held);
    }
}

/// S4.16, S4.35: the next waiter gets the permit when the lease ends, also if the holder renewed it until it was killed.
#[tokio::test]
async fn a_killed_holder_costs_one_lease() {
    let killed = async |renewing: bool| {
        let server = RedisServer::start();
        let semaphore = semaphore(&node(&server).await, 1);
        let fleet = processes(&server, 1).await;
        let holder = fleet.member(0);
        let more = if renewing { " renewing" } else { "" };
        let since = Instant::now();
        holder.send(&format!("take t s 1 {} forever{more}", LEASE.as_millis()));
        taken(holder, "t").await.token.expect("it is free");
        if renewing {
            tokio::time::sleep(LEASE * 3 / 2).await;
            assert!(none_is_free(&semaphore).await);
        }
        let next = waiter(&semaphore);
        queued(&semaphore, 1).await;
        let killed = Instant::now();
        holder.kill();
        let _next = granted(next).await;
        assert!(since.elapsed() >= LEASE - ms(2), "{:?}", since.elapsed());
        assert!(killed.elapsed() <= LEASE + A_MOMENT, "{:?}", killed.elapsed());
    };
    tokio::join!(killed(false), killed(true));
}

/// Waiters that have died in the queue delay no later waiter.
#[tokio::test]
async fn killed_waiters_are_passed_over() {
    let server = RedisServer::start();
    let semaphore = semaphore(&node(&server).await, 1);
    let fleet = processes(&server, 2).await;
    let mut held = free(&semaphore).await;
    for (before, member) in [0, 1, 0].map(|index| fleet.member(index)).into_iter().enumerate() {
        member.send(&format!("take t{before} s 1 {LONG} forever"));
        queued(&semaphore, before as u32 + 1).await;
    }
    let next = waiter(&semaphore);
    queued(&semaphore, 4).await;
    fleet.members().iter().for_each(Member::kill);
    eventually_eq("the server notices", SOON, 1, async || server.pubsub_clients()).await;
    let since = Instant::now();
    held.release().await.expect("asks");
    let mut next = granted(next).await;
    assert!(since.elapsed() < AT_ONCE, "{:?}", since.elapsed());
    next.release().await.expect("asks");
    there_are_exactly(1, &semaphore).await;
}

/// A grant reaches the connection of a stopped process. That costs the lease of the stopped waiter, as if it had been killed, however long
/// the previous holder's lease was. When the process resumes, it notices that it is not the holder, and waits for another permit.
#[tokio::test]
async fn a_stopped_waiter_costs_one_lease_and_waits_on() {
    let stopped = async |others: Duration| {
        let server = RedisServer::start();
        let semaphore = with(&node(&server).await, 1, |builder| builder.lease(others).auto_renew(true));
        let fleet = processes(&server, 1).await;
        let stopped = fleet.member(0);
        let mut held = free(&semaphore).await;
        stopped.send(&format!("take t s 1 {} forever", LEASE.as_millis()));
        queued(&semaphore, 1).await;
        let next = waiter(&semaphore);
        queued(&semaphore, 2).await;
        stopped.pause();
        let since = Instant::now();
        held.release().await.expect("asks");
        let mut next = granted(next).await;
        let took = since.elapsed();
        assert!((LEASE - ms(2)..=LEASE + A_MOMENT).contains(&took), "{took:?}");
        stopped.resume();
        queued(&semaphore, 1).await;
        assert!(next.is_held().await.expect("asks"));
        if stopped.events("t") > 0 {
            panic!("it does not hold it: {:?}", taken(stopped, "t").await);
        }
        next.release().await.expect("asks");
        let token = taken(stopped, "t").await.token.expect("it waits for ever");
        assert!(semaphore.holds(&token).await.expect("asks"));
        stopped.send("give t");
        assert_eq!(stopped.wait_event("gave").await[0], true);
        there_are_exactly(1, &semaphore).await;
    };
    tokio::join!(stopped(LEASE), stopped(LEASE * 20));
}

/// S4.14: it would be a flaw not to record a grant with its holder. Ten processes with twenty waiters each are killed while they are
/// granted their permits.
#[tokio::test]
async fn two_hundred_waiters_killed_at_their_grant_lose_no_permit() {
    const PROCESSES: usize = 10;
    const WAITERS: usize = 20;
    let server = RedisServer::start();
    let locks = node(&server).await;
    let fleet = processes(&server, PROCESSES).await;
    let mut rounds = Vec::new();
    for (index, member) in fleet.members().iter().enumerate() {
        let mut held = Vec::new();
        for waiter in 0..WAITERS {
            let name = format!("s{index}-{waiter}");
            let semaphore = locks.semaphore(&*name, 2).build().expect("valid");
            let both = (free(&semaphore).await, free(&semaphore).await);
            member.send(&format!("take {waiter} {name} 2 {} forever", SHORT.as_millis()));
            held.push((semaphore, both));
        }
        rounds.push((member, held));
    }
    let mut killed_as_holders = 0;
    for (member, mut held) in rounds {
        for (semaphore, _) in &held {
            queued(semaphore, 1).await;
        }
        let releases = held.iter_mut().map(|(_, (permit, _))| permit.release());
        let kill = async {
            tokio::time::sleep(Duration::from_micros(fastrand::u64(..3_000))).await;
            member.kill();
        };
        let (released, ()) = tokio::join!(join_all(releases), kill);
        for released in released {
            assert!(released.expect("asks").was_held);
        }
        for (semaphore, (_, other)) in &mut held {
            killed_as_holders += u32::from(available(semaphore).await == 0);
            eventually_eq("it is back", SHORT + AT_ONCE, 1, async || available(semaphore).await).await;
            there_are_exactly(1, semaphore).await;
            assert!(other.release().await.expect("asks").was_held);
            there_are_exactly(2, semaphore).await;
        }
    }
    assert!(killed_as_holders > 0, "no process was killed at a grant");
}

/// S4.13: it would be a flaw to leave a semaphore half created, on which every client waits for ever. Eight processes are killed while each
/// of them creates 25 semaphores.
#[tokio::test]
async fn processes_killed_while_they_create_block_no_client() {
    const PROCESSES: usize = 8;
    const SEMAPHORES: usize = 25;
    let server = RedisServer::start();
    let locks = node(&server).await;
    let fleet = processes(&server, PROCESSES).await;
    for member in fleet.members() {
        for semaphore in 0..SEMAPHORES {
            let name = format!("s{}-{semaphore}", member.index());
            member.send(&format!("take {semaphore} {name} 2 {} forever", SHORT.as_millis()));
        }
    }
    for member in fleet.members() {
        tokio::time::sleep(Duration::from_micros(fastrand::u64(..2_000))).await;
        if member.index() + 1 == PROCESSES {
            let begun = async || server.keys().iter().any(|key| key.starts_with("sg1:sm:"));
            eventually("they have begun", SOON, begun).await;
        }
        member.kill();
    }
    assert_eq!(server.keys_without_ttl(), Vec::<String>::new());
    for name in (0..PROCESSES).flat_map(|member| (0..SEMAPHORES).map(move |at| format!("s{member}-{at}"))) {
        let semaphore = locks.semaphore(name, 2).build().expect("valid");
        eventually_eq("both are there", SHORT + AT_ONCE, 2, async || available(&semaphore).await).await;
        there_are_exactly(2, &semaphore).await;
    }
}

/// A node behind a proxy, with a command timeout of two and a half seconds, and a node with a direct connection.
async fn behind_a_proxy() -> (RedisServer, Proxy, [Semaphore; 2]) {
    let server = RedisServer::start();
    let proxy = Proxy::start(server.port()).await;
    let url = format!("redis://minimal:pw@127.0.0.1:{}/", proxy.port());
    let client = redis::Client::open(url).expect("an address");
    let behind = Locks::builder(client).command_timeout(A_MOMENT).build().expect("valid");
    connect(&behind).await;
    let direct = node(&server).await;
    let handles = [semaphore(&behind, 2), semaphore(&direct, 2)];
    // The server knows the scripts from here on.
    drop(free(&handles[1]).await);
    eventually_eq("all are free", SOON, 2, async || available(&handles[1]).await).await;
    (server, proxy, handles)
}

/// Acquires a free permit through the proxy. Repeats the call until the store answers.
async fn free_behind(behind: &Semaphore) -> Permit {
    retried(async || behind.acquire(Wait::Now).await).await.expect("one is free")
}

/// A permit is granted and the answer lost: the caller receives an error, and the permit is free again at once.
#[tokio::test]
async fn a_permit_is_released_when_the_answer_to_its_grant_is_lost() {
    let unanswered = async |wait: Wait| {
        let (_server, proxy, [behind, direct]) = behind_a_proxy().await;
        proxy.set(Mode::NoReplies);
        let acquired = tokio::spawn(async move { behind.acquire(wait).await });
        // This is checked while the call is still pending: when the call fails, it releases the permit at once.
        eventually_eq("it was granted", SOON, 1, async || available(&direct).await).await;
        let error = acquired.await.expect("joined");
        assert!(error.as_ref().is_err_and(LockError::is_store), "{wait:?}: {error:?}");
        proxy.set(Mode::Pass);
        eventually_eq("it is released", SOON / 2, 2, async || available(&direct).await).await;
        there_are_exactly(2, &direct).await;
    };
    tokio::join!(unanswered(Wait::Now), unanswered(Wait::For(ms(200))), unanswered(Wait::Forever));
}

/// A permit is released and the answer lost: its holder may release it again, which does not affect other holders.
#[tokio::test]
async fn a_release_with_a_lost_answer_counts_once() {
    let (_server, proxy, [behind, direct]) = behind_a_proxy().await;
    let mut held = free_behind(&behind).await;
    proxy.set(Mode::NoReplies);
    let error = held.release().await;
    assert!(error.as_ref().is_err_and(LockError::is_store), "{error:?}");
    eventually_eq("it is released", SOON, 2, async || available(&direct).await).await;
    let _others = [free(&direct).await, free(&direct).await];
    proxy.set(Mode::Pass);
    let again = async || held.release().await;
    let released = tokio::time::timeout(SOON, retried(again)).await.expect("the connection is made again");
    assert!(!released.was_held);
    assert!(none_is_free(&direct).await, "it was not released twice");
}

/// A permit is dropped while the server is unreachable. It is released once the server is reachable, not only when its lease ends.
#[tokio::test]
async fn a_permit_dropped_while_disconnected_is_released_on_reconnection() {
    let (_server, proxy, [behind, direct]) = behind_a_proxy().await;
    let held = free_behind(&behind).await;
    proxy.set(Mode::BlackHole);
    drop(held);
    assert!(behind.acquire(Wait::Now).await.is_err_and(|error| error.is_store()), "it is cut off");
    assert_eq!(available(&direct).await, 1);
    proxy.set(Mode::Pass);
    eventually_eq("it is released", SOON / 2, 2, async || available(&direct).await).await;
    there_are_exactly(2, &direct).await;
}

/// The connections are dead without a sign, as when a firewall has forgotten them. To the server, the grant has arrived.
#[tokio::test]
async fn a_grant_into_a_dead_connection_is_found() {
    let (server, proxy, [behind, direct]) = behind_a_proxy().await;
    let mut held = [free(&direct).await, free(&direct).await];
    let waiters = [passer(&behind), passer(&behind), passer(&behind)];
    queued(&direct, 3).await;
    // Replies arrive in order: after this reply, the waiters know that they are in the queue.
    assert_eq!(available(&behind).await, 0);
    let inboxes = server.pubsub_clients();
    proxy.set(Mode::BlackHoleOld);
    held[0].release().await.expect("asks");
    assert_eq!((available(&direct).await, direct.waiting().await.expect("asks")), (0, 2), "it was granted");
    assert_eq!(server.pubsub_clients(), inboxes);
    for waiter in waiters {
        assert!(tokio::time::timeout(SOON, waiter).await.expect("within seconds").expect("it is granted"));
    }
    held[1].release().await.expect("asks");
    there_are_exactly(2, &direct).await;
}

/// The subscription on which the grant would arrive is cut just before the release. The waiter finds its grant after it has subscribed
/// again.
#[tokio::test]
async fn a_grant_sent_while_unsubscribed_is_found() {
    let server = RedisServer::start();
    let [one, other] = nodes(&server).await;
    let (a, b) = (semaphore(&one, 1), semaphore(&other, 1));
    for _ in 0..5 {
        let mut held = free(&a).await;
        let waiters = [passer(&b), passer(&b)];
        queued(&a, 2).await;
        assert_eq!(server.kill_pubsub(), 2);
        held.release().await.expect("asks");
        let since = Instant::now();
        for waiter in waiters {
            assert!(waiter.await.expect("it is granted"));
        }
        assert!(since.elapsed() < SOON, "{:?}", since.elapsed());
        eventually_eq("both hear again", SOON, 2, async || server.pubsub_clients()).await;
    }
    there_are_exactly(1, &a).await;
}

/// The server loses all its data, and all connections stay open.
#[tokio::test]
async fn waiters_outlive_flushall() {
    let server = RedisServer::start();
    let [one, other] = nodes(&server).await;
    let [a, b] = [&one, &other].map(|locks| with(locks, 1, |builder| builder.lease(LEASE)));
    let _held = free(&a).await;
    let waiters = [passer(&b), passer(&b), passer(&a)];
    queued(&a, 3).await;
    server.flush_all();
    let since = Instant::now();
    for waiter in waiters {
        assert!(waiter.await.expect("it is granted"));
    }
    assert!(since.elapsed() < LEASE + A_MOMENT, "{:?}", since.elapsed());
    there_are_exactly(1, &a).await;
}

/// The server loses all its data, and all connections break. No waiter waits for the end of a lease from before.
#[tokio::test]
async fn waiters_outlive_the_server() {
    let server = RedisServer::start();
    let [one, other] = nodes(&server).await;
    let (a, b) = (semaphore(&one, 1), semaphore(&other, 1));
    let mut held = free(&a).await;
    let waiters = [passer(&b), passer(&b), passer(&a)];
    queued(&a, 3).await;
    server.restart();
    let since = Instant::now();
    for waiter in waiters {
        assert!(waiter.await.expect("it is granted"));
    }
    assert!(since.elapsed() < SOON, "{:?}", since.elapsed());
    assert!(!retried(async || held.release().await).await.was_held);
    there_are_exactly(1, &a).await;
}
