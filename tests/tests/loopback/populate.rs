//! A RAM disk that takes its memory when it is made.

use std::time::Instant;

use spindle_tests::loopback::{Folder, LONG, SpindleProcess, config, free_port};

use super::{V4, buf, bytes, connect, done, pool};

const MIB: u64 = 1 << 20;

/// What the process holds of the machine's memory.
fn resident_mib(served: &SpindleProcess) -> u64 {
    let status = format!("/proc/{}/status", served.pid().as_raw_nonzero());
    let text = std::fs::read_to_string(status).expect("the process is there");
    let line = text.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("a line of it");
    let kib: u64 = line.trim().trim_end_matches(" kB").parse().expect("a number");
    kib * 1024 / MIB
}

/// Of write number `at`.
fn seed(at: u64) -> u8 {
    u8::try_from(at + 1).expect("few")
}

#[test]
fn a_ram_disk_may_have_all_of_its_memory_before_it_is_written() {
    let folder = Folder::new("populate");
    let ram = "kind = \"ram\"\nsize = \"512MiB\"\n";
    let address = free_port(V4);
    let lazy = folder.serve(&config(1, address, &[ram.to_owned()]));
    let before = resident_mib(&lazy);
    assert!(before < 256, "{before} MiB of a disk that was never written");
    lazy.terminate();

    let mut served = folder.serve(&config(1, address, &[format!("{ram}populate = true")]));
    // What is written meanwhile stays.
    let (mut controller, mut queue) = connect(address);
    let namespace = controller.namespace(1).expect("a namespace");
    let pool = pool();
    let place = |at: u64| at * (namespace.blocks / 64);
    for at in 0..64 {
        let ticket = queue.write(&namespace, place(at), buf(&pool, 4096, seed(at)), false).expect("taken");
        done(&mut queue, ticket);
    }
    served.wait_for("all of its memory is taken");
    for at in 0..64 {
        let wanted = bytes(&buf(&pool, 4096, seed(at)));
        let ticket = queue.read(&namespace, place(at), pool.take(4096).expect("a buffer")).expect("taken");
        assert_eq!(bytes(&done(&mut queue, ticket).expect("its buffer")), wanted, "write {at}");
    }
    let begin = Instant::now();
    while resident_mib(&served) < 512 {
        assert!(begin.elapsed() < LONG, "{} MiB", resident_mib(&served));
    }
    served.terminate();
}
