//! The plan of a run, which is drawn completely from the seed before the run begins.

use std::time::Duration;

use crate::testing::Fault;
use crate::{OnWaitTimeout, Policy};

/// The tag of all values, in a run with tags.
pub(super) const TAG: &str = "tag";

/// How many faults a run has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Profile {
    /// No faults. Ordinary calls, including invalidations.
    None,
    /// Some kinds of fault, now and then.
    Mixed,
    /// Most kinds of fault, often.
    Heavy,
}

impl Profile {
    pub(super) const ALL: [Self; 3] = [Self::None, Self::Mixed, Self::Heavy];
}

#[derive(Debug)]
pub(super) struct Plan {
    pub(super) policy: Policy,
    /// The policy of those slots whose nodes have local copies. `keeps` says which slots these are.
    pub(super) local: Policy,
    pub(super) keeps: Vec<bool>,
    /// How many names of unconfirmed invalidations a node retains before they become one invalidation of everything.
    pub(super) most_unsent: usize,
    /// The length of a volume lease, in which a node may serve local copies.
    pub(super) term: Duration,
    pub(super) nodes: usize,
    pub(super) keys: u8,
    /// All values have one tag.
    pub(super) tagged: bool,
    /// The longest round trip of a node, except the nodes at index 0 of `nodes`, which may be far away.
    pub(super) latency: Duration,
    /// By how much a round trip is longer for the nodes of slot 0 than for others.
    pub(super) detour: Duration,
    pub(super) faults: Vec<(Fault, f64)>,
    pub(super) calls: Vec<Call>,
    pub(super) events: Vec<Event>,
    /// When the last call begins, or the last event, if that is later.
    pub(super) lasts: Duration,
    pub(super) profile: Profile,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Call {
    pub(super) at: Duration,
    pub(super) node: usize,
    pub(super) key: u8,
    pub(super) does: Does,
    pub(super) leaves: Option<Leaves>,
    pub(super) load: Script,
    /// What another caller does as soon as this call is answered, and at the node of which slot.
    pub(super) then: Option<(Does, usize)>,
}

impl Call {
    /// The call that follows this call.
    pub(super) fn next(self) -> Option<Self> {
        let (does, node) = self.then?;
        let is_change = matches!(does, Does::Invalidate | Does::InvalidateTag);
        // The node of slot 0, which may be far away, asks for what was changed.
        let then = is_change.then_some((Does::Load, 0));
        Some(Self { at: Duration::ZERO, node, does, leaves: None, then, ..self })
    }

    /// Whether it brings a loader.
    pub(super) fn loads(&self) -> bool {
        matches!(self.does, Does::Load | Does::LoadMany | Does::Refresh)
    }

    /// Whether the call asks for this key.
    pub(super) fn asks_for(&self, key: u8) -> bool {
        self.key == key || self.does == Does::LoadMany
    }
}

/// When a caller leaves, which means that its future is dropped.
#[derive(Clone, Copy, Debug)]
pub(super) enum Leaves {
    /// When it is woken after this many polls.
    AtPoll(usize),
    /// After this time, whatever it waits for then.
    After(Duration),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Does {
    Load,
    /// Asks for all keys at once.
    LoadMany,
    Refresh,
    Get,
    Invalidate,
    /// Invalidates the tag that all keys have.
    InvalidateTag,
    Insert,
}

/// How long a loader takes, and how it ends.
#[derive(Clone, Copy, Debug)]
pub(super) struct Script {
    pub(super) takes: Duration,
    pub(super) ends: Ends,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ends {
    Value,
    DoNotStore,
    Error,
    Panic,
    Never,
}

/// What happens to a node.
#[derive(Clone, Copy, Debug)]
pub(super) struct Event {
    pub(super) at: Duration,
    pub(super) node: usize,
    pub(super) what: What,
}

#[derive(Clone, Copy, Debug)]
pub(super) enum What {
    /// The node is killed, and its successor starts this much later.
    Crash(Duration),
    Stop(Duration),
    Cut(Duration),
    /// The node's round trips are longer by the first duration, for the second.
    MoveAway(Duration, Duration),
    /// The node receives no messages for this long, and does not notice.
    MissMessages(Duration),
    /// A deployment: the node is shut down with the first duration as its deadline, and its successor starts the second one later.
    Leave(Duration, Duration),
}

impl Plan {
    /// All calls, including those that follow other calls.
    pub(super) fn all_calls(&self) -> impl Iterator<Item = Call> {
        self.calls.iter().flat_map(|call| std::iter::successors(Some(*call), |call| call.next()))
    }

    /// How long a change waits for the nodes with local copies, if there are any: for its own inbox, for a term, and for FORGET.
    pub(super) fn announcing(&self) -> Duration {
        let any = self.keeps.iter().any(|keeps| *keeps);
        if any { Duration::from_secs(1) + self.term } else { Duration::ZERO }
    }

    /// The longest round trip.
    pub(super) fn trip(&self) -> Duration {
        self.latency + self.detour
    }

    pub(super) fn draw(seed: u64, profile: Profile) -> Self {
        let mut random = fastrand::Rng::with_seed(seed.wrapping_mul(3).wrapping_add(profile as u64));
        let ms = |random: &mut fastrand::Rng, least: u64, most: u64| {
            Duration::from_millis(random.u64(least..=most))
        };
        let (often, least, most) = match profile {
            Profile::None => (0.0, 0.0, 0.0),
            Profile::Mixed => (0.3, 0.01, 0.08),
            Profile::Heavy => (0.6, 0.03, 0.25),
        };
        let happens = |random: &mut fastrand::Rng| random.f64() < often;
        let mut faults = Vec::new();
        for &fault in Fault::ALL {
            if happens(&mut random) {
                let chance = least + random.f64() * (most - least);
                // These faults hit all nodes, or last for a while.
                let chance = match fault {
                    Fault::Flush
                    | Fault::FailOver
                    | Fault::ClockStep
                    | Fault::ReadOnly
                    | Fault::Unreachable => chance / 8.0,
                    _ => chance,
                };
                faults.push((fault, chance));
            }
        }
        let tagged = random.u8(..3) == 0;
        let policy = policy(&mut random, tagged);
        let (nodes, keys) = (random.usize(3..=5), random.u8(2..=4));
        let lasts = ms(&mut random, 6_000, 20_000);
        let troubles = [(); 4].map(|()| happens(&mut random));
        let bursts: Vec<_> =
            (0..random.usize(2..=8)).map(|_| ms(&mut random, 0, lasts.as_millis() as u64)).collect();
        let (leaves, invalidates) = (random.bool(), random.bool());
        let mut calls: Vec<_> = (0..random.usize(20..=60))
            .map(|_| {
                // Most calls come in bursts, to any of the keys.
                let burst = bursts[random.usize(..bursts.len())];
                let at = if random.u8(..4) > 0 {
                    burst + ms(&mut random, 0, 40)
                } else {
                    ms(&mut random, 0, lasts.as_millis() as u64)
                };
                let does = match random.u8(..40) {
                    0 | 1 if invalidates && tagged => Does::InvalidateTag,
                    0..=3 if invalidates => Does::Invalidate,
                    4 if invalidates => Does::Insert,
                    5 | 6 => Does::Refresh,
                    7 | 8 => Does::Get,
                    9..=12 => Does::LoadMany,
                    _ => Does::Load,
                };
                let then = if tagged { Does::InvalidateTag } else { Does::Invalidate };
                Call {
                    at,
                    node: random.usize(..nodes),
                    key: random.u8(..keys),
                    does,
                    leaves: (leaves && random.u8(..3) == 0).then(|| leaving(&mut random)),
                    load: script(&mut random, troubles),
                    then: (invalidates && random.u8(..8) == 0).then(|| (then, random.usize(..nodes))),
                }
            })
            .collect();
        // A burst of invalidations that come faster than loads.
        if tagged && random.bool() {
            let (every, node) = (ms(&mut random, 10, 100), random.usize(..nodes));
            let begins = bursts[random.usize(..bursts.len())];
            calls.extend((0..random.u32(10..=60)).map(|n| Call {
                at: begins + every * n,
                node,
                key: 0,
                does: Does::InvalidateTag,
                leaves: None,
                load: Script { takes: Duration::ZERO, ends: Ends::Value },
                then: None,
            }));
        }
        let mut events = Vec::new();
        let lease = policy.lease.as_millis() as u64;
        for kind in 0..3 {
            for _ in 0..if happens(&mut random) { random.usize(1..=2) } else { 0 } {
                let what = match kind {
                    0 => What::Crash(ms(&mut random, 0, 3_000)),
                    1 => What::Stop(ms(&mut random, lease / 10, lease * 3)),
                    _ => What::Cut(ms(&mut random, 10, lease * 2)),
                };
                events.push(Event {
                    at: ms(&mut random, 0, lasts.as_millis() as u64),
                    node: random.usize(..nodes),
                    what,
                });
            }
        }
        // Deployments are no fault: runs without faults have them too.
        for _ in 0..random.u8(..3) {
            let what = What::Leave(ms(&mut random, 0, 1_000), ms(&mut random, 0, 1_000));
            // Most of them during a burst.
            let at = match random.u8(..4) {
                0 => ms(&mut random, 0, lasts.as_millis() as u64),
                _ => bursts[random.usize(..bursts.len())] + ms(&mut random, 0, 400),
            };
            events.push(Event { at, node: random.usize(..nodes), what });
        }
        let latency = ms(&mut random, 0, 5);
        // The round trip of the node of slot 0 takes at most half of `command_timeout`.
        let most = (policy.command_timeout / 2).saturating_sub(latency).as_millis() as u64;
        let detour = if random.bool() { ms(&mut random, 0, most) } else { Duration::ZERO };
        // Two thirds of the runs have local tiers; two thirds of those have them at all nodes.
        let (has_tiers, everywhere) = (random.u8(..3) > 0, random.u8(..3) > 0);
        let keeps: Vec<_> = (0..nodes).map(|_| has_tiers && (everywhere || random.bool())).collect();
        let has_tiers = keeps.contains(&true);
        let local_for = if random.bool() { Duration::MAX } else { ms(&mut random, 50, 2_000) };
        // The registry may be evicted just before a node without copies has seen it for the first time.
        let policy = policy.to_builder().local_elsewhere(has_tiers).build().expect("a valid policy");
        let local = policy.to_builder().local_for(local_for).build().expect("a valid policy");
        let term = ms(&mut random, 200, 2_000);
        if has_tiers {
            // Most of these calls are hits between the bursts; the others are changes, each followed by a call to the node of slot 0.
            calls.extend((0..random.usize(10..=30)).map(|n| Call {
                at: ms(&mut random, 0, lasts.as_millis() as u64),
                node: random.usize(..nodes),
                key: random.u8(..keys),
                does: if invalidates && n % 8 == 0 { Does::Invalidate } else { Does::Load },
                leaves: None,
                load: script(&mut random, [false; 4]),
                then: (n % 8 == 0).then_some((Does::Load, 0)),
            }));
        }
        if has_tiers && profile != Profile::None && random.bool() {
            // A node is cut off, or stopped, while its callers go on asking, also after its return. Another node changes what they ask for.
            let (at, node, key) = (ms(&mut random, 1_000, 5_000), random.usize(..nodes), random.u8(..keys));
            let what =
                if random.u8(..3) > 0 { What::Cut(term * 13 / 10) } else { What::Stop(term * 13 / 10) };
            events.push(Event { at, node, what });
            let load = Script { takes: Duration::from_millis(1), ends: Ends::Value };
            let asks = |at, node, does| Call { at, node, key, does, leaves: None, load, then: None };
            // Before that the node may be far away, so that it has a RENEW on its way when it is cut off.
            if random.bool() {
                events.push(Event { at: at - term / 2, node, what: What::MoveAway(term / 4, term) });
            }
            let soon = [4, 16][random.usize(..2)];
            let changes = at + ms(&mut random, 0, term.as_millis() as u64 / soon);
            calls.push(asks(changes, (node + 1) % nodes, Does::Invalidate));
            calls.push(asks(at.saturating_sub(Duration::from_millis(100)), node, Does::Load));
            calls.extend((0..110).map(|n| asks(at + term * n / 50, node, Does::Load)));
        }
        if profile != Profile::None && random.bool() {
            // A node that is cut off invalidates what all nodes have requested, and its callers leave. All nodes ask again when it is back.
            let (at, node, lasts) =
                (ms(&mut random, 1_000, 5_000), random.usize(..nodes), ms(&mut random, 50, 400));
            events.push(Event { at, node, what: What::Cut(lasts) });
            let asks = |at, node, key, does, takes| {
                let load = Script { takes: Duration::from_millis(takes), ends: Ends::Value };
                Call { at, node, key, does, leaves: None, load, then: None }
            };
            let (other, before) = ((node + 1) % nodes, |ms| at.saturating_sub(Duration::from_millis(ms)));
            for key in 0..keys {
                if random.bool() {
                    // The node has a load on its way when it is cut off.
                    calls.push(asks(before(100), other, key, Does::Invalidate, 1));
                    calls.push(asks(before(50), node, key, Does::Load, 600));
                } else {
                    calls.push(asks(before(100), other, key, Does::Load, 1));
                }
                let does = if tagged && random.u8(..4) == 0 { Does::InvalidateTag } else { Does::Invalidate };
                let changes = asks(at + ms(&mut random, 1, 10), node, key, does, 1);
                let leaves = Some(Leaves::After(ms(&mut random, 5, 30)));
                calls.push(Call { leaves, ..changes });
                for n in 0..20 {
                    let again = at + lasts + Duration::from_millis(50) * n;
                    calls.push(asks(again, [node, other][n as usize % 2], key, Does::Load, 1));
                }
            }
        }
        if has_tiers && profile != Profile::None && random.u8(..4) == 0 {
            // A node misses the message of a change and receives that of the next one. Its callers go on asking for what the first one
            // changed.
            let (at, node, key) = (ms(&mut random, 1_000, 5_000), random.usize(..nodes), random.u8(..keys));
            let load = Script { takes: Duration::from_millis(1), ends: Ends::Value };
            let asks = |at, node, key, does| Call { at, node, key, does, leaves: None, load, then: None };
            let (other, misses) = ((node + 1) % nodes, term / 16);
            events.push(Event { at, node, what: What::MissMessages(misses) });
            calls.push(asks(at.saturating_sub(Duration::from_millis(100)), node, key, Does::Load));
            calls.push(asks(at + Duration::from_millis(1), other, key, Does::Invalidate));
            calls.push(asks(at + misses, other, (key + 1) % keys, Does::Invalidate));
            calls.extend((0..60).map(|n| asks(at + term * n / 25, node, key, Does::Load)));
        }
        if has_tiers && random.bool() {
            // A node changes what another node has just loaded, at about the moment of its commit. The other node's callers go on asking.
            let (node, key) = (random.usize(..nodes), random.u8(..keys));
            for _ in 0..4 {
                let (at, takes) = (ms(&mut random, 0, 6_000), ms(&mut random, 1, 50));
                let load = Script { takes, ends: Ends::Value };
                let asks = |at, node, does| Call { at, node, key, does, leaves: None, load, then: None };
                let commits = at + takes + (latency + detour) * 2;
                calls.push(asks(at, node, Does::Load));
                calls.push(asks(commits + ms(&mut random, 0, 8), (node + 1) % nodes, Does::Invalidate));
                calls.extend((1..4).map(|n| asks(commits + Duration::from_millis(30) * n, node, Does::Load)));
            }
        }
        unstorable(seed, &mut calls, &policy, (nodes, keys), (profile, lasts));
        // In half of the runs with tags, a node may replace its retained invalidations by one invalidation of everything.
        let overflows = tagged && random.bool();
        let most_unsent = if overflows { random.usize(1..=2) } else { 10_000 };
        let [policy, local] = [policy, local]
            .map(|policy| policy.to_builder().invalidate_all(overflows).build().expect("a valid policy"));
        Self {
            policy,
            local,
            most_unsent,
            keeps,
            term,
            nodes,
            keys,
            tagged,
            latency,
            detour,
            faults,
            calls,
            events,
            lasts,
            profile,
        }
    }
}

/// Adds, where values have stale windows, loads that must not be stored or that fail, within a window and near its end, and callers after
/// that. A separate random stream leaves all other parts of the plans as they are.
fn unstorable(
    seed: u64,
    calls: &mut Vec<Call>,
    policy: &Policy,
    (nodes, keys): (usize, u8),
    (profile, lasts): (Profile, Duration),
) {
    let window = policy.stale_while_revalidate.max(policy.stale_if_error);
    let mut random = fastrand::Rng::with_seed(seed ^ 0x5eed);
    if window.is_zero() || random.bool() {
        return;
    }
    for _ in 0..random.usize(1..=3) {
        let (at, key) = (Duration::from_millis(random.u64(0..4_000)), random.u8(..keys));
        // In a run without faults no caller may receive a failure, so the loads of this kind fail only in the other runs.
        let fails = profile != Profile::None && random.bool();
        let mut asks = |at, ends, takes| {
            let load = Script { takes: Duration::from_millis(takes), ends };
            let node = random.usize(..nodes);
            let call = Call { at, node, key, does: Does::Load, leaves: None, load, then: None };
            calls.extend(Some(call).filter(|call| call.at <= lasts));
        };
        asks(at, Ends::Value, 1);
        let stale = at + policy.fresh_for + Duration::from_millis(20);
        if !fails {
            asks(stale, Ends::DoNotStore, 5);
            asks(stale + Duration::from_millis(10), Ends::DoNotStore, 5);
            (1..=12).for_each(|n| asks(stale + Duration::from_millis(25) * n, Ends::Value, 30));
        } else {
            // Jitter shortens the lifetime by a tenth at most, so the window ends among these.
            let (first, last) =
                (at + policy.fresh_for.mul_f64(0.88) + window, at + policy.fresh_for + window);
            let mut next = first.saturating_sub(Duration::from_millis(100));
            while next < last + Duration::from_millis(300) {
                asks(next, Ends::Error, 1);
                next += Duration::from_millis(40);
            }
        }
    }
}

fn leaving(random: &mut fastrand::Rng) -> Leaves {
    match random.bool() {
        true => Leaves::AtPoll(random.usize(1..5)),
        false => Leaves::After(Duration::from_millis(random.u64(..500))),
    }
}

fn script(random: &mut fastrand::Rng, [fails, panics, hangs, is_private]: [bool; 4]) -> Script {
    let takes = Duration::from_millis(match random.u8(..10) {
        0 => 0,
        1..=6 => random.u64(1..200),
        7 | 8 => random.u64(200..900),
        _ => random.u64(900..3_000),
    });
    let ends = match random.u8(..20) {
        0..=3 if fails => Ends::Error,
        4 | 5 if panics => Ends::Panic,
        6 if hangs => Ends::Never,
        7 | 8 if is_private => Ends::DoNotStore,
        _ => Ends::Value,
    };
    Script { takes, ends }
}

fn policy(random: &mut fastrand::Rng, tagged: bool) -> Policy {
    let mut ms = |least: u64, most: u64| Duration::from_millis(random.u64(least..=most));
    let command = ms(10, 40);
    let lease = ms(200, 2_000);
    let load_timeout = ms(3_100, 5_000);
    let fresh_for = ms(300, 4_000);
    let (revalidate, if_error, wait) = (ms(100, 2_000), ms(100, 4_000), ms(500, 8_000));
    let replay = ms(1, 400);
    let mut policy = Policy::builder()
        .lease(lease)
        .coordination_budget(command * 2)
        .load_timeout(load_timeout)
        .fresh_for(fresh_for)
        .back_off(Duration::from_millis(300));
    if random.u8(..4) == 0 {
        policy = policy.stale_while_revalidate(revalidate);
    }
    if random.u8(..3) == 0 {
        policy = policy.stale_if_error(if_error);
    }
    if random.u8(..6) == 0 {
        policy = policy.error_for(replay);
    }
    if random.u8(..4) == 0 {
        policy = policy.wait_timeout(wait, OnWaitTimeout::Load);
    }
    if tagged {
        policy = policy.tags([TAG]);
    }
    policy.build().expect("a valid policy")
}
