//! The comparison with other libraries: harness, and the processes of Rust libraries. See docs/comparison.md.
//!
//! ```text
//! make compare                               everything, and the page and its plots
//! make compare ONLY=moka,guard SCENARIO=cold a part: subjects and scenarios whose names begin like that
//! make compare-test                          a short run that checks the harness by its counts
//! ```

mod check;
mod fleet;
mod origin;
mod participants;
mod replica;
mod results;
mod scenarios;
mod stats;
mod subjects;
#[allow(dead_code)] // Shared with the tests, which use more of it.
mod support;
mod wire;

use std::process::ExitCode;

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["replica"] => {
            replica::run();
            ExitCode::SUCCESS
        }
        ["check"] => check::run(),
        ["run"] => scenarios::run(),
        _ => {
            eprintln!("usage: stampede-compare run | check | replica   (`make compare` calls it)");
            ExitCode::FAILURE
        }
    }
}
