//! What the target asks of its sockets, read back from the outside.

use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::net::sockopt;
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, Signal, pidfd_getfd, pidfd_open};
use spindle_reactor::affinity::available_cores;
use spindle_tests::loopback::{Folder, config, free_port};

use super::{RAM, V4, connect};

/// The sockets of the process that are connected over a network; it has others for itself.
fn connected(process: Pid) -> Vec<OwnedFd> {
    let pidfd = pidfd_open(process, PidfdFlags::empty()).expect("the process is there");
    let folder = format!("/proc/{}/fd", process.as_raw_nonzero());
    let numbers = std::fs::read_dir(folder).expect("its descriptors").filter_map(|entry| {
        let entry = entry.ok()?;
        let is_socket = std::fs::read_link(entry.path()).ok()?.to_str()?.starts_with("socket:");
        is_socket.then(|| entry.file_name().to_str()?.parse().ok())?
    });
    let sockets =
        numbers.map(|number| pidfd_getfd(&pidfd, number, PidfdGetfdFlags::empty()).expect("our child's"));
    let has_peer = |socket: &OwnedFd| {
        rustix::net::getpeername(socket)
            .is_ok_and(|peer| peer.is_some_and(|peer| SocketAddr::try_from(peer).is_ok()))
    };
    sockets.filter(has_peer).collect()
}

#[test]
fn each_connection_has_the_options_that_the_configuration_gives() {
    for (tcp, timeout_ms, buffer, congestion) in [
        ("", 30_000, None, None),
        (
            "[tcp]\nuser_timeout_ms = 7000\nsocket_buffer = \"64KiB\"\ncongestion = \"reno\"\n",
            7000,
            Some(128 << 10),
            Some("reno"),
        ),
    ] {
        let address = free_port(V4);
        let folder = Folder::new("sockets");
        let served = folder.serve(&format!("{}{tcp}", config(1, address, &[RAM.to_owned()])));
        let (controller, queue) = connect(address);
        let sockets = connected(served.pid());
        assert_eq!(sockets.len(), 2, "an admin queue and an I/O queue");
        for socket in sockets {
            assert!(sockopt::tcp_nodelay(&socket).expect("nodelay"));
            assert_eq!(sockopt::tcp_user_timeout(&socket).expect("user timeout"), timeout_ms);
            assert!(sockopt::socket_keepalive(&socket).expect("keep-alive"));
            assert_eq!(sockopt::tcp_keepidle(&socket).expect("idle"), Duration::from_secs(10));
            assert_eq!(sockopt::tcp_keepintvl(&socket).expect("interval"), Duration::from_secs(5));
            assert_eq!(sockopt::tcp_keepcnt(&socket).expect("count"), 3);
            if let Some(bytes) = buffer {
                // The kernel doubles what it is asked for.
                assert_eq!(sockopt::socket_send_buffer_size(&socket).expect("send"), bytes);
                assert_eq!(sockopt::socket_recv_buffer_size(&socket).expect("recv"), bytes);
            }
            if let Some(name) = congestion {
                assert_eq!(sockopt::tcp_congestion(&socket).expect("congestion"), name);
            }
        }
        drop(queue);
        controller.shutdown().expect("ends in order");
        served.terminate();
    }
}

/// By thread: its name, and the CPUs that it may run on, as the kernel lists them.
fn threads(process: Pid) -> Vec<(String, String)> {
    let folder = format!("/proc/{}/task", process.as_raw_nonzero());
    let thread = |entry: std::io::Result<std::fs::DirEntry>| {
        let status = std::fs::read_to_string(entry.ok()?.path().join("status")).ok()?;
        let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name));
        Some((field("Name:\t")?.to_owned(), field("Cpus_allowed_list:\t")?.to_owned()))
    };
    std::fs::read_dir(folder).expect("its threads").filter_map(thread).collect()
}

#[test]
fn a_pinned_core_has_its_cpu_for_itself() {
    let cpus = available_cores();
    let cpu = cpus[cpus.len() - 1];
    let (address, folder) = (free_port(V4), Folder::new("cpus"));
    let text = config(1, address, &[RAM.to_owned(), folder.file_disk("f", "16MiB")]);
    let text = text.replace("cores = [0]\npin = false", &format!("cores = [{cpu}]"));
    let mut served = folder.serve(&format!("{text}[control]\nsocket = {:?}\n", folder.file("control")));
    // A reload looks at the CPUs from a thread that keeps off this one.
    served.signal(Signal::HUP);
    served.wait_for("configuration read again");
    let threads = threads(served.pid());
    assert!(threads.len() > 4, "{threads:?}");
    let (own, others): (Vec<_>, Vec<_>) = threads.into_iter().partition(|(name, _)| name == "reactor-0");
    assert_eq!(own, [("reactor-0".to_owned(), cpu.to_string())]);
    let may_run_there = |list: &str| {
        list.split(',').any(|range| {
            let (first, last) = range.split_once('-').unwrap_or((range, range));
            let number = |text: &str| text.parse::<usize>().expect("a number");
            (number(first)..=number(last)).contains(&cpu)
        })
    };
    let there: Vec<_> = others.iter().filter(|(_, allowed)| may_run_there(allowed)).collect();
    // Where there is one CPU all are on it.
    assert!(there.is_empty() || cpus.len() == 1, "{there:?}");
    served.terminate();
}
