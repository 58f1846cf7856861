//! The protection domain of each far target.
//!
//! A far target is given remote keys of this process's memory, also of buffers and cache frames that it may
//! write to. In a domain of their own these keys are valid on the queue pairs to this far target only: not on
//! those of hosts, if the process is a target too, and not on those to other far targets.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use spindle_rdma::{Device, Domain, VerbsError};

/// Address of a far target's NVMe port, and its domain on one device.
static DOMAINS: Mutex<Vec<(SocketAddr, Weak<Domain>)>> = Mutex::new(Vec::new());

/// Returns the domain of the far target at `far` on `device`. It is freed after the last queue pair and
/// registration.
pub fn domain_of(device: &Arc<Device>, far: SocketAddr) -> Result<Arc<Domain>, VerbsError> {
    let mut known = DOMAINS.lock().unwrap_or_else(PoisonError::into_inner);
    known.retain(|(_, domain)| domain.strong_count() > 0);
    let is_of = |domain: &Arc<Domain>| Arc::ptr_eq(domain.device(), device);
    let mut of_far = known.iter().filter(|(address, _)| *address == far);
    if let Some(domain) = of_far.find_map(|(_, domain)| domain.upgrade().filter(is_of)) {
        return Ok(domain);
    }
    let domain = Arc::new(Domain::new(device)?);
    known.push((far, Arc::downgrade(&domain)));
    Ok(domain)
}
