//! [`Directory`]: which pages the target's cache has, where they are, and their checksums.

use nvme_spec::optimistic::PageReference;

/// Entries of a set. A page is in one set only.
const WAYS: usize = 8;
/// Stands for an empty entry. Pages are below 2^40.
const NO_PAGE: u64 = u64::MAX;

/// Location and checksum of a page. 24 bytes: two or three entries in a cache line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Entry {
    page: u64,
    pub(crate) frame: u32,
    pub(crate) generation: u32,
    pub(crate) crc: u64,
}

const EMPTY: Entry = Entry { page: NO_PAGE, frame: 0, generation: 0, crc: 0 };

/// A bounded table of pages; a full set replaces its entries in turn.
pub(crate) struct Directory {
    sets: Box<[[Entry; WAYS]]>,
    /// Entry of a full set that is replaced next, for all sets.
    next: usize,
}

impl Directory {
    /// Makes an empty directory for at least `pages` pages, 24 bytes each.
    pub(crate) fn new(pages: usize) -> Directory {
        Directory { sets: vec![[EMPTY; WAYS]; pages.div_ceil(WAYS).max(1)].into(), next: 0 }
    }

    pub(crate) fn bytes(pages: usize) -> usize {
        pages.div_ceil(WAYS).max(1).saturating_mul(size_of::<[Entry; WAYS]>())
    }

    #[inline]
    fn set_of(&self, page: u64) -> usize {
        let mixed = page.wrapping_mul(0x9E37_79B9_7F4A_7C15);
        let count = self.sets.len() as u64;
        // Below `count`: the upper 32 bits scaled.
        usize::try_from(((mixed >> 32) * count) >> 32).unwrap_or(0)
    }

    #[inline]
    pub(crate) fn find(&self, page: u64) -> Option<&Entry> {
        self.sets.get(self.set_of(page))?.iter().find(|entry| entry.page == page)
    }

    /// Enters a page, in place of its old entry, of an empty one, or of another page.
    pub(crate) fn insert(&mut self, page: u64, reference: PageReference, crc: u64) {
        let at = self.set_of(page);
        let next = self.next;
        let Some(set) = self.sets.get_mut(at) else { return };
        let place = set.iter().position(|entry| entry.page == page);
        let place =
            place.or_else(|| set.iter().position(|entry| entry.page == NO_PAGE)).unwrap_or_else(|| {
                self.next = (next + 1) % WAYS;
                next
            });
        set[place] = Entry { page, frame: reference.frame, generation: reference.generation, crc };
    }

    pub(crate) fn remove(&mut self, page: u64) {
        let at = self.set_of(page);
        let entries = self.sets.get_mut(at).into_iter().flatten();
        entries.filter(|entry| entry.page == page).for_each(|entry| *entry = EMPTY);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reference(frame: u32) -> PageReference {
        PageReference { frame, generation: 2 * frame + 1, epoch: 0 }
    }

    #[test]
    fn a_page_has_its_newest_entry_until_it_is_removed() {
        let mut directory = Directory::new(100);
        assert_eq!(directory.find(7), None);
        directory.insert(7, reference(1), 10);
        directory.insert(7, reference(2), 20);
        assert_eq!(directory.find(7), Some(&Entry { page: 7, frame: 2, generation: 5, crc: 20 }));
        directory.remove(7);
        assert_eq!(directory.find(7), None);
    }

    #[test]
    fn it_is_bounded_and_pages_are_spread_over_the_sets() {
        let mut directory = Directory::new(1024);
        for page in 0..10_000_u64 {
            directory.insert(page, reference(3), page);
            assert!(directory.find(page).is_some_and(|entry| entry.crc == page));
        }
        let left = (0..10_000).filter(|page| directory.find(*page).is_some()).count();
        assert!((900..=1024).contains(&left), "{left}");
        let mut one = Directory::new(0);
        for page in 0..=8 {
            one.insert(page, reference(1), page);
        }
        assert_eq!((0..=8).filter(|page| one.find(*page).is_some()).count(), WAYS);
        assert_eq!(one.find(0), None, "the first was replaced");
    }
}
