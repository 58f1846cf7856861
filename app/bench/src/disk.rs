//! `spindle bench disk DISK`: measures a local disk, without a network, through the [`DiskChannel`] interface
//! that the target uses. One thread submits and polls; `--core` pins it.
//!
//! The result is the most that one core of `spindle serve` can reach with the disk at this queue depth. It
//! can be compared with `fio` on the kernel's driver.
//!
//! The data is not checked. Writes destroy the data on the disk and need `--destroy-data`.

use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use crate::say;
use spindle_nvme_pcie::{DriveError, Drives, PciAddress, PciAddressError, Settings};
use spindle_reactor::affinity::{AffinityError, pin_current_thread};
use spindle_reactor::clock::{Clock, Nanos};
use spindle_reactor::mem::{Pages, Pool, PoolError, ZoneSpec};
use spindle_target_disk::cache::{CACHE_BYTES_MAX, CACHE_BYTES_MIN, READ_AHEAD_BYTES_MAX};
use spindle_target_disk::file::{FileDisk, FileSpec};
use spindle_target_disk::ng::{NgDisk, NgSpec};
use spindle_target_disk::{
    BlockRange, CacheCounts, CacheSpec, CacheUse, CachedDisk, ChannelContext, DelayDisk, DelaySpec, Disk,
    DiskChannel, DiskError, Done, IoRequest, NullDisk, NullSpec, Op, OpenError, PolicyKind, Prepared, Token,
};

use crate::args::DiskArgs;
use crate::random::Random;
use crate::report::sizes::{self, CacheRun};
use crate::report::{self, BenchResult, Latencies, Run};
use crate::size::Bytes;
use crate::zipf::Zipf;

/// Warm-up before the measured time, in which queues are created and caches fill.
const WARM_UP: Duration = Duration::from_millis(500);
/// Longest wait for the outstanding commands after the measured time.
const DRAIN_MAX: Duration = Duration::from_secs(60);
/// Most distinct sizes in one `--cache`.
const SIZES_MAX: usize = 64;

/// A disk as given on the command line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DiskAddress {
    /// PCI address of an NVMe drive that this process drives through vfio-pci, and a namespace identifier.
    Nvme(PciAddress, u32),
    /// Generic device (`/dev/ngXnY`) of a namespace that the kernel drives.
    Ng(std::path::PathBuf),
    /// A file or block device.
    File(std::path::PathBuf),
    /// No I/O; shows the overhead of the measurement.
    Null,
}

impl std::fmt::Display for DiskAddress {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            DiskAddress::Nvme(address, namespace) => write!(f, "nvme:{address}/{namespace}"),
            DiskAddress::Ng(path) => write!(f, "ng:{}", path.display()),
            DiskAddress::File(path) => write!(f, "file:{}", path.display()),
            DiskAddress::Null => f.write_str("null:"),
        }
    }
}

/// Error of a `DISK` argument.
#[derive(Debug, thiserror::Error)]
pub enum DiskAddressError {
    #[error("{0:?}: must be nvme:ADDRESS, nvme:ADDRESS/NAMESPACE, ng:PATH, file:PATH or null:")]
    Kind(String),
    #[error(transparent)]
    Address(#[from] PciAddressError),
    #[error("namespace {0:?}: must be a number from 1 to 4294967294")]
    Namespace(String),
}

impl FromStr for DiskAddress {
    type Err = DiskAddressError;

    fn from_str(text: &str) -> Result<DiskAddress, DiskAddressError> {
        match text.split_once(':') {
            Some(("nvme", place)) => {
                let (address, namespace) = place.split_once('/').unwrap_or((place, "1"));
                let number = namespace.parse().ok().filter(|number| (1..u32::MAX).contains(number));
                let number = number.ok_or_else(|| DiskAddressError::Namespace(namespace.to_owned()))?;
                Ok(DiskAddress::Nvme(address.parse()?, number))
            }
            Some(("ng", path)) if !path.is_empty() => Ok(DiskAddress::Ng(path.into())),
            Some(("file", path)) if !path.is_empty() => Ok(DiskAddress::File(path.into())),
            Some(("null", "")) => Ok(DiskAddress::Null),
            Some(_) | None => Err(DiskAddressError::Kind(text.to_owned())),
        }
    }
}

/// Failure of `bench disk`.
#[derive(Debug, thiserror::Error)]
pub enum DiskBenchError {
    #[error(transparent)]
    Drive(#[from] DriveError),
    #[error(transparent)]
    Open(#[from] OpenError),
    #[error(transparent)]
    Core(#[from] AffinityError),
    #[error(transparent)]
    Pool(#[from] PoolError),
    /// A value out of range, or a value that the disk or another option does not allow.
    #[error("{option} is {value}, but {rule}")]
    Size { option: &'static str, value: String, rule: String },
    #[error("--rw {0}: writes destroy what is on the disk; --destroy-data allows it")]
    Destroys(crate::access::Access),
    #[error("{0} commands failed, the first with: {1}")]
    Failed(u64, DiskError),
    #[error("{0} commands did not end within {DRAIN_MAX:?}")]
    Stuck(usize),
    #[error("cannot print the result: {0}")]
    Json(#[from] serde_json::Error),
    #[error(transparent)]
    Plot(#[from] report::plot::PlotError),
}

/// Runs `spindle bench disk DISK` and prints the result. Fails if any command failed, also in the warm-up.
pub fn run(args: &DiskArgs) -> Result<(), DiskBenchError> {
    if args.load.rw.reads_percent(args.load.mix) < 100 && !args.destroy_data {
        return Err(DiskBenchError::Destroys(args.load.rw));
    }
    if let Some(exponent) = args.zipf.filter(|_| !args.load.rw.is_random()) {
        let rule = format!("--rw {} is sequential; allowed are randread, randwrite and randrw", args.load.rw);
        return Err(DiskBenchError::Size { option: "--zipf", value: exponent.to_string(), rule });
    }
    let caches = caches(args)?;
    if let Some(core) = args.core {
        pin_current_thread(core)?;
    }
    if caches.len() > 1 {
        return run_each(args, &caches);
    }
    let (result, cache) = run_one(args, caches.first())?;
    if args.output.json {
        say!("{}", report::json::render(&result)?);
    } else {
        say!("{} on {}", result.run.summary(), result.run.address.as_deref().unwrap_or_default());
        say!("{}", report::table::render(&[("bench disk", &result)]));
        if let Some(CacheUse { counts, .. }) = cache {
            let CacheCounts { hits, misses, passed, evictions, ahead, useful, late, wasted, .. } = counts;
            say!("cache: {hits} pages found, {misses} missed, {passed} passed, {evictions} evicted");
            say!("read ahead: {ahead} pages, {useful} found, {late} late, {wasted} wasted");
        }
    }
    if let Some(path) = &args.output.plot {
        report::plot::write(path, &result.run.summary(), &[("bench disk", &result.latency)])?;
    }
    Ok(())
}

/// Measures each cache in turn and prints all results. Each run opens the disk again, with an empty cache.
fn run_each(args: &DiskArgs, caches: &[CacheSpec]) -> Result<(), DiskBenchError> {
    let mut runs = Vec::with_capacity(caches.len());
    for spec in caches {
        let (result, cache) = run_one(args, Some(spec))?;
        if runs.is_empty() && !args.output.json {
            say!("{} on {}", result.run.summary(), result.run.address.as_deref().unwrap_or_default());
        }
        let counts = cache.map(|cache| cache.counts).unwrap_or_default();
        runs.push(CacheRun::new(spec, &counts, result));
    }
    if args.output.json {
        say!("{}", sizes::json(&runs)?);
    } else {
        say!("{}", sizes::table(&runs));
    }
    if let Some(path) = &args.output.plot {
        sizes::write(path, &runs)?;
    }
    Ok(())
}

fn run_one(
    args: &DiskArgs,
    cache: Option<&CacheSpec>,
) -> Result<(BenchResult, Option<CacheUse>), DiskBenchError> {
    let mut source = with_delay(args, open(&args.disk)?)?;
    if cache.is_some() {
        source = CachedDisk::new(source, cache)?;
    }
    let mut engine = Engine::new(args, source.as_ref())?;
    let end = engine.measure(args.load.seconds);
    drop(engine.disk);
    let cache = source.cache();
    drop(source);
    spindle_nvme_pcie::finish();
    Ok((end?, cache))
}

fn open(place: &DiskAddress) -> Result<Arc<dyn Disk>, DiskBenchError> {
    Ok(match place {
        DiskAddress::Nvme(address, namespace) => {
            Drives::here().open(*address, Settings::default())?.disk("bench", *namespace)?
        }
        DiskAddress::Ng(path) => NgDisk::new("bench", &NgSpec::new(path))?,
        DiskAddress::File(path) => FileDisk::new("bench", &FileSpec::new(path, 512))?,
        DiskAddress::Null => NullDisk::new("bench", NullSpec { bytes: 1 << 40, block_bytes: 512 })?,
    })
}

fn with_delay(args: &DiskArgs, disk: Arc<dyn Disk>) -> Result<Arc<dyn Disk>, DiskBenchError> {
    let (latency, seek) = (Nanos::from_us(args.latency_us), Nanos::from_us(args.seek_us));
    let spec = DelaySpec { latency, bandwidth: args.bandwidth.map(Bytes::get), seek };
    if spec == DelaySpec::default() { Ok(disk) } else { Ok(DelayDisk::new(disk, &spec)?) }
}

/// Returns one cache for each `--policy` and `--cache` size, ordered by policy, then size; none without
/// `--cache`. Fails for values that are not allowed.
fn caches(args: &DiskArgs) -> Result<Vec<CacheSpec>, DiskBenchError> {
    let refuse = |option, value: String, rule: String| Err(DiskBenchError::Size { option, value, rule });
    let mut sizes = args.cache.clone();
    sizes.sort_unstable();
    sizes.dedup();
    let Some(first) = sizes.first() else { return Ok(Vec::new()) };
    if matches!(args.disk, DiskAddress::Null) {
        let rule = "a cache is for nvme:ADDRESS, file:PATH and ng:PATH".to_owned();
        return refuse("--cache", first.to_string(), rule);
    }
    if sizes.len() > SIZES_MAX {
        let rule = format!("there may be {SIZES_MAX} at most");
        return refuse("--cache", format!("{} sizes", sizes.len()), rule);
    }
    let allowed = CACHE_BYTES_MIN..=CACHE_BYTES_MAX;
    if let Some(size) = sizes.iter().find(|size| !allowed.contains(&size.get())) {
        let (least, most) = (Bytes::new(CACHE_BYTES_MIN), Bytes::new(CACHE_BYTES_MAX));
        return refuse("--cache", size.to_string(), format!("must be {least} to {most}"));
    }
    let read_ahead = u32::try_from(args.read_ahead.get()).ok().filter(|it| *it <= READ_AHEAD_BYTES_MAX);
    let Some(read_ahead) = read_ahead else {
        let rule = format!("must be 0 to {}", Bytes::new(READ_AHEAD_BYTES_MAX.into()));
        return refuse("--read-ahead", args.read_ahead.to_string(), rule);
    };
    let is_asked = |policy: &PolicyKind| args.policy.iter().any(|name| name == policy.name());
    let policies = [PolicyKind::S3Fifo, PolicyKind::Lru].into_iter().filter(is_asked);
    let spec = |policy, size: &Bytes| {
        let shared = CacheSpec::new(size.get(), policy, Pages::Transparent);
        CacheSpec { read_ahead, ..shared }
    };
    Ok(policies.flat_map(|policy| sizes.iter().map(move |size| spec(policy, size))).collect())
}

/// Disk, load and counters of the measuring thread. A unit is the blocks of one command.
struct Engine {
    disk: Box<dyn DiskChannel>,
    run: Run,
    pool: Pool,
    unit_blocks: u32,
    unit_bytes: u32,
    units: u64,
    reads_percent: u8,
    /// Time at which the command of each token was submitted.
    submitted: Vec<Nanos>,
    free_tokens: Vec<usize>,
    random: Random,
    zipf: Option<Zipf>,
    next: u64,
    done: Vec<Done>,
    failed: u64,
    first_error: Option<DiskError>,
}

impl Engine {
    fn new(args: &DiskArgs, source: &dyn Disk) -> Result<Engine, DiskBenchError> {
        let geometry = source.geometry();
        let refuse = |option, value: String, rule: String| Err(DiskBenchError::Size { option, value, rule });
        let (bytes, qd) = (args.load.bs.get(), args.load.qd);
        let block = u64::from(geometry.block_bytes);
        let is_fit = bytes > 0 && bytes % block == 0 && bytes <= 16 << 20;
        let Some(unit_bytes) = u32::try_from(bytes).ok().filter(|_| is_fit) else {
            let rule = format!("it must be 1 or more of the disk's blocks of {block} bytes, at most 16 MiB");
            return refuse("--bs", args.load.bs.to_string(), rule);
        };
        let span = args.span.map_or(geometry.bytes(), Bytes::get);
        let units = span.min(geometry.bytes()) / bytes;
        if units == 0 || span > geometry.bytes() {
            let rule = format!("the disk has {} bytes, and a command has {bytes}", geometry.bytes());
            return refuse("--span", span.to_string(), rule);
        }
        let depth = u32::try_from(qd).unwrap_or(u32::MAX);
        let zone = ZoneSpec { buffer_bytes: unit_bytes.next_multiple_of(4096), count: depth };
        let pool = Pool::new(&[zone], Pages::Huge)?;
        let disk = source.open(&ChannelContext { core: 0, pool: pool.clone(), depth })?;
        let run = Run {
            tool: "bench disk",
            address: Some(args.disk.to_string()),
            nqn: None,
            rw: args.load.rw,
            mix: (args.load.rw == crate::access::Access::RandRw).then_some(args.load.mix),
            zipf: args.zipf,
            bs: args.load.bs,
            qd,
            queues: 1,
            span: Some(Bytes::new(units * bytes)),
            seconds: args.load.seconds.as_secs_f64(),
            cores: args.core.into_iter().collect(),
            verify: None,
            congestion: None,
        };
        Ok(Engine {
            disk,
            run,
            pool,
            unit_blocks: unit_bytes / geometry.block_bytes,
            unit_bytes,
            units,
            reads_percent: args.load.rw.reads_percent(args.load.mix),
            submitted: vec![Nanos::ZERO; qd],
            free_tokens: (0..qd).collect(),
            random: Random::new(1),
            zipf: args.zipf.map(|exponent| Zipf::new(units, exponent)),
            next: 0,
            done: Vec::with_capacity(qd.max(64)),
            failed: 0,
            first_error: None,
        })
    }

    /// Warms up, measures for `time`, then waits at most [`DRAIN_MAX`]. Fails if any command failed.
    fn measure(&mut self, time: Duration) -> Result<BenchResult, DiskBenchError> {
        let mut latency = Latencies::new();
        let mut now = Clock::now();
        let begin = now + Nanos(u64::try_from(WARM_UP.as_nanos()).unwrap_or(0));
        let end = begin + Nanos(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX / 2));
        let (mut first, mut last) = (None, begin);
        while now < end {
            self.fill(now);
            let ended = self.poll(&mut now, |submitted, now| {
                if now >= begin && now < end {
                    latency.record((now - submitted).as_u64(), 1);
                }
            });
            if ended && now >= begin {
                first.get_or_insert(begin);
                last = now;
            }
        }
        let deadline = end + Nanos(u64::try_from(DRAIN_MAX.as_nanos()).unwrap_or(0));
        while self.free_tokens.len() < self.submitted.len() {
            self.poll(&mut now, |_, _| ());
            if now > deadline {
                return Err(DiskBenchError::Stuck(self.submitted.len() - self.free_tokens.len()));
            }
        }
        if let Some(error) = self.first_error {
            return Err(DiskBenchError::Failed(self.failed, error));
        }
        let elapsed = (last.min(end) - begin).as_duration();
        Ok(BenchResult {
            run: self.run.clone(),
            elapsed,
            operations: latency.count(),
            errors: self.failed,
            latency,
            line_round_trip_ns: None,
            cpu_share: None,
        })
    }

    /// Submits commands until the queue depth is reached or a command completes before `submit` returns.
    #[inline]
    fn fill(&mut self, now: Nanos) {
        while let Some(index) = self.free_tokens.pop() {
            self.submitted[index] = now;
            let lba = self.next_unit() * u64::from(self.unit_blocks);
            let range = BlockRange { lba, blocks: self.unit_blocks };
            let is_read = self.reads_percent == 100 || self.random.below(100) < self.reads_percent.into();
            let op = if is_read { Op::Read } else { Op::Write { fua: false } };
            let (token, request) = (Token(index as u64), IoRequest::new(op, range));
            let done = match self.disk.prepare(&request, None) {
                Prepared::Ready(data) => Some(Done { token, result: Ok(()), buf: Some(data) }),
                Prepared::Fill(buf) => self.disk.submit(token, &request, Some(buf)),
                Prepared::Later => self.disk.submit(token, &request, None),
                Prepared::Pool | Prepared::Wait => {
                    self.disk.submit(token, &request, self.pool.take(self.unit_bytes))
                }
            };
            if let Some(done) = done {
                self.done.push(done);
                return;
            }
        }
    }

    fn next_unit(&mut self) -> u64 {
        if let Some(zipf) = &self.zipf {
            return zipf.draw(&mut self.random);
        }
        if self.run.rw.is_random() {
            return self.random.below(self.units);
        }
        self.next = (self.next + 1) % self.units;
        self.next
    }

    /// Collects completions and sets `now` to the time after that. Calls `ended` with each command's
    /// submission time and `now`. Returns whether there were completions.
    #[inline]
    fn poll(&mut self, now: &mut Nanos, mut ended: impl FnMut(Nanos, Nanos)) -> bool {
        let mut done = std::mem::take(&mut self.done);
        self.disk.poll(*now, &mut done);
        *now = Clock::now();
        let had_any = !done.is_empty();
        for done in done.drain(..) {
            let index = usize::try_from(done.token.0).unwrap_or(usize::MAX);
            if let Err(error) = done.result {
                self.failed += 1;
                self.first_error.get_or_insert(error);
            }
            if let Some(submitted) = self.submitted.get(index) {
                ended(*submitted, *now);
                self.free_tokens.push(index);
            }
        }
        self.done = done;
        had_any
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::{BenchArgs, BenchCommand, parse};

    fn refusal(options: &[&str]) -> String {
        refusal_of("null:", options)
    }

    fn refusal_of(disk: &str, options: &[&str]) -> String {
        run(&parsed(disk, options)).expect_err("refused").to_string()
    }

    fn parsed(disk: &str, options: &[&str]) -> DiskArgs {
        let line = format!("bench disk {disk} --seconds 0.01 {}", options.join(" "));
        let line = line.trim_end();
        let Ok(BenchArgs { command: Some(BenchCommand::Disk(args)), .. }) = parse(line) else {
            panic!("{line}")
        };
        args
    }

    #[test]
    fn a_command_of_no_bytes_is_refused_with_what_is_allowed() {
        let error = refusal(&["--bs", "0"]);
        assert!(error.contains("--bs is 0") && error.contains("blocks of 512 bytes"), "{error}");
    }

    #[test]
    fn sizes_of_caches_and_the_law_of_addresses_are_refused_before_the_disk_is_opened() {
        let many: Vec<String> = (1..=65).map(|mib| format!("{mib}MiB")).collect();
        for (options, wanted) in [
            (["--cache", "0"], "--cache is 0 B, but must be 64 KiB to 8 TiB"),
            (["--cache", "1GiB,16TiB,8MiB"], "--cache is 16 TiB, but must be 64 KiB to 8 TiB"),
            (["--cache", &many.join(",")], "--cache is 65 sizes, but there may be 64 at most"),
            (["--rw=read", "--zipf=1.5"], "--zipf is 1.5, but --rw read is sequential"),
        ] {
            let error = refusal_of("file:/nonexistent", &options);
            assert!(error.contains(wanted), "{error}");
        }
        assert!(refusal(&["--cache", "8MiB,9MiB"]).contains("--cache is 8 MiB, but a cache is for"));
    }

    #[test]
    fn there_is_a_cache_for_each_size_and_policy() {
        let caches = |options: &[&str]| -> Vec<(u64, &str)> {
            let caches = caches(&parsed("file:a", options)).expect("caches");
            caches.iter().map(|spec| (spec.bytes >> 20, spec.policy.name())).collect()
        };
        assert_eq!(caches(&[]), []);
        assert_eq!(caches(&["--cache=2M", "--policy=lru"]), [(2, "lru")]);
        let all = [(1, "s3-fifo"), (2, "s3-fifo"), (1, "lru"), (2, "lru")];
        assert_eq!(caches(&["--cache=2M,1M,2048K", "--policy=lru,s3-fifo"]), all);
    }

    #[test]
    fn a_disk_is_not_made_slower_than_a_configuration_could() {
        let error = refusal(&["--bandwidth", "1KiB"]);
        assert!(error.contains("delay.bandwidth = 1024: must be 65536 to 1099511627776 bytes"), "{error}");
        for (option, max) in [("--latency-us", 10_000_000), ("--seek-us", 1_000_000)] {
            let value = (max + 1).to_string();
            let error =
                parse(&format!("bench disk null: {option} {value}")).expect_err("refused").to_string();
            assert!(error.contains(&format!("{value} is not in 0..={max}")), "{error}");
        }
    }

    #[test]
    fn a_disk_is_named_by_kind_and_place() {
        let address = "0000:01:00.0".parse().expect("an address");
        assert_eq!(
            "ng:/dev/ng0n1".parse::<DiskAddress>().expect("one"),
            DiskAddress::Ng("/dev/ng0n1".into())
        );
        assert_eq!("nvme:0000:01:00.0".parse::<DiskAddress>().expect("one"), DiskAddress::Nvme(address, 1));
        assert_eq!("nvme:0000:01:00.0/7".parse::<DiskAddress>().expect("one"), DiskAddress::Nvme(address, 7));
        assert_eq!(
            "file:/dev/sda".parse::<DiskAddress>().expect("one"),
            DiskAddress::File("/dev/sda".into())
        );
        assert_eq!("null:".parse::<DiskAddress>().expect("one"), DiskAddress::Null);
        for wrong in ["nvme:1", "nvme:0000:01:00.0/0", "nvme:0000:01:00.0/x", "file:", "sda", "null:1"] {
            assert!(wrong.parse::<DiskAddress>().is_err(), "{wrong}");
        }
    }
}
