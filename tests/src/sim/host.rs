//! A host's queue: how it comes up, what it has outstanding, and how long that may last. `issue` makes the
//! commands, `answer` judges what became of them.

use nvme_spec::Sqe;
use nvme_spec::fabrics::{ConnectAttributes, ConnectData};
use nvme_spec::nqn::Nqn;
use nvme_spec::register::{CC, CSTS};
use nvme_spec::status::Status;
use nvme_spec::zerocopy::IntoBytes;
use spindle_nvme_optimistic::client::PageRange;
use spindle_nvme_transport::host::HostData;
use spindle_reactor::mem::Pool;

use super::carrier::{Carrier, Happened};
use super::counts::Counts;
use super::history::Time;
use super::optimistic::Client;
use super::place::SimNamespace;
use super::rng::Rng;

/// What a command's answer may be, and what it means for the blocks.
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
        /// It is to survive a power cut.
        is_durable: bool,
    },
    /// Success, Compare Failure, or an error of the disk.
    Compare {
        /// First block.
        first: usize,
        /// What is expected.
        tags: Vec<u64>,
    },
    /// The two halves of a fused pair, at this index of the queue's pairs.
    Pair {
        /// Which pair.
        index: usize,
        /// 0: Compare, 1: Write.
        half: usize,
    },
    /// Reads without data.
    Verify,
    /// Reads there, writes here.
    Copy {
        /// First block that is read.
        source: usize,
        /// First block that is written.
        first: usize,
        /// Blocks.
        count: usize,
        /// It is to survive a power cut.
        is_durable: bool,
    },
    /// What was acknowledged before is to survive a power cut.
    Flush {
        /// In all namespaces.
        is_all: bool,
    },
    /// No effect on content.
    Other,
    /// Exactly this refusal.
    Refused(Status),
    /// An Abort: success either way.
    Abort {
        /// The queue of its victim.
        qid: u16,
        /// Its victim.
        cid: u16,
    },
    /// Success, or the namespace has no cache now.
    Attach,
    /// Success: references of pages.
    References(PageRange),
    /// Held until the end.
    AsyncEvent,
    /// Disconnect or a reset.
    Leave,
}

/// A command in flight.
#[derive(Debug)]
pub struct Asked {
    /// What for.
    pub want: Want,
    /// Index of its namespace.
    pub place: usize,
    /// When it was sent.
    pub begin: Time,
    turn: u64,
    /// An Abort that names it is, or was, on its way.
    pub may_abort: bool,
}

/// A fused pair in flight.
#[derive(Debug)]
pub struct Pair {
    pub(super) place: usize,
    pub(super) block: usize,
    pub(super) expected: u64,
    pub(super) tag: u64,
    /// When both halves had been sent.
    pub(super) begin: Time,
    /// When the first was answered.
    pub(super) end: Option<Time>,
    pub(super) results: [Option<Result<Status, ()>>; 2],
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

/// Who connects to what.
pub struct Who<'a> {
    /// The host.
    pub nqn: &'a Nqn,
    /// Its identifier.
    pub id: [u8; 16],
    /// The subsystem.
    pub subsystem: &'a Nqn,
    /// SQ flow control is off.
    pub sq_flow_off: bool,
    /// Keep-alive time-out.
    pub kato_ms: u32,
    /// Its former associations of which the target has no connection any more.
    pub replaces: &'a [usize],
}

/// One queue of a host.
pub struct Queue<W> {
    /// Its identifier.
    pub qid: u16,
    /// Its connection.
    pub wire: W,
    /// Where it is.
    pub stage: Stage,
    /// What it belongs to.
    pub association: usize,
    /// Associations that are over for good once its Connect is answered.
    replaces: Vec<usize>,
    pub(super) entries: u16,
    pub(super) outstanding: Vec<Option<Asked>>,
    /// Commands that were answered.
    pub(super) answered: u64,
    /// Aborts that are on their way and name this identifier.
    aborts: Vec<u8>,
    pub(super) pairs: Vec<Pair>,
}

/// What all commands of a run share.
pub struct Issue<'a> {
    /// Chance.
    pub rng: &'a mut Rng,
    /// The namespaces.
    pub places: &'a mut [SimNamespace],
    /// The hosts' own buffers.
    pub pool: &'a Pool,
    /// The count of begins and ends.
    pub clock: &'a mut Time,
    /// When associations were replaced.
    pub closed: &'a mut [Time],
    /// Turns so far.
    pub turn: u64,
    /// Most blocks of a command.
    pub blocks_max: usize,
    /// Disks fail now and then.
    pub has_faults: bool,
    /// Completions so far.
    pub completed: &'a mut u64,
    /// What happened.
    pub counts: &'a mut Counts,
    /// The host's optimistic reads.
    pub client: &'a mut Client,
    /// Aborts that were answered: their victims.
    pub aborts_over: Vec<(u16, u16)>,
    /// A queue disconnects or resets its controller, in a thousand commands.
    pub leaves_permille: u64,
    /// This host disconnects a queue or resets its controller, or has lost one, or the target shuts down:
    /// what fails now may fail.
    pub is_leaving: bool,
}

impl Issue<'_> {
    /// Now, which nothing else is.
    pub fn tick(&mut self) -> Time {
        *self.clock += 1;
        *self.clock
    }
}

impl<W: Carrier> Queue<W> {
    /// A queue whose ICReq is about to leave.
    #[must_use]
    pub fn new(qid: u16, wire: W, entries: u16, association: usize) -> Queue<W> {
        Queue {
            qid,
            wire,
            stage: Stage::Initializing,
            association,
            replaces: Vec::new(),
            entries,
            outstanding: (0..entries).map(|_| None).collect(),
            answered: 0,
            aborts: vec![0; usize::from(entries)],
            pairs: Vec::new(),
        }
    }

    pub(super) fn free_cid(&self, rng: &mut Rng) -> Option<u16> {
        let start = rng.size(0, self.outstanding.len() - 1);
        let mut order = (start..self.outstanding.len()).chain(0..start);
        order.find(|cid| self.outstanding[*cid].is_none()).and_then(|cid| u16::try_from(cid).ok())
    }

    /// Commands in flight; one entry of a queue always stays free.
    pub(super) fn count(&self) -> usize {
        self.outstanding.iter().flatten().count()
    }

    pub(super) fn submit(
        &mut self,
        issue: &mut Issue<'_>,
        sqe: Sqe,
        data: HostData,
        place: usize,
        want: Want,
    ) {
        let begin = issue.tick();
        let cid = usize::from(sqe.cid());
        let (turn, may_abort) = (issue.turn, self.aborts[cid] > 0);
        self.wire.submit(sqe, data);
        self.outstanding[cid] = Some(Asked { want, place, begin, turn, may_abort });
    }

    /// An Abort that names this command is about to leave.
    pub(super) fn begin_abort(&mut self, cid: u16) {
        let cid = usize::from(cid);
        self.aborts[cid] += 1;
        if let Some(asked) = &mut self.outstanding[cid] {
            asked.may_abort = true;
        }
    }

    /// It was answered: what has this identifier from now on is not meant.
    pub fn end_abort(&mut self, cid: u16) {
        let left = &mut self.aborts[usize::from(cid)];
        *left = left.saturating_sub(1);
    }

    /// Every command is answered in the end.
    ///
    /// # Panics
    /// When one has waited for too long.
    pub fn check_age(&self, turn: u64, patience: u64) {
        for asked in self.outstanding.iter().flatten() {
            let is_held = matches!(asked.want, Want::AsyncEvent);
            assert!(
                is_held || turn - asked.turn < patience,
                "queue {} ({:?}): never answered: {asked:?}",
                self.qid,
                self.stage
            );
        }
    }

    fn connect(&mut self, issue: &mut Issue<'_>, who: &Who<'_>, cntlid: u16) {
        let data = ConnectData::new(who.id, cntlid, who.subsystem, who.nqn);
        let mut buf = issue.pool.take(1024).expect("the hosts' pool is large");
        buf.copy_in(0, data.as_bytes());
        let cattr = ConnectAttributes::new().with_disable_sq_flow_control(who.sq_flow_off);
        let kato_ms = if self.qid == 0 { who.kato_ms } else { 0 };
        let sqe = Sqe::connect(0, self.qid, self.entries - 1, kato_ms, cattr);
        self.stage = Stage::Connecting;
        self.replaces = if self.qid == 0 { who.replaces.to_vec() } else { Vec::new() };
        self.submit(issue, sqe, HostData::ToController(buf), 0, Want::Setup);
    }

    /// Pull the connection's events and judge them. `cntlid` is learnt from the admin queue.
    ///
    /// # Panics
    /// When an answer is not one that may come.
    pub fn on_events(&mut self, issue: &mut Issue<'_>, who: &Who<'_>, cntlid: &mut u16) {
        while let Some(event) = self.wire.next_event() {
            match event {
                Happened::Ready => {
                    let cntlid = if self.qid == 0 { 0xffff } else { *cntlid };
                    self.connect(issue, who, cntlid);
                }
                Happened::Completed { cid, cqe, buf, result } => {
                    let cid = usize::from(cid);
                    let asked = self.outstanding[cid].take().expect("an answer to nothing");
                    *issue.completed += 1;
                    self.answered += 1;
                    if self.stage == Stage::Dead || self.wire.is_gone() && result.is_err() {
                        self.on_lost(issue, asked);
                        continue;
                    }
                    let status = match result {
                        Ok(()) => Status::SUCCESS,
                        Err(status) if is_path_error(status) || issue.is_leaving => {
                            self.on_lost(issue, asked);
                            continue;
                        }
                        Err(status) => status,
                    };
                    if matches!(asked.want, Want::Setup) {
                        assert!(status.is_success(), "set-up in {:?}: {status}", self.stage);
                        self.go_on(issue, cqe.result_u32(), cntlid);
                        continue;
                    }
                    self.judge(issue, asked, (status, cqe.result_u64()), buf);
                }
                Happened::Closed => self.stage = Stage::Dead,
            }
        }
        self.wire.received();
    }

    /// The next step of bringing a queue up.
    fn go_on(&mut self, issue: &mut Issue<'_>, result: u32, cntlid: &mut u16) {
        match self.stage {
            Stage::Connecting if self.qid == 0 => {
                *cntlid = u16::try_from(result & 0xffff).expect("16 bits");
                let now = issue.tick();
                for old in self.replaces.drain(..) {
                    issue.closed[old] = issue.closed[old].min(now);
                }
                // CC: EN, IOSQES 6, IOCQES 4.
                self.stage = Stage::Enabling;
                let sqe = Sqe::property_set(0, false, CC, 1 | 6 << 16 | 4 << 20);
                self.submit(issue, sqe, HostData::None, 0, Want::Setup);
            }
            Stage::Enabling => {
                self.stage = Stage::Reading;
                self.submit(issue, Sqe::property_get(0, false, CSTS), HostData::None, 0, Want::Setup);
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
}

fn is_path_error(status: Status) -> bool {
    status.sct() == nvme_spec::status::StatusType::PATH
}
