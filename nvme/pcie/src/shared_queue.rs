//! [`SharedQueue`]: a drive's queue pair that several cores use.
//!
//! A drive may have fewer queue pairs than its namespaces need on all cores. A core without a queue pair, the
//! *sharer*, uses a queue pair in memory as if it were one of the drive. A core with a queue pair of the
//! drive, the *host*, serves its sharers in every poll, as the drive would:
//!
//! ```text
//!   sharer: push ─> entry ... ring ─> shadow doorbell          completion ─> pop
//!   host:   forward: the entry, under a CID of the host's ─> the drive's queue ─> complete: the sharer's CID
//! ```
//!
//! Each of the two queues has one writer and one reader, so no lock is needed. The doorbell is stored after
//! the entries (release) and loaded before them (acquire). The word with the phase is ordered in the same way
//! relative to the rest of a completion.
//!
//! Each sharer uses at most its share of the host's queue, so that neither host nor sharers starve. Sharers'
//! commands use CID slots that the host's own commands never use. The host checks the time limits of sharers'
//! commands, because a sharer's CIDs and queue identifier mean nothing to the drive.
//!
//! A host does not repeat its sharers' commands. Each sharer repeats its own, as after any reset.

use std::collections::VecDeque;
use std::sync::Arc;

use nvme_spec::CQE_BYTES;
use nvme_spec::status::Status;

use crate::commands::{COMMANDS_MAX, slot_of};
use crate::core_queue::CoreQueue;
use crate::dma::DmaMemory;
use crate::queue::{Layout, QueuePair, Shadow, Words};
use crate::shared::TickLimits;

/// Queue identifier of every sharer's queue pair, in its doorbells and completions.
pub(crate) const SHARER_QID: u16 = 1;
/// Maximum number of commands of all sharers of one host at the drive.
const SHARER_COMMANDS_MAX: u16 = 64;
/// Maximum number of commands of a core in flight, without those of sharers.
pub(crate) const OWN_COMMANDS_MAX: u32 = 959;
/// First CID slot of sharers' commands.
const FIRST_SLOT: u16 = 959;
const _: () = assert!(OWN_COMMANDS_MAX + 64 == COMMANDS_MAX, "a CID has slots for both");
/// CID step from one use of a slot to the next; see [`Commands`](crate::commands::Commands).
const GENERATION_STEP: u16 = 1 << 10;

/// The host's end of a sharer's queue pair.
pub(crate) struct Sharer {
    core_queue: Arc<CoreQueue>,
    memory: Arc<DmaMemory>,
    doorbells: Shadow,
    layout: Layout,
    sq_head: u16,
    cq_tail: u16,
    phase: bool,
    /// Number of commands of this sharer at the drive.
    in_flight: u16,
    /// Identifier of the sharer at its host, from 1; 0 before `SharedQueue::add`.
    number: u32,
}

impl Sharer {
    /// Creates the host's end of the queue pair in `memory`, which no other host has used.
    pub(crate) fn new(
        core_queue: &Arc<CoreQueue>,
        memory: &Arc<DmaMemory>,
        doorbells: &Shadow,
        layout: Layout,
    ) -> Sharer {
        core_queue.add_host();
        Sharer {
            core_queue: Arc::clone(core_queue),
            memory: Arc::clone(memory),
            doorbells: doorbells.clone(),
            layout,
            sq_head: 0,
            cq_tail: 0,
            phase: true,
            in_flight: 0,
            number: 0,
        }
    }

    /// Removes and returns the next entry before the sharer's shadow tail doorbell; `None` if there is none.
    fn take(&mut self) -> Option<Words> {
        if self.doorbells.tail(SHARER_QID) == self.sq_head {
            return None;
        }
        let words = self.layout.entry(&self.memory, self.sq_head)?;
        let next = self.sq_head + 1;
        self.sq_head = if next == self.layout.sq_entries { 0 } else { next };
        Some(words)
    }

    /// Posts a completion to the sharer. The queue has room: its entries outnumber the sharer's commands.
    fn complete(&mut self, cid: u16, result: u64, status: Status) {
        let status = status.to_wire(self.phase);
        let [h0, h1] = self.sq_head.to_le_bytes();
        let [q0, q1] = SHARER_QID.to_le_bytes();
        let [c0, c1] = cid.to_le_bytes();
        let [s0, s1] = status.to_le_bytes();
        let word = u64::from_le_bytes([h0, h1, q0, q1, c0, c1, s0, s1]);
        self.layout.put_completion(&self.memory, self.cq_tail, result, word);
        let next = self.cq_tail + 1;
        if next == self.layout.cq_entries {
            (self.cq_tail, self.phase) = (0, !self.phase);
        } else {
            self.cq_tail = next;
        }
    }
}

impl Drop for Sharer {
    fn drop(&mut self) {
        self.core_queue.drop_host();
    }
}

const _: () = assert!(CQE_BYTES == 16, "two words, of which the second has the phase");

/// A sharer's command at the drive.
struct Forwarded {
    sharer: u32,
    cid: u16,
    tick: u32,
    is_abort_requested: bool,
}

/// A CID slot of a host. The CID changes with each use.
struct CommandSlot {
    cid: u16,
    command: Option<Forwarded>,
}

/// The sharers of one host core, and their commands at the drive.
pub(crate) struct SharedQueue {
    sharers: Vec<Sharer>,
    slots: Vec<CommandSlot>,
    free: VecDeque<u16>,
    /// Index of the sharer that the next `forward` serves first.
    first: usize,
    /// Identifier of the sharer that was added last.
    count: u32,
    /// A sharer's command was submitted since a slot was last reserved for the host's own commands.
    has_begun: bool,
}

impl SharedQueue {
    pub(crate) fn new() -> SharedQueue {
        let slot = |index| CommandSlot { cid: FIRST_SLOT + index, command: None };
        SharedQueue {
            sharers: Vec::new(),
            slots: (0..SHARER_COMMANDS_MAX).map(slot).collect(),
            free: (0..SHARER_COMMANDS_MAX).collect(),
            first: 0,
            count: 0,
            has_begun: false,
        }
    }

    pub(crate) fn add(&mut self, mut sharer: Sharer) {
        self.count = self.count.wrapping_add(1);
        sharer.number = self.count;
        self.sharers.push(sharer);
    }

    /// Returns the number of commands of all sharers at the drive.
    fn in_flight(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Returns the maximum number of commands of one sharer at the drive, at least 1.
    fn share(&self, depth: u16) -> u16 {
        let sharers = u16::try_from(self.sharers.len()).unwrap_or(u16::MAX);
        let each = SHARER_COMMANDS_MAX / sharers.max(1);
        (depth / sharers.saturating_add(1)).min(each).max(1)
    }

    /// Returns the maximum number of commands of the host's own at the drive.
    pub(crate) fn own_limit(&self, depth: u16) -> usize {
        let (depth, share) = (usize::from(depth), usize::from(self.share(depth)));
        let kept = (self.sharers.len() * share).min(depth.saturating_sub(1));
        depth.saturating_sub(kept.max(self.in_flight()))
    }
}

impl SharedQueue {
    pub(crate) fn is_empty(&self) -> bool {
        self.sharers.is_empty()
    }

    /// Removes closed sharers without commands at the drive. Submits the commands of the others round-robin,
    /// each up to its share, as many as fit beside the host's `own` commands at the drive. If the host has no
    /// command there but some wait (`own_wait`), host and sharers alternate for the last slot.
    pub(crate) fn forward(&mut self, queue: &mut QueuePair, own: usize, own_wait: bool, tick: u32) {
        self.sharers.retain(|sharer| sharer.in_flight > 0 || !sharer.core_queue.is_closed());
        let (depth, count) = (queue.layout().depth(), self.sharers.len());
        let share = self.share(depth);
        let is_own_turn = own_wait && own == 0 && std::mem::take(&mut self.has_begun);
        let room = usize::from(depth).saturating_sub(own + usize::from(is_own_turn));
        for at in 0..count {
            let index = (self.first + at) % count;
            let Some(sharer) = self.sharers.get_mut(index) else { break };
            // Entries in the queue of a closed sharer are not submitted.
            while sharer.in_flight < share && !sharer.core_queue.is_closed() {
                if self.slots.len() - self.free.len() >= room {
                    break;
                }
                let Some(slot) = self.free.front().copied() else { break };
                let Some(words) = sharer.take() else { break };
                let Some(slot) = self.slots.get_mut(usize::from(slot)) else { break };
                self.free.pop_front();
                sharer.in_flight += 1;
                self.has_begun = true;
                let (sharer, cid) = (sharer.number, cid_of(&words));
                slot.command = Some(Forwarded { sharer, cid, tick, is_abort_requested: false });
                queue.push_words(with_cid(words, slot.cid));
            }
        }
        self.first = if count == 0 { 0 } else { (self.first + 1) % count };
    }

    /// Posts a completion to its sharer, if the sharer still exists. Returns false if no sharer's command has
    /// this CID.
    #[cold]
    #[inline(never)]
    pub(crate) fn complete(&mut self, cid: u16, result: u64, status: Status) -> bool {
        let Some(index) = slot_of(cid).checked_sub(usize::from(FIRST_SLOT)) else { return false };
        let Some(slot) = self.slots.get_mut(index).filter(|slot| slot.cid == cid) else { return false };
        let Some(command) = slot.command.take() else { return false };
        slot.cid = slot.cid.wrapping_add(GENERATION_STEP);
        self.free.extend(u16::try_from(index));
        if let Some(sharer) = self.sharers.iter_mut().find(|sharer| sharer.number == command.sharer) {
            sharer.in_flight -= 1;
            sharer.complete(command.cid, result, status);
        }
        true
    }

    /// Requests an Abort for each sharer's command older than `command_ticks`, and a controller reset if the
    /// command has not ended `abort_ticks` later.
    pub(crate) fn check_timeouts(&mut self, now: u32, limits: TickLimits, host: &CoreQueue) {
        for slot in &mut self.slots {
            let Some(command) = &mut slot.command else { continue };
            let age = now.wrapping_sub(command.tick);
            if age > limits.command_ticks && !command.is_abort_requested {
                command.is_abort_requested = true;
                host.request_abort(slot.cid);
            } else if age > limits.command_ticks.saturating_add(limits.abort_ticks) {
                host.request_reset();
            }
        }
    }
}

/// Returns the CID of a submission queue entry (bytes 2 and 3).
fn cid_of(words: &Words) -> u16 {
    let [first, ..] = words;
    let [_, _, c0, c1, ..] = first.to_le_bytes();
    u16::from_le_bytes([c0, c1])
}

fn with_cid(words: Words, cid: u16) -> Words {
    let [first, rest @ ..] = words;
    let [a, b, _, _, e, f, g, h] = first.to_le_bytes();
    let [c0, c1] = cid.to_le_bytes();
    let [r1, r2, r3, r4, r5, r6, r7] = rest;
    [u64::from_le_bytes([a, b, c0, c1, e, f, g, h]), r1, r2, r3, r4, r5, r6, r7]
}
