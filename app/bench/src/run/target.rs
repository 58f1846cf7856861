//! Connects to the target (resolve, discover, controllers, I/O queues, namespace) and checks the options.

use std::net::SocketAddr;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use initiator::nvme_spec::Nqn;
use initiator::nvme_spec::log::{SubsystemType, TransportType};
use initiator::{
    Controller, Host, IoQueue, NVME_RDMA_PORT, NVME_TCP_PORT, Namespace, OptimisticOptions, Options,
    RegistrationLimits, Target, TransportKind,
};
use spindle_nvme_initiator as initiator;

use super::{BenchError, LoadSpec, WARM_UP};
use crate::args::BenchTargetArgs;
use crate::size::Bytes;
use crate::verify;

/// Depth of an idle queue, within the controller's limit, and least requested depth: the default of Linux.
const IDLE_DEPTH: u16 = 127;
/// Most data in flight: the limit of a zone of the buffer pool.
const FLIGHT_MAX: Bytes = Bytes::new(1 << 30);

/// Controllers, queues and namespace of the target.
#[derive(Debug)]
pub(super) struct Connected {
    pub(super) target: Target,
    /// One controller; several if a controller grants fewer queues than requested.
    pub(super) controllers: Vec<Controller>,
    /// Busy queues, then idle queues.
    pub(super) queues: Vec<IoQueue>,
    pub(super) namespace: Namespace,
    /// Time from resolving the address until all queues are connected.
    pub(super) connected_in: std::time::Duration,
}

/// A controller without I/O queues.
pub(super) struct Opened {
    pub(super) target: Target,
    pub(super) options: Options,
    pub(super) controller: Controller,
    pub(super) namespace: Namespace,
}

/// Finds the target and connects a controller, for I/O queues of these depths.
pub(super) fn open(args: &BenchTargetArgs, depths: &[u16]) -> Result<Opened, BenchError> {
    let host = host(args.hostnqn.as_deref())?;
    let deepest = depths.iter().copied().max().unwrap_or(1);
    let options = Options {
        depth: deepest.saturating_add(u16::from(args.optimistic)).max(IDLE_DEPTH),
        io_queues: u16::try_from(depths.len()).unwrap_or(u16::MAX),
        keep_alive_ms: args.keep_alive_tmo.saturating_mul(1000),
        header_digest: args.header_digest,
        data_digest: args.data_digest,
        in_capsule_bytes_max: in_capsule(args),
        registration: RegistrationLimits {
            bytes: args.registration_bytes.as_len(),
            ..RegistrationLimits::default()
        },
        ..Options::default()
    };
    let target = find_target(args, &host, &options)?;
    let mut controller = Controller::connect(&target, &options)?;
    let namespace = namespace(args, &mut controller)?;
    Ok(Opened { target, options, controller, namespace })
}

/// Connects controllers and queues. Fails if `--qd` exceeds the depth of the target's queues.
pub(super) fn connect(args: &BenchTargetArgs) -> Result<Connected, BenchError> {
    let began = Instant::now();
    let depths = depths(args)?;
    let Opened { target, options, controller, namespace } = open(args, &depths)?;
    let mut controllers = vec![controller];
    let mut queues: Vec<IoQueue> = Vec::new();
    let mut qid = 0;
    for depth in depths {
        if qid == controllers[controllers.len() - 1].queues_granted() {
            let missing = u16::try_from(args.queues + args.idle_queues - queues.len()).unwrap_or(u16::MAX);
            let options = Options { io_queues: missing, ..options.clone() };
            controllers.push(Controller::connect(&target, &options)?);
            qid = 0;
        }
        qid += 1;
        let last = controllers.len() - 1;
        let controller = &mut controllers[last];
        // An attached queue of three and more commands keeps one for itself.
        let own = u16::from(args.optimistic);
        let least = if args.optimistic { 3.min(controller.depth_max()) } else { 1 };
        check_depth(args, depth, controller.depth_max().saturating_sub(own))?;
        let queue_depth =
            if depth == 0 { IDLE_DEPTH.min(controller.depth_max()) } else { (depth + own).max(least) };
        let mut queue = controller.connect_queue_of(qid, queue_depth)?;
        if args.optimistic && depth > 0 {
            let (directory_pages, is_eager) = (args.optimistic_pages, args.optimistic_eager);
            let options = OptimisticOptions { directory_pages, is_eager };
            controller.attach(&mut queue, &namespace, &options)?;
        }
        queues.push(queue);
    }
    Ok(Connected { target, controllers, queues, namespace, connected_in: began.elapsed() })
}

/// Fails unless a queue of `allowed` commands holds `depth`.
pub(super) fn check_depth(args: &BenchTargetArgs, depth: u16, allowed: u16) -> Result<(), BenchError> {
    if depth <= allowed {
        return Ok(());
    }
    let rule = format!(
        "a queue of this target holds {allowed} commands, which makes {} for --queues {}",
        usize::from(allowed) * args.queues,
        args.queues
    );
    Err(BenchError::Size { option: "--qd", value: args.load.qd.to_string(), rule })
}

/// Returns the largest write in bytes that is sent as in-capsule data, within the target's limit.
fn in_capsule(args: &BenchTargetArgs) -> u32 {
    args.in_capsule.map_or(u32::MAX, |bytes| u32::try_from(bytes.get()).unwrap_or(u32::MAX))
}

fn host(nqn: Option<&str>) -> Result<Host, BenchError> {
    match nqn {
        Some(nqn) => Ok(Host::from_nqn(name("--hostnqn", nqn)?)),
        None => Ok(Host::of_this_machine()),
    }
}

fn name(option: &'static str, value: &str) -> Result<Nqn, BenchError> {
    Nqn::new(value).map_err(|source| BenchError::Name { option, value: value.to_owned(), source })
}

/// Finds the target. With `--nqn`: that subsystem, at the first address that accepts a TCP connection. A
/// single address, and the first address for RDMA, is not checked. Without `--nqn`: the first NVM subsystem
/// in the discovery log of the first address that accepts a TCP connection (RDMA: of the first address), at
/// the address in the log.
fn find_target(args: &BenchTargetArgs, host: &Host, options: &Options) -> Result<Target, BenchError> {
    let text = args.address.as_deref().unwrap_or_default();
    let (transport, text) = initiator::split_transport(text);
    let port = match transport {
        TransportKind::Tcp => NVME_TCP_PORT,
        TransportKind::Rdma => NVME_RDMA_PORT,
    };
    let addresses = initiator::resolve(text, port)?;
    let nqn = args.nqn.as_deref().map(|nqn| name("--nqn", nqn)).transpose()?;
    let is_one = addresses.len() == 1;
    let mut last = BenchError::NothingOffered { address: addresses[0], transport };
    for address in addresses {
        let found = match nqn {
            Some(nqn) if is_one || transport == TransportKind::Rdma => Ok((address, nqn)),
            Some(nqn) => check_reachable(address, options).map(|()| (address, nqn)),
            None => first_offered(transport, address, host, options),
        };
        match found {
            Ok((address, nqn)) => return Ok(Target { transport, address, nqn, host: host.clone() }),
            Err(error @ BenchError::Target(initiator::Error::Connect { .. })) => last = error,
            Err(error) => return Err(error),
        }
    }
    Err(last)
}

/// Checks that a TCP connection can be made. Used only if the host name has several addresses.
fn check_reachable(address: SocketAddr, options: &Options) -> Result<(), BenchError> {
    let connected = std::net::TcpStream::connect_timeout(&address, options.connect_timeout);
    connected.map(drop).map_err(|source| initiator::Error::Connect { address, source }.into())
}

fn first_offered(
    transport: TransportKind,
    address: SocketAddr,
    host: &Host,
    options: &Options,
) -> Result<(SocketAddr, Nqn), BenchError> {
    let log = initiator::discover(transport, address, host, options)?;
    let trtype = match transport {
        TransportKind::Tcp => TransportType::TCP,
        TransportKind::Rdma => TransportType::RDMA,
    };
    let usable =
        log.entries.iter().filter(|entry| entry.subtype == SubsystemType::NVM && entry.trtype == trtype);
    let mut offered = usable.filter_map(|entry| {
        let ip = entry.traddr().parse().ok()?;
        let port = entry.trsvcid().parse().ok()?;
        Some((SocketAddr::new(ip, port), entry.subnqn().ok()?))
    });
    offered.next().ok_or(BenchError::NothingOffered { address, transport })
}

fn namespace(args: &BenchTargetArgs, controller: &mut Controller) -> Result<Namespace, BenchError> {
    let active = controller.namespaces()?;
    let nsid = match args.nsid {
        None => *active.first().ok_or(BenchError::NoNamespace(String::new()))?,
        Some(nsid) if active.contains(&nsid) => nsid,
        Some(nsid) => return Err(BenchError::NoNamespace(format!(" {nsid} (but {active:?})"))),
    };
    Ok(controller.namespace(nsid)?)
}

/// Returns the commands in flight by queue; 0 for idle queues. Fails for values that are not allowed.
pub(super) fn depths(args: &BenchTargetArgs) -> Result<Vec<u16>, BenchError> {
    let (depth, queues) = (args.load.qd, args.queues);
    let wrong =
        |option, value: usize, rule: String| Err(BenchError::Size { option, value: value.to_string(), rule });
    if depth < queues {
        return wrong("--qd", depth, format!("each of the {queues} queues needs one"));
    }
    if queues > usize::from(u16::MAX) {
        return wrong("--queues", queues, "at most 65535 are allowed".to_owned());
    }
    if queues.saturating_add(args.idle_queues) > usize::from(u16::MAX) {
        return wrong(
            "--idle-queues",
            args.idle_queues,
            format!("with --queues {queues} at most 65535 are allowed"),
        );
    }
    if depth / queues > usize::from(u16::MAX - 1) {
        return wrong("--qd", depth, "a queue holds at most 65534 commands".to_owned());
    }
    let of = |index: usize| depth / queues + usize::from(index < depth % queues);
    let busy = (0..queues).map(|index| u16::try_from(of(index)).unwrap_or(u16::MAX));
    Ok(busy.chain(std::iter::repeat_n(0, args.idle_queues)).collect())
}

/// Checks the options against the namespace and the target's limits; `allowed`: most bytes of a command.
pub(super) fn spec(
    args: &BenchTargetArgs,
    namespace: &Namespace,
    allowed: u32,
) -> Result<LoadSpec, BenchError> {
    let load = &args.load;
    let wrong =
        |option, value: Bytes, rule: String| BenchError::Size { option, value: value.to_string(), rule };
    let block_bytes = Bytes::new(namespace.block_bytes().into());
    let Some(unit_blocks) = namespace.blocks_of(load.bs.as_len()) else {
        return Err(wrong(
            "--bs",
            load.bs,
            format!("a command is 1 to 65536 whole blocks, which are {block_bytes} here"),
        ));
    };
    let unit_bytes = u32::try_from(load.bs.get()).ok().filter(|bytes| *bytes <= allowed);
    let unit_bytes = unit_bytes.ok_or_else(|| {
        wrong(
            "--bs",
            load.bs,
            format!("this target moves at most {} in a command", Bytes::new(allowed.into())),
        )
    })?;
    if load.bs.get().next_multiple_of(4096).saturating_mul(load.qd as u64) > FLIGHT_MAX.get() {
        return Err(wrong(
            "--qd",
            Bytes::from_len(load.qd),
            format!("--bs times --qd is at most {FLIGHT_MAX}"),
        ));
    }
    let whole = Bytes::new(namespace.bytes());
    let span = args.span.unwrap_or(whole);
    if span > whole || span < load.bs {
        return Err(wrong(
            "--span",
            span,
            format!("the namespace has {whole}, and a command takes {}", load.bs),
        ));
    }
    let units = span.get() / load.bs.get();
    if args.verify && units.saturating_mul(unit_blocks.into()) > verify::BLOCKS_MAX {
        let most = Bytes::new(verify::BLOCKS_MAX * block_bytes.get());
        return Err(wrong("--span", span, format!("--verify keeps a table of at most {most}")));
    }
    if args.verify && units < load.qd as u64 {
        return Err(wrong(
            "--span",
            span,
            format!("--verify needs room for at least --qd commands, {}", load.qd),
        ));
    }
    Ok(LoadSpec {
        access: load.rw,
        reads_percent: load.rw.reads_percent(load.mix),
        unit_bytes,
        unit_blocks,
        block_bytes: namespace.block_bytes(),
        units,
        depths: depths(args)?,
        warm_up: WARM_UP,
        measured: load.seconds,
        verify: args.verify,
        seed: seed(),
    })
}

/// Returns a seed from time and process ID, different in each run.
fn seed() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let nanos = u64::try_from(since.as_nanos() & u128::from(u64::MAX)).unwrap_or(0);
    nanos.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ u64::from(std::process::id())
}
