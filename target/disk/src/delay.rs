//! A layer that delays the commands of any disk by a modelled device time, for tests and benchmarks.
//!
//! The layer models one device that all cores share. Commands are submitted to the inner disk at once. Their
//! completions are returned when the modelled device would have finished the command:
//!
//! ```text
//!   submit ── inner disk ──────────────────────────────────────── its Done ──┐
//!        └─ next poll(now) ─> [ device: seek, then transfer ] ──> latency ───┴─> Done
//!                             one command after the other         in parallel
//! ```
//!
//! - `latency`: time from the end of a command's device work to its completion. Latencies run in parallel, as
//!   in an SSD.
//! - `bandwidth`: bytes per second of the device. The transfers of all cores are serial.
//! - `seek`: time of a head movement over the whole disk. A command moves the head from the end of the
//!   previous command in `seek * sqrt(distance / capacity)`, as for an accelerating arm. Seeks are serial
//!   too. A sequential command has no seek; the mean over random positions is 8/15 of `seek`. No rotation.
//!
//! Read, Write, Compare, Verify, and Write Zeroes without deallocation seek to their range and transfer its
//! bytes. A compare-and-write transfers its bytes twice. A copy seeks to both ranges and transfers the bytes
//! of both. Flush, Deallocate and Write Zeroes with deallocation transfer nothing: they wait for the device
//! work of earlier commands and for the latency.
//!
//! The clock is the argument of [`DiskChannel::poll`]. A command's time begins with the first poll after its
//! submission. The layer neither sleeps nor spins. `poll` returns true while a command waits only for its
//! time.
//!
//! The layer does not change the order of commands at the inner disk. A command ends no earlier than at the
//! inner disk.
//!
//! Limits: two cores that submit concurrently may reserve the device in one order and move the head in the
//! other. The sum of the seek times then follows the order of the head movements.

mod device;
#[cfg(test)]
mod tests;

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::sync::Arc;

use spindle_reactor::clock::Nanos;
use spindle_reactor::mem::Buf;

use self::device::{Device, Reservation, Work};
use crate::layer::{Call, Commands, inner_token, number_of};
use crate::shape::block_shift;
use crate::{
    BlockRange, ChannelContext, Disk, DiskChannel, Done, Geometry, IoRequest, Op, OpenError, Owner, Prepared,
    ResizeError, Token,
};

/// Longest latency, in microseconds: 10 s, less than Linux's I/O timeout of 30 s.
pub const LATENCY_US_MAX: u64 = 10_000_000;
/// Longest seek, in microseconds: 1 s.
pub const SEEK_US_MAX: u64 = 1_000_000;
/// Smallest bandwidth, in bytes per second: 64 KiB/s.
pub const BANDWIDTH_MIN: u64 = 64 << 10;
/// Largest bandwidth, in bytes per second: 1 TiB/s.
pub const BANDWIDTH_MAX: u64 = 1 << 40;

/// Settings of the delay layer. A value of zero or `None` adds no time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DelaySpec {
    /// Time from the end of a command's device work to its completion, in parallel: up to [`LATENCY_US_MAX`].
    pub latency: Nanos,
    /// Bytes per second of the device, [`BANDWIDTH_MIN`] to [`BANDWIDTH_MAX`]. `None`: unlimited.
    pub bandwidth: Option<u64>,
    /// Time of a seek over the whole disk: up to [`SEEK_US_MAX`].
    pub seek: Nanos,
}

/// The delay layer over one disk, shared by all cores. See the module.
pub struct DelayDisk {
    inner: Arc<dyn Disk>,
    device: Arc<Device>,
}

impl DelayDisk {
    /// Adds a delay layer over `inner`. Fails with [`OpenError::Setting`] if a setting is out of range.
    #[expect(clippy::new_ret_no_self, reason = "every kind is made as the interface that its users see")]
    pub fn new(inner: Arc<dyn Disk>, spec: &DelaySpec) -> Result<Arc<dyn Disk>, OpenError> {
        let refuse =
            |field, value: u64, allowed| Err(OpenError::setting(inner.name(), field, value, allowed));
        for (field, time, max) in
            [("delay.latency_us", spec.latency, LATENCY_US_MAX), ("delay.seek_us", spec.seek, SEEK_US_MAX)]
        {
            if time > Nanos::from_us(max) {
                return refuse(field, time.as_us(), format!("must be 0 to {max}"));
            }
        }
        let allowed = BANDWIDTH_MIN..=BANDWIDTH_MAX;
        if let Some(bandwidth) = spec.bandwidth.filter(|bandwidth| !allowed.contains(bandwidth)) {
            let allowed = format!("must be {BANDWIDTH_MIN} to {BANDWIDTH_MAX} bytes per second");
            return refuse("delay.bandwidth", bandwidth, allowed);
        }
        Ok(Arc::new(DelayDisk { inner, device: Arc::new(Device::new(*spec)) }))
    }
}

impl Disk for DelayDisk {
    fn name(&self) -> &str {
        self.inner.name()
    }

    fn kind(&self) -> &'static str {
        self.inner.kind()
    }

    fn geometry(&self) -> Geometry {
        self.inner.geometry()
    }

    fn inner(&self) -> Option<&dyn Disk> {
        Some(&*self.inner)
    }

    fn open(&self, context: &ChannelContext) -> Result<Box<dyn DiskChannel>, OpenError> {
        let depth = context.depth as usize;
        Ok(Box::new(DelayChannel {
            inner: self.inner.open(context)?,
            device: Arc::clone(&self.device),
            commands: Commands::with_capacity(depth),
            new: Vec::with_capacity(depth),
            times: BinaryHeap::with_capacity(depth),
            ready: VecDeque::with_capacity(depth),
            inner_done: Vec::with_capacity(depth.max(1)),
            prepared: None,
            waiting_for_time: 0,
            begun: 0,
            now: Nanos::ZERO,
        }))
    }

    fn resize(&self, bytes: u64) -> Result<(), ResizeError> {
        self.inner.resize(bytes)
    }
}

/// Event for which a command waits, in addition to its completion by the inner disk.
enum Wait {
    /// The next poll, which has the current time as its argument.
    Poll(Work),
    /// The command's due time, which is in `times`.
    Time(Reservation),
    Nothing,
}

struct Entry {
    token: Token,
    wait: Wait,
    /// Completion of the inner disk.
    done: Option<Done>,
}

struct DelayChannel {
    inner: Box<dyn DiskChannel>,
    device: Arc<Device>,
    commands: Commands<Entry>,
    /// Commands submitted since the last poll, in order.
    new: Vec<u32>,
    /// Due time, order of submission and index of each command with a due time. The earliest is on top.
    times: BinaryHeap<Reverse<(Nanos, u64, u32)>>,
    ready: VecDeque<Done>,
    /// Completions of the inner disk; empty between polls.
    inner_done: Vec<Done>,
    /// Read that the inner disk has ended in `prepare`, with its data. Kept until the next call.
    prepared: Option<(IoRequest, Buf)>,
    /// Number of commands that the inner disk has ended and that are not due yet.
    waiting_for_time: usize,
    /// Number of commands that have received a due time so far.
    begun: u64,
    now: Nanos,
}

impl DelayChannel {
    fn work(&self, op: Op, range: BlockRange) -> Work {
        match op {
            Op::Read
            | Op::Write { .. }
            | Op::Compare
            | Op::Verify
            | Op::WriteZeroes { deallocate: false, .. } => Work::at(range, self.shift()),
            Op::Flush | Op::WriteZeroes { deallocate: true, .. } | Op::Deallocate => Work::default(),
        }
    }

    fn shift(&self) -> u32 {
        block_shift(self.inner.geometry().block_bytes)
    }

    /// Adds a new command; returns its token for the inner disk.
    fn add_command(&mut self, token: Token, work: Work) -> Token {
        self.prepared = None;
        let number = self.commands.insert(Entry { token, wait: Wait::Poll(work), done: None });
        self.new.push(number);
        inner_token(token.owner(), number)
    }

    fn begin(&mut self, token: Token, work: Work, call: Call) -> Option<Done> {
        let inner = self.add_command(token, work);
        if let Some(done) = call.submit(&mut *self.inner, inner) {
            self.on_inner_done(done);
        }
        None
    }

    fn on_inner_done(&mut self, done: Done) {
        let number = number_of(done.token);
        let Some(entry) = self.commands.get_mut(number).filter(|entry| entry.done.is_none()) else {
            panic!("the inner disk ended {:?}, which it does not have", done.token)
        };
        entry.done = Some(done);
        self.waiting_for_time += 1;
        self.try_end(number);
    }

    /// Ends the command with index `number`, if it is due and the inner disk has ended it.
    fn try_end(&mut self, number: u32) {
        let is_over = |entry: &mut Entry| matches!(entry.wait, Wait::Nothing) && entry.done.is_some();
        let ended = self.commands.remove_if(number, is_over);
        let Some(Entry { token, done: Some(done), .. }) = ended else { return };
        self.waiting_for_time -= 1;
        self.ready.push_back(Done { token, ..done });
    }

    /// Reserves device time for the commands submitted since the last poll, and sets their due times.
    fn begin_new(&mut self, now: Nanos) {
        if self.new.is_empty() {
            return;
        }
        let capacity = self.inner.geometry().bytes();
        for number in self.new.drain(..) {
            let Some(Entry { wait, .. }) = self.commands.get_mut(number) else { continue };
            let Wait::Poll(work) = wait else { continue };
            let reservation = self.device.reserve(now, work, capacity);
            *wait = Wait::Time(reservation);
            self.times.push(Reverse((self.device.due(reservation), self.begun, number)));
            self.begun += 1;
        }
    }

    fn end_due(&mut self, now: Nanos) {
        while let Some(Reverse((_, _, number))) = self.times.peek().copied().filter(|first| first.0.0 <= now)
        {
            self.times.pop();
            if let Some(entry) = self.commands.get_mut(number) {
                entry.wait = Wait::Nothing;
            }
            self.try_end(number);
        }
    }
}

impl DiskChannel for DelayChannel {
    fn geometry(&self) -> Geometry {
        self.inner.geometry()
    }

    fn inner(&self) -> Option<&dyn DiskChannel> {
        Some(&*self.inner)
    }

    fn inner_mut(&mut self) -> Option<&mut dyn DiskChannel> {
        Some(&mut *self.inner)
    }

    /// Returns `Later` for a read that the inner disk ends in `prepare`, because the read must still be
    /// delayed. The data is kept until the read is submitted, which the caller does at once.
    fn prepare(&mut self, request: &IoRequest, next: Option<u64>) -> Prepared {
        self.prepared = None;
        match self.inner.prepare(request, next) {
            Prepared::Ready(data) => {
                self.prepared = Some((*request, data));
                Prepared::Later
            }
            prepared @ (Prepared::Fill(_) | Prepared::Pool | Prepared::Later | Prepared::Wait) => prepared,
        }
    }

    fn submit(&mut self, token: Token, request: &IoRequest, buf: Option<Buf>) -> Option<Done> {
        let work = self.work(request.op, request.range);
        let prepared = self.prepared.take().filter(|(asked, _)| asked == request && buf.is_none());
        let Some((_, data)) = prepared else { return self.begin(token, work, Call::Op(*request, buf)) };
        let inner = self.add_command(token, work);
        self.on_inner_done(Done { token: inner, result: Ok(()), buf: Some(data) });
        None
    }

    fn compare_and_write(
        &mut self,
        token: Token,
        range: BlockRange,
        expected: Buf,
        data: Buf,
    ) -> Option<Done> {
        let work = Work::at(range, self.shift()).twice();
        self.begin(token, work, Call::CompareAndWrite { range, expected, data })
    }

    fn copy(&mut self, token: Token, from: BlockRange, to: u64, fua: bool) -> Option<Done> {
        let target = BlockRange { lba: to, blocks: from.blocks };
        let work = Work::at(from, self.shift()).and_then(target, self.shift());
        self.begin(token, work, Call::Copy { from, to, fua })
    }

    fn poll(&mut self, now: Nanos, done: &mut Vec<Done>) -> bool {
        self.prepared = None;
        self.now = now;
        let mut inner_done = std::mem::take(&mut self.inner_done);
        let mut is_busy = self.inner.poll(now, &mut inner_done);
        inner_done.drain(..).for_each(|done| self.on_inner_done(done));
        self.inner_done = inner_done;
        is_busy |= !self.new.is_empty();
        self.begin_new(now);
        self.end_due(now);
        is_busy |= !self.ready.is_empty() || self.waiting_for_time > 0;
        Done::give(&mut self.ready, done);
        is_busy
    }

    /// Cancels commands at the inner disk and ends their delays. The next poll returns the commands that the
    /// inner disk has ended, later polls the others. Unused device time of the commands is freed. Otherwise
    /// the aborted commands of reconnecting hosts would accumulate device time.
    fn cancel_owner(&mut self, owner: Owner) -> usize {
        self.inner.cancel_owner(owner);
        let mut count = Done::count_of(owner, &self.ready);
        for number in self.commands.numbers() {
            let entry = self.commands.get_mut(number).filter(|entry| entry.token.owner() == owner);
            let Some(entry) = entry else { continue };
            count += 1;
            if let Wait::Time(reservation) = std::mem::replace(&mut entry.wait, Wait::Nothing) {
                self.device.give_back(reservation, self.now);
            }
            self.try_end(number);
        }
        let commands = &mut self.commands;
        let mut waits =
            |number: u32| commands.get_mut(number).is_some_and(|entry| !matches!(entry.wait, Wait::Nothing));
        self.new.retain(|number| waits(*number));
        self.times.retain(|Reverse((_, _, number))| waits(*number));
        count
    }

    fn in_flight(&self) -> usize {
        self.commands.len() + self.ready.len()
    }
}
