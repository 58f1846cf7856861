//! What others' initiators do that ours does not, imitated on the wire: SPDK's connects without a HOSTNQN,
//! with a HOSTID of each queue's own, forgets its event requests when it detaches, and takes an answer to one
//! for a broken target. Test suites name subsystems without `nqn.`.

use std::time::{Duration, Instant};

use nvme_spec::fabrics::{CNTLID_DYNAMIC, ConnectAttributes, ConnectData, ConnectInvalid, ConnectResult};
use nvme_spec::nqn::Nqn;
use nvme_spec::register::{CC, CSTS, Cc};
use nvme_spec::zerocopy::IntoBytes;
use nvme_spec::{Cqe, Sqe, Status};
use spindle_tests::loopback::raw::{End, RawHost, capsule};
use spindle_tests::loopback::{Folder, SUBSYSTEM, config, free_port};

use crate::{RAM, V4};

/// Connect's answer; empty names where `host` is `None`.
fn connect(
    host: &mut RawHost,
    subsystem: &str,
    name: Option<&str>,
    id: [u8; 16],
    qid: u16,
    cntlid: u16,
) -> Cqe {
    assert!(host.initialize(), "ICReq was not answered");
    let subsystem = Nqn::new(subsystem).expect("well formed");
    let name = name.map_or_else(Nqn::unnamed, |name| Nqn::new(name).expect("well formed"));
    let data = ConnectData::new(id, cntlid, &subsystem, &name);
    let sqe = Sqe::connect(0, qid, 31, 0, ConnectAttributes::new());
    host.send(&capsule(sqe, data.as_bytes()));
    host.completion()
}

fn set_cc(host: &mut RawHost, cid: u16, cc: Cc) {
    host.send(&capsule(Sqe::property_set(cid, false, CC, u64::from(cc.into_bits())), &[]));
    let cqe = host.completion();
    assert_eq!((cqe.cid(), cqe.status().is_success()), (cid, true), "nothing but the answer to Property Set");
}

#[test]
fn a_host_without_a_name_connects_works_and_detaches_as_spdks_initiator_does() {
    let folder = Folder::new("initiators-spdk");
    let address = free_port(V4);
    let mut served = folder.serve(&config(2, address, &[RAM.to_owned()]));
    let mut admin = RawHost::open(address);
    let cqe = connect(&mut admin, SUBSYSTEM, None, [1; 16], 0, CNTLID_DYNAMIC);
    assert!(cqe.status().is_success(), "{}", cqe.status());
    let cntlid = ConnectResult::from_bits(cqe.result_u32()).cntlid();
    let enabled = Cc::new().with_en(true).with_iosqes(6).with_iocqes(4);
    set_cc(&mut admin, 1, enabled);
    // A new HOSTID for each queue.
    let mut queues = Vec::new();
    for qid in 1..=3_u16 {
        let mut io = RawHost::open(address);
        let id = [u8::try_from(qid).expect("small") + 1; 16];
        let cqe = connect(&mut io, SUBSYSTEM, None, id, qid, cntlid);
        assert!(cqe.status().is_success(), "queue {qid}: {}", cqe.status());
        io.send(&capsule(Sqe::write(5, 1, 0, 1, false), &[7; 512]));
        assert!(io.completion().status().is_success());
        queues.push(io);
    }
    served.wait_for("hostid of queue 1 differs from that of queue 0");
    for cid in 100..104 {
        admin.send(&capsule(Sqe::async_event_request(cid), &[]));
    }
    queues.into_iter().for_each(|io| io.end(End::Close));
    // Orderly: SHN, then CSTS until it is complete. Whatever else comes is taken for a broken target.
    set_cc(&mut admin, 2, enabled.with_shn(1));
    let begin = Instant::now();
    loop {
        admin.send(&capsule(Sqe::property_get(3, false, CSTS), &[]));
        let cqe = admin.completion();
        assert_eq!((cqe.cid(), cqe.status().is_success()), (3, true), "an answer to what was forgotten");
        if cqe.result_u32() & 0b1100 == 0b1000 {
            break;
        }
        assert!(begin.elapsed() < Duration::from_secs(10), "the shutdown does not end");
    }
    admin.end(End::Close);
    served.wait_for("ended: the host closed the connection");
    let lines = served.log.iter().filter(|line| line.contains("hostid of queue")).count();
    assert_eq!(lines, 1, "once a controller");
    served.terminate();
}

#[test]
fn a_subsystem_without_the_prefix_is_served_with_a_warning_and_others_are_refused() {
    const NAME: &str = "blktests-subsystem-1";
    let folder = Folder::new("initiators-prefix");
    let address = free_port(V4);
    let served = folder.serve(&config(1, address, &[RAM.to_owned()]).replace(SUBSYSTEM, NAME));
    let is_warned =
        |line: &&String| line.contains(NAME) && line.contains("begins with") && line.contains("WARN");
    assert_eq!(served.log.iter().filter(is_warned).count(), 1, "{:#?}", served.log);
    for (name, is_there) in [(NAME, true), ("blktests-subsystem-2", false)] {
        let mut admin = RawHost::open(address);
        let cqe = connect(&mut admin, name, Some("a-host"), [1; 16], 0, CNTLID_DYNAMIC);
        if is_there {
            assert!(cqe.status().is_success(), "{}", cqe.status());
        } else {
            assert_eq!(cqe.status().without_more(), Status::CONNECT_INVALID_PARAMETERS, "it may come");
            assert_eq!(ConnectInvalid::from(cqe.result_u32()), ConnectInvalid::SUBNQN);
        }
        admin.end(End::Close);
    }
    served.terminate();
}
