//! Fabrics commands: Connect, Property Get and Set, Disconnect, Authentication (Base 2.0 section 6).
//!
//! Opcode 7Fh; byte 4 (the low byte of NSID) is FCTYPE; the rest begins at byte 40 (dword 10).

use bitfield_struct::bitfield;
use zerocopy::little_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::nqn::{Nqn, NqnError};
use crate::opcode::{FABRICS, FabricsType};
use crate::sqe::Sqe;

/// CNTLID of a Connect that asks for any controller (dynamic controller model, Base 2.0 section 6.3).
pub const CNTLID_DYNAMIC: u16 = 0xffff;
/// CNTLID of a Connect that asks for any *static* controller (Base 2.0 section 6.3).
pub const CNTLID_STATIC_ANY: u16 = 0xfffe;
/// Largest controller identifier that a controller may have; FFF0h and above are reserved (Base 2.0 section
/// 5.17.2.1).
pub const CNTLID_MAX: u16 = 0xffef;
/// Bytes of the data of a Connect.
pub const CONNECT_DATA_BYTES: u32 = 1024;

/// Dword 10 of Connect.
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct ConnectCdw10 {
    /// RECFMT: format of the command and its data; 0.
    pub recfmt: u16,
    /// QID: 0 for the admin queue.
    pub qid: u16,
}

/// Dword 11 of Connect.
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct ConnectCdw11 {
    /// SQSIZE: queue entries, one less than the count.
    pub sqsize_z: u16,
    /// CATTR; see [`ConnectAttributes`].
    pub cattr: u8,
    __: u8,
}

/// CATTR: what the host asks of the queue (Base 2.0 figure "Connect Command").
#[bitfield(u8)]
#[derive(PartialEq, Eq)]
pub struct ConnectAttributes {
    /// Priority class, where weighted round robin is in use; 0 is urgent.
    #[bits(2)]
    pub priority: u8,
    /// SQ flow control is off: SQHD is not maintained.
    pub disable_sq_flow_control: bool,
    /// Individual I/O queue deletion (Disconnect) is supported.
    pub individual_queue_deletion: bool,
    #[bits(4)]
    __: u8,
}

wire_bits!(ConnectCdw10 => U32, ConnectCdw11 => U32);

/// CATTR bit 2: SQ flow control is off.
pub const CATTR_DISABLE_SQ_FLOW_CONTROL: u8 = 1 << 2;
/// CATTR bit 3: Disconnect of single I/O queues is supported.
pub const CATTR_INDIVIDUAL_QUEUE_DELETION: u8 = 1 << 3;

view! {
    /// Connect: makes a queue and, on queue 0, the association (Base 2.0 section 6.3).
    pub struct Connect;
}

impl Connect<'_> {
    /// RECFMT.
    #[must_use]
    pub fn recfmt(self) -> u16 {
        ConnectCdw10::from(self.0.cdw10).recfmt()
    }

    /// QID; 0 is the admin queue.
    #[must_use]
    pub fn qid(self) -> u16 {
        ConnectCdw10::from(self.0.cdw10).qid()
    }

    /// SQSIZE as it stands; 0 is not allowed.
    #[must_use]
    pub fn sqsize_z(self) -> u16 {
        ConnectCdw11::from(self.0.cdw11).sqsize_z()
    }

    /// SQSIZE with its zero base taken away: 1 to 65,536 entries.
    #[must_use]
    pub fn queue_entries(self) -> u32 {
        u32::from(self.sqsize_z()) + 1
    }

    /// CATTR.
    #[must_use]
    pub fn cattr(self) -> ConnectAttributes {
        ConnectAttributes::from_bits(ConnectCdw11::from(self.0.cdw11).cattr())
    }

    /// KATO in milliseconds; 0 turns keep alive off. Meaningful on the admin queue.
    #[must_use]
    pub fn kato(self) -> u32 {
        self.0.cdw12()
    }
}

/// The data of Connect (Base 2.0 figure "Connect Command Data Format").
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
pub struct ConnectData {
    /// HOSTID: 128-bit host identifier.
    pub hostid: [u8; 16],
    /// CNTLID; FFFFh on the admin queue asks for any controller.
    pub cntlid: U16,
    /// Reserved.
    pub reserved18: [u8; 238],
    /// SUBNQN, NUL terminated.
    pub subnqn: [u8; 256],
    /// HOSTNQN, NUL terminated.
    pub hostnqn: [u8; 256],
    /// Reserved.
    pub reserved768: [u8; 256],
}

layout!(ConnectData, 1024, {
    hostid @ 0, cntlid @ 16, reserved18 @ 18, subnqn @ 256, hostnqn @ 512, reserved768 @ 768,
});

impl ConnectData {
    /// The data of a Connect.
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

    /// SUBNQN, checked.
    ///
    /// # Errors
    /// The field is not a name.
    pub fn subnqn(&self) -> Result<Nqn, NqnError> {
        Nqn::from_field(&self.subnqn)
    }

    /// HOSTNQN, checked.
    ///
    /// # Errors
    /// The field is not a name.
    pub fn hostnqn(&self) -> Result<Nqn, NqnError> {
        Nqn::from_field(&self.hostnqn)
    }
}

/// Dword 0 of the completion of a Connect that succeeded (Base 2.0 figure "Connect Response").
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct ConnectResult {
    /// CNTLID of the controller.
    pub cntlid: u16,
    /// AUTHREQ.ATR: authentication in band (DH-HMAC-CHAP) is required.
    pub authentication_transaction_required: bool,
    /// AUTHREQ.ASCR: authentication and a secure channel are required.
    pub secure_channel_required: bool,
    #[bits(14)]
    __: u16,
}

/// Dword 0 of the completion of a Connect with [`Status::CONNECT_INVALID_PARAMETERS`]: which field is
/// wrong.
///
/// [`Status::CONNECT_INVALID_PARAMETERS`]: crate::status::Status::CONNECT_INVALID_PARAMETERS
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConnectInvalid {
    /// IPO: byte offset of the field.
    pub offset: u16,
    /// IATTR bit 0: the offset is in the data, not in the command.
    pub in_data: bool,
}

/// [`ConnectInvalid`] as bits.
#[bitfield(u32)]
struct ConnectInvalidBits {
    ipo: u16,
    in_data: bool,
    #[bits(15)]
    __: u16,
}

impl ConnectInvalid {
    /// RECFMT of the command.
    pub const RECFMT: Self = Self { offset: 40, in_data: false };
    /// QID of the command.
    pub const QID: Self = Self { offset: 42, in_data: false };
    /// SQSIZE of the command.
    pub const SQSIZE: Self = Self { offset: 44, in_data: false };
    /// CATTR of the command.
    pub const CATTR: Self = Self { offset: 46, in_data: false };
    /// KATO of the command.
    pub const KATO: Self = Self { offset: 48, in_data: false };
    /// HOSTID of the data.
    pub const HOSTID: Self = Self { offset: 0, in_data: true };
    /// CNTLID of the data.
    pub const CNTLID: Self = Self { offset: 16, in_data: true };
    /// SUBNQN of the data.
    pub const SUBNQN: Self = Self { offset: 256, in_data: true };
    /// HOSTNQN of the data.
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
    /// Property Get: reads a property, a register over Fabrics (Base 2.0 section 6.4). The value comes in
    /// dwords 0 and 1.
    pub struct PropertyGet;
}

impl PropertyGet<'_> {
    /// ATTRIB, bits 2:0: 0 for 4 bytes, 1 for 8.
    #[must_use]
    pub fn attrib(self) -> u8 {
        PropertyCdw10::from(self.0.cdw10).size()
    }

    /// How many bytes are asked for; `None` where ATTRIB is reserved.
    #[must_use]
    pub fn bytes(self) -> Option<u8> {
        property_bytes(self.attrib())
    }

    /// OFST: which property; see [`register`](crate::register).
    #[must_use]
    pub fn offset(self) -> u32 {
        self.0.cdw11()
    }
}

view! {
    /// Property Set: writes a property (Base 2.0 section 6.5).
    pub struct PropertySet;
}

impl PropertySet<'_> {
    /// ATTRIB, bits 2:0: 0 for 4 bytes, 1 for 8.
    #[must_use]
    pub fn attrib(self) -> u8 {
        PropertyCdw10::from(self.0.cdw10).size()
    }

    /// How many bytes are written; `None` where ATTRIB is reserved.
    #[must_use]
    pub fn bytes(self) -> Option<u8> {
        property_bytes(self.attrib())
    }

    /// OFST: which property; see [`register`](crate::register).
    #[must_use]
    pub fn offset(self) -> u32 {
        self.0.cdw11()
    }

    /// VALUE, 8 bytes.
    #[must_use]
    pub fn value(self) -> u64 {
        u64::from(self.0.cdw12()) | u64::from(self.0.cdw13()) << 32
    }

    /// VALUE, the low 4 bytes.
    #[must_use]
    pub fn value_u32(self) -> u32 {
        self.0.cdw12()
    }
}

const fn property_bytes(attrib: u8) -> Option<u8> {
    match attrib {
        0 => Some(4),
        1 => Some(8),
        _ => None,
    }
}

view! {
    /// Disconnect: deletes this I/O queue (Base 2.0 section 6.2).
    pub struct Disconnect;
}

impl Disconnect<'_> {
    /// RECFMT; 0.
    #[must_use]
    pub fn recfmt(self) -> u16 {
        ConnectCdw10::from(self.0.cdw10).recfmt()
    }
}

/// Dword 10 of Authentication Send and Receive.
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct AuthenticationCdw10 {
    __: u8,
    /// SPSP0.
    pub spsp0: u8,
    /// SPSP1.
    pub spsp1: u8,
    /// SECP: E9h for the authentication protocols of NVMe.
    pub secp: u8,
}

wire_bits!(AuthenticationCdw10 => U32);

view! {
    /// Authentication Send or Receive (Base 2.0 sections 6.1 and following).
    pub struct Authentication;
}

impl Authentication<'_> {
    /// SPSP0.
    #[must_use]
    pub fn spsp0(self) -> u8 {
        AuthenticationCdw10::from(self.0.cdw10).spsp0()
    }

    /// SPSP1.
    #[must_use]
    pub fn spsp1(self) -> u8 {
        AuthenticationCdw10::from(self.0.cdw10).spsp1()
    }

    /// SECP.
    #[must_use]
    pub fn secp(self) -> u8 {
        AuthenticationCdw10::from(self.0.cdw10).secp()
    }

    /// TL of a Send, AL of a Receive: bytes.
    #[must_use]
    pub fn length(self) -> u32 {
        self.0.cdw11()
    }
}

/// Builders for hosts.
impl Sqe {
    /// A Fabrics command of this type.
    #[must_use]
    pub fn fabrics(cid: u16, fctype: FabricsType) -> Self {
        Self::new(FABRICS, cid, u32::from(fctype.0))
    }

    /// Connect; its data is a [`ConnectData`].
    #[must_use]
    pub fn connect(cid: u16, qid: u16, sqsize_z: u16, kato_ms: u32, cattr: ConnectAttributes) -> Self {
        let mut sqe = Self::fabrics(cid, FabricsType::CONNECT);
        sqe.cdw10 = ConnectCdw10::new().with_qid(qid).into();
        sqe.cdw11 = ConnectCdw11::new().with_sqsize_z(sqsize_z).with_cattr(cattr.into_bits()).into();
        sqe.cdw12 = U32::new(kato_ms);
        sqe
    }

    /// Property Get, of 8 bytes if `size8`, else of 4.
    #[must_use]
    pub fn property_get(cid: u16, size8: bool, offset: u32) -> Self {
        let mut sqe = Self::fabrics(cid, FabricsType::PROPERTY_GET);
        sqe.cdw10 = PropertyCdw10::new().with_size(u8::from(size8)).into();
        sqe.cdw11 = U32::new(offset);
        sqe
    }

    /// Property Set, of 8 bytes if `size8`, else of 4.
    #[must_use]
    pub fn property_set(cid: u16, size8: bool, offset: u32, value: u64) -> Self {
        let mut sqe = Self::fabrics(cid, FabricsType::PROPERTY_SET);
        sqe.cdw10 = PropertyCdw10::new().with_size(u8::from(size8)).into();
        sqe.cdw11 = U32::new(offset);
        sqe.set_cdw12_64(value);
        sqe
    }

    /// Disconnect of the queue on which it is sent.
    #[must_use]
    pub fn disconnect(cid: u16) -> Self {
        Self::fabrics(cid, FabricsType::DISCONNECT)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sqe::{DataDirection, Psdt};

    #[test]
    fn connect_is_laid_out_as_linux_sends_it() {
        let cattr = ConnectAttributes::new().with_disable_sq_flow_control(true);
        let sqe = Sqe::connect(0xabcd, 3, 127, 120_000, cattr);
        assert_eq!(sqe.as_bytes()[..8], [0x7f, 0x40, 0xcd, 0xab, 0x01, 0, 0, 0]);
        assert_eq!(sqe.as_bytes()[40..52], [0, 0, 3, 0, 127, 0, 4, 0, 0xc0, 0xd4, 1, 0]);
        let back = Sqe::read_from_bytes(sqe.as_bytes()).unwrap();
        assert_eq!((back.fctype(), back.psdt()), (FabricsType::CONNECT, Psdt::SGL));
        assert_eq!(back.data_direction(), DataDirection::HostToController);
        let view = Connect::new(&back);
        assert_eq!((view.recfmt(), view.qid(), view.sqsize_z(), view.queue_entries()), (0, 3, 127, 128));
        assert_eq!((view.cattr(), view.kato()), (cattr, 120_000));
        assert_eq!(cattr.into_bits(), CATTR_DISABLE_SQ_FLOW_CONTROL);
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
        let view = PropertySet::new(&sqe);
        assert_eq!((view.bytes(), view.offset(), view.value_u32()), (Some(4), 0x14, 0x0046_0001));
        let sqe = Sqe::property_get(1, true, crate::register::CAP);
        assert_eq!(sqe.as_bytes()[4], 4);
        assert_eq!(sqe.as_bytes()[40..48], [1, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(PropertyGet::new(&sqe).bytes(), Some(8));
        let mut sqe = sqe;
        sqe.cdw10 = U32::new(2);
        assert_eq!(PropertyGet::new(&sqe).bytes(), None);
        assert_eq!(Sqe::disconnect(1).as_bytes()[4], 8);
    }

    #[test]
    fn the_results_of_connect() {
        let invalid = ConnectInvalid::SUBNQN;
        assert_eq!(u32::from(invalid), 0x0001_0100);
        assert_eq!(ConnectInvalid::from(0x0001_0100), invalid);
        assert_eq!(u32::from(ConnectInvalid::SQSIZE), 44);
        let result = ConnectResult::new().with_cntlid(0x0102).with_authentication_transaction_required(true);
        assert_eq!(result.into_bits(), 0x0001_0102);
    }

    #[test]
    fn authentication_has_its_protocol_at_byte_43() {
        let mut sqe = Sqe::fabrics(1, FabricsType::AUTHENTICATION_SEND);
        sqe.cdw10 = AuthenticationCdw10::new().with_spsp0(1).with_spsp1(1).with_secp(0xe9).into();
        sqe.cdw11 = U32::new(0x100);
        assert_eq!(sqe.as_bytes()[40..48], [0, 1, 1, 0xe9, 0, 1, 0, 0]);
        let view = Authentication::new(&sqe);
        assert_eq!((view.secp(), view.spsp0(), view.spsp1(), view.length()), (0xe9, 1, 1, 256));
    }
}
