//! Every key of the configuration file, a row for each: name, allowed values, default, disks that have it,
//! what a running process does with another value, and its field of the plan.
//!
//! ```text
//!   file ── document (kind) ──> Node ── fill (default, field) ──> Plan ── changes (reload, field) ──> list
//! ```
//!
//! What a key is for stands in the comment above it in `conf/spindle.toml`. Tests compare that file, and the
//! reference in `docs/configuration.md` (the output of [`reference()`], printed by
//! `spindle check --reference`), with the rows. Rules between keys are in [`super::validate`].

use std::fmt::Write as _;

use spindle_reactor::clock::Nanos;
use spindle_reactor::mem::ZoneSpec;
use spindle_reactor::run::Idle;
use spindle_reactor::slab::SLAB_ENTRIES_MAX;
use spindle_target::shared::IO_QUEUES_MAX;
use spindle_target::snapshot::NSID_MAX;
use spindle_target_disk::cache::{CACHE_BYTES_MAX, CACHE_BYTES_MIN, READ_AHEAD_BYTES_MAX};
use spindle_target_disk::delay::{BANDWIDTH_MAX, BANDWIDTH_MIN, LATENCY_US_MAX, SEEK_US_MAX};

use self::Reload::{Live, Restart, Untold};
use super::document::Value;
use super::kind::Kind;
use super::plan::{DiskKind, DiskPlan, Plan, SubsystemPlan, cache_text, cluster_text, delay_text};
use super::tree::{CACHE_MODE, CACHE_POLICY, FromValue, LOG_FORMAT, LOG_LEVEL, PAGES, TRANSPORT};
use crate::size::Bytes;
use crate::text::quoted;

/// A key of a section.
#[derive(Debug)]
pub struct Key {
    pub name: &'static str,
    pub kind: Kind,
    pub preset: Preset,
    pub reload: Reload,
    pub field: Field,
}

/// Value of a key that the file does not set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Preset {
    /// No default: the file must set the key.
    Required,
    /// As [`Preset::Required`] of the only kind of disk that has the key. The text says what it needs.
    Needed(&'static str),
    /// A fixed default, in TOML syntax.
    Fixed(&'static str),
    /// No fixed default: it depends on other keys or the machine, or there is none. The text says so.
    Derived(&'static str),
    /// The key is a section, which has no value.
    Section,
}

/// What a running process does with another value of a key.
#[derive(Debug, Clone, Copy)]
pub enum Reload {
    /// The process takes it without a restart.
    Live,
    /// It is refused until a restart.
    Restart,
    /// It is refused because hosts or data would take it for something else. The text says why.
    Identity(&'static str),
    /// The list of changes has no line of this row: another row or [`super::changes`] has one, or the value
    /// has an effect only later (`create`).
    Untold,
}

/// Where the value of a key is in the plan.
#[derive(Debug)]
pub enum Field {
    /// [`super::validate`] reads the key by its name.
    None,
    Plan(Access<Plan>),
    /// Of disks of these kinds ([`DiskKind`]), or of all disks if there are none.
    Disk(&'static [&'static str], Access<DiskPlan>),
    /// A field of these variants of [`DiskKind`].
    Variant(&'static [&'static str], Access<DiskPlan>),
    Subsystem(Access<SubsystemPlan>),
}

/// How to write and to read a field.
#[derive(Debug)]
pub struct Access<T> {
    pub write: fn(&mut T, &Value),
    /// Returns the value as the list of changes has it; `None`: there is no such field, or it is not told of.
    pub read: fn(&T) -> Option<String>,
    /// Compares the values where two of them may have one text; `None`: the texts are compared.
    pub same: Option<fn(&T, &T) -> bool>,
}

/// Most characters of the name of a disk or listener.
const NAME_CHARS_MAX: usize = 64;
/// Largest disk, a power of two below the largest file offset (signed 64-bit).
const DISK_BYTES_MAX: u64 = 1 << 62;
/// Bound of `limits.transfer`: `SEGMENTS_MAX` frames of 4 KiB, less two because both ends may be unaligned.
pub const TRANSFER_MAX: u64 = (spindle_reactor::mem::SEGMENTS_MAX as u64 - 2) * 4096;
/// Highest controller identifier; those above are reserved (Base 2.0 section 5.17.2.1, CNTLID).
const CNTLID_MAX: u64 = 0xffef;
/// Highest CPU number: Linux supports at most 8192 CPUs (NR_CPUS).
const CORE_MAX: u64 = 8191;
const CONNECTIONS_MAX: u64 = SLAB_ENTRIES_MAX as u64;
const DAY_MS: u64 = 86_400_000;

const OTHER_DISK: Reload = Reload::Identity("would be another disk under the same name; give it a new name");
const KNOWN_TO_HOSTS: Reload = Reload::Identity("hosts know the disk by it; restart when none is connected");

const fn required(name: &'static str, kind: Kind) -> Key {
    let (preset, reload, field) = (Preset::Required, Untold, Field::None);
    Key { name, kind, preset, reload, field }
}

/// A key of one kind of disk, which must have it; `needs` says what that is.
const fn needed(name: &'static str, kind: Kind, needs: &'static str) -> Key {
    Key { preset: Preset::Needed(needs), ..required(name, kind) }
}

/// A key with a fixed default in TOML syntax.
const fn key(name: &'static str, kind: Kind, preset: &'static str) -> Key {
    Key { preset: Preset::Fixed(preset), ..required(name, kind) }
}

/// A key without a fixed default; `preset` describes what applies instead.
const fn derived(name: &'static str, kind: Kind, preset: &'static str) -> Key {
    Key { preset: Preset::Derived(preset), ..required(name, kind) }
}

const fn section(name: &'static str, keys: &'static [Key]) -> Key {
    Key { preset: Preset::Section, ..required(name, Kind::Section(keys)) }
}

const fn section_list(name: &'static str, keys: &'static [Key]) -> Key {
    Key { preset: Preset::Section, ..required(name, Kind::Sections(keys)) }
}

const fn integer(min: u64, max: u64) -> Kind {
    Kind::Integer { min, max }
}

const fn size(min: u64, max: u64, multiple: u64) -> Kind {
    Kind::Size { min, max, multiple }
}

const fn text(chars_max: usize) -> Kind {
    Kind::Text { chars_max }
}

pub const DISK_KIND: Kind = Kind::Word(&["ram", "null", "file", "nvme", "ng", "remote"]);
const FLAG: Kind = Kind::Flag;
const NAME: Kind = text(NAME_CHARS_MAX);
const CORES: Kind = Kind::List(&Kind::Integer { min: 0, max: CORE_MAX });
const NQNS: Kind = Kind::List(&Kind::Nqn);
const IN_CAPSULE: Kind = size(0, 65_536, 16);
pub const CNTLID: Kind = integer(1, CNTLID_MAX);
pub const NSID: Kind = integer(1, NSID_MAX as u64);
pub const FAR_NSID: Kind = integer(1, 4_294_967_294);
pub const BLOCK_BYTES: Kind = Kind::Number(&[512, 4096]);

/// Access to a field that the list of changes shows by another row.
const fn write_only<T>(write: fn(&mut T, &Value)) -> Access<T> {
    Access { write, read: |_| None, same: None }
}

/// Access to what [`super::validate`] writes.
const fn read_only<T>(read: fn(&T) -> Option<String>) -> Access<T> {
    Access { write: |_, _| {}, read, same: None }
}

/// Sets a field. A value of another type is a bug of the row, which a test finds.
fn set<T: FromValue>(field: &mut T, value: &Value) {
    if let Some(value) = T::from_value(value) {
        *field = value;
    }
}

fn set_us(field: &mut Nanos, value: &Value) {
    *field = u64::from_value(value).map_or(*field, Nanos::from_us);
}

macro_rules! access {
    ($($field:tt)+) => {
        Access {
            write: |it, value| set(&mut it.$($field)+, value),
            read: |it| Some(it.$($field)+.text()),
            same: Some(|before, after| before.$($field)+ == after.$($field)+),
        }
    };
}

/// `plan!(log.level)`: a field of the plan.
macro_rules! plan {
    ($($field:tt)+) => { Field::Plan(access!($($field)+)) };
}

/// `disk!([Ram Null] bytes)`: a field of disks of these kinds, or of all.
macro_rules! disk {
    ([$($kind:ident)*] $($field:tt)+) => { Field::Disk(&[$(stringify!($kind)),*], access!($($field)+)) };
}

/// `part!(cache set bytes)`: a field of a part that a disk may have, which is told of as a whole.
macro_rules! part {
    ($part:ident $set:ident $field:ident) => {
        Field::Disk(
            &[],
            write_only(|disk: &mut DiskPlan, value| {
                if let Some(part) = &mut disk.$part {
                    $set(&mut part.$field, value);
                }
            }),
        )
    };
}

/// `of!([File Ng] is_read_only)`: a field of these variants of [`DiskKind`], and a key of disks of these
/// kinds; with `any`, a key that all disks take.
macro_rules! of {
    ([$($kind:ident)+] $field:ident $($inner:tt)*) => {
        Field::Variant(&[$(stringify!($kind)),+], of!(@ [$($kind)+] $field $($inner)*))
    };
    (@ [$($kind:ident)+] $field:ident $($inner:tt)*) => {
        Access {
            write: |disk, value| {
                if let $(DiskKind::$kind { $field, .. })|+ = &mut disk.kind {
                    set(&mut (*$field) $($inner)*, value);
                }
            },
            read: |disk| {
                if let $(DiskKind::$kind { $field, .. })|+ = &disk.kind {
                    Some($field $($inner)*.text())
                } else {
                    None
                }
            },
            same: Some(|before, after| {
                fn value(disk: &DiskPlan) -> Option<impl PartialEq> {
                    if let $(DiskKind::$kind { $field, .. })|+ = &disk.kind {
                        Some(&(*$field) $($inner)*)
                    } else {
                        None
                    }
                }
                value(before) == value(after)
            }),
        }
    };
}

macro_rules! subsystem {
    ($($field:tt)+) => { Field::Subsystem(access!($($field)+)) };
}

/// Rows. Behind `=>` is what becomes of another value, and the field.
macro_rules! rows {
    ($($row:expr $(=> $reload:ident, $field:expr)?),+ $(,)?) => {
        &[$(Key { $(reload: $reload, field: $field,)? ..$row }),+]
    };
}

pub static ROOT: &[Key] = rows! {
    section("reactor", REACTOR),
    section("pool", POOL),
    section("limits", LIMITS),
    section("tcp", TCP),
    section("rdma", RDMA),
    section_list("disk", DISK),
    section_list("listener", LISTENER),
    section_list("subsystem", SUBSYSTEM),
    section_list("referral", REFERRAL),
    section("discovery", DISCOVERY),
    section("log", LOG),
    section("control", CONTROL),
    section("shutdown", SHUTDOWN),
};

static REACTOR: &[Key] = rows! {
    derived("cores", CORES, "the first core that the process may use") => Restart, plan!(reactor.cores),
    key("pin", FLAG, "true") => Restart, plan!(reactor.is_pinned),
    key("idle", Kind::Word(&["spin", "adaptive"]), "\"adaptive\"") => Restart, plan!(reactor.idle),
    key("adaptive_spin_us", integer(0, 1_000_000), "200") => Untold, Field::Plan(write_only(|plan, value| {
        let Idle::SleepAfter(time) = &mut plan.reactor.idle else { return };
        set_us(time, value);
    })),
};

static POOL: &[Key] = rows! {
    key("pages", PAGES, "\"transparent\"") => Restart, plan!(pool.pages),
    derived("zone", Kind::Sections(ZONE),
            "4KiB x 1024, 64KiB x 64, 128KiB x 32, 256KiB x 16, 512KiB x 6, 1MiB x 3, 2MiB x 1: 24 MiB \
             a core") => Restart, Field::Plan(read_only(|plan| Some(zones_text(&plan.pool.zones)))),
    key("admin_buffer", size(8192, 1 << 20, 4096), "\"16KiB\"") => Restart, Field::Plan(Access {
            write: |plan, value| set(&mut plan.pool.admin_zones[0].buffer_bytes, value),
            read: |plan| Some(zones_text(&plan.pool.admin_zones)),
            same: None,
        }),
    key("admin_count", integer(4, 4096), "32") => Untold, plan!(pool.admin_zones[0].count),
};

static ZONE: &[Key] = rows! {
    required("buffer", size(4096, 64 << 20, 4096)),
    required("count", integer(1, 262_144)),
};

static LIMITS: &[Key] = rows! {
    key("queue_entries", integer(2, 1024), "256") => Restart, plan!(limits.controller.queue_entries),
    key("transfer", size(4096, TRANSFER_MAX, 4096), "\"1MiB\"")
        => Restart, plan!(limits.controller.transfer_bytes),
    key("bulk_unit", size(0, TRANSFER_MAX, 4096), "\"512KiB\"") => Live, plan!(limits.controller.bulk_unit),
    key("io_queues", integer(1, IO_QUEUES_MAX as u64), "64") => Live, plan!(limits.io_queues_max),
    key("connections", integer(1, CONNECTIONS_MAX), "2048") => Restart, plan!(limits.connections),
    key("unconnected_per_address", integer(0, CONNECTIONS_MAX), "256")
        => Restart, plan!(limits.unconnected_per_address),
    key("disk_commands", integer(1, 4096), "256") => Restart, plan!(limits.disk_commands),
    key("keep_alive_ms_max", integer(1000, DAY_MS), "3600000")
        => Live, plan!(limits.controller.keep_alive_ms_max),
    key("memory_overcommit", FLAG, "false") => Live, plan!(limits.may_overcommit),
};

static TCP: &[Key] = rows! {
    // The changes of each listener show it.
    key("in_capsule", IN_CAPSULE, "\"4KiB\"") => Untold, plan!(tcp.conn.in_capsule_bytes),
    key("max_h2c_data", size(4096, 16 << 20, 4096), "\"1MiB\"") => Restart, plan!(tcp.conn.max_h2c_data),
    key("header_digest", FLAG, "true") => Restart, plan!(tcp.conn.header_digest),
    key("data_digest", FLAG, "true") => Restart, plan!(tcp.conn.data_digest),
    key("receive_batch", size(8192, 4 << 20, 4096), "\"256KiB\"") => Restart, plan!(tcp.shell.batch_bytes),
    key("congestion", text(15), "\"cubic\"") => Restart, Field::Plan(Access {
        write: |plan, value| {
            let name = String::from_value(value).filter(|name| name != "system");
            plan.tcp.shell.congestion = name.and_then(|name| name.parse().ok());
        },
        read: |plan| Some(plan.tcp.shell.congestion.as_deref().unwrap_or("system").to_owned().text()),
        same: None,
    }),
    key("user_timeout_ms", integer(0, DAY_MS), "30000") => Restart, plan!(tcp.shell.user_timeout_ms),
    key("socket_buffer", size(0, 64 << 20, 1), "0") => Restart, plan!(tcp.shell.socket_buffer_bytes),
    key("initialize_timeout_ms", integer(100, DAY_MS), "10000")
        => Restart, plan!(tcp.conn.initialize_timeout),
    key("close_timeout_ms", integer(100, DAY_MS), "2000") => Restart, plan!(tcp.conn.close_timeout),
};

pub static DISK: &[Key] = rows! {
    required("name", NAME) => Untold, disk!([] name),
    derived("kind", DISK_KIND, "nvme where nvme is given, ng where ng is given; otherwise required")
        => OTHER_DISK, Field::Disk(&[], read_only(|disk| Some(disk.kind.name().to_owned().text()))),
    needed("nvme", Kind::PciAddress, "the PCI address of its drive, like \"0000:01:00.0\"")
        => OTHER_DISK, of!([Nvme] address),
    key("namespace", FAR_NSID, "1") => OTHER_DISK, of!([Nvme Remote] namespace),
    needed("address", Kind::Address, "that of the other target, like \"192.0.2.7:4420\"")
        => OTHER_DISK, of!([Remote] target.address),
    key("transport", TRANSPORT, "\"tcp\"") => OTHER_DISK, of!([Remote] target.transport),
    needed("nqn", Kind::Nqn, "that of the other target, like \"nqn.2026-01.io.spindle:far\"")
        => OTHER_DISK, of!([Remote] target.nqn),
    derived("host_nqn", Kind::Nqn, "remote: a name made of /etc/machine-id")
        => OTHER_DISK, of!([Remote] target.host),
    key("command_timeout_ms", integer(1000, 3_600_000), "25000") => Restart, of!([Remote] command_timeout),
    key("quiesce_ms", integer(0, 600_000), "0") => Restart, of!([Remote] quiesce),
    key("optimistic", FLAG, "false") => Restart, of!([Remote] is_optimistic),
    key("optimistic_pages", integer(1024, 16_777_216), "262144")
        => Restart, of!([Remote] optimistic.directory_pages),
    key("optimistic_eager", FLAG, "false") => Restart, of!([Remote] optimistic.is_eager),
    needed("ng", Kind::Path, "the generic device of its namespace, like \"/dev/ng0n1\"")
        => OTHER_DISK, of!([Ng] path),
    derived("size", size(512, DISK_BYTES_MAX, 512), "file: the size that the file or device has")
        => Untold, disk!([Ram Null File] bytes),
    needed("path", Kind::Path, "one, like \"/var/lib/spindle/disk0.img\"") => OTHER_DISK, of!([File] path),
    key("block_bytes", BLOCK_BYTES, "512") => OTHER_DISK, disk!([Ram Null File] block_bytes),
    key("read_only", FLAG, "false") => OTHER_DISK, of!([File Ng] is_read_only),
    // It has an effect only while the file is missing.
    key("create", FLAG, "false") => Untold, of!([File] create),
    key("direct", FLAG, "true") => OTHER_DISK, of!([File] is_direct),
    key("poll", FLAG, "false") => Restart, of!([File] is_polled),
    derived("medium_id", text(255), "none: what is at the path or address is served, whatever it is")
        => Live, disk!([File Nvme Ng Remote] medium_id),
    key("pages", PAGES, "\"transparent\"") => OTHER_DISK, of!([Ram] pages),
    key("populate", FLAG, "false") => Restart, of!([Ram] is_populated),
    section("cache", CACHE)
        => Live, Field::Disk(&[], read_only(|it| Some(cache_text(it.cache.as_ref()).text()))),
    section("delay", DELAY)
        => Restart, Field::Disk(&[], read_only(|it| Some(delay_text(it.delay.as_ref()).text()))),
    section("cluster", CLUSTER)
        => Restart, Field::Disk(&[], read_only(|it| Some(cluster_text(it.cluster.as_ref()).text()))),
};

static CACHE: &[Key] = rows! {
    derived("size", size(CACHE_BYTES_MIN, CACHE_BYTES_MAX, 4096), "required in this section")
        => Untold, part!(cache set bytes),
    key("policy", CACHE_POLICY, "\"s3-fifo\"") => Untold, part!(cache set policy),
    key("mode", CACHE_MODE, "\"shared\"") => Untold, part!(cache set mode),
    key("read_ahead", size(0, READ_AHEAD_BYTES_MAX as u64, 4096), "\"256KiB\"")
        => Untold, part!(cache set read_ahead),
    key("sole_writer", FLAG, "false"),
};

static DELAY: &[Key] = rows! {
    key("latency_us", integer(0, LATENCY_US_MAX), "0") => Untold, part!(delay set_us latency),
    derived("bandwidth", size(BANDWIDTH_MIN, BANDWIDTH_MAX, 1), "none: moving data takes no time")
        => Untold, part!(delay set bandwidth),
    key("seek_us", integer(0, SEEK_US_MAX), "0") => Untold, part!(delay set_us seek),
};

static CLUSTER: &[Key] = rows! {
    derived("agents", NQNS, "ram, file: required in this section; remote: not allowed")
        => Untold, part!(cluster set agents),
};

static LISTENER: &[Key] = rows! {
    required("address", Kind::Address),
    key("transport", TRANSPORT, "\"tcp\""),
    derived("name", NAME, "the address"),
    derived("in_capsule", IN_CAPSULE, "tcp.in_capsule"),
};

static RDMA: &[Key] = rows! {
    key("shared_receives", integer(0, 32_768), "8192") => Restart, plan!(rdma.srq_entries),
    key("segments", integer(1, 32), "16") => Restart, plan!(rdma.segments),
    key("optimistic_port", integer(0, 65_535), "0") => Restart, plan!(optimistic_port),
};

pub static SUBSYSTEM: &[Key] = rows! {
    required("nqn", Kind::Nqn),
    derived("serial", text(20), "derived from nqn") => KNOWN_TO_HOSTS, subsystem!(serial),
    key("model", text(40), "\"Spindle\"") => KNOWN_TO_HOSTS, subsystem!(model),
    key("allow_any_host", FLAG, "false"),
    derived("hosts", NQNS, "none; then allow_any_host = true is needed") => Live, subsystem!(hosts),
    derived("optimistic_hosts", NQNS, "each that may connect") => Live, subsystem!(optimistic_hosts),
    derived("listeners", Kind::List(&NAME), "all") => Live, subsystem!(listeners),
    key("cntlid_min", CNTLID, "1") => Live, subsystem!(cntlid_range.0),
    key("cntlid_max", CNTLID, "65519") => Live, subsystem!(cntlid_range.1),
    section_list("namespace", NAMESPACE),
};

static NAMESPACE: &[Key] = rows! {
    required("nsid", NSID),
    required("disk", NAME),
    derived("uuid", Kind::Uuid, "derived from nqn, disk and nsid; of a RAM disk made anew with the disk"),
    derived("nguid", Kind::Nguid, "as uuid"),
};

static REFERRAL: &[Key] = rows! {
    required("address", Kind::Address),
    key("transport", TRANSPORT, "\"tcp\""),
};

static DISCOVERY: &[Key] = rows! {
    key("keep_alive_ms", integer(1000, DAY_MS), "120000")
        => Live, plan!(limits.controller.discovery_keep_alive_ms),
};

static LOG: &[Key] = rows! {
    key("level", LOG_LEVEL, "\"info\"") => Live, plan!(log.level),
    key("format", LOG_FORMAT, "\"text\"") => Restart, plan!(log.format),
    key("peer_lines_per_s", integer(1, 100_000), "10") => Restart, plan!(log.peer_lines_per_s),
};

static CONTROL: &[Key] = rows! {
    derived("socket", Kind::SocketOrNone,
            "spindle.sock in the directory that systemd makes (RuntimeDirectory=), or /run/spindle")
        => Restart, plan!(control.socket),
    derived("group", NAME, "that of the process") => Restart, plan!(control.group),
};

static SHUTDOWN: &[Key] = rows! {
    key("deadline_ms", integer(0, 600_000), "10000") => Live, plan!(drain_deadline),
};

fn zones_text(zones: &[ZoneSpec]) -> String {
    let zone = |ZoneSpec { buffer_bytes, count }: &ZoneSpec| {
        format!("{{ buffer = \"{}\", count = {count} }}", Bytes::new((*buffer_bytes).into()))
    };
    format!("[{}]", zones.iter().map(zone).collect::<Vec<_>>().join(", "))
}

impl Key {
    /// Returns the keys of this section; `None` for a key with a value.
    pub fn section(&self) -> Option<&'static [Key]> {
        if let Kind::Section(keys) | Kind::Sections(keys) = self.kind { Some(keys) } else { None }
    }

    /// Returns the variants of [`DiskKind`] that have the key; none for a key that all have.
    fn variants(&self) -> &'static [&'static str] {
        match self.field {
            Field::Disk(variants, _) | Field::Variant(variants, _) => variants,
            Field::None | Field::Plan(_) | Field::Subsystem(_) => &[],
        }
    }

    /// Returns the kinds of disks that have the key, separated by ` or `.
    pub fn disk_kinds(&self) -> String {
        quoted(self.variants().iter().map(|it| it.to_ascii_lowercase())).replace(", ", " or ")
    }

    /// Whether disks of this kind have the key.
    pub fn is_of(&self, kind: &str) -> bool {
        let variants = self.variants();
        variants.is_empty() || variants.iter().any(|it| it.eq_ignore_ascii_case(kind))
    }
}

/// Returns every section as (heading, section key, keys), in the order of the table.
pub fn sections() -> Vec<(String, &'static Key, &'static [Key])> {
    fn walk(prefix: &str, keys: &'static [Key], into: &mut Vec<(String, &'static Key, &'static [Key])>) {
        for key in keys {
            let Some(inner) = key.section() else { continue };
            let path = format!("{prefix}{}", key.name);
            let is_list = matches!(key.kind, Kind::Sections(_));
            into.push((if is_list { format!("[[{path}]]") } else { format!("[{path}]") }, key, inner));
            walk(&format!("{path}."), inner, into);
        }
    }
    let mut found = Vec::new();
    walk("", ROOT, &mut found);
    found
}

/// The example, whose comments say what each key is for. It is also the configuration without a file.
pub const EXAMPLE: &str = include_str!("../../../conf/spindle.toml");

/// Returns the first comment in the example above a key of a section, or above its heading (`key`).
pub fn comment(heading: &str, key: &str) -> Option<String> {
    let (mut section, mut above) = ("", Vec::new());
    for line in EXAMPLE.lines() {
        if let Some(words) = line.strip_prefix("# ") {
            above.push(words);
            continue;
        }
        let bare = line.trim_start_matches('#');
        section = if bare.starts_with('[') { bare } else { section };
        if section == heading && bare.split(" = ").next() == Some(key) && !above.is_empty() {
            return Some(above.join(" "));
        }
        above.clear();
    }
    None
}

/// Returns the reference of all keys as Markdown: the end of `docs/configuration.md`.
pub fn reference() -> String {
    let mut text = String::new();
    let about = |heading: &str, key: &str| comment(heading, key).unwrap_or_default();
    for (heading, section, keys) in sections() {
        let _ = writeln!(text, "### `{heading}`\n\n{}\n", about(&heading, &heading));
        if let Preset::Derived(words) = section.preset {
            let _ = writeln!(text, "Default: {words}.\n");
        }
        let _ = writeln!(text, "| key | default | allowed | what for |\n|---|---|---|---|");
        for key in keys.iter().filter(|key| key.section().is_none()) {
            let preset = match key.preset {
                Preset::Required => "required".to_owned(),
                Preset::Needed(_) => {
                    format!("{}: required; others have none", key.disk_kinds().trim_matches('"'))
                }
                Preset::Fixed(value) => format!("`{value}`"),
                Preset::Derived(words) => words.to_owned(),
                Preset::Section => String::new(),
            };
            let about = about(&heading, key.name);
            let _ = writeln!(text, "| `{}` | {preset} | {} | {about} |", key.name, key.kind);
        }
        text.push('\n');
    }
    text.truncate(text.trim_end().len());
    text + "\n"
}
