//! Memory that devices may touch: [`MemoryRegion`], and [`Sge`], which names a piece of it.
//!
//! UNSAFETY: a region keeps its memory mapped until the device has let go of it.
#![expect(unsafe_code, reason = "calls libibverbs")]

use std::ops::BitOr;
use std::sync::Arc;

use rdma_sys as sys;
use spindle_reactor::mem::Area;

use crate::device::Device;
use crate::error::VerbsError;

/// What a device may do with memory. It may always read it for our own work requests. Combine with `|`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Access(u32);

impl Access {
    /// Source of our own SENDs and WRITEs.
    pub const LOCAL_READ: Access = Access(0);
    /// Target of our own RECVs. Of our own READs: [`crate::DeviceLimits::read_access`].
    pub const LOCAL_WRITE: Access = Access(sys::ibv_access_flags::IBV_ACCESS_LOCAL_WRITE.0);
    /// Source of the other side's READs.
    pub const REMOTE_READ: Access = Access(sys::ibv_access_flags::IBV_ACCESS_REMOTE_READ.0);
    /// Target of the other side's WRITEs. Needs [`Access::LOCAL_WRITE`] too.
    pub const REMOTE_WRITE: Access = Access(sys::ibv_access_flags::IBV_ACCESS_REMOTE_WRITE.0);
}

/// PCIe may let writes of one message pass each other. An optional flag: a library, kernel or device that
/// does not know it ignores or refuses it.
const RELAXED: u32 = sys::ibv_access_flags::IBV_ACCESS_RELAXED_ORDERING.0;

/// Register with relaxed ordering, and where that fails without. Also, whether that was what helped.
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

/// A piece of registered memory: a segment of a work request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct Sge {
    /// First byte.
    pub address: u64,
    /// Bytes.
    pub bytes: u32,
    /// Local key of the region that it is in.
    pub key: u32,
}

// Lists of segments are given to the library as they are.
const _: () = assert!(
    size_of::<Sge>() == size_of::<sys::ibv_sge>()
        && align_of::<Sge>() == align_of::<sys::ibv_sge>()
        && std::mem::offset_of!(Sge, address) == std::mem::offset_of!(sys::ibv_sge, addr)
        && std::mem::offset_of!(Sge, bytes) == std::mem::offset_of!(sys::ibv_sge, length)
        && std::mem::offset_of!(Sge, key) == std::mem::offset_of!(sys::ibv_sge, lkey)
);

/// Memory that is registered with a device; deregistered on drop.
///
/// Registering gives the device leave, it moves nothing. What may be done with the memory while a work
/// request or a peer refers to it is the crate's page.
#[derive(Debug)]
pub struct MemoryRegion {
    raw: *mut sys::ibv_mr,
    local_key: u32,
    remote_key: u32,
    base: usize,
    bytes: usize,
    /// The memory; let go after the registration.
    area: Area,
    /// The domain; let go last.
    _device: Arc<Device>,
}

// SAFETY: libibverbs is thread-safe; the fields are not written after construction.
unsafe impl Send for MemoryRegion {}
// SAFETY: as above.
unsafe impl Sync for MemoryRegion {}

impl Device {
    /// Register all of an area.
    pub fn register(self: &Arc<Self>, area: Area, access: Access) -> Result<MemoryRegion, VerbsError> {
        let bytes = area.bytes();
        self.register_part(area, 0, bytes, access)
    }

    /// Register `bytes` of an area from `offset`. Where the device takes it, with relaxed ordering: of what
    /// it writes there nothing is looked at before a completion, which orders it (see the crate's page).
    ///
    /// # Errors
    /// The part is not within the area, or the area is read-only and the access is not, or the device has no
    /// room for another region, or the process may not lock so much memory.
    pub fn register_part(
        self: &Arc<Self>,
        area: Area,
        offset: usize,
        bytes: usize,
        access: Access,
    ) -> Result<MemoryRegion, VerbsError> {
        const VERB: &str = "ibv_reg_mr";
        if offset.checked_add(bytes).is_none_or(|end| end > area.bytes()) || bytes == 0 {
            return Err(VerbsError::new(VERB, libc::EINVAL));
        }
        if !area.is_writable() && (access.0 & (Access::LOCAL_WRITE | Access::REMOTE_WRITE).0) != 0 {
            return Err(VerbsError::new(VERB, libc::EACCES));
        }
        let base = area.base().as_ptr().wrapping_add(offset);
        let register = |flags: u32| {
            // The form that knows optional flags: it takes them away for kernels that do not.
            // SAFETY: our domain; the memory is mapped for as long as the area is kept, and the region keeps
            // it.
            let raw = unsafe {
                sys::ibv_reg_mr_iova2(self.domain(), base.cast(), bytes, base.addr() as u64, flags)
            };
            VerbsError::made(VERB, raw)
        };
        let (made, is_refused) = relaxed_first(access.0, self.is_relaxed(), register);
        if is_refused {
            self.set_strict();
        }
        let raw = made?;
        // SAFETY: the verb has just made it.
        let (local_key, remote_key) = unsafe { ((*raw).lkey, (*raw).rkey) };
        Ok(MemoryRegion {
            raw,
            local_key,
            remote_key,
            base: base as usize,
            bytes,
            area,
            _device: Arc::clone(self),
        })
    }
}

impl MemoryRegion {
    /// For our own work requests.
    #[must_use]
    pub fn local_key(&self) -> u32 {
        self.local_key
    }

    /// For the other side.
    #[must_use]
    pub fn remote_key(&self) -> u32 {
        self.remote_key
    }

    /// Address of the first byte.
    #[must_use]
    pub fn base(&self) -> usize {
        self.base
    }

    /// How many bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// `bytes` from this address, if all of them are within the region.
    #[must_use]
    pub fn sge(&self, address: usize, bytes: u32) -> Option<Sge> {
        let offset = address.checked_sub(self.base)?;
        let end = offset.checked_add(bytes as usize)?;
        (end <= self.bytes).then_some(Sge { address: address as u64, bytes, key: self.local_key })
    }
}

impl Drop for MemoryRegion {
    fn drop(&mut self) {
        // SAFETY: ours.
        if unsafe { sys::ibv_dereg_mr(self.raw) } != 0 {
            // The device may still touch it: then it stays mapped for ever.
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

    /// A device with these flags that refuses, with what was asked of it.
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
        // That is remembered, and not asked for again.
        assert_eq!(ask(|flags| flags & RELAXED != 0, false), (Ok(1), false, vec![1]));
        let (made, is_refused, asked) = ask(|_| true, true);
        assert!(made.is_err() && !is_refused, "another reason: it says nothing of the flag");
        assert_eq!(asked, [1 | RELAXED, 1]);
    }
}
