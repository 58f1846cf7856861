//! The emulator: an NVMe controller inside of the process, stepped by its user, with faults.
//!
//! It is a [`Bus`] with one place. What is opened there is a [`Function`] like that of VFIO: registers in
//! plain memory, and memory of the host behind checked translations. It does nothing by itself: each
//! [`Emulator::step`] looks at the registers, takes a bounded number of commands, executes and completes
//! them. The same calls have the same effects, faults included; all chance comes from one seed.
//!
//! ```text
//!   driver ── Bar (plain memory) ──┐                          ┌─ queues ─ held (faults) ─ io ─ medium
//!                                  ├─ step: registers ─ doorbells ─ commands
//!   test ───── Emulator (faults, ──┘                          └─ admin ─ identify, log
//!              medium, judgement)      every access to memory: memory.rs, or a violation
//! ```
//!
//! What it is for: tests, simulation, fuzzing and counted instructions of the driver. It is strict where
//! drives are lenient: a host that does what no driver may (memory that is not mapped, a doorbell of no queue
//! or of a disabled controller, a wrong doorbell value, an identifier in use) is found in
//! [`Emulator::violations`]. It answers [`Emulator::holds`]: may this memory be given back?
//!
//! What it is not: no timing and no interrupts; one controller, memory pages of 4 KiB, queues that lie
//! together; no controller memory buffer, metadata, protection information, fused commands, reservations,
//! namespace management, firmware download, power states. What it does not have it refuses as the
//! specification says. Contents are kept in memory, 64 KiB at a time, and so is what was there before, for
//! what is in the volatile write cache.
//!
//! In the steady state without faults no I/O command allocates, once the blocks it touches were written once.

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

/// An emulated drive and its place. Clones are the same drive.
#[derive(Clone)]
pub struct Emulator {
    shared: Arc<Mutex<Controller>>,
}

impl Emulator {
    /// A drive that was just put in its place; all blocks are deallocated.
    ///
    /// # Panics
    /// When no drive could be as `spec` says; see the fields of [`EmulatorSpec`].
    #[must_use]
    pub fn new(spec: EmulatorSpec) -> Emulator {
        let mut controller = Controller::new(spec);
        controller.reset_function();
        Emulator { shared: Arc::new(Mutex::new(controller)) }
    }

    fn lock(&self) -> MutexGuard<'_, Controller> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A completion of the drive's own invention, at the place and with the phase of the next one. Nothing
    /// where the queue is not there or is full, or the drive cannot reach it.
    pub fn post(&self, qid: u16, cqe: nvme_spec::Cqe) {
        let mut controller = self.lock();
        if controller.can_work() && controller.host.is_bus_master {
            controller.post(qid, cqe);
        }
    }

    /// Any words at any place of a completion queue. Nothing where [`Self::post`] does nothing.
    pub fn scribble(&self, qid: u16, place: u16, words: [u64; 2]) {
        let mut controller = self.lock();
        if controller.can_work() && controller.host.is_bus_master {
            controller.scribble(qid, place, words);
        }
    }

    /// The register of 4 bytes at `offset`, as a driver reads it.
    #[must_use]
    pub fn register(&self, offset: u32) -> u32 {
        self.lock().registers.load(u64::from(offset))
    }

    /// A register reads so until the next step sets CAP, VS and CSTS to what they are.
    pub fn set_register(&self, offset: u32, value: u32) {
        self.lock().registers.store(u64::from(offset), value);
    }

    /// Do a bounded amount of work. True when there was any; false does not mean that there will be none:
    /// delayed commands and CSTS count steps.
    pub fn step(&self) -> bool {
        self.lock().step()
    }

    /// So many steps.
    pub fn steps(&self, count: u64) {
        for _ in 0..count {
            self.step();
        }
    }

    /// What was done, and what went wrong, since the beginning.
    #[must_use]
    pub fn counters(&self) -> Counters {
        self.lock().counters
    }

    /// How often the host did what no driver may, or had the controller try to.
    #[must_use]
    pub fn violations(&self) -> u64 {
        self.lock().host.violations()
    }

    /// The first of them, in words.
    #[must_use]
    pub fn first_violation(&self) -> Option<String> {
        self.lock().host.first_violation().map(str::to_owned)
    }

    /// Whether the controller may still access memory in this range of its addresses: a command in its hand
    /// (read from the queue, or in a queue whose doorbell was rung, and not completed) points there, or a
    /// queue lies there. Never while it cannot reach memory: gone, disabled, or with bus mastering off.
    #[must_use]
    pub fn holds(&self, range: &Range<u64>) -> bool {
        self.lock().holds(range)
    }

    /// Where the drive sees an address of the process, if it is mapped.
    #[must_use]
    pub fn iova_of(&self, address: usize) -> Option<Iova> {
        self.lock().host.iova_of(address).map(Iova)
    }

    /// Entries of a submission queue; `None` where there is none.
    #[must_use]
    pub fn queue_entries(&self, qid: u16) -> Option<u32> {
        let controller = self.lock();
        controller.sqs.get(usize::from(qid))?.as_ref().map(|sq| sq.entries)
    }

    /// How many mappings there are now.
    #[must_use]
    pub fn mappings(&self) -> usize {
        self.lock().host.mappings()
    }

    /// Bytes of all mappings.
    #[must_use]
    pub fn mapped_bytes(&self) -> usize {
        self.lock().host.mapped_bytes()
    }

    /// Whether somebody has the function open, or its registers.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.lock().holder.strong_count() != 0
    }

    /// From now on these faults, and chance from their seed.
    pub fn set_faults(&self, faults: Faults) {
        self.lock().faults.set(faults);
    }

    /// This goes wrong with the next I/O command that has no injection of its own yet.
    pub fn inject(&self, injection: Injection) {
        self.lock().faults.once.push_back(injection);
    }

    /// This goes wrong with the next admin command (Asynchronous Event Requests aside) that has no injection
    /// yet.
    pub fn inject_admin(&self, injection: Injection) {
        self.lock().faults.once_admin.push_back(injection);
    }

    /// To map an area of more than so many bytes fails from now on, as where the process may not lock it.
    pub fn limit_maps(&self, bytes: usize) {
        self.lock().host.map_bytes_max = bytes;
    }

    /// The controller sets CSTS.CFS and stops.
    pub fn set_fatal(&self) {
        self.lock().die();
    }

    /// CSTS does not follow CC any more, until a function level reset.
    pub fn freeze_registers(&self) {
        self.lock().freeze();
    }

    /// The next so many function level resets fail.
    pub fn fail_resets(&self, count: u32) {
        self.lock().failing_resets = count;
    }

    /// Somebody wants the drive back. Once the function is closed, the drive is gone.
    pub fn ask_removal(&self) {
        self.lock().is_removal_asked = true;
    }

    /// The drive is pulled: its registers read as ones, it can be neither reset nor opened. Its blocks stay
    /// as they are; see [`Self::power_cut`].
    pub fn vanish(&self) {
        self.lock().vanish();
    }

    /// The drive that was pulled is plugged again. Who has it open still sees ones, and has to let it go
    /// before it can be opened again.
    pub fn plug(&self) {
        self.plug_into(None);
    }

    /// Another drive is plugged in, with empty blocks.
    ///
    /// # Panics
    /// As [`Self::new`].
    pub fn plug_other(&self, spec: EmulatorSpec) {
        self.plug_into(Some(spec));
    }

    /// The link goes down: registers read as ones and nothing is done, but the kernel knows of no removal, as
    /// with Downstream Port Containment (PCI Express 4.0 section 6.2.10) or a link that is trained anew.
    pub fn link_down(&self) {
        self.vanish();
    }

    /// It is up again, after a hot reset: a driver that had the function open sees the registers of a
    /// disabled controller, and the drive reaches no memory before bus mastering is turned on.
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

    /// Power is lost and comes back: what is in the volatile write cache is kept or lost, each block by
    /// chance from `seed`; the controller is as after a function level reset.
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

    /// What is in the volatile write cache is lost, all of it, and nothing else happens.
    pub fn lose_write_cache(&self) {
        self.lock().media.iter_mut().for_each(medium::EmulatedMedia::lose_all);
    }

    /// The newest data of blocks, as a read would give it.
    ///
    /// # Panics
    /// When they are not all there.
    #[must_use]
    pub fn read_medium(&self, nsid: u32, lba: u64, blocks: u64) -> Vec<u8> {
        let mut controller = self.lock();
        let medium = controller.blocks_of(nsid, lba, blocks);
        let mut found = Vec::new();
        medium.look(lba, blocks, |data| {
            found.extend_from_slice(data);
            true
        });
        found
    }

    /// Set blocks, on the medium itself.
    ///
    /// # Panics
    /// When they are not all there, or `data` is not whole blocks.
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

    /// The health that the SMART log reports.
    #[must_use]
    pub fn health(&self) -> Health {
        self.lock().health.clone()
    }

    /// Change the health; raises the event that follows from it, if the host wants it.
    pub fn set_health(&self, change: impl FnOnce(&mut Health)) {
        let mut controller = self.lock();
        change(&mut controller.health);
        controller.check_health();
    }

    /// An asynchronous event. False where the host did not ask for its kind (Asynchronous Event
    /// Configuration) or the controller is not enabled: it is not reported then.
    pub fn raise_event(&self, event: AsyncEvent) -> bool {
        self.lock().raise(event)
    }

    /// A namespace is formatted by somebody else: it is empty, its blocks have another size; the host is told
    /// by an event, if it wants to know.
    ///
    /// # Panics
    /// When there is no such namespace.
    pub fn format_namespace(&self, nsid: u32, block_bytes: u32) {
        let mut controller = self.lock();
        let blocks = controller.blocks_of(nsid, 0, 0).blocks;
        *controller.blocks_of(nsid, 0, 0) = medium::EmulatedMedia::new(blocks, block_bytes, 0);
        let index = controller.namespace(nsid).expect("a namespace of the emulator");
        controller.spec.namespaces.get_mut(index).expect("a namespace").block_bytes = block_bytes;
        controller.note_changed(nsid);
    }

    /// A namespace has another size from now on; the host is told by an event, if it wants to know. What is
    /// beyond the new end is lost.
    ///
    /// # Panics
    /// When there is no such namespace.
    pub fn set_namespace_blocks(&self, nsid: u32, blocks: u64) {
        let mut controller = self.lock();
        controller.blocks_of(nsid, 0, 0).resize(blocks);
        controller.note_changed(nsid);
    }
}

impl Controller {
    /// The medium that a test names.
    fn blocks_of(&mut self, nsid: u32, lba: u64, blocks: u64) -> &mut medium::EmulatedMedia {
        let index = self.namespace(nsid).expect("a namespace of the emulator");
        let medium = self.media.get_mut(index).expect("each namespace has its medium");
        let end = lba.checked_add(blocks).expect("blocks of the namespace");
        assert!(end <= medium.blocks, "blocks up to {end} of a namespace of {}", medium.blocks);
        medium
    }
}
