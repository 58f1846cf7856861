//! The keys of a disk.

use spindle_disk::cache::{CACHE_BYTES_MAX, CACHE_BYTES_MIN, READ_AHEAD_BYTES_MAX};
use spindle_disk::delay::{BANDWIDTH_MAX, BANDWIDTH_MIN, LATENCY_US_MAX, SEEK_US_MAX};

use super::{DISK_BYTES_MAX, FLAG, Key, Kind, NAME, Preset, TRANSPORT, key};

pub(super) static DISK: &[Key] = &[
    key(
        "name",
        NAME,
        Preset::Required,
        "Its name in this file. The identity that hosts see is derived from it, so keep it when the disk is \
         the same.",
    ),
    key(
        "kind",
        Kind::Word(&["ram", "null", "file", "nvme", "ng", "remote"]),
        Preset::From("nvme where nvme is given, ng where ng is given; otherwise required"),
        "ram: memory, lost at the end of the process. null: reads as zeroes and forgets writes, for \
         measuring. file: a regular file or a block device. nvme: a drive that this process drives itself, \
         without the kernel. ng: a drive with the kernel's driver, past its block layer. remote: a namespace \
         of another target.",
    ),
    key(
        "nvme",
        Kind::PciAddress,
        Preset::From("nvme: required; others have none"),
        "PCI address of the drive, which is bound to vfio-pci (spindle nvme list, spindle nvme bind). Size \
         and blocks are the drive's.",
    ),
    key(
        "namespace",
        Kind::Integer { min: 1, max: 4_294_967_294 },
        Preset::Is("1"),
        "nvme, remote: which namespace of the drive or of the other target.",
    ),
    key(
        "address",
        Kind::Address,
        Preset::From("remote: required; others have none"),
        "Where the other target listens. Size and blocks are its namespace's. One that is away at the start \
         is tried every 2 s, and its namespaces appear when it is there. One that goes away later is waited \
         for, each command for command_timeout_ms.",
    ),
    key(
        "transport",
        TRANSPORT,
        Preset::Is("\"tcp\""),
        "remote: how to speak to it. Over RDMA it writes and reads the memory of this process itself.",
    ),
    key(
        "nqn",
        Kind::Nqn,
        Preset::From("remote: required; others have none"),
        "Its subsystem. One I/O queue for each core of [reactor] is asked for.",
    ),
    key(
        "host_nqn",
        Kind::Nqn,
        Preset::From("remote: a name made of /etc/machine-id"),
        "remote: as which host to connect, for its list of hosts. Two processes need names of their own.",
    ),
    key(
        "command_timeout_ms",
        Kind::Integer { min: 1000, max: 3_600_000 },
        Preset::Is("25000"),
        "remote: each command is answered within this time, counted from its submission across reconnects; \
         then it fails with an error that hosts may repeat. Keep it below the hosts' own I/O time-out, 30 s \
         with Linux.",
    ),
    key(
        "quiesce_ms",
        Kind::Integer { min: 0, max: 600_000 },
        Preset::Is("0"),
        "remote, for a far target that is not a Spindle: how long after two keep-alive time-outs (2 x 5 s) \
         it may still execute commands of a lost association. No newer write goes to their blocks before.",
    ),
    key(
        "ng",
        Kind::Path,
        Preset::From("ng: required; others have none"),
        "The generic device of an NVMe namespace, like /dev/ng0n1. Commands go to the drive as they are \
         (io_uring passthrough); where the kernel made queues for it (nvme.poll_queues=N on its command \
         line), completions are polled. Size and blocks are the drive's. Its block device (/dev/nvme0n1) is \
         held meanwhile.",
    ),
    key(
        "size",
        Kind::Size { min: 512, max: DISK_BYTES_MAX, multiple: 512 },
        Preset::From("file: the size that the file or device has"),
        "Capacity, a multiple of the block size. ram and null need it. A regular file that is smaller grows \
         to it; one that is larger is refused, since it would be cut.",
    ),
    key("path", Kind::Path, Preset::From("file: required; others have none"), "The file or block device."),
    key(
        "block_bytes",
        Kind::Number(&[512, 4096]),
        Preset::Is("512"),
        "Bytes of a logical block. Every host takes 512; 4096 spares a file system on 4 KiB sectors its \
         read-modify-write. Changing it makes the data unreadable to the host.",
    ),
    key(
        "read_only",
        FLAG,
        Preset::Is("false"),
        "file, ng: refuse writes, and open the file or device for reading only.",
    ),
    key(
        "create",
        FLAG,
        Preset::Is("false"),
        "file: make a sparse file of size when there is none. Off, because with a file system that is not \
         mounted it would show hosts an empty disk under the old identity.",
    ),
    key(
        "direct",
        FLAG,
        Preset::Is("true"),
        "file: go past the page cache (O_DIRECT) where the file system can, so that no memory holds the \
         data twice.",
    ),
    key(
        "poll",
        FLAG,
        Preset::Is("false"),
        "file: poll for the completions of reads and writes instead of waiting for interrupts (IOPOLL). Only \
         of a block device that has queues for it (nvme.poll_queues=N on the kernel's command line), with \
         direct. Off, because few devices have them; those that have gain latency.",
    ),
    key(
        "medium_id",
        Kind::Text { chars_max: 255 },
        Preset::From("none: what is at the path or address is served, whatever it is"),
        "file, nvme, ng, remote: serve only the medium that has this name. The names of drives, /dev/ng0n1 \
         as well as /dev/sda, may change places at boot, and each would be served as the other. spindle \
         check prints the name of what is at a path, spindle serve logs that of each disk: eui., uuid., \
         serial. of a drive, file. of a file.",
    ),
    key(
        "huge_pages",
        FLAG,
        Preset::Is("false"),
        "ram: take reserved huge pages. Deallocated blocks then give no memory back to the machine.",
    ),
    key(
        "populate",
        FLAG,
        Preset::Is("false"),
        "ram: take all memory when the disk is made, in the background. Otherwise the first write to each \
         2 MiB waits for the kernel to zero them, and with it all hosts of that core.",
    ),
    key(
        "cache",
        Kind::Section(CACHE),
        Preset::Section,
        "file, nvme, ng, remote: memory for the pages of this disk that are read often, shared by all hosts \
         and cores. Writes go through it: they are acknowledged when the disk has them. Without this section \
         each read goes to the disk.",
    ),
    key(
        "delay",
        Kind::Section(DELAY),
        Preset::Section,
        "For tests and benchmarks: make this disk slow on purpose, as one device that all hosts and cores \
         share, behind its cache. At least one of the keys is more than zero. Without this section a disk is \
         as fast as it is.",
    ),
];

static CACHE: &[Key] = &[
    key(
        "size",
        Kind::Size { min: CACHE_BYTES_MIN, max: CACHE_BYTES_MAX, multiple: 4096 },
        Preset::From("required in this section"),
        "Bytes of pages. Tables take about 2 % more. Memory is taken as pages come; with a listener on RDMA, \
         and of an nvme disk, all of it is taken and locked at the start.",
    ),
    key(
        "policy",
        Kind::Word(&["s3-fifo", "lru"]),
        Preset::Is("\"s3-fifo\""),
        "Which page goes when another comes. s3-fifo: what is read once soon goes, so that a scan or a \
         backup does not empty the cache. lru: what was not read for the longest time.",
    ),
    key(
        "mode",
        Kind::Word(&["shared", "exclusive"]),
        Preset::Is("\"shared\""),
        "exclusive: what a host was given goes before all else, because the host keeps it itself; for hosts \
         whose own caches are together about as large as this one.",
    ),
    key(
        "read_ahead",
        Kind::Size { min: 0, max: READ_AHEAD_BYTES_MAX as u64, multiple: 4096 },
        Preset::Is("\"256KiB\""),
        "Most that is read from the disk before a host asks for it, where its reads follow each other or \
         have the same distance. It begins with 64 KiB, doubles, and shrinks where pages go unread. 0: \
         nothing is.",
    ),
    key(
        "sole_writer",
        FLAG,
        Preset::Is("false"),
        "remote: must be true there. It declares that only this target writes to the far namespace: what \
         others write is not seen until the page is evicted.",
    ),
];

static DELAY: &[Key] = &[
    key(
        "latency_us",
        Kind::Integer { min: 0, max: LATENCY_US_MAX },
        Preset::Is("0"),
        "Each command takes at least so long; any number of commands wait at the same time, as in an SSD.",
    ),
    key(
        "bandwidth",
        Kind::Size { min: BANDWIDTH_MIN, max: BANDWIDTH_MAX, multiple: 1 },
        Preset::From("none: moving data takes no time"),
        "Bytes per second of the device, which moves the data of one command after the other.",
    ),
    key(
        "seek_us",
        Kind::Integer { min: 0, max: SEEK_US_MAX },
        Preset::Is("0"),
        "A seek over the whole disk, as in a hard disk; the device makes one seek after the other. It takes \
         this times the square root of the distance from the end of the command before, as a share of the \
         capacity: nothing for a command that goes on there, 53 % of this for random places.",
    ),
];
