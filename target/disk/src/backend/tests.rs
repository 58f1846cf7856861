//! What a medium is told of failures that concern what was acknowledged before, and what is known of writes
//! of a medium that breaks.

use std::cell::RefCell;
use std::io;
use std::rc::Rc;

use spindle_reactor::clock::Nanos;
use spindle_reactor::mem::Buf;

use super::guard::Guard;
use super::{AsyncBackend, BackendChannel, Ended, Request, ZeroMethod, ZeroMethods};
use crate::testing::pool;
use crate::{BlockRange, ChannelContext, DiskChannel, DiskError, Done, Geometry, IoRequest, Op, Token};

/// One block of zeroes that cannot be written, and what it was told of that: a sync, or a durable write.
struct Failing {
    zero_methods: ZeroMethods,
    told: Rc<RefCell<Vec<bool>>>,
    ended: Vec<Ended<()>>,
    is_broken: bool,
}

impl Failing {
    fn new(told: &Rc<RefCell<Vec<bool>>>, is_broken: bool) -> Failing {
        let (zero_methods, told) = (ZeroMethods::new(false, false), Rc::clone(told));
        Failing { zero_methods, told, ended: Vec::new(), is_broken }
    }

    fn end(&mut self, token: u64, result: Result<(), ()>, buf: Option<Buf>) {
        self.ended.push(Ended { token, result, buf });
    }
}

impl AsyncBackend for Failing {
    type Error = ();

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

    fn refusal(&self, _: &Request) -> Option<DiskError> {
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

    fn zero_methods(&self) -> &ZeroMethods {
        &self.zero_methods
    }

    fn zero_bytes_max(&self, _: ZeroMethod) -> u64 {
        512
    }

    fn zero(&mut self, token: u64, _: ZeroMethod, _: u64, _: u64) {
        self.end(token, Err(()), None);
    }

    fn next_method(&self, _: ZeroMethod, (): &()) -> Option<ZeroMethod> {
        None
    }

    fn on_durable_error(&self, is_sync: bool, (): &()) {
        self.told.borrow_mut().push(is_sync);
    }

    fn cancel(&mut self, _: u64) {}

    fn disk_error(&self, (): &(), is_write: bool) -> DiskError {
        if is_write { DiskError::MediaWrite } else { DiskError::MediaRead }
    }

    fn send(&mut self) -> io::Result<()> {
        if self.is_broken { Err(io::ErrorKind::BrokenPipe.into()) } else { Ok(()) }
    }

    fn collect(&mut self, each: &mut dyn FnMut(Ended<()>)) {
        self.ended.drain(..).for_each(each);
    }
}

#[test]
fn only_what_was_to_be_durable_is_told_to_the_medium() {
    let context = ChannelContext { core: 0, pool: pool(), depth: 4 };
    let told = Rc::default();
    let medium = Failing::new(&told, false);
    let mut core = BackendChannel::new("d", medium, &Guard::new(1), &context).expect("opens");
    let range = BlockRange { lba: 0, blocks: 1 };
    let block = || context.pool.take(512).expect("a buffer");
    let end = |core: &mut BackendChannel<Failing>| -> Done {
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
        assert!(core.submit(Token(1), &IoRequest::new(op, range), buf).is_none());
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

#[test]
fn every_core_knows_that_a_write_of_a_medium_that_broke_may_still_be_done() {
    let context = ChannelContext { core: 0, pool: pool(), depth: 4 };
    let (told, guard) = (Rc::default(), Guard::new(2));
    let open = |is_broken| {
        BackendChannel::new("d", Failing::new(&told, is_broken), &guard, &context).expect("opens")
    };
    let (mut broken, other) = (open(true), open(false));
    let block = |lba| BlockRange { lba, blocks: 1 };
    for (token, op) in [(1, Op::Read), (2, Op::Write { fua: false })] {
        let buf = context.pool.take(512);
        assert!(broken.submit(Token(token), &IoRequest::new(op, block(token)), buf).is_none());
    }
    assert!(!other.may_still_write(block(2)));
    let mut done = Vec::with_capacity(2);
    broken.poll(Nanos::ZERO, &mut done);
    assert_eq!(done.iter().map(|done| done.result).collect::<Vec<_>>(), [Err(DiskError::Gone); 2]);
    assert_eq!([1, 2, 3].map(|lba| other.may_still_write(block(lba))), [false, true, false]);
    assert!(other.may_still_write(BlockRange { lba: 0, blocks: 8 }));
}
