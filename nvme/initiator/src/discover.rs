//! The discovery log: the subsystems and addresses that a target offers to this host.
//!
//! The log is read in parts. If GENCTR or NUMREC has changed meanwhile, the whole log is read again (Base 2.0
//! section 5.16.1.23).

use std::net::SocketAddr;

use nvme_spec::Nqn;
use nvme_spec::log::{DISCOVERY_ENTRY_BYTES, DiscoveryLogEntry, DiscoveryLogHeader, LogId};
use nvme_spec::status::Status;
use nvme_spec::zerocopy::FromBytes;
use spindle_nvme_transport::TransportKind;

use crate::controller::{Controller, parsed};
use crate::error::Error;
use crate::options::{Host, Options, Target};

/// Most attempts to read a changing log.
const READS_MAX: u32 = 10;
/// Entries per Get Log Page: 16 KiB.
const ENTRIES_PER_READ: u64 = 16;
/// Most entries accepted: bounds the memory that a faulty or malicious target can make this host allocate.
const ENTRIES_MAX: u64 = 65_536;

const STEP: &str = "discovery log";
const ENTRY: u64 = DISCOVERY_ENTRY_BYTES as u64;

/// A complete discovery log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DiscoveryLog {
    /// GENCTR of the log: changes with each change of the entries.
    pub generation: u64,
    /// Entries in the target's order.
    pub entries: Vec<DiscoveryLogEntry>,
}

/// Reads the discovery log of the discovery controller at `address`, as host `host`. Blocks.
pub fn discover(
    transport: TransportKind,
    address: SocketAddr,
    host: &Host,
    options: &Options,
) -> Result<DiscoveryLog, Error> {
    let target = Target { transport, address, nqn: Nqn::discovery(), host: host.clone() };
    // Without Keep Alive: the connection is short.
    let mut controller = Controller::connect(&target, &Options { keep_alive_ms: 0, ..options.clone() })?;
    let log = controller.discovery_log()?;
    // The log is complete; a failed shutdown does not matter.
    let _ = controller.shutdown();
    Ok(log)
}

impl Controller {
    /// Reads the log, which re-enables the event for the next change. Fails if the log changes during each of
    /// [`READS_MAX`] reads.
    fn discovery_log(&mut self) -> Result<DiscoveryLog, Error> {
        for _ in 0..READS_MAX {
            match self.read_discovery_log() {
                Ok(Some(log)) => return Ok(log),
                Ok(None) => {}
                Err(Error::Status { status, .. }) if status.code() == Status::DISCOVERY_RESTART => {}
                Err(error) => return Err(error),
            }
        }
        Err(Error::Answer { step: STEP, what: "it changes faster than it can be read" })
    }

    /// Reads the log once; `None`: the log has changed during the read.
    fn read_discovery_log(&mut self) -> Result<Option<DiscoveryLog>, Error> {
        let before = self.discovery_header()?;
        if before.recfmt.get() != 0 {
            return Err(Error::Answer { step: STEP, what: "RECFMT is not 0" });
        }
        let count = before.numrec.get();
        Error::in_range("NUMREC of the discovery log", count, 0_u64, ENTRIES_MAX)?;
        let mut entries = Vec::new();
        let mut at = 0;
        while at < count {
            let step = (count - at).min(ENTRIES_PER_READ);
            let bytes = u32::try_from(step * ENTRY).unwrap_or(u32::MAX);
            let data = self.log_page(LogId::DISCOVERY, 0, (at + 1) * ENTRY, bytes, true)?;
            entries.extend(data.chunks_exact(DISCOVERY_ENTRY_BYTES).filter_map(|entry| {
                // Cannot fail: the length is right, and every byte pattern is a valid entry.
                DiscoveryLogEntry::read_from_bytes(entry).ok()
            }));
            at += step;
        }
        let after = self.discovery_header()?;
        let is_same = before.genctr == after.genctr && before.numrec == after.numrec;
        Ok(is_same.then(|| DiscoveryLog { generation: before.genctr.get(), entries }))
    }

    fn discovery_header(&mut self) -> Result<DiscoveryLogHeader, Error> {
        let bytes = u32::try_from(DISCOVERY_ENTRY_BYTES).unwrap_or(0);
        let data = self.log_page(LogId::DISCOVERY, 0, 0, bytes, false)?;
        parsed(STEP, &data)
    }
}
