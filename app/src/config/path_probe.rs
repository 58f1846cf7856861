//! [`PathProbe`]: asks a file system about the path of a disk, on a thread of its own. A file system that
//! does not answer (a hard mount of a file server that is away) blocks each call on its paths.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::Builder;
use std::time::{Duration, Instant};

use spindle_target_disk::{medium_id, ng};

use super::machine::{PathState, may_open, path_state};

/// Longest wait for an answer about a path.
pub const ANSWER_MAX: Duration = Duration::from_secs(2);
/// Age up to which a late answer is that of the next question: so the disk of a path that is always slower
/// than [`ANSWER_MAX`] is served. Longer than the period of retries, 2 s.
const LATE_MAX: Duration = Duration::from_secs(5);

/// What the file system says of a path.
pub struct PathFacts {
    pub state: io::Result<PathState>,
    /// Device number of the block device of a generic device.
    pub ng_block: io::Result<u64>,
    pub medium_ids: io::Result<Vec<String>>,
    may_read: io::Result<()>,
    may_write: io::Result<()>,
}

impl PathFacts {
    /// Calls the file system, which blocks if it does not answer.
    fn of(path: &Path) -> PathFacts {
        #[cfg(test)]
        tests::wait_if_hung(path);
        PathFacts {
            state: path_state(path),
            ng_block: ng::look_at(path).map(|device| device.block_number),
            medium_ids: medium_id::at(path),
            may_read: may_open(path, true),
            may_write: may_open(path, false),
        }
    }

    /// As if each call had failed with `error`.
    fn failed(error: &io::Error) -> PathFacts {
        fn fail<T>(error: &io::Error) -> io::Result<T> {
            Err(io::Error::new(error.kind(), error.to_string()))
        }
        PathFacts {
            state: fail(error),
            ng_block: fail(error),
            medium_ids: fail(error),
            may_read: fail(error),
            may_write: fail(error),
        }
    }

    pub fn may_open(&self, is_read_only: bool) -> &io::Result<()> {
        if is_read_only { &self.may_read } else { &self.may_write }
    }
}

/// Probes whose answer no caller has read yet, by path. At most one thread waits for a path.
static UNTAKEN: Mutex<BTreeMap<PathBuf, Arc<PathProbe>>> = Mutex::new(BTreeMap::new());
/// Paths with a call that has not ended ([`within`]).
static CALLED: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A question about a path.
pub struct PathProbe {
    path: PathBuf,
    begun: Instant,
    /// And when they came.
    facts: Mutex<Option<(Arc<PathFacts>, Instant)>>,
    is_answered: Condvar,
}

impl PathProbe {
    /// Asks about `path`, or joins the question that is still without an answer or has had a late one.
    ///
    /// # Errors
    /// There is no thread.
    pub fn start(path: &Path) -> io::Result<Arc<PathProbe>> {
        let mut untaken = locked(&UNTAKEN);
        untaken.retain(|_, probe| {
            let is_usable = |came: &Instant| *came > probe.begun + ANSWER_MAX && came.elapsed() < LATE_MAX;
            locked(&probe.facts).as_ref().is_none_or(|(_, came)| is_usable(came))
        });
        if let Some(probe) = untaken.get(path) {
            return Ok(Arc::clone(probe));
        }
        let (facts, is_answered) = (Mutex::new(None), Condvar::new());
        let probe = Arc::new(PathProbe { path: path.to_owned(), begun: Instant::now(), facts, is_answered });
        let its = Arc::clone(&probe);
        Builder::new().name("path-probe".to_owned()).spawn(move || {
            let facts = PathFacts::of(&its.path);
            *locked(&its.facts) = Some((Arc::new(facts), Instant::now()));
            its.is_answered.notify_all();
        })?;
        untaken.insert(path.to_owned(), Arc::clone(&probe));
        Ok(probe)
    }

    /// Waits until [`ANSWER_MAX`] after the question: not at all for a path known not to answer.
    ///
    /// # Errors
    /// There is no answer in time.
    pub fn wait(&self) -> io::Result<Arc<PathFacts>> {
        let left = ANSWER_MAX.saturating_sub(self.begun.elapsed());
        let facts = self.is_answered.wait_timeout_while(locked(&self.facts), left, |facts| facts.is_none());
        let (facts, _) = facts.unwrap_or_else(PoisonError::into_inner);
        let taken =
            facts.as_ref().map(|(facts, _)| Arc::clone(facts)).ok_or_else(|| unanswered(ANSWER_MAX))?;
        drop(facts);
        // The next question is another one.
        let mut untaken = locked(&UNTAKEN);
        if untaken.get(&self.path).is_some_and(|probe| std::ptr::eq(&raw const **probe, self)) {
            untaken.remove(&self.path);
        }
        Ok(taken)
    }
}

/// A path in [`CALLED`], which it leaves also if the call panics or has no thread.
struct Called(PathBuf);

impl Drop for Called {
    fn drop(&mut self) {
        locked(&CALLED).remove(&self.0);
    }
}

fn unanswered(max: Duration) -> io::Error {
    io::Error::new(ErrorKind::TimedOut, format!("it does not answer within {} s", max.as_secs()))
}

/// Returns the result of `call`, which concerns `path` and runs on a thread of its own.
///
/// # Errors
/// There is no thread, or no result within `max`: `call` may still end later; its result is dropped then, and
/// until then there is no other call for `path`.
pub fn within<T: Send + 'static>(
    max: Duration,
    path: &Path,
    call: impl FnOnce() -> T + Send + 'static,
) -> io::Result<T> {
    if !locked(&CALLED).insert(path.to_owned()) {
        return Err(io::Error::new(ErrorKind::TimedOut, "an earlier attempt on it has not ended"));
    }
    let (send, result) = sync_channel(1);
    let ended = Called(path.to_owned());
    let run = move || {
        let result = call();
        // Before the result: who has it may call again.
        drop(ended);
        drop(send.send(result));
    };
    Builder::new().name("path-call".to_owned()).spawn(run)?;
    result.recv_timeout(max).map_err(|error| match error {
        RecvTimeoutError::Timeout => unanswered(max),
        RecvTimeoutError::Disconnected => io::Error::other("the call has panicked"),
    })
}

/// The paths that one validation asks about.
pub struct Paths {
    probes: BTreeMap<PathBuf, Arc<PathProbe>>,
    /// What is not at the path of a disk may come later.
    pub may_be_away: bool,
}

impl Paths {
    /// Asks about all `paths` at the same time, so that together they take at most [`ANSWER_MAX`].
    pub fn ask(paths: impl Iterator<Item = PathBuf>, may_be_away: bool) -> Paths {
        let probe = |path: PathBuf| PathProbe::start(&path).ok().map(|probe| (path, probe));
        Paths { probes: paths.filter_map(probe).collect(), may_be_away }
    }

    /// Waits for what is known of a path. All of it is an error if there is no answer in time, or no thread.
    pub fn facts(&self, path: &Path) -> Arc<PathFacts> {
        let probe = self.probes.get(path).map_or_else(|| PathProbe::start(path), |it| Ok(Arc::clone(it)));
        let facts = probe.and_then(|probe| probe.wait());
        facts.unwrap_or_else(|error| Arc::new(PathFacts::failed(&error)))
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// Paths on which a call does not return.
    static HUNG: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());
    static HUNG_CHANGED: Condvar = Condvar::new();

    /// A path that does not answer until this is dropped.
    pub struct Hung(PathBuf);

    impl Hung {
        pub fn new(path: impl Into<PathBuf>) -> Hung {
            let path = path.into();
            locked(&HUNG).push(path.clone());
            Hung(path)
        }
    }

    impl Drop for Hung {
        fn drop(&mut self) {
            locked(&HUNG).retain(|path| *path != self.0);
            HUNG_CHANGED.notify_all();
        }
    }

    pub fn wait_if_hung(path: &Path) {
        let is_hung = |hung: &mut Vec<PathBuf>| hung.iter().any(|it| it == path);
        // A test that waits for the call fails then.
        drop(HUNG_CHANGED.wait_timeout_while(locked(&HUNG), Duration::from_secs(60), is_hung));
    }

    #[test]
    fn paths_that_do_not_answer_are_waited_for_together_and_once() {
        let paths = ["/hung/a", "/hung/b", "/hung/c"].map(PathBuf::from);
        let hung = paths.clone().map(Hung::new);
        let begun = Instant::now();
        let asked = Paths::ask(paths.iter().cloned(), false);
        for path in &paths {
            let facts = asked.facts(path);
            let error = facts.state.as_ref().expect_err("no answer").to_string();
            assert_eq!(error, "it does not answer within 2 s");
        }
        assert!(begun.elapsed() < 2 * ANSWER_MAX, "{:?}", begun.elapsed());
        let again = Instant::now();
        assert!(Paths::ask(paths.iter().cloned(), false).facts(&paths[0]).state.is_err());
        assert!(again.elapsed() < ANSWER_MAX, "{:?}", again.elapsed());
        assert_eq!(locked(&UNTAKEN).keys().filter(|path| paths.contains(path)).count(), 3);
        drop(hung);
        let end = Instant::now() + Duration::from_secs(20);
        while !matches!(asked.facts(&paths[0]).state, Ok(PathState::Missing { .. })) {
            assert!(Instant::now() < end, "no answer");
            std::thread::yield_now();
        }
    }

    #[test]
    fn a_late_answer_is_that_of_the_next_question_and_of_no_other() {
        let path = Path::new("/hung/late");
        let hung = Hung::new(path);
        let asked = PathProbe::start(path).expect("a thread");
        assert!(asked.wait().is_err(), "it hangs");
        drop(hung);
        // Not taken by a wait.
        let facts =
            asked
                .is_answered
                .wait_timeout_while(locked(&asked.facts), Duration::from_secs(20), |facts| facts.is_none());
        drop(facts);
        let next = PathProbe::start(path).expect("a thread");
        assert!(Arc::ptr_eq(&asked, &next) && next.wait().is_ok());
        assert!(!Arc::ptr_eq(&asked, &PathProbe::start(path).expect("a thread")), "it was taken");
    }

    #[test]
    fn the_result_of_a_call_that_is_too_late_is_dropped() {
        struct Result(std::sync::mpsc::Sender<()>);
        impl Drop for Result {
            fn drop(&mut self) {
                let _ = self.0.send(());
            }
        }
        let (go, waits) = std::sync::mpsc::channel::<()>();
        let (send, dropped) = std::sync::mpsc::channel();
        let call = move || {
            let _ = waits.recv_timeout(Duration::from_secs(60));
            Result(send)
        };
        let begun = Instant::now();
        let path = Path::new("/hung/call");
        let error = within(Duration::from_secs(1), path, call).err().expect("no result in time");
        assert_eq!(error.to_string(), "it does not answer within 1 s");
        let again = within(Duration::from_secs(1), path, || ()).expect_err("the first has not ended");
        assert_eq!(again.to_string(), "an earlier attempt on it has not ended");
        assert!(within(Duration::from_secs(20), Path::new("/hung/other"), || ()).is_ok());
        assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", begun.elapsed());
        assert!(dropped.try_recv().is_err());
        drop(go);
        assert!(dropped.recv_timeout(Duration::from_secs(20)).is_ok());
        assert!(within(Duration::from_secs(20), path, || ()).is_ok(), "it has ended");
    }
}
