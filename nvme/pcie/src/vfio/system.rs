//! The system calls of VFIO, each as a safe function.
//!
//! UNSAFETY: ioctls with structures as the kernel's header has them, and the mapping of a BAR.
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

/// The number of an ioctl: VFIO's carry neither size nor direction.
const fn number(offset: u32) -> u32 {
    (VFIO_TYPE as u32) << 8 | (VFIO_BASE + offset)
}
const SET_IOMMU: u32 = number(2);
const GROUP_GET_STATUS: u32 = number(3);
const GROUP_SET_CONTAINER: u32 = number(4);
const GROUP_GET_DEVICE_FD: u32 = number(6);
const DEVICE_GET_REGION_INFO: u32 = number(8);
const DEVICE_SET_IRQS: u32 = number(10);
const DEVICE_RESET: u32 = number(11);
const IOMMU_GET_INFO: u32 = number(12);
const IOMMU_MAP_DMA: u32 = number(13);

/// Answers of the kernel longer than this are not asked for.
const INFO_BYTES_MAX: u32 = 64 << 10;

/// One ioctl; what it returns.
///
/// # Safety
/// `argument` is what `request` wants, valid for reads and writes as long as the structure says it is.
unsafe fn ioctl(fd: BorrowedFd<'_>, request: u32, argument: *mut c_void) -> io::Result<c_int> {
    // SAFETY: an open descriptor; the argument is the caller's promise.
    match unsafe { libc::ioctl(fd.as_raw_fd(), c_ulong::from(request), argument) } {
        -1 => Err(io::Error::last_os_error()),
        value => Ok(value),
    }
}

/// The descriptor of a container, which the crate gives as a number only.
fn fd_of(container: &VfioContainer) -> BorrowedFd<'_> {
    // SAFETY: open for as long as the container is borrowed.
    unsafe { BorrowedFd::borrow_raw(container.as_raw_fd()) }
}

/// What the system said, out of an error of the crate.
pub(super) fn reason(error: VfioError) -> io::Error {
    if let VfioError::OpenContainer(source) = error {
        return source;
    }
    if let VfioError::IommuDmaMap(number) | VfioError::IommuDmaUnmap(number) = &error {
        return io::Error::from_raw_os_error(number.errno());
    }
    io::Error::other(error)
}

/// The flags of a group (`VFIO_GROUP_FLAGS_`).
pub(super) fn group_flags(group: &File) -> io::Result<u32> {
    let mut status = vfio_group_status { argsz: size_of_u32::<vfio_group_status>(), flags: 0 };
    // SAFETY: the structure that this call wants, of the size it says.
    unsafe { ioctl(group.as_fd(), GROUP_GET_STATUS, (&raw mut status).cast()) }?;
    Ok(status.flags)
}

/// Put a group into a container.
pub(super) fn set_container(group: &File, container: &VfioContainer) -> io::Result<()> {
    let mut fd: c_int = container.as_raw_fd();
    // SAFETY: the call reads one descriptor.
    unsafe { ioctl(group.as_fd(), GROUP_SET_CONTAINER, (&raw mut fd).cast()) }.map(drop)
}

/// Give a container with its first group in it an IOMMU of type 1, version 2.
pub(super) fn set_iommu(container: &VfioContainer) -> io::Result<()> {
    let kind = std::ptr::without_provenance_mut(VFIO_TYPE1v2_IOMMU as usize);
    // SAFETY: the argument is a number, no address.
    unsafe { ioctl(fd_of(container), SET_IOMMU, kind) }.map(drop)
}

/// What the IOMMU of a container can do.
pub(super) fn iommu_info(container: &VfioContainer) -> io::Result<Info<vfio_iommu_type1_info>> {
    let fd = fd_of(container);
    let size = size_of_u32::<vfio_iommu_type1_info>();
    // SAFETY: `info` makes the memory as long as the structure says.
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

/// What a region of a device is.
pub(super) fn region_info(device: &File, index: u32) -> io::Result<Info<vfio_region_info>> {
    let size = size_of_u32::<vfio_region_info>();
    // SAFETY: `info` makes the memory as long as the structure says.
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

/// Ask twice: how long the answer is, then for all of it.
///
/// # Safety
/// `T` is a structure of plain numbers that `request` takes and fills, `argsz` its member of that name, which
/// is at first the size of `T`.
unsafe fn info<T: Copy>(
    fd: BorrowedFd<'_>,
    request: u32,
    question: T,
    argsz: impl Fn(&mut T) -> &mut u32,
    first: impl Fn(&T) -> u32,
) -> io::Result<Info<T>> {
    let mut head = question;
    // SAFETY: as long as `argsz` says.
    unsafe { ioctl(fd, request, (&raw mut head).cast()) }?;
    let wanted = *argsz(&mut head);
    if first(&head) == 0 && wanted <= size_of_u32::<T>() {
        return Ok(Info { head, bytes: Vec::new(), first: 0 });
    }
    if wanted > INFO_BYTES_MAX {
        return Err(io::Error::other(format!("an answer of {wanted} bytes, at most {INFO_BYTES_MAX}")));
    }
    // Words of 8, so that it is aligned as any of these structures.
    let mut words = vec![0_u64; (wanted as usize).max(size_of::<T>()).div_ceil(8)];
    let mut long = question;
    *argsz(&mut long) = wanted.max(size_of_u32::<T>());
    let place = words.as_mut_ptr().cast::<T>();
    // SAFETY: the words are as many bytes as `argsz` says, at least one `T`, and aligned to 8.
    let head = unsafe {
        place.write(long);
        ioctl(fd, request, place.cast())?;
        place.read()
    };
    let bytes = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
    Ok(Info { head, bytes, first: first(&head) })
}

/// Let the drives of a container read an area and, where it is writable, write to it. Its pages are pinned
/// until it is unmapped, or the container lets go of its last group.
pub(super) fn map(container: &VfioContainer, iova: u64, area: &Area) -> io::Result<()> {
    if area.is_writable() {
        // SAFETY: an area is memory for devices, seen through handles that know of them; its pages are
        // pinned, so what a drive writes later than that lands in pages without another user.
        return unsafe { container.vfio_dma_map(iova, area.bytes(), area.base().as_ptr()) }.map_err(reason);
    }
    // The crate maps writable only.
    let mut map = vfio_iommu_type1_dma_map {
        argsz: size_of_u32::<vfio_iommu_type1_dma_map>(),
        flags: VFIO_DMA_MAP_FLAG_READ,
        vaddr: area.base().addr().get() as u64,
        iova,
        size: area.bytes() as u64,
    };
    // SAFETY: the structure that this call wants; a device that only reads changes nothing.
    unsafe { ioctl(fd_of(container), IOMMU_MAP_DMA, (&raw mut map).cast()) }.map(drop)
}

/// Open the device of this name out of its group.
pub(super) fn open_device(group: &File, name: &str) -> io::Result<File> {
    let name = CString::new(name)?;
    // SAFETY: the call reads a string that ends in a zero.
    let fd = unsafe { ioctl(group.as_fd(), GROUP_GET_DEVICE_FD, name.as_ptr().cast_mut().cast()) }?;
    // SAFETY: a descriptor that the kernel just made for us.
    Ok(File::from(unsafe { OwnedFd::from_raw_fd(fd) }))
}

/// Have `event` counted up whenever the kernel wants the device back.
pub(super) fn arm_removal(device: &File, event: BorrowedFd<'_>) -> io::Result<()> {
    /// `vfio_irq_set` with one descriptor behind it.
    #[repr(C)]
    struct Set {
        argsz: u32,
        flags: u32,
        index: u32,
        start: u32,
        count: u32,
        fd: c_int,
    }
    let mut set = Set {
        argsz: size_of_u32::<Set>(),
        flags: VFIO_IRQ_SET_DATA_EVENTFD | VFIO_IRQ_SET_ACTION_TRIGGER,
        index: VFIO_PCI_REQ_IRQ_INDEX,
        start: 0,
        count: 1,
        fd: event.as_raw_fd(),
    };
    // SAFETY: the structure that this call wants, of the size it says; the kernel takes a reference of its
    // own to the event.
    unsafe { ioctl(device.as_fd(), DEVICE_SET_IRQS, (&raw mut set).cast()) }.map(drop)
}

/// Reset the function.
pub(super) fn reset(device: &File) -> io::Result<()> {
    // SAFETY: the call has no argument.
    unsafe { ioctl(device.as_fd(), DEVICE_RESET, std::ptr::null_mut()) }.map(drop)
}

fn size_of_u32<T>() -> u32 {
    u32::try_from(size_of::<T>()).expect("structures are small")
}

/// The registers of a device, mapped until this is dropped.
pub(super) struct Registers {
    base: NonNull<c_void>,
    bytes: usize,
}

// SAFETY: an address and a length; nothing is done with them but unmapping, once.
unsafe impl Send for Registers {}
// SAFETY: as above.
unsafe impl Sync for Registers {}

impl Registers {
    /// Map `bytes` of the device from `offset` on.
    pub(super) fn map(device: &File, offset: u64, bytes: usize) -> io::Result<Registers> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping, where the kernel likes.
        let base = unsafe {
            rustix::mm::mmap(std::ptr::null_mut(), bytes, protection, MapFlags::SHARED, device, offset)
        }?;
        let base = NonNull::new(base).ok_or_else(|| io::Error::other("mapped at 0"))?;
        Ok(Registers { base, bytes })
    }

    /// The registers that `of` says are in `keep`, which stays as long as the answer or a clone of it.
    pub(super) fn bar<T: Any + Send + Sync>(keep: &Arc<T>, of: fn(&T) -> &Registers) -> Bar {
        let Registers { base, bytes } = of(keep);
        // SAFETY: mapped readable and writable, page-aligned, until these registers are dropped: they are
        // lent out of `keep`, which has no way to replace them (it is shared).
        unsafe { Bar::new(base.cast(), *bytes, Arc::<T>::clone(keep)) }
    }
}

impl Drop for Registers {
    fn drop(&mut self) {
        // SAFETY: our mapping, and the last who knows its address is gone (`bar`).
        let unmapped = unsafe { rustix::mm::munmap(self.base.as_ptr(), self.bytes) };
        if let Err(error) = unmapped {
            tracing::error!(%error, "cannot unmap the registers of a drive");
        }
    }
}
