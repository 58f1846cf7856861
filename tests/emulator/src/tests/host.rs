//! A host made by hand: queues driven by bytes.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use nvme_spec::pcie::{cq_head_doorbell, sq_tail_doorbell};
use nvme_spec::register::{ACQ, AQA, ASQ, Aqa, CC, CSTS, Cc, Csts};
use nvme_spec::zerocopy::{FromBytes, IntoBytes};
use nvme_spec::{CQE_BYTES, Cqe, SQE_BYTES, Sqe, Status};
use spindle_nvme_pcie::{Bar, Bus, DmaMemory, Function};

use crate::{Emulator, EmulatorSpec};

/// Entries of the admin queues.
pub const ADMIN_ENTRIES: u32 = 16;
/// Bytes between the queues of two numbers: a submission queue of up to 1,024 entries, a completion queue.
const QUEUE_BYTES: u64 = 0x2_0000;
/// Bytes of data and lists.
pub const DATA_BYTES: usize = 8 << 20;
/// Most queue pairs that have a place.
const QUEUES: u64 = 8;

/// A queue pair as the host sees it.
#[derive(Clone, Debug)]
pub struct Pair {
    pub qid: u16,
    pub cqid: u16,
    pub sq_entries: u32,
    pub cq_entries: u32,
    pub tail: u32,
    pub head: u32,
    pub phase: bool,
    /// Rings the head doorbell after each completion.
    pub releases: bool,
}

pub struct Host {
    pub emulator: Emulator,
    pub function: Arc<dyn Function>,
    pub bar: Bar,
    pub dstrd: u8,
    /// Queues.
    pub queues: Arc<DmaMemory>,
    /// Data and lists.
    pub data: Arc<DmaMemory>,
    pub pairs: Vec<Option<Pair>>,
    next_cid: u16,
}

impl Host {
    /// A host of a drive that is enabled.
    pub fn new(spec: EmulatorSpec) -> Host {
        let mut host = Host::opened(&Emulator::new(spec.clone()), spec.dstrd);
        host.enable();
        host
    }

    /// A host of a drive that is enabled and has one pair of I/O queues of 64 entries.
    pub fn with_io(spec: EmulatorSpec) -> Host {
        let mut host = Host::new(spec);
        host.make_pair(1, 64);
        host
    }

    /// A host that has opened a drive.
    pub fn opened(emulator: &Emulator, dstrd: u8) -> Host {
        let function = emulator.open().expect("opens");
        function.set_bus_master(true).expect("on");
        let queues = DmaMemory::new(&*function, (QUEUE_BYTES * QUEUES) as usize).expect("maps");
        let data = DmaMemory::new(&*function, DATA_BYTES).expect("maps");
        let bar = function.bar();
        let pairs = vec![None; QUEUES as usize];
        Host { emulator: emulator.clone(), function, bar, dstrd, queues, data, pairs, next_cid: 0 }
    }

    /// Where the submission queue of a number lies.
    pub fn sq_iova(&self, qid: u16) -> u64 {
        self.queues.iova().0 + u64::from(qid) * QUEUE_BYTES
    }

    /// Where the completion queue of a number lies.
    pub fn cq_iova(&self, qid: u16) -> u64 {
        self.sq_iova(qid) + QUEUE_BYTES / 2
    }

    pub fn csts(&self) -> Csts {
        Csts::from_bits(self.bar.read32(u64::from(CSTS)))
    }

    pub fn set_cc(&self, cc: Cc) {
        self.bar.write32(u64::from(CC), cc.into_bits());
    }

    /// CC as a driver sets it.
    pub fn cc() -> Cc {
        Cc::new().with_en(true).with_iosqes(6).with_iocqes(4)
    }

    /// Set the admin queues up and CC.EN; then step until CSTS.RDY.
    pub fn enable(&mut self) {
        self.queues.clear();
        let z = (ADMIN_ENTRIES - 1) as u16;
        self.bar.write32(u64::from(AQA), Aqa::new().with_asqs_z(z).with_acqs_z(z).into_bits());
        self.bar.write64(u64::from(ASQ), self.sq_iova(0));
        self.bar.write64(u64::from(ACQ), self.cq_iova(0));
        self.pairs.fill(None);
        self.pairs[0] = Some(pair(0, 0, ADMIN_ENTRIES, ADMIN_ENTRIES));
        self.set_cc(Host::cc());
        self.wait(|host| host.csts().rdy());
    }

    /// Clear CC.EN, and step until CSTS.RDY is 0.
    pub fn disable(&mut self) {
        self.set_cc(Cc::new());
        self.wait(|host| !host.csts().rdy());
    }

    /// Step until something is so.
    pub fn wait(&self, is_so: impl Fn(&Host) -> bool) {
        for _ in 0..1000 {
            if is_so(self) {
                return;
            }
            self.emulator.step();
        }
        panic!("not so after 1000 steps: {:?}", self.csts());
    }

    /// Make the I/O queues of a number, of so many entries each.
    pub fn make_pair(&mut self, qid: u16, entries: u32) {
        let z = (entries - 1) as u16;
        let cq = Sqe::create_io_cq(0, qid, z, self.cq_iova(qid));
        assert_eq!(self.admin(cq).status(), Status::SUCCESS);
        let sq = Sqe::create_io_sq(0, qid, z, self.sq_iova(qid), qid);
        assert_eq!(self.admin(sq).status(), Status::SUCCESS);
        self.take_pair(pair(qid, qid, entries, entries));
    }

    /// Use queues that were made, from their beginning.
    pub fn take_pair(&mut self, pair: Pair) {
        for at in 0..pair.cq_entries * 2 {
            let word = (self.cq_iova(pair.cqid) - self.queues.iova().0) / 8 + u64::from(at);
            self.queues.words()[word as usize].store(0, Ordering::Relaxed);
        }
        let index = usize::from(pair.qid);
        self.pairs[index] = Some(pair);
    }

    pub fn pair(&mut self, qid: u16) -> &mut Pair {
        self.pairs[usize::from(qid)].as_mut().expect("a queue that was made")
    }

    /// Write an entry behind the last one, without a ring.
    pub fn put_entry(&mut self, qid: u16, sqe: &Sqe) {
        let tail = self.pair(qid).tail;
        let at = self.sq_iova(qid) - self.queues.iova().0 + u64::from(tail) * SQE_BYTES as u64;
        put(&self.queues, at as usize, sqe.as_bytes());
        let pair = self.pair(qid);
        pair.tail = (tail + 1) % pair.sq_entries;
    }

    pub fn ring_tail(&self, qid: u16, tail: u32) {
        self.bar.write32(sq_tail_doorbell(qid, self.dstrd), tail);
    }

    pub fn ring_head(&self, cqid: u16, head: u32) {
        self.bar.write32(cq_head_doorbell(cqid, self.dstrd), head);
    }

    /// Give a command; its identifier is a new one.
    pub fn submit(&mut self, qid: u16, mut sqe: Sqe) -> u16 {
        let cid = self.next_cid;
        self.next_cid = (cid + 1) % 0x1000;
        sqe.cid = cid.into();
        self.put_entry(qid, &sqe);
        let tail = self.pair(qid).tail;
        self.ring_tail(qid, tail);
        cid
    }

    /// The next completion, if it is there.
    pub fn poll(&mut self, qid: u16) -> Option<Cqe> {
        let pair = self.pair(qid).clone();
        let at = self.cq_iova(pair.cqid) - self.queues.iova().0 + u64::from(pair.head) * CQE_BYTES as u64;
        let word = at as usize / 8;
        let second = self.queues.words()[word + 1].load(Ordering::Acquire);
        let first = self.queues.words()[word].load(Ordering::Relaxed);
        let bytes = [first.to_ne_bytes(), second.to_ne_bytes()].concat();
        let cqe = Cqe::read_from_bytes(&bytes).expect("16 bytes");
        if cqe.phase() != pair.phase {
            return None;
        }
        let place = self.pair(qid);
        place.head += 1;
        if place.head == place.cq_entries {
            place.head = 0;
            place.phase = !place.phase;
        }
        let (head, releases) = (place.head, place.releases);
        if releases {
            self.ring_head(pair.cqid, head);
        }
        Some(cqe)
    }

    /// The completion of a command that is alone in its queue.
    pub fn run(&mut self, qid: u16, sqe: Sqe) -> Cqe {
        let cid = self.submit(qid, sqe);
        for _ in 0..1000 {
            if let Some(cqe) = self.poll(qid) {
                assert_eq!((cqe.cid(), cqe.sq_id.get()), (cid, qid), "the command's own");
                return cqe;
            }
            self.emulator.step();
        }
        panic!("no completion of {sqe:?} after 1000 steps");
    }

    /// The completion of an admin command. Its pointers stay as they are, its PSDT becomes that of PRPs.
    pub fn admin(&mut self, sqe: Sqe) -> Cqe {
        self.run(0, sqe.with_psdt(nvme_spec::sqe::Psdt::PRP))
    }

    /// Status of an I/O command in queue 1.
    pub fn io(&mut self, sqe: Sqe) -> Status {
        self.run(1, sqe).status()
    }

    /// The drive's address of byte `offset` of the data.
    pub fn at(&self, offset: u64) -> u64 {
        self.data.iova().0 + offset
    }

    /// Set bytes of the data.
    pub fn put(&self, offset: usize, bytes: &[u8]) {
        put(&self.data, offset, bytes);
    }

    /// Bytes of the data.
    pub fn get(&self, offset: usize, count: usize) -> Vec<u8> {
        let begin = offset / 8 * 8;
        let mut found = vec![0; offset - begin + count];
        self.data.copy_out(begin, &mut found);
        found.split_off(offset - begin)
    }

    /// Nothing was done that no driver may do.
    pub fn assert_clean(&self) {
        assert_eq!(self.emulator.first_violation(), None);
    }
}

/// A pair at its beginning.
pub fn pair(qid: u16, cqid: u16, sq_entries: u32, cq_entries: u32) -> Pair {
    Pair { qid, cqid, sq_entries, cq_entries, tail: 0, head: 0, phase: true, releases: true }
}

/// Set bytes of shared memory, at any offset.
pub fn put(memory: &DmaMemory, offset: usize, bytes: &[u8]) {
    for (at, byte) in (offset..).zip(bytes) {
        let word = &memory.words()[at / 8];
        let mut now = word.load(Ordering::Relaxed).to_ne_bytes();
        now[at % 8] = *byte;
        word.store(u64::from_ne_bytes(now), Ordering::Relaxed);
    }
}
