//! A disk that is a namespace of another target: the initiator as a [`Disk`], over TCP or RDMA.
//!
//! ```text
//!   manager thread   Controller: connect, Identify, keep alive ── Association ──┐ (and again after a loss)
//!                                                                               v
//!   each core        submit ──> waiting ──> IoQueue of its own ──> Done    Opening, stepped by Disk::poll
//!                                  ^             │ lost
//!                                  └─────────────┘ sent again over the next one, in their order
//! ```
//!
//! A core never waits: what takes time (connecting the controller, asking what the namespace is) is the
//! manager's, and a core connects its own queue in steps. A loss of any connection ends the association, as
//! the kernel's host does, so that the far target ends whatever it still had of it before it answers the next
//! Connect.
//!
//! What survives what is the far target's to say: acknowledged here is acknowledged there, flush and FUA are
//! passed on. While the far target is away commands wait for [`PATIENCE`], then they fail in a way that the
//! host may repeat. A namespace that comes back as another disk is not used. The same holds while the far
//! target is up: when it tells that namespaces have changed, new commands wait until the manager has checked
//! that it is the same disk.
//!
//! What it does not do: no multipath, no cache, no authentication. A namespace that grows is as large as it
//! was when it was opened. Compare-and-write is not passed on, so hosts of this disk are not offered it.
//!
//! Limits: one association for each disk, one I/O queue a core; a command longer than the far target's MDTS
//! goes in pieces, each copied once, four in flight on a core.

#![forbid(unsafe_code)]

mod core;
mod manager;
mod request;
mod status;

use std::ops::Deref;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::Thread;

use nvme_spec::identify::Oncs;
use spindle_disk::{CoreContext, Disk, DiskSource, Geometry, OpenError, ResizeError, Usage};
use spindle_initiator::{Association, Namespace, Target};
use spindle_reactor::clock::Nanos;

use crate::core::RemoteCore;

/// How long commands wait for a far target that is away, before they fail.
pub const PATIENCE: Nanos = Nanos::from_secs(10);

/// Which namespace, and by whom.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RemoteSpec {
    /// The subsystem, and as which host.
    pub target: Target,
    /// NSID.
    pub nsid: u32,
    /// Cores that will open it: as many I/O queues are asked for.
    pub cores: u16,
    /// Most commands of a core with the far target at once.
    pub depth: u16,
}

/// What the far target said of the namespace when it was opened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RemoteFacts {
    /// MN.
    pub model: String,
    /// SN.
    pub serial: String,
    /// Most bytes of one command; `u32::MAX` where it names no limit.
    pub transfer_bytes_max: u32,
    /// By what the namespace is known, the best first.
    pub medium_ids: Vec<String>,
}

/// A namespace of another target, shared by all cores. See the module.
pub struct RemoteDisk {
    shared: Arc<Users>,
    facts: RemoteFacts,
}

/// What manager and cores have in common.
struct Shared {
    name: String,
    spec: RemoteSpec,
    namespace: Namespace,
    geometry: Geometry,
    /// What the namespace can do of what is optional.
    abilities: Oncs,
    /// Number of the association that is up; 0: none is.
    current: AtomicU64,
    association: Mutex<Option<Arc<Association>>>,
    /// The newest association of which a core has lost its queue.
    lost: AtomicU64,
    /// The association that told of changed namespaces, until the manager has seen that this one is the same
    /// disk; 0: none. Cores send nothing over it. Not cleared if it is another disk: the next association has
    /// another number.
    unverified: AtomicU64,
    is_stopped: AtomicBool,
    manager: Mutex<Option<Thread>>,
}

impl Shared {
    /// The association that is up, with its number.
    fn association(&self) -> Option<(u64, Arc<Association>)> {
        if self.current.load(Ordering::Relaxed) == 0 {
            return None; // as cores ask, turn after turn, while it is away
        }
        let association = self.association.lock().unwrap_or_else(PoisonError::into_inner);
        let number = self.current.load(Ordering::Acquire);
        association.as_ref().filter(|_| number != 0).map(|it| (number, Arc::clone(it)))
    }

    fn set(&self, number: u64, up: Option<Arc<Association>>) {
        let mut association = self.association.lock().unwrap_or_else(PoisonError::into_inner);
        *association = up;
        self.current.store(number, Ordering::Release);
    }

    /// A core's queue of this association is gone, or could not be made.
    fn on_lost(&self, number: u64) {
        if self.lost.fetch_max(number, Ordering::AcqRel) < number {
            self.wake_manager();
        }
    }

    fn wake_manager(&self) {
        if let Some(thread) = &*self.manager.lock().unwrap_or_else(PoisonError::into_inner) {
            thread.unpark();
        }
    }
}

/// The disk and its cores: when the last of them goes, the manager ends. Commands of a disk that was removed
/// end by themselves, and need the association until then.
struct Users(Arc<Shared>);

impl Deref for Users {
    type Target = Shared;

    fn deref(&self) -> &Shared {
        &self.0
    }
}

impl Drop for Users {
    fn drop(&mut self) {
        self.is_stopped.store(true, Ordering::Release);
        self.wake_manager();
    }
}

impl RemoteDisk {
    /// Connect, and see what the namespace is. Waits; not on a core.
    ///
    /// # Errors
    /// [`OpenError::System`] where the target cannot be reached or refuses, [`OpenError::Setting`] where its
    /// namespace cannot be a disk.
    pub fn new(name: &str, spec: &RemoteSpec) -> Result<Arc<RemoteDisk>, OpenError> {
        let (shared, facts) = manager::open(name, spec)?;
        Ok(Arc::new(RemoteDisk { shared: Arc::new(Users(shared)), facts }))
    }

    /// Bytes that each core's handle takes, at most.
    #[must_use]
    pub fn core_bytes() -> usize {
        core::core_bytes()
    }

    /// What it turned out to be.
    #[must_use]
    pub fn facts(&self) -> &RemoteFacts {
        &self.facts
    }
}

impl DiskSource for RemoteDisk {
    fn name(&self) -> &str {
        &self.shared.name
    }

    fn kind(&self) -> &'static str {
        "remote"
    }

    fn geometry(&self) -> Geometry {
        self.shared.geometry
    }

    fn open(&self, context: &CoreContext) -> Result<Box<dyn Disk>, OpenError> {
        Ok(Box::new(RemoteCore::new(Arc::clone(&self.shared), context)?))
    }

    /// The size is the far target's to change.
    fn prepare_resize(&self, bytes: u64) -> Result<(), ResizeError> {
        let has = self.geometry().bytes();
        if bytes == has {
            return Ok(());
        }
        let allowed = format!("the far target's namespace has {has} bytes");
        Err(ResizeError { disk: self.shared.name.clone(), bytes, allowed })
    }

    fn resize(&self, bytes: u64) -> Result<(), ResizeError> {
        self.prepare_resize(bytes)
    }

    fn usage(&self) -> Usage {
        Usage { bytes_used: self.geometry().bytes() }
    }

    /// It is asked by Dataset Management, which is a hint.
    fn deallocated_is_zero(&self) -> bool {
        false
    }

    fn medium_ids(&self) -> Vec<String> {
        self.facts.medium_ids.clone()
    }
}
