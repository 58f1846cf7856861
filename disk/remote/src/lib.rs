//! A disk that is a namespace of another target: the initiator as a [`Disk`], over TCP or RDMA.
//!
//! ```text
//!   manager thread   Controller: connect, Identify, keep alive ── Association ──┐ (and again after a loss)
//!                                                                               v
//!   each core        submit ──> waiting ──> I/O queue of its own ──> Done   Opening, stepped by Disk::poll
//!                                  ^             │ lost
//!                                  └─────────────┘ sent again over the next one; the ledger has its blocks
//! ```
//!
//! A core never waits: what takes time (connecting the controller, asking what the namespace is) is the
//! manager's, and a core connects its own queue in steps. A loss of any connection ends the association, as
//! the kernel's host does.
//!
//! Acknowledged here is acknowledged there; Flush and FUA are passed on. What happens to writes without an
//! answer is promised in `docs/guarantees.md`, and kept by three rules:
//!
//! - Nothing is sent over an association before every core has left the one before (`ledger.rs`).
//! - A lost write is sent again. No newer command of its blocks is sent before it is answered, and no newer
//!   write before the lost association is over: the far target says so (a Spindle, asked by End Former
//!   Associations), or some time has passed.
//! - A command that is not answered within `command_timeout` fails in a way that hosts may repeat. If it is a
//!   write that the far target has still, its blocks take no other write meanwhile.
//!
//! A namespace that is another disk is not used: this is checked when an association begins, and whenever the
//! far target tells of changed namespaces, before the next command.
//!
//! What it does not do: no multipath, no authentication. Compare-and-write is not passed on, so
//! hosts of this disk are not offered it.
//!
//! Limits: one association for each disk, one I/O queue a core; a command longer than the far target's MDTS
//! goes in pieces, each copied once, four in flight on a core.

#![forbid(unsafe_code)]

mod claim;
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
use spindle_disk::{CoreContext, Disk, DiskSource, Geometry, OpenError, ResizeError};
use spindle_initiator::{Association, Clock, Identity, Target};

use crate::claim::Claim;
use crate::core::RemoteCore;
use crate::shared::Shared;

pub use far::{Far, FarCompletion, FarQueue};
pub use shared::{Control, Shape};

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
    /// A command that is not answered in this time, counted from its submission across reconnects, fails.
    pub command_timeout: Duration,
    /// After twice the keep-alive time-out and this, a far target that is no Spindle has ended what it had of
    /// a lost association.
    pub quiesce: Duration,
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
    /// By what it is known after a reconnect.
    pub identity: Identity,
}

/// A namespace of another target, shared by all cores. See the module.
pub struct RemoteDisk<F: Far = Association> {
    shared: Arc<Users<F>>,
    facts: RemoteFacts,
}

/// The disk and its cores: when the last of them goes, the manager ends. Commands of a disk that was removed
/// end by themselves, and need the association until then.
struct Users<F: Far> {
    shared: Arc<Shared<F>>,
    /// `None`: the associations are the caller's, who knows what they lead to.
    claim: Option<Claim>,
}

impl<F: Far> Deref for Users<F> {
    type Target = Shared<F>;

    fn deref(&self) -> &Shared<F> {
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
    /// Connect, and see what the namespace is. Waits; not on a core.
    ///
    /// # Errors
    /// [`OpenError::System`] where the target cannot be reached or refuses, [`OpenError::Setting`] where its
    /// namespace cannot be a disk.
    pub fn new(name: &str, spec: &RemoteSpec) -> Result<Arc<RemoteDisk>, OpenError> {
        let (shared, claim, facts) = manager::open(name, spec)?;
        Ok(Arc::new(RemoteDisk { shared: Arc::new(Users { shared, claim: Some(claim) }), facts }))
    }
}

impl<F: Far> RemoteDisk<F> {
    /// With associations of another kind, which the caller makes and tells [`Control`] of. `abilities`: ONCS.
    #[must_use]
    pub fn with_far(
        name: &str,
        spec: &RemoteSpec,
        facts: RemoteFacts,
        shape: Shape,
        abilities: Oncs,
    ) -> (Arc<RemoteDisk<F>>, Control<F>) {
        let shared = Arc::new(Shared::new(name, spec, abilities, shape, None));
        let disk = RemoteDisk { shared: Arc::new(Users { shared: Arc::clone(&shared), claim: None }), facts };
        (Arc::new(disk), Control(shared))
    }

    /// What it turned out to be.
    #[must_use]
    pub fn facts(&self) -> &RemoteFacts {
        &self.facts
    }
}

impl<F: Far> DiskSource for RemoteDisk<F> {
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

    fn open(&self, context: &CoreContext) -> Result<Box<dyn Disk>, OpenError> {
        Ok(Box::new(RemoteCore::new(Arc::clone(&self.shared), context)?))
    }

    /// The size is the far target's to change.
    fn prepare_resize(&self, bytes: u64) -> Result<(), ResizeError> {
        ResizeError::unless_same(self, bytes, "the far target's namespace")
    }

    fn resize(&self, bytes: u64) -> Result<(), ResizeError> {
        self.prepare_resize(bytes)
    }

    /// It is asked by Dataset Management, which is a hint.
    fn deallocated_is_zero(&self) -> bool {
        false
    }

    fn medium_ids(&self) -> Vec<String> {
        self.facts.medium_ids.clone()
    }

    fn identity_seed(&self) -> Option<String> {
        Some(seed(&self.facts.identity, self.shared.spec.nsid))
    }
}

/// What tells a far namespace from every other one, as text: the identity that hosts of a remote disk see is
/// derived from it, so it may never change for one and the same namespace. The NSID counts where nothing but
/// the serial number tells the namespaces of a subsystem from each other.
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
