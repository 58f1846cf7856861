//! `seed-corpus FOLDER`: writes the seeds of the fuzzers' corpora, golden sessions of both ends and small
//! programs.
//!
//! The files are named `seed-*`; what fuzzers found besides is left alone.
#![forbid(unsafe_code)]

use spindle_nvme_transport::RequestId;
use std::io::IoSlice;
use std::path::Path;

use arrayvec::ArrayVec;
use nvme_spec::fabrics::{ConnectAttributes, ConnectData};
use nvme_spec::identify::Cns;
use nvme_spec::log::LogId;
use nvme_spec::optimistic::{OptimisticReject, OptimisticRequest, OptimisticStatus};
use nvme_spec::register::{CAP, CC, CSTS};
use nvme_spec::sqe::Fuse;
use nvme_spec::zerocopy::IntoBytes;
use nvme_spec::{Sgl, Sqe, Status};
use spindle_nvme_tcp::RxBatch;
use spindle_nvme_tcp::controller::{Conn, ConnConfig};
use spindle_nvme_tcp::host::{self, HostConfig, HostData};
use spindle_nvme_transport::{DataPointer, Event, Reply, Transport};
use spindle_reactor::clock::Nanos;
use spindle_reactor::mem::{Buf, Pages, Pool, ZoneSpec};
use spindle_tests::direct::{Link, SUBSYSTEM, name};
use spindle_tests::fuzz::controller::{Begin, Scene};
use spindle_tests::fuzz::host::{COMMANDS, DATA_BYTES, command, icreq};
use spindle_tests::sim::Rng;

fn main() {
    let folder = std::env::args().nth(1).expect("a folder");
    let folder = Path::new(&folder);
    controller_seeds(&folder.join("controller"));
    host_seeds(&folder.join("host"));
    operation_seeds(&folder.join("operations"));
    optimistic_seeds(&folder.join("optimistic"));
    rdma_seeds(&folder.join("rdma"));
    drive_seeds(&folder.join("drive"));
}

fn write(folder: &Path, name: &str, bytes: &[u8]) {
    std::fs::create_dir_all(folder).expect("a folder");
    std::fs::write(folder.join(format!("seed-{name}")), bytes).expect("a file");
}

/// Private data of each kind, and programs of the client.
fn optimistic_seeds(folder: &Path) {
    let token = *b"0123456789abcdef";
    let accept = [1, 0, 3, 12].into_iter().chain(0..36).collect::<Vec<u8>>();
    let request = OptimisticRequest::new(token);
    let reject = OptimisticReject::new(OptimisticStatus::TOO_MANY);
    for (name, data) in [("request", request.as_bytes()), ("accept", &accept), ("reject", reject.as_bytes())]
    {
        write(folder, name, &[&[0], data].concat());
    }
    // Reads of a page and of several, their references, and READs of them that end as expected or not.
    let mut rng = Rng::new(5);
    for round in 0..8_u8 {
        let mut bytes = vec![1];
        for page in 0..8 {
            bytes.extend([0, page, 0, 0, page % 3, 2 * page + 1, page]);
            bytes.extend([3, page % 4, page, 0, 5, page, 4 + round % 4, 1]);
            bytes.extend([0, page, 3, 0, 0, 1, 9, 2]);
            bytes.extend((0..4).flat_map(|at| [0, at % 3, 2 * at + 1, 20 + at]));
            bytes.extend([4, 0, page, 3, 6, 20, 21, 22, 23, 4, 1]);
            bytes.extend((0..usize::from(round)).map(|_| rng.draw().to_le_bytes()[1] % 32));
        }
        write(folder, &format!("reads-{round}"), &bytes);
    }
}

/// Programs of the fuzzer of drives: one for each of its steps, and some of all.
fn drive_seeds(folder: &Path) {
    let mut rng = Rng::new(11);
    for step in 0..u8::try_from(spindle_tests::fuzz::drive::STEPS).expect("small") {
        let mut bytes = vec![step, step % 2];
        for round in 0..12 {
            // Something to do, something odd, and time for it.
            for step in [0, step, 1, 2, step, 1, 3] {
                bytes.push(step);
                bytes.extend((0..2 + round % 4).map(|_| rng.draw().to_le_bytes()[2] % 64));
            }
        }
        write(folder, &format!("step-{step}"), &bytes);
    }
    // Compares, verifies and copies, of all sizes, with something odd and time between them.
    let mut bytes = vec![0, 0];
    for round in 0..40_u8 {
        for op in [5, 6, 7] {
            bytes.extend([0, round % 2, op, round.wrapping_mul(11), round.wrapping_mul(37)]);
        }
        if round % 4 == 3 {
            bytes.extend([7, 9, round / 4]);
        }
        bytes.extend([1, round % 2, 2, 3, 1, round % 2, 3, 20]);
    }
    write(folder, "offload", &bytes);
}

/// The bytes that a host sends for these commands, R2Ts answered by the target itself.
fn session(begin: Begin, commands: Vec<(Sqe, HostData)>) -> Vec<u8> {
    let mut scene = Scene::new();
    // The place of the bystander in the fuzzer's scene, so that the target's answers are the same.
    let _bystander = scene.host();
    let mut bytes = vec![u8::try_from(begin as usize).expect("small"), 3];
    let mut link = match begin {
        Begin::Fresh | Begin::Initialized => panic!("golden bytes need no target"),
        Begin::Admin => scene.host().into_iter().next().expect("two"),
        Begin::Io => scene.host().into_iter().nth(1).expect("two"),
    };
    for (sqe, data) in commands {
        link.host.submit(sqe, data).expect("room");
        while record(&mut link, &mut scene, &mut bytes) {}
    }
    bytes
}

/// A turn of the link, with what the host sends kept.
fn record(link: &mut Link, scene: &mut Scene, bytes: &mut Vec<u8>) -> bool {
    let mut pieces = ArrayVec::<IoSlice<'_>, 1024>::new();
    link.host.send_pieces(&mut pieces);
    pieces.iter().for_each(|piece| bytes.extend_from_slice(piece));
    drop(pieces);
    link.turn(&mut scene.core, &mut |_| {})
}

fn controller_seeds(folder: &Path) {
    let pool = pool();
    let buf = |bytes: u32| {
        let mut buf = pool.take(bytes).expect("enough");
        buf.clear();
        buf
    };
    let data = ConnectData::new([9; 16], 0xffff, &name(SUBSYSTEM), &name("nqn.2026-01.io.spindle:fuzz"));
    let mut fresh = vec![0, 5];
    fresh.extend(icreq());
    let mut connect = Sqe::connect(0, 0, 31, 5000, ConnectAttributes::new());
    connect.sgl = nvme_spec::Sgl::in_capsule(1024);
    fresh.extend([4, 0, 72, 72]);
    fresh.extend(1096_u32.to_le_bytes());
    fresh.extend(connect.as_bytes());
    fresh.extend(data.as_bytes());
    for sqe in [
        Sqe::property_get(1, true, CAP),
        Sqe::property_set(2, false, CC, 1 | 6 << 16 | 4 << 20),
        Sqe::property_get(3, false, CSTS),
        Sqe::async_event_request(4),
        Sqe::keep_alive(5),
        Sqe::abort(6, 0, 4),
    ] {
        fresh.extend([4, 0, 72, 0, 72, 0, 0, 0]);
        fresh.extend(sqe.as_bytes());
    }
    write(folder, "fresh-session", &fresh);
    write(folder, "initialized-connect", &[&[1, 6][..], &fresh[2 + 128..]].concat());
    let admin = vec![
        (Sqe::identify(1, Cns::CONTROLLER, 0, 0), HostData::FromController(buf(4096))),
        (Sqe::get_log_page(2, LogId(1), 0xffff_ffff, 256, 0, false), HostData::FromController(buf(256))),
        (
            Sqe::set_features(3, nvme_spec::feature::FeatureId::HOST_BEHAVIOR, 0, 0),
            HostData::ToController(buf(512)),
        ),
        (Sqe::async_event_request(4), HostData::None),
        (Sqe::keep_alive(5), HostData::None),
        (Sqe::property_set(6, false, CC, 6 << 16 | 4 << 20), HostData::None),
    ];
    write(folder, "admin-session", &session(Begin::Admin, admin));
    let to = |bytes| HostData::ToController(buf(bytes));
    let io = vec![
        (Sqe::read(1, 1, 0, 8), HostData::FromController(buf(4096))),
        (Sqe::write(2, 1, 3, 1, false), to(512)),
        (Sqe::write(3, 1, 3, 16, true), to(8192)),
        (Sqe::flush(4, 1), HostData::None),
        (Sqe::compare(5, 1, 3, 1), to(512)),
        (Sqe::compare(6, 1, 3, 1).with_fuse(Fuse::FIRST), to(512)),
        (Sqe::write(7, 1, 3, 1, false).with_fuse(Fuse::SECOND), to(512)),
        (Sqe::dsm(8, 1, 1), to(16)),
        (Sqe::copy(9, 1, 100, 1), to(32)),
        (Sqe::verify(10, 1, 0, 200), HostData::None),
        (Sqe::disconnect(11), HostData::None),
    ];
    write(folder, "io-session", &session(Begin::Io, io));
    let large =
        vec![(Sqe::write(1, 1, 0, 24, false), to(12_288)), (Sqe::write(2, 1, 50, 20, false), to(10_240))];
    write(folder, "io-large-writes", &session(Begin::Io, large));
}

fn pool() -> Pool {
    let zone = |buffer_bytes, count| ZoneSpec { buffer_bytes, count };
    Pool::new(&[zone(4096, 64), zone(16 << 10, 16)], Pages::Base).expect("a pool")
}

/// What a target answers to the fuzzer's commands, `status` in every completion.
fn answers(status: Status, may_omit_cqe: bool) -> Vec<u8> {
    let pool = pool();
    let config = HostConfig { in_capsule_bytes: 4096, queue_entries: COMMANDS, ..HostConfig::default() };
    let mut host = host::Conn::new(config, Nanos::ZERO);
    let mut conn = Conn::new(ConnConfig { max_h2c_data: 4096, ..ConnConfig::default() }, Nanos::ZERO);
    let (mut bytes, mut has_submitted) = (Vec::new(), false);
    for _ in 0..10 {
        let up = take(|pieces| host.send_pieces(pieces));
        host.sent(up.len());
        let mut batch = RxBatch::new(up.len().max(1));
        batch.extend(&up);
        conn.load(batch);
        while let Some(event) = conn.next_event() {
            answer(&mut conn, &pool, event, status, may_omit_cqe);
        }
        conn.unload();
        let down = take(|pieces| conn.send_pieces(pieces));
        conn.sent(down.len());
        bytes.extend(&down);
        let mut batch = RxBatch::new(down.len().max(1));
        batch.extend(&down);
        host.load(batch);
        while host.next_event().is_some() {}
        host.unload();
        if !std::mem::replace(&mut has_submitted, true) {
            for cid in 0..COMMANDS {
                let (sqe, data) = command(cid, &pool);
                host.submit(sqe, data).expect("room");
            }
        }
    }
    bytes
}

fn answer(conn: &mut Conn, pool: &Pool, event: Event, status: Status, may_omit_cqe: bool) {
    let slot = |cid: u16| RequestId::from_wire(1 << 16 | u32::from(cid));
    let reply = |cid, data: Option<Buf>| Reply {
        slot: slot(cid),
        cqe: nvme_spec::Cqe::new(cid, status),
        data: data.filter(|_| status.is_success()),
        may_omit_cqe,
    };
    match event {
        Event::Command { sqe, data: Ok(DataPointer::Host { bytes }) } if sqe.opcode == 2 => {
            conn.reply(reply(sqe.cid(), pool.take(bytes)));
        }
        Event::Command { sqe, data: Ok(DataPointer::Host { bytes } | DataPointer::InCapsule { bytes }) } => {
            conn.fetch(slot(sqe.cid()), sqe.cid(), pool.take(bytes).expect("enough"));
        }
        Event::Command { sqe, .. } => conn.reply(reply(sqe.cid(), None)),
        Event::Fetched { slot, .. } => conn.reply(reply(u16::try_from(slot.index()).expect("a cid"), None)),
        Event::Sent { .. } | Event::FetchedPart { .. } | Event::SentPart { .. } | Event::Closed => {}
    }
}

fn take<'a>(pieces: impl FnOnce(&mut ArrayVec<IoSlice<'a>, 1024>) -> usize) -> Vec<u8> {
    let mut slices = ArrayVec::<IoSlice<'a>, 1024>::new();
    pieces(&mut slices);
    slices.iter().flat_map(|slice| slice.iter().copied()).collect()
}

fn host_seeds(folder: &Path) {
    assert_eq!(DATA_BYTES, 8192, "the seeds are for this");
    // The lowest bit of the first byte says that ICResp comes by itself.
    let whole = |bytes: &[u8]| [&[2], bytes].concat();
    let rest = |bytes: &[u8]| [&[3], &bytes[128..]].concat();
    let plain = answers(Status::SUCCESS, false);
    write(folder, "completions", &whole(&plain));
    write(folder, "completions-after-icresp", &rest(&plain));
    write(folder, "success-flags", &rest(&answers(Status::SUCCESS, true)));
    write(folder, "failures", &rest(&answers(Status::LBA_OUT_OF_RANGE.dnr(), false)));
    let mut term = vec![3, 3, 0, 24, 0];
    term.extend(24_u32.to_le_bytes());
    term.extend([1, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    write(folder, "terminated", &term);
}

/// Programs that go everywhere: each step drawn, most of them commands on queues that work.
fn operation_seeds(folder: &Path) {
    for seed in 0..24_u64 {
        let mut rng = Rng::new(seed + 100);
        let length = rng.size(20, 600);
        let bytes: Vec<u8> = (0..length).map(|_| rng.draw().to_le_bytes()[2]).collect();
        write(folder, &format!("program-{seed:02}"), &bytes);
    }
}

/// A step of the RDMA fuzzer that sends a capsule.
fn sent(sqe: &Sqe, behind: &[u8]) -> Vec<u8> {
    let bytes = u16::try_from(64 + behind.len()).expect("short");
    [&[0][..], &bytes.to_le_bytes(), sqe.as_bytes(), behind].concat()
}

/// Sessions over RDMA. Odd keys open memory, even ones do not.
fn rdma_seeds(folder: &Path) {
    let keyed = |bytes: u32, asks: bool| Sgl::keyed(0x10_0000, bytes, 0x1001, asks);
    let names = (&name(SUBSYSTEM), &name("nqn.2026-01.io.spindle:fuzz"));
    let data = ConnectData::new([9; 16], 0xffff, names.0, names.1);
    let connect = Sqe::connect(0, 0, 31, 5000, ConnectAttributes::new());
    let property = |sqe: Sqe| sent(&sqe, &[]);
    let fresh = [
        vec![0, 5],
        sent(&connect.with_sgl(Sgl::in_capsule(1024)), data.as_bytes()),
        property(Sqe::property_get(1, true, CAP)),
        property(Sqe::property_set(2, false, CC, 1 | 6 << 16 | 4 << 20)),
        property(Sqe::property_get(3, false, CSTS)),
        property(Sqe::async_event_request(4)),
        property(Sqe::abort(5, 0, 4)),
    ];
    write(folder, "fresh-session", &fresh.concat());
    write(
        folder,
        "fresh-keyed-connect",
        &[vec![0, 6], sent(&connect.with_sgl(keyed(1024, true)), &[])].concat(),
    );
    let admin = [
        vec![1, 7],
        sent(&Sqe::identify(1, Cns::CONTROLLER, 0, 0).with_sgl(keyed(4096, true)), &[]),
        sent(&Sqe::get_log_page(2, LogId(1), 0xffff_ffff, 256, 0, false).with_sgl(keyed(256, false)), &[]),
        sent(&Sqe::keep_alive(3), &[]),
        sent(&Sqe::property_set(4, false, CC, 6 << 16 | 4 << 20), &[]),
    ];
    write(folder, "admin-session", &admin.concat());
    let list: Vec<u8> = (0..3_u32)
        .flat_map(|block| {
            Sgl::keyed(u64::from(block) << 20, 4096, 0x2001 + 2 * block, block == 1).as_bytes().to_vec()
        })
        .collect();
    let listed = |sqe: Sqe| {
        let identifier = nvme_spec::SglKind::LAST_SEGMENT_OFFSET.0;
        sqe.with_sgl(Sgl { length: 48.into(), identifier, ..Sgl::none() })
    };
    let io = [
        vec![2, 8],
        sent(&Sqe::read(1, 1, 0, 8).with_sgl(keyed(4096, true)), &[]),
        sent(&Sqe::write(2, 1, 3, 1, false).with_sgl(Sgl::in_capsule(512)), &[7; 512]),
        sent(&Sqe::write(3, 1, 3, 16, true).with_sgl(keyed(8192, false)), &[]),
        sent(&listed(Sqe::write(4, 1, 0, 24, false)), &list),
        sent(&listed(Sqe::read(5, 1, 0, 24)), &list),
        vec![5, 40],
        sent(&Sqe::compare(6, 1, 3, 1).with_fuse(Fuse::FIRST).with_sgl(Sgl::in_capsule(512)), &[7; 512]),
        sent(&Sqe::write(7, 1, 3, 1, false).with_fuse(Fuse::SECOND).with_sgl(keyed(512, true)), &[]),
        sent(&Sqe::dsm(8, 1, 1).with_sgl(Sgl::in_capsule(16)), &[0; 16]),
        sent(&Sqe::verify(10, 1, 0, 200), &[]),
        sent(&Sqe::disconnect(11), &[]),
    ];
    write(folder, "io-session", &io.concat());
    for (end, number) in [("lost", 6), ("in-silence", 7), ("disconnected", 8), ("failed-key", 9)] {
        let key = if number == 9 { 0x1000 } else { 0x1001 };
        let large = Sqe::write(1, 1, 0, 64, false).with_sgl(Sgl::keyed(0, 32 << 10, key, true));
        let read = Sqe::read(2, 1, 0, 64).with_sgl(Sgl::keyed(0, 32 << 10, 0x1001, true));
        let steps = [vec![2, 9], sent(&large, &[]), sent(&read, &[]), vec![5, 12, number]];
        write(folder, &format!("io-{end}"), &steps.concat());
    }
}
