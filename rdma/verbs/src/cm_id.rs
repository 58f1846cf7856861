//! [`CmId`]: one end of a connection, or a listener.
//!
//! UNSAFETY: an identifier is used under the lock of the channel that it is on (see `cm_channel`), and is
//! destroyed after its queue pair and before its channel.
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

/// `RDMA_OPTION_ID` and `RDMA_OPTION_ID_AFONLY`: enums without a name, which rdma-sys does not bind.
const OPTION_ID: c_int = 0;
const OPTION_ID_AFONLY: c_int = 2;

/// Names an identifier. No two of a process are the same, ever.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct CmToken(usize);

impl CmToken {
    /// One that no identifier has.
    #[must_use]
    pub fn next() -> CmToken {
        static NEXT: AtomicUsize = AtomicUsize::new(1);
        CmToken(NEXT.fetch_add(1, Ordering::Relaxed))
    }

    /// It is kept in the place that the library leaves to its user.
    fn context(self) -> *mut libc::c_void {
        ptr::without_provenance_mut(self.0)
    }

    /// # Safety
    /// The identifier is alive.
    pub(crate) unsafe fn of(raw: *mut sys::rdma_cm_id) -> CmToken {
        // SAFETY: by contract.
        CmToken(unsafe { (*raw).context }.addr())
    }
}

/// What two sides tell each other when they connect.
#[derive(Debug, Clone, Copy, Default)]
pub struct ConnectParams<'a> {
    /// For the other side's event. How much fits is the transport's: 56 bytes to connect, 196 to accept.
    pub private_data: &'a [u8],
    /// READs of the other side that this one serves at once. 255: as many as the device does.
    pub responder_resources: u8,
    /// READs that this side has outstanding at once. 255: as many as the device does.
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
            // The most; of what finds no RECV, 7 is for ever.
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
    /// The one that it is on now.
    channel: Mutex<Arc<ChannelInner>>,
}

// SAFETY: the identifier is used under the lock of its channel.
unsafe impl Send for IdInner {}
// SAFETY: as above.
unsafe impl Sync for IdInner {}

impl IdInner {
    /// Do something with the identifier while no thread takes events of it.
    pub(crate) fn with<R>(&self, what: impl FnOnce(*mut sys::rdma_cm_id) -> R) -> R {
        let channel = self.channel.lock().unwrap_or_else(PoisonError::into_inner);
        let _lock = channel.lock();
        what(self.raw)
    }

    /// The same with a verb that takes for granted, without looking, that the identifier has a device, or a
    /// queue pair and so a device.
    fn with_parts(
        &self,
        verb: &'static str,
        needs_queue: bool,
        what: impl FnOnce(*mut sys::rdma_cm_id) -> c_int,
    ) -> Result<(), VerbsError> {
        self.with(|raw| {
            // SAFETY: ours.
            let is_missing = unsafe { (*raw).verbs.is_null() || needs_queue && (*raw).qp.is_null() };
            VerbsError::check(verb, if is_missing { libc::EINVAL } else { what(raw) })
        })
    }

    fn migrate(&self, to: &Arc<ChannelInner>) -> Result<(), VerbsError> {
        let mut channel = self.channel.lock().unwrap_or_else(PoisonError::into_inner);
        if Arc::ptr_eq(&channel, to) {
            return Ok(());
        }
        let from = Arc::clone(&channel);
        // In the order of their addresses: two that cross do not wait for each other.
        let is_first = Arc::as_ptr(&from) < Arc::as_ptr(to);
        let (first, second) = if is_first { (&from, to) } else { (to, &from) };
        let (_first, _second) = (first.lock(), second.lock());
        // SAFETY: ours, both channels are alive, and no event of them is being taken.
        VerbsError::check("rdma_migrate_id", unsafe { sys::rdma_migrate_id(self.raw, to.raw) })?;
        *channel = Arc::clone(to);
        Ok(())
    }
}

impl Drop for IdInner {
    fn drop(&mut self) {
        // SAFETY: ours, its queue pair held it, and its events were acknowledged as they were taken.
        self.with(|raw| unsafe { sys::rdma_destroy_id(raw) });
    }
}

/// An identifier of the connection manager, of the reliable connected kind.
///
/// Its queue pair keeps it alive: it is destroyed when both are dropped. Until then events of it may come.
#[derive(Debug)]
pub struct CmId {
    inner: Arc<IdInner>,
    _not_sync: PhantomData<Cell<()>>,
}

impl CmId {
    /// Make one.
    ///
    /// # Errors
    /// No RDMA here, or no more identifiers.
    pub fn new(channel: &CmChannel) -> Result<CmId, VerbsError> {
        let token = CmToken::next();
        let mut raw = ptr::null_mut();
        let space = sys::rdma_port_space::RDMA_PS_TCP;
        let inner = &channel.inner;
        // SAFETY: the channel is alive, and kept; the pointer is written.
        VerbsError::check("rdma_create_id", unsafe {
            sys::rdma_create_id(inner.raw, &raw mut raw, token.context(), space)
        })?;
        let channel = Mutex::new(Arc::clone(inner));
        Ok(CmId { inner: Arc::new(IdInner { raw, token, channel }), _not_sync: PhantomData })
    }

    /// Own what a connection request brought.
    ///
    /// # Safety
    /// The identifier is on this channel, whose lock is held, and it has no other owner.
    pub(crate) unsafe fn adopt(raw: *mut sys::rdma_cm_id, channel: &Arc<ChannelInner>) -> CmId {
        let token = CmToken::next();
        // SAFETY: by contract. It came with the listener's.
        unsafe { (*raw).context = token.context() };
        let channel = Mutex::new(Arc::clone(channel));
        CmId { inner: Arc::new(IdInner { raw, token, channel }), _not_sync: PhantomData }
    }

    /// Its name in events.
    #[must_use]
    pub fn token(&self) -> CmToken {
        self.inner.token
    }

    /// Take an address, to listen on it by [`CmId::listen`]. IPv4 and IPv6 are apart: the same port can have
    /// both. Port 0 takes any; [`CmId::local_address`] says which.
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
                // SAFETY: ours; the option is read.
                VerbsError::check("rdma_set_option", unsafe {
                    sys::rdma_set_option(raw, OPTION_ID, OPTION_ID_AFONLY, value, size_of::<c_int>())
                })?;
            }
            // SAFETY: ours; the address is read.
            VerbsError::check("rdma_bind_addr", unsafe { sys::rdma_bind_addr(raw, address.as_mut_ptr()) })
        })
    }

    /// Listen on the address that is taken. Requests come as events of the channel.
    pub fn listen(&self, backlog: u32) -> Result<(), VerbsError> {
        let backlog = c_int::try_from(backlog).unwrap_or(c_int::MAX);
        // SAFETY: ours.
        self.inner.with(|raw| VerbsError::check("rdma_listen", unsafe { sys::rdma_listen(raw, backlog) }))
    }

    /// Find the device that leads to `to`. Ends in `AddressResolved` or `AddressError`.
    pub fn resolve_address(
        &self,
        from: Option<SocketAddr>,
        to: SocketAddr,
        timeout: Duration,
    ) -> Result<(), VerbsError> {
        let mut from = from.map(RawAddress::new);
        let mut to = RawAddress::new(to);
        let from = from.as_mut().map_or(ptr::null_mut(), RawAddress::as_mut_ptr);
        // SAFETY: ours; the addresses are read.
        VerbsError::check(
            "rdma_resolve_addr",
            self.inner.with(|raw| unsafe {
                sys::rdma_resolve_addr(raw, from, to.as_mut_ptr(), milliseconds(timeout))
            }),
        )
    }

    /// Find the way, after the address. Ends in `RouteResolved` or `RouteError`.
    pub fn resolve_route(&self, timeout: Duration) -> Result<(), VerbsError> {
        let timeout = milliseconds(timeout);
        // SAFETY: has a device.
        self.inner
            .with_parts("rdma_resolve_route", false, |raw| unsafe { sys::rdma_resolve_route(raw, timeout) })
    }

    /// Which of these devices it is bound to.
    #[must_use]
    pub fn device<'a>(&self, devices: &'a [Arc<Device>]) -> Option<&'a Arc<Device>> {
        devices.iter().find(|device| device.is_of(self))
    }

    /// The name of the device that it is bound to, also of one that is gone; `None`: it is bound to none.
    #[must_use]
    pub fn device_name(&self) -> Option<String> {
        self.inner.with(|raw| {
            // SAFETY: ours. The library keeps the context of an identifier, and with it the device's name.
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

    /// Its own address, once it has one.
    #[must_use]
    pub fn local_address(&self) -> Option<SocketAddr> {
        // SAFETY: ours; a union with a storage.
        self.inner.with(|raw| unsafe { address::read((&raw const (*raw).route.addr.src_addr_union).cast()) })
    }

    /// The other side's address, once it has one.
    #[must_use]
    pub fn peer_address(&self) -> Option<SocketAddr> {
        // SAFETY: ours; a union with a storage.
        self.inner.with(|raw| unsafe { address::read((&raw const (*raw).route.addr.dst_addr_union).cast()) })
    }

    /// From now on its events, also those that wait already, come out of another channel.
    pub fn migrate(&self, channel: &CmChannel) -> Result<(), VerbsError> {
        self.inner.migrate(&channel.inner)
    }

    /// Make its queue pair, on the device that it is bound to. It may receive at once, and send when the
    /// connection is established.
    ///
    /// # Errors
    /// It has a queue pair, the parts are of another device, or a limit is exceeded.
    pub fn create_queue_pair(
        &self,
        device: &Arc<Device>,
        config: &QueuePairConfig<'_>,
    ) -> Result<QueuePair, VerbsError> {
        QueuePair::new(&self.inner, device, config)
    }

    /// Connect, after the route. Ends in `Established`, `Rejected`, `Unreachable` or `ConnectError`.
    ///
    /// # Errors
    /// It cannot be begun: no queue pair, too much private data, more READs than the device does.
    pub fn connect(&self, parameters: &ConnectParams<'_>) -> Result<(), VerbsError> {
        const VERB: &str = "rdma_connect";
        let mut parameters = parameters.raw(VERB)?;
        // SAFETY: has a queue pair; the parameters are read.
        self.inner.with_parts(VERB, true, |raw| unsafe { sys::rdma_connect(raw, &raw mut parameters) })
    }

    /// Accept a connection request. Ends in `Established`.
    ///
    /// # Errors
    /// As [`CmId::connect`], or the other side has given up.
    pub fn accept(&self, parameters: &ConnectParams<'_>) -> Result<(), VerbsError> {
        const VERB: &str = "rdma_accept";
        let mut parameters = parameters.raw(VERB)?;
        // SAFETY: has a queue pair; the parameters are read.
        self.inner.with_parts(VERB, true, |raw| unsafe { sys::rdma_accept(raw, &raw mut parameters) })
    }

    /// Refuse a connection request.
    ///
    /// # Errors
    /// Too much private data, or the other side has given up.
    pub fn reject(&self, private_data: &[u8]) -> Result<(), VerbsError> {
        let bytes = length(private_data, "rdma_reject")?;
        // SAFETY: ours; the data are read.
        VerbsError::check(
            "rdma_reject",
            self.inner.with(|raw| unsafe { sys::rdma_reject(raw, private_data.as_ptr().cast(), bytes) }),
        )
    }

    /// End the connection, or answer the other side's end of it; the queue pair goes to its error state. Both
    /// sides get `Disconnected`: the one that begins, when the other has answered by this same call, or else
    /// after long (more than ten seconds) of repeating.
    ///
    /// # Errors
    /// There is no connection, or not any more.
    pub fn disconnect(&self) -> Result<(), VerbsError> {
        // SAFETY: ours.
        VerbsError::check("rdma_disconnect", self.inner.with(|raw| unsafe { sys::rdma_disconnect(raw) }))
    }

    pub(crate) fn context(&self) -> *mut sys::ibv_context {
        // SAFETY: ours.
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
