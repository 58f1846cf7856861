//! Golden bytes: what is said and understood, written out (NVMe/TCP 1.0 section 3.6.2).

use nvme_spec::status::Status;
use spindle_nvme_tcp::Phase;
use spindle_nvme_tcp::controller::ConnConfig;
use spindle_nvme_tcp::host::HostConfig;
use spindle_nvme_transport::{DataPointer, Limits, Transport};

use crate::rig::{Controller, Host, HostSeen, Seen, done};
use crate::wire::{self, BOTH, Digests, NONE};

/// ICReq of a Linux host with both digests: PFV 0, HPDA 0, DGST 3, MAXR2T 0.
fn golden_icreq() -> Vec<u8> {
    let mut bytes = vec![0x00, 0x00, 0x80, 0x00, 0x80, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x03, 0, 0, 0, 0];
    bytes.resize(128, 0);
    bytes
}

/// ICResp: PFV 0, CPDA 0, DGST 3, MAXH2CDATA 0x100000.
fn golden_icresp() -> Vec<u8> {
    let mut bytes =
        vec![0x01, 0x00, 0x80, 0x00, 0x80, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x03, 0, 0, 0x10, 0];
    bytes.resize(128, 0);
    bytes
}

#[rustfmt::skip]
const READ_4K: [u8; 72] = [
    0x04, 0x00, 0x48, 0x00, 0x48, 0x00, 0x00, 0x00,
    0x02, 0x40, 0x34, 0x12, 0x01, 0x00, 0x00, 0x00, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
    0, 0, 0, 0, 0, 0, 0, 0, 0x00, 0x10, 0x00, 0x00, 0x00, 0x00, 0x00, 0x5a,
    0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
];

#[test]
fn icresp_answers_the_digests_that_were_asked_for_and_allowed_and_says_so() {
    for allowed in wire::ALL {
        for asked in wire::ALL {
            let config = ConnConfig {
                header_digest: allowed.header,
                data_digest: allowed.data,
                ..ConnConfig::default()
            };
            let mut rig = Controller::new(config);
            assert!(rig.conn.deadline().is_some());
            rig.feed(&wire::icreq(0, asked));
            assert_eq!(rig.conn.deadline(), None);
            let mut expected = golden_icresp();
            expected[11] = allowed.bits() & asked.bits();
            assert_eq!(rig.take_output(), expected);
        }
    }
    let mut rig = Controller::new(ConnConfig::default());
    rig.feed(&golden_icreq());
    assert_eq!(rig.take_output(), golden_icresp());
    assert_eq!(wire::icreq(0, BOTH), golden_icreq());
}

#[test]
fn a_read_is_one_c2h_data_with_success_where_the_host_does_without_completions() {
    let mut rig = Controller::ready(ConnConfig::default(), NONE);
    rig.feed(&READ_4K);
    let pointer = DataPointer::Host { bytes: 4096 };
    assert_eq!(rig.take_seen(), [Seen::Command { opcode: 2, cid: 0x1234, data: Ok(pointer) }]);
    let output = rig.take_output();
    #[rustfmt::skip]
    let header = [
        0x07, 0x0c, 0x18, 0x18, 0x18, 0x10, 0x00, 0x00, 0x34, 0x12, 0x00, 0x00,
        0x00, 0x00, 0x00, 0x00, 0x00, 0x10, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00,
    ];
    assert_eq!(output[..24], header);
    assert_eq!(output[24..], wire::pattern(0x1234, 4096));
    assert_eq!(rig.sent, [0x1234]);
    assert!(rig.has_all_buffers());
}

#[test]
fn a_read_gets_a_response_capsule_after_its_data_unless_the_cqe_may_be_omitted() {
    // Flow control is on; then a result dword; then both digests.
    let mut rig = Controller::ready(ConnConfig::default(), NONE);
    rig.may_omit_cqe = false;
    rig.feed(&READ_4K);
    let output = rig.take_output();
    assert_eq!(output[..8], [0x07, 0x04, 0x18, 0x18, 0x18, 0x10, 0x00, 0x00]);
    #[rustfmt::skip]
    assert_eq!(output[24 + 4096..], [
        0x05, 0x00, 0x18, 0x00, 0x18, 0x00, 0x00, 0x00,
        0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x34, 0x12, 0x00, 0x00,
    ]);
    assert_eq!(rig.sent, [0x1234], "one request, one Sent");

    let mut rig = Controller::ready(ConnConfig::default(), BOTH);
    rig.may_omit_cqe = false;
    rig.feed(&wire::capsule(wire::sqe(2, 7, wire::TRANSPORT, 512), &[], BOTH));
    let data = wire::pattern(7, 512);
    let expected = [wire::c2h_data(7, 0, &data, 4, BOTH, 4), wire::capsule_resp(7, 0, 0, BOTH)].concat();
    assert_eq!(rig.take_output(), expected);
}

#[test]
fn success_is_folded_into_the_data_only_when_the_completion_says_nothing_else() {
    use nvme_spec::Cqe;
    use spindle_nvme_transport::Reply;
    for (may_omit_cqe, result, is_folded) in
        [(true, 0, true), (true, 1, false), (true, 1 << 32, false), (false, 0, false)]
    {
        let mut rig = Controller::ready(ConnConfig::default(), NONE);
        rig.is_manual = true;
        rig.feed(&wire::capsule(wire::sqe(2, 7, wire::TRANSPORT, 512), &[], NONE));
        let data = wire::pattern(1, 512);
        let buf = crate::rig::filled(&rig.pool, &data);
        let cqe = Cqe::new(7, Status::SUCCESS).with_result_u64(result);
        rig.conn.reply(Reply { slot: crate::rig::slot(7), cqe, data: Some(buf), may_omit_cqe });
        let expected = match is_folded {
            true => wire::c2h_data(7, 0, &data, 12, NONE, 4),
            false => {
                [wire::c2h_data(7, 0, &data, 4, NONE, 4), wire::capsule_resp(7, 0, result, NONE)].concat()
            }
        };
        assert_eq!(rig.take_output(), expected);
    }
    // Without data there is nothing to fold it into.
    let mut rig = Controller::ready(ConnConfig::default(), NONE);
    rig.feed(&wire::capsule(wire::sqe(0, 8, wire::TRANSPORT, 0), &[], NONE));
    assert_eq!(rig.take_output(), wire::capsule_resp(8, 0, 0, NONE));
}

#[test]
fn data_for_a_host_is_aligned_as_it_asked_with_zeroes_before_it() {
    for hpda in 0..=31_u8 {
        for digests in wire::ALL {
            let mut rig = Controller::new(ConnConfig::default());
            rig.feed(&wire::icreq(hpda, digests));
            rig.take_output();
            rig.feed(&wire::capsule(wire::sqe(2, 9, wire::TRANSPORT, 1000), &[], digests));
            let data = wire::pattern(9, 1000);
            let unit = 4 * (usize::from(hpda) + 1);
            assert_eq!(
                rig.take_output(),
                wire::c2h_data(9, 0, &data, 12, digests, unit),
                "HPDA {hpda}, {digests:?}"
            );
        }
    }
}

#[test]
fn a_write_too_large_for_its_capsule_is_asked_for_by_one_r2t() {
    let mut rig = Controller::ready(ConnConfig::default(), NONE);
    rig.feed(&wire::capsule(wire::sqe(1, 0xf00d, wire::TRANSPORT, 0x5000), &[], NONE));
    #[rustfmt::skip]
    assert_eq!(rig.take_output(), [
        0x09, 0x00, 0x18, 0x00, 0x18, 0x00, 0x00, 0x00, 0x0d, 0xf0, 0x80, 0x00,
        0x00, 0x00, 0x00, 0x00, 0x00, 0x50, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00,
    ]);
    let data = wire::pattern(3, 0x5000);
    #[rustfmt::skip]
    let first = [
        0x06, 0x00, 0x18, 0x18, 0x18, 0x40, 0x00, 0x00, 0x0d, 0xf0, 0x80, 0x00,
        0x00, 0x00, 0x00, 0x00, 0x00, 0x40, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00,
    ];
    rig.feed(&[&first[..], &data[..0x4000]].concat());
    assert_eq!(rig.take_seen().len(), 1);
    #[rustfmt::skip]
    let second = [
        0x06, 0x04, 0x18, 0x18, 0x18, 0x10, 0x00, 0x00, 0x0d, 0xf0, 0x80, 0x00,
        0x00, 0x40, 0x00, 0x00, 0x00, 0x10, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00,
    ];
    rig.feed(&[&second[..], &data[0x4000..]].concat());
    assert_eq!(rig.take_seen(), [Seen::Fetched { cid: 0xf00d, bytes: data, result: Ok(()) }]);
    assert_eq!(rig.take_output(), wire::capsule_resp(0xf00d, 0, 0, NONE));
    assert!(rig.has_all_buffers());
}

#[test]
fn all_sixteen_bits_of_a_cid_come_back() {
    for cid in [0, 1, 0x7fff, 0x8000, 0xf001, 0xffff] {
        let mut rig = Controller::ready(ConnConfig::default(), NONE);
        rig.feed(&wire::capsule(wire::sqe(1, cid, wire::TRANSPORT, 8192), &[], NONE));
        rig.feed(&wire::capsule(wire::sqe(2, cid, wire::TRANSPORT, 512), &[], NONE));
        rig.feed(&wire::capsule(wire::sqe(0, cid, wire::TRANSPORT, 0), &[], NONE));
        let data = wire::pattern(u64::from(cid), 512);
        let expected = [
            wire::r2t(cid, 0x80, 0, 8192, NONE),
            wire::c2h_data(cid, 0, &data, 12, NONE, 4),
            wire::capsule_resp(cid, 0, 0, NONE),
        ];
        assert_eq!(rig.take_output(), expected.concat());
    }
}

#[test]
fn every_pdu_to_a_host_but_icresp_has_hlen_24() {
    let mut rig = Controller::ready(ConnConfig::default(), BOTH);
    rig.feed(&wire::capsule(wire::sqe(1, 1, wire::TRANSPORT, 8192), &[], BOTH));
    rig.feed(&wire::capsule(wire::sqe(2, 2, wire::TRANSPORT, 512), &[], BOTH));
    rig.feed(&wire::capsule(wire::sqe(0, 3, wire::TRANSPORT, 0), &[], BOTH));
    rig.feed(&[0xee; 8]);
    let output = rig.take_output();
    let (mut at, mut types) = (0, Vec::new());
    while at < output.len() {
        assert_eq!(output[at + 2], 24);
        types.push(output[at]);
        at += u32::from_le_bytes(output[at + 4..at + 8].try_into().unwrap()) as usize;
    }
    assert_eq!(types, [9, 7, 5, 3], "R2T, C2HData, CapsuleResp, C2HTermReq");
}

#[test]
fn a_host_says_what_linux_says() {
    let config = HostConfig {
        header_digest: true,
        data_digest: true,
        in_capsule_bytes: 4096,
        ..HostConfig::default()
    };
    let mut rig = Host::new(config);
    assert_eq!(rig.take_output(), golden_icreq());
    rig.feed(&golden_icresp());
    assert_eq!(rig.take_seen(), [HostSeen::Ready]);
    assert_eq!(rig.conn.max_h2c_data(), Some(1 << 20));

    let mut rig = Host::ready(HostConfig { queue_entries: 0x2000, ..HostConfig::default() }, 0, 1 << 20);
    rig.read(0x1234, 4096);
    assert_eq!(rig.take_output(), READ_4K);
    let data = wire::pattern(5, 4096);
    rig.feed(&wire::c2h_data(0x1234, 0, &data, 12, NONE, 4));
    assert_eq!(rig.take_seen(), [done(0x1234, Some(data))]);
    rig.flush(0x1234);
    let output = rig.take_output();
    assert_eq!(
        (output[8], output[40..44].to_vec(), output[47]),
        (0, vec![0; 4], 0x5a),
        "no data is a transport SGL of 0"
    );
    rig.feed(&wire::capsule_resp(0x1234, 0, 0, NONE));
    assert_eq!(rig.take_seen(), [done(0x1234, None)]);
    assert!(rig.has_all_buffers());
}

#[test]
fn a_host_puts_small_writes_in_the_capsule_and_splits_large_ones_by_maxh2cdata() {
    for digests in wire::ALL {
        for cpda in [0, 1, 7, 31] {
            let unit = 4 * (usize::from(cpda) + 1);
            let config = HostConfig {
                header_digest: digests.header,
                data_digest: digests.data,
                in_capsule_bytes: 4096,
                ..HostConfig::default()
            };
            let mut rig = Host::ready(config, cpda, 8192);
            let small = wire::pattern(1, 4096);
            rig.write(1, &small);
            let sqe = wire::sqe(1, 1, wire::OFFSET, 4096);
            assert_eq!(rig.take_output(), wire::pdu(4, 0, &sqe, &small, digests, unit));
            let large = wire::pattern(2, 20_000);
            rig.write(2, &large);
            let sqe = wire::sqe(1, 2, wire::TRANSPORT, 20_000);
            assert_eq!(rig.take_output(), wire::capsule(sqe, &[], digests));
            rig.feed(&wire::r2t(2, 0xbeef, 0, 20_000, digests));
            let part = |from: usize, to: usize, flags| {
                let mut rest = vec![2, 0, 0xef, 0xbe];
                rest.extend(u32::try_from(from).unwrap().to_le_bytes());
                rest.extend(u32::try_from(to - from).unwrap().to_le_bytes());
                rest.extend([0; 4]);
                wire::pdu(6, flags, &rest, &large[from..to], digests, unit)
            };
            let expected = [part(0, 8192, 0), part(8192, 16_384, 0), part(16_384, 20_000, 4)];
            assert_eq!(rig.take_output(), expected.concat(), "{digests:?} CPDA {cpda}");
            rig.feed(&wire::capsule_resp(1, 0, 0, digests));
            rig.feed(&wire::capsule_resp(2, 0, 0, digests));
            assert_eq!(rig.take_seen(), [done(1, Some(small)), done(2, Some(large))]);
            assert!(rig.has_all_buffers());
        }
    }
}

#[test]
fn a_fabrics_command_has_its_data_in_the_capsule_whatever_ioccsz_says() {
    use nvme_spec::Sqe;
    use spindle_nvme_tcp::host::HostData;
    let mut rig = Host::ready(HostConfig { in_capsule_bytes: 0, ..HostConfig::default() }, 0, 4096);
    let buf = crate::rig::filled(&rig.pool, &[0xc0; 1024]);
    rig.conn.submit(Sqe::new(0x7f, 0, 1), HostData::ToController(buf)).unwrap();
    assert_eq!(rig.take_output(), wire::connect(0, 0, NONE));
    rig.write(1, &[1; 512]);
    assert_eq!(rig.take_output(), wire::capsule(wire::sqe(1, 1, wire::TRANSPORT, 512), &[], NONE));
    rig.conn.set_in_capsule_bytes(512);
    rig.write(2, &[1; 512]);
    assert_eq!(rig.take_output(), wire::capsule(wire::sqe(1, 2, wire::OFFSET, 512), &[1; 512], NONE));
}

#[test]
fn a_transfer_may_be_asked_for_in_several_r2ts_one_after_the_other() {
    let config = HostConfig { in_capsule_bytes: 0, ..HostConfig::default() };
    let mut rig = Host::ready(config, 0, 8192);
    let data = wire::pattern(2, 12_000);
    rig.write(2, &data);
    rig.take_output();
    rig.feed(&wire::r2t(2, 1, 0, 5000, NONE));
    assert_eq!(rig.take_output(), wire::h2c_data(2, 1, 0, &data[..5000], true, NONE));
    rig.feed(&wire::r2t(2, 2, 5000, 7000, NONE));
    assert_eq!(rig.take_output(), wire::h2c_data(2, 2, 5000, &data[5000..], true, NONE));
    rig.feed(&wire::capsule_resp(2, 0, 0, NONE));
    assert_eq!(rig.take_seen(), [done(2, Some(data))]);
}

#[test]
fn limits_are_those_of_the_configuration() {
    let config = ConnConfig {
        in_capsule_bytes: 16 << 10,
        queue_entries: 64,
        transfer_bytes: 2 << 20,
        ..ConnConfig::default()
    };
    let rig = Controller::ready(config, Digests::default());
    let limits = Limits { in_capsule_bytes: 16 << 10, queue_entries: 64, transfer_bytes: 2 << 20 };
    assert_eq!(rig.conn.limits(), limits);
    assert_eq!(rig.conn.phase(), Phase::Open);
}
