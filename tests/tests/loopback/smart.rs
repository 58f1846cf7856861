//! The SMART log counts what was done, on each namespace and in all.

use spindle_nvme_initiator::nvme_spec::log::{LogId, SmartLog};
use spindle_nvme_initiator::nvme_spec::sqe::NSID_ALL;
use spindle_nvme_initiator::nvme_spec::zerocopy::FromBytes;
use spindle_nvme_initiator::{BlockRange, Controller};
use spindle_tests::loopback::{Folder, LONG, config, free_port};

use super::{NULL, RAM, V4, buf, connect, done, pool};

/// Data units read and written, commands that read and wrote, entries of the error log.
fn counted(controller: &mut Controller, nsid: u32) -> [u128; 5] {
    let page = controller.log_page(LogId::SMART, nsid, 0, 512, false).expect("the SMART log");
    let log = SmartLog::read_from_bytes(&page).expect("512 bytes");
    let units = [log.data_units_read.get(), log.data_units_written.get()];
    [units[0], units[1], log.host_reads.get(), log.host_writes.get(), log.error_log_entries.get()]
}

#[test]
fn the_smart_log_counts_what_was_done() {
    let address = free_port(V4);
    let folder = Folder::new("smart");
    let served = folder.serve(&config(2, address, &[RAM.to_owned(), NULL.to_owned()]));
    // Several controllers, whose queues are on both cores: what one did, the others see.
    let (mut first, mut queue) = connect(address);
    let (mut second, mut other) = connect(address);
    assert_eq!(counted(&mut first, NSID_ALL), [0; 5]);
    let (one, two) = (first.namespace(1).expect("one"), first.namespace(2).expect("two"));
    let pool = pool();
    // 512,000 bytes are one data unit to the byte.
    let ticket = queue.write(&one, 0, buf(&pool, 512_000, 1), false).expect("taken");
    done(&mut queue, ticket);
    assert_eq!(counted(&mut first, 1), [0, 1, 0, 1, 0]);
    let ticket = queue.write(&one, 0, buf(&pool, 512, 1), true).expect("taken");
    done(&mut queue, ticket);
    assert_eq!(counted(&mut first, 1), [0, 2, 0, 2, 0], "part of a unit is one");
    for _ in 0..3 {
        let ticket = other.read(&two, 0, buf(&pool, 1 << 20, 1)).expect("taken");
        done(&mut other, ticket);
    }
    // 6,144 blocks.
    assert_eq!(counted(&mut second, 2), [7, 0, 3, 0, 0]);
    let ticket = other.compare(&one, 0, buf(&pool, 512, 1)).expect("taken");
    done(&mut other, ticket);
    assert_eq!(counted(&mut first, NSID_ALL), [7, 2, 4, 2, 0]);
    // What moves no data of the user is not counted.
    let ticket = queue.flush(&one).expect("taken");
    done(&mut queue, ticket);
    let ticket = queue.write_zeroes(&one, BlockRange { lba: 0, blocks: 8 }, true).expect("taken");
    done(&mut queue, ticket);
    assert_eq!(counted(&mut first, NSID_ALL), [7, 2, 4, 2, 0]);
    // A refused command is in the error log of its controller, and in no other counter.
    let ticket = queue.read(&one, one.blocks, buf(&pool, 512, 0)).expect("taken");
    assert!(queue.wait(ticket, LONG).expect("an answer").result.is_err(), "beyond the end");
    assert_eq!(counted(&mut second, NSID_ALL), [7, 2, 4, 2, 0]);
    let begin = std::time::Instant::now();
    // The queue's core tells the controller's by message.
    while counted(&mut first, NSID_ALL)[4] == 0 {
        assert!(begin.elapsed() < LONG, "the error was not counted");
    }
    assert_eq!(counted(&mut first, NSID_ALL), [7, 2, 4, 2, 1]);
    drop((queue, other));
    first.shutdown().expect("ends in order");
    second.shutdown().expect("ends in order");
    served.terminate();
}
