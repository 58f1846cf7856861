//! [`Commands`]: the commands of one core in flight, by command identifier.
//!
//! A CID is `generation (6 bits) | slot (10 bits)`. Each use of a slot has the next generation, so that a
//! duplicate or late completion matches no command until the slot was used 64 times. Entries are written and
//! read in place, because every I/O uses this table.

use spindle_reactor::mem::Buf;
use spindle_reactor::slab::Slot;
use spindle_target_disk::{BlockRange, Op, Token};

/// Maximum number of commands in flight. A CID has 10 bits for the slot; slot 1023 is not used, because CID
/// FFFFh is reserved.
pub(crate) const COMMANDS_MAX: u32 = 1023;

const SLOT_MASK: u16 = 0x3ff;
/// Marks the end of the free list.
const NO_SLOT: u16 = u16::MAX;

#[inline]
pub(crate) fn slot_of(cid: u16) -> usize {
    usize::from(cid & SLOT_MASK)
}

pub(crate) struct Command {
    /// The request of which this command is a part. With `None`, the command is a whole request, described by
    /// `token`, `op`, `range` and `buf`.
    pub(crate) request: Option<Slot>,
    pub(crate) token: Token,
    pub(crate) op: Op,
    pub(crate) range: BlockRange,
    pub(crate) buf: Option<Buf>,
    /// Number of submissions to the drive, from 1.
    pub(crate) tries: u8,
    pub(crate) is_abort_requested: bool,
    /// The command is a whole-request write without FUA. A power loss may undo the write until a flush.
    pub(crate) needs_flush: bool,
    /// Manager tick of the last submission.
    pub(crate) tick: u32,
}

struct Entry {
    command: Command,
    /// CID of the command, or of the next command in this slot.
    cid: u16,
    /// Next slot of the free list, while the entry is free.
    next: u16,
    is_busy: bool,
}

pub(crate) struct Commands {
    /// Slots that were ever used; grows to `capacity`.
    entries: Vec<Entry>,
    capacity: usize,
    free: u16,
    len: usize,
}

impl Commands {
    /// Creates an empty table with `capacity` slots, at most [`COMMANDS_MAX`]. No other function allocates.
    pub(crate) fn with_capacity(capacity: u32) -> Commands {
        let capacity = capacity.min(COMMANDS_MAX) as usize;
        Commands { entries: Vec::with_capacity(capacity), capacity, free: NO_SLOT, len: 0 }
    }

    /// Returns the number of commands at the drive.
    #[inline]
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Allocates a free slot. Returns its CID and the slot's previous command without a buffer, which the
    /// caller overwrites. Returns `None` if no slot is free.
    #[expect(clippy::inline_always, reason = "a part of the data path, in one place of it")]
    #[inline(always)]
    pub(crate) fn claim(&mut self) -> Option<(u16, &mut Command)> {
        if self.free == NO_SLOT {
            self.add_slot()?;
        }
        let entry = self.entries.get_mut(usize::from(self.free))?;
        self.free = entry.next;
        self.len += 1;
        entry.is_busy = true;
        Some((entry.cid, &mut entry.command))
    }

    #[cold]
    fn add_slot(&mut self) -> Option<()> {
        if self.entries.len() == self.capacity {
            return None;
        }
        let slot = u16::try_from(self.entries.len()).ok()?;
        let command = Command {
            request: None,
            token: Token(0),
            op: Op::Flush,
            range: BlockRange { lba: 0, blocks: 0 },
            buf: None,
            tries: 0,
            is_abort_requested: false,
            needs_flush: false,
            tick: 0,
        };
        self.entries.push(Entry { command, cid: slot, next: NO_SLOT, is_busy: false });
        self.free = slot;
        Some(())
    }

    /// Returns the command of a CID; `None` if no command with this CID is at the drive.
    #[expect(clippy::inline_always, reason = "a part of the data path, in one place of it")]
    #[inline(always)]
    pub(crate) fn find(&mut self, cid: u16) -> Option<&mut Command> {
        let entry = self.entries.get_mut(slot_of(cid))?;
        (entry.cid == cid && entry.is_busy).then_some(&mut entry.command)
    }

    /// Frees the slot of a CID. The caller has found the command and taken its buffer.
    #[expect(clippy::inline_always, reason = "a part of the data path, in one place of it")]
    #[inline(always)]
    pub(crate) fn release(&mut self, cid: u16) {
        let Some(entry) = self.entries.get_mut(slot_of(cid)) else { return };
        debug_assert!(entry.cid == cid && entry.is_busy, "released once");
        entry.is_busy = false;
        entry.cid = cid.wrapping_add(SLOT_MASK + 1);
        entry.next = self.free;
        self.free = cid & SLOT_MASK;
        self.len -= 1;
    }

    /// Returns the CID of the command in a slot; `None` if the slot is free.
    pub(crate) fn cid_at(&self, slot: usize) -> Option<u16> {
        self.entries.get(slot).filter(|entry| entry.is_busy).map(|entry| entry.cid)
    }

    /// Returns the number of slots that were ever used. Slots for `cid_at` are below this number.
    pub(crate) fn slots(&self) -> usize {
        self.entries.len()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Command> {
        self.entries.iter().filter(|entry| entry.is_busy).map(|entry| &entry.command)
    }

    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = (u16, &mut Command)> {
        self.entries.iter_mut().filter(|entry| entry.is_busy).map(|entry| (entry.cid, &mut entry.command))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cid_names_slot_and_generation_and_is_never_ffff() {
        let mut commands = Commands::with_capacity(u32::MAX);
        let cids: Vec<u16> = std::iter::from_fn(|| commands.claim().map(|(cid, _)| cid)).collect();
        assert_eq!((cids.len(), commands.len()), (1023, 1023));
        let mut last = *cids.last().expect("1023");
        for _ in 0..200 {
            assert!(commands.find(last).is_some() && last != u16::MAX);
            commands.release(last);
            assert!(commands.find(last).is_none(), "it has ended");
            assert_eq!(commands.len(), 1022);
            let (next, _) = commands.claim().expect("room");
            assert_eq!(slot_of(next), slot_of(last));
            assert!(next != last && commands.find(last).is_none(), "another generation");
            last = next;
        }
        for stranger in [u16::MAX, last ^ 0x8000, last ^ 0x400] {
            assert!(commands.find(stranger).is_none(), "{stranger:#x}");
        }
    }
}
