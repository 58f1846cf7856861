//! Connecting the I/O queue of `--bare`: TCP, ICReq and ICResp, Connect. Blocks; each step has a deadline.

use std::time::Duration;

use initiator::nvme_spec::fabrics::{ConnectAttributes, ConnectData, ConnectResult};
use initiator::nvme_spec::status::Status;
use initiator::nvme_spec::tcp::{
    CapsuleCmd, CapsuleResp, CommonHeader, DigestBits, Extent, IcReq, IcResp, MAXH2CDATA_MIN, PDA_MAX, PFV,
    PduType,
};
use initiator::nvme_spec::zerocopy::{self, IntoBytes};
use initiator::nvme_spec::{Sgl, Sqe};
use initiator::{Clock, Error, Loss, Nanos, Options, Target, Violation};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use spindle_nvme_initiator as initiator;
use spindle_reactor::net::{Received, Sent, Socket};

/// Congestion controls without packet pacing, in order of preference, the same as those of the initiator. The
/// first that the kernel accepts is used.
const CONGESTION: [&str; 2] = ["cubic", "reno"];
/// Names of the steps, for errors.
const ICREQ: &str = "ICReq";
const CONNECT: &str = "Connect (I/O queue)";
pub(super) const CAPSULE_HLEN: u8 = 72;

/// A connected I/O queue, and what the target's ICResp says of its PDUs.
#[derive(Debug)]
pub(super) struct Connection {
    pub(super) socket: Socket,
    /// CPDA: alignment of data in PDUs, in dwords, zero-based.
    pub(super) cpda: u8,
    /// MAXH2CDATA: most bytes of data in one H2CData.
    pub(super) h2c_bytes_max: u32,
}

/// Connects I/O queue 1 of the controller `cntlid` for `depth` commands.
pub(super) fn connect(
    target: &Target,
    cntlid: u16,
    depth: u16,
    options: &Options,
) -> Result<Connection, Error> {
    let address = target.address;
    let socket = Socket::connect(address, options.connect_timeout)
        .map_err(|source| Error::Connect { address, source })?;
    // Errors are ignored, as in the initiator: without an option the connection is slower, but correct.
    let _ = socket.set_nodelay(true);
    let _ = socket.set_reset_on_close(true);
    let _ = CONGESTION.into_iter().find(|name| socket.set_congestion(name).is_ok());

    let mut step = Step::begin(&socket, ICREQ, options.connect_timeout);
    step.send(IcReq::new(0, DigestBits::new(), 0).as_bytes())?;
    let mut response = [0; size_of::<IcResp>()];
    step.receive(&mut response)?;
    let response: IcResp = zerocopy::transmute!(response);
    check(&response).map_err(|violation| step.lost(Loss::Violation(violation)))?;
    let (cpda, h2c_bytes_max) = (response.cpda, response.maxh2cdata.get());

    let mut step = Step::begin(&socket, CONNECT, options.connect_answer_timeout);
    step.send(&connect_capsule(target, cntlid, depth, cpda))?;
    let mut answer = [0; size_of::<CapsuleResp>()];
    step.receive(&mut answer)?;
    check_answer(&zerocopy::transmute!(answer), cntlid)?;
    Ok(Connection { socket, cpda, h2c_bytes_max })
}

fn check(response: &IcResp) -> Result<(), Violation> {
    let header = &response.header;
    let pdu_type = header.pdu_type;
    if pdu_type != PduType::ICRESP {
        return Err(Violation::PduType(pdu_type));
    }
    if header.hlen != 128 {
        return Err(Violation::Hlen { pdu_type, hlen: header.hlen, allowed: 128 });
    }
    if header.plen() != 128 {
        return Err(Violation::Plen { pdu_type, plen: header.plen(), relation: "exactly", allowed: 128 });
    }
    if response.pfv.get() != PFV {
        return Err(Violation::Pfv(response.pfv.get()));
    }
    if response.cpda > PDA_MAX {
        return Err(Violation::Alignment(response.cpda));
    }
    if response.dgst != 0 {
        return Err(Violation::Dgst { dgst: response.dgst, asked: 0 });
    }
    let bytes = response.maxh2cdata.get();
    if bytes < MAXH2CDATA_MIN || !bytes.is_multiple_of(4) {
        return Err(Violation::Maxh2cdata(bytes));
    }
    Ok(())
}

/// Connect in a capsule with its data, which a capsule of a Fabrics command always holds.
fn connect_capsule(target: &Target, cntlid: u16, depth: u16, cpda: u8) -> Vec<u8> {
    // Without SQ flow control a successful read may complete by C2HData with SUCCESS.
    let attributes = ConnectAttributes::new().with_disable_sq_flow_control(true);
    let data = ConnectData::new(target.host.id, cntlid, &target.nqn, &target.host.nqn);
    let bytes = u32::try_from(size_of::<ConnectData>()).unwrap_or(0);
    // SQSIZE is zero-based: entries less one. That is the depth, as one entry stays empty.
    let sqe = Sqe::connect(0, 1, depth, 0, attributes).with_sgl(Sgl::in_capsule(bytes));
    let extent = Extent::new(CAPSULE_HLEN, bytes, false, false, cpda);
    let mut capsule = CapsuleCmd::new(sqe, 0, extent).as_bytes().to_vec();
    capsule.resize(extent.pdo.into(), 0);
    capsule.extend_from_slice(data.as_bytes());
    capsule
}

fn check_answer(answer: &CapsuleResp, cntlid: u16) -> Result<(), Error> {
    let CapsuleResp { header, cqe } = answer;
    if *header != CommonHeader::new(PduType::CAPSULE_RESP, 0, 24, 0, 24) {
        return Err(Error::Answer { step: CONNECT, what: "the answer is not a response capsule" });
    }
    if cqe.cid() != 0 {
        return Err(Error::Answer { step: CONNECT, what: "it answers another command" });
    }
    let status = cqe.status();
    if !status.is_success() {
        let is_invalid = status.code() == Status::CONNECT_INVALID_PARAMETERS;
        let invalid = is_invalid.then(|| cqe.result_u32().into());
        return Err(Error::Status { step: CONNECT, status, invalid });
    }
    let result = ConnectResult::from_bits(cqe.result_u32());
    if result.authentication_transaction_required() || result.secure_channel_required() {
        return Err(Error::Authentication);
    }
    if result.cntlid() != cntlid {
        return Err(Error::Answer { step: CONNECT, what: "it names another controller" });
    }
    Ok(())
}

struct Step<'a> {
    socket: &'a Socket,
    name: &'static str,
    timeout: Duration,
    deadline: Nanos,
}

impl<'a> Step<'a> {
    fn begin(socket: &'a Socket, name: &'static str, timeout: Duration) -> Step<'a> {
        Step { socket, name, timeout, deadline: Clock::now() + timeout.into() }
    }

    fn lost(&self, loss: Loss) -> Error {
        Error::Lost { step: self.name, loss }
    }

    fn send(&mut self, mut bytes: &[u8]) -> Result<(), Error> {
        while !bytes.is_empty() {
            match self.socket.send(bytes) {
                Sent::Bytes(sent) => bytes = &bytes[sent..],
                Sent::Full => self.wait(PollFlags::OUT)?,
                Sent::Failed(errno) => return Err(self.lost(Loss::Socket(errno))),
            }
        }
        Ok(())
    }

    fn receive(&mut self, to: &mut [u8]) -> Result<(), Error> {
        let mut at = 0;
        while at < to.len() {
            match self.socket.recv(&mut to[at..]) {
                Received::Bytes(received) => at += received,
                Received::Empty => self.wait(PollFlags::IN)?,
                Received::Closed => return Err(self.lost(Loss::ByPeer)),
                Received::Failed(errno) => return Err(self.lost(Loss::Socket(errno))),
            }
        }
        Ok(())
    }

    /// Sleeps until the socket is ready; may return early. Fails after the deadline.
    fn wait(&self, flags: PollFlags) -> Result<(), Error> {
        let now = Clock::now();
        if now >= self.deadline {
            return Err(Error::TimedOut { step: self.name, after: self.timeout });
        }
        let left = Timespec::try_from((self.deadline - now).as_duration()).ok();
        // After a signal or an error the next call on the socket tells what there is.
        let _ = poll(&mut [PollFd::new(self.socket, flags)], left.as_ref());
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use initiator::nvme_spec::Cqe;

    use super::*;

    #[test]
    fn a_wrong_icresp_is_refused() {
        let right = IcResp::new(0, DigestBits::new(), 4096);
        assert_eq!(check(&right), Ok(()));
        let digests = DigestBits::new().with_data(true);
        for (wrong, part) in [
            (IcResp::new(32, DigestBits::new(), 4096), "alignment 32"),
            (IcResp::new(0, digests, 4096), "DGST"),
            (IcResp::new(0, DigestBits::new(), 4092), "4092"),
            (IcResp::new(0, DigestBits::new(), 4098), "4098"),
            (IcResp { pfv: 1.into(), ..right }, "PFV 1"),
            (IcResp { header: CommonHeader { hlen: 24, ..right.header }, ..right }, "HLEN 24"),
            (IcResp { header: CommonHeader { plen: 24.into(), ..right.header }, ..right }, "PLEN 24"),
            (IcResp { header: CommonHeader { pdu_type: PduType::R2T, ..right.header }, ..right }, "R2T"),
        ] {
            let message = check(&wrong).expect_err(part).to_string();
            assert!(message.contains(part), "{part} in: {message}");
        }
    }

    #[test]
    fn a_wrong_answer_to_connect_is_refused() {
        let answer = |cid, status, result| CapsuleResp::new(Cqe::new(cid, status).with_result(result), false);
        let right = answer(0, Status::SUCCESS, 7);
        assert!(check_answer(&right, 7).is_ok());
        let plen = CommonHeader { plen: 28.into(), ..right.header };
        for (wrong, part) in [
            (answer(1, Status::SUCCESS, 7), "another command"),
            (answer(0, Status::SUCCESS, 8), "another controller"),
            (answer(0, Status::SUCCESS, 7 | 1 << 17), "authentication"),
            (answer(0, Status::CONNECT_INVALID_PARAMETERS, 44), "SQSIZE"),
            (CapsuleResp { header: plen, ..right }, "not a response capsule"),
        ] {
            let message = check_answer(&wrong, 7).expect_err(part).to_string();
            assert!(message.contains(part), "{part} in: {message}");
        }
    }

    #[test]
    fn data_of_connect_begins_where_the_target_wants_it() {
        let nqn = initiator::nvme_spec::Nqn::new("nqn.2026-01.io.spindle:a").expect("a name");
        let target = Target {
            transport: initiator::TransportKind::Tcp,
            address: "127.0.0.1:4420".parse().expect("an address"),
            nqn,
            host: initiator::Host::from_uuid([7; 16]),
        };
        for (cpda, pdo) in [(0, 72), (1, 72), (3, 80), (PDA_MAX, 128)] {
            let capsule = connect_capsule(&target, 1, 32, cpda);
            assert_eq!((usize::from(capsule[3]), capsule.len()), (pdo, pdo + 1024));
            assert_eq!(capsule[pdo..pdo + 16], [7; 16], "HOSTID");
        }
    }
}
