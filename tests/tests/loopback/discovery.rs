//! What a target tells of itself: the address that the host used, and only what that host may connect to.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::process::Command;

use spindle_nvme_initiator::nvme_spec::Nqn;
use spindle_nvme_initiator::nvme_spec::log::{AddressFamily, SubsystemType};
use spindle_nvme_initiator::{Host, Options, TransportKind, discover};
use spindle_tests::loopback::{Folder, binary, free_port};

use super::RAM;

const FOR_ALL: &str = "nqn.2026-01.io.spindle:for-all";
const FOR_ONE: &str = "nqn.2026-01.io.spindle:for-one";
const FRIEND: &str = "nqn.2026-01.io.spindle:friend";
const STRANGER: &str = "nqn.2026-01.io.spindle:stranger";

/// Two listeners on all addresses; a subsystem for every host, and one for [`FRIEND`].
fn configuration(v4: SocketAddr, v6: SocketAddr) -> String {
    format!(
        "[reactor]\ncores = [0, 1]\npin = false\n[[listener]]\nname = \"four\"\naddress = \"{v4}\"\n\
         [[listener]]\nname = \"six\"\naddress = \"{v6}\"\n\
         [[disk]]\nname = \"a\"\n{RAM}\n[[disk]]\nname = \"b\"\n{RAM}\n\
         [[subsystem]]\nnqn = \"{FOR_ALL}\"\nallow_any_host = true\nlisteners = [\"four\", \"six\"]\n\
         [[subsystem.namespace]]\nnsid = 1\ndisk = \"a\"\n\
         [[subsystem]]\nnqn = \"{FOR_ONE}\"\nhosts = [\"{FRIEND}\"]\nlisteners = [\"four\"]\n\
         [[subsystem.namespace]]\nnsid = 1\ndisk = \"b\"\n"
    )
}

/// Port, family and NQN of each entry for an NVM subsystem, in order; all of them name `address`, as do those
/// for the discovery service itself.
fn offered(address: SocketAddr, host: &str) -> Vec<(u16, AddressFamily, String)> {
    let host = Host::from_nqn(Nqn::new(host).expect("well formed"));
    let log = discover(TransportKind::Tcp, address, &host, &Options::default()).expect("answers");
    let mut found = Vec::new();
    for entry in &log.entries {
        let port: u16 = entry.trsvcid().parse().expect("a port");
        let own = (port == address.port()).then(|| address.ip().to_string());
        assert!(own.is_none_or(|own| own == entry.traddr()), "{address}: {}", entry.traddr());
        assert!(!["0.0.0.0", "::"].contains(&entry.traddr()), "no host can connect to {}", entry.traddr());
        if entry.subtype == SubsystemType::NVM {
            found.push((port, entry.adrfam, entry.subnqn().expect("a name").to_string()));
        }
    }
    found.sort_by(|a, b| (a.0, &a.2).cmp(&(b.0, &b.2)));
    found
}

#[test]
fn a_host_is_told_the_address_it_used_and_what_it_may_connect_to() {
    let v4 = free_port(IpAddr::V4(Ipv4Addr::UNSPECIFIED));
    let v6 = free_port(IpAddr::V6(Ipv6Addr::UNSPECIFIED));
    let folder = Folder::new("discovery");
    let served = folder.serve(&configuration(v4, v6));
    let at = |ip: IpAddr, port| SocketAddr::new(ip, port);
    let own = |all: &[(u16, AddressFamily, String)], port: u16| {
        let all = all.iter().filter(|entry| entry.0 == port);
        all.map(|entry| (entry.1, entry.2.clone())).collect::<Vec<_>>()
    };
    let for_all = |family| (family, FOR_ALL.to_owned());
    let for_one = (AddressFamily::IPV4, FOR_ONE.to_owned());
    for ip in [Ipv4Addr::LOCALHOST, Ipv4Addr::new(127, 0, 0, 2)] {
        let address = at(ip.into(), v4.port());
        let to_stranger = offered(address, STRANGER);
        assert_eq!(own(&to_stranger, v4.port()), [for_all(AddressFamily::IPV4)]);
        assert!(to_stranger.iter().all(|entry| entry.2 == FOR_ALL), "{to_stranger:?}");
        let to_friend = offered(address, FRIEND);
        assert_eq!(own(&to_friend, v4.port()), [for_all(AddressFamily::IPV4), for_one.clone()]);
    }
    let address = at(Ipv6Addr::LOCALHOST.into(), v6.port());
    assert_eq!(own(&offered(address, STRANGER), v6.port()), [for_all(AddressFamily::IPV6)]);
    assert_eq!(own(&offered(address, FRIEND), v6.port()), [for_all(AddressFamily::IPV6)]);
    served.terminate();
}

#[test]
fn the_discover_command_prints_what_this_host_may_connect_to() {
    let v4 = free_port(IpAddr::V4(Ipv4Addr::UNSPECIFIED));
    let v6 = free_port(IpAddr::V6(Ipv6Addr::UNSPECIFIED));
    let folder = Folder::new("discover");
    let served = folder.serve(&configuration(v4, v6));
    for (host, may) in [(STRANGER, false), (FRIEND, true)] {
        let address = format!("127.0.0.1:{}", v4.port());
        let output =
            Command::new(binary()).args(["discover", &address, "--json", "--hostnqn", host]).output();
        let output = output.expect("spindle runs");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let log: serde_json::Value = serde_json::from_slice(&output.stdout).expect("one JSON object");
        let entries = log["entries"].as_array().expect("a list");
        let port = v4.port().to_string();
        let is_own = |entry: &&serde_json::Value| entry["port"] == port;
        assert!(entries.iter().filter(is_own).all(|entry| entry["address"] == "127.0.0.1"), "{log}");
        assert!(entries.iter().any(|entry| entry["subnqn"] == FOR_ALL), "{log}");
        assert_eq!(entries.iter().any(|entry| entry["subnqn"] == FOR_ONE), may, "{log}");
    }
    served.terminate();
}
