//! Optimistic reads: Attach, and the references in completions of Reads.

use std::sync::{Arc, Mutex};

use nvme_spec::optimistic::{
    ATTACHMENT_BYTES, Attachment, PAGE_ENTRY_BYTES, PageEntry, PageReference, REFERENCE_PAGES_MAX,
    page_checksum,
};
use nvme_spec::zerocopy::FromBytes;
use nvme_spec::{Sqe, Status};
use spindle_reactor::mem::{Pages, SealedFrames};
use spindle_target::shared::{ControllerShared, OptimisticService};
use spindle_target::snapshot::AllowedHosts;
use spindle_target_disk::Disk;
use spindle_target_disk::cache::{CacheSpec, CachedDisk, PolicyKind};
use spindle_tests::script::{Answer, Host, Rig, Setup};

use crate::{assert_ok, pattern, pool_disk, ram_disk, ram_disk_with};

/// Gives out so many tokens, and notes for which frames.
struct Service {
    left: Mutex<u32>,
    frames: Arc<Mutex<Vec<Arc<dyn SealedFrames>>>>,
}

impl OptimisticService for Service {
    fn attach(
        &self,
        controller: &Arc<ControllerShared>,
        nsid: u32,
        frames: Arc<dyn SealedFrames>,
    ) -> Option<Attachment> {
        assert!(controller.is_ready() && nsid == 1);
        let mut left = self.left.lock().expect("no panic");
        *left = left.checked_sub(1)?;
        self.frames.lock().expect("no panic").push(frames);
        Some(Attachment::new(4430, 10_000, [7; 16]))
    }
}

fn cached(has_seals: bool) -> Arc<dyn Disk> {
    let spec = CacheSpec { has_seals, ..CacheSpec::new(1 << 20, PolicyKind::S3Fifo, Pages::Base) };
    CachedDisk::new(pool_disk(512), Some(&spec)).expect("a disk")
}

struct World {
    rig: Rig,
    host: Host,
    frames: Arc<Mutex<Vec<Arc<dyn SealedFrames>>>>,
}

impl World {
    fn new(disk: Arc<dyn Disk>, tokens: u32) -> World {
        let mut rig = Rig::new(Setup::small(vec![disk]));
        let frames = Arc::default();
        let service = Service { left: Mutex::new(tokens), frames: Arc::clone(&frames) };
        rig.registry.set_optimistic(Box::new(service));
        let host = rig.host();
        World { rig, host, frames }
    }

    fn attach(&mut self, nsid: u32, bytes: usize) -> Answer {
        self.rig.read(&self.host.admin, Sqe::attach(9, nsid), bytes)
    }

    /// A Read of whole blocks of 512 bytes.
    fn read(&mut self, lba: u64, blocks: u32) -> Answer {
        let answer = self.rig.read(&self.host.io, Sqe::read(1, 1, lba, blocks), blocks as usize * 512);
        assert_ok(&answer);
        answer
    }

    /// The reference to a page; its seal is valid.
    fn reference(&mut self, page: u64) -> Option<PageReference> {
        let reference = PageReference::from_result(self.read(page * 8, 8).result)?;
        assert!(self.is_valid(page, reference), "{reference:?}");
        Some(reference)
    }

    fn is_valid(&self, page: u64, reference: PageReference) -> bool {
        let frames = self.frames.lock().expect("no panic").last().cloned().expect("attached");
        assert_eq!(reference.epoch, frames.epoch());
        frames.seal_of(reference.frame) == reference.seal(page)
    }
}

#[test]
fn reads_have_references_from_the_first_attach_to_the_next_reset() {
    let mut world = World::new(cached(true), 10);
    for _ in 0..2 {
        assert_eq!(world.read(8, 8).result, 0, "not attached");
    }
    let answer = world.attach(1, ATTACHMENT_BYTES);
    assert_ok(&answer);
    let attachment = Attachment::read_from_bytes(&answer.data).expect("64 bytes");
    assert_eq!((attachment.port.get(), attachment.token), (4430, [7; 16]));
    // A hit, a miss and a hit of the same page.
    assert!(world.reference(1).is_some());
    let first = world.reference(2).expect("filled");
    assert_eq!(world.reference(2), Some(first));
    world.rig.set_cc(&world.host.admin, 0);
    world.rig.set_cc(&world.host.admin, spindle_tests::script::CC_ENABLED);
    let io = world.rig.io(0, spindle_tests::script::Want::io(world.host.cntlid, 1));
    world.host.io = io;
    assert_eq!(world.read(8, 8).result, 0, "the controller was reset");
    world.rig.finish();
}

#[test]
fn only_one_aligned_page_has_a_reference() {
    let mut world = World::new(cached(true), 1);
    assert_ok(&world.attach(1, ATTACHMENT_BYTES));
    for (lba, blocks) in [(8, 16), (8, 7), (9, 8), (8, 1), (16, 8), (8, 8)] {
        for _ in 0..2 {
            let has = world.read(lba, blocks).result != 0;
            assert_eq!(has, blocks == 8 && lba % 8 == 0, "{blocks} blocks from {lba}");
        }
    }
    world.rig.finish();
}

#[test]
fn a_write_of_a_part_of_the_page_breaks_its_seal_and_a_read_brings_a_new_one() {
    let mut world = World::new(cached(true), 1);
    assert_ok(&world.attach(1, ATTACHMENT_BYTES));
    let old = world.reference(3).expect("filled");
    let data = pattern(1, 512);
    assert_ok(&world.rig.run(&world.host.io, Sqe::write(2, 1, 3 * 8 + 5, 1, false), &data));
    assert!(!world.is_valid(3, old), "it was written");
    let new = world.reference(3).expect("filled");
    assert_ne!(new, old);
    assert_eq!(world.read(3 * 8 + 5, 1).data, data);
    world.rig.finish();
}

#[test]
fn a_page_of_a_ram_disk_has_a_reference_until_it_is_changed() {
    let mut world = World::new(ram_disk_with(512, true), 1);
    assert_ok(&world.attach(1, ATTACHMENT_BYTES));
    assert_eq!(world.reference(3), None, "a page that was never written");
    let write = |world: &mut World, lba, bytes: usize| {
        let blocks = u32::try_from(bytes / 512).expect("small");
        let sqe = Sqe::write(2, 1, lba, blocks, false);
        assert_ok(&world.rig.run(&world.host.io, sqe, &pattern(1, bytes)));
    };
    write(&mut world, 3 * 8, 4096);
    for blocks in [(3 * 8, 7), (3 * 8 + 1, 8), (3 * 8, 16)] {
        assert_eq!(world.read(blocks.0, blocks.1).result, 0);
    }
    for (lba, bytes) in [(3 * 8, 4096), (3 * 8 + 5, 512)] {
        let old = world.reference(3).expect("it was written");
        assert_eq!(world.reference(3), Some(old));
        write(&mut world, lba, bytes);
        assert!(!world.is_valid(3, old), "{bytes} bytes at {lba}");
    }
    let old = world.reference(3).expect("it was written");
    assert_ok(&world.rig.run(&world.host.io, Sqe::write_zeroes(3, 1, 3 * 8 + 1, 1, true), &[]));
    assert!(!world.is_valid(3, old));
    let old = world.reference(3).expect("a part of it is not zero");
    assert_ok(&world.rig.run(&world.host.io, Sqe::write_zeroes(3, 1, 3 * 8, 8, true), &[]));
    assert!(!world.is_valid(3, old));
    assert_eq!(world.reference(3), None, "it has no frame");
    world.rig.finish();
}

#[test]
fn attach_is_refused_by_reason() {
    let mut world = World::new(cached(true), 1);
    let refused = world.attach(2, ATTACHMENT_BYTES).status;
    assert_eq!(refused, Status::INVALID_NAMESPACE_OR_FORMAT.dnr());
    assert_eq!(world.attach(1, 4096).status, Status::DATA_SGL_LENGTH_INVALID.dnr());
    assert_ok(&world.attach(1, ATTACHMENT_BYTES));
    assert_eq!(world.attach(1, ATTACHMENT_BYTES).status, Status::COMMAND_INTERRUPTED, "no token is left");
    world.rig.finish();
    for disk in [cached(false), pool_disk(512), ram_disk(512)] {
        let mut world = World::new(disk, 1);
        assert_eq!(world.attach(1, ATTACHMENT_BYTES).status, Status::NAMESPACE_NOT_READY);
        assert_eq!(world.read(8, 8).result, 0);
        world.rig.finish();
    }
}

#[test]
fn a_host_that_may_not_read_caches_is_denied_and_reads_as_before() {
    let mut world = World::new(cached(true), 2);
    world.rig.setup.optimistic_hosts = AllowedHosts::Only(Vec::new());
    world.rig.publish();
    assert_eq!(world.attach(1, ATTACHMENT_BYTES).status, Status::OPERATION_DENIED);
    assert_eq!(world.read(8, 8).result, 0);
    world.rig.setup.optimistic_hosts = AllowedHosts::Any;
    world.rig.publish();
    assert_ok(&world.attach(1, ATTACHMENT_BYTES));
    assert!(world.reference(1).is_some());
    world.rig.finish();
}

#[test]
fn without_the_service_the_command_is_not_there() {
    let mut rig = Rig::new(Setup::small(vec![cached(true)]));
    let host = rig.host();
    let answer = rig.read(&host.admin, Sqe::attach(9, 1), ATTACHMENT_BYTES);
    assert_eq!(answer.status, Status::INVALID_OPCODE.dnr());
    rig.finish();
}

impl World {
    /// The answer to Get References of blocks of 512 bytes, with an SGL of `bytes`.
    fn ask(&mut self, lba: u64, blocks: u32, bytes: usize) -> Answer {
        self.rig.read(&self.host.io, Sqe::get_references(5, 1, lba, blocks), bytes)
    }

    /// The entries of `count` pages.
    fn entries(&mut self, first: u64, count: u32) -> Vec<PageEntry> {
        let answer = self.ask(first * 8, count * 8, (count * PAGE_ENTRY_BYTES) as usize);
        assert_ok(&answer);
        assert_eq!(answer.result, 0, "the data has the references");
        let entries = answer.data.chunks_exact(PAGE_ENTRY_BYTES as usize);
        entries.map(|entry| PageEntry::read_from_bytes(entry).expect("16 bytes")).collect()
    }
}

#[test]
fn get_references_has_the_pages_that_are_in_memory() {
    for disk in [cached(true), ram_disk_with(512, true)] {
        let is_ram = disk.kind() == "ram";
        let mut world = World::new(Arc::clone(&disk), 1);
        assert_ok(&world.attach(1, ATTACHMENT_BYTES));
        let pages = u32::try_from(disk.geometry().bytes() / 4096).expect("small").min(REFERENCE_PAGES_MAX);
        let all = world.entries(0, pages);
        assert_eq!(all, vec![PageEntry::default(); pages as usize], "nothing is in memory");
        let data = pattern(1, 4096);
        for page in [0, 3, u64::from(pages) - 1] {
            assert_ok(&world.rig.run(&world.host.io, Sqe::write(2, 1, page * 8, 8, false), &data));
            let before = world.read(page * 8, 8).result;
            assert_ne!(before, 0);
        }
        let known = |entries: &[PageEntry]| -> Vec<usize> {
            (0..entries.len()).filter(|at| entries[*at].get().is_some()).collect()
        };
        let all = world.entries(0, pages);
        assert_eq!(known(&all), [0, 3, pages as usize - 1]);
        for page in [0, 3] {
            let (reference, checksum) = all[page].get().expect("known");
            assert_eq!(Some(reference), world.reference(page as u64));
            assert_eq!(checksum, page_checksum(&data));
        }
        assert_eq!(known(&world.entries(2, 2)), [1]);
        // A page of which a part was written has another entry, or none until it is read.
        let (old, _) = all[3].get().expect("known");
        assert_ok(&world.rig.run(&world.host.io, Sqe::write(2, 1, 3 * 8 + 1, 1, false), &data[..512]));
        let now = world.entries(3, 1)[0].get();
        assert_eq!(now.is_some(), is_ram);
        assert!(now.is_none_or(|(reference, checksum)| reference != old && checksum != page_checksum(&data)));
        world.rig.finish();
    }
}

#[test]
fn get_references_reads_nothing_and_counts_no_hit() {
    let disk = cached(true);
    let mut world = World::new(Arc::clone(&disk), 1);
    assert_ok(&world.attach(1, ATTACHMENT_BYTES));
    world.read(8, 8);
    let before = disk.cache().expect("a cache").counts;
    for _ in 0..3 {
        assert_eq!(world.entries(0, 4).iter().filter(|entry| entry.get().is_some()).count(), 1);
    }
    assert_eq!(disk.cache().expect("a cache").counts, before);
    world.rig.finish();
}

#[test]
fn get_references_is_refused_by_reason() {
    let mut world = World::new(cached(true), 1);
    assert_eq!(world.ask(8, 8, 16).status, Status::COMMAND_SEQUENCE_ERROR.dnr(), "not attached");
    assert_ok(&world.attach(1, ATTACHMENT_BYTES));
    let end = cached(true).geometry().block_count;
    let too_long = (REFERENCE_PAGES_MAX + 1) * 8;
    let refused = [
        (9, 8, 16, Status::INVALID_FIELD),
        (8, 7, 16, Status::INVALID_FIELD),
        (8, 12, 16, Status::INVALID_FIELD),
        (0, too_long, 16 * 65, Status::INVALID_FIELD),
        (end - 8, 16, 32, Status::LBA_OUT_OF_RANGE),
        (u64::MAX - 7, 8, 16, Status::LBA_OUT_OF_RANGE),
        (8, 8, 32, Status::DATA_SGL_LENGTH_INVALID),
        (8, 16, 16, Status::DATA_SGL_LENGTH_INVALID),
    ];
    for (lba, blocks, bytes, status) in refused {
        assert_eq!(world.ask(lba, blocks, bytes).status, status.dnr(), "{blocks} blocks from {lba}");
    }
    let other = Sqe::get_references(5, 2, 0, 8);
    let answer = world.rig.read(&world.host.io, other, 16);
    assert_eq!(answer.status, Status::INVALID_NAMESPACE_OR_FORMAT.dnr());
    let fused = Sqe::get_references(5, 1, 0, 8).with_fuse(nvme_spec::sqe::Fuse::FIRST);
    assert_eq!(world.rig.read(&world.host.io, fused, 16).status, Status::INVALID_FIELD.dnr());
    world.rig.finish();
    let mut rig = Rig::new(Setup::small(vec![cached(true)]));
    let host = rig.host();
    let answer = rig.read(&host.io, Sqe::get_references(5, 1, 0, 8), 16);
    assert_eq!(answer.status, Status::INVALID_OPCODE.dnr());
    rig.finish();
}
