//! Turns of a core that are not the usual one: see [`NvmeCore::poll_apart`].

use spindle_disk::Done;

use super::NvmeCore;
use crate::core_queue::QueueCommand;
use crate::shared_queue::SharedQueue;

impl NvmeCore {
    /// Cores that are to use this one's queue pair from now on; and what takes too long of those that do.
    pub(super) fn take_sharers(&mut self) {
        if !matches!(self.word.order(), QueueCommand::Go | QueueCommand::Replay) {
            return;
        }
        for sharer in self.core_queue.take_sharers() {
            let gone = &mut self.shared_queue_gone;
            let again = || gone.take().unwrap_or_else(|| Box::new(SharedQueue::new()));
            self.shared_queue.get_or_insert_with(again).add(sharer);
        }
        if let Some(shared) = &mut self.shared_queue {
            self.limit = 0;
            shared.check_time(self.word.tick(), self.shared.limits(), &self.core_queue);
        }
    }

    /// Give the drive what cores without a queue have.
    fn forward(&mut self) {
        let (Some(shared), Some(setup)) = (&mut self.shared_queue, &mut self.setup) else { return };
        let own_wait = !self.pending.is_empty() || !self.partial.is_empty() || !self.again.is_empty();
        shared.forward(&mut setup.queue, self.commands.len(), own_wait, self.word.tick());
        let depth = setup.queue.layout().depth();
        self.limit = shared.rest(depth);
        if shared.is_empty() {
            self.shared_queue_gone = self.shared_queue.take();
            self.limit = usize::from(depth);
        }
    }

    /// A turn that is not the usual one: nothing is to be begun, others' commands are served as well, a
    /// compare-and-write is under way somewhere, or the core was at rest.
    #[cold]
    pub(super) fn poll_apart(&mut self, done: &mut Vec<Done>) -> bool {
        self.answer_guard();
        let is_busy = if self.word.order() == QueueCommand::Go {
            self.poll_going(done)
        } else {
            self.poll_stopped(done)
        };
        self.rest();
        is_busy
    }

    fn poll_going(&mut self, done: &mut Vec<Done>) -> bool {
        self.step_compare_and_write();
        let is_awake = self.wake_for_turn();
        let depth = self.setup.as_ref().map_or(0, |setup| setup.queue.layout().depth());
        self.limit = usize::from(depth);
        self.forward();
        self.step_apart();
        if let Some(setup) = &mut self.setup {
            setup.queue.ring();
        }
        self.take_completions(done);
        self.step_compare_and_write();
        self.forward();
        self.step_apart();
        if let Some(setup) = &mut self.setup {
            setup.queue.acknowledge();
            setup.queue.ring();
        }
        self.limit = self.limit_between();
        // Nothing would wake it when a sharer has a command.
        is_awake || self.shared_queue.is_some() || !self.ready.is_empty()
    }

    /// A turn in which the core does not work: nothing, or what was with the drive before it was reset.
    fn poll_stopped(&mut self, done: &mut Vec<Done>) -> bool {
        if self.word.order() != QueueCommand::Replay {
            return !self.ready.is_empty();
        }
        let depth = self.setup.as_ref().map_or(0, |setup| setup.queue.layout().depth());
        self.limit = usize::from(depth);
        self.forward();
        self.step_begun();
        self.take_completions(done);
        self.forward();
        self.step_begun();
        self.limit = 0;
        if let Some(setup) = &mut self.setup {
            setup.queue.acknowledge();
            setup.queue.ring();
        }
        let is_replaying = self.commands.len() > 0 || !self.again.is_empty() || !self.partial.is_empty();
        self.core_queue.set_replaying(is_replaying);
        // Nothing would wake it when a sharer repeats what it had.
        is_replaying || self.shared_queue.is_some() || !self.ready.is_empty()
    }
}
