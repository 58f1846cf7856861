//! Data digests: damaged data fails its command and nothing else (NVMe/TCP 1.0, "PDU
//! Header and Data Digests").

use nvme_spec::status::Status;
use spindle_nvme_tcp::Phase;
use spindle_nvme_tcp::controller::ConnConfig;
use spindle_nvme_tcp::host::HostConfig;

use crate::rig::{Controller, Host, HostSeen, Seen, done};
use crate::wire::{self, BOTH, Digests, OFFSET, TRANSPORT, WRITE};

const DATA_ONLY: Digests = Digests { header: false, data: true };

fn damaged(mut pdu: Vec<u8>, from_end: usize) -> Vec<u8> {
    let at = pdu.len() - from_end;
    pdu[at] ^= 0x40;
    pdu
}

#[test]
fn a_damaged_write_fails_and_the_next_one_does_not() {
    for digests in [DATA_ONLY, BOTH] {
        let data = wire::pattern(1, 4096);
        let capsule = |cid| wire::capsule(wire::sqe(WRITE, cid, OFFSET, 4096), &data, digests);
        // In the digest, and in the data.
        for from_end in [1, 4, 5, 4100] {
            let mut rig = Controller::ready(ConnConfig::default(), digests);
            rig.feed(&damaged(capsule(1), from_end));
            rig.feed(&capsule(2));
            let result = Err(Status::COMMAND_TRANSIENT_TRANSPORT_ERROR);
            assert!(matches!(&rig.seen[1], Seen::Fetched { cid: 1, result: seen, .. } if *seen == result));
            assert_eq!(rig.seen[3], Seen::Fetched { cid: 2, bytes: data.clone(), result: Ok(()) });
            let expected = [wire::capsule_resp(1, 0x22, 0, digests), wire::capsule_resp(2, 0, 0, digests)];
            assert_eq!(rig.take_output(), expected.concat(), "it may be tried again: no DNR");
            assert_eq!(rig.conn.phase(), Phase::Open);
            assert!(rig.has_all_buffers());
        }
    }
}

#[test]
fn one_damaged_h2c_data_of_several_fails_the_write() {
    for wrong in 0..3 {
        let mut rig = Controller::ready(ConnConfig::default(), BOTH);
        let data = wire::pattern(1, 30_000);
        rig.feed(&wire::capsule(wire::sqe(WRITE, 1, TRANSPORT, 30_000), &[], BOTH));
        for part in 0..3 {
            let offset = part * 10_000;
            let slice = &data[offset..offset + 10_000];
            let pdu = wire::h2c_data(1, 0x80, u32::try_from(offset).unwrap(), slice, part == 2, BOTH);
            rig.feed(&if part == wrong { damaged(pdu, 20) } else { pdu });
        }
        let result = Err(Status::COMMAND_TRANSIENT_TRANSPORT_ERROR);
        assert!(matches!(&rig.seen[1], Seen::Fetched { cid: 1, result: seen, .. } if *seen == result));
        assert_eq!(rig.conn.phase(), Phase::Open);
    }
}

#[test]
fn a_damaged_read_is_a_failed_command_at_the_host() {
    for flags in [12, 4] {
        let config = HostConfig { data_digest: true, ..HostConfig::default() };
        let mut rig = Host::ready(config, 0, 4096);
        rig.read(1, 8192);
        rig.read(2, 4096);
        rig.take_output();
        rig.feed(&damaged(wire::c2h_data(1, 0, &[1; 4096], 0, DATA_ONLY, 4), 2));
        rig.feed(&wire::c2h_data(1, 4096, &[1; 4096], flags, DATA_ONLY, 4));
        if flags == 4 {
            rig.feed(&wire::capsule_resp(1, 0, 0, DATA_ONLY));
        }
        rig.feed(&wire::c2h_data(2, 0, &[2; 4096], 12, DATA_ONLY, 4));
        let HostSeen::Completed { cid: 1, status, result, .. } = rig.seen[0].clone() else {
            panic!("completed")
        };
        assert_eq!((status, result), (Status::SUCCESS, Err(Status::COMMAND_TRANSIENT_TRANSPORT_ERROR)));
        assert_eq!(rig.seen[1], done(2, Some(vec![2; 4096])));
        assert_eq!(rig.conn.phase(), Phase::Open);
        assert!(rig.has_all_buffers());
    }
}

#[test]
fn a_digest_covers_data_in_many_pieces() {
    use nvme_spec::Cqe;
    use spindle_nvme_transport::{Reply, Transport};
    use spindle_reactor::mem::{FrameStore, Pages};
    let store = FrameStore::new(1 << 20, 1 << 20, Pages::Base, false).unwrap();
    let core = store.core();
    // Every other page is written again while a reply is sent from all of them, so that it lies elsewhere.
    let data = wire::pattern(4, 64 << 10);
    let mut held = Vec::new();
    for frame in (0..16).chain((1..16).step_by(2)) {
        held.push(core.read(0, 64 << 10));
        let mut buf = core.take(frame * 4096, 4096).unwrap();
        let at = usize::try_from(frame).unwrap() * 4096;
        buf.copy_in(0, &data[at..at + 4096]);
        core.write(frame * 4096, buf);
    }
    let buf = core.read(512, 60_000);
    assert!(!buf.is_contiguous());
    let mut rig = Controller::ready(ConnConfig::default(), BOTH);
    rig.is_manual = true;
    rig.feed(&wire::capsule(wire::sqe(wire::READ, 1, TRANSPORT, 60_000), &[], BOTH));
    let reply = Reply {
        slot: crate::rig::slot(1),
        cqe: Cqe::new(1, Status::SUCCESS),
        data: Some(buf),
        may_omit_cqe: true,
    };
    rig.conn.reply(reply);
    // The rig's piece list is shorter than the buffer's, and a socket takes odd amounts.
    while rig.transmit_some(9999) > 0 {}
    let expected = wire::c2h_data(1, 0, &data[512..60_512], 12, BOTH, 4);
    assert_eq!(rig.take_output(), expected);
}
