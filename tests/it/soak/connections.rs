//! Checks that the processes open no more connections than the faults explain.

use super::oracle::{Event, Incarnation, Row, ns};
use super::*;

/// The connections of the processes, as their proxies have recorded them.
pub(super) struct Opened {
    /// For each slot, when each connection was accepted, in order.
    pub(super) at: Vec<Vec<u64>>,
    /// When the time without faults began, and when it ended.
    pub(super) calm: (u64, u64),
    /// How many tokens were issued, if the processes log in with tokens.
    pub(super) tokens: Option<usize>,
}

/// The most connections of a process in one second, whatever the faults. The pauses before the attempts at a connection are random, below
/// 20, 40, 80, .. 500 ms: ten attempts in the first second or so. A process has two connections.
const IN_A_SECOND: usize = 30;

/// The most in ten seconds without a fault, if there are tokens: a machine that stands still for a second costs two. If a guard opened new
/// connections when a token of two seconds ends, that would be ten, and at each renewal fourteen. Without tokens, a machine that stands
/// still for a tenth of a second costs two, which may happen at any time.
const IN_TEN_SECONDS: usize = 8;

/// For how long after its end a fault may be the cause of connections: a provider of credentials that has failed is called again after
/// at most five seconds, and connections are opened at most half a second after that.
const AFTER: Duration = Duration::from_secs(8);

pub(super) fn no_storm(opened: &Opened, events: &[Event], incarnations: &[Incarnation]) -> Row {
    let mut row = Row {
        promise: "no storm of connections".into(),
        checked: opened.at.iter().map(Vec::len).sum(),
        ..Row::default()
    };
    let (mut calm, mut unexplained, mut most) = (0, 0, 0);
    for (slot, all) in opened.at.iter().enumerate() {
        let strikes: Vec<_> = events
            .iter()
            .filter(|event| event.whom.is_none_or(|whom| incarnations[whom].slot == slot))
            .collect();
        let explained = |at: u64| {
            at < opened.calm.0
                || strikes.iter().any(|fault| fault.from <= at && at <= fault.until + ns(AFTER))
        };
        let rest: Vec<_> = all.iter().copied().filter(|at| !explained(*at)).collect();
        calm += all.iter().filter(|at| (opened.calm.0..opened.calm.1).contains(at)).count();
        unexplained += rest.len();
        most = most.max(most_within(all, Duration::from_secs(1)));
        let without_fault = (&rest, 10, if opened.tokens.is_some() { IN_TEN_SECONDS } else { usize::MAX });
        for (times, window, bound) in [(all, 1, IN_A_SECOND), without_fault] {
            let found = most_within(times, Duration::from_secs(window));
            if found > bound {
                row.broken.push(format!("slot {slot}: {found} in {window} s, at most {bound} are explained"));
            }
        }
    }
    let tokens = opened.tokens.map(|issued| format!("; {issued} tokens")).unwrap_or_default();
    let rested = Duration::from_nanos(opened.calm.1 - opened.calm.0).as_secs();
    row.worst = format!(
        "{calm} in the {rested} s before the first fault, {unexplained} without one in all; at most {most} of a process in a second{tokens}"
    );
    row
}

/// The largest number of these times that lie within one window of this length.
fn most_within(times: &[u64], window: Duration) -> usize {
    let within = |(first, from): (usize, &u64)| times[first..].partition_point(|at| at - from < ns(window));
    times.iter().enumerate().map(within).max().unwrap_or(0)
}

#[test]
fn connections_without_a_fault_are_a_storm_when_each_token_costs_some() {
    let second = ns(Duration::from_secs(1));
    let evaluate = |at: Vec<u64>, events: &[Event]| {
        let incarnations = [Incarnation { log: String::new(), slot: 0, killed: false }];
        let opened = Opened { at: vec![at], calm: (second, 10 * second), tokens: Some(9) };
        no_storm(&opened, events, &incarnations).broken
    };
    let (first, at) = (vec![0, 1], |from: u64, every: u64, n: u64| (0..n).map(move |i| from + i * every));
    assert!(evaluate(first.clone(), &[]).is_empty());
    // A machine that stood still costs two connections.
    let stall: Vec<_> = first.iter().copied().chain(at(5 * second, 1, 2)).collect();
    assert!(evaluate(stall, &[]).is_empty());
    // A guard that opens new connections for each token needs two each time.
    let each: Vec<_> = first.iter().copied().chain(at(2 * second, second * 7 / 10, 40)).collect();
    let broken = evaluate(each.clone(), &[]);
    assert!(broken.len() == 1 && broken[0].contains("15 in 10 s"), "{broken:?}");
    // The same connections are no storm while the server is away.
    let fault = Event { what: "", whom: None, from: 2 * second, until: 25 * second, loses_data: false };
    assert!(evaluate(each, &[fault]).is_empty());
    // Attempts to connect without pauses between them.
    let fast: Vec<_> = at(2 * second, second / 100, 100).collect();
    assert_eq!(evaluate(fast, &[fault]).len(), 1);
}
