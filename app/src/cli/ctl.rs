//! Command line of `spindle ctl`: options, verbs, and [`Endpoint`], the address of a listener or far target.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::str::FromStr;

use clap::{Args, Subcommand, ValueEnum};
use spindle_nvme_initiator::{NVME_TCP_PORT, TransportKind, split_transport};
use spindle_nvme_pcie::PciAddress;

use super::{at_least_one, pci_address};
use crate::serve::control::SOCKET;
use crate::size::Bytes;

#[derive(Debug, Args)]
#[command(after_help = "Instead of a command, any method of the control socket: spindle ctl METHOD \
                        [--name VALUE]...\nWithout either, all methods are printed with their parameters, as \
                        Markdown.")]
pub struct CtlArgs {
    /// Control socket of the target (control.socket in its configuration)
    #[arg(long, global = true, value_name = "SOCKET", default_value = SOCKET)]
    pub socket: PathBuf,
    /// Print the result of the method as JSON instead of text
    #[arg(long, global = true)]
    pub json: bool,
    #[command(subcommand)]
    pub command: Option<CtlCommand>,
}

#[derive(Debug, Subcommand)]
pub enum CtlCommand {
    /// Print what `spindle status` prints
    Status,
    #[command(flatten)]
    Verb(Verb),
    /// A method, and its parameters as --name VALUE.
    #[command(external_subcommand)]
    Method(Vec<String>),
}

/// Commands that are made of method calls.
#[derive(Debug, Subcommand)]
pub enum Verb {
    /// List connected hosts
    Connections,
    /// List the caches of disks with their hit ratios, and estimates for half and twice the size
    Cache {
        /// Show the counters of each host
        #[arg(long)]
        hosts: bool,
    },
    /// List, add and remove subsystems
    #[command(subcommand)]
    Subsystem(SubsystemVerb),
    /// List, add and remove hosts that may connect to a subsystem
    #[command(subcommand)]
    Host(HostVerb),
    /// List, add and remove addresses at which a subsystem is offered
    #[command(subcommand)]
    Listener(ListenerVerb),
    /// List, add and remove namespaces of a subsystem
    #[command(subcommand)]
    Namespace(NamespaceVerb),
    /// List, add, resize and remove disks
    #[command(subcommand)]
    Disk(DiskVerb),
    /// Print the level of the log, or change it
    Log {
        /// Least urgent level that is logged, by its name in SPDK: notice, info and debug are info, debug and
        /// trace in the configuration
        #[arg(value_name = "LEVEL", ignore_case = true)]
        #[arg(value_parser = ["error", "warning", "notice", "info", "debug"])]
        level: Option<String>,
    },
}

#[derive(Debug, Subcommand)]
pub enum SubsystemVerb {
    /// List subsystems with their hosts, listeners and namespaces
    List,
    /// Add a subsystem without hosts, listeners and namespaces
    Add {
        /// NQN of the subsystem
        nqn: String,
        /// Serial number; by default derived from the NQN
        #[arg(long)]
        serial: Option<String>,
        /// Model number
        #[arg(long)]
        model: Option<String>,
        /// Every host may connect
        #[arg(long)]
        any_host: bool,
    },
    /// Remove a subsystem
    Remove {
        /// NQN of the subsystem
        nqn: String,
    },
}

#[derive(Debug, Subcommand)]
pub enum HostVerb {
    /// List hosts that may connect
    List {
        /// NQN of the subsystem
        nqn: String,
    },
    /// Allow a host to connect
    Add {
        /// NQN of the subsystem
        nqn: String,
        /// NQN of the host
        host: String,
    },
    /// Remove a host from the list and end its connections
    Remove {
        /// NQN of the subsystem
        nqn: String,
        /// NQN of the host
        host: String,
    },
    /// Allow every host to connect, or only those of the list
    Any {
        /// NQN of the subsystem
        nqn: String,
        /// on also deletes the list of hosts
        #[arg(value_enum)]
        switch: Switch,
        /// With off: the new list of hosts, one option per host; hosts of the list stay connected
        #[arg(long = "host", value_name = "HOST")]
        hosts: Vec<String>,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Switch {
    /// Every host
    On,
    /// Only hosts of the list
    Off,
}

#[derive(Debug, Subcommand)]
pub enum ListenerVerb {
    /// List the addresses at which a subsystem is offered
    List {
        /// NQN of the subsystem
        nqn: String,
    },
    /// Offer a subsystem at an address; adds the listener if there is none
    Add {
        /// NQN of the subsystem
        nqn: String,
        /// IP, IP:PORT or [V6]:PORT, for RDMA with the prefix rdma:; default port: 4420
        address: Endpoint,
    },
    /// No longer offer a subsystem at an address
    Remove {
        /// NQN of the subsystem
        nqn: String,
        /// Address as `list` shows it
        address: Endpoint,
    },
}

#[derive(Debug, Subcommand)]
pub enum NamespaceVerb {
    /// List namespaces
    List {
        /// NQN of the subsystem
        nqn: String,
    },
    /// Add a disk to a subsystem as a namespace
    Add {
        /// NQN of the subsystem
        nqn: String,
        /// Name of the disk
        disk: String,
        /// NSID; by default the lowest free one
        #[arg(long, value_name = "N", value_parser = at_least_one)]
        nsid: Option<usize>,
        /// UUID; by default a derived one
        #[arg(long)]
        uuid: Option<String>,
    },
    /// Remove a namespace; the disk stays
    Remove {
        /// NQN of the subsystem
        nqn: String,
        /// NSID
        #[arg(value_name = "NSID", value_parser = at_least_one)]
        nsid: usize,
    },
}

#[derive(Debug, Subcommand)]
pub enum DiskVerb {
    /// List disks that are open
    List,
    /// Add a disk
    #[command(subcommand)]
    Add(NewDisk),
    /// Grow or shrink a disk
    Resize {
        /// Name of the disk
        name: String,
        /// New capacity in whole MiB
        size: Bytes,
    },
    /// Add, resize or remove the cache of a disk
    Cache {
        /// Name of the disk
        name: String,
        /// Bytes of cached pages, a multiple of 4096; 0 removes the cache
        size: Bytes,
        /// Eviction policy
        #[arg(long, value_parser = ["s3-fifo", "lru"])]
        policy: Option<String>,
        /// exclusive: evict pages first that a host has read, because the host caches them itself
        #[arg(long, value_parser = ["shared", "exclusive"])]
        mode: Option<String>,
        /// Most bytes read ahead of a stream; 0 disables read-ahead
        #[arg(long, value_name = "SIZE")]
        read_ahead: Option<Bytes>,
        /// Only this target writes to the far namespace: for the first cache of a remote disk
        #[arg(long)]
        sole_writer: bool,
    },
    /// Remove a disk and its namespace
    Remove {
        /// Name of the disk
        name: String,
    },
}

#[derive(Debug, Subcommand)]
pub enum NewDisk {
    /// A disk in memory
    Ram(MemoryDisk),
    /// A disk that reads as zeroes and discards writes
    Null(MemoryDisk),
    /// A file or block device, which must exist
    File {
        /// Name of the disk
        name: String,
        /// Path of the file or device
        path: PathBuf,
        /// Bytes of a block: 512, the default, or 4096
        #[arg(long, value_name = "SIZE")]
        block_size: Option<Bytes>,
        /// Refuse writes
        #[arg(long)]
        read_only: bool,
    },
    /// A drive that is bound to vfio-pci
    Nvme {
        /// Name; n and the NSID are appended, as in NAMEn1
        name: String,
        /// PCI address, as `spindle nvme list` shows it
        #[arg(value_name = "PCI_ADDRESS", value_parser = pci_address)]
        address: PciAddress,
        /// NSID on the drive; 1 by default
        #[arg(long, value_name = "N", value_parser = at_least_one)]
        namespace: Option<usize>,
    },
    /// A namespace of another target
    Remote {
        /// Name; n and the NSID are appended, as in NAMEn1
        name: String,
        /// IP, IP:PORT or [V6]:PORT, for RDMA with the prefix rdma:; default port: 4420
        address: Endpoint,
        /// NQN of the far subsystem
        #[arg(long)]
        nqn: String,
        /// NSID in the far subsystem; 1 by default
        #[arg(long, value_name = "N", value_parser = at_least_one)]
        namespace: Option<usize>,
        /// Host NQN; by default that of this machine
        #[arg(long, value_name = "NQN")]
        hostnqn: Option<String>,
    },
    /// A drive with the kernel: no method adds one
    #[command(hide = true)]
    Ng {
        /// Ignored, so that the error names the kind
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        words: Vec<String>,
    },
}

/// Options of a `ram` or `null` disk.
#[derive(Debug, Args)]
pub struct MemoryDisk {
    /// Name of the disk
    pub name: String,
    /// Capacity, like 64MiB
    pub size: Bytes,
    /// Bytes of a block: 512 or 4096
    #[arg(long, value_name = "SIZE", default_value = "512")]
    pub block_size: Bytes,
}

/// Transport and address of a listener or far target; the port is not 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Endpoint {
    pub transport: TransportKind,
    pub address: SocketAddr,
}

impl FromStr for Endpoint {
    type Err = String;

    fn from_str(text: &str) -> Result<Endpoint, String> {
        let (transport, rest) = split_transport(text);
        let bare = rest.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(rest);
        let with_port = |ip: IpAddr| SocketAddr::new(ip, NVME_TCP_PORT);
        let address = rest.parse().or_else(|_| bare.parse().map(with_port));
        match address {
            // An IPv6 scope (%eth0) is refused: the address parameters of the control socket have no scope.
            Ok(address) if address.port() != 0 && !text.contains('%') => Ok(Endpoint { transport, address }),
            Ok(_) | Err(_) => Err(format!(
                "`{text}` is not an address; allowed are IP, IP:PORT and [V6]:PORT, optionally with the \
                 prefix tcp: or rdma:, and a PORT from 1 to 65535"
            )),
        }
    }
}

impl std::fmt::Display for Endpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}:{}", self.transport, self.address)
    }
}
