//! What a medium is told of failures that concern what was acknowledged before.

use std::cell::{Cell, RefCell};
use std::io;
use std::rc::Rc;

use spindle_reactor::clock::Nanos;
use spindle_reactor::mem::Buf;

use super::guard::Guard;
use super::{Ended, Medium, MediumCore, Request};
use crate::testing::pool;
use crate::{BlockRange, CoreContext, Disk, DiskError, Done, Geometry, Op, Token};

/// One block of zeroes that cannot be written, and what it was told of that: a sync, or a durable write.
#[derive(Default)]
struct Failing {
    told: Rc<RefCell<Vec<bool>>>,
    ended: Vec<Ended<()>>,
}

impl Failing {
    fn end(&mut self, token: u64, result: Result<(), ()>, buf: Option<Buf>) {
        self.ended.push(Ended { token, result, buf });
    }
}

impl Medium for Failing {
    type Error = ();
    type Way = ();

    fn geometry(&self) -> Geometry {
        Geometry {
            block_bytes: 512,
            block_count: 1,
            is_read_only: false,
            has_volatile_cache: true,
            can_deallocate: false,
            atomic_blocks: 1,
            can_compare_and_write: true,
        }
    }

    fn refusal(&self, _: &Request<()>) -> Option<DiskError> {
        None
    }

    fn read(&mut self, token: u64, _: u64, mut buf: Buf) {
        buf.clear();
        self.end(token, Ok(()), Some(buf));
    }

    fn write(&mut self, token: u64, _: u64, buf: Buf, _: bool) {
        self.end(token, Err(()), Some(buf));
    }

    fn sync(&mut self, token: u64) {
        self.end(token, Err(()), None);
    }

    fn way(&self, _: bool) {}

    fn zero_bytes_max(&self, (): ()) -> u64 {
        512
    }

    fn zero(&mut self, token: u64, (): (), _: u64, _: u64) {
        self.end(token, Err(()), None);
    }

    fn next_way(&self, (): (), (): &()) -> Option<()> {
        None
    }

    fn may_be_older(&self, (): &()) -> bool {
        false
    }

    fn ask_lost(&mut self, _: u64) -> bool {
        false
    }

    fn on_lost(&self) {}

    fn on_durable_error(&self, is_sync: bool, (): &()) {
        self.told.borrow_mut().push(is_sync);
    }

    fn forget(&mut self, _: u64) {}

    fn disk_error(&self, (): &(), is_write: bool) -> DiskError {
        if is_write { DiskError::MediaWrite } else { DiskError::MediaRead }
    }

    fn send(&mut self) -> io::Result<()> {
        Ok(())
    }

    fn collect(&mut self, each: &mut dyn FnMut(Ended<()>)) {
        self.ended.drain(..).for_each(each);
    }
}

#[test]
fn only_what_was_to_be_durable_is_told_to_the_medium() {
    let context = CoreContext { core: 0, pool: pool(), depth: 4 };
    let told = Rc::default();
    let medium = Failing { told: Rc::clone(&told), ended: Vec::new() };
    let mut core = MediumCore::new("d", medium, &Guard::new(1), &context).expect("opens");
    let range = BlockRange { lba: 0, blocks: 1 };
    let block = || context.pool.take(512).expect("a buffer");
    let end = |core: &mut MediumCore<Failing>| -> Done {
        let mut done = Vec::with_capacity(1);
        while done.is_empty() {
            core.poll(Nanos::ZERO, &mut done);
        }
        done.remove(0)
    };
    for (op, buf, is_told) in [
        (Op::Write { fua: false }, Some(block()), vec![]),
        (Op::WriteZeroes { deallocate: false, fua: true }, None, vec![]),
        (Op::Write { fua: true }, Some(block()), vec![false]),
        (Op::Flush, None, vec![true]),
    ] {
        assert!(core.submit(Token(1), op, range, buf).is_none());
        assert_eq!(end(&mut core).result, Err(DiskError::MediaWrite), "{op:?}");
        assert_eq!(told.take(), is_told, "{op:?}");
    }
    let mut expected = block();
    expected.clear();
    assert!(core.compare_and_write(Token(2), range, expected, block()).is_none());
    let done = end(&mut core);
    assert_eq!((done.result, done.buf.is_some()), (Err(DiskError::MediaWrite), true));
    assert_eq!(told.take(), [false], "a compare-and-write is durable");
}

/// A page cache before a full file system. The next sync, or write with FUA, returns the error of an earlier
/// writeback; the one after it does not.
#[derive(Default)]
struct Cache {
    /// What was acknowledged before could not be written back, and nobody was told.
    has_older_error: bool,
    /// That error, for the one sync that asks after all others.
    was_lost: bool,
    /// There is no room for what is written now either.
    is_full: bool,
    is_lost: Cell<bool>,
    writes: Rc<Cell<u32>>,
    ended: Vec<Ended<()>>,
}

impl Medium for Cache {
    type Error = ();
    type Way = ();

    fn geometry(&self) -> Geometry {
        Failing::default().geometry()
    }

    fn refusal(&self, request: &Request<()>) -> Option<DiskError> {
        (request.is_durable() && self.is_lost.get()).then_some(DiskError::MediaWrite)
    }

    fn read(&mut self, token: u64, _: u64, buf: Buf) {
        self.ended.push(Ended { token, result: Ok(()), buf: Some(buf) });
    }

    fn write(&mut self, token: u64, _: u64, buf: Buf, fua: bool) {
        self.writes.set(self.writes.get() + 1);
        let is_told = fua && !self.is_full && std::mem::take(&mut self.has_older_error);
        let result = if self.is_full || is_told { Err(()) } else { Ok(()) };
        self.ended.push(Ended { token, result, buf: Some(buf) });
    }

    fn sync(&mut self, token: u64) {
        let result = if std::mem::take(&mut self.has_older_error) { Err(()) } else { Ok(()) };
        self.ended.push(Ended { token, result, buf: None });
    }

    fn way(&self, _: bool) {}

    fn zero_bytes_max(&self, (): ()) -> u64 {
        512
    }

    fn zero(&mut self, token: u64, (): (), _: u64, _: u64) {
        self.ended.push(Ended { token, result: Ok(()), buf: None });
    }

    fn next_way(&self, (): (), (): &()) -> Option<()> {
        None
    }

    fn may_be_older(&self, (): &()) -> bool {
        true
    }

    fn ask_lost(&mut self, token: u64) -> bool {
        let result = if self.was_lost { Err(()) } else { Ok(()) };
        self.ended.push(Ended { token, result, buf: None });
        true
    }

    fn on_lost(&self) {
        self.is_lost.set(true);
    }

    fn on_durable_error(&self, is_sync: bool, (): &()) {
        self.is_lost.set(self.is_lost.get() || is_sync);
    }

    fn forget(&mut self, _: u64) {}

    fn disk_error(&self, (): &(), _: bool) -> DiskError {
        DiskError::NoSpace
    }

    fn send(&mut self) -> io::Result<()> {
        Ok(())
    }

    fn collect(&mut self, each: &mut dyn FnMut(Ended<()>)) {
        self.ended.drain(..).for_each(each);
    }
}

#[test]
fn a_write_with_fua_that_is_told_of_an_older_loss_does_not_hide_it_from_the_next_flush() {
    for (is_full, flushed) in [(false, Err(DiskError::MediaWrite)), (true, Ok(()))] {
        let context = CoreContext { core: 0, pool: pool(), depth: 4 };
        let medium = Cache { has_older_error: !is_full, was_lost: !is_full, is_full, ..Cache::default() };
        let mut core = MediumCore::new("d", medium, &Guard::new(1), &context).expect("opens");
        let range = BlockRange { lba: 0, blocks: 1 };
        let mut run = |op: Op, buf: Option<Buf>| -> Done {
            let mut done = Vec::with_capacity(1);
            done.extend(core.submit(Token(1), op, range, buf));
            while done.is_empty() {
                core.poll(Nanos::ZERO, &mut done);
            }
            done.remove(0)
        };
        let written = run(Op::Write { fua: true }, context.pool.take(512));
        assert_eq!((written.result, written.buf.is_some()), (Err(DiskError::NoSpace), true));
        // Where the error was the write's own, nothing that was acknowledged is lost.
        assert_eq!(run(Op::Flush, None).result, flushed, "is_full: {is_full}");
    }
}

#[test]
fn a_failed_write_with_fua_of_a_submitter_that_is_gone_is_not_written_again_and_hides_no_loss() {
    // Where the error was the write's own, nothing that was acknowledged is lost.
    for (is_full, flushed) in [(false, Err(DiskError::MediaWrite)), (true, Ok(()))] {
        let context = CoreContext { core: 0, pool: pool(), depth: 4 };
        let writes = Rc::default();
        let (has_older_error, was_lost) = (!is_full, !is_full);
        let writes_done = Rc::clone(&writes);
        let medium = Cache { has_older_error, was_lost, is_full, writes: writes_done, ..Cache::default() };
        let mut core = MediumCore::new("d", medium, &Guard::new(1), &context).expect("opens");
        let range = BlockRange { lba: 0, blocks: 1 };
        let buf = context.pool.take(512);
        let run = |core: &mut MediumCore<Cache>, ended: Option<Done>| -> Done {
            let mut done = Vec::with_capacity(1);
            done.extend(ended);
            while done.is_empty() {
                core.poll(Nanos::ZERO, &mut done);
            }
            done.remove(0)
        };
        assert!(core.submit(Token(1), Op::Write { fua: true }, range, buf).is_none());
        assert_eq!(core.forget(Token(1).owner()), 1);
        assert_eq!((run(&mut core, None).result, writes.get()), (Err(DiskError::Cancelled), 1));
        let ended = core.submit(Token(2), Op::Flush, range, None);
        assert_eq!(run(&mut core, ended).result, flushed, "is_full: {is_full}");
    }
}

#[test]
fn a_compare_and_write_that_fails_for_itself_is_no_loss_of_what_was_acknowledged() {
    for (is_full, flushed) in [(false, Err(DiskError::MediaWrite)), (true, Ok(()))] {
        let context = CoreContext { core: 0, pool: pool(), depth: 4 };
        let medium = Cache { has_older_error: !is_full, was_lost: !is_full, is_full, ..Cache::default() };
        let mut core = MediumCore::new("d", medium, &Guard::new(1), &context).expect("opens");
        let range = BlockRange { lba: 0, blocks: 1 };
        let [expected, data] = [(); 2].map(|()| {
            let mut buf = context.pool.take(512).expect("a buffer");
            buf.clear();
            buf
        });
        assert!(core.compare_and_write(Token(1), range, expected, data).is_none());
        let mut done = Vec::with_capacity(1);
        while done.is_empty() {
            core.poll(Nanos::ZERO, &mut done);
        }
        let swapped = done.remove(0);
        assert_eq!((swapped.result, swapped.buf.is_some()), (Err(DiskError::NoSpace), true));
        done.extend(core.submit(Token(2), Op::Flush, range, None));
        while done.is_empty() {
            core.poll(Nanos::ZERO, &mut done);
        }
        assert_eq!(done.remove(0).result, flushed, "is_full: {is_full}");
    }
}
