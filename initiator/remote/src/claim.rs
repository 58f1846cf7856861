//! [`Claim`]: which far namespaces are disks of this process, or were a moment ago.
//!
//! A disk that is removed may leave writes behind that the far target can still execute, and its ledger goes
//! with it. No other disk of the same far namespace is opened before they are over; nor while there is one,
//! whose ledger the other would not know.

use std::sync::{Mutex, MutexGuard, PoisonError};

use spindle_initiator::Namespace;
use spindle_reactor::clock::{Clock, Nanos};

/// What is claimed. Few: remote disks of one process.
static CLAIMED: Mutex<Vec<Claimed>> = Mutex::new(Vec::new());

struct Claimed {
    /// Its size is not looked at.
    namespace: Namespace,
    /// `None`: by a disk that there is.
    until: Option<Nanos>,
}

/// A disk's claim on its far namespace. It ends when it is dropped.
#[derive(Debug)]
pub(crate) struct Claim {
    namespace: Namespace,
    /// Not before this.
    until: Option<Nanos>,
}

fn lock() -> MutexGuard<'static, Vec<Claimed>> {
    CLAIMED.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Claim {
    /// # Errors
    /// Why it is not to be had now.
    pub(crate) fn new(namespace: &Namespace) -> Result<Claim, String> {
        let (mut claimed, now) = (lock(), Clock::now());
        claimed.retain(|it| it.until.is_none_or(|until| now < until));
        match claimed.iter().find(|it| it.namespace.is_same_disk(namespace)).map(|it| it.until) {
            Some(None) => {
                Err("another remote disk has it, or one that was removed has commands of it".into())
            }
            Some(Some(until)) => Err(format!(
                "a remote disk that was removed has left writes that it may execute for {:.0?} more",
                (until - now).as_duration()
            )),
            None => {
                claimed.push(Claimed { namespace: *namespace, until: None });
                Ok(Claim { namespace: *namespace, until: None })
            }
        }
    }

    /// Have it end at `until` at the earliest.
    pub(crate) fn keep(&mut self, until: Option<Nanos>) {
        self.until = until;
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        let mut claimed = lock();
        claimed.retain(|it| !it.namespace.is_same_disk(&self.namespace));
        if self.until.is_some() {
            claimed.push(Claimed { namespace: self.namespace, until: self.until });
        }
    }
}

#[cfg(test)]
mod tests {
    use nvme_spec::identify::IdentifyNamespace;
    use spindle_initiator::Identity;

    use super::*;

    fn namespace(nsid: u32, blocks: u64) -> Namespace {
        let mut identify = IdentifyNamespace::default();
        identify.nsze.set(blocks);
        identify.lbaf[0].lbads = 9;
        let identity = Identity { nguid: [0xc1; 16], ..Identity::default() };
        Namespace::new(nsid, &identify, identity).expect("512-byte blocks")
    }

    #[test]
    fn a_namespace_is_claimed_once_whatever_its_size_and_again_when_it_is_given_back() {
        let claim = Claim::new(&namespace(1, 10)).expect("nobody has it");
        let refused = Claim::new(&namespace(1, 20)).expect_err("it is claimed");
        assert!(refused.starts_with("another remote disk has it"), "{refused}");
        let _other = Claim::new(&namespace(2, 10)).expect("nobody has it");
        drop(claim);
        Claim::new(&namespace(1, 20)).expect("nobody has it any more");
    }

    #[test]
    fn one_that_has_left_writes_behind_keeps_its_namespace_until_they_are_over() {
        let mut claim = Claim::new(&namespace(3, 10)).expect("nobody has it");
        claim.keep(Some(Clock::now() + Nanos::from_secs(1000)));
        drop(claim);
        let refused = Claim::new(&namespace(3, 10)).expect_err("it is kept");
        assert!(refused.contains("has left writes that it may execute for 1000s more"), "{refused}");
        let mut claim = Claim::new(&namespace(4, 10)).expect("nobody has it");
        claim.keep(Some(Clock::now()));
        drop(claim);
        Claim::new(&namespace(4, 10)).expect("they are over");
    }
}
