//! [`Device`]: an RDMA device and its protection domain.
//!
//! UNSAFETY: a device owns its protection domain; its context belongs to librdmacm, which never closes one
//! that is on a list it has given away: the lists with new devices are kept for the life of the process.
#![expect(unsafe_code, reason = "calls libibverbs and librdmacm")]

use std::ffi::CStr;
use std::mem::MaybeUninit;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use rdma_sys as sys;

use crate::cm_id::CmId;
use crate::error::VerbsError;

/// What a device can do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceLimits {
    /// Work requests in a send or receive queue.
    pub send_wr: u32,
    /// Segments of a work request.
    pub sge: u32,
    /// Segments of a READ; as few as one on iWARP.
    pub sge_read: u32,
    /// Work requests in a shared receive queue.
    pub srq_wr: u32,
    /// Segments of one of those.
    pub srq_sge: u32,
    /// Entries of a completion queue.
    pub cqe: u32,
    /// READs of the other side that a queue pair serves at once (`max_qp_rd_atom`).
    pub responder_resources: u8,
    /// READs that a queue pair has outstanding at once (`max_qp_init_rd_atom`).
    pub initiator_depth: u8,
    /// Queue pairs.
    pub queue_pairs: u32,
    /// Memory regions.
    pub memory_regions: u32,
    /// Bytes of a memory region.
    pub region_bytes: u64,
    /// Has SEND with invalidate and local invalidate (memory management extensions).
    pub can_invalidate: bool,
    /// Has memory windows of type 2, whose keys the other side can invalidate.
    pub has_windows: bool,
    /// Completion vectors.
    pub vectors: u32,
    /// Has shared receive queues.
    pub has_srq: bool,
    /// Ports; they count from 1.
    pub ports: u8,
    /// iWARP: the memory into which a READ goes must allow remote writes.
    pub is_iwarp: bool,
}

impl DeviceLimits {
    fn new(attributes: &sys::ibv_device_attr, vectors: i32, is_iwarp: bool) -> DeviceLimits {
        use sys::ibv_device_cap_flags as cap;
        let count = |count: i32| u32::try_from(count).unwrap_or(0);
        let small = |count: i32| u8::try_from(count.max(0)).unwrap_or(u8::MAX);
        let has = |flags: u32| attributes.device_cap_flags & flags != 0;
        DeviceLimits {
            send_wr: count(attributes.max_qp_wr),
            sge: count(attributes.max_sge),
            sge_read: match count(attributes.max_sge_rd) {
                0 => count(attributes.max_sge),
                given => given.min(count(attributes.max_sge)),
            },
            srq_wr: count(attributes.max_srq_wr),
            srq_sge: count(attributes.max_srq_sge),
            cqe: count(attributes.max_cqe),
            responder_resources: small(attributes.max_qp_rd_atom),
            initiator_depth: small(attributes.max_qp_init_rd_atom),
            queue_pairs: count(attributes.max_qp),
            memory_regions: count(attributes.max_mr),
            region_bytes: attributes.max_mr_size,
            can_invalidate: has(cap::IBV_DEVICE_MEM_MGT_EXTENSIONS.0),
            has_windows: has(cap::IBV_DEVICE_MEM_WINDOW_TYPE_2A.0 | cap::IBV_DEVICE_MEM_WINDOW_TYPE_2B.0),
            vectors: count(vectors),
            has_srq: attributes.max_srq > 0,
            ports: attributes.phys_port_cnt,
            is_iwarp,
        }
    }
}

/// Something happened to a device, outside of any completion.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AsyncEvent {
    /// A port has no link any more.
    PortDown {
        /// Counts from 1.
        port: u8,
    },
    /// A port has a link.
    PortUp {
        /// Counts from 1.
        port: u8,
    },
    /// The device is gone or must be reset; all that belongs to it is dead.
    DeviceFatal,
    /// A queue pair is in its error state.
    QueuePairFatal {
        /// Its number.
        number: u32,
    },
    /// A completion queue overran or is broken.
    CompletionQueueError,
    /// Another, in libibverbs' numbers.
    Other(i32),
}

/// A device: librdmacm's context of it, and one protection domain.
#[derive(Debug)]
pub struct Device {
    context: *mut sys::ibv_context,
    domain: *mut sys::ibv_pd,
    name: String,
    limits: DeviceLimits,
    is_soft_roce: bool,
}

/// Of the kernel's soft-RoCE (`RXE_VENDOR_ID`).
const SOFT_ROCE_VENDOR: u32 = 0xFF_FFFF;

// SAFETY: libibverbs is thread-safe; the fields are not written after construction.
unsafe impl Send for Device {}
// SAFETY: as above.
unsafe impl Sync for Device {}

/// Devices that somebody holds: the same context is never two devices.
static KNOWN: Mutex<Vec<Weak<Device>>> = Mutex::new(Vec::new());

impl Device {
    /// All devices. An empty list where there is no RDMA at all (no module, nothing in `/dev/infiniband`):
    /// that is no error. Called again, it gives the same devices as long as they are held, and new ones.
    ///
    /// # Errors
    /// Devices are there but cannot be asked.
    pub fn all() -> Result<Vec<Arc<Device>>, VerbsError> {
        let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
        let mut count = 0;
        // SAFETY: the count is written to; the list ends there.
        let list = unsafe { sys::rdma_get_devices(&raw mut count) };
        if list.is_null() {
            let error = VerbsError::last("rdma_get_devices");
            let is_none = [libc::ENODEV, libc::ENOSYS, libc::ENOENT].contains(&error.errno);
            return if is_none { Ok(Vec::new()) } else { Err(error) };
        }
        known.retain(|device| device.strong_count() > 0);
        let mut devices = Vec::new();
        for index in 0..usize::try_from(count).unwrap_or(0) {
            // SAFETY: the list has `count` contexts.
            let context = unsafe { *list.add(index) };
            let same = known.iter().filter_map(Weak::upgrade).find(|device| device.context == context);
            let device = match same {
                Some(device) => device,
                // SAFETY: an open context. The list is not freed, so it stays open.
                None => Arc::new(unsafe { Device::new(context)? }),
            };
            devices.push(device);
        }
        for device in &devices {
            if !known.iter().any(|weak| weak.as_ptr() == Arc::as_ptr(device)) {
                known.push(Arc::downgrade(device));
            }
        }
        Ok(devices)
    }

    /// # Safety
    /// The context is open and stays so.
    unsafe fn new(context: *mut sys::ibv_context) -> Result<Device, VerbsError> {
        let mut attributes = MaybeUninit::<sys::ibv_device_attr>::zeroed();
        // SAFETY: an open context; the attributes are written.
        VerbsError::check("ibv_query_device", unsafe {
            sys::ibv_query_device(context, attributes.as_mut_ptr())
        })?;
        // SAFETY: zeroes are valid, and the verb has filled it.
        let attributes = unsafe { attributes.assume_init() };
        // SAFETY: an open context has a device, with a name that ends.
        let (name, vectors, is_iwarp, async_fd) = unsafe {
            let name = CStr::from_ptr(sys::ibv_get_device_name((*context).device));
            let transport = (*(*context).device).transport_type;
            let is_iwarp = transport == sys::ibv_transport_type::IBV_TRANSPORT_IWARP;
            let name = name.to_string_lossy().into_owned();
            (name, (*context).num_comp_vectors, is_iwarp, (*context).async_fd)
        };
        set_nonblocking(async_fd)?;
        // SAFETY: an open context.
        let domain = unsafe { sys::ibv_alloc_pd(context) };
        if domain.is_null() {
            return Err(VerbsError::last("ibv_alloc_pd"));
        }
        let limits = DeviceLimits::new(&attributes, vectors, is_iwarp);
        let is_soft_roce = attributes.vendor_id == SOFT_ROCE_VENDOR;
        Ok(Device { context, domain, name, limits, is_soft_roce })
    }

    /// Its name, as `mlx5_0`.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What it can do.
    #[must_use]
    pub fn limits(&self) -> &DeviceLimits {
        &self.limits
    }

    /// The kernel's soft-RoCE (rxe), for tests. With rdma-core 44, `ibv_wr_set_sge_list` there takes all
    /// segments to be as long as the first (and its source, in the version that was read, miscounts a full
    /// queue); with Linux 6.12 its completions flag an invalidated key by the kernel's number.
    /// [`crate::Road::Best`] and [`crate::WorkCompletion`] know.
    #[must_use]
    pub fn is_soft_roce(&self) -> bool {
        self.is_soft_roce
    }

    /// The identifier is bound to this device.
    #[must_use]
    pub fn is_of(&self, id: &CmId) -> bool {
        id.context() == self.context
    }

    /// The port, which counts from 1, has a link.
    #[must_use]
    pub fn port_is_active(&self, port: u8) -> bool {
        let mut attributes = MaybeUninit::<sys::ibv_port_attr>::zeroed();
        // SAFETY: an open context; the attributes are written.
        let returned = unsafe { sys::___ibv_query_port(self.context, port, attributes.as_mut_ptr()) };
        // SAFETY: zeroes are valid.
        let attributes = unsafe { attributes.assume_init() };
        returned == 0 && attributes.state == sys::ibv_port_state::IBV_PORT_ACTIVE
    }

    /// Readable when [`Device::next_async_event`] has one.
    #[must_use]
    pub fn async_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: open as long as the context is.
        unsafe { BorrowedFd::borrow_raw((*self.context).async_fd) }
    }

    /// The next event of the device, if one is there. Does not block.
    #[must_use]
    pub fn next_async_event(&self) -> Option<AsyncEvent> {
        use sys::ibv_event_type as kind;
        let mut event = MaybeUninit::<sys::ibv_async_event>::zeroed();
        // SAFETY: an open context, whose descriptor does not block; the event is written.
        if unsafe { sys::ibv_get_async_event(self.context, event.as_mut_ptr()) } != 0 {
            return None;
        }
        let place = event.as_mut_ptr();
        // SAFETY: written by the verb. The kind is read as a number, because newer kernels may have others
        // than the enum. A queue pair in an event is not destroyed before the event is acknowledged.
        let told = unsafe {
            let number = (&raw const (*place).event_type).cast::<i32>().read();
            let port = u8::try_from((*place).element.port_num).unwrap_or(0);
            if number == kind::IBV_EVENT_PORT_ERR as i32 {
                AsyncEvent::PortDown { port }
            } else if number == kind::IBV_EVENT_PORT_ACTIVE as i32 {
                AsyncEvent::PortUp { port }
            } else if number == kind::IBV_EVENT_DEVICE_FATAL as i32 {
                AsyncEvent::DeviceFatal
            } else if QUEUE_PAIR_FATAL.contains(&number) {
                AsyncEvent::QueuePairFatal { number: (*(*place).element.qp).qp_num }
            } else if number == kind::IBV_EVENT_CQ_ERR as i32 {
                AsyncEvent::CompletionQueueError
            } else {
                AsyncEvent::Other(number)
            }
        };
        // SAFETY: an event that was taken and is acknowledged once.
        unsafe { sys::ibv_ack_async_event(place) };
        Some(told)
    }

    pub(crate) fn context(&self) -> *mut sys::ibv_context {
        self.context
    }

    pub(crate) fn domain(&self) -> *mut sys::ibv_pd {
        self.domain
    }
}

/// The queue pair is in its error state after these.
const QUEUE_PAIR_FATAL: [i32; 3] = [
    sys::ibv_event_type::IBV_EVENT_QP_FATAL as i32,
    sys::ibv_event_type::IBV_EVENT_QP_REQ_ERR as i32,
    sys::ibv_event_type::IBV_EVENT_QP_ACCESS_ERR as i32,
];

impl Drop for Device {
    fn drop(&mut self) {
        // SAFETY: ours, and whatever was made in it held the device.
        unsafe { sys::ibv_dealloc_pd(self.domain) };
    }
}

/// Calls on this descriptor return at once.
pub(crate) fn set_nonblocking(fd: libc::c_int) -> Result<(), VerbsError> {
    // SAFETY: changes no memory.
    let flags = unsafe { libc::fcntl(fd, libc::F_GETFL) };
    // SAFETY: changes no memory.
    if flags < 0 || unsafe { libc::fcntl(fd, libc::F_SETFL, flags | libc::O_NONBLOCK) } < 0 {
        return Err(VerbsError::last("fcntl"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_without_rdma_has_no_devices_and_that_is_no_error() {
        if !std::path::Path::new("/sys/class/infiniband").exists() {
            assert!(Device::all().expect("no error").is_empty());
            assert!(Device::all().expect("again").is_empty());
        }
    }

    #[test]
    fn limits_are_the_device_s_in_our_words() {
        // SAFETY: numbers and bytes.
        let mut attributes: sys::ibv_device_attr = unsafe { std::mem::zeroed() };
        (attributes.max_qp_wr, attributes.max_sge, attributes.max_sge_rd) = (1024, 30, 40);
        (attributes.max_qp_rd_atom, attributes.max_qp_init_rd_atom) = (16, 300);
        (attributes.max_srq, attributes.max_cqe) = (0, -1);
        attributes.device_cap_flags = sys::ibv_device_cap_flags::IBV_DEVICE_MEM_MGT_EXTENSIONS.0;
        let limits = DeviceLimits::new(&attributes, 4, false);
        assert_eq!((limits.send_wr, limits.sge, limits.sge_read, limits.vectors), (1024, 30, 30, 4));
        assert_eq!((limits.responder_resources, limits.initiator_depth, limits.cqe), (16, 255, 0));
        assert!(limits.can_invalidate && !limits.has_srq && !limits.has_windows);
    }
}
