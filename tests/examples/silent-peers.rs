//! Peers of an NVMe/RDMA target that connect their queue pairs and never send Connect: for the lab
//! (`tests/lab/cases/rdma-unconnected.sh`).
//!
//! ```text
//! cargo build --release -p spindle-tests --no-default-features --features peers --example silent-peers
//! scripts/lab/run -- .../silent-peers 10.9.1.1:4420 COUNT
//! ```
//! Prints how many were accepted, and how many refused because the target has no resources. Any other refusal
//! is an error. Accepted connections stay open until standard input ends.
#![forbid(unsafe_code)]

use std::error::Error;
use std::io::Read;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use nvme_spec::rdma::{CmReject, CmRequest, CmStatus};
use nvme_spec::zerocopy::IntoBytes;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use spindle_rdma::{
    CmChannel, CmEvent, CmEventKind, CmId, CompletionQueue, ConnectParams, Device, QueuePair, QueuePairConfig,
};

/// Longest wait for an event.
const EVENT_TIMEOUT: Duration = Duration::from_secs(30);

/// A connected peer. The queue pair is dropped before the objects that it uses.
struct Peer {
    _queue_pair: QueuePair,
    _completions: CompletionQueue,
    id: CmId,
}

/// The next event of `newest`. Peers in `peers` that the target disconnects meanwhile are disconnected here
/// too.
fn event(channel: &CmChannel, newest: &CmId, peers: &[Peer]) -> Result<CmEvent, Box<dyn Error>> {
    loop {
        if let Some(event) = channel.next_event()? {
            if event.id == newest.token() {
                return Ok(event);
            }
            if let Some(peer) = peers.iter().find(|peer| peer.id.token() == event.id) {
                let _ = peer.id.disconnect();
            }
            continue;
        }
        if poll(&mut [PollFd::new(channel, PollFlags::IN)], Some(&Timespec::try_from(EVENT_TIMEOUT)?))? == 0 {
            return Err("the connection manager says nothing".into());
        }
    }
}

fn make_queue_pair(id: &CmId) -> Result<(QueuePair, CompletionQueue, u8), Box<dyn Error>> {
    let devices = Device::all()?;
    let device: &Arc<Device> = id.device(&devices).ok_or("no such device")?;
    let completions = CompletionQueue::new(device, 4, 0, None)?;
    let config = QueuePairConfig {
        cq: &completions,
        domain: None,
        srq: None,
        send_wr: 1,
        recv_wr: 1,
        send_sge: 1,
        recv_sge: 1,
        inline_bytes: 0,
        posting: None,
    };
    let queue_pair = id.create_queue_pair(device, &config)?;
    let reads = device.limits().responder_resources;
    Ok((queue_pair, completions, reads))
}

/// Connects a peer to the target at `to`. `None`: refused for lack of resources.
fn connect(channel: &CmChannel, to: SocketAddr, peers: &[Peer]) -> Result<Option<Peer>, Box<dyn Error>> {
    let id = CmId::new(channel)?;
    id.resolve_address(None, to, EVENT_TIMEOUT)?;
    event(channel, &id, peers)?;
    id.resolve_route(EVENT_TIMEOUT)?;
    event(channel, &id, peers)?;
    let (queue_pair, completions, responder_resources) = make_queue_pair(&id)?;
    let request = CmRequest::new(0, 32, 0);
    let private_data = request.as_bytes();
    id.connect(&ConnectParams { private_data, responder_resources, ..ConnectParams::default() })?;
    let answer = event(channel, &id, peers)?;
    match (answer.kind, CmReject::parse(&answer.private_data)) {
        (CmEventKind::Established, _) => {
            Ok(Some(Peer { _queue_pair: queue_pair, _completions: completions, id }))
        }
        (CmEventKind::Rejected, Some(reject)) if reject.status() == CmStatus::NO_RESOURCES => Ok(None),
        _ => Err(format!("{answer:?}").into()),
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let (Some(to), Some(count), None) = (arguments.next(), arguments.next(), arguments.next()) else {
        return Err("usage: silent-peers ADDRESS:PORT COUNT".into());
    };
    let (to, count): (SocketAddr, usize) = (to.parse()?, count.parse()?);
    let channel = CmChannel::new()?;
    let mut peers = Vec::new();
    let mut refused = 0;
    for _ in 0..count {
        match connect(&channel, to, &peers)? {
            Some(peer) => peers.push(peer),
            None => refused += 1,
        }
    }
    println!("accepted {}, refused {refused}", peers.len());
    std::io::stdin().read_to_end(&mut Vec::new())?;
    Ok(())
}
