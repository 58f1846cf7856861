//! A connection ends from every state in the same way: what may leave leaves, every buffer comes home,
//! `Closed` comes last.

use nvme_spec::status::Status;
use spindle_nvme_tcp::Phase;
use spindle_nvme_tcp::controller::ConnConfig;
use spindle_nvme_tcp::host::{CloseCause, HostConfig};
use spindle_nvme_transport::{CloseReason, Transport};
use spindle_reactor::clock::Nanos;

use crate::rig::{Controller, Host, HostSeen, Seen};
use crate::wire::{self, BOTH, NONE, OFFSET, READ, TRANSPORT, WRITE};

/// A connection in each of its states, by name.
fn in_every_state() -> Vec<(&'static str, Controller)> {
    let ready = || Controller::alone(ConnConfig::default()).initialized(BOTH);
    let write = |cid| wire::capsule(wire::sqe(WRITE, cid, TRANSPORT, 20_000), &[], BOTH);
    let capsule = wire::capsule(wire::sqe(WRITE, 1, OFFSET, 4096), &[1; 4096], BOTH);
    let mut states = vec![("accepted", Controller::new(ConnConfig::default())), ("ready", ready())];
    let mut add = |name, build: &dyn Fn(&mut Controller)| {
        let mut rig = ready();
        build(&mut rig);
        states.push((name, rig));
    };
    add("in a header", &|rig| rig.feed(&capsule[..50]));
    add("paused", &|rig| {
        rig.is_manual = true;
        rig.feed(&capsule[..3000]);
        assert!(rig.conn.is_paused());
    });
    add("in in-capsule data", &|rig| rig.feed(&capsule[..3000]));
    add("before a data digest", &|rig| rig.feed(&capsule[..capsule.len() - 1]));
    add("skipping", &|rig| {
        rig.is_manual = true;
        rig.feed(&capsule[..3000]);
        rig.reply(1, Status::INVALID_FIELD, None);
        rig.pull();
    });
    add("R2T queued", &|rig| rig.feed(&write(1)));
    add("R2T sent", &|rig| {
        rig.feed(&[write(1), write(2)].concat());
        rig.transmit();
    });
    add("in H2CData", &|rig| {
        rig.feed(&[write(1), write(2)].concat());
        rig.feed(&wire::h2c_data(2, 0x81, 0, &[3; 20_000], true, BOTH)[..700]);
    });
    add("between H2CData", &|rig| {
        rig.feed(&[write(1), write(2)].concat());
        rig.feed(&wire::h2c_data(2, 0x81, 0, &[3; 16_000], false, BOTH));
    });
    add("a reply half sent", &|rig| {
        for cid in 1..4 {
            rig.feed(&wire::capsule(wire::sqe(READ, cid, TRANSPORT, 4096), &[], BOTH));
        }
        rig.transmit_some(6000);
    });
    states
}

#[test]
fn a_peer_that_closes_ends_the_connection_at_once_from_every_state() {
    for (name, mut rig) in in_every_state() {
        println!("{name}");
        rig.conn.on_peer_closed();
        rig.pull();
        rig.expect_closed();
    }
}

#[test]
fn a_socket_that_fails_ends_the_connection_at_once_from_every_state() {
    for (name, mut rig) in in_every_state() {
        println!("{name}");
        rig.conn.on_reset();
        rig.conn.on_peer_closed();
        rig.pull();
        rig.expect_closed();
    }
}

#[test]
fn every_close_reason_ends_the_connection_from_every_state() {
    use CloseReason::{ConnectTimeout, ControllerGone, Disconnect, HostError, KeepAliveExpired, Shutdown};
    for reason in [Disconnect, ControllerGone, KeepAliveExpired, HostError, ConnectTimeout, Shutdown] {
        let drains = !matches!(reason, KeepAliveExpired | ConnectTimeout);
        for (name, mut rig) in in_every_state() {
            println!("{name}, {reason:?}");
            let wanted = rig.conn.wants_send();
            rig.take_seen();
            rig.conn.close(reason);
            rig.conn.close(reason);
            if drains {
                assert_eq!(rig.conn.phase(), if wanted { Phase::Draining } else { Phase::HalfClosed });
                rig.pull();
                assert_eq!(rig.take_seen(), [], "Closed comes last");
                // Late calls of the queue pair are harmless.
                rig.reply(3, Status::SUCCESS, None);
                let buf = rig.pool.take(4096).unwrap();
                rig.conn.fetch(crate::rig::slot(3), 3, buf);
                rig.finish();
            } else {
                assert!(!rig.conn.wants_send());
                rig.pull();
                rig.expect_closed();
            }
        }
    }
}

#[test]
fn a_disconnect_reply_leaves_before_the_end() {
    let mut rig = Controller::ready(ConnConfig::default(), NONE);
    rig.feed(&wire::capsule(wire::sqe(0x7f, 9, TRANSPORT, 0), &[], NONE));
    rig.conn.close(CloseReason::Disconnect);
    assert_eq!(rig.take_output(), wire::capsule_resp(9, 0, 0, NONE));
    assert_eq!(rig.sent, [9], "Sent comes before Closed");
    rig.finish();
}

#[test]
fn a_peer_that_does_not_read_or_does_not_close_is_given_up_in_time() {
    for has_left in [false, true] {
        let config = ConnConfig { close_timeout: Nanos::from_secs(2), ..ConnConfig::default() };
        let mut rig = Controller::ready(config, NONE);
        rig.feed(&wire::capsule(wire::sqe(READ, 1, TRANSPORT, 4096), &[], NONE));
        rig.conn.close(CloseReason::Shutdown);
        if has_left {
            rig.transmit();
        }
        assert_eq!(rig.conn.deadline(), Some(Nanos::ZERO), "it wants to know the time");
        rig.conn.on_time(Nanos::from_secs(100));
        assert_eq!(rig.conn.deadline(), Some(Nanos::from_secs(102)));
        rig.conn.on_time(Nanos(101_999_999_999));
        rig.pull();
        assert_eq!(rig.take_seen().len(), 1);
        rig.conn.on_time(Nanos::from_secs(102));
        rig.pull();
        rig.expect_closed();
        assert_eq!(rig.conn.take_violation(), None);
    }
}

#[test]
fn a_peer_that_closed_its_half_while_we_drain_still_gets_what_is_queued() {
    let mut rig = Controller::ready(ConnConfig::default(), NONE);
    rig.feed(&wire::capsule(wire::sqe(READ, 1, TRANSPORT, 4096), &[], NONE));
    rig.feed(&[0xaa; 8]);
    rig.conn.on_peer_closed();
    rig.pull();
    assert_eq!(rig.conn.phase(), Phase::Draining);
    let output = rig.take_output();
    assert!(output.ends_with(&wire::term_req(3, 1, 0, &[0xaa; 8])));
    rig.pull();
    rig.expect_closed();
}

#[test]
fn bytes_after_the_end_are_dropped_however_many_there_are() {
    let mut rig = Controller::ready(ConnConfig::default(), NONE);
    rig.feed(&[0xee; 8]);
    for _ in 0..100 {
        rig.feed(&[0xee; 50_000]);
    }
    assert_eq!(rig.conn.in_flight(), (1, 0, 0), "the terminate request, and nothing kept");
    rig.finish();
}

fn host_in_every_state() -> Vec<(&'static str, Host)> {
    let config = HostConfig {
        header_digest: true,
        data_digest: true,
        in_capsule_bytes: 4096,
        ..HostConfig::default()
    };
    let mut states = vec![("connecting", Host::new(config))];
    let mut add = |name, build: &dyn Fn(&mut Host)| {
        let mut rig = Host::alone(config).initialized(0, BOTH, 8192);
        build(&mut rig);
        states.push((name, rig));
    };
    let submit = |rig: &mut Host| {
        rig.read(1, 20_000);
        rig.write(2, &[2; 4096]);
        rig.write(3, &[3; 20_000]);
        rig.flush(4);
    };
    add("ready", &|_| ());
    add("commands queued", &|rig| submit(rig));
    add("in-capsule data half sent", &|rig| {
        submit(rig);
        rig.transmit_some(1000);
    });
    add("commands sent", &|rig| {
        submit(rig);
        rig.take_output();
    });
    add("in C2HData", &|rig| {
        submit(rig);
        rig.take_output();
        rig.feed(&wire::c2h_data(1, 0, &[1; 20_000], 12, BOTH, 4)[..9000]);
    });
    add("H2CData queued", &|rig| {
        submit(rig);
        rig.take_output();
        rig.feed(&wire::r2t(3, 7, 0, 20_000, BOTH));
    });
    add("H2CData half sent", &|rig| {
        submit(rig);
        rig.take_output();
        rig.feed(&wire::r2t(3, 7, 0, 20_000, BOTH));
        rig.transmit_some(10_000);
    });
    add("completed before its data has left", &|rig| {
        submit(rig);
        rig.transmit_some(76 + 100);
        rig.feed(&wire::capsule_resp(2, 2, 0, BOTH));
        assert_eq!(rig.seen, []);
    });
    states
}

#[test]
fn a_host_gets_every_command_back_from_every_state() {
    for (name, mut rig) in host_in_every_state() {
        println!("{name}");
        let outstanding = rig.conn.outstanding();
        rig.conn.on_peer_closed();
        rig.pull();
        rig.expect_closed();
        assert_eq!(rig.seen.len(), outstanding + 1);
        assert_eq!(rig.seen.last(), Some(&HostSeen::Closed(CloseCause::ByPeer)));
    }
    for (name, mut rig) in host_in_every_state() {
        println!("{name}, reset");
        rig.conn.on_reset();
        rig.pull();
        rig.expect_closed();
        assert_eq!(rig.seen.last(), Some(&HostSeen::Closed(CloseCause::Failed)));
    }
    for (name, mut rig) in host_in_every_state() {
        println!("{name}, close");
        let outstanding = rig.conn.outstanding();
        rig.conn.close();
        rig.conn.close();
        rig.pull();
        rig.take_output();
        assert_eq!(rig.conn.phase(), Phase::HalfClosed);
        rig.conn.on_time(Nanos::from_secs(10));
        rig.conn.on_time(Nanos::from_secs(13));
        rig.pull();
        rig.expect_closed();
        assert_eq!(rig.seen.len(), outstanding + 1);
        assert_eq!(rig.seen.last(), Some(&HostSeen::Closed(CloseCause::Requested)));
    }
}

#[test]
fn a_command_that_cannot_be_taken_comes_back_with_its_data() {
    use nvme_spec::Sqe;
    use spindle_nvme_tcp::host::{HostData, SubmitError, SubmitErrorKind};
    let config = HostConfig { queue_entries: 4, ..HostConfig::default() };
    let refused = |rig: &mut Host, cid, expected: SubmitErrorKind| {
        let buf = rig.pool.take(512).unwrap();
        let Err(SubmitError { kind, data: HostData::FromController(buf) }) =
            rig.conn.submit(Sqe::new(READ, cid, 1), HostData::FromController(buf))
        else {
            panic!("taken")
        };
        assert_eq!((kind, buf.len()), (expected, 512));
    };
    let mut rig = Host::new(config);
    refused(&mut rig, 0, SubmitErrorKind::Closed);
    let mut rig = Host::ready(config, 0, 4096);
    rig.read(1, 512);
    refused(&mut rig, 1, SubmitErrorKind::Cid);
    refused(&mut rig, 4, SubmitErrorKind::Cid);
    refused(&mut rig, 0xffff, SubmitErrorKind::Cid);
    rig.conn.close();
    refused(&mut rig, 2, SubmitErrorKind::Closed);
    rig.conn.on_reset();
    rig.pull();
    rig.expect_closed();
    let buf = rig.pool.take(512).unwrap();
    let result = rig.conn.submit(Sqe::new(WRITE, 2, 1), HostData::ToController(buf));
    assert!(matches!(
        result,
        Err(SubmitError { kind: SubmitErrorKind::Closed, data: HostData::ToController(_) })
    ));
    assert!(matches!(
        rig.conn.submit(Sqe::new(0, 2, 1), HostData::None),
        Err(SubmitError { kind: SubmitErrorKind::Closed, data: HostData::None })
    ));
}

#[test]
fn a_completion_that_comes_before_its_data_has_left_waits_for_it() {
    let config = HostConfig { in_capsule_bytes: 4096, ..HostConfig::default() };
    let mut rig = Host::ready(config, 0, 4096);
    rig.write(1, &[1; 4096]);
    rig.write(2, &[2; 20_000]);
    rig.transmit_some(500);
    rig.feed(&wire::capsule_resp(1, 2, 0, NONE));
    assert_eq!(rig.take_seen(), []);
    rig.take_output();
    rig.pull();
    assert!(matches!(
        rig.take_seen()[..],
        [HostSeen::Completed { cid: 1, result: Err(Status::INVALID_FIELD), .. }]
    ));
    // The same in the middle of an R2T: the PDU that is leaving ends, no other one follows.
    rig.feed(&wire::r2t(2, 7, 0, 20_000, NONE));
    rig.transmit_some(1000);
    rig.feed(&wire::capsule_resp(2, 2, 0, NONE));
    rig.output.clear();
    assert_eq!(rig.take_output().len(), 24 + 4096 - 1000);
    assert!(matches!(
        rig.take_seen()[..],
        [HostSeen::Completed { cid: 2, result: Err(Status::INVALID_FIELD), .. }]
    ));
    assert!(rig.has_all_buffers());
    assert_eq!(rig.conn.outstanding(), 0);
}

#[test]
fn closed_is_the_last_event_also_when_replies_were_sent_before() {
    let mut rig = Controller::ready(ConnConfig::default(), NONE);
    rig.feed(&wire::capsule(wire::sqe(READ, 1, TRANSPORT, 512), &[], NONE));
    while rig.transmit_some(usize::MAX) > 0 {}
    rig.conn.on_reset();
    rig.pull();
    assert_eq!(rig.sent, [1]);
    assert_eq!(rig.seen.last(), Some(&Seen::Closed));
}
