//! [`Admin`]: the admin queue, as the manager uses it: a command, its completion later.

use std::cell::{Cell, RefCell};
use std::sync::Arc;

use nvme_spec::sqe::Sqe;
use nvme_spec::zerocopy::little_endian::U16;

use crate::bar::Bar;
use crate::dma::{DmaError, DmaMemory, Iova, PAGE_BYTES};
use crate::function::Function;
use crate::queue::{Completion, Layout, QueuePair};

/// Commands in flight: one of ours, aborts, events.
pub(crate) const ADMIN_DEPTH: u16 = 31;

enum Slot {
    Free,
    Waits,
    Ended(Completion),
}

/// The name of an admin command in flight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Ticket(usize);

impl Ticket {
    /// Of no command: it never ends.
    pub(crate) const NONE: Ticket = Ticket(usize::MAX);
}

/// The admin queue. A page of it is the data of the command that has some; one at a time.
pub(crate) struct Admin {
    queue: RefCell<QueuePair>,
    slots: RefCell<Vec<Slot>>,
    memory: Arc<DmaMemory>,
    layout: Layout,
    /// Completions that named no command.
    strays: Cell<u64>,
}

impl Admin {
    pub(crate) fn new(function: &dyn Function, bar: Bar, dstrd: u8) -> Result<Admin, DmaError> {
        let layout = Layout { sq_entries: ADMIN_DEPTH + 1, cq_entries: ADMIN_DEPTH + 1, lists: 1 };
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

    /// What the controller accesses while it is enabled.
    pub(crate) fn memory(&self) -> &Arc<DmaMemory> {
        &self.memory
    }

    /// ASQ, ACQ, and the entries of each.
    pub(crate) fn place(&self) -> (Iova, Iova, u16) {
        let queue = self.queue.borrow();
        (queue.sq_iova(), queue.cq_iova(), self.layout.sq_entries)
    }

    /// Where data of a command goes: a page.
    pub(crate) fn data_iova(&self) -> Iova {
        self.memory.iova().plus(self.layout.list_offset(0) as u64)
    }

    /// Zero that page, so that a drive which answers without writing is not believed.
    pub(crate) fn clear_data(&self) {
        let begin = self.layout.list_offset(0) / 8;
        for word in self.memory.words().iter().skip(begin).take(PAGE_BYTES as usize / 8) {
            word.store(0, std::sync::atomic::Ordering::Relaxed);
        }
    }

    /// What the drive wrote there.
    pub(crate) fn data(&self, to: &mut [u8]) {
        self.memory.copy_out(self.layout.list_offset(0), to);
    }

    /// Give the drive a command; its CID is set here. `None` when too many are in flight.
    pub(crate) fn start(&self, mut sqe: Sqe) -> Option<Ticket> {
        let mut slots = self.slots.borrow_mut();
        let index = slots.iter().position(|slot| matches!(slot, Slot::Free))?;
        *slots.get_mut(index)? = Slot::Waits;
        // At most ADMIN_DEPTH.
        sqe.cid = U16::new(u16::try_from(index).unwrap_or(0));
        let mut queue = self.queue.borrow_mut();
        queue.push(sqe);
        queue.ring();
        Some(Ticket(index))
    }

    /// Take completions in.
    pub(crate) fn poll(&self) {
        let mut queue = self.queue.borrow_mut();
        let mut slots = self.slots.borrow_mut();
        // At most a queue of them: a drive that writes them without end does not keep the manager.
        for _ in 0..self.layout.cq_entries {
            let Some(completion) = queue.pop() else { break };
            match slots.get_mut(usize::from(completion.cid)) {
                Some(slot @ Slot::Waits) if completion.sqid == 0 => *slot = Slot::Ended(completion),
                Some(Slot::Free | Slot::Waits | Slot::Ended(_)) | None => {
                    self.strays.set(self.strays.get() + 1);
                }
            }
        }
        queue.acknowledge();
    }

    /// How a command ended, once.
    pub(crate) fn take(&self, ticket: Ticket) -> Option<Completion> {
        let mut slots = self.slots.borrow_mut();
        let slot = slots.get_mut(ticket.0)?;
        let Slot::Ended(completion) = slot else { return None };
        let completion = *completion;
        *slot = Slot::Free;
        Some(completion)
    }

    /// Completions that named no command.
    pub(crate) fn strays(&self) -> u64 {
        self.strays.get()
    }
}
