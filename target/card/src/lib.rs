//! Coherent caches on client hosts (`docs/extensions.md`, "Coherent caches"): the state machines of both
//! ends, without clock, socket or thread.
//!
//! ```text
//!   target   Cluster, one for each clustered disk
//!              Directory: which member may have which extent; which extents are being written
//!              members: numbers, leases, queues of Invalidate and Done
//! ClusterWrite: mark the extents -> tell the members -> they acknowledge or are over -> disk -> Done
//!   member   Agent: lease and states of the extents, read by the cores
//!            Session: Join and Next, the notices and their acknowledgement, on the manager's thread
//! ```
//!
//! A *member* is a host that caches the disk. It is *over* when it has no lease any more, or has said that it
//! has dropped all pages: a write does not wait for it.
//!
//! May use: `nvme/spec`, `reactor`. Read `directory.rs` first: it says why no stale page is read.
#![forbid(unsafe_code)]

mod agent;
mod cluster;
mod directory;
mod members;
mod session;

pub use agent::{Agent, CachedPages, Fill, ForeignWrite};
pub use cluster::{Cluster, ClusterWrite, JoinError, Membership, START_WAIT};
pub use directory::{Directory, SHORT_PAGES_MAX};
pub use members::{NEXT_WAIT, Told, UNACKNOWLEDGED_MAX, Wake};
pub use session::{Command, Session};
