//! The configuration changes under live queues.

use std::sync::Arc;

use nvme_spec::identify::Cns;
use nvme_spec::log::LogId;
use nvme_spec::sqe::NSID_ALL;
use nvme_spec::{Sqe, Status};
use spindle_nvme_transport::CloseReason;
use spindle_target::notice::Notice;
use spindle_target::qpair::request::RequestState;
use spindle_target::snapshot::AllowedHosts;
use spindle_target_disk::fault::{Fault, FaultDisk};
use spindle_target_disk::{ChannelContext, Disk, DiskChannel, Geometry, OpenError, ResizeError, Usage};
use spindle_tests::direct::name;
use spindle_tests::script::{HOST, Probe, Queue, Rig, Setup, Want};

use crate::{BLOCKS, assert_ok, assert_refused, pool_disk, ram_disk};

/// AER dword 0: Attached Namespace Attribute Changed, log page 04h.
const NAMESPACE_CHANGED: u64 = 0x0004_0002;

fn changed_list(rig: &mut Rig, admin: &spindle_tests::script::Queue) -> Vec<u32> {
    let log = Sqe::get_log_page(0x400, LogId::CHANGED_NAMESPACES, NSID_ALL, 4096, 0, false);
    let bytes = rig.read(admin, log, 4096).data;
    let numbers = bytes.chunks_exact(4).map(|four| u32::from_le_bytes(four.try_into().unwrap()));
    numbers.take_while(|number| *number != 0).collect()
}

#[test]
fn a_namespace_that_is_removed_is_gone_for_live_queues_and_its_hosts_are_told() {
    for cores in [1, 2] {
        let mut rig = Rig::new(Setup { cores, ..Setup::small(vec![pool_disk(512), ram_disk(512)]) });
        let host = rig.host();
        rig.send(&host.admin, Sqe::async_event_request(0x300), 0);
        for removed in [1_u32, 2] {
            assert_ok(&rig.read(&host.io, Sqe::read(1, removed, 0, 1), 512));
            let disk = rig.setup.remove(removed as usize);
            rig.publish();
            let answer = rig.answer(&host.admin).expect("the event");
            assert_eq!((answer.cid, answer.result), (0x300, NAMESPACE_CHANGED));
            assert_eq!(changed_list(&mut rig, &host.admin), [removed]);
            let answer = rig.read(&host.io, Sqe::read(1, removed, 0, 1), 512);
            assert_refused(&answer, Status::INVALID_NAMESPACE_OR_FORMAT);
            rig.send(&host.admin, Sqe::async_event_request(0x300), 0);
            // And it comes back.
            rig.setup.add(removed as usize, disk);
            rig.publish();
            assert_eq!(rig.answer(&host.admin).map(|answer| answer.result), Some(NAMESPACE_CHANGED));
            assert_eq!(changed_list(&mut rig, &host.admin), [removed]);
            assert_ok(&rig.read(&host.io, Sqe::read(1, removed, 0, 1), 512));
            rig.send(&host.admin, Sqe::async_event_request(0x300), 0);
        }
        rig.finish();
    }
}

#[test]
fn hosts_are_told_of_a_namespace_when_all_cores_have_it() {
    let mut rig = Rig::new(Setup { cores: 2, ..Setup::small(vec![pool_disk(512)]) });
    let host = rig.host();
    rig.send(&host.admin, Sqe::async_event_request(0x300), 0);
    rig.setup.add(2, pool_disk(512));
    rig.is_mail_held = true;
    rig.publish();
    assert!(rig.answer(&host.admin).is_none(), "the other core may not have it yet");
    rig.is_mail_held = false;
    rig.turn();
    assert_eq!(rig.answer(&host.admin).map(|answer| answer.result), Some(NAMESPACE_CHANGED));
    assert_ok(&rig.read(&host.io, Sqe::read(1, 2, 0, 1), 512));
    rig.finish();
}

/// Namespaces that Identify lists.
fn listed(rig: &mut Rig, admin: &Queue) -> Vec<u32> {
    let bytes = rig.read(admin, Sqe::identify(0x401, Cns::ACTIVE_NAMESPACE_LIST, 0, 0), 4096).data;
    let numbers = bytes.chunks_exact(4).map(|four| u32::from_le_bytes(four.try_into().unwrap()));
    numbers.take_while(|number| *number != 0).collect()
}

#[test]
fn a_namespace_is_shown_only_when_every_core_has_its_disk() {
    // A host that looked by itself saw it at once, and got Invalid Namespace with DNR from the slow core.
    for is_admins_core_slow in [false, true] {
        let mut rig = Rig::new(Setup { cores: 2, ..Setup::small(vec![pool_disk(512)]) });
        let host = rig.host();
        rig.setup.add(2, pool_disk(512));
        let order = if is_admins_core_slow { [1, 0] } else { [0, 1] };
        for (core, expected) in order.into_iter().zip([vec![1], vec![1, 2]]) {
            rig.publish_to(core);
            rig.turn();
            assert_eq!(listed(&mut rig, &host.admin), expected, "core {core} has it");
            let identify = Sqe::identify(2, Cns::NAMESPACE, 2, 0);
            let is_shown = rig.read(&host.admin, identify, 4096).data.iter().any(|byte| *byte != 0);
            assert_eq!(is_shown, expected.len() == 2);
            if is_shown {
                assert_ok(&rig.read(&host.io, Sqe::read(1, 2, 0, 1), 512));
            }
        }
        rig.finish();
    }
}

#[test]
fn a_new_listener_accepts_at_once_and_a_removed_one_accepts_only_io_queues() {
    let mut rig = Rig::new(Setup { cores: 2, ..Setup::small(vec![pool_disk(512)]) });
    let (_admin, cntlid) = rig.admin(0, 0);
    rig.setup.listeners = vec![false, true];
    // Core 0 has not heard that core 1 has it. That a connection comes by the new one is proof enough.
    rig.is_mail_held = true;
    rig.publish_to(0);
    rig.publish_to(1);
    rig.listener = 1;
    let (_other, _) = rig.admin(0, 0);
    // What the first host has begun to connect by the old one.
    rig.listener = 0;
    let io = rig.io(0, Want::io(cntlid, 1));
    assert_ok(&rig.read(&io, Sqe::read(1, 1, 0, 1), 512));
    rig.is_mail_held = false;
    rig.turn();
    let io = rig.io(1, Want::io(cntlid, 2));
    assert_ok(&rig.read(&io, Sqe::read(1, 1, 0, 1), 512));
    let (_, answer) = rig.connect(0, Want::admin());
    assert_eq!(answer.status.code(), Status::CONNECT_INVALID_PARAMETERS, "it is gone");
    rig.finish();
}

#[test]
fn a_host_that_is_newly_allowed_connects_when_every_core_lets_it() {
    // Its admin queue was taken by the quick core, and its I/O queue refused with DNR by the slow one.
    let mut rig = Rig::new(Setup {
        cores: 2,
        hosts: AllowedHosts::Only(Vec::new()),
        ..Setup::small(vec![pool_disk(512)])
    });
    rig.setup.hosts = AllowedHosts::Any;
    rig.publish_to(0);
    rig.turn();
    let (_, answer) = rig.connect(0, Want::admin());
    assert_eq!(
        answer.status.code(),
        Status::CONNECT_INVALID_HOST,
        "the other core would refuse its I/O queue"
    );
    rig.publish_to(1);
    // Core 0 has not heard that core 1 has it; core 1 knows that both have.
    rig.is_mail_held = true;
    rig.turn();
    let (_admin, cntlid) = rig.admin(1, 0);
    let io = rig.io(0, Want::io(cntlid, 1));
    assert_ok(&rig.read(&io, Sqe::read(1, 1, 0, 1), 512));
    rig.is_mail_held = false;
    rig.turn();
    assert_ok(&rig.read(&io, Sqe::read(1, 1, 0, 1), 512));
    rig.finish();
}

#[test]
fn commands_in_flight_over_the_end_of_their_namespace_end_each_with_an_answer() {
    let (disk, control) = FaultDisk::new(pool_disk(512), 1);
    let setup = Setup { zones: vec![(4096, 4)], ..Setup::small(vec![disk, pool_disk(512)]) };
    let mut rig = Rig::new(setup);
    let host = rig.host();
    let io = &host.io;
    control.set_all(Fault::Drop, 1_000_000);
    rig.send(io, Sqe::read(1, 1, 0, 1), 512);
    rig.send(io, Sqe::write(2, 1, 0, 1, false), 512);
    rig.send(io, Sqe::write(3, 1, 0, 1, false), 512);
    rig.send(io, Sqe::write(4, 1, 0, 1, false), 512);
    assert_eq!(
        rig.states(io),
        [(RequestState::NeedBuffer, 1), (RequestState::Fetching, 2), (RequestState::Executing, 1)]
    );
    drop(rig.setup.remove(1));
    rig.publish();
    control.release_dropped();
    rig.turn();
    rig.turn();
    assert_ok(&rig.answer(io).expect("what the disk had, it finishes"));
    rig.bring(io, 2, &[1; 512]);
    rig.bring(io, 3, &[1; 512]);
    let mut answers = rig.answers(io);
    answers.sort_by_key(|answer| answer.cid);
    let statuses: Vec<_> = answers.iter().map(|answer| (answer.cid, answer.status)).collect();
    // Once the one that waited for memory was never answered.
    let gone = Status::INTERNAL_ERROR.dnr();
    assert_eq!(statuses, [(2, gone), (3, gone), (4, gone)]);
    assert_ok(&rig.read(io, Sqe::read(5, 2, 0, 1), 512));
    rig.finish();
}

#[test]
fn a_disk_that_is_removed_is_closed_once_it_is_idle() {
    // Once it stayed open until the next change of the configuration.
    let (disk, record) = Probe::over(pool_disk(512), |geometry| geometry);
    let (disk, control) = FaultDisk::new(disk, 1);
    let mut rig = Rig::new(Setup { cores: 2, ..Setup::small(vec![disk]) });
    let host = rig.host();
    control.set_all(Fault::Drop, 1_000_000);
    rig.send(&host.io, Sqe::read(1, 1, 0, 1), 512);
    assert_eq!(record.handles(), 3, "open on two cores");
    drop(rig.setup.remove(1));
    rig.publish();
    assert_eq!(record.handles(), 2, "open on the core that has something in flight, which has the disk too");
    control.release_dropped();
    rig.turn();
    rig.turn();
    assert_eq!(record.handles(), 0);
    assert_ok(&rig.answer(&host.io).expect("an answer"));
    rig.finish();
}

#[test]
fn a_disk_that_shrinks_or_grows_moves_the_end_of_its_namespace() {
    let disk = ram_disk(512);
    let mut rig = Rig::new(Setup::small(vec![Arc::clone(&disk)]));
    let host = rig.host();
    rig.send(&host.admin, Sqe::async_event_request(0x300), 0);
    assert_ok(&rig.run(&host.io, Sqe::write(1, 1, BLOCKS - 1, 1, false), &[1; 512]));
    disk.resize(BLOCKS / 2 * 512).expect("smaller");
    rig.publish();
    assert_eq!(rig.answer(&host.admin).map(|answer| answer.result), Some(NAMESPACE_CHANGED));
    assert_eq!(changed_list(&mut rig, &host.admin), [1]);
    assert_refused(&rig.read(&host.io, Sqe::read(1, 1, BLOCKS / 2, 1), 512), Status::LBA_OUT_OF_RANGE);
    assert_ok(&rig.read(&host.io, Sqe::read(1, 1, BLOCKS / 2 - 1, 1), 512));
    let identify = Sqe::identify(2, Cns::NAMESPACE, 1, 0);
    assert_eq!(rig.read(&host.admin, identify, 4096).data[..8], (BLOCKS / 2).to_le_bytes());
    disk.resize(BLOCKS * 512).expect("larger");
    rig.publish();
    let answer = rig.read(&host.io, Sqe::read(1, 1, BLOCKS - 1, 1), 512);
    assert_eq!(answer.data, [0; 512], "what a shrink took away does not come back");
    rig.finish();
}

#[test]
fn a_host_no_longer_allowed_loses_its_queues_on_all_cores_and_others_keep_theirs() {
    const OTHER: &str = "nqn.2026-01.io.spindle:other";
    for cores in [1, 2] {
        let mut rig = Rig::new(Setup { cores, ..Setup::small(vec![pool_disk(512)]) });
        let host = rig.host();
        let far = rig.io(0, Want::io(host.cntlid, 2));
        let other = rig.accept(cores - 1);
        assert_ok(&rig.try_connect(&other, Want::admin(), OTHER));
        rig.setup.hosts = AllowedHosts::Only(vec![name(OTHER)]);
        rig.publish();
        for queue in [&host.admin, &host.io, &far] {
            assert_eq!(queue.line.closed(), Some(CloseReason::ControllerGone));
        }
        assert_eq!((other.line.closed(), rig.registry.all().len()), (None, 1));
        let again = rig.accept(0);
        assert_eq!(rig.try_connect(&again, Want::admin(), HOST).status.code(), Status::CONNECT_INVALID_HOST);
        rig.finish();
    }
}

/// A disk that does not open.
struct Locked(Arc<dyn Disk>);

impl Disk for Locked {
    fn name(&self) -> &'static str {
        "locked"
    }

    fn kind(&self) -> &'static str {
        "test"
    }

    fn geometry(&self) -> Geometry {
        self.0.geometry()
    }

    fn open(&self, _: &ChannelContext) -> Result<Box<dyn DiskChannel>, OpenError> {
        let (field, value, allowed) = ("path", "locked".to_owned(), "a disk that opens".to_owned());
        Err(OpenError::Setting { disk: "locked".to_owned(), field, value, allowed })
    }

    fn resize(&self, bytes: u64) -> Result<(), ResizeError> {
        self.0.resize(bytes)
    }

    fn usage(&self) -> Usage {
        self.0.usage()
    }
}

#[test]
fn a_disk_that_fails_to_open_makes_its_namespace_not_ready_and_others_still_open() {
    // Once the disks behind it in the list were not opened either.
    let mut rig = Rig::new(Setup::small(vec![pool_disk(512)]));
    let host = rig.host();
    rig.setup.add(2, Arc::new(Locked(pool_disk(512))));
    rig.setup.add(3, pool_disk(512));
    rig.publish();
    assert!(
        rig.notices
            .iter()
            .any(|notice| matches!(notice, Notice::DiskOpen { reason } if reason.contains("locked")))
    );
    let errors = rig.cores[0].disk_errors();
    assert_eq!(errors.iter().map(|error| error.to_string().contains("locked")).collect::<Vec<_>>(), [true]);
    let answer = rig.read(&host.io, Sqe::read(1, 2, 0, 1), 512);
    assert_eq!(answer.status, Status::NAMESPACE_NOT_READY, "it may pass");
    assert_ok(&rig.read(&host.io, Sqe::read(1, 3, 0, 1), 512));
    rig.finish();
}

#[test]
fn counters_and_identities_live_through_a_change_that_does_not_concern_them() {
    let mut rig = Rig::new(Setup::small(vec![pool_disk(512)]));
    let host = rig.host();
    rig.send(&host.admin, Sqe::async_event_request(0x300), 0);
    rig.publish();
    assert_eq!(rig.answer(&host.admin), None, "nothing has changed, no event is sent");
    assert!(changed_list(&mut rig, &host.admin).is_empty());
    assert_ok(&rig.read(&host.io, Sqe::read(1, 1, 0, 1), 512));
    rig.finish();
}
