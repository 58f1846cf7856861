//! [`EmulatorSpec`]: properties of the emulated drive.

use nvme_spec::Status;
use nvme_spec::identify::{Dlfeat, Oncs};
use nvme_spec::register::Vs;
use spindle_nvme_pcie::PciId;

/// SGL support of a drive (SGLS).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SglSupport {
    /// No SGLs: an I/O command with PSDT other than 00b is refused.
    None,
    /// SGLs with any alignment.
    Bytes,
    /// SGLs whose addresses and lengths are multiples of 4.
    Dwords,
}

/// Properties of a namespace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NamespaceSpec {
    /// NSZE, NCAP and NUSE, in logical blocks.
    pub blocks: u64,
    /// Bytes of a logical block: a power of two from 512 to 65,536.
    pub block_bytes: u32,
    /// NOIOB, in logical blocks; 0 for none.
    pub noiob: u16,
    /// MS: bytes of metadata of a logical block. The emulator has no metadata: if the value is not 0, Read,
    /// Write and Compare are refused with Invalid Field.
    pub metadata_bytes: u16,
    /// DLFEAT: the value of deallocated blocks, and whether Write Zeroes with DEAC deallocates; the latter is
    /// only reported.
    pub dlfeat: Dlfeat,
    /// MSSRL: maximum blocks of a source range of Copy.
    pub mssrl: u16,
    /// MCL: maximum blocks of a Copy.
    pub mcl: u32,
    /// MSRC, 0's based: maximum source ranges of a Copy, minus one.
    pub msrc_z: u8,
}

impl Default for NamespaceSpec {
    /// Returns a namespace of 64 MiB in blocks of 4,096 bytes, whose deallocated blocks read as zeroes.
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

/// Properties of a drive. The default is an enterprise drive: power loss protection (no volatile write
/// cache), SGLs, all optional I/O commands of the emulator, no Doorbell Buffer Config.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EmulatorSpec {
    /// PCI address: `domain:bus:device.function`.
    pub address: String,
    /// SN, truncated to 20 bytes.
    pub serial: String,
    /// MN, truncated to 40 bytes.
    pub model: String,
    /// FR, truncated to 8 bytes.
    pub firmware: String,
    /// PCI vendor and device identifier.
    pub id: PciId,
    /// Byte 3 of the vendor-specific part of Identify Controller: stripe size of some Intel drives.
    pub vendor_stripe: u8,
    /// Steps after CC.EN was cleared during which CSTS reads as all ones.
    pub csts_ones_steps: u64,
    /// VS. From 2.0 the controller has CRTO.
    pub version: Vs,
    /// Namespaces 1, 2 and so on; all are active.
    pub namespaces: Vec<NamespaceSpec>,
    /// MDTS: a command transfers at most 4 KiB << MDTS; 0 for no limit.
    pub mdts: u8,
    /// CAP.MQES + 1: 2 to 65,536.
    pub queue_entries_max: u32,
    /// CAP.DSTRD: doorbells are 4 << DSTRD bytes apart; at most 15.
    pub dstrd: u8,
    /// I/O queue pairs that the controller grants, at least 1.
    pub queue_pairs: u16,
    /// Bytes of BAR 0, at least 4096. 0: as many as its doorbells need.
    pub bar_bytes: usize,
    /// SGLS: SGLs in I/O commands.
    pub sgl: SglSupport,
    /// ONCS. Only the bits for Compare, Dataset Management, Write Zeroes, Verify, Copy, and Save and Select
    /// are reported.
    pub oncs: Oncs,
    /// VWC: [`power_cut`](crate::Emulator::power_cut) may lose writes that were not flushed.
    pub has_write_cache: bool,
    /// OACS: Doorbell Buffer Config.
    pub has_doorbell_buffer: bool,
    /// CAP.TO and CRTO.CRWMT: longest time until CSTS.RDY changes, in units of 500 ms. Only reported.
    pub timeout: u8,
    /// ACL, 0's based: maximum Abort commands in flight, minus one.
    pub acl_z: u8,
    /// AERL, 0's based: maximum Asynchronous Event Requests in flight, minus one.
    pub aerl_z: u8,
    /// WZSL: a Write Zeroes covers at most 4 KiB << WZSL; 0 for no limit.
    pub wzsl: u8,
    /// VSL: a Verify covers at most 4 KiB << VSL; 0 for no limit.
    pub vsl: u8,
    /// CDFS: a bit for each descriptor format of Copy. The emulator supports only format 0h.
    pub cdfs: u16,
    /// Steps from a change of CC.EN to the change of CSTS.RDY; see also `shutdown_steps`.
    pub ready_steps: u64,
    /// RTD3E: longest shutdown time, in microseconds. Only reported.
    pub rtd3e_us: u32,
    /// Steps from the shutdown notification to its completion; 0 for `ready_steps`.
    pub shutdown_steps: u64,
    /// Whether the volatile write cache is lost by a function level reset, a link-up, and a controller reset
    /// after CSTS.CFS. Base 2.0 section 3.7.2 allows that.
    pub loses_cache_at_reset: bool,
    /// Status of every Write Zeroes with DEAC, regardless of DLFEAT; `None` to execute the command. Without
    /// Write Zeroes in `oncs` the status is Invalid Opcode.
    pub deac_refusal: Option<Status>,
    /// Status of every Write Zeroes, if `oncs` has that command; `None` to execute the command. For a command
    /// with DEAC, `deac_refusal` has precedence.
    pub zeroes_refusal: Option<Status>,
    /// Maximum commands of one queue in a step, at least 1.
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
            csts_ones_steps: 0,
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

/// Panics if a logical block cannot have this size.
pub(crate) fn assert_block_bytes(bytes: u32) {
    assert!(bytes.is_power_of_two() && (512..=65_536).contains(&bytes), "blocks of {bytes} bytes");
}

impl EmulatorSpec {
    /// Panics if a field is out of its range.
    pub(crate) fn assert_sane(&self) {
        self.namespaces.iter().for_each(|namespace| assert_block_bytes(namespace.block_bytes));
        let entries = self.queue_entries_max;
        assert!((2..=65_536).contains(&entries), "queues of {entries} entries");
        assert!(self.queue_pairs >= 1, "no I/O queues");
        assert!(self.dstrd <= 15, "DSTRD has 4 bits");
        assert!(self.bar_bytes == 0 || self.bar_bytes >= 4096, "BAR 0 of {} bytes", self.bar_bytes);
        assert!(self.commands_a_step >= 1, "a step that does nothing");
    }

    /// Returns ONCS as reported: the bits of `oncs` that the emulator supports.
    pub(crate) fn oncs_reported(&self) -> Oncs {
        Oncs::new()
            .with_compare(self.oncs.compare())
            .with_dataset_management(self.oncs.dataset_management())
            .with_write_zeroes(self.oncs.write_zeroes())
            .with_save_select(self.oncs.save_select())
            .with_verify(self.oncs.verify())
            .with_copy(self.oncs.copy())
    }

    /// Returns the bytes of a limit in the format of MDTS (4 KiB << `shift`). `None`: no limit, or one that
    /// exceeds 64 bits.
    pub(crate) fn limit_bytes(shift: u8) -> Option<u64> {
        if shift == 0 { None } else { 4096_u64.checked_shl(u32::from(shift)).filter(|bytes| *bytes != 0) }
    }
}
