//! A process that may have few files open answers or closes every connection, and serves on.

use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, TcpStream};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use spindle_nvme_initiator::{Controller, Options};
use spindle_tests::loopback::{Folder, LONG, binary, config, free_port, target};

use super::RAM;

/// Killed when it is dropped.
struct Limited(Child);

impl Drop for Limited {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn connections_beyond_the_open_files_are_closed_and_not_left_to_wait() {
    let address = free_port(IpAddr::V4(Ipv4Addr::LOCALHOST));
    let folder = Folder::new("descriptors");
    let file = folder.write(&config(1, address, &[RAM.to_owned()]));
    let mut command = Command::new("sh");
    command.args(["-c", "ulimit -n 64; exec \"$0\" serve -c \"$1\""]).arg(binary()).arg(&file);
    command.stdin(Stdio::null()).stderr(Stdio::null());
    let mut served = Limited(command.spawn().expect("a shell"));
    let end = Instant::now() + LONG;
    while TcpStream::connect(address).is_err() {
        assert!(Instant::now() < end, "it does not listen");
        std::thread::park_timeout(Duration::from_millis(5));
    }

    let mut initialize = [0u8; 128];
    (initialize[2], initialize[4]) = (128, 128);
    let mut sockets: Vec<TcpStream> = Vec::new();
    for _ in 0..200 {
        let mut socket = TcpStream::connect(address).expect("the kernel takes it");
        socket.set_read_timeout(Some(LONG)).expect("set");
        // It may be closed already.
        let _ = socket.write_all(&initialize);
        sockets.push(socket);
    }
    let mut answered = 0;
    for socket in &mut sockets {
        let mut answer = [0u8; 128];
        match socket.read_exact(&mut answer) {
            Ok(()) => answered += 1,
            Err(error) => assert!(error.kind() != std::io::ErrorKind::WouldBlock, "left to wait: {error}"),
        }
    }
    assert!((20..64).contains(&answered), "{answered} were answered");

    drop(sockets);
    let end = Instant::now() + LONG;
    let controller = loop {
        // The target has to see the ends of the others first.
        match Controller::connect(&target(address), &Options::default()) {
            Ok(controller) => break controller,
            Err(error) => assert!(Instant::now() < end, "{error}"),
        }
    };
    controller.shutdown().expect("ends in order");
    kill_process(Pid::from_child(&served.0), Signal::TERM).expect("the process is there");
    assert!(served.0.wait().expect("its status").success());
}
