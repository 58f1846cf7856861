//! Queues and doorbells.

use nvme_spec::pcie::{cq_head_doorbell, sq_tail_doorbell};
use nvme_spec::{Sqe, Status};

use super::{Host, pair};
use crate::EmulatorSpec;

fn flush() -> Sqe {
    Sqe::flush(0, 1).with_prp(0, 0)
}

#[test]
fn queues_go_round_and_the_phase_tag_turns_with_them() {
    for entries in [2, 3, 7, 64] {
        let mut host = Host::new(EmulatorSpec::default());
        host.make_pair(1, entries);
        for count in 0..entries * 5 {
            let cid = host.submit(1, flush());
            host.emulator.step();
            let cqe = host.poll(1).expect("completed");
            assert_eq!((cqe.cid(), u32::from(cqe.sq_head())), (cid, (count + 1) % entries), "{entries}");
            assert_eq!(cqe.phase(), count / entries % 2 == 0, "{entries}, {count}");
        }
        host.assert_clean();
    }
}

#[test]
fn a_full_queue_is_served_in_order_as_many_commands_a_step_as_are_set() {
    let mut host = Host::with_io(EmulatorSpec { commands_a_step: 20, ..EmulatorSpec::default() });
    let cids: Vec<u16> = (0..63).map(|_| host.submit(1, flush())).collect();
    let mut found = Vec::new();
    for served in [20, 40, 60, 63, 63] {
        host.emulator.step();
        found.extend(std::iter::from_fn(|| host.poll(1)).map(|cqe| cqe.cid()));
        assert_eq!(found.len(), served);
    }
    assert_eq!(found, cids);
    assert!(!host.emulator.step());
}

#[test]
fn a_full_completion_queue_holds_commands_back_until_it_is_released() {
    let mut host = Host::new(EmulatorSpec::default());
    let (sq, cq) = (host.sq_iova(1), host.cq_iova(1));
    assert_eq!(host.admin(Sqe::create_io_cq(0, 1, 3, cq)).status(), Status::SUCCESS);
    assert_eq!(host.admin(Sqe::create_io_sq(0, 1, 63, sq, 1)).status(), Status::SUCCESS);
    host.take_pair(pair(1, 1, 64, 4));
    host.pair(1).releases = false;
    let cids: Vec<u16> = (0..50).map(|_| host.submit(1, flush())).collect();
    let mut found = Vec::new();
    for round in 1..100 {
        host.emulator.steps(3);
        assert!(host.emulator.counters().commands <= 3 * round, "three entries are free at most");
        found.extend(std::iter::from_fn(|| host.poll(1)).map(|cqe| cqe.cid()));
        let head = host.pair(1).head;
        host.ring_head(1, head);
        if found.len() == 50 {
            break;
        }
    }
    assert_eq!(found, cids);
    host.assert_clean();
}

#[test]
fn two_submission_queues_may_complete_to_one_queue() {
    let mut host = Host::with_io(EmulatorSpec::default());
    assert_eq!(host.admin(Sqe::create_io_sq(0, 2, 7, host.sq_iova(2), 1)).status(), Status::SUCCESS);
    host.pairs[2] = Some(pair(2, 1, 8, 64));
    host.submit(2, flush());
    host.submit(1, flush());
    host.emulator.step();
    let ids: Vec<u16> = std::iter::from_fn(|| host.poll(1)).map(|cqe| cqe.sq_id.get()).collect();
    assert_eq!(ids, [1, 2]);
    let deleted = host.admin(Sqe::delete_io_sq(0, 1)).status();
    assert_eq!(deleted, Status::SUCCESS);
    let refused = host.admin(Sqe::delete_io_cq(0, 1)).status();
    assert_eq!(refused, Status::INVALID_QUEUE_DELETION.dnr());
    assert_eq!(host.admin(Sqe::delete_io_sq(0, 2)).status(), Status::SUCCESS);
    assert_eq!(host.admin(Sqe::delete_io_cq(0, 1)).status(), Status::SUCCESS);
    host.emulator.steps(130);
    host.assert_clean();
}

#[test]
fn a_deleted_queue_may_be_made_again_and_begins_at_its_beginning() {
    let mut host = Host::with_io(EmulatorSpec::default());
    for _ in 0..3 {
        for _ in 0..5 {
            assert_eq!(host.io(flush()), Status::SUCCESS);
        }
        assert_eq!(host.admin(Sqe::delete_io_sq(0, 1)).status(), Status::SUCCESS);
        assert_eq!(host.admin(Sqe::delete_io_cq(0, 1)).status(), Status::SUCCESS);
        host.make_pair(1, 64);
    }
    host.assert_clean();
}

/// Pages of the doorbell buffer, in the host's data.
const SHADOW: usize = 0x30_0000;
const EVENTS: usize = 0x30_1000;

/// A host with a doorbell buffer, and one queue pair of so many entries made after it.
fn shadowed(sq_entries: u32, cq_entries: u32, dstrd: u8) -> Host {
    let spec = EmulatorSpec { has_doorbell_buffer: true, dstrd, ..EmulatorSpec::default() };
    let mut host = Host::new(spec);
    let (shadow, events) = (host.at(SHADOW as u64), host.at(EVENTS as u64));
    assert_eq!(host.admin(Sqe::doorbell_buffer_config(0, shadow, events)).status(), Status::SUCCESS);
    let (sq_z, cq_z) = ((sq_entries - 1) as u16, (cq_entries - 1) as u16);
    let (sq, cq) = (host.sq_iova(1), host.cq_iova(1));
    assert_eq!(host.admin(Sqe::create_io_cq(0, 1, cq_z, cq)).status(), Status::SUCCESS);
    assert_eq!(host.admin(Sqe::create_io_sq(0, 1, sq_z, sq, 1)).status(), Status::SUCCESS);
    host.take_pair(pair(1, 1, sq_entries, cq_entries));
    host.pair(1).releases = false;
    host
}

fn word(host: &Host, base: usize, doorbell: u64) -> u32 {
    let bytes = host.get(base + (doorbell - 0x1000) as usize, 4);
    u32::from_le_bytes(bytes.try_into().expect("4 bytes"))
}

/// Set a shadow doorbell, and ring where the event index says so; whether it did.
fn set_shadow(host: &Host, doorbell: u64, old: u32, new: u32) -> bool {
    host.put(SHADOW + (doorbell - 0x1000) as usize, &new.to_le_bytes());
    let event = word(host, EVENTS, doorbell);
    let is_due =
        (new as u16).wrapping_sub(event as u16).wrapping_sub(1) < (new as u16).wrapping_sub(old as u16);
    if is_due {
        host.bar.write32(doorbell, new);
    }
    is_due
}

#[test]
fn shadow_doorbells_are_read_while_there_is_work_and_rung_when_there_is_none() {
    for dstrd in [0, 3] {
        let mut host = shadowed(16, 16, dstrd);
        let (sq, cq) = (sq_tail_doorbell(1, dstrd), cq_head_doorbell(1, dstrd));
        // The first entry has to be rung: the event index is 0.
        host.put_entry(1, &flush());
        host.put(SHADOW + (sq - 0x1000) as usize, &1_u32.to_le_bytes());
        host.emulator.steps(5);
        assert_eq!(host.emulator.counters().commands, 0, "asleep");
        // Three more, and one ring for all; what it says is not what counts.
        (0..3).for_each(|_| host.put_entry(1, &flush()));
        host.put(SHADOW + (sq - 0x1000) as usize, &4_u32.to_le_bytes());
        host.bar.write32(sq, 1);
        host.emulator.step();
        assert_eq!(host.emulator.counters().commands, 4);
        assert_eq!(word(&host, EVENTS, sq), 4, "to be rung at the fifth");
        // Round and round, with rings only where they are due.
        let (mut rings, mut done, mut head) = (0, 0, 0);
        for _ in 0..200 {
            let old = host.pair(1).tail;
            (0..3).for_each(|_| host.put_entry(1, &flush()));
            let new = host.pair(1).tail;
            rings += u32::from(set_shadow(&host, sq, old, new));
            host.emulator.step();
            done += std::iter::from_fn(|| host.poll(1)).count();
            let new = host.pair(1).head;
            set_shadow(&host, cq, head, new);
            head = new;
        }
        assert_eq!(done, 604);
        assert_eq!(rings, 200, "each found it asleep");
        assert_eq!(host.emulator.counters().errors, 0);
        host.assert_clean();
    }
}

#[test]
fn a_controller_at_work_needs_no_ring() {
    let mut host = shadowed(64, 64, 0);
    let sq = sq_tail_doorbell(1, 0);
    // More than a step takes: it stays awake.
    (0..40).for_each(|_| host.put_entry(1, &flush()));
    assert!(set_shadow(&host, sq, 0, 40));
    host.emulator.step();
    assert_eq!(host.emulator.counters().commands, 32);
    (0..3).for_each(|_| host.put_entry(1, &flush()));
    assert!(!set_shadow(&host, sq, 40, 43), "the event index is far behind");
    host.emulator.step();
    assert_eq!(host.emulator.counters().commands, 43);
    host.assert_clean();
}

#[test]
fn a_full_completion_queue_asks_to_be_rung_by_its_event_index() {
    let mut host = shadowed(64, 4, 0);
    let (sq, cq) = (sq_tail_doorbell(1, 0), cq_head_doorbell(1, 0));
    (0..40).for_each(|_| host.put_entry(1, &flush()));
    assert!(set_shadow(&host, sq, 0, 40));
    let (mut done, mut head, mut rings) = (0, 0, 0);
    for _ in 0..100 {
        host.emulator.steps(3);
        done += std::iter::from_fn(|| host.poll(1)).count();
        let new = host.pair(1).head;
        if new != head {
            rings += u32::from(set_shadow(&host, cq, head, new));
            head = new;
        }
    }
    assert_eq!(done, 40);
    assert!(rings >= 10, "{rings} rings");
    host.assert_clean();
}

#[test]
fn a_full_completion_queue_is_looked_at_again_only_when_it_is_rung() {
    let mut host = shadowed(64, 4, 0);
    let (sq, cq) = (sq_tail_doorbell(1, 0), cq_head_doorbell(1, 0));
    (0..20).for_each(|_| host.put_entry(1, &flush()));
    assert!(set_shadow(&host, sq, 0, 20));
    host.emulator.steps(5);
    assert_eq!(host.emulator.counters().commands, 3);
    assert_eq!(word(&host, EVENTS, cq), 0, "to be rung at the first that is released");
    host.put(SHADOW + (cq - 0x1000) as usize, &2_u32.to_le_bytes());
    host.emulator.steps(5);
    assert_eq!(host.emulator.counters().commands, 3, "not rung");
    host.bar.write32(cq, 2);
    host.emulator.steps(5);
    assert_eq!(host.emulator.counters().commands, 5);
    assert_eq!(word(&host, EVENTS, cq), 2);
    host.assert_clean();
}

#[test]
fn a_doorbell_buffer_is_configured_with_pages_and_forgotten_with_the_reset() {
    let mut host = shadowed(16, 16, 0);
    let (page, invalid) = (host.at(0), Status::INVALID_FIELD.dnr());
    assert_eq!(host.admin(Sqe::doorbell_buffer_config(0, page + 8, page)).status(), invalid);
    assert_eq!(host.admin(Sqe::doorbell_buffer_config(0, page, page + 2048)).status(), invalid);
    host.disable();
    host.enable();
    host.make_pair(1, 16);
    assert_eq!(host.io(flush()), Status::SUCCESS, "by the doorbell alone");
    // A queue that is there already.
    let (shadow, events) = (host.at(SHADOW as u64), host.at(EVENTS as u64));
    host.put(SHADOW, &[0; 4096]);
    host.put(EVENTS, &[0; 4096]);
    assert_eq!(host.admin(Sqe::doorbell_buffer_config(0, shadow, events)).status(), Status::SUCCESS);
    assert_eq!(word(&host, EVENTS, sq_tail_doorbell(1, 0)), 1);
    host.put_entry(1, &flush());
    assert!(set_shadow(&host, sq_tail_doorbell(1, 0), 1, 2));
    host.emulator.step();
    assert!(host.poll(1).is_some());
    host.assert_clean();
    let mut host = Host::new(EmulatorSpec::default());
    let config = Sqe::doorbell_buffer_config(0, host.at(0), host.at(4096));
    assert_eq!(host.admin(config).status(), Status::INVALID_OPCODE.dnr());
}
