//! What was written and read. A read may return a write only if no other write of the page was in force
//! before the read began and after that one.

use std::fmt;

use spindle_reactor::clock::Nanos;

/// A write of a page.
#[derive(Clone, Copy)]
struct Written {
    /// Number of its command.
    id: u64,
    value: u64,
    begin: Nanos,
    /// Time at which it was in force at the latest: it was acknowledged, or a read that ended then had seen
    /// it. `None`: it may come into force at any time.
    end: Option<Nanos>,
}

impl fmt::Debug for Written {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Written { id, value, begin, end } = self;
        write!(f, "\n  {id}: {value} from {begin} to {end:?}")
    }
}

/// All writes of all pages.
pub(super) struct History {
    pages: Vec<Vec<Written>>,
}

impl History {
    pub(super) fn new(pages: usize) -> History {
        let first = Written { id: 0, value: 0, begin: Nanos::ZERO, end: Some(Nanos::ZERO) };
        History { pages: vec![vec![first]; pages] }
    }

    pub(super) fn begin_write(&mut self, page: usize, (id, value): (u64, u64), now: Nanos) {
        self.pages[page].push(Written { id, value, begin: now, end: None });
    }

    /// The write was acknowledged.
    pub(super) fn end_write(&mut self, page: usize, id: u64, now: Nanos) {
        for written in self.pages[page].iter_mut().filter(|it| it.id == id) {
            written.end = Some(written.end.unwrap_or(now).min(now));
        }
    }

    /// Judges a read of a page, begun at `begin`, that has returned `value` at `now`.
    ///
    /// # Panics
    /// When the value is older than what was in force when the read began.
    pub(super) fn read(
        &mut self,
        page: usize,
        value: u64,
        (begin, now): (Nanos, Nanos),
        (who, is_resent): (&str, bool),
    ) {
        let written = &mut self.pages[page];
        let is_old = |one: &Written| {
            written.iter().any(|later| {
                one.end.is_some_and(|end| end < later.begin) && later.end.is_some_and(|end| end < begin)
            })
        };
        let Some(at) = written.iter().rposition(|one| one.value == value && !is_old(one)) else {
            panic!("{who}: page {page} read as {value} from {begin} to {now}: {written:?}")
        };
        // It is in force now. Of equal values it is not known which. A write that an agent sends again
        // after the loss of an association may come into force twice before it is acknowledged.
        if !is_resent && written.iter().filter(|one| one.value == value).count() == 1 {
            let end = written[at].end.get_or_insert(now);
            *end = (*end).min(now);
        }
    }

    /// Forgets writes that no read may return any more: those that were in force before another that began
    /// before `before`.
    pub(super) fn forget(&mut self, before: Nanos) {
        for written in &mut self.pages {
            let newest =
                written.iter().filter(|it| it.end.is_some_and(|end| end < before)).map(|it| it.begin);
            let Some(newest) = newest.max() else { continue };
            written.retain(|one| one.end.is_none_or(|end| end >= newest));
        }
    }
}
