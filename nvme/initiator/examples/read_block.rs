//! The initiator as a library: reads the first block of a target's first namespace and prints it in hex (not
//! the lines that repeat the one before). Run: `cargo run --example read_block -- 127.0.0.1:4420 [NQN]`. The
//! address over RDMA: `rdma:10.9.1.1:4420`. Without NQN: that of `spindle serve` without a configuration.
#![forbid(unsafe_code)]

use std::error::Error;
use std::process::ExitCode;
use std::time::Duration;

use spindle_nvme_initiator::nvme_spec::Nqn;
use spindle_nvme_initiator::{
    Controller, Host, NVME_TCP_PORT, Options, Pages, Pool, Target, ZoneSpec, resolve, split_transport,
};

fn main() -> ExitCode {
    let result = run().inspect_err(|error| eprintln!("read_block: {error}"));
    if result.is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn run() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let (address, nqn) = match &arguments[..] {
        [address] => (address, "nqn.2026-01.io.spindle:default"),
        [address, nqn] => (address, nqn.as_str()),
        _ => return Err("usage: read_block [tcp:|rdma:]HOST[:PORT] [NQN]".into()),
    };
    let (transport, address) = split_transport(address);
    let address = *resolve(address, NVME_TCP_PORT)?.first().ok_or("the host has no address")?;
    let target = Target { transport, address, nqn: Nqn::new(nqn)?, host: Host::of_this_machine() };

    let mut controller = Controller::connect(&target, &Options::default())?;
    let nsid = *controller.namespaces()?.first().ok_or("the subsystem has no namespace for this host")?;
    let namespace = controller.namespace(nsid)?;
    let mut queue = controller.connect_queue(1)?;
    println!("{nqn}: namespace {nsid}, {} blocks of {}", namespace.blocks, namespace.block_bytes());

    let block_bytes = namespace.block_bytes();
    let zone = ZoneSpec { buffer_bytes: block_bytes.next_multiple_of(4096), count: 1 };
    let buf = Pool::new(&[zone], Pages::Base)?.take(block_bytes).ok_or("no buffer")?;
    let ticket = queue.read(&namespace, 0, buf)?;
    let completion = queue.wait(ticket, Duration::from_secs(10))?;
    completion.result.map_err(|failure| format!("read: {failure}"))?;
    let buf = completion.buf.ok_or("the read gave no buffer back")?;

    let mut block = vec![0; buf.len()];
    buf.copy_out(0, &mut block);
    let mut before: &[u8] = &[];
    for (at, line) in (0..).step_by(16).zip(block.chunks(16)) {
        if line != before {
            println!("{at:08x} {}", line.iter().map(|byte| format!(" {byte:02x}")).collect::<String>());
        }
        before = line;
    }
    drop(queue);
    Ok(controller.shutdown()?)
}
