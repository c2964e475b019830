//! Checks Markdown tables: each row is one promise or one flaw, and names the tests that cite it.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use super::root;

/// The page that cites the rows with `by design` in their last cell: no test cites those.
const ANSWERS: &str = "docs/decisions/602-earlier-systems.md";

/// Checks that a table has exactly these rows, each once. The last cell of a row names tests that exist and cite the row, or
/// says `by design`, and then docs/decisions/602-earlier-systems.md cites the row.
pub(crate) fn check(table: &str, rows: impl IntoIterator<Item = String>) {
    let table = read(table);
    let expected: Vec<_> = rows.into_iter().collect();
    let missing: Vec<_> = expected.iter().filter(|row| !table.contains_key(*row)).collect();
    assert!(missing.is_empty(), "missing: {missing:?}");
    assert_eq!(table.len(), expected.len(), "rows that there are not");
    let design = fs::read_to_string(root().join(ANSWERS)).expect("the answers are there");
    let mut wrong = Vec::new();
    for (row, answer) in table {
        if answer == "by design" {
            if !cites(&design, &row) {
                wrong.push(format!("{row}: {ANSWERS} does not say how it is answered"));
            }
            continue;
        }
        for test in answer.split(',').map(|test| test.trim().trim_matches('`')) {
            let (file, name) = find(test);
            match text_of(&file, &name) {
                None => wrong.push(format!("{row}: there is no {test}")),
                Some(text) if !cites(&text, &row) => wrong.push(format!("{row}: {test} does not cite it")),
                Some(_) => {}
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Maps each row's name to its last cell. A row is a line of three cells, the first of which ends in a digit.
fn read(table: &str) -> BTreeMap<String, String> {
    let text = fs::read_to_string(root().join(table)).expect("the table is there");
    let mut rows = BTreeMap::new();
    for line in text.lines() {
        let cells: Vec<_> = line.split('|').map(str::trim).collect();
        let ["", row, what, answer, ""] = cells[..] else { continue };
        if !row.ends_with(|last: char| last.is_ascii_digit()) {
            continue;
        }
        assert!(!what.is_empty() && what != "TODO", "{row} does not say what it is about");
        assert!(rows.insert(row.to_owned(), answer.to_owned()).is_none(), "{row} stands twice");
    }
    rows
}

/// The file and the name of a test, from `lock::wait::the_head_is_granted` or a path such as `src/lock/wait.rs::..`.
fn find(test: &str) -> (PathBuf, String) {
    let (module, name) = test.rsplit_once("::").unwrap_or_else(|| panic!("{test}: name a module and a test"));
    if module.ends_with(".rs") {
        return (root().join(module), name.to_owned());
    }
    let path = module.replace("::", "/");
    let file = root().join("tests/it").join(format!("{path}.rs"));
    let file = if file.exists() { file } else { root().join("tests/it").join(path).join("mod.rs") };
    (file, name.to_owned())
}

/// A test's text: from the comments above it to the brace that closes it.
fn text_of(file: &Path, name: &str) -> Option<String> {
    let text = fs::read_to_string(file).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
    let lines: Vec<_> = text.lines().collect();
    // The definition of the test or, if a macro makes the test, the line that names it.
    let find = |is_it: &dyn Fn(&str) -> bool| lines.iter().position(|line| is_it(line.trim_start()));
    let at = find(&|line| line.contains(&format!("fn {name}(")));
    let at = at.or_else(|| find(&|line| line == format!("{name},")))?;
    let begin = (0..at).rev().take_while(|&line| !lines[line].trim().is_empty()).last().unwrap_or(at);
    let margin = lines[at].len() - lines[at].trim_start().len();
    let last = lines[at][..margin].to_owned() + "}";
    let end = (at..lines.len()).find(|&line| lines[line] == last).unwrap_or(lines.len() - 1);
    Some(lines[begin..=end].join("\n"))
}

fn cites(text: &str, row: &str) -> bool {
    text.match_indices(row).any(|(at, _)| {
        let (before, after) = (text[..at].chars().next_back(), text[at + row.len()..].chars().next());
        !before.is_some_and(|last| last.is_ascii_alphanumeric())
            && !after.is_some_and(|next| next.is_ascii_digit())
    })
}
