//! The promises of [`DiskChannel`](spindle_target_disk::DiskChannel) that `docs/disk-contract.md` lists,
//! checked for a kind of disk and for every stack of layers over it.
//!
//! A kind implements [`Rig`] and calls [`check`]. Each promise is a function of [`promises`] or [`trouble`].
//! What a rig cannot do (hold commands, lose its device) is not checked for it; [`check`] returns what was
//! checked, for the rig's test to compare with what it expects.
#![forbid(unsafe_code)]

mod bench;
mod promises;
mod stack;
mod trouble;

use std::sync::Arc;

use spindle_reactor::clock::Nanos;
use spindle_target_disk::{Disk, DiskError};

pub use bench::Bench;
pub use stack::Stack;

/// One disk of a kind, and what is behind it. Methods with a default are what a kind may be unable to do.
pub trait Rig {
    /// Returns the disk, of blocks of 512 bytes, at least 256 KiB, whose blocks are zero at first.
    fn source(&self) -> Arc<dyn Disk>;

    /// Lets `time` pass for what is behind the disk. Returns the time for
    /// [`spindle_target_disk::DiskChannel::poll`].
    fn pass(&mut self, time: Nanos) -> Nanos;

    /// Returns true if the disk may have a cache in front of it: its reads fill the caller's buffers.
    fn can_have_cache(&self) -> bool {
        true
    }

    /// Returns true if the disk keeps what is written to it.
    fn keeps_data(&self) -> bool {
        true
    }

    /// With true, what is behind the disk ends no command until the call with false.
    fn hold(&mut self, is_held: bool) -> bool {
        let _ = is_held;
        false
    }

    /// Returns the longest time of a command from its submission on.
    fn time_limit(&self) -> Option<Nanos> {
        None
    }

    /// With true, reads of the device fail, not for its medium, until the call with false. Returns the error
    /// that the disk without a layer returns.
    fn fail_reads(&mut self, fails: bool) -> Option<DiskError> {
        let _ = fails;
        None
    }

    /// Makes the disk read-only, or writable again.
    fn set_read_only(&mut self, is_read_only: bool) -> bool {
        let _ = is_read_only;
        false
    }

    /// Takes the device away, changes the block at `lba` to this byte, and brings the device back.
    fn change_while_away(&mut self, lba: u64, byte: u8) -> bool {
        let _ = (lba, byte);
        false
    }
}

/// A promise: its name in `docs/disk-contract.md`, and its check. False: the rig cannot show it.
type Promise = (&'static str, fn(&mut Bench) -> bool);

const PROMISES: [Promise; 10] = [
    ("content", promises::reads_return_the_last_write),
    ("once", promises::every_command_ends_once),
    ("compose", promises::copy_and_compare_and_write),
    ("resize", promises::a_new_size_is_seen_and_new_blocks_are_zero),
    ("cancel", trouble::a_submitter_that_goes),
    ("error", trouble::an_error_is_passed_on),
    ("deadline", trouble::one_limit_of_time),
    ("buffer", trouble::a_buffer_that_came_back_is_not_used),
    ("read-only", trouble::a_disk_that_becomes_read_only),
    ("return", trouble::a_device_that_was_changed_while_away),
];

/// Checks every promise for every stack of layers over disks that `make` makes. Returns the names of the
/// promises that the rig could show.
///
/// # Panics
/// If a promise is not kept; the message names the stack and the promise.
pub fn check(make: impl Fn() -> Box<dyn Rig>) -> Vec<&'static str> {
    let mut shown = Vec::new();
    for (name, promise) in PROMISES {
        for stack in Stack::ALL {
            let rig = make();
            if stack.has_cache() && !rig.can_have_cache() {
                continue;
            }
            let mut bench = Bench::new(rig, stack, name);
            if promise(&mut bench) {
                bench.assert_at_rest();
                shown.push(name);
            }
        }
    }
    shown.dedup();
    shown
}
