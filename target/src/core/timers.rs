//! Time-outs of hosts, checked once per [`TIMER_PERIOD`].
//!
//! Time is judged after what arrived: a time-out that has passed ends nothing before a *receive pass* that
//! began later is complete. In a pass the shells of a core receive from each connection until nothing waits
//! in its socket or completion queue. Keep alive counts traffic on all cores, so it needs a pass of each
//! core that has a queue of the controller.
//!
//! ```text
//!   on_timer    a time-out has passed > Env::has_passed: the last pass began before it > wants_pass
//!               begin_pass
//!   shell       Connections::wants_pass > receives from each connection > Connections::passed
//!   on_timer    the time-out again: its host has sent nothing > the connection ends
//! ```
//! Passes are made on demand only: each costs a system call per TCP connection. A core looks once per period
//! for passes that another core needs.
//!
//! A check that is late means that this core did not run. What hosts sent meanwhile need not have arrived
//! when it goes on: a machine that was paused dropped it, and hosts repeat it in growing intervals. So time
//! of which the core missed much does not count against hosts ([`Env::late`]).

use spindle_nvme_transport::{Transport, TransportKind};
use spindle_reactor::clock::Nanos;

use super::TargetCore;

const TIMER_PERIOD: Nanos = Nanos::from_ms(50);

/// A receive pass in progress.
#[derive(Debug, Clone, Copy)]
pub(super) struct Pass {
    began: Nanos,
    /// By transport: its shell has not received from each of its connections yet.
    is_left: [bool; TransportKind::ALL.len()],
}

impl<T: Transport> TargetCore<T> {
    /// Checks the time-outs, if it is time, and begins a receive pass if one is needed.
    #[inline]
    pub(super) fn poll_timers(&mut self) {
        if self.env.now >= self.next_timer {
            self.on_timer();
        }
    }

    #[cold]
    fn on_timer(&mut self) {
        self.env.late = self.env.now - self.next_timer;
        self.next_timer = self.env.now + TIMER_PERIOD;
        let before = std::mem::replace(&mut self.claimants_before, self.env.claimants);
        self.env.update_scarcity(before);
        self.env.update_alone();
        self.env.waiting_queues = u32::try_from(self.waiting.len()).unwrap_or(u32::MAX);
        if self.waiting.is_empty() {
            // Claims of disks, which nothing has needed.
            self.env.clear_claims();
        }
        self.for_each_qpair(|qpair, env| qpair.on_time(env));
        self.env.is_admin_short = false;
        self.env.busy.remove_idle();
        self.expire_orphans();
        self.begin_pass();
    }

    fn begin_pass(&mut self) {
        let is_wanted = std::mem::take(&mut self.env.wants_pass)
            || self.env.registry.passes().wanted() > self.env.received;
        if !is_wanted || self.pass.is_some() {
            return;
        }
        let mut is_left = [false; TransportKind::ALL.len()];
        self.qpairs.iter().for_each(|(_, qpair)| is_left[qpair.peer.transport as usize] = true);
        self.pass = Some(Pass { began: self.env.now, is_left });
        self.end_pass();
    }

    pub(super) fn is_pass_left(&self, transport: TransportKind) -> bool {
        self.pass.is_some_and(|pass| pass.is_left[transport as usize])
    }

    pub(super) fn pass_over(&mut self, transport: TransportKind) {
        if let Some(pass) = &mut self.pass {
            pass.is_left[transport as usize] = false;
            self.end_pass();
        }
    }

    /// Ends the pass if all shells have received.
    fn end_pass(&mut self) {
        if let Some(pass) = self.pass.take_if(|pass| !pass.is_left.contains(&true)) {
            self.env.received = pass.began;
            self.env.registry.passes().complete(self.env.core, pass.began);
        }
    }
}
