//! Completions as they come, and waiting for one of them.

use std::time::Duration;

use spindle_nvme_initiator::nvme_spec::IoOpcode;
use spindle_nvme_initiator::{Clock, Controller, IoQueue, Namespace, WaitError};

use super::fake::{Act, Fake, LONG, Script, any, filled, options, pool};

fn queue(script: Script) -> (Fake, Controller, IoQueue, Namespace) {
    let fake = Fake::with(script);
    let mut controller = Controller::connect(&fake.target(), &options()).expect("connects");
    let namespace = controller.namespace(1).expect("a namespace");
    let queue = controller.connect_queue(1).expect("a queue");
    (fake, controller, queue, namespace)
}

/// Reads of odd addresses are answered after the next command.
fn late() -> Script {
    Box::new(|sqe, qid| {
        let is_odd_read =
            qid > 0 && !sqe.is_fabrics() && sqe.io_opcode() == IoOpcode::READ && sqe.slba() % 2 == 1;
        if is_odd_read { Act::Late } else { Act::Execute }
    })
}

#[test]
fn any_gives_completions_as_they_come() {
    let (_fake, _controller, mut queue, namespace) = queue(late());
    let pool = pool();
    let mut read = |lba| queue.read(&namespace, lba, filled(&pool, 512, 0)).expect("taken");
    let tickets = [read(1), read(2), read(3), read(4)];
    let come: Vec<usize> = (0..4)
        .map(|_| any(&mut queue).ticket)
        .map(|ticket| tickets.iter().position(|other| *other == ticket).expect("ours"))
        .collect();
    assert_eq!(come, [1, 0, 3, 2]);
    assert_eq!(queue.outstanding(), 0);
}

#[test]
fn one_waits_for_its_command_and_leaves_the_others() {
    let (_fake, _controller, mut queue, namespace) = queue(late());
    let pool = pool();
    let mut read = |lba| queue.read(&namespace, lba, filled(&pool, 512, 0)).expect("taken");
    let (late, early, last) = (read(1), read(2), read(4));
    assert_eq!(queue.wait(last, LONG).expect("a completion").ticket, last);
    assert_eq!(queue.outstanding(), 0);
    assert_eq!(queue.wait(last, LONG).err(), Some(WaitError::Nothing), "a completion is taken once");
    let others: Vec<_> =
        std::iter::from_fn(|| queue.next_completion()).map(|completion| completion.ticket).collect();
    assert_eq!(others, [early, late]);
}

#[test]
fn a_wait_ends_with_its_time_and_the_command_goes_on() {
    let (_fake, _controller, mut queue, namespace) = queue(late());
    let pool = pool();
    let held = queue.read(&namespace, 1, filled(&pool, 512, 0)).expect("taken");
    assert_eq!(
        queue.wait(held, Duration::from_millis(5)).err(),
        Some(WaitError::TimedOut(Duration::from_millis(5)))
    );
    assert_eq!(queue.outstanding(), 1);
    queue.flush(&namespace).expect("taken");
    assert_eq!(queue.wait(held, LONG).expect("a completion").ticket, held);
}

#[test]
fn thousands_of_tickets_taken_one_by_one_leave_nothing_behind() {
    let (_fake, _controller, mut queue, namespace) = queue(Box::new(|_, _| Act::Execute));
    let pool = pool();
    let mut seen = 0;
    for round in 0..300 {
        let tickets: Vec<_> = (0..queue.depth() as u64)
            .map(|lba| queue.read(&namespace, lba, filled(&pool, 512, 0)).expect("taken"))
            .collect();
        // From the last to the first: the order of arrival is never the order of taking.
        for ticket in tickets.into_iter().rev() {
            queue.wait(ticket, LONG).expect("a completion");
            seen += 1;
        }
        assert_eq!((queue.room(), queue.outstanding()), (queue.depth(), 0), "round {round}");
    }
    assert_eq!(seen, 300 * queue.depth());
    assert!(!queue.poll(Clock::now()) && queue.next_completion().is_none());
}
