//! Identify commands and the NSID of a device file, through the kernel (`NVME_IOCTL_ADMIN_CMD`,
//! `NVME_IOCTL_ID`). The calls block until the drive answers: for the control path.
//!
//! UNSAFETY: ioctls with structures of the kernel, one of which contains an address.
#![expect(unsafe_code, reason = "ioctls that libraries do not have")]

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use super::pass::PassError;

/// `NVME_IOCTL_ID` and `NVME_IOCTL_ADMIN_CMD` of `linux/nvme_ioctl.h`: `_IO('N', 0x40)`, `_IOWR('N', 0x41, 72
/// bytes)`.
const NAMESPACE_ID: libc::Ioctl = 0x4e40;
const ADMIN_COMMAND: libc::Ioctl = 0xc048_4e41;

/// `struct nvme_admin_cmd`.
#[repr(C)]
#[derive(Debug, Default)]
struct AdminCommand {
    opcode: u8,
    flags: u8,
    rsvd1: u16,
    nsid: u32,
    cdw2: u32,
    cdw3: u32,
    metadata: u64,
    addr: u64,
    metadata_len: u32,
    data_len: u32,
    dwords: [u32; 6],
    timeout_ms: u32,
    result: u32,
}

const _: () = assert!(size_of::<AdminCommand>() == 72);
const _: () = assert!(std::mem::offset_of!(AdminCommand, addr) == 24);
const _: () = assert!(std::mem::offset_of!(AdminCommand, data_len) == 36);
const _: () = assert!(std::mem::offset_of!(AdminCommand, dwords) == 40);

/// Opcode of Identify, and values of CNS (Base 2.0 section 5.17).
const IDENTIFY: u8 = 0x06;
const CNS_NAMESPACE: u32 = 0x00;
const CNS_CONTROLLER: u32 = 0x01;
/// Bytes of an Identify data structure.
pub const IDENTIFY_BYTES: usize = 4096;

/// A namespace of a drive, with its Identify Namespace data structure.
#[derive(Clone)]
pub struct Namespace {
    id: u32,
    block_bytes: u32,
    identify: Box<[u8; IDENTIFY_BYTES]>,
}

impl Namespace {
    /// Sends Identify Namespace to the drive of `device`, and parses the answer.
    ///
    /// # Errors
    /// [`PassError`] of the command, or of [`namespace_id`]; `InvalidData` where the format has metadata, or
    /// blocks of less than 512 bytes or more than 64 KiB, which a [`PassRing`](super::PassRing) cannot
    /// transfer.
    pub fn of(device: impl AsFd) -> Result<Namespace, PassError> {
        let device = device.as_fd();
        let id = namespace_id(device)?;
        let mut identify = Box::new([0; IDENTIFY_BYTES]);
        send_identify(device, id, CNS_NAMESPACE, &mut identify)?;
        Namespace::parse(id, identify)
            .map_err(|what| PassError::System(io::Error::new(io::ErrorKind::InvalidData, what)))
    }

    /// Parses FLBAS at byte 26, and MS and LBADS of the LBA formats from byte 128 on (NVM Command Set 1.0
    /// figure "Identify Namespace Data Structure"). Fails with a reason when the format has metadata or an
    /// unsupported block size.
    pub(super) fn parse(id: u32, identify: Box<[u8; IDENTIFY_BYTES]>) -> Result<Namespace, String> {
        let flbas = identify[26];
        // Index of the format: bits 3:0 of FLBAS are the lower ones, bits 6:5 the upper ones.
        let index = usize::from(flbas & 0xf) | usize::from(flbas & 0x60) >> 1;
        let at = 128 + 4 * index;
        let metadata = u16::from_le_bytes([identify[at], identify[at + 1]]);
        if metadata != 0 {
            return Err(format!("its blocks have {metadata} bytes of metadata; allowed are formats without"));
        }
        let shift = identify[at + 2];
        if !(9..=16).contains(&shift) {
            return Err(format!("its block size is 2^{shift} bytes; allowed are 2^9 to 2^16"));
        }
        Ok(Namespace { id, block_bytes: 1 << shift, identify })
    }

    /// Returns the namespace identifier (NSID).
    #[must_use]
    pub fn id(&self) -> u32 {
        self.id
    }

    /// Returns the bytes of a block, without metadata.
    #[must_use]
    pub fn block_bytes(&self) -> u32 {
        self.block_bytes
    }

    /// Returns the Identify Namespace data structure.
    #[must_use]
    pub fn identify(&self) -> &[u8; IDENTIFY_BYTES] {
        &self.identify
    }
}

impl std::fmt::Debug for Namespace {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Namespace({}, blocks of {} bytes)", self.id, self.block_bytes)
    }
}

/// Reads the Identify Controller data structure of the controller of `device`. Fails with the status of the
/// drive, or the error of ioctl(2).
pub fn identify_controller(device: impl AsFd) -> Result<Box<[u8; IDENTIFY_BYTES]>, PassError> {
    let mut identify = Box::new([0; IDENTIFY_BYTES]);
    send_identify(device.as_fd(), 0, CNS_CONTROLLER, &mut identify)?;
    Ok(identify)
}

/// Returns the NSID of the namespace of the device file `device`.
///
/// # Errors
/// The error of ioctl(2): `ENOTTY` where `device` is not an NVMe namespace.
pub fn namespace_id(device: impl AsFd) -> io::Result<u32> {
    // SAFETY: the request has no argument.
    let result = unsafe { libc::ioctl(device.as_fd().as_raw_fd(), NAMESPACE_ID) };
    u32::try_from(result).map_err(|_| io::Error::last_os_error())
}

/// Sends Identify to the admin queue of the controller of `device`, and waits until the answer is in `data`.
fn send_identify(
    device: BorrowedFd<'_>,
    nsid: u32,
    cns: u32,
    data: &mut [u8; IDENTIFY_BYTES],
) -> Result<(), PassError> {
    let mut admin = AdminCommand {
        opcode: IDENTIFY,
        nsid,
        addr: data.as_mut_ptr() as usize as u64,
        data_len: 4096,
        dwords: [cns, 0, 0, 0, 0, 0],
        ..AdminCommand::default()
    };
    // SAFETY: the kernel reads and writes a structure of the size in the request code, that of `admin`, which
    // lives until the call returns. The answer to Identify has 4096 bytes, as has `data` at `addr`, which is
    // borrowed until then.
    let result = unsafe { libc::ioctl(device.as_raw_fd(), ADMIN_COMMAND, &raw mut admin) };
    match result {
        0 => Ok(()),
        1.. => Err(PassError::Status(u16::try_from(result).unwrap_or(u16::MAX))),
        ..0 => Err(PassError::System(io::Error::last_os_error())),
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    #[test]
    fn what_is_no_nvme_device_says_so() {
        let file = File::open("/dev/null").expect("opens");
        let error = namespace_id(&file).expect_err("no namespace");
        assert_eq!(error.raw_os_error(), Some(libc::ENOTTY));
        assert!(Namespace::of(&file).is_err());
        let result = identify_controller(&file);
        let Err(PassError::System(error)) = result else { panic!("{result:?}") };
        assert_eq!(error.raw_os_error(), Some(libc::ENOTTY));
    }

    /// Identify Namespace with this FLBAS, whose format `index` has this MS and LBADS.
    fn identify(flbas: u8, index: usize, ms: u16, lbads: u8) -> Box<[u8; IDENTIFY_BYTES]> {
        let mut bytes = Box::new([0; IDENTIFY_BYTES]);
        bytes[26] = flbas;
        bytes[128 + 4 * index..][..2].copy_from_slice(&ms.to_le_bytes());
        bytes[128 + 4 * index + 2] = lbads;
        bytes
    }

    #[test]
    fn the_block_size_is_that_of_the_format_in_use() {
        for (flbas, index, lbads, block_bytes) in
            [(0, 0, 9, 512), (0x11, 1, 12, 4096), (0x63, 0x33, 12, 4096)]
        {
            let namespace = Namespace::parse(7, identify(flbas, index, 0, lbads)).expect("a format");
            assert_eq!((namespace.id(), namespace.block_bytes()), (7, block_bytes));
        }
    }

    #[test]
    fn a_format_that_a_ring_cannot_move_is_refused() {
        for (ms, lbads, part) in
            [(8, 9, "8 bytes of metadata"), (0, 8, "2^8"), (0, 17, "2^17"), (0, 255, "2^255")]
        {
            let error = Namespace::parse(1, identify(0, 0, ms, lbads)).expect_err(part);
            assert!(error.contains(part) && error.contains("allowed"), "{error}");
        }
    }
}
