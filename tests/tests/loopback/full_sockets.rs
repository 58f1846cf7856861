//! Sockets whose buffers are far smaller than a reply: what is sent follows the host's reading, and no timer
//! of the target.
//!
//! The bounds are ten times what a loaded machine takes. Were a full socket only sent to at the target's tick
//! (50 ms), each read of 1 MiB would take eight ticks, and the bound would be passed many times over.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use spindle_nvme_initiator::{Controller, Options, Ticket};
use spindle_tests::loopback::{Folder, config, free_port, target};

use super::{RAM, V4, buf, bytes, done, pool};

/// Longest that [`READS`] may take: by ticks they would take `READS * 8 * 50 ms`, 51 s.
const BOUND: Duration = Duration::from_secs(10);
const READS: usize = 128;
const MIB: u32 = 1 << 20;

/// So many reads of 1 MiB, `depth` at a time, from a target with such socket buffers; with `writes`, each is
/// followed by a write, so that the target has something to receive whenever its socket is full.
fn read(test: &str, socket_buffer: &str, depth: usize, writes: bool) -> Duration {
    let address = free_port(V4);
    let folder = Folder::new(test);
    let text = config(1, address, &[RAM.to_owned()]) + &format!("[tcp]\nsocket_buffer = {socket_buffer}\n");
    let served = folder.serve(&text);
    let mut controller = Controller::connect(&target(address), &Options::default()).expect("connects");
    let namespace = controller.namespace(1).expect("a namespace");
    let mut queue = controller.connect_queue(1).expect("a queue");
    let pool = pool();
    let ticket = queue.write(&namespace, 0, buf(&pool, MIB, 3), false).expect("taken");
    done(&mut queue, ticket);
    let written = bytes(&buf(&pool, MIB, 3));

    let begin = Instant::now();
    let mut flying: VecDeque<Ticket> = VecDeque::new();
    for _ in 0..READS {
        if flying.len() == depth {
            let read = done(&mut queue, flying.pop_front().expect("one")).expect("its buffer");
            assert!(read.as_slice().expect("one piece") == written);
        }
        flying.push_back(queue.read(&namespace, 0, pool.take(MIB).expect("a buffer")).expect("taken"));
        if writes {
            let ticket = queue.write(&namespace, 4096, buf(&pool, 4096, 1), false).expect("taken");
            done(&mut queue, ticket);
        }
    }
    for ticket in flying {
        done(&mut queue, ticket);
    }
    let took = begin.elapsed();
    drop(queue);
    controller.shutdown().expect("ends in order");
    served.terminate();
    took
}

#[test]
fn large_reads_follow_a_small_send_buffer_and_not_a_timer() {
    for (depth, writes) in [(1, false), (4, false), (4, true)] {
        let took = read("full-sockets", "\"64KiB\"", depth, writes);
        assert!(took < BOUND, "{READS} reads of 1 MiB, {depth} at a time, took {took:?}");
    }
}

#[test]
fn large_reads_follow_larger_and_the_systems_own_send_buffers() {
    for socket_buffer in ["\"256KiB\"", "0"] {
        let took = read("full-sockets-others", socket_buffer, 4, false);
        assert!(took < BOUND, "{READS} reads of 1 MiB with {socket_buffer} took {took:?}");
    }
}
