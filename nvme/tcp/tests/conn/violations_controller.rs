//! Every rule that a host can break: what the log says, what the host is told, and that nothing is left
//! behind.
//!
//! FES and FEI are those of NVMe/TCP 1.0 section 3.6.2.4.

use nvme_spec::status::Status;
use spindle_nvme_tcp::controller::ConnConfig;
use spindle_nvme_tcp::{Phase, Violation};
use spindle_reactor::clock::Nanos;

use crate::rig::{Controller, Seen};
use crate::wire::{self, BOTH, Digests, NONE, OFFSET, READ, TRANSPORT, WRITE};

const HEADER_FIELD: u16 = 1;
const SEQUENCE: u16 = 2;
const HEADER_DIGEST: u16 = 3;
const OUT_OF_RANGE: u16 = 4;
const LIMIT: u16 = 5;

/// What a violation must look like.
struct Rule<'a> {
    fes: u16,
    fei: u32,
    /// Bytes of the wrong PDU that are given back.
    header: usize,
    /// In the log's words.
    says: &'a str,
}

/// Feed `wrong`; the connection ends as `rule` says.
#[track_caller]
fn expect(rig: &mut Controller, wrong: &[u8], rule: &Rule) {
    let before = rig.take_output();
    drop(before);
    let seen = rig.take_seen().len();
    rig.feed(wrong);
    let violation = rig.conn.take_violation().expect("a violation");
    assert_eq!(rig.conn.take_violation(), None, "told once");
    let text = violation.to_string();
    assert!(text.contains(rule.says), "{text:?} does not say {:?}", rule.says);
    assert_eq!(rig.conn.phase(), Phase::Draining);
    assert_eq!(rig.take_seen().len(), 0, "no event of it, after {seen}");
    let term = wire::term_req(3, rule.fes, rule.fei, &wrong[..rule.header]);
    assert_eq!(rig.take_output(), term, "{text}");
    // Nothing counts any more.
    rig.feed(&wire::capsule(wire::sqe(READ, 9, TRANSPORT, 512), &[], NONE));
    assert_eq!((rig.take_output().len(), rig.take_seen().len()), (0, 0));
    rig.finish();
}

/// A connection with everything open: a write half received (TTAG 0x80, CID 1), another one waiting (0x81,
/// CID 2), a read's reply not yet sent.
fn busy(digests: Digests, config: ConnConfig) -> Controller {
    let mut rig = Controller::ready(config, digests);
    for cid in [1, 2] {
        rig.feed(&wire::capsule(wire::sqe(WRITE, cid, TRANSPORT, 20_000), &[], digests));
    }
    rig.feed(&wire::h2c_data(1, 0x80, 0, &[7; 8000], false, digests));
    assert_eq!(rig.take_seen().len(), 2);
    rig
}

fn one_wrong(wrong: &[u8], rule: &Rule) {
    expect(&mut busy(NONE, ConnConfig::default()), wrong, rule);
}

fn with(mut pdu: Vec<u8>, at: usize, bytes: &[u8]) -> Vec<u8> {
    pdu[at..at + bytes.len()].copy_from_slice(bytes);
    pdu
}

#[test]
fn anything_before_icreq_closes_the_connection() {
    let pdus = [
        wire::capsule(wire::sqe(READ, 1, TRANSPORT, 512), &[], NONE),
        wire::h2c_data(1, 0x80, 0, &[0; 512], true, NONE),
    ];
    for pdu in pdus {
        let rule = Rule { fes: SEQUENCE, fei: 0, header: 8, says: "before ICReq" };
        expect(&mut Controller::new(ConnConfig::default()), &pdu, &rule);
    }
}

#[test]
fn a_second_icreq_closes_the_connection() {
    one_wrong(&wire::icreq(0, NONE), &Rule { fes: SEQUENCE, fei: 0, header: 8, says: "came again" });
}

#[test]
fn pdus_that_no_host_sends_close_the_connection() {
    for pdu_type in [1, 3, 5, 7, 8, 9, 10, 0x55, 0xff] {
        let pdu = wire::pdu(pdu_type, 0, &[0; 16], &[], NONE, 4);
        let rule = Rule { fes: HEADER_FIELD, fei: 0, header: 8, says: "not one that this peer sends" };
        one_wrong(&pdu, &rule);
        expect(&mut Controller::new(ConnConfig::default()), &pdu, &rule);
    }
}

#[test]
fn a_wrong_icreq_is_refused_by_field() {
    let icreq = wire::icreq(0, NONE);
    let cases = [
        (2, &[127][..], 2, 8, "HLEN 127"),
        (4, &[127, 0, 0, 0], 4, 8, "PLEN 127"),
        (4, &[132, 0, 0, 0], 4, 8, "PLEN 132"),
        (4, &[0xff, 0xff, 0xff, 0xff], 4, 8, "PLEN 4294967295"),
        (1, &[1], 1, 8, "FLAGS 0x01"),
        (8, &[1, 0], 8, 128, "PFV 1"),
        (10, &[32], 10, 128, "alignment 32, must be at most 31"),
    ];
    for (at, bytes, fei, header, says) in cases {
        let rule = Rule { fes: HEADER_FIELD, fei, header, says };
        expect(&mut Controller::new(ConnConfig::default()), &with(icreq.clone(), at, bytes), &rule);
    }
}

#[test]
fn a_command_capsule_with_wrong_lengths_closes_the_connection() {
    let bare = wire::capsule(wire::sqe(READ, 1, TRANSPORT, 512), &[], NONE);
    let full = wire::capsule(wire::sqe(WRITE, 1, OFFSET, 64), &[0; 64], NONE);
    let cases = [
        (&bare, 2, &[24][..], 2, "HLEN 24"),
        (&bare, 2, &[73], 2, "must be 72"),
        (&bare, 4, &[0, 0, 0, 0], 4, "PLEN 0"),
        (&bare, 4, &[71, 0, 0, 0], 4, "must be at least 72"),
        (&bare, 4, &[73, 0, 0, 0], 3, "PDO 0"),
        (&full, 3, &[0], 3, "PDO 0"),
        (&full, 3, &[68], 3, "at least 72"),
        (&full, 3, &[74], 3, "multiple of 4"),
        (&full, 3, &[136], 4, "at least 137"),
        (&full, 3, &[252], 4, "at least 253"),
        (&full, 1, &[1], 1, "FLAGS 0x01"),
        (&full, 1, &[2], 1, "FLAGS 0x02"),
    ];
    for (pdu, at, bytes, fei, says) in cases {
        one_wrong(&with(pdu.clone(), at, bytes), &Rule { fes: HEADER_FIELD, fei, header: 8, says });
    }
}

#[test]
fn digests_that_were_agreed_on_must_be_there() {
    for digests in wire::ALL {
        for sent in wire::ALL.into_iter().filter(|sent| *sent != digests) {
            let pdu = wire::capsule(wire::sqe(WRITE, 3, OFFSET, 64), &[1; 64], sent);
            let rule = Rule { fes: HEADER_FIELD, fei: 1, header: 8, says: "digest flags must be" };
            expect(&mut busy(digests, ConnConfig::default()), &pdu, &rule);
            let pdu = wire::h2c_data(2, 0x81, 0, &[1; 64], false, sent);
            expect(&mut busy(digests, ConnConfig::default()), &pdu, &rule);
        }
    }
}

#[test]
fn a_damaged_header_closes_the_connection_and_gives_its_digest_back() {
    let capsule = wire::capsule(wire::sqe(READ, 3, TRANSPORT, 512), &[], BOTH);
    let data = wire::h2c_data(2, 0x81, 0, &[1; 64], false, BOTH);
    for (pdu, hlen) in [(capsule, 72), (data, 24)] {
        let received = u32::from_le_bytes(pdu[hlen..hlen + 4].try_into().unwrap());
        for bit in (64..8 * hlen).step_by(11) {
            let mut wrong = pdu.clone();
            wrong[bit / 8] ^= 1 << (bit % 8);
            let rule = Rule { fes: HEADER_DIGEST, fei: received, header: hlen, says: "HDGST 0x" };
            expect(&mut busy(BOTH, ConnConfig::default()), &wrong, &rule);
        }
    }
}

#[test]
fn more_in_capsule_data_than_offered_closes_the_connection() {
    let capsule = |bytes: u32, opcode| {
        wire::capsule(wire::sqe(opcode, 3, OFFSET, bytes), &vec![1; bytes as usize], NONE)
    };
    let says = "at most 8192";
    one_wrong(&capsule(8193, WRITE), &Rule { fes: LIMIT, fei: 0, header: 72, says });
    // Once Connect said that this is an I/O queue, its limit counts for everything but Fabrics commands.
    let io_queue = |in_capsule_bytes| {
        let mut rig = busy(NONE, ConnConfig { in_capsule_bytes, ..ConnConfig::default() });
        rig.feed(&wire::connect(3, 1, NONE));
        rig
    };
    for limit in [0, 512, 4096, 16 << 10] {
        let says = format!("at most {limit}");
        let rule = Rule { fes: LIMIT, fei: 0, header: 72, says: &says };
        expect(&mut io_queue(limit), &capsule(limit + 1, WRITE), &rule);
        if limit > 0 {
            let mut rig = io_queue(limit);
            rig.take_seen();
            rig.feed(&capsule(limit, WRITE));
            assert_eq!(rig.take_seen().len(), 2, "{limit} bytes are fetched");
        }
        let mut rig = io_queue(limit);
        rig.take_seen();
        rig.feed(&capsule(8192, 0x7f));
        assert_eq!(rig.take_seen().len(), 2, "8192 bytes of a Fabrics command are fetched");
    }
    // And an admin queue has 8192 again.
    let mut rig = io_queue(512);
    rig.feed(&wire::connect(4, 0, NONE));
    rig.take_seen();
    rig.feed(&capsule(8192, WRITE));
    assert_eq!(rig.take_seen().len(), 2);
}

#[test]
fn h2c_data_that_names_no_waiting_transfer_closes_the_connection() {
    // Never given out, 0, a raw index, another generation, out of range.
    for ttag in [0, 1, 2, 0x7f, 0x82, 0xff, 0x100, 0x101, 0x180, 0xffff] {
        let says = format!("TTAG {ttag:#06x}");
        let rule = Rule { fes: HEADER_FIELD, fei: 10, header: 24, says: &says };
        one_wrong(&wire::h2c_data(2, ttag, 0, &[1; 64], false, NONE), &rule);
    }
    let rule = Rule { fes: HEADER_FIELD, fei: 10, header: 24, says: "no transfer that waits" };
    // On a connection that never had one.
    let mut rig = Controller::ready(ConnConfig::default(), NONE);
    expect(&mut rig, &wire::h2c_data(0, 0, 0, &[1; 64], true, NONE), &rule);
}

#[test]
fn h2c_data_for_a_finished_transfer_closes_the_connection() {
    let mut rig = busy(NONE, ConnConfig::default());
    rig.feed(&wire::h2c_data(1, 0x80, 8000, &[7; 12_000], true, NONE));
    assert!(matches!(rig.take_seen()[..], [Seen::Fetched { cid: 1, .. }]));
    let rule = Rule { fes: HEADER_FIELD, fei: 10, header: 24, says: "TTAG 0x0080" };
    expect(&mut rig, &wire::h2c_data(1, 0x80, 0, &[7; 512], true, NONE), &rule);
}

#[test]
fn h2c_data_for_a_read_closes_the_connection() {
    let mut rig = Controller::ready(ConnConfig::default(), NONE);
    rig.feed(&wire::capsule(wire::sqe(READ, 5, TRANSPORT, 4096), &[], NONE));
    rig.take_seen();
    let rule = Rule { fes: HEADER_FIELD, fei: 10, header: 24, says: "no transfer that waits" };
    expect(&mut rig, &wire::h2c_data(5, 0x80, 0, &[7; 4096], true, NONE), &rule);
}

#[test]
fn h2c_data_outside_of_its_transfer_closes_the_connection() {
    let data = |cid, ttag, offset, bytes: usize, is_last| {
        wire::h2c_data(cid, ttag, offset, &vec![1; bytes], is_last, NONE)
    };
    let full = data(1, 0x80, 8000, 12_000, true);
    let cases = [
        (data(2, 0x80, 8000, 64, false), HEADER_FIELD, 8, "CCCID 0x0002"),
        (data(0xff01, 0x80, 8000, 64, false), HEADER_FIELD, 8, "CCCID 0xff01"),
        (data(1, 0x80, 0, 64, false), OUT_OF_RANGE, 0, "data offset 0 of PDU-type H2C_DATA, must be 8000"),
        (data(1, 0x80, 7999, 64, false), OUT_OF_RANGE, 0, "must be 8000"),
        (data(1, 0x80, 8004, 64, false), OUT_OF_RANGE, 0, "must be 8000"),
        (data(1, 0x80, u32::MAX, 64, false), OUT_OF_RANGE, 0, "must be 8000"),
        (data(1, 0x80, 8000, 12_004, true), OUT_OF_RANGE, 0, "12004 bytes at offset 8000"),
        (data(2, 0x81, 0, 20_001, true), OUT_OF_RANGE, 0, "the transfer has 20000"),
        (data(1, 0x80, 8000, 11_996, true), HEADER_FIELD, 1, "LAST_PDU"),
        (data(1, 0x80, 8000, 12_000, false), HEADER_FIELD, 1, "LAST_PDU"),
        (data(1, 0x80, 8000, 0, false), HEADER_FIELD, 16, "DATAL 0"),
        (with(full.clone(), 16, &[0xdf, 0x2e, 0, 0]), HEADER_FIELD, 16, "DATAL 11999"),
        (with(full.clone(), 16, &[0xe1, 0x2e, 0, 0]), HEADER_FIELD, 16, "PLEN leaves 12000"),
        (with(full.clone(), 16, &[0xff, 0xff, 0xff, 0xff]), HEADER_FIELD, 16, "DATAL 4294967295"),
    ];
    for (pdu, fes, fei, says) in cases {
        one_wrong(&pdu, &Rule { fes, fei, header: 24, says });
    }
    // The lengths of the common header, with and without digests.
    for digests in [NONE, BOTH] {
        let pdu = wire::h2c_data(1, 0x80, 8000, &[1; 64], false, digests);
        for (at, byte, fei, says) in [
            (2, 72, 2, "HLEN 72"),
            (3, 20, 3, "PDO 20"),
            (3, 29, 3, "PDO 29"),
            (3, 96, 4, "PLEN"),
            (4, 23, 4, "PLEN 23"),
        ] {
            let wrong = with(pdu.clone(), at, &[byte]);
            let rule = Rule { fes: HEADER_FIELD, fei, header: 8, says };
            expect(&mut busy(digests, ConnConfig::default()), &wrong, &rule);
        }
    }
}

#[test]
fn the_sum_of_offset_and_length_does_not_wrap() {
    // PLEN near 4 GiB: nothing of that size is waited for, the header alone decides.
    let mut wrong = wire::h2c_data(1, 0x80, 8000, &[1; 4], true, NONE);
    let bytes = u32::MAX - 24;
    wrong[4..8].copy_from_slice(&u32::MAX.to_le_bytes());
    wrong[16..20].copy_from_slice(&bytes.to_le_bytes());
    let config = ConnConfig { max_h2c_data: u32::MAX - 3, ..ConnConfig::default() };
    let rule = Rule { fes: OUT_OF_RANGE, fei: 0, header: 24, says: "at offset 8000" };
    expect(&mut busy(NONE, config), &wrong, &rule);
}

#[test]
fn h2c_data_beyond_maxh2cdata_closes_the_connection() {
    let config = ConnConfig { max_h2c_data: 4096, ..ConnConfig::default() };
    let mut rig = Controller::ready(config, NONE);
    rig.feed(&wire::capsule(wire::sqe(WRITE, 1, TRANSPORT, 20_000), &[], NONE));
    rig.feed(&wire::h2c_data(1, 0x80, 0, &[1; 4096], false, NONE));
    let rule = Rule { fes: LIMIT, fei: 0, header: 24, says: "at most MAXH2CDATA 4096" };
    expect(&mut rig, &wire::h2c_data(1, 0x80, 4096, &[1; 4100], false, NONE), &rule);
}

#[test]
fn a_terminate_request_of_the_host_ends_the_connection_without_an_answer() {
    for extra in [0, 1, 128] {
        let mut rig = busy(BOTH, ConnConfig::default());
        rig.feed(&wire::term_req(2, 1, 0x1234, &vec![9; extra]));
        assert_eq!(
            rig.conn.take_violation().map(|violation| violation.to_string()).as_deref(),
            Some("terminated by the peer: INVALID_HEADER_FIELD, FEI 0x1234")
        );
        rig.expect_closed();
        assert_eq!(rig.take_output().len(), 0);
    }
    for (at, bytes, fei, says) in
        [(4, &[23, 0][..], 4, "PLEN 23"), (4, &[153, 0], 4, "at most 152"), (2, &[25], 2, "HLEN 25")]
    {
        let wrong = with(wire::term_req(2, 1, 0, &[]), at, bytes);
        one_wrong(&wrong, &Rule { fes: HEADER_FIELD, fei, header: 8, says });
    }
}

#[test]
fn a_host_that_never_says_icreq_is_closed_in_time() {
    let mut rig =
        Controller::new(ConnConfig { initialize_timeout: Nanos::from_secs(3), ..ConnConfig::default() });
    assert_eq!(rig.conn.deadline(), Some(Nanos::from_secs(3)));
    rig.feed(&wire::icreq(0, NONE)[..127]);
    rig.conn.on_time(Nanos(2_999_999_999));
    rig.pull();
    assert_eq!(rig.conn.phase(), Phase::Open);
    rig.conn.on_time(Nanos::from_secs(3));
    rig.pull();
    assert_eq!(rig.conn.take_violation(), Some(Violation::InitializeTimeout));
    rig.expect_closed();
}

#[test]
fn what_was_replied_leaves_before_the_terminate_request() {
    let mut rig = Controller::ready(ConnConfig::default(), NONE);
    rig.feed(&wire::capsule(wire::sqe(READ, 5, TRANSPORT, 4096), &[], NONE));
    rig.transmit_some(100);
    rig.feed(&[0xee; 8]);
    rig.reply(6, Status::SUCCESS, None);
    let read = wire::c2h_data(5, 0, &wire::pattern(5, 4096), 12, NONE, 4);
    let expected = [read, wire::term_req(3, 1, 0, &[0xee; 8])].concat();
    assert_eq!(rig.take_output(), expected, "and nothing that was replied after it");
    assert_eq!(rig.sent, [5]);
    rig.finish();
}
