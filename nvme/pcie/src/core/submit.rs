//! Submission of requests that are not one Read or Write command, and of those that must wait.

use spindle_reactor::mem::Buf;
use spindle_target_disk::{BlockRange, DiskError, Done, Op, Token};

use super::{NvmeChannel, Request, done_of};
use crate::core_queue::QueueCommand;
use crate::entry::Task;
use crate::rules::{Deallocating, Rules};

impl NvmeChannel {
    /// Submits a request that `start_whole` could not. Returns the result if it needs no command.
    #[inline(never)]
    pub(super) fn submit_other(
        &mut self,
        token: Token,
        task: Task,
        range: BlockRange,
        buf: Option<Buf>,
    ) -> Option<Done> {
        let lba = if task == Task::Op(Op::Flush) { self.changes } else { range.lba };
        let request = Request { token, task, remaining: range, lba, buf, outstanding: 0, result: Ok(()) };
        if let Some(result) = self.immediate_result(&request) {
            return Some(done_of(request, result));
        }
        // A core at rest must read the guard before its first command.
        self.wake_for_command();
        let is_next = self.pending.is_empty() && self.partial.is_empty();
        if is_next && self.requests.len() < self.requests_max && self.has_room() {
            self.begin_request(request);
        } else {
            self.pending.push_back(request);
        }
        None
    }

    #[inline]
    pub(super) fn rules(&self) -> &Rules {
        self.setup.as_ref().map_or(&self.rules, |setup| &setup.rules)
    }

    /// Returns the error of every new request under `Gone` and `Absent`; `None` under other queue commands.
    #[inline]
    pub(super) fn absence_error(&self) -> Option<DiskError> {
        match self.word.queue_command() {
            QueueCommand::Gone => Some(DiskError::Gone),
            QueueCommand::Absent => Some(DiskError::Internal),
            QueueCommand::Wait
            | QueueCommand::Go
            | QueueCommand::Stop
            | QueueCommand::Rewind
            | QueueCommand::Replay => None,
        }
    }

    /// Returns the result of a request that needs no command: a rejected or empty request, or a flush without
    /// a volatile write cache. Returns `None` for all others.
    #[inline]
    pub(super) fn immediate_result(&self, request: &Request) -> Option<Result<(), DiskError>> {
        if let Some(error) = self.absence_error() {
            return Some(Err(error));
        }
        let (is_empty, rules) = (request.remaining.blocks == 0, self.rules());
        let does = rules.abilities();
        match request.task {
            Task::Op(Op::Flush) => (!rules.has_volatile_cache).then_some(Ok(())),
            Task::Op(Op::Compare) if !does.compare => Some(Err(DiskError::NotSupported)),
            Task::Op(Op::Verify) if !does.verify => Some(Err(DiskError::NotSupported)),
            Task::Copy { .. } if !does.copy => Some(Err(DiskError::NotSupported)),
            Task::Op(Op::Read | Op::Write { .. } | Op::Compare) => {
                (is_empty || request.buf.is_none()).then_some(Err(DiskError::Internal))
            }
            Task::Op(Op::Deallocate) if !is_empty && rules.deallocating == Deallocating::No => {
                Some(Err(DiskError::NotSupported))
            }
            Task::Op(Op::WriteZeroes { .. } | Op::Deallocate | Op::Verify)
            | Task::DeallocateHint
            | Task::CompareAndWrite { .. }
            | Task::Copy { .. } => is_empty.then_some(Ok(())),
        }
    }
}
