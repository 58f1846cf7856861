//! Namespaces that come and go under a connected host.

use std::time::Instant;

use rustix::process::Signal;
use spindle_nvme_initiator::nvme_spec::admin::AsyncNotice;
use spindle_nvme_initiator::nvme_spec::log::LogId;
use spindle_nvme_initiator::nvme_spec::status::Status;
use spindle_nvme_initiator::{Clock, Controller, ControllerEvent, Failure};
use spindle_tests::loopback::{Folder, LONG, SUBSYSTEM, config, free_port};

use super::{NULL, RAM, V4, buf, connect, done, pool};

/// Wait until the controller tells that namespaces have changed.
pub(super) fn wait_for_notice(controller: &mut Controller) {
    let begin = Instant::now();
    loop {
        match controller.poll(Clock::now()) {
            Some(ControllerEvent::Async(event)) => {
                assert_eq!(event.as_notice(), Some(AsyncNotice::NAMESPACE_CHANGED));
                assert_eq!(event.log(), LogId::CHANGED_NAMESPACES);
                return;
            }
            Some(ControllerEvent::Lost(loss)) => panic!("{loss}"),
            Some(ControllerEvent::Former(_)) | None => assert!(begin.elapsed() < LONG, "no event came"),
        }
    }
}

/// The changed namespaces; `rae`: they stay in the list.
fn changed(controller: &mut Controller, rae: bool) -> Vec<u32> {
    let page = controller.log_page(LogId::CHANGED_NAMESPACES, 0, 0, 4096, rae).expect("the list");
    let nsids = page.chunks_exact(4).map(|nsid| u32::from_le_bytes(nsid.try_into().expect("4 bytes")));
    let list: Vec<u32> = nsids.collect();
    let count = list.iter().position(|nsid| *nsid == 0).unwrap_or(list.len());
    assert!(list[count..].iter().all(|nsid| *nsid == 0), "zeroes behind the list");
    list[..count].to_vec()
}

#[test]
fn a_connected_host_is_told_which_namespaces_came_and_went() {
    let address = free_port(V4);
    let folder = Folder::new("namespaces");
    let file = folder.file_disk("second", "16MiB");
    let mut served = folder.serve(&config(2, address, &[RAM.to_owned()]));
    let (mut controller, mut queue) = connect(address);
    let first = controller.namespace(1).expect("a namespace");
    let pool = pool();
    assert_eq!(changed(&mut controller, false), [0_u32; 0]);

    // Two more.
    folder.write(&config(2, address, &[RAM.to_owned(), file.clone(), NULL.to_owned()]));
    served.signal(Signal::HUP);
    wait_for_notice(&mut controller);
    assert_eq!(controller.namespaces().expect("a list"), [1, 2, 3]);
    assert_eq!(changed(&mut controller, true), [2, 3]);
    assert_eq!(changed(&mut controller, false), [2, 3], "it stays while the event is retained");
    assert_eq!(changed(&mut controller, false), [0_u32; 0], "it was read");
    let second = controller.namespace(2).expect("a namespace");
    let ticket = queue.write(&second, 0, buf(&pool, 4096, 5), false).expect("taken");
    done(&mut queue, ticket);

    // The first goes; the queue, and what was written to the second, stay.
    let without_first = format!(
        "[reactor]\ncores = [0, 1]\npin = false\n[[listener]]\naddress = \"{address}\"\n\
         [[subsystem]]\nnqn = \"{SUBSYSTEM}\"\nallow_any_host = true\n\
         [[subsystem.namespace]]\nnsid = 2\ndisk = \"d2\"\n[[disk]]\nname = \"d2\"\n{file}\n"
    );
    folder.write(&without_first);
    served.signal(Signal::HUP);
    wait_for_notice(&mut controller);
    assert_eq!(changed(&mut controller, false), [1, 3]);
    assert_eq!(controller.namespaces().expect("a list"), [2]);
    // When a host is told, all cores have the new configuration.
    let ticket = queue.read(&first, 0, buf(&pool, 4096, 0)).expect("taken");
    let result = queue.wait(ticket, LONG).expect("an answer").result;
    let refusal = Status::INVALID_NAMESPACE_OR_FORMAT.dnr().more();
    assert_eq!(result, Err(Failure::Status(refusal)), "for good, and in the error log");
    let ticket = queue.compare(&second, 0, buf(&pool, 4096, 5)).expect("taken");
    done(&mut queue, ticket);
    drop(queue);
    controller.shutdown().expect("ends in order");
    served.wait_for("configuration read again");
    served.terminate();
}
