//! NVMe/RDMA over the fabric: every end at every step, and a short simulation.
#![forbid(unsafe_code)]

use std::sync::Arc;

use nvme_spec::Sqe;
use spindle_nvme_rdma::controller::Phase;
use spindle_nvme_transport::host::HostData;
use spindle_nvme_transport::{CloseReason, Connections, Transport};
use spindle_reactor::clock::Nanos;
use spindle_reactor::mem::{Pages, ZoneSpec};
use spindle_target_disk::Disk;
use spindle_target_disk::fault::{Fault, FaultDisk};
use spindle_target_disk::ram::{RamDisk, RamSpec};
use spindle_tests::fabric::direct::{Direct, connect, end, setting};
use spindle_tests::fabric::{Link, Setting, Weather};
use spindle_tests::sim::disk::PoolDisk;
use spindle_tests::sim::{self, Rng};

fn ram() -> Arc<dyn Disk> {
    let spec = RamSpec { bytes: 4 << 20, block_bytes: 512, pages: Pages::Base, has_seals: false };
    Arc::new(RamDisk::with_slack("ram", spec, 1 << 20).expect("a disk"))
}

/// Memory for few commands.
fn zones() -> [ZoneSpec; 2] {
    [ZoneSpec { buffer_bytes: 4096, count: 3 }, ZoneSpec { buffer_bytes: 64 << 10, count: 1 }]
}

/// A queue with room for little.
fn narrow() -> Setting {
    let mut narrow = setting(1);
    narrow.target.send_queue = 3;
    narrow.target.segments_max = 1;
    narrow.target.reads_max = 1;
    narrow.host.send_wr = 2;
    narrow.weather = Weather { pieces: 4, invalidate: 500, looks: 1000, ..Weather::default() };
    narrow
}

/// How a connection ends.
#[derive(Debug, Clone, Copy)]
enum End {
    LinkLostAndTold,
    LinkLostInSilence,
    Vanished,
    HostGone,
    DisconnectedTwice,
    Closed(CloseReason),
    ClosedTwice,
    DrainedInTime,
}

const ENDS: [End; 10] = [
    End::LinkLostAndTold,
    End::LinkLostInSilence,
    End::Vanished,
    End::HostGone,
    End::DisconnectedTwice,
    End::Closed(CloseReason::KeepAliveExpired),
    End::Closed(CloseReason::ControllerGone),
    End::Closed(CloseReason::Shutdown),
    End::ClosedTwice,
    End::DrainedInTime,
];

fn apply(direct: &mut Direct, by: End, rng: &mut Rng) {
    let Direct { core, io, .. } = direct;
    let Some(id) = io.id else { return };
    match by {
        End::LinkLostAndTold => io.lose(true),
        End::LinkLostInSilence => io.lose(false),
        End::Vanished => io.vanish(),
        End::HostGone => io.destroy_host(),
        End::DisconnectedTwice => {
            io.target_disconnected(core);
            io.target_disconnected(core);
        }
        End::Closed(reason) => core.transport(id).expect("it is there").close(reason),
        End::ClosedTwice => {
            let conn = core.transport(id).expect("it is there");
            conn.close(CloseReason::Shutdown);
            conn.close(CloseReason::ControllerGone);
        }
        End::DrainedInTime => {
            let conn = core.transport(id).expect("it is there");
            conn.close(CloseReason::Disconnect);
            // The host does not take its answers.
            conn.on_time(Nanos(1));
            conn.on_time(Nanos::from_secs(3));
            assert!(matches!(conn.phase(), Phase::Ending | Phase::Closed), "{:?}", conn.phase());
        }
    }
    io.touch();
    for _ in 0..rng.size(0, 30) {
        io.shake(core, rng, 2);
        while io.next_event().is_some() {}
    }
}

/// Commands of all paths: in the capsule, by READs, scattered, of the frames' and of the pool's memory.
fn submit_some(direct: &mut Direct) {
    let commands = [
        (Sqe::write(1, 1, 0, 8, false), 4096, true),
        (Sqe::write(2, 1, 16, 40, false), 20_480, true),
        (Sqe::read(3, 1, 0, 56), 28_672, false),
        (Sqe::compare(4, 1, 100, 12), 6144, true),
        (Sqe::write(5, 1, 200, 4, false), 2048, true),
        (Sqe::read(6, 1, 16, 3), 1536, false),
        (Sqe::verify(7, 1, 0, 2000), 0, false),
    ];
    for (sqe, bytes, is_write) in commands {
        let data = match (bytes, is_write) {
            (0, _) => HostData::None,
            (_, true) => HostData::ToController(direct.pool.take(bytes).expect("the host's own")),
            (_, false) => HostData::FromController(direct.pool.take(bytes).expect("the host's own")),
        };
        assert!(direct.io.submit(sqe, data, &mut direct.rng).is_ok(), "room");
    }
}

#[test]
fn a_connection_may_end_at_every_step_by_every_way_and_leaves_nothing_behind() {
    let mut seen = Vec::new();
    for disk in [ram(), PoolDisk::create(512, 4096)] {
        for by in ENDS {
            for steps in (0..300).step_by(4) {
                let mut direct = Direct::on(&disk, &zones(), narrow());
                let mut rng = Rng::new(steps);
                submit_some(&mut direct);
                for _ in 0..steps {
                    direct.io.shake(&mut direct.core, &mut rng, 2);
                    direct.core.poll();
                    direct.io.touch();
                    while direct.io.next_event().is_some() {}
                }
                apply(&mut direct, by, &mut rng);
                if let Some(conn) = direct.io.id.and_then(|id| direct.core.transport(id)) {
                    let state = (conn.phase(), conn.posted() > 0, conn.buffers_held() > 0);
                    if !seen.contains(&state) {
                        seen.push(state);
                    }
                }
                end(&mut direct.io, &mut direct.core, &mut rng);
                direct.finish();
            }
        }
    }
    for state in [
        (Phase::Open, true, true),
        (Phase::Draining, true, false),
        (Phase::Ending, true, false),
        (Phase::Ending, false, false),
    ] {
        assert!(seen.contains(&state), "{state:?} was not seen: {seen:?}");
    }
}

#[test]
fn a_connection_that_is_never_established_ends() {
    let disk = ram();
    for by in ENDS {
        let mut direct = Direct::on(&disk, &zones(), narrow());
        let fresh = Link::new(setting(1), &mut direct.core, 0);
        let old = std::mem::replace(&mut direct.io, fresh);
        let sqe = Sqe::keep_alive(1);
        assert!(direct.io.submit(sqe, HostData::None, &mut direct.rng).is_ok());
        let mut rng = Rng::new(3);
        // What came before ESTABLISHED is held.
        direct.io.before_established(&mut direct.core, &mut rng);
        let id = direct.io.id.expect("it is there");
        assert_eq!(direct.core.transport(id).expect("it is there").phase(), Phase::Connecting);
        if !matches!(by, End::DrainedInTime) {
            apply(&mut direct, by, &mut rng);
        }
        end(&mut direct.io, &mut direct.core, &mut rng);
        direct.io = old;
        direct.finish();
    }
}

#[test]
fn a_host_takes_places_of_queue_pairs_without_connect_once_they_are_destroyed() {
    let disk = ram();
    let mut direct = Direct::on(&disk, &zones(), setting(1));
    let Direct { core, pool, rng, .. } = &mut direct;
    // The core is full of them; half of them are established.
    let mut silent: Vec<Link> = (0..6).map(|_| Link::new(setting(1), core, 0)).collect();
    silent.iter_mut().for_each(Link::excuse);
    for link in &mut silent[..3] {
        while link.turn(core, rng, &mut |event| panic!("{event:?}")) {}
    }
    let oldest: Vec<_> = silent[..2].iter().map(|link| link.id).collect();
    assert!(core.refusal().is_some(), "full");
    let mut ended = Vec::new();
    let mut turns = 0;
    // A host comes with two queues.
    while core.usage().connections > 6 {
        core.make_room(2, |core, id| {
            core.transport(id).expect("it is there").on_disconnected();
            core.step(id);
            assert!(core.transport(id).is_some(), "a device may still know its buffers");
            ended.push(Some(id));
        });
        silent.iter_mut().for_each(|link| link.shake(core, rng, 1));
        turns += 1;
        assert!(turns < 10_000, "no place becomes free");
    }
    assert_eq!(ended, oldest);
    assert!(silent[..2].iter().all(|link| link.id.is_none()), "destroyed");
    let (mut admin, mut io) = connect(core, pool, rng, setting(1));
    for link in silent.iter_mut().chain([&mut io, &mut admin]) {
        end(link, core, rng);
    }
    direct.finish();
}

#[test]
fn a_disk_of_frames_that_takes_its_time_still_knows_where_the_host_wants_its_data() {
    let (disk, control) = FaultDisk::new(ram(), 1);
    control.set_all(Fault::Delay, 1_000_000);
    let mut direct = Direct::on(&disk, &zones(), setting(1));
    for bytes in [512, 4096, 16_384] {
        let buf = direct.pool.take(bytes).expect("the host's own");
        direct.run(Sqe::write(1, 1, 8, bytes / 512, false), HostData::ToController(buf));
        let buf = direct.pool.take(bytes).expect("the host's own");
        direct.run(Sqe::read(2, 1, 8, bytes / 512), HostData::FromController(buf));
    }
    direct.finish();
}

/// Everything that can happen without the host, for so long; true when the connection has ended.
fn ends_within(direct: &mut Direct, now: &mut Nanos, time: Nanos) -> bool {
    let end = *now + time;
    while *now < end {
        *now += Nanos::from_ms(50);
        let Direct { core, io, rng, .. } = direct;
        core.set_time(*now, now.as_ms());
        let Some(conn) = io.id.and_then(|id| core.transport(id)) else { return true };
        if conn.watch(*now) {
            io.touch();
        }
        assert!(conn.posted() <= 1, "one probe at a time");
        for _ in 0..100 {
            io.shake(core, rng, 8);
        }
        while io.next_event().is_some() {}
    }
    false
}

#[test]
fn a_vanished_host_of_an_idle_connection_is_detected_and_a_live_one_is_kept() {
    let mut direct = Direct::on(&ram(), &zones(), setting(1));
    let mut now = Nanos::ZERO;
    assert!(!ends_within(&mut direct, &mut now, Nanos::from_secs(100)), "the host is there");
    let buf = direct.pool.take(512).expect("the host's own");
    direct.run(Sqe::read(1, 1, 0, 1), HostData::FromController(buf));
    direct.io.vanish();
    assert!(!ends_within(&mut direct, &mut now, Nanos::from_secs(14)), "too early");
    assert!(ends_within(&mut direct, &mut now, Nanos::from_secs(3)), "the lost host is not found");
    direct.finish();
}

#[test]
fn a_short_simulation_over_rdma_keeps_every_promise() {
    for seed in 10_000..10_040 {
        sim::run_rdma(seed, 500);
    }
}
