//! A safe interface to libibverbs and librdmacm, with all `unsafe` of RDMA. It may use `reactor`. Begin with
//! [`Device`] and [`QueuePair`]; `nvme/rdma/src/shell.rs` uses them on the data path.
//!
//! ```text
//!   Device ─ Domain, MemoryRegion                CmChannel ─ next_event ─> CmEvent { ConnectRequest: CmId }
//!      ├─ CompletionChannel ─ CompletionQueue ─┐     └─ CmId ─ resolve, listen, connect, accept, reject
//!      └─ SharedReceiveQueue ──────────────────┴──────────┴─ create_queue_pair ─> QueuePair ─ SendBatch
//!   Connector: the active side of a connection, step by step
//! ```
//!
//! **Drop order.** Any: a queue pair keeps its identifier, completion queue, shared receive queue and device.
//!
//! **Polled.** No call waits for the peer, and the data path (post, poll) does not allocate. Calls of the
//! control path take locks and make system calls; registering or deregistering large memory takes seconds.
//! Each event source has a file descriptor for epoll: completion channel, connection manager channel, device.
//!
//! **Threads.** Objects of one core are `Send`, not `Sync`: queue pair, completion queue, shared receive
//! queue, identifier, channels. Devices and memory regions are shared. An identifier and the channel that
//! reports its events may be used on different threads: both lock the channel, off the data path.
//!
//! **The caller's duty.** A work request names memory by address and key. The device checks keys: it accesses
//! only memory that a live [`MemoryRegion`] covers, which keeps that memory mapped. But the accesses are
//! asynchronous. So until the completion of a READ or a RECV has been polled, its buffer must not be read,
//! written or lent; until the completion of a SEND or WRITE (not inline) its buffer must not be written. The
//! same applies to memory whose remote key a peer has, until the key is invalidated. A completion queue must
//! have an entry for every work request that may complete to it.
//!
//! **Order of device writes.** Memory is registered with relaxed ordering if the device supports it: writes
//! of a message may pass each other on PCIe. A completion queue entry is written without relaxed ordering, so
//! it does not pass the data writes before it. A polled completion therefore implies that all data has
//! arrived. By the rule above the caller does not access the buffer earlier.
//!
//! **Limits** are checked: a request beyond the queue's segments, inline bytes or entries is not posted and
//! the verb returns an error. Earlier requests of the same batch may have been posted.
//!
//! **Fork.** `ibv_fork_init` is not called: each registration would split mappings, also of huge pages. Child
//! processes only call `exec`, and since Linux 5.12 the kernel copies pinned pages for the child.
//!
//! Not supported: datagrams, atomics, multicast, memory windows, SEND with immediate data, InfiniBand
//! addresses, on-demand paging.

mod address;
mod batch;
mod cm_channel;
mod cm_id;
mod completion;
mod connector;
mod device;
mod domain;
mod error;
mod memory;
mod queue_pair;
mod receive;

pub use batch::{Operation, SendBatch, SendData};
pub use cm_channel::{CmChannel, CmEvent, CmEventKind, PRIVATE_DATA_BYTES_MAX};
pub use cm_id::{CmId, CmToken, ConnectParams};
pub use completion::{CompletionChannel, CompletionQueue, POLL_BATCH, WcStatus, WorkCompletion};
pub use connector::{ConnectError, Connector, Progress};
pub use device::{AsyncEvent, Device, DeviceLimits, Found};
pub use domain::Domain;
pub use error::VerbsError;
pub use memory::{Access, MemoryRegion, RegisterPermit, Sge};
pub use queue_pair::{LIST_BATCH, Posting, QueuePair, QueuePairConfig, RNR_0_64_MS};
pub use receive::{RECEIVES_BATCH, ReceivesError, SharedReceiveQueue};

#[cfg(test)]
mod tests {
    use super::*;

    fn is_send<T: Send>() {}
    fn is_shared<T: Send + Sync>() {}

    #[test]
    fn what_belongs_to_a_core_may_move_there_and_devices_and_regions_are_shared() {
        is_shared::<Device>();
        is_shared::<Domain>();
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
