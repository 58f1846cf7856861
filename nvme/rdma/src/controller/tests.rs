//! The controller's end without a device: its work requests, for completions in any order and with any
//! result.

use nvme_spec::sqe::SglKind;
use nvme_spec::status::Status;
use nvme_spec::zerocopy::IntoBytes;
use nvme_spec::{Sgl, Sqe};
use proptest::prelude::*;
use spindle_nvme_transport::DataPointer;
use spindle_nvme_transport::RequestId;
use spindle_reactor::mem::{Pages, Pool, ZoneSpec};

use super::*;
use crate::work::{Op, Remote, Span, Work};

/// Bytes of a segment of the tests' buffers.
const PIECE: u32 = 4096;

/// A pool in which every buffer above [`PIECE`] consists of several segments.
fn pieces(count: u32) -> Pool {
    let large = ZoneSpec { buffer_bytes: 16 * PIECE, count: 1 };
    let pool = Pool::new(&[ZoneSpec { buffer_bytes: PIECE, count }, large], Pages::Base).expect("memory");
    std::mem::forget(pool.take(16 * PIECE));
    pool
}

fn pool() -> Pool {
    pieces(64)
}

/// Small limits: 2 send queue entries, one segment per work request, one READ.
fn narrow() -> ConnConfig {
    ConnConfig {
        in_capsule_bytes: 1024,
        receives: 8,
        send_queue: 2,
        segments_max: 1,
        reads_max: 1,
        can_invalidate: true,
        ..ConnConfig::default()
    }
}

fn open(config: ConnConfig) -> Conn {
    let mut conn = Conn::new(config);
    conn.on_established();
    conn.set_queue_entries(8);
    conn
}

fn slot(index: u16) -> RequestId {
    RequestId::from_wire(1 << 16 | u32::from(index))
}

/// A read command with one keyed descriptor of `bytes`.
fn keyed(cid: u16, bytes: u32, is_invalidated: bool) -> Capsule {
    let sgl = Sgl::keyed(0x1_0000, bytes, 0x77, is_invalidated);
    Capsule { bytes: CAPSULE_BYTES, sqe: Sqe::read(cid, 1, 0, 1).with_sgl(sgl), buf: None }
}

/// A write command with `data` as in-capsule data.
fn filled(pool: &Pool, cid: u16, data: &[u8]) -> Capsule {
    let bytes = u32::try_from(data.len()).expect("short");
    let sqe = Sqe::write(cid, 1, 0, 1, false).with_sgl(Sgl::in_capsule(bytes));
    let mut buf = pool.take(CAPSULE_BYTES + 1024).expect("a receive");
    buf.copy_in(0, sqe.as_bytes());
    buf.copy_in(64, data);
    Capsule { bytes: CAPSULE_BYTES + bytes, sqe, buf: Some(buf) }
}

/// Takes the next event, which must be a command, and gives it `slot`.
fn command(conn: &mut Conn, slot: RequestId) -> DataPointer {
    let Some(Event::Command { data, .. }) = conn.next_event() else { panic!("a command") };
    conn.set_slot(slot);
    data.expect("descriptors")
}

fn reply(slot: RequestId, data: Option<Buf>) -> Reply {
    let cqe = Cqe::new(u16::try_from(slot.index()).expect("small"), Status::SUCCESS);
    Reply { slot, cqe, data, may_omit_cqe: true }
}

fn ok(work: &Work) -> Completion {
    Completion { chain: work.chain, is_signalled: work.is_signalled, is_ok: true }
}

fn failed(work: &Work) -> Completion {
    Completion { is_ok: false, ..ok(work) }
}

/// Takes all work requests.
fn posted(conn: &mut Conn) -> Vec<Work> {
    std::iter::from_fn(|| conn.next_work()).collect()
}

/// (Offset in the buffer, address at the host, bytes) of a transfer.
fn moved(work: &Work) -> (u32, u64, u32) {
    match work.op {
        Op::Read { local, remote } | Op::Write { local, remote } => {
            assert_eq!(remote.key, 0x77);
            (local.offset, remote.address, local.bytes)
        }
        Op::Send { .. } => panic!("no transfer: {work:?}"),
    }
}

fn invalidated(work: &Work) -> Option<u32> {
    match work.op {
        Op::Send { invalidate, head_bytes: 16, .. } => invalidate,
        Op::Send { .. } | Op::Read { .. } | Op::Write { .. } => panic!("no completion: {work:?}"),
    }
}

#[test]
fn a_fetch_of_more_reads_than_credits_goes_on_one_after_the_other() {
    let (pool, mut conn) = (pool(), open(narrow()));
    conn.received(keyed(1, 4 * PIECE, false));
    assert_eq!(command(&mut conn, slot(1)), DataPointer::Host { bytes: 4 * PIECE });
    conn.fetch(slot(1), 1, pool.take(4 * PIECE).expect("a buffer"));
    for piece in 0..4 {
        let work = posted(&mut conn);
        assert_eq!(work.len(), 1, "one credit");
        let offset = piece * PIECE;
        assert_eq!(moved(&work[0]), (offset, 0x1_0000 + u64::from(offset), PIECE));
        assert_eq!((work[0].is_signalled, conn.reads_free(), conn.posted()), (true, 0, 1));
        assert!(conn.next_event().is_none(), "not all of it is here");
        conn.completed(ok(&work[0]));
        assert_eq!((conn.reads_free(), conn.posted()), (1, 0));
    }
    let Some(Event::Fetched { slot: fetched, buf, result: Ok(()) }) = conn.next_event() else {
        panic!("fetched")
    };
    assert_eq!((fetched, buf.len()), (slot(1), 4 * PIECE as usize));
    assert!(conn.next_event().is_none() && posted(&mut conn).is_empty());
}

#[test]
fn a_reply_longer_than_the_send_queue_goes_on_when_its_last_place_is_free() {
    let (pool, mut conn) = (pool(), open(narrow()));
    conn.received(keyed(1, 4 * PIECE, false));
    command(&mut conn, slot(1));
    conn.reply(reply(slot(1), pool.take(4 * PIECE)));
    let mut at = 0;
    for _ in 0..2 {
        let work = posted(&mut conn);
        assert_eq!(work.iter().map(|work| work.is_signalled).collect::<Vec<_>>(), [false, true]);
        for work in &work {
            assert_eq!(moved(work), (at, 0x1_0000 + u64::from(at), PIECE));
            at += PIECE;
        }
        assert!(conn.buffer(work[0].chain).is_some() && conn.next_event().is_none());
        conn.completed(ok(&work[1]));
        assert_eq!(conn.posted(), 0, "both places are free");
    }
    let work = posted(&mut conn);
    assert_eq!((work.len(), work[0].is_signalled, invalidated(&work[0])), (1, true, None));
    assert_eq!(pool.free_bytes(), 60 * u64::from(PIECE), "the device may send it again");
    conn.completed(ok(&work[0]));
    assert!(matches!(conn.next_event(), Some(Event::Sent { slot: sent }) if sent == slot(1)));
    assert_eq!(pool.free_bytes(), 64 * u64::from(PIECE));
}

#[test]
fn a_key_is_invalidated_when_its_descriptor_asks_and_the_device_can() {
    let pool = pool();
    for (is_asked, can_invalidate, expected) in
        [(false, true, None), (true, false, None), (true, true, Some(0x77))]
    {
        for status in [Status::SUCCESS, Status::LBA_OUT_OF_RANGE] {
            let mut conn = open(ConnConfig { can_invalidate, send_queue: 8, ..narrow() });
            conn.received(keyed(1, PIECE, is_asked));
            command(&mut conn, slot(1));
            let data = status.is_success().then(|| pool.take(PIECE).expect("a buffer"));
            conn.reply(Reply { cqe: Cqe::new(1, status), ..reply(slot(1), data) });
            let work = posted(&mut conn);
            assert_eq!(work.last().map(invalidated), Some(expected), "{status} {is_asked}");
        }
    }
    // A command that is answered on the fast path, and one whose data was fetched.
    let mut conn = open(ConnConfig { send_queue: 8, ..narrow() });
    conn.received(keyed(1, PIECE, true));
    assert!(matches!(conn.next_event(), Some(Event::Command { .. })));
    conn.reply(reply(FAST_PATH, pool.take(PIECE)));
    assert_eq!(posted(&mut conn).last().map(invalidated), Some(Some(0x77)));
    conn.received(keyed(2, PIECE, true));
    command(&mut conn, slot(2));
    conn.fetch(slot(2), 2, pool.take(PIECE).expect("a buffer"));
    let read = posted(&mut conn);
    conn.completed(ok(&read[0]));
    conn.reply(reply(slot(2), None));
    assert_eq!(posted(&mut conn).last().map(invalidated), Some(Some(0x77)));
}

#[test]
fn commands_before_established_are_held_in_order() {
    let (pool, mut conn) = (pool(), Conn::new(narrow()));
    conn.set_queue_entries(8);
    conn.received(keyed(1, PIECE, false));
    conn.received(filled(&pool, 2, &[5; 100]));
    assert!(conn.next_event().is_none() && !conn.has_events());
    assert_eq!((conn.phase(), conn.buffers_held()), (Phase::Connecting, 1));
    conn.on_established();
    assert!(conn.has_events());
    assert_eq!(command(&mut conn, slot(1)), DataPointer::Host { bytes: PIECE });
    assert_eq!(command(&mut conn, slot(2)), DataPointer::InCapsule { bytes: 100 });
    // ESTABLISHED after the end changes nothing.
    let mut conn = Conn::new(narrow());
    conn.on_disconnected();
    conn.on_established();
    assert_eq!(conn.phase(), Phase::Ending);
}

#[test]
fn a_command_waits_until_the_queue_pair_knows_that_the_answer_before_it_has_left() {
    let mut conn = open(narrow());
    conn.set_queue_entries(1);
    conn.received(keyed(1, PIECE, false));
    conn.received(keyed(2, PIECE, false));
    command(&mut conn, slot(1));
    assert!(conn.next_event().is_none());
    conn.reply(reply(slot(1), None));
    let work = posted(&mut conn);
    assert!(conn.next_event().is_none(), "the host may be faster than the completion");
    conn.completed(ok(&work[0]));
    assert!(matches!(conn.next_event(), Some(Event::Sent { .. })));
    command(&mut conn, slot(1));
}

#[test]
fn the_buffer_of_a_capsule_comes_back_whatever_becomes_of_its_command() {
    let pool = pool();
    let all = pool.free_bytes();
    let ends: [fn(&mut Conn, &Pool); 8] = [
        |conn, pool| conn.fetch(slot(1), 1, pool.take(100).expect("a buffer")),
        |conn, _| conn.reply(reply(slot(1), None)),
        |conn, _| conn.on_disconnected(),
        |conn, _| conn.close(CloseReason::Shutdown),
        |conn, _| conn.close(CloseReason::KeepAliveExpired),
        |conn, _| conn.completed(Completion { chain: slot(9).0, is_signalled: false, is_ok: false }),
        // The next capsule is too short, and another follows it.
        |conn, pool| {
            conn.received(Capsule { bytes: 1, ..keyed(2, 1, false) });
            conn.received(filled(pool, 3, &[1]));
            assert!(conn.next_event().is_none() && conn.take_violation().is_some());
        },
        // The command's slot is given to another command.
        |conn, pool| {
            conn.received(filled(pool, 2, &[1]));
            command(conn, RequestId::from_wire(2 << 16 | 1));
            conn.reply(reply(RequestId::from_wire(2 << 16 | 1), None));
        },
    ];
    for end in ends {
        let mut conn = open(narrow());
        conn.received(filled(&pool, 1, &[5; 100]));
        command(&mut conn, slot(1));
        assert_eq!(conn.buffers_held(), 1);
        end(&mut conn, &pool);
        while conn.next_buffer().is_some() {}
        assert_eq!(conn.buffers_held(), 0);
        while let Some(event) = conn.next_event() {
            drop(event);
        }
        conn.on_destroyed();
        assert!(matches!(conn.next_event(), Some(Event::Closed)) && conn.next_event().is_none());
        assert_eq!(pool.free_bytes(), all);
    }
    // The third command gets neither a slot nor a reply.
    let mut conn = open(narrow());
    for cid in 1..=3 {
        conn.received(filled(&pool, cid, &[5; 100]));
        assert!(matches!(conn.next_event(), Some(Event::Command { .. })));
        if cid < 3 {
            conn.ignore();
            assert!(conn.next_buffer().is_some());
        }
    }
    conn.on_disconnected();
    assert!(conn.next_buffer().is_some());
    assert_eq!(pool.free_bytes(), all);
}

#[test]
fn in_capsule_data_is_copied_once_from_behind_the_entry() {
    let (pool, mut conn) = (pool(), open(narrow()));
    let data: Vec<u8> = (0..200).collect();
    for is_at_once in [false, true] {
        conn.received(filled(&pool, 1, &data));
        let mut buf = pool.take(200).expect("a buffer");
        if is_at_once {
            assert!(matches!(conn.next_event(), Some(Event::Command { .. })));
            let mut short = pool.take(199).expect("a buffer");
            assert!(!conn.take_in_capsule(&mut short), "not as long");
            assert!(conn.take_in_capsule(&mut buf) && !conn.take_in_capsule(&mut buf));
            conn.reply(reply(FAST_PATH, None));
        } else {
            command(&mut conn, slot(1));
            conn.fetch(slot(1), 1, buf);
            let Some(Event::Fetched { buf: fetched, .. }) = conn.next_event() else { panic!("fetched") };
            buf = fetched;
            conn.reply(reply(slot(1), None));
        }
        assert_eq!(buf.as_slice(), Some(&data[..]));
        assert!(conn.next_buffer().is_some(), "before the answer is posted");
        for work in posted(&mut conn) {
            conn.completed(ok(&work));
        }
        if is_at_once {
            assert!(
                (conn.next_event().is_none(), conn.take_fast_path_sent(), conn.take_fast_path_sent())
                    == (true, 1, 0)
            );
        } else {
            assert!(matches!(conn.next_event(), Some(Event::Sent { .. })) && conn.take_fast_path_sent() == 0);
        }
    }
}

#[test]
fn a_failed_work_request_ends_the_connection_and_keeps_what_the_device_may_touch() {
    let (pool, mut conn) = (pool(), open(ConnConfig { send_queue: 8, ..narrow() }));
    let all = pool.free_bytes();
    conn.received(keyed(1, 2 * PIECE, false));
    conn.received(keyed(2, PIECE, false));
    command(&mut conn, slot(1));
    command(&mut conn, slot(2));
    conn.reply(reply(slot(1), pool.take(2 * PIECE)));
    let work = posted(&mut conn);
    assert_eq!(work.iter().map(|work| work.is_signalled).collect::<Vec<_>>(), [false, false, true]);
    conn.fetch(slot(2), 2, pool.take(PIECE).expect("a buffer"));
    // The first WRITE, which is not signalled, fails.
    conn.completed(failed(&work[0]));
    assert_eq!((conn.phase(), posted(&mut conn).len()), (Phase::Ending, 0));
    assert!(conn.next_event().is_none(), "neither Sent nor Fetched");
    assert_eq!((pool.free_bytes(), conn.posted()), (all - 2 * u64::from(PIECE), 3));
    conn.completed(failed(&work[1]));
    conn.completed(failed(&work[2]));
    assert_eq!((pool.free_bytes(), conn.posted()), (all, 0));
    // Completions that come twice are ignored.
    conn.completed(failed(&work[2]));
    conn.completed(ok(&work[2]));
    assert_eq!((conn.posted(), conn.reads_free()), (0, 1));
    conn.on_disconnected();
    conn.on_destroyed();
    assert!(matches!(conn.next_event(), Some(Event::Closed)));
}

#[test]
fn what_was_replied_leaves_before_the_end_and_nothing_else() {
    let (pool, mut conn) = (pool(), open(ConnConfig { send_queue: 8, ..narrow() }));
    for cid in 1..=3 {
        conn.received(keyed(cid, PIECE, false));
        command(&mut conn, slot(cid));
    }
    conn.fetch(slot(2), 2, pool.take(PIECE).expect("a buffer"));
    conn.reply(reply(slot(1), pool.take(PIECE)));
    conn.close(CloseReason::Disconnect);
    assert_eq!((conn.phase(), conn.deadline()), (Phase::Draining, Some(Nanos::ZERO)));
    // A reply and a capsule after the close.
    conn.reply(reply(slot(3), None));
    conn.received(filled(&pool, 4, &[1]));
    assert!(conn.next_buffer().is_some());
    let work = posted(&mut conn);
    assert_eq!(work.len(), 2, "a WRITE and a SEND: {work:?}");
    conn.completed(ok(&work[1]));
    assert!(matches!(conn.next_event(), Some(Event::Sent { .. })));
    assert_eq!(conn.phase(), Phase::Ending);
    assert_eq!(pool.free_bytes(), 64 * u64::from(PIECE));
    // A drain ends when its time is over, although the reply's SEND has not completed.
    let mut conn = open(narrow());
    conn.received(keyed(1, PIECE, false));
    command(&mut conn, slot(1));
    conn.reply(reply(slot(1), pool.take(PIECE)));
    posted(&mut conn);
    conn.close(CloseReason::Shutdown);
    conn.on_time(Nanos(5));
    conn.on_time(Nanos(4) + ConnConfig::default().close_timeout);
    assert_eq!(conn.phase(), Phase::Draining);
    conn.on_time(Nanos(5) + ConnConfig::default().close_timeout);
    assert_eq!((conn.phase(), conn.posted()), (Phase::Ending, 2));
}

/// A step of [`anything_may_come_in_any_order`].
#[derive(Debug, Clone, Copy)]
enum Step {
    Keyed(u32, bool),
    InCapsule(u32),
    Act,
    Post,
    Complete,
    Fail,
    Established,
    Disconnected,
    Close(bool),
    Time,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        8 => (0..6 * PIECE, any::<bool>()).prop_map(|(bytes, asks)| Step::Keyed(bytes, asks)),
        5 => (0..1100_u32).prop_map(Step::InCapsule),
        20 => Just(Step::Act),
        20 => Just(Step::Post),
        40 => Just(Step::Complete),
        1 => Just(Step::Fail),
        3 => Just(Step::Established),
        1 => Just(Step::Disconnected),
        1 => any::<bool>().prop_map(Step::Close),
        1 => Just(Step::Time),
    ]
}

/// Stands for the target's queue pair: gives every command a slot and answers it.
#[derive(Default)]
struct Owner {
    free: Vec<u16>,
    fetched: u64,
    sent: u64,
}

impl Owner {
    fn act(&mut self, conn: &mut Conn, pool: &Pool) -> bool {
        let Some(event) = conn.next_event() else { return false };
        match event {
            Event::Command { sqe, data } => {
                let Some(index) = self.free.pop() else { panic!("more commands than room") };
                conn.set_slot(slot(index));
                let is_read = sqe.cid() % 2 == 0;
                match data {
                    Ok(DataPointer::None) | Err(_) => conn.reply(reply(slot(index), None)),
                    Ok(DataPointer::Host { bytes }) if is_read => {
                        conn.reply(reply(slot(index), Some(pool.take(bytes).expect("enough"))));
                    }
                    Ok(data) => {
                        let buf = pool.take(data.bytes()).expect("enough");
                        conn.fetch(slot(index), sqe.cid(), buf);
                    }
                }
            }
            Event::Fetched { slot, .. } => {
                self.fetched += 1;
                conn.reply(reply(slot, None));
            }
            Event::Sent { slot } => {
                self.sent += 1;
                self.free.push(u16::try_from(slot.index()).expect("small"));
            }
            Event::FetchedPart { .. } | Event::SentPart { .. } => panic!("no parts were asked for"),
            Event::Closed => panic!("before it is destroyed"),
        }
        true
    }
}

fn check(conn: &Conn, config: &ConnConfig, in_flight: usize) {
    assert!(conn.posted() <= config.send_queue && conn.reads_free() <= config.reads_max);
    assert!(conn.posted() as usize >= in_flight, "{} of {in_flight}", conn.posted());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]
    #[test]
    fn anything_may_come_in_any_order(
        steps in proptest::collection::vec(step(), 1..200),
        send_queue in 2_u32..12,
        reads_max in 1_u32..4,
        segments_max in 1_usize..4,
    ) {
        let config = ConnConfig { send_queue, reads_max, segments_max, ..narrow() };
        let pool = pieces(256);
        let mut conn = Conn::new(config);
        conn.set_queue_entries(8);
        let mut owner = Owner { free: (0..8).collect(), ..Owner::default() };
        let mut flight: VecDeque<Work> = VecDeque::new();
        let (mut cid, mut now, mut is_broken) = (0, Nanos(1), false);
        for step in steps {
            match step {
                Step::Keyed(..) | Step::InCapsule(_) if conn.inbox.len() >= 8 => {}
                Step::Keyed(bytes, asks) => conn.received(keyed(cid, bytes, asks)),
                Step::InCapsule(bytes) => {
                    conn.received(filled(&pool, cid, &vec![1; bytes.min(1024) as usize]));
                }
                Step::Act => while owner.act(&mut conn, &pool) {},
                Step::Post => {
                    while conn.next_buffer().is_some() {}
                    flight.extend(posted(&mut conn));
                }
                // In the order of the queue; an unsignalled request has no completion unless it fails.
                Step::Complete => while let Some(work) = flight.pop_front() {
                    if work.is_signalled || is_broken {
                        conn.completed(Completion { is_ok: !is_broken, ..ok(&work) });
                        break;
                    }
                },
                Step::Fail => if let Some(work) = flight.pop_front() {
                    is_broken = true;
                    conn.completed(failed(&work));
                },
                Step::Established => conn.on_established(),
                Step::Disconnected => conn.on_disconnected(),
                Step::Close(is_drained) => {
                    let now = CloseReason::KeepAliveExpired;
                    conn.close(if is_drained { CloseReason::Shutdown } else { now });
                }
                Step::Time => {
                    now += Nanos::from_ms(1500);
                    conn.on_time(now);
                }
            }
            cid += 1;
            check(&conn, &config, flight.len());
        }
        conn.on_disconnected();
        // All work in flight is flushed; afterwards nothing is in use.
        for work in flight.drain(..) {
            conn.completed(failed(&work));
        }
        prop_assert_eq!((conn.posted(), conn.reads_free()), (0, reads_max));
        while conn.next_buffer().is_some() {}
        prop_assert_eq!(conn.buffers_held(), 0);
        while owner.act(&mut conn, &pool) {}
        conn.on_destroyed();
        prop_assert!(matches!(conn.next_event(), Some(Event::Closed)));
        prop_assert!(conn.next_event().is_none());
        prop_assert_eq!(pool.free_bytes(), 256 * u64::from(PIECE));
    }
}

#[test]
fn a_list_of_descriptors_is_written_to_piece_by_piece() {
    let (pool, mut conn) = (pool(), open(ConnConfig { send_queue: 8, segments_max: 16, ..narrow() }));
    let pieces = [(0x10_0000, 100), (0x20_0000, 5000), (0x30_0000, 3092)];
    let list: Vec<u8> = pieces
        .iter()
        .flat_map(|(address, bytes)| Sgl::keyed(*address, *bytes, 0x77, false).as_bytes().to_vec())
        .collect();
    let mut capsule = filled(&pool, 1, &list);
    let kind = SglKind::LAST_SEGMENT_OFFSET.0;
    let sgl = Sgl { length: 48.into(), identifier: kind, ..Sgl::none() };
    capsule.sqe = Sqe::read(1, 1, 0, 2).with_sgl(sgl);
    conn.received(capsule);
    assert_eq!(command(&mut conn, slot(1)), DataPointer::Host { bytes: 2 * PIECE });
    assert!(conn.next_buffer().is_some(), "the list was read");
    conn.reply(reply(slot(1), pool.take(2 * PIECE)));
    let work = posted(&mut conn);
    let moved: Vec<_> = work[..3].iter().map(moved).collect();
    assert_eq!(moved, [(0, 0x10_0000, 100), (100, 0x20_0000, 5000), (5100, 0x30_0000, 3092)]);
    assert_eq!(work.len(), 4);
}

#[test]
fn a_silent_host_is_asked_once_whether_it_is_there_and_its_answer_changes_nothing() {
    let mut conn = open(narrow());
    let at = |ms: u64| Nanos::from_ms(1000 + ms);
    assert!(!conn.watch(at(0)), "the silence begins");
    assert!(!conn.watch(at(14_999)) && posted(&mut conn).is_empty());
    assert!(conn.watch(at(15_000)));
    let work = posted(&mut conn);
    let nothing = Span { offset: 0, bytes: 0 };
    let op = Op::Write { local: nothing, remote: Remote { address: 0, key: 0 } };
    assert_eq!(work.iter().map(|work| (work.is_signalled, work.op)).collect::<Vec<_>>(), [(true, op)]);
    assert!(conn.buffer(work[0].chain).is_none());
    assert_eq!((conn.posted(), conn.reads_free()), (1, 1));
    assert!(!conn.watch(at(15_000)) && !conn.watch(at(60_000)), "one at a time");
    conn.completed(ok(&work[0]));
    assert_eq!((conn.posted(), conn.phase(), conn.has_events()), (0, Phase::Open, false));
    assert!(!conn.watch(at(60_000)), "it was heard of");
    assert!(!conn.watch(at(60_050)) && !conn.watch(at(75_000)) && conn.watch(at(75_050)));
}

#[test]
fn whatever_is_heard_of_a_host_puts_the_question_off() {
    let mut conn = open(narrow());
    assert!(!conn.watch(Nanos(0)));
    conn.received(keyed(1, PIECE, false));
    assert!(!conn.watch(Nanos::from_secs(15)), "a capsule");
    command(&mut conn, slot(1));
    assert!(!conn.watch(Nanos::from_secs(16)));
    conn.reply(reply(slot(1), pool().take(PIECE)));
    let work = posted(&mut conn);
    assert!(!conn.watch(Nanos::from_secs(31)), "its completion will tell");
    work.iter().for_each(|work| conn.completed(ok(work)));
    assert!(!conn.watch(Nanos::from_secs(46)), "a completion");
    assert!(!conn.watch(Nanos::from_secs(47)) && conn.watch(Nanos::from_secs(62)));
}

#[test]
fn a_host_that_does_not_answer_loses_its_connection() {
    let mut conn = open(narrow());
    assert!(!conn.watch(Nanos(0)) && conn.watch(Nanos::from_secs(15)));
    let work = posted(&mut conn);
    conn.completed(failed(&work[0]));
    assert_eq!((conn.phase(), conn.posted()), (Phase::Ending, 0));
}

#[test]
fn nobody_is_asked_before_and_after_a_connection_is_open() {
    let mut conn = Conn::new(narrow());
    for seconds in [0, 15, 30] {
        assert!(!conn.watch(Nanos::from_secs(seconds)), "not established");
    }
    conn.on_established();
    conn.set_queue_entries(8);
    assert!(!conn.watch(Nanos::from_secs(30)) && conn.watch(Nanos::from_secs(45)));
    let work = posted(&mut conn);
    conn.close(CloseReason::Shutdown);
    assert_eq!(conn.phase(), Phase::Draining, "the answer is waited for");
    conn.completed(ok(&work[0]));
    assert_eq!(conn.phase(), Phase::Ending);
    assert!(!conn.watch(Nanos::from_secs(60)) && !conn.watch(Nanos::from_secs(99)));
}

/// Answers `count` reads of `bytes`, with slots from 0 on.
fn answer(conn: &mut Conn, pool: &Pool, count: u16, bytes: u32) {
    for index in 0..count {
        conn.received(keyed(index, bytes, false));
        command(conn, slot(index));
        conn.reply(reply(slot(index), pool.take(bytes)));
    }
}

/// A connection of a Linux host's I/O queue.
fn deep() -> Conn {
    let mut conn = open(ConnConfig { receives: 128, send_queue: 256, segments_max: 16, ..narrow() });
    conn.set_queue_entries(128);
    conn
}

/// Indices of the slots whose reply is known to have left.
fn sent(conn: &mut Conn) -> Vec<u16> {
    let mut sent = Vec::new();
    while let Some(event) = conn.next_event() {
        let Event::Sent { slot } = event else { panic!("{event:?}") };
        sent.push(u16::try_from(slot.index()).expect("small"));
    }
    sent
}

/// The figures of docs/benchmarks.md: a read costs two work requests, and in a batch of 32 a sixteenth of a
/// completion.
#[test]
fn every_16th_and_the_last_reply_of_a_batch_are_signalled_and_complete_earlier_ones() {
    let (pool, mut conn) = (pool(), deep());
    for (count, runs) in
        [(1, vec![1]), (2, vec![2]), (16, vec![16]), (32, vec![16, 16]), (40, vec![16, 16, 8])]
    {
        answer(&mut conn, &pool, count, PIECE);
        let work = posted(&mut conn);
        let signalled: Vec<&Work> = work.iter().filter(|work| work.is_signalled).collect();
        assert_eq!((work.len(), signalled.len()), (2 * usize::from(count), runs.len()));
        let is_last = |work: &&Work| matches!(work.op, Op::Send { .. });
        assert!(signalled.iter().all(is_last) && work.last().is_some_and(|work| work.is_signalled));
        let (mut first, mut left) = (0, u32::from(count));
        for (work, run) in signalled.iter().zip(runs) {
            assert_eq!((conn.posted(), sent(&mut conn).len()), (2 * left, 0));
            conn.completed(ok(work));
            assert_eq!(sent(&mut conn), (first..first + run).collect::<Vec<_>>(), "in their order");
            (first, left) = (first + run, left - u32::from(run));
            assert_eq!(pool.free_bytes(), u64::from(64 - left) * u64::from(PIECE), "in steps");
        }
        assert_eq!(conn.posted(), 0);
        // Completions that come twice are ignored.
        signalled.iter().for_each(|work| conn.completed(ok(work)));
        assert_eq!((conn.posted(), sent(&mut conn).len()), (0, 0));
    }
}

#[test]
fn replies_without_data_and_those_of_the_fast_path_share_a_completion_too() {
    let mut conn = deep();
    for cid in 0..4 {
        conn.received(keyed(cid, PIECE, false));
        assert!(matches!(conn.next_event(), Some(Event::Command { .. })));
        conn.reply(reply(FAST_PATH, None));
    }
    let work = posted(&mut conn);
    assert_eq!(work.iter().map(|work| work.is_signalled).collect::<Vec<_>>(), [false, false, false, true]);
    assert_eq!(conn.take_fast_path_sent(), 0);
    conn.completed(ok(&work[3]));
    assert_eq!((conn.take_fast_path_sent(), conn.posted(), conn.outstanding), (4, 0, 0));
}

#[test]
fn large_transfers_and_replies_beside_reads_are_signalled() {
    let (pool, mut conn) = (pieces(256), deep());
    answer(&mut conn, &pool, 4, 9 * PIECE);
    let work = posted(&mut conn);
    assert_eq!(work.iter().filter(|work| work.is_signalled).count(), 2, "two have more than 64 KiB");
    work.iter().filter(|work| work.is_signalled).for_each(|work| conn.completed(ok(work)));
    assert_eq!(sent(&mut conn), [0, 1, 2, 3]);
    // A READ could take the last entry of the send queue.
    conn.received(keyed(9, PIECE, false));
    command(&mut conn, slot(9));
    conn.fetch(slot(9), 9, pool.take(PIECE).expect("a buffer"));
    answer(&mut conn, &pool, 2, PIECE);
    let work = posted(&mut conn);
    let sends = work.iter().filter(|work| matches!(work.op, Op::Send { .. }));
    assert_eq!(sends.map(|work| work.is_signalled).collect::<Vec<_>>(), [true, true]);
}

#[test]
fn a_reply_that_stops_at_the_end_of_the_send_queue_ends_those_before_it() {
    let (pool, mut conn) = (pool(), open(ConnConfig { send_queue: 8, ..narrow() }));
    answer(&mut conn, &pool, 1, PIECE);
    conn.received(keyed(1, 7 * PIECE, false));
    command(&mut conn, slot(1));
    conn.reply(reply(slot(1), pool.take(7 * PIECE)));
    let work = posted(&mut conn);
    let signalled: Vec<_> = work.iter().map(|work| work.is_signalled).collect();
    assert_eq!(signalled, [false, false, false, false, false, false, false, true]);
    conn.completed(ok(&work[7]));
    assert_eq!((sent(&mut conn), conn.posted()), (vec![0], 0));
    let work = posted(&mut conn);
    assert_eq!(work.len(), 2, "the seventh WRITE, and the SEND");
    conn.completed(ok(&work[1]));
    assert_eq!((sent(&mut conn), pool.free_bytes()), (vec![1], 64 * u64::from(PIECE)));
}

#[test]
fn a_failed_unsignalled_reply_keeps_buffers_until_the_signalled_one_is_flushed() {
    let all = 64 * u64::from(PIECE);
    // Index of the work request that fails: the first WRITE, an unsignalled SEND, and the signalled one.
    for index in [0, 3, 7] {
        let (pool, mut conn) = (pool(), deep());
        answer(&mut conn, &pool, 4, PIECE);
        let work = posted(&mut conn);
        for failing in &work[index..] {
            assert_eq!(pool.free_bytes(), all - 4 * u64::from(PIECE));
            conn.completed(failed(failing));
            assert_eq!(conn.phase(), Phase::Ending);
        }
        assert_eq!((pool.free_bytes(), conn.posted(), sent(&mut conn).len()), (all, 0, 0));
    }
    // The queue pair is destroyed before.
    let (pool, mut conn) = (pool(), deep());
    answer(&mut conn, &pool, 4, PIECE);
    posted(&mut conn);
    conn.on_disconnected();
    assert_eq!((pool.free_bytes(), conn.posted()), (all - 4 * u64::from(PIECE), 8));
    conn.on_destroyed();
    assert_eq!(pool.free_bytes(), all);
}

#[test]
fn a_drain_waits_for_all_replies_of_the_last_batch() {
    let (pool, mut conn) = (pool(), deep());
    answer(&mut conn, &pool, 3, PIECE);
    conn.close(CloseReason::Disconnect);
    let work = posted(&mut conn);
    assert_eq!((work.iter().filter(|work| work.is_signalled).count(), conn.phase()), (1, Phase::Draining));
    conn.completed(ok(&work[5]));
    assert_eq!((sent(&mut conn), conn.phase(), conn.posted()), (vec![0, 1, 2], Phase::Ending, 0));
}
