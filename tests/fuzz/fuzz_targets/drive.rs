//! What a drive answers and what its registers say, into our driver of NVMe drives.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| spindle_tests::fuzz::drive::run(bytes));
