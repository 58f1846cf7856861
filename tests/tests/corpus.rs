//! The fuzzers' corpora: everything in them is replayed, and a fixed number of mutants of it with a fixed
//! seed.
//!
//! `tests/fuzz/README.md` tells how to fuzz for longer. What a fuzzer finds goes into its corpus, under a
//! name that says what it is.
#![forbid(unsafe_code)]

use std::path::PathBuf;

use spindle_tests::fuzz::bytes::mutate;
use spindle_tests::fuzz::{ALL, Body};
use spindle_tests::sim::Rng;

/// Mutants of each corpus in a run of the tests: about two seconds of them.
const MUTANTS: usize = 3000;
/// Of drives, each of which is enabled, identified and shut down.
const DRIVE_MUTANTS: usize = 300;
/// Longest mutant.
const MUTANT_BYTES_MAX: usize = 16 << 10;
/// Bytes of all corpora together, so that a clone stays small.
const CORPORA_BYTES_MAX: u64 = 300 << 10;

fn folder(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus").join(name)
}

/// The files of a corpus with their names, in the order of these.
fn corpus(name: &str) -> Vec<(String, Vec<u8>)> {
    let entries = std::fs::read_dir(folder(name)).expect("a corpus");
    let mut files: Vec<_> = entries
        .map(|entry| {
            let entry = entry.expect("an entry");
            let bytes = std::fs::read(entry.path()).expect("a file");
            (entry.file_name().to_string_lossy().into_owned(), bytes)
        })
        .collect();
    files.sort();
    assert!(!files.is_empty(), "corpus {name} is empty");
    files
}

fn replay(name: &str, body: Body) {
    for (file, bytes) in corpus(name) {
        let outcome = std::panic::catch_unwind(|| body(&bytes));
        assert!(outcome.is_ok(), "tests/fuzz/corpus/{name}/{file}");
    }
}

fn smoke(name: &str, body: Body) {
    smoke_with(name, body, MUTANTS);
}

fn smoke_with(name: &str, body: Body, mutants: usize) {
    let corpus = corpus(name);
    // SPINDLE_FUZZ_SEED and SPINDLE_FUZZ_MUTANTS fuzz for longer, without a fuzzer.
    let number = |name: &str| std::env::var(name).ok().and_then(|value| value.parse().ok());
    let seed: u64 = number("SPINDLE_FUZZ_SEED").unwrap_or(1);
    let mutants =
        number("SPINDLE_FUZZ_MUTANTS").and_then(|count| usize::try_from(count).ok()).unwrap_or(mutants);
    let mut rng = Rng::new(seed);
    for round in 0..mutants {
        let (file, bytes) = &corpus[rng.size(0, corpus.len() - 1)];
        let (_, other) = &corpus[rng.size(0, corpus.len() - 1)];
        let mutant = mutate(&mut rng, bytes, other, MUTANT_BYTES_MAX);
        let outcome = std::panic::catch_unwind(|| body(&mutant));
        if outcome.is_err() {
            let kept = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}-{seed}-{round}"));
            std::fs::write(&kept, &mutant).expect("room on the disk");
            panic!("a mutant of tests/fuzz/corpus/{name}/{file}, kept as {}", kept.display());
        }
    }
}

fn body(name: &str) -> Body {
    let found = ALL.into_iter().find(|(known, _)| *known == name);
    found.map(|(_, body)| body).expect("a body of this name")
}

#[test]
fn the_corpus_of_what_hosts_send_is_replayed() {
    replay("controller", body("controller"));
}

#[test]
fn the_corpus_of_what_targets_send_is_replayed() {
    replay("host", body("host"));
}

#[test]
fn the_corpus_of_operations_is_replayed() {
    replay("operations", body("operations"));
}

#[test]
fn the_corpus_of_what_hosts_send_over_rdma_is_replayed() {
    replay("rdma", body("rdma"));
}

#[test]
fn the_corpus_of_optimistic_reads_is_replayed() {
    replay("optimistic", body("optimistic"));
}

#[test]
fn the_corpus_of_what_drives_answer_is_replayed() {
    replay("drive", body("drive"));
}

#[test]
fn mutants_of_what_drives_answer_break_no_promise() {
    smoke_with("drive", body("drive"), DRIVE_MUTANTS);
}

#[test]
fn mutants_of_optimistic_reads_break_no_promise() {
    smoke("optimistic", body("optimistic"));
}

#[test]
fn mutants_of_what_hosts_send_over_rdma_break_no_promise() {
    smoke("rdma", body("rdma"));
}

#[test]
fn mutants_of_what_hosts_send_break_no_promise() {
    smoke("controller", body("controller"));
}

#[test]
fn mutants_of_what_targets_send_break_no_promise() {
    smoke("host", body("host"));
}

#[test]
fn mutants_of_operations_break_no_promise() {
    smoke("operations", body("operations"));
}

#[test]
fn every_corpus_has_a_body_and_all_of_them_are_small() {
    let mut total = 0;
    for entry in std::fs::read_dir(folder("")).expect("corpora") {
        let name = entry.expect("an entry").file_name().to_string_lossy().into_owned();
        assert!(ALL.iter().any(|(known, _)| *known == name), "tests/fuzz/corpus/{name}");
        total += corpus(&name).iter().map(|(_, bytes)| bytes.len() as u64).sum::<u64>();
    }
    assert!(total <= CORPORA_BYTES_MAX, "{total} bytes of corpora");
}

#[test]
fn any_short_program_of_operations_breaks_no_promise() {
    let mut rng = Rng::new(7);
    for _ in 0..1000 {
        let length = rng.size(0, 300);
        let bytes: Vec<u8> = (0..length).map(|_| rng.draw().to_le_bytes()[3]).collect();
        let outcome = std::panic::catch_unwind(|| spindle_tests::fuzz::operations::run(&bytes));
        assert!(outcome.is_ok(), "{bytes:?}");
    }
}
