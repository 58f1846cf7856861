//! A disk on an NVMe namespace of the kernel's driver, through the namespace's generic device (`/dev/ng0n1`).
//!
//! NVMe commands are sent to the drive by io_uring passthrough, without the kernel's block layer. If the
//! driver has poll queues, and with Linux 6.1 or later, completions are polled, without interrupts.
//!
//! ```text
//!   BackendChannel ── read, write, sync, zero ──> NgBackend ── pieces for the drive ──> PassRing ──> drive
//!                                                ^  │                                 │
//!                                                └──┴─ next piece, or the same again ─┘
//! ```
//!
//! Durability: after a flush, or a write or zeroing with FUA, the bytes survive a power loss if the drive
//! honours Flush and FUA.
//!
//! Not supported: metadata, zoned namespaces. A writable disk opens the namespace's block device exclusively,
//! so the namespace cannot be mounted or served twice. Another process may still use the generic device.
//!
//! Limits: 1024 requests of a core at the drive, further requests are queued; 256 cores. The pieces of a
//! large transfer are executed one after another.

mod backend;
mod open;
mod place;
#[cfg(test)]
mod tests;

use std::fs::File;
use std::path::PathBuf;
use std::sync::Arc;

use spindle_reactor::uring::PassRing;
use spindle_reactor::uring::admin::Namespace;

use crate::backend::guard::{CORES_MAX, Guard};
use crate::backend::{BackendChannel, ZeroMethods, requests_of};
use crate::{ChannelContext, Disk, DiskChannel, Geometry, OpenError, ResizeError};

pub use open::{NgFacts, NgSpec};
pub use place::{NgBlockDevice, look_at};

use backend::NgBackend;
use open::Limits;

/// A disk on a namespace, shared by all cores. See the module.
pub struct NgDisk {
    name: String,
    path: PathBuf,
    device: File,
    namespace: Namespace,
    facts: NgFacts,
    shared: Arc<NgShared>,
}

struct NgShared {
    limits: Limits,
    zero_methods: ZeroMethods,
    guard: Arc<Guard>,
    /// The namespace's block device, open exclusively until the disk and all its core handles are dropped.
    /// `None` for a read-only disk.
    _block_device: Option<File>,
}

impl NgShared {
    fn new(limits: Limits, block_device: Option<File>) -> NgShared {
        NgShared {
            limits,
            zero_methods: ZeroMethods::new(limits.can_deallocate, limits.zero_bytes_max > 0),
            guard: Guard::new(CORES_MAX),
            _block_device: block_device,
        }
    }

    fn geometry(&self) -> Geometry {
        Geometry {
            block_bytes: self.limits.block_bytes,
            block_count: self.limits.block_count,
            is_read_only: self.limits.is_read_only,
            has_volatile_cache: self.limits.has_volatile_cache,
            can_deallocate: self.zero_methods.can_release(),
            atomic_blocks: 1,
            can_compare_and_write: !self.limits.is_read_only,
        }
    }
}

impl NgDisk {
    /// Opens and locks a namespace. The lock lasts until the disk and all its core handles are dropped. Fails
    /// with the [`OpenError`] of a setting or system call.
    pub fn new(name: &str, spec: &NgSpec) -> Result<Arc<NgDisk>, OpenError> {
        // No core could serve the disk.
        let system =
            |error| OpenError::system(name, format!("set up io_uring for {}", spec.path.display()), error);
        spindle_reactor::uring::probe().map_err(system)?;
        let opened = open::open(name, spec)?;
        Ok(Arc::new(NgDisk {
            name: name.to_owned(),
            path: spec.path.clone(),
            device: opened.device,
            namespace: opened.namespace,
            facts: opened.facts,
            shared: Arc::new(NgShared::new(opened.limits, opened.block_device)),
        }))
    }

    /// Returns the properties of the namespace and its drive.
    #[must_use]
    pub fn facts(&self) -> &NgFacts {
        &self.facts
    }
}

impl Disk for NgDisk {
    fn name(&self) -> &str {
        &self.name
    }

    fn kind(&self) -> &'static str {
        "ng"
    }

    fn geometry(&self) -> Geometry {
        self.shared.geometry()
    }

    fn open(&self, context: &ChannelContext) -> Result<Box<dyn DiskChannel>, OpenError> {
        let shared = &self.shared;
        let system = |verb: &str| {
            let verb = format!("{verb} {}", self.path.display());
            |source: std::io::Error| OpenError::system(&self.name, verb, source)
        };
        let device = self.device.try_clone().map_err(system("duplicate the descriptor of"))?;
        // The additional entry is for the compare-and-write.
        let entries = requests_of(context) + 1;
        let is_polled = shared.limits.is_polled;
        let ring = PassRing::new(entries, &context.pool, device.into(), &self.namespace, is_polled)
            .map_err(system("set up io_uring for"))?;
        let medium = NgBackend::new(ring, Arc::clone(shared), entries);
        Ok(Box::new(BackendChannel::new(&self.name, medium, &shared.guard, context)?))
    }

    /// Refuses a change of the size, which the drive determines.
    fn prepare_resize(&self, bytes: u64) -> Result<(), ResizeError> {
        ResizeError::unless_same(self, bytes, "the drive's namespace")
    }

    fn resize(&self, bytes: u64) -> Result<(), ResizeError> {
        self.prepare_resize(bytes)
    }

    fn medium_ids(&self) -> Vec<String> {
        self.facts.medium_ids.clone()
    }
}
