//! [`Controller`]: the state of the emulated controller, and its step.

use nvme_spec::pcie::{cq_head_doorbell, sq_tail_doorbell};
use nvme_spec::{Cqe, Sqe, Status};
use std::sync::{Arc, Weak};

use crate::admin::Admin;
use crate::faults::{Counters, FaultState, Injection};
use crate::held::Held;
use crate::identify::page;
use crate::log::Health;
use crate::medium::EmulatedMedia;
use crate::memory::{HostMemory, Registers};
use crate::pointers::Pointers;
use crate::queues::{Cq, Shadow, Sq};
use crate::registers::EnableState;
use crate::spec::EmulatorSpec;
use nvme_spec::identify::Dlfeat;

/// State of the drive, behind the emulator's lock.
pub(crate) struct Controller {
    pub(crate) spec: EmulatorSpec,
    /// Registers of the plugged drive, which a function maps when it is opened.
    pub(crate) registers: Arc<Registers>,
    /// Registers from before the last plug, while a function still has them mapped: all ones.
    pub(crate) stale: Weak<Registers>,
    pub(crate) host: HostMemory,
    /// Upgradable while the function or a clone of its registers is in use.
    pub(crate) holder: Weak<()>,
    /// Incremented when the function is opened and when a drive is plugged. A function that was opened with
    /// another value fails with ENODEV.
    pub(crate) opening: u64,
    pub(crate) is_gone: bool,
    pub(crate) is_removal_asked: bool,
    pub(crate) failing_resets: u32,
    /// The controller ignores CC.
    pub(crate) is_frozen: bool,
    pub(crate) enable_state: EnableState,
    pub(crate) is_fatal: bool,
    pub(crate) shutdown: Option<u64>,
    /// CSTS.SHST.
    pub(crate) shst: u8,
    /// CSTS reads as all ones before this step.
    pub(crate) ones_until: u64,
    /// Count of steps so far, the emulator's time.
    pub(crate) now: u64,
    pub(crate) sqs: Vec<Option<Sq>>,
    pub(crate) cqs: Vec<Option<Cq>>,
    /// Largest identifier of the queues created since the last reset.
    pub(crate) qid_max: u16,
    /// I/O queue pairs that the host may create.
    pub(crate) queue_pairs: u16,
    pub(crate) shadow: Option<Shadow>,
    pub(crate) admin: Admin,
    pub(crate) media: Vec<EmulatedMedia>,
    pub(crate) faults: FaultState,
    pub(crate) held: Vec<Held>,
    pub(crate) counters: Counters,
    pub(crate) health: Health,
    /// Scratch memory of the command being executed, like `page` and `copied`. Kept between commands, to
    /// avoid most allocations.
    pub(crate) pointers: Pointers,
    pub(crate) page: Box<[u8]>,
    pub(crate) copied: Vec<u8>,
}

/// Dword 0 of a successful completion, or the status of a command that failed.
pub(crate) type Outcome = Result<u32, Status>;

impl Controller {
    pub(crate) fn new(spec: EmulatorSpec) -> Controller {
        spec.assert_sane();
        let media = media(&spec);
        Controller {
            registers: Registers::new(bar_bytes(&spec)),
            stale: Weak::new(),
            host: HostMemory::new(),
            holder: Weak::new(),
            opening: 0,
            is_gone: false,
            is_removal_asked: false,
            failing_resets: 0,
            is_frozen: false,
            enable_state: EnableState::Disabled,
            is_fatal: false,
            shutdown: None,
            shst: 0,
            ones_until: 0,
            now: 0,
            sqs: Vec::new(),
            cqs: Vec::new(),
            qid_max: 0,
            queue_pairs: spec.queue_pairs,
            shadow: None,
            admin: Admin::new(),
            media,
            faults: FaultState::new(),
            held: Vec::new(),
            counters: Counters::default(),
            health: Health::default(),
            pointers: Pointers::default(),
            page: page(),
            copied: Vec::new(),
            spec,
        }
    }

    /// Replaces media, health and spec. The caller replaces the registers and resets the function.
    ///
    /// # Panics
    /// If `spec` is invalid.
    pub(crate) fn replace(&mut self, spec: EmulatorSpec) {
        spec.assert_sane();
        self.media = media(&spec);
        self.health = Health::default();
        self.spec = spec;
    }

    /// Does a bounded amount of work. Returns true if there was any.
    pub(crate) fn step(&mut self) -> bool {
        self.now += 1;
        if let Some(stale) = self.stale.upgrade() {
            stale.vanish();
        }
        if self.is_gone {
            self.registers.vanish();
            return false;
        }
        let mut has_worked = self.step_registers();
        if matches!(self.enable_state, EnableState::Disabling(_)) && self.host.is_bus_master {
            self.execute_late();
        }
        if self.can_work() {
            if self.host.is_bus_master {
                has_worked |= self.work();
            } else {
                self.counters.blocked += 1;
            }
        }
        has_worked
    }

    /// Returns true while the controller executes commands, provided that bus mastering is on.
    pub(crate) fn can_work(&self) -> bool {
        self.enable_state == EnableState::Ready && !self.is_fatal && !self.is_gone && self.shst == 0
    }

    fn work(&mut self) -> bool {
        let mut has_worked = !self.held.is_empty() && self.step_held();
        has_worked |= self.admin.has_events() && self.deliver_events();
        for qid in 0..=self.qid_max {
            self.read_head(qid);
            has_worked |= self.serve(qid);
        }
        if self.now.is_multiple_of(64) {
            self.check_stray_doorbells();
        }
        has_worked
    }

    /// Fetches and executes up to `commands_a_step` commands of one submission queue. Returns true if there
    /// was any, or if a fetch failed, which sets CSTS.CFS.
    fn serve(&mut self, qid: u16) -> bool {
        let is_given = self.read_tail(qid);
        let mut done = 0;
        while is_given && done < self.spec.commands_a_step && self.can_work() {
            let Some(Some(sq)) = self.sqs.get(usize::from(qid)) else { break };
            let (iova, cqid) = (sq.entry(sq.head), sq.cqid);
            if sq.head == sq.tail || !self.has_room(cqid) {
                break;
            }
            let Some(sqe) = self.host.fetch(iova) else {
                self.set_fatal();
                return true;
            };
            if let Some(Some(sq)) = self.sqs.get_mut(usize::from(qid)) {
                sq.head = sq.after(sq.head);
            }
            done += 1;
            if qid == 0 {
                self.counters.admin_commands += 1;
                self.take_admin(&sqe);
            } else {
                self.counters.commands += 1;
                self.take_io(qid, &sqe);
            }
        }
        self.sleep_until_doorbell(qid);
        done != 0
    }

    fn take_io(&mut self, sqid: u16, sqe: &Sqe) {
        if !self.held.is_empty() && self.is_held(sqid, sqe.cid()) {
            let cid = sqe.cid();
            self.host.record_violation(|| format!("queue {sqid}: CID {cid:#x} is already in use"));
            return self.end(sqid, sqe.cid(), Err(Status::COMMAND_ID_CONFLICT.dnr()));
        }
        match self.faults.next_io() {
            None => {
                let outcome = self.execute_io(sqe);
                self.end(sqid, sqe.cid(), outcome);
            }
            Some(injection) => self.inject(sqid, sqe, injection),
        }
    }

    fn take_admin(&mut self, sqe: &Sqe) {
        if sqe.admin_opcode() == nvme_spec::AdminOpcode::ASYNC_EVENT_REQUEST {
            return self.take_event_request(sqe);
        }
        let injection = self.faults.next_admin();
        match injection {
            None => {
                if let Some(outcome) = self.execute_admin(sqe) {
                    self.end(0, sqe.cid(), outcome);
                }
            }
            Some(Injection::Error(status)) => {
                self.counters.injected_errors += 1;
                self.end(0, sqe.cid(), Err(status));
            }
            Some(injection) => self.inject(0, sqe, injection),
        }
    }

    /// Executes an admin or I/O command. Always returns `Some`, as `execute_admin`.
    pub(crate) fn execute(&mut self, sqid: u16, sqe: &Sqe) -> Option<Outcome> {
        if sqid == 0 { self.execute_admin(sqe) } else { Some(self.execute_io(sqe)) }
    }

    /// Completes a command, later if the completion queue is full. Adds an error status to the error log.
    pub(crate) fn end(&mut self, sqid: u16, cid: u16, outcome: Outcome) {
        if let Err(status) = outcome {
            self.admin.note_error(sqid, cid, status);
        }
        if !self.complete(sqid, cid, outcome) {
            self.held.push(Held::completed(sqid, cid, outcome));
        }
    }

    /// Posts a completion. Returns false if the completion queue is full; true, without effect, if the
    /// submission queue does not exist any more.
    pub(crate) fn complete(&mut self, sqid: u16, cid: u16, outcome: Outcome) -> bool {
        let Some(Some(sq)) = self.sqs.get(usize::from(sqid)) else { return true };
        let (cqid, cqe) = (sq.cqid, sq.completion(cid, outcome));
        self.post(cqid, cqe)
    }

    /// Posts a completion queue entry with the current phase. Returns false if the queue is full; true,
    /// without effect, if it does not exist. Sets CSTS.CFS if its memory cannot be written.
    pub(crate) fn post(&mut self, cqid: u16, mut cqe: Cqe) -> bool {
        if !self.has_room(cqid) {
            return false;
        }
        let Some(Some(cq)) = self.cqs.get_mut(usize::from(cqid)) else { return true };
        let (iova, phase) = (cq.entry(), cq.phase);
        cq.advance();
        let status = cqe.status();
        cqe.set_status(status, phase);
        if self.host.post(iova, &cqe).is_none() {
            self.set_fatal();
            return true;
        }
        self.counters.completions += 1;
        self.counters.errors += u64::from(!status.is_success());
        true
    }

    /// Sets CSTS.CFS: no command is executed until a reset.
    pub(crate) fn set_fatal(&mut self) {
        if !self.is_fatal {
            self.is_fatal = true;
            self.counters.fatals += 1;
            self.report_status();
        }
    }

    pub(crate) fn vanish(&mut self) {
        if !self.is_gone {
            self.is_gone = true;
            self.counters.vanished += 1;
        }
        self.reset_controller();
        self.registers.vanish();
    }

    /// Records a violation and raises an error event for each write to a doorbell of a missing queue.
    pub(crate) fn check_stray_doorbells(&mut self) {
        for qid in 0..=self.spec.queue_pairs {
            let index = usize::from(qid);
            if !matches!(self.sqs.get(index), Some(Some(_))) {
                self.report_stray_doorbell(sq_tail_doorbell(qid, self.spec.dstrd), "the tail of no queue");
            }
            if !matches!(self.cqs.get(index), Some(Some(_))) {
                self.report_stray_doorbell(cq_head_doorbell(qid, self.spec.dstrd), "the head of no queue");
            }
        }
    }

    fn report_stray_doorbell(&mut self, offset: u64, what: &str) {
        if let Some(value) = self.registers.take_doorbell(offset) {
            self.host.record_violation(|| format!("doorbell {offset:#x} written with {value}: {what}"));
            self.raise_doorbell_error(false);
        }
    }
}

/// Returns the size of BAR 0 in bytes: as specified, else whole pages up to the last doorbell, at least two.
pub(crate) fn bar_bytes(spec: &EmulatorSpec) -> usize {
    if spec.bar_bytes != 0 {
        return spec.bar_bytes;
    }
    let end = cq_head_doorbell(spec.queue_pairs, spec.dstrd) + 4;
    usize::try_from(end.next_multiple_of(4096).max(8192)).unwrap_or(8192)
}

fn media(spec: &EmulatorSpec) -> Vec<EmulatedMedia> {
    let medium = |namespace: &crate::spec::NamespaceSpec| {
        let fill = if namespace.dlfeat.read_behavior() == Dlfeat::READS_ONES { 0xff } else { 0 };
        EmulatedMedia::new(namespace.blocks, namespace.block_bytes, fill)
    };
    spec.namespaces.iter().map(medium).collect()
}
