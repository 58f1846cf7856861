//! A disk that is a namespace of another target: this one in front of that one.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use spindle_nvme_initiator::nvme_spec::vendor::END_FORMER_ASSOCIATIONS;
use spindle_nvme_initiator::{BlockRange, Controller, Failure, IoQueue, Options, Ticket};
use spindle_tests::loopback::{Folder, LONG, SUBSYSTEM, SpindleProcess, config, free_port, target};

use super::{RAM, V4, buf, bytes, connect, done, pool, round_pool, write_round};

/// Bytes in the sockets of a port of this machine: all that is under way at both ends of its connections,
/// and of that what the owner of the port has not read.
fn in_sockets(port: u16) -> (usize, usize) {
    let text = std::fs::read_to_string("/proc/net/tcp").expect("the kernel lists its sockets");
    let hex = |field: &str| usize::from_str_radix(field, 16).expect("a number");
    let (mut all, mut unread) = (0, 0);
    for line in text.lines().skip(1) {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let [_, local, remote, state, queues, ..] = fields[..] else { panic!("not a socket: {line}") };
        let is_of = |end: &str| end.rsplit(':').next().map(hex) == Some(usize::from(port));
        // A listener has connections in its queues, not bytes.
        if state == "0A" || !(is_of(local) || is_of(remote)) {
            continue;
        }
        let (sent, received) = queues.split_once(':').expect("both queues");
        all += hex(sent) + hex(received);
        unread += if is_of(local) { hex(received) } else { 0 };
    }
    (all, unread)
}

/// Until all that the host has sent is with the front target, and some of it with the far one, which
/// stands still.
fn wait_until_sent(queue: &mut IoQueue, first: Ticket, front: SocketAddr, far: SocketAddr) {
    let end = Instant::now() + LONG;
    loop {
        let answer = queue.wait(first, Duration::from_millis(20));
        assert!(answer.is_err(), "{answer:?}");
        let (of_front, of_far) = (in_sockets(front.port()), in_sockets(far.port()));
        // More than Keep Alive commands.
        if of_front.0 == 0 && of_far.1 > 4096 {
            return;
        }
        assert!(Instant::now() < end, "in sockets: {of_front:?}, of the far target {of_far:?}");
    }
}

/// The lines of the disk that is namespace 1 of the target at `far`.
pub(super) fn remote(far: SocketAddr) -> String {
    format!("kind = \"remote\"\naddress = \"{far}\"\nnqn = \"{SUBSYSTEM}\"")
}

/// A target in front of the one at `far`, whose commands wait for 3 s.
pub(super) fn impatient_front(folder: &Folder, far: SocketAddr) -> (SpindleProcess, SocketAddr) {
    let address = free_port(V4);
    let disk = format!("{}\ncommand_timeout_ms = 3000", remote(far));
    (folder.serve(&config(1, address, &[disk])), address)
}

/// A target in front of the one at `far`.
pub(super) fn front(folder: &Folder, far: SocketAddr) -> (SpindleProcess, SocketAddr) {
    let address = free_port(V4);
    (folder.serve(&config(1, address, &[remote(far)])), address)
}

#[test]
fn every_command_reaches_the_disk_of_the_other_target() {
    let (far, folders) = (free_port(V4), [Folder::new("far-all"), Folder::new("front-all")]);
    // The other target moves less in one command than this one.
    let text = config(1, far, &[folders[0].file_disk("far", "16MiB")]);
    let far_served = folders[0].serve(&format!("{text}[limits]\ntransfer = \"64KiB\"\n"));
    let (front_served, address) = front(&folders[1], far);
    let (mut controller, mut queue) = connect(address);
    let namespace = controller.namespace(1).expect("a namespace");
    assert_eq!(namespace.bytes(), 16 << 20);
    let pool = pool();
    for (length, lba) in [(512, 0), (4096, 32_767 - 7), (64 << 10, 8), (1 << 20, 3)] {
        let data = buf(&pool, length, 7);
        let wanted = bytes(&data);
        let ticket = queue.write(&namespace, lba, data, length == 4096).expect("taken");
        done(&mut queue, ticket);
        let ticket = queue.read(&namespace, lba, pool.take(length).expect("a buffer")).expect("taken");
        assert_eq!(bytes(&done(&mut queue, ticket).expect("its buffer")), wanted, "{length} bytes at {lba}");
    }
    let ticket = queue.flush(&namespace).expect("taken");
    done(&mut queue, ticket);
    let ticket = queue.compare(&namespace, 0, buf(&pool, 512, 9)).expect("taken");
    let differs = queue.wait(ticket, LONG).expect("an answer");
    assert!(matches!(differs.result, Err(Failure::Status(_))), "{:?}", differs.result);
    let range = BlockRange { lba: 3, blocks: 2048 };
    let ticket = queue.write_zeroes(&namespace, range, false).expect("taken");
    done(&mut queue, ticket);
    let ticket = queue.deallocate(&namespace, &[range], pool.take(4096).expect("a buffer")).expect("taken");
    done(&mut queue, ticket);
    let ticket = queue.read(&namespace, 3, pool.take(1 << 20).expect("a buffer")).expect("taken");
    assert!(bytes(&done(&mut queue, ticket).expect("its buffer")).iter().all(|byte| *byte == 0));
    // As the other target's own hosts see it.
    let (mut direct, mut of_far) = connect(far);
    let namespace = direct.namespace(1).expect("a namespace");
    let ticket = of_far.read(&namespace, 32_767 - 7, pool.take(4096).expect("a buffer")).expect("taken");
    assert_eq!(bytes(&done(&mut of_far, ticket).expect("its buffer")), bytes(&buf(&pool, 4096, 7)));
    front_served.terminate();
    far_served.terminate();
}

#[test]
fn acknowledged_writes_survive_kill_9_of_the_far_target_and_others_are_resent() {
    let (far, folders) = (free_port(V4), [Folder::new("far-killed"), Folder::new("front-killed")]);
    let text = config(1, far, &[folders[0].file_disk("far", "16MiB")]);
    let mut far_served = folders[0].serve(&text);
    let (mut front_served, address) = front(&folders[1], far);
    let (mut controller, mut queue) = connect(address);
    let namespace = controller.namespace(1).expect("a namespace");
    let pool = round_pool();
    for round in 1..=3u8 {
        let tickets = write_round(&mut queue, &namespace, &pool, round);
        done(&mut queue, tickets[0]);
        // The others are on their way, or with a target that dies with them.
        far_served.signal(Signal::KILL);
        far_served.end();
        if round == 1 {
            // Told once while associations do not last.
            front_served.wait_for("lost namespace 1");
        }
        far_served = folders[0].serve(&text);
        for ticket in &tickets[1..] {
            done(&mut queue, *ticket);
        }
        for at in 0..64u64 {
            let ticket = queue.read(&namespace, at * 16, pool.take(8192).expect("a buffer")).expect("taken");
            let read = bytes(&done(&mut queue, ticket).expect("its buffer"));
            assert!(read.iter().all(|byte| *byte == round), "round {round}, block {}", at * 16);
        }
    }
    assert!(queue.is_up(), "the host has noticed nothing but time");
    front_served.terminate();
    far_served.terminate();
}

#[test]
fn another_disk_under_the_same_name_is_not_used_and_commands_fail_in_time() {
    let (far, folders) = (free_port(V4), [Folder::new("far-other"), Folder::new("front-other")]);
    // A RAM disk is another disk after a restart.
    let text = config(1, far, &[RAM.to_owned()]);
    let mut far_served = folders[0].serve(&text);
    let (mut front_served, address) = impatient_front(&folders[1], far);
    let (mut controller, mut queue) = connect(address);
    let namespace = controller.namespace(1).expect("a namespace");
    far_served.signal(Signal::KILL);
    far_served.end();
    front_served.wait_for("lost namespace 1");
    let far_served = folders[0].serve(&text);
    front_served.wait_for("cannot use namespace 1");
    let ticket = queue.write(&namespace, 0, buf(&pool(), 4096, 1), false).expect("taken");
    let completion = queue.wait(ticket, LONG).expect("an answer");
    let Err(Failure::Status(status)) = completion.result else { panic!("{:?}", completion.result) };
    assert!(!status.is_dnr(), "the host may repeat it: {status}");
    drop(controller);
    front_served.terminate();
    far_served.terminate();
}

/// Get Log Page of the Changed Namespace List: by dword 10, NUMDL and the log's identifier.
fn is_changed_list(sqe: &[u8]) -> bool {
    sqe[0] == 2 && sqe[40..44] == 0x03ff_0004_u32.to_le_bytes()
}

/// End Former Associations.
fn is_end_former(sqe: &[u8]) -> bool {
    sqe[0] == END_FORMER_ASSOCIATIONS.0
}

/// A way to the target at `far` on which each command waits for which `is_held` is true: one end tells that
/// it has come, the other lets it go on. Without the other nothing waits.
fn holding_back(far: SocketAddr, is_held: fn(&[u8]) -> bool) -> (SocketAddr, Receiver<()>, Sender<()>) {
    let listener = TcpListener::bind((V4, 0)).expect("listens");
    let address = listener.local_addr().expect("an address");
    let ((tell, asked), (go, may_go)) = (channel(), channel());
    let may_go = Arc::new(Mutex::new(may_go));
    std::thread::spawn(move || {
        for near in listener.incoming() {
            let near = near.expect("a connection");
            let Ok(beyond) = TcpStream::connect(far) else { continue };
            near.set_nodelay(true).and(beyond.set_nodelay(true)).expect("an option");
            let mut back = [&beyond, &near].map(|end| end.try_clone().expect("a handle"));
            std::thread::spawn(move || {
                let [from, to] = &mut back;
                let _ = std::io::copy(from, to);
                let _ = to.shutdown(Shutdown::Both);
            });
            let (tell, may_go) = (tell.clone(), Arc::clone(&may_go));
            std::thread::spawn(move || {
                let _ = forward(&near, &beyond, is_held, &tell, &may_go);
                let _ = beyond.shutdown(Shutdown::Both);
            });
        }
    });
    (address, asked, go)
}

/// PDU by PDU, until either end is gone.
fn forward(
    mut near: &TcpStream,
    mut beyond: &TcpStream,
    is_held: fn(&[u8]) -> bool,
    tell: &Sender<()>,
    may_go: &Mutex<Receiver<()>>,
) -> std::io::Result<()> {
    loop {
        let mut pdu = vec![0; 8];
        near.read_exact(&mut pdu)?;
        let plen = u32::from_le_bytes([pdu[4], pdu[5], pdu[6], pdu[7]]);
        pdu.resize(usize::try_from(plen).expect("a length"), 0);
        near.read_exact(&mut pdu[8..])?;
        // CapsuleCmd.
        if pdu[0] == 4 && is_held(&pdu[8..72]) {
            let _ = tell.send(());
            let _ = may_go.lock().expect("lock").recv();
        }
        beyond.write_all(&pdu)?;
    }
}

/// Namespaces 1 and 2 are each other's disks.
fn swapped(text: &str) -> String {
    let of = |nsid: u32, disk: &str| format!("nsid = {nsid}\ndisk = \"{disk}\"");
    let other = text.replace(&of(1, "d1"), &of(1, "d2")).replace(&of(2, "d2"), &of(2, "d1"));
    assert_ne!(text, other);
    other
}

#[test]
fn a_namespace_that_becomes_another_disk_under_a_connection_is_not_written_to() {
    let (far, folders) = (free_port(V4), [Folder::new("far-moved"), Folder::new("front-moved")]);
    let disks = ["first", "second"].map(|name| folders[0].file_disk(name, "16MiB"));
    let far_served = folders[0].serve(&config(1, far, &disks[..1]));
    let reload = |text: &str| {
        folders[0].write(text);
        far_served.signal(Signal::HUP);
    };
    let (between, asked, go) = holding_back(far, is_changed_list);
    let (mut front_served, address) = impatient_front(&folders[1], between);
    let (mut controller, mut queue) = connect(address);
    let namespace = controller.namespace(1).expect("a namespace");
    let pool = pool();
    // A change that leaves the disk what it is: commands wait until that is known.
    reload(&config(1, far, &disks));
    asked.recv_timeout(LONG).expect("the front target asks what has changed");
    let ticket = queue.write(&namespace, 0, buf(&pool, 4096, 1), false).expect("taken");
    let answer = queue.wait(ticket, Duration::from_millis(300));
    assert!(answer.is_err(), "{answer:?}");
    go.send(()).expect("it waits");
    done(&mut queue, ticket);
    // One that does not. It is told although there was another before.
    reload(&swapped(&config(1, far, &disks)));
    asked.recv_timeout(LONG).expect("the front target asks what has changed");
    let ticket = queue.write(&namespace, 0, buf(&pool, 4096, 2), false).expect("taken");
    let answer = queue.wait(ticket, Duration::from_millis(300));
    assert!(answer.is_err(), "{answer:?}");
    drop(go);
    front_served.wait_for("namespace 1 is another disk");
    let completion = queue.wait(ticket, LONG).expect("an answer");
    let Err(Failure::Status(status)) = completion.result else { panic!("{:?}", completion.result) };
    assert!(!status.is_dnr(), "the host may repeat it: {status}");
    let second = std::fs::read(folders[0].file("second")).expect("the file");
    assert!(second.iter().all(|byte| *byte == 0), "the other disk was written to");
    // The disk is back in its place.
    reload(&config(1, far, &disks));
    front_served.wait_for("found namespace 1");
    let ticket = queue.read(&namespace, 0, pool.take(4096).expect("a buffer")).expect("taken");
    assert_eq!(bytes(&done(&mut queue, ticket).expect("its buffer")), bytes(&buf(&pool, 4096, 1)));
    drop(controller);
    front_served.terminate();
    far_served.terminate();
}

#[test]
fn nothing_is_sent_over_an_association_before_the_far_target_knows_whose_it_is() {
    let (far, folders) = (free_port(V4), [Folder::new("far-token"), Folder::new("front-token")]);
    let text = config(1, far, &[folders[0].file_disk("far", "16MiB")]);
    let mut far_served = folders[0].serve(&text);
    let (between, asked, go) = holding_back(far, is_end_former);
    go.send(()).expect("the first may go on");
    let (front_served, address) = front(&folders[1], between);
    asked.recv_timeout(LONG).expect("the front target says whose its association is");
    let (mut controller, mut queue) = connect(address);
    let namespace = controller.namespace(1).expect("a namespace");
    let ticket = queue.write(&namespace, 0, buf(&pool(), 4096, 1), false).expect("taken");
    done(&mut queue, ticket);
    far_served.signal(Signal::KILL);
    far_served.end();
    let far_served = folders[0].serve(&text);
    asked.recv_timeout(LONG).expect("the front target says whose its association is");
    // If it were lost now with a write, the far target could not end it when the next one asks.
    let ticket = queue.write(&namespace, 0, buf(&pool(), 4096, 2), false).expect("taken");
    let answer = queue.wait(ticket, Duration::from_millis(300));
    assert!(answer.is_err(), "{answer:?}");
    drop(go);
    done(&mut queue, ticket);
    drop(controller);
    front_served.terminate();
    far_served.terminate();
}

#[test]
fn a_disk_with_another_uuid_is_another_disk_whatever_its_nguid_says() {
    let (far, folders) = (free_port(V4), [Folder::new("far-uuid"), Folder::new("front-uuid")]);
    let text = |digit: u8| {
        let uuid = format!("0b8a7f70-3b2c-4a7e-9f60-8f4d2f1f1b1{digit}");
        let ids = format!("uuid = \"{uuid}\"\nnguid = \"0123456789abcdef0123456789abcdef\"\n");
        let text = config(1, far, &[folders[0].file_disk("far", "16MiB")]);
        let with = text.replace("disk = \"d1\"\n", &format!("disk = \"d1\"\n{ids}"));
        assert_ne!(text, with);
        with
    };
    let mut far_served = folders[0].serve(&text(1));
    let (mut front_served, _) = front(&folders[1], far);
    far_served.signal(Signal::KILL);
    far_served.end();
    front_served.wait_for("lost namespace 1");
    let far_served = folders[0].serve(&text(2));
    front_served.wait_for("namespace 1 is another disk");
    front_served.terminate();
    far_served.terminate();
}

/// A host has written through the front target, and the far one stands still with a part of it.
struct Stopped {
    /// Of the far target and of the front one.
    folders: [Folder; 2],
    far: SpindleProcess,
    front: SpindleProcess,
    address: SocketAddr,
    controller: Controller,
    queue: IoQueue,
    tickets: Vec<Ticket>,
}

fn stopped(test: &str) -> Stopped {
    let far_address = free_port(V4);
    let folders = ["far", "front"].map(|end| Folder::new(&format!("{end}-{test}")));
    let far = folders[0].serve(&config(1, far_address, &[folders[0].file_disk("far", "16MiB")]));
    let (front, address) = front(&folders[1], far_address);
    let (mut controller, mut queue) = connect(address);
    let namespace = controller.namespace(1).expect("a namespace");
    // Answered: the I/O queue to the far target is connected.
    let ticket = queue.write(&namespace, 0, buf(&pool(), 4096, 1), false).expect("taken");
    done(&mut queue, ticket);
    far.stop();
    let tickets = write_round(&mut queue, &namespace, &round_pool(), 1);
    wait_until_sent(&mut queue, tickets[0], address, far_address);
    Stopped { folders, far, front, address, controller, queue, tickets }
}

#[test]
fn a_disk_that_is_removed_has_its_association_until_its_last_command_has_ended() {
    let Stopped { folders, far, mut front, address, controller, mut queue, tickets } = stopped("removed");
    folders[1].write(&config(1, address, &[]));
    front.signal(Signal::HUP);
    front.wait_for("configuration read again");
    far.signal(Signal::CONT);
    for ticket in tickets {
        done(&mut queue, ticket);
    }
    drop(controller);
    front.terminate();
    far.terminate();
}

#[test]
fn a_host_that_is_back_waits_for_what_it_left_with_a_target_that_is_lost() {
    let Stopped { folders: _folders, far, mut front, address, controller, queue, .. } = stopped("left");
    drop((controller, queue));
    front.wait_for("lost namespace 1");
    let (tell, told) = channel();
    let back = std::thread::spawn(move || {
        let options = Options { connect_answer_timeout: LONG, ..Options::default() };
        let mut controller = Controller::connect(&target(address), &options).expect("connects");
        let mut queue = controller.connect_queue(1).expect("a queue");
        tell.send(()).expect("the test waits");
        let namespace = controller.namespace(1).expect("a namespace");
        let pool = round_pool();
        for ticket in write_round(&mut queue, &namespace, &pool, 2) {
            done(&mut queue, ticket);
        }
        for at in 0..64 {
            let ticket = queue.read(&namespace, at * 16, pool.take(8192).expect("a buffer")).expect("taken");
            let read = bytes(&done(&mut queue, ticket).expect("its buffer"));
            assert!(read.iter().all(|byte| *byte == 2), "block {}", at * 16);
        }
    });
    front.wait_for("cannot use namespace 1");
    assert_eq!(told.try_recv(), Err(TryRecvError::Empty), "the far target may still do what it has");
    far.signal(Signal::CONT);
    back.join().expect("the host is back");
    front.terminate();
    far.terminate();
}
