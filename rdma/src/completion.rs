//! [`CompletionQueue`] with its entries ([`WorkCompletion`]), and [`CompletionChannel`], which reports
//! completions of armed queues to a sleeping core.
//!
//! UNSAFETY: queue pairs hold references to their completion queue, and a completion queue holds one to its
//! channel. So the queue is destroyed after the queue pairs and before the channel.
#![expect(unsafe_code, reason = "calls libibverbs")]

use std::cell::Cell;
use std::ffi::CStr;
use std::fmt;
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use rdma_sys as sys;

use crate::device::{Device, set_nonblocking};
use crate::error::VerbsError;

/// Status of a completion, as `ibv_wc_status`. Displayed as the text of `ibv_wc_status_str` and the value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct WcStatus(pub u32);

impl WcStatus {
    /// The work request was executed.
    pub const SUCCESS: WcStatus = WcStatus(sys::ibv_wc_status::IBV_WC_SUCCESS);
    /// The work request was flushed, as the queue pair is in the error state.
    pub const FLUSHED: WcStatus = WcStatus(sys::ibv_wc_status::IBV_WC_WR_FLUSH_ERR);
    /// The remote key does not allow this access to this address.
    pub const REMOTE_ACCESS: WcStatus = WcStatus(sys::ibv_wc_status::IBV_WC_REM_ACCESS_ERR);
}

impl fmt::Display for WcStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // SAFETY: `ibv_wc_status_str` accepts any value and returns null or a static string.
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

/// A completion queue entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WorkCompletion {
    /// Identifier that was passed with the work request.
    pub id: u64,
    /// True on success. Of a failed completion only `id`, `status` and `queue_pair` are valid.
    pub is_ok: bool,
    /// Success, or the reason of the failure.
    pub status: WcStatus,
    /// Bytes that a RECV or READ has transferred; not defined for a SEND or WRITE; 0 on failure.
    pub bytes: u32,
    /// Number of the queue pair: [`crate::QueuePair::number`].
    pub queue_pair: u32,
    /// Value of the [`crate::Operation::WriteWithImmediate`] that consumed this receive; otherwise `None`.
    pub immediate: Option<u32>,
}

const WITH_IMMEDIATE: u32 = sys::ibv_wc_flags::IBV_WC_WITH_IMM.0;

impl WorkCompletion {
    fn new(raw: &sys::ibv_wc) -> WorkCompletion {
        let status = WcStatus(raw.status);
        let is_ok = status == WcStatus::SUCCESS;
        let has_immediate = is_ok && raw.wc_flags & WITH_IMMEDIATE != 0;
        // SAFETY: every field of the union is an integer of 32 bits, so every value is valid.
        let immediate =
            has_immediate.then(|| u32::from_be(unsafe { raw.imm_data_invalidated_rkey_union.imm_data }));
        WorkCompletion {
            id: raw.wr_id,
            is_ok,
            status,
            bytes: if is_ok { raw.byte_len } else { 0 },
            queue_pair: raw.qp_num,
            immediate,
        }
    }
}

#[derive(Debug)]
struct ChannelInner {
    raw: *mut sys::ibv_comp_channel,
    device: Arc<Device>,
}

// SAFETY: libibverbs is thread-safe, and the fields are not written after construction.
unsafe impl Send for ChannelInner {}
// SAFETY: as for `Send`: shared references only pass the pointer to thread-safe calls.
unsafe impl Sync for ChannelInner {}

impl Drop for ChannelInner {
    fn drop(&mut self) {
        // SAFETY: destroyed only here. Each completion queue on the channel holds an `Arc` of this struct, so
        // none is left.
        unsafe { sys::ibv_destroy_comp_channel(self.raw) };
    }
}

/// A channel whose descriptor becomes readable when an armed completion queue receives a completion.
#[derive(Debug)]
pub struct CompletionChannel {
    inner: Arc<ChannelInner>,
    _not_sync: PhantomData<Cell<()>>,
}

impl CompletionChannel {
    /// Creates a nonblocking completion channel.
    ///
    /// # Errors
    /// The kernel cannot create a file descriptor, such as when too many files are open.
    pub fn new(device: &Arc<Device>) -> Result<CompletionChannel, VerbsError> {
        // SAFETY: `device` keeps its context open, and the channel keeps `device`.
        let raw = unsafe { sys::ibv_create_comp_channel(device.context()) };
        let raw = VerbsError::check_pointer("ibv_create_comp_channel", raw)?;
        let inner = Arc::new(ChannelInner { raw, device: Arc::clone(device) });
        // SAFETY: `raw` is not null, and `inner` keeps the channel alive.
        set_nonblocking(unsafe { (*raw).fd })?;
        Ok(CompletionChannel { inner, _not_sync: PhantomData })
    }

    /// Reads and acknowledges the oldest event, and returns its queue ([`CompletionQueue::identity`]). The
    /// queue reports nothing more until it is armed again. `None`: no event is pending, or the read failed.
    /// Costs one system call; the descriptor stays readable while events are pending.
    pub fn take_event(&self) -> Option<usize> {
        let (mut raw, mut context) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: `inner` keeps the channel alive; both pointers are written on success.
        if unsafe { sys::ibv_get_cq_event(self.inner.raw, &raw mut raw, &raw mut context) } != 0 {
            return None;
        }
        // SAFETY: `ibv_destroy_cq` waits until all events of the queue are acknowledged, so `raw` is still
        // alive.
        unsafe { sys::ibv_ack_cq_events(raw, 1) };
        Some(context.addr())
    }

    /// Reads all pending events and returns the count of those of `queue`. Unless the count is 0, poll and
    /// arm `queue` again. If several queues share this channel, poll and arm all of them: the events of the
    /// other queues are discarded.
    pub fn take_events(&self, queue: &CompletionQueue) -> usize {
        std::iter::from_fn(|| self.take_event()).filter(|told| *told == queue.identity()).count()
    }
}

impl AsFd for CompletionChannel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: `inner` keeps the channel and its descriptor open while `self` is borrowed.
        unsafe { BorrowedFd::borrow_raw((*self.inner.raw).fd) }
    }
}

/// Returns a number that no queue of this process has had: numbers of queue pairs and addresses of completion
/// queues are used again, and an event may be handled after its queue is gone.
pub(crate) fn next_serial() -> usize {
    static SERIALS: AtomicUsize = AtomicUsize::new(1);
    SERIALS.fetch_add(1, Ordering::Relaxed)
}

#[derive(Debug)]
pub(crate) struct CompletionQueueInner {
    pub(crate) raw: *mut sys::ibv_cq,
    serial: usize,
    _channel: Option<Arc<ChannelInner>>,
    pub(crate) device: Arc<Device>,
}

// SAFETY: libibverbs is thread-safe, and the fields are not written after construction.
unsafe impl Send for CompletionQueueInner {}
// SAFETY: as for `Send`: shared references only pass the pointer to thread-safe calls.
unsafe impl Sync for CompletionQueueInner {}

impl Drop for CompletionQueueInner {
    fn drop(&mut self) {
        // SAFETY: destroyed only here. Each queue pair of the queue holds an `Arc` of this struct, so none is
        // left.
        unsafe { sys::ibv_destroy_cq(self.raw) };
    }
}

/// A completion queue, for one or more queue pairs.
#[derive(Debug)]
pub struct CompletionQueue {
    pub(crate) inner: Arc<CompletionQueueInner>,
    entries: u32,
    is_broken: bool,
    _not_sync: PhantomData<Cell<()>>,
}

/// Maximum completions of one [`CompletionQueue::poll`].
pub const POLL_BATCH: usize = 32;

impl CompletionQueue {
    /// Creates a queue of at least `entries` completions. While armed, the queue reports to `channel`, if
    /// given. `vector` is the index of the completion vector (interrupt).
    ///
    /// # Errors
    /// EINVAL: `entries` is 0 or exceeds the device's limit, `vector` does not exist, or `channel` belongs to
    /// another device. Otherwise the error of `ibv_create_cq`.
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
        let serial = next_serial();
        let context = ptr::without_provenance_mut(serial);
        // SAFETY: `device` keeps the context open; the channel is null or on the same context. The queue
        // keeps both alive. The library passes the queue's context back and does not dereference it.
        let raw = unsafe { sys::ibv_create_cq(device.context(), count, context, raw_channel, vector) };
        let raw = VerbsError::check_pointer(VERB, raw)?;
        // SAFETY: `raw` is not null; the verb has just created the queue.
        let granted = unsafe { (*raw).cqe };
        let channel = channel.map(|channel| Arc::clone(&channel.inner));
        let inner =
            Arc::new(CompletionQueueInner { raw, serial, _channel: channel, device: Arc::clone(device) });
        let entries = u32::try_from(granted).unwrap_or(entries).max(entries);
        Ok(CompletionQueue { inner, entries, is_broken: false, _not_sync: PhantomData })
    }

    /// Calls `each` with up to [`POLL_BATCH`] completions and returns their count. Fewer than [`POLL_BATCH`]:
    /// the queue is empty now, or the poll has failed ([`CompletionQueue::is_broken`]).
    #[inline]
    pub fn poll(&mut self, mut each: impl FnMut(WorkCompletion)) -> usize {
        let mut raw = [const { MaybeUninit::<sys::ibv_wc>::uninit() }; POLL_BATCH];
        #[expect(clippy::cast_possible_truncation, clippy::cast_possible_wrap, reason = "32")]
        // SAFETY: `inner` keeps the queue alive; `raw` has POLL_BATCH entries.
        let returned =
            unsafe { sys::ibv_poll_cq(self.inner.raw, POLL_BATCH as i32, raw.as_mut_ptr().cast()) };
        let Ok(count) = usize::try_from(returned) else {
            self.is_broken = true;
            return 0;
        };
        for raw in raw.iter().take(count) {
            // SAFETY: the verb has returned `count`, so it has written the first `count` entries.
            each(WorkCompletion::new(unsafe { raw.assume_init_ref() }));
        }
        count
    }

    /// Arms the queue: the channel reports the next completion, once. To sleep without missing a completion:
    /// arm, poll until the queue is empty, then wait.
    pub fn arm(&mut self) -> Result<(), VerbsError> {
        // SAFETY: `inner` keeps the queue alive.
        VerbsError::check("ibv_req_notify_cq", unsafe { sys::ibv_req_notify_cq(self.inner.raw, 0) })
    }

    /// Returns the capacity of the queue in completions; at least as requested.
    #[must_use]
    pub fn entries(&self) -> u32 {
        self.entries
    }

    /// Returns the identifier of the queue in [`crate::AsyncEvent::CompletionQueueError`] and
    /// [`CompletionChannel::take_event`]. No other queue of this process ever has it.
    #[must_use]
    pub fn identity(&self) -> usize {
        self.inner.serial
    }

    /// Marks the queue as failed, for an asynchronous event of the device: see
    /// [`CompletionQueue::is_broken`].
    pub fn set_broken(&mut self) {
        self.is_broken = true;
    }

    /// Returns true after a failed poll or [`CompletionQueue::set_broken`]: its queue pairs must be closed.
    #[must_use]
    pub fn is_broken(&self) -> bool {
        self.is_broken
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn raw(status: u32) -> sys::ibv_wc {
        // SAFETY: `ibv_wc` contains only integers, for which zero is valid.
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
    fn only_a_completion_with_the_flag_has_an_immediate_value() {
        let mut raw = raw(0);
        raw.imm_data_invalidated_rkey_union.imm_data = 0x0102_0304_u32.to_be();
        assert_eq!(WorkCompletion::new(&raw).immediate, None);
        raw.wc_flags = WITH_IMMEDIATE;
        assert_eq!(WorkCompletion::new(&raw).immediate, Some(0x0102_0304));
        raw.status = 5;
        assert_eq!(WorkCompletion::new(&raw).immediate, None);
    }

    #[test]
    fn the_bindings_have_the_sizes_of_the_header() {
        // Sizes by gcc with libibverbs' headers on a 64-bit system; rdma-sys declares the unions by hand.
        assert_eq!(size_of::<sys::ibv_wc>(), 48);
        assert_eq!(size_of::<sys::ibv_send_wr>(), 128);
        assert_eq!(size_of::<sys::ibv_recv_wr>(), 32);
        assert_eq!(size_of::<sys::ibv_async_event>(), 16);
        assert_eq!(size_of::<sys::rdma_cm_event>(), 80);
        assert_eq!(size_of::<sys::rdma_cm_id>(), 416);
    }
}
