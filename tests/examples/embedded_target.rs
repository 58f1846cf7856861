//! A target inside another program: a thread serves a RAM disk on a loopback port, and `main` is its host: it
//! writes a block and reads it back. Run: `cargo run --example embedded_target`. What the reactor of the
//! thread drives, the target's core and the TCP shell, is in `tests/src/embedded.rs`.
#![forbid(unsafe_code)]

use std::error::Error;
use std::sync::{Arc, atomic::AtomicBool};
use std::time::Duration;

use spindle_nvme_initiator::{Controller, Host, Options, Pages, Pool, Target, TransportKind, ZoneSpec};
use spindle_reactor::clock::Nanos;
use spindle_reactor::mailbox::{Mailbox, mesh};
use spindle_reactor::net::Listener;
use spindle_reactor::run::{Idle, Reactor};
use spindle_target::{env::Message, snapshot::Snapshot};
use spindle_target_disk::{RamDisk, RamSpec};
use spindle_tests::{embedded, snapshot::SnapshotBuilder};

const SUBSYSTEM: &str = "nqn.2026-01.io.spindle:embedded";
const TIMEOUT: Duration = Duration::from_secs(10);
const TEXT: &[u8] = b"a block of an embedded target";

/// The target's only core. Returns after [`Message::Shutdown`], when the last connection is gone.
fn serve(listener: Listener, snapshot: Arc<Snapshot>, mailbox: Mailbox<Message>) {
    let mut core = embedded::Core::new(snapshot).expect("the disk opens");
    let mut reactor = Reactor::new(mailbox, Idle::SleepAfter(Nanos::from_us(50))).expect("an epoll");
    let tcp = embedded::Tcp::new(listener, reactor.watcher(0)).expect("the listener is watched");
    reactor.run(&mut core, &mut [Box::new(tcp)], &AtomicBool::new(false));
}

pub(crate) fn main() -> Result<(), Box<dyn Error>> {
    let spec = RamSpec { bytes: 1 << 20, block_bytes: 4096, pages: Pages::Base, has_seals: false };
    let snapshot = SnapshotBuilder::new(SUBSYSTEM, &[RamDisk::new("ram", spec)?]).build();
    let nqn = snapshot.subsystems[0].nqn;
    let listener = Listener::bind("127.0.0.1:0".parse()?, 16)?;
    let (address, transport) = (listener.local_addr(), TransportKind::Tcp);
    let mailbox = mesh(1, 16)?.pop().ok_or("a mesh of one core has one mailbox")?;
    let mail = mailbox.remote();
    let core = std::thread::spawn(move || serve(listener, snapshot, mailbox));

    let target = Target { transport, address, nqn, host: Host::of_this_machine() };
    let mut controller = Controller::connect(&target, &Options::default())?;
    let namespace = controller.namespace(1)?;
    let mut queue = controller.connect_queue(1)?;
    let pool = Pool::new(&[ZoneSpec { buffer_bytes: 4096, count: 1 }], Pages::Base)?;
    let mut block = pool.take(4096).ok_or("no buffer")?;
    block.copy_in(0, TEXT);
    let ticket = queue.write(&namespace, 7, block, false)?;
    let written = queue.wait(ticket, TIMEOUT)?;
    written.result.map_err(|failure| failure.to_string())?;
    let mut block = written.buf.ok_or("a write gives its buffer back")?;
    block.clear();
    let ticket = queue.read(&namespace, 7, block)?;
    let read = queue.wait(ticket, TIMEOUT)?;
    assert!(read.result.is_ok() && read.buf.is_some_and(|block| block.equals_at(0, TEXT)));
    println!("{nqn} at {address}: block 7 was written and read back");
    drop(queue);
    controller.shutdown()?;
    mail.send(0, Message::Shutdown).map_err(|_| "the mailbox is full")?;
    core.join().map_err(|_| "the target's core panicked".into())
}
