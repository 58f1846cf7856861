//! The controller busy time of the SMART log.

use nvme_spec::Sqe;
use nvme_spec::log::{LogId, SmartLog};
use nvme_spec::sqe::NSID_ALL;
use nvme_spec::zerocopy::FromBytes;
use spindle_reactor::clock::Nanos;
use spindle_target::qpair::request::RequestState;
use spindle_target_disk::fault::{Fault, FaultDisk, OpKind};
use spindle_tests::script::{Host, Rig, Setup};

use crate::{assert_ok, pool_disk, ram_disk};

const MINUTE: Nanos = Nanos::from_secs(60);

/// Controller busy time in minutes: of namespaces 1 and 2, and of all.
fn busy_minutes(rig: &mut Rig, host: &Host) -> [u128; 3] {
    [1, 2, NSID_ALL].map(|nsid| {
        let answer = rig.read(&host.admin, Sqe::get_log_page(1, LogId::SMART, nsid, 512, 0, false), 512);
        assert_ok(&answer);
        SmartLog::read_from_bytes(&answer.data).expect("512 bytes").controller_busy_minutes.get()
    })
}

#[test]
fn a_namespace_is_busy_while_its_disk_has_a_command() {
    let (disk, control) = FaultDisk::new(pool_disk(512), 1);
    let mut rig = Rig::new(Setup::small(vec![disk, pool_disk(512)]));
    let host = rig.host();
    rig.pass(MINUTE);
    assert_eq!(busy_minutes(&mut rig, &host), [0; 3]);
    control.set(Fault::Drop, OpKind::Write, 1_000_000);
    rig.send(&host.io, Sqe::write(1, 1, 0, 1, false), 512);
    rig.bring(&host.io, 1, &[1; 512]);
    assert_eq!(rig.states(&host.io), [(RequestState::Executing, 1)]);
    rig.pass(Nanos(3 * MINUTE.0));
    assert_eq!(busy_minutes(&mut rig, &host), [3, 0, 3]);
    control.release_dropped();
    rig.pass(Nanos(5 * MINUTE.0));
    assert_ok(&rig.answer(&host.io).expect("the disk has ended it"));
    assert_eq!(busy_minutes(&mut rig, &host), [3, 0, 3], "it has nothing to do");
    rig.finish();
}

#[test]
fn a_turn_in_which_commands_were_done_at_once_is_busy() {
    let mut rig = Rig::new(Setup::small(vec![ram_disk(512), ram_disk(512)]));
    let host = rig.host();
    let turn = |rig: &mut Rig| {
        rig.now += Nanos::from_secs(1);
        rig.turn();
    };
    for minutes in [2, 3] {
        let before = busy_minutes(&mut rig, &host);
        for cid in 0..minutes * 60 {
            turn(&mut rig);
            rig.send(&host.io, Sqe::read(cid, 1, 0, 1), 512);
            rig.send(&host.io, Sqe::read(cid, 1, 8, 1), 512);
            assert_eq!(rig.states(&host.io), [], "at once");
            assert_eq!(rig.answers(&host.io).len(), 2);
        }
        turn(&mut rig);
        let more = u128::from(minutes);
        assert_eq!(busy_minutes(&mut rig, &host), [before[0] + more, 0, before[2] + more]);
        // For so long that it is not looked at any more.
        rig.pass(Nanos(2 * MINUTE.0));
    }
    assert_eq!(busy_minutes(&mut rig, &host), [5, 0, 5]);
    rig.finish();
}
