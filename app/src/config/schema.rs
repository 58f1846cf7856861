//! Every key of the configuration file: name, allowed values, default and description.
//!
//! The reader ([`super::document`]) checks a file against this table and takes the defaults from it. Tests
//! compare the table with the reference in `docs/configuration.md` (the output of [`reference()`], printed by
//! `spindle check --reference`) and with `conf/spindle.toml`. Rules between keys are in [`super::validate`].

use std::fmt;
use std::fmt::Write as _;

use nvme_spec::nqn::NQN_BYTES_MAX;
use spindle_reactor::slab::SLAB_ENTRIES_MAX;
use spindle_target::shared::IO_QUEUES_MAX;
use spindle_target::snapshot::NSID_MAX;
use spindle_target_disk::cache::{CACHE_BYTES_MAX, CACHE_BYTES_MIN, READ_AHEAD_BYTES_MAX};
use spindle_target_disk::delay::{BANDWIDTH_MAX, BANDWIDTH_MIN, LATENCY_US_MAX, SEEK_US_MAX};

use crate::size::Bytes;
use crate::text::{alternatives, quoted};

/// A key of a section.
#[derive(Debug)]
pub struct Key {
    pub name: &'static str,
    pub kind: Kind,
    pub preset: Preset,
    /// Description for the reference: purpose of the key and reason for its default.
    pub about: &'static str,
}

/// Type and range of a value.
#[derive(Debug)]
pub enum Kind {
    Flag,
    Integer {
        min: u64,
        max: u64,
    },
    /// A count of bytes, as `"256MiB"` or a whole number.
    Size {
        min: u64,
        max: u64,
        /// The value is a multiple of this many bytes.
        multiple: u64,
    },
    /// One of these strings.
    Word(&'static [&'static str]),
    /// One of these numbers.
    Number(&'static [u64]),
    /// Printable ASCII, at least one character, without a space at either end.
    Text {
        chars_max: usize,
    },
    Nqn,
    /// A UUID in a form that `Uuid::try_parse` accepts, not all zeroes.
    Uuid,
    /// 16 bytes as 32 hexadecimal digits, not all zeroes.
    Nguid,
    /// An IP address and a port that is not 0.
    Address,
    Path,
    /// The absolute path of a Unix socket; empty: no socket.
    SocketOrNone,
    PciAddress,
    List(&'static Kind),
    /// `[name]`.
    Section(&'static [Key]),
    /// `[[name]]`, any number of times.
    Sections(&'static [Key]),
}

/// Value of a key that the file does not set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Preset {
    /// No default: the file must set the key.
    Required,
    /// A fixed default, in TOML syntax.
    Fixed(&'static str),
    /// No fixed default: the default depends on other keys or the machine, or there is none. The text
    /// describes it.
    Derived(&'static str),
    /// The key is a section, which has no value.
    Section,
    /// A former name of a key, accepted in old files and left out of the reference and of messages.
    FormerName,
}

/// Most characters of the name of a disk or listener.
const NAME_CHARS_MAX: usize = 64;
/// Largest disk, a power of two below the largest file offset (signed 64-bit).
const DISK_BYTES_MAX: u64 = 1 << 62;
/// Bound of `limits.transfer`: `SEGMENTS_MAX` frames of 4 KiB, less two because both ends may be unaligned.
pub const TRANSFER_BYTES_MAX: u64 = (spindle_reactor::mem::SEGMENTS_MAX as u64 - 2) * 4096;
/// Longest path of a Unix socket: `sun_path` has 108 bytes with the terminating NUL.
pub const SOCKET_BYTES_MAX: usize = 107;
/// Highest controller identifier; those above are reserved (Base 2.0 section 5.17.2.1, CNTLID).
pub const CNTLID_MAX: u64 = 0xffef;
/// Highest CPU number: Linux supports at most 8192 CPUs (NR_CPUS).
const CORE_MAX: u64 = 8191;
const DAY_MS: u64 = 86_400_000;

const fn required(name: &'static str, kind: Kind) -> Key {
    Key { name, kind, preset: Preset::Required, about: "" }
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

const TRANSPORT: Kind = Kind::Word(&["tcp", "rdma"]);
const PAGES: Kind = Kind::Word(&["base", "transparent", "huge"]);
const FLAG: Kind = Kind::Flag;
const NAME: Kind = Kind::Text { chars_max: NAME_CHARS_MAX };

pub static ROOT: &[Key] = &[
    section("reactor", REACTOR).about("The cores that poll."),
    section("pool", POOL).about("Buffers, taken once at start for each core."),
    section("limits", LIMITS).about("What a host can ask for, and what the process can hold."),
    section("tcp", TCP).about("NVMe/TCP."),
    section("rdma", RDMA).about("NVMe/RDMA. Used when there is a listener for it."),
    section_list("disk", DISK).about("A disk of this machine."),
    section_list("listener", LISTENER).about("An address at which hosts connect."),
    section_list("subsystem", SUBSYSTEM).about("What a host connects to: a name with disks in it."),
    section_list("referral", REFERRAL).about("Another discovery service that hosts are told of."),
    section("discovery", DISCOVERY).about("The discovery service, at every listener."),
    section("log", LOG).about("What goes to standard error."),
    section("control", CONTROL).about("What operators ask a target that runs."),
    section("shutdown", SHUTDOWN).about("What happens at SIGTERM."),
];

static REACTOR: &[Key] = &[
    derived(
        "cores",
        Kind::List(&Kind::Integer { min: 0, max: CORE_MAX }),
        "the first core that the process may use",
    )
    .about(
        "One polling thread on each. More cores are for more connections, since a connection stays on its \
         core.",
    ),
    key("pin", FLAG, "true").about(
        "Bind each thread to its core, so that its caches stay warm. false leaves the placing to the \
         kernel, for machines whose cores are shared.",
    ),
    key("idle", Kind::Word(&["spin", "adaptive"]), "\"adaptive\"").about(
        "spin: poll always; the lowest latency, and the core shows 100 %. adaptive: poll for \
         adaptive_spin_us after the last work, then sleep until something arrives; a default must not burn \
         a core that is not dedicated.",
    ),
    key("adaptive_spin_us", Kind::Integer { min: 0, max: 1_000_000 }, "200").about(
        "How long an adaptive core polls without work before it sleeps. Longer than the pause between two \
         commands of a host at depth 1, so that a busy host never waits for a wake-up.",
    ),
];

static POOL: &[Key] = &[
    key("pages", PAGES, "\"transparent\"").about(
        "base: 4 KiB pages. transparent: ask the kernel for 2 MiB pages, which needs no set-up. huge: \
         reserved pages (vm.nr_hugepages); where there are too few it says so and takes transparent ones.",
    ),
    derived(
        "zone",
        Kind::Sections(ZONE),
        "4KiB x 1024, 64KiB x 64, 128KiB x 32, 256KiB x 16, 512KiB x 6, 1MiB x 3, 2MiB x 1: 24 MiB a \
         core",
    )
    .about(
        "Buffers of one size, for each core. Used by disks that have no memory of their own, and by Compare \
         and Copy. Where there is none, commands wait, in order; they do not fail. Of each zone every host \
         leaves a part to the others, and waits when it has its share.",
    ),
    key("admin_buffer", Kind::Size { min: 8192, max: 1 << 20, multiple: 4096 }, "\"16KiB\"").about(
        "Size of the buffers that only admin and Fabrics commands take, so that keep-alive and Connect pass \
         however busy the disks are. A host may send 8 KiB with such a command; what needs more than this \
         size, as a long discovery log read at once, takes from the zones.",
    ),
    key("admin_count", Kind::Integer { min: 4, max: 4096 }, "32").about(
        "How many of them each core has. They are held for microseconds, so a few serve hundreds of \
         controllers.",
    ),
];

static ZONE: &[Key] = &[
    required("buffer", Kind::Size { min: 4096, max: 64 << 20, multiple: 4096 }).about(
        "Size of each buffer. Zones stand in ascending order; a command takes the smallest that fits, or a \
         larger one when that is empty, or up to 32 smaller ones together.",
    ),
    required("count", Kind::Integer { min: 1, max: 262_144 }).about(
        "How many; a zone has at most 1 GiB. With files or drives among the disks, two buffers of \
         limits.transfer must be there at once, for Compare; smaller ones make up for one, 32 at most.",
    ),
];

static LIMITS: &[Key] = &[
    key("queue_entries", Kind::Integer { min: 2, max: 1024 }, "256").about(
        "Most entries of an I/O queue: twice what Linux asks for, since a queue holds one command less \
         than it has entries, and 128 commands are a common depth. An admin queue may always have 32. A \
         connection's tables are as long as its host asks; each entry that is used costs some hundred bytes.",
    ),
    key("transfer", Kind::Size { min: 4096, max: TRANSFER_BYTES_MAX, multiple: 4096 }, "\"1MiB\"").about(
        "Most bytes of one command (MDTS), a power of two. Larger commands gain no rate, and hold their \
         buffers longer.",
    ),
    key("bulk_unit", Kind::Size { min: 0, max: TRANSFER_BYTES_MAX, multiple: 4096 }, "\"512KiB\"").about(
        "Larger reads and writes over RDMA of disks that use the pool (files) go through two buffers in \
         pieces of so many bytes, so that disk and network work at the same time; 0: none does. A \
         queue keeps what it was connected with.",
    ),
    key("io_queues", Kind::Integer { min: 1, max: IO_QUEUES_MAX as u64 }, "64").about(
        "Most I/O queues of one controller. A host takes one for each of its cores, so 64 is enough for all \
         but the largest, whose cores then share.",
    ),
    key("connections", Kind::Integer { min: 1, max: SLAB_ENTRIES_MAX as u64 }, "2048").about(
        "Most connections of the process. The next one replaces the oldest connection that has not sent \
         Connect or belongs to a discovery controller. Without such a connection it is refused, and counted. \
         It bounds memory and open files.",
    ),
    key("unconnected_per_address", Kind::Integer { min: 0, max: SLAB_ENTRIES_MAX as u64 }, "256").about(
        "Most connections from one address, over TCP and RDMA together, that have not sent Connect, and most \
         discovery controllers of one address. The next one is refused. A Linux host opens one connection \
         for each queue of a controller before it connects the first: enough for four of the largest at the \
         same moment. 0: no limit.",
    ),
    key("disk_commands", Kind::Integer { min: 1, max: 4096 }, "256").about(
        "Most commands that one core gives one disk at once; more wait in order. Two full \
         queues of a Linux host, which keeps any drive busy.",
    ),
    key("keep_alive_ms_max", Kind::Integer { min: 1000, max: DAY_MS }, "3600000").about(
        "Longest keep-alive time-out that a host may ask for; one that asks for more is refused. A host \
         that vanished holds its queues this long.",
    ),
    key("memory_overcommit", FLAG, "false").about(
        "true: full RAM disks may be larger than the memory that is available. A RAM disk takes memory as it \
         is written, a cache when it is created. If the machine runs out of memory, the kernel kills the \
         process, and the data of all RAM disks is lost.",
    ),
];

static TCP: &[Key] = &[
    key("in_capsule", Kind::Size { min: 0, max: 65_536, multiple: 16 }, "\"4KiB\"").about(
        "Most bytes of a write that come together with its command on an I/O queue, which saves a round \
         trip. Larger ones are asked for when there is a buffer. Admin queues always take 8 KiB, as Linux \
         wants.",
    ),
    key("max_h2c_data", Kind::Size { min: 4096, max: 16 << 20, multiple: 4096 }, "\"1MiB\"").about(
        "Most bytes of one data PDU from a host (MAXH2CDATA): a write of the largest common size comes in \
         one.",
    ),
    key("header_digest", FLAG, "true").about(
        "Allow a CRC32C of PDU headers to hosts that ask for it. It costs nothing where no host asks.",
    ),
    key("data_digest", FLAG, "true").about("The same for data."),
    key("receive_batch", Kind::Size { min: 8192, max: 4 << 20, multiple: 4096 }, "\"256KiB\"").about(
        "Most bytes taken from a socket with one call. One buffer of this size serves all connections of a \
         core.",
    ),
    key("congestion", Kind::Text { chars_max: 15 }, "\"cubic\"").about(
        "Congestion control of the sockets; \"system\" leaves the machine's. cubic does not pace packets, \
         which costs (bbr) even where none is lost.",
    ),
    key("user_timeout_ms", Kind::Integer { min: 0, max: DAY_MS }, "30000").about(
        "A connection whose peer acknowledges nothing for this long is closed (TCP_USER_TIMEOUT). 0: as the \
         kernel does, which takes a quarter of an hour.",
    ),
    key("socket_buffer", Kind::Size { min: 0, max: 64 << 20, multiple: 1 }, "0").about(
        "Send and receive buffer of each socket. 0: the kernel tunes them by itself, which is right but for \
         long fat networks.",
    ),
    key("initialize_timeout_ms", Kind::Integer { min: 100, max: DAY_MS }, "10000").about(
        "A connection that does not begin with ICReq within this time is closed. As long as a Linux host \
         waits for the answer.",
    ),
    key("close_timeout_ms", Kind::Integer { min: 100, max: DAY_MS }, "2000").about(
        "How long a connection that is being closed may take to send what is left. A host that reads needs \
         one round trip.",
    ),
];

static DISK: &[Key] = &[
    required("name", NAME).about(
        "Its name in this file. The identity that hosts see is derived from it, so keep it when the disk is \
         the same.",
    ),
    derived(
        "kind",
        Kind::Word(&["ram", "null", "file", "nvme", "ng", "remote"]),
        "nvme where nvme is given, ng where ng is given; otherwise required",
    )
    .about(
        "ram: memory, lost at the end of the process. null: reads as zeroes and forgets writes, for \
         measuring. file: a regular file or a block device. nvme: a drive that this process drives itself, \
         without the kernel. ng: a drive with the kernel's driver, past its block layer. remote: a namespace \
         of another target.",
    ),
    derived("nvme", Kind::PciAddress, "nvme: required; others have none").about(
        "PCI address of the drive, which is bound to vfio-pci (spindle nvme list, spindle nvme bind). Size \
         and blocks are the drive's.",
    ),
    key("namespace", Kind::Integer { min: 1, max: 4_294_967_294 }, "1")
        .about("nvme, remote: which namespace of the drive or of the other target."),
    derived("address", Kind::Address, "remote: required; others have none").about(
        "Where the other target listens. Size and blocks are its namespace's. One that is away at the start \
         is tried every 2 s, and its namespaces appear when it is there. One that goes away later is waited \
         for, each command for command_timeout_ms.",
    ),
    key("transport", TRANSPORT, "\"tcp\"").about(
        "remote: how to speak to it. Over RDMA it writes and reads the memory of this process itself.",
    ),
    derived("nqn", Kind::Nqn, "remote: required; others have none")
        .about("Its subsystem. One I/O queue for each core of [reactor] is asked for."),
    derived("host_nqn", Kind::Nqn, "remote: a name made of /etc/machine-id").about(
        "remote: as which host to connect, for its list of hosts. Two processes need names of their own.",
    ),
    key("command_timeout_ms", Kind::Integer { min: 1000, max: 3_600_000 }, "25000").about(
        "remote: each command is answered within this time, counted from its submission across reconnects; \
         then it fails with an error that hosts may repeat. Keep it below the hosts' own I/O time-out, 30 s \
         with Linux.",
    ),
    key("quiesce_ms", Kind::Integer { min: 0, max: 600_000 }, "0").about(
        "remote, for a far target that is not a Spindle: how long after two keep-alive time-outs (2 x 5 s) \
         it may still execute commands of a lost association. No newer write goes to their blocks before.",
    ),
    key("optimistic", FLAG, "false").about(
        "remote: read pages of the far target's [disk.cache] by RDMA READ, without its CPU, where it is a \
         Spindle with rdma.optimistic_port; also with transport = \"tcp\" if RDMA reaches the same address. \
         Each core makes a second connection for it. Where that fails, reads go on as they are, and it is \
         tried again.",
    ),
    key("optimistic_pages", Kind::Integer { min: 1024, max: 16_777_216 }, "262144").about(
        "remote, with optimistic: most pages of 4 KiB of the far cache that each core knows, 24 bytes each. \
         The default is 1 GiB of the cache.",
    ),
    key("optimistic_eager", FLAG, "false").about(
        "remote, with optimistic: ask the far target once where it has each page, up to optimistic_pages, \
         instead of learning that from reads. For a cache or RAM disk that has most of the namespace.",
    ),
    derived("ng", Kind::Path, "ng: required; others have none").about(
        "The generic device of an NVMe namespace, like /dev/ng0n1. Commands go to the drive as they are \
         (io_uring passthrough); where the kernel made queues for it (nvme.poll_queues=N on its command \
         line), completions are polled. Size and blocks are the drive's. Its block device (/dev/nvme0n1) is \
         held meanwhile.",
    ),
    derived(
        "size",
        Kind::Size { min: 512, max: DISK_BYTES_MAX, multiple: 512 },
        "file: the size that the file or device has",
    )
    .about(
        "Capacity, a multiple of the block size. ram and null need it. A regular file that is smaller grows \
         to it; one that is larger is refused, since it would be cut.",
    ),
    derived("path", Kind::Path, "file: required; others have none").about("The file or block device."),
    key("block_bytes", Kind::Number(&[512, 4096]), "512").about(
        "Bytes of a logical block. Every host takes 512; 4096 spares a file system on 4 KiB sectors its \
         read-modify-write. Changing it makes the data unreadable to the host.",
    ),
    key("read_only", FLAG, "false")
        .about("file, ng: refuse writes, and open the file or device for reading only."),
    key("create", FLAG, "false").about(
        "file: make a sparse file of size when there is none. Off, because with a file system that is not \
         mounted it would show hosts an empty disk under the old identity.",
    ),
    key("direct", FLAG, "true").about(
        "file: go past the page cache (O_DIRECT) where the file system can, so that no memory holds the \
         data twice.",
    ),
    key("poll", FLAG, "false").about(
        "file: poll for the completions of reads and writes instead of waiting for interrupts (IOPOLL). Only \
         of a block device that has queues for it (nvme.poll_queues=N on the kernel's command line), with \
         direct. Off, because few devices have them; those that have gain latency.",
    ),
    derived(
        "medium_id",
        Kind::Text { chars_max: 255 },
        "none: what is at the path or address is served, whatever it is",
    )
    .about(
        "file, nvme, ng, remote: serve only the medium that has this name. The names of drives, /dev/ng0n1 \
         as well as /dev/sda, may change places at boot, and each would be served as the other. spindle \
         check prints the name of what is at a path, spindle serve logs that of each disk: eui., uuid., \
         serial. of a drive, file. of a file.",
    ),
    key("pages", PAGES, "\"transparent\"").about(
        "ram: as pool.pages, for the memory of this disk. With huge, deallocated blocks give no memory back \
         to the machine.",
    ),
    Key { preset: Preset::FormerName, ..required("huge_pages", FLAG) },
    key("populate", FLAG, "false").about(
        "ram: take all memory when the disk is made, in the background. Otherwise the first write to each \
         2 MiB waits for the kernel to zero them, and with it all hosts of that core.",
    ),
    section("cache", CACHE).about(
        "file, nvme, ng, remote: memory for the pages of this disk that are read often, shared by all hosts \
         and cores. Writes go through it: they are acknowledged when the disk has them. Without this section \
         each read goes to the disk.",
    ),
    section("delay", DELAY).about(
        "For tests and benchmarks: make this disk slow on purpose, as one device that all hosts and cores \
         share, behind its cache. At least one of the keys is more than zero. Without this section a disk is \
         as fast as it is.",
    ),
];

static CACHE: &[Key] = &[
    derived(
        "size",
        Kind::Size { min: CACHE_BYTES_MIN, max: CACHE_BYTES_MAX, multiple: 4096 },
        "required in this section",
    )
    .about(
        "Bytes of pages. Tables take about 2 % more. All of the memory is taken at the start, by a thread \
         that is no data core; the cache uses what is there so far. With a listener on RDMA, and of an nvme \
         disk, it is locked too.",
    ),
    key("policy", Kind::Word(&["s3-fifo", "lru"]), "\"s3-fifo\"").about(
        "Which page goes when another comes. s3-fifo: what is read once soon goes, so that a scan or a \
         backup does not empty the cache. lru: what was not read for the longest time.",
    ),
    key("mode", Kind::Word(&["shared", "exclusive"]), "\"shared\"").about(
        "exclusive: what a host was given goes before all else, because the host keeps it itself; for hosts \
         whose own caches are together about as large as this one.",
    ),
    key("read_ahead", Kind::Size { min: 0, max: READ_AHEAD_BYTES_MAX as u64, multiple: 4096 }, "\"256KiB\"")
        .about(
            "Most that is read from the disk before a host asks for it, where its reads follow each other or \
         have the same distance. It begins with 64 KiB, doubles, and shrinks where pages go unread. 0: \
         nothing is.",
        ),
    key("sole_writer", FLAG, "false").about(
        "remote: must be true there. It declares that only this target writes to the far namespace: what \
         others write is not seen until the page is evicted.",
    ),
];

static DELAY: &[Key] = &[
    key("latency_us", Kind::Integer { min: 0, max: LATENCY_US_MAX }, "0").about(
        "Each command takes at least so long; any number of commands wait at the same time, as in an SSD.",
    ),
    derived(
        "bandwidth",
        Kind::Size { min: BANDWIDTH_MIN, max: BANDWIDTH_MAX, multiple: 1 },
        "none: moving data takes no time",
    )
    .about("Bytes per second of the device, which moves the data of one command after the other."),
    key("seek_us", Kind::Integer { min: 0, max: SEEK_US_MAX }, "0").about(
        "A seek over the whole disk, as in a hard disk; the device makes one seek after the other. It takes \
         this times the square root of the distance from the end of the command before, as a share of the \
         capacity: nothing for a command that goes on there, 53 % of this for random places.",
    ),
];

static LISTENER: &[Key] = &[
    required("address", Kind::Address).about(
        "Where to listen. 0.0.0.0 is every IPv4 address of the machine, [::] every IPv6 address; hosts are \
         told the one that they used. 4420 is the port that NVMe/TCP was given.",
    ),
    key("transport", TRANSPORT, "\"tcp\"").about("How hosts speak here."),
    derived("name", NAME, "the address").about("What subsystems call it."),
    derived("in_capsule", Kind::Size { min: 0, max: 65_536, multiple: 16 }, "tcp.in_capsule")
        .about("As tcp.in_capsule, for connections to this listener."),
];

static RDMA: &[Key] = &[
    key("shared_receives", Kind::Integer { min: 0, max: 32_768 }, "8192").about(
        "Most receives that the connections of a core share on each RDMA device. Memory for them (some 4 \
         KiB each) is taken as connections come, and kept. When connections that have ended may have taken \
         256 of them along, new connections share as many others, and the old ones are kept until their \
         last connection ends. A connection for which none are left gets its own, as all do with 0.",
    ),
    key("segments", Kind::Integer { min: 1, max: 32 }, "16").about(
        "Most pieces of memory that one RDMA transfer gathers; one that is more scattered takes another \
         transfer. Each makes every entry of every send queue 16 bytes larger.",
    ),
    key("optimistic_port", Kind::Integer { min: 0, max: 65_535 }, "0").about(
        "Port on the addresses of the RDMA listeners where initiators of Spindle read pages of [disk.cache] \
         and of RAM disks by RDMA, without this process (docs/extensions.md); 0: none. Each page of a cache \
         or RAM disk takes 8 bytes more.",
    ),
];

static SUBSYSTEM: &[Key] = &[
    required("nqn", Kind::Nqn).about(
        "Its name. Give every machine names of its own: a host takes two targets with one name for two \
         paths to one disk.",
    ),
    derived("serial", Kind::Text { chars_max: 20 }, "derived from nqn")
        .about("Serial number. Part of the names under which hosts find the disk (/dev/disk/by-id)."),
    key("model", Kind::Text { chars_max: 40 }, "\"Spindle\"").about("Model number, as nvme list shows it."),
    key("allow_any_host", FLAG, "false").about(
        "Every host may connect. Off, because a host that mounts a disk which another one has mounted \
         destroys it.",
    ),
    derived("hosts", Kind::List(&Kind::Nqn), "none; then allow_any_host = true is needed").about(
        "NQNs of the hosts that may connect (/etc/nvme/hostnqn). It keeps hosts apart; it proves nothing.",
    ),
    derived("optimistic_hosts", Kind::List(&Kind::Nqn), "each that may connect").about(
        "NQNs of the hosts that may read its caches by RDMA (rdma.optimistic_port); the others read as \
         without it. [] is none. A host that is taken off loses its optimistic connections at once.",
    ),
    derived("listeners", Kind::List(&NAME), "all").about("Names of the listeners at which it is offered."),
    key("cntlid_min", Kind::Integer { min: 1, max: CNTLID_MAX }, "1").about(
        "Lowest controller identifier given out. Two machines that serve one subsystem need ranges of their \
         own.",
    ),
    key("cntlid_max", Kind::Integer { min: 1, max: CNTLID_MAX }, "65519")
        .about("Highest; bounds controllers."),
    section_list("namespace", NAMESPACE).about("A disk in a subsystem, under a number."),
];

static NAMESPACE: &[Key] = &[
    required("nsid", Kind::Integer { min: 1, max: NSID_MAX as u64 }).about(
        "Its number, as in /dev/nvme0n1.",
    ),
    required("disk", NAME).about("Name of the disk. A disk is in one namespace."),
    derived(
        "uuid",
        Kind::Uuid,
        "derived from nqn, disk and nsid; of a RAM disk made anew with the disk",
    )
    .about(
        "The identity by which hosts know the disk again. Set it when a disk moves between subsystems. Not \
         for a RAM disk: it comes back empty after a restart, and a host must not take it for the disk that \
         it has mounted.",
    ),
    derived("nguid", Kind::Nguid, "as uuid").about("The same, 32 hexadecimal digits."),
];

static REFERRAL: &[Key] = &[
    required("address", Kind::Address).about("Where that service listens, often port 8009."),
    key("transport", TRANSPORT, "\"tcp\"").about("How to speak to it."),
];

static DISCOVERY: &[Key] = &[key("keep_alive_ms", Kind::Integer { min: 1000, max: DAY_MS }, "120000").about(
    "A discovery connection that asks for no keep-alive and is silent for this long is closed. The two \
     minutes of the specification. More than this, or than two minutes if this is less, cannot be asked for.",
)];

static LOG: &[Key] = &[
    key("level", Kind::Word(&["error", "warn", "info", "debug", "trace"]), "\"info\"").about(
        "Least urgent lines that are written. info has a line for each connect and disconnect, none for a \
         command. The environment variable SPINDLE_LOG (spindle_nvme_tcp=debug,info) goes before it.",
    ),
    key("format", Kind::Word(&["text", "json"]), "\"text\"").about("text for people, json for collectors."),
    key("peer_lines_per_s", Kind::Integer { min: 1, max: 100_000 }, "10").about(
        "Most lines in a second that peers can cause on one core; the rest is counted, and the count is \
         written.",
    ),
];

static CONTROL: &[Key] = &[
    derived(
        "socket",
        Kind::SocketOrNone,
        "spindle.sock in the directory that systemd makes (RuntimeDirectory=), or /run/spindle",
    )
    .about(
        "A Unix socket at which `spindle ctl` and SPDK's rpc.py ask by JSON-RPC. Its directory must exist. \
         \"\": there is none.",
    ),
    derived("group", NAME, "that of the process").about(
        "A group of /etc/group whose members may use the socket, besides root and the user of this process, \
         who must be a member of it.",
    ),
];

static SHUTDOWN: &[Key] = &[key("deadline_ms", Kind::Integer { min: 0, max: 600_000 }, "10000").about(
    "Commands in flight get this long to end after SIGTERM. The systemd unit kills the process after 75 s \
     (TimeoutStopSec=), so that drives have time to save their caches; a longer deadline needs a longer \
     TimeoutStopSec=.",
)];

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Kind::Flag => f.write_str("true or false"),
            Kind::Integer { min, max } => write!(f, "a whole number from {min} to {max}"),
            Kind::Size { min, max, multiple } => {
                let (min, max) = (Bytes::new(*min), Bytes::new(*max));
                write!(f, "a size from {min} to {max}, a multiple of {multiple}, like \"64KiB\" or 65536")
            }
            Kind::Word(words) => f.write_str(&quoted(*words)),
            Kind::Number(numbers) => f.write_str(&alternatives(numbers.iter().map(u64::to_string))),
            Kind::Text { chars_max } => {
                write!(f, "1 to {chars_max} printable ASCII characters without a space at either end")
            }
            Kind::Nqn => {
                let like = "like \"nqn.2026-01.io.spindle:a\"";
                write!(f, "an NQN, {like}: at most {NQN_BYTES_MAX} bytes, no control or invisible characters")
            }
            Kind::Uuid => f.write_str("a UUID like \"6f1b3b7e-9d7a-5c1e-8a55-0d9f3c2b1a00\", not all zeroes"),
            Kind::Nguid => f.write_str("32 hexadecimal digits, not all zeroes"),
            Kind::Address => f.write_str("an IP address and a port, like \"0.0.0.0:4420\" or \"[::]:4420\""),
            Kind::Path => f.write_str("an absolute path, like \"/var/lib/spindle/disk0.img\""),
            Kind::SocketOrNone => {
                let like = "like \"/run/spindle/spindle.sock\", or \"\"";
                write!(f, "an absolute path of at most {SOCKET_BYTES_MAX} bytes, {like}")
            }
            Kind::PciAddress => f.write_str("a PCI address, like \"0000:01:00.0\""),
            Kind::List(of) => write!(f, "a list, each {of}"),
            Kind::Section(_) => f.write_str("a section"),
            Kind::Sections(_) => f.write_str("a list of sections"),
        }
    }
}

impl Key {
    const fn about(self, about: &'static str) -> Key {
        Key { about, ..self }
    }

    /// True for a key that the reference lists in a table: neither a section nor a former name.
    pub fn is_documented(&self) -> bool {
        !matches!(self.preset, Preset::Section | Preset::FormerName) && self.section().is_none()
    }

    /// Returns the keys of this section; `None` for a key with a value.
    pub fn section(&self) -> Option<&'static [Key]> {
        if let Kind::Section(keys) | Kind::Sections(keys) = self.kind { Some(keys) } else { None }
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

/// Returns the reference of all keys as Markdown: the end of `docs/configuration.md`.
pub fn reference() -> String {
    let mut text = String::new();
    for (heading, section, keys) in sections() {
        let _ = writeln!(text, "### `{heading}`\n\n{}\n", section.about);
        if let Preset::Derived(words) = section.preset {
            let _ = writeln!(text, "Default: {words}.\n");
        }
        let _ = writeln!(text, "| key | default | allowed | what for |\n|---|---|---|---|");
        for key in keys.iter().filter(|key| key.is_documented()) {
            let preset = match key.preset {
                Preset::Required => "required".to_owned(),
                Preset::Fixed(value) => format!("`{value}`"),
                Preset::Derived(words) => words.to_owned(),
                Preset::Section | Preset::FormerName => String::new(),
            };
            let _ = writeln!(text, "| `{}` | {preset} | {} | {} |", key.name, key.kind, key.about);
        }
        text.push('\n');
    }
    text.truncate(text.trim_end().len());
    text + "\n"
}
