//! Disks of other targets that are away, do not answer, have another medium, or are another disk than before.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::sync::mpsc::{Receiver, TryRecvError, channel};
use std::thread::spawn;
use std::time::Instant;

use rustix::process::Signal;
use spindle_nvme_initiator::Identity;
use spindle_tests::loopback::{Folder, LONG, SpindleProcess, config, free_port};

use super::namespaces::wait_for_notice;
use super::remote::{front, remote};
use super::{NULL, RAM, V4, buf, connect, done, pool};

const OPEN_FAILED: &str = "its namespaces are offline, next attempt in 2 s";

/// By what hosts know a namespace.
fn identity(address: SocketAddr, nsid: u32) -> Identity {
    let (mut controller, _queue) = connect(address);
    let identity = controller.namespace(nsid).expect("a namespace").identity;
    controller.shutdown().expect("ends in order");
    identity
}

/// With a line more in each namespace.
fn identified(text: &str, line: &str) -> String {
    text.replace("disk = \"d1\"\n", &format!("disk = \"d1\"\n{line}\n"))
}

/// Until hosts are shown these namespaces: the log says so a moment before all cores have them.
fn wait_until_shown(address: SocketAddr, nsids: &[u32]) {
    let end = Instant::now() + LONG;
    loop {
        let (mut controller, _queue) = connect(address);
        let shown = controller.namespaces().expect("a list");
        if shown == nsids {
            return;
        }
        assert!(Instant::now() < end, "{shown:?}");
    }
}

fn kill(served: &mut SpindleProcess) {
    served.signal(Signal::KILL);
    served.end();
}

#[test]
fn a_far_target_that_is_away_at_the_start_is_served_when_it_comes() {
    let (far, address) = (free_port(V4), free_port(V4));
    let folders = [Folder::new("far-late"), Folder::new("front-late")];
    let mut front_served = folders[1].serve(&config(1, address, &[RAM.to_owned(), remote(far)]));
    let (mut controller, mut queue) = connect(address);
    assert_eq!(controller.namespaces().expect("a list"), [1]);
    let far_served = folders[0].serve(&config(1, far, &[folders[0].file_disk("far", "16MiB")]));
    wait_for_notice(&mut controller);
    assert_eq!(controller.namespaces().expect("a list"), [1, 2]);
    let namespace = controller.namespace(2).expect("a namespace");
    let ticket = queue.write(&namespace, 0, buf(&pool(), 4096, 1), true).expect("taken");
    done(&mut queue, ticket);
    front_served.wait_for("serving the current size of the far namespace");
    let told = front_served.log.iter().filter(|line| line.contains(OPEN_FAILED));
    assert_eq!(told.count(), 1, "however often it was tried:\n{}", front_served.log.join("\n"));
    front_served.terminate();
    far_served.terminate();
}

#[test]
fn the_address_of_a_far_target_that_was_never_there_can_be_corrected_by_reload() {
    let (far, address) = (free_port(V4), free_port(V4));
    let folders = [Folder::new("far-right"), Folder::new("front-wrong")];
    let far_served = folders[0].serve(&config(1, far, &[NULL.to_owned()]));
    let mut front_served = folders[1].serve(&config(1, address, &[remote(free_port(V4))]));
    folders[1].write(&config(1, address, &[remote(far)]));
    front_served.signal(Signal::HUP);
    front_served.wait_for("serving the current size of the far namespace");
    // From now on it is the disk that it is.
    folders[1].write(&config(1, address, &[remote(free_port(V4))]));
    front_served.signal(Signal::HUP);
    front_served.wait_for("would be another disk under the same name");
    front_served.terminate();
    far_served.terminate();
}

#[test]
fn a_target_in_front_of_itself_finds_itself_and_its_disks_are_not_each_other() {
    let (address, folder) = (free_port(V4), Folder::new("front-self"));
    let mut served = folder.serve(&config(1, address, &[RAM.to_owned(), remote(address)]));
    served.wait_for("serving the current size of the far namespace");
    wait_until_shown(address, &[1, 2]);
    let [far, near] = [1, 2].map(|nsid| identity(address, nsid));
    assert!(far.uuid != near.uuid && far.nguid != near.nguid, "Linux refuses duplicates: {far:?}");
    let (mut controller, mut queue) = connect(address);
    let [far, near] = [1, 2].map(|nsid| controller.namespace(nsid).expect("a namespace"));
    let ticket = queue.write(&near, 8, buf(&pool(), 4096, 3), false).expect("taken");
    done(&mut queue, ticket);
    let ticket = queue.compare(&far, 8, buf(&pool(), 4096, 3)).expect("taken");
    done(&mut queue, ticket);
    drop((controller, queue));
    served.terminate();
}

/// What is told of a connection to [`silent`].
#[derive(Debug, PartialEq, Eq)]
enum Told {
    /// It sends Connect.
    Connect,
    /// It has ended.
    End,
}

/// A target that never answers Connect.
fn silent() -> (SocketAddr, Receiver<Told>) {
    let listener = TcpListener::bind((V4, 0)).expect("listens");
    let address = listener.local_addr().expect("an address");
    let (tell, told) = channel();
    spawn(move || {
        for socket in listener.incoming() {
            let (mut socket, tell) = (socket.expect("a connection"), tell.clone());
            spawn(move || {
                let (mut icreq, mut more) = ([0; 128], [0; 1024]);
                // ICResp: both lengths, and MAXH2CDATA.
                let mut icresp = [0; 128];
                icresp[..8].copy_from_slice(&[1, 0, 128, 0, 128, 0, 0, 0]);
                icresp[12..16].copy_from_slice(&(64_u32 << 10).to_le_bytes());
                let begun = socket.read_exact(&mut icreq).and_then(|()| socket.write_all(&icresp));
                if begun.is_ok() && socket.read(&mut more).is_ok_and(|bytes| bytes > 0) {
                    let _ = tell.send(Told::Connect);
                }
                while socket.read(&mut more).is_ok_and(|bytes| bytes > 0) {}
                let _ = tell.send(Told::End);
            });
        }
    });
    (address, told)
}

#[test]
fn a_silent_far_target_delays_neither_other_far_targets_nor_listeners_nor_reloads() {
    let (far, address) = (free_port(V4), free_port(V4));
    let folders = [Folder::new("far-beside"), Folder::new("front-silent")];
    let far_served = folders[0].serve(&config(1, far, &[RAM.to_owned()]));
    let (silent, told) = silent();
    let mut disks = vec![remote(silent), remote(far)];
    let mut front_served = folders[1].serve(&config(1, address, &disks));
    let (mut controller, _queue) = connect(address);
    assert_eq!(controller.namespaces().expect("a list"), [2]);
    assert_eq!(told.recv_timeout(LONG), Ok(Told::Connect));
    disks.push(RAM.to_owned());
    folders[1].write(&config(1, address, &disks));
    front_served.signal(Signal::HUP);
    front_served.wait_for("configuration read again");
    wait_for_notice(&mut controller);
    assert_eq!(controller.namespaces().expect("a list"), [2, 3]);
    // All of it while the first try goes on.
    assert_eq!(told.try_recv(), Err(TryRecvError::Empty));
    // A reload with a new remote disk.
    let (late, late_told) = self::silent();
    disks.push(remote(late));
    folders[1].write(&config(1, address, &disks));
    front_served.signal(Signal::HUP);
    front_served.wait_for("configuration read again");
    assert_eq!(late_told.recv_timeout(LONG), Ok(Told::Connect));
    assert_eq!(late_told.try_recv(), Err(TryRecvError::Empty));
    assert_eq!(told.try_recv(), Err(TryRecvError::Empty));
    front_served.terminate();
    far_served.terminate();
}

#[test]
fn a_far_target_with_another_medium_is_left_out_until_it_has_the_right_one() {
    let (far, address) = (free_port(V4), free_port(V4));
    let folders = [Folder::new("far-medium"), Folder::new("front-medium")];
    let of = |digit: u8| {
        let nguid = format!("0123456789abcdef0123456789abcde{digit}");
        (identified(&config(1, far, &[NULL.to_owned()]), &format!("nguid = \"{nguid}\"")), nguid)
    };
    let ((wrong, _), (right, nguid)) = (of(1), of(2));
    let mut far_served = folders[0].serve(&wrong);
    let disk = format!("{}\nmedium_id = \"eui.{nguid}\"", remote(far));
    let mut front_served = folders[1].serve(&config(1, address, &[disk]));
    let said = front_served.log.iter().find(|line| line.contains(OPEN_FAILED)).expect("it says why");
    let is_named = said.contains(&format!("medium_id = \"eui.{nguid}\": must be a name of the medium"));
    assert!(is_named, "{said}");
    kill(&mut far_served);
    let far_served = folders[0].serve(&right);
    front_served.wait_for("serving the current size of the far namespace");
    wait_until_shown(address, &[1]);
    front_served.terminate();
    far_served.terminate();
}

#[test]
fn a_remote_disk_is_another_one_when_the_far_disk_is_and_never_the_far_one() {
    let (far, folders) = (free_port(V4), [Folder::new("far-lives"), Folder::new("front-lives")]);
    // A RAM disk is another disk after a restart.
    let text = config(1, far, &[RAM.to_owned()]);
    let mut far_served = folders[0].serve(&text);
    let through_front = || {
        let (mut served, address) = front(&folders[1], far);
        let identity = identity(address, 1);
        kill(&mut served);
        identity
    };
    let (there, here) = (identity(far, 1), through_front());
    assert!(there.uuid != here.uuid && there.nguid != here.nguid, "{there:?}");
    assert_eq!(through_front(), here, "the same disk");
    kill(&mut far_served);
    far_served = folders[0].serve(&text);
    let after = through_front();
    assert!(after.uuid != here.uuid && after.nguid != here.nguid, "{after:?}");
    assert_ne!(after.uuid, identity(far, 1).uuid);
    // What the file says is so.
    let address = free_port(V4);
    let uuid = "uuid = \"0b8a7f70-3b2c-4a7e-9f60-8f4d2f1f1b11\"";
    let served = folders[1].serve(&identified(&config(1, address, &[remote(far)]), uuid));
    let given = identity(address, 1);
    assert_eq!(u128::from_be_bytes(given.uuid), 0x0b8a_7f70_3b2c_4a7e_9f60_8f4d_2f1f_1b11);
    assert_eq!(given.nguid, after.nguid, "the other one is derived still");
    served.terminate();
    far_served.terminate();
}
