//! Connections that end, and what becomes of commands.

use std::time::Duration;

use spindle_nvme_initiator::nvme_spec::IoOpcode;
use spindle_nvme_initiator::{Clock, Controller, Failure, Loss, Namespace, Nanos, Options, Refusal};

use super::fake::{Act, Disk, Fake, LONG, Script, filled, options, pool};

fn is_write(sqe: &spindle_nvme_initiator::nvme_spec::Sqe, qid: u16) -> bool {
    qid > 0 && !sqe.is_fabrics() && sqe.io_opcode() == IoOpcode::WRITE
}

/// Closes an I/O queue's connection at its first write, once.
fn hangup_once() -> Script {
    let mut has_hung_up = false;
    Box::new(move |sqe, qid| {
        if is_write(sqe, qid) && !has_hung_up {
            has_hung_up = true;
            return Act::Hangup;
        }
        Act::Execute
    })
}

#[test]
fn what_is_outstanding_when_a_connection_ends_is_lost_with_its_buffer() {
    let fake = Fake::with(hangup_once());
    let mut controller = Controller::connect(&fake.target(), &options()).expect("connects");
    let namespace = controller.namespace(1).expect("a namespace");
    let mut queue = controller.connect_queue(1).expect("a queue");
    let pool = pool();
    let free = pool.free_bytes();
    let tickets = [
        queue.write(&namespace, 0, filled(&pool, 512, 1), false).expect("taken"),
        queue.write(&namespace, 8, filled(&pool, 65_536, 2), false).expect("taken"),
        queue.read(&namespace, 0, filled(&pool, 4096, 3)).expect("taken"),
        queue.flush(&namespace).expect("taken"),
    ];
    for (ticket, bytes) in tickets.into_iter().zip([Some(512), Some(65_536), Some(4096), None]) {
        let completion = queue.wait(ticket, LONG).expect("a completion");
        assert_eq!(completion.result, Err(Failure::Lost));
        assert_eq!(completion.buf.map(|buf| buf.len()), bytes);
    }
    assert!(!queue.is_up() && queue.loss().is_some());
    let refused = queue.write(&namespace, 0, filled(&pool, 512, 1), false).expect_err("it is down");
    assert!(refused.why == Refusal::Down && refused.buf.is_some());
    drop(refused);
    assert_eq!(pool.free_bytes(), free, "every buffer is back");
    assert!(controller.is_up(), "only that connection ended");
    let mut queue = controller.connect_queue(1).expect("connects again");
    let ticket = queue.write(&namespace, 0, filled(&pool, 512, 1), false).expect("taken");
    assert_eq!(queue.wait(ticket, LONG).expect("a completion").result, Ok(()));
}

#[test]
fn a_connection_without_completions_is_given_up() {
    let fake = Fake::with(Box::new(|sqe, qid| if is_write(sqe, qid) { Act::Forget } else { Act::Execute }));
    let options = Options { command_timeout: Some(Duration::from_millis(40)), ..options() };
    let mut controller = Controller::connect(&fake.target(), &options).expect("connects");
    let namespace = controller.namespace(1).expect("a namespace");
    let mut queue = controller.connect_queue(1).expect("a queue");
    let ticket = queue.write(&namespace, 0, filled(&pool(), 512, 1), false).expect("taken");
    assert_eq!(queue.wait(ticket, LONG).expect("a completion").result, Err(Failure::Lost));
    assert_eq!(queue.loss(), Some(Loss::Silent(Duration::from_millis(40))));
}

#[test]
fn a_queue_that_we_end_says_so() {
    let fake = Fake::start();
    let mut controller = Controller::connect(&fake.target(), &options()).expect("connects");
    let namespace = controller.namespace(1).expect("a namespace");
    let mut queue = controller.connect_queue(1).expect("a queue");
    let ticket = queue.flush(&namespace).expect("taken");
    queue.abandon();
    assert!(queue.flush(&namespace).is_err());
    let deadline = Clock::now() + Nanos::from(LONG);
    while queue.loss().is_none() && Clock::now() < deadline {
        queue.poll(Clock::now());
    }
    assert_eq!(queue.loss(), Some(Loss::Requested));
    assert_eq!(queue.wait(ticket, LONG).expect("a completion").result, Err(Failure::Lost));
}

fn namespace_of(nguid: u8, uuid: u8) -> Namespace {
    let mut disk = Disk::new();
    (disk.nguid, disk.uuid) = ([nguid; 16], [uuid; 16]);
    let fake = Fake::at("127.0.0.1:0".parse().expect("an address"), disk, Box::new(|_, _| Act::Execute));
    let mut controller = Controller::connect(&fake.target(), &options()).expect("connects");
    controller.namespace(1).expect("a namespace")
}

#[test]
fn the_next_association_finds_the_same_disk_and_no_other() {
    let known_by_nguid = namespace_of(8, 0);
    assert!(known_by_nguid.is_same_disk(&namespace_of(8, 0)));
    assert!(!known_by_nguid.is_same_disk(&namespace_of(9, 0)));
    let known_by_uuid = namespace_of(0, 1);
    assert_eq!(known_by_uuid.identity.uuid, [1; 16]);
    assert!(known_by_uuid.is_same_disk(&namespace_of(0, 1)));
    assert!(!known_by_uuid.is_same_disk(&namespace_of(0, 2)));
    let known_by_nothing = namespace_of(0, 0);
    assert!(!known_by_nothing.is_same_disk(&namespace_of(0, 0)));
}
