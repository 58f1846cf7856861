//! Some commands of one queue, to be waited for together.

use std::collections::VecDeque;

use crate::qpair::Ticket;

/// Tickets in the order in which they were added. It can be used again when it is empty, without allocating.
#[derive(Debug, Clone, Default)]
pub struct Group {
    tickets: VecDeque<Ticket>,
}

impl Group {
    /// An empty group with room for `commands`.
    #[must_use]
    pub fn with_capacity(commands: usize) -> Group {
        Group { tickets: VecDeque::with_capacity(commands) }
    }

    /// Add a command.
    #[inline]
    pub fn add(&mut self, ticket: Ticket) {
        self.tickets.push_back(ticket);
    }

    /// How many commands of it were not given out yet.
    #[must_use]
    pub fn len(&self) -> usize {
        self.tickets.len()
    }

    /// True when all of its commands were given out.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.tickets.is_empty()
    }

    #[inline]
    pub(crate) fn first(&self) -> Option<Ticket> {
        self.tickets.front().copied()
    }

    #[inline]
    pub(crate) fn forget_first(&mut self) {
        self.tickets.pop_front();
    }
}
