//! Programs of operations on the request machine.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| spindle_tests::fuzz::operations::run(bytes));
