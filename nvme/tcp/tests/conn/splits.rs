//! However a stream is cut, the same comes of it: the same events, the same bytes sent.

use spindle_nvme_tcp::controller::ConnConfig;
use spindle_nvme_tcp::host::HostConfig;

use crate::rig::{Controller, Host, HostSeen, Seen};
use crate::wire::{self, BOTH, Digests, FLUSH, NONE, OFFSET, READ, Rng, TRANSPORT, WRITE};

/// TTAG of a fresh connection's first R2T, with queues of 128: generation 1, index 0.
const FIRST_TTAG: u16 = 0x80;

/// What a host sends to a connection that is ready: one of each PDU, the last one is `last`.
fn short_controller_stream(digests: Digests, last: &[u8]) -> Vec<u8> {
    let data = wire::pattern(7, 40);
    [
        wire::capsule(wire::sqe(WRITE, 1, OFFSET, 12), &data[..12], digests),
        wire::capsule(wire::sqe(WRITE, 3, TRANSPORT, 40), &[], digests),
        wire::h2c_data(3, FIRST_TTAG, 0, &data[..16], false, digests),
        wire::h2c_data(3, FIRST_TTAG, 16, &data[16..], true, digests),
        last.to_vec(),
    ]
    .concat()
}

fn controller_outcome(digests: Digests, pieces: &[&[u8]]) -> (Vec<Seen>, Vec<u8>) {
    let mut rig = Controller::with_batch(ConnConfig::default(), 1024);
    rig.feed(&wire::icreq(0, digests));
    pieces.iter().for_each(|piece| rig.feed(piece));
    let output = rig.take_output();
    if rig.conn.phase() != spindle_nvme_tcp::Phase::Open {
        rig.finish();
    }
    assert!(rig.has_all_buffers());
    (rig.take_seen(), output)
}

/// Every way to cut it in two and in three, and into single bytes.
fn every_cut<T: PartialEq + std::fmt::Debug>(stream: &[u8], outcome: impl Fn(&[&[u8]]) -> T) {
    let whole = outcome(&[stream]);
    let bytes: Vec<&[u8]> = stream.chunks(1).collect();
    assert_eq!(outcome(&bytes), whole);
    for first in 1..stream.len() {
        let (head, rest) = stream.split_at(first);
        assert_eq!(outcome(&[head, rest]), whole, "cut at {first}");
        for second in 1..rest.len() {
            let (middle, tail) = rest.split_at(second);
            assert_eq!(outcome(&[head, middle, tail]), whole, "cuts at {first} and {}", first + second);
        }
    }
}

#[test]
fn every_cut_of_a_short_stream_gives_a_controller_the_same_events() {
    let flush = wire::capsule(wire::sqe(FLUSH, 4, TRANSPORT, 0), &[], NONE);
    let stream = short_controller_stream(NONE, &flush);
    assert_eq!(controller_outcome(NONE, &[&stream]).0.len(), 5);
    every_cut(&stream, |pieces| controller_outcome(NONE, pieces));
}

#[test]
fn every_cut_of_a_short_stream_with_digests_and_a_violation_gives_the_same_events() {
    let mut stale = wire::h2c_data(3, FIRST_TTAG, 0, &[1; 4], true, BOTH);
    stale.truncate(30);
    let stream = short_controller_stream(BOTH, &stale);
    let (seen, output) = controller_outcome(BOTH, &[&stream]);
    assert_eq!((seen.len(), seen.last()), (5, Some(&Seen::Closed)));
    let term = wire::term_req(3, 1, 10, &stale[..24]);
    assert!(output.ends_with(&term));
    every_cut(&stream, |pieces| controller_outcome(BOTH, pieces));
}

fn host_outcome(digests: Digests, pieces: &[&[u8]]) -> (Vec<HostSeen>, Vec<u8>) {
    let config = HostConfig {
        header_digest: digests.header,
        data_digest: digests.data,
        in_capsule_bytes: 16,
        queue_entries: 8,
        ..HostConfig::default()
    };
    let mut rig = Host::ready(config, 0, 4096);
    rig.read(1, 20);
    rig.write(2, &wire::pattern(2, 24));
    rig.flush(3);
    rig.read(4, 36);
    rig.write(5, &[5; 16]);
    rig.take_output();
    pieces.iter().for_each(|piece| rig.feed(piece));
    let output = rig.take_output();
    if rig.conn.phase() == spindle_nvme_tcp::Phase::Open {
        rig.conn.close();
    }
    rig.conn.on_peer_closed();
    rig.pull();
    rig.expect_closed();
    (rig.take_seen(), output)
}

fn short_host_stream(digests: Digests) -> Vec<u8> {
    let data = wire::pattern(9, 36);
    [
        wire::r2t(2, 0x1234, 0, 24, digests),
        wire::c2h_data(1, 0, &data[..20], 12, digests, 4),
        wire::capsule_resp(3, 2, 0, digests),
        wire::c2h_data(4, 0, &data[..16], 0, digests, 4),
        wire::c2h_data(4, 16, &data[16..], 4, digests, 4),
        wire::capsule_resp(5, 0, 7, digests),
        wire::capsule_resp(4, 0, 0, digests),
    ]
    .concat()
}

#[test]
fn every_cut_of_a_short_stream_gives_a_host_the_same_events() {
    for digests in [NONE, BOTH] {
        let stream = short_host_stream(digests);
        let (seen, output) = host_outcome(digests, &[&stream]);
        assert_eq!(seen.len(), 6, "four completed, one ended by the close, Closed: {seen:?}");
        assert_eq!(output, wire::h2c_data(2, 0x1234, 0, &wire::pattern(2, 24), true, digests));
        every_cut(&stream, |pieces| host_outcome(digests, pieces));
    }
}

#[test]
fn every_cut_of_the_initialization_gives_the_same_events() {
    let stream = [wire::icreq(0, BOTH), vec![4, 1, 72]].concat();
    every_cut(&stream, |pieces| {
        let mut rig = Controller::with_batch(ConnConfig::default(), 1024);
        pieces.iter().for_each(|piece| rig.feed(piece));
        rig.take_output()
    });
    let stream = wire::icresp(0, NONE, 4096);
    every_cut(&stream, |pieces| {
        let mut rig = Host::new(HostConfig { queue_entries: 1, ..HostConfig::default() });
        pieces.iter().for_each(|piece| rig.feed(piece));
        rig.take_seen()
    });
}

/// A long stream of commands with data of all sizes.
fn long_controller_stream(rng: &mut Rng, digests: Digests) -> Vec<u8> {
    let mut stream = Vec::new();
    let mut generation = 1;
    for cid in 0..60 {
        let kind = rng.below(4);
        let bytes = [4, 512, 4096, 8192][rng.below(4)];
        match kind {
            0 => stream.extend(wire::capsule(wire::sqe(READ, cid, TRANSPORT, 4096), &[], digests)),
            1 => {
                let data = wire::pattern(u64::from(cid), bytes);
                let entry = wire::sqe(WRITE, cid, OFFSET, u32::try_from(bytes).unwrap());
                stream.extend(wire::capsule(entry, &data, digests));
            }
            2 => {
                let data = wire::pattern(u64::from(cid), 9 * bytes / 2);
                let entry = wire::sqe(WRITE, cid, TRANSPORT, u32::try_from(data.len()).unwrap());
                stream.extend(wire::capsule(entry, &[], digests));
                let ttag = generation << 7;
                generation = if generation == 511 { 1 } else { generation + 1 };
                let cut = (data.len() / 3).next_multiple_of(4);
                stream.extend(wire::h2c_data(cid, ttag, 0, &data[..cut], false, digests));
                let offset = u32::try_from(cut).unwrap();
                stream.extend(wire::h2c_data(cid, ttag, offset, &data[cut..], true, digests));
            }
            _ => stream.extend(wire::capsule(wire::sqe(WRITE, cid, 0x10, 16), &[3; 16], digests)),
        }
    }
    stream
}

fn random_pieces<'a>(rng: &mut Rng, mut stream: &'a [u8]) -> Vec<&'a [u8]> {
    let most = [3, 100, 5000, 40_000][rng.below(4)];
    let mut pieces = Vec::new();
    while !stream.is_empty() {
        let (piece, rest) = stream.split_at((rng.below(most) + 1).min(stream.len()));
        pieces.push(piece);
        stream = rest;
    }
    pieces
}

#[test]
fn random_cuts_of_a_long_stream_give_the_same_events_also_with_direct_receive() {
    for seed in 1..40 {
        let mut rng = Rng(seed);
        let digests = wire::ALL[rng.below(4)];
        let stream = long_controller_stream(&mut rng, digests);
        let outcome = |pieces: &[&[u8]], direct: usize| {
            let mut rig = Controller::ready(ConnConfig::default(), digests);
            for piece in pieces {
                if direct > 0 {
                    rig.feed_direct(piece, direct)
                } else {
                    rig.feed(piece)
                }
                if piece.len() % 3 == 0 {
                    rig.transmit_some(piece.len() * 2);
                }
            }
            let output = rig.take_output();
            assert!(rig.has_all_buffers());
            assert_eq!(rig.sent.len(), 60, "one Sent for each command");
            (rig.take_seen(), output)
        };
        let whole = outcome(&[&stream], 0);
        for _ in 0..4 {
            let pieces = random_pieces(&mut rng, &stream);
            let direct = [0, 1000, 50_000][rng.below(3)];
            assert_eq!(outcome(&pieces, direct), whole, "seed {seed}");
        }
    }
}

#[test]
fn random_cuts_of_a_long_stream_give_a_host_the_same_events() {
    for seed in 1..30 {
        let mut rng = Rng(seed);
        let digests = wire::ALL[rng.below(4)];
        let sizes: Vec<usize> = (0..30).map(|_| 4 * (1 + rng.below(8000))).collect();
        let mut stream = Vec::new();
        for (cid, bytes) in sizes.iter().enumerate() {
            let (cid, data) = (u16::try_from(cid).unwrap(), wire::pattern(cid as u64, *bytes));
            let cut = (rng.below(*bytes) / 4 * 4).max(4).min(bytes - 4);
            let offset = u32::try_from(cut).unwrap();
            if cut > 0 {
                stream.extend(wire::c2h_data(cid, 0, &data[..cut], 0, digests, 4));
            }
            let flags = if rng.one_in(2) { 12 } else { 4 };
            stream.extend(wire::c2h_data(cid, offset, &data[cut..], flags, digests, 4));
            if flags == 4 {
                stream.extend(wire::capsule_resp(cid, 0, 0, digests));
            }
        }
        let outcome = |pieces: &[&[u8]], direct: usize| {
            let config = HostConfig {
                header_digest: digests.header,
                data_digest: digests.data,
                ..HostConfig::default()
            };
            let mut rig = Host::ready(config, 0, 4096);
            for (cid, bytes) in (0..).zip(&sizes) {
                rig.read(cid, u32::try_from(*bytes).unwrap());
            }
            rig.take_output();
            for piece in pieces {
                if direct > 0 { rig.feed_direct(piece, direct) } else { rig.feed(piece) }
            }
            assert!(rig.has_all_buffers());
            rig.take_seen()
        };
        let whole = outcome(&[&stream], 0);
        assert_eq!(whole.len(), 30);
        for (seen, (cid, bytes)) in whole.iter().zip((0..).zip(&sizes)) {
            assert_eq!(*seen, crate::rig::done(cid, Some(wire::pattern(u64::from(cid), *bytes))));
        }
        for _ in 0..4 {
            let pieces = random_pieces(&mut rng, &stream);
            let direct = [0, 1000, 50_000][rng.below(3)];
            assert_eq!(outcome(&pieces, direct), whole, "seed {seed}");
        }
    }
}
