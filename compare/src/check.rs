//! `make compare-test`: whether the harness counts right, on cases whose answer is known.

use std::process::ExitCode;
use std::time::Duration;

use crate::fleet::{Fleet, Options, burst, now_ms};
use crate::origin::Kind;
use crate::participants::{ALL, Language};
use crate::stats::calls;

/// One participant of each language, with the loads of a cold key that two processes of five callers ask for.
const CASES: [(&str, usize); 5] =
    [("unguarded", 10), ("moka", 2), ("guard-loader", 1), ("dogpile.cache", 1), ("bentocache", 2)];

pub(crate) fn run() -> ExitCode {
    let mut wrong = 0;
    let mut expect = |what: String, seen: usize, expected: usize| {
        println!("{} {what}: {seen}", if seen == expected { "ok    " } else { "WRONG " });
        if seen != expected {
            println!("       expected {expected}");
            wrong += 1;
        }
    };
    for (name, loads) in CASES {
        let participant = ALL.iter().find(|each| each.name == name).expect("a participant");
        let language = format!("{:?}", participant.language);
        let mut fleet = Fleet::start(participant, Options { processes: 2, ..Options::default() })
            .unwrap_or_else(|error| panic!("{error}"));
        let replies = fleet.ask_all(&burst(&["cold".to_owned()], 5, now_ms() + 150.0)).expect("replies");
        let calls = calls(&replies);
        expect(format!("{name} ({language}): loads of a cold key"), fleet.origin.loads(), loads);
        let values = calls.iter().filter(|call| call.2.starts_with("=v1-")).count();
        expect(format!("{name} ({language}): values"), values, 10);
        if participant.language != Language::Python {
            // Threads that poll for a lock may well need longer.
            let slow = calls.iter().filter(|call| call.1 > 5_000_000 || call.1 < 150_000).count();
            expect(format!("{name} ({language}): answers outside 0.15 to 5 s of a load of 0.2 s"), slow, 0);
        }
        fleet.origin.reset();
        fleet.origin.set_latency(Duration::ZERO);
        fleet.ask_all(&burst(&["cold".to_owned()], 5, now_ms() + 50.0)).expect("replies");
        let again = if name == "unguarded" { 10 } else { 0 };
        expect(format!("{name} ({language}): loads when it is requested again"), fleet.origin.loads(), again);
    }
    let guard = ALL.iter().find(|each| each.name == "guard-loader").expect("a participant");
    let options = Options { processes: 2, kind: Kind::Failure, ..Options::default() };
    let mut fleet = Fleet::start(guard, options).unwrap_or_else(|error| panic!("{error}"));
    let replies = fleet.ask_all(&burst(&["failing".to_owned()], 5, now_ms() + 150.0)).expect("replies");
    let errors = calls(&replies).iter().filter(|call| call.2.starts_with('!')).count();
    expect("guard-loader: errors of a failing origin".to_owned(), errors, 10);
    expect("guard-loader: loads of a failing origin".to_owned(), fleet.origin.loads(), 1);
    if wrong > 0 {
        eprintln!("{wrong} counts are wrong");
        return ExitCode::FAILURE;
    }
    ExitCode::SUCCESS
}
