//! Get Log Page (Base 2.0 section 5.16): which pages there are, which part the host asked for, and what
//! reading clears.

use nvme_spec::identify::Csi;
use nvme_spec::log::{
    CHANGED_NAMESPACE_LIST_BYTES, FirmwareSlotLog, GetLogPage, LogId, SupportedLogPage, SupportedLogPages,
    TransportType,
};
use nvme_spec::nqn::padded_ascii;
use nvme_spec::sqe::NSID_ALL;
use nvme_spec::status::Status;
use nvme_spec::zerocopy::IntoBytes;
use spindle_transport::TransportKind;

use super::changed::ChangedNamespaces;
use super::limits::FIRMWARE;
use super::{Context, Controller, Failure, Kind, Need, Window, effects, error_log, field, identify, smart};
use crate::discovery::DiscoveryLog;

/// Pages of an I/O controller.
const IO_PAGES: [LogId; 8] = [
    LogId::SUPPORTED_LOG_PAGES,
    LogId::ERROR,
    LogId::SMART,
    LogId::FIRMWARE_SLOT,
    LogId::CHANGED_NAMESPACES,
    LogId::COMMAND_EFFECTS,
    LogId::FEATURE_EFFECTS,
    LogId::MI_COMMAND_EFFECTS,
];

/// Pages of a discovery controller.
const DISCOVERY_PAGES: [LogId; 2] = [LogId::SUPPORTED_LOG_PAGES, LogId::DISCOVERY];

/// Offsets and lengths are in dwords.
const DWORD_BYTES: u64 = 4;

impl Controller {
    fn pages(&self) -> &'static [LogId] {
        match self.kind {
            Kind::Io => &IO_PAGES,
            Kind::Discovery => &DISCOVERY_PAGES,
        }
    }

    pub(super) fn check_log(&self, cx: &Context<'_>, log: GetLogPage<'_>) -> Result<(), Failure> {
        let lid = log.lid();
        if !self.pages().contains(&lid) {
            return Err(Failure::of(Status::INVALID_LOG_PAGE.dnr(), Some(field::CDW10)));
        }
        let nsid = log.sqe().nsid();
        if nsid != 0 && nsid != NSID_ALL {
            // Only the SMART log has a namespace's own (LPA bit 0).
            if lid != LogId::SMART {
                return Err(Failure::invalid(field::NSID));
            }
            identify::find_active(self.subsystem(cx)?, nsid)?;
        }
        if lid == LogId::COMMAND_EFFECTS && log.csi() != Csi::NVM {
            return Err(Failure::invalid(field::CDW14));
        }
        // OT 1 counts the offset in entries: of no page here.
        if log.ot() {
            return Err(Failure::invalid(field::CDW14));
        }
        if !log.lpo().is_multiple_of(DWORD_BYTES) || log.lpo() > self.log_bytes(cx, lid) {
            return Err(Failure::invalid(field::CDW12));
        }
        self.need_log(log).map(drop)
    }

    pub(super) fn need_log(&self, log: GetLogPage<'_>) -> Result<Need, Failure> {
        let bytes = u32::try_from(log.bytes()).ok().filter(|bytes| *bytes <= self.transfer_bytes);
        bytes.map(|bytes| Need::ToHost { bytes }).ok_or(Failure::invalid(field::CDW10_HIGH))
    }

    /// How long a page is; what is read beyond it is zero.
    fn log_bytes(&self, cx: &Context<'_>, lid: LogId) -> u64 {
        match lid {
            LogId::ERROR => error_log::BYTES,
            LogId::SMART | LogId::FIRMWARE_SLOT => 512,
            LogId::CHANGED_NAMESPACES => CHANGED_NAMESPACE_LIST_BYTES as u64,
            LogId::COMMAND_EFFECTS | LogId::MI_COMMAND_EFFECTS => 4096,
            LogId::DISCOVERY => DiscoveryLog::new(cx.snapshot, cx.peer, &self.shared.host_nqn).bytes(),
            // Supported log pages, feature effects: a dword for each identifier.
            _ => 1024,
        }
    }

    pub(super) fn get_log(
        &mut self,
        cx: &Context<'_>,
        log: GetLogPage<'_>,
        data: &mut [u8],
    ) -> Result<(), Failure> {
        let mut window = Window::new(log.lpo(), data);
        match log.lid() {
            LogId::SUPPORTED_LOG_PAGES => window.put(0, supported(self.pages()).as_bytes()),
            LogId::ERROR => self.errors.write(&mut window, transport_type(self.transport)),
            LogId::SMART => {
                let log = smart::smart(self, cx, log.sqe().nsid())?;
                window.put(0, log.as_bytes());
            }
            LogId::FIRMWARE_SLOT => window.put(0, firmware().as_bytes()),
            LogId::CHANGED_NAMESPACES => self.changed.write(&mut window),
            LogId::COMMAND_EFFECTS => window.put(0, effects::commands().as_bytes()),
            LogId::FEATURE_EFFECTS => effects::write_features(self.kind, &mut window),
            LogId::DISCOVERY => {
                DiscoveryLog::new(cx.snapshot, cx.peer, &self.shared.host_nqn).write(&mut window);
            }
            // MI command effects: none is supported, all zero.
            _ => {}
        }
        if !log.rae() {
            self.events.on_log_read(log.lid());
            if log.lid() == LogId::CHANGED_NAMESPACES {
                self.changed = ChangedNamespaces::default();
            }
        }
        Ok(())
    }
}

fn supported(pages: &[LogId]) -> SupportedLogPages {
    let mut log = SupportedLogPages::default();
    for page in pages {
        log.set(*page, SupportedLogPage::new().with_supported(true));
    }
    log
}

fn firmware() -> FirmwareSlotLog {
    let mut log = FirmwareSlotLog { afi: 1, ..FirmwareSlotLog::default() };
    if let Some(slot) = log.frs.first_mut() {
        *slot = padded_ascii(FIRMWARE);
    }
    log
}

/// TRTYPE of a transport.
pub(crate) fn transport_type(transport: TransportKind) -> TransportType {
    match transport {
        TransportKind::Tcp => TransportType::TCP,
        TransportKind::Rdma => TransportType::RDMA,
    }
}
