//! A core by itself: how it takes connections over.

use std::net::{SocketAddr, TcpStream};

use super::*;
use crate::config::{Config, LocalDrives};
use spindle_reactor::mailbox::mesh;
use spindle_reactor::run::Idle;

/// A core of the built-in configuration that listens on a port of its own, with room for so many
/// connections of an address before Connect.
fn core(per_address: usize) -> (CoreLoop, SocketAddr) {
    let mut plan = Config::builtin().plan().clone();
    (plan.reactor.idle, plan.pool.pages, plan.limits.connections) = (Idle::Spin, Pages::Base, 64);
    let snapshot = plan.snapshot(None, &LocalDrives, &[]).expect("opened");
    let listener = Listener::bind("127.0.0.1:0".parse().expect("an address"), 64).expect("bound");
    let address = listener.local_addr();
    let mailbox = mesh(1, 16).expect("mailboxes").pop().expect("one");
    let setup = CoreSetup {
        core: 0,
        cores: 1,
        cpu: None,
        plan: Arc::new(plan),
        registry: Arc::default(),
        listeners: vec![(Arc::new(listener), 0)],
        loads: Arc::new([AtomicUsize::new(0)]),
        advertised: Arc::new([AtomicU64::new(0)]),
        disk_errors: Arc::new([std::sync::Mutex::default()]),
        admission: Admission::new(per_address),
        rdma: RdmaSetup {
            known: rdma::KnownDevices::new(&[]),
            in_capsule_bytes: 0,
            listeners: Vec::new(),
            published: Arc::default(),
        },
        stop: Arc::default(),
    };
    (CoreLoop::new(setup, mailbox, snapshot).expect("started"), address)
}

#[test]
fn a_turn_accepts_a_few_connections_and_the_next_turns_the_others() {
    /// What a turn of a core that serves others may take.
    const FEW: usize = 4;
    let (mut core, address) = core(0);
    // Connected as far as the kernel is concerned: all of them wait in the backlog.
    let hosts: Vec<TcpStream> = (0..40).map(|_| TcpStream::connect(address).expect("connects")).collect();
    let mut turns = 0;
    while core.shared.target.usage().connections < hosts.len() {
        let before = core.shared.target.usage().connections;
        core.turn();
        let taken = core.shared.target.usage().connections - before;
        assert!(taken <= FEW, "{taken} in one turn");
        turns += usize::from(taken > 0);
    }
    assert!(turns >= hosts.len() / FEW, "{turns} turns");
}

#[test]
fn an_address_with_too_many_that_are_not_connected_is_closed_and_not_left_to_wait() {
    use std::io::{ErrorKind, Read};
    let (mut core, address) = core(5);
    let hosts: Vec<TcpStream> = (0..8).map(|_| TcpStream::connect(address).expect("connects")).collect();
    let is_closed = |mut host: &TcpStream| {
        host.set_nonblocking(true).expect("set");
        match host.read(&mut [0]) {
            Ok(count) => count == 0,
            Err(error) => error.kind() != ErrorKind::WouldBlock,
        }
    };
    while hosts.iter().filter(|host| is_closed(host)).count() < 3 {
        core.turn();
    }
    assert_eq!(core.shared.target.usage().connections, 5);
    drop(hosts);
    while core.shared.target.usage().connections > 0 {
        core.turn();
    }
    let _again = TcpStream::connect(address).expect("connects");
    while core.shared.target.usage().connections == 0 {
        core.turn();
    }
}
