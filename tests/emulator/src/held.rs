//! Held commands: fetched and not completed, as they are delayed, swallowed or dropped, or as the completion
//! queue is full.

use std::ops::Range;

use nvme_spec::{AdminOpcode, Sqe, Status};

use crate::controller::{Controller, Outcome};
use crate::faults::Injection;
use crate::pointers::Pointers;

/// Remaining work of a held command.
#[derive(Debug, Clone, Copy)]
enum HeldState {
    /// Execute and complete the command at this step.
    Execute(u64),
    /// Complete the command at this step.
    Complete(u64, Outcome),
    /// None, until an Abort or the deletion of its queue.
    Swallowed,
    /// None; an Abort does not find the command.
    Dropped,
}

/// A command that was fetched and not completed.
pub(crate) struct Held {
    sqid: u16,
    sqe: Sqe,
    state: HeldState,
    /// IOVA ranges of data and lists, which the host must not reuse yet. Empty if only the completion waits
    /// for room.
    memory: Vec<Range<u64>>,
}

impl Held {
    /// Returns a command that has ended and whose completion waits for room in the queue.
    pub(crate) fn completed(sqid: u16, cid: u16, outcome: Outcome) -> Held {
        let sqe = Sqe::new(0, cid, 0);
        Held { sqid, sqe, state: HeldState::Complete(0, outcome), memory: Vec::new() }
    }

    fn new(sqid: u16, sqe: &Sqe, state: HeldState, memory: Vec<Range<u64>>) -> Held {
        Held { sqid, sqe: *sqe, state, memory }
    }
}

impl Controller {
    /// Executes or completes held commands that are due. Returns true if there was any.
    pub(crate) fn step_held(&mut self) -> bool {
        let mut has_worked = false;
        let mut index = 0;
        while index < self.held.len() && self.can_work() {
            let now = self.now;
            let Some(held) = self.held.get(index) else { break };
            let (sqid, sqe) = (held.sqid, held.sqe);
            match held.state {
                HeldState::Execute(at) if at <= now => {
                    has_worked = true;
                    // Removed first: Abort and Delete I/O Submission Queue change the list.
                    self.held.remove(index);
                    match self.execute(sqid, &sqe) {
                        Some(outcome) => self.end(sqid, sqe.cid(), outcome),
                        None => continue,
                    }
                }
                HeldState::Complete(at, outcome) if at <= now => {
                    if self.complete(sqid, sqe.cid(), outcome) {
                        has_worked = true;
                        self.held.remove(index);
                    } else {
                        index += 1;
                    }
                }
                HeldState::Execute(_)
                | HeldState::Complete(..)
                | HeldState::Swallowed
                | HeldState::Dropped => index += 1,
            }
        }
        has_worked
    }

    /// Executes due commands after the host has cleared CC.EN, and drops their completions. A controller may
    /// do this until CSTS.RDY is 0.
    pub(crate) fn execute_late(&mut self) {
        for index in 0..self.held.len() {
            let Some(held) = self.held.get_mut(index) else { return };
            // Of the admin commands, only those with data are executed, as these change no other state.
            // Swallowed ones are executed too.
            let data = [AdminOpcode::IDENTIFY, AdminOpcode::GET_LOG_PAGE];
            let has_data = held.sqid == 0 && data.contains(&held.sqe.admin_opcode());
            let is_due = matches!(held.state, HeldState::Execute(at) if at <= self.now);
            if is_due && (held.sqid != 0 || has_data)
                || has_data && matches!(held.state, HeldState::Swallowed)
            {
                held.state = HeldState::Dropped;
                let (sqid, sqe) = (held.sqid, held.sqe);
                let _ = self.execute(sqid, &sqe);
            }
        }
    }

    /// Applies a fault to a command.
    pub(crate) fn inject(&mut self, sqid: u16, sqe: &Sqe, injection: Injection) {
        self.counters.note(injection);
        let cid = sqe.cid();
        match injection {
            Injection::Swallow => self.hold(sqid, sqe, HeldState::Swallowed),
            Injection::Drop => self.drop_completion(sqid, sqe),
            Injection::Delay { steps, is_executed_late } => {
                let at = self.now.saturating_add(steps.max(1));
                if is_executed_late {
                    self.hold(sqid, sqe, HeldState::Execute(at));
                } else if let Some(outcome) = self.execute(sqid, sqe) {
                    self.hold(sqid, sqe, HeldState::Complete(at, outcome));
                }
            }
            Injection::Error(status) => self.end(sqid, cid, Err(status)),
            Injection::WrongStatus(status) => {
                if self.execute(sqid, sqe).is_some() {
                    self.end(sqid, cid, Err(status));
                }
            }
            Injection::Fatal => {
                self.hold(sqid, sqe, HeldState::Swallowed);
                self.set_fatal();
            }
            Injection::Vanish => self.vanish(),
            Injection::Freeze => {
                self.freeze();
                if let Some(outcome) = self.execute(sqid, sqe) {
                    self.end(sqid, cid, outcome);
                }
            }
            Injection::Double | Injection::WrongCid | Injection::WrongSqid | Injection::WrongSqHead(_) => {
                self.inject_completion(sqid, sqe, injection);
            }
        }
    }

    /// Makes the controller ignore CC until `reset_function`.
    pub(crate) fn freeze(&mut self) {
        if !self.is_frozen {
            self.is_frozen = true;
            self.counters.freezes += 1;
        }
    }

    fn drop_completion(&mut self, sqid: u16, sqe: &Sqe) {
        // Determined before the execution, which may change the lists.
        let memory = self.memory_of(sqid, sqe);
        if self.execute(sqid, sqe).is_some() {
            self.held.push(Held::new(sqid, sqe, HeldState::Dropped, memory));
        }
    }

    /// Executes a command and posts a faulty completion for it.
    fn inject_completion(&mut self, sqid: u16, sqe: &Sqe, injection: Injection) {
        let cid = sqe.cid();
        if injection == Injection::WrongCid {
            let wrong = [cid ^ 0x8000, cid ^ 0x4000, 0xffff];
            let wrong = wrong.into_iter().find(|wrong| *wrong != cid && !self.is_held(sqid, *wrong));
            self.drop_completion(sqid, sqe);
            if let Some(wrong) = wrong {
                self.complete(sqid, wrong, Ok(0));
            }
            return;
        }
        let Some(outcome) = self.execute(sqid, sqe) else { return };
        let Some(Some(sq)) = self.sqs.get(usize::from(sqid)) else { return };
        let (cqid, mut cqe) = (sq.cqid, sq.completion(cid, outcome));
        if injection == Injection::WrongSqid {
            cqe.sq_id = (sqid ^ 0x55).into();
        } else if let Injection::WrongSqHead(head) = injection {
            cqe.sq_head = head.into();
        }
        // `serve` has found room for one completion; a second one may be lost.
        self.post(cqid, cqe);
        if injection == Injection::Double {
            self.post(cqid, cqe);
        }
    }

    fn hold(&mut self, sqid: u16, sqe: &Sqe, state: HeldState) {
        let memory = self.memory_of(sqid, sqe);
        self.held.push(Held::new(sqid, sqe, state, memory));
    }

    /// Returns true if a held command has this CID. Commands whose completion was dropped count: for the host
    /// they are in flight.
    pub(crate) fn is_held(&self, sqid: u16, cid: u16) -> bool {
        self.held.iter().any(|held| held.sqid == sqid && held.sqe.cid() == cid)
    }

    /// Returns the count of held admin commands with this opcode.
    pub(crate) fn held_of(&self, opcode: AdminOpcode) -> usize {
        let is_one = |held: &&Held| held.sqid == 0 && held.sqe.admin_opcode() == opcode;
        self.held.iter().filter(is_one).count()
    }

    /// Aborts a held command, executed or not. Returns false if there is none or its completion was dropped.
    pub(crate) fn abort_held(&mut self, sqid: u16, cid: u16) -> bool {
        let is_match = |held: &Held| {
            let is_found = !matches!(held.state, HeldState::Dropped);
            held.sqid == sqid && held.sqe.cid() == cid && is_found
        };
        let Some(index) = self.held.iter().position(is_match) else { return false };
        self.held.remove(index);
        self.counters.aborted += 1;
        self.end(sqid, cid, Err(Status::ABORTED_BY_REQUEST));
        true
    }

    /// Ends the held commands of a submission queue that is deleted. Dropped commands end without a
    /// completion.
    pub(crate) fn end_held_of(&mut self, sqid: u16) {
        let mut ended = Vec::new();
        self.held.retain(|held| {
            if held.sqid == sqid && !matches!(held.state, HeldState::Dropped) {
                ended.push(held.sqe.cid());
            }
            held.sqid != sqid
        });
        for cid in ended {
            // If the completion queue is full, the completion is lost with the queue.
            self.complete(sqid, cid, Err(Status::ABORTED_SQ_DELETION));
        }
    }

    /// Returns true if a queue overlaps `range`, or a held command points there, or a command that was not
    /// fetched but whose doorbell was rung. Always false while the controller cannot access memory.
    pub(crate) fn holds(&mut self, range: &Range<u64>) -> bool {
        if self.is_gone || !self.host.is_bus_master || self.sqs.is_empty() {
            return false;
        }
        let overlaps = |other: &Range<u64>| other.start < range.end && range.start < other.end;
        let span = |(base, bytes): (u64, u64)| base..base.saturating_add(bytes);
        if self.held.iter().any(|held| held.memory.iter().any(overlaps))
            || self.sqs.iter().flatten().any(|sq| overlaps(&span(sq.memory())))
            || self.cqs.iter().flatten().any(|cq| overlaps(&span(cq.memory())))
        {
            return true;
        }
        for sqid in 0..=self.qid_max {
            self.read_tail(sqid);
            let Some(Some(sq)) = self.sqs.get(usize::from(sqid)) else { continue };
            let (tail, mut at) = (sq.tail, sq.head);
            while at != tail {
                let Some(Some(sq)) = self.sqs.get(usize::from(sqid)) else { break };
                let entry = sq.entry(at);
                at = sq.after(at);
                let Some(sqe) = self.host.fetch(entry) else { break };
                if self.memory_of(sqid, &sqe).iter().any(overlaps) {
                    return true;
                }
            }
        }
        false
    }

    /// Returns the IOVA ranges of a command's data and lists; for Create I/O Queue, of the queue.
    fn memory_of(&mut self, sqid: u16, sqe: &Sqe) -> Vec<Range<u64>> {
        let bytes = if sqid == 0 { self.admin_bytes(sqe) } else { self.io_bytes(sqe) };
        let is_create = [AdminOpcode::CREATE_IO_CQ, AdminOpcode::CREATE_IO_SQ].contains(&sqe.admin_opcode());
        if sqid == 0 && is_create {
            let (base, _) = sqe.sgl.prp();
            let entry = if sqe.admin_opcode() == AdminOpcode::CREATE_IO_SQ { 64 } else { 16 };
            let entries = u64::from(nvme_spec::pcie::QueueCommand::new(sqe).entries());
            return std::iter::once(base..base.saturating_add(entries * entry)).collect();
        }
        let mut pointers = Pointers::default();
        // After an error, the ranges that were found before the error are used.
        let _ = pointers.resolve(&mut self.host, sqe, bytes, self.spec.sgl);
        let pieces = pointers.data.iter().chain(&pointers.lists);
        pieces.map(|piece| piece.iova..piece.iova.saturating_add(u64::from(piece.bytes))).collect()
    }
}
