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
//!   each of these ── Expire, Lose ──> Failed ── Remove ──> Gone
//! ```
//! Reset and shutdown take no time in this table. What remains to be done, closing I/O queues, is said by
//! [`Step::effect`]; until that is over, and the disks have nothing of them any more, CSTS shows RDY or SHST
//! as they were on the way (`Controller::csts`).

/// Where a controller is in its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum State {
    /// Connected; CC.EN is 0. Left by Property Set, or given up after a while.
    Disabled,
    /// CC.EN and CSTS.RDY are 1: commands are taken.
    Enabled,
    /// The host said CC.SHN; CSTS.SHST is complete. Left by a reset, or by the host's going away.
    ShutDown,
    /// Fatal: the keep-alive time passed or the subsystem was taken away. CSTS.CFS is 1. Left only by
    /// removal.
    Failed,
    /// Removed; nothing is answered any more.
    Gone,
}

/// What happens to a controller.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Event {
    /// CC.EN went from 0 to 1.
    Enable,
    /// CC.EN went from 1 to 0: Controller Reset.
    Disable,
    /// CC.SHN went from none to normal or abrupt.
    Shutdown,
    /// No sign of the host in time.
    Expire,
    /// Its subsystem, or its host's right to it, was taken away.
    Lose,
    /// The admin connection has ended.
    Remove,
}

/// What the owner has to do after a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Effect {
    /// Nothing.
    None,
    /// Close all I/O queues; the admin queue stays. Held Asynchronous Event Requests are forgotten, without
    /// an answer.
    CloseIoQueues,
    /// Close all queues, the admin queue last: the controller is over.
    CloseAll,
}

/// One entry of the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Step {
    /// The state after it.
    pub state: State,
    /// What is to be done.
    pub effect: Effect,
}

/// All states.
pub const STATES: [State; 5] = [State::Disabled, State::Enabled, State::ShutDown, State::Failed, State::Gone];

/// All events.
pub const EVENTS: [Event; 6] =
    [Event::Enable, Event::Disable, Event::Shutdown, Event::Expire, Event::Lose, Event::Remove];

impl State {
    /// True while commands other than Fabrics commands are taken.
    #[must_use]
    pub fn is_ready(self) -> bool {
        self == State::Enabled
    }

    /// True once the controller will not come back.
    #[must_use]
    pub fn is_over(self) -> bool {
        matches!(self, State::Failed | State::Gone)
    }
}

/// The table.
#[must_use]
pub const fn step(state: State, event: Event) -> Step {
    use Effect::{CloseAll, CloseIoQueues, None};
    use State::{Disabled, Enabled, Failed, Gone, ShutDown};
    let (state, effect) = match (state, event) {
        (Disabled | ShutDown, Event::Enable) => (Enabled, None),
        (Enabled | Failed, Event::Enable) => (state, None),
        (Enabled | ShutDown, Event::Disable) => (Disabled, CloseIoQueues),
        (Disabled | Failed, Event::Disable) => (state, None),
        (Disabled | Enabled, Event::Shutdown) => (ShutDown, CloseIoQueues),
        (ShutDown | Failed, Event::Shutdown) => (state, None),
        (Disabled | Enabled | ShutDown, Event::Expire | Event::Lose) => (Failed, CloseAll),
        (Failed, Event::Expire | Event::Lose) => (Failed, None),
        (Disabled | Enabled | ShutDown | Failed, Event::Remove) => (Gone, CloseAll),
        (Gone, _) => (Gone, None),
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
Disabled + Lose -> Failed, CloseAll
Disabled + Remove -> Gone, CloseAll
Enabled + Enable -> Enabled, None
Enabled + Disable -> Disabled, CloseIoQueues
Enabled + Shutdown -> ShutDown, CloseIoQueues
Enabled + Expire -> Failed, CloseAll
Enabled + Lose -> Failed, CloseAll
Enabled + Remove -> Gone, CloseAll
ShutDown + Enable -> Enabled, None
ShutDown + Disable -> Disabled, CloseIoQueues
ShutDown + Shutdown -> ShutDown, None
ShutDown + Expire -> Failed, CloseAll
ShutDown + Lose -> Failed, CloseAll
ShutDown + Remove -> Gone, CloseAll
Failed + Enable -> Failed, None
Failed + Disable -> Failed, None
Failed + Shutdown -> Failed, None
Failed + Expire -> Failed, None
Failed + Lose -> Failed, None
Failed + Remove -> Gone, CloseAll
Gone + Enable -> Gone, None
Gone + Disable -> Gone, None
Gone + Shutdown -> Gone, None
Gone + Expire -> Gone, None
Gone + Lose -> Gone, None
Gone + Remove -> Gone, None
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
