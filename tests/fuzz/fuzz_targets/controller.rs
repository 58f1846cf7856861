//! What a host sends, into the target.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| spindle_tests::fuzz::controller::run(bytes));
