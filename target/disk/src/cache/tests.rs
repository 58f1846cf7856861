//! Tests of the cache.

mod ahead;
mod changes;
mod counted;
pub(crate) mod held;
mod pace;
mod policies;
mod rules;
mod threads;
mod times;
mod weak;
mod written;

use std::sync::Arc;

use spindle_reactor::mem::Pages;

use super::{CacheMode, CacheSpec, CachedDisk, PolicyKind};
use crate::testing::{TempPath, model, steady};
use crate::{Disk, Fault, FaultDisk, FileDisk, FileSpec, OpKind, OpenError};

fn spec(bytes: u64, policy: PolicyKind) -> CacheSpec {
    CacheSpec::new(bytes, policy, Pages::Base)
}

fn file(path: &TempPath, block_bytes: u32) -> Arc<FileDisk> {
    let spec = FileSpec { create_bytes: Some(1 << 20), ..FileSpec::new(path.path(), block_bytes) };
    FileDisk::new("cached", &spec).expect("a file")
}

#[test]
fn what_was_written_is_read_whatever_the_size_and_the_policy() {
    for (seed, (block_bytes, bytes, policy)) in [
        (512, 64 << 10, PolicyKind::S3Fifo),
        (512, 600 << 10, PolicyKind::Lru),
        (4096, 128 << 10, PolicyKind::Lru),
        (4096, 2 << 20, PolicyKind::S3Fifo),
    ]
    .into_iter()
    .enumerate()
    {
        let path = TempPath::new();
        let disk = CachedDisk::new(file(&path, block_bytes), Some(&spec(bytes, policy))).expect("a cache");
        model::check(&*disk, seed as u64, 300, false);
        let counts = disk.counts();
        assert!(counts.hits > 20 && counts.misses > 100, "{counts:?}");
        assert_eq!(counts.evictions > 0, bytes < 256 << 10 || counts.evictions > 0, "{counts:?}");
    }
}

#[test]
fn what_was_written_is_read_over_a_disk_that_fails_and_is_late() {
    for seed in 0..4 {
        let path = TempPath::new();
        let (inner, control) = FaultDisk::new(file(&path, 512), seed);
        for kind in [OpKind::Read, OpKind::Write, OpKind::Deallocate, OpKind::WriteZeroes] {
            control.set(Fault::Error, kind, 100_000);
            control.set(Fault::Delay, kind, 300_000);
            control.set(Fault::Reorder, kind, 300_000);
        }
        let disk = CachedDisk::new(inner, Some(&spec(256 << 10, PolicyKind::S3Fifo))).expect("a cache");
        model::check(&*disk, seed, 200, true);
        assert!(disk.counts().hits > 100);
    }
}

#[test]
fn nothing_is_allocated_in_the_steady_state() {
    for (policy, mode) in [
        (PolicyKind::S3Fifo, CacheMode::Shared),
        (PolicyKind::Lru, CacheMode::Shared),
        (PolicyKind::S3Fifo, CacheMode::Exclusive),
    ] {
        let (inner, _) = held::HeldDisk::create(512, 4 << 20);
        let spec = CacheSpec { mode, ..spec(128 << 10, policy) };
        let disk = CachedDisk::new(inner, Some(&spec)).expect("a cache");
        steady::check(&*disk, 20);
    }
}

#[test]
fn sizes_out_of_range_are_refused_by_name() {
    let path = TempPath::new();
    let inner = file(&path, 512);
    for bytes in [0, super::CACHE_BYTES_MIN - 1, super::CACHE_BYTES_MAX + 1, u64::MAX] {
        let refused =
            CachedDisk::new(Arc::clone(&inner) as Arc<dyn Disk>, Some(&spec(bytes, PolicyKind::Lru)));
        let Err(OpenError::Setting { field, value, .. }) = refused.map(drop) else { panic!("{bytes}") };
        assert_eq!((field, value), ("cache.size", bytes.to_string()));
    }
}

#[test]
fn its_memory_is_little_more_than_its_pages() {
    for bytes in [64 << 10, 16 << 20, 1 << 30, 1 << 40] {
        let memory = spec(bytes, PolicyKind::S3Fifo).memory_bytes();
        assert!(memory > bytes - bytes / 50 && memory < bytes + bytes / 50 + 4096, "{bytes}: {memory}");
    }
}
