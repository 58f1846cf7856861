//! [`Scenario`]: which far target, which faults and how much of what a seed draws.

use nvme_spec::identify::Oncs;
use spindle_reactor::clock::Nanos;

use crate::sim::Rng;

/// Twice the keep-alive time-out.
pub const KEEP_ALIVE_TWICE: Nanos = Nanos::from_secs(10);
/// What a Spindle may have at a disk, at most.
pub const SLOWEST: Nanos = Nanos::from_secs(40);
/// A command fails after so long.
pub const COMMAND_TIMEOUT: Nanos = Nanos::from_secs(25);

/// Who the far target is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// It says when former associations are over.
    Spindle,
    /// It says nothing; some time after a loss it has ended what it had.
    Other,
}

/// How often something happens: in 10 000 turns.
#[derive(Debug, Clone, Copy, Default)]
pub struct Rates {
    /// A queue is lost.
    pub losses: u64,
    /// All queues of an association are lost.
    pub breaks: u64,
    /// A queue moves nothing for some time.
    pub stalls: u64,
    /// The far target restarts.
    pub restarts: u64,
    /// The network between is cut.
    pub cuts: u64,
    /// Another disk is put under the NSID.
    pub moves: u64,
    /// A core is not polled for some time.
    pub hangs: u64,
    /// A host goes.
    pub forgets: u64,
    /// A core closes the disk and opens it again.
    pub reopens: u64,
}

/// What a seed draws.
#[derive(Debug, Clone)]
pub struct Scenario {
    /// Cores, each with a queue.
    pub cores: usize,
    /// Blocks of the disk.
    pub blocks: u64,
    /// Bytes of a block.
    pub block_bytes: u32,
    /// Most commands of a queue.
    pub depth: u16,
    /// Most commands of a core's hosts at once.
    pub in_flight: usize,
    /// MDTS.
    pub transfer_blocks: u32,
    /// Pieces of a buffer that a command can name.
    pub pieces_max: usize,
    /// Who the far target is.
    pub kind: Kind,
    /// After so long a lost association is over.
    pub fence_timeout: Nanos,
    /// What the namespace says that it can do.
    pub abilities: Oncs,
    /// Write Zeroes is refused all the same.
    pub lacks_zeroes: bool,
    /// What happens beside the commands.
    pub rates: Rates,
    /// Of 1000 commands: answered with an error.
    pub errors: u64,
    /// Of 1000 commands: at the far disk for seconds.
    pub slow: u64,
    /// Of 1000 fences: never answered.
    pub may_land: u64,
    /// The far target has a cache, and queues read it by RDMA READ.
    pub is_optimistic: bool,
    /// There is a cache in front of the disk.
    pub is_cached: bool,
}

impl Scenario {
    /// What `seed` draws.
    #[must_use]
    pub fn draw(seed: u64) -> Scenario {
        let mut rng = Rng::new(seed);
        let rng = &mut rng;
        let kind = if rng.permille(600) { Kind::Spindle } else { Kind::Other };
        let quiesce = Nanos::from_ms(rng.pick(&[1000, 5000, 15_000]));
        let fence_timeout = match kind {
            Kind::Spindle => KEEP_ALIVE_TWICE + SLOWEST + quiesce,
            Kind::Other => KEEP_ALIVE_TWICE + quiesce,
        };
        let mut rate = |on: u64, most: u64| if rng.permille(on) { rng.between(1, most) } else { 0 };
        let rates = Rates {
            losses: rate(700, 60),
            breaks: rate(600, 40),
            stalls: rate(500, 60),
            restarts: rate(400, 15),
            cuts: rate(400, 15),
            moves: rate(500, 60),
            hangs: rate(300, 20),
            forgets: rate(600, 80),
            reopens: rate(400, 30),
        };
        Scenario {
            cores: rng.pick(&[1, 1, 2, 2, 2, 3]),
            blocks: rng.between(16, 64),
            block_bytes: rng.pick(&[512, 512, 512, 4096]),
            depth: rng.pick(&[1, 2, 4, 8, 16, 16]),
            in_flight: rng.pick(&[2, 6, 12, 24, 24]),
            transfer_blocks: rng.pick(&[1, 4, 8, 32]),
            pieces_max: rng.pick(&[1, 16, 16]),
            kind,
            fence_timeout,
            abilities: Oncs::new()
                .with_write_zeroes(rng.permille(700))
                .with_dataset_management(rng.permille(700))
                .with_compare(rng.permille(800))
                .with_verify(rng.permille(800)),
            lacks_zeroes: rng.permille(150),
            rates,
            errors: rng.pick(&[0, 0, 5, 20]),
            slow: rng.pick(&[0, 2, 10, 40]),
            may_land: rng.pick(&[0, 0, 100, 300]),
            is_optimistic: false,
            is_cached: false,
        }
    }

    /// What `seed` draws, with a cache in front of the disk. Blocks of a page are written and read together
    /// or apart.
    #[must_use]
    pub fn draw_cached(seed: u64) -> Scenario {
        Scenario { is_cached: true, ..Scenario::draw(seed) }
    }

    /// What `seed` draws, with optimistic reads: a command can be a page.
    #[must_use]
    pub fn draw_optimistic(seed: u64) -> Scenario {
        let scenario = Scenario::draw(seed);
        Scenario {
            is_optimistic: true,
            transfer_blocks: scenario.transfer_blocks.max(8),
            pieces_max: 16,
            ..scenario
        }
    }
}
