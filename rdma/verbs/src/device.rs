//! [`Device`]: an RDMA device and its protection domain.
//!
//! UNSAFETY: a device owns its protection domain and one of librdmacm's references to its context, which
//! keeps that open. See [`Device::set_lost`] for one that is gone.
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

/// What a device can do.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
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
    /// Has SEND with invalidate (memory management extensions).
    pub can_invalidate: bool,
    /// Completion vectors.
    pub vectors: u32,
    /// Has shared receive queues.
    pub has_srq: bool,
    /// iWARP: see [`DeviceLimits::read_access`].
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

    /// What memory must allow into which our own READs go. On iWARP the answer to a READ is a write of the
    /// other side like any other, which names its target by a key that allows it: the peer that serves a READ
    /// can write to all of that region as long as it is registered.
    #[must_use]
    pub fn read_access(&self) -> Access {
        if self.is_iwarp { Access::LOCAL_WRITE | Access::REMOTE_WRITE } else { Access::LOCAL_WRITE }
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
    /// A queue pair in its error state takes no more receives of its shared receive queue: all that it took
    /// have completed, or will without anything else happening. Not all devices tell.
    QueuePairDrained {
        /// Its number.
        number: u32,
    },
    /// A completion queue overran or is broken.
    CompletionQueueError {
        /// As [`crate::CompletionQueue::identity`].
        queue: usize,
    },
    /// Another, in libibverbs' numbers.
    Other(i32),
}

impl AsyncEvent {
    /// # Safety
    /// An event of the library, with a living queue pair where it is about one.
    unsafe fn read(place: *const sys::ibv_async_event) -> AsyncEvent {
        use sys::ibv_event_type as kind;
        // SAFETY: by contract. The kind is read as a number, because newer kernels may have others than the
        // enum.
        unsafe {
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
            } else if number == kind::IBV_EVENT_QP_LAST_WQE_REACHED as i32 {
                AsyncEvent::QueuePairDrained { number: (*(*place).element.qp).qp_num }
            } else if number == kind::IBV_EVENT_CQ_ERR as i32 {
                AsyncEvent::CompletionQueueError { queue: (*place).element.cq.addr() }
            } else {
                AsyncEvent::Other(number)
            }
        }
    }
}

/// Opens all that can be opened: one that cannot is no reason to have none.
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

/// A device: librdmacm's context of it, and one protection domain.
#[derive(Debug)]
pub struct Device {
    /// Let go after the domain.
    context: Reference,
    domain: *mut sys::ibv_pd,
    name: String,
    limits: DeviceLimits,
    is_soft_roce: bool,
    serial: u64,
    /// Its entry for user space, where there are any.
    usable: Option<(PathBuf, u64)>,
    is_lost: AtomicBool,
    /// It has refused relaxed ordering.
    is_strict: AtomicBool,
}

/// What [`Device::find`] has found.
#[derive(Debug, Default)]
pub struct Found {
    /// Devices that can be used.
    pub devices: Vec<Arc<Device>>,
    /// Names of those that cannot, and why.
    pub failed: Vec<(String, VerbsError)>,
}

/// Of the kernel's soft-RoCE (`RXE_VENDOR_ID`).
const SOFT_ROCE_VENDOR: u32 = 0xFF_FFFF;

// SAFETY: libibverbs is thread-safe; the fields are not written after construction, but for an atomic one.
unsafe impl Send for Device {}
// SAFETY: as above.
unsafe impl Sync for Device {}

/// Where the kernel lists the devices, and where those that user space may use.
const DEVICES: &str = "/sys/class/infiniband";
const USABLE: &str = "/sys/class/infiniband_verbs";
/// Their entries there that were ever opened: a device that comes back has another.
static SEEN: Mutex<Vec<u64>> = Mutex::new(Vec::new());
/// Devices that somebody holds: the same context is never two devices.
static KNOWN: Mutex<Vec<Weak<Device>>> = Mutex::new(Vec::new());

impl Device {
    /// All devices that can be used: [`Device::find`].
    ///
    /// # Errors
    /// As that, or there are devices and none of them can be used.
    pub fn all() -> Result<Vec<Arc<Device>>, VerbsError> {
        let Found { devices, failed } = Device::find()?;
        match failed.first() {
            Some((_, error)) if devices.is_empty() => Err(*error),
            Some(_) | None => Ok(devices),
        }
    }

    /// All devices. Empty lists where there is no RDMA at all (no module, nothing in `/dev/infiniband`): that
    /// is no error. Called again, it gives the same devices as long as they are held, and new ones, but none
    /// that is lost.
    pub fn find() -> Result<Found, VerbsError> {
        let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
        let mut count = 0;
        // SAFETY: the count is written to; the list ends there.
        let list = unsafe { sys::rdma_get_devices(&raw mut count) };
        if list.is_null() {
            let error = VerbsError::last("rdma_get_devices");
            let is_none = [libc::ENODEV, libc::ENOSYS, libc::ENOENT].contains(&error.errno);
            return if is_none { Ok(Found::default()) } else { Err(error) };
        }
        known.retain(|device| device.strong_count() > 0);
        let contexts: Vec<_> = (0..usize::try_from(count).unwrap_or(0))
            // SAFETY: the list has `count` contexts. Its references to them are ours from here on.
            .map(|index| Reference(unsafe { *list.add(index) }))
            .collect();
        // SAFETY: the library's allocation, which nothing else refers to.
        unsafe { libc::free(list.cast()) };
        let (devices, failed) = open_each(contexts, |context| {
            let same = known.iter().filter_map(Weak::upgrade).find(|it| it.context.0 == context.0);
            match same {
                Some(device) if device.is_lost() => Ok(None),
                Some(device) => Ok(Some(device)),
                None if context.is_cut_off() => Ok(None),
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

    /// The kernel lists a device that [`Device::all`] has never given. Costs a look at a directory, and
    /// unlike [`Device::all`] it leaves the library alone while a device is on its way out.
    #[must_use]
    pub fn is_any_new() -> bool {
        let seen = SEEN.lock().unwrap_or_else(PoisonError::into_inner);
        let Ok(entries) = std::fs::read_dir(DEVICES) else { return false };
        let found = entries.flatten().filter_map(|entry| std::fs::metadata(entry.path()).ok());
        found.into_iter().any(|entry| !seen.contains(&entry.ino()))
    }

    fn new(reference: Reference) -> Result<Device, VerbsError> {
        static SERIALS: AtomicU64 = AtomicU64::new(0);
        let context = reference.0;
        let mut attributes = MaybeUninit::<sys::ibv_device_attr>::zeroed();
        // SAFETY: open as long as the reference is; the attributes are written.
        VerbsError::check("ibv_query_device", unsafe {
            sys::ibv_query_device(context, attributes.as_mut_ptr())
        })?;
        // SAFETY: zeroes are valid, and the verb has filled it.
        let attributes = unsafe { attributes.assume_init() };
        let name = reference.name();
        // SAFETY: an open context has a device.
        let (vectors, is_iwarp, async_fd) = unsafe {
            let transport = (*(*context).device).transport_type;
            let is_iwarp = transport == sys::ibv_transport_type::IBV_TRANSPORT_IWARP;
            ((*context).num_comp_vectors, is_iwarp, (*context).async_fd)
        };
        let entry = std::fs::metadata(format!("{DEVICES}/{name}")).map(|entry| entry.ino());
        // SAFETY: an open context has a device, with a name for user space that ends.
        let usable = unsafe { CStr::from_ptr((*(*context).device).dev_name.as_ptr()) };
        let usable = format!("{USABLE}/{}", usable.to_string_lossy());
        let usable = std::fs::metadata(&usable).ok().map(|entry| (usable.into(), entry.ino()));
        set_nonblocking(async_fd)?;
        // SAFETY: an open context.
        let domain = VerbsError::made("ibv_alloc_pd", unsafe { sys::ibv_alloc_pd(context) })?;
        let limits = DeviceLimits::new(&attributes, vectors, is_iwarp);
        let is_soft_roce = attributes.vendor_id == SOFT_ROCE_VENDOR;
        SEEN.lock().unwrap_or_else(PoisonError::into_inner).extend(entry);
        let serial = SERIALS.fetch_add(1, Ordering::Relaxed);
        let (is_lost, is_strict) = (AtomicBool::new(false), AtomicBool::new(false));
        let context = reference;
        Ok(Device { context, domain, name, limits, is_soft_roce, serial, usable, is_lost, is_strict })
    }

    /// It has not refused relaxed ordering so far.
    pub(crate) fn is_relaxed(&self) -> bool {
        !self.is_strict.load(Ordering::Relaxed)
    }

    /// It has, and is not asked for it again.
    pub(crate) fn set_strict(&self) {
        self.is_strict.store(true, Ordering::Relaxed);
    }

    /// Names it for as long as the process lives: one that comes back has another.
    #[must_use]
    pub fn serial(&self) -> u64 {
        self.serial
    }

    /// The device is gone, or has failed as a whole: it is not used any more, and let go of altogether when
    /// its last holder drops it. Then the next [`Device::all`] may find it anew. True for the first who says
    /// so.
    ///
    /// librdmacm never closes the context of a machine's only device. A kernel driver that cannot take a
    /// device from its users (soft-RoCE) waits for that, and so would the process that removes it. So the
    /// context's descriptors are replaced by one that knows no verbs, as if the kernel had cut it off.
    pub fn set_lost(&self) -> bool {
        !self.is_lost.swap(true, Ordering::Relaxed)
    }

    /// The kernel lists it as one that user space may use. The only sign of the removal of a device like
    /// soft-RoCE's where `ib_uverbs` was loaded after `rdma_cm`: then the kernel waits for its users before
    /// it tells the connection manager's. Costs a look at a file.
    #[must_use]
    pub fn is_listed(&self) -> bool {
        let Some((path, inode)) = &self.usable else { return true };
        std::fs::metadata(path).is_ok_and(|entry| entry.ino() == *inode)
    }

    /// Somebody has said [`Device::set_lost`].
    #[must_use]
    pub fn is_lost(&self) -> bool {
        self.is_lost.load(Ordering::Relaxed)
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
    /// queue). No [`crate::Posting`] is chosen that has it.
    #[must_use]
    pub fn is_soft_roce(&self) -> bool {
        self.is_soft_roce
    }

    /// The identifier is bound to this device.
    #[must_use]
    pub fn is_of(&self, id: &CmId) -> bool {
        id.context() == self.context.0
    }

    /// Readable when [`Device::next_async_event`] has one.
    #[must_use]
    pub fn async_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: open as long as the context is.
        unsafe { BorrowedFd::borrow_raw((*self.context.0).async_fd) }
    }

    /// The next event of the device, if one is there. Does not block.
    #[must_use]
    pub fn next_async_event(&self) -> Option<AsyncEvent> {
        let mut event = MaybeUninit::<sys::ibv_async_event>::zeroed();
        // SAFETY: an open context, whose descriptor does not block; the event is written.
        if unsafe { sys::ibv_get_async_event(self.context.0, event.as_mut_ptr()) } != 0 {
            return None;
        }
        // SAFETY: written by the verb. A queue pair in an event is not destroyed before the event is
        // acknowledged.
        let told = unsafe { AsyncEvent::read(event.as_ptr()) };
        // SAFETY: an event that was taken and is acknowledged once.
        unsafe { sys::ibv_ack_async_event(event.as_mut_ptr()) };
        Some(told)
    }

    pub(crate) fn context(&self) -> *mut sys::ibv_context {
        self.context.0
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
        if self.is_lost() {
            self.context.cut_off();
        }
    }
}

/// One of librdmacm's references to a context; while it is held, the context stays open.
#[derive(Debug)]
struct Reference(*mut sys::ibv_context);

/// Knows no verbs: calls on it fail. It may not be written to, so that no command looks done.
const NOTHING: &str = "/dev/null";

impl Reference {
    /// The device's name.
    fn name(&self) -> String {
        // SAFETY: an open context has a device, with a name that ends.
        let name = unsafe { CStr::from_ptr(sys::ibv_get_device_name((*self.0).device)) };
        name.to_string_lossy().into_owned()
    }

    /// Let the kernel have what belongs to the context, which stays where it is: see [`Device::set_lost`].
    fn cut_off(&self) {
        let Ok(nothing) = File::open(NOTHING) else { return };
        // SAFETY: open, so its descriptors are its own. They are replaced in one step; a later close closes
        // the replacement.
        unsafe {
            for descriptor in [(*self.0).async_fd, (*self.0).cmd_fd] {
                libc::dup3(nothing.as_raw_fd(), descriptor, libc::O_CLOEXEC);
            }
        }
    }

    /// It was, and librdmacm has it still.
    fn is_cut_off(&self) -> bool {
        let Ok(nothing) = std::fs::metadata(NOTHING) else { return false };
        // SAFETY: numbers.
        let mut found: libc::stat = unsafe { std::mem::zeroed() };
        // SAFETY: an open context; what is found is written.
        let returned = unsafe { libc::fstat((*self.0).cmd_fd, &raw mut found) };
        returned == 0 && found.st_rdev == nothing.rdev()
    }
}

impl Drop for Reference {
    fn drop(&mut self) {
        // The library takes references back by the list that it has given them with, and frees the list.
        let bytes = 2 * size_of::<*mut sys::ibv_context>();
        // SAFETY: as much as two pointers are; null is looked for.
        unsafe {
            let list = libc::malloc(bytes).cast::<*mut sys::ibv_context>();
            if list.is_null() {
                return; // it stays open
            }
            list.write(self.0);
            list.add(1).write(std::ptr::null_mut());
            sys::rdma_free_devices(list);
        }
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
        if std::fs::read_dir("/sys/class/infiniband").is_ok_and(|mut devices| devices.next().is_some()) {
            return spindle_skip::skip("this machine has RDMA");
        }
        assert!(Device::all().expect("no error").is_empty());
        assert!(Device::all().expect("again").is_empty());
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
        assert!(limits.can_invalidate && !limits.has_srq);
    }

    #[test]
    fn memory_that_takes_what_we_read_can_be_written_from_outside_on_iwarp_only() {
        // SAFETY: numbers and bytes.
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
        // SAFETY: numbers and pointers.
        let (mut event, mut queue_pair): (sys::ibv_async_event, sys::ibv_qp) =
            unsafe { (std::mem::zeroed(), std::mem::zeroed()) };
        queue_pair.qp_num = 17;
        event.element.qp = &raw mut queue_pair;
        let mut read = |kind| {
            event.event_type = kind;
            // SAFETY: its queue pair is alive.
            unsafe { AsyncEvent::read(&raw const event) }
        };
        assert_eq!(read(kind::IBV_EVENT_QP_LAST_WQE_REACHED), AsyncEvent::QueuePairDrained { number: 17 });
        assert_eq!(read(kind::IBV_EVENT_QP_FATAL), AsyncEvent::QueuePairFatal { number: 17 });
        assert_eq!(read(kind::IBV_EVENT_DEVICE_FATAL), AsyncEvent::DeviceFatal);
        assert_eq!(read(kind::IBV_EVENT_COMM_EST), AsyncEvent::Other(kind::IBV_EVENT_COMM_EST as i32));
    }
}
