//! [`BackendCore`]: one core's handle on a disk whose commands end later: the request machine of files and
//! `ng`.
//!
//! ```text
//!   submit ──> Request ── slab has room, no guard on it ──> begun ──> AsyncBackend ──> Done
//!                 │                                          ^  ^       │
//!                 └── no room: queued, in order; ────────────┘  └───────┘
//!                     guarded: waiting              zeroing: the next piece, or method;
//!                                                   with FUA a sync last
//! ```
//!
//! An [`AsyncBackend`] executes one operation at a time for each token: read, write, sync, or zero a piece.
//! Sequencing, queueing and compare-and-write are implemented here.

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

pub(crate) use self::core::{BackendCore, requests_of};
pub(crate) use request::Request;

/// Completion of an operation of an [`AsyncBackend`].
#[derive(Debug)]
pub(crate) struct Ended<E> {
    /// Token given to the operation.
    pub(crate) token: u64,
    pub(crate) result: Result<(), E>,
    /// The buffer given to a read or write.
    pub(crate) buf: Option<Buf>,
}

/// How a range is zeroed; in order of preference.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ZeroMethod {
    /// Frees the space: punches a hole in a file, or Write Zeroes with DEAC.
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

/// The methods that the medium supports; shared by all cores.
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

    /// The first supported method in the order of [`ZeroMethod`]; `Release` only if `gives_back` is true.
    pub(crate) fn best(&self, gives_back: bool) -> ZeroMethod {
        if gives_back && self.can_release() {
            ZeroMethod::Release
        } else if self.can_zero.load(Ordering::Relaxed) {
            ZeroMethod::Zero
        } else {
            ZeroMethod::Write
        }
    }

    /// Disables `method`, which the medium has refused, for all cores; returns the method to use instead.
    /// `None` for `Write`, which cannot be disabled.
    pub(crate) fn refuse(&self, method: ZeroMethod) -> Option<ZeroMethod> {
        match method {
            ZeroMethod::Release => self.can_release.store(false, Ordering::Relaxed),
            ZeroMethod::Zero => self.can_zero.store(false, Ordering::Relaxed),
            ZeroMethod::Write => return None,
        }
        Some(self.best(false))
    }
}

/// Executes the operations of one core. It has capacity for one operation of each request and one of the
/// compare-and-write.
pub(crate) trait AsyncBackend {
    /// Error of an operation.
    type Error;

    fn geometry(&self) -> Geometry;

    /// Error with which the backend refuses a command before it begins.
    fn refusal(&self, request: &Request) -> Option<DiskError>;

    /// Reads from byte `offset` on until `buf` is full.
    fn read(&mut self, token: u64, offset: u64, buf: Buf);

    /// Writes `buf` at byte `offset`; with `fua` it completes when the data is durable.
    fn write(&mut self, token: u64, offset: u64, buf: Buf, fua: bool);

    /// Makes all completed writes durable.
    fn sync(&mut self, token: u64);

    fn zero_methods(&self) -> &ZeroMethods;

    /// Most bytes of one [`AsyncBackend::zero`] with `method`.
    fn zero_bytes_max(&self, method: ZeroMethod) -> u64;

    /// Zeroes `bytes` from byte `offset` on.
    fn zero(&mut self, token: u64, method: ZeroMethod, offset: u64, bytes: u64);

    /// The method to try after `method` failed with `error`; `None`: the request fails.
    fn next_method(&self, method: ZeroMethod, error: &Self::Error) -> Option<ZeroMethod>;

    /// Called when a sync, or (`is_sync` false) a write with FUA, has failed.
    fn on_durable_error(&self, is_sync: bool, error: &Self::Error);

    /// The error reported to the target core.
    fn disk_error(&self, error: &Self::Error, is_write: bool) -> DiskError;

    /// Cancels the operation of `token`: no further piece of it is given to the device, and the piece at the
    /// device is not retried. The operation still completes, with any result.
    fn cancel(&mut self, token: u64);

    /// Submits to the device the operations begun since the last call.
    ///
    /// # Errors
    /// The backend is unusable and returns no further completions.
    fn send(&mut self) -> io::Result<()>;

    /// Passes each completed operation to `each`.
    fn collect(&mut self, each: &mut dyn FnMut(Ended<Self::Error>));
}
