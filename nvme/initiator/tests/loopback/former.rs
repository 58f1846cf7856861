//! End Former Associations as hosts use it, and the time that Connect has.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use spindle_nvme_initiator::nvme_spec::fabrics::Connect;
use spindle_nvme_initiator::nvme_spec::status::Status;
use spindle_nvme_initiator::nvme_spec::vendor::END_FORMER_ASSOCIATIONS;
use spindle_nvme_initiator::nvme_spec::{FabricsType, Sqe};
use spindle_nvme_initiator::{
    Clock, Controller, ControllerEvent, Error, Former, Loss, Nanos, Opening, Options,
};

use super::fake::{Act, Disk, Fake, LONG, Script, options, pool};

fn is_end_former(sqe: &Sqe, qid: u16) -> bool {
    qid == 0 && !sqe.is_fabrics() && sqe.admin_opcode() == END_FORMER_ASSOCIATIONS
}

fn fake(is_spindle: bool, former: Option<u32>, script: Script) -> Fake {
    let mut disk = Disk::new();
    (disk.is_spindle, disk.former) = (is_spindle, former);
    Fake::at("127.0.0.1:0".parse().expect("an address"), disk, script)
}

/// Until it is told what came of the command.
fn end_former(controller: &mut Controller, token: u64) -> Result<Former, Loss> {
    controller.begin_end_former_associations(token);
    let deadline = Clock::now() + Nanos::from(LONG);
    loop {
        match controller.poll(Clock::now()) {
            Some(ControllerEvent::Former(former)) => return Ok(former),
            Some(ControllerEvent::Lost(loss)) => return Err(loss),
            Some(ControllerEvent::Async(_)) | None => {}
        }
        assert!(Clock::now() < deadline, "nothing is told");
    }
}

/// What comes of the command at such a target, and how many reach it.
fn ask(is_spindle: bool, former: Option<u32>, act: Act) -> (Result<Former, Loss>, u32) {
    let count = Arc::new(AtomicU32::new(0));
    let counted = Arc::clone(&count);
    let script = move |sqe: &Sqe, qid| {
        if !is_end_former(sqe, qid) {
            return Act::Execute;
        }
        assert_eq!((sqe.cdw10(), sqe.cdw11()), (0x9abc_def0, 0x1234_5678));
        counted.fetch_add(1, Ordering::Relaxed);
        act
    };
    let fake = fake(is_spindle, former, Box::new(script));
    let mut controller = Controller::connect(&fake.target(), &options()).expect("connects");
    let result = end_former(&mut controller, 0x1234_5678_9abc_def0);
    controller.namespaces().expect("the controller goes on");
    (result, count.load(Ordering::Relaxed))
}

#[test]
fn a_target_that_is_no_spindle_is_sent_nothing() {
    let (result, sent) = ask(false, Some(0), Act::Execute);
    assert_eq!((result.expect("no error"), sent), (Former::Unsupported, 0));
}

#[test]
fn end_former_is_unsupported_on_invalid_opcode_and_other_errors_mean_may_land() {
    let (result, sent) = ask(true, None, Act::Execute);
    assert_eq!((result.expect("no loss"), sent), (Former::Unsupported, 1));
    let (result, _) = ask(true, Some(0), Act::Fail(Status::COMMAND_SEQUENCE_ERROR));
    assert_eq!(result.expect("no loss"), Former::MayLand);
}

#[test]
fn the_answer_says_how_many_have_ended_and_whether_something_may_land() {
    assert_eq!(ask(true, Some(0), Act::Execute).0.expect("an answer"), Former::Over { ended: 0 });
    assert_eq!(ask(true, Some(0x0102), Act::Execute).0.expect("an answer"), Former::Over { ended: 0x102 });
    assert_eq!(ask(true, Some(1 << 31 | 3), Act::Execute).0.expect("an answer"), Former::MayLand);
}

#[test]
fn keep_alive_goes_on_while_the_answer_is_waited_for() {
    // It is answered after the next command of the queue, and only keep alive sends one.
    let script = |sqe: &Sqe, qid| if is_end_former(sqe, qid) { Act::Late } else { Act::Execute };
    let fake = fake(true, Some(2), Box::new(script));
    let options = Options { keep_alive_ms: 1500, ..options() };
    let mut controller = Controller::connect(&fake.target(), &options).expect("connects");
    assert_eq!(end_former(&mut controller, 1).expect("an answer"), Former::Over { ended: 2 });
}

#[test]
fn with_a_lost_connection_the_loss_is_told() {
    let script = |sqe: &Sqe, qid| if is_end_former(sqe, qid) { Act::Hangup } else { Act::Execute };
    let leaving = fake(true, Some(0), Box::new(script));
    let mut controller = Controller::connect(&leaving.target(), &options()).expect("connects");
    end_former(&mut controller, 1).expect_err("lost");
}

fn is_connect(sqe: &Sqe) -> bool {
    sqe.is_fabrics() && sqe.fctype() == FabricsType::CONNECT
}

#[test]
fn connect_has_a_time_of_its_own() {
    let silent = Fake::with(Box::new(|sqe, _| if is_connect(sqe) { Act::Forget } else { Act::Execute }));
    let after = Duration::from_millis(80);
    let impatient = Options { connect_answer_timeout: after, ..options() };
    let error = Controller::connect(&silent.target(), &impatient).expect_err("never answered");
    let Error::TimedOut { step: "Connect", after: told } = error else { panic!("{error}") };
    assert_eq!(told, after);
}

#[test]
fn connect_may_take_longer_than_the_other_steps() {
    let count = Arc::new(AtomicU32::new(0));
    let counted = Arc::clone(&count);
    let silent = Fake::with(Box::new(move |sqe, _| {
        if !is_connect(sqe) || Connect::new(sqe).qid() == 0 {
            return Act::Execute;
        }
        counted.fetch_add(1, Ordering::Relaxed);
        Act::Forget
    }));
    let after = Duration::from_secs(60);
    let options = Options { connect_answer_timeout: after, command_timeout: None, ..options() };
    let controller = Controller::connect(&silent.target(), &options).expect("connects");
    // The time is an argument: it stands still until Connect has arrived, and the test does not wait.
    let now = Clock::now();
    let mut opening = Opening::begin(&controller.association(), &pool(), 1, 8, now).expect("begins");
    let deadline = Clock::now() + Nanos::from(LONG);
    while count.load(Ordering::Relaxed) == 0 {
        assert!(opening.step(now).expect("on its way").is_none());
        assert!(Clock::now() < deadline, "Connect does not arrive");
    }
    let end = now + Nanos::from(after);
    assert!(opening.step(end - Nanos(1)).expect("in time").is_none());
    let error = opening.step(end).expect_err("over");
    let Error::TimedOut { step: "Connect (I/O queue)", after: told } = error else { panic!("{error}") };
    assert_eq!(told, after);
}
