//! Any bytes as an exchange; the tests run the same over `tests/corpus/exchange`.
#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../../tests/it/http/fuzzed.rs"]
mod fuzzed;

fuzz_target!(|text: &[u8]| fuzzed::run(text));
