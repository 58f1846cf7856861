//! What the end-to-end tests share: the seeded simulator ([`sim`]), a target driven by hand over NVMe/TCP
//! ([`direct`]) and over scripted connections ([`script`]), queue pairs without devices for NVMe/RDMA
//! ([`fabric`]), the user-space NVMe driver over its emulator ([`drive`]), and the bodies of the fuzzers
//! ([`fuzz`]).
//!
//! The tests themselves are in `tests/`: simulation seeds, the request machine, two-process loopback,
//! corpora, tidy rules; the lab's bodies are in `tests/lab`.
#![forbid(unsafe_code)]

pub mod direct;
pub mod drive;
pub mod fabric;
pub mod fuzz;
pub mod loopback;
pub mod script;
pub mod sim;
