//! A disk of another target whose network stalls, and what changes there meanwhile.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use spindle_nvme_initiator::nvme_spec::status::Status;
use spindle_nvme_initiator::{Controller, Failure, IoQueue, Namespace, Ticket};
use spindle_tests::loopback::{Folder, LONG, config, free_port};

use super::remote::{front, impatient_front, remote};
use super::{V4, buf, bytes, connect, done, pool};

/// One connection through [`Network`].
struct Way {
    near: TcpStream,
    beyond: TcpStream,
    /// What has come from the near end since the stall.
    held: Vec<u8>,
    is_stalled: bool,
}

#[derive(Default)]
struct Ways {
    all: Mutex<Vec<Way>>,
    changed: Condvar,
}

impl Ways {
    fn lock(&self) -> MutexGuard<'_, Vec<Way>> {
        self.all.lock().expect("lock")
    }
}

/// A network that may keep what it was given, and deliver it when the sender is long gone.
struct Network {
    address: SocketAddr,
    ways: Arc<Ways>,
}

impl Network {
    fn new(far: SocketAddr) -> Network {
        let listener = TcpListener::bind((V4, 0)).expect("listens");
        let address = listener.local_addr().expect("an address");
        let ways = Arc::<Ways>::default();
        let network = Network { address, ways: Arc::clone(&ways) };
        std::thread::spawn(move || {
            for near in listener.incoming() {
                let near = near.expect("a connection");
                let Ok(beyond) = TcpStream::connect(far) else { continue };
                near.set_nodelay(true).and(beyond.set_nodelay(true)).expect("an option");
                let index = {
                    let (near, beyond) = (near.try_clone(), beyond.try_clone());
                    let (near, beyond) = (near.expect("a handle"), beyond.expect("a handle"));
                    let mut all = ways.lock();
                    all.push(Way { near, beyond, held: Vec::new(), is_stalled: false });
                    all.len() - 1
                };
                let (mut from, mut to) =
                    (beyond.try_clone().expect("a handle"), near.try_clone().expect("a handle"));
                std::thread::spawn(move || {
                    let _ = std::io::copy(&mut from, &mut to);
                    let _ = to.shutdown(Shutdown::Both);
                });
                let ways = Arc::clone(&ways);
                std::thread::spawn(move || forward(&ways, index, near, &beyond));
            }
        });
        network
    }

    /// From now on what comes on the connections that there are is kept.
    fn stall(&self) {
        self.ways.lock().iter_mut().for_each(|way| way.is_stalled = true);
    }

    /// Until so much is kept.
    fn wait_until_held(&self, bytes: usize) {
        let mut all = self.ways.lock();
        let end = Instant::now() + LONG;
        while all.iter().map(|way| way.held.len()).sum::<usize>() < bytes {
            assert!(Instant::now() < end, "nothing was sent");
            all = self.ways.changed.wait_timeout(all, Duration::from_secs(1)).expect("lock").0;
        }
    }

    /// The near end loses the connections that are stalled, the far end does not hear of it.
    fn reset_near(&self) {
        for way in self.ways.lock().iter().filter(|way| way.is_stalled) {
            let _ = way.near.shutdown(Shutdown::Both);
        }
    }

    /// What was kept is delivered, as far as there is somebody who takes it; and is taken or refused.
    fn deliver(&self) {
        for way in self.ways.lock().iter_mut().filter(|way| way.is_stalled) {
            let _ = way.beyond.write_all(&way.held);
            let _ = way.beyond.set_read_timeout(Some(Duration::from_millis(300)));
            let _ = way.beyond.read(&mut [0; 4096]);
        }
    }
}

fn forward(ways: &Ways, index: usize, mut near: TcpStream, mut beyond: &TcpStream) {
    let mut data = vec![0; 1 << 16];
    loop {
        let count = near.read(&mut data).unwrap_or(0);
        let mut all = ways.lock();
        let way = &mut all[index];
        if count == 0 {
            if !way.is_stalled {
                let _ = beyond.shutdown(Shutdown::Both);
            }
            return;
        }
        if way.is_stalled {
            way.held.extend_from_slice(&data[..count]);
            ways.changed.notify_all();
        } else if beyond.write_all(&data[..count]).is_err() {
            return;
        }
    }
}

fn write(queue: &mut IoQueue, namespace: &Namespace, seed: u8) -> Ticket {
    let ticket = queue.write(namespace, 0, buf(&pool(), 4096, seed), false).expect("taken");
    queue.send();
    ticket
}

fn read(queue: &mut IoQueue, namespace: &Namespace) -> Vec<u8> {
    let ticket = queue.read(namespace, 0, pool().take(4096).expect("a buffer")).expect("taken");
    bytes(&done(queue, ticket).expect("its buffer"))
}

#[test]
fn what_a_stalled_network_delivers_late_does_not_land_over_a_newer_write() {
    let (far, folders) = (free_port(V4), [Folder::new("far-stall"), Folder::new("front-stall")]);
    let far_served = folders[0].serve(&config(1, far, &[folders[0].file_disk("far", "16MiB")]));
    let network = Network::new(far);
    let (mut front_served, address) = front(&folders[1], network.address);
    let (mut controller, mut queue) = connect(address);
    let namespace = controller.namespace(1).expect("a namespace");
    let ticket = write(&mut queue, &namespace, 1);
    done(&mut queue, ticket);
    network.stall();
    let ticket = write(&mut queue, &namespace, 2);
    network.wait_until_held(4096);
    network.reset_near();
    front_served.wait_for("lost namespace 1");
    done(&mut queue, ticket);
    let ticket = write(&mut queue, &namespace, 3);
    done(&mut queue, ticket);
    network.deliver();
    let (mut direct, mut of_far) = connect(far);
    let namespace_there = direct.namespace(1).expect("a namespace");
    assert_eq!(read(&mut of_far, &namespace_there), bytes(&buf(&pool(), 4096, 3)));
    assert_eq!(read(&mut queue, &namespace), bytes(&buf(&pool(), 4096, 3)));
    drop((controller, direct));
    front_served.terminate();
    far_served.terminate();
}

#[test]
fn a_command_unanswered_by_the_far_target_times_out_and_a_retry_succeeds() {
    let (far, folders) = (free_port(V4), [Folder::new("far-slow"), Folder::new("front-slow")]);
    let far_served = folders[0].serve(&config(1, far, &[folders[0].file_disk("far", "16MiB")]));
    let (front_served, address) = impatient_front(&folders[1], far);
    let (mut controller, mut queue) = connect(address);
    let namespace = controller.namespace(1).expect("a namespace");
    let ticket = write(&mut queue, &namespace, 1);
    done(&mut queue, ticket);
    far_served.stop();
    let ticket = write(&mut queue, &namespace, 2);
    let completion = queue.wait(ticket, LONG).expect("an answer");
    let Err(Failure::Status(status)) = completion.result else { panic!("{:?}", completion.result) };
    assert!(!status.is_dnr(), "the host may repeat it: {status}");
    far_served.signal(Signal::CONT);
    // As Linux does.
    loop {
        let ticket = write(&mut queue, &namespace, 3);
        match queue.wait(ticket, LONG).expect("an answer").result {
            Ok(()) => break,
            Err(Failure::Status(status)) if !status.is_dnr() => {}
            Err(failure) => panic!("{failure}"),
        }
    }
    assert_eq!(read(&mut queue, &namespace), bytes(&buf(&pool(), 4096, 3)));
    drop(controller);
    front_served.terminate();
    far_served.terminate();
}

#[test]
fn a_disk_removed_with_a_write_in_flight_is_not_reopened_before_the_write_is_over() {
    let (far, folders) = (free_port(V4), [Folder::new("far-again"), Folder::new("front-again")]);
    let far_served = folders[0].serve(&config(1, far, &[folders[0].file_disk("far", "16MiB")]));
    let network = Network::new(far);
    let (mut front_served, address) = impatient_front(&folders[1], network.address);
    let text = config(1, address, &[remote(network.address)]);
    let (mut controller, mut queue) = connect(address);
    let namespace = controller.namespace(1).expect("a namespace");
    let ticket = write(&mut queue, &namespace, 1);
    done(&mut queue, ticket);
    network.stall();
    let ticket = write(&mut queue, &namespace, 2);
    let completion = queue.wait(ticket, LONG).expect("an answer");
    assert!(completion.result.is_err(), "it is on its way still");
    for text in [&config(1, address, &[]), &text] {
        folders[1].write(text);
        front_served.signal(Signal::HUP);
        front_served.wait_for("configuration read again");
    }
    front_served.wait_for("has writes that the far target may execute");
    drop((controller, queue));
    front_served.terminate();
    far_served.terminate();
}

/// Until the namespace that `address` shows is as wanted.
fn wait_for_namespace(controller: &mut Controller, is_right: impl Fn(u64, bool) -> bool) {
    let end = Instant::now() + LONG;
    loop {
        let identify = controller.identify_namespace(1).expect("answered");
        let is_read_only = identify.nsattr & 1 == 1;
        if is_right(identify.nsze.get(), is_read_only) {
            return;
        }
        assert!(Instant::now() < end, "{} blocks, read only: {is_read_only}", identify.nsze.get());
    }
}

#[test]
fn a_far_namespace_that_grows_or_becomes_read_only_is_told_to_hosts() {
    let (far, folders) = (free_port(V4), [Folder::new("far-shape"), Folder::new("front-shape")]);
    let mut far_served = folders[0].serve(&config(1, far, &[folders[0].file_disk("far", "16MiB")]));
    let (mut front_served, address) = front(&folders[1], far);
    let (mut controller, mut queue) = connect(address);
    wait_for_namespace(&mut controller, |blocks, is_read_only| blocks == 32_768 && !is_read_only);
    // Under the association.
    folders[0].write(&config(1, far, &[folders[0].file_disk("far", "32MiB")]));
    far_served.signal(Signal::HUP);
    wait_for_namespace(&mut controller, |blocks, _| blocks == 65_536);
    let namespace = controller.namespace(1).expect("a namespace");
    let last = queue.write(&namespace, 65_528, buf(&pool(), 4096, 1), false).expect("taken");
    done(&mut queue, last);
    // And with the next one.
    far_served.signal(Signal::KILL);
    far_served.end();
    front_served.wait_for("lost namespace 1");
    let disk = folders[0].file_disk("far", "32MiB").replace("create = true", "read_only = true");
    let far_served = folders[0].serve(&config(1, far, &[disk]));
    wait_for_namespace(&mut controller, |blocks, is_read_only| blocks == 65_536 && is_read_only);
    let ticket = write(&mut queue, &namespace, 2);
    let refused = queue.wait(ticket, LONG).expect("an answer").result;
    let Err(Failure::Status(status)) = refused else { panic!("{refused:?}") };
    assert_eq!(status.code(), Status::NAMESPACE_IS_WRITE_PROTECTED);
    drop(controller);
    front_served.terminate();
    far_served.terminate();
}
