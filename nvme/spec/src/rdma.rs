//! The private data of the RDMA connection manager (NVMe RDMA Transport 1.0, "RDMA_CM Private Data"): what a
//! host says with its connection request, and what the controller answers.

use zerocopy::FromBytes;
use zerocopy::little_endian::U16;

/// RECFMT: the only format there is.
pub const RECFMT: u16 = 0;

/// Bytes of [`CmRequest`] and [`CmAccept`].
pub const PRIVATE_BYTES: usize = 32;

/// Bytes of [`CmReject`].
pub const REJECT_BYTES: usize = 4;

/// Entries of the admin queue that a Linux host asks for, and the most that a Linux target takes.
pub const ADMIN_QUEUE_ENTRIES: u16 = 32;

wire! {
    /// RDMA_CM_REQUEST private data: what the host is going to connect.
    pub struct CmRequest[PRIVATE_BYTES] {
        /// RECFMT: format of this; see [`RECFMT`].
        recfmt @ 0: U16,
        /// QID: the queue that Connect will name; 0 is the admin queue.
        qid @ 2: U16,
        /// HRQSIZE: receive entries of the host's RDMA queue pair, counted from one.
        hrqsize @ 4: U16,
        /// HSQSIZE: send entries of the host's RDMA queue pair; counted from zero.
        hsqsize_z @ 6: U16,
        /// CNTLID: the controller, of an I/O queue; 0 on an admin queue and from hosts that do not know it.
        cntlid @ 8: U16,
        /// Reserved.
        reserved @ 10: [u8; 22],
    }
}

impl CmRequest {
    /// The request for a queue of `entries` (1 to 65,535): as many receives, and as many sends.
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

    /// From the private data of a request, which the connection manager may have filled up with zeroes.
    ///
    /// # Errors
    /// The code to reject it with.
    pub fn parse(bytes: &[u8]) -> Result<Self, CmStatus> {
        let (request, _) = Self::read_from_prefix(bytes).map_err(|_| CmStatus::INVALID_LEN)?;
        match request.recfmt.get() {
            RECFMT => Ok(request),
            _ => Err(CmStatus::INVALID_RECFMT),
        }
    }

    /// QID.
    #[must_use]
    pub fn qid(&self) -> u16 {
        self.qid.get()
    }

    /// How many completions the host can receive at a time: HRQSIZE.
    #[must_use]
    pub fn host_receives(&self) -> u16 {
        self.hrqsize.get()
    }

    /// How many capsules the host may send at a time: HSQSIZE with its zero base taken away, 1 to 65,536.
    #[must_use]
    pub fn host_sends(&self) -> u32 {
        u32::from(self.hsqsize_z.get()) + 1
    }

    /// CNTLID.
    #[must_use]
    pub fn cntlid(&self) -> u16 {
        self.cntlid.get()
    }
}

wire! {
    /// RDMA_CM_ACCEPT private data: the controller takes the connection.
    pub struct CmAccept[PRIVATE_BYTES] {
        /// RECFMT: format of this; see [`RECFMT`].
        recfmt @ 0: U16,
        /// CRQSIZE: receive entries of the controller's RDMA queue pair.
        crqsize @ 2: U16,
        /// Reserved.
        reserved @ 4: [u8; 28],
    }
}

impl CmAccept {
    /// The answer with so many receive entries.
    #[must_use]
    pub fn new(crqsize: u16) -> Self {
        Self { recfmt: U16::new(RECFMT), crqsize: U16::new(crqsize), ..Self::default() }
    }

    /// From the private data of an answer; `None` when it is too short or of another format.
    #[must_use]
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let (accept, _) = Self::read_from_prefix(bytes).ok()?;
        (accept.recfmt.get() == RECFMT).then_some(accept)
    }

    /// CRQSIZE.
    #[must_use]
    pub fn crqsize(&self) -> u16 {
        self.crqsize.get()
    }
}

wire! {
    /// RDMA_CM_REJECT private data: the controller does not take the connection.
    pub struct CmReject[REJECT_BYTES] {
        /// RECFMT: format of this; see [`RECFMT`].
        recfmt @ 0: U16,
        /// STS: why; see [`CmStatus`].
        sts @ 2: U16,
    }
}

impl CmReject {
    /// The refusal for this reason.
    #[must_use]
    pub fn new(status: CmStatus) -> Self {
        Self { recfmt: U16::new(RECFMT), sts: U16::new(status.0) }
    }

    /// From the private data of a refusal; `None` when it is too short or of another format. A connection
    /// manager that refuses by itself (it has no listener) gives none.
    #[must_use]
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let (reject, _) = Self::read_from_prefix(bytes).ok()?;
        (reject.recfmt.get() == RECFMT).then_some(reject)
    }

    /// STS.
    #[must_use]
    pub fn status(&self) -> CmStatus {
        CmStatus(self.sts.get())
    }
}

open_enum! {
    /// STS of [`CmReject`] (NVMe RDMA Transport 1.0, status codes of a reject).
    pub struct CmStatus: u16 {
        /// The private data is too short.
        INVALID_LEN = 1,
        /// RECFMT is not one that the controller knows.
        INVALID_RECFMT = 2,
        /// QID is out of range.
        INVALID_QID = 3,
        /// HSQSIZE is out of range.
        INVALID_HSQSIZE = 4,
        /// HRQSIZE is out of range.
        INVALID_HRQSIZE = 5,
        /// The controller has no resources for another connection.
        NO_RESOURCES = 6,
        /// The inbound RDMA READ queue is not what the controller asks for.
        INVALID_IRD = 7,
        /// The outbound RDMA READ queue is not what the controller asks for.
        INVALID_ORD = 8,
        /// CNTLID is not one of the subsystem's.
        INVALID_CNTLID = 9,
    }
}

impl CmStatus {
    /// The reason in words.
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
        let admin = CmRequest::new(0, ADMIN_QUEUE_ENTRIES, 0);
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
