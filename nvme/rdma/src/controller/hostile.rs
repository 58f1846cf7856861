//! Tests of invalid capsules: each descriptor type, and each length and offset at its limit.

use nvme_spec::sqe::{Psdt, SglKind};
use nvme_spec::status::Status;
use nvme_spec::zerocopy::IntoBytes;
use nvme_spec::{Sgl, Sqe};
use spindle_nvme_transport::RequestId;
use spindle_nvme_transport::{DataPointer, Event, Transport};
use spindle_reactor::mem::Pool;

use super::*;

/// Maximum in-capsule data of the tested connections, in bytes.
const IN_CAPSULE_BYTES: u32 = 512;

fn pool() -> Pool {
    Pool::of_strides(CAPSULE_BYTES + 1024, 4).expect("memory")
}

fn conn() -> Conn {
    let mut conn = Conn::new(ConnConfig {
        in_capsule_bytes: IN_CAPSULE_BYTES,
        receives: 8,
        can_invalidate: true,
        ..ConnConfig::default()
    });
    conn.on_established();
    conn
}

fn capsule(pool: &Pool, sqe: Sqe, behind: &[u8]) -> Capsule {
    let bytes = CAPSULE_BYTES + u32::try_from(behind.len()).expect("short");
    let mut buf = pool.take(CAPSULE_BYTES + 1024).expect("a receive");
    buf.as_mut_slice().expect("one piece").fill(0xee);
    buf.copy_in(0, sqe.as_bytes());
    buf.copy_in(64, behind);
    Capsule { bytes, sqe, buf: (bytes > CAPSULE_BYTES).then_some(buf) }
}

/// The data pointer parsed from this capsule, and the number of its data blocks.
fn pointer_of_sqe(sqe: Sqe, behind: &[u8]) -> (Result<DataPointer, Status>, usize, Option<u32>) {
    let (pool, mut conn) = (pool(), conn());
    conn.received(capsule(&pool, sqe, behind));
    let Some(Event::Command { data, .. }) = conn.next_event() else { panic!("a command") };
    assert_eq!(conn.phase(), Phase::Open, "the connection goes on");
    let current = conn.current.as_ref().expect("it has no slot yet");
    let known = (data, current.blocks.as_slice().len(), current.invalidate);
    conn.ignore();
    while conn.next_buffer().is_some() {}
    assert_eq!((conn.buffers_held(), pool.free_bytes()), (0, 4 * u64::from(CAPSULE_BYTES + 1024)));
    known
}

fn pointer_of(sgl: Sgl, behind: &[u8]) -> Result<DataPointer, Status> {
    pointer_of_sqe(Sqe::read(1, 1, 0, 1).with_sgl(sgl), behind).0
}

fn of_kind(identifier: u8, address: u64, bytes: u32) -> Sgl {
    Sgl { address: address.into(), length: bytes.into(), reserved: [0; 3], identifier }
}

fn list(offset: u64, bytes: u32) -> Sgl {
    of_kind(SglKind::LAST_SEGMENT_OFFSET.0, offset, bytes)
}

/// The bytes of a descriptor list that follows the submission queue entry.
fn descriptors(of: &[Sgl]) -> Vec<u8> {
    of.iter().flat_map(|sgl| sgl.as_bytes().to_vec()).collect()
}

fn block(index: u32) -> Sgl {
    Sgl::keyed(u64::from(index) << 32, 512, 100 + index, false)
}

/// In both cases the first capsule waits: the connection is not established, or Connect is unanswered.
#[test]
fn more_capsules_than_it_said_it_would_send_end_the_connection_and_hold_no_memory() {
    for is_established in [false, true] {
        let (pool, mut conn) = (pool(), Conn::new(ConnConfig { receives: 2, ..ConnConfig::default() }));
        if is_established {
            conn.on_established();
            conn.received(capsule(&pool, Sqe::keep_alive(1), &[0]));
            assert!(conn.next_event().is_some(), "and no answer");
        }
        // Commands given out without a reply count too; otherwise the limit would double.
        for cid in u16::from(is_established)..2 {
            conn.received(capsule(&pool, Sqe::keep_alive(cid), &[0]));
        }
        assert!(conn.next_event().is_none());
        assert!(matches!(conn.phase(), Phase::Connecting | Phase::Open), "as many as it said");
        conn.received(capsule(&pool, Sqe::keep_alive(9), &[0]));
        assert_eq!(conn.phase(), Phase::Ending);
        assert_eq!(conn.take_violation(), Some(Violation::Capsules { allowed: 2 }));
        let buffers = std::iter::from_fn(|| conn.next_buffer()).count();
        assert_eq!((buffers, conn.buffers_held()), (3, 0), "all back");
    }
}

#[test]
fn a_reply_or_end_without_reply_admits_another_capsule_before_the_send_completes() {
    let config = ConnConfig { receives: 2, ..ConnConfig::default() };
    for is_forgotten in [false, true] {
        let (pool, mut conn) = (pool(), Conn::new(config));
        conn.on_established();
        conn.set_queue_entries(2);
        let slots = [1_u16, 2].map(|index| RequestId::from_wire(1 << 16 | u32::from(index - 1)));
        for (slot, cid) in slots.into_iter().zip(0..) {
            conn.received(capsule(&pool, Sqe::keep_alive(cid), &[0]));
            assert!(conn.next_event().is_some());
            conn.set_slot(slot);
        }
        if is_forgotten {
            conn.end_without_reply(slots[0]);
        } else {
            let cqe = nvme_spec::Cqe::new(0, Status::SUCCESS);
            conn.reply(Reply { slot: slots[0], cqe, data: None, may_omit_cqe: false });
            assert!(conn.next_work().is_some(), "on its way, and not known to have left");
        }
        while conn.next_buffer().is_some() {}
        conn.received(capsule(&pool, Sqe::keep_alive(3), &[0]));
        assert_eq!(conn.phase(), Phase::Open);
        assert_eq!(conn.next_event().is_some(), is_forgotten, "there is room when the answer has left");
        conn.received(capsule(&pool, Sqe::keep_alive(4), &[0]));
        assert_eq!(conn.take_violation(), Some(Violation::Capsules { allowed: 2 }));
    }
}

#[test]
fn a_message_shorter_than_an_entry_ends_the_connection_and_gives_its_buffer_back() {
    for bytes in [0, 1, 63] {
        for has_buffer in [false, true] {
            let (pool, mut conn) = (pool(), conn());
            let mut short = capsule(&pool, Sqe::keep_alive(1), &[0]);
            short.bytes = bytes;
            short.buf.take_if(|_| !has_buffer);
            conn.received(short);
            assert!(conn.next_event().is_none());
            assert_eq!(conn.phase(), Phase::Ending);
            assert_eq!(conn.take_violation(), Some(Violation::CapsuleBytes { bytes }));
            assert_eq!(conn.next_buffer().is_some(), has_buffer);
            assert_eq!(conn.buffers_held(), 0);
        }
    }
}

#[test]
fn an_entry_alone_and_one_byte_more_are_capsules() {
    for behind in [&[][..], &[1]] {
        assert_eq!(pointer_of(Sgl::keyed(0, 512, 7, false), behind), Ok(DataPointer::Host { bytes: 512 }));
    }
    assert_eq!(pointer_of(Sgl::in_capsule(1), &[1]), Ok(DataPointer::InCapsule { bytes: 1 }));
    assert_eq!(pointer_of(Sgl::in_capsule(1), &[]), Err(Status::DATA_SGL_LENGTH_INVALID.dnr()));
}

#[test]
fn every_kind_of_descriptor_that_is_not_of_rdma_fails_its_command_for_good() {
    let behind = descriptors(&[block(0)]);
    for identifier in 0..=255 {
        let told = pointer_of(of_kind(identifier, 0, 16), &behind);
        match SglKind(identifier) {
            SglKind::KEYED_DATA_BLOCK | SglKind::KEYED_DATA_BLOCK_INVALIDATE => {
                assert_eq!(told, Ok(DataPointer::Host { bytes: 16 }));
            }
            SglKind::DATA_BLOCK_OFFSET => assert_eq!(told, Ok(DataPointer::InCapsule { bytes: 16 })),
            SglKind::LAST_SEGMENT_OFFSET => assert_eq!(told, Ok(DataPointer::Host { bytes: 512 })),
            _ => assert_eq!(told, Err(Status::SGL_DESCRIPTOR_TYPE_INVALID.dnr()), "{identifier:#x}"),
        }
    }
    assert_eq!(pointer_of(Sgl::none(), &[]), Ok(DataPointer::None), "no data, all zero");
    let prp = Sqe::read(1, 1, 0, 1).with_sgl(block(0)).with_psdt(Psdt::PRP);
    assert_eq!(pointer_of_sqe(prp, &[]).0, Err(Status::INVALID_FIELD.dnr()));
    let fabrics = Sqe::property_get(1, false, nvme_spec::register::CSTS).with_psdt(Psdt::PRP);
    assert_eq!(pointer_of_sqe(fabrics, &[]).0, Ok(DataPointer::None), "the field is reserved there");
}

#[test]
fn in_capsule_data_begins_at_offset_0_and_ends_with_the_capsule_and_its_room() {
    let data = [5; 1024];
    let room = IN_CAPSULE_BYTES as usize;
    let wrong = Err(Status::DATA_SGL_LENGTH_INVALID.dnr());
    for (bytes, behind, expected) in [
        (0, 0, Ok(DataPointer::None)),
        (0, 100, Ok(DataPointer::None)),
        (99, 100, Ok(DataPointer::InCapsule { bytes: 99 })),
        (100, 100, Ok(DataPointer::InCapsule { bytes: 100 })),
        (101, 100, wrong),
        (IN_CAPSULE_BYTES, room, Ok(DataPointer::InCapsule { bytes: IN_CAPSULE_BYTES })),
        (IN_CAPSULE_BYTES + 1, room + 1, wrong),
        (u32::MAX, room, wrong),
        (1, 0, wrong),
    ] {
        assert_eq!(pointer_of(Sgl::in_capsule(bytes), &data[..behind]), expected, "{bytes} of {behind}");
    }
    for offset in [1, 64, u64::MAX] {
        let sgl = of_kind(SglKind::DATA_BLOCK_OFFSET.0, offset, 16);
        assert_eq!(pointer_of(sgl, &data[..100]), Err(Status::SGL_OFFSET_INVALID.dnr()), "{offset}");
    }
}

#[test]
fn a_key_has_24_bits_of_length_and_no_end_beyond_the_last_address() {
    let most = 0xff_ffff;
    assert_eq!(pointer_of(Sgl::keyed(0, most, 1, false), &[]), Ok(DataPointer::Host { bytes: most }));
    assert_eq!(pointer_of(Sgl::keyed(u64::MAX, 0, 1, true), &[]), Ok(DataPointer::None));
    let last = u64::MAX - 512;
    assert_eq!(pointer_of(Sgl::keyed(last, 512, 1, false), &[]), Ok(DataPointer::Host { bytes: 512 }));
    for (address, bytes) in [(last + 1, 512), (u64::MAX, 1), (u64::MAX, most)] {
        let told = pointer_of(Sgl::keyed(address, bytes, 1, false), &[]);
        assert_eq!(told, Err(Status::DATA_SGL_LENGTH_INVALID.dnr()), "{address:#x} {bytes}");
    }
}

#[test]
fn a_list_lies_in_its_capsule_as_a_whole() {
    let behind = descriptors(&[block(1), block(2), block(3)]);
    let whole = pointer_of_sqe(Sqe::read(1, 1, 0, 3).with_sgl(list(0, 48)), &behind);
    assert_eq!(whole, (Ok(DataPointer::Host { bytes: 1536 }), 3, None));
    assert_eq!(pointer_of(list(16, 32), &behind), Ok(DataPointer::Host { bytes: 1024 }), "the last two");
    assert_eq!(pointer_of(list(32, 16), &behind), Ok(DataPointer::Host { bytes: 512 }));
    for (offset, bytes) in
        [(32, 32), (48, 16), (47, 16), (0, 64), (u64::MAX, 16), (u64::MAX - 15, 16), (1 << 32, 16)]
    {
        let told = pointer_of(list(offset, bytes), &behind[..if offset == 47 { 40 } else { 48 }]);
        assert_eq!(told, Err(Status::SGL_OFFSET_INVALID.dnr()), "{bytes} at {offset}");
    }
    assert_eq!(
        pointer_of(list(0, 48), &behind[..40]),
        Err(Status::SGL_OFFSET_INVALID.dnr()),
        "cut in the middle"
    );
    assert_eq!(pointer_of(list(0, 48), &[]), Err(Status::SGL_OFFSET_INVALID.dnr()), "not there");
    for bytes in [0, 1, 15, 17, 47] {
        let told = pointer_of(list(0, bytes), &behind);
        assert_eq!(told, Err(Status::INVALID_SGL_SEGMENT_DESCRIPTOR.dnr()), "{bytes}");
    }
    // The list exceeds the in-capsule limit, although its bytes were received.
    let long = descriptors(&vec![block(0); 40]);
    assert_eq!(
        pointer_of(list(u64::from(IN_CAPSULE_BYTES) - 8, 16), &long),
        Err(Status::SGL_OFFSET_INVALID.dnr())
    );
}

#[test]
fn sixteen_descriptors_are_taken_and_seventeen_are_not() {
    let behind = descriptors(&(0..17).map(block).collect::<Vec<_>>());
    let most = pointer_of_sqe(Sqe::read(1, 1, 0, 16).with_sgl(list(0, 256)), &behind);
    assert_eq!(most, (Ok(DataPointer::Host { bytes: 16 * 512 }), 16, None));
    let more = pointer_of_sqe(Sqe::read(1, 1, 0, 17).with_sgl(list(0, 272)), &behind);
    assert_eq!((more.0, more.1), (Err(Status::INVALID_SGL_DESCRIPTOR_COUNT.dnr()), 0));
    let longest = descriptors(&vec![Sgl::keyed(0, 0xff_ffff, 1, false); 16]);
    assert_eq!(pointer_of(list(0, 256), &longest), Ok(DataPointer::Host { bytes: 16 * 0xff_ffff }));
}

#[test]
fn a_list_has_keyed_blocks_only_and_a_wrong_one_leaves_none_of_them() {
    for wrong in [Sgl::none(), Sgl::in_capsule(16), list(0, 16), Sgl::transport(512), of_kind(0x43, 0, 16)] {
        let behind = descriptors(&[block(0), wrong]);
        let told = pointer_of_sqe(Sqe::read(1, 1, 0, 2).with_sgl(list(0, 32)), &behind);
        assert_eq!((told.0, told.1), (Err(Status::SGL_DESCRIPTOR_TYPE_INVALID.dnr()), 0), "{wrong:?}");
    }
    let behind = descriptors(&[block(0), Sgl::keyed(u64::MAX, 2, 1, false)]);
    let told = pointer_of_sqe(Sqe::read(1, 1, 0, 2).with_sgl(list(0, 32)), &behind);
    assert_eq!((told.0, told.1), (Err(Status::DATA_SGL_LENGTH_INVALID.dnr()), 0));
}

#[test]
fn of_several_keys_that_are_to_be_invalidated_the_first_is_and_no_other() {
    let asks = |index: u32| Sgl::keyed(0, 512, 100 + index, true);
    for (blocks, key) in [
        (vec![block(0), block(1)], None),
        (vec![block(0), asks(1)], Some(101)),
        (vec![asks(0), asks(1)], Some(100)),
    ] {
        let behind = descriptors(&blocks);
        let told = pointer_of_sqe(Sqe::read(1, 1, 0, 2).with_sgl(list(0, 32)), &behind);
        assert_eq!((told.1, told.2), (2, key));
    }
}
