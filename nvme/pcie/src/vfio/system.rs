//! VFIO's system calls as safe functions, and [`Registers`], a mapping of a device's registers.
//!
//! UNSAFETY: ioctls with the structures of the kernel's header, and the mapping of a BAR.
#![expect(unsafe_code, reason = "ioctls and a mapping of registers")]

use std::any::Any;
use std::ffi::{CString, c_int, c_ulong, c_void};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;

use rustix::mm::{MapFlags, ProtFlags};
use spindle_reactor::mem::Area;
use vfio_bindings::bindings::vfio::{
    VFIO_BASE, VFIO_DMA_MAP_FLAG_READ, VFIO_IRQ_SET_ACTION_TRIGGER, VFIO_IRQ_SET_DATA_EVENTFD,
    VFIO_PCI_REQ_IRQ_INDEX, VFIO_TYPE, VFIO_TYPE1v2_IOMMU, vfio_group_status, vfio_iommu_type1_dma_map,
    vfio_iommu_type1_info, vfio_region_info,
};
use vfio_ioctls::{VfioContainer, VfioError};

use super::info::Info;
use crate::bar::Bar;

/// Returns the request code of VFIO's ioctl `offset`. These codes encode neither size nor direction.
const fn ioctl_number(offset: u32) -> u32 {
    (VFIO_TYPE as u32) << 8 | (VFIO_BASE + offset)
}
const SET_IOMMU: u32 = ioctl_number(2);
const GROUP_GET_STATUS: u32 = ioctl_number(3);
const GROUP_SET_CONTAINER: u32 = ioctl_number(4);
const GROUP_GET_DEVICE_FD: u32 = ioctl_number(6);
const DEVICE_GET_REGION_INFO: u32 = ioctl_number(8);
const DEVICE_SET_IRQS: u32 = ioctl_number(10);
const DEVICE_RESET: u32 = ioctl_number(11);
const IOMMU_GET_INFO: u32 = ioctl_number(12);
const IOMMU_MAP_DMA: u32 = ioctl_number(13);

/// Maximum bytes of an ioctl result that are read.
const INFO_BYTES_MAX: u32 = 64 << 10;

/// Executes an ioctl and returns its result, or the system's error for -1.
///
/// # Safety
/// `argument` is valid for `request`: a value that the kernel does not dereference, or a pointer to data that
/// the kernel may access. Size fields in that data bound the access.
unsafe fn ioctl(fd: BorrowedFd<'_>, request: u32, argument: *mut c_void) -> io::Result<c_int> {
    // SAFETY: `fd` is borrowed and so open; the caller guarantees the argument.
    match unsafe { libc::ioctl(fd.as_raw_fd(), c_ulong::from(request), argument) } {
        -1 => Err(io::Error::last_os_error()),
        value => Ok(value),
    }
}

/// Borrows the file descriptor of a container. `vfio-ioctls` exposes only the raw descriptor.
fn fd_of(container: &VfioContainer) -> BorrowedFd<'_> {
    // SAFETY: the container owns the descriptor, and the result borrows the container.
    unsafe { BorrowedFd::borrow_raw(container.as_raw_fd()) }
}

/// Returns the system's error in an error of `vfio-ioctls`. Wraps an error that contains none.
pub(super) fn reason(error: VfioError) -> io::Error {
    if let VfioError::OpenContainer(source) = error {
        return source;
    }
    if let VfioError::IommuDmaMap(number) | VfioError::IommuDmaUnmap(number) = &error {
        return io::Error::from_raw_os_error(number.errno());
    }
    io::Error::other(error)
}

pub(super) fn group_flags(group: &File) -> io::Result<u32> {
    let mut status = vfio_group_status { argsz: size_of_u32::<vfio_group_status>(), flags: 0 };
    // SAFETY: this ioctl writes a `vfio_group_status`, which is a local variable of that size.
    unsafe { ioctl(group.as_fd(), GROUP_GET_STATUS, (&raw mut status).cast()) }?;
    Ok(status.flags)
}

pub(super) fn set_container(group: &File, container: &VfioContainer) -> io::Result<()> {
    let mut fd: c_int = container.as_raw_fd();
    // SAFETY: this ioctl reads one file descriptor, which is a local variable.
    unsafe { ioctl(group.as_fd(), GROUP_SET_CONTAINER, (&raw mut fd).cast()) }.map(drop)
}

/// Sets IOMMU type 1, version 2. The container must have a group.
pub(super) fn set_iommu(container: &VfioContainer) -> io::Result<()> {
    let kind = std::ptr::without_provenance_mut(VFIO_TYPE1v2_IOMMU as usize);
    // SAFETY: this ioctl takes a number; the kernel does not access it as an address.
    unsafe { ioctl(fd_of(container), SET_IOMMU, kind) }.map(drop)
}

/// Returns the IOMMU information of a container, with capabilities.
pub(super) fn iommu_info(container: &VfioContainer) -> io::Result<Info<vfio_iommu_type1_info>> {
    let fd = fd_of(container);
    let size = size_of_u32::<vfio_iommu_type1_info>();
    // SAFETY: the structure of this ioctl, which contains only integers; its `argsz` is its size.
    unsafe {
        info(
            fd,
            IOMMU_GET_INFO,
            vfio_iommu_type1_info { argsz: size, ..Default::default() },
            |head| &mut head.argsz,
            |head| if head.argsz > size { head.cap_offset } else { 0 },
        )
    }
}

/// Returns the information about region `index` of a device, with capabilities.
pub(super) fn region_info(device: &File, index: u32) -> io::Result<Info<vfio_region_info>> {
    let size = size_of_u32::<vfio_region_info>();
    // SAFETY: the structure of this ioctl, which contains only integers; its `argsz` is its size.
    unsafe {
        info(
            device.as_fd(),
            DEVICE_GET_REGION_INFO,
            vfio_region_info { argsz: size, index, ..Default::default() },
            |head| &mut head.argsz,
            |head| if head.argsz > size { head.cap_offset } else { 0 },
        )
    }
}

/// Executes an ioctl. Repeats the ioctl with a larger buffer if the result has capabilities or is longer than
/// `T`. `first` returns the offset of the first capability, 0 for none. Fails beyond [`INFO_BYTES_MAX`].
///
/// # Safety
/// `T` is the structure that `request` reads and writes, and contains only integers. `argsz` returns its
/// member of that name, which at first is the size of `T`.
unsafe fn info<T: Copy>(
    fd: BorrowedFd<'_>,
    request: u32,
    question: T,
    argsz: impl Fn(&mut T) -> &mut u32,
    first: impl Fn(&T) -> u32,
) -> io::Result<Info<T>> {
    let mut head = question;
    // SAFETY: `head` is a local `T`, and its `argsz` is the size of `T`.
    unsafe { ioctl(fd, request, (&raw mut head).cast()) }?;
    let wanted = *argsz(&mut head);
    if first(&head) == 0 && wanted <= size_of_u32::<T>() {
        return Ok(Info { head, bytes: Vec::new(), first: 0 });
    }
    if wanted > INFO_BYTES_MAX {
        return Err(io::Error::other(format!("an answer of {wanted} bytes, at most {INFO_BYTES_MAX}")));
    }
    // 64-bit words, so that the memory is aligned for each of these structures.
    let mut words = vec![0_u64; (wanted as usize).max(size_of::<T>()).div_ceil(8)];
    let mut long = question;
    *argsz(&mut long) = wanted.max(size_of_u32::<T>());
    let place = words.as_mut_ptr().cast::<T>();
    // SAFETY: `words` has at least `argsz` bytes, at least one `T`, is aligned to 8 and lives until the end
    // of the function.
    let head = unsafe {
        place.write(long);
        ioctl(fd, request, place.cast())?;
        place.read()
    };
    let bytes = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
    Ok(Info { head, bytes, first: first(&head) })
}

/// Maps an area for all drives of a container, writable if the area is. Its pages are pinned until they are
/// unmapped or the container's last group is closed.
pub(super) fn map(container: &VfioContainer, iova: u64, area: &Area) -> io::Result<()> {
    if area.is_writable() {
        // SAFETY: an `Area` is memory that devices may write to, accessed only through handles that expect
        // such writes. Its pages are pinned, so a later write of a drive does not reach pages of another
        // user.
        return unsafe { container.vfio_dma_map(iova, area.bytes(), area.base().as_ptr()) }.map_err(reason);
    }
    // `vfio-ioctls` supports only writable mappings.
    let mut map = vfio_iommu_type1_dma_map {
        argsz: size_of_u32::<vfio_iommu_type1_dma_map>(),
        flags: VFIO_DMA_MAP_FLAG_READ,
        vaddr: area.base().addr().get() as u64,
        iova,
        size: area.bytes() as u64,
    };
    // SAFETY: this ioctl reads a `vfio_iommu_type1_dma_map`, which is a local variable; a read-only mapping
    // cannot change memory.
    unsafe { ioctl(fd_of(container), IOMMU_MAP_DMA, (&raw mut map).cast()) }.map(drop)
}

pub(super) fn open_device(group: &File, name: &str) -> io::Result<File> {
    let name = CString::new(name)?;
    // SAFETY: this ioctl reads a zero-terminated string, which `name` owns.
    let fd = unsafe { ioctl(group.as_fd(), GROUP_GET_DEVICE_FD, name.as_ptr().cast_mut().cast()) }?;
    // SAFETY: the kernel has just opened this descriptor, and nothing else owns it.
    Ok(File::from(unsafe { OwnedFd::from_raw_fd(fd) }))
}

/// Makes the kernel signal `event` when it requests the removal of the device.
pub(super) fn arm_removal(device: &File, event: BorrowedFd<'_>) -> io::Result<()> {
    /// `vfio_irq_set`, followed by one descriptor.
    #[repr(C)]
    struct IrqSet {
        argsz: u32,
        flags: u32,
        index: u32,
        start: u32,
        count: u32,
        fd: c_int,
    }
    let mut set = IrqSet {
        argsz: size_of_u32::<IrqSet>(),
        flags: VFIO_IRQ_SET_DATA_EVENTFD | VFIO_IRQ_SET_ACTION_TRIGGER,
        index: VFIO_PCI_REQ_IRQ_INDEX,
        start: 0,
        count: 1,
        fd: event.as_raw_fd(),
    };
    // SAFETY: this ioctl reads a `vfio_irq_set` of `argsz` bytes, which `set` is; the kernel takes its own
    // reference to the event.
    unsafe { ioctl(device.as_fd(), DEVICE_SET_IRQS, (&raw mut set).cast()) }.map(drop)
}

pub(super) fn reset(device: &File) -> io::Result<()> {
    // SAFETY: this ioctl ignores its argument.
    unsafe { ioctl(device.as_fd(), DEVICE_RESET, std::ptr::null_mut()) }.map(drop)
}

fn size_of_u32<T>() -> u32 {
    u32::try_from(size_of::<T>()).expect("structures are small")
}

pub(super) struct Registers {
    base: NonNull<c_void>,
    bytes: usize,
}

// SAFETY: the address is only used to unmap the registers once, in `drop`, which any thread may do.
unsafe impl Send for Registers {}
// SAFETY: shared references only read the address and the length.
unsafe impl Sync for Registers {}

impl Registers {
    /// Maps `bytes` bytes of the device's file from `offset`, readable and writable.
    pub(super) fn map(device: &File, offset: u64, bytes: usize) -> io::Result<Registers> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address that the kernel chooses, so it replaces no other mapping.
        let base = unsafe {
            rustix::mm::mmap(std::ptr::null_mut(), bytes, protection, MapFlags::SHARED, device, offset)
        }?;
        let base = NonNull::new(base).ok_or_else(|| io::Error::other("mapped at 0"))?;
        Ok(Registers { base, bytes })
    }

    /// Returns a [`Bar`] of the registers that `of` finds in `keep`. It and its clones keep `keep` alive.
    pub(super) fn bar<T: Any + Send + Sync>(keep: &Arc<T>, of: fn(&T) -> &Registers) -> Bar {
        let Registers { base, bytes } = of(keep);
        // SAFETY: the registers are mapped readable and writable, page-aligned, until they are dropped.
        // `keep` owns them and is shared, so they cannot be moved out or replaced.
        unsafe { Bar::new(base.cast(), *bytes, Arc::<T>::clone(keep)) }
    }
}

impl Drop for Registers {
    fn drop(&mut self) {
        // SAFETY: this value made the mapping, and every `Bar` with its address keeps this value alive
        // (`bar`).
        let unmapped = unsafe { rustix::mm::munmap(self.base.as_ptr(), self.bytes) };
        if let Err(error) = unmapped {
            tracing::error!(%error, "cannot unmap the registers of a drive");
        }
    }
}
