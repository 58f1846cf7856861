//! The lifetime of a controller as a table: state x event -> state (Base 2.0 sections 3.5 and 3.6).
//!
//! ```text
//!                Enable                  Shutdown
//!   Disabled ─────────────> Enabled ──────────────> ShutDown
//!     ^ ^ │                  │   ^                  │ │ ^
//!     │ │ │      Disable     │   │      Enable      │ │ │
//!     │ └─┼──────────────────┘   └──────────────────┘ │ │
//!     │   └──────────────────── Shutdown ─────────────┼─┘
//!     └──────────────────────── Disable ──────────────┘
//!   each of these ── Expire, Revoke ──> Failed      each state ── Remove ──> Removed
//! ```
//! Reset and shutdown change the state at once. With [`Step::effect`] the caller closes the I/O queues. CSTS
//! (`Controller::csts`) reports the reset or shutdown as in progress until the queues are closed and no disk
//! has their commands, at most for `ORPHAN_MAX` after the close.

/// State of a controller.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ControllerState {
    /// Connected; CC.EN is 0. Ends by Property Set or the end of the admin connection. Fails when the host
    /// loses its access, or after [`ASSOCIATION_TIMEOUT`](super::limits::ASSOCIATION_TIMEOUT).
    Disabled,
    /// CC.EN and CSTS.RDY are 1: commands are accepted.
    Enabled,
    /// The host has set CC.SHN. Ends by a reset, an enable or the end of the admin connection. Fails when the
    /// host loses its access, or after [`ASSOCIATION_TIMEOUT`](super::limits::ASSOCIATION_TIMEOUT).
    ShutDown,
    /// CSTS.CFS is 1: a time-out has passed, or the host has lost its access. Ends only by removal.
    Failed,
    /// Removed after the end of the admin connection.
    Removed,
}

/// Input of the state machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Event {
    /// CC.EN changed from 0 to 1.
    Enable,
    /// CC.EN changed from 1 to 0: Controller Reset.
    Disable,
    /// CC.SHN changed from none to normal or abrupt.
    Shutdown,
    /// The keep-alive time-out has passed, or the controller was not enabled in time.
    Expire,
    /// A reload has removed its subsystem, or its host from the allowed hosts.
    Revoke,
    /// The admin connection has ended.
    Remove,
}

/// Action of the caller after a transition.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Effect {
    /// No action.
    None,
    /// Close all I/O queues; the admin queue stays. Drop parked AERs and a waiting End Former Associations
    /// without a reply.
    CloseIoQueues,
    /// Close all queues of the controller.
    CloseAll,
}

/// One entry of the transition table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Step {
    /// State after the transition.
    pub state: ControllerState,
    /// Action of the caller.
    pub effect: Effect,
}

/// All states, for tests.
pub const STATES: [ControllerState; 5] = [
    ControllerState::Disabled,
    ControllerState::Enabled,
    ControllerState::ShutDown,
    ControllerState::Failed,
    ControllerState::Removed,
];

/// All events, for tests.
pub const EVENTS: [Event; 6] =
    [Event::Enable, Event::Disable, Event::Shutdown, Event::Expire, Event::Revoke, Event::Remove];

impl ControllerState {
    /// True while commands other than Fabrics commands are accepted.
    #[must_use]
    pub fn is_ready(self) -> bool {
        self == ControllerState::Enabled
    }

    /// True in the states from which the controller can only be removed.
    #[must_use]
    pub fn is_over(self) -> bool {
        matches!(self, ControllerState::Failed | ControllerState::Removed)
    }
}

/// Returns the transition of `event` in `state`.
#[must_use]
pub const fn step(state: ControllerState, event: Event) -> Step {
    use ControllerState::{Disabled, Enabled, Failed, Removed, ShutDown};
    use Effect::{CloseAll, CloseIoQueues, None};
    let (state, effect) = match (state, event) {
        (Disabled | ShutDown, Event::Enable) => (Enabled, None),
        (Enabled | Failed, Event::Enable) => (state, None),
        (Enabled | ShutDown, Event::Disable) => (Disabled, CloseIoQueues),
        (Disabled | Failed, Event::Disable) => (state, None),
        (Disabled | Enabled, Event::Shutdown) => (ShutDown, CloseIoQueues),
        (ShutDown | Failed, Event::Shutdown) => (state, None),
        (Disabled | Enabled | ShutDown, Event::Expire | Event::Revoke) => (Failed, CloseAll),
        (Failed, Event::Expire | Event::Revoke) => (Failed, None),
        (Disabled | Enabled | ShutDown | Failed, Event::Remove) => (Removed, CloseAll),
        (Removed, _) => (Removed, None),
    };
    Step { state, effect }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Any change of the machine shows up here.
    const MATRIX: &str = "\
Disabled + Enable -> Enabled, None
Disabled + Disable -> Disabled, None
Disabled + Shutdown -> ShutDown, CloseIoQueues
Disabled + Expire -> Failed, CloseAll
Disabled + Revoke -> Failed, CloseAll
Disabled + Remove -> Removed, CloseAll
Enabled + Enable -> Enabled, None
Enabled + Disable -> Disabled, CloseIoQueues
Enabled + Shutdown -> ShutDown, CloseIoQueues
Enabled + Expire -> Failed, CloseAll
Enabled + Revoke -> Failed, CloseAll
Enabled + Remove -> Removed, CloseAll
ShutDown + Enable -> Enabled, None
ShutDown + Disable -> Disabled, CloseIoQueues
ShutDown + Shutdown -> ShutDown, None
ShutDown + Expire -> Failed, CloseAll
ShutDown + Revoke -> Failed, CloseAll
ShutDown + Remove -> Removed, CloseAll
Failed + Enable -> Failed, None
Failed + Disable -> Failed, None
Failed + Shutdown -> Failed, None
Failed + Expire -> Failed, None
Failed + Revoke -> Failed, None
Failed + Remove -> Removed, CloseAll
Removed + Enable -> Removed, None
Removed + Disable -> Removed, None
Removed + Shutdown -> Removed, None
Removed + Expire -> Removed, None
Removed + Revoke -> Removed, None
Removed + Remove -> Removed, None
";

    #[test]
    fn the_whole_table_is_as_reviewed() {
        let mut matrix = String::new();
        for state in STATES {
            for event in EVENTS {
                let next = step(state, event);
                matrix += &format!("{state:?} + {event:?} -> {:?}, {:?}\n", next.state, next.effect);
            }
        }
        assert_eq!(matrix, MATRIX);
    }

    #[test]
    fn a_controller_that_is_over_never_comes_back() {
        for state in STATES.into_iter().filter(|state| state.is_over()) {
            for event in EVENTS {
                assert!(step(state, event).state.is_over(), "{state:?} + {event:?}");
            }
        }
    }
}
