//! A disk on a namespace of another NVMe-oF target, accessed with the initiator library over TCP or RDMA.
//!
//! ```text
//!   manager thread   Controller: connect, Identify, keep alive ── Association ──┐ (and again after a loss)
//!                                                                               v
//!   each core        submit ──> waiting ──> I/O queue of its own ──> Done   Opening, stepped by poll
//!                                  ^             │ lost
//!                                  └─────────────┘ sent again over the next queue; ledger: its blocks
//! ```
//!
//! A core never blocks. The manager connects the controller and identifies the namespace; a core connects its
//! own queue in steps. The loss of any connection ends the association, as in the kernel's host.
//!
//! A command is acknowledged after the far target has acknowledged it; Flush and FUA are passed on.
//! `docs/guarantees.md` contains the guarantees for writes without an answer. Three rules implement them:
//!
//! - No command is sent over an association until no core has a queue of the previous one (`ledger.rs`).
//! - A lost write is sent again. Newer commands to its blocks wait for its answer. Newer writes also wait
//!   until the lost association is over: the far target confirms it (a Spindle target, by End Former
//!   Associations), or the fence timeout has passed.
//! - A command that is not answered within `command_timeout` fails with an error that hosts may retry. After
//!   such a write, other writes to its blocks wait for its answer or the association's end.
//!
//! The identity of the namespace is checked when an association begins, and after each Namespace Attribute
//! Changed event before the next command. A namespace that is another disk is not used.
//!
//! **Optimistic reads**, where configured: each core attaches its queue to the far target's cache
//! (`attach.rs`). Such a read is submitted, held and counted as every other command of the queue; what it
//! returns is the newest content of the page, also beside lost writes. One that is rejected is sent by the
//! queue as an ordinary read, like a command that was in flight already.
//!
//! **Coherent caches**, where configured: the manager joins the far target's cluster (`cluster.rs`), and a
//! core registers what a cache in front of the disk keeps ([`Agent`]).
//!
//! Not supported: multipath, authentication, and compare-and-write, which hosts are not offered.
//!
//! Limits: one association per disk, one I/O queue per core. A command with more data than the far target's
//! MDTS, or over RDMA in too many segments, is split. Each part has at most 128 KiB and is copied once; at
//! most four parts of a core are in flight.

#![forbid(unsafe_code)]

mod attach;
mod claim;
mod cluster;
mod core;
mod far;
mod ledger;
mod manager;
mod request;
mod shared;
#[cfg(test)]
mod tests;

use std::fmt::Write as _;
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use nvme_spec::identify::Oncs;
use spindle_nvme_initiator::{Association, Clock, Identity, OptimisticOptions, Target};
use spindle_target_card::Agent;
use spindle_target_disk::{
    ChannelContext, Disk, DiskChannel, Geometry, OpenError, OptimisticReads, ResizeError,
};

use crate::claim::Claim;
use crate::core::RemoteChannel;
use crate::shared::RemoteShared;

pub use far::{Far, FarCompletion, FarQueue};
pub use shared::{Control, Shape};

/// Settings of a remote disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RemoteSpec {
    /// Transport, address, subsystem and host identity.
    pub target: Target,
    /// NSID of the namespace at the far target.
    pub nsid: u32,
    /// Number of cores that open the disk: one I/O queue is requested for each.
    pub cores: u16,
    /// Most outstanding commands of a core at the far target.
    pub depth: u16,
    /// Time limit of a command, counted from its submission and across reconnects.
    pub command_timeout: Duration,
    /// Part of the fence timeout. A lost association is over at the latest after twice the keep-alive timeout
    /// plus this time; for a Spindle target 40 s later.
    pub quiesce: Duration,
    /// Pages of the far target's cache are read by RDMA READ where it has that; `None`: they are not.
    pub optimistic: Option<OptimisticOptions>,
    /// The cache in front of the disk is one of several that the far target keeps coherent
    /// (`docs/extensions.md`, "Coherent caches").
    pub is_clustered: bool,
}

/// Properties of the far namespace and its controller at the first connect.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RemoteFacts {
    /// Model number (MN) of the far controller.
    pub model: String,
    /// Serial number (SN) of the far controller.
    pub serial: String,
    /// MDTS in bytes; `u32::MAX` where the controller reports no limit.
    pub transfer_bytes_max: u32,
    /// Identifiers of the namespace, the most reliable first: see [`spindle_target_disk::medium_id`].
    pub medium_ids: Vec<String>,
    /// Identifiers that must be unchanged after a reconnect.
    pub identity: Identity,
}

/// A disk on a far namespace, shared by all cores.
pub struct RemoteDisk<F: Far = Association> {
    shared: Arc<Users<F>>,
    facts: RemoteFacts,
}

/// State shared by the disk and its cores. It is dropped with the last of them, which stops the manager:
/// commands in flight of a removed disk need the association until they end.
struct Users<F: Far> {
    shared: Arc<RemoteShared<F>>,
    /// `None`: the caller provides the associations ([`RemoteDisk::with_far`]).
    claim: Option<Claim>,
}

impl<F: Far> Deref for Users<F> {
    type Target = RemoteShared<F>;

    fn deref(&self) -> &RemoteShared<F> {
        &self.shared
    }
}

impl<F: Far> Drop for Users<F> {
    fn drop(&mut self) {
        self.is_stopped.store(true, Ordering::Release);
        self.wake_manager();
        if let Some(claim) = &mut self.claim {
            claim.until = self.shared.over_at(Clock::now());
        }
    }
}

impl RemoteDisk {
    /// Connects and identifies the namespace. Blocks; never call it on a reactor core.
    ///
    /// # Errors
    /// [`OpenError::System`]: the target cannot be reached or refuses the connection, another disk of the
    /// process has claimed the namespace, or a thread cannot be started. [`OpenError::Setting`]: the
    /// namespace is not usable as a disk.
    pub fn new(name: &str, spec: &RemoteSpec) -> Result<Arc<RemoteDisk>, OpenError> {
        let (shared, claim, facts) = manager::open(name, spec)?;
        Ok(Arc::new(RemoteDisk { shared: Arc::new(Users { shared, claim: Some(claim) }), facts }))
    }
}

impl<F: Far> RemoteDisk<F> {
    /// Creates a disk without a manager thread. The caller (the simulator, tests) makes the associations `F`
    /// and reports them through the returned [`Control`]. `abilities`: ONCS of the far controller. `agent`:
    /// of a clustered disk; the caller has its session.
    #[must_use]
    pub fn with_far(
        name: &str,
        spec: &RemoteSpec,
        facts: RemoteFacts,
        shape: Shape,
        (abilities, agent): (Oncs, Option<Arc<Agent>>),
    ) -> (Arc<RemoteDisk<F>>, Control<F>) {
        let shared = Arc::new(RemoteShared::new(name, spec, abilities, shape, (None, agent)));
        let disk = RemoteDisk { shared: Arc::new(Users { shared: Arc::clone(&shared), claim: None }), facts };
        (Arc::new(disk), Control(shared))
    }

    /// Returns the properties of the namespace at the first connect.
    #[must_use]
    pub fn facts(&self) -> &RemoteFacts {
        &self.facts
    }
}

impl<F: Far> Disk for RemoteDisk<F> {
    fn name(&self) -> &str {
        &self.shared.name
    }

    fn kind(&self) -> &'static str {
        "remote"
    }

    fn geometry(&self) -> Geometry {
        self.shared.view().shape.geometry
    }

    fn on_foreign_change(&self, act: Box<dyn Fn() + Send + Sync>) {
        self.shared.on_foreign_change(act);
    }

    fn open(&self, context: &ChannelContext) -> Result<Box<dyn DiskChannel>, OpenError> {
        Ok(Box::new(RemoteChannel::new(Arc::clone(&self.shared), context)?))
    }

    /// Refuses every size except the current one: only the far target can change the size.
    fn prepare_resize(&self, bytes: u64) -> Result<(), ResizeError> {
        ResizeError::unless_same(self, bytes, "the far target's namespace")
    }

    fn resize(&self, bytes: u64) -> Result<(), ResizeError> {
        self.prepare_resize(bytes)
    }

    /// Returns false: Deallocate is sent as Dataset Management, which is a hint.
    fn deallocated_is_zero(&self) -> bool {
        false
    }

    fn optimistic_reads(&self) -> Option<OptimisticReads> {
        self.shared.optimistic_reads()
    }

    fn agent(&self) -> Option<Arc<Agent>> {
        self.shared.agent.clone()
    }

    fn medium_ids(&self) -> Vec<String> {
        self.facts.medium_ids.clone()
    }

    fn identity_seed(&self) -> Option<String> {
        Some(seed(&self.facts.identity, self.shared.spec.nsid))
    }
}

/// Returns a text that is unique to the far namespace. The identity that hosts of the remote disk see is
/// derived from this text, so it must never change for a namespace. Includes the NSID if only the serial
/// number identifies the namespace.
fn seed(identity: &Identity, nsid: u32) -> String {
    let Identity { nguid, eui64, uuid, serial } = identity;
    let mut text = String::new();
    for part in [&nguid[..], eui64, uuid, serial] {
        part.iter().for_each(|byte| {
            let _ = write!(text, "{byte:02x}");
        });
        text.push(' ');
    }
    if (nguid, eui64, uuid) == (&[0; 16], &[0; 8], &[0; 16]) {
        let _ = write!(text, "{nsid}");
    }
    text
}
