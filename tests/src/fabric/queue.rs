//! One end's send queue as a device has it: in order, of limited length, its completions taken late.
//!
//! ```text
//!   post ──> waiting ── start ──> started ── acknowledge ──> done (completion, if asked) ── take ──> over
//!              SENDs are on the wire, WRITEs at the other side         READs have brought their data
//! ```

use std::collections::VecDeque;

use spindle_nvme_rdma::work::{Completion, Remote, Span};
use spindle_reactor::slab::Slot;

/// What a SEND carries.
#[derive(Debug, Default)]
pub(super) struct Message {
    pub(super) bytes: Vec<u8>,
    pub(super) invalidate: Option<u32>,
}

#[derive(Debug)]
pub(super) enum Carried {
    /// `None` once it is on the wire. `data`: so many bytes of the chain's buffer are in it.
    Send {
        message: Option<Message>,
        data: u32,
    },
    /// `sum`: of what is sent, if it is to be looked at again when it is acknowledged.
    Write {
        local: Span,
        remote: Remote,
        sum: Option<u64>,
        is_refused: bool,
    },
    Read {
        local: Span,
        remote: Remote,
    },
}

#[derive(Debug)]
pub(super) struct Posted {
    pub(super) chain: Slot,
    pub(super) carried: Carried,
    is_signalled: bool,
    serial: u64,
}

/// See the module.
#[derive(Debug)]
pub(super) struct SendQueue {
    capacity: u64,
    reads_max: usize,
    /// Not acknowledged, oldest first; how many of them are started.
    posted: VecDeque<Posted>,
    started: usize,
    /// With whose number it is, and whether a READ is over.
    done: VecDeque<(u64, bool, Completion)>,
    next: u64,
    /// All below it are known to be over: a completion says so for those before it.
    retired: u64,
    reads: usize,
    is_broken: bool,
}

impl SendQueue {
    pub(super) fn new(capacity: u32, reads_max: u32) -> SendQueue {
        SendQueue {
            capacity: u64::from(capacity),
            reads_max: reads_max as usize,
            posted: VecDeque::with_capacity(capacity as usize),
            started: 0,
            done: VecDeque::with_capacity(capacity as usize),
            next: 0,
            retired: 0,
            reads: 0,
            is_broken: false,
        }
    }

    /// Work requests that its owner has to count.
    pub(super) fn held(&self) -> u64 {
        self.next - self.retired
    }

    /// Nothing is left, and nothing is to be told.
    pub(super) fn is_idle(&self) -> bool {
        self.posted.is_empty() && self.done.is_empty()
    }

    /// Something is posted that is not acknowledged.
    pub(super) fn has_posted(&self) -> bool {
        !self.posted.is_empty()
    }

    pub(super) fn post(&mut self, chain: Slot, is_signalled: bool, carried: Carried) {
        assert!(self.held() < self.capacity, "more than {} work requests", self.capacity);
        if matches!(carried, Carried::Read { .. }) {
            self.reads += 1;
            assert!(self.reads <= self.reads_max, "more than {} READs", self.reads_max);
        }
        self.posted.push_back(Posted { chain, carried, is_signalled, serial: self.next });
        self.next += 1;
        if self.is_broken {
            self.flush();
        }
    }

    /// The next that begins to move.
    pub(super) fn start(&mut self) -> Option<&mut Posted> {
        let posted = self.posted.get_mut(self.started)?;
        self.started += 1;
        Some(posted)
    }

    /// The oldest that is started, which has been carried out if [`SendQueue::acknowledge`] follows.
    pub(super) fn front(&self) -> Option<&Posted> {
        self.posted.front().filter(|_| self.started > 0)
    }

    /// The oldest is over.
    pub(super) fn acknowledge(&mut self, is_ok: bool) {
        let Some(Posted { chain, carried, is_signalled, serial }) = self.posted.pop_front() else { return };
        self.started = self.started.saturating_sub(1);
        if is_signalled || !is_ok {
            let is_read = matches!(carried, Carried::Read { .. });
            self.done.push_back((serial, is_read, Completion { chain, is_signalled, is_ok }));
        }
        if !is_ok {
            self.flush();
        }
    }

    /// The error state: all that is posted fails, and all that will be.
    pub(super) fn flush(&mut self) {
        self.is_broken = true;
        for Posted { chain, carried, is_signalled, serial } in self.posted.drain(..) {
            let is_read = matches!(carried, Carried::Read { .. });
            self.done.push_back((serial, is_read, Completion { chain, is_signalled, is_ok: false }));
        }
        self.started = 0;
    }

    /// A completion.
    pub(super) fn take(&mut self) -> Option<Completion> {
        let (serial, is_read, completion) = self.done.pop_front()?;
        self.retired = serial + 1;
        self.reads -= usize::from(is_read);
        Some(completion)
    }
}
