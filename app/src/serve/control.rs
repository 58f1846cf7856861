//! The control socket's file: its path, its permissions, and its removal at the end of the process. Starts
//! the thread that serves clients.
//!
//! [`crate::rpc`] serves the requests.

use std::io::ErrorKind;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::Sender;

use rustix::fs::Mode;
use spindle_reactor::net::Waker;

use super::view::View;
use crate::rpc;

/// Returns the path if `control.socket` is not set: in the first directory of systemd's `$RUNTIME_DIRECTORY`,
/// else [`SOCKET`].
pub fn default_path() -> PathBuf {
    let directories = std::env::var("RUNTIME_DIRECTORY").unwrap_or_default();
    in_directory(&directories).unwrap_or_else(|| PathBuf::from(SOCKET))
}

/// Creates the directory of the default path if possible, and binds the socket. A failure is logged, and the
/// disks are served without a control socket, because the configuration does not require this socket.
pub fn bind_default(path: &Path) -> Option<Control> {
    // Only root can create the directory of [`SOCKET`]. If the directory is missing, the bind below fails.
    let _ = path.parent().map(std::fs::create_dir);
    let log = |error: &std::io::Error| {
        let path = path.display();
        tracing::info!(%path, %error, "no control socket, spindle ctl cannot reach this process");
    };
    Control::bind(path, None).inspect_err(log).ok()
}

fn in_directory(directories: &str) -> Option<PathBuf> {
    let first = directories.split(':').next().filter(|first| first.starts_with('/'))?;
    Some(Path::new(first).join("spindle.sock"))
}

/// Default path without `$RUNTIME_DIRECTORY`, also for `spindle ctl`.
pub const SOCKET: &str = "/run/spindle/spindle.sock";

/// The bound socket. Dropped, it removes the socket's file, unless another file has replaced it.
pub struct Control {
    listener: UnixListener,
    path: PathBuf,
    /// Device and inode number of the socket's file.
    file: (u64, u64),
}

impl Control {
    /// Listens at `path`. The owner of the socket's file and the members of the group with GID `group` may
    /// connect. `None`: the group of the new file, usually that of the process. Replaces a socket on which no
    /// process listens, for example that of a killed process.
    ///
    /// # Errors
    /// Those of the system; another process listens; `path` is not a socket.
    pub fn bind(path: &Path, group: Option<u32>) -> std::io::Result<Control> {
        let before = rustix::process::umask(Mode::from_raw_mode(0o177));
        let listener = listen(path);
        rustix::process::umask(before);
        let listener = listener?;
        let control = Control { listener, path: path.to_owned(), file: file_id(path)? };
        // From here on an error drops `control`, which removes the file. Until now the umask has limited
        // access to the owner.
        if group.is_some() {
            std::os::unix::fs::chown(path, None, group)?;
        }
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o660))?;
        Ok(control)
    }

    /// Starts the thread that serves clients until the process ends, and sends changes to `changes`.
    pub fn answer<O: From<rpc::Change> + Send + 'static>(
        &self,
        view: Arc<View>,
        changes: Sender<O>,
    ) -> std::io::Result<()> {
        let (listener, waker) = (self.listener.try_clone()?, Waker::new()?);
        std::thread::Builder::new().name("control".to_owned()).spawn(move || {
            if let Err(error) = rpc::serve_clients(&listener, waker, view, changes) {
                tracing::error!(%error, "control socket failed, methods are not answered any more; restart");
            }
        })?;
        Ok(())
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        // Keeps another file that has replaced the socket.
        if file_id(&self.path).is_ok_and(|file| file == self.file) {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

fn file_id(path: &Path) -> std::io::Result<(u64, u64)> {
    std::fs::symlink_metadata(path).map(|file| (file.dev(), file.ino()))
}

fn listen(path: &Path) -> std::io::Result<UnixListener> {
    match UnixListener::bind(path) {
        Err(error) if error.kind() == ErrorKind::AddrInUse => {
            let is_socket = std::fs::symlink_metadata(path)?.file_type().is_socket();
            if !is_socket {
                return Err(std::io::Error::other("the path exists and is not a socket"));
            }
            match UnixStream::connect(path) {
                Ok(_) => return Err(std::io::Error::other("another process listens on the socket")),
                // Refused: no process listens any more. Other errors do not show that.
                Err(error) if error.kind() == ErrorKind::ConnectionRefused => std::fs::remove_file(path)?,
                Err(error) => return Err(error),
            }
            UnixListener::bind(path)
        }
        result => result,
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};

    use serde_json::{Map, Value, json};
    use spindle_target::snapshot::Snapshot;

    use super::*;
    use crate::config::{Config, LocalDrives};
    use crate::rpc::client::call;

    fn snapshot() -> Arc<Snapshot> {
        Config::builtin().plan().snapshot(None, &LocalDrives, &[]).expect("opened")
    }

    fn start(path: &Path, snapshot: &Arc<Snapshot>) -> std::io::Result<Control> {
        let control = Control::bind(path, None)?;
        let config = Config::builtin();
        let in_force = (config.shared_plan(), snapshot);
        let view = Arc::new(View::new(Vec::new(), Arc::new([]), Arc::default(), in_force, Arc::default()));
        control.answer(view, std::sync::mpsc::channel::<rpc::Change>().0)?;
        Ok(control)
    }

    fn path(test: &str) -> PathBuf {
        std::env::temp_dir().join(format!("spindle-control-{}-{test}", std::process::id()))
    }

    fn status(path: &Path) -> Value {
        call(path, "spindle_get_status", Map::new()).expect("answered")
    }

    #[test]
    fn it_is_in_the_first_directory_of_the_service() {
        assert_eq!(in_directory("/run/a:/run/b"), Some(PathBuf::from("/run/a/spindle.sock")));
        assert_eq!((in_directory(""), in_directory("a")), (None, None));
    }

    #[test]
    fn an_unknown_rpc_is_refused_and_idle_or_nonreading_clients_do_not_block_others() {
        let path = path("requests");
        let snapshot = snapshot();
        let control = start(&path, &snapshot).expect("listens");
        let silent: Vec<_> = (0..100).map(|_| UnixStream::connect(&path).expect("it listens")).collect();
        let mut greedy = UnixStream::connect(&path).expect("it listens");
        greedy.set_nonblocking(true).expect("an option");
        let request = json!({ "jsonrpc": "2.0", "id": 1, "method": "rpc_get_methods" }).to_string();
        while greedy.write_all(request.as_bytes()).is_ok() {}
        assert_eq!(status(&path)["namespaces"][0]["nsid"], 1);
        let error = call(&path, "spindle_get_statu", Map::new()).expect_err("refused").to_string();
        assert!(error.contains("did you mean \"spindle_get_status\"?"), "{error}");
        drop((silent, greedy));
        let mode = std::fs::metadata(&path).expect("it is there").permissions().mode();
        assert_eq!(mode & 0o777, 0o660);
        drop(control);
        assert!(!path.exists());
    }

    #[test]
    fn more_clients_than_there_is_room_for_take_the_place_of_those_that_are_idle() {
        let path = path("crowd");
        let snapshot = snapshot();
        let _control = start(&path, &snapshot).expect("listens");
        let first = UnixStream::connect(&path).expect("it listens");
        let mut crowd: Vec<_> = (0..200).map(|_| UnixStream::connect(&path).expect("it listens")).collect();
        assert_eq!(status(&path)["generation"], 1);
        let mut last = crowd.pop().expect("one");
        last.write_all(br#"{"jsonrpc":"2.0","id":1,"method":"spdk_get_version"}"#).expect("taken");
        let mut answer = [0; 4096];
        let count = last.read(&mut answer).expect("answered");
        assert!(answer[..count].starts_with(b"{"));
        let mut first = first;
        assert_eq!(first.read(&mut answer).expect("the end"), 0);
    }

    #[test]
    fn a_request_that_is_not_json_is_answered_and_ends_its_client() {
        let path = path("broken");
        let snapshot = snapshot();
        let _control = start(&path, &snapshot).expect("listens");
        let mut stream = UnixStream::connect(&path).expect("it listens");
        let whole = br#"{"jsonrpc":"2.0","id":7,"method":"log_get_level"} status"#;
        stream.write_all(whole).expect("taken");
        let mut text = String::new();
        stream.read_to_string(&mut text).expect("the end");
        let answers: Vec<Value> =
            text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
        assert_eq!((&answers[0]["id"], &answers[0]["result"]), (&json!(7), &json!("NOTICE")));
        assert_eq!(answers[1]["error"]["code"], -32700);
    }

    #[test]
    fn white_space_between_requests_is_none_however_long_and_batches_have_an_end() {
        let path = path("white");
        let snapshot = snapshot();
        let _control = start(&path, &snapshot).expect("listens");
        let mut stream = UnixStream::connect(&path).expect("it listens");
        let blanks = vec![b'\n'; 4 << 20];
        stream.write_all(&blanks).expect("taken");
        let request = json!({ "jsonrpc": "2.0", "id": 7, "method": "log_get_level" });
        stream.write_all(format!("{request}\n").as_bytes()).expect("taken");
        let batch = Value::Array(vec![request; 65]).to_string();
        stream.write_all(batch.as_bytes()).expect("taken");
        stream.shutdown(std::net::Shutdown::Write).expect("an end");
        let mut text = String::new();
        stream.read_to_string(&mut text).expect("the end");
        let answers: Vec<Value> =
            text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
        assert_eq!((&answers[0]["result"], answers.len()), (&json!("NOTICE"), 2));
        assert_eq!(answers[1]["error"]["message"], "a batch of 65 requests: must have 1 to 64");
    }

    #[test]
    fn a_socket_that_was_left_is_replaced_and_neither_another_process_nor_a_file_is() {
        let path = path("left");
        drop(UnixListener::bind(&path).expect("bound"));
        let snapshot = snapshot();
        let control = start(&path, &snapshot).expect("no process listens");
        let error = start(&path, &snapshot).err().expect("in use").to_string();
        assert!(error.contains("another process"), "{error}");
        assert_eq!(status(&path)["generation"], 1, "as before");
        drop(control);
        std::fs::write(&path, "data").expect("written");
        let error = start(&path, &snapshot).err().expect("a file").to_string();
        assert!(error.contains("not a socket"), "{error}");
        assert_eq!(std::fs::read(&path).expect("still there"), b"data");
        assert!(bind_default(&path).is_none(), "of a path that no configuration names that is no error");
        std::fs::remove_file(&path).expect("removed");
        assert!(bind_default(&path).is_some());
    }

    #[test]
    fn disks_are_not_kept_open_for_whoever_may_ask() {
        let path = path("weak");
        let snapshot = snapshot();
        let gone = Arc::downgrade(&snapshot);
        let control = start(&path, &snapshot).expect("listens");
        assert_eq!(status(&path)["generation"], 1);
        drop(snapshot);
        assert!(gone.upgrade().is_none());
        assert_eq!(status(&path)["namespaces"].as_array().map(Vec::len), Some(0));
        drop(control);
    }

    #[test]
    fn a_file_that_has_taken_the_place_of_the_socket_stays() {
        let path = path("place");
        let control = Control::bind(&path, None).expect("listens");
        std::fs::remove_file(&path).expect("removed");
        std::fs::write(&path, "data").expect("written");
        drop(control);
        assert_eq!(std::fs::read(&path).expect("still there"), b"data");
        std::fs::remove_file(&path).expect("removed");
    }
}
