//! Stages of a run as sources of commands: fill the span, load it for a time, check it.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};
use spindle_nvme_initiator::{Buf, Failure, Nanos};

use super::{BenchError, ERRORS_SHOWN, LoadSpec, Measured};
use crate::random::Random;
use crate::report::Latencies;
use crate::verify::GenerationTable;

/// A read or write of one unit.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Command {
    /// Index of the unit in the span.
    pub(super) unit: u64,
    pub(super) is_read: bool,
}

/// Source of commands, called by the engine.
pub(super) trait Job {
    /// Returns the next command; with `--verify`, a write fills `buf` with the pattern. `None`: all tried
    /// units are in use, or the job is over.
    fn next(&mut self, buf: &mut Buf) -> Option<Command>;
    /// Handles the completion of `command`; `times` are those of submission and completion.
    fn ended(
        &mut self,
        command: Command,
        result: Result<(), Failure>,
        buf: Option<&Buf>,
        times: (Nanos, Nanos),
    );
    /// Updates the time. Called before completions, and every few turns without any.
    fn tick(&mut self, now: Nanos);
    /// A turn with completions took `time` of the processor.
    fn on_turn(&mut self, _time: Nanos) {}
    /// Returns true when `next` returns no further command.
    fn is_over(&self) -> bool;
    /// Returns the completed commands, for the progress; [`Check`] counts units read or skipped.
    fn done(&self) -> u64;
}

/// Counts of errors and of checked blocks, over all stages.
#[derive(Debug, Clone, Default)]
pub(super) struct Tally {
    /// Commands that failed or returned wrong data.
    pub(super) errors: u64,
    /// Messages of the first [`ERRORS_SHOWN`] errors.
    pub(super) shown: Vec<String>,
    /// Reads that returned wrong data.
    pub(super) mismatches: u64,
    /// Blocks with known content and correct data; a read with a wrong block adds none.
    pub(super) blocks_checked: u64,
}

impl Tally {
    pub(super) fn join(&mut self, other: Tally) {
        self.errors += other.errors;
        let room = ERRORS_SHOWN.saturating_sub(self.shown.len());
        self.shown.extend(other.shown.into_iter().take(room));
        self.mismatches += other.mismatches;
        self.blocks_checked += other.blocks_checked;
    }

    #[cold]
    fn error(&mut self, text: impl FnOnce() -> String) {
        self.errors += 1;
        if self.shown.len() < ERRORS_SHOWN {
            self.shown.push(text());
        }
    }

    #[cold]
    fn failed(&mut self, command: Command, failure: Failure) {
        let verb = if command.is_read { "read" } else { "write" };
        self.error(|| format!("{verb} of unit {}: {failure}", command.unit));
    }
}

/// Ends the command in the table and checks the data of a successful read. False: the data was wrong.
fn update_table(
    table: &mut GenerationTable,
    tally: &mut Tally,
    command: Command,
    result: Result<(), Failure>,
    buf: Option<&Buf>,
) -> bool {
    let unit = index(command.unit);
    if !command.is_read {
        table.end_write(unit, result.is_ok());
        return true;
    }
    match table.end_read(unit, buf.filter(|_| result.is_ok())) {
        Ok(blocks) => tally.blocks_checked += blocks,
        Err(mismatch) => {
            tally.mismatches += 1;
            tally.error(|| mismatch.to_string());
            return false;
        }
    }
    true
}

fn index(unit: u64) -> usize {
    usize::try_from(unit).unwrap_or(usize::MAX)
}

/// Writes every unit once, in order.
pub(super) struct Fill<'a> {
    table: &'a mut GenerationTable,
    tally: &'a mut Tally,
    next: u64,
    done: u64,
}

impl<'a> Fill<'a> {
    pub(super) fn new(table: &'a mut GenerationTable, tally: &'a mut Tally) -> Fill<'a> {
        Fill { table, tally, next: 0, done: 0 }
    }
}

impl Job for Fill<'_> {
    fn next(&mut self, buf: &mut Buf) -> Option<Command> {
        if self.is_over() || !self.table.begin_write(index(self.next), buf) {
            return None;
        }
        self.next += 1;
        Some(Command { unit: self.next - 1, is_read: false })
    }

    fn ended(&mut self, command: Command, result: Result<(), Failure>, buf: Option<&Buf>, _: (Nanos, Nanos)) {
        self.done += 1;
        update_table(self.table, self.tally, command, result, buf);
        if let Err(failure) = result {
            self.tally.failed(command, failure);
        }
    }

    fn tick(&mut self, _: Nanos) {}

    fn is_over(&self) -> bool {
        index(self.next) == self.table.units()
    }

    fn done(&self) -> u64 {
        self.done
    }
}

/// Reads, in order, each unit that has a block with known content.
pub(super) struct Check<'a> {
    table: &'a mut GenerationTable,
    tally: &'a mut Tally,
    next: u64,
}

impl<'a> Check<'a> {
    pub(super) fn new(table: &'a mut GenerationTable, tally: &'a mut Tally) -> Check<'a> {
        let mut check = Check { table, tally, next: 0 };
        check.skip();
        check
    }

    fn skip(&mut self) {
        while !self.is_over() && !self.table.is_known(index(self.next)) {
            self.next += 1;
        }
    }
}

impl Job for Check<'_> {
    fn next(&mut self, _: &mut Buf) -> Option<Command> {
        if self.is_over() || !self.table.begin_read(index(self.next)) {
            return None;
        }
        let unit = self.next;
        self.next += 1;
        self.skip();
        Some(Command { unit, is_read: true })
    }

    fn ended(&mut self, command: Command, result: Result<(), Failure>, buf: Option<&Buf>, _: (Nanos, Nanos)) {
        update_table(self.table, self.tally, command, result, buf);
        if let Err(failure) = result {
            self.tally.failed(command, failure);
        }
    }

    fn tick(&mut self, _: Nanos) {}

    fn is_over(&self) -> bool {
        index(self.next) >= self.table.units()
    }

    fn done(&self) -> u64 {
        self.next
    }
}

/// Most units that are tried, from the selected unit on, when units are in use.
const PROBES: u64 = 64;

/// Reads and writes for the warm-up, then for the measured time.
pub(super) struct Load<'a> {
    table: Option<&'a mut GenerationTable>,
    tally: &'a mut Tally,
    reads_percent: u8,
    is_random: bool,
    units: u64,
    random: Random,
    next: u64,
    warm_up: Nanos,
    measured: Nanos,
    started: Option<Nanos>,
    measured_from: Option<Nanos>,
    measured_to: Nanos,
    is_over: bool,
    is_slice: bool,
    operations: u64,
    done: u64,
    latency: Latencies,
    /// (latency in nanoseconds, count) of consecutive equal latencies that are not recorded yet. Commands
    /// sent in one call mostly complete in one receive, with equal latencies.
    equal_latencies: (u64, u64),
    cpu: Duration,
    busy: Option<Nanos>,
}

impl<'a> Load<'a> {
    pub(super) fn new(
        spec: &LoadSpec,
        table: Option<&'a mut GenerationTable>,
        tally: &'a mut Tally,
    ) -> Load<'a> {
        Load {
            table,
            tally,
            reads_percent: spec.reads_percent,
            is_random: spec.access.is_random(),
            units: spec.units,
            random: Random::new(spec.seed),
            next: 0,
            warm_up: spec.warm_up.into(),
            measured: spec.measured.into(),
            started: None,
            measured_from: None,
            measured_to: Nanos::ZERO,
            is_over: false,
            is_slice: false,
            operations: 0,
            done: 0,
            latency: Latencies::new(),
            equal_latencies: (0, 0),
            cpu: Duration::ZERO,
            busy: None,
        }
    }

    /// Makes this load a slice of a longer one: a sequential load begins at `unit`. Commands in flight at the
    /// end do not count, but their latencies do: else the ends of slices hide the longest.
    pub(super) fn continue_at(&mut self, unit: u64) {
        self.next = unit;
        self.is_slice = true;
    }

    /// Returns the unit at which a sequential load goes on.
    pub(super) fn next_unit(&self) -> u64 {
        self.next
    }

    pub(super) fn measured(mut self) -> Measured {
        self.flush();
        let elapsed = (self.measured_to - self.measured_from.unwrap_or(self.measured_to)).as_duration();
        let cpu_share = (!elapsed.is_zero()).then(|| self.cpu.as_secs_f64() / elapsed.as_secs_f64());
        let (operations, busy) = (self.operations, self.busy.map(Nanos::as_duration));
        Measured { elapsed, operations, latency: self.latency, cpu_share, busy }
    }

    #[inline]
    fn pick(&mut self) -> u64 {
        if self.is_random {
            return self.random.below(self.units);
        }
        let unit = self.next;
        self.next = if unit + 1 == self.units { 0 } else { unit + 1 };
        unit
    }

    /// Selects a unit, or the next free unit if it is in use, and begins the command in the table. `None`:
    /// [`PROBES`] units are in use. Without a table no unit counts as in use.
    fn begin(&mut self, is_read: bool, buf: &mut Buf) -> Option<u64> {
        let picked = self.pick();
        let Some(table) = &mut self.table else { return Some(picked) };
        for probe in 0..PROBES.min(self.units) {
            let unit = (picked + probe) % self.units;
            let has_begun =
                if is_read { table.begin_read(index(unit)) } else { table.begin_write(index(unit), buf) };
            if has_begun {
                return Some(unit);
            }
        }
        None
    }

    #[inline]
    fn picks_read(&mut self) -> bool {
        match self.reads_percent {
            100 => true,
            0 => false,
            percent => self.random.below(100) < u64::from(percent),
        }
    }

    /// As [`Job::next`], for a load without a table and without buffers. `None`: the load is over.
    #[inline]
    pub(super) fn next_untracked(&mut self) -> Option<Command> {
        if self.is_over {
            return None;
        }
        let is_read = self.picks_read();
        Some(Command { unit: self.pick(), is_read })
    }

    /// Counts a success of [`Load::next_untracked`]; `times` are those of submission and completion.
    #[inline]
    pub(super) fn succeeded(&mut self, times: (Nanos, Nanos)) {
        self.done += 1;
        self.count(times);
    }

    /// Returns the error of a run that ends with a failed command.
    #[cold]
    pub(super) fn fatal(&mut self, command: Command, failure: Failure) -> BenchError {
        self.tally.failed(command, failure);
        BenchError::Errors { count: self.tally.errors, shown: self.tally.shown.clone() }
    }

    #[inline]
    fn count(&mut self, (sent, back): (Nanos, Nanos)) {
        if !self.is_over {
            self.operations += 1;
            self.record((back - sent).as_u64());
        } else if self.is_slice && self.measured_from.is_some_and(|from| sent >= from) {
            self.record((back - sent).as_u64());
        }
    }

    #[inline]
    fn record(&mut self, nanoseconds: u64) {
        let (value, count) = &mut self.equal_latencies;
        if *value == nanoseconds {
            *count += 1;
            return;
        }
        if *count > 0 {
            self.latency.record(*value, *count);
        }
        self.equal_latencies = (nanoseconds, 1);
    }

    fn flush(&mut self) {
        let (value, count) = std::mem::take(&mut self.equal_latencies);
        if count > 0 {
            self.latency.record(value, count);
        }
    }

    fn begin_measuring(&mut self, now: Nanos) {
        self.equal_latencies = (0, 0);
        self.latency.clear();
        self.operations = 0;
        self.cpu = cpu_time();
        self.measured_from = Some(now);
    }

    fn end_measuring(&mut self, now: Nanos) {
        self.flush();
        self.cpu = cpu_time().saturating_sub(self.cpu);
        self.measured_to = now;
        self.is_over = true;
    }
}

impl Job for Load<'_> {
    #[inline]
    fn next(&mut self, buf: &mut Buf) -> Option<Command> {
        if self.is_over {
            return None;
        }
        let is_read = self.picks_read();
        let unit = self.begin(is_read, buf)?;
        Some(Command { unit, is_read })
    }

    #[inline]
    fn ended(
        &mut self,
        command: Command,
        result: Result<(), Failure>,
        buf: Option<&Buf>,
        times: (Nanos, Nanos),
    ) {
        self.done += 1;
        let is_right = match &mut self.table {
            Some(table) => update_table(table, self.tally, command, result, buf),
            None => true,
        };
        match result {
            Err(failure) => self.tally.failed(command, failure),
            Ok(()) if is_right => self.count(times),
            Ok(()) => {}
        }
    }

    #[inline]
    fn tick(&mut self, now: Nanos) {
        let began = *self.started.get_or_insert(now);
        match self.measured_from {
            None if now >= began + self.warm_up => self.begin_measuring(now),
            Some(from) if !self.is_over && now >= from + self.measured => self.end_measuring(now),
            None | Some(_) => {}
        }
    }

    fn on_turn(&mut self, time: Nanos) {
        if self.measured_from.is_some() && !self.is_over {
            self.busy = Some(self.busy.unwrap_or(Nanos::ZERO) + time);
        }
    }

    #[inline]
    fn is_over(&self) -> bool {
        self.is_over
    }

    #[inline]
    fn done(&self) -> u64 {
        self.done
    }
}

pub(super) fn cpu_time() -> Duration {
    Duration::try_from(clock_gettime(ClockId::ThreadCPUTime)).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use spindle_nvme_initiator::{Pages, Pool, ZoneSpec};

    use super::*;
    use crate::access::Access;

    fn spec(access: Access, verify: bool) -> LoadSpec {
        LoadSpec {
            access,
            reads_percent: access.reads_percent(50),
            unit_bytes: 4096,
            unit_blocks: 8,
            block_bytes: 512,
            units: 16,
            depths: vec![4],
            warm_up: Duration::from_millis(100),
            measured: Duration::from_secs(1),
            verify,
            seed: 7,
        }
    }

    fn buf() -> Buf {
        let pool = Pool::new(&[ZoneSpec { buffer_bytes: 4096, count: 1 }], Pages::Base).expect("pool");
        pool.take(4096).expect("buffer")
    }

    const MS: fn(u64) -> Nanos = Nanos::from_ms;

    #[test]
    fn only_the_measured_time_counts_and_the_run_ends_with_it() {
        let (mut tally, mut buf) = (Tally::default(), buf());
        let spec = spec(Access::RandRead, false);
        let mut load = Load::new(&spec, None, &mut tally);
        for at in 0..=1200 {
            load.tick(MS(at));
            if let Some(command) = load.next(&mut buf) {
                assert!(command.is_read && command.unit < 16);
                load.ended(command, Ok(()), None, (MS(at), MS(at + 3)));
            }
        }
        assert!(load.is_over() && load.next(&mut buf).is_none());
        let measured = load.measured();
        assert_eq!((measured.operations, measured.elapsed), (1000, Duration::from_secs(1)));
        assert_eq!(measured.latency.count(), 1000);
        assert!((measured.latency.percentile_us(50.0) / 3000.0 - 1.0).abs() < 1e-3);
    }

    #[test]
    fn commands_in_flight_at_the_end_of_a_slice_have_a_latency_and_do_not_count() {
        for (is_slice, latencies) in [(true, 3), (false, 1)] {
            let (mut tally, spec) = (Tally::default(), spec(Access::Read, false));
            let mut load = Load::new(&spec, None, &mut tally);
            if is_slice {
                load.continue_at(5);
                assert_eq!(load.next_unit(), 5);
            }
            load.tick(MS(0));
            load.tick(MS(100));
            load.ended(Command::default(), Ok(()), None, (MS(500), MS(501)));
            load.tick(MS(1100));
            // The last one was sent before the measured time.
            for (sent, back) in [(200, 1200), (1000, 1200), (50, 1200)] {
                load.ended(Command::default(), Ok(()), None, (MS(sent), MS(back)));
            }
            let measured = load.measured();
            assert_eq!((measured.operations, measured.latency.count()), (1, latencies));
            assert_eq!(measured.latency.max_us() > 999_000.0, is_slice);
        }
    }

    #[test]
    fn equal_latencies_in_a_row_are_all_counted() {
        let (mut tally, spec) = (Tally::default(), spec(Access::Read, false));
        let mut load = Load::new(&spec, None, &mut tally);
        load.tick(MS(0));
        load.tick(MS(100));
        for took in [1, 1, 1, 2, 2, 1, 9] {
            load.ended(Command::default(), Ok(()), None, (MS(0), MS(took)));
        }
        load.tick(MS(1100));
        let latency = load.measured().latency;
        assert_eq!(latency.count(), 7);
        assert!(latency.percentile_us(50.0) < 1010.0 && latency.max_us() > 8_990.0);
    }

    #[test]
    fn sequential_addresses_come_round_and_random_ones_reach_everything() {
        let (mut tally, mut buf) = (Tally::default(), buf());
        let sequential = spec(Access::Write, false);
        let mut load = Load::new(&sequential, None, &mut tally);
        let units: Vec<u64> =
            (0..18).filter_map(|_| load.next(&mut buf)).map(|command| command.unit).collect();
        assert_eq!(units[14..], [14, 15, 0, 1]);
        let random = spec(Access::RandRw, false);
        let mut load = Load::new(&random, None, &mut tally);
        let commands: Vec<Command> = (0..2000).filter_map(|_| load.next(&mut buf)).collect();
        for unit in 0..16 {
            assert!(commands.iter().any(|command| command.unit == unit));
        }
        let reads = commands.iter().filter(|command| command.is_read).count();
        assert!((850..1150).contains(&reads), "{reads} reads of 2000 at 50 %");
    }

    #[test]
    fn a_verified_run_finds_what_a_faulty_disk_did() {
        let (mut tally, mut data) = (Tally::default(), buf());
        let spec = spec(Access::RandWrite, true);
        let mut table = spec.table().expect("verified");
        let mut disk: Vec<Vec<u8>> = vec![Vec::new(); 16];
        let mut fill = Fill::new(&mut table, &mut tally);
        while let Some(command) = fill.next(&mut data) {
            disk[index(command.unit)] = data.as_slice().expect("one piece").to_vec();
            fill.ended(command, Ok(()), Some(&data), (MS(0), MS(0)));
        }
        assert!(fill.is_over() && fill.done() == 16);
        disk.swap(3, 5);
        disk[9][600] ^= 1;
        let mut check = Check::new(&mut table, &mut tally);
        while let Some(command) = check.next(&mut data) {
            data.copy_in(0, &disk[index(command.unit)]);
            check.ended(command, Ok(()), Some(&data), (MS(0), MS(0)));
        }
        assert_eq!((tally.errors, tally.mismatches, tally.blocks_checked), (3, 3, 13 * 8));
        assert!(
            tally.shown[0].contains("LBA 24, ") && tally.shown[0].contains("found LBA 40"),
            "{:?}",
            tally.shown
        );
        assert!(tally.shown[2].contains("LBA 73, byte 88"), "{:?}", tally.shown);
    }

    #[test]
    fn failed_commands_are_counted_and_the_first_are_shown() {
        let mut tally = Tally::default();
        let spec = spec(Access::Read, false);
        let mut load = Load::new(&spec, None, &mut tally);
        for _ in 0..20 {
            load.ended(Command { unit: 4, is_read: true }, Err(Failure::Lost), None, (MS(0), MS(1)));
        }
        assert_eq!((tally.errors, tally.shown.len()), (20, ERRORS_SHOWN));
        assert!(tally.shown[0].contains("read of unit 4"), "{:?}", tally.shown);
    }
}
