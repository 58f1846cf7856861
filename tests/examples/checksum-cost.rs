//! `checksum-cost`: nanoseconds of the checksum of a 4 KiB page, which the host of optimistic reads computes
//! for each page that it learns or reads; median of 101 runs. `scripts/compare/optimistic` prints it: in an
//! emulated guest it is a multiple of what it is on a processor.
#![forbid(unsafe_code)]

use std::hint::black_box;
use std::time::Instant;

use nvme_spec::optimistic::page_checksum;

const PAGES: usize = 64;

fn main() {
    let data: Vec<u8> = (0..PAGES * 4096).map(|at| at.to_le_bytes()[at % 3]).collect();
    let run = || {
        let began = Instant::now();
        for page in data.chunks_exact(4096) {
            black_box(page_checksum(black_box(page)));
        }
        began.elapsed().as_nanos() / PAGES as u128
    };
    let mut times: Vec<u128> = (0..101).map(|_| run()).collect();
    times.sort_unstable();
    println!("{}", times[times.len() / 2]);
}
