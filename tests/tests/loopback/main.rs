//! Initiator against target in two processes on loopback, and hosts that stop anywhere in the protocol.
//!
//! `commands`: the matrix of commands and disks. `closing`: abrupt closes in every state. `restart`: kill -9,
//! reload. `listeners`: they come and go. `initiators`: what others' initiators do. `descriptors`,
//! `unread_log`: what the machine may run out of. `namespaces`, `drain`, `discovery`, `smart`: what they say.
//! `full_sockets`: buffers smaller than a reply. `unconnected`: peers that never send Connect. `control`,
//! `control_verbs`, `revocations`: the control socket.
//! `absent`: what is not there at the start, and io_uring that is forbidden. `bare`: `spindle bench --bare`.
#![forbid(unsafe_code)]

mod absent;
mod against;
mod bare;
mod cached;
mod closing;
mod cluster;
mod commands;
mod conf;
mod control;
mod control_verbs;
mod descriptors;
mod discovery;
mod drain;
mod examples;
mod full_sockets;
mod initiators;
mod listeners;
mod namespaces;
mod options;
mod populate;
mod remote;
mod remote_absent;
mod remote_cache;
mod remote_stall;
mod restart;
mod revocations;
mod smart;
mod status;
mod unconnected;
mod unread_log;

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use spindle_nvme_initiator::{Buf, Controller, IoQueue, Namespace, Options, Pages, Pool, Ticket, ZoneSpec};
use spindle_tests::loopback::{LONG, target};

const V4: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);
const RAM: &str = "kind = \"ram\"\nsize = \"16MiB\"";
const NULL: &str = "kind = \"null\"\nsize = \"16MiB\"";

fn pool() -> Pool {
    Pool::new(&[ZoneSpec { buffer_bytes: 1 << 20, count: 8 }], Pages::Base).expect("a pool")
}

fn buf(pool: &Pool, bytes: u32, seed: u8) -> Buf {
    let mut buf = pool.take(bytes).expect("a buffer");
    for (at, byte) in (seed..=255).cycle().zip(buf.as_mut_slice().expect("one piece")) {
        *byte = at;
    }
    buf
}

fn done(queue: &mut IoQueue, ticket: Ticket) -> Option<Buf> {
    let completion = queue.wait(ticket, LONG).expect("an answer");
    completion.result.expect("a success");
    completion.buf
}

fn bytes(buf: &Buf) -> Vec<u8> {
    buf.as_slice().expect("one piece").to_vec()
}

/// Buffers for [`write_round`].
fn round_pool() -> Pool {
    Pool::new(&[ZoneSpec { buffer_bytes: 8192, count: 80 }], Pages::Base).expect("a pool")
}

/// 64 writes of 8 KiB of the round's number, each 16 blocks after the one before; none is waited for.
fn write_round(queue: &mut IoQueue, namespace: &Namespace, pool: &Pool, round: u8) -> Vec<Ticket> {
    let write = |at: u64| {
        let mut buf = pool.take(8192).expect("a buffer");
        buf.as_mut_slice().expect("one piece").fill(round);
        queue.write(namespace, at * 16, buf, true).expect("taken")
    };
    (0..64).map(write).collect()
}

/// A controller of the subsystem, and one I/O queue.
fn connect(address: SocketAddr) -> (Controller, IoQueue) {
    let mut controller = Controller::connect(&target(address), &Options::default()).expect("connects");
    let queue = controller.connect_queue(1).expect("a queue");
    (controller, queue)
}
