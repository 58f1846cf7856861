//! What each block of a drive may read as, with several commands in flight on it, and after a loss of power.
//!
//! A block has versions. A version may be read from the submission of its command on, until a later one is
//! certain: one that was begun after it had ended, and was acknowledged. A version that was superseded may
//! come back by a loss of power until a flush that was begun later is acknowledged, or the one that
//! superseded it was durable itself.
//!
//! A copy makes of each version that its source may have while it is in flight a version that its destination
//! may have: those that are there when it begins, and those that come meanwhile.

use crate::sim::model::tag_of;

/// When something happened, in turns of the simulation's own counter.
pub type Stamp = u64;

#[derive(Debug, Clone)]
struct Version {
    tag: u64,
    command: u64,
    ended: Option<Stamp>,
    /// Superseded; a read that began before may still have seen it.
    gone: Option<Stamp>,
    /// Nothing brings it back.
    is_dead: bool,
    /// What a copy wrote if a loss of power had brought back what it copied, or not at all.
    is_ghost: bool,
}

/// A copy in flight.
#[derive(Debug, Clone, Copy)]
struct Copying {
    command: u64,
    from: usize,
    to: usize,
    count: usize,
}

/// All blocks of a namespace.
#[derive(Debug)]
pub struct Versions {
    blocks: Vec<Vec<Version>>,
    copies: Vec<Copying>,
    block_bytes: usize,
    /// Without a volatile cache everything that is acknowledged is durable.
    has_cache: bool,
    cut: Stamp,
    /// The end of the last change that was acknowledged and is not known to be flushed.
    unflushed: Option<Stamp>,
    /// At the last loss of power there were such changes, and no flush has failed since.
    is_loss_untold: bool,
    /// Blocks from here on are not judged: the namespace changes its size.
    judged: usize,
}

impl Versions {
    /// All zeroes.
    #[must_use]
    pub fn new(blocks: usize, judged: usize, block_bytes: usize, has_cache: bool) -> Versions {
        let first =
            Version { tag: 0, command: 0, ended: Some(0), gone: None, is_dead: false, is_ghost: false };
        let blocks = vec![vec![first]; blocks];
        let copies = Vec::new();
        Versions {
            blocks,
            copies,
            block_bytes,
            has_cache,
            cut: 0,
            unflushed: None,
            is_loss_untold: false,
            judged,
        }
    }

    /// All blocks before this one are judged.
    #[must_use]
    pub fn is_judged(&self, end: u64) -> bool {
        usize::try_from(end).is_ok_and(|end| end <= self.judged)
    }

    /// A change was submitted: `tag` of each block.
    pub fn begin(&mut self, command: u64, first: usize, tags: impl Iterator<Item = u64>) {
        for (block, tag) in (first..self.blocks.len()).zip(tags) {
            self.add(block, command, tag, false);
        }
    }

    /// A copy was submitted of `count` blocks.
    pub fn begin_copy(&mut self, command: u64, from: usize, to: usize, count: usize) {
        self.copies.push(Copying { command, from, to, count });
        for block in 0..count {
            let source = self.blocks.get(from + block).into_iter().flatten();
            // What is dead comes back by nothing.
            let source = source.filter(|version| !version.is_dead);
            let found: Vec<_> = source.map(|version| (version.tag, version.gone.is_some())).collect();
            for (tag, is_ghost) in found {
                self.add(to + block, command, tag, is_ghost);
            }
        }
    }

    /// A version that a block may have from now on, and what is copied from it meanwhile.
    fn add(&mut self, at: usize, command: u64, tag: u64, is_ghost: bool) {
        let Some(block) = self.blocks.get_mut(at) else { return };
        let known = block.iter_mut().find(|version| (version.command, version.tag) == (command, tag));
        match known {
            // What is possible without a loss of power is no ghost.
            Some(version) if version.is_ghost && !is_ghost => version.is_ghost = false,
            Some(_) => return,
            None => {
                block.push(Version { tag, command, ended: None, gone: None, is_dead: false, is_ghost });
            }
        }
        for index in 0..self.copies.len() {
            let Some(Copying { command, from, to, count }) = self.copies.get(index).copied() else { return };
            if (from..from + count).contains(&at) {
                self.add(to + (at - from), command, tag, is_ghost);
            }
        }
    }

    /// It has ended.
    pub fn end(&mut self, change: &Change, now: Stamp, is_ok: bool) {
        // One that was in flight when power was lost may have been done before that, and be lost.
        let spans_cut = change.began <= self.cut && !change.is_durable && self.has_cache;
        let was_cut = change.began <= self.cut;
        self.copies.retain(|copying| copying.command != change.command);
        for block in self.blocks.iter_mut().skip(change.first).take(change.count) {
            block.retain(|version| {
                version.command != change.command || !version.is_ghost || was_cut || !is_ok
            });
            for version in block.iter_mut() {
                if version.command == change.command {
                    version.ended = Some(now);
                } else if is_ok && !spans_cut && version.ended.is_some_and(|ended| ended < change.began) {
                    version.gone.get_or_insert(now);
                    version.is_dead |= change.is_durable || !self.has_cache;
                }
            }
        }
        if is_ok && self.has_cache && !change.is_durable {
            self.unflushed = Some(now);
        }
    }

    /// It has ended, and was not done: a compare-and-write that found something else.
    pub fn never(&mut self, change: &Change) {
        for block in self.blocks.iter_mut().skip(change.first).take(change.count) {
            block.retain(|version| version.command != change.command);
        }
    }

    /// A flush that began then was acknowledged, or failed.
    ///
    /// # Panics
    /// When it hides that something was lost.
    pub fn flushed(&mut self, began: Stamp, is_ok: bool) {
        if !is_ok {
            self.is_loss_untold = false;
            return;
        }
        assert!(!self.is_loss_untold || began <= self.cut, "a flush that began at {began} hides a loss");
        self.is_loss_untold = false;
        if self.unflushed.is_some_and(|change| change < began) {
            self.unflushed = None;
        }
        for version in self.blocks.iter_mut().flatten() {
            version.is_dead |= version.gone.is_some_and(|gone| gone < began);
        }
    }

    /// Power was lost.
    pub fn cut(&mut self, now: Stamp) {
        self.cut = now;
        self.is_loss_untold |= self.unflushed.take().is_some();
        for version in self.blocks.iter_mut().flatten() {
            if !version.is_dead {
                version.gone = None;
                version.ended = version.ended.map(|_| now);
            }
        }
    }

    /// The drive has lost everything: all zeroes.
    pub fn wipe(&mut self, now: Stamp) {
        self.cut = now;
        self.unflushed = None;
        for block in &mut self.blocks {
            block.retain(|version| version.ended.is_none());
            let ended = Some(now);
            block.push(Version { tag: 0, command: 0, ended, gone: None, is_dead: false, is_ghost: false });
        }
        for Copying { command, to, count, .. } in self.copies.clone() {
            (to..to + count).for_each(|block| self.add(block, command, 0, false));
        }
    }

    /// A version that each block may have: the newest, as bytes.
    pub fn guess(&self, first: usize, count: usize) -> Vec<u8> {
        let mut bytes = vec![0; count * self.block_bytes];
        for (block, content) in self.blocks.iter().skip(first).zip(bytes.chunks_exact_mut(self.block_bytes)) {
            let newest = block.iter().rev().find(|version| version.gone.is_none());
            crate::sim::model::fill(newest.map_or(0, |version| version.tag), content);
        }
        bytes
    }

    /// Judge that a compare which began then found a difference.
    ///
    /// # Panics
    /// When nothing but these bytes can have been there.
    pub fn judge_differs(&self, first: usize, bytes: &[u8], began: Stamp) {
        let mut blocks = (first..).zip(bytes.chunks_exact(self.block_bytes));
        let may_differ = blocks.any(|(at, content)| {
            let may_be = |version: &Version| version.gone.is_none_or(|gone| gone >= began);
            let mut others = self.blocks.get(at).into_iter().flatten().filter(|version| may_be(version));
            at >= self.judged || others.any(|version| Some(version.tag) != tag_of(content))
        });
        assert!(may_differ, "blocks from {first}: a difference from {began}, where there can be none");
    }

    /// What nothing that is in flight can have seen is forgotten; `oldest` is the begin of the oldest.
    fn forget(block: &mut Vec<Version>, oldest: Stamp) {
        block.retain(|version| !version.is_dead || version.gone.is_none_or(|gone| gone >= oldest));
    }

    /// Judge what a read saw that began then.
    ///
    /// # Panics
    /// When a block holds what it cannot hold.
    pub fn judge(&mut self, first: usize, bytes: &[u8], began: Stamp, now: Stamp, oldest: Stamp) {
        for (index, content) in bytes.chunks_exact(self.block_bytes).enumerate() {
            let at = first + index;
            let Some(block) = self.blocks.get_mut(at).filter(|_| at < self.judged) else { return };
            let tag = tag_of(content);
            let may_be = |version: &Version| version.gone.is_none_or(|gone| gone >= began);
            let is_allowed = block.iter().any(|version| Some(version.tag) == tag && may_be(version));
            assert!(is_allowed, "block {at}: read {tag:x?} from {began} to {now}, possible {block:#x?}");
            // It was not changed meanwhile: what was read is what it is.
            let settled = |version: &Version| version.ended.is_some_and(|ended| ended < began);
            if block.iter().all(|version| version.gone.is_some() || settled(version)) && self.cut < began {
                for version in block.iter_mut().filter(|version| Some(version.tag) != tag) {
                    version.gone.get_or_insert(now);
                }
            }
            Versions::forget(block, oldest);
        }
    }
}

/// A change of blocks in flight.
#[derive(Debug, Clone, Copy)]
pub struct Change {
    /// Its name.
    pub command: u64,
    /// When it was submitted.
    pub began: Stamp,
    /// First block.
    pub first: usize,
    /// Blocks.
    pub count: usize,
    /// FUA.
    pub is_durable: bool,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sim::model::fill;

    const BYTES: usize = 512;

    fn content(tag: u64) -> Vec<u8> {
        let mut bytes = vec![0; BYTES];
        fill(tag, &mut bytes);
        bytes
    }

    /// A write of block 0.
    fn write(model: &mut Versions, tag: u64, began: Stamp, end: Stamp, is_durable: bool, is_ok: bool) {
        model.begin(tag, 0, std::iter::once(tag));
        model.end(&Change { command: tag, began, first: 0, count: 1, is_durable }, end, is_ok);
    }

    fn may_read(model: &Versions, tag: u64, began: Stamp) -> bool {
        let mut blocks = Versions { blocks: model.blocks.clone(), ..Versions::new(0, 1, BYTES, true) };
        std::panic::catch_unwind(move || blocks.judge(0, &content(tag), began, began + 1, 0)).is_ok()
    }

    #[test]
    fn an_acknowledged_write_supersedes_and_a_failed_one_may_or_may_not_have_been_done() {
        let mut model = Versions::new(1, 1, BYTES, false);
        write(&mut model, 1, 10, 11, false, true);
        assert!(may_read(&model, 1, 12) && !may_read(&model, 0, 12) && may_read(&model, 0, 10));
        write(&mut model, 2, 20, 21, false, false);
        assert!(may_read(&model, 1, 22) && may_read(&model, 2, 22) && !may_read(&model, 3, 22));
        model.judge(0, &content(2), 30, 31, 30);
        assert!(may_read(&model, 2, 32) && !may_read(&model, 1, 32));
    }

    #[test]
    fn power_brings_back_what_was_not_flushed_and_nothing_older() {
        let mut model = Versions::new(1, 1, BYTES, true);
        write(&mut model, 1, 10, 11, false, true);
        model.flushed(12, true);
        write(&mut model, 2, 20, 21, false, true);
        model.cut(25);
        assert!(may_read(&model, 1, 30) && may_read(&model, 2, 30) && !may_read(&model, 0, 30));
        write(&mut model, 3, 40, 41, true, true);
        model.cut(45);
        assert!(may_read(&model, 3, 50) && !may_read(&model, 2, 50) && !may_read(&model, 1, 50));
    }

    /// A copy of block 0 to block 1.
    fn copied(began: Stamp) -> Change {
        Change { command: 1000 + began, began, first: 1, count: 1, is_durable: false }
    }

    fn may_read_second(model: &Versions, tag: u64, began: Stamp) -> bool {
        let blocks = vec![Vec::new(), model.blocks[1].clone()];
        let mut blocks = Versions { blocks, ..Versions::new(0, 2, BYTES, true) };
        std::panic::catch_unwind(move || blocks.judge(1, &content(tag), began, began + 1, 0)).is_ok()
    }

    #[test]
    fn a_copy_carries_what_its_source_may_have_been_meanwhile_and_nothing_older() {
        let mut model = Versions::new(2, 2, BYTES, true);
        write(&mut model, 1, 10, 11, false, true);
        write(&mut model, 2, 12, 13, false, true);
        model.begin_copy(1020, 0, 1, 1);
        assert!(may_read_second(&model, 0, 21) && may_read_second(&model, 2, 21));
        write(&mut model, 3, 22, 23, false, true);
        model.end(&copied(20), 24, true);
        assert!(may_read_second(&model, 2, 30) && may_read_second(&model, 3, 30));
        assert!(!may_read_second(&model, 0, 30) && !may_read_second(&model, 1, 30));
        model.cut(40);
        assert!(may_read_second(&model, 0, 41) && may_read_second(&model, 2, 41));
        assert!(!may_read_second(&model, 1, 41), "it was never copied");
    }

    #[test]
    fn a_copy_during_a_loss_of_power_may_carry_what_that_brings_back() {
        let mut model = Versions::new(2, 2, BYTES, true);
        write(&mut model, 1, 10, 11, false, true);
        model.flushed(12, true);
        write(&mut model, 2, 13, 14, false, true);
        model.begin_copy(1020, 0, 1, 1);
        model.cut(21);
        model.end(&copied(20), 22, true);
        assert!(may_read_second(&model, 1, 30) && may_read_second(&model, 2, 30));
    }

    #[test]
    fn a_compare_may_differ_only_where_something_else_may_be() {
        let mut model = Versions::new(1, 1, BYTES, false);
        write(&mut model, 1, 10, 11, false, true);
        model.judge_differs(0, &content(2), 12);
        model.judge_differs(0, &content(1), 10);
        assert_eq!(model.guess(0, 1), content(1));
        assert!(std::panic::catch_unwind(move || model.judge_differs(0, &content(1), 12)).is_err());
    }

    #[test]
    #[should_panic(expected = "hides a loss")]
    fn a_flush_that_says_nothing_of_a_loss_is_noticed() {
        let mut model = Versions::new(1, 1, BYTES, true);
        write(&mut model, 1, 10, 11, false, true);
        model.cut(20);
        model.flushed(30, true);
    }
}
