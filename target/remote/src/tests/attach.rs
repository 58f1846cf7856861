//! Optimistic connections of cores' queues: grants, attempts, back-off, counts.

use super::*;
use crate::attach::LONGEST_WAIT;

fn world(cores: usize) -> World {
    script(|script| script.is_optimistic = true);
    World::of(cores, Some(OptimisticOptions::default()), None)
}

impl World {
    /// The core that waits for a grant of association `number` gets one; `None`: no core waits.
    fn grant(&mut self, number: u64) -> Option<usize> {
        let handle = self.control.next_grant(number)?;
        self.control.grant(handle, number, Ok(number));
        self.turn();
        Some(handle)
    }

    fn refuse(&mut self, number: u64) {
        let handle = self.control.next_grant(number).expect("a core waits");
        self.control.grant(handle, number, Err(ConnectError::NoRdma.into()));
        self.turn();
    }

    fn attached(&self) -> u64 {
        self.disk.optimistic_reads().expect("configured").attached
    }

    /// Time until a core wants a grant again.
    fn wait_for_request(&mut self, number: u64) -> Nanos {
        let since = self.now;
        while self.control.next_grant(number).is_none() {
            self.pass(Nanos::from_ms(100));
            assert!(self.now < since + Nanos::from_secs(100), "it is not tried again");
        }
        self.now - since
    }
}

#[test]
fn each_core_attaches_its_queue_while_commands_go_on() {
    let mut world = world(2);
    world.write(0, 1, 8);
    assert_eq!(world.grant(1), Some(0));
    assert_eq!((world.at_far(), world.attached()), (vec![8], 0), "the attempt is not over");
    script(|script| script.attach = Some(true));
    assert_eq!(world.grant(1), Some(1));
    assert_eq!((world.grant(1), world.attached()), (None, 2));
    world.answer(8);
    assert_eq!(world.taken(), [(1, Ok(()))]);
}

#[test]
fn nothing_is_asked_for_without_the_key_or_without_a_far_target_that_has_it() {
    script(|script| script.is_optimistic = true);
    let mut world = World::new(1);
    world.turn();
    assert_eq!((world.control.next_grant(1), world.disk.optimistic_reads()), (None, None));
    script(|script| script.is_optimistic = false);
    let mut world = World::of(1, Some(OptimisticOptions::default()), None);
    world.pass(Nanos::from_secs(100));
    assert_eq!((world.control.next_grant(1), world.attached()), (None, 0));
}

#[test]
fn attempts_that_fail_are_repeated_after_waits_that_grow() {
    let mut world = world(1);
    let mut waits = Vec::new();
    for at in 0..10 {
        if at % 2 == 0 {
            world.refuse(1);
        } else {
            script(|script| script.attach = Some(false));
            world.grant(1).expect("a core waits");
        }
        waits.push(world.wait_for_request(1));
    }
    assert!(waits[0] <= Nanos::from_ms(1200) && waits[2] >= Nanos::from_secs(2), "{waits:?}");
    let longest = Nanos::from(LONGEST_WAIT);
    assert!(waits[9] >= Nanos(longest.0 / 2) && waits[9] <= longest + SECOND, "{waits:?}");
    assert_eq!(world.attached(), 0);
}

#[test]
fn a_connection_that_has_ended_is_made_again_and_the_queue_stays() {
    let mut world = world(1);
    script(|script| script.attach = Some(true));
    world.grant(1).expect("a core waits");
    assert_eq!(world.attached(), 1);
    script(|script| script.has_ended = true);
    world.write(0, 1, 8);
    assert_eq!((world.attached(), world.control.lost()), (0, 0));
    assert_eq!(world.control.next_grant(1), None, "not at once");
    assert!(world.wait_for_request(1) <= Nanos::from_ms(1200));
    script(|script| script.has_ended = false);
    world.grant(1).expect("a core waits");
    assert_eq!((world.attached(), world.at_far()), (1, vec![8]));
}

#[test]
fn queue_loss_ends_the_attach_and_a_grant_of_the_lost_association_is_not_used() {
    let mut world = world(1);
    script(|script| script.attach = Some(true));
    let handle = world.control.next_grant(1).expect("a core waits");
    world.lose(1);
    world.up(2);
    world.control.grant(handle, 1, Ok(1));
    world.turn();
    assert_eq!((world.attached(), world.control.next_grant(1)), (0, None));
    assert!(world.wait_for_request(2) <= Nanos::from_ms(1200));
    world.grant(2).expect("a core waits");
    assert_eq!(world.attached(), 1);
    world.cores.clear();
    assert_eq!(world.attached(), 0);
}

#[test]
fn counts_go_on_over_all_queues_and_cores() {
    let mut world = world(2);
    script(|script| script.attach = Some(true));
    world.grant(1).expect("a core waits");
    world.grant(1).expect("a core waits");
    script(|script| script.counts = OptimisticCounts { accepted: 5, rejected: 2, learned: 9 });
    for core in 0..2 {
        world.submit(core, 1 + core as u64, Op::Read, 8 * core as u64, 8);
        world.answer(8 * core as u64);
    }
    let reads = |world: &World| world.disk.optimistic_reads().expect("configured");
    assert_eq!(reads(&world), OptimisticReads { accepted: 10, rejected: 4, attached: 2 });
    world.lose(1);
    script(|script| script.counts = OptimisticCounts::default());
    world.up(2);
    assert_eq!(reads(&world), OptimisticReads { accepted: 10, rejected: 4, attached: 0 });
    world.wait_for_request(2);
    let core = world.grant(2).expect("a core waits");
    script(|script| script.counts = OptimisticCounts { accepted: 1, rejected: 0, learned: 0 });
    world.submit(core, 3, Op::Read, 0, 8);
    world.answer(0);
    assert_eq!(reads(&world).accepted, 11);
}

#[test]
fn a_command_names_its_place_in_bytes() {
    let mut world = world(1);
    script(|script| script.bytes_max = Some(128 << 10));
    world.submit(0, 1, Op::Read, 8, 8);
    world.submit(0, 2, Op::Read, 100, 400);
    world.answer(100);
    assert_eq!(script(|script| script.offsets.clone()), [8 * 512, 100 * 512, 356 * 512]);
}
