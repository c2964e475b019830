//! Real processes whose work under one mutex never overlaps, also if some of them die.

use super::*;
use crate::support::processes::Fleet;

#[derive(Serialize, Deserialize)]
struct Work {
    redis: String,
    counter: String,
    times: usize,
}

/// A child that increments a counter many times. An increment is a read and a separate write.
pub(super) fn increments(mut child: Child) -> BoxFuture<'static, ()> {
    Box::pin(async move {
        let Work { redis, counter, times } = child.config();
        let mutex = mutex(&connected(&redis).await);
        // The counter has its own connection, like a resource that knows nothing of the lock.
        let mut counter = plain_connection(&redis::Client::open(counter).expect("an address")).await;
        child.ready();
        child.wait_go().await;
        for _ in 0..times {
            let mut guard = locked(&mutex).await;
            let read: Option<u64> =
                redis::cmd("GET").arg("counter").query_async(&mut counter).await.expect("GET");
            let more = read.unwrap_or(0) + 1;
            redis::cmd("SET").arg("counter").arg(more).exec_async(&mut counter).await.expect("SET");
            assert!(guard.unlock().await.expect("asks"));
        }
        child.result(&times);
    })
}

/// S0.1: four processes make 500 non-atomic increments each, and the counter is 2,000 afterwards.
#[tokio::test]
async fn unsafe_increments_of_four_processes_all_count() {
    let server = RedisServer::start();
    let work = Work { redis: server.minimal_user(), counter: server.url(), times: 500 };
    let fleet = Fleet::spawn(4, "mutex.increments", &work);
    fleet.wait_ready().await;
    fleet.go();
    assert_eq!(fleet.results::<usize>().await, [500; 4]);
    assert_eq!(server.run::<u64>(&["GET", "counter"]), 2_000);
    server.run::<()>(&["DEL", "counter"]);
    free(&server, AT_ONCE).await;
}

/// A child that acquires and releases many times, and reports its fences and attempts.
pub(super) fn acquisitions(mut child: Child) -> BoxFuture<'static, ()> {
    Box::pin(async move {
        let Work { redis, times, .. } = child.config();
        let mutex = mutex(&connected(&redis).await);
        child.ready();
        child.wait_go().await;
        let (mut attempts, mut fences) = (0, Vec::new());
        for _ in 0..times {
            let mut guard = locked(&mutex).await;
            attempts += guard.attempts() as usize;
            fences.push(guard.fence());
            assert!(guard.unlock().await.expect("asks"));
        }
        child.result(&(attempts, fences));
    })
}

/// S5.8: under a lock that is made of timestamps, one process starves the other. Here two processes make 1,000 acquisitions each: all
/// succeed, the processes take turns, and no fence is issued twice.
#[tokio::test]
async fn two_processes_take_turns() {
    let server = RedisServer::start();
    let work = Work { redis: server.minimal_user(), counter: server.url(), times: 1_000 };
    let fleet = Fleet::spawn(2, "mutex.acquisitions", &work);
    fleet.wait_ready().await;
    fleet.go();
    let results = fleet.results::<(usize, Vec<u64>)>().await;
    let mut all: Vec<(u64, usize)> = Vec::new();
    for (process, (attempts, fences)) in results.iter().enumerate() {
        assert_eq!(fences.len(), 1_000);
        // Some attempts are added where the server stalled and a subscription was renewed.
        assert!(*attempts <= 1_500, "{attempts} attempts for 1,000 acquisitions");
        assert!(fences.windows(2).all(|two| two[0] < two[1]));
        all.extend(fences.iter().map(|&fence| (fence, process)));
    }
    all.sort();
    assert!(all.windows(2).all(|two| two[0].0 < two[1].0), "a fence was issued twice");
    let turns = all.windows(2).filter(|two| two[0].1 != two[1].1).count();
    println!("{turns} of 1,999 turns went to the other process");
    // A process may run alone at the beginning or at the end, and may acquire again before the other one has queued again.
    assert!(turns > 20, "{turns} turns");
    free(&server, AT_ONCE).await;
}

/// If the head of the queue was killed, it is passed over at the release, and delays no later waiter.
#[tokio::test]
async fn a_killed_head_of_the_queue_is_passed_over() {
    let server = RedisServer::start();
    let (one, other) = (node(&server).await, node(&server).await);
    let fleet = Fleet::spawn(3, "mutex.holder", &Config { redis: server.minimal_user() });
    fleet.wait_ready().await;
    let mut holder = locked(&mutex(&one)).await;
    for (at, member) in fleet.members().iter().enumerate() {
        member.send("lock 60000");
        queued(&server, at + 1).await;
    }
    let next = waiter(&other);
    queued(&server, 4).await;
    for member in fleet.members() {
        member.kill();
    }
    eventually_eq("the server has noticed", SOON, 2, async || server.pubsub_clients()).await;
    assert!(holder.unlock().await.expect("asks"));
    let (next, took) = granted(next).await;
    assert!(took < AT_ONCE, "{took:?}");
    assert!(next.is_owned().await.expect("asks"));
}

/// A head that is killed when it is granted the mutex is a dead holder: it costs at most its own TTL, however long the previous holder's
/// TTL was.
#[tokio::test]
async fn a_head_killed_at_its_grant_costs_its_time_to_live_at_most() {
    let server = RedisServer::start();
    let (one, other) = (node(&server).await, node(&server).await);
    for _ in 0..3 {
        let fleet = Fleet::spawn(1, "mutex.holder", &Config { redis: server.minimal_user() });
        fleet.wait_ready().await;
        let mut holder = locked(&mutex(&one)).await;
        fleet.member(0).send("lock 3000");
        queued(&server, 1).await;
        let next = waiter(&other);
        queued(&server, 2).await;
        let started = Instant::now();
        let unlock = tokio::spawn(async move { holder.unlock().await.expect("asks") });
        tokio::time::sleep(Duration::from_micros(fastrand::u64(..1_500))).await;
        fleet.member(0).kill();
        assert!(unlock.await.expect("joined"));
        let (mut next, _) = granted(next).await;
        assert!(started.elapsed() < ms(3_000) + AT_ONCE, "{:?}", started.elapsed());
        assert!(next.unlock().await.expect("asks"));
    }
    free(&server, AT_ONCE).await;
}
