//! In steady state nothing allocates.

use spindle_nvme_initiator::{Clock, Controller, Nanos, Options, QueueSet};
use spindle_reactor::alloc_count::allocations_here;

use super::fake::{Fake, LONG, any, filled, options, pool};

#[test]
fn reads_and_writes_allocate_nothing() {
    let fake = Fake::start();
    let mut controller =
        Controller::connect(&fake.target(), &Options { depth: 16, ..options() }).expect("connects");
    let namespace = controller.namespace(1).expect("a namespace");
    let mut set = QueueSet::new(64 << 10).expect("a set");
    for qid in 1..=8 {
        set.add(controller.connect_queue(qid).expect("a queue")).expect("added");
    }
    let pool = pool();
    // In the capsule, by R2T, through the batch, straight into the buffer.
    for (index, bytes) in [512, 4096, 65_536].into_iter().cycle().take(24).enumerate() {
        let buf = filled(&pool, bytes, 7);
        set.queue_mut(index % 8).read(&namespace, 0, buf).expect("taken");
    }
    let (mut done, mut before, deadline) = (0, 0, Clock::now() + Nanos::from(LONG));
    while done < 6000 {
        set.poll(Clock::now(), |_, queue| {
            while let Some(completion) = queue.next_completion() {
                done += 1;
                let (buf, lba) = (completion.buf.expect("a buffer"), done % 64);
                let ticket = match done % 2 {
                    0 => queue.read(&namespace, lba, buf),
                    _ => queue.write(&namespace, lba, buf, false),
                };
                ticket.expect("taken");
            }
        });
        if done < 1000 {
            before = allocations_here();
        }
        assert!(Clock::now() < deadline, "{done} done");
    }
    assert_eq!(allocations_here() - before, 0, "in {} commands", done - 1000);
}

#[test]
fn waiting_for_one_among_others_allocates_nothing() {
    let fake = Fake::start();
    let mut controller =
        Controller::connect(&fake.target(), &Options { depth: 16, ..options() }).expect("connects");
    let namespace = controller.namespace(1).expect("a namespace");
    let mut queue = controller.connect_queue(1).expect("a queue");
    let pool = pool();
    let mut before = 0;
    for round in 0..200 {
        if round == 50 {
            before = allocations_here();
        }
        let one = queue.read(&namespace, 0, filled(&pool, 4096, 1)).expect("taken");
        for lba in 0..8 {
            queue.read(&namespace, lba, filled(&pool, 512, 1)).expect("taken");
        }
        queue.wait(one, LONG).expect("a completion");
        for _ in 0..8 {
            any(&mut queue);
        }
    }
    assert_eq!(allocations_here() - before, 0);
}
