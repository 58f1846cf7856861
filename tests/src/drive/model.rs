//! What each block of a drive may read as, with several commands in flight on it, and after a loss of power.
//!
//! A block has versions. A version may be read from the submission of its command on, until a later one is
//! certain: one that was begun after it had ended, and was acknowledged. A version that was superseded may
//! come back by a loss of power until a flush that was begun later is acknowledged, or the one that
//! superseded it was durable itself.

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
}

/// All blocks of a namespace.
#[derive(Debug)]
pub struct Versions {
    blocks: Vec<Vec<Version>>,
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
        let first = Version { tag: 0, command: 0, ended: Some(0), gone: None, is_dead: false };
        let blocks = vec![vec![first]; blocks];
        Versions { blocks, block_bytes, has_cache, cut: 0, unflushed: None, is_loss_untold: false, judged }
    }

    /// A change was submitted: `tag` of each block.
    pub fn begin(&mut self, command: u64, first: usize, tags: impl Iterator<Item = u64>) {
        for (block, tag) in self.blocks.iter_mut().skip(first).zip(tags) {
            block.push(Version { tag, command, ended: None, gone: None, is_dead: false });
        }
    }

    /// It has ended.
    pub fn end(&mut self, change: &Change, now: Stamp, is_ok: bool) {
        // One that was in flight when power was lost may have been done before that, and be lost.
        let spans_cut = change.began <= self.cut && !change.is_durable && self.has_cache;
        for block in self.blocks.iter_mut().skip(change.first).take(change.count) {
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
            block.push(Version { tag: 0, command: 0, ended: Some(now), gone: None, is_dead: false });
        }
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
            // Nobody has changed it meanwhile: what was read is what it is.
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

    #[test]
    #[should_panic(expected = "hides a loss")]
    fn a_flush_that_says_nothing_of_a_loss_is_noticed() {
        let mut model = Versions::new(1, 1, BYTES, true);
        write(&mut model, 1, 10, 11, false, true);
        model.cut(20);
        model.flushed(30, true);
    }
}
