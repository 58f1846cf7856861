//! [`QueuePair`]: a queue pair of the reliable connected type (RC).
//!
//! UNSAFETY: a queue pair holds references to its identifier, completion queue, shared receive queue and
//! device, and is destroyed before them.
#![expect(unsafe_code, reason = "calls libibverbs and librdmacm")]

use std::cell::Cell;
use std::marker::PhantomData;
use std::mem;
use std::ptr;
use std::sync::Arc;

use rdma_sys as sys;

use crate::batch::SendBatch;
use crate::cm_id::IdInner;
use crate::completion::{CompletionQueue, CompletionQueueInner, next_serial};
use crate::device::Device;
use crate::domain::Domain;
use crate::error::VerbsError;
use crate::memory::Sge;
use crate::receive::{self, ReceivesError, SharedInner, SharedReceiveQueue};

/// Parameters of a queue pair.
#[derive(Debug, Clone, Copy)]
pub struct QueuePairConfig<'a> {
    /// Completion queue of sends and receives.
    pub cq: &'a CompletionQueue,
    /// Protection domain; `None`: the device's own.
    pub domain: Option<&'a Arc<Domain>>,
    /// Shared receive queue; `None`: the queue pair has its own receive queue.
    pub srq: Option<&'a SharedReceiveQueue>,
    /// Capacity of the send queue in work requests.
    pub send_wr: u32,
    /// Capacity of the queue pair's own receive queue in work requests; unused with a shared receive queue.
    pub recv_wr: u32,
    /// Maximum segments of a SEND, READ or WRITE.
    pub send_sge: u32,
    /// Maximum segments of a receive; unused with a shared receive queue.
    pub recv_sge: u32,
    /// Requested inline data of a SEND or WRITE in bytes; the granted value is [`QueuePair::inline_bytes`].
    pub inline_bytes: u32,
    /// Interface for posting. `None`: [`Posting::Extended`] if the device supports it and is not soft-RoCE,
    /// else [`Posting::List`].
    pub posting: Option<Posting>,
}

/// Interface by which work requests are posted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Posting {
    /// `ibv_wr_*`, which writes into the device's queue without an intermediate list.
    Extended,
    /// `ibv_post_send` with a linked list.
    List,
}

/// Maximum work requests per doorbell with [`Posting::List`]: the length of a queue pair's preallocated list.
pub const LIST_BATCH: u32 = 64;

/// Code of 0.64 ms for [`QueuePair::set_min_rnr_timer`] (InfiniBand 1.4, table 45).
pub const RNR_0_64_MS: u8 = 12;

/// Preallocated memory of a list of work requests.
pub(crate) struct List {
    pub(crate) requests: Box<[sys::ibv_send_wr]>,
    /// `send_sge` entries for each request.
    pub(crate) segments: Box<[Sge]>,
    pub(crate) inline: Box<[u8]>,
    pub(crate) count: usize,
}

pub(crate) enum Post {
    Extended(*mut sys::ibv_qp_ex),
    List(List),
}

/// A queue pair, created by [`crate::CmId::create_queue_pair`].
pub struct QueuePair {
    pub(crate) raw: *mut sys::ibv_qp,
    pub(crate) post: Post,
    /// True between `ibv_wr_start` and `ibv_wr_complete` or `ibv_wr_abort`.
    pub(crate) is_open: bool,
    pub(crate) send_wr: u32,
    pub(crate) send_sge: u32,
    pub(crate) inline_bytes: u32,
    number: u32,
    serial: usize,
    recv_sge: u32,
    srq: Option<Arc<SharedInner>>,
    _cq: Arc<CompletionQueueInner>,
    _domain: Option<Arc<Domain>>,
    _device: Arc<Device>,
    /// Released last.
    id: Arc<IdInner>,
    _not_sync: PhantomData<Cell<()>>,
}

// SAFETY: libibverbs is thread-safe, and the raw pointers refer to objects that only this queue pair uses.
unsafe impl Send for QueuePair {}

impl std::fmt::Debug for QueuePair {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("QueuePair").field("number", &self.number).field("posting", &self.posting()).finish()
    }
}

const VERB: &str = "rdma_create_qp_ex";

impl QueuePair {
    pub(crate) fn new(
        id: &Arc<IdInner>,
        device: &Arc<Device>,
        config: &QueuePairConfig<'_>,
    ) -> Result<QueuePair, VerbsError> {
        config.check(device)?;
        let postings: &[Posting] = match &config.posting {
            None if device.is_soft_roce() => &[Posting::List],
            None => &[Posting::Extended, Posting::List],
            Some(posting) => std::slice::from_ref(posting),
        };
        let inlines: &[u32] = if config.inline_bytes > 0 { &[config.inline_bytes, 0] } else { &[0] };
        let mut outcome = Err(VerbsError::new(VERB, libc::EINVAL));
        for inline_bytes in inlines {
            for posting in postings {
                let serial = next_serial();
                outcome = id.with(|raw| {
                    let mut attributes = config.attributes(device, *inline_bytes, *posting);
                    attributes.qp_context = ptr::without_provenance_mut(serial);
                    // SAFETY: `id.with` passes a live identifier under its channel's lock; `config.check` has
                    // verified that all queues are on this device.
                    unsafe { create(raw, device, &mut attributes) }
                });
                if let Ok((raw, cap)) = outcome {
                    let srq = config.srq.map(|srq| Arc::clone(&srq.inner));
                    let mut queue_pair = QueuePair {
                        raw,
                        post: Post::Extended(ptr::null_mut()),
                        is_open: false,
                        send_wr: cap.max_send_wr.max(config.send_wr),
                        send_sge: config.send_sge,
                        inline_bytes: cap.max_inline_data,
                        // SAFETY: the verb has just created the queue pair.
                        number: unsafe { (*raw).qp_num },
                        serial,
                        recv_sge: config.recv_sge,
                        srq,
                        _cq: Arc::clone(&config.cq.inner),
                        _domain: config.domain.map(Arc::clone),
                        _device: Arc::clone(device),
                        id: Arc::clone(id),
                        _not_sync: PhantomData,
                    };
                    queue_pair.post = match posting {
                        Posting::List => {
                            let inline_bytes = queue_pair.inline_bytes;
                            Post::List(List::new(queue_pair.send_wr, config.send_sge, inline_bytes))
                        }
                        Posting::Extended => match extended(raw) {
                            Some(extended) => Post::Extended(extended),
                            None if postings.len() > 1 => continue,
                            None => return Err(VerbsError::new("ibv_qp_to_qp_ex", libc::EOPNOTSUPP)),
                        },
                    };
                    return Ok(queue_pair);
                }
            }
        }
        Err(outcome.err().unwrap_or(VerbsError::new(VERB, libc::EINVAL)))
    }

    /// Returns the queue pair number (QPN) in completions and events; unique on the device.
    #[must_use]
    pub fn number(&self) -> u32 {
        self.number
    }

    /// Returns the serial in events, never used again in this process, unlike a number.
    #[must_use]
    pub fn serial(&self) -> usize {
        self.serial
    }

    /// Returns the maximum inline data of a SEND or WRITE in bytes: at least as requested. If the device
    /// refused the request, the inline data that it grants when 0 is requested, possibly 0.
    #[must_use]
    pub fn inline_bytes(&self) -> u32 {
        self.inline_bytes
    }

    /// Returns the granted capacity of the send queue in work requests; at least as requested.
    #[must_use]
    pub fn send_wr(&self) -> u32 {
        self.send_wr
    }

    /// Returns the maximum segments of a SEND, READ or WRITE, as requested.
    #[must_use]
    pub fn send_sge(&self) -> u32 {
        self.send_sge
    }

    /// Returns the interface used for posting.
    #[must_use]
    pub fn posting(&self) -> Posting {
        match self.post {
            Post::Extended(_) => Posting::Extended,
            Post::List(_) => Posting::List,
        }
    }

    /// Posts a receive to the queue pair's own receive queue.
    ///
    /// # Errors
    /// Nothing was posted: the queue pair has a shared receive queue, its own receive queue is full, or there
    /// are more segments than `recv_sge`.
    #[inline]
    pub fn post_receive(&mut self, id: u64, segments: &[Sge]) -> Result<(), VerbsError> {
        if self.srq.is_some() {
            return Err(VerbsError::new("ibv_post_recv", libc::EINVAL));
        }
        // SAFETY: `self` owns the queue pair, which exists until its drop.
        unsafe { receive::post_own(self.raw, id, segments, self.recv_sge) }
    }

    /// Posts receives of one segment each to its own receive queue, with one doorbell for every 32.
    ///
    /// # Errors
    /// The queue pair has a shared receive queue, or its own receive queue is full. The receives before the
    /// failed one are posted.
    #[inline]
    pub fn post_receives(
        &mut self,
        receives: impl IntoIterator<Item = (u64, Sge)>,
    ) -> Result<(), ReceivesError> {
        if self.srq.is_some() {
            return Err(ReceivesError { posted: 0, error: VerbsError::new("ibv_post_recv", libc::EINVAL) });
        }
        // SAFETY: `self` owns the queue pair, which exists until its drop.
        unsafe { receive::post_own_batch(self.raw, receives) }
    }

    /// Starts a batch of work requests for the send queue.
    #[inline]
    pub fn batch(&mut self) -> SendBatch<'_> {
        SendBatch::new(self)
    }

    /// Sets how long the peer waits before it retransmits a message that found no receive (RNR NAK). `code`
    /// is an InfiniBand code such as [`RNR_0_64_MS`]. The connection manager's default is code 0, the longest
    /// time: 655 ms. Only for a connected queue pair.
    ///
    /// # Errors
    /// The error of `ibv_modify_qp`: the queue pair is not connected, or the device does not support it.
    pub fn set_min_rnr_timer(&mut self, code: u8) -> Result<(), VerbsError> {
        let mask = sys::ibv_qp_attr_mask::IBV_QP_MIN_RNR_TIMER;
        self.modify(mask, |attributes| attributes.min_rnr_timer = code)
    }

    /// Moves the queue pair to the error state: outstanding and later work requests complete as flushed.
    pub fn set_error(&mut self) -> Result<(), VerbsError> {
        let mask = sys::ibv_qp_attr_mask::IBV_QP_STATE;
        self.modify(mask, |attributes| attributes.qp_state = sys::ibv_qp_state::IBV_QPS_ERR)
    }

    /// Calls `ibv_modify_qp` for the attributes in `mask`, which `set` fills in.
    fn modify(
        &mut self,
        mask: sys::ibv_qp_attr_mask,
        set: impl FnOnce(&mut sys::ibv_qp_attr),
    ) -> Result<(), VerbsError> {
        // SAFETY: `ibv_qp_attr` contains only integers, for which zero is valid.
        let mut attributes: sys::ibv_qp_attr = unsafe { mem::zeroed() };
        set(&mut attributes);
        // Aborts a batch leaked by `mem::forget`, which still holds the lock of the send queue.
        drop(self.batch());
        let mask = mask.0.cast_signed();
        // SAFETY: `self` owns the queue pair; the attributes outlive the call.
        VerbsError::check("ibv_modify_qp", unsafe { sys::ibv_modify_qp(self.raw, &raw mut attributes, mask) })
    }
}

impl Drop for QueuePair {
    fn drop(&mut self) {
        drop(self.batch());
        // SAFETY: `with` passes the live identifier, which owns exactly this queue pair; it is destroyed only
        // here.
        self.id.with(|raw| unsafe { sys::rdma_destroy_qp(raw) });
    }
}

impl QueuePairConfig<'_> {
    fn check(&self, device: &Device) -> Result<(), VerbsError> {
        let limits = device.limits();
        let is_same = |other: &Arc<Device>| ptr::eq(Arc::as_ptr(other), device);
        let is_own = self.srq.is_none();
        let is_right = is_same(&self.cq.inner.device)
            && self.srq.is_none_or(|srq| is_same(&srq.inner.device))
            && self.domain.is_none_or(|domain| is_same(domain.device()))
            && (1..=limits.send_wr).contains(&self.send_wr)
            && (1..=limits.sge).contains(&self.send_sge)
            && (!is_own || self.recv_wr <= limits.send_wr && self.recv_sge <= limits.sge);
        if is_right { Ok(()) } else { Err(VerbsError::new(VERB, libc::EINVAL)) }
    }

    fn attributes(&self, device: &Device, inline_bytes: u32, posting: Posting) -> sys::ibv_qp_init_attr_ex {
        use sys::ibv_qp_create_send_ops_flags as op;
        use sys::ibv_qp_init_attr_mask as mask;
        // SAFETY: the struct contains only integers and raw pointers, for which zero is valid.
        let mut attributes: sys::ibv_qp_init_attr_ex = unsafe { mem::zeroed() };
        (attributes.send_cq, attributes.recv_cq) = (self.cq.inner.raw, self.cq.inner.raw);
        attributes.cap.max_send_wr = self.send_wr;
        attributes.cap.max_send_sge = self.send_sge;
        attributes.cap.max_inline_data = inline_bytes;
        match self.srq {
            Some(srq) => attributes.srq = srq.inner.raw,
            None => {
                attributes.cap.max_recv_wr = self.recv_wr;
                attributes.cap.max_recv_sge = self.recv_sge;
            }
        }
        attributes.qp_type = sys::ibv_qp_type::IBV_QPT_RC;
        attributes.pd = self.domain.map_or(device.domain(), |domain| domain.raw());
        attributes.comp_mask = mask::IBV_QP_INIT_ATTR_PD.0;
        if posting == Posting::Extended {
            attributes.comp_mask |= mask::IBV_QP_INIT_ATTR_SEND_OPS_FLAGS.0;
            let ops = op::IBV_QP_EX_WITH_RDMA_READ
                | op::IBV_QP_EX_WITH_RDMA_WRITE
                | op::IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM
                | op::IBV_QP_EX_WITH_SEND
                | op::IBV_QP_EX_WITH_SEND_WITH_INV;
            attributes.send_ops_flags = u64::from(ops.0);
        }
        attributes
    }
}

/// # Safety
/// The identifier exists and its channel's lock is held; all objects in the attributes are of this device.
unsafe fn create(
    id: *mut sys::rdma_cm_id,
    device: &Device,
    attributes: &mut sys::ibv_qp_init_attr_ex,
) -> Result<(*mut sys::ibv_qp, sys::ibv_qp_cap), VerbsError> {
    // SAFETY: the caller guarantees a live identifier under its lock.
    if unsafe { (*id).verbs } != device.context() || !unsafe { (*id).qp }.is_null() {
        return Err(VerbsError::new(VERB, libc::EINVAL));
    }
    // SAFETY: the caller guarantees a live identifier and attributes of this device; the granted capacities
    // are written to them.
    VerbsError::check(VERB, unsafe { sys::rdma_create_qp_ex(id, attributes) })?;
    // SAFETY: the caller guarantees a live identifier; the verb has set `qp`.
    Ok((unsafe { (*id).qp }, attributes.cap))
}

/// Returns the extended interface of a queue pair. `None`: it has none, or lacks a call of [`SendBatch`].
fn extended(raw: *mut sys::ibv_qp) -> Option<*mut sys::ibv_qp_ex> {
    // SAFETY: `raw` was just created; the result is null if the queue pair has no extended interface.
    let extended = unsafe { sys::ibv_qp_to_qp_ex(raw) };
    if extended.is_null() {
        return None;
    }
    // SAFETY: the pointer is not null, and points into the queue pair, which exists.
    let calls = unsafe { &*extended };
    let has_all = calls.wr_start.is_some()
        && calls.wr_complete.is_some()
        && calls.wr_abort.is_some()
        && calls.wr_rdma_read.is_some()
        && calls.wr_rdma_write.is_some()
        && calls.wr_rdma_write_imm.is_some()
        && calls.wr_send.is_some()
        && calls.wr_send_inv.is_some()
        && calls.wr_set_sge.is_some()
        && calls.wr_set_sge_list.is_some()
        && calls.wr_set_inline_data.is_some();
    has_all.then_some(extended)
}

impl List {
    pub(crate) fn new(send_wr: u32, send_sge: u32, inline_bytes: u32) -> List {
        let count = send_wr.min(LIST_BATCH) as usize;
        let segments = count * send_sge as usize;
        List {
            // SAFETY: the struct contains only integers and raw pointers, for which zero is valid; `link`
            // sets the pointers before use.
            requests: (0..count).map(|_| unsafe { mem::zeroed() }).collect(),
            segments: vec![Sge { address: 0, bytes: 0, key: 0 }; segments].into(),
            inline: vec![0; count * inline_bytes as usize].into(),
            count: 0,
        }
    }
}
