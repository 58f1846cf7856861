//! The commands, their data, and what is refused.

use spindle_nvme_initiator::nvme_spec::status::Status;
use spindle_nvme_initiator::{
    BlockRange, Buf, Completion, Controller, Failure, HostData, IoQueue, Namespace, Options, Pool, Refusal,
};

use super::fake::{BLOCK, Fake, LONG, TRANSFER_BYTES, any, filled, options, pool};

struct Bench {
    _fake: Fake,
    _controller: Controller,
    queue: IoQueue,
    namespace: Namespace,
    pool: Pool,
}

impl Bench {
    fn new(options: &Options) -> Bench {
        let fake = Fake::start();
        let mut controller = Controller::connect(&fake.target(), options).expect("connects");
        let namespace = controller.namespace(1).expect("a namespace");
        let queue = controller.connect_queue(1).expect("a queue");
        Bench { _fake: fake, _controller: controller, queue, namespace, pool: pool() }
    }

    fn buf(&self, blocks: u32, value: u8) -> Buf {
        filled(&self.pool, blocks * BLOCK, value)
    }

    /// Wait for a command that was taken.
    fn done<E: std::fmt::Debug>(&mut self, ticket: Result<spindle_nvme_initiator::Ticket, E>) -> Completion {
        self.queue.wait(ticket.expect("taken"), LONG).expect("a completion")
    }

    fn write(&mut self, lba: u64, blocks: u32, value: u8) {
        let buf = self.buf(blocks, value);
        let ticket = self.queue.write(&self.namespace, lba, buf, false);
        assert_eq!(self.done(ticket).result, Ok(()));
    }

    /// The first byte of each block.
    fn read(&mut self, lba: u64, blocks: u32) -> Vec<u8> {
        let buf = self.buf(blocks, 0xee);
        let ticket = self.queue.read(&self.namespace, lba, buf);
        let completion = self.done(ticket);
        assert_eq!(completion.result, Ok(()));
        let buf = completion.buf.expect("the buffer comes back");
        let bytes = buf.as_slice().expect("one piece");
        bytes.chunks(BLOCK as usize).map(|block| block[0]).collect()
    }
}

#[test]
fn reads_bring_what_writes_stored_whatever_the_size_and_the_digests() {
    for digests in [false, true] {
        let options = Options { header_digest: digests, data_digest: digests, ..options() };
        let mut bench = Bench::new(&options);
        // In the capsule up to 4 KiB, by R2T beyond; received by way of the batch, and straight into the
        // buffer.
        for blocks in [1, 7, 8, 9, 16, 64, 300, TRANSFER_BYTES / BLOCK] {
            let buf = bench.pool.take(blocks * BLOCK).expect("buffer");
            let bytes: Vec<u8> = (0..blocks * BLOCK).map(|at| at.wrapping_mul(at).to_le_bytes()[1]).collect();
            let mut written = buf;
            written.copy_in(0, &bytes);
            let ticket = bench.queue.write(&bench.namespace, 5, written, true);
            assert_eq!(bench.done(ticket).result, Ok(()), "{blocks} blocks");
            let empty = bench.buf(blocks, 0);
            let ticket = bench.queue.read(&bench.namespace, 5, empty);
            let completion = bench.done(ticket);
            assert_eq!(completion.result, Ok(()));
            assert!(completion.buf.expect("buffer").equals_at(0, &bytes), "{blocks} blocks");
        }
    }
}

#[test]
fn every_command_of_the_set_does_what_it_says() {
    let mut bench = Bench::new(&options());
    bench.write(10, 4, 0xaa);
    let namespace = bench.namespace;
    let ticket = bench.queue.flush(&namespace);
    assert_eq!(bench.done(ticket).result, Ok(()));
    let ticket = bench.queue.verify(&namespace, BlockRange { lba: 10, blocks: 4 });
    assert_eq!(bench.done(ticket).result, Ok(()));
    let ticket = bench.queue.write_zeroes(&namespace, BlockRange { lba: 11, blocks: 1 }, false);
    assert_eq!(bench.done(ticket).result, Ok(()));
    assert_eq!(bench.read(10, 4), [0xaa, 0, 0xaa, 0xaa]);
    let ranges = [BlockRange { lba: 10, blocks: 1 }, BlockRange { lba: 13, blocks: 1 }];
    let buf = bench.pool.take(4096).expect("buffer");
    let ticket = bench.queue.deallocate(&namespace, &ranges, buf);
    let completion = bench.done(ticket);
    assert_eq!((completion.result, completion.buf.map(|buf| buf.len())), (Ok(()), Some(32)));
    assert_eq!(bench.read(10, 4), [0, 0, 0xaa, 0]);
    bench.write(20, 2, 0xbb);
    let ranges = [BlockRange { lba: 12, blocks: 1 }, BlockRange { lba: 20, blocks: 2 }];
    let buf = bench.pool.take(4096).expect("buffer");
    let ticket = bench.queue.copy(&namespace, &ranges, 100, buf);
    assert_eq!(bench.done(ticket).result, Ok(()));
    assert_eq!(bench.read(100, 4), [0xaa, 0xbb, 0xbb, 0]);
}

#[test]
fn a_compare_says_whether_and_a_fused_write_only_happens_then() {
    let mut bench = Bench::new(&options());
    let namespace = bench.namespace;
    bench.write(0, 1, 1);
    let different = bench.buf(1, 2);
    let ticket = bench.queue.compare(&namespace, 0, different);
    assert_eq!(bench.done(ticket).result, Err(Failure::Status(Status::COMPARE_FAILURE)));
    for (expected, new, results, after) in [
        (1, 3, [Ok(()), Ok(())], 3),
        (
            9,
            4,
            [Status::COMPARE_FAILURE, Status::ABORTED_FAILED_FUSED]
                .map(|status| Err(Failure::Status(status))),
            3,
        ),
    ] {
        let (compare, write) = (bench.buf(1, expected), bench.buf(1, new));
        let tickets = bench.queue.compare_and_write(&namespace, 0, compare, write).expect("taken");
        assert_eq!(tickets.map(|ticket| bench.done(Ok::<_, ()>(ticket)).result), results);
        assert_eq!(bench.read(0, 1), [after]);
    }
}

#[test]
fn an_error_is_the_targets_answer_and_the_queue_goes_on() {
    let mut bench = Bench::new(&options());
    let buf = bench.buf(8, 0x55);
    let ticket = bench.queue.read(&bench.namespace, 4095, buf);
    let completion = bench.done(ticket);
    assert_eq!(completion.result, Err(Failure::Status(Status::LBA_OUT_OF_RANGE.dnr())));
    assert_eq!(completion.buf.map(|buf| buf.len()), Some(4096), "the buffer comes back");
    let sqe = spindle_nvme_initiator::nvme_spec::Sqe::new(0xc0, 0, 1);
    let ticket = bench.queue.submit(sqe, HostData::None);
    assert_eq!(bench.done(ticket).result, Err(Failure::Status(Status::INVALID_OPCODE.dnr())));
    assert_eq!(bench.read(4095, 1), [0]);
}

#[test]
fn what_cannot_be_sent_is_refused_with_its_buffer_and_the_reason() {
    let mut bench = Bench::new(&Options { depth: 3, ..options() });
    let namespace = bench.namespace;
    let odd = bench.pool.take(700).expect("buffer");
    let refused = bench.queue.read(&namespace, 0, odd).expect_err("no whole blocks");
    assert_eq!(refused.why, Refusal::Length { bytes: 700, block_bytes: BLOCK });
    assert_eq!(refused.buf.map(|buf| buf.len()), Some(700));
    let buf = bench.buf(1, 0);
    let refused = bench.queue.deallocate(&namespace, &[], buf).expect_err("no ranges");
    assert_eq!(refused.why, Refusal::Ranges { count: 0, room: 32 });
    assert!(bench.queue.write_zeroes(&namespace, BlockRange { lba: 0, blocks: 65_537 }, false).is_err());
    for _ in 0..2 {
        let buf = bench.buf(1, 1);
        bench.queue.write(&namespace, 0, buf, false).expect("taken");
    }
    let (compare, write) = (bench.buf(1, 0), bench.buf(1, 0));
    let refused =
        bench.queue.compare_and_write(&namespace, 0, compare, write).expect_err("room for one only");
    assert!(refused.why == Refusal::Full && refused.compare.is_some() && refused.write.is_some());
    bench.queue.flush(&namespace).expect("taken");
    let buf = bench.buf(1, 1);
    let refused = bench.queue.write(&namespace, 0, buf, false).expect_err("full");
    assert!(refused.why == Refusal::Full && refused.buf.is_some());
    for _ in 0..3 {
        assert_eq!(any(&mut bench.queue).result, Ok(()));
    }
    assert_eq!((bench.queue.room(), bench.queue.outstanding()), (3, 0));
}

#[test]
fn a_transfer_beyond_what_the_controller_moves_is_refused() {
    let mut bench = Bench::new(&options());
    assert_eq!(bench.queue.transfer_bytes_max(), TRANSFER_BYTES);
    let zone = spindle_nvme_initiator::ZoneSpec { buffer_bytes: 512 << 10, count: 1 };
    let large = Pool::new(&[zone], spindle_nvme_initiator::Pages::Base).expect("pool");
    let buf = large.take(TRANSFER_BYTES + BLOCK).expect("buffer");
    let refused = bench.queue.read(&bench.namespace, 0, buf).expect_err("too long");
    assert!(matches!(refused.why, Refusal::TooLong { allowed: TRANSFER_BYTES, .. }));
}
