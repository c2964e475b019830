//! The results of a run: a JSON file per scenario in `compare/results`, the data of docs/comparison.md.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::process::Command;

use serde_json::{Value, json};

use crate::participants::folder;

/// The results of one scenario. A run of a part replaces what it measured and leaves the rest.
pub(crate) struct Results {
    path: PathBuf,
    content: BTreeMap<String, Value>,
}

impl Results {
    pub(crate) fn open(scenario: &str) -> Self {
        let into = std::env::var_os("RESULTS").map_or_else(|| folder().join("results"), PathBuf::from);
        fs::create_dir_all(&into).expect("a folder for results");
        let path = into.join(format!("{scenario}.json"));
        let content = fs::read_to_string(&path).ok().and_then(|text| serde_json::from_str(&text).ok());
        Self { path, content: content.unwrap_or_default() }
    }

    /// Keeps one subject's cell: with the machine's load and the date, as runs of a part differ in both.
    pub(crate) fn keep(&mut self, subject: &str, version: &str, load_before: f64, cell: Value) {
        let entry = json!({
            "version": version,
            "date": today(),
            "load_before": load_before,
            "cell": cell,
        });
        self.content.insert(subject.to_owned(), entry);
        self.save();
    }

    fn save(&self) {
        let mut text = String::new();
        pretty(&serde_json::to_value(&self.content).expect("JSON"), 0, &mut text);
        fs::write(&self.path, text + "\n").expect("writing results");
    }
}

/// Objects with a line per field, lists on one line.
fn pretty(value: &Value, depth: usize, text: &mut String) {
    let Value::Object(fields) = value else {
        text.push_str(&value.to_string());
        return;
    };
    text.push('{');
    for (number, (name, value)) in fields.iter().enumerate() {
        let comma = if number == 0 { "" } else { "," };
        text.push_str(&format!("{comma}\n{}{}: ", "  ".repeat(depth + 1), Value::from(name.as_str())));
        pretty(value, depth + 1, text);
    }
    text.push_str(&format!("\n{}}}", "  ".repeat(depth)));
}

/// The machine and its tools, in `results/machine.json`.
pub(crate) fn keep_machine(before: f64, seconds: f64, complete: bool) {
    let first = |program: &str, args: &[&str]| {
        let output = Command::new(program).args(args).output().ok();
        let text = output.map(|output| String::from_utf8_lossy(&output.stdout).into_owned());
        text.and_then(|text| text.lines().next().map(str::to_owned)).unwrap_or_default()
    };
    let info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = info.lines().find_map(|line| line.strip_prefix("model name")?.split(": ").nth(1));
    let memory = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let memory = memory
        .lines()
        .find_map(|line| line.strip_prefix("MemTotal:")?.trim().split(' ').next()?.parse().ok());
    let into = std::env::var_os("RESULTS").map_or_else(|| folder().join("results"), PathBuf::from);
    let path = into.join("machine.json");
    // A run of a part does not say how long all takes.
    let whole = fs::read_to_string(&path).ok().and_then(|text| serde_json::from_str(&text).ok());
    let whole: Value = whole.unwrap_or_else(|| json!({ "minutes": null }));
    let machine = json!({
        "cpu": model,
        "cores": std::thread::available_parallelism().map(usize::from).unwrap_or_default(),
        "memory_gib": (memory.unwrap_or(0.0_f64) / 1_048_576.0).round(),
        "kernel": first("uname", &["-sr"]),
        "redis": first("redis-server", &["--version"]).split(' ').nth(2).unwrap_or_default().replace("v=", ""),
        "rustc": first("rustc", &["--version"]),
        "python": first("python3", &["--version"]),
        "node": first("node", &["--version"]),
        "date": today(),
        "complete": complete,
        "minutes": if complete { json!((seconds / 6.0).round() / 10.0) } else { whole["minutes"].clone() },
        "load_before": before,
        "load_after": load(),
    });
    let text = serde_json::to_string_pretty(&machine).expect("JSON");
    fs::write(path, text + "\n").expect("writing the machine");
}

/// The machine's load of the last minute.
pub(crate) fn load() -> f64 {
    let text = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split(' ').next().and_then(|load| load.parse().ok()).unwrap_or_default()
}

fn today() -> String {
    let output = Command::new("date").args(["-u", "+%Y-%m-%d"]).output().expect("running date");
    String::from_utf8_lossy(&output.stdout).trim().to_owned()
}
