//! [`Admission`]: limits the connections of one host address that need no rights: those whose Connect has not
//! succeeded, and those of discovery controllers, which every host may have.
//!
//! Before Connect the target has only the address of a host, but the connection already occupies a slot. A
//! connection is counted from accept (RDMA: from the connection request) until Connect succeeds or the
//! connection closes, over all transports together. A discovery controller is counted from Connect on,
//! apart from the others, so that it takes no place of an I/O connection of the same address. [`Admitted`]
//! moves with the connection to the core that serves it; dropping it ends the count. Nothing here is on the
//! data path.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Number of connections per host address whose Connect has not succeeded, and of discovery controllers. All
/// cores and transports share one instance.
#[derive(Debug)]
pub struct Admission {
    per_address: usize,
    /// Contains only addresses with at least one counted connection.
    counts: Mutex<HashMap<IpAddr, [usize; KINDS]>>,
}

/// Counts one connection against its address until dropped.
#[derive(Debug)]
pub struct Admitted {
    admission: Arc<Admission>,
    address: IpAddr,
    kind: Kind,
}

/// What is counted. The discriminant is the index of the count.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Unconnected,
    Discovery,
}

const KINDS: usize = 2;

impl Admission {
    /// Creates an instance that admits at most `per_address` connections of each address before Connect, and
    /// as many discovery controllers; 0: no limit.
    #[must_use]
    pub fn new(per_address: usize) -> Arc<Admission> {
        Arc::new(Admission { per_address, counts: Mutex::default() })
    }

    /// Counts a connection of `address`, until the result is dropped. `None`: the address is at the limit.
    #[must_use]
    pub fn admit(self: &Arc<Self>, address: IpAddr) -> Option<Admitted> {
        // A dual-stack socket reports an IPv4 host as an IPv4-mapped IPv6 address.
        self.count(address.to_canonical(), Kind::Unconnected)
    }

    fn count(self: &Arc<Self>, address: IpAddr, kind: Kind) -> Option<Admitted> {
        let mut counts = self.counts();
        let count = &mut counts.entry(address).or_default()[kind as usize];
        if self.per_address > 0 && *count >= self.per_address {
            return None;
        }
        *count += 1;
        Some(Admitted { admission: Arc::clone(self), address, kind })
    }

    /// Returns the most counted connections of one address; 0: no limit.
    #[must_use]
    pub fn per_address(&self) -> usize {
        self.per_address
    }

    /// Locks the counts. Ignores lock poisoning: the counts are consistent wherever a thread could panic.
    fn counts(&self) -> MutexGuard<'_, HashMap<IpAddr, [usize; KINDS]>> {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Admitted {
    /// Counts a discovery controller of the same address, until the result is dropped. `Err`: the address has
    /// that many, the limit.
    ///
    /// # Errors
    /// As above.
    pub fn discovery(&self) -> Result<Admitted, usize> {
        let Admitted { admission, address, .. } = self;
        admission.count(*address, Kind::Discovery).ok_or(admission.per_address)
    }
}

impl Drop for Admitted {
    fn drop(&mut self) {
        let mut counts = self.admission.counts();
        if let Some(count) = counts.get_mut(&self.address) {
            count[self.kind as usize] -= 1;
            if *count == [0; KINDS] {
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
    fn discovery_controllers_have_the_same_limit_and_a_count_of_their_own() {
        let admission = Admission::new(2);
        let one: IpAddr = "192.0.2.1".parse().expect("an address");
        let connection = admission.admit(one).expect("a place");
        let mut controllers = Vec::from([(); 2].map(|()| connection.discovery().expect("a place")));
        assert_eq!(connection.discovery().err(), Some(2));
        let other = admission.admit(one).expect("controllers are not counted here");
        controllers.pop();
        assert!(connection.discovery().is_ok());
        drop((connection, other, controllers));
        assert!(admission.counts().is_empty());
    }

    #[test]
    fn none_is_refused_without_a_limit() {
        let admission = Admission::new(0);
        let one: IpAddr = "2001:db8::1".parse().expect("an address");
        let all: Vec<_> = (0..1000).map(|_| admission.admit(one).expect("a place")).collect();
        assert_eq!(admission.counts().get(&one), Some(&[1000, 0]));
        drop(all);
        assert!(admission.counts().is_empty());
    }
}
