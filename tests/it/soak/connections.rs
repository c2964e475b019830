//! Whether the processes open more connections than the faults explain.

use super::oracle::{Event, Incarnation, Row, ns};
use super::*;

/// The connections of the processes, as their proxies have accepted them.
pub(super) struct Opened {
    /// For each slot, when each connection was accepted, in order.
    pub(super) at: Vec<Vec<u64>>,
    /// From when until when there was no fault.
    pub(super) calm: (u64, u64),
    /// How many tokens were issued, if the processes log in with tokens.
    pub(super) tokens: Option<usize>,
}

/// The most in a second, in whatever weather. The pauses of a connection that can not be opened are anywhere below 20, 40, 80, .. 500
/// ms, ten attempts in the first second or so, and a process has two connections.
const IN_A_SECOND: usize = 30;

/// The most in ten seconds without a fault, where there are tokens: a machine that stands still for a second costs two. Opening anew when
/// a token of two seconds ends costs ten, and with each renewal fourteen. Without tokens a tenth of a second costs two, which may
/// happen anywhere.
const IN_TEN_SECONDS: usize = 8;

/// How long a fault explains connections after its end: a provider of credentials that has failed is called again after five seconds
/// at the latest, and connections are opened again half a second later at the latest.
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

/// The largest number of these times within one window.
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
    // Two of a machine that stood still.
    let stall: Vec<_> = first.iter().copied().chain(at(5 * second, 1, 2)).collect();
    assert!(evaluate(stall, &[]).is_empty());
    // Two with each token.
    let each: Vec<_> = first.iter().copied().chain(at(2 * second, second * 7 / 10, 40)).collect();
    let broken = evaluate(each.clone(), &[]);
    assert!(broken.len() == 1 && broken[0].contains("15 in 10 s"), "{broken:?}");
    // The same while the server is away.
    let fault = Event { what: "", whom: None, from: 2 * second, until: 25 * second, loses_data: false };
    assert!(evaluate(each, &[fault]).is_empty());
    // Attempts without a pause.
    let fast: Vec<_> = at(2 * second, second / 100, 100).collect();
    assert_eq!(evaluate(fast, &[fault]).len(), 1);
}
