//! Memory runs out under one connection's own writes: the data of those that have memory comes behind
//! commands that wait for it, in one byte stream.
#![forbid(unsafe_code)]

use std::sync::Arc;

use nvme_spec::Sqe;
use spindle_nvme_tcp::host::{HostData, HostEvent};
use spindle_reactor::mem::Buf;
use spindle_target_disk::Disk;
use spindle_target_disk::null::{NullDisk, NullSpec};
use spindle_tests::direct::Direct;

/// The core's pool has 8 buffers of 1 MiB.
#[test]
fn small_writes_that_wait_for_memory_let_the_data_of_large_ones_by() {
    let spec = NullSpec { bytes: 1 << 30, block_bytes: 512 };
    let disk: Arc<dyn Disk> = NullDisk::new("null", spec).expect("a disk");
    let mut direct = Direct::on(&disk);
    let mut sent = 0;
    let mut send = |direct: &mut Direct, bytes: u32| {
        let buf = Buf::heap(bytes);
        let sqe = Sqe::write(sent, 1, 0, bytes / 512, false);
        direct.io_link.host.submit(sqe, HostData::ToController(buf)).expect("room");
        sent += 1;
    };
    for _ in 0..20 {
        send(&mut direct, 1 << 20);
        send(&mut direct, 4096);
        send(&mut direct, 512);
    }
    let mut done = 0;
    let mut silent = 0;
    while silent < 4 {
        let has_moved = direct.io_link.turn(&mut direct.core, &mut |event| match event {
            HostEvent::Completed { result: Ok(()), .. } => done += 1,
            HostEvent::Completed { .. } | HostEvent::Ready | HostEvent::Closed { .. } => {
                panic!("{event:?}")
            }
        });
        silent = if has_moved { 0 } else { silent + 1 };
    }
    assert_eq!(done, 60, "no command waits for ever");
    assert!(direct.core.usage().waits > 0, "{} had to wait", direct.core.usage().waits);
}
