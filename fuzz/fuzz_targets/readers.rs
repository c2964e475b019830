//! Any bytes for one of the crate's readers; the tests run the same over `tests/corpus/readers`.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &[u8]| stampede_guard::fuzzed::run(text));
