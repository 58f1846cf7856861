//! Registration of memory with devices: [`MemoryRegion`], its [`Access`] flags, and [`Sge`], a segment of a
//! region.
//!
//! UNSAFETY: a region keeps its memory mapped until it is deregistered.
#![expect(unsafe_code, reason = "calls libibverbs")]

use std::ops::{BitOr, Range};
use std::sync::Arc;

use rdma_sys as sys;
use spindle_reactor::mem::Area;

use crate::device::Device;
use crate::domain::Domain;
use crate::error::VerbsError;

/// Access flags of a registration, combined with `|`. Local reads, for this side's own work requests, are
/// always allowed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Access(u32);

impl Access {
    /// Source of this side's SENDs and WRITEs.
    pub const LOCAL_READ: Access = Access(0);
    /// Destination of RECVs. For the destination of READs see [`crate::DeviceLimits::read_access`].
    pub const LOCAL_WRITE: Access = Access(sys::ibv_access_flags::IBV_ACCESS_LOCAL_WRITE.0);
    /// Source of the peer's READs.
    pub const REMOTE_READ: Access = Access(sys::ibv_access_flags::IBV_ACCESS_REMOTE_READ.0);
    /// Destination of the peer's WRITEs. Requires [`Access::LOCAL_WRITE`] too.
    pub const REMOTE_WRITE: Access = Access(sys::ibv_access_flags::IBV_ACCESS_REMOTE_WRITE.0);
}

/// Allows writes of one message to pass each other on PCIe. An optional flag: a library, kernel or device
/// without support ignores or refuses it.
const RELAXED: u32 = sys::ibv_access_flags::IBV_ACCESS_RELAXED_ORDERING.0;

/// Calls `register` with relaxed ordering if `is_relaxed`; if that fails or `is_relaxed` is false, without.
/// The returned bool is true if the registration failed with relaxed ordering and succeeded without.
fn relaxed_first<T>(
    flags: u32,
    is_relaxed: bool,
    mut register: impl FnMut(u32) -> Result<T, VerbsError>,
) -> (Result<T, VerbsError>, bool) {
    if is_relaxed && let Ok(made) = register(flags | RELAXED) {
        return (Ok(made), false);
    }
    let made = register(flags);
    let is_refused = is_relaxed && made.is_ok();
    (made, is_refused)
}

impl BitOr for Access {
    type Output = Access;

    fn bitor(self, other: Access) -> Access {
        Access(self.0 | other.0)
    }
}

/// A scatter/gather entry: a segment of registered memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct Sge {
    /// Virtual address of the first byte.
    pub address: u64,
    /// Length in bytes.
    pub bytes: u32,
    /// Local key of the region that contains the segment.
    pub key: u32,
}

// Slices of `Sge` are passed to libibverbs as arrays of `ibv_sge`.
const _: () = assert!(
    size_of::<Sge>() == size_of::<sys::ibv_sge>()
        && align_of::<Sge>() == align_of::<sys::ibv_sge>()
        && std::mem::offset_of!(Sge, address) == std::mem::offset_of!(sys::ibv_sge, addr)
        && std::mem::offset_of!(Sge, bytes) == std::mem::offset_of!(sys::ibv_sge, length)
        && std::mem::offset_of!(Sge, key) == std::mem::offset_of!(sys::ibv_sge, lkey)
);

/// A registration of memory with a device. Dropping the region deregisters the memory.
///
/// While a work request or a peer refers to the memory, the caller's duty (see the crate) applies.
#[derive(Debug)]
pub struct MemoryRegion {
    raw: *mut sys::ibv_mr,
    local_key: u32,
    remote_key: u32,
    base: usize,
    bytes: usize,
    /// The memory; unmapped after the deregistration at the earliest.
    area: Area,
    /// Protection domain, if it is not the device's.
    _domain: Option<Arc<Domain>>,
    /// Owner of the device's protection domain; released last.
    _device: Arc<Device>,
}

// SAFETY: libibverbs is thread-safe, and no field is written after construction.
unsafe impl Send for MemoryRegion {}
// SAFETY: as for `Send`: shared references only read constant fields.
unsafe impl Sync for MemoryRegion {}

/// Permission to register memory of any size. Registration pins each page, which takes seconds for a large
/// area. A reactor core has no permit, so it cannot register such memory.
#[derive(Debug)]
pub struct RegisterPermit(());

impl RegisterPermit {
    /// Returns a permit for a thread that may block.
    #[must_use]
    pub fn of_blocking_thread() -> RegisterPermit {
        RegisterPermit(())
    }
}

impl Device {
    /// Registers all of `area`, as [`Device::register_part`]; with the same errors. Blocks: see
    /// [`RegisterPermit`].
    pub fn register(
        self: &Arc<Self>,
        _: &RegisterPermit,
        area: Area,
        access: Access,
    ) -> Result<MemoryRegion, VerbsError> {
        let bytes = area.bytes();
        self.register_part(area, 0, bytes, access)
    }

    /// Registers `bytes` of `area` from `offset`, with relaxed ordering if the device supports it: data must
    /// not be accessed before its completion (see the crate's documentation). For the memory of one queue or
    /// connection, which is small enough for a reactor core to pin.
    ///
    /// # Errors
    /// EINVAL: the part is empty or not within the area. EACCES: the area is read-only and `access` allows
    /// writes. Otherwise the error of `ibv_reg_mr`, such as ENOMEM: the device has no free region, or the
    /// limit of locked memory is exceeded.
    pub fn register_part(
        self: &Arc<Self>,
        area: Area,
        offset: usize,
        bytes: usize,
        access: Access,
    ) -> Result<MemoryRegion, VerbsError> {
        // An overflow gives an empty range, which is refused.
        let range = offset..offset.checked_add(bytes).unwrap_or(0);
        MemoryRegion::new(self, None, area, range, access)
    }
}

impl MemoryRegion {
    /// Registers the bytes `range` of `area` in `domain`, by default the device's.
    pub(crate) fn new(
        device: &Arc<Device>,
        domain: Option<&Arc<Domain>>,
        area: Area,
        range: Range<usize>,
        access: Access,
    ) -> Result<MemoryRegion, VerbsError> {
        const VERB: &str = "ibv_reg_mr";
        let bytes = range.len();
        if range.end > area.bytes() || bytes == 0 {
            return Err(VerbsError::new(VERB, libc::EINVAL));
        }
        if !area.is_writable() && (access.0 & (Access::LOCAL_WRITE | Access::REMOTE_WRITE).0) != 0 {
            return Err(VerbsError::new(VERB, libc::EACCES));
        }
        let base = area.base().as_ptr().wrapping_add(range.start);
        let raw_domain = domain.map_or(device.domain(), |domain| domain.raw());
        let register = |flags: u32| {
            // `ibv_reg_mr_iova2` supports optional flags: on kernels without support it removes these flags.
            // SAFETY: the domain is open as long as `device` and `domain`; the memory is mapped as long as
            // `area`; the region owns all of them.
            let raw =
                unsafe { sys::ibv_reg_mr_iova2(raw_domain, base.cast(), bytes, base.addr() as u64, flags) };
            VerbsError::check_pointer(VERB, raw)
        };
        let (made, is_refused) = relaxed_first(access.0, device.is_relaxed(), register);
        if is_refused {
            device.set_strict();
        }
        let raw = made?;
        // SAFETY: `raw` is not null; the region that the verb has created is valid until `ibv_dereg_mr`.
        let (local_key, remote_key) = unsafe { ((*raw).lkey, (*raw).rkey) };
        Ok(MemoryRegion {
            raw,
            local_key,
            remote_key,
            base: base as usize,
            bytes,
            area,
            _domain: domain.map(Arc::clone),
            _device: Arc::clone(device),
        })
    }

    /// Returns the memory that contains the region.
    #[must_use]
    pub fn area(&self) -> &Area {
        &self.area
    }

    /// Returns the key for this side's work requests.
    #[must_use]
    pub fn local_key(&self) -> u32 {
        self.local_key
    }

    /// Returns the key for the peer's READs and WRITEs.
    #[must_use]
    pub fn remote_key(&self) -> u32 {
        self.remote_key
    }

    /// Returns the virtual address of the first byte.
    #[must_use]
    pub fn base(&self) -> usize {
        self.base
    }

    /// Returns the length of the region in bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Returns the segment of `bytes` at `address`; `None` if it is not within the region.
    #[must_use]
    pub fn sge(&self, address: usize, bytes: u32) -> Option<Sge> {
        let offset = address.checked_sub(self.base)?;
        let end = offset.checked_add(bytes as usize)?;
        (end <= self.bytes).then_some(Sge { address: address as u64, bytes, key: self.local_key })
    }
}

impl Drop for MemoryRegion {
    fn drop(&mut self) {
        // SAFETY: this struct owns the region, and it is deregistered only here.
        if unsafe { sys::ibv_dereg_mr(self.raw) } != 0 {
            // The device may still access the memory. The leaked reference keeps it mapped.
            std::mem::forget(self.area.clone());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn access_combines() {
        let both = Access::LOCAL_WRITE | Access::REMOTE_READ;
        assert_eq!(both.0, 1 | 4);
    }

    /// Calls `relaxed_first` with a device that refuses some flags; also returns the flags of each attempt.
    fn ask(refuses: impl Fn(u32) -> bool, is_relaxed: bool) -> (Result<u32, VerbsError>, bool, Vec<u32>) {
        let mut asked = Vec::new();
        let (made, is_refused) = relaxed_first(1, is_relaxed, |flags| {
            asked.push(flags);
            if refuses(flags) { Err(VerbsError::new("ibv_reg_mr", libc::EINVAL)) } else { Ok(flags) }
        });
        (made, is_refused, asked)
    }

    #[test]
    fn memory_is_registered_with_relaxed_ordering_and_without_where_that_fails() {
        assert_eq!(ask(|_| false, true), (Ok(1 | RELAXED), false, vec![1 | RELAXED]));
        assert_eq!(ask(|flags| flags & RELAXED != 0, true), (Ok(1), true, vec![1 | RELAXED, 1]));
        // A device known to refuse relaxed ordering is not tried with it again.
        assert_eq!(ask(|flags| flags & RELAXED != 0, false), (Ok(1), false, vec![1]));
        let (made, is_refused, asked) = ask(|_| true, true);
        assert!(made.is_err() && !is_refused, "another reason: it says nothing of the flag");
        assert_eq!(asked, [1 | RELAXED, 1]);
    }
}
