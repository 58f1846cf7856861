//! [`SpaceUse`]: the space that a regular file uses, without a call of the file system by the reader, which
//! may be a data core: `fstat` does not return while a file system does not answer.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, OnceLock};
use std::thread::Builder;
use std::time::{Duration, Instant};

/// Shortest time from the answer for a file to the next question.
const PERIOD: Duration = Duration::from_secs(1);
/// Value of `due_ms` while a question has no answer.
const ASKED: u64 = u64::MAX;

/// Reads the bytes in use from the file system. Blocks.
type Ask = dyn Fn() -> io::Result<u64> + Send + Sync;

/// `None`: there is no thread, and all figures stay as they are.
static QUESTIONS: OnceLock<Option<Sender<Arc<SpaceUse>>>> = OnceLock::new();

/// The space in use as of the last answer. At most one question is in flight.
pub(super) struct SpaceUse {
    bytes: AtomicU64,
    /// Earliest time of the next question, in milliseconds after `opened`, or [`ASKED`].
    due_ms: AtomicU64,
    opened: Instant,
    ask: Box<Ask>,
}

impl SpaceUse {
    /// Asks once and blocks until the answer. Call it on a thread that is not pinned: it starts the thread of
    /// the later questions.
    pub(super) fn new(ask: Box<Ask>) -> Arc<SpaceUse> {
        QUESTIONS.get_or_init(start);
        let bytes = AtomicU64::new(ask().unwrap_or(0));
        Arc::new(SpaceUse { bytes, due_ms: AtomicU64::new(0), opened: Instant::now(), ask })
    }

    /// Returns the last figure, and has it asked for again if it is older than [`PERIOD`].
    pub(super) fn bytes(self: &Arc<SpaceUse>) -> u64 {
        let bytes = self.bytes.load(Ordering::Relaxed);
        let due = self.due_ms.load(Ordering::Relaxed);
        let is_due = due != ASKED && self.now_ms() >= due;
        if is_due
            && let Some(Some(questions)) = QUESTIONS.get()
            && self.due_ms.compare_exchange(due, ASKED, Ordering::Relaxed, Ordering::Relaxed).is_ok()
        {
            // The other end is never dropped.
            let _ = questions.send(Arc::clone(self));
        }
        bytes
    }

    fn update(&self) {
        if let Ok(bytes) = (self.ask)() {
            self.bytes.store(bytes, Ordering::Relaxed);
        }
        self.defer();
    }

    fn defer(&self) {
        self.due_ms.store(self.now_ms().saturating_add(millis(PERIOD)), Ordering::Relaxed);
    }

    fn now_ms(&self) -> u64 {
        millis(self.opened.elapsed())
    }
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(ASKED - 1)
}

/// Starts the thread that starts a thread for each question: a data core's thread would share its processor.
fn start() -> Option<Sender<Arc<SpaceUse>>> {
    let (send, questions) = channel();
    match Builder::new().name("space-use".to_owned()).spawn(move || answer_all(&questions)) {
        Ok(_) => Some(send),
        Err(error) => {
            tracing::warn!(
                %error,
                "cannot start the thread that measures the space of files: the value of their open is shown"
            );
            None
        }
    }
}

fn answer_all(questions: &Receiver<Arc<SpaceUse>>) {
    for space in questions {
        // On a thread of its own: a file that does not answer must not delay the others.
        let asked = Arc::clone(&space);
        if Builder::new().name("space-use".to_owned()).spawn(move || asked.update()).is_err() {
            space.defer();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::sync::mpsc::sync_channel;

    use spindle_reactor::affinity::{available_cores, pin_current_thread};

    use super::*;

    const GIVE_UP: Duration = Duration::from_secs(20);

    /// Reads the figure, which asks again once a period, until it is `bytes`.
    fn wait_for(space: &Arc<SpaceUse>, bytes: u64) {
        let end = Instant::now() + GIVE_UP;
        while space.bytes() != bytes {
            assert!(Instant::now() < end, "the figure stays {}", space.bytes());
            std::thread::yield_now();
        }
    }

    #[test]
    fn a_file_that_does_not_answer_delays_neither_the_reader_nor_another_file() {
        let (asks, questions) = sync_channel(8);
        let (answer, answers) = channel();
        let answers = Mutex::new(answers);
        answer.send(1).expect("a receiver");
        let hung = SpaceUse::new(Box::new(move || {
            let _ = asks.send(std::thread::current().id());
            answers.lock().expect("one asks").recv_timeout(2 * GIVE_UP).map_err(io::Error::other)
        }));
        assert_eq!(questions.recv_timeout(GIVE_UP), Ok(std::thread::current().id()), "at the open");
        assert_eq!(hung.bytes(), 1);
        assert_ne!(questions.recv_timeout(GIVE_UP).expect("asked again"), std::thread::current().id());

        let count = AtomicU64::new(0);
        let other = SpaceUse::new(Box::new(move || Ok(count.fetch_add(1, Ordering::Relaxed))));
        wait_for(&other, 2);
        assert_eq!((hung.bytes(), questions.try_iter().count()), (1, 0), "one question in flight");
        answer.send(7).expect("a receiver");
        wait_for(&hung, 7);
    }

    #[test]
    fn no_question_is_asked_on_the_core_of_its_reader() {
        let cores = available_cores();
        let (send, asked) = channel();
        let space = SpaceUse::new(Box::new(move || {
            let set = rustix::thread::sched_getaffinity(None)?;
            let _ = send.send((0..rustix::thread::CpuSet::MAX_CPU).filter(|it| set.is_set(*it)).count());
            Ok(0)
        }));
        assert_eq!(asked.recv(), Ok(cores.len()));
        let reader = std::thread::spawn(move || {
            pin_current_thread(cores[0]).expect("a core");
            space.bytes();
            cores.len()
        });
        let all = reader.join().expect("read");
        assert_eq!(asked.recv_timeout(GIVE_UP), Ok(all));
    }
}
