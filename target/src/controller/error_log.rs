//! The error log (log page 01h): the newest failures on any queue of the controller, with the field to blame.

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
    /// Its queue.
    pub sqid: u16,
    /// Its identifier.
    pub cid: u16,
    /// Its status.
    pub status: Status,
    /// Byte offset of the field to blame in its submission queue entry.
    pub field: Option<u16>,
    /// First block that it failed on; 0 where it has none.
    pub lba: u64,
    /// Its namespace.
    pub nsid: u32,
}

/// A ring of the newest entries.
#[derive(Debug)]
pub(super) struct ErrorLog {
    /// Oldest first.
    ring: VecDeque<ErrorRecord>,
    /// Entries ever made; the newest's number.
    pub(super) count: u64,
}

/// Bytes of an entry.
const ENTRY_BYTES: u64 = 64;

/// Bytes of the log.
pub(super) const BYTES: u64 = ERROR_ENTRIES as u64 * ENTRY_BYTES;

/// Memory of a full log.
pub(super) fn memory_bytes() -> usize {
    ERROR_ENTRIES * size_of::<ErrorRecord>()
}

impl ErrorLog {
    /// An empty log. All memory is taken here; a discovery controller has no error log and takes none.
    pub(super) fn new(kind: Kind) -> ErrorLog {
        let capacity = match kind {
            Kind::Io => ERROR_ENTRIES,
            Kind::Discovery => 0,
        };
        ErrorLog { ring: VecDeque::with_capacity(capacity), count: 0 }
    }

    /// False when it is counted but not kept.
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

    /// The log, newest first.
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
