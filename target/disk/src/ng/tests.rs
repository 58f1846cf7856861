//! The commands that a core gives to a drive, against drives that are memory and do what a test wants.

use std::collections::VecDeque;
use std::fs;
use std::io;
use std::ops::Range;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::sync::{Arc, Mutex};

use nvme_spec::identify::{IdentifyController, IdentifyNamespace};
use nvme_spec::status::Status;
use nvme_spec::zerocopy::FromZeros;
use rustix::io::Errno;
use spindle_reactor::clock::Nanos;
use spindle_reactor::mem::Buf;
use spindle_reactor::uring::{PassCommand, PassDone, PassError};

use super::backend::{Drive, NgBackend};
use super::open::Limits;
use super::place::{NgBlockDevice, polls_passthrough};
use super::{NgShared, NgSpec};
use crate::backend::{BackendChannel, requests_of};
use crate::testing::model::check;
use crate::testing::{Driver, Random, TempPath};
use crate::{
    BlockRange, ChannelContext, Disk, DiskChannel, DiskError, Geometry, IoRequest, Op, OpenError, Owner,
    ResizeError, Usage,
};

const FLUSH: u8 = 0x00;
const WRITE: u8 = 0x01;
const READ: u8 = 0x02;
const WRITE_ZEROES: u8 = 0x08;

/// Opcode, first block, blocks, and the bits of dword 12 above them.
type Given = (u8, u64, u64, u32);

/// What a drive is, shared by the cores that have it open.
struct DeviceState {
    bytes: Vec<u8>,
    block_bytes: usize,
    /// All that it was given, in order.
    given: Vec<Given>,
    /// What the next commands end with, instead of being done.
    ends: VecDeque<Result<(), PassError>>,
    /// Commands that it knows.
    knows_zeroes: bool,
    random: Random,
}

/// One core's way to it.
struct FakeDrive {
    state: Arc<Mutex<DeviceState>>,
    begun: Vec<PassDone>,
    /// What was submitted, to come back in any order.
    ended: Vec<PassDone>,
    is_gone: bool,
}

impl DeviceState {
    fn command(&mut self, opcode: u8, lba: u64, blocks: u64, bits: u32) -> Result<Range<usize>, PassError> {
        self.given.push((opcode, lba, blocks, bits));
        self.ends.pop_front().unwrap_or(Ok(()))?;
        if opcode == WRITE_ZEROES && !self.knows_zeroes {
            return Err(PassError::Status(Status::INVALID_OPCODE.dnr().bits()));
        }
        let at = usize::try_from(lba).expect("small") * self.block_bytes;
        let range = at..at + usize::try_from(blocks).expect("small") * self.block_bytes;
        if range.end > self.bytes.len() {
            return Err(PassError::Status(Status::LBA_OUT_OF_RANGE.dnr().bits()));
        }
        Ok(range)
    }
}

impl Drive for FakeDrive {
    fn command(&mut self, token: u64, command: PassCommand) {
        let mut state = self.state.lock().expect("whole");
        let [low, high, cdw12, ..] = command.dwords;
        let (lba, blocks) = (u64::from(low) | u64::from(high) << 32, u64::from(cdw12 & 0xffff) + 1);
        let result = match command.opcode {
            FLUSH => state.command(FLUSH, 0, 0, 0).map(drop),
            opcode => state.command(opcode, lba, blocks, cdw12 >> 16).map(|range| {
                assert_eq!(opcode, WRITE_ZEROES);
                state.bytes[range].fill(0);
            }),
        };
        self.begun.push(PassDone { token, result, buf: None });
    }

    fn read(&mut self, token: u64, lba: u64, mut buf: Buf, piece: Range<usize>) {
        let mut state = self.state.lock().expect("whole");
        let blocks = (piece.len() / state.block_bytes) as u64;
        let result = state.command(READ, lba, blocks, 0).map(|range| {
            buf.copy_in(piece.start, &state.bytes[range]);
        });
        self.begun.push(PassDone { token, result, buf: Some(buf) });
    }

    fn write(&mut self, token: u64, lba: u64, buf: Buf, piece: Range<usize>, fua: bool) {
        let mut state = self.state.lock().expect("whole");
        let blocks = (piece.len() / state.block_bytes) as u64;
        let result = state.command(WRITE, lba, blocks, u32::from(fua)).map(|range| {
            buf.copy_out(piece.start, &mut state.bytes[range]);
        });
        self.begun.push(PassDone { token, result, buf: Some(buf) });
    }

    fn submit(&mut self) -> io::Result<()> {
        if self.is_gone && !self.begun.is_empty() {
            return Err(Errno::NXIO.into());
        }
        self.ended.append(&mut self.begun);
        Ok(())
    }

    fn poll(&mut self, each: &mut dyn FnMut(PassDone)) {
        let mut state = self.state.lock().expect("whole");
        for _ in 0..self.ended.len() {
            let count = self.ended.len() as u64;
            // Some now, some later, in any order.
            if state.random.below(3) > 0 {
                let at = usize::try_from(state.random.below(count)).expect("small");
                each(self.ended.swap_remove(at));
            }
        }
    }
}

/// A disk on such a drive.
struct FakeNg {
    shared: Arc<NgShared>,
    state: Arc<Mutex<DeviceState>>,
}

const MIB: usize = 1 << 20;

/// A drive of 1 MiB that takes 16 KiB at once, and 32 KiB of zeroes.
fn limits(block_bytes: u32) -> Limits {
    Limits {
        block_bytes,
        block_count: (1 << 20) / u64::from(block_bytes),
        is_read_only: false,
        has_volatile_cache: true,
        can_deallocate: true,
        transfer_bytes_max: 16 << 10,
        zero_bytes_max: 32 << 10,
        is_polled: false,
    }
}

impl FakeNg {
    fn new(limits: Limits) -> FakeNg {
        let state = DeviceState {
            bytes: vec![0; MIB],
            block_bytes: limits.block_bytes as usize,
            given: Vec::new(),
            ends: VecDeque::new(),
            knows_zeroes: true,
            random: Random(1),
        };
        FakeNg { shared: Arc::new(NgShared::new(limits, None)), state: Arc::new(Mutex::new(state)) }
    }

    fn state(&self) -> std::sync::MutexGuard<'_, DeviceState> {
        self.state.lock().expect("whole")
    }

    /// What was given since the last look.
    fn given(&self) -> Vec<Given> {
        std::mem::take(&mut self.state().given)
    }

    /// The next commands end with these statuses.
    fn end_next(&self, statuses: impl IntoIterator<Item = Status>) {
        let ends = statuses.into_iter().map(|status| Err(PassError::Status(status.bits())));
        self.state().ends.extend(ends);
    }

    fn medium(&self, context: &ChannelContext, is_gone: bool) -> NgBackend<FakeDrive> {
        let state = Arc::clone(&self.state);
        let drive = FakeDrive { state, begun: Vec::new(), ended: Vec::new(), is_gone };
        NgBackend::new(drive, Arc::clone(&self.shared), requests_of(context) + 1)
    }
}

impl Disk for FakeNg {
    fn name(&self) -> &str {
        "fake"
    }

    fn kind(&self) -> &'static str {
        "ng"
    }

    fn geometry(&self) -> Geometry {
        self.shared.geometry()
    }

    fn open(&self, context: &ChannelContext) -> Result<Box<dyn DiskChannel>, OpenError> {
        let medium = self.medium(context, false);
        Ok(Box::new(BackendChannel::new("fake", medium, &self.shared.guard, context)?))
    }

    fn resize(&self, _: u64) -> Result<(), ResizeError> {
        Ok(())
    }

    fn usage(&self) -> Usage {
        Usage::default()
    }
}

#[test]
fn a_drive_reads_what_was_written() {
    for (seed, block_bytes) in [(1, 512), (2, 4096)] {
        check(&FakeNg::new(limits(block_bytes)), seed, 300, false);
    }
    // One that does not know zeroes, and one that does not say so before it is asked.
    check(&FakeNg::new(Limits { zero_bytes_max: 0, can_deallocate: false, ..limits(512) }), 3, 300, false);
    let silent = FakeNg::new(limits(512));
    silent.state().knows_zeroes = false;
    check(&silent, 4, 300, false);
}

#[test]
fn a_warm_core_allocates_nothing() {
    let disk = FakeNg::new(limits(512));
    // What the fake itself writes down.
    disk.state().given.reserve(100_000);
    crate::testing::steady::check(&disk, 5);
}

#[test]
fn a_transfer_goes_in_pieces_that_the_drive_takes() {
    let disk = FakeNg::new(limits(512));
    let mut driver = Driver::new(&disk);
    let data: Vec<u8> = (0..40 << 10).map(|at| u8::try_from(at / 512 % 251).expect("small")).collect();
    driver.write(7, &data, true).expect("written");
    assert_eq!(disk.given(), [(WRITE, 7, 32, 1), (WRITE, 39, 32, 1), (WRITE, 71, 16, 1)]);
    assert_eq!(driver.read(7, 80), Ok(data));
    assert_eq!(disk.given(), [(READ, 7, 32, 0), (READ, 39, 32, 0), (READ, 71, 16, 0)]);
}

#[test]
fn zeroes_and_deallocation_are_commands_without_data() {
    let disk = FakeNg::new(limits(512));
    let mut driver = Driver::new(&disk);
    let deac = 1 << 9;
    assert_eq!(driver.run(Op::WriteZeroes { deallocate: false, fua: true }, 8, 100), Ok(()));
    assert_eq!(disk.given(), [(WRITE_ZEROES, 8, 64, 0), (WRITE_ZEROES, 72, 36, 0), (FLUSH, 0, 0, 0)]);
    assert_eq!(driver.run(Op::WriteZeroes { deallocate: true, fua: false }, 8, 1), Ok(()));
    assert_eq!(driver.run(Op::Deallocate, 8, 64), Ok(()));
    assert_eq!(disk.given(), [(WRITE_ZEROES, 8, 1, deac), (WRITE_ZEROES, 8, 64, deac)]);
    assert_eq!(driver.run(Op::Flush, 0, 0), Ok(()));
    assert_eq!(disk.given(), [(FLUSH, 0, 0, 0)]);
}

#[test]
fn a_way_to_zero_that_the_drive_refuses_is_followed_by_the_next_and_not_tried_again() {
    let disk = FakeNg::new(limits(512));
    let mut driver = Driver::new(&disk);
    driver.write(0, &[7; 4096], false).expect("written");
    disk.given();
    disk.end_next([Status::INVALID_FIELD.dnr(), Status::INVALID_OPCODE.dnr()]);
    assert_eq!(driver.run(Op::Deallocate, 0, 8), Ok(()));
    let deac = 1 << 9;
    assert_eq!(disk.given(), [(WRITE_ZEROES, 0, 8, deac), (WRITE_ZEROES, 0, 8, 0), (WRITE, 0, 8, 0)]);
    assert_eq!(driver.read(0, 8), Ok(vec![0; 4096]));
    assert!(!disk.geometry().can_deallocate);
    disk.given();
    assert_eq!(driver.run(Op::Deallocate, 0, 8), Ok(()));
    assert_eq!(disk.given(), [(WRITE, 0, 8, 0)]);
    // Other failures are the end.
    let disk = FakeNg::new(limits(512));
    let mut driver = Driver::new(&disk);
    disk.end_next([Status::WRITE_FAULT.dnr()]);
    assert_eq!(driver.run(Op::Deallocate, 0, 8), Err(DiskError::Device(Status::WRITE_FAULT.dnr())));
    assert_eq!(disk.given().len(), 1);
}

#[test]
fn what_may_pass_is_given_to_the_drive_again_but_not_for_ever() {
    let disk = FakeNg::new(limits(512));
    let mut driver = Driver::new(&disk);
    // The second piece, five times.
    let passing = [
        Status::ABORTED_BY_REQUEST,
        Status::NAMESPACE_NOT_READY,
        Status::ABORTED_BY_HOST,
        Status::HOST_PATHING_ERROR,
        Status::COMMAND_INTERRUPTED,
    ];
    disk.state().ends.push_back(Ok(()));
    disk.end_next(passing);
    driver.write(0, &[7; 32 << 10], false).expect("written");
    let given = disk.given();
    assert_eq!((given[0], given.len()), ((WRITE, 0, 32, 0), 7));
    assert!(given[1..].iter().all(|given| *given == (WRITE, 32, 32, 0)), "{given:?}");
    disk.end_next([Status::NAMESPACE_NOT_READY; 6]);
    assert_eq!(driver.run(Op::Flush, 0, 0), Err(DiskError::Internal));
    assert_eq!(disk.given().len(), 6);
    disk.end_next([Status::NAMESPACE_NOT_READY.dnr()]);
    assert_eq!(driver.run(Op::Flush, 0, 0), Err(DiskError::Internal));
    assert_eq!(disk.given().len(), 1, "DNR: not again");
}

#[test]
fn of_a_submitter_that_is_gone_nothing_more_is_given_to_the_drive() {
    let disk = FakeNg::new(limits(512));
    let mut driver = Driver::with_depth(&disk, 0, 2);
    driver.token_next = 7 << 32;
    let data = vec![1; 40 << 10];
    // Three pieces, two pieces, and one for which there is no room; then one of somebody else.
    let long = driver.submit(Op::Write { fua: false }, BlockRange { lba: 8, blocks: 80 }, &data);
    let zeroes = Op::WriteZeroes { deallocate: false, fua: true };
    let zeroes = driver.submit(zeroes, BlockRange { lba: 200, blocks: 100 }, &[]);
    let queued = driver.submit(Op::Write { fua: false }, BlockRange { lba: 400, blocks: 1 }, &[2; 512]);
    driver.token_next = 8 << 32;
    let other = driver.submit(Op::Write { fua: false }, BlockRange { lba: 401, blocks: 1 }, &[3; 512]);
    assert_eq!(driver.disk.cancel_owner(Owner(7)), 3);
    assert_eq!(driver.wait(other).result, Ok(()));
    for token in [long, zeroes, queued] {
        assert_eq!(driver.wait(token).result, Err(DiskError::Cancelled), "{token:?}");
    }
    assert_eq!(driver.disk.cancel_owner(Owner(7)), 0);
    assert_eq!(disk.given(), [(WRITE, 8, 32, 0), (WRITE_ZEROES, 200, 64, 0), (WRITE, 401, 1, 0)]);
    // Nor once more what failed for a while.
    disk.end_next([Status::NAMESPACE_NOT_READY]);
    driver.token_next = 9 << 32;
    let passing = driver.submit(Op::Write { fua: false }, BlockRange { lba: 5, blocks: 1 }, &[4; 512]);
    assert_eq!(driver.disk.cancel_owner(Owner(9)), 1);
    assert_eq!(driver.wait(passing).result, Err(DiskError::Cancelled));
    assert_eq!(disk.given(), [(WRITE, 5, 1, 0)]);
    assert_eq!(driver.disk.in_flight(), 0);
}

#[test]
fn a_compare_and_write_of_a_submitter_that_is_gone_does_not_write() {
    let disk = FakeNg::new(limits(512));
    let mut driver = Driver::new(&disk);
    driver.token_next = 7 << 32;
    let first = driver.submit_swap(3, &[0; 512], &[1; 512]);
    let second = driver.submit_swap(4, &[0; 512], &[2; 512]);
    // The first has been begun: the block is being read.
    while disk.state().given.is_empty() {
        driver.poll();
    }
    assert_eq!(driver.disk.cancel_owner(Owner(7)), 2);
    for token in [first, second] {
        assert_eq!(driver.wait(token).result, Err(DiskError::Cancelled), "{token:?}");
    }
    assert_eq!(disk.given(), [(READ, 3, 1, 0)]);
    driver.token_next = 8 << 32;
    assert_eq!(driver.swap(3, &[0; 512], &[5; 512]), Ok(()), "the guard is free again");
}

#[test]
fn a_status_of_the_drive_means_the_same_to_the_host() {
    let disk = FakeNg::new(limits(512));
    let mut driver = Driver::new(&disk);
    for (status, of_read, of_write) in [
        (Status::LBA_OUT_OF_RANGE, DiskError::MediaRead, DiskError::MediaWrite),
        (Status::COMPARE_FAILURE, DiskError::CompareDiffers, DiskError::CompareDiffers),
        (Status::CAPACITY_EXCEEDED, DiskError::NoSpace, DiskError::NoSpace),
        (Status::NAMESPACE_IS_WRITE_PROTECTED, DiskError::WriteProtected, DiskError::WriteProtected),
        (Status::INVALID_NAMESPACE_OR_FORMAT, DiskError::Gone, DiskError::Gone),
        (Status::INVALID_OPCODE, DiskError::NotSupported, DiskError::NotSupported),
        (Status::ACCESS_DENIED, DiskError::Internal, DiskError::Internal),
        (Status::INTERNAL_ERROR, DiskError::Internal, DiskError::Internal),
    ] {
        disk.end_next([status.dnr(), status.dnr()]);
        assert_eq!(driver.read(0, 1), Err(of_read), "{status:?}");
        assert_eq!(driver.write(0, &[1; 512], false), Err(of_write), "{status:?}");
    }
    // Errors of the medium are the drive's own words, with what it says about repeating.
    for status in [Status::UNRECOVERED_READ_ERROR, Status::WRITE_FAULT, Status::GUARD_CHECK_ERROR] {
        for status in [status, status.dnr()] {
            let of_drive = Status::from_bits(status.bits() | 0b11 << 11).more();
            disk.end_next([of_drive, of_drive]);
            assert_eq!(driver.read(0, 1), Err(DiskError::Device(status)), "without M and CRD");
            assert_eq!(driver.write(0, &[1; 512], false), Err(DiskError::Device(status)));
        }
    }
    for (errno, error) in [
        (Errno::NODEV, DiskError::Gone),
        (Errno::NXIO, DiskError::Gone),
        (Errno::OPNOTSUPP, DiskError::NotSupported),
        (Errno::NOMEM, DiskError::Internal),
    ] {
        disk.state().ends.push_back(Err(PassError::System(errno.into())));
        assert_eq!(driver.read(0, 1), Err(error), "{errno}");
    }
    assert_eq!(driver.read(0, 1), Ok(vec![0; 512]));
}

#[test]
fn a_ring_that_breaks_ends_everything_as_gone() {
    let disk = FakeNg::new(limits(512));
    let context = ChannelContext { core: 0, pool: crate::testing::pool(), depth: 4 };
    let medium = disk.medium(&context, true);
    let mut core = BackendChannel::new("fake", medium, &disk.shared.guard, &context).expect("opens");
    let range = crate::BlockRange { lba: 0, blocks: 8 };
    for token in 0..6 {
        assert!(
            core.submit(crate::Token(token), &IoRequest::new(Op::Read, range), context.pool.take(4096))
                .is_none()
        );
    }
    let mut done = Vec::with_capacity(8);
    core.poll(Nanos::ZERO, &mut done);
    assert_eq!(done.len(), 6);
    assert!(done.iter().all(|done| done.result == Err(DiskError::Gone)));
    let refused = core.submit(crate::Token(9), &IoRequest::new(Op::Flush, range), None).expect("at once");
    assert_eq!((refused.result, core.in_flight()), (Err(DiskError::Gone), 0));
}

#[test]
fn a_read_only_disk_refuses_writes() {
    let disk = FakeNg::new(Limits { is_read_only: true, ..limits(512) });
    let mut driver = Driver::new(&disk);
    assert_eq!(driver.write(0, &[1; 512], false), Err(DiskError::WriteProtected));
    assert_eq!(driver.run(Op::Deallocate, 0, 1), Err(DiskError::WriteProtected));
    assert_eq!(disk.given(), []);
    assert!(driver.read(0, 1).is_ok() && !disk.geometry().can_compare_and_write);
}

/// A namespace of 1000 blocks of 512 bytes.
fn identify() -> IdentifyNamespace {
    let mut id = IdentifyNamespace::new_zeroed();
    id.nsze.set(1000);
    id.lbaf[0].lbads = 9;
    id
}

fn place() -> NgBlockDevice {
    NgBlockDevice {
        block_path: "/dev/nvme0n1".into(),
        block_number: 0,
        bytes: 512_000,
        block_bytes: 512,
        can_poll: true,
        transfer_bytes_max: 512 << 10,
        segments_max: 128,
        zero_bytes_max: 1 << 20,
        is_zoned: false,
    }
}

fn limits_of(
    place: &NgBlockDevice,
    id: &IdentifyNamespace,
    controller: &IdentifyController,
) -> Result<Limits, String> {
    let spec = NgSpec::new("/dev/ng0n1");
    Limits::of("d", &spec, place, id, controller).map_err(|error| error.to_string())
}

#[test]
fn kernels_before_6_1_do_not_poll_passthrough() {
    for release in ["6.1.0", "6.12.117+deb12-amd64", "7.0-rc1", "10.2.3"] {
        assert!(polls_passthrough(release), "{release}");
    }
    for release in ["6.0.19", "5.19.0-21-generic", "4.18", "6", "", "six.one"] {
        assert!(!polls_passthrough(release), "{release}");
    }
}

#[test]
fn the_limits_are_those_of_the_drive_within_those_of_its_driver() {
    let mut controller = IdentifyController::new_zeroed();
    let limits = limits_of(&place(), &identify(), &controller).expect("a disk");
    assert_eq!((limits.block_bytes, limits.block_count), (512, 1000));
    // 127 pages and one more for a ragged begin.
    assert_eq!(limits.transfer_bytes_max, 127 * 4096);
    assert!(limits.is_polled && !limits.has_volatile_cache && !limits.can_deallocate);
    assert_eq!(limits.zero_bytes_max, 0, "it does not say that it knows Write Zeroes");
    controller.oncs.set(1 << 3);
    controller.vwc = 1;
    let mut id = identify();
    id.dlfeat = 0b1001;
    let limits = limits_of(&place(), &id, &controller).expect("a disk");
    assert!(limits.has_volatile_cache && limits.can_deallocate);
    assert_eq!(limits.zero_bytes_max, 1 << 20);
    // NLB has 16 bits.
    let huge = NgBlockDevice {
        zero_bytes_max: u64::MAX,
        segments_max: u64::MAX,
        transfer_bytes_max: 1 << 40,
        ..place()
    };
    let limits = limits_of(&huge, &id, &controller).expect("a disk");
    assert_eq!((limits.zero_bytes_max, limits.transfer_bytes_max), (32 << 20, 32 << 20));
    let least = NgBlockDevice { zero_bytes_max: 511, segments_max: 0, transfer_bytes_max: 0, ..place() };
    let limits = limits_of(&least, &id, &controller).expect("a disk");
    assert_eq!((limits.zero_bytes_max, limits.transfer_bytes_max), (0, 4096));
    id.nsattr = 1;
    assert!(limits_of(&place(), &id, &controller).expect("a disk").is_read_only);
}

#[test]
fn a_namespace_that_cannot_be_a_disk_is_refused_by_name() {
    let controller = IdentifyController::new_zeroed();
    let mut id = identify();
    id.lbaf[0].lbads = 13;
    let error = limits_of(&place(), &id, &controller).expect_err("blocks of 8 KiB");
    assert!(error.contains("block size of the namespace = 8192: must be 512 or 4096"), "{error}");
    id = identify();
    id.nsze.set(0);
    let error = limits_of(&place(), &id, &controller).expect_err("nothing");
    assert!(error.contains("size = 0: must be"), "{error}");
    id.nsze.set(u64::MAX);
    assert!(limits_of(&place(), &id, &controller).is_err(), "more bytes than there are");
    let zoned = NgBlockDevice { is_zoned: true, ..place() };
    let error = limits_of(&zoned, &identify(), &controller).expect_err("zoned");
    assert!(error.contains("namespace = zoned: must be"), "{error}");
}

#[test]
fn what_is_no_generic_device_is_refused_with_its_path() {
    let refusal =
        |path: &str| super::NgDisk::new("d", &NgSpec::new(path)).err().expect("refused").to_string();
    let text = refusal("/dev/null");
    assert!(text.contains("ng = /dev/null: must be the generic device of an NVMe namespace"), "{text}");
    let text = refusal("/dev/ng99n99");
    assert!(text.contains("cannot stat /dev/ng99n99: No such file"), "{text}");
}

/// A sysfs with the namespace `ng0n1` as 240:7.
fn sysfs(at: &Path, files: &[(&str, &str)]) {
    let folder = at.join("devices/pci0000:00/nvme/nvme0");
    fs::create_dir_all(folder.join("ng0n1")).expect("a folder");
    fs::create_dir_all(folder.join("nvme0n1/queue")).expect("a folder");
    fs::create_dir_all(at.join("dev/char")).expect("a folder");
    symlink("../../devices/pci0000:00/nvme/nvme0/ng0n1", at.join("dev/char/240:7")).expect("a link");
    for (file, text) in files {
        fs::write(folder.join("nvme0n1").join(file), format!("{text}\n")).expect("a file");
    }
}

const FILES: [(&str, &str); 7] = [
    ("dev", "259:3"),
    ("size", "2048"),
    ("queue/logical_block_size", "4096"),
    ("queue/max_hw_sectors_kb", "128"),
    ("queue/max_segments", "33"),
    ("queue/write_zeroes_max_bytes", "131072"),
    ("queue/io_poll", "1"),
];

#[test]
fn sysfs_says_which_block_device_it_is_and_what_that_takes() {
    let at = TempPath::new();
    sysfs(at.path(), &FILES);
    let place = NgBlockDevice::of(at.path(), 240, 7).expect("a place");
    let expected = NgBlockDevice {
        block_path: "/dev/nvme0n1".into(),
        block_number: rustix::fs::makedev(259, 3),
        bytes: 1 << 20,
        block_bytes: 4096,
        can_poll: true,
        transfer_bytes_max: 131_072,
        segments_max: 33,
        zero_bytes_max: 131_072,
        is_zoned: false,
    };
    assert_eq!(place, expected);
    assert_eq!(NgBlockDevice::of(at.path(), 240, 8), None);
    fs::remove_dir_all(at.path()).expect("removed");
}

#[test]
fn a_sysfs_that_says_nonsense_is_no_place() {
    for (file, _) in &FILES[..5] {
        for text in ["", "x", "-1", "18446744073709551616", "1:2:3", ":"] {
            let at = TempPath::new();
            let files = FILES.map(|(name, value)| (name, if name == *file { text } else { value }));
            sysfs(at.path(), &files);
            assert_eq!(NgBlockDevice::of(at.path(), 240, 7), None, "{file} {text:?}");
            fs::remove_dir_all(at.path()).expect("removed");
        }
    }
}
