//! Asynchronous events, and what a controller says of itself later.

use std::sync::Arc;
use std::time::{Duration, Instant};

use spindle_nvme_initiator::nvme_spec::AdminOpcode;
use spindle_nvme_initiator::nvme_spec::status::Status;
use spindle_nvme_initiator::{Clock, Controller, ControllerEvent};
use spindle_reactor::net::Waker;

use super::fake::{Act, Disk, Fake, LONG, Script, options};

/// Namespace attributes have changed: a notice.
const CHANGED: u32 = 0x04_0002;
/// No test waits for so long.
const FOR_EVER: Duration = Duration::from_secs(3600);

fn fake(disk: &Disk, script: Script) -> Fake {
    Fake::at("127.0.0.1:0".parse().expect("an address"), disk.clone(), script)
}

/// The bits of the next event.
fn next(controller: &mut Controller) -> u32 {
    let end = Instant::now() + LONG;
    let waker = Waker::new().expect("an eventfd");
    loop {
        match controller.poll(Clock::now()) {
            Some(ControllerEvent::Async(event)) => return event.into_bits(),
            Some(other) => panic!("{other:?}"),
            None => controller.wait(Duration::from_millis(20), &waker),
        }
        assert!(Instant::now() < end, "nothing is told");
    }
}

#[test]
fn an_event_ends_the_wait_for_it() {
    let disk = Disk::new();
    let fake = fake(&disk, Box::new(|_, _| Act::Execute));
    let mut controller = Controller::connect(&fake.target(), &options()).expect("connects");
    let waker = Waker::new().expect("an eventfd");
    let events = Arc::clone(&disk.events);
    let teller = std::thread::spawn(move || events.lock().expect("lock").push(CHANGED));
    let event = loop {
        match controller.poll(Clock::now()) {
            Some(event) => break event,
            None => controller.wait(FOR_EVER, &waker),
        }
    };
    assert!(matches!(event, ControllerEvent::Async(event) if event.into_bits() == CHANGED), "{event:?}");
    teller.join().expect("no panic");
}

#[test]
fn a_waker_ends_the_wait_and_is_lowered() {
    let fake = Fake::start();
    let mut controller = Controller::connect(&fake.target(), &options()).expect("connects");
    let waker = Waker::new().expect("an eventfd");
    let raised = waker.clone();
    let raiser = std::thread::spawn(move || raised.wake());
    controller.wait(FOR_EVER, &waker);
    raiser.join().expect("no panic");
    waker.wake();
    waker.wait(FOR_EVER);
    assert!(!waker.drain());
}

#[test]
fn an_event_request_that_is_refused_is_made_again() {
    let disk = Disk::new();
    disk.events.lock().expect("lock").push(CHANGED);
    let mut is_first = true;
    let script = move |sqe: &spindle_nvme_initiator::nvme_spec::Sqe, qid| {
        let is_request = qid == 0 && sqe.admin_opcode() == AdminOpcode::ASYNC_EVENT_REQUEST;
        if is_request && std::mem::take(&mut is_first) {
            return Act::Fail(Status::INTERNAL_ERROR);
        }
        Act::Execute
    };
    let fake = fake(&disk, Box::new(script));
    let mut controller = Controller::connect(&fake.target(), &options()).expect("connects");
    assert_eq!(next(&mut controller), CHANGED);
    disk.events.lock().expect("lock").push(CHANGED);
    assert_eq!(next(&mut controller), CHANGED, "the next one too");
}

#[test]
fn what_a_controller_says_of_itself_is_asked_again() {
    let disk = Disk::new();
    *disk.vwc_and_sn.lock().expect("lock") = (0, b'1');
    let fake = fake(&disk, Box::new(|_, _| Act::Execute));
    let mut controller = Controller::connect(&fake.target(), &options()).expect("connects");
    let before = controller.namespace(1).expect("a namespace");
    *disk.vwc_and_sn.lock().expect("lock") = (1, b'2');
    controller.refresh_identify().expect("answered");
    assert_eq!(controller.identify().vwc, 1);
    assert!(!controller.namespace(1).expect("a namespace").is_same_disk(&before));
}
