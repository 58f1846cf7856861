//! What `spindle status` says of a target that runs.

use std::path::Path;
use std::process::{Command, Output};
use std::time::Instant;

use rustix::process::Signal;
use serde_json::Value;
use spindle_tests::loopback::{Folder, LONG, SUBSYSTEM, binary, config, free_port};

use super::{NULL, RAM, V4, buf, connect, done, pool};

fn ask(socket: &Path, options: &[&str]) -> Output {
    Command::new(binary()).arg("status").args(options).arg(socket).output().expect("spindle starts")
}

fn json(socket: &Path) -> Value {
    let output = ask(socket, &["--json"]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("JSON")
}

#[test]
fn an_operator_sees_cores_hosts_and_traffic_of_a_target_that_runs() {
    let (address, folder) = (free_port(V4), Folder::new("status"));
    let socket = folder.file("control");
    let with_socket =
        |disks: &[String]| format!("{}[control]\nsocket = {socket:?}\n", config(2, address, disks));
    let served = folder.serve(&with_socket(&[RAM.to_owned()]));
    let alone = json(&socket);
    assert_eq!(alone["pid"].as_u64(), u64::try_from(served.pid().as_raw_nonzero().get()).ok());
    assert_eq!(alone["cores"].as_array().map(Vec::len), Some(2));
    assert_eq!(alone["controllers"].as_array().map(Vec::len), Some(0));

    let (mut controller, mut queue) = connect(address);
    let namespace = controller.namespace(1).expect("a namespace");
    let pool = pool();
    for _ in 0..3 {
        let ticket = queue.write(&namespace, 0, buf(&pool, 8192, 1), false).expect("taken");
        done(&mut queue, ticket);
    }
    let ticket = queue.read(&namespace, 0, buf(&pool, 4096, 1)).expect("taken");
    done(&mut queue, ticket);
    let now = json(&socket);
    let counted = ["reads", "writes", "bytes_read", "bytes_written"].map(|key| &now["namespaces"][0][key]);
    assert_eq!(counted, [1, 3, 4096, 3 * 8192]);
    let host = &now["controllers"][0];
    assert_eq!((host["subsystem"].as_str(), host["io_queues"].as_u64()), (Some(SUBSYSTEM), Some(1)));
    let sum = |of: &Value, key: &str| -> u64 {
        of["cores"].as_array().into_iter().flatten().filter_map(|core| core[key].as_u64()).sum()
    };
    assert_eq!(sum(&now, "connections"), 2);
    assert!(sum(&now, "busy_ns") > sum(&alone, "busy_ns"), "{now}");

    let output = ask(&socket, &[]);
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains(SUBSYSTEM) && text.contains("16 MiB"), "{text}");

    // What a reload adds is there as well; the socket stays where it is.
    let mut served = served;
    folder.write(&with_socket(&[RAM.to_owned(), NULL.to_owned()]));
    served.signal(Signal::HUP);
    served.wait_for("configuration read again");
    let end = Instant::now() + LONG;
    while json(&socket)["namespaces"][1]["kind"] != "null" {
        assert!(Instant::now() < end, "namespace 2 is not shown");
    }
    folder.write(&config(2, address, &[RAM.to_owned()]));
    served.signal(Signal::HUP);
    served.wait_for("control.socket");
    served.wait_for("the configuration is unchanged");

    // Killed, it leaves its socket behind: that is said, and the next process takes its place.
    drop(served);
    let output = ask(&socket, &["--json"]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(1) && said.contains("control.socket"), "{said}");
    let served = folder.serve(&with_socket(&[RAM.to_owned()]));
    let said = Folder::new("status-second").fails_to_serve(
        &with_socket(&[RAM.to_owned()]).replace(&address.to_string(), &free_port(V4).to_string()),
    );
    assert!(said.contains("another process listens on the socket"), "{said}");
    assert_eq!(json(&socket)["generation"], 1);
    served.terminate();
    assert!(!socket.exists());
}
