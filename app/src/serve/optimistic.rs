//! Optimistic reads: the service of `nvme/optimistic` with this target's controllers and configuration.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use nvme_spec::optimistic::Attachment;
use spindle_nvme_optimistic::service::{self, Grants, Hooks, Service, TOKEN_TTL};
use spindle_nvme_rdma::shell::KnownDevices;
use spindle_nvme_transport::TransportKind;
use spindle_reactor::mem::SealedFrames;
use spindle_target::shared::{ControllerShared, OptimisticService};
use spindle_target::snapshot::{Snapshot, Subsystem};

use super::ServeError;
use super::view::View;
use crate::config::Plan;

/// Whose connection it is: a controller and one of its namespaces.
pub struct Owner {
    controller: Arc<ControllerShared>,
    /// [`ControllerShared::resets`] at the Attach.
    resets: u32,
    nsid: u32,
    /// The connection is counted at its controller.
    is_connected: bool,
}

impl service::Owner for Owner {
    fn controller(&self) -> usize {
        Arc::as_ptr(&self.controller).addr()
    }

    fn on_connected(&mut self) {
        if !std::mem::replace(&mut self.is_connected, true) {
            self.controller.optimistic_connections().fetch_add(1, Ordering::Relaxed);
        }
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        if self.is_connected {
            self.controller.optimistic_connections().fetch_sub(1, Ordering::Relaxed);
        }
    }
}

/// Issues tokens on the reactor cores.
struct Issuer {
    grants: Arc<Grants<Owner>>,
    port: u16,
}

impl OptimisticService for Issuer {
    fn attach(
        &self,
        controller: &Arc<ControllerShared>,
        nsid: u32,
        frames: Arc<dyn SealedFrames>,
    ) -> Option<Attachment> {
        let (controller, resets) = (Arc::clone(controller), controller.resets());
        let owner = Owner { controller, resets, nsid, is_connected: false };
        let token = self.grants.issue(owner, frames)?;
        let ttl_ms = u32::try_from(TOKEN_TTL.as_millis()).unwrap_or(u32::MAX);
        Some(Attachment::new(self.port, ttl_ms, token))
    }
}

/// Starts the service if `rdma.optimistic_port` is set and there is an RDMA listener.
///
/// # Errors
/// [`ServeError::Start`] when its thread cannot be started.
pub fn start(
    plan: &Plan,
    devices: KnownDevices,
    view: &Arc<View>,
) -> Result<Option<Service<Owner>>, ServeError> {
    let addresses = addresses(plan);
    if addresses.is_empty() {
        return Ok(None);
    }
    let its_view = Arc::clone(view);
    let hooks = Hooks {
        device_of: Box::new(move |id| devices.device_of(id)),
        is_valid: Box::new(move |owner: &Owner, frames| is_valid(&its_view, owner, frames)),
    };
    let failed = |error| ServeError::Start(format!("cannot start the service for optimistic reads: {error}"));
    let service = Service::start(addresses, hooks).map_err(failed)?;
    let issuer = Issuer { grants: Arc::clone(&service.grants), port: service.port() };
    view.registry.set_optimistic(Box::new(issuer));
    Ok(Some(service))
}

/// Returns the addresses of the RDMA listeners with the port of the service; empty without such a port.
pub fn addresses(plan: &Plan) -> Vec<SocketAddr> {
    let mut addresses = Vec::new();
    for listener in plan.listeners.iter().filter(|it| it.transport == TransportKind::Rdma) {
        let address = SocketAddr::new(listener.address.ip(), plan.optimistic_port);
        if plan.optimistic_port != 0 && !addresses.contains(&address) {
            addresses.push(address);
        }
    }
    addresses
}

/// Breaks the seals of each disk of `former` under whose NSID `next` has another disk or none, and of all
/// disks of a subsystem that a host may not read any more. A client whose connection was not ended accepts
/// nothing that it reads from now on. Such a disk has no seals until the next start.
pub fn close_revoked(former: &Snapshot, next: &Snapshot) {
    for subsystem in &former.subsystems {
        let has_all_hosts = |after: &&Arc<Subsystem>| {
            after.hosts.includes(&subsystem.hosts)
                && after.optimistic_hosts.includes(&subsystem.optimistic_hosts)
        };
        let after = next.subsystem(&subsystem.nqn).filter(has_all_hosts);
        for namespace in subsystem.active() {
            let Some(frames) = namespace.source.sealed_frames() else { continue };
            let now = after.and_then(|after| after.namespace(namespace.nsid)?.source.sealed_frames());
            if !now.is_some_and(|now| Arc::ptr_eq(&now, &frames)) {
                frames.close();
            }
        }
    }
}

/// Returns true while the controller is enabled, its host is allowed, and its namespace has this cache.
fn is_valid(view: &View, owner: &Owner, frames: &Arc<dyn SealedFrames>) -> bool {
    let Owner { controller, resets, nsid, .. } = owner;
    let look = view.look();
    let Some(snapshot) = &look.snapshot else { return false };
    let Some(subsystem) = snapshot.subsystem(&controller.subsystem_nqn) else { return false };
    let has_cache = subsystem
        .namespace(*nsid)
        .and_then(|namespace| namespace.source.sealed_frames())
        .is_some_and(|now| Arc::ptr_eq(&now, frames));
    let is_same = controller.is_ready() && controller.resets() == *resets;
    has_cache && is_same && subsystem.allows_optimistic(&controller.host_nqn)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Config, LocalDrives};

    /// Disks `a`, `b` and `c`, the first ones under NSID 1 and 2.
    fn snapshot(previous: Option<&Snapshot>, disks: &[&str]) -> Arc<Snapshot> {
        snapshot_for(previous, disks, "allow_any_host = true")
    }

    fn snapshot_for(previous: Option<&Snapshot>, disks: &[&str], hosts: &str) -> Arc<Snapshot> {
        let disk = |name| format!("[[disk]]\nname = \"{name}\"\nkind = \"ram\"\nsize = \"1MiB\"\n");
        let namespace = |(nsid, name)| format!("[[subsystem.namespace]]\nnsid = {nsid}\ndisk = \"{name}\"\n");
        let config = Config::of(&format!(
            "[rdma]\noptimistic_port = 4430\n{}[[listener]]\naddress = \"127.0.0.1:4420\"\n\
             transport = \"rdma\"\n[[subsystem]]\nnqn = \"nqn.2026-01.test:served\"\n\
             {hosts}\n{}",
            ["a", "b", "c"].map(disk).concat(),
            (1..).zip(disks).map(namespace).collect::<String>(),
        ));
        config.plan().snapshot(previous, &LocalDrives, &[]).expect("opened")
    }

    #[test]
    fn seals_of_disks_that_leave_their_nsid_are_closed_and_others_stay() {
        let former = snapshot(None, &["a", "b"]);
        let frames = |disk: usize| former.disks[disk].as_ref()?.sealed_frames();
        let is_open = |disk: usize| frames(disk).is_some_and(|frames| frames.is_open());
        let next = snapshot(Some(&former), &["a", "c"]);
        close_revoked(&former, &next);
        assert_eq!([0, 1, 2].map(is_open), [true, false, true]);
        close_revoked(&former, &snapshot(Some(&former), &["c"]));
        assert_eq!([0, 1, 2].map(is_open), [false, false, true]);
    }

    #[test]
    fn seals_of_a_subsystem_that_a_host_may_not_read_any_more_are_closed() {
        let hosts = |hosts: &[&str]| {
            let list: Vec<_> = hosts.iter().map(|host| format!("\"nqn.2026-01.test:{host}\"")).collect();
            format!("hosts = [{}]", list.join(", "))
        };
        let any = "allow_any_host = true".to_owned();
        for (before, after, is_open) in [
            (hosts(&["a"]), hosts(&["a", "b"]), true),
            (hosts(&["a"]), any.clone(), true),
            (hosts(&["a", "b"]), hosts(&["b"]), false),
            (any, hosts(&["a", "b"]), false),
        ] {
            let former = snapshot_for(None, &["a"], &before);
            close_revoked(&former, &snapshot_for(Some(&former), &["a"], &after));
            let frames = former.disks[0].as_ref().and_then(|disk| disk.sealed_frames());
            assert_eq!(frames.expect("seals").is_open(), is_open, "{before} then {after}");
        }
    }
}
