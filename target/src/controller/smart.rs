//! The SMART / health log (log page 02h): counters of the subsystem, or of one namespace, and the health of
//! its drives. For several drives, the log has the worst of each value, and the sums of media errors and
//! unsafe shutdowns. A new warning raises an asynchronous event.
//!
//! Each core measures the busy time of a namespace by itself, and overlaps between cores are not measured.
//! The controller busy time is the longest of these times, a lower bound.

use nvme_spec::feature::AsyncEventConfig;
use nvme_spec::log::{CriticalWarning, SmartLog};
use nvme_spec::sqe::NSID_ALL;
use nvme_spec::zerocopy::little_endian::{U16, U128};
use spindle_reactor::clock::Nanos;
use spindle_target_disk::Health;

use super::limits::TEMPERATURE_KELVIN;
use super::{Context, Controller, ControllerState, Kind, event, identify};
use crate::counters::IoTotals;
use crate::refusal::Refusal;

/// Period of checks for new warnings. The drives' own SMART logs are read less often.
const HEALTH_PERIOD: Nanos = Nanos::from_secs(1);
/// Units of 512 bytes in a SMART data unit; the log rounds up.
const UNITS_PER_DATA_UNIT: u64 = 1000;
/// Available spare and its threshold in percent, for disks without health data.
const SPARE_PERCENT: u8 = 100;
const SPARE_THRESHOLD_PERCENT: u8 = 10;

pub(super) fn smart(controller: &mut Controller, cx: &Context<'_>, nsid: u32) -> Result<SmartLog, Refusal> {
    let subsystem = controller.subsystem(cx)?;
    let is_whole = nsid == 0 || nsid == NSID_ALL;
    let (totals, health) = if is_whole {
        let totals = subsystem.active().map(|namespace| namespace.counters.totals());
        let health = subsystem.active().filter_map(|namespace| namespace.source.health());
        (totals.fold(IoTotals::default(), IoTotals::merged_with), worst(health))
    } else {
        let namespace = identify::find_active(subsystem, nsid)?;
        let health = worst(namespace.source.health().into_iter());
        (namespace.counters.totals(), health)
    };
    let uptime = cx.now - cx.process_started;
    let mut busy_ns = totals.busy_ns.min(uptime.as_u64());
    if is_whole {
        // A reload may have removed the busiest namespace; the value must not fall.
        busy_ns = busy_ns.max(controller.health.busy_ns);
        controller.health.busy_ns = busy_ns;
    }
    Ok(SmartLog {
        critical_warning: warnings(controller, &health),
        temperature: U16::new(health.temperature_kelvin),
        available_spare: health.spare_percent,
        available_spare_threshold: health.spare_threshold_percent,
        percentage_used: health.used_percent,
        data_units_read: to_u128(totals.units_read.div_ceil(UNITS_PER_DATA_UNIT)),
        data_units_written: to_u128(totals.units_written.div_ceil(UNITS_PER_DATA_UNIT)),
        host_reads: to_u128(totals.reads),
        host_writes: to_u128(totals.writes),
        controller_busy_minutes: to_u128(busy_ns / Nanos::from_secs(60).as_u64()),
        power_on_hours: to_u128(uptime.as_u64() / Nanos::from_secs(3600).as_u64()),
        unsafe_shutdowns: U128::new(health.unsafe_shutdowns),
        media_errors: U128::new(health.media_errors.saturating_add(u128::from(totals.media_errors))),
        error_log_entries: to_u128(controller.errors.count),
        ..SmartLog::default()
    })
}

/// Critical warnings of the drives, and temperatures beyond the host's thresholds.
fn warnings(controller: &Controller, health: &Health) -> u8 {
    let is_beyond = controller.features.is_temperature_beyond(health.temperature_kelvin);
    CriticalWarning::new().with_temperature(is_beyond).into_bits() | health.critical_warning
}

/// State of the checks for new warnings, and the busy time that was reported.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct HealthWatch {
    /// Time of the next check.
    next_check: Nanos,
    /// Warnings that were set and enabled at the last check.
    reported_warnings: u8,
    /// Largest controller busy time that was reported, in ns.
    busy_ns: u64,
}

impl HealthWatch {
    /// Returns the initial state, with the busy time of `self`: the reported value must not fall.
    pub(super) fn restarted(self) -> HealthWatch {
        HealthWatch { busy_ns: self.busy_ns, ..HealthWatch::default() }
    }
}

impl Controller {
    /// Checks the health of the drives of an enabled controller, at most once per `HEALTH_PERIOD`. A new
    /// critical warning that the host has enabled raises an event. Without enabled warnings it queries none.
    pub fn check_health(&mut self, cx: &Context<'_>) {
        if self.state != ControllerState::Enabled || cx.now < self.health.next_check {
            return;
        }
        self.health.next_check = cx.now + HEALTH_PERIOD;
        let wanted = AsyncEventConfig::from_bits(self.events.enabled).critical_warnings();
        let Ok(subsystem) = self.subsystem(cx) else { return };
        if wanted == 0 || self.kind != Kind::Io {
            return;
        }
        let health = worst(subsystem.active().filter_map(|namespace| namespace.source.health()));
        let warnings = warnings(self, &health) & wanted;
        let new = warnings & !self.health.reported_warnings;
        self.health.reported_warnings = warnings;
        for kind in [event::Kind::Reliability, event::Kind::Temperature, event::Kind::Spare] {
            if new & kind.warnings().into_bits() != 0 {
                self.events.raise(kind);
            }
        }
    }

    /// Reports all current warnings again, after the host has changed the enabled events or a threshold.
    pub(super) fn recheck_health(&mut self, cx: &Context<'_>) {
        self.health = self.health.restarted();
        self.check_health(cx);
    }
}

/// Health of disks without health data.
const DEFAULT_HEALTH: Health = Health {
    critical_warning: 0,
    temperature_kelvin: TEMPERATURE_KELVIN,
    spare_percent: SPARE_PERCENT,
    spare_threshold_percent: SPARE_THRESHOLD_PERCENT,
    used_percent: 0,
    media_errors: 0,
    unsafe_shutdowns: 0,
};

/// Returns the worst health of all drives; [`DEFAULT_HEALTH`] without a drive.
fn worst(of_drives: impl Iterator<Item = Health>) -> Health {
    of_drives.reduce(worse).unwrap_or(DEFAULT_HEALTH)
}

/// Returns the worse of both in each value, and the sums of media errors and unsafe shutdowns. The spare is
/// that with the smaller margin above its threshold.
fn worse(a: Health, b: Health) -> Health {
    let margin =
        |health: &Health| i16::from(health.spare_percent) - i16::from(health.spare_threshold_percent);
    let spare = if margin(&b) < margin(&a) { &b } else { &a };
    Health {
        critical_warning: a.critical_warning | b.critical_warning,
        temperature_kelvin: a.temperature_kelvin.max(b.temperature_kelvin),
        spare_percent: spare.spare_percent,
        spare_threshold_percent: spare.spare_threshold_percent,
        used_percent: a.used_percent.max(b.used_percent),
        media_errors: a.media_errors.saturating_add(b.media_errors),
        unsafe_shutdowns: a.unsafe_shutdowns.saturating_add(b.unsafe_shutdowns),
    }
}

fn to_u128(value: u64) -> U128 {
    U128::new(u128::from(value))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_several_drives_the_worst_is_told_and_of_none_the_best() {
        let good = Health { temperature_kelvin: 280, media_errors: 1, ..DEFAULT_HEALTH };
        let worn = Health {
            critical_warning: 0b100,
            temperature_kelvin: 320,
            spare_percent: 40,
            spare_threshold_percent: 5,
            used_percent: 90,
            media_errors: 5,
            unsafe_shutdowns: 2,
        };
        let scarce = Health { critical_warning: 1, spare_percent: 12, ..good };
        assert_eq!(worst([].into_iter()), DEFAULT_HEALTH);
        assert_eq!(worst([good].into_iter()), good, "its own temperature, not a made-up one");
        let expected = Health {
            critical_warning: 0b101,
            spare_percent: 12,
            spare_threshold_percent: 10,
            media_errors: 7,
            ..worn
        };
        assert_eq!(worst([good, worn, scarce].into_iter()), expected);
        assert_eq!(worst([scarce, good, worn].into_iter()), expected);
    }
}
