//! Tests of the delay layer. Time is what the polls are told.

use std::sync::atomic::{AtomicUsize, Ordering};

use spindle_reactor::mem::{Buf, Pages, Pool, ZoneSpec};

use super::*;
use crate::testing::able::Able;
use crate::{
    CacheSpec, CachedDisk, DiskError, Fault, FaultDisk, NullDisk, NullSpec, OpKind, PolicyKind, RamDisk,
    RamSpec, ResizeError,
};

const BLOCK: u64 = 4096;
const BLOCKS: u64 = 1024;
/// Bytes per second with which a block takes 100 us.
const BANDWIDTH: u64 = 10_000 * BLOCK;
/// No tokens.
const NONE: [u64; 0] = [];

fn us(us: u64) -> Nanos {
    Nanos::from_us(us)
}

fn at(lba: u64) -> BlockRange {
    BlockRange { lba, blocks: 1 }
}

fn latency(latency: u64) -> DelaySpec {
    DelaySpec { latency: us(latency), ..DelaySpec::default() }
}

fn bandwidth() -> DelaySpec {
    DelaySpec { bandwidth: Some(BANDWIDTH), ..DelaySpec::default() }
}

fn seek(seek: u64) -> DelaySpec {
    DelaySpec { seek: us(seek), ..DelaySpec::default() }
}

fn ram() -> Arc<dyn Disk> {
    let spec = RamSpec { bytes: BLOCKS * BLOCK, block_bytes: 4096, pages: Pages::Base, has_seals: false };
    RamDisk::new("r", spec).expect("ram disk")
}

fn null() -> Arc<dyn Disk> {
    NullDisk::new("n", NullSpec { bytes: BLOCKS * BLOCK, block_bytes: 4096 }).expect("null disk")
}

fn slow(inner: Arc<dyn Disk>, spec: DelaySpec) -> Arc<dyn Disk> {
    DelayDisk::new(inner, &spec).expect("a slow disk")
}

/// A core that is told what time it is.
struct Rig {
    disk: Box<dyn DiskChannel>,
    pool: Pool,
    is_busy: bool,
}

impl Rig {
    fn new(source: &dyn Disk) -> Rig {
        let pool = Pool::new(&[ZoneSpec { buffer_bytes: 4096, count: 16 }], Pages::Base).expect("pool");
        let context = ChannelContext { core: 0, pool: pool.clone(), depth: 16 };
        Rig { disk: source.open(&context).expect("opens"), pool, is_busy: false }
    }

    fn submit(&mut self, token: u64, op: Op, range: BlockRange) {
        assert!(self.disk.submit(Token(token), &IoRequest::new(op, range), None).is_none(), "not at once");
    }

    fn read(&mut self, token: u64, lba: u64) {
        let request = IoRequest::new(Op::Read, at(lba));
        assert!(matches!(self.disk.prepare(&request, None), Prepared::Later), "not in place any more");
        self.submit(token, Op::Read, at(lba));
    }

    /// For a write, from whom the disk says.
    fn buffer(&mut self, request: &IoRequest) -> Buf {
        match self.disk.prepare(request, None) {
            Prepared::Fill(buf) => buf,
            Prepared::Pool => self.pool.take(4096).expect("a buffer"),
            Prepared::Ready(_) | Prepared::Later | Prepared::Wait => panic!("no answer to a write here"),
        }
    }

    fn write(&mut self, token: u64, lba: u64, fill: u8) {
        let request = IoRequest::new(Op::Write { fua: false }, at(lba));
        let mut buf = self.buffer(&request);
        buf.segments_mut().for_each(|segment| segment.fill(fill));
        assert!(self.disk.submit(Token(token), &request, Some(buf)).is_none(), "not at once");
    }

    fn ends(&mut self, now: Nanos) -> Vec<Done> {
        let mut done = Vec::with_capacity(32);
        self.is_busy = self.disk.poll(now, &mut done);
        done
    }

    /// The tokens of what ends in a poll at this time.
    fn tokens(&mut self, now: Nanos) -> Vec<u64> {
        self.ends(now).iter().map(|done| done.token.0).collect()
    }

    /// When the commands end, asked every 10 us from `from` on.
    fn times(&mut self, from: u64, count: usize) -> Vec<(u64, u64)> {
        let mut times = Vec::new();
        for now in (from..from + 100_000).step_by(10) {
            times.extend(self.tokens(us(now)).into_iter().map(|token| (token, now)));
            if times.len() == count {
                return times;
            }
        }
        panic!("only {times:?} have ended")
    }
}

#[test]
fn a_command_ends_in_the_first_poll_at_its_time_or_after_it() {
    for source in [ram(), null()] {
        let mut rig = Rig::new(&*slow(source, latency(500)));
        // The clock stood while the core slept: the time counts from the poll after the submission.
        assert_eq!((rig.tokens(us(7)), rig.is_busy), (vec![], false));
        rig.read(1, 3);
        assert_eq!((rig.tokens(us(1000)), rig.is_busy, rig.disk.in_flight()), (vec![], true, 1));
        rig.write(2, 4, 9);
        assert_eq!((rig.tokens(us(1200)), rig.is_busy), (vec![], true));
        assert_eq!((rig.tokens(Nanos(1_499_999)), rig.is_busy), (vec![], true));
        assert_eq!((rig.tokens(us(1500)), rig.is_busy), (vec![1], true));
        assert_eq!((rig.tokens(us(9000)), rig.is_busy), (vec![2], true));
        assert_eq!((rig.tokens(us(9000)), rig.is_busy, rig.disk.in_flight()), (vec![], false, 0));
    }
}

#[test]
fn latencies_run_at_the_same_time_and_ends_keep_their_order() {
    let mut rig = Rig::new(&*slow(ram(), latency(500)));
    (0..16).for_each(|token| rig.read(token, token));
    assert_eq!(rig.tokens(us(10)), NONE);
    // No more than there is room for.
    let mut done = Vec::with_capacity(5);
    assert!(rig.disk.poll(us(510), &mut done));
    assert_eq!(done.iter().map(|done| done.token.0).collect::<Vec<_>>(), [0, 1, 2, 3, 4]);
    assert_eq!(rig.disk.in_flight(), 11);
    assert_eq!(rig.tokens(us(510)), (5..16).collect::<Vec<_>>());
}

#[test]
fn a_read_brings_what_was_there_when_it_was_submitted() {
    let mut rig = Rig::new(&*slow(ram(), latency(10)));
    rig.write(1, 3, 0x55);
    rig.read(2, 3);
    // Asked for and not submitted; then one without a question.
    let asked = IoRequest::new(Op::Read, at(3));
    assert!(matches!(rig.disk.prepare(&asked, None), Prepared::Later));
    rig.write(3, 3, 0x66);
    rig.submit(4, Op::Read, at(3));
    assert_eq!(rig.tokens(us(1)), NONE);
    let first = |done: &Done| done.buf.as_ref().and_then(|buf| buf.as_slice().map(|bytes| bytes[0]));
    let found: Vec<_> =
        rig.ends(us(11)).iter().map(|done| (done.token.0, done.result, first(done))).collect();
    assert_eq!(
        found,
        [(1, Ok(()), None), (2, Ok(()), Some(0x55)), (3, Ok(()), None), (4, Ok(()), Some(0x66))]
    );
}

#[test]
fn bytes_go_one_command_after_the_other_of_all_cores() {
    let source = slow(null(), bandwidth());
    let (mut one, mut other) = (Rig::new(&*source), Rig::new(&*source));
    one.read(1, 0);
    one.write(2, 500, 1);
    one.submit(3, Op::Read, BlockRange { lba: 7, blocks: 5 });
    assert_eq!(one.tokens(us(1000)), NONE);
    other.read(4, 9);
    assert_eq!(other.tokens(us(1050)), NONE);
    assert_eq!(one.times(1060, 3), [(1, 1100), (2, 1200), (3, 1700)]);
    // Behind those of the other core, which had come before.
    assert_eq!(other.times(1700, 1), [(4, 1800)]);
    // A device that rested begins at once.
    other.read(5, 0);
    assert_eq!(other.times(5000, 1), [(5, 5100)]);
    // What moves nothing waits its turn only; zeroes are written, and a compared block is written as well.
    other.submit(6, Op::Read, at(0));
    other.submit(7, Op::Flush, at(0));
    other.submit(8, Op::WriteZeroes { deallocate: true, fua: false }, at(0));
    other.submit(9, Op::WriteZeroes { deallocate: false, fua: false }, at(0));
    assert_eq!(other.times(6000, 4), [(6, 6100), (7, 6100), (8, 6100), (9, 6200)]);
    let mut ram = Rig::new(&*slow(Arc::new(Able(ram())), bandwidth()));
    let data = ram.buffer(&IoRequest::new(Op::Write { fua: false }, at(5)));
    let expected = ram.pool.take(4096).expect("a buffer");
    assert!(ram.disk.compare_and_write(Token(1), at(5), expected, data).is_none());
    assert!(ram.disk.copy(Token(2), BlockRange { lba: 0, blocks: 3 }, 100, false).is_none());
    assert_eq!(ram.times(0, 2), [(1, 200), (2, 800)]);
}

#[test]
fn a_seek_is_as_long_as_the_root_of_the_way() {
    let mut rig = Rig::new(&*slow(null(), seek(800)));
    let mut now = 0;
    let mut time = |rig: &mut Rig, range: BlockRange| {
        now += 10_000;
        rig.submit(1, Op::Read, range);
        rig.times(now, 1)[0].1 - now
    };
    // On from where the head is, which is at the begin of the disk.
    assert_eq!(time(&mut rig, at(0)), 0);
    assert_eq!(time(&mut rig, BlockRange { lba: 1, blocks: 255 }), 0);
    // A quarter of the disk takes half the time, in both directions.
    assert_eq!(time(&mut rig, at(512)), 400);
    assert_eq!(time(&mut rig, at(257)), 400);
    // The block again: the head is behind it.
    assert_eq!(time(&mut rig, at(257)), 30, "800 x sqrt(1 / 1024) is 25, asked every 10 us");
    assert!(time(&mut rig, at(1023)) > 600);
    // A copy goes to both places, and the next command begins where it ended.
    let copied = slow(Arc::new(Able(ram())), seek(800));
    let mut rig = Rig::new(&*copied);
    assert!(rig.disk.copy(Token(1), at(256), 513, false).is_none());
    assert_eq!(rig.times(0, 1), [(1, 800)]);
    assert_eq!(time(&mut rig, at(514)), 0);
}

#[test]
fn seek_bandwidth_and_latency_add_up() {
    let spec = DelaySpec { latency: us(1000), bandwidth: Some(BANDWIDTH), seek: us(800) };
    let mut rig = Rig::new(&*slow(null(), spec));
    rig.read(1, 256);
    rig.read(2, 257);
    rig.submit(3, Op::Flush, at(0));
    assert_eq!(rig.times(0, 3), [(1, 1500), (2, 1600), (3, 1600)]);
}

#[test]
fn errors_of_the_disk_come_after_the_time_and_a_slow_disk_is_waited_for() {
    let (faulty, control) = FaultDisk::new(ram(), 1);
    let mut rig = Rig::new(&*slow(faulty, latency(100)));
    control.set(Fault::Error, OpKind::Flush, 1_000_000);
    control.set_error(OpKind::Flush, DiskError::MediaWrite);
    control.set(Fault::Drop, OpKind::Write, 1_000_000);
    rig.submit(1, Op::Flush, at(0));
    rig.submit(2, Op::Verify, at(0));
    rig.write(3, 0, 1);
    assert_eq!(rig.tokens(us(1)), NONE);
    let ended: Vec<_> = rig.ends(us(101)).into_iter().map(|done| (done.token.0, done.result)).collect();
    assert_eq!(ended, [(1, Err(DiskError::MediaWrite)), (2, Err(DiskError::NotSupported))]);
    // Its time is over, the disk is not through: the core may sleep until that tells of itself.
    assert_eq!((rig.tokens(us(500)), rig.is_busy, rig.disk.in_flight()), (vec![], false, 1));
    control.release_dropped();
    assert_eq!((rig.tokens(us(501)), rig.disk.in_flight()), (vec![3], 0));
}

#[test]
fn what_is_forgotten_comes_back_at_once_and_gives_its_time_back() {
    let owned = |owner: u64, token: u64| owner << 32 | token;
    let spec = DelaySpec { latency: us(50), ..bandwidth() };
    let mut rig = Rig::new(&*slow(null(), spec));
    (0..10).for_each(|token| rig.read(owned(1, token), 0));
    rig.read(owned(2, 0), 0);
    assert_eq!(rig.tokens(us(0)), NONE);
    // One in the middle of its work, nine that wait, one that no poll has seen.
    rig.write(owned(1, 10), 0, 1);
    assert_eq!(rig.tokens(us(150)), [owned(1, 0)]);
    rig.write(owned(1, 11), 0, 1);
    assert_eq!(rig.disk.cancel_owner(Owner(1)), 11);
    assert_eq!(rig.disk.in_flight(), 12);
    let mut back = rig.tokens(us(150));
    back.sort_unstable();
    assert_eq!(back, (1..12).map(|token| owned(1, token)).collect::<Vec<_>>());
    assert_eq!((rig.disk.cancel_owner(Owner(1)), rig.disk.in_flight()), (0, 1));
    // Eleven commands were to keep the device until 1200 us. The other owner's keeps its time; a new one
    // gets what is left, and not more than there was.
    rig.read(owned(2, 1), 0);
    assert_eq!(rig.times(150, 2), [(owned(2, 1), 400), (owned(2, 0), 1150)]);
    assert_eq!(rig.pool.free_bytes(), 16 * 4096);
}

#[test]
fn a_forgotten_command_that_the_disk_has_comes_back_with_it() {
    let (faulty, control) = FaultDisk::new(ram(), 1);
    let mut rig = Rig::new(&*slow(faulty, latency(100)));
    control.set(Fault::Drop, OpKind::Write, 1_000_000);
    rig.write(1, 0, 1);
    assert_eq!(rig.tokens(us(1)), NONE);
    assert_eq!(rig.disk.cancel_owner(Owner(0)), 1);
    assert_eq!(rig.tokens(us(200)), NONE);
    control.release_dropped();
    assert_eq!((rig.tokens(us(201)), rig.disk.in_flight()), (vec![1], 0));
}

#[test]
fn the_disk_below_is_seen_through_it() {
    let inner = ram();
    let source = slow(Arc::clone(&inner), latency(1));
    assert_eq!((source.name(), source.kind(), source.geometry()), ("r", "ram", inner.geometry()));
    assert!(source.area().is_some(), "the memory of the RAM disk");
    let rig = Rig::new(&*source);
    assert!(rig.disk.abilities().reads_in_place);
    source.prepare_resize(BLOCK).expect("smaller");
    source.resize(BLOCK).expect("smaller");
    assert_eq!(rig.disk.geometry().block_count, 1);
    assert!(source.resize(BLOCKS * BLOCK * 2).is_err());
}

#[test]
fn settings_out_of_range_are_refused_by_name() {
    let error = |spec: DelaySpec| DelayDisk::new(null(), &spec).err().expect("refused").to_string();
    assert_eq!(error(latency(10_000_001)), "disk \"n\": delay.latency_us = 10000001: must be 0 to 10000000");
    assert_eq!(error(seek(1_000_001)), "disk \"n\": delay.seek_us = 1000001: must be 0 to 1000000");
    for bandwidth in [0, BANDWIDTH_MIN - 1, BANDWIDTH_MAX + 1] {
        let found = error(DelaySpec { bandwidth: Some(bandwidth), ..DelaySpec::default() });
        let said = format!("delay.bandwidth = {bandwidth}: must be 65536 to 1099511627776 bytes per second");
        assert!(found.ends_with(&said), "{found}");
    }
    slow(null(), DelaySpec { latency: us(10_000_000), bandwidth: Some(BANDWIDTH_MIN), seek: us(1_000_000) });
}

/// A disk that counts how often it is told of a change.
struct Told(Arc<dyn Disk>, Arc<AtomicUsize>);

impl Disk for Told {
    fn name(&self) -> &str {
        self.0.name()
    }

    fn kind(&self) -> &'static str {
        "told"
    }

    fn geometry(&self) -> Geometry {
        self.0.geometry()
    }

    fn open(&self, context: &ChannelContext) -> Result<Box<dyn DiskChannel>, OpenError> {
        Ok(Box::new(ToldChannel(self.0.open(context)?, Arc::clone(&self.1))))
    }

    fn resize(&self, bytes: u64) -> Result<(), ResizeError> {
        self.0.resize(bytes)
    }
}

struct ToldChannel(Box<dyn DiskChannel>, Arc<AtomicUsize>);

impl DiskChannel for ToldChannel {
    fn geometry(&self) -> Geometry {
        self.0.geometry()
    }

    fn prepare(&mut self, request: &IoRequest, next: Option<u64>) -> Prepared {
        self.0.prepare(request, next)
    }

    fn submit(&mut self, token: Token, request: &IoRequest, buf: Option<Buf>) -> Option<Done> {
        self.0.submit(token, request, buf)
    }

    fn poll(&mut self, now: Nanos, done: &mut Vec<Done>) -> bool {
        self.0.poll(now, done)
    }

    fn cancel_owner(&mut self, owner: Owner) -> usize {
        self.0.cancel_owner(owner)
    }

    fn reconfigure(&mut self) {
        self.1.fetch_add(1, Ordering::Relaxed);
    }

    fn in_flight(&self) -> usize {
        self.0.in_flight()
    }
}

#[test]
fn every_layer_passes_on_that_the_configuration_has_changed() {
    let cache = CacheSpec::new(1 << 20, PolicyKind::Lru, Pages::Base);
    type Layer<'a> = &'a dyn Fn(Arc<dyn Disk>) -> Arc<dyn Disk>;
    let layers: [(&str, Layer<'_>); 4] = [
        ("delay", &|inner| slow(inner, latency(10))),
        ("fault", &|inner| FaultDisk::new(inner, 1).0),
        ("cache", &|inner| CachedDisk::new(inner, Some(&cache)).expect("cached")),
        ("switch", &|inner| CachedDisk::new(inner, None).expect("without a cache")),
    ];
    for (layer, over) in layers {
        let told = Arc::new(AtomicUsize::new(0));
        let mut rig = Rig::new(&*over(Arc::new(Told(ram(), Arc::clone(&told)))));
        rig.disk.reconfigure();
        assert_eq!(told.load(Ordering::Relaxed), 1, "{layer}");
    }
}
