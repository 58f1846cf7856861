//! The table of methods. Parameters that SPDK has and Spindle does not may be given with the value that says
//! what is so here.

use spindle_target::snapshot::NSID_MAX;

use super::edit_disks::{attach, cache, create, create_file, delete, detach, resize};
use super::methods::{Act, Change, Method, Read};
use super::params::{Kind, Param, may, must};
use super::{config, edit, reads};
use crate::config::CNTLID_MAX;

/// The name of SPDK's target, of which there is one here.
const TGT_NAME: Param = may("tgt_name", Kind::Only("\"nvmf_tgt\""), "There is one target.");
const NQN: Param = must("nqn", Kind::Nqn, "The subsystem.");
const NAME: Param = must("name", Kind::Text, "The disk.");
const ANY: Kind = Kind::Whole { min: 0, max: u64::MAX };
const NEW_NAME: Param = must("name", Kind::Text, "Its name.");
const BLOCKS: Param = must("num_blocks", Kind::Whole { min: 1, max: u64::MAX }, "Blocks.");
const BLOCK_BYTES: Kind = Kind::Number(&[512, 4096]);
const BLOCK_SIZE: Param = must("block_size", BLOCK_BYTES, "Bytes of a block.");
const FILENAME: Param = must("filename", Kind::Text, "Path of the file or block device.");
const NO_METADATA: Param = may("md_size", ZERO, "There is no metadata.");
const NO_PROTECTION: Param = may("dif_type", ZERO, "There is no protection information.");
const NO_PLACE: Param = may("dif_is_head_of_md", OFF, "The same.");
const CNTLID: Kind = Kind::Whole { min: 1, max: CNTLID_MAX };
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

const fn method(name: &'static str, act: Act) -> Method {
    Method { name, params: &[], about: "", act }
}

const fn read(name: &'static str, read: Read) -> Method {
    method(name, Act::Read(read))
}

const fn change(name: &'static str, change: Change) -> Method {
    method(name, Act::Change(change))
}

impl Method {
    const fn about(self, about: &'static str) -> Method {
        Method { about, ..self }
    }

    const fn takes(self, params: &'static [Param]) -> Method {
        Method { params, ..self }
    }
}

/// All of them.
pub static METHODS: &[Method] = &[
    method("rpc_get_methods", Act::List).about("Names of all methods.").takes(&[
        may("current", Kind::Flag, "Only those that can be called now: all of them."),
        may("include_aliases", Kind::Flag, "There are none."),
    ]),
    read("spdk_get_version", reads::version).about("Name and version."),
    read("spindle_get_status", |look, _| Ok(look.status())).about("What `spindle status` prints."),
    read("framework_get_reactors", reads::reactors).about("Cores, and how long each was busy."),
    read("framework_get_subsystems", reads::parts).about("Parts of the process."),
    read("framework_get_config", config::config).about("The calls that make what there is.").takes(&[
        must("name", Kind::Word(&["bdev", "nvmf"]), "Which part."),
        may("with_batches", OFF, "One call after the other."),
    ]),
    read("nvmf_get_transports", reads::transports)
        .about("Transports, and what connections over them are limited to.")
        .takes(&[may("trtype", Kind::Text, "Only this one."), TGT_NAME]),
    change("nvmf_create_transport", edit::create_transport)
        .about("Transports are there; what the file fixes must be equal.")
        .takes(&[
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
        ]),
    read("nvmf_get_subsystems", reads::subsystems)
        .about("Subsystems with their listeners, hosts and namespaces.")
        .takes(&[may("nqn", Kind::Nqn, "Only this one."), TGT_NAME]),
    change("nvmf_create_subsystem", edit::create_subsystem)
        .about("A subsystem, without hosts, listeners and namespaces.")
        .takes(&[
            NQN,
            may("serial_number", Kind::Text, "Serial number."),
            may("model_number", Kind::Text, "Model number."),
            may("allow_any_host", Kind::Flag, "Every host may connect."),
            may("max_namespaces", Kind::Whole { min: 0, max: NSID_MAX as u64 }, "There is room for 1024."),
            may("min_cntlid", CNTLID, "Lowest controller identifier."),
            may("max_cntlid", CNTLID, "Highest controller identifier."),
            may("ana_reporting", OFF, "There is no ANA."),
            may("passthrough", OFF, "Commands are checked."),
            may("enable_nssr", OFF, "There is no NVM Subsystem Reset."),
            TGT_NAME,
        ]),
    change("nvmf_delete_subsystem", edit::delete_subsystem)
        .about("Remove a subsystem.")
        .takes(&[NQN, TGT_NAME]),
    change("nvmf_subsystem_add_ns", edit::add_ns)
        .about("Show a disk to the hosts of a subsystem. Gives the number of the namespace.")
        .takes(&[NQN, must("namespace", Kind::Object(NAMESPACE), "The namespace."), TGT_NAME]),
    change("nvmf_subsystem_remove_ns", edit::remove_ns)
        .about("Remove a namespace; the disk stays.")
        .takes(&[NQN, must("nsid", NSID, "Its number."), TGT_NAME]),
    change("nvmf_subsystem_add_host", edit::add_host).about("Allow a host to connect.").takes(&[
        NQN,
        must("host", Kind::Nqn, "NQN of the host."),
        TGT_NAME,
    ]),
    change("nvmf_subsystem_remove_host", edit::remove_host)
        .about("No longer allow a host to connect, and end its connections.")
        .takes(&[
            NQN,
            must("host", Kind::Nqn, "NQN of the host."),
            may("timeout_ms", ANY, "Its connections end at once."),
            TGT_NAME,
        ]),
    change("nvmf_subsystem_allow_any_host", edit::allow_any_host)
        .about("Allow every host to connect, or only those of the list.")
        .takes(&[NQN, must("allow_any_host", Kind::Flag, "Or only those of the list."), TGT_NAME]),
    change("nvmf_subsystem_add_listener", edit::add_listener)
        .about("Offer a subsystem at an address, which is listened on if it was not.")
        .takes(&[
            NQN,
            must("listen_address", Kind::Object(ADDRESS), "Where; port 4420 if none is given."),
            may("secure_channel", OFF, "There is no TLS."),
            may("ana_state", Kind::Only("\"optimized\""), "There is no ANA."),
            TGT_NAME,
        ]),
    change("nvmf_subsystem_remove_listener", edit::remove_listener)
        .about("No longer offer it there. An address at which none is offered any more is closed.")
        .takes(&[NQN, must("listen_address", Kind::Object(ADDRESS), "Where."), TGT_NAME]),
    read("nvmf_subsystem_get_controllers", reads::controllers)
        .about("Who is connected.")
        .takes(&[NQN, TGT_NAME]),
    read("nvmf_subsystem_get_qpairs", reads::qpairs)
        .about("Queue pairs of the controllers.")
        .takes(&[NQN, TGT_NAME]),
    read("nvmf_subsystem_get_listeners", reads::listeners)
        .about("Where it is offered.")
        .takes(&[NQN, TGT_NAME]),
    read("nvmf_get_stats", reads::stats).about("Queue pairs of each core.").takes(&[TGT_NAME]),
    change("nvmf_discovery_add_referral", edit::add_referral)
        .about("Tell hosts of another discovery service.")
        .takes(&[
            must("address", Kind::Object(ADDRESS), "Where that service listens; port 8009 if none is given."),
            may("secure_channel", OFF, "There is no TLS."),
            TGT_NAME,
        ]),
    change("nvmf_discovery_remove_referral", edit::remove_referral)
        .about("No longer tell hosts of it.")
        .takes(&[must("address", Kind::Object(ADDRESS), "Where that service listens."), TGT_NAME]),
    read("nvmf_discovery_get_referrals", reads::referrals)
        .about("Other discovery services.")
        .takes(&[TGT_NAME]),
    change("bdev_malloc_create", |edit, args| create(edit, args, "ram"))
        .about("A disk in memory (kind ram). Gives its name.")
        .takes(&[
            may("name", Kind::Text, "Its name; Malloc0 and so on without one."),
            BLOCKS,
            BLOCK_SIZE,
            NO_UUID,
            NO_METADATA,
            may("md_interleave", OFF, "The same."),
            NO_PROTECTION,
            NO_PLACE,
        ]),
    change("bdev_malloc_delete", |edit, args| delete(edit, args, "ram"))
        .about("Remove it and the namespace of it.")
        .takes(&[NAME]),
    change("bdev_malloc_resize", |edit, args| resize(edit, args, "ram"))
        .about("Cut it, or grow it up to the size that it was made with.")
        .takes(&[NAME, NEW_SIZE]),
    change("bdev_null_create", |edit, args| create(edit, args, "null"))
        .about("A disk that forgets (kind null). Gives its name.")
        .takes(&[NEW_NAME, BLOCKS, BLOCK_SIZE, NO_UUID, NO_METADATA, NO_PROTECTION, NO_PLACE]),
    change("bdev_null_delete", |edit, args| delete(edit, args, "null"))
        .about("Remove it and the namespace of it.")
        .takes(&[NAME]),
    change("bdev_null_resize", |edit, args| resize(edit, args, "null"))
        .about("Grow or cut it.")
        .takes(&[NAME, NEW_SIZE]),
    change("bdev_aio_create", create_file)
        .about("A file or block device (kind file). Gives its name.")
        .takes(&[
            NEW_NAME,
            FILENAME,
            may("block_size", BLOCK_BYTES, "Bytes of a block."),
            may("readonly", Kind::Flag, "Refuse writes."),
            may("fallocate", Kind::Flag, "Deallocate is passed on where the file system can."),
            may("nowait", OFF, "Submission does not wait in either case."),
            NO_UUID,
        ]),
    change("bdev_aio_delete", |edit, args| delete(edit, args, "file"))
        .about("Remove it and the namespace of it.")
        .takes(&[NAME]),
    change("bdev_uring_create", create_file).about("The same.").takes(&[
        NEW_NAME,
        FILENAME,
        may("block_size", BLOCK_BYTES, "Bytes of a block."),
        NO_UUID,
    ]),
    change("bdev_uring_delete", |edit, args| delete(edit, args, "file"))
        .about("Remove it and the namespace of it.")
        .takes(&[NAME]),
    change("spindle_disk_cache", cache)
        .about(
            "Put a cache in front of a disk in use, give it another size, which empties it, or \
             take it away.",
        )
        .takes(&[
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
        ]),
    change("spindle_file_resize", |edit, args| resize(edit, args, "file"))
        .about("Grow a regular file.")
        .takes(&[NAME, NEW_SIZE]),
    change("bdev_nvme_attach_controller", attach)
        .about(
            "A drive (kind nvme) or a namespace of another target (kind remote). Gives the names \
             of its disks.",
        )
        .takes(&[
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
        ]),
    change("bdev_nvme_detach_controller", detach)
        .about("Remove its disks and the namespaces of them.")
        .takes(&[must("name", Kind::Text, "Of the controller.")]),
    read("bdev_get_bdevs", reads::bdevs)
        .about("Disks.")
        .takes(&[may("name", Kind::Text, "Only this one."), may("timeout", ANY, "It is not waited for.")]),
    read("bdev_get_iostat", reads::iostat)
        .about("Traffic of each disk since the process was started, and what its cache has done.")
        .takes(&[
            may("name", Kind::Text, "Only this one."),
            may("names", Kind::Texts, "Only these."),
            may("per_channel", Kind::Flag, "Of each core, as channels."),
            may("by_host", Kind::Flag, "What a cache has done for each host, as hosts of it."),
            may("reset_mode", Kind::Only("\"none\""), "Counters are never reset."),
        ]),
    change("log_set_level", edit::set_log_level).about("Log less or more.").takes(&[must(
        "level",
        LEVEL,
        "Least urgent.",
    )]),
    read("log_get_level", reads::log_level).about("Least urgent lines that are logged."),
];
