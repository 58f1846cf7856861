//! The bodies of the fuzzers: each takes any bytes and panics when the code under it breaks a promise.
//!
//! libFuzzer calls them from `tests/fuzz/fuzz_targets`; `tests/corpus.rs` replays everything under
//! `tests/fuzz/corpus` and mutates it for a fixed number of rounds, so that what a fuzzer has found once
//! stays found.
//!
//! | body | bytes are | promises |
//! |---|---|---|
//! | [`controller`] | what a host sends | no panic, this connection only, every buffer home |
//! | [`host`] | what a target sends | no panic, each command ends once, every buffer home |
//! | [`rdma`] | what a host sends over RDMA | no panic, this connection only, every buffer home |
//! | [`optimistic`] | private data, references, seals, pages | no panic, only sealed pages are accepted |
//! | [`drive`] | what a drive answers, and its registers | no panic, each command ends once, all closed |
//! | [`operations`] | commands, aborts, resets, disconnects, time | the same, each command answered once |

pub mod bytes;
pub mod controller;
pub mod drive;
pub mod host;
pub mod operations;
pub mod optimistic;
pub mod rdma;

/// A body by its name, which is that of its corpus.
pub type Body = fn(&[u8]);

/// All of them.
pub const ALL: [(&str, Body); 6] = [
    ("controller", controller::run),
    ("drive", drive::run),
    ("host", host::run),
    ("operations", operations::run),
    ("optimistic", optimistic::run),
    ("rdma", rdma::run),
];
