//! Limits that Identify reports and other files enforce, with their reasons.

use spindle_reactor::clock::Nanos;

/// Most outstanding Asynchronous Event Requests; AERL is one less. Linux sends 1, SPDK 4.
pub const ASYNC_EVENTS_MAX: u8 = 4;

/// Most outstanding Abort commands; ACL is one less. The minimum that Base 2.0 recommends.
pub const ABORTS_MAX: u8 = 4;

/// Entries of the error log, 4 KiB together; ELPE is one less.
pub const ERROR_ENTRIES: usize = 64;

/// KAS in units of 100 ms: keep-alive time-outs are rounded up to whole seconds.
pub const KEEP_ALIVE_UNITS: u16 = 10;

/// [`KEEP_ALIVE_UNITS`] in milliseconds.
pub const KEEP_ALIVE_STEP_MS: u32 = KEEP_ALIVE_UNITS as u32 * 100;

/// Longest time for which a controller may be connected without being enabled: after Connect, a reset or a
/// shutdown. The same value as SPDK's association time-out.
pub const ASSOCIATION_TIMEOUT: Nanos = Nanos::from_secs(120);

/// CAP.TO and CRTO.CRWMT in units of 500 ms: 45 s. An enable completes at once. A reset waits for the host's
/// commands at the disks, at most [`ORPHAN_MAX`](crate::orphaned_commands::ORPHAN_MAX) (40 s); 5 s are
/// margin.
pub const READY_TIMEOUT_UNITS: u8 = 90;

/// Bytes of the smallest memory page (CAP.MPSMIN 0), the unit of MDTS, VSL and WZSL.
pub const PAGE_BYTES: u32 = 4096;

/// Preferred granularity of writes and deallocation in bytes: a page of memory, file systems, most drives.
pub const PREFERRED_BYTES: u32 = 4096;

/// Most source ranges of a Copy, 4 KiB of descriptors of 32 bytes; MSRC is one less.
pub const COPY_RANGES_MAX: u16 = 128;

/// Most bytes of one Write Zeroes (WZSL): 65,536 blocks of 512 bytes. Without WZSL Linux uses MDTS as the
/// limit and zeroes in small pieces. With a larger value the block count would exceed the 16 bits of NLB.
pub const WRITE_ZEROES_BYTES_MAX: u32 = 32 << 20;

/// Composite temperature in kelvin of disks without a sensor: a fixed value that monitors on hosts accept.
pub const TEMPERATURE_KELVIN: u16 = 300;

/// WCTEMP in kelvin, also the default threshold: 70 degrees Celsius.
pub const TEMPERATURE_WARNING_KELVIN: u16 = 343;

/// CCTEMP in kelvin: 80 degrees Celsius.
pub const TEMPERATURE_CRITICAL_KELVIN: u16 = 353;

/// Firmware revision (FR): the version of this crate.
pub const FIRMWARE: &str = env!("CARGO_PKG_VERSION");

/// Most blocks of one source range of a Copy (MSSRL): `transfer_bytes` in blocks, limited to 1 to 65535.
#[must_use]
pub fn copy_range_blocks_max(transfer_bytes: u32, block_bytes: u32) -> u16 {
    let blocks = transfer_bytes.checked_div(block_bytes).unwrap_or(0).max(1);
    u16::try_from(blocks).unwrap_or(u16::MAX)
}

/// Most blocks of a whole Copy (MCL): all ranges at their longest.
#[must_use]
pub fn copy_blocks_max(transfer_bytes: u32, block_bytes: u32) -> u32 {
    u32::from(copy_range_blocks_max(transfer_bytes, block_bytes)) * u32::from(COPY_RANGES_MAX)
}

/// log2 of `bytes` in units of [`PAGE_BYTES`], rounded down: the encoding of MDTS, VSL and WZSL. Less than
/// two pages gives 0, which means no limit.
#[must_use]
pub fn page_exponent(bytes: u32) -> u8 {
    let pages = bytes / PAGE_BYTES;
    pages.checked_ilog2().and_then(|exponent| u8::try_from(exponent).ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_range_passes_through_one_buffer() {
        assert_eq!(copy_range_blocks_max(1 << 20, 512), 2048);
        assert_eq!(copy_range_blocks_max(1 << 20, 4096), 256);
        assert_eq!(copy_range_blocks_max(u32::MAX, 512), u16::MAX);
        assert_eq!(copy_range_blocks_max(0, 512), 1);
        assert_eq!(copy_range_blocks_max(4096, 0), 1);
        assert_eq!(copy_blocks_max(1 << 20, 512), 2048 * 128);
    }

    #[test]
    fn sizes_become_powers_of_two_of_a_page() {
        assert_eq!(page_exponent(1 << 20), 8);
        assert_eq!(page_exponent(WRITE_ZEROES_BYTES_MAX), 13);
        assert_eq!(page_exponent(0), 0);
        assert_eq!(page_exponent((1 << 20) - 1), 7);
    }
}
