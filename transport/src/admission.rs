//! [`Admission`]: how many connections of one address may be there that have not sent Connect.
//!
//! Such a connection has shown nothing but an address, and takes a place that a host could have. It is
//! counted from when it is accepted to when its queue is connected or it is gone, over all transports
//! together: an [`Admitted`] goes with it from core to core, and gives the place back when it is dropped.
//! Nothing here is on the data path.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Connections before Connect, by address. One for all cores and transports.
#[derive(Debug)]
pub struct Admission {
    per_address: usize,
    /// Addresses without any are not in it: it has at most as many entries as there are connections.
    counts: Mutex<HashMap<IpAddr, usize>>,
}

/// The place of one connection that has not sent Connect.
#[derive(Debug)]
pub struct Admitted {
    admission: Arc<Admission>,
    address: IpAddr,
}

impl Admission {
    /// At most `per_address` of each address; 0: as many as there is room for.
    #[must_use]
    pub fn new(per_address: usize) -> Arc<Admission> {
        Arc::new(Admission { per_address, counts: Mutex::default() })
    }

    /// A place for a connection from this address; `None`: it has as many as it may.
    #[must_use]
    pub fn admit(self: &Arc<Self>, address: IpAddr) -> Option<Admitted> {
        // An IPv4 host is the same one on a socket that listens on IPv6 too.
        let address = address.to_canonical();
        let mut counts = self.counts();
        let count = counts.entry(address).or_default();
        if self.per_address > 0 && *count >= self.per_address {
            return None;
        }
        *count += 1;
        Some(Admitted { admission: Arc::clone(self), address })
    }

    /// What [`Admission::new`] was given.
    #[must_use]
    pub fn per_address(&self) -> usize {
        self.per_address
    }

    /// A count is whole whenever the lock is free, so one that a panic left locked can be used.
    fn counts(&self) -> MutexGuard<'_, HashMap<IpAddr, usize>> {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Admitted {
    fn drop(&mut self) {
        let mut counts = self.admission.counts();
        if let Some(count) = counts.get_mut(&self.address) {
            *count -= 1;
            if *count == 0 {
                counts.remove(&self.address);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_has_its_places_back_when_its_connections_are_connected_or_gone() {
        let admission = Admission::new(2);
        let one: IpAddr = "192.0.2.1".parse().expect("an address");
        let same: IpAddr = "::ffff:192.0.2.1".parse().expect("an address");
        let other: IpAddr = "192.0.2.2".parse().expect("an address");
        let first = admission.admit(one).expect("a place");
        let second = admission.admit(same).expect("a place");
        assert!(admission.admit(one).is_none() && admission.admit(same).is_none());
        let third = admission.admit(other).expect("its own place");
        drop(first);
        let fourth = admission.admit(one).expect("the place of the first");
        drop((second, third, fourth));
        assert!(admission.counts().is_empty());
    }

    #[test]
    fn none_is_refused_without_a_limit() {
        let admission = Admission::new(0);
        let one: IpAddr = "2001:db8::1".parse().expect("an address");
        let all: Vec<_> = (0..1000).map(|_| admission.admit(one).expect("a place")).collect();
        assert_eq!(admission.counts().get(&one), Some(&1000));
        drop(all);
        assert!(admission.counts().is_empty());
    }
}
