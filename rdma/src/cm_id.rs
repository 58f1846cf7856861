//! [`CmId`]: a connection manager identifier, of a connection or a listener. [`CmToken`] names it in events;
//! [`ConnectParams`] are the parameters of a connection.
//!
//! UNSAFETY: an identifier is used only under the lock of its channel (see `cm_channel`), and destroyed after
//! its queue pair and before its channel.
#![expect(unsafe_code, reason = "calls librdmacm")]

use std::cell::Cell;
use std::ffi::CStr;
use std::marker::PhantomData;
use std::net::SocketAddr;
use std::ptr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use libc::c_int;
use rdma_sys as sys;

use crate::address::{self, RawAddress};
use crate::cm_channel::{ChannelInner, CmChannel};
use crate::device::Device;
use crate::error::VerbsError;
use crate::queue_pair::{QueuePair, QueuePairConfig};

/// `RDMA_OPTION_ID`. rdma-sys does not bind this and the next constant, as they are members of unnamed enums.
const OPTION_ID: c_int = 0;
/// `RDMA_OPTION_ID_AFONLY`: an IPv6 identifier does not take IPv4 connections.
const OPTION_ID_AFONLY: c_int = 2;

/// Token of an identifier in events, unique in the process and never reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct CmToken(usize);

impl CmToken {
    /// Returns a token that was not returned before.
    #[must_use]
    pub fn next() -> CmToken {
        static NEXT: AtomicUsize = AtomicUsize::new(1);
        CmToken(NEXT.fetch_add(1, Ordering::Relaxed))
    }

    /// Returns the token as the user context of an identifier.
    fn context(self) -> *mut libc::c_void {
        ptr::without_provenance_mut(self.0)
    }

    /// # Safety
    /// The identifier exists.
    pub(crate) unsafe fn of(raw: *mut sys::rdma_cm_id) -> CmToken {
        // SAFETY: the caller guarantees that the identifier exists.
        CmToken(unsafe { (*raw).context }.addr())
    }
}

/// Connection parameters, as `rdma_conn_param`.
#[derive(Debug, Clone, Copy, Default)]
pub struct ConnectParams<'a> {
    /// Private data for the peer's event; at most 56 bytes for connect and 196 for accept.
    pub private_data: &'a [u8],
    /// Maximum READs of the peer that this side serves at once. 255: librdmacm uses the device's maximum.
    pub responder_resources: u8,
    /// Maximum READs that this side has outstanding. 255: librdmacm uses the device's maximum.
    pub initiator_depth: u8,
}

impl ConnectParams<'_> {
    fn raw(&self, verb: &'static str) -> Result<sys::rdma_conn_param, VerbsError> {
        Ok(sys::rdma_conn_param {
            private_data: self.private_data.as_ptr().cast(),
            private_data_len: length(self.private_data, verb)?,
            responder_resources: self.responder_resources,
            initiator_depth: self.initiator_depth,
            flow_control: 1,
            // 7 is the maximum of both. For RNR NAK it means unlimited retries.
            retry_count: 7,
            rnr_retry_count: 7,
            srq: 0,
            qp_num: 0,
        })
    }
}

fn length(private_data: &[u8], verb: &'static str) -> Result<u8, VerbsError> {
    u8::try_from(private_data.len()).map_err(|_| VerbsError::new(verb, libc::EINVAL))
}

fn milliseconds(timeout: Duration) -> c_int {
    c_int::try_from(timeout.as_millis()).unwrap_or(c_int::MAX)
}

#[derive(Debug)]
pub(crate) struct IdInner {
    raw: *mut sys::rdma_cm_id,
    token: CmToken,
    /// The channel that reports the identifier's events.
    channel: Mutex<Arc<ChannelInner>>,
}

// SAFETY: all uses of `raw` hold the lock of its channel; the other fields are `Send` and `Sync`.
unsafe impl Send for IdInner {}
// SAFETY: as for `Send`: the channel's lock serializes the threads.
unsafe impl Sync for IdInner {}

impl IdInner {
    /// Calls `call` with the identifier under its channel's lock: no other thread reads its events meanwhile.
    pub(crate) fn with<R>(&self, call: impl FnOnce(*mut sys::rdma_cm_id) -> R) -> R {
        let channel = self.channel.lock().unwrap_or_else(PoisonError::into_inner);
        let _lock = channel.lock();
        call(self.raw)
    }

    /// As [`IdInner::with`], for a verb that dereferences the identifier's device without a check; with
    /// `needs_queue` also its queue pair. Returns EINVAL if one of these is missing.
    fn with_parts(
        &self,
        verb: &'static str,
        needs_queue: bool,
        call: impl FnOnce(*mut sys::rdma_cm_id) -> c_int,
    ) -> Result<(), VerbsError> {
        self.with(|raw| {
            // SAFETY: the identifier exists as long as `self`, and its channel's lock is held.
            let is_missing = unsafe { (*raw).verbs.is_null() || needs_queue && (*raw).qp.is_null() };
            VerbsError::check(verb, if is_missing { libc::EINVAL } else { call(raw) })
        })
    }

    /// Moves the identifier to the channel `to`. No effect if it is there already.
    fn migrate(&self, to: &Arc<ChannelInner>) -> Result<(), VerbsError> {
        let mut channel = self.channel.lock().unwrap_or_else(PoisonError::into_inner);
        if Arc::ptr_eq(&channel, to) {
            return Ok(());
        }
        let from = Arc::clone(&channel);
        // Channels are locked in the order of addresses, so that two migrations cannot deadlock.
        let is_first = Arc::as_ptr(&from) < Arc::as_ptr(to);
        let (first, second) = if is_first { (&from, to) } else { (to, &from) };
        let (_first, _second) = (first.lock(), second.lock());
        // SAFETY: `self` and the two `Arc`s keep identifier and channels alive; both locks are held, so no
        // thread reads events.
        VerbsError::check("rdma_migrate_id", unsafe { sys::rdma_migrate_id(self.raw, to.raw) })?;
        *channel = Arc::clone(to);
        Ok(())
    }
}

impl Drop for IdInner {
    fn drop(&mut self) {
        // SAFETY: destroyed only here. A queue pair holds an `Arc` of this struct, so none is left. Every
        // event was acknowledged when it was read.
        self.with(|raw| unsafe { sys::rdma_destroy_id(raw) });
    }
}

/// A connection manager identifier of the reliable connected type (`RDMA_PS_TCP`).
///
/// The queue pair of an identifier holds a reference to the identifier. The identifier is destroyed when both
/// are dropped, and may have events until then.
#[derive(Debug)]
pub struct CmId {
    inner: Arc<IdInner>,
    _not_sync: PhantomData<Cell<()>>,
}

impl CmId {
    /// Creates an identifier on a channel.
    ///
    /// # Errors
    /// The kernel cannot create another identifier, or the machine has no RDMA.
    pub fn new(channel: &CmChannel) -> Result<CmId, VerbsError> {
        let token = CmToken::next();
        let mut raw = ptr::null_mut();
        let space = sys::rdma_port_space::RDMA_PS_TCP;
        let inner = &channel.inner;
        // SAFETY: the channel exists as long as the identifier, which holds an `Arc` of it; `raw` is written
        // on success only.
        VerbsError::check("rdma_create_id", unsafe {
            sys::rdma_create_id(inner.raw, &raw mut raw, token.context(), space)
        })?;
        let channel = Mutex::new(Arc::clone(inner));
        Ok(CmId { inner: Arc::new(IdInner { raw, token, channel }), _not_sync: PhantomData })
    }

    /// Takes ownership of the identifier of a connection request.
    ///
    /// # Safety
    /// The identifier is on this channel, whose lock is held, and has no other owner.
    pub(crate) unsafe fn adopt(raw: *mut sys::rdma_cm_id, channel: &Arc<ChannelInner>) -> CmId {
        let token = CmToken::next();
        // SAFETY: the caller guarantees a live identifier without another owner, under the lock. Its context
        // is a copy of the listener's, which is replaced here.
        unsafe { (*raw).context = token.context() };
        let channel = Mutex::new(Arc::clone(channel));
        CmId { inner: Arc::new(IdInner { raw, token, channel }), _not_sync: PhantomData }
    }

    /// Returns the token of this identifier in events.
    #[must_use]
    pub fn token(&self) -> CmToken {
        self.inner.token
    }

    /// Binds the identifier to `address`; [`CmId::listen`] listens there. An IPv6 address does not include
    /// IPv4, so both can be bound to the same port. Port 0: the kernel selects, see [`CmId::local_address`].
    ///
    /// # Errors
    /// The address is in use, or no RDMA device has it.
    pub fn bind(&self, address: SocketAddr) -> Result<(), VerbsError> {
        let is_v6 = address.is_ipv6();
        let mut address = RawAddress::new(address);
        self.inner.with(|raw| {
            if is_v6 {
                let mut is_only: c_int = 1;
                let value = (&raw mut is_only).cast();
                // SAFETY: `with` passes a live identifier; `value` is an int on the stack, which the call
                // only reads.
                VerbsError::check("rdma_set_option", unsafe {
                    sys::rdma_set_option(raw, OPTION_ID, OPTION_ID_AFONLY, value, size_of::<c_int>())
                })?;
            }
            // SAFETY: `with` passes a live identifier; the address outlives the call.
            VerbsError::check("rdma_bind_addr", unsafe { sys::rdma_bind_addr(raw, address.as_mut_ptr()) })
        })
    }

    /// Listens on the bound address. Connection requests are reported as events of the channel.
    pub fn listen(&self, backlog: u32) -> Result<(), VerbsError> {
        let backlog = c_int::try_from(backlog).unwrap_or(c_int::MAX);
        // SAFETY: `with` passes a live identifier.
        self.inner.with(|raw| VerbsError::check("rdma_listen", unsafe { sys::rdma_listen(raw, backlog) }))
    }

    /// Resolves the address `to` and binds the identifier to the device that reaches it. Ends in
    /// `AddressResolved` or `AddressError`. `from`: source address; `None`: the kernel chooses it.
    pub fn resolve_address(
        &self,
        from: Option<SocketAddr>,
        to: SocketAddr,
        timeout: Duration,
    ) -> Result<(), VerbsError> {
        let mut from = from.map(RawAddress::new);
        let mut to = RawAddress::new(to);
        let from = from.as_mut().map_or(ptr::null_mut(), RawAddress::as_mut_ptr);
        // SAFETY: `with` passes a live identifier; both addresses outlive the call, and `from` may be null.
        VerbsError::check(
            "rdma_resolve_addr",
            self.inner.with(|raw| unsafe {
                sys::rdma_resolve_addr(raw, from, to.as_mut_ptr(), milliseconds(timeout))
            }),
        )
    }

    /// Resolves the route; the address must be resolved. Ends in `RouteResolved` or `RouteError`.
    pub fn resolve_route(&self, timeout: Duration) -> Result<(), VerbsError> {
        let timeout = milliseconds(timeout);
        // SAFETY: `with_parts` passes a live identifier with a device.
        self.inner
            .with_parts("rdma_resolve_route", false, |raw| unsafe { sys::rdma_resolve_route(raw, timeout) })
    }

    /// Returns the device of `devices` to which this identifier is bound. `None`: it is bound to no device of
    /// the slice.
    #[must_use]
    pub fn device<'a>(&self, devices: &'a [Arc<Device>]) -> Option<&'a Arc<Device>> {
        devices.iter().find(|device| device.is_of(self))
    }

    /// Returns the name of the device to which this identifier is bound, even if the device was removed.
    /// `None`: the identifier is not bound to a device.
    #[must_use]
    pub fn device_name(&self) -> Option<String> {
        self.inner.with(|raw| {
            // SAFETY: `with` passes a live identifier. It keeps its device context open, and the device's
            // name is a C string in it.
            unsafe {
                let context = (*raw).verbs;
                let has_device = !context.is_null();
                has_device.then(|| {
                    let name = sys::ibv_get_device_name((*context).device);
                    CStr::from_ptr(name).to_string_lossy().into_owned()
                })
            }
        })
    }

    /// Returns the local address; `None` before the identifier is bound.
    #[must_use]
    pub fn local_address(&self) -> Option<SocketAddr> {
        // SAFETY: `with` passes a live identifier; the union contains a `sockaddr_storage`.
        self.inner.with(|raw| unsafe { address::read((&raw const (*raw).route.addr.src_addr_union).cast()) })
    }

    /// Returns the peer's address; `None` before [`CmId::resolve_address`], and on a listener.
    #[must_use]
    pub fn peer_address(&self) -> Option<SocketAddr> {
        // SAFETY: `with` passes a live identifier; the union contains a `sockaddr_storage`.
        self.inner.with(|raw| unsafe { address::read((&raw const (*raw).route.addr.dst_addr_union).cast()) })
    }

    /// Moves the identifier with its pending events to `channel`.
    pub fn migrate(&self, channel: &CmChannel) -> Result<(), VerbsError> {
        self.inner.migrate(&channel.inner)
    }

    /// Creates the identifier's queue pair on `device`, to which the identifier must be bound. Receives may
    /// be posted at once, sends once the connection is established.
    ///
    /// # Errors
    /// The identifier is bound to another device or has a queue pair already, a queue of `config` is on
    /// another device, or a limit is exceeded.
    pub fn create_queue_pair(
        &self,
        device: &Arc<Device>,
        config: &QueuePairConfig<'_>,
    ) -> Result<QueuePair, VerbsError> {
        QueuePair::new(&self.inner, device, config)
    }

    /// Connects over the resolved route. Ends in `Established`, `Rejected`, `Unreachable` or `ConnectError`.
    ///
    /// # Errors
    /// There is no queue pair, too much private data, or more READs than the device supports.
    pub fn connect(&self, parameters: &ConnectParams<'_>) -> Result<(), VerbsError> {
        const VERB: &str = "rdma_connect";
        let mut parameters = parameters.raw(VERB)?;
        // SAFETY: `with_parts` passes a live identifier with a queue pair; the parameters and their private
        // data outlive the call.
        self.inner.with_parts(VERB, true, |raw| unsafe { sys::rdma_connect(raw, &raw mut parameters) })
    }

    /// Accepts a connection request. Ends in `Established`.
    ///
    /// # Errors
    /// As [`CmId::connect`], or the peer has cancelled the request.
    pub fn accept(&self, parameters: &ConnectParams<'_>) -> Result<(), VerbsError> {
        const VERB: &str = "rdma_accept";
        let mut parameters = parameters.raw(VERB)?;
        // SAFETY: `with_parts` passes a live identifier with a queue pair; the parameters and their private
        // data outlive the call.
        self.inner.with_parts(VERB, true, |raw| unsafe { sys::rdma_accept(raw, &raw mut parameters) })
    }

    /// Rejects a connection request with private data for the peer.
    ///
    /// # Errors
    /// There is too much private data, or the peer has cancelled the request.
    pub fn reject(&self, private_data: &[u8]) -> Result<(), VerbsError> {
        let bytes = length(private_data, "rdma_reject")?;
        // SAFETY: `with` passes a live identifier; the private data outlives the call.
        VerbsError::check(
            "rdma_reject",
            self.inner.with(|raw| unsafe { sys::rdma_reject(raw, private_data.as_ptr().cast(), bytes) }),
        )
    }

    /// Ends the connection, or answers the peer's disconnect; the queue pair enters the error state. Both
    /// sides receive `Disconnected`. The side that disconnects first receives the event when the peer has
    /// answered by the same call, or after retries of more than 10 s.
    ///
    /// # Errors
    /// The identifier has no connection.
    pub fn disconnect(&self) -> Result<(), VerbsError> {
        // SAFETY: `with` passes a live identifier.
        VerbsError::check("rdma_disconnect", self.inner.with(|raw| unsafe { sys::rdma_disconnect(raw) }))
    }

    pub(crate) fn context(&self) -> *mut sys::ibv_context {
        // SAFETY: `with` passes a live identifier.
        self.inner.with(|raw| unsafe { (*raw).verbs })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_differ() {
        assert_ne!(CmToken::next(), CmToken::next());
    }

    #[test]
    fn private_data_that_no_event_could_carry_is_refused() {
        let private_data = &[0; 256];
        let parameters = ConnectParams { private_data, ..ConnectParams::default() };
        let error = parameters.raw("rdma_connect").map(|_| ()).expect_err("refused");
        assert_eq!(error, VerbsError::new("rdma_connect", libc::EINVAL));
    }

    #[test]
    fn timeouts_fit() {
        assert_eq!(milliseconds(Duration::from_secs(2)), 2000);
        assert_eq!(milliseconds(Duration::MAX), c_int::MAX);
    }
}
