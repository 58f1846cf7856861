//! A disk with a cache: hosts that keep its pages in use.

use nvme_spec::Sqe;
use serde_json::json;
use spindle_tests::loopback::raw::{RawHost, with_transport_data};
use spindle_tests::loopback::{Folder, config, free_port};

use super::control::{Client, with_socket};
use super::{V4, bytes, connect, done, pool};

/// Bytes of the cache, and of each read of the host that takes no reply.
const CACHE: u32 = 1 << 20;
const BLOCKS: u32 = CACHE / 4096;

/// Replies that no host takes pin the pages that they are sent from. Another host goes around the cache, and
/// the pages are free again when the first has gone.
#[test]
fn a_host_that_takes_no_replies_keeps_no_other_from_the_disk() {
    let (address, folder) = (free_port(V4), Folder::new("cached-pinned"));
    let socket = folder.file("sock");
    let disk = folder.file_disk("disk", "16MiB")
        + "\nblock_bytes = 4096\n[disk.cache]\nsize = \"1MiB\"\nread_ahead = 0";
    let served = folder.serve(&with_socket(&config(1, address, &[disk]), &socket));
    let mut client = Client::new(&socket);
    let mut counted = |name: &str| {
        client.done("bdev_get_iostat", json!({}))["bdevs"][0]["cache"][name].as_u64().expect("a number")
    };
    let (mut controller, mut queue) = connect(address);
    let namespace = controller.namespace(1).expect("a namespace");
    let pool = pool();
    let mut read = |lba: u64| {
        let ticket = queue.read(&namespace, lba, pool.take(4096).expect("a buffer")).expect("taken");
        bytes(&done(&mut queue, ticket).expect("its buffer"))
    };
    // All of the cache is the first blocks.
    let is_full = (0..1000).any(|_| {
        let before = counted("hits");
        (0..u64::from(BLOCKS)).for_each(|lba| _ = read(lba));
        counted("hits") - before == u64::from(BLOCKS)
    });
    assert!(is_full);
    // While the cache's memory becomes resident, a read may find no frame.
    let passed = counted("passed");
    let (admin, cntlid) = RawHost::admin(address);
    let mut deaf = RawHost::io(address, 1, cntlid);
    for cid in 0..16 {
        deaf.send(&with_transport_data(Sqe::read(cid, 1, 0, BLOCKS / 2), CACHE / 2));
        deaf.send(&with_transport_data(Sqe::read(cid + 16, 1, u64::from(BLOCKS / 2), BLOCKS / 2), CACHE / 2));
    }
    // Its commands are with the target before the pages that come now.
    let is_around = (0..100_000).any(|at| {
        assert_eq!(read(1024 + at % 1024), [0; 4096]);
        at % 64 == 63 && counted("passed") != passed
    });
    assert!(is_around, "no page was in use");
    drop((admin, deaf));
    // What comes into the cache again is found.
    let is_found = (0..100_000).any(|_| {
        let before = counted("passed");
        (2000..2100).for_each(|lba| _ = read(lba));
        counted("passed") == before
    });
    assert!(is_found, "pages are still in use");
    drop((controller, queue));
    served.terminate();
}

/// A request of the target has a number that comes round. Reads that pass around the cache beside writes end
/// as their own, however often their numbers were used.
#[test]
fn reads_past_a_cache_beside_writes_are_answered_however_many_there_were() {
    let (address, folder) = (free_port(V4), Folder::new("cached-many"));
    let disk = folder.file_disk("disk", "16MiB") + "\nblock_bytes = 4096\n[disk.cache]\nsize = \"1MiB\"";
    let served = folder.serve(&config(1, address, &[disk]));
    let (mut controller, mut queue) = connect(address);
    let namespace = controller.namespace(1).expect("a namespace");
    let pool = pool();
    let mut written = [0u8; 4096];
    let mut place = 1u64;
    // The number has 15 bits that change, above 16 that do not.
    for round in 0..36_000u32 {
        place = place.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let (to, from) = (place >> 33 & 0xfff, place >> 45 & 0xfff);
        let [byte, ..] = round.to_le_bytes();
        let mut data = pool.take(4096).expect("a buffer");
        data.copy_in(0, &[byte; 4096]);
        let write = queue.write(&namespace, to, data, false).expect("taken");
        let read = queue.read(&namespace, from, pool.take(4096).expect("a buffer")).expect("taken");
        done(&mut queue, write);
        let found = bytes(&done(&mut queue, read).expect("its buffer"));
        let before = written[usize::try_from(from).expect("small")];
        assert!(
            found == [before; 4096] || from == to && found.iter().all(|it| *it == before || *it == byte),
            "round {round}: block {from}"
        );
        written[usize::try_from(to).expect("small")] = byte;
    }
    drop((controller, queue));
    served.terminate();
}
