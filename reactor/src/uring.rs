//! [`Ring`]: asynchronous reads, writes and other operations (io_uring) on files and block devices
//! ([`FileRing`]), and on an NVMe namespace whose commands the kernel passes to the drive ([`PassRing`]).
//!
//! What it is: a ring that *owns* the buffer of every operation in flight, so that no drop, abort or panic
//! can free memory that a device writes to. Operations are queued, submitted with one system call per turn,
//! and completed with the caller's token and buffer.
//!
//! ```text
//!   read | write | ... -> queued -> submit (once a turn) -> in flight -> poll -> Completion
//!                           ^                                              |
//!                           └──── short: the remainder; EINTR, EAGAIN ─────┘
//! ```
//!
//! Files are registered with the kernel, and parts of the pool's memory at their first use. If the kernel
//! refuses that (locked memory is limited without privilege), the ring works without registration.
//!
//! A polled ring (IOPOLL) polls the device for completions in every [`Ring::poll`], and the device sends no
//! interrupts. For files it does only reads and writes, with O_DIRECT, on block devices with poll queues.
//!
//! What it does not do: it does not order operations. A flush covers only the writes that have *completed*
//! before the flush was queued.
//!
//! Limits: 4096 operations in flight, 64 registered files (further files work unregistered). A ring stays on
//! the thread that made it.
//! UNSAFETY: passes addresses of buffers and io vectors to the kernel; the in-flight table keeps both until
//! the operation has completed.
#![expect(unsafe_code, reason = "hands owned memory to the kernel")]

pub mod admin;
mod file;
mod flight;
mod pass;
mod pieces;

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use io_uring::{IoUring, Submitter, cqueue, squeue};
use rustix::io::Errno;

use crate::affinity::{available_cores, cores_without_pollers};
use crate::mem::{Buf, Pool};
use crate::slab::{Slab, Slot};
use flight::{Device, Flight, Step};
use pieces::{BufferLocation, Pieces};

pub use file::{FileIndex, FileRing};
pub use pass::{PassCommand, PassDone, PassError, PassRing};

/// Maximum number of operations in flight.
pub const RING_ENTRIES_MAX: u32 = 4096;
/// Maximum number of retries of an operation after EINTR or EAGAIN, before it fails with the error.
const RETRIES_MAX: u8 = 16;

/// A completed operation.
#[derive(Debug)]
pub struct Completion<E = io::Error> {
    /// Token that the caller passed with the operation.
    pub token: u64,
    /// `Ok` when the whole operation was done. A read beyond the end of a file is
    /// [`io::ErrorKind::UnexpectedEof`].
    pub result: Result<(), E>,
    /// The buffer; `None` for an operation without data.
    pub buf: Option<Buf>,
}

/// A ring for the operations of `D`. See the module.
pub struct Ring<D: Device> {
    ring: IoUring<D::Submission, D::Completion>,
    flights: Slab<Flight<D::Operation>>,
    /// Io vectors by the index of the slot; allocated when a slot first needs them, then kept.
    vectors: Box<[Vec<libc::iovec>]>,
    device: D,
    pieces: Pieces,
    /// Keeps the registered memory mapped, so that no other memory gets an address in `pieces`.
    _pool: Option<Pool>,
    /// True while entries are queued that the kernel has not consumed yet.
    is_queued: bool,
    /// True while the ring is being dropped: no operation is queued again.
    is_draining: bool,
    is_polled: bool,
}

impl<D: Device> Ring<D> {
    /// Creates a ring. Memory of `pool` is registered in pieces, each at the first use of a buffer in it, if
    /// the kernel allows that.
    fn make(entries: u32, pool: &Pool, is_polled: bool, device: D) -> io::Result<Ring<D>> {
        let ring = build_ring(entries, is_polled)?;
        let (pieces, pool) = register_pool(&ring.submitter(), pool);
        let entries = entries as usize;
        Ok(Ring {
            ring,
            flights: Slab::with_capacity(entries),
            vectors: (0..entries).map(|_| Vec::new()).collect(),
            device,
            pieces,
            _pool: pool,
            is_queued: false,
            is_draining: false,
            is_polled,
        })
    }

    /// Returns the count of operations not passed on by [`Ring::poll`] yet, queued ones included.
    #[inline]
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.flights.len()
    }

    fn start(&mut self, flight: Flight<D::Operation>) {
        let Ok(slot) = self.flights.insert(flight) else {
            panic!("more operations than the ring has entries")
        };
        self.queue(slot);
    }

    /// Queues the rest of the operation in `slot`.
    fn queue(&mut self, slot: Slot) {
        let Some(flight) = self.flights.get_mut(slot) else { return };
        let submitter = self.ring.submitter();
        let data = flight.data(&mut self.vectors[slot.index()], |addr, zone| {
            registered(&submitter, &mut self.pieces, addr, zone)
        });
        let entry = self.device.entry(flight, &data, u64::from(slot.to_wire()));
        // SAFETY: the entry refers to the flight's buffer and the slot's vectors. Both stay, unmoved, until
        // the completion is seen (`remove` in `on_result`), or for ever (`drop`). The kernel transfers no
        // more than `data` has: the entry of a file operation has its length, and a command to a drive was
        // made for just these bytes.
        let pushed = unsafe { self.ring.submission().push(&entry) };
        assert!(pushed.is_ok(), "the queue holds an entry for each operation in flight");
        self.is_queued = true;
    }

    /// Submits queued operations: one system call (more if signals interrupt it), none when nothing is
    /// queued. Operations that the kernel does not accept now (EAGAIN, EBUSY) stay queued for the next turn.
    ///
    /// # Errors
    /// The error of io_uring_enter(2), when the ring is broken.
    #[inline]
    pub fn submit(&mut self) -> io::Result<()> {
        if self.is_queued { self.enter(0) } else { Ok(()) }
    }

    /// Submits queued operations and waits for a completion. Returns immediately, without a system call, when
    /// no operation is in flight or a completion is in the queue already. For the control path and tests.
    ///
    /// # Errors
    /// The error of io_uring_enter(2), when the ring is broken.
    pub fn wait(&mut self) -> io::Result<()> {
        if self.flights.is_empty() || !self.ring.completion().is_empty() { Ok(()) } else { self.enter(1) }
    }

    fn enter(&mut self, want: usize) -> io::Result<()> {
        let result = enter(&self.ring.submitter(), want);
        self.is_queued = !self.ring.submission().is_empty();
        result
    }

    /// Passes each completed operation to `each`, at most as many as can be in flight. Returns their count.
    #[inline]
    pub fn poll(&mut self, mut each: impl FnMut(Completion<D::Error>)) -> usize {
        if self.flights.is_empty() {
            return 0;
        }
        self.run_kernel_work();
        let mut count = 0;
        for _ in 0..self.flights.capacity() {
            // Entries are read one at a time: if `each` panics, the others remain for the drop.
            let Some(entry) = self.ring.completion().next() else { break };
            let entry: cqueue::Entry = entry.into();
            if let Some(completion) = self.on_result(entry.user_data(), entry.result()) {
                count += 1;
                each(completion);
            }
        }
        count
    }

    /// Enters the kernel if the completion queue is empty, and the kernel has completion work for this thread
    /// (`taskrun`) or the ring is polled (IOPOLL). Only a system call does that work or polls the device.
    #[inline]
    fn run_kernel_work(&mut self) {
        if self.ring.completion().is_empty() && (self.is_polled || self.ring.submission().taskrun()) {
            // An error is ignored: the next poll tries again.
            let _ = self.enter(0);
        }
    }

    fn on_result(&mut self, user_data: u64, result: i32) -> Option<Completion<D::Error>> {
        let slot = Slot::from_wire(u32::try_from(user_data).unwrap_or(0));
        let flight = self.flights.get_mut(slot)?;
        let is_transient = [-libc::EINTR, -libc::EAGAIN].contains(&result);
        let step = if is_transient && flight.retries < RETRIES_MAX {
            flight.retries += 1;
            Step::Again
        } else {
            D::on_result(flight, result)
        };
        let result = match step {
            Step::Again if !self.is_draining => {
                self.queue(slot);
                return None;
            }
            Step::Again => Err(io::Error::from(io::ErrorKind::Interrupted).into()),
            Step::Ended(result) => result,
        };
        let Flight { token, buf, .. } = self.flights.remove(slot)?;
        Some(Completion { token, result, buf })
    }
}

impl<D: Device> AsFd for Ring<D> {
    /// Returns the descriptor of the ring, for [`Readiness`](crate::net::Readiness). It is readable when
    /// [`Ring::poll`] has a completion. The descriptor of a polled ring never becomes readable.
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the ring owns its descriptor and outlives the borrow.
        unsafe { BorrowedFd::borrow_raw(self.ring.as_raw_fd()) }
    }
}

impl<D: Device> Drop for Ring<D> {
    /// Waits for all operations in flight: a device may still write to their buffers.
    fn drop(&mut self) {
        self.is_draining = true;
        while !self.flights.is_empty() {
            if self.wait().is_err() {
                // The ring is broken. Memory that the kernel may still write to is leaked, never reused.
                std::mem::forget(std::mem::replace(&mut self.flights, Slab::with_capacity(0)));
                std::mem::forget(std::mem::take(&mut self.vectors));
                return;
            }
            self.poll(drop);
        }
        // The kernel releases the files of a closed ring some time later. Until then, a lock on a file would
        // outlive this value. A worker thread of the kernel that has done an operation posts the completion
        // before it lets go of the file: in that case the lock still outlives this value for a moment.
        let _ = self.ring.submitter().unregister_files();
    }
}

impl<D: Device> std::fmt::Debug for Ring<D> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let polls = if self.is_polled { ", polls" } else { "" };
        write!(f, "Ring({} of {} in flight{polls})", self.in_flight(), self.flights.capacity())
    }
}

/// Submits queued operations, and waits for `want` completions. EAGAIN and EBUSY are not errors: the
/// operations stay queued. Repeats the call after EINTR.
fn enter(ring: &Submitter<'_>, want: usize) -> io::Result<()> {
    loop {
        let result = ring.submit_and_wait(want);
        match result.map_err(|error| Errno::from_io_error(&error).ok_or(error)) {
            Ok(_) | Err(Ok(Errno::AGAIN | Errno::BUSY)) => return Ok(()),
            Err(Ok(Errno::INTR)) => {}
            Err(Ok(errno)) => return Err(errno.into()),
            Err(Err(error)) => return Err(error),
        }
    }
}

/// Creates the kernel's table for the memory of `pool`, with no memory registered yet. Returns the pieces,
/// and `pool` for the ring to keep. If the kernel refuses it, there are no pieces and no pool.
fn register_pool(ring: &Submitter<'_>, pool: &Pool) -> (Pieces, Option<Pool>) {
    let zones = pool.zone_ranges().map(|(addr, bytes, buffer)| (addr.as_ptr() as usize, bytes, buffer));
    let pieces = Pieces::new(zones);
    if ring.register_buffers_sparse(pieces.len()).is_ok() {
        (pieces, Some(pool.clone()))
    } else {
        (Pieces::default(), None)
    }
}

/// Returns the index of the registered piece with the memory at `addr`, which is in the pool's `zone`.
/// Registers the piece at its first use. `None`: the kernel refuses that, or it is not of the ring's pool.
#[inline]
fn registered(ring: &Submitter<'_>, pieces: &mut Pieces, addr: usize, zone: u8) -> Option<u16> {
    match pieces.location_of(addr, zone) {
        BufferLocation::Registered(index) => Some(index),
        BufferLocation::Unknown => None,
        BufferLocation::Fresh(piece) => {
            let memory = libc::iovec { iov_base: piece.start as *mut libc::c_void, iov_len: piece.bytes };
            // SAFETY: the range is part of a zone of the pool, and stays mapped for the life of the ring,
            // which keeps the pool. The kernel writes to the range only for operations of this ring, which
            // own their buffers.
            let result = unsafe { ring.register_buffers_update(u32::from(piece.index), &[memory], None) };
            if result.is_err() {
                pieces.on_refused();
                return None;
            }
            pieces.on_registered(piece);
            Some(piece.index)
        }
    }
}

/// Lets the kernel's worker threads run on CPUs that no thread polls; if all CPUs are polled, on all of them.
/// The calling thread's CPU is always excluded. The workers do blocking work (a write that allocates blocks,
/// a hole punch). Without this, workers inherit the affinity of the submitting thread, and beside a polling
/// thread they get only the scheduler's time slices. An error is ignored: it costs only speed.
fn set_worker_affinity(ring: &Submitter<'_>) {
    let own = rustix::thread::sched_getcpu();
    let (mut cpus, bits) = (cores_without_pollers(), usize::try_from(libc::CPU_SETSIZE).unwrap_or(1024));
    if cpus.is_empty() {
        cpus = available_cores();
    }
    cpus.retain(|cpu| *cpu != own && *cpu < bits);
    if cpus.is_empty() {
        return;
    }
    // SAFETY: a CPU set is an array of bits, for which all zeroes is a value; the bits that are set are below
    // its size.
    let others = unsafe {
        let mut others: libc::cpu_set_t = std::mem::zeroed();
        cpus.into_iter().for_each(|cpu| libc::CPU_SET(cpu, &mut others));
        others
    };
    let _ = ring.register_iowq_aff(&others);
}

/// Makes a small ring and drops it.
///
/// # Errors
/// That of io_uring_setup(2), with what forbids it.
pub fn probe() -> io::Result<()> {
    build_ring::<squeue::Entry, cqueue::Entry>(1, false).map(drop)
}

/// Returns an error of io_uring_setup(2) with what the operator can do about it.
fn explained(error: io::Error) -> io::Error {
    let filter = "a seccomp filter (of a container, or SystemCallFilter= of a service)";
    let why = match Errno::from_io_error(&error) {
        Some(Errno::PERM) => {
            let value = std::fs::read_to_string("/proc/sys/kernel/io_uring_disabled");
            let is_disabled = value.is_ok_and(|value| value.trim() != "0");
            match is_disabled {
                true => "the sysctl kernel.io_uring_disabled forbids it".to_owned(),
                false => format!("{filter} forbids it"),
            }
        }
        Some(Errno::NOSYS) => format!("{filter} hides it, or the kernel was built without it"),
        Some(Errno::NOMEM) => {
            "memory is short, or what the process may lock: raise ulimit -l (LimitMEMLOCK= of a service)"
                .to_owned()
        }
        Some(_) | None => return error,
    };
    io::Error::new(error.kind(), format!("{error}: {why}"))
}

/// Creates a ring with the set-up flags that this kernel supports: no interrupt of a polling thread for
/// completion work (5.19), one submitting thread (6.0). Fails with `InvalidInput` for 0 or more than
/// [`RING_ENTRIES_MAX`] entries, else with the error of io_uring_setup(2).
///
/// With `is_polled`, the device is polled for completions (IOPOLL).
fn build_ring<S: squeue::EntryMarker, C: cqueue::EntryMarker>(
    entries: u32,
    is_polled: bool,
) -> io::Result<IoUring<S, C>> {
    if entries == 0 || entries > RING_ENTRIES_MAX {
        return Err(io::Error::from(io::ErrorKind::InvalidInput));
    }
    let builder = || {
        let mut builder = IoUring::<S, C>::builder();
        builder.dontfork();
        if is_polled {
            builder.setup_iopoll();
        }
        builder
    };
    let mut best = builder();
    best.setup_coop_taskrun().setup_taskrun_flag().setup_single_issuer();
    let ring = best.build(entries).or_else(|_| {
        let mut better = builder();
        better.setup_coop_taskrun().setup_taskrun_flag();
        better.build(entries).or_else(|_| builder().build(entries))
    });
    let ring = ring.map_err(explained)?;
    set_worker_affinity(&ring.submitter());
    Ok(ring)
}
