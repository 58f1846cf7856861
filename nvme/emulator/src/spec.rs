//! [`EmulatorSpec`]: which drive the emulator is.

use nvme_spec::Status;
use nvme_spec::identify::{Dlfeat, Oncs};
use nvme_spec::register::Vs;
use spindle_nvme_pcie::PciId;

/// Which SGLs a drive takes besides PRPs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SglSupport {
    /// None: a command with PSDT other than 0 is refused.
    None,
    /// Any alignment.
    Bytes,
    /// Addresses and lengths that are multiples of 4.
    Dwords,
}

/// A namespace of the drive.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NamespaceSpec {
    /// NSZE and NCAP, in logical blocks.
    pub blocks: u64,
    /// Bytes of a logical block: a power of two from 512 to 65,536.
    pub block_bytes: u32,
    /// NOIOB, in logical blocks; 0 for none.
    pub noiob: u16,
    /// MS: bytes of metadata of a logical block. The emulator reports it and moves no metadata: Read, Write
    /// and their kin are refused with Invalid Field where it is not 0.
    pub metadata_bytes: u16,
    /// DLFEAT: what deallocated blocks read as, and whether Write Zeroes with DEAC deallocates.
    pub dlfeat: Dlfeat,
    /// MSSRL: most blocks of a source range of Copy.
    pub mssrl: u16,
    /// MCL: most blocks of a Copy.
    pub mcl: u32,
    /// MSRC with its zero base: source ranges of a Copy, less one.
    pub msrc_z: u8,
}

impl Default for NamespaceSpec {
    /// 64 MiB in blocks of 4,096 bytes; deallocated blocks read as zeroes.
    fn default() -> NamespaceSpec {
        NamespaceSpec {
            blocks: 16_384,
            block_bytes: 4096,
            noiob: 0,
            metadata_bytes: 0,
            dlfeat: Dlfeat::new()
                .with_read_behavior(Dlfeat::READS_ZEROES)
                .with_deallocate_in_write_zeroes(true),
            mssrl: 128,
            mcl: 1024,
            msrc_z: 15,
        }
    }
}

/// A drive. The default is a good enterprise drive: power loss protection (no volatile write cache), SGLs,
/// all optional commands that the emulator has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EmulatorSpec {
    /// Its place, as PCI writes it.
    pub address: String,
    /// SN; what is beyond 20 bytes is cut.
    pub serial: String,
    /// MN; what is beyond 40 bytes is cut.
    pub model: String,
    /// FR; what is beyond 8 bytes is cut.
    pub firmware: String,
    /// Who made it, and what it is.
    pub id: PciId,
    /// The fourth byte of the vendor's own part of Identify Controller.
    pub vendor_stripe: u8,
    /// After CC.EN was set to 0, registers read as ones for so many steps.
    pub deaf_steps: u64,
    /// VS. From 2.0 on CRTO is there too.
    pub version: Vs,
    /// Namespaces 1, 2 and so on; all are active.
    pub namespaces: Vec<NamespaceSpec>,
    /// MDTS: most data of a command, as 4 KiB << MDTS; 0 for no limit.
    pub mdts: u8,
    /// CAP.MQES with its zero base taken away: 2 to 65,536.
    pub queue_entries_max: u32,
    /// CAP.DSTRD: doorbells are 4 << DSTRD bytes apart; at most 15.
    pub dstrd: u8,
    /// How many pairs of I/O queues it grants, at least 1.
    pub queue_pairs: u16,
    /// Bytes of BAR 0, at least 4096; 0 for as many as its doorbells need.
    pub bar_bytes: usize,
    /// SGLS.
    pub sgl: SglSupport,
    /// ONCS: Compare, Dataset Management, Write Zeroes, Verify, Copy, and Save and Select are there if their
    /// bits are set; the emulator has no command for the other bits and does not report them.
    pub oncs: Oncs,
    /// VWC: what was written is lost at [`power_cut`](crate::Emulator::power_cut) until it was flushed.
    pub has_write_cache: bool,
    /// OACS: Doorbell Buffer Config.
    pub has_doorbell_buffer: bool,
    /// CAP.TO: longest time of CSTS.RDY, in 500 ms.
    pub timeout: u8,
    /// ACL with its zero base: Abort commands at once, less one.
    pub acl_z: u8,
    /// AERL with its zero base: Asynchronous Event Requests at once, less one.
    pub aerl_z: u8,
    /// WZSL: most of one Write Zeroes, as MDTS; 0 for no limit.
    pub wzsl: u8,
    /// VSL: most of one Verify, as MDTS; 0 for no limit.
    pub vsl: u8,
    /// CDFS: a bit for each descriptor format of Copy. The emulator has format 0h only.
    pub cdfs: u16,
    /// How many steps CSTS.RDY takes to follow CC.EN, and CSTS.SHST to follow CC.SHN.
    pub ready_steps: u64,
    /// RTD3E: how long it may take to save what it has, in microseconds.
    pub rtd3e_us: u32,
    /// Steps from the shutdown notification to its end; 0: as `ready_steps`.
    pub shutdown_steps: u64,
    /// A function level reset, and a controller reset after CSTS.CFS, begin its firmware anew: what was in
    /// the volatile write cache is lost. Base 2.0 section 3.7.2 keeps no drive from that.
    pub loses_cache_at_reset: bool,
    /// Write Zeroes with DEAC is refused so, whatever DLFEAT and ONCS say.
    pub deac_refusal: Option<Status>,
    /// The same of every Write Zeroes.
    pub zeroes_refusal: Option<Status>,
    /// How many commands of one queue a step takes at most, at least 1.
    pub commands_a_step: u32,
}

impl Default for EmulatorSpec {
    fn default() -> EmulatorSpec {
        EmulatorSpec {
            address: "0000:e0:00.0".to_owned(),
            serial: "EMULATED0001".to_owned(),
            model: "Spindle emulated drive".to_owned(),
            firmware: "1.0".to_owned(),
            id: PciId { vendor: 0x1b36, device: 0x0010 },
            vendor_stripe: 0,
            deaf_steps: 0,
            version: Vs::V1_4,
            namespaces: vec![NamespaceSpec::default()],
            mdts: 8,
            queue_entries_max: 1024,
            dstrd: 0,
            queue_pairs: 64,
            bar_bytes: 0,
            sgl: SglSupport::Bytes,
            oncs: Oncs::new()
                .with_compare(true)
                .with_dataset_management(true)
                .with_write_zeroes(true)
                .with_save_select(true)
                .with_verify(true)
                .with_copy(true),
            has_write_cache: false,
            has_doorbell_buffer: false,
            timeout: 20,
            acl_z: 3,
            aerl_z: 3,
            wzsl: 0,
            vsl: 0,
            cdfs: 1,
            ready_steps: 2,
            rtd3e_us: 0,
            shutdown_steps: 0,
            loses_cache_at_reset: false,
            deac_refusal: None,
            zeroes_refusal: None,
            commands_a_step: 32,
        }
    }
}

impl EmulatorSpec {
    /// Panics where no drive could be so: a bug of the test.
    pub(crate) fn assert_sane(&self) {
        for namespace in &self.namespaces {
            let bytes = namespace.block_bytes;
            assert!(bytes.is_power_of_two() && (512..=65_536).contains(&bytes), "blocks of {bytes} bytes");
        }
        let entries = self.queue_entries_max;
        assert!((2..=65_536).contains(&entries), "queues of {entries} entries");
        assert!(self.queue_pairs >= 1, "no I/O queues");
        assert!(self.dstrd <= 15, "DSTRD has 4 bits");
        assert!(self.bar_bytes == 0 || self.bar_bytes >= 4096, "BAR 0 of {} bytes", self.bar_bytes);
        assert!(self.commands_a_step >= 1, "a step that does nothing");
    }

    /// ONCS as it is reported: what there are commands for.
    pub(crate) fn oncs_reported(&self) -> Oncs {
        Oncs::new()
            .with_compare(self.oncs.compare())
            .with_dataset_management(self.oncs.dataset_management())
            .with_write_zeroes(self.oncs.write_zeroes())
            .with_save_select(self.oncs.save_select())
            .with_verify(self.oncs.verify())
            .with_copy(self.oncs.copy())
    }

    /// A size as MDTS says it, in bytes; `None` for no limit.
    pub(crate) fn limit_bytes(shift: u8) -> Option<u64> {
        if shift == 0 { None } else { 4096_u64.checked_shl(u32::from(shift)).filter(|bytes| *bytes != 0) }
    }
}
