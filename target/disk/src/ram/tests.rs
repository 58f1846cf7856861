//! Tests of the RAM disk that need its insides; the model test of all kinds is in `tests/model.rs`.

use spindle_reactor::clock::Nanos;
use spindle_reactor::mem::{Pool, ZoneSpec};

use super::*;

const MIB: u64 = 1 << 20;

fn context() -> ChannelContext {
    let pool = Pool::new(&[ZoneSpec { buffer_bytes: 4096, count: 4 }], Pages::Base).expect("pool");
    ChannelContext { core: 0, pool, depth: 4 }
}

fn disk(bytes: u64, slack_bytes: u64) -> (RamDisk, RamChannel) {
    let spec = RamSpec { bytes, block_bytes: 512, pages: Pages::Base, has_seals: false };
    let source = RamDisk::with_slack("r", spec, slack_bytes).expect("ram disk");
    let core = source.open_core(&context());
    (source, core)
}

fn frames(disk: &mut RamChannel, range: BlockRange) -> Option<Buf> {
    let prepared = disk.prepare(&IoRequest::new(Op::Write { fua: false }, range), None);
    if let Prepared::Fill(buf) = prepared { Some(buf) } else { None }
}

fn write(disk: &mut RamChannel, lba: u64, blocks: u32, fill: u8) {
    let range = BlockRange { lba, blocks };
    let mut buf = frames(disk, range).expect("frames");
    buf.segments_mut().for_each(|segment| segment.fill(fill));
    let done =
        disk.submit(Token(1), &IoRequest::new(Op::Write { fua: false }, range), Some(buf)).expect("at once");
    assert_eq!(done.result, Ok(()));
    assert!(done.buf.is_none(), "the disk keeps the frames");
}

fn reads_as(disk: &mut RamChannel, lba: u64, blocks: u32, fill: u8) -> bool {
    let done =
        disk.submit(Token(2), &IoRequest::new(Op::Read, BlockRange { lba, blocks }), None).expect("at once");
    let buf = done.buf.expect("a pin");
    assert_eq!(buf.len(), blocks as usize * 512);
    buf.segments().all(|segment| segment.iter().all(|byte| *byte == fill))
}

/// Turns until nothing is in flight, bounded; the tokens that ended.
fn drain(disk: &mut RamChannel, turns_max: u32) -> (u32, Vec<u64>) {
    let mut done = Vec::with_capacity(4);
    let mut turns = 0;
    while disk.in_flight() > 0 {
        assert!(turns < turns_max, "not done after {turns} turns");
        assert!(disk.poll(Nanos::ZERO, &mut done));
        turns += 1;
    }
    assert!(done.iter().all(|done| done.result == Ok(())));
    (turns, done.iter().map(|done| done.token.0).collect())
}

#[test]
fn a_long_deallocate_takes_many_turns_and_gives_the_memory_back() {
    let (source, mut disk) = disk(64 * MIB, 4 * MIB);
    for mib in 0..16 {
        write(&mut disk, mib * 2048, 2048, 3);
    }
    assert_eq!(source.usage().bytes_used, 16 * MIB);
    let whole = BlockRange { lba: 0, blocks: 64 * 2048 };
    assert!(disk.submit(Token(5), &IoRequest::new(Op::Deallocate, whole), None).is_none());
    assert_eq!(disk.in_flight(), 1);
    let (turns, ended) = drain(&mut disk, 100);
    // 4096 written pages at 64 a turn, and the rest, which was never written, in few.
    assert!((64..=70).contains(&turns), "{turns}");
    assert_eq!(ended, [5]);
    assert_eq!(source.usage().bytes_used, 0);
    assert!(reads_as(&mut disk, 0, 2048, 0));
}

#[test]
fn an_unwritten_range_passes_at_full_portions() {
    let (_source, mut disk) = disk(256 * MIB, MIB);
    assert!(
        disk.submit(
            Token(5),
            &IoRequest::new(Op::Deallocate, BlockRange { lba: 0, blocks: 256 * 2048 }),
            None
        )
        .is_none()
    );
    let (turns, _) = drain(&mut disk, 100);
    assert_eq!(turns, 65_536 / 8192);
}

#[test]
fn a_short_zeroing_passes_a_long_one() {
    let (_source, mut disk) = disk(64 * MIB, 4 * MIB);
    for mib in 0..8 {
        write(&mut disk, mib * 2048, 2048, 3);
    }
    let op = Op::WriteZeroes { deallocate: false, fua: true };
    assert!(
        disk.submit(Token(1), &IoRequest::new(op, BlockRange { lba: 0, blocks: 64 * 2048 }), None).is_none()
    );
    assert!(disk.submit(Token(2), &IoRequest::new(op, BlockRange { lba: 0, blocks: 2048 }), None).is_none());
    assert!(
        disk.submit(Token(3), &IoRequest::new(op, BlockRange { lba: 1, blocks: 510 }), None).is_some(),
        "a portion: at once"
    );
    let (_, ended) = drain(&mut disk, 100);
    assert_eq!(ended, [2, 1]);
    assert!(reads_as(&mut disk, 0, 2048, 0) && reads_as(&mut disk, 7 * 2048, 2048, 0));
}

#[test]
fn a_long_zeroing_of_a_submitter_that_is_gone_stops() {
    let (_source, mut disk) = disk(64 * MIB, 4 * MIB);
    for mib in 0..16 {
        write(&mut disk, mib * 2048, 2048, 3);
    }
    let whole = BlockRange { lba: 0, blocks: 64 * 2048 };
    let (gone, other) = (Token(7 << 32 | 1), Token(8 << 32 | 1));
    assert!(disk.submit(gone, &IoRequest::new(Op::Deallocate, whole), None).is_none());
    let mut done = Vec::with_capacity(4);
    assert!(disk.poll(Nanos::ZERO, &mut done));
    assert!(
        disk.submit(
            other,
            &IoRequest::new(Op::Deallocate, BlockRange { lba: 15 * 2048, blocks: 2048 }),
            None
        )
        .is_none()
    );
    assert_eq!((disk.cancel_owner(Owner(7)), disk.cancel_owner(Owner(9))), (1, 0));
    while disk.in_flight() > 0 {
        assert!(disk.poll(Nanos::ZERO, &mut done));
    }
    let ended: Vec<_> = done.iter().map(|done| (done.token, done.result)).collect();
    assert_eq!(ended, [(gone, Err(DiskError::Cancelled)), (other, Ok(()))]);
    assert!(reads_as(&mut disk, 0, 8, 0), "it had begun");
    assert!(reads_as(&mut disk, 2048, 14 * 2048, 3), "and went no further");
    assert!(reads_as(&mut disk, 15 * 2048, 2048, 0), "the other one's did");
}

#[test]
fn a_full_list_of_done_stops_the_turn_and_is_not_grown() {
    let (_source, mut disk) = disk(8 * MIB, MIB);
    let range = BlockRange { lba: 0, blocks: 2048 };
    for token in 0..3 {
        assert!(disk.submit(Token(token), &IoRequest::new(Op::Deallocate, range), None).is_none());
    }
    let mut done = Vec::with_capacity(2);
    assert!(disk.poll(Nanos::ZERO, &mut done));
    assert_eq!((done.len(), done.capacity(), disk.in_flight()), (2, 2, 1));
    assert!(disk.poll(Nanos::ZERO, &mut done));
    assert_eq!((done.len(), done.capacity(), disk.in_flight()), (2, 2, 1));
    done.clear();
    assert!(disk.poll(Nanos::ZERO, &mut done));
    assert_eq!((done.len(), disk.in_flight()), (1, 0));
    assert!(!disk.poll(Nanos::ZERO, &mut done));
}

#[test]
fn a_ragged_zeroing_waits_for_a_frame() {
    let (_source, mut disk) = disk(MIB, 0);
    write(&mut disk, 0, 8, 9);
    let mut held: Vec<Buf> =
        std::iter::from_fn(|| frames(&mut disk, BlockRange { lba: 0, blocks: 8 })).collect();
    assert!(
        disk.submit(Token(4), &IoRequest::new(Op::Deallocate, BlockRange { lba: 2, blocks: 3 }), None)
            .is_none()
    );
    let mut done = Vec::with_capacity(1);
    assert!(disk.poll(Nanos::ZERO, &mut done));
    assert!(done.is_empty(), "no frame is free");
    held.pop();
    assert!(disk.poll(Nanos::ZERO, &mut done));
    assert_eq!(done.len(), 1);
    assert!(reads_as(&mut disk, 0, 2, 9) && reads_as(&mut disk, 2, 3, 0) && reads_as(&mut disk, 5, 3, 9));
}

#[test]
fn a_read_keeps_what_it_saw_while_the_page_is_written_and_deallocated() {
    let (_source, mut disk) = disk(MIB, MIB);
    write(&mut disk, 8, 8, 1);
    let range = BlockRange { lba: 8, blocks: 8 };
    let pin = disk
        .submit(Token(0), &IoRequest::new(Op::Read, range), None)
        .and_then(|done| done.buf)
        .expect("a pin");
    write(&mut disk, 8, 8, 2);
    assert!(disk.submit(Token(0), &IoRequest::new(Op::Deallocate, range), None).is_some());
    assert!(pin.equals_at(0, &[1; 4096]));
    assert!(reads_as(&mut disk, 8, 8, 0));
}

#[test]
fn compare_and_write_changes_one_block_or_nothing() {
    let (_source, mut disk) = disk(MIB, MIB);
    write(&mut disk, 0, 16, 1);
    let range = BlockRange { lba: 9, blocks: 1 };
    let expected = Buf::zeroes(512);
    let fresh = |disk: &mut RamChannel| {
        let mut buf = frames(disk, range).expect("frame");
        buf.copy_in(0, &[7; 512]);
        buf
    };
    let data = fresh(&mut disk);
    let done = disk.compare_and_write(Token(3), range, expected, data).expect("at once");
    assert_eq!(done.result, Err(DiskError::CompareDiffers));
    let expected = disk
        .submit(Token(0), &IoRequest::new(Op::Read, range), None)
        .and_then(|done| done.buf)
        .expect("a pin");
    let data = fresh(&mut disk);
    let done = disk.compare_and_write(Token(3), range, expected, data).expect("at once");
    assert_eq!((done.token, done.result), (Token(3), Ok(())));
    assert!(reads_as(&mut disk, 8, 1, 1) && reads_as(&mut disk, 9, 1, 7) && reads_as(&mut disk, 10, 6, 1));
}

#[test]
fn two_cores_see_each_other_and_a_resize_within_the_capacity() {
    let (source, mut first) = disk(MIB, MIB);
    let mut second = source.open_core(&context());
    write(&mut first, 2000, 48, 6);
    assert!(reads_as(&mut second, 2000, 48, 6));
    source.resize(MIB - 1024).expect("shrinks");
    assert_eq!(second.geometry().block_count, 2046);
    source.resize(MIB).expect("grows back");
    assert!(
        reads_as(&mut second, 2000, 46, 6) && reads_as(&mut second, 2046, 2, 0),
        "what was cut off is zero"
    );
    assert_eq!(first.geometry().bytes(), MIB);
    let error = source.resize(2 * MIB).expect_err("beyond the capacity").to_string();
    assert!(error.contains("grows up to the size it was made with, 1048576"), "{error}");
    assert!(source.resize(0).is_err());
}

#[test]
fn a_disk_that_no_machine_has_room_for_is_refused() {
    let spec = RamSpec { bytes: 1 << 60, block_bytes: 4096, pages: Pages::Base, has_seals: false };
    let error = RamDisk::new("big", spec).err().expect("refused").to_string();
    assert!(error.contains("disk \"big\""), "{error}");
}

#[test]
fn a_read_in_place_is_the_data_whatever_is_said_to_come_next() {
    let (_source, mut disk) = disk(MIB, MIB);
    write(&mut disk, 3, 9, 7);
    let last = disk.geometry().block_count - 1;
    for next in [None, Some(0), Some(last), Some(last + 1), Some(u64::MAX)] {
        let range = BlockRange { lba: 2, blocks: 11 };
        let Prepared::Ready(buf) = disk.prepare(&IoRequest::new(Op::Read, range), next) else {
            panic!("at once")
        };
        let mut bytes = vec![1; 11 * 512];
        buf.copy_out(0, &mut bytes);
        assert!(bytes[..512].iter().chain(&bytes[10 * 512..]).all(|byte| *byte == 0));
        assert!(bytes[512..10 * 512].iter().all(|byte| *byte == 7));
    }
    // Pinned: what is written meanwhile goes elsewhere.
    let one = IoRequest::new(Op::Read, BlockRange { lba: 3, blocks: 1 });
    let Prepared::Ready(before) = disk.prepare(&one, None) else { panic!("at once") };
    write(&mut disk, 3, 1, 8);
    let mut bytes = [0; 512];
    before.copy_out(0, &mut bytes);
    assert_eq!(bytes, [7; 512]);
    assert!(reads_as(&mut disk, 3, 1, 8));
}

#[test]
fn the_memory_of_a_disk_that_goes_is_left_to_another_thread() {
    let (disk, core) = disk(1 << 20, 1 << 16);
    let store = Arc::clone(&core.shared.store);
    let before = Arc::strong_count(&store);
    drop(disk);
    // The core's handle will not be the last user.
    assert_eq!(Arc::strong_count(&store), before + 1);
}
