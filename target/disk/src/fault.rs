//! A layer that injects faults into the commands of any disk: errors, delays, drops and reordering.
//! Reproducible by seed, for tests and the simulator.
//!
//! The faults of a command are drawn at its submission; of a read that ends in `prepare`, in `prepare`. The
//! draws depend only on the seed, the core and the number of earlier commands: the same calls result in the
//! same faults. Path of a command:
//!
//! ```text
//!   submit ─┬───────────────────────────┬─> effect, or an error instead, or both ─┬──────────────────> Done
//!           └─ held before the effect ──┘                                         └─ held after it ──> Done
//! ```
//!
//! A command is held at most once, before or after its effect. If the disk is "gone" or the range is broken,
//! the command ends with an error and without effect. A hold ends after some polls (delay), in the next poll
//! in random order (reorder), or by [`FaultControl::release_dropped`] (drop). [`FaultControl`] changes the
//! settings at run time, from any thread. A command that fails without effect returns its buffer unchanged.
//!
//! Not done here: corruption of data. The layer changes no bytes, and the inner disk has executed every
//! command that ends without an error.

mod control;

use std::collections::VecDeque;
use std::sync::Arc;

use spindle_reactor::clock::Nanos;
use spindle_reactor::mem::Buf;

use control::Settings;
pub use control::{Broken, Fault, FaultControl, OpKind};

use crate::layer::{Call, Commands, inner_token, number_of};
use crate::{
    BlockRange, ChannelContext, Disk, DiskChannel, DiskError, Done, Geometry, IoRequest, OpenError, Owner,
    Prepared, ResizeError, Token,
};

/// The fault layer over one disk, shared by all cores. See the module.
pub struct FaultDisk {
    inner: Arc<dyn Disk>,
    control: Arc<FaultControl>,
}

impl FaultDisk {
    /// Adds a fault layer over `inner`. Returns the disk and the control of its faults, at first none.
    #[expect(clippy::new_ret_no_self, reason = "every kind is made as the interface that its users see")]
    #[must_use]
    pub fn new(inner: Arc<dyn Disk>, seed: u64) -> (Arc<dyn Disk>, Arc<FaultControl>) {
        let control = Arc::new(FaultControl::new(seed));
        (Arc::new(FaultDisk { inner, control: Arc::clone(&control) }), control)
    }
}

impl Disk for FaultDisk {
    fn name(&self) -> &str {
        self.inner.name()
    }

    fn kind(&self) -> &'static str {
        "fault"
    }

    fn geometry(&self) -> Geometry {
        self.inner.geometry()
    }

    fn inner(&self) -> Option<&dyn Disk> {
        Some(&*self.inner)
    }

    fn open(&self, context: &ChannelContext) -> Result<Box<dyn DiskChannel>, OpenError> {
        // The generation is loaded first: a change between the two loads causes one more refresh.
        let generation = self.control.generation();
        let (depth, settings) = (context.depth as usize, self.control.settings());
        Ok(Box::new(FaultChannel {
            inner: self.inner.open(context)?,
            control: Arc::clone(&self.control),
            draws: Draws::new(self.control.seed, context.core as u64),
            plans: Commands::with_capacity(depth),
            held: Vec::with_capacity(depth),
            due: Vec::with_capacity(depth),
            ready: VecDeque::with_capacity(depth),
            inner_done: Vec::with_capacity(depth.max(1)),
            generation,
            released: settings.released,
            settings,
            polls: 0,
        }))
    }

    fn resize(&self, bytes: u64) -> Result<(), ResizeError> {
        self.inner.resize(bytes)
    }
}

/// Random number generator of one core: splitmix64.
#[derive(Clone)]
struct Draws(u64);

impl Draws {
    fn new(seed: u64, core: u64) -> Draws {
        let mut draws = Draws(seed ^ core.wrapping_mul(0xA076_1D64_78BD_642F));
        draws.next();
        draws
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// Returns true with probability `per_million` / 10^6. Always draws one number, so a changed rate does
    /// not shift the later draws.
    fn hits(&mut self, per_million: u32) -> bool {
        self.next() % 1_000_000 < u64::from(per_million)
    }
}

/// When a hold ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Until {
    /// In the first poll whose sequence number is at least this number.
    Poll(u64),
    /// In the first poll after [`FaultControl::release_dropped`].
    Released,
}

/// The faults drawn for a command.
#[derive(Debug, Clone, Copy)]
struct FaultPlan {
    token: Token,
    error: Option<DiskError>,
    /// The inner disk executes the command, even if `error` is set.
    has_effect: bool,
    /// Hold before the submission to the inner disk.
    hold_before: Option<Until>,
    /// Hold after the execution or failure.
    hold_after: Option<Until>,
    /// The fault that is the reason of the hold, for the counters.
    held_by: Option<Fault>,
    /// Random sort key among commands released in the same poll.
    order: u64,
}

struct Held {
    until: Until,
    order: u64,
    stage: HeldStage,
}

enum HeldStage {
    /// Not submitted to the inner disk yet.
    Before(FaultPlan, Call),
    /// Executed, or failed without effect. The completion is held.
    After(Done),
}

impl Held {
    fn token(&self) -> Token {
        match &self.stage {
            HeldStage::Before(plan, _) => plan.token,
            HeldStage::After(done) => done.token,
        }
    }
}

struct FaultChannel {
    inner: Box<dyn DiskChannel>,
    control: Arc<FaultControl>,
    draws: Draws,
    /// Plans of the commands at the inner disk.
    plans: Commands<FaultPlan>,
    held: Vec<Held>,
    /// Commands of `held` that are released in this poll; empty between polls.
    due: Vec<Held>,
    ready: VecDeque<Done>,
    /// Completions of the inner disk; empty between polls.
    inner_done: Vec<Done>,
    /// Copy of the control's settings as of `generation`.
    settings: Settings,
    generation: u64,
    /// Value of `Settings::released` in this core's last poll, or at open.
    released: u64,
    polls: u64,
}

impl FaultChannel {
    /// Copies the control's settings if they have changed.
    fn refresh(&mut self) {
        let generation = self.control.generation();
        if self.generation != generation {
            // The generation is loaded first: a change between the two loads causes one more refresh.
            self.generation = generation;
            self.settings = self.control.settings();
        }
    }

    /// Draws the faults of a command, and counts the faults in the control.
    fn plan_command(
        &mut self,
        token: Token,
        kind: OpKind,
        range: BlockRange,
        from: Option<BlockRange>,
    ) -> FaultPlan {
        let plan = self.draw_plan(token, kind, range, from);
        if plan.error.is_some() {
            self.control.count(Fault::Error);
        }
        if let Some(fault) = plan.held_by {
            self.control.count(fault);
        }
        plan
    }

    /// Draws the faults of a command, always with the same number of draws. `from`: source of a copy,
    /// otherwise `None`. A disk that is gone, and broken blocks, replace a drawn error.
    fn draw_plan(
        &mut self,
        token: Token,
        kind: OpKind,
        range: BlockRange,
        from: Option<BlockRange>,
    ) -> FaultPlan {
        self.refresh();
        let (settings, draws) = (&self.settings, &mut self.draws);
        let is_error = draws.hits(settings.per_million(Fault::Error, kind));
        let has_effect = draws.hits(settings.error_effect);
        let is_dropped = draws.hits(settings.per_million(Fault::Drop, kind));
        let is_delayed = draws.hits(settings.per_million(Fault::Delay, kind));
        let is_reordered = draws.hits(settings.per_million(Fault::Reorder, kind));
        let (order, side) = (draws.next(), draws.next());
        let delay = 1 + order % u64::from(settings.delay_polls_max);
        let hold = match (is_dropped, is_delayed, is_reordered) {
            (true, _, _) => Some((Fault::Drop, Until::Released)),
            (false, true, _) => Some((Fault::Delay, Until::Poll(self.polls + delay))),
            (false, false, true) => Some((Fault::Reorder, Until::Poll(self.polls + 1))),
            (false, false, false) => None,
        };
        let until = hold.map(|(_, until)| until);
        let is_before = side & 1 == 0;
        let mut plan = FaultPlan {
            token,
            error: is_error.then(|| settings.error(kind)),
            has_effect: !is_error || has_effect,
            hold_before: until.filter(|_| is_before),
            hold_after: until.filter(|_| !is_before),
            held_by: hold.map(|(fault, _)| fault),
            order,
        };
        let gone = settings.is_gone.then_some(DiskError::Gone);
        if let Some(error) = gone.or_else(|| self.broken_error(kind, range, from)) {
            plan.error = Some(error);
            plan.has_effect = false;
        }
        plan
    }

    /// Returns the error of the first entry of `broken` for the command. `from`: source of a copy.
    fn broken_error(&self, kind: OpKind, range: BlockRange, from: Option<BlockRange>) -> Option<DiskError> {
        let of_source = |broken: &Broken| from.and_then(|from| broken.error(OpKind::Read, from));
        self.settings.broken.iter().find_map(|broken| of_source(broken).or_else(|| broken.error(kind, range)))
    }

    fn begin(&mut self, plan: FaultPlan, call: Call) -> Option<Done> {
        match plan.hold_before {
            Some(until) => {
                self.held.push(Held { until, order: plan.order, stage: HeldStage::Before(plan, call) });
                None
            }
            None => self.take_effect(plan, call),
        }
    }

    fn take_effect(&mut self, plan: FaultPlan, call: Call) -> Option<Done> {
        if !plan.has_effect {
            return self.end(plan, Done { token: plan.token, result: Ok(()), buf: call.into_buf() });
        }
        let token = inner_token(plan.token.owner(), self.plans.insert(plan));
        let done = call.submit(&mut *self.inner, token);
        done.and_then(|done| self.on_inner_done(done))
    }

    fn on_inner_done(&mut self, done: Done) -> Option<Done> {
        let Some(plan) = self.plans.remove(number_of(done.token)) else {
            panic!("the inner disk ended {:?}, which it does not have", done.token)
        };
        self.end(plan, Done { token: plan.token, ..done })
    }

    fn end(&mut self, plan: FaultPlan, mut done: Done) -> Option<Done> {
        if let Some(error) = plan.error {
            done.result = Err(error);
        }
        match plan.hold_after {
            Some(until) => {
                self.held.push(Held { until, order: plan.order, stage: HeldStage::After(done) });
                None
            }
            None => Some(done),
        }
    }

    /// Releases the commands whose hold ends in this poll, in the order of their sort keys.
    fn release_due(&mut self) {
        self.refresh();
        let all_released = self.released != self.settings.released;
        self.released = self.settings.released;
        let polls = self.polls;
        let mut index = 0;
        while let Some(held) = self.held.get(index) {
            let is_due = match held.until {
                Until::Poll(poll) => poll <= polls,
                Until::Released => all_released,
            };
            if is_due {
                self.due.push(self.held.swap_remove(index));
            } else {
                index += 1;
            }
        }
        let mut due = std::mem::take(&mut self.due);
        due.sort_unstable_by_key(|held| held.order);
        for held in due.drain(..) {
            let done = match held.stage {
                HeldStage::Before(plan, call) => self.take_effect(plan, call),
                HeldStage::After(done) => Some(done),
            };
            self.ready.extend(done);
        }
        self.due = due;
    }
}

impl DiskChannel for FaultChannel {
    fn geometry(&self) -> Geometry {
        self.inner.geometry()
    }

    fn inner(&self) -> Option<&dyn DiskChannel> {
        Some(&*self.inner)
    }

    fn inner_mut(&mut self) -> Option<&mut dyn DiskChannel> {
        Some(&mut *self.inner)
    }

    /// Returns `Fill` for a read with a fault that the inner disk ends in `prepare`. The read is then
    /// submitted with the inner disk's data. `submit` draws the same plan: the generator is reset.
    fn prepare(&mut self, request: &IoRequest, next: Option<u64>) -> Prepared {
        let prepared = self.inner.prepare(request, next);
        let Prepared::Ready(data) = prepared else { return prepared };
        let draws = self.draws.clone();
        let plan = self.draw_plan(Token(0), OpKind::Read, request.range, None);
        if plan.error.is_none() && plan.held_by.is_none() {
            self.control.count_in_place();
            return Prepared::Ready(data);
        }
        self.draws = draws;
        Prepared::Fill(data)
    }

    fn submit(&mut self, token: Token, request: &IoRequest, buf: Option<Buf>) -> Option<Done> {
        let plan = self.plan_command(token, OpKind::of(request.op), request.range, None);
        self.begin(plan, Call::Op(*request, buf))
    }

    fn compare_and_write(
        &mut self,
        token: Token,
        range: BlockRange,
        expected: Buf,
        data: Buf,
    ) -> Option<Done> {
        let plan = self.plan_command(token, OpKind::CompareAndWrite, range, None);
        self.begin(plan, Call::CompareAndWrite { range, expected, data })
    }

    fn copy(&mut self, token: Token, from: BlockRange, to: u64, fua: bool) -> Option<Done> {
        let range = BlockRange { lba: to, blocks: from.blocks };
        let plan = self.plan_command(token, OpKind::Copy, range, Some(from));
        self.begin(plan, Call::Copy { from, to, fua })
    }

    fn poll(&mut self, now: Nanos, done: &mut Vec<Done>) -> bool {
        self.polls += 1;
        let mut inner_done = std::mem::take(&mut self.inner_done);
        let mut is_busy = self.inner.poll(now, &mut inner_done);
        for done in inner_done.drain(..) {
            let done = self.on_inner_done(done);
            self.ready.extend(done);
        }
        self.inner_done = inner_done;
        self.release_due();
        is_busy |= !self.ready.is_empty();
        Done::give(&mut self.ready, done);
        is_busy || self.held.iter().any(|held| held.until != Until::Released)
    }

    /// Cancels the commands at the inner disk. Held commands are not cancelled: like commands at a slow
    /// medium, they may still take effect.
    fn cancel_owner(&mut self, owner: Owner) -> usize {
        self.inner.cancel_owner(owner);
        let own = |token: Token| token.owner() == owner;
        self.plans.iter().filter(|plan| own(plan.token)).count()
            + self.held.iter().filter(|held| own(held.token())).count()
            + Done::count_of(owner, &self.ready)
    }

    fn in_flight(&self) -> usize {
        self.plans.len() + self.held.len() + self.ready.len()
    }
}

#[cfg(test)]
mod tests;
