//! Get Log Page, and [`Health`], the values of the SMART log.

use nvme_spec::log::{CriticalWarning, FirmwareSlotLog, GetLogPage, LogId, SmartLog};
use nvme_spec::sqe::NSID_ALL;
use nvme_spec::zerocopy::IntoBytes;
use nvme_spec::{Sqe, Status};

use crate::controller::{Controller, Outcome};
use crate::identify::ascii;
use crate::memory::Access;
use crate::pointers::Cursor;
use crate::spec::EmulatorSpec;

/// Values of the SMART log, including those that the emulator counts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Health {
    /// Critical warnings. The temperature warning is reported as well if `temperature` is beyond a threshold
    /// of the host.
    pub critical_warning: CriticalWarning,
    /// Composite temperature, in kelvins.
    pub temperature: u16,
    /// Available spare, in percent of the initial spare.
    pub available_spare: u8,
    /// Available spare threshold, in percent. Only reported: the emulator derives no critical warning from
    /// it.
    pub available_spare_threshold: u8,
    /// Percentage used of the drive's life; may exceed 100.
    pub percentage_used: u8,
    /// Bytes of Read and Compare commands.
    pub bytes_read: u64,
    /// Bytes of Write commands.
    pub bytes_written: u64,
    /// Read and Compare commands executed.
    pub host_reads: u64,
    /// Write commands executed.
    pub host_writes: u64,
    /// Hours with power.
    pub power_on_hours: u64,
    /// Power cycles, including the first power-on.
    pub power_cycles: u64,
    /// Unsafe shutdowns; [`Emulator::power_cut`](crate::Emulator::power_cut) counts one.
    pub unsafe_shutdowns: u64,
    /// Media and data integrity errors; the emulator counts none itself.
    pub media_errors: u64,
    pub(crate) is_too_hot: bool,
}

impl Default for Health {
    /// Returns the values of a drive without wear, at 40 °C.
    fn default() -> Health {
        Health {
            critical_warning: CriticalWarning::new(),
            temperature: 313,
            available_spare: 100,
            available_spare_threshold: 10,
            percentage_used: 0,
            bytes_read: 0,
            bytes_written: 0,
            host_reads: 0,
            host_writes: 0,
            power_on_hours: 0,
            power_cycles: 1,
            unsafe_shutdowns: 0,
            media_errors: 0,
            is_too_hot: false,
        }
    }
}

impl Health {
    pub(crate) fn note_read(&mut self, bytes: u64) {
        self.host_reads += 1;
        self.bytes_read = self.bytes_read.saturating_add(bytes);
    }

    pub(crate) fn note_write(&mut self, bytes: u64) {
        self.host_writes += 1;
        self.bytes_written = self.bytes_written.saturating_add(bytes);
    }

    /// Returns the critical warnings as reported, including the warning that follows from `temperature`.
    pub(crate) fn warning(&self) -> CriticalWarning {
        let is_warm = self.critical_warning.temperature() || self.is_too_hot;
        self.critical_warning.with_temperature(is_warm)
    }

    fn log(&self, error_count: u64) -> SmartLog {
        // Units of 512,000 bytes, rounded up.
        let units = |bytes: u64| u128::from(bytes.div_ceil(512_000)).into();
        SmartLog {
            critical_warning: self.warning().into_bits(),
            temperature: self.temperature.into(),
            available_spare: self.available_spare,
            available_spare_threshold: self.available_spare_threshold,
            percentage_used: self.percentage_used,
            data_units_read: units(self.bytes_read),
            data_units_written: units(self.bytes_written),
            host_reads: u128::from(self.host_reads).into(),
            host_writes: u128::from(self.host_writes).into(),
            power_on_hours: u128::from(self.power_on_hours).into(),
            power_cycles: u128::from(self.power_cycles).into(),
            unsafe_shutdowns: u128::from(self.unsafe_shutdowns).into(),
            media_errors: u128::from(self.media_errors).into(),
            error_log_entries: u128::from(error_count).into(),
            ..SmartLog::default()
        }
    }
}

impl Controller {
    pub(crate) fn get_log_page(&mut self, sqe: &Sqe) -> Outcome {
        let command = GetLogPage::new(sqe);
        let invalid_field = Status::INVALID_FIELD.dnr();
        let bytes = command.bytes();
        let is_long = EmulatorSpec::limit_bytes(self.spec.mdts).is_some_and(|most| bytes > most);
        if is_long || command.ot() || !command.lpo().is_multiple_of(4) {
            return Err(invalid_field);
        }
        let (lid, is_kept) = (command.lid(), command.rae());
        let is_drive = sqe.nsid() == 0 || sqe.nsid() == NSID_ALL;
        if lid == LogId::SMART && !is_drive {
            // LPA reports no SMART log for single namespaces.
            return Err(invalid_field);
        }
        let length = self.log_page(lid).ok_or(Status::INVALID_LOG_PAGE.dnr())?;
        let offset = usize::try_from(command.lpo()).unwrap_or(usize::MAX);
        if offset > length {
            return Err(invalid_field);
        }
        self.pointers.resolve_for(&mut self.host, sqe, bytes, self.spec.sgl, Access::Write)?;
        let (zeroes, mut cursor) = ([0; 64], Cursor::default());
        let there = self.page.get(offset..length).unwrap_or_default();
        let here = there.len().min(usize::try_from(bytes).unwrap_or(usize::MAX));
        let page = there.get(..here).unwrap_or_default();
        let mut is_done = self.pointers.write(&mut self.host, &mut cursor, page).is_some();
        // Bytes beyond the log are zeroes.
        let mut rest = bytes - page.len() as u64;
        while rest != 0 && is_done {
            let count = usize::try_from(rest.min(64)).unwrap_or(64);
            let some = zeroes.get(..count).unwrap_or_default();
            is_done = self.pointers.write(&mut self.host, &mut cursor, some).is_some();
            rest -= count as u64;
        }
        if !is_done {
            return Err(Status::DATA_TRANSFER_ERROR);
        }
        if !is_kept {
            self.admin.unmask(lid);
            if lid == LogId::CHANGED_NAMESPACES {
                self.admin.changed.clear();
            }
        }
        Ok(0)
    }

    /// Writes a log page to `page` and returns its length in bytes; `None` for an unknown log page.
    fn log_page(&mut self, lid: LogId) -> Option<usize> {
        self.page.fill(0);
        let page = &mut self.page[..];
        match lid {
            LogId::ERROR => {
                for (entry, place) in self.admin.error_log.iter().zip(page.chunks_exact_mut(64)) {
                    place.copy_from_slice(entry.as_bytes());
                }
                Some(4096)
            }
            LogId::SMART => {
                page.get_mut(..512)?.copy_from_slice(self.health.log(self.admin.error_count).as_bytes());
                Some(512)
            }
            LogId::FIRMWARE_SLOT => {
                let mut log = FirmwareSlotLog { afi: 1, ..FirmwareSlotLog::default() };
                let [first, ..] = &mut log.frs;
                *first = ascii(&self.spec.firmware);
                page.get_mut(..512)?.copy_from_slice(log.as_bytes());
                Some(512)
            }
            LogId::CHANGED_NAMESPACES => {
                for (nsid, place) in self.admin.changed.iter().zip(page.chunks_exact_mut(4)) {
                    place.copy_from_slice(&nsid.to_le_bytes());
                }
                Some(4096)
            }
            _ => None,
        }
    }
}
