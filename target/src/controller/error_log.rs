//! The error log (log page 01h): the newest failed commands on any queue, with the field at fault.

use std::collections::VecDeque;

use nvme_spec::log::{ErrorLocation, ErrorLogEntry, TransportType};
use nvme_spec::status::Status;
use nvme_spec::zerocopy::IntoBytes;
use nvme_spec::zerocopy::little_endian::{U16, U32, U64};

use super::limits::ERROR_ENTRIES;
use super::{Kind, Window};

/// A command that failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ErrorRecord {
    /// QID of the command's submission queue; 0: the admin queue.
    pub sqid: u16,
    /// CID of the command.
    pub cid: u16,
    /// Status of the completion, without the More bit.
    pub status: Status,
    /// Byte offset of the field at fault in the submission queue entry; `None`: no field is at fault.
    pub field: Option<u16>,
    /// SLBA field of a command on an I/O queue; 0 for the admin queue.
    pub lba: u64,
    /// NSID of the command.
    pub nsid: u32,
}

/// A ring of the newest entries.
#[derive(Debug)]
pub(super) struct ErrorLog {
    /// Oldest first.
    ring: VecDeque<ErrorRecord>,
    /// Total of the records passed to `push`; also the error count of the newest entry.
    pub(super) count: u64,
}

/// Bytes of an entry of the log page.
const ENTRY_BYTES: u64 = 64;

/// Bytes of the log page.
pub(super) const BYTES: u64 = ERROR_ENTRIES as u64 * ENTRY_BYTES;

/// Bytes of memory of a full log.
pub(super) fn memory_bytes() -> usize {
    ERROR_ENTRIES * size_of::<ErrorRecord>()
}

impl ErrorLog {
    /// Allocates an empty log; no memory for a discovery controller, which has no error log.
    pub(super) fn new(kind: Kind) -> ErrorLog {
        let capacity = match kind {
            Kind::Io => ERROR_ENTRIES,
            Kind::Discovery => 0,
        };
        ErrorLog { ring: VecDeque::with_capacity(capacity), count: 0 }
    }

    /// Counts and adds a record; drops the oldest from a full log. False: a discovery controller only counts.
    pub(super) fn push(&mut self, record: ErrorRecord) -> bool {
        self.count = self.count.saturating_add(1);
        if self.ring.capacity() == 0 {
            return false;
        }
        if self.ring.len() >= ERROR_ENTRIES {
            self.ring.pop_front();
        }
        self.ring.push_back(record);
        true
    }

    /// Writes the log page, newest entry first.
    pub(super) fn write(&self, window: &mut Window<'_>, transport: TransportType) {
        let mut at = 0;
        let mut number = self.count;
        for record in self.ring.iter().rev() {
            if window.shows(at, ENTRY_BYTES) {
                window.put(at, entry(record, number, transport).as_bytes());
            }
            at += ENTRY_BYTES;
            number = number.saturating_sub(1);
        }
    }
}

fn entry(record: &ErrorRecord, number: u64, transport: TransportType) -> ErrorLogEntry {
    let byte = record.field.and_then(|field| u8::try_from(field).ok());
    let location = byte.map_or(ErrorLocation::NONE, |byte| ErrorLocation::new().with_byte(byte).into_bits());
    ErrorLogEntry {
        error_count: U64::new(number),
        sqid: U16::new(record.sqid),
        cid: U16::new(record.cid),
        status: U16::new(record.status.to_wire(false)),
        location: U16::new(location),
        lba: U64::new(record.lba),
        nsid: U32::new(record.nsid),
        trtype: transport,
        ..ErrorLogEntry::default()
    }
}
