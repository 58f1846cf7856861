//! The table of methods. A parameter for a feature of SPDK that cannot be selected in Spindle has no effect.
//! Most of these accept only the value that describes Spindle's behavior.

use super::edit_disks::{attach, cache, create, create_file, delete, detach, resize};
use super::methods::{Action, Change, Method, Read};
use super::params::{Param, optional, required};
use super::{config, edit, reads};
use crate::config::Kind;
use crate::config::kinds::{BLOCK_BYTES, CACHE_MODE, CACHE_POLICY, CNTLID, FAR_NSID, NSID, TRANSPORT};

/// Selects one of SPDK's targets; Spindle has one.
const TGT_NAME: Param = optional("tgt_name", Kind::Only("\"nvmf_tgt\""), "Spindle has one target.");
const NQN: Param = required("nqn", Kind::Nqn, "NQN of the subsystem.");
const NAME: Param = required("name", Kind::String, "Name of the disk.");
const ANY_NUMBER: Kind = Kind::Integer { min: 0, max: u64::MAX };
const NEW_NAME: Param = required("name", Kind::String, "Name of the disk.");
const BLOCKS: Param = required("num_blocks", Kind::Integer { min: 1, max: u64::MAX }, "Number of blocks.");
const BLOCK_SIZE: Param = required("block_size", BLOCK_BYTES, "Block size in bytes.");
const FILENAME: Param = required("filename", Kind::String, "Path of the file or block device.");
const NO_METADATA: Param = optional("md_size", ONLY_ZERO, "Metadata is not supported.");
const NO_PROTECTION: Param = optional("dif_type", ONLY_ZERO, "Protection information is not supported.");
const NO_DIF_LOCATION: Param =
    optional("dif_is_head_of_md", ONLY_FALSE, "Protection information is not supported.");
const ONLY_FALSE: Kind = Kind::Only("false");
const ONLY_ZERO: Kind = Kind::Only("0");
const ADDRESS_FAMILY: Kind = Kind::Word(&["ipv4", "ipv6"]);
const LEVEL: Kind = Kind::Word(&["ERROR", "WARNING", "NOTICE", "INFO", "DEBUG"]);
/// Disks have no UUID; namespaces do.
const NO_UUID: Param = optional("uuid", Kind::Only("null"), "Set the UUID with nvmf_subsystem_add_ns.");
const NEW_SIZE: Param = required("new_size", Kind::Integer { min: 1, max: 1 << 42 }, "New size in MiB.");

static ADDRESS: &[Param] = &[
    required("trtype", TRANSPORT, "Transport."),
    required("traddr", Kind::String, "IP address."),
    optional("trsvcid", Kind::String, "Port."),
    optional("adrfam", ADDRESS_FAMILY, "Address family."),
];

static NAMESPACE: &[Param] = &[
    required("bdev_name", Kind::String, "Name of the disk."),
    optional("nsid", NSID, "NSID; default: the lowest free one."),
    optional("uuid", Kind::Uuid, "UUID of the namespace."),
    optional("nguid", Kind::Nguid, "NGUID of the namespace."),
    optional("no_auto_visible", ONLY_FALSE, "All hosts of the subsystem see the namespace."),
    optional("anagrpid", Kind::Only("1"), "ANA is not supported."),
];

const fn method(name: &'static str, action: Action) -> Method {
    Method { name, params: &[], about: "", action }
}

const fn read(name: &'static str, read: Read) -> Method {
    method(name, Action::Read(read))
}

const fn change(name: &'static str, change: Change) -> Method {
    method(name, Action::Change(change))
}

impl Method {
    const fn about(self, about: &'static str) -> Method {
        Method { about, ..self }
    }

    const fn takes(self, params: &'static [Param]) -> Method {
        Method { params, ..self }
    }
}

pub static METHODS: &[Method] = &[
    method("rpc_get_methods", Action::List).about("Names of all methods.").takes(&[
        optional("current", Kind::Flag, "No effect; every method can be called at any time."),
        optional("include_aliases", Kind::Flag, "No effect; no method has an alias."),
    ]),
    read("spdk_get_version", reads::version).about("Name and version."),
    read("spindle_get_status", |look, _| Ok(look.status())).about("What `spindle status` prints."),
    read("framework_get_reactors", reads::reactors).about("Cores with their busy time."),
    read("framework_get_subsystems", reads::framework_subsystems).about("Components of the process."),
    read("framework_get_config", config::config).about("Calls that recreate the configuration.").takes(&[
        required("name", Kind::Word(&["bdev", "nvmf"]), "Component."),
        optional("with_batches", ONLY_FALSE, "Calls are not batched."),
    ]),
    read("nvmf_get_transports", reads::transports)
        .about("Transports with the limits of their connections.")
        .takes(&[optional("trtype", Kind::String, "Show only this transport."), TGT_NAME]),
    change("nvmf_create_transport", edit::create_transport)
        .about("Check that a configured transport has the given values; the file sets them.")
        .takes(&[
            required("trtype", TRANSPORT, "Transport."),
            optional("max_queue_depth", ANY_NUMBER, "limits.queue_entries."),
            optional("max_io_qpairs_per_ctrlr", ANY_NUMBER, "limits.io_queues."),
            optional("in_capsule_data_size", ANY_NUMBER, "tcp.in_capsule."),
            optional("max_io_size", ANY_NUMBER, "limits.transfer."),
            optional("io_unit_size", ANY_NUMBER, "No effect; pool.zone sets the buffer sizes."),
            optional("num_shared_buffers", ANY_NUMBER, "No effect; pool.zone sets the buffers."),
            optional("buf_cache_size", ANY_NUMBER, "No effect; pool.zone sets the buffers."),
            optional("control_msg_num", ANY_NUMBER, "No effect; pool.zone sets the buffers."),
            optional("data_wr_pool_size", ANY_NUMBER, "No effect; pool.zone sets the buffers."),
            optional("max_aq_depth", ANY_NUMBER, "No effect; an admin queue has up to 128 entries."),
            optional("max_srq_depth", ANY_NUMBER, "No effect; rdma.shared_receives sets it."),
            optional("abort_timeout_sec", ANY_NUMBER, "No effect."),
            optional("sock_priority", ANY_NUMBER, "No effect."),
            optional("acceptor_backlog", ANY_NUMBER, "No effect."),
            optional("acceptor_poll_rate", ANY_NUMBER, "No effect."),
            optional("no_srq", ONLY_FALSE, "Receives are always shared."),
            optional("c2h_success", Kind::Only("true"), "The SUCCESS flag is always used."),
            optional("zcopy", Kind::Flag, "No effect; data is not copied."),
            optional("dif_insert_or_strip", ONLY_FALSE, "Protection information is not supported."),
            optional("no_wr_batching", ONLY_FALSE, "Work requests are always batched."),
            optional("disable_mappable_bar0", ONLY_FALSE, "vfio-user is not supported."),
            optional("disable_adaptive_irq", ONLY_FALSE, "vfio-user is not supported."),
            optional("disable_shadow_doorbells", ONLY_FALSE, "vfio-user is not supported."),
            optional("disable_command_passthru", ONLY_FALSE, "vfio-user is not supported."),
            TGT_NAME,
        ]),
    read("nvmf_get_subsystems", reads::subsystems)
        .about("Subsystems with their listeners, hosts and namespaces.")
        .takes(&[optional("nqn", Kind::Nqn, "Show only this subsystem."), TGT_NAME]),
    change("nvmf_create_subsystem", edit::create_subsystem)
        .about("Add a subsystem without hosts, listeners and namespaces.")
        .takes(&[
            NQN,
            optional("serial_number", Kind::String, "Serial number."),
            optional("model_number", Kind::String, "Model number."),
            optional("allow_any_host", Kind::Flag, "Every host may connect."),
            optional("max_namespaces", ANY_NUMBER, "No effect; the limit is 1024."),
            optional("min_cntlid", CNTLID, "Lowest controller identifier."),
            optional("max_cntlid", CNTLID, "Highest controller identifier."),
            optional("ana_reporting", Kind::Flag, "No effect; ANA is not supported."),
            optional("passthrough", ONLY_FALSE, "Passthrough is not supported."),
            optional("enable_nssr", ONLY_FALSE, "NVM Subsystem Reset is not supported."),
            TGT_NAME,
        ]),
    change("nvmf_delete_subsystem", edit::delete_subsystem)
        .about("Remove a subsystem.")
        .takes(&[NQN, TGT_NAME]),
    change("nvmf_subsystem_add_ns", edit::add_ns)
        .about("Add a disk to a subsystem as a namespace. Returns the NSID.")
        .takes(&[NQN, required("namespace", Kind::Object(NAMESPACE), "The namespace."), TGT_NAME]),
    change("nvmf_subsystem_remove_ns", edit::remove_ns)
        .about("Remove a namespace; the disk stays.")
        .takes(&[NQN, required("nsid", NSID, "NSID."), TGT_NAME]),
    change("nvmf_subsystem_add_host", edit::add_host).about("Allow a host to connect.").takes(&[
        NQN,
        required("host", Kind::Nqn, "NQN of the host."),
        TGT_NAME,
    ]),
    change("nvmf_subsystem_remove_host", edit::remove_host)
        .about("Remove a host from the list and end its connections.")
        .takes(&[
            NQN,
            required("host", Kind::Nqn, "NQN of the host."),
            optional("timeout_ms", ANY_NUMBER, "No effect; connections end immediately."),
            TGT_NAME,
        ]),
    change("nvmf_subsystem_allow_any_host", edit::allow_any_host)
        .about("Allow every host to connect, or only those of the list.")
        .takes(&[
            NQN,
            required("allow_any_host", Kind::Flag, "false: only hosts of the list may connect."),
            optional(
                "hosts",
                Kind::List(&Kind::String),
                "With false: the new list. Hosts of the list stay connected.",
            ),
            TGT_NAME,
        ]),
    change("nvmf_subsystem_add_listener", edit::add_listener)
        .about("Offer a subsystem at an address; adds the listener if there is none.")
        .takes(&[
            NQN,
            required("listen_address", Kind::Object(ADDRESS), "Address; default port: 4420."),
            optional("secure_channel", ONLY_FALSE, "TLS is not supported."),
            optional("ana_state", Kind::Only("\"optimized\""), "ANA is not supported."),
            TGT_NAME,
        ]),
    change("nvmf_subsystem_remove_listener", edit::remove_listener)
        .about("Stop offering a subsystem at an address. A listener without a subsystem is closed.")
        .takes(&[NQN, required("listen_address", Kind::Object(ADDRESS), "Address."), TGT_NAME]),
    read("nvmf_subsystem_get_controllers", reads::controllers)
        .about("Controllers of connected hosts.")
        .takes(&[NQN, TGT_NAME]),
    read("nvmf_subsystem_get_qpairs", reads::qpairs)
        .about("Queue pairs of the controllers.")
        .takes(&[NQN, TGT_NAME]),
    read("nvmf_subsystem_get_listeners", reads::listeners)
        .about("Addresses at which a subsystem is offered.")
        .takes(&[NQN, TGT_NAME]),
    read("nvmf_get_stats", reads::stats).about("Queue pairs of each core.").takes(&[TGT_NAME]),
    change("nvmf_discovery_add_referral", edit::add_referral)
        .about("Add a referral to another discovery service.")
        .takes(&[
            required(
                "address",
                Kind::Object(ADDRESS),
                "Address of the discovery service; default port: 8009.",
            ),
            optional("secure_channel", ONLY_FALSE, "TLS is not supported."),
            TGT_NAME,
        ]),
    change("nvmf_discovery_remove_referral", edit::remove_referral)
        .about("Remove a referral to another discovery service.")
        .takes(&[required("address", Kind::Object(ADDRESS), "Address of the discovery service."), TGT_NAME]),
    read("nvmf_discovery_get_referrals", reads::referrals)
        .about("Referrals to other discovery services.")
        .takes(&[TGT_NAME]),
    change("bdev_malloc_create", |edit, args| create(edit, args, "ram"))
        .about("Add a disk in memory (kind ram). Returns its name.")
        .takes(&[
            optional("name", Kind::String, "Name of the disk; default: Malloc0, Malloc1 and so on."),
            BLOCKS,
            BLOCK_SIZE,
            NO_UUID,
            NO_METADATA,
            optional("md_interleave", ONLY_FALSE, "Metadata is not supported."),
            NO_PROTECTION,
            NO_DIF_LOCATION,
        ]),
    change("bdev_malloc_delete", |edit, args| delete(edit, args, "ram"))
        .about("Remove a disk and its namespace.")
        .takes(&[NAME]),
    change("bdev_malloc_resize", |edit, args| resize(edit, args, "ram"))
        .about("Shrink a disk, or grow it up to the size that it was created with.")
        .takes(&[NAME, NEW_SIZE]),
    change("bdev_null_create", |edit, args| create(edit, args, "null"))
        .about("Add a disk that reads as zeroes and discards writes (kind null). Returns its name.")
        .takes(&[NEW_NAME, BLOCKS, BLOCK_SIZE, NO_UUID, NO_METADATA, NO_PROTECTION, NO_DIF_LOCATION]),
    change("bdev_null_delete", |edit, args| delete(edit, args, "null"))
        .about("Remove a disk and its namespace.")
        .takes(&[NAME]),
    change("bdev_null_resize", |edit, args| resize(edit, args, "null"))
        .about("Grow or shrink a disk.")
        .takes(&[NAME, NEW_SIZE]),
    change("bdev_aio_create", create_file)
        .about("Add a file or block device as a disk (kind file). Returns its name.")
        .takes(&[
            NEW_NAME,
            FILENAME,
            optional("block_size", BLOCK_BYTES, "Block size in bytes."),
            optional("readonly", Kind::Flag, "Refuse writes."),
            optional("fallocate", Kind::Flag, "No effect; Deallocate is passed on if possible."),
            optional("nowait", ONLY_FALSE, "Submission never waits."),
            NO_UUID,
        ]),
    change("bdev_aio_delete", |edit, args| delete(edit, args, "file"))
        .about("Remove a disk and its namespace.")
        .takes(&[NAME]),
    change("bdev_uring_create", create_file)
        .about("Add a file or block device as a disk (kind file). Returns its name.")
        .takes(&[NEW_NAME, FILENAME, optional("block_size", BLOCK_BYTES, "Block size in bytes."), NO_UUID]),
    change("bdev_uring_delete", |edit, args| delete(edit, args, "file"))
        .about("Remove a disk and its namespace.")
        .takes(&[NAME]),
    change("spindle_disk_cache", cache)
        .about("Add, resize or remove the cache of a disk. A resize empties the cache.")
        .takes(&[
            NAME,
            required("size", ANY_NUMBER, "Bytes of cached pages, a multiple of 4096; 0 removes the cache."),
            optional("policy", CACHE_POLICY, "Eviction policy; default: unchanged, s3-fifo for a new cache."),
            optional("mode", CACHE_MODE, "Default: unchanged, shared for a new cache."),
            optional("read_ahead", ANY_NUMBER, "Bytes; default: unchanged, 256 KiB for a new cache."),
            optional(
                "sole_writer",
                Kind::Flag,
                "true is required for the first cache of a remote disk; false has no effect.",
            ),
        ]),
    change("spindle_file_resize", |edit, args| resize(edit, args, "file"))
        .about("Grow a regular file.")
        .takes(&[NAME, NEW_SIZE]),
    change("bdev_nvme_attach_controller", attach)
        .about("Add disks of a drive (kind nvme) or another target (kind remote). Returns their names.")
        .takes(&[
            required("name", Kind::String, "Name of the controller; its disk is NAMEn1."),
            required("trtype", Kind::Word(&["pcie", "tcp", "rdma"]), "pcie: a drive bound to vfio-pci."),
            required("traddr", Kind::String, "PCI address, or IP address of another target."),
            optional("trsvcid", Kind::String, "Port; default: 4420."),
            optional("adrfam", ADDRESS_FAMILY, "Address family."),
            optional("subnqn", Kind::Nqn, "NQN of the other target's subsystem."),
            optional("hostnqn", Kind::Nqn, "Host NQN to connect with."),
            optional("namespace", FAR_NSID, "NSID; default: 1."),
            optional("hdgst", ONLY_FALSE, "Digests are not used."),
            optional("ddgst", ONLY_FALSE, "Digests are not used."),
            optional("multipath", Kind::Only("\"disable\""), "Multipath is not supported."),
            optional("prchk_reftag", ONLY_FALSE, "Protection information is not supported."),
            optional("prchk_guard", ONLY_FALSE, "Protection information is not supported."),
            optional("allow_unrecognized_csi", ONLY_FALSE, "Only the NVM command set is supported."),
            optional("disable_sq_flow_control", ONLY_FALSE, "The other target decides."),
        ]),
    change("bdev_nvme_detach_controller", detach)
        .about("Remove the disks of a controller and their namespaces.")
        .takes(&[required("name", Kind::String, "Name of the controller.")]),
    read("bdev_get_bdevs", reads::bdevs)
        .about("Disks. `bytes_used`, the space that a file uses, was measured at an earlier call.")
        .takes(&[
            optional("name", Kind::String, "Show only this disk."),
            optional("timeout", ANY_NUMBER, "No effect; the call does not wait."),
        ]),
    read("bdev_get_iostat", reads::iostat)
        .about("Traffic and cache counters of each disk since the start of the process.")
        .takes(&[
            optional("name", Kind::String, "Show only this disk."),
            optional("names", Kind::List(&Kind::String), "Show only these disks."),
            optional("per_channel", Kind::Flag, "Show the counters of each core, in channels."),
            optional("by_host", Kind::Flag, "Also show the cache counters of each host, in hosts."),
            optional("reset_mode", Kind::Only("\"none\""), "Counters are never reset."),
        ]),
    change("log_set_level", edit::set_log_level).about("Set the log level.").takes(&[required(
        "level",
        LEVEL,
        "Least urgent level to log.",
    )]),
    read("log_get_level", reads::log_level).about("Least urgent level that is logged."),
];
