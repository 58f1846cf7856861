//! The emulator allocates nothing for an I/O command in its steady state: what a counting allocator finds in
//! a test of the driver is the driver's.
#![forbid(unsafe_code)]

use std::sync::Arc;
use std::sync::atomic::Ordering;

use nvme_spec::pcie::{cq_head_doorbell, sq_tail_doorbell};
use nvme_spec::register::{ACQ, AQA, ASQ, Aqa, CC, CSTS, Cc, Csts};
use nvme_spec::zerocopy::IntoBytes;
use nvme_spec::{Sqe, Status};
use spindle_nvme_pcie::{Bar, Bus, DmaMemory};
use spindle_reactor::alloc_count::{CountingAllocator, allocations_here};
use spindle_tests_emulator::{Emulator, EmulatorSpec, NamespaceSpec};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

const ENTRIES: usize = 16;
/// Where the queues of a number lie: a page for each.
const QUEUE_WORDS: usize = 1024;
/// Data, behind the queues.
const DATA: u64 = 0x1_0000;

/// A host of the least: the admin queues and one pair of I/O queues.
struct Host {
    emulator: Emulator,
    bar: Bar,
    memory: Arc<DmaMemory>,
    /// Commands given so far, of both queues.
    given: [usize; 2],
}

impl Host {
    fn new(spec: EmulatorSpec) -> Host {
        let emulator = Emulator::new(spec);
        let function = emulator.open().expect("opens");
        function.set_bus_master(true).expect("on");
        let memory = DmaMemory::new(&*function, 1 << 20).expect("maps");
        let (bar, iova) = (function.bar(), memory.iova().0);
        bar.write32(u64::from(AQA), Aqa::new().with_asqs_z(15).with_acqs_z(15).into_bits());
        bar.write64(u64::from(ASQ), iova);
        bar.write64(u64::from(ACQ), iova + 4096);
        bar.write32(u64::from(CC), Cc::new().with_en(true).with_iosqes(6).with_iocqes(4).into_bits());
        while !Csts::from_bits(bar.read32(u64::from(CSTS))).rdy() {
            emulator.step();
        }
        let mut host = Host { emulator, bar, memory, given: [0; 2] };
        assert_eq!(host.run(0, &Sqe::create_io_cq(0, 1, 15, iova + 3 * 4096)), Status::SUCCESS);
        assert_eq!(host.run(0, &Sqe::create_io_sq(0, 1, 15, iova + 2 * 4096, 1)), Status::SUCCESS);
        host
    }

    /// Status of a command that is alone.
    fn run(&mut self, qid: usize, sqe: &Sqe) -> Status {
        let words = self.memory.words();
        let slot = self.given[qid] % ENTRIES;
        let phase = (self.given[qid] / ENTRIES).is_multiple_of(2);
        for (word, bytes) in words[qid * QUEUE_WORDS + slot * 8..].iter().zip(sqe.as_bytes().chunks_exact(8))
        {
            word.store(u64::from_le_bytes(bytes.try_into().expect("8 bytes")), Ordering::Relaxed);
        }
        self.given[qid] += 1;
        let next = u32::try_from(self.given[qid] % ENTRIES).expect("small");
        let id = u16::from(qid == 1);
        self.bar.write32(sq_tail_doorbell(id, 0), next);
        for _ in 0..100 {
            self.emulator.step();
            let second = words[qid * QUEUE_WORDS + 512 + slot * 2 + 1].load(Ordering::Acquire);
            let status = u16::try_from(second >> 48).expect("16 bits");
            if (status & 1 == 1) == phase {
                self.bar.write32(cq_head_doorbell(id, 0), next);
                return Status::from_wire(status);
            }
        }
        panic!("no completion of {sqe:?}");
    }
}

#[test]
fn an_io_command_allocates_nothing_once_its_blocks_were_written() {
    let namespaces = vec![NamespaceSpec { block_bytes: 512, blocks: 4096, ..NamespaceSpec::default() }];
    let spec = EmulatorSpec { namespaces, has_write_cache: true, ..EmulatorSpec::default() };
    let mut host = Host::new(spec);
    let data = host.memory.iova().0 + DATA;
    // A list of 31 pages for 64 KiB and 64 KiB of data; ranges of Dataset Management; a range of Copy.
    let list = data + 0x2_0000;
    let words = host.memory.words();
    let at = |iova: u64| usize::try_from(iova - host.memory.iova().0).expect("small") / 8;
    for page in 0..31 {
        words[at(list) + page].store(data + 4096 * (page as u64 + 1), Ordering::Relaxed);
    }
    words[at(list) + 64].store(8 << 32, Ordering::Relaxed);
    words[at(list) + 65].store(100, Ordering::Relaxed);
    let long = |sqe: Sqe| sqe.with_prp(data, list);
    let commands = [
        Sqe::write(0, 1, 3, 1, false).with_prp(data, 0),
        long(Sqe::write(0, 1, 60, 128, false)),
        long(Sqe::write(0, 1, 60, 128, true)),
        long(Sqe::read(0, 1, 60, 128)),
        long(Sqe::compare(0, 1, 60, 128)),
        Sqe::write_zeroes(0, 1, 60, 200, true).with_prp(0, 0),
        Sqe::dsm(0, 1, 1).with_prp(list + 512, 0),
        Sqe::copy(0, 1, 1000, 1).with_prp(list + 1024, 0),
        Sqe::verify(0, 1, 0, 1).with_prp(0, 0),
        Sqe::flush(0, 1).with_prp(0, 0),
        // And one that fails.
        Sqe::read(0, 1, 4096, 1).with_prp(data, 0),
    ];
    let round = |host: &mut Host| {
        let count = commands.iter().filter(|sqe| host.run(1, sqe).is_success()).count();
        assert_eq!(count, commands.len() - 1);
    };
    (0..3).for_each(|_| round(&mut host));
    let before = allocations_here();
    (0..100).for_each(|_| round(&mut host));
    assert_eq!(allocations_here() - before, 0);
    assert_eq!(host.emulator.first_violation(), None);
    // The counter counts: a write to a chunk that was never written allocates it.
    let before = allocations_here();
    assert!(host.run(1, &Sqe::write(0, 1, 3000, 1, false).with_prp(data, 0)).is_success());
    assert!(allocations_here() > before);
}
