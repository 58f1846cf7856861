//! A host: an admin queue, I/O queues, and for every command what its answer may be.

use nvme_spec::Sqe;
use nvme_spec::fabrics::{ConnectAttributes, ConnectData};
use nvme_spec::nqn::Nqn;
use nvme_spec::register::{CC, CSTS};
use nvme_spec::sqe::Fuse;
use nvme_spec::status::Status;
use nvme_spec::zerocopy::IntoBytes;
use spindle_reactor::mem::{Buf, Pool};

use super::carrier::{Carrier, Data, Happened};
use super::model::{Model, fill};
use super::rng::Rng;

/// What a command's answer may be, and what it means for the model.
#[derive(Debug)]
pub enum Want {
    /// Connect, properties: success.
    Setup,
    /// Success, or an error of the disk.
    Read {
        /// First block.
        first: usize,
        /// Blocks.
        count: usize,
    },
    /// Success, or an error of the disk.
    Write {
        /// First block.
        first: usize,
        /// What each block gets.
        tags: Vec<u64>,
    },
    /// As its certainty says.
    Compare {
        /// First block.
        first: usize,
        /// Blocks.
        count: usize,
        /// The data is what the blocks hold.
        is_same: bool,
    },
    /// The two halves of a fused pair, at this index of the queue's pairs.
    Pair {
        /// Which pair.
        index: usize,
        /// 0: Compare, 1: Write.
        half: usize,
    },
    /// Reads without data.
    Verify {
        /// First block.
        first: usize,
        /// Blocks.
        count: usize,
    },
    /// Reads there, writes here.
    Copy {
        /// First block that is read.
        source: usize,
        /// First block that is written.
        first: usize,
        /// What is there.
        tags: Vec<u64>,
    },
    /// No effect on content.
    Other,
    /// Exactly this refusal.
    Refused(Status),
    /// An Abort: success either way.
    Abort,
    /// Held until the end.
    AsyncEvent,
    /// Disconnect or a reset.
    Leave,
}

/// A fused pair in flight.
#[derive(Debug)]
pub struct Pair {
    block: usize,
    tag: u64,
    is_same: bool,
    results: [Option<Result<Status, ()>>; 2],
}

/// A write whose fate is unknown because its connection ended: settled once the disks are idle.
#[derive(Debug)]
pub struct Lost {
    /// First block.
    pub first: usize,
    /// What it would have written.
    pub tags: Vec<u64>,
}

/// Where a queue is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// ICReq is on its way.
    Initializing,
    /// Connect is on its way.
    Connecting,
    /// Admin only: CC is being set.
    Enabling,
    /// Admin only: CSTS is being read.
    Reading,
    /// Commands flow.
    Live,
    /// The host has said that it goes.
    Leaving,
    /// The connection is gone.
    Dead,
}

/// One queue of a host.
pub struct Queue<W> {
    /// Its identifier.
    pub qid: u16,
    /// Its connection.
    pub wire: W,
    /// Where it is.
    pub stage: Stage,
    entries: u16,
    outstanding: Vec<Option<Want>>,
    /// An Abort named this identifier once; it may still be on its way and hit a later command.
    is_abort_asked: Vec<bool>,
    pairs: Vec<Pair>,
}

/// What all commands of a run share.
pub struct Issue<'a> {
    /// Chance.
    pub rng: &'a mut Rng,
    /// The namespace's content.
    pub model: &'a mut Model,
    /// The hosts' own buffers.
    pub pool: &'a Pool,
    /// Most blocks of a command.
    pub blocks_max: usize,
    /// Disks fail now and then.
    pub has_faults: bool,
    /// Completions so far.
    pub completed: &'a mut u64,
    /// Writes of unknown fate.
    pub lost: &'a mut Vec<Lost>,
    /// A queue disconnects or resets its controller, in a thousand commands.
    pub leaves_permille: u64,
    /// This host disconnects a queue or resets its controller, or has lost one: what fails now may fail.
    pub is_leaving: bool,
}

const NSID: u32 = 1;

impl<W: Carrier> Queue<W> {
    /// A queue whose ICReq is about to leave.
    #[must_use]
    pub fn new(qid: u16, wire: W, entries: u16) -> Queue<W> {
        Queue {
            qid,
            wire,
            stage: Stage::Initializing,
            entries,
            outstanding: (0..entries).map(|_| None).collect(),
            is_abort_asked: vec![false; usize::from(entries)],
            pairs: Vec::new(),
        }
    }

    fn free_cid(&self, rng: &mut Rng) -> Option<u16> {
        let start = rng.size(0, self.outstanding.len() - 1);
        let mut order = (start..self.outstanding.len()).chain(0..start);
        order.find(|cid| self.outstanding[*cid].is_none()).and_then(|cid| u16::try_from(cid).ok())
    }

    /// Commands in flight; one entry of a queue always stays free.
    fn count(&self) -> usize {
        self.outstanding.iter().flatten().count()
    }

    fn submit(&mut self, cid: u16, sqe: Sqe, data: Data, want: Want) {
        self.wire.submit(sqe, data);
        self.outstanding[usize::from(cid)] = Some(want);
    }

    fn connect(
        &mut self,
        pool: &Pool,
        host: (&Nqn, [u8; 16]),
        subsystem: &Nqn,
        cntlid: u16,
        sq_flow_off: bool,
    ) {
        let data = ConnectData::new(host.1, cntlid, subsystem, host.0);
        let mut buf = pool.take(1024).expect("the hosts' pool is large");
        buf.copy_in(0, data.as_bytes());
        let cattr = ConnectAttributes::new().with_disable_sq_flow_control(sq_flow_off);
        let sqe = Sqe::connect(0, self.qid, self.entries - 1, 0, cattr);
        self.stage = Stage::Connecting;
        self.submit(0, sqe, Data::ToController(buf), Want::Setup);
    }

    /// Pull the connection's events and judge them. `host` names the host, `cntlid` is learnt from the admin
    /// queue.
    pub fn on_events(
        &mut self,
        issue: &mut Issue<'_>,
        host: (&Nqn, [u8; 16]),
        subsystem: &Nqn,
        cntlid: &mut u16,
        sq_flow_off: bool,
    ) {
        while let Some(event) = self.wire.next_event() {
            match event {
                Happened::Ready => {
                    let cntlid = if self.qid == 0 { 0xffff } else { *cntlid };
                    self.connect(issue.pool, host, subsystem, cntlid, sq_flow_off);
                }
                Happened::Completed { cid, cqe, buf, result } => {
                    let want = self.outstanding[usize::from(cid)].take().expect("an answer to nothing");
                    *issue.completed += 1;
                    if self.stage == Stage::Dead || self.wire.is_gone() && result.is_err() {
                        self.on_lost(issue, want);
                        continue;
                    }
                    let status = match result {
                        Ok(()) => Status::SUCCESS,
                        Err(status) if is_path_error(status) || issue.is_leaving => {
                            self.on_lost(issue, want);
                            continue;
                        }
                        Err(status) => status,
                    };
                    if matches!(want, Want::Setup) {
                        assert!(status.is_success(), "set-up in {:?}: {status}", self.stage);
                        self.go_on(cqe.result_u32(), cntlid);
                        continue;
                    }
                    self.judge(issue, usize::from(cid), want, status, buf);
                }
                Happened::Closed => self.stage = Stage::Dead,
            }
        }
        self.wire.received();
    }

    /// The next step of bringing a queue up.
    fn go_on(&mut self, result: u32, cntlid: &mut u16) {
        match self.stage {
            Stage::Connecting if self.qid == 0 => {
                *cntlid = u16::try_from(result & 0xffff).expect("16 bits");
                // CC: EN, IOSQES 6, IOCQES 4.
                self.stage = Stage::Enabling;
                let sqe = Sqe::property_set(0, false, CC, 1 | 6 << 16 | 4 << 20);
                self.submit(0, sqe, Data::None, Want::Setup);
            }
            Stage::Enabling => {
                self.stage = Stage::Reading;
                self.submit(0, Sqe::property_get(0, false, CSTS), Data::None, Want::Setup);
            }
            Stage::Reading => {
                assert_eq!(result & 1, 1, "CSTS.RDY after CC.EN");
                self.stage = Stage::Live;
            }
            Stage::Connecting => self.stage = Stage::Live,
            Stage::Initializing | Stage::Live | Stage::Leaving | Stage::Dead => {
                panic!("set-up in {:?}", self.stage)
            }
        }
    }

    fn on_lost(&mut self, issue: &mut Issue<'_>, want: Want) {
        match want {
            Want::Read { first, count }
            | Want::Compare { first, count, .. }
            | Want::Verify { first, count } => {
                issue.model.end_read(first, count);
            }
            Want::Write { first, tags } => issue.lost.push(Lost { first, tags }),
            Want::Copy { source, first, tags } => {
                issue.model.end_read(source, tags.len());
                issue.lost.push(Lost { first, tags });
            }
            Want::Pair { index, half } => {
                self.pairs[index].results[half] = Some(Err(()));
                self.end_pair(issue, index);
            }
            Want::Setup | Want::Other | Want::Refused(_) | Want::Abort | Want::AsyncEvent | Want::Leave => {}
        }
    }

    fn judge(&mut self, issue: &mut Issue<'_>, cid: usize, want: Want, status: Status, buf: Option<Buf>) {
        let is_ok = status.is_success();
        let is_aborted = status.code() == Status::ABORTED_BY_REQUEST;
        assert!(!is_aborted || self.is_abort_asked[cid], "aborted, but nobody asked");
        let is_excused = is_aborted || (issue.has_faults && is_disk_error(status));
        match want {
            Want::Read { first, count } => {
                issue.model.end_read(first, count);
                assert!(is_ok || is_excused, "read: {status}");
                if is_ok {
                    let bytes: Vec<u8> =
                        buf.iter().flat_map(|buf| buf.segments().flatten().copied()).collect();
                    assert_eq!(
                        bytes.len(),
                        count * issue.model.block_bytes,
                        "a read that succeeded is whole"
                    );
                    issue.model.judge(first, &bytes);
                }
            }
            Want::Write { first, tags } => {
                assert!(is_ok || is_excused, "write: {status}");
                if is_aborted {
                    issue.model.end_refused_write(first, tags.len());
                } else {
                    issue.model.end_write(first, &tags, is_ok);
                }
            }
            Want::Compare { first, count, is_same } => {
                issue.model.end_read(first, count);
                let is_difference = status.code() == Status::COMPARE_FAILURE;
                assert!(
                    is_excused || is_ok == is_same && is_difference != is_same,
                    "compare {is_same}: {status}"
                );
            }
            Want::Verify { first, count } => {
                issue.model.end_read(first, count);
                assert!(is_ok || is_excused, "verify: {status}");
            }
            Want::Copy { source, first, tags } => {
                issue.model.end_read(source, tags.len());
                assert!(is_ok || is_excused, "copy: {status}");
                if is_aborted {
                    issue.model.end_refused_write(first, tags.len());
                } else {
                    issue.model.end_write(first, &tags, is_ok);
                }
            }
            Want::Pair { index, half } => {
                self.pairs[index].results[half] = Some(Ok(status));
                self.end_pair(issue, index);
            }
            Want::Other => assert!(is_ok || is_excused, "{status}"),
            Want::Refused(expected) => {
                assert!(status.code() == expected || is_aborted, "refusal: {status}, not {expected}");
                assert!(status.is_dnr() || is_aborted, "a permanent refusal has DNR: {status}");
            }
            Want::Abort => assert!(is_ok, "abort: {status}"),
            Want::AsyncEvent => assert!(is_ok || is_aborted || status.code() == Status::ABORTED_SQ_DELETION),
            Want::Leave => assert!(is_ok, "leaving: {status}"),
            Want::Setup => {}
        }
    }

    fn end_pair(&mut self, issue: &mut Issue<'_>, index: usize) {
        let pair = &self.pairs[index];
        let [Some(compare), Some(write)] = pair.results else { return };
        let (block, tag) = (pair.block, pair.tag);
        match (compare, write) {
            (Ok(compare), Ok(write)) => {
                let is_done = compare.is_success() && write.is_success();
                assert_eq!(compare.is_success(), write.is_success(), "{compare} and {write}");
                if is_done {
                    assert!(pair.is_same, "compare-and-write succeeded on other content");
                    issue.model.end_write(block, &[tag], true);
                } else if compare.code() == Status::COMPARE_FAILURE {
                    assert!(!pair.is_same, "compare failed on equal content");
                    assert_eq!(write.code(), Status::ABORTED_FAILED_FUSED);
                    issue.model.end_refused_write(block, 1);
                } else {
                    issue.model.end_write(block, &[tag], false);
                }
            }
            _ => issue.lost.push(Lost { first: block, tags: vec![tag] }),
        }
    }

    /// Issue a command, or two, of a random kind if the queue has room.
    pub fn issue(&mut self, issue: &mut Issue<'_>) {
        if self.stage != Stage::Live || self.count() + 2 > usize::from(self.entries) - 1 {
            return;
        }
        if issue.leaves_permille > 0 && issue.rng.permille(issue.leaves_permille) {
            self.leave(issue);
            return;
        }
        if self.qid == 0 {
            self.issue_admin(issue);
            return;
        }
        // Few large ones among many small ones.
        let is_small = issue.blocks_max > 12 && issue.rng.permille(950);
        let count = issue.rng.size(1, if is_small { 12 } else { issue.blocks_max });
        let first = issue.rng.size(0, issue.model.len() - count);
        let Some(cid) = self.free_cid(issue.rng) else { return };
        match issue.rng.below(100) {
            0..35 => self.read(issue, cid, first, count),
            35..65 => self.write(issue, cid, first, count),
            65..70 => self.zero(issue, cid, first, count),
            70..75 => self.compare(issue, cid, first, count),
            75..80 => self.pair(issue, cid, first),
            80..84 => self.verify(issue, cid, first, count),
            84..88 => self.copy(issue, cid, first, count),
            88..91 => self.submit(
                cid,
                Sqe::flush(cid, issue.rng.pick(&[NSID, 0xffff_ffff])),
                Data::None,
                Want::Other,
            ),
            _ => self.wrong(issue, cid),
        }
    }

    /// Disconnect an I/O queue, or reset the controller, with commands outstanding: the target ends the
    /// connections.
    fn leave(&mut self, issue: &mut Issue<'_>) {
        let Some(cid) = self.free_cid(issue.rng) else { return };
        let sqe = match self.qid {
            0 => Sqe::property_set(cid, false, CC, 6 << 16 | 4 << 20),
            _ => Sqe::disconnect(cid),
        };
        self.stage = Stage::Leaving;
        self.wire.excuse();
        self.submit(cid, sqe, Data::None, Want::Leave);
    }

    fn read(&mut self, issue: &mut Issue<'_>, cid: u16, first: usize, count: usize) {
        if issue.model.try_read(first, count) {
            let buf = take(issue, count);
            let sqe = Sqe::read(cid, NSID, first as u64, blocks(count));
            self.submit(cid, sqe, Data::FromController(buf), Want::Read { first, count });
        }
    }

    fn write(&mut self, issue: &mut Issue<'_>, cid: u16, first: usize, count: usize) {
        if !issue.model.try_write(first, count) {
            return;
        }
        let tags: Vec<u64> = (0..count).map(|_| issue.model.fresh_tag()).collect();
        let buf = filled(issue, &tags);
        let sqe = Sqe::write(cid, NSID, first as u64, blocks(count), issue.rng.permille(200));
        self.submit(cid, sqe, Data::ToController(buf), Want::Write { first, tags });
    }

    fn zero(&mut self, issue: &mut Issue<'_>, cid: u16, first: usize, count: usize) {
        if !issue.model.try_write(first, count) {
            return;
        }
        let want = Want::Write { first, tags: vec![0; count] };
        if issue.rng.permille(500) {
            let sqe = Sqe::write_zeroes(cid, NSID, first as u64, blocks(count), issue.rng.permille(500));
            self.submit(cid, sqe, Data::None, want);
            return;
        }
        // Two adjacent ranges, of which the first may be empty.
        let split = issue.rng.size(0, count);
        let mut buf = issue.pool.take(32).expect("the hosts' pool is large");
        for (index, (at, blocks)) in [(first, split), (first + split, count - split)].into_iter().enumerate()
        {
            let mut range = [0; 16];
            range[4..8].copy_from_slice(&u32::try_from(blocks).expect("few").to_le_bytes());
            range[8..].copy_from_slice(&(at as u64).to_le_bytes());
            buf.copy_in(index * 16, &range);
        }
        let mut sqe = Sqe::dsm(cid, NSID, 2);
        sqe.cdw11.set(4);
        self.submit(cid, sqe, Data::ToController(buf), want);
    }

    fn compare(&mut self, issue: &mut Issue<'_>, cid: u16, first: usize, count: usize) {
        let content: Option<Vec<u64>> =
            (first..first + count).map(|block| issue.model.certain(block)).collect();
        let Some(mut tags) = content else { return };
        if !issue.model.try_read(first, count) {
            return;
        }
        let is_same = issue.rng.permille(700);
        if !is_same {
            let at = issue.rng.size(0, count - 1);
            tags[at] = issue.model.fresh_tag();
        }
        let buf = filled(issue, &tags);
        let sqe = Sqe::compare(cid, NSID, first as u64, blocks(count));
        self.submit(cid, sqe, Data::ToController(buf), Want::Compare { first, count, is_same });
    }

    fn pair(&mut self, issue: &mut Issue<'_>, cid: u16, block: usize) {
        let Some(old) = issue.model.certain(block) else { return };
        if !issue.model.try_write(block, 1) {
            return;
        }
        let is_same = issue.rng.permille(700);
        let expected = if is_same { old } else { issue.model.fresh_tag() };
        let tag = issue.model.fresh_tag();
        let index = self.pairs.len();
        self.pairs.push(Pair { block, tag, is_same, results: [None, None] });
        let compare = Sqe::compare(cid, NSID, block as u64, 1).with_fuse(Fuse::FIRST);
        let buf = filled(issue, &[expected]);
        self.submit(cid, compare, Data::ToController(buf), Want::Pair { index, half: 0 });
        let second = self.free_cid(issue.rng).expect("room for two was checked");
        let write = Sqe::write(second, NSID, block as u64, 1, false).with_fuse(Fuse::SECOND);
        let buf = filled(issue, &[tag]);
        self.submit(second, write, Data::ToController(buf), Want::Pair { index, half: 1 });
    }

    fn verify(&mut self, issue: &mut Issue<'_>, cid: u16, first: usize, count: usize) {
        if issue.model.try_read(first, count) {
            let sqe = Sqe::verify(cid, NSID, first as u64, blocks(count));
            self.submit(cid, sqe, Data::None, Want::Verify { first, count });
        }
    }

    fn copy(&mut self, issue: &mut Issue<'_>, cid: u16, first: usize, count: usize) {
        let source = issue.rng.size(0, issue.model.len() - count);
        let is_apart = source + count <= first || first + count <= source;
        let content: Option<Vec<u64>> =
            (source..source + count).map(|block| issue.model.certain(block)).collect();
        let (true, Some(tags)) = (is_apart, content) else { return };
        if !issue.model.try_read(source, count) {
            return;
        }
        if !issue.model.try_write(first, count) {
            issue.model.end_read(source, count);
            return;
        }
        let parts = if count > 1 { 2 } else { 1 };
        let split = if parts == 2 { issue.rng.size(1, count - 1) } else { count };
        let mut buf = issue.pool.take(32 * parts).expect("the hosts' pool is large");
        buf.clear();
        for (index, (at, blocks)) in
            [(source, split), (source + split, count - split)].into_iter().enumerate()
        {
            if blocks > 0 {
                buf.copy_in(index * 32 + 8, &(at as u64).to_le_bytes());
                buf.copy_in(index * 32 + 16, &u16::try_from(blocks - 1).expect("few").to_le_bytes());
            }
        }
        let sqe = Sqe::copy(cid, NSID, first as u64, u16::try_from(parts).expect("two"));
        self.submit(cid, sqe, Data::ToController(buf), Want::Copy { source, first, tags });
    }

    /// Commands that must be refused, each in its own way.
    fn wrong(&mut self, issue: &mut Issue<'_>, cid: u16) {
        let end = issue.model.len() as u64;
        let (sqe, data, status) = match issue.rng.below(7) {
            0 => (Sqe::read(cid, NSID, end, 1), 1, Status::LBA_OUT_OF_RANGE),
            1 => (Sqe::read(cid, NSID, u64::MAX, 2), 2, Status::LBA_OUT_OF_RANGE),
            2 => (Sqe::write_zeroes(cid, NSID, end - 1, 2, false), 0, Status::LBA_OUT_OF_RANGE),
            3 => (Sqe::read(cid, 7, 0, 1), 1, Status::INVALID_NAMESPACE_OR_FORMAT),
            4 => (Sqe::new(0x6e, cid, NSID), 0, Status::INVALID_OPCODE),
            5 => (Sqe::read(cid, NSID, 0, 2), 1, Status::DATA_SGL_LENGTH_INVALID),
            _ => (Sqe::read(cid, NSID, 0, 1).with_fuse(Fuse::FIRST), 1, Status::INVALID_FIELD),
        };
        let data = if data == 0 { Data::None } else { Data::FromController(take(issue, data)) };
        self.submit(cid, sqe, data, Want::Refused(status));
    }

    fn issue_admin(&mut self, issue: &mut Issue<'_>) {
        let Some(cid) = self.free_cid(issue.rng) else { return };
        let page = |issue: &Issue<'_>| {
            Data::FromController(issue.pool.take(4096).expect("the hosts' pool is large"))
        };
        match issue.rng.below(5) {
            0 => self.submit(cid, Sqe::keep_alive(cid), Data::None, Want::Other),
            1 => {
                let sqe = Sqe::identify(cid, nvme_spec::identify::Cns::CONTROLLER, 0, 0);
                self.submit(cid, sqe, page(issue), Want::Other);
            }
            2 => {
                let sqe = Sqe::get_log_page(cid, nvme_spec::log::LogId(1), 0xffff_ffff, 4096, 0, false);
                self.submit(cid, sqe, page(issue), Want::Other);
            }
            3 if !self.outstanding.iter().flatten().any(|want| matches!(want, Want::AsyncEvent)) => {
                self.submit(cid, Sqe::async_event_request(cid), Data::None, Want::AsyncEvent);
            }
            _ => {}
        }
    }

    /// Ask on this (admin) queue for an abort of a command of `other`.
    pub fn abort(&mut self, issue: &mut Issue<'_>, other: &mut Queue<W>) {
        let is_room = self.stage == Stage::Live && self.count() + 2 < usize::from(self.entries);
        let aborts = self.outstanding.iter().flatten().filter(|want| matches!(want, Want::Abort)).count();
        let victim = other.outstanding.iter().position(Option::is_some);
        let (Some(cid), Some(victim), true) = (self.free_cid(issue.rng), victim, is_room && aborts < 2)
        else {
            return;
        };
        other.is_abort_asked[victim] = true;
        let victim = u16::try_from(victim).expect("a cid");
        self.submit(cid, Sqe::abort(cid, other.qid, victim), Data::None, Want::Abort);
    }
}

fn take(issue: &Issue<'_>, count: usize) -> Buf {
    let bytes = u32::try_from(count * issue.model.block_bytes).expect("small");
    issue.pool.take(bytes).expect("the hosts' pool is large")
}

fn filled(issue: &Issue<'_>, tags: &[u64]) -> Buf {
    let mut buf = take(issue, tags.len());
    let mut block = vec![0; issue.model.block_bytes];
    for (index, tag) in tags.iter().enumerate() {
        fill(*tag, &mut block);
        buf.copy_in(index * issue.model.block_bytes, &block);
    }
    buf
}

fn blocks(count: usize) -> u32 {
    u32::try_from(count).expect("small")
}

fn is_path_error(status: Status) -> bool {
    status.sct() == nvme_spec::status::StatusType::PATH
}

fn is_disk_error(status: Status) -> bool {
    [
        Status::INTERNAL_ERROR,
        Status::UNRECOVERED_READ_ERROR,
        Status::WRITE_FAULT,
        Status::CAPACITY_EXCEEDED,
        Status::ABORTED_FAILED_FUSED,
    ]
    .contains(&status.code())
}
