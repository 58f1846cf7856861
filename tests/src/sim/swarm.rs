//! [`Swarm`]: what a seed draws. Each seed has some of everything and none of much ("swarm testing"), so that
//! what is common in one run is absent in another.

use super::medium::Plant;
use super::rdma::Fabric;
use super::rng::Rng;

/// What a seed draws.
#[derive(Debug, Clone)]
pub struct Swarm {
    /// The seed.
    pub seed: u64,
    /// Cores of the target.
    pub cores: usize,
    /// Hosts, each with a controller.
    pub hosts: usize,
    /// I/O queues of each host.
    pub io_queues: usize,
    /// Entries of a queue.
    pub queue_entries: u16,
    /// Namespaces.
    pub namespaces: usize,
    /// Bytes of a block.
    pub block_bytes: u32,
    /// Blocks of a namespace.
    pub blocks: usize,
    /// Most blocks of a command.
    pub blocks_max: usize,
    /// Commands that go where others go, in a thousand.
    pub hot_permille: u64,
    /// Buffers of a zone of a core's pool.
    pub buffers: u32,
    /// Frames beyond the RAM disk's size, in bytes; `None`: the disk uses the pool's buffers.
    pub slack_bytes: Option<u64>,
    /// Bytes of the cache in front of such a disk; `None`: it has none.
    pub cache_bytes: Option<u64>,
    /// Of such a disk: what was not flushed may be lost with the power.
    pub is_volatile: bool,
    /// And its commands that take their time, in a thousand.
    pub slow_permille: u64,
    /// And those of them that take very much, in a thousand.
    pub stuck_permille: u64,
    /// What is wrong with it.
    pub plant: Option<Plant>,
    /// In-capsule data of I/O queues.
    pub in_capsule_bytes: u32,
    /// MAXH2CDATA.
    pub max_h2c_data: u32,
    /// Header and data digests.
    pub digests: (bool, bool),
    /// SQ flow control is off.
    pub sq_flow_off: bool,
    /// Most bytes that move at a time.
    pub chunk: usize,
    /// Bytes that a wire holds.
    pub wire_bytes: usize,
    /// Faults a million commands: error, delay, drop, reorder.
    pub faults: [u32; 4],
    /// A host vanishes, in a million turns.
    pub cuts_ppm: u64,
    /// A queue disconnects, or its controller is reset, in a thousand commands.
    pub leaves_permille: u64,
    /// Keep-alive time-out of the hosts, in ms; 0: none.
    pub kato_ms: u32,
    /// What happens besides, in turns.
    pub happenings: Vec<Happening>,
    /// Turns after which a command that was not answered is lost.
    pub patience: u64,
    /// Most bytes of a command.
    pub transfer_bytes: u32,
    /// NVMe/RDMA only.
    pub fabric: Fabric,
}

/// What happens to a target besides commands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Happening {
    /// A namespace is removed and comes back.
    Reload,
    /// A disk shrinks and grows.
    Resize,
    /// It shuts down in order and starts again.
    Drain,
    /// The power is cut.
    PowerCut,
    /// A host says nothing until its keep-alive time is over.
    Silence,
    /// A cache comes, gets another size, or goes.
    Recache,
    /// A host neither sends nor takes anything for a while, within its time-outs.
    Stall,
}

const HAPPENINGS: [Happening; 5] =
    [Happening::Reload, Happening::Resize, Happening::Drain, Happening::PowerCut, Happening::Silence];

impl Swarm {
    /// Everything from the seed.
    #[must_use]
    pub fn draw(seed: u64) -> Swarm {
        let mut rng = Rng::new(seed);
        let rng = &mut rng;
        let has_faults = rng.permille(500);
        let mut fault = |max| if has_faults { u32::try_from(rng.below(max)).unwrap_or(0) } else { 0 };
        let faults = [fault(60_000), fault(200_000), fault(20_000), fault(300_000)];
        let mut happenings: Vec<_> = HAPPENINGS.into_iter().filter(|_| rng.permille(350)).collect();
        let has_silence = happenings.contains(&Happening::Silence);
        // Not drawn either: in half of the seeds.
        happenings.extend((Rng::new(!seed).below(8) < 4).then_some(Happening::Recache));
        // Not drawn: in half of the seeds.
        happenings.extend((Rng::new(!seed ^ 0x57a1).below(2) == 0).then_some(Happening::Stall));
        // Few pages, and as many as a disk has at most. Not drawn, so that what follows stays what it was.
        let cache_bytes = [None, Some(64 << 10), Some(96 << 10), Some(1 << 20)];
        Swarm {
            cache_bytes: cache_bytes[usize::try_from(Rng::new(!seed).below(4)).unwrap_or(0)],
            seed,
            cores: rng.size(1, 2),
            hosts: rng.size(1, 3),
            io_queues: rng.size(1, 3),
            queue_entries: rng.pick(&[4, 8, 16, 32]),
            namespaces: rng.pick(&[1, 1, 2, 3]),
            block_bytes: rng.pick(&[512, 4096]),
            blocks: rng.size(40, 200),
            blocks_max: rng.pick(&[1, 4, 12]),
            hot_permille: rng.pick(&[0, 300, 900]),
            buffers: u32::try_from(rng.between(2, 12)).unwrap_or(2),
            slack_bytes: rng.pick(&[None, None, Some(0), Some(256 << 10)]),
            is_volatile: rng.permille(700),
            slow_permille: rng.pick(&[0, 300, 1000]),
            stuck_permille: rng.pick(&[0, 0, 10]),
            plant: None,
            in_capsule_bytes: rng.pick(&[0, 512, 4096, 8192]),
            max_h2c_data: rng.pick(&[4096, 8192, 1 << 20]),
            digests: (rng.permille(300), rng.permille(300)),
            sq_flow_off: rng.permille(500),
            chunk: rng.pick(&[40, 300, 5000, 60_000]),
            wire_bytes: rng.pick(&[600, 9000, 200_000]),
            faults,
            cuts_ppm: rng.pick(&[0, 0, 100, 300]),
            leaves_permille: rng.pick(&[0, 0, 1, 4]),
            kato_ms: if has_silence { rng.pick(&[1000, 2000]) } else { 0 },
            happenings,
            patience: 3_000_000,
            transfer_bytes: 1 << 17,
            fabric: Fabric::default(),
        }
    }
}
