//! Tests of the file disk; the model test of all kinds is in `testing::model`.

use spindle_reactor::clock::Nanos;
use std::io::Write;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;

use rustix::fs::{MemfdFlags, SealFlags};

use super::*;
use crate::backend::{AsyncBackend, ZeroMethod};
use crate::testing::model::check;
use crate::testing::{Driver, TempPath};
use crate::{BlockRange, IoRequest, Op};

const MIB: u64 = 1 << 20;
const ZEROES: Op = Op::WriteZeroes { deallocate: false, fua: false };

fn spec(at: &TempPath, bytes: u64) -> FileSpec {
    FileSpec { create_bytes: Some(bytes), ..FileSpec::new(at.path(), 4096) }
}

fn disk(at: &TempPath, bytes: u64) -> Arc<FileDisk> {
    FileDisk::new("f", &spec(at, bytes)).expect("file disk")
}

/// Why a disk cannot be opened, told without patience.
fn refusal(spec: &FileSpec) -> String {
    FileDisk::open_within("f", spec, Duration::ZERO).err().expect("refused").to_string()
}

fn range(lba: u64, blocks: u32) -> BlockRange {
    BlockRange { lba, blocks }
}

/// Fills the disk's first `bytes` with a byte.
fn fill(driver: &mut Driver, bytes: u64, with: u8) {
    for lba in (0..bytes / 4096).step_by(16) {
        driver.write(lba, &[with; 65536], false).expect("write");
    }
}

#[test]
fn a_file_is_made_sparse_locked_and_opened_again_as_it_is() {
    let at = TempPath::new();
    let first = disk(&at, 64 * MIB);
    assert!(first.facts().is_new && !first.facts().is_block_device);
    assert_eq!((first.geometry().bytes(), first.usage().bytes_used), (64 * MIB, 0));
    let geometry = first.geometry();
    assert!(geometry.has_volatile_cache && geometry.can_compare_and_write && !geometry.is_read_only);
    let error = refusal(&spec(&at, 64 * MIB));
    assert!(error.contains(&format!("cannot lock {}", at.path().display())), "{error}");
    assert!(error.ends_with("another disk or process has it locked"), "{error}");
    let reader = FileSpec { is_read_only: true, ..spec(&at, MIB) };
    assert!(refusal(&reader).contains("cannot lock"), "a writer excludes readers");
    let core = Driver::new(&*first);
    drop(first);
    assert!(refusal(&reader).contains("cannot lock"), "a core that is left holds the lock");
    drop(core);
    let again = FileDisk::new("f", &reader).expect("opens");
    assert!(!again.facts().is_new && again.geometry().is_read_only);
    assert_eq!(again.geometry().bytes(), 64 * MIB);
    let notes = &again.facts().notes;
    assert!(
        notes.iter().any(|note| note.contains("has 67108864 bytes and keeps this size; the size 1048576")),
        "{notes:?}"
    );
    assert!(FileDisk::new("f", &reader).is_ok(), "readers share it");
    assert!(refusal(&spec(&at, MIB)).contains("cannot lock"), "readers exclude a writer");
}

#[test]
fn a_file_that_is_let_go_soon_is_waited_for() {
    let at = TempPath::new();
    let first = disk(&at, MIB);
    let spec = FileSpec::new(at.path(), 4096);
    std::thread::scope(|scope| {
        let (begun, has_begun) = std::sync::mpsc::channel();
        let second = scope.spawn(move || {
            begun.send(()).expect("is heard");
            FileDisk::open_within("f", &spec, crate::testing::TEST_TIME_MAX).map(drop)
        });
        has_begun.recv().expect("begins");
        (0..100).for_each(|_| std::thread::yield_now());
        drop(first);
        second.join().expect("thread").expect("opens in the end");
    });
}

#[test]
fn what_cannot_be_a_disk_is_refused_by_name() {
    let at = TempPath::new();
    let missing = refusal(&FileSpec::new(at.path(), 4096));
    assert!(missing.contains(&format!("cannot stat {}: No such file", at.path().display())), "{missing}");
    let device = refusal(&FileSpec::new("/dev/full", 4096));
    assert!(device.contains("path = /dev/full: must be a regular file or a block device"), "{device}");
    let block = refusal(&FileSpec { block_bytes: 1000, ..spec(&at, MIB) });
    assert!(block.contains("block_bytes = 1000: must be 512 or 4096"), "{block}");
    let size = refusal(&spec(&at, 5000));
    assert!(size.contains("size = 5000: must be a multiple of the block size, 4096"), "{size}");
    assert!(!at.path().exists(), "nothing was made");
    std::fs::write(at.path(), [7; 5000]).expect("write");
    let ragged = refusal(&spec(&at, MIB));
    assert!(ragged.contains("size of the file = 5000"), "{ragged}");
    assert_eq!(std::fs::read(at.path()).expect("read").len(), 5000, "left as it is");
    let nowhere = refusal(&FileSpec { create_bytes: Some(MIB), ..FileSpec::new("/nonexistent/disk", 512) });
    assert!(nowhere.contains("cannot make /nonexistent/disk"), "{nowhere}");
}

#[test]
fn a_file_does_not_poll_and_a_device_without_queues_for_it_neither() {
    let at = TempPath::new();
    let error = refusal(&FileSpec { is_polled: true, ..spec(&at, MIB) });
    assert!(error.contains("poll = true: must be false:") && error.contains("is no block device"), "{error}");
    assert!(!at.path().exists(), "what was made for it is gone");
}

#[test]
fn a_file_system_without_direct_io_is_used_with_a_note() {
    let memory = rustix::fs::memfd_create("disk", MemfdFlags::CLOEXEC).expect("memfd");
    let path = format!("/proc/self/fd/{}", memory.as_raw_fd());
    let spec = FileSpec { create_bytes: Some(MIB), ..FileSpec::new(&path, 512) };
    let source = FileDisk::new("f", &spec).expect("file disk");
    let facts = source.facts();
    // Since 6.6 tmpfs takes the flag, and has an alignment for it.
    assert_ne!(facts.is_direct, facts.notes.iter().any(|note| note.contains("page cache")), "{facts:?}");
    let asked = FileSpec { is_direct: false, ..spec };
    drop(source);
    let again = FileDisk::new("f", &asked).expect("file disk");
    let facts = again.facts();
    assert!(!facts.is_direct && facts.notes.is_empty(), "{facts:?}");
}

#[test]
fn deallocated_blocks_give_their_space_back_and_zeroed_ones_keep_it() {
    let at = TempPath::new();
    let source = disk(&at, 8 * MIB);
    let bytes_used = || source.shared.file.metadata().expect("open").blocks() * 512;
    let mut driver = Driver::new(&*source);
    fill(&mut driver, 4 * MIB, 5);
    driver.run(Op::Flush, 0, 0).expect("flush");
    let full = bytes_used();
    assert!(full >= 4 * MIB, "{full}");
    assert_eq!(driver.run(ZEROES, 0, 256), Ok(()));
    assert_eq!(driver.read(240, 16), Ok(vec![0; 65536]));
    assert_eq!(driver.read(256, 16), Ok(vec![5; 65536]));
    if source.shared.zero_methods.best(false) == ZeroMethod::Zero {
        assert_eq!(bytes_used(), full, "the space of zeroes stays");
    }
    if source.geometry().can_deallocate {
        assert_eq!(driver.run(Op::Deallocate, 256, 256), Ok(()));
        assert!(bytes_used() <= full - MIB, "{}", bytes_used());
        assert_eq!(driver.run(Op::WriteZeroes { deallocate: true, fua: true }, 0, 2048), Ok(()));
        assert!(bytes_used() <= MIB, "{}", bytes_used());
    }
    assert_eq!(driver.read(256, 16), Ok(vec![0; 65536]));
    assert_eq!(source.geometry().bytes(), 8 * MIB);
}

#[test]
fn the_used_space_is_shown_as_of_an_earlier_question() {
    let at = TempPath::new();
    std::fs::write(at.path(), vec![1; 1 << 20]).expect("written");
    let source = FileDisk::new("f", &FileSpec::new(at.path(), 4096)).expect("file disk");
    let file = File::options().write(true).open(at.path()).expect("open");
    file.write_all_at(&vec![2; 1 << 20], MIB).and_then(|()| file.sync_all()).expect("written");
    let first = source.usage().bytes_used;
    assert!(first < 2 * MIB, "{first}: the file system was asked");
    let end = std::time::Instant::now() + Duration::from_secs(20);
    while source.usage().bytes_used < 2 * MIB {
        assert!(std::time::Instant::now() < end, "never asked again");
        std::thread::yield_now();
    }
}

#[test]
fn zeroes_are_written_in_pieces_where_the_file_knows_no_better_way() {
    let at = TempPath::new();
    let source = disk(&at, 8 * MIB);
    let _ = [ZeroMethod::Release, ZeroMethod::Zero].map(|method| source.shared.zero_methods.refuse(method));
    assert!(!source.geometry().can_deallocate);
    let mut driver = Driver::new(&*source);
    fill(&mut driver, 8 * MIB, 6);
    // 3.5 MiB and a block: four writes, begun at an odd place.
    let token = driver.submit(Op::WriteZeroes { deallocate: true, fua: true }, range(1, 897), &[]);
    let zeroing = driver.wait(token);
    assert_eq!((zeroing.result, zeroing.buf.is_none()), (Ok(()), true));
    assert_eq!(driver.run(Op::Deallocate, 1024, 1024), Ok(()));
    for (lba, with) in [(0, 6), (1, 0), (450, 0), (897, 0), (898, 6), (1023, 6), (1024, 0), (2047, 0)] {
        assert_eq!(driver.read(lba, 1), Ok(vec![with; 4096]), "block {lba}");
    }
}

#[test]
fn a_refused_way_to_zero_is_followed_by_the_next() {
    let methods = ZeroMethods::new(true, true);
    assert_eq!((methods.best(true), methods.best(false)), (ZeroMethod::Release, ZeroMethod::Zero));
    assert_eq!(methods.refuse(ZeroMethod::Release), Some(ZeroMethod::Zero));
    assert_eq!(methods.best(true), ZeroMethod::Zero);
    assert_eq!(methods.refuse(ZeroMethod::Zero), Some(ZeroMethod::Write));
    assert_eq!((methods.best(true), methods.refuse(ZeroMethod::Write)), (ZeroMethod::Write, None));
}

#[test]
fn more_commands_than_the_ring_takes_wait_in_order_and_all_end() {
    let at = TempPath::new();
    let source = disk(&at, 4 * MIB);
    let mut driver = Driver::with_depth(&*source, 0, 2);
    let writes: Vec<_> = (0..40u8)
        .map(|lba| driver.submit(Op::Write { fua: false }, range(u64::from(lba), 1), &[lba + 1; 4096]))
        .collect();
    assert_eq!(driver.disk.in_flight(), 40);
    let ended: Vec<_> = writes.into_iter().map(|token| driver.wait(token)).collect();
    assert!(
        ended.iter().all(|done| done.result == Ok(()) && done.buf.is_some()),
        "every write gives its buffer back"
    );
    drop(ended);
    assert_eq!(driver.disk.in_flight(), 0);
    assert!(!driver.poll(), "nothing to do");
    for lba in 0..40u8 {
        assert_eq!(driver.read(u64::from(lba), 1), Ok(vec![lba + 1; 4096]));
    }
}

#[test]
fn errors_of_the_system_are_errors_of_the_disk() {
    let of = |errno: Errno, is_write| disk_error(&errno.into(), is_write);
    assert_eq!((of(Errno::IO, false), of(Errno::IO, true)), (DiskError::MediaRead, DiskError::MediaWrite));
    // What the block layer makes of a sector that the drive cannot read.
    assert_eq!(
        (of(Errno::NODATA, false), of(Errno::NODATA, true)),
        (DiskError::MediaRead, DiskError::MediaWrite)
    );
    for (errno, error) in [
        (Errno::NOSPC, DiskError::NoSpace),
        (Errno::DQUOT, DiskError::NoSpace),
        (Errno::ROFS, DiskError::WriteProtected),
        (Errno::BADF, DiskError::WriteProtected),
        (Errno::PERM, DiskError::WriteProtected),
        (Errno::NXIO, DiskError::Gone),
        (Errno::NODEV, DiskError::Gone),
        (Errno::OPNOTSUPP, DiskError::NotSupported),
        (Errno::INVAL, DiskError::Internal),
        (Errno::NOMEM, DiskError::Internal),
    ] {
        assert_eq!(of(errno, true), error, "{errno:?}");
    }
    assert_eq!(disk_error(&io::ErrorKind::UnexpectedEof.into(), false), DiskError::MediaRead);
    assert_eq!(disk_error(&io::ErrorKind::WriteZero.into(), true), DiskError::MediaWrite);
}

#[test]
fn a_read_only_disk_reads_and_refuses_to_write() {
    let at = TempPath::new();
    std::fs::write(at.path(), vec![9; 65536]).expect("write");
    let source =
        FileDisk::new("f", &FileSpec { is_read_only: true, ..FileSpec::new(at.path(), 512) }).expect("disk");
    let mut driver = Driver::new(&*source);
    assert_eq!(driver.read(100, 2), Ok(vec![9; 1024]));
    assert_eq!(driver.write(0, &[1; 512], false), Err(DiskError::WriteProtected));
    for op in [Op::Deallocate, ZEROES] {
        assert_eq!(driver.run(op, 0, 8), Err(DiskError::WriteProtected));
    }
    assert_eq!(driver.swap(0, &[9; 512], &[1; 512]), Err(DiskError::WriteProtected));
    assert_eq!(driver.run(Op::Flush, 0, 0), Ok(()));
    assert!(source.resize(MIB).is_err(), "it is not ours to grow");
    assert_eq!(std::fs::read(at.path()).expect("read"), vec![9; 65536]);
}

#[test]
fn a_medium_that_turns_read_only_or_short_fails_the_commands_in_flight() {
    let memory = File::from(rustix::fs::memfd_create("disk", MemfdFlags::ALLOW_SEALING).expect("memfd"));
    let path = format!("/proc/self/fd/{}", memory.as_raw_fd());
    let spec = FileSpec { create_bytes: Some(MIB), ..FileSpec::new(&path, 4096) };
    let source = FileDisk::new("f", &spec).expect("file disk");
    let mut driver = Driver::new(&*source);
    assert_eq!(driver.write(0, &[1; 4096], true), Ok(()));
    memory.set_len(65536).expect("cut");
    assert_eq!(driver.read(15, 1), Ok(vec![0; 4096]));
    assert_eq!(driver.read(15, 2), Err(DiskError::MediaRead), "half of it is gone");
    assert_eq!(driver.read(200, 1), Err(DiskError::MediaRead));
    rustix::fs::fcntl_add_seals(&memory, SealFlags::WRITE).expect("seal");
    assert_eq!(driver.write(0, &[2; 4096], false), Err(DiskError::WriteProtected));
    assert_eq!(driver.run(Op::Deallocate, 0, 1), Err(DiskError::WriteProtected));
    assert_eq!(driver.swap(0, &[1; 4096], &[2; 4096]), Err(DiskError::WriteProtected));
    assert_eq!(
        driver.swap(0, &[3; 4096], &[2; 4096]),
        Err(DiskError::CompareDiffers),
        "the guard was let go"
    );
    assert_eq!(driver.read(0, 1), Ok(vec![1; 4096]));
}

/// Bytes that this thread threw away before they were written back.
fn bytes_thrown_away() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/thread-self/io").ok()?;
    text.lines().find_map(|line| line.strip_prefix("cancelled_write_bytes: "))?.parse().ok()
}

/// How much of what `act` wrote was still only in the page cache when it had ended.
fn bytes_left_in_cache(act: impl FnOnce(&mut Driver)) -> u64 {
    let at = TempPath::new();
    let source = FileDisk::new("f", &FileSpec { is_direct: false, ..spec(&at, MIB) }).expect("file disk");
    let _ = [ZeroMethod::Release, ZeroMethod::Zero].map(|method| source.shared.zero_methods.refuse(method));
    let mut driver = Driver::new(&*source);
    act(&mut driver);
    let before = bytes_thrown_away().unwrap_or(0);
    source.shared.file.set_len(0).expect("cut");
    bytes_thrown_away().unwrap_or(0) - before
}

#[test]
fn fua_and_flush_reach_the_medium() {
    let plain = |driver: &mut Driver| driver.write(0, &[1; 65536], false).expect("write");
    if (0..5).all(|_| bytes_left_in_cache(plain) == 0) {
        let folder = std::env::temp_dir();
        return spindle_tests_skip::skip(format!(
            "nothing is counted as cut before it was written: {} is in memory, or the kernel does not count",
            folder.display()
        ));
    }
    let left = bytes_left_in_cache(|driver| driver.write(0, &[1; 65536], true).expect("write"));
    assert_eq!(left, 0, "write with FUA");
    let left = bytes_left_in_cache(|driver| {
        plain(driver);
        driver.run(Op::Flush, 0, 0).expect("flush");
    });
    assert_eq!(left, 0, "flush");
    let zeroes = |fua| Op::WriteZeroes { deallocate: false, fua };
    assert!(
        (0..5).any(|_| bytes_left_in_cache(|driver| driver.run(zeroes(false), 0, 16).expect("zeroes")) > 0)
    );
    let left = bytes_left_in_cache(|driver| driver.run(zeroes(true), 0, 16).expect("zeroes"));
    assert_eq!(left, 0, "zeroing with FUA");
    let left = bytes_left_in_cache(|driver| driver.swap(0, &[0; 4096], &[1; 4096]).expect("swap"));
    assert_eq!(left, 0, "compare-and-write");
}

#[test]
fn once_the_page_cache_lost_data_no_core_hears_that_a_flush_was_good() {
    let at = TempPath::new();
    let source = FileDisk::new("f", &FileSpec { is_direct: false, ..spec(&at, MIB) }).expect("file disk");
    let mut cores = [Driver::new(&*source), Driver::with_depth(&*source, 1, 4)];
    assert_eq!(cores[0].run(Op::Flush, 0, 0), Ok(()));
    source.shared.on_sync_error();
    for core in &mut cores {
        assert_eq!(core.run(Op::Flush, 0, 0), Err(DiskError::MediaWrite));
        assert_eq!(core.write(0, &[1; 4096], true), Err(DiskError::MediaWrite));
        assert_eq!(core.swap(0, &[0; 4096], &[1; 4096]), Err(DiskError::MediaWrite));
        assert_eq!(core.read(0, 1), Ok(vec![0; 4096]), "what is there can be saved");
    }
    let at = TempPath::new();
    let source = disk(&at, MIB);
    source.shared.on_sync_error();
    assert_eq!(Driver::new(&*source).run(Op::Flush, 0, 0).is_ok(), source.facts().is_direct);
}

#[test]
fn a_flush_that_fails_through_the_page_cache_is_the_last_that_is_tried() {
    // A pipe cannot be synced.
    let (_read_end, write_end) = io::pipe().expect("pipe");
    let shared = |is_direct| FileShared {
        name: "f".to_owned(),
        path: PathBuf::new(),
        file: Arc::new(File::from(std::os::fd::OwnedFd::from(write_end.try_clone().expect("dup")))),
        block_bytes: 4096,
        block_count: AtomicU64::new(1),
        is_block_device: false,
        is_direct,
        is_read_only: false,
        is_polled: false,
        zero_methods: ZeroMethods::new(false, false),
        has_lost_data: AtomicBool::new(false),
        guard: Guard::new(2),
        prepared: Mutex::default(),
    };
    for is_direct in [true, false] {
        let (shared, facts) = (Arc::new(shared(is_direct)), FileFacts::default());
        let source = FileDisk { shared, facts, medium_ids: Vec::new(), space: None };
        let mut driver = Driver::new(&source);
        assert_eq!(driver.run(Op::Flush, 0, 0), Err(DiskError::Internal));
        let again = if is_direct { DiskError::Internal } else { DiskError::MediaWrite };
        assert_eq!(driver.run(Op::Flush, 0, 0), Err(again));
    }
}

#[test]
fn syncs_through_the_page_cache_that_are_asked_for_at_once_all_end() {
    for is_direct in [false, true] {
        let at = TempPath::new();
        let source = FileDisk::new("f", &FileSpec { is_direct, ..spec(&at, MIB) }).expect("file disk");
        let context = ChannelContext { core: 0, pool: crate::testing::pool(), depth: 4 };
        let mut medium = ring::open_backend(Arc::clone(&source.shared), &context).expect("opens");
        for round in 0..3 {
            let tokens = [1, 2, 3, 4].map(|token| token + 10 * round);
            tokens.into_iter().for_each(|token| medium.sync(token));
            let mut ended = Vec::new();
            while ended.len() < tokens.len() {
                medium.send().expect("sent");
                medium.collect(&mut |it| ended.push((it.token, it.result.is_ok())));
            }
            ended.sort_unstable();
            assert_eq!(ended, tokens.map(|token| (token, true)), "direct: {is_direct}");
        }
    }
}

#[test]
fn only_errors_of_the_medium_are_kept_from_a_write_with_fua() {
    let at = TempPath::new();
    let spec = FileSpec { is_direct: false, ..spec(&at, MIB) };
    let source = FileDisk::new("f", &spec).expect("file disk");
    let context = ChannelContext { core: 0, pool: crate::testing::pool(), depth: 4 };
    let medium = ring::open_backend(Arc::clone(&source.shared), &context).expect("opens");
    let has_lost_data = || source.shared.has_lost_data.load(Ordering::Relaxed);
    medium.on_durable_error(false, &io::Error::from(Errno::NOSPC));
    assert!(!has_lost_data(), "it is about this write");
    medium.on_durable_error(false, &io::Error::from(Errno::IO));
    assert!(has_lost_data());
    source.shared.has_lost_data.store(false, Ordering::Relaxed);
    medium.on_durable_error(true, &io::Error::from(Errno::NOSPC));
    assert!(has_lost_data(), "a sync is about what was before");
}

#[test]
fn a_core_does_not_clear_a_guard_over_its_own_write_in_flight() {
    let at = TempPath::new();
    let source = disk(&at, MIB);
    let context = ChannelContext { core: 0, pool: crate::testing::pool(), depth: 4 };
    let mut writer = ring::open(Arc::clone(&source.shared), &context).expect("opens");
    let buf = context.pool.take(32768);
    assert!(
        writer.submit(crate::Token(1), &IoRequest::new(Op::Write { fua: false }, range(0, 8)), buf).is_none()
    );
    let holder = source.shared.guard.join().expect("a line");
    let mut hold = holder.try_hold(5).expect("free");
    writer.step_guard(); // a turn in which the write does not end
    assert!(!holder.is_clear(&mut hold));
    let mut done = Vec::with_capacity(1);
    for _ in 0..1_000_000_000u64 {
        writer.poll(Nanos::ZERO, &mut done);
        if !done.is_empty() {
            break;
        }
    }
    assert_eq!(done.len(), 1);
    assert!(holder.is_clear(&mut hold));
    holder.release(hold);
    // With a write beside the block in flight, the core says that it is clear.
    let buf = context.pool.take(32768);
    assert!(
        writer.submit(crate::Token(2), &IoRequest::new(Op::Write { fua: false }, range(8, 8)), buf).is_none()
    );
    let mut hold = holder.try_hold(5).expect("free");
    assert!(!holder.is_clear(&mut hold), "it has not looked yet");
    writer.step_guard();
    assert!(holder.is_clear(&mut hold));
    holder.release(hold);
}

#[test]
fn a_resize_is_seen_by_every_core_and_by_the_file() {
    let at = TempPath::new();
    let source = disk(&at, MIB);
    let mut driver = Driver::new(&*source);
    fill(&mut driver, MIB, 3);
    source.resize(4 * MIB).expect("grows");
    assert_eq!(driver.disk.geometry().bytes(), 4 * MIB);
    assert_eq!(driver.write(1023, &[4; 4096], true), Ok(()));
    assert_eq!((driver.read(255, 1), driver.read(256, 1)), (Ok(vec![3; 4096]), Ok(vec![0; 4096])));
    let error = source.resize(MIB).expect_err("its end would be lost").to_string();
    assert!(error.ends_with("has 4194304 bytes, and a smaller disk would cut off its end"), "{error}");
    assert_eq!((driver.disk.geometry().bytes(), driver.read(1023, 1)), (4 * MIB, Ok(vec![4; 4096])));
    assert_eq!(std::fs::metadata(at.path()).expect("metadata").len(), 4 * MIB);
    // Somebody else has cut it: then the disk follows.
    File::options().write(true).open(at.path()).expect("open").set_len(MIB).expect("cut");
    source.resize(MIB).expect("as the file is");
    assert_eq!((driver.disk.geometry().bytes(), driver.read(255, 1)), (MIB, Ok(vec![3; 4096])));
    let error = source.resize(MIB + 1).expect_err("not whole blocks").to_string();
    assert!(error.contains("disk \"f\": size = 1048577 bytes: must be a multiple"), "{error}");
}

#[test]
fn a_prepared_resize_is_not_visible_and_can_be_cancelled() {
    let at = TempPath::new();
    let source = disk(&at, MIB);
    let length = || std::fs::metadata(at.path()).expect("the file").len();
    source.prepare_resize(2 * MIB).expect("can grow");
    assert_eq!((source.geometry().bytes(), length()), (MIB, 2 * MIB));
    source.cancel_resize();
    source.cancel_resize();
    assert_eq!((source.geometry().bytes(), length()), (MIB, MIB));
    source.prepare_resize(2 * MIB).expect("can grow");
    let moved = at.path().with_extension("moved");
    std::fs::rename(at.path(), &moved).expect("moved");
    source.resize(2 * MIB).expect("the path is not asked again");
    std::fs::rename(&moved, at.path()).expect("moved back");
    source.cancel_resize();
    assert_eq!((source.geometry().bytes(), length()), (2 * MIB, 2 * MIB), "done is done");
    assert!(source.prepare_resize(MIB).is_err(), "it would be cut");
}

#[test]
fn a_resize_that_was_meant_for_another_file_at_the_path_changes_nothing() {
    let (at, aside) = (TempPath::new(), TempPath::new());
    let source = disk(&at, 4 * MIB);
    std::fs::rename(at.path(), aside.path()).expect("moved");
    let error = source.resize(8 * MIB).expect_err("nothing is there").to_string();
    assert!(error.contains("cannot stat"), "{error}");
    File::create(at.path()).expect("make").set_len(MIB).expect("size");
    for bytes in [MIB, 8 * MIB] {
        let error = source.resize(bytes).expect_err("another file").to_string();
        assert!(error.ends_with("is no longer the file that is open"), "{error}");
    }
    assert_eq!(std::fs::metadata(aside.path()).expect("metadata").len(), 4 * MIB);
    assert_eq!(source.geometry().bytes(), 4 * MIB);
}

#[test]
fn a_compare_and_write_waits_for_writes_to_its_block_in_flight_on_another_core() {
    let at = TempPath::new();
    let source = disk(&at, MIB);
    let (mut writer, mut swapper) = (Driver::new(&*source), Driver::with_depth(&*source, 1, 8));
    // Begun, but not sent: the writer has no turn yet.
    let write = writer.submit(Op::Write { fua: false }, range(0, 8), &[1; 32768]);
    let swap = swapper.submit_swap(5, &[1; 4096], &[2; 4096]);
    for _ in 0..1000 {
        assert!(swapper.poll());
        assert!(swapper.try_end(swap).is_none(), "the write is in flight");
    }
    // While it waits, writes to its block wait, others do not.
    let over = writer.submit(Op::Write { fua: false }, range(5, 1), &[3; 4096]);
    let zeroes = swapper.submit(ZEROES, range(4, 2), &[]);
    let beside = swapper.submit(Op::Write { fua: false }, range(6, 1), &[4; 4096]);
    assert_eq!(writer.wait(write).result, Ok(()));
    assert_eq!(swapper.wait(beside).result, Ok(()));
    assert_eq!(swapper.wait(swap).result, Ok(()), "it found what the write had left");
    assert_eq!((writer.wait(over).result, swapper.wait(zeroes).result), (Ok(()), Ok(())));
    let now = swapper.read(5, 1).expect("read");
    assert!(now == [0; 4096] || now == [3; 4096], "one of the two that came after");
    assert_eq!(swapper.read(6, 1), Ok(vec![4; 4096]));
}

#[test]
fn writes_to_a_guarded_block_wait_until_the_compare_and_write_has_ended() {
    let at = TempPath::new();
    let source = disk(&at, MIB);
    let (mut writer, mut swapper) = (Driver::new(&*source), Driver::with_depth(&*source, 1, 8));
    let swap = swapper.submit_swap(5, &[0; 4096], &[2; 4096]);
    swapper.poll(); // holds the guard and reads
    let over = writer.submit(Op::Write { fua: false }, range(0, 8), &[3; 32768]);
    let beside = writer.submit(Op::Write { fua: false }, range(8, 8), &[4; 32768]);
    assert_eq!(writer.wait(beside).result, Ok(()));
    for _ in 0..1000 {
        assert!(writer.poll());
        assert!(writer.try_end(over).is_none(), "the block is guarded");
    }
    assert_eq!(writer.read(5, 1), Ok(vec![0; 4096]), "reads do not wait");
    assert_eq!(swapper.wait(swap).result, Ok(()));
    assert_eq!(writer.wait(over).result, Ok(()));
    assert_eq!(swapper.read(5, 1), Ok(vec![3; 4096]));
}

#[test]
fn a_core_that_goes_away_lets_go_of_the_guard() {
    let at = TempPath::new();
    let source = disk(&at, MIB);
    let (mut writer, mut swapper) = (Driver::new(&*source), Driver::with_depth(&*source, 1, 8));
    swapper.submit_swap(5, &[0; 4096], &[2; 4096]);
    swapper.submit_swap(5, &[2; 4096], &[3; 4096]);
    swapper.poll();
    assert!(source.shared.guard.join().expect("a line").guarded().is_some());
    drop(swapper);
    assert_eq!(writer.write(5, &[7; 4096], false), Ok(()));
    assert_eq!(writer.swap(5, &[7; 4096], &[8; 4096]), Ok(()));
}

#[test]
fn a_compare_and_write_needs_no_memory_of_its_own() {
    let at = TempPath::new();
    let source = disk(&at, MIB);
    let (mut reader, mut swapper) = (Driver::new(&*source), Driver::with_depth(&*source, 1, 8));
    let swap = swapper.submit_swap(5, &[0; 4096], &[2; 4096]);
    let taken: Vec<_> = std::iter::from_fn(|| swapper.pool.take(4096)).collect();
    assert!(!taken.is_empty());
    assert_eq!(swapper.wait(swap).result, Ok(()));
    drop(taken);
    assert_eq!(reader.read(5, 1), Ok(vec![2; 4096]));
}

#[test]
fn what_was_in_flight_when_the_core_went_away_is_written() {
    let at = TempPath::new();
    let source = disk(&at, MIB);
    let mut driver = Driver::new(&*source);
    for lba in 0..16 {
        driver.submit(Op::Write { fua: false }, range(lba, 1), &[5; 4096]);
    }
    drop(driver);
    assert_eq!(Driver::new(&*source).read(0, 16), Ok(vec![5; 65536]));
}

/// A loop device over a file, taken apart at the end.
struct Loop(String);

impl Loop {
    fn new(backing: &Path, sector_bytes: u32) -> Loop {
        let made = Command::new("losetup")
            .args(["--find", "--show", "--direct-io=off", "--sector-size", &sector_bytes.to_string()])
            .arg(backing)
            .output()
            .expect("losetup");
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
        Loop(String::from_utf8_lossy(&made.stdout).trim().to_owned())
    }

    fn ask(&self, option: &str) {
        assert!(Command::new("losetup").args([option, &self.0]).status().expect("losetup").success());
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        self.ask("--detach");
    }
}

/// Making a loop device takes root, and a kernel that has them; where that is not so the reason.
fn no_loop_devices() -> Option<String> {
    let control = "/dev/loop-control";
    let opened = File::options().read(true).write(true).open(control);
    opened.err().map(|error| format!("{control}: {error}"))
}

#[test]
fn a_block_device_is_a_disk() {
    if let Some(reason) = no_loop_devices() {
        return spindle_tests_skip::skip(reason);
    }
    let at = TempPath::new();
    let backing = File::create(at.path()).expect("make");
    backing.set_len(MIB).expect("size");
    let device = Loop::new(at.path(), 4096);
    let error = refusal(&FileSpec::new(&device.0, 512));
    assert!(error.contains("block_bytes = 512: must be at least 4096"), "{error}");
    let source = FileDisk::new("b", &FileSpec::new(&device.0, 4096)).expect("a disk");
    assert!(source.facts().is_block_device && source.facts().is_direct);
    assert_eq!(source.geometry().bytes(), MIB);
    let error = refusal(&FileSpec::new(&device.0, 4096));
    assert!(
        error.contains(&format!("cannot open for reading and writing {}: Device or resource busy", device.0)),
        "{error}"
    );
    check(&*source, 5, 60, false);
    assert!(source.geometry().can_deallocate, "a loop device discards");
    backing.set_len(2 * MIB).expect("size");
    assert!(source.resize(2 * MIB).is_err(), "the device has not grown yet");
    device.ask("--set-capacity");
    source.resize(2 * MIB).expect("the device has grown");
    let mut driver = Driver::new(&*source);
    assert_eq!(driver.write(511, &[8; 4096], true), Ok(()));
    let mut block = [0; 4096];
    backing.sync_all().expect("sync");
    File::open(at.path()).expect("open").read_exact_at(&mut block, 2 * MIB - 4096).expect("read");
    assert_eq!(block, [8; 4096]);
    drop((driver, source));
    File::options().write(true).open(&device.0).expect("free again").write_all(&[1; 4096]).expect("write");
}

#[test]
fn blocks_smaller_than_those_of_the_device_are_zeroed_through_the_page_cache() {
    if let Some(reason) = no_loop_devices() {
        return spindle_tests_skip::skip(reason);
    }
    let at = TempPath::new();
    File::create(at.path()).expect("make").set_len(MIB).expect("size");
    let device = Loop::new(at.path(), 4096);
    let source = FileDisk::new("b", &FileSpec { is_direct: false, ..FileSpec::new(&device.0, 512) });
    let source = source.expect("a disk");
    let mut driver = Driver::new(&*source);
    for (op, lba) in
        [(ZEROES, 3), (Op::WriteZeroes { deallocate: true, fua: true }, 35), (Op::Deallocate, 67)]
    {
        driver.write(lba - 3, &[7; 16384], false).expect("write");
        assert_eq!(driver.run(op, lba, 18), Ok(()), "{op:?}");
        for (at, with) in [(lba - 1, 7), (lba, 0), (lba + 17, 0), (lba + 18, 7)] {
            assert_eq!(driver.read(at, 1), Ok(vec![with; 512]), "{op:?}: block {at}");
        }
    }
    assert!(source.geometry().can_deallocate, "aligned ranges still are");
}

#[test]
fn buffers_of_several_pieces_are_written_and_read_direct() {
    let at = TempPath::new();
    let source = disk(&at, MIB);
    let mut driver = Driver::new(&*source);
    // No buffer of 64 KiB is left: what is as long is put together of those of 4 KiB.
    let mut held: Vec<_> = std::iter::from_fn(|| driver.pool.take_contiguous(65536)).collect();
    let data: Vec<u8> = (0..61_440u32).map(|at| u8::try_from(at / 240 % 251).expect("a byte")).collect();
    let write = driver.submit(Op::Write { fua: true }, range(3, 15), &data);
    let written = driver.wait(write);
    assert!(written.result.is_ok() && written.buf.is_none_or(|buf| !buf.is_contiguous()));
    let read = driver.submit(Op::Read, range(3, 15), &[]);
    let done = driver.wait(read);
    let buf = done.buf.expect("a buffer");
    assert!(done.result.is_ok() && buf.segments().count() == 15 && buf.equals_at(0, &data));
    drop(buf);
    held.clear();
    assert_eq!(driver.pool.free_bytes(), 64 * (4096 + 65536));
}
