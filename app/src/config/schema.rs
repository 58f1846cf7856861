//! Every key of the configuration file: its name, what it may be, its default and what it is for.
//!
//! The one place where a key is made. The reader ([`super::document`]) checks a file against this table and
//! takes the defaults from it. The reference in `docs/configuration.md` is [`reference()`] word for word
//! (`spindle check --reference`), and a test holds `conf/spindle.toml` to naming every key with its default.
//!
//! What it does not do: what two keys demand of each other is in [`super::validate`].

mod disk;

use std::fmt;
use std::fmt::Write as _;

use nvme_spec::nqn::NQN_BYTES_MAX;
use spindle_reactor::slab::SLAB_ENTRIES_MAX;
use spindle_target::shared::IO_QUEUES_MAX;
use spindle_target::snapshot::NSID_MAX;

use self::disk::DISK;
use crate::size::Bytes;

/// A key of a section.
#[derive(Debug)]
pub struct Key {
    /// Its name in the file.
    pub name: &'static str,
    /// What it may be.
    pub kind: Kind,
    /// What it is when the file does not say.
    pub preset: Preset,
    /// What it is for, and why the default is what it is.
    pub about: &'static str,
}

/// What a value may be.
#[derive(Debug)]
pub enum Kind {
    /// `true` or `false`.
    Flag,
    /// A whole number.
    Integer {
        /// Smallest.
        min: u64,
        /// Largest.
        max: u64,
    },
    /// A number of bytes, `"256MiB"` or a whole number.
    Size {
        /// Smallest.
        min: u64,
        /// Largest.
        max: u64,
        /// It is a multiple of this.
        multiple: u64,
    },
    /// One of a few words.
    Word(&'static [&'static str]),
    /// One of a few numbers.
    Number(&'static [u64]),
    /// Printable ASCII, at least one character, none a space at either end.
    Text {
        /// Most characters.
        chars_max: usize,
    },
    /// An NVMe Qualified Name.
    Nqn,
    /// A UUID in its usual spelling, not all zeroes.
    Uuid,
    /// 16 bytes as 32 hexadecimal digits, not all zeroes.
    Nguid,
    /// An IP address and a port that is not 0.
    Address,
    /// An absolute path.
    Path,
    /// The absolute path of a socket, or the empty text for none.
    SocketOrNone,
    /// The address of a PCI function.
    PciAddress,
    /// A list of values.
    List(&'static Kind),
    /// A section of its own, `[name]`.
    Section(&'static [Key]),
    /// Any number of sections, `[[name]]`.
    Sections(&'static [Key]),
}

/// What a key is when the file does not say.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Preset {
    /// The file must say.
    Required,
    /// This, as it would stand in the file.
    Is(&'static str),
    /// Something that depends on others, in words.
    From(&'static str),
    /// Sections have no value of their own.
    Section,
}

/// Most characters of a name that is only ours (disks, listeners).
pub const NAME_CHARS_MAX: usize = 64;
/// Largest disk: byte offsets of files are signed 64-bit numbers.
const DISK_BYTES_MAX: u64 = 1 << 62;
/// Largest transfer: what one buffer can have in frames of 4 KiB, `SEGMENTS_MAX` less one for each ragged
/// end.
pub const TRANSFER_BYTES_MAX: u64 = (spindle_reactor::mem::SEGMENTS_MAX as u64 - 2) * 4096;
/// Longest path of a socket: what the address of one has room for, less the NUL behind it.
pub const SOCKET_BYTES_MAX: usize = 107;
/// Highest controller identifier; those above are reserved (Base 2.0 section 5.17.2.1, CNTLID).
const CNTLID_MAX: u64 = 0xffef;
/// Largest number of a processor core that Linux knows.
const CORE_MAX: u64 = 8191;
const DAY_MS: u64 = 86_400_000;

const fn key(name: &'static str, kind: Kind, preset: Preset, about: &'static str) -> Key {
    Key { name, kind, preset, about }
}

const TRANSPORT: Kind = Kind::Word(&["tcp", "rdma"]);
const FLAG: Kind = Kind::Flag;
const NAME: Kind = Kind::Text { chars_max: NAME_CHARS_MAX };

/// The whole file.
pub static FILE: &[Key] = &[
    key("reactor", Kind::Section(REACTOR), Preset::Section, "The cores that poll."),
    key("pool", Kind::Section(POOL), Preset::Section, "Buffers, taken once at start for each core."),
    key(
        "limits",
        Kind::Section(LIMITS),
        Preset::Section,
        "What a host can ask for, and what the process can hold.",
    ),
    key("tcp", Kind::Section(TCP), Preset::Section, "NVMe/TCP."),
    key("rdma", Kind::Section(RDMA), Preset::Section, "NVMe/RDMA. Used when there is a listener for it."),
    key("disk", Kind::Sections(DISK), Preset::Section, "A disk of this machine."),
    key("listener", Kind::Sections(LISTENER), Preset::Section, "An address at which hosts connect."),
    key(
        "subsystem",
        Kind::Sections(SUBSYSTEM),
        Preset::Section,
        "What a host connects to: a name with disks in it.",
    ),
    key(
        "referral",
        Kind::Sections(REFERRAL),
        Preset::Section,
        "Another discovery service that hosts are told of.",
    ),
    key("discovery", Kind::Section(DISCOVERY), Preset::Section, "The discovery service, at every listener."),
    key("log", Kind::Section(LOG), Preset::Section, "What goes to standard error."),
    key("control", Kind::Section(CONTROL), Preset::Section, "What operators ask a target that runs."),
    key("shutdown", Kind::Section(SHUTDOWN), Preset::Section, "What happens at SIGTERM."),
];

static REACTOR: &[Key] = &[
    key(
        "cores",
        Kind::List(&Kind::Integer { min: 0, max: CORE_MAX }),
        Preset::From("the first core that the process may use"),
        "One polling thread on each. More cores are for more connections, since a connection stays on its \
         core.",
    ),
    key(
        "pin",
        FLAG,
        Preset::Is("true"),
        "Bind each thread to its core, so that its caches stay warm. false leaves the placing to the \
         kernel, for machines whose cores are shared.",
    ),
    key(
        "idle",
        Kind::Word(&["spin", "adaptive"]),
        Preset::Is("\"adaptive\""),
        "spin: poll always; the lowest latency, and the core shows 100 %. adaptive: poll for \
         adaptive_spin_us after the last work, then sleep until something arrives; a default must not burn \
         a core that is not dedicated.",
    ),
    key(
        "adaptive_spin_us",
        Kind::Integer { min: 0, max: 1_000_000 },
        Preset::Is("200"),
        "How long an adaptive core polls without work before it sleeps. Longer than the pause between two \
         commands of a host at depth 1, so that a busy host never waits for a wake-up.",
    ),
];

static POOL: &[Key] = &[
    key(
        "pages",
        Kind::Word(&["base", "transparent", "huge"]),
        Preset::Is("\"transparent\""),
        "base: 4 KiB pages. transparent: ask the kernel for 2 MiB pages, which needs no set-up. huge: \
         reserved pages (vm.nr_hugepages); where there are too few it says so and takes transparent ones.",
    ),
    key(
        "zone",
        Kind::Sections(ZONE),
        Preset::From(
            "4KiB x 1024, 64KiB x 64, 128KiB x 32, 256KiB x 16, 512KiB x 6, 1MiB x 3, 2MiB x 1: 24 MiB a \
             core",
        ),
        "Buffers of one size, for each core. Used by disks that have no memory of their own, and by Compare \
         and Copy. Where there is none, commands wait, in order; they do not fail. A connection that holds \
         more than what is left free waits, too.",
    ),
    key(
        "admin_buffer",
        Kind::Size { min: 8192, max: 1 << 20, multiple: 4096 },
        Preset::Is("\"16KiB\""),
        "Size of the buffers that only admin and Fabrics commands take, so that keep-alive and Connect pass \
         however busy the disks are. A host may send 8 KiB with such a command; what needs more than this \
         size, as a long discovery log read at once, takes from the zones.",
    ),
    key(
        "admin_count",
        Kind::Integer { min: 4, max: 4096 },
        Preset::Is("32"),
        "How many of them each core has. They are held for microseconds, so a few serve hundreds of \
         controllers.",
    ),
];

static ZONE: &[Key] = &[
    key(
        "buffer",
        Kind::Size { min: 4096, max: 64 << 20, multiple: 4096 },
        Preset::Required,
        "Size of each buffer. Zones stand in ascending order; a command takes the smallest that fits, or a \
         larger one when that is empty, or up to 32 smaller ones together.",
    ),
    key(
        "count",
        Kind::Integer { min: 1, max: 262_144 },
        Preset::Required,
        "How many; a zone has at most 1 GiB. With files or drives among the disks, two buffers of \
         limits.transfer must be there at once, for Compare; smaller ones make up for one, 32 at most.",
    ),
];

static LIMITS: &[Key] = &[
    key(
        "queue_entries",
        Kind::Integer { min: 2, max: 1024 },
        Preset::Is("256"),
        "Most entries of a queue: twice what Linux asks for, since a queue holds one command less than \
         it has entries, and 128 commands are a common depth. A connection's tables are as long as its \
         host asks; each entry that is used costs some hundred bytes.",
    ),
    key(
        "transfer",
        Kind::Size { min: 4096, max: TRANSFER_BYTES_MAX, multiple: 4096 },
        Preset::Is("\"1MiB\""),
        "Most bytes of one command (MDTS), a power of two. Larger commands gain no rate, and hold their \
         buffers longer.",
    ),
    key(
        "bulk_unit",
        Kind::Size { min: 0, max: TRANSFER_BYTES_MAX, multiple: 4096 },
        Preset::Is("\"512KiB\""),
        "Larger reads and writes over RDMA of disks that use the pool (files) go through two buffers in \
         pieces of so many bytes, so that disk and network work at the same time; 0: none does. A \
         queue keeps what it was connected with.",
    ),
    key(
        "io_queues",
        Kind::Integer { min: 1, max: IO_QUEUES_MAX as u64 },
        Preset::Is("64"),
        "Most I/O queues of one controller. A host takes one for each of its cores, so 64 is enough for all \
         but the largest, whose cores then share.",
    ),
    key(
        "connections",
        Kind::Integer { min: 1, max: SLAB_ENTRIES_MAX as u64 },
        Preset::Is("2048"),
        "Most connections of the process. The next one takes the place of the oldest that has not sent \
         Connect; where all have, it is refused at once, and counted. It bounds memory and open files.",
    ),
    key(
        "unconnected_per_address",
        Kind::Integer { min: 0, max: SLAB_ENTRIES_MAX as u64 },
        Preset::Is("256"),
        "Most connections from one address, over TCP and RDMA together, that have not sent Connect; the next \
         one is refused at once. A Linux host opens one for each queue of a controller before it connects \
         the first: enough for four of the largest at the same moment. 0: no limit.",
    ),
    key(
        "disk_commands",
        Kind::Integer { min: 1, max: 4096 },
        Preset::Is("256"),
        "Most commands that one core gives one disk at once; more wait in order. Two full \
         queues of a Linux host, which keeps any drive busy.",
    ),
    key(
        "keep_alive_ms_max",
        Kind::Integer { min: 1000, max: DAY_MS },
        Preset::Is("3600000"),
        "Longest keep-alive time-out that a host may ask for; one that asks for more is refused. A host \
         that vanished holds its queues this long.",
    ),
    key(
        "memory_overcommit",
        FLAG,
        Preset::Is("false"),
        "true: full RAM disks may be larger than the memory that is available. They take memory only when \
         they are written, and a machine that runs out of it kills the process, with all that was on them.",
    ),
];

static TCP: &[Key] = &[
    key(
        "in_capsule",
        Kind::Size { min: 0, max: 65_536, multiple: 16 },
        Preset::Is("\"4KiB\""),
        "Most bytes of a write that come together with its command on an I/O queue, which saves a round \
         trip. Larger ones are asked for when there is a buffer. Admin queues always take 8 KiB, as Linux \
         wants.",
    ),
    key(
        "max_h2c_data",
        Kind::Size { min: 4096, max: 16 << 20, multiple: 4096 },
        Preset::Is("\"1MiB\""),
        "Most bytes of one data PDU from a host (MAXH2CDATA): a write of the largest common size comes in \
         one.",
    ),
    key(
        "header_digest",
        FLAG,
        Preset::Is("true"),
        "Allow a CRC32C of PDU headers to hosts that ask for it. It costs nothing where no host asks.",
    ),
    key("data_digest", FLAG, Preset::Is("true"), "The same for data."),
    key(
        "receive_batch",
        Kind::Size { min: 8192, max: 4 << 20, multiple: 4096 },
        Preset::Is("\"256KiB\""),
        "Most bytes taken from a socket with one call. One buffer of this size serves all connections of a \
         core.",
    ),
    key(
        "congestion",
        Kind::Text { chars_max: 15 },
        Preset::Is("\"cubic\""),
        "Congestion control of the sockets; \"system\" leaves the machine's. cubic does not pace packets, \
         which costs (bbr) even where none is lost.",
    ),
    key(
        "user_timeout_ms",
        Kind::Integer { min: 0, max: DAY_MS },
        Preset::Is("30000"),
        "A connection whose peer acknowledges nothing for this long is closed (TCP_USER_TIMEOUT). 0: as the \
         kernel does, which takes a quarter of an hour.",
    ),
    key(
        "socket_buffer",
        Kind::Size { min: 0, max: 64 << 20, multiple: 1 },
        Preset::Is("0"),
        "Send and receive buffer of each socket. 0: the kernel tunes them by itself, which is right but for \
         long fat networks.",
    ),
    key(
        "initialize_timeout_ms",
        Kind::Integer { min: 100, max: DAY_MS },
        Preset::Is("10000"),
        "A connection that does not begin with ICReq within this time is closed. As long as a Linux host \
         waits for the answer.",
    ),
    key(
        "close_timeout_ms",
        Kind::Integer { min: 100, max: DAY_MS },
        Preset::Is("2000"),
        "How long a connection that is being closed may take to send what is left. A host that reads needs \
         one round trip.",
    ),
];

static LISTENER: &[Key] = &[
    key(
        "address",
        Kind::Address,
        Preset::Required,
        "Where to listen. 0.0.0.0 is every IPv4 address of the machine, [::] every IPv6 address; hosts are \
         told the one that they used. 4420 is the port that NVMe/TCP was given.",
    ),
    key("transport", TRANSPORT, Preset::Is("\"tcp\""), "How hosts speak here."),
    key("name", NAME, Preset::From("the address"), "What subsystems call it."),
    key(
        "in_capsule",
        Kind::Size { min: 0, max: 65_536, multiple: 16 },
        Preset::From("tcp.in_capsule"),
        "As tcp.in_capsule, for connections to this listener.",
    ),
];

static RDMA: &[Key] = &[
    key(
        "shared_receives",
        Kind::Integer { min: 0, max: 32_768 },
        Preset::Is("8192"),
        "Most receives that the connections of a core share on each RDMA device. Memory for them (some 4 \
         KiB each) is taken as connections come, and kept. When connections that have ended may have taken \
         256 of them along, new connections share as many others, and the old ones are kept until their \
         last connection ends. A connection for which none are left gets its own, as all do with 0.",
    ),
    key(
        "segments",
        Kind::Integer { min: 1, max: 32 },
        Preset::Is("16"),
        "Most pieces of memory that one RDMA transfer gathers; one that is more scattered takes another \
         transfer. Each makes every entry of every send queue 16 bytes larger.",
    ),
];

static SUBSYSTEM: &[Key] = &[
    key(
        "nqn",
        Kind::Nqn,
        Preset::Required,
        "Its name. Give every machine names of its own: a host takes two targets with one name for two \
         paths to one disk.",
    ),
    key(
        "serial",
        Kind::Text { chars_max: 20 },
        Preset::From("derived from nqn"),
        "Serial number. Part of the names under which hosts find the disk (/dev/disk/by-id).",
    ),
    key(
        "model",
        Kind::Text { chars_max: 40 },
        Preset::Is("\"Spindle\""),
        "Model number, as nvme list shows it.",
    ),
    key(
        "allow_any_host",
        FLAG,
        Preset::Is("false"),
        "Every host may connect. Off, because a host that mounts a disk which another one has mounted \
         destroys it.",
    ),
    key(
        "hosts",
        Kind::List(&Kind::Nqn),
        Preset::From("none; then allow_any_host = true is needed"),
        "NQNs of the hosts that may connect (/etc/nvme/hostnqn). It keeps hosts apart; it proves nothing.",
    ),
    key(
        "listeners",
        Kind::List(&NAME),
        Preset::From("all"),
        "Names of the listeners at which it is offered.",
    ),
    key(
        "cntlid_min",
        Kind::Integer { min: 1, max: CNTLID_MAX },
        Preset::Is("1"),
        "Lowest controller identifier given out. Two machines that serve one subsystem need ranges of their \
         own.",
    ),
    key(
        "cntlid_max",
        Kind::Integer { min: 1, max: CNTLID_MAX },
        Preset::Is("65519"),
        "Highest; bounds controllers.",
    ),
    key("namespace", Kind::Sections(NAMESPACE), Preset::Section, "A disk in a subsystem, under a number."),
];

static NAMESPACE: &[Key] = &[
    key(
        "nsid",
        Kind::Integer { min: 1, max: NSID_MAX as u64 },
        Preset::Required,
        "Its number, as in /dev/nvme0n1.",
    ),
    key("disk", NAME, Preset::Required, "Name of the disk. A disk is in one namespace."),
    key(
        "uuid",
        Kind::Uuid,
        Preset::From("derived from nqn, disk and nsid; of a RAM disk made anew with the disk"),
        "The identity by which hosts know the disk again. Set it when a disk moves between subsystems. Not \
         for a RAM disk: it comes back empty after a restart, and a host must not take it for the disk that \
         it has mounted.",
    ),
    key("nguid", Kind::Nguid, Preset::From("as uuid"), "The same, 32 hexadecimal digits."),
];

static REFERRAL: &[Key] = &[
    key("address", Kind::Address, Preset::Required, "Where that service listens, often port 8009."),
    key("transport", TRANSPORT, Preset::Is("\"tcp\""), "How to speak to it."),
];

static DISCOVERY: &[Key] = &[key(
    "keep_alive_ms",
    Kind::Integer { min: 1000, max: DAY_MS },
    Preset::Is("120000"),
    "A discovery connection that asks for no keep-alive and is silent for this long is closed. The two \
     minutes of the specification.",
)];

static LOG: &[Key] = &[
    key(
        "level",
        Kind::Word(&["error", "warn", "info", "debug", "trace"]),
        Preset::Is("\"info\""),
        "Least urgent lines that are written. info has a line for each connect and disconnect, none for a \
         command. The environment variable SPINDLE_LOG (spindle_tcp=debug,info) goes before it.",
    ),
    key(
        "format",
        Kind::Word(&["text", "json"]),
        Preset::Is("\"text\""),
        "text for people, json for collectors.",
    ),
    key(
        "peer_lines_per_s",
        Kind::Integer { min: 1, max: 100_000 },
        Preset::Is("10"),
        "Most lines in a second that peers can cause on one core; the rest is counted, and the count is \
         written.",
    ),
];

static CONTROL: &[Key] = &[
    key(
        "socket",
        Kind::SocketOrNone,
        Preset::From("spindle.sock in the directory that systemd makes (RuntimeDirectory=), or /run/spindle"),
        "A Unix socket at which `spindle ctl` and SPDK's rpc.py ask by JSON-RPC. Its directory must exist. \
         \"\": there is none.",
    ),
    key(
        "group",
        NAME,
        Preset::From("that of the process"),
        "A group of /etc/group whose members may use the socket, besides root and the user of this process, \
         who must be a member of it.",
    ),
];

static SHUTDOWN: &[Key] = &[key(
    "deadline_ms",
    Kind::Integer { min: 0, max: 600_000 },
    Preset::Is("10000"),
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
            Kind::Word(words) => f.write_str(&alternatives(words.iter().map(|word| format!("{word:?}")))),
            Kind::Number(numbers) => f.write_str(&alternatives(numbers.iter().map(u64::to_string))),
            Kind::Text { chars_max } => {
                write!(f, "1 to {chars_max} printable ASCII characters without a space at either end")
            }
            Kind::Nqn => {
                let like = "like \"nqn.2026-01.io.spindle:a\"";
                write!(f, "an NQN, {like}: at most {NQN_BYTES_MAX} bytes, no control characters")
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

/// `a, b or c`.
pub fn alternatives(words: impl Iterator<Item = String>) -> String {
    let words: Vec<String> = words.collect();
    match words.split_last() {
        Some((last, [])) => last.clone(),
        Some((last, others)) => format!("{} or {last}", others.join(", ")),
        None => "nothing".to_owned(),
    }
}

impl Key {
    /// The keys of this section, when it is one.
    pub fn section(&self) -> Option<&'static [Key]> {
        match self.kind {
            Kind::Section(keys) | Kind::Sections(keys) => Some(keys),
            Kind::Flag
            | Kind::Integer { .. }
            | Kind::Size { .. }
            | Kind::Word(_)
            | Kind::Number(_)
            | Kind::Text { .. }
            | Kind::Nqn
            | Kind::Uuid
            | Kind::Nguid
            | Kind::Address
            | Kind::Path
            | Kind::SocketOrNone
            | Kind::PciAddress
            | Kind::List(_) => None,
        }
    }
}

/// Every section with its heading as in the file, in the order of the table.
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
    walk("", FILE, &mut found);
    found
}

/// The reference of all keys, as `docs/configuration.md` has it.
pub fn reference() -> String {
    let mut text = String::new();
    for (heading, section, keys) in sections() {
        let _ = writeln!(text, "### `{heading}`\n\n{}\n", section.about);
        if let Preset::From(words) = section.preset {
            let _ = writeln!(text, "Default: {words}.\n");
        }
        let _ = writeln!(text, "| key | default | allowed | what for |\n|---|---|---|---|");
        for key in keys.iter().filter(|key| key.section().is_none()) {
            let preset = match key.preset {
                Preset::Required => "required".to_owned(),
                Preset::Is(value) => format!("`{value}`"),
                Preset::From(words) => words.to_owned(),
                Preset::Section => String::new(),
            };
            let _ = writeln!(text, "| `{}` | {preset} | {} | {} |", key.name, key.kind, key.about);
        }
        text.push('\n');
    }
    text.truncate(text.trim_end().len());
    text + "\n"
}
