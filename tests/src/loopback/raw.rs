//! [`RawHost`]: a host's end of one connection, PDU by PDU, so that a test can stop anywhere in one.

use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, Shutdown, SocketAddr, TcpStream};
use std::time::Duration;

use nvme_spec::fabrics::{CNTLID_DYNAMIC, ConnectAttributes, ConnectData, ConnectResult};
use nvme_spec::nqn::Nqn;
use nvme_spec::register::{CC, Cc};
use nvme_spec::sqe::Sgl;
use nvme_spec::tcp::{
    COMMON_HEADER_BYTES, CapsuleCmd, CapsuleResp, CommonHeader, DigestBits, Extent, H2cData, IcReq, LAST_PDU,
    PduType, R2t,
};
use nvme_spec::zerocopy::{FromBytes, IntoBytes};
use nvme_spec::{Cqe, Sqe};

use super::{LONG, target};

/// Entries of its queues, as SQSIZE has them.
const SQSIZE_Z: u16 = 31;

/// How a host leaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// It closes its half and reads what comes, until the target closes too.
    Fin,
    /// It closes the socket with whatever was not read.
    Close,
    /// It resets the connection.
    Reset,
}

/// A PDU from the target.
#[derive(Debug)]
pub struct Pdu {
    /// CH.
    pub header: CommonHeader,
    /// All of it, CH with it.
    pub bytes: Vec<u8>,
}

impl Pdu {
    /// The completion, of a response capsule.
    ///
    /// # Panics
    /// When it is something else.
    #[must_use]
    pub fn cqe(&self) -> Cqe {
        assert_eq!(self.header.pdu_type, PduType::CAPSULE_RESP);
        CapsuleResp::read_from_bytes(&self.bytes).expect("24 bytes").cqe
    }

    /// The request for data.
    ///
    /// # Panics
    /// When it is something else.
    #[must_use]
    pub fn r2t(&self) -> R2t {
        assert_eq!(self.header.pdu_type, PduType::R2T);
        R2t::read_from_bytes(&self.bytes).expect("24 bytes")
    }
}

/// See the module. Its queues have 32 entries and no SQ flow control.
#[derive(Debug)]
pub struct RawHost {
    socket: TcpStream,
}

impl RawHost {
    /// A connection, without a word yet.
    ///
    /// # Panics
    /// When no target listens.
    #[must_use]
    pub fn open(address: SocketAddr) -> RawHost {
        let socket = TcpStream::connect(address).expect("somebody listens");
        socket.set_read_timeout(Some(LONG)).expect("set");
        RawHost { socket }
    }

    /// The same from this address of the machine.
    ///
    /// # Panics
    /// When no target listens, or the address is not the machine's.
    #[must_use]
    pub fn open_from(from: IpAddr, address: SocketAddr) -> RawHost {
        use rustix::net::{AddressFamily, SocketType, bind, connect, socket};
        let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
        let fd = socket(family, SocketType::STREAM, None).expect("a socket");
        bind(&fd, &SocketAddr::new(from, 0)).expect("an address of this machine");
        connect(&fd, &address).expect("somebody listens");
        let socket = TcpStream::from(fd);
        socket.set_read_timeout(Some(LONG)).expect("set");
        RawHost { socket }
    }

    /// The admin queue of a new, enabled controller; and its CNTLID.
    ///
    /// # Panics
    /// When the target does not play along.
    #[must_use]
    pub fn admin(address: SocketAddr) -> (RawHost, u16) {
        RawHost::admin_with(address, 0)
    }

    /// The same with this keep-alive time-out; 0: none.
    ///
    /// # Panics
    /// When the target does not play along.
    #[must_use]
    pub fn admin_with(address: SocketAddr, kato_ms: u32) -> (RawHost, u16) {
        let mut host = RawHost::open(address);
        assert!(host.initialize(), "ICReq was not answered");
        host.send(&connect_capsule_to(&target(address).nqn, 0, CNTLID_DYNAMIC, kato_ms));
        let cqe = host.completion();
        assert!(cqe.status().is_success(), "Connect: {}", cqe.status());
        let cntlid = ConnectResult::from_bits(cqe.result_u32()).cntlid();
        let enabled = Cc::new().with_en(true).with_iosqes(6).with_iocqes(4);
        host.send(&capsule(Sqe::property_set(1, false, CC, u64::from(enabled.into_bits())), &[]));
        assert!(host.completion().status().is_success());
        (host, cntlid)
    }

    /// An I/O queue of that controller.
    ///
    /// # Panics
    /// When the target does not play along.
    #[must_use]
    pub fn io(address: SocketAddr, qid: u16, cntlid: u16) -> RawHost {
        let mut host = RawHost::open(address);
        assert!(host.initialize(), "ICReq was not answered");
        assert_eq!(host.connect(qid, cntlid), cntlid);
        host
    }

    /// ICReq, without digests; false when the target closes instead of answering.
    ///
    /// # Panics
    /// When the answer is not ICResp.
    #[must_use]
    pub fn initialize(&mut self) -> bool {
        // A target that has no room may be gone before this arrives.
        if self.socket.write_all(IcReq::new(0, DigestBits::new(), 0).as_bytes()).is_err() {
            return false;
        }
        let answer = self.receive();
        answer.is_some_and(|pdu| {
            assert_eq!(pdu.header.pdu_type, PduType::ICRESP);
            true
        })
    }

    /// Connect this queue; CNTLID.
    ///
    /// # Panics
    /// When the target refuses.
    pub fn connect(&mut self, qid: u16, cntlid: u16) -> u16 {
        self.send(&connect_capsule(qid, cntlid));
        let cqe = self.completion();
        assert!(cqe.status().is_success(), "Connect of queue {qid}: {}", cqe.status());
        ConnectResult::from_bits(cqe.result_u32()).cntlid()
    }

    /// Send these bytes.
    ///
    /// # Panics
    /// When the connection has ended.
    pub fn send(&mut self, bytes: &[u8]) {
        self.socket.write_all(bytes).expect("the connection is open");
    }

    /// The next PDU; `None` at the connection's end.
    ///
    /// # Panics
    /// When nothing comes in a long time.
    pub fn receive(&mut self) -> Option<Pdu> {
        let mut bytes = vec![0; COMMON_HEADER_BYTES];
        if !self.fill(&mut bytes) {
            return None;
        }
        let header = CommonHeader::read_from_bytes(&bytes).expect("8 bytes");
        bytes.resize(usize::try_from(header.plen()).expect("small"), 0);
        let is_whole = self.fill(&mut bytes[COMMON_HEADER_BYTES..]);
        is_whole.then_some(Pdu { header, bytes })
    }

    /// Takes what has come without waiting; false when the connection has ended.
    ///
    /// # Panics
    /// When the socket cannot be set.
    pub fn is_open(&mut self) -> bool {
        self.socket.set_nonblocking(true).expect("set");
        let mut bytes = [0; 4096];
        let is_open = loop {
            match self.socket.read(&mut bytes) {
                Ok(0) => break false,
                Ok(_) => {}
                Err(error) => break error.kind() == ErrorKind::WouldBlock,
            }
        };
        self.socket.set_nonblocking(false).expect("set");
        is_open
    }

    /// The next PDU, a response capsule.
    ///
    /// # Panics
    /// When it is something else.
    pub fn completion(&mut self) -> Cqe {
        self.receive().expect("an answer").cqe()
    }

    /// The next PDU, an R2T.
    ///
    /// # Panics
    /// When it is something else.
    pub fn r2t(&mut self) -> R2t {
        self.receive().expect("an R2T").r2t()
    }

    /// The first `count` bytes of what comes, and no more.
    ///
    /// # Panics
    /// When fewer come.
    pub fn take(&mut self, count: usize) -> Vec<u8> {
        let mut bytes = vec![0; count];
        assert!(self.fill(&mut bytes), "the connection ended");
        bytes
    }

    /// Leave.
    ///
    /// # Panics
    /// When the target does not close the connection in a long time.
    pub fn end(mut self, end: End) {
        match end {
            End::Close => {}
            End::Reset => {
                rustix::net::sockopt::set_socket_linger(&self.socket, Some(Duration::ZERO)).expect("set");
            }
            End::Fin => {
                // The target may have closed it before.
                let _ = self.socket.shutdown(Shutdown::Write);
                let mut rest = vec![0; 64 << 10];
                while self.fill(&mut rest) {}
            }
        }
    }

    /// All of `bytes`; false when the connection ends before.
    fn fill(&mut self, bytes: &mut [u8]) -> bool {
        match self.socket.read_exact(bytes) {
            Ok(()) => true,
            Err(error) => {
                let is_late = matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut);
                assert!(!is_late, "nothing came in {LONG:?}");
                false
            }
        }
    }
}

/// A command capsule, with data in it or none.
///
/// # Panics
/// Never: its data is small.
#[must_use]
pub fn capsule(sqe: Sqe, data: &[u8]) -> Vec<u8> {
    let data_bytes = u32::try_from(data.len()).expect("small");
    let sqe = if data.is_empty() { sqe } else { sqe.with_sgl(Sgl::in_capsule(data_bytes)) };
    let pdu = CapsuleCmd::new(sqe, 0, Extent::new(72, data_bytes, false, false, 0));
    [pdu.as_bytes(), data].concat()
}

/// A command whose data of `bytes` bytes the transport moves.
#[must_use]
pub fn with_transport_data(sqe: Sqe, bytes: u32) -> Vec<u8> {
    capsule(sqe.with_sgl(Sgl::transport(bytes)), &[])
}

/// The capsule of a Connect, all of it.
#[must_use]
pub fn connect_capsule(qid: u16, cntlid: u16) -> Vec<u8> {
    connect_capsule_to(&target(([127, 0, 0, 1], 0).into()).nqn, qid, cntlid, 0)
}

/// The same to this subsystem, with this keep-alive time-out.
///
/// # Panics
/// Never: its data is small.
#[must_use]
pub fn connect_capsule_to(subsystem: &Nqn, qid: u16, cntlid: u16, kato_ms: u32) -> Vec<u8> {
    let host = target(([127, 0, 0, 1], 0).into()).host;
    let data = ConnectData::new(host.id, cntlid, subsystem, &host.nqn);
    let attributes = ConnectAttributes::new().with_disable_sq_flow_control(true);
    capsule(Sqe::connect(0, qid, SQSIZE_Z, kato_ms, attributes), data.as_bytes())
}

/// The data that an R2T asks for, as one PDU.
///
/// # Panics
/// When `data` is shorter than what was asked for.
#[must_use]
pub fn h2c_data(r2t: &R2t, data: &[u8]) -> Vec<u8> {
    let (offset, bytes) = (r2t.r2to.get(), r2t.r2tl.get());
    let extent = Extent::new(24, bytes, false, false, 0);
    let pdu = H2cData::new(r2t.cccid.get(), r2t.ttag.get(), offset, bytes, LAST_PDU, extent);
    let begin = usize::try_from(offset).expect("small");
    let end = begin + usize::try_from(bytes).expect("small");
    [pdu.as_bytes(), &data[begin..end]].concat()
}
