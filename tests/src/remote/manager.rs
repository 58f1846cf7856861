//! [`Manager`]: what the manager thread of a remote disk does, at random times.

use std::sync::Arc;

use nvme_spec::status::Status;
use spindle_nvme_initiator::Error;
use spindle_reactor::clock::Nanos;
use spindle_target_remote::{Control, Shape};

use super::far::{FarShared, lock};
use super::scenario::Kind;
use super::seam::{Limits, SimFar, SimGrant};
use crate::sim::Rng;

/// What came of the question whether former associations are over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fence {
    /// It is asked then.
    Ask(Nanos),
    /// Nothing of them is begun any more; some of them may be at the disk.
    Asked,
    /// It is answered then.
    Answer(Nanos),
    /// It is answered, or never is.
    Past,
}

/// What is done about an event of changed namespaces.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verify {
    Idle,
    /// The event arrives then.
    Event(Nanos),
    /// Cores send nothing; Identify is answered then.
    Identify(Nanos),
}

enum ManagerState {
    Up {
        fence: Fence,
        verify: Verify,
        /// The loss is acted upon then.
        react: Option<Nanos>,
    },
    Away {
        until: Nanos,
    },
}

/// See the module.
pub struct Manager {
    world: FarShared,
    control: Control<SimFar>,
    shape: Shape,
    limits: Limits,
    rng: Rng,
    number: u64,
    may_land: u64,
    state: ManagerState,
}

impl Manager {
    /// Nothing is up yet.
    #[must_use]
    pub fn new(
        world: FarShared,
        control: Control<SimFar>,
        (shape, limits): (Shape, Limits),
        may_land: u64,
        seed: u64,
    ) -> Manager {
        let (rng, state) = (Rng::new(seed ^ 0x3a3a), ManagerState::Away { until: Nanos::ZERO });
        Manager { world, control, shape, limits, rng, number: 0, may_land, state }
    }

    /// The far target tells of changed namespaces.
    pub fn event(&mut self, now: Nanos) {
        let most = if self.rng.permille(100) { 300_000 } else { 20_000 };
        let at = now + Nanos::from_us(self.rng.between(1, most));
        if let ManagerState::Up { verify, .. } = &mut self.state
            && *verify == Verify::Idle
        {
            *verify = Verify::Event(at);
        }
    }

    /// An association is up and leads to the disk.
    #[must_use]
    pub fn is_up(&self) -> bool {
        matches!(self.state, ManagerState::Up { verify: Verify::Idle, react: None, .. })
    }

    /// Nothing is to be said of former associations.
    #[must_use]
    pub fn is_fenced(&self) -> bool {
        matches!(self.state, ManagerState::Up { fence: Fence::Past, .. })
    }

    /// Time has passed.
    pub fn step(&mut self, now: Nanos) {
        match self.state {
            ManagerState::Away { until } if now >= until => self.connect(now),
            ManagerState::Away { .. } => {}
            ManagerState::Up { react: Some(at), .. } if now >= at => self.leave(now),
            ManagerState::Up { fence, verify, .. } => {
                let fence = if verify == Verify::Idle { self.step_fence(fence, now) } else { fence };
                let stays = self.step_verify(verify, now);
                if verify == Verify::Idle {
                    self.attach_cores();
                }
                let is_lost = self.control.lost() >= self.number || lock(&self.world).is_broken(self.number);
                let most = if self.rng.permille(100) { 2000 } else { 60 };
                let delay = Nanos::from_ms(self.rng.between(0, most));
                let ManagerState::Up { fence: own, verify, react } = &mut self.state else { return };
                *own = fence;
                match stays {
                    Some(next) => *verify = next,
                    None => return self.leave(now),
                }
                if is_lost && react.is_none() {
                    *react = Some(now + delay);
                }
            }
        }
    }

    /// Answers the cores that want to attach, at random times.
    fn attach_cores(&self) {
        let Some(handle) = self.control.next_grant(self.number) else { return };
        let mut world = lock(&self.world);
        if world.cache.rng.permille(500) {
            return;
        }
        let status = Status::NAMESPACE_NOT_READY;
        let refused = || Error::Status { step: "Attach", status, invalid: None };
        let answer = world.cache.grant().map(SimGrant).ok_or_else(refused);
        world.book.counts.hit(if answer.is_ok() { "grants" } else { "refused grants" });
        drop(world);
        self.control.grant(handle, self.number, answer);
    }

    /// An attempt.
    fn connect(&mut self, now: Nanos) {
        let mut world = lock(&self.world);
        if world.is_away() {
            self.state = ManagerState::Away { until: now + Nanos::from_ms(self.rng.between(100, 2000)) };
            return;
        }
        self.number += 1;
        let must_fua = self.rng.permille(300);
        self.shape.must_fua = must_fua;
        world.begin_association(self.number, must_fua);
        world.may_send = true;
        let is_asked = world.kind() == Kind::Spindle && self.number > 1;
        drop(world);
        let far = SimFar { world: Arc::clone(&self.world), number: self.number, limits: self.limits };
        self.control.up(self.number, Arc::new(far), self.shape);
        let most = if self.rng.permille(200) { 5_000_000 } else { 50_000 };
        let ask = Fence::Ask(now + Nanos::from_us(self.rng.between(1, most)));
        let fence = if is_asked { ask } else { Fence::Past };
        self.state = ManagerState::Up { fence, verify: Verify::Idle, react: None };
    }

    /// The association is over, as far as we are concerned.
    fn leave(&mut self, now: Nanos) {
        let mut world = lock(&self.world);
        world.may_send = false;
        world.left_by_manager(self.number);
        drop(world);
        self.control.down();
        let most = if self.rng.permille(200) { 2000 } else { 200 };
        self.state = ManagerState::Away { until: now + Nanos::from_ms(self.rng.between(1, most)) };
    }

    fn step_fence(&mut self, fence: Fence, now: Nanos) -> Fence {
        let mut world = lock(&self.world);
        match fence {
            Fence::Ask(at) if now >= at => {
                world.end_former(self.number);
                world.book.counts.hit("fences");
                if self.rng.permille(self.may_land) {
                    world.book.counts.hit("may land");
                    return Fence::Past;
                }
                Fence::Asked
            }
            Fence::Asked if world.is_quiet_before(self.number) => {
                let most = if self.rng.permille(200) { 3_000_000 } else { 20_000 };
                Fence::Answer(now + Nanos::from_us(self.rng.between(1, most)))
            }
            Fence::Answer(at) if now >= at => {
                world.book.over(self.number - 1);
                drop(world);
                self.control.over(self.number - 1);
                Fence::Past
            }
            Fence::Ask(_) | Fence::Asked | Fence::Answer(_) | Fence::Past => fence,
        }
    }

    /// `None`: it is another disk.
    fn step_verify(&mut self, verify: Verify, now: Nanos) -> Option<Verify> {
        match verify {
            Verify::Event(at) if now >= at => {
                let mut world = lock(&self.world);
                world.may_send = false;
                world.book.counts.hit("holds");
                drop(world);
                self.control.hold();
                let most = if self.rng.permille(400) { 40_000 } else { 200 };
                Some(Verify::Identify(now + Nanos::from_ms(self.rng.between(1, most))))
            }
            Verify::Identify(at) if now >= at => {
                let mut world = lock(&self.world);
                if world.is_moved() {
                    return None;
                }
                world.may_send = true;
                drop(world);
                self.control.checked(self.shape);
                Some(Verify::Idle)
            }
            Verify::Idle | Verify::Event(_) | Verify::Identify(_) => Some(verify),
        }
    }
}
