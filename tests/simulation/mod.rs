//! Simulations of whole fleets: three to five nodes run the real guard code on one store, in virtual time, with faults drawn from a
//! seed.
//!
//! They are unit tests of the crate, because the store's side of the protocol is private. No part of the guard is replaced:
//! `read_through` and `flight` run unchanged, on the wire that [`testing`](crate::testing) ships. The simulation does not reach the
//! Lua scripts and redis-rs; `store::contract` shows that the memory store and the scripts answer alike.
//!
//! The invariants (`Ix` in reports):
//!
//! 1. A value is stored under the lease of its own token, and once per token.
//! 2. No flight renews, frees or ends another flight's lease.
//! 3. A value is not stored if its load began before the last invalidation, nor returned to callers that begin after the invalidation has
//!    ended: at the node that invalidated, by its store or by its local tier, whether it was acknowledged or not; at any node, if it was
//!    acknowledged or its node has sent it again, and the load was committed.
//! 4. Every call returns within a bound for its kind; without faults, within the time of its load.
//! 5. A load has the lease, or a valid excuse for going without. There are no more leased loads of a key than events that cause one.
//! 6. A waiter does not sleep past the time that it received; without faults, not past the end of the load it waits for.
//! 7. In the end nothing is left: no lease, flight, task, waiter or read.
//! 8. Without the lease, a node runs one load of a key that later callers join, and another load replaces it at most once. A leased
//!    load continues, whichever callers leave.
//! 9. Without faults, each acquire has its reason, and there are no more look-ups than the calls need.
//! 10. A returned value belongs to the key, and a load has returned it.
//! 11. Nothing panics, and warnings do not flood the logs.
//! 12. After the faults, every caller is answered, and one load is enough for all.
//! 13. A shutdown ends within its deadline and a second, and reports how many leases it leaves; without faults, none.
//! 14. Once a load that must not be stored has ended under its lease, no later caller receives an older value. Nor does a caller that comes
//!     after the end of a value's stale windows receive that value.
//! 15. At a server that is slow, many keys that are requested at once are loaded once each and stored, and hits of other keys are not lost.
//! 16. Under an adaptive limit, no more loads run than the limit allows, the limit moves by one step at a time, and in the end all permits
//!     are free.
//!
//! `SEED=7 PROFILE=mixed cargo test --features testing --lib simulation::one -- --nocapture --ignored` shows a run.

mod aftermath;
mod bounds;
mod bulk;
pub(crate) mod dropped;
mod events;
mod excuses;
mod floods;
mod lanes;
mod late_tags;
mod loads;
mod many;
mod mutants;
mod nodes;
mod oracle;
mod overflows;
#[allow(
    dead_code,
    clippy::duplicate_mod,
    reason = "of the integration tests and a bench, which use all of it"
)]
#[path = "../support/overload.rs"]
mod overload;
mod plan;
mod stops;
mod surges;
mod trials;
mod witness;
mod world;

use std::cell::RefCell;
use std::sync::Once;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tokio::runtime::Runtime;
use tokio::task::LocalSet;

use mutants::Mutant;
use plan::{Plan, Profile};
use world::World;

/// How many seeds an ordinary test run tries, each under all three profiles.
const SEEDS: u64 = 150;

thread_local! {
    /// The panics of this thread's run; `None` while no run records them.
    static PANICS: RefCell<Option<Vec<String>>> = const { RefCell::new(None) };
}

/// The result of a run.
struct Report {
    violations: Vec<String>,
    /// A hash of all events: equal runs have equal hashes.
    hash: u64,
    log: Vec<String>,
    loads: usize,
    struck: u64,
    /// How many answers came from the local copies of the nodes.
    local_hits: u64,
}

/// Installs a hook that records a run's panics for its report instead of printing them.
fn listen() {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let hook = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            let caught = PANICS
                .try_with(|panics| panics.borrow_mut().as_mut().map(|panics| panics.push(info.to_string())));
            if !matches!(caught, Ok(Some(()))) {
                hook(info);
            }
        }));
    });
}

fn paused() -> Runtime {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
    runtime.expect("a runtime")
}

fn run(seed: u64, profile: Profile, mutant: Option<Mutant>, is_traced: bool) -> Report {
    listen();
    // The guard draws its jitter from this thread's generator, so the seed must set it.
    fastrand::seed(seed);
    PANICS.set(Some(Vec::new()));
    let runtime = paused();
    let simulated = || {
        runtime.block_on(async {
            let world = World::new(Plan::draw(seed, profile), seed, is_traced);
            std::sync::Arc::clone(&world).live().await;
            let mut state = crate::sync::lock(&world.oracle.state);
            let struck = crate::testing::Fault::ALL.iter().map(|fault| world.chaos.struck(*fault)).sum();
            let mut violations = std::mem::take(&mut state.violations);
            violations.extend(floods::excess(world.guards_started(), world.oracle.began.elapsed()));
            let log = state.log.take().unwrap_or_default();
            let local_hits = world.local_hits();
            Report { violations, hash: state.hash(), log, loads: state.loads.all.len(), struck, local_hits }
        })
    };
    let mut report = mutants::with(mutant, || floods::counting(simulated));
    drop(runtime);
    if profile == Profile::None && mutant.is_none() {
        // Without faults, half of the seeds also run a further world; the longest one runs for one seed of 256 only.
        // Its jitter does not depend on how many numbers the first world has drawn.
        fastrand::seed(!seed);
        report.violations.extend(match seed % 8 {
            1 => LocalSet::new().block_on(&paused(), stops::violations(seed)),
            2 => LocalSet::new().block_on(&paused(), late_tags::violations(seed)),
            3 => LocalSet::new().block_on(&paused(), trials::violations(seed)),
            5 => paused().block_on(bulk::violations(seed)),
            7 => paused().block_on(overflows::violations(seed)),
            0 if seed.is_multiple_of(256) => paused().block_on(surges::violations(seed)),
            _ => Vec::new(),
        });
    }
    let panics = PANICS.take().unwrap_or_default();
    report.violations.extend(panics.into_iter().map(|panic| format!("I11: {panic}")));
    report
}

fn profile_name(profile: Profile) -> &'static str {
    match profile {
        Profile::None => "none",
        Profile::Mixed => "mixed",
        Profile::Heavy => "heavy",
    }
}

/// Runs the seeds on as many threads as there are cores. Panics with the first seed that breaks an invariant.
fn runs(seeds: std::ops::Range<u64>) {
    let (next, began) = (AtomicU64::new(seeds.start), Instant::now());
    let (loads, struck, local_hits) = (AtomicU64::new(0), AtomicU64::new(0), AtomicU64::new(0));
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let bad = std::thread::scope(|scope| {
        let work = || {
            loop {
                let seed = next.fetch_add(1, Ordering::Relaxed);
                if seed >= seeds.end {
                    return None;
                }
                for profile in Profile::ALL {
                    let report = run(seed, profile, None, false);
                    loads.fetch_add(report.loads as u64, Ordering::Relaxed);
                    struck.fetch_add(report.struck, Ordering::Relaxed);
                    local_hits.fetch_add(report.local_hits, Ordering::Relaxed);
                    if !report.violations.is_empty() {
                        next.store(seeds.end, Ordering::Relaxed);
                        return Some((seed, profile, report.violations));
                    }
                }
            }
        };
        let threads: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        threads.into_iter().filter_map(|thread| thread.join().expect("no panic")).min_by_key(|bad| bad.0)
    });
    if let Some((seed, profile, violations)) = bad {
        let profile = profile_name(profile);
        panic!(
            "SEED={seed} PROFILE={profile} cargo test --features testing --lib simulation::one -- --nocapture --ignored\n{}",
            violations.join("\n")
        );
    }
    let runs = (seeds.end - seeds.start) * Profile::ALL.len() as u64;
    let (loads, struck, took) = (loads.into_inner(), struck.into_inner(), began.elapsed());
    let local_hits = local_hits.into_inner();
    println!(
        "{runs} runs, {loads} loads, {local_hits} local hits, {struck} faults, no invariant broken, in {took:.1?}"
    );
    let most = env("SIM_MOST_SECONDS").map(Duration::from_secs);
    assert!(
        most.is_none_or(|most| took <= most),
        "no invariant broken, but {runs} runs took {took:.1?}, more than SIM_MOST_SECONDS ({most:?}): this machine is slow or \
         busy (`make simulate SIM_MOST_SECONDS=` does not look at the time), or a run has become slower"
    );
}

fn env(name: &str) -> Option<u64> {
    std::env::var(name).ok().and_then(|value| value.parse().ok())
}

#[test]
fn no_seed_breaks_an_invariant() {
    runs(0..env("SEEDS").unwrap_or(SEEDS));
}

#[test]
fn the_documents_state_the_numbers_of_runs_and_of_fault_kinds() {
    const FULL: u64 = 20_000;
    let (profiles, kinds) = (Profile::ALL.len() as u64, crate::testing::Fault::ALL.len());
    assert_eq!(Profile::ALL, [Profile::None, Profile::Mixed, Profile::Heavy], "a third of each");
    assert!(include_str!("../../Makefile").contains(&format!("SEEDS:-{FULL}}}")));
    let guarantees = include_str!("../../docs/guarantees.md");
    let thousands = FULL * profiles / 1_000;
    for text in [
        format!("{} runs in each test run and {thousands},000 by", SEEDS * profiles),
        format!("{kinds} kinds of fault now and then"),
    ] {
        assert!(guarantees.contains(&text), "{text}");
    }
    let text = format!("on which {kinds} kinds of fault strike");
    assert!(include_str!("../../CHANGELOG.md").contains(&text), "{text}");
}

#[test]
fn equal_seeds_give_equal_runs() {
    for seed in 0..env("SEEDS").unwrap_or(SEEDS) / 20 {
        for profile in Profile::ALL {
            let (one, other) = (run(seed, profile, None, false), run(seed, profile, None, false));
            assert_eq!(one.hash, other.hash, "SEED={seed} {profile:?}");
        }
    }
}

/// Tests the checkers: they notice each deliberate fault of the protocol within 500 seeds.
#[test]
fn each_mutant_of_the_protocol_is_caught() {
    const MOST: u64 = 500;
    for mutant in Mutant::ALL {
        // Harmless by design: no other flight uses the token, so the late renewal finds no lease.
        let is_missed = mutant == Mutant::RenewalOutlivesRelease;
        let seeds = if is_missed { MOST / 10 } else { MOST };
        let caught = (0..seeds).flat_map(|seed| Profile::ALL.map(|profile| (seed, profile))).find_map(
            |(seed, profile)| {
                let violations = run(seed, profile, Some(mutant), false).violations;
                violations.into_iter().next().map(|violation| (seed, profile, violation))
            },
        );
        println!("{mutant:?}: {caught:?}");
        assert_eq!(caught.is_none(), is_missed, "{mutant:?}: {caught:?}");
    }
}

/// Runs and prints one run: SEED and PROFILE say which.
#[test]
#[ignore = "takes SEED and PROFILE"]
fn one() {
    let seed = env("SEED").expect("SEED is a number");
    let name = std::env::var("PROFILE").unwrap_or_default();
    let profile = Profile::ALL.into_iter().find(|profile| profile_name(*profile) == name);
    let profile = profile.expect("PROFILE is none, mixed or heavy");
    println!("{:#?}", Plan::draw(seed, profile));
    let report = run(seed, profile, None, true);
    println!("{}\n{} loads, {} faults", report.log.join("\n"), report.loads, report.struck);
    assert!(report.violations.is_empty(), "{}", report.violations.join("\n"));
}

/// Prints how many times each invariant is broken in SEEDS seeds, with the first seeds of each, for use during a change.
#[test]
#[ignore = "prints a summary and checks nothing"]
fn survey() {
    let mut found = std::collections::BTreeMap::<String, (u64, Vec<String>)>::new();
    for seed in 0..env("SEEDS").unwrap_or(SEEDS) {
        for profile in Profile::ALL {
            let began = Instant::now();
            let mut violations = run(seed, profile, None, false).violations;
            if began.elapsed().as_millis() > 500 {
                violations.push(format!("at 0: slow: {:?}", began.elapsed()));
            }
            for violation in violations {
                let kind = violation.split(": ").nth(1).unwrap_or(&violation).to_owned();
                let (count, first) = found.entry(kind).or_default();
                *count += 1;
                if first.len() < 4 {
                    first.push(format!("SEED={seed} PROFILE={} {violation}", profile_name(profile)));
                }
            }
        }
    }
    for (kind, (count, first)) in found {
        println!("{kind}: {count}\n    {}", first.join("\n    "));
    }
}

/// `make soak-sim`: runs SOAK_SEEDS seeds, from SEED or from a random start.
#[test]
#[ignore = "takes as long as SOAK_SEEDS says"]
fn soak() {
    let start = env("SEED").unwrap_or_else(|| fastrand::u64(..1 << 40));
    println!("from SEED={start}");
    runs(start..start + env("SOAK_SEEDS").unwrap_or(1_000_000));
}

/// Counts the runs in which an invariant is broken, of SEEDS runs for each profile: without faults, mixed and heavy.
fn caught(mutant: Option<Mutant>) -> String {
    let seeds = env("SEEDS").unwrap_or(SEEDS);
    let caught = Profile::ALL.map(|profile| {
        let next = AtomicU64::new(0);
        let work = || {
            let seed = || Some(next.fetch_add(1, Ordering::Relaxed)).filter(|seed| *seed < seeds);
            let is_caught = |seed: &u64| !run(*seed, profile, mutant, false).violations.is_empty();
            std::iter::from_fn(seed).filter(is_caught).count()
        };
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
            threads.into_iter().map(|thread| thread.join().expect("no panic")).sum::<usize>()
        })
    });
    format!("{caught:?} of {seeds} each")
}

/// For the table in the README of `planted`: counts for the code as it is, into which a patch may have planted a fault.
#[test]
#[ignore = "for the table"]
fn count_of_the_code() {
    println!("caught in {}", caught(None));
}

/// For the table in the README of `planted`: counts for each mutant.
#[test]
#[ignore = "for the table"]
fn counts_of_the_mutants() {
    for mutant in Mutant::ALL {
        println!("{mutant:?}: caught in {}", caught(Some(mutant)));
    }
}
