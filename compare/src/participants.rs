//! The participants, and the command that starts a process of each.

use std::path::{Path, PathBuf};
use std::process::Command;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Language {
    Rust,
    Python,
    Node,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Participant {
    pub(crate) name: &'static str,
    pub(crate) language: Language,
}

const fn of(language: Language, name: &'static str) -> Participant {
    Participant { name, language }
}

/// In the order of the table.
pub(crate) const ALL: [Participant; 17] = [
    of(Language::Rust, "unguarded"),
    of(Language::Rust, "guard-loader"),
    of(Language::Rust, "guard-layer"),
    of(Language::Rust, "guard-local"),
    of(Language::Rust, "hitbox"),
    of(Language::Rust, "tower-http-cache"),
    of(Language::Rust, "cached"),
    of(Language::Rust, "moka"),
    of(Language::Rust, "foyer"),
    of(Language::Rust, "multi-tier-cache"),
    of(Language::Rust, "cachet"),
    of(Language::Rust, "rslock"),
    of(Language::Python, "dogpile.cache"),
    of(Language::Python, "cashews"),
    of(Language::Node, "bentocache"),
    of(Language::Node, "cacheable"),
    // The measure of hits, and of nothing else.
    of(Language::Rust, "redis-get"),
];

impl Participant {
    /// The command line of one process.
    pub(crate) fn command(&self) -> Command {
        match self.language {
            Language::Rust => {
                let mut command = Command::new(std::env::current_exe().expect("the path of this program"));
                command.arg("replica");
                command
            }
            Language::Python => {
                let mut command = Command::new(tools().join("python/bin/python"));
                command.arg(folder().join("python/replica.py"));
                command
            }
            Language::Node => {
                let mut command = Command::new("node");
                // A copy: an `import` looks for modules in the folders above the program.
                command.arg(tools().join("node/replica.mjs"));
                command
            }
        }
    }
}

/// The folder `compare`.
pub(crate) fn folder() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Where `make compare` installs what Python and Node need: the target folder.
fn tools() -> PathBuf {
    let tools = std::env::var_os("COMPARE_TOOLS").map(PathBuf::from);
    tools.expect("COMPARE_TOOLS names the folder with python and node: run `make compare`")
}

/// Whether the environment variable selects `name`: names or their beginnings, with commas; all if there is none.
pub(crate) fn is_selected(variable: &str, name: &str) -> bool {
    let names = std::env::var(variable).unwrap_or_default();
    names.is_empty() || names.split(',').any(|part| name.starts_with(part.trim()))
}
