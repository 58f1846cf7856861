//! [`CompletionQueue`]: where work requests end; [`CompletionChannel`]: what wakes a sleeper when they do.
//!
//! UNSAFETY: a completion queue is destroyed after the queue pairs that complete to it, and before its
//! channel.
#![expect(unsafe_code, reason = "calls libibverbs")]

use std::cell::Cell;
use std::ffi::CStr;
use std::fmt;
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr;
use std::sync::Arc;

use rdma_sys as sys;

use crate::device::{Device, set_nonblocking};
use crate::error::VerbsError;

/// Why a work request completed, in libibverbs' numbers. Displays as libibverbs says it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct WcStatus(pub u32);

impl WcStatus {
    /// It did what was asked.
    pub const SUCCESS: WcStatus = WcStatus(sys::ibv_wc_status::IBV_WC_SUCCESS);
    /// The queue pair is in its error state: not tried.
    pub const FLUSHED: WcStatus = WcStatus(sys::ibv_wc_status::IBV_WC_WR_FLUSH_ERR);
    /// A remote key does not open the memory.
    pub const REMOTE_ACCESS: WcStatus = WcStatus(sys::ibv_wc_status::IBV_WC_REM_ACCESS_ERR);
}

impl fmt::Display for WcStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // SAFETY: takes any number; a text that stays.
        let text = unsafe {
            let text = sys::ibv_wc_status_str(self.0);
            (!text.is_null()).then(|| CStr::from_ptr(text))
        };
        match text {
            Some(text) => write!(f, "{} ({})", text.to_string_lossy(), self.0),
            None => write!(f, "status {}", self.0),
        }
    }
}

/// A work request is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WorkCompletion {
    /// As in the work request.
    pub id: u64,
    /// It did what was asked. If not, only `id`, `status` and `queue_pair` say anything.
    pub is_ok: bool,
    /// Why not.
    pub status: WcStatus,
    /// Bytes received or read.
    pub bytes: u32,
    /// Number of the queue pair.
    pub queue_pair: u32,
}

impl WorkCompletion {
    fn new(raw: &sys::ibv_wc) -> WorkCompletion {
        let status = WcStatus(raw.status);
        let is_ok = status == WcStatus::SUCCESS;
        WorkCompletion {
            id: raw.wr_id,
            is_ok,
            status,
            bytes: if is_ok { raw.byte_len } else { 0 },
            queue_pair: raw.qp_num,
        }
    }
}

#[derive(Debug)]
struct ChannelInner {
    raw: *mut sys::ibv_comp_channel,
    device: Arc<Device>,
}

// SAFETY: libibverbs is thread-safe.
unsafe impl Send for ChannelInner {}
// SAFETY: as above.
unsafe impl Sync for ChannelInner {}

impl Drop for ChannelInner {
    fn drop(&mut self) {
        // SAFETY: ours, and its queues held it.
        unsafe { sys::ibv_destroy_comp_channel(self.raw) };
    }
}

/// Its descriptor becomes readable when an armed completion queue gets a completion.
#[derive(Debug)]
pub struct CompletionChannel {
    inner: Arc<ChannelInner>,
    _not_sync: PhantomData<Cell<()>>,
}

impl CompletionChannel {
    /// Make one, which does not block.
    ///
    /// # Errors
    /// The system has no more descriptors.
    pub fn new(device: &Arc<Device>) -> Result<CompletionChannel, VerbsError> {
        // SAFETY: an open context.
        let raw = unsafe { sys::ibv_create_comp_channel(device.context()) };
        let raw = VerbsError::made("ibv_create_comp_channel", raw)?;
        let inner = Arc::new(ChannelInner { raw, device: Arc::clone(device) });
        // SAFETY: ours.
        set_nonblocking(unsafe { (*raw).fd })?;
        Ok(CompletionChannel { inner, _not_sync: PhantomData })
    }

    /// Take the oldest that has been told, and name its queue ([`CompletionQueue::identity`]), which tells no
    /// more until it is armed again. One system call: who waits for the descriptor hears of the rest.
    pub fn take_event(&self) -> Option<usize> {
        let (mut raw, mut context) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: ours; both are written.
        if unsafe { sys::ibv_get_cq_event(self.inner.raw, &raw mut raw, &raw mut context) } != 0 {
            return None;
        }
        // SAFETY: a queue with an event that is not acknowledged is not destroyed: that waits for us.
        unsafe { sys::ibv_ack_cq_events(raw, 1) };
        Some(raw.addr())
    }

    /// Take what has been told, and say how often it was about this queue: it is to be polled and armed again
    /// if that is not 0. Where several queues have this channel, poll and arm all of them.
    pub fn take_events(&self, queue: &CompletionQueue) -> usize {
        std::iter::from_fn(|| self.take_event()).filter(|told| *told == queue.identity()).count()
    }
}

impl AsFd for CompletionChannel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: open as long as the channel.
        unsafe { BorrowedFd::borrow_raw((*self.inner.raw).fd) }
    }
}

#[derive(Debug)]
pub(crate) struct QueueInner {
    pub(crate) raw: *mut sys::ibv_cq,
    _channel: Option<Arc<ChannelInner>>,
    pub(crate) device: Arc<Device>,
}

// SAFETY: libibverbs is thread-safe. Only the one handle polls.
unsafe impl Send for QueueInner {}
// SAFETY: as above.
unsafe impl Sync for QueueInner {}

impl Drop for QueueInner {
    fn drop(&mut self) {
        // SAFETY: ours, and its queue pairs held it.
        unsafe { sys::ibv_destroy_cq(self.raw) };
    }
}

/// Where work requests of many queue pairs complete.
#[derive(Debug)]
pub struct CompletionQueue {
    pub(crate) inner: Arc<QueueInner>,
    entries: u32,
    is_broken: bool,
    _not_sync: PhantomData<Cell<()>>,
}

/// Completions that [`CompletionQueue::poll`] takes at once.
pub const POLL_BATCH: usize = 32;

impl CompletionQueue {
    /// Make one with room for at least `entries`, which tells `channel`, if any, when it was armed.
    ///
    /// # Errors
    /// More than the device has, or no such vector.
    pub fn new(
        device: &Arc<Device>,
        entries: u32,
        vector: u32,
        channel: Option<&CompletionChannel>,
    ) -> Result<CompletionQueue, VerbsError> {
        const VERB: &str = "ibv_create_cq";
        let invalid = VerbsError::new(VERB, libc::EINVAL);
        let limits = device.limits();
        if entries == 0 || entries > limits.cqe || vector >= limits.vectors.max(1) {
            return Err(invalid);
        }
        if channel.is_some_and(|channel| channel.inner.device.context() != device.context()) {
            return Err(invalid);
        }
        let count = i32::try_from(entries).map_err(|_| invalid)?;
        let vector = i32::try_from(vector).map_err(|_| invalid)?;
        let raw_channel = channel.map_or(ptr::null_mut(), |channel| channel.inner.raw);
        // SAFETY: an open context, and a channel of it that the queue keeps.
        let raw =
            unsafe { sys::ibv_create_cq(device.context(), count, ptr::null_mut(), raw_channel, vector) };
        let raw = VerbsError::made(VERB, raw)?;
        // SAFETY: the verb has just made it.
        let granted = unsafe { (*raw).cqe };
        let channel = channel.map(|channel| Arc::clone(&channel.inner));
        let inner = Arc::new(QueueInner { raw, _channel: channel, device: Arc::clone(device) });
        let entries = u32::try_from(granted).unwrap_or(entries).max(entries);
        Ok(CompletionQueue { inner, entries, is_broken: false, _not_sync: PhantomData })
    }

    /// Lend up to [`POLL_BATCH`] completions to `each`, and say how many: fewer than that means that there
    /// are no more for now.
    #[inline]
    pub fn poll(&mut self, mut each: impl FnMut(WorkCompletion)) -> usize {
        let mut raw = [const { MaybeUninit::<sys::ibv_wc>::uninit() }; POLL_BATCH];
        #[expect(clippy::cast_possible_truncation, clippy::cast_possible_wrap, reason = "32")]
        // SAFETY: our queue; as many may be written.
        let returned =
            unsafe { sys::ibv_poll_cq(self.inner.raw, POLL_BATCH as i32, raw.as_mut_ptr().cast()) };
        let Ok(count) = usize::try_from(returned) else {
            self.is_broken = true;
            return 0;
        };
        for raw in raw.iter().take(count) {
            // SAFETY: the verb has written the first `count`.
            each(WorkCompletion::new(unsafe { raw.assume_init_ref() }));
        }
        count
    }

    /// Have the channel told of the next completion, once. To sleep without missing one: arm, then poll
    /// until there is none, then wait.
    pub fn arm(&mut self) -> Result<(), VerbsError> {
        // SAFETY: ours.
        VerbsError::check("ibv_req_notify_cq", unsafe { sys::ibv_req_notify_cq(self.inner.raw, 0) })
    }

    /// How many it has room for.
    #[must_use]
    pub fn entries(&self) -> u32 {
        self.entries
    }

    /// Names it in [`crate::AsyncEvent::CompletionQueueError`], while it is there.
    #[must_use]
    pub fn identity(&self) -> usize {
        self.inner.raw.addr()
    }

    /// Something else than a poll has told that it is dead: see [`CompletionQueue::is_broken`].
    pub fn set_broken(&mut self) {
        self.is_broken = true;
    }

    /// A poll failed: the device or the queue is dead, its queue pairs are to be closed.
    #[must_use]
    pub fn is_broken(&self) -> bool {
        self.is_broken
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn raw(status: u32) -> sys::ibv_wc {
        // SAFETY: numbers.
        let mut raw: sys::ibv_wc = unsafe { std::mem::zeroed() };
        (raw.wr_id, raw.status, raw.byte_len, raw.qp_num) = (7, status, 64, 17);
        raw
    }

    #[test]
    fn a_status_displays_as_the_library_says_it() {
        assert_eq!(WcStatus::SUCCESS.to_string(), "success (0)");
        assert!(WcStatus::FLUSHED.to_string().to_lowercase().contains("flush"), "{}", WcStatus::FLUSHED);
        assert!(!WcStatus(12345).to_string().is_empty());
    }

    #[test]
    fn a_failed_completion_says_nothing_but_whose_it_is_and_why() {
        let completion = WorkCompletion::new(&raw(5));
        assert!(!completion.is_ok && completion.status == WcStatus::FLUSHED);
        assert_eq!((completion.id, completion.queue_pair), (7, 17));
        assert_eq!(completion.bytes, 0);
    }

    #[test]
    fn one_that_went_well_says_how_many_bytes() {
        let completion = WorkCompletion::new(&raw(0));
        assert_eq!((completion.is_ok, completion.bytes), (true, 64));
    }

    #[test]
    fn the_bindings_have_the_sizes_of_the_header() {
        // As gcc says for libibverbs' headers on 64 bits; unions are bound by hand in rdma-sys.
        assert_eq!(size_of::<sys::ibv_wc>(), 48);
        assert_eq!(size_of::<sys::ibv_send_wr>(), 128);
        assert_eq!(size_of::<sys::ibv_recv_wr>(), 32);
        assert_eq!(size_of::<sys::ibv_async_event>(), 16);
        assert_eq!(size_of::<sys::rdma_cm_event>(), 80);
        assert_eq!(size_of::<sys::rdma_cm_id>(), 416);
    }
}
