//! The real binary as a child process, its log, and hosts that drive it over loopback.
//!
//! ```text
//!   Target::start(config) ─ spindle serve -c FILE ─ stderr ──> reader thread ──> lines (wait_for)
//!   Host::connect ─ spindle-nvme-initiator ─ TCP on 127.0.0.1 or ::1 ──^
//! ```
//! Waits are blocking reads with a time-out; the child is killed when its handle is dropped. [`raw`] is a
//! host that can stop anywhere in a PDU.

pub mod raw;

use std::io::{BufRead, BufReader};
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use nvme_spec::nqn::Nqn;
use rustix::process::{Pid, Signal, kill_process};
use spindle_nvme_initiator as host;

/// Name of the subsystem of [`config`].
pub const SUBSYSTEM: &str = "nqn.2026-01.io.spindle:loopback";
/// Longest wait for anything: a disk that others write to as well may stand still for ten seconds.
pub const LONG: Duration = Duration::from_secs(60);

/// The binary: `SPINDLE`, else that of the tests' own build, else the release.
///
/// # Panics
/// When there is none.
#[must_use]
pub fn binary() -> PathBuf {
    if let Some(path) = std::env::var_os("SPINDLE") {
        return path.into();
    }
    let here = std::env::current_exe().expect("this executable has a path");
    let deps = here.parent().expect("it is in a folder");
    let found = ["../spindle", "../../release/spindle"]
        .map(|path| deps.join(path))
        .into_iter()
        .find(|path| path.exists());
    found.expect(
        "no spindle binary: build it (cargo build --release -p spindle-app) or set SPINDLE to its path",
    )
}

/// A port that was free a moment ago. Below the ports that the kernel gives to connections (32768 on Linux):
/// one of those may be taken again before the caller listens on it.
///
/// # Panics
/// When there is no port that can be bound.
#[must_use]
pub fn free_port(ip: IpAddr) -> SocketAddr {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    // Tests of other processes begin elsewhere.
    let first = std::process::id().wrapping_mul(61);
    let mut ports = std::iter::repeat_with(|| {
        let at = first.wrapping_add(NEXT.fetch_add(1, Ordering::Relaxed)) % 12_000;
        SocketAddr::new(ip, u16::try_from(20_000 + at).expect("below 32768"))
    });
    ports.by_ref().take(12_000).find(|port| TcpListener::bind(port).is_ok()).expect("a free port")
}

/// A configuration: `cores`, the listener, and disks (the TOML lines of each), as namespaces 1, 2, ...
#[must_use]
pub fn config(cores: usize, listen: SocketAddr, disks: &[String]) -> String {
    let cores: Vec<usize> = (0..cores).collect();
    let mut text = format!(
        "[reactor]\ncores = {cores:?}\npin = false\n[[listener]]\naddress = \"{listen}\"\n\
         [[subsystem]]\nnqn = \"{SUBSYSTEM}\"\nallow_any_host = true\n"
    );
    for nsid in 1..=disks.len() {
        text += &format!("[[subsystem.namespace]]\nnsid = {nsid}\ndisk = \"d{nsid}\"\n");
    }
    for (nsid, disk) in (1..).zip(disks) {
        text += &format!("[[disk]]\nname = \"d{nsid}\"\n{disk}\n");
    }
    text
}

/// A folder for the files of one test; removed at its end, kept when it failed.
#[derive(Debug)]
pub struct Folder(PathBuf);

impl Folder {
    /// A new, empty one.
    ///
    /// # Panics
    /// When it cannot be made.
    #[must_use]
    pub fn new(test: &str) -> Folder {
        // A failed test of an earlier process with this number may have left its own.
        let place = |number| format!("spindle-loopback-{}-{test}-{number}", std::process::id());
        let mut places = (0..1000).map(|number| std::env::temp_dir().join(place(number)));
        Folder(places.find(|place| std::fs::create_dir(place).is_ok()).expect("a folder"))
    }

    /// The path of a file in it.
    #[must_use]
    pub fn file(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// The TOML lines of a disk in a file in it.
    #[must_use]
    pub fn file_disk(&self, name: &str, size: &str) -> String {
        let path = self.file(name);
        format!("kind = \"file\"\npath = {path:?}\nsize = \"{size}\"\ncreate = true")
    }

    /// Write the configuration; a target that runs is told by SIGHUP. Its path.
    ///
    /// # Panics
    /// When it cannot be written.
    pub fn write(&self, config: &str) -> PathBuf {
        let path = self.file("spindle.toml");
        std::fs::write(&path, config).expect("written");
        path
    }

    /// Serve a configuration.
    ///
    /// # Panics
    /// When the target does not get ready.
    #[must_use]
    pub fn serve(&self, config: &str) -> SpindleProcess {
        SpindleProcess::start(&self.write(config))
    }

    /// Try to serve a configuration that is refused. What is said of it.
    ///
    /// # Panics
    /// When it is not refused.
    #[must_use]
    pub fn fails_to_serve(&self, config: &str) -> String {
        let file = self.write(config);
        let output = Command::new(binary()).args(["serve", "-c"]).arg(file).stdin(Stdio::null()).output();
        let output = output.expect("spindle starts");
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.code() == Some(1) && !said.contains("panic"), "{}\n{said}", output.status);
        said
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }
}

/// A served target.
#[derive(Debug)]
pub struct SpindleProcess {
    child: Child,
    lines: Receiver<String>,
    /// All lines of the log that were looked at.
    pub log: Vec<String>,
    /// From the start of the process to its `nvme connect` line.
    pub ready_after: Duration,
}

impl SpindleProcess {
    /// Serve a configuration file; returns when it is ready.
    ///
    /// # Panics
    /// When it does not get ready.
    #[must_use]
    pub fn start(file: &Path) -> SpindleProcess {
        SpindleProcess::start_by(&mut Command::new(binary()), file)
    }

    /// As [`SpindleProcess::start`], by a command that ends with the binary.
    ///
    /// # Panics
    /// When it does not get ready.
    #[must_use]
    pub fn start_by(command: &mut Command, file: &Path) -> SpindleProcess {
        let begin = Instant::now();
        let mut child = command
            .args(["serve", "-c"])
            .arg(file)
            .stdin(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .expect("spindle starts");
        let stderr = child.stderr.take().expect("piped");
        let (send, lines) = channel();
        std::thread::spawn(move || {
            BufReader::new(stderr).lines().map_while(Result::ok).try_for_each(|line| send.send(line))
        });
        let mut served = SpindleProcess { child, lines, log: Vec::new(), ready_after: Duration::ZERO };
        served.wait_for("nvme connect");
        served.ready_after = begin.elapsed();
        served
    }

    /// Read the log up to a line with `text` in it.
    ///
    /// # Panics
    /// When it does not come.
    pub fn wait_for(&mut self, text: &str) -> String {
        loop {
            let line = self.lines.recv_timeout(LONG);
            let line =
                line.unwrap_or_else(|_| panic!("no line with {text:?} in the log:\n{}", self.log.join("\n")));
            self.log.push(line.clone());
            if line.contains(text) {
                return line;
            }
        }
    }

    /// Send a signal.
    ///
    /// # Panics
    /// When the process is gone.
    pub fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).expect("the process is there");
    }

    /// SIGSTOP, and a wait until each of its threads has stopped: `kill` returns before that.
    ///
    /// # Panics
    /// When the process is gone.
    pub fn stop(&self) {
        self.signal(Signal::STOP);
        let tasks = format!("/proc/{}/task", self.pid().as_raw_nonzero());
        let is_stopped = |task: std::fs::DirEntry| {
            // "TID (NAME) STATE ..."; a name may have blanks.
            let stat = std::fs::read_to_string(task.path().join("stat")).unwrap_or_default();
            stat.rsplit(')').next().is_some_and(|rest| rest.trim_start().starts_with(['T', 't']))
        };
        while !std::fs::read_dir(&tasks).expect("its threads").flatten().all(is_stopped) {
            std::thread::yield_now();
        }
    }

    /// The process.
    #[must_use]
    pub fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    /// How many descriptors the process has open.
    ///
    /// # Panics
    /// When it is gone.
    #[must_use]
    pub fn descriptors(&self) -> usize {
        let folder = format!("/proc/{}/fd", self.child.id());
        std::fs::read_dir(folder).expect("the process is there").count()
    }

    /// SIGTERM, and its end: in order, and without a panic on the way.
    ///
    /// # Panics
    /// When it was not so.
    pub fn terminate(mut self) {
        self.signal(Signal::TERM);
        let status = self.end();
        let log = self.log.join("\n");
        assert!(status.success() && !log.contains("panic"), "{status}\n{log}");
    }

    /// Wait for its end; the log is then complete.
    ///
    /// # Panics
    /// When it does not end.
    pub fn end(&mut self) -> ExitStatus {
        // Its standard error is closed when it ends.
        while let Ok(line) = self.lines.recv_timeout(LONG) {
            self.log.push(line);
        }
        self.child.wait().expect("its status")
    }
}

impl Drop for SpindleProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// How to get to [`SUBSYSTEM`] at an address.
///
/// # Panics
/// Never: the name is well formed.
#[must_use]
pub fn target(address: SocketAddr) -> host::Target {
    let nqn = Nqn::new(SUBSYSTEM).expect("well formed");
    host::Target { transport: host::TransportKind::Tcp, address, nqn, host: host::Host::from_uuid([7; 16]) }
}
