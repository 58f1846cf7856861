//! [`CmChannel`]: events of the connection manager.
//!
//! UNSAFETY: a channel is destroyed after its identifiers. librdmacm changes an identifier while it takes an
//! event of it, so taking events and using an identifier both need the channel's lock.
#![expect(unsafe_code, reason = "calls librdmacm")]

use std::cell::Cell;
use std::marker::PhantomData;
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use arrayvec::ArrayVec;
use rdma_sys as sys;
use rdma_sys::rdma_cm_event_type as kind;

use crate::cm_id::{CmId, CmToken};
use crate::device::set_nonblocking;
use crate::error::VerbsError;

#[derive(Debug)]
pub(crate) struct ChannelInner {
    pub(crate) raw: *mut sys::rdma_event_channel,
    lock: Mutex<()>,
}

// SAFETY: the channel itself is a descriptor, and its identifiers are used under the lock.
unsafe impl Send for ChannelInner {}
// SAFETY: as above.
unsafe impl Sync for ChannelInner {}

impl ChannelInner {
    pub(crate) fn lock(&self) -> MutexGuard<'_, ()> {
        self.lock.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for ChannelInner {
    fn drop(&mut self) {
        // SAFETY: ours, and its identifiers held it.
        unsafe { sys::rdma_destroy_event_channel(self.raw) };
    }
}

/// Where the events of identifiers come out. Its descriptor is readable when there is one.
#[derive(Debug)]
pub struct CmChannel {
    pub(crate) inner: Arc<ChannelInner>,
    _not_sync: PhantomData<Cell<()>>,
}

/// Most bytes of private data in an event.
pub const PRIVATE_DATA_BYTES_MAX: usize = 255;

/// What happened to an identifier.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum CmEventKind {
    /// [`CmId::resolve_address`] is done; the identifier has a device.
    AddressResolved,
    /// It failed.
    AddressError,
    /// [`CmId::resolve_route`] is done.
    RouteResolved,
    /// It failed.
    RouteError,
    /// Somebody wants to connect; `new_id` is the identifier for it.
    ConnectRequest,
    /// The connection could not be made.
    ConnectError,
    /// No answer.
    Unreachable,
    /// The other side refused; private data may say why. After `Established` too, where the accepting side
    /// dropped its identifier before it heard of the connection.
    Rejected,
    /// There is a connection; on the connecting side with the private data of the accepting one.
    Established,
    /// The connection has ended.
    Disconnected,
    /// The device is about to go: identifiers and all that is on it are to be dropped.
    DeviceRemoval,
    /// The network device that the identifier is bound to has another hardware address: a bond has gone over
    /// to its other port. A listener hears nothing any more.
    AddressChange,
    /// Another, in librdmacm's numbers.
    Other(u32),
}

impl CmEventKind {
    fn new(number: kind::Type) -> CmEventKind {
        match number {
            kind::RDMA_CM_EVENT_ADDR_RESOLVED => CmEventKind::AddressResolved,
            kind::RDMA_CM_EVENT_ADDR_ERROR => CmEventKind::AddressError,
            kind::RDMA_CM_EVENT_ROUTE_RESOLVED => CmEventKind::RouteResolved,
            kind::RDMA_CM_EVENT_ROUTE_ERROR => CmEventKind::RouteError,
            kind::RDMA_CM_EVENT_CONNECT_REQUEST => CmEventKind::ConnectRequest,
            kind::RDMA_CM_EVENT_CONNECT_ERROR => CmEventKind::ConnectError,
            kind::RDMA_CM_EVENT_UNREACHABLE => CmEventKind::Unreachable,
            kind::RDMA_CM_EVENT_REJECTED => CmEventKind::Rejected,
            kind::RDMA_CM_EVENT_ESTABLISHED => CmEventKind::Established,
            kind::RDMA_CM_EVENT_DISCONNECTED => CmEventKind::Disconnected,
            kind::RDMA_CM_EVENT_DEVICE_REMOVAL => CmEventKind::DeviceRemoval,
            kind::RDMA_CM_EVENT_ADDR_CHANGE => CmEventKind::AddressChange,
            other => CmEventKind::Other(other),
        }
    }

    /// librdmacm fills in the parameters of a connection.
    fn has_parameters(self) -> bool {
        matches!(self, CmEventKind::ConnectRequest | CmEventKind::Established | CmEventKind::Rejected)
    }
}

/// An event, copied and acknowledged.
#[derive(Debug)]
pub struct CmEvent {
    /// What happened.
    pub kind: CmEventKind,
    /// To which identifier. Of a connection request: the new one.
    pub id: CmToken,
    /// Of a connection request: who listened.
    pub listener: Option<CmToken>,
    /// Of a connection request: the new identifier. It is the receiver's; dropping it refuses.
    pub new_id: Option<CmId>,
    /// Why something failed: a negative system error, or the reason of a reject.
    pub status: i32,
    /// What the other side said, often with zeroes behind.
    pub private_data: ArrayVec<u8, PRIVATE_DATA_BYTES_MAX>,
    /// READs that this side may have to serve at once: what the other side's `initiator_depth` says.
    pub responder_resources: u8,
    /// READs that this side may have outstanding at once: what the other side's `responder_resources` says.
    pub initiator_depth: u8,
}

impl CmChannel {
    /// Open one, which does not block.
    ///
    /// # Errors
    /// No RDMA here (`ENODEV`), or no more descriptors.
    pub fn new() -> Result<CmChannel, VerbsError> {
        // SAFETY: takes nothing.
        let raw = unsafe { sys::rdma_create_event_channel() };
        let raw = VerbsError::made("rdma_create_event_channel", raw)?;
        let inner = Arc::new(ChannelInner { raw, lock: Mutex::new(()) });
        // SAFETY: ours.
        set_nonblocking(unsafe { (*raw).fd })?;
        Ok(CmChannel { inner, _not_sync: PhantomData })
    }

    /// The next event, if one is there. Costs a system call: wait for the descriptor.
    ///
    /// # Errors
    /// The library failed; the event, if there was one, is lost.
    pub fn next_event(&self) -> Result<Option<CmEvent>, VerbsError> {
        let _lock = self.inner.lock();
        let mut raw = ptr::null_mut();
        // SAFETY: our channel; the pointer is written.
        if unsafe { sys::rdma_get_cm_event(self.inner.raw, &raw mut raw) } != 0 {
            let error = VerbsError::last("rdma_get_cm_event");
            let is_none = error.errno == libc::EAGAIN;
            return if is_none { Ok(None) } else { Err(error) };
        }
        // SAFETY: an event that is not acknowledged yet.
        let event = unsafe { self.copy(raw) };
        // SAFETY: taken above, acknowledged once.
        VerbsError::check("rdma_ack_cm_event", unsafe { sys::rdma_ack_cm_event(raw) })?;
        Ok(Some(event))
    }

    /// # Safety
    /// The event was taken from this channel under its lock, and is not acknowledged.
    unsafe fn copy(&self, raw: *mut sys::rdma_cm_event) -> CmEvent {
        // SAFETY: by contract; its identifiers are alive until it is acknowledged.
        let (number, status, id, listener) =
            unsafe { ((*raw).event, (*raw).status, (*raw).id, (*raw).listen_id) };
        let kind = CmEventKind::new(number);
        let new_id = (kind == CmEventKind::ConnectRequest).then(|| {
            // SAFETY: librdmacm made it for us, and it has no owner yet.
            unsafe { CmId::adopt(id, &self.inner) }
        });
        let mut event = CmEvent {
            kind,
            // SAFETY: alive, see above; each identifier carries its token.
            id: unsafe { CmToken::of(id) },
            // SAFETY: as above.
            listener: (!listener.is_null()).then(|| unsafe { CmToken::of(listener) }),
            new_id,
            status,
            private_data: ArrayVec::new(),
            responder_resources: 0,
            initiator_depth: 0,
        };
        if kind.has_parameters() {
            // SAFETY: an event of a connection has these parameters, and as many bytes of private data.
            unsafe {
                let parameters = &raw const (*raw).param.conn;
                event.responder_resources = (*parameters).responder_resources;
                event.initiator_depth = (*parameters).initiator_depth;
                let (data, bytes) = ((*parameters).private_data, (*parameters).private_data_len);
                if !data.is_null() {
                    let data = std::slice::from_raw_parts(data.cast::<u8>(), usize::from(bytes));
                    event.private_data.extend(data.iter().copied());
                }
            }
        }
        event
    }
}

impl AsFd for CmChannel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: open as long as the channel.
        unsafe { BorrowedFd::borrow_raw((*self.inner.raw).fd) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_without_rdma_says_so() {
        if std::fs::read_dir("/sys/class/infiniband").is_ok_and(|mut devices| devices.next().is_some()) {
            return spindle_skip::skip("this machine has RDMA");
        }
        let error = CmChannel::new().expect_err("no RDMA");
        assert_eq!(error.to_string(), "rdma_create_event_channel: No such device (19)");
    }

    #[test]
    fn kinds_are_the_library_s() {
        assert_eq!(CmEventKind::new(4), CmEventKind::ConnectRequest);
        assert_eq!(CmEventKind::new(8), CmEventKind::Rejected);
        assert_eq!(CmEventKind::new(14), CmEventKind::AddressChange);
        assert_eq!(CmEventKind::new(13), CmEventKind::Other(13));
        assert!(!CmEventKind::Disconnected.has_parameters());
    }
}
