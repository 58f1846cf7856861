//! Large payloads go from the socket straight to their place.

use std::io::IoSliceMut;

use arrayvec::ArrayVec;
use spindle_nvme_tcp::controller::ConnConfig;
use spindle_nvme_tcp::host::HostConfig;
use spindle_nvme_transport::{DataPointer, Event, Transport};
use spindle_reactor::mem::{FrameStore, Pages};

use crate::rig::{Controller, Host, Seen, done, slot};
use crate::wire::{self, BOTH, NONE, OFFSET, TRANSPORT, WRITE};

fn controller_target(rig: &mut Controller) -> usize {
    let mut targets = ArrayVec::<IoSliceMut, 16>::new();
    rig.conn.direct_target(&mut targets, 0)
}

#[test]
fn there_is_a_direct_target_only_inside_of_a_large_payload() {
    let mut rig = Controller::ready(ConnConfig::default(), BOTH);
    assert_eq!(controller_target(&mut rig), 0);
    rig.feed(&wire::capsule(wire::sqe(WRITE, 1, TRANSPORT, 100_000), &[], BOTH));
    assert_eq!(controller_target(&mut rig), 0, "no header yet");
    let data = wire::pattern(1, 100_000);
    let pdu = wire::h2c_data(1, 0x80, 0, &data, true, BOTH);
    rig.feed(&pdu[..27]);
    assert_eq!(controller_target(&mut rig), 0, "half a header");
    rig.feed(&pdu[27..1028]);
    assert_eq!(controller_target(&mut rig), 99_000);
    for (payload_min, target) in [(100_000, 99_000), (100_001, 0)] {
        let mut targets = ArrayVec::<IoSliceMut, 16>::new();
        assert_eq!(rig.conn.direct_target(&mut targets, payload_min), target, "all of its bytes count");
    }
    rig.feed(&pdu[1028..90_028]);
    assert_eq!(controller_target(&mut rig), 10_000);
    rig.feed(&pdu[90_028..95_028]);
    assert_eq!(controller_target(&mut rig), 0, "too little left");
    rig.feed(&pdu[95_028..]);
    assert_eq!(rig.seen.last(), Some(&Seen::Fetched { cid: 1, bytes: data, result: Ok(()) }));
    rig.is_manual = true;
    rig.feed(&wire::capsule(wire::sqe(WRITE, 2, OFFSET, 8192), &[2; 8192], BOTH)[..76]);
    assert_eq!(controller_target(&mut rig), 0, "paused");
    rig.answer_next();
    assert!(controller_target(&mut rig) > 0, "in-capsule data may come directly too");
}

#[test]
fn data_that_is_not_wanted_any_more_is_taken_in_and_goes_nowhere() {
    for digests in wire::ALL {
        for cut in [0, 20, 24, 40, 70_000, 100_010] {
            let mut rig = Controller::ready(ConnConfig::default(), digests);
            let free = rig.pool.free_bytes();
            rig.feed(&wire::capsule(wire::sqe(WRITE, 1, TRANSPORT, 200_000), &[], digests));
            assert!(rig.pool.free_bytes() < free);
            let data = wire::pattern(1, 200_000);
            let parts = [
                wire::h2c_data(1, 0x80, 0, &data[..100_000], false, digests),
                wire::h2c_data(1, 0x80, 100_000, &data[100_000..], true, digests),
                wire::capsule(wire::sqe(0, 2, TRANSPORT, 0), &[], digests),
            ];
            let bytes = parts.concat();
            rig.feed(&bytes[..cut]);
            assert!(rig.conn.cancel(slot(1)), "after {cut} bytes");
            assert!(!rig.conn.cancel(slot(1)), "once");
            assert_eq!(rig.pool.free_bytes(), free, "its buffer is back at once");
            rig.feed(&bytes[cut..]);
            let expected = Seen::Command { opcode: 0, cid: 2, data: Ok(DataPointer::None) };
            assert_eq!(rig.seen.last(), Some(&expected), "{cut}: what is behind it comes");
            let fetched = rig.seen.iter().any(|seen| matches!(seen, Seen::Fetched { .. }));
            assert!(!fetched && rig.conn.take_violation().is_none(), "{cut}");
            assert_eq!(rig.conn.in_flight().1, 0, "its tag is free again");
        }
    }
}

#[test]
fn data_that_is_not_wanted_any_more_is_checked_like_any_other() {
    let mut rig = Controller::ready(ConnConfig::default(), NONE);
    rig.feed(&wire::capsule(wire::sqe(WRITE, 1, TRANSPORT, 200_000), &[], NONE));
    assert!(rig.conn.cancel(slot(1)));
    rig.feed(&wire::h2c_data(1, 0x80, 4, &[0; 100], false, NONE));
    assert!(rig.conn.take_violation().is_some(), "not at the offset that is next");
}

#[test]
fn payload_read_directly_is_the_same_as_payload_copied() {
    for digests in wire::ALL {
        for most in [1, 777, 20_000, 70_000, 300_000] {
            let data = wire::pattern(5, 200_000);
            let (first, second) = data.split_at(120_000);
            let parts = [
                wire::h2c_data(1, 0x80, 0, first, false, digests),
                wire::h2c_data(1, 0x80, 120_000, second, true, digests),
                wire::capsule(wire::sqe(0, 2, TRANSPORT, 0), &[], digests),
            ];
            let mut rig = Controller::ready(ConnConfig::default(), digests);
            rig.feed(&wire::capsule(wire::sqe(WRITE, 1, TRANSPORT, 200_000), &[], digests));
            rig.feed_direct(&parts.concat(), most);
            assert_eq!(rig.seen.len(), 3);
            assert_eq!(rig.seen[1], Seen::Fetched { cid: 1, bytes: data.clone(), result: Ok(()) });

            let config = HostConfig {
                header_digest: digests.header,
                data_digest: digests.data,
                ..HostConfig::default()
            };
            let mut rig = Host::ready(config, 0, 4096);
            rig.read(1, 200_000);
            rig.take_output();
            let parts = [
                wire::c2h_data(1, 0, first, 0, digests, 4),
                wire::c2h_data(1, 120_000, second, 12, digests, 4),
            ];
            rig.feed_direct(&parts.concat(), most);
            assert_eq!(rig.take_seen(), [done(1, Some(data))]);
        }
    }
}

#[test]
fn a_buffer_in_many_pieces_is_a_target_in_many_pieces() {
    let store = FrameStore::new(1 << 20, 1 << 20, Pages::Base, false).unwrap();
    let core = store.core();
    // Take frames and give every other one back, so that what is free is scattered.
    let taken: Vec<_> = (0..64).map(|frame| core.take(frame * 4096, 4096).unwrap()).collect();
    let mut kept = Vec::new();
    for (index, buf) in taken.into_iter().enumerate() {
        if index % 2 == 0 {
            kept.push(buf);
        }
    }
    let buf = core.take(0, 64 << 10).unwrap();
    let pieces = buf.segments().count();
    let data = wire::pattern(8, 64 << 10);
    let mut rig = Controller::ready(ConnConfig::default(), BOTH);
    rig.is_manual = true;
    rig.feed(&wire::capsule(wire::sqe(WRITE, 1, TRANSPORT, 64 << 10), &[], BOTH));
    rig.conn.fetch(crate::rig::slot(1), 1, buf);
    rig.pull();
    let pdu = wire::h2c_data(1, 0x80, 0, &data, true, BOTH);
    rig.feed(&pdu[..5000]);
    let mut targets = ArrayVec::<IoSliceMut, 64>::new();
    let bytes = rig.conn.direct_target(&mut targets, 0);
    assert_eq!(bytes, (64 << 10) - (5000 - 28));
    assert!(targets.len() + 1 >= pieces, "{} targets of {pieces} pieces", targets.len());
    drop(targets);
    // A short list is the beginning of the long one.
    let mut targets = ArrayVec::<IoSliceMut, 2>::new();
    let some = rig.conn.direct_target(&mut targets, 0);
    assert_eq!(some, targets.iter().map(|target| target.len()).sum::<usize>());
    drop(targets);
    rig.feed_direct(&pdu[5000..], 9000);
    let Some(Seen::Fetched { bytes, result: Ok(()), .. }) = rig.seen.last() else {
        panic!("{:?}", rig.seen.len())
    };
    assert_eq!(*bytes, data);
}

#[test]
fn closing_in_a_direct_receive_gives_the_buffer_back() {
    let mut rig = Controller::ready(ConnConfig::default(), NONE);
    rig.feed(&wire::capsule(wire::sqe(WRITE, 1, TRANSPORT, 100_000), &[], NONE));
    rig.feed(&wire::h2c_data(1, 0x80, 0, &[1; 100_000], true, NONE)[..20_000]);
    assert!(controller_target(&mut rig) > 0);
    rig.conn.on_peer_closed();
    assert_eq!(controller_target(&mut rig), 0);
    assert!(matches!(rig.conn.next_event(), Some(Event::Closed)));
    assert!(rig.has_all_buffers());
}
