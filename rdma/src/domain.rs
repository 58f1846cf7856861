//! [`Domain`]: a protection domain beside that of the device.
//!
//! UNSAFETY: a domain is freed after its memory regions and queue pairs, which hold references to it.
#![expect(unsafe_code, reason = "calls libibverbs")]

use std::sync::Arc;

use rdma_sys as sys;
use spindle_reactor::mem::Area;

use crate::device::Device;
use crate::error::VerbsError;
use crate::memory::{Access, MemoryRegion};

/// A protection domain of its own: a remote key of its memory is valid only on its queue pairs. All other
/// objects of a device belong to the device's own domain.
#[derive(Debug)]
pub struct Domain {
    raw: *mut sys::ibv_pd,
    device: Arc<Device>,
}

// SAFETY: libibverbs is thread-safe, and no field is written after construction.
unsafe impl Send for Domain {}
// SAFETY: as for `Send`: shared references only read constant fields.
unsafe impl Sync for Domain {}

impl Domain {
    /// Allocates a domain on `device`.
    ///
    /// # Errors
    /// The device has no free domain.
    pub fn new(device: &Arc<Device>) -> Result<Domain, VerbsError> {
        // SAFETY: `device` keeps its context open, and the domain keeps `device`.
        let raw = unsafe { sys::ibv_alloc_pd(device.context()) };
        Ok(Domain { raw: VerbsError::check_pointer("ibv_alloc_pd", raw)?, device: Arc::clone(device) })
    }

    /// The domain's device.
    #[must_use]
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// Registers all of `area` in this domain: see [`Device::register_part`].
    pub fn register(self: &Arc<Self>, area: Area, access: Access) -> Result<MemoryRegion, VerbsError> {
        let bytes = area.bytes();
        MemoryRegion::new(&self.device, Some(self), area, 0..bytes, access)
    }

    /// Registers `bytes` of `area` from `offset` in this domain: see [`Device::register_part`].
    pub fn register_part(
        self: &Arc<Self>,
        area: Area,
        offset: usize,
        bytes: usize,
        access: Access,
    ) -> Result<MemoryRegion, VerbsError> {
        // An overflow gives an empty range, which is refused.
        let range = offset..offset.checked_add(bytes).unwrap_or(0);
        MemoryRegion::new(&self.device, Some(self), area, range, access)
    }

    pub(crate) fn raw(&self) -> *mut sys::ibv_pd {
        self.raw
    }
}

impl Drop for Domain {
    fn drop(&mut self) {
        // SAFETY: freed only here. All objects in the domain hold an `Arc` of it, so none is left.
        unsafe { sys::ibv_dealloc_pd(self.raw) };
    }
}
