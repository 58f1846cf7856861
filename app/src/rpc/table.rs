//! The table of methods. Parameters that SPDK has and Spindle does not may be given with the value that says
//! what is so here.

use spindle_target::snapshot::NSID_MAX;

use super::methods::{Act, Change, Method, Read};
use super::params::{Kind, Param, may, must};
use super::{config, edit, edit_disks, reads};

/// The name of SPDK's target, of which there is one here.
const TGT_NAME: Param = may("tgt_name", Kind::Only("\"nvmf_tgt\""), "There is one target.");
const NQN: Param = must("nqn", Kind::Nqn, "The subsystem.");
const NAME: Param = must("name", Kind::Text, "The disk.");
const ANY: Kind = Kind::Whole { min: 0, max: u64::MAX };
const BLOCKS: Kind = Kind::Whole { min: 1, max: u64::MAX };
const BLOCK_SIZE: Kind = Kind::Number(&[512, 4096]);
const NSID: Kind = Kind::Whole { min: 1, max: NSID_MAX as u64 };
const OFF: Kind = Kind::Only("false");
const ZERO: Kind = Kind::Only("0");
const FABRIC: Kind = Kind::Word(&["tcp", "rdma"]);
const FAMILY: Kind = Kind::Word(&["ipv4", "ipv6"]);
const LEVEL: Kind = Kind::Word(&["ERROR", "WARNING", "NOTICE", "INFO", "DEBUG"]);
/// Whose identity hosts see is the namespace.
const NO_UUID: Param = may("uuid", Kind::Only("null"), "nvmf_subsystem_add_ns has it.");
const NEW_SIZE: Param = must("new_size", Kind::Whole { min: 1, max: 1 << 42 }, "In MiB.");

static ADDRESS: &[Param] = &[
    must("trtype", FABRIC, "Transport."),
    must("traddr", Kind::Text, "IP address."),
    may("trsvcid", Kind::Text, "Port."),
    may("adrfam", FAMILY, "Family of the address."),
];

static NAMESPACE: &[Param] = &[
    must("bdev_name", Kind::Text, "The disk."),
    may("nsid", NSID, "Its number; without it the lowest that is free."),
    may("uuid", Kind::Uuid, "By which hosts know it."),
    may("nguid", Kind::Nguid, "The same."),
    may("no_auto_visible", OFF, "All hosts of the subsystem see it."),
    may("anagrpid", Kind::Only("1"), "There is no ANA."),
];

const fn read(name: &'static str, params: &'static [Param], about: &'static str, read: Read) -> Method {
    Method { name, params, about, act: Act::Read(read) }
}

const fn change(name: &'static str, params: &'static [Param], about: &'static str, change: Change) -> Method {
    Method { name, params, about, act: Act::Change(change) }
}

/// All of them.
pub static METHODS: &[Method] = &[
    Method {
        name: "rpc_get_methods",
        params: &[
            may("current", Kind::Flag, "Only those that can be called now: all of them."),
            may("include_aliases", Kind::Flag, "There are none."),
        ],
        about: "Names of all methods.",
        act: Act::List,
    },
    read("spdk_get_version", &[], "Name and version.", reads::version),
    read("spindle_get_status", &[], "What `spindle status` prints.", |look, _| Ok(look.status())),
    read("framework_get_reactors", &[], "Cores, and how long each was busy.", reads::reactors),
    read("framework_get_subsystems", &[], "Parts of the process.", reads::parts),
    read(
        "framework_get_config",
        &[
            must("name", Kind::Word(&["bdev", "nvmf"]), "Which part."),
            may("with_batches", OFF, "One call after the other."),
        ],
        "The calls that make what there is.",
        config::config,
    ),
    read(
        "nvmf_get_transports",
        &[may("trtype", Kind::Text, "Only this one."), TGT_NAME],
        "Transports, and what connections over them are limited to.",
        reads::transports,
    ),
    change(
        "nvmf_create_transport",
        &[
            must("trtype", FABRIC, "Transport."),
            may("max_queue_depth", ANY, "limits.queue_entries."),
            may("max_io_qpairs_per_ctrlr", ANY, "limits.io_queues."),
            may("in_capsule_data_size", ANY, "tcp.in_capsule."),
            may("max_io_size", ANY, "limits.transfer."),
            may("no_srq", OFF, "Receives are shared."),
            may("c2h_success", Kind::Only("true"), "SUCCESS saves completions."),
            may("zcopy", Kind::Flag, "Nothing is copied in either case."),
            may("dif_insert_or_strip", OFF, "There is no protection information."),
            may("no_wr_batching", OFF, "Work requests are posted together."),
            may("disable_mappable_bar0", OFF, "Of vfio-user."),
            may("disable_adaptive_irq", OFF, "Of vfio-user."),
            may("disable_shadow_doorbells", OFF, "Of vfio-user."),
            may("disable_command_passthru", OFF, "Of vfio-user."),
            TGT_NAME,
        ],
        "Transports are there; what the file fixes must be equal.",
        edit::create_transport,
    ),
    read(
        "nvmf_get_subsystems",
        &[may("nqn", Kind::Nqn, "Only this one."), TGT_NAME],
        "Subsystems with their listeners, hosts and namespaces.",
        reads::subsystems,
    ),
    change(
        "nvmf_create_subsystem",
        &[
            NQN,
            may("serial_number", Kind::Text, "Serial number."),
            may("model_number", Kind::Text, "Model number."),
            may("allow_any_host", Kind::Flag, "Every host may connect."),
            may("max_namespaces", Kind::Whole { min: 0, max: NSID_MAX as u64 }, "There is room for 1024."),
            may("min_cntlid", Kind::Whole { min: 1, max: 0xffef }, "Lowest controller identifier."),
            may("max_cntlid", Kind::Whole { min: 1, max: 0xffef }, "Highest controller identifier."),
            may("ana_reporting", OFF, "There is no ANA."),
            may("passthrough", OFF, "Commands are checked."),
            may("enable_nssr", OFF, "There is no NVM Subsystem Reset."),
            TGT_NAME,
        ],
        "A subsystem, without hosts, listeners and namespaces.",
        edit::create_subsystem,
    ),
    change("nvmf_delete_subsystem", &[NQN, TGT_NAME], "Remove a subsystem.", edit::delete_subsystem),
    change(
        "nvmf_subsystem_add_ns",
        &[NQN, must("namespace", Kind::Object(NAMESPACE), "The namespace."), TGT_NAME],
        "Show a disk to the hosts of a subsystem. Gives the number of the namespace.",
        edit::add_ns,
    ),
    change(
        "nvmf_subsystem_remove_ns",
        &[NQN, must("nsid", NSID, "Its number."), TGT_NAME],
        "Remove a namespace; the disk stays.",
        edit::remove_ns,
    ),
    change(
        "nvmf_subsystem_add_host",
        &[NQN, must("host", Kind::Nqn, "NQN of the host."), TGT_NAME],
        "Allow a host to connect.",
        edit::add_host,
    ),
    change(
        "nvmf_subsystem_remove_host",
        &[
            NQN,
            must("host", Kind::Nqn, "NQN of the host."),
            may("timeout_ms", ANY, "Its connections end at once."),
            TGT_NAME,
        ],
        "No longer allow a host to connect, and end its connections.",
        edit::remove_host,
    ),
    change(
        "nvmf_subsystem_allow_any_host",
        &[NQN, must("allow_any_host", Kind::Flag, "Or only those of the list."), TGT_NAME],
        "Allow every host to connect, or only those of the list.",
        edit::allow_any_host,
    ),
    change(
        "nvmf_subsystem_add_listener",
        &[
            NQN,
            must("listen_address", Kind::Object(ADDRESS), "Where; port 4420 if none is given."),
            may("secure_channel", OFF, "There is no TLS."),
            may("ana_state", Kind::Only("\"optimized\""), "There is no ANA."),
            TGT_NAME,
        ],
        "Offer a subsystem at an address, which is listened on if it was not.",
        edit::add_listener,
    ),
    change(
        "nvmf_subsystem_remove_listener",
        &[NQN, must("listen_address", Kind::Object(ADDRESS), "Where."), TGT_NAME],
        "No longer offer it there. An address at which none is offered any more is closed.",
        edit::remove_listener,
    ),
    read("nvmf_subsystem_get_controllers", &[NQN, TGT_NAME], "Who is connected.", reads::controllers),
    read("nvmf_subsystem_get_qpairs", &[NQN, TGT_NAME], "Queue pairs of the controllers.", reads::qpairs),
    read("nvmf_subsystem_get_listeners", &[NQN, TGT_NAME], "Where it is offered.", reads::listeners),
    read("nvmf_get_stats", &[TGT_NAME], "Queue pairs of each core.", reads::stats),
    change(
        "nvmf_discovery_add_referral",
        &[
            must("address", Kind::Object(ADDRESS), "Where that service listens; port 8009 if none is given."),
            may("secure_channel", OFF, "There is no TLS."),
            TGT_NAME,
        ],
        "Tell hosts of another discovery service.",
        edit::add_referral,
    ),
    change(
        "nvmf_discovery_remove_referral",
        &[must("address", Kind::Object(ADDRESS), "Where that service listens."), TGT_NAME],
        "No longer tell hosts of it.",
        edit::remove_referral,
    ),
    read("nvmf_discovery_get_referrals", &[TGT_NAME], "Other discovery services.", reads::referrals),
    change(
        "bdev_malloc_create",
        &[
            may("name", Kind::Text, "Its name; Malloc0 and so on without one."),
            must("num_blocks", BLOCKS, "Blocks."),
            must("block_size", BLOCK_SIZE, "Bytes of a block."),
            NO_UUID,
            may("md_size", ZERO, "There is no metadata."),
            may("md_interleave", OFF, "The same."),
            may("dif_type", ZERO, "There is no protection information."),
            may("dif_is_head_of_md", OFF, "The same."),
        ],
        "A disk in memory (kind ram). Gives its name.",
        edit_disks::create_malloc,
    ),
    change("bdev_malloc_delete", &[NAME], "Remove it and the namespace of it.", edit_disks::delete_malloc),
    change(
        "bdev_malloc_resize",
        &[NAME, NEW_SIZE],
        "Cut it, or grow it up to the size that it was made with.",
        edit_disks::resize_malloc,
    ),
    change(
        "bdev_null_create",
        &[
            must("name", Kind::Text, "Its name."),
            must("num_blocks", BLOCKS, "Blocks."),
            must("block_size", BLOCK_SIZE, "Bytes of a block."),
            NO_UUID,
            may("md_size", ZERO, "There is no metadata."),
            may("dif_type", ZERO, "There is no protection information."),
            may("dif_is_head_of_md", OFF, "The same."),
        ],
        "A disk that forgets (kind null). Gives its name.",
        edit_disks::create_null,
    ),
    change("bdev_null_delete", &[NAME], "Remove it and the namespace of it.", edit_disks::delete_null),
    change("bdev_null_resize", &[NAME, NEW_SIZE], "Grow or cut it.", edit_disks::resize_null),
    change(
        "bdev_aio_create",
        &[
            must("name", Kind::Text, "Its name."),
            must("filename", Kind::Text, "Path of the file or block device."),
            may("block_size", BLOCK_SIZE, "Bytes of a block."),
            may("readonly", Kind::Flag, "Refuse writes."),
            may("fallocate", Kind::Flag, "Deallocate is passed on where the file system can."),
            may("nowait", OFF, "Submission does not wait in either case."),
            NO_UUID,
        ],
        "A file or block device (kind file). Gives its name.",
        edit_disks::create_file,
    ),
    change("bdev_aio_delete", &[NAME], "Remove it and the namespace of it.", edit_disks::delete_file),
    change(
        "bdev_uring_create",
        &[
            must("name", Kind::Text, "Its name."),
            must("filename", Kind::Text, "Path of the file or block device."),
            may("block_size", BLOCK_SIZE, "Bytes of a block."),
            NO_UUID,
        ],
        "The same.",
        edit_disks::create_file,
    ),
    change("bdev_uring_delete", &[NAME], "Remove it and the namespace of it.", edit_disks::delete_file),
    change(
        "spindle_disk_cache",
        &[
            NAME,
            must("size", ANY, "Bytes of pages, a multiple of 4096; 0 takes the cache away."),
            may(
                "policy",
                Kind::Word(&["s3-fifo", "lru"]),
                "Which page goes; without it as it is, or s3-fifo.",
            ),
            may("mode", Kind::Word(&["shared", "exclusive"]), "Without it as it is, or shared."),
            may("read_ahead", ANY, "Bytes, as in the file. Without it as it is, or 256 KiB."),
            may(
                "sole_writer",
                Kind::Flag,
                "true as in the file, which a remote disk's first cache needs; false changes nothing.",
            ),
        ],
        "Put a cache in front of a disk in use, give it another size, which empties it, or take it away.",
        edit_disks::cache,
    ),
    change("spindle_file_resize", &[NAME, NEW_SIZE], "Grow a regular file.", edit_disks::resize_file),
    change(
        "bdev_nvme_attach_controller",
        &[
            must("name", Kind::Text, "Of the controller; its disk is NAMEn1."),
            must("trtype", Kind::Word(&["pcie", "tcp", "rdma"]), "pcie: a drive bound to vfio-pci."),
            must("traddr", Kind::Text, "PCI address, or IP address of another target."),
            may("trsvcid", Kind::Text, "Port; 4420 without one."),
            may("adrfam", FAMILY, "Family of the address."),
            may("subnqn", Kind::Nqn, "Subsystem of the other target."),
            may("hostnqn", Kind::Nqn, "As which host to connect."),
            may("namespace", Kind::Whole { min: 1, max: 0xffff_fffe }, "Which namespace; 1 without it."),
            may("hdgst", OFF, "No digests."),
            may("ddgst", OFF, "No digests."),
            may("multipath", Kind::Only("\"disable\""), "There is one path."),
            may("prchk_reftag", OFF, "There is no protection information."),
            may("prchk_guard", OFF, "The same."),
            may("allow_unrecognized_csi", OFF, "The NVM command set alone."),
            may("disable_sq_flow_control", OFF, "As the other target asks."),
        ],
        "A drive (kind nvme) or a namespace of another target (kind remote). Gives the names of its disks.",
        edit_disks::attach,
    ),
    change(
        "bdev_nvme_detach_controller",
        &[must("name", Kind::Text, "Of the controller.")],
        "Remove its disks and the namespaces of them.",
        edit_disks::detach,
    ),
    read(
        "bdev_get_bdevs",
        &[may("name", Kind::Text, "Only this one."), may("timeout", ANY, "It is not waited for.")],
        "Disks.",
        reads::bdevs,
    ),
    read(
        "bdev_get_iostat",
        &[
            may("name", Kind::Text, "Only this one."),
            may("names", Kind::Texts, "Only these."),
            may("per_channel", Kind::Flag, "Of each core, as channels."),
            may("by_host", Kind::Flag, "What a cache has done for each host, as hosts of it."),
            may("reset_mode", Kind::Only("\"none\""), "Counters are never reset."),
        ],
        "Traffic of each disk since the process was started, and what its cache has done.",
        reads::iostat,
    ),
    change(
        "log_set_level",
        &[must("level", LEVEL, "Least urgent.")],
        "Log less or more.",
        edit::set_log_level,
    ),
    read("log_get_level", &[], "Least urgent lines that are logged.", reads::log_level),
];
