//! The host's end without a device: capsules by their bytes, completions in any order, and every end.

use nvme_spec::SglKind;
use nvme_spec::identify::IdentifyController;
use spindle_reactor::mem::{Pages, Pool, ZoneSpec};

use super::*;

const BYTES: u32 = 4096;

fn pool() -> Pool {
    Pool::new(&[ZoneSpec { buffer_bytes: BYTES, count: 64 }], Pages::Base).expect("memory")
}

fn piece(address: u64, bytes: u32) -> Piece {
    let lease = Slot::from_wire(0x0001_0007);
    Piece { address, bytes, remote_key: 0xaabb_0000 | bytes, local_key: 5, lease }
}

fn keys(buf: &Buf) -> Keys {
    Keys::one(piece(buf.as_slice().expect("one piece").as_ptr() as u64, u32::try_from(buf.len()).expect("")))
}

fn write_of(pool: &Pool, bytes: u32) -> HostData {
    let buf = pool.take(bytes).expect("a buffer");
    let keys = keys(&buf);
    HostData::ToController(Registered { buf, keys })
}

fn read_of(pool: &Pool, bytes: u32) -> HostData {
    HostData::FromController(write_of(pool, bytes).into_buffer().expect("as made above"))
}

/// A connection with 8 entries and up to 1024 bytes of in-capsule data.
fn conn() -> Conn {
    Conn::new(HostConfig { entries: 8, send_wr: 8, in_capsule_bytes: 1024, ..HostConfig::default() })
}

fn sqe(cid: u16) -> Sqe {
    Sqe::write(cid, 1, 0, 1, false)
}

fn cqe(cid: u16) -> [u8; 16] {
    Cqe::new(cid, Status::SUCCESS).as_bytes().try_into().expect("16 bytes")
}

fn over(work: &Work) -> Completion {
    Completion { chain: work.chain, is_signalled: work.is_signalled, is_ok: true }
}

/// The submission queue entry of a SEND, and the length of the in-capsule data.
fn sent(work: &Work) -> (Sqe, u32) {
    match &work.op {
        Op::Send { head, head_bytes, local, invalidate } => {
            assert_eq!((*head_bytes, *invalidate, local.offset), (64, None, 0));
            (Sqe::read_from_bytes(&head[..]).expect("64 bytes"), local.bytes)
        }
        Op::Read { .. } | Op::Write { .. } => panic!("a host only sends"),
    }
}

/// Submits one command and returns its work request.
fn post(conn: &mut Conn, cid: u16, data: HostData) -> Work {
    conn.submit(sqe(cid), data).expect("taken");
    conn.next_work().expect("posted")
}

fn completed(event: Option<HostEvent>) -> (u16, Option<Buf>, Result<(), Status>) {
    match event {
        Some(HostEvent::Completed { cid, buf, result, cqe }) => {
            assert_eq!(cqe.cid(), cid);
            (cid, buf.map(|data| data.buf), result)
        }
        Some(HostEvent::Ready | HostEvent::Closed { .. }) | None => panic!("no completion: {event:?}"),
    }
}

fn closed(conn: &mut Conn) -> CloseCause {
    assert!(!conn.is_open());
    assert!(conn.next_event().is_none(), "told before the queue pair is gone");
    conn.on_gone();
    loop {
        match conn.next_event().expect("Closed comes") {
            HostEvent::Completed { result, .. } => assert_eq!(result, Err(Status::HOST_PATHING_ERROR)),
            HostEvent::Ready => panic!("it was open before"),
            HostEvent::Closed { why } => {
                assert!(conn.next_event().is_none() && conn.outstanding() == 0);
                return why;
            }
        }
    }
}

#[test]
fn a_command_without_data_has_a_keyed_descriptor_of_nothing() {
    let mut conn = conn();
    let work = post(&mut conn, 3, HostData::None);
    let (sqe, in_capsule) = sent(&work);
    assert_eq!((sqe.sgl.as_bytes()[..15].iter().any(|byte| *byte != 0), in_capsule), (false, 0));
    assert_eq!(
        (sqe.sgl.kind(), sqe.psdt(), sqe.cid()),
        (SglKind::KEYED_DATA_BLOCK, nvme_spec::sqe::Psdt::SGL, 3)
    );
    conn.received(&cqe(3));
    assert!(matches!(completed(conn.next_event()), (3, None, Ok(()))));
    assert!(conn.next_event().is_none() && conn.outstanding() == 0);
}

#[test]
fn a_read_is_told_to_the_controller_with_the_buffers_own_key() {
    let (mut conn, pool) = (conn(), pool());
    let data = read_of(&pool, BYTES);
    let HostData::FromController(data_of) = &data else { unreachable!() };
    let address = data_of.buf.as_slice().expect("one piece").as_ptr() as u64;
    let work = post(&mut conn, 0, data);
    let (sqe, in_capsule) = sent(&work);
    let keyed = sqe.sgl.as_keyed().expect("keyed");
    assert_eq!((keyed.address.get(), keyed.bytes(), keyed.key.get()), (address, BYTES, 0xaabb_1000));
    assert_eq!((keyed.kind(), in_capsule, work.is_signalled), (SglKind::KEYED_DATA_BLOCK, 0, false));
    assert_eq!(conn.buffer(work.chain).map(Buf::len), Some(4096));
    assert_eq!(conn.keys(work.chain).map(|keys| keys.pieces().len()), Some(1));
    assert_eq!(conn.descriptors(work.chain).count(), 0);
    conn.received(&cqe(0));
    let (_, buf, _) = completed(conn.next_event());
    assert_eq!(buf.map(|buf| buf.len()), Some(4096));
    assert!(conn.buffer(work.chain).is_none(), "over");
}

#[test]
fn a_small_write_is_over_when_its_send_and_its_completion_are_in_either_order() {
    let (mut conn, pool) = (conn(), pool());
    for is_reply_first in [true, false] {
        let work = post(&mut conn, 1, write_of(&pool, 1024));
        let (sqe, in_capsule) = sent(&work);
        assert_eq!(
            (sqe.sgl.kind(), sqe.sgl.bytes(), sqe.sgl.address()),
            (SglKind::DATA_BLOCK_OFFSET, 1024, 0)
        );
        assert_eq!((in_capsule, work.is_signalled), (1024, true));
        if is_reply_first {
            conn.received(&cqe(1));
            assert!(conn.next_event().is_none(), "the device may still read the buffer");
            conn.completed(over(&work));
        } else {
            conn.completed(over(&work));
            assert!(conn.next_event().is_none());
            conn.received(&cqe(1));
        }
        assert!(matches!(completed(conn.next_event()), (1, Some(_), Ok(()))));
    }
    let work = post(&mut conn, 2, write_of(&pool, 1025));
    assert_eq!(sent(&work).1, 0, "too long for the capsule");
}

#[test]
fn a_buffer_in_pieces_travels_as_a_list_that_the_controller_and_its_capsules_allow() {
    let (mut conn, pool) = (conn(), pool());
    let data = |pool: &Pool| {
        let buf = pool.take(BYTES).expect("a buffer");
        let pieces = vec![piece(0x1000, 1024), piece(0x9000, 2048), piece(0x5000, 1024)];
        HostData::FromController(Registered { buf, keys: Keys::many(pieces) })
    };
    let refused = conn.submit(sqe(0), data(&pool)).expect_err("MSDBD is 1");
    assert_eq!(refused.kind, SubmitErrorKind::Pieces { pieces: 3, allowed: 1 });
    conn.set_offered(1024, 16);
    let work = post(&mut conn, 0, refused.data);
    let (sqe, in_capsule) = sent(&work);
    assert_eq!(sqe.sgl.as_bytes(), [0, 0, 0, 0, 0, 0, 0, 0, 48, 0, 0, 0, 0, 0, 0, 0x31]);
    assert_eq!(in_capsule, 0);
    let list: Vec<_> = conn.descriptors(work.chain).map(|sgl| sgl.as_keyed().expect("keyed")).collect();
    let list: Vec<_> = list.iter().map(|keyed| (keyed.address.get(), keyed.bytes())).collect();
    assert_eq!(list, [(0x1000, 1024), (0x9000, 2048), (0x5000, 1024)]);
    // In-capsule space for two descriptors.
    conn.set_offered(47, 16);
    let refused = conn.submit(self::sqe(1), data(&pool)).expect_err("too many");
    assert_eq!(refused.kind, SubmitErrorKind::Pieces { pieces: 3, allowed: 2 });
    let (buf, keys) = (Buf::zeroes(0x0200_0000), Keys::one(piece(0, 0x0200_0000)));
    let long = HostData::ToController(Registered { buf, keys });
    let refused = conn.submit(self::sqe(1), long).expect_err("24 bits");
    assert_eq!(refused.kind, SubmitErrorKind::Pieces { pieces: 3, allowed: 2 });
}

#[test]
fn a_write_that_the_device_cannot_gather_is_not_put_in_the_capsule() {
    let (mut conn, pool) = (conn(), pool());
    conn.set_offered(1024, 2);
    let buf = pool.take(512).expect("a buffer");
    let keys = Keys::many(vec![piece(0, 256), piece(0x1000, 256)]);
    let data = HostData::ToController(Registered { buf, keys });
    let work = post(&mut conn, 0, data);
    assert_eq!(sent(&work).0.sgl.kind(), SglKind::LAST_SEGMENT_OFFSET);
    assert_eq!(conn.descriptors(work.chain).count(), 2);
}

#[test]
fn a_full_send_queue_waits_for_the_completion_that_it_asked_for() {
    let pool = pool();
    let config = HostConfig { entries: 8, send_wr: 4, ..HostConfig::default() };
    let mut conn = Conn::new(config);
    for cid in 0..8 {
        conn.submit(sqe(cid), read_of(&pool, 512)).expect("taken");
    }
    let first: Vec<Work> = std::iter::from_fn(|| conn.next_work()).collect();
    assert_eq!(first.len(), 4);
    assert!(conn.has_queued());
    // Answers do not free send queue entries: queued commands wait for a completion of the send queue.
    for cid in 0..4 {
        conn.received(&cqe(cid));
        assert_eq!(completed(conn.next_event()).2, Ok(()));
    }
    assert!(conn.next_work().is_none());
    for work in first.iter().filter(|work| work.is_signalled) {
        conn.completed(over(work));
    }
    let cids: Vec<u16> = std::iter::from_fn(|| conn.next_work()).map(|work| sent(&work).0.cid()).collect();
    assert_eq!(cids, [4, 5, 6, 7]);
    assert!(!conn.has_queued());
}

#[test]
fn a_completion_that_nobody_waits_for_ends_the_connection() {
    type Set = fn(&mut Conn, &Pool);
    let setups: [(&str, Set); 5] = [
        ("never used", |_, _| {}),
        ("queued, not sent", |conn, _| conn.submit(sqe(5), HostData::None).expect("taken")),
        ("over", |conn, _| {
            post(conn, 5, HostData::None);
            conn.received(&cqe(5));
            assert_eq!(completed(conn.next_event()).2, Ok(()));
        }),
        ("over, not told", |conn, _| {
            post(conn, 5, HostData::None);
            conn.received(&cqe(5));
        }),
        ("answered, still leaving", |conn, pool| {
            post(conn, 5, write_of(pool, 512));
            conn.received(&cqe(5));
        }),
    ];
    for (name, set) in setups {
        let (mut conn, pool) = (conn(), pool());
        set(&mut conn, &pool);
        conn.received(&cqe(5));
        assert!(!conn.is_open(), "{name}");
        while let Some(HostEvent::Completed { .. }) = conn.next_event() {}
        assert!(conn.submit(sqe(1), HostData::None).is_err_and(|full| full.kind == SubmitErrorKind::Closed));
        conn.on_gone();
        while let Some(event) = conn.next_event() {
            if let HostEvent::Closed { why } = event {
                assert_eq!(why, CloseCause::Violation(Violation::CompletionCid { cid: 5 }), "{name}");
            }
        }
    }
    for cid in [8, 0xffff] {
        let mut conn = conn();
        conn.received(&cqe(cid));
        assert_eq!(closed(&mut conn), CloseCause::Violation(Violation::CompletionCid { cid }));
    }
    let mut conn = conn();
    conn.received(&cqe(0)[..15]);
    assert_eq!(closed(&mut conn), CloseCause::Violation(Violation::CompletionLength { bytes: 15 }));
}

#[test]
fn a_failed_send_ends_the_connection_and_its_commands_are_lost() {
    let (mut conn, pool) = (conn(), pool());
    let free = pool.free_bytes();
    let first = post(&mut conn, 0, write_of(&pool, 512));
    let second = post(&mut conn, 1, read_of(&pool, 512));
    conn.submit(sqe(2), read_of(&pool, 512)).expect("taken");
    conn.received(&cqe(0));
    conn.completed(Completion { is_ok: false, ..over(&second) });
    assert!(!conn.is_open() && conn.next_work().is_none());
    // Flushed work requests and late messages change nothing.
    conn.completed(Completion { is_ok: false, ..over(&first) });
    conn.received(&cqe(1));
    assert!(conn.next_event().is_none(), "the device may still use the buffers");
    conn.on_gone();
    let (cid, buf, result) = completed(conn.next_event());
    assert_eq!((cid, buf.is_some(), result), (0, true, Ok(())), "it was answered");
    drop(buf);
    for cid in [1, 2] {
        let (lost, buf, result) = completed(conn.next_event());
        assert_eq!((lost, buf.is_some(), result), (cid, true, Err(Status::HOST_PATHING_ERROR)));
    }
    let event = conn.next_event();
    assert!(matches!(event, Some(HostEvent::Closed { why: CloseCause::Failed })), "{event:?}");
    assert!(conn.next_event().is_none());
    assert_eq!(pool.free_bytes(), free);
}

#[test]
fn a_completion_of_what_was_not_posted_is_the_devices_fault() {
    let mut conn = conn();
    let work = post(&mut conn, 0, HostData::None);
    conn.completed(Completion { chain: Slot::from_wire(0x0007_0000), is_signalled: true, is_ok: true });
    assert_eq!(closed(&mut conn), CloseCause::Device);
    conn.completed(over(&work));
}

#[test]
fn a_cid_that_is_outstanding_or_too_large_is_refused_with_its_data() {
    let (mut conn, pool) = (conn(), pool());
    post(&mut conn, 0, HostData::None);
    for cid in [0, 8] {
        let full = conn.submit(sqe(cid), write_of(&pool, 512)).expect_err("refused");
        assert_eq!(full.kind, SubmitErrorKind::Cid);
        assert!(matches!(full.data, HostData::ToController(..)));
    }
    conn.end(CloseCause::Requested);
    assert_eq!(closed(&mut conn), CloseCause::Requested);
}

/// Pseudo-random numbers that depend on the seed only.
struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 % n as u64).expect("small")
    }
}

/// One connection under one seed: SENDs and completions come in any order that a device can make, and the
/// connection ends in any possible way.
struct Life {
    random: Random,
    pool: Pool,
    conn: Conn,
    entries: u16,
    /// Posted work requests, in order; signalled ones complete in this order.
    in_flight: VecDeque<Work>,
    /// CIDs of the commands that the controller has received.
    known: Vec<u16>,
    /// Mark of each outstanding command, by CID.
    marks: Vec<Option<u64>>,
    next_mark: u64,
}

impl Life {
    fn new(seed: u64) -> Life {
        let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
        let entries = u16::try_from(1 + random.below(40)).expect("small");
        let config = HostConfig {
            entries,
            send_wr: u32::try_from(1 + random.below(50)).expect("small"),
            in_capsule_bytes: [0, 512, 4096][random.below(3)],
            ..HostConfig::default()
        };
        let marks = vec![None; usize::from(entries)];
        let conn = Conn::new(config);
        Life {
            random,
            pool: pool(),
            conn,
            entries,
            in_flight: VecDeque::new(),
            known: Vec::new(),
            marks,
            next_mark: 1,
        }
    }

    fn submit(&mut self) {
        let cid = u16::try_from(self.random.below(usize::from(self.entries))).expect("small");
        let data = match self.random.below(4) {
            0 => HostData::None,
            1 => read_of(&self.pool, 512),
            2 => write_of(&self.pool, BYTES),
            _ => write_of(&self.pool, 512),
        };
        let mark = self.next_mark;
        let data = data.map(|mut data| {
            data.buf.copy_in(0, &mark.to_le_bytes());
            data
        });
        let was_free = self.marks[usize::from(cid)].is_none();
        let is_taken = self.conn.submit(sqe(cid), data).is_ok();
        assert_eq!(is_taken, was_free && self.conn.is_open());
        if is_taken {
            self.next_mark += 1;
            self.marks[usize::from(cid)] = Some(mark);
        }
    }

    fn step(&mut self) {
        match self.random.below(6) {
            0 | 1 => self.submit(),
            2 => {
                while let Some(work) = self.conn.next_work() {
                    self.known.push(sent(&work).0.cid());
                    self.in_flight.push_back(work);
                }
            }
            3 if !self.known.is_empty() => {
                let at = self.random.below(self.known.len());
                let cid = self.known.swap_remove(at);
                self.conn.received(&cqe(cid));
            }
            4 => {
                while let Some(work) = self.in_flight.pop_front() {
                    if work.is_signalled {
                        self.conn.completed(over(&work));
                        break;
                    }
                }
            }
            _ => {
                while let Some(event) = self.conn.next_event() {
                    self.told(event);
                }
            }
        }
    }

    /// Checks an event. True if it was the last.
    fn told(&mut self, event: HostEvent) -> bool {
        let HostEvent::Completed { cid, buf, .. } = event else { return true };
        let mark = self.marks[usize::from(cid)].take().expect("told once");
        if let Some(Registered { buf, .. }) = buf {
            let mut bytes = [0; 8];
            buf.copy_out(0, &mut bytes);
            assert_eq!(u64::from_le_bytes(bytes), mark, "the buffer of another command");
        }
        false
    }

    fn end(mut self) {
        match self.random.below(4) {
            0 => self.conn.end(CloseCause::Requested),
            1 => self.conn.end(CloseCause::ByPeer),
            2 => self.conn.received(&[]),
            _ => match self.in_flight.front() {
                Some(work) => self.conn.completed(Completion { is_ok: false, ..over(work) }),
                None => self.conn.end(CloseCause::Requested),
            },
        }
        assert!(!self.conn.is_open());
        for _ in 0..self.random.below(20) {
            self.step();
        }
        self.conn.on_gone();
        loop {
            let event = self.conn.next_event().expect("Closed comes");
            if self.told(event) {
                break;
            }
        }
        assert!(self.marks.iter().all(Option::is_none), "every command was told");
        assert_eq!(self.pool.free_bytes(), u64::from(64 * BYTES), "every buffer is home");
    }
}

#[test]
fn every_buffer_comes_back_exactly_once_in_any_order_and_at_any_end() {
    for seed in 1..500 {
        let mut life = Life::new(seed);
        for _ in 0..400 {
            life.step();
            assert!(life.conn.is_open(), "seed {seed}");
        }
        life.end();
    }
}

#[test]
fn a_stalled_connection_always_has_a_completion_in_flight() {
    for seed in 1..200 {
        let mut life = Life::new(seed);
        for _ in 0..200 {
            life.step();
        }
        // All completions and answers arrive; then nothing is outstanding.
        for _ in 0..1000 {
            while let Some(work) = life.conn.next_work() {
                life.known.push(sent(&work).0.cid());
                life.in_flight.push_back(work);
            }
            while let Some(work) = life.in_flight.pop_front() {
                if work.is_signalled {
                    life.conn.completed(over(&work));
                }
            }
            while let Some(cid) = life.known.pop() {
                life.conn.received(&cqe(cid));
            }
            while let Some(event) = life.conn.next_event() {
                life.told(event);
            }
        }
        assert_eq!(life.conn.outstanding(), 0, "seed {seed}");
    }
}

#[test]
fn the_head_memory_of_an_entry_holds_the_longest_capsule_without_data() {
    assert_eq!(ENTRY_BYTES, 64 + 256);
    assert_eq!(sqe(0).opcode & 0b11, 0b01, "its data goes to the controller");
    // A controller with MSDBD 0 has no limit.
    assert_eq!(IdentifyController::default().msdbd, 0);
}
