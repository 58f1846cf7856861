//! What a target sends, into the host's connection.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| spindle_tests::fuzz::host::run(bytes));
