//! `spindle bench --bare`, a host with sockets of its own, against the target.

use std::net::SocketAddr;
use std::process::{Command, Output, Stdio};

use serde_json::Value;
use spindle_tests::loopback::{Folder, binary, config, free_port};

use super::{RAM, V4, buf, connect, done, pool};

fn bench(address: SocketAddr, options: &str) -> Output {
    let mut command = Command::new(binary());
    command.args(["bench", &address.to_string(), "--bare", "--json", "--seconds", "0.05"]);
    command.args(options.split_whitespace()).stdin(Stdio::null()).output().expect("spindle starts")
}

fn measured(address: SocketAddr, options: &str) -> Value {
    let output = bench(address, options);
    assert!(output.status.success(), "{options}: {}", String::from_utf8_lossy(&output.stderr));
    let result: Value = serde_json::from_slice(&output.stdout).expect("one object");
    assert_eq!((&result["run"]["tool"], &result["errors"]), (&"bench --bare".into(), &0.into()));
    assert!(result["iops"].as_f64().is_some_and(|iops| iops > 0.0), "{options}: {result}");
    result
}

/// Whether a block has the payload of a `bench`, which is not zero.
fn is_written(address: SocketAddr) -> bool {
    let (mut controller, mut queue) = connect(address);
    let namespace = controller.namespace(1).expect("namespace 1");
    let ticket = queue.read(&namespace, 0, buf(&pool(), 4096, 1)).expect("taken");
    let read = done(&mut queue, ticket).expect("its buffer");
    drop(queue);
    controller.shutdown().expect("ends in order");
    read.as_slice().expect("one piece").iter().any(|byte| *byte != 0)
}

#[test]
fn the_bare_host_reads_and_writes_in_each_way_of_the_protocol() {
    let address = free_port(V4);
    let folder = Folder::new("bare");
    let text = config(1, address, &[RAM.to_owned()]);
    // 128 KiB of a write come in 32 data PDUs.
    let served = folder.serve(&format!("{text}[tcp]\nmax_h2c_data = \"4KiB\"\nin_capsule = \"8KiB\"\n"));
    measured(address, "--rw randread --bs 4KiB --qd 32 --span 1MiB");
    assert!(!is_written(address));
    let result = measured(address, "--rw write --bs 128KiB --qd 16 --span 2MiB");
    assert_eq!(result["run"]["in_capsule"], 8192);
    assert!(is_written(address));
    measured(address, "--rw randwrite --bs 8KiB --qd 32");
    measured(address, "--rw randwrite --bs 4KiB --qd 1 --in-capsule 0");
    measured(address, "--rw read --bs 1MiB --qd 4");
    let result = measured(address, "--rw randrw --bs 16KiB --qd 8 --busy");
    assert!(result["run"]["busy_us_per_command"].as_f64().is_some_and(|busy| busy > 0.0), "{result}");
    served.terminate();
}

#[test]
fn what_the_bare_host_cannot_do_is_refused() {
    let address = free_port(V4);
    let folder = Folder::new("bare-refused");
    let served = folder.serve(&config(1, address, &[RAM.to_owned()]));
    for (options, parts) in [
        ("--queues 2", ["--queues is 2", "1 is allowed"]),
        ("--qd 4096", ["--qd is 4096", "a queue of this target holds"]),
        ("--bs 1000", ["--bs is", "whole blocks"]),
        ("--nsid 9", ["no active namespace", "9"]),
    ] {
        let output = bench(address, options);
        let message = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && output.stdout.is_empty(), "{options}: {output:?}");
        for part in parts {
            assert!(message.contains(part), "{part} in: {message}");
        }
    }
    served.terminate();
}
