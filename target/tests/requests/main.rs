//! The target's request machine, one rule at a time, on scripted connections (`spindle_tests::script`).
#![forbid(unsafe_code)]

mod aborts;
mod bulk;
mod busy;
mod closing;
mod cluster;
mod commands;
mod drain;
mod drives;
mod fast_path;
mod faults;
mod fence;
mod fused;
mod gone;
mod lists;
mod memory;
mod optimistic;
mod prepare;
mod queue;
mod reconfigure;
mod removal;
mod room;
mod shares;
mod time;

use std::sync::Arc;

use nvme_spec::Status;
use spindle_reactor::mem::Pages;
use spindle_target_disk::ram::{RamDisk, RamSpec};
use spindle_target_disk::{Abilities, Disk};
use spindle_tests::script::Answer;
use spindle_tests::sim::disk::PoolDisk;

/// Blocks of every disk here.
const BLOCKS: u64 = 2048;

fn pool_disk(block_bytes: u32) -> Arc<dyn Disk> {
    PoolDisk::create(block_bytes, BLOCKS)
}

fn ram_disk(block_bytes: u32) -> Arc<dyn Disk> {
    ram_disk_with(block_bytes, false)
}

fn ram_disk_with(block_bytes: u32, has_seals: bool) -> Arc<dyn Disk> {
    let bytes = BLOCKS * u64::from(block_bytes);
    let spec = RamSpec { bytes, block_bytes, pages: Pages::Base, has_seals };
    Arc::new(RamDisk::with_slack("ram", spec, 1 << 20).expect("a disk"))
}

/// Does itself what a disk can.
fn able_disk(block_bytes: u32) -> Arc<dyn Disk> {
    let abilities = Abilities { compare: true, verify: true, copy: true, reads_in_place: false };
    PoolDisk::with_abilities(block_bytes, BLOCKS, abilities)
}

/// The two ways in which disks handle memory, each with both block sizes, and a disk that does more itself.
fn kinds() -> Vec<Arc<dyn Disk>> {
    vec![pool_disk(512), pool_disk(4096), ram_disk(512), ram_disk(4096), able_disk(512)]
}

/// Bytes that tell where they belong.
fn pattern(seed: usize, bytes: usize) -> Vec<u8> {
    (0..bytes).map(|at| u8::try_from((at / 7 + at + seed * 31) % 251).expect("a byte")).collect()
}

/// Refused, for good.
#[track_caller]
fn assert_refused(answer: &Answer, status: Status) {
    assert_eq!(answer.status, status.dnr(), "command {:#x}", answer.cid);
}

/// Succeeded.
#[track_caller]
fn assert_ok(answer: &Answer) {
    assert_eq!(answer.status, Status::SUCCESS, "command {:#x}", answer.cid);
}
