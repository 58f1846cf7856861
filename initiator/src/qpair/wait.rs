//! Waiting for one command. A wait polls for a short time, which is when most commands end, and then sleeps
//! on the socket.

use std::time::Duration;

use spindle_reactor::clock::{Clock, Nanos};

use super::{Completion, Qpair, Ticket};

/// How long a wait polls before it sleeps: a few round trips of a fast target.
const SPIN: Nanos = Nanos::from_us(50);

/// Why a wait ended without a completion.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum WaitError {
    /// The time is over; the command is outstanding still.
    #[error("no completion in {0:?}")]
    TimedOut(Duration),
    /// There is no such command: its completion was taken.
    #[error("there is nothing to wait for")]
    Nothing,
}

impl Qpair {
    /// The completion of this command.
    pub(crate) fn wait(&mut self, ticket: Ticket, timeout: Duration) -> Result<Completion, WaitError> {
        let mut now = Clock::now();
        let deadline = now + Nanos::from(timeout);
        let mut active = now;
        while !self.is_done(ticket) {
            if self.poll(now) {
                active = now;
                continue;
            }
            if self.is_done(ticket) {
                break;
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
        self.take(ticket).ok_or(WaitError::Nothing)
    }
}
