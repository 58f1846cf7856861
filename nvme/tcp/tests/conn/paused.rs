//! A command whose data waits for a buffer holds its connection, and only that: nothing is lost, nothing
//! grows.

use spindle_nvme_tcp::Phase;
use spindle_nvme_tcp::controller::ConnConfig;
use spindle_nvme_transport::{DataPointer, Event, Transport};

use crate::rig::{BATCH, Controller, Seen};
use crate::wire::{self, NONE, OFFSET, READ, Rng, TRANSPORT, WRITE};

#[test]
fn a_huge_stream_behind_a_paused_command_is_understood_in_order() {
    for digests in wire::ALL {
        let mut rig = Controller::ready(ConnConfig::default(), digests);
        rig.is_manual = true;
        let mut stream = Vec::new();
        for cid in 0..400 {
            let data = wire::pattern(u64::from(cid), 4096);
            stream.extend(wire::capsule(wire::sqe(WRITE, cid, OFFSET, 4096), &data, digests));
        }
        let mut rng = Rng(7);
        let (mut at, mut kept_most) = (0, 0);
        while at < stream.len() || rig.conn.is_paused() {
            // A shell reads only while the connection is not paused, up to a batch.
            if !rig.conn.is_paused() {
                let end = (at + 1 + rng.below(BATCH)).min(stream.len());
                rig.feed(&stream[at..end]);
                at = end;
            }
            let (_, _, kept) = rig.conn.in_flight();
            kept_most = kept.max(kept_most);
            assert!(kept <= BATCH + 256, "{kept} bytes kept");
            if rig.conn.is_paused() && rng.one_in(2) {
                assert!(rig.conn.next_event().is_none(), "nothing overtakes a paused command");
                rig.answer_next();
            }
        }
        assert!(kept_most > 20_000, "the stash was used");
        assert_eq!(rig.conn.in_flight().2, 0);
        let fetched: Vec<_> = rig.seen.iter().filter(|seen| matches!(seen, Seen::Fetched { .. })).collect();
        assert_eq!(fetched.len(), 400);
        for (seen, cid) in fetched.into_iter().zip(0..) {
            let bytes = wire::pattern(u64::from(cid), 4096);
            assert_eq!(*seen, Seen::Fetched { cid, bytes, result: Ok(()) });
        }
        let replies: Vec<u8> = (0..400).flat_map(|cid| wire::capsule_resp(cid, 0, 0, digests)).collect();
        assert_eq!(rig.take_output(), replies);
        assert!(rig.has_all_buffers());
    }
}

#[test]
fn a_paused_connection_still_sends_and_tells_what_was_sent() {
    let mut rig = Controller::ready(ConnConfig::default(), NONE);
    rig.feed(&wire::capsule(wire::sqe(READ, 1, TRANSPORT, 4096), &[], NONE));
    rig.is_manual = true;
    rig.feed(&wire::capsule(wire::sqe(WRITE, 2, OFFSET, 4096), &[2; 4096], NONE));
    assert!(rig.conn.is_paused() && rig.conn.wants_send());
    let count = rig.transmit_some(usize::MAX);
    assert_eq!(count, 24 + 4096);
    assert!(matches!(rig.conn.next_event(), Some(Event::Sent { .. })));
    assert!(rig.conn.next_event().is_none() && rig.conn.is_paused());
    rig.answer_next();
    assert!(!rig.conn.is_paused());
}

#[test]
fn a_paused_command_does_not_wait_for_the_r2t_of_another() {
    let mut rig = Controller::ready(ConnConfig::default(), NONE);
    rig.is_manual = true;
    rig.feed(&wire::capsule(wire::sqe(WRITE, 1, TRANSPORT, 8192), &[], NONE));
    rig.feed(&wire::capsule(wire::sqe(WRITE, 2, OFFSET, 4096), &[2; 4096], NONE));
    assert!(rig.conn.is_paused());
    rig.answer_next();
    assert!(rig.conn.is_paused(), "the fetch was of the other command");
    assert_eq!(rig.take_output(), wire::r2t(1, 0x80, 0, 8192, NONE));
    rig.answer_next();
    assert!(!rig.conn.is_paused());
    rig.feed(&wire::h2c_data(1, 0x80, 0, &[1; 8192], true, NONE));
    let bytes: Vec<_> = rig
        .seen
        .iter()
        .filter_map(|seen| match seen {
            Seen::Fetched { cid, bytes, .. } => Some((*cid, bytes[0], bytes.len())),
            Seen::Command { .. } | Seen::Closed => None,
        })
        .collect();
    assert_eq!(bytes, [(2, 2, 4096), (1, 1, 8192)]);
}

#[test]
fn two_commands_of_one_cid_mix_up_only_their_own_data() {
    // The host's error: whatever comes of it, nothing panics and nothing is read past an end.
    for (first, second) in [(8192, 4096), (4096, 4096)] {
        let mut rig = Controller::ready(ConnConfig::default(), NONE);
        rig.is_manual = true;
        rig.feed(&wire::capsule(wire::sqe(WRITE, 1, TRANSPORT, first), &[], NONE));
        rig.feed(&wire::capsule(wire::sqe(WRITE, 1, OFFSET, second), &vec![2; second as usize], NONE));
        let (entry, data) = rig.waiting.pop_front().unwrap();
        assert_eq!(data, DataPointer::Host { bytes: first });
        rig.answer(&entry, data);
        rig.pull();
        if let Some((entry, data)) = rig.waiting.pop_front() {
            rig.answer(&entry, data);
        }
        rig.pull();
        rig.transmit();
        rig.conn.on_reset();
        rig.pull();
        rig.expect_closed();
    }
}

#[test]
fn more_fetches_than_the_queue_has_entries_close_the_connection() {
    // No queue pair does that. If one did, it would cost this connection and nothing else. An admin queue may
    // have 32 entries when I/O queues are shorter, and a connection does not know which it carries.
    for (queue_entries, fetches) in [(2, 32), (31, 32), (32, 32), (64, 64)] {
        let mut rig = Controller::ready(ConnConfig { queue_entries, ..ConnConfig::default() }, NONE);
        let capsule = |cid| wire::capsule(wire::sqe(WRITE, cid, TRANSPORT, 8192), &[], NONE);
        (0..fetches).for_each(|cid| rig.feed(&capsule(cid)));
        rig.transmit();
        assert_eq!(rig.output.len(), usize::from(fetches) * 24, "an R2T for each");
        assert_eq!(rig.conn.phase(), Phase::Open);
        rig.feed(&capsule(fetches));
        assert_eq!(rig.seen.len(), usize::from(fetches) + 1);
        rig.finish();
    }
}

#[test]
fn a_fetch_of_data_that_was_kept_leaves_something_to_ask_for() {
    for digests in wire::ALL {
        for behind in [false, true] {
            let mut rig = Controller::ready(ConnConfig::default(), digests);
            rig.is_manual = true;
            let mut stream = wire::capsule(wire::sqe(WRITE, 1, OFFSET, 4096), &[1; 4096], digests);
            if behind {
                stream.extend(wire::capsule(wire::sqe(0, 2, TRANSPORT, 0), &[], digests));
            }
            rig.feed(&stream);
            assert!(rig.conn.is_paused());
            let (entry, data) = rig.waiting.pop_front().expect("a command waits");
            rig.answer(&entry, data);
            assert!(!rig.conn.is_paused() && rig.conn.has_unread(), "else no shell would ask for Fetched");
            rig.pull();
            assert_eq!(rig.seen.len(), if behind { 3 } else { 2 });
            assert!(!rig.conn.has_unread());
        }
    }
}
