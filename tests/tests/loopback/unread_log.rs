//! A log without a reader does not stop a core.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use spindle_nvme_initiator::{Controller, Options, Pages, Pool, ZoneSpec};
use spindle_tests::loopback::{Folder, LONG, binary, config, free_port, target};

use super::RAM;

/// Each is a line of the log: more than a pipe and the log's queue hold together.
const NONSENSE: usize = 4000;

/// A target; killed when it is dropped.
struct Unread(Child);

impl Unread {
    fn terminate(&mut self) {
        kill_process(Pid::from_child(&self.0), Signal::TERM).expect("the process is there");
        assert!(self.0.wait().expect("its status").success());
    }
}

impl Drop for Unread {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// `serve` with a standard error that is a pipe without a reader, once it listens.
fn serve_unread(folder: &Folder) -> (Unread, SocketAddr) {
    let address = free_port(IpAddr::V4(Ipv4Addr::LOCALHOST));
    let text = config(1, address, &[RAM.to_owned()]) + "[log]\npeer_lines_per_s = 100000\n";
    let file = folder.write(&text);
    let mut command = Command::new(binary());
    command.args(["serve", "-c"]).arg(&file).stdin(Stdio::null()).stderr(Stdio::piped());
    let served = Unread(command.spawn().expect("spindle starts"));
    let end = Instant::now() + LONG;
    while TcpStream::connect(address).is_err() {
        assert!(Instant::now() < end, "it does not listen");
        std::thread::park_timeout(Duration::from_millis(5));
    }
    (served, address)
}

/// Connections that each cost a line of the log; returns once the target has seen them.
fn talk_nonsense(address: SocketAddr) {
    for _ in 0..NONSENSE {
        let mut socket = TcpStream::connect(address).expect("connects");
        socket.set_read_timeout(Some(LONG)).expect("set");
        socket.write_all(&[0xff; 128]).expect("sent");
        // What it says to that, until it closes.
        let mut answer = Vec::new();
        let closed = socket.read_to_end(&mut answer);
        let is_reset = |error: &std::io::Error| error.kind() == std::io::ErrorKind::ConnectionReset;
        assert!(closed.as_ref().map_or_else(is_reset, |_| true), "{closed:?}");
    }
}

fn is_serving(address: SocketAddr) {
    let mut controller = Controller::connect(&target(address), &Options::default()).expect("connects");
    let mut queue = controller.connect_queue(1).expect("a queue");
    let namespace = controller.namespace(1).expect("a namespace");
    let pool = Pool::new(&[ZoneSpec { buffer_bytes: 4096, count: 1 }], Pages::Base).expect("a pool");
    let ticket = queue.write(&namespace, 0, pool.take(4096).expect("a buffer"), false).expect("taken");
    assert!(queue.wait(ticket, LONG).expect("an answer").result.is_ok());
    drop(queue);
    controller.shutdown().expect("ends in order");
}

#[test]
fn a_target_whose_log_nobody_reads_serves_and_ends_in_order() {
    let folder = Folder::new("unread");
    let (mut served, address) = serve_unread(&folder);
    talk_nonsense(address);
    is_serving(address);
    served.terminate();
}

#[test]
fn what_was_lost_of_a_log_that_is_read_late_is_told() {
    let folder = Folder::new("late");
    let (mut served, address) = serve_unread(&folder);
    talk_nonsense(address);
    let stderr = served.0.stderr.take().expect("piped");
    let mut lines = BufReader::new(stderr).lines().map_while(Result::ok);
    let told = lines.find(|line| line.contains("log lines were lost")).expect("told");
    let lost: usize =
        told.split("lines=").nth(1).and_then(|lost| lost.trim().parse().ok()).expect("a number");
    assert!((1..NONSENSE).contains(&lost), "{told}");
    is_serving(address);
    served.terminate();
    let rest: Vec<String> = lines.collect();
    assert!(rest.iter().any(|line| line.contains("shutting down")), "the last lines are out: {rest:?}");
}
