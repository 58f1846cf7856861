//! Waiting on a queue pair: for any command, for one, for a group. A wait polls for a short time, which is
//! when most commands end, and then sleeps on the socket.

use std::time::Duration;

use spindle_reactor::clock::{Clock, Nanos};

use super::{Completion, Qpair, Ticket};
use crate::error::Loss;
use crate::group::Group;

/// How long a wait polls before it sleeps: a few round trips of a fast target.
const SPIN: Nanos = Nanos::from_us(50);

/// Why a wait ended without a completion.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum WaitError {
    /// The time is over; the command is outstanding still.
    #[error("no completion in {0:?}")]
    TimedOut(Duration),
    /// The connection ended, and commands are held for the next one.
    #[error("the connection ended ({0}), and the command waits for another")]
    Held(Loss),
    /// There is no such command: its completion was taken, or none is outstanding.
    #[error("there is nothing to wait for")]
    Nothing,
}

impl Qpair {
    /// Poll until `look` finds something, or it is no use to wait.
    fn wait_for<T>(
        &mut self,
        timeout: Duration,
        mut look: impl FnMut(&mut Qpair) -> Option<Result<T, WaitError>>,
    ) -> Result<T, WaitError> {
        let start = Clock::now();
        let deadline = start + Nanos::from(timeout);
        let mut now = start;
        let mut active = start;
        loop {
            if let Some(found) = look(self) {
                return found;
            }
            if self.poll(now) {
                active = now;
                continue;
            }
            if let Some(found) = look(self) {
                return found;
            }
            if let Some(loss) = self.loss() {
                return Err(WaitError::Held(loss));
            }
            now = Clock::now();
            if now >= deadline {
                return Err(WaitError::TimedOut(timeout));
            }
            if now - active >= SPIN {
                // In parts, so that a silent connection is noticed.
                let part = (deadline - now).min(Nanos::from_ms(100));
                self.link_mut().wait_io(part.as_duration(), None);
                now = Clock::now();
            }
        }
    }

    /// The next completion of any command.
    pub(crate) fn wait_any(&mut self, timeout: Duration) -> Result<Completion, WaitError> {
        self.wait_for(timeout, |queue| match queue.next_completion() {
            Some(completion) => Some(Ok(completion)),
            None => (queue.outstanding() == 0).then_some(Err(WaitError::Nothing)),
        })
    }

    /// The completion of this command.
    pub(crate) fn wait(&mut self, ticket: Ticket, timeout: Duration) -> Result<Completion, WaitError> {
        self.wait_for(timeout, |queue| {
            if !queue.is_done(ticket) {
                return None;
            }
            Some(queue.take(ticket).ok_or(WaitError::Nothing))
        })
    }

    /// Take the next completion of the group, in the order in which its commands were added.
    pub(crate) fn next_of(&mut self, group: &mut Group) -> Option<Completion> {
        while let Some(ticket) = group.first() {
            if !self.is_done(ticket) {
                return None;
            }
            group.forget_first();
            if let Some(completion) = self.take(ticket) {
                return Some(completion);
            }
            // Taken otherwise: the group goes on without it.
        }
        None
    }

    /// All completions of the group.
    pub(crate) fn wait_group(
        &mut self,
        group: &mut Group,
        timeout: Duration,
        mut each: impl FnMut(Completion),
    ) -> Result<(), WaitError> {
        self.wait_for(timeout, |queue| {
            while let Some(completion) = queue.next_of(group) {
                each(completion);
            }
            group.is_empty().then_some(Ok(()))
        })
    }
}
