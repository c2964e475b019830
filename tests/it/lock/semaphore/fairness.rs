//! First come, first served: waiters are served in the order in which their requests reached the server.

use super::*;

const LEASE: &str = "60000";

/// S4.2: in each of twenty rounds, twenty waiters of four processes are served in the order in which they queued.
#[tokio::test]
async fn waiters_of_four_processes_are_served_in_their_order() {
    const WAITERS: usize = 20;
    const RUNS: usize = 20;
    let server = RedisServer::start();
    let locks = node(&server).await;
    let fleet = processes(&server, 4).await;
    for run in 0..RUNS {
        let name = format!("run{run}");
        let semaphore = locks.semaphore(&*name, 1).build().expect("valid");
        let mut held = free(&semaphore).await;
        let mut members = Vec::new();
        for waiter in 0..WAITERS {
            let member = fleet.member(fastrand::usize(..4));
            member.send(&format!("take {run}-{waiter} {name} 1 {LEASE} forever"));
            queued(&semaphore, waiter as u32 + 1).await;
            members.push(member);
        }
        held.release().await.expect("asks");
        for (waiter, member) in members.iter().enumerate() {
            let waiter_name = format!("{run}-{waiter}");
            let token = taken(member, &waiter_name).await.token.expect("it is granted");
            let holders = semaphore.holders().await.expect("asks");
            assert_eq!(holders.len(), 1);
            assert_eq!(holders[0].token, token, "run {run}: waiter {waiter} is next");
            for (later, member) in members.iter().enumerate().skip(waiter + 1) {
                assert_eq!(member.events(&format!("{run}-{later}")), 0, "run {run}: {later} before {waiter}");
            }
            member.send(&format!("give {waiter_name}"));
            assert_eq!(member.wait_event("gave").await[0], true);
        }
        eventually_eq("it is free", AT_ONCE, 1, async || available(&semaphore).await).await;
    }
}

/// Invariant 2 of locks: a released permit goes to the head of the queue, not to a client that asks at that moment. Two released permits go
/// to the first two waiters.
#[tokio::test]
async fn no_client_overtakes_the_queue() {
    let server = RedisServer::start();
    let [one, other, third] = nodes(&server).await;
    let (a, b, c) = (semaphore(&one, 2), semaphore(&other, 2), semaphore(&third, 2));
    for _ in 0..50 {
        let mut held = [free(&a).await, free(&a).await];
        let mut waiters = Vec::new();
        for waiting in [&b, &c, &b, &c] {
            waiters.push(waiter(waiting));
            queued(&a, waiters.len() as u32).await;
        }
        let barging = async {
            let mut barged = 0;
            while a.waiting().await.expect("asks") > 0 {
                let got = c.acquire(Wait::Now).await.expect("asks");
                // This only counts as barging in while the queue is not empty: the last waiter may have been served before this request.
                barged += usize::from(got.is_some() && a.waiting().await.expect("asks") > 0);
            }
            barged
        };
        let serving = async {
            for permit in &mut held {
                permit.release().await.expect("asks");
            }
            let mut waiters = waiters.into_iter();
            while let (Some(first), Some(second)) = (waiters.next(), waiters.next()) {
                // The dropped permits go to the next two waiters.
                drop((granted(first).await, granted(second).await));
            }
        };
        let (barged, ()) = tokio::join!(barging, serving);
        assert_eq!(barged, 0);
        eventually_eq("all are free", AT_ONCE, 2, async || available(&a).await).await;
    }
}
