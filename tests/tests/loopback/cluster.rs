//! Coherent caches: a target, two agents with caches of its disk, and a host without one, as processes of
//! their own over TCP.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::json;
use spindle_nvme_initiator::{Controller, IoQueue, Namespace, Pool};
use spindle_tests::loopback::{Folder, SpindleProcess, config, free_port};

use super::control::{Client, with_socket};
use super::remote::remote;
use super::{RAM, V4, bytes, connect, done, pool};

/// A disk of which hosts `a` and `b` may have pages in caches.
fn clustered(disk: &str) -> String {
    let agents = "agents = [\"nqn.2026-01.io.spindle:a\", \"nqn.2026-01.io.spindle:b\"]";
    format!("{disk}\nblock_bytes = 4096\n[disk.cluster]\n{agents}")
}

/// A host and its connection.
struct End {
    queue: IoQueue,
    _controller: Controller,
    namespace: Namespace,
    pool: Pool,
}

impl End {
    fn new(address: SocketAddr) -> End {
        let (mut controller, queue) = connect(address);
        let namespace = controller.namespace(1).expect("a namespace");
        End { queue, _controller: controller, namespace, pool: pool() }
    }

    /// The first byte of a block, whose bytes are all the same.
    fn read(&mut self, block: u64) -> u8 {
        let data = self.pool.take(4096).expect("a buffer");
        let ticket = self.queue.read(&self.namespace, block, data).expect("taken");
        let read = bytes(&done(&mut self.queue, ticket).expect("its buffer"));
        assert!(read.iter().all(|byte| *byte == read[0]), "block {block}");
        read[0]
    }

    fn write(&mut self, block: u64, byte: u8) {
        let mut data = self.pool.take(4096).expect("a buffer");
        data.copy_in(0, &[byte; 4096]);
        let ticket = self.queue.write(&self.namespace, block, data, false).expect("taken");
        done(&mut self.queue, ticket);
    }
}

/// An agent: a process with a remote disk and a cache in front of it.
struct Agent {
    served: SpindleProcess,
    folder: Folder,
    text: String,
    client: Client,
    end: End,
}

impl Agent {
    fn start(name: &str, far: SocketAddr) -> Agent {
        let (address, folder) = (free_port(V4), Folder::new(&format!("agent-{name}")));
        let socket = folder.file("sock");
        let disk = format!(
            "{}\nhost_nqn = \"nqn.2026-01.io.spindle:{name}\"\n[disk.cache]\nsize = \"1MiB\"\n\
             read_ahead = 0\n[disk.cluster]",
            remote(far)
        );
        let text = with_socket(&config(2, address, &[disk]), &socket);
        let mut served = folder.serve(&text);
        Agent::joined(&mut served);
        let (client, end) = (Client::new(&socket), End::new(address));
        Agent { served, folder, text, client, end }
    }

    /// Waits until the log says that the agent has joined, maybe before it was ready.
    fn joined(served: &mut SpindleProcess) {
        let is_joined = |line: &String| line.contains("a member of the far target's cluster");
        if !served.log.iter().any(is_joined) {
            served.wait_for("a member of the far target's cluster");
        }
    }

    fn hits(&mut self) -> u64 {
        let counts = self.client.done("bdev_get_iostat", json!({}));
        counts["bdevs"][0]["cache"]["hits"].as_u64().expect("a number")
    }

    /// Reads a block until it is found in the cache.
    fn cache(&mut self, block: u64, byte: u8) {
        let is_found = (0..10_000).any(|_| {
            let before = self.hits();
            assert_eq!(self.end.read(block), byte, "block {block}");
            self.hits() > before
        });
        assert!(is_found, "block {block} is not kept");
    }
}

fn far(folder: &Folder, disk: &str) -> (SpindleProcess, SocketAddr) {
    let address = free_port(V4);
    (folder.serve(&config(2, address, &[clustered(disk)])), address)
}

#[test]
fn a_page_in_one_cache_is_that_of_the_last_write_whoever_wrote() {
    let folder = Folder::new("cluster-file");
    for disk in [RAM.to_owned(), folder.file_disk("disk", "16MiB")] {
        let (served, address) = far(&folder, &disk);
        let (mut a, mut b) = (Agent::start("a", address), Agent::start("b", address));
        let mut direct = End::new(address);
        for agent in [&mut a, &mut b] {
            agent.cache(7, 0);
            agent.cache(20, 0);
        }
        for round in 1..=240_u8 {
            let block = [7, 20][usize::from(round % 2)];
            match round % 3 {
                0 => a.end.write(block, round),
                1 => b.end.write(block, round),
                _ => direct.write(block, round),
            }
            let read = [a.end.read(block), b.end.read(block), direct.read(block), a.end.read(block)];
            assert_eq!(read, [round; 4], "round {round}");
        }
        for agent in [&mut a, &mut b] {
            agent.cache(7, 240);
            agent.cache(20, 239);
        }
        drop((direct, a.end, b.end));
        a.served.terminate();
        b.served.terminate();
        served.terminate();
    }
}

#[test]
fn a_write_waits_for_an_agent_that_is_killed_or_stopped_no_longer_than_its_lease() {
    let folder = Folder::new("cluster-lost");
    let (served, address) = far(&folder, RAM);
    let (mut a, mut b) = (Agent::start("a", address), Agent::start("b", address));
    a.cache(7, 0);
    b.cache(7, 0);
    a.served.signal(Signal::STOP);
    let begin = Instant::now();
    b.end.write(7, 1);
    let waited = begin.elapsed();
    assert!(waited > Duration::from_millis(500), "{waited:?}: the stopped agent had no lease");
    a.served.signal(Signal::CONT);
    assert_eq!([a.end.read(7), b.end.read(7)], [1; 2]);
    a.served.wait_for("a member of the far target's cluster");
    a.cache(7, 1);
    a.served.signal(Signal::KILL);
    a.served.end();
    b.end.write(7, 2);
    assert_eq!(b.end.read(7), 2);
    a.served = a.folder.serve(&a.text);
    Agent::joined(&mut a.served);
    drop((a.end, b.end));
    a.served.terminate();
    b.served.terminate();
    served.terminate();
}

#[test]
fn an_agent_that_may_not_join_reads_past_its_cache_and_says_so() {
    let folder = Folder::new("cluster-refused");
    let (served, address) = far(&folder, RAM);
    let (front, agent) = (free_port(V4), Folder::new("agent-c"));
    let disk = format!("{}\n[disk.cache]\nsize = \"1MiB\"\n[disk.cluster]", remote(address));
    let mut front_served = agent.serve(&config(1, front, &[disk]));
    let reason = "this host is not in agents of its [disk.cluster]";
    if !front_served.log.iter().any(|line| line.contains(reason)) {
        front_served.wait_for(reason);
    }
    let (mut through, mut direct) = (End::new(front), End::new(address));
    for round in 1..=50 {
        direct.write(7, round);
        assert_eq!([through.read(7), through.read(7)], [round; 2]);
        through.write(7, round + 100);
        assert_eq!([through.read(7), direct.read(7)], [round + 100; 2]);
    }
    drop((through, direct));
    front_served.terminate();
    served.terminate();
}
