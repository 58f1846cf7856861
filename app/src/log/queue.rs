//! [`Queue`]: a bounded queue of log lines; a thread writes them to standard error.
//!
//! ```text
//!   any thread ── write (never blocks) ──> bounded queue ──> thread "log" ──> standard error
//!                        └── full: counted, later the line "log lines were lost"
//! ```
//!
//! Standard error may be a pipe without a reader. A reactor core that wrote to it would block, and no host of
//! the core would get an answer.
//!
//! Queued lines are lost when the process exits; call [`Queue::flush`] before.

use std::io::{self, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TryRecvError, TrySendError, sync_channel};
use std::time::{Duration, Instant};

use tracing_subscriber::fmt::MakeWriter;

/// Capacity in lines; a burst of connections after a start writes far fewer. Also the most lines written
/// between two reports of lost lines.
pub(super) const LINES_MAX: usize = 1024;
/// Longest wait of a flush. Without a reader of standard error the queue is never written.
pub(super) const FLUSH_MAX: Duration = Duration::from_secs(1);
/// Pause between two attempts to put [`Entry::Flush`] into a full queue.
const FLUSH_PAUSE: Duration = Duration::from_millis(1);

enum Entry {
    Line(Box<[u8]>),
    /// Signalled once all earlier entries are written.
    Flush(SyncSender<()>),
}

/// The sending end, cheap to clone; makes writers for `tracing`.
#[derive(Debug, Clone)]
pub(super) struct Queue {
    entries: SyncSender<Entry>,
    lost: Arc<AtomicU64>,
}

impl Queue {
    /// Creates a queue of at most `lines_max` entries, and its writer.
    pub(super) fn new(lines_max: usize) -> (Queue, QueueWriter) {
        let (entries, received) = sync_channel(lines_max);
        let lost = Arc::new(AtomicU64::new(0));
        (Queue { entries, lost: Arc::clone(&lost) }, QueueWriter { received, lost, written: 0 })
    }

    /// Waits until all lines queued so far are written, at most `wait_max`. False: that time was too short,
    /// or the writer has ended.
    pub(super) fn flush(&self, wait_max: Duration) -> bool {
        let end = Instant::now() + wait_max;
        let (mark, reached) = sync_channel(1);
        let mut entry = Entry::Flush(mark);
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

/// Queues each write, which is one line. Counts the line as lost if the queue is full or its writer has
/// ended. Never blocks.
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

/// The receiving end, which writes the lines.
pub(super) struct QueueWriter {
    received: Receiver<Entry>,
    lost: Arc<AtomicU64>,
    /// Lines written since `lost` was last checked.
    written: usize,
}

impl QueueWriter {
    /// Writes lines to `out` until all senders are dropped. Calls `on_lost` with the count of lines lost
    /// since the last call. The call comes after the lines that were queued when lines were lost.
    pub(super) fn run(mut self, out: &mut impl Write, on_lost: &mut dyn FnMut(u64)) {
        loop {
            let entry = match self.received.try_recv() {
                Ok(entry) => entry,
                Err(TryRecvError::Disconnected) => return,
                Err(TryRecvError::Empty) => {
                    self.report_lost(on_lost);
                    match self.received.recv() {
                        Ok(entry) => entry,
                        Err(_) => return,
                    }
                }
            };
            match entry {
                Entry::Line(line) => {
                    // An error cannot be reported: standard error itself has failed.
                    let _ = out.write_all(&line);
                    self.written += 1;
                    if self.written >= LINES_MAX {
                        self.report_lost(on_lost);
                    }
                }
                Entry::Flush(mark) => {
                    self.report_lost(on_lost);
                    // Fails when the caller of `flush` has timed out.
                    let _ = mark.try_send(());
                }
            }
        }
    }

    /// Calls `on_lost` if lines were lost since the last call. Lines are lost while the queue is full, so the
    /// call comes after the lines that were queued then.
    fn report_lost(&mut self, on_lost: &mut dyn FnMut(u64)) {
        self.written = 0;
        let lost = self.lost.swap(0, Ordering::Relaxed);
        if lost > 0 {
            on_lost(lost);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Sender, channel};
    use std::thread;

    use super::*;

    /// Standard error whose writes each wait for a permit from `read`.
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
        // From now on all is read: a permit for each write that can come.
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
