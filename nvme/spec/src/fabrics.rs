//! Fabrics commands: Connect, Property Get and Set, Disconnect (Base 2.0 section 6).
//!
//! The opcode is 7Fh; FCTYPE is byte 4 (the low byte of NSID); command fields begin at byte 40 (dword 10).

use bitfield_struct::bitfield;
use zerocopy::little_endian::{U16, U32};

use crate::nqn::{Nqn, NqnError};
use crate::opcode::{FABRICS, FabricsType};
use crate::sqe::Sqe;

/// CNTLID of a Connect that requests any controller (dynamic controller model, Base 2.0 section 6.3).
pub const CNTLID_DYNAMIC: u16 = 0xffff;
/// Largest CNTLID of a controller; FFF0h and above are reserved (Base 2.0 section 5.17.2.1).
pub const CNTLID_MAX: u16 = 0xffef;
/// Entries of an admin queue that every controller supports: the least value of ASQSZ in the discovery log.
/// Linux hosts always request as many. CAP.MQES is the limit of I/O queues and does not apply.
pub const ADMIN_QUEUE_ENTRIES: u16 = 32;

/// Dword 10 of Connect.
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct ConnectCdw10 {
    /// RECFMT: Record Format of the command and its data; 0.
    pub recfmt: u16,
    /// QID: Queue ID; 0 is the admin queue.
    pub qid: u16,
}

/// Dword 11 of Connect.
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct ConnectCdw11 {
    /// SQSIZE: Submission Queue Size in entries, zero-based.
    pub sqsize_z: u16,
    /// CATTR: Connect Attributes; see [`ConnectAttributes`].
    pub cattr: u8,
    __: u8,
}

/// CATTR: Connect Attributes (Base 2.0 figure "Connect Command").
#[bitfield(u8)]
#[derive(PartialEq, Eq)]
pub struct ConnectAttributes {
    #[bits(2)]
    __: u8,
    /// Bit 2, Disable SQ Flow Control: the controller does not maintain SQHD.
    pub disable_sq_flow_control: bool,
    #[bits(5)]
    __: u8,
}

wire_bits!(ConnectCdw10 => U32, ConnectCdw11 => U32);

view! {
    /// Connect: creates a queue and, for QID 0, an association (Base 2.0 section 6.3).
    pub struct Connect(sqe) {
        /// RECFMT: Record Format; only 0 is defined.
        recfmt: u16 = ConnectCdw10::from(sqe.cdw10).recfmt(),
        /// QID: Queue ID; 0 is the admin queue.
        qid: u16 = ConnectCdw10::from(sqe.cdw10).qid(),
        /// SQSIZE: Submission Queue Size in entries, zero-based; 0 is invalid.
        sqsize_z: u16 = ConnectCdw11::from(sqe.cdw11).sqsize_z(),
        /// CATTR: Connect Attributes.
        cattr: ConnectAttributes = ConnectAttributes::from_bits(ConnectCdw11::from(sqe.cdw11).cattr()),
        /// KATO: Keep Alive Timeout in milliseconds; 0 disables keep alive. Valid only on the admin queue.
        kato: u32 = sqe.cdw12(),
    }
}

wire! {
    /// The data of Connect (Base 2.0 figure "Connect Command Data Format").
    pub struct ConnectData[1024] {
        /// HOSTID: Host Identifier, 128 bits.
        hostid @ 0: [u8; 16],
        /// CNTLID: Controller ID; [`CNTLID_DYNAMIC`] on the admin queue requests any controller.
        cntlid @ 16: U16,
        reserved18 @ 18: [u8; 238],
        /// SUBNQN: NVM Subsystem NQN, NUL terminated.
        subnqn @ 256: [u8; 256],
        /// HOSTNQN: Host NQN, NUL terminated.
        hostnqn @ 512: [u8; 256],
        reserved768 @ 768: [u8; 256],
    }
}

impl ConnectData {
    /// Creates the data of a Connect; `cntlid` is in host byte order.
    #[must_use]
    pub fn new(hostid: [u8; 16], cntlid: u16, subnqn: &Nqn, hostnqn: &Nqn) -> Self {
        Self {
            hostid,
            cntlid: U16::new(cntlid),
            subnqn: subnqn.to_field(),
            hostnqn: hostnqn.to_field(),
            ..Self::default()
        }
    }

    /// Returns SUBNQN: NVM Subsystem NQN.
    ///
    /// # Errors
    /// [`NqnError`] when the field does not contain a valid NQN.
    pub fn subnqn(&self) -> Result<Nqn, NqnError> {
        Nqn::from_field(&self.subnqn)
    }

    /// Returns HOSTNQN: Host NQN.
    ///
    /// # Errors
    /// [`NqnError`] when the field does not contain a valid NQN.
    pub fn hostnqn(&self) -> Result<Nqn, NqnError> {
        Nqn::from_field(&self.hostnqn)
    }
}

/// Dword 0 of the completion of a Connect that succeeded (Base 2.0 figure "Connect Response").
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct ConnectResult {
    /// CNTLID: ID of the controller that the queue belongs to.
    pub cntlid: u16,
    __: bool,
    /// AUTHREQ.ATR (bit 17): in-band authentication (DH-HMAC-CHAP) is required.
    pub authentication_transaction_required: bool,
    /// AUTHREQ.ASCR (bit 18): authentication and secure channel are required.
    pub secure_channel_required: bool,
    #[bits(13)]
    __: u16,
}

/// Dword 0 of the completion of a Connect with [`Status::CONNECT_INVALID_PARAMETERS`]: location of the
/// invalid parameter.
///
/// [`Status::CONNECT_INVALID_PARAMETERS`]: crate::status::Status::CONNECT_INVALID_PARAMETERS
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConnectInvalid {
    /// IPO: Invalid Parameter Offset in bytes.
    pub offset: u16,
    /// IATTR bit 0: the offset is in the Connect data, otherwise in the submission queue entry.
    pub in_data: bool,
}

/// Bit layout of [`ConnectInvalid`].
#[bitfield(u32)]
struct ConnectInvalidBits {
    ipo: u16,
    in_data: bool,
    #[bits(15)]
    __: u16,
}

impl ConnectInvalid {
    /// RECFMT in the submission queue entry.
    pub const RECFMT: Self = Self { offset: 40, in_data: false };
    /// QID in the submission queue entry.
    pub const QID: Self = Self { offset: 42, in_data: false };
    /// SQSIZE in the submission queue entry.
    pub const SQSIZE: Self = Self { offset: 44, in_data: false };
    /// CATTR in the submission queue entry.
    pub const CATTR: Self = Self { offset: 46, in_data: false };
    /// KATO in the submission queue entry.
    pub const KATO: Self = Self { offset: 48, in_data: false };
    /// HOSTID in the Connect data.
    pub const HOSTID: Self = Self { offset: 0, in_data: true };
    /// CNTLID in the Connect data.
    pub const CNTLID: Self = Self { offset: 16, in_data: true };
    /// SUBNQN in the Connect data.
    pub const SUBNQN: Self = Self { offset: 256, in_data: true };
    /// HOSTNQN in the Connect data.
    pub const HOSTNQN: Self = Self { offset: 512, in_data: true };
}

impl From<ConnectInvalid> for u32 {
    fn from(invalid: ConnectInvalid) -> Self {
        ConnectInvalidBits::new().with_ipo(invalid.offset).with_in_data(invalid.in_data).into_bits()
    }
}

impl From<u32> for ConnectInvalid {
    fn from(dword: u32) -> Self {
        let bits = ConnectInvalidBits::from_bits(dword);
        Self { offset: bits.ipo(), in_data: bits.in_data() }
    }
}

/// Dword 10 of Property Get and Property Set.
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct PropertyCdw10 {
    /// ATTRIB.SIZE: 0 for 4 bytes, 1 for 8 bytes, others reserved.
    #[bits(3)]
    pub size: u8,
    #[bits(29)]
    __: u32,
}

wire_bits!(PropertyCdw10 => U32);

view! {
    /// Property Get or Property Set (Base 2.0 sections 6.4 and 6.5). Dwords 0 and 1 of the completion of a
    /// Property Get contain the value.
    pub struct Property(sqe) {
        /// ATTRIB.SIZE: size of the property in bytes, 4 or 8; `None` for a reserved value.
        bytes: Option<u8> = match PropertyCdw10::from(sqe.cdw10).size() {
            0 => Some(4),
            1 => Some(8),
            _ => None,
        },
        /// OFST: Offset of the property in bytes; see [`register`](crate::register).
        offset: u32 = sqe.cdw11(),
        /// VALUE of a Property Set: the low 4 of 8 bytes.
        value_u32: u32 = sqe.cdw12(),
    }
}

/// Builders for hosts.
impl Sqe {
    /// Builds a Fabrics command with the given FCTYPE; all other command fields are zero.
    #[must_use]
    pub fn fabrics(cid: u16, fctype: FabricsType) -> Self {
        Self::new(FABRICS, cid, u32::from(fctype.0))
    }

    /// Builds Connect with RECFMT 0; its data is a [`ConnectData`]. `sqsize_z` is in entries, zero-based;
    /// `kato_ms` is in milliseconds, 0 disables keep alive.
    #[must_use]
    pub fn connect(cid: u16, qid: u16, sqsize_z: u16, kato_ms: u32, cattr: ConnectAttributes) -> Self {
        let mut sqe = Self::fabrics(cid, FabricsType::CONNECT);
        sqe.cdw10 = ConnectCdw10::new().with_qid(qid).into();
        sqe.cdw11 = ConnectCdw11::new().with_sqsize_z(sqsize_z).with_cattr(cattr.into_bits()).into();
        sqe.cdw12 = U32::new(kato_ms);
        sqe
    }

    /// Builds Property Get of the property at byte `offset`: 8 bytes if `size8`, otherwise 4.
    #[must_use]
    pub fn property_get(cid: u16, size8: bool, offset: u32) -> Self {
        let mut sqe = Self::fabrics(cid, FabricsType::PROPERTY_GET);
        sqe.cdw10 = PropertyCdw10::new().with_size(u8::from(size8)).into();
        sqe.cdw11 = U32::new(offset);
        sqe
    }

    /// Builds Property Set of the property at byte `offset`: 8 bytes if `size8`, otherwise 4.
    #[must_use]
    pub fn property_set(cid: u16, size8: bool, offset: u32, value: u64) -> Self {
        let mut sqe = Self::fabrics(cid, FabricsType::PROPERTY_SET);
        sqe.cdw10 = PropertyCdw10::new().with_size(u8::from(size8)).into();
        sqe.cdw11 = U32::new(offset);
        sqe.set_cdw12_64(value);
        sqe
    }

    /// Builds Disconnect, which deletes the I/O queue on which the command is sent.
    #[must_use]
    pub fn disconnect(cid: u16) -> Self {
        Self::fabrics(cid, FabricsType::DISCONNECT)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sqe::Psdt;
    use zerocopy::{FromBytes, IntoBytes};

    #[test]
    fn connect_is_laid_out_as_linux_sends_it() {
        let cattr = ConnectAttributes::new().with_disable_sq_flow_control(true);
        let sqe = Sqe::connect(0xabcd, 3, 127, 120_000, cattr);
        assert_eq!(sqe.as_bytes()[..8], [0x7f, 0x40, 0xcd, 0xab, 0x01, 0, 0, 0]);
        assert_eq!(sqe.as_bytes()[40..52], [0, 0, 3, 0, 127, 0, 4, 0, 0xc0, 0xd4, 1, 0]);
        let back = Sqe::read_from_bytes(sqe.as_bytes()).unwrap();
        assert_eq!((back.fctype(), back.psdt()), (FabricsType::CONNECT, Psdt::SGL));
        let view = Connect::new(&back);
        assert_eq!((view.recfmt(), view.qid(), view.sqsize_z()), (0, 3, 127));
        assert_eq!((view.cattr(), view.kato()), (cattr, 120_000));
        assert_eq!(cattr.into_bits(), 1 << 2);
    }

    #[test]
    fn connect_data_names_both_parties() {
        let hostnqn =
            Nqn::new("nqn.2014-08.org.nvmexpress:uuid:0b8a7f70-3b2c-4a7e-9f60-8f4d2f1f1b11").unwrap();
        let data = ConnectData::new([7; 16], CNTLID_DYNAMIC, &Nqn::discovery(), &hostnqn);
        assert_eq!(
            data.as_bytes()[..18],
            *b"\x07\x07\x07\x07\x07\x07\x07\x07\x07\x07\x07\x07\x07\x07\x07\x07\xff\xff"
        );
        assert_eq!(data.as_bytes()[256..260], *b"nqn.");
        let back = ConnectData::read_from_bytes(data.as_bytes()).unwrap();
        assert_eq!((back.subnqn(), back.hostnqn()), (Ok(Nqn::discovery()), Ok(hostnqn)));
        assert_eq!(ConnectData::default().hostnqn(), Err(NqnError::Empty));
    }

    #[test]
    fn properties_have_offset_before_value() {
        let sqe = Sqe::property_set(1, false, crate::register::CC, 0x0046_0001);
        assert_eq!(sqe.as_bytes()[4], 0);
        assert_eq!(sqe.as_bytes()[40..56], [0, 0, 0, 0, 0x14, 0, 0, 0, 1, 0, 0x46, 0, 0, 0, 0, 0]);
        let view = Property::new(&sqe);
        assert_eq!((view.bytes(), view.offset(), view.value_u32()), (Some(4), 0x14, 0x0046_0001));
        let sqe = Sqe::property_get(1, true, crate::register::CAP);
        assert_eq!(sqe.as_bytes()[4], 4);
        assert_eq!(sqe.as_bytes()[40..48], [1, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(Property::new(&sqe).bytes(), Some(8));
        let mut sqe = sqe;
        sqe.cdw10 = U32::new(2);
        assert_eq!(Property::new(&sqe).bytes(), None);
        assert_eq!(Sqe::disconnect(1).as_bytes()[4], 8);
    }

    #[test]
    fn the_results_of_connect() {
        let invalid = ConnectInvalid::SUBNQN;
        assert_eq!(u32::from(invalid), 0x0001_0100);
        assert_eq!(ConnectInvalid::from(0x0001_0100), invalid);
        assert_eq!(u32::from(ConnectInvalid::SQSIZE), 44);
        let result = ConnectResult::new().with_cntlid(0x0102).with_authentication_transaction_required(true);
        assert_eq!(result.into_bits(), 0x0002_0102, "Linux: NVME_CONNECT_AUTHREQ_ATR is bit 17");
        let result = ConnectResult::new().with_secure_channel_required(true);
        assert_eq!(result.into_bits(), 0x0004_0000, "Linux: NVME_CONNECT_AUTHREQ_ASCR is bit 18");
    }
}
