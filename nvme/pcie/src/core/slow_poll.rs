//! The slow path of `poll`: sharers, guards, rest, and queue commands other than `Go`.

use spindle_target_disk::Done;

use super::NvmeChannel;
use crate::core_queue::QueueCommand;
use crate::shared_queue::SharedQueue;

impl NvmeChannel {
    /// Under `Go` and `Replay`, adds the sharers that the manager assigned since the last call, and checks
    /// the time limits of all sharers' commands.
    pub(super) fn take_sharers(&mut self) {
        if !matches!(self.word.queue_command(), QueueCommand::Go | QueueCommand::Replay) {
            return;
        }
        for sharer in self.core_queue.take_sharers() {
            let gone = &mut self.idle_shared_queue;
            let new_queue = || gone.take().unwrap_or_else(|| Box::new(SharedQueue::new()));
            self.shared_queue.get_or_insert_with(new_queue).add(sharer);
        }
        if let Some(shared) = &mut self.shared_queue {
            self.limit = 0;
            shared.check_timeouts(self.word.tick(), self.shared.limits(), &self.core_queue);
        }
    }

    /// Submits the sharers' commands and sets `limit` to the number of commands that remain for this core. No
    /// effect without sharers.
    fn forward(&mut self) {
        let (Some(shared), Some(setup)) = (&mut self.shared_queue, &mut self.setup) else { return };
        let own_wait = !self.pending.is_empty() || !self.partial.is_empty() || !self.retries.is_empty();
        shared.forward(&mut setup.queue, self.commands.len(), own_wait, self.word.tick());
        let depth = setup.queue.layout().depth();
        self.limit = shared.own_limit(depth);
        if shared.is_empty() {
            self.idle_shared_queue = self.shared_queue.take();
            self.limit = usize::from(depth);
        }
    }

    /// Polls with `limit` 0: the queue command is not `Go`, the core has sharers or compare-and-writes, a
    /// guard is active, or the core was at rest.
    #[cold]
    pub(super) fn poll_slow(&mut self, done: &mut Vec<Done>) -> bool {
        self.answer_guard();
        let is_busy = if self.word.queue_command() == QueueCommand::Go {
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
        self.submit_guarded();
        if let Some(setup) = &mut self.setup {
            setup.queue.ring();
        }
        self.take_completions(done);
        self.step_compare_and_write();
        self.forward();
        self.submit_guarded();
        if let Some(setup) = &mut self.setup {
            setup.queue.acknowledge();
            setup.queue.ring();
        }
        self.limit = self.limit_between();
        // Nothing wakes a sleeping core when a sharer submits.
        is_awake || self.shared_queue.is_some() || !self.finished.is_empty()
    }

    /// Polls under a queue command other than `Go`. Under `Replay`, repeats the commands from before the
    /// reset and submits the remaining blocks of begun requests.
    fn poll_stopped(&mut self, done: &mut Vec<Done>) -> bool {
        if self.word.queue_command() != QueueCommand::Replay {
            return !self.finished.is_empty();
        }
        let depth = self.setup.as_ref().map_or(0, |setup| setup.queue.layout().depth());
        self.limit = usize::from(depth);
        self.forward();
        self.submit_begun();
        self.take_completions(done);
        self.forward();
        self.submit_begun();
        self.limit = 0;
        if let Some(setup) = &mut self.setup {
            setup.queue.acknowledge();
            setup.queue.ring();
        }
        let is_replaying = self.commands.len() > 0 || !self.retries.is_empty() || !self.partial.is_empty();
        self.core_queue.set_replaying(is_replaying);
        // Nothing wakes a sleeping core when a sharer repeats its commands.
        is_replaying || self.shared_queue.is_some() || !self.finished.is_empty()
    }
}
