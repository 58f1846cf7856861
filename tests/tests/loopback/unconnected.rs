//! Peers that send ICReq and nothing else, and discovery controllers, which need no rights: they take no
//! place that a host needs.

use std::net::{IpAddr, SocketAddr};

use spindle_nvme_initiator::nvme_spec::fabrics::CNTLID_DYNAMIC;
use spindle_nvme_initiator::nvme_spec::nqn::Nqn;
use spindle_nvme_initiator::nvme_spec::status::Status;
use spindle_tests::loopback::raw::{End, RawHost, connect_capsule_to};
use spindle_tests::loopback::{Folder, config, free_port};

use super::{NULL, V4, buf, connect, done, pool};

/// Another address of every machine's.
const OTHER: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(127, 0, 0, 2));

/// A peer that has sent ICReq and nothing else; none if the target has closed its connection.
fn silent(address: SocketAddr) -> Option<RawHost> {
    let mut host = RawHost::open(address);
    host.initialize().then_some(host)
}

#[test]
fn a_host_connects_to_a_target_that_is_full_of_peers_without_connect() {
    let address = free_port(V4);
    let folder = Folder::new("unconnected-full");
    let limits = "[limits]\nconnections = 16\nunconnected_per_address = 0\n";
    let mut served = folder.serve(&(config(2, address, &[NULL.to_owned()]) + limits));
    let all: Vec<RawHost> = (0..16).map(|_| silent(address).expect("there is room")).collect();
    // Its admin queue and its I/O queue take the places of two of them, within the 30 s that those may take.
    let (mut controller, mut queue) = connect(address);
    let namespace = controller.namespace(1).expect("a namespace");
    let ticket = queue.read(&namespace, 0, buf(&pool(), 4096, 0)).expect("taken");
    done(&mut queue, ticket);
    served.wait_for("has not sent Connect, and its slot is needed for a newer connection");
    drop(all);
    served.terminate();
}

#[test]
fn an_address_may_have_so_many_connections_without_connect_and_any_number_with_it() {
    let address = free_port(V4);
    let folder = Folder::new("unconnected-limit");
    let limits = "[limits]\nunconnected_per_address = 3\n";
    let mut served = folder.serve(&(config(2, address, &[NULL.to_owned()]) + limits));
    let first = [(); 3].map(|()| silent(address).expect("within the limit"));
    assert!(silent(address).is_none(), "one more than the limit");
    served.wait_for("limits.unconnected_per_address");
    // Another address has its own.
    let mut other = RawHost::open_from(OTHER, address);
    assert!(other.initialize(), "another address");
    // Those that connect do not count.
    let mut connected = Vec::new();
    for mut host in first {
        let cntlid = host.connect(0, spindle_nvme_initiator::nvme_spec::fabrics::CNTLID_DYNAMIC);
        connected.push((host, cntlid));
        connected.push(RawHost::admin(address));
    }
    assert_eq!(connected.len(), 6);
    let mut last = silent(address).expect("none of the six counts");
    last.connect(0, spindle_nvme_initiator::nvme_spec::fabrics::CNTLID_DYNAMIC);
    for (host, _) in connected {
        host.end(End::Fin);
    }
    served.terminate();
}

/// Asks for a discovery controller from this address; `None`: the target has closed the connection, which
/// takes no place.
fn discover(from: IpAddr, address: SocketAddr, kato_ms: u32) -> Option<(RawHost, Status)> {
    let mut host = RawHost::open_from(from, address);
    if !host.initialize() {
        return None;
    }
    host.send(&connect_capsule_to(&Nqn::discovery(), 0, CNTLID_DYNAMIC, kato_ms));
    let status = host.receive()?.cqe().status();
    Some((host, status))
}

#[test]
fn a_host_connects_to_a_target_that_is_full_of_discovery_controllers() {
    const CONNECTIONS: u8 = 64;
    for (addresses, kato_ms) in [(1, 3_600_000), (1, 120_000), (64, 3_600_000), (64, 120_000)] {
        let address = free_port(V4);
        let folder = Folder::new("unconnected-discovery");
        let limits = format!("[limits]\nconnections = {CONNECTIONS}\nunconnected_per_address = 16\n");
        let mut served = folder.serve(&(config(2, address, &[NULL.to_owned()]) + &limits));
        let mut all = Vec::new();
        for at in 0..2 * CONNECTIONS {
            let from = IpAddr::from([127, 0, 1, 1 + at % addresses]);
            all.extend(discover(from, address, kato_ms));
        }
        let count = |wanted: Status| all.iter().filter(|(_, status)| *status == wanted).count();
        let refused = count(Status::CONNECT_INVALID_PARAMETERS.dnr());
        let connected = count(Status::SUCCESS);
        if kato_ms > 120_000 {
            assert_eq!((refused > 0, connected), (true, 0));
            served.wait_for("0 to 120000 ms are allowed");
        } else if addresses == 1 {
            assert_eq!(connected, 16, "the limit of one address");
            served.wait_for("discovery controllers of the address: 16 (limits.unconnected_per_address)");
        } else {
            assert_eq!(connected, all.len());
        }
        let (mut controller, mut queue) = connect(address);
        let namespace = controller.namespace(1).expect("a namespace");
        let ticket = queue.read(&namespace, 0, buf(&pool(), 4096, 0)).expect("taken");
        done(&mut queue, ticket);
        drop(all);
        served.terminate();
    }
}
