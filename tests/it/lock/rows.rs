//! Checks that the table of rows is complete: no row is missing, and every test that it names exists and cites its row.

use crate::support::rows;

/// How many rows each system has in the table.
const SYSTEMS: [(&str, u32); 6] = [("S0", 24), ("S1", 27), ("S2", 18), ("S3", 23), ("S4", 36), ("S5", 16)];

#[test]
fn every_row_is_answered_by_a_test_that_cites_it_or_by_design() {
    let all = SYSTEMS.iter().flat_map(|(system, rows)| (1..=*rows).map(move |row| format!("{system}.{row}")));
    rows::check("tests/it/lock/ROWS.md", all);
}
