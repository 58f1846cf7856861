//! Interim: a fixed plan until the configuration lands.
use super::*;
use nvme_spec::nqn::Nqn;
use spindle_disk::DiskSource;
use spindle_target::counters::NamespaceCounters;
use spindle_target::snapshot::*;

pub fn run() -> Result<(), ServeError> {
    tracing_subscriber::fmt().with_writer(std::io::stderr).init();
    let cpus: Vec<Option<usize>> = std::env::var("CORES").unwrap_or("0".into()).split(',').map(|c| c.parse().ok()).collect();
    let mib: u64 = std::env::var("MIB").ok().and_then(|m| m.parse().ok()).unwrap_or(256);
    let ram = spindle_disk::ram::RamDisk::new("ram0", spindle_disk::ram::RamSpec { bytes: mib << 20, block_bytes: 4096, pages: Pages::Transparent }).unwrap();
    let geometry = ram.geometry();
    let mut namespaces = vec![None; 1];
    namespaces[0] = Some(Arc::new(Namespace { nsid: 1, disk: DiskId(0), source: Arc::clone(&ram), geometry, uuid: [1; 16], nguid: [2; 16], counters: Arc::new(NamespaceCounters::new(cpus.len())) }));
    let snapshot = Snapshot {
        generation: 1,
        disks: vec![Some(ram as Arc<dyn DiskSource>)],
        listeners: vec![spindle_target::snapshot::Listener { port_id: 1, transport: TransportKind::Tcp, address: "127.0.0.1:4420".parse().unwrap(), in_capsule_bytes: 4096 }],
        subsystems: vec![Arc::new(Subsystem { nqn: Nqn::new("nqn.2026-01.io.spindle:default").unwrap(), serial: "SPINDLE0001".into(), model: "Spindle".into(), hosts: AllowedHosts::Any, cntlid_range: (1, 0xffef), io_queues_max: 64, listeners: vec![0], namespaces })],
        referrals: vec![],
        limits: ControllerLimits { queue_entries: 256, transfer_bytes: 1 << 20, keep_alive_ms_max: 3_600_000, discovery_keep_alive_ms: 120_000 },
    };
    let plan = ServePlan {
        cpus,
        idle: if std::env::var("SPIN").is_ok() { Idle::Spin } else { Idle::Adaptive { spin_us: 1000 } },
        zones: (vec![ZoneSpec { buffer_bytes: 4096, count: 512 }, ZoneSpec { buffer_bytes: 65536, count: 128 }, ZoneSpec { buffer_bytes: 1 << 20, count: 16 }], vec![ZoneSpec { buffer_bytes: 8192, count: 64 }]),
        pages: Pages::Transparent,
        connections: 2048,
        disk_depth: 256,
        shell: ShellConfig::default(),
        conn: ConnConfig { queue_entries: 256, ..ConnConfig::default() },
        drain_deadline: Duration::from_secs(5),
    };
    serve(plan, Arc::new(snapshot), None)
}
