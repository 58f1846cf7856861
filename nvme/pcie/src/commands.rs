//! [`Commands`]: what the drive has of one core, by command identifier.
//!
//! A CID is `generation (6 bits) | slot (10 bits)`. Each use of a slot has another generation, so that a
//! completion that comes twice, or late, finds nothing. Entries are filled and read where they lie: this is
//! the data path's one table.

use spindle_disk::{BlockRange, Op, Token};
use spindle_reactor::mem::Buf;
use spindle_reactor::slab::Slot;

/// Most commands in flight: a CID has 10 bits for the slot, and FFFFh is no CID.
pub(crate) const COMMANDS_MAX: u32 = 1023;

/// Bits of a CID that name the slot.
const SLOT_MASK: u16 = 0x3ff;
/// No slot.
const END: u16 = u16::MAX;

/// The slot of a CID: 0 to 1023.
#[inline]
pub(crate) fn slot_of(cid: u16) -> usize {
    usize::from(cid & SLOT_MASK)
}

/// A command that the drive has.
pub(crate) struct Command {
    /// The request of which this is a part; `None`: it is all of one, and what follows is that request's.
    pub(crate) request: Option<Slot>,
    pub(crate) token: Token,
    pub(crate) op: Op,
    pub(crate) range: BlockRange,
    pub(crate) buf: Option<Buf>,
    /// How often it was given to the drive.
    pub(crate) tries: u8,
    pub(crate) is_abort_asked: bool,
    /// All of a request that a loss of power may undo.
    pub(crate) is_change: bool,
    /// When it began.
    pub(crate) tick: u32,
}

struct Entry {
    command: Command,
    /// Its name, or that of its next use.
    cid: u16,
    /// The next free entry, when this one is free.
    next: u16,
    is_busy: bool,
}

/// See the module.
pub(crate) struct Commands {
    /// Those that were ever used.
    entries: Vec<Entry>,
    capacity: usize,
    free: u16,
    len: usize,
}

impl Commands {
    /// Room for `capacity`, at most [`COMMANDS_MAX`]; the only time that it allocates.
    pub(crate) fn with_capacity(capacity: u32) -> Commands {
        let capacity = capacity.min(COMMANDS_MAX) as usize;
        Commands { entries: Vec::with_capacity(capacity), capacity, free: END, len: 0 }
    }

    /// How many the drive has.
    #[inline]
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// A new one, to be filled in: its CID, and what its slot held last (with no buffer). `None` when there
    /// is no room.
    #[expect(clippy::inline_always, reason = "a part of the data path, in one place of it")]
    #[inline(always)]
    pub(crate) fn claim(&mut self) -> Option<(u16, &mut Command)> {
        if self.free == END {
            self.add()?;
        }
        let entry = self.entries.get_mut(usize::from(self.free))?;
        self.free = entry.next;
        self.len += 1;
        entry.is_busy = true;
        Some((entry.cid, &mut entry.command))
    }

    #[cold]
    fn add(&mut self) -> Option<()> {
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
            is_abort_asked: false,
            is_change: false,
            tick: 0,
        };
        self.entries.push(Entry { command, cid: slot, next: END, is_busy: false });
        self.free = slot;
        Some(())
    }

    /// The command of a name, if the drive has it.
    #[expect(clippy::inline_always, reason = "a part of the data path, in one place of it")]
    #[inline(always)]
    pub(crate) fn find(&mut self, cid: u16) -> Option<&mut Command> {
        let entry = self.entries.get_mut(slot_of(cid))?;
        (entry.cid == cid && entry.is_busy).then_some(&mut entry.command)
    }

    /// The drive has it no more, and its buffer was taken out; the caller has found it before.
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

    /// The name of the command in a slot.
    pub(crate) fn cid_at(&self, slot: usize) -> Option<u16> {
        self.entries.get(slot).filter(|entry| entry.is_busy).map(|entry| entry.cid)
    }

    /// Slots that were ever used.
    pub(crate) fn slots(&self) -> usize {
        self.entries.len()
    }

    /// All that the drive has.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Command> {
        self.entries.iter().filter(|entry| entry.is_busy).map(|entry| &entry.command)
    }

    /// All that the drive has, with their names.
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
