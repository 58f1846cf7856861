//! [`QueuePair`]: a reliable connection's two queues.
//!
//! UNSAFETY: a queue pair is destroyed before its identifier, its completion queues, its shared receive queue
//! and its domain, all of which it holds.
#![expect(unsafe_code, reason = "calls libibverbs and librdmacm")]

use std::cell::Cell;
use std::marker::PhantomData;
use std::mem;
use std::ptr;
use std::sync::Arc;

use rdma_sys as sys;

use crate::batch::SendBatch;
use crate::cm_id::IdInner;
use crate::completion::{CompletionQueue, QueueInner};
use crate::device::Device;
use crate::error::VerbsError;
use crate::memory::Sge;
use crate::receive::{self, SharedInner, SharedReceiveQueue};

/// What a queue pair is made of.
#[derive(Debug, Clone, Copy)]
pub struct QueuePairConfig<'a> {
    /// Where sends and receives complete.
    pub cq: &'a CompletionQueue,
    /// Where receives come from; without, it has its own queue.
    pub srq: Option<&'a SharedReceiveQueue>,
    /// Work requests that the send queue has room for.
    pub send_wr: u32,
    /// Receives that its own queue has room for; unused with a shared one.
    pub recv_wr: u32,
    /// Segments of a send.
    pub send_sge: u32,
    /// Segments of a receive; unused with a shared receive queue.
    pub recv_sge: u32,
    /// Bytes that a send may carry in itself; a wish, see [`QueuePair::inline_bytes`].
    pub inline_bytes: u32,
    /// How work requests are posted. `None`: by `ibv_wr_*` where the device has it and does it well, else as
    /// a list.
    pub posting: Option<Posting>,
}

/// How work requests are posted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Posting {
    /// By `ibv_wr_*`: straight into the device's queue.
    Extended,
    /// A linked list, and `ibv_post_send`.
    List,
}

/// Work requests of one doorbell where they are posted as a list: what is kept ready for each queue pair.
pub const LIST_BATCH: u32 = 64;

/// 0.64 ms, as the code of [`QueuePair::set_min_rnr_timer`] (InfiniBand 1.4, table 45).
pub const RNR_0_64_MS: u8 = 12;

/// What a list is made in.
pub(crate) struct List {
    pub(crate) requests: Box<[sys::ibv_send_wr]>,
    /// As many for each request as it may have.
    pub(crate) segments: Box<[Sge]>,
    pub(crate) inline: Box<[u8]>,
    pub(crate) count: usize,
}

pub(crate) enum Post {
    Extended(*mut sys::ibv_qp_ex),
    List(List),
}

/// A queue pair, made by [`crate::CmId::create_queue_pair`].
pub struct QueuePair {
    pub(crate) raw: *mut sys::ibv_qp,
    pub(crate) post: Post,
    /// A batch was begun with `ibv_wr_start` and not ended.
    pub(crate) is_open: bool,
    pub(crate) send_wr: u32,
    pub(crate) send_sge: u32,
    pub(crate) inline_bytes: u32,
    number: u32,
    recv_sge: u32,
    srq: Option<Arc<SharedInner>>,
    _cq: Arc<QueueInner>,
    _device: Arc<Device>,
    /// Let go last.
    id: Arc<IdInner>,
    _not_sync: PhantomData<Cell<()>>,
}

// SAFETY: libibverbs is thread-safe, and what is in it is its own.
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
                outcome = id.with(|raw| {
                    let mut attributes = config.attributes(device, *inline_bytes, *posting);
                    // SAFETY: alive, and under its lock; all in the attributes belongs to this device.
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
                        // SAFETY: the verb has just made it.
                        number: unsafe { (*raw).qp_num },
                        recv_sge: config.recv_sge,
                        srq,
                        _cq: Arc::clone(&config.cq.inner),
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

    /// Its number on the device, as completions and events have it.
    #[must_use]
    pub fn number(&self) -> u32 {
        self.number
    }

    /// Bytes that a send may carry in itself: as wished or more, or 0 where the device does not do it.
    #[must_use]
    pub fn inline_bytes(&self) -> u32 {
        self.inline_bytes
    }

    /// Work requests that the send queue has room for.
    #[must_use]
    pub fn send_wr(&self) -> u32 {
        self.send_wr
    }

    /// Segments that a send may have.
    #[must_use]
    pub fn send_sge(&self) -> u32 {
        self.send_sge
    }

    /// How it posts.
    #[must_use]
    pub fn posting(&self) -> Posting {
        match self.post {
            Post::Extended(_) => Posting::Extended,
            Post::List(_) => Posting::List,
        }
    }

    /// Post a receive to its own queue.
    ///
    /// # Errors
    /// It has a shared receive queue, or no room, or more segments than it was made for: nothing was posted.
    #[inline]
    pub fn post_receive(&mut self, id: u64, segments: &[Sge]) -> Result<(), VerbsError> {
        if self.srq.is_some() {
            return Err(VerbsError::new("ibv_post_recv", libc::EINVAL));
        }
        // SAFETY: alive.
        unsafe { receive::post_own(self.raw, id, segments, self.recv_sge) }
    }

    /// Post receives of one segment each to its own queue, with one doorbell for every 32 of them.
    ///
    /// # Errors
    /// It has a shared receive queue, or no room for all. Some may have been posted.
    pub fn post_receives(
        &mut self,
        receives: impl IntoIterator<Item = (u64, Sge)>,
    ) -> Result<(), VerbsError> {
        if self.srq.is_some() {
            return Err(VerbsError::new("ibv_post_recv", libc::EINVAL));
        }
        // SAFETY: alive.
        unsafe { receive::post_own_batch(self.raw, receives) }
    }

    /// Begin work requests for the send queue: they are posted together.
    #[inline]
    pub fn batch(&mut self) -> SendBatch<'_> {
        SendBatch::new(self)
    }

    /// How long the other side waits before it sends again what found no receive here (its message was
    /// answered with "receiver not ready"), as a code of InfiniBand: [`RNR_0_64_MS`]. The connection manager
    /// leaves it at 0, the longest, 655 ms. For a queue pair that is connected.
    ///
    /// # Errors
    /// The device does not change it.
    pub fn set_min_rnr_timer(&mut self, code: u8) -> Result<(), VerbsError> {
        let mask = sys::ibv_qp_attr_mask::IBV_QP_MIN_RNR_TIMER;
        self.modify(mask, |attributes| attributes.min_rnr_timer = code)
    }

    /// Move to the error state. What is posted completes as flushed, as does all that is posted after.
    pub fn set_error(&mut self) -> Result<(), VerbsError> {
        let mask = sys::ibv_qp_attr_mask::IBV_QP_STATE;
        self.modify(mask, |attributes| attributes.qp_state = sys::ibv_qp_state::IBV_QPS_ERR)
    }

    /// Change what is in the mask.
    fn modify(
        &mut self,
        mask: sys::ibv_qp_attr_mask,
        set: impl FnOnce(&mut sys::ibv_qp_attr),
    ) -> Result<(), VerbsError> {
        // SAFETY: numbers.
        let mut attributes: sys::ibv_qp_attr = unsafe { mem::zeroed() };
        set(&mut attributes);
        // One that was forgotten would still hold the device's lock.
        drop(self.batch());
        let mask = mask.0.cast_signed();
        // SAFETY: alive; the attributes are read.
        VerbsError::check("ibv_modify_qp", unsafe { sys::ibv_modify_qp(self.raw, &raw mut attributes, mask) })
    }
}

impl Drop for QueuePair {
    fn drop(&mut self) {
        drop(self.batch());
        // SAFETY: it is the identifier's queue pair, and alive.
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
            && (1..=limits.send_wr).contains(&self.send_wr)
            && (1..=limits.sge).contains(&self.send_sge)
            && (!is_own || self.recv_wr <= limits.send_wr && self.recv_sge <= limits.sge);
        if is_right { Ok(()) } else { Err(VerbsError::new(VERB, libc::EINVAL)) }
    }

    fn attributes(&self, device: &Device, inline_bytes: u32, posting: Posting) -> sys::ibv_qp_init_attr_ex {
        use sys::ibv_qp_create_send_ops_flags as op;
        use sys::ibv_qp_init_attr_mask as mask;
        // SAFETY: numbers and pointers.
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
        attributes.pd = device.domain();
        attributes.comp_mask = mask::IBV_QP_INIT_ATTR_PD.0;
        if posting == Posting::Extended {
            attributes.comp_mask |= mask::IBV_QP_INIT_ATTR_SEND_OPS_FLAGS.0;
            let ops = op::IBV_QP_EX_WITH_RDMA_READ
                | op::IBV_QP_EX_WITH_RDMA_WRITE
                | op::IBV_QP_EX_WITH_SEND
                | op::IBV_QP_EX_WITH_SEND_WITH_INV;
            attributes.send_ops_flags = u64::from(ops.0);
        }
        attributes
    }
}

/// # Safety
/// The identifier is alive and its channel's lock is held; all in the attributes is of this device.
unsafe fn create(
    id: *mut sys::rdma_cm_id,
    device: &Device,
    attributes: &mut sys::ibv_qp_init_attr_ex,
) -> Result<(*mut sys::ibv_qp, sys::ibv_qp_cap), VerbsError> {
    // SAFETY: by contract.
    if unsafe { (*id).verbs } != device.context() || !unsafe { (*id).qp }.is_null() {
        return Err(VerbsError::new(VERB, libc::EINVAL));
    }
    // SAFETY: by contract; the attributes are read, and the granted ones written.
    VerbsError::check(VERB, unsafe { sys::rdma_create_qp_ex(id, attributes) })?;
    // SAFETY: by contract.
    Ok((unsafe { (*id).qp }, attributes.cap))
}

/// The queue pair as one that has `ibv_wr_*`: all of those that [`SendBatch`] calls.
fn extended(raw: *mut sys::ibv_qp) -> Option<*mut sys::ibv_qp_ex> {
    // SAFETY: alive; null if it is not of this kind.
    let extended = unsafe { sys::ibv_qp_to_qp_ex(raw) };
    if extended.is_null() {
        return None;
    }
    // SAFETY: alive as the queue pair is.
    let calls = unsafe { &*extended };
    let has_all = calls.wr_start.is_some()
        && calls.wr_complete.is_some()
        && calls.wr_abort.is_some()
        && calls.wr_rdma_read.is_some()
        && calls.wr_rdma_write.is_some()
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
            // SAFETY: numbers, and pointers that are set before they are used.
            requests: (0..count).map(|_| unsafe { mem::zeroed() }).collect(),
            segments: vec![Sge { address: 0, bytes: 0, key: 0 }; segments].into(),
            inline: vec![0; count * inline_bytes as usize].into(),
            count: 0,
        }
    }
}
