//! Abort, Asynchronous Event Request and Keep Alive (Base 2.0 sections 5.1, 5.2 and 5.18).

use bitfield_struct::bitfield;

use crate::log::LogId;
use crate::opcode::AdminOpcode;
use crate::sqe::Sqe;

/// Dword 10 of Abort: SQID, CID.
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct AbortCdw10 {
    /// SQID: Submission Queue Identifier of the command to abort.
    pub sqid: u16,
    /// CID: Command Identifier of the command to abort.
    pub cid: u16,
}

wire_bits!(AbortCdw10 => U32);

/// Bit 0 of dword 0 of the completion of an Abort: the command was *not* aborted.
pub const ABORT_NOT_DONE: u32 = 1 << 0;

view! {
    /// Abort: best-effort abort of one command (Base 2.0 section 5.1).
    pub struct Abort(sqe) {
        /// SQID: Submission Queue Identifier of the command to abort.
        sqid: u16 = AbortCdw10::from(sqe.cdw10).sqid(),
        /// CID: Command Identifier of the command to abort.
        cid: u16 = AbortCdw10::from(sqe.cdw10).cid(),
    }
}

/// Dword 0 of the completion of an Asynchronous Event Request (Base 2.0 section 5.2.1).
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct AsyncEvent {
    /// Asynchronous Event Type; see [`AsyncEventType`].
    #[bits(3)]
    pub event_type: u8,
    #[bits(5)]
    __: u8,
    /// Asynchronous Event Information; see [`AsyncError`], [`AsyncHealth`] and [`AsyncNotice`], depending on
    /// the type.
    pub information: u8,
    /// Log Page Identifier; reading the log page with RAE 0 clears the event and allows events of the same
    /// type.
    pub log_page: u8,
    __: u8,
}

impl AsyncEvent {
    /// Creates an event of any type; `information` depends on `event_type`.
    #[must_use]
    pub const fn of(event_type: AsyncEventType, information: u8, log_page: LogId) -> Self {
        Self::new()
            .with_event_type(event_type.0 & 0b111)
            .with_information(information)
            .with_log_page(log_page.0)
    }

    /// Creates an event of type Notice.
    #[must_use]
    pub const fn notice(notice: AsyncNotice, log_page: LogId) -> Self {
        Self::of(AsyncEventType::NOTICE, notice.0, log_page)
    }

    /// Returns the Asynchronous Event Type, bits 2:0.
    #[must_use]
    pub const fn kind(self) -> AsyncEventType {
        AsyncEventType(self.event_type())
    }

    /// Returns the information of a notice; `None` for other types.
    #[must_use]
    pub fn as_notice(self) -> Option<AsyncNotice> {
        (self.kind() == AsyncEventType::NOTICE).then_some(AsyncNotice(self.information()))
    }

    /// Returns the log page of the event; the host reads the page to clear the event.
    #[must_use]
    pub const fn log(self) -> LogId {
        LogId(self.log_page())
    }
}

open_enum! {
    /// Asynchronous Event Type.
    pub struct AsyncEventType: u8 {
        /// Error Status; information is [`AsyncError`].
        ERROR = 0,
        /// SMART / Health Status; information is [`AsyncHealth`].
        HEALTH = 1,
        /// Information is [`AsyncNotice`].
        NOTICE = 2,
        IMMEDIATE = 3,
        IO_COMMAND = 6,
        VENDOR = 7,
    }
}

open_enum! {
    /// Asynchronous Event Information of an Error Status event.
    pub struct AsyncError: u8 {
        /// The host wrote the doorbell of a queue that does not exist.
        INVALID_DOORBELL_REGISTER = 0,
        /// The host wrote an invalid value to a doorbell.
        INVALID_DOORBELL_VALUE = 1,
    }
}

open_enum! {
    /// Asynchronous Event Information of a SMART / Health Status event.
    pub struct AsyncHealth: u8 {
        RELIABILITY = 0,
        /// A temperature reached its threshold.
        TEMPERATURE = 1,
        /// Available spare is below its threshold.
        SPARE = 2,
    }
}

open_enum! {
    /// Asynchronous Event Information of a Notice event.
    pub struct AsyncNotice: u8 {
        /// Namespace Attribute Changed; log page 04h.
        NAMESPACE_CHANGED = 0x00,
        /// Firmware Activation Starting; log page 03h.
        FIRMWARE_ACTIVATION_STARTING = 0x01,
        /// Telemetry Log Changed; log page 08h.
        TELEMETRY_CHANGED = 0x02,
        /// Discovery Log Page Change; log page 70h.
        DISCOVERY_LOG_CHANGED = 0xf0,
    }
}

/// Builders for hosts.
impl Sqe {
    /// Builds Abort of the command `cid_to_abort` on submission queue `sqid`.
    #[must_use]
    pub fn abort(cid: u16, sqid: u16, cid_to_abort: u16) -> Self {
        let mut sqe = Self::new(AdminOpcode::ABORT.0, cid, 0);
        sqe.cdw10 = AbortCdw10::new().with_sqid(sqid).with_cid(cid_to_abort).into();
        sqe
    }

    /// Builds Asynchronous Event Request, which completes when an event occurs.
    #[must_use]
    pub fn async_event_request(cid: u16) -> Self {
        Self::new(AdminOpcode::ASYNC_EVENT_REQUEST.0, cid, 0)
    }

    /// Builds Keep Alive, which restarts the keep alive timer of the controller.
    #[must_use]
    pub fn keep_alive(cid: u16) -> Self {
        Self::new(AdminOpcode::KEEP_ALIVE.0, cid, 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use zerocopy::IntoBytes;

    #[test]
    fn abort_names_queue_and_command_in_dword_10() {
        let sqe = Sqe::abort(9, 3, 0x1234);
        assert_eq!(sqe.as_bytes()[..4], [8, 0x40, 9, 0]);
        assert_eq!(sqe.as_bytes()[40..44], [3, 0, 0x34, 0x12]);
        assert_eq!((Abort::new(&sqe).sqid(), Abort::new(&sqe).cid()), (3, 0x1234));
    }

    #[test]
    fn notices_are_the_words_that_linux_decodes() {
        let event = AsyncEvent::notice(AsyncNotice::DISCOVERY_LOG_CHANGED, LogId::DISCOVERY);
        assert_eq!(event.into_bits(), 0x0070_f002);
        assert_eq!(
            AsyncEvent::notice(AsyncNotice::NAMESPACE_CHANGED, LogId::CHANGED_NAMESPACES).into_bits(),
            0x0004_0002
        );
        assert_eq!(
            (event.as_notice(), event.log()),
            (Some(AsyncNotice::DISCOVERY_LOG_CHANGED), LogId::DISCOVERY)
        );
        assert_eq!(AsyncEvent::of(AsyncEventType::HEALTH, 1, LogId::SMART).as_notice(), None);
    }
}
