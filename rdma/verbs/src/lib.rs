//! A safe interface to libibverbs and librdmacm. All `unsafe` code of RDMA is in this crate.
//!
//! ```text
//!   Device ─ MemoryRegion                        CmChannel ─ next_event ─> CmEvent { ConnectRequest: CmId }
//!      ├─ CompletionChannel ─ CompletionQueue ─┐     └─ CmId ─ resolve, listen, connect, accept, reject
//!      └─ SharedReceiveQueue ──────────────────┴──────────┴─ create_queue_pair ─> QueuePair ─ SendBatch
//! ```
//!
//! **Order.** Each object keeps alive what it needs (a queue pair its identifier, completion queues, shared
//! receive queue and device), so that they may be dropped in any order.
//!
//! **Polled.** Nothing blocks and nothing on the data path (post, poll) allocates. What can be waited for has
//! a file descriptor for epoll: completion channel, connection manager's channel, device.
//!
//! **Threads.** What is used by one core is `Send`, not `Sync`: queue pair, completion queue, shared receive
//! queue, identifier, channels. Devices and memory regions are shared. An identifier may be on another thread
//! than the channel that tells its events: both take the channel's lock, on the control path only.
//!
//! **What remains the caller's duty.** A work request names memory by address and key. The device checks
//! keys: it touches nothing but what a living [`MemoryRegion`] covers, and that keeps its memory mapped. But
//! it writes there at its own time. So until the completion of a READ or a RECV has been polled, its buffer
//! is neither read, nor written, nor lent; until that of a SEND or WRITE (not inline) its buffer
//! is not written. The same holds for memory whose remote key a peer knows, until the key is invalid. A
//! completion queue has room for every work request that may complete to it.
//!
//! **Order of what a device writes.** Memory is registered with relaxed ordering where the device takes it:
//! the writes of a message may pass each other on PCIe. A completion entry is written without it, and so
//! passes none of them: who has polled it finds all. By the rule above the caller does not look before.
//!
//! **Limits** are checked: more segments, inline bytes or work requests than a queue was made for are an
//! error of the verb, and nothing of that request is posted.
//!
//! **Fork.** `ibv_fork_init` is not called: it makes each registration split mappings by `madvise`, huge
//! pages among them, and keep a tree of pages under a lock. Only a child that shares our memory and outlives
//! the fork would need it. We have none: a child of ours does nothing but `exec`, and since 5.12 the kernel
//! copies pinned pages for the child, not for us.
//!
//! What it does not do: datagrams, atomics, multicast, memory windows, immediate data, InfiniBand's own
//! addresses, memory on demand. It knows no NVMe.

mod address;
mod batch;
mod cm_channel;
mod cm_id;
mod completion;
mod device;
mod error;
mod memory;
mod queue_pair;
mod receive;

pub use batch::{Operation, SendBatch, SendData};
pub use cm_channel::{CmChannel, CmEvent, CmEventKind, PRIVATE_DATA_BYTES_MAX};
pub use cm_id::{CmId, CmToken, ConnectParams};
pub use completion::{CompletionChannel, CompletionQueue, POLL_BATCH, WcStatus, WorkCompletion};
pub use device::{AsyncEvent, Device, DeviceLimits, Found};
pub use error::VerbsError;
pub use memory::{Access, MemoryRegion, Sge};
pub use queue_pair::{LIST_BATCH, Posting, QueuePair, QueuePairConfig, RNR_0_64_MS};
pub use receive::SharedReceiveQueue;

#[cfg(test)]
mod tests {
    use super::*;

    fn is_send<T: Send>() {}
    fn is_shared<T: Send + Sync>() {}

    #[test]
    fn what_belongs_to_a_core_may_move_there_and_devices_and_regions_are_shared() {
        is_shared::<Device>();
        is_shared::<MemoryRegion>();
        is_send::<CompletionChannel>();
        is_send::<CompletionQueue>();
        is_send::<SharedReceiveQueue>();
        is_send::<CmChannel>();
        is_send::<CmId>();
        is_send::<CmEvent>();
        is_send::<QueuePair>();
    }
}
