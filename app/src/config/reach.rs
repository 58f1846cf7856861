//! How hosts reach a listener: the address to name, and the command to type.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};

use nvme_spec::nqn::Nqn;
use spindle_transport::TransportKind;

/// `address` as a host can name it: where all addresses are listened on, the one that this machine would send
/// from.
pub fn reachable(address: SocketAddr) -> SocketAddr {
    if !address.ip().is_unspecified() {
        return address;
    }
    SocketAddr::new(own_address(address.is_ipv4()), address.port())
}

/// The address that the default route sends from, or the loopback address without one. Nothing is sent:
/// connecting a datagram socket only asks the routing table. The far ends are those of documentation (RFC
/// 5737, RFC 3849).
fn own_address(is_ipv4: bool) -> IpAddr {
    let (any, far, loopback): (IpAddr, IpAddr, IpAddr) = if is_ipv4 {
        (Ipv4Addr::UNSPECIFIED.into(), Ipv4Addr::new(192, 0, 2, 1).into(), Ipv4Addr::LOCALHOST.into())
    } else {
        let far = Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1);
        (Ipv6Addr::UNSPECIFIED.into(), far.into(), Ipv6Addr::LOCALHOST.into())
    };
    let asked = UdpSocket::bind((any, 0)).and_then(|socket| {
        socket.connect((far, 9))?;
        socket.local_addr()
    });
    asked.map_or(loopback, |address| address.ip())
}

/// What a Linux host types to connect.
pub fn connect_line(listener: (TransportKind, SocketAddr), nqn: &Nqn) -> String {
    let (transport, address) = (listener.0, reachable(listener.1));
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._:-+@/".contains(&byte);
    let nqn = nqn.as_str();
    let quoted =
        if nqn.bytes().all(is_plain) { nqn.to_owned() } else { format!("'{}'", nqn.replace('\'', r"'\''")) };
    format!("nvme connect -t {transport} -a {} -s {} -n {quoted}", address.ip(), address.port())
}
