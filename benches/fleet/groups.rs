//! Runs those groups of rows that the command line names, and prints their results.

use crate::table::Table;

/// A group of rows: the name by which it is selected, and the function that measures it.
pub(crate) type Group = (&'static str, fn(&mut Table));

/// Runs the groups whose names contain an argument of the command line, or all groups if there is none.
pub(crate) fn measure(bench: &str, method: &str, groups: &[Group]) {
    let (options, names): (Vec<_>, Vec<_>) = std::env::args().skip(1).partition(|arg| arg.starts_with('-'));
    if !options.iter().any(|option| option == "--bench") {
        // `cargo test --all-targets` runs benches, too, and the numbers of a debug build would only mislead.
        println!("nothing to test here; measure with `cargo bench --bench {bench}`");
        return;
    }
    print!("{method}");
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    println!("{processors} processors, load before: {}\n", load());
    let mut table = Table::default();
    for (name, rows) in groups {
        if names.is_empty() || names.iter().any(|requested| name.contains(requested.as_str())) {
            rows(&mut table);
        }
    }
    let strict = std::env::var_os("STRICT").is_some_and(|strict| strict == "1");
    let failed = table.finish(strict);
    println!("\nload after: {}", load());
    if failed {
        std::process::exit(1);
    }
}

/// The load averages of the machine, if the system reports them.
fn load() -> String {
    let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    load.split(' ').take(3).collect::<Vec<_>>().join(" ")
}
