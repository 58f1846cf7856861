//! Private data, references, seals and pages of optimistic reads.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| spindle_tests::fuzz::optimistic::run(bytes));
