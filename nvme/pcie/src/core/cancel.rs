//! Cancels the requests of an owner: `DiskChannel::cancel_owner`.

use spindle_target_disk::{BlockRange, DiskError, Owner, Token};

use super::{NvmeChannel, Request, done_of};
use crate::entry::Task;

impl NvmeChannel {
    /// Ends all requests of `owner` that have no command at the drive. Marks the others as cancelled, so that
    /// they submit no more commands. Returns the number of `owner`'s requests and results that remain.
    #[cold]
    pub(super) fn cancel_requests(&mut self, owner: Owner) -> usize {
        self.end_compare_and_writes(Some(owner), DiskError::Cancelled);
        for _ in 0..self.pending.len() {
            let Some(request) = self.pending.pop_front() else { break };
            if request.token.owner() == owner {
                self.finished.push_back(done_of(request, Err(DiskError::Cancelled)));
            } else {
                self.pending.push_back(request);
            }
        }
        self.mark_whole(owner);
        for index in 0..self.requests.capacity() {
            let Some(slot) = self.requests.slot_at(index) else { continue };
            let own = self.requests.get_mut(slot).filter(|request| request.token.owner() == owner);
            let Some(request) = own else { continue };
            request.remaining.blocks = 0;
            if request.result.is_ok() {
                request.result = Err(DiskError::Cancelled);
            }
            self.partial.retain(|partial| *partial != slot);
            if request.outstanding == 0
                && let Some(request) = self.requests.remove(slot)
            {
                let result = request.result;
                let done = self.finish_request(request, result);
                self.finished.extend(done);
            }
        }
        for _ in 0..self.retries.len() {
            let Some((due, part)) = self.retries.pop_front() else { break };
            match self.requests.get(part.request).map(|request| request.result) {
                Some(Err(error)) => {
                    let done = self.end_part(part.request, Err(error));
                    self.finished.extend(done);
                }
                Some(Ok(())) => self.retries.push_back((due, part)),
                None => {}
            }
        }
        let is_own = |token: Token| token.owner() == owner;
        self.requests.iter().filter(|(_, request)| is_own(request.token)).count()
            + self.finished.iter().filter(|done| is_own(done.token)).count()
    }

    /// Turns each whole-request command of `owner` into a request that ends as cancelled.
    fn mark_whole(&mut self, owner: Owner) {
        for slot in 0..self.commands.slots() {
            let Some(cid) = self.commands.cid_at(slot) else { continue };
            let whole = self.commands.find(cid).filter(|it| it.request.is_none());
            let Some(command) = whole.filter(|it| it.token.owner() == owner) else { continue };
            let (token, task) = (command.token, Task::Op(command.op));
            let BlockRange { lba, blocks } = command.range;
            let remaining = BlockRange { lba: lba + u64::from(blocks), blocks: 0 };
            let buf = command.buf.take();
            let result = Err(DiskError::Cancelled);
            // Does not fail: `requests` has a slot for every command.
            let request = Request { token, task, remaining, lba, buf, outstanding: 1, result };
            match self.requests.insert(request) {
                Ok(request) => command.request = Some(request),
                Err(request) => command.buf = request.buf,
            }
        }
    }
}
