//! Admin commands without a module of their own: Abort, Asynchronous Event Request, Keep Alive (Base 2.0
//! sections 5.1, 5.2 and 5.18).

use bitfield_struct::bitfield;

use crate::log::LogId;
use crate::opcode::AdminOpcode;
use crate::sqe::Sqe;

/// Dword 10 of Abort.
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct AbortCdw10 {
    /// SQID: the queue of the command.
    pub sqid: u16,
    /// CID of the command.
    pub cid: u16,
}

wire_bits!(AbortCdw10 => U32);

/// Dword 0 of the completion of an Abort: bit 0 says that the command was *not* aborted.
pub const ABORT_NOT_DONE: u32 = 1 << 0;

view! {
    /// Abort: asks that a command be aborted (Base 2.0 section 5.1).
    pub struct Abort(sqe) {
        /// SQID of the command to abort.
        sqid: u16 = AbortCdw10::from(sqe.cdw10).sqid(),
        /// CID of the command to abort.
        cid: u16 = AbortCdw10::from(sqe.cdw10).cid(),
    }
}

/// Dword 0 of the completion of an Asynchronous Event Request (Base 2.0 section 5.2.1).
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct AsyncEvent {
    /// Type; see [`AsyncEventType`].
    #[bits(3)]
    pub event_type: u8,
    #[bits(5)]
    __: u8,
    /// Information; its meaning depends on the type.
    pub information: u8,
    /// The log page that tells more, and that is read to have further events of this kind.
    pub log_page: u8,
    __: u8,
}

impl AsyncEvent {
    /// An event.
    #[must_use]
    pub const fn of(event_type: AsyncEventType, information: u8, log_page: LogId) -> Self {
        Self::new()
            .with_event_type(event_type.0 & 0b111)
            .with_information(information)
            .with_log_page(log_page.0)
    }

    /// A notice.
    #[must_use]
    pub const fn notice(notice: AsyncNotice, log_page: LogId) -> Self {
        Self::of(AsyncEventType::NOTICE, notice.0, log_page)
    }

    /// Type.
    #[must_use]
    pub const fn kind(self) -> AsyncEventType {
        AsyncEventType(self.event_type())
    }

    /// The notice, if it is one.
    #[must_use]
    pub fn as_notice(self) -> Option<AsyncNotice> {
        (self.kind() == AsyncEventType::NOTICE).then_some(AsyncNotice(self.information()))
    }

    /// The log page.
    #[must_use]
    pub const fn log(self) -> LogId {
        LogId(self.log_page())
    }
}

open_enum! {
    /// Type of an asynchronous event.
    pub struct AsyncEventType: u8 {
        /// Error status; see [`AsyncError`].
        ERROR = 0,
        /// SMART or health status; see [`AsyncHealth`].
        HEALTH = 1,
        /// Notice; see [`AsyncNotice`].
        NOTICE = 2,
        IMMEDIATE = 3,
        IO_COMMAND = 6,
        VENDOR = 7,
    }
}

open_enum! {
    /// Information of an error event.
    pub struct AsyncError: u8 {
        /// A doorbell that does not exist was written.
        INVALID_DOORBELL_REGISTER = 0,
        /// A doorbell was written with a wrong value.
        INVALID_DOORBELL_VALUE = 1,
    }
}

open_enum! {
    /// Information of a health event.
    pub struct AsyncHealth: u8 {
        RELIABILITY = 0,
        /// Temperature threshold.
        TEMPERATURE = 1,
        /// Spare below threshold.
        SPARE = 2,
    }
}

open_enum! {
    /// Information of a notice.
    pub struct AsyncNotice: u8 {
        /// Attached namespace attribute changed: log page 04h.
        NAMESPACE_CHANGED = 0x00,
        /// Firmware activation starts: log page 03h.
        FIRMWARE_ACTIVATION_STARTING = 0x01,
        /// Telemetry log changed: log page 08h.
        TELEMETRY_CHANGED = 0x02,
        /// Discovery log page changed: log page 70h.
        DISCOVERY_LOG_CHANGED = 0xf0,
    }
}

/// Builders for hosts.
impl Sqe {
    /// Abort of a command.
    #[must_use]
    pub fn abort(cid: u16, sqid: u16, cid_to_abort: u16) -> Self {
        let mut sqe = Self::new(AdminOpcode::ABORT.0, cid, 0);
        sqe.cdw10 = AbortCdw10::new().with_sqid(sqid).with_cid(cid_to_abort).into();
        sqe
    }

    /// Asynchronous Event Request.
    #[must_use]
    pub fn async_event_request(cid: u16) -> Self {
        Self::new(AdminOpcode::ASYNC_EVENT_REQUEST.0, cid, 0)
    }

    /// Keep Alive.
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
