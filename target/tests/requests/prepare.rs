//! What a disk may say of a Read's data, and what the target makes of it.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::sync::Arc;

use nvme_spec::Sqe;
use spindle_reactor::clock::Nanos;
use spindle_reactor::mem::Buf;
use spindle_target::qpair::request::RequestState;
use spindle_target_disk::{
    ChannelContext, Disk, DiskChannel, Done, Geometry, IoRequest, Op, OpenError, Owner, Prepared,
    ResizeError, Token, Usage,
};
use spindle_tests::script::{Rig, Setup};

use crate::{assert_ok, pattern, ram_disk};

/// A RAM disk that says of Reads what [`SAYS`] has, and then what it always says.
struct Saying(Arc<dyn Disk>);

struct SayingChannel(Box<dyn DiskChannel>);

#[derive(Debug, Clone, Copy)]
enum Says {
    Fill,
    Pool,
    Wait,
}

thread_local! {
    static SAYS: RefCell<VecDeque<Says>> = const { RefCell::new(VecDeque::new()) };
    static ASKED: RefCell<Vec<IoRequest>> = const { RefCell::new(Vec::new()) };
}

impl Disk for Saying {
    fn name(&self) -> &str {
        self.0.name()
    }

    fn kind(&self) -> &'static str {
        "saying"
    }

    fn geometry(&self) -> Geometry {
        self.0.geometry()
    }

    fn open(&self, context: &ChannelContext) -> Result<Box<dyn DiskChannel>, OpenError> {
        Ok(Box::new(SayingChannel(self.0.open(context)?)))
    }

    fn resize(&self, bytes: u64) -> Result<(), ResizeError> {
        self.0.resize(bytes)
    }

    fn usage(&self) -> Usage {
        self.0.usage()
    }
}

impl DiskChannel for SayingChannel {
    fn geometry(&self) -> Geometry {
        self.0.geometry()
    }

    fn prepare(&mut self, request: &IoRequest, next: Option<u64>) -> Prepared {
        if request.op != Op::Read {
            return self.0.prepare(request, next);
        }
        ASKED.with_borrow_mut(|asked| asked.push(*request));
        match SAYS.with_borrow_mut(VecDeque::pop_front) {
            None => self.0.prepare(request, next),
            Some(Says::Fill) => {
                let prepared = self.0.prepare(request, next);
                if let Prepared::Ready(data) = prepared { Prepared::Fill(data) } else { Prepared::Wait }
            }
            Some(Says::Pool) => Prepared::Pool,
            Some(Says::Wait) => Prepared::Wait,
        }
    }

    fn submit(&mut self, token: Token, request: &IoRequest, buf: Option<Buf>) -> Option<Done> {
        assert!(request.op != Op::Read || buf.is_some(), "a buffer comes with a Read that is submitted");
        self.0.submit(token, request, buf)
    }

    fn poll(&mut self, now: Nanos, done: &mut Vec<Done>) -> bool {
        self.0.poll(now, done)
    }

    fn cancel_owner(&mut self, owner: Owner) -> usize {
        self.0.cancel_owner(owner)
    }

    fn in_flight(&self) -> usize {
        self.0.in_flight()
    }
}

#[test]
fn a_read_is_answered_for_each_prepare_result_and_only_wait_repeats_prepare() {
    use Says::{Fill, Pool, Wait};
    for says in [&[][..], &[Fill], &[Pool], &[Wait], &[Wait, Wait, Fill], &[Wait, Pool]] {
        let mut rig = Rig::new(Setup::small(vec![Arc::new(Saying(ram_disk(512)))]));
        let host = rig.host();
        let data = pattern(3, 1024);
        assert_ok(&rig.run(&host.io, Sqe::write(1, 1, 7, 2, false), &data));
        SAYS.with_borrow_mut(|it| it.extend(says));
        ASKED.with_borrow_mut(Vec::clear);
        rig.send(&host.io, Sqe::read(2, 1, 7, 2), 1024);
        let waits = says.iter().filter(|it| matches!(it, Wait)).count();
        for _ in 0..waits {
            assert_eq!(rig.states(&host.io), [(RequestState::NeedBuffer, 1)], "{says:?}");
            assert_eq!(rig.answer(&host.io), None);
            rig.turn();
        }
        let answer = rig.answer(&host.io).expect("an answer");
        assert_ok(&answer);
        assert_eq!(answer.data, data, "{says:?}");
        let has_last_word = matches!(says.last(), Some(Fill | Pool));
        assert_eq!(ASKED.with_borrow(Vec::len), says.len() + usize::from(!has_last_word), "{says:?}");
        let namespace = rig.cores[0].snapshot().subsystems[0].namespaces[0].clone().expect("a namespace");
        assert_eq!(namespace.counters.totals().reads, 1, "{says:?}");
        rig.finish();
    }
}

#[test]
fn the_disk_is_told_what_the_host_says_of_its_data_and_which_host_it_is() {
    for says in [None, Some(Says::Pool)] {
        let mut rig = Rig::new(Setup::small(vec![Arc::new(Saying(ram_disk(512)))]));
        let host = rig.host();
        SAYS.with_borrow_mut(|it| it.extend(says));
        ASKED.with_borrow_mut(Vec::clear);
        let mut sqe = Sqe::read(1, 1, 0, 1);
        // Bits above the byte of Dataset Management are others' (DSPEC).
        sqe.cdw13 = 0x0147.into();
        rig.send(&host.io, sqe, 512);
        assert_ok(&rig.answer(&host.io).expect("an answer"));
        let asked = ASKED.with_borrow(|asked| asked[0]);
        assert_eq!((asked.hints, asked.client), (0x47, 1));
        rig.finish();
    }
}
