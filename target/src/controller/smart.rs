//! The SMART / health log (log page 02h): counters of the subsystem, or of one namespace.

use nvme_spec::log::{CriticalWarning, SmartLog};
use nvme_spec::sqe::NSID_ALL;
use nvme_spec::zerocopy::little_endian::{U16, U128};
use spindle_reactor::clock::Nanos;

use super::limits::TEMPERATURE_KELVIN;
use super::{Context, Controller, Failure, identify};
use crate::counters::IoTotals;

/// Data units are thousands of 512 bytes, rounded up.
const UNITS_PER_DATA_UNIT: u64 = 1000;
/// Available spare and its threshold in percent: nothing here wears out.
const SPARE_PERCENT: u8 = 100;
const SPARE_THRESHOLD_PERCENT: u8 = 10;

pub(super) fn smart(controller: &Controller, cx: &Context<'_>, nsid: u32) -> Result<SmartLog, Failure> {
    let subsystem = controller.subsystem(cx)?;
    let totals = if nsid == 0 || nsid == NSID_ALL {
        subsystem.active().map(|namespace| namespace.counters.totals()).fold(IoTotals::default(), sum)
    } else {
        identify::find_active(subsystem, nsid)?.counters.totals()
    };
    let warning = CriticalWarning::new().with_temperature(controller.features.is_temperature_beyond());
    Ok(SmartLog {
        critical_warning: warning.into_bits(),
        temperature: U16::new(TEMPERATURE_KELVIN),
        available_spare: SPARE_PERCENT,
        available_spare_threshold: SPARE_THRESHOLD_PERCENT,
        data_units_read: wide(totals.units_read.div_ceil(UNITS_PER_DATA_UNIT)),
        data_units_written: wide(totals.units_written.div_ceil(UNITS_PER_DATA_UNIT)),
        host_reads: wide(totals.reads),
        host_writes: wide(totals.writes),
        controller_busy_minutes: wide(totals.busy_ns / Nanos::from_secs(60).as_u64()),
        power_on_hours: wide((cx.now - cx.started).as_u64() / Nanos::from_secs(3600).as_u64()),
        media_errors: wide(totals.media_errors),
        error_log_entries: wide(controller.errors.count()),
        ..SmartLog::default()
    })
}

fn wide(value: u64) -> U128 {
    U128::new(u128::from(value))
}

fn sum(a: IoTotals, b: IoTotals) -> IoTotals {
    IoTotals {
        units_read: a.units_read.saturating_add(b.units_read),
        units_written: a.units_written.saturating_add(b.units_written),
        reads: a.reads.saturating_add(b.reads),
        writes: a.writes.saturating_add(b.writes),
        media_errors: a.media_errors.saturating_add(b.media_errors),
        busy_ns: a.busy_ns.saturating_add(b.busy_ns),
    }
}
