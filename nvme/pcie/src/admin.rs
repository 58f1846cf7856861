//! [`Admin`]: the manager's admin queue pair. Commands are started, and their completions are taken later.

use std::cell::{Cell, RefCell};
use std::sync::Arc;

use nvme_spec::sqe::Sqe;
use nvme_spec::zerocopy::little_endian::U16;

use crate::bar::Bar;
use crate::dma::{DmaError, DmaMemory, Iova, PAGE_BYTES};
use crate::function::Function;
use crate::queue::{Completion, Layout, QueuePair};

/// Maximum number of commands in flight: one of the manager, Aborts, and an Asynchronous Event Request.
pub(crate) const ADMIN_DEPTH: u16 = 31;

enum Slot {
    Free,
    InFlight,
    Ended(Completion),
}

/// Identifies an admin command from `start` until its completion is taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Ticket(usize);

impl Ticket {
    /// Ticket of no command: `take` always returns `None` for it.
    pub(crate) const NONE: Ticket = Ticket(usize::MAX);
}

/// The admin queue pair and one data page, for one command with data at a time.
pub(crate) struct Admin {
    queue: RefCell<QueuePair>,
    slots: RefCell<Vec<Slot>>,
    memory: Arc<DmaMemory>,
    layout: Layout,
    /// Number of completions that matched no command.
    strays: Cell<u64>,
}

impl Admin {
    pub(crate) fn new(function: &dyn Function, bar: Bar, dstrd: u8) -> Result<Admin, DmaError> {
        let layout = Layout { sq_entries: ADMIN_DEPTH + 1, cq_entries: ADMIN_DEPTH + 1, list_pages: 1 };
        let memory = DmaMemory::new(function, layout.bytes())?;
        let queue = QueuePair::new(0, layout, Arc::clone(&memory), bar, dstrd);
        let slots = (0..ADMIN_DEPTH).map(|_| Slot::Free).collect();
        Ok(Admin {
            queue: RefCell::new(queue),
            slots: RefCell::new(slots),
            memory,
            layout,
            strays: Cell::new(0),
        })
    }

    /// Returns the memory of the queues and the data page, which the controller accesses while it is enabled.
    pub(crate) fn memory(&self) -> &Arc<DmaMemory> {
        &self.memory
    }

    /// Returns the IOVAs for ASQ and ACQ, and the number of entries of each queue.
    pub(crate) fn queue_addresses(&self) -> (Iova, Iova, u16) {
        let queue = self.queue.borrow();
        (queue.sq_iova(), queue.cq_iova(), self.layout.sq_entries)
    }

    pub(crate) fn data_iova(&self) -> Iova {
        self.memory.iova().plus(self.layout.list_offset(0) as u64)
    }

    /// Zeroes the data page, so that stale data is not read if the drive completes without writing.
    pub(crate) fn clear_data(&self) {
        let begin = self.layout.list_offset(0) / 8;
        for word in self.memory.words().iter().skip(begin).take(PAGE_BYTES as usize / 8) {
            word.store(0, std::sync::atomic::Ordering::Relaxed);
        }
    }

    /// Copies the data page to `to`, at most as many bytes as `to` has.
    pub(crate) fn data(&self, to: &mut [u8]) {
        self.memory.copy_out(self.layout.list_offset(0), to);
    }

    /// Submits a command whose CID is the index of a free slot. Returns `None` if each of the [`ADMIN_DEPTH`]
    /// slots has a command in flight or a completion that was not taken.
    pub(crate) fn start(&self, mut sqe: Sqe) -> Option<Ticket> {
        let mut slots = self.slots.borrow_mut();
        let index = slots.iter().position(|slot| matches!(slot, Slot::Free))?;
        *slots.get_mut(index)? = Slot::InFlight;
        // The index is below `ADMIN_DEPTH`.
        sqe.cid = U16::new(u16::try_from(index).unwrap_or(0));
        let mut queue = self.queue.borrow_mut();
        queue.push(sqe);
        queue.ring();
        Some(Ticket(index))
    }

    /// Moves completions from the queue to their slots, for `take`.
    pub(crate) fn poll(&self) {
        let mut queue = self.queue.borrow_mut();
        let mut slots = self.slots.borrow_mut();
        // Bounded: a drive that posts completions without end must not block the manager.
        for _ in 0..self.layout.cq_entries {
            let Some(completion) = queue.pop() else { break };
            match slots.get_mut(usize::from(completion.cid)) {
                Some(slot @ Slot::InFlight) if completion.sqid == 0 => *slot = Slot::Ended(completion),
                Some(Slot::Free | Slot::InFlight | Slot::Ended(_)) | None => {
                    self.strays.set(self.strays.get() + 1);
                }
            }
        }
        queue.acknowledge();
    }

    /// Returns the completion of a command once, and frees its slot. `None`: the command is in flight.
    pub(crate) fn take(&self, ticket: Ticket) -> Option<Completion> {
        let mut slots = self.slots.borrow_mut();
        let slot = slots.get_mut(ticket.0)?;
        let Slot::Ended(completion) = slot else { return None };
        let completion = *completion;
        *slot = Slot::Free;
        Some(completion)
    }

    pub(crate) fn strays(&self) -> u64 {
        self.strays.get()
    }
}
