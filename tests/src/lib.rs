//! What the end-to-end tests share: the seeded simulator ([`sim`]).
//!
//! The tests themselves are in `tests/`: simulation seeds, two-process loopback, tidy rules; the lab's bodies are in `tests/lab`.
#![forbid(unsafe_code)]

pub mod direct;
pub mod sim;
