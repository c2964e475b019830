//! Locks with many dead waiters in the queue: in a cluster PUBLISH counts only one node's subscribers, so a dead waiter is not
//! noticed.

use super::*;

/// Adds this many entries, each of another dead node, to the queue of the held lock. The key of the lock begins with `lock`, that of its
/// queue with `queue`.
fn lay_dead(cluster: &Cluster, lock: &str, queue: &str, entries: usize, ttl: Duration) {
    let master = cluster.nodes().iter().find_map(|node| {
        let keys: Vec<String> = node.run(&["KEYS", &format!("{lock}*")]);
        Some((node, keys.into_iter().next()?))
    });
    let (master, key) = master.expect("it is held");
    let queue = key.replacen(lock, queue, 1);
    for number in 0..entries {
        let entry = format!("{:032x}:{:032x}{}", number + 0xdead_0000, number, ttl.as_millis());
        master.run::<()>(&["RPUSH", &queue, &entry]);
    }
    master.run::<()>(&["PEXPIRE", &queue, "600000"]);
}

/// Twenty processes have died while they waited. Each gets a claim of 1 s, but these do not run one after the other.
#[tokio::test]
async fn twenty_dead_waiters_cost_two_claims() {
    let cluster = Cluster::patient();
    let guards = [
        connected(&cluster, LEASE).await,
        connected(&cluster, LEASE).await,
        connected(&cluster, LEASE).await,
    ];
    let ttl = Duration::from_secs(4);
    let mutexes = guards.each_ref().map(|guard| {
        let mutex = Mutex::builder(&guard.locks(), "m").ttl(ttl).acquire_timeout(LEASE);
        mutex.build().expect("valid")
    });
    let mut held = mutexes[0].lock().await.expect("free");
    lay_dead(&cluster, "sg1:m:", "sg1:mq:", 20, ttl);
    let queue_is = |count: usize| {
        let cluster = &cluster;
        eventually_eq("they wait", SOON, count, async move || {
            let queues = cluster.nodes().iter().map(|node| {
                let queues: Vec<String> = node.run(&["KEYS", "sg1:mq:*"]);
                queues.iter().map(|queue| node.run::<usize>(&["LLEN", queue])).sum::<usize>()
            });
            queues.sum()
        })
    };
    let order = std::sync::Arc::new(std::sync::Mutex::new(Vec::new()));
    let mut living = Vec::new();
    // The living waiters queue one after the other, in two processes by turns, and must get the mutex in this order.
    for number in 0..4 {
        let (mutex, order) = (mutexes[1 + number % 2].clone(), order.clone());
        living.push(tokio::spawn(async move {
            let mut guard = mutex.lock().await.expect("its turn");
            order.lock().unwrap().push((number, guard.fence()));
            tokio::time::sleep(ms(50)).await;
            assert!(guard.is_owned().await.expect("asks"), "no other has it");
            guard.unlock().await.expect("asks");
        }));
        queue_is(21 + number).await;
    }
    let started = Instant::now();
    assert!(held.unlock().await.expect("released"));
    for waiter in living {
        waiter.await.expect("each has its turn");
    }
    println!("behind 20 dead waiters: {:?}", started.elapsed());
    assert!(started.elapsed() < 2 * ttl, "{:?}", started.elapsed());
    let order = order.lock().unwrap();
    assert!(order.is_sorted(), "the living in their order: {order:?}");
    assert!(order.is_sorted_by_key(|&(_, fence)| fence), "{order:?}");
}

/// As above, with waiters for a semaphore's permits.
#[tokio::test]
async fn twenty_dead_waiters_cost_a_semaphore_two_claims() {
    let cluster = Cluster::patient();
    let guards = [connected(&cluster, LEASE).await, connected(&cluster, LEASE).await];
    let lease = Duration::from_secs(4);
    let semaphores = guards
        .each_ref()
        .map(|guard| Semaphore::builder(&guard.locks(), "s", 1).lease(lease).build().expect("valid"));
    let mut held = semaphores[0].acquire(Wait::Now).await.expect("asks").expect("free");
    lay_dead(&cluster, "sg1:sh:", "sg1:sq:", 20, lease);
    let semaphore = semaphores[1].clone();
    let living = tokio::spawn(async move { semaphore.acquire(Wait::For(LEASE)).await });
    tokio::time::sleep(ms(300)).await;
    let started = Instant::now();
    held.release().await.expect("released");
    let permit = living.await.unwrap().expect("asks").expect("its turn");
    println!("behind 20 dead waiters: {:?}", started.elapsed());
    assert!(started.elapsed() < 2 * lease, "{:?}", started.elapsed());
    drop(permit);
}
