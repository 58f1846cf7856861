//! Asynchronous events (Base 2.0 section 5.2), from their cause until the host has read the log page.
//!
//! ```text
//!   Quiet ── raised, enabled ──> Pending ── an AER is parked ──> Reported
//!     ^                            │                                │
//!     └── log page read with RAE = 0, event disabled, or reset ─────┘
//! ```
//! A reported event masks all events of its type until its log page is read, as the specification demands.

use nvme_spec::admin::{AsyncEvent, AsyncEventType, AsyncHealth, AsyncNotice};
use nvme_spec::feature::AsyncEventConfig;
use nvme_spec::log::{CriticalWarning, LogId};

use super::limits::ASYNC_EVENTS_MAX;

/// Events that a controller reports.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    /// A drive's reliability is degraded, the drive is read-only, or its memory backup or persistent memory
    /// has failed: type 1 (SMART), information 00h, log page 02h.
    Reliability,
    /// Temperature threshold: type 1 (SMART), information 01h, log page 02h.
    Temperature,
    /// A drive's spare is below its threshold: type 1 (SMART), information 02h, log page 02h.
    Spare,
    /// Attached Namespace Attribute Changed: type 2 (notice), information 00h, log page 04h.
    NamespaceChanged,
    /// Discovery Log Page Change: type 2 (notice), information F0h, log page 70h.
    DiscoveryChanged,
}

/// All kinds, in the order in which they are reported.
const KINDS: [Kind; 5] =
    [Kind::Reliability, Kind::Temperature, Kind::Spare, Kind::NamespaceChanged, Kind::DiscoveryChanged];

impl Kind {
    /// Bits of the Asynchronous Event Configuration feature (0Bh). Any of these bits enables the event.
    #[must_use]
    pub const fn enable_bits(self) -> u32 {
        match self {
            Kind::Reliability | Kind::Temperature | Kind::Spare => {
                AsyncEventConfig::new().with_critical_warnings(self.warnings().into_bits()).into_bits()
            }
            Kind::NamespaceChanged => AsyncEventConfig::new().with_namespace_attribute(true).into_bits(),
            Kind::DiscoveryChanged => AsyncEventConfig::new().with_discovery_log(true).into_bits(),
        }
    }

    /// Critical warnings of the SMART log that raise the event (Base 2.0 figure "Asynchronous Event
    /// Information - SMART / Health Status"); none for a notice.
    #[must_use]
    pub const fn warnings(self) -> CriticalWarning {
        let none = CriticalWarning::new();
        match self {
            Kind::Reliability => none
                .with_reliability(true)
                .with_read_only(true)
                .with_backup_failed(true)
                .with_persistent_memory(true),
            Kind::Temperature => none.with_temperature(true),
            Kind::Spare => none.with_spare(true),
            Kind::NamespaceChanged | Kind::DiscoveryChanged => none,
        }
    }

    /// Log page whose reading clears the event.
    #[must_use]
    pub const fn log_page(self) -> LogId {
        match self {
            Kind::Reliability | Kind::Temperature | Kind::Spare => LogId::SMART,
            Kind::NamespaceChanged => LogId::CHANGED_NAMESPACES,
            Kind::DiscoveryChanged => LogId::DISCOVERY,
        }
    }

    /// Dword 0 of the completion that reports the event.
    #[must_use]
    pub const fn result(self) -> u32 {
        let page = self.log_page();
        match self {
            Kind::Reliability => AsyncEvent::of(AsyncEventType::HEALTH, AsyncHealth::RELIABILITY.0, page),
            Kind::Temperature => AsyncEvent::of(AsyncEventType::HEALTH, AsyncHealth::TEMPERATURE.0, page),
            Kind::Spare => AsyncEvent::of(AsyncEventType::HEALTH, AsyncHealth::SPARE.0, page),
            Kind::NamespaceChanged => AsyncEvent::notice(AsyncNotice::NAMESPACE_CHANGED, page),
            Kind::DiscoveryChanged => AsyncEvent::notice(AsyncNotice::DISCOVERY_LOG_CHANGED, page),
        }
        .into_bits()
    }

    /// True for events of the same type: `other` is masked while `self` is reported.
    fn masks(self, other: Kind) -> bool {
        (self.warnings() == CriticalWarning::new()) == (other.warnings() == CriticalWarning::new())
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum EventState {
    #[default]
    Quiet,
    Pending,
    Reported,
}

/// Events of one controller, and the number of parked AERs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Events {
    states: [EventState; KINDS.len()],
    /// Value of the Asynchronous Event Configuration feature.
    pub(super) enabled: u32,
    pub(super) parked_aers: u8,
}

impl Events {
    /// Creates the state without events and parked AERs; `enabled` is the value of feature 0Bh.
    #[must_use]
    pub fn new(enabled: u32) -> Events {
        Events { states: [EventState::Quiet; KINDS.len()], enabled, parked_aers: 0 }
    }

    /// Sets feature 0Bh; drops pending and reported events that it disables.
    pub fn set_enabled(&mut self, enabled: u32) {
        self.enabled = enabled;
        for (kind, state) in KINDS.into_iter().zip(&mut self.states) {
            if enabled & kind.enable_bits() == 0 {
                *state = EventState::Quiet;
            }
        }
    }

    /// Parks an AER. False: [`ASYNC_EVENTS_MAX`] are parked already.
    #[must_use]
    pub fn park(&mut self) -> bool {
        if self.parked_aers >= ASYNC_EVENTS_MAX {
            return false;
        }
        self.parked_aers += 1;
        true
    }

    /// Removes a parked AER that was aborted from the count.
    pub fn unpark(&mut self) {
        self.parked_aers = self.parked_aers.saturating_sub(1);
    }

    /// Makes an event pending, if it is enabled and neither pending nor reported.
    pub fn raise(&mut self, kind: Kind) {
        let is_enabled = self.enabled & kind.enable_bits() != 0;
        let state = self.state(kind);
        match *state {
            EventState::Quiet if is_enabled => *state = EventState::Pending,
            EventState::Quiet | EventState::Pending | EventState::Reported => {}
        }
    }

    /// Takes the next pending event that is not masked, and a parked AER. Returns dword 0 of the completion;
    /// `None`: there is no such event or no parked AER.
    pub fn take(&mut self) -> Option<u32> {
        if self.parked_aers == 0 {
            return None;
        }
        let told = self.states;
        let is_masked = |kind: Kind| {
            KINDS
                .into_iter()
                .zip(told)
                .any(|(other, state)| state == EventState::Reported && other.masks(kind))
        };
        let kind =
            KINDS.into_iter().find(|kind| *self.state(*kind) == EventState::Pending && !is_masked(*kind))?;
        *self.state(kind) = EventState::Reported;
        self.parked_aers -= 1;
        Some(kind.result())
    }

    /// Clears the events of log page `page`, which the host has read with RAE = 0.
    pub fn on_log_read(&mut self, page: LogId) {
        for (kind, state) in KINDS.into_iter().zip(&mut self.states) {
            if kind.log_page() == page {
                *state = EventState::Quiet;
            }
        }
    }

    /// Clears events and parked AERs at a Controller Reset or shutdown; sets feature 0Bh to `enabled`.
    pub fn reset(&mut self, enabled: u32) {
        *self = Events::new(enabled);
    }

    fn state(&mut self, kind: Kind) -> &mut EventState {
        &mut self.states[kind as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: u32 = u32::MAX;

    #[test]
    fn a_namespace_notice_is_reported_with_the_words_that_linux_expects() {
        let mut events = Events::new(ALL);
        assert!(events.park());
        events.raise(Kind::NamespaceChanged);
        assert_eq!(events.take(), Some(0x0004_0002));
        assert_eq!(Kind::DiscoveryChanged.result(), 0x0070_f002);
        assert_eq!(Kind::Temperature.result(), 0x0002_0101);
    }

    #[test]
    fn an_event_waits_for_a_request_and_a_request_for_an_event() {
        let mut events = Events::new(ALL);
        events.raise(Kind::NamespaceChanged);
        assert_eq!(events.take(), None);
        assert!(events.park());
        assert!(events.take().is_some());
        assert!(events.park());
        assert_eq!((events.take(), events.parked_aers), (None, 1));
    }

    #[test]
    fn a_reported_event_is_masked_until_its_log_is_read() {
        let mut events = Events::new(ALL);
        assert!(events.park() && events.park());
        events.raise(Kind::NamespaceChanged);
        assert!(events.take().is_some());
        events.raise(Kind::NamespaceChanged);
        events.on_log_read(LogId::SMART);
        assert_eq!(events.take(), None);
        events.on_log_read(LogId::CHANGED_NAMESPACES);
        assert_eq!(events.take(), None);
        events.raise(Kind::NamespaceChanged);
        assert!(events.take().is_some());
    }

    #[test]
    fn a_reported_warning_masks_its_event_type_and_a_log_read_clears_all_of_the_type() {
        let mut events = Events::new(ALL);
        assert!((0..4).all(|_| events.park()));
        events.raise(Kind::Spare);
        assert_eq!(events.take(), Some(0x0002_0201));
        events.raise(Kind::Reliability);
        events.raise(Kind::NamespaceChanged);
        assert_eq!(events.take(), Some(0x0004_0002), "another type goes on");
        assert_eq!(events.take(), None);
        events.on_log_read(LogId::SMART);
        assert_eq!(events.take(), None, "the log told of both");
        events.raise(Kind::Reliability);
        assert_eq!(events.take(), Some(0x0002_0001));
    }

    #[test]
    fn a_disabled_event_is_not_told_also_not_later() {
        let mut events = Events::new(ALL);
        assert!(events.park());
        events.raise(Kind::NamespaceChanged);
        events.set_enabled(0);
        assert_eq!(events.take(), None);
        events.raise(Kind::NamespaceChanged);
        events.set_enabled(ALL);
        assert_eq!(events.take(), None);
    }

    #[test]
    fn the_fifth_request_is_one_too_many() {
        let mut events = Events::new(ALL);
        assert!((0..4).all(|_| events.park()));
        assert!(!events.park());
        events.unpark();
        assert!(events.park());
        events.reset(0);
        events.unpark();
        assert_eq!((events.parked_aers, events.enabled), (0, 0));
    }
}
