//! The table of methods. A parameter for a feature of SPDK that cannot be selected in Spindle has no effect.
//! Most of these accept only the value that describes Spindle's behavior.

use super::edit_disks::{attach, cache, create, create_file, delete, detach, resize};
use super::methods::{Action, Change, Method, Read};
use super::params::{Param, optional, required};
use super::{config, edit, reads};
use crate::config::Kind;
use crate::config::kinds::{BLOCK_BYTES, CACHE_MODE, CACHE_POLICY, CNTLID, FAR_NSID, NSID, TRANSPORT};

/// Selects one of SPDK's targets; Spindle has one.
const TGT_NAME: Param = optional("tgt_name", Kind::Only("\"nvmf_tgt\""), "There is one target.");
const NQN: Param = required("nqn", Kind::Nqn, "The subsystem.");
const NAME: Param = required("name", Kind::String, "The disk.");
const ANY_NUMBER: Kind = Kind::Integer { min: 0, max: u64::MAX };
const NEW_NAME: Param = required("name", Kind::String, "Its name.");
const BLOCKS: Param = required("num_blocks", Kind::Integer { min: 1, max: u64::MAX }, "Blocks.");
const BLOCK_SIZE: Param = required("block_size", BLOCK_BYTES, "Bytes of a block.");
const FILENAME: Param = required("filename", Kind::String, "Path of the file or block device.");
const NO_METADATA: Param = optional("md_size", ONLY_ZERO, "There is no metadata.");
const NO_PROTECTION: Param = optional("dif_type", ONLY_ZERO, "There is no protection information.");
const NO_DIF_LOCATION: Param = optional("dif_is_head_of_md", ONLY_FALSE, "The same.");
const ONLY_FALSE: Kind = Kind::Only("false");
const ONLY_ZERO: Kind = Kind::Only("0");
const ADDRESS_FAMILY: Kind = Kind::Word(&["ipv4", "ipv6"]);
const LEVEL: Kind = Kind::Word(&["ERROR", "WARNING", "NOTICE", "INFO", "DEBUG"]);
/// Disks have no UUID; namespaces do.
const NO_UUID: Param = optional("uuid", Kind::Only("null"), "nvmf_subsystem_add_ns has it.");
const NEW_SIZE: Param = required("new_size", Kind::Integer { min: 1, max: 1 << 42 }, "In MiB.");

static ADDRESS: &[Param] = &[
    required("trtype", TRANSPORT, "Transport."),
    required("traddr", Kind::String, "IP address."),
    optional("trsvcid", Kind::String, "Port."),
    optional("adrfam", ADDRESS_FAMILY, "Family of the address."),
];

static NAMESPACE: &[Param] = &[
    required("bdev_name", Kind::String, "The disk."),
    optional("nsid", NSID, "Its number; without it the lowest that is free."),
    optional("uuid", Kind::Uuid, "By which hosts know it."),
    optional("nguid", Kind::Nguid, "The same."),
    optional("no_auto_visible", ONLY_FALSE, "All hosts of the subsystem see it."),
    optional("anagrpid", Kind::Only("1"), "There is no ANA."),
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
        optional("current", Kind::Flag, "Only those that can be called now: all of them."),
        optional("include_aliases", Kind::Flag, "There are none."),
    ]),
    read("spdk_get_version", reads::version).about("Name and version."),
    read("spindle_get_status", |look, _| Ok(look.status())).about("What `spindle status` prints."),
    read("framework_get_reactors", reads::reactors).about("Cores, and how long each was busy."),
    read("framework_get_subsystems", reads::framework_subsystems).about("Parts of the process."),
    read("framework_get_config", config::config).about("The calls that make what there is.").takes(&[
        required("name", Kind::Word(&["bdev", "nvmf"]), "Which part."),
        optional("with_batches", ONLY_FALSE, "One call after the other."),
    ]),
    read("nvmf_get_transports", reads::transports)
        .about("Transports, and what connections over them are limited to.")
        .takes(&[optional("trtype", Kind::String, "Only this one."), TGT_NAME]),
    change("nvmf_create_transport", edit::create_transport)
        .about("Transports are there; what the file fixes must be equal.")
        .takes(&[
            required("trtype", TRANSPORT, "Transport."),
            optional("max_queue_depth", ANY_NUMBER, "limits.queue_entries."),
            optional("max_io_qpairs_per_ctrlr", ANY_NUMBER, "limits.io_queues."),
            optional("in_capsule_data_size", ANY_NUMBER, "tcp.in_capsule."),
            optional("max_io_size", ANY_NUMBER, "limits.transfer."),
            optional("io_unit_size", ANY_NUMBER, "pool.zone has the sizes of buffers; no effect."),
            optional("num_shared_buffers", ANY_NUMBER, "The same."),
            optional("buf_cache_size", ANY_NUMBER, "The same."),
            optional("control_msg_num", ANY_NUMBER, "The same."),
            optional("data_wr_pool_size", ANY_NUMBER, "The same."),
            optional("max_aq_depth", ANY_NUMBER, "Admin queues take 128; no effect."),
            optional("max_srq_depth", ANY_NUMBER, "rdma.shared_receives; no effect."),
            optional("abort_timeout_sec", ANY_NUMBER, "No effect."),
            optional("sock_priority", ANY_NUMBER, "No effect."),
            optional("acceptor_backlog", ANY_NUMBER, "No effect."),
            optional("acceptor_poll_rate", ANY_NUMBER, "No effect."),
            optional("no_srq", ONLY_FALSE, "Receives are shared."),
            optional("c2h_success", Kind::Only("true"), "SUCCESS saves completions."),
            optional("zcopy", Kind::Flag, "Nothing is copied in either case."),
            optional("dif_insert_or_strip", ONLY_FALSE, "There is no protection information."),
            optional("no_wr_batching", ONLY_FALSE, "Work requests are posted together."),
            optional("disable_mappable_bar0", ONLY_FALSE, "Of vfio-user."),
            optional("disable_adaptive_irq", ONLY_FALSE, "Of vfio-user."),
            optional("disable_shadow_doorbells", ONLY_FALSE, "Of vfio-user."),
            optional("disable_command_passthru", ONLY_FALSE, "Of vfio-user."),
            TGT_NAME,
        ]),
    read("nvmf_get_subsystems", reads::subsystems)
        .about("Subsystems with their listeners, hosts and namespaces.")
        .takes(&[optional("nqn", Kind::Nqn, "Only this one."), TGT_NAME]),
    change("nvmf_create_subsystem", edit::create_subsystem)
        .about("A subsystem, without hosts, listeners and namespaces.")
        .takes(&[
            NQN,
            optional("serial_number", Kind::String, "Serial number."),
            optional("model_number", Kind::String, "Model number."),
            optional("allow_any_host", Kind::Flag, "Every host may connect."),
            optional("max_namespaces", ANY_NUMBER, "There is room for 1024, whatever is asked for."),
            optional("min_cntlid", CNTLID, "Lowest controller identifier."),
            optional("max_cntlid", CNTLID, "Highest controller identifier."),
            optional("ana_reporting", Kind::Flag, "There is no ANA: each path is as good as another."),
            optional("passthrough", ONLY_FALSE, "Commands are checked."),
            optional("enable_nssr", ONLY_FALSE, "There is no NVM Subsystem Reset."),
            TGT_NAME,
        ]),
    change("nvmf_delete_subsystem", edit::delete_subsystem)
        .about("Remove a subsystem.")
        .takes(&[NQN, TGT_NAME]),
    change("nvmf_subsystem_add_ns", edit::add_ns)
        .about("Show a disk to the hosts of a subsystem. Gives the number of the namespace.")
        .takes(&[NQN, required("namespace", Kind::Object(NAMESPACE), "The namespace."), TGT_NAME]),
    change("nvmf_subsystem_remove_ns", edit::remove_ns)
        .about("Remove a namespace; the disk stays.")
        .takes(&[NQN, required("nsid", NSID, "Its number."), TGT_NAME]),
    change("nvmf_subsystem_add_host", edit::add_host).about("Allow a host to connect.").takes(&[
        NQN,
        required("host", Kind::Nqn, "NQN of the host."),
        TGT_NAME,
    ]),
    change("nvmf_subsystem_remove_host", edit::remove_host)
        .about("No longer allow a host to connect, and end its connections.")
        .takes(&[
            NQN,
            required("host", Kind::Nqn, "NQN of the host."),
            optional("timeout_ms", ANY_NUMBER, "Its connections end at once."),
            TGT_NAME,
        ]),
    change("nvmf_subsystem_allow_any_host", edit::allow_any_host)
        .about("Allow every host to connect, or only those of the list.")
        .takes(&[
            NQN,
            required("allow_any_host", Kind::Flag, "Or only those of the list."),
            optional(
                "hosts",
                Kind::List(&Kind::String),
                "With false: the list from now on. Those in it stay connected.",
            ),
            TGT_NAME,
        ]),
    change("nvmf_subsystem_add_listener", edit::add_listener)
        .about("Offer a subsystem at an address, which is listened on if it was not.")
        .takes(&[
            NQN,
            required("listen_address", Kind::Object(ADDRESS), "Where; port 4420 if none is given."),
            optional("secure_channel", ONLY_FALSE, "There is no TLS."),
            optional("ana_state", Kind::Only("\"optimized\""), "There is no ANA."),
            TGT_NAME,
        ]),
    change("nvmf_subsystem_remove_listener", edit::remove_listener)
        .about("No longer offer it there. An address at which none is offered any more is closed.")
        .takes(&[NQN, required("listen_address", Kind::Object(ADDRESS), "Where."), TGT_NAME]),
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
            required(
                "address",
                Kind::Object(ADDRESS),
                "Where that service listens; port 8009 if none is given.",
            ),
            optional("secure_channel", ONLY_FALSE, "There is no TLS."),
            TGT_NAME,
        ]),
    change("nvmf_discovery_remove_referral", edit::remove_referral)
        .about("No longer tell hosts of it.")
        .takes(&[required("address", Kind::Object(ADDRESS), "Where that service listens."), TGT_NAME]),
    read("nvmf_discovery_get_referrals", reads::referrals)
        .about("Other discovery services.")
        .takes(&[TGT_NAME]),
    change("bdev_malloc_create", |edit, args| create(edit, args, "ram"))
        .about("A disk in memory (kind ram). Gives its name.")
        .takes(&[
            optional("name", Kind::String, "Its name; Malloc0 and so on without one."),
            BLOCKS,
            BLOCK_SIZE,
            NO_UUID,
            NO_METADATA,
            optional("md_interleave", ONLY_FALSE, "The same."),
            NO_PROTECTION,
            NO_DIF_LOCATION,
        ]),
    change("bdev_malloc_delete", |edit, args| delete(edit, args, "ram"))
        .about("Remove it and the namespace of it.")
        .takes(&[NAME]),
    change("bdev_malloc_resize", |edit, args| resize(edit, args, "ram"))
        .about("Cut it, or grow it up to the size that it was made with.")
        .takes(&[NAME, NEW_SIZE]),
    change("bdev_null_create", |edit, args| create(edit, args, "null"))
        .about("A disk that forgets (kind null). Gives its name.")
        .takes(&[NEW_NAME, BLOCKS, BLOCK_SIZE, NO_UUID, NO_METADATA, NO_PROTECTION, NO_DIF_LOCATION]),
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
            optional("block_size", BLOCK_BYTES, "Bytes of a block."),
            optional("readonly", Kind::Flag, "Refuse writes."),
            optional("fallocate", Kind::Flag, "Deallocate is passed on where the file system can."),
            optional("nowait", ONLY_FALSE, "Submission does not wait in either case."),
            NO_UUID,
        ]),
    change("bdev_aio_delete", |edit, args| delete(edit, args, "file"))
        .about("Remove it and the namespace of it.")
        .takes(&[NAME]),
    change("bdev_uring_create", create_file).about("The same.").takes(&[
        NEW_NAME,
        FILENAME,
        optional("block_size", BLOCK_BYTES, "Bytes of a block."),
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
            required("size", ANY_NUMBER, "Bytes of pages, a multiple of 4096; 0 takes the cache away."),
            optional("policy", CACHE_POLICY, "Which page goes; without it as it is, or s3-fifo."),
            optional("mode", CACHE_MODE, "Without it as it is, or shared."),
            optional("read_ahead", ANY_NUMBER, "Bytes, as in the file. Without it as it is, or 256 KiB."),
            optional(
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
            required("name", Kind::String, "Of the controller; its disk is NAMEn1."),
            required("trtype", Kind::Word(&["pcie", "tcp", "rdma"]), "pcie: a drive bound to vfio-pci."),
            required("traddr", Kind::String, "PCI address, or IP address of another target."),
            optional("trsvcid", Kind::String, "Port; 4420 without one."),
            optional("adrfam", ADDRESS_FAMILY, "Family of the address."),
            optional("subnqn", Kind::Nqn, "Subsystem of the other target."),
            optional("hostnqn", Kind::Nqn, "As which host to connect."),
            optional("namespace", FAR_NSID, "Which namespace; 1 without it."),
            optional("hdgst", ONLY_FALSE, "No digests."),
            optional("ddgst", ONLY_FALSE, "No digests."),
            optional("multipath", Kind::Only("\"disable\""), "There is one path."),
            optional("prchk_reftag", ONLY_FALSE, "There is no protection information."),
            optional("prchk_guard", ONLY_FALSE, "The same."),
            optional("allow_unrecognized_csi", ONLY_FALSE, "The NVM command set alone."),
            optional("disable_sq_flow_control", ONLY_FALSE, "As the other target asks."),
        ]),
    change("bdev_nvme_detach_controller", detach)
        .about("Remove its disks and the namespaces of them.")
        .takes(&[required("name", Kind::String, "Of the controller.")]),
    read("bdev_get_bdevs", reads::bdevs)
        .about("Disks. The space that a file uses, `bytes_used`, is that of an earlier question.")
        .takes(&[
            optional("name", Kind::String, "Only this one."),
            optional("timeout", ANY_NUMBER, "It is not waited for."),
        ]),
    read("bdev_get_iostat", reads::iostat)
        .about("Traffic of each disk since the process was started, and what its cache has done.")
        .takes(&[
            optional("name", Kind::String, "Only this one."),
            optional("names", Kind::List(&Kind::String), "Only these."),
            optional("per_channel", Kind::Flag, "Of each core, as channels."),
            optional("by_host", Kind::Flag, "What a cache has done for each host, as hosts of it."),
            optional("reset_mode", Kind::Only("\"none\""), "Counters are never reset."),
        ]),
    change("log_set_level", edit::set_log_level).about("Log less or more.").takes(&[required(
        "level",
        LEVEL,
        "Least urgent.",
    )]),
    read("log_get_level", reads::log_level).about("Least urgent lines that are logged."),
];
