//! Data pointers: which are understood, which fail their command, and that the connection goes on either way.

use nvme_spec::Sqe;
use nvme_spec::status::Status;
use spindle_nvme_tcp::Phase;
use spindle_nvme_tcp::controller::ConnConfig;
use spindle_nvme_transport::{DataPointer, Event, Transport};

use crate::rig::{Controller, Seen};
use crate::wire::{self, NONE, OFFSET, TRANSPORT, WRITE};

/// Feed one command; what it was understood as. A flush behind it shows that the stream is where it should
/// be.
fn understood(entry: [u8; 64], data: &[u8]) -> Result<DataPointer, Status> {
    for digests in wire::ALL {
        let mut rig = Controller::ready(ConnConfig::default(), digests);
        rig.feed(&wire::capsule(entry, data, digests));
        let Seen::Command { cid: 3, data: seen, .. } = rig.seen[0].clone() else { panic!("{:?}", rig.seen) };
        if seen.is_err() {
            assert!(!rig.conn.is_paused());
        }
        let answers = rig.seen.len();
        rig.feed(&wire::capsule(wire::sqe(0, 4, TRANSPORT, 0), &[], digests));
        assert_eq!(rig.seen[answers..], [Seen::Command { opcode: 0, cid: 4, data: Ok(DataPointer::None) }]);
        assert_eq!(rig.conn.phase(), Phase::Open);
        assert_eq!(rig.conn.take_violation(), None);
        let output = rig.take_output();
        if let Err(status) = seen {
            assert!(output.starts_with(&wire::capsule_resp(3, status.bits(), 0, digests)));
            assert_eq!(rig.sent, [3, 4]);
        }
        rig.conn.on_reset();
        assert!(rig.has_all_buffers());
        if digests == wire::BOTH {
            return seen;
        }
    }
    unreachable!("BOTH is the last")
}

fn entry(identifier: u8, bytes: u32) -> [u8; 64] {
    wire::sqe(WRITE, 3, identifier, bytes)
}

#[test]
fn descriptors_of_tcp_are_understood() {
    assert_eq!(understood(entry(OFFSET, 512), &[1; 512]), Ok(DataPointer::InCapsule { bytes: 512 }));
    assert_eq!(understood(entry(OFFSET, 3), &[1; 3]), Ok(DataPointer::InCapsule { bytes: 3 }));
    assert_eq!(understood(entry(OFFSET, 8192), &[1; 8192]), Ok(DataPointer::InCapsule { bytes: 8192 }));
    assert_eq!(understood(entry(OFFSET, 0), &[]), Ok(DataPointer::None));
    assert_eq!(understood(entry(TRANSPORT, 512), &[]), Ok(DataPointer::Host { bytes: 512 }));
    assert_eq!(understood(entry(TRANSPORT, 0), &[]), Ok(DataPointer::None));
    assert_eq!(understood(entry(0, 0), &[]), Ok(DataPointer::None), "no data at all");
}

#[test]
fn what_the_descriptor_says_must_be_what_the_capsule_has() {
    let length = Err(Status::DATA_SGL_LENGTH_INVALID.dnr());
    for (said, has) in [(512, 511), (512, 513), (512, 0), (0, 512), (u32::MAX, 512), (1 << 31, 8)] {
        assert_eq!(understood(entry(OFFSET, said), &vec![1; has]), length, "{said} of {has}");
    }
    for said in [0, 512, 4096] {
        assert_eq!(
            understood(entry(TRANSPORT, said), &[1; 512]),
            length,
            "in the capsule, but not by its descriptor"
        );
    }
}

#[test]
fn in_capsule_data_begins_at_offset_0() {
    for at in 24..32 {
        let mut entry = entry(OFFSET, 512);
        entry[at] = 1;
        assert_eq!(understood(entry, &[1; 512]), Err(Status::SGL_OFFSET_INVALID.dnr()));
    }
}

#[test]
fn every_other_descriptor_fails_its_command_for_good() {
    for identifier in (0..=255).filter(|identifier| ![0, OFFSET, TRANSPORT].contains(identifier)) {
        let invalid = Err(Status::SGL_DESCRIPTOR_TYPE_INVALID.dnr());
        assert_eq!(understood(entry(identifier, 512), &[]), invalid, "{identifier:#x}");
        if identifier % 16 == 15 {
            assert_eq!(understood(entry(identifier, 512), &[1; 512]), invalid, "{identifier:#x}");
        }
    }
    assert_eq!(understood(entry(0, 1), &[]), Err(Status::SGL_DESCRIPTOR_TYPE_INVALID.dnr()));
    assert_eq!(understood(entry(0, 0), &[1; 4]), Err(Status::SGL_DESCRIPTOR_TYPE_INVALID.dnr()));
}

#[test]
fn prps_do_not_travel_over_fabrics() {
    for (psdt, is_right) in [(0x00, false), (0x40, true), (0x80, true), (0xc0, false)] {
        let mut entry = entry(TRANSPORT, 0);
        entry[1] = psdt;
        let expected = if is_right { Ok(DataPointer::None) } else { Err(Status::INVALID_FIELD.dnr()) };
        assert_eq!(understood(entry, &[]), expected, "{psdt:#x}");
        // A Fabrics command has no PSDT field.
        entry[0] = 0x7f;
        entry[4] = 0;
        assert_eq!(understood(entry, &[]), Ok(DataPointer::None));
    }
}

#[test]
fn data_of_a_command_that_is_refused_unseen_is_skipped() {
    let mut rig = Controller::ready(ConnConfig::default(), wire::BOTH);
    rig.is_manual = true;
    for cid in 0..5 {
        rig.feed(&wire::capsule(wire::sqe(WRITE, cid, OFFSET, 4096), &[9; 4096], wire::BOTH));
        assert!(rig.conn.is_paused());
        rig.reply(cid, Status::INVALID_OPCODE.dnr(), None);
        assert!(!rig.conn.is_paused());
        rig.pull();
    }
    let refused = |cid| wire::capsule_resp(cid, Status::INVALID_OPCODE.dnr().bits(), 0, wire::BOTH);
    assert_eq!(rig.take_output(), (0..5).flat_map(refused).collect::<Vec<u8>>());
    assert_eq!(rig.seen.len(), 5);
    assert_eq!(wire::capsule_resp(1, 0, 0, NONE).len(), 24);
}

#[test]
fn the_second_command_behind_is_looked_at_where_all_of_it_is_here() {
    let read = |cid| wire::capsule(wire::sqe(2, cid, TRANSPORT, 4096), &[], NONE);
    let (first, next, second) = (read(3), read(4), read(5));
    for behind in 0..=second.len() {
        let mut rig = Controller::ready(ConnConfig::default(), NONE);
        let mut batch = rig.batch.take().expect("a batch");
        batch.extend(&first);
        batch.extend(&next);
        batch.extend(&second[..behind]);
        rig.conn.load(batch);
        let event = rig.conn.next_event();
        assert!(matches!(event, Some(Event::Command { sqe, .. }) if sqe.cid() == 3), "{event:?}");
        let peeked = rig.conn.peek_command().map(Sqe::cid);
        assert_eq!(peeked, (behind == second.len()).then_some(5), "{behind} bytes of the second");
        // Looking takes nothing.
        let event = rig.conn.next_event();
        assert!(matches!(event, Some(Event::Command { sqe, .. }) if sqe.cid() == 4), "{event:?}");
        let event = rig.conn.next_event();
        assert_eq!(matches!(event, Some(Event::Command { sqe, .. }) if sqe.cid() == 5), peeked.is_some());
        assert!(rig.conn.peek_command().is_none());
        rig.conn.unload();
    }
}
