//! [`OptimisticOpening`]: attaches an I/O queue, in steps that do not block, while the queue is in use.
//!
//! ```text
//!   thread of the controller    begin_attach ─> poll ─> take_grant ── OptimisticGrant ──┐
//!                                                                                       v
//!   thread of the queue                             begin ─> step (poll the queue meanwhile) ─> attached
//! ```

use std::net::SocketAddr;
use std::time::Duration;

use nvme_spec::optimistic::Token;
use spindle_nvme_rdma::registration::Limits as RegistrationLimits;
use spindle_reactor::clock::{Clock, Nanos};

use super::connect::{Attempt, Handshake};
use super::directory::Directory;
use super::reader::seal_bytes;
use super::{Attached, NamespacePages, OptimisticOptions, READ_PAGES_MAX};
use crate::error::Error;
use crate::queue::IoQueue;

/// What one optimistic connection needs: address, token and an empty directory. The directory is allocated
/// here, because the thread of a queue must not wait for so much memory.
pub struct OptimisticGrant {
    pub(crate) address: SocketAddr,
    /// Address of the target's NVMe port.
    pub(crate) far: SocketAddr,
    pub(crate) token: Token,
    pub(crate) namespace: NamespacePages,
    pub(crate) connect_timeout: Duration,
    pub(crate) registration: RegistrationLimits,
    pub(crate) silence_max: Nanos,
}

impl OptimisticOptions {
    /// Returns the bytes of memory of one attached queue of `depth` commands: directory, seals, and what is
    /// expected of the pages in flight.
    #[must_use]
    pub fn queue_bytes(&self, depth: u16) -> usize {
        let slots = usize::from(depth);
        Directory::bytes(self.directory_pages) + seal_bytes(slots) + slots * READ_PAGES_MAX * 16
    }
}

/// A connection attempt to the target's optimistic service. Its drop before the end closes the connection.
pub struct OptimisticOpening {
    handshake: Handshake,
    /// `None` after the queue was attached.
    attempt: Option<(Attempt, OptimisticGrant)>,
}

impl OptimisticOpening {
    /// Begins to connect for `queue`, at `now`.
    ///
    /// # Errors
    /// [`Error::NoRdma`], [`Error::Rdma`]: see [`Controller::attach`](crate::Controller::attach).
    pub fn begin(grant: OptimisticGrant, queue: &IoQueue, now: Nanos) -> Result<OptimisticOpening, Error> {
        let OptimisticGrant { address, far, token, connect_timeout, .. } = grant;
        let attempt = Attempt::begin(address, far, token, queue.depth(), connect_timeout)?;
        let handshake = Handshake::new(address, connect_timeout, now);
        Ok(OptimisticOpening { handshake, attempt: Some((attempt, grant)) })
    }

    /// Advances without blocking. `queue` is that of [`OptimisticOpening::begin`]. Returns true once it is
    /// attached. Must not be called afterwards or after an error; the queue stays as it was then.
    ///
    /// # Errors
    /// See [`Controller::attach`](crate::Controller::attach).
    pub fn step(&mut self, queue: &mut IoQueue, now: Nanos) -> Result<bool, Error> {
        let Some((attempt, _)) = &mut self.attempt else { return Ok(false) };
        let Some(accept) = self.handshake.step(attempt, now)? else { return Ok(false) };
        let Some((attempt, grant)) = self.attempt.take() else { return Ok(false) };
        let reader = attempt.into_reader(accept, grant.registration, grant.silence_max)?;
        queue.qpair.attach(Attached::new(reader, grant.namespace, queue.depth())?, now);
        Ok(true)
    }

    /// Runs all steps and sleeps between them.
    pub(crate) fn finish(mut self, queue: &mut IoQueue) -> Result<(), Error> {
        loop {
            let now = Clock::now();
            if self.step(queue, now)? {
                return Ok(());
            }
            if let Some((attempt, _)) = &self.attempt {
                let deadline = self.handshake.deadline();
                attempt.wait_io(if deadline > now { (deadline - now).as_duration() } else { Duration::ZERO });
            }
        }
    }
}
