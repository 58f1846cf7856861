//! Changes beside a disk whose file is gone, and revocations that cannot be saved.

use std::path::Path;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::{Value, json};
use spindle_nvme_initiator::{Controller, Options};
use spindle_tests::loopback::{Folder, LONG, SUBSYSTEM, SpindleProcess, config, free_port, target};

use super::control::{Client, with_socket};
use super::{RAM, V4, connect};

/// The host of [`target`].
const HOST: &str = "nqn.2014-08.org.nvmexpress:uuid:07070707-0707-0707-0707-070707070707";

/// Without `allow_any_host`: for [`HOST`].
fn for_one_host(config: &str) -> String {
    config.replace("allow_any_host = true", &format!("hosts = [{HOST:?}]"))
}

fn read(file: &Path) -> String {
    std::fs::read_to_string(file).expect("the file")
}

fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let end = Instant::now() + LONG;
    while !is_so() {
        assert!(Instant::now() < end, "{what}");
        std::thread::park_timeout(Duration::from_millis(20));
    }
}

#[test]
fn a_disk_whose_file_is_gone_holds_up_no_change_of_something_else() {
    let (address, folder) = (free_port(V4), Folder::new("revocations-gone"));
    let socket = folder.file("sock");
    let disks = [RAM.to_owned(), folder.file_disk("d2", "16MiB").replace("\ncreate = true", "")];
    std::fs::write(folder.file("d2"), vec![0; 16 << 20]).expect("written");
    let mut served = folder.serve(&with_socket(&for_one_host(&config(1, address, &disks)), &socket));
    let (mut controller, _queue) = connect(address);
    std::fs::remove_file(folder.file("d2")).expect("it was there");
    let mut client = Client::new(&socket);
    let disk = json!({ "name": "n", "num_blocks": 8, "block_size": 512 });
    client.done("bdev_null_create", disk);
    client.done("nvmf_subsystem_remove_host", json!({ "nqn": SUBSYSTEM, "host": HOST }));
    wait_until("the host is still connected", || controller.namespaces().is_err());
    assert!(Controller::connect(&target(address), &Options::default()).is_err());
    // The same by hand.
    let file = folder.file("spindle.toml");
    std::fs::write(&file, read(&file).replace("hosts = []", "allow_any_host = true")).expect("written");
    served.signal(Signal::HUP);
    served.wait_for("disks that do not change stay as they are");
    served.wait_for("configuration read again");
    let is_allowed = || Controller::connect(&target(address), &Options::default()).is_ok();
    wait_until("the file is not in force", is_allowed);
    let (mut controller, _queue) = connect(address);
    assert_eq!(controller.namespaces().expect("a list"), [1, 2], "it is open");
    // What is asked for now is looked at.
    let other = json!({ "name": "d3", "filename": folder.file("d2") });
    client.send("bdev_aio_create", &other);
    let error = client.answer().expect("an answer")["error"]["message"].to_string();
    assert!(error.contains("there is no such file"), "{error}");
    served.terminate();
}

#[test]
fn a_revocation_that_cannot_be_saved_is_in_force_and_saved_later() {
    let (address, folder) = (free_port(V4), Folder::new("revocations-unsaved"));
    let socket = folder.file("sock");
    let text = with_socket(&config(1, address, &[RAM.to_owned()]), &socket);
    let mut served = folder.serve(&text);
    let (mut controller, _queue) = connect(address);
    let mut client = Client::new(&socket);
    // No new text can be written beside the file, by nobody.
    let (file, in_the_way) = (folder.file("spindle.toml"), folder.file(".spindle.toml.new"));
    std::fs::create_dir(&in_the_way).expect("made");
    let mut call = |method: &str, params: Value| {
        client.send(method, &params);
        client.answer().expect("an answer")
    };
    let any_host = |is_any: bool| json!({ "nqn": SUBSYSTEM, "allow_any_host": is_any });
    let error = call("nvmf_subsystem_allow_any_host", any_host(false))["error"].clone();
    assert_eq!(error["code"], -32001, "{error}");
    let (in_force, kept) = (&error["data"]["in_force"], &error["data"]["kept"]);
    assert_eq!((in_force, kept), (&json!(true), &json!(false)), "{error}");
    assert!(error["message"].as_str().is_some_and(|words| words.contains("not saved")), "{error}");
    wait_until("the host is still connected", || controller.namespaces().is_err());
    let refused = || Controller::connect(&target(address), &Options::default()).is_err();
    assert!(refused());
    assert_eq!(read(&file), text);
    let unsaved = |status: Value| status["result"]["unsaved"].clone();
    let status = call("spindle_get_status", json!({}));
    assert!(unsaved(status.clone()).is_string(), "{status}");
    // What gives something is refused, and a signal does not take the revocation back.
    let error = call("nvmf_subsystem_allow_any_host", any_host(true))["error"].clone();
    assert_eq!(error["code"], -32603, "{error}");
    served.signal(Signal::HUP);
    served.wait_for("the configuration is unchanged");
    assert!(refused());
    // Another one builds on it.
    let error = call("nvmf_subsystem_remove_ns", json!({ "nqn": SUBSYSTEM, "nsid": 1 }))["error"].clone();
    assert_eq!(error["code"], -32001, "{error}");
    std::fs::remove_dir(&in_the_way).expect("it was there");
    wait_until("it is not saved", || unsaved(call("spindle_get_status", json!({}))).is_null());
    let kept = read(&file);
    assert!(!kept.contains("allow_any_host") && !kept.contains("[[subsystem.namespace]]"), "{kept}");
    assert_eq!(call("nvmf_subsystem_allow_any_host", any_host(true))["result"], true);
    drop(served);
    let _served = SpindleProcess::start(&file);
    let (mut controller, _queue) = connect(address);
    assert_eq!(controller.namespaces().expect("a list"), [] as [u32; 0]);
}

#[test]
fn an_unsaved_revocation_holds_until_the_hand_edited_file_is_reloaded() {
    let (address, folder) = (free_port(V4), Folder::new("revocations-by-hand"));
    let socket = folder.file("sock");
    let text = with_socket(&for_one_host(&config(1, address, &[RAM.to_owned()])), &socket);
    let mut served = folder.serve(&text);
    let by_hand = format!("# By hand.\n{text}");
    folder.write(&by_hand);
    let mut client = Client::new(&socket);
    client.send("nvmf_subsystem_remove_host", &json!({ "nqn": SUBSYSTEM, "host": HOST }));
    let error = client.answer().expect("an answer")["error"].clone();
    assert_eq!(error["code"], -32001, "{error}");
    assert!(error["message"].to_string().contains("was changed since it was read"), "{error}");
    assert!(Controller::connect(&target(address), &Options::default()).is_err());
    assert_eq!(read(&folder.file("spindle.toml")), by_hand);
    served.signal(Signal::HUP);
    served.wait_for("revocations that were not saved are undone");
    wait_until("the file is in force", || Controller::connect(&target(address), &Options::default()).is_ok());
}
