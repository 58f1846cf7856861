//! [`SocketRing`]: many connected sockets, received from and sent to with one system call a turn (io_uring).
//!
//! ```text
//!   sends().push(socket, pieces) .. submit()   all sends leave, and what came is looked at: one call
//!   poll(|socket, event| ..)                   Bytes, Sent, Closed, Failed: no call
//! ```
//!
//! A receive is armed once for each socket and goes on by itself (multishot). What comes lies in buffers that
//! the kernel takes from a ring of them, and goes back there when the caller has seen it. Sockets are
//! registered.
//!
//! Why nothing is sent from memory that is gone: each send is asked not to wait (`MSG_DONTWAIT`), so it has
//! ended, with what the socket took or with nothing, when the call that submits it returns. [`Sends`] holds
//! the memory borrowed until then, and a ring whose call failed submits nothing any more.
//!
//! What it does not do: it keeps no order between sockets, and does not put the rest of a send that was taken
//! in part back in line. It sleeps never: a turn without events returns at once.
//!
//! Limits: Linux 6.1; [`SOCKETS_MAX`] sockets, [`BUFFERS_MAX`] buffers. A ring stays on the thread that made
//! it.
//! UNSAFETY: gives addresses of buffers and of what is sent to the kernel, and reads what it put there.
#![expect(unsafe_code, reason = "shares receive buffers with the kernel and hands it what is sent")]

use std::io::{self, IoSlice};
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU16, Ordering};

use io_uring::types::{BufRingEntry, CancelBuilder, Fixed};
use io_uring::{IoUring, cqueue, opcode, squeue};
use rustix::io::Errno;

use crate::mem::{Pages, Region};

/// Most sockets of a ring.
pub const SOCKETS_MAX: usize = 8192;
/// Most buffers of a ring.
pub const BUFFERS_MAX: u16 = 1 << 14;
/// The only group of buffers.
const GROUP: u16 = 0;
/// `IORING_ENTER_GETEVENTS`: look at what came, also if nothing is waited for.
const ENTER_GETEVENTS: u32 = 1;

/// What has happened to a socket.
#[derive(Debug)]
pub enum Event<'a> {
    /// These bytes came, at most as many as a buffer holds.
    Bytes(&'a [u8]),
    /// The peer sends nothing more.
    Closed,
    /// A send has ended; the socket took so many bytes of it: 0 where it is full.
    Sent(usize),
    /// A send or the receive failed.
    Failed(Errno),
}

/// Sockets with one ring. See the module.
pub struct SocketRing {
    ring: IoUring,
    /// Kept open, although the ring has them registered: who they are shows in `/proc`.
    _sockets: Vec<OwnedFd>,
    received: ManuallyDrop<Received>,
    /// Sockets whose receive is to be armed.
    unarmed: Vec<usize>,
    /// What each socket sends from in this turn.
    vectors: Vec<Vec<libc::iovec>>,
    headers: Vec<libc::msghdr>,
    queued: Vec<usize>,
    /// A call failed: what it was to send may lie in the queue still.
    is_broken: bool,
}

/// The buffers that receives fill.
struct Received {
    entries: Region,
    bytes: Region,
    /// A power of two.
    count: u16,
    size: u32,
    tail: u16,
}

impl SocketRing {
    /// A ring of `sockets`, with `buffers` (a power of two) of `buffer_bytes` each to receive into. Their
    /// memory is touched.
    ///
    /// # Errors The system's, as where io_uring is disabled or too old; `InvalidInput` for sizes that are 0
    /// or too large.
    pub fn new(sockets: Vec<OwnedFd>, buffers: u16, buffer_bytes: u32) -> io::Result<SocketRing> {
        let count_is_right = buffers.is_power_of_two() && buffers <= BUFFERS_MAX;
        if sockets.is_empty() || sockets.len() > SOCKETS_MAX || !count_is_right || buffer_bytes == 0 {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        // One to arm and one to send for each socket.
        let entries = u32::try_from(2 * sockets.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
        let ring = IoUring::builder()
            .dontfork()
            .setup_cqsize((2 * entries).max(u32::from(buffers)))
            .setup_clamp()
            .setup_single_issuer()
            .setup_defer_taskrun()
            .setup_taskrun_flag()
            .setup_submit_all()
            .build(entries)?;
        let numbers: Vec<_> = sockets.iter().map(AsRawFd::as_raw_fd).collect();
        ring.submitter().register_files(&numbers)?;
        let mut received = Received::map(buffers, buffer_bytes)?;
        received.provide_all();
        // SAFETY: the ring of entries is mapped, page-aligned and of that many entries; `Drop` has the kernel
        // let go of it, or keeps it mapped.
        unsafe {
            let address = received.entries.base().as_ptr().expose_provenance() as u64;
            ring.submitter().register_buf_ring_with_flags(address, buffers, GROUP, 0)?;
        }
        received.publish();
        Ok(SocketRing {
            unarmed: (0..sockets.len()).collect(),
            vectors: sockets.iter().map(|_| Vec::new()).collect(),
            headers: sockets.iter().map(|_| no_header()).collect(),
            queued: Vec::with_capacity(sockets.len()),
            ring,
            _sockets: sockets,
            received: ManuallyDrop::new(received),
            is_broken: false,
        })
    }

    /// What is to be sent in this turn.
    pub fn sends<'memory>(&mut self) -> Sends<'_, 'memory> {
        // Of a turn that was begun and not submitted nothing is sent.
        self.queued.clear();
        Sends { ring: self, memory: PhantomData }
    }

    /// Hand `take` each event that there is, in the order of their ends, with the place of its socket in the
    /// list that the ring was made of.
    pub fn poll(&mut self, mut take: impl FnMut(usize, Event<'_>)) {
        let SocketRing { ring, received, unarmed, .. } = self;
        let mut any = false;
        for done in ring.completion() {
            let socket = usize::try_from(done.user_data() >> 1).unwrap_or(usize::MAX);
            let is_send = done.user_data() & 1 == 1;
            if is_send {
                take(socket, sent(done.result()));
                continue;
            }
            let goes_on = cqueue::more(done.flags());
            let buffer = cqueue::buffer_select(done.flags());
            match (usize::try_from(done.result()), buffer) {
                (Ok(len @ 1..), Some(buffer)) => {
                    take(socket, Event::Bytes(received.filled(buffer, len)));
                }
                (Ok(_), _) => take(socket, Event::Closed),
                (Err(_), _) => match Errno::from_raw_os_error(done.result().saturating_neg()) {
                    // No buffer was free: those of this turn are, when it is over.
                    Errno::NOBUFS => {}
                    error => take(socket, Event::Failed(error)),
                },
            }
            if let Some(buffer) = buffer {
                received.provide(buffer);
                any = true;
            }
            let has_ended =
                done.result() == 0 || (done.result() < 0 && done.result() != -Errno::NOBUFS.raw_os_error());
            if !goes_on && !has_ended {
                unarmed.push(socket);
            }
        }
        if any {
            received.publish();
        }
    }

    /// Arm receives, submit the queued sends, and look at what came.
    fn submit(&mut self) -> io::Result<()> {
        if self.is_broken {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        let mut queue = self.ring.submission();
        for socket in self.unarmed.drain(..) {
            let entry =
                opcode::RecvMulti::new(Fixed(name(socket)), GROUP).build().user_data(data(socket, false));
            push(&mut queue, &entry);
        }
        for socket in self.queued.drain(..) {
            push(&mut queue, &send_entry(socket, &self.vectors[socket], &self.headers[socket]));
        }
        let has_work = !queue.is_empty() || queue.taskrun() || queue.cq_overflow();
        drop(queue);
        if !has_work {
            return Ok(());
        }
        loop {
            let left = self.ring.submission().len();
            let entered =
                u32::try_from(left).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput)).and_then(
                    // SAFETY: the entries are of this call's making: what they name lives until it returns
                    // (`Sends`), or as long as the ring (buffers, headers).
                    |left| unsafe {
                        self.ring.submitter().enter::<libc::c_void>(left, 0, ENTER_GETEVENTS, None)
                    },
                );
            match entered {
                Ok(taken) if taken >= left => return Ok(()),
                // It stopped at an entry, which has its own completion: the others.
                Ok(taken) if taken > 0 => {}
                Ok(_) => {
                    self.is_broken = true;
                    return Err(io::ErrorKind::WriteZero.into());
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => {
                    self.is_broken = true;
                    return Err(error);
                }
            }
        }
    }
}

impl Drop for SocketRing {
    fn drop(&mut self) {
        // Nothing may be received into memory that is given back. That there is nothing to cancel is well,
        // too.
        let submitter = self.ring.submitter();
        let cancelled = match submitter.register_sync_cancel(None, CancelBuilder::any()) {
            Ok(()) => true,
            Err(error) => Errno::from_io_error(&error) == Some(Errno::NOENT),
        };
        if cancelled && submitter.unregister_buf_ring(GROUP).is_ok() {
            // SAFETY: dropped here only, and the ring does not use it any more. Where the kernel does not let
            // go of it, it stays mapped.
            unsafe { ManuallyDrop::drop(&mut self.received) };
        }
    }
}

/// The sends of one turn: what they send from is borrowed until [`Sends::submit`] has returned.
pub struct Sends<'ring, 'memory> {
    ring: &'ring mut SocketRing,
    memory: PhantomData<&'memory [u8]>,
}

impl<'memory> Sends<'_, 'memory> {
    /// Send `pieces`, one after the other, to `socket`: as much as it takes.
    ///
    /// # Panics
    /// When there is no such socket.
    pub fn push(&mut self, socket: usize, pieces: &[IoSlice<'memory>]) {
        let vector = &mut self.ring.vectors[socket];
        vector.clear();
        vector.extend(
            pieces.iter().map(|piece| libc::iovec {
                iov_base: piece.as_ptr().cast_mut().cast(),
                iov_len: piece.len(),
            }),
        );
        let header = &mut self.ring.headers[socket];
        header.msg_iov = vector.as_mut_ptr();
        header.msg_iovlen = vector.len() as _;
        self.ring.queued.push(socket);
    }

    /// Send them, and look at what came meanwhile.
    ///
    /// # Errors
    /// The system's; the ring sends nothing after that.
    pub fn submit(self) -> io::Result<()> {
        self.ring.submit()
    }
}

impl Received {
    fn map(count: u16, size: u32) -> io::Result<Received> {
        let failed = |error: crate::mem::RegionError| io::Error::new(io::ErrorKind::OutOfMemory, error);
        let entries =
            Region::map(usize::from(count) * size_of::<BufRingEntry>(), Pages::Base).map_err(failed)?;
        let mut bytes =
            Region::map(usize::from(count) * usize::try_from(size).unwrap_or(usize::MAX), Pages::Transparent)
                .map_err(failed)?;
        // The pages are there before the first receive.
        bytes.as_mut_slice().fill(0xff);
        Ok(Received { entries, bytes, count, size, tail: 0 })
    }

    fn provide_all(&mut self) {
        for buffer in 0..self.count {
            self.provide(buffer);
        }
    }

    /// Where a buffer begins. `None` for one that there is not.
    fn buffer(&self, buffer: u16) -> Option<NonNull<u8>> {
        let at = usize::from(buffer) * usize::try_from(self.size).ok()?;
        // SAFETY: below `count` the offset is within the region, which was mapped for `count` of this size.
        (buffer < self.count).then(|| unsafe { self.bytes.base().add(at) })
    }

    /// What the kernel put into a buffer that it has given to us.
    fn filled(&self, buffer: u16, len: usize) -> &[u8] {
        let Some(begin) = self.buffer(buffer) else { return &[] };
        let len = len.min(usize::try_from(self.size).unwrap_or(0));
        // SAFETY: within the region; the kernel writes to it again only after `provide` and `publish`, for
        // which `self` is borrowed anew.
        unsafe { std::slice::from_raw_parts(begin.as_ptr(), len) }
    }

    /// Put a buffer at the end of the ring; the kernel sees it after [`Received::publish`].
    fn provide(&mut self, buffer: u16) {
        let Some(begin) = self.buffer(buffer) else { return };
        let index = usize::from(self.tail & (self.count - 1));
        // SAFETY: the index is below `count`, for which the ring was mapped; the kernel reads no entry from
        // the tail on. What shares its place with the tail is not written here.
        let entry = unsafe { &mut *self.entries.base().cast::<BufRingEntry>().as_ptr().add(index) };
        entry.set_addr(begin.as_ptr().expose_provenance() as u64);
        entry.set_len(self.size);
        entry.set_bid(buffer);
        self.tail = self.tail.wrapping_add(1);
    }

    fn publish(&self) {
        // SAFETY: the base is that of the ring, mapped and aligned; the tail is read by the kernel as an
        // atomic.
        let tail = unsafe { &*BufRingEntry::tail(self.entries.base().cast().as_ptr()).cast::<AtomicU16>() };
        tail.store(self.tail, Ordering::Release);
    }
}

fn send_entry(socket: usize, vector: &[libc::iovec], header: &libc::msghdr) -> squeue::Entry {
    const FLAGS: i32 = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    let of = Fixed(name(socket));
    let one = match vector {
        [only] => u32::try_from(only.iov_len).ok().map(|len| (only, len)),
        _ => None,
    };
    let entry = match one {
        // Without a list of pieces the system copies less in.
        Some((only, len)) => {
            opcode::Send::new(of, only.iov_base.cast_const().cast(), len).flags(FLAGS).build()
        }
        None => opcode::SendMsg::new(of, std::ptr::from_ref(header)).flags(FLAGS.cast_unsigned()).build(),
    };
    entry.user_data(data(socket, true))
}

fn sent(result: i32) -> Event<'static> {
    match usize::try_from(result) {
        Ok(bytes) => Event::Sent(bytes),
        Err(_) => match Errno::from_raw_os_error(result.saturating_neg()) {
            Errno::AGAIN | Errno::INTR => Event::Sent(0),
            error => Event::Failed(error),
        },
    }
}

fn push(queue: &mut squeue::SubmissionQueue<'_>, entry: &squeue::Entry) {
    // SAFETY: see `SocketRing::submit`, which enters at once.
    let pushed = unsafe { queue.push(entry) };
    assert!(pushed.is_ok(), "the queue has two entries for each socket");
}

/// The place of a registered socket.
fn name(socket: usize) -> u32 {
    u32::try_from(socket).expect("at most SOCKETS_MAX")
}

fn data(socket: usize, is_send: bool) -> u64 {
    (socket as u64) << 1 | u64::from(is_send)
}

fn no_header() -> libc::msghdr {
    // SAFETY: of this plain structure all zeroes mean "nothing".
    unsafe { std::mem::zeroed() }
}

#[cfg(test)]
mod tests;
