//! The command line of `spindle ctl`: its verbs.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::str::FromStr;

use clap::{Args, Subcommand, ValueEnum};
use spindle_initiator::{NVME_TCP_PORT, TransportKind, split_transport};
use spindle_nvme_pcie::PciAddress;

use super::{at_least_one, pci_address};
use crate::serve::control::SOCKET;
use crate::size::Bytes;

/// `spindle ctl`.
#[derive(Debug, Args)]
#[command(after_help = "Instead of a command, any method of the control socket: spindle ctl METHOD \
                        [--name VALUE]...\nWithout either, all methods are printed with their parameters, as \
                        Markdown.")]
pub struct CtlArgs {
    /// The socket of its configuration (control.socket)
    #[arg(long, global = true, value_name = "SOCKET", default_value = SOCKET)]
    pub socket: PathBuf,
    /// Print what the method gives as JSON instead of text
    #[arg(long, global = true)]
    pub json: bool,
    /// What to do; without it all methods are printed.
    #[command(subcommand)]
    pub command: Option<CtlCommand>,
}

/// What can be asked for.
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

/// What is made of calls of methods.
#[derive(Debug, Subcommand)]
pub enum Verb {
    /// List connected hosts
    Connections,
    /// List the caches of disks, how much of what is read they have, and would have with another size
    Cache {
        /// What they have done for each host
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
        /// Least urgent lines that are logged, as SPDK calls them: notice, info and debug are info, debug and
        /// trace in the configuration
        #[arg(value_name = "LEVEL", ignore_case = true)]
        #[arg(value_parser = ["error", "warning", "notice", "info", "debug"])]
        level: Option<String>,
    },
}

/// `spindle ctl subsystem`.
#[derive(Debug, Subcommand)]
pub enum SubsystemVerb {
    /// List subsystems with their hosts, listeners and namespaces
    List,
    /// Add a subsystem without hosts, listeners and namespaces
    Add {
        /// Its name
        nqn: String,
        /// Serial number; without it one that is derived from the name
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
        /// Its name
        nqn: String,
    },
}

/// `spindle ctl host`.
#[derive(Debug, Subcommand)]
pub enum HostVerb {
    /// List hosts that may connect
    List {
        /// The subsystem
        nqn: String,
    },
    /// Allow a host to connect
    Add {
        /// The subsystem
        nqn: String,
        /// NQN of the host
        host: String,
    },
    /// No longer allow a host to connect, and end its connections
    Remove {
        /// The subsystem
        nqn: String,
        /// NQN of the host
        host: String,
    },
    /// Allow every host to connect, or only those of the list
    Any {
        /// The subsystem
        nqn: String,
        /// on forgets the list of hosts
        #[arg(value_enum)]
        switch: Switch,
    },
}

/// On or off.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Switch {
    /// Every host
    On,
    /// Those of the list
    Off,
}

/// `spindle ctl listener`.
#[derive(Debug, Subcommand)]
pub enum ListenerVerb {
    /// List addresses
    List {
        /// The subsystem
        nqn: String,
    },
    /// Offer a subsystem at an address, which is listened on if it was not
    Add {
        /// The subsystem
        nqn: String,
        /// IP, IP:PORT or [V6]:PORT, over RDMA with rdma: before it; port 4420 without one
        address: Endpoint,
    },
    /// No longer offer it there
    Remove {
        /// The subsystem
        nqn: String,
        /// As `list` shows it
        address: Endpoint,
    },
}

/// `spindle ctl namespace`.
#[derive(Debug, Subcommand)]
pub enum NamespaceVerb {
    /// List namespaces
    List {
        /// The subsystem
        nqn: String,
    },
    /// Show a disk to the hosts of a subsystem
    Add {
        /// The subsystem
        nqn: String,
        /// Name of the disk
        disk: String,
        /// Its number; without it the lowest that is free
        #[arg(long, value_name = "N", value_parser = at_least_one)]
        nsid: Option<usize>,
        /// The UUID by which hosts know it; without it one that is derived
        #[arg(long)]
        uuid: Option<String>,
    },
    /// Remove a namespace; the disk stays
    Remove {
        /// The subsystem
        nqn: String,
        /// Its number
        #[arg(value_name = "NSID", value_parser = at_least_one)]
        nsid: usize,
    },
}

/// `spindle ctl disk`.
#[derive(Debug, Subcommand)]
pub enum DiskVerb {
    /// List disks that are open
    List,
    /// Add a disk
    #[command(subcommand)]
    Add(NewDisk),
    /// Grow or cut a disk
    Resize {
        /// Its name
        name: String,
        /// Whole MiB
        size: Bytes,
    },
    /// Put a cache in front of a disk, give it another size, or take it away
    Cache {
        /// Its name
        name: String,
        /// Of its pages, a multiple of 4096 bytes; 0 takes it away
        size: Bytes,
        /// Which page goes when another comes
        #[arg(long, value_parser = ["s3-fifo", "lru"])]
        policy: Option<String>,
        /// Who keeps what a host was given
        #[arg(long, value_parser = ["shared", "exclusive"])]
        mode: Option<String>,
        /// Most that is read ahead of a stream; 0: nothing
        #[arg(long, value_name = "SIZE")]
        read_ahead: Option<Bytes>,
        /// Only this target writes to the far namespace: for the first cache of a remote disk
        #[arg(long)]
        sole_writer: bool,
    },
    /// Remove a disk and the namespace of it
    Remove {
        /// Its name
        name: String,
    },
}

/// `spindle ctl disk add`.
#[derive(Debug, Subcommand)]
pub enum NewDisk {
    /// A disk in memory
    Ram(MemoryDisk),
    /// A disk that forgets what is written
    Null(MemoryDisk),
    /// A file or block device, which must exist
    File {
        /// Its name
        name: String,
        /// Where it is
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
        /// Its name; n and the number of the namespace are added to it
        name: String,
        /// PCI address, as `spindle nvme list` shows it
        #[arg(value_name = "PCI_ADDRESS", value_parser = pci_address)]
        address: PciAddress,
        /// Which namespace of the drive; 1 without it
        #[arg(long, value_name = "N", value_parser = at_least_one)]
        namespace: Option<usize>,
    },
    /// A namespace of another target
    Remote {
        /// Its name; n and the number of the namespace are added to it
        name: String,
        /// IP, IP:PORT or [V6]:PORT, over RDMA with rdma: before it; port 4420 without one
        address: Endpoint,
        /// Its subsystem
        #[arg(long)]
        nqn: String,
        /// Which namespace of it; 1 without it
        #[arg(long, value_name = "N", value_parser = at_least_one)]
        namespace: Option<usize>,
        /// As which host to connect
        #[arg(long, value_name = "NQN")]
        hostnqn: Option<String>,
    },
    /// A drive with the kernel: no method adds one
    #[command(hide = true)]
    Ng {
        /// Whatever follows.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        words: Vec<String>,
    },
}

/// A disk without a medium.
#[derive(Debug, Args)]
pub struct MemoryDisk {
    /// Its name
    pub name: String,
    /// Like 64MiB
    pub size: Bytes,
    /// Bytes of a block: 512 or 4096
    #[arg(long, value_name = "SIZE", default_value = "512")]
    pub block_size: Bytes,
}

/// Where a target listens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Endpoint {
    /// By which transport.
    pub transport: TransportKind,
    /// Where.
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
            // A scope (%eth0) would be lost: the control socket has no place for it.
            Ok(address) if address.port() != 0 && !text.contains('%') => Ok(Endpoint { transport, address }),
            Ok(_) | Err(_) => Err(format!(
                "`{text}` is not an address; allowed are IP, IP:PORT and [V6]:PORT, with tcp: or rdma: \
                 before it, and a PORT from 1 to 65535"
            )),
        }
    }
}

impl std::fmt::Display for Endpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}:{}", self.transport, self.address)
    }
}
