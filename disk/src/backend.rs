//! [`BackendCore`]: one core's handle on a disk whose commands end later, whatever medium does them.
//!
//! ```text
//!   submit ──> Request ── room, no guard on its blocks ──> begun ──> AsyncBackend ──> Done
//!                 │                                          ^  ^       │
//!                 └── no room: queued, in order; ────────────┘  └───────┘
//!                     guarded: waiting              zeroing: the next piece, or a humbler way;
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

/// What the requests of one core are done with. It has room for each of them, and for one more: the
/// compare-and-write.
pub(crate) trait AsyncBackend {
    /// Why something was not done.
    type Error;
    /// How a range becomes zeroes.
    type ZeroMethod: Copy + std::fmt::Debug;

    /// The disk's shape now.
    fn geometry(&self) -> Geometry;

    /// Why a command ends before it begins, for a reason of this medium alone.
    fn refusal(&self, request: &Request<Self::ZeroMethod>) -> Option<DiskError>;

    /// Read as many bytes as `buf` has from `offset` on.
    fn read(&mut self, token: u64, offset: u64, buf: Buf);

    /// Write the bytes of `buf` at `offset`; with `fua` they are on the medium when it ends.
    fn write(&mut self, token: u64, offset: u64, buf: Buf, fua: bool);

    /// Bring all that was written to the medium.
    fn sync(&mut self, token: u64);

    /// The best way to zero that the medium has not refused.
    fn way(&self, gives_back: bool) -> Self::ZeroMethod;

    /// Bytes that are zeroed this way in one piece.
    fn zero_bytes_max(&self, way: Self::ZeroMethod) -> u64;

    /// Zero a piece, this way.
    fn zero(&mut self, token: u64, way: Self::ZeroMethod, offset: u64, bytes: u64);

    /// The way to try where this one ended so; `None`: there is none, that is the end.
    fn next_way(&self, way: Self::ZeroMethod, error: &Self::Error) -> Option<Self::ZeroMethod>;

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
