//! [`DiskTable`]: the disks of a snapshot, by slot and by name.

use std::collections::HashMap;
use std::sync::Arc;

use spindle_target::snapshot::{DiskId, DiskSlot, Snapshot};
use spindle_target_disk::Disk;

use crate::identity;

pub type Source = Arc<dyn Disk>;

/// The disks of the next snapshot.
pub struct DiskTable {
    disks: Vec<Option<Source>>,
    /// As long as `disks`.
    slots: Vec<DiskSlot>,
    by_name: HashMap<String, DiskId>,
    /// Slots for new disks, the lowest last.
    free: Vec<usize>,
}

impl DiskTable {
    /// Returns a table of the disks of `previous` for whose name `is_kept` returns true, in their slots.
    /// Slots of removed disks that somebody still has stay in use.
    pub fn after(previous: Option<&Snapshot>, is_kept: impl Fn(&str) -> bool) -> DiskTable {
        let (disks, mut slots) = previous
            .map_or_else(Default::default, |previous| (previous.disks.as_slice(), previous.slots.clone()));
        let mut disks: Vec<_> =
            disks.iter().map(|disk| disk.as_ref().filter(|disk| is_kept(disk.name())).cloned()).collect();
        let is_free = |(disk, slot): (&Option<Source>, &DiskSlot)| disk.is_none() && slot.is_free();
        let used = disks.iter().zip(&slots).rposition(|it| !is_free(it)).map_or(0, |last| last + 1);
        slots.truncate(used);
        disks.truncate(used);
        let free = (0..used).rev().filter(|at| is_free((&disks[*at], &slots[*at]))).collect();
        let named =
            |(at, disk): (usize, &Option<Source>)| Some((disk.as_ref()?.name().to_owned(), DiskId(at)));
        let by_name = disks.iter().enumerate().filter_map(named).collect();
        DiskTable { disks, slots, by_name, free }
    }

    /// Adds a disk, in the lowest free slot.
    pub fn add(&mut self, disk: Source) {
        let slot = DiskSlot { number: identity::next_disk_number(), disk: Arc::downgrade(&disk) };
        let at = self.free.pop().unwrap_or(self.disks.len());
        self.by_name.insert(disk.name().to_owned(), DiskId(at));
        if at == self.disks.len() {
            self.disks.push(Some(disk));
            self.slots.push(slot);
        } else {
            (self.disks[at], self.slots[at]) = (Some(disk), slot);
        }
    }

    /// Returns the disk of this name, its slot and its number ([`DiskSlot::number`]).
    pub fn find(&self, name: &str) -> Option<(&Source, DiskId, u64)> {
        let id = *self.by_name.get(name)?;
        Some((self.disks[id.0].as_ref()?, id, self.slots[id.0].number))
    }

    pub fn disks(&self) -> impl Iterator<Item = &Source> {
        self.disks.iter().flatten()
    }

    /// Returns [`Snapshot::disks`] and [`Snapshot::slots`].
    pub fn into_parts(self) -> (Vec<Option<Source>>, Vec<DiskSlot>) {
        (self.disks, self.slots)
    }
}
