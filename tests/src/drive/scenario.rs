//! [`Scenario`]: which drive, which faults and how much of what a seed draws.

use std::time::Duration;

use nvme_spec::identify::{Dlfeat, Oncs};
use spindle_nvme_pcie::Settings;
use spindle_tests_emulator::{EmulatorSpec, Faults, NamespaceSpec, SglSupport};

use crate::sim::Rng;

/// Bytes of the namespace.
const NAMESPACE_BYTES: u64 = 6 << 20;

/// What a seed draws.
#[derive(Debug, Clone)]
pub struct Scenario {
    /// The drive.
    pub spec: EmulatorSpec,
    /// What its commands meet.
    pub faults: Faults,
    /// Cores, each with a queue.
    pub cores: usize,
    /// Commands in flight of a core.
    pub depth: u32,
    /// In 1000 turns: the drive is pulled, with its power cut, and plugged again.
    pub pulls: u64,
    /// In 1000 turns: removal, fatal status, frozen registers and failing resets, another drive, a core that
    /// closes, health events: each.
    pub events: u64,
    /// The namespace changes its size.
    pub has_resizes: bool,
    /// Nothing goes wrong: every command succeeds.
    pub is_quiet: bool,
}

fn faults(rng: &mut Rng, seed: u64) -> Faults {
    let strong = rng.permille(300);
    let mut rate = |n: u32| {
        let is_on = rng.permille(500);
        if is_on { if strong { 20 * n } else { n } } else { 0 }
    };
    Faults {
        seed,
        vanish: rate(1),
        fatal: rate(2),
        freeze: rate(2),
        swallow: rate(10),
        drop: rate(10),
        delay: rate(500),
        delay_steps_max: 50,
        reorder: rate(1000),
        double: rate(60),
        wrong_cid: rate(20),
        wrong_sqid: rate(20),
        wrong_status: rate(60),
        wrong_sq_head: rate(100),
        error: rate(200),
        errors: Vec::new(),
        admin_swallow: rate(40),
        admin_error: rate(40),
    }
}

impl Scenario {
    /// The drive takes a deallocation as a hint, and leaves all as it was.
    #[must_use]
    pub fn is_deallocation_a_hint(&self) -> bool {
        let is_hint = |it: &NamespaceSpec| it.dlfeat.read_behavior() != Dlfeat::READS_ZEROES;
        self.spec.namespaces.first().is_some_and(is_hint)
    }

    /// What `seed` draws.
    #[must_use]
    pub fn draw(seed: u64) -> Scenario {
        let mut rng = Rng::new(seed);
        let rng = &mut rng;
        let block_bytes = rng.pick(&[512, 4096]);
        let is_quiet = rng.permille(150);
        let dlfeat = match rng.below(4) {
            0 => Dlfeat::new(),
            1 => Dlfeat::new().with_read_behavior(Dlfeat::READS_ZEROES),
            _ => Dlfeat::new().with_read_behavior(Dlfeat::READS_ZEROES).with_deallocate_in_write_zeroes(true),
        };
        let namespace = NamespaceSpec {
            blocks: NAMESPACE_BYTES / u64::from(block_bytes),
            block_bytes,
            noiob: rng.pick(&[0, 0, 8, 7, 32, 256]),
            metadata_bytes: 0,
            dlfeat,
            mssrl: rng.pick(&[1, 3, 128, u16::MAX]),
            mcl: u32::try_from(rng.pick(&[1_u64, 10, 128, 65_536])).unwrap_or(1),
            msrc_z: rng.pick(&[0, 1, 15, 255]),
        };
        let spec = EmulatorSpec {
            namespaces: vec![namespace],
            mdts: rng.pick(&[0, 1, 3, 5, 8]),
            queue_entries_max: rng.pick(&[2, 3, 8, 33, 64, 1024, 65_536]),
            dstrd: rng.pick(&[0, 0, 1, 4]),
            // Fewer than cores, too.
            queue_pairs: rng.pick(&[1, 2, 64]),
            sgl: rng.pick(&[SglSupport::None, SglSupport::Bytes, SglSupport::Dwords]),
            oncs: Oncs::new()
                .with_write_zeroes(rng.permille(600))
                .with_dataset_management(rng.permille(700))
                .with_compare(rng.permille(700))
                .with_verify(rng.permille(700))
                .with_copy(rng.permille(700)),
            has_write_cache: rng.permille(600),
            has_doorbell_buffer: rng.permille(400),
            timeout: 2,
            acl_z: rng.pick(&[0, 3, 255]),
            wzsl: rng.pick(&[0, 0, 2, 6]),
            vsl: rng.pick(&[0, 0, 1, 5]),
            ready_steps: rng.between(1, 20),
            commands_a_step: u32::try_from(rng.pick(&[1_u64, 4, 32])).unwrap_or(1),
            ..EmulatorSpec::default()
        };
        let faults = if is_quiet { Faults::default() } else { faults(rng, seed) };
        let mut often = |n: u64| if is_quiet || rng.permille(500) { 0 } else { rng.between(1, n) };
        let (pulls, events) = (often(3), often(4));
        Scenario {
            spec,
            faults,
            cores: rng.size(1, 4),
            depth: u32::try_from(rng.pick(&[1_u64, 4, 32, 64])).unwrap_or(1),
            pulls,
            events,
            has_resizes: !is_quiet && rng.permille(250),
            is_quiet,
        }
    }

    /// Short times, so that they pass within a run.
    #[must_use]
    pub fn settings() -> Settings {
        Settings {
            command_timeout: Duration::from_millis(2000),
            abort_timeout: Duration::from_millis(500),
            admin_timeout: Duration::from_millis(3000),
            health_interval: Duration::from_secs(10),
            return_timeout: Duration::from_millis(3000),
            ..Settings::default()
        }
    }
}
