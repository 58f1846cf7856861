//! [`Device`]: an RDMA device and its protection domain. Also the search for devices, their limits
//! ([`DeviceLimits`]) and their asynchronous events ([`AsyncEvent`]).
//!
//! UNSAFETY: a device owns its protection domain and a librdmacm reference, which keeps its context open. See
//! [`Device::set_lost`] for a removed device.
#![expect(unsafe_code, reason = "calls libibverbs and librdmacm")]

use std::ffi::CStr;
use std::fs::File;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use rdma_sys as sys;

use crate::cm_id::CmId;
use crate::error::VerbsError;
use crate::memory::Access;

/// Limits and capabilities of a device. A negative value of the device becomes 0; a value beyond the field's
/// range becomes the field's maximum.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DeviceLimits {
    /// Maximum work requests in a send or receive queue (`max_qp_wr`).
    pub send_wr: u32,
    /// Maximum segments of a work request (`max_sge`).
    pub sge: u32,
    /// Maximum segments of a READ: `max_sge_rd`, but at most `sge`; `sge` if that is 0. Can be 1 on iWARP.
    pub sge_read: u32,
    /// Maximum work requests in a shared receive queue (`max_srq_wr`).
    pub srq_wr: u32,
    /// Maximum segments of a receive in a shared receive queue (`max_srq_sge`).
    pub srq_sge: u32,
    /// Maximum entries of a completion queue (`max_cqe`).
    pub cqe: u32,
    /// Maximum READs of the peer that a queue pair serves at once (`max_qp_rd_atom`).
    pub responder_resources: u8,
    /// Maximum outstanding READs of a queue pair (`max_qp_init_rd_atom`).
    pub initiator_depth: u8,
    /// The device supports SEND with invalidate (memory management extensions).
    pub can_invalidate: bool,
    /// Count of completion vectors.
    pub vectors: u32,
    /// The device supports shared receive queues.
    pub has_srq: bool,
    /// The transport is iWARP: see [`DeviceLimits::read_access`].
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
            can_invalidate: has(cap::IBV_DEVICE_MEM_MGT_EXTENSIONS.0),
            vectors: count(vectors),
            has_srq: attributes.max_srq > 0,
            is_iwarp,
        }
    }

    /// Returns the access flags for memory that is the destination of this side's READs. On iWARP the
    /// response to a READ is a write by the peer, which needs a key with remote write access: a peer that
    /// serves a READ can write to the whole region as long as it is registered.
    #[must_use]
    pub fn read_access(&self) -> Access {
        if self.is_iwarp { Access::LOCAL_WRITE | Access::REMOTE_WRITE } else { Access::LOCAL_WRITE }
    }
}

/// An asynchronous event of a device (`ibv_async_event`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AsyncEvent {
    /// A port has lost its link.
    PortDown {
        /// Port number, from 1.
        port: u8,
    },
    /// A port's link is up.
    PortUp {
        /// Port number, from 1.
        port: u8,
    },
    /// The device was removed or needs a reset; all its objects are unusable.
    DeviceFatal,
    /// A queue pair has entered the error state.
    QueuePairFatal {
        /// As [`crate::QueuePair::number`].
        number: u32,
        /// As [`crate::QueuePair::serial`].
        serial: usize,
    },
    /// IBV_EVENT_QP_LAST_WQE_REACHED: a queue pair in the error state consumes no more receives of its shared
    /// receive queue. Those already consumed have completed or will complete. Not reported by all devices.
    QueuePairDrained {
        /// As [`crate::QueuePair::number`].
        number: u32,
        /// As [`crate::QueuePair::serial`].
        serial: usize,
    },
    /// A completion queue has overrun or failed.
    CompletionQueueError {
        /// As [`crate::CompletionQueue::identity`].
        queue: usize,
    },
    /// Any other `ibv_event_type`.
    Other(i32),
}

impl AsyncEvent {
    /// # Safety
    /// `source` is an event of libibverbs; if it concerns a queue pair or completion queue, that exists.
    unsafe fn read(source: *const sys::ibv_async_event) -> AsyncEvent {
        use sys::ibv_event_type as kind;
        // SAFETY: the caller guarantees a valid event. A pointer of the union is dereferenced only if the
        // type says that it is set; `port_num` is an integer, valid with any type. The type is read as an
        // integer, as newer kernels may have types that the enum lacks.
        unsafe {
            let number = (&raw const (*source).event_type).cast::<i32>().read();
            let port = u8::try_from((*source).element.port_num).unwrap_or(0);
            if number == kind::IBV_EVENT_PORT_ERR as i32 {
                AsyncEvent::PortDown { port }
            } else if number == kind::IBV_EVENT_PORT_ACTIVE as i32 {
                AsyncEvent::PortUp { port }
            } else if number == kind::IBV_EVENT_DEVICE_FATAL as i32 {
                AsyncEvent::DeviceFatal
            } else if QUEUE_PAIR_FATAL.contains(&number) {
                let queue_pair = (*source).element.qp;
                let (number, serial) = ((*queue_pair).qp_num, (*queue_pair).qp_context.addr());
                AsyncEvent::QueuePairFatal { number, serial }
            } else if number == kind::IBV_EVENT_QP_LAST_WQE_REACHED as i32 {
                let queue_pair = (*source).element.qp;
                let (number, serial) = ((*queue_pair).qp_num, (*queue_pair).qp_context.addr());
                AsyncEvent::QueuePairDrained { number, serial }
            } else if number == kind::IBV_EVENT_CQ_ERR as i32 {
                AsyncEvent::CompletionQueueError { queue: (*(*source).element.cq).cq_context.addr() }
            } else {
                AsyncEvent::Other(number)
            }
        }
    }
}

/// Calls `open` with each context; returns the devices and the errors. `Ok(None)` skips a context. A failure
/// does not end the loop.
fn open_each<C, D, E>(
    contexts: impl IntoIterator<Item = C>,
    mut open: impl FnMut(C) -> Result<Option<D>, E>,
) -> (Vec<D>, Vec<E>) {
    let (mut opened, mut failed) = (Vec::new(), Vec::new());
    for context in contexts {
        match open(context) {
            Ok(device) => opened.extend(device),
            Err(error) => failed.push(error),
        }
    }
    (opened, failed)
}

/// An open device: a context of librdmacm and one protection domain.
#[derive(Debug)]
pub struct Device {
    /// Released after the domain, which `drop` frees.
    context: ContextRef,
    domain: *mut sys::ibv_pd,
    name: String,
    limits: DeviceLimits,
    is_soft_roce: bool,
    serial: u64,
    /// Path and inode of the device's entry in /sys/class/infiniband_verbs. `None`: none when it was opened.
    verbs_entry: Option<(PathBuf, u64)>,
    is_lost: AtomicBool,
    /// The device has refused relaxed ordering.
    is_strict: AtomicBool,
}

/// Result of [`Device::find`].
#[derive(Debug, Default)]
pub struct Found {
    /// Open devices, opened by this or an earlier call, without lost ones.
    pub devices: Vec<Arc<Device>>,
    /// Names and errors of devices that could not be opened.
    pub failed: Vec<(String, VerbsError)>,
}

/// Vendor ID of the kernel's soft-RoCE (`RXE_VENDOR_ID`).
const SOFT_ROCE_VENDOR: u32 = 0xFF_FFFF;

// SAFETY: libibverbs is thread-safe, and all fields written after construction are atomic.
unsafe impl Send for Device {}
// SAFETY: as for `Send`: shared references only use thread-safe calls, atomics and constant fields.
unsafe impl Sync for Device {}

/// All RDMA devices of the kernel.
const IB_CLASS_DIR: &str = "/sys/class/infiniband";
/// RDMA devices with a user-space interface (`ib_uverbs`).
const VERBS_CLASS_DIR: &str = "/sys/class/infiniband_verbs";
/// Inodes in /sys/class/infiniband of all devices opened so far. A device that comes back has a new inode.
static OPENED_INODES: Mutex<Vec<u64>> = Mutex::new(Vec::new());
/// Open devices. [`Device::find`] returns the existing [`Device`] of a context instead of a second one.
static OPEN_DEVICES: Mutex<Vec<Weak<Device>>> = Mutex::new(Vec::new());

impl Device {
    /// Returns all devices that can be opened, as [`Device::find`]; none on a machine without RDMA.
    ///
    /// # Errors
    /// The errors of [`Device::find`]. If no device could be opened, the error of the first.
    pub fn all() -> Result<Vec<Arc<Device>>, VerbsError> {
        let Found { devices, failed } = Device::find()?;
        match failed.first() {
            Some((_, error)) if devices.is_empty() => Err(*error),
            Some(_) | None => Ok(devices),
        }
    }

    /// Opens all devices. Another call returns the same [`Device`]s as long as they are held, and opens new
    /// devices. Lost devices are left out. Both lists are empty on a machine without RDMA (no kernel module,
    /// or nothing in `/dev/infiniband`).
    ///
    /// # Errors
    /// `rdma_get_devices` failed with another error than that of a machine without RDMA
    /// ([`VerbsError::is_no_rdma`]).
    pub fn find() -> Result<Found, VerbsError> {
        let mut known = OPEN_DEVICES.lock().unwrap_or_else(PoisonError::into_inner);
        let mut count = 0;
        // SAFETY: the call writes the count; the list has that many entries.
        let list = unsafe { sys::rdma_get_devices(&raw mut count) };
        if list.is_null() {
            let error = VerbsError::last("rdma_get_devices");
            return if error.is_no_rdma() { Ok(Found::default()) } else { Err(error) };
        }
        known.retain(|device| device.strong_count() > 0);
        let contexts: Vec<_> = (0..usize::try_from(count).unwrap_or(0))
            // SAFETY: the list has `count` contexts. Each `ContextRef` becomes the owner of the list's
            // reference to its context.
            .map(|index| ContextRef(unsafe { *list.add(index) }))
            .collect();
        // SAFETY: librdmacm has allocated the list by `malloc` and keeps no pointer to it.
        unsafe { libc::free(list.cast()) };
        let (devices, failed) = open_each(contexts, |context| {
            let same = known.iter().filter_map(Weak::upgrade).find(|it| it.context.0 == context.0);
            match same {
                Some(device) if device.is_lost() => Ok(None),
                Some(device) => Ok(Some(device)),
                None if context.is_revoked() => Ok(None),
                None => {
                    let name = context.name();
                    Device::new(context).map(|device| Some(Arc::new(device))).map_err(|error| (name, error))
                }
            }
        });
        for device in &devices {
            if !known.iter().any(|weak| weak.as_ptr() == Arc::as_ptr(device)) {
                known.push(Arc::downgrade(device));
            }
        }
        Ok(Found { devices, failed })
    }

    /// Returns true if the kernel lists a device. Reads a directory, and makes no librdmacm call.
    pub(crate) fn is_any_listed() -> bool {
        std::fs::read_dir(IB_CLASS_DIR).is_ok_and(|mut devices| devices.next().is_some())
    }

    /// Returns true if the kernel lists a device that was never opened; false if the list cannot be read.
    /// Reads a directory. Unlike [`Device::all`] it makes no librdmacm call, so none is made while a device
    /// is being removed.
    #[must_use]
    pub fn is_any_new() -> bool {
        let seen = OPENED_INODES.lock().unwrap_or_else(PoisonError::into_inner);
        let Ok(entries) = std::fs::read_dir(IB_CLASS_DIR) else { return false };
        let found = entries.flatten().filter_map(|entry| std::fs::metadata(entry.path()).ok());
        found.into_iter().any(|entry| !seen.contains(&entry.ino()))
    }

    fn new(reference: ContextRef) -> Result<Device, VerbsError> {
        static SERIALS: AtomicU64 = AtomicU64::new(0);
        let context = reference.0;
        let mut attributes = MaybeUninit::<sys::ibv_device_attr>::zeroed();
        // SAFETY: `reference` keeps the context open; the attributes are written.
        VerbsError::check("ibv_query_device", unsafe {
            sys::ibv_query_device(context, attributes.as_mut_ptr())
        })?;
        // SAFETY: the struct was zeroed, which is valid, and the verb has filled it.
        let attributes = unsafe { attributes.assume_init() };
        let name = reference.name();
        // SAFETY: `reference` keeps the context open; an open context has a device.
        let (vectors, is_iwarp, async_fd) = unsafe {
            let transport = (*(*context).device).transport_type;
            let is_iwarp = transport == sys::ibv_transport_type::IBV_TRANSPORT_IWARP;
            ((*context).num_comp_vectors, is_iwarp, (*context).async_fd)
        };
        let entry = std::fs::metadata(format!("{IB_CLASS_DIR}/{name}")).map(|entry| entry.ino());
        // SAFETY: `reference` keeps the context open; its device's `dev_name` is a C string.
        let verbs_entry = unsafe { CStr::from_ptr((*(*context).device).dev_name.as_ptr()) };
        let verbs_entry = format!("{VERBS_CLASS_DIR}/{}", verbs_entry.to_string_lossy());
        let verbs_entry = std::fs::metadata(&verbs_entry).ok().map(|entry| (verbs_entry.into(), entry.ino()));
        set_nonblocking(async_fd)?;
        // SAFETY: `reference` keeps the context open.
        let domain = VerbsError::check_pointer("ibv_alloc_pd", unsafe { sys::ibv_alloc_pd(context) })?;
        let limits = DeviceLimits::new(&attributes, vectors, is_iwarp);
        let is_soft_roce = attributes.vendor_id == SOFT_ROCE_VENDOR;
        OPENED_INODES.lock().unwrap_or_else(PoisonError::into_inner).extend(entry);
        let serial = SERIALS.fetch_add(1, Ordering::Relaxed);
        let (is_lost, is_strict) = (AtomicBool::new(false), AtomicBool::new(false));
        let context = reference;
        Ok(Device { context, domain, name, limits, is_soft_roce, serial, verbs_entry, is_lost, is_strict })
    }

    /// Returns true unless the device has refused relaxed ordering.
    pub(crate) fn is_relaxed(&self) -> bool {
        !self.is_strict.load(Ordering::Relaxed)
    }

    /// Records that the device has refused relaxed ordering, so that it is not requested again.
    pub(crate) fn set_strict(&self) {
        self.is_strict.store(true, Ordering::Relaxed);
    }

    /// Returns the serial number, unique in the process. A device that is opened again has a new one.
    #[must_use]
    pub fn serial(&self) -> u64 {
        self.serial
    }

    /// Marks the device as lost: removed or failed, and not to be used any more. True on the first call. The
    /// drop of the last reference closes it; after that [`Device::find`] may open it again.
    ///
    /// librdmacm never closes the context of a machine's only device. The soft-RoCE driver of the kernel
    /// cannot remove a device in use: it blocks the removing process until the context is closed. So the drop
    /// of a lost device replaces the context's descriptors by `/dev/null`. This closes the context in the
    /// kernel; later verbs on the context fail.
    pub fn set_lost(&self) -> bool {
        !self.is_lost.swap(true, Ordering::Relaxed)
    }

    /// Returns true while the kernel lists the device's user-space interface, and always if it was not listed
    /// when the device was opened. With soft-RoCE and `ib_uverbs` loaded after `rdma_cm`, this is the only
    /// sign of a removal: the kernel then waits for the users of `ib_uverbs` before it notifies the users of
    /// `rdma_cm`. Costs one stat(2).
    #[must_use]
    pub fn is_listed(&self) -> bool {
        let Some((path, inode)) = &self.verbs_entry else { return true };
        std::fs::metadata(path).is_ok_and(|entry| entry.ino() == *inode)
    }

    /// Returns true after [`Device::set_lost`].
    #[must_use]
    pub fn is_lost(&self) -> bool {
        self.is_lost.load(Ordering::Relaxed)
    }

    /// Returns the kernel's name of the device, such as `mlx5_0`.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the limits and capabilities that the device reported when it was opened.
    #[must_use]
    pub fn limits(&self) -> &DeviceLimits {
        &self.limits
    }

    /// Returns true for the kernel's soft-RoCE (rxe), which is used for tests. Its queue pairs use
    /// [`crate::Posting::List`] by default: with rdma-core 44, its `ibv_wr_set_sge_list` treats all segments
    /// as if they were as long as the first. Its source also miscounts a full queue.
    #[must_use]
    pub fn is_soft_roce(&self) -> bool {
        self.is_soft_roce
    }

    /// Returns true if `id` is bound to this device.
    #[must_use]
    pub fn is_of(&self, id: &CmId) -> bool {
        id.context() == self.context.0
    }

    /// Returns the descriptor that is readable while [`Device::next_async_event`] has an event.
    #[must_use]
    pub fn async_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: `self.context` keeps the context and its descriptor open while `self` is borrowed.
        unsafe { BorrowedFd::borrow_raw((*self.context.0).async_fd) }
    }

    /// Reads and acknowledges the next pending event of the device. `None`: none is pending, or an error.
    #[must_use]
    pub fn next_async_event(&self) -> Option<AsyncEvent> {
        let mut event = MaybeUninit::<sys::ibv_async_event>::zeroed();
        // SAFETY: `self.context` keeps the context open, and its descriptor does not block; the event is
        // written on success.
        if unsafe { sys::ibv_get_async_event(self.context.0, event.as_mut_ptr()) } != 0 {
            return None;
        }
        // SAFETY: the verb has written the event. A queue pair or completion queue in it is not destroyed
        // before the event is acknowledged.
        let copied = unsafe { AsyncEvent::read(event.as_ptr()) };
        // SAFETY: the event was read above and is acknowledged only here.
        unsafe { sys::ibv_ack_async_event(event.as_mut_ptr()) };
        Some(copied)
    }

    pub(crate) fn context(&self) -> *mut sys::ibv_context {
        self.context.0
    }

    pub(crate) fn domain(&self) -> *mut sys::ibv_pd {
        self.domain
    }
}

/// Event types after which the queue pair is in the error state.
const QUEUE_PAIR_FATAL: [i32; 3] = [
    sys::ibv_event_type::IBV_EVENT_QP_FATAL as i32,
    sys::ibv_event_type::IBV_EVENT_QP_REQ_ERR as i32,
    sys::ibv_event_type::IBV_EVENT_QP_ACCESS_ERR as i32,
];

impl Drop for Device {
    fn drop(&mut self) {
        // SAFETY: freed only here. All objects in the domain hold an `Arc` of this device, so none is left.
        unsafe { sys::ibv_dealloc_pd(self.domain) };
        if self.is_lost() {
            self.context.revoke();
        }
    }
}

/// A reference to a context of librdmacm. The context is open while the reference exists.
#[derive(Debug)]
struct ContextRef(*mut sys::ibv_context);

/// Replacement for the descriptors of a lost device: verbs on it fail. Opened read-only, so that the write of
/// a command fails too.
const DEV_NULL: &str = "/dev/null";

impl ContextRef {
    /// Returns the kernel's name of the device.
    fn name(&self) -> String {
        // SAFETY: `self` keeps the context open; its device's name is a C string.
        let name = unsafe { CStr::from_ptr(sys::ibv_get_device_name((*self.0).device)) };
        name.to_string_lossy().into_owned()
    }

    /// Closes the context in the kernel by replacing its descriptors, but keeps it allocated: see
    /// [`Device::set_lost`]. No effect if `/dev/null` cannot be opened.
    fn revoke(&self) {
        let Ok(dev_null) = File::open(DEV_NULL) else { return };
        // SAFETY: the context is open, so it owns both descriptors. Each is replaced atomically; a later
        // close by the library closes the replacement.
        unsafe {
            for descriptor in [(*self.0).async_fd, (*self.0).cmd_fd] {
                libc::dup3(dev_null.as_raw_fd(), descriptor, libc::O_CLOEXEC);
            }
        }
    }

    /// Returns true if [`ContextRef::revoke`] has replaced the descriptors. False also if a `stat` fails.
    fn is_revoked(&self) -> bool {
        let Ok(dev_null) = std::fs::metadata(DEV_NULL) else { return false };
        // SAFETY: `stat` contains only integers, for which zero is valid.
        let mut found: libc::stat = unsafe { std::mem::zeroed() };
        // SAFETY: `self` keeps the context open; `found` is written.
        let returned = unsafe { libc::fstat((*self.0).cmd_fd, &raw mut found) };
        returned == 0 && found.st_rdev == dev_null.rdev()
    }
}

impl Drop for ContextRef {
    fn drop(&mut self) {
        // librdmacm has no call that releases one reference. `rdma_free_devices` releases those of a list.
        let bytes = 2 * size_of::<*mut sys::ibv_context>();
        // SAFETY: the allocation has room for two pointers and is checked for null; the list ends with null
        // as the library requires, and the library frees it.
        unsafe {
            let list = libc::malloc(bytes).cast::<*mut sys::ibv_context>();
            if list.is_null() {
                return; // out of memory: the context stays open
            }
            list.write(self.0);
            list.add(1).write(std::ptr::null_mut());
            sys::rdma_free_devices(list);
        }
    }
}

/// Sets O_NONBLOCK of `fd`. Fails with the errno of `fcntl`.
pub(crate) fn set_nonblocking(fd: libc::c_int) -> Result<(), VerbsError> {
    // SAFETY: `fcntl` with these commands accesses no memory of the process.
    let flags = unsafe { libc::fcntl(fd, libc::F_GETFL) };
    // SAFETY: `fcntl` with these commands accesses no memory of the process.
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
        if std::fs::read_dir("/sys/class/infiniband").is_ok_and(|mut devices| devices.next().is_some()) {
            return spindle_tests_skip::skip("this machine has RDMA");
        }
        assert!(Device::all().expect("no error").is_empty());
        assert!(Device::all().expect("again").is_empty());
    }

    #[test]
    fn limits_are_the_device_s_in_our_words() {
        // SAFETY: `ibv_device_attr` contains only integers, for which zero is valid.
        let mut attributes: sys::ibv_device_attr = unsafe { std::mem::zeroed() };
        (attributes.max_qp_wr, attributes.max_sge, attributes.max_sge_rd) = (1024, 30, 40);
        (attributes.max_qp_rd_atom, attributes.max_qp_init_rd_atom) = (16, 300);
        (attributes.max_srq, attributes.max_cqe) = (0, -1);
        attributes.device_cap_flags = sys::ibv_device_cap_flags::IBV_DEVICE_MEM_MGT_EXTENSIONS.0;
        let limits = DeviceLimits::new(&attributes, 4, false);
        assert_eq!((limits.send_wr, limits.sge, limits.sge_read, limits.vectors), (1024, 30, 30, 4));
        assert_eq!((limits.responder_resources, limits.initiator_depth, limits.cqe), (16, 255, 0));
        assert!(limits.can_invalidate && !limits.has_srq);
    }

    #[test]
    fn memory_that_takes_what_we_read_can_be_written_from_outside_on_iwarp_only() {
        // SAFETY: `ibv_device_attr` contains only integers, for which zero is valid.
        let attributes: sys::ibv_device_attr = unsafe { std::mem::zeroed() };
        let of = |is_iwarp| DeviceLimits::new(&attributes, 1, is_iwarp).read_access();
        assert_eq!(of(false), Access::LOCAL_WRITE);
        assert_eq!(of(true), Access::LOCAL_WRITE | Access::REMOTE_WRITE);
    }

    #[test]
    fn one_device_that_cannot_be_opened_does_not_hide_the_others() {
        let open = |number: u32| match number {
            1 => Err("bad"),
            2 => Ok(None),
            other => Ok(Some(other)),
        };
        assert_eq!(open_each([0, 1, 2, 3], open), (vec![0, 3], vec!["bad"]));
    }

    #[test]
    fn events_are_the_library_s_in_our_words() {
        use sys::ibv_event_type as kind;
        // SAFETY: both structs contain only integers and raw pointers, for which zero is valid.
        let (mut event, mut queue_pair): (sys::ibv_async_event, sys::ibv_qp) =
            unsafe { (std::mem::zeroed(), std::mem::zeroed()) };
        queue_pair.qp_num = 17;
        queue_pair.qp_context = std::ptr::without_provenance_mut(5);
        event.element.qp = &raw mut queue_pair;
        let mut read = |kind| {
            event.event_type = kind;
            // SAFETY: the event points to `queue_pair`, a local that outlives this call.
            unsafe { AsyncEvent::read(&raw const event) }
        };
        assert_eq!(
            read(kind::IBV_EVENT_QP_LAST_WQE_REACHED),
            AsyncEvent::QueuePairDrained { number: 17, serial: 5 }
        );
        assert_eq!(read(kind::IBV_EVENT_QP_FATAL), AsyncEvent::QueuePairFatal { number: 17, serial: 5 });
        assert_eq!(read(kind::IBV_EVENT_DEVICE_FATAL), AsyncEvent::DeviceFatal);
        assert_eq!(read(kind::IBV_EVENT_COMM_EST), AsyncEvent::Other(kind::IBV_EVENT_COMM_EST as i32));
        // SAFETY: the struct contains only integers, raw pointers and locks, for which zero is valid.
        let mut queue: sys::ibv_cq = unsafe { std::mem::zeroed() };
        queue.cq_context = std::ptr::without_provenance_mut(6);
        event.element.cq = &raw mut queue;
        event.event_type = kind::IBV_EVENT_CQ_ERR;
        // SAFETY: the event points to `queue`, a local that outlives this call.
        let failed = unsafe { AsyncEvent::read(&raw const event) };
        assert_eq!(failed, AsyncEvent::CompletionQueueError { queue: 6 });
    }
}
