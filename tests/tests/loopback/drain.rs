//! SIGTERM: what is in flight ends, nothing new begins, and the process ends by its deadline.

use std::net::SocketAddr;
use std::time::Instant;

use rustix::process::Signal;
use spindle_nvme_initiator::nvme_spec::Sqe;
use spindle_nvme_initiator::{Failure, Pages, Pool, Ticket, ZoneSpec};
use spindle_tests::loopback::raw::{RawHost, h2c_data, with_transport_data};
use spindle_tests::loopback::{Folder, LONG, SpindleProcess, config, free_port};

use super::{V4, connect};

const BYTES: u32 = 64 << 10;

/// As long as a disk may stand still, and less than a test waits.
const PATIENT: &str = "[shutdown]\ndeadline_ms = 50000\n";

/// A host with a write that waits for its data; admin queue, I/O queue, and what was asked for.
fn begin_write(address: SocketAddr) -> (RawHost, RawHost, spindle_nvme_initiator::nvme_spec::tcp::R2t) {
    let (admin, cntlid) = RawHost::admin(address);
    let mut io = RawHost::io(address, 1, cntlid);
    io.send(&with_transport_data(Sqe::write(7, 1, 0, BYTES / 512, false), BYTES));
    let r2t = io.r2t();
    (admin, io, r2t)
}

/// SIGTERM; returns when the (only) core drains: it takes no connection any more.
fn begin_drain(served: &mut SpindleProcess, address: SocketAddr) {
    served.signal(Signal::TERM);
    served.wait_for("shutting down");
    let begin = Instant::now();
    while RawHost::open(address).initialize() {
        assert!(begin.elapsed() < LONG, "it takes connections still");
    }
}

#[test]
fn at_sigterm_what_is_in_flight_ends_and_nothing_new_begins() {
    let address = free_port(V4);
    let folder = Folder::new("drain");
    let text = config(1, address, &[folder.file_disk("disk", "16MiB")]) + PATIENT;
    let mut served = folder.serve(&text);
    let (mut admin, mut io, r2t) = begin_write(address);
    begin_drain(&mut served, address);
    io.send(&with_transport_data(Sqe::read(8, 1, 0, 8), 4096));
    io.send(&h2c_data(&r2t, &vec![0x5a; BYTES as usize]));
    let cqe = io.completion();
    assert_eq!((cqe.cid(), cqe.status().is_success()), (7, true));
    assert!(io.receive().is_none(), "the read came too late, and the connection ends");
    assert!(admin.receive().is_none(), "the host is disconnected");
    let status = served.end();
    assert!(status.success(), "{status}\n{}", served.log.join("\n"));
    let disk = std::fs::read(folder.file("disk")).expect("the disk");
    assert!(disk[..BYTES as usize].iter().all(|byte| *byte == 0x5a), "what was acknowledged is there");
}

#[test]
fn a_host_that_does_not_finish_is_cut_off_at_the_deadline() {
    let address = free_port(V4);
    let folder = Folder::new("deadline");
    let text = config(1, address, &[folder.file_disk("disk", "16MiB")]) + "[shutdown]\ndeadline_ms = 50\n";
    let mut served = folder.serve(&text);
    let (mut admin, mut io, _) = begin_write(address);
    served.signal(Signal::TERM);
    assert!(!served.end().success(), "somebody is to look why");
    assert!(served.log.join("\n").contains("connections were still open after 50ms"), "{:?}", served.log);
    assert!(io.receive().is_none() && admin.receive().is_none());
}

#[test]
fn acknowledged_writes_are_on_disk_after_sigterm_and_the_others_end_as_lost() {
    let address = free_port(V4);
    let folder = Folder::new("terminated");
    let served = folder.serve(&(config(2, address, &[folder.file_disk("disk", "16MiB")]) + PATIENT));
    let (mut controller, mut queue) = connect(address);
    let namespace = controller.namespace(1).expect("a namespace");
    let pool = Pool::new(&[ZoneSpec { buffer_bytes: BYTES, count: 100 }], Pages::Base).expect("a pool");
    let tickets: Vec<Ticket> = (0..100_u8)
        .map(|at| {
            let mut buf = pool.take(BYTES).expect("a buffer");
            buf.as_mut_slice().expect("one piece").fill(at + 1);
            queue.write(&namespace, u64::from(at) * u64::from(BYTES / 512), buf, false).expect("taken")
        })
        .collect();
    queue.send();
    served.signal(Signal::TERM);
    let results: Vec<_> =
        tickets.into_iter().map(|ticket| queue.wait(ticket, LONG).expect("an end")).collect();
    served.terminate();
    let disk = std::fs::read(folder.file("disk")).expect("the disk");
    for ((at, completion), found) in (1_u8..).zip(results).zip(disk.chunks_exact(BYTES as usize)) {
        match completion.result {
            Ok(()) => assert!(found.iter().all(|byte| *byte == at), "block {at} was acknowledged"),
            Err(failure) => assert_eq!(failure, Failure::Lost, "block {at}"),
        }
    }
}
