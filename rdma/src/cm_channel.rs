//! [`CmChannel`]: the event channel of the connection manager, and its events ([`CmEvent`]).
//!
//! UNSAFETY: a channel is destroyed after its identifiers. librdmacm changes an identifier while it returns
//! an event of that identifier. So reading events and using an identifier both require the channel's lock.
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
use crate::device::{Device, set_nonblocking};
use crate::error::VerbsError;

#[derive(Debug)]
pub(crate) struct ChannelInner {
    pub(crate) raw: *mut sys::rdma_event_channel,
    lock: Mutex<()>,
}

// SAFETY: the channel is only a file descriptor, and all calls on its identifiers hold `lock`.
unsafe impl Send for ChannelInner {}
// SAFETY: as for `Send`: `lock` serializes the threads.
unsafe impl Sync for ChannelInner {}

impl ChannelInner {
    pub(crate) fn lock(&self) -> MutexGuard<'_, ()> {
        self.lock.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for ChannelInner {
    fn drop(&mut self) {
        // SAFETY: created by `CmChannel::new` and destroyed only here. Each identifier holds an `Arc` of this
        // struct, so none is left.
        unsafe { sys::rdma_destroy_event_channel(self.raw) };
    }
}

/// An event channel: reports the events of its identifiers. Its descriptor is readable while one is pending.
#[derive(Debug)]
pub struct CmChannel {
    pub(crate) inner: Arc<ChannelInner>,
    _not_sync: PhantomData<Cell<()>>,
}

const CHANNEL_VERB: &str = "rdma_create_event_channel";

/// Maximum bytes of private data in an event: the length has 8 bits.
pub const PRIVATE_DATA_BYTES_MAX: usize = 255;

/// Kind of an event, as `rdma_cm_event_type`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum CmEventKind {
    /// [`CmId::resolve_address`] has succeeded; the identifier is bound to a device.
    AddressResolved,
    /// [`CmId::resolve_address`] has failed.
    AddressError,
    /// [`CmId::resolve_route`] has succeeded.
    RouteResolved,
    /// [`CmId::resolve_route`] has failed.
    RouteError,
    /// A peer requests a connection on a listener; [`CmEvent::new_id`] is the identifier of the connection.
    ConnectRequest,
    /// Connecting failed on this side or at the peer.
    ConnectError,
    /// The peer did not answer the connection request.
    Unreachable,
    /// The peer has rejected the request; private data may contain the reason. May follow `Established` if
    /// the accepting side dropped its identifier before its own `Established`.
    Rejected,
    /// The connection is established; on the connecting side with the private data of the accepting side.
    Established,
    /// The connection was disconnected by either side or by an error.
    Disconnected,
    /// The device is being removed: all identifiers and other objects of the device must be dropped.
    DeviceRemoval,
    /// The network device of the identifier has a new hardware address, such as after the failover of a bond.
    /// A listener receives no more requests.
    AddressChange,
    /// Any other `rdma_cm_event_type`.
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

    /// Returns true if librdmacm sets the connection parameters in an event of this kind.
    fn has_parameters(self) -> bool {
        matches!(self, CmEventKind::ConnectRequest | CmEventKind::Established | CmEventKind::Rejected)
    }
}

/// An event of the connection manager, copied and already acknowledged.
#[derive(Debug)]
pub struct CmEvent {
    /// Kind of the event.
    pub kind: CmEventKind,
    /// Identifier that the event is for; with a connection request the token of `new_id`.
    pub id: CmToken,
    /// Only with a connection request: the listener.
    pub listener: Option<CmToken>,
    /// Only with a connection request: the new identifier. Dropping it rejects the request.
    pub new_id: Option<CmId>,
    /// 0, or the reason of a failure: a negated error number, or a reject reason of the connection manager.
    pub status: i32,
    /// The peer's private data; may be padded with zeroes. Set only in `ConnectRequest`, `Established` and
    /// `Rejected`, else empty.
    pub private_data: ArrayVec<u8, PRIVATE_DATA_BYTES_MAX>,
    /// Maximum READs of the peer that this side must serve at once: the peer's `initiator_depth`. Set in the
    /// same events as `private_data`, else 0.
    pub responder_resources: u8,
    /// Maximum READs that this side may have outstanding: the peer's `responder_resources`. Set in the same
    /// events as `private_data`, else 0.
    pub initiator_depth: u8,
}

impl CmEvent {
    /// Returns the error number of a failure; `None`: the status is none.
    #[must_use]
    pub fn errno(&self) -> Option<i32> {
        Some(self.status.saturating_neg()).filter(|errno| *errno > 0)
    }
}

impl CmChannel {
    /// Creates a nonblocking event channel.
    ///
    /// # Errors
    /// The machine has no RDMA ([`VerbsError::is_no_rdma`]), or too many files are open.
    pub fn new() -> Result<CmChannel, VerbsError> {
        // SAFETY: has no arguments and no preconditions.
        let raw = unsafe { sys::rdma_create_event_channel() };
        let raw = VerbsError::check_pointer(CHANNEL_VERB, raw)?;
        let inner = Arc::new(ChannelInner { raw, lock: Mutex::new(()) });
        // SAFETY: `raw` is not null, and `inner` keeps the channel alive.
        set_nonblocking(unsafe { (*raw).fd })?;
        Ok(CmChannel { inner, _not_sync: PhantomData })
    }

    /// As [`CmChannel::new`], for repeated attempts: makes no librdmacm call while the kernel lists no
    /// device. Such a call may have the kernel start modprobe each time, and waits for it.
    ///
    /// # Errors
    /// Those of [`CmChannel::new`]; ENODEV while the kernel lists no device.
    pub fn if_listed() -> Result<CmChannel, VerbsError> {
        if Device::is_any_listed() {
            CmChannel::new()
        } else {
            Err(VerbsError::new(CHANNEL_VERB, libc::ENODEV))
        }
    }

    /// Reads and acknowledges the next pending event; `None` if no event is pending. Costs a system call, so
    /// call it when the descriptor is readable.
    ///
    /// # Errors
    /// The read or the acknowledgement failed. If the acknowledgement failed, the event is lost.
    pub fn next_event(&self) -> Result<Option<CmEvent>, VerbsError> {
        let _lock = self.inner.lock();
        let mut raw = ptr::null_mut();
        // SAFETY: `self` keeps the channel alive; `raw` is written on success only.
        if unsafe { sys::rdma_get_cm_event(self.inner.raw, &raw mut raw) } != 0 {
            let error = VerbsError::last("rdma_get_cm_event");
            let is_none = error.errno == libc::EAGAIN;
            return if is_none { Ok(None) } else { Err(error) };
        }
        // SAFETY: the event was just read from this channel under its lock, and is acknowledged below.
        let event = unsafe { self.copy(raw) };
        // SAFETY: the event was read above and is acknowledged only here.
        VerbsError::check("rdma_ack_cm_event", unsafe { sys::rdma_ack_cm_event(raw) })?;
        Ok(Some(event))
    }

    /// # Safety
    /// The event was read from this channel under its lock, which is still held, and is not acknowledged.
    unsafe fn copy(&self, raw: *mut sys::rdma_cm_event) -> CmEvent {
        // SAFETY: the caller guarantees an unacknowledged event. The event is valid, and its identifiers
        // exist, until it is acknowledged.
        let (number, status, id, listener) =
            unsafe { ((*raw).event, (*raw).status, (*raw).id, (*raw).listen_id) };
        let kind = CmEventKind::new(number);
        let new_id = (kind == CmEventKind::ConnectRequest).then(|| {
            // SAFETY: librdmacm has created the identifier for this event on this channel, whose lock is
            // held, and nothing else owns it.
            unsafe { CmId::adopt(id, &self.inner) }
        });
        let mut event = CmEvent {
            kind,
            // SAFETY: the identifier exists until the event is acknowledged; `CmId` has set a token as its
            // context.
            id: unsafe { CmToken::of(id) },
            // SAFETY: as for `id`.
            listener: (!listener.is_null()).then(|| unsafe { CmToken::of(listener) }),
            new_id,
            status,
            private_data: ArrayVec::new(),
            responder_resources: 0,
            initiator_depth: 0,
        };
        if kind.has_parameters() {
            // SAFETY: in an event of this kind the union contains `conn`, and `private_data` is null or has
            // `private_data_len` bytes.
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
        // SAFETY: `inner` keeps the channel and its descriptor open while `self` is borrowed.
        unsafe { BorrowedFd::borrow_raw((*self.inner.raw).fd) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_without_rdma_says_so() {
        if std::fs::read_dir("/sys/class/infiniband").is_ok_and(|mut devices| devices.next().is_some()) {
            return spindle_tests_skip::skip("this machine has RDMA");
        }
        for error in [CmChannel::new(), CmChannel::if_listed()].map(|it| it.expect_err("no RDMA")) {
            assert_eq!(error.to_string(), "rdma_create_event_channel: No such device (19)");
            assert!(error.is_no_rdma());
        }
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
