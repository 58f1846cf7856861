//! Get Log Page (Base 2.0 section 5.16): the checks, the requested part of a page ([`Window`]), and the
//! events that a read clears. Also the pages Supported Log Pages (00h), Firmware Slot (03h), and command and
//! feature effects (05h, 12h).

use std::sync::Arc;

use nvme_spec::cluster::{JOIN, LEAVE, NEXT, READ_AND_REGISTER, REGISTER};
use nvme_spec::identify::Csi;
use nvme_spec::log::{
    CHANGED_NAMESPACE_LIST_BYTES, CommandEffect, CommandEffects, FirmwareSlotLog, GetLogPage, LogId,
    SupportedLogPage, SupportedLogPages,
};
use nvme_spec::nqn::padded_ascii;
use nvme_spec::opcode::{AdminOpcode, IoOpcode};
use nvme_spec::optimistic::{ATTACH, GET_REFERENCES};
use nvme_spec::sqe::NSID_ALL;
use nvme_spec::status::Status;
use nvme_spec::vendor::END_FORMER_ASSOCIATIONS;
use nvme_spec::zerocopy::IntoBytes;
use nvme_spec::zerocopy::little_endian::U32;

use super::changed::ChangedNamespaces;
use super::limits::FIRMWARE;
use super::{Context, Controller, Kind, Need, error_log, feature, identify, smart};
use crate::discovery::{self, transport_type};
use crate::refusal::{Refusal, field};

/// Log pages of an I/O controller. Each needs a length in `log_bytes` and contents in `get_log`.
pub const IO_PAGES: &[LogId] = &[
    LogId::SUPPORTED_LOG_PAGES,
    LogId::ERROR,
    LogId::SMART,
    LogId::FIRMWARE_SLOT,
    LogId::CHANGED_NAMESPACES,
    LogId::COMMAND_EFFECTS,
    LogId::FEATURE_EFFECTS,
    LogId::MI_COMMAND_EFFECTS,
];

/// Log pages of a discovery controller.
pub const DISCOVERY_PAGES: &[LogId] = &[LogId::SUPPORTED_LOG_PAGES, LogId::DISCOVERY];

/// Unit of the offsets and lengths of Get Log Page.
const DWORD_BYTES: u64 = 4;

impl Controller {
    pub(super) fn pages(&self) -> &'static [LogId] {
        match self.kind {
            Kind::Io => IO_PAGES,
            Kind::Discovery => DISCOVERY_PAGES,
        }
    }

    pub(super) fn check_log(&self, cx: &Context<'_>, log: GetLogPage<'_>) -> Result<(), Refusal> {
        let lid = log.lid();
        if !self.pages().contains(&lid) {
            return Err(Refusal::at(Status::INVALID_LOG_PAGE, field::CDW10));
        }
        let nsid = log.sqe().nsid();
        if nsid != 0 && nsid != NSID_ALL {
            // Only the SMART log exists per namespace (LPA bit 0).
            if lid != LogId::SMART {
                return Err(Refusal::invalid(field::NSID));
            }
            identify::find_active(self.subsystem(cx)?, nsid)?;
        }
        if lid == LogId::COMMAND_EFFECTS && log.csi() != Csi::NVM {
            return Err(Refusal::invalid(field::CDW14));
        }
        // No page supports OT 1 (offset in entries).
        if log.ot() {
            return Err(Refusal::invalid(field::CDW14));
        }
        if !log.lpo().is_multiple_of(DWORD_BYTES) || log.lpo() > self.log_bytes(cx, lid) {
            return Err(Refusal::invalid(field::CDW12));
        }
        if log.bytes() > u64::from(self.transfer_bytes) {
            return Err(Refusal::invalid(field::CDW10_HIGH));
        }
        Ok(())
    }

    /// Returns the length of a read. What is beyond the end of the page is undefined for hosts (Base 2.0
    /// section 5.16.1.1, NUMDL): it is sent as zeroes, and takes no memory.
    pub(super) fn need_log(&self, cx: &Context<'_>, log: GetLogPage<'_>) -> Result<Need, Refusal> {
        let bytes = u32::try_from(log.bytes()).or(Err(Refusal::invalid(field::CDW10_HIGH)))?;
        let left = self.log_bytes(cx, log.lid()).saturating_sub(log.lpo());
        Ok(Need { memory: u32::try_from(left).unwrap_or(bytes).min(bytes), ..Need::to_host(bytes) })
    }

    fn discovery_log(&self, cx: &Context<'_>) -> Arc<[u8]> {
        discovery::log(cx.snapshot, cx.peer, &self.shared.host_nqn)
    }

    /// Length of a page in bytes; bytes beyond it read as zero.
    pub(super) fn log_bytes(&self, cx: &Context<'_>, lid: LogId) -> u64 {
        match lid {
            // A dword for each identifier.
            LogId::SUPPORTED_LOG_PAGES | LogId::FEATURE_EFFECTS => 1024,
            LogId::ERROR => error_log::BYTES,
            LogId::SMART | LogId::FIRMWARE_SLOT => 512,
            LogId::CHANGED_NAMESPACES => CHANGED_NAMESPACE_LIST_BYTES as u64,
            LogId::COMMAND_EFFECTS | LogId::MI_COMMAND_EFFECTS => 4096,
            LogId::DISCOVERY => u64::try_from(self.discovery_log(cx).len()).unwrap_or(u64::MAX),
            _ => 0,
        }
    }

    pub(super) fn get_log(
        &mut self,
        cx: &Context<'_>,
        log: GetLogPage<'_>,
        data: &mut [u8],
    ) -> Result<(), Refusal> {
        let mut window = Window::new(log.lpo(), data);
        match log.lid() {
            LogId::SUPPORTED_LOG_PAGES => window.put(0, supported_log_pages(self.pages()).as_bytes()),
            LogId::ERROR => self.errors.write(&mut window, transport_type(self.transport)),
            LogId::SMART => {
                let log = smart::smart(self, cx, log.sqe().nsid())?;
                window.put(0, log.as_bytes());
            }
            LogId::FIRMWARE_SLOT => window.put(0, firmware_slot_log().as_bytes()),
            LogId::CHANGED_NAMESPACES => self.changed.write(&mut window),
            LogId::COMMAND_EFFECTS => window.put(
                0,
                command_effects(cx.registry.optimistic().is_some(), self.has_clusters(cx)).as_bytes(),
            ),
            LogId::FEATURE_EFFECTS => write_feature_effects(self.kind, &mut window),
            LogId::DISCOVERY => window.put(0, &self.discovery_log(cx)),
            // No command is supported: all zero.
            LogId::MI_COMMAND_EFFECTS => {}
            _ => return Err(Refusal::at(Status::INVALID_LOG_PAGE, field::CDW10)),
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

fn supported_log_pages(pages: &[LogId]) -> SupportedLogPages {
    let mut log = SupportedLogPages::default();
    for page in pages {
        log.set(*page, SupportedLogPage::new().with_supported(true));
    }
    log
}

fn firmware_slot_log() -> FirmwareSlotLog {
    let mut log = FirmwareSlotLog { afi: 1, ..FirmwareSlotLog::default() };
    if let Some(slot) = log.frs.first_mut() {
        *slot = padded_ascii(FIRMWARE);
    }
    log
}

/// FSP bit 0: the feature affects a namespace.
const SCOPE_NAMESPACE: u16 = 1 << 0;
/// FSP bit 1: the feature affects the controller.
const SCOPE_CONTROLLER: u16 = 1 << 1;

/// Admin commands of an I/O controller, in log page 05h.
const ADMIN_COMMANDS: &[AdminOpcode] = &[
    AdminOpcode::GET_LOG_PAGE,
    AdminOpcode::IDENTIFY,
    AdminOpcode::ABORT,
    AdminOpcode::SET_FEATURES,
    AdminOpcode::GET_FEATURES,
    AdminOpcode::ASYNC_EVENT_REQUEST,
    AdminOpcode::KEEP_ALIVE,
    END_FORMER_ASSOCIATIONS,
];

/// I/O commands in log page 05h, each with LBCC: true if the command changes logical blocks.
const IO_COMMANDS: &[(IoOpcode, bool)] = &[
    (IoOpcode::FLUSH, false),
    (IoOpcode::WRITE, true),
    (IoOpcode::READ, false),
    (IoOpcode::COMPARE, false),
    (IoOpcode::WRITE_ZEROES, true),
    (IoOpcode::DATASET_MANAGEMENT, true),
    (IoOpcode::VERIFY, false),
    (IoOpcode::COPY, true),
];

/// Builds log page 05h. No scope is reported: Linux warns of any bit of an I/O command except CSUPP and LBCC.
fn command_effects(has_optimistic: bool, has_clusters: bool) -> CommandEffects {
    let mut log = CommandEffects::default();
    if has_clusters {
        let supported = CommandEffect::new().with_supported(true);
        [JOIN, NEXT, LEAVE].into_iter().for_each(|opcode| log.set_admin(opcode, supported));
        [REGISTER, READ_AND_REGISTER].into_iter().for_each(|opcode| log.set_io(opcode, supported));
    }
    if has_optimistic {
        log.set_admin(ATTACH, CommandEffect::new().with_supported(true));
        log.set_io(GET_REFERENCES, CommandEffect::new().with_supported(true));
    }
    for opcode in ADMIN_COMMANDS {
        log.set_admin(*opcode, CommandEffect::new().with_supported(true));
    }
    for &(opcode, changes_blocks) in IO_COMMANDS {
        let effect = CommandEffect::new().with_supported(true).with_logical_block_content(changes_blocks);
        log.set_io(opcode, effect);
    }
    log
}

/// Writes log page 12h: a dword for each feature, with the bits of [`CommandEffect`].
fn write_feature_effects(kind: Kind, window: &mut Window<'_>) {
    for id in feature::supported(kind) {
        let scope = if feature::is_namespace_specific(*id) { SCOPE_NAMESPACE } else { SCOPE_CONTROLLER };
        let effect = CommandEffect::new().with_supported(true).with_scope(scope);
        window.put(u64::from(id.0) * 4, U32::from(effect).as_bytes());
    }
}

/// The requested part `offset .. offset + data.len()` of a log page; the caller has zeroed `data`. Pieces are
/// written at their offset in the page. Bytes outside the part are dropped, so that the whole page need not
/// be built.
pub(crate) struct Window<'a> {
    offset: u64,
    data: &'a mut [u8],
}

impl<'a> Window<'a> {
    /// Creates the part of `data.len()` bytes from `offset` on.
    pub(crate) fn new(offset: u64, data: &'a mut [u8]) -> Window<'a> {
        Window { offset, data }
    }

    /// True when the part contains any of the `bytes` bytes at offset `at`.
    pub(crate) fn shows(&self, at: u64, bytes: u64) -> bool {
        let end = self.offset.saturating_add(u64::try_from(self.data.len()).unwrap_or(u64::MAX));
        at < end && at.saturating_add(bytes) > self.offset
    }

    /// Writes `bytes`, which are at offset `at` of the page. Drops the bytes outside the part.
    pub(crate) fn put(&mut self, at: u64, bytes: &[u8]) {
        // `skip`: bytes of the piece before the part. `start`: offset of the piece in the part. One is 0.
        let Ok(skip) = usize::try_from(self.offset.saturating_sub(at)) else { return };
        let Ok(start) = usize::try_from(at.saturating_sub(self.offset)) else { return };
        let (Some(from), Some(to)) = (bytes.get(skip..), self.data.get_mut(start..)) else { return };
        for (to, from) in to.iter_mut().zip(from) {
            *to = *from;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_window_shows_exactly_its_part(
            offset in 0_u64..80, length in 0_usize..80, at in 0_u64..80, piece in 0_usize..80
        ) {
            let piece: Vec<u8> = (1..=u8::try_from(piece).unwrap()).collect();
            let mut whole = [0_u8; 400];
            let start = usize::try_from(at).unwrap();
            whole[start..start + piece.len()].copy_from_slice(&piece);
            let mut data = vec![0; length];
            let mut window = Window::new(offset, &mut data);
            let shows = window.shows(at, u64::try_from(piece.len()).unwrap());
            window.put(at, &piece);
            let offset = usize::try_from(offset).unwrap();
            prop_assert_eq!(&data[..], &whole[offset..offset + length]);
            prop_assert_eq!(shows && length > 0 && !piece.is_empty(), data.iter().any(|byte| *byte != 0));
        }
    }

    #[test]
    fn pieces_far_away_are_dropped() {
        let mut data = [0; 4];
        let mut window = Window::new(u64::MAX - 4, &mut data);
        window.put(0, &[1; 16]);
        assert!(!window.shows(0, 16) && window.shows(u64::MAX - 2, 1));
        window.put(u64::MAX - 2, &[7; 16]);
        assert_eq!(data, [0, 0, 7, 7]);
    }
}
