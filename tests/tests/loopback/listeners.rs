//! Listeners that come and go while hosts work.

use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::Instant;

use rustix::process::Signal;
use spindle_nvme_initiator::nvme_spec::Nqn;
use spindle_nvme_initiator::nvme_spec::log::SubsystemType;
use spindle_nvme_initiator::{Controller, Host, Options, TransportKind, discover};
use spindle_tests::loopback::{Folder, LONG, config, free_port, target};

use super::{NULL, V4, buf, connect, done, pool};

/// Ports at which an NVM subsystem is offered, and the discovery service is, as the discovery log says.
fn offered(address: SocketAddr) -> [Vec<u16>; 2] {
    let host = Host::from_nqn(Nqn::new("nqn.2026-01.io.spindle:a-host").expect("well formed"));
    let log = discover(TransportKind::Tcp, address, &host, &Options::default()).expect("answers");
    let ports = |subtype| {
        let of = log.entries.iter().filter(|entry| entry.subtype == subtype);
        let mut ports: Vec<u16> = of.map(|entry| entry.trsvcid().parse().expect("a port")).collect();
        ports.sort_unstable();
        ports
    };
    [ports(SubsystemType::NVM), ports(SubsystemType::CURRENT_DISCOVERY)]
}

/// Until the log has these: a core shows what it knows all to have, a moment after the last has it.
fn wait_until_offered(address: SocketAddr, ports: &[u16]) {
    let since = Instant::now();
    while offered(address) != [ports, ports] {
        assert!(since.elapsed() < LONG, "{address}: {:?}, wanted {ports:?}", offered(address));
        std::thread::yield_now();
    }
}

/// Until the address refuses connections.
fn wait_until_closed(address: SocketAddr) {
    let since = Instant::now();
    while TcpStream::connect(address).is_ok() {
        assert!(since.elapsed() < LONG, "{address} is still listened on");
        std::thread::yield_now();
    }
}

#[test]
fn a_reload_adds_and_takes_away_listeners_and_hosts_that_are_connected_stay() {
    let [first, second] = [free_port(V4), free_port(V4)];
    let folder = Folder::new("listeners");
    let more = format!("[[listener]]\naddress = \"{second}\"\n");
    let one = config(2, first, &[NULL.to_owned()]);
    let other = config(2, second, &[NULL.to_owned()]);
    let mut served = folder.serve(&one);
    let (mut controller, mut queue) = connect(first);
    let pool = pool();
    let namespace = controller.namespace(1).expect("a namespace");
    let mut work = || {
        let ticket = queue.write(&namespace, 0, buf(&pool, 4096, 1), false).expect("taken");
        done(&mut queue, ticket);
    };
    work();
    for round in 0..3 {
        // Both: each shows both, and takes as many hosts as there are cores and more.
        folder.write(&[one.as_str(), &more].concat());
        served.signal(Signal::HUP);
        served.wait_for(&format!("listener {} (tcp) added", if round == 0 { second } else { first }));
        served.wait_for("listening (NVMe/TCP");
        let mut ports = vec![first.port(), second.port()];
        ports.sort_unstable();
        for address in [first, second] {
            wait_until_offered(address, &ports);
            let connected: Vec<_> = (0..4).map(|_| connect(address)).collect();
            drop(connected);
        }
        // The second alone: the first refuses, and who came by it works on.
        folder.write(&other);
        served.signal(Signal::HUP);
        served.wait_for(&format!("listener {first} (tcp) removed"));
        served.wait_for("configuration read again");
        // And at once again as it was: its address may be in use for a moment.
        folder.write(&[one.as_str(), &more].concat());
        served.signal(Signal::HUP);
        served.wait_for(&format!("listener {first} (tcp) added"));
        served.wait_for("configuration read again");
        folder.write(&other);
        served.signal(Signal::HUP);
        served.wait_for(&format!("listener {first} (tcp) removed"));
        wait_until_closed(first);
        assert!(Controller::connect(&target(first), &Options::default()).is_err());
        wait_until_offered(second, &[second.port()]);
        work();
    }
    served.terminate();
}

#[test]
fn a_listener_changes_between_all_addresses_and_one_in_one_reload() {
    let one = free_port(V4);
    let [all, other] = [[0, 0, 0, 0], [127, 0, 0, 2]].map(|ip| SocketAddr::from((ip, one.port())));
    let folder = Folder::new("listener-all");
    let mut served = folder.serve(&config(2, one, &[NULL.to_owned()]));
    let (mut controller, mut queue) = connect(one);
    let pool = pool();
    let namespace = controller.namespace(1).expect("a namespace");
    let mut work = || {
        let ticket = queue.write(&namespace, 0, buf(&pool, 4096, 1), false).expect("taken");
        done(&mut queue, ticket);
    };
    let mut change_to = |address: SocketAddr, is_waited_for: bool| {
        folder.write(&config(2, address, &[NULL.to_owned()]));
        served.signal(Signal::HUP);
        served.wait_for("configuration read again");
        // By then the other one is closed.
        let is_bound = |line: String| line.contains(&address.to_string());
        while is_waited_for && !is_bound(served.wait_for("listening (NVMe/TCP")) {}
    };
    for _ in 0..3 {
        change_to(all, true);
        drop(connect(other));
        drop(connect(one));
        work();
        change_to(one, true);
        wait_until_closed(other);
        drop(connect(one));
        work();
        // There and back, and the first need not be through.
        change_to(all, false);
        change_to(one, true);
        wait_until_closed(other);
        drop(connect(one));
    }
    served.terminate();
}

#[test]
fn a_listener_whose_address_is_in_use_is_refused_and_all_stays_as_it_was() {
    let address = free_port(V4);
    let folder = Folder::new("listener-in-use");
    let text = config(1, address, &[NULL.to_owned()]);
    let mut served = folder.serve(&text);
    let taken = TcpListener::bind((V4, 0)).expect("a port");
    let taken_address = taken.local_addr().expect("it has one");
    let more = format!("[[listener]]\naddress = \"{taken_address}\"\n[[disk]]\nname = \"m\"\n{NULL}\n");
    folder.write(&[text.as_str(), &more].concat());
    served.signal(Signal::HUP);
    let said = served.wait_for("the configuration is unchanged");
    assert!(said.contains(&format!("listener {taken_address}: cannot listen")), "{said}");
    assert_eq!(offered(address)[0], [address.port()]);
    drop(taken);
    served.signal(Signal::HUP);
    served.wait_for("listening (NVMe/TCP");
    connect(taken_address);
    served.terminate();
}
