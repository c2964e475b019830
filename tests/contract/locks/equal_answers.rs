//! Memory and Redis give the same answers to any sequence of steps on locks, and notify the same waiters.
//!
//! Times are long, so that nothing expires in between; expiries are tested by the cases. A failing run prints
//! its seed; `SG_SEED` replays it.

use futures_util::FutureExt as _;

use super::super::support::redis_server::RedisServer;
use super::*;

const STEPS: usize = 10_000;
/// There are few locks and askers, so that steps often concern the same ones.
const LOCKS: usize = 4;
const ASKERS_PER_LOCK: usize = 4;

/// The same asker on both stores, so that their answers can be compared.
struct Twins {
    memory: Asker,
    redis: Asker,
}

/// One store's side of a step.
struct Side<'a> {
    askers: &'a [Twins],
    of: fn(&Twins) -> &Asker,
}

impl Side<'_> {
    fn asker(&self, number: usize) -> &Asker {
        (self.of)(&self.askers[number])
    }

    /// The number of the asker with this token. The numbers are the same on both stores, the tokens differ.
    fn number(&self, token: &[u8]) -> Option<usize> {
        self.askers.iter().position(|twins| (self.of)(twins).token.as_str().as_bytes() == token)
    }

    /// The answer to a step on a mutex, without the parts that may differ: fences, and the time that has passed.
    /// `peer` is another asker for the same mutex.
    async fn on_mutex(
        &self,
        (number, peer): (usize, usize),
        what: u8,
        ttl: Option<Duration>,
        queue: bool,
    ) -> String {
        let asker = self.asker(number);
        let whole = |left: Option<Duration>| {
            assert!(left.is_none_or(|left| left <= LEASE && left > LEASE / 2), "{left:?}");
            left.is_some()
        };
        match what {
            0..=3 => {
                let instead = (what == 3).then_some(&self.asker(peer).token);
                let ask = Take { ttl, queue, instead, ..asker.ask() };
                let answer = asker.node.take_mutex(&asker.name, ask, WITHIN).await.expect("take");
                match answer.taken {
                    Taken::Granted { .. } => format!("granted, {}", answer.was_held),
                    Taken::Busy { remaining } => {
                        format!("busy, ends {}, {}", whole(remaining), answer.was_held)
                    }
                }
            }
            4..=6 => {
                let freed = asker.node.free_mutex(&asker.name, &asker.token, ttl, WITHIN).await;
                format!("freed {}", freed.expect("free"))
            }
            7 => format!("extended {}", asker.extend(ttl).await),
            8 => format!("forced {}", asker.force().await),
            _ => {
                let holder = asker.look().await;
                format!("{:?}", holder.map(|holder| (self.number(&holder.token), whole(holder.remaining))))
            }
        }
    }

    async fn on_semaphore(&self, number: usize, what: u8, capacity: u32, queue: bool) -> String {
        let asker = self.asker(number);
        let create = asker.ask_permit(capacity).semaphore;
        let state = |state: Option<SemaphoreState>| {
            let state = state.map(|state| {
                let SemaphoreState {
                    created_with,
                    capacity,
                    available,
                    waiting,
                    holders,
                    created,
                    recovered,
                } = state;
                // Holders that got their permits in the same millisecond are ordered by their tokens, which differ.
                let mut holders: Vec<_> =
                    holders.iter().map(|(token, _)| self.number(token.as_str().as_bytes())).collect();
                holders.sort_unstable();
                (created_with, capacity, available, waiting, holders, created, recovered)
            });
            format!("{state:?}")
        };
        match what {
            0..=3 => {
                let taken = asker.permit(TakePermit { queue, ..asker.ask_permit(capacity) }).await;
                format!("{:?}", PermitTaken { next_expiry: None, ..taken })
            }
            4..=6 => format!("{:?}", asker.free_permit().await),
            7 => format!("refreshed {}", asker.refresh(LEASE).await),
            8 if capacity == 1 => state(asker.change(SemaphoreChange::Delete).await),
            8 if queue => state(asker.change(SemaphoreChange::Add { permits: 1, semaphore: create }).await),
            8 => state(asker.change(SemaphoreChange::Ensure(create)).await),
            9 => state(asker.change(SemaphoreChange::Sweep).await),
            _ => state(asker.state().await),
        }
    }

    /// The messages to each asker since the last call. Leaves out `first` and `missed`: they depend on which waiter is the first of its
    /// process, and so on the number of processes.
    fn notified(&self) -> Vec<(bool, bool, bool)> {
        let mut all = Vec::new();
        for number in 0..self.askers.len() {
            let hints = self.asker(number).wait.notified().now_or_never().unwrap_or_default();
            all.push((hints.granted.is_some(), hints.closed, hints.broken));
        }
        all
    }
}

#[tokio::test]
async fn random_steps_are_answered_alike() {
    let replayed = std::env::var("SG_SEED").ok().map(|seed| seed.parse().expect("SG_SEED is a number"));
    let seed = replayed.unwrap_or_else(|| fastrand::u64(..));
    println!("SG_SEED={seed}");
    let mut random = fastrand::Rng::with_seed(seed);

    let (memory, redis) = (World::memory(), World::Redis(RedisServer::start()));
    let World::Redis(server) = &redis else { unreachable!("made above") };
    let nodes = [redis.node().await, redis.node().await];
    let memory_node = memory.node().await;
    let mut askers = Vec::new();
    for lock in 0..LOCKS {
        let name = if lock < LOCKS / 2 { mutex(&lock.to_string()) } else { semaphore(&lock.to_string()) };
        for asker in 0..ASKERS_PER_LOCK {
            let redis = Asker::on(&nodes[asker % 2], &name);
            askers.push(Twins { memory: Asker::on(&memory_node, &name), redis });
        }
    }
    let memory = Side { askers: &askers, of: |twins| &twins.memory };
    let redis_side = Side { askers: &askers, of: |twins| &twins.redis };
    let mut granted = 0;
    for step in 0..STEPS {
        if random.u8(..) == 0 {
            server.script_flush();
        }
        let number = random.usize(..askers.len());
        let what = random.u8(..12);
        let queue = random.u8(..4) > 0;
        let context = format!("SG_SEED={seed} step {step}: {number} does {what}");
        let (one, two) = if number < askers.len() / 2 {
            // One asker in eight never wants an expiry, at any of its takes.
            let ttl = (number % 8 != 3).then_some(LEASE);
            let others = number / ASKERS_PER_LOCK * ASKERS_PER_LOCK;
            let pair = (number, others + (number + random.usize(1..ASKERS_PER_LOCK)) % ASKERS_PER_LOCK);
            (memory.on_mutex(pair, what, ttl, queue).await, redis_side.on_mutex(pair, what, ttl, queue).await)
        } else {
            let capacity = random.u32(1..4);
            (
                memory.on_semaphore(number, what, capacity, queue).await,
                redis_side.on_semaphore(number, what, capacity, queue).await,
            )
        };
        assert_eq!(one, two, "{context}");
        let expected = memory.notified();
        granted += expected.iter().filter(|(granted, ..)| *granted).count();
        let mut received = redis_side.notified();
        // Redis's messages take a moment to arrive.
        let started = Instant::now();
        while received != expected {
            assert!(started.elapsed() < SOON, "{context}: {received:?} instead of {expected:?}");
            tokio::task::yield_now().await;
            for (received, more) in received.iter_mut().zip(redis_side.notified()) {
                *received = (received.0 | more.0, received.1 | more.1, received.2 | more.2);
            }
        }
        if step % 100 == 0 {
            let forever = server.keys_without_ttl();
            assert!(forever.iter().all(|key| key.starts_with("sg1:m:{")), "{context}: {forever:?}");
        }
    }
    assert!(granted > 300, "SG_SEED={seed}: {granted} grants: too tame");
}
