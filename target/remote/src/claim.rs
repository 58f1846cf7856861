//! [`Claim`]: registry of the far namespaces that are, or recently were, disks of this process.
//!
//! A removed disk may have left writes that the far target can still execute, but its ledger is dropped. So
//! the same far namespace is not opened again until these writes are over. It is also not opened while a disk
//! at the same address uses it, as the two disks would not share a ledger. At another address the same
//! identity may be another disk: two machines with the same configuration may use the same identifiers.

use std::net::SocketAddr;
use std::sync::{Mutex, MutexGuard, PoisonError};

use spindle_nvme_initiator::Namespace;
use spindle_reactor::clock::{Clock, Nanos};

/// All claims of the process: a short list.
static CLAIMED: Mutex<Vec<Claimed>> = Mutex::new(Vec::new());

#[derive(Debug, Clone)]
struct Claimed {
    /// Name of the disk.
    name: String,
    address: SocketAddr,
    /// The far namespace; its size is ignored.
    namespace: Namespace,
    /// Time at which the claim of a removed disk ends; `None`: the disk is open.
    until: Option<Nanos>,
}

/// A disk's claim on its far namespace. Dropped with the disk and its cores.
#[derive(Debug)]
pub(crate) struct Claim {
    claimed: Claimed,
    /// Time until which the namespace stays claimed after the drop; `None`: the drop releases the claim.
    pub(crate) until: Option<Nanos>,
}

fn lock() -> MutexGuard<'static, Vec<Claimed>> {
    CLAIMED.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Claim {
    /// Claims `namespace` for the disk `name`, with the far target `address`. Removes claims that have ended.
    ///
    /// # Errors
    /// A message that describes the conflicting claim.
    pub(crate) fn new(name: &str, address: SocketAddr, namespace: &Namespace) -> Result<Claim, String> {
        let (mut all, now) = (lock(), Clock::now());
        all.retain(|it| it.until.is_none_or(|until| now < until));
        let is_in_the_way = |it: &&Claimed| {
            it.namespace.is_same_disk(namespace) && (it.until.is_some() || it.address == address)
        };
        if let Some(other) = all.iter().find(is_in_the_way) {
            return Err(match other.until {
                None => format!("remote disk {:?} uses it, or still has commands on it", other.name),
                Some(until) => format!(
                    "removed remote disk {:?} has writes that the far target may execute for {:.0?} more",
                    other.name,
                    (until - now).as_duration()
                ),
            });
        }
        let claimed = Claimed { name: name.to_owned(), address, namespace: *namespace, until: None };
        all.push(claimed.clone());
        Ok(Claim { claimed, until: None })
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        let (mut all, own) = (lock(), &self.claimed);
        let is_own = |it: &Claimed| {
            it.until.is_none() && it.address == own.address && it.namespace.is_same_disk(&own.namespace)
        };
        all.retain(|it| !is_own(it));
        if self.until.is_some() {
            all.push(Claimed { until: self.until, ..own.clone() });
        }
    }
}

#[cfg(test)]
mod tests {
    use nvme_spec::identify::IdentifyNamespace;
    use spindle_nvme_initiator::Identity;

    use super::*;

    fn namespace(nsid: u32, blocks: u64) -> Namespace {
        let mut identify = IdentifyNamespace::default();
        identify.nsze.set(blocks);
        identify.lbaf[0].lbads = 9;
        let identity = Identity { nguid: [0xc1; 16], ..Identity::default() };
        Namespace::new(nsid, &identify, identity).expect("512-byte blocks")
    }

    fn claim(namespace: &Namespace, port: u16) -> Result<Claim, String> {
        Claim::new(&format!("d{port}"), SocketAddr::from(([192, 0, 2, 1], port)), namespace)
    }

    #[test]
    fn a_namespace_is_claimed_once_whatever_its_size_and_again_when_it_is_given_back() {
        let first = claim(&namespace(1, 10), 1).expect("it is free");
        let refused = claim(&namespace(1, 20), 1).expect_err("it is claimed");
        assert!(refused.starts_with("remote disk \"d1\" uses it"), "{refused}");
        let _other = claim(&namespace(2, 10), 1).expect("it is free");
        let _elsewhere = claim(&namespace(1, 10), 2).expect("it may be another disk");
        drop(first);
        claim(&namespace(1, 20), 1).expect("it is free again");
    }

    #[test]
    fn a_dropped_claim_with_writes_left_holds_at_every_address_until_they_are_over() {
        let mut first = claim(&namespace(3, 10), 1).expect("it is free");
        first.until = Some(Clock::now() + Nanos::from_secs(1000));
        drop(first);
        for port in [1, 2] {
            let refused = claim(&namespace(3, 10), port).expect_err("it is kept");
            assert!(
                refused.contains("has writes that the far target may execute for 1000s more"),
                "{refused}"
            );
        }
        let mut second = claim(&namespace(4, 10), 1).expect("it is free");
        second.until = Some(Clock::now());
        drop(second);
        claim(&namespace(4, 10), 1).expect("they are over");
    }
}
