//! The Changed Attached Namespace List (log page 04h): namespaces that were added, removed or changed since
//! the host read the page with RAE = 0.

use nvme_spec::zerocopy::IntoBytes;
use nvme_spec::zerocopy::little_endian::U32;

use super::Window;
use crate::snapshot::{NSID_MAX, Namespace, Subsystem};

const WORD_BITS: u32 = u64::BITS;
const WORDS: usize = (NSID_MAX / WORD_BITS) as usize;

// Every NSID has a bit, and the list has 1,024 entries, so it never overflows.
const _: () = assert!(NSID_MAX.is_multiple_of(WORD_BITS) && NSID_MAX <= 1024);

/// Bit `nsid - 1` is set for a changed namespace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ChangedNamespaces {
    words: [u64; WORDS],
}

impl Default for ChangedNamespaces {
    fn default() -> Self {
        ChangedNamespaces { words: [0; WORDS] }
    }
}

impl ChangedNamespaces {
    /// Adds the namespaces that differ between `old` and `new`. True when some differ. `old` `None`: the
    /// subsystem did not exist.
    pub(super) fn compare(&mut self, old: Option<&Subsystem>, new: &Subsystem) -> bool {
        let mut is_changed = false;
        for nsid in 1..=NSID_MAX {
            let before = old.and_then(|subsystem| subsystem.namespace(nsid));
            let after = new.namespace(nsid);
            let differs = match (before, after) {
                (None, None) => false,
                (Some(before), Some(after)) => !is_same(before, after),
                (None, Some(_)) | (Some(_), None) => true,
            };
            if differs {
                self.insert(nsid);
                is_changed = true;
            }
        }
        is_changed
    }

    /// Adds namespace `nsid`, 1 ..= [`NSID_MAX`]; others are ignored.
    pub(super) fn insert(&mut self, nsid: u32) {
        let Some(index) = nsid.checked_sub(1) else { return };
        let word = usize::try_from(index / WORD_BITS).ok().and_then(|word| self.words.get_mut(word));
        if let Some(word) = word {
            *word |= 1 << (index % WORD_BITS);
        }
    }

    /// Writes the log page: NSIDs in ascending order.
    pub(super) fn write(&self, window: &mut Window<'_>) {
        let mut at = 0;
        for nsid in self.iter() {
            window.put(at, U32::new(nsid).as_bytes());
            at += 4;
        }
    }

    fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        (1..=NSID_MAX).zip(0..).filter_map(|(nsid, index): (u32, u32)| {
            let word = self.words.get(usize::try_from(index / WORD_BITS).ok()?)?;
            (word & 1 << (index % WORD_BITS) != 0).then_some(nsid)
        })
    }
}

/// True when disk, identifiers and geometry are the same.
fn is_same(before: &Namespace, after: &Namespace) -> bool {
    before.disk == after.disk
        && before.uuid == after.uuid
        && before.nguid == after.nguid
        && before.geometry == after.geometry
}
