//! Every rule that a controller can break: what the log says, what it is told, and that every command comes
//! back.

use nvme_spec::status::Status;
use spindle_nvme_tcp::host::{CloseCause, HostConfig};
use spindle_nvme_tcp::{Phase, Violation};
use spindle_reactor::clock::Nanos;

use crate::rig::{Host, HostSeen};
use crate::wire::{self, BOTH, Digests, NONE};

const HEADER_FIELD: u16 = 1;
const SEQUENCE: u16 = 2;
const HEADER_DIGEST: u16 = 3;
const OUT_OF_RANGE: u16 = 4;
const LIMIT: u16 = 5;

struct Rule<'a> {
    fes: u16,
    fei: u32,
    header: usize,
    says: &'a str,
}

#[track_caller]
fn expect(rig: &mut Host, wrong: &[u8], rule: &Rule) {
    let outstanding = rig.conn.outstanding();
    rig.feed(wrong);
    let violation = rig.conn.take_violation().expect("a violation");
    let text = violation.to_string();
    assert!(text.contains(rule.says), "{text:?} does not say {:?}", rule.says);
    assert_eq!(rig.conn.phase(), Phase::Draining);
    assert_eq!(rig.take_seen(), [], "{text}");
    assert_eq!(rig.take_output(), wire::term_req(2, rule.fes, rule.fei, &wrong[..rule.header]), "{text}");
    assert_eq!(rig.conn.phase(), Phase::HalfClosed);
    rig.feed(&wire::capsule_resp(1, 0, 0, NONE));
    rig.conn.on_peer_closed();
    rig.pull();
    rig.expect_closed();
    let seen = rig.take_seen();
    assert_eq!(seen.len(), outstanding + 1, "each command once, and Closed");
    for event in &seen[..outstanding] {
        let HostSeen::Completed { status, result, .. } = event else { panic!("{event:?}") };
        assert_eq!((*status, *result), (Status::HOST_PATHING_ERROR, Err(Status::HOST_PATHING_ERROR)));
    }
    assert_eq!(seen[outstanding], HostSeen::Closed(CloseCause::Violation(violation)));
}

/// A connection with everything open: a read half received (CID 1, 8000 bytes), one not begun (2), a write
/// whose R2T was answered (3), one not asked for yet (4), one in its capsule (5), a flush (6).
fn busy(digests: Digests) -> Host {
    let config = HostConfig {
        header_digest: digests.header,
        data_digest: digests.data,
        in_capsule_bytes: 512,
        ..HostConfig::default()
    };
    let mut rig = Host::ready(config, 0, 4096);
    rig.read(1, 8000);
    rig.read(2, 4096);
    rig.write(3, &[3; 6000]);
    rig.write(4, &[4; 6000]);
    rig.write(5, &[5; 512]);
    rig.flush(6);
    rig.take_output();
    rig.feed(&wire::c2h_data(1, 0, &[1; 4000], 0, digests, 4));
    rig.feed(&wire::r2t(3, 9, 0, 6000, digests));
    rig.take_output();
    assert_eq!(rig.take_seen(), []);
    rig
}

fn one_wrong(wrong: &[u8], rule: &Rule) {
    expect(&mut busy(NONE), wrong, rule);
}

fn with(mut pdu: Vec<u8>, at: usize, bytes: &[u8]) -> Vec<u8> {
    pdu[at..at + bytes.len()].copy_from_slice(bytes);
    pdu
}

#[test]
fn a_wrong_icresp_is_refused_by_field() {
    let icresp = wire::icresp(0, NONE, 4096);
    let cases = [
        (2, &[24][..], HEADER_FIELD, 2, 8, "HLEN 24"),
        (4, &[127, 0, 0, 0], HEADER_FIELD, 4, 8, "PLEN 127"),
        (8, &[0, 1], HEADER_FIELD, 8, 128, "PFV 256"),
        (10, &[32], HEADER_FIELD, 10, 128, "alignment 32"),
        (11, &[1], HEADER_FIELD, 11, 128, "DGST 0x01 in ICResp, asked for 0x00"),
        (11, &[2], HEADER_FIELD, 11, 128, "DGST 0x02"),
        (12, &[0, 0, 0, 0], HEADER_FIELD, 12, 128, "MAXH2CDATA 0"),
        (12, &[0xfc, 0x0f, 0, 0], HEADER_FIELD, 12, 128, "MAXH2CDATA 4092"),
        (12, &[2, 0x10, 0, 0], HEADER_FIELD, 12, 128, "multiple of 4"),
    ];
    for (at, bytes, fes, fei, header, says) in cases {
        let mut rig = Host::new(HostConfig::default());
        rig.take_output();
        expect(&mut rig, &with(icresp.clone(), at, bytes), &Rule { fes, fei, header, says });
    }
    let mut rig = Host::new(HostConfig { header_digest: true, ..HostConfig::default() });
    rig.take_output();
    let rule = Rule { fes: HEADER_FIELD, fei: 11, header: 128, says: "DGST 0x00 in ICResp, asked for 0x01" };
    expect(&mut rig, &icresp, &rule);
}

#[test]
fn anything_before_icresp_or_a_second_icresp_closes_the_connection() {
    let pdus = [
        wire::capsule_resp(1, 0, 0, NONE),
        wire::c2h_data(1, 0, &[0; 512], 12, NONE, 4),
        wire::r2t(1, 1, 0, 512, NONE),
    ];
    for pdu in pdus {
        let mut rig = Host::new(HostConfig::default());
        rig.take_output();
        expect(&mut rig, &pdu, &Rule { fes: SEQUENCE, fei: 0, header: 8, says: "before ICReq" });
    }
    one_wrong(&wire::icresp(0, NONE, 4096), &Rule { fes: SEQUENCE, fei: 0, header: 8, says: "came again" });
}

#[test]
fn pdus_that_no_controller_sends_close_the_connection() {
    for pdu_type in [0, 2, 4, 6, 8, 10, 0x99] {
        let pdu = wire::pdu(pdu_type, 0, &[0; 16], &[], NONE, 4);
        one_wrong(&pdu, &Rule { fes: HEADER_FIELD, fei: 0, header: 8, says: "not one that this peer sends" });
    }
}

#[test]
fn pdus_with_wrong_lengths_or_digest_flags_close_the_connection() {
    let resp = wire::capsule_resp(6, 0, 0, NONE);
    let r2t = wire::r2t(4, 1, 0, 6000, NONE);
    let data = wire::c2h_data(2, 0, &[2; 4096], 12, NONE, 4);
    for pdu in [&resp, &r2t, &data] {
        one_wrong(
            &with(pdu.clone(), 2, &[72]),
            &Rule { fes: HEADER_FIELD, fei: 2, header: 8, says: "HLEN 72" },
        );
        one_wrong(
            &with(pdu.clone(), 1, &[1]),
            &Rule { fes: HEADER_FIELD, fei: 1, header: 8, says: "FLAGS 0x01" },
        );
        one_wrong(
            &with(pdu.clone(), 1, &[2]),
            &Rule { fes: HEADER_FIELD, fei: 1, header: 8, says: "FLAGS 0x02" },
        );
        let short = with(pdu.clone(), 4, &[23, 0, 0, 0]);
        one_wrong(&short, &Rule { fes: HEADER_FIELD, fei: 4, header: 8, says: "PLEN 23" });
    }
    for pdu in [&resp, &r2t] {
        let long = with(pdu.clone(), 4, &[28]);
        one_wrong(&long, &Rule { fes: HEADER_FIELD, fei: 4, header: 8, says: "exactly 24" });
    }
    one_wrong(&with(data.clone(), 3, &[20]), &Rule { fes: HEADER_FIELD, fei: 3, header: 8, says: "PDO 20" });
    one_wrong(&with(data, 3, &[26]), &Rule { fes: HEADER_FIELD, fei: 3, header: 8, says: "multiple of 4" });
    let rule = Rule { fes: HEADER_FIELD, fei: 1, header: 8, says: "digest flags must be 0x03" };
    expect(&mut busy(BOTH), &wire::c2h_data(2, 0, &[2; 4096], 12, NONE, 4), &rule);
}

#[test]
fn data_may_begin_further_behind_its_header() {
    let mut rig = Host::ready(HostConfig::default(), 0, 4096);
    rig.read(1, 512);
    rig.take_output();
    rig.feed(&wire::c2h_data(1, 0, &[1; 512], 12, NONE, 32));
    assert_eq!(rig.take_seen(), [crate::rig::done(1, Some(vec![1; 512]))]);
}

#[test]
fn a_damaged_header_closes_the_connection_and_gives_its_digest_back() {
    let pdus = [
        wire::capsule_resp(6, 0, 0, BOTH),
        wire::r2t(4, 1, 0, 6000, BOTH),
        wire::c2h_data(2, 0, &[2; 4096], 12, BOTH, 4),
    ];
    for pdu in pdus {
        let received = u32::from_le_bytes(pdu[24..28].try_into().unwrap());
        for byte in 8..24 {
            let mut wrong = pdu.clone();
            wrong[byte] ^= 0x10;
            let rule = Rule { fes: HEADER_DIGEST, fei: received, header: 24, says: "HDGST 0x" };
            expect(&mut busy(BOTH), &wrong, &rule);
        }
    }
}

#[test]
fn data_that_no_command_waits_for_closes_the_connection() {
    // Free, out of range, writes, a flush.
    for cid in [0, 7, 127, 128, 0x8001, 0xffff, 3, 4, 5, 6] {
        let says = format!("CCCID {cid:#06x}");
        let rule = Rule { fes: HEADER_FIELD, fei: 8, header: 24, says: &says };
        one_wrong(&wire::c2h_data(cid, 0, &[1; 512], 4, NONE, 4), &rule);
    }
    // After the last of it, and after its completion.
    let mut rig = busy(NONE);
    rig.feed(&wire::c2h_data(2, 0, &[2; 100], 4, NONE, 4));
    let rule = Rule { fes: HEADER_FIELD, fei: 8, header: 24, says: "waits for data" };
    expect(&mut rig, &wire::c2h_data(2, 100, &[2; 100], 4, NONE, 4), &rule);
    let mut rig = busy(NONE);
    rig.feed(&wire::c2h_data(2, 0, &[2; 4096], 12, NONE, 4));
    assert_eq!(rig.take_seen().len(), 1);
    expect(&mut rig, &wire::c2h_data(2, 4096, &[2; 100], 4, NONE, 4), &rule);
}

#[test]
fn data_outside_of_what_was_asked_for_closes_the_connection() {
    let full = wire::c2h_data(2, 0, &[2; 4096], 12, NONE, 4);
    let data =
        |cid, offset, bytes: usize, flags| wire::c2h_data(cid, offset, &vec![1; bytes], flags, NONE, 4);
    let cases = [
        (data(1, 0, 4000, 0), OUT_OF_RANGE, 0, "must be 4000"),
        (data(1, 4004, 4, 0), OUT_OF_RANGE, 0, "must be 4000"),
        (data(1, u32::MAX, 4, 0), OUT_OF_RANGE, 0, "must be 4000"),
        (data(1, 4000, 4001, 4), OUT_OF_RANGE, 0, "4001 bytes at offset 4000"),
        (data(2, 0, 4100, 12), OUT_OF_RANGE, 0, "the transfer has 4096"),
        (data(2, 0, 0, 4), HEADER_FIELD, 16, "DATAL 0"),
        (with(full.clone(), 16, &[0, 8, 0, 0]), HEADER_FIELD, 16, "DATAL 2048"),
        (with(full, 16, &[0xff, 0xff, 0xff, 0xff]), HEADER_FIELD, 16, "PLEN leaves 4096"),
        (data(2, 0, 4096, 8), HEADER_FIELD, 1, "SUCCESS only together with LAST_PDU"),
    ];
    for (pdu, fes, fei, says) in cases {
        one_wrong(&pdu, &Rule { fes, fei, header: 24, says });
    }
}

#[test]
fn success_with_less_data_than_asked_for_closes_the_connection() {
    let rule = Rule { fes: SEQUENCE, fei: 0, header: 24, says: "succeeded with 4000 of 8000 bytes" };
    one_wrong(&wire::capsule_resp(1, 0, 0, NONE), &rule);
    let rule = Rule { fes: SEQUENCE, fei: 0, header: 24, says: "succeeded with 0 of 4096 bytes" };
    one_wrong(&wire::capsule_resp(2, 0, 0, NONE), &rule);
    let rule = Rule { fes: SEQUENCE, fei: 0, header: 24, says: "succeeded with 4100 of 8000 bytes" };
    one_wrong(&wire::c2h_data(1, 4000, &[1; 100], 12, NONE, 4), &rule);
    // Less data with an error is fine.
    let mut rig = busy(NONE);
    rig.feed(&wire::capsule_resp(1, 4, 0, NONE));
    let HostSeen::Completed { cid: 1, result, .. } = rig.take_seen().remove(0) else { panic!("completed") };
    assert_eq!(result, Err(Status::DATA_TRANSFER_ERROR));
}

#[test]
fn a_completion_that_nobody_waits_for_closes_the_connection() {
    for cid in [0, 7, 128, 0x8001, 0xffff] {
        let says = format!("CID {cid:#06x}, which is not outstanding");
        let rule = Rule { fes: HEADER_FIELD, fei: 20, header: 24, says: &says };
        one_wrong(&wire::capsule_resp(cid, 0, 0, NONE), &rule);
    }
    let mut rig = busy(NONE);
    rig.feed(&wire::capsule_resp(6, 0, 0, NONE));
    assert_eq!(rig.take_seen().len(), 1);
    let rule = Rule { fes: HEADER_FIELD, fei: 20, header: 24, says: "not outstanding" };
    expect(&mut rig, &wire::capsule_resp(6, 0, 0, NONE), &rule);
}

#[test]
fn an_r2t_outside_of_its_command_closes_the_connection() {
    let cases = [
        (wire::r2t(1, 1, 0, 512, NONE), HEADER_FIELD, 8, "CCCID 0x0001"),
        (wire::r2t(6, 1, 0, 512, NONE), HEADER_FIELD, 8, "CCCID 0x0006"),
        (wire::r2t(7, 1, 0, 512, NONE), HEADER_FIELD, 8, "CCCID 0x0007"),
        (wire::r2t(0xffff, 1, 0, 512, NONE), HEADER_FIELD, 8, "CCCID 0xffff"),
        (wire::r2t(4, 1, 0, 0, NONE), HEADER_FIELD, 16, "R2TL 0"),
        (wire::r2t(4, 1, 4, 512, NONE), OUT_OF_RANGE, 0, "must be 0"),
        (wire::r2t(4, 1, 0, 6001, NONE), OUT_OF_RANGE, 0, "6001 bytes at offset 0"),
        (wire::r2t(3, 1, 6000, u32::MAX, NONE), OUT_OF_RANGE, 0, "the transfer has 6000"),
        (wire::r2t(3, 1, 6000, 4, NONE), OUT_OF_RANGE, 0, "the transfer has 6000"),
        (wire::r2t(5, 1, 512, 4, NONE), OUT_OF_RANGE, 0, "the transfer has 512"),
        (wire::r2t(5, 1, 0, 512, NONE), OUT_OF_RANGE, 0, "must be 512"),
    ];
    for (pdu, fes, fei, says) in cases {
        one_wrong(&pdu, &Rule { fes, fei, header: 24, says });
    }
}

#[test]
fn a_second_r2t_before_the_first_is_done_closes_the_connection() {
    let mut rig = busy(NONE);
    rig.feed(&wire::r2t(4, 1, 0, 5000, NONE));
    rig.transmit_some(5000 + 24);
    rig.output.clear();
    let wrong = wire::r2t(4, 2, 5000, 1000, NONE);
    rig.feed(&wrong);
    assert!(matches!(rig.conn.take_violation(), Some(Violation::R2tLimit(4))));
    let output = rig.take_output();
    assert!(output.ends_with(&wire::term_req(2, LIMIT, 0, &wrong)));
    rig.conn.on_reset();
    rig.pull();
    rig.expect_closed();
}

#[test]
fn a_terminate_request_of_the_controller_ends_the_connection_without_an_answer() {
    let mut rig = busy(BOTH);
    rig.feed(&wire::term_req(3, 3, 0xabcd, &[0; 24]));
    rig.expect_closed();
    let seen = rig.take_seen();
    assert_eq!(seen.len(), 7);
    let fes = nvme_spec::tcp::Fes::HEADER_DIGEST_ERROR;
    let why = CloseCause::Violation(Violation::TerminatedByPeer { fes, fei: 0xabcd });
    assert_eq!(seen.last(), Some(&HostSeen::Closed(why)));
}

#[test]
fn a_controller_that_never_answers_icreq_is_given_up_in_time() {
    let mut rig = Host::new(HostConfig { initialize_timeout: Nanos::from_secs(5), ..HostConfig::default() });
    rig.take_output();
    assert_eq!(rig.conn.deadline(), Some(Nanos::from_secs(5)));
    rig.conn.on_time(Nanos::from_secs(5));
    rig.pull();
    rig.expect_closed();
    let why = CloseCause::Violation(Violation::InitializeTimeout);
    assert_eq!(rig.take_seen(), [HostSeen::Closed(why)]);
}
