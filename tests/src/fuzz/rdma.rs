//! What a host sends over RDMA, into the controller's end and the target core behind it.
//!
//! The first byte says where the connection is to begin: fresh, as an admin queue or as an I/O queue; the
//! second seeds what happens when. Then steps: a capsule with its length and bytes, some time, the end. Of
//! the keys that it names the odd ones open memory. Another host's queues stay on the same core and must not
//! notice.

use std::sync::Arc;

use nvme_spec::Sqe;
use spindle_nvme_rdma::host::HostEvent;
use spindle_nvme_transport::Connections;
use spindle_nvme_transport::host::HostData;
use spindle_reactor::clock::Nanos;
use spindle_reactor::mem::ZoneSpec;
use spindle_target_disk::Disk;

use super::bytes::Bytes;
use crate::fabric::direct::{Direct, TURNS_MAX, connect, end, finish, setting};
use crate::fabric::{Link, Setting};
use crate::sim::Rng;
use crate::sim::disk::PoolDisk;

/// Longest capsule: one byte more than its receive holds.
const CAPSULE_BYTES_MAX: usize = 64 + 4096 + 1;

/// The longest time-out of a command that keeps memory is 30 s, with what it takes to notice.
const ANOTHER_WAITS_SECS_MAX: u32 = 60;

/// A step.
#[derive(Debug, Clone, Copy)]
enum Step {
    Capsule,
    Shake,
    Lose,
    LoseInSilence,
    Disconnect,
    Time,
}

const STEPS: [Step; 10] = [
    Step::Capsule,
    Step::Capsule,
    Step::Capsule,
    Step::Capsule,
    Step::Capsule,
    Step::Shake,
    Step::Lose,
    Step::LoseInSilence,
    Step::Disconnect,
    Step::Time,
];

/// A queue with room for little.
fn narrow() -> Setting {
    let mut narrow = setting(1);
    narrow.target.send_queue = 4;
    narrow.target.segments_max = 2;
    narrow.target.reads_max = 2;
    narrow.target.probe_after = Nanos::from_secs(2);
    narrow
}

fn step(bytes: &mut Bytes<'_>, direct: &mut Direct, victim: &mut Link, rng: &mut Rng, now: &mut Nanos) {
    let Direct { core, .. } = direct;
    match bytes.pick(&STEPS) {
        Step::Capsule => {
            let count = usize::from(u16::from_le_bytes([bytes.byte(), bytes.byte()]));
            victim.inject(bytes.take(count % (CAPSULE_BYTES_MAX + 1)));
        }
        Step::Shake => {
            for _ in 0..bytes.byte() {
                victim.shake(core, rng, 3);
            }
        }
        Step::Lose => victim.lose(true),
        Step::LoseInSilence => victim.lose(false),
        Step::Disconnect => victim.target_disconnected(core),
        Step::Time => pass(Nanos::from_ms(700), direct, victim, now),
    }
    work(direct, victim, rng);
}

fn pass(time: Nanos, direct: &mut Direct, victim: &Link, now: &mut Nanos) {
    *now += time;
    direct.core.set_time(*now, now.as_ms());
    if let Some(conn) = victim.id.and_then(|id| direct.core.transport(id)) {
        conn.on_time(*now);
        conn.watch(*now);
    }
}

fn work(direct: &mut Direct, victim: &mut Link, rng: &mut Rng) {
    victim.touch();
    for _ in 0..20 {
        victim.shake(&mut direct.core, rng, 3);
    }
    direct.core.poll();
    crate::receive_pass(&mut direct.core);
    while direct.core.next_send_ready().is_some() {}
}

/// The other host reads. The victim may have the memory that it needs, for as long as its time-outs let it.
fn another_host_reads(direct: &mut Direct, victim: &mut Link, rng: &mut Rng, now: &mut Nanos) {
    let buf = direct.pool.take(512).expect("the hosts' own");
    let Direct { io, rng: addresses, .. } = direct;
    let sent = io.submit(Sqe::read(1, 1, 0, 1), HostData::FromController(buf), addresses);
    assert!(sent.is_ok(), "the connection is closed");
    for _ in 0..ANOTHER_WAITS_SECS_MAX {
        let mut has_ended = false;
        for _ in 0..TURNS_MAX {
            let Direct { core, io, rng: addresses, .. } = direct;
            let has_worked = io.turn(core, addresses, &mut |event| match event {
                HostEvent::Completed { result: Ok(()), .. } => has_ended = true,
                HostEvent::Ready | HostEvent::Completed { .. } | HostEvent::Closed { .. } => {
                    panic!("{event:?}")
                }
            });
            if has_ended {
                return;
            }
            if !has_worked {
                break;
            }
        }
        pass(Nanos::from_secs(1), direct, victim, now);
        work(direct, victim, rng);
    }
    panic!("another host waits for longer than the victim may take");
}

/// The body.
///
/// # Panics
/// When a promise is broken.
pub fn run(bytes: &[u8]) {
    let mut bytes = Bytes::new(bytes);
    let begin = bytes.below(3);
    let mut rng = Rng::new(u64::from(bytes.byte()));
    let disk: Arc<dyn Disk> = PoolDisk::create(512, 256);
    let zones = [ZoneSpec { buffer_bytes: 4096, count: 4 }, ZoneSpec { buffer_bytes: 64 << 10, count: 2 }];
    let mut direct = Direct::on(&disk, &zones, setting(1));
    let mut links = match begin {
        0 => vec![Link::new(narrow(), &mut direct.core, 0)],
        _ => {
            let Direct { core, pool, rng, .. } = &mut direct;
            let (admin, io) = connect(core, pool, rng, narrow());
            if begin == 1 { vec![admin, io] } else { vec![io, admin] }
        }
    };
    let (victim, rest) = links.split_first_mut().expect("one");
    victim.become_hostile();
    let mut now = Nanos::ZERO;
    while !bytes.is_empty() {
        step(&mut bytes, &mut direct, victim, &mut rng, &mut now);
    }
    // The other host has noticed nothing.
    let Direct { core, admin, rng: addresses, .. } = &mut direct;
    finish(admin, core, addresses, Sqe::keep_alive(1), HostData::None);
    another_host_reads(&mut direct, victim, &mut rng, &mut now);
    end(victim, &mut direct.core, &mut rng);
    for link in rest {
        link.become_hostile();
        end(link, &mut direct.core, &mut rng);
    }
    direct.finish();
}
