//! [`BackendCore`]: one core's handle on a disk whose commands end later, whatever medium does them.
//!
//! ```text
//!   submit ──> Request ── room, no guard on its blocks ──> begun ──> AsyncBackend ──> Done
//!                 │                                          ^  ^       │
//!                 └── no room: queued, in order; ────────────┘  └───────┘
//!                     guarded: waiting              zeroing: the next piece, or method;
//!                                                   with FUA a sync last
//! ```
//!
//! An [`AsyncBackend`] does one thing at a time for each token that it is given: read, write, sync, zero a
//! piece. The order of things, the queue and compare-and-write are here.

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

/// What a medium gave back.
#[derive(Debug)]
pub(crate) struct Ended<E> {
    /// The name that it was given.
    pub(crate) token: u64,
    /// All of it was done, or why not.
    pub(crate) result: Result<(), E>,
    /// The buffer of a read or write.
    pub(crate) buf: Option<Buf>,
}

/// How a range becomes zeroes, the better first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ZeroMethod {
    /// The space goes back: a hole in a file, Write Zeroes with DEAC.
    Release,
    /// The medium knows that it is zero; the space stays.
    Zero,
    /// Zeroes are written.
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

/// The methods that a medium has and has not refused, on any core.
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

    /// The best one. `gives_back`: the space may go.
    pub(crate) fn best(&self, gives_back: bool) -> ZeroMethod {
        if gives_back && self.can_release() {
            ZeroMethod::Release
        } else if self.can_zero.load(Ordering::Relaxed) {
            ZeroMethod::Zero
        } else {
            ZeroMethod::Write
        }
    }

    /// The medium does not have this one: it is not tried again. The next one.
    pub(crate) fn refuse(&self, method: ZeroMethod) -> Option<ZeroMethod> {
        match method {
            ZeroMethod::Release => self.can_release.store(false, Ordering::Relaxed),
            ZeroMethod::Zero => self.can_zero.store(false, Ordering::Relaxed),
            ZeroMethod::Write => return None,
        }
        Some(self.best(false))
    }
}

/// What the requests of one core are done with. It has room for each of them, and for one more: the
/// compare-and-write.
pub(crate) trait AsyncBackend {
    /// Why something was not done.
    type Error;

    /// The disk's shape now.
    fn geometry(&self) -> Geometry;

    /// Why a command ends before it begins, for a reason of this medium alone.
    fn refusal(&self, request: &Request) -> Option<DiskError>;

    /// Read as many bytes as `buf` has from `offset` on.
    fn read(&mut self, token: u64, offset: u64, buf: Buf);

    /// Write the bytes of `buf` at `offset`; with `fua` they are on the medium when it ends.
    fn write(&mut self, token: u64, offset: u64, buf: Buf, fua: bool);

    /// Bring all that was written to the medium.
    fn sync(&mut self, token: u64);

    /// What it has for zeroes.
    fn zero_methods(&self) -> &ZeroMethods;

    /// Bytes that are zeroed so in one piece.
    fn zero_bytes_max(&self, method: ZeroMethod) -> u64;

    /// Zero a piece.
    fn zero(&mut self, token: u64, method: ZeroMethod, offset: u64, bytes: u64);

    /// The method to try where this one ended so; `None`: there is none, that is the end.
    fn next_method(&self, method: ZeroMethod, error: &Self::Error) -> Option<ZeroMethod>;

    /// A sync, or (`is_sync` false) a write that was to be durable, ended so.
    fn on_durable_error(&self, is_sync: bool, error: &Self::Error);

    /// What it means for the host.
    fn disk_error(&self, error: &Self::Error, is_write: bool) -> DiskError;

    /// Cut short what was begun as `token`: no further piece of it is given to the device, and the piece that
    /// the device has is not repeated if it fails. It still ends, with any result.
    fn cancel(&mut self, token: u64);

    /// Send what was begun to the device.
    ///
    /// # Errors
    /// The medium is broken, and nothing comes back any more.
    fn send(&mut self) -> io::Result<()>;

    /// Give each that has ended to `each`.
    fn collect(&mut self, each: &mut dyn FnMut(Ended<Self::Error>));
}
