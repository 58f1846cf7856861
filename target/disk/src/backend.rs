//! [`BackendChannel`]: one core's handle on a disk whose commands end after `submit`. Used by the kinds
//! `file` and `ng`, and by `BlankFile`, with which instructions are counted.
//!
//! ```text
//!   submit ──> Request ── slab not full, not guarded ──────> begun ──> AsyncBackend ──> Done
//!                 │                                          ^  ^       │
//!                 └── slab full: queued, in order; ──────────┘  └───────┘
//!                     write to the guarded block: waiting   zeroing: the next piece, or method;
//!                                                           with FUA a sync last
//! ```
//!
//! An [`AsyncBackend`] executes one operation at a time for each token: read, write, sync, or zero a piece.
//! [`BackendChannel`] implements sequencing, queueing and compare-and-write.

#[cfg(feature = "blank-file")]
pub mod blank;
pub mod compare_and_write;
mod core;
pub mod guard;
pub(crate) mod request;
#[cfg(test)]
mod tests;

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};

use spindle_reactor::mem::Buf;

use crate::{DiskError, Geometry};

pub(crate) use self::core::{BackendChannel, requests_of};
pub(crate) use request::Request;

/// Completion of an operation of an [`AsyncBackend`].
#[derive(Debug)]
pub(crate) struct Ended<E> {
    pub(crate) token: u64,
    pub(crate) result: Result<(), E>,
    /// The buffer of a read or write; `None` for other operations.
    pub(crate) buf: Option<Buf>,
}

/// Methods for zeroing a range, in the order of attempts. `Release` only if the space may be freed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ZeroMethod {
    /// Frees the space: `FALLOC_FL_PUNCH_HOLE`, or Write Zeroes with DEAC.
    Release,
    /// Keeps the space: `FALLOC_FL_ZERO_RANGE`, or Write Zeroes.
    Zero,
    /// Writes a buffer of zeroes.
    Write,
}

impl ZeroMethod {
    pub(crate) fn next(self) -> Option<ZeroMethod> {
        match self {
            ZeroMethod::Release => Some(ZeroMethod::Zero),
            ZeroMethod::Zero => Some(ZeroMethod::Write),
            ZeroMethod::Write => None,
        }
    }
}

/// The zero methods that the medium supports, shared by all cores. [`ZeroMethod::Write`] is always supported.
pub(crate) struct ZeroMethods {
    can_release: AtomicBool,
    can_zero: AtomicBool,
}

impl ZeroMethods {
    pub(crate) fn new(can_release: bool, can_zero: bool) -> ZeroMethods {
        ZeroMethods { can_release: AtomicBool::new(can_release), can_zero: AtomicBool::new(can_zero) }
    }

    pub(crate) fn can_release(&self) -> bool {
        self.can_release.load(Ordering::Relaxed)
    }

    /// Returns the first supported method in the order of [`ZeroMethod`]; `Release` only if `gives_back`.
    pub(crate) fn best(&self, gives_back: bool) -> ZeroMethod {
        if gives_back && self.can_release() {
            ZeroMethod::Release
        } else if self.can_zero.load(Ordering::Relaxed) {
            ZeroMethod::Zero
        } else {
            ZeroMethod::Write
        }
    }

    /// Disables `method`, which the medium has refused, for all cores. Returns the method to use instead,
    /// which keeps the space. `None` for `Write`, which cannot be disabled.
    pub(crate) fn refuse(&self, method: ZeroMethod) -> Option<ZeroMethod> {
        match method {
            ZeroMethod::Release => self.can_release.store(false, Ordering::Relaxed),
            ZeroMethod::Zero => self.can_zero.store(false, Ordering::Relaxed),
            ZeroMethod::Write => return None,
        }
        Some(self.best(false))
    }
}

/// Executes the operations of one core. A backend has capacity for one operation of each request and one
/// operation of the compare-and-write.
pub(crate) trait AsyncBackend {
    type Error;

    fn geometry(&self) -> Geometry;

    /// Returns the error with which the backend refuses a command before its first operation, if it does.
    fn refusal(&self, request: &Request) -> Option<DiskError>;

    /// Reads from byte `offset` on until `buf` is full.
    fn read(&mut self, token: u64, offset: u64, buf: Buf);

    /// Writes `buf` at byte `offset`. With `fua` the operation completes when the data is durable.
    fn write(&mut self, token: u64, offset: u64, buf: Buf, fua: bool);

    /// Makes all completed writes durable.
    fn sync(&mut self, token: u64);

    fn zero_methods(&self) -> &ZeroMethods;

    /// Returns the most bytes of one [`AsyncBackend::zero`] with `method`.
    fn zero_bytes_max(&self, method: ZeroMethod) -> u64;

    /// Zeroes `bytes` from byte `offset` on.
    fn zero(&mut self, token: u64, method: ZeroMethod, offset: u64, bytes: u64);

    /// Returns the method to try after `method` failed with `error`; `None`: the request fails.
    fn next_method(&self, method: ZeroMethod, error: &Self::Error) -> Option<ZeroMethod>;

    /// Handles the failure of a sync (`is_sync`) or of a write with FUA. A compare-and-write counts as one.
    fn on_durable_error(&self, is_sync: bool, error: &Self::Error);

    /// Returns the error that the target core receives.
    fn disk_error(&self, error: &Self::Error, is_write: bool) -> DiskError;

    /// Cancels the operation of `token`: the backend sends no further piece of the operation to the device
    /// and retries none. The operation still completes, with any result.
    fn cancel(&mut self, token: u64);

    /// Submits to the device the operations begun since the last call.
    ///
    /// # Errors
    /// The system's error. The backend is then unusable, and its operations do not complete.
    fn send(&mut self) -> io::Result<()>;

    /// Passes each completed operation to `each`.
    fn collect(&mut self, each: &mut dyn FnMut(Ended<Self::Error>));
}
