//! Private data of RDMA connection manager requests, accepts and rejects (NVMe RDMA Transport 1.0, "RDMA_CM
//! Private Data").

use zerocopy::FromBytes;
use zerocopy::little_endian::U16;

/// RECFMT: Record Format, the only one that NVMe RDMA Transport 1.0 defines.
pub const RECFMT: u16 = 0;

/// Size of [`CmRequest`] and [`CmAccept`] in bytes.
pub const PRIVATE_BYTES: usize = 32;

/// Size of [`CmReject`] in bytes.
pub const REJECT_BYTES: usize = 4;

wire! {
    /// RDMA_CM_REQUEST private data, sent by the host.
    pub struct CmRequest[PRIVATE_BYTES] {
        /// RECFMT: Record Format; see [`RECFMT`].
        recfmt @ 0: U16,
        /// QID: Queue ID of the Connect command that follows; 0 is the admin queue.
        qid @ 2: U16,
        /// HRQSIZE: Host RDMA QP Receive Queue Size, in entries; *not* zero-based.
        hrqsize @ 4: U16,
        /// HSQSIZE: Host RDMA QP Send Queue Size, in entries, zero-based.
        hsqsize_z @ 6: U16,
        /// CNTLID: Controller ID of an I/O queue; 0 for the admin queue and from hosts that do not set the
        /// field.
        cntlid @ 8: U16,
        reserved @ 10: [u8; 22],
    }
}

impl CmRequest {
    /// Creates a request with HRQSIZE and HSQSIZE for `entries` (1 to 65,535) receive and send entries.
    #[must_use]
    pub fn new(qid: u16, entries: u16, cntlid: u16) -> Self {
        Self {
            recfmt: U16::new(RECFMT),
            qid: U16::new(qid),
            hrqsize: U16::new(entries),
            hsqsize_z: U16::new(entries.saturating_sub(1)),
            cntlid: U16::new(cntlid),
            ..Self::default()
        }
    }

    /// Reads the private data of a request. Bytes after the first 32 (padding of the connection manager) are
    /// ignored.
    ///
    /// # Errors
    /// STS for the reject: `INVALID_LEN` for fewer than 32 bytes, `INVALID_RECFMT` for an unknown RECFMT.
    pub fn parse(bytes: &[u8]) -> Result<Self, CmStatus> {
        let (request, _) = Self::read_from_prefix(bytes).map_err(|_| CmStatus::INVALID_LEN)?;
        match request.recfmt.get() {
            RECFMT => Ok(request),
            _ => Err(CmStatus::INVALID_RECFMT),
        }
    }

    /// Returns QID: Queue ID; 0 is the admin queue.
    #[must_use]
    pub fn qid(&self) -> u16 {
        self.qid.get()
    }

    /// Returns the receive queue entries of the host: HRQSIZE, *not* zero-based.
    #[must_use]
    pub fn host_receives(&self) -> u16 {
        self.hrqsize.get()
    }

    /// Returns the send queue entries of the host, 1 to 65,536: HSQSIZE plus one.
    #[must_use]
    pub fn host_sends(&self) -> u32 {
        u32::from(self.hsqsize_z.get()) + 1
    }

    /// Returns CNTLID: Controller ID; 0 for the admin queue and from hosts that do not set the field.
    #[must_use]
    pub fn cntlid(&self) -> u16 {
        self.cntlid.get()
    }
}

wire! {
    /// RDMA_CM_ACCEPT private data, sent by the controller.
    pub struct CmAccept[PRIVATE_BYTES] {
        /// RECFMT: Record Format; see [`RECFMT`].
        recfmt @ 0: U16,
        /// CRQSIZE: Controller RDMA QP Receive Queue Size, in entries.
        crqsize @ 2: U16,
        reserved @ 4: [u8; 28],
    }
}

impl CmAccept {
    /// Creates an accept; `crqsize` is in entries.
    #[must_use]
    pub fn new(crqsize: u16) -> Self {
        Self { recfmt: U16::new(RECFMT), crqsize: U16::new(crqsize), ..Self::default() }
    }

    /// Reads the private data of an accept; `None` if it has fewer than 32 bytes or an unknown RECFMT.
    #[must_use]
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let (accept, _) = Self::read_from_prefix(bytes).ok()?;
        (accept.recfmt.get() == RECFMT).then_some(accept)
    }

    /// Returns CRQSIZE: Controller RDMA QP Receive Queue Size, in entries.
    #[must_use]
    pub fn crqsize(&self) -> u16 {
        self.crqsize.get()
    }
}

wire! {
    /// RDMA_CM_REJECT private data, sent by the controller.
    pub struct CmReject[REJECT_BYTES] {
        /// RECFMT: Record Format; see [`RECFMT`].
        recfmt @ 0: U16,
        /// STS: Status; see [`CmStatus`].
        sts @ 2: U16,
    }
}

impl CmReject {
    /// Creates a reject with `status` as STS.
    #[must_use]
    pub fn new(status: CmStatus) -> Self {
        Self { recfmt: U16::new(RECFMT), sts: U16::new(status.0) }
    }

    /// Reads the private data of a reject; `None` if it has fewer than 4 bytes or an unknown RECFMT. A reject
    /// by the connection manager itself (no listener) has no private data.
    #[must_use]
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let (reject, _) = Self::read_from_prefix(bytes).ok()?;
        (reject.recfmt.get() == RECFMT).then_some(reject)
    }

    /// Returns STS: Status, the reason of the reject.
    #[must_use]
    pub fn status(&self) -> CmStatus {
        CmStatus(self.sts.get())
    }
}

open_enum! {
    /// STS: Status of a [`CmReject`] (NVMe RDMA Transport 1.0, status codes of a reject).
    pub struct CmStatus: u16 {
        /// The private data is too short.
        INVALID_LEN = 1,
        /// The controller does not support RECFMT.
        INVALID_RECFMT = 2,
        /// QID is out of range.
        INVALID_QID = 3,
        /// HSQSIZE is out of range.
        INVALID_HSQSIZE = 4,
        /// HRQSIZE is out of range.
        INVALID_HRQSIZE = 5,
        /// The controller has no resources for another connection.
        NO_RESOURCES = 6,
        /// Inbound RDMA READ Queue Depth is out of range.
        INVALID_IRD = 7,
        /// Outbound RDMA READ Queue Depth is out of range.
        INVALID_ORD = 8,
        /// The subsystem has no controller with this CNTLID.
        INVALID_CNTLID = 9,
    }
}

impl CmStatus {
    /// Returns a text for logs and errors, with the value in parentheses if it has a constant.
    #[must_use]
    pub const fn reason(self) -> &'static str {
        match self {
            Self::INVALID_LEN => "invalid length of the private data (1)",
            Self::INVALID_RECFMT => "invalid RECFMT (2)",
            Self::INVALID_QID => "invalid QID (3)",
            Self::INVALID_HSQSIZE => "invalid HSQSIZE: host send queue entries (4)",
            Self::INVALID_HRQSIZE => "invalid HRQSIZE: host receive queue entries (5)",
            Self::NO_RESOURCES => "no resources (6)",
            Self::INVALID_IRD => "invalid IRD: inbound RDMA READ queue depth (7)",
            Self::INVALID_ORD => "invalid ORD: outbound RDMA READ queue depth (8)",
            Self::INVALID_CNTLID => "invalid CNTLID (9)",
            _ => "an unknown status code",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use zerocopy::IntoBytes;

    #[test]
    fn a_request_has_its_sizes_where_linux_puts_them_and_hsqsize_from_zero() {
        let request = CmRequest::new(0x0102, 0x0304, 0x0506);
        let mut bytes = [0; PRIVATE_BYTES];
        bytes[..10].copy_from_slice(&[0, 0, 2, 1, 4, 3, 3, 3, 6, 5]);
        assert_eq!(request.as_bytes(), bytes);
        let back = CmRequest::parse(&bytes).unwrap();
        assert_eq!(
            (back.qid(), back.host_receives(), back.host_sends(), back.cntlid()),
            (258, 772, 772, 1286)
        );
        let admin = CmRequest::new(0, 32, 0);
        assert_eq!(admin.as_bytes()[..10], [0, 0, 0, 0, 32, 0, 31, 0, 0, 0]);
        let most = CmRequest { hsqsize_z: U16::new(u16::MAX), ..admin };
        assert_eq!(most.host_sends(), 65_536);
    }

    #[test]
    fn a_request_may_be_padded_but_not_cut_and_has_one_format() {
        let request = CmRequest::new(1, 128, 7);
        let mut padded = [0; 56];
        padded[..PRIVATE_BYTES].copy_from_slice(request.as_bytes());
        assert_eq!(CmRequest::parse(&padded), Ok(request));
        assert_eq!(CmRequest::parse(&padded[..31]), Err(CmStatus::INVALID_LEN));
        assert_eq!(CmRequest::parse(&[]), Err(CmStatus::INVALID_LEN));
        padded[0] = 1;
        assert_eq!(CmRequest::parse(&padded), Err(CmStatus::INVALID_RECFMT));
    }

    #[test]
    fn an_answer_has_its_receive_entries_at_byte_2() {
        let accept = CmAccept::new(0x0102);
        let mut bytes = [0; PRIVATE_BYTES];
        bytes[..4].copy_from_slice(&[0, 0, 2, 1]);
        assert_eq!(accept.as_bytes(), bytes);
        assert_eq!(CmAccept::parse(&bytes).map(|accept| accept.crqsize()), Some(0x0102));
        assert_eq!(CmAccept::parse(&bytes[..31]), None);
        bytes[1] = 1;
        assert_eq!(CmAccept::parse(&bytes), None);
    }

    #[test]
    fn a_refusal_is_four_bytes_and_every_code_has_its_number() {
        assert_eq!(CmReject::new(CmStatus::INVALID_HSQSIZE).as_bytes(), [0, 0, 4, 0]);
        let parse = |bytes: &[u8]| CmReject::parse(bytes).map(|reject| reject.status());
        assert_eq!(parse(&[0, 0, 6, 0, 0, 0]), Some(CmStatus::NO_RESOURCES));
        assert_eq!(parse(&[0, 0, 6]), None);
        assert_eq!(parse(&[1, 0, 6, 0]), None);
        assert_eq!(parse(&[0, 0, 2, 1]), Some(CmStatus(0x0102)));
        for (code, status) in (1..).zip([
            CmStatus::INVALID_LEN,
            CmStatus::INVALID_RECFMT,
            CmStatus::INVALID_QID,
            CmStatus::INVALID_HSQSIZE,
            CmStatus::INVALID_HRQSIZE,
            CmStatus::NO_RESOURCES,
            CmStatus::INVALID_IRD,
            CmStatus::INVALID_ORD,
            CmStatus::INVALID_CNTLID,
        ]) {
            assert_eq!(status.0, code);
            assert!(status.reason().ends_with(&std::format!("({code})")), "{}", status.reason());
        }
        assert_eq!(CmStatus(77).reason(), "an unknown status code");
    }
}
