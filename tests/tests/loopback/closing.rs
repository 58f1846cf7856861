//! Hosts that leave without a word, at every point of the protocol and in every way, while another one works
//! on.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::yield_now;
use std::time::Instant;

use spindle_nvme_initiator::nvme_spec::Sqe;
use spindle_nvme_initiator::nvme_spec::fabrics::CNTLID_DYNAMIC;
use spindle_nvme_initiator::nvme_spec::feature::FeatureId;
use spindle_nvme_initiator::nvme_spec::tcp::{DigestBits, IcReq, PduType};
use spindle_nvme_initiator::nvme_spec::zerocopy::IntoBytes;
use spindle_tests::loopback::raw::{End, RawHost, capsule, connect_capsule, h2c_data, with_transport_data};
use spindle_tests::loopback::{Folder, LONG, SpindleProcess, config, free_port};

use super::{RAM, V4, buf, bytes, connect, done, pool};

/// Connections that the target takes: few, so that one that does not come back is missed.
const CONNECTIONS: usize = 24;
/// Buffers of 1 MiB of a core, and for admin commands: the same.
const BUFFERS: u16 = 4;
const MIB: u32 = 1 << 20;
const BLOCK_BYTES: u32 = 512;
/// Bytes of Host Behavior Support.
const BEHAVIOR_BYTES: u32 = 512;

/// Where in the protocol a host leaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Point {
    BeforeIcReq,
    InIcReq,
    AfterIcResp,
    InConnectHeader,
    InConnectData,
    AfterConnect,
    WithEventRequest,
    AfterAdminR2t,
    InCommandHeader,
    InCapsuleData,
    AfterR2t,
    InH2cDataHeader,
    InH2cData,
    WithUnreadData,
}

const POINTS: [Point; 14] = [
    Point::BeforeIcReq,
    Point::InIcReq,
    Point::AfterIcResp,
    Point::InConnectHeader,
    Point::InConnectData,
    Point::AfterConnect,
    Point::WithEventRequest,
    Point::AfterAdminR2t,
    Point::InCommandHeader,
    Point::InCapsuleData,
    Point::AfterR2t,
    Point::InH2cDataHeader,
    Point::InH2cData,
    Point::WithUnreadData,
];

/// The connections of a host that has come to this point.
fn come_to(point: Point, address: SocketAddr, nsid: u32) -> Vec<RawHost> {
    match point {
        Point::BeforeIcReq => vec![RawHost::open(address)],
        Point::InIcReq => {
            let mut host = RawHost::open(address);
            host.send(&IcReq::new(0, DigestBits::new(), 0).as_bytes()[..60]);
            vec![host]
        }
        Point::AfterIcResp => vec![before_connect(address, 0)],
        Point::InConnectHeader => vec![before_connect(address, 50)],
        Point::InConnectData => vec![before_connect(address, 700)],
        Point::AfterConnect => {
            let mut host = before_connect(address, 0);
            host.connect(0, CNTLID_DYNAMIC);
            vec![host]
        }
        Point::WithEventRequest => {
            let (mut admin, _) = RawHost::admin(address);
            admin.send(&capsule(Sqe::async_event_request(7), &[]));
            // Commands are taken in their order: after this answer the request is held.
            admin.send(&capsule(Sqe::keep_alive(8), &[]));
            assert_eq!(admin.completion().cid(), 8);
            vec![admin]
        }
        Point::AfterAdminR2t => {
            let (mut admin, _) = RawHost::admin(address);
            ask_for_behavior(&mut admin);
            vec![admin]
        }
        Point::InCommandHeader
        | Point::InCapsuleData
        | Point::AfterR2t
        | Point::InH2cDataHeader
        | Point::InH2cData
        | Point::WithUnreadData => {
            let (admin, cntlid) = RawHost::admin(address);
            let mut io = RawHost::io(address, 1, cntlid);
            come_to_on_io(point, &mut io, nsid);
            vec![io, admin]
        }
    }
}

/// Initialised, and so many bytes of its Connect sent.
fn before_connect(address: SocketAddr, sent: usize) -> RawHost {
    let mut host = RawHost::open(address);
    assert!(host.initialize(), "no room for a connection");
    host.send(&connect_capsule(0, CNTLID_DYNAMIC)[..sent]);
    host
}

/// An admin command that the target takes a buffer for, and asks for its data.
fn ask_for_behavior(admin: &mut RawHost) {
    let sqe = Sqe::set_features(9, FeatureId::HOST_BEHAVIOR, 0, 0);
    admin.send(&with_transport_data(sqe, BEHAVIOR_BYTES));
    assert_eq!(admin.r2t().r2tl.get(), BEHAVIOR_BYTES);
}

fn write_capsule(cid: u16, nsid: u32, bytes: u32) -> Vec<u8> {
    with_transport_data(Sqe::write(cid, nsid, 0, bytes / BLOCK_BYTES, false), bytes)
}

fn come_to_on_io(point: Point, io: &mut RawHost, nsid: u32) {
    let cut_data = |io: &mut RawHost, sent: usize| {
        io.send(&write_capsule(7, nsid, MIB));
        let r2t = io.r2t();
        io.send(&h2c_data(&r2t, &vec![0xee; MIB as usize])[..sent]);
    };
    match point {
        Point::InCommandHeader => io.send(&capsule(Sqe::flush(7, nsid), &[])[..40]),
        Point::InCapsuleData => {
            io.send(&capsule(Sqe::write(7, nsid, 0, 8, false), &[0xee; 4096])[..2000]);
        }
        Point::AfterR2t => {
            // Of those behind the first some wait for a buffer.
            (7..14).for_each(|cid| io.send(&write_capsule(cid, nsid, MIB)));
            assert_eq!(io.r2t().r2tl.get(), MIB);
        }
        Point::InH2cDataHeader => cut_data(io, 20),
        Point::InH2cData => cut_data(io, 300_000),
        Point::WithUnreadData => {
            // More than the sockets hold.
            for cid in 0..16 {
                let sqe = Sqe::read(cid, nsid, 0, MIB / BLOCK_BYTES);
                io.send(&with_transport_data(sqe, MIB));
            }
            assert_eq!(io.take(24)[0], PduType::C2H_DATA.0);
        }
        Point::BeforeIcReq
        | Point::InIcReq
        | Point::AfterIcResp
        | Point::InConnectHeader
        | Point::InConnectData
        | Point::AfterConnect
        | Point::WithEventRequest
        | Point::AfterAdminR2t => unreachable!("not on an I/O queue"),
    }
}

/// A host that writes, reads and looks at what it read until it is told to stop; how often it did.
fn work(address: SocketAddr, is_over: &AtomicBool) -> u32 {
    let (mut controller, mut queue) = connect(address);
    let pool = pool();
    let mut rounds = 0_u32;
    while !is_over.load(Ordering::Relaxed) {
        rounds += 1;
        let seed = u8::try_from(rounds % 251).expect("a byte");
        for nsid in [1, 2] {
            let namespace = controller.namespace(nsid).expect("a namespace");
            for (lba, size) in [(8192, 4096), (8448, 65_536)] {
                let ticket = queue.write(&namespace, lba, buf(&pool, size, seed), false).expect("taken");
                done(&mut queue, ticket);
                let ticket = queue.read(&namespace, lba, buf(&pool, size, 0)).expect("taken");
                let read = done(&mut queue, ticket).expect("its buffer");
                assert!(bytes(&read) == bytes(&buf(&pool, size, seed)), "round {rounds}, namespace {nsid}");
            }
        }
    }
    drop(queue);
    controller.shutdown().expect("ends in order");
    rounds
}

/// The target closes what hosts have left in its own time: look until it has.
fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !is_so() {
        assert!(begin.elapsed() < LONG, "{what}");
        yield_now();
    }
}

/// As many connections as are allowed can be had again, and not one more.
fn all_connections_are_there(address: SocketAddr) {
    let mut held = Vec::new();
    wait_until("connections were not given back", || {
        let mut host = RawHost::open(address);
        if host.initialize() {
            // Before that a newer connection would take its place.
            host.connect(0, CNTLID_DYNAMIC);
            held.push(host);
        }
        held.len() == CONNECTIONS
    });
    assert!(!RawHost::open(address).initialize(), "more connections than are allowed");
}

/// Each of them is in use at once: a buffer that was lost leaves the last of these commands without its R2T.
/// The only host gets all but one.
fn all_buffers_are_there(address: SocketAddr, nsid: u32) {
    let (admin, cntlid) = RawHost::admin(address);
    let mut queues: Vec<_> = (1..BUFFERS).map(|qid| RawHost::io(address, qid, cntlid)).collect();
    for (cid, io) in (0..).zip(&mut queues) {
        io.send(&write_capsule(cid, nsid, MIB));
    }
    let r2ts: Vec<_> = queues.iter_mut().map(RawHost::r2t).collect();
    for (io, r2t) in queues.iter_mut().zip(&r2ts) {
        io.send(&h2c_data(r2t, &vec![7; MIB as usize]));
        assert!(io.completion().status().is_success());
    }
    queues.into_iter().chain([admin]).for_each(|host| host.end(End::Fin));
}

/// The same for the buffers of admin commands.
fn all_admin_buffers_are_there(address: SocketAddr) {
    let mut admins: Vec<_> = (0..BUFFERS).map(|_| RawHost::admin(address).0).collect();
    admins.iter_mut().for_each(ask_for_behavior);
}

/// One file disk and one in memory, and as little of everything as may be.
fn serve(folder: &Folder, cores: usize, address: SocketAddr) -> SpindleProcess {
    let disks = [RAM.to_owned(), folder.file_disk("disk", "16MiB")];
    let scarce = format!(
        "[control]\nsocket = \"\"\n[limits]\nconnections = {CONNECTIONS}\n[pool]\nadmin_count = {BUFFERS}\n\
         [[pool.zone]]\nbuffer = \"1MiB\"\ncount = {BUFFERS}\n"
    );
    folder.serve(&(config(cores, address, &disks) + &scarce))
}

fn leave_everywhere(cores: usize) {
    let address = free_port(V4);
    let folder = Folder::new(&format!("closing-{cores}"));
    let served = serve(&folder, cores, address);
    let descriptors = served.descriptors();
    let is_over = AtomicBool::new(false);
    let rounds = std::thread::scope(|scope| {
        let worker = scope.spawn(|| work(address, &is_over));
        for point in POINTS {
            for end in [End::Fin, End::Close, End::Reset] {
                for (nsid, is_admin_first) in [(1, false), (2, false), (2, true)] {
                    let mut hosts = come_to(point, address, nsid);
                    if is_admin_first {
                        hosts.reverse();
                    }
                    hosts.into_iter().for_each(|host| host.end(end));
                }
            }
        }
        is_over.store(true, Ordering::Relaxed);
        worker.join().expect("the one that works on is not disturbed")
    });
    assert!(rounds > 1, "{rounds} rounds");
    wait_until("descriptors were not closed", || served.descriptors() == descriptors);
    all_connections_are_there(address);
    if cores == 1 {
        wait_until("descriptors were not closed", || served.descriptors() == descriptors);
        all_buffers_are_there(address, 1);
        all_buffers_are_there(address, 2);
        all_admin_buffers_are_there(address);
    }
    served.terminate();
}

#[test]
fn hosts_that_leave_anywhere_leave_nothing_behind_and_disturb_nobody() {
    leave_everywhere(1);
}

#[test]
fn hosts_that_leave_anywhere_leave_nothing_behind_on_two_cores() {
    leave_everywhere(2);
}

#[test]
fn a_host_that_talks_nonsense_ends_alone() {
    let address = free_port(V4);
    let folder = Folder::new("nonsense");
    let served = serve(&folder, 1, address);
    let (mut controller, mut queue) = connect(address);
    let namespace = controller.namespace(1).expect("a namespace");
    let pool = pool();
    let mut wrong_type = IcReq::new(0, DigestBits::new(), 0).as_bytes().to_vec();
    wrong_type[0] = 9;
    let mut wrong_hlen = IcReq::new(0, DigestBits::new(), 0).as_bytes().to_vec();
    wrong_hlen[2] = 9;
    for sent in [wrong_type, wrong_hlen, vec![0xff; 300], capsule(Sqe::flush(1, 1), &[])] {
        let mut host = RawHost::open(address);
        host.send(&sent);
        let answer = host.receive().expect("a terminate request");
        assert_eq!(answer.header.pdu_type, PduType::C2H_TERM_REQ);
        host.end(End::Fin);
        let ticket = queue.read(&namespace, 0, buf(&pool, 4096, 0)).expect("taken");
        done(&mut queue, ticket);
    }
    drop(queue);
    controller.shutdown().expect("ends in order");
    served.terminate();
}
