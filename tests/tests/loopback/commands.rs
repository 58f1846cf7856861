//! Every command on every kind of disk; hundreds of connections.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use spindle_nvme_initiator::{BlockRange, Controller, IoQueue, Namespace, Options};
use spindle_tests::loopback::{Folder, LONG, config, free_port, target};

use super::{NULL, RAM, V4, buf, bytes, done, pool};

fn matrix(queue: &mut IoQueue, namespace: &Namespace, keeps: bool) {
    let pool = pool();
    let block = namespace.block_bytes();
    for size in [block, 4096, 8192, 65_536, 1 << 20] {
        let ticket = queue.write(namespace, 8, buf(&pool, size, 3), size == 8192).expect("taken");
        done(queue, ticket);
        let ticket = queue.flush(namespace).expect("taken");
        done(queue, ticket);
        let ticket = queue.read(namespace, 8, buf(&pool, size, 9)).expect("taken");
        let read = done(queue, ticket).expect("its buffer");
        assert!(!keeps || bytes(&read) == bytes(&buf(&pool, size, 3)), "{size} bytes");
    }
    let ticket = queue.verify(namespace, BlockRange { lba: 8, blocks: 4 }).expect("taken");
    done(queue, ticket);
    if !keeps {
        return;
    }
    let ticket = queue.compare(namespace, 8, buf(&pool, block, 3)).expect("taken");
    done(queue, ticket);
    let ticket = queue.compare(namespace, 8, buf(&pool, block, 4)).expect("taken");
    assert!(queue.wait(ticket, LONG).expect("an answer").result.is_err(), "a difference is found");
    let both =
        queue.compare_and_write(namespace, 8, buf(&pool, block, 3), buf(&pool, block, 5)).expect("taken");
    for ticket in both {
        done(queue, ticket);
    }
    let ticket =
        queue.copy(namespace, &[BlockRange { lba: 8, blocks: 1 }], 0, buf(&pool, 4096, 0)).expect("taken");
    done(queue, ticket);
    let ticket = queue.compare(namespace, 0, buf(&pool, block, 5)).expect("taken");
    done(queue, ticket);
    let ticket = queue.write_zeroes(namespace, BlockRange { lba: 0, blocks: 1 }, false).expect("taken");
    done(queue, ticket);
    let ticket =
        queue.deallocate(namespace, &[BlockRange { lba: 8, blocks: 1 }], buf(&pool, 4096, 0)).expect("taken");
    done(queue, ticket);
    let ticket = queue.read(namespace, 0, buf(&pool, block, 9)).expect("taken");
    assert!(bytes(&done(queue, ticket).expect("its buffer")).iter().all(|byte| *byte == 0));
}

fn good_client(address: SocketAddr, options: &Options, disks: u32) {
    let mut controller = Controller::connect(&target(address), options).expect("connects");
    let mut queue = controller.connect_queue(1).expect("a queue");
    for nsid in 1..=disks {
        let namespace = controller.namespace(nsid).expect("a namespace");
        matrix(&mut queue, &namespace, nsid != 4);
    }
    drop(queue);
    controller.shutdown().expect("ends in order");
}

#[test]
fn every_command_works_on_every_disk_with_and_without_digests_on_one_and_two_cores() {
    let folder = Folder::new("matrix");
    for (cores, ip) in [(1, V4), (2, IpAddr::V6(Ipv6Addr::LOCALHOST))] {
        let disk = |block: u32| {
            format!("{}\nblock_bytes = {block}", folder.file_disk(&format!("disk-{cores}-{block}"), "16MiB"))
        };
        let address = free_port(ip);
        let disks = [RAM.to_owned(), disk(512), disk(4096), NULL.to_owned()];
        let served = folder.serve(&config(cores, address, &disks));
        for digests in [false, true] {
            good_client(
                address,
                &Options { header_digest: digests, data_digest: digests, ..Options::default() },
                4,
            );
        }
        served.terminate();
    }
}

#[test]
fn three_hundred_connections_that_all_vanish_leave_a_target_that_serves() {
    let address = free_port(V4);
    let folder = Folder::new("many");
    let served = folder.serve(&config(2, address, &[RAM.to_owned()]));
    let pool = pool();
    let options = Options { io_queues: 30, ..Options::default() };
    let mut all = Vec::new();
    for _ in 0..10 {
        let mut controller = Controller::connect(&target(address), &options).expect("connects");
        let namespace = controller.namespace(1).expect("a namespace");
        for qid in 1..=30 {
            let mut queue = controller.connect_queue_of(qid, 8).expect("a queue");
            let ticket = queue.read(&namespace, u64::from(qid), buf(&pool, 4096, 0)).expect("taken");
            done(&mut queue, ticket);
            all.push(queue);
        }
        controller.abandon();
    }
    drop(all);
    good_client(address, &Options::default(), 1);
    served.terminate();
}
