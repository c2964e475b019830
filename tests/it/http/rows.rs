//! The table of rows is complete: no row is missing, and every test it names exists and cites its row.

use crate::support::rows;

#[test]
fn every_row_is_answered_by_a_test_that_cites_it() {
    let ranges = [("A", 1..=13), ("B", 1..=14), ("C", 6..=7), ("C", 12..=15), ("D", 1..=6), ("E", 1..=8)];
    let all = ranges.into_iter().flat_map(|(of, rows)| rows.map(move |row| format!("{of}{row}")));
    rows::check("tests/it/http/ROWS.md", all);
}
