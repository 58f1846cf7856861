//! Checks the wrapper on a device: soft-RoCE in the lab's guest, or any other.
//!
//! Both ends are in this process. Prints a line for each check; the exit code says whether all passed.
//!
//! ```text
//! cargo build -p spindle-rdma --example verbs-check
//! scripts/lab/run -- bash -c 'ip link add d0 type dummy; ip addr add 10.9.1.1/24 dev d0
//!   ip addr add fd09::1/64 dev d0 nodad; ip link set d0 mtu 4200 up
//!   modprobe -a rdma_rxe rdma_ucm ib_uverbs; rdma link add rxe0 type rxe netdev d0
//!   build/debug/examples/verbs-check --netdev d0 10.9.1.1 fd09::1'
//! ```
//!
//! The checks of connecting run for each address, all others for the first. With `--netdev` the link is set
//! down and up again.
#![forbid(unsafe_code)]

use std::net::{IpAddr, SocketAddr};
use std::process::{Command, ExitCode};
use std::sync::Arc;
use std::time::{Duration, Instant};

use spindle_rdma::{
    Access, AsyncEvent, CmChannel, CmEventKind, CmId, Device, LIST_BATCH, Operation, Posting, QueuePair,
    SendData, Sge, WcStatus,
};
use spindle_reactor::alloc_count::{CountingAllocator, allocations_here};
use spindle_reactor::mem::{Area, Pages, Pool, ZoneSpec};

/// Returns an error with the given reason unless the condition is true.
macro_rules! ensure {
    ($is_so:expr, $($why:tt)*) => {
        if !$is_so {
            return Err(format!($($why)*).into());
        }
    };
}

mod pair;

use pair::{BUFFER, End, HELLO, Lab, Outcome, PATIENCE, Pair, RESOLVE, Shape, WELCOME};
use pair::{begin, connect, connect_to, event, is_readable, next_event, parameters, resolve};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

fn device(lab: &Lab) -> Outcome {
    let limits = lab.device.limits();
    println!("     {}: {limits:?}", lab.device.name());
    let again = Device::all()?;
    ensure!(again.iter().zip(&lab.devices).all(|(a, b)| Arc::ptr_eq(a, b)), "not the same devices");
    ensure!(lab.device.next_async_event().is_none(), "an unexpected event");
    Ok(())
}

fn connecting(lab: &Lab, address: IpAddr) -> Outcome {
    let Pair { server, client, servers, clients } = connect_to(lab, address, Shape::new(None), None)?;
    ensure!(lab.device.is_of(&client.id), "bound to another device");
    client.id.disconnect()?;
    let told = event(&servers, CmEventKind::Disconnected)?;
    ensure!(told.id == server.id.token(), "of another identifier");
    // The client gets `Disconnected` once the server has answered by its own disconnect.
    server.id.disconnect()?;
    event(&clients, CmEventKind::Disconnected)?;
    Ok(())
}

fn rejecting(lab: &Lab) -> Outcome {
    let (servers, _listener, clients, client) = begin(lab, lab.address, Shape::new(None))?;
    client.id.connect(&parameters(HELLO))?;
    let request = event(&servers, CmEventKind::ConnectRequest)?;
    let reason = [1, 0, 6, 0];
    request.new_id.ok_or("no identifier")?.reject(&reason)?;
    let told = event(&clients, CmEventKind::Rejected)?;
    ensure!(told.private_data.starts_with(&reason), "private data {:?}", told.private_data);
    // Reason 28: rejected by the consumer (InfiniBand).
    ensure!(told.status == 28, "status {}", told.status);
    Ok(())
}

fn refusals(lab: &Lab) -> Outcome {
    // Dropping a request rejects it.
    let (servers, listener, clients, client) = begin(lab, lab.address, Shape::new(None))?;
    client.id.connect(&parameters(HELLO))?;
    drop(event(&servers, CmEventKind::ConnectRequest)?);
    event(&clients, CmEventKind::Rejected)?;
    // The listener is gone.
    let to = listener.local_address().ok_or("no address")?;
    drop((listener, client));
    let client = resolve(lab, &clients, to, Shape::new(None))?;
    client.id.connect(&parameters(&[]))?;
    event(&clients, CmEventKind::Rejected)?;
    // Calls in the wrong order are errors.
    let id = CmId::new(&clients)?;
    let error = id.connect(&parameters(&[])).err().ok_or("connected from nowhere")?;
    ensure!(error.verb == "rdma_connect", "{error}");
    ensure!(id.accept(&parameters(&[])).is_err() && id.reject(&[]).is_err(), "answered without a request");
    ensure!(id.resolve_route(RESOLVE).is_err() && id.disconnect().is_err(), "went nowhere");
    ensure!(id.device(&lab.devices).is_none() && id.local_address().is_none(), "bound to something");
    Ok(())
}

fn migrating(lab: &Lab) -> Outcome {
    let other = CmChannel::new()?;
    let pair = connect_to(lab, lab.address, Shape::new(None), Some(other))?;
    pair.client.id.disconnect()?;
    let told = event(&pair.servers, CmEventKind::Disconnected)?;
    ensure!(told.id == pair.server.id.token(), "of another identifier");
    pair.server.id.disconnect()?;
    // A pending event moves with the identifier.
    event(&pair.clients, CmEventKind::Disconnected)?;
    let third = CmChannel::new()?;
    pair.client.id.migrate(&third)?;
    pair.client.id.migrate(&third)?;
    pair.client.id.migrate(&pair.servers)?;
    Ok(())
}

fn ping(lab: &Lab, posting: Posting, is_shared: bool) -> Outcome {
    let shape = Shape { is_shared, ..Shape::new(Some(posting)) };
    let Pair { mut server, mut client, .. } = connect(lab, shape)?;
    client.receive(1, 0, 64)?;
    server.receive(2, 0, 64)?;
    server.receive(3, 64, 64)?;
    // Inline, then from memory in two segments.
    let mut batch = client.queue.batch();
    batch.add(10, true, Operation::Send, SendData::Inline(&[7; 64]))?;
    batch.submit()?;
    client.completed_well(&[10])?;
    let found = server.completed_well(&[2])?;
    ensure!(found[0].bytes == 64, "{found:?}");
    server.has(0, &[7; 64])?;
    client.fill(1000, b"abcdef");
    let segments = [client.sge(1003, 3), client.sge(1000, 3)];
    let mut batch = client.queue.batch();
    batch.add(11, true, Operation::Send, SendData::Local(&segments))?;
    batch.submit()?;
    client.completed_well(&[11])?;
    ensure!(server.completed_well(&[3])?[0].bytes == 6, "not 6 bytes");
    server.has(64, b"defabc")?;
    // A message of 0 bytes in the other direction.
    let mut batch = server.queue.batch();
    batch.add(12, true, Operation::Send, SendData::Inline(&[]))?;
    batch.submit()?;
    server.completed_well(&[12])?;
    ensure!(client.completed_well(&[1])?[0].bytes == 0, "bytes out of nothing");
    Ok(())
}

fn moving(lab: &Lab, posting: Posting) -> Outcome {
    let Pair { mut server, client, .. } = connect(lab, Shape::new(Some(posting)))?;
    let data: Vec<u8> = (0..16384_u32).map(|index| index.to_le_bytes()[0] ^ 0x5A).collect();
    // WRITE from three segments, READ into four that are in another order.
    server.fill(0, &data);
    let segments = match posting {
        // Soft-RoCE treats all segments as if they were as long as the first.
        Posting::Extended if lab.device.is_soft_roce() => vec![server.sge(0, 8192), server.sge(8192, 8192)],
        Posting::Extended | Posting::List => {
            vec![server.sge(0, 4096), server.sge(4096, 8192), server.sge(12288, 4096)]
        }
    };
    let (remote, key) = (client.base + 8192, client.keys.1);
    let mut batch = server.queue.batch();
    batch.add(20, true, Operation::Write { address: remote, key }, SendData::Local(&segments))?;
    batch.submit()?;
    server.completed_well(&[20])?;
    client.has(8192, &data)?;
    let at = [32768_u32, 40960, 36864, 49152];
    let segments = at.map(|at| server.sge(at, 4096));
    let mut batch = server.queue.batch();
    batch.add(21, true, Operation::Read { address: remote, key }, SendData::Local(&segments))?;
    batch.submit()?;
    ensure!(server.completed_well(&[21])?[0].bytes == 16384, "not 16384 bytes");
    for (at, piece) in at.iter().zip(data.chunks(4096)) {
        server.has(*at as usize, piece)?;
    }
    Ok(())
}

fn chains(lab: &Lab, posting: Posting) -> Outcome {
    let shape = Shape { send_wr: 256, ..Shape::new(Some(posting)) };
    let Pair { mut server, mut client, .. } = connect(lab, shape)?;
    // More requests than a list has entries.
    let count = LIST_BATCH * 2 + 10;
    for round in 0..3_u64 {
        client.receive(round, 0, 64)?;
        let bytes: Vec<u8> =
            (0..count).map(|index| index.to_le_bytes()[0] ^ round.to_le_bytes()[0]).collect();
        server.fill(0, &bytes);
        let pieces: Vec<Sge> = (0..count).map(|index| server.sge(index, 1)).collect();
        let mut batch = server.queue.batch();
        for (address, piece) in (client.base + 4096..).zip(&pieces) {
            batch.add(
                30,
                false,
                Operation::Write { address, key: client.keys.1 },
                SendData::Local(&[*piece]),
            )?;
        }
        batch.add(31 + round, true, Operation::Send, SendData::Inline(b"done"))?;
        batch.submit()?;
        // One completion for all; the data has arrived before the message.
        server.completed_well(&[31 + round])?;
        client.completed_well(&[round])?;
        client.has(4096, &bytes)?;
        client.has(0, b"done")?;
    }
    Ok(())
}

fn discarding(lab: &Lab, posting: Posting) -> Outcome {
    let Pair { mut server, mut client, .. } = connect(lab, Shape::new(Some(posting)))?;
    client.receive(1, 0, 64)?;
    let mut batch = server.queue.batch();
    batch.add(40, true, Operation::Send, SendData::Inline(b"never"))?;
    drop(batch);
    let mut batch = server.queue.batch();
    batch.add(41, true, Operation::Send, SendData::Inline(b"never"))?;
    std::mem::forget(batch);
    server.queue.batch().submit()?;
    let mut batch = server.queue.batch();
    batch.add(42, true, Operation::Send, SendData::Inline(b"this"))?;
    batch.submit()?;
    server.completed_well(&[42])?;
    client.completed_well(&[1])?;
    client.has(0, b"this")
}

/// Posts batches without polling until the send queue is full, which may be larger than requested.
fn overfill(server: &mut End, remote: u64, key: u32) -> Outcome {
    let (segment, room) = (server.sge(0, 8), server.queue.send_wr());
    let mut posted = 0;
    let error = loop {
        let mut batch = server.queue.batch();
        for index in 0..7 {
            batch.add(
                51,
                index == 6,
                Operation::Write { address: remote, key },
                SendData::Local(&[segment]),
            )?;
        }
        match batch.submit() {
            Ok(()) => posted += 7,
            Err(error) => break error,
        }
        ensure!(posted < 10_000, "it takes everything");
    };
    println!("     after {posted}: {error}");
    ensure!(posted + 7 > room, "posted {posted} of {room}");
    server.completed((posted / 7) as usize)?;
    Ok(())
}

fn limits(lab: &Lab, posting: Posting) -> Outcome {
    let Pair { mut server, mut client, .. } = connect(lab, Shape::new(Some(posting)))?;
    let segment = server.sge(0, 8);
    let (remote, key) = (client.base, client.keys.1);
    let (inline_max, room) = (server.queue.inline_bytes() as usize, server.queue.send_wr());
    let mut batch = server.queue.batch();
    ensure!(batch.add(1, true, Operation::Send, SendData::Local(&[segment; 5])).is_err(), "5 segments of 4");
    ensure!(
        batch.add(1, true, Operation::Send, SendData::Inline(&vec![0; inline_max + 1])).is_err(),
        "too many inline bytes"
    );
    for _ in 0..room {
        batch.add(50, false, Operation::Write { address: remote, key }, SendData::Local(&[segment]))?;
    }
    let error = batch
        .add(50, false, Operation::Write { address: remote, key }, SendData::Local(&[segment]))
        .err()
        .ok_or("more than there are")?;
    ensure!(error.errno == rustix::io::Errno::NOMEM.raw_os_error(), "{error}");
    drop(batch);
    // With `ibv_wr_*`, soft-RoCE miscounts a full queue.
    if posting == Posting::List || !lab.device.is_soft_roce() {
        overfill(&mut server, remote, key)?;
    }
    // Receives beyond the limits.
    ensure!(client.queue.post_receive(1, &[client.sge(0, 8); 3]).is_err(), "3 segments of 2");
    let segment = client.sge(0, 8);
    let error = client.queue.post_receives((0..10_000).map(|id| (id, segment)));
    let error = error.err().ok_or("10000 receives of 64")?;
    println!("     {error}");
    ensure!((64..10_000).contains(&error.posted), "{} of 64", error.posted);
    Ok(())
}

fn memory(lab: &Lab) -> Outcome {
    let (device, area) = (&lab.device, lab.pool.area());
    let bytes = area.bytes();
    let both = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
    ensure!(device.register_part(area.clone(), 4096, bytes, both).is_err(), "beyond the area");
    ensure!(device.register_part(area.clone(), usize::MAX, 2, both).is_err(), "around the corner");
    ensure!(device.register(Area::zeroes(), both).is_err(), "the zeroes are not to be written");
    ensure!(device.register(area.clone(), Access::REMOTE_WRITE).is_err(), "remote write alone");
    let part = device.register_part(area.clone(), 4096, 8192, both)?;
    ensure!(part.base() == area.base().as_ptr() as usize + 4096 && part.bytes() == 8192, "{part:?}");
    ensure!(part.sge(part.base() + 8191, 1).is_some() && part.sge(part.base() + 8191, 2).is_none(), "sge");
    drop(part);
    // WRITE from the static zeroes, then with a key whose region is deregistered.
    let zeroes = device.register(Area::zeroes(), Access::LOCAL_READ)?;
    let Pair { mut server, mut client, .. } = connect(lab, Shape::new(None))?;
    client.fill(0, &[9; 4096]);
    let segment = zeroes.sge(zeroes.base(), 4096).ok_or("no zeroes")?;
    let mut batch = server.queue.batch();
    batch.add(
        60,
        true,
        Operation::Write { address: client.base, key: client.keys.1 },
        SendData::Local(&[segment]),
    )?;
    batch.submit()?;
    server.completed_well(&[60])?;
    client.has(0, &[0; 4096])?;
    drop(zeroes);
    let mut batch = server.queue.batch();
    batch.add(
        61,
        false,
        Operation::Write { address: client.base, key: client.keys.1 },
        SendData::Local(&[segment]),
    )?;
    batch.submit()?;
    let found = server.completed(1)?[0];
    // The status of soft-RoCE is "flushed".
    println!("     a key that was taken back: {}", found.status);
    ensure!(!found.is_ok && found.id == 61, "{found:?}");
    Ok(())
}

fn wrong_key(lab: &Lab, posting: Posting) -> Outcome {
    let Pair { mut server, client, .. } = connect(lab, Shape::new(Some(posting)))?;
    let segment = server.sge(0, 8);
    let mut batch = server.queue.batch();
    batch.add(
        70,
        false,
        Operation::Write { address: client.base, key: client.keys.1 ^ 0x0F00 },
        SendData::Local(&[segment]),
    )?;
    batch.add(71, false, Operation::Send, SendData::Inline(b"after"))?;
    batch.submit()?;
    let found = server.completed(2)?;
    let status = found[0].status;
    ensure!(found[0].id == 70 && status == WcStatus::REMOTE_ACCESS, "{status}");
    println!("     {status}");
    ensure!(found[1].id == 71 && found[1].status == WcStatus::FLUSHED, "{}", found[1].status);
    Ok(())
}

/// The peer cannot invalidate the key of a memory region: the attempt ends the connection.
fn invalidate_region(lab: &Lab, posting: Posting) -> Outcome {
    let Pair { mut server, mut client, .. } = connect(lab, Shape::new(Some(posting)))?;
    client.receive(1, 0, 64)?;
    let mut batch = server.queue.batch();
    batch.add(90, true, Operation::SendWithInvalidate { key: client.keys.1 }, SendData::Inline(b"no"))?;
    batch.submit()?;
    let (sent, received) = (server.completed(1)?[0], client.completed(1)?[0]);
    println!("     {posting:?}: sender {}, receiver {}", sent.status, received.status);
    ensure!(!received.is_ok, "a region was invalidated");
    Ok(())
}

fn flushing(lab: &Lab, posting: Posting, is_shared: bool) -> Outcome {
    let shape = Shape { is_shared, ..Shape::new(Some(posting)) };
    let Pair { mut server, client, .. } = connect(lab, shape)?;
    if !is_shared {
        let segment = server.sge(0, 64);
        server.queue.post_receives((0..40).map(|id| (id, segment)))?;
    }
    server.queue.set_error()?;
    let segment = server.sge(0, 64);
    let mut batch = server.queue.batch();
    batch.add(
        100,
        false,
        Operation::Write { address: client.base, key: client.keys.1 },
        SendData::Local(&[segment]),
    )?;
    batch.add(101, false, Operation::Send, SendData::Local(&[segment]))?;
    batch.submit()?;
    let found = server.completed(if is_shared { 2 } else { 42 })?;
    ensure!(found.iter().all(|completion| completion.status == WcStatus::FLUSHED), "{found:?}");
    let sends: Vec<u64> = found.iter().map(|found| found.id).filter(|id| *id >= 100).collect();
    let receives: Vec<u64> = found.iter().map(|found| found.id).filter(|id| *id < 100).collect();
    ensure!(sends == [100, 101] && receives.is_sorted(), "{sends:?} {receives:?}");
    Ok(())
}

fn disconnecting(lab: &Lab) -> Outcome {
    let Pair { mut server, mut client, servers, clients } = connect(lab, Shape::new(None))?;
    client.receive(1, 0, 64)?;
    server.receive(2, 0, 64)?;
    server.id.disconnect()?;
    event(&clients, CmEventKind::Disconnected)?;
    client.id.disconnect()?;
    event(&servers, CmEventKind::Disconnected)?;
    for end in [&mut server, &mut client] {
        let found = end.completed(1)?;
        ensure!(found[0].status == WcStatus::FLUSHED, "{found:?}");
    }
    Ok(())
}

fn waking(lab: &Lab) -> Outcome {
    let Pair { mut server, mut client, .. } = connect(lab, Shape::new(None))?;
    for round in 0..3 {
        client.receive(round, 0, 64)?;
        client.completions.arm()?;
        ensure!(client.completions.poll(|_| ()) == 0, "an unexpected completion");
        ensure!(!is_readable(&client.wake, Duration::ZERO)?, "awake for nothing");
        ensure!(client.wake.take_events(&client.completions) == 0, "an event for nothing");
        let mut batch = server.queue.batch();
        batch.add(9, true, Operation::Send, SendData::Inline(b"wake up"))?;
        batch.submit()?;
        ensure!(is_readable(&client.wake, PATIENCE)?, "slept on");
        ensure!(client.wake.take_events(&server.completions) == 0 || round > 0, "another's event");
        client.wake.take_events(&client.completions);
        ensure!(!is_readable(&client.wake, Duration::ZERO)?, "awake for ever");
        client.completed_well(&[round])?;
        server.completed_well(&[9])?;
    }
    Ok(())
}

fn batches(lab: &Lab) -> Outcome {
    let shape = Shape { is_shared: true, send_wr: 64, ..Shape::new(None) };
    let Pair { mut server, mut client, .. } = connect(lab, shape)?;
    let shared = client.shared.as_ref().ok_or("no shared queue")?;
    let segment = client.sge(0, 64);
    shared.post_all((0..50).map(|id| (id, segment)))?;
    let mut batch = server.queue.batch();
    for id in 0..50 {
        batch.add(id, id == 49, Operation::Send, SendData::Inline(b"one of fifty"))?;
    }
    batch.submit()?;
    server.completed_well(&[49])?;
    // All SENDs were acknowledged, so all have been received.
    let mut found = Vec::new();
    let counts = [(); 3].map(|()| client.completions.poll(|completion| found.push(completion.id)));
    ensure!(counts == [32, 18, 0], "polled {counts:?}");
    ensure!(found == (0..50).collect::<Vec<_>>(), "{found:?}");
    Ok(())
}

/// Posting and polling do not allocate.
fn allocating(lab: &Lab, posting: Posting) -> Outcome {
    let shape = Shape { is_shared: true, ..Shape::new(Some(posting)) };
    let Pair { mut server, mut client, .. } = connect(lab, shape)?;
    let (to, from) = (client.sge(0, 64), server.sge(0, 64));
    let shared = client.shared.as_ref().ok_or("no shared queue")?;
    let before = allocations_here();
    for round in 0..200 {
        shared.post(round, &[to])?;
        client.completions.arm()?;
        let mut batch = server.queue.batch();
        batch.add(
            1,
            false,
            Operation::Write { address: client.base + 4096, key: client.keys.1 },
            SendData::Local(&[from]),
        )?;
        batch.add(
            1,
            false,
            Operation::Read { address: client.base + 8192, key: client.keys.1 },
            SendData::Local(&[from]),
        )?;
        batch.add(2, true, Operation::Send, SendData::Inline(&[1; 16]))?;
        batch.submit()?;
        let begin = Instant::now();
        let (mut sent, mut received) = (0, 0);
        while sent + received < 2 {
            sent += server.completions.poll(|completion| assert!(completion.is_ok));
            received += client.completions.poll(|completion| assert_eq!(completion.id, round));
            ensure!(begin.elapsed() < PATIENCE, "round {round}: sent {sent}, received {received}");
            std::thread::yield_now();
        }
        client.wake.take_events(&client.completions);
    }
    let count = allocations_here() - before;
    ensure!(count == 0, "{count} allocations");
    Ok(())
}

/// One thread takes events and accepts; other threads drop the identifiers and queue pairs.
fn threads(lab: &Lab) -> Outcome {
    const ROUNDS: usize = 20;
    let servers = CmChannel::new()?;
    let listener = CmId::new(&servers)?;
    listener.bind(SocketAddr::new(lab.address, 0))?;
    listener.listen(16)?;
    let to = listener.local_address().ok_or("no address")?;
    let (sender, receiver) = std::sync::mpsc::channel::<(CmId, QueuePair)>();
    let dropper = std::thread::spawn(move || {
        let mut count = 0;
        while let Ok((id, queue)) = receiver.recv() {
            // Fails if the client has disconnected first.
            let _ = id.disconnect();
            if count % 2 == 0 {
                drop((id, queue))
            } else {
                drop((queue, id))
            }
            count += 1;
        }
        count
    });
    for _ in 0..ROUNDS {
        let clients = CmChannel::new()?;
        let client = resolve(lab, &clients, to, Shape::new(None))?;
        client.id.connect(&parameters(HELLO))?;
        let request = loop {
            let event = next_event(&servers)?;
            if event.kind == CmEventKind::ConnectRequest {
                break event;
            }
        };
        let server = End::new(lab, request.new_id.ok_or("no identifier")?, Shape::new(None))?;
        server.id.accept(&parameters(WELCOME))?;
        event(&clients, CmEventKind::Established)?;
        sender.send((server.id, server.queue))?;
        // The server may drop its end before it gets `Established`: that rejects the connection.
        let kind = next_event(&clients)?.kind;
        ensure!([CmEventKind::Disconnected, CmEventKind::Rejected].contains(&kind), "{kind:?}");
    }
    drop(sender);
    let count = dropper.join().map_err(|_| "the thread panicked")?;
    ensure!(count == ROUNDS, "{count} were dropped");
    Ok(())
}

/// Objects may be dropped in any order, and on another thread.
fn dropping(lab: &Lab) -> Outcome {
    let shape = Shape { is_shared: true, ..Shape::new(None) };
    let Pair { server, client, servers, clients } = connect(lab, shape)?;
    let End { id, queue, completions, wake, shared, .. } = server;
    drop((servers, shared, completions, wake, id));
    let thread = std::thread::spawn(move || drop(queue));
    thread.join().map_err(|_| "the thread panicked")?;
    event(&clients, CmEventKind::Disconnected)?;
    drop(clients);
    let End { id, queue, mut completions, .. } = client;
    drop(queue);
    completions.poll(|_| ());
    drop(completions);
    drop(id);
    Ok(())
}

fn link(lab: &Lab) -> Outcome {
    let Some(netdev) = &lab.netdev else { return Err("no --netdev".into()) };
    for (word, expected) in
        [("down", AsyncEvent::PortDown { port: 1 }), ("up", AsyncEvent::PortUp { port: 1 })]
    {
        let status = Command::new("ip").args(["link", "set", netdev, word]).status()?;
        ensure!(status.success(), "ip: {status}");
        let begin = Instant::now();
        loop {
            ensure!(begin.elapsed() < PATIENCE, "no event after {word}");
            is_readable(lab.device.async_fd(), PATIENCE)?;
            match lab.device.next_async_event() {
                Some(event) if event == expected => break,
                Some(other) => println!("     {other:?}"),
                None => {}
            }
        }
    }
    Ok(())
}

type Check<'a> = (String, Box<dyn Fn() -> Outcome + 'a>);

fn checks<'a>(lab: &'a Lab, addresses: &'a [IpAddr]) -> Vec<Check<'a>> {
    let mut list: Vec<Check<'a>> = Vec::new();
    let mut add = |name: &str, check: Box<dyn Fn() -> Outcome + 'a>| list.push((name.to_owned(), check));
    add("device", Box::new(|| device(lab)));
    for address in addresses {
        add(&format!("connect {address}"), Box::new(|| connecting(lab, *address)));
    }
    add("reject", Box::new(|| rejecting(lab)));
    add("refusals", Box::new(|| refusals(lab)));
    add("migrate", Box::new(|| migrating(lab)));
    add("memory", Box::new(|| memory(lab)));
    for posting in [Posting::Extended, Posting::List] {
        add(&format!("ping, own receives, {posting:?}"), Box::new(move || ping(lab, posting, false)));
        add(&format!("ping, shared receives, {posting:?}"), Box::new(move || ping(lab, posting, true)));
        add(&format!("write and read, {posting:?}"), Box::new(move || moving(lab, posting)));
        add(&format!("unsignalled chains, {posting:?}"), Box::new(move || chains(lab, posting)));
        add(&format!("discarded batches, {posting:?}"), Box::new(move || discarding(lab, posting)));
        add(&format!("limits, {posting:?}"), Box::new(move || limits(lab, posting)));
        add(&format!("wrong key, {posting:?}"), Box::new(move || wrong_key(lab, posting)));
        add(&format!("invalidate a region, {posting:?}"), Box::new(move || invalidate_region(lab, posting)));
        add(&format!("flush, own receives, {posting:?}"), Box::new(move || flushing(lab, posting, false)));
        add(&format!("flush, shared receives, {posting:?}"), Box::new(move || flushing(lab, posting, true)));
    }
    add("disconnect", Box::new(|| disconnecting(lab)));
    add("completion channel", Box::new(|| waking(lab)));
    add("poll in batches", Box::new(|| batches(lab)));
    for posting in [Posting::Extended, Posting::List] {
        add(&format!("no allocations, {posting:?}"), Box::new(move || allocating(lab, posting)));
    }
    add("threads", Box::new(|| threads(lab)));
    add("drop in any order", Box::new(|| dropping(lab)));
    if lab.netdev.is_some() {
        add("link down and up", Box::new(|| link(lab)));
    }
    list
}

fn prepare(address: IpAddr, netdev: Option<String>) -> Outcome<Lab> {
    let devices = Device::all()?;
    let device = Arc::clone(devices.first().ok_or("no RDMA device")?);
    let pool = Pool::new(&[ZoneSpec { buffer_bytes: BUFFER, count: 4 }], Pages::Base)?;
    let access = Access::LOCAL_WRITE | Access::REMOTE_READ | Access::REMOTE_WRITE;
    let region = Arc::new(device.register(pool.area(), access)?);
    Ok(Lab { devices, device, pool, region, address, netdev })
}

fn main() -> ExitCode {
    let mut arguments: Vec<String> = std::env::args().skip(1).collect();
    let netdev = match arguments.iter().position(|argument| argument == "--netdev") {
        Some(at) if at + 1 < arguments.len() => arguments.drain(at..at + 2).next_back(),
        _ => None,
    };
    let addresses: Vec<IpAddr> = arguments.iter().filter_map(|argument| argument.parse().ok()).collect();
    if addresses.is_empty() || addresses.len() != arguments.len() {
        eprintln!("usage: verbs-check [--netdev NAME] ADDRESS...");
        return ExitCode::from(2);
    }
    let lab = match prepare(addresses[0], netdev) {
        Ok(lab) => lab,
        Err(error) => {
            eprintln!("{error}");
            return ExitCode::FAILURE;
        }
    };
    let mut failed = 0;
    for (name, check) in checks(&lab, &addresses) {
        match check() {
            Ok(()) => println!("ok   {name}"),
            Err(error) => {
                failed += 1;
                println!("FAIL {name}: {error}");
            }
        }
    }
    println!("{}", if failed == 0 { "all passed".to_owned() } else { format!("{failed} failed") });
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
