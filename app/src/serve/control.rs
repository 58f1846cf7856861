//! The control socket: what `spindle status` asks.
//!
//! ```text
//!   thread "control": accept ─> one line in, "status" ─> one line of JSON out ─> close
//!                                            └ View: atomics of the cores, the registry, the snapshot
//! ```
//! Requests are answered one after the other, and each connection may take a second. Cores are not asked and
//! do not notice.
//!
//! What it does not do: nothing can be changed by it, and it keeps no disk open.

use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use spindle_reactor::run::Turns;
use spindle_target::shared::Registry;
use spindle_target::snapshot::Snapshot;

/// The request that is known.
pub const STATUS: &str = "status";
/// How long a client may take for each step.
const PATIENCE: Duration = Duration::from_secs(1);
/// Longest request.
const REQUEST_MAX: usize = 64;
/// After a failure to accept, as without descriptors.
const PAUSE: Duration = Duration::from_millis(100);

/// A core as it is seen from outside.
pub struct CoreView {
    /// The CPU that it is pinned to.
    pub cpu: Option<usize>,
    /// What its turns took.
    pub turns: Arc<Turns>,
}

/// What there is to tell.
pub struct View {
    started: Instant,
    /// In their order.
    cores: Vec<CoreView>,
    /// Connections of each core.
    loads: Arc<[AtomicUsize]>,
    registry: Arc<Registry>,
    /// Locked while it is read. The last of its owners is never here: it shuts down the disks.
    snapshot: Mutex<Weak<Snapshot>>,
}

impl View {
    /// Of cores that have begun with this snapshot.
    pub fn new(
        cores: Vec<CoreView>,
        loads: Arc<[AtomicUsize]>,
        registry: Arc<Registry>,
        snapshot: &Arc<Snapshot>,
    ) -> View {
        let snapshot = Mutex::new(Arc::downgrade(snapshot));
        View { started: Instant::now(), cores, loads, registry, snapshot }
    }

    /// The cores change to this snapshot.
    pub fn change_to(&self, next: &Arc<Snapshot>) {
        *self.lock() = Arc::downgrade(next);
    }

    /// The snapshot goes: whoever asks from now on sees none.
    pub fn end(&self) {
        *self.lock() = Weak::new();
    }

    fn lock(&self) -> MutexGuard<'_, Weak<Snapshot>> {
        self.snapshot.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn status(&self) -> Value {
        let lock = self.lock();
        let snapshot = lock.upgrade();
        json!({
            "version": env!("CARGO_PKG_VERSION"),
            "pid": std::process::id(),
            "uptime_ns": u64::try_from(self.started.elapsed().as_nanos()).unwrap_or(u64::MAX),
            "generation": snapshot.as_ref().map(|snapshot| snapshot.generation),
            "cores": self.cores(),
            "controllers": self.controllers(),
            "namespaces": snapshot.map_or_else(Vec::new, |snapshot| namespaces(&snapshot)),
        })
    }

    fn cores(&self) -> Vec<Value> {
        let longest = |turns: &Turns| -> Vec<Value> {
            let longest = turns.longest().into_iter();
            longest
                .map(|(parts, took)| {
                    let parts: Vec<_> = turns.names(parts).collect();
                    json!({ "parts": parts, "ns": took.as_u64() })
                })
                .collect()
        };
        let core = |(core, view): (usize, &CoreView)| {
            json!({
                "core": core,
                "cpu": view.cpu,
                "connections": self.loads.get(core).map_or(0, |load| load.load(Ordering::Relaxed)),
                "busy_ns": view.turns.busy().as_u64(),
                "long_turns": view.turns.long(),
                "longest_turns": longest(&view.turns),
            })
        };
        self.cores.iter().enumerate().map(core).collect()
    }

    fn controllers(&self) -> Vec<Value> {
        let mut controllers = self.registry.all();
        controllers.sort_by_key(|it| (it.subsystem_nqn.to_string(), it.cntlid));
        let tell = |it: &Arc<spindle_target::shared::ControllerShared>| {
            json!({
                "host": it.host_nqn.to_string(),
                "subsystem": it.subsystem_nqn.to_string(),
                "controller": it.cntlid,
                "core": it.admin_core,
                "is_ready": it.is_ready(),
                "io_queues": it.live_queues(),
            })
        };
        controllers.iter().map(tell).collect()
    }
}

fn namespaces(snapshot: &Snapshot) -> Vec<Value> {
    let mut namespaces = Vec::new();
    for subsystem in &snapshot.subsystems {
        for namespace in subsystem.active() {
            let (geometry, totals) = (namespace.geometry, namespace.counters.totals());
            namespaces.push(json!({
                "subsystem": subsystem.nqn.to_string(),
                "nsid": namespace.nsid,
                "disk": namespace.source.name(),
                "kind": namespace.source.kind(),
                "bytes": geometry.bytes(),
                "block_bytes": geometry.block_bytes,
                "reads": totals.reads,
                "writes": totals.writes,
                "bytes_read": totals.units_read.saturating_mul(512),
                "bytes_written": totals.units_written.saturating_mul(512),
                "media_errors": totals.media_errors,
            }));
        }
    }
    namespaces
}

/// Where it is without `control.socket`: in the first directory that systemd has made for the service.
pub fn of_service() -> Option<PathBuf> {
    in_directory(std::env::var_os("RUNTIME_DIRECTORY")?.to_str()?)
}

/// The socket at a path that no configuration names: a failure is a warning, as it must not keep disks from
/// being served.
pub fn bind_implied(path: PathBuf) -> Option<Control> {
    Control::bind(&path)
        .inspect_err(
            |error| tracing::warn!(path = %path.display(), %error, "no status socket: cannot listen"),
        )
        .ok()
}

fn in_directory(directories: &str) -> Option<PathBuf> {
    let first = directories.split(':').next().filter(|first| first.starts_with('/'))?;
    Some(Path::new(first).join("control"))
}

/// The socket; its file goes with this.
pub struct Control {
    listener: UnixListener,
    path: PathBuf,
    /// Device and number of the file.
    file: (u64, u64),
}

impl Control {
    /// Listen at `path`. A socket that no process listens on, which one that was killed has left, is
    /// replaced.
    ///
    /// # Errors
    /// The system's; also where another process listens, or another file is there.
    pub fn bind(path: &Path) -> std::io::Result<Control> {
        let listener = listen(path)?;
        Ok(Control { listener, path: path.to_owned(), file: file(path)? })
    }

    /// Answer from now on, by a thread that goes with the process.
    ///
    /// # Errors
    /// The system's.
    pub fn answer(&self, view: Arc<View>) -> std::io::Result<()> {
        let listener = self.listener.try_clone()?;
        std::thread::Builder::new().name("control".to_owned()).spawn(move || answer(&listener, &view))?;
        Ok(())
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        // What somebody else has put there is not removed.
        if file(&self.path).is_ok_and(|file| file == self.file) {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

fn file(path: &Path) -> std::io::Result<(u64, u64)> {
    std::fs::symlink_metadata(path).map(|file| (file.dev(), file.ino()))
}

fn listen(path: &Path) -> std::io::Result<UnixListener> {
    let listener = match UnixListener::bind(path) {
        Err(error) if error.kind() == ErrorKind::AddrInUse => {
            let is_socket = std::fs::symlink_metadata(path)?.file_type().is_socket();
            if !is_socket {
                return Err(std::io::Error::other("a file that is no socket is there"));
            }
            match UnixStream::connect(path) {
                Ok(_) => return Err(std::io::Error::other("another process listens there")),
                // Its process is gone. Any other error says nothing about that.
                Err(error) if error.kind() == ErrorKind::ConnectionRefused => std::fs::remove_file(path)?,
                Err(error) => return Err(error),
            }
            UnixListener::bind(path)
        }
        result => result,
    }?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))?;
    Ok(listener)
}

fn answer(listener: &UnixListener, view: &View) {
    loop {
        match listener.accept() {
            // An error: the client has gone or was too slow.
            Ok((stream, _)) => drop(answer_one(stream, view)),
            Err(_) => std::thread::park_timeout(PAUSE),
        }
    }
}

fn answer_one(mut stream: UnixStream, view: &View) -> std::io::Result<()> {
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    let request = read_line(&mut stream)?;
    let answer = match request.as_str() {
        STATUS => view.status(),
        other => json!({ "error": format!("request {other:?}: must be {STATUS:?}") }),
    };
    stream.write_all(format!("{answer}\n").as_bytes())
}

/// Up to the first line feed, the end, or [`REQUEST_MAX`].
fn read_line(stream: &mut UnixStream) -> std::io::Result<String> {
    let end = Instant::now() + PATIENCE;
    let mut line = Vec::new();
    let mut piece = [0; REQUEST_MAX];
    while line.len() < REQUEST_MAX && !line.contains(&b'\n') {
        match stream.read(&mut piece)? {
            0 => break,
            _ if Instant::now() >= end => return Err(ErrorKind::TimedOut.into()),
            count => line.extend_from_slice(&piece[..count]),
        }
    }
    let first = line.split(|byte| *byte == b'\n').next().unwrap_or_default();
    Ok(String::from_utf8_lossy(first).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Config, DrivesHere};

    fn snapshot() -> Arc<Snapshot> {
        Config::builtin().plan().snapshot(None, &DrivesHere, &[]).expect("opened")
    }

    fn start(path: &Path, snapshot: &Arc<Snapshot>) -> std::io::Result<Control> {
        let control = Control::bind(path)?;
        control.answer(Arc::new(View::new(Vec::new(), Arc::new([]), Arc::default(), snapshot)))?;
        Ok(control)
    }

    fn path(test: &str) -> PathBuf {
        std::env::temp_dir().join(format!("spindle-control-{}-{test}", std::process::id()))
    }

    fn ask(path: &Path, request: &str) -> Value {
        let mut stream = UnixStream::connect(path).expect("it listens");
        stream.write_all(request.as_bytes()).expect("written");
        let mut text = String::new();
        stream.read_to_string(&mut text).expect("an answer");
        serde_json::from_str(&text).expect("JSON")
    }

    #[test]
    fn it_is_in_the_first_directory_of_the_service() {
        assert_eq!(in_directory("/run/a:/run/b"), Some(PathBuf::from("/run/a/control")));
        assert_eq!((in_directory(""), in_directory("a")), (None, None));
    }

    #[test]
    fn an_unknown_request_is_refused_and_a_silent_client_does_not_block_others() {
        let path = path("requests");
        let snapshot = snapshot();
        let control = start(&path, &snapshot).expect("listens");
        let _silent = UnixStream::connect(&path).expect("it listens");
        assert_eq!(ask(&path, "status\n")["namespaces"][0]["nsid"], 1);
        let error = ask(&path, "stop\n")["error"].to_string();
        assert!(error.contains("stop") && error.contains(STATUS), "{error}");
        assert!(ask(&path, &"s".repeat(64)).get("error").is_some());
        let mode = std::fs::metadata(&path).expect("it is there").permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        drop(control);
        assert!(!path.exists());
    }

    #[test]
    fn a_socket_that_was_left_is_replaced_and_neither_another_process_nor_a_file_is() {
        let path = path("left");
        drop(UnixListener::bind(&path).expect("bound"));
        let snapshot = snapshot();
        let control = start(&path, &snapshot).expect("no process listens");
        let error = start(&path, &snapshot).err().expect("in use").to_string();
        assert!(error.contains("another process"), "{error}");
        assert_eq!(ask(&path, "status\n")["generation"], 1, "as before");
        drop(control);
        std::fs::write(&path, "data").expect("written");
        let error = start(&path, &snapshot).err().expect("a file").to_string();
        assert!(error.contains("no socket"), "{error}");
        assert_eq!(std::fs::read(&path).expect("still there"), b"data");
        assert!(
            bind_implied(path.clone()).is_none(),
            "of a path that no configuration names that is no error"
        );
        std::fs::remove_file(&path).expect("removed");
        assert!(bind_implied(path).is_some());
    }

    #[test]
    fn disks_are_not_kept_open_for_whoever_may_ask() {
        let path = path("weak");
        let snapshot = snapshot();
        let gone = Arc::downgrade(&snapshot);
        let control = start(&path, &snapshot).expect("listens");
        assert_eq!(ask(&path, "status\n")["generation"], 1);
        drop(snapshot);
        assert!(gone.upgrade().is_none());
        assert_eq!(ask(&path, "status\n")["namespaces"].as_array().map(Vec::len), Some(0));
        drop(control);
    }

    #[test]
    fn a_file_that_has_taken_the_place_of_the_socket_stays() {
        let path = path("place");
        let control = Control::bind(&path).expect("listens");
        std::fs::remove_file(&path).expect("removed");
        std::fs::write(&path, "data").expect("written");
        drop(control);
        assert_eq!(std::fs::read(&path).expect("still there"), b"data");
        std::fs::remove_file(&path).expect("removed");
    }
}
