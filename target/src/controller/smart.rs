//! The SMART / health log (log page 02h): counters of the subsystem, or of one namespace, and what the drives
//! behind it say of their health: of several, the worst. A warning that is new is told as an event.
//!
//! Cores count on their own how long a namespace was busy, and no core sees which of those times overlap. The
//! controller busy time is the longest of them: the controller was busy for at least so long.

use nvme_spec::feature::AsyncEventConfig;
use nvme_spec::log::{CriticalWarning, SmartLog};
use nvme_spec::sqe::NSID_ALL;
use nvme_spec::zerocopy::little_endian::{U16, U128};
use spindle_disk::Health;
use spindle_reactor::clock::Nanos;

use super::limits::TEMPERATURE_KELVIN;
use super::{Context, Controller, Kind, State, event, identify};
use crate::counters::IoTotals;
use crate::refusal::Refusal;

/// Between two looks at the drives' warnings. They are asked for their own health less often than that.
const HEALTH_PERIOD: Nanos = Nanos::from_secs(1);
/// Data units are thousands of 512 bytes, rounded up.
const UNITS_PER_DATA_UNIT: u64 = 1000;
/// Available spare and its threshold in percent: nothing here wears out.
const SPARE_PERCENT: u8 = 100;
const SPARE_THRESHOLD_PERCENT: u8 = 10;

pub(super) fn smart(controller: &mut Controller, cx: &Context<'_>, nsid: u32) -> Result<SmartLog, Refusal> {
    let subsystem = controller.subsystem(cx)?;
    let is_whole = nsid == 0 || nsid == NSID_ALL;
    let (totals, health) = if is_whole {
        let totals = subsystem.active().map(|namespace| namespace.counters.totals());
        let health = subsystem.active().filter_map(|namespace| namespace.source.health());
        (totals.fold(IoTotals::default(), IoTotals::with), worst(health))
    } else {
        let namespace = identify::find_active(subsystem, nsid)?;
        let health = worst(namespace.source.health().into_iter());
        (namespace.counters.totals(), health)
    };
    let uptime = cx.now - cx.started;
    let mut busy_ns = totals.busy_ns.min(uptime.as_u64());
    if is_whole {
        // A reload may have taken the busiest namespace away.
        busy_ns = busy_ns.max(controller.health.busy_ns);
        controller.health.busy_ns = busy_ns;
    }
    Ok(SmartLog {
        critical_warning: warnings(controller, &health),
        temperature: U16::new(health.temperature_kelvin),
        available_spare: health.spare_percent,
        available_spare_threshold: health.spare_threshold_percent,
        percentage_used: health.used_percent,
        data_units_read: wide(totals.units_read.div_ceil(UNITS_PER_DATA_UNIT)),
        data_units_written: wide(totals.units_written.div_ceil(UNITS_PER_DATA_UNIT)),
        host_reads: wide(totals.reads),
        host_writes: wide(totals.writes),
        controller_busy_minutes: wide(busy_ns / Nanos::from_secs(60).as_u64()),
        power_on_hours: wide(uptime.as_u64() / Nanos::from_secs(3600).as_u64()),
        unsafe_shutdowns: U128::new(health.unsafe_shutdowns),
        media_errors: U128::new(health.media_errors.saturating_add(u128::from(totals.media_errors))),
        error_log_entries: wide(controller.errors.count),
        ..SmartLog::default()
    })
}

/// What the drives warn of, and the host's own thresholds.
fn warnings(controller: &Controller, health: &Health) -> u8 {
    let is_beyond = controller.features.is_temperature_beyond(health.temperature_kelvin);
    CriticalWarning::new().with_temperature(is_beyond).into_bits() | health.critical_warning
}

/// Critical warnings and what the host knows of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct HealthWatch {
    /// When to look again.
    due: Nanos,
    /// Warnings that were there, and let through, at the last look.
    known: u8,
    /// The controller busy time that the host was told of.
    busy_ns: u64,
}

impl HealthWatch {
    /// It knows of no warning. The busy time goes on: it never falls.
    pub(super) fn anew(self) -> HealthWatch {
        HealthWatch { busy_ns: self.busy_ns, ..HealthWatch::default() }
    }
}

impl Controller {
    /// Look at the health of the drives, once a `HEALTH_PERIOD`: a critical warning that the host lets
    /// through, and that was not there before, is an event. Where the host lets none through none is asked.
    pub fn look_at_health(&mut self, cx: &Context<'_>) {
        if self.state != State::Enabled || cx.now < self.health.due {
            return;
        }
        self.health.due = cx.now + HEALTH_PERIOD;
        let wanted = AsyncEventConfig::from_bits(self.events.enabled).critical_warnings();
        let Ok(subsystem) = self.subsystem(cx) else { return };
        if wanted == 0 || self.kind != Kind::Io {
            return;
        }
        let health = worst(subsystem.active().filter_map(|namespace| namespace.source.health()));
        let warnings = warnings(self, &health) & wanted;
        let new = warnings & !self.health.known;
        self.health.known = warnings;
        for kind in [event::Kind::Reliability, event::Kind::Temperature, event::Kind::Spare] {
            if new & kind.warnings().into_bits() != 0 {
                self.events.raise(kind);
            }
        }
    }

    /// The host has changed what it wants to know: what is there now is told, also what was told before.
    pub(super) fn look_at_health_anew(&mut self, cx: &Context<'_>) {
        self.health = self.health.anew();
        self.look_at_health(cx);
    }
}

/// Disks that are no drives.
const NOTHING_WEARS_OUT: Health = Health {
    critical_warning: 0,
    temperature_kelvin: TEMPERATURE_KELVIN,
    spare_percent: SPARE_PERCENT,
    spare_threshold_percent: SPARE_THRESHOLD_PERCENT,
    used_percent: 0,
    media_errors: 0,
    unsafe_shutdowns: 0,
};

/// Of all of them, the worst; drives only, where there is one.
fn worst(of_drives: impl Iterator<Item = Health>) -> Health {
    of_drives.reduce(worse).unwrap_or(NOTHING_WEARS_OUT)
}

/// The worse of both, in each respect. A spare is as bad as it is near to its threshold.
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

fn wide(value: u64) -> U128 {
    U128::new(u128::from(value))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_several_drives_the_worst_is_told_and_of_none_the_best() {
        let good = Health { temperature_kelvin: 280, media_errors: 1, ..NOTHING_WEARS_OUT };
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
        assert_eq!(worst([].into_iter()), NOTHING_WEARS_OUT);
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
