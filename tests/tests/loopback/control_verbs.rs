//! The verbs of `spindle ctl`: a target is built from nothing, used, and taken apart again.

use std::path::Path;

use serde_json::Value;
use spindle_tests::loopback::{Folder, SUBSYSTEM, free_port};

use super::control::{Bare, Client, ctl, with_socket};
use super::{V4, buf, connect, done, pool};

/// Words with blanks between them.
fn said(socket: &Path, words: &str) -> String {
    let (is_done, said) = ctl(socket, &words.split_whitespace().collect::<Vec<_>>());
    assert!(is_done, "{words}: {said}");
    said
}

fn json(socket: &Path, words: &str) -> Value {
    serde_json::from_str(&said(socket, &format!("{words} --json"))).expect("JSON")
}

/// Each of the texts is in what is said.
fn lists(socket: &Path, words: &str, wanted: &[&str]) {
    let said = said(socket, words);
    for wanted in wanted {
        assert!(said.contains(wanted), "{words}: {wanted}\n{said}");
    }
}

#[test]
fn verbs_alone_build_a_target_and_take_it_apart() {
    let (address, folder) = (free_port(V4), Folder::new("control-verbs"));
    let socket = folder.file("sock");
    let _bare = Bare::start(&folder.write(&with_socket("", &socket)));
    drop(Client::new(&socket));
    let file = folder.file("disk.img");
    std::fs::write(&file, vec![0; 1 << 20]).expect("written");
    let host = "nqn.2026-01.io.spindle:host";
    for (words, wanted) in [
        ("disk add ram d0 16MiB --block-size 4096".to_owned(), "added disk d0\n".to_owned()),
        ("disk add null d1 1GiB".to_owned(), "added disk d1\n".to_owned()),
        (format!("disk add file d2 {}", file.display()), "added disk d2\n".to_owned()),
        (format!("subsystem add {SUBSYSTEM} --serial S1"), format!("added subsystem {SUBSYSTEM}\n")),
        (format!("namespace add {SUBSYSTEM} d0"), format!("added namespace 1, disk d0, to {SUBSYSTEM}\n")),
        (
            format!("namespace add {SUBSYSTEM} d2 --nsid 5"),
            format!("added namespace 5, disk d2, to {SUBSYSTEM}\n"),
        ),
        (
            format!("listener add {SUBSYSTEM} {address}"),
            format!("added listener tcp:{address} to {SUBSYSTEM}\n"),
        ),
        (format!("host add {SUBSYSTEM} {host}"), format!("added host {host} to {SUBSYSTEM}\n")),
    ] {
        assert_eq!(said(&socket, &words), wanted);
    }
    let at = format!("tcp:{address}");
    lists(&socket, "subsystem list", &[SUBSYSTEM, "S1", host, &at, "1: d0", "5: d2"]);
    lists(&socket, &format!("host list {SUBSYSTEM}"), &[host]);
    lists(&socket, &format!("listener list {SUBSYSTEM}"), &[&at]);
    lists(&socket, &format!("namespace list {SUBSYSTEM}"), &["d0", "d2"]);
    lists(&socket, "disk list", &["d0", "16 MiB", "4 KiB", "yes", "d1", "null", "1 GiB", "no", "file"]);
    used_and_resized(&socket, address);
    for words in [
        format!("host any {SUBSYSTEM} off"),
        format!("listener remove {SUBSYSTEM} {at}"),
        format!("namespace remove {SUBSYSTEM} 5"),
        "disk remove d0".to_owned(),
        "disk remove d1".to_owned(),
        "disk remove d2".to_owned(),
        format!("subsystem remove {SUBSYSTEM}"),
    ] {
        said(&socket, &words);
    }
    assert_eq!(json(&socket, "disk list"), Value::Array(Vec::new()));
    assert_eq!(json(&socket, "subsystem list").as_array().map(Vec::len), Some(1), "that of discovery");
    let (is_done, said) = ctl(&socket, &["disk", "remove", "d0"]);
    assert!(!is_done && said.contains("there is no disk \"d0\""), "{said}");
}

fn used_and_resized(socket: &Path, address: std::net::SocketAddr) {
    said(socket, &format!("host any {SUBSYSTEM} on"));
    let (mut controller, mut queue) = connect(address);
    assert_eq!(controller.namespaces().expect("a list"), [1, 5]);
    let namespace = controller.namespace(1).expect("a namespace");
    let ticket = queue.write(&namespace, 0, buf(&pool(), 4096, 1), false).expect("taken");
    done(&mut queue, ticket);
    lists(socket, "connections", &[SUBSYSTEM, "I/O queues"]);
    let connections = json(socket, "connections");
    assert_eq!(connections[0]["qpairs"].as_array().map(Vec::len), Some(2), "{connections}");
    lists(socket, "status", &[SUBSYSTEM, "16 MiB"]);
    assert_eq!(json(socket, "status")["controllers"][0]["io_queues"], 1);
    for (words, wanted) in [
        ("disk resize d0 8MiB", "resized disk d0 to 8 MiB\n"),
        ("disk resize d1 2GiB", "resized disk d1 to 2 GiB\n"),
        ("disk resize d2 2MiB", "resized disk d2 to 2 MiB\n"),
    ] {
        assert_eq!(said(socket, words), wanted);
    }
    lists(socket, "disk list", &["8 MiB", "2 GiB", "2 MiB"]);
    said(socket, "log error");
    assert_eq!(said(socket, "log"), "error\n");
}
