//! [`Queue`]: lines on their way to a place that may be slow, written by a thread of its own.
//!
//! ```text
//!   any thread ── write (never waits) ──> bounded queue ──> thread "log" ──> standard error
//!                        └── full: counted, "log lines were lost" where they are missing
//! ```
//!
//! Standard error may be a pipe without a reader. A polling core that wrote to it would stop, and with it
//! every host's disks.
//!
//! What it does not do: it does not outlive the process. Who ends it flushes first, and waits a bounded time.

use std::io::{self, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TryRecvError, TrySendError, sync_channel};
use std::time::{Duration, Instant};

use tracing_subscriber::fmt::MakeWriter;

/// Lines that wait; a burst of connections at a start is far shorter.
pub(super) const LINES_MAX: usize = 1024;
/// Longest wait for a queue to be empty, where there is no reader.
pub(super) const FLUSH_MAX: Duration = Duration::from_secs(1);
/// Pause between two attempts to get a mark into a full queue.
const FLUSH_PAUSE: Duration = Duration::from_millis(1);

/// What goes through the queue.
enum Entry {
    Line(Box<[u8]>),
    /// Everything before it is written: say so.
    Mark(SyncSender<()>),
}

/// A handle to the queue; it makes writers.
#[derive(Debug, Clone)]
pub(super) struct Queue {
    entries: SyncSender<Entry>,
    lost: Arc<AtomicU64>,
}

impl Queue {
    /// A queue of `lines_max` lines, and its other end.
    pub(super) fn new(lines_max: usize) -> (Queue, Outlet) {
        let (entries, received) = sync_channel(lines_max);
        let lost = Arc::new(AtomicU64::new(0));
        (Queue { entries, lost: Arc::clone(&lost) }, Outlet { received, lost, written: 0 })
    }

    /// Wait until everything that was written so far is out, at most `wait_max`; whether it is.
    pub(super) fn flush(&self, wait_max: Duration) -> bool {
        let end = Instant::now() + wait_max;
        let (mark, reached) = sync_channel(1);
        let mut entry = Entry::Mark(mark);
        loop {
            match self.entries.try_send(entry) {
                Ok(()) => break,
                Err(TrySendError::Full(back)) if Instant::now() < end => entry = back,
                Err(TrySendError::Full(_) | TrySendError::Disconnected(_)) => return false,
            }
            std::thread::park_timeout(FLUSH_PAUSE);
        }
        reached.recv_timeout(end.saturating_duration_since(Instant::now())) != Err(RecvTimeoutError::Timeout)
    }
}

/// Takes one line; never waits.
pub(super) struct LineWriter<'a>(&'a Queue);

impl Write for LineWriter<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.0.entries.try_send(Entry::Line(bytes.into())).is_err() {
            self.0.lost.fetch_add(1, Ordering::Relaxed);
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for Queue {
    type Writer = LineWriter<'a>;

    fn make_writer(&'a self) -> LineWriter<'a> {
        LineWriter(self)
    }
}

/// The end at which lines leave.
pub(super) struct Outlet {
    received: Receiver<Entry>,
    lost: Arc<AtomicU64>,
    /// Lines since the last look at what was lost.
    written: usize,
}

impl Outlet {
    /// Write what comes to `out`, until no sender is left; `tell_lost` is called with the number of lines
    /// that are missing, where they are missing.
    pub(super) fn run(mut self, out: &mut impl Write, tell_lost: &mut dyn FnMut(u64)) {
        loop {
            let entry = match self.received.try_recv() {
                Ok(entry) => entry,
                Err(TryRecvError::Disconnected) => return,
                Err(TryRecvError::Empty) => {
                    self.look_for_lost(tell_lost);
                    match self.received.recv() {
                        Ok(entry) => entry,
                        Err(_) => return,
                    }
                }
            };
            match entry {
                Entry::Line(line) => {
                    // A write fails where standard error is gone: there is no other place to report it.
                    let _ = out.write_all(&line);
                    self.written += 1;
                    if self.written >= LINES_MAX {
                        self.look_for_lost(tell_lost);
                    }
                }
                Entry::Mark(mark) => {
                    self.look_for_lost(tell_lost);
                    // Who waited may have given up.
                    let _ = mark.try_send(());
                }
            }
        }
    }

    /// Lines were lost behind those that were queued then, so this is asked when those are out.
    fn look_for_lost(&mut self, tell_lost: &mut dyn FnMut(u64)) {
        self.written = 0;
        let lost = self.lost.swap(0, Ordering::Relaxed);
        if lost > 0 {
            tell_lost(lost);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Sender, channel};
    use std::thread;

    use super::*;

    /// Standard error of which each write waits until somebody has read.
    struct Pipe {
        permits: Receiver<()>,
        written: Sender<String>,
    }

    impl Write for Pipe {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let _ = self.permits.recv();
            let _ = self.written.send(String::from_utf8_lossy(bytes).into_owned());
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn line(queue: &Queue, text: &str) {
        queue.make_writer().write_all(text.as_bytes()).expect("never fails");
    }

    #[test]
    fn nobody_waits_for_a_full_queue_and_what_is_lost_is_told_where_it_is_missing() {
        let (queue, outlet) = Queue::new(4);
        let ((read, permits), (written, lines)) = (channel(), channel());
        let tell = written.clone();
        let mut pipe = Pipe { permits, written };
        let thread = thread::spawn(move || {
            outlet.run(&mut pipe, &mut |lost| tell.send(format!("lost {lost}")).expect("read below"));
        });
        for number in 0..20 {
            line(&queue, &number.to_string());
        }
        assert!(!queue.flush(Duration::from_millis(20)), "no reader");
        // All of it is read from now on: a permit for each write that there can be.
        (0..40).for_each(|_| read.send(()).expect("the thread waits"));
        assert!(queue.flush(Duration::from_secs(20)));
        line(&queue, "later");
        drop(queue);
        thread.join().expect("it ends with the last writer");
        let lines: Vec<String> = lines.iter().collect();
        let told = lines.iter().position(|line| line.starts_with("lost ")).expect("told");
        let lost: usize = lines[told][5..].parse().expect("a number");
        assert_eq!(told + lost, 20, "{lines:?}");
        assert!((4..=5).contains(&told), "those in the queue, and one that was being written: {lines:?}");
        assert_eq!(lines[told + 1..], ["later"]);
    }

    #[test]
    fn a_flush_is_over_when_everything_before_it_is_out() {
        let (queue, outlet) = Queue::new(4);
        let thread = thread::spawn(move || {
            let mut out = Vec::new();
            outlet.run(&mut out, &mut |_| panic!("nothing is lost"));
            out
        });
        for text in ["a", "b", "c"] {
            line(&queue, text);
            assert!(queue.flush(Duration::from_secs(20)));
        }
        drop(queue);
        assert_eq!(thread.join().expect("ends"), b"abc");
    }

    #[test]
    fn without_a_thread_lines_are_lost_and_a_flush_says_so_at_once() {
        let (queue, outlet) = Queue::new(4);
        drop(outlet);
        line(&queue, "a");
        assert!(!queue.flush(Duration::from_secs(20)));
    }
}
