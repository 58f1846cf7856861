//! Parts of a command's data: their memory at the host, their work requests, and the owner of their buffers.

use nvme_spec::cqe::Cqe;
use nvme_spec::sqe::{KeyedSgl, SglKind};
use nvme_spec::status::Status;
use nvme_spec::zerocopy::IntoBytes;
use nvme_spec::{Sgl, Sqe};
use spindle_nvme_transport::RequestId;
use spindle_nvme_transport::{CloseReason, DataPointer, Reply, Transport};
use spindle_reactor::mem::{Pages, Pool, ZoneSpec};

use super::super::{CAPSULE_BYTES, Capsule, ConnConfig};
use super::*;
use crate::work::Completion;

/// Bytes of a part of a command's data.
const PART: u32 = 4096;

fn pool() -> Pool {
    Pool::new(&[ZoneSpec { buffer_bytes: PART, count: 8 }], Pages::Base).expect("memory")
}

fn part(pool: &Pool, bytes: u32) -> Buf {
    pool.take(bytes).expect("a buffer")
}

fn open(send_queue: u32, reads_max: u32) -> Conn {
    let config =
        ConnConfig { send_queue, reads_max, receives: 4, can_invalidate: true, ..ConnConfig::default() };
    let mut conn = Conn::new(config);
    conn.on_established();
    conn.set_queue_entries(4);
    conn
}

const SLOT: RequestId = RequestId::from_wire(1 << 16 | 1);

/// Receives a command whose data is in `blocks` (bytes of each); block n has key n and its own address.
fn command(conn: &mut Conn, blocks: &[u32]) {
    let list: Vec<u8> = (1..)
        .zip(blocks)
        .flat_map(|(number, bytes)| {
            let sgl = Sgl::keyed(0x10_0000 * u64::from(number), *bytes, number, true);
            let keyed: KeyedSgl = nvme_spec::zerocopy::transmute!(sgl);
            keyed.as_bytes().to_vec()
        })
        .collect();
    let bytes = u32::try_from(list.len()).expect("short");
    let mut sgl = Sgl::in_capsule(bytes);
    sgl.identifier = SglKind::LAST_SEGMENT_OFFSET.0;
    let receives = Pool::new(&[ZoneSpec { buffer_bytes: 4096, count: 1 }], Pages::Base).expect("memory");
    let mut buf = receives.take(CAPSULE_BYTES + 1024).expect("a receive");
    buf.copy_in(64, &list);
    let sqe = Sqe::read(1, 1, 0, 1).with_sgl(sgl);
    conn.received(Capsule { bytes: CAPSULE_BYTES + bytes, sqe, buf: Some(buf) });
    let Some(Event::Command { data, .. }) = conn.next_event() else { panic!("a command") };
    assert_eq!(data, Ok(DataPointer::Host { bytes: blocks.iter().sum() }));
    conn.set_slot(SLOT);
}

fn posted(conn: &mut Conn) -> Vec<Work> {
    std::iter::from_fn(|| conn.next_work()).collect()
}

/// (Key, offset in the key's block, offset in the buffer, bytes, signalled) of transfers.
fn moved(work: &[Work]) -> Vec<(u32, u64, u32, u32, bool)> {
    let one = |work: &Work| match work.op {
        Op::Read { local, remote } | Op::Write { local, remote } => {
            let at = remote.address - 0x10_0000 * u64::from(remote.key);
            (remote.key, at, local.offset, local.bytes, work.is_signalled)
        }
        Op::Send { .. } => panic!("no transfer: {work:?}"),
    };
    work.iter().map(one).collect()
}

fn complete(conn: &mut Conn, work: &Work) {
    let Work { chain, is_signalled, .. } = *work;
    conn.completed(Completion { chain, is_signalled, is_ok: true });
}

fn reply(conn: &mut Conn) {
    let cqe = Cqe::new(1, Status::SUCCESS);
    conn.reply(Reply { slot: SLOT, cqe, data: None, may_omit_cqe: false });
}

fn sent_part(conn: &mut Conn) -> u32 {
    match conn.next_event() {
        Some(Event::SentPart { slot: SLOT, offset, buf }) if !buf.is_empty() => offset,
        other => panic!("{other:?}"),
    }
}

#[test]
fn parts_for_the_host_are_written_in_order_and_the_completion_follows_them() {
    let (pool, mut conn) = (pool(), open(16, 4));
    command(&mut conn, &[3000, 3000, 4000]);
    conn.send_part(SLOT, 1, 0, part(&pool, PART));
    let first = posted(&mut conn);
    assert_eq!(moved(&first), [(1, 0, 0, 3000, false), (2, 0, 3000, 1096, true)]);
    conn.send_part(SLOT, 1, PART, part(&pool, PART));
    let second = posted(&mut conn);
    assert_eq!(moved(&second), [(2, 1096, 0, 1904, false), (3, 0, 1904, 2192, true)]);
    assert_eq!((conn.posted(), pool.free_bytes()), (4, 6 * u64::from(PART)));
    complete(&mut conn, &first[1]);
    assert_eq!((sent_part(&mut conn), conn.posted()), (0, 2));
    conn.send_part(SLOT, 1, 2 * PART, part(&pool, 10_000 - 2 * PART));
    reply(&mut conn);
    let last = posted(&mut conn);
    assert_eq!(moved(&last[..1]), [(3, 2192, 0, 1808, true)]);
    // The descriptors are kept until the reply: it invalidates the first key.
    let Op::Send { invalidate: Some(1), .. } = last[1].op else { panic!("{last:?}") };
    complete(&mut conn, &second[1]);
    complete(&mut conn, &last[0]);
    assert_eq!((sent_part(&mut conn), sent_part(&mut conn)), (PART, 2 * PART));
    complete(&mut conn, &last[1]);
    assert!(matches!(conn.next_event(), Some(Event::Sent { slot: SLOT })));
    assert_eq!((conn.posted(), pool.free_bytes()), (0, 8 * u64::from(PART)));
}

#[test]
fn parts_of_the_hosts_data_are_read_within_the_credits() {
    let (pool, mut conn) = (pool(), open(16, 1));
    command(&mut conn, &[6000, 6000]);
    conn.fetch_part(SLOT, 1, PART, part(&pool, PART));
    conn.fetch_part(SLOT, 1, 0, part(&pool, PART));
    let expected =
        [vec![(1, 4096, 0, 1904, true)], vec![(2, 0, 1904, 2192, true)], vec![(1, 0, 0, 4096, true)]];
    for (index, expected) in expected.iter().enumerate() {
        let work = posted(&mut conn);
        assert_eq!((moved(&work), conn.reads_free()), (expected.clone(), 0));
        complete(&mut conn, &work[0]);
        let told = conn.next_event();
        match (index, &told) {
            (0, None)
            | (1, Some(Event::FetchedPart { slot: SLOT, offset: PART, result: Ok(()), .. }))
            | (2, Some(Event::FetchedPart { slot: SLOT, offset: 0, result: Ok(()), .. })) => {}
            _ => panic!("{index}: {told:?}"),
        }
    }
    assert_eq!((conn.reads_free(), conn.posted()), (1, 0));
    reply(&mut conn);
    let work = posted(&mut conn);
    complete(&mut conn, &work[0]);
    assert!(matches!(conn.next_event(), Some(Event::Sent { slot: SLOT })));
    assert_eq!(pool.free_bytes(), 8 * u64::from(PART));
}

#[test]
fn a_part_of_more_writes_than_the_send_queue_has_places_goes_through() {
    let (pool, mut conn) = (pool(), open(2, 1));
    command(&mut conn, &[1000; 5]);
    conn.send_part(SLOT, 1, 500, part(&pool, PART));
    reply(&mut conn);
    let mut bytes = 0;
    for expected in [vec![false, true], vec![false, true]] {
        let work = posted(&mut conn);
        assert_eq!(work.iter().map(|work| work.is_signalled).collect::<Vec<_>>(), expected);
        bytes += moved(&work).iter().map(|moved| moved.3).sum::<u32>();
        assert!(conn.next_event().is_none(), "the device may still read the buffer");
        complete(&mut conn, &work[1]);
    }
    let work = posted(&mut conn);
    bytes += moved(&work[..1]).iter().map(|moved| moved.3).sum::<u32>();
    assert_eq!((bytes, work.len()), (PART, 2), "the last WRITE, and the completion behind it");
    complete(&mut conn, &work[0]);
    assert_eq!(sent_part(&mut conn), 500);
    complete(&mut conn, &work[1]);
    assert!(matches!(conn.next_event(), Some(Event::Sent { slot: SLOT })));
    assert_eq!(conn.posted(), 0);
}

#[test]
fn a_part_beyond_the_hosts_memory_ends_the_connection() {
    for offset in [5000, 10_000] {
        let (pool, mut conn) = (pool(), open(16, 1));
        command(&mut conn, &[3000, 3000]);
        conn.fetch_part(SLOT, 1, offset, part(&pool, PART));
        assert_eq!(conn.phase(), Phase::Ending);
        assert!(matches!(conn.take_violation(), Some(Violation::TransferBytes { expected: PART, .. })));
        assert_eq!(pool.free_bytes(), 8 * u64::from(PART));
    }
}

#[test]
fn no_buffer_of_a_part_is_given_up_before_the_device_is_through_with_it() {
    for is_fetch in [true, false] {
        for is_lost in [true, false] {
            let (pool, mut conn) = (pool(), open(16, 4));
            command(&mut conn, &[8192]);
            for offset in [0, PART] {
                match is_fetch {
                    true => conn.fetch_part(SLOT, 1, offset, part(&pool, PART)),
                    false => conn.send_part(SLOT, 1, offset, part(&pool, PART)),
                }
            }
            let first = conn.next_work().expect("work");
            let second = conn.next_work().expect("work");
            if is_lost {
                conn.on_disconnected()
            } else {
                conn.close(CloseReason::Shutdown)
            }
            assert_eq!(pool.free_bytes(), 6 * u64::from(PART), "both are with the device");
            complete(&mut conn, &first);
            assert_eq!((pool.free_bytes(), conn.next_event().is_none()), (7 * u64::from(PART), true));
            assert_eq!(conn.phase(), if is_lost { Phase::Ending } else { Phase::Draining });
            complete(&mut conn, &second);
            assert_eq!((conn.phase(), conn.posted()), (Phase::Ending, 0));
            // Buffers that are passed after the end are dropped at once.
            conn.send_part(SLOT, 1, 0, part(&pool, PART));
            conn.fetch_part(SLOT, 1, 0, part(&pool, PART));
            assert_eq!(pool.free_bytes(), 8 * u64::from(PART));
            conn.on_destroyed();
            assert!(matches!(conn.next_event(), Some(Event::Closed)));
        }
    }
}
