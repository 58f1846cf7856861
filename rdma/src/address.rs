//! Conversion of socket addresses to and from the C structs of librdmacm.
//!
//! UNSAFETY: reads the structs of the address families from librdmacm's union.
#![expect(unsafe_code, reason = "reads a union of C")]

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6};
use std::ptr;

/// A C socket address, passed to librdmacm.
pub(crate) enum RawAddress {
    V4(libc::sockaddr_in),
    V6(libc::sockaddr_in6),
}

/// `AF_INET` and `AF_INET6`.
#[expect(clippy::cast_possible_truncation, reason = "2 and 10")]
const FAMILIES: (libc::sa_family_t, libc::sa_family_t) =
    (libc::AF_INET as libc::sa_family_t, libc::AF_INET6 as libc::sa_family_t);

impl RawAddress {
    pub(crate) fn new(address: SocketAddr) -> RawAddress {
        match address {
            SocketAddr::V4(address) => RawAddress::V4(libc::sockaddr_in {
                sin_family: FAMILIES.0,
                sin_port: address.port().to_be(),
                sin_addr: libc::in_addr { s_addr: u32::from_ne_bytes(address.ip().octets()) },
                sin_zero: [0; 8],
            }),
            SocketAddr::V6(address) => RawAddress::V6(libc::sockaddr_in6 {
                sin6_family: FAMILIES.1,
                sin6_port: address.port().to_be(),
                sin6_flowinfo: address.flowinfo(),
                sin6_addr: libc::in6_addr { s6_addr: address.ip().octets() },
                sin6_scope_id: address.scope_id(),
            }),
        }
    }

    /// Returns a pointer to the address, valid as long as `self` is not moved or dropped.
    pub(crate) fn as_mut_ptr(&mut self) -> *mut libc::sockaddr {
        match self {
            RawAddress::V4(address) => ptr::from_mut(address).cast(),
            RawAddress::V6(address) => ptr::from_mut(address).cast(),
        }
    }
}

/// Reads a socket address. `None` if its family is neither IPv4 nor IPv6, as in an address that is not set.
///
/// # Safety
/// `source` is valid for reads of a `sockaddr_storage`.
pub(crate) unsafe fn read(source: *const libc::sockaddr_storage) -> Option<SocketAddr> {
    // SAFETY: the caller guarantees a readable `sockaddr_storage`.
    let family = unsafe { (*source).ss_family };
    if family == FAMILIES.0 {
        // SAFETY: the caller guarantees a readable `sockaddr_storage`, which is larger than a `sockaddr_in`.
        let address = unsafe { source.cast::<libc::sockaddr_in>().read_unaligned() };
        let ip = Ipv4Addr::from(address.sin_addr.s_addr.to_ne_bytes());
        return Some(SocketAddrV4::new(ip, u16::from_be(address.sin_port)).into());
    }
    if family == FAMILIES.1 {
        // SAFETY: the caller guarantees a readable `sockaddr_storage`, which is larger than a `sockaddr_in6`.
        let address = unsafe { source.cast::<libc::sockaddr_in6>().read_unaligned() };
        let ip = Ipv6Addr::from(address.sin6_addr.s6_addr);
        let (flow, scope) = (address.sin6_flowinfo, address.sin6_scope_id);
        return Some(SocketAddrV6::new(ip, u16::from_be(address.sin6_port), flow, scope).into());
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_survive_the_way_there_and_back() {
        for text in ["10.9.1.1:4420", "0.0.0.0:0", "[::1]:65535", "[fe80::2%3]:4420"] {
            let address: SocketAddr = text.parse().expect("an address");
            // SAFETY: `sockaddr_storage` contains only integers, for which zero is valid.
            let mut storage: libc::sockaddr_storage = unsafe { std::mem::zeroed() };
            let place = ptr::from_mut(&mut storage);
            match RawAddress::new(address) {
                // SAFETY: `place` points to a local `sockaddr_storage`, which is larger and aligned for each
                // family.
                RawAddress::V4(raw) => unsafe { place.cast::<libc::sockaddr_in>().write(raw) },
                // SAFETY: `place` points to a local `sockaddr_storage`, which is larger and aligned for each
                // family.
                RawAddress::V6(raw) => unsafe { place.cast::<libc::sockaddr_in6>().write(raw) },
            }
            // SAFETY: the pointer is to a local, initialized `sockaddr_storage`.
            assert_eq!(unsafe { read(place) }, Some(address));
        }
    }

    #[test]
    fn no_address_is_none() {
        // SAFETY: `sockaddr_storage` contains only integers, for which zero is valid.
        let storage: libc::sockaddr_storage = unsafe { std::mem::zeroed() };
        // SAFETY: the pointer is to a local, initialized `sockaddr_storage`.
        assert_eq!(unsafe { read(&raw const storage) }, None);
    }
}
