//! Controllers, their refusals, discovery, keep alive and events.

use std::net::TcpListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use spindle_nvme_initiator::nvme_spec::status::Status;
use spindle_nvme_initiator::nvme_spec::{AdminOpcode, FabricsType};
use spindle_nvme_initiator::{
    Clock, ConnectError, Controller, ControllerEvent, Error, Host, Loss, Nanos, Options, Target,
    TransportKind, discover,
};

use super::fake::{Act, BLOCK, Disk, Fake, QUEUES, TRANSFER_BYTES, nqn, options};

#[test]
fn a_controller_is_connected_enabled_and_says_what_it_is() {
    let fake = Fake::start();
    let mut controller = Controller::connect(&fake.target(), &options()).expect("connects");
    assert!(controller.is_up());
    assert_eq!((controller.queues_granted(), controller.depth_max()), (QUEUES, 127));
    assert_eq!(controller.transfer_bytes_max(), TRANSFER_BYTES);
    assert_eq!(controller.namespaces().expect("a list"), [1]);
    let namespace = controller.namespace(1).expect("a namespace");
    assert_eq!((namespace.blocks, namespace.block_bytes()), (4096, BLOCK));
    controller.shutdown().expect("says goodbye");
}

#[test]
fn a_refusal_names_the_step_and_the_status() {
    let refusing = |fctype: Option<FabricsType>, status: Status| {
        let fake = Fake::with(Box::new(move |sqe, _| match fctype {
            Some(fctype) if sqe.is_fabrics() && sqe.fctype() == fctype => Act::Fail(status),
            None if sqe.admin_opcode() == AdminOpcode::IDENTIFY => Act::Fail(status),
            Some(_) | None => Act::Execute,
        }));
        Controller::connect(&fake.target(), &options()).expect_err("refused")
    };
    let error = refusing(Some(FabricsType::CONNECT), Status::CONNECT_INVALID_HOST.dnr());
    assert!(error.to_string().starts_with("Connect: the target answered: invalid host"), "{error}");
    let error = refusing(Some(FabricsType::PROPERTY_SET), Status::INTERNAL_ERROR);
    assert!(error.to_string().starts_with("Property Set: the target answered: internal error"), "{error}");
    let error = refusing(None, Status::INVALID_FIELD.dnr());
    assert!(error.to_string().starts_with("Identify Controller: "), "{error}");
}

#[test]
fn a_queue_out_of_range_is_refused_before_anything_is_sent() {
    let fake = Fake::start();
    let mut controller = Controller::connect(&fake.target(), &options()).expect("connects");
    for (qid, depth, field) in
        [(0, 8, "I/O queues"), (QUEUES + 1, 8, "I/O queues"), (1, 128, "outstanding"), (1, 0, "outst")]
    {
        let error = controller.connect_queue_of(qid, depth).expect_err("out of range").to_string();
        assert!(error.contains(field) && error.contains("are allowed"), "{error}");
    }
    assert_eq!(controller.connect_queue_of(1, 127).expect("as long as it may be").depth(), 127);
}

#[test]
fn nobody_at_the_address_and_nobody_who_answers_are_told_apart() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("listens");
    let address = listener.local_addr().expect("address");
    let target =
        Target { transport: TransportKind::Tcp, address, nqn: nqn(), host: Host::from_uuid([7; 16]) };
    let impatient = Options { connect_timeout: Duration::from_millis(30), ..options() };
    let error = Controller::connect(&target, &impatient).expect_err("no answer comes");
    assert!(matches!(error, Error::TimedOut { step: "ICReq", .. }), "{error}");
    drop(listener);
    let error = Controller::connect(&target, &options()).expect_err("no target is there");
    assert!(matches!(error, Error::Connect { .. }), "{error}");
}

#[test]
fn a_machine_without_rdma_says_so_and_nothing_else() {
    if std::fs::read_dir("/sys/class/infiniband").is_ok_and(|mut devices| devices.next().is_some()) {
        return spindle_tests_skip::skip("this machine has RDMA");
    }
    let address = "127.0.0.1:4420".parse().expect("an address");
    let target =
        Target { transport: TransportKind::Rdma, address, nqn: nqn(), host: Host::from_uuid([7; 16]) };
    let error = Controller::connect(&target, &options()).expect_err("no RDMA");
    assert!(matches!(error, Error::Rdma(ConnectError::NoRdma)), "{error}");
    assert!(error.to_string().contains("no RDMA device"), "{error}");
}

#[test]
fn a_target_that_talks_nonsense_is_left_with_the_reason() {
    use std::io::{Read, Write};
    let listener = TcpListener::bind("127.0.0.1:0").expect("listens");
    let address = listener.local_addr().expect("address");
    let talker = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().expect("a host");
        let mut hello = [0; 128];
        stream.read_exact(&mut hello).expect("ICReq");
        stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").expect("sends");
        // The terminate request, and the end.
        let mut rest = Vec::new();
        stream.read_to_end(&mut rest).expect("reads");
        (hello[0], rest[0])
    });
    let target =
        Target { transport: TransportKind::Tcp, address, nqn: nqn(), host: Host::from_uuid([7; 16]) };
    let error = Controller::connect(&target, &options()).expect_err("no controller");
    assert!(matches!(error, Error::Lost { step: "ICReq", loss: Loss::Violation(_) }), "{error}");
    assert_eq!(talker.join().expect("a thread"), (0, 2), "ICReq, H2CTermReq");
}

#[test]
fn a_log_that_changes_while_it_is_read_is_read_again() {
    let disk = Disk::new();
    let log = Arc::clone(&disk.log);
    let mut changes = 2;
    let script = move |sqe: &spindle_nvme_initiator::nvme_spec::Sqe, _| {
        let is_entries = sqe.admin_opcode() == AdminOpcode::GET_LOG_PAGE && sqe.cdw12() > 0;
        if is_entries && !sqe.is_fabrics() && changes > 0 {
            changes -= 1;
            let mut log = log.lock().expect("lock");
            *log = (log.0 + 1, 40);
        }
        Act::Execute
    };
    let fake = Fake::at("127.0.0.1:0".parse().expect("address"), disk, Box::new(script));
    let found =
        discover(TransportKind::Tcp, fake.address, &Host::from_uuid([7; 16]), &options()).expect("a log");
    assert_eq!((found.generation, found.entries.len()), (3, 40));
    for (index, entry) in found.entries.iter().enumerate() {
        assert_eq!(entry.subnqn().expect("a name").as_str(), format!("nqn.2026-01.io.spindle:{index}"));
    }
}

#[test]
fn a_log_that_never_stands_still_and_one_without_end_are_given_up() {
    let disk = Disk::new();
    let log = Arc::clone(&disk.log);
    let changing = Arc::clone(&log);
    let script = move |sqe: &spindle_nvme_initiator::nvme_spec::Sqe, _| {
        if sqe.admin_opcode() == AdminOpcode::GET_LOG_PAGE && !sqe.is_fabrics() {
            changing.lock().expect("lock").0 += 1;
        }
        Act::Execute
    };
    let fake = Fake::at("127.0.0.1:0".parse().expect("address"), disk, Box::new(script));
    let host = Host::from_uuid([7; 16]);
    let error = discover(TransportKind::Tcp, fake.address, &host, &options()).expect_err("it changes");
    assert!(error.to_string().contains("changes faster"), "{error}");
    drop(fake);
    let disk = Disk::new();
    *disk.log.lock().expect("lock") = (1, 3);
    let endless = Arc::clone(&disk.log);
    let script = move |_: &spindle_nvme_initiator::nvme_spec::Sqe, _| {
        endless.lock().expect("lock").1 = 70_000;
        Act::Execute
    };
    let fake = Fake::at("127.0.0.1:0".parse().expect("address"), disk, Box::new(script));
    let error = discover(TransportKind::Tcp, fake.address, &host, &options()).expect_err("too long");
    assert!(error.to_string().contains("NUMREC") && error.to_string().contains("70000"), "{error}");
}

#[test]
fn keep_alive_is_sent_in_time_and_its_silence_ends_the_controller() {
    let count = Arc::new(AtomicU32::new(0));
    let counted = Arc::clone(&count);
    let fake = Fake::with(Box::new(move |sqe, _| {
        if sqe.is_fabrics() || sqe.admin_opcode() != AdminOpcode::KEEP_ALIVE {
            return Act::Execute;
        }
        if counted.fetch_add(1, Ordering::Relaxed) < 2 { Act::Execute } else { Act::Forget }
    }));
    let options = Options { keep_alive_ms: 10_000, ..options() };
    let mut controller = Controller::connect(&fake.target(), &options).expect("connects");
    // The time is an argument: half a time-out passes at each step, and the test does not wait.
    let mut now = Clock::now();
    for sent in 1..=3 {
        assert_eq!(controller.poll(now), None);
        now += Nanos::from_secs(5);
        assert_eq!(controller.poll(now), None);
        // A command behind it: when that is answered, so is what was sent before, unless it is forgotten.
        controller.namespaces().expect("an answer");
        assert_eq!(count.load(Ordering::Relaxed), sent);
        assert_eq!(controller.poll(now), None);
    }
    // The third is not answered. The association lasts for a whole time-out more, and sends no other one.
    now += Nanos(10_000_000_000 - 1);
    assert_eq!((0..3).find_map(|_| controller.poll(now)), None, "it is not over");
    assert!(controller.is_up());
    now += Nanos(1);
    let event = (0..3).find_map(|_| controller.poll(now));
    assert_eq!(event, Some(ControllerEvent::Lost(Loss::Silent(Duration::from_secs(10)))));
    assert_eq!(count.load(Ordering::Relaxed), 3);
    assert_eq!(controller.poll(now), None, "told once");
    assert!(!controller.is_up());
}

#[test]
fn an_answer_that_does_not_come_is_an_error_and_no_hang() {
    let fake = Fake::with(Box::new(|sqe, _| {
        let is_list = !sqe.is_fabrics() && sqe.admin_opcode() == AdminOpcode::IDENTIFY && sqe.cdw10() == 2;
        if is_list { Act::Forget } else { Act::Execute }
    }));
    let target = fake.target();
    // Impatient, but not so that a loaded machine cannot connect.
    let impatient = Options { connect_timeout: Duration::from_millis(1500), ..options() };
    let mut controller = Controller::connect(&target, &impatient).expect("connects");
    let error = controller.namespaces().expect_err("never answered");
    assert!(matches!(error, Error::TimedOut { step: "Identify (active namespaces)", .. }), "{error}");
    assert_eq!(controller.namespace(1).expect("the queue goes on").nsid, 1);
}
