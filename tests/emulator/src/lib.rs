//! An emulated NVMe controller in the process, stepped by its user, with fault injection.
//!
//! The [`Emulator`] is a [`Bus`] with one drive. Its [`Function`] has registers in plain memory, and accesses
//! the host's memory through checked translations. There is no thread: each [`Emulator::step`] reads the
//! registers, then executes and completes a bounded number of commands. The same calls have the same effects,
//! including faults: random choices depend only on the caller's seeds.
//!
//! ```text
//!   driver ── Bar (plain memory) ──┐                          ┌─ queues ─ held (faults) ─ io ─ medium
//!                                  ├─ step: registers ─ doorbells ─ commands
//!   test ───── Emulator (faults, ──┘                          └─ admin ─ identify, log
//!              medium, violations)     every DMA access: memory.rs; an invalid one is a violation
//! ```
//!
//! Used by tests, simulation, fuzzing and instruction counts of the driver. The emulator is strict where
//! drives are lenient: [`Emulator::violations`] counts the host's violations, such as invalid doorbell writes
//! and DMA to unmapped memory. [`Emulator::holds`] reports whether a buffer may be released.
//!
//! Not emulated: timing, interrupts, several controllers, other page sizes than 4 KiB, non-contiguous queues,
//! controller memory buffer, metadata, protection information, fused commands, reservations, namespace
//! management, firmware download, power states. A command or register value that needs one of them fails.
//! Blocks are kept in memory in chunks of 64 KiB, with the durable data of blocks in the volatile write
//! cache.
//!
//! In steady state without faults an I/O command does not allocate if its blocks were written before.

mod admin;
mod controller;
mod faults;
mod function;
mod held;
mod identify;
mod io;
mod log;
mod medium;
mod memory;
mod pointers;
mod queues;
mod registers;
mod spec;
#[cfg(test)]
#[expect(clippy::cast_possible_truncation, reason = "offsets of small memory")]
mod tests;

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use nvme_spec::admin::AsyncEvent;

use controller::{Controller, bar_bytes};
use faults::Random;
use spindle_nvme_pcie::Iova;

pub use faults::{Counters, Faults, Injection};
pub use log::Health;
pub use spec::{EmulatorSpec, NamespaceSpec, SglSupport};

#[expect(unused_imports, reason = "named in the documentation")]
use spindle_nvme_pcie::{Bus, Function};

/// An emulated drive at a PCI address. Clones refer to the same drive.
#[derive(Clone)]
pub struct Emulator {
    shared: Arc<Mutex<Controller>>,
}

impl Emulator {
    /// Creates a drive with all blocks deallocated, not opened yet.
    ///
    /// # Panics
    /// If `spec` violates the limits in the fields of [`EmulatorSpec`].
    #[must_use]
    pub fn new(spec: EmulatorSpec) -> Emulator {
        let mut controller = Controller::new(spec);
        controller.reset_function();
        Emulator { shared: Arc::new(Mutex::new(controller)) }
    }

    fn lock(&self) -> MutexGuard<'_, Controller> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Posts `cqe`, a completion without a command, in the next entry of completion queue `qid`, with the
    /// current phase tag. No effect if the queue does not exist or is full, or while the controller executes
    /// no commands. That is the case when it is not enabled, fatal, shut down or gone, or bus mastering is
    /// off.
    pub fn post(&self, qid: u16, cqe: nvme_spec::Cqe) {
        let mut controller = self.lock();
        if controller.can_work() && controller.host.is_bus_master {
            controller.post(qid, cqe);
        }
    }

    /// Overwrites entry `place`, modulo the queue size, of completion queue `qid`. No effect if the queue
    /// does not exist, or while the controller executes no commands (see [`Self::post`]).
    pub fn scribble(&self, qid: u16, place: u16, words: [u64; 2]) {
        let mut controller = self.lock();
        if controller.can_work() && controller.host.is_bus_master {
            controller.scribble(qid, place, words);
        }
    }

    /// Returns the 32-bit register at `offset` of the plugged drive. All ones if it does not exist, or the
    /// drive is gone.
    #[must_use]
    pub fn register(&self, offset: u32) -> u32 {
        self.lock().registers.load(u64::from(offset))
    }

    /// Writes the 32-bit register at `offset`, if it exists. The next step restores CAP, VS, CRTO and CSTS;
    /// while the drive is gone, it restores all ones.
    pub fn set_register(&self, offset: u32, value: u32) {
        self.lock().registers.store(u64::from(offset), value);
    }

    /// Does a bounded amount of work. Returns true if there was any. False does not mean that nothing
    /// remains: delayed commands and CSTS changes wait for a number of steps.
    pub fn step(&self) -> bool {
        self.lock().step()
    }

    /// Calls [`Self::step`] `count` times.
    pub fn steps(&self, count: u64) {
        for _ in 0..count {
            self.step();
        }
    }

    /// Returns the counts of commands, faults and other events since [`Self::new`].
    #[must_use]
    pub fn counters(&self) -> Counters {
        self.lock().counters
    }

    /// Returns the count of violations by the host: invalid writes of CC, AQA, ASQ, ACQ or doorbells; CIDs
    /// that are in use; reserved bits in Copy ranges; DMA that is not mapped for that access or while bus
    /// mastering is off.
    #[must_use]
    pub fn violations(&self) -> u64 {
        self.lock().host.violations()
    }

    /// Returns the description of the first violation; `None` if there was none.
    #[must_use]
    pub fn first_violation(&self) -> Option<String> {
        self.lock().host.first_violation().map(str::to_owned)
    }

    /// Returns true if the controller may still access memory in this IOVA range: a queue is there, or an
    /// uncompleted command points there that was fetched or whose doorbell was rung. Reads the tail
    /// doorbells. Always false while the controller cannot access memory: gone, disabled, or with bus
    /// mastering off.
    #[must_use]
    pub fn holds(&self, range: &Range<u64>) -> bool {
        self.lock().holds(range)
    }

    /// Returns the IOVA of an address of the process; `None` if it is not mapped.
    #[must_use]
    pub fn iova_of(&self, address: usize) -> Option<Iova> {
        self.lock().host.iova_of(address).map(Iova)
    }

    /// Returns the entries of a submission queue; `None` if it does not exist.
    #[must_use]
    pub fn queue_entries(&self, qid: u16) -> Option<u32> {
        let controller = self.lock();
        controller.sqs.get(usize::from(qid))?.as_ref().map(|sq| sq.entries)
    }

    /// Returns the count of DMA mappings that exist.
    #[must_use]
    pub fn mappings(&self) -> usize {
        self.lock().host.mappings()
    }

    /// Returns the total bytes of all mappings.
    #[must_use]
    pub fn mapped_bytes(&self) -> usize {
        self.lock().host.mapped_bytes()
    }

    /// Returns true if the function or a clone of its registers is in use.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.lock().holder.strong_count() != 0
    }

    /// Replaces the fault rates and restarts the random sequence from their seed.
    pub fn set_faults(&self, faults: Faults) {
        self.lock().faults.set(faults);
    }

    /// Queues a fault for an I/O command. The queued faults apply to the next I/O commands, one each, in the
    /// order of the calls.
    pub fn inject(&self, injection: Injection) {
        self.lock().faults.queued.push_back(injection);
    }

    /// Removes the queued faults for I/O commands.
    pub fn clear_injections(&self) {
        self.lock().faults.queued.clear();
    }

    /// Queues a fault for an admin command. The queued faults apply to the next admin commands other than
    /// Asynchronous Event Request, one each, in the order of the calls.
    pub fn inject_admin(&self, injection: Injection) {
        self.lock().faults.queued_admin.push_back(injection);
    }

    /// Limits later mappings: an area of more than `bytes` fails with ENOMEM. Unlike RLIMIT_MEMLOCK, the
    /// limit applies to each area.
    pub fn limit_maps(&self, bytes: usize) {
        self.lock().host.map_bytes_max = bytes;
    }

    /// Sets CSTS.CFS. The controller executes no commands until a reset.
    pub fn set_fatal(&self) {
        self.lock().set_fatal();
    }

    /// Makes the controller ignore CC until the function is reset (function level reset, opening, closing,
    /// plugging, power cut).
    pub fn freeze_registers(&self) {
        self.lock().freeze();
    }

    /// Makes the next `count` function level resets fail with EIO.
    pub fn fail_resets(&self, count: u32) {
        self.lock().failing_resets = count;
    }

    /// Requests the removal of the drive. The drive is removed when the function is next closed.
    pub fn ask_removal(&self) {
        self.lock().is_removal_asked = true;
    }

    /// Pulls the drive: its registers read as all ones, and it can be neither reset nor opened. Its blocks
    /// are kept. The volatile write cache is lost only if CSTS.CFS was set and
    /// [`EmulatorSpec::loses_cache_at_reset`], or by [`Self::power_cut`].
    pub fn vanish(&self) {
        self.lock().vanish();
    }

    /// Plugs the same drive in again. A function that is still open continues to read all ones, and must be
    /// closed before the drive can be opened again.
    pub fn plug(&self) {
        self.plug_into(None);
    }

    /// Plugs another drive in, with all blocks deallocated and new health values.
    ///
    /// # Panics
    /// As [`Self::new`].
    pub fn plug_other(&self, spec: EmulatorSpec) {
        self.plug_into(Some(spec));
    }

    /// Takes the link down, as with Downstream Port Containment (PCI Express 4.0 section 6.2.10) or link
    /// retraining. Has the effects of [`Self::vanish`] until [`Self::link_up`].
    pub fn link_down(&self) {
        self.vanish();
    }

    /// Brings the link up after a hot reset. An open function reads the registers of a disabled controller,
    /// and the drive cannot access memory until bus mastering is turned on. Loses the volatile write cache if
    /// [`EmulatorSpec::loses_cache_at_reset`].
    pub fn link_up(&self) {
        let mut controller = self.lock();
        controller.is_gone = false;
        controller.lose_cache();
        controller.reset_function();
        controller.host.is_bus_master = false;
    }

    fn plug_into(&self, spec: Option<EmulatorSpec>) {
        let mut controller = self.lock();
        controller.vanish();
        if let Some(spec) = spec {
            controller.replace(spec);
        }
        controller.stale = Arc::downgrade(&controller.registers);
        controller.registers = memory::Registers::new(bar_bytes(&controller.spec));
        controller.opening += 1;
        controller.host.unmap_all();
        controller.is_gone = false;
        controller.is_removal_asked = false;
        controller.reset_function();
    }

    /// Loses and restores power, and counts an unsafe shutdown and a power cycle. Each block in the volatile
    /// write cache is kept or lost at random from `seed`. The controller, unless it is gone, is as after a
    /// function level reset.
    pub fn power_cut(&self, seed: u64) {
        let mut controller = self.lock();
        let mut random = Random::new(seed);
        controller.media.iter_mut().for_each(|medium| medium.lose(&mut random));
        controller.health.unsafe_shutdowns += 1;
        controller.health.power_cycles += 1;
        if !controller.is_gone {
            controller.reset_function();
        }
    }

    /// Discards the volatile write cache, without any other effect.
    pub fn lose_write_cache(&self) {
        self.lock().media.iter_mut().for_each(medium::EmulatedMedia::lose_all);
    }

    /// Returns the newest data of blocks, as the Read command returns it.
    ///
    /// # Panics
    /// If the namespace or a block does not exist.
    #[must_use]
    pub fn read_medium(&self, nsid: u32, lba: u64, blocks: u64) -> Vec<u8> {
        let mut controller = self.lock();
        let medium = controller.blocks_of(nsid, lba, blocks);
        let mut found = Vec::new();
        medium.read_blocks(lba, blocks, |data| {
            found.extend_from_slice(data);
            true
        });
        found
    }

    /// Writes blocks durably, past the volatile write cache.
    ///
    /// # Panics
    /// If the namespace or a block does not exist, or `data` is not a multiple of the block size.
    pub fn write_medium(&self, nsid: u32, lba: u64, data: &[u8]) {
        let mut controller = self.lock();
        let block_bytes = u64::from(controller.blocks_of(nsid, lba, 0).block_bytes);
        let blocks = data.len() as u64 / block_bytes;
        assert_eq!(blocks * block_bytes, data.len() as u64, "whole blocks");
        let mut rest = data;
        controller.blocks_of(nsid, lba, blocks).change(lba, blocks, false, |place| {
            if let Some((here, after)) = rest.split_at_checked(place.len()) {
                place.copy_from_slice(here);
                rest = after;
            }
        });
    }

    /// Returns the values of the SMART log.
    #[must_use]
    pub fn health(&self) -> Health {
        self.lock().health.clone()
    }

    /// Changes the values of the SMART log, and raises a health event if a critical warning is set that the
    /// host enabled.
    pub fn set_health(&self, change: impl FnOnce(&mut Health)) {
        let mut controller = self.lock();
        change(&mut controller.health);
        controller.check_health();
    }

    /// Raises an asynchronous event. Returns false, without effect, if the host did not enable it
    /// (Asynchronous Event Configuration) or the controller is not enabled. An event that is pending already,
    /// or the 65th pending one, is dropped although the result is true.
    pub fn raise_event(&self, event: AsyncEvent) -> bool {
        self.lock().raise(event)
    }

    /// Formats a namespace with another block size and the same count of blocks, as another host could. All
    /// blocks read as zeroes. Raises a namespace event if the host enabled it.
    ///
    /// # Panics
    /// If the namespace does not exist, or the block size is not a power of two from 512 to 65,536.
    pub fn format_namespace(&self, nsid: u32, block_bytes: u32) {
        spec::assert_block_bytes(block_bytes);
        let mut controller = self.lock();
        let blocks = controller.blocks_of(nsid, 0, 0).blocks;
        *controller.blocks_of(nsid, 0, 0) = medium::EmulatedMedia::new(blocks, block_bytes, 0);
        let index = controller.namespace(nsid).expect("a namespace of the emulator");
        controller.spec.namespaces.get_mut(index).expect("a namespace").block_bytes = block_bytes;
        controller.note_changed(nsid);
    }

    /// Resizes a namespace to `blocks` logical blocks. Blocks beyond the new end are lost; new ones are
    /// deallocated. Raises a namespace event if the host enabled it.
    ///
    /// # Panics
    /// If the namespace does not exist.
    pub fn set_namespace_blocks(&self, nsid: u32, blocks: u64) {
        let mut controller = self.lock();
        controller.blocks_of(nsid, 0, 0).resize(blocks);
        controller.note_changed(nsid);
    }
}

impl Controller {
    fn blocks_of(&mut self, nsid: u32, lba: u64, blocks: u64) -> &mut medium::EmulatedMedia {
        let index = self.namespace(nsid).expect("a namespace of the emulator");
        let medium = self.media.get_mut(index).expect("each namespace has its medium");
        let end = lba.checked_add(blocks).expect("blocks of the namespace");
        assert!(end <= medium.blocks, "blocks up to {end} of a namespace of {}", medium.blocks);
        medium
    }
}
