//! The shell with real sockets of this machine, and a core that reads what comes and answers nothing.

use spindle_nvme_transport::ConnectionId;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};

use nvme_spec::tcp::{DigestBits, IcReq};
use nvme_spec::zerocopy::IntoBytes;
use spindle_nvme_transport::admission::Admission;
use spindle_nvme_transport::{Transport, TransportKind};
use spindle_reactor::net::{Listener, Readiness};
use spindle_reactor::slab::Slab;

use super::*;

/// Takes every connection.
struct Reader {
    conns: Slab<Conn>,
    /// By connection: how often it had something.
    steps: Vec<usize>,
    wants_pass: bool,
    has_submitted: bool,
    /// The host has ended: there are events.
    is_over: bool,
}

impl Reader {
    fn new(connections: usize) -> Reader {
        Reader {
            conns: Slab::with_capacity(connections),
            steps: vec![0; connections],
            wants_pass: false,
            has_submitted: false,
            is_over: false,
        }
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

    fn step_deferred(&mut self, id: ConnectionId) {
        self.steps[id.index()] += 1;
        let event = self.conns.get_mut(id.0).and_then(Transport::next_event);
        assert!(event.is_none() || self.is_over, "less than a header: {event:?}");
    }

    fn step(&mut self, _id: ConnectionId) {}

    fn has_submitted(&self, _id: ConnectionId) -> bool {
        self.has_submitted
    }

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

/// A shell with connections that send nothing yet.
struct Rig {
    shell: Shell,
    core: Reader,
    hosts: Vec<TcpStream>,
    _readiness: Readiness,
}

impl Rig {
    fn new(connections: usize) -> Rig {
        let readiness = Readiness::new().expect("epoll");
        let mut shell = Shell::new(ShellConfig::default(), connections, readiness.watcher(0));
        let mut core = Reader::new(connections);
        let admission = Admission::new(connections);
        let listener = Listener::bind("127.0.0.1:0".parse().expect("an address"), 16).expect("listens");
        let mut hosts = Vec::new();
        for _ in 0..connections {
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
        Rig { shell, core, hosts, _readiness: readiness }
    }

    /// Bytes that the shell has sent to the first host, within 50 ms.
    fn sent(&mut self) -> usize {
        let host = &mut self.hosts[0];
        host.set_read_timeout(Some(Duration::from_millis(50))).expect("a time");
        host.read(&mut [0; 256]).unwrap_or(0)
    }
}

/// Returns a rig and its first connection, which has received ICReq and has queued ICResp. `has_submitted`: a
/// disk has a command of the same batch.
fn asked(has_submitted: bool) -> (Rig, ConnectionId) {
    let mut rig = Rig::new(2);
    rig.core.has_submitted = has_submitted;
    let request = IcReq::new(0, DigestBits::new(), 0);
    rig.hosts[0].write_all(request.as_bytes()).expect("sent");
    while rig.core.steps[0] == 0 {
        rig.shell.poll(&mut rig.core, Nanos::ZERO);
    }
    let first = rig.core.conns.iter().map(|(id, _)| ConnectionId(id)).next().expect("accepted");
    (rig, first)
}

#[test]
fn a_reply_waits_for_those_of_disks_until_the_end_of_the_next_turn() {
    let (mut rig, _) = asked(false);
    assert_eq!(rig.sent(), 128, "no disk has a command");

    let (mut rig, id) = asked(true);
    assert!(rig.shell.flush(&mut rig.core, id));
    assert!(rig.shell.is_holding());
    rig.shell.poll(&mut rig.core, Nanos::ZERO);
    assert_eq!(rig.sent(), 0, "the next turn has not ended");
    assert!(rig.shell.is_holding());
    rig.shell.poll(&mut rig.core, Nanos::ZERO);
    assert_eq!(rig.sent(), 128, "the next turn has ended");
    assert!(!rig.shell.is_holding());
    assert!(rig.shell.flush(&mut rig.core, id));
    assert!(!rig.shell.is_holding(), "nothing is queued");
}

#[test]
fn a_reply_that_waits_is_sent_with_that_of_a_disk() {
    let (mut rig, id) = asked(true);
    assert!(rig.shell.flush(&mut rig.core, id));
    rig.core.has_submitted = false;
    assert!(rig.shell.flush(&mut rig.core, id));
    assert_eq!(rig.sent(), 128);
    // Nothing is left for the turns in which it would have been sent.
    for _ in 0..3 {
        rig.shell.poll(&mut rig.core, Nanos::ZERO);
    }
    assert_eq!(rig.sent(), 0);
    assert!(!rig.shell.is_holding());
}

#[test]
fn a_reply_waits_once() {
    let (mut rig, id) = asked(true);
    assert!(rig.shell.flush(&mut rig.core, id));
    // Flushed again while disks have commands of a later batch.
    rig.shell.poll(&mut rig.core, Nanos::ZERO);
    assert!(rig.shell.flush(&mut rig.core, id));
    assert_eq!(rig.sent(), 128);
}

#[test]
fn a_reply_that_waits_is_sent_before_a_host_that_sends_no_more_is_closed() {
    let (mut rig, id) = asked(true);
    assert!(rig.shell.flush(&mut rig.core, id));
    rig.core.is_over = true;
    rig.hosts[0].shutdown(std::net::Shutdown::Write).expect("shut down");
    let steps = rig.core.steps[0];
    while rig.core.steps[0] == steps {
        rig.shell.budget = BUDGET;
        rig.shell.poll_direct(&mut rig.core);
    }
    assert_eq!(rig.sent(), 128);
}

#[test]
fn a_turn_serves_as_many_as_its_budget_and_the_next_goes_on_behind_them() {
    // More than one turn serves, and less of the initial PDU's header than would be one for all.
    const CONNECTIONS: usize = BUDGET + BUDGET / 2;
    let mut rig = Rig::new(CONNECTIONS);
    let Rig { shell, core, hosts, .. } = &mut rig;
    let mut turns = 0;
    while core.steps.contains(&0) {
        // All have something in every turn.
        for host in &mut *hosts {
            host.write_all(&[0]).expect("sent");
        }
        let before: usize = core.steps.iter().sum();
        assert!(shell.poll(core, Nanos::ZERO));
        let served = core.steps.iter().sum::<usize>() - before;
        assert!((1..=BUDGET).contains(&served), "{served}");
        turns += 1;
        assert!(turns < 7, "some are never served: {:?}", core.steps);
    }
    assert!(turns > 1);
}
