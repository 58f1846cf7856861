//! One end on a bench: bytes in as they are cut, what came of them, bytes out.

use spindle_nvme_transport::RequestId;
use std::collections::VecDeque;
use std::io::{IoSlice, IoSliceMut};

use arrayvec::ArrayVec;
use nvme_spec::status::Status;
use nvme_spec::{Cqe, Sqe};
use spindle_nvme_tcp::controller::{self, ConnConfig};
use spindle_nvme_tcp::host::{self, CloseCause, HostConfig, HostData, HostEvent};
use spindle_nvme_tcp::{Phase, RxBatch};
use spindle_nvme_transport::{DataPointer, Event, Reply, Transport};
use spindle_reactor::clock::Nanos;
use spindle_reactor::mem::{Buf, Pages, Pool, ZoneSpec};

use crate::wire::{self, Digests};

pub const BATCH: usize = 64 << 10;

/// The pool of a test's thread.
pub fn pool() -> Pool {
    thread_local! {
        static POOL: Pool = make_pool();
    }
    POOL.with(Pool::clone)
}

fn make_pool() -> Pool {
    let zones = [(4096, 64), (16 << 10, 16), (64 << 10, 64), (1 << 20, 4)];
    let zones = zones.map(|(buffer_bytes, count)| ZoneSpec { buffer_bytes, count });
    Pool::new(&zones, Pages::Base).unwrap()
}

/// What a pool gives, filled.
pub fn filled(pool: &Pool, bytes: &[u8]) -> Buf {
    let mut buf = pool.take(u32::try_from(bytes.len()).unwrap()).expect("a free buffer");
    buf.copy_in(0, bytes);
    buf
}

pub fn contents(buf: &Buf) -> Vec<u8> {
    let mut bytes = vec![0; buf.len()];
    buf.copy_out(0, &mut bytes);
    bytes
}

/// An event, in a form that can be compared.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Seen {
    Command { opcode: u8, cid: u16, data: Result<DataPointer, Status> },
    Fetched { cid: u16, bytes: Vec<u8>, result: Result<(), Status> },
    Closed,
}

/// The controller's end, and a target that answers everything: writes are fetched and succeed, reads get
/// [`wire::pattern`] of their CID, everything else succeeds.
pub struct Controller {
    pub conn: controller::Conn,
    pub pool: Pool,
    pub batch: Option<RxBatch>,
    pub seen: Vec<Seen>,
    pub sent: Vec<u16>,
    pub output: Vec<u8>,
    /// Replies may be folded into C2HData.
    pub may_omit_cqe: bool,
    /// Answer nothing but what [`Controller::answer`] is called for.
    pub is_manual: bool,
    pub waiting: VecDeque<(Sqe, DataPointer)>,
    pool_bytes: u64,
}

pub fn slot(cid: u16) -> RequestId {
    RequestId::from_wire(1 << 16 | u32::from(cid))
}

impl Controller {
    pub fn new(config: ConnConfig) -> Self {
        Self::with_batch(config, BATCH)
    }

    /// With a batch of so many bytes.
    pub fn with_batch(config: ConnConfig, batch_bytes: usize) -> Self {
        let pool = pool();
        Controller {
            // The tags in these tests are those of queues of up to 128 entries: 7 bits of a TTAG are its
            // index.
            conn: controller::Conn::new(
                ConnConfig { queue_entries: config.queue_entries.min(128), ..config },
                Nanos::ZERO,
            ),
            pool_bytes: pool.free_bytes(),
            pool,
            batch: Some(RxBatch::new(batch_bytes)),
            seen: Vec::new(),
            sent: Vec::new(),
            output: Vec::new(),
            may_omit_cqe: true,
            is_manual: false,
            waiting: VecDeque::new(),
        }
    }

    /// With a pool of its own, for tests that hold several.
    pub fn alone(config: ConnConfig) -> Self {
        let mut rig = Self::new(config);
        rig.pool = make_pool();
        rig.pool_bytes = rig.pool.free_bytes();
        rig
    }

    /// With ICReq and ICResp done.
    pub fn ready(config: ConnConfig, digests: Digests) -> Self {
        Self::new(config).initialized(digests)
    }

    /// ICReq and ICResp.
    pub fn initialized(self, digests: Digests) -> Self {
        let mut rig = self;
        rig.feed(&wire::icreq(0, digests));
        rig.transmit();
        assert_eq!(rig.output.len(), 128, "ICResp");
        rig.output.clear();
        rig
    }

    /// Bytes that came in one piece.
    pub fn feed(&mut self, bytes: &[u8]) {
        let most = self.batch.as_ref().unwrap().capacity();
        for chunk in bytes.chunks(most) {
            let mut batch = self.batch.take().unwrap();
            assert_eq!(batch.extend(chunk), chunk.len());
            self.conn.load(batch);
            self.pull();
            self.batch = Some(self.conn.unload());
            self.pull();
        }
    }

    /// As a socket that reads straight into payloads where it may, `most` bytes at a time.
    pub fn feed_direct(&mut self, mut bytes: &[u8], most: usize) {
        while !bytes.is_empty() {
            let count = most.min(bytes.len());
            let mut targets = ArrayVec::<IoSliceMut, 16>::new();
            let direct = self.conn.direct_target(&mut targets, 0).min(count);
            let mut at = 0;
            for target in &mut targets {
                let step = target.len().min(direct - at);
                target[..step].copy_from_slice(&bytes[at..at + step]);
                at += step;
            }
            drop(targets);
            self.conn.received_direct(direct);
            self.feed(&bytes[direct..count]);
            self.pull();
            bytes = &bytes[count..];
        }
    }

    /// All events there are.
    pub fn pull(&mut self) {
        while let Some(event) = self.conn.next_event() {
            self.on_event(event);
        }
    }

    fn on_event(&mut self, event: Event) {
        match event {
            Event::Command { sqe, data } => {
                self.seen.push(Seen::Command { opcode: sqe.opcode, cid: sqe.cid(), data });
                match data {
                    Err(status) => self.reply(sqe.cid(), status, None),
                    Ok(data) if self.is_manual => self.waiting.push_back((sqe, data)),
                    Ok(data) => self.answer(&sqe, data),
                }
            }
            Event::Fetched { slot, buf, result } => {
                let cid = u16::try_from(slot.index()).unwrap();
                self.seen.push(Seen::Fetched { cid, bytes: contents(&buf), result });
                drop(buf);
                self.reply(cid, result.err().unwrap_or(Status::SUCCESS), None);
            }
            Event::Sent { slot } => self.sent.push(u16::try_from(slot.index()).unwrap()),
            Event::FetchedPart { .. } | Event::SentPart { .. } => panic!("parts over TCP"),
            Event::Closed => self.seen.push(Seen::Closed),
        }
    }

    /// Answer the oldest command that waits.
    pub fn answer_next(&mut self) {
        let (sqe, data) = self.waiting.pop_front().expect("a command waits");
        self.answer(&sqe, data);
        self.pull();
    }

    pub fn answer(&mut self, sqe: &Sqe, data: DataPointer) {
        let cid = sqe.cid();
        match data {
            DataPointer::InCapsule { bytes } => {
                let buf = self.pool.take(bytes).expect("a free buffer");
                self.conn.fetch(slot(cid), cid, buf);
            }
            DataPointer::Host { bytes } if sqe.opcode == wire::READ => {
                let buf = filled(&self.pool, &wire::pattern(u64::from(cid), bytes as usize));
                self.reply(cid, Status::SUCCESS, Some(buf));
            }
            DataPointer::Host { bytes } => {
                let buf = self.pool.take(bytes).expect("a free buffer");
                self.conn.fetch(slot(cid), cid, buf);
            }
            DataPointer::None => self.reply(cid, Status::SUCCESS, None),
        }
    }

    pub fn reply(&mut self, cid: u16, status: Status, data: Option<Buf>) {
        let cqe = Cqe::new(cid, status);
        self.conn.reply(Reply { slot: slot(cid), cqe, data, may_omit_cqe: self.may_omit_cqe });
    }

    /// Everything that is to be sent, leaves.
    pub fn transmit(&mut self) {
        while self.transmit_some(usize::MAX) > 0 {}
        self.pull();
    }

    /// At most `most` bytes leave; how many did.
    pub fn transmit_some(&mut self, most: usize) -> usize {
        let mut pieces = ArrayVec::<IoSlice, 8>::new();
        let count = self.conn.send_pieces(&mut pieces).min(most);
        assert_eq!(count > 0, self.conn.wants_send());
        let mut left = count;
        for piece in &pieces {
            let step = left.min(piece.len());
            self.output.extend(&piece[..step]);
            left -= step;
        }
        drop(pieces);
        self.conn.sent(count);
        count
    }

    /// What was sent since the last time.
    pub fn take_output(&mut self) -> Vec<u8> {
        self.transmit();
        std::mem::take(&mut self.output)
    }

    pub fn take_seen(&mut self) -> Vec<Seen> {
        std::mem::take(&mut self.seen)
    }

    pub fn has_all_buffers(&self) -> bool {
        self.pool.free_bytes() == self.pool_bytes
    }

    /// The last act: what is queued leaves, the peer closes, `Closed` comes once and every buffer is back.
    pub fn finish(&mut self) {
        self.transmit();
        assert_eq!(self.conn.phase(), Phase::HalfClosed);
        assert!(self.has_all_buffers(), "before the peer closed");
        self.conn.on_peer_closed();
        self.pull();
        self.expect_closed();
    }

    pub fn expect_closed(&mut self) {
        assert_eq!(self.conn.phase(), Phase::Closed);
        assert_eq!(self.seen.iter().filter(|seen| **seen == Seen::Closed).count(), 1);
        assert_eq!(self.seen.last(), Some(&Seen::Closed));
        assert!(self.conn.next_event().is_none());
        assert!(!self.conn.wants_send());
        assert_eq!(self.conn.deadline(), None);
        assert!(self.has_all_buffers(), "a buffer is missing");
    }
}

/// A host's event, in a form that can be compared.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum HostSeen {
    Ready,
    Completed { cid: u16, status: Status, bytes: Option<Vec<u8>>, result: Result<(), Status> },
    Closed(CloseCause),
}

/// The host's end.
pub struct Host {
    pub conn: host::Conn,
    pub pool: Pool,
    pub batch: Option<RxBatch>,
    pub seen: Vec<HostSeen>,
    pub output: Vec<u8>,
    pool_bytes: u64,
}

impl Host {
    pub fn new(config: HostConfig) -> Self {
        let pool = pool();
        let conn = host::Conn::new(config, Nanos::ZERO);
        Host {
            conn,
            pool_bytes: pool.free_bytes(),
            pool,
            batch: Some(RxBatch::new(BATCH)),
            seen: Vec::new(),
            output: Vec::new(),
        }
    }

    /// With a pool of its own, for tests that hold several.
    pub fn alone(config: HostConfig) -> Self {
        let mut rig = Self::new(config);
        rig.pool = make_pool();
        rig.pool_bytes = rig.pool.free_bytes();
        rig
    }

    /// With ICReq and ICResp done.
    pub fn ready(config: HostConfig, cpda: u8, max_h2c_data: u32) -> Self {
        let digests = Digests { header: config.header_digest, data: config.data_digest };
        Self::new(config).initialized(cpda, digests, max_h2c_data)
    }

    /// ICReq and ICResp.
    pub fn initialized(self, cpda: u8, digests: Digests, max_h2c_data: u32) -> Self {
        let mut rig = self;
        rig.feed(&wire::icresp(cpda, digests, max_h2c_data));
        assert_eq!(rig.take_output().len(), 128, "ICReq");
        assert_eq!(std::mem::take(&mut rig.seen), [HostSeen::Ready]);
        rig
    }

    pub fn feed(&mut self, bytes: &[u8]) {
        for chunk in bytes.chunks(BATCH) {
            let mut batch = self.batch.take().unwrap();
            assert_eq!(batch.extend(chunk), chunk.len());
            self.conn.load(batch);
            self.pull();
            self.batch = Some(self.conn.unload());
        }
    }

    pub fn feed_direct(&mut self, mut bytes: &[u8], most: usize) {
        while !bytes.is_empty() {
            let count = most.min(bytes.len());
            let mut targets = ArrayVec::<IoSliceMut, 16>::new();
            let direct = self.conn.direct_target(&mut targets, 0).min(count);
            let mut at = 0;
            for target in &mut targets {
                let step = target.len().min(direct - at);
                target[..step].copy_from_slice(&bytes[at..at + step]);
                at += step;
            }
            drop(targets);
            self.conn.received_direct(direct);
            self.feed(&bytes[direct..count]);
            self.pull();
            bytes = &bytes[count..];
        }
    }

    pub fn pull(&mut self) {
        while let Some(event) = self.conn.next_event() {
            self.seen.push(match event {
                HostEvent::Ready => HostSeen::Ready,
                HostEvent::Completed { cid, cqe, buf, result } => {
                    assert_eq!(cqe.cid(), cid);
                    HostSeen::Completed {
                        cid,
                        status: cqe.status(),
                        bytes: buf.as_ref().map(contents),
                        result,
                    }
                }
                HostEvent::Closed { why } => HostSeen::Closed(why),
            });
        }
    }

    pub fn read(&mut self, cid: u16, bytes: u32) {
        let buf = self.pool.take(bytes).expect("a free buffer");
        self.conn.submit(Sqe::new(wire::READ, cid, 1), HostData::FromController(buf)).unwrap();
    }

    pub fn write(&mut self, cid: u16, bytes: &[u8]) {
        let buf = filled(&self.pool, bytes);
        self.conn.submit(Sqe::new(wire::WRITE, cid, 1), HostData::ToController(buf)).unwrap();
    }

    pub fn flush(&mut self, cid: u16) {
        self.conn.submit(Sqe::new(wire::FLUSH, cid, 1), HostData::None).unwrap();
    }

    pub fn transmit_some(&mut self, most: usize) -> usize {
        let mut pieces = ArrayVec::<IoSlice, 8>::new();
        let count = self.conn.send_pieces(&mut pieces).min(most);
        assert_eq!(count > 0, self.conn.wants_send());
        let mut left = count;
        for piece in &pieces {
            let step = left.min(piece.len());
            self.output.extend(&piece[..step]);
            left -= step;
        }
        drop(pieces);
        self.conn.sent(count);
        count
    }

    pub fn take_output(&mut self) -> Vec<u8> {
        while self.transmit_some(usize::MAX) > 0 {}
        self.pull();
        std::mem::take(&mut self.output)
    }

    pub fn take_seen(&mut self) -> Vec<HostSeen> {
        std::mem::take(&mut self.seen)
    }

    pub fn has_all_buffers(&self) -> bool {
        self.pool.free_bytes() == self.pool_bytes
    }

    pub fn expect_closed(&mut self) {
        assert_eq!(self.conn.phase(), Phase::Closed);
        assert!(matches!(self.seen.last(), Some(HostSeen::Closed(_))), "{:?}", self.seen);
        assert_eq!(self.seen.iter().filter(|seen| matches!(seen, HostSeen::Closed(_))).count(), 1);
        assert!(self.conn.next_event().is_none());
        assert!(!self.conn.wants_send());
        assert_eq!(self.conn.outstanding(), 0);
        assert!(self.has_all_buffers(), "a buffer is missing");
    }
}

pub fn done(cid: u16, bytes: Option<Vec<u8>>) -> HostSeen {
    HostSeen::Completed { cid, status: Status::SUCCESS, bytes, result: Ok(()) }
}
