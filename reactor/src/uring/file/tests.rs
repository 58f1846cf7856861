//! Rings on files of the system.

use std::fs;
use std::os::unix::fs::FileExt;
use std::time::Duration;

use rustix::fs::{FallocateFlags, MemfdFlags, memfd_create};

use super::super::{Completion, Pieces, RETRIES_MAX, RING_ENTRIES_MAX};
use super::*;
use crate::alloc_count::allocations_here;
use crate::mem::{FrameStore, Pages, ZoneSpec};
use crate::net::{Interest, Readiness};

const BLOCK: usize = 4096;

fn pool() -> Pool {
    let zones = [ZoneSpec { buffer_bytes: 4096, count: 64 }, ZoneSpec { buffer_bytes: 131_072, count: 4 }];
    Pool::new(&zones, Pages::Base).expect("pool")
}

/// A file in memory of `bytes` zeroes, and a second handle to read and write it.
fn file(bytes: u64) -> (OwnedFd, fs::File) {
    let file = fs::File::from(memfd_create("ring", MemfdFlags::CLOEXEC).expect("memfd"));
    file.set_len(bytes).expect("length");
    (file.try_clone().expect("dup").into(), file)
}

fn filled(pool: &Pool, bytes: usize, fill: u8) -> Buf {
    let mut buf = pool.take(u32::try_from(bytes).expect("small")).expect("buffer");
    buf.segments_mut().for_each(|piece| piece.fill(fill));
    buf
}

/// Completions of all operations in flight, in order of the token.
fn finish(ring: &mut FileRing) -> Vec<Completion> {
    let mut done = Vec::new();
    while ring.in_flight() > 0 {
        ring.wait().expect("wait");
        ring.poll(|completion| done.push(completion));
    }
    done.sort_by_key(|completion| completion.token);
    done
}

fn one(ring: &mut FileRing) -> Completion {
    let mut done = finish(ring);
    assert_eq!(done.len(), 1);
    done.remove(0)
}

#[test]
fn what_is_written_is_read_back_with_and_without_registration() {
    let pool = pool();
    for is_registered in [true, false] {
        let mut ring = FileRing::new(8, &pool).expect("ring");
        if !is_registered {
            ring.pieces = Pieces::default();
        }
        let (fd, look) = file(1 << 20);
        let file = ring.register_file(fd);
        for (token, fill) in (0u8..8).enumerate() {
            let offset = u64::from(fill) * BLOCK as u64;
            ring.write(token as u64, file, offset, filled(&pool, BLOCK, fill + 1), fill % 2 == 0);
        }
        assert_eq!(ring.in_flight(), 8);
        let done = finish(&mut ring);
        assert!(done.iter().all(|completion| completion.result.is_ok()), "{done:?}");
        assert_eq!(
            done.iter().map(|completion| completion.token).collect::<Vec<_>>(),
            (0..8).collect::<Vec<_>>()
        );
        let mut block = [0; BLOCK];
        look.read_exact_at(&mut block, 5 * BLOCK as u64).expect("read");
        assert_eq!(block, [6; BLOCK]);
        ring.read(99, file, 0, pool.take(8 * 4096).expect("buffer"));
        let Completion { token, result, buf } = one(&mut ring);
        assert_eq!((token, result.is_ok()), (99, true));
        let buf = buf.expect("a read has a buffer");
        assert!((0u8..8).all(|fill| buf.equals_at(usize::from(fill) * BLOCK, &[fill + 1; BLOCK])));
    }
    assert_eq!(pool.free_bytes(), 64 * 4096 + 4 * 131_072, "every buffer came home");
}

#[test]
fn a_ring_that_polls_refuses_what_does_not_poll_and_gives_the_buffer_back() {
    let pool = pool();
    let mut ring = FileRing::polled(4, &pool).expect("ring");
    let (fd, _look) = file(1 << 20);
    let file = ring.register_file(fd);
    ring.read(1, file, 0, filled(&pool, 4096, 1));
    ring.submit().expect("submits");
    let mut done = Vec::new();
    while ring.in_flight() > 0 {
        ring.poll(|completion| done.push(completion));
    }
    let errno = Errno::from_io_error(done[0].result.as_ref().expect_err("memory does not poll"));
    assert_eq!((errno, done[0].buf.is_some()), (Some(Errno::OPNOTSUPP), true));
}

#[test]
#[should_panic(expected = "more operations than the ring has entries")]
fn a_full_ring_takes_no_more() {
    let mut ring = FileRing::new(2, &pool()).expect("ring");
    let (fd, _look) = file(1 << 20);
    let file = ring.register_file(fd);
    for token in 0..3 {
        ring.fsync(token, file, true);
    }
}

#[test]
fn not_now_is_asked_again_but_not_for_ever() {
    let mut ring = FileRing::new(1, &pool()).expect("ring");
    let (fd, _look) = file(1 << 20);
    let file = ring.register_file(fd);
    ring.fsync(7, file, true);
    let wire = ring.flights.slot_at(0).expect("a slot").to_wire();
    // The queue has one entry: the operation is submitted before it is queued again.
    for _ in 0..RETRIES_MAX {
        ring.submit().expect("submits");
        assert!(ring.on_result(u64::from(wire), -libc::EAGAIN).is_none());
    }
    let done = ring.on_result(u64::from(wire), -libc::EAGAIN).expect("the end");
    let errno = Errno::from_io_error(done.result.as_ref().expect_err("not now"));
    assert_eq!((done.token, errno), (7, Some(Errno::AGAIN)));
    assert!(ring.on_result(u64::from(wire), 0).is_none(), "a name of the past");
}

#[test]
fn reading_past_the_end_is_an_unexpected_end() {
    let pool = pool();
    let mut ring = FileRing::new(4, &pool).expect("ring");
    let (fd, _look) = file(6000);
    let file = ring.register_file(fd);
    for offset in [4096, 6000, 1 << 30] {
        ring.read(offset, file, offset, filled(&pool, 4096, 1));
        let done = one(&mut ring);
        let error = done.result.expect_err("past the end");
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
        assert!(done.buf.is_some());
    }
}

#[test]
fn errors_of_the_system_come_with_the_buffer() {
    let pool = pool();
    let mut ring = FileRing::new(4, &pool).expect("ring");
    let read_only = fs::File::open("/dev/zero").expect("open");
    let file = ring.register_file(read_only.into());
    ring.write(1, file, 0, filled(&pool, 4096, 1), false);
    let done = one(&mut ring);
    assert_eq!(done.result.expect_err("read only").raw_os_error(), Some(libc::EBADF));
    assert!(done.buf.expect("buffer").equals_at(0, &[1; 4096]));
    ring.read(2, file, 0, filled(&pool, 4096, 1));
    assert!(one(&mut ring).buf.expect("buffer").equals_at(0, &[0; 4096]));
}

#[test]
fn buffers_of_several_pieces_are_written_from_and_read_into() {
    let pool = pool();
    let mut ring = FileRing::new(4, &pool).expect("ring");
    let (fd, look) = file(1 << 20);
    let file = ring.register_file(fd);
    let store = FrameStore::new(64 * 4096, 64 * 4096, Pages::Base, false).expect("store");
    let core = store.core();
    // Pages whose places are pinned lie in small frames.
    let mut held = Vec::new();
    for page in [3u8, 1, 0, 2, 3, 0] {
        held.push(core.read(0, 4 * 4096));
        let offset = u64::from(page) * 4096;
        let mut buf = core.take(offset, 4096).expect("frame");
        buf.copy_in(0, &[page + 1; 4096]);
        core.write(offset, buf);
    }
    let shared = core.read(512, 4 * 4096 - 512);
    assert!(!shared.is_contiguous());
    ring.write(1, file, 512, shared, true);
    assert!(one(&mut ring).result.is_ok());
    let mut bytes = vec![0; 4 * 4096];
    look.read_exact_at(&mut bytes, 0).expect("read");
    assert_eq!(bytes[..512], [0; 512]);
    assert!((512..4 * 4096).all(|at| usize::from(bytes[at]) == at / 4096 + 1));
    // Every second frame is held, so that the free ones are not adjacent.
    let (mut held, mut free): (Vec<_>, Vec<_>) =
        std::iter::from_fn(|| core.take(0, 4096)).enumerate().partition(|(index, _)| index % 2 == 0);
    free.clear();
    let into = core.take(0, 4 * 4096).expect("frames");
    assert!(!into.is_contiguous());
    ring.read(2, file, 0, into);
    let done = one(&mut ring);
    assert!(done.result.is_ok());
    let mut got = vec![0; 4 * 4096];
    done.buf.expect("buffer").copy_out(0, &mut got);
    assert_eq!(got, bytes);
    held.clear();
}

#[test]
fn a_stream_gives_short_reads_and_the_remainder_is_asked_for() {
    let pool = pool();
    let mut ring = FileRing::new(4, &pool).expect("ring");
    let (read_end, mut write_end) = std::os::unix::net::UnixStream::pair().expect("pair");
    let file = ring.register_file(read_end.into());
    ring.read(1, file, u64::MAX, filled(&pool, 8192, 0));
    ring.submit().expect("submit");
    let mut done = Vec::new();
    for fill in 1..=4u8 {
        assert!(done.is_empty(), "not before all of it is there");
        io::Write::write_all(&mut write_end, &[fill; 2048]).expect("write");
        ring.wait().expect("wait");
        ring.poll(|completion| done.push(completion));
        ring.submit().expect("submit");
    }
    let done = done.pop().expect("done");
    assert!(done.result.is_ok(), "{done:?}");
    let buf = done.buf.expect("buffer");
    assert!((0..4u8).all(|piece| buf.equals_at(usize::from(piece) * 2048, &[piece + 1; 2048])));
}

#[test]
fn a_hole_is_punched_and_reads_as_zeroes() {
    let pool = pool();
    let mut ring = FileRing::new(4, &pool).expect("ring");
    let (fd, look) = file(1 << 20);
    let file = ring.register_file(fd);
    ring.write(1, file, 0, filled(&pool, 131_072, 5), false);
    assert!(one(&mut ring).result.is_ok());
    let blocks =
        |file: &fs::File| std::os::unix::fs::MetadataExt::blocks(&file.metadata().expect("metadata"));
    let before = blocks(&look);
    let mode = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    ring.fallocate(2, file, mode, 4096, 65_536);
    assert!(one(&mut ring).result.is_ok());
    assert!(blocks(&look) < before);
    let mut bytes = [1; 8192];
    look.read_exact_at(&mut bytes, 0).expect("read");
    assert_eq!((&bytes[..4096], &bytes[4096..]), (&[5; 4096][..], &[0; 4096][..]));
}

#[test]
fn a_sleeper_is_told_by_the_rings_descriptor() {
    let pool = pool();
    let mut ring = FileRing::new(4, &pool).expect("ring");
    let (fd, _look) = file(1 << 20);
    let file = ring.register_file(fd);
    let (mut readiness, mut ready) = (Readiness::new().expect("epoll"), Vec::with_capacity(1));
    readiness.add(&ring, 7, Interest::READ).expect("add");
    assert_eq!(readiness.poll(Some(Duration::ZERO), &mut ready).expect("poll"), 0);
    ring.fsync(1, file, true);
    ring.submit().expect("submit");
    while ring.poll(|completion| assert_eq!(completion.token, 1)) == 0 {
        // The kernel's notification of the completion work may end the wait without an event; the poll then
        // returns the completion.
        readiness.poll(Some(Duration::from_secs(10)), &mut ready).expect("poll");
    }
    assert_eq!(ring.in_flight(), 0);
}

#[test]
fn dropping_a_ring_waits_for_what_is_in_flight_and_gives_the_buffers_back() {
    let pool = pool();
    let free = pool.free_bytes();
    let (fd, look) = file(1 << 20);
    let mut ring = FileRing::new(32, &pool).expect("ring");
    let file = ring.register_file(fd);
    for block in 0..32 {
        ring.write(block, file, block * 4096, filled(&pool, 4096, 3), false);
        if block == 16 {
            ring.submit().expect("submit");
        }
    }
    drop(ring);
    assert_eq!(pool.free_bytes(), free);
    let mut bytes = vec![0; 32 * 4096];
    look.read_exact_at(&mut bytes, 0).expect("read");
    assert!(bytes.iter().all(|byte| *byte == 3), "also those that were only queued");
}

#[test]
fn a_dropped_ring_has_let_go_of_its_files() {
    use rustix::fs::{FlockOperation, flock};
    let pool = pool();
    let path = std::env::temp_dir().join(format!("spindle-ring-lock-{}", std::process::id()));
    for _ in 0..50 {
        let options = fs::File::options().read(true).write(true).create(true).truncate(false).open(&path);
        let locked = options.expect("open");
        flock(&locked, FlockOperation::NonBlockingLockExclusive).expect("it is free again");
        // A read of a page in the page cache completes on this thread. A worker thread of the kernel (a write
        // needs one) frees its operation, which keeps the file, only after it has posted the completion.
        locked.write_all_at(&[1; 4096], 0).expect("write");
        let mut ring = FileRing::new(4, &pool).expect("ring");
        let file = ring.register_file(locked.into());
        ring.read(1, file, 0, filled(&pool, 4096, 0));
        drop(ring);
    }
    fs::remove_file(&path).expect("remove");
}

#[test]
fn a_panic_in_the_middle_of_a_poll_loses_nothing() {
    let pool = pool();
    let free = pool.free_bytes();
    let (fd, _look) = file(1 << 20);
    let mut ring = FileRing::new(8, &pool).expect("ring");
    let file = ring.register_file(fd);
    for block in 0..8 {
        ring.write(block, file, block * 4096, filled(&pool, 4096, 3), false);
    }
    ring.wait().expect("wait");
    let poll = std::panic::AssertUnwindSafe(|| ring.poll(|_| std::panic::resume_unwind(Box::new("stop"))));
    assert!(std::panic::catch_unwind(poll).is_err());
    assert_eq!(finish(&mut ring).len(), 7);
    assert_eq!(pool.free_bytes(), free);
}

#[test]
fn steady_work_allocates_nothing() {
    let pool = pool();
    let mut ring = FileRing::new(16, &pool).expect("ring");
    let (fd, _look) = file(1 << 20);
    let file = ring.register_file(fd);
    let mut done = 0;
    let mut round = |ring: &mut FileRing| {
        for token in 0..16 {
            let buf = pool.take(4096).expect("buffer");
            if token % 2 == 0 {
                ring.write(token, file, token * 4096, buf, token % 4 == 0);
            } else {
                ring.read(token, file, token * 4096, buf);
            }
        }
        while ring.in_flight() > 0 {
            ring.submit().expect("submit");
            done += ring.poll(|completion| completion.result.expect("done"));
        }
    };
    round(&mut ring);
    let before = allocations_here();
    for _ in 0..100 {
        round(&mut ring);
    }
    assert_eq!(allocations_here(), before);
    assert_eq!(done, 101 * 16);
}

#[test]
fn more_files_than_are_registered_work_too() {
    let pool = pool();
    let mut ring = FileRing::new(4, &pool).expect("ring");
    let files: Vec<_> = (0..70).map(|_| ring.register_file(file(4096).0)).collect();
    assert!(!ring.device.files[usize::from(files[69].0)].is_registered);
    for file in files {
        ring.write(1, file, 0, filled(&pool, 4096, 1), false);
        assert!(one(&mut ring).result.is_ok());
    }
}

#[test]
fn entries_out_of_range_are_refused() {
    for entries in [0, RING_ENTRIES_MAX + 1] {
        let error = FileRing::new(entries, &pool()).expect_err("refused");
        assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
    }
}

#[test]
fn the_pool_s_memory_is_registered_as_it_is_used_and_not_before() {
    let pool = pool();
    let mut ring = FileRing::new(8, &pool).expect("ring");
    let (fd, _look) = file(1 << 20);
    let file = ring.register_file(fd);
    let mut counts = vec![ring.pieces.registered()];
    for bytes in [4096, 4096, 131_072, 512] {
        ring.write(1, file, 0, filled(&pool, bytes, 7), false);
        assert!(one(&mut ring).result.is_ok());
        counts.push(ring.pieces.registered());
    }
    // Nothing is registered where the limit of locked memory is lower.
    assert!(counts == [0, 1, 1, 2, 2] || counts == [0; 5], "{counts:?}");
    ring.write(2, file, 0, Buf::zeroes(4096), false);
    assert!(one(&mut ring).result.is_ok());
    assert_eq!(ring.pieces.registered(), counts[4], "memory of no pool is not");
}

fn flight(kind: Kind) -> Flight<Operation> {
    let operation = Operation { file: FileIndex(0), kind, offset: 0 };
    Flight::read(1, operation, Buf::heap(4096), 0..4096)
}

fn errno(step: Step<io::Error>) -> Option<Errno> {
    match step {
        Step::Again | Step::Ended(Ok(())) => None,
        Step::Ended(Err(error)) => Errno::from_io_error(&error),
    }
}

#[test]
fn short_transfers_add_up_and_nothing_is_an_end() {
    let mut read = flight(Kind::Read);
    assert!(matches!(Files::on_result(&mut read, 1000), Step::Again));
    assert!(matches!(Files::on_result(&mut read, 3096), Step::Ended(Ok(()))));
    let mut read = flight(Kind::Read);
    assert!(matches!(Files::on_result(&mut read, 4095), Step::Again));
    let kind = |step| match step {
        Step::Ended(Err(error)) => Some(io::Error::kind(&error)),
        Step::Ended(Ok(())) | Step::Again => None,
    };
    let end = Some(io::ErrorKind::UnexpectedEof);
    let refused = Files::on_result(&mut read, -libc::EINVAL);
    assert_eq!(kind(refused), end, "a direct read does not go on inside of a sector");
    assert_eq!(kind(Files::on_result(&mut read, 0)), end);
    let mut write = flight(Kind::Write { dsync: false });
    assert!(matches!(Files::on_result(&mut write, 512), Step::Again));
    assert_eq!(errno(Files::on_result(&mut write, -libc::EINVAL)), Some(Errno::INVAL));
    assert_eq!(kind(Files::on_result(&mut write, 0)), Some(io::ErrorKind::WriteZero));
}
