//! vfio-check: tests the guarantees of `spindle_nvme_pcie::vfio` on a drive. For the lab.
//!
//! ```text
//! vfio-check ADDRESS             open, 1000 times Identify, reset, again, close, open again, and again
//! vfio-check ADDRESS ADDRESS     the same with two drives that share a container
//! vfio-check ADDRESS watch       Identify until the drive's removal is requested or it is gone; close it
//! vfio-check ADDRESS open        only open it: exit code 3 and the reason if that is refused
//! ```
//!
//! The drive must be bound to vfio-pci; nothing is written to its media.
#![forbid(unsafe_code)]

use std::error::Error;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::time::{Duration, Instant};

use nvme_spec::pcie::{cq_head_doorbell, sq_tail_doorbell};
use nvme_spec::register::{self, Aqa, Cap, Cc, Csts};
use nvme_spec::zerocopy::{FromBytes, IntoBytes};
use nvme_spec::{AdminOpcode, CQE_BYTES, Cqe, SQE_BYTES, Sqe, Status, identify::IdentifyController};
use spindle_nvme_pcie::{Bar, Bus, DmaMemory, Function, PciAddress, Vfio, VfioBus};
use spindle_reactor::mem::{Area, Buf, Pages};

type Outcome<T> = Result<T, Box<dyn Error>>;

const ROUNDS: u32 = 1000;
const ENTRIES: u16 = 32;
/// Offsets in the memory, after the submission queue: completion queue and data.
const CQ_AT: usize = 4096;
const DATA_AT: usize = 8192;
const MEMORY_BYTES: usize = 4 << 20;
/// Time limit of a command. An emulated drive may not run for seconds.
const PATIENCE: Duration = Duration::from_secs(20);

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let outcome = match words[..] {
        [address, "watch"] => watch(address),
        [address, "open"] => match open(&Vfio::new(), address) {
            Ok(_) => Ok(()),
            Err(error) => {
                println!("{error}");
                return ExitCode::from(3);
            }
        },
        [address] => prove(address),
        [first, second] => share(first, second),
        _ => Err("vfio-check ADDRESS [watch|open|ADDRESS]".into()),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("vfio-check: {error}");
            ExitCode::FAILURE
        }
    }
}

fn open(vfio: &Arc<Vfio>, address: &str) -> Outcome<Arc<dyn Function>> {
    let address: PciAddress = address.parse()?;
    let function = VfioBus::new(Arc::clone(vfio), address).open()?;
    function.set_bus_master(true)?;
    Ok(function)
}

/// Fails with `what` unless `holds`.
fn expect(holds: bool, what: &str) -> Outcome<()> {
    if holds { Ok(()) } else { Err(what.into()) }
}

fn prove(address: &str) -> Outcome<()> {
    let vfio = Vfio::new();
    let function = open(&vfio, address)?;
    let memory = DmaMemory::new(&*function, MEMORY_BYTES)?;
    let mut admin = Admin::enable(function.bar(), Arc::clone(&memory))?;
    admin.identify_many("opened", ROUNDS)?;
    refuse_to_write_zeroes(&*function, &mut admin)?;
    function.set_bus_master(false)?;
    expect(
        admin.identify_within(Duration::from_secs(2)).is_err(),
        "it reaches memory without bus mastering",
    )?;
    println!("cut off: Identify is not answered");
    function.reset()?;
    let csts = Csts::from(function.bar().read32(register::CSTS.into()));
    expect(!csts.rdy(), "it is ready after a reset")?;
    Admin::enable(function.bar(), Arc::clone(&memory))?.identify_many("reset", ROUNDS)?;
    // Dropped in the wrong order on purpose: a mapping may outlive its function.
    let mapping = function.map(&Area::zeroes())?;
    drop(admin);
    drop(function);
    let function = open(&vfio, address)?;
    drop((mapping, memory));
    let memory = DmaMemory::new(&*function, MEMORY_BYTES)?;
    Admin::enable(function.bar(), memory)?.identify_many("opened again", ROUNDS)?;
    expect(!function.is_removal_asked(), "it is wanted back")
}

/// Checks that the drive does not write to memory that is mapped read-only.
fn refuse_to_write_zeroes(function: &dyn Function, admin: &mut Admin) -> Outcome<()> {
    let mapping = function.map(&Area::zeroes())?;
    // The status is not checked: QEMU's drive reports success.
    let status = admin.identify_at(mapping.iova().0, PATIENCE)?;
    let zeroes = Buf::zeroes(4096);
    expect(zeroes.as_slice().is_some_and(|bytes| bytes.iter().all(|byte| *byte == 0)), "it wrote to zeroes")?;
    println!("Identify into memory that is mapped to be read: nothing was written; it says {status}");
    Ok(())
}

fn share(first: &str, second: &str) -> Outcome<()> {
    let vfio = Vfio::new();
    let functions = [open(&vfio, first)?, open(&vfio, second)?];
    let area = Area::map(MEMORY_BYTES, Pages::Huge)?;
    let mappings = [functions[0].map(&area)?, functions[1].map(&area)?];
    expect(mappings[0].iova() == mappings[1].iova(), "the same memory has two addresses")?;
    let [one, other] = functions;
    for (function, name) in [(&one, "first"), (&other, "second")] {
        let memory = DmaMemory::new(&**function, MEMORY_BYTES)?;
        Admin::enable(function.bar(), memory)?.identify_many(name, ROUNDS)?;
    }
    let [mapping, _kept] = mappings;
    drop((one, mapping));
    let memory = DmaMemory::new(&*other, MEMORY_BYTES)?;
    Admin::enable(other.bar(), memory)?.identify_many("second, without the first", ROUNDS)?;
    let one = open(&vfio, first)?;
    let memory = DmaMemory::new(&*one, MEMORY_BYTES)?;
    Admin::enable(one.bar(), memory)?.identify_many("first, come back to the second", ROUNDS)
}

fn watch(address: &str) -> Outcome<()> {
    let vfio = Vfio::new();
    let function = open(&vfio, address)?;
    let memory = DmaMemory::new(&*function, MEMORY_BYTES)?;
    let mut admin = Admin::enable(function.bar(), memory)?;
    println!("watching");
    let mut count = 0_u64;
    while !function.is_removal_asked() {
        match admin.identify_within(Duration::from_secs(2)) {
            Ok(_) => count += 1,
            Err(error) => {
                println!("after {count}: {error}");
                break;
            }
        }
    }
    let bar = function.bar();
    let began = Instant::now();
    while !function.is_removal_asked() {
        let _ = bar.read32(register::CSTS.into());
        expect(began.elapsed() < PATIENCE, "its removal is not asked for")?;
    }
    println!("asked after {} us", began.elapsed().as_micros());
    // Accesses that could raise SIGBUS once the drive is gone: registers, a page of them that was never
    // accessed, doorbells, configuration space, a reset; then all of them again after the reset.
    for round in 0..2 {
        let last = bar.bytes() as u64 - 4;
        let words = [register::CSTS.into(), register::CC.into(), last].map(|at| bar.read32(at));
        bar.write32(sq_tail_doorbell(0, 0), 0);
        let cut = function.set_bus_master(false);
        let reset = if round == 0 { function.reset() } else { Ok(()) };
        println!(
            "CSTS {:#x}, CC {:#x}, last word {:#x}; cut off: {cut:?}; reset: {reset:?}",
            words[0], words[1], words[2]
        );
    }
    drop(function);
    println!("let go of the function, registers still mapped");
    drop((admin, bar));
    println!("let go");
    Ok(())
}

/// The admin queue, polled, with one command at a time.
struct Admin {
    bar: Bar,
    memory: Arc<DmaMemory>,
    dstrd: u8,
    tail: u16,
    head: u16,
    phase: bool,
    cid: u16,
}

impl Admin {
    fn enable(bar: Bar, memory: Arc<DmaMemory>) -> Outcome<Admin> {
        memory.clear();
        let cap = Cap::from(bar.read64(register::CAP.into()));
        let patience = Duration::from_millis(cap.timeout_ms().into()).max(PATIENCE);
        bar.write32(register::CC.into(), 0);
        until(patience, "CSTS.RDY is not 0", || !csts(&bar).rdy())?;
        let aqa = Aqa::new().with_asqs_z(ENTRIES - 1).with_acqs_z(ENTRIES - 1);
        bar.write32(register::AQA.into(), aqa.into());
        bar.write64(register::ASQ.into(), memory.iova().0);
        bar.write64(register::ACQ.into(), memory.iova().plus(CQ_AT as u64).0);
        bar.write32(register::CC.into(), Cc::new().with_en(true).with_iosqes(6).with_iocqes(4).into());
        until(patience, "CSTS.RDY is not 1", || csts(&bar).rdy())?;
        Ok(Admin { bar, memory, dstrd: cap.dstrd(), tail: 0, head: 0, phase: true, cid: 0 })
    }

    fn identify_many(&mut self, when: &str, rounds: u32) -> Outcome<()> {
        let began = Instant::now();
        let mut names = None;
        for _ in 0..rounds {
            let now = self.identify_within(PATIENCE)?;
            expect(names.as_ref().is_none_or(|names| *names == now), "its names change")?;
            names = Some(now);
        }
        let (serial, model) = names.unwrap_or_default();
        let micros = began.elapsed().as_micros() / u128::from(rounds.max(1));
        println!("{when}: {rounds} times Identify, {micros} us each: serial {serial:?}, model {model:?}");
        expect(!serial.is_empty() && !model.is_empty(), "it has no names")
    }

    /// Serial number and model, freshly written by the drive.
    fn identify_within(&mut self, patience: Duration) -> Outcome<(String, String)> {
        let words = &self.memory.words()[DATA_AT / 8..(DATA_AT + 4096) / 8];
        words.iter().for_each(|word| word.store(u64::MAX, Ordering::Relaxed));
        let status = self.identify_at(self.memory.iova().plus(DATA_AT as u64).0, patience)?;
        expect(status.is_success(), &format!("Identify ended with {status}"))?;
        let mut bytes = [0; 4096];
        self.memory.copy_out(DATA_AT, &mut bytes);
        let data = IdentifyController::read_from_bytes(&bytes).map_err(|_| "Identify has 4096 bytes")?;
        Ok((data.serial().to_owned(), data.model().to_owned()))
    }

    fn identify_at(&mut self, address: u64, patience: Duration) -> Outcome<Status> {
        self.cid = self.cid.wrapping_add(1);
        let mut sqe = Sqe::new(AdminOpcode::IDENTIFY.0, self.cid, 0).with_prp(address, 0);
        sqe.cdw10 = 1.into();
        let slot = usize::from(self.tail) * SQE_BYTES / 8;
        for (word, bytes) in self.memory.words()[slot..].iter().zip(sqe.as_bytes().chunks_exact(8)) {
            word.store(u64::from_ne_bytes(bytes.try_into()?), Ordering::Relaxed);
        }
        self.tail = (self.tail + 1) % ENTRIES;
        // The entry is stored before its doorbell.
        fence(Ordering::Release);
        self.bar.write32(sq_tail_doorbell(0, self.dstrd), self.tail.into());
        let at = (CQ_AT + usize::from(self.head) * CQE_BYTES) / 8;
        let words: &[AtomicU64] = &self.memory.words()[at..at + 2];
        let phase = self.phase;
        let is_there = || (words[1].load(Ordering::Acquire) >> 48 & 1 == 1) == phase;
        until(patience, "Identify is not answered", is_there)?;
        let mut bytes = [0; CQE_BYTES];
        self.memory.copy_out(at * 8, &mut bytes);
        let cqe = Cqe::read_from_bytes(&bytes).map_err(|_| "a completion has 16 bytes")?;
        expect(cqe.cid() == self.cid, "an answer to something else")?;
        self.head = (self.head + 1) % ENTRIES;
        self.phase ^= self.head == 0;
        self.bar.write32(cq_head_doorbell(0, self.dstrd), self.head.into());
        Ok(cqe.status())
    }
}

fn csts(bar: &Bar) -> Csts {
    Csts::from(bar.read32(register::CSTS.into()))
}

fn until(patience: Duration, otherwise: &str, holds: impl Fn() -> bool) -> Outcome<()> {
    let began = Instant::now();
    while !holds() {
        expect(began.elapsed() < patience, otherwise)?;
        std::thread::yield_now();
    }
    Ok(())
}
