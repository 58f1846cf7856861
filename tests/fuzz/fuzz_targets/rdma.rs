//! What a host sends over RDMA, into the target.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| spindle_tests::fuzz::rdma::run(bytes));
