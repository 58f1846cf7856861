//! A ring against plain sockets of the other end.

use std::io::{IoSlice, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use super::{Event, SocketRing};

/// A ring of `count` sockets with `buffers` of `bytes`, and their other ends, which wait.
fn ring(count: usize, buffers: u16, bytes: u32) -> (SocketRing, Vec<UnixStream>) {
    let mut ours = Vec::new();
    let mut theirs = Vec::new();
    for _ in 0..count {
        let (one, other) = UnixStream::pair().expect("a pair");
        other.set_read_timeout(Some(Duration::from_secs(20))).expect("a time-out");
        ours.push(OwnedFd::from(one));
        theirs.push(other);
    }
    (SocketRing::new(ours, buffers, bytes).expect("a ring"), theirs)
}

/// Turns without sends until `is_done` says so of what came.
fn turn_until(
    ring: &mut SocketRing,
    mut take: impl FnMut(usize, Event<'_>),
    mut is_done: impl FnMut() -> bool,
) {
    let begin = Instant::now();
    while !is_done() {
        assert!(begin.elapsed() < Duration::from_secs(20), "nothing more comes");
        ring.sends().submit().expect("a turn");
        ring.poll(&mut take);
    }
}

#[test]
fn what_comes_is_handed_on_in_order_also_when_the_buffers_are_few_and_small() {
    let (mut ring, mut theirs) = ring(3, 2, 100);
    let sent: Vec<u8> = (0..10_000u32).map(|at| (at % 251) as u8).collect();
    let mut came = [const { Vec::new() }; 3];
    for other in &mut theirs {
        other.write_all(&sent).expect("sent");
    }
    let total = std::cell::Cell::new(0);
    let take = |socket: usize, event: Event<'_>| {
        let Event::Bytes(bytes) = event else { panic!("{event:?}") };
        assert!(bytes.len() <= 100);
        came[socket].extend_from_slice(bytes);
        total.set(total.get() + bytes.len());
    };
    turn_until(&mut ring, take, || total.get() == 3 * sent.len());
    assert!(came.iter().all(|came| *came == sent));
}

#[test]
fn a_peer_that_closes_is_told_once_and_the_others_go_on() {
    let (mut ring, mut theirs) = ring(2, 4, 4096);
    drop(theirs.remove(0));
    let closed = std::cell::Cell::new(0);
    let mut take = |socket: usize, event: Event<'_>| {
        let (0, Event::Closed) = (socket, &event) else { panic!("{event:?}") };
        closed.set(closed.get() + 1);
    };
    turn_until(&mut ring, &mut take, || closed.get() == 1);
    for _ in 0..50 {
        ring.sends().submit().expect("a turn");
        ring.poll(&mut take);
    }
    theirs[0].write_all(b"here").expect("sent");
    let mut came = Vec::new();
    let done = std::cell::Cell::new(false);
    turn_until(
        &mut ring,
        |socket, event| {
            let (1, Event::Bytes(bytes)) = (socket, &event) else { panic!("{event:?}") };
            came.extend_from_slice(bytes);
            done.set(came.len() == 4);
        },
        || done.get(),
    );
}

#[test]
fn pieces_are_sent_in_order_and_a_full_socket_takes_a_part() {
    let (mut ring, mut theirs) = ring(1, 2, 4096);
    let piece = |value: u8, bytes: usize| vec![value; bytes];
    let pieces: Vec<Vec<u8>> = (1..=200).map(|value| piece(value, 10_000)).collect();
    let whole = pieces.concat();
    let mut at = 0;
    let mut was_full = false;
    let mut read = Vec::new();
    while at < whole.len() {
        let mut sends = ring.sends();
        // The rest of it, in pieces that do not end where those of the last turn did.
        let slices: Vec<_> = whole[at..].chunks(7_777).map(IoSlice::new).collect();
        sends.push(0, &slices);
        sends.submit().expect("a turn");
        let before = at;
        ring.poll(|socket, event| {
            let (0, Event::Sent(bytes)) = (socket, &event) else { panic!("{event:?}") };
            at += bytes;
        });
        was_full |= at < whole.len();
        let mut part = vec![0; at - before];
        theirs[0].read_exact(&mut part).expect("what was sent");
        read.extend(part);
    }
    assert!(was_full, "the test is to fill the socket");
    assert_eq!(read, whole);
}

#[test]
fn a_send_has_ended_when_it_was_submitted() {
    let (mut ring, mut theirs) = ring(1, 2, 4096);
    {
        let memory = vec![7u8; 1000];
        let mut sends = ring.sends();
        sends.push(0, &[IoSlice::new(&memory)]);
        sends.submit().expect("a turn");
    }
    let mut ended = 0;
    ring.poll(|socket, event| {
        let (0, Event::Sent(1000)) = (socket, &event) else { panic!("{event:?}") };
        ended += 1;
    });
    assert_eq!(ended, 1);
    let mut came = vec![0; 1000];
    theirs[0].read_exact(&mut came).expect("all of it");
    assert!(came.iter().all(|byte| *byte == 7));
}

#[test]
fn a_send_to_a_full_socket_ends_as_well_and_keeps_no_memory() {
    let (mut ring, _theirs) = ring(1, 2, 4096);
    let mut last = usize::MAX;
    // The peer does not read: it is full after a few.
    for _ in 0..1000 {
        let memory = vec![7u8; 100_000];
        let mut sends = ring.sends();
        sends.push(0, &[IoSlice::new(&memory)]);
        sends.submit().expect("a turn");
        let mut ended = 0;
        ring.poll(|socket, event| {
            let (0, Event::Sent(bytes)) = (socket, &event) else { panic!("{event:?}") };
            (last, ended) = (*bytes, ended + 1);
        });
        assert_eq!(ended, 1, "it waits with memory that is gone");
        if last == 0 {
            return;
        }
    }
    panic!("it took {last} bytes and is not full");
}

#[test]
fn of_a_turn_that_was_not_submitted_nothing_is_sent() {
    let (mut ring, mut theirs) = ring(1, 2, 4096);
    let (first, second) = (vec![1u8; 10], vec![2u8; 10]);
    ring.sends().push(0, &[IoSlice::new(&first)]);
    drop(first);
    let mut sends = ring.sends();
    sends.push(0, &[IoSlice::new(&second)]);
    sends.submit().expect("a turn");
    let mut came = [0; 10];
    theirs[0].read_exact(&mut came).expect("what was submitted");
    assert_eq!(came, [2; 10]);
}

#[test]
fn a_send_to_a_peer_that_is_gone_fails_without_a_signal() {
    let (mut ring, theirs) = ring(1, 2, 4096);
    drop(theirs);
    let memory = [0u8; 10];
    let mut sends = ring.sends();
    sends.push(0, &[IoSlice::new(&memory)]);
    sends.submit().expect("a turn");
    let mut failed = false;
    ring.poll(|socket, event| {
        failed |= matches!((socket, event), (0, Event::Failed(rustix::io::Errno::PIPE)))
    });
    assert!(failed);
}

#[test]
fn sizes_that_do_not_go_are_refused() {
    let socket = || vec![OwnedFd::from(UnixStream::pair().expect("a pair").0)];
    for (sockets, buffers, bytes) in [
        (Vec::new(), 2, 4096),
        (socket(), 0, 4096),
        (socket(), 3, 4096),
        (socket(), 2, 0),
        (socket(), 1 << 15, 1),
    ] {
        let error = SocketRing::new(sockets, buffers, bytes).err().expect("refused");
        assert_eq!(error.kind(), std::io::ErrorKind::InvalidInput);
    }
}
