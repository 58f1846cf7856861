//! The shell with real sockets of this machine, and a core that reads what comes and answers nothing.

use spindle_transport::ConnectionId;
use std::io::Write;
use std::net::{SocketAddr, TcpStream};

use spindle_reactor::net::{Listener, Readiness};
use spindle_reactor::slab::Slab;
use spindle_transport::admission::Admission;
use spindle_transport::{Transport, TransportKind};

use super::*;

/// Takes every connection.
struct Reader {
    conns: Slab<Conn>,
    /// By connection: how often it had something.
    steps: Vec<usize>,
    wants_pass: bool,
}

impl Reader {
    fn new(connections: usize) -> Reader {
        Reader { conns: Slab::with_capacity(connections), steps: vec![0; connections], wants_pass: false }
    }
}

impl Connections for Reader {
    type Conn = Conn;

    fn refusal(&self) -> Option<&'static str> {
        None
    }

    fn accept(&mut self, conn: Conn, _peer: Peer) -> Result<ConnectionId, Conn> {
        self.conns.insert(conn).map(ConnectionId)
    }

    fn set_admitted(&mut self, _id: ConnectionId, _admitted: Admitted) {}

    fn transport(&mut self, id: ConnectionId) -> Option<&mut Conn> {
        self.conns.get_mut(id.0)
    }

    fn peer(&self, _id: ConnectionId) -> Option<&Peer> {
        None
    }

    fn step(&mut self, id: ConnectionId) {
        self.steps[id.index()] += 1;
        let event = self.conns.get_mut(id.0).and_then(Transport::next_event);
        assert!(event.is_none(), "less than a header: {event:?}");
    }

    fn step_sent(&mut self, _id: ConnectionId) {}

    fn wants_pass(&self, _transport: TransportKind) -> bool {
        self.wants_pass
    }

    fn passed(&mut self, _transport: TransportKind) {
        assert!(std::mem::take(&mut self.wants_pass), "nobody asked");
    }

    fn next_closed(&mut self) -> Option<(ConnectionId, Conn)> {
        None
    }

    fn on_violation(&mut self, id: ConnectionId, text: String) {
        panic!("{id:?}: {text}");
    }

    fn on_refused(&mut self, remote: SocketAddr, reason: String) {
        panic!("{remote}: {reason}");
    }
}

#[test]
fn a_turn_serves_as_many_as_its_budget_and_the_next_goes_on_behind_them() {
    // More than one turn serves, and less of the initial PDU's header than would be one for all.
    const CONNECTIONS: usize = BUDGET + BUDGET / 2;
    let readiness = Readiness::new().expect("epoll");
    let mut shell = Shell::new(ShellConfig::default(), CONNECTIONS, readiness.watcher(0));
    let mut core = Reader::new(CONNECTIONS);
    let admission = Admission::new(CONNECTIONS);
    let listener = Listener::bind("127.0.0.1:0".parse().expect("an address"), 16).expect("listens");
    let mut hosts = Vec::new();
    for _ in 0..CONNECTIONS {
        hosts.push(TcpStream::connect(listener.local_addr()).expect("connects"));
        let accepted = loop {
            if let Some(accepted) = listener.accept().expect("accepts") {
                break accepted;
            }
        };
        let (transport, remote, local) = (TransportKind::Tcp, accepted.peer, accepted.local);
        let peer = Peer { transport, listener: 0, remote, local };
        let admitted = admission.admit(remote.ip()).expect("a place");
        let config = ConnConfig::default();
        let incoming = Incoming { socket: accepted.socket, peer, config, admitted };
        assert!(shell.accept(&mut core, incoming, Nanos::ZERO));
    }
    let mut turns = 0;
    while core.steps.contains(&0) {
        // All have something in every turn.
        for host in &mut hosts {
            host.write_all(&[0]).expect("sent");
        }
        let before: usize = core.steps.iter().sum();
        assert!(shell.poll(&mut core, Nanos::ZERO));
        let served = core.steps.iter().sum::<usize>() - before;
        assert!((1..=BUDGET).contains(&served), "{served}");
        turns += 1;
        assert!(turns < 7, "some are never served: {:?}", core.steps);
    }
    assert!(turns > 1);
}
