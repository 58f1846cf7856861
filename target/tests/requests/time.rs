//! Time-outs are judged after what arrived, and not for time in which the target did not run.

use nvme_spec::Sqe;
use spindle_nvme_transport::CloseReason;
use spindle_reactor::clock::Nanos;
use spindle_target::qpair::{CONNECT_TIMEOUT, FETCH_TIMEOUT};
use spindle_tests::script::{Rig, Setup, Want, connect_sqe};

use super::{assert_ok, pool_disk};

const KATO: Nanos = Nanos::from_secs(5);

#[test]
fn a_controller_does_not_expire_before_every_core_with_its_queues_has_received() {
    for unreceived in [0, 1] {
        let mut rig = Rig::new(Setup { cores: 3, ..Setup::small(vec![pool_disk(512)]) });
        let (admin, cntlid) = rig.admin(0, 5000);
        let io = rig.io(1, Want::io(cntlid, 1));
        rig.unreceived_core = Some(unreceived);
        rig.pass(Nanos::from_secs(60));
        assert_eq!((admin.line.closed(), io.line.closed()), (None, None));
        // What waited is received: a sign of life.
        let queue = if unreceived == 0 { &admin } else { &io };
        assert_ok(&rig.run(queue, if unreceived == 0 { Sqe::keep_alive(1) } else { Sqe::flush(1, 1) }, &[]));
        rig.unreceived_core = None;
        rig.pass(KATO);
        assert_eq!((admin.line.closed(), io.line.closed()), (None, None));
        rig.pass(KATO + Nanos::from_ms(250));
        assert_eq!(admin.line.closed(), Some(CloseReason::KeepAliveExpired));
        rig.finish();
    }
}

#[test]
fn a_core_without_its_queues_does_not_keep_a_silent_host() {
    let mut rig = Rig::new(Setup { cores: 3, ..Setup::small(vec![pool_disk(512)]) });
    let (admin, cntlid) = rig.admin(0, 5000);
    let _io = rig.io(1, Want::io(cntlid, 1));
    rig.unreceived_core = Some(2);
    rig.pass(Nanos(2 * KATO.0) + Nanos::from_ms(250));
    assert_eq!(admin.line.closed(), Some(CloseReason::KeepAliveExpired));
    rig.finish();
}

#[test]
fn what_a_host_owes_may_wait_to_be_received() {
    let mut rig = Rig::new(Setup::small(vec![pool_disk(512)]));
    let host = rig.host();
    let (fresh, fetching) = (rig.accept(0), rig.accept(0));
    rig.send(&fetching, connect_sqe(Want::admin()), 1024);
    rig.send(&host.io, Sqe::write(3, 1, 0, 1, false), 512);
    rig.turn();
    rig.unreceived_core = Some(0);
    rig.pass(Nanos(CONNECT_TIMEOUT.0.max(FETCH_TIMEOUT.0) * 2));
    for queue in [&fresh, &fetching, &host.io] {
        assert_eq!(queue.line.closed(), None);
    }
    rig.bring(&host.io, 3, &[1; 512]);
    assert_ok(&rig.answer(&host.io).expect("an answer"));
    rig.unreceived_core = None;
    rig.pass(Nanos::from_ms(200));
    assert_eq!(fresh.line.closed(), Some(CloseReason::ConnectTimeout));
    assert_eq!((fetching.line.closed().is_some(), host.io.line.closed()), (true, None));
    rig.finish();
}

#[test]
fn time_in_which_the_target_was_stopped_does_not_count() {
    let mut rig = Rig::new(Setup::small(vec![pool_disk(512)]));
    let (admin, _) = rig.admin(0, 5000);
    let host = rig.host();
    let fresh = rig.accept(0);
    rig.send(&host.io, Sqe::write(3, 1, 0, 1, false), 512);
    rig.pass(Nanos::from_secs(4));
    for _ in 0..10 {
        rig.now += Nanos::from_secs(100);
        rig.turn();
        rig.pass(Nanos::from_secs(1));
    }
    for queue in [&admin, &fresh, &host.io] {
        assert_eq!(queue.line.closed(), None);
    }
    rig.pass(Nanos(2 * KATO.0) + Nanos::from_ms(250));
    assert_eq!(admin.line.closed(), Some(CloseReason::KeepAliveExpired));
    rig.pass(FETCH_TIMEOUT);
    assert_eq!(fresh.line.closed(), Some(CloseReason::ConnectTimeout));
    assert_eq!(host.io.line.closed(), Some(CloseReason::HostError));
    rig.finish();
}
